/* A daemon's connections (daemon/net/conn.h) with peers that say anything: what comes up, what
 * comes back and who is hung up on are those of a plain reading of the same bytes, however they are
 * cut. No descriptor is left.
 *
 * Input: steps of a byte (bits 0..1 what, bit 2 which of two peers) and what it needs: bytes to
 * send, filler to send, whether there is a session, a message to the peer. A message's first byte
 * may do the same from within: 'H' and 'D' begin and end a session, 'E' is sent back. */
#include <linux/sockios.h>
#include <stdlib.h>
#include <sys/ioctl.h>

#include "daemon/net/conn.h"
#include "daemon/net/zmtp.h"
#include "proto/wire/wire.h"
#include "tests/fuzz/fuzz.h"

#define PEERS        2u
#define STREAM_BYTES (WIRE_FRAME_BYTES_MAX + (1u << 18))
#define EVENTS_MAX   (FILLER_MAX / 2 + 256) /* empty messages */
#define FILLER_MAX   (1u << 16)
#define UNHELLO_MAX  4096u /* of a message before there is a session */
#define ROUNDS_MAX   10000

enum event_kind { MESSAGE, SEVERAL, ENDED };

struct event {
    enum event_kind kind;
    size_t at, bytes; /* of a message, in the stream */
};

struct peer {
    int fd;
    uint64_t id; /* 0: nothing came from there yet */
    bool admitted, skipping, gone;
    enum { GREETING, READY, OPEN } state;
    uint8_t *stream;        /* owned: all that it has said */
    size_t used, at;        /* and how far that is read */
    struct event *expected; /* owned, [EVENTS_MAX] */
    unsigned first, count;
    uint64_t out_sum, out_expected; /* of what was sent to it */
};

static struct peer peers[PEERS];
static struct peer *active;
static struct conns *all;
static uv_loop_t loop;

/* For conn.c: time stands still, and nobody waits too long for a Hello. */
uint64_t uv_hrtime(void)
{
    return 1;
}

/* FNV-1a over bytes, going on from sum. */
static uint64_t sum_of(uint64_t sum, const uint8_t *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        sum = (sum ^ data[i]) * UINT64_C(0x100000001b3);
    return sum;
}

static void expect(struct peer *p, enum event_kind kind, size_t at, size_t bytes)
{
    CHECK(p->count < EVENTS_MAX);
    p->expected[p->count++] = (struct event){ kind, at, bytes };
    p->gone |= kind == ENDED;
}

static uint64_t number(const uint8_t *at, unsigned bytes)
{
    uint64_t n = 0;
    for (unsigned i = 0; i < bytes; i++)
        n = n * 256 + at[i];
    return n;
}

static void expect_reply(struct peer *p, const uint8_t *data, size_t bytes)
{
    uint8_t header[9] = { 0, (uint8_t)bytes };
    if (bytes > 255) {
        header[0] = 2;
        for (unsigned i = 0; i < 8; i++)
            header[8 - i] = (uint8_t)((uint64_t)bytes >> (8 * i));
    }
    p->out_expected = sum_of(p->out_expected, header, bytes > 255 ? 9 : 2);
    p->out_expected = sum_of(p->out_expected, data, bytes);
}

/* -- The plain reading ----------------------------------------------------------------------------
 */

static bool is_greeting(const uint8_t *b)
{
    static const uint8_t null[20] = "NULL";
    return b[0] == 0xff && b[9] == 0x7f && b[10] >= 3 && memcmp(b + 12, null, sizeof null) == 0;
}

/* READY with the first property Socket-Type DEALER, and whole properties up to it. */
static bool is_ready(const uint8_t *b, size_t bytes)
{
    if (bytes < 6 || memcmp(b, "\5READY", 6) != 0)
        return false;
    for (size_t at = 6; at < bytes;) {
        const size_t name = b[at];
        if (bytes - at < name + 5)
            return false;
        const uint64_t value = number(b + at + 1 + name, 4);
        if (value > bytes - at - name - 5)
            return false;
        if (name == 11 && memcmp(b + at + 1, "Socket-Type", 11) == 0)
            return value == 6 && memcmp(b + at + 16, "DEALER", 6) == 0;
        at += name + 5 + value;
    }
    return false;
}

static void read_message(struct peer *p, bool more, size_t at, size_t bytes)
{
    if (more || p->skipping) {
        if (!p->skipping)
            expect(p, SEVERAL, 0, 0);
        p->skipping = more;
        return;
    }
    expect(p, MESSAGE, at, bytes);
    const uint8_t first = bytes > 0 ? p->stream[at] : 0;
    if (first == 'H' || first == 'D')
        p->admitted = first == 'H';
    if (first == 'E')
        expect_reply(p, p->stream + at, bytes);
}

/* One greeting or frame; false: there is none, or none any more. */
static bool read_one(struct peer *p)
{
    const uint8_t *b = p->stream + p->at;
    const size_t left = p->used - p->at;
    if (p->gone || left == 0 || (p->state == GREETING && left < 64))
        return false;
    if (p->state == GREETING) {
        if (!is_greeting(b))
            expect(p, ENDED, 0, 0);
        p->state = READY;
        p->at += 64;
        return true;
    }
    const bool more = (b[0] & 1) != 0, command = (b[0] & 4) != 0;
    const size_t header = (b[0] & 2) != 0 ? 9 : 2;
    bool bad = b[0] > 7 || (more && command);
    if (!bad && left < header)
        return false;
    const uint64_t bytes = bad ? 0 : number(b + 1, (unsigned)header - 1);
    bad |= bytes > (p->admitted ? WIRE_FRAME_BYTES_MAX : UNHELLO_MAX);
    if (!bad && left < header + bytes)
        return false;
    if (!bad && p->state == READY)
        bad = !command || !is_ready(b + header, bytes);
    else if (!bad && !command)
        read_message(p, more, p->at + header, bytes);
    if (bad) {
        expect(p, ENDED, 0, 0);
        return false;
    }
    p->state = OPEN;
    p->at += header + bytes;
    return true;
}

/* -- What really comes ----------------------------------------------------------------------------
 */

static struct event next_event(uint64_t id, enum event_kind kind)
{
    struct peer *p = active;
    CHECK(p->first < p->count && (p->id == 0 || p->id == id));
    p->id = id;
    const struct event e = p->expected[p->first++];
    CHECK(e.kind == kind);
    return e;
}

static void on_message(void *ctx, uint64_t id, const void *data, size_t bytes)
{
    (void)ctx;
    const struct event e = next_event(id, MESSAGE);
    CHECK(bytes == e.bytes && memcmp(data, active->stream + e.at, bytes) == 0);
    const uint8_t first = bytes > 0 ? *(const uint8_t *)data : 0;
    if (first == 'H' || first == 'D')
        conn_admit(all, id, first == 'H');
    if (first == 'E')
        CHECK(conn_send(all, id, data, bytes));
}

static void on_several(void *ctx, uint64_t id)
{
    (void)ctx;
    next_event(id, SEVERAL);
}

static void on_ended(void *ctx, uint64_t id, const char *why)
{
    (void)ctx;
    next_event(id, ENDED);
    CHECK(why[0] != '\0' && !conn_send(all, id, "x", 1));
}

/* All that was said is read, all that was answered is here, and nothing else. */
static void settle(struct peer *p)
{
    static uint8_t got[1 << 16];
    int unread = 1;
    active = p;
    for (int round = 0; unread > 0; round++) {
        ssize_t n;
        CHECK(round < ROUNDS_MAX);
        uv_run(&loop, UV_RUN_NOWAIT);
        while ((n = recv(p->fd, got, sizeof got, MSG_DONTWAIT)) > 0) {
            p->out_sum = sum_of(p->out_sum, got, (size_t)n);
            uv_run(&loop, UV_RUN_NOWAIT);
        }
        CHECK(ioctl(p->fd, SIOCOUTQ, &unread) == 0);
    }
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK(p->first == p->count);
    CHECK(p->gone || p->out_sum == p->out_expected);
    p->first = p->count = 0;
}

/* -- Steps ----------------------------------------------------------------------------------------
 */

static void say(struct peer *p, const uint8_t *data, size_t bytes)
{
    if (p->gone || bytes == 0 || bytes > STREAM_BYTES - p->used)
        return;
    memcpy(p->stream + p->used, data, bytes);
    p->used += bytes;
    while (read_one(p)) {
    }
    CHECK(send(p->fd, data, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes);
    settle(p);
}

static void answer(struct peer *p, size_t bytes)
{
    static uint8_t zeros[FILLER_MAX];
    if (p->id == 0 || p->gone)
        return;
    active = p;
    expect_reply(p, zeros, bytes);
    CHECK(conn_send(all, p->id, zeros, bytes));
    settle(p);
}

static void step(struct fuzz_in *in)
{
    static uint8_t filler[FILLER_MAX];
    const uint8_t what = fuzz_u8(in);
    struct peer *p = &peers[(what >> 2) % PEERS];
    size_t bytes;
    switch (what % 4) {
    case 0:
        bytes = fuzz_u8(in);
        bytes = bytes < in->left ? bytes : in->left;
        say(p, in->at, bytes);
        in->at += bytes;
        in->left -= bytes;
        break;
    case 1:
        say(p, filler, fuzz_below(in, FILLER_MAX));
        break;
    case 2:
        if (p->id != 0 && !p->gone)
            conn_admit(all, p->id, p->admitted = fuzz_u8(in) % 2 == 0);
        break;
    default:
        answer(p, fuzz_below(in, FILLER_MAX));
        break;
    }
}

static void begin(struct peer *p)
{
    struct shd_err e = { 0 };
    uint8_t opening[ZMTP_OPENING_BYTES];
    int ends[2];
    uint8_t *stream = p->stream != NULL ? p->stream : malloc(STREAM_BYTES);
    struct event *expected = p->expected != NULL ? p->expected
                                                 : calloc(EVENTS_MAX, sizeof *expected);
    CHECK(stream != NULL && expected != NULL &&
          socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    *p = (struct peer){ .fd = ends[0], .stream = stream, .expected = expected };
    zmtp_opening(opening);
    p->out_expected = sum_of(0, opening, sizeof opening);
    CHECK(conn_new(all, ends[1], /* uid= */ 1000, &e) == SHD_OK);
    settle(p);
}

static void end(struct peer *p)
{
    active = p;
    if (!p->gone)
        expect(p, ENDED, 0, 0);
    close(p->fd);
    uv_run(&loop, UV_RUN_NOWAIT);
    uv_run(&loop, UV_RUN_NOWAIT);
    CHECK(p->first == p->count);
}

static int zmtp_input(const uint8_t *data, size_t size)
{
    static const struct conn_events events = { on_message, on_several, on_ended };
    struct shd_err e = { 0 };
    struct fuzz_in in = { data, size };
    if (all == NULL) {
        CHECK(uv_loop_init(&loop) == 0 && conns_new(&loop, &events, NULL, &all, &e) == SHD_OK);
        uv_run(&loop, UV_RUN_NOWAIT);
    }
    const int low = fuzz_lowest_free(loop.backend_fd);
    for (unsigned i = 0; i < PEERS; i++)
        begin(&peers[i]);
    while (in.left > 0)
        step(&in);
    for (unsigned i = 0; i < PEERS; i++)
        end(&peers[i]);
    CHECK(fuzz_lowest_free(loop.backend_fd) == low);
    return 0;
}

/* A peer's opening, Hello, and what one seed more has than the one before: a message, one that
 * comes in parts, a long one, one of several frames, a session that ends. */
static size_t zmtp_seed(unsigned index, uint8_t *buf, size_t bytes_max)
{
    static const char *const steps[] = {
        "",
        "\0\3\0\1H",
        "\0\5\0\3Eab",
        "\0\1\0\0\2\4E\0\3x",
        "\2\0\0\12\2\0\0\0\0\0\0\1\0E\1\377\0\0\0",
        "\0\11\1\1a\0\1b\4\1",
        "\3\0\20\0\0",
        "\0\3\0\1D",
        "\0\3\0\1H\4\2\0\3",
    };
    static const uint8_t bytes_of[] = { 0, 5, 7, 9, 19, 11, 5, 5, 9 };
    static const uint8_t dealer[6] = { 'D', 'E', 'A', 'L', 'E', 'R' };
    uint8_t opening[ZMTP_OPENING_BYTES];
    size_t used = 0;
    if (index >= ARRAY_SIZE(steps) || bytes_max < 1024)
        return 0;
    zmtp_opening(opening);
    memcpy(opening + ZMTP_OPENING_BYTES - sizeof dealer, dealer, sizeof dealer);
    for (uint8_t which = 0; which < 8; which += 4) {
        buf[used++] = which;
        buf[used++] = ZMTP_OPENING_BYTES;
        memcpy(buf + used, opening, ZMTP_OPENING_BYTES);
        used += ZMTP_OPENING_BYTES;
    }
    for (unsigned i = 0; i <= index; i++) {
        memcpy(buf + used, steps[i], bytes_of[i]);
        used += bytes_of[i];
    }
    return used;
}

/* Mostly what stands behind both openings: few changes of those are still openings. */
static size_t zmtp_mutate(uint8_t *data, size_t size, size_t max, unsigned seed)
{
    static const size_t fixed = 2 * (ZMTP_OPENING_BYTES + 2);
    uint8_t first[1024];
    if (seed % 8 == 0 || size <= fixed || max < sizeof first)
        return fuzz_mutate(data, size, max);
    const size_t seeded = zmtp_seed(0, first, sizeof first);
    CHECK(seeded == fixed);
    memcpy(data, first, fixed);
    return fixed + fuzz_mutate(data + fixed, size - fixed, max - fixed);
}

const struct fuzz_target fuzz_zmtp = { "zmtp", zmtp_input, zmtp_seed, zmtp_mutate };
