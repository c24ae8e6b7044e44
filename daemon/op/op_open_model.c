/* OPEN_MODEL: create the model a spec describes, or attach to the one that is open; see open.h. */
#include <string.h>

#include "daemon/model/open.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/base/sys.h"

/* The text that is kept of the request: the spec; or the name, when it only attaches. */
static int op_open_model(struct op *op)
{
    const struct wire_open_model *req = &op->req.open_model;
    const bool attach_only = req->spec.bytes == 0;
    const size_t bytes = attach_only ? strlen(req->name) : req->spec.bytes;
    op->text = sys_malloc(bytes + 1);
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a spec of %zu bytes", bytes);
    memcpy(op->text, attach_only ? req->name : (const char *)req->spec.data, bytes);
    op->text[bytes] = '\0';
    open_model(op);
    return SHD_PENDING;
}

const struct request request_open_model = { op_open_model, ANY_ROLE };
