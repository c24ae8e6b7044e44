/* The copy path: the same daemons and messages as the mapped path, but parameters are read from
 * slots of this process, which a transfer thread fills, and gradients are handed over from its
 * own memory (client/grads.h). What a device other than the owners' does, on host memory: bounds
 * are memory that is there or not, and prefetch hides time or does not.
 *
 * There are exactly as many slots as the plan holds units at once. Each is address space for the
 * largest unit; a unit gets the free slot that has held about as much before, so memory touched
 * comes to what the plan holds, for units of like size.
 */
#ifndef SHD_PATH_COPY_H
#define SHD_PATH_COPY_H

#include "client/path.h"
#include "client/transfer.h"

struct copy_slot {
    struct transfer_job job;
    uint8_t *base;          /* owned mapping of slot_bytes */
    uint64_t bytes_touched; /* the most it has held */
    bool busy;
};

struct copy_model {
    struct transfer *transfer; /* owned */
    struct copy_slot **slots;  /* owned, [slot_count], each owned */
    uint32_t slot_count;
    uint64_t slot_bytes;           /* the largest unit */
    uint32_t *slot_of;             /* owned, [units]; COPY_NO_SLOT: not fetched */
    struct transfer_piece *pieces; /* owned, [units * owners] */
};

#define COPY_NO_SLOT UINT32_MAX

/* For a model that is open on the mapped path. Nothing changes on failure. Errors: SHD_ENOMEM. */
int copy_new(struct shd_model *m, uint32_t slots, uint64_t delay_ns, struct copy_model **ret_copy,
             struct shd_err *e);
void copy_free(struct copy_model *c); /* NULL is a no-op */

/* Have at least that many slots. Errors: SHD_ENOMEM. */
int copy_grow(struct copy_model *c, uint32_t slots, struct shd_err *e);

#endif
