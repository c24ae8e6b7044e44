/* See decision.h. */
#include "proto/base/decision.h"

#include <math.h>
#include <string.h>

#include "proto/base/check.h"

const char *step_phase_name(enum step_phase phase)
{
    switch (phase) {
    case STEP_OPEN:
        return "OPEN";
    case STEP_SEALED:
        return "SEALED";
    case STEP_APPLYING:
        return "APPLYING";
    }
    return "?";
}

static uint64_t bits(double x)
{
    uint64_t raw;
    memcpy(&raw, &x, sizeof raw);
    return raw;
}

struct decision_rates decision_rates_of(const struct decision *d, uint32_t g)
{
    struct decision_rates r = { NAN, NAN, NAN, NAN };
    if (d->rate_count == 0)
        return r;
    CHECK((g + 1) * DECISION_RATES <= d->rate_count);
    const double *at = &d->rates[(size_t)g * DECISION_RATES];
    r = (struct decision_rates){ at[0], at[1], at[2], at[3] };
    return r;
}

double decision_eps_of(const struct decision *d, uint32_t g)
{
    CHECK(d->eps_count == 0 || g < d->eps_count);
    return d->eps_count == 0 ? (double)NAN : d->eps[g];
}

/* A float keeps its identity as a double. */
bool decision_equal(const struct decision *a, const struct decision *b)
{
    return a->skip == b->skip && bits((double)a->scale) == bits((double)b->scale) &&
           bits(a->lr) == bits(b->lr) && bits(a->loss_scale) == bits(b->loss_scale) &&
           a->good_steps == b->good_steps && bits(a->divisor) == bits(b->divisor) &&
           a->rate_count == b->rate_count && a->put == b->put && a->puts == b->puts &&
           a->guard.what == b->guard.what && a->guard.stop == b->guard.stop &&
           a->guard.rewind == b->guard.rewind && bits(a->guard.value) == bits(b->guard.value) &&
           bits(a->guard.bound) == bits(b->guard.bound) && a->micro_batches == b->micro_batches &&
           a->eps_count == b->eps_count &&
           memcmp(a->eps, b->eps, a->eps_count * sizeof *a->eps) == 0 &&
           memcmp(a->rates, b->rates, a->rate_count * sizeof *a->rates) == 0;
}
