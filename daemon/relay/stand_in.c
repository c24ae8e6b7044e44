/* See stand_in.h.
 *
 * Happy path: a request that hands over bytes (Return, Put) is preceded by them, out of the segment
 * that the worker has mapped. A Layout is kept back until the mirror of its model is whole; all
 * other replies go to the worker as they come. */
#include "daemon/relay/stand_in.h"

#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/relay/bulk.h"
#include "daemon/relay/copies.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/traffic.h"
#include "daemon/relay/zconn.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/admit.h"
#include "proto/share/fdpass.h"

#define DIAL_NS     (5 * NS_PER_S)
#define WELCOME_NS  (15 * NS_PER_S)
#define HELLO_NS    (5 * NS_PER_S)
#define POLL_MS     100 /* also how long a worker waits to hear that its mirror is dead */
#define HELD_MS     2
#define HELLO_BYTES 1024u

struct stand_in {
    struct relay *relay;
    struct stand_in *next; /* of those that wait for Hello; relay's lock */
    uint64_t since_ns;
    char device[64];
    const char *host;     /* that has it; the routes' */
    struct traffic *peer; /* borrowed; NULL: not counted */
    int side_fd;          /* owned: the worker's */
    struct bulk *bulk;
    struct zconn z; /* the worker's */
    struct copies copies;
    bool welcomed;
    struct side_msg side; /* the last one that came */
    char refused[200];
    uint64_t last_seq; /* of requests that were passed on */
    uint8_t *message;  /* owned, [WIRE_FRAME_BYTES_MAX] */
    struct wire_arena arena;
};

static void stand_in_free(struct stand_in *s)
{
    if (s == NULL)
        return;
    if (s->bulk != NULL)
        traffic_count(s->peer, TRAFFIC_SESSIONS, -1);
    bulk_close(s->bulk); /* a payload may be under way into a copy */
    copies_free(&s->copies);
    zconn_close(&s->z);
    if (s->side_fd >= 0)
        close(s->side_fd);
    free(s->message);
    free(s->arena.base);
    free(s);
}

/* -- What the daemon says ---------------------------------------------------------------------- */

static int place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct stand_in *s = ctx;
    if (head->type == FRAME_MESSAGE && head->bytes > 0 && head->bytes <= WIRE_FRAME_BYTES_MAX)
        *ret_to = s->message;
    else if (head->type == FRAME_SIDE && head->bytes == sizeof s->side)
        *ret_to = &s->side;
    else if (head->type == FRAME_REFUSED && head->bytes <= sizeof s->refused)
        *ret_to = s->refused;
    else if (head->type == FRAME_ATTEMPT && head->bytes == 0)
        return SHD_OK;
    else if (head->type == FRAME_SEGMENT || head->type == FRAME_BYTES)
        return copies_place(&s->copies, head, ret_to, e);
    else
        return err_set(e, SHD_EPROTO, "a frame of type %" PRIu32 " and %" PRIu64 " bytes",
                       head->type, head->bytes);
    return SHD_OK;
}

/* The daemon's message, looked at as one of a stranger. */
static int side_came(struct stand_in *s, struct shd_err *e)
{
    struct side_msg *msg = &s->side;
    const bool welcome = msg->type == SIDE_WELCOME && !s->welcomed;
    const bool error = msg->type == SIDE_ERROR && status_known(msg->status) &&
                       msg->status != SHD_OK;
    if (memchr(msg->text, 0, sizeof msg->text) == NULL || msg->reserved != 0 ||
        (!welcome && !error))
        return err_set(e, SHD_EPROTO, "a side message of type %" PRIu32, msg->type);
    if (error)
        return side_send(s->side_fd, msg, /* pass_fd= */ -1, e);
    if (msg->ticket > WIRE_LEVEL)
        msg->ticket = WIRE_LEVEL; /* what passes here is unpacked here */
    s->welcomed = true;           /* sent when its token is known here */
    return SHD_OK;
}

static int reply_came(struct stand_in *s, const uint8_t *body, size_t bytes, struct shd_err *e)
{
    struct wire_reply reply;
    s->arena.used = 0;
    int r = wire_reply_unpack(body, bytes, &s->arena, &reply, e);
    if (r != SHD_OK)
        return r;
    if (reply.status == SHD_OK && reply.type == WIRE_CREATED && reply.created.ticket != 0)
        copies_created(&s->copies, reply.created.ticket);
    if (reply.status == SHD_OK && reply.type == WIRE_LAYOUT)
        return copies_hold(&s->copies, s->relay, s->device, &reply.layout, body, bytes, e);
    return zconn_write(&s->z, body, bytes, e);
}

static int done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct stand_in *s = ctx;
    switch ((enum frame_type)head->type) {
    case FRAME_SIDE:
        return side_came(s, e);
    case FRAME_REFUSED:
        for (uint64_t i = 0; i < head->bytes; i++)
            s->refused[i] = s->refused[i] >= ' ' && s->refused[i] <= '~' ? s->refused[i] : '?';
        return err_set(e, SHD_EGONE, "refused: %.*s", (int)head->bytes, s->refused);
    case FRAME_SEGMENT:
        return copies_announce(&s->copies, head, e);
    case FRAME_ATTEMPT:
        copies_attempt(&s->copies, head->index, head->id, head->at);
        return SHD_OK;
    case FRAME_MESSAGE:
        return reply_came(s, payload, (size_t)head->bytes, e);
    default:
        return SHD_OK;
    }
}

/* -- What the worker says ---------------------------------------------------------------------- */

static int answer_refused(struct stand_in *s, uint64_t seq, const struct shd_err *why,
                          struct shd_err *e)
{
    const struct wire_reply reply = { .seq = seq, .status = why->code, .text = why->text };
    uint8_t frame[1024];
    size_t bytes;
    const int r = wire_reply_pack(&reply, frame, sizeof frame, &bytes, e);
    return r == SHD_OK ? zconn_write(&s->z, frame, bytes, e) : r;
}

/* A daemon of a later build is to answer with what is known here. */
static int clamp_hello(const struct stand_in *s, struct wire_request *hello,
                       uint8_t frame[HELLO_BYTES], size_t *ret_bytes, struct shd_err *e)
{
    hello->hello.level = WIRE_LEVEL;
    return wire_request_pack_for(hello, (uint32_t)s->side.ticket, frame, HELLO_BYTES, ret_bytes, e);
}

static int request_came(struct stand_in *s, const uint8_t *body, size_t bytes, struct shd_err *e)
{
    uint8_t clamped[HELLO_BYTES];
    struct bulk_head head = { .type = FRAME_MESSAGE };
    struct wire_request request; /* of which nothing in the arena is used: replies take that over */
    struct shd_err why = { 0 };
    s->arena.used = 0;
    int r = wire_request_unpack(body, bytes, &s->arena, &request, e);
    if (r != SHD_OK)
        return r;
    if (request.seq <= s->last_seq)
        return SHD_OK; /* sent again for want of an answer: none gets lost here */
    s->last_seq = request.seq;
    r = frame_admits(&request, /* files= */ true, &why); /* that is the other relay's to say */
    if (r == SHD_OK)
        r = copies_find(&s->copies, &request, &why);
    if (r != SHD_OK)
        return answer_refused(s, request.seq, &why, e);
    if (request.type == WIRE_HELLO && request.hello.level > WIRE_LEVEL) {
        r = clamp_hello(s, &request, clamped, &bytes, e);
        body = clamped;
    }
    head.bytes = bytes;
    if (r == SHD_OK)
        r = copies_send(&s->copies, s->bulk, e);
    return r == SHD_OK ? bulk_send(s->bulk, &head, body, e) : r;
}

static int requests_came(struct stand_in *s, struct shd_err *e)
{
    int r = zconn_read(&s->z, e);
    while (r == SHD_OK) {
        const uint8_t *body;
        size_t bytes;
        r = zconn_next(&s->z, &body, &bytes, e);
        if (r == SHD_OK) /* what sending reads is added behind body */
            r = request_came(s, body, bytes, e);
    }
    return r == SHD_PENDING ? SHD_OK : r;
}

static int claim_came(struct stand_in *s, uint64_t ticket, struct shd_err *e)
{
    struct side_msg msg = { .type = SIDE_SEGMENT, .ticket = ticket };
    const int fd = copies_claim(&s->copies, ticket, &msg.bytes, &msg.kind);
    if (fd < 0) {
        msg = (struct side_msg){ .type = SIDE_ERROR, .status = SHD_ENOENT };
        strcpy(msg.text, "no such ticket in this session");
    }
    return side_send(s->side_fd, &msg, fd, e);
}

static int side_said(struct stand_in *s, struct shd_err *e)
{
    struct side_msg msg;
    const int r = side_recv(s->side_fd, /* timeout_ms= */ 0, &msg, /* ret_fd= */ NULL, e);
    if (r == SHD_ETIMEDOUT)
        return SHD_OK;
    if (r == SHD_OK && msg.type == SIDE_CLAIM)
        return claim_came(s, msg.ticket, e);
    if (r == SHD_OK && msg.type != SIDE_WAKE && msg.type != SIDE_SEGMENT)
        return err_set(e, SHD_EPROTO, "a side message of type %" PRIu32, msg.type);
    return r;
}

/* -- A session --------------------------------------------------------------------------------- */

/* Layouts whose mirror is whole by now. */
static int let_go(struct stand_in *s, struct shd_err *e)
{
    const uint8_t *body;
    size_t bytes;
    int r;
    while ((r = copies_next(&s->copies, &body, &bytes, e)) == SHD_OK)
        if ((r = zconn_write(&s->z, body, bytes, e)) != SHD_OK)
            return r;
    return r == SHD_PENDING ? SHD_OK : r;
}

static int run(struct stand_in *s, struct shd_err *e)
{
    bool more = false;
    int r = SHD_OK;
    while (r >= SHD_OK) {
        struct pollfd p[] = { { .fd = bulk_fd(s->bulk), .events = POLLIN },
                              { .fd = s->z.fd, .events = POLLIN },
                              { .fd = s->side_fd, .events = POLLIN } };
        poll(p, ARRAY_SIZE(p), more ? 0 : copies_holds(&s->copies) ? HELD_MS : POLL_MS);
        r = bulk_receive(s->bulk, e);
        more = r == SHD_PENDING;
        if (r >= SHD_OK)
            r = let_go(s, e);
        if (r >= SHD_OK)
            r = requests_came(s, e); /* also what was read while something was written */
        if (r >= SHD_OK && p[2].revents != 0)
            r = side_said(s, e);
        if (r >= SHD_OK)
            r = bulk_tick(s->bulk, e);
        if (r >= SHD_OK)
            r = copies_live(&s->copies, e);
    }
    return r;
}

/* -- Attaching --------------------------------------------------------------------------------- */

static struct stand_in *stand_in_new(struct relay *relay, const struct stand_in_door *door,
                                     struct shd_err *e)
{
    struct stand_in *s = sys_calloc(1, sizeof *s);
    if (s == NULL) {
        err_set(e, SHD_ENOMEM, "no memory for a session");
        return NULL;
    }
    s->relay = relay;
    s->side_fd = -1;
    s->z = ZCONN_CLOSED;
    memcpy(s->device, door->device, sizeof s->device);
    s->host = door->host;
    copies_init(&s->copies);
    s->message = sys_malloc(WIRE_FRAME_BYTES_MAX);
    s->arena = (struct wire_arena){ .base = sys_malloc(WIRE_ARENA_BYTES),
                                    .bytes = WIRE_ARENA_BYTES };
    if (s->message != NULL && s->arena.base != NULL)
        return s;
    stand_in_free(s);
    err_set(e, SHD_ENOMEM, "no memory for a session");
    return NULL;
}

/* The daemon's welcome, passed on to the worker. */
static int await_welcome(struct stand_in *s, struct shd_err *e)
{
    const struct bulk_head head = { .type = FRAME_OPEN,
                                    .index = FRAME_OPEN_SESSION,
                                    .bytes = sizeof(struct frame_open) };
    struct frame_open open = { .device = "" };
    const uint64_t end_ns = clock_now_ns() + WELCOME_NS;
    memcpy(open.device, s->device, sizeof open.device);
    int r = bulk_send(s->bulk, &head, &open, e);
    while (r >= SHD_OK && !s->welcomed) {
        struct pollfd p = { .fd = bulk_fd(s->bulk), .events = POLLIN };
        poll(&p, 1, POLL_MS);
        r = bulk_receive(s->bulk, e);
        if (r >= SHD_OK && !s->welcomed && clock_now_ns() >= end_ns)
            return err_set(e, SHD_ETIMEDOUT, "no welcome of daemon %s", s->device);
    }
    return r >= SHD_OK ? SHD_OK : r;
}

static int attach(struct stand_in *s, int fd, struct shd_err *e)
{
    const struct bulk_hooks hooks = { .place = place, .done = done, .ctx = s };
    struct side_peer peer;
    s->side_fd = fd;
    int r = side_peer(fd, &peer, e);
    if (r == SHD_OK)
        r = admit_client(fd, &peer, s->relay->config->runtime_dir, e);
    if (r == SHD_OK)
        r = bulk_dial(s->relay->keys, s->host, DIAL_NS, &s->bulk, e);
    if (r != SHD_OK)
        return r;
    s->peer = traffic_of(s->relay, s->host, "");
    traffic_count(s->peer, TRAFFIC_SESSIONS, 1);
    bulk_set_count(s->bulk, traffic_frames(s->peer));
    bulk_set_hooks(s->bulk, &hooks);
    return await_welcome(s, e);
}

/* It hangs up on the worker, which comes again: what is the matter may pass. */
static void log_failed(const struct stand_in *s, const struct shd_err *why)
{
    log_warn("op=relay device=%s host=%s status=%s why=\"%s\" do=\"look at the relay and the "
             "daemons of that host\"",
             s->device, s->host, status_name(why->code), why->text);
}

/* From here on the session is that of the connection whose Hello has this token, which may come as
 * soon as the worker has the welcome. */
static int begin_waiting(struct stand_in *s, struct shd_err *e)
{
    struct relay *relay = s->relay;
    s->since_ns = clock_now_ns();
    pthread_mutex_lock(&relay->lock);
    const int r = side_send(s->side_fd, &s->side, /* pass_fd= */ -1, e);
    if (r == SHD_OK) {
        s->next = relay->waiting;
        relay->waiting = s;
    }
    pthread_mutex_unlock(&relay->lock);
    return r;
}

void stand_in_side(struct relay *relay, void *arg)
{
    struct stand_in_door *door = arg;
    struct shd_err e = { 0 };
    struct stand_in *s = stand_in_new(relay, door, &e);
    const int fd = door->fd;
    free(door);
    if (s == NULL) {
        close(fd);
        return;
    }
    if (attach(s, fd, &e) != SHD_OK) {
        log_failed(s, &e);
        stand_in_free(s);
        return;
    }
    if (begin_waiting(s, &e) != SHD_OK)
        stand_in_free(s);
}

/* Taken out of those that wait; NULL: none has this token. */
static struct stand_in *take_waiting(struct relay *relay, const char *device, const uint8_t *token)
{
    struct stand_in *found = NULL;
    pthread_mutex_lock(&relay->lock);
    for (struct stand_in **at = &relay->waiting; *at != NULL; at = &(*at)->next) {
        if (strcmp((*at)->device, device) != 0 ||
            memcmp((*at)->side.token, token, SHD_TOKEN_BYTES) != 0)
            continue;
        found = *at;
        *at = found->next;
        break;
    }
    pthread_mutex_unlock(&relay->lock);
    return found;
}

void stand_in_sweep(struct relay *relay)
{
    struct stand_in *late = NULL;
    const uint64_t now_ns = clock_now_ns();
    pthread_mutex_lock(&relay->lock);
    for (struct stand_in **at = &relay->waiting; *at != NULL;) {
        struct stand_in *s = *at;
        if (now_ns - s->since_ns < HELLO_NS) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        s->next = late;
        late = s;
    }
    pthread_mutex_unlock(&relay->lock);
    while (late != NULL) {
        struct stand_in *s = late;
        late = s->next;
        stand_in_free(s);
    }
}

/* Whose session is it? The message stays in z, to be passed on. */
static struct stand_in *await_hello(struct relay *relay, const char *device, struct zconn *z,
                                    struct shd_err *e)
{
    const uint64_t end_ns = clock_now_ns() + HELLO_NS;
    struct wire_arena arena = { .base = sys_malloc(WIRE_ARENA_BYTES), .bytes = WIRE_ARENA_BYTES };
    struct wire_request hello;
    const uint8_t *body = NULL;
    size_t bytes = 0;
    int r = arena.base != NULL ? SHD_PENDING : err_set(e, SHD_ENOMEM, "no memory");
    while (r == SHD_PENDING && clock_now_ns() < end_ns) {
        struct pollfd p = { .fd = z->fd, .events = POLLIN };
        poll(&p, 1, POLL_MS);
        r = zconn_read(z, e);
        if (r == SHD_OK)
            r = zconn_next(z, &body, &bytes, e);
    }
    if (r == SHD_OK)
        r = wire_request_unpack(body, bytes, &arena, &hello, e);
    struct stand_in *s = NULL;
    if (r == SHD_OK && hello.type == WIRE_HELLO)
        s = take_waiting(relay, device, hello.hello.token);
    z->skip = 0;
    free(arena.base);
    return s;
}

void stand_in_requests(struct relay *relay, void *arg)
{
    struct stand_in_door *door = arg;
    struct zconn z;
    struct shd_err e = { 0 };
    if (zconn_open(&z, door->fd, /* dealer= */ false, &e) != SHD_OK) {
        free(door);
        return;
    }
    struct stand_in *s = await_hello(relay, door->device, &z, &e);
    free(door);
    if (s == NULL) {
        zconn_close(&z);
        return;
    }
    s->z = z;
    run(s, &e);
    log_info("op=relay device=%s host=%s status=%s bytes=%" PRIu64 " why=\"%s\"", s->device,
             s->host, status_name(e.code), bulk_bytes(s->bulk), e.text);
    stand_in_free(s);
}
