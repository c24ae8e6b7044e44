/* The relay beside daemons: tell another host's relay what a daemon publishes of a model, as it
 * does. It has a reader's session for that, and ends with it. */
#ifndef SHD_RELAY_FEED_H
#define SHD_RELAY_FEED_H

#include <stdint.h>

#include "proto/base/status.h"

struct bulk;
struct frame_open;
struct relay;

/* Until either side hangs up; the reason is in e. owner_of: owner << 32 | owners. */
int feed_run(struct relay *relay, struct bulk *bulk, const struct frame_open *open,
             uint64_t owner_of, struct shd_err *e);

#endif
