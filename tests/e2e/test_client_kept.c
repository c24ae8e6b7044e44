/* Real daemons under a real keeper (`shardctl up`), killed while workers train: the same bits as in
 * one process, arrays that stay what they are, nothing that piles up. */
#include <fcntl.h>
#include <inttypes.h>
#include <sys/wait.h>

#include "client/paths/map.h"
#include "client/paths/path.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "tests/lib/child.h"
#include "tests/lib/client_toy.h"
#include "tests/lib/ctl_run.h"

#define DAEMONS 2

static char dir[128];

/* Whom a test stops, only the test lets go on. */
static void start(void)
{
    snprintf(dir, sizeof dir, "%s/kept", base);
    const char *state = getenv("SHD_TEST_STATE"); /* as ctest's client_kept_file has it */
    ctl(ARGS("up", "--daemons", "2", "--max-restarts", "1000", "--watchdog", "0", "--state",
             state != NULL ? state : "memory", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
}

static void stop(void)
{
    ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    EXPECT_EQ(leftovers(), 0);
}

/* The parent of its daemons. */
static pid_t pid_of_keeper(void)
{
    char path[64];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)daemon_pid(dir, 0));
    FILE *f = fopen(path, "re");
    CHECK(f != NULL && fscanf(f, "%*d (%*[^)]) %*c %d", &pid) == 1 && pid > 1);
    fclose(f);
    return pid;
}

static bool kill_daemon(int index)
{
    const pid_t pid = daemon_pid(dir, index);
    return pid > 1 && kill(pid, SIGKILL) == 0;
}

/* A child that kills `kills` daemons at random times. */
static pid_t start_killer(uint64_t seed, int kills, long pause_ms_max)
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    while (kills > 0) {
        sleep_ms((long)(test_random(&seed) % (uint64_t)pause_ms_max));
        kills -= kill_daemon((int)(test_random(&seed) >> 32) % DAEMONS);
    }
    _exit(0);
}

static shd_session *attach(void)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = dir,
                                         .timeout_ms = TEST_HANG_MS };
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

static shd_model *open_toy(shd_session *s)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), &e);
    return m;
}

static void expect_digest(shd_model *m)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), (uint32_t)shd_step(m), want);
    EXPECT_OK(shd_digest(m, got, NULL, &e), &e);
    EXPECT_STR(got, want);
}

/* -- One worker -------------------------------------------------------------------------------- */

static void train_under_fire(uint64_t seed, enum shd_path path, bool elastic)
{
    struct shd_err e = { 0 };
    const struct shd_policy policy = { .size = sizeof policy, .path = path };
    start();
    shd_session *s = attach();
    shd_model *m = open_toy(s);
    EXPECT_OK(shd_set_policy(m, &policy, &e), &e);
    const pid_t killer = start_killer(seed, /* kills= */ 15, /* pause_ms_max= */ 80);
    int status;
    while (waitpid(killer, &status, WNOHANG) == 0 || shd_step(m) < 20) {
        struct toy toy = { .m = m, .fail_micro = -1 };
        const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                             toy_backward,   toy_metrics, NULL };
        const struct shd_update update = toy_update(shd_step(m));
        if (elastic)
            EXPECT_OK(shd_run_step_elastic(m, &compute, &update, NULL, &e), &e);
        else
            EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        sleep_ms(2);
    }
    expect_digest(m);
    shd_close(s);
    stop();
}

TEST(steps_while_daemons_are_killed)
{
    train_under_fire(test_seed(1), SHD_PATH_MAP, /* elastic= */ false);
}

TEST(steps_by_copy_while_daemons_are_killed)
{
    train_under_fire(test_seed(2), SHD_PATH_COPY, /* elastic= */ false);
}

TEST(leased_steps_while_daemons_are_killed)
{
    train_under_fire(test_seed(3), SHD_PATH_MAP, /* elastic= */ true);
}

/* -- Waits that have no end -------------------------------------------------------------------- */

/* A session of a user who has set no limit, but one that would not wait long where nobody keeps its
 * daemons. */
static shd_session *attach_patient(uint64_t timeout_ms)
{
    const struct shd_options options = { .size = sizeof options, .address = dir };
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT(s->hub->patient);
    limit_waits(s, timeout_ms);
    return s;
}

/* Stop a process now, and let it go on in ms. */
static pid_t stop_for(pid_t stopped, uint64_t ms)
{
    EXPECT(stopped > 1 && kill(stopped, SIGSTOP) == 0);
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    sleep_ms((long)ms);
    _exit(kill(stopped, SIGCONT) != 0);
}

TEST(stopped_daemon_ends_no_wait_while_its_state_is_kept)
{
    const uint64_t limit_ms = test_paced(300);
    struct shd_err e = { 0 };
    int status;
    start();
    shd_session *s = attach_patient(limit_ms);
    shd_model *m = open_toy(s);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    const uint64_t start_ms = test_now_ms();
    const pid_t pid = stop_for(daemon_pid(dir, 1), 3 * limit_ms);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT(test_now_ms() - start_ms >= 3 * limit_ms);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    expect_digest(m);
    shd_close(s);
    stop();
}

TEST(daemon_that_is_away_for_long_is_waited_for_while_its_keeper_lives)
{
    const uint64_t limit_ms = test_paced(300);
    struct shd_err e = { 0 };
    int status;
    start();
    shd_session *s = attach_patient(limit_ms);
    shd_model *m = open_toy(s);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    const pid_t pid = stop_for(pid_of_keeper(), 3 * limit_ms); /* so nobody starts it again */
    EXPECT(kill_daemon(0));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    expect_digest(m);
    shd_close(s);
    stop();
}

/* Longer than a daemon that was never there is waited for: a worker that is started meanwhile is
 * not to end the run. */
TEST(new_session_waits_for_a_daemon_that_its_keeper_will_start_again)
{
    int status;
    start();
    const pid_t pid = stop_for(pid_of_keeper(), 11000);
    EXPECT(kill_daemon(0));
    shd_session *s = attach_patient(test_paced(300));
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    shd_close(s);
    stop();
}

TEST(daemon_that_went_with_its_keeper_is_not_waited_for)
{
    struct shd_err e = { 0 };
    start();
    shd_session *s = attach_patient(test_paced(300));
    shd_model *m = open_toy(s);
    kill(pid_of_keeper(), SIGKILL);
    m->step++; /* a step that will not come */
    EXPECT_STATUS(shd_acquire(m, 1, NULL, &e), SHD_EGONE);
    m->step--;
    EXPECT_HAS(e.text, "is gone with its keeper: lost at ");
    shd_close(s);
    ctl(ARGS("up", "--runtime-dir", dir)); /* cleans up behind the dead one */
    stop();
}

struct lines {
    char text[4096];
    uint32_t count;
};

static void take_line(void *ctx, const char *line)
{
    struct lines *l = ctx;
    const size_t used = strlen(l->text);
    snprintf(l->text + used, sizeof l->text - used, "%s\n", line);
    l->count++;
}

TEST(long_wait_says_who_it_is_for_in_lines_and_in_its_error)
{
    static struct lines lines;
    struct shd_err e = { 0 };
    char want[80];
    int status;
    start();
    const struct shd_options options = { .size = sizeof options,
                                         .address = dir,
                                         .timeout_ms = TEST_HANG_MS,
                                         .waits = take_line,
                                         .waits_ctx = &lines };
    shd_session *s;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    blame_every(s->blame, test_paced(1200) * NS_PER_MS);
    shd_model *m = open_toy(s);
    limit_waits(s, test_paced(4000));
    /* Until the step has failed; should this test end before that, at some time. */
    const pid_t stopped = daemon_pid(dir, 1), pid = stop_for(stopped, test_paced(60000));
    EXPECT_STATUS(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), SHD_ETIMEDOUT);
    snprintf(want, sizeof want, "daemon cpu1 (pid %d) is stopped", (int)stopped);
    EXPECT_HAS(e.text, want);
    EXPECT(lines.count >= 2);
    EXPECT_HAS(lines.text, want);
    EXPECT_HAS(lines.text, " lets it go on; after kill -9 ");
    EXPECT(strncmp(lines.text, "shd: waiting for ", strlen("shd: waiting for ")) == 0);
    EXPECT(kill(pid, SIGKILL) == 0 && kill(stopped, SIGCONT) == 0);
    shd_close(s);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    stop();
}

TEST(limit_of_the_user_ends_a_wait)
{
    const struct shd_options options = { .size = sizeof options, .address = dir };
    struct shd_err e = { 0 };
    char seconds[24];
    shd_session *s;
    start();
    setenv("SHARDD_TIMEOUT", "1 h", 1);
    EXPECT_STATUS(shd_connect(&options, &s, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "SHARDD_TIMEOUT is '1 h': a number of seconds");
    snprintf(seconds, sizeof seconds, "%" PRIu64, test_paced(1000) / 1000);
    setenv("SHARDD_TIMEOUT", seconds, 1);
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    unsetenv("SHARDD_TIMEOUT");
    shd_model *m = open_toy(s);
    const pid_t stopped = daemon_pid(dir, 1);
    EXPECT(kill(stopped, SIGSTOP) == 0);
    EXPECT_STATUS(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), SHD_ETIMEDOUT);
    EXPECT(kill(stopped, SIGCONT) == 0);
    EXPECT_HAS(e.text, "000 ms");
    shd_close(s);
    stop();
}

/* -- What is held ------------------------------------------------------------------------------ */

static void await_back(shd_model *m)
{
    struct shd_err e = { 0 };
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    do {
        EXPECT_OK(m->session->control->poll(m, &e), &e);
        sleep_ms(2);
    } while (m->session->hub->down_count > 0 && test_now_ms() < deadline);
    EXPECT_EQ(m->session->hub->down_count, 0);
}

/* Both, until the session has lost each of them and has it back. */
static void kill_all(shd_model *m)
{
    const struct link *links = m->session->hub->links;
    struct shd_err e = { 0 };
    uint32_t epochs[DAEMONS];
    for (int i = 0; i < DAEMONS; i++) {
        epochs[i] = links[i].epoch;
        EXPECT(kill_daemon(i));
    }
    for (int i = 0; i < DAEMONS; i++) {
        const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
        while (links[i].epoch == epochs[i] && test_now_ms() < deadline)
            EXPECT_OK(m->session->control->poll(m, &e), &e);
        EXPECT(links[i].epoch != epochs[i]);
    }
    await_back(m);
}

/* Each gradient is written half before and half after both daemons are killed. */
static void half_and_half(shd_model *m, uint32_t micro, uint32_t unit)
{
    struct shd_err e = { 0 };
    struct toy toy = { .m = m, .fail_micro = -1 };
    const uint64_t elems = m->spec->units[unit].elems;
    const void *params;
    float *grad, *again;
    float *mine = malloc(elems * sizeof *mine), *before = malloc(elems * sizeof *before);
    EXPECT_OK(shd_acquire(m, 0, NULL, &e), &e);
    EXPECT_OK(shd_acquire(m, unit, &params, &e), &e);
    memcpy(before, params, elems * sizeof *before);
    EXPECT_OK(shd_grad(m, micro, unit, &grad, &e), &e);
    EXPECT_EQ(toy_backward(&toy, micro, unit, params, grad), 0);
    memcpy(mine, grad, elems * sizeof *mine);
    memset(grad + elems / 2, 0xff, (elems - elems / 2) * sizeof *grad); /* to be written again */
    kill_all(m);
    EXPECT(memcmp(before, params, elems * sizeof *before) == 0);
    EXPECT_OK(shd_grad(m, micro, unit, &again, &e), &e);
    EXPECT(again == grad);
    EXPECT(memcmp(grad, mine, elems / 2 * sizeof *grad) == 0);
    memcpy(grad, mine, elems * sizeof *grad);
    EXPECT_OK(shd_return(m, micro, unit, &e), &e);
    shd_release(m, unit);
    shd_release(m, 0);
    free(mine);
    free(before);
}

TEST(arrays_that_are_held_stay_what_they_are)
{
    struct shd_err e = { 0 };
    start();
    shd_session *s = attach();
    shd_model *m = open_toy(s);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++) {
        double metrics[SHD_METRICS_MAX];
        const uint32_t count = toy_metrics(NULL, micro, metrics);
        EXPECT_OK(shd_report(m, micro, metrics, count, &e), &e); /* as toy_step() does */
        for (uint32_t u = shd_units(m); u-- > 0;)
            half_and_half(m, micro, u);
        EXPECT_OK(shd_report(m, micro, metrics, count, &e), &e); /* no harm, no difference */
    }
    const struct shd_update update = toy_update(1);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    expect_digest(m);
    shd_close(s);
    stop();
}

static int count_lines(const char *path, const char *part)
{
    char line[512];
    int count = 0;
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        count += strstr(line, part) != NULL;
    fclose(file);
    return count;
}

static int count_own_fds(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

TEST(nothing_piles_up_from_death_to_death)
{
    struct shd_err e = { 0 };
    int fds = 0, maps = 0;
    const int fds_without = count_own_fds();
    start();
    shd_session *s = attach();
    shd_model *m = open_toy(s);
    for (int death = 0; death < 8; death++) {
        kill_all(m);
        for (int i = 0; i < 3; i++) /* all slots are handed out once */
            EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        if (death == 1) {
            fds = count_own_fds();
            maps = count_lines("/proc/self/maps", "memfd:shardd");
        }
    }
    EXPECT_EQ(count_own_fds(), fds);
    EXPECT_EQ(count_lines("/proc/self/maps", "memfd:shardd"), maps);
    expect_digest(m);
    shd_close(s);
    EXPECT_EQ(count_own_fds(), fds_without);
    EXPECT_EQ(count_lines("/proc/self/maps", "memfd:shardd"), 0);
    stop();
}

/* -- Many workers ------------------------------------------------------------------------------ */

__attribute__((noreturn)) static void be_worker(uint64_t steps, long slow_ms)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct shd_err e = { 0 };
    shd_session *s = attach();
    shd_model *m = open_toy(s);
    while (shd_step(m) < steps) {
        struct toy toy = { .m = m, .fail_micro = -1 };
        const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                             toy_backward,   toy_metrics, NULL };
        const struct shd_update update = toy_update(shd_step(m));
        if (shd_run_step_elastic(m, &compute, &update, NULL, &e) != SHD_OK) {
            fprintf(stderr, "worker: %s\n", e.text);
            _exit(1);
        }
        sleep_ms(slow_ms);
    }
    shd_close(s);
    _exit(0);
}

static pid_t start_worker(uint64_t steps, long slow_ms)
{
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        be_worker(steps, slow_ms);
    return pid;
}

/* What steps came to outlives the daemons, and says of each what its commit said. */
TEST(the_history_of_steps_survives_kills)
{
    struct shd_result results[6];
    struct shd_step_row rows[8] = { { .size = sizeof *rows } };
    struct shd_err e = { 0 };
    uint32_t count;
    start();
    shd_session *s = attach();
    shd_model *m = open_toy(s);
    for (uint32_t k = 0; k < 6; k++) {
        results[k].size = sizeof results[k];
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &results[k], &e), &e);
        if (k == 2 || k == 4)
            EXPECT(kill_daemon(0) && kill_daemon(1));
    }
    uint64_t from = 0;
    EXPECT_OK(shd_history(m, &from, rows, ARRAY_SIZE(rows), &count, &e), &e);
    EXPECT(count == 6 && from == 6);
    for (uint32_t k = 0; k < 6; k++) {
        EXPECT(rows[k].step == k && !rows[k].skipped && rows[k].metric_count == 2);
        EXPECT(rows[k].grad_norm == results[k].grad_norm && rows[k].lr == toy_update(k).lr);
        EXPECT(memcmp(rows[k].metrics, results[k].metrics, 2 * sizeof(double)) == 0);
        EXPECT(k == 0 || rows[k].time_ns > rows[k - 1].time_ns);
    }
    from = 4;
    EXPECT_OK(shd_history(m, &from, rows, 1, &count, &e), &e);
    EXPECT(count == 1 && from == 5 && rows[0].step == 4);
    from = 99;
    EXPECT_OK(shd_history(m, &from, rows, 1, &count, &e), &e);
    EXPECT(count == 0);
    shd_close(s);
    stop();
}

#define WORKERS 3
#define STEPS   150u

/* Workers and daemons are killed alike; dead workers are replaced. */
TEST(elastic_workers_come_and_go_while_daemons_are_killed)
{
    uint64_t seed = test_seed(11);
    pid_t pids[WORKERS];
    int kills = 0, done = 0, status;
    start();
    const pid_t killer = start_killer(test_seed(5), /* kills= */ 10, /* pause_ms_max= */ 150);
    for (int i = 0; i < WORKERS; i++)
        pids[i] = start_worker(STEPS, i);
    while (done < WORKERS) {
        sleep_ms((long)(test_random(&seed) % 100));
        const int i = (int)(test_random(&seed) >> 33) % WORKERS;
        if (kills < 10 && pids[i] > 0 && kill(pids[i], SIGKILL) == 0)
            kills++;
        for (int k = 0; k < WORKERS; k++) {
            if (pids[k] <= 0 || waitpid(pids[k], &status, WNOHANG) == 0)
                continue;
            if (WIFSIGNALED(status)) {
                pids[k] = start_worker(STEPS, k);
                continue;
            }
            EXPECT_EQ(WEXITSTATUS(status), 0);
            pids[k] = 0;
            done++;
        }
    }
    EXPECT_EQ(waitpid(killer, &status, 0), killer);
    EXPECT(kills > 0);
    shd_session *s = attach();
    shd_model *m = open_toy(s);
    EXPECT_EQ(shd_step(m), STEPS);
    expect_digest(m);
    shd_close(s);
    stop();
}

int main(int argc, char **argv)
{
    return ctl_main(argc, argv);
}
