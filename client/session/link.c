/* See link.h. */
#include "client/session/link.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/share/fdpass.h"
#include "proto/share/segment_file.h"

#define USEFUL_NS   NS_PER_S /* a daemon that was there for as long came back indeed */
#define BUSY_NS_MAX (100 * NS_PER_MS)

int link_err(const struct link *link, int code, struct shd_err *e, const char *fmt, ...)
{
    char text[SHD_ERR_TEXT_BYTES];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (link->pid == 0) /* never met */
        return err_set(e, code, "daemon %s at %s %s", link->device, link->path, text);
    return err_set(e, code, "daemon %s (pid %d) at %s %s", link->device, (int)link->pid, link->path,
                   text);
}

uint32_t link_owner(const struct link *link)
{
    const struct hub *hub = link->hub;
    return hub->members.seats != NULL ? hub->members.seats->owner[link->index]
                                      : link->index % hub->owner_count;
}

uint32_t link_owners(const struct link *link)
{
    return link->hub->members.seats != NULL ? link->hub->members.seats->owners
                                            : link->hub->owner_count;
}

uint64_t link_goes_by(const struct link *link, uint64_t first, uint64_t instance)
{
    return first != 0 && link->hub->members.membership != NULL ? first : instance;
}

bool link_is_replica(const struct link *link)
{
    return link->index >= link->hub->owner_count;
}

void link_fault(struct link *link, const struct shd_err *why)
{
    if (link->fault.code == SHD_OK)
        link->fault = *why;
}

/* -- The table --------------------------------------------------------------------------------- */

struct call *link_add_call(struct link *link, const struct call *call)
{
    for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
        struct call *slot = &link->calls[i];
        if (slot->used)
            continue;
        *slot = *call;
        slot->used = true;
        slot->seq = 0;
        link->call_count++;
        link->unsent++;
        return slot;
    }
    return NULL;
}

void link_drop_call(struct link *link, struct call *call)
{
    CHECK(call->used && link->call_count > 0);
    if (call->seq == 0)
        link->unsent--;
    else if (!call->by_ring)
        link->ring.conn_calls--;
    *call = (struct call){ 0 };
    link->call_count--;
}

/* Answered by nothing. A session that leaves only asks daemons to let go. One that hangs up has let
 * go: that is its answer. */
static void let_go(struct link *link, struct call *call)
{
    const struct call answered = *call;
    const struct wire_reply reply = { .type = WIRE_REPLY_NONE };
    link_drop_call(link, call);
    answered.fn(link, &answered, &reply);
}

void link_down(struct link *link, const struct shd_err *why)
{
    struct hub *hub = link->hub;
    const uint64_t now_ns = clock_now_ns();
    const bool was_up = link->state == LINK_UP;
    if (link->proven || (link->state == LINK_UP && now_ns - link->state_ns >= USEFUL_NS)) {
        link->since_ns = now_ns;
        link->since = time(NULL);
    }
    if (was_up) {
        event_gone(link, why);
        hub->down_count++;
        link->epoch++;
        link->retry_at_ns = link->retry_ns = 0;
    }
    link->proven = false;
    link->state = LINK_DOWN;
    link->state_ns = now_ns;
    link->last = *why;
    link->session = 0;
    link->busy.pause_ns = 0;
    if (link->dealer != NULL)
        zmq_close(link->dealer);
    const int side_fd = link->side_fd;
    link->side_fd = -1; /* first: a child that is forked now must not close what comes next */
    if (side_fd >= 0)
        close(side_fd);
    link->dealer = NULL;
    link_ring_close(&link->ring);
    hub->poll_items[link->index].socket = NULL;
    hub->poll_items[hub->link_count + link->index].fd = -1;
    link->unsent = 0;
    for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
        struct call *call = &link->calls[i];
        if (!call->used)
            continue;
        call->seq = 0;
        link->unsent++;
        if (call->ctx == NULL)
            link_drop_call(link, call);
        else if (hub->leaving)
            let_go(link, call);
    }
}

uint32_t link_retire(struct link *link, const struct shd_err *why, struct call *ret_moved)
{
    uint32_t moved = 0;
    CHECK(link->state != LINK_GONE);
    link_down(link, why);
    link->hub->down_count--;
    link->state = LINK_GONE;
    link->fault = (struct shd_err){ 0 };
    for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
        struct call *call = &link->calls[i];
        if (!call->used)
            continue;
        if (call->stays || ret_moved == NULL) {
            let_go(link, call);
        } else {
            ret_moved[moved++] = *call;
            link_drop_call(link, call);
        }
    }
    return moved;
}

/* -- Sending ----------------------------------------------------------------------------------- */

#ifdef SHD_FAIL_POINTS
static const char *const fail_before[] = {
#define FAIL_NAME(NAME, name) [WIRE_##NAME] = "send:" #name ":before",
    WIRE_REQUEST_MAP(FAIL_NAME)
#undef FAIL_NAME
};
static const char *const fail_after[] = {
#define FAIL_NAME(NAME, name) [WIRE_##NAME] = "send:" #name ":after",
    WIRE_REQUEST_MAP(FAIL_NAME)
#undef FAIL_NAME
};
#endif

/* Into hub->frame. */
static int pack(struct link *link, struct wire_request *request, uint64_t seq, size_t *ret_bytes,
                struct shd_err *e)
{
    struct shd_err why = { 0 };
    request->seq = seq;
    request->session = link->session;
    const int r = wire_request_pack_for(request, link->peer.level, link->hub->frame,
                                        WIRE_FRAME_BYTES_MAX, ret_bytes, &why);
    if (r == SHD_ENOTSUP)
        return link_err(link, r, e, "cannot be asked this: %s", why.text);
    return err_copy(&why, e);
}

static int send_by_conn(struct link *link, size_t bytes, uint64_t seq, struct shd_err *e)
{
    if (zmq_send(link->dealer, link->hub->frame, bytes, ZMQ_DONTWAIT) >= 0) {
        if (seq > link->ring.conn_sent)
            link->ring.conn_sent = seq;
        return SHD_OK;
    }
    if (errno == EAGAIN || errno == EINTR)
        return err_set(e, SHD_EBUSY, "pipe is full");
    return link_err(link, errno == ENOMEM ? SHD_ENOMEM : SHD_EIO, e, "cannot be sent to: %s",
                    zmq_strerror(errno));
}

static int send_by_ring(struct link *link, size_t bytes, uint64_t can_wait_ns, struct shd_err *e)
{
    struct shd_err why = { 0 };
    const int r = link_ring_send(&link->ring, link->side_fd, link->hub->frame, bytes, can_wait_ns,
                                 &why);
    if (r == SHD_OK || r == SHD_EBUSY)
        return err_copy(&why, e);
    return link_err(link, r, e, "broke its %s", why.text);
}

static int send_packed(struct link *link, const struct wire_request *request, enum link_way way,
                       size_t bytes, uint64_t can_wait_ns, struct shd_err *e)
{
    FAIL_POINT(fail_before[request->type]);
    const int r = way == LINK_BY_RING ? send_by_ring(link, bytes, can_wait_ns, e)
                                      : send_by_conn(link, bytes, request->seq, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT(fail_after[request->type]);
    link->hub->requests++;
    return SHD_OK;
}

int link_send(struct link *link, struct wire_request *request, uint64_t seq, struct shd_err *e)
{
    size_t bytes;
    const int r = pack(link, request, seq, &bytes, e);
    return r == SHD_OK ? send_packed(link, request, LINK_BY_CONN, bytes, 0, e) : r;
}

int link_send_call(struct link *link, struct call *call, struct shd_err *e)
{
    struct wire_request request = { .seq = 0 };
    size_t bytes = 0;
    int r = call->make(link, call, &request, e);
    if (r == SHD_OK)
        r = pack(link, &request, link->seq_last + 1, &bytes, e);
    if (r != SHD_OK)
        return r;
    const enum link_way way = link_ring_way(&link->ring, bytes);
    if (way == LINK_BY_NEITHER)
        return err_set(e, SHD_EBUSY, "requests before it are to be read first");
    const uint64_t now_ns = clock_now_ns();
    const bool others = now_ns - link->ring.sent_ns < link->hub->wakes.put_off_ns;
    r = send_packed(link, &request, way, bytes, call->can_wait && others ? now_ns : 0, e);
    if (r != SHD_OK)
        return r;
    link->ring.sent_ns = now_ns;
    call->seq = ++link->seq_last;
    call->sent_ns = now_ns;
    call->by_ring = way == LINK_BY_RING;
    link->ring.conn_calls += !call->by_ring;
    link->unsent--;
    return SHD_OK;
}

void link_heard(struct link *link, const struct call *call, uint64_t seq, bool by_ring)
{
    struct link_ring *ring = &link->ring;
    if (by_ring)
        return;
    if (call->by_ring)
        ring->elsewhere++;
    else if (seq > ring->conn_heard)
        ring->conn_heard = seq;
}

void link_busy(struct link *link, struct call *call, uint32_t retry_ms)
{
    const uint64_t pause_ns = link->busy.pause_ns > 0 ? 2 * link->busy.pause_ns
                                                      : retry_ms * NS_PER_MS;
    link->busy.pause_ns = pause_ns < BUSY_NS_MAX ? pause_ns : BUSY_NS_MAX;
    link->busy.until_ns = clock_now_ns() + link->busy.pause_ns;
    link->ring.conn_calls -= !call->by_ring;
    call->seq = 0;
    link->unsent++;
    if (call->ctx == NULL)
        link_drop_call(link, call); /* nobody waits any more */
}

/* As if the daemon had refused it: it is of an older build than the one before it, or than was
 * foreseen. What else was asked goes on. */
static void refuse_call(struct link *link, struct call *call, const struct shd_err *why)
{
    const struct call refused = *call;
    const struct wire_reply reply = { .status = why->code, .text = why->text };
    link_drop_call(link, call);
    if (refused.ctx != NULL)
        refused.fn(link, &refused, &reply);
}

int link_flush(struct link *link, struct shd_err *e)
{
    int r = SHD_OK;
    if (link->unsent > 0 && link->busy.pause_ns > 0 && clock_now_ns() < link->busy.until_ns)
        return SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && link->unsent > 0 && i < HUB_CALLS_MAX; i++)
        if (link->calls[i].used && link->calls[i].seq == 0) {
            struct shd_err why = { 0 };
            r = link_send_call(link, &link->calls[i], &why);
            if (r == SHD_ENOTSUP) {
                refuse_call(link, &link->calls[i], &why);
                r = SHD_OK;
            }
            err_copy(&why, e);
        }
    return r == SHD_EBUSY ? SHD_OK : r; /* a full pipe: at the next poll */
}

/* -- Segments ---------------------------------------------------------------------------------- */

static int canceled(struct shd_err *e)
{
    return err_set(e, SHD_ECANCELED, "the wait for it was broken off");
}

/* Who has not hung up lives. */
static uint64_t answer_deadline_ns(const struct hub *hub)
{
    return hub->patient ? UINT64_MAX : clock_now_ns() + hub->timeout_ns;
}

static int late(const struct link *link, struct shd_err *e)
{
    return err_set(e, SHD_ETIMEDOUT, "did not answer within %" PRIu64 " ms",
                   link->hub->timeout_ns / NS_PER_MS);
}

/* The daemon may stop between its answer and this. */
static int await_side(struct link *link, struct side_msg *ret_msg, int *ret_fd, struct shd_err *e)
{
    const struct hub *hub = link->hub;
    const uint64_t start_ns = clock_now_ns(), deadline_ns = answer_deadline_ns(hub);
    for (;;) {
        if (idle_stops(&link->hub->idle))
            return canceled(e);
        int r = side_recv(link->side_fd, (int)(IDLE_NS / NS_PER_MS), ret_msg, ret_fd, e);
        if (r == SHD_OK && ret_msg->type == SIDE_WAKE) /* this side is awake */
            r = SHD_ETIMEDOUT;
        if (r != SHD_ETIMEDOUT)
            return r;
        const uint64_t now_ns = clock_now_ns();
        if (now_ns >= deadline_ns)
            return late(link, e);
        if (hub->on_exchange != NULL)
            hub->on_exchange(link, start_ns, now_ns);
    }
}

static int receive_segment(struct link *link, const struct wire_segment *segment, int *ret_fd,
                           struct shd_err *e)
{
    struct side_msg msg = { .type = 0 };
    int fd = -1;
    int r = await_side(link, &msg, &fd, e);
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
    else if (segment->place == SEGMENT_HOST) /* a GPU's is checked by its driver */
        r = segment_shared_check(fd, segment->kind, segment->bytes, e);
    if (r == SHD_OK)
        *ret_fd = fd;
    else if (fd >= 0)
        close(fd);
    return r;
}

int link_claim(struct link *link, const struct wire_segment *segment, int *ret_fd,
               struct shd_err *e)
{
    if (link->fault.code != SHD_OK)
        return err_copy(&link->fault, e);
    if (link->side_fd < 0)
        return link_err(link, SHD_EGONE, e, "is gone");
    struct shd_err why = { 0 };
    const struct side_msg claim = {
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_CLAIM, .ticket = segment->ticket
    };
    int r = side_send(link->side_fd, &claim, /* pass_fd= */ -1, &why);
    if (r == SHD_OK)
        r = receive_segment(link, segment, ret_fd, &why);
    if (r == SHD_OK)
        return SHD_OK;
    if ((r == SHD_EGONE || r == SHD_ECANCELED || r == SHD_ETIMEDOUT) && link->state == LINK_UP)
        link_down(link, &why); /* a late answer would be taken for another one */
    return link_err(link, r, e, "does not pass its %s segment: %s",
                    segment_kind_name(segment->kind), why.text);
}

/* -- Asking while it comes up ------------------------------------------------------------------ */

/* SHD_PENDING: nothing yet. */
static int exchange_receive(struct link *link, const struct link_ask *ask, struct shd_err *e)
{
    struct wire_arena arena = { .base = link->hub->arena_memory, .bytes = WIRE_ARENA_BYTES };
    struct wire_reply reply;
    zmq_msg_t msg;
    zmq_msg_init(&msg);
    int r = SHD_PENDING;
    if (zmq_msg_recv(&msg, link->dealer, ZMQ_DONTWAIT) < 0)
        goto out;
    r = wire_reply_unpack(zmq_msg_data(&msg), zmq_msg_size(&msg), &arena, &reply, e);
    if (r == SHD_OK && reply.seq != link->seq_last)
        r = SHD_PENDING; /* a repeat of Welcome */
    else if (r == SHD_OK && reply.status != SHD_OK)
        r = err_set(e, reply.status, "%s", reply.text);
    else if (r == SHD_OK)
        r = ask->take != NULL ? ask->take(ask->ctx, link, &reply, e) : SHD_OK;
out:
    zmq_msg_close(&msg);
    return r;
}

int link_exchange(struct link *link, struct wire_request *request, const struct link_ask *ask,
                  struct shd_err *e)
{
    CHECK(link->state == LINK_HELLO);
    const uint64_t start_ns = clock_now_ns(), deadline_ns = answer_deadline_ns(link->hub);
    int r = link_send(link, request, ++link->seq_last, e);
    if (r != SHD_OK)
        return r;
    for (;;) {
        zmq_pollitem_t items[] = { { .socket = link->dealer, .events = ZMQ_POLLIN },
                                   { .fd = link->side_fd, .events = ZMQ_POLLIN } };
        const uint64_t now_ns = clock_now_ns();
        if (now_ns >= deadline_ns)
            return late(link, e);
        if (idle_stops(&link->hub->idle))
            return canceled(e);
        if (link->hub->on_exchange != NULL)
            link->hub->on_exchange(link, start_ns, now_ns);
        if (zmq_poll(items, 2, (long)(IDLE_NS / NS_PER_MS)) < 0 && errno != EINTR)
            return err_set(e, SHD_EIO, "poll its sockets: %s", zmq_strerror(errno));
        r = exchange_receive(link, ask, e);
        if (r != SHD_PENDING)
            return r;
        r = ask->look != NULL ? ask->look(ask->ctx, link, e) : SHD_OK;
        if (r != SHD_OK)
            return r;
        if (items[1].revents != 0)
            return err_set(e, SHD_EGONE, "hung up");
    }
}
