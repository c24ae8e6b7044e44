/* Dropping gradients that are not wanted any more. */
#ifndef SHD_DROP_H
#define SHD_DROP_H

#include <stdint.h>

struct shd_model;

/* Drop gradients of a group (GRADS_ALL: of all) that are handed out, and sums that are not
 * complete. Where a return broke off its array is free once the owners that were told have let go
 * of it: what comes in its place goes to all, and those have it already. */
void drop_grads(struct shd_model *m, uint32_t group);

/* Forget all that this worker has of the open step, which was reset. */
void drop_step(struct shd_model *m);

#endif
