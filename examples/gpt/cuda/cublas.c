/* cublas.c: see cublas.h. */
#include "examples/gpt/cuda/cublas.h"

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
    switch (status) {
    case 0:
        return "CUBLAS_STATUS_SUCCESS";
    case 1:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case 3:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case 7:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case 8:
        return "CUBLAS_STATUS_ARCH_MISMATCH";
    case 13:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case 14:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case 15:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "an unknown status";
    }
}
