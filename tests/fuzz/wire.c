/* Frames: what unpacks lies inside the arena and its limits, can be packed, and is the same after
 * another round. Input: one byte (bit 0: a reply; bit 1: a small arena), then the frame. */
#include "tests/fuzz/fuzz.h"

#include "tests/lib/wire_random.h"
#include "tests/lib/wire_same.h"

#define SMALL_BYTES 600u

static uint8_t out[WIRE_FRAME_BYTES_MAX];

static void check_inside(const struct wire_arena *a, struct wire_bytes b)
{
    if (b.bytes > 0)
        CHECK(b.data >= a->base && b.data + b.bytes <= a->base + a->used);
}

static void request(const uint8_t *frame, size_t size, struct wire_arena *arena,
                    struct wire_arena *again)
{
    struct shd_err e = { 0 };
    struct wire_request q, q2;
    size_t bytes;
    const int r = wire_request_unpack(frame, size, arena, &q, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        CHECK(arena->used == 0);
        return;
    }
    CHECK((unsigned)q.type < WIRE_REQUEST_TYPES);
    if (q.type == WIRE_OPEN_MODEL)
        check_inside(arena, q.open_model.spec);
    if (q.type == WIRE_COMMIT && q.commit.has_blob)
        check_inside(arena, q.commit.blob);
    if (q.type == WIRE_RESTORE)
        check_inside(arena, q.restore.spec);
    CHECK(wire_request_pack(&q, out, sizeof out, &bytes, &e) == SHD_OK);
    CHECK(wire_request_unpack(out, bytes, again, &q2, &e) == SHD_OK);
    CHECK(same_request(&q, &q2));
}

static void reply(const uint8_t *frame, size_t size, struct wire_arena *arena,
                  struct wire_arena *again)
{
    struct shd_err e = { 0 };
    struct wire_reply p, p2;
    size_t bytes;
    const int r = wire_reply_unpack(frame, size, arena, &p, &e);
    if (r != SHD_OK) {
        fuzz_check_refusal(r, &e);
        CHECK(arena->used == 0);
        return;
    }
    CHECK(status_known(p.status) && strlen(p.text) < SHD_ERR_TEXT_BYTES);
    if (p.type == WIRE_LAYOUT)
        check_inside(arena, p.layout.spec);
    if (p.type == WIRE_LAYOUT)
        check_inside(arena, p.layout.in);
    if (p.type == WIRE_LEAVES)
        check_inside(arena, p.leaves.leaves);
    CHECK(wire_reply_pack(&p, out, sizeof out, &bytes, &e) == SHD_OK);
    CHECK(wire_reply_unpack(out, bytes, again, &p2, &e) == SHD_OK);
    CHECK(same_reply(&p, &p2));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct wire_arena large, small, again;
    if (large.base == NULL) {
        large = arena_new(WIRE_ARENA_BYTES);
        small = arena_new(SMALL_BYTES);
        again = arena_new(WIRE_ARENA_BYTES);
    }
    if (size == 0)
        return 0;
    struct wire_arena *arena = (data[0] & 2) != 0 ? &small : &large;
    arena->used = again.used = 0;
    ((data[0] & 1) != 0 ? reply : request)(data + 1, size - 1, arena, &again);
    return 0;
}

/* A valid frame of at most max bytes behind its first byte; 0: it was longer. */
static size_t valid(uint64_t *rng, uint8_t *buf, size_t max)
{
    char name[WIRE_NAME_BYTES_MAX];
    size_t bytes;
    int r;
    if (max < 2)
        return 0;
    buf[0] = (uint8_t)(test_random(rng) % 2);
    if (buf[0] == 0) {
        const struct wire_request q = random_request(
            rng, (enum wire_request_type)(test_random(rng) % WIRE_REQUEST_TYPES), name);
        r = wire_request_pack(&q, buf + 1, max - 1, &bytes, NULL);
    } else {
        const struct wire_reply p = random_reply(
            rng, (enum wire_reply_type)(test_random(rng) % WIRE_REPLY_TYPES), name);
        r = wire_reply_pack(&p, buf + 1, max - 1, &bytes, NULL);
    }
    return r == SHD_OK ? bytes + 1 : 0;
}

size_t fuzz_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    uint64_t rng = 0x5eed + index;
    size_t size = 0;
    while (index < 200 && size == 0)
        size = valid(&rng, buf, bytes_max < 2048 ? bytes_max : 2048);
    return size;
}

#ifdef SHD_FUZZ
/* Now and then a new valid frame, or one behind another: protobuf merges bodies of one field. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    uint64_t rng = 0x9e3779b97f4a7c15u * (seed + 1);
    size_t bytes = 0;
    if (seed % 16 == 0)
        bytes = valid(&rng, data, max);
    if (seed % 16 == 1 && size > 0 && size < max) {
        const uint8_t last = data[size - 1];
        bytes = valid(&rng, data + size - 1, max - size + 1);
        data[size - 1] = last;
        bytes = bytes > 0 ? bytes + size - 1 : 0;
    }
    return bytes > 0 ? bytes : LLVMFuzzerMutate(data, size, max);
}
#endif
