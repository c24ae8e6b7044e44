/* `shardctl run` and `shardctl up` at work: N daemons, then for `run` workers beside them until the
 * last is done, for `up` none until a signal. The phases are those of run_state.h.
 *
 * What dies while the run wants it is started again, a daemon with the descriptors it stored with
 * us: revive.c, which also says when that is given up. The first thing that goes wrong for good
 * decides the exit code and is the one that is named.
 */
#ifndef SHD_CTL_SUPERVISE_H
#define SHD_CTL_SUPERVISE_H

#include "client/ctl/run/run_state.h"

/* Run to the end. Returns shardctl's exit code; has said why if it is not 0. */
int supervise(const struct run_options *options);

#endif
