/* See shim_gemm.h: the kernel that the stand-in for cuBLAS launches. Factors are packed as fp32,
 * and neighbours in a column summed side by side: each sum is the one of a plain loop over k. */
#include "tests/cuda/shim_gemm.h"

#include <immintrin.h>
#include <stdlib.h>

#include "kernels/cuda/convert.cuh"
#include "proto/base/check.h"

#define TILE 16 /* rows that are summed side by side */

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

/* Rows [first, first + TILE) of op(a), k after k; 0 where there are none. */
DEVICE void shim_pack_rows(const struct shim_gemm *a, long long at, long long first, float *to)
{
    for (long long k = 0; k < a->k; k++)
        for (long long i = first; i < first + TILE; i++) {
            const long long x = a->op_a ? k + i * a->lda : i + k * a->lda;
            *to++ = i < a->m ? shim_factor(a->a, at + x, a->a_type, a->tf32) : 0;
        }
}

DEVICE void shim_pack_columns(const struct shim_gemm *a, long long at, float *to)
{
    for (long long j = 0; j < a->n; j++)
        for (long long k = 0; k < a->k; k++) {
            const long long y = a->op_b ? j + k * a->ldb : k + j * a->ldb;
            *to++ = shim_factor(a->b, at + y, a->b_type, a->tf32);
        }
}

static void shim_sums(const float *rows, const float *column, long long count, float *sums)
{
    for (int i = 0; i < TILE; i++)
        sums[i] = 0;
    for (long long k = 0; k < count; k++)
        for (int i = 0; i < TILE; i++)
            sums[i] = fmaf(rows[k * TILE + i], column[k], sums[i]);
}

/* The same; of packed factors, so that sanitizers have nothing to look for. */
__attribute__((target("avx,fma"), no_sanitize("address,undefined"))) static void
shim_sums_fma(const float *rows, const float *column, long long count, float *sums)
{
    __m256 low = _mm256_setzero_ps(), high = low;
    for (long long k = 0; k < count; k++) {
        const __m256 factor = _mm256_broadcast_ss(column + k);
        low = _mm256_fmadd_ps(_mm256_loadu_ps(rows + k * TILE), factor, low);
        high = _mm256_fmadd_ps(_mm256_loadu_ps(rows + k * TILE + 8), factor, high);
    }
    _mm256_storeu_ps(sums, low);
    _mm256_storeu_ps(sums + 8, high);
}

DEVICE void shim_put(const struct shim_gemm *a, long long at, float sum)
{
    const int type = a->c_type;
    const float value = a->beta != 0 ? fmaf(a->beta, shim_get(a->c, at, type), a->alpha * sum)
                                     : a->alpha * sum;
    put_as(a->c,
           type == SHIM_R_32F   ? SHD_F32
           : type == SHIM_R_16F ? SHD_F16
                                : SHD_BF16,
           (uint64_t)at, value);
}

KERNEL(shim_product, struct shim_gemm)
{
    const long long pair = blockIdx.x;
    const bool fma = __builtin_cpu_supports("avx") && __builtin_cpu_supports("fma");
    float *rows = static_cast<float *>(malloc((uint64_t)(a.k * TILE) * sizeof *rows));
    float *columns = static_cast<float *>(malloc((uint64_t)a.k * (uint64_t)a.n * sizeof *columns));
    CHECK(rows != nullptr && columns != nullptr);
    shim_pack_columns(&a, pair * a.b_stride, columns);
    for (long long first = 0; first < a.m; first += TILE) {
        shim_pack_rows(&a, pair * a.a_stride, first, rows);
        for (long long j = 0; j < a.n; j++) {
            float sums[TILE];
            (fma ? shim_sums_fma : shim_sums)(rows, columns + j * a.k, a.k, sums);
            for (long long i = first; i < a.m && i < first + TILE; i++)
                shim_put(&a, pair * a.c_stride + i + j * a.ldc, sums[i - first]);
        }
    }
    free(columns);
    free(rows);
}
