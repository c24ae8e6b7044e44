/* See segment_file.h. */
#include "proto/share/segment_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <linux/fs.h>
#include <linux/magic.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"

#define FILE_PREFIX "file:"
#define BYTES_MAX   (UINT64_C(1) << 62)
#define BLOCK_BYTES 512u /* of st_blocks */
#define TRY_BYTES   SHD_PAGE_BYTES

int segment_home_parse(const char *flag, const char *text, struct segment_home *ret_home,
                       struct shd_err *e)
{
    struct segment_home home = { .file = false };
    const char *dir = text + strlen(FILE_PREFIX);
    if (strcmp(text, "memory") == 0) {
        *ret_home = home;
        return SHD_OK;
    }
    if (strncmp(text, FILE_PREFIX, strlen(FILE_PREFIX)) != 0)
        return err_set(e, SHD_EINVAL, "%s '%.200s' is neither memory nor file:DIR", flag, text);
    if (dir[0] != '/')
        return err_set(e, SHD_EINVAL, "%s '%.200s': the directory is not an absolute path", flag,
                       text);
    if (strlen(dir) >= sizeof home.dir)
        return err_set(e, SHD_EINVAL, "%s: a path of %zu bytes, at most %zu", flag, strlen(dir),
                       sizeof home.dir - 1);
    home.file = true;
    snprintf(home.dir, sizeof home.dir, "%s", dir);
    *ret_home = home;
    return SHD_OK;
}

/* -- Making -------------------------------------------------------------------------------------
 */

/* What went wrong with a directory, in words that say what would be right. */
static int dir_failed(struct shd_err *e, const char *dir, const char *what)
{
    const int saved = errno;
    switch (saved) {
    case ENOENT:
        return err_set(e, SHD_EINVAL, "directory '%.200s' is not there", dir);
    case ENOTDIR:
        return err_set(e, SHD_EINVAL, "'%.200s' is not a directory", dir);
    case EROFS:
        return err_set(e, SHD_EAUTH, "directory '%.200s' is on a read-only file system", dir);
    case EACCES:
    case EPERM:
        return err_set(e, SHD_EAUTH, "directory '%.200s' cannot be written to by uid %u", dir,
                       (unsigned)geteuid());
    default:
        errno = saved;
        return err_sys(e, SHD_EIO, "%s in '%.200s'", what, dir);
    }
}

/* A file that has a name for a moment: somebody who may write to the directory could give it
 * another one meanwhile, which the caller looks for. */
static int make_named(int dir_fd)
{
    char name[64];
    uint64_t number;
    if (getrandom(&number, sizeof number, 0) != (ssize_t)sizeof number)
        return -1;
    snprintf(name, sizeof name, ".shardd-%016" PRIx64, number);
    const int fd = sys_open_at(dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                               0600);
    if (fd >= 0 && unlinkat(dir_fd, name, 0) != 0) {
        const int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

/* O_EXCL: nobody can give it a name later. */
static int make_unnamed(int dir_fd)
{
    const int fd = sys_open_at(dir_fd, ".", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    const bool unknown = fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL);
    return unknown ? make_named(dir_fd) : fd;
}

static uint64_t free_bytes(int fd)
{
    struct statvfs vfs;
    if (fstatvfs(fd, &vfs) != 0)
        return UINT64_MAX;
    return (geteuid() == 0 ? vfs.f_bfree : vfs.f_bavail) * (uint64_t)vfs.f_frsize;
}

static int no_room(struct shd_err *e, const char *dir, uint64_t bytes, uint64_t free, int code)
{
    if (code == EFBIG)
        return err_set(e, SHD_ENOMEM, "%" PRIu64 " bytes are more than a file may have (ulimit -f)",
                       bytes);
    return err_set(e, SHD_ENOMEM,
                   "%" PRIu64 " bytes (%" PRIu64 " MiB) are needed, %" PRIu64
                   " MiB are free in '%.150s'%s",
                   bytes, (bytes >> 20) + 1, free >> 20, dir,
                   code == EDQUOT ? ", and less within the quota" : "");
}

/* On a file system that copies on write blocks that were taken are not those that are written. */
static int forbid_copies(int fd, const char *dir, struct shd_err *e)
{
    struct statfs fs;
    int flags = 0;
    if (fstatfs(fd, &fs) != 0 || (uint64_t)fs.f_type != BTRFS_SUPER_MAGIC)
        return SHD_OK;
    if (ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0) {
        flags |= FS_NOCOW_FL;
        if (ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0)
            return SHD_OK;
    }
    return err_sys(e, SHD_ENOTSUP, "turn copy-on-write off for a file in '%.200s' (btrfs)", dir);
}

/* What is not there is asked for in vain at once, and not taken piece by piece from others. */
static int take_blocks(int fd, const char *dir, uint64_t bytes, struct shd_err *e)
{
    const uint64_t free = free_bytes(fd);
    int r;
    if (free < bytes)
        return no_room(e, dir, bytes, free, ENOSPC);
    do
        r = sys_fallocate(fd, 0, 0, (off_t)bytes);
    while (r != 0 && errno == EINTR);
    if (r == 0)
        return SHD_OK;
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)
        return no_room(e, dir, bytes, free, errno);
    if (errno == EOPNOTSUPP)
        return err_set(e, SHD_ENOTSUP,
                       "the file system of '%.200s' cannot take blocks beforehand (fallocate): "
                       "ext4, XFS or btrfs can",
                       dir);
    return err_sys(e, SHD_EIO, "take %" PRIu64 " bytes in '%.150s'", bytes, dir);
}

/* Errors: of a descriptor that is not a segment on a file, as one word or two. lent: by another
 * process, which may be another user's. */
static const char *why_no_file(int fd, const struct stat *st, uint64_t bytes, bool lent)
{
    const int flags = fcntl(fd, F_GETFL);
    if (!S_ISREG(st->st_mode))
        return "no regular file";
    if (st->st_nlink != 0)
        return "a file with a name";
    if (!lent && st->st_uid != geteuid())
        return "another user's file";
    if ((st->st_mode & (S_IRWXG | S_IRWXO)) != 0)
        return "a file that others may open";
    if (lent && (flags < 0 || (flags & O_ACCMODE) != O_RDONLY))
        return "a file that is open to be written";
    if (!lent && (flags < 0 || (flags & O_ACCMODE) != O_RDWR))
        return "a file that is not open to read and write";
    if (bytes == 0 || bytes % SHD_PAGE_BYTES != 0 || bytes > BYTES_MAX)
        return "not whole pages";
    if (st->st_size < 0 || (uint64_t)st->st_size != bytes)
        return "a file of another size";
    if ((uint64_t)st->st_blocks < bytes / BLOCK_BYTES)
        return "a file without all of its blocks";
    return NULL;
}

static int check_file(int fd, enum segment_kind kind, uint64_t bytes, bool lent, struct shd_err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_sys(e, SHD_ESEGMENT, "stat %s segment", segment_kind_name(kind));
    const char *why = why_no_file(fd, &st, bytes, lent);
    if (why == NULL)
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "%s segment is %s: it has mode %o, uid %u, %ju names, %jd bytes in %jd "
                   "blocks, %" PRIu64 " bytes are needed",
                   segment_kind_name(kind), why, (unsigned)st.st_mode, (unsigned)st.st_uid,
                   (uintmax_t)st.st_nlink, (intmax_t)st.st_size, (intmax_t)st.st_blocks, bytes);
}

static int make_file(const char *dir, enum segment_kind kind, uint64_t bytes, int *ret_fd,
                     struct shd_err *e)
{
    const int dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0)
        return dir_failed(e, dir, "open the directory");
    const int fd = make_unnamed(dir_fd);
    const int saved = errno;
    close(dir_fd);
    errno = saved;
    if (fd < 0 && (errno == ENOSPC || errno == EDQUOT))
        return no_room(e, dir, bytes, 0, errno);
    if (fd < 0 && errno == ENOENT) /* although the directory is there */
        return err_set(e, SHD_ENOTSUP, "no file can be made in '%.200s', whoever asks", dir);
    if (fd < 0)
        return dir_failed(e, dir, "make a file");
    int r = forbid_copies(fd, dir, e);
    if (r == SHD_OK)
        r = take_blocks(fd, dir, bytes, e);
    if (r == SHD_OK)
        r = check_file(fd, kind, bytes, /* lent= */ false, e);
    if (r != SHD_OK) {
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

int segment_file_room(const char *dir, enum segment_kind kind, uint64_t bytes, int *ret_fd,
                      struct shd_err *e)
{
    CHECK(bytes > 0);
    const char *name = segment_kind_name(kind);
    if (bytes > BYTES_MAX)
        return err_set(e, SHD_ENOMEM, "%s segment of %" PRIu64 " bytes: the limit is %" PRIu64,
                       name, bytes, BYTES_MAX);
    const uint64_t whole = layout_align(bytes, SHD_PAGE_BYTES);
    const int r = make_file(dir, kind, whole, ret_fd, e);
    return r == SHD_OK ? r
                       : err_prefix(e, "%s segment of %" PRIu64 " bytes on a file", name, whole);
}

int segment_file_new(const char *dir, enum segment_kind kind, uint64_t bytes,
                     struct segment *ret_segment, struct shd_err *e)
{
    CHECK(!segment_kind_readonly(kind));
    int fd = -1;
    int r = segment_file_room(dir, kind, bytes, &fd, e);
    if (r != SHD_OK)
        return r;
    struct segment s = SEGMENT_CLOSED;
    r = segment_map(fd, kind, layout_align(bytes, SHD_PAGE_BYTES), &s, e);
    if (r != SHD_OK) {
        close(fd);
        return err_prefix(e, "%s segment on a file", segment_kind_name(kind));
    }
    s.file = true;
    *ret_segment = s;
    return SHD_OK;
}

/* A descriptor of the same file that only reads. */
static int open_to_read(int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return fchmod(fd, S_IRUSR) == 0 ? open(path, O_RDONLY | O_CLOEXEC) : -1;
}

int segment_file_lend(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                      struct shd_err *e)
{
    CHECK(segment_kind_readonly(kind));
    const char *name = segment_kind_name(kind);
    const int r = check_file(fd, kind, bytes, /* lent= */ false, e);
    if (r != SHD_OK)
        return r;
    void *base = sys_mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return err_sys(e, SHD_ENOMEM, "map %s segment of %" PRIu64 " bytes on a file", name, bytes);
    const int reads = open_to_read(fd);
    if (reads < 0) {
        const int failed = err_sys(e, SHD_EIO, "open %s segment to be read", name);
        munmap(base, bytes);
        return failed;
    }
    close(fd); /* the mapping alone writes */
    *ret_segment = (struct segment){ .fd = reads, .base = base, .bytes = bytes, .file = true };
    return SHD_OK;
}

int segment_home_check(const struct segment_home *home, bool *ret_volatile, struct shd_err *e)
{
    struct statfs fs;
    int fd = -1;
    *ret_volatile = false;
    if (!home->file)
        return SHD_OK;
    const int r = make_file(home->dir, SEGMENT_STATE, TRY_BYTES, &fd, e);
    if (r != SHD_OK)
        return r;
    *ret_volatile = fstatfs(fd, &fs) == 0 &&
                    ((uint64_t)fs.f_type == TMPFS_MAGIC || (uint64_t)fs.f_type == RAMFS_MAGIC);
    close(fd);
    return SHD_OK;
}

/* -- After a predecessor ------------------------------------------------------------------------
 */

/* Of files those of tmpfs alone have seals, namely the one against seals. */
static bool is_memfd(int fd)
{
    const int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && seals != F_SEAL_SEAL;
}

bool segment_file_is(int fd)
{
    return !is_memfd(fd);
}

int segment_shared_check(int fd, enum segment_kind kind, uint64_t bytes, struct shd_err *e)
{
    struct stat st;
    const bool file = kind == SEGMENT_PUBLISH && !is_memfd(fd) && fstat(fd, &st) == 0 &&
                      S_ISREG(st.st_mode);
    return file ? check_file(fd, kind, bytes, /* lent= */ true, e)
                : segment_check(fd, kind, bytes, e);
}

int segment_kept_check(int fd, enum segment_kind kind, uint64_t bytes, bool *ret_file,
                       struct shd_err *e)
{
    struct stat st;
    const bool file = !segment_kind_readonly(kind) && !is_memfd(fd) && fstat(fd, &st) == 0 &&
                      S_ISREG(st.st_mode);
    const int r = file ? check_file(fd, kind, bytes, /* lent= */ false, e)
                       : segment_check(fd, kind, bytes, e);
    if (r == SHD_OK)
        *ret_file = file;
    return r;
}

int segment_kept_map(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                     struct shd_err *e)
{
    bool file = false;
    int r = segment_kept_check(fd, kind, bytes, &file, e);
    if (r == SHD_OK)
        r = segment_map(fd, kind, bytes, ret_segment, e);
    if (r == SHD_OK)
        ret_segment->file = file;
    return r;
}
