/* Every call of the driver fails once, at every place: each is an error that says what failed, no
 * operation is reported twice or never, and nothing is left behind. */
#include <signal.h>
#include <sys/mman.h>

#include "kernels/cuda/device.h"
#include "tests/cuda/cuda_util.h"

static const char *const functions[] = {
#define NAME(member, symbol, arguments) #member,
    CUDA_FUNCTIONS(NAME)
#undef NAME
};

/* Each result is one that fails the call alone, or all that follow. */
static const struct {
    const char *code;
    bool sticky;
} results[] = { { "2", false }, { "700", true } };

#define ELEMS (10 * BLOCK)
#define OPS   16

struct counted {
    struct kern_done done;
    _Atomic uint32_t fired;
    int status;
};

static void counted_done(struct kern_done *done, int status)
{
    struct counted *c = (struct counted *)(void *)done; /* first member */
    c->status = status;
    c->fired++;
}

/* One pass through all that a device does. */
struct pass {
    struct kern *k;
    struct segment state, publish, again, other;
    void *array;
    bool pinned;
    struct counted ops[OPS];
    uint32_t queued; /* of ops */
    uint32_t errors;
    struct shd_err first; /* of the errors that have words */
};

static float host[ELEMS];
static uint16_t half[ELEMS];
static uint8_t leaves[64][32];

/* Note a result of the pass; true when it was good. */
static bool good(struct pass *p, int r, const struct shd_err *e)
{
    if (r == SHD_OK)
        return true;
    if (e->code != r || e->text[0] == '\0')
        FAIL("%s without a word", status_name(r));
    if (p->errors++ == 0)
        p->first = *e;
    return false;
}

static void make_memory(struct pass *p)
{
    struct shd_err e = { 0 };
    struct kern *k = p->k;
    const uint64_t bytes = 4 * ELEMS * sizeof(float) + k->ops->trail_bytes(k, 2);
    if (!good(p, k->ops->segment_new(k, "s", SEGMENT_STATE, bytes, &p->state, &e), &e) ||
        !good(p, k->ops->segment_new(k, "p", SEGMENT_PUBLISH, ELEMS * 4, &p->publish, &e), &e) ||
        !good(p, k->ops->segment_new(k, "o", SEGMENT_PUBLISH, ELEMS * 4, &p->other, &e), &e))
        return;
    int fd = dup(p->publish.fd);
    if (!good(p, k->ops->segment_map(k, fd, SEGMENT_PUBLISH, p->publish.bytes, NULL, &p->again, &e),
              &e)) {
        close(fd);
        return;
    }
    fd = dup(p->other.fd);
    struct segment now;
    if (good(p, k->ops->segment_map(k, fd, SEGMENT_PUBLISH, p->other.bytes, &p->again, &now, &e),
             &e))
        p->again = now;
    else
        close(fd);
    p->array = k->ops->alloc(k, ELEMS * sizeof(float));
    p->errors += p->array == NULL;
    p->pinned = good(p, k->ops->pin(k, host, sizeof host, false, &e), &e);
}

#define QUEUE(op, ...)                                                                   \
    do {                                                                                 \
        struct shd_err queue_err = { 0 };                                                \
        CHECK(p->queued < OPS);                                                          \
        p->ops[p->queued].done.fn = counted_done;                                        \
        if (good(p, kern_##op(p->k, (__VA_ARGS__), &p->ops[p->queued].done, &queue_err), \
                 &queue_err))                                                            \
            p->queued++;                                                                 \
    } while (0)

static const struct kern_run runs[] = { { 0, ELEMS, 0 } };
static const struct kern_hyper hypers[] = {
    { 1e-3f, 0, 0.9f, 0.99f, 1e-8f, 0.1f, 0.01f, { .scale = 0 }, { .lr = 0 }, { .rho = 0 } }
};

static void queue_all(struct pass *p, struct kern_sum *sum)
{
    float *acc = p->state.base, *param = acc + ELEMS, *m = param + ELEMS, *v = m + ELEMS;
    const struct kern_trail trail = {
        .area = (void *)(v + ELEMS), .base = acc, .first_chunk = 0, .op = 1
    };
    struct kern_update update = { .param = param,
                                  .m = m,
                                  .v = v,
                                  .grad = acc,
                                  .grad_scale = 1,
                                  .publish = p->publish.base,
                                  .publish_dtype = SHD_BF16,
                                  .elems = ELEMS,
                                  .runs = runs,
                                  .run_count = 1,
                                  .hypers = hypers,
                                  .hyper_count = 1,
                                  .trail = trail };
    QUEUE(fill, &(struct kern_fill){ param, ELEMS, 0, 7, KERN_FILL_NORMAL, 0, 1 });
    QUEUE(fill, &(struct kern_fill){ p->array, ELEMS, 0, 8, KERN_FILL_NORMAL, 0, 1 });
    QUEUE(accumulate,
          &(struct kern_accumulate){ acc, p->array, SHD_F32, CODEC_NONE, ELEMS, true, sum, trail });
    QUEUE(sumsq, &(struct kern_sumsq){ acc, ELEMS, sum });
    for (int kind = 1; kind <= SPEC_OPTIMIZERS; kind++) {
        update.kind = (enum spec_optimizer)kind;
        QUEUE(update, &update);
    }
    QUEUE(cast, &(struct kern_cast){ p->publish.base, SHD_F16, param, ELEMS });
    QUEUE(cast, &(struct kern_cast){ half, SHD_F16, param, ELEMS });
    QUEUE(cast, &(struct kern_cast){ host, SHD_F32, param, ELEMS });
    QUEUE(hash,
          (&(struct kern_hash){ .x = param, .elems = ELEMS, .head_elems = 100, .out = leaves }));
    QUEUE(copy, &(struct kern_copy){ p->array, host, sizeof host });
    QUEUE(copy, &(struct kern_copy){ host, p->array, sizeof host });
}

/* Every op that was queued has been reported once; how many failed. */
static uint32_t ops_failed(const struct pass *p)
{
    uint32_t failed = 0;
    for (uint32_t i = 0; i < OPS; i++) {
        if (p->ops[i].fired != (i < p->queued ? 1 : 0))
            FAIL("op %" PRIu32 " of %" PRIu32 " was reported %" PRIu32 " times", i, p->queued,
                 p->ops[i].fired);
        failed += p->ops[i].status != SHD_OK;
    }
    return failed;
}

static void end(struct pass *p)
{
    struct kern *k = p->k;
    struct segment *segments[] = { &p->state, &p->publish, &p->again, &p->other };
    if (p->pinned)
        k->ops->unpin(k, host);
    k->ops->release(k, p->array, ELEMS * sizeof(float));
    for (size_t i = 0; i < ARRAY_SIZE(segments); i++)
        k->ops->segment_close(k, segments[i]);
    k->ops->free(k);
}

/* Returns errors and failed ops of a pass under this failure. */
static uint32_t run_pass(struct pass *p)
{
    *p = (struct pass){ .state = SEGMENT_CLOSED,
                        .publish = SEGMENT_CLOSED,
                        .again = SEGMENT_CLOSED,
                        .other = SEGMENT_CLOSED };
    struct shd_err e = { 0 };
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    if (!good(p, kern_cuda_new(0, &p->k, &e), &e))
        return p->errors;
    make_memory(p);
    if (p->errors == 0)
        queue_all(p, &sum);
    if (p->queued > 0) { /* the last one waits for all */
        struct kern_waiter w;
        kern_waiter_init(&w);
        if (good(p, kern_copy(p->k, &(struct kern_copy){ 0 }, &w.done, &e), &e))
            kern_wait(&w);
    }
    if (p->errors == 0 && p->state.base != NULL)
        good(p,
             p->k->ops->trail_repair(p->k, (void *)((float *)p->state.base + 4 * (size_t)ELEMS),
                                     p->state.base, p->state.bytes, NULL, 2, &e),
             &e);
    end(p);
    return p->errors + ops_failed(p);
}

/* Its result is not looked at. */
static bool may_fail(const char *name)
{
    static const char *const quiet[] = {
        "cuMemRelease",   "cuMemUnmap",          "cuMemAddressFree", "cuMemFree",
        "cuMemFreeHost",  "cuMemHostUnregister", "cuStreamDestroy",  "cuEventDestroy",
        "cuModuleUnload", "cuCtxSynchronize",    "cuCtxSetCurrent",  "cuDevicePrimaryCtxRelease",
    };
    for (size_t i = 0; i < ARRAY_SIZE(quiet); i++)
        if (strcmp(name, quiet[i]) == 0)
            return true;
    return false;
}

/* A thread that was joined may be seen a moment longer. */
static int tasks_now(int wanted)
{
    int tasks = entries_of("/proc/self/task");
    for (int i = 0; i < 60000 && tasks != wanted; i++) {
        usleep(1000);
        tasks = entries_of("/proc/self/task");
    }
    return tasks;
}

#ifdef __SANITIZE_THREAD__ /* ten times as slow; threads end alike after either result */
#define AFTER(n) (4 * (n) + 1)
#define RESULTS  1
#else
#define AFTER(n) ((n) + 1 + (n) / 8)
#define RESULTS  ARRAY_SIZE(results)
#endif

static void fail_each_call(const struct shim *shim, const char *name, size_t result)
{
    static struct pass p;
    /* All of the first ones, then fewer and fewer of those that are alike: a device asks for
     * events as often as it likes. */
    for (uint64_t n = 1;; n = AFTER(n)) {
        char spec[128];
        snprintf(spec, sizeof spec, "%s@%" PRIu64 ":%s", name, n, results[result].code);
        const int fds = entries_of("/proc/self/fd"), tasks = entries_of("/proc/self/task");
        shim->fail(spec);
        if (getenv("FAULTS_VERBOSE") != NULL)
            fprintf(stderr, "%s\n", spec);
        alarm((unsigned)(TEST_HANG_MS / 1000)); /* a hang is a failure */
        const uint32_t failed = run_pass(&p);
        alarm(0);
        const bool reached = shim->calls(name) >= n;
        shim->fail(NULL);
        shim->reset();
        if (shim->live(NULL) != 0 || entries_of("/proc/self/fd") != fds ||
            tasks_now(tasks) != tasks)
            FAIL("%s: %" PRIu64 " things of the driver's are left, %d descriptors (%d before), %d "
                 "threads (%d before)",
                 spec, shim->live(NULL), entries_of("/proc/self/fd"), fds,
                 entries_of("/proc/self/task"), tasks);
        if (!reached && failed != 0)
            FAIL("%s: not reached, yet %s", spec, p.first.text);
        if (!reached)
            return;
        if (failed == 0 && !may_fail(name))
            FAIL("%s: nobody noticed", spec);
        if (results[result].sticky && p.first.code != 0 && strstr(p.first.text, "700") == NULL)
            FAIL("%s: '%s' does not say so", spec, p.first.text);
    }
}

TEST(every_call_may_fail)
{
    const struct shim shim = shim_find();
    static struct pass whole; /* starts what stays, such as a sanitizer's own thread */
    EXPECT_EQ(run_pass(&whole), 0);
    shim.reset();
    for (size_t i = 0; i < ARRAY_SIZE(functions); i++)
        for (size_t r = 0; r < RESULTS; r++)
            fail_each_call(&shim, functions[i], r);
}

/* What fails while it runs shows later, and ends all that follows. */
TEST(every_piece_of_work_may_fail)
{
    const struct shim shim = shim_find();
    static const char *const kinds[] = { "kernel", "copy", "memset" };
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        fail_each_call(&shim, kinds[i], 1);
}

TEST(after_a_sticky_error_everything_fails_and_says_why)
{
    const struct shim shim = shim_find();
    static struct counted ops[20];
    struct kern *k = cuda_new();
    struct shd_err e = { 0 };
    uint64_t from = 1, to[20] = { 0 };
    shim.fail("copy@5:719");
    for (int i = 0; i < 20; i++) {
        ops[i].done.fn = counted_done;
        EXPECT_OK(kern_copy(k, &(struct kern_copy){ &to[i], &from, 8 }, &ops[i].done, &e), &e);
    }
    struct kern_waiter w;
    kern_waiter_init(&w);
    EXPECT_OK(kern_copy(k, &(struct kern_copy){ &to[0], &from, 8 }, &w.done, &e), &e);
    EXPECT_STATUS(kern_wait(&w), SHD_EIO);
    for (int i = 0; i < 20; i++) {
        EXPECT_EQ(ops[i].fired, 1);
        if (i >= 4)
            EXPECT_STATUS(ops[i].status, SHD_EIO);
    }
    EXPECT_STATUS(k->ops->health(k, &e), SHD_EIO);
    EXPECT_HAS(e.text, "CUDA_ERROR_LAUNCH_FAILED");
    EXPECT(k->ops->alloc(k, 100) == NULL);
    struct segment s;
    EXPECT_STATUS(k->ops->segment_new(k, "s", SEGMENT_STATE, 1, &s, &e), SHD_EIO);
    k->ops->free(k);
    shim.fail(NULL);
    shim.reset();
    EXPECT_EQ(shim.live(NULL), 0);
}

/* One that fails alone: done has room for a status only. */
TEST(an_operation_that_failed_says_of_what)
{
    const struct shim shim = shim_find();
    static const struct {
        const char *fail, *text;
    } cases[] = {
        { "cuLaunchKernel@1:1", "launch shd_fill on CUDA device 0 (Shim of a GPU): "
                                "CUDA_ERROR_INVALID_VALUE 1" },
        { "cuEventRecord@1:1", "record an event on CUDA device 0" },
    };
    struct kern *k = cuda_new();
    float *x = cuda_array(k, 64);
    struct shd_err e = { 0 };
    EXPECT(!k->ops->failed(k, &e));
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct kern_waiter w;
        kern_waiter_init(&w);
        shim.fail(cases[i].fail);
        const struct kern_fill zeros = { x, 16, 0, 0, KERN_FILL_CONST, 0, 0 };
        EXPECT_OK(kern_fill(k, &zeros, &w.done, &e), &e);
        EXPECT_STATUS(kern_wait(&w), SHD_EIO);
        EXPECT_STATUS(kern_explain(k, SHD_EIO, &e, "a fill"), SHD_EIO);
        EXPECT_HAS(e.text, "a fill failed: ");
        EXPECT_HAS(e.text, cases[i].text);
        EXPECT_STATUS(k->ops->health(k, &e), SHD_OK);
    }
    shim.fail(NULL);
    k->ops->release(k, x, 64);
    k->ops->free(k);
}

/* The first load of the driver, in a process of its own. */
static void expect_load(const char *variable, const char *value, int status, const char *text)
{
    int out[2];
    EXPECT(pipe(out) == 0);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        dup2(out[1], 1);
        setenv(variable, value, 1);
        execl("/proc/self/exe", "test", "--load", NULL);
        _exit(127);
    }
    close(out[1]);
    char got[512] = "";
    size_t bytes = 0;
    for (ssize_t n;
         bytes < sizeof got - 1 && (n = read(out[0], got + bytes, sizeof got - 1 - bytes)) > 0;)
        bytes += (size_t)n;
    close(out[0]);
    int how;
    EXPECT(waitpid(pid, &how, 0) == pid);
    EXPECT(WIFEXITED(how));
    if (WEXITSTATUS(how) != -status)
        FAIL("%s=%s: exit %d, '%s'", variable, value, WEXITSTATUS(how), got);
    EXPECT_HAS(got, text);
}

static int load_main(void)
{
    const struct cuda *c;
    struct shd_err e = { 0 };
    const int r = cuda_load(&c, &e);
    printf("%s\n", e.text);
    return -r;
}

TEST(a_driver_that_does_not_start_says_why)
{
    expect_load("CUDA_VISIBLE_DEVICES", "", SHD_ENOTSUP, "CUDA_VISIBLE_DEVICES");
    NEEDS_SHIM();
    expect_load("SHIM_CUDA_FAIL", "", SHD_OK, "");
    expect_load("SHIM_CUDA_FAIL", "cuInit@1:100", SHD_ENOTSUP, "CUDA_VISIBLE_DEVICES");
    expect_load("SHIM_CUDA_FAIL", "cuInit@1:803", SHD_ENOTSUP, "reload the module");
    expect_load("SHIM_CUDA_FAIL", "cuInit@1:802", SHD_ENOTSUP, "nvidia-fabricmanager");
    expect_load("SHIM_CUDA_FAIL", "cuInit@1:999", SHD_ENOTSUP, "nvidia-modprobe");
    expect_load("SHIM_CUDA_FAIL", "cuInit@1:2", SHD_ENOMEM, "out of memory");
    expect_load("SHIM_CUDA_FAIL", "cuDeviceGetCount@1:1", SHD_EIO, "count the GPUs");
    expect_load("SHIM_CUDA_DEVICES", "0", SHD_ENOTSUP, "CUDA_ERROR_NO_DEVICE");
    expect_load("CUDA_VISIBLE_DEVICES", "5", SHD_ENOTSUP, "CUDA_VISIBLE_DEVICES");
    expect_load("LD_LIBRARY_PATH", "/nonexistent", SHD_ENOTSUP, "no NVIDIA driver here");
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--load") == 0)
        return load_main();
    return test_run_all(argc, argv);
}
