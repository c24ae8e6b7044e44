/* Gradients that wait for earlier ones, in the daemon's own memory (daemon/model/spill.h): the same
 * bits whatever the order, whichever daemon is killed, and whichever client; nothing is left
 * behind.
 */
#include <limits.h>
#include <sys/prctl.h>
#include <sys/wait.h>

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
    ordered_steps(daemons.dir, downward, 3, got);
    EXPECT_STR(got, want);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 4);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL); /* and with no keeper */
    ordered_steps(daemons.dir, downward, 3, got);
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
        attach_toy(daemons.dir, &s, &m);
        EXPECT_EQ(shd_step(m), count - 1);
        EXPECT_OK(return_step(m, downward, count, &e), &e);
        sleep_ms(20); /* the last ones too */
        fixture_restart(&daemons, 0);
        shd_close(s);
        ordered_steps(daemons.dir, upward, count, got);
    }
    EXPECT_STR(got, want);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
TEST(killed_while_it_spills_goes_on_with_the_same_bits)
{
    static const char *const fails[] = {
        "spill:make:before;",    "spill:make:after;",    "keeper:store:before@4;",
        "keeper:store:after@4;", "step:cell:before;",    "step:cell:before@4;",
        "step:cell:after;",      "step:cell:after@5;",   "spill:punch:before;",
        "spill:punch:after;",    "kern:done:before@20;", "spill:punch:before@2;",
    };
    char want[65], got[65];
    long kills = 0;
    ordered_steps("local:", upward, 3, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        fixture_start_kept(&daemons, 1, fails[i]);
        ordered_steps(daemons.dir, downward, 3, got);
        kills += fixture_ask(&daemons, KEEPER_STARTS, 0, "") - 1;
        if (strcmp(got, want) != 0)
            FAIL("after %s: another digest", fails[i]);
        fixture_stop(&daemons);
    }
    EXPECT_EQ(kills, ARRAY_SIZE(fails));
}
#endif

static bool has_spilled(void)
{
    const struct http_reply r = http_get(&daemons, 0, "/status");
    EXPECT_EQ(r.code, 200);
    const bool spilled = strstr(r.body, "\"spilled\":") != NULL &&
                         strstr(r.body, "\"spilled\":0") == NULL;
    free(r.text);
    return spilled;
}

TEST(missing_spill_segment_is_said)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    fixture_start_kept(&daemons, 1, "");
    attach_toy(daemons.dir, &s, &m);
    EXPECT_OK(return_step(m, downward, 2, &e), &e);
    EXPECT_SOON(has_spilled());
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    shd_close(s);
    fixture_ask(&daemons, KEEPER_FORGET, 0, "-spill");
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &s, &e), &e);
    EXPECT_STATUS(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "no spill segment");
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Clients that come and are killed -----------------------------------------------------------
 */

/* Attach, leave a gradient that waits, say so, and wait for the end. */
__attribute__((noreturn)) static void doomed_client(uint32_t micro, int say_fd)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (try_connect(daemons.dir, TIMEOUT_MS, &s, &e) != SHD_OK ||
        shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e) != SHD_OK ||
        return_unit(m, micro, 1, &e) != SHD_OK)
        fprintf(stderr, "client: %s\n", e.text);
    else if (write(say_fd, "", 1) == 1)
        pause();
    _exit(1);
}

/* until_spilled: it lives until its gradient is. */
static void kill_client(uint32_t micro, bool until_spilled)
{
    int fds[2];
    char byte;
    CHECK(pipe(fds) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        doomed_client(micro, fds[1]);
    close(fds[1]);
    EXPECT_EQ(read(fds[0], &byte, 1), 1);
    if (until_spilled)
        EXPECT_SOON(has_spilled());
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(fds[0]);
}

static bool has_sessions(void)
{
    const struct http_reply r = http_get(&daemons, 0, "/status");
    EXPECT_EQ(r.code, 200);
    const bool none = strstr(r.body, "\"sessions\":[]") != NULL;
    free(r.text);
    return !none;
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
    ordered_steps(daemons.dir, upward, 1, got); /* one of theirs still waits */
    EXPECT_STR(got, want);
    fixture_stop(&daemons);
}

TEST_MAIN()
