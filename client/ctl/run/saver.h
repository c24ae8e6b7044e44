/* The helper children of `shardctl run`: `shardctl restore` before the workers start, `shardctl
 * checkpoint --every` while they work. It saves once more before the daemons are stopped. What
 * their end means for the run is revive.c's to say. */
#ifndef SHD_CTL_SAVER_H
#define SHD_CTL_SAVER_H

#include "client/ctl/run/run_state.h"

void saver_init(struct run *r);

/* Start the restore (options->restore). */
int saver_restore(struct run *r, struct shd_err *e);

/* Start saving, if that is wanted. */
int saver_start(struct run *r, struct shd_err *e);

/* Neither of them runs. */
bool saver_gone(const struct run *r);

/* Tell them to end, the saver to save first what is new; false: neither runs. */
bool saver_stop(const struct run *r);
void saver_kill(const struct run *r);

/* The verdict on c, one of the two, which has exited: true, and says so, when it failed. Its own
 * words were relayed. */
bool saver_failed(const struct run_child *c, int wait_status);

#endif
