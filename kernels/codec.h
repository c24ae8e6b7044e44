/* Codecs (proto/base/dtype.h): a block's 64 values as codes times a scale in bf16. Every line is
 * one rounding:
 *
 *     t = most * (1 / largest)      most: the block's largest magnitude; largest: 127, 448 or 7
 *     scale = t, up to bf16         one that is bf16 but for 15 ulps of fp32 stays what it is
 *     r = 1 / scale
 *     y = x * r
 *     code = y, to nearest, ties to even, in the codec
 *     x = code * scale              exact in fp32: 8 bits times 8; then to the model's dtype
 *
 * A block whose largest magnitude is below 2^-96 is zero: scale and codes are. One with a value
 * that is no number, or above 2^126, is NaN, all 64 of it: so is its scale. Padding is zeros, and
 * decoded as zeros where its block is not NaN.
 *
 * Rounded at random instead, int8 alone: code = (y + noise), to nearest, at most 127; noise is in
 * (-1/2, 1/2), uniform, (k + 1/2) / 2^16 - 1/2 of 16 bits k of Philox (kern.h, struct kern_noise).
 * So a code's mean is y, but for 2^-17 and where the largest magnitude is rounded.
 *
 * Included once per instruction set, after vec.h. */
#ifndef SHD_KERNELS_CODEC_H
#define SHD_KERNELS_CODEC_H

#include "kernels/shared.h"
#include "proto/base/dtype.h"

#define CODEC_LEAST_BITS 0x0f800000u /* 2^-96 */
#define CODEC_MOST_BITS  0x7e800000u /* 2^126 */
#define CODEC_NAN_BITS   0x7fc00000u
#define CODEC_UP_BITS    0xfff0u /* what a bf16 lacks, but for these 15 ulps */

KERN_FN float codec_largest(enum codec codec)
{
    return codec == CODEC_INT8 ? 127.0f : codec == CODEC_FP8 ? 448.0f : 7.0f;
}

/* The scale's bits by those of the largest magnitude, and its reciprocal: where *ret_r is 0 all
 * codes are zeros. */
KERN_FN uint16_t codec_scale(uint32_t most, enum codec codec, float *ret_r)
{
    *ret_r = 0;
    if (most < CODEC_LEAST_BITS)
        return 0;
    if (most > CODEC_MOST_BITS)
        return CODEC_NAN_BITS >> 16;
    const float inverse = 1 / codec_largest(codec); /* a constant */
    const uint32_t up = f32_bits(f32_of_bits(most) * inverse) + CODEC_UP_BITS;
    *ret_r = 1 / f32_of_bits(up & 0xffff0000u);
    return (uint16_t)(up >> 16);
}

/* Magnitudes up to 448 as e4m3, without a sign. In steps of 2^-9 up to 2^-6, which is code 8; from
 * there on the exponent and three bits, rounded on the bits of fp32. Of the two parts one is 8. */
KERN_FN vec_u32 fp8_encode(vec y)
{
    const vec least = vec_set1(0x1p-6f);
    const vec_u32 bits = vec_bits(vec_max(y, least));
    const vec_u32 odd = bits_and(bits_right(bits, 20), bits_set1(1));
    const vec_u32 high = bits_right(bits_add(bits_add(bits, bits_set1(0x7ffff)), odd), 20);
    const vec_u32 low = vec_to_int(vec_mul(vec_min(y, least), vec_set1(512)));
    return bits_add(bits_add(high, low), bits_set1(0u - 968u)); /* 968: of 2^-6, plus 8 of low */
}

/* Likewise, back. Codes with an exponent are bits of fp32, 120 binades up; below 8 they come out
 * between 2^-7 and 2^-6, which is twice as far from 2^-7 as they are. */
KERN_FN vec fp8_decode(vec_u32 code)
{
    const vec x = vec_of_bits(bits_add(bits_left(code, 20), bits_set1(120u << 23)));
    return vec_min(x, vec_fma(x, vec_set1(2), vec_set1(-0x1p-6f)));
}

#endif
