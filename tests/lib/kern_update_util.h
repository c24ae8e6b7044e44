/* Shared by the tests of optimizer kernels: the arrays of one update, runs to cut them into, and
 * the update on a device. */
#ifndef SHD_TESTS_KERN_UPDATE_UTIL_H
#define SHD_TESTS_KERN_UPDATE_UTIL_H

#include "tests/lib/kern_util.h"

static const struct kern_hyper update_hypers[] = {
    { .lr = 1e-3f,
      .weight_decay = 0.1f,
      .beta1 = 0.9f,
      .beta2 = 0.999f,
      .eps = 1e-8f,
      .bias1 = 0.1f,
      .bias2 = 0.001f },
    { .lr = 3e-2f,
      .weight_decay = 0,
      .beta1 = 0.8f,
      .beta2 = 0.95f,
      .eps = 1e-6f,
      .bias1 = 0.7f,
      .bias2 = 0.4f },
    { .lr = 0.5f,
      .weight_decay = 1e-2f,
      .beta1 = 0,
      .beta2 = 0.5f,
      .eps = 1e-3f,
      .bias1 = 1,
      .bias2 = 1 },
};

struct state { /* arrays of one update */
    struct guarded p, m, v, g, out;
    uint64_t elems;
    enum shd_dtype dtype;
};

/* skew: elements of misalignment, more for each array. */
struct state state_new(uint64_t elems, enum shd_dtype dtype, bool wild, uint64_t skew,
                       uint64_t seed);

void state_free(struct state *s);

void state_update(struct kern *k, enum spec_optimizer o, struct state *s,
                  const struct kern_run *runs, uint32_t run_count);

/* Runs of many lengths, with gaps, empty ones, all groups, across chunk borders. Returns how many.
 */
uint32_t make_runs(uint64_t elems, struct kern_run *runs, uint32_t runs_max, uint64_t seed);

#endif
