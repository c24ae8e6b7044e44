/* Requests of a whole model: OPEN_MODEL, DROP, MOVE, GET, GET_BLOB, PIN, UNPIN. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/core/step.h"
#include "daemon/model/drop.h"
#include "daemon/model/model.h"
#include "daemon/model/moved.h"
#include "daemon/model/open.h"
#include "daemon/model/pin.h"
#include "daemon/model/stage.h"
#include "daemon/net/op.h"
#include "daemon/net/spec_in.h"
#include "daemon/op/requests.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

/* OPEN_MODEL: create the model a spec describes, or attach to the one that is open; see open.h. */

/* The name is kept of a request that only attaches. */
static int open_it(struct op *op)
{
    op->text = sys_strdup(op->req.open_model.name);
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to open a model");
    open_model(op);
    return SHD_PENDING;
}

static int op_open_model(struct op *op)
{
    struct wire_open_model *req = &op->req.open_model;
    return spec_in(op, &req->spec, &req->spec_at, &req->name, open_it);
}

const struct request request_open_model = { op_open_model, ANY_ROLE };

/* DROP: hold a model, drop it, let it be, or wait for its memory; see drop.h. */

const struct request request_drop = { drop_ask,
                                      REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_ADMIN) };

/* MOVE: say where a model is once it is dropped, or ask; see moved.h. */

const struct request request_move = { moved_ask, ANY_ROLE };

/* GET: an array of a unit as of the step that the reply names; while a step is being applied the
 * request waits. See stage.h. */

static int op_get(struct op *op)
{
    const struct wire_get *req = &op->req.get;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    const struct model *m = op->model;
    if (req->unit >= m->spec->unit_count)
        return err_set(&op->err, SHD_ERANGE, "unit %" PRIu32 " of a model with %" PRIu32, req->unit,
                       m->spec->unit_count);
    const struct spec_unit *unit = &m->spec->units[req->unit];
    if (req->array > 0 && unit->frozen)
        return err_set(&op->err, SHD_EINVAL, "unit '%s' is frozen: it has no moments", unit->name);
    if (req->array > 0 && unit->mean)
        return err_set(&op->err, SHD_EINVAL, "unit '%s' is a mean: it has no moments", unit->name);
    if (req->array >= m->map->arrays)
        return err_set(&op->err, SHD_EINVAL,
                       "array %" PRIu32 " of model '%s', whose state has %" PRIu32, req->array,
                       m->spec->name, m->map->arrays);
    if (step_phase(m->core) == STEP_APPLYING) {
        model_wait(op->model, op);
        return SHD_PENDING;
    }
    op->reply.got.step = step_now(m->core);
    op->reply.got.updates = step_unit_updates(m->core, req->unit);
    return stage_get(op);
}

const struct request request_get = { op_get, ANY_ROLE };

/* GET_BLOB: the client's own state as of the last committed step. */

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

/* PIN, UNPIN: see pin.h. */

static int op_pin(struct op *op)
{
    const int r = model_of(op, op->req.pin.model);
    return r == SHD_OK ? pin_take(op) : r;
}

const struct request request_pin = { op_pin, ANY_ROLE };

static int op_unpin(struct op *op)
{
    const int r = model_of(op, op->req.unpin.model);
    return r == SHD_OK ? pin_let_go(op) : r;
}

const struct request request_unpin = { op_unpin, ANY_ROLE };
