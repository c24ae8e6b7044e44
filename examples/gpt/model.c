/* model.c: see model.h.
 *
 * Activations live in one slab, carved at gpt_new(); nothing is allocated later.
 */
#include "examples/gpt/model.h"

#include <stdlib.h>
#include <string.h>

#include "examples/gpt/attention.h"
#include "examples/gpt/linear.h"
#include "examples/gpt/model_layer.h"
#include "examples/gpt/model_tiles.h"
#include "proto/base/status.h"

#define GPT_SLAB_ALIGN 64
#define GPT_HEAD_ROWS  64 /* of a task */
#define GPT_EMBED_COLS 64

/* Arrays of one unit, and of the one it uses. */
struct unit_arrays {
    const real *params, *used; /* used: NULL when it uses none */
    real *grad, *used_grad;    /* NULL in forward, and when frozen */
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

/* The inputs of a layer's units, which are kept for their backward. */
static void gpt_carve_inputs(struct gpt *g, struct block_acts *b, struct carver *c)
{
    const uint64_t rows = g->rows, width = rows * g->shape.dim, experts = g->shape.experts;
    struct moe_acts *moe = &b->moe;
    b->x = carve_reals(c, width);
    if (experts == 0)
        return;
    b->norm2 = carve_reals(c, width);
    moe->row = carve(c, rows * sizeof *moe->row);
    moe->first = carve(c, (experts + 1) * sizeof *moe->first);
    moe->chosen = carve(c, rows * sizeof *moe->chosen);
    moe->prob = carve_reals(c, rows * experts);
}

/* A block's other activations, which its forward makes of its inputs. */
static void gpt_carve_block(struct gpt *g, struct block_acts *b, struct carver *c)
{
    const uint64_t rows = g->rows, width = rows * g->shape.dim;
    b->mean1 = carve_reals(c, rows);
    b->rstd1 = carve_reals(c, rows);
    b->norm1 = carve_reals(c, width);
    b->qkv = carve_reals(c, 3 * width);
    b->prob = carve_reals(c, rows * g->shape.heads * g->shape.seq);
    b->att = carve_reals(c, width);
    b->mid = carve_reals(c, width);
    b->mean2 = carve_reals(c, rows);
    b->rstd2 = carve_reals(c, rows);
    if (g->shape.experts == 0)
        b->norm2 = carve_reals(c, width);
    b->slope = carve_reals(c, 4 * width);
    b->act = carve_reals(c, 4 * width);
    for (int m = 0; m < GPT_MATRICES && g->shape.rank > 0; m++)
        b->low[m] = carve_reals(c, rows * g->shape.rank);
    if (g->shape.experts == 0)
        return;
    b->moe.in = carve_reals(c, width);
    b->moe.out = carve_reals(c, width);
    b->moe.dgate = carve_reals(c, rows);
}

/* The largest weights: of an MLP, and of the head where dim is small. */
static uint64_t gpt_weight_scratch(const struct gpt *g)
{
    const uint64_t dim = g->shape.dim;
    const uint64_t mlp = linear_scratch(dim, 4 * dim), head = linear_scratch(dim, GPT_VOCAB);
    return mlp > head ? mlp : head;
}

/* Returns the bytes needed. slab: NULL to ask for that alone. */
static uint64_t gpt_carve(struct gpt *g, uint32_t threads, void *slab)
{
    struct carver c = { .base = slab };
    const uint64_t rows = g->rows, width = rows * g->shape.dim;
    for (uint32_t l = 0; l < g->shape.layers; l++) {
        if (g->recompute && l > 0)
            g->blocks[l] = g->blocks[0];
        else
            gpt_carve_block(g, &g->blocks[l], &c);
        gpt_carve_inputs(g, &g->blocks[l], &c);
    }
    g->out = carve_reals(&c, width);
    g->mean = carve_reals(&c, rows);
    g->rstd = carve_reals(&c, rows);
    g->norm = carve_reals(&c, width);
    g->logits = carve_reals(&c, rows * GPT_VOCAB);
    g->dx = carve_reals(&c, width);
    g->d1 = carve_reals(&c, width);
    g->d3 = carve_reals(&c, 3 * width);
    g->d4 = carve_reals(&c, 4 * width);
    g->dlow = g->shape.rank > 0 ? carve_reals(&c, rows * g->shape.rank) : NULL;
    g->dnorm2 = g->shape.experts > 0 ? carve_reals(&c, width) : NULL;
    g->dout = g->shape.experts > 0 ? carve_reals(&c, width) : NULL;
    g->scratch = carve_reals(&c, (uint64_t)threads * ATTENTION_BLOCK * g->shape.seq);
    g->weight = carve_reals(&c, gpt_weight_scratch(g));
    g->losses = carve(&c, rows * sizeof(double));
    g->tokens = carve(&c, rows);
    g->targets = carve(&c, rows);
    return c.used;
}

uint64_t gpt_bytes(const struct gpt_shape *shape, uint32_t batch, bool recompute, uint32_t threads)
{
    struct gpt g = { .shape = *shape,
                     .batch = batch,
                     .rows = (uint64_t)batch * shape->seq,
                     .recompute = recompute,
                     .blocks = calloc(shape->layers, sizeof *g.blocks) };
    const uint64_t bytes = g.blocks != NULL ? gpt_carve(&g, threads, NULL) : 0;
    free(g.blocks);
    return bytes;
}

int gpt_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
            bool recompute, struct pool *pool, struct gpt **ret_gpt, struct shd_err *e)
{
    const int r = gpt_shape_check(shape, e);
    if (r != SHD_OK)
        return r;
    if (recompute && shape->tiles > 0)
        return err_set(e, SHD_ENOTSUP, "recompute of a model in tiles is not supported");
    if (batch < 1 || batch > GPT_BATCH_MAX)
        return err_set(e, SHD_ERANGE, "batch is %u, limits are 1 to %d", batch, GPT_BATCH_MAX);
    struct gpt *g = calloc(1, sizeof *g);
    struct block_acts *blocks = calloc(shape->layers, sizeof *blocks);
    if (g == NULL || blocks == NULL) {
        free(g);
        free(blocks);
        return err_set(e, SHD_ENOMEM, "no memory for a model of %u layers", shape->layers);
    }
    *g = (struct gpt){ .shape = *shape,
                       .layout = *layout,
                       .pool = pool,
                       .vec = vec_pick(),
                       .loss_scale = 1,
                       .batch = batch,
                       .rows = (uint64_t)batch * shape->seq,
                       .held = MODEL_HELD_NONE,
                       .blocks = blocks };
    /* With the limits of gpt_shape_check() this stays far below 2^64. */
    for (int way = 0; way < 2; way++) {
        g->recompute = way == 0 ? !recompute : recompute;
        g->bytes[g->recompute] = gpt_carve(g, pool_threads(pool), NULL);
    }
    g->slab = aligned_alloc(GPT_SLAB_ALIGN, g->bytes[recompute]);
    if (g->slab == NULL) {
        const uint64_t bytes = g->bytes[recompute];
        gpt_free(g);
        return err_set(e, SHD_ENOMEM,
                       "no memory for %ju MiB of activations: lower --batch or --seq",
                       (uintmax_t)(bytes >> 20));
    }
    gpt_carve(g, pool_threads(pool), g->slab);
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

uint64_t gpt_activation_bytes(const struct gpt *g, bool recompute)
{
    return g->bytes[recompute];
}

void gpt_set_gemm(struct gpt *g, enum gemm_kind kind)
{
    g->gemm = kind;
}

void gpt_set_loss_scale(struct gpt *g, double scale)
{
    g->loss_scale = scale;
}

void gpt_set_batch(struct gpt *g, const uint8_t *windows)
{
    const uint64_t seq = g->shape.seq;
    for (uint64_t b = 0; b < g->batch; b++) {
        memcpy(g->tokens + b * seq, windows + b * (seq + 1), seq);
        memcpy(g->targets + b * seq, windows + b * (seq + 1) + 1, seq);
    }
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

static void embed_forward(struct gpt *g, const real *params)
{
    struct embed_job job = { .g = g, .params = params, .x = model_stream(g, 0) };
    pool_run(g->pool, (uint32_t)g->batch, embed_forward_task, &job);
}

static void embed_backward(struct gpt *g, real *grad)
{
    struct embed_job job = { .g = g, .grad = grad };
    if (grad != NULL)
        pool_run(g->pool, model_tasks(g->shape.dim, GPT_EMBED_COLS), embed_backward_task, &job);
}

/* -- Head: final norm, logits against wte, loss ---------------------------------------------- */

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
                            .gemm = g->gemm,
                            .scratch = g->weight };
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

static void head_loss(struct gpt *g)
{
    pool_run(g->pool, model_tasks(g->rows, GPT_HEAD_ROWS), head_loss_task, g);
}

static void head_forward(struct gpt *g, const real *params, const real *embed)
{
    const struct vec_norm norm = head_norm(g, params);
    const struct linear lin = head_linear(g, embed);
    norm_forward(g, &norm, g->norm);
    linear_forward(g->pool, &lin, g->norm, g->logits, LINEAR_PLAIN, NULL);
    head_loss(g);
}

/* Of a model in tiles: the logits have units of their own. */
static void head_norm_forward(struct gpt *g, const real *params)
{
    const struct vec_norm norm = head_norm(g, params);
    norm_forward(g, &norm, g->norm);
}

/* The gradient of the residual stream, of that of norm in d1. */
static void head_norm_backward(struct gpt *g, const real *params, real *grad)
{
    const struct vec_norm norm = head_norm(g, params);
    const uint64_t *at = g->layout.at[GPT_HEAD];
    memset(g->dx, 0, g->rows * g->shape.dim * sizeof(real));
    norm_backward(g, &norm, g->d1, grad != NULL ? grad + at[HEAD_LN_W] : NULL,
                  grad != NULL ? grad + at[HEAD_LN_B] : NULL);
}

static void head_backward(struct gpt *g, const struct unit_arrays *a)
{
    const struct linear lin = head_linear(g, a->used);
    struct linear_grads io = { .x = g->norm, .dy = g->logits, .dx = g->d1 };
    if (a->used_grad != NULL)
        io.dweight = a->used_grad + g->layout.at[GPT_EMBED][EMBED_WTE];
    linear_backward(g->pool, &lin, &io);
    head_norm_backward(g, a->params, a->grad);
}

/* -- Units ----------------------------------------------------------------------------------- */

static void tiled_forward(struct gpt *g, struct gpt_unit u, const real *params)
{
    if (u.kind == GPT_HEAD)
        head_norm_forward(g, params);
    else
        tile_forward(g, u, params);
    if (u.kind == GPT_TILED_LM && u.expert + 1 == g->shape.tiles)
        head_loss(g);
}

static void tiled_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad)
{
    if (u.kind == GPT_HEAD)
        head_norm_backward(g, params, grad);
    else
        tile_backward(g, u, params, grad);
}

/* A frozen block does nothing by itself: its adapters' unit computes it. */
void gpt_forward(struct gpt *g, uint32_t unit, const real *params, const real *used)
{
    const struct gpt_unit u = gpt_unit_at(&g->shape, unit);
    const bool lora = u.kind == GPT_LORA;
    const struct block_arrays a = { .base = lora ? used : params, .low = lora ? params : NULL };
    if (g->shape.tiles > 0)
        tiled_forward(g, u, params);
    else if (u.kind == GPT_EMBED)
        embed_forward(g, params);
    else if (u.kind == GPT_HEAD)
        head_forward(g, params, used);
    else if (u.kind == GPT_EXPERT)
        expert_forward(g, u, params);
    else if (g->shape.experts > 0)
        router_forward(g, u.layer, &a);
    else if (lora || g->shape.rank == 0)
        block_forward(g, u.layer, &a);
}

void gpt_backward(struct gpt *g, uint32_t unit, const real *params, real *grad, const real *used,
                  real *used_grad)
{
    const struct gpt_unit u = gpt_unit_at(&g->shape, unit);
    const bool lora = u.kind == GPT_LORA;
    const struct block_arrays a = { .base = lora ? used : params,
                                    .low = lora ? params : NULL,
                                    .grad = lora ? NULL : grad,
                                    .low_grad = lora ? grad : NULL };
    if (g->shape.tiles > 0)
        tiled_backward(g, u, params, grad);
    else if (u.kind == GPT_EMBED)
        embed_backward(g, grad);
    else if (u.kind == GPT_HEAD)
        head_backward(g, &(struct unit_arrays){ params, used, grad, used_grad });
    else if (u.kind == GPT_EXPERT)
        expert_backward(g, u, params, grad);
    else if (g->shape.experts > 0)
        router_backward(g, u.layer, &a);
    else if (lora || g->shape.rank == 0)
        block_backward(g, u.layer, &a);
}

uint32_t gpt_next(const struct gpt *g, uint32_t unit)
{
    while (++unit < gpt_units(&g->shape)) { /* GPT_UNIT_NONE + 1 is 0 */
        const struct gpt_unit u = gpt_unit_at(&g->shape, unit);
        if (u.kind != GPT_EXPERT || expert_has_rows(g, u))
            return unit;
    }
    return GPT_UNIT_NONE;
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
