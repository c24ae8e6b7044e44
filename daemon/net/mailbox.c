/* See mailbox.h. */
#include "daemon/net/mailbox.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include <zmq.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/replies.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

#define BATCH_MAX       64   /* frames per turn of the loop */
#define HIGH_WATER_MARK 4096 /* per peer, both ways */

/* One message: identity, then exactly one frame. Returns false when nothing was there. */
static bool receive_one(struct daemon *d)
{
    struct mailbox *mb = d->mailbox;
    zmq_msg_t identity, frame;
    zmq_msg_init(&identity);
    zmq_msg_init(&frame);
    const bool got = zmq_msg_recv(&identity, mb->router, ZMQ_DONTWAIT) >= 0;
    if (got && zmq_msg_more(&identity) && zmq_msg_recv(&frame, mb->router, ZMQ_DONTWAIT) >= 0) {
        bool surplus = false;
        bool more = zmq_msg_more(&frame);
        while (more) { /* read the rest of the message, so that the next one is found */
            zmq_msg_t rest;
            zmq_msg_init(&rest);
            surplus = true;
            more = zmq_msg_recv(&rest, mb->router, ZMQ_DONTWAIT) >= 0 && zmq_msg_more(&rest);
            zmq_msg_close(&rest);
        }
        if (surplus || zmq_msg_size(&identity) > MAILBOX_IDENTITY_BYTES_MAX)
            mb->bad_frames++;
        else
            d->hooks->frame(d, zmq_msg_data(&identity), (uint32_t)zmq_msg_size(&identity),
                            zmq_msg_data(&frame), zmq_msg_size(&frame));
    }
    zmq_msg_close(&frame);
    zmq_msg_close(&identity);
    return got;
}

static bool input_pending(struct mailbox *mb)
{
    int events = 0;
    size_t bytes = sizeof events;
    return zmq_getsockopt(mb->router, ZMQ_EVENTS, &events, &bytes) == 0 &&
           (events & ZMQ_POLLIN) != 0;
}

static void idle_turn(uv_idle_t *idle);

static void pump(struct daemon *d)
{
    struct mailbox *mb = d->mailbox;
    if (d->stopping)
        return; /* what a request would need is going away */
    for (int i = 0; i < BATCH_MAX && receive_one(d); i++)
        continue;
    if (input_pending(mb))
        uv_idle_start(&mb->idle, idle_turn);
    else
        uv_idle_stop(&mb->idle);
}

static void idle_turn(uv_idle_t *idle)
{
    (void)idle; /* its being active keeps the next poll from sleeping; prepare does the work */
}

static void readable(uv_poll_t *poll, int status, int events)
{
    (void)events;
    if (status == 0)
        pump(poll->data);
}

static void before_poll(uv_prepare_t *prepare)
{
    struct daemon *d = prepare->data;
    if (input_pending(d->mailbox))
        pump(d);
}

static int make_socket(struct daemon *d, struct shd_err *e)
{
    struct mailbox *mb = d->mailbox;
    const int linger = 0, hwm = HIGH_WATER_MARK, mandatory = 1;
    const int64_t frame_max = (int64_t)WIRE_FRAME_BYTES_MAX;
    mb->context = zmq_ctx_new();
    if (mb->context == NULL)
        return err_sys(e, SHD_EIO, "create the ZeroMQ context");
    mb->router = zmq_socket(mb->context, ZMQ_ROUTER);
    if (mb->router == NULL)
        return err_sys(e, SHD_EIO, "create the ZeroMQ socket");
    zmq_setsockopt(mb->router, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(mb->router, ZMQ_SNDHWM, &hwm, sizeof hwm);
    zmq_setsockopt(mb->router, ZMQ_RCVHWM, &hwm, sizeof hwm);
    zmq_setsockopt(mb->router, ZMQ_ROUTER_MANDATORY, &mandatory, sizeof mandatory);
    zmq_setsockopt(mb->router, ZMQ_MAXMSGSIZE, &frame_max, sizeof frame_max);
    snprintf(mb->path, sizeof mb->path, "%s/%s.zmq", d->runtime_dir, d->device);
    char endpoint[sizeof mb->path + 8];
    snprintf(endpoint, sizeof endpoint, "ipc://%s", mb->path);
    if (strlen(mb->path) >= sizeof(((struct sockaddr_un *)0)->sun_path))
        return err_set(e, SHD_EINVAL, "socket path '%s' is longer than %zu bytes", mb->path,
                       sizeof(((struct sockaddr_un *)0)->sun_path) - 1);
    unlink(mb->path); /* the device lock is ours: a file here is stale */
    if (zmq_bind(mb->router, endpoint) != 0)
        return err_set(e, SHD_EIO, "bind '%s': %s", endpoint, zmq_strerror(zmq_errno()));
    return SHD_OK;
}

int mailbox_init(struct daemon *d, struct shd_err *e)
{
    struct mailbox *mb = d->mailbox;
    mb->arena_memory = sys_malloc(WIRE_ARENA_BYTES);
    mb->frame = sys_malloc(WIRE_FRAME_BYTES_MAX);
    if (mb->arena_memory == NULL || mb->frame == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for message buffers");
    mb->arena = (struct wire_arena){ .base = mb->arena_memory, .bytes = WIRE_ARENA_BYTES };
    int r = make_socket(d, e);
    if (r != SHD_OK)
        return r;
    int fd;
    size_t bytes = sizeof fd;
    if (zmq_getsockopt(mb->router, ZMQ_FD, &fd, &bytes) != 0)
        return err_set(e, SHD_EIO, "ZMQ_FD: %s", zmq_strerror(zmq_errno()));
    r = uv_poll_init(d->loop, &mb->poll, fd);
    if (r < 0)
        return err_set(e, SHD_EIO, "poll the ZeroMQ socket: %s", uv_strerror(r));
    uv_prepare_init(d->loop, &mb->prepare);
    uv_idle_init(d->loop, &mb->idle);
    mb->handles_ready = true;
    mb->poll.data = mb->prepare.data = mb->idle.data = d;
    uv_poll_start(&mb->poll, UV_READABLE, readable);
    uv_prepare_start(&mb->prepare, before_poll);
    return SHD_OK;
}

void mailbox_deinit(struct daemon *d)
{
    struct mailbox *mb = d->mailbox;
    if (mb->handles_ready) {
        uv_close((uv_handle_t *)&mb->poll, NULL);
        uv_close((uv_handle_t *)&mb->prepare, NULL);
        uv_close((uv_handle_t *)&mb->idle, NULL);
        mb->handles_ready = false;
        uv_run(d->loop, UV_RUN_NOWAIT); /* the poll must end before its descriptor */
    }
    if (mb->router != NULL)
        zmq_close(mb->router);
    if (mb->context != NULL)
        zmq_ctx_term(mb->context);
    if (mb->path[0] != '\0')
        unlink(mb->path);
    free(mb->arena_memory);
    free(mb->frame);
    *mb = (struct mailbox){ 0 };
}

/* The peer does not read, or has gone: nobody waits for this reply. */
static void reply_lost(struct daemon *d, const struct op *op, int error)
{
    struct session *s = op->session;
    d->mailbox->dropped_replies++;
    if (s == NULL) /* the reply to Hello */
        s = session_by_identity(d, op->identity, op->identity_bytes);
    if (s == NULL || s->state != SESSION_OPEN)
        return;
    session_end(s, error == EAGAIN ? "it does not read its replies" : "its connection is gone");
}

static void send_frame(struct daemon *d, const struct op *op, const void *frame, size_t bytes)
{
    void *router = d->mailbox->router;
    const int flags = ZMQ_DONTWAIT;
    if (zmq_send(router, op->identity, op->identity_bytes, flags | ZMQ_SNDMORE) < 0) {
        reply_lost(d, op, zmq_errno());
        return;
    }
    /* Once the identity is taken the rest is: ROUTER drops the message or sends it whole. */
    const int sent = zmq_send(router, frame, bytes, flags);
    CHECK(sent >= 0);
}

void mailbox_repeat(struct daemon *d, const struct op *op, const void *frame, size_t bytes)
{
    d->mailbox->repeated_replies++;
    send_frame(d, op, frame, bytes);
}

void mailbox_reply(struct daemon *d, const struct op *op)
{
    struct mailbox *mb = d->mailbox;
    struct shd_err e;
    size_t bytes;
    if (wire_reply_pack(&op->reply, mb->frame, WIRE_FRAME_BYTES_MAX, &bytes, &e) != SHD_OK) {
        const struct wire_reply failed = { .seq = op->reply.seq, .status = e.code, .text = e.text };
        struct shd_err ignored;
        if (wire_reply_pack(&failed, mb->frame, WIRE_FRAME_BYTES_MAX, &bytes, &ignored) != SHD_OK)
            return;
    }
    if (op->once)
        replies_keep(op->session->replies, op->req.seq, mb->frame, bytes);
    send_frame(d, op, mb->frame, bytes);
}
