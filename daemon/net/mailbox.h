/* The mailbox: where clients' requests come in and replies go out, on RUNTIME_DIR/DEVICE.zmq.
 *
 * To a client it is a ZeroMQ ROUTER; see conn.h for what it is. A reply goes to the connection that
 * its request came by, or into the session's ring if it came by that (rings.h), and to nobody when
 * those have gone.
 */
#ifndef SHD_MAILBOX_H
#define SHD_MAILBOX_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/wire/wire.h"

struct conns;
struct daemon;
struct door;
struct rings;
struct session;

struct mailbox {
    struct door *door;       /* owned */
    struct conns *conns;     /* owned */
    struct rings *rings;     /* owned */
    struct wire_arena arena; /* of the request being dispatched */
    uint8_t *arena_memory;   /* owned */
    uint8_t *frame;          /* owned: the reply being packed (op.c) */
    char path[600];
    uint64_t bad_frames, dropped_replies, repeated_replies;
};

/* Listen at RUNTIME_DIR/DEVICE.zmq. */
int mailbox_init(struct daemon *d, struct shd_err *e);
void mailbox_deinit(struct daemon *d);

/* The session's connection has it; or has none any more, nor a ring, and waits for another Hello.
 */
void mailbox_admit(const struct session *s);
void mailbox_session_ended(struct session *s);

/* See rings.h. */
int mailbox_open_ring(struct session *s, struct wire_ring *ret_ring, struct shd_err *e);
void mailbox_woken(struct session *s);
void mailbox_published(struct daemon *d, uint64_t awaited);
uint64_t mailbox_ring_bytes(const struct daemon *d);

/* Hang up on the connection that waits longest for its Hello. False: none waits. */
bool mailbox_push_out(struct daemon *d);

#endif
