/* segment_file: segments on files, and what a successor takes for one. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/segment_file.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define PAGE 4096u
#define MIB  (UINT64_C(1) << 20)

static char dir[64];

static const char *make_dir(void)
{
    snprintf(dir, sizeof dir, "/var/tmp/shd-test-XXXXXX");
    CHECK(mkdtemp(dir) != NULL);
    return dir;
}

/* Nothing may be left in it. */
static void remove_dir(void)
{
    EXPECT_EQ(rmdir(dir), 0);
}

static struct segment_home home_of(const char *text)
{
    struct shd_err e = { 0 };
    struct segment_home home;
    EXPECT_OK(segment_home_parse("--state", text, &home, &e), &e);
    return home;
}

TEST(homes_are_memory_or_an_absolute_directory)
{
    static char longer[700];
    static const struct {
        const char *text, *why;
    } wrong[] = {
        { "", "--state '' is neither memory nor file:DIR" },
        { "mem", "--state 'mem' is neither" },
        { "/var/tmp", "is neither memory nor file:DIR" },
        { "file:", "'file:': the directory is not an absolute path" },
        { "file:var/tmp", "'file:var/tmp': the directory is not an absolute path" },
        { "FILE:/var/tmp", "is neither" },
        { longer, "a path of 690 bytes, at most 511" },
    };
    struct shd_err e = { 0 };
    struct segment_home home = { .file = true };
    snprintf(longer, sizeof longer, "file:/%0689d", 0);
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        EXPECT_STATUS(segment_home_parse("--state", wrong[i].text, &home, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, wrong[i].why);
        EXPECT(home.file); /* untouched */
    }
    EXPECT(!home_of("memory").file);
    home = home_of("file:/var/tmp");
    EXPECT(home.file);
    EXPECT_STR(home.dir, "/var/tmp");
}

TEST(new_segment_is_zeroed_without_a_name_and_has_all_its_blocks)
{
    struct shd_err e = { 0 };
    struct segment s = SEGMENT_CLOSED;
    struct stat st;
    const int before = fds_open();
    EXPECT_OK(segment_file_new(make_dir(), SEGMENT_STATE, 3 * PAGE + 1, &s, &e), &e);
    EXPECT(s.file && s.bytes == 4 * PAGE);
    EXPECT_EQ(fstat(s.fd, &st), 0);
    EXPECT(st.st_size == 4 * PAGE && st.st_nlink == 0 && st.st_blocks >= 4 * PAGE / 512);
    EXPECT_EQ(st.st_mode & 07777, 0600);
    EXPECT((fcntl(s.fd, F_GETFD) & FD_CLOEXEC) != 0);
    for (uint64_t b = 0; b < s.bytes; b++)
        EXPECT_EQ(((uint8_t *)s.base)[b], 0);
    memset(s.base, 0x5a, s.bytes);
    char path[64], name[128];
    snprintf(path, sizeof path, "/proc/self/fd/%d", s.fd);
    snprintf(name, sizeof name, "%s/again", dir);
    EXPECT(linkat(AT_FDCWD, path, AT_FDCWD, name, AT_SYMLINK_FOLLOW) < 0); /* no name, ever */
    segment_close(&s);
    EXPECT(s.fd == -1 && !s.file);
    EXPECT_EQ(fds_open(), before);
    remove_dir();
}

TEST(successor_maps_what_its_predecessor_wrote)
{
    struct shd_err e = { 0 };
    struct segment made = SEGMENT_CLOSED, got = SEGMENT_CLOSED;
    bool file = false;
    EXPECT_OK(segment_file_new(make_dir(), SEGMENT_STAGE, 2 * PAGE, &made, &e), &e);
    memcpy(made.base, "kept", sizeof "kept");
    const int fd = dup(made.fd);
    EXPECT_OK(segment_kept_check(fd, SEGMENT_STAGE, 2 * PAGE, &file, &e), &e);
    EXPECT(file);
    EXPECT_OK(segment_kept_map(fd, SEGMENT_STAGE, 2 * PAGE, &got, &e), &e);
    EXPECT(got.file && got.fd == fd);
    segment_close(&made);
    EXPECT_STR(got.base, "kept");
    ((char *)got.base)[PAGE] = 'x';
    segment_close(&got);
    EXPECT_OK(segment_new("test", SEGMENT_STATE, 2 * PAGE, &made, &e),
              &e); /* nor else one in memory */
    EXPECT_OK(segment_kept_map(dup(made.fd), SEGMENT_STATE, 2 * PAGE, &got, &e), &e);
    EXPECT(!got.file && !made.file);
    segment_close(&got);
    segment_close(&made);
    remove_dir();
}

TEST(lent_segment_is_written_by_its_maker_alone)
{
    struct shd_err e = { 0 };
    struct segment s = SEGMENT_CLOSED, read = SEGMENT_CLOSED;
    struct stat st;
    char path[64];
    int fd = -1;
    const int before = fds_open();
    EXPECT_OK(segment_file_room(make_dir(), SEGMENT_PUBLISH, 2 * PAGE - 1, &fd, &e), &e);
    EXPECT_OK(segment_file_lend(fd, SEGMENT_PUBLISH, 2 * PAGE, &s, &e), &e);
    EXPECT(s.file && s.bytes == 2 * PAGE && fds_open() == before + 1);
    EXPECT_OK(segment_shared_check(s.fd, SEGMENT_PUBLISH, 2 * PAGE, &e), &e);
    EXPECT_OK(segment_map(dup(s.fd), SEGMENT_PUBLISH, 2 * PAGE, &read, &e), &e);
    strcpy(s.base, "lent");
    EXPECT_STR(read.base, "lent");
    EXPECT_EQ(fstat(s.fd, &st), 0);
    EXPECT_EQ(st.st_mode & 07777, 0400);
    EXPECT(sys_mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, s.fd, 0) == MAP_FAILED);
    EXPECT(mprotect(read.base, PAGE, PROT_READ | PROT_WRITE) < 0 && errno == EACCES);
    EXPECT(ftruncate(s.fd, 0) < 0 && write(s.fd, "x", 1) < 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", s.fd);
    if (geteuid() != 0) /* who may do everything */
        EXPECT(open(path, O_RDWR | O_CLOEXEC) < 0 && errno == EACCES);
    segment_close(&read);
    segment_close(&s);
    EXPECT_EQ(fds_open(), before);
    remove_dir();
}

/* What a receiver is handed in the place of one. */
TEST(what_is_not_lent_is_refused_by_who_receives_it)
{
    struct shd_err e = { 0 };
    struct segment s;
    char path[64], name[128];
    int fd = -1;
    EXPECT_OK(segment_file_room(make_dir(), SEGMENT_PUBLISH, 2 * PAGE, &fd, &e), &e);
    EXPECT_STATUS(segment_shared_check(fd, SEGMENT_PUBLISH, 2 * PAGE, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "publish segment is a file that is open to be written");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int reads = open(path, O_RDONLY | O_CLOEXEC);
    EXPECT_OK(segment_shared_check(reads, SEGMENT_PUBLISH, 2 * PAGE, &e), &e);
    for (enum segment_kind kind = SEGMENT_STATE; kind <= SEGMENT_REPLIES; kind++)
        if (kind != SEGMENT_PUBLISH)
            EXPECT_STATUS(segment_shared_check(reads, kind, 2 * PAGE, &e), SHD_ESEGMENT);
    EXPECT_STATUS(segment_shared_check(reads, SEGMENT_PUBLISH, 3 * PAGE, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "a file of another size");
    EXPECT_EQ(fchmod(fd, 0640), 0);
    EXPECT_STATUS(segment_shared_check(reads, SEGMENT_PUBLISH, 2 * PAGE, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "a file that others may open");
    EXPECT_STATUS(segment_file_lend(fd, SEGMENT_PUBLISH, 2 * PAGE, &s, &e), SHD_ESEGMENT);
    EXPECT_EQ(fchmod(fd, 0600), 0);
    EXPECT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, PAGE), 0);
    EXPECT_STATUS(segment_shared_check(reads, SEGMENT_PUBLISH, 2 * PAGE, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "a file without all of its blocks");
    close(reads);
    close(fd);
    snprintf(name, sizeof name, "%s/named", dir);
    fd = open(name, O_RDONLY | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_STATUS(segment_shared_check(fd, SEGMENT_PUBLISH, PAGE, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "a file with a name");
    EXPECT_EQ(unlink(name), 0);
    close(fd);
    EXPECT_STATUS(segment_file_room("/var/tmp/none-such", SEGMENT_PUBLISH, PAGE, &fd, &e),
                  SHD_EINVAL);
    remove_dir();
}

/* A descriptor of a file in dir, as it should be but for what the caller changes. */
static int file_of(uint64_t bytes)
{
    char path[128];
    snprintf(path, sizeof path, "%s/file-XXXXXX", dir);
    const int fd = mkostemp(path, O_CLOEXEC);
    CHECK(fd >= 0 && unlink(path) == 0 && fallocate(fd, 0, 0, (off_t)bytes) == 0);
    return fd;
}

static void expect_refused(int fd, uint64_t bytes, const char *why)
{
    struct shd_err e = { 0 };
    struct segment s = SEGMENT_CLOSED;
    EXPECT_STATUS(segment_kept_map(fd, SEGMENT_STATE, bytes, &s, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, why);
    EXPECT_EQ(s.fd, -1);
    EXPECT(fcntl(fd, F_GETFD) >= 0); /* the caller's still */
    close(fd);
}

TEST(what_is_no_segment_on_a_file_is_refused_by_name)
{
    char path[128], proc[64];
    struct shd_err e = { 0 };
    struct segment s;
    make_dir();
    int fd = file_of(2 * PAGE);
    EXPECT_OK(segment_kept_map(fd, SEGMENT_STATE, 2 * PAGE, &s, &e), &e); /* else for no reason */
    segment_close(&s);
    fd = file_of(2 * PAGE);
    EXPECT_EQ(ftruncate(fd, PAGE), 0); /* a mapping past its end is a SIGBUS */
    expect_refused(fd, 2 * PAGE, "a file of another size");
    expect_refused(file_of(3 * PAGE), 2 * PAGE, "a file of another size: it has mode 100600");
    fd = file_of(2 * PAGE);
    EXPECT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, PAGE, PAGE), 0);
    expect_refused(fd, 2 * PAGE, "a file without all of its blocks");
    fd = file_of(2 * PAGE);
    EXPECT_EQ(fchmod(fd, 0640), 0);
    expect_refused(fd, 2 * PAGE, "a file that others may open");
    fd = file_of(2 * PAGE);
    snprintf(proc, sizeof proc, "/proc/self/fd/%d", fd);
    const int readonly = open(proc, O_RDONLY | O_CLOEXEC);
    close(fd);
    expect_refused(readonly, 2 * PAGE, "not open to read and write");
    fd = file_of(2 * PAGE);
    if (fchown(fd, 12345, (gid_t)-1) == 0)
        expect_refused(fd, 2 * PAGE, "another user's file");
    else
        close(fd);
    snprintf(path, sizeof path, "%s/named", dir);
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    EXPECT(fd >= 0 && fallocate(fd, 0, 0, 2 * PAGE) == 0);
    expect_refused(fd, 2 * PAGE, "a file with a name");
    EXPECT_EQ(unlink(path), 0);
    expect_refused(open("/dev/zero", O_RDWR | O_CLOEXEC), 2 * PAGE, "not a memfd");
    fd = memfd_create("test", MFD_CLOEXEC); /* without seals: neither the one nor the other */
    EXPECT(fd >= 0 && fallocate(fd, 0, 0, 2 * PAGE) == 0);
    expect_refused(fd, 2 * PAGE, "a file that others may open");
    fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT(fd >= 0 && fallocate(fd, 0, 0, 2 * PAGE) == 0);
    expect_refused(fd, 2 * PAGE, "seals 0");
    static const uint64_t sizes[] = { 0, 1, PAGE + 1, UINT64_MAX - PAGE + 1 };
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        expect_refused(file_of(2 * PAGE), sizes[i], "not whole pages");
    remove_dir();
}

static void expect_no_segment(const char *in, uint64_t bytes, int status, const char *why)
{
    struct shd_err e = { 0 };
    struct segment s = SEGMENT_CLOSED;
    const int before = fds_open();
    EXPECT_STATUS(segment_file_new(in, SEGMENT_STATE, bytes, &s, &e), status);
    EXPECT_HAS(e.text, why);
    EXPECT_EQ(s.fd, -1);
    EXPECT_EQ(fds_open(), before);
}

TEST(directories_that_will_not_do_are_named)
{
    char path[128], why[200];
    make_dir();
    snprintf(path, sizeof path, "%s/missing", dir);
    snprintf(why, sizeof why, "directory '%s' is not there", path);
    expect_no_segment(path, PAGE, SHD_EINVAL, why);
    expect_no_segment("/proc/self/exe", PAGE, SHD_EINVAL, "'/proc/self/exe' is not a directory");
    expect_no_segment(dir, UINT64_C(1) << 63, SHD_ENOMEM, "the limit is 4611686018427387904");
    expect_no_segment("/proc", PAGE, SHD_ENOTSUP, "no file can be made in '/proc', whoever asks");
    remove_dir();
}

/* What it is asked for, and what is free. */
TEST(more_than_is_free_is_refused_with_the_numbers)
{
    struct statvfs vfs;
    char why[200];
    make_dir();
    CHECK(statvfs(dir, &vfs) == 0);
    const uint64_t all = (uint64_t)vfs.f_blocks * vfs.f_frsize, much = (all / PAGE + 1) * PAGE;
    snprintf(why, sizeof why,
             "state segment of %" PRIu64 " bytes on a file: %" PRIu64 " bytes (%" PRIu64
             " MiB) are needed, ",
             much, much, (much >> 20) + 1);
    expect_no_segment(dir, much, SHD_ENOMEM, why);
    snprintf(why, sizeof why, " MiB are free in '%s'", dir);
    expect_no_segment(dir, much, SHD_ENOMEM, why);
    remove_dir();
}

static int fault_code;
static enum sys_kind fault_kind;

static int fault(enum sys_kind kind)
{
    return kind == fault_kind ? fault_code : 0;
}

TEST(failed_system_calls_are_errors_and_leave_nothing)
{
    static const struct {
        enum sys_kind kind;
        int code, status;
        const char *why;
    } cases[] = {
        { SYS_OPEN, EMFILE, SHD_ENOMEM, "Too many open files" },
        { SYS_OPEN, EACCES, SHD_EAUTH, "cannot be written to by uid " },
        { SYS_OPEN, EROFS, SHD_EAUTH, "is on a read-only file system" },
        { SYS_OPEN, ENOSPC, SHD_ENOMEM, "are needed, 0 MiB are free" },
        { SYS_RESERVE, ENOSPC, SHD_ENOMEM, "8192 bytes (1 MiB) are needed" },
        { SYS_RESERVE, EDQUOT, SHD_ENOMEM, ", and less within the quota" },
        { SYS_RESERVE, EFBIG, SHD_ENOMEM, "8192 bytes are more than a file may have (ulimit -f)" },
        { SYS_RESERVE, EOPNOTSUPP, SHD_ENOTSUP, "cannot take blocks beforehand" },
        { SYS_RESERVE, EIO, SHD_EIO, "take 8192 bytes in" },
        { SYS_MAP, ENOMEM, SHD_ENOMEM, "map segment of 8192 bytes" },
    };
    make_dir();
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        fault_kind = cases[i].kind;
        fault_code = cases[i].code;
        sys_fault = fault;
        expect_no_segment(dir, 2 * PAGE, cases[i].status, cases[i].why);
        sys_fault = NULL;
    }
    remove_dir();
}

static bool no_unnamed; /* the first open of each two fails */

static int fault_unnamed(enum sys_kind kind)
{
    no_unnamed = kind == SYS_OPEN ? !no_unnamed : no_unnamed;
    return kind == SYS_OPEN && no_unnamed ? EOPNOTSUPP : 0;
}

TEST(file_is_unlinked_where_the_file_system_has_none_without_a_name)
{
    struct shd_err e = { 0 };
    struct segment s = SEGMENT_CLOSED;
    struct stat st;
    no_unnamed = false;
    make_dir();
    sys_fault = fault_unnamed;
    const int r = segment_file_new(dir, SEGMENT_STATE, PAGE, &s, &e);
    sys_fault = NULL;
    EXPECT_OK(r, &e);
    EXPECT(fstat(s.fd, &st) == 0 && st.st_nlink == 0 && (st.st_mode & 07777) == 0600);
    remove_dir();
    segment_close(&s);
}

TEST(home_that_is_memory_itself_is_told)
{
    struct shd_err e = { 0 };
    bool is_memory = false;
    struct segment_home home = home_of("file:/dev/shm");
    EXPECT_OK(segment_home_check(&home, &is_memory, &e), &e);
    EXPECT(is_memory);
    home = home_of("memory");
    EXPECT_OK(segment_home_check(&home, &is_memory, &e), &e);
    EXPECT(!is_memory);
    home = home_of("file:/nonexistent/dir");
    EXPECT_STATUS(segment_home_check(&home, &is_memory, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "directory '/nonexistent/dir' is not there");
}

/* A disk of 8 MiB, in a mount namespace of a child's own. */
static void fill_small_disk(void)
{
    struct shd_err e = { 0 };
    struct segment first = SEGMENT_CLOSED, second = SEGMENT_CLOSED;
    if (segment_file_new(dir, SEGMENT_STATE, 5 * MIB, &first, &e) != SHD_OK ||
        segment_file_new(dir, SEGMENT_STATE, 5 * MIB, &second, &e) != SHD_ENOMEM ||
        strstr(e.text, "5242880 bytes (6 MiB) are needed, 3 MiB are free") == NULL) {
        fprintf(stderr, "small disk: %s\n", e.text);
        _exit(1);
    }
    memset(first.base, 1, 5 * MIB); /* what was taken is there */
    segment_close(&first);
    _exit(segment_file_new(dir, SEGMENT_STATE, 5 * MIB, &second, &e) != SHD_OK);
}

TEST(full_disk_is_an_error_and_no_signal)
{
    int status;
    make_dir();
    fflush(stdout);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("none", dir, "tmpfs", 0, "size=8m") != 0)
            _exit(77);
        fill_small_disk();
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    remove_dir();
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        SKIP("a small disk cannot be mounted here");
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_MAIN()
