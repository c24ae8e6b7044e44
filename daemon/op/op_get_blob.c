/* GET_BLOB: the client's own state as of the last committed step. */
#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"

static int op_get_blob(struct op *op)
{
    const int r = model_of(op, op->req.get_blob.model);
    if (r != SHD_OK)
        return r;
    const struct model *m = op->model;
    const struct step_blob blob = step_last_blob(m->core);
    op->reply.type = WIRE_BLOB;
    op->reply.blob = (struct wire_blob){ .step = step_collecting(m->core),
                                         .blob = { blob.data, blob.bytes } };
    return SHD_OK;
}

const struct request request_get_blob = { op_get_blob, ANY_ROLE };
