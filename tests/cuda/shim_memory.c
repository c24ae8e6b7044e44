/* The shim's memory. See shim.h.
 *
 * An allocation is a memfd and a mapping of it that only copies use. It lives while it has handles
 * or mappings. A range is reserved addresses; a map puts an allocation there. `lock` is held for
 * reading while work runs and for writing by all that changes ranges and maps, so that nothing is
 * unmapped under work that runs. Functions that let go do so even when told to fail: what they
 * return is then an error, but nothing leaks by the test's own doing. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "tests/cuda/shim.h"

#define GRANULE (UINT64_C(2) << 20)
#define LARGE   (UINT64_C(256) << 10) /* memory that is set to zero in whole pages */
#define MAGIC   UINT64_C(0x7368696d2d616c6c)

struct allocation {
    uint64_t magic;
    int fd;
    uint8_t *alias; /* [bytes] */
    uint64_t bytes;
    unsigned handles, maps;
    bool counted;    /* against the device's memory */
    bool exportable; /* made for it, or imported */
    struct allocation *next;
};

struct range {
    uint64_t base, bytes;
    struct range *next;
};

struct map {
    uint64_t base, bytes;
    struct allocation *allocation;
    int prot[SHIM_DEVICES_MAX]; /* as each device may use it */
    struct map *next;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct allocation *allocations;
static struct range *ranges;
static struct map *maps;
static uint64_t used_bytes;
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t whole_granules(uint64_t bytes)
{
    return (bytes + GRANULE - 1) / GRANULE * GRANULE;
}

/* -- Under lock, for writing ------------------------------------------------------------------ */

static struct allocation *allocation_new(int fd, uint64_t bytes, bool counted)
{
    struct allocation *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    *a = (struct allocation){ .magic = MAGIC,
                              .fd = fd,
                              .bytes = bytes,
                              .counted = counted,
                              .exportable = !counted,
                              .next = allocations };
    void *alias = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED) {
        free(a);
        return NULL;
    }
    a->alias = alias;
    allocations = a;
    used_bytes += counted ? bytes : 0;
    shim_count(SHIM_ALLOCATION, 1);
    return a;
}

/* Memory is as it was left by others: never zero. The first pages are written, and then one in 32;
 * by pwrite(), which maps none of them. */
static bool make_dirty(int fd, uint64_t bytes)
{
    static uint8_t dirt[64 * 4096];
    memset(dirt, 0xdb, sizeof dirt);
    bool written = pwrite(fd, dirt, sizeof dirt, 0) == (ssize_t)sizeof dirt;
    const uint64_t step = bytes > 2 * GRANULE ? GRANULE : UINT64_C(32) * 4096;
    for (uint64_t at = sizeof dirt; written && at < bytes; at += step)
        written = pwrite(fd, dirt, 4096, (off_t)at) == 4096;
    return written;
}

static CUresult allocation_make(uint64_t bytes, struct allocation **ret)
{
    if (bytes > shim_device_bytes() || used_bytes > shim_device_bytes() - bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const int fd = memfd_create("shim-cuda", MFD_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct allocation *a = NULL;
    if (ftruncate(fd, (off_t)bytes) == 0 && make_dirty(fd, bytes))
        a = allocation_new(fd, bytes, true);
    if (a == NULL) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *ret = a;
    return CUDA_SUCCESS;
}

static struct allocation *allocation_find(CUmemGenericAllocationHandle handle)
{
    for (struct allocation *a = allocations; a != NULL; a = a->next)
        if ((uintptr_t)a == handle && a->handles > 0)
            return a;
    return NULL;
}

static void allocation_drop(struct allocation *a)
{
    CHECK(a->magic == MAGIC);
    if (a->handles > 0 || a->maps > 0)
        return;
    struct allocation **at = &allocations;
    while (*at != a)
        at = &(*at)->next;
    *at = a->next;
    munmap(a->alias, a->bytes);
    close(a->fd);
    used_bytes -= a->counted ? a->bytes : 0;
    free(a);
    shim_count(SHIM_ALLOCATION, -1);
}

/* Addresses, PROT_NONE, whole granules. */
static CUresult range_make(uint64_t bytes, struct range **ret)
{
    struct range *r = calloc(1, sizeof *r);
    if (r == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint8_t *got = mmap(NULL, bytes + GRANULE, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) {
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    uint8_t *base = (uint8_t *)whole_granules((uintptr_t)got);
    if (base > got)
        munmap(got, (size_t)(base - got));
    munmap(base + bytes, (size_t)(GRANULE - (uint64_t)(base - got)));
    *r = (struct range){ (uintptr_t)base, bytes, ranges };
    ranges = r;
    shim_count(SHIM_RANGE, 1);
    *ret = r;
    return CUDA_SUCCESS;
}

static CUresult range_drop(uint64_t base, uint64_t bytes)
{
    for (const struct map *m = maps; m != NULL; m = m->next)
        if (m->base < base + bytes && base < m->base + m->bytes)
            return CUDA_ERROR_INVALID_VALUE;
    for (struct range **at = &ranges; *at != NULL; at = &(*at)->next) {
        struct range *r = *at;
        if (r->base != base || r->bytes != bytes)
            continue;
        munmap((void *)base, bytes);
        *at = r->next;
        free(r);
        shim_count(SHIM_RANGE, -1);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult map_make(uint64_t base, struct allocation *a, struct map **ret)
{
    struct map *m = calloc(1, sizeof *m);
    if (m == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (mmap((void *)base, a->bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, a->fd, 0) == MAP_FAILED) {
        free(m);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *m = (struct map){ .base = base, .bytes = a->bytes, .allocation = a, .next = maps };
    maps = m;
    a->maps++;
    shim_count(SHIM_MAP, 1);
    *ret = m;
    return CUDA_SUCCESS;
}

static CUresult map_drop(uint64_t base, uint64_t bytes)
{
    for (struct map **at = &maps; *at != NULL; at = &(*at)->next) {
        struct map *m = *at;
        if (m->base != base || m->bytes != bytes)
            continue;
        CHECK(mmap((void *)base, bytes, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED);
        *at = m->next;
        m->allocation->maps--;
        allocation_drop(m->allocation);
        free(m);
        shim_count(SHIM_MAP, -1);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* -- Work: under lock, for reading ------------------------------------------------------------ */

static const struct range *range_of(uint64_t at)
{
    for (const struct range *r = ranges; r != NULL; r = r->next)
        if (at >= r->base && at < r->base + r->bytes)
            return r;
    return NULL;
}

static const struct map *map_of(uint64_t at)
{
    for (const struct map *m = maps; m != NULL; m = m->next)
        if (at >= m->base && at < m->base + m->bytes)
            return m;
    return NULL;
}

/* What a device may do with it; -1: what any may. */
static int prot_of(const struct map *m, CUdevice device)
{
    int prot = device >= 0 ? m->prot[device] : PROT_NONE;
    for (int i = 0; device < 0 && i < SHIM_DEVICES_MAX; i++)
        prot |= m->prot[i];
    return prot;
}

/* Where the host finds [ptr, ...), and how much of *bytes lies there. NULL: nowhere, or the device
 * has not this access. */
static uint8_t *resolve(CUdevice device, uint64_t ptr, int prot, uint64_t *bytes)
{
    if (range_of(ptr) == NULL)
        return (uint8_t *)ptr;
    const struct map *m = map_of(ptr);
    if (m == NULL || (prot_of(m, device) & prot) != prot)
        return NULL;
    const uint64_t past = ptr - m->base, left = m->bytes - past;
    *bytes = *bytes < left ? *bytes : left;
    return m->allocation->alias + past;
}

/* Private memory of the host is zero again, without a page of it where whole pages lie in it. */
static void forget_pages(uint8_t *out, uint64_t bytes)
{
    const uint64_t page = 4096, before = (page - (uintptr_t)out % page) % page;
    const uint64_t whole = bytes > before ? (bytes - before) / page * page : 0;
    if (whole == 0 || madvise(out + before, whole, MADV_DONTNEED) != 0) {
        memset(out, 0, bytes);
        return;
    }
    memset(out, 0, before);
    memset(out + before + whole, 0, bytes - before - whole);
}

/* Of a mapping to the host's own memory: what no kernel has used is neither made nor copied. A copy
 * of all would take memory for both. */
static void copy_used(uint8_t *out, const struct map *m, uint64_t at, uint64_t bytes)
{
    const int fd = m->allocation->fd;
    for (uint64_t end = at + bytes, n; at < end; at += n, out += n) {
        const off_t data = lseek(fd, (off_t)at, SEEK_DATA);
        const uint64_t used = data >= 0 && (uint64_t)data < end ? (uint64_t)data : end;
        if (used > at) {
            n = used - at;
            forget_pages(out, n);
            continue;
        }
        const off_t hole = lseek(fd, (off_t)at, SEEK_HOLE);
        n = hole > data && (uint64_t)hole < end ? (uint64_t)hole - at : end - at;
        memcpy(out, m->allocation->alias + at, n);
    }
}

CUresult shim_copy(CUdevice device, CUdeviceptr to, CUdeviceptr from, uint64_t bytes)
{
    CUresult r = CUDA_SUCCESS;
    pthread_rwlock_rdlock(&lock);
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at;
        uint8_t *out = resolve(device, to + at, PROT_WRITE, &n);
        const uint8_t *in = resolve(device, from + at, PROT_READ, &n);
        if (out == NULL || in == NULL) {
            r = CUDA_ERROR_ILLEGAL_ADDRESS;
            break;
        }
        const bool to_host = range_of(to + at) == NULL && range_of(from + at) != NULL;
        if (n >= LARGE && to_host && shim_private(to + at, n))
            copy_used(out, map_of(from + at), from + at - map_of(from + at)->base, n);
        else
            memcpy(out, in, n);
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

/* Zeros that are no memory yet: pages that nothing has touched since are never made. */
static bool make_hole(const struct map *m, uint64_t at, uint64_t bytes)
{
    return fallocate(m->allocation->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     (off_t)(at - m->base), (off_t)bytes) == 0;
}

CUresult shim_memset(CUdevice device, CUdeviceptr to, unsigned char value, uint64_t bytes)
{
    CUresult r = CUDA_SUCCESS;
    pthread_rwlock_rdlock(&lock);
    for (uint64_t at = 0, n; at < bytes; at += n) {
        n = bytes - at;
        uint8_t *out = range_of(to + at) != NULL ? resolve(device, to + at, PROT_WRITE, &n) : NULL;
        if (out == NULL) {
            r = CUDA_ERROR_ILLEGAL_ADDRESS;
            break;
        }
        if (value != 0 || n < LARGE || !make_hole(map_of(to + at), to + at, n))
            memset(out, value, n);
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult shim_check(CUdeviceptr ptr, uint64_t bytes)
{
    CUresult r = ptr != 0 || bytes == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_rdlock(&lock);
    for (uint64_t at = 0, n; at < bytes && r == CUDA_SUCCESS && range_of(ptr) != NULL; at += n) {
        n = bytes - at;
        if (resolve(/* device= */ -1, ptr + at, PROT_READ, &n) == NULL)
            r = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

bool shim_on_device(CUdeviceptr ptr)
{
    pthread_rwlock_rdlock(&lock);
    const bool on_device = range_of(ptr) != NULL;
    pthread_rwlock_unlock(&lock);
    return on_device;
}

void shim_open_memory(CUdevice device)
{
    pthread_mutex_lock(&open_lock);
    pthread_rwlock_rdlock(&lock);
    for (const struct map *m = maps; m != NULL; m = m->next)
        CHECK(mprotect((void *)m->base, m->bytes, prot_of(m, device)) == 0);
}

/* What the host may do with mapped memory while no kernel runs. */
static int host_prot(const struct map *m)
{
    return getenv("SHIM_CUDA_OPEN") != NULL ? prot_of(m, 0) : PROT_NONE;
}

void shim_close_memory(void)
{
    /* Pages that no recent kernel used are forgotten: protecting all of them takes longer. */
    static unsigned closed;
    const bool forget = ++closed % 8 == 0;
    for (const struct map *m = maps; m != NULL; m = m->next) {
        CHECK(!forget || madvise((void *)m->base, m->bytes, MADV_DONTNEED) == 0);
        CHECK(mprotect((void *)m->base, m->bytes, host_prot(m)) == 0);
    }
    pthread_rwlock_unlock(&lock);
    pthread_mutex_unlock(&open_lock);
}

/* -- The driver's functions ------------------------------------------------------------------- */

static bool prop_valid(const CUmemAllocationProp *p)
{
    return p != NULL && p->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
           p->location.type == CU_MEM_LOCATION_TYPE_DEVICE && shim_device_valid(p->location.id);
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                       int option)
{
    const CUresult r = shim_enter("cuMemGetAllocationGranularity", NEEDS_INIT);
    if (r != CUDA_SUCCESS)
        return r;
    if (!prop_valid(prop) || option < 0 || option > 1)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
    CUresult r = shim_enter("cuMemCreate", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (!prop_valid(prop) || flags != 0 || bytes == 0 || bytes % GRANULE != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct allocation *a;
    pthread_rwlock_wrlock(&lock);
    r = allocation_make(bytes, &a);
    if (r == CUDA_SUCCESS) {
        a->handles = 1;
        a->exportable = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        *handle = (uintptr_t)a;
        shim_count(SHIM_HANDLE, 1);
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CUresult r = shim_enter("cuMemRelease", NEEDS_INIT);
    pthread_rwlock_wrlock(&lock);
    struct allocation *a = allocation_find(handle);
    if (a != NULL) {
        a->handles--;
        allocation_drop(a);
        shim_count(SHIM_HANDLE, -1);
    } else if (r == CUDA_SUCCESS) {
        r = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      int type, unsigned long long flags)
{
    CUresult r = shim_enter("cuMemExportToShareableHandle", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_rwlock_rdlock(&lock);
    const struct allocation *a = allocation_find(handle);
    if (a == NULL || !a->exportable || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        flags != 0) {
        r = CUDA_ERROR_INVALID_VALUE;
    } else {
        const int fd = dup(a->fd); /* without CLOEXEC, as the driver's */
        if (fd >= 0)
            memcpy(shareable, &fd, sizeof fd);
        else
            r = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        int type)
{
    const CUresult r = shim_enter("cuMemImportFromShareableHandle", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    struct stat st;
    const int given = (int)(intptr_t)shareable;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(given, &st) < 0 ||
        !S_ISREG(st.st_mode) || st.st_size <= 0 || (uint64_t)st.st_size % GRANULE != 0)
        return CUDA_ERROR_INVALID_VALUE;
    const int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_rwlock_wrlock(&lock);
    struct allocation *a = allocation_new(fd, (uint64_t)st.st_size, false);
    if (a != NULL) {
        a->handles = 1;
        *handle = (uintptr_t)a;
        shim_count(SHIM_HANDLE, 1);
    }
    pthread_rwlock_unlock(&lock);
    if (a != NULL)
        return CUDA_SUCCESS;
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t bytes, size_t alignment, CUdeviceptr addr,
                             unsigned long long flags)
{
    CUresult r = shim_enter("cuMemAddressReserve", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (bytes == 0 || bytes % GRANULE != 0 || alignment > GRANULE || addr != 0 || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct range *made;
    pthread_rwlock_wrlock(&lock);
    r = range_make(bytes, &made);
    if (r == CUDA_SUCCESS)
        *ptr = made->base;
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t bytes)
{
    CUresult r = shim_enter("cuMemAddressFree", NEEDS_INIT);
    pthread_rwlock_wrlock(&lock);
    const CUresult dropped = range_drop(ptr, bytes);
    pthread_rwlock_unlock(&lock);
    return r != CUDA_SUCCESS ? r : dropped;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    CUresult r = shim_enter("cuMemMap", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_rwlock_wrlock(&lock);
    struct allocation *a = allocation_find(handle);
    const struct range *in = range_of(ptr);
    bool valid = a != NULL && in != NULL && offset == 0 && flags == 0 && bytes == a->bytes &&
                 ptr % GRANULE == 0 && bytes <= in->base + in->bytes - ptr;
    for (const struct map *m = maps; m != NULL; m = m->next)
        valid = valid && (m->base >= ptr + bytes || ptr >= m->base + m->bytes);
    struct map *made;
    r = valid ? map_make(ptr, a, &made) : CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t bytes)
{
    const CUresult r = shim_enter("cuMemUnmap", NEEDS_INIT);
    pthread_rwlock_wrlock(&lock);
    const CUresult dropped = map_drop(ptr, bytes);
    pthread_rwlock_unlock(&lock);
    return r != CUDA_SUCCESS ? r : dropped;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t bytes, const CUmemAccessDesc *desc, size_t count)
{
    const CUresult r = shim_enter("cuMemSetAccess", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        !shim_device_valid(desc->location.id) ||
        (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
         desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE))
        return CUDA_ERROR_INVALID_VALUE;
    const int prot = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ
                                                                  : PROT_READ | PROT_WRITE;
    uint64_t set = 0;
    pthread_rwlock_wrlock(&lock);
    for (struct map *m = maps; m != NULL; m = m->next) {
        if (m->base < ptr || m->base + m->bytes > ptr + bytes)
            continue;
        m->prot[desc->location.id] = prot;
        CHECK(mprotect((void *)m->base, m->bytes, host_prot(m)) == 0);
        set += m->bytes;
    }
    pthread_rwlock_unlock(&lock);
    return set == bytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    const CUresult r = shim_enter("cuMemGetInfo", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    pthread_rwlock_rdlock(&lock);
    *total_bytes = shim_device_bytes();
    *free_bytes = *total_bytes - used_bytes;
    pthread_rwlock_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *ptr, size_t bytes)
{
    CUresult r = shim_enter("cuMemAlloc", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct allocation *a = NULL;
    struct range *in = NULL;
    struct map *m = NULL;
    pthread_rwlock_wrlock(&lock);
    r = allocation_make((bytes + 4095) / 4096 * 4096, &a);
    if (r == CUDA_SUCCESS)
        r = range_make(whole_granules(bytes), &in);
    if (r == CUDA_SUCCESS)
        r = map_make(in->base, a, &m);
    if (r == CUDA_SUCCESS) {
        m->prot[shim_device(shim_context())] = PROT_READ | PROT_WRITE;
        CHECK(mprotect((void *)m->base, m->bytes, host_prot(m)) == 0);
        *ptr = m->base;
    } else {
        if (in != NULL)
            range_drop(in->base, in->bytes);
        if (a != NULL)
            allocation_drop(a);
    }
    pthread_rwlock_unlock(&lock);
    return r;
}

CUresult cuMemFree(CUdeviceptr ptr)
{
    const CUresult r = shim_enter("cuMemFree", NEEDS_INIT);
    CUresult dropped = CUDA_ERROR_INVALID_VALUE;
    pthread_rwlock_wrlock(&lock);
    const struct range *in = range_of(ptr);
    const struct map *m = map_of(ptr);
    if (in != NULL && m != NULL && in->base == ptr && m->base == ptr &&
        m->allocation->handles == 0) {
        const uint64_t bytes = in->bytes;
        dropped = map_drop(ptr, m->bytes);
        range_drop(ptr, bytes);
    }
    pthread_rwlock_unlock(&lock);
    return r != CUDA_SUCCESS ? r : dropped;
}

CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr ptr)
{
    const CUresult r = shim_enter("cuPointerGetAttribute", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        return CUDA_ERROR_INVALID_VALUE;
    int type = 0;
    pthread_rwlock_rdlock(&lock);
    if (map_of(ptr) != NULL)
        type = CU_MEMORYTYPE_DEVICE;
    pthread_rwlock_unlock(&lock);
    if (shim_pinned(ptr, 1) == SHIM_PINNED)
        type = 1; /* CU_MEMORYTYPE_HOST */
    if (type == 0)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(value, &type, sizeof type);
    return CUDA_SUCCESS;
}
