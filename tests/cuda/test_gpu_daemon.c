/* `shardd --device gpu0` with a driver that is none: tests/cuda's libcuda.so.1, which has a
 * device's memory in memfds and runs the kernels by emulation. Nothing here ran on hardware.
 *
 * The worker is made by hand (hand_worker.h) and does the same to daemons of the host and of a GPU:
 * what they come to must be the same, bit for bit, whatever is killed in between.
 */
#include <sys/wait.h>

#include <jansson.h>

#include "client/shd.h"
#include "proto/share/owner_bytes.h"
#include "tests/cuda/hand_worker.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/lib/child.h"
#include "tests/lib/fixture.h"

#define STEPS 5u

static struct fixture daemons;
static struct hand_shared *shared;
static uint32_t steps = STEPS;

/* Three chunks of the trail and some, a frozen unit between, less than a block at the end. */
#define SPEC(optimizer)                                                                        \
    "{\"name\":\"toy\",\"seed\":3,\"micro_batches\":3,\"publish\":\"bf16\","                   \
    "\"grad_dtype\":\"bf16\",\"optimizer\":" optimizer                                         \
    ",\"groups\":[{\"name\":\"decay\",\"weight_decay\":0.1},{\"name\":\"plain\"}],\"units\":[" \
    "{\"name\":\"a\",\"tensors\":[{\"name\":\"a.w\",\"shape\":[300,700],\"group\":\"decay\","  \
    "\"init\":[\"normal\",0,0.02]},{\"name\":\"a.b\",\"shape\":[1000],\"group\":\"plain\"}]}," \
    "{\"name\":\"f\",\"tensors\":[{\"name\":\"f.w\",\"shape\":[5000],\"trainable\":false,"     \
    "\"group\":\"plain\","                                                                     \
    "\"init\":[\"uniform\",-1,1]}]},"                                                          \
    "{\"name\":\"z\",\"tensors\":[{\"name\":\"z.w\",\"shape\":[33],\"group\":\"decay\","       \
    "\"init\":[\"const\",1]}]}]}"

static const char adamw[] = SPEC("{\"kind\":\"adamw\",\"beta1\":0.9,\"beta2\":0.95,\"eps\":1e-8}");
static const char sgd[] = SPEC("{\"kind\":\"sgd\",\"momentum\":0.9}");
static const char int8[] = SPEC("{\"kind\":\"adamw\",\"beta1\":0.9,\"moments\":\"int8\"}");
static const char lion[] = SPEC("{\"kind\":\"lion\",\"beta1\":0.9,\"beta2\":0.99}");

/* -- Runs ---------------------------------------------------------------------------------------
 */

static void share(void)
{
    if (shared == NULL)
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                      0);
    CHECK(shared != MAP_FAILED);
    memset(shared, 0, sizeof *shared);
}

static struct hand_job job_of(const char *json, const char *const *devices, uint32_t owners)
{
    struct hand_job job = { .dir = daemons.dir,
                            .owners = owners,
                            .steps = steps,
                            .slots = 1,
                            .json = json,
                            .shared = shared };
    for (uint32_t i = 0; i < owners; i++)
        job.devices[i] = devices[i];
    return job;
}

static void use_devices(const char *const *devices, uint32_t owners)
{
    for (uint32_t i = 0; i < FIXTURE_DAEMONS_MAX; i++)
        daemons.devices[i] = i < owners ? devices[i] : NULL;
}

static void await_worker(pid_t pid)
{
    expect_well(pid);
    EXPECT(shared->digest.bytes > 0);
}

static void train(const char *json, const char *const *devices, uint32_t owners, bool backwards)
{
    share();
    use_devices(devices, owners);
    fixture_start(&daemons, (int)owners, NULL);
    struct hand_job job = job_of(json, devices, owners);
    job.backwards = backwards;
    await_worker(hand_fork(&job));
    fixture_stop(&daemons);
}

static const char *const one_cpu[] = { "cpu0" };
static const char *const one_gpu[] = { "gpu0" };
static const char *const two_cpus[] = { "cpu0", "cpu1" };
static const char *const mixed[] = { "gpu0", "cpu0" };

static void reference(const char *json, const char *const *devices, uint32_t owners,
                      struct hand_digest *ret)
{
    train(json, devices, owners, /* backwards= */ false);
    EXPECT_EQ(shared->opened, owners);
    *ret = shared->digest;
}

static void expect_same(const struct hand_digest *want)
{
    EXPECT_EQ(shared->digest.bytes, want->bytes);
    EXPECT(memcmp(shared->digest.leaf, want->leaf, want->bytes) == 0);
}

/* -- The same bits ------------------------------------------------------------------------------
 */

static void expect_gpu_as_cpu(const char *json)
{
    static struct hand_digest want;
    reference(json, one_cpu, 1, &want);
    train(json, one_gpu, 1, /* backwards= */ false);
    expect_same(&want);
}

TEST(adamw_is_that_of_the_host)
{
    expect_gpu_as_cpu(adamw);
}

TEST(sgd_is_that_of_the_host)
{
    expect_gpu_as_cpu(sgd);
}

TEST(lion_is_that_of_the_host)
{
    expect_gpu_as_cpu(lion);
}

TEST(moments_in_8_bits_are_those_of_the_host)
{
    expect_gpu_as_cpu(int8);
}

TEST(gpu_and_host_side_by_side_are_two_hosts)
{
    static struct hand_digest want;
    reference(adamw, two_cpus, 2, &want);
    train(adamw, mixed, 2, /* backwards= */ false);
    expect_same(&want);
}

/* What a tensor comes to, of each array, by who only looks. */
static void look_at(const char *const *devices, uint32_t owners, struct shd_tensor_stats ret[5])
{
    char address[300];
    const struct shd_options o = { .size = sizeof o, .address = address };
    struct shd_err e;
    shd_session *s;
    shd_model *m;
    share();
    use_devices(devices, owners);
    fixture_start(&daemons, (int)owners, NULL);
    snprintf(address, sizeof address, "%s?%s%s%s", daemons.dir, devices[0], owners > 1 ? "," : "",
             owners > 1 ? devices[1] : "");
    const struct hand_job job = job_of(adamw, devices, owners);
    await_worker(hand_fork(&job));
    EXPECT_OK(shd_connect(&o, &s, &e), &e);
    EXPECT_OK(shd_model_attach(s, NULL, &m, &e), &e);
    for (uint32_t a = 0; a < 5; a++) {
        ret[a] = (struct shd_tensor_stats){ .size = sizeof *ret };
        EXPECT_OK(shd_tensor_stats(m, "a.w", (enum shd_array)a, &ret[a], &e), &e);
        EXPECT(ret[a].rms > 0 && ret[a].elems == 210000 && ret[a].step == steps);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(what_a_tensor_comes_to_is_that_of_the_host)
{
    static struct shd_tensor_stats want[5], got[5];
    look_at(one_cpu, 1, want);
    look_at(one_gpu, 1, got);
    EXPECT(memcmp(got, want, sizeof want) == 0);
    look_at(mixed, 2, got);
    EXPECT(memcmp(got, want, sizeof want) == 0);
}

/* With one slot, and the last micro-batch first, nothing can go on but by spilling. */
TEST(spilled_gradients_count_as_the_others)
{
    static struct hand_digest want;
    reference(adamw, one_cpu, 1, &want);
    train(adamw, one_cpu, 1, /* backwards= */ true);
    expect_same(&want);
    train(adamw, one_gpu, 1, /* backwards= */ true);
    expect_same(&want);
}

/* -- Killed -------------------------------------------------------------------------------------
 */

static void kill_at_random(const char *json)
{
    static struct hand_digest want;
    unsigned random = (unsigned)test_seed(20261122);
    int kills = 0;
    steps = 30;
    reference(json, mixed, 2, &want);
    share();
    fixture_start_kept(&daemons, 2, "");
    struct hand_job job = job_of(json, mixed, 2);
    job.backwards = true;
    const pid_t pid = hand_fork(&job);
    for (; kills < 30 && atomic_load(&shared->step) < steps; kills++) {
        sleep_ms(rand_r(&random) % 60);
        fixture_restart(&daemons, rand_r(&random) % 4 == 0); /* the GPU's more often */
    }
    steps = STEPS;
    await_worker(pid);
    expect_same(&want);
    EXPECT(kills >= 5);
    fixture_stop(&daemons);
}

TEST(killed_at_random_it_comes_to_the_same)
{
    kill_at_random(adamw);
}

TEST(killed_at_random_with_moments_in_8_bits_it_comes_to_the_same)
{
    kill_at_random(int8);
}

#ifdef SHD_FAIL_POINTS
static const char *const fail_points[] = {
    "model:segments:after@1", "model:ready:before@1", "model:ready:after@1", "step:cell:before@3",
    "step:cell:after@4",      "step:commit:before@2", "step:commit:after@2", "apply:done:before@2",
    "apply:done:after@2",     "spill:make:before@1",  "spill:make:after@1",  "keeper:store:after@1",
    "kern:done:before@3",     "kern:done:after@9",    "kern:done:before@14", "kern:done:after@20",
};

/* Killed there, and its successor where it adopts. */
TEST(killed_at_fail_points_it_comes_to_the_same)
{
    static struct hand_digest want;
    reference(adamw, one_cpu, 1, &want);
    use_devices(one_gpu, 1);
    for (size_t i = 0; i < ARRAY_SIZE(fail_points); i++) {
        static const char *const again[] = { "adopt:repair:after", "adopt:publish:after",
                                             "adopt:resume:after", "adopt:repair:before" };
        char orders[160];
        share();
        snprintf(orders, sizeof orders, "%s;%s;", fail_points[i], again[i % ARRAY_SIZE(again)]);
        fixture_start_kept(&daemons, 1, orders);
        struct hand_job job = job_of(adamw, one_gpu, 1);
        job.backwards = true;
        await_worker(hand_fork(&job));
        expect_same(&want);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1); /* it was killed */
        fixture_stop(&daemons);
    }
}
#endif

/* -- A device that fails ------------------------------------------------------------------------
 */

/* The shim's orders, for daemons alone: a worker is forked later. */
static void daemons_fail(const char *spec)
{
    if (spec != NULL)
        setenv("SHIM_CUDA_FAIL", spec, 1);
    else
        unsetenv("SHIM_CUDA_FAIL");
}

static void only_ask(uint32_t asks)
{
    struct hand_job job = job_of(adamw, one_gpu, 1);
    job.asks = asks;
    const pid_t pid = hand_fork(&job);
    expect_well(pid);
}

TEST(no_device_memory_is_an_error_to_who_asked)
{
    NEEDS_SHIM();
    static const char *const fails[] = { "cuMemCreate@1", "cuMemCreate@2", "cuMemCreate@3",
                                         "cuMemAddressReserve@1", "cuMemMap@2" };
    use_devices(one_gpu, 1);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        share();
        daemons_fail(fails[i]);
        fixture_start(&daemons, 1, NULL);
        daemons_fail(NULL);
        only_ask(3);
        EXPECT_EQ(shared->answers[0], SHD_ENOMEM);
        EXPECT_EQ(shared->answers[1], SHD_OK);
        EXPECT_EQ(shared->answers[2], SHD_OK);
        fixture_stop(&daemons);
    }
}

/* A device with room for the model, one inbox and what it stages through, and not a granule more:
 * gradients that wait do so in the host's memory. */
#define DEVICE_MIB 54u

static void use_device_bytes(uint64_t bytes)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRIu64, bytes);
    setenv("SHIM_CUDA_BYTES", text, 1);
}

TEST(spilled_gradients_take_no_memory_of_a_gpu)
{
    NEEDS_SHIM();
    static struct hand_digest want;
    const uint64_t rest = UINT64_C(64) << 10; /* the watchdog's */
    reference(adamw, one_cpu, 1, &want);
    use_device_bytes(((uint64_t)DEVICE_MIB << 20) + rest);
    train(adamw, one_gpu, 1, /* backwards= */ true);
    expect_same(&want);
    use_device_bytes(((uint64_t)(DEVICE_MIB - 2) << 20) + rest);
    share();
    use_devices(one_gpu, 1);
    fixture_start(&daemons, 1, NULL);
    unsetenv("SHIM_CUDA_BYTES");
    only_ask(1);
    EXPECT_EQ(shared->answers[0], SHD_ENOMEM);
    fixture_stop(&daemons);
}

/* Illegal address in the middle: nothing that is asked of this process succeeds any more. */
TEST(daemon_whose_device_failed_exits_with_an_error)
{
    NEEDS_SHIM();
    int status = 0;
    share();
    use_devices(one_gpu, 1);
    daemons_fail("kernel@30:700");
    fixture_start(&daemons, 1, NULL);
    daemons_fail(NULL);
    struct hand_job job = job_of(adamw, one_gpu, 1);
    const pid_t pid = hand_fork(&job);
    EXPECT_EQ(waitpid(daemons.pids[0], &status, 0), daemons.pids[0]);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    EXPECT(atomic_load(&shared->step) < STEPS);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    daemons.pids[0] = fork(); /* for fixture_stop() */
    CHECK(daemons.pids[0] >= 0);
    if (daemons.pids[0] == 0)
        fixture_serve(&daemons, 0);
    fixture_wait_up(&daemons, 0);
    fixture_stop(&daemons);
}

/* Each life ends after so many kernels: a trail of unfinished ones, adopted again and again. */
TEST(successors_of_failed_devices_come_to_the_same)
{
    NEEDS_SHIM();
    static struct hand_digest want;
    reference(adamw, one_cpu, 1, &want);
    share();
    use_devices(one_gpu, 1);
    daemons_fail("kernel@33:719");
    fixture_start_kept(&daemons, 1, ";");
    daemons_fail(NULL);
    struct hand_job job = job_of(adamw, one_gpu, 1);
    await_worker(hand_fork(&job));
    expect_same(&want);
    EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 2);
    fixture_stop(&daemons);
}

TEST(segments_that_cannot_be_imported_are_refused_and_kept)
{
    NEEDS_SHIM();
    static struct hand_digest want;
    reference(adamw, one_cpu, 1, &want);
    share();
    use_devices(one_gpu, 1);
    daemons_fail("cuMemImportFromShareableHandle@1:201"); /* a first life imports nothing */
    fixture_start_kept(&daemons, 1, "");
    daemons_fail(NULL);
    struct hand_job job = job_of(adamw, one_gpu, 1);
    await_worker(hand_fork(&job));
    expect_same(&want);
    const long kept = fixture_ask(&daemons, KEEPER_COUNT, 0, "");
    EXPECT_EQ(kept, 2);
    fixture_restart(&daemons, 0);
    share();
    only_ask(1);
    EXPECT(shared->answers[0] != SHD_OK);
    EXPECT_HAS(shared->text, "model 'toy' of a predecessor is kept, and cannot be used: import");
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), kept);
    fixture_stop(&daemons);
}

/* -- What it shows ------------------------------------------------------------------------------
 */

TEST(status_names_the_gpu)
{
    use_devices(one_gpu, 1);
    fixture_start(&daemons, 1, NULL);
    const struct http_reply reply = http_get(&daemons, 0, "/status");
    EXPECT_EQ(reply.code, 200);
    EXPECT_HAS(reply.body, "\"place\":\"cuda\"");
    EXPECT_HAS(reply.body, "\"uuid\":\"GPU-");
    EXPECT_HAS(reply.body, "\"isa\":\"cuda\"");
    free(reply.text);
    fixture_stop(&daemons);
}

/* -- Its memory -----------------------------------------------------------------------------------
 */

static uint64_t bytes_at(const json_t *bytes, const char *kind)
{
    const json_t *v = json_object_get(bytes, kind);
    EXPECT(json_is_integer(v));
    return (uint64_t)json_integer_value(v);
}

/* /status of a daemon with one model, and what is foreseen of it (owner_bytes.h). */
static void expect_foreseen(const char *text, uint32_t slots)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    struct shardmap *map;
    EXPECT_OK(spec_parse(text, strlen(text), &spec, &e), &e);
    EXPECT_OK(shardmap_new(spec, 0, 1, &map, &e), &e);
    const struct owner_ask ask = { .sessions = 1, .slots = slots };
    const struct owner_gpu_bytes want = owner_gpu_bytes(map, &ask);
    shardmap_free(map);
    spec_free(spec);
    const struct http_reply reply = http_get(&daemons, 0, "/status");
    json_t *root = json_loads(reply.body, 0, NULL);
    const json_t *model = json_array_get(json_object_get(root, "models"), 0);
    const json_t *bytes = json_object_get(model, "bytes");
    EXPECT_EQ(bytes_at(bytes, "state"), want.state);
    EXPECT_EQ(bytes_at(bytes, "publish"), want.publish);
    EXPECT_EQ(bytes_at(bytes, "inbox"), want.inbox);
    EXPECT_EQ(bytes_at(bytes, "spare"), want.spare);
    EXPECT_EQ(want.all, want.state + want.publish + want.inbox + GPU_STAGING_BYTES);
    json_decref(root);
    free(reply.text);
}

/* A worker that has slots, until it is killed; in a process of its own, for it starts the driver.
 */
static void have_slots(const char *text, uint32_t slots, int ready)
{
    char address[300];
    shd_session *s;
    shd_model *m;
    float *grad;
    snprintf(address, sizeof address, "%s?gpu0", daemons.dir);
    const struct shd_options options = {
        .size = sizeof options, .address = address, .name = "test", .slots = slots
    };
    MUST_OK(shd_connect(&options, &s, &e));
    MUST_OK(shd_model_open(s, text, &m, &e));
    MUST_OK(shd_grad(m, 0, 0, &grad, &e)); /* from here on it has them */
    MUST(write(ready, "", 1) == 1);
    for (;;)
        pause();
}

static void open_and_look(const char *text, uint32_t slots)
{
    int ends[2];
    char byte;
    CHECK(pipe(ends) == 0);
    use_devices(one_gpu, 1);
    fixture_start(&daemons, 1, NULL);
    const pid_t pid = test_fork();
    if (pid == 0)
        have_slots(text, slots, ends[1]);
    close(ends[1]);
    const ssize_t got = read(ends[0], &byte, 1);
    close(ends[0]);
    if (got == 1)
        expect_foreseen(text, slots);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    EXPECT_EQ(got, 1);
    fixture_stop(&daemons);
}

TEST(memory_is_what_plans_foresee)
{
    open_and_look(adamw, 1);
    open_and_look(sgd, 3);
    open_and_look(
        "{\"name\":\"large\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"lion\"},"
        "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"w\",\"shape\":[3000001]}]}]}",
        2);
}

/* What a device that is opened takes before anything is asked of it. */
TEST(staging_is_what_plans_foresee)
{
    NEEDS_SHIM();
    const pid_t pid = test_fork();
    if (pid == 0) {
        struct kern *first, *second;
        MUST_OK(kern_cuda_new(0, &first, &e));
        const uint64_t before = first->ops->available(first);
        MUST_OK(kern_cuda_new(0, &second, &e));
        MUST(before - first->ops->available(first) == GPU_STAGING_BYTES);
        _exit(0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
}

TEST_MAIN()
