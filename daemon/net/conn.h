/* Connections of ZeroMQ's DEALERs, one each, on the loop: bytes in, messages up; messages down,
 * bytes out. All of a daemon's are in one table.
 *
 * ZeroMQ's own ROUTER is not used: it ends its process when descriptors or memory run out, accepts
 * whoever connects, and keeps what a peer does not read by the number of messages, not of bytes.
 *
 * Bounds. A connection without a session waits for its Hello: 5 s, 512 such of a user and of all,
 * messages of at most 4 KiB. Who has
 * too many loses its oldest. Of what a peer has not read 64 KiB
 * are kept before no more of its requests are read, and 4 MiB before it is hung up on.
 *
 * Failure: whatever a peer does ends its own connection; see struct conn_events. Loop thread. */
#ifndef SHD_CONN_H
#define SHD_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <uv.h>

#include "proto/base/status.h"

struct conns;

struct conn_events {
    /* A message came, of one frame; valid during the call. */
    void (*message)(void *ctx, uint64_t id, const void *data, size_t bytes);
    void (*several)(void *ctx, uint64_t id); /* one of several frames came, and is dropped */
    /* It has ended by itself: hung up, or did what it must not. */
    void (*ended)(void *ctx, uint64_t id, const char *why);
};

int conns_new(uv_loop_t *loop, const struct conn_events *events, void *ctx,
              struct conns **ret_conns, struct shd_err *e);
void conns_free(struct conns *all); /* NULL is a no-op */

/* A peer of user uid connected: takes over fd. SHD_EBUSY: no place, or fd is refused otherwise;
 * then it is closed. */
int conn_new(struct conns *all, int fd, uid_t uid, struct shd_err *e);

/* It has a session, or has none any more and waits for a Hello anew. An id that is gone: nothing.
 */
void conn_admit(struct conns *all, uint64_t id, bool admitted);

/* Send a message: now, or as its peer reads. False: the connection is gone, or the peer has so much
 * unread that it is now, without an event. */
bool conn_send(struct conns *all, uint64_t id, const void *data, size_t bytes);

/* Hang up on the one that waits longest for its Hello: its descriptor is needed. False: none
 * waits. */
bool conns_push_out(struct conns *all);

#endif
