/* A session whose owner's host is out, and who learns of it late: what has come in that host's
 * place is none of this session's, which goes on with the replica. And one that has let go of a
 * replica, or has not heard of it, which was filled since and is all that is left. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/checkpoint/refill.h"
#include "client/paths/map.h"
#include "client/paths/replica.h"
#include "client/session/hub.h"
#include "client/session/membership.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"
#include "tests/lib/put_toy.h"

static bool later; /* the replica has not come as far yet */

static bool succeed(void *ctx, uint32_t owner, bool gone)
{
    return !later && replica_succeed(ctx, owner, gone);
}

static char heard[4096]; /* lines of the sessions */

static void hear(void *ctx, const char *line)
{
    const size_t n = strlen(heard);
    (void)ctx;
    snprintf(heard + n, sizeof heard - n, "%s\n", line);
}

static shd_session *connect_to(const char *devices)
{
    char address[400];
    struct shd_err e;
    shd_session *s = NULL;
    snprintf(address, sizeof address, "%s?%s", daemons.dir, devices);
    const struct shd_options options = {
        .size = sizeof options, .address = address, .name = "test", .waits = hear
    };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

/* Hosts a and b have cpu0 and cpu1, with the toy at step 2, of which something is kept by `keep`,
 * in a session with the one as owner and the other as its replica. starts: ";" for one successor,
 * with another state. */
static shd_model *begin(const char *patience, const char *starts, void (*keep)(shd_model *m))
{
    setenv("SHARDD_REPLICA_PATIENCE", patience, 1);
    heard[0] = '\0';
    make_ckpts();
    paired_start(&daemons, 2, 2, starts);
    shd_model *m = open_toy(connect_to("cpu0+cpu1"), toy_spec("f32", TOY_ADAMW));
    train_steps(m, 2);
    keep(m);
    return m;
}

/* Goes on with that daemon alone to step 4, as if nothing had been. */
static void end(shd_model *m, const char *device, uint32_t steps)
{
    char hex[65], whole[65];
    struct shd_session *s = m->session;
    EXPECT_STR(s->hub->links[0].device, device);
    train_steps(m, steps);
    digest_of(m, hex);
    shd_close(s);
    toy_reference(toy_spec("f32", TOY_ADAMW), 4, whole);
    EXPECT_STR(hex, whole);
    paired_remove(&daemons);
    fixture_stop(&daemons);
    remove_ckpts();
}

static void replace(const char *devices)
{
    const struct shd_restore_options options = { .size = sizeof options,
                                                 .replace = true,
                                                 .force = true };
    struct shd_err e;
    shd_session *s = connect_to(devices);
    EXPECT_OK(shd_restore(s, ckpts, &options, NULL, &e), &e);
    shd_close(s);
}

static bool is_refused(const struct hub *hub)
{
    return strstr(hub->links[0].last.text, "restored in place of what this session has") != NULL;
}

static bool has_one(const struct hub *hub)
{
    return hub_lost(hub, 1);
}

static void save(shd_model *m)
{
    save_ok(m, 0);
}

TEST(a_host_that_is_out_and_has_another_state_is_let_go_of)
{
    shd_model *m = begin("60", ";", save);
    struct hub *hub = m->session->hub;
    train_steps(m, 1);
    hub->members.succeed = succeed;
    later = true;
    paired_put_out("a");
    replace("cpu0");
    poll_until(hub, is_refused);
    later = false;
    poll_until(hub, has_one);
    end(m, "cpu1", 1);
}

static void snapshot(shd_model *m)
{
    uint64_t kept;
    struct shd_err e;
    EXPECT_OK(shd_snapshot(m, &kept, &e), &e);
    EXPECT_EQ(kept, 2);
}

static void rewind_alone(const char *devices, const char *name, uint64_t to)
{
    shd_model *m;
    uint64_t step;
    struct shd_err e;
    shd_session *s = connect_to(devices);
    EXPECT_OK(shd_model_attach(s, name, &m, &e), &e);
    EXPECT_OK(shd_model_rewind(m, to, &step, &e), &e);
    EXPECT_EQ(step, to);
    shd_close(s);
}

/* The replica never comes as far as this session has read, unless that goes along. */
TEST(a_replica_that_went_back_is_gone_on_with)
{
    struct shd_err e;
    struct shd_result result = { .size = sizeof result };
    shd_model *m = begin("60", ";", snapshot);
    train_steps(m, 2);
    rewind_alone("cpu1", "toy", 2);
    paired_put_out("a");
    poll_until(m->session->hub, has_one);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), 2);
    end(m, "cpu1", 2);
}

/* -- A host that was filled since -------------------------------------------------------------- */

struct lost { /* first one host, then the other one */
    const char *host, *device, *other_host, *other_device;
    int other;
};
static const struct lost b_then_a = { "b", "cpu1", "a", "cpu0", 0 };
static const struct lost a_then_b = { "a", "cpu0", "b", "cpu1", 1 };

/* As who fills the host does it: the models go back to a step that it has. at_both: where this
 * session may see it, too. */
static void fill(const struct lost *l, bool at_both)
{
    paired_take_in(l->host);
    if (at_both)
        rewind_alone(l->other_device, "toy", 2);
    rewind_alone(l->device, "toy", 2);
    paired_fill(l->host);
}

static void lose_other(const struct lost *l)
{
    fixture_ask(&daemons, KEEPER_KILL, l->other, "");
}

/* All that this session had is given up; it goes on with what was filled. */
static void go_on_with_filled(const struct lost *l, shd_model *m)
{
    struct shd_err e;
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), 2);
    EXPECT(!m->session->hub->members.returned);
    fixture_succeed(&daemons, l->other, ""); /* to end in good order */
    end(m, l->device, 2);
}

static shd_model *begin_without_b(const char *patience)
{
    shd_model *m = begin(patience, "", snapshot);
    paired_put_out("b");
    poll_until(m->session->hub, has_one);
    return m;
}

static void expect_taken_in(bool at_both)
{
    shd_model *m = begin_without_b("0.3");
    train_steps(m, 1);
    fill(&b_then_a, at_both);
    lose_other(&b_then_a);
    go_on_with_filled(&b_then_a, m);
}

/* Nobody else is there who could put the host of cpu0 out. */
TEST(a_host_that_was_let_go_of_is_taken_in_again_when_the_other_one_is_missed)
{
    expect_taken_in(/* at_both= */ true);
}

TEST(a_host_that_was_let_go_of_is_taken_in_again_though_no_rewind_was_seen)
{
    expect_taken_in(/* at_both= */ false);
}

TEST(a_host_that_was_let_go_of_is_taken_in_again_when_the_other_one_is_out)
{
    shd_model *m = begin_without_b("60");
    train_steps(m, 1);
    fill(&b_then_a, /* at_both= */ true);
    paired_put_out("a");
    lose_other(&b_then_a);
    go_on_with_filled(&b_then_a, m);
}

static int fail_at, fail_kind;

static int fail_nth(enum sys_kind kind)
{
    return (int)kind == fail_kind && --fail_at == 0 ? ENOMEM : 0;
}

/* The view is read at once. */
static void lose_now(struct hub *hub, const char *host)
{
    struct shd_err e = { 0 };
    paired_put_out(host);
    EXPECT_OK(membership_refresh(hub, &e), &e);
    poll_until(hub, has_one);
}

/* The worker goes on, or says what failed and is followed by another one. Returns whether there was
 * an n-th call. */
static bool take_in_failing(int kind, int n)
{
    char got[65], whole[65];
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    shd_model *m = begin("60", "", snapshot);
    lose_now(m->session->hub, "b");
    train_steps(m, 1);
    fill(&b_then_a, /* at_both= */ true);
    fail_kind = kind;
    fail_at = n;
    sys_fault = fail_nth;
    int r = toy_step(m, toy_all_micros, TOY_MICROS, &result, &e);
    sys_fault = NULL;
    EXPECT(r == SHD_OK || e.text[0] != '\0');
    if (r != SHD_OK)
        r = toy_step(m, toy_all_micros, TOY_MICROS, &result, &e);
    if (r != SHD_OK) {
        shd_close(m->session);
        m = open_toy(connect_to("cpu0+cpu1"), toy_spec("f32", TOY_ADAMW));
    }
    EXPECT(!hub_lost(m->session->hub, 1));
    train_steps(m, 4 - (uint32_t)shd_step(m));
    toy_reference(toy_spec("f32", TOY_ADAMW), 4, whole);
    digest_of(m, got);
    EXPECT_STR(got, whole);
    lose_now(m->session->hub, "a");
    end(m, "cpu1", 0);
    return fail_at <= 0;
}

/* Each third call of each kind, which are those of a daemon or of the other one. */
TEST(a_host_is_taken_in_again_though_a_call_fails)
{
    static const int kinds[] = { SYS_ALLOC, SYS_MAP, SYS_SEND };
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
        for (int n = 1 + (int)k; take_in_failing(kinds[k], n); n += 3) {
        }
}

/* -- While it is filled ------------------------------------------------------------------------ */

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
    rewind_alone("cpu0", "toy", back_to);
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
    shd_model *m = trained = begin_without_b("60");
    train_steps(m, 1);
    back_to = 3;
    EXPECT_OK(try_to_fill_b(rewind_before_it_is_in, &e), &e);
    EXPECT(trained == NULL);
    go_along(m);
    end(m, "cpu0", 1);
}

TEST(a_host_is_out_again_when_another_session_goes_back_to_before_it)
{
    struct shd_err e;
    shd_model *m = trained = begin_without_b("60");
    train_steps(m, 1);
    back_to = 2;
    EXPECT_STATUS(try_to_fill_b(rewind_before_it_is_in, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "model 'toy' went back to before step 3, which the host was filled with");
    EXPECT(trained == NULL);
    EXPECT_EQ(shd_step(m), 3);
    EXPECT(hub_lost(m->session->hub, 1));
    fill_b();
    go_along(m);
    end(m, "cpu0", 1);
}

/* The host has no snapshot of a step before it was filled. */
TEST(a_session_of_before_a_host_was_filled_does_not_go_back_without_it)
{
    uint64_t step;
    struct shd_err e;
    shd_model *m = begin_without_b("60"), *other;
    shd_session *s = connect_to("cpu0+cpu1");
    EXPECT_OK(shd_model_attach(s, "toy", &other, &e), &e);
    train_steps(m, 1);
    fill_b();
    EXPECT_STATUS(shd_model_rewind(other, 2, &step, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "daemon cpu1 has no snapshot of step 2");
    EXPECT_OK(shd_model_rewind(other, 3, &step, &e), &e);
    shd_close(s);
    go_along(m);
    end(m, "cpu0", 1);
}

/* It takes the host in before it knows that its step is given up. */
TEST(a_worker_in_the_middle_of_a_step_sets_and_snapshots_with_the_host)
{
    uint64_t step;
    struct shd_err e;
    shd_model *m = begin_without_b("60");
    train_steps(m, 1);
    EXPECT_OK(shd_return_none(m, 0, 1, &e), &e);
    fill_b();
    EXPECT_OK(shd_model_set(m, "lr_scale=0.5", 9, &step, &e), &e); /* behind the end */
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(step, 3);
    EXPECT(!hub_lost(m->session->hub, 1));
    go_along(m);
    end(m, "cpu0", 1);
}

/* -- Sessions of before it was filled ---------------------------------------------------------- */

/* Sooner than at the next look, which is up to five seconds away. */
static void read_view(struct hub *hub)
{
    struct shd_err e;
    EXPECT_OK(membership_refresh(hub, &e), &e);
    poll_until(hub, has_one);
}

/* b is out, at step 3. starts: of the fixture. */
static shd_model *begin_out(const char *starts)
{
    setenv("SHARDD_REPLICA_PATIENCE", "60", 1);
    make_ckpts();
    paired_start(&daemons, 2, 2, starts);
    shd_model *m = open_pt(connect_to("cpu0+cpu1"));
    train_pt(m, 2);
    paired_put_out("b");
    read_view(m->session->hub);
    train_pt(m, 1);
    return m;
}

/* One trains; the other one, which has the model open, too, asks nobody while b is filled. */
static shd_model *begin_filled(const char *starts, shd_model **ret_other)
{
    struct shd_err e;
    shd_model *m = begin_out(starts);
    shd_session *s = connect_to("cpu0+cpu1");
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
    paired_put_out("a");
    read_view(m->session->hub);
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
    tell(line);
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
    shd_model *m = begin("60", "", snapshot);
    train_steps(m, 1);
    snprintf(away, sizeof away, "%s.away", paired_dir);
    EXPECT_EQ(rename(paired_dir, away), 0);
    EXPECT_OK(shd_model_set(m, "clip_norm=0.125", 9, &from, &e), &e);
    EXPECT_EQ(rename(away, paired_dir), 0);
    EXPECT_OK(shd_model_set(m, "clip_norm=now", 9, &from, &e), &e);
    paired_put_out("b");
    poll_until(m->session->hub, has_one);
    end(m, "cpu0", 1);
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

static void expect_nothing_lost(void)
{
    EXPECT(strstr(told, "set it again") == NULL);
}

TEST(what_is_set_while_a_host_is_filled_stays)
{
    char hex[65];
    struct shd_err e;
    shd_model *m = trained = begin_without_b("60");
    told[0] = '\0';
    train_steps(m, 1);
    EXPECT_OK(try_to_fill_b(set_before_it_is_in, &e), &e);
    expect_nothing_lost();
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
    shd_model *m = trained = begin_without_b("60");
    told[0] = '\0';
    train_steps(m, 1);
    EXPECT_OK(try_to_fill_b(train_before_it_is_in, &e), &e);
    expect_nothing_lost();
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
    shd_session *s = connect_to("cpu0+cpu1");
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
        shd_model *m = trained = begin_without_b("60");
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
    shd_model *m = trained = begin_without_b("60");
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
    tell(line);
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
    shd_model *m = trained = begin("60", "", snapshot);
    told[0] = '\0';
    lose_now(m->session->hub, "b");
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
    if (strstr(told, "lacks what was set") == NULL)
        EXPECT_HAS(json, "\"next\":{\"from\":9,");
    free(json);
    end(m, "cpu0", 1);
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
    shd_session *s = connect_to("cpu0+cpu1");
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
    s = connect_to("cpu0+cpu1");
    EXPECT_STATUS(shd_model_attach(s, put_pt.name, &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "daemon cpu1 has no model 'put'");
    shd_close(s);
    end_filled();
}

/* -- A host that comes in unseen --------------------------------------------------------------- */

/* All of that goes by while this session asks nobody. */
static void expect_taken_in_unseen(const struct lost *l)
{
    shd_model *m = begin("60", "", snapshot);
    train_steps(m, 1);
    paired_put_out(l->host);
    fill(l, /* at_both= */ true);
    paired_put_out(l->other_host);
    lose_other(l);
    go_on_with_filled(l, m);
}

TEST(a_replica_that_came_in_again_unseen_is_taken_in_when_its_owner_is_out)
{
    expect_taken_in_unseen(&b_then_a);
}

TEST(an_owner_that_came_in_again_unseen_is_taken_in_when_its_replica_is_out)
{
    expect_taken_in_unseen(&a_then_b);
}

/* A model that is opened then has nothing to go back from. */
TEST(a_model_is_opened_where_a_host_has_to_be_taken_in_first)
{
    const struct pt_model other = { .name = "other", .publish = "f32", .accumulate = 1 };
    shd_model *m = begin_without_b("60");
    fill(&b_then_a, /* at_both= */ true);
    paired_put_out("a");
    lose_other(&b_then_a);
    EXPECT_EQ(shd_step(open_pt_of(m->session, &other)), 0);
    go_on_with_filled(&b_then_a, m);
}

/* Each goes back to a step of its own, the second one when its turn comes. */
TEST(all_models_of_a_worker_go_back_when_a_host_is_taken_in)
{
    const struct pt_model other = { .name = "other", .publish = "f32", .accumulate = 1 };
    struct pt_run run = { .t = { .overflow_step = UINT64_MAX } };
    struct shd_result result = { .size = sizeof result };
    struct shd_err e;
    uint64_t kept;
    shd_model *m = begin("60", "", snapshot);
    shd_model *second = open_pt_of(m->session, &other);
    train_pt(second, 1);
    EXPECT_OK(shd_snapshot(second, &kept, &e), &e);
    paired_put_out("b");
    poll_until(m->session->hub, has_one);
    train_pt(second, 2);
    rewind_alone("cpu0", "other", 1);
    rewind_alone("cpu1", "other", 1);
    fill(&b_then_a, /* at_both= */ true);
    paired_put_out("a");
    lose_other(&b_then_a);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_OK(pt_step(second, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(second), 1);
    train_pt(second, 3);
    shd_session *here = attach_here();
    shd_model *twin = open_pt_of(here, &other);
    train_pt(twin, 4);
    expect_twins(second, twin);
    shd_close(here);
    fixture_succeed(&daemons, 0, "");
    end(m, "cpu1", 2);
}

static bool is_told(const struct hub *hub)
{
    (void)hub;
    return strstr(heard, "stays away") != NULL;
}

/* Why nobody goes on for host a, which is missed. */
static void expect_waits(shd_model *m, const char *why)
{
    char line[200];
    lose_other(&b_then_a);
    poll_until(m->session->hub, is_told);
    snprintf(
        line, sizeof line,
        "host a stays away, and nobody goes on with its slice 0, on daemon cpu0: host b, which "
        "has the other copy, %s; if",
        why);
    EXPECT_HAS(heard, line);
}

static void expect_told(shd_model *m, const char *why)
{
    expect_waits(m, why);
    fixture_succeed(&daemons, 0, "");
}

TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_is_out)
{
    shd_model *m = begin_without_b("0.3");
    expect_told(m, "is out");
    end(m, "cpu0", 2);
}

TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_is_being_filled)
{
    shd_model *m = begin_without_b("0.3");
    paired_take_in("b");
    expect_told(m, "is being filled");
    end(m, "cpu0", 2);
}

/* Both are missed, and it is not known which one has come further. */
TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_is_away)
{
    shd_model *m = begin("0.3", "", snapshot);
    fixture_ask(&daemons, KEEPER_KILL, 1, "");
    lose_other(&b_then_a);
    poll_until(m->session->hub, is_told);
    EXPECT_HAS(heard, "which has the other copy, is away, too; if");
    fixture_succeed(&daemons, 0, "");
    paired_put_out("b");
    fixture_succeed(&daemons, 1, ""); /* to end in good order */
    end(m, "cpu0", 2);
}

/* It is not for a session that only looks. */
TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_came_in_again)
{
    shd_model *m = begin_without_b("0.3");
    struct hub *hub = m->session->hub;
    const enum wire_role role = hub->role;
    fill(&b_then_a, /* at_both= */ false);
    hub->role = WIRE_ADMIN;
    expect_waits(m, "came in again since this session began");
    paired_put_out("b"); /* or one that trains would take it in before a is there */
    hub->role = role;
    fixture_succeed(&daemons, 0, "");
    end(m, "cpu0", 2);
}

static void make_hold(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const shd_model *m = round->ctx;
    ret_request->rewind = (struct wire_rewind){ .what = WIRE_REWIND_HOLD,
                                                .model = m->map->owners[link->index].layout.handle,
                                                .step = 2,
                                                .consent = round->arg };
}

static uint64_t consents[2];

static int take_consent(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    (void)round;
    (void)e;
    consents[link->index] = reply->rewound.consent;
    return SHD_OK;
}

/* Which is later than each before, and later than any of a host that has run for years. */
TEST(a_replica_holds_a_snapshot_by_owner_0s_consent)
{
    shd_model *m = begin("60", "", snapshot);
    struct link *links = m->session->hub->links;
    struct shd_err e;
    uint64_t before = 50 * UINT64_C(365) * 86400 * NS_PER_S;
    for (int i = 0; i < 3; i++) {
        struct round round = { .what = "Rewind",
                               .asks = WIRE_REWIND,
                               .type = WIRE_REWOUND,
                               .make = make_hold,
                               .take = take_consent,
                               .ctx = m };
        EXPECT_OK(round_one(&round, &links[0], 0, &e), &e);
        EXPECT(consents[0] > before);
        before = consents[0];
        EXPECT_OK(round_one(&round, &links[1], consents[0], &e), &e);
        EXPECT(consents[1] == consents[0]);
    }
    paired_put_out("b");
    poll_until(m->session->hub, has_one);
    end(m, "cpu0", 2);
}

/* Replicas have the same, and are not asked. */
TEST(what_is_read_is_owners)
{
    shd_model *m = begin("60", "", snapshot);
    shd_session *here = attach_here();
    shd_model *twin = open_toy(here, toy_spec("f32", TOY_ADAMW));
    train_steps(twin, 2);
    for (uint32_t u = 0; u < shd_units(m); u++) {
        float *got = array_of(m, u, SHD_MOMENT1), *want = array_of(twin, u, SHD_MOMENT1);
        EXPECT(memcmp(got, want, shd_unit_elems(m, u) * sizeof *got) == 0);
        free(got);
        free(want);
    }
    shd_close(here);
    paired_put_out("b");
    poll_until(m->session->hub, has_one);
    end(m, "cpu0", 2);
}

/* A step between two commits of which settings are changed is owner 0's: it says how many
 * micro-batches the next one has. */
TEST(micro_batches_that_only_owner_0_knows_of_are_its_replicas)
{
    struct shd_err e;
    uint64_t from = 0;
    shd_model *alone;
    shd_model *m = begin("60", "", snapshot);
    shd_session *s = connect_to("cpu0");
    EXPECT_OK(shd_model_attach(s, "toy", &alone, &e), &e);
    EXPECT_OK(shd_model_set(alone, "micro_batches=2", 0, &from, &e), &e);
    shd_close(s);
    while (shd_step(m) < from)
        train_steps(m, 1);
    EXPECT_OK(toy_step(m, toy_all_micros, 2, NULL, &e), &e);
    paired_put_out("a");
    poll_until(m->session->hub, has_one);
    EXPECT_OK(toy_step(m, toy_all_micros, 2, NULL, &e), &e); /* as was said with the last one, */
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e); /* and nobody has set it */
    shd_close(m->session);
    paired_remove(&daemons);
    fixture_stop(&daemons);
    remove_ckpts();
}

static bool is_at_fault(const struct hub *hub)
{
    return hub->links[0].fault.code != SHD_OK;
}

/* Who only looks has nothing to go back with. */
TEST(who_does_not_train_is_told_to_connect_anew)
{
    struct shd_err e;
    shd_model *m = begin("60", "", snapshot);
    struct hub *hub = m->session->hub;
    hub->role = WIRE_ADMIN;
    paired_put_out("b");
    poll_until(hub, has_one);
    fill(&b_then_a, /* at_both= */ true);
    paired_put_out("a");
    while (!is_at_fault(hub))
        hub_poll(hub, NS_PER_MS, &e);
    EXPECT_STATUS(hub_poll(hub, 0, &e), SHD_EGONE);
    EXPECT_HAS(e.text, "connect anew");
    shd_close(m->session);
    paired_remove(&daemons);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST_MAIN()
