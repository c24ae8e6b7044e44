/* model_cuda.h: the arrays of the model on a GPU, its ends, and what its parts share. It mirrors
 * ../model_layer.h, whose names it uses.
 *
 *   model_cuda.c     memory, norms, embedding, head and loss
 *   attention_cuda.c attention
 *   layer_cuda.c     a layer: dense, with adapters, or with experts
 *   backend_cuda.c   the backend: which part a unit is, arrays in and out
 *
 * Number types. Parameters are read as they are published, fp32, bf16 or fp16, and that type, T
 * below, is also that of both factors of every product. An array that is only ever a factor is kept
 * as T: it is rounded once, where it is made, to what the host rounds it to at every use. The
 * residual stream, sums, scores, gradients and what leads to them are fp32.
 */
#ifndef GPT_CUDA_MODEL_CUDA_H
#define GPT_CUDA_MODEL_CUDA_H

#include "examples/gpt/backend.h"
#include "examples/gpt/cuda/gpu.h"
#include "examples/gpt/shape.h"

/* The routes of a layer's rows to experts (kept by layer: prob, chosen, row, first), and the
 * experts' outputs. `packed` as in model_layer.h. */
struct gpu_moe {
    float *prob;            /* [R, experts_stride] the router's; backward spoils it */
    uint32_t *chosen, *row; /* [R] expert of a row; row of a packed position */
    uint32_t *first;        /* [E + 1] packed position of each expert's first row */
    void *in;               /* T [R, C] packed: ln_2(mid) */
    float *out;             /* [R, C] packed: what the expert gave, before its bias and the gate */
};

/* A layer's activations, for its backward. With `recompute` all layers share one set of
 * arrays, but for what is marked kept; see ../model.h. */
struct gpu_acts {
    float *x;                /* kept: [R, C] the block's input */
    float *mean1, *rstd1;    /* [R] */
    void *norm1;             /* T [R, C] ln_1(x) */
    void *heads;             /* T [3, batch, H, seq, S]: q, k, v */
    void *prob;              /* T [batch, H, seq, stride]; backward spoils it */
    void *att;               /* T [R, C] attention's output, before its projection */
    float *mid;              /* [R, C] x + attention */
    float *mean2, *rstd2;    /* [R] */
    void *norm2;             /* T [R, C] ln_2(mid); with experts fp32, the router reads it so */
    float *pre;              /* [R, 4C] before gelu; packed with experts */
    void *act;               /* T [R, 4C] after it */
    void *low[GPT_MATRICES]; /* T [R, r] input times an adapter's first factor */
    struct gpu_moe moe;      /* all NULL without experts */
};

#define GPU_HELD_NONE UINT32_MAX

/* A batch of the input: on the device, or the pinned memory of the host that it is sent from. */
struct gpu_batch {
    uint8_t *tokens, *targets;    /* [R] */
    uint32_t *sorted, *first;     /* [R]; [V + 1], see gpu_embed_tokens */
    struct gpu_segment *segments; /* [segments_max] */
    uint32_t segment_count;
};

/* Arrays of the pass at hand: gradients on their way, products before their bias. */
struct gpu_scratch {
    float *dx;         /* [R, C] gradient of the residual stream */
    void *dx_factor;   /* T [R, C]; dx itself with fp32 */
    float *wide;       /* [R, 4C] a product before its bias; gradients */
    void *wide_factor; /* T [R, 4C]; wide itself with fp32 */
    float *d1;         /* [R, C] */
    void *heads;       /* T [batch, H, seq, S] attention's output, its gradient */
    float *dheads;     /* [3, batch, H, seq, S] gradients of q, k, v */
    float *scores;     /* [batch, H, GPU_ATTENTION_ROWS, stride] and their gradient */
    void *dlow;        /* T [R, r] */
    float *partial;    /* [2, chunks, 4C] and [segments_max, C] */
    float *dgate;      /* [R] gradient of the chosen probability */
    uint32_t *counts;  /* [chunks, E] */
    float *router;     /* [C, E] the router's matrix in fp32; NULL when T is that */
};

struct gpu_model {
    struct gpu gpu;
    struct gpt_shape shape;
    struct gpt_layout layout;
    uint32_t dtype; /* T */
    bool recompute;
    uint32_t held;     /* recompute: the layer whose activations the shared arrays have; or none */
    uint64_t bytes[2]; /* of slab: without recompute, with it */
    float loss_scale;
    uint64_t batch, rows, head_size;
    uint64_t stride;             /* of a row of scores: seq, up to a multiple of 8 */
    uint64_t chunk_rows, chunks; /* of sums over rows */
    uint64_t experts_stride;     /* of a row of router logits: E, up to a multiple of 8 */
    uint32_t *routes;            /* owned, pinned memory of the host: [layers, E + 1] firsts */
    struct gpu_acts *blocks;     /* owned, [layers] */
    void *slab;                  /* owned, on the device: all that follows, and the blocks' */
    float *out;                  /* [R, C] the last layer's output */
    float *mean, *rstd;          /* [R] of ln_f */
    void *norm;                  /* T [R, C] ln_f(out) */
    float *logits;               /* [R, V] */
    void *dlogits;               /* T [R, V]; logits themselves with fp32 */
    double *losses;              /* [R] */
    struct gpu_batch input;      /* the batch at hand */
    struct gpu_scratch scratch;
};

/* Query rows of one product of attention: what is masked within them is computed in vain. */
#define GPU_ATTENTION_ROWS 256u

/* Most segments that a batch's tokens may need. */
uint64_t gpu_model_segments_max(uint64_t rows);

int gpu_model_init(struct gpu_model *m, const struct backend_config *config, struct shd_err *e);
void gpu_model_deinit(struct gpu_model *m); /* of a zeroed one: no-op */

/* Element at of an array of the published dtype; NULL stays NULL in the other. */
const void *gpu_model_param(const struct gpu_model *m, const void *params, uint64_t at);
float *gpu_model_grad(float *grad, uint64_t at);
void *gpu_model_at(const struct gpu_model *m, void *factors, uint64_t at); /* of T */

float *gpu_model_stream(struct gpu_model *m, uint32_t layer); /* a layer's input; [layers]: out */

/* out = the sum of the partial sums from `partial` on; out NULL: nothing. */
void gpu_model_columns_sum(struct gpu_model *m, const struct gpu_columns_sum *sum);

/* Matrices of products, cols to a row: of T, the transpose of one, of fp32. */
static inline struct gpu_matrix factor(const struct gpu_model *m, const void *data, uint64_t cols)
{
    return (struct gpu_matrix){ .data = data, .dtype = m->dtype, .stride = cols };
}

static inline struct gpu_matrix floats(const float *data, uint64_t cols)
{
    return (struct gpu_matrix){ .data = data, .dtype = GPU_F32, .stride = cols };
}

static inline struct gpu_matrix transposed(struct gpu_matrix x)
{
    x.transposed = true;
    return x;
}

static inline struct gpu_matrix factor_t(const struct gpu_model *m, const void *data, uint64_t cols)
{
    return transposed(factor(m, data, cols));
}

struct gpu_size {
    uint64_t m, n, k;
};

/* c[m, n] = a[m, k] b[k, n] + (add ? c : 0); see struct gpu_product for full. */
enum { PRODUCT = 0, PRODUCT_ADD = 1, PRODUCT_FULL = 2 };
static inline void multiply(struct gpu_model *m, struct gpu_size s, struct gpu_matrix a,
                            struct gpu_matrix b, struct gpu_matrix c, unsigned how)
{
    const struct gpu_product p = { .m = s.m,
                                   .n = s.n,
                                   .k = s.k,
                                   .a = a,
                                   .b = b,
                                   .c = c,
                                   .add = (how & PRODUCT_ADD) != 0,
                                   .full = (how & PRODUCT_FULL) != 0 };
    gpu_multiply(&m->gpu, &p);
}

/* Layer norm of [R, C]. */
struct gpu_norm_io {
    float *x, *mean, *rstd;
    const void *weight, *shift;
    bool full; /* y is fp32, not T */
};
/* y: T. raw, bias, residual: see struct gpu_norm; NULL: x is there already. */
void gpu_model_norm(struct gpu_model *m, const struct gpu_norm_io *n, const float *raw,
                    const void *bias, const float *residual, void *y);
/* dx, added to or overwritten, from d1; dweight and dshift NULL: frozen. */
void gpu_model_norm_backward(struct gpu_model *m, const struct gpu_norm_io *n, bool add,
                             float *dweight, float *dshift);

void gpu_model_embed(struct gpu_model *m, const void *params);
void gpu_model_embed_backward(struct gpu_model *m, float *grad);
void gpu_model_head(struct gpu_model *m, const void *params, const void *embed);
void gpu_model_head_backward(struct gpu_model *m, const void *params, const void *embed,
                             float *grad, float *embed_grad);

#endif
