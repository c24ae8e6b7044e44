/* The vector wrappers, eight lanes wide (AVX2, FMA, F16C). vec_scalar.h says what each does. */
#ifndef SHD_KERNELS_CPU_VEC_AVX2_H
#define SHD_KERNELS_CPU_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/vec_common.h"

#define VEC_LANES 8u
#define VEC_NAME  "avx2"
typedef __m256 vec;
typedef __m128i half;

KERN_FN vec vec_set1(float x)
{
    return _mm256_set1_ps(x);
}

KERN_FN vec vec_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

KERN_FN void vec_store(float *p, vec x)
{
    _mm256_storeu_ps(p, x);
}

KERN_FN void vec_stream(float *p, vec x)
{
    _mm256_stream_ps(p, x);
}

KERN_FN vec vec_load_n(const float *p, unsigned n)
{
    float part[VEC_LANES] = { 0 };
    memcpy(part, p, n * sizeof *p);
    return _mm256_loadu_ps(part);
}

KERN_FN void vec_store_n(float *p, vec x, unsigned n)
{
    float part[VEC_LANES];
    _mm256_storeu_ps(part, x);
    memcpy(p, part, n * sizeof *p);
}

KERN_FN vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

KERN_FN vec vec_sub(vec a, vec b)
{
    return _mm256_sub_ps(a, b);
}

KERN_FN vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

KERN_FN vec vec_div(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}

KERN_FN vec vec_sqrt(vec a)
{
    return _mm256_sqrt_ps(a);
}

KERN_FN vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

KERN_FN vec vec_fms(vec a, vec b, vec c)
{
    return _mm256_fmsub_ps(a, b, c);
}

KERN_FN vec vec_sign_times(vec x, vec by)
{
    const vec zero = _mm256_setzero_ps();
    const vec above = _mm256_cmp_ps(x, zero, _CMP_GT_OQ);
    const vec below = _mm256_cmp_ps(x, zero, _CMP_LT_OQ);
    const vec minus_by = _mm256_xor_ps(by, _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(_mm256_and_ps(above, by), _mm256_and_ps(below, minus_by));
}

KERN_FN half half_load(const uint16_t *p)
{
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

KERN_FN half half_load_n(const uint16_t *p, unsigned n)
{
    uint16_t part[VEC_LANES] = { 0 };
    memcpy(part, p, n * sizeof *p);
    return half_load(part);
}

KERN_FN void half_store(uint16_t *p, half x)
{
    _mm_storeu_si128((__m128i *)(void *)p, x);
}

KERN_FN void half_store_n(uint16_t *p, half x, unsigned n)
{
    uint16_t part[VEC_LANES];
    half_store(part, x);
    memcpy(p, part, n * sizeof *p);
}

KERN_FN void half_stream_pair(uint16_t *p, half x, half y)
{
    _mm256_stream_si256((__m256i *)(void *)p, _mm256_set_m128i(y, x));
}

KERN_FN vec vec_from_bf16(half x)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

/* Not VCVTNEPS2BF16, which flushes denormals. */
KERN_FN half vec_to_bf16(vec x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i wide = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    const __m256i pairs = _mm256_packus_epi32(wide, wide);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}

KERN_FN vec vec_from_f16(half x)
{
    return _mm256_cvtph_ps(x);
}

KERN_FN half vec_to_f16(vec x)
{
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

struct lanes {
    __m256d s[SUM_LANES / 4];
};

KERN_FN void lanes_add(struct lanes *l, unsigned at, vec x)
{
    const __m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d hi = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    l->s[2 * at] = _mm256_fmadd_pd(lo, lo, l->s[2 * at]);
    l->s[2 * at + 1] = _mm256_fmadd_pd(hi, hi, l->s[2 * at + 1]);
}

KERN_FN void lanes_get(const struct lanes *l, double out[SUM_LANES])
{
    for (unsigned i = 0; i < SUM_LANES / 4; i++)
        _mm256_storeu_pd(out + (size_t)4 * i, l->s[i]);
}

#endif
