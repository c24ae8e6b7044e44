/* The side channel's listener: accepts, checks who the peer is, makes sessions. */
#ifndef SHD_SIDE_H
#define SHD_SIDE_H

#include <stdbool.h>

#include <uv.h>

#include "proto/base/status.h"

struct daemon;

struct side {
    struct daemon *daemon; /* borrowed */
    uv_poll_t poll;
    bool poll_ready;
    int fd;       /* owned; -1 when closed */
    int spare_fd; /* owned: given up to tell a client that descriptors have run out */
    char path[600];
};

/* Listen at RUNTIME_DIR/DEVICE.sock. */
int side_init(struct side *side, struct daemon *d, struct shd_err *e);
void side_deinit(struct side *side); /* removes the socket file */

#endif
