/* The one kernel of the stand-in for cuBLAS; see shim_cublas.c. */
#ifndef SHD_TESTS_SHIM_GEMM_H
#define SHD_TESTS_SHIM_GEMM_H

#include <stdint.h>

enum { SHIM_R_32F = 0, SHIM_R_16F = 2, SHIM_R_16BF = 14 }; /* cuBLAS's cudaDataType */

/* c = op(a) op(b) + beta c of column-major matrices, `count` times; bf16, fp16 or fp32 factors
 * (rounded to TF32 where tf32 says so), sums in fp32, k ascending. A block of one thread for each
 * c. */
struct shim_gemm {
    const void *a, *b;
    void *c;
    long long a_stride, b_stride, c_stride;
    int m, n, k, lda, ldb, ldc, count;
    int op_a, op_b;             /* 1: transposed */
    int a_type, b_type, c_type; /* SHIM_R_... */
    int tf32;
    float alpha, beta;
};

#endif
