/* See ring.h. */
#include "proto/share/ring.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

#include "proto/base/check.h"

#define HEADER_BYTES 8u

static_assert(sizeof(_Atomic uint64_t) == 8 && ATOMIC_LLONG_LOCK_FREE == 2,
              "positions are stored and loaded whole");
static_assert((RING_BYTES & (RING_BYTES - 1)) == 0 && RING_BYTES % HEADER_BYTES == 0,
              "a header is never in two parts");
static_assert(RING_FRAME_TAKES_MIN == 2 * HEADER_BYTES, "a header, and a byte at least");
static_assert(offsetof(struct ring_page, awaits) == 192 &&
                  offsetof(struct ring_page, data) == 4096 &&
                  sizeof(struct ring_page) == 4096 + RING_BYTES,
              "layout other processes map");

/* In the data. */
static uint64_t frame_bytes(uint64_t bytes)
{
    return HEADER_BYTES + (bytes + HEADER_BYTES - 1) / HEADER_BYTES * HEADER_BYTES;
}

void ring_init(struct ring *r, struct ring_page *mine, const struct ring_page *theirs, bool awake)
{
    *r = (struct ring){ .mine = mine, .theirs = theirs };
    if (awake)
        ring_disarm(r);
}

/* -- Putting ----------------------------------------------------------------------------------- */

static void copy_in(struct ring *r, uint64_t at, const void *from, size_t bytes)
{
    const size_t place = (size_t)(at % RING_BYTES);
    const size_t first = bytes < RING_BYTES - place ? bytes : RING_BYTES - place;
    memcpy(r->mine->data + place, from, first);
    memcpy(r->mine->data, (const uint8_t *)from + first, bytes - first);
}

/* See how far the other side is: not before where it was, nor ahead of what there is. */
static int look_at_taken(struct ring *r, struct shd_err *e)
{
    const uint64_t taken = atomic_load_explicit(&r->theirs->taken, memory_order_acquire);
    if (taken - r->their_taken > r->written - r->their_taken)
        return err_set(e, SHD_EPROTO,
                       "ring: taken up to %" PRIu64 ", of %" PRIu64
                       " bytes that were written and %" PRIu64 " that were taken before",
                       taken, r->written, r->their_taken);
    r->their_taken = taken;
    return SHD_OK;
}

int ring_put(struct ring *r, const void *frame, size_t bytes, bool *ret_wake, struct shd_err *e)
{
    CHECK(bytes > 0 && bytes <= RING_FRAME_BYTES_MAX);
    const uint64_t need = frame_bytes(bytes), before = r->written;
    if (need > RING_BYTES - (before - r->their_taken)) {
        const int looked = look_at_taken(r, e);
        if (looked != SHD_OK)
            return looked;
    }
    if (need > RING_BYTES - (before - r->their_taken))
        return err_set(e, SHD_EBUSY, "ring is full");
    const uint32_t header[2] = { (uint32_t)bytes, 0 };
    copy_in(r, before, header, sizeof header);
    copy_in(r, before + HEADER_BYTES, frame, bytes);
    r->written = before + need;
    atomic_store_explicit(&r->mine->written, r->written, memory_order_seq_cst);
    const uint64_t wake = atomic_load_explicit(&r->theirs->wake, memory_order_seq_cst);
    *ret_wake = wake - before < need;
    return SHD_OK;
}

bool ring_put_elsewhere(struct ring *r)
{
    atomic_fetch_add_explicit(&r->mine->elsewhere, 1, memory_order_seq_cst);
    /* It may have asked for several frames; a position that has passed is that of one awake. */
    const uint64_t wake = atomic_load_explicit(&r->theirs->wake, memory_order_seq_cst);
    return wake - r->written < RING_BYTES;
}

bool ring_is_drained(const struct ring *r)
{
    return atomic_load_explicit(&r->theirs->taken, memory_order_acquire) == r->written;
}

/* -- Taking ------------------------------------------------------------------------------------ */

static void copy_out(const struct ring *r, uint64_t at, void *to, size_t bytes)
{
    const size_t place = (size_t)(at % RING_BYTES);
    const size_t first = bytes < RING_BYTES - place ? bytes : RING_BYTES - place;
    memcpy(to, r->theirs->data + place, first);
    memcpy((uint8_t *)to + first, r->theirs->data, bytes - first);
}

int ring_take(struct ring *r, uint8_t ret_frame[RING_FRAME_BYTES_MAX], size_t *ret_bytes,
              struct shd_err *e)
{
    const uint64_t written = atomic_load_explicit(&r->theirs->written, memory_order_acquire);
    const uint64_t there = written - r->taken;
    if (there == 0)
        return SHD_PENDING;
    if (there > RING_BYTES || there % HEADER_BYTES != 0)
        return err_set(e, SHD_EPROTO,
                       "ring: written up to %" PRIu64 ", of which %" PRIu64 " bytes were taken",
                       written, r->taken);
    uint32_t header[2];
    copy_out(r, r->taken, header, sizeof header);
    if (header[0] == 0 || header[0] > RING_FRAME_BYTES_MAX || frame_bytes(header[0]) > there ||
        header[1] != 0)
        return err_set(e, SHD_EPROTO,
                       "ring: a frame of %" PRIu32 " bytes (and %#" PRIx32 ") at %" PRIu64
                       ", written up to %" PRIu64,
                       header[0], header[1], r->taken, written);
    copy_out(r, r->taken + HEADER_BYTES, ret_frame, header[0]);
    *ret_bytes = header[0];
    r->taken += frame_bytes(header[0]);
    atomic_store_explicit(&r->mine->taken, r->taken, memory_order_release);
    return SHD_OK;
}

uint64_t ring_elsewhere(const struct ring *r)
{
    return atomic_load_explicit(&r->theirs->elsewhere, memory_order_seq_cst);
}

/* -- Waking ------------------------------------------------------------------------------------ */

bool ring_is_empty(const struct ring *r)
{
    return atomic_load_explicit(&r->theirs->written, memory_order_seq_cst) == r->taken;
}

bool ring_arm(struct ring *r, uint32_t frames)
{
    CHECK(frames > 0 && frames <= RING_BYTES / RING_FRAME_TAKES_MIN);
    const uint64_t ahead = (uint64_t)(frames - 1) * RING_FRAME_TAKES_MIN;
    atomic_store_explicit(&r->mine->wake, r->taken + ahead, memory_order_seq_cst);
    const uint64_t written = atomic_load_explicit(&r->theirs->written, memory_order_seq_cst);
    if (written - r->taken <= ahead)
        return true;
    ring_disarm(r);
    return false;
}

void ring_disarm(struct ring *r)
{
    /* What lies before this position was taken: no frame begins there any more. */
    atomic_store_explicit(&r->mine->wake, r->taken - 1, memory_order_relaxed);
}

/* -- What else ---------------------------------------------------------------------------------
 */

/* The caller looks for it once more after this. The other side stores it, and has a fence, too,
 * before it looks here: so one of the two sees the other's store. */
void ring_await(struct ring *r, uint64_t what)
{
    atomic_store_explicit(&r->mine->awaits, what, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}

bool ring_awaits(const struct ring *r, uint64_t what)
{
    return atomic_load_explicit(&r->theirs->awaits, memory_order_relaxed) == what;
}

void ring_heed(struct ring *r)
{
    atomic_store_explicit(&r->mine->heeds, 1, memory_order_release);
}

bool ring_is_heeded(const struct ring *r)
{
    return atomic_load_explicit(&r->theirs->heeds, memory_order_acquire) == 1;
}
