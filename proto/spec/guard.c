/* See guard.h. */
#include "proto/spec/guard.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/status.h"

static const char *const names[GUARD_WHAT_END] = {
    [GUARD_NONE] = "?",
    [GUARD_NORM_ABOVE] = "norm_above",
    [GUARD_NORM_ZSCORE] = "norm_zscore",
    [GUARD_LOSS_ZSCORE] = "loss_zscore",
    [GUARD_UNIT_ABOVE] = "unit_norm_above",
    [GUARD_UNIT_ZSCORE] = "unit_norm_zscore",
};

const char *guard_name(uint32_t what)
{
    return what < GUARD_WHAT_END ? names[what] : names[GUARD_NONE];
}

const char *guard_action(const struct guard_rule *rule)
{
    return rule->rewind ? "rewind" : rule->stop ? "stop" : "skip";
}

bool guard_windowed(enum guard_what what)
{
    return what == GUARD_NORM_ZSCORE || what == GUARD_LOSS_ZSCORE || what == GUARD_UNIT_ZSCORE;
}

bool guard_unit_windowed(const struct guard_rule *rule)
{
    return rule->what == GUARD_UNIT_ZSCORE;
}

bool guard_of_units(uint32_t what)
{
    return what == GUARD_UNIT_ABOVE || what == GUARD_UNIT_ZSCORE;
}

/* -- Limits ------------------------------------------------------------------------------------ */

void guard_limits_add(struct guard_limits *limits, const struct guard_rule *rule, double limit)
{
    CHECK(limits->count < GUARD_RULES_MAX * GUARD_LIMIT_NUMBERS);
    double *at = &limits->numbers[limits->count];
    at[0] = (double)rule->what;
    at[1] = rule->rewind ? 2 : rule->stop ? 1 : 0;
    at[2] = limit;
    limits->count += GUARD_LIMIT_NUMBERS;
}

void guard_limits_back(struct guard_limits *limits, enum guard_back back)
{
    static const double stops[] = {
        [GUARD_BACK] = 2, [GUARD_BACK_SKIPS] = 0, [GUARD_BACK_STOPS] = 1
    };
    for (uint32_t i = 1; i < limits->count; i += GUARD_LIMIT_NUMBERS)
        if (limits->numbers[i] == 2)
            limits->numbers[i] = stops[back];
}

static bool is_limit(const double *at)
{
    bool known = false;
    for (uint32_t what = GUARD_NONE + 1; what < GUARD_WHAT_END; what++)
        known = known || at[0] == what;
    return known && (at[1] == 0 || at[1] == 1 || at[1] == 2) && !isnan(at[2]);
}

int guard_limits_unpack(const uint8_t *data, size_t bytes, struct guard_limits *ret_limits,
                        struct shd_err *e)
{
    struct guard_limits l;
    if (bytes > sizeof l.numbers || bytes % (GUARD_LIMIT_NUMBERS * sizeof *l.numbers) != 0)
        return err_set(e, SHD_EPROTO, "%zu bytes are no limits of a guard", bytes);
    l.count = (uint32_t)(bytes / sizeof *l.numbers);
    if (bytes > 0)
        memcpy(l.numbers, data, bytes);
    for (uint32_t i = 0; i < l.count; i += GUARD_LIMIT_NUMBERS)
        if (!is_limit(&l.numbers[i]))
            return err_set(e, SHD_EPROTO, "limit %" PRIu32 " of the guard is none",
                           i / GUARD_LIMIT_NUMBERS);
    *ret_limits = l;
    return SHD_OK;
}

/* -- Judging ----------------------------------------------------------------------------------- */

struct decision_guard guard_judge(const struct guard_limits *limits, const struct guard_step *step)
{
    for (uint32_t i = 0; i < limits->count; i += GUARD_LIMIT_NUMBERS) {
        const double *at = &limits->numbers[i];
        const bool loss = at[0] == GUARD_LOSS_ZSCORE;
        const double value = loss ? step->loss : step->norm;
        if (guard_of_units((uint32_t)at[0]) || (loss && !step->has_loss) || !isfinite(at[2]) ||
            value <= at[2])
            continue;
        /* Decisions are compared bit by bit, and no frame holds a NaN's payload or -0. */
        return (struct decision_guard){ .what = (uint32_t)at[0],
                                        .stop = at[1] != 0,
                                        .rewind = at[1] == 2,
                                        .value = isnan(value) ? (double)NAN : value + 0.0,
                                        .bound = at[2] + 0.0 };
    }
    return (struct decision_guard){ 0 };
}

bool guard_plausible(const struct decision_guard *g, bool skip)
{
    if (g->rewind && !g->stop)
        return false;
    if (g->what == GUARD_NONE)
        return !g->stop && g->value == 0 && g->bound == 0;
    return g->what < GUARD_WHAT_END && skip && isfinite(g->bound);
}

const char *guard_text(const struct decision_guard *g, char buf[GUARD_TEXT_BYTES])
{
    snprintf(buf, GUARD_TEXT_BYTES, "%s %.6g is above %.6g (%s)",
             g->what == GUARD_LOSS_ZSCORE ? "loss"
             : guard_of_units(g->what)    ? "norm of a unit"
                                          : "norm",
             g->value, g->bound, guard_name(g->what));
    return buf;
}

/* More text behind what is in buf. */
__attribute__((format(printf, 2, 3))) static void more(char buf[GUARD_SKIP_BYTES],
                                                       const char *format, ...)
{
    const size_t at = strlen(buf);
    va_list args;
    va_start(args, format);
    vsnprintf(buf + at, GUARD_SKIP_BYTES - at, format, args);
    va_end(args);
}

static void say_micro(const struct guard_cause *c, char buf[GUARD_SKIP_BYTES])
{
    if (!c->has_micro) {
        more(buf, ", by which micro-batch is not known: a daemon was restarted");
        return;
    }
    if (!isinf(c->norm))
        more(buf, ", %.0f%% of that", 100 * c->share);
    more(buf, " by micro-batch %" PRIu64, c->micro);
    if (c->worker == NULL)
        more(buf, " of a worker that is not known");
    else if (c->rank > 0)
        more(buf, " of worker %.80s (rank %" PRIu32 ", pid %" PRIu32 ")", c->worker, c->rank - 1,
             c->pid);
    else
        more(buf, " of worker %.80s (pid %" PRIu32 ")", c->worker, c->pid);
}

const char *guard_skip_text(const struct decision_guard *g, const struct guard_cause *cause,
                            char buf[GUARD_SKIP_BYTES])
{
    char why[GUARD_TEXT_BYTES];
    snprintf(buf, GUARD_SKIP_BYTES, "%s",
             g->what != GUARD_NONE ? guard_text(g, why) : "gradients are not finite");
    if (cause->unit == NULL)
        return buf;
    if (isinf(cause->norm))
        more(buf, ", the first in unit %.128s", cause->unit);
    else if (guard_of_units(g->what))
        more(buf, ", unit %.128s", cause->unit);
    else
        more(buf, ", most of it in unit %.128s (%.6g)", cause->unit, cause->norm);
    if (cause->audited)
        say_micro(cause, buf);
    return buf;
}
