/* Children that exit are started again, up to a limit.
 *
 * A daemon that dies after it was ready is started again at once, with what it stored. A daemon
 * that dies before it is ready is given time, twice as much after each such end, for EARLY_MAX
 * tries. A worker killed by a signal is started again at once with its rank. A worker that exits
 * with a code has decided so itself. More than --max-restarts of one child within REVIVE_WINDOW_NS
 * end the run: by then it is not bad luck.
 */
#ifndef SHD_CTL_REVIVE_H
#define SHD_CTL_REVIVE_H

#include "client/ctl/run/run_state.h"

/* Reap the children that have exited; start each again, or end the run, or note that it is done. */
void revive_exited(struct run *r);

/* A child's timer has fired (run.child_timer). */
void revive_timer(uv_timer_t *timer);

#endif
