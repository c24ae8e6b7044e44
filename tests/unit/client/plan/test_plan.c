/* Plans as data: thousands of random models, traces and policies by seed are planned, checked,
 * compared with what a plain restatement of the rules predicts, bounded to the last unit and
 * byte, and broken in every place to see that it is refused. test_plan_order.c has the orders. */
#include <errno.h>
#include <stdlib.h>

#include "client/plan/plan.h"
#include "client/plan/plan_check.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "tests/lib/plan_toy.h"

#define SPECS 4000

/* -- A plain restatement --------------------------------------------------------------------- */

static uint64_t param_bytes_in_play(const struct toy *t)
{
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < t->spec.unit_count; u++)
        bytes += toy_in_play(t, u) ? plan_unit_param_bytes(&t->spec, u) : 0;
    return bytes;
}

static uint64_t return_bytes_in_play(const struct toy *t, enum shd_dtype dtype)
{
    uint64_t bytes = 0;
    for (uint32_t u = 0; u < t->spec.unit_count; u++)
        bytes += toy_in_play(t, u) ? plan_unit_grad_bytes(&t->spec, u, dtype) : 0;
    return bytes;
}

/* Units and bytes that position at reads. */
static uint64_t need_bytes(const struct toy *t, uint32_t at, uint32_t *ret_units)
{
    uint64_t bytes = 0;
    *ret_units = 0;
    for (uint32_t u = 0; u < t->spec.unit_count; u++)
        if (toy_reads(&t->spec, t->order[at], u)) {
            bytes += plan_unit_param_bytes(&t->spec, u);
            ++*ret_units;
        }
    return bytes;
}

/* FACTS 1: parameters moved per worker and step. zero3 keeps what the last position reads over
 * the turn from forward to backward, as FSDP keeps its root unit. */
static uint64_t predict_fetched(const struct toy *t, const struct plan_policy *p, uint32_t micros)
{
    const uint64_t all = param_bytes_in_play(t);
    uint32_t units;
    if (micros == 0 || t->trace.count == 0)
        return 0;
    switch (p->strategy) {
    case PLAN_ZERO2:
        return micros * all;
    case PLAN_ZERO3:
        return micros * (2 * all - need_bytes(t, t->trace.count - 1, &units));
    default:
        return all;
    }
}

static bool read_between(const struct toy *t, uint32_t first, uint32_t end, uint32_t unit)
{
    for (uint32_t at = first; at < end; at++)
        if (toy_reads(&t->spec, t->order[at], unit))
            return true;
    return false;
}

/* Gradients in the worker at once: of all positions that are through in this backward sweep (or,
 * while a group of micro-batches is summed or ddp waits, of all) those still to be returned. */
static uint32_t predict_grads(const struct toy *t, const struct plan_policy *p, uint32_t micros)
{
    const uint32_t count = t->trace.count;
    const bool at_once = t->spec.accumulate == 1 && p->strategy != PLAN_DDP;
    uint32_t max = 0;
    for (uint32_t at = 0; at < count && micros > 0; at++) {
        uint32_t live = 0;
        for (uint32_t u = 0; u < t->spec.unit_count; u++)
            live += !t->units[u].frozen && read_between(t, at, count, u) &&
                    (!at_once || read_between(t, 0, at + 1, u));
        max = live > max ? live : max;
    }
    return max;
}

/* Units held at once without bounds. */
static uint32_t predict_units(const struct toy *t, const struct plan_policy *p, uint32_t micros)
{
    const uint32_t count = t->trace.count;
    const bool backward_ahead = p->backward_prefetch == PLAN_PREFETCH_PRE;
    uint32_t max = 0;
    for (uint32_t at = 0; at < count && micros > 0; at++) {
        const uint32_t ahead = at + p->forward_prefetch < count ? at + p->forward_prefetch
                                                                : count - 1;
        uint32_t forward = 0, backward = 0, post = 0, all = 0;
        for (uint32_t u = 0; u < t->spec.unit_count; u++) {
            const bool below = read_between(t, 0, at + 1, u), above = read_between(t, at, count, u);
            const bool next = at > 0 && toy_reads(&t->spec, t->order[at - 1], u);
            all += below || above;
            forward += (below && above) || read_between(t, at, ahead + 1, u);
            backward += (below && above) || (backward_ahead && next);
            post += read_between(t, 0, at, u) && (read_between(t, at, count, u) || next);
        }
        if (p->strategy != PLAN_ZERO3)
            return all;
        max = forward > max ? forward : max;
        max = backward > max ? backward : max;
        if (p->backward_prefetch == PLAN_PREFETCH_POST)
            max = post > max ? post : max;
    }
    return max;
}

/* Of workers that sum a group together each has any of its micro-batches, and returns them. */
TEST(where_sums_are_shared_each_micro_batch_is_returned)
{
    uint64_t rng = test_seed(20261128);
    for (int i = 0; i < SPECS; i++) {
        struct toy t;
        struct shd_err e = { 0 };
        toy_random(&t, &rng);
        struct plan_policy policy = toy_policy(&rng);
        const uint32_t micros = toy_below(&rng, 6);
        t.spec.accumulate = 1;
        struct plan want = toy_build(&t, &policy, micros);
        t.spec.accumulate = 2 + toy_below(&rng, 3);
        policy.shares_sums = true;
        struct plan got = toy_build(&t, &policy, micros);
        EXPECT_OK(plan_check(&got, &t.spec, &policy, &t.trace, &e), &e);
        EXPECT_EQ(got.op_count, want.op_count);
        for (uint32_t op = 0; op < want.op_count; op++)
            EXPECT(got.ops[op].kind == want.ops[op].kind && got.ops[op].unit == want.ops[op].unit &&
                   got.ops[op].micro == want.ops[op].micro);
        plan_free(&want);
        plan_free(&got);
    }
}

TEST(random_plans_check_and_cost_what_is_predicted)
{
    uint64_t rng = test_seed(20240501);
    for (int i = 0; i < SPECS; i++) {
        struct toy t;
        struct shd_err e = { 0 };
        toy_random(&t, &rng);
        const struct plan_policy policy = toy_policy(&rng);
        const uint32_t groups = toy_below(&rng, 4), micros = groups * t.spec.accumulate;
        struct plan plan = toy_build(&t, &policy, micros);
        EXPECT_OK(plan_check(&plan, &t.spec, &policy, &t.trace, &e), &e);
        const enum shd_dtype dtype = policy.grad_dtype != 0 ? policy.grad_dtype : SHD_F32;
        EXPECT_EQ(plan.cost.fetched_bytes, predict_fetched(&t, &policy, micros));
        EXPECT_EQ(plan.cost.returned_bytes, groups * return_bytes_in_play(&t, dtype));
        EXPECT_EQ(plan.cost.live_units_max, predict_units(&t, &policy, micros));
        EXPECT_EQ(plan.cost.live_grads_max, predict_grads(&t, &policy, micros));
        plan_free(&plan);
    }
}

/* -- Bounds ---------------------------------------------------------------------------------- */

/* The number behind "at least" in an error. */
static uint64_t smallest(const struct shd_err *e)
{
    const char *at = strstr(e->text, "at least ");
    EXPECT(at != NULL);
    return strtoull(at + strlen("at least "), NULL, 10);
}

static uint64_t predict_floor(const struct toy *t, const struct plan_policy *p, bool bytes)
{
    uint64_t max = 0;
    uint32_t units;
    if (p->strategy != PLAN_ZERO3) {
        for (uint32_t u = 0; u < t->spec.unit_count; u++)
            max += toy_in_play(t, u) ? (bytes ? plan_unit_param_bytes(&t->spec, u) : 1) : 0;
        return max;
    }
    for (uint32_t at = 0; at < t->trace.count; at++) {
        const uint64_t need = need_bytes(t, at, &units), here = bytes ? need : units;
        max = here > max ? here : max;
    }
    return max;
}

static void expect_bounded(const struct toy *t, const struct plan_policy *p)
{
    struct shd_err e = { 0 };
    struct plan plan = toy_build(t, p, 2 * t->spec.accumulate);
    EXPECT_OK(plan_check(&plan, &t->spec, p, &t->trace, &e), &e);
    EXPECT(p->max_live_units == 0 || plan.cost.live_units_max <= p->max_live_units);
    EXPECT(p->max_live_bytes == 0 || plan.cost.live_param_bytes_max <= p->max_live_bytes);
    EXPECT(plan.cost.fetched_bytes >= predict_fetched(t, p, 2 * t->spec.accumulate));
    plan_free(&plan);
}

/* Refused at floor - 1 with the floor in the text, and fine from there on. */
static void expect_floor(const struct toy *t, struct plan_policy *p, bool bytes, uint64_t *rng)
{
    const uint64_t floor = predict_floor(t, p, bytes);
    struct plan plan = { 0 };
    struct shd_err e = { 0 };
    p->max_live_units = 0;
    p->max_live_bytes = 0;
    plan = toy_build(t, p, t->spec.accumulate);
    EXPECT_EQ(bytes ? plan.floor.bytes : plan.floor.units, floor);
    plan_free(&plan);
    if (floor > 1) {
        p->max_live_units = bytes ? 0 : (uint32_t)floor - 1;
        p->max_live_bytes = bytes ? floor - 1 : 0;
        EXPECT_STATUS(plan_build(&t->spec, p, &t->trace, t->spec.accumulate, &plan, &e),
                      SHD_ERANGE);
        EXPECT_EQ(smallest(&e), floor);
        EXPECT_HAS(e.text, bytes ? "max_live_bytes is " : "max_live_units is ");
    }
    for (uint32_t more = 0; more < 4; more++) {
        p->max_live_units = bytes ? 0 : (uint32_t)floor + more;
        p->max_live_bytes = bytes ? floor + (more > 0 ? toy_below(rng, 20000) : 0) : 0;
        expect_bounded(t, p);
    }
    /* Both bounds at their floors at once. */
    p->max_live_units = (uint32_t)predict_floor(t, p, false);
    p->max_live_bytes = predict_floor(t, p, true);
    expect_bounded(t, p);
}

TEST(bounds_hold_and_the_smallest_is_named)
{
    uint64_t rng = test_seed(20240501);
    for (int i = 0; i < SPECS / 4; i++) {
        struct toy t;
        toy_random(&t, &rng);
        struct plan_policy policy = toy_policy(&rng);
        if (t.trace.count == 0)
            continue;
        expect_floor(&t, &policy, /* bytes= */ false, &rng);
        expect_floor(&t, &policy, /* bytes= */ true, &rng);
    }
}

/* A bound that leaves room for the prefetch changes nothing at all. */
TEST(loose_bounds_change_nothing)
{
    uint64_t rng = test_seed(20240501);
    for (int i = 0; i < SPECS / 8; i++) {
        struct toy t;
        toy_random(&t, &rng);
        struct plan_policy policy = toy_policy(&rng);
        struct plan free_plan = toy_build(&t, &policy, t.spec.accumulate);
        policy.max_live_units = free_plan.cost.live_units_max;
        policy.max_live_bytes = free_plan.cost.live_param_bytes_max;
        struct plan plan = toy_build(&t, &policy, t.spec.accumulate);
        EXPECT_EQ(plan.op_count, free_plan.op_count);
        EXPECT(memcmp(plan.ops, free_plan.ops, plan.op_count * sizeof *plan.ops) == 0);
        plan_free(&plan);
        plan_free(&free_plan);
    }
}

TEST(refused_bound_names_the_unit)
{
    struct toy t;
    struct shd_err e = { 0 };
    struct plan plan = { 0 };
    toy_chain(&t, 6);
    t.units[5].name = (char[]){ "head" };
    t.units[5].uses[t.units[5].uses_count++] = 0;
    struct plan_policy policy = PLAN_POLICY_DEFAULT;
    policy.max_live_units = 1;
    EXPECT_STATUS(plan_build(&t.spec, &policy, NULL, 1, &plan, &e), SHD_ERANGE);
    EXPECT_STR(e.text, "max_live_units is 1, must be at least 2: unit 5 'head' and what it uses, "
                       "without any prefetch");
    policy = (struct plan_policy){ .strategy = PLAN_ZERO2, .max_live_bytes = 23999 };
    EXPECT_STATUS(plan_build(&t.spec, &policy, NULL, 1, &plan, &e), SHD_ERANGE);
    EXPECT_STR(e.text, "max_live_bytes is 23999, must be at least 24000: zero2 holds all units at "
                       "once, zero3 would not");
    EXPECT(plan.ops == NULL);
}

/* -- Broken plans ---------------------------------------------------------------------------- */

static const struct toy *mutated; /* what expect_refused() checks against */
static const struct plan_policy *mutated_policy;

static void expect_refused(const struct plan *plan)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(plan_check(plan, &mutated->spec, mutated_policy, &mutated->trace, &e),
                  SHD_EINVAL);
    EXPECT(e.text[0] != '\0');
}

/* Leave one operation out; say one twice; move one to another unit or micro-batch. */
static void mutate_ops(const struct plan *plan)
{
    struct plan bad = *plan;
    bad.ops = malloc((plan->op_count + 1) * sizeof *bad.ops);
    CHECK(bad.ops != NULL);
    for (uint32_t i = 0; i < plan->op_count; i++) {
        const uint32_t after = plan->op_count - i - 1;
        bad.op_count = plan->op_count - 1;
        memcpy(bad.ops, plan->ops, i * sizeof *bad.ops);
        memcpy(bad.ops + i, plan->ops + i + 1, after * sizeof *bad.ops);
        expect_refused(&bad);

        bad.op_count = plan->op_count + 1;
        bad.ops[i] = plan->ops[i];
        memcpy(bad.ops + i + 1, plan->ops + i, (after + 1) * sizeof *bad.ops);
        expect_refused(&bad);

        bad.op_count = plan->op_count;
        memcpy(bad.ops, plan->ops, plan->op_count * sizeof *bad.ops);
        if (plan->ops[i].kind == PLAN_PREPARE || plan->ops[i].kind == PLAN_COMMIT)
            continue;
        bad.ops[i].unit = (plan->ops[i].unit + 1) % (mutated->spec.unit_count + 1);
        expect_refused(&bad);
        bad.ops[i] = plan->ops[i];
        bad.ops[i].micro = (plan->ops[i].micro + 1) % (plan->micros + 1);
        expect_refused(&bad);
    }
    free(bad.ops);
}

static void mutate_cost(struct plan *plan)
{
    uint32_t *const counts[] = { &plan->cost.live_units_max, &plan->cost.live_grads_max,
                                 &plan->cost.fetches, &plan->cost.returns };
    uint64_t *const bytes[] = { &plan->cost.live_param_bytes_max, &plan->cost.live_grad_bytes_max,
                                &plan->cost.live_bytes_max, &plan->cost.fetched_bytes,
                                &plan->cost.returned_bytes };
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++) {
        *counts[i] += 1;
        expect_refused(plan);
        *counts[i] -= 1;
    }
    for (size_t i = 0; i < ARRAY_SIZE(bytes); i++) {
        *bytes[i] += 1;
        expect_refused(plan);
        *bytes[i] -= 1;
    }
}

TEST(mutated_plans_are_refused)
{
    uint64_t rng = test_seed(20240501);
    for (int i = 0; i < 300; i++) {
        struct toy t;
        toy_random(&t, &rng);
        struct plan_policy policy = toy_policy(&rng);
        if (toy_below(&rng, 2) == 0 && t.trace.count > 0)
            policy.max_live_units = (uint32_t)predict_floor(&t, &policy, false);
        mutated = &t;
        mutated_policy = &policy;
        struct plan plan = toy_build(&t, &policy, 2 * t.spec.accumulate);
        mutate_ops(&plan);
        mutate_cost(&plan);
        plan_free(&plan);
    }
}

TEST(early_free_names_the_operation)
{
    struct toy t;
    struct shd_err e = { 0 };
    toy_chain(&t, 3);
    const struct plan_policy policy = PLAN_POLICY_DEFAULT;
    struct plan plan = toy_build(&t, &policy, 1);
    const struct plan_op forward = plan.ops[3]; /* FORWARD 0, then FREE 0 */
    EXPECT(forward.kind == PLAN_FORWARD && plan.ops[4].kind == PLAN_FREE);
    plan.ops[3] = plan.ops[4];
    plan.ops[4] = forward;
    EXPECT_STATUS(plan_check(&plan, &t.spec, &policy, &t.trace, &e), SHD_EINVAL);
    EXPECT_HAS(e.text,
               "operation 3, FREE of unit 0 'u', micro-batch 0: was fetched for nothing, by "
               "operation 0");
    plan_free(&plan);
}

/* A plan of one policy is refused as that of another where they differ in what they promise. */
TEST(plan_of_another_strategy_is_refused)
{
    struct toy t;
    struct shd_err e = { 0 };
    toy_chain(&t, 5);
    const struct plan_policy zero3 = { .strategy = PLAN_ZERO3 }, zero2 = { .strategy = PLAN_ZERO2 };
    const struct plan_policy zero1 = { .strategy = PLAN_ZERO1 }, ddp = { .strategy = PLAN_DDP };
    struct plan plan = toy_build(&t, &zero3, 2);
    EXPECT_STATUS(plan_check(&plan, &t.spec, &zero2, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "must be kept until its last backward");
    plan_free(&plan);
    plan = toy_build(&t, &zero2, 2);
    EXPECT_STATUS(plan_check(&plan, &t.spec, &zero1, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "must be kept until the end of the step");
    EXPECT_STATUS(plan_check(&plan, &t.spec, &zero3, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "held that forward was the last to read");
    plan_free(&plan);
    plan = toy_build(&t, &zero1, 2);
    EXPECT_STATUS(plan_check(&plan, &t.spec, &ddp, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "ddp returns behind it");
    plan_free(&plan);
}

/* -- Bad input ------------------------------------------------------------------------------- */

static struct toy bad_toy;
static uint32_t bad_micros;

static void expect_bad(struct plan_policy policy, int code, const char *text)
{
    struct shd_err e = { 0 };
    struct plan plan = { 0 };
    EXPECT_STATUS(plan_build(&bad_toy.spec, &policy, &bad_toy.trace, bad_micros, &plan, &e), code);
    EXPECT_HAS(e.text, text);
    EXPECT(plan.ops == NULL);
}

TEST(bad_policy_is_refused_by_field)
{
    toy_chain(&bad_toy, 3);
    bad_micros = 1;
    expect_bad((struct plan_policy){ .strategy = (enum plan_strategy)9 }, SHD_EINVAL,
               "strategy is 9");
    expect_bad((struct plan_policy){ .strategy = PLAN_HYBRID }, SHD_ENOTSUP, "replica groups");
    expect_bad((struct plan_policy){ .strategy = PLAN_OWN }, SHD_EINVAL,
               "operations that are given");
    expect_bad((struct plan_policy){ .backward_prefetch = (enum plan_backward_prefetch)7 },
               SHD_EINVAL, "backward_prefetch is 7");
    expect_bad((struct plan_policy){ .forward_prefetch = SHD_UNITS_MAX + 1 }, SHD_EINVAL,
               "forward_prefetch is 65537");
    expect_bad((struct plan_policy){ .grad_dtype = (enum shd_dtype)8 }, SHD_EINVAL,
               "grad_dtype is 8");
}

TEST(bad_micros_trace_and_uses_are_refused)
{
    toy_chain(&bad_toy, 3);
    bad_micros = SHD_MICROS_MAX + 1;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "4097 micro-batches");
    bad_micros = 3;
    bad_toy.spec.accumulate = 2;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "accumulate 2");
    bad_toy.spec.accumulate = 0; /* a spec made by hand: as 1 */
    struct plan plan = toy_build(&bad_toy, &PLAN_POLICY_DEFAULT, 3);
    plan_free(&plan);
    bad_toy.order[2] = 1;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "unit 1 'u' twice");
    bad_toy.order[2] = 3;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "position 2 is unit 3");
    bad_toy.trace.count = 4;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "trace of 4 units");
    bad_toy.trace = (struct plan_trace){ NULL, 1 };
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "without units");
    toy_chain(&bad_toy, 3);
    bad_toy.units[1].uses[0] = 1;
    bad_toy.units[1].uses_count = 1;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "unit 1 'u' uses unit 1");
    bad_toy.units[1].uses[0] = 3;
    expect_bad(PLAN_POLICY_DEFAULT, SHD_EINVAL, "uses unit 3");
}

TEST(nothing_to_compute_only_commits)
{
    struct toy t;
    struct shd_err e = { 0 };
    const struct plan_policy policy = PLAN_POLICY_DEFAULT;
    toy_chain(&t, 3);
    struct plan plan = toy_build(&t, &policy, 0);
    EXPECT_EQ(plan.op_count, 2);
    EXPECT_OK(plan_check(&plan, &t.spec, &policy, &t.trace, &e), &e);
    plan_free(&plan);
    t.trace.count = 0; /* every unit was skipped */
    plan = toy_build(&t, &policy, 2);
    EXPECT_EQ(plan.op_count, 2);
    EXPECT_OK(plan_check(&plan, &t.spec, &policy, &t.trace, &e), &e);
    plan_free(&plan);
}

/* Units of so many elements in turn; some are frozen. */
static struct spec units_of(const uint64_t *elems, uint32_t sizes, uint32_t units, uint32_t frozen)
{
    struct spec spec = { .unit_count = units, .trained_units = units - frozen };
    spec.units = calloc(units, sizeof *spec.units);
    CHECK(spec.units != NULL);
    for (uint32_t u = 0; u < units; u++)
        spec.units[u] = (struct spec_unit){ .elems = elems[u % sizes], .frozen = u < frozen };
    return spec;
}

TEST(many_small_units_have_more_slots)
{
    static const struct {
        uint64_t elems;
        uint32_t units, frozen;
        bool staged;
        uint32_t live, slots;
    } cases[] = {
        { 2048, 4, 0, false, 1, 2 },
        { 2048, 47, 0, false, 1, 2 },
        { 2048, 48, 0, false, 1, 3 },
        { 2048, 64, 0, true, 0, 4 },
        { 2048, 4096, 0, false, 1, 16 },
        { 2048, 4096, 4090, false, 1, 2 },
        { 2048, 4096, 0, false, 29, 30 },
        { 2048, 4096, 0, false, 64, 16 },
        { 32768, 4096, 0, false, 1, 4 },
        { 65536, 4096, 0, false, 1, 2 },
        { UINT64_C(1) << 30, 4096, 0, true, 0, 2 },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct spec spec = units_of(&cases[i].elems, 1, cases[i].units, cases[i].frozen);
        EXPECT_EQ(plan_slots_for(&spec, cases[i].staged, cases[i].live), cases[i].slots);
        free(spec.units);
    }
    uint64_t sizes[9]; /* a worker maps each size of each slot by itself */
    for (uint32_t i = 0; i < 9; i++)
        sizes[i] = (i + 1) * UINT64_C(64);
    struct spec eight = units_of(sizes, 8, 4096, 0), nine = units_of(sizes, 9, 4096, 0);
    EXPECT_EQ(plan_slots_for(&eight, false, 1), 16);
    EXPECT_EQ(plan_slots_for(&nine, false, 1), 2);
    free(eight.units);
    free(nine.units);
}

TEST(names_are_those_of_the_flags)
{
    EXPECT_STR(plan_op_name(PLAN_FETCH), "FETCH");
    EXPECT_STR(plan_op_name((enum plan_op_kind)99), "?");
    for (int i = 0; i <= PLAN_COMMIT; i++)
        EXPECT_EQ(plan_op_parse(plan_op_name((enum plan_op_kind)i)), i);
    EXPECT_EQ(plan_op_parse("fetch"), -1);
    for (int i = 0; i <= PLAN_OWN; i++)
        EXPECT_EQ(plan_strategy_parse(plan_strategy_name((enum plan_strategy)i)), i);
    for (int i = 0; i <= PLAN_PREFETCH_NONE; i++)
        EXPECT_EQ(plan_prefetch_parse(plan_prefetch_name((enum plan_backward_prefetch)i)), i);
    EXPECT_EQ(plan_strategy_parse("zero4"), -1);
    EXPECT_EQ(plan_prefetch_parse(""), -1);
    EXPECT_STR(plan_strategy_name((enum plan_strategy) - 1), "?");
    EXPECT_STR(plan_prefetch_name((enum plan_backward_prefetch)3), "?");
}

static int fail_at;

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && --fail_at == 0 ? ENOMEM : 0;
}

TEST(nth_failed_allocation_is_an_error)
{
    struct toy t;
    toy_chain(&t, TOY_UNITS_MAX);
    const struct plan_policy policy = PLAN_POLICY_DEFAULT;
    struct plan plan = { 0 };
    int n = 0, r;
    do {
        struct shd_err e = { 0 };
        fail_at = ++n;
        sys_fault = fail_nth;
        r = plan_build(&t.spec, &policy, &t.trace, 8, &plan, &e);
        if (r == SHD_OK)
            r = plan_check(&plan, &t.spec, &policy, &t.trace, &e);
        sys_fault = NULL;
        plan_free(&plan);
        EXPECT(fail_at > 0 ? r == SHD_OK : r == SHD_ENOMEM && e.text[0] != '\0');
    } while (fail_at <= 0);
    EXPECT(n > 6);
}

TEST_MAIN()
