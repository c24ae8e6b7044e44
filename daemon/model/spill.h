/* Spilling: gradients that arrived before their turn give up their slots.
 *
 * A gradient waits in its sender's slot for the micro-batches before it. That costs nothing as long
 * as the sender computes, or has nothing left to compute. When it waits for a slot itself it says
 * so (activity_slot_wait(), proto/share/activity.h), and is stuck if all that it has here wait for
 * their turn. If the one that is missing has nobody who computes it but this very session, or
 * somebody who is stopped, nobody could go on. So the gradients of a worker that is stuck for long
 * are copied to the spill segment, kept like the state (a spilled gradient is credited: it must
 * count whatever dies), and summed from there.
 *
 * For long is a quarter of what the last step took, from commit to commit, 5 s at most (1 s before
 * the first): whoever computes what is missing comes with it until then, also when it is a few
 * times slower, and no byte is copied. It is 5 ms where no worker of the model is left that
 * computes, and for the rest of a step in which it has happened. Of a worker of an older libshd,
 * which does not say whether it waits, it is taken that it does: 5 ms after its last gradient when
 * two of its slots (or its only one) wait here, else 50 ms.
 *
 * Every gradient has its place in the segment, micro-batch by micro-batch; it is sparse: room is
 * taken for what is about to be copied (proto/share/reserve.h), and a hole is punched into all of
 * it when nothing was copied for 2 s, or when a step is over that needed less than half of what it
 * holds. It is the host's memory for every device: a GPU's has no holes, so that one gradient would
 * take room for all of a step's, and is what is short there.
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
    bool punch;               /* nothing of it is needed: as soon as no copy runs */
    uint64_t bytes;           /* of gradients of this step in it */
    uint64_t bytes_total;     /* since the daemon's start */
    uint64_t held_bytes;      /* memory that it takes */
    uint64_t over_ns;         /* when the last step was committed; 0: not seen */
    uint64_t step_ns;         /* from the commit before to that one; 0: not known */
    uv_timer_t timer;         /* until its memory counts as unused; begun when `timed` */
    bool timed;
};

void spill_init(struct daemon *d); /* the daemon's timer, on its loop */

/* A gradient waits in its slot: look in a while whether it still does. */
void spill_watch(struct daemon *d);

/* Count what a predecessor has spilled. */
void spill_adopted(struct model *m);

/* The step was committed: nothing that is in there is needed any more, and its memory goes back
 * when the next steps do not need it. */
void spill_step_over(struct model *m);

/* Nothing is copied, and libuv's pool is not at it; its timer, or NULL: both for who ends it. */
bool spill_is_idle(const struct model *m);
uv_timer_t *spill_timer(struct model *m);

/* No kernel runs any more: forget what runs. */
void spill_deinit(struct model *m);

#endif
