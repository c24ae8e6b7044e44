/* See guard_window.h. */
#include "proto/share/guard_window.h"

#include <math.h>

#include "proto/base/check.h"

/* What the rule looks at in a step; NaN: it does not count. */
static double value_of(const struct history_row *row, enum guard_what what)
{
    double x = row->norm;
    if (row->skipped != 0)
        return (double)NAN;
    if (what == GUARD_LOSS_ZSCORE)
        x = row->metric_count > 0 && row->reported > 0 ? row->metrics[0] / row->reported
                                                       : (double)NAN;
    return isfinite(x) ? x : (double)NAN;
}

double guard_window_limit(const struct guard_rule *rule, const double *x)
{
    double sum = 0, squares = 0;
    for (uint32_t i = rule->window; i-- > 0;)
        sum += x[i];
    const double mean = sum / rule->window;
    for (uint32_t i = rule->window; i-- > 0;)
        squares += (x[i] - mean) * (x[i] - mean);
    const double sigma = sqrt(squares / rule->window), least = fabs(mean) * GUARD_SIGMA_FLOOR;
    const double limit = mean + rule->threshold * (sigma > least ? sigma : least);
    return isfinite(limit) ? limit : (double)INFINITY;
}

static double window_limit(const struct guard_rule *rule, const struct history_slot *ring,
                           uint32_t slots, uint64_t commits)
{
    double x[GUARD_WINDOW_MAX];
    const uint64_t look = (uint64_t)GUARD_LOOK_BACK * rule->window;
    const uint64_t oldest = commits > look ? commits - look : 0;
    uint32_t count = 0;
    CHECK(rule->window <= GUARD_WINDOW_MAX);
    for (uint64_t step = commits; slots > 0 && count < rule->window && step-- > oldest;) {
        struct history_row row;
        const double value = history_get(ring, slots, commits, step, &row)
                                 ? value_of(&row, rule->what)
                                 : (double)NAN;
        if (!isnan(value))
            x[count++] = value;
    }
    return count == rule->window ? guard_window_limit(rule, x) : (double)INFINITY;
}

static double limit_of(const struct guard_rule *rule, const struct history_slot *ring,
                       uint32_t slots, uint64_t commits)
{
    if (guard_unit_windowed(rule))
        return (double)INFINITY; /* each unit has its own */
    return guard_windowed(rule->what) ? window_limit(rule, ring, slots, commits) : rule->threshold;
}

void guard_window_limits(const struct guard *guard, const struct history_slot *ring, uint32_t slots,
                         uint64_t commits, struct guard_limits *ret_limits)
{
    ret_limits->count = 0;
    for (uint32_t i = 0; guard != NULL && i < guard->count; i++) {
        const struct guard_rule *rule = &guard->rules[i];
        guard_limits_add(ret_limits, rule, limit_of(rule, ring, slots, commits));
    }
}
