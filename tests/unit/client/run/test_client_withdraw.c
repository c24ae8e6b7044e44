/* Openings that are given up, refused by one owner, or left by who is killed: whatever an owner is
 * still at goes, so that the next one can make the model. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STOPPED_MS 200

static const struct pt_model pt = {
    .name = "begun", .publish = "f32", .accumulate = 1, .frozen = true
};

struct opening {
    shd_session *other;
    pid_t wakes; /* the owner that was stopped; 0: none was */
    bool stop;   /* idle: break the wait off */
};

/* Of each unit the first element; the others are what the memory had. */
static int fill(void *ctx, uint32_t unit, float *values)
{
    (void)ctx;
    values[0] = (float)unit;
    return 0;
}

static int open_with(shd_session *s, int (*how)(void *, uint32_t, float *), void *ctx,
                     struct shd_err *e)
{
    const struct shd_open_options o = {
        .size = sizeof o, .spec_json = pt_spec(&pt), .fill = how, .ctx = ctx, .wait_ms = PATIENT_MS
    };
    shd_model *m;
    bool created = false;
    const int r = shd_model_open_with(s, &o, &m, &created, e);
    if (r == SHD_OK)
        EXPECT(created);
    return r;
}

/* Owner 0 reads what comes meanwhile all at once, when it goes on. */
static void stop_for_a_while(struct opening *o)
{
    const pid_t late = daemons.pids[0];
    kill(late, SIGSTOP);
    o->wakes = fork();
    CHECK(o->wakes >= 0);
    if (o->wakes == 0) {
        sleep_ms(STOPPED_MS);
        kill(late, SIGCONT);
        _exit(0);
    }
}

static void expect_end(pid_t pid)
{
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
}

/* What `how` gives up leaves nothing: the model can be made at once, by who is first there. */
static void expect_gone(int (*how)(void *, uint32_t, float *), bool by_other)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    struct opening o = { .other = attach(PATIENT_MS) };
    EXPECT_STATUS(open_with(s, how, &o, &e), SHD_EINTERNAL);
    expect_end(o.wakes);
    EXPECT_OK(open_with(by_other ? o.other : s, fill, NULL, &e), &e);
    shd_close(o.other);
    shd_close(s);
    fixture_stop(&daemons);
}

static int give_up_at_once(void *ctx, uint32_t unit, float *values)
{
    if (unit > 0)
        return 7;
    stop_for_a_while(ctx);
    return fill(NULL, unit, values);
}

/* One daemon reads a unit, and that all is given up, at the same time. */
TEST(what_is_given_up_goes_where_a_daemon_is_still_at_it)
{
    expect_gone(give_up_at_once, /* by_other= */ true);
}

static int refused_by_one(void *ctx, uint32_t unit, float *values)
{
    struct opening *o = ctx;
    struct shd_err e = { 0 };
    shd_model *m;
    (void)unit;
    (void)values;
    stop_for_a_while(o);
    EXPECT_STATUS(shd_model_open(o->other, pt_spec(&pt), &m, &e), SHD_ENOENT);
    return 7;
}

/* One daemon has refused, the other one has not read the request yet. */
TEST(what_is_refused_by_one_owner_is_not_opened_by_another_later)
{
    expect_gone(refused_by_one, /* by_other= */ false);
}

/* By a session that would wait without end: one daemon has refused, the other one is stopped, and
 * reads all that was asked of it when everybody has given up. */
static int refused_meanwhile(void *ctx, uint32_t unit, float *values)
{
    const struct opening *o = ctx;
    struct shd_err e = { 0 };
    shd_model *m;
    (void)unit;
    (void)values;
    kill(daemons.pids[0], SIGSTOP);
    EXPECT_STATUS(shd_model_open(o->other, pt_spec(&pt), &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "(daemon cpu0 is silent: what was asked of it is withdrawn)");
    return 7;
}

static void count_gone(void *ctx, const struct shd_event *event)
{
    uint32_t *gone = ctx;
    if (event->kind == SHD_EVENT_GONE && strcmp(event->daemon, "cpu0") == 0 &&
        strstr(event->text, "it did not answer OpenModel, which was given up") != NULL)
        ++*gone;
}

TEST(what_is_withdrawn_from_a_silent_owner_is_never_opened)
{
    uint32_t gone = 0;
    const struct shd_options options = {
        .size = sizeof options, .address = daemons.address, .event = count_gone, .event_ctx = &gone
    };
    for (int i = 0; i < 2; i++) {
        struct shd_err e = { 0 };
        shd_model *m;
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS);
        struct opening o = { .wakes = 0 };
        EXPECT_OK(shd_connect(&options, &o.other, &e), &e);
        EXPECT_STATUS(open_with(s, refused_meanwhile, &o, &e), SHD_EINTERNAL);
        EXPECT_EQ(gone, i + 1);
        kill(daemons.pids[0], SIGCONT);
        EXPECT_STATUS(shd_model_attach(o.other, "begun", &m, &e), SHD_ENOENT);
        EXPECT_OK(open_with(s, fill, NULL, &e), &e);
        shd_close(o.other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(refusal_is_told_where_another_owner_is_silent)
{
    struct shd_err e = { 0 };
    struct pt_model other = pt;
    shd_model *m;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *short_one = attach(test_paced(600));
    EXPECT_OK(shd_model_open(s, pt_spec(&pt), &m, &e), &e);
    other.publish = "bf16";
    kill(daemons.pids[0], SIGSTOP);
    const int r = shd_model_open(short_one, pt_spec(&other), &m, &e);
    kill(daemons.pids[0], SIGCONT);
    EXPECT_STATUS(r, SHD_ESPEC);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "bf16");
    EXPECT_HAS(e.text, "(daemon cpu0 is silent: what was asked of it is withdrawn)");
    shd_close(short_one);
    shd_close(s);
    fixture_stop(&daemons);
}

static bool cpu1_says(const char *line)
{
    struct http_reply metrics = http_get(&daemons, 1, "/metrics");
    const bool says = metrics.body != NULL && strstr(metrics.body, line) != NULL;
    free(metrics.text);
    return says;
}

/* By the metrics of the others it has not died. */
TEST(who_has_hung_up_on_an_owner_says_goodbye_to_the_others)
{
    struct shd_err e = { 0 };
    struct pt_model other = pt;
    shd_model *m;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *leaves = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, pt_spec(&pt), &m, &e), &e);
    other.publish = "bf16";
    kill(daemons.pids[0], SIGSTOP);
    EXPECT_STATUS(shd_model_open(leaves, pt_spec(&other), &m, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "(daemon cpu0 is silent: what was asked of it is withdrawn)");
    shd_close(leaves);
    EXPECT_SOON(cpu1_says("shardd_sessions{device=\"cpu1\"} 1\n"));
    EXPECT(cpu1_says("shardd_session_deaths_total{device=\"cpu1\"} 0\n"));
    kill(daemons.pids[0], SIGCONT);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Broken off ---------------------------------------------------------------------------------
 */

static int idle(void *ctx)
{
    const struct opening *o = ctx;
    return o->stop;
}

static int break_off(void *ctx, uint32_t unit, float *values)
{
    struct opening *o = ctx;
    if (unit == 1) {
        o->stop = true;
        stop_for_a_while(o);
    }
    return fill(NULL, unit, values);
}

/* While owner 0 is asked to begin, or has a unit that it has not read yet. The session lives on. */
TEST(what_idle_breaks_off_is_dropped)
{
    for (int begun = 0; begun < 2; begun++) {
        struct shd_err e = { 0 };
        struct opening o = { .stop = false };
        const struct shd_options options = {
            .size = sizeof options, .address = daemons.address, .idle = idle, .idle_ctx = &o
        };
        shd_session *s;
        fixture_start(&daemons, 2, NULL);
        EXPECT_OK(shd_connect(&options, &s, &e), &e);
        o.other = attach(PATIENT_MS);
        if (!begun) {
            stop_for_a_while(&o);
            o.stop = true;
        }
        EXPECT_STATUS(open_with(s, break_off, &o, &e), SHD_ECANCELED);
        o.stop = false;
        expect_end(o.wakes);
        EXPECT_OK(open_with(o.other, fill, NULL, &e), &e);
        shd_close(o.other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

#ifdef SHD_FAIL_POINTS
static void stop_when_filled(int index)
{
    (void)index;
    setenv("SHARDD_FAIL", "model:filled!", /* overwrite= */ 1);
}

static pid_t fork_opener(void)
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    if (try_connect(daemons.address, PATIENT_MS, &s, &e) == SHD_OK)
        shd_model_open(s, pt_spec(&pt), &m, &e);
    fprintf(stderr, "opener: %s\n", e.text);
    _exit(1);
}

/* A spec's own start values: all owners have them when who wanted the model is killed. */
TEST(model_is_dropped_whose_opener_dies_while_it_is_filled)
{
    struct shd_err e = { 0 };
    shd_model *m;
    int status;
    fixture_start(&daemons, 2, stop_when_filled);
    const pid_t pid = fork_opener();
    for (int d = 0; d < 2; d++) {
        EXPECT_EQ(waitpid(daemons.pids[d], &status, WUNTRACED), daemons.pids[d]);
        EXPECT(WIFSTOPPED(status));
    }
    kill(pid, SIGKILL);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    for (int d = 0; d < 2; d++)
        kill(daemons.pids[d], SIGCONT);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_attach(s, "begun", &m, &e), SHD_ENOENT);
    EXPECT_OK(open_with(s, fill, NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}
#endif

TEST_MAIN()
