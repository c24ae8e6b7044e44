/* See shim_gemm.h: plain loops, as the kernel that the stand-in for cuBLAS launches. */
#include "kernels/cuda/convert.cuh"
#include "tests/cuda/shim_gemm.h"

DEVICE float shim_get(const void *p, long long at, int type)
{
    if (type == SHIM_R_32F)
        return ((const float *)p)[at];
    return from_half(((const uint16_t *)p)[at], type == SHIM_R_16F ? SHD_F16 : SHD_BF16);
}

DEVICE float shim_round_tf32(float x)
{
    const uint32_t u = f32_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return x;
    return f32_of_bits((u + 0xfffu + (u >> 13 & 1u)) & 0xffffe000u);
}

DEVICE float shim_factor(const void *p, long long at, int type, int tf32)
{
    const float x = shim_get(p, at, type);
    return tf32 ? shim_round_tf32(x) : x;
}

KERNEL(shim_product, struct shim_gemm)
{
    const long long index = (long long)blockIdx.x * 256 + threadIdx.x;
    if (index >= (long long)a.n * a.count)
        return;
    const long long pair = index / a.n, j = index % a.n;
    const long long at_a = pair * a.a_stride, at_b = pair * a.b_stride;
    for (long long i = 0; i < a.m; i++) {
        float sum = 0;
        for (long long k = 0; k < a.k; k++) {
            const long long x = a.op_a ? k + i * a.lda : i + k * a.lda;
            const long long y = a.op_b ? j + k * a.ldb : k + j * a.ldb;
            sum = fmaf(shim_factor(a.a, at_a + x, a.a_type, a.tf32),
                       shim_factor(a.b, at_b + y, a.b_type, a.tf32), sum);
        }
        const long long out = pair * a.c_stride + i + j * a.ldc;
        const float old = a.beta != 0 ? shim_get(a.c, out, a.c_type) : 0;
        const float value = a.beta != 0 ? fmaf(a.beta, old, a.alpha * sum) : a.alpha * sum;
        put_as(a.c,
               a.c_type == SHIM_R_32F   ? SHD_F32
               : a.c_type == SHIM_R_16F ? SHD_F16
                                        : SHD_BF16,
               (uint64_t)out, value);
    }
}
