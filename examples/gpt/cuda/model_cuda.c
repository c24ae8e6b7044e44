/* model_cuda.c: memory, embedding, head and loss on a GPU; see model_cuda.h.
 *
 * Activations live in one slab, carved at gpu_model_init(); nothing is allocated later.
 */
#include "examples/gpt/cuda/model_cuda.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/status.h"

#define SLAB_ALIGN 256
#define CHUNKS_MAX 128 /* of sums over rows: enough blocks for a GPU, little to add up */
#define CHUNK_ROWS 64

static_assert(GPU_VOCAB == GPT_VOCAB, "one warp holds a row of logits");
static_assert((int)GPU_F32 == (int)SHD_F32 && (int)GPU_BF16 == (int)SHD_BF16 &&
                  (int)GPU_F16 == (int)SHD_F16,
              "as on the wire");

/* -- Memory ---------------------------------------------------------------------------------- */

/* Hands out pieces of base; with base NULL only counts. */
struct carver {
    char *base;
    uint64_t used;
};

static void *carve(struct carver *c, uint64_t count, uint64_t bytes)
{
    void *piece = c->base == NULL ? NULL : c->base + c->used;
    c->used += (count * bytes + SLAB_ALIGN - 1) / SLAB_ALIGN * SLAB_ALIGN;
    return piece;
}

static float *carve_floats(struct carver *c, uint64_t count)
{
    return carve(c, count, sizeof(float));
}

static uint64_t factor_bytes(const struct gpu_model *m)
{
    return gpu_dtype_bytes(m->dtype);
}

static void *carve_factors(const struct gpu_model *m, struct carver *c, uint64_t count)
{
    return carve(c, count, factor_bytes(m));
}

uint64_t gpu_model_segments_max(uint64_t rows)
{
    return rows / GPU_SEGMENT + GPU_VOCAB;
}

/* The inputs of a layer's experts: each layer has its own, also with `recompute`. */
static void carve_routes(const struct gpu_model *m, struct gpu_acts *b, struct carver *c)
{
    struct gpu_moe *moe = &b->moe;
    b->norm2 = carve_floats(c, m->rows * m->shape.dim);
    moe->prob = carve_floats(c, m->rows * m->experts_stride);
    moe->chosen = carve(c, m->rows, sizeof *moe->chosen);
    moe->row = carve(c, m->rows, sizeof *moe->row);
    moe->first = carve(c, m->shape.experts + 1, sizeof *moe->first);
}

static void carve_block(struct gpu_model *m, struct gpu_acts *b, struct carver *c)
{
    const uint64_t rows = m->rows, width = rows * m->shape.dim;
    b->mean1 = carve_floats(c, rows);
    b->rstd1 = carve_floats(c, rows);
    b->norm1 = carve_factors(m, c, width);
    b->heads = carve_factors(m, c, 3 * width);
    b->prob = carve_factors(m, c, rows * m->shape.heads * m->stride);
    b->att = carve_factors(m, c, width);
    b->mid = carve_floats(c, width);
    b->mean2 = carve_floats(c, rows);
    b->rstd2 = carve_floats(c, rows);
    b->norm2 = m->shape.experts > 0 ? NULL : carve_factors(m, c, width);
    b->pre = carve_floats(c, 4 * width);
    b->act = carve_factors(m, c, 4 * width);
    for (int i = 0; i < GPT_MATRICES && m->shape.rank > 0; i++)
        b->low[i] = carve_factors(m, c, rows * m->shape.rank);
    b->moe.in = m->shape.experts > 0 ? carve_factors(m, c, width) : NULL;
    b->moe.out = m->shape.experts > 0 ? carve_floats(c, width) : NULL;
}

/* A T beside an fp32 array: the same one when T is fp32. */
static void *carve_beside(const struct gpu_model *m, struct carver *c, float *array, uint64_t count)
{
    return m->dtype == GPU_F32 ? (void *)array : carve_factors(m, c, count);
}

static void carve_scratch(struct gpu_model *m, struct carver *c)
{
    const uint64_t rows = m->rows, dim = m->shape.dim, width = rows * dim;
    const uint64_t experts = m->shape.experts, segments = gpu_model_segments_max(rows);
    const uint64_t widest = 4 * dim > m->experts_stride ? 4 * dim : m->experts_stride;
    const uint64_t sums = 2 * m->chunks * widest;
    m->scratch.dx = carve_floats(c, width);
    m->scratch.dx_factor = carve_beside(m, c, m->scratch.dx, width);
    m->scratch.wide = carve_floats(c, 4 * width);
    m->scratch.wide_factor = carve_beside(m, c, m->scratch.wide, 4 * width);
    m->scratch.d1 = carve_floats(c, width);
    m->scratch.heads = carve_factors(m, c, width);
    m->scratch.dheads = carve_floats(c, 3 * width);
    m->scratch.scores = carve_floats(c, m->batch * m->shape.heads * GPU_ATTENTION_ROWS * m->stride);
    m->scratch.dlow = carve_factors(m, c, rows * m->shape.rank);
    m->scratch.partial = carve_floats(c, sums > segments * dim ? sums : segments * dim);
    m->losses = carve(c, rows, sizeof *m->losses);
    m->input.tokens = carve(c, rows, 1);
    m->input.targets = carve(c, rows, 1);
    m->input.sorted = carve(c, rows, sizeof *m->input.sorted);
    m->input.first = carve(c, GPU_VOCAB + 1, sizeof *m->input.first);
    m->input.segments = carve(c, segments, sizeof *m->input.segments);
    m->scratch.dgate = experts > 0 ? carve_floats(c, rows) : NULL;
    m->scratch.counts = experts > 0 ? carve(c, m->chunks * experts, sizeof *m->scratch.counts)
                                    : NULL;
    m->scratch.router = experts > 0 && m->dtype != GPU_F32 ? carve_floats(c, dim * experts) : NULL;
}

/* Returns the bytes needed. */
static uint64_t carve_all(struct gpu_model *m, void *slab)
{
    struct carver c = { .base = slab };
    const uint64_t rows = m->rows, width = rows * m->shape.dim;
    for (uint32_t l = 0; l < m->shape.layers; l++) {
        if (m->recompute && l > 0)
            m->blocks[l] = m->blocks[0];
        else
            carve_block(m, &m->blocks[l], &c);
        m->blocks[l].x = carve_floats(&c, width);
    }
    for (uint32_t l = 0; l < m->shape.layers && m->shape.experts > 0; l++)
        carve_routes(m, &m->blocks[l], &c);
    m->out = carve_floats(&c, width);
    m->mean = carve_floats(&c, rows);
    m->rstd = carve_floats(&c, rows);
    m->norm = carve_factors(m, &c, width);
    m->logits = carve_floats(&c, rows * GPU_VOCAB);
    m->dlogits = carve_beside(m, &c, m->logits, rows * GPU_VOCAB);
    carve_scratch(m, &c);
    return c.used;
}

/* SHD_OK: the kernels can do the shape. options.c says the same of the options. */
static int check_shape(const struct backend_config *config, struct shd_err *e)
{
    const struct gpt_shape *s = config->shape;
    if (s->dim / s->heads % GPU_LANE != 0 || s->rank % GPU_LANE != 0)
        return err_set(e, SHD_ERANGE,
                       "heads of %u and adapters of rank %u: on a GPU both must be multiples of %u",
                       s->dim / s->heads, s->rank, GPU_LANE);
    return SHD_OK;
}

static int init_routes(struct gpu_model *m, struct shd_err *e)
{
    const uint64_t count = m->shape.layers * ((uint64_t)m->shape.experts + 1);
    if (m->shape.experts == 0)
        return SHD_OK;
    m->routes = gpu_host_alloc(&m->gpu, count * sizeof *m->routes, e);
    if (m->routes == NULL) {
        gpu_model_deinit(m);
        return SHD_ENOMEM;
    }
    memset(m->routes, 0, count * sizeof *m->routes);
    return SHD_OK;
}

int gpu_model_init(struct gpu_model *m, const struct backend_config *config, struct shd_err *e)
{
    const uint64_t rows = (uint64_t)config->batch * config->shape->seq;
    *m = (struct gpu_model){ .shape = *config->shape,
                             .layout = *config->layout,
                             .dtype = (uint32_t)config->publish,
                             .loss_scale = 1,
                             .held = GPU_HELD_NONE,
                             .batch = config->batch,
                             .rows = rows,
                             .head_size = config->shape->dim / config->shape->heads,
                             .stride = (config->shape->seq + 7) / 8 * 8,
                             .experts_stride = (config->shape->experts + 7) / 8 * 8 };
    m->chunk_rows = (rows + CHUNKS_MAX - 1) / CHUNKS_MAX;
    if (m->chunk_rows < CHUNK_ROWS)
        m->chunk_rows = CHUNK_ROWS;
    m->chunks = (rows + m->chunk_rows - 1) / m->chunk_rows;
    int r = gpt_shape_check(config->shape, e);
    if (r == SHD_OK)
        r = check_shape(config, e);
    if (r == SHD_OK)
        r = gpu_init(&m->gpu, config->device, config->tf32, e);
    if (r != SHD_OK)
        return r;
    m->blocks = calloc(m->shape.layers, sizeof *m->blocks);
    if (m->blocks == NULL) {
        gpu_model_deinit(m);
        return err_set(e, SHD_ENOMEM, "no memory for a model of %u layers", config->shape->layers);
    }
    for (int way = 0; way < 2; way++) {
        m->recompute = way == 0 ? !config->recompute : config->recompute;
        m->bytes[m->recompute] = carve_all(m, NULL);
    }
    m->slab = gpu_alloc(&m->gpu, m->bytes[m->recompute], "activations: lower --batch or --seq", e);
    if (m->slab == NULL) {
        gpu_model_deinit(m);
        return SHD_ENOMEM;
    }
    carve_all(m, m->slab);
    return init_routes(m, e);
}

void gpu_model_deinit(struct gpu_model *m)
{
    if (m->slab != NULL)
        gpu_free(&m->gpu, m->slab);
    gpu_host_free(&m->gpu, m->routes);
    free(m->blocks);
    m->routes = NULL;
    m->slab = NULL;
    m->blocks = NULL;
    gpu_deinit(&m->gpu);
}

const void *gpu_model_param(const struct gpu_model *m, const void *params, uint64_t at)
{
    return (const char *)params + at * factor_bytes(m); /* T is the published dtype */
}

float *gpu_model_grad(float *grad, uint64_t at)
{
    return grad != NULL ? grad + at : NULL;
}

void *gpu_model_at(const struct gpu_model *m, void *factors, uint64_t at)
{
    return (char *)factors + at * factor_bytes(m);
}

float *gpu_model_stream(struct gpu_model *m, uint32_t layer)
{
    return layer < m->shape.layers ? m->blocks[layer].x : m->out;
}

/* -- Sums and norms -------------------------------------------------------------------------- */

void gpu_model_columns_sum(struct gpu_model *m, const struct gpu_columns_sum *sum)
{
    if (sum->out != NULL)
        gpu_launch(&m->gpu, GPU_KERNEL_columns_sum, (sum->cols + 31) / 32, sum);
}

void gpu_model_norm(struct gpu_model *m, const struct gpu_norm_io *n, const float *raw,
                    const void *bias, const float *residual, void *y)
{
    const struct gpu_norm a = { .x = n->x,
                                .raw = raw,
                                .residual = residual,
                                .bias = bias,
                                .weight = n->weight,
                                .shift = n->shift,
                                .y = y,
                                .mean = n->mean,
                                .rstd = n->rstd,
                                .rows = m->rows,
                                .cols = m->shape.dim,
                                .param_dtype = m->dtype,
                                .y_dtype = n->full ? GPU_F32 : m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_norm, gpu_blocks_rows(m->rows), &a);
}

void gpu_model_norm_backward(struct gpu_model *m, const struct gpu_norm_io *n, bool add,
                             float *dweight, float *dshift)
{
    const uint32_t dim = m->shape.dim;
    const struct gpu_norm_columns columns = { .x = n->x,
                                              .mean = n->mean,
                                              .rstd = n->rstd,
                                              .dy = m->scratch.d1,
                                              .partial = m->scratch.partial,
                                              .rows = m->rows,
                                              .cols = dim,
                                              .chunk_rows = (uint32_t)m->chunk_rows,
                                              .chunks = (uint32_t)m->chunks };
    struct gpu_columns_sum sum = { .partial = m->scratch.partial,
                                   .out = dweight,
                                   .cols = dim,
                                   .chunks = (uint32_t)m->chunks,
                                   .stride = dim };
    const struct gpu_norm_grad a = { .x = n->x,
                                     .mean = n->mean,
                                     .rstd = n->rstd,
                                     .dy = m->scratch.d1,
                                     .weight = n->weight,
                                     .dx = m->scratch.dx,
                                     .rows = m->rows,
                                     .cols = dim,
                                     .param_dtype = m->dtype,
                                     .add = add };
    if (dweight != NULL) {
        gpu_launch(&m->gpu, GPU_KERNEL_norm_columns, gpu_blocks_cols(dim, m->chunks), &columns);
        gpu_model_columns_sum(m, &sum);
        sum.partial += m->chunks * dim;
        sum.out = dshift;
        gpu_model_columns_sum(m, &sum);
    }
    gpu_launch(&m->gpu, GPU_KERNEL_norm_grad, gpu_blocks_rows(m->rows), &a);
}

/* -- Embedding ------------------------------------------------------------------------------- */

void gpu_model_embed(struct gpu_model *m, const void *params)
{
    const uint64_t *at = m->layout.at[GPT_EMBED];
    const struct gpu_embed a = { .x = gpu_model_stream(m, 0),
                                 .wte = gpu_model_param(m, params, at[EMBED_WTE]),
                                 .wpe = gpu_model_param(m, params, at[EMBED_WPE]),
                                 .tokens = m->input.tokens,
                                 .elems = m->rows * m->shape.dim,
                                 .dim = m->shape.dim,
                                 .seq = m->shape.seq,
                                 .param_dtype = m->dtype };
    gpu_launch(&m->gpu, GPU_KERNEL_embed, gpu_blocks_elems(a.elems), &a);
}

/* Adds to wte's gradient, which holds the head's part, and overwrites wpe's. */
void gpu_model_embed_backward(struct gpu_model *m, float *grad)
{
    const uint64_t *at = m->layout.at[GPT_EMBED];
    const uint32_t dim = m->shape.dim;
    const struct gpu_embed_tokens tokens = { .dx = m->scratch.dx,
                                             .sorted = m->input.sorted,
                                             .segments = m->input.segments,
                                             .partial = m->scratch.partial,
                                             .segment_count = m->input.segment_count,
                                             .dim = dim };
    const struct gpu_embed_sum sum = { .dwte = gpu_model_grad(grad, at[EMBED_WTE]),
                                       .partial = m->scratch.partial,
                                       .first = m->input.first,
                                       .dim = dim };
    const struct gpu_embed_positions positions = { .dwpe = gpu_model_grad(grad, at[EMBED_WPE]),
                                                   .dx = m->scratch.dx,
                                                   .batch = (uint32_t)m->batch,
                                                   .seq = m->shape.seq,
                                                   .dim = dim };
    if (grad == NULL)
        return;
    CHECK(m->input.segment_count <= gpu_model_segments_max(m->rows));
    gpu_launch(&m->gpu, GPU_KERNEL_embed_tokens, gpu_blocks_cols(dim, m->input.segment_count),
               &tokens);
    gpu_launch(&m->gpu, GPU_KERNEL_embed_sum, gpu_blocks_elems((uint64_t)GPU_VOCAB * dim), &sum);
    gpu_launch(&m->gpu, GPU_KERNEL_embed_positions, gpu_blocks_elems((uint64_t)m->shape.seq * dim),
               &positions);
}

/* -- Head ------------------------------------------------------------------------------------ */

static struct gpu_norm_io head_norm(const struct gpu_model *m, const void *params)
{
    const uint64_t *at = m->layout.at[GPT_HEAD];
    return (struct gpu_norm_io){ .x = m->out,
                                 .mean = m->mean,
                                 .rstd = m->rstd,
                                 .weight = gpu_model_param(m, params, at[HEAD_LN_W]),
                                 .shift = gpu_model_param(m, params, at[HEAD_LN_B]) };
}

void gpu_model_head(struct gpu_model *m, const void *params, const void *embed)
{
    const struct gpu_norm_io norm = head_norm(m, params);
    const uint64_t dim = m->shape.dim;
    const void *wte = gpu_model_param(m, embed, m->layout.at[GPT_EMBED][EMBED_WTE]);
    gpu_model_norm(m, &norm, NULL, NULL, NULL, m->norm);
    multiply(m, (struct gpu_size){ m->rows, GPU_VOCAB, dim }, factor(m, m->norm, dim),
             factor_t(m, wte, dim), floats(m->logits, GPU_VOCAB), PRODUCT);
    const struct gpu_cross_entropy loss = { .logits = m->logits,
                                            .grad = m->dlogits,
                                            .targets = m->input.targets,
                                            .losses = m->losses,
                                            .rows = m->rows,
                                            .grad_dtype = m->dtype,
                                            .scale = m->loss_scale / (float)m->rows };
    gpu_launch(&m->gpu, GPU_KERNEL_cross_entropy, gpu_blocks_rows(m->rows), &loss);
}

void gpu_model_head_backward(struct gpu_model *m, const void *params, const void *embed,
                             float *grad, float *embed_grad)
{
    const struct gpu_norm_io norm = head_norm(m, params);
    const uint64_t dim = m->shape.dim, *at = m->layout.at[GPT_HEAD];
    const uint64_t wte = m->layout.at[GPT_EMBED][EMBED_WTE];
    const struct gpu_matrix dlogits = factor(m, m->dlogits, GPU_VOCAB);
    if (embed_grad != NULL)
        multiply(m, (struct gpu_size){ GPU_VOCAB, dim, m->rows }, transposed(dlogits),
                 factor(m, m->norm, dim), floats(embed_grad + wte, dim), PRODUCT);
    multiply(m, (struct gpu_size){ m->rows, dim, GPU_VOCAB }, dlogits,
             factor(m, gpu_model_param(m, embed, wte), dim), floats(m->scratch.d1, dim), PRODUCT);
    gpu_model_norm_backward(m, &norm, /* add= */ false, gpu_model_grad(grad, at[HEAD_LN_W]),
                            gpu_model_grad(grad, at[HEAD_LN_B]));
}
