/* half.h: bf16 and fp16 as numbers: rounding to them and widening from them, one value at a time.
 *
 * Rounding is to nearest, ties to even. bf16 has fp32's range; fp16 ends at 65,504: what rounds
 * to 65,536 or more is inf. Subnormal fp16 numbers (below 2^-14) are kept; bf16's are fp32's
 * and are flushed wherever the pool's threads flush those. NaN stays NaN.
 */
#ifndef GPT_HALF_H
#define GPT_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t half_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float half_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* x rounded to bf16, as fp32 bits: the low 16 are zero. */
static inline uint32_t half_bf16_bits(float x)
{
    const uint32_t u = half_bits(x);
    const uint32_t rounded = u + 0x7fffu + (u >> 16 & 1u);
    const uint32_t quiet = u | 0x400000u;
    return ((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded) & 0xffff0000u;
}

static inline float half_round_bf16(float x)
{
    return half_float(half_bf16_bits(x));
}

/* x rounded to fp16. Below 2^-14 fp16's spacing is 2^-24, which is fp32's in [0.5, 1): adding
 * 0.5 rounds there. */
static inline float half_round_f16(float x)
{
    const uint32_t u = half_bits(x), a = u & 0x7fffffffu;
    const uint32_t normal = (a + 0xfffu + (a >> 13 & 1u)) & 0xffffe000u;
    const uint32_t small = half_bits((half_float(a) + 0.5f) - 0.5f);
    uint32_t r = a < 0x38800000u ? small : normal; /* 2^-14 */
    r = r >= 0x47800000u ? 0x7f800000u : r;        /* 65,536 */
    r = a > 0x7f800000u ? a | 0x400000u : r;
    return half_float(r | (u & 0x80000000u));
}

static inline float half_widen_bf16(uint16_t h)
{
    return half_float((uint32_t)h << 16);
}

static inline float half_widen_f16(uint16_t h)
{
    const uint32_t a = h & 0x7fffu, sign = (h & 0x8000u) << 16;
    const uint32_t small = half_bits((float)(int32_t)a * 0x1p-24f);
    const uint32_t normal = (a << 13) + (112u << 23);
    const uint32_t special = (a << 13) | 0x7f800000u;
    const uint32_t r = a < 0x400u ? small : a >= 0x7c00u ? special : normal;
    return half_float(r | sign);
}

#endif
