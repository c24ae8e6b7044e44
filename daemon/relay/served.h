/* The relay beside daemons: a session of another host's worker, at a daemon here. */
#ifndef SHD_RELAY_SERVED_H
#define SHD_RELAY_SERVED_H

#include "proto/base/status.h"

struct bulk;
struct frame_open;
struct relay;

/* Until either side hangs up; the reason is in e. */
int served_run(struct relay *relay, struct bulk *bulk, const struct frame_open *open,
               struct shd_err *e);

#endif
