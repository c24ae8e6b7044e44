/* What a step came from that is skipped (client/paths/cause.h): told to who finds it out, kept with
 * the commit, and said. Loop thread. */
#ifndef SHD_SKIPPED_H
#define SHD_SKIPPED_H

#include <stdint.h>

struct decision;
struct model;
struct shd_err;

/* Sums of squares of the gradient of a step that is sealed and has no decision, as
 * wire_prepared.unit_sums. *ret_sums: the caller's to free, *ret_count sums; 0: they are not known.
 * Errors: SHD_ERANGE no such unit or group; SHD_ENOMEM. */
struct skipped_ask {
    uint64_t step;
    uint32_t unit_sums, part_sums; /* as in wire_prepare */
    uint32_t most;                 /* so many sums at once */
};
int skipped_sums(const struct model *m, const struct skipped_ask *ask, uint8_t **ret_sums,
                 uint32_t *ret_count, struct shd_err *e);

/* Before the commit of a decision: who sent what it names, for the ledger. */
void skipped_sender(struct model *m, uint64_t step, const struct decision *d);

/* The step was decided so: to the log, if it is skipped. */
void skipped_say(const struct model *m, uint64_t step, const struct decision *d);

#endif
