/* See served.h.
 *
 * Happy path: attach at the daemon, pass its welcome on; then requests come, each
 * behind the bytes that it is about, which were received into the daemon's own segment; replies go,
 * each behind the segments that it names. */
#include "daemon/relay/served.h"

#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "daemon/relay/attach.h"
#include "daemon/relay/bulk.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/traffic.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"

#define POLL_MS      500
#define SEGMENTS_MAX 16u

struct served_segment {
    struct segment segment; /* of the daemon's; fd -1: none */
    enum segment_kind kind;
    dev_t dev; /* what tells whether another descriptor is of the same */
    ino_t ino;
    uint64_t number;         /* > 0, ascending: what both relays call it */
    uint32_t model;          /* of a board, an inbox: the handle */
    uint64_t attempt;        /* of a board: the one that the other relay knows */
    struct traffic *traffic; /* of an inbox: where gradients are counted; NULL: not yet */
};

struct served {
    struct relay *relay;
    struct bulk *bulk; /* borrowed */
    struct attach daemon;
    struct served_segment segments[SEGMENTS_MAX];
    uint64_t last_number;
    uint64_t receiving;        /* number of the segment that bytes come into; 0: none */
    struct traffic *gradients; /* where these are counted; NULL: nowhere */
    uint64_t refused_seq;      /* of a request that is to be answered with the next; 0: none */
    struct shd_err refused;
    uint8_t *message; /* owned, [WIRE_FRAME_BYTES_MAX] */
    struct wire_arena arena;
};

/* -- What the other relay says ----------------------------------------------------------------- */

static int place_bytes(struct served *s, const struct bulk_head *head, void **ret_to,
                       struct shd_err *e)
{
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++) {
        struct served_segment *at = &s->segments[i];
        if (at->segment.fd < 0 || at->number != head->id)
            continue;
        if (at->kind != SEGMENT_INBOX && at->kind != SEGMENT_STAGE)
            return err_set(e, SHD_EPROTO, "bytes for a %s segment", segment_kind_name(at->kind));
        if (head->at > at->segment.bytes || head->bytes > at->segment.bytes - head->at)
            return err_set(e, SHD_ERANGE,
                           "bytes [%" PRIu64 ", + %" PRIu64 ") of a segment of %" PRIu64, head->at,
                           head->bytes, at->segment.bytes);
        *ret_to = (uint8_t *)at->segment.base + head->at;
        s->receiving = head->id;
        s->gradients = at->traffic;
        return SHD_OK;
    }
    return err_set(e, SHD_ENOENT, "bytes for segment %" PRIu64 ", which there is not", head->id);
}

static int place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct served *s = ctx;
    if (head->type == FRAME_BYTES)
        return place_bytes(s, head, ret_to, e);
    if (head->type != FRAME_MESSAGE || head->bytes == 0 || head->bytes > WIRE_FRAME_BYTES_MAX)
        return err_set(e, SHD_EPROTO, "a frame of type %" PRIu32 " and %" PRIu64 " bytes",
                       head->type, head->bytes);
    *ret_to = s->message;
    return SHD_OK;
}

/* A daemon knows the relay's process alone: so the name says whose worker it is. */
static int pass_hello(struct served *s, struct wire_request *hello, struct shd_err *e)
{
    char name[WIRE_NAME_BYTES_MAX];
    size_t bytes;
    const char *host = bulk_peer(s->bulk);
    snprintf(name, sizeof name, "%.*s@%s", (int)(sizeof name - strlen(host) - 2), hello->hello.name,
             host);
    hello->hello.name = name;
    if (hello->hello.level > WIRE_LEVEL)
        hello->hello.level = WIRE_LEVEL; /* what passes here is unpacked here */
    const int r = wire_request_pack_for(hello, (uint32_t)s->daemon.welcome.ticket, s->message,
                                        WIRE_FRAME_BYTES_MAX, &bytes, e);
    return r == SHD_OK ? zconn_write(&s->daemon.z, s->message, bytes, e) : r;
}

static int done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct served *s = ctx;
    struct wire_request request;
    s->receiving = 0;
    if (head->type == FRAME_BYTES)
        traffic_add(s->gradients, TRAFFIC_GRADIENTS_IN, head->bytes);
    if (head->type != FRAME_MESSAGE)
        return SHD_OK;
    s->arena.used = 0;
    int r = wire_request_unpack(payload, (size_t)head->bytes, &s->arena, &request, e);
    if (r == SHD_OK)
        r = frame_admits(&request, s->relay->config->files, e);
    if (r == SHD_EAUTH && frame_is_of_files(&request) && s->refused_seq == 0) {
        s->refused_seq = request.seq; /* hooks do not send */
        s->refused = *e;
        return SHD_OK;
    }
    if (r == SHD_OK && request.type == WIRE_HELLO)
        return pass_hello(s, &request, e);
    return r == SHD_OK ? zconn_write(&s->daemon.z, payload, (size_t)head->bytes, e) : r;
}

/* -- What the daemon says ---------------------------------------------------------------------- */

/* A place for one more: the oldest that is handed over once goes. A segment whose bytes still come
 * stays: bulk writes on into it. */
static struct served_segment *make_place(struct served *s, struct shd_err *e)
{
    struct served_segment *oldest = NULL;
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++) {
        struct served_segment *at = &s->segments[i];
        if (at->segment.fd < 0)
            return at;
        const bool lasts = at->kind == SEGMENT_INBOX || at->kind == SEGMENT_BOARD;
        if (!lasts && at->number != s->receiving && (oldest == NULL || at->number < oldest->number))
            oldest = at;
    }
    if (oldest == NULL)
        err_set(e, SHD_EBUSY, "a session with %u inboxes, boards and segments that bytes come into",
                SEGMENTS_MAX);
    else
        segment_close(&oldest->segment);
    return oldest;
}

/* The segment behind fd (taken): one that is mapped already, or a new one. */
static int keep(struct served *s, int fd, const struct wire_segment *said,
                struct served_segment **ret_at, struct shd_err *e)
{
    struct stat st;
    int r = fstat(fd, &st) == 0 ? SHD_OK : err_sys(e, SHD_EIO, "look at a segment");
    for (uint32_t i = 0; r == SHD_OK && i < SEGMENTS_MAX; i++) {
        struct served_segment *at = &s->segments[i];
        if (at->segment.fd < 0 || at->dev != st.st_dev || at->ino != st.st_ino)
            continue;
        close(fd);
        *ret_at = at;
        return SHD_OK;
    }
    struct served_segment *at = r == SHD_OK ? make_place(s, e) : NULL;
    if (at == NULL || segment_map(fd, said->kind, said->bytes, &at->segment, e) != SHD_OK) {
        close(fd);
        return SHD_ENOMEM;
    }
    at->kind = said->kind;
    at->dev = st.st_dev;
    at->ino = st.st_ino;
    at->number = ++s->last_number;
    at->traffic = NULL;
    *ret_at = at;
    return SHD_OK;
}

/* Claim a segment and say that it is there; with what it has, if that is for the worker to read. */
static int pass_segment(struct served *s, const struct wire_segment *said, bool contents,
                        struct served_segment **ret_at, struct shd_err *e)
{
    struct served_segment *at = NULL;
    int fd;
    int r = attach_claim(&s->daemon, said, &fd, e);
    if (r == SHD_OK)
        r = keep(s, fd, said, &at, e);
    if (r != SHD_OK)
        return r;
    if (ret_at != NULL)
        *ret_at = at;
    const struct bulk_head there = { .type = FRAME_SEGMENT,
                                     .index = said->kind,
                                     .id = said->ticket,
                                     .at = said->bytes,
                                     .bytes = sizeof at->number };
    const struct bulk_head bytes = { .type = FRAME_BYTES, .id = at->number, .bytes = said->bytes };
    r = bulk_send(s->bulk, &there, &at->number, e);
    return r == SHD_OK && contents ? bulk_send(s->bulk, &bytes, at->segment.base, e) : r;
}

/* The board is looked at before each reply. It is no wait: the mirror has one of its own. */
static int keep_board(struct served *s, const struct wire_layout *layout,
                      const struct wire_segment *said, int fd, struct shd_err *e)
{
    struct served_segment *at = NULL;
    if (said->bytes < sizeof(struct board)) {
        close(fd);
        return err_set(e, SHD_ESEGMENT, "a board of %" PRIu64 " bytes", said->bytes);
    }
    const int r = keep(s, fd, said, &at, e);
    if (r != SHD_OK)
        return r;
    at->model = layout->model;
    at->attempt = layout->attempt;
    return SHD_OK;
}

/* The model's, out of its spec; "" stays where that cannot be read. */
static void read_name(const void *json, uint64_t bytes, char ret_name[WIRE_NAME_BYTES_MAX])
{
    json_t *root = bytes > 0 ? json_loadb(json, bytes, 0, NULL) : NULL;
    const char *name = json_string_value(json_object_get(root, "name"));
    if (name != NULL)
        snprintf(ret_name, WIRE_NAME_BYTES_MAX, "%s", name);
    json_decref(root);
}

static void count_inbox(struct served *s, uint32_t model, struct served_segment *inbox,
                        const char *name)
{
    inbox->model = model;
    if (inbox->traffic != NULL || name[0] == '\0')
        return;
    inbox->traffic = traffic_of(s->relay, bulk_peer(s->bulk), name);
    traffic_count(inbox->traffic, TRAFFIC_SERVED, 1);
}

static int pass_spec(struct served *s, const struct wire_layout *layout,
                     const struct wire_segment *said, char ret_name[WIRE_NAME_BYTES_MAX],
                     struct shd_err *e)
{
    struct served_segment *at = NULL;
    const int r = pass_segment(s, said, /* contents= */ true, &at, e);
    if (r == SHD_OK && layout->spec_bytes > 0 && at->segment.bytes >= layout->spec_bytes)
        read_name(at->segment.base, layout->spec_bytes, ret_name);
    return r;
}

/* Its spec is in the arena, which is that of requests as soon as anything is sent. */
static int pass_layout(struct served *s, const struct wire_layout *layout, struct shd_err *e)
{
    char name[WIRE_NAME_BYTES_MAX] = "";
    struct served_segment *inbox = NULL;
    int r = SHD_OK;
    read_name(layout->spec.data, layout->spec.bytes, name);
    for (uint32_t i = 0; r == SHD_OK && i < layout->segment_count; i++) {
        const struct wire_segment *said = &layout->segments[i];
        int fd;
        if (said->kind == SEGMENT_INBOX)
            r = pass_segment(s, said, /* contents= */ false, &inbox, e);
        else if (said->kind == SEGMENT_SPEC)
            r = pass_spec(s, layout, said, name, e);
        else if ((r = attach_claim(&s->daemon, said, &fd, e)) == SHD_OK &&
                 said->kind == SEGMENT_BOARD)
            r = keep_board(s, layout, said, fd, e);
        else if (r == SHD_OK)
            close(fd); /* the mirror has its own; a ticket is not to be left */
    }
    if (r == SHD_OK && inbox != NULL)
        count_inbox(s, layout->model, inbox, name);
    return r;
}

/* A daemon says on its board that a step was reset before it answers anybody so. Here a reply could
 * overtake the board, which goes by the mirror: so what changed is told in front of the reply. */
static int pass_attempts(struct served *s, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < SEGMENTS_MAX; i++) {
        struct served_segment *at = &s->segments[i];
        if (at->segment.fd < 0 || at->kind != SEGMENT_BOARD)
            continue;
        const struct board *board = at->segment.base;
        struct bulk_head head = { .type = FRAME_ATTEMPT, .index = at->model };
        head.id = atomic_load_explicit(&board->attempt, memory_order_acquire);
        head.at = atomic_load_explicit(&board->tried, memory_order_acquire);
        if (head.id == at->attempt)
            continue;
        at->attempt = head.id;
        r = bulk_send(s->bulk, &head, NULL, e);
    }
    return r;
}

static int pass_reply(struct served *s, const uint8_t *body, size_t bytes, struct shd_err *e)
{
    const struct bulk_head head = { .type = FRAME_MESSAGE, .bytes = bytes };
    struct wire_reply reply; /* of which nothing in the arena is used: requests take that over */
    s->arena.used = 0;
    int r = wire_reply_unpack(body, bytes, &s->arena, &reply, e);
    if (r == SHD_OK && reply.status == SHD_OK && reply.type == WIRE_LAYOUT)
        r = pass_layout(s, &reply.layout, e);
    struct wire_segment stage = { .kind = SEGMENT_STAGE };
    if (r == SHD_OK && reply.status == SHD_OK && reply.type == WIRE_CREATED) {
        stage.ticket = reply.created.ticket;
        stage.bytes = reply.created.bytes;
    } else if (r == SHD_OK && reply.status == SHD_OK && reply.type == WIRE_GOT) {
        stage.ticket = reply.got.ticket;
        stage.bytes = reply.got.bytes;
    }
    if (r == SHD_OK && stage.ticket != 0)
        r = pass_segment(s, &stage, reply.type == WIRE_GOT, /* ret_at= */ NULL, e);
    if (r == SHD_OK)
        r = pass_attempts(s, e);
    return r == SHD_OK ? bulk_send(s->bulk, &head, body, e) : r;
}

static int pass_replies(struct served *s, struct shd_err *e)
{
    int r = zconn_read(&s->daemon.z, e);
    while (r == SHD_OK) {
        const uint8_t *body;
        size_t bytes;
        r = zconn_next(&s->daemon.z, &body, &bytes, e);
        if (r == SHD_OK) /* sending may receive, and what that writes reads: it adds behind body */
            r = pass_reply(s, body, bytes, e);
    }
    return r == SHD_PENDING ? SHD_OK : r;
}

static int pass_side(struct served *s, const struct side_msg *msg, struct shd_err *e)
{
    const struct bulk_head head = { .type = FRAME_SIDE, .bytes = sizeof *msg };
    return bulk_send(s->bulk, &head, msg, e);
}

/* It says why it ends a session, or hangs up. */
static int hear_side(struct served *s, struct shd_err *e)
{
    struct side_msg msg;
    const int r = side_recv(s->daemon.side_fd, /* timeout_ms= */ 0, &msg, /* ret_fd= */ NULL, e);
    if (r == SHD_ETIMEDOUT || (r == SHD_OK && msg.type == SIDE_WAKE))
        return SHD_OK;
    return r == SHD_OK ? pass_side(s, &msg, e) : r;
}

/* -- A session --------------------------------------------------------------------------------- */

static int answer_refused(struct served *s, struct shd_err *e)
{
    const struct wire_reply reply = { .seq = s->refused_seq,
                                      .status = s->refused.code,
                                      .text = s->refused.text };
    struct bulk_head head = { .type = FRAME_MESSAGE };
    uint8_t frame[1024];
    size_t bytes;
    if (s->refused_seq == 0)
        return SHD_OK;
    s->refused_seq = 0;
    const int r = wire_reply_pack(&reply, frame, sizeof frame, &bytes, e);
    head.bytes = bytes;
    return r == SHD_OK ? bulk_send(s->bulk, &head, frame, e) : r;
}

static int serve_session(struct served *s, struct shd_err *e)
{
    int r = pass_side(s, &s->daemon.welcome, e);
    bool more = false;
    while (r >= SHD_OK) {
        struct pollfd p[] = { { .fd = bulk_fd(s->bulk), .events = POLLIN },
                              { .fd = s->daemon.z.fd, .events = POLLIN },
                              { .fd = s->daemon.side_fd, .events = POLLIN } };
        poll(p, ARRAY_SIZE(p), more ? 0 : POLL_MS);
        r = bulk_receive(s->bulk, e);
        more = r == SHD_PENDING;
        if (r >= SHD_OK)
            r = answer_refused(s, e);
        if (r >= SHD_OK)
            r = pass_replies(s, e); /* also of what was read while something was written */
        if (r >= SHD_OK && p[2].revents != 0)
            r = hear_side(s, e);
        if (r >= SHD_OK)
            r = bulk_tick(s->bulk, e);
    }
    return r;
}

static int new_served(struct relay *relay, struct bulk *bulk, struct served **ret_served,
                      struct shd_err *e)
{
    struct served *s = sys_calloc(1, sizeof *s);
    if (s == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    *s = (struct served){ .relay = relay, .bulk = bulk, .daemon = ATTACH_CLOSED };
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++)
        s->segments[i].segment = SEGMENT_CLOSED;
    s->message = sys_malloc(WIRE_FRAME_BYTES_MAX);
    s->arena = (struct wire_arena){ .base = sys_malloc(WIRE_ARENA_BYTES),
                                    .bytes = WIRE_ARENA_BYTES };
    *ret_served = s;
    return s->message != NULL && s->arena.base != NULL
               ? SHD_OK
               : err_set(e, SHD_ENOMEM, "no memory for a session");
}

static void end_served(struct served *s)
{
    if (s == NULL)
        return;
    bulk_end(s->bulk); /* a payload may be under way into a segment */
    attach_close(&s->daemon);
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++) {
        if (s->segments[i].segment.fd >= 0)
            traffic_count(s->segments[i].traffic, TRAFFIC_SERVED, -1);
        segment_close(&s->segments[i].segment);
    }
    free(s->message);
    free(s->arena.base);
    free(s);
}

int served_run(struct relay *relay, struct bulk *bulk, const struct frame_open *open,
               struct shd_err *e)
{
    struct traffic *peer = traffic_of(relay, bulk_peer(bulk), "");
    struct served *s = NULL;
    int r = new_served(relay, bulk, &s, e);
    if (r == SHD_OK)
        r = attach_open(relay->config->runtime_dir, open->device, &s->daemon, e);
    if (r != SHD_OK) {
        frame_refuse(bulk, e);
    } else {
        CHECK(s != NULL);
        const struct bulk_hooks hooks = { .place = place, .done = done, .ctx = s };
        bulk_set_hooks(bulk, &hooks);
        traffic_count(peer, TRAFFIC_SERVED, 1);
        r = serve_session(s, e);
        traffic_count(peer, TRAFFIC_SERVED, -1);
    }
    end_served(s);
    return r;
}
