/* The device's memory, as kern.h's "Memory" has it. Everything here may block for milliseconds
 * (cuMemCreate clears page tables, a synchronisation waits for kernels): never call it from an
 * event loop.
 *
 * A segment is one VMM allocation, exported as a descriptor and mapped whole. The descriptor alone
 * keeps the memory alive, so it survives its maker. Whoever imports it chooses its own access: a
 * readonly kind is mapped read-only by segment_map(), which catches bugs and is no security.
 */
#include "kernels/cuda/memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"

#define BYTES_MAX (UINT64_C(1) << 48)

/* Map an allocation at a reserved address. */
static int map_at(struct cuda_kern *k, CUdeviceptr at, uint64_t bytes, uint64_t handle,
                  bool readonly, struct shd_err *e)
{
    const struct cuda *c = k->cuda;
    int r = cuda_call(k, c->cuMemMap(at, bytes, 0, handle, 0), e,
                      "map %" PRIu64 " bytes of %s (all of what the descriptor shares?)", bytes,
                      k->name);
    if (r != SHD_OK)
        return r;
    const CUmemAccessDesc access = {
        .location = { CU_MEM_LOCATION_TYPE_DEVICE, k->device },
        .flags = readonly ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    r = cuda_call(k, c->cuMemSetAccess(at, bytes, &access, 1), e,
                  "make %" PRIu64 " bytes of %s accessible", bytes, k->name);
    if (r != SHD_OK)
        c->cuMemUnmap(at, bytes);
    return r;
}

/* Reserve addresses and map there. */
static int map_new(struct cuda_kern *k, uint64_t bytes, uint64_t handle, bool readonly,
                   CUdeviceptr *ret_at, struct shd_err *e)
{
    const struct cuda *c = k->cuda;
    CUdeviceptr at;
    int r = cuda_call(k, c->cuMemAddressReserve(&at, bytes, 0, 0, 0), e,
                      "reserve %" PRIu64 " bytes of addresses on %s", bytes, k->name);
    if (r != SHD_OK)
        return r;
    r = map_at(k, at, bytes, handle, readonly, e);
    if (r == SHD_OK)
        *ret_at = at;
    else
        c->cuMemAddressFree(at, bytes);
    return r;
}

/* Set memory to zero, and wait for it. */
static int clear(struct cuda_kern *k, CUdeviceptr at, uint64_t bytes, struct shd_err *e)
{
    pthread_mutex_lock(&k->memory_lock);
    int r = cuda_call(k, k->cuda->cuMemsetD8Async(at, 0, bytes, k->memory_stream), e,
                      "clear %" PRIu64 " bytes of %s", bytes, k->name);
    if (r == SHD_OK)
        r = cuda_wait(k, k->memory_stream, e);
    pthread_mutex_unlock(&k->memory_lock);
    return r;
}

/* The descriptor is the driver's, made without O_CLOEXEC. */
static int export_fd(struct cuda_kern *k, uint64_t handle, int *ret_fd, struct shd_err *e)
{
    int fd = -1;
    const int r = cuda_call(k,
                            k->cuda->cuMemExportToShareableHandle(
                                &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                            e, "export memory of %s", k->name);
    if (r != SHD_OK)
        return r;
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0) {
        const int failed = err_sys(e, SHD_EIO, "exported memory of %s", k->name);
        close(fd);
        return failed;
    }
    *ret_fd = fd;
    return SHD_OK;
}

/* Export, map and clear a new allocation. */
static int fill_new(struct cuda_kern *k, struct segment *s, struct shd_err *e)
{
    int r = export_fd(k, s->handle, &s->fd, e);
    if (r != SHD_OK)
        return r;
    CUdeviceptr at = 0;
    r = map_new(k, s->bytes, s->handle, false, &at, e);
    if (r == SHD_OK) {
        s->base = (void *)(uintptr_t)at;
        r = clear(k, at, s->bytes, e);
    }
    if (r == SHD_OK)
        return SHD_OK;
    if (s->base != NULL) {
        k->cuda->cuMemUnmap(at, s->bytes);
        k->cuda->cuMemAddressFree(at, s->bytes);
    }
    close(s->fd);
    return r;
}

int cuda_segment_new(struct kern *kern, const char *name, enum segment_kind kind, uint64_t bytes,
                     struct segment *ret_segment, struct shd_err *e)
{
    (void)name; /* the driver has no names for memory */
    struct cuda_kern *k = cuda_kern_of(kern);
    CHECK(bytes > 0);
    if (bytes > BYTES_MAX)
        return err_set(e, SHD_ENOMEM, "%s segment of %" PRIu64 " bytes: the limit is %" PRIu64,
                       segment_kind_name(kind), bytes, BYTES_MAX);
    int r = cuda_enter(k, e);
    if (r != SHD_OK)
        return r;
    struct segment s = {
        .fd = -1,
        .bytes = layout_align(bytes, k->granule),
        .place = SEGMENT_CUDA,
    };
    const CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = { CU_MEM_LOCATION_TYPE_DEVICE, k->device },
    };
    CUmemGenericAllocationHandle handle = 0;
    r = cuda_call(k, k->cuda->cuMemCreate(&handle, s.bytes, &prop, 0), e,
                  "%s segment of %" PRIu64 " bytes on %s", segment_kind_name(kind), s.bytes,
                  k->name);
    if (r != SHD_OK)
        return r;
    s.handle = handle;
    r = fill_new(k, &s, e);
    if (r != SHD_OK) {
        k->cuda->cuMemRelease(handle);
        return err_prefix(e, "%s segment", segment_kind_name(kind));
    }
    *ret_segment = s;
    return SHD_OK;
}

/* Map s in place of `at`, whose address stays. When s cannot be mapped, `at` is put back. */
static int map_over(struct cuda_kern *k, struct segment *at, struct segment *s, bool readonly,
                    struct shd_err *e)
{
    const struct cuda *c = k->cuda;
    const CUdeviceptr where = cuda_address(at->base);
    int r = cuda_call(k, c->cuCtxSynchronize(), e, "wait for %s", k->name);
    if (r == SHD_OK)
        r = cuda_call(k, c->cuMemUnmap(where, at->bytes), e, "unmap %" PRIu64 " bytes of %s",
                      at->bytes, k->name);
    if (r != SHD_OK)
        return r;
    r = map_at(k, where, s->bytes, s->handle, readonly, e);
    if (r != SHD_OK) {
        map_at(k, where, at->bytes, at->handle, readonly, NULL);
        return r;
    }
    c->cuMemRelease(at->handle);
    close(at->fd);
    *at = SEGMENT_CLOSED;
    s->base = (void *)(uintptr_t)where;
    return SHD_OK;
}

int cuda_segment_map(struct kern *kern, int fd, enum segment_kind kind, uint64_t bytes,
                     struct segment *at, struct segment *ret_segment, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    const char *name = segment_kind_name(kind);
    const bool readonly = segment_kind_readonly(kind);
    if (bytes == 0 || bytes % SHD_PAGE_BYTES != 0 || bytes > BYTES_MAX)
        return err_set(e, SHD_ESEGMENT, "%s segment of %" PRIu64 " bytes, not whole pages", name,
                       bytes);
    bytes = layout_align(bytes, k->granule); /* as cuda_segment_new() made it */
    CHECK(at == NULL || (at->place == SEGMENT_CUDA && at->base != NULL && at->bytes == bytes));
    int r = cuda_enter(k, e);
    if (r != SHD_OK)
        return r;
    struct segment s = { .fd = fd, .bytes = bytes, .place = SEGMENT_CUDA };
    CUmemGenericAllocationHandle handle = 0;
    r = cuda_call(k,
                  k->cuda->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                  e, "import a %s segment from descriptor %d into %s", name, fd, k->name);
    if (r != SHD_OK)
        return r;
    s.handle = handle;
    CUdeviceptr where = 0;
    if (at != NULL)
        r = map_over(k, at, &s, readonly, e);
    else
        r = map_new(k, bytes, handle, readonly, &where, e);
    if (r != SHD_OK) {
        k->cuda->cuMemRelease(handle);
        return err_prefix(e, "%s segment", name);
    }
    if (at == NULL)
        s.base = (void *)(uintptr_t)where;
    *ret_segment = s;
    return SHD_OK;
}

/* Work that is on its way to the device's memory must be over before it is unmapped. */
void cuda_segment_close(struct kern *kern, struct segment *s)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    const struct cuda *c = k->cuda;
    if (s->base != NULL) {
        CHECK(s->place == SEGMENT_CUDA);
        cuda_enter(k, NULL);
        cuda_call(k, c->cuCtxSynchronize(), NULL, "wait for %s", k->name);
        c->cuMemUnmap(cuda_address(s->base), s->bytes);
        c->cuMemAddressFree(cuda_address(s->base), s->bytes);
        c->cuMemRelease(s->handle);
    }
    if (s->fd >= 0)
        close(s->fd);
    *s = SEGMENT_CLOSED;
}

void *cuda_alloc(struct kern *kern, uint64_t bytes)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    CUdeviceptr at = 0;
    if (bytes == 0 || cuda_enter(k, NULL) != SHD_OK ||
        cuda_call(k, k->cuda->cuMemAlloc(&at, bytes), NULL, "allocate %" PRIu64 " bytes on %s",
                  bytes, k->name) != SHD_OK)
        return NULL;
    return (void *)(uintptr_t)at;
}

void cuda_release(struct kern *kern, void *memory, uint64_t bytes)
{
    (void)bytes;
    struct cuda_kern *k = cuda_kern_of(kern);
    if (memory == NULL)
        return;
    cuda_enter(k, NULL);
    cuda_call(k, k->cuda->cuMemFree(cuda_address(memory)), NULL, "free memory of %s", k->name);
}

int cuda_pin(struct kern *kern, void *base, uint64_t bytes, bool readonly, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    const int r = cuda_enter(k, e);
    if (r != SHD_OK)
        return r;
    const unsigned flags = CU_MEMHOSTREGISTER_PORTABLE |
                           (readonly ? CU_MEMHOSTREGISTER_READ_ONLY : 0u);
    /* Not cuda_call(): what the driver says of pages that it cannot pin (CUDA_ERROR_UNKNOWN, too)
     * is no word on the device, and the copy that is slower then finds out about that. */
    return cuda_result(k->cuda, k->cuda->cuMemHostRegister(base, bytes, flags), e,
                       "pin %" PRIu64 " bytes%s for %s", bytes, readonly ? " read-only" : "",
                       k->name);
}

void cuda_unpin(struct kern *kern, void *base)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    cuda_enter(k, NULL);
    cuda_call(k, k->cuda->cuMemHostUnregister(base), NULL, "unpin memory for %s", k->name);
}

uint64_t cuda_available(struct kern *kern)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    size_t free_bytes = 0, total_bytes = 0;
    if (cuda_enter(k, NULL) != SHD_OK ||
        cuda_call(k, k->cuda->cuMemGetInfo(&free_bytes, &total_bytes), NULL,
                  "ask %s for its free memory", k->name) != SHD_OK)
        return UINT64_MAX;
    return free_bytes;
}
