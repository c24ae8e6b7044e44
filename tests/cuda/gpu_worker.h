/* Workers of tests on GPUs, each in a process of its own: a process that has used CUDA must not
 * fork daemons. Their driver is the shim of tests/cuda, which has a device's memory in memfds,
 * unreadable for host code, and runs kernels by emulation. */
#ifndef SHD_GPU_WORKER_H
#define SHD_GPU_WORKER_H

#include <sys/mman.h>
#include <sys/wait.h>

#include "client/session/hub.h"
#include "tests/cuda/gpu_toy.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 2u

struct worker_report { /* shared with the worker's process */
    char hex[65];
    char text[256]; /* of an error */
    int status;
    bool moved, toy_failed, toy_wrong;
    int behind_max;  /* gpu_toy's */
    atomic_int stop; /* gpu_toy's */
    enum shd_path path;
    struct shd_stats stats;
};

struct owners {
    const char *devices[3]; /* NULL-terminated */
    bool gpu;               /* one of them is on one */
    bool maps_gpu;          /* one owner, on the first: a worker on cuda:0 reads it in place */
};

struct worker {
    const char *address; /* NULL: the fixture's */
    const char *device;  /* NULL: the host */
    struct pt_model model;
    struct shd_policy policy;
    uint32_t steps;
    uint64_t timeout_ms;    /* 0: TEST_HANG_MS */
    bool stops;             /* at each gradient of unit 1 */
    const uint32_t *micros; /* [micro_count], its share of each step; NULL: all of them */
    uint32_t micro_count;
    bool elastic;    /* what owners give it, instead */
    long compute_ms; /* each forward and backward takes as long */
    bool lazy;       /* gpu_toy's; with the stream named, unless: */
    bool nameless;
    long work_us;
    const struct owners *owners; /* who there is, and the digest to come to, for the test */
    char want[65];
    struct worker_report *report; /* shared */
};

static void *share(size_t bytes)
{
    void *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    return shared;
}

__attribute__((unused)) static struct shd_policy
policy_of(enum shd_strategy strategy, enum shd_path path, enum shd_dtype grad_dtype)
{
    return (struct shd_policy){ .size = sizeof(struct shd_policy),
                                .strategy = strategy,
                                .forward_prefetch = 1,
                                .path = path,
                                .grad_dtype = grad_dtype };
}

/* -- In the worker's process --------------------------------------------------------------------
 */

static int open_session(const struct worker *w, shd_session **ret, struct shd_err *e)
{
    const struct shd_options options = {
        .size = sizeof options,
        .address = w->address != NULL ? w->address : daemons.dir,
        .name = "test",
        .timeout_ms = w->timeout_ms > 0 ? w->timeout_ms : TEST_HANG_MS,
        .device = w->device,
    };
    return shd_connect(&options, ret, e);
}

static int train_step(const struct worker *w, shd_model *m, struct gpu_toy *toy, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(m));
    const struct shd_compute compute = { sizeof compute, toy,         gt_forward,
                                         gt_backward,    toy_metrics, NULL };
    if (w->micros == NULL && !w->elastic)
        return gt_step(m, toy, NULL, e);
    toy->pt.m = m;
    return w->elastic ? shd_run_step_elastic(m, &compute, &update, NULL, e)
                      : shd_run_step(m, w->micros, w->micro_count, &compute, &update, NULL, e);
}

static int train(const struct worker *w, shd_session *s, struct gpu_toy *toy, struct shd_err *e)
{
    shd_model *m = NULL;
    int r = shd_model_open(s, pt_spec(&w->model), &m, e);
    if (r == SHD_OK && w->policy.size > 0)
        r = shd_set_policy(m, &w->policy, e);
    if (r == SHD_OK && w->lazy && !w->nameless)
        r = shd_set_stream(m, toy->stream, e);
    while (r == SHD_OK && shd_step(m) < w->steps)
        r = train_step(w, m, toy, e);
    if (r == SHD_OK)
        r = shd_digest(m, w->report->hex, NULL, e);
    if (m != NULL)
        w->report->path = shd_path(m);
    return r;
}

/* Connect, train, close. */
static void work(const struct worker *w)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    struct gpu_toy toy = { .pt = { .overflow_step = UINT64_MAX, .compute_ms = w->compute_ms },
                           .stop = w->stops ? &w->report->stop : NULL,
                           .lazy = w->lazy,
                           .work_us = w->work_us };
    int r = open_session(w, &s, &e);
    if (r == SHD_OK) {
        if (gt_open(&toy, w->device != NULL && strcmp(w->device, "host") != 0))
            r = train(w, s, &toy, &e);
        w->report->stats.size = sizeof w->report->stats;
        shd_stats(s, &w->report->stats, NULL);
        if (w->nameless)
            toy.cuda->cuStreamSynchronize(toy.stream);
        shd_close(s);
        gt_close(&toy);
    }
    w->report->behind_max = toy.behind_max;
    w->report->toy_wrong = atomic_load(&toy.wrong);
    w->report->moved = toy.moved;
    w->report->toy_failed = toy.failed;
    w->report->status = r;
    snprintf(w->report->text, sizeof w->report->text, "%s", r != SHD_OK ? e.text : "");
}

/* Nothing of the driver's is left, whatever happened. */
static void expect_nothing_left(const char *when)
{
    const struct cuda *cuda;
    if (cuda_load(&cuda, NULL) == SHD_OK && shim_live(NULL) != 0)
        FAIL("%s: left: %d contexts, %d allocations, %d maps, %d pins, %d streams, %d events", when,
             (int)shim_live("context"), (int)shim_live("allocation"), (int)shim_live("map"),
             (int)shim_live("pin"), (int)shim_live("stream"), (int)shim_live("event"));
}

/* In a process of its own: what is expected there and is not so ends it with 1. */
static pid_t in_child(void (*run)(struct worker *w), struct worker *w)
{
    if (w->report == NULL)
        w->report = share(sizeof *w->report);
    memset(w->report, 0, sizeof *w->report);
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    fixture_owner = -1; /* the daemons are the parent's */
    alarm((unsigned)(2 * TEST_HANG_MS / 1000));
    if (setjmp(test_escape) != 0)
        _exit(1);
    run(w);
    exit(0);
}

static void work_and_look(struct worker *w)
{
    work(w);
    expect_nothing_left("after all");
}

static pid_t start_worker(struct worker *w)
{
    return in_child(work_and_look, w);
}

static void await_worker(pid_t pid)
{
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        FAIL("worker: status %#x", (unsigned)status);
}

__attribute__((unused)) static void run_worker(struct worker *w)
{
    await_worker(start_worker(w));
}

/* -- Daemons ------------------------------------------------------------------------------------
 */

static const struct owners mixes[] = {
    { { "cpu0" }, false, false },        { { "cpu0", "cpu1" }, false, false },
    { { "gpu0" }, true, true },          { { "gpu0", "cpu0" }, true, false },
    { { "gpu0", "gpu1" }, true, false }, /* last: see mix_count() */
};

/* All but those with more GPUs than there are. */
__attribute__((unused)) static size_t mix_count(void)
{
    return ARRAY_SIZE(mixes) - (shim_gpu_count() < 2 ? 1 : 0);
}

static int use_owners(const struct owners *o)
{
    int count = 0;
    for (int i = 0; i < FIXTURE_DAEMONS_MAX; i++)
        daemons.devices[i] = NULL;
    while (o->devices[count] != NULL) {
        daemons.devices[count] = o->devices[count];
        count++;
    }
    return count;
}

__attribute__((unused)) static bool can_map(const struct owners *o, bool worker_on_gpu)
{
    return worker_on_gpu ? o->maps_gpu : !o->gpu;
}

/* Of tests by NCCL: on three GPUs. */
__attribute__((unused)) static int nccl_main(int argc, char **argv)
{
    char dir[] = "/tmp/test-nccl-XXXXXX", command[64];
    CHECK(mkdtemp(dir) != NULL);
    setenv("TMPDIR", dir, 1); /* for what ranks that were killed leave */
    setenv("SHIM_CUDA_DEVICES", "3", 1);
    const int r = test_run_all(argc, argv);
    snprintf(command, sizeof command, "rm -rf %s", dir);
    CHECK(system(command) == 0);
    return r;
}

#endif
