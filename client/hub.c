/* See hub.h. Connecting is in hub_connect.c. */
#include "client/hub.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/check.h"
#include "proto/sys.h"

#define NS_PER_MS     UINT64_C(1000000)
#define NS_PER_S      UINT64_C(1000000000)
#define POLL_SLICE_NS (100 * NS_PER_MS)

uint64_t hub_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

int link_err(const struct link *link, int code, struct shd_err *e, const char *fmt, ...)
{
    char text[SHD_ERR_TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return err_set(e, code, "daemon %s (pid %d) at %s %s", link->device, (int)link->pid, link->path,
                   text);
}

static void link_fault(struct link *link, const struct shd_err *why)
{
    if (link->fault.code == SHD_OK)
        link->fault = *why;
}

int hub_check(const struct hub *hub, struct shd_err *e)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        const struct link *link = &hub->links[i];
        if (link->fault.code == SHD_OK)
            continue;
        if (e != NULL)
            *e = link->fault;
        return link->fault.code;
    }
    return SHD_OK;
}

/* -- Receiving -------------------------------------------------------------------------------- */

static struct call *find_call(struct link *link, uint64_t seq)
{
    for (uint32_t i = 0; i < HUB_CALLS_MAX; i++)
        if (link->calls[i].seq == seq)
            return &link->calls[i];
    return NULL;
}

static int take_frame(struct link *link, const void *frame, size_t bytes, struct shd_err *e)
{
    struct wire_arena arena = { .base = link->hub->arena_memory, .bytes = WIRE_ARENA_BYTES };
    struct wire_reply reply;
    int r = wire_reply_unpack(frame, bytes, &arena, &reply, e);
    if (r != SHD_OK)
        return link_err(link, r, e, "sent a reply that is not understood: %.80s",
                        e != NULL ? e->text : "");
    struct call *slot = reply.seq != 0 ? find_call(link, reply.seq) : NULL;
    if (slot == NULL && reply.status != SHD_OK) /* it could not tell which request failed */
        return link_err(link, reply.status, e, "refused a request: %s", reply.text);
    if (slot == NULL)
        return link_err(link, SHD_EPROTO, e, "answered request %" PRIu64 ", which was not asked",
                        reply.seq);
    const struct call call = *slot;
    *slot = (struct call){ 0 };
    link->call_count--;
    if (call.ctx != NULL)
        call.fn(link, &call, &reply);
    return SHD_OK;
}

/* One message; false when nothing (more) is there. */
static bool receive_one(struct link *link)
{
    struct shd_err e = { 0 };
    zmq_msg_t msg;
    zmq_msg_init(&msg);
    if (zmq_msg_recv(&msg, link->dealer, ZMQ_DONTWAIT) < 0) {
        if (errno != EAGAIN && errno != EINTR) {
            link_err(link, SHD_EIO, &e, "cannot be read: %s", zmq_strerror(errno));
            link_fault(link, &e);
        }
        zmq_msg_close(&msg);
        return false;
    }
    int r;
    if (zmq_msg_more(&msg))
        r = link_err(link, SHD_EPROTO, &e, "sent a reply of several frames");
    else
        r = take_frame(link, zmq_msg_data(&msg), zmq_msg_size(&msg), &e);
    zmq_msg_close(&msg);
    if (r != SHD_OK)
        link_fault(link, &e);
    return r == SHD_OK;
}

/* The side channel is readable although nothing was asked on it: it hung up, or is out of step. */
static void look_at_side(struct link *link)
{
    struct shd_err e = { 0 };
    struct side_msg msg;
    const int r = side_recv(link->side_fd, /* timeout_ms= */ 0, &msg, /* ret_fd= */ NULL, &e);
    if (r == SHD_ETIMEDOUT)
        return;
    if (r == SHD_EGONE)
        link_err(link, SHD_EGONE, &e, "is gone");
    else if (r == SHD_OK && msg.type == SIDE_ERROR)
        link_err(link, msg.status, &e, "ended the session: %s", msg.text);
    else
        link_err(link, SHD_EPROTO, &e, "sent what was not asked for on its side channel");
    link_fault(link, &e);
}

static bool link_usable(const struct link *link)
{
    return link->dealer != NULL && link->fault.code == SHD_OK;
}

int hub_poll(struct hub *hub, uint64_t timeout_ns, struct shd_err *e)
{
    const uint32_t count = hub->link_count;
    const int r = hub_check(hub, e);
    if (r != SHD_OK)
        return r;
    const long timeout_ms = (long)((timeout_ns + NS_PER_MS - 1) / NS_PER_MS);
    if (zmq_poll(hub->poll_items, (int)(2 * count), timeout_ms) < 0 && errno != EINTR)
        return err_set(e, SHD_EIO, "poll the daemons' sockets: %s", zmq_strerror(errno));
    /* Replies first: those sent before a daemon died still count. */
    for (uint32_t i = 0; i < count; i++)
        while (link_usable(&hub->links[i]) && receive_one(&hub->links[i]))
            continue;
    for (uint32_t i = 0; i < count; i++)
        if (hub->poll_items[count + i].revents != 0)
            look_at_side(&hub->links[i]);
    return hub_check(hub, e);
}

/* -- Sending ---------------------------------------------------------------------------------- */

static int wait_for_room(struct link *link, uint64_t deadline_ns, struct shd_err *e)
{
    const uint64_t now_ns = hub_clock_ns();
    if (now_ns >= deadline_ns)
        return link_err(link, SHD_ETIMEDOUT, e,
                        "did not take a request within %" PRIu64 " ms (%" PRIu32 " are pending)",
                        link->hub->timeout_ns / NS_PER_MS, link->call_count);
    const uint64_t left_ns = deadline_ns - now_ns;
    return hub_poll(link->hub, left_ns < POLL_SLICE_NS ? left_ns : POLL_SLICE_NS, e);
}

static int send_frame(struct link *link, size_t bytes, uint64_t deadline_ns, struct shd_err *e)
{
    for (;;) {
        if (sys_zmq_send(link->dealer, link->hub->frame, bytes, ZMQ_DONTWAIT) >= 0)
            return SHD_OK;
        if (errno != EAGAIN && errno != EINTR)
            return link_err(link, errno == ENOMEM ? SHD_ENOMEM : SHD_EIO, e,
                            "cannot be sent to: %s", zmq_strerror(errno));
        /* The pipe is full: a request packed earlier waits there, not ours. A reply's handler
         * sends nothing, so the frame is still ours after the wait. */
        const uint64_t now_ns = hub_clock_ns();
        if (now_ns >= deadline_ns)
            return link_err(link, SHD_ETIMEDOUT, e,
                            "did not read its requests within %" PRIu64 " ms",
                            link->hub->timeout_ns / NS_PER_MS);
        const int r = hub_poll(link->hub, NS_PER_MS, e);
        if (r != SHD_OK)
            return r;
    }
}

int hub_ask(struct link *link, struct wire_request *request, const struct call *call,
            struct shd_err *e)
{
    CHECK(call->fn != NULL && call->ctx != NULL);
    struct hub *hub = link->hub;
    const uint64_t deadline_ns = hub_clock_ns() + hub->timeout_ns;
    int r = hub_check(hub, e);
    while (r == SHD_OK && link->call_count == HUB_CALLS_MAX)
        r = wait_for_room(link, deadline_ns, e);
    if (r != SHD_OK)
        return r;
    request->seq = link->seq_last + 1;
    request->session = link->session;
    size_t bytes;
    r = wire_request_pack(request, hub->frame, WIRE_FRAME_BYTES_MAX, &bytes, e);
    if (r == SHD_OK)
        r = send_frame(link, bytes, deadline_ns, e);
    if (r != SHD_OK)
        return r;
    link->seq_last = request->seq;
    struct call *slot = find_call(link, 0);
    CHECK(slot != NULL);
    *slot = *call;
    slot->seq = request->seq;
    link->call_count++;
    hub->requests++;
    return SHD_OK;
}

void hub_forget(struct hub *hub, const void *ctx)
{
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++)
            if (hub->links[l].calls[i].ctx == ctx)
                hub->links[l].calls[i].ctx = NULL;
}

/* -- Segments --------------------------------------------------------------------------------- */

static int receive_segment(struct link *link, const struct wire_segment *segment, int *ret_fd,
                           struct shd_err *e)
{
    struct side_msg msg;
    int fd;
    const uint64_t timeout_ms = link->hub->timeout_ns / NS_PER_MS;
    int r = side_recv(link->side_fd, timeout_ms < INT32_MAX ? (int)timeout_ms : INT32_MAX, &msg,
                      &fd, e);
    if (r != SHD_OK)
        return r;
    if (msg.type == SIDE_ERROR)
        r = err_set(e, msg.status, "%s", msg.text);
    else if (msg.type != SIDE_SEGMENT || fd < 0)
        r = err_set(e, SHD_EPROTO, "side message of type %" PRIu32 " instead of a segment",
                    msg.type);
    else if (msg.ticket != segment->ticket || msg.kind != segment->kind ||
             msg.bytes != segment->bytes)
        r = err_set(e, SHD_EPROTO,
                    "got segment kind %" PRIu32 " of %" PRIu64 " bytes, asked for "
                    "kind %d of %" PRIu64,
                    msg.kind, msg.bytes, (int)segment->kind, segment->bytes);
    else
        r = segment_check(fd, segment->kind, segment->bytes, e);
    if (r == SHD_OK)
        *ret_fd = fd;
    else if (fd >= 0)
        close(fd);
    return r;
}

int hub_claim(struct link *link, const struct wire_segment *segment, int *ret_fd, struct shd_err *e)
{
    int r = hub_check(link->hub, e);
    if (r != SHD_OK)
        return r;
    struct shd_err why = { 0 };
    const struct side_msg claim = {
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM, .ticket = segment->ticket
    };
    r = side_send(link->side_fd, &claim, /* pass_fd= */ -1, &why);
    if (r == SHD_OK)
        r = receive_segment(link, segment, ret_fd, &why);
    if (r == SHD_OK)
        return SHD_OK;
    return link_err(link, r, e, "does not pass its %s segment: %s",
                    segment_kind_name(segment->kind), why.text);
}

/* -- Rounds ----------------------------------------------------------------------------------- */

static int take_answer(struct round *round, struct link *link, uint64_t arg,
                       const struct wire_reply *reply, struct shd_err *e)
{
    if (reply->status != SHD_OK)
        return err_set(e, reply->status, "daemon %s: %s", link->device, reply->text);
    if (reply->type != round->type)
        return link_err(link, SHD_EPROTO, e, "answered %s with a reply of type %d, not %d",
                        round->what, (int)reply->type, (int)round->type);
    return round->take != NULL ? round->take(round, link, arg, reply, e) : SHD_OK;
}

static void round_answered(struct link *link, const struct call *call,
                           const struct wire_reply *reply)
{
    struct round *round = call->ctx;
    struct shd_err e = { 0 };
    CHECK(round->waiting > 0);
    round->waiting--;
    const int r = take_answer(round, link, call->arg, reply, &e);
    if (r != SHD_OK && round->err.code == SHD_OK) {
        round->err = e;
        round->err.code = r;
    }
}

int round_ask(struct round *round, struct link *link, struct wire_request *request, uint64_t arg,
              struct shd_err *e)
{
    const struct call call = { .fn = round_answered, .ctx = round, .arg = arg };
    const int r = hub_ask(link, request, &call, e);
    if (r == SHD_OK)
        round->waiting++;
    return r;
}

static int timed_out(const struct round *round, const struct hub *hub, struct shd_err *e)
{
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++)
            if (hub->links[l].calls[i].ctx == round)
                return link_err(&hub->links[l], SHD_ETIMEDOUT, e,
                                "did not answer %s within %" PRIu64 " ms%s%s", round->what,
                                hub->timeout_ns / NS_PER_MS, round->hint != NULL ? ": " : "",
                                round->hint != NULL ? round->hint : "");
    return err_set(e, SHD_ETIMEDOUT, "%s was not answered", round->what);
}

int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e)
{
    int r = asked;
    const uint64_t deadline_ns = hub_clock_ns() + hub->timeout_ns;
    while (r == SHD_OK && round->waiting > 0 && round->err.code == SHD_OK) {
        const uint64_t now_ns = hub_clock_ns();
        if (now_ns >= deadline_ns) {
            r = timed_out(round, hub, e);
            break;
        }
        const uint64_t left_ns = deadline_ns - now_ns;
        r = hub_poll(hub, left_ns < POLL_SLICE_NS ? left_ns : POLL_SLICE_NS, e);
        if (r != SHD_OK && round->waiting == 0 && round->err.code == SHD_OK)
            r = SHD_OK; /* everything was answered before the daemon went */
    }
    hub_forget(hub, round);
    if (r == SHD_OK && round->err.code != SHD_OK) {
        r = round->err.code;
        if (e != NULL)
            *e = round->err;
    }
    return r;
}
