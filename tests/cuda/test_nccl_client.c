/* Workers on a GPU whose owners are on others, by NCCL: they come to what a run in one process on
 * the host comes to, whatever is killed or fails. Driver and NCCL are the shims of tests/cuda:
 * nothing here ran on hardware, nor by NCCL. The worker is on cuda:0. */
#include "tests/cuda/gpu_worker.h"

static const struct owners one_far = { { "gpu1" }, true, false };
static const struct owners two_far = { { "gpu1", "gpu2" }, true, false };
static const struct owners near_and_far = { { "gpu0", "gpu1" }, true, false };
static const struct owners far_and_host = { { "gpu1", "cpu0" }, true, false };
static const struct owners *const all_far[] = { &one_far, &two_far, &near_and_far };

static void shim_nccl_set(const char *spec)
{
    void (*fail)(const char *);
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&fail = dlsym(library, "shim_nccl_fail");
    CHECK(fail != NULL);
    fail(spec);
    /* left open, as the path itself does */
}

static void reference(const struct worker *w, char want[65])
{
    struct pt_run like = { .policy = w->policy,
                           .steps = w->steps,
                           .t = { .overflow_step = UINT64_MAX } };
    pt_reference(pt_spec(&w->model), &like, want);
}

static void expect_done(const struct worker *w, enum shd_path path, const char *want)
{
    const struct worker_report *r = w->report;
    if (r->status != SHD_OK)
        FAIL("strategy %d, path %d: %s", (int)w->policy.strategy, (int)w->policy.path, r->text);
    EXPECT_STR(r->hex, want);
    EXPECT_EQ(r->path, path);
}

/* -- The same bits everywhere -------------------------------------------------------------------
 */

/* By copy and by NCCL: the same result, of the same bytes. */
static void by_both(struct worker w, enum shd_strategy strategy)
{
    static uint32_t models;
    char want[65], name[32];
    uint64_t copied = 0;
    for (int path = SHD_PATH_COPY; path <= SHD_PATH_NCCL; path++) {
        snprintf(name, sizeof name, "m%u", models++);
        w.model.name = name;
        w.policy = policy_of(strategy, (enum shd_path)path, w.policy.grad_dtype);
        reference(&w, want);
        run_worker(&w);
        expect_done(&w, (enum shd_path)path, want);
        EXPECT(w.report->stats.bytes_copied >=
               w.report->stats.bytes_fetched + w.report->stats.bytes_returned); /* with padding */
        if (path == SHD_PATH_COPY)
            copied = w.report->stats.bytes_copied;
        EXPECT_EQ(w.report->stats.bytes_copied, copied);
    }
    munmap(w.report, sizeof *w.report);
}

static void every_strategy(const struct owners *o, struct pt_model model, enum shd_dtype grad_dtype)
{
    model.grad_dtype = grad_dtype;
    const struct worker w = {
        .device = "cuda:0", .model = model, .policy = { .grad_dtype = grad_dtype }, .steps = STEPS
    };
    for (int strategy = SHD_ZERO3; strategy <= SHD_DDP; strategy++) {
        fixture_start(&daemons, use_owners(o), NULL); /* anew: the shim is slow with many models */
        by_both(w, (enum shd_strategy)strategy);
        fixture_stop(&daemons);
    }
}

TEST(every_strategy_gives_the_same_bits_of_the_same_bytes)
{
    every_strategy(&two_far, (struct pt_model){ .publish = "f32" }, 0);
    every_strategy(&near_and_far, (struct pt_model){ .publish = "f32", .mean = true }, 0);
}

TEST(the_same_with_half_precision_and_local_sums)
{
    every_strategy(&near_and_far,
                   (struct pt_model){ .publish = "bf16", .accumulate = 2, .frozen = true },
                   SHD_BF16);
}

TEST(the_same_in_the_order_of_the_workers_stream)
{
    NEEDS_SHIM();
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "stream" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                        .steps = STEPS,
                        .lazy = true,
                        .work_us = 300 };
    char want[65];
    reference(&w, want);
    fixture_start(&daemons, use_owners(&near_and_far), NULL);
    run_worker(&w);
    fixture_stop(&daemons);
    expect_done(&w, SHD_PATH_NCCL, want);
    EXPECT(w.report->behind_max > 0 && !w.report->toy_wrong);
}

/* Both by the one thread; the shim would abort if there were two. */
static void work_two(struct worker *w)
{
    static const char *const names[] = { "one", "two" };
    struct shd_err e = { 0 };
    shd_session *s[2] = { NULL };
    shd_model *m[2] = { NULL };
    struct gpu_toy toys[2] = { { .pt = { .overflow_step = UINT64_MAX } },
                               { .pt = { .overflow_step = UINT64_MAX } } };
    char hex[65];
    for (int i = 0; i < 2; i++) {
        w->model.name = names[i];
        EXPECT_OK(open_session(w, &s[i], &e), &e);
        EXPECT(gt_open(&toys[i], true));
        EXPECT_OK(shd_model_open(s[i], pt_spec(&w->model), &m[i], &e), &e);
        EXPECT_OK(shd_set_policy(m[i], &w->policy, &e), &e);
    }
    for (uint32_t step = 0; step < w->steps; step++)
        for (int i = 0; i < 2; i++)
            EXPECT_OK(gt_step(m[i], &toys[i], NULL, &e), &e);
    EXPECT_OK(shd_digest(m[0], w->report->hex, NULL, &e), &e);
    shd_close(s[0]); /* the other one goes on */
    gt_close(&toys[0]);
    EXPECT_OK(gt_step(m[1], &toys[1], NULL, &e), &e);
    EXPECT_OK(shd_digest(m[1], hex, NULL, &e), &e);
    snprintf(w->report->text, sizeof w->report->text, "%s", hex);
    shd_close(s[1]);
    gt_close(&toys[1]);
    expect_nothing_left("after both");
}

TEST(two_models_of_a_process_share_the_thread)
{
    char want[65];
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "one" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                        .steps = STEPS };
    fixture_start(&daemons, use_owners(&near_and_far), NULL);
    await_worker(in_child(work_two, &w));
    reference(&w, want);
    EXPECT_STR(w.report->hex, want);
    w.model.name = "two";
    w.steps++;
    reference(&w, want);
    EXPECT_STR(w.report->text, want);
    fixture_stop(&daemons);
}

/* Nothing of a far owner's is imported, so the driver need not be able to. */
TEST(no_memory_of_far_owners_is_mapped)
{
    char want[65];
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "unmapped" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                        .steps = STEPS };
    reference(&w, want);
    fixture_start(&daemons, use_owners(&two_far), NULL);
    setenv("SHIM_CUDA_FAIL", "cuMemImportFromShareableHandle@1", 1);
    run_worker(&w);
    expect_done(&w, SHD_PATH_NCCL, want);
    w.policy.path = SHD_PATH_COPY;
    run_worker(&w);
    EXPECT_EQ(w.report->status, SHD_ENOMEM); /* that it would have failed */
    unsetenv("SHIM_CUDA_FAIL");
    fixture_stop(&daemons);
}

/* -- Which path ---------------------------------------------------------------------------------
 */

static void expect_auto(const struct owners *o, bool policy, enum shd_path path)
{
    char want[65];
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "auto", .publish = "bf16" },
                        .steps = STEPS };
    if (policy)
        w.policy = policy_of(SHD_ZERO2, SHD_PATH_AUTO, 0);
    reference(&w, want);
    fixture_start(&daemons, use_owners(o), NULL);
    run_worker(&w);
    expect_done(&w, path, want);
    fixture_stop(&daemons);
}

TEST(auto_takes_it_where_a_gpu_is_out_of_reach_and_nowhere_else)
{
    for (int policy = 0; policy <= 1; policy++) {
        setenv("SHIM_CUDA_NO_PEER", "1", 1);
        for (size_t i = 0; i < ARRAY_SIZE(all_far); i++)
            expect_auto(all_far[i], policy, SHD_PATH_NCCL);
        expect_auto(&far_and_host, policy, SHD_PATH_NCCL); /* the host's part is copied */
        unsetenv("SHIM_CUDA_NO_PEER");
        expect_auto(&two_far, policy, SHD_PATH_COPY);
    }
}

static void expect_refused(struct worker *w, const struct owners *o, const char *text)
{
    if (o != NULL)
        fixture_start(&daemons, use_owners(o), NULL);
    run_worker(w);
    EXPECT_EQ(w->report->status, SHD_ENOTSUP);
    EXPECT_HAS(w->report->text, text);
    if (o != NULL)
        fixture_stop(&daemons);
}

TEST(what_cannot_be_names_the_owner)
{
    static const struct owners near = { { "gpu0" }, true, true };
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "no" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                        .steps = 1 };
    expect_refused(&w, &far_and_host, "daemon cpu0 has model 'no' in host memory");
    expect_refused(&w, &near, "this worker's own GPU");
    w.address = "local:";
    expect_refused(&w, NULL, "local:");
    w.address = NULL;
    w.device = NULL;
    expect_refused(&w, &one_far, "this worker's arrays are in host memory");
    w.device = "cuda:0";
    setenv("SHIM_NCCL_FAIL", "ncclGetVersion", 1);
    fixture_start(&daemons, use_owners(&one_far), NULL);
    run_worker(&w);
    EXPECT(w.report->status != SHD_OK);
    EXPECT_HAS(w.report->text, "path nccl: ncclGetVersion");
    unsetenv("SHIM_NCCL_FAIL");
    fixture_stop(&daemons);
}

/* -- Killed and stopped -------------------------------------------------------------------------
 */

TEST(owners_are_killed_and_the_worker_goes_on)
{
    unsigned random = (unsigned)test_seed(20261122);
    setenv("SHIM_CUDA_NO_PEER", "1", 1);
    for (size_t i = 0; i < ARRAY_SIZE(all_far) + 1; i++) {
        const struct owners *o = i < ARRAY_SIZE(all_far) ? all_far[i] : &far_and_host;
        struct worker w = { .device = "cuda:0",
                            .model = { .name = "kill", .accumulate = (uint32_t)(1 + i % 2) },
                            .policy = policy_of(SHD_ZERO3, SHD_PATH_AUTO, 0),
                            .steps = 8 };
        char want[65];
        int status = 0, kills = 0;
        reference(&w, want);
        fixture_start_kept(&daemons, use_owners(o), "");
        const pid_t pid = start_worker(&w);
        while (waitpid(pid, &status, WNOHANG) == 0) {
            sleep_ms(rand_r(&random) % 250);
            if (kills < 30)
                fixture_restart(&daemons, rand_r(&random) % daemons.count);
            kills++;
        }
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        expect_done(&w, SHD_PATH_NCCL, want);
        EXPECT(kills > 1);
        fixture_stop(&daemons);
    }
    unsetenv("SHIM_CUDA_NO_PEER");
}

/* Each time a gradient is written and not yet returned. */
TEST(a_gradient_that_is_written_outlives_its_owner)
{
    for (size_t i = 0; i < ARRAY_SIZE(all_far); i++) {
        struct worker w = { .device = "cuda:0",
                            .model = { .name = "between", .grad_dtype = SHD_BF16 },
                            .policy = policy_of(SHD_ZERO2, SHD_PATH_NCCL, SHD_BF16),
                            .steps = STEPS,
                            .stops = true };
        char want[65];
        int status = 0, stops = 0;
        reference(&w, want);
        fixture_start_kept(&daemons, use_owners(all_far[i]), "");
        const pid_t pid = start_worker(&w);
        while (waitpid(pid, &status, WNOHANG) == 0) {
            sleep_ms(1);
            if (atomic_load(&w.report->stop) == 0)
                continue;
            for (int k = 0; k < daemons.count; k++)
                fixture_restart(&daemons, k);
            stops++;
            atomic_store(&w.report->stop, 0);
        }
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        expect_done(&w, SHD_PATH_NCCL, want);
        EXPECT_EQ(stops, (int)(TOY_MICROS * w.steps));
        fixture_stop(&daemons);
    }
}

/* In any fetch or return; a successor does what is left. */
TEST(workers_are_killed_and_the_next_one_goes_on)
{
    unsigned random = (unsigned)test_seed(20261122);
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "workers" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                        .steps = 4 };
    char want[65];
    int killed = 0;
    reference(&w, want);
    fixture_start(&daemons, use_owners(&two_far), NULL);
    for (bool done = false; !done;) {
        int status = 0;
        const pid_t pid = start_worker(&w);
        for (int ms = killed < 25 ? rand_r(&random) % 400 : 3600000; ms > 0; ms -= 5) {
            if (waitpid(pid, &status, WNOHANG) == pid) {
                done = true;
                break;
            }
            sleep_ms(5);
        }
        if (done) {
            EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            break;
        }
        kill(pid, SIGKILL);
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        killed++;
    }
    expect_done(&w, SHD_PATH_NCCL, want);
    EXPECT(killed > 0);
    fixture_stop(&daemons);
}

/* An owner that is stopped before it joins, and one that is in the middle. */
TEST(an_owner_that_is_stopped_is_named_in_time)
{
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "stopped" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                        .steps = 2,
                        .timeout_ms = test_paced(1500),
                        .stops = true };
    fixture_start(&daemons, use_owners(&two_far), NULL);
    const pid_t pid = start_worker(&w);
    while (atomic_load(&w.report->stop) == 0)
        sleep_ms(1);
    kill(daemons.pids[1], SIGSTOP);
    atomic_store(&w.report->stop, 0);
    int status = 0;
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        EXPECT(test_now_ms() < end_ms);
        atomic_store(&w.report->stop, 0);
        sleep_ms(1);
    }
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_EQ(w.report->status, SHD_ETIMEDOUT);
    EXPECT_HAS(w.report->text, "daemon gpu2");
    kill(daemons.pids[1], SIGCONT);
    fixture_stop(&daemons);
}

/* -- Failures -----------------------------------------------------------------------------------
 */

static uint32_t *steps_done; /* shared: by the runs that did not fail */

static const char *const calls[] = {
    "ncclGetUniqueId",
    "ncclCommInitRankConfig",
    "ncclCommGetAsyncError",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclSend",
    "ncclRecv",
    "work",
};

static bool fail_call(struct worker *w, const char *format, const char *call, int n)
{
    char spec[80];
    snprintf(spec, sizeof spec, format, call, n);
    w->steps = *steps_done + 1;
    shim_nccl_set(spec);
    work(w);
    shim_nccl_set(NULL);
    expect_nothing_left(spec);
    if (w->report->status == SHD_OK) {
        (*steps_done)++;
        return false;
    }
    if (strstr(w->report->text, "NCCL error 2") == NULL)
        FAIL("%s: '%s' does not say what failed", spec, w->report->text);
    return true;
}

/* The n-th call of each fails in the worker, once. */
static void fail_once(struct worker *w)
{
    for (size_t i = 0; i < ARRAY_SIZE(calls); i++)
        for (int n = 1; n <= 12; n += n)
            if (fail_call(w, "%s@%d", calls[i], n))
                EXPECT(i == 0 && n <= 2); /* the first ids: nothing to be mended yet */
}

/* The n-th and all that follow. */
static void fail_for_good(struct worker *w)
{
    for (size_t i = 0; i < ARRAY_SIZE(calls); i++)
        for (int n = 1; n <= 10; n += 9)
            if (fail_call(w, "%s@%d+", calls[i], n) && i > 0)
                EXPECT_HAS(w->report->text, "is there, but not by NCCL, joined anew 3 times: ");
}

static void then_all_is_as_ever(void (*run)(struct worker *w), uint32_t steps)
{
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "fail" },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0) };
    char want[65];
    steps_done = share(sizeof *steps_done);
    fixture_start(&daemons, use_owners(&one_far), NULL);
    await_worker(in_child(run, &w));
    EXPECT(*steps_done >= steps);
    w.steps = *steps_done + 1;
    run_worker(&w);
    reference(&w, want);
    expect_done(&w, SHD_PATH_NCCL, want);
    fixture_stop(&daemons);
    munmap(steps_done, sizeof *steps_done);
}

TEST(a_call_of_nccl_that_fails_once_is_mended)
{
    then_all_is_as_ever(fail_once, 4 * (uint32_t)ARRAY_SIZE(calls) - 2);
}

TEST(calls_of_nccl_that_fail_for_good_are_said_and_nothing_is_left)
{
    then_all_is_as_ever(fail_for_good, 0);
}

int main(int argc, char **argv)
{
    return nccl_main(argc, argv);
}
