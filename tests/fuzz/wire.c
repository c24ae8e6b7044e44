/* Frames: what unpacks lies inside the arena and its limits, can be packed, and is the same after
 * another round. Input: one byte (bit 0: a reply; bit 1: a small arena), then the frame. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"
#include "tests/fuzz/fuzz.h"
#include "tests/lib/proto_same.h"
#include "tests/lib/proto_util.h"

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

static int wire_input(const uint8_t *data, size_t size)
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

static size_t wire_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    uint64_t rng = 0x5eed + index;
    size_t size = 0;
    while (index < 200 && size == 0)
        size = valid(&rng, buf, bytes_max < 2048 ? bytes_max : 2048);
    return size;
}

/* Now and then a new valid frame, or one behind another: protobuf merges bodies of one field. */
static size_t wire_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
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
    return bytes > 0 ? bytes : fuzz_mutate(data, size, max);
}

const struct fuzz_target fuzz_wire = { "wire", wire_input, wire_seed, wire_mutate };

/* The side channel: any datagram with any descriptors. What side_recv() takes keeps its promises,
 * and no descriptor is left behind. Input: one byte (bits 0..1: descriptors that come along, bit 2:
 * the receiver wants none), then the datagram. */

static void check_taken(const struct side_msg *m, int got, unsigned fds)
{
    CHECK(m->magic == SIDE_MAGIC && m->protocol == SHD_PROTOCOL && m->reserved == 0);
    CHECK(m->type >= SIDE_WELCOME && m->type <= SIDE_WAKE);
    CHECK(memchr(m->text, 0, sizeof m->text) != NULL);
    CHECK((got >= 0) == (fds > 0));
    if (m->type == SIDE_SEGMENT)
        CHECK(got >= 0 && segment_kind_shared(m->kind));
}

static int side_input(const uint8_t *data, size_t size)
{
    static int pair[2] = { -1, -1 };
    struct shd_err e = { 0 };
    struct side_msg m;
    int got = -1;
    if (pair[0] < 0)
        CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    if (size < 2 || size > 4096) /* an empty datagram reads as the end */
        return 0;
    const unsigned fds = data[0] & 3;
    const bool wanted = (data[0] & 4) == 0;
    const int low = fuzz_lowest_free(pair[0]);
    fuzz_send(pair[0], data + 1, size - 1, (const int[]){ pair[0], pair[0], pair[0] }, fds);
    const int r = side_recv(pair[1], /* timeout_ms= */ -1, &m, wanted ? &got : NULL, &e);
    if (r == SHD_OK)
        check_taken(&m, wanted ? got : (int)fds - 1, fds);
    else
        fuzz_check_refusal(r, &e);
    if (got >= 0) {
        CHECK((fcntl(got, F_GETFD) & FD_CLOEXEC) != 0);
        close(got);
    }
    CHECK(fuzz_lowest_free(pair[0]) == low);
    return 0;
}

static size_t side_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    struct side_msg m = { .magic = SIDE_MAGIC,
                          .protocol = SHD_PROTOCOL,
                          .type = SIDE_WELCOME + index % 4,
                          .ticket = 7,
                          .bytes = 4096,
                          .kind = SEGMENT_PUBLISH,
                          .text = "no such ticket" };
    if (m.type == SIDE_ERROR)
        m.status = SHD_ENOENT;
    if (index >= 8 || bytes_max < sizeof m + 1)
        return 0;
    buf[0] = (uint8_t)((index & 4) | (m.type == SIDE_SEGMENT));
    memcpy(buf + 1, &m, sizeof m);
    return sizeof m + 1;
}

/* Mostly leave what every message begins with as it must be. */
static size_t side_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    static const uint32_t head[2] = { SIDE_MAGIC, SHD_PROTOCOL };
    size = fuzz_mutate(data, size, max);
    if (seed % 8 != 0 && size > sizeof head)
        memcpy(data + 1, head, sizeof head);
    if (seed % 4 != 0 && max > sizeof(struct side_msg)) {
        if (size < sizeof(struct side_msg) + 1)
            memset(data + size, 0, sizeof(struct side_msg) + 1 - size);
        size = sizeof(struct side_msg) + 1;
    }
    return size;
}

const struct fuzz_target fuzz_side = { "side", side_input, side_seed, side_mutate };

/* A board mapped from a daemon that is not trusted: what board_check() takes can be read for every
 * unit. Input: units, bytes (each 2), then the page. */

static void read_all(const struct board *b, uint32_t units, uint64_t version)
{
    for (uint32_t u = 0; u < units; u++) {
        const int there = board_reached(b, u, version);
        CHECK(there == (board_version(b, u) != UINT64_MAX && board_version(b, u) >= version));
        CHECK(board_wait(b, u, version, /* timeout_ns= */ 0) == (there ? SHD_OK : SHD_ETIMEDOUT));
    }
}

static int board_input(const uint8_t *data, size_t size)
{
    struct fuzz_in in = { data, size };
    struct shd_err e = { 0 };
    uint32_t units = (uint32_t)fuzz_bytes(&in, 2);
    const uint64_t bytes = fuzz_bytes(&in, 2);
    if (units == UINT16_MAX)
        units = UINT32_MAX;
    if (bytes < sizeof(struct board)) /* no segment is below a page */
        return 0;
    uint8_t *page = aligned_alloc(64, (bytes + 63) / 64 * 64); /* what is behind it is poisoned */
    CHECK(page != NULL);
    memset(page, 0, bytes);
    memcpy(page, in.at, in.left < bytes ? in.left : bytes);
    const struct board *b = (const void *)page;
    const int r = board_check(b, bytes, units, &e);
    if (r == SHD_OK) {
        CHECK(b->units == units && units <= SHD_UNITS_MAX && bytes >= board_bytes(units));
        read_all(b, units, size);
    } else {
        fuzz_check_refusal(r, &e);
    }
    free(page);
    return 0;
}

static size_t board_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const uint32_t units[] = { 0, 1, 5, 40 };
    if (index >= ARRAY_SIZE(units))
        return 0;
    const uint64_t bytes = board_bytes(units[index]);
    struct board *b = aligned_alloc(64, bytes);
    CHECK(b != NULL && bytes + 4 <= bytes_max && bytes <= UINT16_MAX);
    memset((void *)b, 0, bytes);
    board_init(b, units[index]);
    board_set_step(b, 3, 1);
    for (uint32_t u = 0; u < units[index] / 2; u++)
        board_publish(b, u, u * UINT64_C(100));
    buf[0] = (uint8_t)units[index];
    buf[1] = 0;
    buf[2] = (uint8_t)bytes;
    buf[3] = (uint8_t)(bytes >> 8);
    memcpy(buf + 4, b, bytes);
    free(b);
    return bytes + 4;
}

const struct fuzz_target fuzz_board = { "board", board_input, board_seed, NULL };
