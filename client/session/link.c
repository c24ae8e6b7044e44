/* See link.h.
 *
 * Happy path per link, in steps that never wait: connect the side channel, look who is there,
 * receive the token, connect the DEALER, Hello with the token, Welcome with the session id. Then
 * what was open on it is opened again (that waits for a daemon that has just answered), and the
 * link is up.
 *
 * Failure: what a daemon that is being started may do (nobody there, a full backlog, hanging up in
 * the middle) is tried again, every 5 to 50 ms, until the link's time is over; refusals and
 * nonsense are final. */
#include "client/session/link.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/session/address.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/dir.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/admit.h"
#include "proto/share/fdpass.h"
#include "proto/share/listen.h"

#define USEFUL_NS       NS_PER_S        /* a daemon that was there for as long came back indeed */
#define FIRST_NS_MAX    (10 * NS_PER_S) /* for a daemon that was never there */
#define HELLO_NS_MIN    (2 * NS_PER_S)  /* then with a new connection: this one may be dead */
#define HELLO_PARTS     8u              /* but not before such a part of the limit is over */
#define RETRY_NS_MIN    (5 * NS_PER_MS)
#define RETRY_NS_MAX    (50 * NS_PER_MS)
#define BUSY_NS_MAX     (100 * NS_PER_MS)
#define HIGH_WATER_MARK ((int)HUB_CALLS_MAX * 2)

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
    *call = (struct call){ 0 };
    link->call_count--;
}

/* A session that leaves only asks daemons to let go. One that hangs up has let go: that is its
 * answer. */
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
    link->busy_ns = 0;
    if (link->dealer != NULL)
        zmq_close(link->dealer);
    const int side_fd = link->side_fd;
    link->side_fd = -1; /* first: a child that is forked now must not close what comes next */
    if (side_fd >= 0)
        close(side_fd);
    link->dealer = NULL;
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

int link_send(struct link *link, struct wire_request *request, uint64_t seq, struct shd_err *e)
{
    struct hub *hub = link->hub;
    request->seq = seq;
    request->session = link->session;
    size_t bytes;
    const int r = wire_request_pack(request, hub->frame, WIRE_FRAME_BYTES_MAX, &bytes, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT(fail_before[request->type]);
    if (zmq_send(link->dealer, hub->frame, bytes, ZMQ_DONTWAIT) >= 0) {
        FAIL_POINT(fail_after[request->type]);
        hub->requests++;
        return SHD_OK;
    }
    if (errno == EAGAIN || errno == EINTR)
        return err_set(e, SHD_EBUSY, "pipe is full");
    return link_err(link, errno == ENOMEM ? SHD_ENOMEM : SHD_EIO, e, "cannot be sent to: %s",
                    zmq_strerror(errno));
}

int link_send_call(struct link *link, struct call *call, struct shd_err *e)
{
    struct wire_request request = { .seq = 0 };
    int r = call->make(link, call, &request, e);
    if (r == SHD_OK)
        r = link_send(link, &request, link->seq_last + 1, e);
    if (r != SHD_OK)
        return r;
    call->seq = ++link->seq_last;
    call->sent_ns = clock_now_ns();
    link->unsent--;
    return SHD_OK;
}

void link_busy(struct link *link, struct call *call, uint32_t retry_ms)
{
    const uint64_t pause_ns = link->busy_ns > 0 ? 2 * link->busy_ns : retry_ms * NS_PER_MS;
    link->busy_ns = pause_ns < BUSY_NS_MAX ? pause_ns : BUSY_NS_MAX;
    link->busy_until_ns = clock_now_ns() + link->busy_ns;
    call->seq = 0;
    link->unsent++;
    if (call->ctx == NULL)
        link_drop_call(link, call); /* nobody waits any more */
}

int link_flush(struct link *link, struct shd_err *e)
{
    int r = SHD_OK;
    if (link->unsent > 0 && link->busy_ns > 0 && clock_now_ns() < link->busy_until_ns)
        return SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && link->unsent > 0 && i < HUB_CALLS_MAX; i++)
        if (link->calls[i].used && link->calls[i].seq == 0)
            r = link_send_call(link, &link->calls[i], e);
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

/* Nobody is told of this wait: at its end the link is down, of which one is. */
static int await_side(struct link *link, struct side_msg *ret_msg, int *ret_fd, struct shd_err *e)
{
    const uint64_t deadline_ns = clock_now_ns() + link->hub->timeout_ns;
    int r;
    do {
        if (idle_stops(&link->hub->idle))
            return canceled(e);
        r = side_recv(link->side_fd, (int)(IDLE_NS / NS_PER_MS), ret_msg, ret_fd, e);
    } while (r == SHD_ETIMEDOUT && clock_now_ns() < deadline_ns);
    return r;
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
        r = segment_check(fd, segment->kind, segment->bytes, e);
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
    if ((r == SHD_EGONE || r == SHD_ECANCELED) && link->state == LINK_UP)
        link_down(link, &why); /* a late answer would be taken for another one */
    return link_err(link, r, e, "does not pass its %s segment: %s",
                    segment_kind_name(segment->kind), why.text);
}

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
                   .role = WIRE_TRAINER,
                   .name = link->hub->name,
                   .rank = link->hub->rank },
    };
    memcpy(hello.hello.token, welcome->token, SHD_TOKEN_BYTES);
    const int r = connect_dealer(link, e);
    link->seq_last = 1;
    return r == SHD_OK ? link_send(link, &hello, link->seq_last, e) : r;
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
    link->peer.takes_specs = r == SHD_OK && msg.kind == SEGMENT_SPEC;
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
    hub->back_ns = clock_now_ns();
    set_state(link, LINK_UP, hub->back_ns);
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
     * place. Where Hello came too late for that its token is not known, and a new one does. */
    if (reply->status == SHD_EAUTH || (reply->status == SHD_EBUSY && link->known)) {
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

static uint64_t patience_ns(const struct link *link)
{
    const uint64_t timeout_ns = link->hub->timeout_ns;
    const bool never = link->hub->patient && !link->known && link->state == LINK_DOWN;
    return never && timeout_ns > FIRST_NS_MAX && !lives(link) ? FIRST_NS_MAX : timeout_ns;
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
        link_err(link, link->last.code, &e, "cannot be reached: %s", link->last.text);
    else if (link->state == LINK_DOWN)
        link_err(link, SHD_ETIMEDOUT, &e, "%s", link->last.text);
    else
        link_err(link, SHD_ETIMEDOUT, &e, "did not %s within %" PRIu64 " ms", missing[link->state],
                 link->hub->timeout_ns / NS_PER_MS);
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
            return err_set(e, SHD_ETIMEDOUT, "did not answer within %" PRIu64 " ms",
                           link->hub->timeout_ns / NS_PER_MS);
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
