/* SHOW: what this owner's part of a range of a tensor comes to, as of the step that the reply
 * names; while a step is being applied the request waits. See show.h. */
#include <inttypes.h>

#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "daemon/model/show.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/spec/spec.h"

_Static_assert(WIRE_SHOW_GRAD == SHOW_GRAD && WIRE_SHOW_UPDATE == SHOW_UPDATE &&
                   WIRE_SHOW_EMA == SHOW_EMA && WIRE_VALUES_MAX == SHOW_VALUES_MAX,
               "messages and what is counted have one number for each array");

static void answer(struct op *op, const struct shown *shown)
{
    op->reply.type = WIRE_SHOWN;
    op->reply.shown = (struct wire_shown){ .step = shown->step,
                                           .updates = shown->updates,
                                           .of_step = shown->of_step,
                                           .groups = shown->groups };
    if (shown->elems > 0)
        op->reply.shown.tally = (struct wire_bytes){ (const uint8_t *)&shown->tally, TALLY_BYTES };
    if (shown->values != NULL)
        op->reply.shown.values = (struct wire_bytes){ (const uint8_t *)shown->values,
                                                      shown->elems * sizeof(float) };
}

static void show_over(void *ctx, int status, const struct shd_err *e)
{
    struct op *op = ctx;
    op_range_end(op);
    if (status == SHD_OK)
        answer(op, shown_of(op->work));
    else
        op->err = *e;
    if (status == SHD_EBUSY)
        op->reply.retry_ms = OPS_RETRY_MS;
    op_finish(op, status);
}

static int check(struct op *op, const struct spec *spec)
{
    const struct wire_show *req = &op->req.show;
    if (req->tensor >= spec->tensor_count)
        return err_set(&op->err, SHD_ERANGE, "tensor %" PRIu32 " of a model with %" PRIu32,
                       req->tensor, spec->tensor_count);
    const uint64_t elems = spec->tensors[req->tensor].elems;
    if (req->first >= elems || req->elems > elems - req->first)
        return err_set(&op->err, SHD_ERANGE,
                       "elements %" PRIu64 " + %" PRIu64 " of a tensor with %" PRIu64, req->first,
                       req->elems, elems);
    if (req->values && req->elems > WIRE_VALUES_MAX)
        return err_set(&op->err, SHD_ERANGE, "values of %" PRIu64 " elements, at most %u at once",
                       req->elems, WIRE_VALUES_MAX);
    return SHD_OK;
}

static int op_show(struct op *op)
{
    const struct wire_show *req = &op->req.show;
    int r = model_of(op, req->model);
    if (r == SHD_OK)
        r = check(op, op->model->spec);
    if (r != SHD_OK)
        return r;
    if (step_phase(op->model->core) == STEP_APPLYING) {
        model_wait(op->model, op);
        return SHD_PENDING;
    }
    const struct show_ask ask = { .model = op->model,
                                  .tensor = req->tensor,
                                  .array = (uint32_t)req->array,
                                  .first = req->first,
                                  .elems = req->elems,
                                  .values = req->values };
    const struct show_done done = { show_over, op };
    struct show *show = NULL;
    r = op_range_begin(op);
    if (r != SHD_OK)
        return r;
    r = show_begin(&ask, &done, &show, &op->err);
    op->work = show; /* freed with the op */
    if (r == SHD_PENDING)
        return r;
    op_range_end(op);
    if (r == SHD_OK)
        answer(op, shown_of(show));
    if (r == SHD_EBUSY)
        op->reply.retry_ms = OPS_RETRY_MS;
    return r;
}

const struct request request_show = { op_show, ANY_ROLE };
