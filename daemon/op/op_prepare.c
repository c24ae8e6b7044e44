/* PREPARE: the exact sum of squares of a step's gradients, once all of them are in. */
#include <string.h>

#include "daemon/base/state.h"
#include "daemon/core/step.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"

static int op_prepare(struct op *op)
{
    const struct wire_prepare *req = &op->req.prepare;
    int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    metrics_prepare_asked(op);
    struct step_prepared p;
    r = step_prepare(op->model->core, req->step, &p, &op->err);
    if (r == SHD_PENDING)
        model_wait(op->model, op);
    if (r != SHD_OK)
        return r;
    op->reply.type = WIRE_PREPARED;
    op->reply.prepared = (struct wire_prepared){ .step = p.step,
                                                 .over = p.over,
                                                 .finite = p.finite,
                                                 .sum = p.sum,
                                                 .metric_count = p.metric_count,
                                                 .has_decision = p.has_decision,
                                                 .decision = p.decision };
    memcpy(op->reply.prepared.metrics, p.metrics, sizeof p.metrics);
    return SHD_OK;
}

const struct request request_prepare = { op_prepare, REQUEST_ROLE(WIRE_TRAINER) };
