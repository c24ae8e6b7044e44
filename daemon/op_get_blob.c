/* GET_BLOB: the client's own state as of the last committed step. */
#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "daemon/model.h"

int op_get_blob(struct op *op)
{
    const int r = op_find_model(op, op->req.get_blob.model);
    if (r != SHD_OK)
        return r;
    const struct model *m = op->model;
    op->reply.type = WIRE_BLOB;
    op->reply.blob = (struct wire_blob){ .step = step_collecting(m->core),
                                         .blob = { m->blob, m->blob_bytes } };
    return SHD_OK;
}
