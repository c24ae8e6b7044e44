/* The host backend's operations: check the arguments, queue the work. Nothing is computed on the
 * caller's thread. */
#include <inttypes.h>
#include <math.h>
#include <stddef.h>

#include "kernels/cpu/trail.h"
#include "proto/check.h"

/* What a thread takes at a time, and the least worth waking another one for: some 20 us of memory
 * traffic or of hashing. Whole blocks, since sums go by block. */
#define CHUNK_ELEMS  KERN_CHUNK_ELEMS
#define CHUNK_LEAVES UINT64_C(8)
_Static_assert(CHUNK_ELEMS % SHD_BLOCK_ELEMS == 0, "chunks are whole blocks");

static struct cpu_kern *cpu_kern_of(struct kern *k)
{
    return (struct cpu_kern *)k;
}

/* An op over elems elements. */
static struct cpu_op elems_op(uint64_t elems, struct kern_done *done)
{
    return (struct cpu_op){
        .count = elems,
        .chunk = CHUNK_ELEMS,
        .done = done,
    };
}

static int check_elems(const char *op, uint64_t elems, uint64_t multiple, struct shd_err *e)
{
    if (elems > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_ERANGE, "%s: %" PRIu64 " elements, the limit is %" PRIu64, op, elems,
                       (uint64_t)SHD_MODEL_ELEMS_MAX);
    if (elems % multiple != 0)
        return err_set(e, SHD_ERANGE, "%s: %" PRIu64 " elements are no multiple of %" PRIu64, op,
                       elems, multiple);
    return SHD_OK;
}

/* An array of at least one element of dtype. */
static int check_array(const char *op, const char *name, const void *array, enum shd_dtype dtype,
                       struct shd_err *e)
{
    if (!dtype_valid((uint64_t)dtype))
        return err_set(e, SHD_EINVAL, "%s: %s has unknown dtype %d", op, name, (int)dtype);
    if (array == NULL)
        return err_set(e, SHD_EINVAL, "%s: %s is NULL", op, name);
    if ((uintptr_t)array % dtype_bytes(dtype) != 0)
        return err_set(e, SHD_EINVAL, "%s: %s at %p is not aligned to %s", op, name, array,
                       dtype_name(dtype));
    return SHD_OK;
}

static int fill_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    t->kern->isa->fill(&op->u.fill, r);
    return SHD_OK;
}

static int check_fill(const struct kern_fill *a, struct shd_err *e)
{
    int r = check_elems("fill", a->elems, 1, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("fill", "out", a->out, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    if (a->first_index > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_ERANGE, "fill: first index %" PRIu64 ", the limit is %" PRIu64,
                       a->first_index, (uint64_t)SHD_MODEL_ELEMS_MAX);
    switch (a->kind) {
    case KERN_FILL_CONST:
        return SHD_OK;
    case KERN_FILL_NORMAL:
        if (!isfinite(a->a) || !(a->b >= 0) || !isfinite(a->b))
            return err_set(e, SHD_ERANGE, "fill: normal of mean %g and standard deviation %g",
                           (double)a->a, (double)a->b);
        return SHD_OK;
    case KERN_FILL_UNIFORM:
        if (!isfinite(a->a) || !isfinite(a->b) || !(a->a < a->b))
            return err_set(e, SHD_ERANGE, "fill: uniform in [%g, %g)", (double)a->a, (double)a->b);
        return SHD_OK;
    }
    return err_set(e, SHD_EINVAL, "fill: unknown kind %d", (int)a->kind);
}

static int cpu_fill(struct kern *k, const struct kern_fill *a, struct kern_done *done,
                    struct shd_err *e)
{
    const int r = check_fill(a, e);
    if (r != SHD_OK)
        return r;
    struct cpu_op op = elems_op(a->elems, done);
    op.run = fill_run;
    op.u.fill = *a;
    return queue_push(cpu_kern_of(k), &op, e);
}

static int cast_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    t->kern->isa->cast(&op->u.cast, r);
    return SHD_OK;
}

static int cpu_cast(struct kern *k, const struct kern_cast *a, struct kern_done *done,
                    struct shd_err *e)
{
    int r = check_elems("cast", a->elems, 1, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("cast", "out", a->out, a->out_dtype, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("cast", "in", a->in, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    struct cpu_op op = elems_op(a->elems, done);
    op.run = cast_run;
    op.u.cast = *a;
    return queue_push(cpu_kern_of(k), &op, e);
}

/* A trail for arrays of elems elements in its segment; what the segment's size would tell is
 * unknown here. */
static int check_trail(const char *op, const struct kern_trail *t,
                       const struct trail_arrays *arrays, uint64_t elems, struct shd_err *e)
{
    if (t->area == NULL)
        return SHD_OK;
    if ((uintptr_t)t->area % _Alignof(struct kern_trail_area) != 0)
        return err_set(e, SHD_EINVAL, "%s: trail area at %p is not aligned to %zu", op,
                       (void *)t->area, _Alignof(struct kern_trail_area));
    if (t->op < 1 || t->op > KERN_OP_MAX)
        return err_set(e, SHD_ERANGE, "%s: op %" PRIu64 " of a trail, it is 1 to %" PRIu64, op,
                       t->op, KERN_OP_MAX);
    if (elems == 0)
        return SHD_OK;
    if (t->chunks == NULL || t->first_chunk > SHD_MODEL_ELEMS_MAX)
        return err_set(e, SHD_EINVAL, "%s: chunk words of a trail at %p, from %" PRIu64, op,
                       (void *)t->chunks, t->first_chunk);
    const int r = check_array(op, "base of the trail", t->base, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; i < arrays->count; i++)
        if ((uintptr_t)arrays->array[i] < (uintptr_t)t->base)
            return err_set(e, SHD_EINVAL, "%s: array %" PRIu32 " at %p lies before its base %p", op,
                           i, (void *)arrays->array[i], t->base);
    return SHD_OK;
}

static void set_trail(struct cpu_op *op, const struct kern_trail *t)
{
    if (t->area == NULL)
        return;
    op->by_chunk = true;
    op->done_word = t->done;
    op->done_value = t->done_value;
}

/* One chunk with a trail, from where it stands. A sum that a dead process had begun is lost: then
 * the rest goes without, and the chunk is summed once it is complete. */
static int accumulate_chunk(const struct kern_accumulate *a, struct cpu_thread *t,
                            struct cpu_range r)
{
    const struct cpu_isa *isa = t->kern->isa;
    uint64_t done;
    const int status = trail_resume(&a->trail, r, &done);
    if (status != SHD_OK)
        return status;
    if (a->first && done < r.count)
        done = 0; /* a copy: the whole chunk again */
    if (done % TRAIL_GROUP_ELEMS != 0)
        return SHD_ESEGMENT;

    struct trail_record *rec = a->first ? NULL : &a->trail.area->records[t->index];
    struct kern_accumulate rest = *a;
    if (done > 0)
        rest.sum = NULL;
    if (done < r.count) {
        if (rec != NULL)
            trail_begin(rec, &a->trail, r, done, &(struct trail_arrays){ { a->acc }, 1 });
        isa->accumulate(&rest, (struct cpu_range){ r.first + done, r.count - done }, &t->sum, rec);
        trail_end(rec, &a->trail, r);
    }
    if (done > 0 && a->sum != NULL)
        isa->sumsq(&(struct kern_sumsq){ .x = a->acc, .elems = a->elems }, r, &t->sum);
    return SHD_OK;
}

static int accumulate_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    const struct kern_accumulate *a = &op->u.accumulate;
    if (a->trail.area != NULL)
        return accumulate_chunk(a, t, r);
    t->kern->isa->accumulate(a, r, &t->sum, NULL);
    return SHD_OK;
}

static int cpu_accumulate(struct kern *k, const struct kern_accumulate *a, struct kern_done *done,
                          struct shd_err *e)
{
    int r = check_elems("accumulate", a->elems, SHD_BLOCK_ELEMS, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("accumulate", "acc", a->acc, SHD_F32, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("accumulate", "grad", a->grad, a->grad_dtype, e);
    if (r == SHD_OK)
        r = check_trail("accumulate", &a->trail, &(struct trail_arrays){ { a->acc }, 1 }, a->elems,
                        e);
    if (r != SHD_OK)
        return r;
    struct cpu_op op = elems_op(a->elems, done);
    op.run = accumulate_run;
    op.u.accumulate = *a;
    op.sum = a->sum;
    set_trail(&op, &a->trail);
    return queue_push(cpu_kern_of(k), &op, e);
}

static int sumsq_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    t->kern->isa->sumsq(&op->u.sumsq, r, &t->sum);
    return SHD_OK;
}

static int cpu_sumsq(struct kern *k, const struct kern_sumsq *a, struct kern_done *done,
                     struct shd_err *e)
{
    int r = check_elems("sumsq", a->elems, SHD_BLOCK_ELEMS, e);
    if (r == SHD_OK && a->elems > 0)
        r = check_array("sumsq", "x", a->x, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    if (a->sum == NULL)
        return err_set(e, SHD_EINVAL, "sumsq: sum is NULL");
    struct cpu_op op = elems_op(a->elems, done);
    op.run = sumsq_run;
    op.u.sumsq = *a;
    op.sum = a->sum;
    return queue_push(cpu_kern_of(k), &op, e);
}

/* Runs ascending, apart, inside the slice, each with a group that exists. */
static int check_runs(const char *op, const struct kern_update *a, struct shd_err *e)
{
    if (a->run_count > 0 && (a->runs == NULL || a->hypers == NULL))
        return err_set(e, SHD_EINVAL, "%s: %" PRIu32 " runs, but %s is NULL", op, a->run_count,
                       a->runs == NULL ? "runs" : "hypers");
    uint64_t end = 0;
    for (uint32_t i = 0; i < a->run_count; i++) {
        const struct kern_run *run = &a->runs[i];
        if (run->first_elem > a->elems || run->elems > a->elems - run->first_elem)
            return err_set(e, SHD_ERANGE,
                           "%s: run %" PRIu32 " is %" PRIu64 "+%" PRIu64 ", the slice has %" PRIu64
                           " elements",
                           op, i, run->first_elem, run->elems, a->elems);
        if (run->first_elem < end)
            return err_set(e, SHD_ERANGE,
                           "%s: run %" PRIu32 " begins at %" PRIu64 ", before %" PRIu64
                           ", where the last one ends",
                           op, i, run->first_elem, end);
        if (run->hyper >= a->hyper_count)
            return err_set(e, SHD_ERANGE, "%s: run %" PRIu32 " has group %" PRIu32 " of %" PRIu32,
                           op, i, run->hyper, a->hyper_count);
        end = run->first_elem + run->elems;
    }
    return SHD_OK;
}

static struct trail_arrays update_arrays(const struct kern_update *a, bool has_v)
{
    return (struct trail_arrays){ { a->param, a->m, a->v }, has_v ? 3 : 2 };
}

static int check_update(const char *op, const struct kern_update *a, bool has_v, struct shd_err *e)
{
    const struct trail_arrays changed = update_arrays(a, has_v);
    int r = check_elems(op, a->elems, SHD_BLOCK_ELEMS, e);
    if (r == SHD_OK)
        r = check_trail(op, &a->trail, &changed, a->elems, e);
    if (r != SHD_OK || a->elems == 0)
        return r != SHD_OK ? r : check_runs(op, a, e);
    const struct {
        const char *name;
        const void *array;
        enum shd_dtype dtype;
    } arrays[] = {
        { "param", a->param, SHD_F32 },        { "m", a->m, SHD_F32 },
        { "grad", a->grad, SHD_F32 },          { "publish", a->publish, a->publish_dtype },
        { "v", has_v ? a->v : a->m, SHD_F32 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(arrays) && r == SHD_OK; i++)
        r = check_array(op, arrays[i].name, arrays[i].array, arrays[i].dtype, e);
    return r == SHD_OK ? check_runs(op, a, e) : r;
}

/* AdamW divides by the bias corrections. */
static int check_bias(const struct kern_update *a, struct shd_err *e)
{
    for (uint32_t i = 0; i < a->run_count; i++) {
        const struct kern_hyper *h = &a->hypers[a->runs[i].hyper];
        if (!(h->bias1 > 0 && h->bias1 <= 1) || !(h->bias2 > 0 && h->bias2 <= 1))
            return err_set(e, SHD_ERANGE,
                           "adamw: group %" PRIu32 " has bias corrections %g and %g, not in (0, 1]",
                           a->runs[i].hyper, (double)h->bias1, (double)h->bias2);
    }
    return SHD_OK;
}

static int push_update(struct kern *k, const struct kern_update *a, struct kern_done *done,
                       int (*run)(const struct cpu_op *op, struct cpu_thread *t,
                                  struct cpu_range r),
                       struct shd_err *e)
{
    struct cpu_op op = elems_op(a->elems, done);
    op.run = run;
    op.u.update = *a;
    set_trail(&op, &a->trail);
    return queue_push(cpu_kern_of(k), &op, e);
}

/* One range with an instruction set's update; with a trail it is a chunk, from where it stands. */
static int update_run(const struct kern_update *a, struct cpu_thread *t, struct cpu_range r,
                      bool has_v,
                      void (*update)(const struct kern_update *a, struct cpu_range r,
                                     struct trail_record *rec))
{
    if (a->trail.area == NULL) {
        update(a, r, NULL);
        return SHD_OK;
    }
    uint64_t done;
    const int status = trail_resume(&a->trail, r, &done);
    if (status != SHD_OK || done == r.count)
        return status;
    struct trail_record *rec = &a->trail.area->records[t->index];
    const struct trail_arrays arrays = update_arrays(a, has_v);
    trail_begin(rec, &a->trail, r, done, &arrays);
    update(a, (struct cpu_range){ r.first + done, r.count - done }, rec);
    trail_end(rec, &a->trail, r);
    return SHD_OK;
}

static int adamw_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    return update_run(&op->u.update, t, r, true, t->kern->isa->adamw);
}

static int cpu_adamw(struct kern *k, const struct kern_update *a, struct kern_done *done,
                     struct shd_err *e)
{
    int r = check_update("adamw", a, true, e);
    if (r == SHD_OK)
        r = check_bias(a, e);
    return r == SHD_OK ? push_update(k, a, done, adamw_run, e) : r;
}

static int sgd_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    return update_run(&op->u.update, t, r, false, t->kern->isa->sgd);
}

static int cpu_sgd(struct kern *k, const struct kern_update *a, struct kern_done *done,
                   struct shd_err *e)
{
    const int r = check_update("sgd", a, false, e);
    return r == SHD_OK ? push_update(k, a, done, sgd_run, e) : r;
}

static int lion_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    return update_run(&op->u.update, t, r, false, t->kern->isa->lion);
}

static int cpu_lion(struct kern *k, const struct kern_update *a, struct kern_done *done,
                    struct shd_err *e)
{
    const int r = check_update("lion", a, false, e);
    return r == SHD_OK ? push_update(k, a, done, lion_run, e) : r;
}

static int cpu_hash(struct kern *k, const struct kern_hash *a, struct kern_done *done,
                    struct shd_err *e)
{
    int r = check_elems("hash", a->elems, 1, e);
    if (r != SHD_OK)
        return r;
    if (a->elems == 0)
        return err_set(e, SHD_ERANGE, "hash: of no elements");
    if (a->head_elems < 1 || a->head_elems > SHD_BLOCK_ELEMS)
        return err_set(e, SHD_ERANGE, "hash: a first piece of %" PRIu64 " elements, not of 1 to %u",
                       a->head_elems, SHD_BLOCK_ELEMS);
    r = check_array("hash", "x", a->x, SHD_F32, e);
    if (r != SHD_OK)
        return r;
    if (a->out == NULL)
        return err_set(e, SHD_EINVAL, "hash: out is NULL");
    const struct cpu_op op = {
        .run = hash_run,
        .u.hash = *a,
        .count = kern_hash_leaves(a->head_elems, a->elems),
        .chunk = CHUNK_LEAVES,
        .done = done,
    };
    return queue_push(cpu_kern_of(k), &op, e);
}

/* name and free are the device's: cpu.c sets them. */
const struct kern_ops cpu_ops = {
    .fill = cpu_fill,
    .cast = cpu_cast,
    .accumulate = cpu_accumulate,
    .sumsq = cpu_sumsq,
    .adamw = cpu_adamw,
    .sgd = cpu_sgd,
    .lion = cpu_lion,
    .hash = cpu_hash,
};
