/* gemm_half.h: products of factors rounded to 16 bits; gemm.c's other half, fp32 model only. */
#ifndef GPT_GEMM_HALF_H
#define GPT_GEMM_HALF_H

#include "examples/gpt/gemm.h"

/* As gemm_init(), gemm_describe() and gemm_run(), for the kinds other than GEMM_FULL. */
int gemm_half_init(enum gemm_kind kind, struct shd_err *e);
const char *gemm_half_describe(enum gemm_kind kind);
void gemm_half_run(enum gemm_kind kind, struct gemm_size size, struct gemm_in a, struct gemm_in b,
                   float beta, float *c, uint64_t c_stride);

/* oneDNN would start OpenMP teams under each of our threads; call before it, on every thread. */
void gemm_use_one_thread(void);

#endif
