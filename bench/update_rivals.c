/* The code that bench_update compares the kernels with, compiled for BENCH_ISA: the plain loops
 * that one would write first, with -O3; and the memory's limit: the streams of an update or an
 * accumulation, read and written once, with one addition per vector so that no load or store can be
 * left out. The variants differ in what might help the machine: streamed stores, prefetching, and
 * taking one stream's block after the other's instead of all streams abreast. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "bench/update_rivals.h"
#include "kernels/cpu/vec.h"

/* -- The plain loops -------------------------------------------------------------------------- */

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline float plain_step(const struct bench_arrays *a, const struct kern_hyper *h, uint64_t i)
{
    const float g = a->g[i];
    const float m = h->beta1 * a->m[i] + (1 - h->beta1) * g;
    const float v = h->beta2 * a->v[i] + (1 - h->beta2) * g * g;
    const float m_hat = m / h->bias1, v_hat = v / h->bias2;
    a->m[i] = m;
    a->v[i] = v;
    a->p[i] -= h->lr * (m_hat / (sqrtf(v_hat) + h->eps) + h->weight_decay * a->p[i]);
    return a->p[i];
}

static void plain_adamw_f32(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                            uint64_t first, uint64_t elems)
{
    const struct bench_arrays a = *arrays;
    const struct kern_hyper h = *hyper;
    float *out = a.out;
    INDEPENDENT
    for (uint64_t i = first; i < first + elems; i++)
        out[i] = plain_step(&a, &h, i);
}

static void plain_adamw_bf16(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                             uint64_t first, uint64_t elems)
{
    const struct bench_arrays a = *arrays;
    const struct kern_hyper h = *hyper;
    uint16_t *out = a.out;
    INDEPENDENT
    for (uint64_t i = first; i < first + elems; i++) {
        const float p = plain_step(&a, &h, i);
        uint32_t bits;
        memcpy(&bits, &p, sizeof bits);
        out[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

static void plain_accumulate(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                             uint64_t first, uint64_t elems)
{
    (void)hyper;
    const struct bench_arrays a = *arrays;
    INDEPENDENT
    for (uint64_t i = first; i < first + elems; i++)
        a.p[i] += a.g[i];
}

/* Two passes: a plain loop cannot vectorize an ordered sum, so it has 16 of them. */
static void plain_accumulate_sum(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                                 uint64_t first, uint64_t elems)
{
    plain_accumulate(arrays, hyper, first, elems);
    double sums[16] = { 0 };
    for (uint64_t i = first; i < first + elems; i += 16)
        for (unsigned j = 0; j < 16; j++)
            sums[j] += (double)arrays->p[i + j] * (double)arrays->p[i + j];
    double sum = 0;
    for (unsigned j = 0; j < 16; j++)
        sum += sums[j];
    __asm__ volatile("" : : "x"(sum)); /* the result is wanted, as far as the compiler knows */
}

static const struct rival plain = {
    "plain",
    { plain_adamw_f32, plain_adamw_bf16, plain_adamw_bf16, plain_accumulate, plain_accumulate_sum },
};

/* -- The limit -------------------------------------------------------------------------------- */

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

/* Of moments: of fp32, or of a byte (their scales, a 16th more, are left out). */
KERN_FN void adamw(const struct bench_arrays *a, uint64_t first, uint64_t elems, bool bf16,
                   unsigned moment_bytes, enum how how, enum nt nt)
{
    const vec zero = vec_set1(a->zero);
    const uint64_t least = moment_bytes == 1 ? 4 * VEC_LANES : 2 * VEC_LANES;
    const uint64_t step = how == BLOCKED ? BLOCK_ELEMS : least;
    for (uint64_t i = first; i < first + elems; i += step) {
        if (how == PREFETCH) {
            for (uint64_t j = i + PREFETCH_ELEMS; j < i + PREFETCH_ELEMS + step; j += 16) {
                vec_prefetch(a->p + j);
                vec_prefetch(a->m + j * moment_bytes / 4);
                vec_prefetch(a->v + j * moment_bytes / 4);
                vec_prefetch(a->g + j);
            }
        }
        publish(a, i, step, bf16, nt != NT_NONE);
        touch(a->p, i, step, zero, nt == NT_ALL);
        touch(a->m, i * moment_bytes / 4, step * moment_bytes / 4, zero, nt == NT_ALL);
        touch(a->v, i * moment_bytes / 4, step * moment_bytes / 4, zero, nt == NT_ALL);
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
        adamw(a, first, elems, false, 4, how, nt);                                        \
    }                                                                                     \
    static void adamw_bf16_##id(const struct bench_arrays *a, const struct kern_hyper *h, \
                                uint64_t first, uint64_t elems)                           \
    {                                                                                     \
        (void)h;                                                                          \
        adamw(a, first, elems, true, 4, how, nt);                                         \
    }                                                                                     \
    static void adamw_int8_##id(const struct bench_arrays *a, const struct kern_hyper *h, \
                                uint64_t first, uint64_t elems)                           \
    {                                                                                     \
        (void)h;                                                                          \
        adamw(a, first, elems, true, 1, how, nt);                                         \
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
#define LIMIT_ROW(id)                                                                          \
    {                                                                                          \
#id,                                                                                   \
        {                                                                                      \
            adamw_f32_##id, adamw_bf16_##id, adamw_int8_##id, accumulate_##id, accumulate_##id \
        }                                                                                      \
    }

const struct rivals RIVAL_JOIN(rivals, BENCH_ISA) = {
    .isa = RIVAL_STR(BENCH_ISA),
    .plain = &plain,
    .limit = { LIMIT_ROW(abreast), LIMIT_ROW(nt_publish), LIMIT_ROW(prefetch), LIMIT_ROW(blocked),
               LIMIT_ROW(nt_all) },
};
