/* schedule.h: the learning rate of a step: linear warm-up, then half a cosine down to a floor. */
#ifndef GPT_SCHEDULE_H
#define GPT_SCHEDULE_H

#include <stdint.h>

struct schedule {
    double lr, lr_min;
    uint64_t warmup, steps; /* steps > 0 */
};

/* Step from 0. Rises by lr / warmup each step to lr at step warmup - 1; falls to lr_min at step
 * steps - 1 and stays there. In fp64: every worker derives the same value. */
double schedule_lr(const struct schedule *s, uint64_t step);

#endif
