/* Waits: each can be broken off by shd_options.idle, soon, and its call then made again. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/path.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

/* -- Breaking off ----------------------------------------------------------------------------- */

static struct {
    bool stops;       /* at the second call */
    uint32_t calls;   /* of one wait */
    uint64_t last_ms; /* of the last call, or of the wait's beginning */
    uint64_t gap_ms;  /* the longest between two */
} idle;

static int on_idle(void *ctx)
{
    const uint64_t now_ms = test_now_ms(), gap_ms = now_ms - idle.last_ms;
    (void)ctx;
    idle.gap_ms = gap_ms > idle.gap_ms ? gap_ms : idle.gap_ms;
    idle.last_ms = now_ms;
    idle.calls++;
    return idle.stops && idle.calls >= 2;
}

static void idle_begin(bool stops)
{
    idle.stops = stops;
    idle.calls = 0;
    idle.gap_ms = 0;
    idle.last_ms = test_now_ms();
}

static int idle_connect(const char *address, shd_session **ret, struct shd_err *e)
{
    const struct shd_options options = {
        .size = sizeof options, .address = address, .timeout_ms = PATIENT_MS, .idle = on_idle
    };
    return shd_connect(&options, ret, e);
}

struct waiting { /* what a wait has to do with */
    shd_session *s;
    shd_model *m;
    uint32_t next; /* the next return */
    uint64_t step; /* to be saved */
};

static int wait_open(struct waiting *w, struct shd_err *e)
{
    const struct pt_model other = { .name = "other", .publish = "bf16" };
    shd_model *m;
    const int r = shd_model_open(w->s, pt_spec(&other), &m, e);
    if (r == SHD_OK)
        shd_model_close(m);
    return r;
}

static int wait_attach(struct waiting *w, struct shd_err *e)
{
    shd_model *m;
    shd_session *s = w->s;
    const int r = shd_model_attach(s, shd_model_name(w->m), &m, e);
    return r == SHD_EEXIST ? SHD_OK : r; /* it got as far as to see that it has it */
}

static int wait_commit(struct waiting *w, struct shd_err *e)
{
    const struct shd_update update = toy_update(0);
    return shd_commit(w->m, &update, NULL, e);
}

static int wait_digest(struct waiting *w, struct shd_err *e)
{
    char hex[65];
    return shd_digest(w->m, hex, NULL, e);
}

static int wait_get(struct waiting *w, struct shd_err *e)
{
    float *values = sys_malloc(w->m->spec->units[1].elems * sizeof *values);
    CHECK(values != NULL);
    const int r = shd_get(w->m, 1, SHD_PARAMS, values, NULL, NULL, e);
    free(values);
    return r;
}

static int wait_status(struct waiting *w, struct shd_err *e)
{
    char *json;
    const int r = shd_status(w->s, 1, &json, e);
    if (r == SHD_OK)
        free(json);
    return r;
}

static int wait_save(struct waiting *w, struct shd_err *e)
{
    const struct shd_checkpoint_options options = { .size = sizeof options, .step = w->step };
    return shd_checkpoint(w->m, ckpts, &options, NULL, e);
}

/* Higher ones first: they wait for micro-batch 0, and a stopped daemon spills none of them. */
static int wait_grad(struct waiting *w, struct shd_err *e)
{
    for (; w->next < 3 * shd_units(w->m); w->next++) {
        const uint32_t micro = 3 - w->next / shd_units(w->m), u = w->next % shd_units(w->m);
        float *grad;
        int r = shd_grad(w->m, micro, u, &grad, e);
        if (r != SHD_OK)
            return r;
        memset(grad, 0, w->m->spec->units[u].elems * sizeof *grad);
        r = shd_return(w->m, micro, u, e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

/* Each counts once: the daemon's table of requests is what is full. */
static int wait_return(struct waiting *w, struct shd_err *e)
{
    for (; w->next < 2 * HUB_CALLS_MAX; w->next++) {
        const int r = shd_return_none(w->m, 0, w->next % shd_units(w->m), e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

/* A wait of w that ends only with daemon 1, which is stopped: broken off, more often than a session
 * may leave tickets behind, and then not. */
static void expect_canceled(struct waiting *w, int (*wait)(struct waiting *w, struct shd_err *e))
{
    struct shd_err e = { 0 };
    uint64_t least_ms = UINT64_MAX; /* of the gaps: others may have had the processor in some */
    kill(daemons.pids[1], SIGSTOP);
    for (int again = 0; again < 6; again++) {
        idle_begin(/* stops= */ true);
        EXPECT_STATUS(wait(w, &e), SHD_ECANCELED);
        EXPECT_HAS(e.text, "shd_options.idle");
        EXPECT_EQ(idle.calls, 2);
        least_ms = idle.gap_ms < least_ms ? idle.gap_ms : least_ms;
    }
    EXPECT(least_ms <= test_paced(100));
    kill(daemons.pids[1], SIGCONT);
    idle_begin(/* stops= */ false);
    EXPECT_OK(wait(w, &e), &e);
}

static void return_rest(shd_model *m, uint32_t from)
{
    struct shd_err e = { 0 };
    for (uint32_t micro = from; micro < TOY_MICROS; micro++)
        for (uint32_t u = 0; u < shd_units(m); u++)
            EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
}

TEST(each_wait_for_a_daemon_can_be_broken_off_and_made_again)
{
    struct shd_err e = { 0 };
    struct waiting w = { .next = 0 };
    fixture_start(&daemons, 2, NULL);
    make_ckpts();
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &w.s, &e), &e);
    w.m = open_toy(w.s, toy_spec("f32", TOY_ADAMW));
    expect_canceled(&w, wait_attach);
    expect_canceled(&w, wait_digest);
    expect_canceled(&w, wait_status);
    for (int i = 0; i < 3; i++) /* more than a session's tickets, with no session anew in between */
        expect_canceled(&w, wait_get);
    expect_canceled(&w, wait_save);
    expect_canceled(&w, wait_grad);
    w.next = 0;
    expect_canceled(&w, wait_return);
    return_rest(w.m, 0);
    expect_canceled(&w, wait_commit);
    EXPECT_EQ(shd_step(w.m), 1);
    shd_close(w.s);
    EXPECT_OK(idle_connect(daemons.address, &w.s, &e), &e);
    expect_canceled(&w, wait_open);
    shd_close(w.s);
    remove_ckpts();
    fixture_stop(&daemons);
}

/* More often than a session may have requests open. */
TEST(commit_that_timed_out_again_and_again_goes_on)
{
    const struct shd_update update = toy_update(0);
    struct shd_err e = { 0 };
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    const uint64_t patient_ms = s->timeout_ns / NS_PER_MS;
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    limit_waits(s, 5);
    for (uint32_t again = 0; again < 2 * HUB_CALLS_MAX; again++) {
        EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ETIMEDOUT);
        EXPECT_HAS(e.text, "did not answer Prepare of step 0");
    }
    limit_waits(s, patient_ms);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Owner 0 has offered its segments each time. */
TEST(attaching_that_timed_out_can_be_made_again)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *first = attach(PATIENT_MS), *s = attach(PATIENT_MS);
    const uint64_t patient_ms = s->timeout_ns / NS_PER_MS;
    shd_model *m = open_toy(first, toy_spec("f32", TOY_ADAMW));
    kill(daemons.pids[1], SIGSTOP);
    limit_waits(s, 50);
    for (int again = 0; again < 20; again++)
        EXPECT_STATUS(shd_model_attach(s, "toy", &m, &e), SHD_ETIMEDOUT);
    limit_waits(s, patient_ms);
    kill(daemons.pids[1], SIGCONT);
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    shd_close(s);
    shd_close(first);
    fixture_stop(&daemons);
}

/* What only another worker, or a successor, can end. */
TEST(each_wait_for_others_can_be_broken_off_and_made_again)
{
    struct shd_err e = { 0 };
    shd_session *s;
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 1, want);
    fixture_start_kept(&daemons, 2, "");
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    const struct shd_update update = toy_update(0);
    for (int again = 0; again < 3; again++) {
        idle_begin(true);
        EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ECANCELED);
        m->step++; /* one that is not there yet */
        idle_begin(true);
        EXPECT_STATUS(shd_acquire(m, 1, NULL, &e), SHD_ECANCELED);
        m->step--;
    }
    fixture_ask(&daemons, KEEPER_KILL, 1, "");
    idle_begin(true);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ECANCELED);
    fixture_succeed(&daemons, 1, "");
    idle_begin(false);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Owner 0 has been told of a gradient, owner 1 has no room for one request more: then the
 * micro-batch is given up. */
TEST(return_that_was_broken_off_is_given_up_with_its_lease)
{
    const struct shd_update update = toy_update(0);
    struct shd_err e = { 0 };
    struct waiting w = { .next = 0 };
    enum shd_lease_what what;
    uint32_t micro = 0;
    float *grad;
    fixture_start(&daemons, 2, NULL);
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &w.s, &e), &e);
    w.m = open_toy(w.s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(shd_lease(w.m, &what, &micro, &e), &e);
    EXPECT(what == SHD_LEASE_MICRO && micro == 0);
    EXPECT_OK(shd_grad(w.m, micro, 1, &grad, &e), &e);
    memset(grad, 0, w.m->spec->units[1].elems * sizeof *grad);
    kill(daemons.pids[1], SIGSTOP);
    idle_begin(true);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < 2 * HUB_CALLS_MAX; i++)
        r = shd_return_none(w.m, 3, i % shd_units(w.m), &e);
    EXPECT_STATUS(r, SHD_ECANCELED);
    idle_begin(true);
    EXPECT_STATUS(shd_return(w.m, micro, 1, &e), SHD_ECANCELED);
    kill(daemons.pids[1], SIGCONT);
    idle_begin(false);
    EXPECT_OK(shd_unlease(w.m, micro, &e), &e);
    return_rest(w.m, 0);
    EXPECT_OK(shd_commit(w.m, &update, NULL, &e), &e);
    EXPECT_EQ(w.s->live_bytes, 0);
    shd_close(w.s);
    fixture_stop(&daemons);
}

TEST(fetch_by_copy_can_be_broken_off)
{
    struct shd_err e = { 0 };
    shd_session *s;
    const void *params;
    const struct shd_policy copy = { .size = sizeof copy, .path = SHD_PATH_COPY };
    fixture_start(&daemons, 2, NULL);
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(shd_set_policy(m, &copy, &e), &e);
    m->step++;
    for (int again = 0; again < 3; again++) {
        idle_begin(true);
        EXPECT_STATUS(shd_acquire(m, 1, &params, &e), SHD_ECANCELED);
    }
    m->step--;
    idle_begin(false);
    EXPECT_OK(shd_acquire(m, 1, &params, &e), &e);
    shd_release(m, 1);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(connecting_can_be_broken_off)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    char address[300];
    fixture_start(&daemons, 1, NULL);
    snprintf(address, sizeof address, "%s?cpu0,cpu7", daemons.dir); /* there is no cpu7 */
    idle_begin(true);
    EXPECT_STATUS(idle_connect(address, &s, &e), SHD_ECANCELED);
    EXPECT(s == NULL);
    kill(daemons.pids[0], SIGSTOP);
    idle_begin(true);
    EXPECT_STATUS(idle_connect(daemons.address, &s, &e), SHD_ECANCELED);
    kill(daemons.pids[0], SIGCONT);
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &s, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

static int wait_restore(struct waiting *w, struct shd_err *e)
{
    return shd_restore(w->s, ckpts, NULL, NULL, e);
}

TEST(restoring_can_be_broken_off)
{
    struct shd_err e = { 0 };
    struct waiting w = { .next = 0 };
    fixture_start(&daemons, 2, NULL);
    make_ckpts();
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &w.s, &e), &e);
    w.m = open_toy(w.s, toy_spec("f32", TOY_ADAMW));
    save_ok(w.m, 0);
    shd_close(w.s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL);
    EXPECT_OK(idle_connect(daemons.address, &w.s, &e), &e);
    expect_canceled(&w, wait_restore);
    EXPECT_OK(shd_model_attach(w.s, NULL, &w.m, &e), &e);
    shd_close(w.s);
    remove_ckpts();
    fixture_stop(&daemons);
}

/* -- Events ----------------------------------------------------------------------------------- */

static struct {
    uint32_t count;
    struct shd_event last[8];
    char text[8][300], daemon[8][16];
} events;

static void on_event(void *ctx, const struct shd_event *event)
{
    const uint32_t i = events.count++ % 8;
    (void)ctx;
    EXPECT_EQ(event->size, sizeof *event);
    events.last[i] = *event;
    snprintf(events.text[i], sizeof events.text[i], "%s", event->text);
    snprintf(events.daemon[i], sizeof events.daemon[i], "%s", event->daemon);
}

TEST(daemon_that_goes_and_comes_back_and_being_overtaken_are_told)
{
    struct shd_err e = { 0 };
    shd_session *s;
    const struct shd_update update = toy_update(0);
    const struct shd_options options = { .size = sizeof options, .event = on_event };
    fixture_start_kept(&daemons, 2, "");
    struct shd_options o = options;
    o.address = daemons.address;
    o.timeout_ms = PATIENT_MS;
    events.count = 0;
    EXPECT_OK(shd_connect(&o, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    EXPECT_EQ(events.count, 0);
    fixture_restart(&daemons, 1);
    train_steps(m, 1);
    EXPECT_EQ(events.count, 2);
    EXPECT(events.last[0].kind == SHD_EVENT_GONE && events.last[1].kind == SHD_EVENT_BACK);
    EXPECT_STR(events.daemon[0], "cpu1");
    EXPECT_STR(events.daemon[1], "cpu1");
    EXPECT_HAS(events.text[0], "daemon cpu1 is gone: ");
    EXPECT_HAS(events.text[1], "daemon cpu1 came back after ");
    EXPECT(events.last[1].seconds > 0 && events.last[1].seconds < (double)TEST_HANG_MS / 1000);
    shd_session *other = attach(PATIENT_MS);
    train_steps(open_toy(other, toy_spec("f32", TOY_ADAMW)), 2);
    shd_close(other);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_EQ(events.count, 3);
    EXPECT(events.last[2].kind == SHD_EVENT_OVERTAKEN && events.last[2].step == 2);
    EXPECT_STR(shd_version(), SHD_VERSION);
    shd_close(s);
    EXPECT_EQ(events.count, 3);
    fixture_stop(&daemons);
}

/* The other worker takes much longer than a wait of this session may. */
static pid_t return_late(uint64_t ms)
{
    struct shd_err e = { 0 };
    const struct shd_update update = toy_update(0);
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    sleep_ms((long)ms);
    for (uint32_t u = 0; u < shd_units(m); u++)
        if (shd_return_none(m, 1, u, &e) != SHD_OK)
            _exit(1);
    _exit(shd_commit(m, &update, NULL, &e) != SHD_OK);
}

TEST(who_is_slow_is_named_and_ends_no_wait_that_has_no_limit)
{
    const uint64_t limit_ms = test_paced(200);
    const struct shd_update update = toy_update(0);
    struct shd_err e = { 0 };
    shd_session *s;
    int status;
    fixture_start(&daemons, 2, NULL); /* nobody keeps their memory */
    struct shd_options o = { .size = sizeof o, .address = daemons.address, .event = on_event };
    for (int limited = 0; limited < 2; limited++) {
        o.timeout_ms = limited == 1 ? PATIENT_MS : 0;
        EXPECT_OK(shd_connect(&o, &s, &e), &e);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        for (uint32_t u = 0; u < shd_units(m); u++)
            for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
                if (micro != 1)
                    EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
        limit_waits(s, limit_ms);
        blame_every(s->blame, limit_ms / 2 * NS_PER_MS);
        events.count = 0;
        if (limited == 1) {
            EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ETIMEDOUT);
        } else {
            const uint64_t start_ms = test_now_ms();
            const pid_t pid = return_late(3 * limit_ms);
            EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
            EXPECT(test_now_ms() - start_ms >= 3 * limit_ms);
            EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
            EXPECT(events.count > 0 && events.last[0].kind == SHD_EVENT_WAITS);
            EXPECT_HAS(events.text[0], "shd: waiting for ");
        }
        shd_close(s);
    }
    fixture_stop(&daemons);
}

static uint32_t silent_lines;
static pid_t silent;       /* 0: nobody is */
static uint64_t silent_ms; /* since then */
static int (*reopen)(void *ctx, struct link *link, struct shd_err *e);

static int reopen_stopped(void *ctx, struct link *link, struct shd_err *e)
{
    if (silent_lines == 0 && silent == 0) {
        silent = link->pid;
        silent_ms = test_now_ms();
        kill(silent, SIGSTOP);
    }
    return reopen(ctx, link, e);
}

static void end_silence(void)
{
    if (silent != 0)
        kill(silent, SIGCONT);
    silent = 0;
}

/* Where nobody is named. */
static int idle_too_long(void *ctx)
{
    (void)ctx;
    if (test_now_ms() - silent_ms > test_paced(3000))
        end_silence();
    return 0;
}

static void go_on_when_named(void *ctx, const char *line)
{
    char want[80];
    (void)ctx;
    snprintf(want, sizeof want, " s: daemon cpu1 (pid %d) is stopped; ", (int)silent);
    silent_lines += strstr(line, want) != NULL;
    if (silent_lines == 2)
        end_silence();
}

/* Said Welcome to, and then nothing: while the session opens its models there anew. */
TEST(daemon_that_stops_while_it_is_attached_to_anew_is_named)
{
    struct shd_err e = { 0 };
    shd_session *s;
    fixture_start_kept(&daemons, 2, "");
    const struct shd_options o = { .size = sizeof o,
                                   .address = daemons.address,
                                   .waits = go_on_when_named,
                                   .idle = idle_too_long };
    EXPECT_OK(shd_connect(&o, &s, &e), &e);
    blame_every(s->blame, test_paced(200) * NS_PER_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    reopen = s->hub->reopen;
    s->hub->reopen = reopen_stopped;
    silent_lines = 0;
    fixture_restart(&daemons, 1);
    train_steps(m, 1);
    EXPECT(silent_lines >= 2);
    shd_close(s);
    fixture_stop(&daemons);
}

/* A handler of a signal says what it wants by the next call, which comes at once. */
static void on_signal(int number)
{
    (void)number;
    idle.stops = true;
    idle.calls = 2;
}

TEST(signal_is_answered_at_once)
{
    struct shd_err e = { 0 };
    shd_session *s;
    const struct shd_update update = toy_update(0);
    const struct sigaction action = { .sa_handler = on_signal };
    fixture_start(&daemons, 1, NULL);
    idle_begin(false);
    EXPECT_OK(idle_connect(daemons.address, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    sigaction(SIGALRM, &action, NULL);
    alarm(1);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ECANCELED);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Losing who has answered ------------------------------------------------------------------- */

/* idle: of two owners 0 is stopped, and 1 has answered. Then 1 dies, and once its successor is
 * attached to, 0 goes on. */
struct losing {
    const shd_session *session;
    enum { LOSE_NOTHING, LOSE_WHO_ANSWERED, LOSE_BACK } next;
    uint32_t epoch; /* of the link to 1, before */
};

static int lose_who_answered(void *ctx)
{
    struct losing *l = ctx;
    if (l->next == LOSE_NOTHING)
        return 0;
    const struct link *links = l->session->hub->links;
    if (l->next == LOSE_WHO_ANSWERED && links[0].call_count > 0 && links[1].call_count == 0) {
        fixture_restart(&daemons, 1);
        l->next = LOSE_BACK;
    } else if (l->next == LOSE_BACK && links[1].epoch > l->epoch && links[1].state == LINK_UP) {
        kill(daemons.pids[0], SIGCONT);
        l->next = LOSE_NOTHING;
    }
    return 0;
}

static void begin_to_lose(struct losing *l)
{
    l->epoch = l->session->hub->links[1].epoch;
    kill(daemons.pids[0], SIGSTOP);
    l->next = LOSE_WHO_ANSWERED;
}

/* What the successor offers is taken when it is attached to; what is asked for beside, an inbox, is
 * asked for again. */
TEST(owner_that_is_lost_after_its_answer_is_asked_again_where_need_be)
{
    struct shd_err e = { 0 };
    struct losing l = { .next = LOSE_NOTHING };
    char want[65], got[65];
    float *grad;
    shd_session *s;
    toy_reference(toy_spec("f32", TOY_ADAMW), 1, want);
    fixture_start_kept(&daemons, 2, "");
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .timeout_ms = PATIENT_MS,
                                         .idle = lose_who_answered,
                                         .idle_ctx = &l };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    l.session = s;
    shd_session *first = attach(PATIENT_MS);
    shd_model *m = open_toy(first, toy_spec("f32", TOY_ADAMW));
    shd_close(first);
    EXPECT_OK(shd_model_attach(s, NULL, &m, &e), &e);
    begin_to_lose(&l);
    EXPECT_OK(m->session->control->catch_up(m, &e), &e);
    EXPECT_EQ(l.next, LOSE_NOTHING);
    begin_to_lose(&l);
    EXPECT_OK(shd_grad(m, 0, 0, &grad, &e), &e); /* the first one asks for inboxes */
    EXPECT_EQ(l.next, LOSE_NOTHING);
    begin_to_lose(&l);
    EXPECT_OK(m->session->control->catch_up(m, &e), &e);
    EXPECT_EQ(l.next, LOSE_NOTHING);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS

static void stop_one(const char *name)
{
    if (strcmp(name, "get:answered") == 0)
        kill(daemons.pids[1], SIGSTOP);
}

/* Between its answer and the segment that the answer offers. */
TEST(daemon_that_pauses_before_it_passes_a_segment_costs_the_call_alone)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    float *values = sys_malloc(m->spec->units[1].elems * sizeof *values);
    const uint64_t patient_ms = s->timeout_ns / NS_PER_MS;
    CHECK(values != NULL);
    for (int again = 0; again < 2; again++) {
        fail_point_hook = stop_one;
        limit_waits(s, test_paced(200));
        EXPECT_STATUS(shd_get(m, 1, SHD_PARAMS, values, NULL, NULL, &e), SHD_ETIMEDOUT);
        EXPECT_HAS(e.text, "segment: did not answer within");
        fail_point_hook = NULL;
        limit_waits(s, patient_ms);
        kill(daemons.pids[1], SIGCONT);
        EXPECT_OK(shd_get(m, 1, SHD_PARAMS, values, NULL, NULL, &e), &e);
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    }
    free(values);
    shd_close(s);
    fixture_stop(&daemons);
}

#endif

TEST_MAIN()
