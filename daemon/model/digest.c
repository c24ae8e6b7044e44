/* See digest.h. */
#include "daemon/model/digest.h"

#include <inttypes.h>

#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

struct digest_work {
    struct task task;
    struct op *op;
    uint64_t step, updates, total;
    uint64_t leaves;
    uint8_t out[][32];
};

static void hashed(struct task *task)
{
    struct digest_work *w = (struct digest_work *)task;
    struct op *op = w->op;
    op->reply.type = WIRE_LEAVES;
    op->reply.leaves = (struct wire_leaves){ .step = w->step,
                                             .updates = w->updates,
                                             .total = w->total,
                                             .leaves = { w->out[0], w->leaves * 32 } };
    op_finish(op,
              task->status == SHD_OK ? SHD_OK : err_set(&op->err, task->status, "hashing failed"));
}

struct digest_part digest_part(const struct model *m, uint32_t tensor)
{
    const struct spec_tensor *t = &m->spec->tensors[tensor];
    const struct slice slice = m->map->slice[t->unit];
    uint64_t first = 0;
    const uint64_t elems = layout_intersect(slice, t->offset_elems, t->elems, &first);
    if (elems == 0)
        return (struct digest_part){ 0 };
    const uint64_t head = SHD_BLOCK_ELEMS - first % SHD_BLOCK_ELEMS;
    return (struct digest_part){ .first_elem = first - slice.first_elem,
                                 .elems = elems,
                                 .head_elems = head,
                                 .leaves = kern_hash_leaves(head, elems) };
}

int digest_begin(struct op *op, const struct digest_part *part)
{
    const struct wire_digest *req = &op->req.digest;
    struct model *m = op->model;
    struct kern *kern = op->daemon->kern;
    uint64_t leaves = part->leaves - req->first_leaf;
    if (leaves > WIRE_LEAVES_MAX)
        leaves = WIRE_LEAVES_MAX;
    struct digest_work *w = sys_malloc(sizeof *w + leaves * 32);
    if (w == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for %" PRIu64 " leaves", leaves);
    *w = (struct digest_work){ .op = op,
                               .step = step_now(m->core),
                               .updates = step_updates(m->core),
                               .total = part->leaves,
                               .leaves = leaves };
    op->work = w;
    task_init(&w->task, op->daemon->tasks, hashed);
    /* Leaf 0 has head_elems elements, each further one a block. */
    const uint64_t skip = req->first_leaf == 0
                              ? 0
                              : part->head_elems + (req->first_leaf - 1) * SHD_BLOCK_ELEMS;
    const uint64_t head = req->first_leaf == 0 ? part->head_elems : SHD_BLOCK_ELEMS;
    uint64_t elems = head + (leaves - 1) * SHD_BLOCK_ELEMS;
    if (elems > part->elems - skip)
        elems = part->elems - skip;
    struct kern_hash hash = kern_hash_of(
        model_state(m, req->array, m->spec->tensors[req->tensor].unit), part->first_elem + skip,
        elems);
    hash.head_elems = head;
    hash.out = w->out;
    const int r = kern_hash(kern, &hash, &w->task.done, &op->err);
    return r == SHD_OK ? SHD_PENDING : r;
}
