/* Snapshots: a model's parameters and moments, and what its ledger had beside them, as of a step,
 * in memory of this owner that the keeper has as well. What rewind.h goes back to.
 *
 * Happy path: a step that is to be kept opens; what the ledger says is written into the snapshot's
 * head, and one copy of the arrays goes into the kernel queue, behind the updates of the step
 * before and before those of this one. When it is done `ready` makes it count. Then the oldest are
 * given up but for so many as are to be kept; their memory is the next one's.
 *
 * Each owner does so by itself. What a step is is the same for all, so those that all owners have
 * fit together. One that is in the way of a rewind stays (`held` in the ledger).
 *
 * Failure: no room, or a kernel that fails: that snapshot is none, and training goes on. Memory
 * that is still being made when its step opens: none either, of the steps that are kept by
 * themselves. One that was being copied when the daemon was killed is none for its successor. Loop
 * thread, but for making memory. */
#ifndef SHD_SNAPSHOTS_H
#define SHD_SNAPSHOTS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct keeper_group;
struct kern;
struct model;
struct op;
struct rewind;
struct rewind_more;
struct rewind_record;
struct snapshots;

/* SNAPSHOT, of all kinds. */
int snapshot_ask(struct op *op);

/* Does the model have one of this step? */
bool snapshot_has(const struct model *m, uint64_t step);

/* The model's phase has changed: a step that is to be kept may be open. */
void snapshots_moved(struct model *m);

/* A unit is about to be updated. Errors: SHD_EBUSY: a copy waits for room in the kernel queue. */
int snapshots_before_update(struct model *m, struct shd_err *e);
void snapshots_retry(struct model *m);

bool snapshots_are_idle(const struct model *m);
void snapshots_free(struct model *m);

/* For rewind.h: what runs, of a model that has snapshots; the arrays of one in this memory, and
 * what they count; and what follows once they are copied back: later ones go, and the ledger has
 * it. */
struct rewind **snapshots_rewind(struct model *m);
const void *snapshot_state(const struct model *m, uint64_t step);
uint64_t snapshot_state_bytes(const struct model *m);
const struct rewind_more *snapshot_more(const struct model *m, uint64_t step);
void snapshot_rewound(struct model *m, uint64_t step);

/* For fork.h: the snapshot of a step is lent. Until it is given back its memory stays where it is,
 * and what is written into it is queued behind what was queued to read it; what it has beside the
 * arrays is to be copied at once. */
struct snapshot_item;
struct snapshot_lent {
    struct snapshot_item *snapshot;
    const struct rewind_record *record;
    const struct rewind_more *more; /* NULL: an older ledger has none */
    const uint64_t *updates;        /* [units] */
    const uint8_t *blob;            /* [record->record.blob_bytes] */
    const void *state;              /* [snapshot_state_bytes()] */
};
bool snapshot_lend(struct model *m, uint64_t step, struct snapshot_lent *ret_lent);
void snapshot_give_back(struct model *m, struct snapshot_item *snapshot);

/* One of this step is being copied. */
bool snapshot_comes(const struct model *m, uint64_t step);

/* Have the board say where the last rewind went. */
void snapshots_say(const struct model *m);

/* A predecessor's. Those that are of no use are nobody's: snapshots_adopted() closes them. Errors:
 * SHD_ENOMEM; SHD_ESEGMENT: the one that a rewind under way goes back to is not there. */
int snapshots_adopt(struct model *m, struct keeper_group *g, struct shd_err *e);
void snapshots_adopted(struct model *m, struct keeper_group *g);
void snapshots_unadopt(struct model *m);

/* Finish a rewind that a predecessor has begun; may block. Errors: of the device; SHD_ESEGMENT. */
int snapshots_finish_rewind(struct model *m, struct kern *kern, struct shd_err *e);

#endif
