/* See replay_judge.h. */
#include "client/ctl/state/replay_judge.h"

#include <math.h>
#include <string.h>

#include "proto/base/check.h"

/* All NaNs are one: the sign of one that is computed is the processor's. */
static bool same(double a, double b)
{
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

static bool has_window(uint32_t guard)
{
    return guard == SHD_GUARD_NORM_ZSCORE || guard == SHD_GUARD_LOSS_ZSCORE ||
           guard == SHD_GUARD_UNIT_ZSCORE;
}

/* Gradients that are not finite have an infinite norm. */
static bool is_put(const struct shd_step_row *row)
{
    return row->skipped && row->guard == SHD_GUARD_NONE && isfinite(row->grad_norm);
}

static struct replay_finding find(enum replay_verdict verdict, const char *what, double was,
                                  double now)
{
    return (struct replay_finding){ verdict, 0, what, was, now };
}

/* Of one step, but for its number. The order is that of causes: what a step is made of, what
 * workers computed, what was decided on that. */
static struct replay_finding judge_row(const struct shd_step_row *was,
                                       const struct shd_step_row *now, bool last)
{
    const bool window = has_window(was->guard) || has_window(now->guard);
    const bool reports = was->reported == now->reported && was->metric_count > 0 &&
                         now->metric_count > 0;
    CHECK(was->step == now->step);
    if (is_put(was) != is_put(now))
        return find(REPLAY_UNKNOWN, "put", is_put(was), is_put(now));
    if (!same(was->lr, now->lr))
        return find(REPLAY_UNKNOWN, "lr", was->lr, now->lr);
    if (!same(was->loss_scale, now->loss_scale))
        return find(REPLAY_UNKNOWN, "loss_scale", was->loss_scale, now->loss_scale);
    if (!same(was->grad_norm, now->grad_norm))
        return find(REPLAY_DIFFERS, "norm", was->grad_norm, now->grad_norm);
    if (reports && !same(was->metrics[0], now->metrics[0]))
        return find(REPLAY_DIFFERS, "loss", was->metrics[0], now->metrics[0]);
    if (window && !last)
        return find(REPLAY_UNKNOWN, "guard", was->guard, now->guard);
    if (was->skipped != now->skipped && !window)
        return find(REPLAY_DIFFERS, "skipped", was->skipped, now->skipped);
    return find(REPLAY_AGREES, NULL, 0, 0);
}

struct replay_finding replay_judge(const struct shd_step_row *was, const struct shd_step_row *now,
                                   uint32_t count, bool *ret_state)
{
    struct replay_finding f = find(REPLAY_AGREES, NULL, 0, 0);
    *ret_state = false;
    for (uint32_t i = 0; i < count; i++) {
        f = judge_row(&was[i], &now[i], i + 1 == count);
        f.step = was[i].step + 1;
        if (f.verdict != REPLAY_AGREES)
            return f;
    }
    *ret_state = count > 0 && !has_window(was[count - 1].guard) &&
                 !has_window(now[count - 1].guard);
    return f;
}

uint64_t replay_hash(const float *values, uint64_t elems)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (uint64_t i = 0; i < elems; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        h = (h ^ bits) * UINT64_C(0x100000001b3);
    }
    return h;
}
