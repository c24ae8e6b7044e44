/* The vector wrappers, one lane wide. vec is VEC_LANES floats, half is VEC_LANES 16-bit words (bf16
 * or f16). vec_float.h has the arithmetic. */
#ifndef SHD_KERNELS_CPU_VEC_SCALAR_H
#define SHD_KERNELS_CPU_VEC_SCALAR_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/vec_float.h"

#define VEC_LANES 1u
#define VEC_NAME  "scalar"
typedef uint32_t half;

KERN_FN vec vec_load(const float *p)
{
    return *p;
}

KERN_FN void vec_store(float *p, vec x)
{
    *p = x;
}

/* Past the caches where the instruction set can; p aligned to the vector. Needs vec_fence(). */
KERN_FN void vec_stream(float *p, vec x)
{
    *p = x;
}

/* The first n < VEC_LANES lanes only; the others load as 0. */
KERN_FN vec vec_load_n(const float *p, unsigned n)
{
    return n > 0 ? *p : 0;
}

KERN_FN void vec_store_n(float *p, vec x, unsigned n)
{
    if (n > 0)
        *p = x;
}

KERN_FN half half_load(const uint16_t *p)
{
    return *p;
}

KERN_FN half half_load_n(const uint16_t *p, unsigned n)
{
    return n > 0 ? *p : 0;
}

KERN_FN void half_store(uint16_t *p, half x)
{
    *p = (uint16_t)x;
}

KERN_FN void half_store_n(uint16_t *p, half x, unsigned n)
{
    if (n > 0)
        *p = (uint16_t)x;
}

/* Two neighbours at once, as vec_stream(); p aligned to both. */
KERN_FN void half_stream_pair(uint16_t *p, half x, half y)
{
    p[0] = (uint16_t)x;
    p[1] = (uint16_t)y;
}

/* Codes of 8 bits as numbers; and rounded to the nearest, even in the middle: they have room. */
KERN_FN vec codes_load(const uint8_t *p, bool sign)
{
    return sign ? (float)(int8_t)*p : (float)*p;
}

KERN_FN void codes_store(uint8_t *p, vec x, bool sign)
{
    (void)sign;
    *p = (uint8_t)_mm_cvtss_si32(_mm_set_ss(x));
}

/* Numbers and bits of 32: codes that are taken apart. */
KERN_FN vec vec_min(vec a, vec b)
{
    return a < b ? a : b;
}

KERN_FN vec vec_of_bits(vec_u32 a)
{
    return f32_of_bits(a);
}

/* To the nearest, even in the middle: |x| is below 2^31. And back. */
KERN_FN vec_u32 vec_to_int(vec x)
{
    return (uint32_t)_mm_cvtss_si32(_mm_set_ss(x));
}

KERN_FN vec vec_of_int(vec_u32 a)
{
    return (float)(int32_t)a;
}

KERN_FN vec_u32 bits_set1(uint32_t x)
{
    return x;
}

KERN_FN vec_u32 bits_add(vec_u32 a, vec_u32 b)
{
    return a + b;
}

KERN_FN vec_u32 bits_and(vec_u32 a, vec_u32 b)
{
    return a & b;
}

KERN_FN vec_u32 bits_or(vec_u32 a, vec_u32 b)
{
    return a | b;
}

KERN_FN vec_u32 bits_xor(vec_u32 a, vec_u32 b)
{
    return a ^ b;
}

KERN_FN vec_u32 bits_left(vec_u32 a, unsigned n)
{
    return a << n;
}

KERN_FN vec_u32 bits_right(vec_u32 a, unsigned n)
{
    return a >> n;
}

/* Bytes, the low ones of each. */
KERN_FN vec_u32 bytes_load(const uint8_t *p)
{
    return *p;
}

KERN_FN void bytes_store(uint8_t *p, vec_u32 a)
{
    *p = (uint8_t)a;
}

/* SUM_LANES running sums in fp64. */
struct lanes {
    double s[SUM_LANES];
};

/* Add the squares of x to lanes [VEC_LANES * at, VEC_LANES * (at + 1)). */
KERN_FN void lanes_add(struct lanes *l, unsigned at, vec x)
{
    const double d = (double)x;
    l->s[at] += d * d; /* the product is exact in fp64, so a fused add gives the same */
}

KERN_FN void lanes_get(const struct lanes *l, double out[SUM_LANES])
{
    memcpy(out, l->s, sizeof l->s);
}

#endif
