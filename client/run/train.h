/* What the executor needs of a step's bookkeeping beyond the public calls. */
#ifndef SHD_TRAIN_H
#define SHD_TRAIN_H

#include "client/session/session.h"

/* Is an array handed out for the gradient of unit in micro-batch micro? */
bool train_grad_open(struct shd_model *m, uint32_t micro, uint32_t unit);

#endif
