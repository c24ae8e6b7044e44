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

static const double *rule_of(const struct guard_limits *limits, uint32_t i)
{
    return &limits->numbers[(size_t)i * GUARD_LIMIT_NUMBERS];
}

uint32_t watch_own(const struct guard_limits *limits, uint8_t watched)
{
    uint32_t own = 0;
    for (uint32_t i = 0; i < limits->count / GUARD_LIMIT_NUMBERS; i++)
        own += (watched >> i & 1) != 0 && rule_of(limits, i)[0] == GUARD_UNIT_ZSCORE;
    return own;
}

/* Above, by more than the one that is so far. */
static bool is_beyond(const struct watch *w, uint32_t rule, double norm, double limit)
{
    if (!isfinite(limit) || norm <= limit || (w->rule > 0 && w->rule < rule))
        return false;
    return w->rule != rule || norm / limit > w->norm / w->limit;
}

void watch_unit(struct watch *w, const struct guard_limits *limits, const struct watch_unit *u)
{
    const double *own = u->own;
    for (uint32_t i = 0; i < limits->count / GUARD_LIMIT_NUMBERS; i++) {
        const double *at = rule_of(limits, i);
        if ((w->watched[u->unit] >> i & 1) == 0 || !guard_of_units((uint32_t)at[0]))
            continue;
        const double limit = at[0] == GUARD_UNIT_ZSCORE ? *own++ : at[2];
        if (!is_beyond(w, i + 1, u->norm, limit))
            continue;
        w->rule = i + 1;
        w->unit = u->unit;
        w->norm = u->norm;
        w->limit = limit;
        w->squares = u->squares;
    }
}

/* The place of the rule that the decision is by; behind all others: of none. */
static uint32_t place_of(const struct guard_limits *limits, const struct decision_guard *g)
{
    uint32_t i = 0;
    while (g->what != GUARD_NONE && i < limits->count / GUARD_LIMIT_NUMBERS) {
        const double *at = rule_of(limits, i);
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
    const double *at = rule_of(limits, w->rule - 1);
    d->skip = true;
    d->scale = 0;
    d->guard = (struct decision_guard){ .what = (uint32_t)at[0],
                                        .stop = at[1] != 0,
                                        .rewind = at[1] == 2,
                                        .value = w->norm,
                                        .bound = w->limit + 0.0 };
    return true;
}
