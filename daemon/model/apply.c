/* See apply.h.
 *
 * Happy path: the core says ACCUMULATE; the unit's work goes to the kernel queue; when it is
 * done, the loop tells the core, whose next actions (credit, next micro-batch, SEALED …) are
 * carried out in turn. Failure: a full kernel queue puts the work in the model's backlog until a
 * completion, of whichever model's work, makes room; a kernel that fails marks the model, which
 * then refuses requests.
 */
#include "daemon/model/apply.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/notify.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/model/capture.h"
#include "daemon/model/inbox.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/model_unit.h"
#include "daemon/model/put.h"
#include "daemon/net/op.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

static struct op *op_of_ref(struct model *m, step_ref ref)
{
    CHECK(ref - 1 < OP_POOL_COUNT);
    return &m->daemon->ops->items[ref - 1];
}

static void credit(struct model *m, const struct step_action *a)
{
    struct op *op = op_of_ref(m, a->ref);
    struct inbox *inbox = op->inbox;
    const struct wire_return *req = &op->req.return_grad;
    note(m->metrics, &(struct note){ .what = a->stale ? TRACE_STALE : TRACE_CREDIT,
                                     .unit = req->unit,
                                     .group = req->micro,
                                     .session = op->req.session,
                                     .step = req->step,
                                     .since_ns = op->arrived_ns });
    op->reply.type = WIRE_CREDIT;
    op->reply.credit = (struct wire_credit){ .slot = req->slot, .stale = a->stale };
    if (inbox != NULL) {
        inbox->busy &= ~(UINT64_C(1) << req->slot);
        op->inbox = NULL;
        inbox_unref(inbox);
    }
    op_finish(op, SHD_OK);
}

/* How a successor finishes the work if we are killed in it. */
static struct kern_trail trail_of(const struct model_unit *mu)
{
    const struct model *m = mu->model;
    const struct step_word done = mu->action.done;
    return (struct kern_trail){ .area = m->trail.area,
                                .base = m->state.base,
                                .chunks = m->trail.chunks,
                                .first_chunk = mu->first_chunk,
                                .op = done.op,
                                .done = done.word,
                                .done_value = done.value };
}

struct gradient {
    const void *data;
    enum shd_dtype dtype;
};

static struct gradient gradient_of(const struct model_unit *mu)
{
    struct model *m = mu->model;
    if (mu->action.ref == 0)
        return (struct gradient){ model_spilled(m, mu->unit, mu->action.micro), mu->action.dtype };
    const struct op *op = op_of_ref(m, mu->action.ref);
    const struct wire_return *req = &op->req.return_grad;
    const uint8_t *slots = op->inbox->segment.base;
    return (struct gradient){ slots + req->slot * m->map->slot_bytes, req->dtype };
}

/* What each gradient brings is kept, in a model with guard_audit. */
static bool is_audited(const struct model *m)
{
    return m->metrics->who.parts != NULL;
}

static struct kern_op accumulate_op(struct model_unit *mu)
{
    const struct gradient g = gradient_of(mu);
    return (struct kern_op){ .kind = KERN_ACCUMULATE,
                             .accumulate = {
                                 .acc = mu->acc,
                                 .grad = g.data,
                                 .grad_dtype = g.dtype,
                                 .grad_codec = mu->grad_codec,
                                 .elems = mu->model->map->slice[mu->unit].elems,
                                 .first = mu->action.first,
                                 .sum = mu->action.last || is_audited(mu->model) ? &mu->sum : NULL,
                                 .trail = trail_of(mu),
                             } };
}

static struct kern_op update_op(const struct model_unit *mu)
{
    const struct model *m = mu->model;
    const uint32_t u = mu->unit, moments = spec_unit_moments(m->spec, mu->unit);
    const bool mean = m->spec->units[u].mean, coded = m->spec->codec != CODEC_NONE;
    return (struct kern_op){ .kind = KERN_UPDATE,
                             .update = {
                                 .kind = spec_unit_optimizer(m->spec, u),
                                 .param = model_array(m, SHARDMAP_PARAM, u),
                                 .m = moments > 0 ? model_array(m, SHARDMAP_M, u) : NULL,
                                 .v = moments > 1 ? model_array(m, SHARDMAP_V, u) : NULL,
                                 .int8 = m->spec->int8 && moments > 0,
                                 .grad = mu->acc,
                                 .grad_scale = mean ? (float)mu->action.took
                                                    : step_record(m->core)->decision.scale,
                                 .publish = coded ? NULL : model_published(m, u),
                                 .publish_dtype = coded ? 0 : m->spec->publish,
                                 .elems = m->map->slice[u].elems,
                                 .runs = mu->runs,
                                 .run_count = mu->run_count,
                                 .hypers = mu->hypers,
                                 .hyper_count = m->spec->group_count,
                                 .trail = trail_of(mu),
                                 .whole = model_whole(m, u),
                                 .ema = model_ema(m, &mu->action),
                                 .change = mu->change,
                             } };
}

/* The next of the arrays that are left. */
static struct kern_op put_op(const struct model_unit *mu)
{
    const struct model *m = mu->model;
    const uint32_t array = (uint32_t)__builtin_ctz(mu->put_left);
    return kern_write_of(model_state(m, array, mu->unit), 0, m->map->slice[mu->unit].elems,
                         put_slice(m, array, mu->unit));
}

static struct kern_op op_of(struct model_unit *mu)
{
    const struct model *m = mu->model;
    const uint64_t elems = m->map->slice[mu->unit].elems;
    switch (mu->kind) {
    case MODEL_ACCUMULATE:
        return accumulate_op(mu);
    case MODEL_ZERO:
        return (struct kern_op){
            .kind = KERN_FILL, .fill = { .out = mu->acc, .elems = elems, .kind = KERN_FILL_CONST }
        };
    case MODEL_SUM:
        return (struct kern_op){ .kind = KERN_SUMSQ,
                                 .sumsq = { .x = mu->acc, .elems = elems, .sum = &mu->sum } };
    case MODEL_APPLY:
        return update_op(mu);
    case MODEL_PUT:
        return put_op(mu);
    case MODEL_PUBLISH:
        break;
    }
    return model_publish(m, m->map->base_elem[mu->unit], elems);
}

/* The kernel that is queued touches all that the unit has, or the sum of its gradients alone. */
static bool touches_all(const struct model_unit *mu)
{
    return mu->kind == MODEL_APPLY || mu->kind == MODEL_PUT || mu->kind == MODEL_PUBLISH;
}

static bool applies(const struct model_unit *mu)
{
    return mu->kind == MODEL_APPLY || mu->kind == MODEL_PUT;
}

/* Copies of what an update changes, and pages of a state on a file, come before its kernel. A sum
 * in memory needs neither. */
static int make_way(struct model_unit *mu, struct shd_err *e)
{
    struct model *m = mu->model;
    if (!applies(mu) && !m->state.file)
        return SHD_OK;
    const int r = capture_before_work(m, mu->unit, applies(mu), touches_all(mu), e);
    if (r == SHD_OK && m->state.file)
        mu->paged = touches_all(mu) ? MODEL_PAGED_ALL : MODEL_PAGED_SUM;
    return r;
}

/* over: the unit is updated. */
static void let_go_of_pages(struct model_unit *mu, bool over)
{
    if (mu->paged != MODEL_PAGED_NONE)
        capture_worked(mu->model, mu->unit, mu->paged == MODEL_PAGED_ALL, over);
    mu->paged = MODEL_PAGED_NONE;
}

/* This thread may wait for no disk. */
static int run_here(struct model_unit *mu, const struct kern_op *op, struct shd_err *e)
{
    const struct model *m = mu->model;
    int status;
    if (m->state.file || m->publish.file)
        return SHD_PENDING;
    const int here = m->kern->ops->run_here(m->kern, op, &status, e);
    if (here == SHD_OK)
        task_post_here(&mu->task, status);
    return here;
}

static int submit(struct model_unit *mu, struct shd_err *e)
{
    const struct model *m = mu->model;
    int r = make_way(mu, e);
    if (r != SHD_OK)
        return r;
    const struct kern_op op = op_of(mu);
    r = run_here(mu, &op, e);
    if (r == SHD_PENDING)
        r = m->kern->ops->submit(m->kern, &op, &mu->task.done, e);
    if (r != SHD_OK)
        let_go_of_pages(mu, /* over= */ false);
    return r;
}

static void work_failed(struct model_unit *mu, int status, const char *why)
{
    struct model *m = mu->model;
    m->last_status = status;
    m->ready = false; /* refuses requests from now on; its state is not to be trusted */
    log_error("op=kernel model=%s unit=%s status=%s why=\"%s\""
              " do=\"systemctl restart this daemon, it goes on from the last whole step\"",
              m->spec->name, m->spec->units[mu->unit].name, status_name(status), why);
    if (status == SHD_EIO)
        m->daemon->hooks->device_failed(m->daemon);
}

static void submit_or_keep(struct model_unit *mu)
{
    struct model *m = mu->model;
    struct shd_err e;
    const int r = submit(mu, &e);
    if (r == SHD_EBUSY) {
        mu->next = NULL;
        *m->backlog_last = mu;
        m->backlog_last = &mu->next;
        m->daemon->kernel_full = true;
    } else if (r != SHD_OK) {
        work_failed(mu, r, e.text);
    }
}

void apply_retry(struct model *m)
{
    struct model_unit *mu = m->backlog_first;
    m->backlog_first = NULL;
    m->backlog_last = &m->backlog_first;
    while (mu != NULL) {
        struct model_unit *next = mu->next;
        submit_or_keep(mu);
        mu = next;
    }
}

/* The predecessor's publish segment is gone, and with it what its part of the update, or the
 * updates before a skipped one, had put there; or updates publish nothing, for it is in codes. A
 * successor publishes all anew: between the update's word and these codes nothing is lost. */
static void publish_whole(struct model_unit *mu)
{
    FAIL_POINT("apply:publish:before");
    mu->publish_whole = false;
    mu->kind = MODEL_PUBLISH;
    submit_or_keep(mu);
}

static void note_work(const struct model_unit *mu)
{
    static const enum trace_what what[] = {
        [MODEL_ACCUMULATE] = TRACE_SUM, [MODEL_SUM] = TRACE_SUMSQ,     [MODEL_ZERO] = TRACE_SUMSQ,
        [MODEL_APPLY] = TRACE_APPLY,    [MODEL_PUBLISH] = TRACE_APPLY, [MODEL_PUT] = TRACE_APPLY,
    };
    const step_ref ref = mu->action.ref;
    note(mu->model->metrics,
         &(struct note){ .what = what[mu->kind],
                         .unit = mu->unit,
                         .group = mu->kind == MODEL_ACCUMULATE ? mu->action.micro : TRACE_NONE,
                         .session = ref != 0 ? op_of_ref(mu->model, ref)->req.session : 0,
                         .step = mu->action.step,
                         .since_ns = mu->submitted_ns,
                         .skip = mu->kind != MODEL_APPLY || mu->action.skip });
}

static void store_done_word(struct model_unit *mu)
{
    const struct step_word done = mu->action.done;
    FAIL_POINT("apply:done:before");
    atomic_store_explicit(done.word, done.value, memory_order_release);
    FAIL_POINT("apply:done:after");
}

/* An array is copied. True: so is the next one, now. */
static bool put_next(struct model_unit *mu)
{
    FAIL_POINT("put:copied");
    mu->put_left &= (uint8_t)(mu->put_left - 1);
    if (mu->put_left != 0) {
        submit_or_keep(mu);
        return true;
    }
    store_done_word(mu);
    return false;
}

/* A gradient is summed: that of ref, which is not credited yet, or one that was spilled. */
static void keep_part(const struct model_unit *mu)
{
    const struct step_action *a = &mu->action;
    const struct metrics_part part = {
        .round = a->round,
        .unit = mu->unit,
        .group = a->micro,
        .first = a->first,
        .session = a->ref != 0 ? op_of_ref(mu->model, a->ref)->req.session : 0,
    };
    metrics_keep_part(mu->model->metrics, &part, mu->sum.finite ? &mu->sum.sum : NULL);
}

static void work_done(struct task *task)
{
    struct model_unit *mu = (struct model_unit *)((char *)task - offsetof(struct model_unit, task));
    struct model *m = mu->model;
    struct step_actions actions;
    if (m->use.dropped)
        return; /* remains.h: nobody wants it */
    let_go_of_pages(mu, touches_all(mu));
    if (task->status != SHD_OK) {
        struct shd_err why;
        kern_explain(m->kern, task->status, &why, "its work on the device");
        work_failed(mu, task->status, why.text);
        return;
    }
    note_work(mu);
    if (mu->kind == MODEL_ACCUMULATE && is_audited(m))
        keep_part(mu);
    if (applies(mu))
        model_unit_updated(mu);
    if (mu->hypers != NULL)
        model_hypers_done(m, mu->hypers);
    mu->hypers = NULL;
    if (mu->kind == MODEL_PUT && mu->put_left != 0 && put_next(mu)) {
        apply_retry(m);
        return;
    }
    if (applies(mu) && mu->publish_whole && m->map->slice[mu->unit].elems > 0) {
        apply_retry(m);
        publish_whole(mu);
        return;
    }
    if (applies(mu) || mu->kind == MODEL_PUBLISH) {
        step_applied(m->core, mu->unit, &actions);
    } else {
        const bool summed = mu->kind == MODEL_SUM ||
                            (mu->kind == MODEL_ACCUMULATE && mu->action.last);
        step_accumulated(m->core, mu->unit, summed ? &mu->sum.sum : NULL,
                         summed ? mu->sum.finite : true, &actions);
    }
    apply_retry(m);
    apply_actions(m, &actions);
}

/* No kernel will store the word that vouches for the work. */
static void done_without_kernel(struct model_unit *mu)
{
    if (mu->kind == MODEL_ACCUMULATE || applies(mu))
        store_done_word(mu);
    task_post_here(&mu->task, SHD_OK); /* answered in turn like the rest */
}

static void start_work(struct model *m, const struct step_action *a, enum model_work_kind kind)
{
    struct model_unit *mu = &m->units[a->unit];
    if (a->kind == STEP_DO_APPLY)
        model_unit_update(mu, a);
    mu->kind = kind;
    mu->action = *a;
    mu->submitted_ns = uv_hrtime();
    mu->sum = (struct kern_sum){ .finite = true };
    const uint64_t elems = m->map->slice[a->unit].elems;
    mu->put_left = kind == MODEL_PUT && elems > 0 ? put_arrays(m, a->unit) : 0;
    if ((mu->put_left & 1) != 0)
        mu->publish_whole = true;
    if (mu->task.fn == NULL)
        task_init(&mu->task, m->daemon->tasks, work_done);
    if (elems == 0 || (kind == MODEL_APPLY && a->skip) ||
        (kind == MODEL_PUT && mu->put_left == 0)) {
        done_without_kernel(mu); /* nothing of it here */
        return;
    }
    if (kind == MODEL_APPLY) {
        mu->hypers = model_hypers(m, a);
        mu->publish_whole |= m->spec->codec != CODEC_NONE; /* the update leaves it to that */
    }
    submit_or_keep(mu);
}

static void opened(struct model *m, uint64_t step)
{
    board_set_step(m->board, step, step_phase(m->core));
    note(m->metrics, &(struct note){ .what = TRACE_UPDATE, .step = step - 1 });
    notify_step(m->daemon->notify, m->daemon->drain_session != 0, "%.100s: step %" PRIu64 ", %s",
                m->spec->name, step_now(m->core), step_phase_name(step_phase(m->core)));
    put_step_over(m);
    log_debug("op=opened model=%s step=%" PRIu64, m->spec->name, step);
}

static void act(struct model *m, const struct step_action *a, bool *ret_wake)
{
    switch (a->kind) {
    case STEP_DO_ACCUMULATE:
        start_work(m, a, MODEL_ACCUMULATE);
        return;
    case STEP_DO_SUM:
        start_work(m, a, MODEL_SUM);
        return;
    case STEP_DO_ZERO:
        start_work(m, a, MODEL_ZERO);
        return;
    case STEP_DO_APPLY:
        start_work(m, a, a->put ? MODEL_PUT : MODEL_APPLY);
        return;
    case STEP_DO_CREDIT:
        credit(m, a);
        return;
    case STEP_DO_PUBLISH:
        board_publish(m->board, a->unit, a->step);
        capture_published(m, a->unit);
        m->daemon->hooks->published(m->daemon, board_awaited(m->handle, a->unit));
        note(m->metrics,
             &(struct note){
                 .what = TRACE_PUBLISH, .unit = a->unit, .group = TRACE_NONE, .step = a->step });
        return;
    case STEP_DO_SEALED:
        board_set_step(m->board, step_now(m->core), STEP_SEALED);
        note(m->metrics, &(struct note){ .what = TRACE_COLLECT, .step = step_now(m->core) });
        *ret_wake = true;
        return;
    case STEP_DO_DROPPED:
        *ret_wake = true;
        return;
    case STEP_DO_OPENED:
        opened(m, a->step);
        *ret_wake = true;
        return;
    }
}

void apply_actions(struct model *m, const struct step_actions *actions)
{
    bool wake = false, credited = false;
    for (uint32_t i = 0; i < actions->count; i++) {
        act(m, &actions->items[i], &wake);
        credited = credited || actions->items[i].kind == STEP_DO_CREDIT;
    }
    if (wake || (credited && m->waits.lease != NULL))
        m->daemon->hooks->model_moved(m, wake);
}
