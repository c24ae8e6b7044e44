/* COMMIT: the first decision for a sealed step is recorded with the client's blob and applied;
 * every later one is answered with the recorded one. */
#include <string.h>

#include "daemon/core/step.h"
#include "daemon/model/apply.h"
#include "daemon/model/lease_wait.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/spill.h"
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "kernels/runs.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"

/* A predecessor of this process has answered Prepare, and the sums are formed anew: wait for them.
 * The blob lies in the frame, which will be gone. */
static int wait_for_sums(struct op *op)
{
    struct wire_bytes *blob = &op->req.commit.blob;
    if (op->text == NULL && blob->bytes > 0) {
        op->text = sys_malloc(blob->bytes);
        if (op->text == NULL)
            return err_set(&op->err, SHD_ENOMEM, "no memory for a blob of %zu bytes", blob->bytes);
        memcpy(op->text, blob->data, blob->bytes);
        blob->data = (const uint8_t *)op->text;
    }
    model_wait(op->model, op);
    return SHD_PENDING;
}

static int op_commit(struct op *op)
{
    const struct wire_commit *req = &op->req.commit;
    int r = model_of(op, req->model);
    if (r != SHD_OK)
        return r;
    struct model *m = op->model;
    struct decision counts = { 0 };
    struct step_actions actions;
    enum step_committed how;
    /* Of an empty blob there may be no buffer, but it replaces the last one. */
    const struct step_blob blob = {
        .data = !req->has_blob        ? NULL
                : req->blob.bytes > 0 ? req->blob.data
                                      : (const void *)"",
        .bytes = req->has_blob ? req->blob.bytes : 0,
    };
    r = step_commit(m->core, req->step, &req->decision, blob, &counts, &how, &actions, &op->err);
    if (r == SHD_PENDING)
        return wait_for_sums(op);
    if (r != SHD_OK)
        return r;
    if (how == STEP_COMMITTED_FIRST) {
        if (!counts.skip)
            runs_hypers(m->spec, counts.lr, step_updates(m->core), m->hypers);
        board_set_step(m->board, req->step, STEP_APPLYING);
        metrics_committed(m, req->step, counts.skip);
        spill_step_over(m);
        apply_actions(m, &actions);
        lease_wait_wake(m); /* the next step's work can be handed out */
    }
    op->reply.type = WIRE_COMMITTED;
    op->reply.committed = (struct wire_committed){
        .step = req->step,
        .over = how == STEP_COMMITTED_OVER,
        .decision = counts,
    };
    return SHD_OK;
}

const struct request request_commit = { op_commit, REQUEST_ROLE(WIRE_TRAINER) };
