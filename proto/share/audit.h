/* What steps that were skipped came from: of each of the last ones the unit whose part of the mean
 * gradient had the largest norm, or the first that was not finite (struct decision_cause). Owners
 * keep it in their ledgers, a ring of slots in which a step has one place; rows go to clients as
 * they lie there, little-endian.
 *
 * A slot is written with every step, as the history's (history.h): before the step's commit is
 * recorded, its tag last. So what is there of a committed step is that step's, also where the model
 * went back and made it once more. */
#ifndef SHD_AUDIT_H
#define SHD_AUDIT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/decision.h"

#define AUDIT_SLOTS 512u /* steps that are known, at least */

#define AUDIT_NAME_BYTES 80u

struct audit_worker {
    uint32_t pid;  /* 0: not known */
    uint32_t rank; /* plus 1; 0: it has none */
    char name[AUDIT_NAME_BYTES];
};

struct audit_row {
    uint64_t step;
    uint32_t unit, group; /* as in struct decision_cause, the four */
    double norm, share;
    struct audit_worker worker; /* that sent `group` */
    uint64_t reserved;
};
#define AUDIT_ROW_BYTES 128u
_Static_assert(sizeof(struct audit_row) == AUDIT_ROW_BYTES, "rows cross processes");

struct audit_slot {
    struct audit_row row;
    _Atomic uint64_t tag; /* step + 1 of a step that has one; 0: none */
};

/* Of an owner's memory, for each model: part of its ledger. */
#define AUDIT_BYTES ((uint64_t)AUDIT_SLOTS * sizeof(struct audit_slot))

/* Of every step, also one that nothing is known of. */
static inline void audit_put(struct audit_slot *ring, uint64_t step,
                             const struct decision_cause *cause)
{
    struct audit_slot *slot = &ring[step % AUDIT_SLOTS];
    atomic_store_explicit(&slot->tag, 0, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
    if (cause->unit == 0)
        return;
    slot->row = (struct audit_row){ .step = step,
                                    .unit = cause->unit,
                                    .group = cause->group,
                                    .norm = cause->norm,
                                    .share = (double)cause->share };
    atomic_store_explicit(&slot->tag, step + 1, memory_order_release);
}

/* Who sent the group of the step's cause, which is there. */
static inline void audit_put_worker(struct audit_slot *ring, uint64_t step,
                                    const struct audit_worker *worker)
{
    ring[step % AUDIT_SLOTS].row.worker = *worker;
}

/* False: nothing is known of it, or it was too long ago. Of what the row holds only the step is
 * checked. */
static inline bool audit_get(const struct audit_slot *ring, uint64_t commits, uint64_t step,
                             struct audit_row *ret_row)
{
    const struct audit_slot *slot = &ring[step % AUDIT_SLOTS];
    if (step >= commits || atomic_load_explicit(&slot->tag, memory_order_acquire) != step + 1)
        return false;
    *ret_row = slot->row;
    ret_row->step = step;
    return true;
}

/* Of steps from `from` to below `next`, ascending, at most `room`. */
static inline uint32_t audit_read(const struct audit_slot *ring, uint64_t commits, uint64_t from,
                                  uint64_t next, struct audit_row *ret_rows, uint32_t room)
{
    uint32_t count = 0;
    for (uint64_t step = from; step < next && count < room; step++)
        count += audit_get(ring, commits, step, &ret_rows[count]);
    return count;
}

static inline struct decision_cause audit_cause(const struct audit_row *row)
{
    return (struct decision_cause){
        .unit = row->unit, .norm = row->norm, .group = row->group, .share = (float)row->share
    };
}

#endif
