/* See shim_gemm.h: plain loops, as the kernel that the stand-in for cuBLAS launches. */
#include "kernels/cuda/portable.cuh"
#include "tests/cuda/shim_gemm.h"

DEVICE float shim_get(const void *p, long long at, int bf16)
{
    return bf16 ? f32_of_bits((uint32_t)((const uint16_t *)p)[at] << 16) : ((const float *)p)[at];
}

DEVICE uint32_t shim_round(float x, uint32_t bits)
{
    const uint32_t u = f32_bits(x), half = (1u << bits >> 1) - 1u;
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return u | 0x400000u;
    return (u + half + (u >> bits & 1u)) >> bits << bits;
}

DEVICE float shim_factor(const void *p, long long at, int bf16, int tf32)
{
    const float x = shim_get(p, at, bf16);
    return tf32 ? f32_of_bits(shim_round(x, 13)) : x;
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
            sum = fmaf(shim_factor(a.a, at_a + x, a.a_bf16, a.tf32),
                       shim_factor(a.b, at_b + y, a.b_bf16, a.tf32), sum);
        }
        const long long out = pair * a.c_stride + i + j * a.ldc;
        const float old = a.beta != 0 ? shim_get(a.c, out, a.c_bf16) : 0;
        const float value = a.beta != 0 ? fmaf(a.beta, old, a.alpha * sum) : a.alpha * sum;
        if (a.c_bf16)
            ((uint16_t *)a.c)[out] = (uint16_t)(shim_round(value, 16) >> 16);
        else
            ((float *)a.c)[out] = value;
    }
}
