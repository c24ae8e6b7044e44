/* RETURN: a unit's gradient of one micro-batch lies in a slot of the session's inbox. Happy path:
 * checked here, ordered and counted by the core, summed by a kernel, then credited: the reply says
 * that the slot is free. One with a turn is first received into the slot, by the session's link. */
#include <inttypes.h>

#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/apply.h"
#include "daemon/model/drain.h"
#include "daemon/model/inbox.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/spill.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/gpu/comm.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

static int check_place(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct spec *spec = op->model->spec;
    if (req->unit >= spec->unit_count)
        return err_set(&op->err, SHD_ERANGE, "unit %" PRIu32 " of a model with %" PRIu32, req->unit,
                       spec->unit_count);
    if (req->micro >= op->model->ledger->head->micros)
        return err_set(&op->err, SHD_ERANGE,
                       "micro-batch %" PRIu32 " of a step with %" PRIu32 " (groups of %" PRIu32 ")",
                       req->micro, spec_returns(spec), spec->accumulate);
    if (spec->units[req->unit].frozen)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 " '%s' is frozen: it has no gradient",
                       req->unit, spec->units[req->unit].name);
    return SHD_OK;
}

static void received(struct op *op, const struct comm_job *job)
{
    if (job->status == SHD_OK) {
        struct op *list = op;
        op->received = true;
        op_again(&list);
        return;
    }
    op->err = job->why;
    inbox_release_slot(op);
    op_finish(op, job->status);
}

/* The next transfer is behind this one, whatever becomes of the gradient later. */
static int receive(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct model *m = op->model;
    const struct links *links = links_find(op->session, m);
    struct comm_job job = { .way = COMM_RECV,
                            .bytes = m->map->slice[req->unit].elems * dtype_bytes(req->dtype),
                            .turn = req->turn };
    if (links == NULL || links->up == NULL)
        return err_set(&op->err, SHD_EINVAL, "session has not joined model '%s'", m->spec->name);
    if (req->none || job.bytes == 0)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 ": nothing to be sent", req->unit);
    job.timeout_ns = links->timeout_ns;
    int r = inbox_take_slot(op);
    if (r != SHD_OK)
        return r;
    job.memory = (uint8_t *)op->inbox->segment.base + shardmap_slot_offset_bytes(m->map, req->slot);
    r = links_transfer(op, links->up, &job, received);
    if (r == SHD_OK)
        return SHD_PENDING;
    inbox_release_slot(op);
    return r;
}

static int op_return_grad(struct op *op)
{
    const struct wire_return *req = &op->req.return_grad;
    int r = model_of(op, req->model);
    if (r == SHD_OK)
        r = check_place(op);
    if (r == SHD_OK && req->turn > 0 && !op->received)
        return receive(op);
    if (r == SHD_OK && op->daemon->drain_session != 0 && drain_holds(op, req->step))
        return SHD_PENDING;
    if (r == SHD_OK && !req->none && !op->received)
        r = inbox_take_slot(op);
    if (r != SHD_OK) {
        inbox_release_slot(op);
        return r;
    }
    metrics_return_arrived(op);
    struct step_actions actions;
    r = step_return(op->model->core, op->index + 1, req->step, req->unit, req->micro, req->none,
                    req->metrics, req->metric_count, &actions, &op->err);
    if (r != SHD_OK) {
        inbox_release_slot(op);
        return r;
    }
    if (op->inbox != NULL && (actions.count == 0 || actions.items[0].kind != STEP_DO_ACCUMULATE))
        spill_watch(op->daemon);        /* its turn has not come */
    apply_actions(op->model, &actions); /* a stale one is finished here */
    return SHD_PENDING;
}

const struct request request_return_grad = { op_return_grad, REQUEST_ROLE(WIRE_TRAINER) };
