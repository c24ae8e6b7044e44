/* The shim's pinned memory of the host. See shim.h. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "tests/cuda/shim.h"

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

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pin *pins;

/* Whether all of [base, base + bytes) is mapped here, and writable, if asked: what the driver finds
 * out when it locks the pages. *ret_page: the first one. */
static bool host_mapped(uint64_t base, uint64_t bytes, bool writable, struct page *ret_page)
{
    FILE *f = fopen("/proc/self/maps", "re");
    char line[512], perms[8];
    uint64_t at = base;
    while (f != NULL && at < base + bytes && fgets(line, sizeof line, f) != NULL) {
        unsigned long long first, end, offset, inode;
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
    pthread_mutex_lock(&lock);
    for (const struct pin *p = pins; p != NULL; p = p->next) {
        if (bytes == 0 || ptr >= p->base + p->bytes || p->base >= ptr + bytes)
            continue;
        check_same(p);
        const bool whole = ptr >= p->base && bytes <= p->base + p->bytes - ptr;
        found = whole ? SHIM_PINNED : SHIM_PINNED_PARTLY;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static CUresult pin_add(void *base, uint64_t bytes, bool ours, struct page page)
{
    CUresult r = CUDA_SUCCESS;
    struct pin *p = calloc(1, sizeof *p);
    if (p == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *p = (struct pin){ (uintptr_t)base, bytes, ours, page, pins };
    for (const struct pin *q = pins; q != NULL; q = q->next)
        if (q->base < p->base + bytes && p->base < q->base + q->bytes)
            r = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (r == CUDA_SUCCESS) {
        pins = p;
        shim_count(ours ? SHIM_HOST : SHIM_PIN, 1);
    }
    pthread_mutex_unlock(&lock);
    if (r != CUDA_SUCCESS)
        free(p);
    return r;
}

static CUresult pin_drop(const void *base, bool ours)
{
    CUresult r = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
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
    pthread_mutex_unlock(&lock);
    return r;
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
    memset(base, 0xdb, bytes);
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
