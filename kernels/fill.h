/* Initial values from a counter: element i depends on (key, i) alone, so any split of a tensor
 * over owners and threads gives the same bits. One source for the host and for GPUs: a Philox block
 * of four elements at a time.
 *
 * Random bits: Philox4x32-10. J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers:
 * As Easy as 1, 2, 3", SC11 (https://doi.org/10.1145/2063384.2063405). Counter block b = i / 4
 * is (b mod 2^32, b >> 32, 0, 0), the key (key mod 2^32, key >> 32); element i takes output word
 * i mod 4. In fp64 with fma where written, one rounding to fp32 at the end:
 *
 * UNIFORM: u = x * 2^-32; out = fma(b - a, u, a), and if fp32 rounding reaches b, the fp32 value
 *   before b.
 * NORMAL: Box-Muller on the word pairs (0,1) and (2,3) of a block. G. Box, M. Muller, "A Note on
 *   the Generation of Random Normal Deviates", 1958 (https://doi.org/10.1214/aoms/1177706645).
 *   u = (x0 + 1) 2^-32 in (0, 1]; r = sqrt(-2 ln u); angle = 2 pi (x1 + 1/2) 2^-32;
 *   z = r cos(angle) for the even element, r sin(angle) for the odd; out = fma(b, z, a).
 *   ln, sin and cos are the series below, not libm's, which differ from machine to machine. Their
 *   relative error is below 3.5e-14 (bounds at each; measured 3.4e-14 and 2.9e-14), so before its
 *   rounding to fp32 z is off by less than 5e-14 |z|. |z| <= sqrt(64 ln 2) = 6.66.
 * CONST: a, bit for bit.
 */
#ifndef SHD_KERNELS_FILL_H
#define SHD_KERNELS_FILL_H

#include <math.h>

#include "kernels/shared.h"

#define PHILOX_ROUNDS 10u
#define PHILOX_M0     UINT64_C(0xd2511f53)
#define PHILOX_M1     UINT64_C(0xcd9e8d57)
#define PHILOX_W0     0x9e3779b9u
#define PHILOX_W1     0xbb67ae85u

KERN_FN void philox_words(uint64_t key, uint64_t block, uint32_t words[4])
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (unsigned round = 0; round < PHILOX_ROUNDS; round++) {
        const uint64_t p0 = PHILOX_M0 * c0, p1 = PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

/* ln((x + 1) 2^-32). u = 2^e m with m in [sqrt 1/2, sqrt 2); s = (m - 1) / (m + 1); then
 * ln m = 2 atanh s = 2 s (1 + s^2/3 + s^4/5 + ... + s^14/15). The first term left out is
 * s^16 / 17 < 3.4e-14 relative, for |s| <= (sqrt 2 - 1)^2. */
KERN_FN double fill_log(uint32_t x)
{
    const double u = ((double)x + 1) * 0x1p-32;
    uint64_t bits = f64_bits(u);
    const uint64_t sqrt_half = UINT64_C(0x3fe6a09e667f3bcd);
    /* u <= 1, so e <= 0: counted as a non-negative shift, which every ISA has. */
    const uint64_t down = (sqrt_half + (UINT64_C(1) << 52) - 1 - bits) >> 52; /* -e */
    bits += down << 52;
    const double m = f64_of_bits(bits), s = (m - 1) / (m + 1), t = s * s;
    double y = 1.0 / 15;
    y = fma(y, t, 1.0 / 13);
    y = fma(y, t, 1.0 / 11);
    y = fma(y, t, 1.0 / 9);
    y = fma(y, t, 1.0 / 7);
    y = fma(y, t, 1.0 / 5);
    y = fma(y, t, 1.0 / 3);
    y = fma(y, t, 1.0);
    return fma(-(double)(int32_t)down, 0x1.62e42fefa39efp-1, 2 * s * y); /* ln 2 */
}

/* cos and sin of 2 pi (x + 1/2) 2^-32: quadrant q and an angle within pi/4 of its middle, then
 * Taylor series, whose first terms left out are below 1.5e-15 (cos) and 2.7e-14 (sin) relative. */
KERN_FN void fill_cos_sin(uint32_t x, double *ret_cos, double *ret_sin)
{
    const uint32_t q = (x + 0x20000000u) >> 30;
    const double turn = (double)(int32_t)(x - (q << 30)) + 0.5;
    const double angle = turn * 0x1.921fb54442d18p-30, t = angle * angle; /* pi/2 2^-30 */
    double s = 1.0 / 6227020800;
    s = fma(s, t, -1.0 / 39916800);
    s = fma(s, t, 1.0 / 362880);
    s = fma(s, t, -1.0 / 5040);
    s = fma(s, t, 1.0 / 120);
    s = fma(s, t, -1.0 / 6);
    s = fma(s * t, angle, angle);
    double c = -1.0 / 87178291200;
    c = fma(c, t, 1.0 / 479001600);
    c = fma(c, t, -1.0 / 3628800);
    c = fma(c, t, 1.0 / 40320);
    c = fma(c, t, -1.0 / 720);
    c = fma(c, t, 1.0 / 24);
    c = fma(c, t, -1.0 / 2);
    c = fma(c, t, 1.0);
    const double at_cos = (q & 1) != 0 ? s : c, at_sin = (q & 1) != 0 ? c : s;
    *ret_cos = q - 1 < 2 ? -at_cos : at_cos; /* quadrants 1 and 2 */
    *ret_sin = q >= 2 ? -at_sin : at_sin;
}

/* Two normal elements of two words. */
KERN_FN void fill_normal(const uint32_t words[2], float mean, float deviation, float out[2])
{
    double c, s;
    fill_cos_sin(words[1], &c, &s);
    const double r = sqrt(-2 * fill_log(words[0]));
    out[0] = (float)fma((double)deviation, r * c, (double)mean);
    out[1] = (float)fma((double)deviation, r * s, (double)mean);
}

/* nextafterf(x, low), low < x, both finite: the C library's cases, for it compares with denormals
 * as zeros, too. */
KERN_FN float fill_before(float x, float low)
{
    const uint32_t bits = f32_bits(x);
    if (x == low)
        return low;
    if ((bits & 0x7fffffffu) == 0)
        return f32_of_bits(0x80000001u);
    return f32_of_bits((bits & 0x80000000u) != 0 ? bits + 1 : bits - 1);
}

/* A uniform element of [low, high); last: fill_before(high, low). */
KERN_FN float fill_uniform(uint32_t word, float low, float high, float last)
{
    const double width = (double)high - (double)low;
    const float x = (float)fma(width, (double)word * 0x1p-32, (double)low);
    return x < high ? x : last;
}

#endif
