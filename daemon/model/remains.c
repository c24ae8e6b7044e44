/* See remains.h. */
#include "daemon/model/remains.h"

#include <stdbool.h>
#include <stdlib.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/model/capture.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/open.h"
#include "daemon/model/put.h"
#include "daemon/model/spare.h"
#include "daemon/model/spill.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/wire/wire.h"

#define LOOK_MS 1u

enum remains_state {
    REMAINS_NEW,
    REMAINS_QUEUED, /* `last` is behind all that the device has for it */
    REMAINS_IDLE,   /* the device has nothing for it */
    REMAINS_CLOSING,
    REMAINS_FREEING,
};

struct remains {
    struct model *model; /* owned; NULL: freed */
    enum remains_state state;
    struct task last;
    uv_timer_t timer;
    uint32_t closing; /* timers */
    uv_work_t work;
    void (*gone)(void *ctx);
    void *ctx;
};

/* -- The device ---------------------------------------------------------------------------------
 */

/* Tasks of the loop's own come in their order, too, and this is the last of them. */
static void all_heard(struct task *task)
{
    struct remains *r = (struct remains *)((char *)task - offsetof(struct remains, last));
    r->state = REMAINS_IDLE;
}

static void device_done(struct task *task)
{
    struct remains *r = (struct remains *)((char *)task - offsetof(struct remains, last));
    task_init(&r->last, r->model->daemon->tasks, all_heard);
    task_post_here(&r->last, SHD_OK); /* behind what did not need the device */
}

/* A full queue: the next look tries again. A device that takes nothing has nothing. */
static void queue_last(struct remains *r)
{
    const struct kern_copy nothing = { .bytes = 0 };
    struct daemon *d = r->model->daemon;
    struct shd_err ignored;
    task_init(&r->last, d->tasks, device_done);
    const int status = kern_copy(d->kern, &nothing, &r->last.done, &ignored);
    if (status == SHD_EBUSY)
        return;
    r->state = REMAINS_QUEUED;
    if (status != SHD_OK)
        task_post_here(&r->last, SHD_OK);
}

/* -- Who refers to it ---------------------------------------------------------------------------
 */

/* A RETURN whose gradient waits for its turn, which will not come. */
static void let_go(struct op *op)
{
    inbox_release_slot(op);
    op_finish(op, err_set(&op->err, SHD_ENOENT, "the model was dropped"));
}

/* Requests that are under way: those at the device, at the pool or at a link end by themselves. */
static bool has_requests(const struct model *m)
{
    struct op_pool *ops = m->daemon->ops;
    uint64_t begun_ns;
    bool any = false;
    for (uint32_t i = 0; i < ops->made; i++) {
        struct op *op = &ops->items[i];
        const bool ours = op->serial != 0 && op->model == m;
        if (ours && op->req.type == WIRE_RETURN && !links_waiting(op, &begun_ns) && !op->hashing)
            let_go(op);
        else
            any = any || ours;
    }
    return any;
}

static bool is_idle(struct model *m)
{
    capture_retry(m);
    return !has_requests(m) && capture_is_idle(m) && m->use.shows == 0 && m->use.inboxes == 0 &&
           spill_is_idle(m) && spare_is_idle(m) && m->daemon->open->found != m;
}

/* -- Freeing ------------------------------------------------------------------------------------
 */

static void free_model(uv_work_t *work)
{
    struct remains *r = work->data;
    FAIL_POINT("drop:free:before");
    model_free(r->model);
    FAIL_POINT("drop:free:after");
    r->model = NULL;
}

static void model_freed(uv_work_t *work, int cancelled)
{
    struct remains *r = work->data;
    CHECK(cancelled == 0); /* nobody cancels */
    r->gone(r->ctx);
    free(r);
}

static void begin_freeing(struct remains *r)
{
    struct daemon *d = r->model->daemon;
    if (d->stopping)
        return; /* remains_free() */
    r->state = REMAINS_FREEING;
    put_free(r->model);
    capture_free(r->model);
    spill_deinit(r->model);
    r->work.data = r;
    uv_queue_work(d->loop, &r->work, free_model, model_freed);
}

static void timer_closed(uv_handle_t *handle)
{
    struct remains *r = handle->data;
    if (--r->closing == 0)
        begin_freeing(r);
}

static void close_timer(struct remains *r, uv_timer_t *timer)
{
    if (timer == NULL)
        return;
    r->closing++;
    timer->data = r;
    uv_close((uv_handle_t *)timer, timer_closed);
}

static void look(uv_timer_t *timer)
{
    struct remains *r = timer->data;
    if (r->model->daemon->stopping)
        return;
    if (r->state == REMAINS_NEW)
        queue_last(r);
    if (r->state != REMAINS_IDLE || !is_idle(r->model))
        return;
    r->state = REMAINS_CLOSING;
    close_timer(r, spill_timer(r->model));
    close_timer(r, spare_timer(r->model));
    close_timer(r, &r->timer);
}

struct remains *remains_new(struct model *m, void (*gone)(void *ctx), void *ctx)
{
    struct remains *r = sys_calloc(1, sizeof *r);
    if (r == NULL)
        return NULL;
    m->use.dropped = true;
    r->model = m;
    r->gone = gone;
    r->ctx = ctx;
    r->timer.data = r;
    uv_timer_init(m->daemon->loop, &r->timer);
    uv_timer_start(&r->timer, look, LOOK_MS, LOOK_MS);
    return r;
}

void remains_free(struct remains *r)
{
    if (r == NULL)
        return;
    if (r->model != NULL) {
        capture_free(r->model);
        put_free(r->model);
        spill_deinit(r->model);
        model_free(r->model);
    }
    free(r);
}
