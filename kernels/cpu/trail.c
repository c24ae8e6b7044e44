/* The repair of what a dead process left; see trail.h. */
#include "kernels/cpu/trail.h"

#include <inttypes.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"

/* A record's numbers, read once: they may be anything. */
struct found {
    uint64_t op, chunk, first_elem, array_count;
    uint64_t elem, n; /* of pos */
    uint64_t offset_bytes[TRAIL_ARRAYS_MAX];
};

static struct found record_read(const struct trail_record *rec)
{
    const uint64_t pos = atomic_load_explicit(&rec->pos, memory_order_relaxed);
    struct found f = {
        .op = atomic_load_explicit(&rec->op, memory_order_relaxed),
        .chunk = rec->chunk,
        .first_elem = rec->first_elem,
        .array_count = rec->array_count,
        .elem = pos >> 8,
        .n = pos & 0xff,
    };
    memcpy(f.offset_bytes, rec->offset_bytes, sizeof f.offset_bytes);
    return f;
}

/* The elements that a record names lie in one chunk of a slice. pos has 56 bits for them, so that
 * neither sums nor byte offsets below can wrap. */
static int check_elems(const struct found *f, uint32_t index, struct shd_err *e)
{
    if (f->first_elem % KERN_CHUNK_ELEMS != 0)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": element %" PRIu64 " begins no chunk", index,
                       f->first_elem);
    if (f->n > TRAIL_GROUP_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": %" PRIu64 " elements at once, the limit is %u",
                       index, f->n, TRAIL_GROUP_MAX);
    if (f->elem < f->first_elem || f->elem + f->n - f->first_elem > KERN_CHUNK_ELEMS)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": elements %" PRIu64 "+%" PRIu64
                       " are not in the chunk at %" PRIu64,
                       index, f->elem, f->n, f->first_elem);
    return SHD_OK;
}

/* The end of what is kept of an array in 8 bits, from its element 0. */
static uint64_t int8_end(const struct found *f)
{
    return f->n > 0 ? quant_bytes(layout_align(f->elem + f->n, QUANT_TILE_ELEMS)) : 0;
}

static int check_record(const struct found *f, uint32_t index, uint64_t bytes, uint64_t count,
                        struct shd_err *e)
{
    if (f->op > KERN_OP_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": op %" PRIu64 ", the limit is %" PRIu64, index,
                       f->op, KERN_OP_MAX);
    if (f->chunk >= count)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": chunk %" PRIu64 ", there are %" PRIu64, index,
                       f->chunk, count);
    if (f->array_count < 1 || f->array_count > TRAIL_ARRAYS_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": %" PRIu64 " arrays, it is 1 to %u", index,
                       f->array_count, TRAIL_ARRAYS_MAX);
    const int r = check_elems(f, index, e);
    if (r != SHD_OK)
        return r;
    for (uint64_t i = 0; i < f->array_count; i++) {
        const uint64_t offset = f->offset_bytes[i] & ~TRAIL_INT8;
        const bool int8 = (f->offset_bytes[i] & TRAIL_INT8) != 0;
        const uint64_t end_bytes = int8 ? int8_end(f) : (f->elem + f->n) * sizeof(float);
        if (int8 && f->elem % QUANT_BLOCK_ELEMS != 0)
            return err_set(e, SHD_ESEGMENT,
                           "trail record %" PRIu32 ": element %" PRIu64
                           " begins no block, and array %" PRIu64 " is in 8 bits",
                           index, f->elem, i);
        if (offset % sizeof(float) != 0 || offset > bytes || end_bytes > bytes - offset)
            return err_set(e, SHD_ESEGMENT,
                           "trail record %" PRIu32 ": array %" PRIu64 " at byte %" PRIu64
                           " with elements to %" PRIu64 ", the segment has %" PRIu64 " bytes",
                           index, i, offset, f->elem + f->n, bytes);
    }
    return SHD_OK;
}

static void array_repair(const struct found *f, uint64_t array, const float *old, uint8_t *base)
{
    uint8_t *to = base + (f->offset_bytes[array] & ~TRAIL_INT8);
    if ((f->offset_bytes[array] & TRAIL_INT8) == 0) {
        memcpy(to + f->elem * sizeof *old, old, f->n * sizeof *old);
        return;
    }
    if (f->n == 0)
        return;
    const struct quant_block block = quant_block_at(to, f->elem);
    memcpy(block.codes, old, QUANT_BLOCK_ELEMS);
    *block.scale = old[QUANT_BLOCK_ELEMS / sizeof *old];
}

/* Undo the group, then say how far the chunk got, then forget the record: killed at any point,
 * the same again does no harm. */
static void record_repair(struct trail_record *rec, uint8_t *base, _Atomic uint64_t *chunks)
{
    const struct found f = record_read(rec);
    for (uint64_t i = 0; i < f.array_count; i++)
        array_repair(&f, i, rec->old[i], base);
    atomic_store_explicit(&chunks[f.chunk], f.op << TRAIL_COUNT_BITS | (f.elem - f.first_elem),
                          memory_order_release);
    atomic_store_explicit(&rec->op, 0, memory_order_release);
}

int kern_trail_repair(struct kern_trail_area *area, void *base, uint64_t bytes,
                      _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e)
{
    CHECK((uintptr_t)area % _Alignof(struct kern_trail_area) == 0);
    for (uint32_t i = 0; i < CPU_THREADS_MAX; i++) {
        const struct found f = record_read(&area->records[i]);
        const int r = f.op == 0 ? SHD_OK : check_record(&f, i, bytes, count, e);
        if (r != SHD_OK)
            return r;
    }
    for (uint32_t i = 0; i < CPU_THREADS_MAX; i++)
        if (atomic_load_explicit(&area->records[i].op, memory_order_relaxed) != 0)
            record_repair(&area->records[i], base, chunks);
    return SHD_OK;
}
