/* model.c: see model.h, and model_base.h for the other files.
 *
 * Activations live in one slab, carved at gpt_new(); nothing is allocated later.
 */
#include "examples/gpt/model.h"

#include <stdlib.h>
#include <string.h>

#include "examples/gpt/attention.h"
#include "examples/gpt/model_block.h"
#include "examples/gpt/model_ends.h"
#include "examples/gpt/model_moe.h"
#include "proto/base/status.h"

#define GPT_SLAB_ALIGN 64

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
    b->pre = carve_reals(c, 4 * width);
    b->act = carve_reals(c, 4 * width);
    for (int m = 0; m < MATRICES && g->shape.rank > 0; m++)
        b->low[m] = carve_reals(c, rows * g->shape.rank);
    if (g->shape.experts == 0)
        return;
    b->moe.in = carve_reals(c, width);
    b->moe.out = carve_reals(c, width);
    b->moe.dgate = carve_reals(c, rows);
}

/* Returns the bytes needed. */
static uint64_t gpt_carve(struct gpt *g, void *slab)
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
    g->scratch = carve_reals(&c, (uint64_t)pool_threads(g->pool) * ATTENTION_BLOCK * g->shape.seq);
    g->losses = carve(&c, rows * sizeof(double));
    g->tokens = carve(&c, rows);
    g->targets = carve(&c, rows);
    return c.used;
}

int gpt_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
            bool recompute, struct pool *pool, struct gpt **ret_gpt, struct shd_err *e)
{
    const int r = gpt_shape_check(shape, e);
    if (r != SHD_OK)
        return r;
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
        g->bytes[g->recompute] = gpt_carve(g, NULL);
    }
    g->slab = aligned_alloc(GPT_SLAB_ALIGN, g->bytes[recompute]);
    if (g->slab == NULL) {
        const uint64_t bytes = g->bytes[recompute];
        gpt_free(g);
        return err_set(e, SHD_ENOMEM,
                       "no memory for %ju MiB of activations: lower --batch or --seq",
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

/* -- Units ----------------------------------------------------------------------------------- */

/* A frozen block does nothing by itself: its adapters' unit computes it. */
void gpt_forward(struct gpt *g, uint32_t unit, const real *params, const real *used)
{
    const struct gpt_unit u = gpt_unit_at(&g->shape, unit);
    switch (u.kind) {
    case GPT_EMBED:
        embed_forward(g, params);
        break;
    case GPT_BLOCK:
        if (g->shape.experts > 0)
            router_forward(g, u.layer, params);
        else if (g->shape.rank == 0)
            block_forward(g, u.layer, &(struct block_arrays){ .base = params });
        break;
    case GPT_EXPERT:
        expert_forward(g, u, params);
        break;
    case GPT_LORA:
        block_forward(g, u.layer, &(struct block_arrays){ .base = used, .low = params });
        break;
    case GPT_HEAD:
        head_forward(g, &(struct unit_arrays){ .params = params, .used = used });
        break;
    case GPT_UNIT_KINDS:
        break;
    }
}

static void backward_block(struct gpt *g, uint32_t layer, const struct unit_arrays *a)
{
    if (g->shape.experts > 0)
        router_backward(g, layer, a->params, a->grad);
    else if (g->shape.rank == 0)
        block_backward(g, layer, &(struct block_arrays){ .base = a->params, .grad = a->grad });
}

void gpt_backward(struct gpt *g, uint32_t unit, const real *params, real *grad, const real *used,
                  real *used_grad)
{
    const struct gpt_unit u = gpt_unit_at(&g->shape, unit);
    const struct unit_arrays a = {
        .params = params, .used = used, .grad = grad, .used_grad = used_grad
    };
    switch (u.kind) {
    case GPT_EMBED:
        embed_backward(g, grad);
        break;
    case GPT_BLOCK:
        backward_block(g, u.layer, &a);
        break;
    case GPT_EXPERT:
        expert_backward(g, u, params, grad);
        break;
    case GPT_LORA:
        block_backward(g, u.layer,
                       &(struct block_arrays){ .base = used, .low = params, .low_grad = grad });
        break;
    case GPT_HEAD:
        head_backward(g, &a);
        break;
    case GPT_UNIT_KINDS:
        break;
    }
}

uint32_t gpt_next(const struct gpt *g, uint32_t unit)
{
    const uint32_t units = gpt_units(&g->shape);
    for (uint32_t next = unit == GPT_UNIT_NONE ? 0 : unit + 1; next < units; next++) {
        const struct gpt_unit u = gpt_unit_at(&g->shape, next);
        if (u.kind != GPT_EXPERT || expert_has_rows(g, u))
            return next;
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

/* The unit before `unit` that took part. */
static uint32_t gpt_previous(const struct gpt *g, uint32_t unit)
{
    while (unit-- > 0) {
        const struct gpt_unit u = gpt_unit_at(&g->shape, unit);
        if (u.kind != GPT_EXPERT || expert_has_rows(g, u))
            return unit;
    }
    return GPT_UNIT_NONE;
}

double gpt_whole(struct gpt *g, const uint8_t *windows, const real *const *params,
                 real *const *grads)
{
    gpt_set_batch(g, windows);
    for (uint32_t u = gpt_next(g, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = gpt_next(g, u)) {
        const uint32_t used = gpt_unit_uses(&g->shape, u);
        gpt_forward(g, u, params[u], used == GPT_UNIT_NONE ? NULL : params[used]);
    }
    for (uint32_t u = gpt_units(&g->shape) - 1; grads != NULL && u != GPT_UNIT_NONE;
         u = gpt_previous(g, u)) {
        const uint32_t used = gpt_unit_uses(&g->shape, u);
        gpt_backward(g, u, params[u], grads[u], used == GPT_UNIT_NONE ? NULL : params[used],
                     used == GPT_UNIT_NONE ? NULL : grads[used]);
    }
    return gpt_loss(g);
}
