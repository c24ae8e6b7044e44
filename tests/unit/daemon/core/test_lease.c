/* Who computes what: on a real core, with sessions that return, die and dawdle in a made-up time.
 */
#include "daemon/core/lease.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_init.h"

#include "proto/base/check.h"
#include "tests/lib/test.h"

#define MS     UINT64_C(1000000)
#define MICROS 4u
#define CROWD  1024u /* workers beside as many owners as a model may have */

struct desk {
    struct ledger ledger;
    struct step *core;
    struct lease *lease;
    uint64_t now_ns;
    uint32_t ref;
};

/* One core with one unit and MICROS groups. Never freed: a test that fails leaves by longjmp. */
static struct desk desk_new(bool cautious)
{
    static _Alignas(128) uint8_t ledger[4 << 20];
    static _Alignas(16) uint8_t core[16384], lease[128 << 10];
    const struct ledger_shape shape = {
        .name = "m", .spec = "{}", .spec_bytes = 2, .owners = 1, .units = 1, .micros = MICROS
    };
    struct desk d = { .now_ns = 1000 * MS };
    struct shd_err e;
    uint64_t bytes;
    CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK && bytes <= sizeof ledger);
    CHECK(step_bytes(1, MICROS) <= sizeof core && lease_bytes(MICROS) <= sizeof lease);
    memset(ledger, 0, sizeof ledger);
    ledger_init(&d.ledger, ledger, &shape);
    d.core = step_init(core, &d.ledger, NULL);
    d.lease = lease_init(lease, MICROS, cautious);
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

static void comes_in(struct desk *d, uint32_t micro)
{
    struct step_actions actions;
    struct shd_err e;
    CHECK(step_return(d->core, ++d->ref, step_collecting(d->core), 0, micro, false, NULL, 0,
                      &actions, &e) == SHD_OK);
    carry_out(d, &actions);
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

/* One whole step in which each group took that long. */
static void usual_step(struct desk *d, uint64_t ns)
{
    for (uint32_t i = 0; i < MICROS; i++) {
        EXPECT_EQ(ask(d, 1), i);
        d->now_ns += ns;
        comes_in(d, i);
    }
    EXPECT_EQ(ask(d, 1), ALL_IN);
    commit(d);
}

TEST(groups_go_out_once_in_order_until_all_are_in)
{
    struct desk d = desk_new(false);
    for (uint32_t i = 0; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1 + i % 2), i);
    EXPECT_EQ(ask(&d, 1), WAITS);
    EXPECT_EQ(ask(&d, 3), WAITS);
    uint64_t session[2], since_ns[2];
    lease_holders(d.lease, 1, session, since_ns);
    EXPECT(session[0] == 2 && session[1] == 0 && since_ns[0] == d.now_ns);
    for (uint32_t i = 0; i < MICROS; i++)
        comes_in(&d, i);
    EXPECT_EQ(ask(&d, 3), ALL_IN);
}

TEST(step_not_begun_waits_and_committed_one_is_over)
{
    struct desk d = desk_new(false);
    uint32_t group;
    EXPECT_EQ(lease_ask(d.lease, d.core, 1, 1, d.now_ns, &group), LEASE_WAIT);
    usual_step(&d, MS);
    EXPECT_EQ(lease_ask(d.lease, d.core, 0, 1, d.now_ns, &group), LEASE_OVER);
    EXPECT_EQ(ask(&d, 1), 0);
}

TEST(what_a_dead_session_had_goes_to_the_next_one_at_once)
{
    struct desk d = desk_new(false);
    for (uint32_t i = 0; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1 + i % 2), i);
    comes_in(&d, 0);
    lease_forget(d.lease, 1); /* had 0 and 2 */
    EXPECT_EQ(ask(&d, 2), 2);
    EXPECT_EQ(ask(&d, 2), WAITS);
}

TEST(what_a_session_gives_back_goes_to_the_next_one_at_once)
{
    struct desk d = desk_new(false);
    for (uint32_t i = 0; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1), i); /* several at once */
    EXPECT_EQ(ask(&d, 2), WAITS);
    lease_give_back(d.lease, 1, 2);
    lease_give_back(d.lease, 2, 0); /* not its own: a no-op */
    EXPECT_EQ(ask(&d, 2), 2);
    EXPECT_EQ(ask(&d, 1), WAITS);
    lease_give_back(d.lease, 2, 2);
    EXPECT_EQ(ask(&d, 1), 2);
}

TEST(session_with_several_takes_as_long_as_the_next_one_will_take)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 1), 1);
    d.now_ns += 10 * MS;
    comes_in(&d, 0);
    EXPECT_EQ(ask(&d, 1), 2);
    EXPECT_EQ(ask(&d, 2), 3);
    comes_in(&d, 3);
    EXPECT_EQ(ask(&d, 2), WAITS);
    d.now_ns += 10 * MS + LEASE_OVERDUE_NS + 10 * MS; /* 1 is late, 2 is not yet */
    EXPECT_EQ(ask(&d, 2), 1);
    EXPECT_EQ(ask(&d, 2), WAITS);
}

TEST(slow_group_gets_a_backup_after_twice_the_usual_time)
{
    struct desk d = desk_new(false);
    usual_step(&d, 100 * MS);
    EXPECT_EQ(ask(&d, 1), 0);
    for (uint32_t i = 1; i < MICROS; i++) {
        EXPECT_EQ(ask(&d, 2), i);
        comes_in(&d, i);
    }
    const uint64_t due = d.now_ns + 2 * 100 * MS + LEASE_OVERDUE_NS + 1;
    EXPECT_EQ(ask(&d, 2), WAITS);
    EXPECT_EQ(ask(&d, 1), WAITS); /* never the one it has */
    EXPECT_EQ(lease_next_ns(d.lease, d.core, d.now_ns), due);
    d.now_ns = due - 1;
    EXPECT_EQ(ask(&d, 2), WAITS);
    d.now_ns = due;
    EXPECT_EQ(ask(&d, 1), WAITS);
    EXPECT_EQ(ask(&d, 2), 0); /* 1, 2 and 3 only wait for it: they need none */
    EXPECT_EQ(ask(&d, 3), WAITS);
    uint64_t session[2], since_ns[2];
    lease_holders(d.lease, 0, session, since_ns);
    EXPECT(session[0] == 1 && session[1] == 2 && since_ns[1] == due);
    lease_forget(d.lease, 1);
    lease_holders(d.lease, 0, session, since_ns);
    EXPECT(session[0] == 2 && session[1] == 0 && since_ns[0] == due);
}

TEST(oldest_late_group_is_backed_up_first_and_a_late_backup_is_replaced)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    const uint64_t late = 2 * 10 * MS + LEASE_OVERDUE_NS + 1;
    for (uint32_t i = 0; i < MICROS; i++, d.now_ns += MS)
        EXPECT_EQ(ask(&d, 1 + i), i);
    d.now_ns += late;
    EXPECT_EQ(ask(&d, 9), 0);
    EXPECT_EQ(ask(&d, 9), 1);
    EXPECT_EQ(ask(&d, 8), 2);
    EXPECT_EQ(ask(&d, 4), WAITS); /* 3 is its own */
    EXPECT_EQ(ask(&d, 8), 3);
    EXPECT_EQ(ask(&d, 7), WAITS);
    d.now_ns += late;
    EXPECT_EQ(ask(&d, 7), 0);
    uint64_t session[2], since_ns[2];
    lease_holders(d.lease, 0, session, since_ns);
    EXPECT(session[0] == 1 && session[1] == 7);
}

TEST(usual_time_is_a_median_that_one_stalled_worker_does_not_move)
{
    struct desk d = desk_new(false);
    for (uint32_t k = 0; k < 2; k++)
        usual_step(&d, 10 * MS);
    EXPECT_EQ(ask(&d, 1), 0);
    d.now_ns += 3600 * 1000 * MS;
    comes_in(&d, 0);
    for (uint32_t i = 1; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1), i);
    EXPECT_EQ(ask(&d, 2), WAITS);
    EXPECT_EQ(lease_next_ns(d.lease, d.core, d.now_ns),
              d.now_ns + 2 * 10 * MS + LEASE_OVERDUE_NS + 1);
}

TEST(nothing_known_yet_still_gives_a_backup_in_the_end)
{
    struct desk d = desk_new(false);
    for (uint32_t i = 0; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1), i);
    EXPECT_EQ(ask(&d, 2), WAITS);
    d.now_ns = lease_next_ns(d.lease, d.core, d.now_ns);
    EXPECT_EQ(ask(&d, 2), 0);
}

TEST(time_alone_is_not_named_again_when_nobody_can_be_given_what_is_due)
{
    struct desk d = desk_new(false);
    EXPECT_EQ(lease_next_ns(d.lease, d.core, d.now_ns), UINT64_MAX); /* nobody asked yet */
    for (uint32_t i = 0; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1), i);
    EXPECT_EQ(ask(&d, 1), WAITS); /* it has them all */
    EXPECT_EQ(lease_next_ns(d.lease, d.core, d.now_ns), UINT64_MAX);
    EXPECT_EQ(ask(&d, 2), WAITS);
    const uint64_t due = lease_next_ns(d.lease, d.core, d.now_ns);
    EXPECT(due > d.now_ns && due != UINT64_MAX);
    lease_forget(d.lease, 2);
    d.now_ns = due;
    EXPECT_EQ(ask(&d, 1), WAITS);
    EXPECT_EQ(lease_next_ns(d.lease, d.core, d.now_ns), UINT64_MAX);
}

/* Steps that session 1 computes, each group in that time, while session 9 asks before and after
 * each of them. Returns the first step in which 9 got a group. */
static uint64_t steps_beside_9(struct desk *d, uint64_t ns, uint32_t steps_max)
{
    for (uint32_t k = 0; k < steps_max; k++)
        for (uint32_t i = 0; i < MICROS; i++) {
            EXPECT_EQ(ask(d, 1), i);
            const uint32_t got = ask(d, 9);
            if (got != WAITS)
                return k;
            d->now_ns += ns;
            comes_in(d, i);
            if (i == MICROS - 1) {
                EXPECT_EQ(ask(d, 1), ALL_IN);
                commit(d);
            }
        }
    return steps_max;
}

/* Session 9 drops a group after that long (at least 30 ms), because the others did all in the end
 * and the step is over. 1 takes 10 ms for a group. */
static void overtake_9(struct desk *d, uint64_t ns)
{
    EXPECT_EQ(ask(d, 9), 0);
    for (uint32_t i = 1; i < MICROS; i++) {
        EXPECT_EQ(ask(d, 1), i);
        d->now_ns += 10 * MS;
        comes_in(d, i);
    }
    EXPECT_EQ(ask(d, 1), WAITS);
    d->now_ns += ns - 30 * MS;
    comes_in(d, 0);
    EXPECT_EQ(ask(d, 1), ALL_IN);
    commit(d);
}

TEST(slow_session_gets_nothing_while_faster_ones_would_do_all_before_it_did_one)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    overtake_9(&d, 50 * MS); /* at least 50 ms, and 1 takes 40 ms for all */
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 9), WAITS);
    const uint64_t due = d.now_ns + 2 * 10 * MS + LEASE_OVERDUE_NS + 1;
    EXPECT_EQ(lease_next_ns(d.lease, d.core, d.now_ns), due);
    EXPECT_EQ(ask(&d, 2), 1); /* nothing is known of it */
    d.now_ns = due - 1;
    EXPECT_EQ(ask(&d, 9), WAITS);
    d.now_ns = due; /* 1 cannot be counted on, nor 2 */
    EXPECT_EQ(ask(&d, 9), 2);
}

TEST(slow_session_gets_the_highest_group_when_it_is_done_before_the_others)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    overtake_9(&d, 30 * MS);
    EXPECT_EQ(ask(&d, 9), 3); /* 1 does three until then */
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 9), WAITS);
}

TEST(idle_session_takes_at_once_what_a_slow_one_has)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    overtake_9(&d, 39 * MS);
    EXPECT_EQ(ask(&d, 9), 3);
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT_EQ(ask(&d, 1), i);
        d.now_ns += MS;
        comes_in(&d, i);
    }
    EXPECT_EQ(ask(&d, 1), 3);
    EXPECT_EQ(ask(&d, 2), WAITS); /* two have it */
}

TEST(slow_session_is_tried_again_and_is_slow_no_more_when_it_was_not)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    overtake_9(&d, 500 * MS);
    EXPECT_EQ(steps_beside_9(&d, 10 * MS, 99), LEASE_TRIAL);
    uint64_t session[2], since_ns[2];
    lease_holders(d.lease, 3, session, since_ns); /* the highest */
    EXPECT_EQ(session[0], 9);
    d.now_ns += 10 * MS;
    comes_in(&d, 0);
    comes_in(&d, 3);
    EXPECT_EQ(ask(&d, 9), 1); /* as everybody */
    EXPECT_EQ(ask(&d, 1), 2);
}

TEST(session_that_failed_its_trial_waits_for_the_next_one)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    overtake_9(&d, 500 * MS);
    EXPECT_EQ(steps_beside_9(&d, 10 * MS, 99), LEASE_TRIAL);
    d.now_ns += 60 * MS; /* others have done it all */
    for (uint32_t i = 0; i < MICROS; i++)
        comes_in(&d, i);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
    commit(&d);
    EXPECT_EQ(steps_beside_9(&d, 10 * MS, 99), LEASE_TRIAL);
}

TEST(equal_sessions_never_wait_for_each_other)
{
    struct desk d = desk_new(false);
    usual_step(&d, 10 * MS);
    for (uint32_t i = 0; i < 2; i++) { /* 2 takes 14 ms */
        EXPECT_EQ(ask(&d, 2), i);
        d.now_ns += 14 * MS;
        comes_in(&d, i);
    }
    EXPECT_EQ(ask(&d, 2), 2);
    EXPECT_EQ(ask(&d, 1), 3);
}

TEST(more_sessions_than_are_known_apart_still_get_work_once_each)
{
    struct desk d = desk_new(false);
    for (uint64_t s = 1; s <= 3 * LEASE_WORKERS; s++, d.now_ns++)
        EXPECT_EQ(ask(&d, s), s <= MICROS ? s - 1 : WAITS);
    lease_forget(d.lease, 1);
    EXPECT_EQ(ask(&d, 3 * LEASE_WORKERS), 0);
}

TEST(cautious_owner_waits_for_what_may_be_on_its_way)
{
    struct desk d = desk_new(true);
    comes_in(&d, 1);
    EXPECT_EQ(ask(&d, 1), WAITS);
    const uint64_t due = lease_next_ns(d.lease, d.core, d.now_ns);
    EXPECT_EQ(due, d.now_ns + LEASE_GRACE_NS);
    comes_in(&d, 0); /* it was on its way */
    d.now_ns = due;
    EXPECT_EQ(ask(&d, 1), 2);
    lease_forget(d.lease, 1);
    EXPECT_EQ(ask(&d, 2), 2); /* handed out here: no more waiting */
}

TEST(caution_ends_with_a_step_that_nobody_else_handed_out)
{
    struct desk d = desk_new(true);
    for (uint32_t i = 0; i < MICROS; i++)
        comes_in(&d, i);
    EXPECT_EQ(ask(&d, 1), ALL_IN);
    commit(&d);
    comes_in(&d, 0); /* before anybody asked here: others hand out */
    EXPECT_EQ(ask(&d, 1), WAITS);
    for (uint32_t i = 1; i < MICROS; i++)
        comes_in(&d, i);
    commit(&d);
    EXPECT_EQ(ask(&d, 1), 0);
    EXPECT_EQ(ask(&d, 2), 1);
}

/* Four of many compute, and all ask in every step. */
static void crowded_step(struct desk *d, uint64_t ns)
{
    for (uint64_t s = 1; s <= CROWD; s++, d->now_ns++)
        EXPECT_EQ(ask(d, s), s <= MICROS ? (uint32_t)s - 1 : WAITS);
    d->now_ns += ns;
    for (uint32_t i = 0; i < MICROS; i++)
        comes_in(d, i);
    for (uint64_t s = 1; s <= CROWD; s++, d->now_ns++)
        EXPECT_EQ(ask(d, s), ALL_IN);
    commit(d);
}

/* Who is not known any more has no time that it takes: its group counted as late after what is
 * usual where nothing is known, 1 s. */
TEST(how_long_each_takes_is_known_of_as_many_as_a_model_may_have)
{
    struct desk d = desk_new(false);
    for (uint32_t step = 0; step < 3; step++)
        crowded_step(&d, 10000 * MS);
    for (uint64_t s = 1; s <= MICROS; s++)
        EXPECT_EQ(ask(&d, s), s - 1);
    d.now_ns += 5000 * MS;
    EXPECT_EQ(ask(&d, CROWD), WAITS);
    d.now_ns += 20000 * MS; /* twice what is usual, and more */
    EXPECT_EQ(ask(&d, CROWD), 0);
}

TEST(clock_that_jumps_back_delays_and_breaks_nothing)
{
    struct desk d = desk_new(false);
    for (uint32_t i = 0; i < MICROS; i++)
        EXPECT_EQ(ask(&d, 1), i);
    d.now_ns = 5;
    EXPECT_EQ(ask(&d, 2), WAITS);
    comes_in(&d, 0); /* counts as a group that took no time */
    EXPECT_EQ(ask(&d, 2), WAITS);
    EXPECT(lease_next_ns(d.lease, d.core, d.now_ns) > d.now_ns);
    for (uint32_t i = 1; i < MICROS; i++)
        comes_in(&d, i);
    EXPECT_EQ(ask(&d, 2), ALL_IN);
}

TEST_MAIN()
