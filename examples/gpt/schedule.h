/* schedule.h: what follows from the options and the step alone: the learning rate (linear warm-up,
 * then half a cosine down to a floor), and which worker computes which micro-batches. Every
 * worker derives the same. */
#ifndef GPT_SCHEDULE_H
#define GPT_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

struct schedule {
    double lr, lr_min;
    uint64_t warmup, steps; /* steps > 0 */
};

/* Step from 0. Rises by lr / warmup each step to lr at step warmup - 1; falls to lr_min at step
 * steps - 1 and stays there. In fp64: every worker derives the same value. */
double schedule_lr(const struct schedule *s, uint64_t step);

/* A worker's share: micro-batches go in groups of `accumulate`, which `together` workers of
 * neighbouring ranks share out and sum, to the workers that are there, one after the other. */
struct schedule_share {
    uint32_t micro_batches, accumulate; /* a multiple of it */
    uint32_t together; /* at most accumulate, divides world; above 1: nobody leaves */
    uint32_t rank, world;
    uint64_t stop_rank, stop_at; /* that worker is there for steps below stop_at; 0: always */
};

/* True: this rank takes part in that step. */
bool schedule_takes_part(const struct schedule_share *s, uint64_t step);

/* This rank's micro-batches, ascending, into micros[micro_batches]; returns how many. */
uint32_t schedule_micros(const struct schedule_share *s, uint64_t step, uint32_t *micros);

#endif
