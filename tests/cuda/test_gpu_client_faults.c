/* Owners of GPU workers that are killed, and calls of the driver that fail: nothing is lost,
 * nothing is left. Nothing here ran on hardware (gpu_worker.h). */
#include "tests/cuda/gpu_worker.h"

/* -- Killed -------------------------------------------------------------------------------------
 */

static void begin_kept(const struct owners *o, const struct worker *w, char want[65])
{
    struct pt_run like = { .policy = w->policy,
                           .steps = w->steps,
                           .t = { .overflow_step = UINT64_MAX } };
    const int owners = use_owners(o);
    pt_reference(pt_spec(&w->model), &like, want);
    fixture_start_kept(&daemons, owners, "");
}

static void end_kept(const struct worker *w, int status, const char *want)
{
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT_STR(w->report->text, "");
    EXPECT_STR(w->report->hex, want);
    fixture_stop(&daemons);
}

static void kill_under(const struct owners *o, struct worker *w, unsigned *random)
{
    char want[65];
    int status = 0, kills = 0;
    const int kills_max = shim_is_there() ? 40 : 4; /* a GPU's daemon takes a second to come back */
    begin_kept(o, w, want);
    const pid_t pid = start_worker(w);
    while (waitpid(pid, &status, WNOHANG) == 0) {
        sleep_ms(rand_r(random) % 150);
        if (kills < kills_max && daemons.count > 0)
            fixture_restart(&daemons, rand_r(random) % daemons.count);
        kills++;
    }
    EXPECT(kills > 1);
    end_kept(w, status, want);
}

/* Every owner, each time a gradient is written and not yet returned. */
static void kill_between(const struct owners *o, struct worker *w)
{
    char want[65];
    int status = 0, stops = 0;
    begin_kept(o, w, want);
    w->stops = true;
    const pid_t pid = start_worker(w);
    while (waitpid(pid, &status, WNOHANG) == 0) {
        sleep_ms(1);
        if (atomic_load(&w->report->stop) == 0)
            continue;
        for (int i = 0; i < daemons.count; i++)
            fixture_restart(&daemons, i);
        stops++;
        atomic_store(&w->report->stop, 0);
    }
    EXPECT_EQ(stops, (int)(TOY_MICROS * w->steps));
    end_kept(w, status, want);
}

TEST(a_gradient_that_is_written_outlives_its_owner)
{
    for (size_t i = 0; i < mix_count(); i++)
        for (int path = SHD_PATH_AUTO; path <= SHD_PATH_COPY; path += 2) {
            struct worker w = { .device = "cuda:0",
                                .model = { .name = "between" },
                                .policy = policy_of(SHD_ZERO3, (enum shd_path)path, 0),
                                .steps = shim_is_there() ? STEPS : 1 };
            kill_between(&mixes[i], &w);
            EXPECT(!w.report->moved || w.report->path == SHD_PATH_COPY);
        }
}

TEST(owners_are_killed_and_the_worker_on_a_gpu_goes_on)
{
    unsigned random = (unsigned)test_seed(20261122);
    for (size_t i = 0; i < mix_count(); i++)
        for (uint32_t accumulate = 1; accumulate <= 2; accumulate++) {
            struct worker w = { .device = "cuda:0",
                                .model = { .name = "kill", .accumulate = accumulate },
                                .policy = policy_of(SHD_ZERO3, SHD_PATH_AUTO, 0),
                                .steps = 8 };
            kill_under(&mixes[i], &w, &random);
            if (mixes[i].maps_gpu) {
                EXPECT_EQ(w.report->path, SHD_PATH_MAP);
                EXPECT(!w.report->moved); /* units stay where they are */
            }
        }
}

TEST(owners_on_gpus_are_killed_and_the_worker_on_the_host_goes_on)
{
    unsigned random = (unsigned)test_seed(20261122);
    struct worker w = { .model = { .name = "kill", .grad_dtype = SHD_BF16 },
                        .policy = policy_of(SHD_ZERO2, SHD_PATH_COPY, SHD_BF16),
                        .steps = 8 };
    for (size_t i = 2; i < mix_count(); i++)
        kill_under(&mixes[i], &w, &random);
}

/* What its stream works on is mapped anew. */
TEST(owners_are_killed_and_the_worker_goes_on_in_its_streams_order)
{
    NEEDS_SHIM();
    unsigned random = (unsigned)test_seed(20261123);
    for (size_t i = 2; i < 4; i++) {
        struct worker w = { .device = "cuda:0",
                            .model = { .name = "kill" },
                            .policy = policy_of(SHD_ZERO3, SHD_PATH_AUTO, 0),
                            .steps = 4,
                            .lazy = true,
                            .work_us = 1000 };
        kill_under(&mixes[i], &w, &random);
        EXPECT(!w.report->toy_wrong);
    }
}

/* -- Failures -----------------------------------------------------------------------------------
 */

/* The n-th call of each fails, until a run is over before there was an n-th one. What was done in
 * runs before stays done, so all of them together come to the same bits. */
static void fail_each(const struct worker *w, const char *function, const char *want, int *failed)
{
    char spec[80];
    bool reached = true;
    for (uint64_t n = 1; n <= 1000 && reached; n = n < 8 ? n + 1 : n * 2) {
        snprintf(spec, sizeof spec, "%s@%" PRIu64, function, n);
        shim_fail(spec);
        work(w);
        reached = shim_calls(function) >= n;
        shim_fail(NULL);
        expect_nothing_left(spec);
        if (w->report->status == SHD_OK && !w->report->toy_failed &&
            strcmp(w->report->hex, want) != 0)
            FAIL("%s: other digest", spec);
        if (w->report->status == SHD_OK || w->report->toy_failed)
            continue;
        (*failed)++;
        if (strstr(w->report->text, "CUDA") == NULL && strstr(w->report->text, "GPU") == NULL &&
            strstr(w->report->text, "cuda") == NULL && strstr(w->report->text, "device") == NULL)
            FAIL("%s: '%s' does not say what failed", spec, w->report->text);
    }
}

static const char *const calls[] = {
    "cuDevicePrimaryCtxRetain",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuStreamCreate",
    "cuEventCreate",
    "cuEventRecord",
    "cuMemAlloc",
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemcpyAsync",
    "cuLaunchKernel",
    "cuMemAddressReserve",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
    "cuCtxSetCurrent",
};

static char want_failing[65];

static void fail_calls(struct worker *w)
{
    const struct cuda *cuda;
    struct shd_err e = { 0 };
    int failed = 0;
    EXPECT_OK(cuda_load(&cuda, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(calls); i++)
        fail_each(w, calls[i], want_failing, &failed);
    printf("  %d runs failed\n", failed);
    EXPECT(failed > 20);
}

static void fail_all(struct worker *w, const struct owners *o)
{
    struct pt_run like = { .policy = w->policy,
                           .steps = w->steps,
                           .t = { .overflow_step = UINT64_MAX } };
    pt_reference(pt_spec(&w->model), &like, want_failing);
    fixture_start(&daemons, use_owners(o), NULL);
    await_worker(in_child(fail_calls, w));
    fixture_stop(&daemons);
}

TEST(whatever_call_fails_is_named_and_nothing_is_left)
{
    NEEDS_SHIM();
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "fail", .accumulate = 2, .grad_dtype = SHD_BF16 },
                        .policy = policy_of(SHD_ZERO3, SHD_PATH_AUTO, SHD_BF16),
                        .steps = 1 };
    fail_all(&w, &mixes[2]);
    fail_all(&w, &mixes[3]);
}

int main(int argc, char **argv)
{
    setenv("SHIM_CUDA_DEVICES", "2", 1);
    return test_run_all(argc, argv);
}
