/* segment: what a receiver may and may not do with a descriptor it was passed. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/activity.h"
#include "proto/share/segment.h"
#include "proto/share/spec_segment.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define PAGE 4096u

static const enum segment_kind kinds[] = { SEGMENT_STATE, SEGMENT_PUBLISH, SEGMENT_INBOX,
                                           SEGMENT_BOARD };

static struct segment segment_of(enum segment_kind kind, uint64_t bytes)
{
    struct shd_err e;
    struct segment s = SEGMENT_CLOSED;
    EXPECT_OK(segment_new("test", kind, bytes, &s, &e), &e);
    return s;
}

TEST(kinds_have_names)
{
    EXPECT_STR(segment_kind_name(SEGMENT_STATE), "state");
    EXPECT_STR(segment_kind_name(SEGMENT_PUBLISH), "publish");
    EXPECT_STR(segment_kind_name(SEGMENT_INBOX), "inbox");
    EXPECT_STR(segment_kind_name(SEGMENT_BOARD), "board");
    EXPECT_STR(segment_kind_name(SEGMENT_LEDGER), "ledger");
    EXPECT_STR(segment_kind_name(SEGMENT_SPILL), "spill");
    EXPECT_STR(segment_kind_name((enum segment_kind)0), "?");
    EXPECT_STR(segment_kind_name(SEGMENT_ACTIVITY), "activity");
    EXPECT_STR(segment_kind_name(SEGMENT_SPEC), "spec");
    EXPECT_STR(segment_kind_name(SEGMENT_REQUESTS), "requests");
    EXPECT_STR(segment_kind_name(SEGMENT_REPLIES), "replies");
    EXPECT_STR(segment_kind_name((enum segment_kind)12), "?");
    EXPECT_STR(segment_kind_name((enum segment_kind) - 1), "?");
    EXPECT(segment_kind_readonly(SEGMENT_PUBLISH) && segment_kind_readonly(SEGMENT_BOARD));
    EXPECT(!segment_kind_readonly(SEGMENT_STATE) && !segment_kind_readonly(SEGMENT_INBOX));
    EXPECT(segment_kind_shared(SEGMENT_STATE) && segment_kind_shared(SEGMENT_ACTIVITY));
    EXPECT(segment_kind_readonly(SEGMENT_SPEC) && !segment_kind_readonly(SEGMENT_STAGE));
    EXPECT(segment_kind_shared(SEGMENT_STAGE) && segment_kind_shared(SEGMENT_SPEC));
    EXPECT(!segment_kind_shared(SEGMENT_LEDGER) && !segment_kind_shared(SEGMENT_SPILL));
    EXPECT(segment_kind_readonly(SEGMENT_REPLIES) && !segment_kind_readonly(SEGMENT_REQUESTS));
    EXPECT(segment_kind_shared(SEGMENT_REPLIES) && segment_kind_shared(SEGMENT_REQUESTS));
    EXPECT(!segment_kind_shared(0) && !segment_kind_shared(12));
}

TEST(new_segment_is_zeroed_whole_pages_and_writable_by_its_maker)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct segment s = segment_of(kinds[i], PAGE + 1);
        EXPECT_EQ(s.bytes, 2 * PAGE);
        unsigned char *p = s.base;
        for (uint64_t b = 0; b < s.bytes; b++)
            EXPECT_EQ(p[b], 0);
        memset(p, 0xab, s.bytes);
        EXPECT((fcntl(s.fd, F_GETFD) & FD_CLOEXEC) != 0);
        segment_close(&s);
        EXPECT(s.fd == -1 && s.base == NULL);
        segment_close(&s); /* a no-op */
    }
}

TEST(receiver_reads_what_the_maker_writes)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct shd_err e;
        struct segment made = segment_of(kinds[i], 2 * PAGE), got;
        const int fd = dup(made.fd);
        EXPECT_OK(segment_check(fd, kinds[i], 2 * PAGE, &e), &e);
        EXPECT_OK(segment_map(fd, kinds[i], 2 * PAGE, &got, &e), &e);
        EXPECT_EQ(got.fd, fd);
        ((char *)made.base)[PAGE] = 'x';
        EXPECT_EQ(((char *)got.base)[PAGE], 'x');
        if (!segment_kind_readonly(kinds[i])) {
            ((char *)got.base)[7] = 'y';
            EXPECT_EQ(((char *)made.base)[7], 'y');
        }
        segment_close(&got);
        segment_close(&made);
    }
}

TEST(readonly_kinds_cannot_be_made_writable)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        if (!segment_kind_readonly(kinds[i]))
            continue;
        struct shd_err e;
        struct segment made = segment_of(kinds[i], PAGE), got;
        const int fd = dup(made.fd);
        EXPECT_OK(segment_map(fd, kinds[i], PAGE, &got, &e), &e);
        EXPECT(mprotect(got.base, PAGE, PROT_READ | PROT_WRITE) < 0);
        EXPECT(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
        EXPECT(pwrite(fd, "x", 1, 0) < 0);
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const int again = open(path, O_RDWR | O_CLOEXEC); /* a fresh description of the file */
        if (again >= 0) {
            EXPECT(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) == MAP_FAILED);
            EXPECT(pwrite(again, "x", 1, 0) < 0);
            close(again);
        }
        EXPECT_EQ(((char *)made.base)[0], 0);
        ((char *)made.base)[0] = 'm'; /* the maker still writes */
        EXPECT_EQ(((char *)got.base)[0], 'm');
        segment_close(&got);
        segment_close(&made);
    }
}

TEST(size_and_seals_are_fixed)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct segment s = segment_of(kinds[i], 2 * PAGE);
        EXPECT(ftruncate(s.fd, PAGE) < 0 && errno == EPERM);
        EXPECT(ftruncate(s.fd, 3 * PAGE) < 0 && errno == EPERM);
        EXPECT(fallocate(s.fd, 0, 0, 3 * PAGE) < 0);
        EXPECT(fcntl(s.fd, F_ADD_SEALS, F_SEAL_WRITE) < 0);
        segment_close(&s);
    }
}

static int memfd_sealed(uint64_t bytes, int seals)
{
    const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    EXPECT(seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void expect_refused(int fd, enum segment_kind kind, uint64_t bytes, const char *text)
{
    struct shd_err e;
    EXPECT_STATUS(segment_check(fd, kind, bytes, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, text);
    close(fd);
}

TEST(unsealed_files_are_refused)
{
    const int size = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    expect_refused(memfd_sealed(PAGE, 0), SEGMENT_INBOX, PAGE, "inbox segment has seals 0, needs");
    expect_refused(memfd_sealed(PAGE, F_SEAL_SHRINK | F_SEAL_GROW), SEGMENT_INBOX, PAGE, "seals");
    expect_refused(memfd_sealed(PAGE, F_SEAL_GROW | F_SEAL_SEAL), SEGMENT_STATE, PAGE, "seals");
    expect_refused(memfd_sealed(PAGE, F_SEAL_SHRINK | F_SEAL_SEAL), SEGMENT_STATE, PAGE, "seals");
    expect_refused(memfd_sealed(PAGE, size), SEGMENT_PUBLISH, PAGE, "publish segment has seals");
    expect_refused(memfd_sealed(PAGE, size), SEGMENT_BOARD, PAGE, "board segment has seals");
}

TEST(writable_kinds_sealed_against_writing_are_refused)
{
    const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE;
    expect_refused(memfd_sealed(PAGE, all), SEGMENT_INBOX, PAGE, "seals");
    const int written = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_WRITE;
    expect_refused(memfd_sealed(PAGE, written), SEGMENT_STATE, PAGE, "seals");
}

TEST(ordinary_files_are_refused)
{
    expect_refused(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), SEGMENT_PUBLISH, PAGE, "memfd");
    expect_refused(open("/dev/zero", O_RDWR | O_CLOEXEC), SEGMENT_INBOX, PAGE, "memfd");
    char path[] = "/dev/shm/shd-test-XXXXXX"; /* tmpfs files do have seals: F_SEAL_SEAL */
    const int fd = mkstemp(path);
    if (fd >= 0) {
        unlink(path);
        EXPECT(ftruncate(fd, PAGE) == 0);
        expect_refused(fd, SEGMENT_INBOX, PAGE, "inbox segment");
    }
    struct shd_err e;
    EXPECT_STATUS(segment_check(-1, SEGMENT_INBOX, PAGE, &e), SHD_ESEGMENT);
}

TEST(wrong_sizes_are_refused)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {
        { 2 * PAGE, "segment has 4096 bytes, needs 8192" },
        { 0, "not whole pages" },
        { 1, "not whole pages" },
        { PAGE + 1, "not whole pages" },
        { UINT64_MAX - PAGE + 1, "not whole pages" },
        { UINT64_C(1) << 62, "needs" },
    };
    struct segment s = segment_of(SEGMENT_PUBLISH, PAGE);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        expect_refused(dup(s.fd), SEGMENT_PUBLISH, cases[i].bytes, cases[i].text);
    segment_close(&s);
}

TEST(impossible_sizes_are_errors_and_leak_nothing)
{
    const int before = fds_open();
    struct shd_err e;
    struct segment s = SEGMENT_CLOSED;
    EXPECT_STATUS(segment_new("test", SEGMENT_STATE, UINT64_MAX, &s, &e), SHD_ENOMEM);
    EXPECT(segment_new("test", SEGMENT_STATE, UINT64_C(1) << 61, &s, &e) < 0);
    EXPECT_HAS(e.text, "2305843009213693952");
    EXPECT_EQ(s.fd, -1);
    void *base = NULL;
    EXPECT_STATUS(segment_reserve(UINT64_C(1) << 62, &base, &e), SHD_ENOMEM);
    EXPECT(base == NULL);
    EXPECT_EQ(fds_open(), before);
}

TEST(two_segments_side_by_side_read_as_one_array)
{
    struct shd_err e;
    struct segment a = segment_of(SEGMENT_PUBLISH, 4 * PAGE);
    struct segment b = segment_of(SEGMENT_PUBLISH, 4 * PAGE);
    const uint64_t words = PAGE / sizeof(uint64_t);
    for (uint64_t i = 0; i < 4 * words; i++) {
        ((uint64_t *)a.base)[i] = 1000000 + i;
        ((uint64_t *)b.base)[i] = 2000000 + i;
    }
    void *base;
    EXPECT_OK(segment_reserve(3 * PAGE, &base, &e), &e);
    EXPECT_OK(segment_place(base, a.fd, 2 * PAGE, 2 * PAGE, false, &e), &e);
    EXPECT_OK(segment_place((char *)base + 2 * PAGE, b.fd, PAGE, PAGE, false, &e), &e);
    const uint64_t *unit = base;
    for (uint64_t i = 0; i < 3 * words; i++) {
        const uint64_t expected = i < 2 * words ? 1000000 + 2 * words + i : 2000000 + i - words;
        EXPECT_EQ(unit[i], expected);
    }
    ((uint64_t *)b.base)[words] = 7; /* live, not a copy */
    EXPECT_EQ(unit[2 * words], 7);
    EXPECT(mprotect(base, 3 * PAGE, PROT_READ | PROT_WRITE) < 0);
    segment_unreserve(base, 3 * PAGE);
    segment_unreserve(NULL, 0);
    segment_close(&a);
    segment_close(&b);
}

#define HUGE (UINT64_C(2) << 20)

/* So many bytes of the memory at base are mapped by huge pages. */
static uint64_t huge_bytes_at(const void *base)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    EXPECT(f != NULL);
    char line[512];
    bool here = false;
    uint64_t kib = 0;
    while (fgets(line, sizeof line, f) != NULL) {
        unsigned long first, end;
        if (sscanf(line, "%lx-%lx ", &first, &end) == 2)
            here = (uintptr_t)base >= first && (uintptr_t)base < end;
        else if (here)
            sscanf(line, "ShmemPmdMapped: %" SCNu64, &kib);
    }
    fclose(f);
    return kib << 10;
}

/* Whether the host has `bytes` of huge pages for a memfd, asked without the segments' code. */
static bool host_has_huge(uint64_t bytes)
{
    const int fd = memfd_create("test", MFD_CLOEXEC);
    EXPECT(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    uint8_t *room = mmap(NULL, bytes + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(room != MAP_FAILED);
    uint8_t *base = room + (HUGE - (uintptr_t)room % HUGE) % HUGE;
    EXPECT(mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == base);
    memset(base, 1, bytes);
    const bool has = madvise(base, bytes, 25 /* MADV_COLLAPSE */) == 0;
    munmap(room, bytes + HUGE);
    close(fd);
    return has;
}

TEST(large_segments_are_in_huge_pages_where_the_host_has_them)
{
    static const enum segment_kind huge[] = { SEGMENT_STATE, SEGMENT_PUBLISH, SEGMENT_INBOX };
    if (!host_has_huge(3 * HUGE))
        SKIP("no huge pages for a memfd on this host");
    for (size_t i = 0; i < ARRAY_SIZE(huge); i++) {
        struct segment s = segment_of(huge[i], 2 * HUGE + PAGE), other = SEGMENT_CLOSED;
        EXPECT_EQ(s.huge_bytes, 2 * HUGE);
        EXPECT_EQ(huge_bytes_at(s.base), 2 * HUGE);
        for (uint64_t b = 0; b < s.bytes; b++)
            if (((uint8_t *)s.base)[b] != 0)
                FAIL("%s: byte %" PRIu64 " is not 0", segment_kind_name(huge[i]), b);

        struct shd_err e;
        EXPECT_OK(segment_map(dup(s.fd), huge[i], s.bytes, &other, &e), &e);
        EXPECT_EQ(other.huge_bytes, 0);
        segment_look_huge(&other);
        EXPECT_EQ(other.huge_bytes, 2 * HUGE);
        const volatile uint8_t *seen = other.base;
        for (uint64_t b = 0; b < s.bytes; b += PAGE)
            EXPECT_EQ(seen[b], 0);
        EXPECT_EQ(huge_bytes_at(other.base), 2 * HUGE);
        segment_close(&other);
        segment_close(&s);
    }
    struct segment board = segment_of(SEGMENT_BOARD, 2 * HUGE); /* in small ones */
    EXPECT_EQ(board.huge_bytes, 0);
    segment_look_huge(&board);
    EXPECT_EQ(board.huge_bytes, 0);
    segment_close(&board);
}

TEST(writing_one_array_scatters_to_two_inboxes)
{
    struct shd_err e;
    struct segment a = segment_of(SEGMENT_INBOX, 2 * PAGE);
    struct segment b = segment_of(SEGMENT_INBOX, 2 * PAGE);
    void *base;
    EXPECT_OK(segment_reserve(2 * PAGE, &base, &e), &e);
    EXPECT_OK(segment_place(base, a.fd, PAGE, PAGE, true, &e), &e);
    EXPECT_OK(segment_place((char *)base + PAGE, b.fd, 0, PAGE, true, &e), &e);
    for (uint32_t i = 0; i < 2 * PAGE; i++)
        ((unsigned char *)base)[i] = (unsigned char)(i / PAGE + 1);
    EXPECT_EQ(((char *)a.base)[0], 0);
    EXPECT_EQ(((char *)a.base)[PAGE], 1);
    EXPECT_EQ(((char *)a.base)[2 * PAGE - 1], 1);
    EXPECT_EQ(((char *)b.base)[0], 2);
    EXPECT_EQ(((char *)b.base)[PAGE], 0);
    segment_unreserve(base, 2 * PAGE);
    segment_close(&a);
    segment_close(&b);
}

/* Of shared memory, that this process has in its page table. */
static long mapped_kib(void)
{
    char line[256];
    long kib = -1;
    FILE *f = fopen("/proc/self/status", "re");
    CHECK(f != NULL);
    while (kib < 0 && fgets(line, sizeof line, f) != NULL)
        sscanf(line, "RssShmem: %ld kB", &kib);
    fclose(f);
    CHECK(kib >= 0);
    return kib;
}

/* Who attaches pays for what it reads, when it does. */
TEST(placed_pages_are_mapped_at_once_where_they_are_written)
{
    enum { PAGES = 2048 };
    struct shd_err e;
    struct segment read = segment_of(SEGMENT_PUBLISH, PAGES * PAGE);
    struct segment written = segment_of(SEGMENT_INBOX, PAGES * PAGE);
    void *base;
    EXPECT_OK(segment_reserve(2 * PAGES * PAGE, &base, &e), &e);
    const long before = mapped_kib();
    EXPECT_OK(segment_place(base, read.fd, 0, PAGES * PAGE, /* writable= */ false, &e), &e);
    EXPECT(mapped_kib() - before < 1024);
    EXPECT_OK(segment_place((char *)base + PAGES * PAGE, written.fd, 0, PAGES * PAGE,
                            /* writable= */ true, &e),
              &e);
    EXPECT(mapped_kib() - before > 4 * PAGES - 1024);
    segment_unreserve(base, 2 * PAGES * PAGE);
    segment_close(&read);
    segment_close(&written);
}

TEST(placing_outside_the_segment_is_an_error)
{
    static const struct {
        uint64_t offset, bytes;
    } cases[] = {
        { 0, 0 },           { 0, 3 * PAGE },
        { PAGE, 2 * PAGE }, { 2 * PAGE, PAGE },
        { 3 * PAGE, PAGE }, { 1, PAGE },
        { 0, PAGE + 1 },    { UINT64_MAX - PAGE + 1, 2 * PAGE }, /* the sum wraps */
    };
    struct shd_err e;
    struct segment s = segment_of(SEGMENT_PUBLISH, 2 * PAGE);
    void *base;
    EXPECT_OK(segment_reserve(4 * PAGE, &base, &e), &e);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        EXPECT_STATUS(segment_place(base, s.fd, cases[i].offset, cases[i].bytes, false, &e),
                      SHD_ERANGE);
        EXPECT_HAS(e.text, "segment of 8192");
    }
    EXPECT_STATUS(segment_place(base, s.fd, 0, PAGE, true, &e), SHD_EIO); /* sealed */
    EXPECT_STATUS(segment_place(base, -1, 0, PAGE, true, &e), SHD_EIO);
    segment_unreserve(base, 4 * PAGE);
    segment_close(&s);
}

static enum sys_kind fault_kind;
static int fault_code;

static int fault_once(enum sys_kind kind)
{
    return kind == fault_kind ? fault_code : 0;
}

static void expect_new_fails(enum sys_kind kind, int code, int status, const char *text)
{
    struct shd_err e;
    struct segment s = SEGMENT_CLOSED;
    fault_kind = kind;
    fault_code = code;
    sys_fault = fault_once;
    const int r = segment_new("test", SEGMENT_INBOX, PAGE, &s, &e);
    sys_fault = NULL;
    EXPECT_EQ(r, status);
    EXPECT_HAS(e.text, text);
    EXPECT_EQ(s.fd, -1);
}

TEST(failed_system_calls_are_errors_and_leak_nothing)
{
    const int before = fds_open();
    expect_new_fails(SYS_OPEN, EMFILE, SHD_ENOMEM, "Too many open files");
    expect_new_fails(SYS_OPEN, EPERM, SHD_EIO, "create inbox segment");
    expect_new_fails(SYS_MAP, ENOMEM, SHD_ENOMEM, "map new segment of 4096 bytes");
    expect_new_fails(SYS_MAP, EAGAIN, SHD_EIO, "map new segment of 4096 bytes");
    EXPECT_EQ(fds_open(), before);
}

static uint32_t fault_after; /* calls of the kind that succeed first */

static int fault_later(enum sys_kind kind)
{
    if (kind != fault_kind || fault_after-- > 0)
        return 0;
    fault_after = 0;
    return fault_code;
}

/* Lines of /proc/self/maps. */
static uint64_t mappings(void)
{
    FILE *f = fopen("/proc/self/maps", "re");
    EXPECT(f != NULL);
    uint64_t lines = 0;
    for (int c; (c = fgetc(f)) != EOF;)
        lines += c == '\n';
    fclose(f);
    return lines;
}

TEST(failed_system_calls_of_a_large_segment_leak_nothing)
{
    static const struct {
        enum sys_kind kind;
        uint32_t after;
        int code;
        const char *text;
    } cases[] = {
        { SYS_MAP, 0, ENOMEM, "map new segment of" },
        { SYS_MAP, 1, ENOMEM, "map new segment of" }, /* in the room that was made for it */
        { SYS_RESERVE, 0, ENOSPC, "take" },
        { SYS_RESERVE, 1, ENOSPC, "take" }, /* one huge page was begun */
        { SYS_RESERVE, 2, ENOSPC, "take" },
    };
    struct segment warm = segment_of(SEGMENT_STATE, 2 * HUGE); /* so that the heap has grown */
    segment_close(&warm);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct shd_err e;
        struct segment s = SEGMENT_CLOSED;
        const int fds = fds_open();
        const uint64_t before = mappings();
        fault_kind = cases[i].kind;
        fault_code = cases[i].code;
        fault_after = cases[i].after;
        sys_fault = fault_later;
        const int r = segment_new("test", SEGMENT_STATE, 2 * HUGE, &s, &e);
        sys_fault = NULL;
        EXPECT_STATUS(r, SHD_ENOMEM);
        EXPECT_HAS(e.text, cases[i].text);
        EXPECT_EQ(s.fd, -1);
        EXPECT_EQ(fds_open(), fds);
        EXPECT_EQ(mappings(), before);
    }
}

TEST(failed_map_leaves_the_descriptor_with_the_caller)
{
    struct shd_err e;
    struct segment made = segment_of(SEGMENT_INBOX, PAGE), got = SEGMENT_CLOSED;
    fault_kind = SYS_MAP;
    fault_code = ENOMEM;
    sys_fault = fault_once;
    const int r = segment_map(made.fd, SEGMENT_INBOX, PAGE, &got, &e);
    sys_fault = NULL;
    EXPECT_STATUS(r, SHD_ENOMEM);
    EXPECT_EQ(got.fd, -1);
    EXPECT(fcntl(made.fd, F_GETFD) >= 0);
    segment_close(&made);
}

TEST(too_many_mappings_name_the_limit)
{
    if (SANITIZE_THREAD)
        SKIP("ThreadSanitizer needs mappings of its own and dies without");
    unsigned long max = 0;
    FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
    if (f == NULL || fscanf(f, "%lu", &max) != 1 || max > 300000)
        SKIP("vm.max_map_count is not known or too large to fill");
    fclose(f);
    struct shd_err e;
    struct segment s = segment_of(SEGMENT_INBOX, PAGE);
    const uint64_t bytes = (uint64_t)(max + 64) * PAGE;
    void *base;
    EXPECT_OK(segment_reserve(bytes, &base, &e), &e);
    int r = SHD_OK;
    for (uint64_t i = 0; r == SHD_OK && i < max + 64; i++) /* the same page: none merge */
        r = segment_place((char *)base + i * PAGE, s.fd, 0, PAGE, true, &e);
    /* AddressSanitizer itself maps memory where a large mapping ends. */
    EXPECT_EQ(munmap(base, 64 * PAGE), 0);
    segment_unreserve(base, bytes);
    segment_close(&s);
    EXPECT_STATUS(r, SHD_ENOMEM);
    EXPECT_HAS(e.text, "the limit vm.max_map_count is");
}

/* What was written needs no room a second time: where there is none left it is used again. */
TEST(pages_that_are_there_are_not_taken_again)
{
    struct shd_err e;
    struct segment s = segment_of(SEGMENT_SPILL, 8 * PAGE);
    EXPECT_OK(segment_take(&s, 2 * PAGE, 3 * PAGE, &e), &e);
    memset((uint8_t *)s.base + 2 * PAGE, 1, 3 * PAGE);
    fault_kind = SYS_RESERVE;
    fault_code = ENOSPC;
    sys_fault = fault_once;
    const int again = segment_take(&s, 2 * PAGE, 3 * PAGE, &e);
    const int before = segment_take(&s, PAGE, 2 * PAGE, &e),
              after = segment_take(&s, 4 * PAGE, 2 * PAGE, &e);
    sys_fault = NULL;
    EXPECT_STATUS(again, SHD_OK);
    EXPECT_STATUS(before, SHD_ENOMEM);
    EXPECT_STATUS(after, SHD_ENOMEM);
    EXPECT_EQ(fallocate(s.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 8 * PAGE), 0);
    sys_fault = fault_once;
    const int punched = segment_take(&s, 2 * PAGE, 3 * PAGE, &e);
    sys_fault = NULL;
    EXPECT_STATUS(punched, SHD_ENOMEM);
    segment_close(&s);
}

/* -- Specs --------------------------------------------------------------------------------------
 */

TEST(spec_segment_is_read_as_it_was_written)
{
    static char json[3 * PAGE + 5], read[sizeof json];
    struct shd_err e = { 0 };
    struct segment s;
    struct spec_stub stub;
    for (size_t i = 0; i < sizeof json; i++)
        json[i] = (char)('a' + i % 25);
    EXPECT_OK(spec_stub_of(json, sizeof json, &stub, &e), &e);
    EXPECT_EQ(stub.bytes, sizeof json);
    EXPECT_OK(spec_segment_new(json, sizeof json, &s, &e), &e);
    EXPECT_EQ(s.bytes, 4 * PAGE);
    EXPECT_OK(spec_segment_check(s.fd, sizeof json, &e), &e);
    EXPECT_OK(spec_segment_read(s.fd, sizeof json, read, &e), &e);
    EXPECT(memcmp(read, json, sizeof json) == 0);
    EXPECT_OK(spec_stub_check(&stub, read, &e), &e);
    read[sizeof json - 1]++; /* the last byte counts */
    EXPECT_STATUS(spec_stub_check(&stub, read, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "spec of 12293 bytes has SHA-256 ");
    segment_close(&s);
}

TEST(spec_segments_of_other_sizes_are_refused)
{
    static char read[3 * PAGE];
    struct shd_err e = { 0 };
    struct segment s;
    EXPECT_STATUS(spec_segment_new("", 0, &s, &e), SHD_ERANGE);
    EXPECT_STATUS(spec_segment_new("x", 1, &s, &e), SHD_ERANGE);
    EXPECT_HAS(e.text,
               "a spec of 1 bytes in a segment, must be 4096 to 67108864: a smaller one is in");
    EXPECT_STATUS(spec_segment_new("", SPEC_JSON_BYTES_MAX + 1, &s, &e), SHD_ERANGE);
    EXPECT_OK(spec_segment_new(read, PAGE, &s, &e), &e);
    EXPECT_OK(spec_segment_check(s.fd, PAGE, &e), &e);
    EXPECT_STATUS(spec_segment_check(s.fd, PAGE - 1, &e), SHD_ERANGE);
    EXPECT_STATUS(spec_segment_check(s.fd, PAGE + 1, &e), SHD_ESEGMENT);
    EXPECT_STATUS(spec_segment_check(s.fd, 0, &e), SHD_ERANGE);
    EXPECT_STATUS(spec_segment_check(s.fd, UINT64_MAX, &e), SHD_ERANGE);
    EXPECT_STATUS(spec_segment_read(s.fd, 2 * PAGE, read, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "ends at byte 4096 of 8192");
    EXPECT_EQ(ftruncate(s.fd, 0), -1); /* sealed */
    segment_close(&s);
    s = segment_of(SEGMENT_STAGE, PAGE); /* others may write there */
    EXPECT_STATUS(spec_segment_check(s.fd, PAGE, &e), SHD_ESEGMENT);
    segment_close(&s);
}

TEST_MAIN()
