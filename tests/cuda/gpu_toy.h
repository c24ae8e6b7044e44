/* The toy training of tests/lib/client_toy.h for a worker whose arrays are in a GPU's memory: it
 * computes on the host, between copies of its own, as a program would by its CUDA runtime. Of the
 * host's memory nothing is handed to the library, and nothing it hands out is read.
 *
 * Lazy (on the shim): forward and backward only queue their work on the toy's stream, which takes
 * its time, and come back. A backward computes with what the forward of its micro-batch has read:
 * memory that was let go of too early shows, too. */
#ifndef SHD_GPU_TOY_H
#define SHD_GPU_TOY_H

#include <stdatomic.h>

#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/gpu/cuda.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/lib/client_toy.h"

struct gpu_toy {
    struct pt pt;            /* first: pt_next() takes it */
    const struct cuda *cuda; /* NULL: the worker's arrays are the host's */
    CUcontext context;
    CUstream stream;
    void *params, *tied_params; /* owned: mirrors of the arrays at hand, of the largest unit */
    float *grad, *tied_grad;
    const void *seen[PT_UNITS]; /* where units were first; NULL: not yet */
    bool moved;                 /* one was somewhere else later */
    bool failed;                /* a call of this toy's own did */
    atomic_int *stop; /* shared: set when a gradient is written and not returned; goes on at 0 */
    bool lazy;
    long work_us;            /* each piece of work sleeps before */
    void *read[PT_UNITS];    /* owned: parameters as the last forward has read them */
    atomic_int queued, done; /* pieces of work */
    int behind_max;          /* by so many the stream was behind when a callback was called */
    atomic_bool wrong;       /* memory could not be reached, or had changed */
    atomic_int gate;         /* not 0: work waits here */
};

static bool gt_call(struct gpu_toy *t, CUresult result)
{
    t->failed = t->failed || result != CUDA_SUCCESS;
    return result == CUDA_SUCCESS;
}

/* The primary context, as the CUDA runtime takes it. False: a call failed. */
static bool gt_open(struct gpu_toy *t, bool on_gpu)
{
    struct shd_err e = { 0 };
    CUdevice device;
    if (!on_gpu)
        return true;
    EXPECT_OK(cuda_load(&t->cuda, &e), &e);
    return gt_call(t, t->cuda->cuDeviceGet(&device, 0)) &&
           gt_call(t, t->cuda->cuDevicePrimaryCtxRetain(&t->context, device)) &&
           gt_call(t, t->cuda->cuCtxSetCurrent(t->context)) &&
           gt_call(t, t->cuda->cuStreamCreate(&t->stream, CU_STREAM_NON_BLOCKING));
}

static void gt_close(struct gpu_toy *t)
{
    CUdevice device;
    free(t->params);
    free(t->tied_params);
    free(t->grad);
    free(t->tied_grad);
    t->params = t->tied_params = t->grad = t->tied_grad = NULL;
    if (t->lazy && t->stream != NULL)
        t->cuda->cuStreamSynchronize(t->stream);
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        free(t->read[u]);
        t->read[u] = NULL;
    }
    if (t->cuda == NULL || t->context == NULL)
        return;
    t->cuda->cuCtxSetCurrent(t->context);
    if (t->stream != NULL)
        EXPECT_EQ(t->cuda->cuStreamDestroy(t->stream), CUDA_SUCCESS);
    EXPECT_EQ(t->cuda->cuDeviceGet(&device, 0), CUDA_SUCCESS);
    EXPECT_EQ(t->cuda->cuDevicePrimaryCtxRelease(device), CUDA_SUCCESS);
}

static void gt_copy(struct gpu_toy *t, void *to, const void *from, uint64_t bytes)
{
    if (gt_call(t, t->cuda->cuCtxSetCurrent(t->context)) &&
        gt_call(t, t->cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from,
                                          bytes, t->stream)))
        gt_call(t, t->cuda->cuStreamSynchronize(t->stream));
}

static uint64_t gt_elems_max(const struct gpu_toy *t)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < t->pt.m->spec->unit_count; u++)
        if (t->pt.m->spec->units[u].elems > elems)
            elems = t->pt.m->spec->units[u].elems;
    return elems;
}

/* The array as the host can read it. */
static void *gt_read(struct gpu_toy *t, void **mirror, const void *array, uint64_t bytes)
{
    if (t->cuda == NULL)
        return (void *)(uintptr_t)array;
    if (*mirror == NULL)
        *mirror = malloc(gt_elems_max(t) * sizeof(float));
    CHECK(*mirror != NULL);
    gt_copy(t, *mirror, array, bytes);
    return *mirror;
}

/* -- Lazily ------------------------------------------------------------------------------------ */

struct gt_work {
    struct gpu_toy *t;
    bool backward;
    uint32_t micro, unit, salt;
    bool add;
    const void *params;
    float *grad;
};

/* NULL: a real driver */
static void *shim_symbol(const char *name);

static bool gt_reach(struct gpu_toy *t, void *to, const void *from, uint64_t bytes)
{
    static shim_cuda_copy_fn *copy;
    if (copy == NULL)
        *(void **)&copy = shim_symbol("shim_cuda_copy");
    const bool good = copy((uintptr_t)to, (uintptr_t)from, bytes) == CUDA_SUCCESS;
    if (!good)
        atomic_store(&t->wrong, true);
    return good;
}

/* On the stream. */
static void gt_backward_work(const struct gt_work *w, const void *params)
{
    struct gpu_toy *t = w->t;
    const uint64_t bytes = t->pt.m->spec->units[w->unit].elems * sizeof(float);
    float *grad = malloc(bytes);
    CHECK(grad != NULL);
    if (gt_reach(t, grad, w->grad, bytes)) {
        toy_write(t->pt.m, w->micro, w->unit, w->salt, params, w->add, grad);
        gt_reach(t, w->grad, grad, bytes);
    }
    free(grad);
}

static void gt_do_work(void *ctx)
{
    struct gt_work *w = ctx;
    struct gpu_toy *t = w->t;
    const struct spec *spec = t->pt.m->spec;
    const uint64_t bytes = spec->units[w->unit].elems * dtype_bytes(spec->publish);
    void *params = malloc(bytes);
    CHECK(params != NULL);
    nanosleep(&(struct timespec){ .tv_nsec = t->work_us * 1000 }, NULL);
    while (atomic_load(&t->gate) != 0)
        nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
    if (gt_reach(t, params, w->params, bytes)) {
        if (!w->backward)
            memcpy(t->read[w->unit], params, bytes);
        else if (memcmp(t->read[w->unit], params, bytes) != 0)
            atomic_store(&t->wrong, true);
        if (w->backward)
            gt_backward_work(w, t->read[w->unit]);
    }
    free(params);
    free(w);
    atomic_fetch_add(&t->done, 1);
}

static void gt_queue(struct gt_work work)
{
    static shim_cuda_call_fn *call;
    struct gpu_toy *t = work.t;
    struct gt_work *w = malloc(sizeof *w);
    if (call == NULL)
        *(void **)&call = shim_symbol("shim_cuda_call");
    if (t->read[work.unit] == NULL)
        t->read[work.unit] = calloc(gt_elems_max(t), sizeof(float));
    CHECK(w != NULL && t->read[work.unit] != NULL);
    *w = work;
    const int behind = atomic_fetch_add(&t->queued, 1) - atomic_load(&t->done);
    t->behind_max = behind > t->behind_max ? behind : t->behind_max;
    call(t->stream, gt_do_work, w);
}

/* What is between tensors is read too, and must be zero: pt_train_gpu() compares digests. */
static void gt_write(struct gpu_toy *t, uint32_t micro, uint32_t unit, uint32_t salt, bool tied,
                     const void *params, bool add, float *grad)
{
    const struct shd_model *m = t->pt.m;
    if (t->lazy) {
        gt_queue((struct gt_work){ t, true, micro, unit, salt, add, params, grad });
        return;
    }
    const uint64_t elems = m->spec->units[unit].elems;
    const void *p = gt_read(t, tied ? &t->tied_params : &t->params, params,
                            elems * dtype_bytes(m->spec->publish));
    float *g = gt_read(t, (void **)(tied ? &t->tied_grad : &t->grad), grad, elems * sizeof(float));
    toy_write(m, micro, unit, salt, p, add, g);
    if (t->cuda != NULL)
        gt_copy(t, grad, g, elems * sizeof(float));
}

static void gt_see(struct gpu_toy *t, uint32_t unit, const void *params)
{
    if (t->seen[unit] == NULL)
        t->seen[unit] = params;
    t->moved = t->moved || t->seen[unit] != params;
}

static int gt_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct gpu_toy *t = ctx;
    gt_see(t, unit, params);
    if (t->lazy)
        gt_queue((struct gt_work){ .t = t, .micro = micro, .unit = unit, .params = params });
    return pt_forward(&t->pt, micro, unit, params);
}

static int gt_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    struct gpu_toy *t = ctx;
    shd_model *m = t->pt.m;
    if (params == NULL || (grad == NULL) != shd_unit_frozen(m, unit))
        return 1;
    gt_see(t, unit, params);
    if (grad == NULL)
        return 0;
    if (unit == PT_UNITS - 1) { /* uses embed, and is the first to write its gradient */
        float *tied;
        if (shd_params(m, 0) == NULL || shd_grad(m, micro, 0, &tied, NULL) != SHD_OK)
            return 2;
        gt_write(t, micro, 0, /* salt= */ 100, true, shd_params(m, 0), /* add= */ false, tied);
    }
    gt_write(t, micro, unit, /* salt= */ 0, false, params, /* add= */ unit == 0, grad);
    if (t->stop != NULL && unit == 1)
        for (atomic_store(t->stop, 1); atomic_load(t->stop) != 0;)
            nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    return t->failed ? 3 : 0;
}

/* As pt_step(). */
static int gt_step(shd_model *m, struct gpu_toy *t, struct shd_result *ret_result,
                   struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(m));
    const struct shd_compute compute = { sizeof compute, t,           gt_forward,
                                         gt_backward,    toy_metrics, NULL };
    t->pt.m = m;
    return shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, ret_result, e);
}

/* -- The shim -----------------------------------------------------------------------------------
 */

/* NULL: a real driver */
static void *shim_symbol(const char *name)
{
    void *library = shim_is_there() ? dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL)
        return NULL;
    void *found = dlsym(library, name);
    dlclose(library); /* the driver table keeps it */
    return found;
}

__attribute__((unused)) static uint64_t shim_live(const char *kind)
{
    shim_cuda_live_fn *live;
    *(void **)&live = shim_symbol("shim_cuda_live");
    return live != NULL ? live(kind) : 0;
}

__attribute__((unused)) static uint64_t shim_calls(const char *name)
{
    shim_cuda_calls_fn *calls;
    *(void **)&calls = shim_symbol("shim_cuda_calls");
    return calls(name);
}

/* A sticky error. */
__attribute__((unused)) static void shim_forget(void)
{
    shim_cuda_reset_fn *reset;
    *(void **)&reset = shim_symbol("shim_cuda_reset");
    reset();
}

__attribute__((unused)) static void shim_fail(const char *spec)
{
    shim_cuda_fail_fn *fail;
    *(void **)&fail = shim_symbol("shim_cuda_fail");
    if (fail == NULL)
        SKIP("this driver is not the shim: nothing can be made to fail");
    fail(spec);
}

#endif
