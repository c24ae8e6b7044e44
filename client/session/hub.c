/* See hub.h. */
#include "client/session/hub.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>

#include "client/session/link_attach.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/fdpass.h"

#define POLL_SLICE_NS  (100 * NS_PER_MS)
#define REPEAT_NS      (2 * NS_PER_S) /* without an answer: ask again */
#define REPEAT_LOOK_NS (NS_PER_S / 4)
#define POLLED_NS      NS_PER_MS /* how old the last look at the sockets may be */
#define ROOM_NS        NS_PER_MS /* for room in a ring: between two looks */
#define SEVERAL_NS     NS_PER_MS /* for several replies at once; then for the next one */
#define STOPPED_NS     NS_PER_S  /* between two looks of a wait, many times its sleep */

int hub_check(const struct hub *hub, struct shd_err *e)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        const int r = err_copy(&hub->links[i].fault, e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

bool hub_has_older(const struct hub *hub, uint32_t level)
{
    for (uint32_t i = 0; i < hub->link_count; i++)
        if (hub->links[i].state != LINK_GONE && hub->links[i].peer.level < level)
            return true;
    return false;
}

/* Before a sleep also those whose wake was put off. */
static void wake_daemons(struct hub *hub, bool sleeps)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link_ring *ring = &hub->links[i].ring;
        if (sleeps || ring->put_off == 0 ||
            clock_now_ns() - ring->put_off_ns >= hub->wakes.put_off_ns)
            link_ring_wake(ring, hub->links[i].side_fd);
    }
}

uint64_t hub_deadline_ns(struct hub *hub, uint64_t start_ns)
{
    const uint64_t now_ns = clock_now_ns();
    wake_daemons(hub, /* sleeps= */ true);
    if (start_ns <= hub->at.looked_ns && now_ns - hub->at.looked_ns >= STOPPED_NS)
        hub->at.back_ns = now_ns;
    hub->at.looked_ns = now_ns;
    hub->at.waited_ns = now_ns > start_ns ? now_ns - start_ns : 0;
    hub->wakes.waits = true;
    if (hub->on_wait != NULL && !hub->leaving)
        hub->on_wait(hub, start_ns, now_ns);
    if ((hub->down_count > 0 || hub->patient) && !hub->leaving)
        return UINT64_MAX;
    return (start_ns > hub->at.back_ns ? start_ns : hub->at.back_ns) + hub->timeout_ns;
}

uint64_t hub_left_ns(struct hub *hub, uint64_t start_ns, uint64_t max_ns)
{
    const uint64_t now_ns = clock_now_ns(), deadline_ns = hub_deadline_ns(hub, start_ns);
    const uint64_t left_ns = now_ns < deadline_ns ? deadline_ns - now_ns : 0;
    return left_ns < max_ns ? left_ns : max_ns;
}

/* -- The table --------------------------------------------------------------------------------- */

static struct call *find_call(struct link *link, uint64_t seq)
{
    for (uint32_t i = 0; i < HUB_CALLS_MAX; i++)
        if (link->calls[i].used && link->calls[i].seq == seq)
            return &link->calls[i];
    return NULL;
}

void hub_forget(struct hub *hub, const void *ctx)
{
    for (uint32_t l = 0; l < hub->link_count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
            struct call *call = &hub->links[l].calls[i];
            if (!call->used || call->ctx != ctx)
                continue;
            call->ctx = NULL;
            if (call->seq == 0)
                link_drop_call(&hub->links[l], call);
        }
}

/* -- Receiving --------------------------------------------------------------------------------- */

/* Requests may have been sent twice, so answers may come twice. */
static int unasked(const struct link *link, const struct wire_reply *reply, struct shd_err *e)
{
    if (reply->seq != 0 && reply->seq <= link->seq_last)
        return SHD_OK;
    if (reply->status != SHD_OK) /* it could not tell which request failed */
        return link_err(link, reply->status, e, "refused a request: %s", reply->text);
    return link_err(link, SHD_EPROTO, e, "answered request %" PRIu64 ", which was not asked",
                    reply->seq);
}

/* The side channel is readable although nothing was asked on it: it hung up, or is out of step. */
static void look_at_side(struct link *link)
{
    struct shd_err e = { 0 };
    struct side_msg msg;
    const int r = side_recv(link->side_fd, /* timeout_ms= */ 0, &msg, /* ret_fd= */ NULL, &e);
    if (r == SHD_ETIMEDOUT)
        return;
    if (r == SHD_EGONE) {
        link_down(link, &e);
        return;
    }
    if (r == SHD_OK && msg.type == SIDE_WAKE && link->ring.state == LINK_RING_OPEN)
        return;
    if (r == SHD_OK && msg.type == SIDE_ERROR)
        link_err(link, msg.status, &e, "ended the session: %s", msg.text);
    else
        link_err(link, SHD_EPROTO, &e, "sent what was not asked for on its side channel");
    link_fault(link, &e);
}

static int take_frame(struct link *link, const void *frame, size_t bytes, bool by_ring,
                      struct shd_err *e)
{
    struct wire_arena arena = { .base = link->hub->arena_memory, .bytes = WIRE_ARENA_BYTES };
    struct wire_reply reply;
    int r = wire_reply_unpack(frame, bytes, &arena, &reply, e);
    if (r != SHD_OK)
        return link_err(link, r, e, "sent a reply that is not understood: %.80s",
                        e != NULL ? e->text : "");
    if (link->state == LINK_HELLO)
        return link_welcome(link, &reply, e);
    /* A session that the daemon has ended is one that it does not know. It has hung up before it
     * says so, though that may not have been seen here yet; then the request is to be sent anew. */
    if (reply.status == SHD_EAUTH) {
        look_at_side(link);
        if (link->state != LINK_UP)
            return SHD_OK;
    }
    struct call *slot = reply.seq != 0 ? find_call(link, reply.seq) : NULL;
    if (slot == NULL)
        return unasked(link, &reply, e);
    link->proven = true;
    link_heard(link, slot, reply.seq, by_ring);
    if (reply.status == SHD_EBUSY && reply.retry_ms > 0) {
        link_busy(link, slot, reply.retry_ms);
        return SHD_OK;
    }
    link->busy.pause_ns = 0;
    const struct call call = *slot;
    link_drop_call(link, slot);
    if (call.ctx != NULL)
        call.fn(link, &call, &reply);
    return SHD_OK;
}

/* One reply of its ring; false when nothing (more) is there. */
static bool receive_from_ring(struct link *link)
{
    uint8_t frame[RING_FRAME_BYTES_MAX];
    size_t bytes;
    struct shd_err e = { 0 }, why = { 0 };
    int r = link_ring_take(&link->ring, frame, &bytes, &why);
    if (r == SHD_PENDING)
        return false;
    r = r == SHD_OK ? take_frame(link, frame, bytes, /* by_ring= */ true, &e)
                    : link_err(link, r, &e, "broke its %s", why.text);
    if (r != SHD_OK)
        link_fault(link, &e);
    return r == SHD_OK;
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
        r = take_frame(link, zmq_msg_data(&msg), zmq_msg_size(&msg), /* by_ring= */ false, &e);
    zmq_msg_close(&msg);
    if (r != SHD_OK)
        link_fault(link, &e);
    return r == SHD_OK;
}

static bool link_readable(const struct link *link)
{
    return link->dealer != NULL && link->fault.code == SHD_OK;
}

/* Whether anything was there. */
static bool receive_from_rings(struct hub *hub)
{
    bool any = false;
    for (uint32_t i = 0; i < hub->link_count; i++)
        while (link_readable(&hub->links[i]) && receive_from_ring(&hub->links[i]))
            any = true;
    return any;
}

/* -- Links that are down ----------------------------------------------------------------------- */

/* How long a poll may sleep: a link may be due for an attempt. */
static uint64_t poll_ns_max(const struct hub *hub, uint64_t timeout_ns, uint64_t now_ns)
{
    for (uint32_t i = 0; hub->down_count > 0 && i < hub->link_count; i++) {
        const struct link *link = &hub->links[i];
        if (link->state != LINK_DOWN)
            continue;
        const uint64_t left_ns = link->retry_at_ns > now_ns ? link->retry_at_ns - now_ns : 0;
        if (left_ns < timeout_ns)
            timeout_ns = left_ns;
    }
    return timeout_ns;
}

static void look_after_links(struct hub *hub)
{
    if (hub->down_count == 0 || hub->leaving)
        return;
    const uint64_t now_ns = clock_now_ns();
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link *link = &hub->links[i];
        if (link->state != LINK_UP && link->state != LINK_GONE && link->fault.code == SHD_OK)
            link_advance(link, now_ns);
    }
}

/* Messages may be lost on the way, but for those by a ring; a repeat has the number of the
 * original. Best effort. */
static void repeat_call(struct link *link, struct call *call, uint64_t now_ns)
{
    struct shd_err ignored;
    struct wire_request request = { .seq = 0 };
    call->sent_ns = now_ns;
    if (call->make(link, call, &request, &ignored) == SHD_OK)
        link_send(link, &request, call->seq, &ignored);
}

static void repeat_calls(struct hub *hub)
{
    const uint64_t now_ns = clock_now_ns();
    if (now_ns < hub->at.repeat_at_ns || hub->leaving)
        return;
    hub->at.repeat_at_ns = now_ns + REPEAT_LOOK_NS;
    for (uint32_t l = 0; l < hub->link_count; l++) {
        struct link *link = &hub->links[l];
        for (uint32_t i = 0; link->state == LINK_UP && i < HUB_CALLS_MAX; i++) {
            struct call *call = &link->calls[i];
            if (call->used && call->ctx != NULL && call->seq != 0 && !call->by_ring &&
                now_ns - call->sent_ns >= REPEAT_NS)
                repeat_call(link, call, now_ns);
        }
    }
}

static void flush_links(struct hub *hub)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link *link = &hub->links[i];
        struct shd_err e = { 0 };
        if (link->state == LINK_UP && link->unsent > 0 && link->fault.code == SHD_OK &&
            link_flush(link, &e) != SHD_OK)
            link_fault(link, &e);
    }
}

/* Is this poll part of a wait that is to be broken off? */
static bool stops(struct hub *hub, uint64_t timeout_ns)
{
    const bool waits = hub->wakes.waits || timeout_ns > 0;
    hub->wakes.waits = false;
    return waits && !hub->leaving && idle_stops(&hub->idle);
}

/* Whether replies may come by connections, or a link is not up. */
static bool needs_conns(const struct hub *hub)
{
    for (uint32_t i = 0; i < hub->link_count; i++)
        if (hub->links[i].state != LINK_GONE &&
            (hub->links[i].state != LINK_UP || link_ring_needs_conn(&hub->links[i].ring)))
            return true;
    return false;
}

/* Where all replies come by rings, libzmq need not be asked, which is several system calls. */
static int poll_sides(struct hub *hub, int sleep_ms)
{
    const uint32_t count = hub->link_count;
    for (uint32_t i = 0; i < count; i++)
        hub->sides[i] = (struct pollfd){ .fd = hub->poll_items[count + i].fd, .events = POLLIN };
    const int n = poll(hub->sides, count, sleep_ms);
    for (uint32_t i = 0; i < count; i++)
        hub->poll_items[count + i].revents = n > 0 ? hub->sides[i].revents : 0;
    return n;
}

/* Nobody wakes who waits for a daemon to take what is in its ring, or has not woken it yet. */
static bool waits_for_room(const struct hub *hub)
{
    for (uint32_t i = 0; i < hub->link_count; i++) {
        const struct link *link = &hub->links[i];
        if (link->ring.state == LINK_RING_OPEN && (link->unsent > 0 || link->ring.owes_wake))
            return true;
    }
    return false;
}

/* Where several are wanted: half of those to come, so that who is woken has something to do while
 * the others come. */
static uint32_t replies_wanted(const struct link *link)
{
    return link->hub->wakes.several && link->call_count > 2 ? link->call_count / 2 : 1;
}

/* A signal's handler may have left something for the one to be asked. */
static int poll_sockets(struct hub *hub, uint64_t timeout_ns, struct shd_err *e)
{
    const uint32_t count = hub->link_count;
    uint64_t sleep_ns = idle_sleep_ns(&hub->idle, timeout_ns);
    if (sleep_ns > ROOM_NS && waits_for_room(hub))
        sleep_ns = ROOM_NS;
    if (sleep_ns > SEVERAL_NS && hub->wakes.several)
        sleep_ns = SEVERAL_NS;
    for (uint32_t i = 0; sleep_ns > 0 && i < count; i++)
        if (!link_ring_arm(&hub->links[i].ring, replies_wanted(&hub->links[i])))
            sleep_ns = 0;
    const bool conns = needs_conns(hub); /* after that: an answer may have gone elsewhere */
    const int sleep_ms = (int)((sleep_ns + NS_PER_MS - 1) / NS_PER_MS);
    const int n = conns ? zmq_poll(hub->poll_items, (int)(2 * count), sleep_ms)
                        : poll_sides(hub, sleep_ms);
    const int error = errno;
    for (uint32_t i = 0; timeout_ns > 0 && i < count; i++)
        link_ring_disarm(&hub->links[i].ring);
    hub->at.polled_ns = clock_now_ns();
    if (n >= 0)
        return SHD_OK;
    if (error != EINTR)
        return err_set(e, SHD_EIO, "poll the daemons' sockets: %s", zmq_strerror(error));
    hub->idle.asked_ns = 0;
    return SHD_OK;
}

/* Sleep, unless something is there; then, where rings have it, sockets may be left alone. Replies
 * first: those sent before a daemon died still count. */
static int receive_all(struct hub *hub, uint64_t timeout_ns, struct shd_err *e)
{
    const uint32_t count = hub->link_count;
    const bool any = receive_from_rings(hub);
    if ((any || timeout_ns == 0) && !needs_conns(hub) &&
        clock_now_ns() - hub->at.polled_ns < POLLED_NS)
        return SHD_OK;
    const int r = poll_sockets(hub, any ? 0 : timeout_ns, e);
    if (r != SHD_OK)
        return r;
    receive_from_rings(hub);
    for (uint32_t i = 0; i < count; i++)
        while (link_readable(&hub->links[i]) && link_ring_needs_conn(&hub->links[i].ring) &&
               receive_one(&hub->links[i]))
            continue;
    for (uint32_t i = 0; i < count; i++)
        if (hub->poll_items[count + i].revents != 0 && hub->links[i].state == LINK_UP)
            look_at_side(&hub->links[i]);
    return SHD_OK;
}

int hub_poll(struct hub *hub, uint64_t timeout_ns, struct shd_err *e)
{
    const bool waits = hub->wakes.waits || timeout_ns > 0;
    int r = hub_check(hub, e);
    if (r != SHD_OK)
        return r;
    if (stops(hub, timeout_ns))
        return idle_take(&hub->idle, e);
    if (hub->look != NULL && !hub->leaving)
        hub->look(hub->reopen_ctx);
    if (hub->members.look != NULL)
        hub->members.look(hub);
    if (waits && hub->members.returned && !hub->members.joining && !hub->leaving)
        return err_set(e, SHD_ERESET,
                       "a host is in again, with what only hosts have that are lost: the models "
                       "went back to a step that it has");
    hub->at.waited_ns = 0;
    look_after_links(hub);
    wake_daemons(hub, timeout_ns > 0);
    flush_links(hub);
    r = hub_check(hub, e);
    if (r != SHD_OK)
        return r;
    if (hub->down_count > 0)
        timeout_ns = poll_ns_max(hub, timeout_ns, clock_now_ns());
    r = receive_all(hub, timeout_ns, e);
    if (r != SHD_OK)
        return r;
    repeat_calls(hub);
    r = hub_check(hub, e);
    return r == SHD_OK ? idle_take(&hub->idle, e) : r; /* while a link came up */
}

/* -- Daemons that are gone for good ------------------------------------------------------------ */

bool hub_lost(const struct hub *hub, uint32_t index)
{
    return hub->links[index].state == LINK_GONE;
}

/* The other one of its slice is there, or may come back. */
static bool link_has_twin(const struct link *link)
{
    const struct hub *hub = link->hub;
    const uint32_t n = hub->owner_count;
    if (hub->link_count == n)
        return false;
    return hub->links[link->index < n ? link->index + n : link->index - n].state != LINK_GONE;
}

/* What the owner that was lost was asked alone. */
static void take_over(struct link *link, const struct call *call)
{
    if (call->ctx == NULL || link_add_call(link, call) != NULL)
        return;
    const struct wire_reply full = { .status = SHD_EGONE,
                                     .text = "the owner it was asked of is lost, and its replica "
                                             "has no place for it" };
    call->fn(link, call, &full);
}

static void swap_items(zmq_pollitem_t *a, zmq_pollitem_t *b)
{
    const zmq_pollitem_t t = *a;
    *a = *b;
    *b = t;
}

bool hub_lose(struct hub *hub, uint32_t index, const struct shd_err *why)
{
    CHECK(link_has_twin(&hub->links[index]));
    if (index >= hub->owner_count) {
        hub->members.losses++;
        link_retire(&hub->links[index], why, NULL);
        if (hub->members.succeed != NULL)
            hub->members.succeed(hub->reopen_ctx, index - hub->owner_count, /* gone= */ true);
        return true;
    }
    const uint32_t other = hub->owner_count + index;
    struct call moved[HUB_CALLS_MAX];
    if (hub->members.succeed != NULL &&
        !hub->members.succeed(hub->reopen_ctx, index, /* gone= */ false))
        return false;
    const uint32_t count = link_retire(&hub->links[index], why, moved);
    hub->members.successions++;
    hub->members.losses++;
    const struct link lost = hub->links[index];
    hub->links[index] = hub->links[other];
    hub->links[other] = lost;
    hub->links[index].index = index;
    hub->links[other].index = other;
    swap_items(&hub->poll_items[index], &hub->poll_items[other]);
    swap_items(&hub->poll_items[hub->link_count + index],
               &hub->poll_items[hub->link_count + other]);
    for (uint32_t i = 0; i < count; i++)
        take_over(&hub->links[index], &moved[i]);
    return true;
}

void hub_return(struct hub *hub, uint32_t index)
{
    struct link *link = &hub->links[index];
    CHECK(link_is_replica(link) && link->state == LINK_GONE && link->call_count == 0);
    link->state = LINK_DOWN;
    link->since_ns = link->state_ns = clock_now_ns();
    link->since = time(NULL);
    link->retry_at_ns = link->retry_ns = 0;
    link->known = true; /* who does not come is missed */
    link->kept = link->has_notify = link->missed = false;
    link->epoch++;
    link->pid = 0;
    hub->down_count++;
}

void hub_renew(struct hub *hub)
{
    const struct shd_err why = { SHD_ECANCELED, "what was asked of it was broken off" };
    hub->idle.stops = false;
    for (uint32_t i = 0; i < hub->link_count; i++)
        if (hub->links[i].state == LINK_UP)
            link_down(&hub->links[i], &why);
}

/* -- Sending ----------------------------------------------------------------------------------- */

static int wait_for_room(struct link *link, uint64_t start_ns, struct shd_err *e)
{
    const uint64_t left_ns = hub_left_ns(link->hub, start_ns, POLL_SLICE_NS);
    if (left_ns == 0)
        return link_err(link, SHD_ETIMEDOUT, e,
                        "did not take a request within %" PRIu64 " ms (%" PRIu32 " are pending)",
                        link->hub->timeout_ns / NS_PER_MS, link->call_count);
    return hub_poll(link->hub, left_ns, e);
}

int hub_ask(struct link *link, const struct call *call, struct shd_err *e)
{
    CHECK(call->make != NULL && call->fn != NULL && call->ctx != NULL);
    const uint64_t start_ns = clock_now_ns();
    int r = hub_check(link->hub, e);
    while (r == SHD_OK && link->call_count == HUB_CALLS_MAX)
        r = wait_for_room(link, start_ns, e);
    if (r != SHD_OK)
        return r;
    if (link->state == LINK_GONE) {
        const struct wire_reply nothing = { .type = WIRE_REPLY_NONE };
        call->fn(link, call, &nothing);
        return SHD_OK;
    }
    struct call *slot = link_add_call(link, call);
    CHECK(slot != NULL);
    if (link->state != LINK_UP || link->busy.pause_ns > 0 || link->unsent > 1)
        return SHD_OK; /* when it is up again, or has places again; none overtakes another */
    r = link_send_call(link, slot, e);
    if (r == SHD_EBUSY)
        return SHD_OK; /* a full pipe: at the next poll */
    if (r != SHD_OK)
        link_drop_call(link, slot);
    return r;
}
