/* cublas.c: see cublas.h. The library stays open: it may have started threads. */
#include "examples/gpt/cuda/cublas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "examples/gpt/fail.h"

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define CUBLAS_SYMBOL(member, symbol, arguments) { #symbol, offsetof(struct cublas, member) },
    CUBLAS_FUNCTIONS(CUBLAS_SYMBOL)
#undef CUBLAS_SYMBOL
};

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cublas table;
static bool loaded; /* under load_lock */

static int load(struct shd_err *e)
{
    static const char *const names[] = { "libcublas.so.13", "libcublas.so.12" };
    void *library = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && library == NULL; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return fail(e, SHD_ENOTSUP,
                    "no cuBLAS here (libcublas.so.13 or .12): install the CUDA Toolkit's, or add "
                    "its folder to LD_LIBRARY_PATH");
    struct cublas found;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *symbol = dlsym(library, functions[i].symbol);
        if (symbol == NULL) {
            dlclose(library);
            return fail(e, SHD_ENOTSUP, "the cuBLAS here has no %s: install version 12 or 13",
                        functions[i].symbol);
        }
        memcpy((char *)&found + functions[i].offset, &symbol, sizeof symbol);
    }
    table = found;
    loaded = true;
    return SHD_OK;
}

int cublas_load(const struct cublas **ret_cublas, struct shd_err *e)
{
    pthread_mutex_lock(&load_lock);
    const int r = loaded ? SHD_OK : load(e);
    pthread_mutex_unlock(&load_lock);
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
