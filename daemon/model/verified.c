/* See verified.h. */
#include "daemon/model/verified.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/lease.h"
#include "daemon/core/verify.h"
#include "daemon/model/inbox.h"
#include "daemon/model/lease_wait.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

_Static_assert(VERIFY_HASH_BYTES <= CKPT_LEAF_BYTES, "a part of SHA-256");

struct verified { /* op->work */
    uv_work_t work;
    struct task task; /* copying from a GPU */
    struct op *op;
    const void *from; /* the gradient */
    uint64_t bytes;
    bool known;
    uint8_t hash[CKPT_LEAF_BYTES];
    float copy[]; /* of a GPU's */
};

bool verified_wants(const struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    struct model *m = op->model;
    struct verify *v = lease_verify(m->lease);
    return v != NULL && verify_wants(v, m->core, req->step, req->micro);
}

/* -- Hashing ------------------------------------------------------------------------------------
 */

/* On libuv's pool. */
static void hash(uv_work_t *work)
{
    struct verified *w = work->data;
    struct ckpt_hasher *hasher = NULL;
    struct shd_err ignored;
    w->known = ckpt_hasher_new(&hasher, &ignored) == SHD_OK &&
               ckpt_hash(hasher, w->from, w->bytes / sizeof(float), w->hash);
    ckpt_hasher_free(hasher);
}

/* A model that is being dropped lets go of it by itself. */
static void go_on(struct verified *w)
{
    struct op *list = w->op;
    w->op->hashing = false;
    if (!w->op->daemon->stopping && !w->op->model->use.dropped)
        op_again(&list);
}

static void hashed(uv_work_t *work, int cancelled)
{
    (void)cancelled; /* nobody cancels */
    go_on(work->data);
}

static void copied(struct task *task)
{
    struct verified *w = (struct verified *)((char *)task - offsetof(struct verified, task));
    if (task->status == SHD_OK)
        uv_queue_work(w->op->daemon->loop, &w->work, hash, hashed);
    else
        go_on(w);
}

/* The kernels that read the slot may as well be those of another thread: it is not written. */
static bool begin(struct verified *w, const struct model *m)
{
    const struct kern_copy args = { w->copy, w->from, w->bytes };
    struct shd_err ignored;
    w->work.data = w;
    if (m->kern->ops->place == SEGMENT_HOST)
        return uv_queue_work(m->daemon->loop, &w->work, hash, hashed) == 0;
    w->from = w->copy;
    task_init(&w->task, m->daemon->tasks, copied);
    return kern_copy(m->kern, &args, &w->task.done, &ignored) == SHD_OK;
}

int verified_hash(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct model *m = op->model;
    const uint64_t bytes = shardmap_grad_bytes(m->map, req->unit, req->dtype);
    if (op->inbox == NULL || op->work != NULL || bytes == 0 || !verified_wants(op))
        return SHD_OK;
    const uint64_t copy = m->kern->ops->place == SEGMENT_HOST ? 0 : bytes;
    struct verified *w = sys_malloc(sizeof *w + copy);
    if (w == NULL)
        return SHD_OK;
    memset(w, 0, sizeof *w);
    w->op = op;
    w->from = (const uint8_t *)op->inbox->segment.base +
              shardmap_slot_offset_bytes(m->map, req->slot);
    w->bytes = bytes;
    op->work = w;
    op->hashing = begin(w, m);
    return op->hashing ? SHD_PENDING : SHD_OK;
}

/* -- Comparing ----------------------------------------------------------------------------------
 */

static const char *verdict_text(const struct verify_difference *d, char *text, size_t bytes)
{
    const struct verify_worker *wrong = d->verdict == VERIFY_FIRST    ? &d->worker[0]
                                        : d->verdict == VERIFY_SECOND ? &d->worker[1]
                                                                      : NULL;
    if (wrong == NULL)
        return "one of them is wrong";
    snprintf(text, bytes, "a third one agrees with the other, '%.40s' (pid %" PRId64 ") is wrong",
             wrong->name, wrong->pid);
    return text;
}

static void say(const struct model *m, const struct verify_difference *d)
{
    const struct verify_worker *a = &d->worker[0], *b = &d->worker[1];
    const uint32_t first = d->group * m->spec->accumulate;
    char host[65] = "", verdict[160];
    gethostname(host, sizeof host - 1);
    log_error("op=verify model=%s step=%" PRIu64 " micro=%" PRIu32 " unit=%s worker=\"%.40s\" "
              "pid=%" PRId64 " other=\"%.40s\" other_pid=%" PRId64
              " host=%s why=\"their gradients differ: %s\" do=\"test that machine's memory and "
              "processors; shardctl status counts the differences of each worker\"",
              m->spec->name, d->step, first, m->spec->units[d->unit].name, a->name, a->pid, b->name,
              b->pid, host, verdict_text(d, verdict, sizeof verdict));
}

void verified_take(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct session *s = op->session;
    struct model *m = op->model;
    const struct verified *w = op->work;
    struct verify_difference found;
    if (!verified_wants(op))
        return;
    struct verify_worker worker = {
        .session = s->id, .pid = s->pid, .start_time = s->start_time, .rank = s->rank
    };
    snprintf(worker.name, sizeof worker.name, "%.*s", (int)sizeof worker.name - 1, s->name);
    /* Nothing of the unit lies here: what its other owners have they compare. */
    const bool nothing = req->none || m->map->slice[req->unit].elems == 0;
    if (verify_take(lease_verify(m->lease), m->core, &worker, req->unit,
                    w != NULL && w->known ? w->hash : NULL, nothing, &found))
        say(m, &found);
    lease_wait_soon(m);
}

void verified_prepared(struct model *m, uint64_t step)
{
    struct verify *v = lease_verify(m->lease);
    if (v != NULL)
        verify_close(v, m->core, step);
}

void verified_put(struct model *m, uint64_t step)
{
    struct verify *v = lease_verify(m->lease);
    if (v != NULL)
        verify_close_put(v, m->core, step);
}
