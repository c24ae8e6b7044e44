/* gemm.c: see gemm.h. */
#include "examples/gpt/gemm.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "examples/gpt/gemm_half.h"
#include "proto/base/status.h"

#ifdef GPT_F64

int gemm_init(enum gemm_kind kind, struct shd_err *e)
{
    return kind == GEMM_FULL ? SHD_OK : err_set(e, SHD_ENOTSUP, "fp64 has no 16-bit products");
}

const char *gemm_describe(enum gemm_kind kind)
{
    (void)kind;
    return "fp64 loops";
}

static real gemm_at(struct gemm_in x, uint64_t i, uint64_t j)
{
    return x.transposed ? x.data[j * x.stride + i] : x.data[i * x.stride + j];
}

void gemm_run(enum gemm_kind kind, struct gemm_size size, struct gemm_in a, struct gemm_in b,
              real beta, real *c, uint64_t c_stride)
{
    (void)kind; /* gemm_init() refused the others */
    for (uint64_t i = 0; i < size.m; i++) {
        for (uint64_t j = 0; j < size.n; j++) {
            real sum = 0;
            for (uint64_t k = 0; k < size.k; k++)
                sum += gemm_at(a, i, k) * gemm_at(b, k, j);
            real *out = &c[i * c_stride + j];
            *out = beta == 0 ? sum : *out + sum;
        }
    }
}

#else

#include <oneapi/dnnl/dnnl.h>

/* Distributions build oneDNN on OpenMP, which would start a team of its own under each of our
 * threads. The wanted team size is a per-thread setting; found by dlsym, because it must be set
 * in the runtime that oneDNN itself is linked to. A oneDNN without OpenMP needs nothing. */
static void use_one_thread(void)
{
    static _Thread_local bool done;
    if (done)
        return;
    done = true;
    void *symbol = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (symbol == NULL)
        return;
    void (*set_threads)(int);
    *(void **)&set_threads = symbol; /* POSIX's way around ISO C's function pointers */
    set_threads(1);
}

static dnnl_status_t gemm_call(struct gemm_size size, struct gemm_in a, struct gemm_in b,
                               float beta, float *c, uint64_t c_stride)
{
    return dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', (dnnl_dim_t)size.m,
                      (dnnl_dim_t)size.n, (dnnl_dim_t)size.k, 1.0f, a.data, (dnnl_dim_t)a.stride,
                      b.data, (dnnl_dim_t)b.stride, beta, c, (dnnl_dim_t)c_stride);
}

int gemm_init(enum gemm_kind kind, struct shd_err *e)
{
    const float one[1] = { 1 };
    float c[1];
    use_one_thread();
    const struct gemm_in a = { .data = one, .stride = 1 };
    const dnnl_status_t r = gemm_call((struct gemm_size){ 1, 1, 1 }, a, a, 0, c, 1);
    if (r != dnnl_success || c[0] != 1)
        return err_set(e, SHD_ENOTSUP, "oneDNN's sgemm does not work here (status %d)", (int)r);
    return kind == GEMM_FULL ? SHD_OK : gemm_half_init(kind, e);
}

const char *gemm_describe(enum gemm_kind kind)
{
    return kind == GEMM_FULL ? "fp32 (oneDNN)" : gemm_half_describe(kind);
}

void gemm_run(enum gemm_kind kind, struct gemm_size size, struct gemm_in a, struct gemm_in b,
              real beta, real *c, uint64_t c_stride)
{
    use_one_thread();
    if (kind == GEMM_BF16_NATIVE) {
        gemm_half_native(size, a, b, beta, c, c_stride);
        return;
    }
    if (kind != GEMM_FULL)
        gemm_half_round(kind, size, &a, &b);
    const dnnl_status_t r = gemm_call(size, a, b, beta, c, c_stride);
    if (r != dnnl_success) { /* bad sizes are our bug; out of memory is the other reason */
        fprintf(stderr, "shd-gpt: oneDNN sgemm failed with status %d\n", (int)r);
        abort();
    }
}

#endif
