/* The plain loops: what one would write first, compiled with -O3 for BENCH_ISA. */
#include <math.h>
#include <string.h>

#include "bench/update_rivals.h"

#ifdef __clang__
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define PLAIN_NAME RIVAL_JOIN(plain, BENCH_ISA)

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

static void adamw_f32(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                      uint64_t first, uint64_t elems)
{
    const struct bench_arrays a = *arrays;
    const struct kern_hyper h = *hyper;
    float *out = a.out;
    INDEPENDENT
    for (uint64_t i = first; i < first + elems; i++)
        out[i] = plain_step(&a, &h, i);
}

static void adamw_bf16(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
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

static void accumulate(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                       uint64_t first, uint64_t elems)
{
    (void)hyper;
    const struct bench_arrays a = *arrays;
    INDEPENDENT
    for (uint64_t i = first; i < first + elems; i++)
        a.p[i] += a.g[i];
}

/* Two passes: a plain loop cannot vectorize an ordered sum, so it has 16 of them. */
static void accumulate_sum(const struct bench_arrays *arrays, const struct kern_hyper *hyper,
                           uint64_t first, uint64_t elems)
{
    accumulate(arrays, hyper, first, elems);
    double sums[16] = { 0 };
    for (uint64_t i = first; i < first + elems; i += 16)
        for (unsigned j = 0; j < 16; j++)
            sums[j] += (double)arrays->p[i + j] * (double)arrays->p[i + j];
    double sum = 0;
    for (unsigned j = 0; j < 16; j++)
        sum += sums[j];
    __asm__ volatile("" : : "x"(sum)); /* the result is wanted, as far as the compiler knows */
}

const struct rival PLAIN_NAME = {
    "plain",
    { adamw_f32, adamw_bf16, accumulate, accumulate_sum },
};
