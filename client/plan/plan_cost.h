/* Counting a plan. See plan.h. */
#ifndef SHD_PLAN_COST_H
#define SHD_PLAN_COST_H

#include "client/plan/plan.h"

/* Replay plan->ops and count. Takes any plan whose operations name units of the spec; whether
 * they make sense is plan_check()'s question. Errors: SHD_ENOMEM. */
int plan_count(const struct plan *plan, const struct spec *spec, enum shd_dtype grad_dtype,
               struct plan_cost *ret_cost, struct shd_err *e);

#endif
