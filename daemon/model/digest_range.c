/* See digest_range.h. */
#include "daemon/model/digest_range.h"

#include <inttypes.h>
#include <stdlib.h>

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

#define ARRAYS_MAX 4u /* spec_arrays(), at most */

struct range;

struct range_copy {
    struct task task; /* first */
    struct range *range;
};

struct range_unit { /* what is asked for of one */
    uint32_t unit;
    uint32_t tensor, count; /* tensors */
    uint32_t arrays;
    uint64_t first_elem, elems; /* in the unit, that are copied of each array */
    float *values;              /* [arrays * elems], in the range's block */
    struct range_copy copies[ARRAYS_MAX];
};

struct range {
    uv_work_t work;
    struct op *op; /* borrowed: pending; owns this */
    const struct model *model;
    uint32_t unit_count;
    uint64_t step, updates, leaves;
    uint8_t (*out)[CKPT_LEAF_BYTES]; /* [leaves], in this block */
    uint32_t copying;
    int status;
    struct range_unit units[];
};

static void finish(struct range *w, int status)
{
    struct op *op = w->op;
    op_range_end(op);
    op->reply.type = WIRE_LEAVES;
    op->reply.leaves = (struct wire_leaves){ .step = w->step,
                                             .updates = w->updates,
                                             .total = w->leaves,
                                             .leaves = { w->out[0], w->leaves * CKPT_LEAF_BYTES } };
    op_finish(op, status);
}

/* Tensor after tensor, each with its arrays: the order in which the digest takes them. */
static int hash_unit(const struct range *w, const struct range_unit *u, struct ckpt_hasher *hasher,
                     uint64_t *leaf)
{
    const struct model *m = w->model;
    struct ckpt_part part;
    for (uint32_t t = u->tensor; t < u->tensor + u->count; t++) {
        if (!ckpt_part_of(m->spec, t, m->map->slice[u->unit], &part))
            continue;
        const float *x = u->values + (part.first_elem - u->first_elem);
        for (uint32_t a = 0; a < u->arrays; a++, *leaf += part.leaves)
            if (!ckpt_hash_part(hasher, &part, x + a * u->elems, w->out + *leaf))
                return err_set(&w->op->err, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    }
    return SHD_OK;
}

static void hash(uv_work_t *work)
{
    struct range *w = work->data;
    struct ckpt_hasher *hasher = NULL;
    uint64_t leaf = 0;
    w->status = ckpt_hasher_new(&hasher, &w->op->err);
    for (uint32_t i = 0; w->status == SHD_OK && i < w->unit_count; i++)
        w->status = hash_unit(w, &w->units[i], hasher, &leaf);
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

static int queue_unit(struct range *w, struct range_unit *u)
{
    struct op *op = w->op;
    const struct model *m = w->model;
    int r = SHD_OK;
    for (uint32_t a = 0; r == SHD_OK && a < u->arrays && u->elems > 0; a++) {
        struct range_copy *copy = &u->copies[a];
        const struct kern_op read = kern_read_of(model_state(m, a, u->unit),
                                                 u->first_elem - m->map->slice[u->unit].first_elem,
                                                 u->elems, u->values + a * u->elems);
        copy->range = w;
        task_init(&copy->task, op->daemon->tasks, copied);
        r = m->kern->ops->submit(m->kern, &read, &copy->task.done, &op->err);
        w->copying += r == SHD_OK;
    }
    return r;
}

/* All of them at once: no update comes between. What was queued is waited for. */
static int queue_copies(struct range *w)
{
    struct op *op = w->op;
    int r = op_range_begin(op);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; r == SHD_OK && i < w->unit_count; i++)
        r = queue_unit(w, &w->units[i]);
    if (r == SHD_EBUSY)
        op->reply.retry_ms = OPS_RETRY_MS; /* a full queue is no failure */
    if (w->copying == 0) {
        op_range_end(op);
        return r;
    }
    w->status = r;
    return SHD_PENDING;
}

/* Of each unit: from the first of the tensors asked for to the last. */
static uint64_t span_elems(const struct spec *spec, uint32_t first, uint32_t count,
                           uint32_t *ret_units)
{
    uint64_t elems = 0;
    *ret_units = 0;
    for (uint32_t t = first, from = first; t < first + count; t++) {
        const struct spec_tensor *tensor = &spec->tensors[t];
        if (t + 1 < first + count && spec->tensors[t + 1].unit == tensor->unit)
            continue;
        elems += tensor->offset_elems + tensor->elems - spec->tensors[from].offset_elems;
        from = t + 1;
        ++*ret_units;
    }
    return elems;
}

static int check(struct op *op, uint32_t *ret_units)
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
    const uint64_t elems = span_elems(spec, req->tensor, req->tensors, ret_units);
    if (elems > WIRE_RANGE_ELEMS_MAX || *ret_units > WIRE_RANGE_UNITS_MAX)
        return err_set(&op->err, SHD_ERANGE,
                       "%" PRIu32 " tensors of %" PRIu64 " elements in %" PRIu32
                       " units, at most %u in %u at once",
                       req->tensors, elems, *ret_units, WIRE_RANGE_ELEMS_MAX, WIRE_RANGE_UNITS_MAX);
    return SHD_OK;
}

/* This owner's part of a unit's tensors from `tensor` on, up to `end`; elems is 0 where it has
 * none. Returns its leaves. */
static uint64_t measure_unit(const struct model *m, uint32_t tensor, uint32_t end,
                             struct range_unit *u)
{
    uint64_t leaves = 0;
    struct ckpt_part part;
    u->unit = m->spec->tensors[tensor].unit;
    u->tensor = tensor;
    u->arrays = spec_unit_arrays(m->spec, u->unit);
    for (; tensor < end && m->spec->tensors[tensor].unit == u->unit; tensor++, u->count++) {
        if (!ckpt_part_of(m->spec, tensor, m->map->slice[u->unit], &part))
            continue;
        if (u->elems == 0)
            u->first_elem = part.first_elem;
        u->elems = part.first_elem + part.elems - u->first_elem;
        leaves += part.leaves * u->arrays;
    }
    return leaves;
}

/* Of all units; the arrays' elements together. */
static uint64_t measure(const struct wire_digest *req, struct range *w)
{
    uint64_t elems = 0;
    const uint32_t end = req->tensor + req->tensors;
    for (uint32_t t = req->tensor; t < end; t += w->units[w->unit_count++].count) {
        struct range_unit *u = &w->units[w->unit_count];
        w->leaves += measure_unit(w->model, t, end, u);
        elems += u->arrays * u->elems;
    }
    return elems;
}

/* Memory for what was measured, behind it. NULL: there is none; w is freed. */
static struct range *make_room(struct range *w, uint64_t elems)
{
    const uint64_t head_bytes = sizeof *w + w->unit_count * sizeof *w->units;
    const uint64_t leaf_bytes = w->leaves * CKPT_LEAF_BYTES;
    struct range *larger = sys_realloc(w, head_bytes + leaf_bytes + elems * sizeof(float));
    if (larger == NULL) {
        free(w);
        return NULL;
    }
    larger->out = (void *)((uint8_t *)larger + head_bytes);
    float *values = (float *)((uint8_t *)larger + head_bytes + leaf_bytes);
    for (uint32_t i = 0; i < larger->unit_count; i++) {
        larger->units[i].values = values;
        values += larger->units[i].arrays * larger->units[i].elems;
    }
    return larger;
}

int digest_range(struct op *op, uint64_t step, uint64_t updates)
{
    uint32_t units = 0;
    const int r = check(op, &units);
    if (r != SHD_OK)
        return r;
    struct range *w = sys_calloc(1, sizeof *w + units * sizeof *w->units);
    uint64_t elems = 0;
    if (w != NULL) {
        w->model = op->model;
        elems = measure(&op->req.digest, w);
    }
    const uint64_t leaves = w != NULL ? w->leaves : 0;
    if (leaves > WIRE_LEAVES_MAX) {
        free(w);
        return err_set(&op->err, SHD_ERANGE,
                       "%" PRIu32 " tensors of %" PRIu64 " leaves here, at most %u at once",
                       op->req.digest.tensors, leaves, WIRE_LEAVES_MAX);
    }
    w = w != NULL ? make_room(w, elems) : NULL;
    if (w == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for %" PRIu64 " leaves", leaves);
    w->op = op;
    w->step = step;
    w->updates = updates;
    w->work.data = w;
    op->work = w;
    if (leaves > 0)
        return queue_copies(w);
    op->reply.type = WIRE_LEAVES;
    op->reply.leaves = (struct wire_leaves){ .step = step, .updates = updates };
    return SHD_OK;
}
