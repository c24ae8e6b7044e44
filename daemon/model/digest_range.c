/* See digest_range.h. */
#include "daemon/model/digest_range.h"

#include <inttypes.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

#define ARRAYS_MAX   3u
#define RANGES_SHARE 2u /* of a session; each takes 3.5 MiB */

struct range;

struct range_copy {
    struct task task; /* first */
    struct range *range;
};

struct range {
    uv_work_t work;
    struct op *op; /* borrowed: pending; owns this */
    const struct spec *spec;
    struct slice slice;     /* of the unit */
    uint32_t tensor, count; /* tensors */
    uint32_t arrays;
    uint64_t first_elem, elems; /* in the unit, that are copied of each array */
    uint64_t step, updates, leaves;
    float *values; /* [arrays * elems], in this block */
    struct range_copy copies[ARRAYS_MAX];
    uint32_t copying;
    int status;
    uint8_t out[][CKPT_LEAF_BYTES];
};

/* The place of one that session has under way; NULL: a free one. */
static const struct session **place_of(struct op_pool *pool, const struct session *session)
{
    for (uint32_t i = 0; i < OPS_RANGES_MAX; i++)
        if (pool->ranges[i] == session)
            return &pool->ranges[i];
    return NULL;
}

static void finish(struct range *w, int status)
{
    struct op *op = w->op;
    *place_of(op->daemon->ops, op->session) = NULL;
    op->reply.type = WIRE_LEAVES;
    op->reply.leaves = (struct wire_leaves){ .step = w->step,
                                             .updates = w->updates,
                                             .total = w->leaves,
                                             .leaves = { w->out[0], w->leaves * CKPT_LEAF_BYTES } };
    op_finish(op, status);
}

/* Tensor after tensor, each with its arrays: the order in which the digest takes them. */
static void hash(uv_work_t *work)
{
    struct range *w = work->data;
    struct ckpt_hasher *hasher = NULL;
    struct ckpt_part part;
    uint64_t leaf = 0;
    w->status = ckpt_hasher_new(&hasher, &w->op->err);
    for (uint32_t t = w->tensor; w->status == SHD_OK && t < w->tensor + w->count; t++) {
        if (!ckpt_part_of(w->spec, t, w->slice, &part))
            continue;
        const float *x = w->values + (part.first_elem - w->first_elem);
        for (uint32_t a = 0; w->status == SHD_OK && a < w->arrays; a++, leaf += part.leaves)
            if (!ckpt_hash_part(hasher, &part, x + a * w->elems, w->out + leaf))
                w->status = err_set(&w->op->err, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    }
    ckpt_hasher_free(hasher);
}

static void hashed(uv_work_t *work, int cancelled)
{
    struct range *w = work->data;
    (void)cancelled; /* nobody cancels */
    if (!w->op->daemon->stopping)
        finish(w, w->status);
}

static void copied(struct task *task)
{
    struct range *w = ((struct range_copy *)task)->range;
    if (task->status != SHD_OK && w->status == SHD_OK)
        w->status = err_set(&w->op->err, task->status, "copying failed");
    if (--w->copying > 0)
        return;
    if (w->status == SHD_OK)
        uv_queue_work(w->op->daemon->loop, &w->work, hash, hashed);
    else
        finish(w, w->status);
}

/* A full queue is no failure. */
static int busy(struct op *op)
{
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY,
                   "%u digests of several tensors, %u of this session, or a full queue: ask again",
                   OPS_RANGES_MAX, RANGES_SHARE);
}

static bool has_place(const struct op *op)
{
    const struct op_pool *pool = op->daemon->ops;
    uint32_t used = 0, own = 0;
    for (uint32_t i = 0; i < OPS_RANGES_MAX; i++) {
        used += pool->ranges[i] != NULL;
        own += pool->ranges[i] == op->session;
    }
    return used < OPS_RANGES_MAX && own < RANGES_SHARE;
}

/* All of them at once: no update comes between. What was queued is waited for. */
static int queue_copies(struct range *w)
{
    struct op *op = w->op;
    const struct model *m = op->model;
    const uint32_t unit = m->spec->tensors[w->tensor].unit;
    int r = SHD_OK;
    for (uint32_t a = 0; r == SHD_OK && a < w->arrays; a++) {
        struct range_copy *copy = &w->copies[a];
        const struct kern_copy args = { w->values + a * w->elems,
                                        model_array(m, a, unit) +
                                            (w->first_elem - w->slice.first_elem),
                                        w->elems * sizeof(float) };
        copy->range = w;
        task_init(&copy->task, op->daemon->tasks, copied);
        r = kern_copy(op->daemon->kern, &args, &copy->task.done, &op->err);
        w->copying += r == SHD_OK;
    }
    if (r == SHD_EBUSY)
        r = busy(op);
    if (w->copying == 0)
        return r;
    *place_of(op->daemon->ops, NULL) = op->session;
    w->status = r;
    return SHD_PENDING;
}

static int check(struct op *op)
{
    const struct wire_digest *req = &op->req.digest;
    const struct spec *spec = op->model->spec;
    if (req->array != 0 || req->first_leaf != 0)
        return err_set(&op->err, SHD_EINVAL,
                       "%" PRIu32 " tensors from array %" PRIu32 ", leaf %" PRIu64
                       " on: of several all arrays are asked for",
                       req->tensors, req->array, req->first_leaf);
    if (req->tensors > spec->tensor_count - req->tensor)
        return err_set(&op->err, SHD_ERANGE,
                       "%" PRIu32 " tensors from %" PRIu32 " on of a model with %" PRIu32,
                       req->tensors, req->tensor, spec->tensor_count);
    const struct spec_tensor *first = &spec->tensors[req->tensor], *last = first + req->tensors - 1;
    if (first->unit != last->unit)
        return err_set(&op->err, SHD_ERANGE,
                       "tensors %" PRIu32 " to %" PRIu32 " are of several units", req->tensor,
                       req->tensor + req->tensors - 1);
    const uint64_t elems = last->offset_elems + last->elems - first->offset_elems;
    if (elems > WIRE_RANGE_ELEMS_MAX)
        return err_set(&op->err, SHD_ERANGE,
                       "%" PRIu32 " tensors of %" PRIu64 " elements, at most %u at once",
                       req->tensors, elems, WIRE_RANGE_ELEMS_MAX);
    return has_place(op) ? SHD_OK : busy(op);
}

/* This owner's part; elems is 0 where it has none. */
static void measure(const struct op *op, struct range *ret)
{
    const struct wire_digest *req = &op->req.digest;
    const struct model *m = op->model;
    const uint32_t unit = m->spec->tensors[req->tensor].unit;
    struct ckpt_part part;
    *ret = (struct range){ .spec = m->spec,
                           .slice = m->map->slice[unit],
                           .tensor = req->tensor,
                           .count = req->tensors,
                           .arrays = 1 + spec_unit_moments(m->spec, unit) };
    for (uint32_t t = req->tensor; t < req->tensor + req->tensors; t++) {
        if (!ckpt_part_of(m->spec, t, ret->slice, &part))
            continue;
        if (ret->elems == 0)
            ret->first_elem = part.first_elem;
        ret->elems = part.first_elem + part.elems - ret->first_elem;
        ret->leaves += part.leaves * ret->arrays;
    }
}

int digest_range(struct op *op, uint64_t step, uint64_t updates)
{
    struct range part;
    const int r = check(op);
    if (r != SHD_OK)
        return r;
    measure(op, &part);
    if (part.leaves > WIRE_LEAVES_MAX)
        return err_set(&op->err, SHD_ERANGE,
                       "%" PRIu32 " tensors of %" PRIu64 " leaves here, at most %u at once",
                       part.count, part.leaves, WIRE_LEAVES_MAX);
    const uint64_t head_bytes = sizeof part + part.leaves * CKPT_LEAF_BYTES;
    struct range *w = sys_malloc(head_bytes + part.arrays * part.elems * sizeof(float));
    if (w == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for %" PRIu64 " leaves", part.leaves);
    *w = part;
    w->op = op;
    w->step = step;
    w->updates = updates;
    w->work.data = w;
    w->values = (float *)((uint8_t *)w + head_bytes);
    op->work = w;
    if (part.leaves > 0)
        return queue_copies(w);
    op->reply.type = WIRE_LEAVES;
    op->reply.leaves = (struct wire_leaves){ .step = step, .updates = updates };
    return SHD_OK;
}
