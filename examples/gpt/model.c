/* model.c: see model.h.
 *
 * Activations live in one slab, carved at gpt_new(); nothing is allocated later. Names: R =
 * batch * seq rows, C = dim, V = vocabulary. The residual stream's gradient is one [R, C] array
 * that each unit's backward updates in place.
 */
#include "examples/gpt/model.h"

#include <stdlib.h>
#include <string.h>

#include "examples/gpt/attention.h"
#include "examples/gpt/fail.h"
#include "examples/gpt/linear.h"
#include "examples/gpt/vec.h"

#define GPT_NORM_ROWS  32
#define GPT_NORM_COLS  64
#define GPT_HEAD_ROWS  64
#define GPT_EMBED_COLS 64
#define GPT_SLAB_ALIGN 64

/* What a block's backward needs of its forward. */
struct block_acts {
    real *x;             /* [R, C] the block's input */
    real *mean1, *rstd1; /* [R] */
    real *norm1;         /* [R, C] ln_1(x) */
    real *qkv;           /* [R, 3C] */
    real *prob;          /* [batch, heads, seq, seq] */
    real *att;           /* [R, C] attention's output, before its projection */
    real *mid;           /* [R, C] x + attention */
    real *mean2, *rstd2; /* [R] */
    real *norm2;         /* [R, C] ln_2(mid) */
    real *pre, *act;     /* [R, 4C] before and after gelu */
};

struct gpt {
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool; /* borrowed */
    const struct vec_ops *vec;
    uint64_t batch, rows;
    void *slab;                /* owned: everything below but `blocks` */
    struct block_acts *blocks; /* owned, [layers] */
    real *out;                 /* [R, C] the last block's output */
    real *mean, *rstd, *norm;  /* of ln_f: [R], [R], [R, C] */
    real *logits;              /* [R, V]; their gradient after the head's forward */
    real *dx;                  /* [R, C] gradient of the residual stream */
    real *d1, *d3, *d4;        /* [R, C], [R, 3C], [R, 4C] scratch of backward */
    real *scratch;             /* [threads, ATTENTION_BLOCK, seq] */
    double *losses;            /* [R] */
    uint8_t *tokens, *targets; /* [R] */
};

/* -- Memory ---------------------------------------------------------------------------------- */

/* Hands out pieces of base; with base NULL only counts. */
struct carver {
    char *base;
    uint64_t used;
};

static void *carve(struct carver *c, uint64_t bytes)
{
    void *piece = c->base == NULL ? NULL : c->base + c->used;
    c->used += (bytes + GPT_SLAB_ALIGN - 1) / GPT_SLAB_ALIGN * GPT_SLAB_ALIGN;
    return piece;
}

static real *carve_reals(struct carver *c, uint64_t count)
{
    return carve(c, count * sizeof(real));
}

static void gpt_carve_block(struct gpt *g, struct block_acts *b, struct carver *c)
{
    const uint64_t rows = g->rows, width = rows * g->shape.dim;
    b->x = carve_reals(c, width);
    b->mean1 = carve_reals(c, rows);
    b->rstd1 = carve_reals(c, rows);
    b->norm1 = carve_reals(c, width);
    b->qkv = carve_reals(c, 3 * width);
    b->prob = carve_reals(c, rows * g->shape.heads * g->shape.seq);
    b->att = carve_reals(c, width);
    b->mid = carve_reals(c, width);
    b->mean2 = carve_reals(c, rows);
    b->rstd2 = carve_reals(c, rows);
    b->norm2 = carve_reals(c, width);
    b->pre = carve_reals(c, 4 * width);
    b->act = carve_reals(c, 4 * width);
}

/* Returns the bytes needed. */
static uint64_t gpt_carve(struct gpt *g, void *slab)
{
    struct carver c = { .base = slab };
    const uint64_t rows = g->rows, width = rows * g->shape.dim;
    for (uint32_t l = 0; l < g->shape.layers; l++)
        gpt_carve_block(g, &g->blocks[l], &c);
    g->out = carve_reals(&c, width);
    g->mean = carve_reals(&c, rows);
    g->rstd = carve_reals(&c, rows);
    g->norm = carve_reals(&c, width);
    g->logits = carve_reals(&c, rows * GPT_VOCAB);
    g->dx = carve_reals(&c, width);
    g->d1 = carve_reals(&c, width);
    g->d3 = carve_reals(&c, 3 * width);
    g->d4 = carve_reals(&c, 4 * width);
    g->scratch = carve_reals(&c, (uint64_t)pool_threads(g->pool) * ATTENTION_BLOCK * g->shape.seq);
    g->losses = carve(&c, rows * sizeof(double));
    g->tokens = carve(&c, rows);
    g->targets = carve(&c, rows);
    return c.used;
}

int gpt_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
            struct pool *pool, struct gpt **ret_gpt, struct shd_err *e)
{
    const int r = gpt_shape_check(shape, e);
    if (r != SHD_OK)
        return r;
    if (batch < 1 || batch > GPT_BATCH_MAX)
        return fail(e, SHD_ERANGE, "batch is %u, limits are 1 to %d", batch, GPT_BATCH_MAX);
    struct gpt *g = calloc(1, sizeof *g);
    struct block_acts *blocks = calloc(shape->layers, sizeof *blocks);
    if (g == NULL || blocks == NULL) {
        free(g);
        free(blocks);
        return fail(e, SHD_ENOMEM, "no memory for a model of %u layers", shape->layers);
    }
    *g = (struct gpt){ .shape = *shape,
                       .layout = *layout,
                       .pool = pool,
                       .vec = vec_pick(),
                       .batch = batch,
                       .rows = (uint64_t)batch * shape->seq,
                       .blocks = blocks };
    /* With the limits of gpt_shape_check() this stays far below 2^64. */
    const uint64_t bytes = gpt_carve(g, NULL);
    g->slab = aligned_alloc(GPT_SLAB_ALIGN, bytes);
    if (g->slab == NULL) {
        gpt_free(g);
        return fail(e, SHD_ENOMEM, "no memory for %ju MiB of activations: lower --batch or --seq",
                    (uintmax_t)(bytes >> 20));
    }
    gpt_carve(g, g->slab);
    *ret_gpt = g;
    return SHD_OK;
}

void gpt_free(struct gpt *g)
{
    if (g == NULL)
        return;
    free(g->slab);
    free(g->blocks);
    free(g);
}

void gpt_set_batch(struct gpt *g, const uint8_t *windows)
{
    const uint64_t seq = g->shape.seq;
    for (uint64_t b = 0; b < g->batch; b++) {
        memcpy(g->tokens + b * seq, windows + b * (seq + 1), seq);
        memcpy(g->targets + b * seq, windows + b * (seq + 1) + 1, seq);
    }
}

/* -- Layer norm over row blocks, its parameters' gradients over column blocks -------------------
 */

struct norm_job {
    const struct vec_ops *vec;
    struct vec_norm norm;
    const real *dy;
    real *y, *dx, *dweight, *dbias;
    uint32_t row_tasks;
};

static uint64_t blocks_of(uint64_t count, uint64_t block)
{
    return (count + block - 1) / block;
}

static uint64_t at_most(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static struct vec_norm norm_rows(const struct norm_job *job, uint64_t row)
{
    struct vec_norm n = job->norm;
    n.rows = at_most(n.rows - row, GPT_NORM_ROWS);
    n.x += row * n.cols;
    n.mean += row;
    n.rstd += row;
    return n;
}

static void norm_forward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct norm_job *job = ctx;
    const uint64_t row = (uint64_t)task * GPT_NORM_ROWS;
    const struct vec_norm n = norm_rows(job, row);
    job->vec->norm_forward(&n, job->y + row * n.cols);
}

static void norm_forward(struct gpt *g, const struct vec_norm *n, real *y)
{
    struct norm_job job = { .vec = g->vec, .norm = *n, .y = y };
    pool_run(g->pool, (uint32_t)blocks_of(n->rows, GPT_NORM_ROWS), norm_forward_task, &job);
}

static void norm_backward_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct norm_job *job = ctx;
    if (task < job->row_tasks) {
        const uint64_t row = (uint64_t)task * GPT_NORM_ROWS;
        const struct vec_norm n = norm_rows(job, row);
        job->vec->norm_backward(&n, job->dy + row * n.cols, job->dx + row * n.cols);
        return;
    }
    const uint64_t col = (uint64_t)(task - job->row_tasks) * GPT_NORM_COLS;
    job->vec->norm_params(&job->norm, job->dy, col, at_most(job->norm.cols - col, GPT_NORM_COLS),
                          job->dweight, job->dbias);
}

/* g->dx += the gradient through the norm from dy; dweight and dbias are overwritten. */
static void norm_backward(struct gpt *g, const struct vec_norm *n, const real *dy, real *dweight,
                          real *dbias)
{
    struct norm_job job = {
        .vec = g->vec,
        .norm = *n,
        .dy = dy,
        .dx = g->dx,
        .dweight = dweight,
        .dbias = dbias,
        .row_tasks = (uint32_t)blocks_of(n->rows, GPT_NORM_ROWS),
    };
    const uint32_t col_tasks = (uint32_t)blocks_of(n->cols, GPT_NORM_COLS);
    pool_run(g->pool, job.row_tasks + col_tasks, norm_backward_task, &job);
}

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
    const real *wte = job->params + job->g->layout.embed[EMBED_WTE];
    const real *wpe = job->params + job->g->layout.embed[EMBED_WPE];
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
    const uint64_t end = col + at_most(dim - col, GPT_EMBED_COLS);
    real *dwte = job->grad + g->layout.embed[EMBED_WTE];
    real *dwpe = job->grad + g->layout.embed[EMBED_WPE];
    for (uint64_t row = 0; row < g->rows; row++) {
        const real *dx = g->dx + row * dim;
        real *token = dwte + g->tokens[row] * dim, *position = dwpe + row % seq * dim;
        for (uint64_t j = col; j < end; j++) {
            token[j] += dx[j];
            position[j] = row < seq ? dx[j] : position[j] + dx[j];
        }
    }
}

/* -- Head: final norm, logits against wte, loss -------------------------------------------------
 */

static struct vec_norm head_norm(const struct gpt *g, const real *params)
{
    return (struct vec_norm){ .x = g->out,
                              .weight = params + g->layout.head[HEAD_LN_W],
                              .bias = params + g->layout.head[HEAD_LN_B],
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
                            .weight = embed + g->layout.embed[EMBED_WTE],
                            .transposed = 1 };
}

static void head_loss_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    struct gpt *g = ctx;
    const uint64_t row = (uint64_t)task * GPT_HEAD_ROWS;
    const struct vec_tile tile = { at_most(g->rows - row, GPT_HEAD_ROWS), GPT_VOCAB, GPT_VOCAB };
    g->vec->cross_entropy(g->logits + row * GPT_VOCAB, tile, g->targets + row,
                          (real)(1 / (double)g->rows), g->losses + row);
}

static void head_forward(struct gpt *g, const real *params, const real *embed)
{
    const struct vec_norm norm = head_norm(g, params);
    const struct linear lin = head_linear(g, embed);
    norm_forward(g, &norm, g->norm);
    linear_forward(g->pool, &lin, g->norm, g->logits, LINEAR_PLAIN, NULL);
    pool_run(g->pool, (uint32_t)blocks_of(g->rows, GPT_HEAD_ROWS), head_loss_task, g);
}

static void head_backward(struct gpt *g, const real *params, real *grad, const real *embed,
                          real *embed_grad)
{
    const struct vec_norm norm = head_norm(g, params);
    const struct linear lin = head_linear(g, embed);
    linear_backward(g->pool, &lin,
                    &(struct linear_grads){ .x = g->norm,
                                            .dy = g->logits,
                                            .dx = g->d1,
                                            .dweight = embed_grad + g->layout.embed[EMBED_WTE] });
    memset(g->dx, 0, g->rows * g->shape.dim * sizeof(real));
    norm_backward(g, &norm, g->d1, grad + g->layout.head[HEAD_LN_W],
                  grad + g->layout.head[HEAD_LN_B]);
}

/* -- Block ----------------------------------------------------------------------------------- */

static struct vec_norm block_norm(const struct gpt *g, const struct block_acts *b,
                                  const real *params, enum gpt_block_tensor weight)
{
    const int first = weight == BLOCK_LN1_W;
    return (struct vec_norm){ .x = first ? b->x : b->mid,
                              .weight = params + g->layout.block[weight],
                              .bias = params + g->layout.block[weight + 1],
                              .mean = first ? b->mean1 : b->mean2,
                              .rstd = first ? b->rstd1 : b->rstd2,
                              .rows = g->rows,
                              .cols = g->shape.dim };
}

/* The linear layer whose weight and bias are tensors weight and weight + 1. */
static struct linear block_linear(const struct gpt *g, const real *params,
                                  enum gpt_block_tensor weight, uint64_t in, uint64_t out)
{
    return (struct linear){ .rows = g->rows,
                            .in = in,
                            .out = out,
                            .weight = params + g->layout.block[weight],
                            .bias = params + g->layout.block[weight + 1] };
}

static struct attention block_attention(const struct gpt *g, const struct block_acts *b)
{
    return (struct attention){ .batch = g->batch,
                               .seq = g->shape.seq,
                               .heads = g->shape.heads,
                               .dim = g->shape.dim,
                               .qkv = b->qkv,
                               .prob = b->prob };
}

/* y: [R, C], the next block's x. */
static void block_forward(struct gpt *g, struct block_acts *b, const real *params, real *y)
{
    const uint64_t dim = g->shape.dim;
    const struct vec_norm norm1 = block_norm(g, b, params, BLOCK_LN1_W);
    const struct vec_norm norm2 = block_norm(g, b, params, BLOCK_LN2_W);
    const struct linear qkv = block_linear(g, params, BLOCK_ATTN_W, dim, 3 * dim);
    const struct linear proj = block_linear(g, params, BLOCK_PROJ_W, dim, dim);
    const struct linear fc = block_linear(g, params, BLOCK_FC_W, dim, 4 * dim);
    const struct linear mlp = block_linear(g, params, BLOCK_MLP_W, 4 * dim, dim);
    const struct attention attention = block_attention(g, b);

    norm_forward(g, &norm1, b->norm1);
    linear_forward(g->pool, &qkv, b->norm1, b->qkv, LINEAR_PLAIN, NULL);
    attention_forward(g->pool, &attention, b->att);
    linear_forward(g->pool, &proj, b->att, b->mid, LINEAR_RESIDUAL, b->x);
    norm_forward(g, &norm2, b->norm2);
    linear_forward(g->pool, &fc, b->norm2, b->pre, LINEAR_GELU, b->act);
    linear_forward(g->pool, &mlp, b->act, y, LINEAR_RESIDUAL, b->mid);
}

/* One linear layer's backward, gradients to tensors weight and weight + 1. */
static void block_linear_backward(struct gpt *g, const struct linear *lin, struct linear_grads io,
                                  real *grad, enum gpt_block_tensor weight)
{
    io.dweight = grad + g->layout.block[weight];
    io.dbias = grad + g->layout.block[weight + 1];
    linear_backward(g->pool, lin, &io);
}

static void block_backward(struct gpt *g, struct block_acts *b, const real *params, real *grad)
{
    const uint64_t dim = g->shape.dim;
    const uint64_t *at = g->layout.block;
    const struct vec_norm norm1 = block_norm(g, b, params, BLOCK_LN1_W);
    const struct vec_norm norm2 = block_norm(g, b, params, BLOCK_LN2_W);
    const struct linear qkv = block_linear(g, params, BLOCK_ATTN_W, dim, 3 * dim);
    const struct linear proj = block_linear(g, params, BLOCK_PROJ_W, dim, dim);
    const struct linear fc = block_linear(g, params, BLOCK_FC_W, dim, 4 * dim);
    const struct linear mlp = block_linear(g, params, BLOCK_MLP_W, 4 * dim, dim);
    const struct attention attention = block_attention(g, b);

    block_linear_backward(
        g, &mlp, (struct linear_grads){ .x = b->act, .dy = g->dx, .dx = g->d4, .pre = b->pre },
        grad, BLOCK_MLP_W);
    block_linear_backward(g, &fc, (struct linear_grads){ .x = b->norm2, .dy = g->d4, .dx = g->d1 },
                          grad, BLOCK_FC_W);
    norm_backward(g, &norm2, g->d1, grad + at[BLOCK_LN2_W], grad + at[BLOCK_LN2_B]);

    block_linear_backward(g, &proj, (struct linear_grads){ .x = b->att, .dy = g->dx, .dx = g->d1 },
                          grad, BLOCK_PROJ_W);
    attention_backward(g->pool, &attention, g->d1, g->d3, g->scratch);
    block_linear_backward(g, &qkv, (struct linear_grads){ .x = b->norm1, .dy = g->d3, .dx = g->d1 },
                          grad, BLOCK_ATTN_W);
    norm_backward(g, &norm1, g->d1, grad + at[BLOCK_LN1_W], grad + at[BLOCK_LN1_B]);
}

/* -- Units ----------------------------------------------------------------------------------- */

/* Where unit's input lies: block l's x, or the last block's output. */
static real *gpt_stream(struct gpt *g, uint32_t layer)
{
    return layer < g->shape.layers ? g->blocks[layer].x : g->out;
}

void gpt_forward(struct gpt *g, uint32_t unit, const real *params, const real *embed)
{
    if (unit == GPT_UNIT_EMBED) {
        struct embed_job job = { .g = g, .params = params, .x = gpt_stream(g, 0) };
        pool_run(g->pool, (uint32_t)g->batch, embed_forward_task, &job);
    } else if (unit <= g->shape.layers) {
        block_forward(g, &g->blocks[unit - 1], params, gpt_stream(g, unit));
    } else {
        head_forward(g, params, embed);
    }
}

void gpt_backward(struct gpt *g, uint32_t unit, const real *params, real *grad, const real *embed,
                  real *embed_grad)
{
    if (unit == GPT_UNIT_EMBED) {
        struct embed_job job = { .g = g, .grad = grad };
        pool_run(g->pool, (uint32_t)blocks_of(g->shape.dim, GPT_EMBED_COLS), embed_backward_task,
                 &job);
    } else if (unit <= g->shape.layers) {
        block_backward(g, &g->blocks[unit - 1], params, grad);
    } else {
        head_backward(g, params, grad, embed, embed_grad);
    }
}

double gpt_loss(const struct gpt *g)
{
    double sum = 0;
    for (uint64_t i = 0; i < g->rows; i++)
        sum += g->losses[i];
    return sum / (double)g->rows;
}

const double *gpt_row_losses(const struct gpt *g)
{
    return g->losses;
}

double gpt_whole(struct gpt *g, const uint8_t *windows, const real *const *params,
                 real *const *grads)
{
    const uint32_t units = gpt_units(&g->shape);
    gpt_set_batch(g, windows);
    for (uint32_t u = 0; u < units; u++)
        gpt_forward(g, u, params[u], params[GPT_UNIT_EMBED]);
    for (uint32_t u = units; grads != NULL && u-- > 0;)
        gpt_backward(g, u, params[u], grads[u], params[GPT_UNIT_EMBED], grads[GPT_UNIT_EMBED]);
    return gpt_loss(g);
}
