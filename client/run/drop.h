/* Dropping gradients that are not wanted any more. */
#ifndef SHD_DROP_H
#define SHD_DROP_H

#include <stdint.h>

struct shd_model;

/* Drop gradients of a group (GRADS_ALL: of all) that are handed out, and sums that are not
 * complete. Those whose return has begun stay: repeating it goes on where it broke off. */
void drop_grads(struct shd_model *m, uint32_t group);

/* Forget all that this worker has of the open step, which was reset. */
void drop_step(struct shd_model *m);

#endif
