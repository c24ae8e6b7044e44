/* See links.h. */
#include "daemon/links.h"

#include <stdlib.h>

#include "daemon/daemon.h"
#include "proto/check.h"
#include "proto/sys.h"

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

static void transferred(struct task *task)
{
    struct transfer_work *w = (struct transfer_work *)(void *)task;
    struct op *op = w->op;
    op->work = NULL;
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
