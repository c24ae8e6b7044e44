/* A session's rings (client/session/link_ring.h) with real daemons: what goes by them, in which
 * order with what does not, and that nothing but time depends on whether there are any. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define DAEMONS 2
#define STEPS   6

static void step(shd_model *m)
{
    struct shd_err e = { 0 };
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
}

static const struct link *link_at(const shd_session *s, uint32_t i)
{
    return &s->hub->links[i];
}

static uint64_t written(const shd_session *s)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < DAEMONS; i++)
        sum += link_at(s, i)->ring.ring.written;
    return sum;
}

static void expect_rings(const shd_session *s, enum link_ring_state state)
{
    for (uint32_t i = 0; i < DAEMONS; i++)
        EXPECT_EQ(link_at(s, i)->ring.state, state);
}

static void expect_bits(shd_model *m, uint32_t steps)
{
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), steps, want);
    digest_of(m, got);
    EXPECT_STR(got, want);
}

TEST(what_a_trainer_asks_goes_by_the_ring_from_its_second_step_on)
{
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    expect_rings(s, LINK_RING_NONE); /* who only looks has none */
    step(m);
    expect_rings(s, LINK_RING_OPEN);
    uint64_t conn_sent[DAEMONS];
    for (uint32_t i = 0; i < DAEMONS; i++)
        conn_sent[i] = link_at(s, i)->ring.conn_sent;
    const uint64_t before = written(s), requests = s->hub->requests;
    for (int i = 1; i < STEPS; i++)
        step(m);
    for (uint32_t i = 0; i < DAEMONS; i++)
        EXPECT_EQ(link_at(s, i)->ring.conn_sent, conn_sent[i]); /* not one by the connection */
    /* 4 units of 4 micro-batches, Prepare and Commit, of each daemon */
    EXPECT_EQ(s->hub->requests - requests, (STEPS - 1) * DAEMONS * (4 * TOY_MICROS + 2));
    EXPECT(written(s) - before >= (s->hub->requests - requests) * 16);
    EXPECT_EQ(link_at(s, 0)->ring.conn_calls, 0);
    expect_bits(m, STEPS);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(environment_turns_it_off)
{
    setenv("SHD_RING", "off", 1);
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    unsetenv("SHD_RING");
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    for (int i = 0; i < STEPS; i++)
        step(m);
    expect_rings(s, LINK_RING_NONE);
    expect_bits(m, STEPS);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(older_daemon_is_not_asked)
{
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    s->hub->links[1].peer.level = WIRE_LEVEL_RINGS - 1;
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    for (int i = 0; i < STEPS; i++)
        step(m);
    EXPECT_EQ(link_at(s, 0)->ring.state, LINK_RING_OPEN);
    EXPECT_EQ(link_at(s, 1)->ring.state, LINK_RING_NONE);
    expect_bits(m, STEPS);
    shd_close(s);
    fixture_stop(&daemons);
}

static int step_with_blob(shd_model *m, const void *blob, size_t bytes, struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    struct shd_update update = toy_update(shd_step(m));
    update.blob = blob;
    update.blob_bytes = bytes;
    return shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, e);
}

/* A commit with a blob is no frame for a ring; what follows it is again. */
TEST(what_is_too_long_goes_by_the_connection_in_its_turn)
{
    static uint8_t blob[100000], got[sizeof blob];
    struct shd_err e = { 0 };
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    step(m);
    for (int i = 1; i < STEPS; i++) {
        const uint64_t before = written(s), sent = link_at(s, 0)->ring.conn_sent;
        memset(blob, i, sizeof blob);
        EXPECT_OK(step_with_blob(m, blob, sizeof blob, &e), &e);
        EXPECT(written(s) > before && link_at(s, 0)->ring.conn_sent > sent);
        size_t bytes;
        EXPECT_OK(shd_blob(m, got, sizeof got, &bytes, &e), &e);
        EXPECT(bytes == sizeof blob && memcmp(got, blob, bytes) == 0);
    }
    expect_bits(m, STEPS);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(successor_of_a_daemon_has_a_ring_of_its_own)
{
    fixture_start_kept(&daemons, DAEMONS, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    step(m);
    int maps = 0, fds = 0;
    for (int i = 1; i < STEPS; i++) {
        expect_rings(s, LINK_RING_OPEN);
        fixture_restart(&daemons, i % DAEMONS);
        step(m);
        if (i == DAEMONS) { /* of each, its first inbox stays mapped */
            maps = count_segment_maps(getpid());
            fds = count_fds(getpid());
        }
    }
    expect_rings(s, LINK_RING_OPEN);
    EXPECT_EQ(count_segment_maps(getpid()), maps);
    EXPECT_EQ(count_fds(getpid()), fds);
    expect_bits(m, STEPS);
    shd_close(s);
    fixture_stop(&daemons);
}

/* As docs/operations.md counts: side channel, process, connection, gradient slots. */
TEST(session_takes_four_descriptors_of_a_daemon)
{
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *first = attach(PATIENT_MS);
    step(open_toy(first, toy_spec("f32", TOY_ADAMW)));
    const int before = count_fds(daemons.pids[0]);
    shd_session *s = attach(PATIENT_MS);
    step(open_toy(s, toy_spec("f32", TOY_ADAMW)));
    EXPECT_EQ(link_at(s, 0)->ring.state, LINK_RING_OPEN);
    EXPECT_SOON(count_fds(daemons.pids[0]) == before + 4);
    shd_close(s);
    shd_close(first);
    fixture_stop(&daemons);
}

/* -- Waiting for parameters ----------------------------------------------------------------------
 */

static pid_t step_later(long ms)
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct shd_err e = { 0 };
    sleep_ms(ms);
    _exit(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e) == SHD_OK ? 0 : 1);
}

static long sleeps(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_THREAD, &usage) == 0);
    return usage.ru_nvcsw;
}

static void expect_few_sleeps(enum shd_path path)
{
    struct shd_err e = { 0 };
    const struct shd_policy policy = { .size = sizeof policy, .path = path };
    int status;
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(shd_set_policy(m, &policy, &e), &e);
    step(m);
    expect_rings(s, LINK_RING_OPEN);
    const pid_t pid = step_later(1000);
    const uint64_t start_ms = test_now_ms();
    const long before = sleeps();
    m->step++; /* one that is not there yet */
    EXPECT_OK(shd_acquire(m, 3, NULL, &e), &e);
    const uint64_t waited_ms = test_now_ms() - start_ms;
    EXPECT(waited_ms >= 900);
    EXPECT((uint64_t)(sleeps() - before) <= 15 + waited_ms / 20);
    EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
    shd_release(m, 3);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Who looked every 5 ms went to sleep 200 times a second. */
TEST(long_wait_for_a_unit_is_a_long_sleep)
{
    expect_few_sleeps(SHD_PATH_MAP);
    expect_few_sleeps(SHD_PATH_COPY);
}

static void *restart_later(void *ctx)
{
    sleep_ms(300);
    fixture_restart(&daemons, 1);
    return ctx;
}

/* The successor is asked for a step that its predecessor has not made: that it says so shows that
 * the sleep ended with the death. */
TEST(owner_that_dies_while_it_is_waited_for_is_seen)
{
    pthread_t thread;
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, DAEMONS, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    step(m);
    expect_rings(s, LINK_RING_OPEN);
    EXPECT_EQ(pthread_create(&thread, NULL, restart_later, NULL), 0);
    m->step++;
    EXPECT_STATUS(shd_acquire(m, 3, NULL, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "came back with model 'toy' at step 1, this worker is at step 2");
    pthread_join(thread, NULL);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Where none can be had, or a wake cannot be sent ---------------------------------------------
 */

static int fail_kind, fail_from, fail_to, calls;

static int fail_some(enum sys_kind kind)
{
    if ((int)kind != fail_kind)
        return 0;
    calls++;
    return calls > fail_from && calls <= fail_to ? ENOMEM : 0;
}

/* Every call of a kind fails once, in a first step. Those for the inbox are errors, after which the
 * step is made again; those for a ring are none. True: it was one of a ring's. False: an error, or
 * there are no more calls (*ret_more). */
static bool fail_in_first_step(int kind, int n, bool *ret_more)
{
    char spec[4096], name[32];
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    shd_session *s = attach(PATIENT_MS);
    snprintf(name, sizeof name, "toy%d.%d", kind, n);
    snprintf(spec, sizeof spec, "%s", toy_spec("f32", TOY_ADAMW));
    char *at = strstr(spec, "\"toy\"");
    CHECK(at != NULL);
    char renamed[4096];
    snprintf(renamed, sizeof renamed, "%.*s\"%s\"%s", (int)(at - spec), spec, name, at + 5);
    shd_model *m = open_toy(s, renamed);
    fail_kind = kind;
    fail_from = n;
    fail_to = n + 1;
    calls = 0;
    sys_fault = fail_some;
    const int r = toy_step(m, toy_all_micros, TOY_MICROS, &result, &e);
    sys_fault = NULL;
    *ret_more = calls > n;
    if (r != SHD_OK)
        step(m);
    const bool refused = link_at(s, 0)->ring.state == LINK_RING_REFUSED ||
                         link_at(s, 1)->ring.state == LINK_RING_REFUSED;
    EXPECT_EQ(refused, *ret_more && r == SHD_OK);
    step(m);
    shd_close(s);
    return refused;
}

TEST(each_failure_to_map_it_costs_the_ring_alone)
{
    int rings = 0;
    bool more = true;
    fixture_start(&daemons, DAEMONS, NULL);
    for (int n = 0; more; n++)
        rings += fail_in_first_step(SYS_MAP, n, &more);
    EXPECT_EQ(rings, 2 * DAEMONS); /* the pages of each */
    fixture_stop(&daemons);
}

TEST(wake_that_cannot_be_sent_is_sent_later)
{
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    step(m);
    fail_kind = SYS_SEND;
    for (int i = 1; i < STEPS; i++) {
        calls = fail_from = 0;
        fail_to = i % 2 == 0 ? 1 : 20;
        sys_fault = fail_some;
        step(m);
        sys_fault = NULL;
        EXPECT(calls > 0);
    }
    expect_bits(m, STEPS);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(worker_that_is_short_of_descriptors_goes_on_without)
{
    struct rlimit limit, low;
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const int lowest = dup(STDERR_FILENO);
    close(lowest);
    low = (struct rlimit){ (rlim_t)lowest, limit.rlim_max }; /* what is open stays open */
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    struct shd_err e = { 0 };
    const int r = toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e);
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_OK(r, &e);
    expect_rings(s, LINK_RING_REFUSED);
    step(m);
    expect_bits(m, 2);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- How often anybody is woken ------------------------------------------------------------------
 */

#define MANY_UNITS  256
#define MANY_MICROS 4
#define MANY_ELEMS  2048

static shd_model *open_many(shd_session *s)
{
    static char spec[MANY_UNITS * 80 + 200];
    struct shd_err e = { 0 };
    shd_model *m;
    int at = snprintf(spec, sizeof spec,
                      "{\"name\":\"many\",\"micro_batches\":%d,\"optimizer\":{\"kind\":\"sgd\"},"
                      "\"units\":[",
                      MANY_MICROS);
    for (int i = 0; i < MANY_UNITS; i++)
        at += snprintf(spec + at, sizeof spec - (size_t)at,
                       "%s{\"name\":\"u%d\",\"tensors\":[{\"name\":\"t%d\",\"shape\":[%d]}]}",
                       i > 0 ? "," : "", i, i, MANY_ELEMS);
    snprintf(spec + at, sizeof spec - (size_t)at, "]}");
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    return m;
}

static void many_step(shd_model *m)
{
    struct shd_err e = { 0 };
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    for (uint32_t micro = 0; micro < MANY_MICROS; micro++)
        for (uint32_t unit = MANY_UNITS; unit-- > 0;) {
            float *grad;
            EXPECT_OK(shd_grad(m, micro, unit, &grad, &e), &e);
            memset(grad, 0, MANY_ELEMS * sizeof *grad);
            EXPECT_OK(shd_return(m, micro, unit, &e), &e);
        }
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

/* Of its loop's thread: each is several system calls of a daemon, and one of who woke it. */
static uint64_t sleeps_of(pid_t pid)
{
    char path[64], line[256];
    unsigned long long sleeps = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/status", (int)pid, (int)pid);
    FILE *f = fopen(path, "r");
    EXPECT(f != NULL);
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "voluntary_ctxt_switches: %llu", &sleeps) == 1)
            break;
    fclose(f);
    return sleeps;
}

static uint64_t sleeps_of_daemons(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < DAEMONS; i++)
        sum += sleeps_of(daemons.pids[i]);
    return sum;
}

/* What keeps a Return cheap: neither side is woken for each. */
TEST(many_small_returns_share_their_wakes)
{
    fixture_start(&daemons, DAEMONS, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_many(s);
    s->hub->wakes.put_off_ns = TEST_HANG_MS * NS_PER_MS; /* however slow this machine is */
    many_step(m);
    expect_rings(s, LINK_RING_OPEN);
    fail_kind = SYS_SEND;
    calls = fail_to = 0;
    sys_fault = fail_some; /* counts */
    const uint64_t theirs = sleeps_of_daemons(), own = sleeps_of(getpid());
    for (int i = 0; i < STEPS; i++)
        many_step(m);
    sys_fault = NULL;
    const uint64_t daemons_slept = sleeps_of_daemons() - theirs, slept = sleeps_of(getpid()) - own;
    const uint64_t returns = (uint64_t)STEPS * DAEMONS * MANY_UNITS * MANY_MICROS;
    printf("%llu returns: %d wakes of daemons, which slept %llu times, the worker %llu times\n",
           (unsigned long long)returns, calls, (unsigned long long)daemons_slept,
           (unsigned long long)slept);
    EXPECT((uint64_t)calls <= returns / 4);
    EXPECT(daemons_slept <= returns / 4);
    EXPECT(slept <= returns / 4);
    shd_close(s);
    fixture_stop(&daemons);
}

/* A daemon that sleeps is woken by the eighth of those that can wait, or by one that cannot. */
TEST(wake_is_put_off_for_so_many_returns)
{
    static struct ring_page pages[2];
    static const uint8_t frame[40] = { 1 };
    struct shd_err e = { 0 };
    struct side_msg msg;
    int sides[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sides), 0);
    for (uint32_t before = 0; before < LINK_RING_PUT_OFF; before++) {
        struct link_ring r = { .state = LINK_RING_OPEN };
        memset(pages, 0, sizeof pages);
        ring_init(&r.ring, &pages[0], &pages[1], /* awake= */ true);
        for (uint32_t i = 1; i <= before; i++) {
            EXPECT_OK(link_ring_send(&r, sides[0], frame, sizeof frame, /* can_wait_ns= */ i, &e),
                      &e);
            EXPECT(r.owes_wake && r.put_off == i && r.put_off_ns == 1);
        }
        EXPECT_STATUS(side_recv(sides[1], 0, &msg, NULL, &e), SHD_ETIMEDOUT);
        const bool last = before + 1 == LINK_RING_PUT_OFF;
        EXPECT_OK(link_ring_send(&r, sides[0], frame, sizeof frame, last ? 99 : 0, &e), &e);
        EXPECT_OK(side_recv(sides[1], 0, &msg, NULL, &e), &e);
        EXPECT_EQ(msg.type, SIDE_WAKE);
        for (uint32_t i = 0; i < 20; i++) /* it is awake */
            EXPECT_OK(link_ring_send(&r, sides[0], frame, sizeof frame, i % 2, &e), &e);
        EXPECT(!r.owes_wake && r.put_off == 0);
        EXPECT_STATUS(side_recv(sides[1], 0, &msg, NULL, &e), SHD_ETIMEDOUT);
    }
    close(sides[0]);
    close(sides[1]);
}

/* -- Which way ----------------------------------------------------------------------------------
 */

TEST(nothing_overtakes_what_was_sent_the_other_way)
{
    static struct ring_page pages[2];
    static uint8_t frame[RING_FRAME_BYTES_MAX];
    struct shd_err e = { 0 };
    struct ring daemon;
    bool wakes;
    size_t bytes;
    struct link_ring r = { .state = LINK_RING_ASKED, .conn_sent = 3, .conn_heard = 2 };
    EXPECT_EQ(link_ring_way(&r, 10), LINK_BY_CONN);
    r.state = LINK_RING_OPEN;
    ring_init(&r.ring, &pages[0], &pages[1], /* awake= */ true);
    ring_init(&daemon, &pages[1], &pages[0], /* awake= */ false);
    EXPECT_EQ(link_ring_way(&r, 10), LINK_BY_CONN); /* request 3 may be unread */
    r.conn_heard = 3;
    EXPECT_EQ(link_ring_way(&r, RING_FRAME_BYTES_MAX), LINK_BY_RING);
    EXPECT_EQ(link_ring_way(&r, RING_FRAME_BYTES_MAX + 1), LINK_BY_CONN);
    EXPECT_OK(ring_put(&r.ring, frame, 10, &wakes, &e), &e);
    EXPECT_EQ(link_ring_way(&r, RING_FRAME_BYTES_MAX + 1), LINK_BY_NEITHER);
    EXPECT_EQ(link_ring_way(&r, 10), LINK_BY_RING);
    EXPECT_OK(ring_take(&daemon, frame, &bytes, &e), &e);
    EXPECT_EQ(link_ring_way(&r, RING_FRAME_BYTES_MAX + 1), LINK_BY_CONN);
    r.conn_sent = 5;
    EXPECT_EQ(link_ring_way(&r, 10), LINK_BY_CONN);
}

TEST_MAIN()
