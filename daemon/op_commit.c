/* COMMIT: the first decision for a sealed step is recorded with the client's blob and applied;
 * every later one is answered with the recorded one. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/apply.h"
#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "kernels/runs.h"
#include "proto/sys.h"

/* Room for the blob first: after the decision is recorded nothing may fail. */
static int reserve_blob(struct op *op)
{
    struct model *m = op->model;
    const size_t bytes = op->req.commit.blob.bytes;
    if (!op->req.commit.has_blob || bytes <= m->blob_capacity)
        return SHD_OK;
    uint8_t *grown = sys_realloc(m->blob, bytes);
    if (grown == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a blob of %zu bytes", bytes);
    m->blob = grown;
    m->blob_capacity = bytes;
    return SHD_OK;
}

int op_commit(struct op *op)
{
    const struct wire_commit *req = &op->req.commit;
    int r = op_find_model(op, req->model);
    if (r == SHD_OK)
        r = reserve_blob(op);
    if (r != SHD_OK)
        return r;
    struct model *m = op->model;
    const struct step_decision asked = { .skip = req->decision.skip,
                                         .scale = req->decision.scale,
                                         .lr = req->decision.lr,
                                         .loss_scale = req->decision.loss_scale,
                                         .good_steps = req->decision.good_steps };
    struct step_decision counts = { 0 };
    struct step_actions actions;
    enum step_committed how;
    r = step_commit(m->core, req->step, &asked, &counts, &how, &actions, &op->err);
    if (r != SHD_OK)
        return r;
    if (how == STEP_COMMITTED_FIRST) {
        if (req->has_blob) {
            if (req->blob.bytes > 0) /* of an empty one there may be no buffer */
                memcpy(m->blob, req->blob.data, req->blob.bytes);
            m->blob_bytes = req->blob.bytes;
        }
        if (!counts.skip)
            runs_hypers(m->spec, counts.lr, step_updates(m->core), m->hypers);
        board_set_step(m->board, req->step, STEP_APPLYING);
        apply_actions(m, &actions);
    }
    op->reply.type = WIRE_COMMITTED;
    op->reply.committed = (struct wire_committed){
        .step = req->step,
        .over = how == STEP_COMMITTED_OVER,
        .decision = dispatch_decision(&counts),
    };
    return SHD_OK;
}
