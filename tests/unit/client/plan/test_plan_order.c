/* The order of operations, policy by policy, spelled out and compared with what FSDP and DeepSpeed
 * promise (docs/schedules.md): chains hold exactly as many units and gradients, traces are
 * followed, used, frozen and skipped units come and go where they should. */
#include "client/plan/plan_check.h"
#include "proto/base/check.h"
#include "tests/lib/plan_toy.h"

#define UNIT_BYTES 4000u /* of a toy_chain(): parameters in f32, and gradient */

static struct toy toy;

static void expect_order(struct plan_policy policy, uint32_t micros, const char *want)
{
    struct shd_err e = { 0 };
    char got[4096];
    struct plan plan = toy_build(&toy, &policy, micros);
    toy_print(&plan, got, sizeof got);
    EXPECT_OK(plan_check(&plan, &toy.spec, &policy, &toy.trace, &e), &e);
    plan_free(&plan);
    EXPECT_STR(got, want);
}

static struct plan_policy policy_of(enum plan_strategy strategy, enum plan_backward_prefetch pre,
                                    uint32_t forward_prefetch)
{
    return (struct plan_policy){ .strategy = strategy,
                                 .backward_prefetch = pre,
                                 .forward_prefetch = forward_prefetch };
}

/* -- Spelled out ----------------------------------------------------------------------------- */

/* FSDP1 BACKWARD_PRE: wait AG(i), issue AG(i-1), backward(i), free U_i, RS(i). */
TEST(zero3_pre_is_fsdp_backward_pre)
{
    toy_chain(&toy, 3);
    expect_order(PLAN_POLICY_DEFAULT, 1,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 FREE0 WAIT1 FETCH2 FORWARD1 FREE1 WAIT2 FORWARD2 "
                 "FETCH1 BACKWARD2 FREE2 RETURN2 "
                 "WAIT1 FETCH0 BACKWARD1 FREE1 RETURN1 "
                 "WAIT0 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
}

/* FSDP1 BACKWARD_POST: backward(i), free U_i, issue AG(i-1), RS(i). */
TEST(zero3_post_is_fsdp_backward_post)
{
    toy_chain(&toy, 3);
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_POST, 0), 1,
                 "FETCH0 WAIT0 FORWARD0 FREE0 FETCH1 WAIT1 FORWARD1 FREE1 FETCH2 WAIT2 FORWARD2 "
                 "BACKWARD2 FREE2 FETCH1 RETURN2 "
                 "WAIT1 BACKWARD1 FREE1 FETCH0 RETURN1 "
                 "WAIT0 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
}

/* FSDP1 without: RS(i) before AG(i-1). */
TEST(zero3_none_returns_before_it_fetches)
{
    toy_chain(&toy, 3);
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_NONE, 0), 1,
                 "FETCH0 WAIT0 FORWARD0 FREE0 FETCH1 WAIT1 FORWARD1 FREE1 FETCH2 WAIT2 FORWARD2 "
                 "BACKWARD2 FREE2 RETURN2 FETCH1 "
                 "WAIT1 BACKWARD1 FREE1 RETURN1 FETCH0 "
                 "WAIT0 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
}

TEST(zero2_keeps_from_forward_to_backward)
{
    toy_chain(&toy, 2);
    expect_order(policy_of(PLAN_ZERO2, PLAN_PREFETCH_PRE, 1), 2,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FORWARD1 "
                 "BACKWARD1 FREE1 RETURN1 BACKWARD0 FREE0 RETURN0 "
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FORWARD1 "
                 "BACKWARD1 FREE1 RETURN1 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
}

TEST(zero1_and_ddp_fetch_once_a_step)
{
    toy_chain(&toy, 2);
    expect_order(policy_of(PLAN_ZERO1, PLAN_PREFETCH_PRE, 1), 2,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FORWARD1 "
                 "BACKWARD1 RETURN1 BACKWARD0 RETURN0 "
                 "FORWARD0 FORWARD1 BACKWARD1 RETURN1 BACKWARD0 RETURN0 "
                 "FREE1 FREE0 PREPARE0 COMMIT0");
    expect_order(policy_of(PLAN_DDP, PLAN_PREFETCH_PRE, 1), 2,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FORWARD1 "
                 "BACKWARD1 BACKWARD0 RETURN1 RETURN0 "
                 "FORWARD0 FORWARD1 BACKWARD1 BACKWARD0 RETURN1 RETURN0 "
                 "FREE1 FREE0 PREPARE0 COMMIT0");
}

TEST(accumulate_returns_in_the_last_of_each_group)
{
    toy_chain(&toy, 2);
    toy.spec.accumulate = 2;
    expect_order(policy_of(PLAN_ZERO2, PLAN_PREFETCH_NONE, 0), 2,
                 "FETCH0 WAIT0 FORWARD0 FETCH1 WAIT1 FORWARD1 "
                 "BACKWARD1 FREE1 BACKWARD0 FREE0 "
                 "FETCH0 WAIT0 FORWARD0 FETCH1 WAIT1 FORWARD1 "
                 "BACKWARD1 FREE1 RETURN1 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
    expect_order(policy_of(PLAN_DDP, PLAN_PREFETCH_NONE, 0), 2,
                 "FETCH0 WAIT0 FORWARD0 FETCH1 WAIT1 FORWARD1 BACKWARD1 BACKWARD0 "
                 "FORWARD0 FORWARD1 BACKWARD1 BACKWARD0 RETURN1 RETURN0 "
                 "FREE1 FREE0 PREPARE0 COMMIT0");
}

TEST(frozen_units_are_fetched_and_not_returned)
{
    toy_chain(&toy, 2);
    toy.units[0].frozen = true;
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_POST, 1), 1,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 FREE0 WAIT1 FORWARD1 "
                 "BACKWARD1 FREE1 FETCH0 RETURN1 WAIT0 BACKWARD0 FREE0 PREPARE0 COMMIT0");
    struct plan_policy ddp = { .strategy = PLAN_DDP };
    struct plan plan = toy_build(&toy, &ddp, 1);
    EXPECT_EQ(plan.cost.live_grad_bytes_max, UNIT_BYTES);
    EXPECT_EQ(plan.cost.returned_bytes, UNIT_BYTES);
    EXPECT_EQ(plan.cost.fetched_bytes, 2 * UNIT_BYTES);
    plan_free(&plan);
}

/* -- Used units ------------------------------------------------------------------------------ */

/* A tied head: the embedding stays from its own forward to its own backward. */
TEST(used_unit_is_held_and_returned_after_its_own_backward)
{
    toy_chain(&toy, 3);
    toy.units[2].uses[toy.units[2].uses_count++] = 0;
    expect_order(PLAN_POLICY_DEFAULT, 1,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FETCH2 FORWARD1 FREE1 WAIT2 FORWARD2 "
                 "FETCH1 BACKWARD2 FREE2 RETURN2 WAIT1 BACKWARD1 FREE1 RETURN1 "
                 "BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
    struct plan_policy policy = PLAN_POLICY_DEFAULT;
    struct plan plan = toy_build(&toy, &policy, 1);
    EXPECT_EQ(plan.cost.live_units_max, 3);
    EXPECT_EQ(plan.cost.live_grads_max, 2);
    plan_free(&plan);
}

/* The same under a bound of two: no room to keep it, so it is released and fetched again. */
TEST(bound_forces_a_release)
{
    toy_chain(&toy, 4);
    toy.units[3].uses[toy.units[3].uses_count++] = 0;
    struct plan_policy policy = policy_of(PLAN_ZERO3, PLAN_PREFETCH_PRE, 2);
    policy.max_live_units = 2;
    expect_order(policy, 1,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FORWARD1 FREE1 FETCH2 WAIT2 FORWARD2 FREE2 "
                 "FETCH3 WAIT3 FORWARD3 BACKWARD3 FREE3 RETURN3 "
                 "FETCH2 WAIT2 BACKWARD2 FREE2 RETURN2 FETCH1 WAIT1 BACKWARD1 FREE1 RETURN1 "
                 "BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
    toy.units[2].uses[toy.units[2].uses_count++] = 1; /* two to keep, room for one */
    expect_order(policy, 1,
                 "FETCH0 WAIT0 FETCH1 FORWARD0 WAIT1 FORWARD1 FREE0 FETCH2 WAIT2 FORWARD2 "
                 "FREE2 FREE1 FETCH0 FETCH3 WAIT0 WAIT3 FORWARD3 BACKWARD3 FREE3 RETURN3 "
                 "FREE0 FETCH1 FETCH2 WAIT1 WAIT2 BACKWARD2 FREE2 RETURN2 "
                 "FETCH0 BACKWARD1 FREE1 RETURN1 WAIT0 BACKWARD0 FREE0 RETURN0 "
                 "PREPARE0 COMMIT0");
}

/* Of two that could make room, that which is needed last goes. */
TEST(bound_releases_what_is_needed_last)
{
    toy_chain(&toy, 5);
    toy.units[4].uses[toy.units[4].uses_count++] = 0;
    toy.units[3].uses[toy.units[3].uses_count++] = 1;
    struct plan_policy policy = policy_of(PLAN_ZERO3, PLAN_PREFETCH_NONE, 0);
    policy.max_live_units = 2;
    expect_order(policy, 1,
                 "FETCH0 WAIT0 FORWARD0 FETCH1 WAIT1 FORWARD1 FREE0 FETCH2 WAIT2 FORWARD2 FREE2 "
                 "FETCH3 WAIT3 FORWARD3 FREE3 FREE1 FETCH0 FETCH4 WAIT0 WAIT4 FORWARD4 "
                 "BACKWARD4 FREE4 RETURN4 FREE0 FETCH1 FETCH3 WAIT1 WAIT3 BACKWARD3 FREE3 RETURN3 "
                 "FETCH2 WAIT2 BACKWARD2 FREE2 RETURN2 BACKWARD1 FREE1 RETURN1 "
                 "FETCH0 WAIT0 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0");
}

/* Not in the trace itself: there for its user, gone and returned after the last user's backward. */
TEST(used_unit_outside_the_trace_serves_its_users)
{
    toy_chain(&toy, 4);
    toy.units[2].uses[toy.units[2].uses_count++] = 0;
    toy.units[3].uses[toy.units[3].uses_count++] = 0;
    toy.order[0] = 1;
    toy.order[1] = 2;
    toy.order[2] = 3;
    toy.trace.count = 3;
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_NONE, 0), 1,
                 "FETCH1 WAIT1 FORWARD1 FREE1 FETCH0 FETCH2 WAIT0 WAIT2 FORWARD2 FREE2 "
                 "FETCH3 WAIT3 FORWARD3 BACKWARD3 FREE3 RETURN3 "
                 "FETCH2 WAIT2 BACKWARD2 FREE2 FREE0 RETURN2 RETURN0 "
                 "FETCH1 WAIT1 BACKWARD1 FREE1 RETURN1 PREPARE0 COMMIT0");
}

/* It ran after its user: the user's backward is the last to add to its gradient. */
TEST(used_unit_behind_its_user_is_returned_after_the_user)
{
    toy_chain(&toy, 2);
    toy.units[1].uses[toy.units[1].uses_count++] = 0;
    toy.order[0] = 1;
    toy.order[1] = 0;
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_PRE, 0), 1,
                 "FETCH0 FETCH1 WAIT0 WAIT1 FORWARD1 FREE1 FORWARD0 "
                 "FETCH1 BACKWARD0 WAIT1 BACKWARD1 FREE1 FREE0 RETURN1 RETURN0 "
                 "PREPARE0 COMMIT0");
}

/* -- Traces ---------------------------------------------------------------------------------- */

/* What runs next is what ran next, not the neighbour in the spec (pytorch#108190). */
TEST(prefetch_follows_the_trace)
{
    toy_chain(&toy, 5);
    static const uint32_t ran[] = { 0, 3, 1, 4 }; /* 2 was skipped */
    memcpy(toy.order, ran, sizeof ran);
    toy.trace.count = ARRAY_SIZE(ran);
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_POST, 1), 1,
                 "FETCH0 WAIT0 FETCH3 FORWARD0 FREE0 WAIT3 FETCH1 FORWARD3 FREE3 "
                 "WAIT1 FETCH4 FORWARD1 FREE1 WAIT4 FORWARD4 "
                 "BACKWARD4 FREE4 FETCH1 RETURN4 WAIT1 BACKWARD1 FREE1 FETCH3 RETURN1 "
                 "WAIT3 BACKWARD3 FREE3 FETCH0 RETURN3 WAIT0 BACKWARD0 FREE0 RETURN0 "
                 "PREPARE0 COMMIT0");
}

/* A nested unit is one that its inner units use: POST prefetches whatever really comes next with
 * all it needs, once, wherever it is nested. */
TEST(post_prefetches_the_next_of_nested_units)
{
    toy_chain(&toy, 4); /* 0 is the outer unit of 1 and 3, not of 2 */
    toy.units[1].uses[toy.units[1].uses_count++] = 0;
    toy.units[3].uses[toy.units[3].uses_count++] = 0;
    static const uint32_t ran[] = { 2, 1, 3 };
    memcpy(toy.order, ran, sizeof ran);
    toy.trace.count = ARRAY_SIZE(ran);
    expect_order(policy_of(PLAN_ZERO3, PLAN_PREFETCH_POST, 0), 1,
                 "FETCH2 WAIT2 FORWARD2 FREE2 FETCH0 FETCH1 WAIT0 WAIT1 FORWARD1 FREE1 "
                 "FETCH3 WAIT3 FORWARD3 BACKWARD3 FREE3 FETCH1 RETURN3 "
                 "WAIT1 BACKWARD1 FREE1 FREE0 FETCH2 RETURN1 RETURN0 "
                 "WAIT2 BACKWARD2 FREE2 RETURN2 PREPARE0 COMMIT0");
}

/* DeepSpeed has nothing to prefetch by until it has seen an iteration; here the spec's order is
 * known before the first one. */
TEST(first_step_prefetches_without_a_trace)
{
    struct shd_err e = { 0 };
    char bare[1024], traced[1024];
    toy_chain(&toy, 5);
    const struct plan_policy policy = PLAN_POLICY_DEFAULT;
    struct plan plan;
    EXPECT_OK(plan_build(&toy.spec, &policy, NULL, 1, &plan, &e), &e);
    toy_print(&plan, bare, sizeof bare);
    plan_free(&plan);
    plan = toy_build(&toy, &policy, 1);
    toy_print(&plan, traced, sizeof traced);
    plan_free(&plan);
    EXPECT_STR(bare, traced);
    EXPECT_HAS(bare, "WAIT0 FETCH1 FORWARD0");
}

/* -- Chains: the peers' figures, exactly ----------------------------------------------------- */

struct want {
    uint32_t units, grads; /* U and G at most, and at once */
};

static void expect_chain(const struct plan_policy *p, uint32_t micros, struct want want)
{
    struct plan plan = toy_build(&toy, p, micros);
    EXPECT_EQ(plan.cost.live_units_max, want.units);
    EXPECT_EQ(plan.cost.live_grads_max, want.grads);
    EXPECT_EQ(plan.cost.live_param_bytes_max, want.units * UNIT_BYTES);
    EXPECT_EQ(plan.cost.live_grad_bytes_max, want.grads * UNIT_BYTES);
    EXPECT_EQ(plan.cost.live_bytes_max, (want.units + want.grads) * UNIT_BYTES);
    plan_free(&plan);
}

TEST(zero3_chain_holds_what_fsdp_promises)
{
    for (uint32_t units = 1; units <= TOY_UNITS_MAX; units++) {
        toy_chain(&toy, units);
        const struct plan_policy pre = policy_of(PLAN_ZERO3, PLAN_PREFETCH_PRE, 0);
        const struct plan_policy post = policy_of(PLAN_ZERO3, PLAN_PREFETCH_POST, 0);
        const struct plan_policy none = policy_of(PLAN_ZERO3, PLAN_PREFETCH_NONE, 0);
        expect_chain(&pre, 3, (struct want){ units < 2 ? units : 2, 1 }); /* 2U + 1G */
        expect_chain(&post, 3, (struct want){ 1, 1 });                    /* 1U + 1G */
        expect_chain(&none, 3, (struct want){ 1, 1 });
    }
}

/* m ahead: m + 1 units in forward, where FSDP2's explicit lists hold m + 2. */
TEST(forward_prefetch_holds_one_more_than_its_depth)
{
    for (uint32_t depth = 0; depth < 8; depth++) {
        const uint32_t units = 12;
        toy_chain(&toy, units);
        const struct plan_policy p = policy_of(PLAN_ZERO3, PLAN_PREFETCH_NONE, depth);
        struct plan plan = toy_build(&toy, &p, 1);
        EXPECT_EQ(plan.cost.live_units_max, depth + 1);
        EXPECT_EQ(plan.cost.live_bytes_max,
                  depth > 1 ? (depth + 1) * UNIT_BYTES : 2 * UNIT_BYTES); /* or 1U + 1G */
        plan_free(&plan);
    }
}

TEST(keeping_strategies_hold_the_model)
{
    for (uint32_t units = 1; units <= TOY_UNITS_MAX; units++) {
        toy_chain(&toy, units);
        for (int pre = PLAN_PREFETCH_PRE; pre <= PLAN_PREFETCH_NONE; pre++) {
            const enum plan_backward_prefetch prefetch = (enum plan_backward_prefetch)pre;
            const struct plan_policy zero2 = policy_of(PLAN_ZERO2, prefetch, 1);
            const struct plan_policy zero1 = policy_of(PLAN_ZERO1, prefetch, 1);
            const struct plan_policy ddp = policy_of(PLAN_DDP, prefetch, 1);
            toy.spec.accumulate = 1;
            expect_chain(&zero2, 4, (struct want){ units, 1 });
            expect_chain(&zero1, 4, (struct want){ units, 1 });
            expect_chain(&ddp, 4, (struct want){ units, units });
            toy.spec.accumulate = 4; /* gradients of all units until the group is through */
            expect_chain(&zero1, 4, (struct want){ units, units });
        }
    }
}

/* -- Bytes: FACTS 1 -------------------------------------------------------------------------- */

static void expect_moved(enum plan_strategy strategy, uint32_t accumulate, uint32_t micros,
                         uint64_t fetched, uint64_t returned)
{
    const struct plan_policy p = { .strategy = strategy, .grad_dtype = SHD_BF16 };
    toy.spec.accumulate = accumulate;
    struct plan plan = toy_build(&toy, &p, micros);
    EXPECT_EQ(plan.cost.fetched_bytes, fetched);
    EXPECT_EQ(plan.cost.returned_bytes, returned);
    plan_free(&plan);
}

/* P parameters, b_p and b_r bytes each, k micro-batches of which a are summed before a return. */
TEST(bytes_equal_the_formulas)
{
    for (uint32_t k = 1; k <= 6; k++) {
        toy_chain(&toy, 7);
        const uint64_t params = 7 * 1000, bp = 4, br = 2, last = 1000;
        expect_moved(PLAN_DDP, k, k, params * bp, params * br);           /* DDP: P b_p + P b_r */
        expect_moved(PLAN_ZERO1, k, k, params * bp, params * br);         /* ZeRO-1, with no_sync */
        expect_moved(PLAN_ZERO1, 1, k, params * bp, k * params * br);     /* ZeRO-2 */
        expect_moved(PLAN_ZERO2, 1, k, k * params * bp, k * params * br); /* SHARD_GRAD_OP */
        expect_moved(PLAN_ZERO3, 1, k, k * (2 * params - last) * bp, k * params * br); /* ZeRO-3 */
    }
}

TEST_MAIN()
