/* model_block.c: a dense block, plain or with adapters; see model_base.h.
 *
 * An adapter (Hu et al., arXiv:2106.09685) adds (x A) B to x W: y = x W + (x A) B + bias. Its scale
 * alpha / r is 1. Backward: dB = (x A)^T dy, d(x A) = dy B^T, dA = x^T d(x A), and dx gains
 * d(x A) A^T; the frozen W gets none.
 */
#include "examples/gpt/model_block.h"

#include <stddef.h>

#include "examples/gpt/attention.h"
#include "examples/gpt/linear.h"

/* Sizes in multiples of dim; the bias is the tensor behind the weight. */
struct matrix_row {
    enum gpt_block_tensor weight;
    enum gpt_lora_tensor a, b;
    uint32_t in, out;
};

static const struct matrix_row matrices[MATRICES] = {
    [MATRIX_ATTN] = { BLOCK_ATTN_W, LORA_ATTN_A, LORA_ATTN_B, 1, 3 },
    [MATRIX_PROJ] = { BLOCK_PROJ_W, LORA_PROJ_A, LORA_PROJ_B, 1, 1 },
    [MATRIX_FC] = { BLOCK_FC_W, LORA_FC_A, LORA_FC_B, 1, 4 },
    [MATRIX_MLP] = { BLOCK_MLP_W, LORA_MLP_A, LORA_MLP_B, 4, 1 },
};

struct vec_norm block_norm(const struct gpt *g, const struct block_acts *b, const real *params,
                           enum gpt_block_tensor weight)
{
    const int first = weight == BLOCK_LN1_W;
    return (struct vec_norm){ .x = first ? b->x : b->mid,
                              .weight = params + g->layout.at[GPT_BLOCK][weight],
                              .bias = params + g->layout.at[GPT_BLOCK][weight + 1],
                              .mean = first ? b->mean1 : b->mean2,
                              .rstd = first ? b->rstd1 : b->rstd2,
                              .rows = g->rows,
                              .cols = g->shape.dim };
}

/* A block's tensor in its gradient; NULL when that is frozen. */
static real *block_grad(const struct gpt *g, const struct block_arrays *a,
                        enum gpt_block_tensor tensor)
{
    return a->grad != NULL ? a->grad + g->layout.at[GPT_BLOCK][tensor] : NULL;
}

static struct linear matrix_linear(const struct gpt *g, const struct block_arrays *a,
                                   const struct matrix_row *m)
{
    return (struct linear){ .rows = g->rows,
                            .in = m->in * (uint64_t)g->shape.dim,
                            .out = m->out * (uint64_t)g->shape.dim,
                            .weight = a->base + g->layout.at[GPT_BLOCK][m->weight],
                            .bias = a->base + g->layout.at[GPT_BLOCK][m->weight + 1],
                            .gemm = g->gemm };
}

/* An adapter's factor as a layer of its own, [in, r] or [r, out]. */
static struct linear factor_linear(const struct gpt *g, const real *factor, uint64_t in,
                                   uint64_t out)
{
    return (
        struct linear){ .rows = g->rows, .in = in, .out = out, .weight = factor, .gemm = g->gemm };
}

/* x A, where there are adapters. */
static void adapter_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a,
                            enum block_matrix which, const real *x)
{
    const struct matrix_row *m = &matrices[which];
    if (a->low == NULL)
        return;
    const struct linear first = factor_linear(g, a->low + g->layout.at[GPT_LORA][m->a],
                                              m->in * (uint64_t)g->shape.dim, g->shape.rank);
    linear_forward(g->pool, &first, x, b->low[which], LINEAR_PLAIN, NULL);
}

static void matrix_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a,
                           enum block_matrix which, const real *x, real *y, enum linear_then then,
                           real *other)
{
    const struct matrix_row *m = &matrices[which];
    struct linear lin = matrix_linear(g, a, m);
    struct linear_plus plus;
    adapter_forward(g, b, a, which, x);
    if (a->low != NULL) {
        plus = (struct linear_plus){ .left = b->low[which],
                                     .right = a->low + g->layout.at[GPT_LORA][m->b],
                                     .inner = g->shape.rank };
        lin.plus = &plus;
    }
    linear_forward(g->pool, &lin, x, y, then, other);
}

/* Gradients of the two factors; leaves d(x A) in g->dlow. */
static void adapter_backward(struct gpt *g, const struct block_acts *b,
                             const struct block_arrays *a, enum block_matrix which,
                             const struct linear_grads *io)
{
    const struct matrix_row *m = &matrices[which];
    const uint64_t *at = g->layout.at[GPT_LORA];
    const uint64_t in = m->in * (uint64_t)g->shape.dim, out = m->out * (uint64_t)g->shape.dim;
    const struct linear first = factor_linear(g, a->low + at[m->a], in, g->shape.rank);
    const struct linear second = factor_linear(g, a->low + at[m->b], g->shape.rank, out);
    linear_backward(
        g->pool, &second,
        &(struct linear_grads){
            .x = b->low[which], .dy = io->dy, .dx = g->dlow, .dweight = a->low_grad + at[m->b] });
    linear_backward(
        g->pool, &first,
        &(struct linear_grads){ .x = io->x, .dy = g->dlow, .dweight = a->low_grad + at[m->a] });
}

/* io: x, dy, dx and pre. */
static void matrix_backward(struct gpt *g, const struct block_acts *b, const struct block_arrays *a,
                            enum block_matrix which, struct linear_grads io)
{
    const struct matrix_row *m = &matrices[which];
    const struct linear lin = matrix_linear(g, a, m);
    struct linear_plus plus;
    io.dweight = block_grad(g, a, m->weight);
    io.dbias = block_grad(g, a, m->weight + 1);
    if (a->low != NULL) {
        adapter_backward(g, b, a, which, &io);
        plus = (struct linear_plus){ .left = g->dlow,
                                     .right = a->low + g->layout.at[GPT_LORA][m->a],
                                     .inner = g->shape.rank,
                                     .transposed = 1 };
        io.plus = &plus;
    }
    linear_backward(g->pool, &lin, &io);
}

static struct attention block_attention(const struct gpt *g, const struct block_acts *b)
{
    return (struct attention){ .batch = g->batch,
                               .seq = g->shape.seq,
                               .heads = g->shape.heads,
                               .dim = g->shape.dim,
                               .qkv = b->qkv,
                               .prob = b->prob,
                               .gemm = g->gemm };
}

void block_attention_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a)
{
    const struct vec_norm norm1 = block_norm(g, b, a->base, BLOCK_LN1_W);
    const struct vec_norm norm2 = block_norm(g, b, a->base, BLOCK_LN2_W);
    const struct attention attention = block_attention(g, b);
    norm_forward(g, &norm1, b->norm1);
    matrix_forward(g, b, a, MATRIX_ATTN, b->norm1, b->qkv, LINEAR_PLAIN, NULL);
    attention_forward(g->pool, &attention, b->att);
    matrix_forward(g, b, a, MATRIX_PROJ, b->att, b->mid, LINEAR_RESIDUAL, b->x);
    norm_forward(g, &norm2, b->norm2);
}

void block_attention_backward(struct gpt *g, struct block_acts *b, const struct block_arrays *a)
{
    const struct vec_norm norm1 = block_norm(g, b, a->base, BLOCK_LN1_W);
    const struct attention attention = block_attention(g, b);
    matrix_backward(g, b, a, MATRIX_PROJ,
                    (struct linear_grads){ .x = b->att, .dy = g->dx, .dx = g->d1 });
    attention_backward(g->pool, &attention, g->d1, g->d3, g->scratch);
    matrix_backward(g, b, a, MATRIX_ATTN,
                    (struct linear_grads){ .x = b->norm1, .dy = g->d3, .dx = g->d1 });
    norm_backward(g, &norm1, g->d1, block_grad(g, a, BLOCK_LN1_W), block_grad(g, a, BLOCK_LN1_B));
}

/* All that backward reads, but the last matrix's adapter. */
static void block_inner_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a)
{
    block_attention_forward(g, b, a);
    matrix_forward(g, b, a, MATRIX_FC, b->norm2, b->pre, LINEAR_GELU, b->act);
}

void block_forward(struct gpt *g, uint32_t layer, const struct block_arrays *a)
{
    struct block_acts *b = &g->blocks[layer];
    block_inner_forward(g, b, a);
    g->held = layer;
    matrix_forward(g, b, a, MATRIX_MLP, b->act, model_stream(g, layer + 1), LINEAR_RESIDUAL,
                   b->mid);
}

void block_backward(struct gpt *g, uint32_t layer, const struct block_arrays *a)
{
    struct block_acts *b = &g->blocks[layer];
    const struct vec_norm norm2 = block_norm(g, b, a->base, BLOCK_LN2_W);
    if (model_recomputes(g, layer)) {
        block_inner_forward(g, b, a);
        adapter_forward(g, b, a, MATRIX_MLP, b->act);
    }
    g->held = MODEL_HELD_NONE; /* backward spoils them */
    matrix_backward(g, b, a, MATRIX_MLP,
                    (struct linear_grads){ .x = b->act, .dy = g->dx, .dx = g->d4, .pre = b->pre });
    matrix_backward(g, b, a, MATRIX_FC,
                    (struct linear_grads){ .x = b->norm2, .dy = g->d4, .dx = g->d1 });
    norm_backward(g, &norm2, g->d1, block_grad(g, a, BLOCK_LN2_W), block_grad(g, a, BLOCK_LN2_B));
    block_attention_backward(g, b, a);
}
