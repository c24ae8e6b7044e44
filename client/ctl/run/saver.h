/* The helper children of `shardctl run`: `shardctl restore` before the workers start, `shardctl
 * checkpoint --every` while they work. It saves once more before the daemons are stopped. */
#ifndef SHD_CTL_SAVER_H
#define SHD_CTL_SAVER_H

#include <stdbool.h>

#include "proto/base/status.h"

struct run;

void saver_init(struct run *r);

/* Start the restore if one is wanted: true, and the workers wait for it (an error ends the run). */
bool saver_restores(struct run *r);

/* Start saving, if that is wanted. */
int saver_start(struct run *r, struct shd_err *e);

/* Neither of them runs. */
bool saver_gone(const struct run *r);

/* Tell them to end, the saver to save first what is new; false: neither runs. */
bool saver_stop(const struct run *r);
void saver_kill(const struct run *r);

/* The restorer has exited: workers can start, or there is nothing to work on. */
void saver_restored(struct run *r, int wait_status);

/* The saver has. */
void saver_exited(struct run *r, int wait_status);

#endif
