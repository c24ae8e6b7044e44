/* The host's memory, as kern.h's "Memory" has it: segments are memfds (proto/share/segment.h). */
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

int cpu_segment_new(struct kern *k, const char *name, enum segment_kind kind, uint64_t bytes,
                    struct segment *ret_segment, struct shd_err *e)
{
    (void)k;
    return segment_new(name, kind, bytes, ret_segment, e);
}

int cpu_segment_map(struct kern *k, int fd, enum segment_kind kind, uint64_t bytes,
                    struct segment *at, struct segment *ret_segment, struct shd_err *e)
{
    (void)k;
    int r = segment_check(fd, kind, bytes, e);
    if (r != SHD_OK || at == NULL)
        return r != SHD_OK ? r : segment_map(fd, kind, bytes, ret_segment, e);
    CHECK(at->bytes == bytes);
    r = segment_place(at->base, fd, 0, bytes, !segment_kind_readonly(kind), e);
    if (r != SHD_OK)
        return r;
    close(at->fd);
    *ret_segment = (struct segment){ .fd = fd, .base = at->base, .bytes = bytes };
    *at = SEGMENT_CLOSED;
    return SHD_OK;
}

void cpu_segment_close(struct kern *k, struct segment *segment)
{
    (void)k;
    segment_close(segment);
}

/* Pages that were never touched cost nothing. */
void *cpu_alloc(struct kern *k, uint64_t bytes)
{
    (void)k;
    void *base = sys_mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base != MAP_FAILED ? base : NULL;
}

void cpu_release(struct kern *k, void *memory, uint64_t bytes)
{
    (void)k;
    if (memory != NULL)
        munmap(memory, bytes);
}

int cpu_pin(struct kern *k, void *base, uint64_t bytes, bool readonly, struct shd_err *e)
{
    (void)k, (void)base, (void)bytes, (void)readonly, (void)e;
    return SHD_OK;
}

void cpu_unpin(struct kern *k, void *base)
{
    (void)k, (void)base;
}

uint64_t cpu_available(struct kern *k)
{
    (void)k;
    return sys_memory_available();
}

int cpu_health(struct kern *k, struct shd_err *e)
{
    (void)k, (void)e;
    return SHD_OK;
}

bool cpu_failed(struct kern *k, struct shd_err *ret_why)
{
    (void)k, (void)ret_why;
    return false;
}

uint64_t cpu_trail_bytes(const struct kern *k, uint64_t chunks)
{
    (void)k, (void)chunks;
    return 0; /* it is in the ledger */
}

int cpu_trail_repair(struct kern *k, struct kern_trail_area *area, void *base, uint64_t bytes,
                     _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e)
{
    (void)k;
    return kern_trail_repair(area, base, bytes, chunks, count, e);
}
