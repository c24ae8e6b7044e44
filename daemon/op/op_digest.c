/* DIGEST: leaves of one state array of one tensor, or of several tensors, as of the step that the
 * reply names; while a step is being applied the request waits. See digest.h, digest_range.h. */
#include <inttypes.h>

#include "daemon/core/step.h"
#include "daemon/model/digest.h"
#include "daemon/model/digest_range.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/spec/spec.h"

static int op_digest(struct op *op)
{
    const struct wire_digest *req = &op->req.digest;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    const struct model *m = op->model;
    if (req->tensor >= m->spec->tensor_count)
        return err_set(&op->err, SHD_ERANGE, "tensor %" PRIu32 " of a model with %" PRIu32,
                       req->tensor, m->spec->tensor_count);
    const uint32_t arrays = spec_unit_arrays(m->spec, m->spec->tensors[req->tensor].unit);
    if (req->array >= arrays)
        return err_set(&op->err, SHD_ERANGE, "array %" PRIu32 " of a state with %" PRIu32,
                       req->array, arrays);
    if (step_phase(m->core) == STEP_APPLYING) {
        model_wait(op->model, op);
        return SHD_PENDING;
    }
    if (req->tensors > 0)
        return digest_range(op, step_now(m->core), step_updates(m->core));
    const struct digest_part part = digest_part(m, req->tensor);
    if (req->first_leaf < part.leaves)
        return digest_begin(op, &part);
    op->reply.type = WIRE_LEAVES;
    op->reply.leaves = (struct wire_leaves){ .step = step_now(m->core),
                                             .updates = step_updates(m->core),
                                             .total = part.leaves };
    return SHD_OK;
}

const struct request request_digest = { op_digest, ANY_ROLE };
