/* A link's pair of rings (proto/share/ring.h): requests and replies by shared memory, where the
 * daemon knows that; its connection goes on to carry what does not fit.
 *
 * The daemon gets requests in the order in which they were sent, whichever way they go: nothing
 * goes by the ring while it may not have read all that went by the connection (a reply to the last
 * of that says that it has), and nothing by the connection before it has taken all of the ring.
 *
 * Failure: a page that says what cannot be is SHD_EPROTO; the link is of no use after that. A pair
 * that cannot be had is none: everything goes by the connection. One thread.
 */
#ifndef SHD_LINK_RING_H
#define SHD_LINK_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/share/ring.h"
#include "proto/share/segment.h"

enum link_ring_state {
    LINK_RING_NONE,  /* nobody has asked for one */
    LINK_RING_ASKED, /* the answer is to come */
    LINK_RING_OPEN,
    LINK_RING_REFUSED, /* on this connection */
};

struct link_ring {
    enum link_ring_state state;
    struct segment requests, replies; /* OPEN: owned mappings, without their descriptors */
    struct ring ring;
    uint64_t conn_sent, conn_heard; /* numbers: sent last by the connection, highest answered */
    uint32_t conn_calls;            /* sent by the connection, without an answer yet */
    bool owes_wake;                 /* the daemon is to be woken still: that failed, or */
    uint32_t put_off;               /* is put off: frames since */
    uint64_t put_off_ns;            /* the first of them */
    uint64_t sent_ns;               /* the last request, by either way */
    uint64_t elsewhere;             /* answers to what went by the ring that came by the other */
};

/* Where a request of so many bytes goes now. */
enum link_way { LINK_BY_RING, LINK_BY_CONN, LINK_BY_NEITHER /* later */ };
enum link_way link_ring_way(const struct link_ring *r, size_t bytes);

/* Put a request there, and wake the daemon where it sleeps (by its side channel). One that it need
 * not be woken for alone can_wait for others, LINK_RING_PUT_OFF at most; can_wait_ns: the time now,
 * 0: it cannot. Errors: SHD_EBUSY later; SHD_EPROTO. */
#define LINK_RING_PUT_OFF 8u
int link_ring_send(struct link_ring *r, int side_fd, const void *frame, size_t bytes,
                   uint64_t can_wait_ns, struct shd_err *e);

/* Wake it, if that is owed. */
void link_ring_wake(struct link_ring *r, int side_fd);

/* Take a reply. Errors: SHD_PENDING there is none; SHD_EPROTO. */
int link_ring_take(struct link_ring *r, uint8_t ret_frame[RING_FRAME_BYTES_MAX], size_t *ret_bytes,
                   struct shd_err *e);

/* This side is about to sleep, until so many replies are there (ring_arm()). False: they are. */
bool link_ring_arm(struct link_ring *r, uint32_t replies);
void link_ring_disarm(struct link_ring *r);

/* Have the daemon wake this side also by what is awaited (board.h), or not any more (0). False: it
 * has no ring, or does not know that. */
bool link_ring_await(struct link_ring *r, uint64_t what);

/* Whether a reply may come by the connection. */
bool link_ring_needs_conn(const struct link_ring *r);

/* Use the pages of these descriptors, which are taken over: mapped and closed. Errors: SHD_ENOMEM,
 * SHD_EIO. */
int link_ring_open(struct link_ring *r, int requests_fd, int replies_fd, uint64_t bytes,
                   struct shd_err *e);

/* The connection has ended, and with it the ring. What was asked for stays asked for. */
void link_ring_close(struct link_ring *r);

#endif
