/* gemm_half.h: products of factors rounded to 16 bits; gemm.c's other half, fp32 model only. */
#ifndef GPT_GEMM_HALF_H
#define GPT_GEMM_HALF_H

#include "examples/gpt/gemm.h"

/* As gemm_init() and gemm_describe(), for the kinds other than GEMM_FULL. */
int gemm_half_init(enum gemm_kind kind, struct shd_err *e);
const char *gemm_half_describe(enum gemm_kind kind);

/* Of an emulated kind: both factors become copies rounded to its 16 bits, which are the calling
 * thread's until it rounds the next. */
void gemm_half_round(enum gemm_kind kind, struct gemm_size size, struct gemm_in *a,
                     struct gemm_in *b);

/* As gemm_run() of GEMM_BF16_NATIVE. oneDNN was told already to use one thread. */
void gemm_half_native(struct gemm_size size, struct gemm_in a, struct gemm_in b, float beta,
                      float *c, uint64_t c_stride);

#endif
