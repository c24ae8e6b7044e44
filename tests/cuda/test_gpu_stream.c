/* Workers that name their stream (shd_set_stream()) and wait for nothing: returns are given when
 * their work is done, memory is used again when nothing uses it, and what becomes of a step comes
 * to the bits of a worker that waits. The shim's streams are threads, and the toy's work takes its
 * time on them. Nothing here ran on hardware (gpu_worker.h). */
#include <pthread.h>

#include "tests/cuda/gpu_worker.h"

#define WORK_US 300 /* each piece of the toy's work */

static void reference(struct worker *w)
{
    struct pt_run like = { .policy = { .grad_dtype = w->policy.grad_dtype },
                           .steps = w->steps,
                           .t = { .overflow_step = UINT64_MAX } };
    pt_reference(pt_spec(&w->model), &like, w->want);
}

/* -- Whole steps --------------------------------------------------------------------------------
 */

static void expect_same(const struct worker *w)
{
    EXPECT_STR(w->report->text, "");
    EXPECT(!w->report->toy_wrong && !w->report->toy_failed);
    EXPECT_STR(w->report->hex, w->want);
    EXPECT(w->report->behind_max > 0); /* nobody waited for the stream */
}

static void on_each_path(struct worker *w, enum shd_strategy strategy)
{
    const enum shd_dtype grad_dtype = w->policy.grad_dtype;
    char name[32];
    for (int path = w->owners->maps_gpu ? SHD_PATH_AUTO : SHD_PATH_COPY; path <= SHD_PATH_COPY;
         path += 2) {
        snprintf(name, sizeof name, "path-%d", path);
        w->model.name = name;
        w->policy = policy_of(strategy, (enum shd_path)path, grad_dtype);
        run_worker(w);
        expect_same(w);
        EXPECT_EQ(w->report->path,
                  path == SHD_PATH_AUTO && w->owners->maps_gpu ? SHD_PATH_MAP : SHD_PATH_COPY);
    }
}

static void on_mixes(struct worker *w, enum shd_strategy strategy, size_t first, size_t end)
{
    w->device = "cuda:0";
    w->steps = STEPS;
    w->lazy = true;
    w->work_us = WORK_US;
    w->model.grad_dtype = w->policy.grad_dtype;
    reference(w);
    for (size_t i = first; i < end; i++) {
        w->owners = &mixes[i];
        fixture_start(&daemons, use_owners(w->owners), NULL);
        on_each_path(w, strategy);
        fixture_stop(&daemons);
    }
}

TEST(in_the_order_of_a_stream_the_bits_are_the_same)
{
    NEEDS_SHIM();
    struct worker w = { .model = { .publish = "f32", .mean = true } };
    on_mixes(&w, SHD_ZERO3, 0, mix_count());
}

TEST(the_same_with_half_precision_and_local_sums)
{
    NEEDS_SHIM();
    struct worker w = { .model = { .publish = "bf16", .accumulate = 2, .frozen = true },
                        .policy = { .grad_dtype = SHD_BF16 } };
    on_mixes(&w, SHD_ZERO1, 2, 4);
}

TEST(the_same_where_owners_give_the_work_and_where_there_are_none)
{
    NEEDS_SHIM();
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "elastic", .publish = "bf16" },
                        .steps = STEPS,
                        .elastic = true,
                        .lazy = true,
                        .work_us = WORK_US };
    reference(&w);
    fixture_start(&daemons, use_owners(&mixes[3]), NULL);
    run_worker(&w);
    fixture_stop(&daemons);
    expect_same(&w);
    w.address = "local:";
    run_worker(&w);
    expect_same(&w);
}

/* The test of the tests above: they would notice. Its work may also reach memory that is gone. */
TEST(without_the_stream_named_the_bits_are_others)
{
    NEEDS_SHIM();
    struct worker w = { .device = "cuda:0",
                        .model = { .name = "nameless" },
                        .steps = STEPS,
                        .lazy = true,
                        .nameless = true,
                        .work_us = 20 * WORK_US };
    int status = 0;
    reference(&w);
    for (size_t i = 2; i < 4; i++) {
        fixture_start(&daemons, use_owners(&mixes[i]), NULL);
        const pid_t pid = start_worker(&w);
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        fixture_stop(&daemons);
        EXPECT(WIFSIGNALED(status) || strcmp(w.report->hex, w.want) != 0);
    }
}

/* -- Single calls -------------------------------------------------------------------------------
 */

struct single {
    shd_session *s;
    shd_model *m;
    struct gpu_toy toy;
};

static int idle_says;

static int idle(void *ctx)
{
    (void)ctx;
    return idle_says;
}

/* With slots for all that a step returns, where nothing has to be awaited for one. */
static void single_open(struct single *x, const struct worker *w)
{
    struct shd_err e = { 0 };
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .slots = 32,
                                         .device = "cuda:0",
                                         .idle = idle };
    *x = (struct single){
        .toy = { .pt = { .overflow_step = UINT64_MAX }, .lazy = true, .work_us = w->work_us }
    };
    EXPECT(gt_open(&x->toy, true));
    EXPECT_OK(shd_connect(&options, &x->s, &e), &e);
    EXPECT_OK(shd_model_open(x->s, pt_spec(&w->model), &x->m, &e), &e);
    EXPECT_OK(shd_set_stream(x->m, x->toy.stream, &e), &e);
    x->toy.pt.m = x->m;
}

static void single_close(struct single *x)
{
    shd_close(x->s);
    EXPECT(!atomic_load(&x->toy.wrong));
    gt_close(&x->toy);
    expect_nothing_left("after closing");
}

static int single_forward(struct single *x, uint32_t micro, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < PT_UNITS; u++) {
        const void *params = NULL;
        r = shd_acquire(x->m, u, &params, e);
        if (r == SHD_OK)
            gt_queue((struct gt_work){ .t = &x->toy, .micro = micro, .unit = u, .params = params });
        if (r == SHD_OK)
            shd_release(x->m, u);
    }
    return r;
}

static int single_backward(struct single *x, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const void *params = NULL;
    float *grad = NULL;
    int r = shd_acquire(x->m, unit, &params, e);
    if (r == SHD_OK)
        r = shd_grad(x->m, micro, unit, &grad, e);
    if (r == SHD_OK && gt_backward(&x->toy, micro, unit, params, grad) != 0)
        r = err_set(e, SHD_EINTERNAL, "the toy failed");
    if (r == SHD_OK && unit > 0)
        shd_release(x->m, unit);
    return r == SHD_OK ? shd_return(x->m, micro, unit, e) : r;
}

/* The last unit's gradient waits at a gate, where it is to. */
static int single_micro_gated(struct single *x, uint32_t micro, bool gate, struct shd_err *e)
{
    double metrics[SHD_METRICS_MAX];
    int r = single_forward(x, micro, e);
    if (r == SHD_OK)
        r = shd_report(x->m, micro, metrics, toy_metrics(NULL, micro, metrics), e);
    if (r == SHD_OK)
        r = shd_acquire(x->m, 0, NULL, e); /* the head uses it */
    for (uint32_t u = PT_UNITS; r == SHD_OK && u-- > 0;) {
        if (gate && u == 0)
            atomic_store(&x->toy.gate, 1);
        r = single_backward(x, micro, u, e);
    }
    shd_release(x->m, 0);
    shd_release(x->m, 0);
    return r;
}

static int single_micro(struct single *x, uint32_t micro, struct shd_err *e)
{
    return single_micro_gated(x, micro, /* gate= */ false, e);
}

static int single_commit(struct single *x, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(x->m));
    struct shd_result result = { .size = sizeof result };
    const int r = shd_commit(x->m, &update, &result, e);
    if (r == SHD_OK)
        EXPECT(!result.over && !result.skipped);
    return r;
}

static void single_micros(struct single *x)
{
    struct shd_err e = { 0 };
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        EXPECT_OK(single_micro(x, micro, &e), &e);
}

static void single_digest(const struct single *x, const struct worker *w)
{
    struct shd_err e = { 0 };
    char hex[65];
    EXPECT_OK(shd_digest(x->m, hex, NULL, &e), &e);
    EXPECT_STR(hex, w->want);
}

/* A return comes back at once, and the commit waits for it: a gate holds the stream. */
static void behind_a_gate(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    single_open(&x, w);
    atomic_store(&x.toy.gate, 1);
    EXPECT_OK(single_micro(&x, 0, &e), &e); /* all of it comes back, and nothing was done */
    EXPECT_EQ(atomic_load(&x.toy.done), 0);
    EXPECT_STATUS(shd_return(x.m, 0, 1, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "returned already");
    EXPECT_STATUS(shd_report(x.m, 0, (double[]){ 1 }, 1, &e), SHD_OK); /* the same once more */
    idle_says = 1;
    EXPECT_STATUS(single_commit(&x, &e), SHD_ECANCELED);
    idle_says = 0;
    EXPECT_EQ(atomic_load(&x.toy.done), 0);
    atomic_store(&x.toy.gate, 0);
    for (uint32_t micro = 1; micro < TOY_MICROS; micro++)
        EXPECT_OK(single_micro(&x, micro, &e), &e);
    EXPECT_OK(single_commit(&x, &e), &e);
    EXPECT_EQ(atomic_load(&x.toy.done), atomic_load(&x.toy.queued));
    single_digest(&x, w);
    single_close(&x);
}

static void *open_gate(void *arg)
{
    struct gpu_toy *t = arg;
    sleep_ms(20);
    atomic_store(&t->gate, 0);
    return NULL;
}

/* What waits in line has begun the step: the other worker may wait for it in its commit. */
static void meeting(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    pthread_t thread;
    single_open(&x, w);
    x.s->hub->patient = false;
    x.s->hub->timeout_ns = x.s->timeout_ns = test_paced(3000) * NS_PER_MS;
    atomic_store(&x.toy.gate, 1);
    EXPECT_OK(single_micro(&x, 0, &e), &e);
    EXPECT_EQ(pthread_create(&thread, NULL, open_gate, &x.toy), 0);
    EXPECT_OK(shd_meet(x.m, 2, &e), &e);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    for (uint32_t micro = 1; micro < TOY_MICROS; micro++)
        EXPECT_OK(single_micro(&x, micro, &e), &e);
    EXPECT_OK(single_commit(&x, &e), &e);
    single_digest(&x, w);
    single_close(&x);
}

/* The other worker, which has nothing to compute of the step. */
static pid_t fork_committer(const struct worker *w)
{
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0)
        return pid;
    const struct shd_update update = toy_update(0);
    struct shd_err e = { 0 };
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, pt_spec(&w->model), &m, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    shd_close(s);
    _exit(0);
}

/* A step that another worker ends when it is given what waits in line here is saved. */
static void saving(struct worker *w)
{
    const struct shd_checkpoint_options later = { .size = sizeof later,
                                                  .step = 1,
                                                  .timeout_ms = TEST_HANG_MS / 4 };
    struct shd_checkpointed saved = { .size = sizeof saved };
    struct shd_err e = { 0 };
    struct single x;
    pthread_t thread;
    int status;
    make_ckpts();
    const pid_t pid = fork_committer(w);
    single_open(&x, w);
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        EXPECT_OK(single_micro_gated(&x, micro, micro == TOY_MICROS - 1, &e), &e);
    EXPECT_EQ(pthread_create(&thread, NULL, open_gate, &x.toy), 0);
    EXPECT_OK(shd_checkpoint(x.m, ckpts, &later, &saved, &e), &e);
    EXPECT_EQ(saved.step, 1);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    single_digest(&x, w);
    single_close(&x);
    remove_ckpts();
}

/* Work that does not end is named: by the commit, or by who needs the memory that it uses. */
static void too_late(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    single_open(&x, w);
    x.s->hub->patient = false; /* from here on: the machine may be busy */
    x.s->hub->timeout_ns = x.s->timeout_ns = test_paced(500) * NS_PER_MS;
    atomic_store(&x.toy.gate, 1);
    const int r = single_micro(&x, 0, &e);
    if (shd_path(x.m) == SHD_PATH_MAP) {
        EXPECT_OK(r, &e);
        EXPECT_STATUS(single_commit(&x, &e), SHD_ETIMEDOUT);
        EXPECT_HAS(e.text, "has not come to the gradient of unit 6 'head', micro-batch 0");
    } else {
        EXPECT_STATUS(r, SHD_ETIMEDOUT);
        EXPECT_HAS(e.text, "own work on cuda:0 still uses the memory");
    }
    atomic_store(&x.toy.gate, 0);
    single_close(&x);
}

/* Some of a step is returned, some only written, all of it on the stream still: wrong numbers. */
static void reset(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    const void *params;
    float *grad;
    single_open(&x, w);
    EXPECT_OK(single_forward(&x, 0, &e), &e);
    for (uint32_t u = PT_UNITS - 1; u > 2; u--) {
        EXPECT_OK(shd_acquire(x.m, u, &params, &e), &e);
        EXPECT_OK(shd_grad(x.m, 0, u, &grad, &e), &e);
        gt_queue((struct gt_work){ &x.toy, true, 0, u, 777, false, params, grad });
        shd_release(x.m, u);
        if (u > 3)
            EXPECT_OK(shd_return(x.m, 0, u, &e), &e);
    }
    EXPECT_OK(shd_reset_step(x.m, &e), &e);
    EXPECT_EQ(atomic_load(&x.toy.done), atomic_load(&x.toy.queued));
    single_micros(&x);
    EXPECT_OK(single_commit(&x, &e), &e);
    single_digest(&x, w);
    single_close(&x);
}

static void finish_another(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    single_open(&x, w);
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        if (!shd_is_in(x.m, micro))
            EXPECT_OK(single_micro(&x, micro, &e), &e);
    EXPECT_OK(single_commit(&x, &e), &e);
    single_digest(&x, w);
    single_close(&x);
}

/* All is returned, some of it waits, and the worker closes: as with one that died. */
static void leave(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    pthread_t thread;
    single_open(&x, w);
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        EXPECT_OK(single_micro_gated(&x, micro, micro == TOY_MICROS - 1, &e), &e);
    EXPECT(atomic_load(&x.toy.done) < atomic_load(&x.toy.queued));
    EXPECT_EQ(pthread_create(&thread, NULL, open_gate, &x.toy), 0);
    single_close(&x);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    finish_another(w);
}

static void die(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    single_open(&x, w);
    EXPECT_OK(single_micro(&x, 0, &e), &e);
    raise(SIGKILL);
}

/* What is no stream is refused, and any other may follow. */
static void refused(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    CUcontext other;
    CUstream theirs;
    shd_session *s;
    shd_model *m;
    EXPECT_OK(try_connect("local:", 0, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, pt_spec(&w->model), &m, &e), &e);
    EXPECT_STATUS(shd_set_stream(m, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "shd_options.device");
    shd_close(s);
    single_open(&x, w);
    const struct cuda *c = x.toy.cuda;
    EXPECT_EQ(c->cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
    EXPECT_EQ(c->cuCtxSetCurrent(other), CUDA_SUCCESS);
    EXPECT_EQ(c->cuStreamCreate(&theirs, 0), CUDA_SUCCESS);
    EXPECT_STATUS(shd_set_stream(x.m, theirs, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "cannot be one of cuda:0");
    EXPECT_EQ(c->cuStreamDestroy(theirs), CUDA_SUCCESS);
    EXPECT_EQ(c->cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
    single_micros(&x);                            /* in the order of the one there was */
    EXPECT_OK(shd_set_stream(x.m, NULL, &e), &e); /* the default one: others are waited for */
    EXPECT_OK(single_commit(&x, &e), &e);
    single_digest(&x, w);
    single_close(&x);
}

/* A mark that cannot be set is the return's error, which can be repeated; work that fails is the
 * model's end. */
static void failing(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    const void *params;
    float *grad;
    single_open(&x, w);
    EXPECT_OK(shd_acquire(x.m, 1, &params, &e), &e);
    EXPECT_OK(shd_grad(x.m, 0, 1, &grad, &e), &e);
    shim_fail("cuEventCreate@1:2");
    EXPECT_STATUS(shd_return(x.m, 0, 1, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "make an event on CUDA device 0");
    EXPECT_OK(shd_return(x.m, 0, 1, &e), &e);
    shim_fail("cuEventQuery@1+:719");
    EXPECT_STATUS(single_commit(&x, &e), SHD_EIO);
    EXPECT_HAS(e.text, "the gradient of unit 1 'h0', micro-batch 0 cannot be taken");
    EXPECT_STATUS(shd_grad(x.m, 0, 2, &grad, &e), SHD_EIO);
    shim_fail(NULL);
    shd_close(x.s);
    shim_forget();
    gt_close(&x.toy);
}

static const struct {
    const char *name; /* the model's */
    void (*run)(struct worker *w);
    bool dies; /* and another one finishes */
    bool maps; /* only where nothing is copied to memory that is in use */
    long work_us;
} singles[] = {
    { .name = "gate", behind_a_gate, .maps = true },
    { .name = "meeting", meeting, .maps = true },
    { .name = "saving", saving, .work_us = WORK_US },
    { .name = "late", too_late },
    { .name = "reset", reset, .work_us = WORK_US },
    { .name = "leave", leave, .work_us = WORK_US },
    { .name = "die", die, .dies = true, .work_us = 2 * WORK_US },
    { .name = "refused", refused, .work_us = WORK_US },
    { .name = "failing", failing, .work_us = WORK_US },
};

static void run_single(struct worker *w, size_t i)
{
    int status = 0;
    w->model.name = singles[i].name;
    w->work_us = singles[i].work_us;
    if (!singles[i].dies) {
        await_worker(in_child(singles[i].run, w));
        return;
    }
    const pid_t pid = in_child(singles[i].run, w);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    await_worker(in_child(finish_another, w));
}

/* With a GPU's owner alone (map), and with one on the host beside it (copy). */
TEST(whatever_becomes_of_a_step_the_bits_are_the_same)
{
    NEEDS_SHIM();
    struct worker w = { .model = { .name = "reference" }, .steps = 1 };
    reference(&w);
    for (size_t mix = 2; mix < 4; mix++) {
        fixture_start(&daemons, use_owners(&mixes[mix]), NULL);
        for (size_t i = 0; i < ARRAY_SIZE(singles); i++)
            if (mixes[mix].maps_gpu || !singles[i].maps)
                run_single(&w, i);
        fixture_stop(&daemons);
    }
}

/* -- A daemon's successor -----------------------------------------------------------------------
 */

struct looker { /* opens the gate, and has looked before */
    struct single *x;
    uint64_t unmapped;
};

static void *look_and_open(void *arg)
{
    struct looker *l = arg;
    sleep_ms((long)test_paced(200)); /* many times what it takes to attach anew */
    l->unmapped = shim_calls("cuMemUnmap");
    atomic_store(&l->x->toy.gate, 0);
    return NULL;
}

/* Its daemon is another one when it commits, and the stream has read nothing yet. */
static void succeeded(struct worker *w)
{
    struct shd_err e = { 0 };
    struct single x;
    struct looker looker = { .x = &x };
    pthread_t thread;
    single_open(&x, w);
    for (uint32_t micro = 0; micro < TOY_MICROS - 1; micro++)
        EXPECT_OK(single_micro(&x, micro, &e), &e);
    atomic_store(&x.toy.gate, 1);
    EXPECT_OK(single_micro(&x, TOY_MICROS - 1, &e), &e);
    atomic_store(&w->report->stop, 1);
    while (atomic_load(&w->report->stop) != 0)
        sleep_ms(1);
    shim_fail(NULL); /* count from here */
    EXPECT_EQ(pthread_create(&thread, NULL, look_and_open, &looker), 0);
    EXPECT_OK(single_commit(&x, &e), &e);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    EXPECT_EQ(looker.unmapped, 0);
    EXPECT(shim_calls("cuMemUnmap") > 0);
    single_digest(&x, w);
    single_close(&x);
}

TEST(a_successor_is_mapped_behind_the_streams_work)
{
    NEEDS_SHIM();
    struct worker w = { .model = { .name = "succeeded" }, .steps = 1 };
    reference(&w);
    use_owners(&mixes[2]);
    fixture_start_kept(&daemons, 1, "");
    const pid_t pid = in_child(succeeded, &w);
    while (atomic_load(&w.report->stop) == 0 && waitpid(pid, NULL, WNOHANG) == 0)
        sleep_ms(1);
    fixture_restart(&daemons, 0);
    fixture_wait_up(&daemons, 0);
    atomic_store(&w.report->stop, 0);
    await_worker(pid);
    fixture_stop(&daemons);
}

int main(int argc, char **argv)
{
    setenv("SHIM_CUDA_DEVICES", "2", 1);
    return test_run_all(argc, argv);
}
