/* Writing this owner's part of a checkpoint while training goes on.
 *
 * State changes only while a step is being applied, so the state of step K is there until the first
 * update of step K+1's commit. Happy path: checkpoint_begin() at step K opens the files that the
 * coordinator has made; then unit by unit a piece of an array is *captured* (copied by the kernel
 * queue into one of a few buffers), hashed and written on libuv's pool, and the buffer is used
 * again. An update of a unit that is not captured yet queues, before itself, a capture of what is
 * left into memory of its own (*aside*): work runs in queueing order, so every capture is of step K
 * whatever is queued behind it, and no step waits. At the end the files are synced and the request
 * is answered with the step's decision and blob.
 *
 * Failure: no memory for an aside, a write error, a session that ends: the checkpoint fails with
 * the reason, training goes on. One at a time per model. Loop thread, but for what checkpoint_out.c
 * does on the pool.
 */
#ifndef SHD_CHECKPOINT_H
#define SHD_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct checkpoint;
struct model;
struct op;

/* Begin to write the model's step now (not APPLYING) for op, a CHECKPOINT with its path in
 * op->text. SHD_PENDING: op is finished later. */
int checkpoint_begin(struct op *op);

/* The request that is being served for this model; NULL: none. */
struct op *checkpoint_op(const struct model *m);

struct checkpoint_progress {
    uint64_t step;
    bool writing; /* else its files are being opened */
    uint64_t bytes_done, bytes_total;
};
/* False: none is being written. */
bool checkpoint_progress(const struct model *m, struct checkpoint_progress *ret_progress);

/* Let a running one fail with SHD_ESTEP as soon as it can. */
void checkpoint_replace(struct model *m);

/* unit is about to be updated: capture what is left of it. Errors: SHD_EBUSY, the kernel queue is
 * full: not yet. */
int checkpoint_before_update(struct model *m, uint32_t unit, struct shd_err *e);

/* Go on when the kernel queue may have room again. */
void checkpoint_retry(struct model *m);

/* At shutdown, when no work runs any more. NULL is a no-op. */
void checkpoint_free(struct checkpoint *c);

#endif
