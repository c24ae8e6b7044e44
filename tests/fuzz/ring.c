/* A pair of rings (proto/share/ring.h), one side of which is a stranger's page: what the other side
 * takes is what a plain reading of the same page gives, it refuses when that does, it writes
 * nothing but its own page, and what it puts arrives.
 *
 * Input: steps of a byte and what it needs. The stranger stores any word, any bytes, a whole frame;
 * the other side takes, puts, arms. */
#include "proto/share/ring.h"

#include "tests/fuzz/fuzz.h"

#define STEPS_MAX 2000u

static struct ring_page theirs, mine;
static struct ring ring;
static uint64_t taken; /* of theirs, by the plain reading */
static bool broken;    /* it was refused: its session has ended */

/* -- The plain reading --------------------------------------------------------------------------
 */

static uint8_t byte_at(uint64_t position)
{
    return theirs.data[position % RING_BYTES];
}

static uint64_t word_at(uint64_t position)
{
    uint64_t word = 0;
    for (unsigned i = 0; i < 8; i++)
        word |= (uint64_t)byte_at(position + i) << (8 * i);
    return word;
}

/* The bytes of the frame that is next; 0: there is none; UINT64_MAX: it cannot be. */
static uint64_t next_frame(void)
{
    const uint64_t written = theirs.written;
    if (written == taken)
        return 0;
    if (written < taken || written - taken > RING_BYTES || written % 8 != 0)
        return UINT64_MAX;
    const uint64_t bytes = word_at(taken); /* with zeros above its length */
    return bytes >= 1 && bytes <= RING_FRAME_BYTES_MAX && taken + 8 + (bytes + 7) / 8 * 8 <= written
               ? bytes
               : UINT64_MAX;
}

/* -- Steps --------------------------------------------------------------------------------------
 */

static void take(void)
{
    uint8_t frame[RING_FRAME_BYTES_MAX];
    struct shd_err e = { 0 };
    size_t got = 0;
    const uint64_t bytes = next_frame();
    const bool is_empty = ring_is_empty(&ring);
    const int r = ring_take(&ring, frame, &got, &e);
    CHECK(is_empty == (bytes == 0) && (r == SHD_PENDING) == (bytes == 0));
    CHECK((r == SHD_EPROTO) == (bytes == UINT64_MAX));
    if (r == SHD_EPROTO) {
        fuzz_check_refusal(r, &e);
        broken = true;
    }
    if (r != SHD_OK)
        return;
    CHECK(got == bytes);
    for (uint64_t i = 0; i < bytes; i++)
        CHECK(frame[i] == byte_at(taken + 8 + i));
    taken += 8 + (bytes + 7) / 8 * 8;
    CHECK(mine.taken == taken);
}

static void put(size_t bytes)
{
    static uint8_t frame[RING_FRAME_BYTES_MAX];
    struct shd_err e = { 0 };
    bool wakes;
    const uint64_t before = mine.written, need = 8 + (bytes + 7) / 8 * 8;
    memset(frame, (int)bytes, bytes);
    const int r = ring_put(&ring, frame, bytes, &wakes, &e);
    if (r == SHD_EPROTO) { /* only where room has to be found */
        fuzz_check_refusal(r, &e);
        broken = true;
    }
    CHECK(mine.written == before + (r == SHD_OK ? need : 0));
    if (r == SHD_OK)
        CHECK(wakes == (theirs.wake - before < need));
    else
        CHECK(r == SHD_EBUSY || r == SHD_EPROTO);
}

static void arm(uint32_t frames)
{
    const uint64_t wake = taken + (frames - 1) * RING_FRAME_TAKES_MIN;
    const bool armed = theirs.written - taken <= wake - taken;
    CHECK(ring_arm(&ring, frames) == armed);
    CHECK(mine.wake == (armed ? wake : taken - 1));
}

/* As a good producer would, from where it says that it is. */
static void good_frame(struct fuzz_in *in)
{
    const uint64_t at = theirs.written;
    const uint64_t bytes = 1 + fuzz_below(in, RING_FRAME_BYTES_MAX);
    for (unsigned i = 0; i < 8; i++)
        theirs.data[(at + i) % RING_BYTES] = (uint8_t)(bytes >> (8 * i));
    theirs.data[(at + 8) % RING_BYTES] = (uint8_t)at;
    theirs.written = at + 8 + (bytes + 7) / 8 * 8;
}

static uint64_t near(struct fuzz_in *in, uint64_t position)
{
    return position + (uint64_t)fuzz_u8(in) * 8 - 512;
}

static void step(struct fuzz_in *in)
{
    switch (fuzz_u8(in) % 12) {
    case 0:
        theirs.written = fuzz_u64(in);
        break;
    case 1:
        theirs.written = near(in, theirs.written);
        break;
    case 2:
        theirs.taken = fuzz_u64(in);
        break;
    case 3:
        theirs.taken = near(in, mine.written);
        break;
    case 4:
        theirs.wake = near(in, mine.written);
        break;
    case 5: { /* over the next header, or behind it */
        const uint64_t at = taken + fuzz_below(in, 16);
        theirs.data[at % RING_BYTES] = fuzz_u8(in);
        break;
    }
    case 6:
        put(1 + fuzz_below(in, RING_FRAME_BYTES_MAX));
        break;
    case 7:
        arm(1 + (uint32_t)fuzz_below(in, RING_BYTES / RING_FRAME_TAKES_MIN));
        break;
    case 8:
        ring_disarm(&ring);
        CHECK(mine.wake == taken - 1);
        break;
    case 9:
        CHECK(ring_put_elsewhere(&ring) == (theirs.wake - mine.written < RING_BYTES));
        break;
    case 10:
        good_frame(in);
        break;
    default:
        take();
        break;
    }
}

static int ring_input(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    memset(&theirs, 0, sizeof theirs);
    memset(&mine, 0, sizeof mine);
    taken = 0;
    broken = false;
    ring_init(&ring, &mine, &theirs, size % 2 == 0);
    for (unsigned i = 0; i < STEPS_MAX && in.left > 0 && !broken; i++)
        step(&in);
    return 0;
}

/* Frames that are taken as they come, so many that they go around; then a lie of each kind. */
static size_t ring_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const uint8_t lies[][12] = {
        { 11 },
        { 0, 1, 0, 0, 0, 0, 0, 0, 0 },
        { 1, 0 },
        { 1, 200 },
        { 10, 200, 0, 0, 0, 5, 0, 0 },
        { 10, 200, 0, 0, 0, 5, 5, 1 },
        { 2, 255, 255, 255, 255, 255, 255, 255, 255 },
        { 3, 64 },
        { 4, 64, 6, 100, 0, 0, 0 },
        { 7, 8, 9 },
    };
    static const uint8_t round[] = { 10, 160, 15, 0, 0, 11, 6, 16, 14, 0, 0, 3, 64 };
    size_t used = 0;
    if (index >= ARRAY_SIZE(lies) || bytes_max < 1024)
        return 0;
    for (unsigned i = 0; i < 3 * index; i++, used += sizeof round)
        memcpy(buf + used, round, sizeof round);
    memcpy(buf + used, lies[index], sizeof lies[index]);
    used += sizeof lies[index];
    memset(buf + used, 11, 8);
    return used + 8;
}

const struct fuzz_target fuzz_ring = { "ring", ring_input, ring_seed, NULL };
