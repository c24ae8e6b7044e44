/* See links.h. */
#include "daemon/net/links.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/gpu/comm.h"
#include "proto/gpu/nccl.h"
#include "proto/share/segment.h"
#include "proto/wire/wire.h"

#define TIMEOUT_MS_MAX UINT64_C(60000) /* a worker's default; what is longer waits for people */

static_assert(sizeof(struct nccl_id) == WIRE_LINK_ID_BYTES, "nccl.h and the messages agree");

struct transfer_work { /* op->work */
    struct task task;
    struct comm_job job;
    struct op *op;
    void (*done)(struct op *op, const struct comm_job *job);
};

struct links *links_find(struct session *s, const struct model *model)
{
    for (uint32_t i = 0; i < s->link_count; i++)
        if (s->links[i].model == model)
            return &s->links[i];
    return NULL;
}

/* Both ends of a link must agree on what has been carried, so it is not used again: the worker
 * begins anew. */
static void broke(const struct op *op, const struct comm_job *job)
{
    struct session *s = op->session;
    const bool slow = job->status == SHD_ETIMEDOUT;
    log_warn("op=link session=%016" PRIx64 " pid=%d name=%s request=%s status=%s why=\"%s\""
             " do=\"%s; it joins again by itself\"",
             s->id, (int)s->pid, s->name, wire_request_name(op->req.type), status_name(job->status),
             job->why.text,
             slow ? "see whether that process is stopped or hangs"
                  : "none if it died, else see its log; NCCL_DEBUG=WARN says more");
    session_end(s, slow ? "it took no part in a transfer by NCCL in time" : "NCCL failed");
}

static void transferred(struct task *task)
{
    struct transfer_work *w = (struct transfer_work *)(void *)task;
    struct op *op = w->op;
    op->work = NULL;
    if (w->job.status != SHD_OK && !w->job.ended && op->session->state == SESSION_OPEN)
        broke(op, &w->job);
    w->done(op, &w->job);
    free(w);
}

/* On the communicator thread. */
static void job_done(struct comm_job *job)
{
    struct transfer_work *w = (struct transfer_work *)(void *)((char *)job -
                                                               offsetof(struct transfer_work, job));
    task_post(&w->task, job->status);
}

int links_transfer(struct op *op, struct comm_link *link, const struct comm_job *job,
                   void (*done)(struct op *op, const struct comm_job *job))
{
    CHECK(op->work == NULL);
    struct transfer_work *w = sys_calloc(1, sizeof *w);
    if (w == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a transfer");
    task_init(&w->task, op->daemon->tasks, transferred);
    w->op = op;
    w->done = done;
    w->job = *job;
    w->job.done = job_done;
    op->work = w;
    comm_queue(link, &w->job);
    return SHD_OK;
}

bool links_waiting(const struct op *op, uint64_t *ret_begun_ns)
{
    const bool turn = op->req.type == WIRE_FETCH ||
                      (op->req.type == WIRE_RETURN && op->req.return_grad.turn > 0);
    const struct transfer_work *w = op->work;
    if (!turn || w == NULL)
        return false;
    *ret_begun_ns = atomic_load_explicit(&w->job.begun_ns, memory_order_relaxed);
    return true;
}

/* -- Joining ------------------------------------------------------------------------------------
 */

struct join_work;

struct join_link {
    struct task task; /* first */
    struct comm_job job;
    struct join_work *work;
};

struct join_work { /* op->work */
    struct op *op;
    struct join_link down, up;
    uint64_t timeout_ns;
    uint32_t waiting;
};

static void joined(struct task *task)
{
    const struct join_link *link = (const struct join_link *)(void *)task;
    struct join_work *w = link->work;
    struct op *op = w->op;
    if (link->job.status != SHD_OK && op->err.code == SHD_OK)
        op->err = link->job.why;
    if (--w->waiting > 0)
        return;
    if (op->err.code != SHD_OK)
        log_warn("op=join session=%016" PRIx64 " status=%s why=\"%s\""
                 " do=\"the worker joins again, or see its log; NCCL_DEBUG=WARN says more\"",
                 op->req.session, status_name(op->err.code), op->err.text);
    op_finish(op, op->err.code);
}

/* On the communicator thread. */
static void link_opened(struct comm_job *job)
{
    struct join_link *link = (struct join_link *)(void *)((char *)job -
                                                          offsetof(struct join_link, job));
    task_post(&link->task, job->status);
}

static int need_comm(struct op *op)
{
    struct daemon *d = op->daemon;
    if (strncmp(d->device, "cpu", 3) == 0)
        return err_set(&op->err, SHD_ENOTSUP, "device %s is host memory: path nccl is between GPUs",
                       d->device);
    if (d->comm != NULL)
        return SHD_OK;
    return comm_new((uint32_t)strtoul(d->device + strcspn(d->device, "0123456789"), NULL, 10),
                    &d->comm, &op->err);
}

/* The place for the links: that of the ones they replace, or a new one. */
static int need_place(struct op *op, struct links **ret_links)
{
    struct session *s = op->session;
    struct links *links = links_find(s, op->model);
    if (links == NULL && s->link_count == SESSION_MODELS_MAX)
        return err_set(&op->err, SHD_EBUSY, "session has links of %u models, the most there may be",
                       SESSION_MODELS_MAX);
    if (links == NULL && s->links == NULL)
        s->links = sys_calloc(SESSION_MODELS_MAX, sizeof *s->links);
    if (s->links == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a session's links");
    if (links == NULL) {
        links = &s->links[s->link_count++];
        *links = (struct links){ .model = op->model };
    }
    comm_link_end(links->down);
    comm_link_end(links->up);
    links->down = links->up = NULL;
    *ret_links = links;
    return SHD_OK;
}

static int begin(struct join_work *w, struct join_link *link, const uint8_t *id,
                 struct comm_link **ret)
{
    struct op *op = w->op;
    struct nccl_id as;
    memcpy(as.bytes, id, sizeof as.bytes);
    task_init(&link->task, op->daemon->tasks, joined);
    link->job = (struct comm_job){ .done = link_opened, .timeout_ns = w->timeout_ns };
    link->work = w;
    const int r = comm_link_new(op->daemon->comm, &as, /* rank= */ 1, &link->job, ret, &op->err);
    w->waiting += r == SHD_OK;
    return r;
}

static uint64_t timeout_ns(const struct wire_join *req)
{
    const bool given = req->timeout_ms > 0 && req->timeout_ms < TIMEOUT_MS_MAX;
    return (given ? req->timeout_ms : TIMEOUT_MS_MAX) * NS_PER_MS;
}

int links_join(struct op *op)
{
    const struct wire_join *req = &op->req.join;
    struct links *links = NULL;
    int r = need_comm(op);
    if (r == SHD_OK)
        r = need_place(op, &links);
    if (r != SHD_OK || links == NULL)
        return r;
    struct join_work *w = sys_calloc(1, sizeof *w);
    if (w == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for two links");
    op->work = w;
    w->op = op;
    w->timeout_ns = links->timeout_ns = timeout_ns(req);
    r = begin(w, &w->down, req->down, &links->down);
    if (r == SHD_OK)
        r = begin(w, &w->up, req->up, &links->up);
    if (r == SHD_OK || w->waiting == 0)
        return r == SHD_OK ? SHD_PENDING : r;
    comm_link_end(links->down); /* the first one began: its end finishes the request */
    links->down = NULL;
    return SHD_PENDING;
}

bool links_joining(const struct op *op, uint64_t *ret_begun_ns)
{
    const struct join_work *w = op->work;
    if (op->req.type != WIRE_JOIN || w == NULL)
        return false;
    const uint64_t down_ns = atomic_load_explicit(&w->down.job.begun_ns, memory_order_relaxed);
    const uint64_t up_ns = atomic_load_explicit(&w->up.job.begun_ns, memory_order_relaxed);
    *ret_begun_ns = down_ns == 0 || up_ns == 0 ? 0 : down_ns > up_ns ? down_ns : up_ns;
    return true;
}

/* -- Ending -------------------------------------------------------------------------------------
 */

void links_let_go(struct session *s, const struct model *model)
{
    struct links *links = links_find(s, model);
    if (links == NULL)
        return;
    comm_link_end(links->down);
    comm_link_end(links->up);
    *links = s->links[--s->link_count];
}

void links_end(struct session *s)
{
    for (uint32_t i = 0; i < s->link_count; i++) {
        comm_link_end(s->links[i].down);
        comm_link_end(s->links[i].up);
    }
    s->link_count = 0;
    free(s->links);
    s->links = NULL;
}

void links_stop(struct daemon *d)
{
    for (uint32_t i = 0; i < d->sessions->made; i++)
        links_end(&d->sessions->items[i]);
    comm_free(d->comm);
    d->comm = NULL;
}
