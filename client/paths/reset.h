/* Having all owners give up what they have of the open step (daemon/core/step_reset.h says how they
 * agree). Slots of control_ops. */
#ifndef SHD_PATHS_RESET_H
#define SHD_PATHS_RESET_H

#include "client/session/session.h"

uint64_t reset_attempt(const struct shd_model *m);
int reset_owners(struct shd_model *m, uint64_t *ret_attempt, struct shd_err *e);

#endif
