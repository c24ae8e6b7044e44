/* One ZMTP connection over a Unix socket, of either side, for a thread that has it alone: a relay
 * is ROUTER to workers and DEALER to daemons. Messages of one frame, as all of ours are. */
#ifndef SHD_RELAY_ZCONN_H
#define SHD_RELAY_ZCONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct zconn {
    int fd;      /* owned; -1: closed */
    bool dealer; /* this side is */
    bool greeted, ready;
    uint8_t *in; /* owned */
    size_t used; /* bytes there */
    size_t skip; /* of these: the message that was given last */
};

#define ZCONN_CLOSED ((struct zconn){ .fd = -1 })

/* Take over a connected socket that does not block (closed on an error as well), and say the
 * opening. Errors: SHD_ENOMEM, SHD_EGONE. */
int zconn_open(struct zconn *z, int fd, bool dealer, struct shd_err *e);
void zconn_close(struct zconn *z);

/* Connect to a daemon's DEVICE.zmq, as a DEALER. Errors: SHD_EGONE nobody there, SHD_ENOMEM. */
int zconn_dial(struct zconn *z, const char *path, struct shd_err *e);

/* Read what is there; never waits. Errors: SHD_EGONE hung up. */
int zconn_read(struct zconn *z, struct shd_err *e);

/* The next message of what was read: its bytes are the connection's, until the next call of any
 * function. SHD_PENDING: none is complete; SHD_EPROTO. */
int zconn_next(struct zconn *z, const uint8_t **ret_body, size_t *ret_bytes, struct shd_err *e);

/* Send one; waits for room while it reads. Errors: SHD_ETIMEDOUT the peer takes nothing, SHD_EGONE.
 */
int zconn_write(struct zconn *z, const void *body, size_t bytes, struct shd_err *e);

#endif
