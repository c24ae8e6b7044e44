/* Counting a plan. See plan.h. */
#ifndef SHD_PLAN_COST_H
#define SHD_PLAN_COST_H

#include "client/plan/plan.h"

/* Replay plan->ops and count. Takes any plan whose operations name units of the spec; whether
 * they make sense is plan_check()'s question. Errors: SHD_ENOMEM. */
int plan_count(const struct plan *plan, const struct spec *spec, enum shd_dtype grad_dtype,
               struct plan_cost *ret_cost, struct shd_err *e);

/* Bytes of a unit's parameters as a worker holds them (publish dtype) and as it fetches them (the
 * same, or in codes), of its gradient in dtype, and as it is returned (so, or in codes), without
 * padding but that of blocks of codes; 0 gradient for a frozen unit, fp32 for a mean. */
uint64_t plan_unit_param_bytes(const struct spec *spec, uint32_t unit);
uint64_t plan_unit_fetched_bytes(const struct spec *spec, uint32_t unit);
uint64_t plan_unit_grad_bytes(const struct spec *spec, uint32_t unit, enum shd_dtype dtype);
uint64_t plan_unit_returned_bytes(const struct spec *spec, uint32_t unit, enum shd_dtype dtype);

/* Slots that a worker asks each owner for. Staged gradients need one only while owners read one:
 * one more can be filled meanwhile; else one more than it holds at once, for the same reason. More,
 * up to 16, where there are many small units. */
uint32_t plan_slots_for(const struct spec *spec, bool staged, uint32_t live_grads);

/* The same, when it runs this plan. */
uint32_t plan_slots(const struct spec *spec, const struct plan_policy *policy,
                    const struct plan *plan);

#endif
