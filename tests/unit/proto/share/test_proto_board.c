/* board: what a reader checks, and that waiting works between threads and processes. */
#include "proto/share/board.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"
#include "tests/lib/test.h"

#define UNITS 3u
#define MS    UINT64_C(1000000)

static struct segment board_segment(uint32_t units)
{
    struct shd_err e;
    struct segment s = SEGMENT_CLOSED;
    EXPECT_OK(segment_new("board", SEGMENT_BOARD, board_bytes(units), &s, &e), &e);
    board_init(s.base, units);
    return s;
}

TEST(words_have_a_cache_line_each)
{
    EXPECT_EQ(board_bytes(0), 192);
    EXPECT_EQ(board_bytes(1), 256);
    EXPECT_EQ(board_bytes(SHD_UNITS_MAX), 192 + 64 * SHD_UNITS_MAX);
    struct segment s = board_segment(UNITS);
    const struct board *b = s.base;
    EXPECT_EQ((uintptr_t)&b->step % 64, 0);
    EXPECT_EQ((uintptr_t)&b->version[1] - (uintptr_t)&b->version[0], 64);
    segment_close(&s);
}

TEST(empty_board_has_nothing_published)
{
    struct shd_err e;
    struct segment s = board_segment(UNITS);
    const struct board *b = s.base;
    EXPECT_OK(board_check(b, s.bytes, UNITS, &e), &e);
    for (uint32_t u = 0; u < UNITS; u++) {
        EXPECT(board_version(b, u) == UINT64_MAX);
        EXPECT(!board_reached(b, u, 0));
        EXPECT(!board_reached(b, u, UINT64_MAX));
        EXPECT_STATUS(board_wait(b, u, 0, 0), SHD_ETIMEDOUT);
    }
    segment_close(&s);
}

TEST(damaged_boards_are_refused)
{
    struct shd_err e;
    struct segment s = board_segment(UNITS);
    struct board *b = s.base;
    EXPECT_STATUS(board_check(b, board_bytes(UNITS) - 1, UNITS, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "383 bytes for 3 units");
    EXPECT_STATUS(board_check(b, 0, UNITS, &e), SHD_ESEGMENT);
    EXPECT_STATUS(board_check(b, s.bytes, UNITS + 1, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "has 3 units, the model 4");
    EXPECT_STATUS(board_check(b, s.bytes, UINT32_MAX, &e), SHD_ESEGMENT);
    b->layout = 1;
    EXPECT_STATUS(board_check(b, s.bytes, UNITS, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "layout is 1");
    b->magic ^= 1;
    EXPECT_STATUS(board_check(b, s.bytes, UNITS, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "magic");
    segment_close(&s);
}

TEST(published_versions_are_reached)
{
    struct segment s = board_segment(UNITS);
    struct board *b = s.base;
    board_publish(b, 1, 0);
    EXPECT(board_reached(b, 1, 0) && !board_reached(b, 1, 1));
    EXPECT(!board_reached(b, 0, 0) && !board_reached(b, 2, 0));
    board_publish(b, 1, UINT64_C(0x100000000)); /* the low half is 0 again */
    EXPECT(board_reached(b, 1, UINT64_C(0xffffffff)));
    EXPECT_STATUS(board_wait(b, 1, 5, 0), SHD_OK);
    EXPECT_STATUS(board_wait(b, 1, UINT64_C(0x100000001), 2 * MS), SHD_ETIMEDOUT);
    board_set_step(b, 7, 2);
    EXPECT_EQ(atomic_load(&b->step.value), 7);
    EXPECT_EQ(atomic_load(&b->phase.value), 2);
    segment_close(&s);
}

TEST(wait_ends_at_its_timeout)
{
    struct segment s = board_segment(UNITS);
    const uint64_t start = clock_now_ns();
    EXPECT_STATUS(board_wait(s.base, 0, 1, 30 * MS), SHD_ETIMEDOUT);
    const uint64_t waited = clock_now_ns() - start;
    EXPECT(waited >= 30 * MS);
    segment_close(&s);
}

static void on_alarm(int sig)
{
    (void)sig;
}

TEST(interrupted_wait_goes_on)
{
    struct segment s = board_segment(UNITS);
    struct sigaction act = { .sa_handler = on_alarm }, old;
    sigaction(SIGALRM, &act, &old);
    const uint64_t start = clock_now_ns();
    const struct timespec ms5 = { .tv_nsec = 5000000 };
    timer_t timer;
    struct itimerspec spec = { .it_value = ms5, .it_interval = ms5 };
    EXPECT(timer_create(CLOCK_MONOTONIC, NULL, &timer) == 0);
    timer_settime(timer, 0, &spec, NULL);
    const int r = board_wait(s.base, 0, 1, 40 * MS);
    const uint64_t waited = clock_now_ns() - start;
    timer_delete(timer);
    sigaction(SIGALRM, &old, NULL);
    EXPECT_STATUS(r, SHD_ETIMEDOUT);
    EXPECT(waited >= 40 * MS);
    segment_close(&s);
}

#define ROUNDS 2000u

struct pair {
    struct board *b;
    uint64_t *data; /* plain memory the version vouches for */
    int failed;
};

/* Answers each version of unit 0 with one of unit 1; the data is read without a lock. */
static void *echo(void *ctx)
{
    struct pair *p = ctx;
    for (uint64_t v = 0; v < ROUNDS; v++) {
        if (board_wait(p->b, 0, v, UINT64_MAX) != SHD_OK || p->data[v] != v * 3)
            p->failed = 1;
        board_publish(p->b, 1, v);
    }
    return NULL;
}

TEST(threads_wake_each_other_and_see_the_bytes)
{
    static uint64_t data[ROUNDS];
    struct segment s = board_segment(UNITS);
    struct pair p = { .b = s.base, .data = data };
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, echo, &p) == 0);
    int r = SHD_OK;
    for (uint64_t v = 0; r == SHD_OK && v < ROUNDS; v++) {
        data[v] = v * 3;
        board_publish(p.b, 0, v);
        r = board_wait(p.b, 1, v, TEST_HANG_MS * MS);
    }
    pthread_join(thread, NULL);
    EXPECT_STATUS(r, SHD_OK);
    EXPECT_EQ(p.failed, 0);
    segment_close(&s);
}

static void *wait_for_five(void *ctx)
{
    struct pair *p = ctx;
    return board_wait(p->b, 2, 5, TEST_HANG_MS * MS) == SHD_OK ? ctx : NULL;
}

TEST(one_publish_wakes_all_sleepers)
{
    struct segment s = board_segment(UNITS);
    struct pair p = { .b = s.base };
    pthread_t threads[8];
    for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
        EXPECT(pthread_create(&threads[i], NULL, wait_for_five, &p) == 0);
    usleep(20000); /* they sleep by now; if not, the test is only weaker */
    board_publish(p.b, 2, 4);
    usleep(5000);
    board_publish(p.b, 2, 5);
    size_t woken = 0;
    for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
        void *result = NULL;
        pthread_join(threads[i], &result);
        woken += result != NULL;
    }
    EXPECT_EQ(woken, ARRAY_SIZE(threads));
    segment_close(&s);
}

/* The reader of another process: maps the board read-only, waits for versions 0..9. Its exit
 * code says where it failed; no EXPECT in a child, which would go on with the parent's tests. */
static void reader_main(int fd, uint64_t bytes)
{
    struct segment s;
    if (segment_check(fd, SEGMENT_BOARD, bytes, NULL) != SHD_OK ||
        segment_map(fd, SEGMENT_BOARD, bytes, &s, NULL) != SHD_OK)
        _exit(1);
    if (board_check(s.base, bytes, UNITS, NULL) != SHD_OK)
        _exit(2);
    for (uint64_t v = 0; v < 10; v++)
        if (board_wait(s.base, 1, v, 20000 * MS) != SHD_OK)
            _exit(3);
    _exit(board_version(s.base, 1) == 9 ? 0 : 4);
}

TEST(another_process_waits_on_its_readonly_mapping)
{
    struct segment s = board_segment(UNITS);
    fflush(NULL);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0)
        reader_main(dup(s.fd), s.bytes);
    for (uint64_t v = 0; v < 10; v++) {
        usleep(2000);
        board_publish(s.base, 1, v);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
    segment_close(&s);
}

TEST_MAIN()
