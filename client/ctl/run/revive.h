/* Children that exit are started again.
 *
 * A daemon that dies after it was ready is started again at once, with what it stored. One that
 * cannot be started, or dies before it is ready, is given time, twice as much after each try, up to
 * RETRY_MS_MAX. While we keep memory of any daemon that goes on for ever: nothing else has their
 * state (trouble.h says it). Without any, EARLY_MAX tries in a row end the run.
 *
 * A worker killed by a signal is started again at once with its rank. A worker that exits with a
 * code has decided so itself.
 *
 * More than --max-restarts of one child within REVIVE_WINDOW_NS wait until that is over. It ends
 * the run only for a worker that crashes: SIGKILL comes from outside, SIGSEGV does not.
 */
#ifndef SHD_CTL_REVIVE_H
#define SHD_CTL_REVIVE_H

#include "client/ctl/run/run_state.h"

/* Reap the children that have exited; start each again, or end the run, or note that it is done. */
void revive_exited(struct run *r);

/* A child's timer has fired (run.child_timer). */
void revive_timer(uv_timer_t *timer);

#endif
