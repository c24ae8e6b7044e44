/* See links.h. */
#include "daemon/net/links.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/daemon.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

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
             s->id, (int)s->peer.pid, s->name, wire_request_name(op->req.type),
             status_name(job->status), job->why.text,
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

void links_end(struct session *s)
{
    for (uint32_t i = 0; i < s->link_count; i++) {
        comm_link_end(s->links[i].down);
        comm_link_end(s->links[i].up);
    }
    s->link_count = 0;
}

void links_stop(struct daemon *d)
{
    for (uint32_t i = 0; d->sessions.items != NULL && i < SESSIONS_MAX; i++)
        links_end(&d->sessions.items[i]);
    comm_free(d->comm);
    d->comm = NULL;
}
