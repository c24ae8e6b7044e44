/* LEASE: work of a step that nobody does yet, please; see lease_wait.h. */
#include "daemon/model/drain.h"
#include "daemon/model/lease_wait.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "proto/base/check.h"

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
    CHECK(false); /* who waits is not answered */
    return WIRE_LEASED_OVER;
}

static int op_lease(struct op *op)
{
    const struct wire_lease *req = &op->req.lease;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    if (op->session->state != SESSION_OPEN) /* it ended while others were being asked */
        return err_set(&op->err, SHD_EGONE, "session ended");
    if (drain_holds(op, req->step))
        return SHD_PENDING;
    uint32_t group = 0;
    const enum lease_answer answer = lease_wait_ask(op, &group);
    if (answer == LEASE_WAIT)
        return SHD_PENDING;
    if (answer == LEASE_GROUP)
        metrics_leased(op, group);
    op->reply.type = WIRE_LEASED;
    op->reply.leased = (struct wire_leased){ .step = req->step,
                                             .what = what_of(answer),
                                             .group = group };
    return SHD_OK;
}

const struct request request_lease = { op_lease, REQUEST_ROLE(WIRE_TRAINER) };
