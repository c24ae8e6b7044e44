/* Initial values from a counter: formulas, series and their error bounds are those of
 * kernels/cpu/op_fill.h, line for line. A thread makes one Philox block of four elements. */
#include "kernels/cuda/args.h"
#include "kernels/cuda/portable.cuh"

DEVICE void philox_words(uint64_t key, uint64_t block, uint32_t words[4])
{
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = UINT64_C(0xd2511f53) * c0, p1 = UINT64_C(0xcd9e8d57) * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

DEVICE double fill_log(uint32_t x)
{
    const double u = ((double)x + 1) * 0x1p-32;
    const uint64_t sqrt_half = UINT64_C(0x3fe6a09e667f3bcd);
    uint64_t bits = f64_bits(u);
    const uint64_t down = (sqrt_half + (UINT64_C(1) << 52) - 1 - bits) >> 52;
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
    return fma(-(double)(int32_t)down, 0x1.62e42fefa39efp-1, 2 * s * y);
}

DEVICE void fill_cos_sin(uint32_t x, double *ret_cos, double *ret_sin)
{
    const uint32_t q = (x + 0x20000000u) >> 30;
    const double turn = (double)(int32_t)(x - (q << 30)) + 0.5;
    const double angle = turn * 0x1.921fb54442d18p-30, t = angle * angle;
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
    *ret_cos = q - 1 < 2 ? -at_cos : at_cos;
    *ret_sin = q >= 2 ? -at_sin : at_sin;
}

DEVICE void normal_elems(const struct cuda_fill &a, const uint32_t words[4], float out[4])
{
    const double mean = (double)a.a, deviation = (double)a.b;
    for (unsigned pair = 0; pair < 4; pair += 2) {
        double c, s;
        fill_cos_sin(words[pair + 1], &c, &s);
        const double r = sqrt(-2 * fill_log(words[pair]));
        out[pair] = (float)fma(deviation, r * c, mean);
        out[pair + 1] = (float)fma(deviation, r * s, mean);
    }
}

/* nextafterf(x, low), low < x, both finite: the C library's cases, for it compares with denormals
 * as zeros, too. */
DEVICE float float_before(float x, float low)
{
    const uint32_t bits = f32_bits(x);
    if (x == low)
        return low;
    if ((bits & 0x7fffffffu) == 0)
        return f32_of_bits(0x80000001u);
    return f32_of_bits((bits & 0x80000000u) != 0 ? bits + 1 : bits - 1);
}

DEVICE void uniform_elems(const struct cuda_fill &a, const uint32_t words[4], float out[4])
{
    const double low = (double)a.a, width = (double)a.b - low;
    const float last = float_before(a.b, a.a);
    for (unsigned w = 0; w < 4; w++) {
        const float x = (float)fma(width, (double)words[w] * 0x1p-32, low);
        out[w] = x < a.b ? x : last;
    }
}

/* Elements of Philox block `block` of the tensor. */
DEVICE void fill_elems(const struct cuda_fill &a, uint64_t block, float out[4])
{
    uint32_t words[4];
    switch (a.kind) {
    case CUDA_FILL_NORMAL:
        philox_words(a.key, block, words);
        normal_elems(a, words, out);
        break;
    case CUDA_FILL_UNIFORM:
        philox_words(a.key, block, words);
        uniform_elems(a, words, out);
        break;
    default:
        out[0] = out[1] = out[2] = out[3] = a.a;
        break;
    }
}

KERNEL(shd_fill, struct cuda_fill)
{
    const uint64_t first = a.first_index / 4, skip = a.first_index % 4;
    const uint64_t blocks = (skip + a.elems + 3) / 4, stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t b = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; b < blocks; b += stride) {
        float x[4];
        fill_elems(a, first + b, x);
        const bool whole = 4 * b >= skip && 4 * b - skip + 4 <= a.elems;
        if (whole && aligned(a.out + (4 * b - skip), 16)) {
            put_once((float4 *)(a.out + (4 * b - skip)), make_float4(x[0], x[1], x[2], x[3]));
            continue;
        }
        for (unsigned j = 0; j < 4; j++)
            if (4 * b + j >= skip && 4 * b + j - skip < a.elems)
                put_once(a.out + (4 * b + j - skip), x[j]);
    }
}
