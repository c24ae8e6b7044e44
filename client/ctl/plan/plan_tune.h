/* shardctl plan --tune: the policies and prefetch distances that make a difference to a model, by
 * the seconds that they are predicted to take. */
#ifndef SHD_CTL_PLAN_TUNE_H
#define SHD_CTL_PLAN_TUNE_H

#include <stdbool.h>
#include <stdio.h>

#include "client/ctl/plan/plan_source.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

struct plan_clock;

/* Print them on out (NULL: do not), the quickest first, and make ask->policy that. Of those as
 * quick as each other, to a thousandth, the one that holds least. Errors: SHD_ENOENT there are no
 * rates, or nobody says what compute takes; SHD_ERANGE no policy keeps the bounds; SHD_ENOMEM. */
int plan_tune(const struct spec *spec, struct plan_ask *ask, const struct plan_clock *clock,
              bool as_json, FILE *out, struct shd_err *e);

#endif
