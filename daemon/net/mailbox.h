/* The mailbox: a ZeroMQ ROUTER socket on the libuv loop.
 *
 * ZMQ_FD is edge-triggered and any call on the socket may eat the edge, so ZMQ_EVENTS is read
 * again after every batch: a prepare handle looks before each poll, and an idle handle keeps the
 * loop turning while more is pending. A batch is bounded, so one client cannot starve the rest.
 */
#ifndef SHD_MAILBOX_H
#define SHD_MAILBOX_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "proto/base/status.h"
#include "proto/wire/wire.h"

struct daemon;
struct op;

struct mailbox {
    void *context; /* owned */
    void *router;  /* owned */
    uv_poll_t poll;
    uv_prepare_t prepare;
    uv_idle_t idle;
    bool handles_ready;
    struct wire_arena arena; /* of the request being dispatched */
    uint8_t *arena_memory;   /* owned */
    uint8_t *frame;          /* owned: the reply being packed */
    char path[600];
    uint64_t bad_frames, dropped_replies, repeated_replies;
};

/* Bind RUNTIME_DIR/DEVICE.zmq. */
int mailbox_init(struct daemon *d, struct shd_err *e);
void mailbox_deinit(struct daemon *d);

/* Pack op->reply and send it to op->identity. Never blocks: a peer that has gone or does not read
 * loses its reply, and in the second case its session. */
void mailbox_reply(struct daemon *d, const struct op *op);

/* Send op's session, once more, the frame that this request was answered with. */
void mailbox_repeat(struct daemon *d, const struct op *op, const void *frame, size_t bytes);

#endif
