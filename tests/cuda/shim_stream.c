/* The shim's streams, events, modules and launches. See shim.h.
 *
 * A stream is a thread that does its work in order; events are counters that it raises. One lock
 * and one condition serve all. What goes wrong while work runs is sticky: later calls say it, and
 * what is queued then is dropped. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/base/check.h"
#include "tests/cuda/emulate.h"
#include "tests/cuda/shim.h"

/* Absent where there is no C++ compiler: then no module has a function. */
#pragma weak emulate_find
#pragma weak emulate_launch

enum work_kind { WORK_COPY, WORK_MEMSET, WORK_KERNEL, WORK_CALL, WORK_RECORD, WORK_WAIT };

struct work {
    enum work_kind kind;
    CUdeviceptr to, from;
    uint64_t bytes;
    unsigned char value;
    const struct emulate_kernel *kernel;
    void *args; /* owned copy */
    unsigned grid[3], block[3];
    void (*fn)(void *ctx); /* of a call */
    void *ctx;
    CUdevice device;
    CUevent event; /* with a reference */
    uint64_t target;
    struct work *next;
};

struct CUstream_st {
    CUcontext ctx;
    pthread_t thread;
    struct work *first, **last;
    pthread_cond_t more; /* for its thread */
    uint64_t queued, done;
    bool leaving;
    struct CUstream_st *next;
};

struct CUevent_st {
    uint64_t recorded, reached; /* counts of records asked for, and done */
    struct timespec at;
    unsigned refs;
    bool timing;
    CUcontext ctx;
};

struct CUmod_st {
    int unused;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER; /* what who waits for work may wait for */
static unsigned counting; /* that wait for a count of what is done, and not for an event */
static struct CUstream_st *streams;
static struct CUstream_st *default_stream; /* for NULL; never ends */

static void event_drop(CUevent event)
{
    if (--event->refs > 0)
        return;
    free(event);
    shim_count(SHIM_EVENT, -1);
}

/* Memory that it opens is left open. */
static CUresult kernel_run(const struct work *w, bool *is_open)
{
    const CUresult r = shim_work_fault("kernel");
    if (r == SHIM_KILL) /* to end in its middle is the emulation's affair */
        shim_kill();
    if (r != CUDA_SUCCESS)
        return r;
    if (!*is_open)
        shim_open_memory(w->device);
    *is_open = true;
    emulate_launch(w->kernel, w->args, w->grid, w->block);
    return CUDA_SUCCESS;
}

/* Without lock. */
static CUresult work_run(const struct work *w, bool *is_open)
{
    if (w->kind == WORK_CALL) { /* in any case: it has something to free */
        w->fn(w->ctx);
        return CUDA_SUCCESS;
    }
    if (shim_stuck() != CUDA_SUCCESS || w->kind == WORK_RECORD || w->kind == WORK_WAIT)
        return CUDA_SUCCESS;
    shim_delay();
    if (w->kind == WORK_KERNEL)
        return kernel_run(w, is_open);
    const CUresult r = shim_work_fault(w->kind == WORK_COPY ? "copy" : "memset");
    if (r != CUDA_SUCCESS && r != SHIM_KILL)
        return r;
    const uint64_t bytes = r == SHIM_KILL ? w->bytes / 2 : w->bytes;
    const CUresult done = w->kind == WORK_COPY ? shim_copy(w->device, w->to, w->from, bytes)
                                               : shim_memset(w->device, w->to, w->value, bytes);
    if (r == SHIM_KILL)
        shim_kill();
    return done;
}

/* Under lock. */
static void work_end(struct work *w)
{
    if (w->kind == WORK_RECORD) {
        clock_gettime(CLOCK_MONOTONIC, &w->event->at);
        if (w->event->reached < w->target)
            w->event->reached = w->target;
    }
    while (w->kind == WORK_WAIT && w->event->reached < w->target)
        pthread_cond_wait(&changed, &lock);
    if (w->event != NULL)
        event_drop(w->event);
    free(w->args);
    free(w);
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    bool is_open = false;
    pthread_mutex_lock(&lock);
    while (!s->leaving || s->first != NULL) {
        struct work *w = s->first;
        if (w == NULL) {
            pthread_cond_wait(&s->more, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        const CUresult r = work_run(w, &is_open);
        if (r != CUDA_SUCCESS)
            shim_stick(r);
        pthread_mutex_lock(&lock);
        s->first = w->next;
        if (s->first == NULL)
            s->last = &s->first;
        if (is_open &&
            (s->first == NULL || s->first->kind != WORK_KERNEL || s->first->device != w->device)) {
            shim_close_memory();
            is_open = false;
        }
        const bool recorded = w->kind == WORK_RECORD;
        work_end(w);
        s->done++;
        if (recorded || counting > 0)
            pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Under lock. */
static CUresult stream_start(struct CUstream_st **ret)
{
    struct CUstream_st *s = calloc(1, sizeof *s);
    if (s == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    s->last = &s->first;
    s->more = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    s->ctx = shim_context();
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int error = pthread_create(&s->thread, NULL, stream_main, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error != 0) {
        free(s);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s->next = streams;
    streams = s;
    *ret = s;
    return CUDA_SUCCESS;
}

/* Queue a copy of *work; takes its args and its event's reference. */
static CUresult stream_push(CUstream stream, const struct work *work)
{
    struct work *w = malloc(sizeof *w);
    CHECK(w != NULL);
    *w = *work;
    CUresult r = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (stream == NULL && default_stream == NULL)
        r = stream_start(&default_stream);
    CHECK(r == CUDA_SUCCESS);
    struct CUstream_st *s = stream != NULL ? stream : default_stream;
    *s->last = w;
    s->last = &w->next;
    const CUcontext ctx = stream != NULL ? s->ctx : shim_context();
    w->device = ctx != NULL ? shim_device(ctx) : -1;
    s->queued++;
    if (s->first == w)
        pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

SHIM_API shim_cuda_call_fn shim_cuda_call;
SHIM_API shim_cuda_copy_fn shim_cuda_copy;

void shim_cuda_call(struct CUstream_st *stream, void (*fn)(void *ctx), void *ctx)
{
    const struct work w = { .kind = WORK_CALL, .fn = fn, .ctx = ctx };
    stream_push(stream, &w);
}

int shim_cuda_copy(uint64_t to, uint64_t from, uint64_t bytes)
{
    return shim_copy(/* device= */ -1, to, from, bytes);
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    CUresult r = shim_enter("cuStreamCreate", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    r = stream_start(stream);
    pthread_mutex_unlock(&lock);
    if (r == CUDA_SUCCESS)
        shim_count(SHIM_STREAM, 1);
    return r;
}

CUresult cuStreamDestroy(CUstream stream)
{
    const CUresult r = shim_enter("cuStreamDestroy", NEEDS_INIT);
    if (stream == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    stream->leaving = true;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&lock);
    struct CUstream_st **at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&lock);
    free(stream);
    shim_count(SHIM_STREAM, -1);
    return r;
}

static void stream_wait(const struct CUstream_st *s)
{
    counting++;
    for (const uint64_t target = s->queued; s->done < target;)
        pthread_cond_wait(&changed, &lock);
    counting--;
}

CUresult cuStreamSynchronize(CUstream stream)
{
    const CUresult r = shim_enter("cuStreamSynchronize", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS && r != shim_stuck())
        return r; /* but after a sticky error nothing runs on when this returns */
    pthread_mutex_lock(&lock);
    const struct CUstream_st *s = stream != NULL ? stream : default_stream;
    if (s != NULL)
        stream_wait(s);
    pthread_mutex_unlock(&lock);
    return shim_stuck();
}

static CUevent event_hold(CUevent event, bool record, uint64_t *ret_target)
{
    pthread_mutex_lock(&lock);
    event->refs++;
    event->recorded += record;
    *ret_target = event->recorded;
    pthread_mutex_unlock(&lock);
    return event;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    const CUresult r = shim_enter("cuStreamWaitEvent", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS || flags != 0 || event == NULL)
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    struct work w = { .kind = WORK_WAIT };
    w.event = event_hold(event, false, &w.target);
    return stream_push(stream, &w);
}

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    const CUresult r = shim_enter("cuEventCreate", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    struct CUevent_st *made = calloc(1, sizeof *made);
    if (made == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->refs = 1;
    made->ctx = shim_context();
    made->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    shim_count(SHIM_EVENT, 1);
    *event = made;
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event)
{
    const CUresult r = shim_enter("cuEventDestroy", NEEDS_INIT);
    if (event == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    event_drop(event);
    pthread_mutex_unlock(&lock);
    return r;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    const CUresult r = shim_enter("cuEventRecord", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS || event == NULL)
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    if (event->ctx != (stream != NULL ? stream->ctx : shim_context()))
        return CUDA_ERROR_INVALID_HANDLE;
    struct work w = { .kind = WORK_RECORD };
    w.event = event_hold(event, true, &w.target);
    return stream_push(stream, &w);
}

CUresult cuEventQuery(CUevent event)
{
    const CUresult r = shim_enter("cuEventQuery", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_mutex_lock(&lock);
    const bool reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&lock);
    const CUresult late = shim_stuck();
    return late != CUDA_SUCCESS ? late : reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
    const CUresult r = shim_enter("cuEventSynchronize", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_mutex_lock(&lock);
    for (const uint64_t target = event->recorded; event->reached < target;)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    return shim_stuck();
}

CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    const CUresult r = shim_enter("cuEventElapsedTime", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_mutex_lock(&lock);
    const bool reached = start->reached >= start->recorded && end->reached >= end->recorded;
    *ms = (float)((double)(end->at.tv_sec - start->at.tv_sec) * 1e3 +
                  (double)(end->at.tv_nsec - start->at.tv_nsec) / 1e6);
    const bool timing = start->timing && end->timing;
    pthread_mutex_unlock(&lock);
    return !timing ? CUDA_ERROR_INVALID_VALUE : reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Which side an end of a copy is on. */
enum side { DEVICE, PINNED, PAGEABLE };

static CUresult find_side(CUdeviceptr ptr, uint64_t bytes, enum side *ret_side)
{
    const CUresult r = shim_check(ptr, bytes);
    *ret_side = DEVICE;
    if (r != CUDA_SUCCESS || shim_on_device(ptr))
        return r;
    const enum shim_pinned pinned = shim_pinned(ptr, bytes);
    *ret_side = pinned == SHIM_PINNED ? PINNED : PAGEABLE;
    return pinned == SHIM_PINNED_PARTLY ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Queue a copy; from: now, if not NULL, and later from w->args. */
static CUresult copy_push(CUstream stream, struct work *w, const void *from)
{
    if (from != NULL) {
        w->args = malloc(w->bytes);
        CHECK(w->args != NULL);
        memcpy(w->args, from, w->bytes);
        w->from = (uintptr_t)w->args;
    }
    return stream_push(stream, w);
}

/* "API synchronization behavior" in the driver's documentation: pageable memory is read before the
 * call returns, and a copy into it, or between two places of the host's, is over then. */
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    enum side to_side = DEVICE, from_side = DEVICE;
    CUresult r = shim_enter("cuMemcpyAsync", NEEDS_CONTEXT);
    if (r == CUDA_SUCCESS)
        r = find_side(to, bytes, &to_side);
    if (r == CUDA_SUCCESS)
        r = find_side(from, bytes, &from_side);
    if (r != CUDA_SUCCESS)
        return r;
    struct work w = { .kind = WORK_COPY, .to = to, .from = from, .bytes = bytes };
    const bool hosts = to_side != DEVICE && from_side != DEVICE;
    r = copy_push(stream, &w,
                  from_side == PAGEABLE && !hosts && bytes > 0 ? (const void *)from : NULL);
    if (r == CUDA_SUCCESS && (hosts || to_side == PAGEABLE)) {
        pthread_mutex_lock(&lock);
        stream_wait(stream != NULL ? stream : default_stream);
        pthread_mutex_unlock(&lock);
        r = shim_stuck();
    }
    return r;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream)
{
    CUresult r = shim_enter("cuMemsetD8Async", NEEDS_CONTEXT);
    if (r == CUDA_SUCCESS)
        r = shim_check(to, bytes);
    if (r != CUDA_SUCCESS)
        return r;
    const struct work w = { .kind = WORK_MEMSET, .to = to, .value = value, .bytes = bytes };
    return stream_push(stream, &w);
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    const CUresult r = shim_enter("cuModuleLoadData", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS || image == NULL)
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
    struct CUmod_st *made = calloc(1, sizeof *made);
    if (made == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    shim_count(SHIM_MODULE, 1);
    *module = made;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module)
{
    const CUresult r = shim_enter("cuModuleUnload", NEEDS_INIT);
    if (module == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    free(module);
    shim_count(SHIM_MODULE, -1);
    return r;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    const CUresult r = shim_enter("cuModuleGetFunction", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    const struct emulate_kernel *k = emulate_find != NULL ? emulate_find(name) : NULL;
    if (module == NULL || k == NULL)
        return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)(uintptr_t)k;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function)
{
    const CUresult r = shim_enter("cuFuncLoad", NEEDS_CONTEXT);
    return r == CUDA_SUCCESS && function == NULL ? CUDA_ERROR_INVALID_HANDLE : r;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                     int block_threads, size_t shared_bytes)
{
    const CUresult r = shim_enter("cuOccupancyMaxActiveBlocksPerMultiprocessor", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (function == NULL || block_threads < 1 || block_threads > 1024 || shared_bytes > 49152)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = 1;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **params, void **extra)
{
    const CUresult r = shim_enter("cuLaunchKernel", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (function == NULL || params == NULL || extra != NULL || shared_bytes != 0 ||
        (uint64_t)grid_x * grid_y * grid_z == 0 || (uint64_t)block_x * block_y * block_z == 0 ||
        grid_x > INT32_MAX || grid_y > UINT16_MAX || grid_z > UINT16_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    const struct emulate_kernel *kernel = (const struct emulate_kernel *)(uintptr_t)function;
    if ((uint64_t)block_x * block_y * block_z > kernel->threads_max || kernel->args_bytes > 4096)
        return CUDA_ERROR_INVALID_VALUE; /* __launch_bounds__(); 4 KiB of parameters */
    if (stream != NULL && stream->ctx != shim_context())
        return CUDA_ERROR_INVALID_HANDLE;
    struct work w = {
        .kind = WORK_KERNEL,
        .kernel = kernel,
        .grid = { grid_x, grid_y, grid_z },
        .block = { block_x, block_y, block_z },
    };
    w.args = malloc(w.kernel->args_bytes);
    CHECK(w.args != NULL);
    memcpy(w.args, params[0], w.kernel->args_bytes);
    return stream_push(stream, &w);
}

static bool all_idle(void)
{
    for (const struct CUstream_st *s = streams; s != NULL; s = s->next)
        if (s->first != NULL)
            return false;
    return true;
}

CUresult cuCtxSynchronize(void)
{
    const CUresult r = shim_enter("cuCtxSynchronize", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS && r != shim_stuck())
        return r; /* but after a sticky error nothing runs on when this returns */
    pthread_mutex_lock(&lock);
    counting++;
    while (!all_idle())
        pthread_cond_wait(&changed, &lock);
    counting--;
    pthread_mutex_unlock(&lock);
    return shim_stuck();
}
