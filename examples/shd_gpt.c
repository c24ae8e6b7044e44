/* shd_gpt.c: shd-gpt, from attaching to the digest. Exit codes: 0 done, 1 failed, 2 wrong usage,
 * 128
 * + signal ended by a signal.
 *
 * Happy path: read the text, attach, open the model; per step run this worker's micro-batches
 * through shd_run_step(); rank 0 prints, evaluates and, at the end, samples and digests. What it
 * prints of steps that others finished without it, because it is slow, the owners' history tells.
 *
 * Ending early: a worker that just left would keep the others waiting for its micro-batches. So
 * each micro-batch reports, beside its loss, whether its worker was asked to stop; the sums
 * come back to all workers with the commit, and all stop after the same step. With --elastic the
 * others do not wait for anybody in particular: a worker returns what it has in hand and leaves.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/run/policy.h"
#include "examples/gpt/backend_host.h"
#include "examples/gpt/batch.h"
#include "examples/gpt/compute.h"
#include "examples/gpt/cuda/backend_cuda.h"
#include "examples/gpt/data.h"
#include "examples/gpt/evaluate.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/introduce.h"
#include "examples/gpt/merge.h"
#include "examples/gpt/options.h"
#include "examples/gpt/plan_file.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/progress.h"
#include "examples/gpt/schedule.h"
#include "examples/gpt/shape.h"
#include "examples/gpt/tune.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"

struct train {
    const struct options *options; /* borrowed */
    struct compute compute;        /* owned, as all that follows */
    struct pool *pool;
    struct data *data;
    uint32_t *micros; /* [micro_batches] of this worker and the running step, ascending */
    enum gemm_kind gemm;
    shd_session *session;
    shd_model *model;
    shd_session
        *outer_session; /* NULL: nothing is merged, or another worker of the group does it */
    shd_model *outer;
    bool merging; /* a wait may be broken off by a signal */
    struct progress progress;
    struct tune tune;
    uint64_t told;     /* rank 0: steps below this one are printed */
    uint64_t begun_ns; /* this process, since 1970: steps of before are not its run's */
    int signal;        /* the one that ends the run, of any worker, after a whole step; 0: none */
    bool left;         /* elastic: this worker alone was asked to stop; the others go on */
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

/* -- Steps ----------------------------------------------------------------------------------- */

static struct shd_stats train_stats(const struct train *t)
{
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(t->session, &stats, NULL);
    return stats;
}

/* The open one, counted without merges. */
static uint64_t train_at(const struct train *t)
{
    return merge_trained(t->options, shd_step(t->model));
}

static bool train_eval_is_due(const struct train *t, uint64_t step)
{
    const uint64_t every = t->options->eval.every;
    return t->options->rank == 0 && every > 0 && step > 0 && step % every == 0;
}

/* Of the open step, which has as many micro-batches as its owners say (shardctl set). */
static struct schedule_share train_share(const struct train *t)
{
    const struct options *o = t->options;
    return (struct schedule_share){ .micro_batches = shd_micro_batches(t->model),
                                    .accumulate = o->chosen.accumulate,
                                    .together = o->chosen.host_workers,
                                    .rank = o->rank,
                                    .world = o->world,
                                    .stop_rank = o->stop.rank,
                                    .stop_at = o->stop.at };
}

static double train_loss_scale(const struct train *t)
{
    const struct options_chosen *chosen = &t->options->chosen;
    return chosen->loss_scale > 0 ? chosen->loss_scale : shd_loss_scale(t->model);
}

static struct shd_update train_update(const struct options *o, uint64_t step)
{
    const struct schedule schedule = {
        .lr = o->lr, .lr_min = o->min_lr, .warmup = o->warmup, .steps = o->steps
    };
    return (struct shd_update){ .size = sizeof(struct shd_update),
                                .lr = schedule_lr(&schedule, step),
                                .clip_norm = o->clip,
                                .loss_scale = o->chosen.loss_scale,
                                .dynamic_loss_scale = !(o->chosen.loss_scale > 0) };
}

/* The time on the clock that progress.c counts with at which a row was written. */
static uint64_t train_row_ns(const struct shd_step_row *row)
{
    const uint64_t now_ns = clock_now_ns(), real_ns = clock_read_ns(CLOCK_REALTIME);
    const uint64_t ago_ns = real_ns > row->time_ns ? real_ns - row->time_ns : 0;
    return now_ns > ago_ns ? now_ns - ago_ns : 0;
}

/* Micro-batches that a step's numbers are sums over; 0: its owners do not know. */
static double train_counted(const struct train *t, uint32_t reported)
{
    return reported > 0 ? reported : (double)t->options->micro_batches;
}

static void train_tell_row(struct train *t, const struct shd_step_row *row)
{
    const uint64_t end_ns = train_row_ns(row), last_ns = t->progress.last_ns;
    struct progress_step p = { .by_others = true,
                               .step = merge_trained(t->options, row->step + 1),
                               .norm = row->grad_norm,
                               .lr = row->lr,
                               .loss_scale = row->loss_scale,
                               .skipped = row->skipped,
                               .begin_ns = last_ns < end_ns ? last_ns : end_ns,
                               .end_ns = end_ns };
    p.loss = row->metric_count > METRIC_LOSS
                 ? row->metrics[METRIC_LOSS] / train_counted(t, row->reported)
                 : NAN;
    progress_step(&t->progress, &p);
}

#define TRAIN_SLOTS_MAX 64u /* shd_options.slots */
#define ROWS_AT_ONCE    64u

/* Rank 0 prints the steps below `end` that others finished without it. */
static int train_tell(struct train *t, uint64_t end, struct shd_err *e)
{
    static struct shd_step_row rows[ROWS_AT_ONCE] = { { .size = sizeof *rows } };
    while (t->options->rank == 0 && t->told < end) {
        uint64_t next = t->told;
        uint32_t count;
        const int r = shd_history(t->model, &next, rows, ROWS_AT_ONCE, &count, e);
        if (r != SHD_OK)
            return r;
        for (uint32_t i = 0; i < count && rows[i].step < end; i++)
            if (rows[i].time_ns >= t->begun_ns && !merge_is_due(t->options, rows[i].step))
                train_tell_row(t, &rows[i]);
        t->told = count > 0 && next < end ? next : end;
    }
    return SHD_OK;
}

/* Rank 0 prints. */
static void train_step_done(struct train *t, struct progress_step *p,
                            const struct shd_result *result)
{
    p->end_ns = clock_now_ns();
    p->end = train_stats(t);
    p->step = merge_trained(t->options, result->step + 1);
    p->loss = result->metrics[METRIC_LOSS] / train_counted(t, result->reported);
    p->norm = result->grad_norm;
    p->skipped = result->skipped;
    p->forward_ns = t->compute.forward_ns;
    p->backward_ns = t->compute.backward_ns;
    p->units = gpt_units(&t->compute.shape);
    if (t->options->rank == 0)
        progress_step(&t->progress, p);
    t->told = result->step + 1;
    if (result->metrics[METRIC_SIGINT] > 0)
        t->signal = SIGINT;
    else if (result->metrics[METRIC_SIGTERM] > 0)
        t->signal = SIGTERM;
}

/* In elastic mode the step cannot close only while this worker has a micro-batch of it in hand, so
 * it evaluates at the beginning of its first one; without one it does not. */
static int train_evaluate_elastic(void *ctx, struct shd_err *e)
{
    struct train *t = ctx;
    if (!train_eval_is_due(t, train_at(t)))
        return SHD_OK;
    struct shd_err why = { 0 };
    const int r = evaluate_loss(&t->compute, &t->progress, &why);
    if (r == SHD_OK || r == SHD_ESTEP || r == SHD_EBUSY)
        return SHD_OK; /* or overtaken, or no room for it now */
    *e = why;
    return r;
}

static int train_step(struct train *t, struct shd_err *e)
{
    const struct options *o = t->options;
    const uint64_t step = train_at(t);
    const struct schedule_share share = train_share(t);
    const struct shd_update update = train_update(o, step);
    const struct shd_compute compute = compute_callbacks(&t->compute);
    struct shd_result result = { .size = sizeof result };
    const bool evaluate = !o->elastic && train_eval_is_due(t, step);
    int r = evaluate ? evaluate_loss(&t->compute, &t->progress, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    struct progress_step p = { .begin_ns = clock_now_ns(),
                               .begin = train_stats(t),
                               .lr = update.lr,
                               .loss_scale = train_loss_scale(t) };
    compute_begin(&t->compute, p.loss_scale);
    const uint32_t count = schedule_micros(&share, step, t->micros);
    r = o->elastic ? shd_run_step_elastic(t->model, &compute, &update, &result, e)
                   : shd_run_step(t->model, t->micros, count, &compute, &update, &result, e);
    if (r != SHD_OK && t->compute.err.code != SHD_OK)
        return err_set(e, t->compute.err.code, "%s", t->compute.err.text);
    if (r != SHD_OK)
        return r;
    t->left = result.left;
    r = train_tell(t, result.left || result.over ? shd_step(t->model) : result.step, e);
    if (r != SHD_OK)
        return r;
    if (!result.left && !result.over)
        train_step_done(t, &p, &result);
    if (!o->elastic && t->signal == 0 && count == 0) /* nobody waits for this worker */
        t->signal = train_signal;
    return SHD_OK;
}

#define MISSES_NAMED 6

/* Which units ran out of the recorded order, those with most misses first. */
static void train_note_misses(struct train *t)
{
    const uint64_t misses = train_stats(t).plan_misses;
    if (misses == 0 || t->options->rank != 0)
        return;
    char names[400] = "";
    uint64_t below = UINT64_MAX; /* units with as many misses or more are named already */
    for (int named = 0; named < MISSES_NAMED;) {
        uint64_t most = 0;
        for (uint32_t u = 0; u < shd_units(t->model); u++) {
            const uint64_t n = shd_unit_misses(t->model, u);
            if (n < below && n > most)
                most = n;
        }
        if (most == 0)
            break;
        for (uint32_t u = 0; u < shd_units(t->model) && named < MISSES_NAMED; u++) {
            const size_t used = strlen(names);
            if (shd_unit_misses(t->model, u) != most)
                continue;
            snprintf(names + used, sizeof names - used, "%s%s %ju", named > 0 ? ", " : "",
                     shd_unit_name(t->model, u), (uintmax_t)most);
            named++;
        }
        below = most;
    }
    progress_note(&t->progress, "plan misses: %ju (units out of the recorded order; most: %s)",
                  (uintmax_t)misses, names);
}

static const char *train_signal_name(int number)
{
    return number == SIGINT ? "SIGINT" : "SIGTERM";
}

static bool train_goes_on(const struct train *t)
{
    const struct schedule_share share = train_share(t);
    const uint64_t step = train_at(t);
    const bool trained = step >= t->options->steps;
    if ((trained && !merge_is_due(t->options, shd_step(t->model))) || t->signal != 0 || t->left)
        return false;
    return t->options->elastic ? train_signal == 0 : schedule_takes_part(&share, step);
}

/* It would attach, compute nothing and end like the others, which looks as if it helped. */
static void train_note_idle(const struct options *o)
{
    const uint64_t busy = o->micro_batches / o->chosen.accumulate * o->chosen.host_workers;
    if (!o->elastic && o->rank >= busy)
        fprintf(stderr,
                "shd-gpt: rank %ju of %ju has nothing to compute: a step has work for %ju "
                "(--micro-batches), or share it out with --elastic\n",
                (uintmax_t)o->rank, (uintmax_t)o->world, (uintmax_t)busy);
}

/* -- The model and its policy
 * ---------------------------------------------------------------------------------
 */

/* The spec of the model the options describe, as JSON; free() it. NULL: no memory. */
static char *train_spec(const struct options *o)
{
    const struct gpt_shape shape = options_shape(o);
    const struct gpt_spec spec = { .optimizer = o->optimizer.kind,
                                   .int8 = strcmp(o->optimizer.moments, "int8") == 0,
                                   .seed = o->seed,
                                   .micro_batches = (uint32_t)o->micro_batches,
                                   .accumulate = o->chosen.accumulate,
                                   .verify_every = o->verify_every,
                                   .publish = o->chosen.publish,
                                   .codec = o->types.codec,
                                   .grad_codec = o->types.grad_codec,
                                   .grad_dtype = o->chosen.policy.grad_dtype,
                                   .weight_decay = o->weight_decay,
                                   .ema = o->ema };
    return gpt_spec_json(&shape, &spec);
}

/* --plan: operations in place of the policy, but for its path; or policies to be tried. */
static int train_set_plan(struct train *t, struct shd_err *e)
{
    const struct options *o = t->options;
    char *text;
    int r = plan_file_read(o->plan, &text, e);
    if (r != SHD_OK)
        return r;
    r = tune_read(text, &o->chosen.policy, &t->tune, e);
    if (r == SHD_OK && t->tune.count == 0)
        r = shd_set_plan(t->model, text, e);
    else if (r == SHD_OK && o->standalone)
        r = err_set(e, SHD_EINVAL,
                    "policies to be tried, with --standalone: the model is opened anew for each, "
                    "and would be gone with this process' own; use daemons");
    else if (r == SHD_OK)
        r = shd_set_policy(t->model, &t->tune.tries[0].policy, e);
    free(text);
    return r == SHD_OK ? r : err_prefix(e, "%s", o->plan);
}

static int train_is_told_to_end(void *ctx)
{
    (void)ctx;
    return train_signal != 0;
}

static int train_breaks_off(void *ctx)
{
    const struct train *t = ctx;
    return t->merging && train_signal != 0;
}

static int train_open_outer(struct train *t, struct shd_err *e)
{
    return merge_open(t->options, t->model, train_breaks_off, t, &t->outer_session, &t->outer, e);
}

/* Before each step. Other groups may be away for long: a signal ends the wait. What was begun goes
 * on when this worker is started again. */
static int train_merge(struct train *t, struct shd_err *e)
{
    const struct shd_merge_options merge = merge_options(t->options);
    bool merged = false;
    if (merge.every == 0)
        return SHD_OK;
    t->merging = true;
    const int r = shd_merge(t->model, t->outer, &merge, &merged, e);
    t->merging = false;
    if (merged && !t->options->elastic)
        t->told = shd_step(t->model);
    if (r == SHD_ECANCELED)
        t->signal = train_signal;
    return r == SHD_ECANCELED ? SHD_OK : r;
}

/* Gradients on their way. A worker on a GPU is ahead of it, and waits where they have no room: one
 * for each layer, which is the memory of gradients elsewhere. Those of ddp leave all at once. */
static uint32_t train_slots(const struct options *o)
{
    const bool ahead = o->chosen.cuda && o->chosen.policy.strategy != SHD_DDP;
    if (o->slots > 0 || !ahead || o->standalone || o->evaluate)
        return (uint32_t)o->slots;
    return o->layers < 2 ? 2 : o->layers > TRAIN_SLOTS_MAX ? TRAIN_SLOTS_MAX : (uint32_t)o->layers;
}

/* Sets *ret_refused when the schedule cannot be what the options say. */
static int train_open_model(struct train *t, bool *ret_refused, struct shd_err *e)
{
    const struct options *o = t->options;
    /* Owners inside this process are on the host, and so is what is pinned; compute.c copies. */
    const bool alone = o->standalone || o->evaluate;
    const struct shd_options session = { .size = sizeof session,
                                         .address = o->standalone ? "local:" : o->address,
                                         .name = "shd-gpt",
                                         .slots = train_slots(o),
                                         .threads = o->standalone ? (uint32_t)o->threads : 0,
                                         .device = alone ? NULL : o->device,
                                         .idle = o->evaluate ? train_is_told_to_end
                                                             : train_breaks_off,
                                         .idle_ctx = t,
                                         .reader = o->evaluate };
    char *json = train_spec(o);
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the model spec");
    const struct shd_open_options open = { .size = sizeof open, .spec_json = json };
    int r = shd_connect(&session, &t->session, e);
    if (r == SHD_OK) /* with a wait for those who train to make it */
        r = o->evaluate ? shd_model_open_with(t->session, &open, &t->model, NULL, e)
                        : shd_model_open(t->session, json, &t->model, e);
    free(json);
    if (r != SHD_OK || o->evaluate)
        return r;
    shd_bench_delay_fetches(t->model, (uint64_t)(o->fetch_delay_ms * 1e6));
    const bool tuned = t->tune.count > 0;
    r = shd_set_policy(t->model, tuned ? &t->tune.tries[t->tune.at].policy : &o->chosen.policy, e);
    if (r == SHD_OK && o->plan != NULL && !tuned)
        r = train_set_plan(t, e);
    *ret_refused = r == SHD_EINVAL || r == SHD_ERANGE || r == SHD_ENOTSUP || r == SHD_ESPEC ||
                   r == SHD_ENOENT;
    return r;
}

/* A policy is set before the first gradient: between two steps the model is opened anew, by another
 * session, as a worker that comes back would. */
static int train_retune(struct train *t, struct shd_err *e)
{
    bool refused;
    shd_close(t->session); /* and the model with it */
    t->session = NULL;
    t->model = t->compute.model = NULL;
    const int r = train_open_model(t, &refused, e);
    if (r != SHD_OK)
        return r;
    progress_mark(&t->progress, train_at(t), train_stats(t).wait_ns);
    return compute_reopen(&t->compute, t->model, e);
}

static void train_note_tuned(struct train *t)
{
    char name[TUNE_NAME_BYTES];
    for (uint32_t i = 0; i < t->tune.count; i++)
        progress_note(&t->progress, "tried %s: predicted %.4g ms, measured %.4g ms%s",
                      tune_name(&t->tune.tries[i], name), t->tune.tries[i].predicted_s * 1e3,
                      t->tune.tries[i].measured_s * 1e3,
                      i == t->tune.at ? ": going on by this one" : "");
}

static int train_tune(struct train *t, double step_s, struct shd_err *e)
{
    const bool tried = t->tune.done;
    const bool other = tune_step(&t->tune, step_s);
    if (t->tune.done && !tried && t->options->rank == 0)
        train_note_tuned(t);
    return other ? train_retune(t, e) : SHD_OK;
}

/* -- The run ----------------------------------------------------------------------------------- */

static int train_loop(struct train *t, struct shd_err *e)
{
    const struct options *o = t->options;
    const uint64_t first = shd_step(t->model);
    train_note_idle(o);
    if (!o->elastic && o->rank == 0 && first > 0)
        progress_note(&t->progress, "the model is at step %ju: going on from there",
                      (uintmax_t)train_at(t));
    t->compute.before = o->elastic ? train_evaluate_elastic : NULL;
    t->compute.before_ctx = t;
    t->told = o->elastic ? 0 : first; /* others may have begun before this worker was there */
    progress_begin(&t->progress, train_at(t), train_stats(t).wait_ns);
    while (train_goes_on(t)) {
        int r = train_merge(t, e);
        if (r != SHD_OK)
            return r;
        if (!train_goes_on(t))
            break;
        const uint64_t begin_ns = clock_now_ns();
        r = train_step(t, e);
        if (r == SHD_OK)
            r = train_tune(t, (double)(clock_now_ns() - begin_ns) * 1e-9, e);
        if (r != SHD_OK)
            return r;
    }
    const uintmax_t step = train_at(t), steps = o->steps;
    if (t->tune.count > 0 && !t->tune.done && o->rank == 0)
        progress_note(&t->progress,
                      "%u policies are tried in %u steps: there were too few, none was chosen",
                      t->tune.count, t->tune.count * TUNE_STEPS);
    t->left = o->elastic && step < steps;
    if (t->left && o->rank == 0)
        progress_note(&t->progress, "left by %s at step %ju of %ju",
                      train_signal_name((int)train_signal), step, steps);
    if (t->signal != 0 && o->rank == 0)
        progress_note(&t->progress, "stopped by %s after step %ju of %ju",
                      train_signal_name(t->signal), step, steps);
    train_note_misses(t);
    return SHD_OK;
}

/* -- Set-up ---------------------------------------------------------------------------------- */

/* The products --precision asks for; what "auto" came to is printed. */
static int train_init_gemm(struct train *t, bool *ret_refused, struct shd_err *e)
{
    const struct options_chosen *chosen = &t->options->chosen;
    t->gemm = chosen->gemm;
    int r = gemm_init(t->gemm, e);
    if (r != SHD_OK && chosen->gemm_auto) {
        t->gemm = GEMM_BF16_EMULATED;
        r = gemm_init(t->gemm, e);
    } else if (r != SHD_OK && t->gemm == GEMM_BF16_NATIVE) {
        *ret_refused = true;
        return err_set(e, SHD_ENOTSUP,
                       "--bf16-gemm native: this CPU, or this oneDNN, has no bf16 instructions "
                       "(AVX-512-BF16 or AMX); use auto or emulated");
    }
    return r;
}

static int train_init(struct train *t, bool *ret_refused, struct shd_err *e)
{
    const struct options *o = t->options;
    struct compute *c = &t->compute;
    int r = train_init_gemm(t, ret_refused, e);
    if (r == SHD_OK)
        r = data_load(o->data.items, o->data.count, (uint32_t)o->seq, &t->data, e);
    if (r == SHD_OK)
        r = pool_new((uint32_t)o->threads, &t->pool, e);
    if (r == SHD_OK)
        r = train_open_model(t, ret_refused, e);
    if (r == SHD_OK)
        r = train_open_outer(t, e);
    if (r != SHD_OK)
        return r;
    *c = (struct compute){ .options = o,
                           .shape = options_shape(o),
                           .pool = t->pool,
                           .data = t->data,
                           .model = t->model,
                           .signal = &train_signal,
                           .gemm = t->gemm,
                           .backend_new = o->chosen.cuda ? backend_cuda_new : backend_host_new };
    r = gpt_layout_load(&c->shape, t->model, &c->layout, e);
    if (r == SHD_OK)
        r = compute_init(c, e);
    if (r != SHD_OK)
        return r;
    t->micros = calloc(o->micro_batches, sizeof *t->micros);
    if (t->micros == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %ju micro-batches",
                       (uintmax_t)o->micro_batches);
    return SHD_OK;
}

static void train_deinit(struct train *t)
{
    progress_deinit(&t->progress);
    shd_close(t->outer_session); /* and the models with them */
    shd_close(t->session);
    compute_deinit(&t->compute);
    pool_free(t->pool);
    data_free(t->data);
    free(t->micros);
}

/* Print to stdout (rank 0). Errors: those of the parts, with what was being done. *ret_refused: the
 * error is about the options, what they ask for cannot be had. *ret_signal: the one that ended the
 * run early, after a whole step; 0: none. */
static int train_run(const struct options *options, bool *ret_refused, int *ret_signal,
                     struct shd_err *e)
{
    struct train t = { .options = options, .begun_ns = clock_read_ns(CLOCK_REALTIME) };
    int r = progress_init(&t.progress, stdout, options->rank == 0 ? options->json : NULL, e);
    if (r != SHD_OK)
        return r;
    t.progress.steps = options->steps;
    t.progress.log_every = options->log_every;
    t.progress.step_bytes = options->micro_batches * options->batch * options->seq;
    train_catch_signals();
    r = train_init(&t, ret_refused, e);
    if (options->evaluate) {
        if (r == SHD_OK) {
            introduce_model(&t.progress, &t.compute);
            r = evaluate_beside(&t.compute, &t.progress, e);
        }
        if (r == SHD_ECANCELED) {
            t.signal = train_signal;
            r = SHD_OK;
        }
    } else if (r == SHD_OK) {
        if (options->rank == 0)
            introduce(&t.progress, &t.compute, t.session);
        r = train_loop(&t, e);
    }
    if (r == SHD_OK && options->rank == 0 && !options->evaluate && !t.left)
        r = evaluate_finish(&t.compute, &t.progress, e);
    train_deinit(&t);
    *ret_signal = t.signal;
    return r;
}

static int train_print_spec(const struct options *options)
{
    char *spec = train_spec(options);
    const bool printed = spec != NULL && puts(spec) != EOF;
    free(spec);
    return printed ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct options options;
    struct shd_err e = { 0 };
    bool refused = false;
    int signal_number = 0;
    if (options_parse(argc, argv, &options, &e) != SHD_OK) {
        fprintf(stderr, "shd-gpt: %s\n", e.text);
        return 2;
    }
    if (options.help) {
        options_help(stdout);
        return 0;
    }
    if (options.version) {
        printf("shd-gpt %s\n", SHD_VERSION);
        return 0;
    }
    if (options.print_spec)
        return train_print_spec(&options);
    if (batch_choose(&options, &e) != SHD_OK ||
        train_run(&options, &refused, &signal_number, &e) != SHD_OK) {
        fflush(stdout);
        fprintf(stderr, "shd-gpt: rank %u: %s\n", options.rank, e.text);
        return refused ? 2 : 1;
    }
    return signal_number != 0 ? 128 + signal_number : 0;
}
