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
