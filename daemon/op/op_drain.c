/* DRAIN: see drain.h. */
#include "daemon/base/state.h"
#include "daemon/model/drain.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"

static int op_drain(struct op *op)
{
    const struct daemon *d = op->daemon;
    if (d->drain_session != 0 && d->drain_session != op->session->id)
        return err_set(&op->err, SHD_EBUSY, "device %s is being drained by another session",
                       d->device);
    return op->req.drain.off ? drain_off(op) : drain_on(op);
}

const struct request request_drain = { op_drain, ANY_ROLE };
