/* What the executor needs of a step's bookkeeping beyond the public calls. */
#ifndef SHD_TRAIN_H
#define SHD_TRAIN_H

#include "client/session/session.h"

/* Is an array handed out for the gradient of unit in micro-batch micro? */
bool train_grad_open(struct shd_model *m, uint32_t micro, uint32_t unit);

/* Drop gradients of a group (GRADS_ALL: of all) that are handed out, and sums that are not
 * complete. Those whose return has begun stay: repeating it goes on where it broke off. */
void train_drop_grads(struct shd_model *m, uint32_t group);

#endif
