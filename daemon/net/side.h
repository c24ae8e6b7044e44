/* The side channel's listener: accepts, checks who the peer is, makes sessions. */
#ifndef SHD_SIDE_H
#define SHD_SIDE_H

#include <uv.h>

#include "proto/base/status.h"

struct daemon;
struct door;

struct side {
    struct daemon *daemon; /* borrowed */
    struct door *door;     /* owned */
    uv_timer_t timer;      /* running while a session waits for its Hello */
    char path[600];
};

/* Listen at RUNTIME_DIR/DEVICE.sock. */
int side_init(struct side *side, struct daemon *d, struct shd_err *e);
void side_deinit(struct side *side); /* removes the socket file, unless a keeper has models */

#endif
