/* The shim's pinned memory of the host. See shim.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cuda/shim.h"

struct pin {
    uint64_t base, bytes;
    bool ours; /* cuMemHostAlloc */
    struct pin *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pin *pins;

bool shim_pinned(uint64_t ptr)
{
    bool found = false;
    pthread_mutex_lock(&lock);
    for (const struct pin *p = pins; p != NULL; p = p->next)
        found = found || (ptr >= p->base && ptr < p->base + p->bytes);
    pthread_mutex_unlock(&lock);
    return found;
}

static CUresult pin_add(void *base, uint64_t bytes, bool ours)
{
    CUresult r = CUDA_SUCCESS;
    struct pin *p = calloc(1, sizeof *p);
    if (p == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *p = (struct pin){ (uintptr_t)base, bytes, ours, pins };
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
    r = pin_add(base, bytes, true);
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

/* Whether all of [base, base + bytes) is mapped here, and writable: what the driver finds out when
 * it locks the pages. */
static bool host_mapped(uint64_t base, uint64_t bytes, bool writable)
{
    FILE *f = fopen("/proc/self/maps", "re");
    char line[512], perms[8];
    uint64_t at = base;
    while (f != NULL && at < base + bytes && fgets(line, sizeof line, f) != NULL) {
        unsigned long long first, end;
        if (sscanf(line, "%llx-%llx %7s", &first, &end, perms) != 3)
            continue;
        if (at >= first && at < end && perms[0] == 'r' && (!writable || perms[1] == 'w'))
            at = end;
    }
    if (f != NULL)
        fclose(f);
    return at >= base + bytes;
}

CUresult cuMemHostRegister(void *ptr, size_t bytes, unsigned flags)
{
    const CUresult r = shim_enter("cuMemHostRegister", NEEDS_CONTEXT);
    if (r != CUDA_SUCCESS)
        return r;
    if (bytes == 0 ||
        !host_mapped((uintptr_t)ptr, bytes, (flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0))
        return CUDA_ERROR_INVALID_VALUE;
    return pin_add(ptr, bytes, false);
}

CUresult cuMemHostUnregister(void *ptr)
{
    const CUresult r = shim_enter("cuMemHostUnregister", NEEDS_INIT);
    const CUresult dropped = pin_drop(ptr, false);
    return r != CUDA_SUCCESS ? r : dropped;
}
