/* Spilling: gradients that arrived before their turn give up their slots.
 *
 * A gradient waits in its sender's slot for the micro-batches before it. When no slot of a session
 * is left, and the one that is missing has nobody who computes it but this very session, or
 * somebody who is stopped, nobody could go on. So gradients that have waited for a while without
 * news from their sender are copied to the spill segment, kept like the state (a spilled gradient
 * is credited: it must count whatever dies), and summed from there. Not only where the session's
 * slots are all here: it may keep some for itself. Every gradient has its place in the segment,
 * micro-batch by micro-batch; it is sparse: room is taken for what is about to be copied
 * (proto/share/reserve.h), and a hole is punched into all of it when the step is over. It is the
 * host's memory for every device: a GPU's has no holes, so that one gradient would take room for
 * all of a step's, and is what is short there.
 *
 * Failure modes: no memory, or the keeper does not take it: the gradients wait on, and the log
 * says why, now and then.
 */
#ifndef SHD_SPILL_H
#define SHD_SPILL_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "proto/share/segment.h"
#include "proto/spec/layout.h"

struct daemon;
struct inbox;
struct model;
struct spill_copy;

enum spill_state { SPILL_NONE, SPILL_MAKING, SPILL_READY, SPILL_RESERVING, SPILL_PUNCHING };

struct spill_range { /* of the segment, for the gradient in a slot */
    uint64_t at, bytes;
    uint32_t slot;
    uint64_t serial; /* of the RETURN that waits there */
};

struct spill { /* of a model */
    enum spill_state state;
    struct segment segment;
    uv_work_t work;                           /* of MAKING, RESERVING and PUNCHING */
    int work_status;                          /* what it came to */
    struct inbox *inbox;                      /* counted: RESERVING for its slots, */
    struct spill_range ranges[SHD_SLOTS_MAX]; /* these */
    uint32_t range_count;
    struct spill_copy *first; /* owned: running */
    bool dirty;               /* something was written since the last punch */
    bool punch;               /* the step is over: as soon as no copy runs */
    uint64_t bytes;           /* of gradients of this step in it */
    uint64_t bytes_total;     /* since the daemon's start */
};

void spill_init(struct daemon *d); /* the daemon's timer, on its loop */

/* A gradient waits in its slot: look in a while whether it still does. */
void spill_watch(struct daemon *d);

/* Count what a predecessor has spilled. */
void spill_adopted(struct model *m);

/* The step was committed: nothing that is in there is needed any more. */
void spill_step_over(struct model *m);

/* No kernel runs any more: forget what runs. */
void spill_deinit(struct model *m);

#endif
