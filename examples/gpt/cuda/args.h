/* args.h: what the host passes to the GPU's kernels; each takes one of these by value. Plain C, for
 * both sides.
 *
 * Names as in model_layer.h: R = batch * seq rows, C = dim, V = vocabulary, H = heads, S = C / H,
 * E = experts.
 * All pointers are the device's, matrices row-major without gaps, of fp32 unless a dtype is given:
 * a `void *` is of any gpu_dtype. C, S and the strides of attention are multiples of 8: a
 * thread reads and writes 8 neighbours at a time, 16 or 32 bytes.
 *
 * Three shapes of launch, always of GPU_THREADS threads:
 *   by element   a thread for each 8 elements: elems / 8 threads
 *   by row       a warp for each row
 *   by column    a block for each GPU_COLS columns and chunk of rows; sums go to partial[chunk,
 *                cols], and gpu_columns_sum adds the chunks in ascending order. So sums have one
 *                order, whatever runs when: no atomics anywhere.
 */
#ifndef GPT_CUDA_ARGS_H
#define GPT_CUDA_ARGS_H

#include <stdint.h>

#define GPU_THREADS 256u
#define GPU_WARPS   8u   /* of a block */
#define GPU_LANE    8u   /* elements a thread takes at once */
#define GPU_COLS    256u /* columns of a block: a warp's 32 threads of 8 */
#define GPU_VOCAB   256u /* GPT_VOCAB: one warp holds a row of logits */
#define GPU_SEGMENT 64u  /* most rows of a segment of gpu_embed_tokens */

enum gpu_dtype { GPU_F32 = 1, GPU_BF16 = 2, GPU_F16 = 3 }; /* as enum shd_dtype */

struct gpu_embed { /* by element: x[row] = wte[token] + wpe[position] */
    float *x;      /* [R, C] */
    const void *wte, *wpe;
    const uint8_t *tokens; /* [R] */
    uint64_t elems;        /* R * C */
    uint32_t dim, seq, param_dtype;
};

struct gpu_segment { /* rows of one token */
    uint32_t begin, end;
};

struct gpu_embed_tokens {   /* by column, a chunk for each segment */
    const float *dx;        /* [R, C] */
    const uint32_t *sorted; /* [R] rows by token, ascending within one */
    const struct gpu_segment *segments;
    float *partial; /* [segments, C] */
    uint32_t segment_count, dim;
};

struct gpu_embed_sum { /* by element: dwte[token] += its segments, ascending */
    float *dwte;       /* [V, C] */
    const float *partial;
    const uint32_t *first; /* [V + 1] segment of a token's first rows */
    uint32_t dim;
};

struct gpu_embed_positions { /* by element: dwpe[t] = sum over sequences, ascending */
    float *dwpe;             /* [seq, C] */
    const float *dx;
    uint32_t batch, seq, dim;
};

/* By row: y = (x - mean) rstd weight + shift, and before that, where raw is not NULL,
 * x = residual + (raw + bias). */
struct gpu_norm {
    float *x; /* [rows, cols] */
    const float *raw, *residual;
    const void *bias; /* [cols] */
    const void *weight, *shift;
    void *y;
    float *mean, *rstd; /* [rows] */
    uint64_t rows;
    uint32_t cols, param_dtype, y_dtype;
};

struct gpu_norm_grad { /* by row: dx = (add ? dx : 0) + the gradient through the norm */
    const float *x, *mean, *rstd;
    const float *dy; /* [rows, cols] */
    const void *weight;
    float *dx;
    uint64_t rows;
    uint32_t cols, param_dtype, add;
};

struct gpu_norm_columns { /* by column: of dweight, and behind all chunks of it, of dshift */
    const float *x, *mean, *rstd, *dy;
    float *partial; /* [2, chunks, cols] */
    uint64_t rows;
    uint32_t cols, chunk_rows, chunks;
};

/* By column: d(, times gelu'(pre)), summed, and stored as a factor of the next product. */
struct gpu_columns {
    const float *d;   /* [rows, cols]; or with head_size > 0 of heads, see gpu_to_heads */
    const float *pre; /* [rows, cols] or NULL */
    void *out;        /* [rows, cols], may be d where that is no heads' and of its dtype; or NULL */
    float *partial;   /* [chunks, cols], or NULL */
    uint64_t rows;
    uint32_t cols, chunk_rows, out_dtype;
    uint32_t dim, head_size, seq; /* of heads: cols is 3 dim */
};

struct gpu_columns_sum {  /* a block for each 32 columns: out = sum of the chunks */
    const float *partial; /* [chunks, stride] */
    float *out;           /* [cols] */
    uint32_t cols, chunks, stride;
};

/* By element: rows to heads: in[row, part C + h S + k] (+ bias) to
 * out[part, sequence, h, position, k]. */
struct gpu_to_heads {
    const float *in;  /* [R, parts C] */
    const void *bias; /* [parts C] or NULL */
    void *out;
    uint64_t rows;
    uint32_t dim, parts, head_size, seq, param_dtype, out_dtype;
};

struct gpu_from_heads { /* by element: the way back, of one part, dtype kept */
    const void *in;     /* [batch, H, seq, S] */
    void *out;          /* [R, C] */
    uint64_t rows;
    uint32_t dim, head_size, seq, dtype;
};

struct gpu_bias_gelu { /* by element: pre += bias; act = gelu(pre) */
    float *pre;        /* [rows, cols] */
    void *act;
    const void *bias;
    uint64_t elems;
    uint32_t cols, param_dtype, act_dtype;
};

struct gpu_residual { /* by element: x = residual + (raw + bias) */
    float *x;
    const float *raw, *residual;
    const void *bias;
    uint64_t elems;
    uint32_t cols, param_dtype;
};

/* By row, of query rows [first, first + rows) of all (sequence, head) pairs: softmax over scores
 * [0, row], zeros from there to first + rows. A pair's scores begin with row `first`. And its
 * gradient, from that by prob, which are the scores then:
 * prob := scale prob (scores - sum(prob scores)), over [0, row]. */
struct gpu_softmax {
    const float *scores; /* [pairs, ..., stride]; may be prob's rows where that is fp32 */
    void *prob;          /* [pairs, seq, stride] */
    uint64_t score_pair; /* elements from one pair's scores to the next */
    uint32_t pairs, seq, stride, first, rows, prob_dtype;
    float scale;
};

/* By row: losses = -log softmax(logits)[target], in nats; grad = scale d loss / d logits. */
struct gpu_cross_entropy {
    const float *logits; /* [rows, V]; may be grad where that is fp32 */
    void *grad;
    const uint8_t *targets;
    double *losses;
    uint64_t rows;
    uint32_t grad_dtype;
    float scale;
};

/* Experts. `row` is of one expert: [rows] the row of each of its packed positions; arrays beside it
 * begin with its first row, too, where they are packed. Logits and probabilities have rows of
 * `stride` elements, E up to a multiple of 8; what is behind E is zero. */

struct gpu_route { /* by row: logits + bias to their softmax; the largest, the lowest of equals */
    float *prob;   /* [R, stride] */
    const void *bias; /* [E] */
    uint32_t *chosen; /* [R] */
    uint64_t rows;
    uint32_t experts, stride, param_dtype;
};

struct gpu_route_count { /* a block for each chunk of rows, E <= GPU_THREADS */
    const uint32_t *chosen;
    uint32_t *counts; /* [chunks, E] rows of the chunk that go to the expert */
    uint64_t rows;
    uint32_t experts, chunk_rows;
};

struct gpu_route_first { /* one block */
    uint32_t *counts;    /* [chunks, E]; becomes the packed position of the first of those rows */
    uint32_t *first;     /* [E + 1] packed position of each expert's first row */
    uint32_t experts, chunks;
};

struct gpu_route_place { /* as gpu_route_count */
    const uint32_t *chosen, *places;
    uint32_t *row; /* [R] of all experts */
    uint64_t rows;
    uint32_t experts, chunk_rows;
};

struct gpu_route_grad { /* by row: prob := d loss / d logits */
    float *prob;
    const float *dgate; /* [R] gradient of the chosen probability */
    const uint32_t *chosen;
    uint64_t rows;
    uint32_t experts, stride;
};

struct gpu_widen { /* by element, a multiple of 8: exactly */
    const void *in;
    float *out;
    uint64_t elems;
    uint32_t dtype;
};

struct gpu_expert_gather { /* by element: out[packed] = x[row] */
    const float *x;        /* [R, C] */
    const uint32_t *row;
    void *out; /* [rows, C] packed */
    uint64_t elems;
    uint32_t cols, out_dtype;
};

struct gpu_expert_combine { /* by element: x[row] = mid[row] + prob[row, expert] (out + bias) */
    float *x;               /* [R, C] */
    const float *out;       /* [rows, C] packed */
    const float *mid, *prob;
    const void *bias;
    const uint32_t *row;
    uint64_t elems;
    uint32_t cols, expert, stride, param_dtype;
};

/* By row: dout = prob[row, expert] dx[row]; dgate[row] = dx[row] . (out + bias). */
struct gpu_expert_split {
    const float *dx, *out, *prob;
    const void *bias;
    const uint32_t *row;
    float *dout, *dgate; /* [rows, C] packed; [R] */
    uint64_t rows;
    uint32_t cols, expert, stride, param_dtype;
};

struct gpu_expert_scatter { /* by element: out[row] = in[packed] */
    const float *in;
    const uint32_t *row;
    float *out;
    uint64_t elems;
    uint32_t cols;
};

#endif
