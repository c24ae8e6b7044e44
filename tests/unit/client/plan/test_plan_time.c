/* Predicted seconds: what a person can work out of a small case, and what must hold of any. */
#include "client/plan/plan_time.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "tests/lib/plan_toy.h"

#define TOYS 400u

/* A machine whose every rate is nothing; four processors. */
static struct plan_rates free_machine(void)
{
    return (struct plan_rates){
        .processors = 4, .near_bytes = 1e6, .far_bytes = 1e8, .threads_share = 0.25
    };
}

static const struct plan_shape one = { .workers = 1, .daemons = 1, .threads = 1, .slots = 64 };

/* Units as a spec that was parsed has them: whole blocks, of which owners hold slices. */
static void lay_out(struct toy *t)
{
    t->spec.elems = 0;
    for (uint32_t u = 0; u < t->spec.unit_count; u++) {
        t->units[u].elems = layout_align(t->tensors[u].elems, SHD_BLOCK_ELEMS);
        t->spec.elems += t->tensors[u].elems;
    }
}

static struct plan_time time_of(struct toy *t, const struct plan_policy *p, uint32_t micros,
                                const struct plan_rates *rates, const struct plan_shape *shape,
                                double forward_ns, double backward_ns)
{
    double forward[TOY_UNITS_MAX], backward[TOY_UNITS_MAX];
    const struct plan_compute compute = { forward, backward };
    struct plan_time got;
    struct shd_err e = { 0 };
    struct plan plan;
    for (uint32_t u = 0; u < t->spec.unit_count; u++) {
        forward[u] = forward_ns;
        backward[u] = backward_ns;
    }
    lay_out(t);
    EXPECT_OK(plan_build(&t->spec, p, NULL, micros, &plan, &e), &e);
    EXPECT_OK(plan_time(&t->spec, &plan, rates, shape, &compute, SHD_F32, &got, &e), &e);
    plan_free(&plan);
    return got;
}

static void expect_parts(const struct plan_time *t)
{
    const double parts = t->compute_ns + t->fetch_ns + t->return_ns + t->update_ns + t->wait_ns;
    EXPECT(t->step_ns > 0);
    EXPECT_NEAR(parts, t->step_ns, t->step_ns * 1e-9);
    EXPECT(t->compute_ns >= 0 && t->fetch_ns >= 0 && t->return_ns >= 0 && t->update_ns >= 0);
    EXPECT(t->wait_ns >= 0);
}

static void chain(struct toy *t, uint32_t units)
{
    toy_chain(t, units);
    t->spec.optimizer = SPEC_ADAMW;
    t->spec.publish = t->spec.grad_dtype = SHD_F32;
}

TEST(compute_alone_takes_its_sum)
{
    struct toy t;
    const struct plan_policy p = PLAN_POLICY_DEFAULT;
    const struct plan_rates rates = free_machine();
    chain(&t, 5);
    const struct plan_time got = time_of(&t, &p, 3, &rates, &one, 1000, 2000);
    expect_parts(&got);
    EXPECT_NEAR(got.step_ns, 5 * 3 * 3000.0, 1);
    EXPECT_STR(plan_time_bound(&got), "compute");
}

/* One unit: its gradient is summed, then it is updated, and nothing overlaps. */
TEST(sums_and_updates_are_waited_for)
{
    struct toy t;
    const struct plan_policy p = PLAN_POLICY_DEFAULT;
    struct plan_rates rates = free_machine();
    chain(&t, 1);
    rates.first[0] = (struct plan_rate){ 2, 2 };
    rates.next[0] = (struct plan_rate){ 3, 3 };
    rates.update[SPEC_ADAMW - 1][0] = (struct plan_rate){ 5, 5 };
    rates.commit_ns = 70;
    struct plan_time got = time_of(&t, &p, 1, &rates, &one, 100, 200);
    expect_parts(&got);
    const double elems = (double)t.units[0].elems;
    EXPECT_NEAR(got.compute_ns, 300, 1);
    EXPECT_NEAR(got.wait_ns, 70, 1);
    EXPECT_NEAR(got.update_ns, (2 + 5) * elems, 1);
    got = time_of(&t, &p, 2, &rates, &one, 0, 0); /* the second sum has another rate */
    EXPECT_NEAR(got.step_ns, (2 + 3 + 5) * elems + 70, 1);
    EXPECT_STR(plan_time_bound(&got), "update");
}

/* Two daemons hold half a unit each, two workers have half the micro-batches. */
TEST(more_of_them_take_less)
{
    struct toy t;
    const struct plan_policy p = PLAN_POLICY_DEFAULT;
    struct plan_rates rates = free_machine();
    struct plan_shape shape = one;
    chain(&t, 4);
    for (uint32_t u = 0; u < 4; u++)
        t.tensors[u].elems = 1 << 20;
    rates.update[SPEC_ADAMW - 1][0] = (struct plan_rate){ 1, 1 };
    const double alone = time_of(&t, &p, 1, &rates, &shape, 0, 0).step_ns;
    EXPECT_NEAR(alone, 4 << 20, 1);
    shape.daemons = 2;
    EXPECT_NEAR(time_of(&t, &p, 1, &rates, &shape, 0, 0).step_ns, alone / 2, 1);
    shape.daemons = 1;
    shape.threads = 4;
    EXPECT_NEAR(time_of(&t, &p, 1, &rates, &shape, 0, 0).step_ns, alone / 4, 1);
    shape = (struct plan_shape){ .workers = 4, .daemons = 1, .threads = 1, .slots = 64 };
    rates = free_machine();
    EXPECT_NEAR(time_of(&t, &p, 1, &rates, &shape, 10, 20).step_ns, 120, 1);
    rates.processors = 2; /* that four share */
    EXPECT_NEAR(time_of(&t, &p, 1, &rates, &shape, 10, 20).step_ns, 240, 1);
}

/* A copy overlaps the compute of the unit before, except where nothing is ahead. */
TEST(copies_hide_behind_compute)
{
    struct toy t;
    struct plan_policy p = PLAN_POLICY_DEFAULT;
    struct plan_rates rates = free_machine();
    struct plan_shape shape = one;
    chain(&t, 6);
    shape.copies = true;
    shape.slots = 2;
    rates.fetch[0] = (struct plan_rate){ 1, 1 };
    const struct plan_time ahead = time_of(&t, &p, 1, &rates, &shape, 1e5, 1e5);
    p.forward_prefetch = 0;
    p.backward_prefetch = PLAN_PREFETCH_NONE;
    const struct plan_time none = time_of(&t, &p, 1, &rates, &shape, 1e5, 1e5);
    expect_parts(&none);
    EXPECT(ahead.fetch_ns > 0);
    EXPECT_NEAR(none.fetch_ns, 11 * ahead.fetch_ns, 11);
    EXPECT_NEAR(none.step_ns - none.fetch_ns, ahead.step_ns - ahead.fetch_ns, 1);
}

/* Any model, policy and shape comes to an end, and its parts to the whole. */
TEST(random_plans_never_stand_still)
{
    uint64_t rng = 7;
    struct plan_rates rates = free_machine();
    rates.wake_ns = 3;
    rates.send_ns = 5;
    rates.op_ns = 1;
    rates.return_ns = 7;
    rates.kernel_ns = 2;
    rates.commit_ns = 11;
    for (uint32_t d = 0; d < PLAN_DTYPES; d++) {
        rates.first[d] = rates.next[d] = (struct plan_rate){ 0.01, 0.02 };
        rates.stage[d] = rates.fetch[d] = (struct plan_rate){ 0.01, 0.03 };
        for (uint32_t k = 0; k < SPEC_OPTIMIZERS; k++)
            rates.update[k][d] = (struct plan_rate){ 0.02, 0.04 };
    }
    for (uint32_t i = 0; i < TOYS; i++) {
        struct toy t;
        struct plan plan;
        struct plan_time got;
        struct shd_err e = { 0 };
        toy_random(&t, &rng);
        lay_out(&t);
        const struct plan_policy p = toy_policy(&rng);
        const struct plan_shape shape = { .workers = 1 + toy_below(&rng, 4),
                                          .daemons = 1 + toy_below(&rng, 4),
                                          .threads = 1 + toy_below(&rng, 3),
                                          .slots = 1 + toy_below(&rng, 4),
                                          .copies = toy_below(&rng, 2) == 1 };
        const uint32_t a = t.spec.accumulate > 0 ? t.spec.accumulate : 1;
        t.spec.optimizer = (enum spec_optimizer)(1 + toy_below(&rng, SPEC_OPTIMIZERS));
        if (plan_build(&t.spec, &p, NULL, a * (1 + toy_below(&rng, 3)), &plan, &e) != SHD_OK)
            continue; /* a bound that cannot be met */
        EXPECT_OK(plan_time(&t.spec, &plan, &rates, &shape, NULL, SHD_BF16, &got, &e), &e);
        plan_free(&plan);
        expect_parts(&got);
    }
}

TEST(too_large_a_plan_is_refused)
{
    struct toy t;
    struct plan plan;
    struct plan_time got;
    struct shd_err e = { 0 };
    const struct plan_policy p = PLAN_POLICY_DEFAULT;
    const struct plan_rates rates = free_machine();
    struct plan_shape shape = one;
    chain(&t, 20);
    shape.daemons = 1024;
    EXPECT_OK(plan_build(&t.spec, &p, NULL, 200, &plan, &e), &e);
    EXPECT_EQ(plan_time(&t.spec, &plan, &rates, &shape, NULL, SHD_F32, &got, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "operations a step, at most");
    plan_free(&plan);
}

TEST_MAIN()
