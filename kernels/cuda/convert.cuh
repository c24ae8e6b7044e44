/* Elements read and written as their dtype says (vec_float.h converts), four at a time where they
 * lie together. */
#ifndef SHD_KERNELS_CUDA_CONVERT_CUH
#define SHD_KERNELS_CUDA_CONVERT_CUH

#include "kernels/cuda/args.h"
#include "kernels/cuda/portable.cuh"
#include "kernels/vec_float.h"

DEVICE uint32_t to_half(float x, uint32_t dtype)
{
    return dtype == SHD_BF16 ? vec_to_bf16(x) : vec_to_f16(x);
}

DEVICE float from_half(uint32_t h, uint32_t dtype)
{
    return dtype == SHD_BF16 ? vec_from_bf16(h) : vec_from_f16(h);
}

/* out[i] = x. */
DEVICE void put_as(void *out, uint32_t dtype, uint64_t i, float x)
{
    if (dtype == SHD_F32)
        put_once((float *)out + i, x);
    else
        put_once((uint16_t *)out + i, (uint16_t)to_half(x, dtype));
}

/* out[i, i + 4) = x; they are aligned to their own size. */
DEVICE void put_four_as(void *out, uint32_t dtype, uint64_t i, const float x[4])
{
    if (dtype == SHD_F32) {
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
    if (dtype == SHD_F32) {
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
    if (dtype == SHD_F32)
        return f32_of_bits(raw[k]);
    return from_half(k % 2 == 0 ? raw[k / 2] & 0xffffu : raw[k / 2] >> 16, dtype);
}

DEVICE void put_four(float *out, const float x[4])
{
    put_once((float4 *)out, make_float4(x[0], x[1], x[2], x[3]));
}

#endif
