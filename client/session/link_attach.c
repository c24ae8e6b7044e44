/* See link_attach.h.
 *
 * Happy path per link, in steps that never wait: connect the side channel, look who is there,
 * receive the token, connect the DEALER, Hello with the token, Welcome with the session id. Then
 * what was open on it is opened again (that waits for a daemon that has just answered), and the
 * link is up.
 *
 * Failure: what a daemon that is being started may do (nobody there, a full backlog, hanging up in
 * the middle) is tried again, every 5 to 50 ms, until the link's time is over; refusals and
 * nonsense are final. */
#include "client/session/link_attach.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "client/session/address.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/dir.h"
#include "proto/base/sys.h"
#include "proto/share/admit.h"
#include "proto/share/fdpass.h"
#include "proto/share/listen.h"

#define FIRST_NS_MAX    (10 * NS_PER_S) /* for a daemon that was never there */
#define HELLO_NS_MIN    (2 * NS_PER_S)  /* then with a new connection: this one may be dead */
#define HELLO_PARTS     8u              /* but not before such a part of the limit is over */
#define RETRY_NS_MIN    (5 * NS_PER_MS)
#define RETRY_NS_MAX    (50 * NS_PER_MS)
#define HIGH_WATER_MARK ((int)HUB_CALLS_MAX * 2)

/* -- Steps ------------------------------------------------------------------------------------- */

static void set_state(struct link *link, enum link_state state, uint64_t now_ns)
{
    link->state = state;
    link->state_ns = now_ns;
}

/* The attempt failed; the next one comes after a pause that doubles. */
static void retry(struct link *link, const struct shd_err *why)
{
    link_down(link, why);
    link->retry_ns = link->retry_ns == 0 ? RETRY_NS_MIN : 2 * link->retry_ns;
    if (link->retry_ns > RETRY_NS_MAX)
        link->retry_ns = RETRY_NS_MAX;
    link->retry_at_ns = link->state_ns + link->retry_ns;
}

static void refuse(struct link *link, int code, const char *text)
{
    struct shd_err e = { 0 };
    link_err(link, code, &e, "cannot be attached to: %s", text);
    link_fault(link, &e);
}

static bool comes_later(const struct link *link, int code)
{
    if (code == SHD_ENOENT || code == SHD_EGONE || code == SHD_ETIMEDOUT)
        return true;
    return link->known && (code == SHD_EAUTH || code == SHD_ENOMEM); /* modes are set late */
}

static void step_connect(struct link *link, uint64_t now_ns)
{
    struct shd_err why = { 0 };
    struct side_peer peer;
    int r = side_connect(link->path, &link->side_fd, &why);
    if (r != SHD_OK && comes_later(link, r)) {
        retry(link, &why);
        return;
    }
    if (r == SHD_OK)
        r = side_peer(link->side_fd, &peer, &why);
    if (r == SHD_OK)
        r = admit_daemon(&peer, link->path, &why);
    if (r != SHD_OK) {
        refuse(link, r, why.text);
        return;
    }
    link->pid = peer.pid;
    link->hub->poll_items[link->hub->link_count + link->index].fd = link->side_fd;
    set_state(link, LINK_TOKEN, now_ns);
}

/* A broken connection is not mended by ZeroMQ: it would reach the daemon's successor, which knows
 * nothing of this session. */
static int connect_dealer(struct link *link, struct shd_err *e)
{
    const int linger = 0, hwm = HIGH_WATER_MARK, never = -1;
    const int64_t frame_max = (int64_t)WIRE_FRAME_BYTES_MAX;
    link->dealer = zmq_socket(link->hub->zmq, ZMQ_DEALER);
    if (link->dealer == NULL)
        return err_sys(e, SHD_EIO, "create the ZeroMQ socket");
    zmq_setsockopt(link->dealer, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(link->dealer, ZMQ_SNDHWM, &hwm, sizeof hwm);
    zmq_setsockopt(link->dealer, ZMQ_RCVHWM, &hwm, sizeof hwm);
    zmq_setsockopt(link->dealer, ZMQ_RECONNECT_IVL, &never, sizeof never);
    zmq_setsockopt(link->dealer, ZMQ_MAXMSGSIZE, &frame_max, sizeof frame_max);
    if (zmq_connect(link->dealer, link->endpoint) != 0)
        return err_set(e, SHD_EIO, "connect to '%s': %s", link->endpoint,
                       zmq_strerror(zmq_errno()));
    link->hub->poll_items[link->index].socket = link->dealer;
    return SHD_OK;
}

static int say_hello(struct link *link, const struct side_msg *welcome, struct shd_err *e)
{
    struct wire_request hello = {
        .type = WIRE_HELLO,
        .hello = { .protocol = SHD_PROTOCOL,
                   .role = link->hub->role,
                   .name = link->hub->name,
                   .rank = link->hub->rank,
                   .level = WIRE_LEVEL,
                   .view = link->hub->members.told },
    };
    memcpy(hello.hello.token, welcome->token, SHD_TOKEN_BYTES);
    const int r = connect_dealer(link, e);
    link->seq_last = 1;
    return r == SHD_OK ? link_send(link, &hello, link->seq_last, e) : r;
}

/* Builds of the first two levels tell none. */
static uint32_t level_of(const struct side_msg *welcome)
{
    if (welcome->ticket != 0)
        return welcome->ticket < WIRE_LEVEL ? (uint32_t)welcome->ticket : WIRE_LEVEL;
    return welcome->kind == SEGMENT_SPEC ? WIRE_LEVEL_SPECS : WIRE_LEVEL_BASE;
}

static int check_level(const struct link *link, struct shd_err *e)
{
    if (!link->hub->members.tells || link->peer.level >= WIRE_LEVEL_VIEWS)
        return SHD_OK;
    return err_set(e, SHD_EPROTO,
                   "its build, or its relay's, is of an older version, which takes in who has "
                   "not read that a host is out: with replicas on more than two hosts all have "
                   "to be of this version");
}

static void step_token(struct link *link, uint64_t now_ns)
{
    struct shd_err why = { 0 };
    struct side_msg msg;
    int r = side_recv(link->side_fd, /* timeout_ms= */ 0, &msg, /* ret_fd= */ NULL, &why);
    if (r == SHD_ETIMEDOUT)
        return;
    if (r == SHD_OK && msg.type == SIDE_ERROR)
        r = err_set(&why, msg.status, "%s", msg.text);
    else if (r == SHD_OK && msg.type != SIDE_WELCOME)
        r = err_set(&why, SHD_EPROTO, "side message of type %" PRIu32 " instead of a welcome",
                    msg.type);
    if (r == SHD_OK)
        r = side_welcome_check(&msg, &why);
    if (r == SHD_OK) {
        link->peer.level = level_of(&msg);
        r = check_level(link, &why);
    }
    if (r == SHD_OK)
        r = say_hello(link, &msg, &why);
    if (r == SHD_OK)
        set_state(link, LINK_HELLO, now_ns);
    else if (r == SHD_EGONE || (r == SHD_EBUSY && link->known))
        retry(link, &why);
    else
        refuse(link, r, why.text);
}

static bool side_hung_up(const struct link *link)
{
    struct pollfd p = { .fd = link->side_fd, .events = POLLIN };
    return poll(&p, 1, 0) > 0;
}

/* A daemon that is busy answers late; one that never got Hello hangs up after some seconds. */
static uint64_t hello_ns_max(const struct hub *hub)
{
    const uint64_t part_ns = hub->timeout_ns / HELLO_PARTS;
    return part_ns > HELLO_NS_MIN ? part_ns : HELLO_NS_MIN;
}

static void step_hello(struct link *link, uint64_t now_ns)
{
    struct shd_err why = { 0 };
    if (side_hung_up(link))
        err_set(&why, SHD_EGONE, "hung up instead of answering Hello");
    else if (now_ns - link->state_ns < hello_ns_max(link->hub))
        return;
    else
        err_set(&why, SHD_ETIMEDOUT, "did not answer Hello");
    retry(link, &why);
}

/* The path of the service manager's socket beside the daemon's. */
static void notify_path(const struct link *link, char *buf, size_t bytes)
{
    const char *slash = strrchr(link->path, '/');
    snprintf(buf, bytes, "%.*s" ADDRESS_NOTIFY, slash != NULL ? (int)(slash + 1 - link->path) : 0,
             link->path);
}

/* False also where its service manager cannot be seen: systemd outlives its daemons. */
static bool lost_its_keeper(const struct link *link)
{
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path) + sizeof ADDRESS_NOTIFY];
    notify_path(link, path, sizeof path);
    return link->has_notify && !listen_is_bound(path);
}

static void note_keeper(struct link *link, bool kept)
{
    link->kept = link->has_notify = kept;
    link->has_notify = kept && !lost_its_keeper(link);
}

static void link_up(struct link *link)
{
    struct hub *hub = link->hub;
    hub->at.back_ns = clock_now_ns();
    set_state(link, LINK_UP, hub->at.back_ns);
    link->proven = !link->known;
    link->known = true;
    CHECK(hub->down_count > 0);
    hub->down_count--;
    event_back(link);
}

int link_welcome(struct link *link, const struct wire_reply *reply, struct shd_err *e)
{
    struct hub *hub = link->hub;
    struct shd_err why = { 0 };
    /* A daemon ends a session that has said no Hello for some seconds, or while others wait for its
     * place. Where Hello came too late for that its token is not known, and a new one does. One
     * that knows a newer view than this session is told that when this session has read it. */
    if (reply->status == SHD_EAUTH ||
        (reply->status == SHD_EBUSY && (link->known || hub->members.told > 0))) {
        err_set(&why, reply->status, "refused Hello: %s", reply->text);
        retry(link, &why);
        return SHD_OK;
    }
    if (reply->status != SHD_OK)
        return link_err(link, reply->status, e, "refused Hello: %s", reply->text);
    if (reply->seq != link->seq_last || reply->type != WIRE_WELCOME)
        return link_err(link, SHD_EPROTO, e, "answered Hello with a reply of type %d",
                        (int)reply->type);
    if (strcmp(reply->welcome.device, link->device) != 0)
        return link_err(link, SHD_EPROTO, e, "says it is device '%.64s'", reply->welcome.device);
    link->session = reply->welcome.session;
    link->peer.requests = reply->welcome.requests > 0 ? reply->welcome.requests : WIRE_HISTORY + 1u;
    note_keeper(link, reply->welcome.kept);
    const int r = hub->reopen != NULL ? hub->reopen(hub->reopen_ctx, link, &why) : SHD_OK;
    if (r == SHD_OK)
        link_up(link);
    else if (r == SHD_EGONE || r == SHD_ETIMEDOUT || r == SHD_EBUSY || r == SHD_ECANCELED)
        retry(link, &why);
    else
        err_copy(&why, e);
    return link->state == LINK_HELLO ? r : SHD_OK;
}

/* -- Its ring ---------------------------------------------------------------------------------- */

static int make_open_ring(struct link *link, const struct call *call,
                          struct wire_request *ret_request, struct shd_err *e)
{
    (void)link;
    (void)call;
    (void)e;
    ret_request->type = WIRE_OPEN_RING;
    return SHD_OK;
}

static int claim_page(struct link *link, enum segment_kind kind, uint64_t ticket, uint64_t bytes,
                      int *ret_fd)
{
    const struct wire_segment page = { .kind = kind, .ticket = ticket, .bytes = bytes };
    return link_claim(link, &page, ret_fd, /* e= */ NULL);
}

/* Whatever the matter is: without a ring everything goes by the connection. */
static void ring_answered(struct link *link, const struct call *call,
                          const struct wire_reply *reply)
{
    const struct wire_ring *ring = &reply->ring;
    struct shd_err ignored;
    int requests, replies;
    (void)call;
    link->ring.state = LINK_RING_REFUSED;
    if (reply->status != SHD_OK || reply->type != WIRE_RING ||
        claim_page(link, SEGMENT_REQUESTS, ring->requests, ring->bytes, &requests) != SHD_OK)
        return;
    if (claim_page(link, SEGMENT_REPLIES, ring->replies, ring->bytes, &replies) != SHD_OK)
        close(requests);
    else
        link_ring_open(&link->ring, requests, replies, ring->bytes, &ignored);
}

void link_want_ring(struct link *link)
{
    const struct call call = {
        .make = make_open_ring, .fn = ring_answered, .stays = true, .ctx = &link->ring
    };
    struct shd_err ignored;
    if (link->ring.state != LINK_RING_NONE || link->state != LINK_UP || link->hub->no_ring ||
        link->peer.level < WIRE_LEVEL_RINGS)
        return;
    struct call *slot = link_add_call(link, &call);
    if (slot == NULL)
        return; /* the next time */
    link->ring.state = LINK_RING_ASKED;
    if (link->busy.pause_ns == 0 && link->unsent == 1)
        link_send_call(link, slot, &ignored); /* else when the link is polled */
}

/* -- Waiting for a link ------------------------------------------------------------------------ */

/* A daemon holds its lock from before it has sockets: it is still on its way. */
static bool lives(const struct link *link)
{
    char dir[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    char lock[WIRE_NAME_BYTES_MAX + sizeof ".lock"];
    const char *slash = strrchr(link->path, '/');
    snprintf(dir, sizeof dir, "%.*s", slash != NULL ? (int)(slash - link->path) : 0, link->path);
    snprintf(lock, sizeof lock, "%s.lock", link->device);
    return lock_look(dir, lock) == LOCK_HELD;
}

/* One whose host is to be put out for it is not given up before. */
static uint64_t patience_ns(const struct link *link)
{
    const struct hub *hub = link->hub;
    const uint64_t timeout_ns = hub->timeout_ns, first_ns = hub->at.first_ns;
    const bool never = !link->known && link->state == LINK_DOWN;
    const uint64_t never_ns = first_ns > 0 ? first_ns : FIRST_NS_MAX;
    if (!hub->patient)
        return timeout_ns;
    if (never && timeout_ns > never_ns && !lives(link))
        return never_ns;
    return timeout_ns > first_ns ? timeout_ns : first_ns;
}

/* A daemon that we never reached was there once, and beside it listens who starts it again. */
static bool was_kept_here(const struct link *link)
{
    char
        path[sizeof(((struct sockaddr_un *)NULL)->sun_path) + WIRE_NAME_BYTES_MAX + sizeof ".lock"];
    const char *slash = strrchr(link->path, '/');
    snprintf(path, sizeof path, "%.*s%s.lock", slash != NULL ? (int)(slash + 1 - link->path) : 0,
             link->path, link->device);
    if (access(path, F_OK) != 0)
        return false;
    notify_path(link, path, sizeof path);
    return listen_is_bound(path);
}

/* It is back and only slow, or its keeper starts it again for as long as it has the state; and this
 * session can wait. */
static bool comes_back(const struct link *link)
{
    if (!link->hub->patient)
        return false;
    if (!link->known)
        return was_kept_here(link);
    return link->state != LINK_DOWN || (link->kept && !lost_its_keeper(link));
}

static void give_up(struct link *link, uint64_t waited_ns)
{
    static const char *const missing[] = { "", "send its welcome", "answer Hello", "" };
    struct shd_err e = { 0 };
    struct tm tm;
    char when[32] = "?";
    if (link->known && localtime_r(&link->since, &tm) != NULL)
        strftime(when, sizeof when, "%H:%M:%S", &tm);
    if (link->known)
        link_err(link, SHD_EGONE, &e, "is gone%s: lost at %s, not back within %" PRIu64 " ms (%s)",
                 lost_its_keeper(link) ? " with its keeper" : "", when, waited_ns / NS_PER_MS,
                 link->last.text);
    else if (link->state == LINK_DOWN && link->last.code != SHD_ETIMEDOUT)
        link_err(link, link->last.code, &e, "cannot be reached: %s%s", link->last.text,
                 link->last.code == SHD_EGONE
                     ? "; start it, or name those that are there: DIR?cpu0,cpu1"
                     : "");
    else if (link->state == LINK_DOWN)
        link_err(link, SHD_ETIMEDOUT, &e, "%s", link->last.text);
    else
        link_err(link, SHD_ETIMEDOUT, &e, "did not %s within %" PRIu64 " ms", missing[link->state],
                 patience_ns(link) / NS_PER_MS);
    link_fault(link, &e);
}

void link_advance(struct link *link, uint64_t now_ns)
{
    CHECK(link->state != LINK_UP);
    const uint64_t waited_ns = now_ns > link->since_ns ? now_ns - link->since_ns : 0;
    if (waited_ns >= patience_ns(link) && !comes_back(link)) {
        give_up(link, waited_ns);
        return;
    }
    if (link->state == LINK_DOWN && now_ns >= link->retry_at_ns)
        step_connect(link, now_ns);
    else if (link->state == LINK_TOKEN)
        step_token(link, now_ns);
    else if (link->state == LINK_HELLO)
        step_hello(link, now_ns);
}
