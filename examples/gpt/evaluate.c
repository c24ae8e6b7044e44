/* evaluate.c: see evaluate.h. */
#include "examples/gpt/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "examples/gpt/merge.h"
#include "examples/gpt/sample.h"
#include "proto/base/status.h"

#define LOOK_MS 1000u /* whether the step that is waited for can still come */

/* Forward of one unit, taking it as training does, together with the one it uses. */
static int eval_unit(struct compute *c, uint32_t unit, struct shd_err *e)
{
    const uint32_t uses = gpt_unit_uses(&c->shape, unit);
    const void *params, *used = NULL;
    if (c->options->evaluate) {
        if (uses != GPT_UNIT_NONE)
            used = shd_pinned(c->model, uses);
        const struct backend_arrays a = { .params = shd_pinned(c->model, unit), .used = used };
        return c->backend->ops->forward(c->backend, unit, &a, e);
    }
    int r = shd_acquire(c->model, unit, &params, e);
    if (r != SHD_OK)
        return r;
    if (uses != GPT_UNIT_NONE)
        r = shd_acquire(c->model, uses, &used, e);
    if (r == SHD_OK) {
        const struct backend_arrays a = { .params = params, .used = used };
        r = c->backend->ops->forward(c->backend, unit, &a, e);
        if (uses != GPT_UNIT_NONE)
            shd_release(c->model, uses);
    }
    shd_release(c->model, unit);
    return r;
}

static int eval_batch(struct compute *c, struct shd_err *e)
{
    struct backend *b = c->backend;
    int r = b->ops->set_batch(b, c->windows, e);
    for (uint32_t u = b->ops->next(b, GPT_UNIT_NONE); u != GPT_UNIT_NONE && r == SHD_OK;
         u = b->ops->next(b, u))
        r = eval_unit(c, u, e);
    return r;
}

static int loss_at(struct compute *c, uint64_t step, struct progress *p, struct shd_err *e)
{
    const uint64_t batch = c->options->batch, available = data_held_out_windows(c->data);
    const uint64_t most = c->options->eval.windows, wanted = available < most ? available : most;
    double sum = 0;
    if (wanted == 0)
        return SHD_OK;
    for (uint64_t first = 0; first < wanted; first += batch) {
        data_held_out(c->data, first, (uint32_t)batch, c->windows);
        const int r = eval_batch(c, e);
        if (r != SHD_OK)
            return r;
        const uint64_t rows = wanted - first < batch ? wanted - first : batch;
        for (uint64_t i = 0; i < rows * c->shape.seq; i++)
            sum += c->backend->losses[i];
    }
    const double loss = sum / (double)(wanted * c->shape.seq);
    progress_note(p, "eval step %ju held-out loss %.4f (%.3f bits per byte, %ju windows)",
                  (uintmax_t)step, loss, loss / log(2), (uintmax_t)wanted);
    if (c->options->eval.every > 0 && step % c->options->eval.every == 0)
        progress_held_out(p, step, loss);
    return SHD_OK;
}

int evaluate_loss(struct compute *c, struct progress *p, struct shd_err *e)
{
    return loss_at(c, merge_trained(c->options, shd_step(c->model)), p, e);
}

/* The last of the steps to be evaluated may be over before it was asked for. */
static bool is_over(const struct compute *c)
{
    const uint64_t step = shd_unit_version(c->model, GPT_UNIT_EMBED);
    return step != UINT64_MAX && step >= c->options->steps;
}

/* Steps that are over before the last one is evaluated are passed over. */
int evaluate_beside(struct compute *c, struct progress *p, struct shd_err *e)
{
    const struct options *o = c->options;
    struct shd_pin_options pin = {
        .size = sizeof pin, .wait = true, .timeout_ms = LOOK_MS, .ema = o->ema > 0
    };
    uint64_t step = 0;
    int r = shd_pin(c->model, &pin, &step, e);
    if (r == SHD_OK)
        r = loss_at(c, step, p, e);
    pin.every = o->eval.every > 0 ? o->eval.every : o->steps;
    while (r == SHD_OK && o->follow && step / pin.every < o->steps / pin.every) {
        pin.step = step + 1;
        r = shd_pin(c->model, &pin, &step, e);
        if (r == SHD_OK)
            r = loss_at(c, step, p, e);
        else if (r == SHD_ETIMEDOUT && is_over(c))
            break;
        else if (r == SHD_ETIMEDOUT)
            r = SHD_OK;
    }
    shd_unpin(c->model);
    return r == SHD_ETIMEDOUT ? SHD_OK : r;
}

static int sample_with(struct compute *c, struct progress *p, const float *const *params,
                       struct shd_err *e)
{
    const uint64_t count = c->options->sample.bytes;
    const struct sample_options how = { .seed = c->options->seed,
                                        .temperature = c->options->sample.temperature,
                                        .first = '\n' };
    struct sampler *sampler;
    uint8_t *text = malloc(count);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a sample of %ju bytes", (uintmax_t)count);
    const int r = sampler_new(&c->shape, &c->layout, c->pool, params, &sampler, e);
    if (r == SHD_OK) {
        sampler_text(sampler, &how, text, count);
        progress_note(p, "--- sample of %ju bytes ---", (uintmax_t)count);
        progress_text(p, text, count);
        progress_note(p, "---");
        sampler_free(sampler);
    }
    free(text);
    return r;
}

/* Sampling reads every unit for every byte: it works on a copy of its own, so that no more units
 * are held than the policy's bound allows. */
static int sample_copy(struct compute *c, uint32_t unit, float **ret_params, struct shd_err *e)
{
    const uint64_t elems = gpt_unit_elems(&c->shape, &c->layout, unit);
    const void *published;
    float *params = malloc(elems * sizeof *params);
    if (params == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %ju parameters to sample with",
                       (uintmax_t)elems);
    int r = shd_acquire(c->model, unit, &published, e);
    if (r == SHD_OK) {
        r = c->backend->ops->read(c->backend, published, elems, params, e);
        shd_release(c->model, unit);
    }
    if (r == SHD_OK)
        *ret_params = params;
    else
        free(params);
    return r;
}

static int evaluate_sample(struct compute *c, struct progress *p, struct shd_err *e)
{
    const uint32_t units = gpt_units(&c->shape);
    float **params = calloc(units, sizeof *params);
    if (params == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %u units", units);
    int r = SHD_OK;
    for (uint32_t u = 0; u < units && r == SHD_OK; u++)
        r = sample_copy(c, u, &params[u], e);
    if (r == SHD_OK)
        r = sample_with(c, p, (const float *const *)params, e);
    for (uint32_t u = 0; u < units; u++)
        free(params[u]);
    free(params);
    return r;
}

int evaluate_finish(struct compute *c, struct progress *p, struct shd_err *e)
{
    char hex[65];
    uint64_t step;
    int r = evaluate_loss(c, p, e);
    if (r == SHD_OK && c->options->sample.bytes > 0)
        r = evaluate_sample(c, p, e);
    if (r == SHD_OK)
        r = shd_digest(c->model, hex, &step, e);
    if (r == SHD_OK)
        progress_note(p, "digest sha256:%s step=%ju", hex, (uintmax_t)step);
    return r;
}
