/* CREATE, PUT, FORK: a model whose start values a session puts, or takes from another; see
 * create.h. CREATE of an open model: values that take the place of what it has; see put.h. */
#include <inttypes.h>

#include "daemon/core/step.h"
#include "daemon/model/adopt.h"
#include "daemon/model/create.h"
#include "daemon/model/drop.h"
#include "daemon/model/model.h"
#include "daemon/model/put.h"
#include "daemon/model/reset.h"
#include "daemon/model/verified.h"
#include "daemon/net/spec_in.h"
#include "daemon/op/requests.h"

/* Gradients that were given up, of which this owner has not heard yet, are in no put's way: its
 * step may have begun again meanwhile. But not where the model went back: an owner that has not
 * gone yet drops what it was given for the put, and this one, first to be asked, would commit it.
 */
static int begin_put(struct op *op)
{
    const struct wire_create *req = &op->req.create;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    if (req->attempt > 0 && req->attempt < step_rewound(op->model->core))
        return err_set(&op->err, SHD_ERESET,
                       "step %" PRIu64 " was given up: the model went back to an earlier one",
                       req->step);
    reset_follow(op->model, req->step, req->attempt);
    const int begun = put_begin(op);
    if (begun == SHD_OK || begun == SHD_PENDING)
        verified_put(op->model, req->step);
    return begun;
}

static int begin_it(struct op *op)
{
    const int r = adopt_check_name(op->daemon, op->req.create.name, &op->err);
    if (r == SHD_OK && (op->req.create.owner > 0 || op->req.create.twin))
        drop_orphan(op, op->req.create.name);
    return r == SHD_OK ? create_begin(op) : r;
}

static int op_create(struct op *op)
{
    struct wire_create *req = &op->req.create;
    if (req->what == WIRE_CREATE_FULL)
        return create_full(op);
    if (req->what == WIRE_CREATE_OPEN)
        return create_open(op);
    if (req->what == WIRE_CREATE_DROP)
        return create_drop(op);
    if (req->what == WIRE_CREATE_PUT)
        return begin_put(op);
    if (req->what == WIRE_CREATE_PUT_FULL)
        return put_full(op);
    if (req->what == WIRE_CREATE_PUT_DROP)
        return put_drop(op);
    return spec_in(op, &req->spec, &req->spec_at, &req->name, begin_it);
}

const struct request request_create = { op_create,
                                        REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };

static int op_put(struct op *op)
{
    return create_put(op);
}

const struct request request_fork = { create_fork,
                                      REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };

const struct request request_put = { op_put,
                                     REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };
