/* JOIN: connect the session's two NCCL links of a model; see links.h. */
#include "daemon/model/model.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"

static int op_join(struct op *op)
{
    const int r = model_of(op, op->req.join.model);
    return r == SHD_OK ? links_join(op) : r;
}

const struct request request_join = { op_join,
                                      REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_READER) };
