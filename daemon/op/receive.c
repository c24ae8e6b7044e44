/* See receive.h. */
#include "daemon/op/receive.h"

#include <inttypes.h>

#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "proto/gpu/comm.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

static void received(struct op *op, const struct comm_job *job)
{
    if (job->status == SHD_OK) {
        struct op *list = op;
        op->received = true;
        op_again(&list);
        return;
    }
    op->err = job->why;
    inbox_release_slot(op);
    op_finish(op, job->status);
}

int receive_grad(struct op *op, struct inbox *inbox)
{
    const struct wire_return *req = &op->req.return_grad;
    const struct model *m = op->model;
    const struct links *links = links_find(op->session, m);
    struct comm_job job = { .way = COMM_RECV,
                            .bytes = m->map->slice[req->unit].elems * dtype_bytes(req->dtype),
                            .turn = req->turn };
    if (links == NULL || links->up == NULL)
        return err_set(&op->err, SHD_EINVAL, "session has not joined model '%s'", m->spec->name);
    if (req->none || job.bytes == 0)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 ": nothing to be sent", req->unit);
    job.timeout_ns = links->timeout_ns;
    int r = inbox_take_slot(op, inbox);
    if (r != SHD_OK)
        return r;
    job.memory = (uint8_t *)op->inbox->segment.base + shardmap_slot_offset_bytes(m->map, req->slot);
    r = links_transfer(op, links->up, &job, received);
    if (r == SHD_OK)
        return SHD_PENDING;
    inbox_release_slot(op);
    return r;
}
