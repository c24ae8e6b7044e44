/* The code that bench_update measures the kernels against, one table per instruction set: the plain
 * loop, and the memory's own limit with the same streams. */
#ifndef SHD_BENCH_UPDATE_RIVALS_H
#define SHD_BENCH_UPDATE_RIVALS_H

#include <stdint.h>

#include "kernels/kern.h"

/* INT8: moments in 8 bits, publishes bf16. */
enum bench_case {
    CASE_ADAMW_F32,
    CASE_ADAMW_BF16,
    CASE_ADAMW_INT8,
    CASE_ACCUMULATE,
    CASE_ACCUMULATE_SUM,
    CASES
};

struct bench_arrays { /* [elems] each */
    float *p, *m, *v;
    float *g;
    void *out;  /* room for fp32 */
    float zero; /* 0, but the compiler cannot know */
};

/* Elements [first, first + elems) on the calling thread; elems a multiple of 2,048. */
typedef void rival_fn(const struct bench_arrays *a, const struct kern_hyper *h, uint64_t first,
                      uint64_t elems);

struct rival {
    const char *name;
    rival_fn *fn[CASES];
};

#define LIMIT_VARIANTS 5

struct rivals {
    const char *isa;
    const struct rival *plain;
    struct rival limit[LIMIT_VARIANTS]; /* whichever is fastest counts */
};

extern const struct rivals rivals_scalar, rivals_avx2, rivals_avx512;

/* update_rivals.c is compiled once per instruction set. */
#define RIVAL_JOIN2(name, isa) name##_##isa
#define RIVAL_JOIN(name, isa)  RIVAL_JOIN2(name, isa)
#define RIVAL_STR2(isa)        #isa
#define RIVAL_STR(isa)         RIVAL_STR2(isa)

#endif
