/* A pair of rings: frames between one worker and one daemon, in memory that both see.
 *
 * Each side has a page of its own, which it alone writes and the other maps read-only: the bytes
 * that it sends, how far it has written them, how far it has taken those of the other page, and
 * where it wants to be woken. So each ring has one producer and one consumer, and nobody writes
 * what somebody else does.
 *
 * Positions count bytes ever written or taken; a byte's place is its position modulo RING_BYTES. A
 * frame is its length (uint32_t), zeros (uint32_t), and its bytes, up to the next multiple of 8;
 * it may go over the end of the data.
 *
 * Waking. A consumer that is about to sleep stores as `wake` the position that it has taken, or one
 * further on where it wants several frames (ring_arm()), and looks once more; a producer whose
 * frame goes over it wakes it (ring_put() says so). One of the two sees the other's store: both
 * stores and both loads after them are sequentially consistent. As long as the consumer does not
 * arm again nobody wakes it.
 *
 * What else. Who sleeps may wait for more than frames: it stores a number that both know
 * (ring_await()), and is woken as well when what that stands for has come (ring_awaits()), if the
 * other side looks at such numbers, which its page says (ring_heed()).
 *
 * Failure: what the other side's page says may be anything at any time. Each of its words is read
 * once and checked before it is used, a frame's bytes are copied out before anybody looks at them.
 * SHD_EPROTO says which word was wrong; the rings are of no use after that.
 *
 * Pure, but for the shared memory. One thread at each end.
 */
#ifndef SHD_RING_H
#define SHD_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define RING_BYTES           32768u /* in each direction */
#define RING_FRAME_BYTES_MAX 4096u  /* a longer one goes by the connection */
#define RING_FRAME_TAKES_MIN 16u    /* of the data */
#define RING_LINE_BYTES      64u    /* of a cache */

/* What one side writes. A fresh one is zeros. */
struct ring_page {
    _Alignas(RING_LINE_BYTES) _Atomic uint64_t written; /* of data here */
    _Atomic uint64_t elsewhere; /* answers to frames of the other page that went by the
                                 * connection */
    _Alignas(RING_LINE_BYTES) _Atomic uint64_t taken;  /* of the other page's data */
    _Alignas(RING_LINE_BYTES) _Atomic uint64_t wake;   /* position in the other page's data */
    _Alignas(RING_LINE_BYTES) _Atomic uint64_t awaits; /* what else wakes it; 0: nothing does */
    _Atomic uint64_t heeds;                            /* 1: the other side's awaits is looked at */
    _Alignas(4096) uint8_t data[RING_BYTES];
};

#define RING_PAGE_BYTES ((uint64_t)sizeof(struct ring_page))

/* One side of the pair. Its own positions are here; those in its page are copies for the other. */
struct ring {
    struct ring_page *mine;         /* borrowed */
    const struct ring_page *theirs; /* borrowed */
    uint64_t written, taken;
    uint64_t their_taken; /* of what is written here, when it was looked at last */
};

/* Both pages are fresh. The producer of `mine` is awake or not: not means that the first frame of
 * the other side wakes it. */
void ring_init(struct ring *r, struct ring_page *mine, const struct ring_page *theirs, bool awake);

/* Send a frame of 1 to RING_FRAME_BYTES_MAX bytes. *ret_wake: the other side sleeps, and is to be
 * woken. Errors: SHD_EBUSY no room; SHD_EPROTO. */
int ring_put(struct ring *r, const void *frame, size_t bytes, bool *ret_wake, struct shd_err *e);

/* An answer went by the connection, where no room was, or it was too long. True: the other side
 * sleeps, and is to be woken. */
bool ring_put_elsewhere(struct ring *r);

/* How many of the other side's answers did. */
uint64_t ring_elsewhere(const struct ring *r);

/* Copy the next frame out. Errors: SHD_PENDING there is none; SHD_EPROTO. */
int ring_take(struct ring *r, uint8_t ret_frame[RING_FRAME_BYTES_MAX], size_t *ret_bytes,
              struct shd_err *e);

/* Whether nothing is there to take; no check, ring_take() has them. */
bool ring_is_empty(const struct ring *r);

/* Ask to be woken once so many frames (> 0) are there, or earlier, as they are longer than the
 * shortest; fewer wake nobody, so who asks for several must not sleep for long. False: that many
 * are there already, and nothing was asked. */
bool ring_arm(struct ring *r, uint32_t frames);

/* Awake, for whatever reason: nobody need wake this side. */
void ring_disarm(struct ring *r);

/* Say what else this side waits for, or 0, and that the other's is looked at from here on. */
void ring_await(struct ring *r, uint64_t what);
void ring_heed(struct ring *r);

/* Whether the other side looks at what is awaited here; whether it awaits this. The second is to be
 * asked behind a sequentially consistent fence, which comes after the store that it awaits. */
bool ring_is_heeded(const struct ring *r);
bool ring_awaits(const struct ring *r, uint64_t what);

/* Whether the other side has taken all that was put. */
bool ring_is_drained(const struct ring *r);

#endif
