/* gemm.h: the matrix product, one call on one thread.
 *
 * fp32 is oneDNN's dnnl_sgemm(): measured beside OpenBLAS by bench/bench_gemm.c, the choice is
 * explained in docs/numerics.md. fp64 (tests only) is three plain loops.
 *
 * Bits: for given sizes, leading dimensions and values, the result depends neither on the
 * thread nor on where the arrays lie (tests/test_gpt_bits.c). It does depend on the library's
 * version and on the instruction set it picks for the CPU.
 */
#ifndef GPT_GEMM_H
#define GPT_GEMM_H

#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/real.h"

/* A row-major matrix inside a larger one: element (i, j) at data[i * stride + j]. */
struct gemm_in {
    const real *data;
    uint64_t stride;
    int transposed; /* use it as its transpose */
};

struct gemm_size {
    uint64_t m, n, k;
};

/* Check that the library works here at all. SHD_ENOTSUP when it does not. Call once, early. */
int gemm_init(struct shd_err *e);

/* Call it from pool_run() tasks only, which run with signals blocked (see pool.h for why).
 * c[m, n] = a[m, k] b[k, n] + beta c, beta 0 or 1. With beta 0, c need not be initialised.
 * a is given as [k, m] when a.transposed, b as [n, k] when b.transposed. Sizes at least 1. */
void gemm_run(struct gemm_size size, struct gemm_in a, struct gemm_in b, real beta, real *c,
              uint64_t c_stride);

#endif
