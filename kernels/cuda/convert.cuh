/* fp32 to and from the 16-bit dtypes, on bits: the same cases as kernels/cpu/vec_scalar.h, so that
 * denormals, overflow and NaN come out the same. Four elements at a time where they lie together.
 */
#ifndef SHD_KERNELS_CUDA_CONVERT_CUH
#define SHD_KERNELS_CUDA_CONVERT_CUH

#include "kernels/cuda/args.h"
#include "kernels/cuda/portable.cuh"

DEVICE uint32_t to_bf16(float x)
{
    const uint32_t bits = f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return bits >> 16 | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

DEVICE uint32_t to_f16(float x)
{
    const uint32_t bits = f32_bits(x), sign = bits >> 16 & 0x8000u, mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return sign | 0x7e00u | (mag >> 13 & 0x3ffu);
    if (mag >= 0x477ff000u)
        return sign | 0x7c00u;
    if (mag >= 0x38800000u)
        return sign | (mag + 0xfffu + (mag >> 13 & 1) - 0x38000000u) >> 13;
    if (mag <= 0x33000000u)
        return sign;
    const uint32_t shift = 126 - (mag >> 23), frac = (mag & 0x7fffffu) | 0x800000u;
    const uint32_t kept = frac >> shift, cut = frac & ((1u << shift) - 1), tie = 1u << (shift - 1);
    return sign | (kept + (cut > tie || (cut == tie && (kept & 1) != 0) ? 1u : 0u));
}

DEVICE float from_bf16(uint32_t h)
{
    return f32_of_bits(h << 16);
}

DEVICE float from_f16(uint32_t h)
{
    const uint32_t sign = (h & 0x8000u) << 16, exp = h >> 10 & 0x1fu, frac = h & 0x3ffu;
    if (exp == 0x1f)
        return f32_of_bits(sign | 0x7f800000u | frac << 13 | (frac != 0 ? 0x400000u : 0));
    if (exp != 0)
        return f32_of_bits(sign | ((exp + 112) << 23 | frac << 13));
    return f32_of_bits(sign | f32_bits((float)frac * 0x1p-24f)); /* exact; never a denormal */
}

DEVICE uint32_t to_half(float x, uint32_t dtype)
{
    return dtype == CUDA_BF16 ? to_bf16(x) : to_f16(x);
}

DEVICE float from_half(uint32_t h, uint32_t dtype)
{
    return dtype == CUDA_BF16 ? from_bf16(h) : from_f16(h);
}

/* out[i] = x. */
DEVICE void put_as(void *out, uint32_t dtype, uint64_t i, float x)
{
    if (dtype == CUDA_F32)
        put_once((float *)out + i, x);
    else
        put_once((uint16_t *)out + i, (uint16_t)to_half(x, dtype));
}

/* out[i, i + 4) = x; they are aligned to their own size. */
DEVICE void put_four_as(void *out, uint32_t dtype, uint64_t i, const float x[4])
{
    if (dtype == CUDA_F32) {
        put_once((float4 *)((float *)out + i), make_float4(x[0], x[1], x[2], x[3]));
        return;
    }
    const uint32_t low = to_half(x[0], dtype) | to_half(x[1], dtype) << 16;
    const uint32_t high = to_half(x[2], dtype) | to_half(x[3], dtype) << 16;
    put_once((uint2 *)((uint16_t *)out + i), make_uint2(low, high));
}

/* x = in[0, 4), aligned to 16 bytes. */
DEVICE void get_four(const float *in, float x[4])
{
    const float4 f = get_once((const float4 *)in);
    x[0] = f.x;
    x[1] = f.y;
    x[2] = f.z;
    x[3] = f.w;
}

/* in[i, i + 4) as they are stored, fp32 or two to a word; aligned to their own size. Apart from
 * their conversion, which has to wait until they are here. */
DEVICE void get_four_raw(const void *in, uint32_t dtype, uint64_t i, uint32_t raw[4])
{
    if (dtype == CUDA_F32) {
        const uint4 w = get_once((const uint4 *)((const float *)in + i));
        raw[0] = w.x;
        raw[1] = w.y;
        raw[2] = w.z;
        raw[3] = w.w;
    } else {
        const uint2 w = get_once((const uint2 *)((const uint16_t *)in + i));
        raw[0] = w.x;
        raw[1] = w.y;
    }
}

DEVICE float raw_float(const uint32_t raw[4], uint32_t dtype, unsigned k)
{
    if (dtype == CUDA_F32)
        return f32_of_bits(raw[k]);
    return from_half(k % 2 == 0 ? raw[k / 2] & 0xffffu : raw[k / 2] >> 16, dtype);
}

DEVICE void put_four(float *out, const float x[4])
{
    put_once((float4 *)out, make_float4(x[0], x[1], x[2], x[3]));
}

#endif
