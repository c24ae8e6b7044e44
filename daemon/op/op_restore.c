/* RESTORE: read a model and park it, or open the one that is parked; see restore.h. */
#include "daemon/model/restore.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"

static int op_restore(struct op *op)
{
    return op->req.restore.open ? restore_open(op) : restore_begin(op);
}

const struct request request_restore = { op_restore,
                                         REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };
