/* Shared by the kernel tests: every host device there is, guarded and badly aligned arrays, arrays
 * full of awkward values, and the arrays of one update. */
#ifndef SHD_TESTS_KERN_UTIL_H
#define SHD_TESTS_KERN_UTIL_H

#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "tests/lib/test.h"

/* Block sums, chunks (32 blocks) and the streaming threshold (128 blocks) all have sizes on both
 * sides here. */
#define BLOCK SHD_BLOCK_ELEMS

/* isa: NULL for the best; "cuda" for the one that is not the host's. */
struct kern *device_new(const char *isa, uint32_t threads);

/* What device_new() may be given here, best last, NULL-terminated. */
const char *const *device_names(void);

/* Run fn on every instruction set this CPU has with 1, 2 and 3 threads, scalar with 1 first. The
 * label is for messages. */
void devices_each(void (*fn)(struct kern *k, const char *label, void *arg), void *arg);

/* EXPECT_RUNS(fill, k, &args): queue, wait, both must succeed. */
#define EXPECT_RUNS(op, k, args)                                                 \
    do {                                                                         \
        struct kern_waiter run_waiter;                                           \
        struct shd_err run_err = { 0 };                                          \
        kern_waiter_init(&run_waiter);                                           \
        EXPECT_OK(kern_##op((k), (args), &run_waiter.done, &run_err), &run_err); \
        const int run_status = kern_wait(&run_waiter);                           \
        if (run_status != SHD_OK)                                                \
            kern_explain((k), run_status, &run_err, #op);                        \
        EXPECT_OK(run_status, &run_err);                                         \
    } while (0)

/* A done that writes down when it fired. */
struct record {
    struct kern_done done;
    uint32_t fired; /* times */
    uint32_t order; /* of the last time */
    int status;
};

extern _Atomic uint32_t record_count;

void record_done(struct kern_done *done, int status);

struct guarded {
    uint8_t *memory; /* owned */
    void *base;
    uint64_t bytes;
    uint64_t skew_bytes;
};

struct guarded guarded_new(uint64_t bytes, uint64_t skew_bytes);

bool guarded_intact(const struct guarded *g);

void guarded_free(struct guarded *g);

uint32_t bits_of(float x);

float float_of(uint32_t bits);

/* What a compute thread's arithmetic makes of an input: DAZ. */
float daz(float x);

/* Same bits, or both NaN: payloads are not part of the promise. */
bool same_float(float a, float b);

#define EXPECT_SAME_FLOATS(got, want, count, label)                                   \
    do {                                                                              \
        const float *test_got = (got), *test_want = (want);                           \
        for (uint64_t test_i = 0; test_i < (count); test_i++)                         \
            if (!same_float(test_got[test_i], test_want[test_i]))                     \
                FAIL("%s: %s[%" PRIu64 "] is %a, expected %a", (label), #got, test_i, \
                     (double)test_got[test_i], (double)test_want[test_i]);            \
    } while (0)

void expect_same_array(const void *got, const void *want, enum shd_dtype dtype, uint64_t count,
                       const char *label);

/* Mostly values of an ordinary spread of magnitudes; with `wild`, one in eight is a denormal, a
 * zero, an infinity, a NaN, or as large or small as can be. */
void fill_awkward(float *x, uint64_t elems, bool wild, uint64_t seed);

/* -- One update ----------------------------------------------------------------------------------
 */

/* What gradients are multiplied by, or a mean's are divided by. */
static inline float update_scale(enum spec_optimizer o)
{
    return o == SPEC_MEAN ? 3 : 0.37f;
}

static const struct kern_hyper update_hypers[] = {
    { .lr = 1e-3f,
      .weight_decay = 0.1f,
      .beta1 = 0.9f,
      .beta2 = 0.999f,
      .eps = 1e-8f,
      .bias1 = 0.1f,
      .bias2 = 0.001f,
      .torch = { .keep = 0.9999f,
                 .rate = -1e-2f,
                 .beta1 = 0.9f,
                 .rest1 = 0.1f,
                 .beta2 = 0.999f,
                 .rest2 = 0.001f,
                 .unbias = 0.0316f,
                 .eps = 1e-8f,
                 .flags = KERN_MOMENTUM } },
    { .lr = 3e-2f,
      .weight_decay = 0,
      .beta1 = 0.8f,
      .beta2 = 0.95f,
      .eps = 1e-6f,
      .bias1 = 0.7f,
      .bias2 = 0.4f,
      .torch = { .keep = 1,
                 .rate = -0.04f,
                 .beta1 = 0.8f,
                 .rest1 = 0.2f,
                 .beta2 = 0.95f,
                 .rest2 = 0.05f,
                 .unbias = 0.63f,
                 .eps = 1e-6f,
                 .decay = 0.02f,
                 .flags = KERN_MOMENTUM | KERN_NESTEROV } },
    { .lr = 0.5f,
      .weight_decay = 1e-2f,
      .beta1 = 0,
      .beta2 = 0.5f,
      .eps = 1e-3f,
      .bias1 = 1,
      .bias2 = 1,
      .torch = { .keep = 0.995f,
                 .rate = -0.5f,
                 .rest1 = 1,
                 .beta2 = 0.5f,
                 .rest2 = 0.5f,
                 .unbias = 1,
                 .eps = 1e-3f,
                 .flags = KERN_MOMENTUM | KERN_FIRST } },
};

struct state { /* arrays of one update */
    struct guarded p, m, v, g, out;
    struct guarded e;           /* the average of p, where the update has one */
    float rest;                 /* 0: it has none */
    struct kern_change *change; /* NULL: the update is not measured */
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
