/* See cpu.h: the operations check their arguments and queue the work. Nothing is computed on the
 * caller's thread but by run_here. */
#include "kernels/cpu/cpu.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cpu/queue.h"
#include "kernels/cpu/trail.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/memory.h"
#include "proto/base/sys.h"
#include "proto/share/segment_file.h"
#include "proto/spec/layout.h"

/* The work that a thread takes at a time, which is the least worth waking another one for: some
 * 20 us of memory traffic or of hashing. Whole blocks, since sums go by block. */
#define CHUNK_ELEMS  KERN_CHUNK_ELEMS
#define CHUNK_LEAVES UINT64_C(8)

/* What a caller does itself: 1 us (a sum of what is cached) to 12 us (an update), where to wake a
 * thread and to hear of its end takes 30 us (EPYC Zen 4). No parallelism is lost: it is of one
 * chunk. Nor is any lost on a device of one thread, where a longer sum is worth it. Not a longer
 * update: of several that are given at once the first is waited for, and the caller would tell of
 * it behind the last. */
#define HERE_ELEMS       UINT64_C(16384)
#define HERE_ALONE_ELEMS (2 * CHUNK_ELEMS)
_Static_assert(HERE_ELEMS < CHUNK_ELEMS, "what a caller does itself is of one chunk");

/* What no choice is made for. */
static const struct cpu_isa *widest(const struct cpu_thread *t)
{
    return t->kern->timed.isa[CHOICE_WIDEST];
}

static int fill_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    widest(t)->fill(&op->work.op.fill, r);
    return SHD_OK;
}

static int cast_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    widest(t)->cast(&op->work.op.cast, r);
    return SHD_OK;
}

/* -- Trails: the steps around a chunk, see trail.h -----------------------------------------------
 */

/* The arrays an operation changes in place. */
struct trail_arrays {
    float *array[TRAIL_ARRAYS_MAX];
    uint32_t count;
    bool int8; /* all but the first are in 8 bits */
};

static uint64_t chunk_index(const struct kern_trail *t, uint64_t elem)
{
    return t->first_chunk + elem / KERN_CHUNK_ELEMS;
}

/* The number of elements of this chunk that its word says are done. SHD_ESEGMENT: more than it has.
 */
static int trail_resume(const struct kern_trail *t, struct cpu_range chunk, uint64_t *ret_done)
{
    CHECK(chunk.first % KERN_CHUNK_ELEMS == 0 && chunk.count <= KERN_CHUNK_ELEMS);
    const uint64_t word = atomic_load_explicit(&t->chunks[chunk_index(t, chunk.first)],
                                               memory_order_relaxed);
    uint64_t done = 0;
    if (word >> TRAIL_COUNT_BITS == t->op)
        done = word & ((UINT64_C(1) << TRAIL_COUNT_BITS) - 1);
    if (done > chunk.count)
        return SHD_ESEGMENT;
    *ret_done = done;
    return SHD_OK;
}

/* Take the record for a chunk of which `done` elements are done. */
static void trail_begin(struct trail_record *rec, const struct kern_trail *t,
                        struct cpu_range chunk, uint64_t done, const struct trail_arrays *arrays)
{
    atomic_store_explicit(&rec->op, 0, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    rec->chunk = chunk_index(t, chunk.first);
    rec->first_elem = chunk.first;
    rec->array_count = arrays->count;
    for (uint32_t i = 0; i < arrays->count; i++)
        rec->offset_bytes[i] = ((uintptr_t)arrays->array[i] - (uintptr_t)t->base) |
                               (arrays->int8 && i > 0 ? TRAIL_INT8 : 0);
    trail_mark(rec, chunk.first + done, 0);
    atomic_store_explicit(&rec->op, t->op, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
}

/* The chunk is complete. rec: NULL where the operation keeps no record. */
static void trail_end(struct trail_record *rec, const struct kern_trail *t, struct cpu_range chunk)
{
    FAIL_POINT("kern:chunk:before");
    atomic_store_explicit(&t->chunks[chunk_index(t, chunk.first)],
                          t->op << TRAIL_COUNT_BITS | chunk.count, memory_order_release);
    FAIL_POINT("kern:chunk:after");
    if (rec != NULL)
        atomic_store_explicit(&rec->op, 0, memory_order_release);
}

static void accumulate_some(const struct kern_accumulate *a, struct cpu_thread *t,
                            struct cpu_range r, struct trail_record *rec)
{
    struct timed *timed = &t->kern->timed;
    const struct timed_range some = timed_accumulate(timed, a, t->index == 0, r.count);
    some.isa->accumulate(a, r, &t->sum, rec);
    timed_end(timed, &some);
}

/* One chunk with a trail, from where it stands. A sum that a dead process had begun is lost: then
 * the rest goes without, and the chunk is summed once it is complete. */
static int accumulate_chunk(const struct kern_accumulate *a, struct cpu_thread *t,
                            struct cpu_range r)
{
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
            trail_begin(rec, &a->trail, r, done, &(struct trail_arrays){ { a->acc }, 1, false });
        accumulate_some(&rest, t, (struct cpu_range){ r.first + done, r.count - done }, rec);
        trail_end(rec, &a->trail, r);
    }
    if (done > 0 && a->sum != NULL)
        widest(t)->sumsq(&(struct kern_sumsq){ .x = a->acc, .elems = a->elems }, r, &t->sum);
    return SHD_OK;
}

static int accumulate_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    const struct kern_accumulate *a = &op->work.op.accumulate;
    if (op->work.trail)
        return accumulate_chunk(a, t, r);
    accumulate_some(a, t, r, NULL);
    return SHD_OK;
}

static int sumsq_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    widest(t)->sumsq(&op->work.op.sumsq, r, &t->sum);
    return SHD_OK;
}

static void update_some(const struct kern_update *a, struct cpu_thread *t, struct cpu_range r,
                        struct trail_record *rec)
{
    struct timed *timed = &t->kern->timed;
    const struct timed_range some = timed_update(timed, a, t->index == 0, r.count);
    if (a->int8)
        some.isa->update_int8(a, r, rec);
    else
        some.isa->update(a, r, rec);
    timed_end(timed, &some);
}

/* Elements whose old values are kept while they are updated: in the second cache, as what is
 * updated. Fewer would be done in more calls, each with rates and a fence. */
#define MEASURED_ELEMS (4u * SHD_BLOCK_ELEMS)

/* The same, and what it comes to, while old and new values are in a cache. r: whole blocks. */
static void update_measured(const struct kern_update *a, struct cpu_thread *t, struct cpu_range r,
                            struct trail_record *rec)
{
    _Alignas(64) float old[MEASURED_ELEMS];
    const uint64_t end = r.first + r.count;
    for (uint64_t at = r.first, count; at < end; at += count) {
        const float *param = a->param + at;
        count = end - at < MEASURED_ELEMS ? end - at : MEASURED_ELEMS;
        memcpy(old, param, count * sizeof *old);
        update_some(a, t, (struct cpu_range){ at, count }, rec);
        for (uint64_t i = 0; i < count; i += SHD_BLOCK_ELEMS)
            widest(t)->change(old + i, param + i, &t->change);
    }
}

/* A pass of Muon's changes one array, of LAMB's two (muon.h). */
static uint32_t arrays_of(enum spec_optimizer kind)
{
    if (kind == SPEC_MUON || kind == SPEC_LAMB)
        return kind == SPEC_MUON ? 1 : 2;
    return 1 + spec_optimizer_rows[kind].moments;
}

/* A chunk with a trail, from where it stands. */
static int update_chunk(const struct kern_update *a, struct cpu_thread *t, struct cpu_range r)
{
    uint64_t done = 0;
    const int status = trail_resume(&a->trail, r, &done);
    if (done > 0)
        t->change.whole = false;
    if (status != SHD_OK || done == r.count)
        return status;
    if (a->int8 && done % QUANT_BLOCK_ELEMS != 0)
        return SHD_ESEGMENT;
    struct trail_record *rec = &a->trail.area->records[t->index];
    const struct trail_arrays arrays = { { a->param, a->m, a->v }, arrays_of(a->kind), a->int8 };
    trail_begin(rec, &a->trail, r, done, &arrays);
    if (a->change != NULL && done == 0)
        update_measured(a, t, r, rec);
    else
        update_some(a, t, (struct cpu_range){ r.first + done, r.count - done }, rec);
    trail_end(rec, &a->trail, r);
    return SHD_OK;
}

/* Its average, likewise. */
static int ema_chunk(const struct kern_update *a, struct cpu_thread *t, struct cpu_range r)
{
    struct kern_trail trail = a->trail;
    trail.first_chunk = a->ema.first_chunk;
    uint64_t done;
    const int status = trail_resume(&trail, r, &done);
    if (status != SHD_OK || done == r.count)
        return status;
    if (done % TRAIL_GROUP_ELEMS != 0)
        return SHD_ESEGMENT;
    struct trail_record *rec = &trail.area->records[t->index];
    trail_begin(rec, &trail, r, done, &(struct trail_arrays){ { a->ema.average }, 1, false });
    widest(t)->ema(a, (struct cpu_range){ r.first + done, r.count - done }, rec);
    trail_end(rec, &trail, r);
    return SHD_OK;
}

/* One range, of one chunk where a trail is kept. With an average chunk by chunk, so that the new
 * parameters are still in a cache. */
static int update_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    const struct kern_update *a = &op->work.op.update;
    if (op->work.trail) {
        const int status = update_chunk(a, t, r);
        return status == SHD_OK && a->ema.average != NULL ? ema_chunk(a, t, r) : status;
    }
    const uint64_t step = a->ema.average != NULL ? CHUNK_ELEMS : r.count, end = r.first + r.count;
    for (uint64_t first = r.first; first < end; first += step) {
        const struct cpu_range part = { first, step < end - first ? step : end - first };
        if (a->change != NULL)
            update_measured(a, t, part, NULL);
        else
            update_some(a, t, part, NULL);
        if (a->ema.average != NULL)
            widest(t)->ema(a, part, NULL);
    }
    return SHD_OK;
}

static int hash_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range leaves)
{
    const struct kern_hash *a = &op->work.op.hash;
    float decoded[SHD_BLOCK_ELEMS];
    for (uint64_t leaf = leaves.first; leaf < leaves.first + leaves.count; leaf++) {
        const uint64_t first = hash_leaf_first(a, leaf), end = hash_leaf_first(a, leaf + 1);
        const float *x = a->x != NULL ? a->x + first : decoded;
        CHECK(first < end && end - first <= SHD_BLOCK_ELEMS);
        if (x == decoded) {
            const struct kern_dequantize part = { decoded, a->of, a->first_elem + first,
                                                  end - first };
            widest(t)->dequantize(&part, (struct cpu_range){ 0, end - first });
        }
        if (!ckpt_hash(t->hasher, x, end - first, a->out[leaf]))
            return SHD_EINTERNAL;
    }
    return SHD_OK;
}

static int quantize_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    widest(t)->quantize(&op->work.op.quantize, r);
    return SHD_OK;
}

static int dequantize_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    widest(t)->dequantize(&op->work.op.dequantize, r);
    return SHD_OK;
}

static int encode_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    widest(t)->encode(&op->work.op.encode, r);
    return SHD_OK;
}

static int copy_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r)
{
    (void)t;
    const struct kern_copy *a = &op->work.op.copy;
    memcpy((uint8_t *)a->to + r.first, (const uint8_t *)a->from + r.first, r.count);
    return SHD_OK;
}

static const struct cpu_kind {
    cpu_run *run;
    uint64_t chunk;
    uint64_t here;       /* so many elements at most are done sooner than handed over; */
    uint64_t here_alone; /* on a device of one thread */
} kinds[KERN_OP_KINDS] = {
    [KERN_FILL] = { fill_run, CHUNK_ELEMS, HERE_ELEMS, HERE_ELEMS },
    [KERN_CAST] = { cast_run, CHUNK_ELEMS, 0, 0 },
    [KERN_ACCUMULATE] = { accumulate_run, CHUNK_ELEMS, HERE_ELEMS, HERE_ALONE_ELEMS },
    [KERN_SUMSQ] = { sumsq_run, CHUNK_ELEMS, HERE_ELEMS, HERE_ALONE_ELEMS },
    [KERN_UPDATE] = { update_run, CHUNK_ELEMS, HERE_ELEMS, HERE_ELEMS },
    [KERN_HASH] = { hash_run, CHUNK_LEAVES, 0, 0 },
    [KERN_COPY] = { copy_run, CHUNK_ELEMS * sizeof(float), 0, 0 },
    [KERN_QUANTIZE] = { quantize_run, CHUNK_ELEMS, 0, 0 },
    [KERN_DEQUANTIZE] = { dequantize_run, CHUNK_ELEMS, 0, 0 },
    [KERN_ENCODE] = { encode_run, CHUNK_ELEMS, HERE_ELEMS, HERE_ELEMS },
};

static int cpu_op_init(struct cpu_op *queued, const struct kern_op *op, struct kern_done *done,
                       struct shd_err *e)
{
    static const struct work_rules rules = {
        .chunk_words = true, .int8 = true, .whole = true, .codecs = true
    };
    const int r = work_init(&queued->work, op, &rules, done, e);
    if (r != SHD_OK)
        return r;
    queued->run = kinds[op->kind].run;
    queued->chunk = kinds[op->kind].chunk;
    queued->next = NULL;
    if (muon_has(op))
        muon_init(queued);
    return SHD_OK;
}

static int cpu_submit(struct kern *k, const struct kern_op *op, struct kern_done *done,
                      struct shd_err *e)
{
    struct cpu_op queued;
    const int r = cpu_op_init(&queued, op, done, e);
    return r == SHD_OK ? queue_push((struct cpu_kern *)k, &queued, e) : r;
}

static bool worth_handing_over(const struct cpu_kern *k, const struct cpu_op *op)
{
    const struct kern_op *what = &op->work.op;
    const bool draws = what->kind == KERN_FILL && what->fill.kind != KERN_FILL_CONST;
    const struct cpu_kind *kind = &kinds[what->kind];
    const uint64_t here = k->thread_count == 1 ? kind->here_alone : kind->here;
    return op->work.count > here || draws || muon_has(what);
}

static int cpu_run_here(struct kern *k, const struct kern_op *op, int *ret_status,
                        struct shd_err *e)
{
    struct cpu_op queued;
    const int r = cpu_op_init(&queued, op, /* done= */ NULL, e);
    if (r != SHD_OK)
        return r;
    struct cpu_kern *ck = (struct cpu_kern *)k;
    if (worth_handing_over(ck, &queued))
        return SHD_PENDING;
    return queue_run(ck, &queued, ret_status) ? SHD_OK : SHD_PENDING;
}

/* -- Memory: segments are memfds (proto/share/segment.h) ------------------------------------------
 */

static int cpu_segment_new(struct kern *k, const char *name, enum segment_kind kind, uint64_t bytes,
                           struct segment *ret_segment, struct shd_err *e)
{
    (void)k;
    return segment_new(name, kind, bytes, ret_segment, e);
}

static int cpu_segment_map(struct kern *k, int fd, enum segment_kind kind, uint64_t bytes,
                           struct segment *at, struct segment *ret_segment, struct shd_err *e)
{
    (void)k;
    int r = segment_shared_check(fd, kind, bytes, e);
    if (r != SHD_OK || at == NULL)
        return r != SHD_OK ? r : segment_map(fd, kind, bytes, ret_segment, e);
    CHECK(at->bytes == bytes);
    r = segment_place(at->base, fd, 0, bytes, !segment_kind_readonly(kind), e);
    if (r != SHD_OK)
        return r;
    close(at->fd);
    *ret_segment = (struct segment){ .fd = fd, .base = at->base, .bytes = bytes };
    *at = SEGMENT_CLOSED;
    return SHD_OK;
}

static void cpu_segment_close(struct kern *k, struct segment *segment)
{
    (void)k;
    segment_close(segment);
}

static void *cpu_alloc(struct kern *k, uint64_t bytes)
{
    (void)k;
    return sys_pages(bytes);
}

static void cpu_release(struct kern *k, void *memory, uint64_t bytes)
{
    (void)k;
    sys_pages_free(memory, bytes);
}

static int cpu_pin(struct kern *k, void *base, uint64_t bytes, bool readonly, struct shd_err *e)
{
    (void)k, (void)base, (void)bytes, (void)readonly, (void)e;
    return SHD_OK;
}

static void cpu_unpin(struct kern *k, void *base)
{
    (void)k, (void)base;
}

static uint64_t cpu_available(struct kern *k)
{
    (void)k;
    return memory_room().bytes;
}

static int cpu_health(struct kern *k, struct shd_err *e)
{
    (void)k, (void)e;
    return SHD_OK;
}

static bool cpu_failed(struct kern *k, struct shd_err *ret_why)
{
    (void)k, (void)ret_why;
    return false;
}

static uint64_t cpu_trail_bytes(const struct kern *k, uint64_t chunks)
{
    (void)k, (void)chunks;
    return 0; /* it is in the ledger */
}

static int cpu_trail_repair(struct kern *k, struct kern_trail_area *area, void *base,
                            uint64_t bytes, _Atomic uint64_t *chunks, uint64_t count,
                            struct shd_err *e)
{
    (void)k;
    return kern_trail_repair(area, base, bytes, chunks, count, e);
}

static const struct kern_choice *cpu_choices(struct kern *k, uint32_t *ret_count)
{
    const struct timed *t = &((struct cpu_kern *)k)->timed;
    *ret_count = atomic_load_explicit(&t->made_count, memory_order_acquire);
    return t->made;
}

/* -- The device -----------------------------------------------------------------------------------
 */

static void cpu_free(struct kern *kern)
{
    if (kern == NULL)
        return;
    struct cpu_kern *k = (struct cpu_kern *)kern;
    queue_stop(k);
    for (uint32_t i = 0; i < k->thread_count; i++)
        ckpt_hasher_free(k->threads[i].hasher);
    pthread_mutex_destroy(&k->push_lock);
    free(k->memory);
}

/* A device's own has its instruction set's name. */
static const struct kern_ops cpu_ops = {
    .int8 = true,
    .codecs = true,
    .submit = cpu_submit,
    .run_here = cpu_run_here,
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
    .choices = cpu_choices,
    .trail_bytes = cpu_trail_bytes,
    .trail_repair = cpu_trail_repair,
    .free = cpu_free,
};

int kern_cpu_new(const struct kern_config *config, struct kern **ret_kern, struct shd_err *e)
{
    if (config->threads < 1 || config->threads > CPU_THREADS_MAX)
        return err_set(e, SHD_EINVAL, "%" PRIu32 " compute threads: it is 1 to %u", config->threads,
                       CPU_THREADS_MAX);
    /* Room to begin at the struct's own alignment, which keeps busy words on lines of their own. */
    const size_t align = _Alignof(struct cpu_kern);
    const size_t bytes = sizeof(struct cpu_kern) + config->threads * sizeof(struct cpu_thread) +
                         align;
    void *memory = sys_malloc(bytes);
    if (memory == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a queue of %zu bytes", bytes);
    memset(memory, 0, bytes); /* touched: a queue that gets longer takes no memory */
    struct cpu_kern *k = (void *)(((uintptr_t)memory + align - 1) / align * align);
    k->memory = memory;
    int r = timed_init(&k->timed, config->isa, e);
    if (r != SHD_OK) {
        free(memory);
        return r;
    }
    k->ops = cpu_ops;
    k->ops.name = k->timed.isa[CHOICE_WIDEST]->ops_name;
    k->base.ops = &k->ops;
    k->thread_count = config->threads;
    k->muon.update = update_run;
    for (uint32_t i = 0; i < k->thread_count; i++) {
        k->threads[i].kern = k;
        k->threads[i].index = i;
    }
    CHECK(pthread_mutex_init(&k->push_lock, NULL) == 0);
    for (uint32_t i = 0; i < k->thread_count && r == SHD_OK; i++)
        r = ckpt_hasher_new(&k->threads[i].hasher, e);
    if (r == SHD_OK)
        r = queue_start(k, config, e);
    if (r != SHD_OK) {
        cpu_free(&k->base);
        return r;
    }
    *ret_kern = &k->base;
    return SHD_OK;
}
