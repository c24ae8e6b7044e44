/* See segment.h. */
#include "proto/share/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/reserve.h"
#include "proto/spec/layout.h"

#define BYTES_MAX (UINT64_C(1) << 62) /* so that sums of two do not overflow, and off_t holds */

static const char *const kind_names[] = {
    [SEGMENT_STATE] = "state",       [SEGMENT_PUBLISH] = "publish", [SEGMENT_INBOX] = "inbox",
    [SEGMENT_BOARD] = "board",       [SEGMENT_LEDGER] = "ledger",   [SEGMENT_SPILL] = "spill",
    [SEGMENT_ACTIVITY] = "activity", [SEGMENT_STAGE] = "stage",     [SEGMENT_SPEC] = "spec",
    [SEGMENT_REQUESTS] = "requests", [SEGMENT_REPLIES] = "replies",
};

bool segment_kind_readonly(enum segment_kind kind)
{
    return kind == SEGMENT_PUBLISH || kind == SEGMENT_BOARD || kind == SEGMENT_SPEC ||
           kind == SEGMENT_REPLIES;
}

bool segment_kind_shared(uint32_t kind)
{
    return (kind >= SEGMENT_STATE && kind <= SEGMENT_BOARD) ||
           (kind >= SEGMENT_ACTIVITY && kind <= SEGMENT_REPLIES);
}

const char *segment_kind_name(enum segment_kind kind)
{
    const char *name = (size_t)kind < ARRAY_SIZE(kind_names) ? kind_names[kind] : NULL;
    return name != NULL ? name : "?";
}

const char *segment_place_name(enum segment_place place)
{
    return place == SEGMENT_HOST ? "host" : place == SEGMENT_CUDA ? "cuda" : "?";
}

static int kind_seals(enum segment_kind kind)
{
    const int size = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    return segment_kind_readonly(kind) ? size | F_SEAL_FUTURE_WRITE : size;
}

/* Mappings this process has; 0 when that cannot be read. No stdio: at the limit it could not
 * allocate its buffer. */
static uint64_t mappings_count(void)
{
    char buf[4096];
    uint64_t lines = 0;
    ssize_t n;
    const int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    while ((n = read(fd, buf, sizeof buf)) > 0)
        for (ssize_t i = 0; i < n; i++)
            lines += buf[i] == '\n';
    close(fd);
    return lines;
}

static uint64_t mappings_max(void)
{
    char buf[32] = "";
    const int fd = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    const ssize_t n = read(fd, buf, sizeof buf - 1);
    close(fd);
    return n > 0 ? strtoull(buf, NULL, 10) : 0;
}

/* err_sys() for a failed mmap(), which says ENOMEM for two quite different shortages. */
static int map_failed(struct shd_err *e, const char *what, uint64_t bytes)
{
    const int saved = errno;
    const uint64_t max = saved == ENOMEM ? mappings_max() : 0;
    const uint64_t count = max > 0 ? mappings_count() : 0;
    if (max > 0 && count + 8 >= max) /* the kernel refuses a little below its limit */
        return err_set(e, SHD_ENOMEM,
                       "%s %" PRIu64 " bytes: this process has %" PRIu64
                       " mappings, the limit vm.max_map_count is %" PRIu64,
                       what, bytes, count, max);
    errno = saved;
    return err_sys(e, SHD_EIO, "%s %" PRIu64 " bytes", what, bytes);
}

/* What kernels stream through. */
static bool kind_huge(enum segment_kind kind)
{
    return kind == SEGMENT_STATE || kind == SEGMENT_PUBLISH || kind == SEGMENT_INBOX;
}

/* mmap() all of fd; where a huge page of it can be mapped as one, if there is room for one. */
static void *map_whole(int fd, int prot, uint64_t bytes)
{
    if (bytes < RESERVE_HUGE)
        return sys_mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);
    const uint64_t room = bytes + RESERVE_HUGE - SHD_PAGE_BYTES;
    uint8_t *around = sys_mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                               -1, 0);
    if (around == MAP_FAILED)
        return MAP_FAILED;
    const uint64_t before = layout_align((uintptr_t)around, RESERVE_HUGE) - (uintptr_t)around;
    void *base = sys_mmap(around + before, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0);
    const int saved = errno;
    if (base == MAP_FAILED) {
        munmap(around, room);
        errno = saved;
        return MAP_FAILED;
    }
    if (before > 0)
        munmap(around, before);
    if (room - before > bytes)
        munmap(around + before + bytes, room - before - bytes);
    return base;
}

/* Size, map, take the pages, then seal: F_SEAL_FUTURE_WRITE leaves only the mapping made before it
 * writable. F_SEAL_SEAL goes in the same call, or the others could not be added. */
static int fill_new(struct segment *s, enum segment_kind kind, struct shd_err *e)
{
    const char *name = segment_kind_name(kind);
    if (ftruncate(s->fd, (off_t)s->bytes) < 0)
        return err_sys(e, SHD_EIO, "size %s segment to %" PRIu64 " bytes", name, s->bytes);
    void *base = map_whole(s->fd, PROT_READ | PROT_WRITE, s->bytes);
    if (base == MAP_FAILED)
        return map_failed(e, "map new segment of", s->bytes);
    s->base = base;
    struct reserve_huge huge = { .base = base };
    const bool large = kind_huge(kind) && s->bytes >= RESERVE_HUGE;
    if (kind != SEGMENT_SPILL &&
        reserve_pages(s->fd, 0, s->bytes, large ? &huge : NULL, e) != SHD_OK)
        return err_prefix(e, "%s segment of %" PRIu64 " bytes", name, s->bytes);
    s->huge_bytes = huge.bytes;
    if (fcntl(s->fd, F_ADD_SEALS, kind_seals(kind)) < 0)
        return err_sys(e, SHD_EIO, "seal %s segment", name);
    return SHD_OK;
}

int segment_new(const char *name, enum segment_kind kind, uint64_t bytes,
                struct segment *ret_segment, struct shd_err *e)
{
    CHECK(bytes > 0);
    if (bytes > BYTES_MAX)
        return err_set(e, SHD_ENOMEM, "%s segment of %" PRIu64 " bytes: the limit is %" PRIu64,
                       segment_kind_name(kind), bytes, BYTES_MAX);
    char label[200]; /* the kernel takes 249 */
    snprintf(label, sizeof label, "%s", name);
    struct segment s = { .fd = sys_memfd(label, MFD_CLOEXEC | MFD_ALLOW_SEALING),
                         .bytes = layout_align(bytes, SHD_PAGE_BYTES) };
    if (s.fd < 0)
        return err_sys(e, SHD_EIO, "create %s segment", segment_kind_name(kind));
    const int r = fill_new(&s, kind, e);
    if (r != SHD_OK) {
        segment_close(&s);
        return r;
    }
    *ret_segment = s;
    return SHD_OK;
}

int segment_room(uint64_t bytes, struct shd_err *e)
{
    return reserve_check(bytes, RESERVE_SPARED_MIN, e);
}

/* All of its pages are there since before. The descriptor's position is nobody's. */
static bool is_written(int fd, uint64_t offset_bytes, uint64_t bytes)
{
    const off_t hole = lseek(fd, (off_t)offset_bytes, SEEK_HOLE);
    return hole >= 0 && (uint64_t)hole >= offset_bytes + bytes;
}

int segment_take(const struct segment *segment, uint64_t offset_bytes, uint64_t bytes,
                 struct shd_err *e)
{
    CHECK(offset_bytes <= segment->bytes && bytes <= segment->bytes - offset_bytes);
    if (is_written(segment->fd, offset_bytes, bytes))
        return SHD_OK;
    reserve_lock();
    int r = reserve_check(bytes, RESERVE_SPARED, e);
    if (r == SHD_OK)
        r = reserve_pages(segment->fd, offset_bytes, bytes, NULL, e);
    reserve_unlock();
    return r;
}

int segment_check(int fd, enum segment_kind kind, uint64_t bytes, struct shd_err *e)
{
    const char *name = segment_kind_name(kind);
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0)
        return err_sys(e, SHD_ESEGMENT, "%s segment: descriptor %d is not a memfd", name, fd);
    const int needed = kind_seals(kind);
    const int refused = segment_kind_readonly(kind) ? 0 : F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;
    if ((seals & (needed | refused)) != needed)
        return err_set(e, SHD_ESEGMENT, "%s segment has seals %#x, needs %#x%s", name,
                       (unsigned)seals, (unsigned)needed,
                       refused != 0 ? " and to be writable" : "");
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_sys(e, SHD_ESEGMENT, "stat %s segment", name);
    if (bytes == 0 || bytes % SHD_PAGE_BYTES != 0 || bytes > BYTES_MAX)
        return err_set(e, SHD_ESEGMENT, "%s segment of %" PRIu64 " bytes, not whole pages", name,
                       bytes);
    if ((uint64_t)st.st_size < bytes) /* a mapping past the end is a SIGBUS */
        return err_set(e, SHD_ESEGMENT, "%s segment has %jd bytes, needs %" PRIu64, name,
                       (intmax_t)st.st_size, bytes);
    return SHD_OK;
}

int segment_map(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                struct shd_err *e)
{
    CHECK(bytes > 0 && bytes % SHD_PAGE_BYTES == 0);
    const int prot = segment_kind_readonly(kind) ? PROT_READ : PROT_READ | PROT_WRITE;
    void *base = map_whole(fd, prot, bytes);
    if (base == MAP_FAILED)
        return map_failed(e, "map segment of", bytes);
    if (kind == SEGMENT_INBOX || kind == SEGMENT_REQUESTS)
        madvise(base, bytes, MADV_DONTFORK); /* as in segment_place() */
    *ret_segment = (struct segment){ .fd = fd, .base = base, .bytes = bytes };
    return SHD_OK;
}

/* Of the mappings that begin in these bytes: what is mapped by huge pages. */
static uint64_t mapped_huge(const void *base, uint64_t bytes)
{
    char line[512];
    bool here = false;
    uint64_t sum = 0, first, end, kib;
    FILE *f = fopen("/proc/self/smaps", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &first, &end) == 2)
            here = first - (uintptr_t)base < bytes;
        else if (here && sscanf(line, "ShmemPmdMapped: %" SCNu64, &kib) == 1)
            sum += kib << 10;
    }
    if (f != NULL)
        fclose(f);
    return sum;
}

void segment_look_huge(struct segment *segment)
{
    const volatile uint8_t *base = segment->base;
    for (uint64_t at = 0; at + RESERVE_HUGE <= segment->bytes; at += RESERVE_HUGE)
        (void)base[at];
    segment->huge_bytes = segment->bytes >= RESERVE_HUGE
                              ? mapped_huge(segment->base, segment->bytes)
                              : 0;
}

void segment_close(struct segment *segment)
{
    if (segment->base != NULL)
        munmap(segment->base, segment->bytes);
    if (segment->fd >= 0)
        close(segment->fd);
    *segment = SEGMENT_CLOSED;
}

int segment_reserve(uint64_t bytes, void **ret_base, struct shd_err *e)
{
    CHECK(bytes > 0);
    void *base = sys_mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                          0);
    if (base == MAP_FAILED)
        return map_failed(e, "reserve", bytes);
    *ret_base = base;
    return SHD_OK;
}

int segment_place(void *addr, int fd, uint64_t offset_bytes, uint64_t bytes, bool writable,
                  struct shd_err *e)
{
    CHECK((uintptr_t)addr % SHD_PAGE_BYTES == 0);
    struct stat st;
    if (fstat(fd, &st) < 0)
        return err_sys(e, SHD_EIO, "stat segment to place");
    const uint64_t size = (uint64_t)st.st_size;
    if (bytes == 0 || bytes % SHD_PAGE_BYTES != 0 || offset_bytes % SHD_PAGE_BYTES != 0 ||
        offset_bytes > size || bytes > size - offset_bytes)
        return err_set(e, SHD_ERANGE,
                       "bytes %" PRIu64 "+%" PRIu64 " are not whole pages of a segment of %" PRIu64,
                       offset_bytes, bytes, size);
    const int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    /* What is read first maps its neighbours, too: all of it takes as long, what is not read does
     * not. A page that is written first is mapped alone. */
    const int now = writable ? MAP_POPULATE : 0;
    const void *p = sys_mmap(addr, bytes, prot, MAP_SHARED | MAP_FIXED | now, fd,
                             (off_t)offset_bytes);
    if (p == MAP_FAILED)
        return map_failed(e, "place", bytes);
    if (writable)
        madvise(addr, bytes,
                MADV_DONTFORK); /* a child must not write into its parent's gradients */
    return SHD_OK;
}

void segment_unreserve(void *base, uint64_t bytes)
{
    if (base != NULL)
        munmap(base, bytes);
}
