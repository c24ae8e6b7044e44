/* Starting daemons, workers and helpers: their command lines and environments. */
#ifndef SHD_CTL_LAUNCH_H
#define SHD_CTL_LAUNCH_H

#include "client/ctl/run/run_state.h"

/* Fill in the command lines and environments; r->path is set. Undone by launch_free(), which is a
 * no-op before. */
int launch_prepare(struct run *r, struct shd_err *e);
void launch_free(struct run *r);

/* c, of the daemons, is the relay to other hosts. */
bool launch_is_far(const struct run_child *c);

/* Start c, which is not running and whose relay is idle; a daemon's timer runs until it is ready.
 * On an error c is as before. */
int launch_daemon(struct run_child *c, struct shd_err *e);
int launch_worker(struct run_child *c, struct shd_err *e);

/* Start the restore (options->restore); start saving (options->checkpoint), again and again until
 * it is told to stop, or once. */
int launch_restorer(struct run *r, struct shd_err *e);
int launch_saver(struct run *r, bool stays, struct shd_err *e);

#endif
