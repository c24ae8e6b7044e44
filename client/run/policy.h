/* What a model's policy means for its session: which path, which memory. */
#ifndef SHD_POLICY_H
#define SHD_POLICY_H

#include "client/session/session.h"

/* Before the first gradient of a model: make what the policy needs for them; from then on it
 * stays as it is. Once only. Errors: those of plan_build(); SHD_ENOMEM. */
int policy_start(struct shd_model *m, struct shd_err *e);

/* A model on the copy path: make what that needs, unless it is there. Errors: those of plan_build()
 * and copy_new(). */
int policy_use_copy(struct shd_model *m, struct shd_err *e);

#endif
