/* Policies on real daemons: same bits whatever the policy, exactly the bytes the plan says, bounds
 * that bind. What varies from run to run (experts, sums, dtypes) is in test_client_follow.c. */
#include <pthread.h>

#include "client/plan/plan.h"
#include "client/session/hub.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/client_toy.h"

static struct shd_policy policy_of(enum shd_strategy strategy, uint32_t forward,
                                   enum shd_backward_prefetch backward, enum shd_path path)
{
    return (struct shd_policy){ .size = sizeof(struct shd_policy),
                                .strategy = strategy,
                                .forward_prefetch = forward,
                                .backward_prefetch = backward,
                                .path = path };
}

static struct pt_run run_of(struct shd_policy policy, uint32_t steps)
{
    return (
        struct pt_run){ .policy = policy, .steps = steps, .t = { .overflow_step = UINT64_MAX } };
}

/* What the plan of this policy costs for all micro-batches of a step. */
static struct plan_cost cost_of(const char *json, const struct shd_policy *p, uint32_t micros)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    struct plan plan;
    const struct plan_policy policy = {
        .strategy = (enum plan_strategy)p->strategy,
        .forward_prefetch = p->forward_prefetch,
        .backward_prefetch = (enum plan_backward_prefetch)p->backward_prefetch,
        .max_live_units = p->max_live_units,
        .max_live_bytes = p->max_live_bytes,
        .grad_dtype = p->grad_dtype,
    };
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    EXPECT_OK(plan_build(spec, &policy, NULL, micros, &plan, &e), &e);
    const struct plan_cost cost = plan.cost;
    plan_free(&plan);
    spec_free(spec);
    return cost;
}

static void expect_cost(const shd_session *s, const char *json, const struct pt_run *run)
{
    const struct plan_cost cost = cost_of(json, &run->policy, TOY_MICROS);
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_fetched, run->steps * cost.fetched_bytes);
    EXPECT_EQ(stats.bytes_returned, run->steps * cost.returned_bytes);
    EXPECT_EQ(stats.live_bytes_max, cost.live_bytes_max);
    EXPECT_EQ(stats.plan_misses, 0);
    EXPECT(run->t.live_units_max <= cost.live_units_max);
    if (run->policy.path == SHD_PATH_COPY) /* with padding, so at least as many */
        EXPECT(stats.bytes_copied >= stats.bytes_fetched + stats.bytes_returned);
}

/* One worker, its own model, one policy. */
static void train_alone(struct pt_model model, struct pt_run run, const char *want)
{
    static uint32_t models;
    char name[32], got[65];
    struct shd_err e = { 0 };
    snprintf(name, sizeof name, "p%u", models++);
    model.name = name;
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(pt_train(s, pt_spec(&model), &run, toy_all_micros, TOY_MICROS, got, &e), &e);
    if (strcmp(got, want) != 0)
        FAIL("strategy %d, prefetch %u/%d, path %d: other digest", (int)run.policy.strategy,
             run.policy.forward_prefetch, (int)run.policy.backward_prefetch, (int)run.policy.path);
    expect_cost(s, pt_spec(&model), &run);
    shd_close(s);
}

static void every_policy(struct pt_model model, enum shd_dtype grad_dtype, uint32_t steps)
{
    char want[65];
    model.name = "reference";
    model.grad_dtype = grad_dtype;
    struct pt_run like = run_of((struct shd_policy){ .grad_dtype = grad_dtype }, steps);
    pt_reference(pt_spec(&model), &like, want);
    for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++)
        for (int backward = SHD_PREFETCH_PRE; backward <= SHD_PREFETCH_NONE; backward++)
            for (int path = SHD_PATH_MAP; path <= SHD_PATH_COPY; path++) {
                struct shd_policy p = policy_of(
                    (enum shd_strategy)strategy, backward == SHD_PREFETCH_NONE ? 0 : 2,
                    (enum shd_backward_prefetch)backward, (enum shd_path)path);
                p.grad_dtype = grad_dtype;
                train_alone(model, run_of(p, steps), want);
            }
}

static void on_daemons(int count, struct pt_model model, enum shd_dtype grad_dtype)
{
    fixture_start(&daemons, count, NULL);
    every_policy(model, grad_dtype, 2);
    fixture_stop(&daemons);
}

TEST(every_policy_gives_the_same_bits_and_moves_what_its_plan_says)
{
    on_daemons(1, (struct pt_model){ .publish = "f32" }, 0);
    on_daemons(3, (struct pt_model){ .publish = "f32", .mean = true }, 0);
}

TEST(the_same_in_half_precision)
{
    on_daemons(2, (struct pt_model){ .publish = "bf16", .mean = true }, SHD_BF16);
    on_daemons(2, (struct pt_model){ .publish = "f16" }, SHD_F16);
}

TEST(the_same_with_local_sums_and_a_frozen_tower)
{
    on_daemons(2, (struct pt_model){ .accumulate = 2 }, 0);
    on_daemons(3, (struct pt_model){ .accumulate = 4, .frozen = true }, SHD_BF16);
    on_daemons(2, (struct pt_model){ .frozen = true }, 0);
}

TEST(what_changes_the_numbers_changes_the_digest)
{
    const struct pt_model models[] = { { .name = "a" },
                                       { .name = "b", .accumulate = 2 },
                                       { .name = "d", .frozen = true },
                                       { .name = "m", .mean = true },
                                       { .name = "e", .publish = "bf16" },
                                       { .name = "g", .grad_dtype = SHD_BF16 } };
    char hex[ARRAY_SIZE(models)][65];
    struct pt_run run = run_of((struct shd_policy){ 0 }, 2);
    for (size_t i = 0; i < ARRAY_SIZE(models); i++)
        pt_reference(pt_spec(&models[i]), &run, hex[i]);
    for (size_t i = 0; i < ARRAY_SIZE(hex); i++)
        for (size_t j = i + 1; j < ARRAY_SIZE(hex); j++)
            EXPECT(strcmp(hex[i], hex[j]) != 0);
    /* One group for the whole step is the order in which owners sum, too. */
    const struct pt_model all = { .name = "f", .accumulate = TOY_MICROS };
    pt_reference(pt_spec(&all), &run, hex[1]);
    EXPECT_STR(hex[1], hex[0]);
}

/* -- Two workers -------------------------------------------------------------------------------
 */

struct worker {
    pthread_t thread;
    const char *spec;
    struct pt_run run;
    uint32_t micros[2];
    char hex[65];
    int status;
    struct shd_err e;
};

static void *work(void *ctx)
{
    struct worker *w = ctx;
    shd_session *s;
    w->status = try_connect(daemons.address, PATIENT_MS, &s, &w->e);
    if (w->status != SHD_OK)
        return NULL;
    w->status = pt_train(s, w->spec, &w->run, w->micros, 2, w->hex, &w->e);
    shd_close(s);
    return NULL;
}

static void train_two(const struct pt_model *model, struct pt_run a, struct pt_run b,
                      const uint32_t micros[2][2], const char *want)
{
    const char *spec = pt_spec(model);
    struct worker w[2] = { { .spec = spec, .run = a }, { .spec = spec, .run = b } };
    for (int i = 0; i < 2; i++) {
        memcpy(w[i].micros, micros[i], sizeof w[i].micros);
        EXPECT_EQ(pthread_create(&w[i].thread, NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(w[i].thread, NULL);
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(w[i].status, &w[i].e);
        EXPECT_STR(w[i].hex, want);
    }
}

TEST(two_workers_with_different_policies_give_the_same_bits)
{
    static const uint32_t apart[2][2] = { { 0, 2 }, { 1, 3 } },
                          groups[2][2] = { { 0, 1 }, { 2, 3 } };
    char want[65], name[32];
    fixture_start(&daemons, 3, NULL);
    for (uint32_t a = 1; a <= 2; a++)
        for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++) {
            snprintf(name, sizeof name, "two%u%d", a, strategy);
            const struct pt_model model = { .name = name, .accumulate = a };
            const struct pt_run one = run_of(
                policy_of((enum shd_strategy)strategy, 1, SHD_PREFETCH_PRE, SHD_PATH_COPY), 4);
            const struct pt_run other = run_of(
                policy_of(SHD_ZERO3, 0, SHD_PREFETCH_POST, SHD_PATH_MAP), 4);
            pt_reference(pt_spec(&model), &one, want);
            train_two(&model, one, other, a == 1 ? apart : groups, want);
        }
    fixture_stop(&daemons);
}

/* -- Bounds ------------------------------------------------------------------------------------
 */

TEST(bounds_bind_whoever_asks)
{
    const struct pt_model model = { .name = "bounds" };
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start(&daemons, 2, NULL);
    for (int path = SHD_PATH_MAP; path <= SHD_PATH_COPY; path++) {
        struct pt_run run = run_of(policy_of(SHD_ZERO3, 3, SHD_PREFETCH_PRE, (enum shd_path)path),
                                   1);
        shd_session *s = attach(PATIENT_MS);
        EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
        run.policy.max_live_units = 1;
        EXPECT_STATUS(shd_set_policy(m, &run.policy, &e), SHD_ERANGE);
        EXPECT_HAS(e.text, "at least 2"); /* head and embed */
        EXPECT_EQ(shd_path(m), SHD_PATH_MAP);
        run.policy.max_live_units = 2;
        EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
        EXPECT_EQ(shd_path(m), path);
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        EXPECT_EQ(run.t.live_units_max, 2);
        EXPECT_OK(shd_acquire(m, 0, NULL, &e), &e);
        EXPECT_OK(shd_acquire(m, 1, NULL, &e), &e);
        EXPECT_OK(shd_acquire(m, 1, NULL, &e), &e); /* held already */
        EXPECT_STATUS(shd_acquire(m, 2, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "max_live_units (2)");
        shd_release(m, 0);
        EXPECT_OK(shd_acquire(m, 2, NULL, &e), &e);
        EXPECT_STATUS(shd_set_policy(m, &run.policy, &e), SHD_EINVAL);
        shd_close(s);
    }
    fixture_stop(&daemons);
}

TEST(copy_slots_are_as_many_as_the_plan_holds)
{
    const struct pt_model model = { .name = "slots" };
    struct shd_err e = { 0 };
    shd_model *m;
    struct shd_policy p = policy_of(SHD_ZERO3, 1, SHD_PREFETCH_PRE, SHD_PATH_COPY);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_OK(shd_set_policy(m, &p, &e), &e);
    const uint32_t slots = cost_of(pt_spec(&model), &p, 1).live_units_max;
    EXPECT(slots < PT_UNITS);
    for (uint32_t u = 0; u < slots; u++)
        EXPECT_OK(shd_acquire(m, u, NULL, &e), &e);
    EXPECT_STATUS(shd_acquire(m, slots, NULL, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "slots hold other units");
    p.max_live_bytes = 1000;
    for (uint32_t u = 0; u < slots; u++)
        shd_release(m, u);
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "max_live_bytes");
    EXPECT_EQ(shd_path(m), SHD_PATH_COPY); /* as it was */
    shd_close(s);
    fixture_stop(&daemons);
}

/* Two workers whose gradients are rounded differently would make sums of luck. */
TEST(a_worker_with_another_grad_dtype_is_refused_by_name)
{
    const struct pt_model model = { .name = "halves", .grad_dtype = SHD_BF16 };
    const struct pt_model other = { .name = "halves" };
    struct shd_err e = { 0 };
    shd_model *m, *attached, *none;
    struct pt_run run = run_of(policy_of(SHD_ZERO3, 1, SHD_PREFETCH_PRE, SHD_PATH_AUTO), 1);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *late = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_STATUS(shd_model_open(late, pt_spec(&other), &none, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "grad_dtype is 'f32', the open model has 'bf16'");
    EXPECT_OK(shd_model_attach(late, NULL, &attached, &e), &e);
    run.policy.grad_dtype = SHD_F32;
    EXPECT_STATUS(shd_set_policy(attached, &run.policy, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "grad_dtype is 'f32', model 'halves' has 'bf16'");
    run.policy.grad_dtype = 0; /* the model's */
    EXPECT_OK(shd_set_policy(attached, &run.policy, &e), &e);
    EXPECT_EQ(attached->policy.grad_dtype, SHD_BF16);
    EXPECT_OK(pt_step(attached, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    shd_close(late);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(wrong_policies_are_named)
{
    const struct pt_model model = { .name = "wrong" };
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    const struct shd_policy good = policy_of(SHD_ZERO3, 1, SHD_PREFETCH_PRE, SHD_PATH_AUTO);
    struct shd_policy p = good;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_STATUS(shd_set_policy(m, NULL, &e), SHD_EINVAL);
    p.size = 3;
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "shd_policy.size is 3");
    p = good;
    p.path = SHD_PATH_COPY;
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "local:");
    p.path = (enum shd_path)7;
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "path is 7");
    p = good;
    p.strategy = (enum shd_strategy)PLAN_HYBRID;
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_ENOTSUP);
    p.strategy = (enum shd_strategy)9;
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "strategy is 9");
    p = good;
    p.grad_dtype = (enum shd_dtype)4;
    EXPECT_STATUS(shd_set_policy(m, &p, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "grad_dtype is 4");
    struct pt_run run = run_of(good, 1);
    EXPECT_OK(shd_set_policy(m, &good, &e), &e);
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_STATUS(shd_set_policy(m, &good, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "before the first gradient");
    shd_close(s);
}

/* -- A slow link -------------------------------------------------------------------------------
 */

#define FETCH_MS 4u

/* Time a worker waits in a step, with so long a fetch and half as long again a compute. Both are
 * sleeps, and longer where the machine is slow: what else it does counts as waiting, too. */
static uint64_t waited_ns(const char *name, uint32_t forward, enum shd_backward_prefetch backward)
{
    const struct pt_model model = { .name = name };
    char hex[65];
    struct shd_err e = { 0 };
    struct shd_stats stats = { .size = sizeof stats };
    struct pt_run run = run_of(policy_of(SHD_ZERO3, forward, backward, SHD_PATH_COPY), 1);
    run.fetch_delay_ns = test_paced(FETCH_MS) * NS_PER_MS;
    run.t.compute_ms = (long)test_paced(FETCH_MS * 3 / 2);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(pt_train(s, pt_spec(&model), &run, toy_all_micros, TOY_MICROS, hex, &e), &e);
    shd_stats(s, &stats, NULL);
    shd_close(s);
    return stats.wait_ns;
}

/* Whoever else computes makes waits longer, of either kind: the shortest of several counts. */
TEST(prefetch_hides_a_slow_link)
{
    char name[24];
    uint64_t none = UINT64_MAX, ahead = UINT64_MAX;
    fixture_start(&daemons, 1, NULL);
    for (int i = 0; i < 10 && ahead >= none / 2; i++) {
        snprintf(name, sizeof name, "none%d", i);
        const uint64_t none_ns = waited_ns(name, 0, SHD_PREFETCH_NONE);
        snprintf(name, sizeof name, "ahead%d", i);
        const uint64_t ahead_ns = waited_ns(name, 1, SHD_PREFETCH_PRE);
        printf("  waited %.1f ms without prefetch, %.1f ms with\n", (double)none_ns / 1e6,
               (double)ahead_ns / 1e6);
        none = none_ns < none ? none_ns : none;
        ahead = ahead_ns < ahead ? ahead_ns : ahead;
    }
    EXPECT(none > test_paced(4 * 10 * FETCH_MS) * NS_PER_MS);
    EXPECT(ahead < none / 2);
    fixture_stop(&daemons);
}

TEST_MAIN()
