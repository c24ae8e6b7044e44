/* model_layer.h: the model's arrays, and a layer of it: dense, with adapters, or with experts. Only
 * model.c, which has the memory, the ends and the loss, includes it. See model.h.
 *
 * Names: R = batch * seq rows, C = dim, V = vocabulary, E = experts, r = rank of the adapters. The
 * residual stream's gradient is one [R, C] array that each unit's backward updates in place.
 */
#ifndef GPT_MODEL_LAYER_H
#define GPT_MODEL_LAYER_H

#include "examples/gpt/attention.h"
#include "examples/gpt/model.h"
#include "examples/gpt/vec.h"

/* The routes of rows to experts. `packed` is the order of all expert arrays: rows sorted by expert,
 * and ascending within one. */
struct moe_acts {
    uint32_t *row;    /* kept: [R] packed position -> row */
    uint32_t *first;  /* kept: [E + 1] packed position of each expert's first row */
    uint32_t *chosen; /* kept: [R] expert of a row */
    real *prob;       /* kept: [R, E] softmax of the router; backward makes its gradient of it */
    real *in;         /* [R, C] packed: ln_2(mid) */
    real *out;        /* [R, C] packed: what the expert gave, before the gate */
    real *dgate;      /* [R] by row: gradient of the chosen probability */
};

/* A layer's activations, for its backward. With `recompute` all layers share one set of
 * arrays, but for what is marked kept. */
struct block_acts {
    real *x;                 /* kept: [R, C] the block's input */
    real *mean1, *rstd1;     /* [R] */
    real *norm1;             /* [R, C] ln_1(x) */
    real *qkv;               /* [R, 3C] */
    real *prob;              /* [batch, heads, seq, seq] */
    real *att;               /* [R, C] attention's output, before its projection */
    real *mid;               /* [R, C] x + attention */
    real *mean2, *rstd2;     /* [R] */
    real *norm2;             /* [R, C] ln_2(mid); kept with experts, whose input it is */
    real *slope, *act;       /* [R, 4C] gelu's derivative, its value; packed with experts */
    real *low[GPT_MATRICES]; /* [R, r] input times an adapter's first factor; NULL: none */
    struct moe_acts moe;     /* all NULL without experts */
};

#define MODEL_HELD_NONE UINT32_MAX

struct gpt {
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool; /* borrowed */
    const struct vec_ops *vec;
    enum gemm_kind gemm;
    double loss_scale;
    uint64_t batch, rows;
    bool recompute;
    uint32_t held;             /* recompute: whose activations the shared arrays have, or NONE */
    uint64_t bytes[2];         /* of slab: without recompute, with it */
    void *slab;                /* owned: everything below but `blocks` */
    struct block_acts *blocks; /* owned, [layers] */
    real *out;                 /* [R, C] the last layer's output */
    real *mean, *rstd, *norm;  /* of ln_f: [R], [R], [R, C] */
    real *logits;              /* [R, V]; their gradient after the head's forward */
    real *dx;                  /* [R, C] gradient of the residual stream */
    real *d1, *d3, *d4;        /* [R, C], [R, 3C], [R, 4C] scratch of backward */
    real *dlow;                /* [R, r] scratch; NULL without adapters */
    real *dnorm2, *dout;       /* [R, C] scratch; NULL without experts */
    real *scratch;             /* [threads, ATTENTION_BLOCK, seq] */
    real *weight;              /* scratch of every linear */
    double *losses;            /* [R] */
    uint8_t *tokens, *targets; /* [R] */
};

/* Layer l's input, l's x; with l = layers the output of the last one. */
static inline real *model_stream(struct gpt *g, uint32_t layer)
{
    return layer < g->shape.layers ? g->blocks[layer].x : g->out;
}

/* Tasks of `block` pieces each that count pieces make. */
static inline uint32_t model_tasks(uint64_t count, uint64_t block)
{
    return (uint32_t)((count + block - 1) / block);
}

static inline uint64_t model_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Layer norm over row blocks; gradients of its parameters over column blocks. */
void norm_forward(struct gpt *g, const struct vec_norm *n, real *y);

/* g->dx += the gradient through the norm from dy. dweight and dbias are overwritten, unless they
 * are NULL. */
void norm_backward(struct gpt *g, const struct vec_norm *n, const real *dy, real *dweight,
                   real *dbias);

/* A block's arrays. base: its parameters, grad: their gradient or NULL; low, low_grad: the
 * adapters' or NULL. */
struct block_arrays {
    const real *base, *low;
    real *grad, *low_grad;
};

/* Of a block's qkv. */
struct attention block_attention(const struct gpt *g, const struct block_acts *b);

/* A whole dense block. */
void block_forward(struct gpt *g, uint32_t layer, const struct block_arrays *a);
void block_backward(struct gpt *g, uint32_t layer, const struct block_arrays *a);

/* A block with experts: attention and router; then one expert. Rows whose expert does not run would
 * stay at mid: by construction there are none. */
void router_forward(struct gpt *g, uint32_t layer, const struct block_arrays *a);
void router_backward(struct gpt *g, uint32_t layer, const struct block_arrays *a);
void expert_forward(struct gpt *g, struct gpt_unit u, const real *params);
void expert_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad);

/* True: the batch has rows for the expert. After the router's forward. */
bool expert_has_rows(const struct gpt *g, struct gpt_unit u);

#endif
