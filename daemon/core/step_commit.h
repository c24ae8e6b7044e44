/* The end of a step: what a decision is made of, and the commit, which records the first decision
 * that is made and begins to apply it. */
#ifndef SHD_STEP_COMMIT_H
#define SHD_STEP_COMMIT_H

#include "daemon/core/step.h"

/* SHD_OK: *ret_prepared is the record of `step` (the sealed one or the one before)
 * or, for an older one, says that it is over (only a worker without a part in a step can come so
 * late). That of the sealed one is a promise, kept in the ledger: its gradients are not given up
 * any more, unless another owner has given none. SHD_PENDING: gradients are missing; ask again
 * after SEALED. SHD_ESTEP: too new. SHD_ESTOPPED: a guard has stopped training (step_guard.h). */
int step_prepare(struct step *s, uint64_t step, struct step_prepared *ret_prepared,
                 struct shd_err *e);

/* What the next commit writes into the history beside its decision and metrics: the norm as the
 * committer says, and the time. */
void step_seen(struct step *s, double norm, uint64_t time_ns);

/* Likewise, what the guard's windows (step_guard.h) are to keep of it: doubles, in any place, of
 * each of their units, borrowed until step_commit(); bytes 0: nothing. Where there are no windows
 * it is not looked at. Errors: SHD_EINVAL it is of other units. */
int step_seen_units(struct step *s, const uint8_t *norms, size_t bytes, struct shd_err *e);

/* Is the next commit's decision on record at owner 0? Then a replica of owner 0 takes it as it is,
 * as the other owners do: it may have been told later what is set, or returned gradients sooner. */
void step_recorded(struct step *s, bool recorded);

/* With the answer to a Prepare, at owner 0: step_unit_limits(), at most limit_count of each unit.
 */
uint32_t step_prepare_units(const struct step *s, uint32_t first, uint32_t count,
                            double *ret_limits);

/* With the answer to one of a step with a decision, at owner 0: what was seen of its units, as
 * step_seen_units() has it. Returns how many; 0: nothing is known. ret_norms NULL: only how many
 * there can be. */
uint32_t step_prepare_norms(const struct step *s, uint64_t step, double *ret_norms);

enum step_committed {
    STEP_COMMITTED_FIRST, /* this call's decision was recorded */
    STEP_COMMITTED_AGAIN, /* an earlier one counts */
    STEP_COMMITTED_OVER,  /* so long ago that the decision is forgotten */
};

/* SHD_OK: *ret_decision is the one that counts for `step` (unless it is OVER): the first one ever
 * given. *ret_how says which it was. blob: the client's own state, kept with the step; data NULL:
 * the last one stays. SHD_PENDING: all gradients are in and their sum of squares is being formed,
 * as after a crash of who was SEALED and said so: ask again after SEALED. SHD_ESTEP: gradients are
 * missing, or too new. SHD_EINVAL: an update with gradients that are not finite, or what no guard
 * decides, or comes from no unit. SHD_ERANGE: a blob
 * above LEDGER_BLOB_BYTES, or step LEDGER_STEP_MAX. SHD_ENOTSUP: ledger_decision_room().
 * Of a put: SHD_PENDING, too, while the step before is applied; there must be no gradients, or
 * step_put_clear() has dropped them. */
int step_commit(struct step *s, uint64_t step, const struct decision *decision,
                struct step_blob blob, struct decision *ret_decision, enum step_committed *ret_how,
                struct step_actions *ret_actions, struct shd_err *e);

#endif
