/* Making room for a put in a step: what was returned of it counts no more.
 *
 * Owner 0 takes a put only into a step of which it has no gradient at all (step_put_check()). Once
 * it has recorded the put no other decision about that step can come to be, for that needs a
 * Prepared of owner 0. So the others drop what they have got of the step since: their gradients are
 * credited as stale, and who returned them is told by its commit that the step is over. */
#ifndef SHD_STEP_PUT_H
#define SHD_STEP_PUT_H

#include <stdbool.h>
#include <stdint.h>

struct decision;
struct shd_err;
struct step;
struct step_actions;

/* SHD_OK: nothing was returned of `step`, the collecting one. SHD_EBUSY: something was. SHD_ESTEP:
 * another step is open. */
int step_put_check(const struct step *s, uint64_t step, struct shd_err *e);

/* Can a put say of each unit how many updates count? SHD_ENOTSUP: not in this ledger. SHD_ERANGE:
 * not so many. updates: as step_put_updates(). */
int step_put_check_updates(const struct step *s, const uint64_t *updates, struct shd_err *e);

/* A decision about the step that is collected: does it say what the ledger can hold? SHD_EINVAL: it
 * counts the puts otherwise than the model does, or sets the updates to what cannot be. */
int step_put_decision(const struct step *s, const struct decision *decision, struct shd_err *e);

/* Before the commit: no kernel is at a gradient, of a round that was given up (step_reset.h). Not:
 * until DROPPED. */
bool step_put_idle(const struct step *s);

/* Drop what was returned of the open step. SHD_OK: there is nothing (any more). SHD_PENDING: carry
 * the actions out and call again, when there are none after DROPPED. Also SHD_OK where another step
 * is open, or the one before is still applied. */
int step_put_clear(struct step *s, uint64_t step, struct step_actions *ret_actions);

/* Before the commit: of each unit 1 + the updates that count as applied; 0: as the decision says.
 * updates[units], borrowed until the commit is made; NULL: as the decision says of all. */
void step_put_updates(struct step *s, const uint64_t *updates);

#endif
