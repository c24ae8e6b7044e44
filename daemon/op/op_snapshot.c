/* SNAPSHOT and REWIND: steps that are kept aside in memory, and going back to one. */
#include "daemon/model/rewind.h"
#include "daemon/model/snapshots.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "proto/base/status.h"

static int op_snapshot(struct op *op)
{
    if (op->session->role == WIRE_READER && op->req.snapshot.what != WIRE_SNAPSHOT_LOOK)
        return err_set(&op->err, SHD_EAUTH, "a reader keeps no snapshots");
    return snapshot_ask(op);
}

const struct request request_snapshot = { op_snapshot, ANY_ROLE };

/* A reader may find the owners apart when it opens the model, and then they go together. */
static int op_rewind(struct op *op)
{
    if (op->session->role == WIRE_READER && op->req.rewind.what != WIRE_REWIND_FOLLOW)
        return err_set(&op->err, SHD_EAUTH, "a reader does not rewind a model");
    return rewind_ask(op);
}

const struct request request_rewind = { op_rewind, ANY_ROLE };
