/* A plan as JSON, for people: `shardctl plan --ops` prints it, an editor changes it, and
 * shd_set_plan() runs it. docs/schedules.md has the schema.
 *
 * Printed in one way only, an operation a line: what was printed, read and printed again is the
 * same text, and what was read is the plan that was printed. Read with as much as `shardctl plan
 * --json` prints around a plan, of which costs, times and drawings are not looked at: they follow
 * from the rest. Nothing in it is trusted. */
#ifndef SHD_PLAN_TEXT_H
#define SHD_PLAN_TEXT_H

#include <stddef.h>

#include "client/plan/plan.h"

#define PLAN_TEXT_BYTES_MAX ((size_t)64 << 20)
#define PLAN_OPS_MAX        (UINT32_C(1) << 20)

/* Read json[bytes] (NUL not needed) as a plan for this model. Each operation is one, with a unit of
 * the model and a micro-batch of the plan; whether they make sense together is plan_check()'s
 * question. ret_plan has its cost. Errors: SHD_EINVAL, SHD_ERANGE name the operation or the field,
 * what it is and what it must be; SHD_ESPEC it is a plan for other units; SHD_ENOMEM. */
int plan_text_parse(const char *json, size_t bytes, const struct spec *spec,
                    struct plan_policy *ret_policy, struct plan *ret_plan, struct shd_err *e);

/* *ret_text, with a NUL, is the caller's to free. Errors: SHD_ERANGE more than PLAN_OPS_MAX
 * operations, or PLAN_TEXT_BYTES_MAX; SHD_ENOMEM. */
int plan_text_write(const struct spec *spec, const struct plan_policy *policy,
                    const struct plan *plan, char **ret_text, struct shd_err *e);

#endif
