/* A libcublas.so.13 for tests without a GPU: the few functions of examples/gpt/cuda/cublas.h, as a
 * library above the driver's interface, which launches one kernel on the caller's stream as cuBLAS
 * launches its own. What that driver is, is not its business: tests have the stand-in of shim.h.
 *
 * It refuses what cuBLAS refuses, leading dimensions above all, and what the worker is not meant to
 * ask for. SHIM_CUBLAS_FAIL=n: the n-th product returns CUBLAS_STATUS_EXECUTION_FAILED. Products it
 * did are counted: shim_cublas_products().
 */
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "examples/gpt/cuda/cublas.h"
#include "tests/cuda/shim_gemm.h"

#define SHIM_API __attribute__((visibility("default")))

enum { NOT_INITIALIZED = 1, ALLOC_FAILED = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13 };

struct cublasContext {
    const struct cuda *cuda;
    CUmodule module;
    CUfunction gemm;
    CUstream stream;
    int math;
};

#define SHIM_DECLARE(member, symbol, arguments) \
    SHIM_API cublasStatus_t member arguments __asm__(#symbol);
CUBLAS_FUNCTIONS(SHIM_DECLARE)
#undef SHIM_DECLARE

SHIM_API uint64_t shim_cublas_products(void);

static atomic_ullong products;

uint64_t shim_cublas_products(void)
{
    return products;
}

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    static const uint64_t no_image[8];
    struct shd_err e;
    struct cublasContext *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ALLOC_FAILED;
    if (cuda_load(&c->cuda, &e) != SHD_OK ||
        c->cuda->cuModuleLoadData(&c->module, no_image) != CUDA_SUCCESS) {
        free(c);
        return NOT_INITIALIZED;
    }
    if (c->cuda->cuModuleGetFunction(&c->gemm, c->module, "shim_product") != CUDA_SUCCESS) {
        cublasDestroy(c);
        return NOT_INITIALIZED;
    }
    *handle = c;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    if (handle == NULL)
        return NOT_INITIALIZED;
    handle->cuda->cuModuleUnload(handle->module);
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGetVersion(cublasHandle_t handle, int *version)
{
    *version = 130000;
    return handle != NULL ? CUBLAS_STATUS_SUCCESS : NOT_INITIALIZED;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, CUstream stream)
{
    if (handle == NULL)
        return NOT_INITIALIZED;
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes)
{
    if (handle == NULL)
        return NOT_INITIALIZED;
    return (uintptr_t)workspace % 256 == 0 && bytes > 0 ? CUBLAS_STATUS_SUCCESS : INVALID_VALUE;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, int mode)
{
    if (handle == NULL)
        return NOT_INITIALIZED;
    handle->math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

static int type_known(int type)
{
    return type == CUDA_R_32F || type == CUDA_R_16BF || type == CUDA_R_16F;
}

static int sizes_valid(const struct shim_gemm *g)
{
    const int a_rows = g->op_a ? g->k : g->m, b_rows = g->op_b ? g->n : g->k;
    return g->m >= 1 && g->n >= 1 && g->k >= 1 && g->count >= 1 && g->lda >= a_rows &&
           g->ldb >= b_rows && g->ldc >= g->m && g->a != NULL && g->b != NULL && g->c != NULL;
}

static cublasStatus_t run(cublasHandle_t handle, struct shim_gemm *g, int compute)
{
    if (handle == NULL)
        return NOT_INITIALIZED;
    const char *fail = getenv("SHIM_CUBLAS_FAIL");
    const uint64_t number = ++products;
    if (fail != NULL && number == strtoull(fail, NULL, 10))
        return EXECUTION_FAILED;
    if (!sizes_valid(g) || g->a_type != g->b_type ||
        (g->c_type != CUDA_R_32F && g->c_type != g->a_type))
        return INVALID_VALUE;
    if (compute != CUBLAS_COMPUTE_32F && compute != CUBLAS_COMPUTE_32F_PEDANTIC &&
        compute != CUBLAS_COMPUTE_32F_FAST_TF32)
        return INVALID_VALUE;
    g->tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    void *params[] = { g };
    const CUresult r = handle->cuda->cuLaunchKernel(handle->gemm, (unsigned)g->count, 1, 1, 1, 1, 1,
                                                    0, handle->stream, params, NULL);
    return r == CUDA_SUCCESS ? CUBLAS_STATUS_SUCCESS : EXECUTION_FAILED;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, int op_a, int op_b, int m, int n, int k,
                            const void *alpha, const void *a, int a_type, int lda, const void *b,
                            int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
                            int compute_type, int algo)
{
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, 0, b,
                                      b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute_type,
                                      algo);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, int op_a, int op_b, int m, int n,
                                          int k, const void *alpha, const void *a, int a_type,
                                          int lda, long long a_stride, const void *b, int b_type,
                                          int ldb, long long b_stride, const void *beta, void *c,
                                          int c_type, int ldc, long long c_stride, int count,
                                          int compute_type, int algo)
{
    if (!type_known(a_type) || !type_known(b_type) || !type_known(c_type) ||
        algo != CUBLAS_GEMM_DEFAULT || op_a < 0 || op_a > 1 || op_b < 0 || op_b > 1)
        return INVALID_VALUE;
    struct shim_gemm g = { .a = a,
                           .b = b,
                           .c = c,
                           .a_stride = a_stride,
                           .b_stride = b_stride,
                           .c_stride = c_stride,
                           .m = m,
                           .n = n,
                           .k = k,
                           .lda = lda,
                           .ldb = ldb,
                           .ldc = ldc,
                           .count = count,
                           .op_a = op_a,
                           .op_b = op_b,
                           .a_type = a_type,
                           .b_type = b_type,
                           .c_type = c_type,
                           .alpha = *(const float *)alpha,
                           .beta = *(const float *)beta };
    return run(handle, &g, compute_type);
}
