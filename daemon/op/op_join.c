/* JOIN: connect the session's two NCCL links of a model. Happy path: both are begun here, the
 * communicator thread connects them while the worker's does, and the reply says that they stand. A
 * second JOIN of the same session and model replaces the first one's links. */
#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/daemon.h"
#include "daemon/net/dispatch.h"
#include "daemon/net/links.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define TIMEOUT_MS_MAX UINT64_C(60000) /* a worker's default; what is longer waits for people */

static_assert(sizeof(struct nccl_id) == WIRE_LINK_ID_BYTES, "nccl.h and the messages agree");

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
    if (d->kern->ops->place != SEGMENT_CUDA)
        return err_set(&op->err, SHD_ENOTSUP, "device %s is host memory: path nccl is between GPUs",
                       d->device);
    if (d->comm != NULL)
        return SHD_OK;
    return comm_new((uint32_t)strtoul(d->device + strcspn(d->device, "0123456789"), NULL, 10),
                    &d->comm, &op->err);
}

/* Where to keep them: the first's place, or a new one. */
static int need_place(struct op *op, struct links **ret_links)
{
    struct session *s = op->session;
    struct links *links = links_find(s, op->model);
    if (links == NULL && s->link_count == SESSION_MODELS_MAX)
        return err_set(&op->err, SHD_EBUSY, "session has links of %u models, the most there may be",
                       SESSION_MODELS_MAX);
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

int op_join(struct op *op)
{
    const struct wire_join *req = &op->req.join;
    struct links *links = NULL;
    int r = op_find_model(op, req->model);
    if (r == SHD_OK)
        r = need_comm(op);
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
