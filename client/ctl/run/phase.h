/* The phases of a run (run_state.h), and what it takes to get from one to the next. */
#ifndef SHD_CTL_PHASE_H
#define SHD_CTL_PHASE_H

#include "client/ctl/run/run_state.h"

/* Once each daemon has been ready and is: WORKING, workers start, after the restore if there is
 * one. No-op in other phases. */
void phase_check_ready(struct run *r);

/* Workers can start: daemons are ready and have what they begin with. */
void phase_work(struct run *r);

/* Tell the workers to stop, by sig; the daemons follow when they have. Nothing is started again
 * from here on. No-op when that goes on already. */
void phase_stop(struct run *r, int sig);

/* No worker is left: save what they made, if that is wanted, and stop the daemons. No-op when that
 * goes on already. */
void phase_end(struct run *r);

/* The last save has ended (or there was a restore, which nobody needs any more). If it has not
 * succeeded the daemons stay: what they hold is nowhere else. */
void phase_saved(struct run *r, bool ok);

/* Nobody needs the daemons any more. */
void phase_end_daemons(struct run *r);

/* The relay to other hosts has ended: the daemons behind it follow, if they are to end. */
void phase_far_ended(struct run *r);

/* All is gone: let the loop end. */
void phase_done(struct run *r);

/* Something went wrong: the first such code is the exit code. */
void phase_failed(struct run *r, int code);

/* The same, and it cannot go on: stop. */
void phase_fail(struct run *r, int code);

/* Kill what still runs, of the daemons only when nothing needs them any more. */
void phase_kill(struct run *r);

/* Ctrl-Z: the workers stop with us, and go on with us. */
void phase_suspend(struct run *r);

/* Counts the children that run or wait to be started. */
uint32_t phase_count(const struct run_children *c);

/* Take all messages that daemons have sent us up to now: that they are ready, need longer, or end
 * drained, and what they want kept. */
void phase_take_messages(struct run *r);

#endif
