/* Daemons that cannot be started for the time being: said once a minute, and noted beside their
 * sockets for `shardctl status` and the page (down_note.h). */
#ifndef SHD_CTL_TROUBLE_H
#define SHD_CTL_TROUBLE_H

#include <stdint.h>

#include "client/ctl/run/run_state.h"

/* True while we keep a daemon's memory, which is nowhere else: then we do not end by ourselves. */
bool trouble_state_is_kept(const struct run *r);

/* c, a daemon, was not started, or ended before it was ready: why is a sentence that names it. It
 * is tried again in wait_ms. */
void trouble_begin(struct run_child *c, const char *why, uint64_t wait_ms);

/* It is being tried. */
void trouble_try(struct run_child *c);

/* It is ready, or not wanted any more. */
void trouble_end(struct run_child *c);

#endif
