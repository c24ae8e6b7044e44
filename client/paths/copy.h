/* The copy path: the same daemons and messages as the mapped path, but parameters are read from
 * slots of this process, which a transfer thread fills, and gradients are handed over from its
 * own memory (client/run/grads.h). For workers on a device other than the owners'; on host memory
 * it does the same: bounds are memory that is there or not, and prefetch hides time or does not.
 *
 * There are exactly as many slots as the plan holds units at once. Each is a buffer on the worker's
 * device (client/paths/buffer.h); a unit gets the free slot that has held about as much before, so
 * memory used comes to what the plan holds, for units of like size.
 */
#ifndef SHD_COPY_H
#define SHD_COPY_H

#include "client/paths/buffer.h"
#include "client/paths/path.h"
#include "client/paths/transfer.h"

struct copy_model {
    struct transfer *transfer; /* owned */
    struct buffer *slots;      /* owned, [slots_max]; the first slot_count are in use */
    struct transfer_job *jobs; /* owned, [slots_max]: what brings a unit into each */
    struct CUevent_st **marks; /* owned, [slots_max], as are they: behind what a stream of the
                                * program's has to do with what was there; NULL: none yet */
    uint32_t slot_count, slots_max;
    struct buffers in; /* the slots' */
    struct kern *gpu;  /* owned: a queue of its own for a GPU worker's copies; NULL: on the host */
    uint32_t *slot_of; /* owned, [units]; COPY_NO_SLOT: not fetched */
    struct transfer_piece *pieces; /* owned, [units * owners] */
};

#define COPY_NO_SLOT UINT32_MAX

/* For a model that is open on daemons. Nothing changes on failure. Errors: SHD_ENOMEM; its movers'
 * ready()'s. */
int copy_new(struct shd_model *m, uint32_t slots, uint64_t delay_ns, struct copy_model **ret_copy,
             struct shd_err *e);
void copy_free(struct copy_model *c); /* NULL is a no-op */

/* Have at least that many slots: no more than units. */
void copy_grow(struct copy_model *c, uint32_t slots);

extern const struct reader_ops reader_copy;

/* Wait until nothing of the program's uses a slot that was let go of. */
void copy_settle(const struct copy_model *c, uint32_t slot);

/* reader_ops slots, for the NCCL path too: what is near goes this way there. */
int copy_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e);
bool copy_readable(const struct shd_model *m, uint32_t unit); /* never says so */
int copy_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e);
void copy_let_go(struct shd_model *m, uint32_t unit);
const void *copy_params(const struct shd_model *m, uint32_t unit);

#endif
