/* The vector wrappers, KERN_LANES wide: sixteen (AVX-512 F, BW, DQ, VL) or eight (AVX2, FMA, F16C).
 * vec_scalar.h says what each does. */
#ifndef SHD_KERNELS_CPU_VEC_X86_H
#define SHD_KERNELS_CPU_VEC_X86_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/shared.h"

#define VEC_LANES KERN_LANES

#if KERN_LANES == 16
#define VEC_NAME "avx512"
typedef __m512 vec;
typedef __m256i half;
typedef __m512d vec_f64;
typedef __m512i vec_u32;
#define MM(name)      _mm512_##name
#define MM_BITS(name) _mm512_##name##_si512
#define MM_HALF(name) _mm256_##name##_si256
#else
#define VEC_NAME      "avx2"
typedef __m256 vec;
typedef __m128i half;
typedef __m256d vec_f64;
typedef __m256i vec_u32;
#define MM(name)      _mm256_##name
#define MM_BITS(name) _mm256_##name##_si256
#define MM_HALF(name) _mm_##name##_si128
#endif

KERN_FN vec vec_set1(float x)
{
    return MM(set1_ps)(x);
}

KERN_FN vec vec_load(const float *p)
{
    return MM(loadu_ps)(p);
}

KERN_FN void vec_store(float *p, vec x)
{
    MM(storeu_ps)(p, x);
}

KERN_FN void vec_stream(float *p, vec x)
{
    MM(stream_ps)(p, x);
}

KERN_FN vec vec_add(vec a, vec b)
{
    return MM(add_ps)(a, b);
}

KERN_FN vec vec_sub(vec a, vec b)
{
    return MM(sub_ps)(a, b);
}

KERN_FN vec vec_mul(vec a, vec b)
{
    return MM(mul_ps)(a, b);
}

KERN_FN vec vec_div(vec a, vec b)
{
    return MM(div_ps)(a, b);
}

KERN_FN vec vec_sqrt(vec a)
{
    return MM(sqrt_ps)(a);
}

KERN_FN vec vec_fma(vec a, vec b, vec c)
{
    return MM(fmadd_ps)(a, b, c);
}

KERN_FN vec vec_fms(vec a, vec b, vec c)
{
    return MM(fmsub_ps)(a, b, c);
}

/* a where it is greater, else b: of a NaN that. */
KERN_FN vec vec_max(vec a, vec b)
{
    return MM(max_ps)(a, b);
}

KERN_FN vec vec_abs(vec a)
{
    return MM(andnot_ps)(MM(set1_ps)(-0.0f), a);
}

KERN_FN vec vec_with_sign(vec a, vec b)
{
    return MM(or_ps)(a, MM(and_ps)(MM(set1_ps)(-0.0f), b));
}

KERN_FN vec_u32 bits_max(vec_u32 a, vec_u32 b)
{
    return MM(max_epu32)(a, b);
}

KERN_FN vec vec_min(vec a, vec b)
{
    return MM(min_ps)(a, b);
}

KERN_FN vec_u32 vec_to_int(vec x)
{
    return MM(cvtps_epi32)(x);
}

KERN_FN vec vec_of_int(vec_u32 a)
{
    return MM(cvtepi32_ps)(a);
}

KERN_FN vec_u32 bits_set1(uint32_t x)
{
    return MM(set1_epi32)((int)x);
}

KERN_FN vec_u32 bits_add(vec_u32 a, vec_u32 b)
{
    return MM(add_epi32)(a, b);
}

KERN_FN vec_u32 bits_and(vec_u32 a, vec_u32 b)
{
    return MM_BITS(and)(a, b);
}

KERN_FN vec_u32 bits_or(vec_u32 a, vec_u32 b)
{
    return MM_BITS(or)(a, b);
}

KERN_FN vec_u32 bits_xor(vec_u32 a, vec_u32 b)
{
    return MM_BITS(xor)(a, b);
}

KERN_FN vec_u32 bits_left(vec_u32 a, unsigned n)
{
    return MM(sll_epi32)(a, _mm_cvtsi32_si128((int)n));
}

KERN_FN vec_u32 bits_right(vec_u32 a, unsigned n)
{
    return MM(srl_epi32)(a, _mm_cvtsi32_si128((int)n));
}

KERN_FN half half_load(const uint16_t *p)
{
    return MM_HALF(loadu)((const half *)(const void *)p);
}

KERN_FN void half_store(uint16_t *p, half x)
{
    MM_HALF(storeu)((half *)(void *)p, x);
}

KERN_FN vec vec_from_f16(half x)
{
    return MM(cvtph_ps)(x);
}

struct lanes {
    vec_f64 s[2 * SUM_LANES / VEC_LANES];
};

KERN_FN void lanes_get(const struct lanes *l, double out[SUM_LANES])
{
    for (unsigned i = 0; i < 2 * SUM_LANES / VEC_LANES; i++)
        MM(storeu_pd)(out + (size_t)i * (VEC_LANES / 2), l->s[i]);
}

#if KERN_LANES == 16

KERN_FN __mmask16 vec_mask(unsigned n)
{
    return (__mmask16)((1u << n) - 1);
}

KERN_FN vec vec_load_n(const float *p, unsigned n)
{
    return _mm512_maskz_loadu_ps(vec_mask(n), p);
}

KERN_FN void vec_store_n(float *p, vec x, unsigned n)
{
    _mm512_mask_storeu_ps(p, vec_mask(n), x);
}

KERN_FN vec vec_sign_times(vec x, vec by)
{
    const vec zero = _mm512_setzero_ps();
    const __mmask16 above = _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ);
    const __mmask16 below = _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ);
    const vec minus_by = _mm512_xor_ps(by, _mm512_set1_ps(-0.0f));
    return _mm512_mask_mov_ps(_mm512_maskz_mov_ps(above, by), below, minus_by);
}

KERN_FN __mmask16 vec_nonzero(vec a)
{
    return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ);
}

KERN_FN vec vec_fma_where(vec a, vec b, vec c)
{
    return _mm512_maskz_fmadd_ps(vec_nonzero(a), a, b, c);
}

KERN_FN vec vec_least_where(vec a, vec c, float least)
{
    return _mm512_mask_max_ps(c, vec_nonzero(a), c, _mm512_set1_ps(least));
}

KERN_FN vec_u32 vec_bits(vec a)
{
    return _mm512_castps_si512(a);
}

KERN_FN vec vec_of_bits(vec_u32 a)
{
    return _mm512_castsi512_ps(a);
}

KERN_FN vec_u32 vec_exponent(vec a)
{
    return _mm512_srli_epi32(_mm512_castps_si512(a), 23);
}

KERN_FN vec vec_lookup(const float *table, vec_u32 i)
{
    return _mm512_permutexvar_ps(i, _mm512_loadu_ps(table));
}

/* How many of the limits are below a, which is not negative and below 2: none of a binade has two.
 * By its exponent's low bits: [32] how many are below its binade, and [32] its own one, or 2. */
#define VEC_BINADES
KERN_FN vec_u32 vec_count(vec a, const uint32_t *below, const float *limit)
{
    const __m512i e = vec_exponent(_mm512_max_ps(a, _mm512_set1_ps(0x1p-31f)));
    const vec own = _mm512_permutex2var_ps(_mm512_loadu_ps(limit), e, _mm512_loadu_ps(limit + 16));
    const __m512i count = _mm512_permutex2var_epi32(_mm512_loadu_si512(below), e,
                                                    _mm512_loadu_si512(below + 16));
    return _mm512_mask_add_epi32(count, _mm512_cmp_ps_mask(a, own, _CMP_GT_OQ), count,
                                 _mm512_set1_epi32(1));
}

KERN_FN uint32_t bits_most(vec_u32 a)
{
    return _mm512_reduce_max_epu32(a);
}

KERN_FN vec codes_load(const uint8_t *p, bool sign)
{
    const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)p);
    return _mm512_cvtepi32_ps(sign ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes));
}

KERN_FN void codes_store(uint8_t *p, vec x, bool sign)
{
    (void)sign;
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

KERN_FN vec_u32 bytes_load(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}

KERN_FN void bytes_store(uint8_t *p, vec_u32 a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(a));
}

KERN_FN half half_load_n(const uint16_t *p, unsigned n)
{
    return _mm256_maskz_loadu_epi16(vec_mask(n), p);
}

KERN_FN void half_store_n(uint16_t *p, half x, unsigned n)
{
    _mm256_mask_storeu_epi16(p, vec_mask(n), x);
}

KERN_FN void half_stream_pair(uint16_t *p, half x, half y)
{
    _mm512_stream_si512((__m512i *)(void *)p, _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1));
}

KERN_FN vec vec_from_bf16(half x)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* Not VCVTNEPS2BF16, which flushes denormals. */
KERN_FN half vec_to_bf16(vec x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i wide = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(wide, 16));
}

KERN_FN half vec_to_f16(vec x)
{
    /* The unmasked one is a macro at -O0, and its constant -1 mask warns. */
    return _mm512_maskz_cvtps_ph((__mmask16)0xffff, x, _MM_FROUND_TO_NEAREST_INT);
}

KERN_FN void lanes_add(struct lanes *l, unsigned at, vec x)
{
    const __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    l->s[2 * at] = _mm512_fmadd_pd(lo, lo, l->s[2 * at]);
    l->s[2 * at + 1] = _mm512_fmadd_pd(hi, hi, l->s[2 * at + 1]);
}

#else

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

KERN_FN vec vec_sign_times(vec x, vec by)
{
    const vec zero = _mm256_setzero_ps();
    const vec above = _mm256_cmp_ps(x, zero, _CMP_GT_OQ);
    const vec below = _mm256_cmp_ps(x, zero, _CMP_LT_OQ);
    const vec minus_by = _mm256_xor_ps(by, _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(_mm256_and_ps(above, by), _mm256_and_ps(below, minus_by));
}

KERN_FN vec vec_nonzero_of(vec a, vec x)
{
    return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ), x);
}

KERN_FN vec vec_fma_where(vec a, vec b, vec c)
{
    return vec_nonzero_of(a, _mm256_fmadd_ps(a, b, c));
}

KERN_FN vec vec_least_where(vec a, vec c, float least)
{
    return _mm256_max_ps(c, vec_nonzero_of(a, _mm256_set1_ps(least)));
}

KERN_FN vec_u32 vec_bits(vec a)
{
    return _mm256_castps_si256(a);
}

KERN_FN vec vec_of_bits(vec_u32 a)
{
    return _mm256_castsi256_ps(a);
}

KERN_FN vec_u32 vec_exponent(vec a)
{
    return _mm256_srli_epi32(_mm256_castps_si256(a), 23);
}

KERN_FN vec vec_lookup(const float *table, vec_u32 i)
{
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i);
}

KERN_FN vec_u32 bits_count(vec_u32 count, vec a, float limit)
{
    const vec above = _mm256_cmp_ps(a, _mm256_set1_ps(limit), _CMP_GT_OQ);
    return _mm256_sub_epi32(count, _mm256_castps_si256(above));
}

KERN_FN uint32_t bits_most(vec_u32 a)
{
    __m128i most = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(most);
}

KERN_FN vec codes_load(const uint8_t *p, bool sign)
{
    const __m128i codes = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return _mm256_cvtepi32_ps(sign ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes));
}

KERN_FN void codes_store(uint8_t *p, vec x, bool sign)
{
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                          _mm256_extracti128_si256(wide, 1));
    const __m128i codes = sign ? _mm_packs_epi16(pairs, pairs) : _mm_packus_epi16(pairs, pairs);
    _mm_storel_epi64((__m128i *)(void *)p, codes);
}

KERN_FN vec_u32 bytes_load(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

KERN_FN void bytes_store(uint8_t *p, vec_u32 a)
{
    const __m256i low = _mm256_and_si256(a, _mm256_set1_epi32(0xff));
    const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(low),
                                           _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packus_epi16(pairs, pairs));
}

KERN_FN half half_load_n(const uint16_t *p, unsigned n)
{
    uint16_t part[VEC_LANES] = { 0 };
    memcpy(part, p, n * sizeof *p);
    return half_load(part);
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

KERN_FN half vec_to_f16(vec x)
{
    return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

KERN_FN void lanes_add(struct lanes *l, unsigned at, vec x)
{
    const __m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d hi = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    l->s[2 * at] = _mm256_fmadd_pd(lo, lo, l->s[2 * at]);
    l->s[2 * at + 1] = _mm256_fmadd_pd(hi, hi, l->s[2 * at + 1]);
}

#endif

#endif
