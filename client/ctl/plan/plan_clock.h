/* Seconds for `shardctl plan`: the rates of this machine (rates.h), what the workers' compute
 * takes, and what runs it. */
#ifndef SHD_CTL_PLAN_CLOCK_H
#define SHD_CTL_PLAN_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

#include "client/ctl/plan/plan_source.h"
#include "client/ctl/plan/rates.h"
#include "client/plan/plan_time.h"
#include "proto/base/status.h"

struct plan_clock {
    bool has_rates;
    struct plan_rates rates;
    char date[RATES_DATE_BYTES];
    const char *compute_from;         /* "given", "trace"; NULL: not known */
    double *forward_ns, *backward_ns; /* owned, [units]; NULL: compute is not known */
    struct shd_err why;               /* no rates, or no compute */
};

/* Rates from --rates or the file that --calibrate wrote, compute from --compute or, of an open
 * model, from its workers. That there are none is no error but where a flag named them. */
int plan_clock_open(const struct plan_ask *ask, const struct spec *spec,
                    struct plan_clock *ret_clock, struct shd_err *e);
void plan_clock_close(struct plan_clock *c);

/* The step of a plan under this policy; the clock has rates. SHD_ERANGE: too large. */
int plan_clock_time(const struct plan_clock *c, const struct spec *spec, const struct plan_ask *ask,
                    const struct plan_policy *policy, const struct plan *plan,
                    struct plan_time *ret_time, struct shd_err *e);

void plan_clock_print(const struct plan_clock *c, const struct spec *spec,
                      const struct plan_ask *ask, const struct plan *plan, FILE *out);

/* NULL without rates. */
json_t *plan_clock_json(const struct plan_clock *c, const struct spec *spec,
                        const struct plan_ask *ask, const struct plan_policy *policy,
                        const struct plan *plan);

#endif
