/* The shim: start, devices, contexts, modules, and failures on request. See shim.h. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/cuda/shim.h"
#include "tests/cuda/shim_faults.h"

struct CUctx_st {
    CUdevice device;
    _Atomic unsigned refs;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t init_pid; /* 0: cuInit was not called */
static struct CUctx_st contexts[SHIM_DEVICES_MAX];
static int visible[SHIM_DEVICES_MAX], visible_count;
static uint64_t device_bytes = UINT64_C(16) << 30;
static _Atomic uint64_t delay_us;
static _Atomic int stuck;
static _Atomic int64_t live[SHIM_KINDS];
/* Initial-exec, so that this library has its place in every thread's static storage: what is got
 * later lies on the heap, and gcc 12's sanitizers take it for another glibc's where it begins 16
 * bytes into a page, and read what is no pointer when they look for leaks. */
static _Thread_local CUcontext current __attribute__((tls_model("initial-exec")));

static const char *const kind_names[] = {
    [SHIM_CONTEXT] = "context",
    [SHIM_MODULE] = "module",
    [SHIM_STREAM] = "stream",
    [SHIM_EVENT] = "event",
    [SHIM_ALLOCATION] = "allocation",
    [SHIM_HANDLE] = "handle",
    [SHIM_RANGE] = "range",
    [SHIM_MAP] = "map",
    [SHIM_PIN] = "pin",
    [SHIM_HOST] = "host",
};

/* Functions and work, with how often each was called. */
static struct shim_function functions[] = {
#define SHIM_NAME(member, symbol, arguments) { #member, 0 },
    CUDA_FUNCTIONS(SHIM_NAME)
#undef SHIM_NAME
        { "copy", 0 },
    { "memset", 0 },
    { "kernel", 0 },
};

static struct shim_faults faults = { .functions = functions,
                                     .function_count = ARRAY_SIZE(functions),
                                     .word = ":kill",
                                     .word_result = SHIM_KILL,
                                     .usual_result = CUDA_ERROR_OUT_OF_MEMORY };
static bool configured;

static void configure(void)
{
    if (configured)
        return;
    configured = true;
    shim_faults_set(&faults, getenv("SHIM_CUDA_FAIL"));
    const char *text = getenv("SHIM_CUDA_DELAY_US");
    delay_us = text != NULL ? strtoull(text, NULL, 10) : 0;
    text = getenv("SHIM_CUDA_BYTES");
    device_bytes = text != NULL ? strtoull(text, NULL, 10) : device_bytes;
    text = getenv("SHIM_CUDA_DEVICES");
    int count = text != NULL ? atoi(text) : 1;
    CHECK(count >= 0 && count <= SHIM_DEVICES_MAX);
    text = getenv("CUDA_VISIBLE_DEVICES");
    if (text == NULL) {
        for (visible_count = 0; visible_count < count; visible_count++)
            visible[visible_count] = visible_count;
        return;
    }
    while (*text != '\0' && visible_count < SHIM_DEVICES_MAX) {
        char *end;
        const long i = strtol(text, &end, 10);
        if (end == text || i < 0 || i >= count)
            return; /* as the driver: what follows a bad one is not visible */
        visible[visible_count++] = (int)i;
        text = *end == ',' ? end + 1 : end;
    }
}

/* Count a call; the result it is to have. Under lock. */
static CUresult count_call(const char *name)
{
    configure();
    return (CUresult)shim_faults_count(&faults, name);
}

CUresult shim_enter(const char *name, enum shim_needs needs)
{
    pthread_mutex_lock(&lock);
    CUresult r = count_call(name);
    if (r == SHIM_KILL)
        shim_kill();
    if (r != CUDA_SUCCESS && cuda_sticky(r))
        shim_stick(r);
    if (r == CUDA_SUCCESS && needs >= NEEDS_INIT && init_pid != getpid())
        r = CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_unlock(&lock);
    if (r == CUDA_SUCCESS && needs >= NEEDS_INIT)
        r = shim_stuck();
    if (r == CUDA_SUCCESS && needs == NEEDS_CONTEXT && current == NULL)
        r = CUDA_ERROR_INVALID_CONTEXT;
    if (r == CUDA_SUCCESS && needs == NEEDS_CONTEXT && atomic_load(&current->refs) == 0)
        r = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return r;
}

void shim_kill(void)
{
    raise(SIGKILL);
    abort();
}

CUcontext shim_context(void)
{
    return current;
}

CUdevice shim_device(CUcontext ctx)
{
    return ctx->device;
}

CUresult shim_work_fault(const char *kind)
{
    pthread_mutex_lock(&lock);
    const CUresult r = count_call(kind);
    pthread_mutex_unlock(&lock);
    return r;
}

void shim_stick(CUresult result)
{
    int expected = CUDA_SUCCESS;
    atomic_compare_exchange_strong(&stuck, &expected, result);
}

CUresult shim_stuck(void)
{
    return atomic_load(&stuck);
}

void shim_delay(void)
{
    const uint64_t us = atomic_load(&delay_us);
    if (us > 0)
        nanosleep(&(struct timespec){ (time_t)(us / 1000000), (long)(us % 1000000) * 1000 }, NULL);
}

void shim_count(enum shim_kind kind, int delta)
{
    atomic_fetch_add(&live[kind], delta);
}

uint64_t shim_device_bytes(void)
{
    return device_bytes;
}

bool shim_device_valid(CUdevice device)
{
    return device >= 0 && device < visible_count;
}

SHIM_API shim_cuda_fail_fn shim_cuda_fail;
SHIM_API shim_cuda_calls_fn shim_cuda_calls;
SHIM_API shim_cuda_live_fn shim_cuda_live;
SHIM_API shim_cuda_reset_fn shim_cuda_reset;
SHIM_API shim_cuda_delay_fn shim_cuda_delay;

void shim_cuda_fail(const char *spec)
{
    pthread_mutex_lock(&lock);
    configure();
    shim_faults_set(&faults, spec);
    pthread_mutex_unlock(&lock);
}

uint64_t shim_cuda_calls(const char *name)
{
    pthread_mutex_lock(&lock);
    const struct shim_function *function = shim_faults_find(&faults, name);
    const uint64_t calls = function != NULL ? function->calls : 0;
    pthread_mutex_unlock(&lock);
    return calls;
}

uint64_t shim_cuda_live(const char *kind)
{
    int64_t count = 0;
    for (size_t i = 0; i < SHIM_KINDS; i++)
        if (kind == NULL || strcmp(kind, kind_names[i]) == 0)
            count += atomic_load(&live[i]);
    return (uint64_t)count;
}

void shim_cuda_reset(void)
{
    atomic_store(&stuck, CUDA_SUCCESS);
}

void shim_cuda_delay(uint64_t us)
{
    atomic_store(&delay_us, us);
}

CUresult cuInit(unsigned flags)
{
    CUresult r = shim_enter("cuInit", NEEDS_NOTHING);
    if (r != CUDA_SUCCESS)
        return r;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (visible_count == 0)
        r = CUDA_ERROR_NO_DEVICE;
    else if (init_pid == 0)
        init_pid = getpid();
    else if (init_pid != getpid()) /* a child of one that used it */
        r = CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_unlock(&lock);
    return r;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return shim_enter("cuDriverGetVersion", NEEDS_NOTHING);
}

static const struct {
    CUresult result;
    const char *name, *text;
} results[] = {
    { CUDA_SUCCESS, "CUDA_SUCCESS", "no error" },
    { CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
    { CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
    { CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
    { CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
    { CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
    { CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid" },
    { CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
    { CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error" },
    { CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found" },
    { CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready" },
    { CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access" },
    { CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
      "part or all of the requested memory range is already mapped" },
    { CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure" },
    { CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported" },
    { CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error" },
};

static CUresult result_index(CUresult error, size_t *ret_index)
{
    for (size_t i = 0; i < ARRAY_SIZE(results); i++) {
        if (results[i].result != error)
            continue;
        *ret_index = i;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    size_t i;
    const CUresult r = result_index(error, &i);
    *name = r == CUDA_SUCCESS ? results[i].name : NULL;
    return r;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    size_t i;
    const CUresult r = result_index(error, &i);
    *text = r == CUDA_SUCCESS ? results[i].text : NULL;
    return r;
}

CUresult cuDeviceGetCount(int *count)
{
    const CUresult r = shim_enter("cuDeviceGetCount", NEEDS_INIT);
    if (r == CUDA_SUCCESS)
        *count = visible_count;
    return r;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    const CUresult r = shim_enter("cuDeviceGet", NEEDS_INIT);
    if (r != CUDA_SUCCESS)
        return r;
    if (!shim_device_valid(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

/* One more for functions of a device. */
static CUresult enter_device(const char *name, CUdevice device)
{
    const CUresult r = shim_enter(name, NEEDS_INIT);
    if (r == CUDA_SUCCESS && !shim_device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    return r;
}

CUresult cuDeviceGetName(char *name, int len, CUdevice device)
{
    const CUresult r = enter_device("cuDeviceGetName", device);
    if (r == CUDA_SUCCESS)
        snprintf(name, (size_t)len, "Shim of a GPU");
    return r;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    const CUresult r = enter_device("cuDeviceGetUuid", device);
    if (r != CUDA_SUCCESS)
        return r;
    memcpy(uuid->bytes, "shim of a GPU  ", 15);
    uuid->bytes[15] = (char)('0' + visible[device]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    const CUresult r = enter_device("cuDeviceGetAttribute", device);
    if (r != CUDA_SUCCESS)
        return r;
    const char *text = getenv("SHIM_CUDA_ATTRIBUTE");
    while (text != NULL && *text != '\0') {
        char *end;
        const long which = strtol(text, &end, 10);
        const long is = *end == ':' ? strtol(end + 1, &end, 10) : 0;
        if (which == attribute) {
            *value = (int)is;
            return CUDA_SUCCESS;
        }
        text = *end == ',' ? end + 1 : NULL;
    }
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = 4;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = 9;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        *value = 0;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
        *value = 1;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    const CUresult r = enter_device("cuDeviceTotalMem", device);
    if (r == CUDA_SUCCESS)
        *bytes = device_bytes;
    return r;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    const CUresult r = enter_device("cuDeviceCanAccessPeer", device);
    if (r != CUDA_SUCCESS || !shim_device_valid(peer))
        return r != CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer && getenv("SHIM_CUDA_NO_PEER") == NULL;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
    const CUresult r = enter_device("cuDevicePrimaryCtxRetain", device);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_mutex_lock(&lock);
    contexts[device].device = device;
    contexts[device].refs++;
    pthread_mutex_unlock(&lock);
    shim_count(SHIM_CONTEXT, 1);
    *ctx = &contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    const CUresult r = enter_device("cuDevicePrimaryCtxRelease", device);
    if (!shim_device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    const bool held = contexts[device].refs > 0;
    contexts[device].refs -= held;
    pthread_mutex_unlock(&lock);
    if (!held)
        return CUDA_ERROR_INVALID_CONTEXT;
    shim_count(SHIM_CONTEXT, -1);
    return r;
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
    const CUresult r = shim_enter("cuCtxSetCurrent", NEEDS_INIT);
    if (r != CUDA_SUCCESS)
        return r;
    if (ctx != NULL && ctx->refs == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    current = ctx;
    return CUDA_SUCCESS;
}

/* The shim's pinned memory of the host. See shim.h. */

/* Which pages of which file are mapped at an address. */
struct page {
    unsigned long long inode, offset; /* 0: no file's */
};

struct pin {
    uint64_t base, bytes;
    bool ours; /* cuMemHostAlloc */
    struct page page;
    struct pin *next;
};

static pthread_mutex_t pins_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pin *pins;

/* Whether a line of /proc/self/maps, "FIRST-END ..." in hexadecimal, ends at or below `at`. There
 * are hundreds at each copy; sscanf() of each would be much of a test's time. */
static bool ends_below(const char *line, uint64_t at)
{
    uint64_t value = 0;
    for (; *line != ' ' && *line != '\0'; line++) {
        const int digit = *line <= '9' ? *line - '0' : *line - 'a' + 10;
        value = *line == '-' ? 0 : value * 16 + (uint64_t)digit;
    }
    return value <= at;
}

/* Linux 6.11's way to ask for one line of it. Headers of older systems lack it. */
struct maps_query {
    uint64_t size, flags, address, first, end, perms, page_bytes, offset, inode;
    uint32_t rest[4];
    uint64_t names[2];
};
#define MAPS_QUERY    _IOWR('f', 17, struct maps_query)
#define MAPS_READABLE 1u
#define MAPS_WRITABLE 2u
#define MAPS_SHARED   8u

/* What is mapped at q->address. 0, ENOENT, or what a kernel says that does not answer. */
static int maps_ask(struct maps_query *q)
{
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    const int error = fd >= 0 && ioctl(fd, MAPS_QUERY, q) == 0 ? 0 : errno;
    if (fd >= 0)
        close(fd);
    return error;
}

/* Whether the kernel answers; then host_mapped() is *ret. */
static bool host_asked(uint64_t base, uint64_t bytes, bool writable, struct page *ret_page,
                       bool *ret)
{
    const uint64_t perms = writable ? MAPS_READABLE | MAPS_WRITABLE : MAPS_READABLE;
    *ret = true;
    for (uint64_t at = base; *ret && at < base + bytes;) {
        struct maps_query q = { .size = sizeof q, .address = at };
        const int error = maps_ask(&q);
        if (error != 0 && error != ENOENT)
            return false;
        if (error == 0 && at == base)
            *ret_page = (struct page){ q.inode, q.inode != 0 ? q.offset + (base - q.first) : 0 };
        *ret = error == 0 && (q.perms & perms) == perms;
        at = q.end;
    }
    return true;
}

bool shim_private(uint64_t base, uint64_t bytes)
{
    struct maps_query q = { .size = sizeof q, .address = base };
    return maps_ask(&q) == 0 && base + bytes <= q.end && q.inode == 0 &&
           (q.perms & MAPS_SHARED) == 0;
}

/* Whether all of [base, base + bytes) is mapped here, and writable, if asked: what the driver finds
 * out when it locks the pages. *ret_page: the first one. */
static bool host_mapped(uint64_t base, uint64_t bytes, bool writable, struct page *ret_page)
{
    bool there;
    if (host_asked(base, bytes, writable, ret_page, &there))
        return there;
    FILE *f = fopen("/proc/self/maps", "re");
    char line[512], perms[8];
    uint64_t at = base;
    while (f != NULL && at < base + bytes && fgets(line, sizeof line, f) != NULL) {
        unsigned long long first, end, offset, inode;
        if (ends_below(line, base))
            continue;
        if (sscanf(line, "%llx-%llx %7s %llx %*s %llu", &first, &end, perms, &offset, &inode) != 5)
            continue;
        if (at == base && at >= first && at < end)
            *ret_page = (struct page){ inode, inode != 0 ? offset + (base - first) : 0 };
        if (at >= first && at < end && perms[0] == 'r' && (!writable || perms[1] == 'w'))
            at = end;
    }
    if (f != NULL)
        fclose(f);
    return at >= base + bytes;
}

/* Under lock. */
static void check_same(const struct pin *p)
{
    struct page now = { 0, 0 };
    if (p->ours || (host_mapped(p->base, p->bytes, false, &now) && now.inode == p->page.inode &&
                    now.offset == p->page.offset))
        return;
    fprintf(stderr, "shim: pinned memory at %#" PRIx64 " was mapped anew before it was unpinned\n",
            p->base);
    CHECK(false); /* see above */
}

enum shim_pinned shim_pinned(uint64_t ptr, uint64_t bytes)
{
    enum shim_pinned found = SHIM_PAGEABLE;
    pthread_mutex_lock(&pins_lock);
    for (const struct pin *p = pins; p != NULL; p = p->next) {
        if (bytes == 0 || ptr >= p->base + p->bytes || p->base >= ptr + bytes)
            continue;
        check_same(p);
        const bool whole = ptr >= p->base && bytes <= p->base + p->bytes - ptr;
        found = whole ? SHIM_PINNED : SHIM_PINNED_PARTLY;
    }
    pthread_mutex_unlock(&pins_lock);
    return found;
}

static CUresult pin_add(void *base, uint64_t bytes, bool ours, struct page page)
{
    CUresult r = CUDA_SUCCESS;
    struct pin *p = calloc(1, sizeof *p);
    if (p == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&pins_lock);
    *p = (struct pin){ (uintptr_t)base, bytes, ours, page, pins };
    for (const struct pin *q = pins; q != NULL; q = q->next)
        if (q->base < p->base + bytes && p->base < q->base + q->bytes)
            r = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (r == CUDA_SUCCESS) {
        pins = p;
        shim_count(ours ? SHIM_HOST : SHIM_PIN, 1);
    }
    pthread_mutex_unlock(&pins_lock);
    if (r != CUDA_SUCCESS)
        free(p);
    return r;
}

static CUresult pin_drop(const void *base, bool ours)
{
    CUresult r = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&pins_lock);
    for (struct pin **at = &pins; *at != NULL; at = &(*at)->next) {
        struct pin *p = *at;
        if (p->base != (uintptr_t)base || p->ours != ours)
            continue;
        check_same(p);
        *at = p->next;
        free(p);
        shim_count(ours ? SHIM_HOST : SHIM_PIN, -1);
        r = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&pins_lock);
    return r;
}

/* As a device's: never zero, the first pages whole, and then one in 32. */
static void make_dirty(uint8_t *base, size_t bytes)
{
    const size_t whole = 64 * 4096;
    memset(base, 0xdb, bytes < whole ? bytes : whole);
    for (size_t at = whole; at < bytes; at += 32 * (size_t)4096)
        memset(base + at, 0xdb, bytes - at < 4096 ? bytes - at : 4096);
}

CUresult cuMemHostAlloc(void **ptr, size_t bytes, unsigned flags)
{
    CUresult r = shim_enter("cuMemHostAlloc", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    (void)flags;
    void *base = bytes > 0 ? aligned_alloc(4096, (bytes + 4095) / 4096 * 4096) : NULL;
    if (base == NULL)
        return bytes > 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    r = pin_add(base, bytes, true, (struct page){ 0, 0 });
    if (r != CUDA_SUCCESS) {
        free(base);
        return r;
    }
    make_dirty(base, bytes);
    *ptr = base;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *ptr)
{
    const CUresult r = shim_enter("cuMemFreeHost", NEEDS_INIT);
    const CUresult dropped = pin_drop(ptr, true);
    if (dropped == CUDA_SUCCESS)
        free(ptr);
    return r != CUDA_SUCCESS ? r : dropped;
}

CUresult cuMemHostRegister(void *ptr, size_t bytes, unsigned flags)
{
    const CUresult r = shim_enter("cuMemHostRegister", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    struct page page = { 0, 0 };
    int readonly = 0;
    CUresult asked = CUDA_SUCCESS;
    if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0)
        asked = cuDeviceGetAttribute(&readonly,
                                     CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 0);
    if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0 && (asked != CUDA_SUCCESS || readonly == 0))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (bytes == 0 ||
        !host_mapped((uintptr_t)ptr, bytes, (flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0, &page))
        return CUDA_ERROR_INVALID_VALUE;
    return pin_add(ptr, bytes, false, page);
}

CUresult cuMemHostUnregister(void *ptr)
{
    const CUresult r = shim_enter("cuMemHostUnregister", NEEDS_INIT);
    const CUresult dropped = pin_drop(ptr, false);
    return r != CUDA_SUCCESS ? r : dropped;
}
