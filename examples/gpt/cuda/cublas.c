/* cublas.c: see cublas.h. */
#include "examples/gpt/cuda/cublas.h"

#include <stdbool.h>

#include "proto/base/check.h"
#include "proto/base/library.h"

static const struct library_function functions[] = {
#define CUBLAS_SYMBOL(member, symbol, arguments) { #symbol, offsetof(struct cublas, member) },
    CUBLAS_FUNCTIONS(CUBLAS_SYMBOL)
#undef CUBLAS_SYMBOL
};

static struct cublas table;

static struct library library = {
    .names = { "libcublas.so.13", "libcublas.so.12" },
    .absent = "no cuBLAS here (libcublas.so.13 or .12): install the CUDA Toolkit's, or add its "
              "folder to LD_LIBRARY_PATH",
    .called = "the cuBLAS here",
    .remedy = "install version 12 or 13",
    .functions = functions,
    .function_count = ARRAY_SIZE(functions),
    .table = &table,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

int cublas_load(const struct cublas **ret_cublas, struct shd_err *e)
{
    const int r = library_load(&library, e);
    if (r == SHD_OK)
        *ret_cublas = &table;
    return r;
}

const char *cublas_status_name(cublasStatus_t status)
{
    static const char *const names[] = {
        [0] = "CUBLAS_STATUS_SUCCESS",         [1] = "CUBLAS_STATUS_NOT_INITIALIZED",
        [3] = "CUBLAS_STATUS_ALLOC_FAILED",    [7] = "CUBLAS_STATUS_INVALID_VALUE",
        [8] = "CUBLAS_STATUS_ARCH_MISMATCH",   [13] = "CUBLAS_STATUS_EXECUTION_FAILED",
        [14] = "CUBLAS_STATUS_INTERNAL_ERROR", [15] = "CUBLAS_STATUS_NOT_SUPPORTED",
    };
    const bool known = status >= 0 && (size_t)status < ARRAY_SIZE(names) && names[status] != NULL;
    return known ? names[status] : "an unknown status";
}
