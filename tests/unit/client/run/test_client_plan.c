/* Plans of one's own on real daemons: same bits as any policy's, exactly the bytes the plan says,
 * whatever number of micro-batches a step turns out to have. That every plan that the check passes
 * comes to the right numbers is in tests/unit/client/plan/test_plan_own.c. */
#include "client/plan/plan_own.h"
#include "client/plan/plan_text.h"
#include "client/session/session.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/plan_run.h"

#define STEPS 2u

static struct spec *spec_of(const char *json)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

static char *text_of(const struct spec *spec, const struct plan_policy *p, const struct plan *plan)
{
    struct shd_err e = { 0 };
    char *text;
    EXPECT_OK(plan_text_write(spec, p, plan, &text, &e), &e);
    return text;
}

/* The plan that the policy has, as text; edited so many times, each edit that the check passes. */
static char *plan_text(const char *json, struct plan_policy policy, uint32_t micros, uint32_t edits,
                       uint64_t *rng)
{
    struct shd_err e = { 0 };
    struct spec *spec = spec_of(json);
    struct plan plan;
    EXPECT_OK(plan_build(spec, &policy, NULL, micros, &plan, &e), &e);
    if (edits > 0)
        policy.strategy = PLAN_OWN;
    char *text = text_of(spec, &policy, &plan);
    plan_free(&plan);
    while (edits-- > 0) {
        struct plan_own *own, *edited = NULL;
        EXPECT_OK(plan_own_new(spec, text, strlen(text), &own, &e), &e);
        plan_edit(&own->plan, spec, rng);
        char *other = text_of(spec, &policy, &own->plan);
        const bool passed = plan_own_new(spec, other, strlen(other), &edited, &e) == SHD_OK;
        plan_own_free(edited);
        plan_own_free(own);
        free(passed ? text : other);
        text = passed ? other : text;
    }
    spec_free(spec);
    return text;
}

static struct plan_cost cost_of(const char *json, const char *text)
{
    struct shd_err e = { 0 };
    struct spec *spec = spec_of(json);
    struct plan_own *own;
    EXPECT_OK(plan_own_new(spec, text, strlen(text), &own, &e), &e);
    const struct plan_cost cost = own->plan.cost;
    plan_own_free(own);
    spec_free(spec);
    return cost;
}

static struct pt_run run_of(enum shd_path path)
{
    return (struct pt_run){ .policy = { .size = sizeof(struct shd_policy), .path = path },
                            .steps = STEPS,
                            .t = { .overflow_step = UINT64_MAX } };
}

static shd_model *open_planned(shd_session *s, const char *json, const char *text,
                               const struct pt_run *run)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, json, &m, &e), &e);
    EXPECT_OK(shd_set_policy(m, &run->policy, &e), &e);
    EXPECT_OK(shd_set_plan(m, text, &e), &e);
    EXPECT(run->policy.path == SHD_PATH_AUTO || shd_path(m) == run->policy.path);
    return m;
}

/* One worker, its own model, one plan. */
static void train_planned(struct pt_model model, const char *text, enum shd_path path,
                          const char *want)
{
    static uint32_t models;
    char name[32], got[65];
    struct shd_err e = { 0 };
    struct pt_run run = run_of(path);
    snprintf(name, sizeof name, "own%u", models++);
    model.name = name;
    const struct plan_cost cost = cost_of(pt_spec(&model), text);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_planned(s, pt_spec(&model), text, &run);
    for (uint32_t k = 0; k < STEPS; k++)
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, got);
    if (strcmp(got, want) != 0)
        FAIL("other digest with path %d and %s", (int)path, text);
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_fetched, STEPS * cost.fetched_bytes);
    EXPECT_EQ(stats.bytes_returned, STEPS * cost.returned_bytes);
    EXPECT_EQ(stats.live_bytes_max, cost.live_bytes_max);
    EXPECT_EQ(stats.plan_misses, 0);
    EXPECT(run.t.live_units_max <= cost.live_units_max);
    shd_close(s);
}

static void each_plan(struct pt_model model, uint32_t edited, uint64_t *rng)
{
    char want[65];
    struct pt_run like = run_of(SHD_PATH_AUTO);
    like.policy.grad_dtype = model.grad_dtype;
    model.name = "reference";
    pt_reference(pt_spec(&model), &like, want);
    for (int path = SHD_PATH_MAP; path <= SHD_PATH_COPY; path++) {
        for (int strategy = PLAN_ZERO3; strategy <= PLAN_DDP; strategy++) {
            const struct plan_policy p = { .strategy = (enum plan_strategy)strategy,
                                           .forward_prefetch = (uint32_t)strategy,
                                           .grad_dtype = model.grad_dtype };
            char *text = plan_text(pt_spec(&model), p, TOY_MICROS, 0, rng);
            train_planned(model, text, (enum shd_path)path, want);
            free(text);
        }
        for (uint32_t i = 0; i < edited; i++) {
            const struct plan_policy p = { .strategy = (enum plan_strategy)(i % 4) };
            char *text = plan_text(pt_spec(&model), p, TOY_MICROS, 200, rng);
            train_planned(model, text, (enum shd_path)path, want);
            free(text);
        }
    }
}

TEST(plans_give_the_policys_bits_and_move_what_they_say)
{
    uint64_t rng = test_seed(20261126);
    fixture_start(&daemons, 2, NULL);
    each_plan((struct pt_model){ .publish = "f32" }, 6, &rng);
    each_plan((struct pt_model){ .accumulate = 2, .frozen = true }, 3, &rng);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL);
    each_plan((struct pt_model){ .publish = "bf16", .grad_dtype = SHD_BF16, .mean = true }, 3,
              &rng);
    fixture_stop(&daemons);
}

/* -- Other numbers of micro-batches ------------------------------------------------------------ */

static int elastic_step(shd_model *m, struct pt_run *run, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(m));
    const struct shd_compute compute = { sizeof compute, &run->t,     pt_forward,
                                         pt_backward,    toy_metrics, NULL };
    run->t.m = m;
    return shd_run_step_elastic(m, &compute, &update, NULL, e);
}

/* A plan for one micro-batch, for three, for eight; by lease each is cut to one. */
TEST(a_step_of_another_number_is_its_beginning_or_the_plan_again)
{
    static const uint32_t numbers[] = { 1, 3, 8 };
    uint64_t rng = test_seed(20261126);
    char want[65], got[65], name[32];
    struct pt_run like = run_of(SHD_PATH_AUTO);
    const struct pt_model reference = { .name = "reference" };
    pt_reference(pt_spec(&reference), &like, want);
    fixture_start(&daemons, 2, NULL);
    for (size_t i = 0; i < ARRAY_SIZE(numbers); i++)
        for (int way = 0; way < 4; way++) {
            struct shd_err e = { 0 };
            struct pt_run run = run_of(way % 2 == 0 ? SHD_PATH_MAP : SHD_PATH_COPY);
            snprintf(name, sizeof name, "n%u.%d", numbers[i], way);
            const struct pt_model model = { .name = name };
            const struct plan_policy zero1 = { .strategy = PLAN_ZERO1 };
            char *text = plan_text(pt_spec(&model), zero1, numbers[i], 30, &rng);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_planned(s, pt_spec(&model), text, &run);
            for (uint32_t k = 0; k < STEPS && way < 2; k++)
                EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
            for (uint32_t k = 0; k < STEPS && way >= 2; k++)
                EXPECT_OK(elastic_step(m, &run, &e), &e);
            struct shd_stats stats = { .size = sizeof stats };
            shd_stats(s, &stats, NULL);
            EXPECT_EQ(stats.plan_misses, 0);
            digest_of(m, got);
            EXPECT_STR(got, want);
            free(text);
            shd_close(s);
        }
    fixture_stop(&daemons);
}

/* Of a routed model under a policy that is only named. */
static uint64_t misses_by_policy(const struct plan_policy *p, enum shd_path path)
{
    static uint32_t models;
    char name[32];
    struct shd_err e = { 0 };
    struct pt_run run = run_of(path);
    shd_model *m;
    snprintf(name, sizeof name, "named%u", models++);
    const struct pt_model model = { .name = name };
    run.routed = true;
    run.policy.strategy = (enum shd_strategy)p->strategy;
    run.policy.forward_prefetch = p->forward_prefetch;
    run.policy.backward_prefetch = (enum shd_backward_prefetch)p->backward_prefetch;
    run.policy.max_live_units = p->max_live_units;
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
    for (uint32_t k = 0; k < STEPS; k++)
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    shd_close(s);
    EXPECT(stats.plan_misses > 0);
    return stats.plan_misses;
}

/* Experts that do not run depart from the plan: the strategy's plans are taken, and bounds hold. */
TEST(a_model_that_departs_from_it_is_planned_by_its_strategy)
{
    uint64_t rng = test_seed(20261126);
    char want[65], got[65], name[32];
    struct pt_run like = run_of(SHD_PATH_AUTO);
    const struct pt_model reference = { .name = "reference" };
    like.routed = true;
    pt_reference(pt_spec(&reference), &like, want);
    fixture_start(&daemons, 2, NULL);
    for (int i = 0; i < 8; i++) {
        struct shd_err e = { 0 };
        struct pt_run run = run_of(i % 2 == 0 ? SHD_PATH_MAP : SHD_PATH_COPY);
        snprintf(name, sizeof name, "routed%d", i);
        const struct pt_model model = { .name = name };
        const struct plan_policy p = { .strategy = (enum plan_strategy)(i / 2),
                                       .max_live_units = i / 2 == PLAN_ZERO3 ? 3 : 0 };
        char *text = plan_text(pt_spec(&model), p, TOY_MICROS, i % 3 == 0 ? 30 : 0, &rng);
        run.routed = true;
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_planned(s, pt_spec(&model), text, &run);
        for (uint32_t k = 0; k < STEPS; k++)
            EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        EXPECT(p.max_live_units == 0 || run.t.live_units_max <= p.max_live_units);
        digest_of(m, got);
        EXPECT_STR(got, want);
        struct shd_stats stats = { .size = sizeof stats };
        shd_stats(s, &stats, NULL);
        if (i % 3 != 0) /* from the second micro-batch on it is a policy's own affair */
            EXPECT_EQ(stats.plan_misses, misses_by_policy(&p, run.policy.path));
        free(text);
        shd_close(s);
    }
    fixture_stop(&daemons);
}

/* -- What is refused --------------------------------------------------------------------------- */

TEST(a_plan_that_is_refused_changes_nothing)
{
    uint64_t rng = test_seed(20261126);
    const struct pt_model model = { .name = "refused" };
    const struct plan_policy zero2 = { .strategy = PLAN_ZERO2 };
    struct shd_err e = { 0 };
    shd_model *m;
    char want[65], got[65];
    struct pt_run run = run_of(SHD_PATH_COPY);
    char *text = plan_text(pt_spec(&model), zero2, TOY_MICROS, 0, &rng);
    const uint64_t fetched = cost_of(pt_spec(&model), text).fetched_bytes;
    pt_reference(pt_spec(&model), &run, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
    EXPECT_STATUS(shd_set_plan(m, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "no plan");
    EXPECT_OK(shd_set_plan(m, text, &e), &e);
    char *bad = strdup(text), *at = strstr(bad, "[\"FREE\"");
    EXPECT(at != NULL);
    for (int i = 0; i < 4; i++) /* FREE */
        at[2 + i] = "WAIT"[i];
    EXPECT_STATUS(shd_set_plan(m, bad, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "WAIT of unit 6 'head', micro-batch 0: was waited for already");
    free(bad);
    EXPECT_EQ(shd_path(m), SHD_PATH_COPY); /* as it was, with the plan */
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_fetched, fetched);
    EXPECT_STATUS(shd_set_plan(m, text, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "before the first gradient");
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    free(text);
    fixture_stop(&daemons);
}

static int fails(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx;
    (void)micro;
    (void)params;
    return unit == 2;
}

/* A forward that fails leaves a plan made and no gradient asked for: the next one is taken. */
TEST(a_policy_takes_the_place_of_a_plan)
{
    uint64_t rng = test_seed(20261126);
    const struct pt_model model = { .name = "place" };
    const struct plan_policy zero1 = { .strategy = PLAN_ZERO1 };
    struct shd_err e = { 0 };
    char want[65], got[65];
    struct pt_run run = run_of(SHD_PATH_MAP);
    char *text = plan_text(pt_spec(&model), zero1, TOY_MICROS, 0, &rng);
    pt_reference(pt_spec(&model), &run, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_planned(s, pt_spec(&model), text, &run);
    const struct shd_compute compute = { sizeof compute, NULL, fails, pt_backward, NULL, NULL };
    EXPECT_STATUS(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, NULL, NULL, &e),
                  SHD_EINTERNAL);
    struct shd_stats before = { .size = sizeof before }, after = before;
    EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
    shd_stats(s, &before, NULL);
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    shd_stats(s, &after, NULL);
    EXPECT(after.bytes_fetched - before.bytes_fetched >
           cost_of(pt_spec(&model), text).fetched_bytes); /* zero3 fetches more often */
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    free(text);
    fixture_stop(&daemons);
}

TEST_MAIN()
