/* LEASE: work of a step that nobody does yet, please; see lease_wait.h. Or a wait for other
 * workers; see meet.h. */
#include <inttypes.h>

#include "daemon/core/lease.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/drain.h"
#include "daemon/model/lease_wait.h"
#include "daemon/model/meet.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/reset.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "proto/base/status.h"

static enum wire_leased_what what_of(enum lease_answer answer)
{
    switch (answer) {
    case LEASE_GROUP:
        return WIRE_LEASED_GROUP;
    case LEASE_ALL_IN:
        return WIRE_LEASED_ALL_IN;
    case LEASE_OVER:
        return WIRE_LEASED_OVER;
    case LEASE_WAIT:
        break;
    }
    return WIRE_LEASED_NOTHING;
}

static int check_group(struct op *op)
{
    const uint32_t groups = op->model->ledger->head->micros, group = op->req.lease.group;
    if (group < groups)
        return SHD_OK;
    return err_set(&op->err, SHD_ERANGE, "group %" PRIu32 " of a step with %" PRIu32, group,
                   groups);
}

/* A group of an earlier step has gone with it. */
static int take_back(struct op *op)
{
    const int r = check_group(op);
    if (r != SHD_OK)
        return r;
    if (op->req.lease.step == step_collecting(op->model->core))
        lease_wait_take_back(op);
    op->reply.type = WIRE_LEASED;
    op->reply.leased = (struct wire_leased){ .step = op->req.lease.step,
                                             .what = WIRE_LEASED_NOTHING };
    return SHD_OK;
}

static void count_backup(const struct op *op, uint32_t group)
{
    uint64_t session[2], since_ns[2];
    lease_holders(op->model->lease, group, session, since_ns);
    op->model->metrics->backup_leases += session[1] == op->session->id;
}

static int op_lease(struct op *op)
{
    const struct wire_lease *req = &op->req.lease;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    if (op->session->state != SESSION_OPEN) /* it ended while others were being asked */
        return err_set(&op->err, SHD_EGONE, "session ended");
    if (req->back)
        return take_back(op);
    if (!reset_follow(op->model, req->step, req->attempt))
        return err_set(&op->err, SHD_ERESET,
                       "step %" PRIu64 " was reset: its work is handed out anew", req->step);
    if (drain_holds(op, req->step))
        return SHD_PENDING;
    if (req->meet > 0) {
        meet_ask(op);
        return SHD_PENDING;
    }
    uint32_t group = 0;
    const enum lease_answer answer = lease_wait_ask(op, &group);
    if (answer == LEASE_WAIT && !req->now)
        return SHD_PENDING;
    if (answer == LEASE_GROUP)
        count_backup(op, group);
    op->reply.type = WIRE_LEASED;
    op->reply.leased = (struct wire_leased){ .step = req->step,
                                             .what = what_of(answer),
                                             .group = group };
    return SHD_OK;
}

const struct request request_lease = { op_lease, REQUEST_ROLE(WIRE_TRAINER) };
