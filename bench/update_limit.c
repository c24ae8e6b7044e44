/* The memory's limit: the streams of an update or an accumulation, read and written once, with one
 * addition per vector so that no load or store can be left out. Compiled for BENCH_ISA. The
 * variants differ in what might help the machine: streamed stores, prefetching, and taking one
 * stream's block after the other's instead of all streams abreast. */
#include <stdbool.h>

#if BENCH_LANES == 16
#include "kernels/cpu/vec_avx512.h"
#elif BENCH_LANES == 8
#include "kernels/cpu/vec_avx2.h"
#else
#include "kernels/cpu/vec_scalar.h"
#endif

#include "bench/update_rivals.h"

enum how { ABREAST, PREFETCH, BLOCKED };
enum nt { NT_NONE, NT_PUBLISH, NT_ALL };

#define PREFETCH_ELEMS 512u
#define BLOCK_ELEMS    512u

KERN_FN void put(float *p, vec x, bool stream)
{
    if (stream)
        vec_stream(p, x);
    else
        vec_store(p, x);
}

/* x[i, i + n) += zero, in place. */
KERN_FN void touch(float *x, uint64_t i, uint64_t n, vec zero, bool stream)
{
    for (uint64_t j = i; j < i + n; j += VEC_LANES)
        put(x + j, vec_add(vec_load(x + j), zero), stream);
}

/* Publish p + g; also the stand-in for reading the gradient. */
KERN_FN void publish(const struct bench_arrays *a, uint64_t i, uint64_t n, bool bf16, bool stream)
{
    for (uint64_t j = i; j < i + n; j += 2 * VEC_LANES) {
        const vec x = vec_add(vec_load(a->p + j), vec_load(a->g + j));
        const uint64_t k = j + VEC_LANES;
        const vec y = vec_add(vec_load(a->p + k), vec_load(a->g + k));
        if (!bf16) {
            put((float *)a->out + j, x, stream);
            put((float *)a->out + k, y, stream);
        } else if (stream) {
            half_stream_pair((uint16_t *)a->out + j, vec_to_bf16(x), vec_to_bf16(y));
        } else {
            half_store((uint16_t *)a->out + j, vec_to_bf16(x));
            half_store((uint16_t *)a->out + k, vec_to_bf16(y));
        }
    }
}

KERN_FN void adamw(const struct bench_arrays *a, uint64_t first, uint64_t elems, bool bf16,
                   enum how how, enum nt nt)
{
    const vec zero = vec_set1(a->zero);
    const uint64_t step = how == BLOCKED ? BLOCK_ELEMS : 2 * VEC_LANES;
    for (uint64_t i = first; i < first + elems; i += step) {
        if (how == PREFETCH) {
            for (uint64_t j = i + PREFETCH_ELEMS; j < i + PREFETCH_ELEMS + step; j += 16) {
                vec_prefetch(a->p + j);
                vec_prefetch(a->m + j);
                vec_prefetch(a->v + j);
                vec_prefetch(a->g + j);
            }
        }
        publish(a, i, step, bf16, nt != NT_NONE);
        touch(a->p, i, step, zero, nt == NT_ALL);
        touch(a->m, i, step, zero, nt == NT_ALL);
        touch(a->v, i, step, zero, nt == NT_ALL);
    }
    vec_fence();
}

KERN_FN void accumulate(const struct bench_arrays *a, uint64_t first, uint64_t elems, enum how how,
                        enum nt nt)
{
    const uint64_t step = how == BLOCKED ? BLOCK_ELEMS : 2 * VEC_LANES;
    for (uint64_t i = first; i < first + elems; i += step) {
        if (how == PREFETCH) {
            for (uint64_t j = i + PREFETCH_ELEMS; j < i + PREFETCH_ELEMS + step; j += 16) {
                vec_prefetch(a->p + j);
                vec_prefetch(a->g + j);
            }
        }
        if (how == BLOCKED)
            for (uint64_t j = i; j < i + step; j += 16)
                vec_prefetch(a->g + j);
        for (uint64_t j = i; j < i + step; j += VEC_LANES)
            put(a->p + j, vec_add(vec_load(a->p + j), vec_load(a->g + j)), nt == NT_ALL);
    }
    vec_fence();
}

#define LIMIT_FNS(id, how, nt)                                                            \
    static void adamw_f32_##id(const struct bench_arrays *a, const struct kern_hyper *h,  \
                               uint64_t first, uint64_t elems)                            \
    {                                                                                     \
        (void)h;                                                                          \
        adamw(a, first, elems, false, how, nt);                                           \
    }                                                                                     \
    static void adamw_bf16_##id(const struct bench_arrays *a, const struct kern_hyper *h, \
                                uint64_t first, uint64_t elems)                           \
    {                                                                                     \
        (void)h;                                                                          \
        adamw(a, first, elems, true, how, nt);                                            \
    }                                                                                     \
    static void accumulate_##id(const struct bench_arrays *a, const struct kern_hyper *h, \
                                uint64_t first, uint64_t elems)                           \
    {                                                                                     \
        (void)h;                                                                          \
        accumulate(a, first, elems, how, nt);                                             \
    }

LIMIT_FNS(abreast, ABREAST, NT_NONE)
LIMIT_FNS(nt_publish, ABREAST, NT_PUBLISH)
LIMIT_FNS(prefetch, PREFETCH, NT_PUBLISH)
LIMIT_FNS(blocked, BLOCKED, NT_PUBLISH)
LIMIT_FNS(nt_all, ABREAST, NT_ALL)

/* The sum adds no stream. */
#define LIMIT_ROW(id)                                                         \
    {                                                                         \
#id,                                                                  \
        {                                                                     \
            adamw_f32_##id, adamw_bf16_##id, accumulate_##id, accumulate_##id \
        }                                                                     \
    }

const struct rivals RIVAL_JOIN(rivals, BENCH_ISA) = {
    .isa = RIVAL_STR(BENCH_ISA),
    .plain = &RIVAL_JOIN(plain, BENCH_ISA),
    .limit = { LIMIT_ROW(abreast), LIMIT_ROW(nt_publish), LIMIT_ROW(prefetch), LIMIT_ROW(blocked),
               LIMIT_ROW(nt_all) },
};
