/* Rings: frames of sessions by shared memory (proto/share/ring.h), beside their connections. What
 * comes by a ring is what could have come by the session's connection, and is served the same; its
 * answer goes by the ring, too, where it fits.
 *
 * Happy path: a client asks for a pair of rings (rings_open()), claims their pages, and puts its
 * requests there. The first one that comes while nobody looks wakes the loop by the side channel
 * (rings_wake()); then the ring is looked at in each turn of the loop until nothing is in it.
 *
 * Bounds. Of one session RINGS_TURN_FRAMES are served in a turn. A pair is two segments of
 * RING_PAGE_BYTES, made when a session asks; they go with it. Where descriptors or memory are short
 * it is refused, and the session goes on by its connection.
 *
 * Failure: a page that says what cannot be ends its session. Loop thread.
 */
#ifndef SHD_RINGS_H
#define SHD_RINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct daemon;
struct rings;
struct session;
struct wire_ring;

int rings_new(struct daemon *d, struct rings **ret_rings, struct shd_err *e);
void rings_free(struct rings *rings); /* NULL is a no-op; every session has ended */

/* Make the session's pair; one that it has had is dropped, with what is in it. Errors: SHD_EBUSY
 * descriptors or tickets are short; SHD_ENOMEM, SHD_EIO. */
int rings_open(struct session *s, struct wire_ring *ret_ring, struct shd_err *e);

/* The session's client has put something there. */
void rings_wake(struct session *s);

/* This has come (board_awaited()): wake those that sleep until it has. */
void rings_published(struct rings *rings, uint64_t awaited);

/* Answer a request that came by the session's ring. False: it is to go by the connection. */
bool rings_reply(struct session *s, const void *frame, size_t bytes);

/* Of all sessions' pages, now. */
uint64_t rings_bytes(const struct rings *rings);

/* The session has ended. */
void rings_end(struct session *s);

#endif
