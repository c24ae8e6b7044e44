/* See link_ring.h. */
#include "client/session/link_ring.h"

#include <inttypes.h>
#include <unistd.h>

#include "proto/share/fdpass.h"

enum link_way link_ring_way(const struct link_ring *r, size_t bytes)
{
    if (r->state != LINK_RING_OPEN)
        return LINK_BY_CONN;
    const bool conn_is_read = r->conn_heard >= r->conn_sent;
    if (conn_is_read && bytes <= RING_FRAME_BYTES_MAX)
        return LINK_BY_RING;
    return ring_is_drained(&r->ring) ? LINK_BY_CONN : LINK_BY_NEITHER;
}

int link_ring_send(struct link_ring *r, int side_fd, const void *frame, size_t bytes,
                   uint64_t can_wait_ns, struct shd_err *e)
{
    bool wakes;
    const int put = ring_put(&r->ring, frame, bytes, &wakes, e);
    if (put != SHD_OK)
        return put;
    r->owes_wake = r->owes_wake || wakes;
    if (!r->owes_wake)
        return SHD_OK;
    if (r->put_off++ == 0)
        r->put_off_ns = can_wait_ns;
    if (can_wait_ns == 0 || r->put_off == LINK_RING_PUT_OFF)
        link_ring_wake(r, side_fd);
    return SHD_OK;
}

/* Where the socket is full the daemon has something to read there, which wakes it as well; one that
 * has gone is seen when the link is polled next. */
void link_ring_wake(struct link_ring *r, int side_fd)
{
    const struct side_msg wake = { .type = SIDE_WAKE };
    struct shd_err ignored;
    if (!r->owes_wake)
        return;
    const int sent = side_send(side_fd, &wake, /* pass_fd= */ -1, &ignored);
    r->owes_wake = sent != SHD_OK && sent != SHD_EBUSY && sent != SHD_EGONE;
    r->put_off = 0;
    r->put_off_ns = 0;
}

int link_ring_take(struct link_ring *r, uint8_t ret_frame[RING_FRAME_BYTES_MAX], size_t *ret_bytes,
                   struct shd_err *e)
{
    return r->state == LINK_RING_OPEN ? ring_take(&r->ring, ret_frame, ret_bytes, e) : SHD_PENDING;
}

bool link_ring_arm(struct link_ring *r, uint32_t replies)
{
    return r->state != LINK_RING_OPEN || ring_arm(&r->ring, replies);
}

void link_ring_disarm(struct link_ring *r)
{
    if (r->state == LINK_RING_OPEN)
        ring_disarm(&r->ring);
}

bool link_ring_await(struct link_ring *r, uint64_t what)
{
    if (r->state != LINK_RING_OPEN || !ring_is_heeded(&r->ring))
        return false;
    ring_await(&r->ring, what);
    return true;
}

bool link_ring_needs_conn(const struct link_ring *r)
{
    return r->state != LINK_RING_OPEN || r->conn_calls > 0 ||
           ring_elsewhere(&r->ring) != r->elsewhere;
}

int link_ring_open(struct link_ring *r, int requests_fd, int replies_fd, uint64_t bytes,
                   struct shd_err *e)
{
    struct segment requests = SEGMENT_CLOSED, replies = SEGMENT_CLOSED;
    int s = bytes != RING_PAGE_BYTES
                ? err_set(e, SHD_EPROTO, "ring of %" PRIu64 " bytes, this build's has %" PRIu64,
                          bytes, RING_PAGE_BYTES)
                : SHD_OK;
    if (s == SHD_OK)
        s = segment_map(requests_fd, SEGMENT_REQUESTS, bytes, &requests, e);
    if (s == SHD_OK)
        s = segment_map(replies_fd, SEGMENT_REPLIES, bytes, &replies, e);
    if (s != SHD_OK) {
        requests.fd = -1;
        segment_close(&requests);
    } else {
        r->requests = requests;
        r->replies = replies;
        r->requests.fd = r->replies.fd = -1;
        r->elsewhere = 0;
        ring_init(&r->ring, requests.base, replies.base, /* awake= */ true);
        r->state = LINK_RING_OPEN;
    }
    close(requests_fd); /* the mappings keep the memory */
    close(replies_fd);
    return s;
}

void link_ring_close(struct link_ring *r)
{
    if (r->state == LINK_RING_OPEN) {
        segment_close(&r->requests);
        segment_close(&r->replies);
    }
    const bool asked = r->state == LINK_RING_ASKED;
    *r = (struct link_ring){ .state = asked ? LINK_RING_ASKED : LINK_RING_NONE };
}
