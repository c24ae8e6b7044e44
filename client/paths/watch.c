/* See watch.h. */
#include "client/paths/watch.h"

#include <math.h>

#include "proto/base/check.h"
#include "proto/base/decision.h"
#include "proto/spec/guard.h"

void watch_begin(struct watch *w, const uint8_t *watched)
{
    *w = (struct watch){ .watched = watched };
}

void watch_unit(struct watch *w, const struct guard_limits *limits, uint32_t unit, double norm,
                double squares)
{
    for (uint32_t i = 0; i < limits->count / GUARD_LIMIT_NUMBERS; i++) {
        const double *at = &limits->numbers[(size_t)i * GUARD_LIMIT_NUMBERS];
        const bool mine = at[0] == GUARD_UNIT_ABOVE && (w->watched[unit] >> i & 1) != 0;
        if (!mine || !isfinite(at[2]) || norm <= at[2] || (w->rule > 0 && w->rule < i + 1))
            continue;
        if (w->rule == i + 1 && norm / at[2] <= w->norm / w->limit)
            continue;
        w->rule = i + 1;
        w->unit = unit;
        w->norm = norm;
        w->limit = at[2];
        w->squares = squares;
    }
}

/* The place of the rule that the decision is by; behind all others: of none. */
static uint32_t place_of(const struct guard_limits *limits, const struct decision_guard *g)
{
    uint32_t i = 0;
    while (g->what != GUARD_NONE && i < limits->count / GUARD_LIMIT_NUMBERS) {
        const double *at = &limits->numbers[(size_t)i * GUARD_LIMIT_NUMBERS];
        if (at[0] == g->what && at[2] == g->bound)
            return i;
        i++;
    }
    return GUARD_RULES_MAX;
}

bool watch_end(const struct watch *w, const struct guard_limits *limits, struct decision *d)
{
    if (d->skip && d->guard.what == GUARD_NONE)
        return false; /* there is no norm: nothing to divide by */
    if (w->rule == 0 || place_of(limits, &d->guard) < w->rule - 1)
        return false;
    const double *at = &limits->numbers[(size_t)(w->rule - 1) * GUARD_LIMIT_NUMBERS];
    d->skip = true;
    d->scale = 0;
    d->guard = (struct decision_guard){ .what = GUARD_UNIT_ABOVE,
                                        .stop = at[1] != 0,
                                        .rewind = at[1] == 2,
                                        .value = w->norm,
                                        .bound = at[2] + 0.0 };
    return true;
}
