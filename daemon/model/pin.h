/* Pins: what this owner publishes of all units, as of exactly one step, for readers to look at
 * while training goes on.
 *
 * A pin is a copy of the publish segment, place for place, in a segment of its own in host memory,
 * which is handed out read-only. Happy path: PIN of step K has the memory made on libuv's pool;
 * when K is the open step (it may be to come) pieces of it are copied by the kernel queue, a few at
 * a time. An update of a unit that is not copied yet queues, before itself, a copy of what is left
 * of it: work runs in queueing order, so every copy is of step K whatever is queued behind it, and
 * no step waits for a reader. The request is answered when all is copied.
 *
 * A pin of the moving average (PIN.ema) is that of its state, converted to what is published; of
 * units that have none, their parameters. It is another pin than that of the same step's
 * parameters.
 *
 * There is memory only while somebody pins. A session has one pin of a model: another PIN takes its
 * place and, where no other session shares it, its memory. Sessions that pin the same step share
 * one; there are at most PINS_MAX of different steps. The last one who lets go of it, or dies,
 * frees it. Nothing of it is kept for a successor: a mapping lives on, the reader pins anew.
 *
 * Failure: no room, or a kernel that fails: the requests for it get the reason, and training goes
 * on. Loop thread, but for making and freeing memory. */
#ifndef SHD_PIN_H
#define SHD_PIN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

#define PINS_MAX 2u /* steps of a model that are pinned at once */

extern uint64_t pin_piece_bytes; /* that are copied at a time. A test makes it small */

struct model;
struct op;
struct pins;
struct session;

/* The requests. PIN: SHD_PENDING: op is finished later. Errors: SHD_ESTEP the step is over, what
 * the session has pinned is gone; SHD_EBUSY as many other steps are pinned as there may be. */
int pin_take(struct op *op);
int pin_let_go(struct op *op);

/* unit is about to be updated: copy what is left of it. Errors: SHD_EBUSY, the kernel queue is
 * full: not yet. */
int pins_before_update(struct model *m, uint32_t unit, struct shd_err *e);

/* The model's phase has changed: one may begin. */
void pins_moved(struct model *m);

/* Go on when the kernel queue may have room again. */
void pins_retry(struct model *m);

void pins_forget_session(struct model *m, const struct session *s);

/* At shutdown, when no work runs any more. */
void pins_free(struct model *m);

struct pin_shown { /* one of them, for who looks */
    uint64_t step;
    uint64_t bytes;    /* of its memory; 0: there is none yet */
    uint32_t sessions; /* that have it pinned */
    bool ready;        /* all is copied; else its step is to come, or copying goes on */
    uint64_t began_ns; /* of copying, by uv_hrtime(); 0: it is to come */
};
uint32_t pins_show(const struct model *m, struct pin_shown ret_pins[PINS_MAX]);

#endif
