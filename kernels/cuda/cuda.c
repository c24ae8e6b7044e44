/* A CUDA device: found, looked over, made, and taken apart. */
#include "kernels/cuda/cuda.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

/* The kernels of this folder as nvcc compiled them, a fatbin for cuModuleLoadData(); of 0 bytes
 * where this build was made without nvcc. */
extern const unsigned char shd_cuda_kernels[];
extern const uint64_t shd_cuda_kernels_bytes;

#define HASH_THREADS   2u
#define CAPABILITY_MIN 9 /* kernels are compiled for 9.0 and, as PTX, for what comes after */

static const char *const function_names[CUDA_FN_COUNT] = {
    [CUDA_FILL] = "shd_fill",
    [CUDA_CAST] = "shd_cast",
    [CUDA_ACCUMULATE] = "shd_accumulate",
    [CUDA_SUMSQ] = "shd_sumsq",
    [CUDA_ADAMW] = "shd_adamw",
    [CUDA_SGD] = "shd_sgd",
    [CUDA_LION] = "shd_lion",
    [CUDA_ADAMW_TORCH] = "shd_adamw_torch",
    [CUDA_SGD_TORCH] = "shd_sgd_torch",
    [CUDA_MEAN] = "shd_mean",
    [CUDA_ADAMW_INT8] = "shd_adamw_int8",
    [CUDA_SGD_INT8] = "shd_sgd_int8",
    [CUDA_LION_INT8] = "shd_lion_int8",
    [CUDA_ADAMW_TORCH_INT8] = "shd_adamw_torch_int8",
    [CUDA_SGD_TORCH_INT8] = "shd_sgd_torch_int8",
    [CUDA_EMA] = "shd_ema",
    [CUDA_QUANTIZE] = "shd_quantize",
    [CUDA_DEQUANTIZE] = "shd_dequantize",
    [CUDA_TRAIL_BEGIN] = "shd_trail_begin",
};

static int attribute(struct cuda_kern *k, int which, const char *what, int *ret, struct shd_err *e)
{
    return cuda_call(k, k->cuda->cuDeviceGetAttribute(ret, which, k->device), e,
                     "ask %s for its %s", k->name, what);
}

/* Find the device by its ordinal; its name and UUID. */
static int find_device(struct cuda_kern *k, uint32_t ordinal, struct shd_err *e)
{
    const struct cuda *c = k->cuda;
    int count = 0;
    int r = cuda_call(k, c->cuDeviceGetCount(&count), e, "count the GPUs");
    if (r != SHD_OK)
        return r;
    if (ordinal >= (uint32_t)count)
        return err_set(e, SHD_ENOTSUP,
                       "no CUDA device %" PRIu32 ": there are %d here, from 0 "
                       "(see nvidia-smi -L and CUDA_VISIBLE_DEVICES)",
                       ordinal, count);
    r = cuda_call(k, c->cuDeviceGet(&k->device, (int)ordinal), e, "find %s", k->name);
    char *name = k->ops.product;
    if (r == SHD_OK)
        r = cuda_call(k, c->cuDeviceGetName(name, sizeof k->ops.product, k->device), e, "name %s",
                      k->name);
    CUuuid uuid = { { 0 } };
    if (r == SHD_OK)
        r = cuda_call(k, c->cuDeviceGetUuid(&uuid, k->device), e, "ask %s for its UUID", k->name);
    if (r != SHD_OK)
        return r;
    snprintf(k->name, sizeof k->name, "CUDA device %" PRIu32 " (%.31s)", ordinal, name);
    memcpy(k->ops.uuid, uuid.bytes, sizeof k->ops.uuid);
    return SHD_OK;
}

/* An error unless the device can do all that is needed here. */
static int check_device(struct cuda_kern *k, struct shd_err *e)
{
    int major = 0, minor = 0, vmm = 0, posix = 0, mode = CU_COMPUTEMODE_DEFAULT;
    const struct {
        int which;
        const char *what;
        int *value;
    } asked[] = {
        { CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability", &major },
        { CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability", &minor },
        { CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management",
          &vmm },
        { CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory handles",
          &posix },
        { CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, "compute mode", &mode },
    };
    for (size_t i = 0; i < ARRAY_SIZE(asked); i++) {
        const int r = attribute(k, asked[i].which, asked[i].what, asked[i].value, e);
        if (r != SHD_OK)
            return r;
    }
    if (mode != CU_COMPUTEMODE_DEFAULT) /* daemons and workers are several processes */
        return err_set(e, SHD_ENOTSUP,
                       "%s is in compute mode %d, which keeps other processes away: nvidia-smi -c "
                       "DEFAULT",
                       k->name, mode);
    if (major < CAPABILITY_MIN)
        return err_set(e, SHD_ENOTSUP,
                       "%s has compute capability %d.%d, the kernels need %d.0 (Hopper) or newer",
                       k->name, major, minor, CAPABILITY_MIN);
    if (vmm == 0 || posix == 0)
        return err_set(e, SHD_ENOTSUP,
                       "%s cannot share memory by file descriptors (virtual memory management: "
                       "%d, POSIX handles: %d): use a bare-metal or passthrough Linux driver",
                       k->name, vmm, posix);
    return SHD_OK;
}

/* True: the kernel keeps records for its blocks, so it has no more blocks than records. */
static bool keeps_records(enum cuda_fn fn)
{
    return fn == CUDA_ACCUMULATE || (fn >= CUDA_ADAMW && fn <= CUDA_EMA);
}

/* Find a kernel, and how many of its blocks fill the device. Loaded now: left to its first launch
 * (CUDA_MODULE_LOADING is LAZY by default), that one could find no memory for the code, which
 * segments have taken, and would be the one to say that the code does not suit the device. */
static int load_function(struct cuda_kern *k, enum cuda_fn fn, int processors, struct shd_err *e)
{
    struct cuda_kernel *to = &k->kernels[fn];
    const char *name = to->name = function_names[fn];
    int r = cuda_call(k, k->cuda->cuModuleGetFunction(&to->function, k->module, name), e,
                      "find kernel %s", name);
    if (r == SHD_OK)
        r = cuda_call(k, k->cuda->cuFuncLoad(to->function), e, "load kernel %s on %s", name,
                      k->name);
    int blocks = 0;
    if (r == SHD_OK)
        r = cuda_call(k,
                      k->cuda->cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, to->function,
                                                                           CUDA_THREADS, 0),
                      e, "fit kernel %s on %s", name, k->name);
    if (r != SHD_OK)
        return r;
    const uint64_t all = (uint64_t)(blocks > 0 ? blocks : 1) * (uint64_t)processors;
    const uint64_t max = keeps_records(fn) ? CUDA_BLOCKS_MAX : UINT64_C(1) << 20;
    to->blocks_max = (unsigned)(all < max ? all : max);
    return SHD_OK;
}

static int load_module(struct cuda_kern *k, struct shd_err *e)
{
    int processors = 0;
    int r = attribute(k, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "multiprocessors", &processors,
                      e);
    if (r != SHD_OK)
        return r;
    const bool empty = shd_cuda_kernels_bytes == 0;
    const CUresult loaded = k->cuda->cuModuleLoadData(&k->module, shd_cuda_kernels);
    if (loaded != CUDA_SUCCESS && empty)
        return err_set(e, SHD_ENOTSUP,
                       "this build has no GPU kernels for %s: build shardd where nvcc is "
                       "(-DSHD_CUDA=ON); CUDA's error was %d",
                       k->name, (int)loaded);
    r = cuda_call(k, loaded, e, "load the GPU kernels on %s", k->name);
    for (enum cuda_fn fn = 0; fn < CUDA_FN_COUNT && r == SHD_OK; fn++)
        r = load_function(k, fn, processors, e);
    return r;
}

/* Streams, and what each part in flight has. */
static int make_parts(struct cuda_kern *k, struct shd_err *e)
{
    const struct cuda *c = k->cuda;
    int r = cuda_call(k, c->cuStreamCreate(&k->stream, CU_STREAM_NON_BLOCKING), e,
                      "make a stream on %s", k->name);
    if (r == SHD_OK)
        r = cuda_call(k, c->cuStreamCreate(&k->memory_stream, CU_STREAM_NON_BLOCKING), e,
                      "make a second stream on %s", k->name);
    for (unsigned i = 0; i < CUDA_FLIGHT && r == SHD_OK; i++) {
        struct cuda_part *p = &k->parts[i];
        r = cuda_call(k, c->cuEventCreate(&p->event, CU_EVENT_DISABLE_TIMING), e,
                      "make event %u of %u on %s", i + 1, CUDA_FLIGHT, k->name);
        if (r == SHD_OK)
            r = cuda_call(k, c->cuMemHostAlloc(&p->host, CUDA_STAGE_BYTES, 0), e,
                          "pin %" PRIu64 " bytes of the host for %s", CUDA_STAGE_BYTES, k->name);
        if (r == SHD_OK)
            r = cuda_call(k, c->cuMemAlloc(&p->device, CUDA_STAGE_BYTES), e,
                          "allocate %" PRIu64 " bytes on %s", CUDA_STAGE_BYTES, k->name);
    }
    return r;
}

static int find_granule(struct cuda_kern *k, struct shd_err *e)
{
    const CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = { CU_MEM_LOCATION_TYPE_DEVICE, k->device },
    };
    size_t granule = 0;
    const int r = cuda_call(
        k,
        k->cuda->cuMemGetAllocationGranularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
        e, "ask %s for its memory granularity", k->name);
    if (r == SHD_OK && (granule < 4096 || (granule & (granule - 1)) != 0))
        return err_set(e, SHD_ENOTSUP, "%s has memory granules of %zu bytes", k->name, granule);
    k->granule = granule;
    return r;
}

static int device_start(struct cuda_kern *k, uint32_t ordinal, struct shd_err *e)
{
    int r = cuda_load(&k->cuda, e);
    if (r == SHD_OK)
        r = find_device(k, ordinal, e);
    if (r == SHD_OK)
        r = check_device(k, e);
    if (r == SHD_OK)
        r = cuda_call(k, k->cuda->cuDevicePrimaryCtxRetain(&k->ctx, k->device), e,
                      "make a context on %s", k->name);
    if (r == SHD_OK)
        r = cuda_enter(k, e);
    if (r == SHD_OK)
        r = find_granule(k, e);
    if (r == SHD_OK)
        r = load_module(k, e);
    if (r == SHD_OK)
        r = make_parts(k, e);
    if (r == SHD_OK)
        r = kern_cpu_new(&(struct kern_config){ .threads = HASH_THREADS }, &k->host, e);
    return r == SHD_OK ? cuda_queue_start(k, e) : r;
}

/* The driver's part of cuda_free(). What fails here cannot be helped, and after a sticky error all
 * of it does. */
static void device_end(struct cuda_kern *k)
{
    const struct cuda *c = k->cuda;
    c->cuCtxSetCurrent(k->ctx);
    for (unsigned i = 0; i < CUDA_FLIGHT; i++) {
        const struct cuda_part *p = &k->parts[i];
        if (p->device != 0)
            c->cuMemFree(p->device);
        if (p->host != NULL)
            c->cuMemFreeHost(p->host);
        if (p->event != NULL)
            c->cuEventDestroy(p->event);
    }
    if (k->memory_stream != NULL)
        c->cuStreamDestroy(k->memory_stream);
    if (k->stream != NULL)
        c->cuStreamDestroy(k->stream);
    if (k->module != NULL)
        c->cuModuleUnload(k->module);
    c->cuCtxSetCurrent(NULL);
    c->cuDevicePrimaryCtxRelease(k->device);
}

static void cuda_free(struct kern *kern)
{
    if (kern == NULL)
        return;
    struct cuda_kern *k = cuda_kern_of(kern);
    cuda_queue_stop(k);
    if (k->ctx != NULL)
        device_end(k);
    if (k->host != NULL)
        k->host->ops->free(k->host);
    pthread_cond_destroy(&k->pushed_one);
    pthread_mutex_destroy(&k->lock);
    pthread_mutex_destroy(&k->memory_lock);
    free(k);
}

int kern_cuda_new(uint32_t ordinal, struct kern **ret_kern, struct shd_err *e)
{
    struct cuda_kern *k = sys_calloc(1, sizeof *k);
    if (k == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a queue of %zu bytes", sizeof *k);
    k->ops = cuda_ops;
    k->ops.free = cuda_free;
    k->base.ops = &k->ops;
    snprintf(k->name, sizeof k->name, "CUDA device %" PRIu32, ordinal);
    sys_condition(&k->pushed_one);
    CHECK(pthread_mutex_init(&k->lock, NULL) == 0);
    CHECK(pthread_mutex_init(&k->memory_lock, NULL) == 0);
    const int r = device_start(k, ordinal, e);
    if (r != SHD_OK) {
        cuda_free(&k->base);
        return r;
    }
    *ret_kern = &k->base;
    return SHD_OK;
}
