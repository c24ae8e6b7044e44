/* train.c: see train.h.
 *
 * Happy path: read the text, attach, open the model; per step run this worker's micro-batches
 * through shd_run_step(); rank 0 prints, evaluates and, at the end, samples and digests.
 *
 * Ending early: a worker that just left would keep the others waiting for its micro-batches. So
 * each micro-batch reports, beside its loss, whether its worker was asked to stop; the sums
 * come back to all workers with the commit, and all stop after the same step.
 */
#include "examples/gpt/train.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt/data.h"
#include "examples/gpt/fail.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/model.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/progress.h"
#include "examples/gpt/sample.h"
#include "examples/gpt/schedule.h"
#include "examples/gpt/shape.h"

#define EVAL_WINDOWS 64 /* held-out windows of one evaluation */

enum metric { METRIC_LOSS, METRIC_SIGINT, METRIC_SIGTERM, METRICS };

struct train {
    const struct options *options; /* borrowed */
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool; /* owned, as all that follows */
    struct data *data;
    struct gpt *gpt;
    uint8_t *windows; /* [batch, seq + 1] */
    uint32_t *micros; /* this worker's micro-batches, ascending */
    uint32_t micro_count;
    shd_session *session;
    shd_model *model;
    struct progress progress;
    struct shd_err compute_err; /* of a callback that stopped the run */
};

static volatile sig_atomic_t train_signal;

static void train_on_signal(int number)
{
    train_signal = number;
}

/* The first signal asks, the second one kills. */
static void train_catch_signals(void)
{
    struct sigaction action = { .sa_handler = train_on_signal, .sa_flags = (int)SA_RESETHAND };
    sigemptyset(&action.sa_mask);
    action.sa_flags |= SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* -- Compute callbacks ----------------------------------------------------------------------- */

static const void *train_embed(const struct train *t, uint32_t unit)
{
    return unit == gpt_units(&t->shape) - 1 ? shd_params(t->model, GPT_UNIT_EMBED) : NULL;
}

static int train_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct train *t = ctx;
    if (unit == GPT_UNIT_EMBED) {
        const struct data_key key = { t->options->seed, shd_step(t->model), micro };
        data_batch(t->data, key, (uint32_t)t->options->batch, t->windows);
        gpt_set_batch(t->gpt, t->windows);
    }
    gpt_forward(t->gpt, unit, params, train_embed(t, unit));
    return 0;
}

static int train_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    struct train *t = ctx;
    float *embed_grad = NULL;
    const void *embed = train_embed(t, unit);
    if (embed != NULL &&
        shd_grad(t->model, micro, GPT_UNIT_EMBED, &embed_grad, &t->compute_err) != SHD_OK)
        return -1;
    gpt_backward(t->gpt, unit, params, grad, embed, embed_grad);
    return 0;
}

static uint32_t train_metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    (void)micro;
    const struct train *t = ctx;
    ret_metrics[METRIC_LOSS] = gpt_loss(t->gpt);
    ret_metrics[METRIC_SIGINT] = train_signal == SIGINT;
    ret_metrics[METRIC_SIGTERM] = train_signal == SIGTERM;
    return METRICS;
}

/* -- Evaluation, sample, digest --------------------------------------------------------------- */

/* Forward of what gpt_set_batch() holds, taking each unit as training does. */
static int eval_batch(struct train *t, struct shd_err *e)
{
    const void *embed, *params;
    int r = shd_acquire(t->model, GPT_UNIT_EMBED, &embed, e);
    if (r != SHD_OK)
        return r;
    gpt_forward(t->gpt, GPT_UNIT_EMBED, embed, NULL);
    for (uint32_t u = 1; u < gpt_units(&t->shape) && r == SHD_OK; u++) {
        r = shd_acquire(t->model, u, &params, e);
        if (r != SHD_OK)
            break;
        gpt_forward(t->gpt, u, params, embed);
        shd_release(t->model, u);
    }
    shd_release(t->model, GPT_UNIT_EMBED);
    return r;
}

/* Held-out loss at the open step. The caller has returned none of its micro-batches of that step,
 * so the step cannot close and the parameters cannot move. */
static int train_eval(struct train *t, struct shd_err *e)
{
    const uint64_t batch = t->options->batch, available = data_held_out_windows(t->data);
    const uint64_t wanted = available < EVAL_WINDOWS ? available : EVAL_WINDOWS;
    double sum = 0;
    for (uint64_t first = 0; first < wanted; first += batch) {
        data_held_out(t->data, first, (uint32_t)batch, t->windows);
        gpt_set_batch(t->gpt, t->windows);
        const int r = eval_batch(t, e);
        if (r != SHD_OK)
            return r;
        const uint64_t rows = wanted - first < batch ? wanted - first : batch;
        for (uint64_t i = 0; i < rows * t->shape.seq; i++)
            sum += gpt_row_losses(t->gpt)[i];
    }
    const double loss = sum / (double)(wanted * t->shape.seq);
    progress_note(&t->progress,
                  "eval step %ju held-out loss %.4f (%.3f bits per byte, %ju windows)",
                  (uintmax_t)shd_step(t->model), loss, loss / log(2), (uintmax_t)wanted);
    return SHD_OK;
}

static int sample_with(struct train *t, const float *const *params, struct shd_err *e)
{
    const uint64_t count = t->options->sample;
    const struct sample_options how = { .seed = t->options->seed,
                                        .temperature = t->options->temperature,
                                        .first = '\n' };
    struct sampler *sampler;
    uint8_t *text = malloc(count);
    if (text == NULL)
        return fail(e, SHD_ENOMEM, "no memory for a sample of %ju bytes", (uintmax_t)count);
    const int r = sampler_new(&t->shape, &t->layout, t->pool, params, &sampler, e);
    if (r == SHD_OK) {
        sampler_text(sampler, &how, text, count);
        progress_note(&t->progress, "--- sample of %ju bytes ---", (uintmax_t)count);
        progress_text(&t->progress, text, count);
        progress_note(&t->progress, "---");
        sampler_free(sampler);
    }
    free(text);
    return r;
}

static int train_sample(struct train *t, struct shd_err *e)
{
    const uint32_t units = gpt_units(&t->shape);
    const float **params = calloc(units, sizeof *params);
    if (params == NULL)
        return fail(e, SHD_ENOMEM, "no memory for %u units", units);
    uint32_t held = 0;
    int r = SHD_OK;
    for (; held < units; held++) {
        const void *p;
        r = shd_acquire(t->model, held, &p, e);
        if (r != SHD_OK)
            break;
        params[held] = p;
    }
    if (r == SHD_OK)
        r = sample_with(t, params, e);
    while (held-- > 0)
        shd_release(t->model, held);
    free(params);
    return r;
}

/* Rank 0, after the last step: nobody updates the model any more. */
static int train_finish(struct train *t, struct shd_err *e)
{
    char hex[65];
    uint64_t step;
    int r = train_eval(t, e);
    if (r == SHD_OK && t->options->sample > 0)
        r = train_sample(t, e);
    if (r == SHD_OK)
        r = shd_digest(t->model, hex, &step, e);
    if (r == SHD_OK)
        progress_note(&t->progress, "digest sha256:%s step=%ju", hex, (uintmax_t)step);
    return r;
}

/* -- Steps ----------------------------------------------------------------------------------- */

static uint64_t train_wait_ns(const struct train *t)
{
    struct shd_stats stats = { 0 };
    shd_stats(t->session, &stats);
    return stats.wait_ns;
}

static bool train_eval_is_due(const struct train *t, uint64_t step)
{
    const uint64_t every = t->options->eval_every;
    return t->options->rank == 0 && every > 0 && step > 0 && step % every == 0;
}

/* One step. *ret_signal as train_run(). */
static int train_step(struct train *t, int *ret_signal, struct shd_err *e)
{
    const struct options *o = t->options;
    const struct schedule schedule = {
        .lr = o->lr, .lr_min = o->min_lr, .warmup = o->warmup, .steps = o->steps
    };
    const struct shd_compute compute = {
        .ctx = t, .forward = train_forward, .backward = train_backward, .metrics = train_metrics
    };
    const uint64_t step = shd_step(t->model);
    int r = train_eval_is_due(t, step) ? train_eval(t, e) : SHD_OK;
    if (r != SHD_OK)
        return r;

    const struct shd_update update = { .size = sizeof update,
                                       .lr = schedule_lr(&schedule, step),
                                       .clip_norm = o->clip };
    struct progress_step p = { .begin_ns = progress_now_ns(),
                               .begin_wait_ns = train_wait_ns(t),
                               .lr = update.lr };
    struct shd_result result = { .step = 0 };
    r = shd_run_step(t->model, t->micros, t->micro_count, &compute, &update, &result, e);
    if (r != SHD_OK && t->compute_err.code != SHD_OK)
        return fail(e, t->compute_err.code, "%s", t->compute_err.text);
    if (r != SHD_OK)
        return r;
    p.end_ns = progress_now_ns();
    p.end_wait_ns = train_wait_ns(t);
    p.step = result.step + 1;
    p.loss = result.metrics[METRIC_LOSS] / (double)o->micro_batches;
    p.norm = result.grad_norm;
    p.skipped = result.skipped;
    if (o->rank == 0)
        progress_step(&t->progress, &p);
    if (result.metrics[METRIC_SIGINT] > 0)
        *ret_signal = SIGINT;
    else if (result.metrics[METRIC_SIGTERM] > 0)
        *ret_signal = SIGTERM;
    else if (t->micro_count == 0) /* nobody waits for this worker */
        *ret_signal = train_signal;
    return SHD_OK;
}

static int train_loop(struct train *t, int *ret_signal, struct shd_err *e)
{
    const struct options *o = t->options;
    const uint64_t first = shd_step(t->model);
    *ret_signal = 0;
    if (o->rank == 0 && first > 0)
        progress_note(&t->progress, "the model is at step %ju: going on from there",
                      (uintmax_t)first);
    progress_begin(&t->progress, first, train_wait_ns(t));
    while (shd_step(t->model) < o->steps && *ret_signal == 0) {
        const int r = train_step(t, ret_signal, e);
        if (r != SHD_OK)
            return r;
    }
    if (*ret_signal != 0 && o->rank == 0)
        progress_note(&t->progress, "stopped by %s after step %ju of %ju",
                      *ret_signal == SIGINT ? "SIGINT" : "SIGTERM", (uintmax_t)shd_step(t->model),
                      (uintmax_t)o->steps);
    return SHD_OK;
}

/* -- Set-up ---------------------------------------------------------------------------------- */

static int train_open_model(struct train *t, struct shd_err *e)
{
    const struct options *o = t->options;
    const struct shd_options session = { .size = sizeof session,
                                         .address = o->standalone ? "local:" : o->address,
                                         .name = "shd-gpt",
                                         .threads = o->standalone ? (uint32_t)o->threads : 0 };
    const struct gpt_spec spec = { .optimizer = o->optimizer,
                                   .seed = o->seed,
                                   .micro_batches = (uint32_t)o->micro_batches,
                                   .weight_decay = o->weight_decay };
    char *json = gpt_spec_json(&t->shape, &spec);
    if (json == NULL)
        return fail(e, SHD_ENOMEM, "no memory for the model spec");
    int r = shd_connect(&session, &t->session, e);
    if (r == SHD_OK)
        r = shd_model_open(t->session, json, &t->model, e);
    if (r == SHD_OK)
        r = gpt_layout_load(&t->shape, t->model, &t->layout, e);
    free(json);
    return r;
}

static int train_init(struct train *t, struct shd_err *e)
{
    const struct options *o = t->options;
    t->shape = (struct gpt_shape){ .layers = (uint32_t)o->layers,
                                   .dim = (uint32_t)o->dim,
                                   .heads = (uint32_t)o->heads,
                                   .seq = (uint32_t)o->seq };
    int r = gemm_init(e);
    if (r == SHD_OK)
        r = data_load(o->data, o->data_count, (uint32_t)o->seq, &t->data, e);
    if (r == SHD_OK)
        r = pool_new((uint32_t)o->threads, &t->pool, e);
    if (r == SHD_OK)
        r = train_open_model(t, e);
    if (r == SHD_OK)
        r = gpt_new(&t->shape, &t->layout, (uint32_t)o->batch, t->pool, &t->gpt, e);
    if (r != SHD_OK)
        return r;
    t->windows = malloc(o->batch * (o->seq + 1));
    t->micros = calloc(o->micro_batches, sizeof *t->micros);
    if (t->windows == NULL || t->micros == NULL)
        return fail(e, SHD_ENOMEM, "no memory for a batch of %ju", (uintmax_t)o->batch);
    for (uint64_t i = o->rank; i < o->micro_batches; i += o->world)
        t->micros[t->micro_count++] = (uint32_t)i;
    return SHD_OK;
}

static void train_deinit(struct train *t)
{
    progress_deinit(&t->progress);
    shd_close(t->session); /* and the model with it */
    gpt_free(t->gpt);
    pool_free(t->pool);
    data_free(t->data);
    free(t->windows);
    free(t->micros);
}

static void train_introduce(struct train *t)
{
    const struct options *o = t->options;
    progress_note(&t->progress,
                  "shd-gpt: %.2f M parameters (%ju layers, dim %ju, %ju heads, seq %ju), %.2f MB "
                  "of text in %u files",
                  (double)gpt_parameters(&t->shape) * 1e-6, (uintmax_t)o->layers, (uintmax_t)o->dim,
                  (uintmax_t)o->heads, (uintmax_t)o->seq, (double)data_bytes(t->data) * 1e-6,
                  data_files(t->data));
    char where[48];
    if (o->standalone)
        snprintf(where, sizeof where, "in this process, without daemons");
    else
        snprintf(where, sizeof where, "in %u daemon%s", shd_owners(t->session),
                 shd_owners(t->session) == 1 ? "" : "s");
    progress_note(&t->progress,
                  "state %s; %u worker%s x %ju thread%s; a step is %ju micro-batches of %ju x %ju "
                  "bytes",
                  where, o->world, o->world == 1 ? "" : "s", (uintmax_t)o->threads,
                  o->threads == 1 ? "" : "s", (uintmax_t)o->micro_batches, (uintmax_t)o->batch,
                  (uintmax_t)o->seq);
}

int train_run(const struct options *options, int *ret_signal, struct shd_err *e)
{
    struct train t = { .options = options };
    int r = progress_init(&t.progress, stdout, options->rank == 0 ? options->json : NULL, e);
    if (r != SHD_OK)
        return r;
    t.progress.steps = options->steps;
    t.progress.log_every = options->log_every;
    t.progress.step_bytes = options->micro_batches * options->batch * options->seq;
    train_catch_signals();
    r = train_init(&t, e);
    if (r == SHD_OK) {
        if (options->rank == 0)
            train_introduce(&t);
        r = train_loop(&t, ret_signal, e);
    }
    if (r == SHD_OK && options->rank == 0)
        r = train_finish(&t, e);
    train_deinit(&t);
    return r;
}
