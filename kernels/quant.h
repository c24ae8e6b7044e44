/* Block-wise dynamic quantization of moments to 8 bits: T. Dettmers, M. Lewis, S. Shleifer,
 * L. Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022
 * (https://arxiv.org/abs/2110.02861). One source for the host's instruction sets and for GPUs:
 * included after what defines vec (kernels/cpu/vec.h, kernels/vec_float.h).
 *
 * A block's 64 values are codes times its scale, the largest magnitude in it, exactly. Codes go by
 * dynamic tree quantization, the leading zeros of a code being the decade of its value and the bits
 * behind the first one the place within it, linear. The first moment has a sign and 7 decades
 * (T = 6), the second none and 8 (T = 7). The value of code c > 0, i = floor(log2 c):
 *
 *     value(c) = 10^(i-T) * (0.1 + 0.9 * (c - 2^i + 1) / 2^i)          value(0) = 0
 *
 * The paper's values lie in the middle of each of the decade's 2^i parts, here they are the parts'
 * upper ends: the largest is 1, so that a block's largest magnitude keeps all its bits, and what is
 * decoded has the very same codes and scale when it is encoded again. Savings, restores, puts and
 * digests are of the decoded fp32 values therefore, and lose nothing.
 *
 * Decoding, per element, fp32, each line one rounding; i by the exponent of c as an fp32 number:
 *
 *     a = fma(c, slope[i], offset[i])     0 where c is 0
 *     x = a * scale                       with the code's sign
 *
 * Encoding: r = 1 / scale, rounded once, a block; i is how many of 10^-T .. 10^-1 are below y:
 *
 *     y = |x| * r
 *     t = fma(y, steps[i], origin[i])
 *     c = t to the nearest, even in the middle; with the sign of x
 *
 * A second moment that is not zero never gets code 0 but 1: a step divides by its root, and would
 * be of any size where it was rounded to nothing.
 *
 * A block whose largest magnitude is below 2^-96 is zero. One with a value that is no number, above
 * 2^126, or in a second moment negative, is NaN from there on, all of it: as such a value spreads
 * to its parameter, this one spreads to 64.
 */
#ifndef SHD_KERNELS_QUANT_H
#define SHD_KERNELS_QUANT_H

#include <stdbool.h>

#include "kernels/shared.h"

#define QUANT_LEAST_BITS 0x0f800000u /* 2^-96 */
#define QUANT_MOST_BITS  0x7e800000u /* 2^126: its reciprocal is no denormal */
#define QUANT_NAN_BITS   0x7fc00000u
#define QUANT_TABLE      16u /* the second half as the first: as wide as vectors are */

#ifdef __CUDACC__
#define QUANT_CONST static __device__ const
#else
#define QUANT_CONST static const __attribute__((aligned(64)))
#endif

struct quant_tree {
    float slope[QUANT_TABLE], offset[QUANT_TABLE]; /* by the low bits of the exponent of c */
    float steps[QUANT_TABLE], origin[QUANT_TABLE]; /* by how many limits are below */
};

#define QUANT_TWICE(...)         \
    {                            \
        __VA_ARGS__, __VA_ARGS__ \
    }

/* slope and offset begin with i = 1, whose exponent's low bits are 0, and end with i = 0, whose are
 * all set. The last offset but these is rounded so that the largest code is 1. */
QUANT_CONST struct quant_tree quant_signed = {
    QUANT_TWICE(0.45e-5f, 0.225e-4f, 0.1125e-3f, 0.05625e-2f, 0.028125e-1f, 0.0140625f, 0, 1e-6f),
    QUANT_TWICE(-0.35e-5f, -0.575e-4f, -0.6875e-3f, -0.74375e-2f, -0.771875e-1f, -0x1.926664p-1f, 0,
                0),
    QUANT_TWICE(1e6f, 1e6f, 1e5f / 0.45f, 1e4f / 0.225f, 1e3f / 0.1125f, 1e2f / 0.05625f,
                1e1f / 0.028125f, 1 / 0.0140625f),
    QUANT_TWICE(0, 0, 0.35f / 0.45f, 0.575f / 0.225f, 0.6875f / 0.1125f, 0.74375f / 0.05625f,
                0.771875f / 0.028125f, 0.7859375f / 0.0140625f),
};

QUANT_CONST struct quant_tree quant_unsigned = {
    QUANT_TWICE(0.45e-6f, 0.225e-5f, 0.1125e-4f, 0.05625e-3f, 0.028125e-2f, 0.0140625e-1f,
                0.00703125f, 1e-7f),
    QUANT_TWICE(-0.35e-6f, -0.575e-5f, -0.6875e-4f, -0.74375e-3f, -0.771875e-2f, -0.7859375e-1f,
                -0x1.95fffep-1f, 0),
    QUANT_TWICE(1e7f, 1e6f / 0.45f, 1e5f / 0.225f, 1e4f / 0.1125f, 1e3f / 0.05625f,
                1e2f / 0.028125f, 1e1f / 0.0140625f, 1 / 0.00703125f),
    QUANT_TWICE(0, 0.35f / 0.45f, 0.575f / 0.225f, 0.6875f / 0.1125f, 0.74375f / 0.05625f,
                0.771875f / 0.028125f, 0.7859375f / 0.0140625f, 0.79296875f / 0.00703125f),
};

/* How many of 1e-7 .. 1e-1 are below y, in [0, 2). Compared one by one, or at once with the one
 * that there is in its binade. */
#ifdef VEC_BINADES
QUANT_CONST uint32_t quant_below[32] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3,
                                         3, 3, 4, 4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7, 7 };
QUANT_CONST float quant_limit[32] = { 2,     2, 2,     2,     2, 2,     2,     1e-7f, 2, 2, 2,
                                      1e-6f, 2, 2,     1e-5f, 2, 2,     1e-4f, 2,     2, 2, 1e-3f,
                                      2,     2, 1e-2f, 2,     2, 1e-1f, 2,     2,     2, 2 };
KERN_FN vec_u32 quant_decade(vec y)
{
    return vec_count(y, quant_below, quant_limit);
}
#else
KERN_FN vec_u32 quant_decade(vec y)
{
    vec_u32 i = vec_bits(vec_set1(0));
    i = bits_count(i, y, 1e-7f);
    i = bits_count(i, y, 1e-6f);
    i = bits_count(i, y, 1e-5f);
    i = bits_count(i, y, 1e-4f);
    i = bits_count(i, y, 1e-3f);
    i = bits_count(i, y, 1e-2f);
    return bits_count(i, y, 1e-1f);
}
#endif

/* Codes as fp32 numbers, to values. sign: they have one. */
KERN_FN vec quant_decode(vec c, vec scale, bool sign)
{
    const struct quant_tree *t = sign ? &quant_signed : &quant_unsigned;
    const vec a = sign ? vec_abs(c) : c;
    const vec_u32 i = vec_exponent(a);
    const vec value = vec_fma_where(a, vec_lookup(t->slope, i), vec_lookup(t->offset, i));
    return vec_mul(sign ? vec_with_sign(value, c) : value, scale);
}

/* Values to codes as fp32 numbers, still to be rounded. r: 1 / scale. */
KERN_FN vec quant_encode(vec x, vec r, bool sign)
{
    const struct quant_tree *t = sign ? &quant_signed : &quant_unsigned;
    const vec y = vec_mul(sign ? vec_abs(x) : x, r);
    const vec_u32 i = quant_decade(y);
    const vec c = vec_fma(y, vec_lookup(t->steps, i), vec_lookup(t->origin, i));
    return sign ? vec_with_sign(c, x) : vec_least_where(x, c, 1);
}

/* The bits that a block's scale is the largest of: those of magnitudes; of a second moment that is
 * negative they are above all that may be, and no zero is. */
KERN_FN vec_u32 quant_size(vec x, bool sign)
{
    return vec_bits(sign ? vec_abs(x) : vec_add(x, vec_set1(0)));
}

/* The scale by these bits, and its reciprocal: where *ret_r is 0 all codes are. */
KERN_FN float quant_scale(uint32_t most, float *ret_r)
{
    *ret_r = 0;
    if (most < QUANT_LEAST_BITS)
        return 0;
    if (most > QUANT_MOST_BITS)
        return f32_of_bits(QUANT_NAN_BITS);
    *ret_r = 1 / f32_of_bits(most);
    return f32_of_bits(most);
}

#endif
