/* Checking a plan as data; see plan.h. */
#ifndef SHD_PLAN_CHECK_H
#define SHD_PLAN_CHECK_H

#include "client/plan/plan.h"

/* Check a plan as data, without knowing how it was built: every compute has its unit (and those
 * it uses) fetched and waited for, nothing is freed before its last use or twice, every trainable
 * unit of the trace is returned exactly once per group of micro-batches, bounds hold after every
 * operation, PREPARE and COMMIT come last, and plan->cost is what a replay counts. SHD_EINVAL
 * names the operation. */
int plan_check(const struct plan *plan, const struct spec *spec, const struct plan_policy *policy,
               const struct plan_trace *trace, struct shd_err *e);

#endif
