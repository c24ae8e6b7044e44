/* See rewind.h. */
#include "daemon/model/rewind.h"

#include <inttypes.h>
#include <stdlib.h>
#include <time.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/ledger.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/step.h"
#include "daemon/core/step_rewind.h"
#include "daemon/model/apply.h"
#include "daemon/model/capture.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/model_unit.h"
#include "daemon/model/put.h"
#include "daemon/model/snapshots.h"
#include "daemon/model/spill.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

#define LOOK_MS 1u

enum rewind_state {
    REWIND_DROPPING, /* gradients of the open step, and what kernels are at */
    REWIND_COPYING,  /* the arrays are to be queued */
    REWIND_CASTING,  /* so is what is published of them */
    REWIND_QUEUED,
    REWIND_COPIED,
    REWIND_FAILED,
};

struct rewind {
    struct model *model; /* borrowed */
    enum rewind_state state;
    uint64_t step, from;
    uv_timer_t timer;
    struct task copied, cast;
};

/* -- Copying back -------------------------------------------------------------------------------
 */

static void failed(struct rewind *r, int status)
{
    struct model *m = r->model;
    struct shd_err e;
    kern_explain(m->kern, status, &e, "copying a snapshot back");
    r->state = REWIND_FAILED;
    m->last_status = status;
    m->ready = false; /* a successor copies it once more */
    log_error("op=rewind model=%s step=%" PRIu64 " status=%s why=\"%s\""
              " do=\"systemctl restart this daemon: it goes on with the snapshot\"",
              m->spec->name, r->step, status_name(status), e.text);
    if (status == SHD_EIO)
        m->daemon->hooks->device_failed(m->daemon);
}

static void arrays_copied(struct task *task)
{
    struct rewind *r = (struct rewind *)((char *)task - offsetof(struct rewind, copied));
    FAIL_POINT("rewind:copied");
    if (task->status != SHD_OK)
        failed(r, task->status);
}

static void published(struct task *task)
{
    struct rewind *r = (struct rewind *)((char *)task - offsetof(struct rewind, cast));
    FAIL_POINT("rewind:published");
    if (task->status != SHD_OK && r->state != REWIND_FAILED)
        failed(r, task->status);
    else if (r->state == REWIND_QUEUED)
        r->state = REWIND_COPIED;
}

/* True: nothing of the open step is left, and no kernel works for it. */
static bool drop_step(struct rewind *r)
{
    struct model *m = r->model;
    struct step_actions actions;
    int dropped;
    while ((dropped = step_rewind_drop(m->core, &actions)) == SHD_PENDING && actions.count > 0)
        apply_actions(m, &actions);
    return dropped == SHD_OK && spill_is_idle(m);
}

/* Pins and checkpoints of the step that is left queue their copies first. */
static bool queue_arrays(struct rewind *r)
{
    struct model *m = r->model;
    struct shd_err e;
    for (uint32_t u = 0; u < m->ledger->head->units; u++)
        if (capture_before_update(m, u, &e) != SHD_OK)
            return false;
    const struct kern_copy copy = { .to = m->state.base,
                                    .from = snapshot_state(m, r->step),
                                    .bytes = snapshot_state_bytes(m) };
    board_unpublish(m->board);
    task_init(&r->copied, m->daemon->tasks, arrays_copied);
    const int status = kern_copy(m->kern, &copy, &r->copied.done, &e);
    if (status == SHD_EBUSY)
        return false;
    if (status != SHD_OK)
        failed(r, status);
    else
        r->state = REWIND_CASTING;
    return status == SHD_OK;
}

static void queue_published(struct rewind *r)
{
    const struct model *m = r->model;
    const struct kern_op op = model_publish(m, 0, m->map->elems);
    struct shd_err e;
    task_init(&r->cast, m->daemon->tasks, published);
    const int status = m->kern->ops->submit(m->kern, &op, &r->cast.done, &e);
    if (status != SHD_EBUSY && status != SHD_OK)
        failed(r, status);
    else if (status == SHD_OK)
        r->state = REWIND_QUEUED;
}

/* -- The step that it is at now -----------------------------------------------------------------
 */

static void say(struct model *m)
{
    const uint64_t step = step_now(m->core), attempt = step_attempt(m->core);
    const uint32_t units = m->ledger->head->units;
    snapshots_say(m); /* first: who sees the attempt knows what it began with */
    board_set_attempt(m->board, step, attempt);
    board_set_step(m->board, step, step_phase(m->core));
    for (uint32_t u = 0; u < units; u++) {
        board_publish(m->board, u, step);
        m->daemon->hooks->published(m->daemon, board_awaited(m->handle, u));
    }
}

static void timer_closed(uv_handle_t *handle)
{
    struct rewind *r = handle->data;
    *snapshots_rewind(r->model) = NULL;
    free(r);
}

static void arrive(struct rewind *r)
{
    struct model *m = r->model;
    uint64_t under_way;
    struct shd_err e;
    if (ledger_rewinding(m->ledger, &under_way))
        snapshot_rewound(m, r->step);
    if (model_core_anew(m, &e) != SHD_OK)
        return; /* when there is memory */
    model_units_forget(m, r->step);
    m->spill->bytes = 0;
    m->use.rewinding = false;
    say(m);
    log_info("op=rewind model=%s step=%" PRIu64 " from=%" PRIu64 " attempt=%" PRIu64, m->spec->name,
             r->step, r->from, step_attempt(m->core));
    uv_close((uv_handle_t *)&r->timer, timer_closed);
    m->daemon->hooks->model_moved(m, /* phase_changed= */ true);
}

static void look(uv_timer_t *timer)
{
    struct rewind *r = timer->data;
    if (r->model->daemon->stopping || r->model->use.dropped)
        return;
    if (r->state == REWIND_DROPPING && drop_step(r))
        r->state = REWIND_COPYING;
    if (r->state == REWIND_COPYING && snapshot_state_bytes(r->model) == 0)
        r->state = REWIND_COPIED;
    if (r->state == REWIND_COPYING && !queue_arrays(r))
        return;
    if (r->state == REWIND_CASTING)
        queue_published(r);
    if (r->state == REWIND_COPIED)
        arrive(r);
}

/* -- Requests -----------------------------------------------------------------------------------
 */

static int busy(struct op *op)
{
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY, "daemon %s is at it: ask again", op->daemon->device);
}

/* attempt 0: owner 0's word. What is begun is answered when it is done: it is asked again. */
static int begin(struct op *op, uint64_t attempt)
{
    struct model *m = op->model;
    const uint64_t step = op->req.rewind.step;
    if (!put_make_room(m))
        return busy(op);
    struct rewind *r = sys_calloc(1, sizeof *r);
    if (r == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to go back");
    r->model = m;
    r->step = step;
    r->from = step_collecting(m->core);
    const int status = step_rewind(m->core, step, attempt, snapshot_more(m, step), &op->err);
    if (status != SHD_OK) {
        free(r);
        return status == SHD_PENDING ? busy(op) : status;
    }
    m->use.rewinding = true;
    *snapshots_rewind(m) = r;
    r->timer.data = r;
    uv_timer_init(m->daemon->loop, &r->timer);
    uv_timer_start(&r->timer, look, /* timeout= */ 0, LOOK_MS);
    return busy(op);
}

/* A worker of an older build would wait for a step that does not come, and so would one that has
 * its parameters sent by NCCL. */
static int check_workers(struct op *op)
{
    struct session_table *table = op->daemon->sessions;
    for (uint32_t i = 0; i < table->made; i++) {
        struct session *s = &table->items[i];
        if (inbox_of(s, op->model) == NULL)
            continue;
        if (s->said.level < WIRE_LEVEL_RULES)
            return err_set(&op->err, SHD_ENOTSUP,
                           "worker '%.60s' (pid %d) is of an older build, which knows no rewind: "
                           "end it, or start it again with this one",
                           s->name, (int)s->pid);
        if (links_find(s, op->model) != NULL)
            return err_set(&op->err, SHD_ENOTSUP,
                           "worker '%.60s' (pid %d) has its parameters sent by NCCL, which cannot "
                           "go back: end it, and start it again after the rewind",
                           s->name, (int)s->pid);
    }
    return SHD_OK;
}

static int find(struct op *op)
{
    const uint64_t step = op->req.rewind.step;
    if (snapshot_has(op->model, step))
        return SHD_OK;
    return err_set(&op->err, SHD_ENOENT,
                   "daemon %s has no snapshot of step %" PRIu64 " of model '%s': `shardctl "
                   "snapshots` lists those that there are",
                   op->daemon->device, step, op->model->spec->name);
}

static int others(struct op *op)
{
    return err_set(&op->err, SHD_ESTEP, "model '%s' is being rewound by another session",
                   op->model->spec->name);
}

static struct rewind_ask asked(const struct op *op)
{
    const struct wire_rewind *req = &op->req.rewind;
    return (struct rewind_ask){ req->step, req->attempt, req->consent, req->keep_settings };
}

/* Owner 0 may be another one the next time, on a host that has run for less long. */
static uint64_t consent(const struct ledger_rewind *r)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t now_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    return now_ns > r->consent ? now_ns : r->consent + 1;
}

/* Owner 0's replica is told owner 0's consent, as the others are. */
static int hold(struct op *op)
{
    const struct model *m = op->model;
    struct rewind_ask ask = asked(op);
    if (m->map->owner == 0 && ask.consent == 0)
        ask.consent = consent(m->ledger->rewind);
    if (!step_rewind_may_hold(m->ledger, &ask))
        return others(op);
    int status = find(op);
    if (status == SHD_OK)
        status = check_workers(op);
    if (status != SHD_OK)
        return status;
    step_rewind_hold(m->ledger, &ask);
    return SHD_OK;
}

static int go(struct op *op)
{
    const struct rewind_ask ask = asked(op);
    if (op->model->map->owner != 0)
        return err_set(&op->err, SHD_EINVAL, "owner 0 says when, this is owner %" PRIu32,
                       op->model->map->owner);
    const enum rewind_goes goes = step_rewind_goes(op->model->ledger, &ask);
    if (goes != REWIND_GOES)
        return goes == REWIND_GONE ? SHD_OK : others(op);
    if (op->daemon->drain_session != 0)
        return err_set(&op->err, SHD_EBUSY, "daemon %s is being drained", op->daemon->device);
    const int status = find(op);
    return status == SHD_OK ? begin(op, /* attempt= */ 0) : status;
}

static int follow(struct op *op)
{
    const uint64_t attempt = op->req.rewind.attempt;
    if (step_rewind_followed(op->model->ledger, attempt))
        return SHD_OK;
    const int status = find(op);
    return status == SHD_OK ? begin(op, attempt) : status;
}

int rewind_ask(struct op *op)
{
    const struct wire_rewind *req = &op->req.rewind;
    int status = model_of(op, req->model);
    if (status != SHD_OK)
        return status;
    const struct ledger_rewind *r = op->model->ledger->rewind;
    if (r == NULL)
        return err_set(&op->err, SHD_ENOTSUP,
                       "model '%s' was opened by an older build, whose ledger has no room for a "
                       "rewind: save it, and restore it in this one",
                       op->model->spec->name);
    status = req->what == WIRE_REWIND_HOLD ? hold(op)
             : req->what == WIRE_REWIND_GO ? go(op)
                                           : follow(op);
    if (status != SHD_OK)
        return status;
    op->reply.type = WIRE_REWOUND;
    op->reply.rewound = (struct wire_rewound){ .step = r->last_step,
                                               .attempt = atomic_load(&r->last),
                                               .consent = r->consent };
    return SHD_OK;
}
