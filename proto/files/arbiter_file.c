/* See arbiter_file.h. A claim:
 *
 *   1. the newest name is CLUSTER.(N - 1)
 *   2. .CLUSTER.N.RANDOM.new is written and synchronized
 *   3. link(2) gives it the name CLUSTER.N, unless that is there: the swap
 *   4. the name aside goes, the directory is synchronized, old views are removed
 *
 * Killed anywhere, a claimer leaves a name aside at most, which a later one removes. Directories
 * are opened anew, by path, for each look: that is when NFS asks the server. */
#include "proto/files/arbiter_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter_place.h"
#include "proto/files/arbiter_view.h"
#include "proto/files/ckpt.h"

#define NAME_BYTES  (ARBITER_NAME_BYTES + 64u) /* of a file, with NUL */
#define FILE_MODE   0640
#define READ_TRIES  8    /* each newest view may be removed as it is opened, by newer ones */
#define ASIDE_S_MAX 3600 /* nobody writes one name aside for so long */

struct place {
    char dir[PATH_MAX];
    char cluster[ARBITER_NAME_BYTES];
};

/* -- The directory ----------------------------------------------------------------------------- */

/* The root of a mount is the one directory that is there, and empty, when it is not mounted. */
static bool is_mount_point(int fd)
{
    struct statx stx;
    return statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_TYPE, &stx) == 0 &&
           (stx.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0 &&
           (stx.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
}

static int open_dir(const struct place *p, int *ret_fd, struct shd_err *e)
{
    const int fd = sys_open_at(AT_FDCWD, p->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0 && errno == ENOENT)
        return err_set(e, SHD_ENOENT,
                       "the arbiter's directory '%.120s' is not there: mount it, or make it once",
                       p->dir);
    if (fd < 0 && errno == ENOTDIR)
        return err_set(e, SHD_EINVAL, "the arbiter's '%.120s' is no directory", p->dir);
    if (fd < 0)
        return err_sys(e, errno == EACCES ? SHD_EAUTH : SHD_EIO,
                       "open the arbiter's directory '%.120s'", p->dir);
    if (is_mount_point(fd)) {
        close(fd);
        return err_set(e, SHD_EINVAL,
                       "the arbiter's directory '%.80s' is a mount point, which looks like an "
                       "arbiter that is new while nothing is mounted: name a directory in it",
                       p->dir);
    }
    *ret_fd = fd;
    return SHD_OK;
}

/* "CLUSTER.7", of a number as snprintf() writes it; any other name is none of ours. */
static bool parse_name(const struct place *p, const char *name, uint64_t *ret_number)
{
    const size_t bytes = strlen(p->cluster);
    uint64_t number = 0;
    if (strncmp(name, p->cluster, bytes) != 0 || name[bytes] != '.')
        return false;
    const char *digits = name + bytes + 1;
    if (digits[0] < '1' || digits[0] > '9' || strlen(digits) > 16)
        return false;
    for (; *digits >= '0' && *digits <= '9'; digits++)
        number = 10 * number + (uint64_t)(*digits - '0');
    if (*digits != '\0' || number > ARBITER_NUMBER_MAX)
        return false;
    *ret_number = number;
    return true;
}

static void make_name(const struct place *p, uint64_t number, char name[NAME_BYTES])
{
    snprintf(name, NAME_BYTES, "%s.%" PRIu64, p->cluster, number);
}

/* ".CLUSTER.7.0123456789abcdef.new" */
static bool is_aside(const struct place *p, const char *name)
{
    const size_t bytes = strlen(name), of_cluster = strlen(p->cluster);
    return name[0] == '.' && bytes > of_cluster + 6 &&
           strncmp(name + 1, p->cluster, of_cluster) == 0 && name[1 + of_cluster] == '.' &&
           strcmp(name + bytes - 4, ".new") == 0;
}

/* Call fn for each name in the directory. One that breaks off is an error: what it has shown so far
 * may lack the newest view. */
static int each_name(const struct place *p, void (*fn)(void *ctx, int dir_fd, const char *name),
                     void *ctx, struct shd_err *e)
{
    int fd = -1;
    const int r = open_dir(p, &fd, e);
    if (r != SHD_OK)
        return r;
    DIR *dir = fdopendir(fd);
    if (dir == NULL) {
        close(fd);
        return err_sys(e, SHD_EIO, "list the arbiter's directory '%.120s'", p->dir);
    }
    const struct dirent *entry;
    for (errno = 0; (entry = readdir(dir)) != NULL; errno = 0)
        fn(ctx, fd, entry->d_name);
    const int error = errno;
    closedir(dir);
    errno = error;
    return error == 0 ? SHD_OK
                      : err_sys(e, SHD_EIO, "list the arbiter's directory '%.120s'", p->dir);
}

struct newest {
    const struct place *place;
    uint64_t number;
};

static void note_newest(void *ctx, int dir_fd, const char *name)
{
    struct newest *newest = ctx;
    uint64_t number;
    (void)dir_fd;
    if (parse_name(newest->place, name, &number) && number > newest->number)
        newest->number = number;
}

/* 0: there is none. */
static int find_newest(const struct place *p, uint64_t *ret_number, struct shd_err *e)
{
    struct newest newest = { .place = p };
    const int r = each_name(p, note_newest, &newest, e);
    if (r == SHD_OK)
        *ret_number = newest.number;
    return r;
}

/* -- Reading ----------------------------------------------------------------------------------- */

static int read_number(const struct place *p, uint64_t number, struct arbiter_view *ret_view,
                       struct shd_err *e)
{
    struct arbiter_view view = { 0 };
    char name[NAME_BYTES], *text = NULL;
    size_t bytes = 0;
    int fd = -1;
    int r = open_dir(p, &fd, e);
    if (r != SHD_OK)
        return r;
    make_name(p, number, name);
    r = ckpt_read_text(fd, name, /* links= */ false, ARBITER_TEXT_MAX, &text, &bytes, e);
    close(fd);
    if (r == SHD_OK) {
        r = arbiter_view_parse(text, bytes, p->cluster, &view, e);
        if (r != SHD_OK)
            err_prefix(e, "'%s' is no view", name);
    }
    free(text);
    if (r == SHD_OK && view.number != number) {
        r = err_set(e, SHD_EINVAL, "'%s' says that it is view %" PRIu64, name, view.number);
        arbiter_view_free(&view);
    }
    if (r == SHD_OK)
        *ret_view = view;
    return r == SHD_OK || r == SHD_ENOENT ? r : err_prefix(e, "arbiter in '%.60s'", p->dir);
}

static int place_read(void *place, struct arbiter_view *ret_view, struct shd_err *e)
{
    const struct place *p = place;
    uint64_t number = 0;
    int r = SHD_ENOENT;
    for (int i = 0; r == SHD_ENOENT && i < READ_TRIES; i++) {
        r = find_newest(p, &number, e);
        if (r != SHD_OK)
            return r;
        if (number == 0)
            *ret_view = (struct arbiter_view){ 0 };
        else
            r = read_number(p, number, ret_view, e);
    }
    return r;
}

/* -- Claiming ---------------------------------------------------------------------------------- */

struct aside {
    char name[NAME_BYTES];
    struct stat st; /* as the server says it */
};

/* A new file with the text, which is on the disk when this returns. */
static int write_aside(int dir_fd, const char *name, const char *text, struct stat *ret_st,
                       struct shd_err *e)
{
    const int fd = sys_open_at(dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                               FILE_MODE);
    if (fd < 0)
        return err_sys(e, errno == EACCES || errno == EPERM || errno == EROFS ? SHD_EAUTH : SHD_EIO,
                       "make '%s'", name);
    int r = ckpt_pwrite(fd, text, strlen(text), 0, name, e);
    if (r == SHD_OK && (fsync(fd) < 0 || fstat(fd, ret_st) < 0))
        r = err_sys(e, SHD_EIO, "write '%s'", name);
    if (close(fd) < 0 && r == SHD_OK) /* NFS may say only here that there is no room */
        r = err_sys(e, SHD_EIO, "write '%s'", name);
    if (r != SHD_OK)
        unlinkat(dir_fd, name, 0);
    return r;
}

/* A reply that was lost makes NFS ask again, and find the name that it has just made. */
static bool is_ours(int dir_fd, const char *name, const struct stat *aside)
{
    struct stat st;
    return fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_ino == aside->st_ino &&
           st.st_dev == aside->st_dev;
}

static int give_name(const struct place *p, int dir_fd, const struct aside *aside, uint64_t number,
                     struct shd_err *e)
{
    char name[NAME_BYTES];
    make_name(p, number, name);
    const bool linked = linkat(dir_fd, aside->name, dir_fd, name, 0) == 0;
    const int error = errno;
    if (linked || is_ours(dir_fd, name, &aside->st))
        return SHD_OK;
    errno = error;
    if (error == EEXIST)
        return err_set(e, SHD_EBUSY, "view %" PRIu64 " is another's: it was first", number);
    if (error == EPERM || error == EOPNOTSUPP || error == ENOSYS)
        return err_sys(e, SHD_ENOTSUP,
                       "the file system of the arbiter's '%.100s' has no hard links", p->dir);
    return err_sys(e, SHD_EIO, "give '%s' in '%.100s' its name", name, p->dir);
}

struct pruning {
    const struct place *place;
    uint64_t below;
    time_t now_s; /* of the server */
};

static void prune_one(void *ctx, int dir_fd, const char *name)
{
    const struct pruning *pruning = ctx;
    uint64_t number;
    struct stat st;
    if (parse_name(pruning->place, name, &number)) {
        if (number < pruning->below)
            unlinkat(dir_fd, name, 0);
    } else if (is_aside(pruning->place, name) &&
               fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
               st.st_mtime < pruning->now_s - ASIDE_S_MAX) {
        unlinkat(dir_fd, name, 0);
    }
}

/* Behind the link. A claim so late that its own number had been removed since, as an old one, has
 * linked a view that nobody will read: it goes. */
static int settle(const struct place *p, int dir_fd, uint64_t number, const struct stat *aside,
                  struct shd_err *e)
{
    uint64_t newest = 0;
    char name[NAME_BYTES];
    int r = fsync(dir_fd) == 0 ? SHD_OK
                               : err_sys(e, SHD_EIO, "synchronize the arbiter's '%.100s'", p->dir);
    if (r == SHD_OK)
        r = find_newest(p, &newest, e);
    if (r != SHD_OK)
        return r;
    if (newest > number + ARBITER_FILE_KEPT) {
        make_name(p, number, name);
        unlinkat(dir_fd, name, 0);
        return err_set(e, SHD_EBUSY, "view %" PRIu64 " comes late: the newest is %" PRIu64, number,
                       newest);
    }
    struct pruning pruning = { .place = p,
                               .below = number > ARBITER_FILE_KEPT ? number - ARBITER_FILE_KEPT : 0,
                               .now_s = aside->st_mtime };
    (void)each_name(p, prune_one, &pruning, NULL); /* the next claim removes what this one cannot */
    return SHD_OK;
}

static int swap(const struct place *p, uint64_t number, const char *text, struct shd_err *e)
{
    struct aside aside;
    uint64_t random;
    int fd = -1;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return err_sys(e, SHD_EIO, "draw a random name");
    int r = open_dir(p, &fd, e);
    if (r != SHD_OK)
        return r;
    snprintf(aside.name, sizeof aside.name, ".%s.%" PRIu64 ".%016" PRIx64 ".new", p->cluster,
             number, random);
    r = write_aside(fd, aside.name, text, &aside.st, e);
    if (r == SHD_OK) {
        r = give_name(p, fd, &aside, number, e);
        unlinkat(fd, aside.name, 0);
        if (r == SHD_OK)
            r = settle(p, fd, number, &aside.st, e);
    } else {
        err_prefix(e, "arbiter in '%.60s'", p->dir);
    }
    close(fd);
    return r;
}

static int place_claim(void *place, const struct arbiter_view *next, struct shd_err *e)
{
    const struct place *p = place;
    uint64_t newest = 0;
    char *text = NULL;
    int r = find_newest(p, &newest, e);
    if (r != SHD_OK)
        return r;
    if (newest >= next->number)
        return err_set(e, SHD_EBUSY, "view %" PRIu64 " is another's: the newest is %" PRIu64,
                       next->number, newest);
    if (newest + 1 != next->number)
        return err_set(e, SHD_EINVAL,
                       "view %" PRIu64 " cannot follow view %" PRIu64 ", the newest of '%.100s'",
                       next->number, newest, p->dir);
    r = arbiter_view_write(next, p->cluster, &text, e);
    if (r == SHD_OK)
        r = swap(p, next->number, text, e);
    free(text);
    return r;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static const struct arbiter_ops file_ops = {
    .read = place_read,
    .claim = place_claim,
    .close = free,
};

int arbiter_file_open(const char *dir, const char *cluster, struct arbiter_place *ret_place,
                      struct shd_err *e)
{
    if (dir[0] != '/')
        return err_set(e, SHD_EINVAL, "arbiter file:%.120s: the directory is no absolute path",
                       dir);
    if (strlen(dir) >= PATH_MAX)
        return err_set(e, SHD_ERANGE, "arbiter file:%.60s...: a path of %zu bytes, at most %d", dir,
                       strlen(dir), PATH_MAX - 1);
    struct place *p = sys_calloc(1, sizeof *p);
    if (p == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an arbiter");
    snprintf(p->dir, sizeof p->dir, "%s", dir);
    snprintf(p->cluster, sizeof p->cluster, "%s", cluster);
    *ret_place = (struct arbiter_place){ &file_ops, p };
    return SHD_OK;
}
