/* See rings.h. */
#include "daemon/net/rings.h"

#include <inttypes.h>
#include <stdlib.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/net/door.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"
#include "proto/share/ring.h"
#include "proto/share/segment.h"

#define RINGS_TURN_FRAMES 64u /* of one session, in one turn of the loop */

struct lane {                /* a session's pair */
    struct session *session; /* borrowed: its owner */
    struct segment requests, replies;
    struct ring ring;
    bool active; /* in the list: it is looked at in each turn, and need not be woken */
    struct lane *next, *previous;
};

struct rings {
    struct daemon *daemon;            /* borrowed */
    struct lane *lanes[SESSIONS_MAX]; /* owned, by the session's place */
    struct lane *first, *last;        /* active; served from the first on */
    struct lane *serving;             /* NULL: none, or it has gone meanwhile */
    uint32_t active, count;
    uv_prepare_t turn;                   /* before the loop sleeps */
    uv_idle_t more;                      /* running while it must not */
    uint8_t frame[RING_FRAME_BYTES_MAX]; /* being served */
};

static struct rings *rings_of(const struct session *s)
{
    return s->daemon->mailbox->rings;
}

static struct lane **place_of(const struct session *s)
{
    return &rings_of(s)->lanes[s->id % SESSIONS_MAX];
}

/* -- The list of those that are looked at -------------------------------------------------------
 */

static void activate(struct rings *rings, struct lane *lane)
{
    CHECK(!lane->active);
    lane->active = true;
    lane->next = NULL;
    lane->previous = rings->last;
    *(rings->last != NULL ? &rings->last->next : &rings->first) = lane;
    rings->last = lane;
    rings->active++;
}

static void deactivate(struct rings *rings, struct lane *lane)
{
    CHECK(lane->active);
    lane->active = false;
    *(lane->previous != NULL ? &lane->previous->next : &rings->first) = lane->next;
    *(lane->next != NULL ? &lane->next->previous : &rings->last) = lane->previous;
    rings->active--;
}

static void lane_free(struct rings *rings, struct lane *lane)
{
    if (lane->active)
        deactivate(rings, lane);
    if (rings->serving == lane)
        rings->serving = NULL;
    segment_close(&lane->requests);
    segment_close(&lane->replies);
    rings->count--;
    free(lane);
}

/* -- Serving ------------------------------------------------------------------------------------
 */

/* Whoever wrote this is no libshd, or has written where it must not. */
static void end_broken(struct lane *lane, const struct shd_err *why)
{
    struct session *s = lane->session;
    s->daemon->mailbox->bad_frames++;
    log_warn("op=ring status=%s session=%016" PRIx64 " pid=%d why=\"%s\""
             " do=\"look at that program: use libshd of this version\"",
             status_name(why->code), s->id, (int)s->pid, why->text);
    session_end(s, "its ring is broken");
}

/* Serve what is there, as much as one may have in a turn. False: there is nothing left. */
static bool serve(struct rings *rings, struct lane *lane)
{
    struct daemon *d = rings->daemon;
    for (uint32_t i = 0; i < RINGS_TURN_FRAMES; i++) {
        struct shd_err e = { 0 };
        size_t bytes;
        const int r = ring_take(&lane->ring, rings->frame, &bytes, &e);
        if (r == SHD_PENDING)
            return !ring_arm(&lane->ring, /* frames= */ 1);
        if (r != SHD_OK) {
            end_broken(lane, &e);
            return false;
        }
        d->hooks->frame(d, lane->session->conn, /* by_ring= */ true, rings->frame, bytes);
        if (rings->serving != lane) /* its session has ended */
            return false;
    }
    return true;
}

/* Each that is active once. Sessions may end meanwhile, also other ones. */
static void take_turn(uv_prepare_t *turn)
{
    struct rings *rings = turn->data;
    if (rings->daemon->stopping) /* what a request would need is going away */
        return;
    for (uint32_t left = rings->active; left > 0 && rings->first != NULL; left--) {
        struct lane *lane = rings->first;
        deactivate(rings, lane);
        rings->serving = lane;
        const bool more = serve(rings, lane);
        if (more && rings->serving == lane && !lane->active)
            activate(rings, lane);
        rings->serving = NULL;
    }
    if (rings->active == 0)
        uv_idle_stop(&rings->more);
}

/* While it runs the loop does not sleep. */
static void keep_awake(uv_idle_t *more)
{
    (void)more;
}

void rings_wake(struct session *s)
{
    struct rings *rings = rings_of(s);
    struct lane *lane = *place_of(s);
    if (lane == NULL || lane->active || rings->serving == lane)
        return;
    activate(rings, lane);
    uv_idle_start(&rings->more, keep_awake);
}

/* -- Answering ----------------------------------------------------------------------------------
 */

static void wake_client(const struct session *s)
{
    const struct side_msg wake = { .type = SIDE_WAKE };
    struct shd_err ignored; /* it has gone, or has not read what would wake it as well */
    side_send(s->side_fd, &wake, /* pass_fd= */ -1, &ignored);
}

bool rings_reply(struct session *s, const void *frame, size_t bytes)
{
    struct lane *lane = *place_of(s);
    struct shd_err e = { 0 };
    bool wakes = false;
    if (lane == NULL)
        return false;
    const int r = bytes <= RING_FRAME_BYTES_MAX ? ring_put(&lane->ring, frame, bytes, &wakes, &e)
                                                : SHD_EBUSY;
    if (r == SHD_EBUSY)
        wakes = ring_put_elsewhere(&lane->ring);
    if (r == SHD_EPROTO)
        end_broken(lane, &e);
    else if (wakes)
        wake_client(s);
    return r != SHD_EBUSY;
}

void rings_published(struct rings *rings, uint64_t awaited)
{
    uint32_t left = rings->count;
    atomic_thread_fence(memory_order_seq_cst); /* ring_awaits() */
    for (uint32_t i = 0; left > 0; i++) {
        const struct lane *lane = rings->lanes[i];
        if (lane == NULL)
            continue;
        left--;
        if (ring_awaits(&lane->ring, awaited))
            wake_client(lane->session);
    }
}

/* -- Beginning and ending -----------------------------------------------------------------------
 */

/* The last descriptors are for others (door.h). */
static int check_descriptor(int fd, struct shd_err *e)
{
    const uint32_t all = door_descriptors_max(), kept = door_descriptors_kept();
    if ((uint32_t)fd < all - kept)
        return SHD_OK;
    return err_set(e, SHD_EBUSY,
                   "descriptors are short: %d are in use, of %" PRIu32 " the last %" PRIu32
                   " are kept",
                   fd, all, kept);
}

static int make_page(struct session *s, enum segment_kind kind, struct segment *ret_segment,
                     uint64_t *ret_ticket, struct shd_err *e)
{
    int r = segment_new("shardd-ring", kind, RING_PAGE_BYTES, ret_segment, e);
    if (r == SHD_OK)
        r = check_descriptor(ret_segment->fd, e);
    if (r != SHD_OK)
        return r;
    *ret_ticket = session_ticket_give(s, ret_segment->fd, kind, ret_segment->bytes);
    if (*ret_ticket == 0)
        return err_set(e, SHD_EBUSY, "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    ret_segment->fd = -1; /* the mapping keeps the memory */
    return SHD_OK;
}

int rings_open(struct session *s, struct wire_ring *ret_ring, struct shd_err *e)
{
    struct rings *rings = rings_of(s);
    rings_end(s);
    struct lane *lane = sys_calloc(1, sizeof *lane);
    if (lane == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a ring");
    *lane = (struct lane){ .session = s, .requests = SEGMENT_CLOSED, .replies = SEGMENT_CLOSED };
    *place_of(s) = lane;
    rings->count++;
    int r = make_page(s, SEGMENT_REQUESTS, &lane->requests, &ret_ring->requests, e);
    if (r == SHD_OK)
        r = make_page(s, SEGMENT_REPLIES, &lane->replies, &ret_ring->replies, e);
    if (r != SHD_OK) {
        rings_end(s);
        return r;
    }
    ret_ring->bytes = lane->requests.bytes;
    ring_init(&lane->ring, lane->replies.base, lane->requests.base, /* awake= */ false);
    ring_heed(&lane->ring);
    return SHD_OK;
}

void rings_end(struct session *s)
{
    struct lane **place = place_of(s), *lane = *place;
    if (lane == NULL)
        return;
    *place = NULL;
    lane_free(rings_of(s), lane);
}

uint64_t rings_bytes(const struct rings *rings)
{
    return rings->count * 2 * RING_PAGE_BYTES;
}

int rings_new(struct daemon *d, struct rings **ret_rings, struct shd_err *e)
{
    struct rings *rings = sys_calloc(1, sizeof *rings);
    if (rings == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for rings");
    rings->daemon = d;
    uv_prepare_init(d->loop, &rings->turn);
    uv_idle_init(d->loop, &rings->more);
    rings->turn.data = rings->more.data = rings;
    uv_prepare_start(&rings->turn, take_turn);
    *ret_rings = rings;
    return SHD_OK;
}

void rings_free(struct rings *rings)
{
    if (rings == NULL)
        return;
    CHECK(rings->count == 0);
    uv_close((uv_handle_t *)&rings->turn, NULL);
    uv_close((uv_handle_t *)&rings->more, NULL);
    uv_run(rings->daemon->loop, UV_RUN_NOWAIT); /* both must end before their memory */
    free(rings);
}
