/* model_ends.c: see model_ends.h. */
#include "examples/gpt/model_ends.h"

#include <string.h>

#include "examples/gpt/linear.h"

#define GPT_HEAD_ROWS  64
#define GPT_EMBED_COLS 64

/* -- Embedding ------------------------------------------------------------------------------- */

struct embed_job {
    struct gpt *g;
    const real *params;
    real *grad, *x;
};

/* One sequence. */
static void embed_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct embed_job *job = ctx;
    const uint64_t dim = job->g->shape.dim, seq = job->g->shape.seq;
    const real *wte = job->params + job->g->layout.at[GPT_EMBED][EMBED_WTE];
    const real *wpe = job->params + job->g->layout.at[GPT_EMBED][EMBED_WPE];
    for (uint64_t t = 0; t < seq; t++) {
        const uint64_t row = task * seq + t;
        const real *token = wte + job->g->tokens[row] * dim;
        for (uint64_t j = 0; j < dim; j++)
            job->x[row * dim + j] = token[j] + wpe[t * dim + j];
    }
}

/* A few columns of both gradients, rows ascending: several rows add to one token's gradient,
 * always in this order. */
static void embed_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct embed_job *job = ctx;
    const struct gpt *g = job->g;
    const uint64_t dim = g->shape.dim, seq = g->shape.seq;
    const uint64_t col = (uint64_t)task * GPT_EMBED_COLS;
    const uint64_t end = col + model_min(dim - col, GPT_EMBED_COLS);
    real *dwte = job->grad + g->layout.at[GPT_EMBED][EMBED_WTE];
    real *dwpe = job->grad + g->layout.at[GPT_EMBED][EMBED_WPE];
    for (uint64_t row = 0; row < g->rows; row++) {
        const real *dx = g->dx + row * dim;
        real *token = dwte + g->tokens[row] * dim, *position = dwpe + row % seq * dim;
        for (uint64_t j = col; j < end; j++) {
            token[j] += dx[j];
            position[j] = row < seq ? dx[j] : position[j] + dx[j];
        }
    }
}

void embed_forward(struct gpt *g, const real *params)
{
    struct embed_job job = { .g = g, .params = params, .x = model_stream(g, 0) };
    pool_run(g->pool, (uint32_t)g->batch, embed_forward_task, &job);
}

void embed_backward(struct gpt *g, real *grad)
{
    struct embed_job job = { .g = g, .grad = grad };
    if (grad != NULL)
        pool_run(g->pool, (uint32_t)model_blocks(g->shape.dim, GPT_EMBED_COLS), embed_backward_task,
                 &job);
}

/* -- Head: final norm, logits against wte, loss -------------------------------------------------
 */

static struct vec_norm head_norm(const struct gpt *g, const real *params)
{
    return (struct vec_norm){ .x = g->out,
                              .weight = params + g->layout.at[GPT_HEAD][HEAD_LN_W],
                              .bias = params + g->layout.at[GPT_HEAD][HEAD_LN_B],
                              .mean = g->mean,
                              .rstd = g->rstd,
                              .rows = g->rows,
                              .cols = g->shape.dim };
}

static struct linear head_linear(const struct gpt *g, const real *embed)
{
    return (struct linear){ .rows = g->rows,
                            .in = g->shape.dim,
                            .out = GPT_VOCAB,
                            .weight = embed + g->layout.at[GPT_EMBED][EMBED_WTE],
                            .transposed = 1,
                            .gemm = g->gemm };
}

static void head_loss_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    struct gpt *g = ctx;
    const uint64_t row = (uint64_t)task * GPT_HEAD_ROWS;
    const struct vec_tile tile = { model_min(g->rows - row, GPT_HEAD_ROWS), GPT_VOCAB, GPT_VOCAB };
    g->vec->cross_entropy(g->logits + row * GPT_VOCAB, tile, g->targets + row,
                          (real)(g->loss_scale / (double)g->rows), g->losses + row);
}

void head_forward(struct gpt *g, const struct unit_arrays *a)
{
    const struct vec_norm norm = head_norm(g, a->params);
    const struct linear lin = head_linear(g, a->used);
    norm_forward(g, &norm, g->norm);
    linear_forward(g->pool, &lin, g->norm, g->logits, LINEAR_PLAIN, NULL);
    pool_run(g->pool, (uint32_t)model_blocks(g->rows, GPT_HEAD_ROWS), head_loss_task, g);
}

void head_backward(struct gpt *g, const struct unit_arrays *a)
{
    const struct vec_norm norm = head_norm(g, a->params);
    const struct linear lin = head_linear(g, a->used);
    const uint64_t *at = g->layout.at[GPT_HEAD];
    struct linear_grads io = { .x = g->norm, .dy = g->logits, .dx = g->d1 };
    if (a->used_grad != NULL)
        io.dweight = a->used_grad + g->layout.at[GPT_EMBED][EMBED_WTE];
    linear_backward(g->pool, &lin, &io);
    memset(g->dx, 0, g->rows * g->shape.dim * sizeof(real));
    norm_backward(g, &norm, g->d1, a->grad != NULL ? a->grad + at[HEAD_LN_W] : NULL,
                  a->grad != NULL ? a->grad + at[HEAD_LN_B] : NULL);
}
