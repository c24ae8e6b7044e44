/* compute.c: see compute.h. */
#include "examples/gpt/compute.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "examples/gpt/merge.h"
#include "examples/gpt/progress.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"

/* --device cuda:N without a session of that device ("local:"): the owners' arrays are the host's.
 */
static struct backend_config compute_config(const struct compute *c)
{
    const struct options *o = c->options;
    return (struct backend_config){ .shape = &c->shape,
                                    .layout = &c->layout,
                                    .batch = (uint32_t)o->batch,
                                    .recompute = o->layer.recompute,
                                    .publish = o->chosen.publish,
                                    .gemm = c->gemm,
                                    .pool = c->pool,
                                    .device = o->chosen.device,
                                    .tf32 = o->chosen.tf32,
                                    .staged = o->standalone || o->evaluate };
}

/* Where owners' arrays are a GPU's they are used in the order of its stream, without waits. */
static int compute_order(struct compute *c, const struct backend_config *config, struct shd_err *e)
{
    if (c->backend->stream == NULL || config->staged)
        return SHD_OK;
    const int r = shd_set_stream(c->model, c->backend->stream, e);
    c->backend->ordered = r == SHD_OK;
    return r;
}

int compute_init(struct compute *c, struct shd_err *e)
{
    const struct options *o = c->options;
    const uint32_t units = gpt_units(&c->shape);
    const struct backend_config config = compute_config(c);
    const int r = c->backend_new(&config, &c->backend, e);
    if (r == SHD_ENOMEM && !o->layer.recompute && o->layer.tiles <= 1)
        return err_set(e, r, "%s; or add --recompute: activations of one layer at a time", e->text);
    if (r != SHD_OK)
        return r;
    c->windows = malloc(o->batch * (o->seq + 1));
    c->forward_ns = calloc(units, sizeof *c->forward_ns);
    c->backward_ns = calloc(units, sizeof *c->backward_ns);
    if (c->windows == NULL || c->forward_ns == NULL || c->backward_ns == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a batch of %ju", (uintmax_t)o->batch);
    return compute_order(c, &config, e);
}

int compute_reopen(struct compute *c, shd_model *model, struct shd_err *e)
{
    const struct backend_config config = compute_config(c);
    c->model = model;
    return compute_order(c, &config, e);
}

void compute_deinit(struct compute *c)
{
    if (c->backend != NULL)
        c->backend->ops->free(c->backend);
    free(c->windows);
    free(c->forward_ns);
    free(c->backward_ns);
}

void compute_begin(struct compute *c, double loss_scale)
{
    const size_t bytes = gpt_units(&c->shape) * sizeof(uint64_t);
    memset(c->forward_ns, 0, bytes);
    memset(c->backward_ns, 0, bytes);
    c->backend->loss_scale = loss_scale;
    c->begun = false;
}

/* The unit's arrays and those of the one it uses. */
static struct backend_arrays compute_arrays(const struct compute *c, uint32_t unit,
                                            const void *params)
{
    const uint32_t used = gpt_unit_uses(&c->shape, unit);
    return (struct backend_arrays){
        .params = params,
        .used = used != GPT_UNIT_NONE ? shd_params(c->model, used) : NULL,
    };
}

/* A frozen block is computed by the unit of its adapters. */
static bool compute_is_idle(const struct compute *c, uint32_t unit)
{
    return c->shape.rank > 0 && gpt_unit_at(&c->shape, unit).kind == GPT_BLOCK;
}

/* The test aid --slow. */
static void compute_drag(const struct compute *c, uint64_t begin_ns)
{
    const struct options *o = c->options;
    if (o->slow.times <= 1 || (o->slow.rank != UINT64_MAX && o->slow.rank != o->rank))
        return;
    const double ns = (double)(clock_now_ns() - begin_ns) * (o->slow.times - 1);
    const struct timespec pause = { .tv_sec = (time_t)(ns / 1e9), .tv_nsec = (long)fmod(ns, 1e9) };
    nanosleep(&pause, NULL);
}

static int compute_batch(struct compute *c, uint32_t micro)
{
    const struct options *o = c->options;
    const uint64_t step = merge_trained(o, shd_step(c->model));
    const uint32_t first = o->local.index * (uint32_t)o->micro_batches; /* of this group */
    const struct data_key key = { o->seed, step, first + micro };
    data_batch(c->data, key, (uint32_t)c->options->batch, c->windows);
    return c->backend->ops->set_batch(c->backend, c->windows, &c->err);
}

static int compute_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct compute *c = ctx;
    if (!c->begun && c->before != NULL && c->before(c->before_ctx, &c->err) != SHD_OK)
        return -1;
    c->begun = true;
    const uint64_t begin = clock_now_ns();
    if (unit == GPT_UNIT_EMBED && compute_batch(c, micro) != SHD_OK)
        return -1;
    if (!compute_is_idle(c, unit)) {
        const struct backend_arrays a = compute_arrays(c, unit, params);
        if (c->backend->ops->forward(c->backend, unit, &a, &c->err) != SHD_OK)
            return -1;
    }
    compute_drag(c, begin);
    c->forward_ns[unit] += clock_now_ns() - begin;
    return 0;
}

/* The test aid --inject-overflow: once in that step, in the first gradient of micro-batch 0, which
 * some worker computes. */
static int compute_inject(struct compute *c, uint32_t micro, float *grad)
{
    const uint64_t step = shd_step(c->model) + 1;
    if (step != c->options->inject_overflow || c->injected_step == step || micro != 0)
        return SHD_OK;
    c->injected_step = step;
    return c->backend->ops->spoil(c->backend, grad, &c->err);
}

/* The test aid --flip-bit: one bit of the last unit's gradient, which also bf16 keeps. */
static void compute_flip(const struct compute *c, uint32_t unit, float *grad)
{
    const struct options *o = c->options;
    if (o->flip.bit == 0 || o->flip.rank != o->rank || shd_step(c->model) + 1 < o->flip.bit ||
        unit + 1 != gpt_units(&c->shape))
        return;
    uint32_t bits;
    memcpy(&bits, grad, sizeof bits);
    bits ^= UINT32_C(1) << 22;
    memcpy(grad, &bits, sizeof bits);
}

static int compute_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params,
                            float *grad)
{
    struct compute *c = ctx;
    const uint64_t begin = clock_now_ns();
    const uint32_t uses = gpt_unit_uses(&c->shape, unit);
    if (compute_is_idle(c, unit))
        return 0;
    struct backend_arrays a = compute_arrays(c, unit, params);
    a.grad = grad;
    if (uses != GPT_UNIT_NONE && !gpt_kind_frozen(&c->shape, gpt_unit_at(&c->shape, uses).kind) &&
        shd_grad(c->model, micro, uses, &a.used_grad, &c->err) != SHD_OK)
        return -1;
    const uint64_t work = clock_now_ns(); /* what was waited for is not to take X times as long */
    if (c->backend->ops->backward(c->backend, unit, &a, &c->err) != SHD_OK)
        return -1;
    if (grad != NULL && compute_inject(c, micro, grad) != SHD_OK)
        return -1;
    if (grad != NULL)
        compute_flip(c, unit, grad);
    compute_drag(c, work);
    c->backward_ns[unit] += clock_now_ns() - begin;
    return 0;
}

static uint32_t compute_metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    (void)micro;
    const struct compute *c = ctx;
    const bool together = !c->options->elastic; /* else who was asked to leave leaves alone */
    ret_metrics[METRIC_LOSS] = backend_loss(c->backend, c->options->batch * c->options->seq);
    ret_metrics[METRIC_SIGINT] = together && *c->signal == SIGINT;
    ret_metrics[METRIC_SIGTERM] = together && *c->signal == SIGTERM;
    if (!together && *c->signal != 0)
        shd_leave(c->model);
    return METRICS;
}

static uint32_t compute_next(void *ctx, uint32_t micro, uint32_t unit)
{
    (void)micro;
    const struct compute *c = ctx;
    return c->backend->ops->next(c->backend, unit);
}

struct shd_compute compute_callbacks(struct compute *c)
{
    return (struct shd_compute){ .size = sizeof(struct shd_compute),
                                 .ctx = c,
                                 .forward = compute_forward,
                                 .backward = compute_backward,
                                 .metrics = compute_metrics,
                                 .next = c->shape.experts > 0 ? compute_next : NULL };
}
