/* Frames by a session's ring (daemon/net/rings.h), from a client made by hand beside a trainer that
 * must not notice: what is answered, by which way, and what becomes of one that writes there what
 * cannot be. */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "daemon/net/session.h"
#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "proto/share/history.h"
#include "proto/share/ring.h"
#include "proto/share/segment.h"
#include "tests/lib/fixture.h"
#include "tests/lib/raw_client.h"

#define ROWS ((int)(RING_FRAME_BYTES_MAX / HISTORY_ROW_BYTES) + 1) /* too many for a frame */

static struct raw raw;
static struct segment requests, replies;
static struct ring ring;
static struct ring_page *mine; /* as `requests` has it */

static void take_page(enum segment_kind kind, uint64_t ticket, uint64_t bytes, struct segment *ret)
{
    struct side_msg msg = { .type = SIDE_CLAIM, .ticket = ticket };
    struct shd_err e;
    int fd;
    EXPECT_OK(side_send(raw.side, &msg, -1, &e), &e);
    EXPECT_OK(side_recv(raw.side, RAW_WAIT_MS, &msg, &fd, &e), &e);
    EXPECT_EQ(msg.type, SIDE_SEGMENT);
    EXPECT_EQ(msg.kind, kind);
    EXPECT_OK(segment_check(fd, kind, bytes, &e), &e);
    EXPECT_OK(segment_map(fd, kind, bytes, ret, &e), &e);
}

static void enter(void)
{
    struct wire_reply reply;
    raw_open(&raw);
    raw.level = WIRE_LEVEL;
    EXPECT_STATUS(raw_hello(&raw, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&raw, (struct wire_request){ .type = WIRE_OPEN_RING }, &reply), SHD_OK);
    EXPECT_EQ(reply.type, WIRE_RING);
    EXPECT_EQ(reply.ring.bytes, RING_PAGE_BYTES);
    const struct wire_ring got = reply.ring;
    take_page(SEGMENT_REQUESTS, got.requests, got.bytes, &requests);
    take_page(SEGMENT_REPLIES, got.replies, got.bytes, &replies);
    mine = requests.base;
    ring_init(&ring, mine, replies.base, /* awake= */ true);
}

static void leave(void)
{
    raw_close(&raw);
    segment_close(&requests);
    segment_close(&replies);
}

static void wake(void)
{
    struct shd_err e;
    const int r = side_send(raw.side, &(struct side_msg){ .type = SIDE_WAKE }, -1, &e);
    EXPECT(r == SHD_OK || r == SHD_EGONE);
}

/* True: the daemon was to be woken, and has been. */
static bool ask(struct wire_request request)
{
    uint8_t frame[RING_FRAME_BYTES_MAX];
    struct shd_err e;
    bool wakes;
    const size_t bytes = raw_pack(&raw, &request, frame, sizeof frame);
    EXPECT_OK(ring_put(&ring, frame, bytes, &wakes, &e), &e);
    if (wakes)
        wake();
    return wakes;
}

/* The next answer, by the ring. */
static struct wire_reply hear(void)
{
    static uint8_t frame[RING_FRAME_BYTES_MAX];
    struct wire_reply reply;
    struct shd_err e;
    size_t bytes;
    EXPECT_SOON(!ring_is_empty(&ring));
    EXPECT_OK(ring_take(&ring, frame, &bytes, &e), &e);
    raw.arena = (struct wire_arena){ .base = raw.memory, .bytes = sizeof raw.memory };
    EXPECT_OK(wire_reply_unpack(frame, bytes, &raw.arena, &reply, &e), &e);
    return reply;
}

static void expect_hang_up(void)
{
    struct shd_err e;
    struct side_msg msg;
    int r;
    while ((r = side_recv(raw.side, RAW_WAIT_MS, &msg, NULL, &e)) == SHD_OK)
        EXPECT_EQ(msg.type, SIDE_WAKE);
    EXPECT_STATUS(r, SHD_EGONE);
}

static const struct wire_request get_blob = { .type = WIRE_GET_BLOB, .get_blob = { .model = 1 } };

TEST(what_comes_by_a_ring_is_answered_there_in_its_order)
{
    trainer_start();
    enter();
    EXPECT(ask(get_blob));                       /* it sleeps */
    for (int round = 0; round < 2000; round++) { /* many times around */
        const uint32_t burst = 1 + (uint32_t)round % 90;
        for (uint32_t i = 1; i < burst; i++)
            ask(get_blob);
        const uint64_t first = raw.seq - burst + 1;
        for (uint32_t i = 0; i < burst; i++) {
            const struct wire_reply reply = hear();
            EXPECT_EQ(reply.seq, first + i);
            EXPECT_EQ(reply.status, SHD_OK);
            EXPECT_EQ(reply.type, WIRE_BLOB);
        }
        EXPECT_EQ(ring_elsewhere(&ring), 0);
        ask(get_blob);
    }
    hear();
    struct wire_reply reply; /* the connection goes on beside it */
    EXPECT_STATUS(raw_ask(&raw, get_blob, &reply), SHD_OK);
    EXPECT_EQ(ring_elsewhere(&ring), 0);
    leave();
    trainer_step();
    trainer_stop(1);
}

TEST(client_that_sleeps_is_woken_and_one_that_is_awake_is_not)
{
    struct side_msg msg;
    struct shd_err e;
    trainer_start();
    enter();
    for (int i = 0; i < 200; i++) {
        ask(get_blob);
        if (ring_arm(&ring, 1)) {
            EXPECT_OK(side_recv(raw.side, RAW_WAIT_MS, &msg, NULL, &e), &e);
            EXPECT_EQ(msg.type, SIDE_WAKE);
            EXPECT(!ring_is_empty(&ring));
        }
        hear();
        ring_disarm(&ring);
        ask(get_blob);
        hear();
        EXPECT_STATUS(side_recv(raw.side, 0, &msg, NULL, &e), SHD_ETIMEDOUT);
    }
    leave();
    trainer_stop(0);
}

static void expect_rung(void)
{
    struct side_msg msg;
    struct shd_err e;
    EXPECT_OK(side_recv(raw.side, RAW_WAIT_MS, &msg, NULL, &e), &e);
    EXPECT_EQ(msg.type, SIDE_WAKE);
}

/* The last of the steps makes sure that those before it are published. */
static void expect_none_is_rung_for(uint64_t awaited)
{
    struct side_msg msg;
    struct shd_err e;
    ring_await(&ring, awaited);
    for (int i = 0; i < 3; i++)
        trainer_step();
    EXPECT_STATUS(side_recv(raw.side, 0, &msg, NULL, &e), SHD_ETIMEDOUT);
}

TEST(client_is_woken_when_the_unit_that_it_awaits_is_published)
{
    trainer_start();
    enter();
    EXPECT(ring_is_heeded(&ring));
    ring_await(&ring, board_awaited(1, 0));
    for (int i = 0; i < 3; i++) {
        trainer_step();
        expect_rung();
    }
    expect_none_is_rung_for(0);
    expect_none_is_rung_for(board_awaited(2, 0)); /* no such model, no such unit, no such thing */
    expect_none_is_rung_for(board_awaited(1, 1));
    expect_none_is_rung_for(UINT64_MAX);
    leave();
    trainer_stop(3 + 4 * 3);
}

TEST(answers_that_find_no_room_go_by_the_connection)
{
    struct wire_reply reply;
    struct side_msg msg;
    struct shd_err e;
    trainer_start();
    for (int i = 0; i < ROWS; i++)
        trainer_step();
    enter();
    EXPECT(ring_arm(&ring, 1));
    ask((struct wire_request){ .type = WIRE_HISTORY, .history = { .model = 1, .count = ROWS } });
    EXPECT_OK(side_recv(raw.side, RAW_WAIT_MS, &msg, NULL, &e), &e);
    EXPECT_EQ(msg.type, SIDE_WAKE);
    EXPECT_EQ(ring_elsewhere(&ring), 1);
    raw_recv(&raw, &reply);
    EXPECT_EQ(reply.type, WIRE_ROWS);
    EXPECT_EQ(reply.seq, raw.seq);
    EXPECT(ring_is_empty(&ring));
    ring_disarm(&ring);
    /* None is taken: at some time the ring is full. All come, by one way or the other. */
    const uint64_t before = raw.seq;
    while (ring_elsewhere(&ring) < 10) {
        ask(get_blob);
        EXPECT_SOON(ring_is_drained(&ring));
    }
    const uint64_t asked = raw.seq - before;
    for (uint64_t i = 0; i < 9; i++)
        raw_recv(&raw, &reply);
    for (uint64_t i = 0; i < asked - 9; i++)
        EXPECT_EQ(hear().seq, before + 1 + i);
    EXPECT(ring_is_empty(&ring));
    leave();
    trainer_stop(ROWS);
}

TEST(request_that_cannot_be_decoded_ends_the_session)
{
    struct shd_err e;
    bool wakes;
    trainer_start();
    enter();
    EXPECT_OK(ring_put(&ring, "\xff\xff\xff\xff garbage", 12, &wakes, &e), &e);
    wake();
    const struct wire_reply reply = hear();
    EXPECT(reply.status != SHD_OK && reply.text[0] != '\0');
    expect_hang_up();
    leave();
    trainer_step();
    trainer_stop(1);
}

/* -- Pages that say what cannot be --------------------------------------------------------------
 */

static void put_header(uint32_t bytes, uint32_t rest)
{
    memcpy(mine->data + ring.written % RING_BYTES, (const uint32_t[2]){ bytes, rest }, 8);
}

static void ahead(void)
{
    atomic_store(&mine->written, ring.written + RING_BYTES + 8);
}

static void behind(void)
{
    atomic_store(&mine->written, ring.written - 8);
}

static void odd(void)
{
    atomic_store(&mine->written, ring.written + 13);
}

static void zero_length(void)
{
    put_header(0, 0);
    atomic_store(&mine->written, ring.written + 8);
}

static void huge_length(void)
{
    put_header(UINT32_MAX, 0);
    atomic_store(&mine->written, ring.written + 64);
}

static void longer_than_written(void)
{
    put_header(57, 0);
    atomic_store(&mine->written, ring.written + 64);
}

static void strange_header(void)
{
    put_header(8, 7);
    atomic_store(&mine->written, ring.written + 16);
}

static bool has_hung_up(void)
{
    struct pollfd p = { .fd = raw.side, .events = POLLRDHUP };
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP)) != 0;
}

/* The daemon sees it when it needs the room. */
static void taken_ahead(void)
{
    atomic_store(&mine->taken, UINT64_C(1) << 40);
    for (int i = 0; i < 3000 && !has_hung_up(); i++) {
        ask(get_blob);
        EXPECT_SOON(ring_is_drained(&ring) || has_hung_up());
    }
}

TEST(page_that_says_what_cannot_be_ends_its_session_and_nothing_else)
{
    static void (*const lies[])(void) = { ahead,          behind,      odd,
                                          zero_length,    huge_length, longer_than_written,
                                          strange_header, taken_ahead };
    const size_t count = sizeof lies / sizeof lies[0];
    trainer_start();
    trainer_step();
    const int fds = count_fds(fixture.pids[0]), maps = count_segment_maps(fixture.pids[0]);
    for (size_t i = 0; i < count; i++) {
        enter();
        for (int k = 0; k < 100; k++) {
            ask(get_blob);
            hear();
        }
        lies[i]();
        wake();
        expect_hang_up();
        leave();
        trainer_step();
    }
    expect_daemon_idle(fixture.pids[0], fds, maps);
    trainer_stop(1 + count);
}

/* While the daemon reads, whatever stands there changes. */
static _Atomic bool scribbles;

static void *scribble(void *arg)
{
    uint64_t random = *(const uint64_t *)arg;
    while (scribbles) {
        const uint64_t r = test_random(&random);
        const uint64_t near = atomic_load(&mine->written) + (r >> 8) % 128 - 56;
        if (r % 64 == 0)
            atomic_store(&mine->written, r % 128 == 0 ? near : near / 8 * 8);
        else if (r % 64 == 1)
            atomic_store(&mine->taken, r % 256 < 128 ? near : r);
        else if (r % 64 == 2)
            atomic_store(&mine->wake, r % 256 < 128 ? near : r);
        else
            mine->data[(r >> 8) % RING_BYTES] = (uint8_t)(r >> 32);
    }
    return NULL;
}

TEST(page_that_changes_while_it_is_read_does_no_harm)
{
    trainer_start();
    for (uint64_t i = 0; i < 30; i++) {
        uint64_t seed = test_seed(1) + i;
        pthread_t thread;
        enter();
        for (uint32_t k = 0; k < RING_BYTES; k += 64)
            mine->data[k] = 8;
        scribbles = true;
        EXPECT(pthread_create(&thread, NULL, scribble, &seed) == 0);
        struct shd_err e;
        const struct side_msg bell = { .type = SIDE_WAKE };
        for (int k = 0; k < 2000; k++) {
            const int r = side_send(raw.side, &bell, -1, &e);
            if (r != SHD_OK && r != SHD_EBUSY)
                break;
            if (k % 64 == 0)
                sleep_ms(1);
        }
        scribbles = false;
        pthread_join(thread, NULL);
        leave();
        trainer_step();
    }
    trainer_stop(30);
}

TEST(answers_cannot_be_written_by_who_reads_them)
{
    trainer_start();
    enter();
    EXPECT(mmap(NULL, replies.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, replies.fd, 0) ==
           MAP_FAILED);
    EXPECT(mprotect(replies.base, replies.bytes, PROT_READ | PROT_WRITE) != 0);
    leave();
    trainer_stop(0);
}

/* -- Others -------------------------------------------------------------------------------------
 */

static void *flood(void *arg)
{
    struct shd_err e;
    uint8_t frame[RING_FRAME_BYTES_MAX], got[RING_FRAME_BYTES_MAX];
    (void)arg;
    while (scribbles) {
        struct wire_request request = get_blob;
        bool wakes;
        size_t bytes;
        request.seq = ++raw.seq;
        request.session = raw.session;
        if (wire_request_pack(&request, frame, sizeof frame, &bytes, &e) != SHD_OK)
            return "cannot be packed";
        while (ring_put(&ring, frame, bytes, &wakes, &e) == SHD_EBUSY && scribbles) {
        }
        side_send(raw.side, &(struct side_msg){ .type = SIDE_WAKE }, -1, &e);
        while (ring_take(&ring, got, &bytes, &e) == SHD_OK) {
        }
    }
    return NULL;
}

TEST(ring_that_is_never_empty_keeps_nobody_waiting)
{
    pthread_t thread;
    void *why;
    trainer_start();
    enter();
    scribbles = true;
    EXPECT(pthread_create(&thread, NULL, flood, NULL) == 0);
    for (int i = 0; i < 50; i++)
        trainer_step();
    scribbles = false;
    pthread_join(thread, &why);
    if (why != NULL)
        FAIL("%s", (const char *)why);
    leave();
    trainer_stop(50);
}

TEST(wakes_without_a_ring_are_no_reason_for_anything)
{
    struct wire_reply reply;
    trainer_start();
    raw_enter(&raw);
    wake();
    wake();
    EXPECT_STATUS(raw_ask(&raw, get_blob, &reply), SHD_OK);
    raw_close(&raw);
    raw_open(&raw); /* before Hello it is */
    wake();
    expect_hang_up();
    raw_close(&raw);
    trainer_stop(0);
}

TEST(older_client_gets_none)
{
    struct wire_reply reply;
    trainer_start();
    raw_open(&raw);
    raw.level = WIRE_LEVEL_RINGS - 1;
    EXPECT_STATUS(raw_hello(&raw, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(raw_ask(&raw, (struct wire_request){ .type = WIRE_OPEN_RING }, &reply),
                  SHD_ENOTSUP);
    EXPECT_STATUS(raw_ask(&raw, get_blob, &reply), SHD_OK);
    raw_close(&raw);
    trainer_stop(0);
}

TEST(second_ring_takes_the_place_of_the_first)
{
    struct wire_reply reply;
    trainer_start();
    enter();
    EXPECT_STATUS(raw_ask(&raw, get_blob, &reply), SHD_OK); /* what was claimed is closed by now */
    const int maps = count_segment_maps(fixture.pids[0]), fds = count_fds(fixture.pids[0]);
    for (int i = 0; i < 8; i++) { /* none is claimed, SESSION_TICKETS_MAX may be at a time */
        EXPECT_STATUS(raw_ask(&raw, (struct wire_request){ .type = WIRE_OPEN_RING }, &reply),
                      SHD_OK);
        EXPECT_EQ(count_segment_maps(fixture.pids[0]), maps);
    }
    EXPECT_STATUS(raw_ask(&raw, (struct wire_request){ .type = WIRE_OPEN_RING }, &reply),
                  SHD_EBUSY);
    EXPECT_HAS(reply.text, "16 unclaimed segments");
    EXPECT_EQ(count_segment_maps(fixture.pids[0]), maps - 2);
    leave();
    expect_daemon_idle(fixture.pids[0], fds - 3, maps - 2);
    trainer_stop(0);
}

/* -- Where descriptors are short ----------------------------------------------------------------
 */

TEST(rings_that_nobody_claims_keep_no_session_out)
{
    static struct raw others[11];
    struct rlimit limit, low;
    struct wire_reply reply;
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    low = (struct rlimit){ 96, limit.rlim_max };
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    trainer_start();
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    trainer_step(); /* it has its ring */
    const int fds = count_fds(fixture.pids[0]);
    for (int i = 0; i < 11; i++) { /* all sessions that there may be */
        struct raw *r = &others[i];
        raw_open(r);
        r->level = WIRE_LEVEL;
        EXPECT_STATUS(raw_hello(r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
        for (int k = 0; k < 9; k++) { /* none is claimed */
            const int status = raw_ask(r, (struct wire_request){ .type = WIRE_OPEN_RING }, &reply);
            EXPECT(status == SHD_OK || status == SHD_EBUSY);
        }
        EXPECT_STATUS(raw_ask(r, get_blob, &reply), SHD_OK);
    }
    EXPECT(count_fds(fixture.pids[0]) <= fds + 11 * 3 + 24 / 4);
    trainer_step();
    for (int i = 0; i < 11; i++)
        raw_close(&others[i]);
    trainer_stop(2);
}

TEST_MAIN()
