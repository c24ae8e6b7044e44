/* vec.h: what is computed row by row between the matrix products.
 *
 * vec_isa.c is compiled once per instruction set, and vec_pick() takes the widest the CPU has. All
 * of them give the same bits: element-wise code has one order of operations and no FMA, and sums
 * run over VEC_LANES partial sums folded in a fixed tree, however wide the registers are.
 *
 * Matrices are row-major; `stride` is the distance between rows.
 */
#ifndef GPT_VEC_H
#define GPT_VEC_H

#include <stdint.h>

#include "examples/gpt/real.h"

#define VEC_LANES 16

/* rows x cols of a matrix. */
struct vec_tile {
    uint64_t rows, cols, stride;
};

/* Layer norm of [rows, cols] without gaps. y = (x - mean) * rstd * weight + bias. */
struct vec_norm {
    const real *x, *weight, *bias;
    real *mean, *rstd; /* [rows]: written by forward, read by backward */
    uint64_t rows, cols;
};

struct vec_ops {
    const char *name;
    /* y += bias, per column. */
    void (*bias)(real *y, const real *bias, struct vec_tile tile);
    /* y += bias + residual; residual has y's stride. */
    void (*bias_residual)(real *y, const real *bias, const real *residual, struct vec_tile tile);
    /* act = gelu(x + bias); x becomes gelu'(x + bias), for the backward. Same stride. */
    void (*bias_gelu)(real *x, real *act, const real *bias, struct vec_tile tile);
    /* d *= slope. Same stride. */
    void (*gelu_grad)(real *d, const real *slope, struct vec_tile tile);
    /* out[col] = sum over rows, ascending. */
    void (*col_sums)(real *out, const real *x, struct vec_tile tile);
    void (*norm_forward)(const struct vec_norm *norm, real *y);
    /* dx += the gradient that reaches x through the norm from dy. */
    void (*norm_backward)(const struct vec_norm *norm, const real *dy, real *dx);
    /* dweight, dbias of columns [col, col + count), over all rows ascending. */
    void (*norm_params)(const struct vec_norm *norm, const real *dy, uint64_t col, uint64_t count,
                        real *dweight, real *dbias);
    /* Row i becomes softmax(scale * p[i, 0 .. first + i]); zero from there to tile.cols. */
    void (*softmax_causal)(real *p, struct vec_tile tile, uint64_t first, real scale);
    /* p := scale * p * (dp - sum(p * dp)) in the same triangle; dp has its own stride. */
    void (*softmax_causal_grad)(real *p, struct vec_tile tile, uint64_t first, real scale,
                                const real *dp, uint64_t dp_stride);
    /* losses[i] = -log softmax(x[i])[target[i]] in nats; x becomes scale * d loss / d x. */
    void (*cross_entropy)(real *x, struct vec_tile tile, const uint8_t *target, real scale,
                          double *losses);
    /* out[j * out_stride + i] = x[i, j]. */
    void (*transpose)(real *out, uint64_t out_stride, const real *x, struct vec_tile tile);

    /* Arrays of fp32 in both twins; half.h has the rounding. */
    void (*round_bf16)(float *out, const float *x, uint64_t count);
    void (*round_f16)(float *out, const float *x, uint64_t count);
    void (*pack_bf16)(uint16_t *out, const float *x, uint64_t count);
    void (*widen_bf16)(float *out, const uint16_t *x, uint64_t count);
    void (*widen_f16)(float *out, const uint16_t *x, uint64_t count);
};

/* The variant for this CPU. The same for the whole life of the process. */
const struct vec_ops *vec_pick(void);

/* The variants, widest first, for the tests; NULL where the CPU has not got it. */
#define VEC_VARIANTS 3
const struct vec_ops *vec_variant(uint32_t index);

#endif
