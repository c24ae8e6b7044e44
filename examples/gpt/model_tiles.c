/* model_tiles.c: see model_tiles.h. */
#include "examples/gpt/model_tiles.h"

#include <stddef.h>
#include <string.h>

#include "examples/gpt/attention.h"
#include "examples/gpt/linear.h"

#define EMBED_COLS 64 /* of a task */

static bool is_last(const struct gpt *g, struct gpt_unit u)
{
    return u.expert + 1 == g->shape.tiles;
}

/* -- Embedding ------------------------------------------------------------------------------- */

struct embed_job {
    struct gpt *g;
    uint64_t tokens, first_token; /* of the tile */
    uint64_t positions, first_position;
    const real *params;
    real *grad;
};

static struct embed_job embed_of(struct gpt *g, uint32_t tile)
{
    struct embed_job job = { .g = g,
                             .tokens = GPT_VOCAB / g->shape.tiles,
                             .positions = g->shape.seq / g->shape.tiles };
    job.first_token = tile * job.tokens;
    job.first_position = tile * job.positions;
    return job;
}

static void add_row(real *y, const real *x, uint64_t count)
{
    for (uint64_t j = 0; j < count; j++)
        y[j] += x[j];
}

/* One sequence: a token's row is in one tile, and a position's. What is before a tile's first one
 * is, without a sign, beyond its last. */
static void embed_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct embed_job *job = ctx;
    struct gpt *g = job->g;
    const uint64_t dim = g->shape.dim, seq = g->shape.seq;
    const real *wte = job->params + g->layout.at[GPT_EMBED][EMBED_WTE];
    const real *wpe = job->params + g->layout.at[GPT_EMBED][EMBED_WPE];
    for (uint64_t t = 0; t < seq; t++) {
        const uint64_t row = task * seq + t;
        const uint64_t token = g->tokens[row] - job->first_token, at = t - job->first_position;
        real *x = model_stream(g, 0) + row * dim;
        if (job->first_token == 0)
            memset(x, 0, dim * sizeof *x);
        if (token < job->tokens)
            add_row(x, wte + token * dim, dim);
        if (at < job->positions)
            add_row(x, wpe + at * dim, dim);
    }
}

/* A few columns of both gradients, rows ascending. */
static void embed_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct embed_job *job = ctx;
    const struct gpt *g = job->g;
    const uint64_t dim = g->shape.dim, seq = g->shape.seq, col = (uint64_t)task * EMBED_COLS;
    const uint64_t cols = model_min(dim - col, EMBED_COLS);
    real *dwte = job->grad + g->layout.at[GPT_EMBED][EMBED_WTE] + col;
    real *dwpe = job->grad + g->layout.at[GPT_EMBED][EMBED_WPE] + col;
    for (uint64_t i = 0; i < job->tokens; i++)
        memset(dwte + i * dim, 0, cols * sizeof *dwte);
    for (uint64_t i = 0; i < job->positions; i++)
        memset(dwpe + i * dim, 0, cols * sizeof *dwpe);
    for (uint64_t row = 0; row < g->rows; row++) {
        const real *dx = g->dx + row * dim + col;
        const uint64_t token = g->tokens[row] - job->first_token;
        const uint64_t at = row % seq - job->first_position;
        if (token < job->tokens)
            add_row(dwte + token * dim, dx, cols);
        if (at < job->positions)
            add_row(dwpe + at * dim, dx, cols);
    }
}

/* -- Matrices of a layer --------------------------------------------------------------------- */

/* Arrays of a matrix as a whole, of all tiles. */
struct matrix {
    uint64_t in, out;
    const real *x; /* [R, in] */
    real *y;       /* [R, out] */
    enum linear_then then;
    real *other;
    const real *dy;    /* [R, out] */
    real *dx;          /* [R, in] */
    const real *slope; /* [R, in] or NULL */
};

static enum gpt_matrix which_matrix(enum gpt_unit_kind kind)
{
    return kind == GPT_TILED_ATTN   ? GPT_ATTN
           : kind == GPT_TILED_PROJ ? GPT_PROJ
           : kind == GPT_TILED_FC   ? GPT_FC
                                    : GPT_MLP;
}

static struct matrix matrix_of(struct gpt *g, struct gpt_unit u)
{
    struct block_acts *b = &g->blocks[u.layer];
    const enum gpt_matrix which = which_matrix(u.kind);
    struct matrix m = { .in = gpt_matrices[which].in * (uint64_t)g->shape.dim,
                        .out = gpt_matrices[which].out * (uint64_t)g->shape.dim };
    switch (which) {
    case GPT_ATTN:
        m.x = b->norm1, m.y = b->qkv, m.then = LINEAR_PLAIN;
        m.dy = g->d3, m.dx = g->d1;
        break;
    case GPT_PROJ:
        m.x = b->att, m.y = b->mid, m.then = LINEAR_RESIDUAL, m.other = b->x;
        m.dy = g->dx, m.dx = g->d1;
        break;
    case GPT_FC:
        m.x = b->norm2, m.y = b->slope, m.then = LINEAR_GELU, m.other = b->act;
        m.dy = g->d4, m.dx = g->d1;
        break;
    case GPT_MLP:
    case GPT_MATRICES:
        m.x = b->act, m.y = model_stream(g, u.layer + 1), m.then = LINEAR_RESIDUAL;
        m.other = b->mid;
        m.dy = g->dx, m.dx = g->d4, m.slope = b->slope;
        break;
    }
    return m;
}

/* A tile as a layer of its own, on its columns of x. */
static struct linear tile_linear(const struct gpt *g, struct gpt_unit u, const struct matrix *m,
                                 const real *params)
{
    return (struct linear){ .rows = g->rows,
                            .in = m->in / g->shape.tiles,
                            .out = m->out,
                            .weight = params + g->layout.at[u.kind][0],
                            .gemm = g->gemm,
                            .scratch = g->weight,
                            .x_stride = m->in };
}

static void matrix_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    const struct matrix m = matrix_of(g, u);
    const uint64_t part = m.out / g->shape.tiles;
    struct linear lin = tile_linear(g, u, &m, params);
    lin.add = u.expert > 0;
    real *bias = g->d4; /* which is free in a forward: the parts until all are there */
    memcpy(bias + u.expert * part, params + g->layout.at[u.kind][1], part * sizeof(real));
    if (is_last(g, u)) {
        lin.bias = bias;
        linear_forward(g->pool, &lin, m.x + u.expert * lin.in, m.y, m.then, m.other);
    } else
        linear_forward(g->pool, &lin, m.x + u.expert * lin.in, m.y, LINEAR_PLAIN, NULL);
}

static void matrix_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    const struct matrix m = matrix_of(g, u);
    const uint64_t part = m.out / g->shape.tiles;
    const struct linear lin = tile_linear(g, u, &m, params);
    const struct linear bias = { .rows = g->rows, .out = part, .y_stride = m.out };
    const uint64_t col = u.expert * lin.in;
    linear_backward(g->pool, &lin,
                    &(struct linear_grads){ .x = m.x + col,
                                            .dy = m.dy,
                                            .dx = m.dx + col,
                                            .slope = m.slope != NULL ? m.slope + col : NULL,
                                            .dweight = grad + g->layout.at[u.kind][0] });
    linear_backward(g->pool, &bias,
                    &(struct linear_grads){ .dy = m.dy + u.expert * part,
                                            .dbias = grad + g->layout.at[u.kind][1] });
}

/* -- Norms ----------------------------------------------------------------------------------- */

static struct vec_norm norm_of(const struct gpt *g, struct gpt_unit u, const real *params)
{
    const struct block_acts *b = &g->blocks[u.layer];
    const bool first = u.kind == GPT_TILED_LN1;
    return (struct vec_norm){ .x = first ? b->x : b->mid,
                              .weight = params + g->layout.at[u.kind][0],
                              .bias = params + g->layout.at[u.kind][1],
                              .mean = first ? b->mean1 : b->mean2,
                              .rstd = first ? b->rstd1 : b->rstd2,
                              .rows = g->rows,
                              .cols = g->shape.dim };
}

static void layer_norm_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    struct block_acts *b = &g->blocks[u.layer];
    const struct vec_norm norm = norm_of(g, u, params);
    norm_forward(g, &norm, u.kind == GPT_TILED_LN1 ? b->norm1 : b->norm2);
}

static void layer_norm_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    const struct vec_norm norm = norm_of(g, u, params);
    const uint64_t *at = g->layout.at[u.kind];
    norm_backward(g, &norm, g->d1, grad + at[0], grad + at[1]);
}

/* -- The output matrix ----------------------------------------------------------------------- */

static struct linear output_linear(const struct gpt *g, const real *params)
{
    return (struct linear){ .rows = g->rows,
                            .in = g->shape.dim,
                            .out = GPT_VOCAB / g->shape.tiles,
                            .weight = params + g->layout.at[GPT_TILED_LM][0],
                            .transposed = 1,
                            .gemm = g->gemm,
                            .scratch = g->weight,
                            .y_stride = GPT_VOCAB };
}

static void output_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    const struct linear lin = output_linear(g, params);
    linear_forward(g->pool, &lin, g->norm, g->logits + u.expert * lin.out, LINEAR_PLAIN, NULL);
}

static void output_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    struct linear lin = output_linear(g, params);
    lin.add = !is_last(g, u); /* which comes first */
    linear_backward(g->pool, &lin,
                    &(struct linear_grads){ .x = g->norm,
                                            .dy = g->logits + u.expert * lin.out,
                                            .dx = g->d1,
                                            .dweight = grad + g->layout.at[GPT_TILED_LM][0] });
}

/* -- Units ----------------------------------------------------------------------------------- */

void tile_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    struct block_acts *b = &g->blocks[u.layer];
    if (u.kind == GPT_EMBED) {
        struct embed_job job = embed_of(g, u.expert);
        job.params = params;
        pool_run(g->pool, (uint32_t)g->batch, embed_forward_task, &job);
    } else if (u.kind == GPT_TILED_LM)
        output_forward(g, u, params);
    else if (u.kind == GPT_TILED_LN1 || u.kind == GPT_TILED_LN2)
        layer_norm_forward(g, u, params);
    else
        matrix_forward(g, u, params);
    if (u.kind == GPT_TILED_ATTN && is_last(g, u)) {
        const struct attention attention = block_attention(g, b);
        attention_forward(g->pool, &attention, b->att);
    }
}

void tile_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    if (u.kind == GPT_TILED_ATTN && is_last(g, u)) { /* of what PROJ left in d1 */
        const struct attention attention = block_attention(g, &g->blocks[u.layer]);
        attention_backward(g->pool, &attention, g->d1, g->d3, g->scratch);
    }
    if (u.kind == GPT_EMBED) {
        struct embed_job job = embed_of(g, u.expert);
        job.grad = grad;
        pool_run(g->pool, model_tasks(g->shape.dim, EMBED_COLS), embed_backward_task, &job);
    } else if (u.kind == GPT_TILED_LM)
        output_backward(g, u, params, grad);
    else if (u.kind == GPT_TILED_LN1 || u.kind == GPT_TILED_LN2)
        layer_norm_backward(g, u, params, grad);
    else
        matrix_backward(g, u, params, grad);
}
