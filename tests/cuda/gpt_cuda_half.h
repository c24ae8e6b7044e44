/* Numbers of an enum gpu_dtype, on the host, by half.h. */
#ifndef SHD_TESTS_GPT_CUDA_HALF_H
#define SHD_TESTS_GPT_CUDA_HALF_H

#include "examples/gpt/cuda/args.h"
#include "examples/gpt/half.h"

static inline float rounded(float x, uint32_t dtype)
{
    return dtype == GPU_F32 ? x : dtype == GPU_BF16 ? half_round_bf16(x) : half_round_f16(x);
}

/* Of a 16-bit dtype. */
static inline uint16_t narrowed(float x, uint32_t dtype)
{
    const uint32_t u = half_bits(rounded(x, dtype)), a = u & 0x7fffffffu;
    if (dtype == GPU_BF16)
        return (uint16_t)(u >> 16);
    const uint32_t normal = a >= 0x7f800000u ? a >> 13 & 0x7fffu : (a >> 13) - (112u << 10);
    return (uint16_t)(u >> 16 & 0x8000u) |
           (uint16_t)(a < 0x38800000u ? (uint32_t)(half_float(a) * 0x1p24f) : normal);
}

static inline float widened(uint16_t h, uint32_t dtype)
{
    return dtype == GPU_BF16 ? half_widen_bf16(h) : half_widen_f16(h);
}

#endif
