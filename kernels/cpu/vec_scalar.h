/* The vector wrappers, one lane wide: the reference every other instruction set must match bit
 * for bit. vec_avx2.h and vec_avx512.h give the same names 8 and 16 lanes.
 *
 * vec is VEC_LANES floats, half is VEC_LANES 16-bit words (bf16 or f16). Arithmetic is IEEE with
 * the thread's MXCSR (cpu.h: round to nearest even, FTZ|DAZ). Conversions work on bits and ignore
 * FTZ|DAZ: bf16 and f16 denormals are read and written as they are.
 */
#ifndef SHD_KERNELS_CPU_VEC_SCALAR_H
#define SHD_KERNELS_CPU_VEC_SCALAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/vec_common.h"

#define VEC_LANES 1u
#define VEC_NAME  "scalar"
typedef float vec;
typedef uint16_t half;

VEC_FN vec vec_set1(float x)
{
    return x;
}

VEC_FN vec vec_load(const float *p)
{
    return *p;
}

VEC_FN void vec_store(float *p, vec x)
{
    *p = x;
}

/* Past the caches where the instruction set can; p aligned to the vector. Needs vec_fence(). */
VEC_FN void vec_stream(float *p, vec x)
{
    *p = x;
}

/* The first n < VEC_LANES lanes only; the others load as 0. */
VEC_FN vec vec_load_n(const float *p, unsigned n)
{
    return n > 0 ? *p : 0;
}

VEC_FN void vec_store_n(float *p, vec x, unsigned n)
{
    if (n > 0)
        *p = x;
}

VEC_FN vec vec_add(vec a, vec b)
{
    return a + b;
}

VEC_FN vec vec_sub(vec a, vec b)
{
    return a - b;
}

VEC_FN vec vec_mul(vec a, vec b)
{
    return a * b;
}

VEC_FN vec vec_div(vec a, vec b)
{
    return a / b;
}

VEC_FN vec vec_sqrt(vec a)
{
    return sqrtf(a);
}

/* a * b + c, one rounding. */
VEC_FN vec vec_fma(vec a, vec b, vec c)
{
    return fmaf(a, b, c);
}

/* a * b - c, one rounding. */
VEC_FN vec vec_fms(vec a, vec b, vec c)
{
    return fmaf(a, b, -c);
}

/* x > 0: by; x < 0: -by; else (zero, NaN): 0. */
VEC_FN vec vec_sign_times(vec x, vec by)
{
    return x > 0 ? by : x < 0 ? -by : 0;
}

VEC_FN half half_load(const uint16_t *p)
{
    return *p;
}

VEC_FN half half_load_n(const uint16_t *p, unsigned n)
{
    return n > 0 ? *p : 0;
}

VEC_FN void half_store(uint16_t *p, half x)
{
    *p = x;
}

VEC_FN void half_store_n(uint16_t *p, half x, unsigned n)
{
    if (n > 0)
        *p = x;
}

/* Two neighbours at once, as vec_stream(); p aligned to both. */
VEC_FN void half_stream_pair(uint16_t *p, half x, half y)
{
    p[0] = x;
    p[1] = y;
}

VEC_FN vec vec_from_bf16(half x)
{
    return f32_of_bits((uint32_t)x << 16);
}

/* Nearest even by adding just under half of the part cut off; a NaN keeps its upper bits and
 * becomes quiet, since the sum could carry it into infinity. */
VEC_FN half vec_to_bf16(vec x)
{
    const uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

VEC_FN vec vec_from_f16(half x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    const uint32_t exp = x >> 10 & 0x1fu, frac = x & 0x3ffu;
    if (exp == 0x1f)
        return f32_of_bits(sign | 0x7f800000u | frac << 13 | (frac != 0 ? 0x400000u : 0));
    if (exp != 0)
        return f32_of_bits(sign | ((exp + 112) << 23 | frac << 13));
    return f32_of_bits(sign | f32_bits((float)frac * 0x1p-24f)); /* exact; never an f32 denormal */
}

/* What VCVTPS2PH does: nearest even, overflow to infinity, f16 denormals kept (it ignores FTZ;
 * DAZ cannot show, since an f32 denormal rounds to 0 in f16 anyway). */
VEC_FN half vec_to_f16(vec x)
{
    const uint32_t bits = f32_bits(x), sign = bits >> 16 & 0x8000u, mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (mag >> 13 & 0x3ffu));
    if (mag >= 0x477ff000u) /* 65520: halfway from the largest finite f16 to 2^16 */
        return (uint16_t)(sign | 0x7c00u);
    if (mag >= 0x38800000u) /* 2^-14: normal in f16 */
        return (uint16_t)(sign | (mag + 0xfffu + (mag >> 13 & 1) - 0x38000000u) >> 13);
    if (mag <= 0x33000000u) /* 2^-25: at most half of the smallest denormal */
        return (uint16_t)sign;
    const uint32_t shift = 126 - (mag >> 23), frac = (mag & 0x7fffffu) | 0x800000u;
    const uint32_t kept = frac >> shift, cut = frac & ((1u << shift) - 1), tie = 1u << (shift - 1);
    return (uint16_t)(sign | (kept + (cut > tie || (cut == tie && (kept & 1) != 0))));
}

/* SUM_LANES running sums in fp64. */
struct lanes {
    double s[SUM_LANES];
};

/* Add the squares of x to lanes [VEC_LANES * at, VEC_LANES * (at + 1)). */
VEC_FN void lanes_add(struct lanes *l, unsigned at, vec x)
{
    const double d = (double)x;
    l->s[at] += d * d; /* the product is exact in fp64, so a fused add gives the same */
}

VEC_FN void lanes_get(const struct lanes *l, double out[SUM_LANES])
{
    memcpy(out, l->s, sizeof l->s);
}

#endif
