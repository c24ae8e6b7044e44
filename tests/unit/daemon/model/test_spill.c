/* Gradients that wait for earlier ones, in the daemon's own memory (daemon/model/spill.h): the same
 * bits whatever the order, whichever daemon is killed, and whichever client; nothing is left
 * behind.
 */
#include <limits.h>
#include <sys/wait.h>

#include "client/session/session.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define TIMEOUT_MS TEST_HANG_MS

/* -- Gradients that wait ------------------------------------------------------------------------
 */

static int return_unit(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const void *params;
    float *grad;
    int r = shd_acquire(m, unit, &params, e);
    if (r == SHD_OK)
        r = shd_grad(m, micro, unit, &grad, e);
    if (r != SHD_OK)
        return r;
    toy_write(m, micro, unit, /* salt= */ 0, params, /* add= */ false, grad);
    r = shd_return(m, micro, unit, e);
    shd_release(m, unit);
    return r;
}

static int return_micro(shd_model *m, uint32_t micro, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < shd_units(m); u++)
        r = return_unit(m, micro, u, e);
    return r;
}

static const uint32_t upward[] = { 0, 1, 2, 3 }, downward[] = { 3, 2, 1, 0 };

static int return_step(shd_model *m, const uint32_t *order, uint32_t count, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++)
        r = return_micro(m, order[i], e);
    return r;
}

static void commit_step(shd_model *m)
{
    struct shd_err e = { 0 };
    const struct shd_update update = toy_update(shd_step(m));
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

static void attach_toy(const char *address, shd_session **ret_session, shd_model **ret_model)
{
    struct shd_err e = { 0 };
    EXPECT_OK(try_connect(address, TIMEOUT_MS, ret_session, &e), &e);
    EXPECT_OK(shd_model_open(*ret_session, toy_spec("f32", TOY_ADAMW), ret_model, &e), &e);
}

static void ordered_steps(const char *address, const uint32_t *order, uint32_t steps, char hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    attach_toy(address, &s, &m);
    while (shd_step(m) < steps) {
        EXPECT_OK(return_step(m, order, TOY_MICROS, &e), &e);
        commit_step(m);
    }
    EXPECT_OK(shd_digest(m, hex, NULL, &e), &e);
    shd_close(s);
}

TEST(gradients_in_falling_order_are_spilled_and_sum_to_the_same_bits)
{
    char want[65], got[65];
    ordered_steps("local:", upward, 3, want);
    fixture_start_kept(&daemons, 2, "");
    ordered_steps(daemons.address, downward, 3, got);
    EXPECT_STR(got, want);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 4);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL); /* and with no keeper */
    ordered_steps(daemons.address, downward, 3, got);
    EXPECT_STR(got, want);
    fixture_stop(&daemons);
}

TEST(spilled_gradients_outlive_the_daemon)
{
    char want[65], got[65];
    ordered_steps("local:", upward, 3, want);
    fixture_start_kept(&daemons, 1, "");
    for (uint32_t count = 1; count <= 3; count++) {
        struct shd_err e = { 0 };
        shd_session *s;
        shd_model *m;
        attach_toy(daemons.address, &s, &m);
        EXPECT_EQ(shd_step(m), count - 1);
        EXPECT_OK(return_step(m, downward, count, &e), &e);
        fixture_restart(&daemons, 0);
        shd_close(s);
        ordered_steps(daemons.address, upward, count, got);
    }
    EXPECT_STR(got, want);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
TEST(killed_while_it_spills_goes_on_with_the_same_bits)
{
    static const char *const fails[] = {
        "spill:make:before;",    "spill:make:after;",  "keeper:store:before@4;",
        "keeper:store:after@4;", "step:cell:before;",  "step:cell:before@4;",
        "step:cell:after;",      "step:cell:after@5;", "kern:done:before@20;",
    };
    char want[65], got[65];
    long kills = 0;
    ordered_steps("local:", upward, 3, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        fixture_start_kept(&daemons, 1, fails[i]);
        ordered_steps(daemons.address, downward, 3, got);
        kills += fixture_ask(&daemons, KEEPER_STARTS, 0, "") - 1;
        if (strcmp(got, want) != 0)
            FAIL("after %s: another digest", fails[i]);
        fixture_stop(&daemons);
    }
    EXPECT_EQ(kills, ARRAY_SIZE(fails));
}

TEST(killed_while_memory_goes_back_goes_on_with_the_same_bits)
{
    static const char *const fails[] = { "spill:punch:before;", "spill:punch:after;" };
    char want[65], got[65];
    ordered_steps("local:", upward, 3, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        fixture_start_kept(&daemons, 1, fails[i]);
        ordered_steps(daemons.address, downward, 1, got);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") == 2);
        ordered_steps(daemons.address, downward, 3, got);
        EXPECT_STR(got, want);
        fixture_stop(&daemons);
    }
}
#endif

static uint64_t bytes_in_status(int daemon, const char *name)
{
    char key[32];
    const struct http_reply r = http_get(&daemons, daemon, "/status");
    EXPECT_EQ(r.code, 200);
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *at = strstr(r.body, key);
    const uint64_t bytes = at != NULL ? strtoull(at + strlen(key), NULL, 10) : 0;
    free(r.text);
    return bytes;
}

static bool has_spilled(void)
{
    return bytes_in_status(0, "spilled") > 0;
}

/* A daemon and a step whose gradients come last first; the model is at its second one. */
static shd_model *make_spilling_step(shd_session **ret_session)
{
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start(&daemons, 1, NULL);
    attach_toy(daemons.address, ret_session, &m);
    EXPECT_OK(return_step(m, downward, TOY_MICROS, &e), &e);
    commit_step(m);
    return m;
}

TEST(memory_stays_for_the_next_step_and_goes_back_unused)
{
    shd_session *s;
    make_spilling_step(&s);
    EXPECT(bytes_in_status(0, "spill") > 0);
    EXPECT_SOON(bytes_in_status(0, "spill") == 0);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Each of these uses some, so it is never unused, but most of it is. */
TEST(memory_that_later_steps_do_not_need_goes_back)
{
    static const uint32_t swapped[] = { 1, 0, 2, 3 };
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m = make_spilling_step(&s);
    const uint64_t most = bytes_in_status(0, "spill");
    for (int i = 0; i < 3; i++) {
        EXPECT_OK(return_step(m, swapped, TOY_MICROS, &e), &e);
        commit_step(m);
    }
    EXPECT(bytes_in_status(0, "spill") <= most / 2);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Who is stuck -------------------------------------------------------------------------------
 */

static bool has_sessions(void)
{
    const struct http_reply r = http_get(&daemons, 0, "/status");
    EXPECT_EQ(r.code, 200);
    const bool none = strstr(r.body, "\"sessions\":[]") != NULL;
    free(r.text);
    return !none;
}

/* As a worker of an older libshd: the page is as the daemon has made it. */
static void say_nothing(shd_model *m)
{
    atomic_store(&m->activity.page->slot_wait, 0);
}

TEST(worker_that_waits_for_no_slot_keeps_its_gradients_there)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    fixture_start(&daemons, 1, NULL);
    attach_toy(daemons.address, &s, &m);
    EXPECT_OK(return_unit(m, 3, 0, &e), &e);
    EXPECT_OK(return_unit(m, 3, 1, &e), &e);
    sleep_ms(100);
    EXPECT(!has_spilled());
    say_nothing(m);
    EXPECT_SOON(has_spilled());
    shd_close(s);
    fixture_stop(&daemons);
}

/* The fixed share of one of two: micro-batches rank and rank + 2. It computes for ms a unit. */
static int train_share(uint32_t rank, uint64_t ms, uint64_t steps, struct shd_err *e)
{
    struct shd_stats stats = { .size = sizeof stats };
    shd_session *s;
    shd_model *m;
    int r = try_connect(daemons.address, TIMEOUT_MS, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, e);
    while (r == SHD_OK && shd_step(m) < steps) {
        for (uint32_t micro = rank; r == SHD_OK && micro < TOY_MICROS; micro += 2)
            for (uint32_t u = 0; r == SHD_OK && u < shd_units(m); u++) {
                sleep_ms((long)test_paced(ms));
                r = return_unit(m, micro, u, e);
            }
        const struct shd_update update = toy_update(shd_step(m));
        if (r == SHD_OK)
            r = shd_commit(m, &update, NULL, e);
    }
    if (r == SHD_OK)
        r = shd_stats(s, &stats, e);
    if (r == SHD_OK && stats.bytes_copied > 0)
        r = err_set(e, SHD_EINTERNAL, "%ju bytes were copied", (uintmax_t)stats.bytes_copied);
    shd_close(s);
    return r;
}

static pid_t fork_worker(uint32_t rank, uint64_t ms, uint64_t steps)
{
    struct shd_err e = { 0 };
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    const int r = train_share(rank, ms, steps, &e);
    if (r != SHD_OK)
        fprintf(stderr, "worker %u: %s\n", rank, e.text);
    _exit(r == SHD_OK ? 0 : 1);
}

/* One of the workers is three times as slow, and first in turn. True: no daemon has copied. */
static bool trains_without_a_copy(void)
{
    int status[2];
    fixture_start(&daemons, 2, NULL);
    const pid_t slow = fork_worker(0, 30, 3), fast = fork_worker(1, 10, 3);
    waitpid(slow, &status[0], 0);
    waitpid(fast, &status[1], 0);
    EXPECT(status[0] == 0 && status[1] == 0);
    const uint64_t bytes = bytes_in_status(0, "spilled") + bytes_in_status(1, "spilled");
    printf("  %ju bytes spilled\n", (uintmax_t)bytes);
    fixture_stop(&daemons);
    return bytes == 0;
}

/* A machine that is held up for a part of a step makes a worker look stuck: several tries. */
TEST(workers_of_unlike_pace_copy_nothing)
{
    bool nothing = false;
    for (int i = 0; i < 5 && !nothing; i++)
        nothing = trains_without_a_copy();
    EXPECT(nothing);
}

/* A second worker is there, and stopped: for all that is known it computes. */
TEST(worker_is_stuck_once_a_step_where_another_is_stopped)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    ordered_steps("local:", upward, 1, want);
    fixture_start(&daemons, 1, NULL);
    const pid_t other = fork_worker(0, UINT64_C(1) << 20, 1);
    EXPECT_SOON(has_sessions());
    kill(other, SIGSTOP);
    attach_toy(daemons.address, &s, &m);
    const uint64_t start_ms = test_now_ms();
    EXPECT_OK(return_step(m, downward, TOY_MICROS - 1, &e), &e);
    const uint64_t took_ms = test_now_ms() - start_ms;
    printf("  %ju ms\n", (uintmax_t)took_ms);
    EXPECT(has_spilled());
    EXPECT(took_ms >= 1000 && took_ms < 8000); /* not for each of the ten that find no slot */
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    EXPECT_OK(return_micro(m, 0, &e), &e);
    commit_step(m);
    EXPECT_OK(shd_digest(m, got, NULL, &e), &e);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(missing_spill_segment_is_said)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    fixture_start_kept(&daemons, 1, "");
    attach_toy(daemons.address, &s, &m);
    EXPECT_OK(return_step(m, downward, 2, &e), &e);
    EXPECT_SOON(has_spilled());
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    shd_close(s);
    fixture_ask(&daemons, KEEPER_FORGET, 0, "-spill");
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
    EXPECT_STATUS(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "no spill segment");
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Clients that come and are killed -----------------------------------------------------------
 */

/* Attach, leave a gradient that waits, say so, and wait for the end; for more slots, if stuck. */
__attribute__((noreturn)) static void doomed_client(uint32_t micro, bool stuck, int say_fd)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    if (try_connect(daemons.address, TIMEOUT_MS, &s, &e) != SHD_OK ||
        shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e) != SHD_OK ||
        return_unit(m, micro, 1, &e) != SHD_OK)
        fprintf(stderr, "client: %s\n", e.text);
    else if (write(say_fd, "", 1) == 1 && (!stuck || return_micro(m, micro, &e) == SHD_OK))
        pause();
    _exit(1);
}

/* until_spilled: it lives until its gradient is. */
static void kill_client(uint32_t micro, bool until_spilled)
{
    int fds[2];
    char byte;
    CHECK(pipe(fds) == 0);
    const pid_t pid = test_fork();
    if (pid == 0)
        doomed_client(micro, until_spilled, fds[1]);
    close(fds[1]);
    EXPECT_EQ(read(fds[0], &byte, 1), 1);
    if (until_spilled)
        EXPECT_SOON(has_spilled());
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(fds[0]);
}

/* What the daemon has when nobody is there: the least of several looks, for what was asked of it
 * takes a moment to go. */
static void count_idle(pid_t pid, int *ret_fds, int *ret_maps)
{
    EXPECT_SOON(!has_sessions());
    *ret_fds = *ret_maps = INT_MAX;
    for (int i = 0; i < 20; i++) {
        const int fds = count_fds(pid), maps = count_segment_maps(pid);
        *ret_fds = fds < *ret_fds ? fds : *ret_fds;
        *ret_maps = maps < *ret_maps ? maps : *ret_maps;
        sleep_ms(10);
    }
}

TEST(thousand_clients_killed_leave_nothing_behind)
{
    int fds, maps;
    char want[65], got[65];
    fixture_start_kept(&daemons, 1, "");
    /* Any of the others may live until its gradient is spilled, too: the segment is there before.
     */
    kill_client(2, /* until_spilled= */ true);
    for (int i = 0; i < 50; i++)
        kill_client(3, /* until_spilled= */ false);
    const pid_t pid = daemons.pids[0];
    count_idle(pid, &fds, &maps);
    const long rss = rss_kib(pid);
    for (int i = 0; i < 1000; i++)
        kill_client(3, /* until_spilled= */ false);
    expect_daemon_idle(pid, fds, maps);
    printf("  %d descriptors, %d maps, %ld KiB; before %ld KiB\n", fds, maps, rss_kib(pid), rss);
#ifndef __SANITIZE_ADDRESS__
    EXPECT(rss_kib(pid) < rss + 4096);
#endif
    ordered_steps("local:", upward, 1, want);
    ordered_steps(daemons.address, upward, 1, got); /* one of theirs still waits */
    EXPECT_STR(got, want);
    fixture_stop(&daemons);
}

TEST_MAIN()
