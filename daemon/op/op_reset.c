/* RESET: give up what the open step has, as a worker has returned what it does not stand by. */
#include "daemon/model/model.h"
#include "daemon/model/reset.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/base/status.h"

static int op_reset(struct op *op)
{
    const int r = model_of(op, op->req.reset.model);
    if (r != SHD_OK)
        return r;
    op->reply.type = WIRE_RESET_ANSWER;
    return reset_ask(op->model, &op->req.reset, &op->reply.reset_answer, &op->err);
}

const struct request request_reset = { op_reset, REQUEST_ROLE(WIRE_TRAINER) };
