/* A session of a relay's at a daemon beside it, for one thread: what a worker's library does to
 * attach (docs/protocol.md, Attaching), in turn. */
#ifndef SHD_RELAY_ATTACH_H
#define SHD_RELAY_ATTACH_H

#include "daemon/relay/zconn.h"
#include "proto/share/fdpass.h"
#include "proto/wire/wire.h"

struct attach {
    int side_fd;             /* owned; -1: none */
    struct zconn z;          /* owned */
    struct side_msg welcome; /* of the daemon; its level is at most this build's */
};

#define ATTACH_CLOSED ((struct attach){ .side_fd = -1, .z = { .fd = -1 } })

/* Connect to dir/DEVICE.sock and .zmq, and receive the welcome; nothing is said yet. A refusal is
 * its status with its text. Errors: SHD_EGONE, SHD_ENOENT, SHD_EAUTH, SHD_ETIMEDOUT, SHD_EPROTO. */
int attach_open(const char *dir, const char *device, struct attach *ret_attach, struct shd_err *e);
void attach_close(struct attach *a);

/* Claim a segment that a reply has named; its descriptor is the caller's. Errors: SHD_ESEGMENT it
 * is not what was said, SHD_ENOTSUP it is no host memory; as of side_recv(). */
int attach_claim(struct attach *a, const struct wire_segment *segment, int *ret_fd,
                 struct shd_err *e);

/* Ask and wait for the answer, for at most timeout_ns; nothing else is under way. A refusal is its
 * status with its text. */
int attach_ask(struct attach *a, const struct wire_request *request, uint64_t timeout_ns,
               struct wire_arena *arena, struct wire_reply *ret_reply, struct shd_err *e);

#endif
