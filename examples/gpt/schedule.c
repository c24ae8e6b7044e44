/* schedule.c: see schedule.h. */
#include "examples/gpt/schedule.h"

#include <math.h>

double schedule_lr(const struct schedule *s, uint64_t step)
{
    if (step < s->warmup)
        return s->lr * (double)(step + 1) / (double)s->warmup;
    const uint64_t last = s->steps - 1;
    if (step >= last)
        return s->lr_min;
    const double done = (double)(step - s->warmup) / (double)(last - s->warmup);
    return s->lr_min + 0.5 * (s->lr - s->lr_min) * (1 + cos(acos(-1) * done));
}

static bool schedule_somebody_left(const struct schedule_share *s, uint64_t step)
{
    return s->stop_at > 0 && step >= s->stop_at;
}

bool schedule_takes_part(const struct schedule_share *s, uint64_t step)
{
    return !schedule_somebody_left(s, step) || s->rank != s->stop_rank;
}

uint32_t schedule_micros(const struct schedule_share *s, uint64_t step, uint32_t *micros)
{
    if (!schedule_takes_part(s, step))
        return 0;
    const bool left = schedule_somebody_left(s, step);
    const uint32_t workers = s->world - (left ? 1 : 0);
    const uint32_t place = s->rank - (left && s->rank > s->stop_rank ? 1 : 0);
    const uint32_t together = s->together;
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->micro_batches; i++)
        if (i / s->accumulate % (workers / together) == place / together &&
            i % s->accumulate % together == place % together)
            micros[count++] = i;
    return count;
}
