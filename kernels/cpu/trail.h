/* A trail's memory and the steps around each change (cpu.c); kern.h says what it is for.
 *
 * One compute thread, one chunk:
 *
 *     trail_begin     op = 0, the fields, pos, op           the record speaks for this chunk now
 *     each group      old values, trail_mark(i, n), new values, trail_mark(i + n, 0)
 *     trail_end       chunk word = (op, all elements), op = 0
 *
 * Every arrow between those stores is program order, which x86-64 keeps and the compiler keeps
 * across the fences here (they emit nothing). Publish is stored past that order where it streams:
 * no record speaks for it.
 */
#ifndef SHD_KERNELS_CPU_TRAIL_H
#define SHD_KERNELS_CPU_TRAIL_H

#include <stdatomic.h>
#include <stdint.h>

#include "kernels/cpu/isa.h"

#define TRAIL_ARRAYS_MAX  3u
#define TRAIL_GROUP_ELEMS 64u /* changed between two marks, but at the ends of runs */
#define TRAIL_GROUP_MAX   64u /* what a record has room for */
#define TRAIL_COUNT_BITS  17  /* of a chunk word: elements done; the rest is the op */

/* Of an array in 8 bits (proto/spec/optimizer.h) the block that [elem, elem + n) begins is kept
 * whole, codes, then their scale. Builds that know none refuse such an offset. */
#define TRAIL_INT8 UINT64_C(1)

struct trail_record {
    _Alignas(128) _Atomic uint64_t op; /* 0: void, the rest means nothing */
    _Atomic uint64_t pos;              /* elem << 8 | n: [elem, elem + n) are being changed, */
    uint64_t chunk;                    /* before elem all is done; index into chunk words */
    uint64_t first_elem;               /* of the chunk, within the slice */
    uint64_t array_count;
    uint64_t offset_bytes[TRAIL_ARRAYS_MAX]; /* from base, of element 0 of the slice; */
                                             /* | TRAIL_INT8: in 8 bits */
    float old[TRAIL_ARRAYS_MAX][TRAIL_GROUP_MAX];
};

struct kern_trail_area {
    struct trail_record records[CPU_THREADS_MAX];
};

/* Layout outlives the program that made it. */
_Static_assert(offsetof(struct trail_record, old) == 64, "old values fill lines of their own");
_Static_assert(sizeof(struct trail_record) == 896, "record size");
_Static_assert(sizeof(struct kern_trail_area) == KERN_TRAIL_BYTES, "ledgers have room for it");

/* Put a dead process's trail in order. May itself be killed and called again. base[bytes]: the
 * segment; chunks[count]. Errors: SHD_ESEGMENT a record that points outside, named; nothing is
 * changed then. */
int kern_trail_repair(struct kern_trail_area *area, void *base, uint64_t bytes,
                      _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e);

/* Elements before elem are done; n > 0: the record has the old values of [elem, elem + n). */
static inline __attribute__((always_inline)) void trail_mark(struct trail_record *rec,
                                                             uint64_t elem, uint64_t n)
{
    atomic_signal_fence(memory_order_seq_cst);
    atomic_store_explicit(&rec->pos, elem << 8 | n, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
}

#endif
