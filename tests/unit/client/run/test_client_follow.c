/* Runs that vary: experts, workers that stop early, sums broken off, loss scales, failing memory.
 * Each must end with the bits of the same run in one process. */
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>

#include "client/paths/map.h"
#include "proto/base/sys.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/client_toy.h"

/* -- Counting allocations ------------------------------------------------------------------------
 */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);

static uint32_t allocations; /* by our own code: libraries are not wrapped */

void *__wrap_malloc(size_t bytes)
{
    __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *p, size_t bytes)
{
    __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED);
    return __real_realloc(p, bytes);
}

static uint32_t faults_seen;

static int count_faults(enum sys_kind kind)
{
    if (kind == SYS_ALLOC || kind == SYS_MAP)
        __atomic_fetch_add(&faults_seen, 1, __ATOMIC_RELAXED);
    return 0;
}

static struct pt_run run_on(enum shd_strategy strategy, enum shd_path path, uint32_t steps)
{
    return (struct pt_run){ .policy = { .size = sizeof(struct shd_policy),
                                        .strategy = strategy,
                                        .forward_prefetch = 1,
                                        .path = path },
                            .steps = steps,
                            .t = { .overflow_step = UINT64_MAX } };
}

TEST(nothing_is_allocated_or_mapped_after_the_first_step)
{
    fixture_start(&daemons, 2, NULL);
    for (int path = SHD_PATH_MAP; path <= SHD_PATH_COPY; path++)
        for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++) {
            char name[32];
            snprintf(name, sizeof name, "alloc%d%d", path, strategy);
            const struct pt_model model = { .name = name, .accumulate = strategy % 2 ? 2 : 1 };
            struct shd_err e = { 0 };
            shd_model *m;
            struct pt_run run = run_on((enum shd_strategy)strategy, (enum shd_path)path, 0);
            shd_session *s = attach(PATIENT_MS);
            EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
            EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
            EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
            const uint32_t before = allocations;
            faults_seen = 0;
            sys_fault = count_faults;
            for (int k = 0; k < 3; k++)
                EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
            sys_fault = NULL;
            EXPECT(before > 0);
            EXPECT_EQ(allocations, before);
            EXPECT_EQ(faults_seen, 0);
            shd_close(s);
        }
    fixture_stop(&daemons);
}

/* -- Experts ------------------------------------------------------------------------------------
 */

static void train_routed(struct pt_model model, struct pt_run run, const char *want)
{
    static uint32_t models;
    char got[65], name[32];
    struct shd_err e = { 0 };
    struct shd_stats stats = { .size = sizeof stats };
    shd_model *m;
    snprintf(name, sizeof name, "moe%u", models++);
    model.name = name;
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(pt_train(s, pt_spec(&model), &run, toy_all_micros, TOY_MICROS, got, &e), &e);
    if (strcmp(got, want) != 0)
        FAIL("strategy %d, path %d, bound %u: other digest", (int)run.policy.strategy,
             (int)run.policy.path, run.policy.max_live_units);
    shd_stats(s, &stats, NULL);
    m = s->models;
    uint64_t sum = 0;
    for (uint32_t u = 0; u < PT_UNITS; u++)
        sum += shd_unit_misses(m, u);
    EXPECT_EQ(sum, stats.plan_misses);
    EXPECT(stats.plan_misses > 0);
    EXPECT(shd_unit_misses(m, PT_EXPERT) > 0);
    EXPECT_EQ(shd_unit_misses(m, 0), 0);
    EXPECT_EQ(m->held.units, 0);
    EXPECT_EQ(s->live_bytes, 0);
    if (run.policy.max_live_units > 0)
        EXPECT(run.t.live_units_max <= run.policy.max_live_units);
    shd_close(s);
}

static void every_routed(struct pt_model model, bool early)
{
    char want[65];
    model.name = "reference";
    struct pt_run like = run_on(SHD_ZERO3, SHD_PATH_MAP, 5);
    like.routed = true;
    like.t.early = early;
    pt_reference(pt_spec(&model), &like, want);
    fixture_start(&daemons, 2, NULL);
    for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++)
        for (int path = SHD_PATH_MAP; path <= SHD_PATH_COPY; path++) {
            struct pt_run run = run_on((enum shd_strategy)strategy, (enum shd_path)path, 5);
            run.routed = true;
            run.t.early = early;
            run.policy.forward_prefetch = (uint32_t)path;
            run.policy.backward_prefetch = (enum shd_backward_prefetch)(strategy % 3);
            train_routed(model, run, want);
            if (strategy != SHD_ZERO3)
                continue;
            run.policy.max_live_units = 2;
            train_routed(model, run, want);
        }
    fixture_stop(&daemons);
}

TEST(idle_experts_change_no_bit_and_are_named)
{
    every_routed((struct pt_model){ .publish = "f32" }, false);
}

TEST(idle_experts_with_local_sums)
{
    every_routed((struct pt_model){ .accumulate = 2, .frozen = true }, false);
}

TEST(micro_batches_that_stop_early)
{
    every_routed((struct pt_model){ .publish = "bf16" }, true);
}

/* A model that says it runs everything in order keeps to the plan. */
static uint32_t next_in_order(void *ctx, uint32_t micro, uint32_t unit)
{
    (void)ctx;
    (void)micro;
    return unit == PT_UNITS - 1 ? UINT32_MAX : unit + 1;
}

/* h0 and h1 swapped from the second micro-batch on: the new order is learnt. */
static uint32_t next_swapped(void *ctx, uint32_t micro, uint32_t unit)
{
    if (micro == 0 && shd_step(((struct pt *)ctx)->m) == 0)
        return next_in_order(ctx, micro, unit);
    static const uint32_t next[] = { 2, 3, 1, 4, 5, 6, UINT32_MAX };
    return unit == UINT32_MAX ? 0 : next[unit];
}

static uint32_t next_wrong(void *ctx, uint32_t micro, uint32_t unit)
{
    (void)ctx;
    return micro < 2 ? next_in_order(ctx, micro, unit) : unit == UINT32_MAX ? 1 : unit == 1 ? 0 : 1;
}

TEST(an_order_is_learnt_and_a_wrong_one_refused)
{
    const struct pt_model model = { .name = "order" };
    struct shd_err e = { 0 };
    struct shd_stats stats = { .size = sizeof stats };
    shd_model *m;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    struct pt_run run = run_on(SHD_ZERO3, SHD_PATH_COPY, 0);
    EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
    run.t.m = m;
    struct shd_compute compute = { sizeof compute, &run.t,      pt_forward,
                                   pt_backward,    toy_metrics, next_swapped };
    struct shd_update update = toy_update(0);
    for (int k = 0; k < 3; k++)
        EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
    shd_stats(s, &stats, NULL);
    printf("  %" PRIu64 " misses\n", stats.plan_misses);
    EXPECT(stats.plan_misses > 0 && stats.plan_misses <= 6);
    const uint64_t learnt = stats.plan_misses;
    compute.next = next_wrong;
    EXPECT_STATUS(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e),
                  SHD_EINVAL);
    EXPECT_HAS(e.text, "'h0', which has run");
    EXPECT_EQ(m->held.units, 0);
    EXPECT_EQ(s->live_bytes, 0);
    compute.next = next_swapped;
    EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
    shd_stats(s, &stats, NULL);
    EXPECT(stats.plan_misses > learnt);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Sums ---------------------------------------------------------------------------------------
 */

TEST(broken_groups_are_named)
{
    static const uint32_t half[] = { 0, 1, 2 }, odd[] = { 1, 2 };
    const struct pt_model model = { .name = "groups", .accumulate = 2, .frozen = true };
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    float *grad;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    struct pt_run run = run_on(SHD_ZERO3, SHD_PATH_AUTO, 1);
    const struct shd_update update = toy_update(0);
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
    EXPECT_EQ(shd_accumulate(m), 2);
    EXPECT(shd_unit_frozen(m, 2) && !shd_unit_frozen(m, 1) && !shd_unit_frozen(m, 99));
    EXPECT_STATUS(pt_step(m, &run, half, 3, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "micro-batch 2 belongs to a group of 2 (2 to 3)");
    EXPECT_STATUS(pt_step(m, &run, odd, 2, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "(0 to 1)");
    EXPECT_STATUS(shd_grad(m, 0, 2, &grad, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'h1' is frozen");
    EXPECT_STATUS(shd_return_none(m, 0, 2, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_grad(m, 1, 1, &grad, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "ascending order, 0 of them are in");
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "handed out and not returned");
    EXPECT_OK(shd_return(m, 0, 1, &e), &e);
    EXPECT_STATUS(shd_return(m, 0, 1, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "only 1 of them came in");
    EXPECT_OK(shd_return_none(m, 1, 1, &e), &e);
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e),
              &e); /* its repeat is dropped */
    EXPECT_EQ(s->live_bytes, 0);
    shd_close(s);
}

/* -- Metrics ------------------------------------------------------------------------------------
 */

#define METRIC_STEPS 6u

struct summing { /* a worker, and the sums each of its steps ended with */
    pthread_t thread;
    const char *address, *spec;
    enum shd_strategy strategy;
    uint32_t micros[TOY_MICROS], count;
    double sums[METRIC_STEPS][2];
    int status;
    struct shd_err e;
};

static int zero_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const struct pt *t = ctx;
    (void)micro;
    (void)params;
    memset(grad, 0, t->m->spec->units[unit].elems * sizeof *grad);
    return 0;
}

/* Some micro-batches end before the last unit, so that the first backward is another one's. */
static uint32_t next_ends_early(void *ctx, uint32_t micro, uint32_t unit)
{
    const struct pt *t = ctx;
    const uint32_t last = (micro + shd_step(t->m)) % 3 == 0 ? 1 : PT_UNITS - 1;
    return unit == UINT32_MAX ? 0 : unit == last ? UINT32_MAX : unit + 1;
}

static int sum_step(shd_model *m, const struct summing *w, double *ret_sums, struct shd_err *e)
{
    struct pt t = { .m = m };
    const struct shd_compute compute = { sizeof compute, &t,          pt_forward,
                                         zero_backward,  toy_metrics, next_ends_early };
    const struct shd_update update = toy_update(shd_step(m));
    struct shd_result result = { .size = sizeof result };
    const int r = shd_run_step(m, w->micros, w->count, &compute, &update, &result, e);
    memcpy(ret_sums, result.metrics, 2 * sizeof *ret_sums);
    return r;
}

static void *sum_steps(void *ctx)
{
    struct summing *w = ctx;
    const struct shd_policy policy = run_on(w->strategy, SHD_PATH_AUTO, 0).policy;
    shd_session *s;
    shd_model *m;
    w->status = try_connect(w->address, PATIENT_MS, &s, &w->e);
    if (w->status != SHD_OK)
        return NULL;
    w->status = shd_model_open(s, w->spec, &m, &w->e);
    if (w->status == SHD_OK)
        w->status = shd_set_policy(m, &policy, &w->e);
    for (uint32_t k = 0; w->status == SHD_OK && k < METRIC_STEPS; k++)
        w->status = sum_step(m, w, w->sums[k], &w->e);
    shd_close(s);
    return NULL;
}

/* Each of `workers` takes as many groups of two micro-batches. Whether a unit that did not run is
 * returned before the numbers of its group are known must not matter. */
static void sum_by(const char *address, uint32_t workers, enum shd_strategy strategy)
{
    char name[32];
    struct summing w[2];
    snprintf(name, sizeof name, "sums%u%d", workers, (int)strategy);
    const struct pt_model model = { .name = name, .accumulate = 2 };
    for (uint32_t i = 0; i < workers; i++) {
        w[i] = (struct summing){ .address = address,
                                 .spec = pt_spec(&model),
                                 .strategy = i == 0 ? strategy : SHD_ZERO3,
                                 .count = TOY_MICROS / workers };
        memcpy(w[i].micros, toy_all_micros + i * w[i].count, w[i].count * sizeof *w[i].micros);
        EXPECT_EQ(pthread_create(&w[i].thread, NULL, sum_steps, &w[i]), 0);
    }
    for (uint32_t i = 0; i < workers; i++)
        pthread_join(w[i].thread, NULL);
    const double want = (1.0 / 3 + 1.0 / 4) + (1.0 / 5 + 1.0 / 6); /* toy_metrics() */
    for (uint32_t i = 0; i < workers; i++) {
        EXPECT_OK(w[i].status, &w[i].e);
        for (uint32_t k = 0; k < METRIC_STEPS; k++)
            if (w[i].sums[k][0] != want || w[i].sums[k][1] != 0 + 1 + 2 + 3)
                FAIL("%u workers at %s, strategy %d, step %u: sums %.17g and %g, not %.17g and 6",
                     workers, address, (int)strategy, k, w[i].sums[k][0], w[i].sums[k][1], want);
    }
}

TEST(metrics_are_those_of_all_micro_batches_whoever_runs_which_units)
{
    fixture_start(&daemons, 2, NULL);
    for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++) {
        sum_by("local:", 1, (enum shd_strategy)strategy);
        for (uint32_t workers = 1; workers <= 2; workers++)
            sum_by(daemons.address, workers, (enum shd_strategy)strategy);
    }
    fixture_stop(&daemons);
}

/* -- Loss scale ---------------------------------------------------------------------------------
 */

static void scaled_steps(shd_model *m, struct pt_run *run, uint32_t steps, uint32_t *ret_skipped)
{
    struct shd_err e = { 0 };
    for (uint32_t k = 0; k < steps; k++) {
        struct shd_result result = { .size = sizeof result };
        run->update = toy_update(shd_step(m));
        run->update.dynamic_loss_scale = true;
        run->t.loss_scale = shd_loss_scale(m);
        EXPECT_OK(pt_step(m, run, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.skipped, result.step == run->t.overflow_step);
        *ret_skipped += result.skipped;
    }
}

TEST(an_overflow_skips_exactly_its_step)
{
    const struct pt_model model = { .name = "scaled", .publish = "f16" };
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_session *one;
    uint32_t skipped = 0;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    struct pt_run run = run_on(SHD_ZERO2, SHD_PATH_COPY, 0);
    run.t.overflow_step = 2;
    fixture_start(&daemons, 3, NULL);
    EXPECT_OK(shd_connect(&options, &one, &e), &e);
    shd_model *reference = open_toy(one, pt_spec(&model));
    scaled_steps(reference, &run, 5, &skipped);
    EXPECT_EQ(skipped, 1);
    EXPECT(shd_loss_scale(reference) == 32768);
    digest_of(reference, want);
    shd_close(one);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, pt_spec(&model));
    EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
    EXPECT(shd_loss_scale(m) == 65536);
    scaled_steps(m, &run, 3, &skipped);
    EXPECT(shd_loss_scale(m) == 32768);
    shd_close(s);
    s = attach(PATIENT_MS); /* a successor knows the scale */
    m = open_toy(s, pt_spec(&model));
    EXPECT(shd_loss_scale(m) == 32768);
    scaled_steps(m, &run, 2, &skipped);
    EXPECT_EQ(skipped, 2);
    digest_of(m, got);
    EXPECT_STR(got, want);
    run.update.loss_scale = 2;
    EXPECT_STATUS(shd_commit(m, &run.update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "dynamic_loss_scale");
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Failing ------------------------------------------------------------------------------------
 */

static int fail_at, fail_kind;

static int fail_nth(enum sys_kind kind)
{
    return (int)kind == fail_kind && --fail_at == 0 ? ENOMEM : 0;
}

/* After a failure the same step is run again, undisturbed. */
static int attach_and_step(const char *spec, struct pt_run *run, shd_session **ret_session,
                           struct shd_err *e)
{
    shd_model *m;
    *ret_session = NULL;
    int r = try_connect(daemons.address, PATIENT_MS, ret_session, e);
    if (r == SHD_OK)
        r = shd_model_open(*ret_session, spec, &m, e);
    if (r == SHD_OK)
        r = shd_set_policy(m, &run->policy, e);
    return r == SHD_OK ? pt_step(m, run, toy_all_micros, TOY_MICROS, NULL, e) : r;
}

static void fail_each(int kind, const char *want)
{
    int failures = 0;
    for (int n = 1;; n++) {
        static char spec[4096];
        char name[32], got[65];
        struct shd_err e = { 0 };
        shd_session *s;
        struct pt_run run = run_on(SHD_ZERO3, SHD_PATH_COPY, 0);
        run.policy.grad_dtype = SHD_BF16;
        snprintf(name, sizeof name, "fail%d.%d", kind, n);
        const struct pt_model model = { .name = name, .accumulate = 2, .grad_dtype = SHD_BF16 };
        snprintf(spec, sizeof spec, "%s", pt_spec(&model));
        if (n % 50 == 1) { /* a daemon takes 64 models */
            if (n > 1)
                fixture_stop(&daemons);
            fixture_start(&daemons, 2, NULL);
        }
        fail_at = n;
        fail_kind = kind;
        sys_fault = fail_nth;
        const int r = attach_and_step(spec, &run, &s, &e);
        sys_fault = NULL;
        if (fail_at > 0) {
            EXPECT_OK(r, &e);
            shd_close(s);
            break;
        }
        failures++;
        EXPECT(r != SHD_OK && e.text[0] != '\0');
        if (s != NULL && s->models != NULL) {
            EXPECT_EQ(s->models->held.units, 0);
            EXPECT_EQ(s->live_bytes, 0);
            EXPECT_OK(pt_step(s->models, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
            digest_of(s->models, got);
            if (s->models->policy.set)
                EXPECT_STR(got, want);
        }
        shd_close(s);
    }
    EXPECT(failures > 5);
    fixture_stop(&daemons);
}

TEST(nth_failure_on_the_copy_path_is_an_error_and_can_be_repeated)
{
    static const int kinds[] = { SYS_ALLOC, SYS_MAP, SYS_SEND };
    char want[65];
    setenv("SHD_RING", "off", 1); /* without one all goes on: no failure, see client_ring */
    const struct pt_model model = { .name = "reference", .accumulate = 2, .grad_dtype = SHD_BF16 };
    struct pt_run run = run_on(SHD_ZERO3, SHD_PATH_COPY, 1);
    run.policy.grad_dtype = SHD_BF16;
    pt_reference(pt_spec(&model), &run, want);
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++)
        fail_each(kinds[k], want);
    unsetenv("SHD_RING");
}

/* What goes wrong on the transfer thread is told by the session's, which knows the daemons. */
TEST(copy_path_names_who_does_not_publish_and_what_is_over)
{
    const struct pt_model model = { .name = "late" };
    struct shd_err e = { 0 };
    char who[64], within[64];
    struct pt_run run = run_on(SHD_ZERO3, SHD_PATH_COPY, 0);
    fixture_start(&daemons, 2, NULL);
    const uint64_t patience_ms = test_paced(1000);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, pt_spec(&model)), *ahead = open_toy(other, pt_spec(&model));
    EXPECT_OK(shd_set_policy(m, &run.policy, &e), &e);
    limit_waits(s, patience_ms);
    m->step++; /* a step that will not come */
    EXPECT_STATUS(shd_acquire(m, 1, NULL, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "daemon cpu0");
    snprintf(within, sizeof within, "unit 1 'h0' of step 1 within %" PRIu64 " ms", patience_ms);
    EXPECT_HAS(e.text, "did not publish ");
    EXPECT_HAS(e.text, within);
    m->step--;
    EXPECT_OK(shd_acquire(m, 1, NULL, &e), &e);
    EXPECT_OK(pt_step(ahead, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_OK(shd_acquire(ahead, 2, NULL, &e), &e); /* published */
    EXPECT_STATUS(shd_acquire(m, 2, NULL, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "this worker is at step 0: that step is over");
    EXPECT_EQ(m->held.units, 1);
    m->step++;
    EXPECT_STATUS(shd_acquire(m, 1, NULL, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "is held since step 0");
    shd_release(m, 1);
    EXPECT_OK(shd_acquire(m, 1, NULL, &e), &e);
    m->step++;
    kill(daemons.pids[1], SIGKILL);
    EXPECT_STATUS(shd_acquire(m, 2, NULL, &e), SHD_EGONE);
    snprintf(who, sizeof who, "daemon cpu1 (pid %d)", (int)daemons.pids[1]);
    EXPECT_HAS(e.text, who);
    shd_close(other);
    shd_close(s);
    remove_dead_fixture();
}

TEST_MAIN()
