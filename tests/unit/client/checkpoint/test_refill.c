/* Filling a host, in a session's process, while others train, set, put, save and go back: what they
 * do meanwhile is there at both hosts, or it is said that it is not. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/checkpoint/refill.h"
#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"
#include "tests/lib/paired_toy.h"
#include "tests/lib/put_toy.h"

static struct shd_model *trained; /* beside that */
static uint64_t back_to;

/* Another session goes back, and who trains goes along, without the host. */
static void rewind_before_it_is_in(void *ctx, const char *line)
{
    struct shd_result result = { .size = sizeof result };
    struct shd_err e;
    (void)ctx;
    if (strstr(line, "is saved at step 3") == NULL)
        return;
    paired_rewind_alone("cpu0", "toy", back_to);
    EXPECT_OK(toy_step(trained, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(trained), back_to);
    train_steps(trained, 1);
    trained = NULL;
}

static int try_to_fill_b(void (*say)(void *ctx, const char *line), struct shd_err *e)
{
    char address[400];
    snprintf(address, sizeof address, "%s?cpu0+cpu1", daemons.dir);
    const struct refill how = { .address = address, .host = "b", .dir = ckpts, .say = say };
    return refill_host(&how, e);
}

static void fill_b(void)
{
    struct shd_err e;
    EXPECT_OK(try_to_fill_b(/* say= */ NULL, &e), &e);
}

/* It goes along with what filled the host, from step 3 on. */
static void go_along(shd_model *m)
{
    struct shd_result result = { .size = sizeof result };
    struct shd_err e;
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), 3);
    EXPECT(!hub_lost(m->session->hub, 1));
}

TEST(a_host_is_filled_though_another_session_goes_back_to_the_step_it_is_filled_at)
{
    struct shd_err e;
    shd_model *m = trained = paired_without_b("60");
    train_steps(m, 1);
    back_to = 3;
    EXPECT_OK(try_to_fill_b(rewind_before_it_is_in, &e), &e);
    EXPECT(trained == NULL);
    go_along(m);
    paired_end(m, "cpu0", 1);
}

TEST(a_host_is_out_again_when_another_session_goes_back_to_before_it)
{
    struct shd_err e;
    shd_model *m = trained = paired_without_b("60");
    train_steps(m, 1);
    back_to = 2;
    EXPECT_STATUS(try_to_fill_b(rewind_before_it_is_in, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "model 'toy' went back to before step 3, which the host was filled with");
    EXPECT(trained == NULL);
    EXPECT_EQ(shd_step(m), 3);
    EXPECT(hub_lost(m->session->hub, 1));
    fill_b();
    go_along(m);
    paired_end(m, "cpu0", 1);
}

/* The host has no snapshot of a step before it was filled. */
TEST(a_session_of_before_a_host_was_filled_does_not_go_back_without_it)
{
    uint64_t step;
    struct shd_err e;
    shd_model *m = paired_without_b("60"), *other;
    shd_session *s = paired_connect("cpu0+cpu1");
    EXPECT_OK(shd_model_attach(s, "toy", &other, &e), &e);
    train_steps(m, 1);
    fill_b();
    EXPECT_STATUS(shd_model_rewind(other, 2, &step, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "daemon cpu1 has no snapshot of step 2");
    EXPECT_OK(shd_model_rewind(other, 3, &step, &e), &e);
    shd_close(s);
    go_along(m);
    paired_end(m, "cpu0", 1);
}

/* It takes the host in before it knows that its step is given up. */
TEST(a_worker_in_the_middle_of_a_step_sets_and_snapshots_with_the_host)
{
    uint64_t step;
    struct shd_err e;
    shd_model *m = paired_without_b("60");
    train_steps(m, 1);
    EXPECT_OK(shd_return_none(m, 0, 1, &e), &e);
    fill_b();
    EXPECT_OK(shd_model_set(m, "lr_scale=0.5", 9, &step, &e), &e); /* behind the end */
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(step, 3);
    EXPECT(!hub_lost(m->session->hub, 1));
    go_along(m);
    paired_end(m, "cpu0", 1);
}

/* -- Sessions of before it was filled ---------------------------------------------------------- */

/* b is out, at step 3. starts: of the fixture. */
static shd_model *begin_out(const char *starts)
{
    setenv("SHARDD_REPLICA_PATIENCE", "60", 1);
    make_ckpts();
    paired_start(&daemons, 2, 2, starts);
    shd_model *m = open_pt(paired_connect("cpu0+cpu1"));
    train_pt(m, 2);
    paired_lose(m->session->hub, "b");
    train_pt(m, 1);
    return m;
}

/* One trains; the other one, which has the model open, too, asks nobody while b is filled. */
static shd_model *begin_filled(const char *starts, shd_model **ret_other)
{
    struct shd_err e;
    shd_model *m = begin_out(starts);
    shd_session *s = paired_connect("cpu0+cpu1");
    EXPECT_OK(shd_model_attach(s, put_pt.name, ret_other, &e), &e);
    EXPECT(hub_lost(s->hub, 1));
    fill_b();
    return m;
}

/* Who trains has gone along. */
static void expect_at(shd_model *m, uint64_t step)
{
    struct pt_run run = { .t = { .overflow_step = UINT64_MAX } };
    struct shd_result result = { .size = sizeof result };
    struct shd_err e;
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), step);
    EXPECT(!hub_lost(m->session->hub, 1));
}

static void lose_a(shd_model *m)
{
    paired_lose(m->session->hub, "a");
    EXPECT_STR(m->session->hub->links[0].device, "cpu1");
}

static void end_filled(void)
{
    paired_remove(&daemons);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST(what_a_session_of_before_it_was_filled_puts_is_there_too)
{
    shd_model *other, *m = begin_filled("", &other);
    put_ok(other, 7);
    shd_close(other->session);
    expect_at(m, 4);
    expect_put(m, 7);
    lose_a(m);
    expect_put(m, 7);
    shd_close(m->session);
    end_filled();
}

TEST(what_a_session_of_before_it_was_filled_sets_is_there_too)
{
    struct shd_snapshot_row rows[3] = { { .size = sizeof rows[0] } };
    char *json, *alone;
    uint64_t from;
    uint32_t count;
    struct shd_err e;
    shd_model *other, *m = begin_filled("", &other);
    EXPECT_OK(shd_model_set(other, "lr_scale=0.5", 5, &from, &e), &e);
    EXPECT_EQ(from, 5);
    EXPECT_OK(shd_snapshot_every(other, 1, ARRAY_SIZE(rows), &e), &e);
    shd_close(other->session);
    expect_at(m, 3);
    train_pt(m, 1);
    EXPECT_OK(shd_settings(m, &json, &e), &e);
    EXPECT_HAS(json, "\"next\":{\"from\":5,");
    lose_a(m);
    EXPECT_OK(shd_settings(m, &alone, &e), &e);
    EXPECT_STR(alone, json);
    train_pt(m, 1);
    EXPECT_OK(shd_snapshots(m, rows, ARRAY_SIZE(rows), &count, &e), &e);
    EXPECT(count > 1); /* not that of the fill alone */
    free(alone);
    free(json);
    shd_close(m->session);
    end_filled();
}

static char told[8192]; /* lines of who fills the host */

static void tell(const char *line)
{
    const size_t n = strlen(told);
    snprintf(told + n, sizeof told - n, "%s\n", line);
}

static char unfilled[65]; /* the digest of step 4 while the host was filled */

static void set_lr(shd_model *m, uint64_t want)
{
    uint64_t from;
    struct shd_err e;
    EXPECT_OK(shd_model_set(m, "lr_scale.decay=0.5", 0, &from, &e), &e);
    EXPECT_EQ(from, want);
}

static void set_before_it_is_in(void *ctx, const char *line)
{
    uint64_t from;
    struct shd_err e;
    (void)ctx;
    if (strstr(line, "is saved at step 3") == NULL)
        return;
    set_lr(trained, 3);
    EXPECT_OK(shd_model_set(trained, "clip_norm=0.125", 9, &from, &e), &e);
    EXPECT_OK(shd_snapshot_every(trained, 7, 4, &e), &e);
    train_steps(trained, 1);
    digest_of(trained, unfilled);
}

/* As of a relay's boards, which are later than owners' answers. */
TEST(what_is_set_where_boards_are_late_is_there_too)
{
    char *json, *there;
    uint64_t from;
    struct shd_err e;
    shd_model *other, *m = begin_filled("", &other);
    other->map->viewed_rewound = UINT64_MAX; /* it sees no rewind */
    EXPECT_OK(shd_model_set(other, "clip_norm=0.125", 9, &from, &e), &e);
    EXPECT(!hub_lost(other->session->hub, 1));
    shd_close(other->session);
    expect_at(m, 3);
    EXPECT_OK(shd_settings(m, &json, &e), &e);
    lose_a(m);
    EXPECT_OK(shd_settings(m, &there, &e), &e);
    EXPECT_STR(there, json);
    EXPECT_HAS(there, "\"next\":{\"from\":9,");
    free(there);
    free(json);
    shd_close(m->session);
    end_filled();
}

/* What can be set is set, whatever becomes of the arbiter. */
TEST(settings_do_not_wait_for_an_arbiter_that_is_away)
{
    char away[320];
    uint64_t from;
    struct shd_err e;
    shd_model *m = paired_begin("60", "", paired_snapshot);
    train_steps(m, 1);
    snprintf(away, sizeof away, "%s.away", paired_dir);
    EXPECT_EQ(rename(paired_dir, away), 0);
    EXPECT_OK(shd_model_set(m, "clip_norm=0.125", 9, &from, &e), &e);
    EXPECT_EQ(rename(away, paired_dir), 0);
    EXPECT_OK(shd_model_set(m, "clip_norm=now", 9, &from, &e), &e);
    paired_put_out("b");
    poll_until(m->session->hub, paired_has_one);
    paired_end(m, "cpu0", 1);
}

/* Settings, as a and as b has them: this is what b goes on with. */
static void expect_set(shd_model *m, const char *lr, const char *clip)
{
    char *json, *there;
    struct shd_err e;
    EXPECT_OK(shd_settings(m, &json, &e), &e);
    EXPECT_HAS(json, lr);
    EXPECT_HAS(json, clip);
    lose_a(m);
    EXPECT_OK(shd_settings(m, &there, &e), &e);
    EXPECT_STR(there, json);
    free(json);
    free(there);
}

/* By itself, at b. */
static void expect_kept(shd_model *m, uint64_t step)
{
    struct shd_snapshot_row rows[4] = { { .size = sizeof rows[0] } };
    struct shd_err e;
    uint32_t count;
    EXPECT_OK(shd_snapshots(m, rows, ARRAY_SIZE(rows), &count, &e), &e);
    EXPECT(count > 1 && rows[count - 1].step == step);
}

static void end_set(shd_model *m)
{
    shd_close(m->session);
    end_filled();
}

#define LR_FROM(step) "\"now\":{\"lr_scale.decay\":{\"value\":0.5,\"from\":" step "}}"
#define CLIP          "\"next\":{\"from\":9,\"settings\":{\"clip_norm\":0.125}}"

TEST(what_is_set_while_a_host_is_filled_stays)
{
    char hex[65];
    struct shd_err e;
    shd_model *m = trained = paired_without_b("60");
    train_steps(m, 1);
    EXPECT_OK(try_to_fill_b(set_before_it_is_in, &e), &e);
    go_along(m);
    train_steps(m, 1);
    digest_of(m, hex);
    EXPECT_STR(hex, unfilled); /* as if it had not gone back */
    expect_set(m, LR_FROM("3"), CLIP);
    train_steps(m, 4);
    expect_kept(m, 7);
    end_set(m);
}

static char refilled[65]; /* the digest of step 4 behind the rewind */

static void train_before_it_is_in(void *ctx, const char *line)
{
    set_before_it_is_in(ctx, line);
    if (strstr(line, "goes on from step 3") == NULL)
        return;
    go_along(trained);
    train_steps(trained, 1);
    digest_of(trained, refilled);
    train_steps(trained, 1);
}

TEST(what_is_set_while_a_host_is_filled_stays_for_workers_that_are_soon_past_it)
{
    struct shd_err e;
    shd_model *m = trained = paired_without_b("60");
    train_steps(m, 1);
    EXPECT_OK(try_to_fill_b(train_before_it_is_in, &e), &e);
    EXPECT_STR(refilled, unfilled);
    train_steps(m, 1);
    expect_set(m, LR_FROM("3"), CLIP);
    end_set(m);
}

#ifdef SHD_FAIL_POINTS

static _Atomic int looks, sets;
static pthread_t setter;

static void *set_in_a_thread(void *ctx)
{
    set_lr(ctx, 3);
    return NULL;
}

/* Who sets goes on to join the host, and waits for the rewind. The host has its options before. */
static void set_behind_the_look(const char *name)
{
    struct shd_err e;
    if (strcmp(name, "refill:restored") == 0)
        EXPECT_OK(shd_snapshot_every(trained, 7, 4, &e), &e);
    if (strcmp(name, "set:told") == 0)
        sets++;
    if (strcmp(name, "refill:looked") != 0 || looks++ != 0)
        return;
    EXPECT_EQ(pthread_create(&setter, NULL, set_in_a_thread, trained), 0);
    while (sets == 0)
        usleep(1000);
}

static void set_by_another(void *ctx, const char *line)
{
    shd_model *m;
    (void)ctx;
    if (strstr(line, "is saved at step 3") == NULL)
        return;
    shd_session *s = paired_connect("cpu0+cpu1");
    MUST_OK(shd_model_attach(s, "toy", &m, &e));
    set_lr(m, 3);
    shd_close(s);
}

/* Whoever fills the host dies behind the rewind; it is filled anew. */
TEST(what_is_set_while_a_host_is_filled_outlives_who_fills_it)
{
    static const char *const fails[] = { "refill:gone", "refill:followed" };
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e;
        int status = 0;
        shd_model *m = trained = paired_without_b("60");
        train_steps(m, 1);
        const pid_t pid = test_fork();
        if (pid == 0) {
            setenv("SHARDD_FAIL", fails[i], 1);
            (void)try_to_fill_b(set_by_another, &e);
            _exit(0);
        }
        EXPECT(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
        fill_b();
        go_along(m);
        expect_set(m, LR_FROM("3"), "\"next\":null");
        train_steps(m, 4);
        end_set(m);
    }
}

TEST(what_is_set_as_the_model_goes_back_stays)
{
    struct shd_err e;
    shd_model *m = trained = paired_without_b("60");
    train_steps(m, 1);
    looks = sets = 0;
    fail_point_hook = set_behind_the_look;
    EXPECT_OK(try_to_fill_b(/* say= */ NULL, &e), &e);
    EXPECT_EQ(pthread_join(setter, NULL), 0);
    fail_point_hook = NULL;
    EXPECT(looks > 1); /* it was refused, and looked again */
    EXPECT(!hub_lost(m->session->hub, 1));
    go_along(m);
    train_steps(m, 1);
    expect_set(m, LR_FROM("3"), "\"next\":null");
    train_steps(m, 4);
    expect_kept(m, 7);
    end_set(m);
}

static void just_tell(void *ctx, const char *line)
{
    (void)ctx;
    tell(line);
}

static void put_behind_the_look(const char *name)
{
    if (strcmp(name, "refill:looked") == 0 && looks++ == 0)
        put_ok(trained, 7);
}

TEST(what_is_put_as_the_model_goes_back_is_said)
{
    struct shd_err e;
    shd_model *m = trained = begin_out("");
    told[0] = '\0';
    looks = 0;
    fail_point_hook = put_behind_the_look;
    EXPECT_OK(try_to_fill_b(just_tell, &e), &e);
    fail_point_hook = NULL;
    EXPECT_HAS(told, "behind step 3, and went with the steps: put them again\n");
    expect_at(m, 3);
    end_set(m);
}

#endif

static bool puts_again;

static void put_before_it_is_in(void *ctx, const char *line)
{
    (void)ctx;
    tell(line);
    if (strstr(line, "is saved at step 3") != NULL)
        put_ok(trained, 7);
    if (!puts_again || strstr(line, "goes on from step 3") == NULL)
        return;
    expect_at(trained, 3);
    put_ok(trained, 7);
}

/* Who trains puts again what it has put in steps that are given up. */
static void expect_told_of_put(bool again)
{
    struct shd_err e;
    shd_model *m = trained = begin_out("");
    told[0] = '\0';
    puts_again = again;
    EXPECT_OK(try_to_fill_b(put_before_it_is_in, &e), &e);
    EXPECT(again == (strstr(told, "were put into model") == NULL));
    if (!again) {
        EXPECT_HAS(told, "behind step 3, and went with the steps: put them again\n");
        expect_at(m, 3);
    }
    end_set(m);
}

TEST(who_fills_a_host_says_that_values_are_to_be_put_again)
{
    expect_told_of_put(false);
}

TEST(values_that_are_put_again_are_no_loss)
{
    expect_told_of_put(true);
}

/* What it has returned is of a step that became the put, at the host, too. */
TEST(a_worker_in_the_middle_of_a_step_puts_with_the_host)
{
    shd_model *m = begin_out("");
    return_all(m, 0);
    fill_b();
    put_ok(m, 7);
    EXPECT_EQ(shd_step(m), 4);
    EXPECT(!hub_lost(m->session->hub, 1));
    lose_a(m);
    expect_put(m, 7);
    train_pt(m, 1);
    end_set(m);
}

static int fail_at, fail_kind;

static int fail_nth(enum sys_kind kind)
{
    return (int)kind == fail_kind && --fail_at == 0 ? ENOMEM : 0;
}

static int calls[SYS_WAIT + 1];

static int count_calls(enum sys_kind kind)
{
    calls[kind]++;
    return 0;
}

/* Of a step that does not come. */
static void set_as_calls_fail(void *ctx, const char *line)
{
    int (*const fault)(enum sys_kind kind) = sys_fault;
    uint64_t from;
    struct shd_err e;
    (void)ctx;
    sys_fault = NULL;
    if (strstr(line, "is saved at step 3") != NULL)
        EXPECT_OK(shd_model_set(trained, "clip_norm=0.125", 9, &from, &e), &e);
    sys_fault = fault;
}

/* n 0: none fails. Whoever fills the host says what failed, and does it again. */
static void fill_failing(int kind, int n)
{
    char *json;
    struct shd_err e = { 0 };
    shd_model *m = trained = paired_begin("60", "", paired_snapshot);
    paired_lose(m->session->hub, "b");
    train_steps(m, 1);
    fail_kind = kind;
    fail_at = n;
    sys_fault = n > 0 ? fail_nth : count_calls;
    const int r = try_to_fill_b(set_as_calls_fail, &e);
    sys_fault = NULL;
    EXPECT(r == SHD_OK || e.text[0] != '\0');
    if (r != SHD_OK)
        EXPECT_OK(try_to_fill_b(set_as_calls_fail, &e), &e);
    go_along(m);
    EXPECT_OK(shd_settings(m, &json, &e), &e);
    EXPECT_HAS(json, "\"next\":{\"from\":9,");
    free(json);
    paired_end(m, "cpu0", 1);
}

TEST(a_host_is_filled_though_a_call_fails)
{
    fill_failing(/* kind= */ 0, /* n= */ 0);
    EXPECT(calls[SYS_ALLOC] > 100 && calls[SYS_OPEN] > 10);
    for (int kind = 0; kind <= SYS_WAIT; kind++)
        for (int n = calls[kind]; n > 0; n -= 1 + calls[kind] / 4)
            fill_failing(kind, n);
}

/* The next session has it at both. */
static void expect_at_both(const char *name)
{
    char hex[65], alone[65];
    struct shd_err e;
    shd_model *m;
    shd_session *s = paired_connect("cpu0+cpu1");
    EXPECT_OK(shd_model_attach(s, name, &m, &e), &e);
    EXPECT(!hub_lost(s->hub, 1));
    EXPECT_EQ(shd_step(m), 3);
    digest_of(m, hex);
    lose_a(m);
    digest_of(m, alone);
    EXPECT_STR(alone, hex);
    shd_close(s);
    end_filled();
}

TEST(what_a_session_of_before_it_was_filled_forks_is_there_too)
{
    uint64_t step;
    struct shd_err e;
    shd_model *other, *m = begin_filled("", &other);
    EXPECT_OK(shd_model_fork(other, "fork", &step, &e), &e);
    EXPECT_EQ(step, 3);
    shd_close(other->session);
    shd_close(m->session);
    expect_at_both("fork");
}

TEST(what_a_session_of_before_it_was_filled_restores_is_there_too)
{
    const struct shd_restore_options options = { .size = sizeof options, .replace = true };
    struct shd_err e;
    shd_model *other, *m = begin_filled(";", &other);
    shd_session *s = other->session;
    shd_model_close(other);
    expect_at(m, 3);
    save_ok(m, 0);
    shd_close(m->session);
    EXPECT_OK(shd_restore(s, ckpts, &options, NULL, &e), &e);
    shd_close(s);
    expect_at_both(put_pt.name);
}

TEST(what_a_session_of_before_it_was_filled_drops_is_gone_there_too)
{
    struct shd_err e;
    shd_model *other, *m = begin_filled("", &other);
    shd_session *s = other->session;
    shd_model_close(other);
    shd_close(m->session);
    EXPECT_OK(shd_model_drop(s, put_pt.name, NULL, &e), &e);
    shd_close(s);
    paired_put_out("a");
    s = paired_connect("cpu0+cpu1");
    EXPECT_STATUS(shd_model_attach(s, put_pt.name, &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "daemon cpu1 has no model 'put'");
    shd_close(s);
    end_filled();
}

TEST_MAIN()
