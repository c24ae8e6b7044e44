/* cublas.h: cuBLAS, loaded at run time as the driver is (proto/gpu/cuda.h): shd-gpt runs on hosts
 * without it and builds without the CUDA Toolkit. The declarations are its binary interface in
 * versions 12 and 13 (tests/cuda/test_cublas_abi.c holds the two together where there is one).
 *
 * Bits: for one version of cuBLAS, one model of GPU, one stream per handle and a workspace of the
 * caller's own, the same call gives the same bits (cuBLAS's documentation, "Results
 * reproducibility"). Another version or GPU may round differently.
 */
#ifndef GPT_CUDA_CUBLAS_H
#define GPT_CUDA_CUBLAS_H

#include <stddef.h>

#include "client/shd.h"
#include "proto/gpu/cuda.h"

typedef struct cublasContext *cublasHandle_t;
/* Enums there. */
typedef int cublasStatus_t, cublasOperation_t, cublasMath_t, cublasComputeType_t, cublasGemmAlgo_t;
typedef int cudaDataType;

enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_OP_N = 0,
    CUBLAS_OP_T = 1,
    CUBLAS_GEMM_DEFAULT = -1,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
    CUDA_R_32F = 0, /* cudaDataType */
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14,
};

/* X(member, symbol, arguments). Matrices are column-major; alpha and beta are floats of the host.
 */
#define CUBLAS_FUNCTIONS(X)                                                                        \
    X(cublasCreate, cublasCreate_v2, (cublasHandle_t * handle))                                    \
    X(cublasDestroy, cublasDestroy_v2, (cublasHandle_t handle))                                    \
    X(cublasGetVersion, cublasGetVersion_v2, (cublasHandle_t handle, int *version))                \
    X(cublasSetStream, cublasSetStream_v2, (cublasHandle_t handle, CUstream stream))               \
    X(cublasSetWorkspace, cublasSetWorkspace_v2,                                                   \
      (cublasHandle_t handle, void *workspace, size_t bytes))                                      \
    X(cublasSetMathMode, cublasSetMathMode, (cublasHandle_t handle, cublasMath_t mode))            \
    X(cublasGemmEx, cublasGemmEx,                                                                  \
      (cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, \
       const void *alpha, const void *a, cudaDataType a_type, int lda, const void *b,              \
       cudaDataType b_type, int ldb, const void *beta, void *c, cudaDataType c_type, int ldc,      \
       cublasComputeType_t compute_type, cublasGemmAlgo_t algo))                                   \
    X(cublasGemmStridedBatchedEx, cublasGemmStridedBatchedEx,                                      \
      (cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, \
       const void *alpha, const void *a, cudaDataType a_type, int lda, long long a_stride,         \
       const void *b, cudaDataType b_type, int ldb, long long b_stride, const void *beta, void *c, \
       cudaDataType c_type, int ldc, long long c_stride, int count,                                \
       cublasComputeType_t compute_type, cublasGemmAlgo_t algo))

struct cublas {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define CUBLAS_MEMBER(member, symbol, arguments) cublasStatus_t(*member) arguments;
    CUBLAS_FUNCTIONS(CUBLAS_MEMBER)
#undef CUBLAS_MEMBER
};

/* Open libcublas.so.13, or .12. Thread-safe; the table is the process's. Errors: SHD_ENOTSUP there
 * is none, or one without a function, which is named; with what to do. */
int cublas_load(const struct cublas **ret_cublas, struct shd_err *e);

/* "CUBLAS_STATUS_NOT_SUPPORTED"; never NULL. */
const char *cublas_status_name(cublasStatus_t status);

#endif
