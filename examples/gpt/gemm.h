/* gemm.h: the matrix product, one call on one thread.
 *
 * fp32 is oneDNN's dnnl_sgemm(): measured beside OpenBLAS by bench/bench_gemm.c, the choice is
 * explained in docs/numerics.md. fp64 (tests only) is three plain loops. The other kinds take
 * the same fp32 arrays, round both factors to 16 bits, and sum in fp32.
 *
 * Bits: for given sizes, leading dimensions and values, the result depends neither on the
 * thread nor on where the arrays lie (tests/unit/examples/gpt/test_gpt_bits.c). It does depend on
 * the library's version and on the instruction set it picks for the CPU; and the two bf16 kinds
 * differ from each other, because the instructions sum pairs of products in an order of their own.
 */
#ifndef GPT_GEMM_H
#define GPT_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/real.h"

enum gemm_kind {
    GEMM_FULL,          /* in `real`, nothing is rounded */
    GEMM_BF16_NATIVE,   /* bf16 factors, the CPU's bf16 instructions by way of oneDNN */
    GEMM_BF16_EMULATED, /* factors rounded to bf16, then the fp32 product */
    GEMM_F16_EMULATED,  /* factors rounded to fp16 (beyond 65,504: inf), then the fp32 product */
};

/* A row-major matrix inside a larger one: element (i, j) at data[i * stride + j]. */
struct gemm_in {
    const real *data;
    uint64_t stride;
    int transposed; /* use it as its transpose */
};

/* data as it lies, and as its transpose. */
static inline struct gemm_in gemm_plain(const real *data, uint64_t stride)
{
    return (struct gemm_in){ .data = data, .stride = stride };
}

static inline struct gemm_in gemm_transposed(const real *data, uint64_t stride)
{
    return (struct gemm_in){ .data = data, .stride = stride, .transposed = 1 };
}

struct gemm_size {
    uint64_t m, n, k;
};

/* Check that the library and the CPU can do kind. SHD_ENOTSUP when they cannot. Call early. */
int gemm_init(enum gemm_kind kind, struct shd_err *e);

/* Its name for a log: "AVX-512-BF16 (oneDNN)". After gemm_init() of the kind. */
const char *gemm_describe(enum gemm_kind kind);

/* Call it from pool_run() tasks only, which run with signals blocked (see pool.h for why).
 * c[m, n] = a[m, k] b[k, n] + beta c, beta 0 or 1. With beta 0, c need not be initialised.
 * a is given as [k, m] when a.transposed, b as [n, k] when b.transposed. Sizes at least 1. */
void gemm_run(enum gemm_kind kind, struct gemm_size size, struct gemm_in a, struct gemm_in b,
              real beta, real *c, uint64_t c_stride);

#endif
