/* A session whose owner's host is out, and who learns of it late: what has come in that host's
 * place is none of this session's, which goes on with the replica. And one that has let go of a
 * replica, or has not heard of it, which was filled since and is all that is left. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/map.h"
#include "client/paths/replica.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"
#include "tests/lib/paired_toy.h"
#include "tests/lib/put_toy.h"

static bool later; /* the replica has not come as far yet */

static bool succeed(void *ctx, uint32_t owner, bool gone)
{
    return !later && replica_succeed(ctx, owner, gone);
}

static void replace(const char *devices)
{
    const struct shd_restore_options options = { .size = sizeof options,
                                                 .replace = true,
                                                 .force = true };
    struct shd_err e;
    shd_session *s = paired_connect(devices);
    EXPECT_OK(shd_restore(s, ckpts, &options, NULL, &e), &e);
    shd_close(s);
}

static bool is_refused(const struct hub *hub)
{
    return strstr(hub->links[0].last.text, "restored in place of what this session has") != NULL;
}

static void save(shd_model *m)
{
    save_ok(m, 0);
}

TEST(a_host_that_is_out_and_has_another_state_is_let_go_of)
{
    shd_model *m = paired_begin("60", ";", save);
    struct hub *hub = m->session->hub;
    train_steps(m, 1);
    hub->members.succeed = succeed;
    later = true;
    paired_put_out("a");
    replace("cpu0");
    poll_until(hub, is_refused);
    later = false;
    poll_until(hub, paired_has_one);
    paired_end(m, "cpu1", 1);
}

/* The replica never comes as far as this session has read, unless that goes along. */
TEST(a_replica_that_went_back_is_gone_on_with)
{
    struct shd_err e;
    struct shd_result result = { .size = sizeof result };
    shd_model *m = paired_begin("60", ";", paired_snapshot);
    train_steps(m, 2);
    paired_rewind_alone("cpu1", "toy", 2);
    paired_put_out("a");
    poll_until(m->session->hub, paired_has_one);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), 2);
    paired_end(m, "cpu1", 2);
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
        paired_rewind_alone(l->other_device, "toy", 2);
    paired_rewind_alone(l->device, "toy", 2);
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
    paired_end(m, l->device, 2);
}

static void expect_taken_in(bool at_both)
{
    shd_model *m = paired_without_b("0.3");
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
    shd_model *m = paired_without_b("60");
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

/* The worker goes on, or says what failed and is followed by another one. Returns whether there was
 * an n-th call. */
static bool take_in_failing(int kind, int n)
{
    char got[65], whole[65];
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    shd_model *m = paired_begin("60", "", paired_snapshot);
    paired_lose(m->session->hub, "b");
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
        m = open_toy(paired_connect("cpu0+cpu1"), toy_spec("f32", TOY_ADAMW));
    }
    EXPECT(!hub_lost(m->session->hub, 1));
    train_steps(m, 4 - (uint32_t)shd_step(m));
    toy_reference(toy_spec("f32", TOY_ADAMW), 4, whole);
    digest_of(m, got);
    EXPECT_STR(got, whole);
    paired_lose(m->session->hub, "a");
    paired_end(m, "cpu1", 0);
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

/* -- A host that comes in unseen --------------------------------------------------------------- */

/* All of that goes by while this session asks nobody. */
static void expect_taken_in_unseen(const struct lost *l)
{
    shd_model *m = paired_begin("60", "", paired_snapshot);
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
    shd_model *m = paired_without_b("60");
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
    shd_model *m = paired_begin("60", "", paired_snapshot);
    shd_model *second = open_pt_of(m->session, &other);
    train_pt(second, 1);
    EXPECT_OK(shd_snapshot(second, &kept, &e), &e);
    paired_put_out("b");
    poll_until(m->session->hub, paired_has_one);
    train_pt(second, 2);
    paired_rewind_alone("cpu0", "other", 1);
    paired_rewind_alone("cpu1", "other", 1);
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
    paired_end(m, "cpu1", 2);
}

static bool is_told(const struct hub *hub)
{
    (void)hub;
    return strstr(paired_heard, "stays away") != NULL;
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
    EXPECT_HAS(paired_heard, line);
}

static void expect_told(shd_model *m, const char *why)
{
    expect_waits(m, why);
    fixture_succeed(&daemons, 0, "");
}

TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_is_out)
{
    shd_model *m = paired_without_b("0.3");
    expect_told(m, "is out");
    paired_end(m, "cpu0", 2);
}

TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_is_being_filled)
{
    shd_model *m = paired_without_b("0.3");
    paired_take_in("b");
    expect_told(m, "is being filled");
    paired_end(m, "cpu0", 2);
}

/* Both are missed, and it is not known which one has come further. */
TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_is_away)
{
    shd_model *m = paired_begin("0.3", "", paired_snapshot);
    fixture_ask(&daemons, KEEPER_KILL, 1, "");
    lose_other(&b_then_a);
    poll_until(m->session->hub, is_told);
    EXPECT_HAS(paired_heard, "which has the other copy, is away, too; if");
    fixture_succeed(&daemons, 0, "");
    paired_put_out("b");
    fixture_succeed(&daemons, 1, ""); /* to end in good order */
    paired_end(m, "cpu0", 2);
}

/* It is not for a session that only looks. */
TEST(who_waits_for_the_only_copy_is_told_that_the_other_one_came_in_again)
{
    shd_model *m = paired_without_b("0.3");
    struct hub *hub = m->session->hub;
    const enum wire_role role = hub->role;
    fill(&b_then_a, /* at_both= */ false);
    hub->role = WIRE_ADMIN;
    expect_waits(m, "came in again since this session began");
    paired_put_out("b"); /* or one that trains would take it in before a is there */
    hub->role = role;
    fixture_succeed(&daemons, 0, "");
    paired_end(m, "cpu0", 2);
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
    shd_model *m = paired_begin("60", "", paired_snapshot);
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
    poll_until(m->session->hub, paired_has_one);
    paired_end(m, "cpu0", 2);
}

/* Replicas have the same, and are not asked. */
TEST(what_is_read_is_owners)
{
    shd_model *m = paired_begin("60", "", paired_snapshot);
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
    poll_until(m->session->hub, paired_has_one);
    paired_end(m, "cpu0", 2);
}

/* A step between two commits of which settings are changed is owner 0's: it says how many
 * micro-batches the next one has. */
TEST(micro_batches_that_only_owner_0_knows_of_are_its_replicas)
{
    struct shd_err e;
    uint64_t from = 0;
    shd_model *alone;
    shd_model *m = paired_begin("60", "", paired_snapshot);
    shd_session *s = paired_connect("cpu0");
    EXPECT_OK(shd_model_attach(s, "toy", &alone, &e), &e);
    EXPECT_OK(shd_model_set(alone, "micro_batches=2", 0, &from, &e), &e);
    shd_close(s);
    while (shd_step(m) < from)
        train_steps(m, 1);
    EXPECT_OK(toy_step(m, toy_all_micros, 2, NULL, &e), &e);
    paired_put_out("a");
    poll_until(m->session->hub, paired_has_one);
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
    shd_model *m = paired_begin("60", "", paired_snapshot);
    struct hub *hub = m->session->hub;
    hub->role = WIRE_ADMIN;
    paired_put_out("b");
    poll_until(hub, paired_has_one);
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
