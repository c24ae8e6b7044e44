/* Plans as data: thousands of random models by seed are planned, checked, compared with what a
 * plain restatement of the rules predicts, and broken in every place to see that it is refused. */
#include "client/plan.h"
#include "proto/check.h"
#include "proto/sys.h"
#include "tests/test.h"

#include <errno.h>

#define UNITS_MAX 20u
#define SPECS     3000

/* As much of a spec as a plan looks at. */
struct toy_spec {
    struct spec spec;
    struct spec_unit units[UNITS_MAX];
};

static bool uses(const struct spec *s, uint32_t user, uint32_t unit)
{
    for (uint32_t i = 0; i < s->units[user].uses_count; i++)
        if (s->units[user].uses[i] == unit)
            return true;
    return false;
}

static void chain(struct toy_spec *t, uint32_t units)
{
    static char name[] = "u";
    *t = (struct toy_spec){ .spec = { .unit_count = units } };
    t->spec.units = t->units;
    for (uint32_t u = 0; u < units; u++)
        t->units[u].name = name;
}

static void random_spec(struct toy_spec *t, uint64_t *rng)
{
    chain(t, 1 + (uint32_t)(test_random(rng) % UNITS_MAX));
    for (uint32_t u = 1; u < t->spec.unit_count; u++) {
        if (test_random(rng) % 3 != 0)
            continue;
        const uint32_t wanted = 1 + (uint32_t)(test_random(rng) % 3);
        for (uint32_t i = 0; i < wanted; i++) {
            const uint32_t w = (uint32_t)(test_random(rng) % u);
            if (!uses(&t->spec, u, w))
                t->units[u].uses[t->units[u].uses_count++] = w;
        }
    }
}

/* Does unit or a later one read w? */
static bool read_from(const struct spec *s, uint32_t unit, uint32_t w)
{
    for (uint32_t v = unit; v < s->unit_count; v++)
        if (v == w || uses(s, v, w))
            return true;
    return false;
}

static uint32_t predict_grads(const struct spec *s)
{
    uint32_t max = 0;
    for (uint32_t u = 0; u < s->unit_count; u++) {
        uint32_t live = 1;
        for (uint32_t w = 0; w < u; w++) /* begun by a user already, its own backward to come */
            live += read_from(s, u, w);
        max = live > max ? live : max;
    }
    return max;
}

static uint32_t predict_units(const struct spec *s, const struct plan_policy *p)
{
    uint32_t max = 0;
    for (uint32_t u = 0; u < s->unit_count; u++) {
        uint32_t forward = 0, backward = 0;
        for (uint32_t w = 0; w < s->unit_count; w++) {
            const bool ahead = w > u && w <= u + p->forward_prefetch;
            forward += ahead || (w <= u && read_from(s, u, w));
            /* Everything a unit from here up uses has been fetched, and waits for its backward. */
            const bool next = p->backward_prefetch == PLAN_PREFETCH_PRE && u > 0 &&
                              (w == u - 1 || uses(s, u - 1, w));
            backward += next || (w <= u && read_from(s, u, w));
        }
        max = forward > max ? forward : max;
        max = backward > max ? backward : max;
    }
    return max;
}

static struct plan build(const struct spec *s, const struct plan_policy *p, uint32_t micros)
{
    struct shd_err e = { 0 };
    struct plan plan;
    EXPECT_OK(plan_build(s, p, micros, &plan, &e), &e);
    return plan;
}

TEST(random_specs_give_plans_that_check_and_hold_what_is_predicted)
{
    uint64_t rng = 20240501;
    for (int i = 0; i < SPECS; i++) {
        struct toy_spec t;
        struct shd_err e = { 0 };
        random_spec(&t, &rng);
        const struct plan_policy policy = { PLAN_ZERO3, (uint32_t)(test_random(&rng) % 4),
                                            test_random(&rng) % 2 ? PLAN_PREFETCH_PRE
                                                                  : PLAN_PREFETCH_NONE };
        struct plan plan = build(&t.spec, &policy, (uint32_t)(test_random(&rng) % 4));
        EXPECT_OK(plan_check(&plan, &t.spec, &e), &e);
        if (plan.micros > 0) {
            EXPECT_EQ(plan.live_units_max, predict_units(&t.spec, &policy));
            EXPECT_EQ(plan.live_grads_max, predict_grads(&t.spec));
        }
        plan_free(&plan);
    }
}

TEST(chains_hold_two_units_and_one_gradient)
{
    for (uint32_t units = 1; units <= UNITS_MAX; units++) {
        struct toy_spec t;
        chain(&t, units);
        struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 3);
        EXPECT_EQ(plan.live_units_max, units < 2 ? units : 2);
        EXPECT_EQ(plan.live_grads_max, 1);
        plan_free(&plan);
        const struct plan_policy bare = { PLAN_ZERO3, 0, PLAN_PREFETCH_NONE };
        plan = build(&t.spec, &bare, 3);
        EXPECT_EQ(plan.live_units_max, 1);
        plan_free(&plan);
    }
}

TEST(tied_head_keeps_embedding_and_its_gradient)
{
    struct toy_spec t;
    chain(&t, 6);
    t.units[5].uses[0] = 0;
    t.units[5].uses_count = 1;
    struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 1);
    EXPECT_EQ(plan.live_units_max, 3);
    EXPECT_EQ(plan.live_grads_max, 2);
    uint32_t fetches = 0;
    for (uint32_t i = 0; i < plan.op_count; i++)
        fetches += plan.ops[i].kind == PLAN_FETCH && plan.ops[i].unit == 0;
    EXPECT_EQ(fetches, 1); /* held from the first forward to its own backward */
    plan_free(&plan);
}

/* The default policy on three units, spelled out: FSDP's order with BACKWARD_PRE. */
TEST(default_plan_is_the_documented_one)
{
    static const char *const want =
        "FETCH0 WAIT0 FETCH1 FORWARD0 FREE0 WAIT1 FETCH2 FORWARD1 FREE1 WAIT2 FORWARD2 "
        "FETCH1 BACKWARD2 FREE2 RETURN2 WAIT1 FETCH0 BACKWARD1 FREE1 RETURN1 "
        "WAIT0 BACKWARD0 FREE0 RETURN0 PREPARE0 COMMIT0 ";
    struct toy_spec t;
    char got[1024] = "";
    size_t used = 0;
    chain(&t, 3);
    struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 1);
    for (uint32_t i = 0; i < plan.op_count; i++)
        used += (size_t)snprintf(got + used, sizeof got - used, "%s%u ",
                                 plan_op_name(plan.ops[i].kind), plan.ops[i].unit);
    EXPECT_STR(got, want);
    plan_free(&plan);
}

TEST(plan_without_micro_batches_only_commits)
{
    struct toy_spec t;
    struct shd_err e = { 0 };
    chain(&t, 3);
    struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 0);
    EXPECT_EQ(plan.op_count, 2);
    EXPECT_OK(plan_check(&plan, &t.spec, &e), &e);
    plan_free(&plan);
}

static void expect_refused(const struct plan *plan, const struct spec *s)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(plan_check(plan, s, &e), SHD_EINVAL);
    EXPECT(e.text[0] != '\0');
}

/* Leave one operation out; say one twice; move one to another unit or micro-batch. */
static void mutate(const struct plan *plan, const struct spec *s)
{
    struct plan bad = *plan;
    bad.ops = malloc((plan->op_count + 1) * sizeof *bad.ops);
    CHECK(bad.ops != NULL);
    for (uint32_t i = 0; i < plan->op_count; i++) {
        const uint32_t after = plan->op_count - i - 1;
        bad.op_count = plan->op_count - 1;
        memcpy(bad.ops, plan->ops, i * sizeof *bad.ops);
        memcpy(bad.ops + i, plan->ops + i + 1, after * sizeof *bad.ops);
        expect_refused(&bad, s);

        bad.op_count = plan->op_count + 1;
        bad.ops[i] = plan->ops[i];
        memcpy(bad.ops + i + 1, plan->ops + i, (after + 1) * sizeof *bad.ops);
        expect_refused(&bad, s);

        bad.op_count = plan->op_count;
        memcpy(bad.ops, plan->ops, plan->op_count * sizeof *bad.ops);
        if (plan->ops[i].kind != PLAN_PREPARE && plan->ops[i].kind != PLAN_COMMIT) {
            bad.ops[i].unit = (plan->ops[i].unit + 1) % (s->unit_count + 1);
            expect_refused(&bad, s);
            bad.ops[i] = plan->ops[i];
            bad.ops[i].micro = plan->micros;
            expect_refused(&bad, s);
        }
    }
    free(bad.ops);
}

TEST(mutated_plans_are_refused)
{
    uint64_t rng = 7;
    for (int i = 0; i < 150; i++) {
        struct toy_spec t;
        random_spec(&t, &rng);
        struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 2);
        mutate(&plan, &t.spec);
        plan.live_units_max++;
        expect_refused(&plan, &t.spec);
        plan.live_units_max--;
        plan.live_grads_max--;
        expect_refused(&plan, &t.spec);
        plan_free(&plan);
    }
}

TEST(early_free_names_the_operation)
{
    struct toy_spec t;
    struct shd_err e = { 0 };
    chain(&t, 3);
    struct plan plan = build(&t.spec, &PLAN_POLICY_DEFAULT, 1);
    const struct plan_op forward = plan.ops[3]; /* FORWARD 0, then FREE 0 */
    EXPECT(forward.kind == PLAN_FORWARD && plan.ops[4].kind == PLAN_FREE);
    plan.ops[3] = plan.ops[4];
    plan.ops[4] = forward;
    EXPECT_STATUS(plan_check(&plan, &t.spec, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "operation 4, FORWARD of unit 0");
    plan_free(&plan);
}

TEST(bad_input_is_refused)
{
    struct toy_spec t;
    struct shd_err e = { 0 };
    struct plan plan = { 0 };
    chain(&t, 3);
    struct plan_policy policy = PLAN_POLICY_DEFAULT;
    policy.strategy = (enum plan_strategy)9;
    EXPECT_STATUS(plan_build(&t.spec, &policy, 1, &plan, &e), SHD_EINVAL);
    policy = PLAN_POLICY_DEFAULT;
    policy.backward_prefetch = (enum plan_backward_prefetch)7;
    EXPECT_STATUS(plan_build(&t.spec, &policy, 1, &plan, &e), SHD_EINVAL);
    EXPECT_STATUS(plan_build(&t.spec, &PLAN_POLICY_DEFAULT, SHD_MICROS_MAX + 1, &plan, &e),
                  SHD_EINVAL);
    t.units[1].uses[0] = 2; /* a later unit */
    t.units[1].uses_count = 1;
    EXPECT_STATUS(plan_build(&t.spec, &PLAN_POLICY_DEFAULT, 1, &plan, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "uses unit 2");
    EXPECT(plan.ops == NULL);
    EXPECT_STR(plan_op_name((enum plan_op_kind)99), "?");
}

static int fail_at;

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && --fail_at == 0 ? ENOMEM : 0;
}

TEST(nth_failed_allocation_is_an_error)
{
    struct toy_spec t;
    chain(&t, UNITS_MAX);
    struct plan plan = { 0 };
    int n = 0, r;
    do {
        struct shd_err e = { 0 };
        fail_at = ++n;
        sys_fault = fail_nth;
        r = plan_build(&t.spec, &PLAN_POLICY_DEFAULT, 8, &plan, &e);
        if (r == SHD_OK)
            r = plan_check(&plan, &t.spec, &e);
        sys_fault = NULL;
        plan_free(&plan);
        EXPECT(fail_at > 0 ? r == SHD_OK : r == SHD_ENOMEM && e.text[0] != '\0');
    } while (fail_at <= 0);
    EXPECT(n > 5);
}

TEST_MAIN()
