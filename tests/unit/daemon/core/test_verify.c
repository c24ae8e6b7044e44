/* Verifying what workers compute: what is compared with what, who is named, and to whom the group
 * goes. On a real core and a real lease, with sessions that compute, lie and die in a made-up time.
 */
#include "daemon/core/lease.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_init.h"
#include "daemon/core/step_reset.h"
#include "daemon/core/verify.h"

#include "proto/base/check.h"
#include "proto/spec/ramp.h"
#include "tests/lib/test.h"

#define MS     UINT64_C(1000000)
#define MICROS 4u
#define UNITS  3u

struct desk {
    struct ledger ledger;
    struct step *core;
    struct lease *lease;
    struct verify *verify;
    struct verify_difference found;
    uint64_t now_ns;
    uint32_t ref;
};

/* Never freed: a test that fails leaves by longjmp. */
static struct desk desk_new(uint64_t every, bool first, bool blind)
{
    static _Alignas(128) uint8_t ledger[4 << 20];
    static _Alignas(16) uint8_t core[16384], lease[128 << 10], verify[65536];
    const struct ledger_shape shape = {
        .name = "m", .spec = "{}", .spec_bytes = 2, .owners = 1, .units = UNITS, .micros = MICROS
    };
    const struct verify_shape verified = {
        .every = every, .units = UNITS, .trained = UNITS, .first = first, .blind = blind
    };
    struct desk d = { .now_ns = 1000 * MS };
    struct shd_err e;
    uint64_t bytes;
    CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK && bytes <= sizeof ledger);
    CHECK(step_bytes(UNITS, MICROS) <= sizeof core && lease_bytes(MICROS) <= sizeof lease);
    CHECK(verify_bytes(&verified) <= sizeof verify);
    memset(ledger, 0, sizeof ledger);
    ledger_init(&d.ledger, ledger, &shape);
    d.core = step_init(core, &d.ledger, NULL);
    d.lease = lease_init(lease, MICROS, /* cautious= */ !first);
    d.verify = verify_init(verify, &verified, d.core);
    lease_set_verify(d.lease, d.verify);
    return d;
}

/* The group, or 100 + the answer. */
static uint32_t ask(struct desk *d, uint64_t session)
{
    uint32_t group = UINT32_MAX;
    const enum lease_answer a = lease_ask(d->lease, d->core, step_collecting(d->core), session,
                                          d->now_ns, &group);
    return a == LEASE_GROUP ? group : 100 + (uint32_t)a;
}
#define WAITS  (100u + LEASE_WAIT)
#define ALL_IN (100u + LEASE_ALL_IN)

static void carry_out(struct desk *d, const struct step_actions *actions);

static void finish(struct desk *d, const struct step_action *a)
{
    const struct step_word done = a->done;
    struct step_actions next;
    struct fixsum sum;
    fixsum_init(&sum);
    atomic_store(done.word, done.value);
    if (a->kind == STEP_DO_APPLY)
        step_applied(d->core, a->unit, &next);
    else
        step_accumulated(d->core, a->unit, a->last ? &sum : NULL, true, &next);
    carry_out(d, &next);
}

static void carry_out(struct desk *d,
                      const struct step_actions *actions) /* NOLINT(misc-no-recursion) */
{
    for (uint32_t i = 0; i < actions->count; i++)
        if (actions->items[i].kind == STEP_DO_ACCUMULATE || actions->items[i].kind == STEP_DO_APPLY)
            finish(d, &actions->items[i]);
}

static struct verify_worker worker_of(uint64_t session)
{
    struct verify_worker w = { .session = session,
                               .pid = (int64_t)session % 100 + 1000,
                               .start_time = 7 };
    snprintf(w.name, sizeof w.name, "w%d", (int)(session % 100));
    return w;
}

/* One unit of what the session computed, with these bits. True: a difference. */
static bool returns(struct desk *d, uint64_t session, uint32_t micro, uint32_t unit, uint8_t bits)
{
    const struct verify_worker w = worker_of(session);
    uint8_t hash[VERIFY_HASH_BYTES];
    struct step_actions actions;
    struct shd_err e;
    bool found = false;
    memset(hash, bits, sizeof hash);
    if (verify_wants(d->verify, d->core, step_collecting(d->core), micro))
        found = verify_take(d->verify, d->core, &w, unit, hash, false, &d->found);
    CHECK(step_return(d->core, ++d->ref, step_collecting(d->core), unit, micro, false, NULL, 0,
                      &actions, &e) == SHD_OK);
    carry_out(d, &actions);
    return found;
}

/* A whole micro-batch; the unit `wrong` (UNITS: none) has other bits. How many differences. */
static uint32_t comes_in(struct desk *d, uint64_t session, uint32_t micro, uint32_t wrong)
{
    uint32_t found = 0;
    for (uint32_t u = UNITS; u-- > 0;)
        found += returns(d, session, micro, u, u == wrong ? 0xff : (uint8_t)(1 + u));
    return found;
}

static void commit(struct desk *d)
{
    const struct decision wanted = { .scale = 1 };
    struct decision decision;
    enum step_committed how;
    struct step_actions actions;
    struct shd_err e;
    CHECK(step_commit(d->core, step_now(d->core), &wanted, (struct step_blob){ 0 }, &decision, &how,
                      &actions, &e) == SHD_OK);
    carry_out(d, &actions);
}

/* All groups but one. */
static void rest_comes_in(struct desk *d, uint64_t session, uint32_t but)
{
    for (uint32_t i = 0; i < MICROS; i++)
        if (i != but)
            comes_in(d, session, i, UNITS);
}

static const struct verify_state *state(const struct desk *d)
{
    return verify_look(d->verify);
}

TEST(groups_have_their_turn_in_every_nth_step)
{
    uint32_t group = 99;
    EXPECT(!verify_group_of(0, 4, 0, &group));
    EXPECT(!verify_group_of(3, 4, 0, &group) && !verify_group_of(3, 4, 1, &group));
    for (uint32_t i = 0; i < 9; i++) {
        EXPECT(verify_group_of(3, 4, 3 * i + 2, &group));
        EXPECT_EQ(group, i % 4);
        EXPECT(verify_group_of(1, 4, i, &group));
        EXPECT_EQ(group, i % 4);
    }
}

/* In the second step there is one group. */
TEST(group_is_one_that_the_step_has)
{
    static const struct ramp ramp = { 2, { { 0, MICROS }, { 1, 1 } } };
    struct desk d = desk_new(1, true, false);
    struct shd_err e;
    EXPECT_OK(step_ramp(d.core, &ramp, 1, &e), &e);
    rest_comes_in(&d, 1, MICROS);
    commit(&d);
    EXPECT_EQ(step_collecting(d.core), 1);
    EXPECT_EQ(comes_in(&d, 1, 0, UNITS), 0);
    EXPECT_EQ(comes_in(&d, 2, 0, 1), 1);
    EXPECT_EQ(d.found.group, 0);
}

TEST(same_bits_are_compared_and_nobody_is_named)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(comes_in(&d, 1, 0, UNITS), 0);
    EXPECT_EQ(state(&d)->compared, 0);
    EXPECT_EQ(comes_in(&d, 2, 0, UNITS), 0);
    EXPECT_EQ(state(&d)->compared, 1);
    EXPECT_EQ(comes_in(&d, 3, 1, 0), 0); /* another group's bits are compared with nothing */
    EXPECT_EQ(comes_in(&d, 1, 1, 1), 0);
    EXPECT_EQ(state(&d)->compared, 1);
    EXPECT_EQ(state(&d)->differences, 0);
}

TEST(one_flipped_bit_names_both_workers_the_unit_and_the_step)
{
    struct desk d = desk_new(2, true, false);
    rest_comes_in(&d, 1, MICROS); /* step 0 is none of them */
    commit(&d);
    EXPECT_EQ(comes_in(&d, 1, 0, UNITS), 0);
    EXPECT_EQ(comes_in(&d, 2, 0, 1), 1);
    EXPECT(d.found.step == 1 && d.found.group == 0 && d.found.unit == 1);
    EXPECT(d.found.worker[0].pid == 1001 && d.found.worker[1].pid == 1002);
    EXPECT_STR(d.found.worker[1].name, "w2");
    EXPECT_EQ(d.found.verdict, VERIFY_UNKNOWN); /* two cannot tell */
    EXPECT(state(&d)->differences == 1 && state(&d)->compared == 1);
    EXPECT(!state(&d)->workers[0].suspect && !state(&d)->workers[1].suspect);
}

TEST(all_units_that_differ_are_one_difference)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(comes_in(&d, 1, 0, UNITS), 0);
    EXPECT(returns(&d, 2, 0, 2, 9));
    EXPECT(!returns(&d, 2, 0, 1, 9));
    EXPECT(!returns(&d, 2, 0, 1, 8)); /* again: its first one counts */
    EXPECT(!returns(&d, 2, 0, 0, 1));
    EXPECT_EQ(state(&d)->differences, 1);
    EXPECT(state(&d)->recent[0].unit == 2 && state(&d)->recent[0].units == 2);
}

TEST(third_copy_tells_which_one_is_wrong)
{
    for (uint32_t wrong = 1; wrong <= 3; wrong++) { /* whoever comes when */
        struct desk d = desk_new(1, true, false);
        uint32_t found = 0;
        for (uint32_t session = 1; session <= 3; session++)
            found += comes_in(&d, session, 0, session == wrong ? 1 : UNITS);
        EXPECT_EQ(found, wrong == 3 ? 1 : 2); /* from two at once is said once */
        const struct verify_difference *last = &state(&d)->recent[0];
        const struct verify_worker *named = &last->worker[last->verdict == VERIFY_SECOND];
        EXPECT(last->verdict != VERIFY_UNKNOWN);
        EXPECT_EQ(named->session, wrong);
        for (uint32_t i = 0; i < 3; i++) {
            const struct verify_count *c = &state(&d)->workers[i];
            EXPECT_EQ(c->wrong, c->worker.session == wrong);
            EXPECT_EQ(c->suspect, c->worker.session == wrong);
        }
    }
}

static const struct verify_count *count_of(const struct desk *d, uint64_t session)
{
    const struct verify_worker w = worker_of(session);
    for (uint32_t i = 0; i < state(d)->worker_count; i++)
        if (state(d)->workers[i].worker.pid == w.pid)
            return &state(d)->workers[i];
    FAIL("no counts of session %d", (int)session);
}

TEST(who_has_differed_from_two_others_is_a_suspect)
{
    struct desk d = desk_new(1, true, false);
    comes_in(&d, 1, 0, UNITS);
    comes_in(&d, 2, 0, 1);
    rest_comes_in(&d, 1, 0);
    commit(&d);
    comes_in(&d, 102, 1, 1); /* in another session of the same process */
    comes_in(&d, 3, 1, UNITS);
    EXPECT_EQ(state(&d)->differences, 2);
    EXPECT(count_of(&d, 2)->suspect && count_of(&d, 2)->differences == 2);
    EXPECT(!count_of(&d, 1)->suspect && count_of(&d, 1)->differences == 1);
    EXPECT(!count_of(&d, 3)->suspect && count_of(&d, 3)->differences == 1);
    EXPECT_EQ(state(&d)->worker_count, 3);
}

TEST(new_session_of_a_worker_is_no_other_copy)
{
    struct desk d = desk_new(1, true, false);
    comes_in(&d, 1, 0, UNITS);
    comes_in(&d, 2, 0, 1);
    lease_forget(d.lease, 2);
    EXPECT_EQ(comes_in(&d, 102, 0, 1), 0); /* all once more */
    EXPECT(state(&d)->compared == 1 && state(&d)->recent[0].verdict == VERIFY_UNKNOWN);
    EXPECT_EQ(count_of(&d, 1)->wrong + count_of(&d, 2)->wrong, 0);
}

TEST(successor_of_a_dead_worker_is_no_third_opinion)
{
    struct desk d = desk_new(1, true, false);
    comes_in(&d, 1, 0, UNITS);
    comes_in(&d, 2, 0, 1);
    lease_forget(d.lease, 2);
    comes_in(&d, 3, 0, 1); /* as wrong as its predecessor */
    EXPECT_EQ(state(&d)->differences, 2);
    EXPECT_EQ(count_of(&d, 1)->wrong, 0);
    EXPECT_EQ(state(&d)->recent[0].verdict, VERIFY_UNKNOWN);
}

TEST(unit_that_takes_part_in_one_copy_only_is_a_difference)
{
    struct desk d = desk_new(1, true, false);
    const struct verify_worker a = worker_of(1), b = worker_of(2), c = worker_of(3);
    const uint8_t hash[VERIFY_HASH_BYTES] = { 0 };
    EXPECT(!verify_take(d.verify, d.core, &a, 0, NULL, true, &d.found));
    EXPECT(!verify_take(d.verify, d.core, &b, 0, NULL, false, &d.found)); /* not known */
    EXPECT(verify_take(d.verify, d.core, &c, 0, hash, false, &d.found));
    EXPECT(d.found.worker[0].session == 1 && d.found.worker[1].session == 3);
}

TEST(worker_that_dies_half_way_is_no_difference)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 2), 0);
    returns(&d, 1, 0, 2, 3);
    lease_forget(d.lease, 1);
    EXPECT_EQ(comes_in(&d, 2, 0, UNITS), 0);
    EXPECT(state(&d)->differences == 0 && state(&d)->compared == 0);
    EXPECT_EQ(ask(&d, 3), 0); /* in its place */
    EXPECT_EQ(comes_in(&d, 3, 0, UNITS), 0);
    EXPECT_EQ(state(&d)->compared, 1);
    rest_comes_in(&d, 2, 0);
    commit(&d);
    comes_in(&d, 2, 1, UNITS); /* alone */
    rest_comes_in(&d, 2, 1);
    commit(&d);
    EXPECT_EQ(ask(&d, 2), 2);
    EXPECT_EQ(state(&d)->missed, 1);
}

TEST(nothing_is_compared_behind_an_answer_to_prepare_or_over_a_reset)
{
    struct desk d = desk_new(1, true, false);
    enum step_reset_answer answer;
    struct step_actions actions;
    struct shd_err e;
    comes_in(&d, 1, 0, UNITS);
    CHECK(step_reset(d.core, 0, 2, false, &answer, &e) == SHD_OK && answer == STEP_RESET_DONE);
    while (step_reset_more(d.core, &actions))
        carry_out(&d, &actions);
    lease_begin_again(d.lease);
    EXPECT_EQ(comes_in(&d, 2, 0, 1), 0);
    EXPECT_EQ(state(&d)->differences, 0);
    rest_comes_in(&d, 2, 0);
    verify_close(d.verify, d.core, 0);
    EXPECT_EQ(comes_in(&d, 3, 0, 2), 0); /* its parameters may have moved */
    EXPECT_EQ(state(&d)->differences, 0);
    EXPECT_EQ(ask(&d, 4), ALL_IN);
    commit(&d);
    EXPECT_EQ(comes_in(&d, 1, 1, UNITS) + comes_in(&d, 2, 1, 0), 1);
}

/* A put may be committed in an attempt that begins after it: until its step is over. */
TEST(what_a_put_has_closed_no_reset_opens)
{
    struct desk d = desk_new(1, true, false);
    for (uint64_t attempt = 2; attempt <= 3; attempt++) {
        enum step_reset_answer is;
        struct step_actions actions;
        struct shd_err e;
        if (attempt == 2)
            verify_close_put(d.verify, d.core, 0);
        EXPECT_OK(step_reset(d.core, 0, attempt, /* agreed= */ true, &is, &e), &e);
        while (step_reset_more(d.core, &actions))
            carry_out(&d, &actions);
        lease_begin_again(d.lease);
        EXPECT_EQ(comes_in(&d, 1, 0, UNITS) + comes_in(&d, 2, 0, 1), 0);
        EXPECT_EQ(state(&d)->differences, 0);
    }
    rest_comes_in(&d, 1, 0);
    commit(&d);
    EXPECT_EQ(comes_in(&d, 1, 1, UNITS) + comes_in(&d, 2, 1, 1), 1);
}

TEST(successor_is_blind_in_the_step_it_finds)
{
    struct desk d = desk_new(1, true, true);
    EXPECT_EQ(comes_in(&d, 1, 0, UNITS) + comes_in(&d, 2, 0, 1), 0);
    rest_comes_in(&d, 1, 0);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
    commit(&d);
    EXPECT_EQ(state(&d)->missed, 0);
    EXPECT_EQ(comes_in(&d, 1, 1, UNITS) + comes_in(&d, 2, 1, 1), 1);
}

/* -- To whom it goes ----------------------------------------------------------------------------
 */

TEST(two_sessions_get_the_group_and_all_are_in_with_both_copies)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 2), 0);
    EXPECT_EQ(ask(&d, 3), 1);
    EXPECT_EQ(ask(&d, 1), 2); /* it has it */
    EXPECT_EQ(ask(&d, 3), 3);
    comes_in(&d, 3, 1, UNITS);
    comes_in(&d, 1, 2, UNITS);
    comes_in(&d, 3, 3, UNITS);
    comes_in(&d, 1, 0, UNITS);
    EXPECT_EQ(ask(&d, 1), WAITS);
    EXPECT_EQ(ask(&d, 3), WAITS);
    EXPECT(lease_next_ns(d.lease, d.core, d.now_ns) != UINT64_MAX);
    comes_in(&d, 2, 0, UNITS);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
    EXPECT_EQ(ask(&d, 3), ALL_IN);
}

TEST(worker_alone_waits_for_nobody)
{
    struct desk d = desk_new(1, true, false);
    for (uint32_t i = 0; i < MICROS; i++) {
        EXPECT_EQ(ask(&d, 1), i);
        comes_in(&d, 1, i, UNITS);
    }
    EXPECT_EQ(ask(&d, 1), ALL_IN);
}

TEST(copy_that_does_not_come_is_given_up)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 2), 0); /* and stops */
    for (uint32_t i = 0; i < MICROS; i++) {
        if (i > 0)
            EXPECT_EQ(ask(&d, 1), i);
        comes_in(&d, 1, i, UNITS);
    }
    uint32_t looks = 0;
    for (; ask(&d, 1) == WAITS && looks < 10000; looks++) {
        const uint64_t next_ns = lease_next_ns(d.lease, d.core, d.now_ns);
        EXPECT(next_ns > d.now_ns && next_ns != UINT64_MAX);
        d.now_ns = next_ns;
    }
    EXPECT(looks > 0 && looks < 1000);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
}

TEST(copy_of_a_dead_session_goes_to_another)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 2), 0);
    EXPECT_EQ(ask(&d, 3), 1);
    lease_forget(d.lease, 2);
    EXPECT_EQ(ask(&d, 3), 0);
    lease_give_back(d.lease, 3, 0);
    EXPECT_EQ(ask(&d, 4), 0);
}

/* Each of them died half way: one more is compared with nobody, and nobody is to wait for it. */
TEST(copies_of_the_dead_leave_no_work_that_nobody_looks_at)
{
    for (uint64_t dead = VERIFY_COPIES - 2; dead <= VERIFY_COPIES; dead++) {
        struct desk d = desk_new(1, true, false);
        for (uint64_t session = 1; session <= dead; session++) {
            EXPECT_EQ(ask(&d, session), 0);
            returns(&d, session, 0, 1, 2);
            lease_forget(d.lease, session);
        }
        for (uint32_t i = 0; i < MICROS; i++) {
            EXPECT_EQ(ask(&d, 10), i);
            comes_in(&d, 10, i, UNITS);
        }
        EXPECT_EQ(ask(&d, 10), ALL_IN);
        lease_forget(d.lease, 10);
        EXPECT_EQ(ask(&d, 11), dead < VERIFY_COPIES - 1 ? 0 : ALL_IN);
    }
}

TEST(difference_has_a_third_session_compute_it)
{
    struct desk d = desk_new(1, true, false);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 2), 0);
    EXPECT_EQ(ask(&d, 3), 1);
    EXPECT_EQ(comes_in(&d, 1, 0, UNITS) + comes_in(&d, 2, 0, 1), 1);
    rest_comes_in(&d, 1, 0);
    EXPECT_EQ(ask(&d, 1), WAITS); /* for the third one to come */
    EXPECT_EQ(ask(&d, 3), 0);
    EXPECT_EQ(ask(&d, 2), WAITS);
    EXPECT_EQ(comes_in(&d, 3, 0, UNITS), 1);
    EXPECT_EQ(d.found.verdict, VERIFY_FIRST);
    EXPECT_EQ(d.found.worker[0].session, 2);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
}

TEST(those_that_were_looked_at_longest_ago_come_first)
{
    struct desk d = desk_new(1, true, false);
    uint32_t turns[5] = { 0 };
    for (uint32_t step = 0; step < 40; step++) {
        const uint32_t group = step % MICROS;
        uint32_t had = 0;
        for (uint64_t session = 1; session <= 4; session++) {
            const uint32_t got = ask(&d, session);
            EXPECT(got < MICROS);
            had += got == group;
            turns[session] += got == group;
            comes_in(&d, session, got, UNITS);
        }
        EXPECT_EQ(had, 2);
        for (uint32_t got; (got = ask(&d, 1)) < MICROS;)
            comes_in(&d, 1, got, UNITS);
        for (uint64_t session = 2; session <= 4; session++)
            EXPECT_EQ(ask(&d, session), ALL_IN);
        commit(&d);
        d.now_ns += 10 * MS;
    }
    for (uint32_t session = 1; session <= 4; session++)
        EXPECT(turns[session] >= 19 && turns[session] <= 21);
}

TEST(other_owners_wait_for_what_has_begun_to_come)
{
    struct desk d = desk_new(1, false, false);
    comes_in(&d, 1, 0, UNITS);
    rest_comes_in(&d, 1, 0);
    EXPECT_EQ(ask(&d, 1), ALL_IN); /* nobody is known to have it */
    returns(&d, 2, 0, 2, 3);
    EXPECT_EQ(ask(&d, 1), WAITS);
    returns(&d, 2, 0, 1, 2);
    returns(&d, 2, 0, 0, 1);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
    EXPECT_EQ(state(&d)->compared, 1);
    commit(&d);
    comes_in(&d, 1, 1, UNITS);
    rest_comes_in(&d, 1, 1);
    returns(&d, 2, 1, 2, 3);
    EXPECT_EQ(ask(&d, 1), WAITS);
    lease_forget(d.lease, 2);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
}

TEST_MAIN()
