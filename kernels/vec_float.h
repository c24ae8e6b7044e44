/* Vectors of one lane, in plain C for the host and for GPUs: the scalar instruction set, and a
 * thread's element. The reference that every other instruction set must match bit for bit:
 * kernels/cpu/vec_x86.h gives the same names 8 and 16 lanes.
 *
 * Arithmetic is IEEE, to nearest even, denormals taken as zero and made zero (on the host the
 * thread's MXCSR says so, for GPUs -ftz=true). Conversions work on bits and ignore that: bf16 and
 * f16 denormals are read and written as they are.
 */
#ifndef SHD_KERNELS_VEC_FLOAT_H
#define SHD_KERNELS_VEC_FLOAT_H

#include <math.h>
#include <stdint.h>

#include "kernels/shared.h"

typedef float vec;
typedef uint32_t vec_u32;

KERN_FN vec vec_set1(float x)
{
    return x;
}

KERN_FN vec vec_add(vec a, vec b)
{
    return a + b;
}

KERN_FN vec vec_sub(vec a, vec b)
{
    return a - b;
}

KERN_FN vec vec_mul(vec a, vec b)
{
    return a * b;
}

KERN_FN vec vec_div(vec a, vec b)
{
    return a / b;
}

KERN_FN vec vec_sqrt(vec a)
{
    return sqrtf(a);
}

/* a * b + c, one rounding. */
KERN_FN vec vec_fma(vec a, vec b, vec c)
{
    return fmaf(a, b, c);
}

/* a * b - c, one rounding. */
KERN_FN vec vec_fms(vec a, vec b, vec c)
{
    return fmaf(a, b, -c);
}

/* x > 0: by; x < 0: -by; else (zero, NaN): 0. */
KERN_FN vec vec_sign_times(vec x, vec by)
{
    return x > 0 ? by : x < 0 ? -by : 0;
}

/* a where it is greater, else b: of a NaN that. */
KERN_FN vec vec_max(vec a, vec b)
{
    return a > b ? a : b;
}

KERN_FN vec vec_abs(vec a)
{
    return f32_of_bits(f32_bits(a) & 0x7fffffffu);
}

/* a, which has no sign, with that of b. */
KERN_FN vec vec_with_sign(vec a, vec b)
{
    return f32_of_bits(f32_bits(a) | (f32_bits(b) & 0x80000000u));
}

/* vec_fma() where a is not 0, else 0. */
KERN_FN vec vec_fma_where(vec a, vec b, vec c)
{
    return a != 0 ? fmaf(a, b, c) : 0;
}

/* The larger of c and least where a is not 0, else c, which is not negative. */
KERN_FN vec vec_least_where(vec a, vec c, float least)
{
    return a != 0 && c < least ? least : c;
}

KERN_FN vec_u32 vec_bits(vec a)
{
    return f32_bits(a);
}

/* The exponent of a >= 0, biased. */
KERN_FN vec_u32 vec_exponent(vec a)
{
    return f32_bits(a) >> 23;
}

/* table[i], by the low bits of i: table has 16 entries, the second half as the first. */
KERN_FN vec vec_lookup(const float *table, vec_u32 i)
{
    return table[i & 7u];
}

/* One more where a > limit. */
KERN_FN vec_u32 bits_count(vec_u32 count, vec a, float limit)
{
    return count + (a > limit ? 1u : 0u);
}

KERN_FN vec_u32 bits_max(vec_u32 a, vec_u32 b)
{
    return a > b ? a : b;
}

/* The largest of all lanes. */
KERN_FN uint32_t bits_most(vec_u32 a)
{
    return a;
}

KERN_FN vec vec_from_bf16(uint32_t x)
{
    return f32_of_bits(x << 16);
}

/* Nearest even by adding just under half of the part cut off; a NaN keeps its upper bits and
 * becomes quiet, since the sum could carry it into infinity. */
KERN_FN uint32_t vec_to_bf16(vec x)
{
    const uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return bits >> 16 | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

KERN_FN vec vec_from_f16(uint32_t x)
{
    const uint32_t sign = (x & 0x8000u) << 16;
    const uint32_t exp = x >> 10 & 0x1fu, frac = x & 0x3ffu;
    if (exp == 0x1f)
        return f32_of_bits(sign | 0x7f800000u | frac << 13 | (frac != 0 ? 0x400000u : 0));
    if (exp != 0)
        return f32_of_bits(sign | ((exp + 112) << 23 | frac << 13));
    return f32_of_bits(sign | f32_bits((float)frac * 0x1p-24f)); /* exact; never an f32 denormal */
}

/* As VCVTPS2PH: nearest even, overflow to infinity, f16 denormals kept (it ignores FTZ;
 * DAZ cannot show, since an f32 denormal rounds to 0 in f16 anyway). */
KERN_FN uint32_t vec_to_f16(vec x)
{
    const uint32_t bits = f32_bits(x), sign = bits >> 16 & 0x8000u, mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return sign | 0x7e00u | (mag >> 13 & 0x3ffu);
    if (mag >= 0x477ff000u) /* 65520: halfway from the largest finite f16 to 2^16 */
        return sign | 0x7c00u;
    if (mag >= 0x38800000u) /* 2^-14: normal in f16 */
        return sign | (mag + 0xfffu + (mag >> 13 & 1) - 0x38000000u) >> 13;
    if (mag <= 0x33000000u) /* 2^-25: at most half of the smallest denormal */
        return sign;
    const uint32_t shift = 126 - (mag >> 23), frac = (mag & 0x7fffffu) | 0x800000u;
    const uint32_t kept = frac >> shift, cut = frac & ((1u << shift) - 1), tie = 1u << (shift - 1);
    return sign | (kept + (cut > tie || (cut == tie && (kept & 1) != 0)));
}

#endif
