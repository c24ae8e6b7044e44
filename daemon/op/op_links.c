/* Requests of a session's NCCL links: JOIN, FETCH. */
#include <inttypes.h>

#include "daemon/model/model.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "proto/gpu/comm.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

/* JOIN: connect the session's two NCCL links of a model; see links.h. */

static int op_join(struct op *op)
{
    const int r = model_of(op, op->req.join.model);
    return r == SHD_OK ? links_join(op) : r;
}

const struct request request_join = { op_join,
                                      REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_READER) };

/* FETCH: send this owner's part of a unit down the session's link, in its turn, once the step asked
 * for is published. Where that step is over, what is published now is sent all the same, so that
 * both sides go on with the next turn; the reply says which step it was. Nothing keeps an update
 * from beginning while the bytes are sent: it begins only when the step is committed, and then what
 * the worker computes from them no longer counts. */

static void sent(struct op *op, const struct comm_job *job)
{
    if (job->status != SHD_OK)
        op->err = job->why;
    op->reply.type = WIRE_FETCHED;
    op->reply.fetched.step = job->version;
    op_finish(op, job->status);
}

static int op_fetch(struct op *op)
{
    const struct wire_fetch *req = &op->req.fetch;
    const int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    const struct model *m = op->model;
    if (req->unit >= m->spec->unit_count)
        return err_set(&op->err, SHD_ERANGE, "unit %" PRIu32 " of a model with %" PRIu32, req->unit,
                       m->spec->unit_count);
    if (m->spec->codec != CODEC_NONE)
        return err_set(&op->err, SHD_ENOTSUP,
                       "model '%s' is published in codes (codec: %s), which NCCL does not send",
                       m->spec->name, codec_name(m->spec->codec));
    const struct links *links = links_find(op->session, m);
    if (links == NULL || links->down == NULL)
        return err_set(&op->err, SHD_EINVAL, "session has not joined model '%s'", m->spec->name);
    const struct comm_job job = {
        .way = COMM_SEND,
        .memory = model_published(m, req->unit),
        .bytes = m->map->slice[req->unit].elems * dtype_bytes(m->spec->publish),
        .turn = req->turn,
        .gate = { m->board, req->unit, req->step },
        .timeout_ns = links->timeout_ns,
    };
    if (job.bytes == 0)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 " has no part here", req->unit);
    const int queued = links_transfer(op, links->down, &job, sent);
    return queued == SHD_OK ? SHD_PENDING : queued;
}

const struct request request_fetch = { op_fetch,
                                       REQUEST_ROLE(WIRE_TRAINER) | REQUEST_ROLE(WIRE_READER) };
