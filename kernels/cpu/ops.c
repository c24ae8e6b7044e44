/* The host backend's operations: check the arguments, queue the work. Nothing is computed on the
 * caller's thread. */
#include <string.h>

#include "kernels/check_args.h"
#include "kernels/cpu/trail.h"
#include "proto/base/check.h"

/* What a thread takes at a time, and the least worth waking another one for: some 20 us of memory
 * traffic or of hashing. Whole blocks, since sums go by block. */
#define CHUNK_ELEMS  KERN_CHUNK_ELEMS
#define CHUNK_LEAVES UINT64_C(8)
_Static_assert(CHUNK_ELEMS % SHD_BLOCK_ELEMS == 0, "chunks are whole blocks");
_Static_assert(_Alignof(struct kern_trail_area) == 128, "as check_args.c has it");

static const struct check_rules rules = { .chunk_words = true };

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

static int fill_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    t->kern->isa->fill(&op->u.fill, r);
    return SHD_OK;
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
    const int r = check_cast(a, e);
    if (r != SHD_OK)
        return r;
    struct cpu_op op = elems_op(a->elems, done);
    op.run = cast_run;
    op.u.cast = *a;
    return queue_push(cpu_kern_of(k), &op, e);
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
    const int r = check_accumulate(a, &rules, e);
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
    const int r = check_sumsq(a, &rules, e);
    if (r != SHD_OK)
        return r;
    struct cpu_op op = elems_op(a->elems, done);
    op.run = sumsq_run;
    op.u.sumsq = *a;
    op.sum = a->sum;
    return queue_push(cpu_kern_of(k), &op, e);
}

/* One range; with a trail it is a chunk, from where it stands. */
static int update_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    const struct kern_update *a = &op->u.update;
    const struct cpu_isa *isa = t->kern->isa;
    if (a->trail.area == NULL) {
        isa->update(a, r, NULL);
        return SHD_OK;
    }
    uint64_t done;
    const int status = trail_resume(&a->trail, r, &done);
    if (status != SHD_OK || done == r.count)
        return status;
    struct trail_record *rec = &a->trail.area->records[t->index];
    const struct trail_arrays arrays = { { a->param, a->m, a->v },
                                         1 + spec_optimizer_rows[a->kind].moments };
    trail_begin(rec, &a->trail, r, done, &arrays);
    isa->update(a, (struct cpu_range){ r.first + done, r.count - done }, rec);
    trail_end(rec, &a->trail, r);
    return SHD_OK;
}

static int cpu_update(struct kern *k, const struct kern_update *a, struct kern_done *done,
                      struct shd_err *e)
{
    const int r = check_update(a, &rules, e);
    if (r != SHD_OK)
        return r;
    struct cpu_op op = elems_op(a->elems, done);
    op.run = update_run;
    op.u.update = *a;
    set_trail(&op, &a->trail);
    return queue_push(cpu_kern_of(k), &op, e);
}

static int cpu_hash(struct kern *k, const struct kern_hash *a, struct kern_done *done,
                    struct shd_err *e)
{
    const int r = check_hash(a, e);
    if (r != SHD_OK)
        return r;
    const struct cpu_op op = {
        .run = hash_run,
        .u.hash = *a,
        .count = kern_hash_leaves(a->head_elems, a->elems),
        .chunk = CHUNK_LEAVES,
        .done = done,
    };
    return queue_push(cpu_kern_of(k), &op, e);
}

static int copy_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    (void)t;
    const struct kern_copy *a = &op->u.copy;
    memcpy((uint8_t *)a->to + r.first, (const uint8_t *)a->from + r.first, r.count);
    return SHD_OK;
}

static int cpu_copy(struct kern *k, const struct kern_copy *a, struct kern_done *done,
                    struct shd_err *e)
{
    const int r = check_copy(a, e);
    if (r != SHD_OK)
        return r;
    const struct cpu_op op = { .run = copy_run,
                               .u.copy = *a,
                               .count = a->bytes,
                               .chunk = CHUNK_ELEMS * sizeof(float),
                               .done = done };
    return queue_push(cpu_kern_of(k), &op, e);
}

/* name and free are the device's: cpu.c sets them. */
const struct kern_ops cpu_ops = {
    .fill = cpu_fill,
    .cast = cpu_cast,
    .accumulate = cpu_accumulate,
    .sumsq = cpu_sumsq,
    .update = cpu_update,
    .hash = cpu_hash,
    .copy = cpu_copy,
    .segment_new = cpu_segment_new,
    .segment_map = cpu_segment_map,
    .segment_close = cpu_segment_close,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .pin = cpu_pin,
    .unpin = cpu_unpin,
    .available = cpu_available,
    .health = cpu_health,
    .failed = cpu_failed,
    .trail_bytes = cpu_trail_bytes,
    .trail_repair = cpu_trail_repair,
};
