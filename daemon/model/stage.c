/* See stage.h. */
#include "daemon/model/stage.h"

#include <stdlib.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"

struct stage {
    struct daemon *daemon; /* borrowed */
    struct segment segment;
    struct op *op; /* borrowed: pending; NULL: none */
    bool ended;    /* the session is; freed when op is done */
    bool making;   /* libuv's pool is at it */
    uv_work_t work;
    struct task task;
    uint64_t bytes; /* to be made */
    int status;
};

static void stage_free(struct stage *stage)
{
    segment_close(&stage->segment);
    free(stage);
}

static void finish(struct stage *stage, int status)
{
    struct op *op = stage->op;
    stage->op = NULL;
    op_finish(op, status);
    if (stage->ended)
        stage_free(stage);
}

/* Who asks again has given up what it was answered before. */
static int answer(const struct stage *stage, struct op *op)
{
    const struct segment *segment = &stage->segment;
    session_ticket_forget(op->daemon, op->session->id, segment->fd);
    const uint64_t ticket = stage->ended ? 0
                                         : session_ticket_new(op->session, segment->fd,
                                                              SEGMENT_STAGE, segment->bytes);
    if (ticket == 0)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    op->reply.type = WIRE_GOT;
    op->reply.got.ticket = ticket;
    op->reply.got.bytes = segment->bytes;
    return SHD_OK;
}

static void copied(struct task *task)
{
    struct stage *stage = (struct stage *)((char *)task - offsetof(struct stage, task));
    struct op *op = stage->op;
    const int r = task->status == SHD_OK ? answer(stage, op)
                                         : kern_explain(stage->daemon->kern, task->status, &op->err,
                                                        "copying an array");
    finish(stage, r);
}

static uint64_t slice_bytes(const struct op *op)
{
    return op->model->map->slice[op->req.get.unit].elems * sizeof(float);
}

static int copy(struct stage *stage, struct op *op)
{
    const struct wire_get *req = &op->req.get;
    const struct model *m = op->model;
    const uint64_t bytes = slice_bytes(op);
    if (bytes == 0)
        return answer(stage, op);
    struct kern *kern = stage->daemon->kern;
    const struct kern_op read = kern_read_of(model_state(m, req->array, req->unit), 0,
                                             bytes / sizeof(float), stage->segment.base);
    task_init(&stage->task, stage->daemon->tasks, copied);
    const int r = kern->ops->submit(kern, &read, &stage->task.done, &op->err);
    if (r == SHD_EBUSY)
        op->reply.retry_ms = OPS_RETRY_MS; /* the device's queue is full of others' work */
    if (r != SHD_OK)
        return r;
    stage->op = op;
    return SHD_PENDING;
}

static void make(uv_work_t *work)
{
    struct stage *stage = work->data;
    segment_close(&stage->segment);
    stage->status = segment_new("shardd-stage", SEGMENT_STAGE, stage->bytes, &stage->segment,
                                &stage->op->err);
}

/* The model may be at another step by now: the request is served anew. */
static void made(uv_work_t *work, int cancelled)
{
    struct stage *stage = work->data;
    CHECK(cancelled == 0);
    stage->making = false;
    if (stage->daemon->stopping) {
        if (stage->ended)
            stage_free(stage);
        return;
    }
    struct op *op = stage->op;
    if (stage->status != SHD_OK || stage->ended) {
        if (stage->status == SHD_OK)
            stage->status = err_set(&op->err, SHD_EGONE, "session ended");
        finish(stage, stage->status);
        return;
    }
    stage->op = NULL;
    op_again(&op);
}

int stage_get(struct op *op)
{
    struct session *s = op->session;
    const uint64_t bytes = slice_bytes(op) > 0 ? slice_bytes(op) : 1;
    if (s->stage == NULL) {
        s->stage = sys_calloc(1, sizeof *s->stage);
        if (s->stage == NULL)
            return err_set(&op->err, SHD_ENOMEM, "no memory for a stage");
        s->stage->daemon = op->daemon;
        s->stage->segment = SEGMENT_CLOSED;
        s->stage->work.data = s->stage;
    }
    struct stage *stage = s->stage;
    if (stage->op != NULL) {
        op->reply.retry_ms = OPS_RETRY_MS;
        return err_set(&op->err, SHD_EBUSY, "the session's stage is in use: ask again");
    }
    if (stage->segment.bytes >= bytes)
        return copy(stage, op);
    if (stage->segment.fd >= 0)
        session_ticket_forget(op->daemon, s->id, stage->segment.fd);
    stage->op = op;
    stage->bytes = bytes;
    stage->making = true;
    uv_queue_work(op->daemon->loop, &stage->work, make, made);
    return SHD_PENDING;
}

void stage_end(struct session *s)
{
    struct stage *stage = s->stage;
    s->stage = NULL;
    if (stage == NULL)
        return;
    stage->ended = true;
    if (stage->op == NULL || (stage->daemon->stopping && !stage->making))
        stage_free(stage); /* at shutdown nothing is copied any more */
}
