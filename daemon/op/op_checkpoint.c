/* Requests of files: CHECKPOINT, RESTORE.
 *
 * CHECKPOINT: write this owner's part of exactly one step: the current one at once, a later one
 * when it opens. A session that asks again replaces what it asked for before. */
#include <inttypes.h>

#include "daemon/core/step.h"
#include "daemon/model/checkpoint.h"
#include "daemon/model/model.h"
#include "daemon/model/restore.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/net/spec_in.h"
#include "daemon/op/requests.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/spec/spec.h"

static int busy(struct op *op, const struct op *other)
{
    return err_set(&op->err, SHD_EBUSY,
                   "session '%.60s' (pid %d) has a checkpoint of model '%s' under way",
                   other->session->name, (int)other->session->pid, op->model->spec->name);
}

/* A new request replaces one of the same session that waits for its step, but none of another's. */
static int replace_waiting(struct op *op)
{
    struct model *m = op->model;
    for (struct op **at = &m->waits.phase; *at != NULL; at = &(*at)->next) {
        struct op *other = *at;
        if (other->req.type != WIRE_CHECKPOINT)
            continue;
        if (other->session != op->session)
            return busy(op, other);
        *at = other->next;
        other->next = NULL;
        op_finish(other, err_set(&other->err, SHD_ESTEP, "the session asks for another step"));
        break; /* there is one at most */
    }
    return SHD_OK;
}

static int replace_running(struct op *op)
{
    struct op *other = checkpoint_op(op->model);
    if (other == NULL)
        return SHD_OK;
    if (other->session != op->session && other->session->state == SESSION_OPEN)
        return busy(op, other);
    checkpoint_replace(op->model);
    return SHD_OK;
}

static int take(struct op *op)
{
    op->text = sys_strdup(op->req.checkpoint.path); /* the request's bytes are gone later */
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a path");
    const int r = replace_waiting(op);
    return r == SHD_OK ? replace_running(op) : r;
}

static int op_checkpoint(struct op *op)
{
    const struct wire_checkpoint *req = &op->req.checkpoint;
    int r = model_of(op, req->model);
    if (r == SHD_OK && op->text == NULL)
        r = take(op);
    if (r != SHD_OK)
        return r;
    struct model *m = op->model;
    const uint64_t current = step_collecting(m->core);
    if (req->step < current)
        return err_set(&op->err, SHD_ESTEP,
                       "checkpoint of step %" PRIu64 " asked for, the open step is %" PRIu64,
                       req->step, current);
    if (req->step == current && step_phase(m->core) != STEP_APPLYING && checkpoint_op(m) == NULL)
        return checkpoint_begin(op);
    model_wait(m, op);
    return SHD_PENDING;
}

const struct request request_checkpoint = { op_checkpoint,
                                            REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };

/* RESTORE: read a model and park it, or open the one that is parked; see restore.h. */

static int restore_it(struct op *op)
{
    if (op->spec == NULL)
        return err_set(&op->err, SHD_EINVAL, "a model without a spec cannot be restored");
    return op->req.restore.open ? restore_open(op) : restore_begin(op);
}

static int op_restore(struct op *op)
{
    struct wire_restore *req = &op->req.restore;
    return spec_in(op, &req->spec, &req->spec_at, &req->path, restore_it);
}

const struct request request_restore = { op_restore,
                                         REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };
