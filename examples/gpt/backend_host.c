/* backend_host.c: see backend_host.h. */
#include "examples/gpt/backend_host.h"

#include <math.h>
#include <stdlib.h>

#include "examples/gpt/model.h"
#include "examples/gpt/widen.h"
#include "proto/base/status.h"

struct backend_host {
    struct backend base;
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct gpt *gpt; /* owned */
    struct widen widen;
};

static struct backend_host *host_of(struct backend *b)
{
    return (struct backend_host *)b;
}

static int host_set_batch(struct backend *b, const uint8_t *windows, struct shd_err *e)
{
    (void)e;
    gpt_set_batch(host_of(b)->gpt, windows);
    return SHD_OK;
}

/* The unit's array and that of the one it uses in fp32. */
static const float *host_params(struct backend_host *h, uint32_t unit, const void *params)
{
    return widen(&h->widen, WIDEN_UNIT, params, gpt_unit_elems(&h->shape, &h->layout, unit));
}

static const float *host_used(struct backend_host *h, uint32_t unit, const void *used)
{
    const uint32_t uses = gpt_unit_uses(&h->shape, unit);
    if (uses == GPT_UNIT_NONE)
        return NULL;
    return widen(&h->widen, WIDEN_USED, used, gpt_unit_elems(&h->shape, &h->layout, uses));
}

static int host_forward(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                        struct shd_err *e)
{
    struct backend_host *h = host_of(b);
    (void)e;
    const float *used = host_used(h, unit, a->used);
    gpt_forward(h->gpt, unit, host_params(h, unit, a->params), used);
    return SHD_OK;
}

static int host_backward(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                         struct shd_err *e)
{
    struct backend_host *h = host_of(b);
    (void)e;
    const float *used = host_used(h, unit, a->used);
    gpt_backward(h->gpt, unit, host_params(h, unit, a->params), a->grad, used, a->used_grad);
    return SHD_OK;
}

static const double *host_losses(struct backend *b)
{
    return gpt_row_losses(host_of(b)->gpt);
}

static uint32_t host_next(const struct backend *b, uint32_t unit)
{
    return gpt_next(((const struct backend_host *)b)->gpt, unit);
}

static void host_set_loss_scale(struct backend *b, double scale)
{
    gpt_set_loss_scale(host_of(b)->gpt, scale);
}

static int host_read(struct backend *b, const void *params, uint64_t elems, float *out,
                     struct shd_err *e)
{
    (void)e;
    widen_into(&host_of(b)->widen, params, elems, out);
    return SHD_OK;
}

static int host_spoil(struct backend *b, float *grad, struct shd_err *e)
{
    (void)b;
    (void)e;
    grad[0] = INFINITY;
    return SHD_OK;
}

static const char *host_describe(const struct backend *b)
{
    (void)b;
    return NULL;
}

static uint64_t host_activation_bytes(const struct backend *b, bool recompute)
{
    return gpt_activation_bytes(((const struct backend_host *)b)->gpt, recompute);
}

static void host_free(struct backend *b)
{
    if (b == NULL)
        return;
    gpt_free(host_of(b)->gpt);
    widen_deinit(&host_of(b)->widen);
    free(b);
}

static const struct backend_ops host_ops = {
    .set_batch = host_set_batch,
    .forward = host_forward,
    .backward = host_backward,
    .losses = host_losses,
    .next = host_next,
    .set_loss_scale = host_set_loss_scale,
    .read = host_read,
    .spoil = host_spoil,
    .describe = host_describe,
    .activation_bytes = host_activation_bytes,
    .free = host_free,
};

int backend_host_new(const struct backend_config *config, struct backend **ret_backend,
                     struct shd_err *e)
{
    uint64_t elems_max = 0;
    for (int kind = 0; kind < GPT_UNIT_KINDS; kind++)
        if (config->layout->elems[kind] > elems_max)
            elems_max = config->layout->elems[kind];
    struct backend_host *h = calloc(1, sizeof *h);
    if (h == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the model");
    h->base.ops = &host_ops;
    h->shape = *config->shape;
    h->layout = *config->layout;
    int r = gpt_new(config->shape, config->layout, config->batch, config->recompute, config->pool,
                    &h->gpt, e);
    if (r == SHD_OK)
        r = widen_init(&h->widen, config->publish, elems_max, config->pool, e);
    if (r != SHD_OK) {
        host_free(&h->base);
        return r;
    }
    gpt_set_gemm(h->gpt, config->gemm);
    *ret_backend = &h->base;
    return SHD_OK;
}
