/* backend_cuda.c: the model on a GPU as a backend; see ../backend.h.
 *
 * Arrays. With a session of the device (shd_options.device) parameters are read and gradients
 * written where libshd has them, in device memory: products read the published tensors in place and
 * write gradients in place. With `staged` they are the host's ("local:" owners): a unit's
 * parameters are copied to the device before its work, its gradients from there after it.
 *
 * Streams. All work is queued on one stream; each forward and backward waits for it before it
 * returns, since what they read may be released, and what they wrote returned, right after. Where
 * libshd goes by that stream (backend.ordered) the host waits for what it has to know alone:
 * losses, and how many rows each expert has.
 *
 * Failure: the first error of a call's queued work is its result. A CUDA error may leave the
 * process's context useless; the run ends with it, and the owners have the state.
 */
#include "examples/gpt/cuda/backend_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt/cuda/layer_cuda.h"
#include "examples/gpt/half.h"
#include "proto/base/status.h"

enum stage_slot { STAGE_UNIT, STAGE_USED, STAGE_GRAD, STAGE_USED_GRAD, STAGE_SLOTS };

struct backend_cuda {
    struct backend base;
    struct gpu_model model;
    bool staged;
    void *stage[STAGE_SLOTS]; /* owned; NULL unless staged */
    void *pinned;             /* owned: batch and losses */
    bool batch_read;          /* the stream is past the batch's copies: it may be written to */
    struct gpu_batch batch;
    double *losses; /* [R] */
};

static struct backend_cuda *cuda_of(struct backend *b)
{
    return (struct backend_cuda *)b;
}

/* All that is queued is done. */
static int finish(struct backend_cuda *c, struct shd_err *e)
{
    c->batch_read = true;
    return gpu_finish(&c->model.gpu, e);
}

/* -- The batch ------------------------------------------------------------------------------- */

/* Rows by token, in segments: the order in which their gradients are added. */
static uint32_t batch_sort(struct gpu_batch *batch, uint64_t rows)
{
    uint32_t count[GPU_VOCAB] = { 0 }, next[GPU_VOCAB], segments = 0;
    for (uint64_t r = 0; r < rows; r++)
        count[batch->tokens[r]]++;
    for (uint32_t v = 0, at = 0; v < GPU_VOCAB; v++) {
        next[v] = at;
        batch->first[v] = segments;
        for (uint32_t done = 0; done < count[v]; done += GPU_SEGMENT) {
            const uint32_t left = count[v] - done;
            const uint32_t taken = left < GPU_SEGMENT ? left : GPU_SEGMENT;
            batch->segments[segments++] = (struct gpu_segment){ at + done, at + done + taken };
        }
        at += count[v];
    }
    batch->first[GPU_VOCAB] = segments;
    for (uint64_t r = 0; r < rows; r++)
        batch->sorted[next[batch->tokens[r]]++] = (uint32_t)r;
    return segments;
}

static int cuda_set_batch(struct backend *b, const uint8_t *windows, struct shd_err *e)
{
    struct backend_cuda *c = cuda_of(b);
    struct gpu_model *m = &c->model;
    const uint64_t seq = m->shape.seq, rows = m->rows;
    gpu_enter(&m->gpu);
    const int r = c->batch_read ? SHD_OK : finish(c, e); /* one that was given up */
    if (r != SHD_OK)
        return r;
    m->loss_scale = (float)b->loss_scale;
    for (uint64_t i = 0; i < m->batch; i++) {
        memcpy(c->batch.tokens + i * seq, windows + i * (seq + 1), seq);
        memcpy(c->batch.targets + i * seq, windows + i * (seq + 1) + 1, seq);
    }
    m->input.segment_count = batch_sort(&c->batch, rows);
    gpu_copy(&m->gpu, m->input.tokens, c->batch.tokens, rows);
    gpu_copy(&m->gpu, m->input.targets, c->batch.targets, rows);
    gpu_copy(&m->gpu, m->input.sorted, c->batch.sorted, rows * sizeof *m->input.sorted);
    gpu_copy(&m->gpu, m->input.first, c->batch.first, (GPU_VOCAB + 1) * sizeof *m->input.first);
    gpu_copy(&m->gpu, m->input.segments, c->batch.segments,
             m->input.segment_count * sizeof *m->input.segments);
    c->batch_read = false;
    return b->ordered ? gpu_queued(&m->gpu, e) : finish(c, e);
}

/* -- Arrays ---------------------------------------------------------------------------------- */

static uint64_t unit_elems(const struct gpu_model *m, uint32_t unit)
{
    return gpt_unit_elems(&m->shape, &m->layout, unit);
}

/* Parameters of a unit on the device. */
static const void *stage_params(struct backend_cuda *c, enum stage_slot slot, uint32_t unit,
                                const void *params)
{
    struct gpu_model *m = &c->model;
    if (!c->staged || params == NULL)
        return params;
    gpu_copy(&m->gpu, c->stage[slot], params, unit_elems(m, unit) * gpu_dtype_bytes(m->dtype));
    return c->stage[slot];
}

/* The array for a unit's gradient on the device. Gaps between tensors are nobody's and stay zero,
 * so they are cleared; `add` brings what the host's array holds already. */
static float *stage_grad(struct backend_cuda *c, enum stage_slot slot, uint32_t unit, float *grad,
                         bool add)
{
    struct gpu_model *m = &c->model;
    const uint64_t bytes = unit_elems(m, unit) * sizeof(float);
    if (!c->staged || grad == NULL)
        return grad;
    if (add)
        gpu_copy(&m->gpu, c->stage[slot], grad, bytes);
    else
        gpu_zero(&m->gpu, c->stage[slot], bytes);
    return c->stage[slot];
}

static void unstage_grad(struct backend_cuda *c, enum stage_slot slot, uint32_t unit, float *grad)
{
    struct gpu_model *m = &c->model;
    if (c->staged && grad != NULL)
        gpu_copy(&m->gpu, grad, c->stage[slot], unit_elems(m, unit) * sizeof(float));
}

static struct backend_arrays stage_arrays(struct backend_cuda *c, uint32_t unit,
                                          const struct backend_arrays *a)
{
    const uint32_t uses = gpt_unit_uses(&c->model.shape, unit);
    const bool add = unit == GPT_UNIT_EMBED; /* to the head's part of wte */
    struct backend_arrays on = { .params = stage_params(c, STAGE_UNIT, unit, a->params) };
    on.grad = stage_grad(c, STAGE_GRAD, unit, a->grad, add);
    if (uses != GPT_UNIT_NONE) {
        on.used = stage_params(c, STAGE_USED, uses, a->used);
        on.used_grad = stage_grad(c, STAGE_USED_GRAD, uses, a->used_grad, false);
    }
    return on;
}

/* -- Units ----------------------------------------------------------------------------------- */

static void forward(struct gpu_model *m, struct gpt_unit u, const struct backend_arrays *on)
{
    const bool lora = u.kind == GPT_LORA;
    const struct gpu_block_arrays a = { .base = lora ? on->used : on->params,
                                        .low = lora ? on->params : NULL };
    if (u.kind == GPT_EMBED)
        gpu_model_embed(m, on->params);
    else if (u.kind == GPT_HEAD)
        gpu_model_head(m, on->params, on->used);
    else if (u.kind == GPT_EXPERT)
        gpu_model_expert(m, u, on->params);
    else if (m->shape.experts > 0)
        gpu_model_router(m, u.layer, &a);
    else
        gpu_model_block(m, u.layer, &a);
}

static void backward(struct gpu_model *m, struct gpt_unit u, const struct backend_arrays *on)
{
    const bool lora = u.kind == GPT_LORA;
    const struct gpu_block_arrays a = { .base = lora ? on->used : on->params,
                                        .low = lora ? on->params : NULL,
                                        .grad = lora ? NULL : on->grad,
                                        .low_grad = lora ? on->grad : NULL };
    if (u.kind == GPT_EMBED)
        gpu_model_embed_backward(m, on->grad);
    else if (u.kind == GPT_HEAD)
        gpu_model_head_backward(m, on->params, on->used, on->grad, on->used_grad);
    else if (u.kind == GPT_EXPERT)
        gpu_model_expert_backward(m, u, on->params, on->grad);
    else if (m->shape.experts > 0)
        gpu_model_router_backward(m, u.layer, &a);
    else
        gpu_model_block_backward(m, u.layer, &a);
}

/* Is it something that the host has to know? */
static bool tells_host(const struct gpu_model *m, struct gpt_unit u)
{
    return u.kind == GPT_HEAD || (m->shape.experts > 0 && u.kind == GPT_BLOCK);
}

/* One pass of a unit; a frozen block's is that of its adapters' unit. */
static int cuda_run(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                    void (*pass)(struct gpu_model *, struct gpt_unit,
                                 const struct backend_arrays *),
                    struct shd_err *e)
{
    struct backend_cuda *c = cuda_of(b);
    struct gpu_model *m = &c->model;
    const struct gpt_unit u = gpt_unit_at(&m->shape, unit);
    if (u.kind == GPT_BLOCK && m->shape.rank > 0)
        return SHD_OK;
    gpu_enter(&m->gpu);
    const struct backend_arrays on = stage_arrays(c, unit, a);
    pass(m, u, &on);
    if (u.kind == GPT_HEAD && pass == forward)
        gpu_copy(&m->gpu, c->losses, m->losses, m->rows * sizeof *m->losses);
    unstage_grad(c, STAGE_GRAD, unit, a->grad);
    unstage_grad(c, STAGE_USED_GRAD, gpt_unit_uses(&m->shape, unit), a->used_grad);
    const bool waits = !b->ordered || (pass == forward && tells_host(m, u));
    return waits ? finish(c, e) : gpu_queued(&m->gpu, e);
}

static int cuda_forward(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                        struct shd_err *e)
{
    const struct backend_arrays read = { .params = a->params, .used = a->used };
    return cuda_run(b, unit, &read, forward, e);
}

static int cuda_backward(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                         struct shd_err *e)
{
    return cuda_run(b, unit, a, backward, e);
}

static uint32_t cuda_next(const struct backend *b, uint32_t unit)
{
    const struct gpu_model *m = &((const struct backend_cuda *)b)->model;
    const uint32_t units = gpt_units(&m->shape);
    for (uint32_t next = unit == GPT_UNIT_NONE ? 0 : unit + 1; next < units; next++) {
        const struct gpt_unit u = gpt_unit_at(&m->shape, next);
        if (u.kind != GPT_EXPERT || gpu_model_expert_rows(m, u) > 0)
            return next;
    }
    return GPT_UNIT_NONE;
}

static int cuda_read(struct backend *b, const void *params, uint64_t elems, float *out,
                     struct shd_err *e)
{
    struct gpu_model *m = &cuda_of(b)->model;
    const bool half = m->dtype != GPU_F32;
    gpu_enter(&m->gpu);
    uint16_t *narrow = half ? malloc(elems * sizeof *narrow) : NULL;
    if (half && narrow == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %ju parameters", (uintmax_t)elems);
    gpu_copy(&m->gpu, half ? (void *)narrow : (void *)out, params,
             elems * (half ? sizeof *narrow : sizeof *out));
    const int r = gpu_finish(&m->gpu, e);
    for (uint64_t i = 0; half && r == SHD_OK && i < elems; i++)
        out[i] = m->dtype == GPU_BF16 ? half_widen_bf16(narrow[i]) : half_widen_f16(narrow[i]);
    free(narrow);
    return r;
}

static int cuda_spoil(struct backend *b, float *grad, struct shd_err *e)
{
    static const float infinite = __builtin_inff();
    struct backend_cuda *c = cuda_of(b);
    gpu_enter(&c->model.gpu);
    if (c->staged)
        grad[0] = infinite;
    else
        gpu_copy(&c->model.gpu, grad, &infinite, sizeof infinite);
    return finish(c, e);
}

/* -- Memory ---------------------------------------------------------------------------------- */

static void cuda_free(struct backend *b)
{
    if (b == NULL)
        return;
    struct backend_cuda *c = cuda_of(b);
    if (c->model.gpu.context != NULL) {
        gpu_enter(&c->model.gpu);
        for (int i = 0; i < STAGE_SLOTS; i++)
            gpu_free(&c->model.gpu, c->stage[i]);
        gpu_host_free(&c->model.gpu, c->pinned);
        gpu_model_deinit(&c->model);
    }
    free(c);
}

static int cuda_pin(struct backend_cuda *c, struct shd_err *e)
{
    const uint64_t rows = c->model.rows, segments = gpu_model_segments_max(rows);
    const uint64_t bytes = rows * (sizeof(double) + sizeof(uint32_t) + 2) +
                           segments * sizeof(struct gpu_segment) + (GPU_VOCAB + 1) * 4;
    c->pinned = gpu_host_alloc(&c->model.gpu, bytes, e);
    if (c->pinned == NULL)
        return SHD_ENOMEM;
    c->losses = c->pinned; /* those of the largest elements first */
    c->batch.segments = (struct gpu_segment *)(c->losses + rows);
    c->batch.sorted = (uint32_t *)(c->batch.segments + segments);
    c->batch.first = c->batch.sorted + rows;
    c->batch.tokens = (uint8_t *)(c->batch.first + GPU_VOCAB + 1);
    c->batch.targets = c->batch.tokens + rows;
    return SHD_OK;
}

static int cuda_stage(struct backend_cuda *c, struct shd_err *e)
{
    const uint64_t elems_max = backend_elems_max(&c->model.layout);
    for (int i = 0; c->staged && i < STAGE_SLOTS; i++) {
        c->stage[i] = gpu_alloc(&c->model.gpu, elems_max * sizeof(float), "a unit", e);
        if (c->stage[i] == NULL)
            return SHD_ENOMEM;
    }
    return SHD_OK;
}

static const struct backend_ops cuda_ops = {
    .set_batch = cuda_set_batch,
    .forward = cuda_forward,
    .backward = cuda_backward,
    .next = cuda_next,
    .read = cuda_read,
    .spoil = cuda_spoil,
    .free = cuda_free,
};

int backend_cuda_new(const struct backend_config *config, struct backend **ret_backend,
                     struct shd_err *e)
{
    struct backend_cuda *c = calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the model");
    *c = (struct backend_cuda){ .base = { .ops = &cuda_ops, .loss_scale = 1 },
                                .staged = config->staged,
                                .batch_read = true };
    int r = gpu_model_init(&c->model, config, e);
    if (r == SHD_OK)
        r = cuda_pin(c, e);
    if (r == SHD_OK)
        r = cuda_stage(c, e);
    if (r != SHD_OK) {
        cuda_free(&c->base);
        return r;
    }
    c->base.losses = c->losses;
    c->base.stream = c->model.gpu.stream;
    memcpy(c->base.activation_bytes, c->model.bytes, sizeof c->model.bytes);
    snprintf(c->base.describe, sizeof c->base.describe, "%s, %s products%s", c->model.gpu.describe,
             config->publish == SHD_BF16  ? "bf16"
             : config->publish == SHD_F16 ? "fp16"
             : config->tf32               ? "tf32"
                                          : "fp32",
             config->staged ? "; parameters and gradients by way of the host" : "");
    *ret_backend = &c->base;
    return SHD_OK;
}
