/* board: what a reader checks, and that waiting works between threads and processes. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/activity.h"
#include "proto/share/board.h"
#include "proto/share/listen.h"
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

/* -- The open step ------------------------------------------------------------------------------
 */

#define OPENED 200000u

struct opener {
    struct board *b;
    _Atomic uint64_t collecting; /* said beforehand */
};

static void *open_steps(void *ctx)
{
    struct opener *o = ctx;
    for (uint64_t step = 0; step < OPENED; step++) {
        board_set_step(o->b, step, STEP_SEALED);
        atomic_store(&o->collecting, step + 1);
        board_set_step(o->b, step, STEP_APPLYING);
        board_set_step(o->b, step + 1, STEP_OPEN);
    }
    return NULL;
}

TEST(no_step_is_seen_open_before_it_is)
{
    static struct opener o;
    struct segment s = board_segment(UNITS);
    pthread_t thread;
    uint64_t seen = 0, now = 0;
    o.b = s.base;
    EXPECT(pthread_create(&thread, NULL, open_steps, &o) == 0);
    while (seen <= now && now < OPENED) {
        seen = board_collecting(o.b);
        now = atomic_load(&o.collecting);
    }
    pthread_join(thread, NULL);
    if (seen > now)
        FAIL("step %" PRIu64 " is said to be open while %" PRIu64 " is", seen, now);
    EXPECT_EQ(board_collecting(o.b), OPENED);
    segment_close(&s);
}

/* -- Sleepers ---------------------------------------------------------------------------------- */

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

/* What workers show of themselves: both sides of proto/share/activity.h, and nonsense in it. */

static _Alignas(4096) uint8_t memory[ACTIVITY_BYTES];
static struct activity_span got[ACTIVITY_SPANS];
static const struct activity_limits limits = { .units = 10, .micros = 8, .now_ns = 1000000 };

static struct activity *fresh(void)
{
    memset(memory, 0, sizeof memory);
    struct activity *a = (struct activity *)memory;
    activity_init(a, ACTIVITY_PATH_MAP);
    return a;
}

static struct activity_span span_at(uint64_t begin_ns)
{
    return (struct activity_span){ ACTIVITY_FORWARD, 3, 5, 7, begin_ns, 10 };
}

TEST(now_is_read_as_it_was_written)
{
    struct activity *a = fresh();
    struct activity_span now = span_at(500), read;
    EXPECT(!activity_now(a, &limits, &read)); /* nothing was said */
    activity_set_now(a, &now);
    EXPECT(activity_now(a, &limits, &read));
    EXPECT_EQ(read.what, ACTIVITY_FORWARD);
    EXPECT_EQ(read.unit, 3);
    EXPECT_EQ(read.micro, 5);
    EXPECT_EQ(read.step, 7);
    EXPECT_EQ(read.begin_ns, 500);
    EXPECT_STR(activity_path_name(a), "map");
}

TEST(nonsense_is_silence)
{
    static const struct activity_span wrong[] = {
        { ACTIVITY_SILENT, 3, 5, 7, 500, 0 },           { ACTIVITY_WHATS, 3, 5, 7, 500, 0 },
        { ACTIVITY_FORWARD, 10, 5, 7, 500, 0 },         { ACTIVITY_FORWARD, 3, 8, 7, 500, 0 },
        { ACTIVITY_FORWARD, 3, 5, UINT64_MAX, 500, 0 }, { ACTIVITY_FORWARD, 3, 5, 7, 1000001, 0 },
        { ACTIVITY_FORWARD, 3, 5, 7, 500, UINT64_MAX },
    };
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct activity *a = fresh();
        struct activity_span read;
        activity_set_now(a, &wrong[i]);
        activity_add_span(a, &wrong[i]);
        EXPECT(!activity_now(a, &limits, &read));
        EXPECT_EQ(activity_spans(a, &limits, 0, got), 0);
    }
    struct activity *a = fresh();
    struct activity_waits waits;
    a->bucket[3] = UINT64_MAX;
    EXPECT(!activity_waits(a, &waits));
    a = fresh();
    a->magic++;
    EXPECT(!activity_waits(a, &waits));
}

TEST(half_written_now_is_not_waited_for)
{
    struct activity *a = fresh();
    struct activity_span now = span_at(500), read;
    activity_set_now(a, &now);
    a->now_seq++; /* as a worker that was stopped in the middle leaves it */
    EXPECT(!activity_now(a, &limits, &read));
    activity_set_now(a, &now);
    EXPECT(activity_now(a, &limits, &read));
}

TEST(wait_for_a_slot_is_said_in_any_page)
{
    static struct activity zero;
    uint64_t since_ns = 7;
    EXPECT(!activity_slot_wait(&zero, 1000, &since_ns)); /* of an older libshd */
    EXPECT_EQ(since_ns, 7);
    activity_set_slot_wait(&zero, 0);
    EXPECT(activity_slot_wait(&zero, 1000, &since_ns));
    EXPECT_EQ(since_ns, 0);
    activity_set_slot_wait(&zero, 600);
    EXPECT(activity_slot_wait(&zero, 1000, &since_ns));
    EXPECT_EQ(since_ns, 600);
    EXPECT(activity_slot_wait(&zero, 599, &since_ns)); /* it will wait: nonsense */
    EXPECT_EQ(since_ns, 0);
}

TEST(random_memory_is_read_without_harm)
{
    uint64_t seed = test_seed(42);
    for (int round = 0; round < 200; round++) {
        struct activity *a = fresh();
        struct activity_span read;
        struct activity_waits waits;
        for (size_t i = 8; i + 8 <= sizeof memory; i += 8) {
            const uint64_t word = test_random(&seed);
            memcpy(memory + i, &word, sizeof word);
        }
        activity_now(a, &limits, &read);
        activity_waits(a, &waits);
        EXPECT(activity_spans(a, &limits, 0, got) <= ACTIVITY_SPANS);
    }
}

TEST(ring_keeps_the_newest)
{
    struct activity *a = fresh();
    for (uint64_t i = 0; i < 3 * ACTIVITY_SPANS; i++) {
        const struct activity_span s = span_at(i);
        activity_add_span(a, &s);
    }
    const uint32_t count = activity_spans(a, &limits, 0, got);
    EXPECT_EQ(count, ACTIVITY_SPANS - 1); /* the oldest may be the one being written over */
    for (uint32_t i = 0; i < count; i++)
        EXPECT_EQ(got[i].begin_ns, 2 * ACTIVITY_SPANS + 1 + i);
    EXPECT_EQ(activity_spans(a, &limits, 3 * ACTIVITY_SPANS + 9, got), 1);
}

TEST(waits_fall_into_their_buckets)
{
    struct activity *a = fresh();
    struct activity_waits waits;
    activity_add_wait(a, 0);
    activity_add_wait(a, 50000);
    activity_add_wait(a, 50001);
    activity_add_wait(a, UINT64_C(1000000000000));
    EXPECT(activity_waits(a, &waits));
    EXPECT_EQ(waits.bucket[0], 2);
    EXPECT_EQ(waits.bucket[1], 1);
    EXPECT_EQ(waits.bucket[ACTIVITY_BUCKETS], 1);
    EXPECT_EQ(waits.sum_ns, 1000000100001);
}

/* Listening sockets: HOST:PORT in two, what may be reached from elsewhere, files left by the dead.
 */

TEST(host_and_port_are_split)
{
    static const struct {
        const char *text, *host, *port; /* host NULL: it is none */
    } cases[] = {
        { "127.0.0.1:80", "127.0.0.1", "80" },
        { "[::1]:0", "::1", "0" },
        { "node1:9464", "node1", "9464" },
        { "nonsense", NULL, NULL },
        { ":80", NULL, NULL },
        { "host:", NULL, NULL },
        { "[]:80", NULL, NULL },
        { "[::1:80", NULL, NULL },
        { "", NULL, NULL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char host[LISTEN_HOST_BYTES] = "";
        const char *port = NULL;
        EXPECT_EQ(listen_split(cases[i].text, host, &port), cases[i].host != NULL);
        if (cases[i].host == NULL)
            continue;
        EXPECT_STR(host, cases[i].host);
        EXPECT_STR(port, cases[i].port);
    }
    static char longest[LISTEN_HOST_BYTES + 8];
    char host[LISTEN_HOST_BYTES];
    const char *port;
    memset(longest, 'a', LISTEN_HOST_BYTES);
    memcpy(longest + LISTEN_HOST_BYTES, ":80", 4);
    EXPECT(!listen_split(longest, host, &port));
}

TEST(tcp_stays_on_this_machine_without_leave)
{
    struct shd_err e = { 0 };
    char name[LISTEN_NAME_BYTES];
    int fd = -1;
    bool remote = true;
    EXPECT_OK(listen_tcp("localhost:0", 0, &fd, &remote, &e), &e);
    EXPECT(!remote);
    EXPECT_OK(listen_name(fd, name, &e), &e);
    EXPECT_HAS(name, "127.0.0.1:");
    int second;
    EXPECT_STATUS(listen_tcp(name, 0, &second, &remote, &e), SHD_EBUSY);
    close(fd);
    EXPECT_STATUS(listen_tcp("0.0.0.0:0", 0, &fd, &remote, &e), SHD_EAUTH);
    EXPECT_OK(listen_tcp("0.0.0.0:0", LISTEN_REMOTE, &fd, &remote, &e), &e);
    EXPECT(remote);
    close(fd);
    EXPECT_STATUS(listen_tcp("no-address:80", 0, &fd, &remote, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "is no numeric address and port");
    EXPECT_STATUS(listen_tcp("80", 0, &fd, &remote, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'80' is not HOST:PORT");
}

TEST(socket_file_is_private_and_a_dead_ones_is_replaced)
{
    char dir[] = "/tmp/test_listen.XXXXXX", path[64], longest[200];
    struct shd_err e = { 0 };
    struct stat st;
    int fd, second;
    CHECK(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/socket", dir);
    EXPECT_OK(listen_unix(path, &fd, &e), &e);
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    EXPECT_STATUS(listen_unix(path, &second, &e), SHD_EBUSY);
    close(fd); /* its file stays */
    EXPECT_OK(listen_unix(path, &fd, &e), &e);
    close(fd);
    unlink(path);
    fclose(fopen(path, "w"));
    EXPECT_STATUS(listen_unix(path, &fd, &e), SHD_EIO); /* what is no socket is not removed */
    EXPECT(access(path, F_OK) == 0);
    unlink(path);
    rmdir(dir);
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    EXPECT_STATUS(listen_unix(longest, &fd, &e), SHD_ERANGE);
}

TEST(hosts_of_this_machine_are_known_by_name)
{
    EXPECT(listen_host_is_local("localhost") && listen_host_is_local("localhost:8440"));
    EXPECT(listen_host_is_local("127.0.0.1:80") && listen_host_is_local("[::1]:80"));
    EXPECT(!listen_host_is_local("evil.example:8440") && !listen_host_is_local("10.0.0.1:80"));
    EXPECT(!listen_host_is_local("localhost.evil.example"));
}

TEST_MAIN()
