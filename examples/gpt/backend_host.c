/* backend_host.c: see backend_host.h.
 *
 * The model computes with fp32 parameters. A published fp32 array is handed through as it is; bf16
 * and fp16 are widened, exactly, into a buffer that lasts until its next use. So a worker that
 * reads 16-bit parameters holds one unit, and the one it uses, in fp32 besides.
 */
#include "examples/gpt/backend_host.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt/model.h"
#include "examples/gpt/vec.h"
#include "proto/base/status.h"

#define WIDEN_ELEMS 16384 /* of a task */

enum wide_slot { WIDE_UNIT, WIDE_USED, WIDE_SLOTS };

struct backend_host {
    struct backend base;
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct gpt *gpt; /* owned */
    enum shd_dtype publish;
    struct pool *pool;       /* borrowed */
    float *wide[WIDE_SLOTS]; /* owned, of the largest unit; NULL with fp32 */
};

static struct backend_host *host_of(struct backend *b)
{
    return (struct backend_host *)b;
}

/* -- Parameters in fp32 ---------------------------------------------------------------------- */

struct widen_job {
    const struct vec_ops *vec;
    enum shd_dtype dtype;
    const void *params;
    uint64_t elems;
    float *out;
};

static void widen_task(void *ctx, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct widen_job *job = ctx;
    const uint64_t at = (uint64_t)task * WIDEN_ELEMS;
    const uint64_t count = job->elems - at < WIDEN_ELEMS ? job->elems - at : WIDEN_ELEMS;
    if (job->dtype == SHD_F32)
        memcpy(job->out + at, (const float *)job->params + at, count * sizeof(float));
    else if (job->dtype == SHD_BF16)
        job->vec->widen_bf16(job->out + at, (const uint16_t *)job->params + at, count);
    else
        job->vec->widen_f16(job->out + at, (const uint16_t *)job->params + at, count);
}

static int host_read(struct backend *b, const void *params, uint64_t elems, float *out,
                     struct shd_err *e)
{
    const struct backend_host *h = host_of(b);
    struct widen_job job = {
        .vec = vec_pick(), .dtype = h->publish, .params = params, .elems = elems, .out = out
    };
    (void)e;
    pool_run(h->pool, (uint32_t)((elems + WIDEN_ELEMS - 1) / WIDEN_ELEMS), widen_task, &job);
    return SHD_OK;
}

/* A unit's array in fp32. */
static const float *host_params(struct backend_host *h, enum wide_slot slot, uint32_t unit,
                                const void *params)
{
    if (h->publish == SHD_F32 || params == NULL)
        return params;
    host_read(&h->base, params, gpt_unit_elems(&h->shape, &h->layout, unit), h->wide[slot], NULL);
    return h->wide[slot];
}

/* -- The model ------------------------------------------------------------------------------- */

static int host_set_batch(struct backend *b, const uint8_t *windows, struct shd_err *e)
{
    (void)e;
    gpt_set_loss_scale(host_of(b)->gpt, b->loss_scale);
    gpt_set_batch(host_of(b)->gpt, windows);
    return SHD_OK;
}

static int host_forward(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                        struct shd_err *e)
{
    struct backend_host *h = host_of(b);
    (void)e;
    const float *used = host_params(h, WIDE_USED, gpt_unit_uses(&h->shape, unit), a->used);
    gpt_forward(h->gpt, unit, host_params(h, WIDE_UNIT, unit, a->params), used);
    return SHD_OK;
}

static int host_backward(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                         struct shd_err *e)
{
    struct backend_host *h = host_of(b);
    (void)e;
    const float *used = host_params(h, WIDE_USED, gpt_unit_uses(&h->shape, unit), a->used);
    gpt_backward(h->gpt, unit, host_params(h, WIDE_UNIT, unit, a->params), a->grad, used,
                 a->used_grad);
    return SHD_OK;
}

static uint32_t host_next(const struct backend *b, uint32_t unit)
{
    return gpt_next(((const struct backend_host *)b)->gpt, unit);
}

static int host_spoil(struct backend *b, float *grad, struct shd_err *e)
{
    (void)b, (void)e;
    grad[0] = INFINITY;
    return SHD_OK;
}

static void host_free(struct backend *b)
{
    if (b == NULL)
        return;
    gpt_free(host_of(b)->gpt);
    for (int i = 0; i < WIDE_SLOTS; i++)
        free(host_of(b)->wide[i]);
    free(b);
}

static const struct backend_ops host_ops = {
    .set_batch = host_set_batch,
    .forward = host_forward,
    .backward = host_backward,
    .next = host_next,
    .read = host_read,
    .spoil = host_spoil,
    .free = host_free,
};

static int host_init(struct backend_host *h, const struct backend_config *config, struct shd_err *e)
{
    const uint64_t elems_max = backend_elems_max(config->layout);
    const int r = gpt_new(config->shape, config->layout, config->batch, config->recompute,
                          config->pool, &h->gpt, e);
    if (r != SHD_OK)
        return r;
    for (int i = 0; i < WIDE_SLOTS && h->publish != SHD_F32; i++) {
        h->wide[i] = malloc(elems_max * sizeof(float));
        if (h->wide[i] == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for a unit of %ju parameters in fp32",
                           (uintmax_t)elems_max);
    }
    gpt_set_gemm(h->gpt, config->gemm);
    h->base.losses = gpt_row_losses(h->gpt);
    for (int recompute = 0; recompute < 2; recompute++)
        h->base.activation_bytes[recompute] = gpt_activation_bytes(h->gpt, recompute);
    return SHD_OK;
}

int backend_host_new(const struct backend_config *config, struct backend **ret_backend,
                     struct shd_err *e)
{
    struct backend_host *h = calloc(1, sizeof *h);
    if (h == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the model");
    *h = (struct backend_host){ .base = { .ops = &host_ops, .loss_scale = 1 },
                                .shape = *config->shape,
                                .layout = *config->layout,
                                .publish = config->publish,
                                .pool = config->pool };
    const int r = host_init(h, config, e);
    if (r != SHD_OK) {
        host_free(&h->base);
        return r;
    }
    *ret_backend = &h->base;
    return SHD_OK;
}
