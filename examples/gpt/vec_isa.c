/* vec_isa.c: see vec.h. Compiled once per instruction set, with VEC_OPS naming the table.
 *
 * Sums use the compilers' vector extension, so that the lanes are part of the source and not of
 * what the optimizer makes of it; element-wise loops are plain C, which it vectorizes well.
 */
#include "examples/gpt/vec.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "examples/gpt/half.h"

/* Rows are aligned to their element only. */
typedef real lanes
    __attribute__((vector_size(VEC_LANES * sizeof(real)), aligned(sizeof(real)), may_alias));

#define LANES_AT(p) (*(const lanes *)(p))

#define VEC_NORM_EPS ((real)1e-5)

/* ((l0+l8)+(l4+l12)) + ...: halves are added until one lane is left. */
static real fold_sum(const lanes *v)
{
    real x[VEC_LANES];
    memcpy(x, v, sizeof x);
    for (int width = VEC_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            x[i] += x[i + width];
    return x[0];
}

#ifdef GPT_F64
static inline real real_exp(real x)
{
    return exp(x);
}
#else
/* exp(x) for x <= 88, relative error below 3e-7; below -87 it stays at exp(-87) = 1.6e-38. NaN
 * stays NaN. 2^n * exp(r) with n = round(x / ln 2), |r| <= ln 2 / 2 split as by Cody and Waite,
 * and the Taylor polynomial of degree 7, whose remainder there is 0.3466^8 / 8! = 5.2e-9. */
static inline real real_exp(real x)
{
    const float round_to_int = 0x1.8p23f; /* adding it leaves n in the low mantissa bits */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + round_to_int;
    const float n = shifted - round_to_int;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union {
        float f;
        uint32_t bits;
    } power = { .f = shifted };
    power.bits = (power.bits << 23) + 0x3f800000u; /* n as the exponent of a float */
    return p * power.f;
}
#endif

static void vec_bias(real *restrict y, const real *restrict bias, struct vec_tile tile)
{
    for (uint64_t i = 0; i < tile.rows; i++)
        for (uint64_t j = 0; j < tile.cols; j++)
            y[i * tile.stride + j] += bias[j];
}

static void vec_bias_residual(real *restrict y, const real *restrict bias,
                              const real *restrict residual, struct vec_tile tile)
{
    for (uint64_t i = 0; i < tile.rows; i++) {
        const uint64_t row = i * tile.stride;
        for (uint64_t j = 0; j < tile.cols; j++)
            y[row + j] = residual[row + j] + (y[row + j] + bias[j]);
    }
}

/* gelu(x) = x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3); Hendrycks and Gimpel,
 * arXiv:1606.08415. Since (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), one exp does it. */
#define GELU_TWO_SQRT_2_PI ((real)1.5957691216057308)
#define GELU_CUBIC         ((real)0.044715)

static inline real gelu_gate(real x)
{
    const real two_u = GELU_TWO_SQRT_2_PI * (x + GELU_CUBIC * (x * x * x));
    return 1 / (1 + real_exp(-two_u));
}

/* The derivative costs little beside the exp that it shares with the function, and takes the place
 * of x, which nobody else reads. */
static void vec_bias_gelu(real *restrict x, real *restrict act, const real *restrict bias,
                          struct vec_tile tile)
{
    for (uint64_t i = 0; i < tile.rows; i++) {
        const uint64_t row = i * tile.stride;
        for (uint64_t j = 0; j < tile.cols; j++) {
            const real at = x[row + j] + bias[j];
            const real s = gelu_gate(at);
            const real two_du = GELU_TWO_SQRT_2_PI * (1 + 3 * GELU_CUBIC * (at * at));
            act[row + j] = at * s;
            x[row + j] = s + at * (s * (1 - s)) * two_du;
        }
    }
}

static void vec_gelu_grad(real *restrict d, const real *restrict slope, struct vec_tile tile)
{
    for (uint64_t i = 0; i < tile.rows; i++)
        for (uint64_t j = 0; j < tile.cols; j++)
            d[i * tile.stride + j] *= slope[i * tile.stride + j];
}

static void vec_col_sums(real *restrict out, const real *restrict x, struct vec_tile tile)
{
    for (uint64_t j = 0; j < tile.cols; j++)
        out[j] = 0;
    for (uint64_t i = 0; i < tile.rows; i++)
        for (uint64_t j = 0; j < tile.cols; j++)
            out[j] += x[i * tile.stride + j];
}

static real row_sum(const real *x, uint64_t count)
{
    lanes acc = { 0 };
    uint64_t j = 0;
    for (; j + VEC_LANES <= count; j += VEC_LANES)
        acc += LANES_AT(x + j);
    for (uint64_t l = 0; j + l < count; l++)
        acc[l] += x[j + l];
    return fold_sum(&acc);
}

static real row_square_sum(const real *x, real mean, uint64_t count)
{
    lanes acc = { 0 };
    uint64_t j = 0;
    for (; j + VEC_LANES <= count; j += VEC_LANES) {
        const lanes d = LANES_AT(x + j) - mean;
        acc += d * d;
    }
    for (uint64_t l = 0; j + l < count; l++)
        acc[l] += (x[j + l] - mean) * (x[j + l] - mean);
    return fold_sum(&acc);
}

static real row_dot(const real *a, const real *b, uint64_t count)
{
    lanes acc = { 0 };
    uint64_t j = 0;
    for (; j + VEC_LANES <= count; j += VEC_LANES)
        acc += LANES_AT(a + j) * LANES_AT(b + j);
    for (uint64_t l = 0; j + l < count; l++)
        acc[l] += a[j + l] * b[j + l];
    return fold_sum(&acc);
}

/* A maximum has one value in whatever order it is taken. A NaN may be lost here; it comes back
 * out of exp(x - max). */
static real row_max(const real *x, uint64_t count)
{
    real best[VEC_LANES];
    for (uint64_t l = 0; l < VEC_LANES; l++)
        best[l] = x[l < count ? l : 0];
    uint64_t j = VEC_LANES;
    for (; j + VEC_LANES <= count; j += VEC_LANES)
        for (uint64_t l = 0; l < VEC_LANES; l++)
            best[l] = x[j + l] > best[l] ? x[j + l] : best[l];
    for (; j < count; j++)
        best[0] = x[j] > best[0] ? x[j] : best[0];
    for (uint64_t l = 1; l < VEC_LANES; l++)
        best[0] = best[l] > best[0] ? best[l] : best[0];
    return best[0];
}

static void vec_norm_forward(const struct vec_norm *n, real *restrict y)
{
    const real *restrict weight = n->weight, *restrict bias = n->bias;
    const uint64_t cols = n->cols;
    for (uint64_t i = 0; i < n->rows; i++) {
        const real *restrict x = n->x + i * cols;
        const real mean = row_sum(x, cols) / (real)cols;
        const real variance = row_square_sum(x, mean, cols) / (real)cols;
        const real rstd = 1 / (real)sqrt((double)(variance + VEC_NORM_EPS));
        for (uint64_t j = 0; j < cols; j++)
            y[i * cols + j] = (x[j] - mean) * rstd * weight[j] + bias[j];
        n->mean[i] = mean;
        n->rstd[i] = rstd;
    }
}

/* With h = (x - mean) rstd and g = dy weight: dx = rstd (g - mean(g) - h mean(g h)). */
static void vec_norm_backward(const struct vec_norm *n, const real *restrict dy, real *restrict dx)
{
    const uint64_t cols = n->cols;
    for (uint64_t i = 0; i < n->rows; i++) {
        const real *x = n->x + i * cols, *d = dy + i * cols;
        const real mean = n->mean[i], rstd = n->rstd[i];
        lanes sum_g = { 0 }, sum_gh = { 0 };
        uint64_t j = 0;
        for (; j + VEC_LANES <= cols; j += VEC_LANES) {
            const lanes g = LANES_AT(d + j) * LANES_AT(n->weight + j);
            sum_g += g;
            sum_gh += g * ((LANES_AT(x + j) - mean) * rstd);
        }
        for (uint64_t l = 0; j + l < cols; l++) {
            const real g = d[j + l] * n->weight[j + l];
            sum_g[l] += g;
            sum_gh[l] += g * ((x[j + l] - mean) * rstd);
        }
        const real mean_g = fold_sum(&sum_g) / (real)cols;
        const real mean_gh = fold_sum(&sum_gh) / (real)cols;
        real *restrict out = dx + i * cols;
        for (j = 0; j < cols; j++) {
            const real h = (x[j] - mean) * rstd;
            out[j] += rstd * ((d[j] * n->weight[j] - mean_g) - h * mean_gh);
        }
    }
}

static void vec_norm_params(const struct vec_norm *n, const real *restrict dy, uint64_t col,
                            uint64_t count, real *restrict dweight, real *restrict dbias)
{
    for (uint64_t j = col; j < col + count; j++) {
        dweight[j] = 0;
        dbias[j] = 0;
    }
    for (uint64_t i = 0; i < n->rows; i++) {
        const real *restrict x = n->x + i * n->cols, *restrict d = dy + i * n->cols;
        const real mean = n->mean[i], rstd = n->rstd[i];
        for (uint64_t j = col; j < col + count; j++) {
            dweight[j] += d[j] * ((x[j] - mean) * rstd);
            dbias[j] += d[j];
        }
    }
}

static void vec_softmax_causal(real *p, struct vec_tile tile, uint64_t first, real scale)
{
    for (uint64_t i = 0; i < tile.rows; i++) {
        real *restrict row = p + i * tile.stride;
        const uint64_t count = first + i + 1;
        const real max = row_max(row, count);
        for (uint64_t j = 0; j < count; j++)
            row[j] = real_exp((row[j] - max) * scale);
        const real inverse = 1 / row_sum(row, count);
        for (uint64_t j = 0; j < count; j++)
            row[j] *= inverse;
        for (uint64_t j = count; j < tile.cols; j++)
            row[j] = 0;
    }
}

static void vec_softmax_causal_grad(real *p, struct vec_tile tile, uint64_t first, real scale,
                                    const real *dp, uint64_t dp_stride)
{
    for (uint64_t i = 0; i < tile.rows; i++) {
        real *restrict row = p + i * tile.stride;
        const real *restrict d = dp + i * dp_stride;
        const uint64_t count = first + i + 1;
        const real dot = row_dot(row, d, count);
        for (uint64_t j = 0; j < count; j++)
            row[j] = scale * (row[j] * (d[j] - dot));
    }
}

static void vec_cross_entropy(real *x, struct vec_tile tile, const uint8_t *target, real scale,
                              double *losses)
{
    for (uint64_t i = 0; i < tile.rows; i++) {
        real *restrict row = x + i * tile.stride;
        const real max = row_max(row, tile.cols);
        const real at_target = row[target[i]] - max;
        for (uint64_t j = 0; j < tile.cols; j++)
            row[j] = real_exp(row[j] - max);
        const real sum = row_sum(row, tile.cols);
        losses[i] = log((double)sum) - (double)at_target;
        const real inverse = scale / sum;
        for (uint64_t j = 0; j < tile.cols; j++)
            row[j] *= inverse;
        row[target[i]] -= scale;
    }
}

/* Eight numbers as they lie in a row. */
typedef real eight __attribute__((vector_size(8 * sizeof(real)), aligned(sizeof(real)), may_alias));

#define EIGHT_AT(p) (*(eight *)(p))

/* [8, 8]: pairs, fours and halves of rows change places. */
static inline void transpose_eight(real *out, uint64_t out_stride, const real *x, uint64_t stride)
{
    eight a[8], b[8];
    for (uint64_t i = 0; i < 8; i++)
        a[i] = *(const eight *)(x + i * stride);
    for (int i = 0; i < 8; i += 2) {
        b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; j++) {
            const eight *p = &b[i + j];
            a[i + 2 * j] = __builtin_shufflevector(p[0], p[2], 0, 1, 8, 9, 4, 5, 12, 13);
            a[i + 2 * j + 1] = __builtin_shufflevector(p[0], p[2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (uint64_t i = 0; i < 4; i++) {
        EIGHT_AT(out + i * out_stride) = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9,
                                                                 10, 11);
        EIGHT_AT(out + (i + 4) * out_stride) = __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7,
                                                                       12, 13, 14, 15);
    }
}

/* Sixteen columns at a time: whole cache lines of x. */
static void vec_transpose(real *out, uint64_t out_stride, const real *x, struct vec_tile tile)
{
    const uint64_t rows = tile.rows / 8 * 8, cols = tile.cols / 16 * 16;
    for (uint64_t j = 0; j < cols; j += 16)
        for (uint64_t i = 0; i < rows; i += 8)
            for (uint64_t half = 0; half < 16; half += 8)
                transpose_eight(out + (j + half) * out_stride + i, out_stride,
                                x + i * tile.stride + j + half, tile.stride);
    for (uint64_t i = 0; i < tile.rows; i++)
        for (uint64_t j = i < rows ? cols : 0; j < tile.cols; j++)
            out[j * out_stride + i] = x[i * tile.stride + j];
}

static void vec_round_bf16(float *restrict out, const float *restrict x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = half_round_bf16(x[i]);
}

static void vec_round_f16(float *restrict out, const float *restrict x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = half_round_f16(x[i]);
}

static void vec_pack_bf16(uint16_t *restrict out, const float *restrict x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = (uint16_t)(half_bf16_bits(x[i]) >> 16);
}

static void vec_widen_bf16(float *restrict out, const uint16_t *restrict x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = half_widen_bf16(x[i]);
}

static void vec_widen_f16(float *restrict out, const uint16_t *restrict x, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        out[i] = half_widen_f16(x[i]);
}

extern const struct vec_ops VEC_OPS;
const struct vec_ops VEC_OPS = {
    .name = VEC_NAME,
    .bias = vec_bias,
    .bias_residual = vec_bias_residual,
    .bias_gelu = vec_bias_gelu,
    .gelu_grad = vec_gelu_grad,
    .col_sums = vec_col_sums,
    .norm_forward = vec_norm_forward,
    .norm_backward = vec_norm_backward,
    .norm_params = vec_norm_params,
    .softmax_causal = vec_softmax_causal,
    .softmax_causal_grad = vec_softmax_causal_grad,
    .cross_entropy = vec_cross_entropy,
    .transpose = vec_transpose,
    .round_bf16 = vec_round_bf16,
    .round_f16 = vec_round_f16,
    .pack_bf16 = vec_pack_bf16,
    .widen_bf16 = vec_widen_bf16,
    .widen_f16 = vec_widen_f16,
};
