/* The history of a model's steps: what each of the last committed ones came to. Owners keep it in
 * their ledgers, a ring of slots; rows go to clients as they lie there, little-endian.
 *
 * A row is written before its step's commit is recorded, into a slot whose old row is too old to be
 * asked for, and its tag is stored last: a process that is killed in between has neither the commit
 * nor the row, and its successor writes both.
 */
#ifndef SHD_HISTORY_H
#define SHD_HISTORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define HISTORY_STEPS   65536u /* that can be asked for, at least */
#define HISTORY_SLOTS   (HISTORY_STEPS + 1)
#define HISTORY_METRICS 4u

struct history_row {
    uint64_t step;
    uint64_t time_ns;                /* of the commit, since 1970 */
    double metrics[HISTORY_METRICS]; /* sums over the micro-batches */
    double norm;       /* of the mean gradient, before clipping; infinite when it was not finite */
    double lr;         /* of the update */
    double loss_scale; /* 0, 1: none */
    float scale;       /* the summed gradient was multiplied by it; where a guard skipped the step,
                        * by nothing: what its norm or loss was above (proto/spec/guard.h) */
    uint32_t metric_count;
    uint32_t
        skipped; /* 0: no; 1: the gradient was not finite, or it was a put, nothing was updated;
                  * 1 + enum guard_what: a guard did it. A build before guards takes that for 1 */
    uint32_t reported; /* groups of micro-batches that had metrics; 0: not known */
};
#define HISTORY_ROW_BYTES 88u
_Static_assert(sizeof(struct history_row) == HISTORY_ROW_BYTES, "rows cross processes");

static inline uint32_t history_skipped(bool skip, uint32_t guard)
{
    return guard != 0 ? 1 + guard : skip;
}

struct history_slot {
    struct history_row row;
    _Atomic uint64_t tag; /* step + 1 of a complete row; 0: none */
};

/* Of an owner's memory, for each model: part of its ledger. */
#define HISTORY_BYTES ((uint64_t)HISTORY_SLOTS * sizeof(struct history_slot))

/* slots: of the ring, > 1. */
static inline void history_put(struct history_slot *ring, uint32_t slots,
                               const struct history_row *row)
{
    struct history_slot *slot = &ring[row->step % slots];
    slot->row = *row;
    atomic_store_explicit(&slot->tag, row->step + 1, memory_order_release);
}

/* The row of a step; commits: so many steps are committed. False: too old, not committed, or nobody
 * wrote it (the model began later, from a checkpoint). What it holds is not checked. */
static inline bool history_get(const struct history_slot *ring, uint32_t slots, uint64_t commits,
                               uint64_t step, struct history_row *ret_row)
{
    if (step >= commits || commits - step >= slots)
        return false;
    const struct history_slot *slot = &ring[step % slots];
    if (atomic_load_explicit(&slot->tag, memory_order_acquire) != step + 1)
        return false;
    *ret_row = slot->row;
    ret_row->step = step;
    if (ret_row->metric_count > HISTORY_METRICS)
        ret_row->metric_count = 0;
    return true;
}

/* Up to `room` rows of committed steps from *from on, ascending; *from becomes the step to go on
 * with: `commits` when there are no more. */
static inline uint32_t history_read(const struct history_slot *ring, uint32_t slots,
                                    uint64_t commits, uint64_t *from, struct history_row *ret_rows,
                                    uint32_t room)
{
    const uint64_t oldest = slots > 0 && commits >= slots ? commits - slots + 1 : 0;
    uint64_t step = *from > oldest ? *from : oldest;
    uint32_t count = 0;
    if (slots == 0)
        step = commits;
    for (; step < commits && count < room; step++)
        count += history_get(ring, slots, commits, step, &ret_rows[count]);
    *from = step;
    return count;
}

#endif
