/* linear.h: y = x W + b over all threads, and its gradients.
 *
 * The output is cut into tiles by its shape alone, one gemm_run() per tile, each tile's k loop
 * unbroken: the bits do not depend on the thread that computes a tile.
 */
#ifndef GPT_LINEAR_H
#define GPT_LINEAR_H

#include <stdint.h>

#include "examples/gpt/gemm.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/real.h"
#include "examples/gpt/vec.h"

/* A second product that is added to the first: left [rows, inner] times right, which is
 * [inner, cols], or [cols, inner] when transposed. */
struct linear_plus {
    const real *left, *right;
    uint64_t inner;
    int transposed;
};

struct linear {
    uint64_t rows, in, out; /* x [rows, in], y [rows, out] */
    const real *weight;     /* [in, out], or [out, in] when transposed */
    const real *bias;       /* [out]; NULL with `then` LINEAR_PLAIN only */
    int transposed;
    enum gemm_kind gemm;
    const struct linear_plus *plus; /* NULL, or: added to y before the bias */
    real *scratch; /* [linear_scratch(in, out)], overwritten: the weight as a product reads it
                      fastest; NULL: it is read as it lies */
    int add;       /* to what y has, backward dx; not with plus, or slope */
    uint64_t x_stride, y_stride; /* of the rows of x, dx and slope; of y, dy and other. 0: in, out;
                                    other than out not with plus */
};

/* Elements of the scratch of a weight. */
uint64_t linear_scratch(uint64_t in, uint64_t out);

/* The operation that follows on a tile of y while it is in the cache. */
enum linear_then {
    LINEAR_PLAIN,    /* y = x W (+ b) */
    LINEAR_RESIDUAL, /* y = x W + b + other */
    LINEAR_GELU,     /* y = gelu'(x W + b), other = gelu(x W + b) */
};

/* other: [rows, out], read or written as `then` says; NULL for LINEAR_PLAIN. */
void linear_forward(struct pool *pool, const struct linear *lin, const real *x, real *y,
                    enum linear_then then, real *other);

struct linear_grads {
    const real *x;     /* [rows, in] */
    const real *dy;    /* [rows, out] */
    real *dx;          /* [rows, in], overwritten; NULL: not wanted */
    const real *slope; /* [rows, in] or NULL: what LINEAR_GELU left in y; dx is multiplied by it */
    real *dweight;     /* as weight, overwritten; NULL: none (a frozen weight) */
    real *dbias;       /* [out], overwritten; NULL: none */
    const struct linear_plus *plus; /* NULL, or: added to dx before gelu' */
};

void linear_backward(struct pool *pool, const struct linear *lin, const struct linear_grads *g);

#endif
