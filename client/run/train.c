/* One step as the worker sees it: acquire, grad, return, report, commit. See client/shd.h.
 *
 * What all paths have in common is here: arguments are checked, gradient slots and holds are kept,
 * waiting is counted. The moving itself is the path's. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/paths/order.h"
#include "client/paths/path.h"
#include "client/paths/rewind.h"
#include "client/run/drop.h"
#include "client/run/gaps.h"
#include "client/run/give.h"
#include "client/run/grads.h"
#include "client/run/hold.h"
#include "client/run/hostsum.h"
#include "client/run/move.h"
#include "client/run/parts.h"
#include "client/run/policy.h"
#include "client/run/reset.h"
#include "client/run/rewind.h"
#include "client/run/stream.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "client/session/replay.h"
#include "client/session/session.h"
#include "kernels/runs.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

static int check_unit(const struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    if (unit < m->spec->unit_count)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "unit %" PRIu32 " of model '%s' with %" PRIu32, unit,
                   m->spec->name, m->spec->unit_count);
}

static int check_micro(const struct shd_model *m, uint32_t micro, struct shd_err *e)
{
    if (micro < model_micro_batches(m))
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "micro-batch %" PRIu32 " of a step with %" PRIu32, micro,
                   model_micro_batches(m));
}

/* -- Parameters -------------------------------------------------------------------------------- */

int shd_acquire(shd_model *m, uint32_t unit, const void **ret_params, struct shd_err *e)
{
    int r = check_unit(m, unit, e);
    if (r == SHD_OK && m->session->left)
        r = session_check(m->session, e);
    if (r == SHD_OK && m->fault.code != SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK && m->order != NULL)
        r = stream_look(m, e);
    if (r == SHD_OK)
        r = hold_fetch(m, unit, e);
    if (r != SHD_OK)
        return move_along(m, r, e);
    r = hold_acquire(m, unit, e);
    if (r != SHD_OK) {
        hold_let_go(m, unit);
        return r == SHD_ERESET ? reset_look(m, e) : move_along(m, r, e);
    }
    if (ret_params != NULL)
        *ret_params = m->reader->params(m, unit);
    return SHD_OK;
}

const void *shd_params(const shd_model *m, uint32_t unit)
{
    if (unit >= m->spec->unit_count || m->holds[unit].acquired == 0)
        return NULL;
    return m->reader->params(m, unit);
}

void shd_release(shd_model *m, uint32_t unit)
{
    if (unit < m->spec->unit_count && !m->session->left)
        hold_release(m, unit);
}

/* -- Gradients --------------------------------------------------------------------------------- */

/* Of a model that has work verified: only what is leased is computed by a second worker. */
static int check_leased(const struct shd_model *m, uint32_t micro, struct shd_err *e)
{
    const uint32_t group = micro / m->spec->accumulate;
    if (m->map == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has verify_every %" PRIu64
                       ": at \"local:\" there is one worker, "
                       "and nobody to compare it with",
                       m->spec->name, m->spec->verify_every);
    if (model_leased(m, group))
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "model '%s' has verify_every %" PRIu64 ", and micro-batch %" PRIu32
                   " is not leased here: a fixed share is computed by nobody else; lease "
                   "micro-batches (shd_lease(), shd_run_step_elastic())",
                   m->spec->name, m->spec->verify_every, micro);
}

/* Before a gradient is asked for or handed over: arguments are right, the model is as its policy
 * wants it, and no return has failed. */
static int check_place(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = check_unit(m, unit, e);
    if (r == SHD_OK)
        r = check_micro(m, micro, e);
    if (r == SHD_OK && m->spec->units[unit].frozen)
        r = err_set(e, SHD_EINVAL, "unit %" PRIu32 " '%s' is frozen: it has no gradient", unit,
                    m->spec->units[unit].name);
    if (r == SHD_OK)
        r = policy_start(m, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = reset_look(m, e);
    if (r == SHD_OK && m->spec->verify_every > 0)
        r = check_leased(m, micro, e);
    return r == SHD_OK && m->order != NULL ? stream_look(m, e) : r;
}

int shd_grad(shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad, struct shd_err *e)
{
    float *grad;
    bool fresh;
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK)
        r = stream_before_grad(m, micro, unit, e);
    if (r == SHD_OK)
        r = give_open(m, micro, unit, &grad, &fresh, e);
    if (r != SHD_OK)
        return move_along(m, r, e);
    struct shd_err why = { 0 };
    if (fresh)
        r = gaps_zero(m, unit, grad, &why);
    if (r != SHD_OK) /* the array is handed out, and may not be used */
        return model_broken(m, &why, e);
    *ret_grad = grad;
    return SHD_OK;
}

static int return_one(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const int r = check_place(m, micro, unit, e);
    return r == SHD_OK ? stream_return(m, micro, unit, e) : r;
}

int shd_return(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    activity_begin(m, ACTIVITY_RETURN, unit, micro);
    r = return_one(m, micro, unit, e);
    activity_end(m);
    return move_along(m, r, e);
}

static int fill_parts(struct shd_model *m, uint32_t micro, uint32_t unit, const struct parts *parts,
                      struct shd_err *e)
{
    float *grad = NULL;
    if (give_began(m, micro, unit))
        return SHD_OK;
    const int r = shd_grad(m, micro, unit, &grad, e);
    if (r != SHD_OK)
        return r;
    CHECK(grad != NULL);
    m->session->bytes_copied += parts_copy(m, unit, parts, grad);
    return SHD_OK;
}

int shd_return_parts(shd_model *m, uint32_t micro, uint32_t unit, const struct shd_part *parts,
                     uint32_t count, double scale, struct shd_err *e)
{
    const struct parts all = { parts, count, scale };
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK && m->session->on_gpu)
        r = err_set(e, SHD_ENOTSUP,
                    "parts are of host memory, and this worker's arrays are on cuda:%" PRIu32
                    ": write to shd_grad() there",
                    m->session->ordinal);
    if (r == SHD_OK)
        r = parts_check(m, unit, &all, e);
    if (r != SHD_OK)
        return move_along(m, r, e);
    activity_begin(m, ACTIVITY_RETURN, unit, micro);
    r = fill_parts(m, micro, unit, &all, e);
    if (r == SHD_OK)
        r = return_one(m, micro, unit, e);
    activity_end(m);
    return move_along(m, r, e);
}

int shd_return_none(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = check_place(m, micro, unit, e);
    if (r == SHD_OK)
        r = stream_before_none(m, micro, unit, e);
    if (r == SHD_OK)
        r = give_none(m, micro, unit, e);
    return move_along(m, r, e);
}

int shd_report(shd_model *m, uint32_t micro, const double *metrics, uint32_t count,
               struct shd_err *e)
{
    return shd_report_named(m, micro, "", metrics, count, e);
}

static int check_metric_names(const char *names, struct shd_err *e)
{
    size_t bytes = 0;
    while (names[bytes] >= ' ' && names[bytes] <= '~')
        bytes++;
    if (names[bytes] == '\0' && bytes < WIRE_NAME_BYTES_MAX)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "names of metrics: must be printable ASCII, at most %u bytes together",
                   WIRE_NAME_BYTES_MAX - 1);
}

int shd_report_named(shd_model *m, uint32_t micro, const char *names, const double *metrics,
                     uint32_t count, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = check_micro(m, micro, e);
    if (r == SHD_OK)
        r = check_metric_names(names, e);
    if (r != SHD_OK)
        return r;
    if (count > SHD_METRICS_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu32 " metrics reported, at most %d", count,
                       SHD_METRICS_MAX);
    struct report *report = &m->reports[micro];
    const uint32_t group = micro / m->spec->accumulate;
    const uint32_t given = m->reports[group * m->spec->accumulate].given + order_returns(m, group);
    if (given > 0 && report->count > 0)
        return SHD_OK; /* a step run again: some owner has the first ones */
    if (given >= model_returned_units(m))
        return err_set(e, SHD_EINVAL,
                       "metrics of micro-batch %" PRIu32 ", all gradients of which are returned: "
                       "report before the last return",
                       micro);
    report->count = count;
    if (count > 0)
        memcpy(report->metrics, metrics, count * sizeof *metrics);
    snprintf(report->names, sizeof report->names, "%s", names);
    return SHD_OK;
}

/* -- Again ------------------------------------------------------------------------------------- */

int shd_reset_step(shd_model *m, struct shd_err *e)
{
    uint64_t attempt = 0;
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r != SHD_OK && (r = move_along(m, r, e)) == SHD_ERESET)
        return SHD_OK; /* it has other owners, and begins a step there */
    if (r != SHD_OK)
        return r;
    if (m->sealed)
        return err_set(e, SHD_ESTEP,
                       "step %" PRIu64 " cannot be reset: its commit has begun, and the gradients "
                       "that are in count; go on with shd_commit()",
                       m->step);
    if (reset_look(m, NULL) == SHD_ERESET)
        return SHD_OK; /* somebody was faster */
    r = m->session->control->reset(m, &attempt, e);
    if (r == SHD_ESTEP && reset_look(m, NULL) == SHD_ERESET)
        return SHD_OK; /* it went back meanwhile: there is no such step */
    r = move_along(m, r, e);
    if (r == SHD_ERESET)
        return SHD_OK; /* as above */
    if (r != SHD_OK)
        return r;
    m->in.attempt = attempt;
    drop_step(m);
    return SHD_OK;
}

/* -- Commit ------------------------------------------------------------------------------------ */

static int take_update(const struct shd_update *update, struct shd_update *ret_update,
                       struct shd_err *e)
{
    if (update == NULL)
        return err_set(e, SHD_EINVAL, "no update: shd_commit() needs a learning rate at least");
    struct shd_update u = { 0 };
    const int r = sized_take(&u, sizeof u, update, offsetof(struct shd_update, clip_norm),
                             "shd_update", e);
    if (r != SHD_OK)
        return r;
    if (u.blob_bytes > SHD_BLOB_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "blob has %zu bytes, at most %zu", u.blob_bytes,
                       SHD_BLOB_BYTES_MAX);
    if (u.blob == NULL && u.blob_bytes > 0)
        return err_set(e, SHD_EINVAL, "blob is NULL and has %zu bytes", u.blob_bytes);
    if (u.dynamic_loss_scale && u.loss_scale != 0)
        return err_set(e, SHD_EINVAL,
                       "loss_scale is %g and dynamic_loss_scale is set: leave loss_scale 0, "
                       "shd_loss_scale() tells the one in use",
                       u.loss_scale);
    if (u.divide_by > SHD_METRICS_MAX)
        return err_set(e, SHD_ERANGE,
                       "divide_by is %" PRIu32 ", must be 0 (the micro-batches) or 1 + a metric's "
                       "index, at most %d",
                       u.divide_by, SHD_METRICS_MAX);
    if (u.groups == NULL && u.group_count > 0)
        return err_set(e, SHD_EINVAL, "groups is NULL and group_count %" PRIu32, u.group_count);
    *ret_update = u;
    return SHD_OK;
}

_Static_assert(sizeof(struct shd_rates) == sizeof(struct decision_rates) &&
                   sizeof(struct shd_rates) == DECISION_RATES * sizeof(double),
               "one struct by two names: four doubles");

static int check_rates(const struct shd_model *m, const struct shd_update *u, struct shd_err *e)
{
    /* More groups than fit would not be counted right. */
    const uint32_t count = u->group_count <= DECISION_GROUPS_MAX ? u->group_count
                                                                 : DECISION_GROUPS_MAX + 1;
    return runs_check_rates(m->spec, (const double *)u->groups, count * DECISION_RATES, e);
}

static int not_returned(const struct shd_model *m, uint32_t unit, uint32_t micro, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL,
                   "gradient of unit %" PRIu32 " '%s', micro-batch %" PRIu32
                   ", was handed out and not returned",
                   unit, m->spec->units[unit].name, micro);
}

static int check_all_summed(const struct shd_model *m, struct shd_err *e)
{
    const uint32_t a = m->spec->accumulate;
    uint32_t micro, unit;
    if (m->grads->hostsum != NULL && hostsum_holds(m, &micro, &unit))
        return not_returned(m, unit, micro, e);
    for (uint32_t i = 0; i < m->grads->entry_count; i++) {
        const struct grad_entry *g = &m->grads->entries[i];
        if (!g->used)
            continue;
        if (g->open || g->taken == a)
            return not_returned(m, g->unit, g->group * a + (g->open ? g->taken : a - 1), e);
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s': micro-batches %" PRIu32 " to %" PRIu32
                       " are summed here, and only %" PRIu32 " of them came in",
                       g->unit, m->spec->units[g->unit].name, g->group * a, g->group * a + a - 1,
                       g->taken);
    }
    return SHD_OK;
}

/* Waiting for a gradient that this worker itself keeps would never end. */
static int check_all_returned(const struct shd_model *m, struct shd_err *e)
{
    if (m->grads != NULL)
        return check_all_summed(m, e);
    for (uint32_t i = 0; i < m->slot_count; i++) {
        const struct grad_slot *s = &m->slots[i];
        if (s->state == SLOT_HELD)
            return not_returned(m, s->unit, s->group, e);
    }
    return SHD_OK;
}

static struct decide_args decide_args(const struct shd_model *m, const struct shd_update *update)
{
    struct decide_args args = {
        .micro_batches = model_micro_batches(m),
        .lr = update->lr,
        .clip_norm = update->clip_norm,
        .loss_scale = update->loss_scale,
        .divide_by = update->divide_by,
        .groups = (const struct decision_rates *)update->groups,
        .group_count = update->group_count,
        .puts = m->decided ? m->decision.puts : 0,
    };
    if (update->dynamic_loss_scale)
        args.loss_scale = loss_scale_next(m->decided ? &m->decision : NULL, &args.good_steps);
    return args;
}

static void say_overtaken(const struct shd_model *m)
{
    char text[80];
    if (m->session->hub == NULL)
        return;
    snprintf(text, sizeof text, "overtaken: others have committed step %" PRIu64, m->step);
    event_say(&m->session->hub->events,
              &(struct shd_event){
                  .kind = SHD_EVENT_OVERTAKEN, .daemon = "", .text = text, .step = m->step });
}

/* Where the step was reset and nothing of this worker's was in, the commit waits on. */
static int commit_or_look(struct shd_model *m, const struct decide_args *args,
                          const struct wire_bytes *blob, struct decided *ret_decided,
                          struct shd_err *e)
{
    for (;;) {
        const int looked = reset_look(m, e);
        if (looked != SHD_OK)
            return looked;
        const uint64_t attempt = m->in.attempt;
        const int r = m->session->control->commit(m, args, blob, ret_decided, e);
        if (r != SHD_ERESET || m->session->control->attempt(m) == attempt)
            return r;
    }
}

/* The guard's and the cause's numbers stay what they are. */
static void went_back(const struct shd_model *m, struct shd_result *result)
{
    const struct shd_result back = rewind_result(m);
    result->step = back.step;
    result->guard_step = back.guard_step;
    result->rewound = true;
    result->skipped = result->stopped = false;
}

/* Nothing is committed: a rule goes back, and nobody has carried that out yet. */
static int go_back(struct shd_model *m, struct shd_result *ret_result, struct shd_err *e)
{
    struct shd_err why = { 0 };
    const int r = rewind_by_guard(m, &why);
    if (r != SHD_OK)
        return err_set(
            e, r == SHD_EGONE || r == SHD_ECANCELED ? r : SHD_ESTOPPED,
            "a guard stopped training at step %" PRIu64
            ", which was to go back, and cannot: %s; shardctl set %s guard=go-on goes on",
            m->step - 1, why.text, m->spec->name);
    const struct shd_result back = rewind_result(m);
    sized_give(ret_result, &back);
    return SHD_OK;
}

/* The commit has come to r. Where the model has gone back, or away, and this worker with it: what
 * it says then. */
static int commit_failed(struct shd_model *m, int r, uint64_t rewound,
                         struct shd_result *ret_result, struct shd_err *e)
{
    r = move_along(m, r, e);
    if (r != SHD_ERESET || rewind_known(m) == rewound)
        return r;
    const struct shd_result back = rewind_result(m);
    sized_give(ret_result, &back);
    return SHD_OK;
}

int shd_commit(shd_model *m, const struct shd_update *update, struct shd_result *ret_result,
               struct shd_err *e)
{
    struct shd_update u = { 0 };
    const uint64_t rewound = rewind_known(m);
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = sized_check(ret_result, sizeof *ret_result, "shd_result", e);
    if (r == SHD_OK)
        r = take_update(update, &u, e);
    if (r == SHD_OK)
        r = check_rates(m, &u, e);
    if (r == SHD_OK)
        r = stream_done(m, e);
    if (r == SHD_OK)
        r = check_all_returned(m, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK && m->session->hub != NULL)
        r = replay_goes_on(m->step, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r != SHD_OK)
        return commit_failed(m, r, rewound, ret_result, e);
    struct decided decided;
    const struct decide_args args = decide_args(m, &u);
    const struct wire_bytes blob = { u.blob, u.blob_bytes };
    const uint64_t start_ns = clock_now_ns();
    r = commit_or_look(m, &args, u.blob != NULL ? &blob : NULL, &decided, e);
    m->session->wait_ns += clock_now_ns() - start_ns;
    if (r == SHD_ESTOPPED && rewind_due(m))
        return go_back(m, ret_result, e);
    if (r != SHD_OK)
        return commit_failed(m, r, rewound, ret_result, e);
    struct shd_result result = { .step = m->step,
                                 .grad_norm = decided.grad_norm,
                                 .skipped = decided.decision.skip,
                                 .reported = decided.reported * m->spec->accumulate,
                                 .over = decided.over,
                                 .guard = decided.decision.guard.what,
                                 .stopped = decided.decision.guard.stop,
                                 .guard_value = decided.decision.guard.value,
                                 .guard_bound = decided.decision.guard.bound,
                                 .cause_unit = decided.decision.cause.unit,
                                 .cause_norm = decided.decision.cause.norm,
                                 .cause_share = (double)decided.decision.cause.share };
    if (decided.decision.cause.group > 0)
        result.cause_micro = (decided.decision.cause.group - 1) * m->spec->accumulate + 1;
    memcpy(result.metrics, decided.metrics, decided.metric_count * sizeof *decided.metrics);
    if (decided.over) {
        say_overtaken(m);
        r = m->session->control->catch_up(m, e);
        if (r != SHD_OK)
            return commit_failed(m, r, rewound, ret_result, e);
    } else {
        model_decided(m, &decided.decision);
        m->step++;
    }
    model_step_over(m);
    if (rewind_due(m) && decided.decision.guard.rewind && rewind_by_guard(m, NULL) == SHD_OK)
        went_back(m, &result);
    sized_give(ret_result, &result);
    return SHD_OK;
}
