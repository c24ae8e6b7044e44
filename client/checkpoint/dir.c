/* See dir.h. */
#include "client/checkpoint/dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"
#include "proto/wire/wire.h"

#define LOCK_NAME   ".lock"
#define LATEST_NEW  ".LATEST.new"
#define STEP_MAX    UINT64_C(999999999999) /* what a name has room for */
#define ENTRIES_MAX 1000000u
#define PATH_ROOM   64u /* for what is put behind DIR */

static bool is_partial(const char *name)
{
    const size_t bytes = strlen(name);
    return strncmp(name, ".step-", 6) == 0 && bytes > 8 &&
           strcmp(name + bytes - 8, ".partial") == 0;
}

static bool parse_name(const char *name, uint64_t *ret_step)
{
    unsigned long long step;
    int end = 0;
    if (strlen(name) != 17 || sscanf(name, "step-%12llu%n", &step, &end) != 1 || end != 17 ||
        strspn(name + 5, "0123456789") != 12)
        return false;
    *ret_step = step;
    return true;
}

/* ".step-000000000100.old" */
static bool is_aside(const char *name)
{
    uint64_t step;
    char inner[CHECKPOINT_NAME_BYTES];
    if (name[0] != '.' || strlen(name) != 22 || strcmp(name + 18, ".old") != 0)
        return false;
    snprintf(inner, sizeof inner, "%.17s", name + 1);
    return parse_name(inner, &step);
}

/* -- Removing ---------------------------------------------------------------------------------- */

/* Call fn for each name in the directory but "." and ".."; stops at an error. */
static int each_name(int dir_fd, int (*fn)(void *ctx, const char *name, struct shd_err *e),
                     void *ctx, struct shd_err *e)
{
    const int fd = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return err_sys(e, SHD_EIO, "list the directory of checkpoints");
    }
    int r = SHD_OK;
    const struct dirent *entry;
    while (r == SHD_OK && (entry = readdir(dir)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            r = fn(ctx, entry->d_name, e);
    closedir(dir);
    return r;
}

struct emptying { /* of a directory */
    int fd;
    const char *name;
};

static int remove_file(void *ctx, const char *name, struct shd_err *e)
{
    const struct emptying *from = ctx;
    if (unlinkat(from->fd, name, 0) == 0)
        return SHD_OK;
    return err_sys(e, SHD_EIO, "remove '%.100s/%.60s'", from->name, name);
}

/* The directory `name` with the files in it: checkpoints have no directories inside. Nothing that
 * is a link is followed. */
static int remove_tree(int dir_fd, const char *name, struct shd_err *e)
{
    struct emptying from = { openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC),
                             name };
    if (from.fd < 0)
        return err_sys(e, SHD_EIO, "open '%.100s' to remove it", name);
    int r = each_name(from.fd, remove_file, &from, e);
    close(from.fd);
    if (r == SHD_OK && unlinkat(dir_fd, name, AT_REMOVEDIR) != 0)
        r = err_sys(e, SHD_EIO, "remove '%.100s'", name);
    return r;
}

static bool is_complete(int fd, const char *name)
{
    char info[CHECKPOINT_NAME_BYTES + 16];
    struct stat st;
    snprintf(info, sizeof info, "%s/" CKPT_INFO, name);
    return fstatat(fd, info, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode);
}

/* Between its two renames a saver died, or after them: rename_aside(). */
static int put_back(const struct checkpoint_dir *d, const char *aside, struct shd_err *e)
{
    char name[CHECKPOINT_NAME_BYTES];
    snprintf(name, sizeof name, "%.17s", aside + 1);
    if (is_complete(d->fd, name))
        return remove_tree(d->fd, aside, e);
    if (renameat(d->fd, aside, d->fd, name) == 0)
        return SHD_OK;
    return err_sys(e, SHD_EIO, "rename '%s' to '%s'", aside, name);
}

/* What a dead saver left. */
static int mend(void *ctx, const char *name, struct shd_err *e)
{
    const struct checkpoint_dir *d = ctx;
    if (is_partial(name))
        return remove_tree(d->fd, name, e);
    return is_aside(name) ? put_back(d, name, e) : SHD_OK;
}

/* -- Saving ------------------------------------------------------------------------------------ */

int checkpoint_give(int fd, uid_t uid, const char *name, struct shd_err *e)
{
    if (uid == (uid_t)-1 || fchown(fd, uid, (gid_t)-1) == 0)
        return SHD_OK;
    return err_sys(e, SHD_EIO, "give '%.150s' to user %u", name, (unsigned)uid);
}

/* Past this limit the kernel sends SIGXFSZ, which ends programs that do not expect it. */
static int check_limit(const char *name, uint64_t bytes, struct shd_err *e)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        bytes <= limit.rlim_cur)
        return SHD_OK;
    return err_set(e, SHD_EIO, "'%s' needs %" PRIu64 " bytes, RLIMIT_FSIZE allows %" PRIu64, name,
                   bytes, (uint64_t)limit.rlim_cur);
}

int checkpoint_create(int dir_fd, const char *name, uint64_t bytes, uid_t uid, int *ret_fd,
                      struct shd_err *e)
{
    int r = check_limit(name, bytes, e);
    if (r != SHD_OK)
        return r;
    const int fd = openat(dir_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0640);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make '%s'", name);
    r = checkpoint_give(fd, uid, name, e);
    if (r == SHD_OK)
        *ret_fd = fd;
    else
        close(fd);
    return r;
}

int checkpoint_write(int dir_fd, const char *name, const char *text, uid_t uid, struct shd_err *e)
{
    int fd = -1;
    int r = checkpoint_create(dir_fd, name, strlen(text), uid, &fd, e);
    if (r != SHD_OK)
        return r;
    r = ckpt_pwrite(fd, text, strlen(text), 0, name, e);
    if (r == SHD_OK && fsync(fd) != 0)
        r = err_sys(e, SHD_EIO, "sync '%s'", name);
    close(fd);
    return r;
}

static int is_left(void *ctx, const char *name, struct shd_err *e)
{
    return err_set(e, SHD_EIO, "'%.150s' was made empty and has '%.60s'", (const char *)ctx, name);
}

/* Give away the directory just made. Its owner-to-be may have put another one in its place, so it
 * must be ours, and empty. */
static int give_dir(const struct checkpoint_dir *d, struct shd_err *e)
{
    struct stat st;
    if (fstat(d->fd, &st) != 0)
        return err_sys(e, SHD_EIO, "look at '%.150s'", d->path);
    if (st.st_uid != geteuid())
        return SHD_OK;
    const int r = each_name(d->fd, is_left, d->path, e);
    return r == SHD_OK ? checkpoint_give(d->fd, d->uid, d->path, e) : r;
}

static int open_dir(struct checkpoint_dir *d, const char *path, struct shd_err *e)
{
    const bool made = mkdir(path, 0750) == 0;
    if (!made && errno != EEXIST)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "make directory '%.150s'", path);
    d->path = realpath(path, NULL);
    if (d->path == NULL)
        return err_sys(e, SHD_EIO, "resolve '%.150s'", path);
    if (strlen(d->path) + PATH_ROOM >= WIRE_PATH_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "path of the directory has %zu bytes, at most %u",
                       strlen(d->path), WIRE_PATH_BYTES_MAX - PATH_ROOM - 1);
    for (const char *c = d->path; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            return err_set(e, SHD_EINVAL, "path of the directory has a control character");
    const int r = ckpt_open_dir(d->path, &d->fd, e);
    return r == SHD_OK && made && d->uid != (uid_t)-1 ? give_dir(d, e) : r;
}

static int open_lock(struct checkpoint_dir *d, struct shd_err *e)
{
    const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
    d->lock_fd = openat(d->fd, LOCK_NAME, flags | O_CREAT | O_EXCL, 0640);
    if (d->lock_fd >= 0)
        return checkpoint_give(d->lock_fd, d->uid, LOCK_NAME, e);
    if (errno == EEXIST)
        d->lock_fd = openat(d->fd, LOCK_NAME, flags);
    return d->lock_fd >= 0 ? SHD_OK
                           : err_sys(e, SHD_EIO, "open '" LOCK_NAME "' in '%.120s'", d->path);
}

int checkpoint_dir_lock(struct checkpoint_dir *d, const char *path, uid_t uid, struct shd_err *e)
{
    *d = CHECKPOINT_DIR_CLOSED;
    d->uid = uid;
    int r = open_dir(d, path, e);
    if (r == SHD_OK)
        r = open_lock(d, e);
    if (r != SHD_OK)
        return r;
    if (flock(d->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return errno == EWOULDBLOCK
                   ? err_set(e, SHD_EBUSY, "another process saves in '%.150s'", d->path)
                   : err_sys(e, SHD_EIO, "lock '%.150s'", d->path);
    return each_name(d->fd, mend, d, e);
}

int checkpoint_dir_begin(struct checkpoint_dir *d, struct shd_err *e)
{
    CHECK(d->lock_fd >= 0 && d->partial_fd < 0);
    snprintf(d->partial, sizeof d->partial, CHECKPOINT_PARTIAL, (int)getpid());
    if (mkdirat(d->fd, d->partial, 0750) != 0) {
        d->partial[0] = '\0';
        return err_sys(e, SHD_EIO, "make a directory in '%.150s'", d->path);
    }
    d->partial_fd = openat(d->fd, d->partial, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (d->partial_fd < 0)
        return err_sys(e, SHD_EIO, "open '%s' in '%.120s'", d->partial, d->path);
    FAIL_POINT("save:begin:after");
    return checkpoint_give(d->partial_fd, d->uid, d->partial, e);
}

/* The file system cannot exchange two names: what has the name steps aside under one from which
 * mend() puts it back, and which checkpoint_dir_resolve() knows. */
static int rename_aside(const struct checkpoint_dir *d, const char *name, struct shd_err *e)
{
    char aside[CHECKPOINT_NAME_BYTES];
    snprintf(aside, sizeof aside, ".%.17s.old", name);
    if (renameat(d->fd, name, d->fd, aside) != 0)
        return err_sys(e, SHD_EIO, "rename '%s' to '%s'", name, aside);
    FAIL_POINT("save:aside:after");
    if (renameat(d->fd, d->partial, d->fd, name) == 0)
        return remove_tree(d->fd, aside, e);
    const int r = err_sys(e, SHD_EIO, "rename '%s' to '%s'", d->partial, name);
    (void)renameat(d->fd, aside, d->fd, name);
    return r;
}

/* NFS and others know no flags. */
static bool knows_no_flags(void)
{
    return errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP;
}

/* The partial one gets the name, and what had it goes: in one go where the file system can. */
static int rename_over(const struct checkpoint_dir *d, const char *name, struct shd_err *e)
{
    if (sys_renameat2(d->fd, d->partial, d->fd, name, RENAME_NOREPLACE) == 0)
        return SHD_OK;
    if (knows_no_flags() && renameat(d->fd, d->partial, d->fd, name) == 0)
        return SHD_OK; /* ours is not empty: it was not there */
    if (sys_renameat2(d->fd, d->partial, d->fd, name, RENAME_EXCHANGE) == 0)
        return remove_tree(d->fd, d->partial, e);
    return knows_no_flags() ? rename_aside(d, name, e)
                            : err_sys(e, SHD_EIO, "rename '%s' to '%s'", d->partial, name);
}

static int write_latest(const struct checkpoint_dir *d, const char *name, struct shd_err *e)
{
    char line[CHECKPOINT_NAME_BYTES + 1];
    snprintf(line, sizeof line, "%s\n", name);
    unlinkat(d->fd, LATEST_NEW, 0);
    int r = checkpoint_write(d->fd, LATEST_NEW, line, d->uid, e);
    if (r == SHD_OK && renameat(d->fd, LATEST_NEW, d->fd, CKPT_LATEST) != 0)
        r = err_sys(e, SHD_EIO, "rename '" LATEST_NEW "'");
    FAIL_POINT("save:latest:after");
    if (r == SHD_OK && fsync(d->fd) != 0)
        r = err_sys(e, SHD_EIO, "sync '%.150s'", d->path);
    return r;
}

int checkpoint_dir_publish(struct checkpoint_dir *d, uint64_t step,
                           char ret_name[CHECKPOINT_NAME_BYTES], struct shd_err *e)
{
    char name[CHECKPOINT_NAME_BYTES];
    CHECK(d->partial_fd >= 0);
    if (step > STEP_MAX)
        return err_set(e, SHD_ERANGE, "step %" PRIu64 " has no name, at most %" PRIu64, step,
                       STEP_MAX);
    snprintf(name, sizeof name, "step-%012" PRIu64, step);
    if (fsync(d->partial_fd) != 0)
        return err_sys(e, SHD_EIO, "sync '%s'", d->partial);
    FAIL_POINT("save:rename:before");
    int r = rename_over(d, name, e);
    FAIL_POINT("save:rename:after");
    if (r != SHD_OK)
        return r;
    close(d->partial_fd);
    d->partial_fd = -1;
    d->partial[0] = '\0';
    if (fsync(d->fd) != 0)
        return err_sys(e, SHD_EIO, "sync '%.150s'", d->path);
    r = write_latest(d, name, e);
    if (r == SHD_OK)
        memcpy(ret_name, name, sizeof name);
    return r;
}

int checkpoint_dir_retain(const struct checkpoint_dir *d, uint32_t keep, struct shd_err *e)
{
    struct checkpoint_entry *entries;
    char latest[CHECKPOINT_NAME_BYTES];
    uint32_t count;
    int r = checkpoint_dir_latest(d->fd, latest, e);
    if (r == SHD_OK)
        r = checkpoint_dir_list(d->fd, &entries, &count, e);
    if (r != SHD_OK)
        return r;
    uint32_t left = count;
    for (uint32_t i = 0; r == SHD_OK && i < count && left > keep; i++) {
        if (strcmp(entries[i].name, latest) == 0)
            continue;
        /* Under another name first: half a checkpoint is none. */
        if (renameat(d->fd, entries[i].name, d->fd, ".step-old.partial") != 0)
            r = err_sys(e, SHD_EIO, "rename '%s' to remove it", entries[i].name);
        else
            r = remove_tree(d->fd, ".step-old.partial", e);
        left--;
    }
    free(entries);
    return r;
}

void checkpoint_dir_close(struct checkpoint_dir *d)
{
    if (d->partial_fd >= 0)
        close(d->partial_fd);
    if (d->partial[0] != '\0')
        (void)remove_tree(d->fd, d->partial, NULL); /* the next saver tries again */
    if (d->lock_fd >= 0) {
        flock(d->lock_fd, LOCK_UN); /* a child of meanwhile has the descriptor, too */
        close(d->lock_fd);
    }
    if (d->fd >= 0)
        close(d->fd);
    free(d->path);
    *d = CHECKPOINT_DIR_CLOSED;
}

/* -- Looking ----------------------------------------------------------------------------------- */

struct listing {
    int fd;
    struct checkpoint_entry *entries; /* owned, [capacity] */
    uint32_t count, capacity;
};

static int add_entry(void *ctx, const char *name, struct shd_err *e)
{
    struct listing *l = ctx;
    struct checkpoint_entry entry = { .step = 0 };
    char info[CHECKPOINT_NAME_BYTES + 16];
    struct stat st;
    if (!parse_name(name, &entry.step))
        return SHD_OK;
    memcpy(entry.name, name, strlen(name) + 1);
    snprintf(info, sizeof info, "%s/" CKPT_INFO, entry.name);
    if (fstatat(l->fd, info, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(st.st_mode))
        return SHD_OK; /* none of ours */
    if (l->count == l->capacity) {
        const uint32_t capacity = l->capacity > 0 ? 2 * l->capacity : 16;
        void *grown = capacity <= ENTRIES_MAX ? sys_realloc(l->entries, capacity * sizeof entry)
                                              : NULL;
        if (grown == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " checkpoints", capacity);
        l->entries = grown;
        l->capacity = capacity;
    }
    entry.saved_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    l->entries[l->count++] = entry;
    return SHD_OK;
}

static int by_age(const void *a, const void *b)
{
    const struct checkpoint_entry *x = a, *y = b;
    if (x->saved_ns != y->saved_ns)
        return x->saved_ns < y->saved_ns ? -1 : 1;
    return x->step < y->step ? -1 : x->step > y->step;
}

int checkpoint_dir_list(int fd, struct checkpoint_entry **ret_entries, uint32_t *ret_count,
                        struct shd_err *e)
{
    struct listing l = { .fd = fd };
    const int r = each_name(fd, add_entry, &l, e);
    if (r != SHD_OK) {
        free(l.entries);
        return r;
    }
    if (l.count > 0)
        qsort(l.entries, l.count, sizeof *l.entries, by_age);
    *ret_entries = l.entries;
    *ret_count = l.count;
    return SHD_OK;
}

int checkpoint_dir_latest(int fd, char ret_name[CHECKPOINT_NAME_BYTES], struct shd_err *e)
{
    char *text;
    size_t bytes;
    uint64_t step;
    int r = ckpt_read_text(fd, CKPT_LATEST, /* links= */ false, 256, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    text[strcspn(text, "\n")] = '\0';
    if (!parse_name(text, &step))
        r = err_set(e, SHD_EINVAL, "'" CKPT_LATEST "' says '%.40s', which is no checkpoint's name",
                    text);
    else
        memcpy(ret_name, text, strlen(text) + 1);
    free(text);
    return r;
}

/* Modification time of LATEST; before all others when there is none. */
static int64_t latest_ns(int fd)
{
    struct stat st;
    if (fstatat(fd, CKPT_LATEST, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return INT64_MIN;
    return (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
}

int checkpoint_dir_newest(int fd, char ret_name[CHECKPOINT_NAME_BYTES], struct shd_err *e)
{
    char name[CHECKPOINT_NAME_BYTES] = "";
    struct checkpoint_entry *entries;
    uint32_t count;
    uint64_t step = 0;
    int r = checkpoint_dir_latest(fd, name, e);
    if (r != SHD_OK && r != SHD_ENOENT)
        return r;
    if (r == SHD_OK)
        parse_name(name, &step);
    const int64_t since_ns = latest_ns(fd);
    r = checkpoint_dir_list(fd, &entries, &count, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; i < count; i++)
        if (name[0] == '\0' || (entries[i].step > step && entries[i].saved_ns > since_ns)) {
            memcpy(name, entries[i].name, sizeof name);
            step = entries[i].step;
        }
    free(entries);
    if (name[0] == '\0')
        return err_set(e, SHD_ENOENT, "there is no checkpoint");
    memcpy(ret_name, name, sizeof name);
    return SHD_OK;
}

static int by_step(const void *a, const void *b)
{
    const struct checkpoint_entry *x = a, *y = b;
    return x->step < y->step ? -1 : x->step > y->step;
}

/* "100, 200, 300, ... 900" of entries in order of steps. */
static void name_steps(const struct checkpoint_entry *entries, uint32_t count, char ret_text[96])
{
    size_t bytes = 0;
    for (uint32_t i = 0; i < count && bytes < 64; i++) {
        const bool cut = i == 3 && count > 5;
        if (cut)
            i = count - 1;
        bytes += (size_t)snprintf(ret_text + bytes, 96 - bytes, "%s%" PRIu64,
                                  i == 0 ? ""
                                  : cut  ? ", ... "
                                         : ", ",
                                  entries[i].step);
    }
}

int checkpoint_dir_check_begin(int fd, const char *path, uint64_t step, struct shd_err *e)
{
    struct checkpoint_entry *entries;
    uint32_t count, first = 0;
    char steps[96];
    const int r = checkpoint_dir_list(fd, &entries, &count, e);
    if (r != SHD_OK)
        return r;
    if (count > 0)
        qsort(entries, count, sizeof *entries, by_step);
    while (first < count && entries[first].step <= step)
        first++;
    if (first < count)
        name_steps(entries + first, count - first, steps);
    free(entries);
    if (first == count)
        return SHD_OK;
    return err_set(e, SHD_EEXIST,
                   "'%.60s' holds later steps (%s) than step %" PRIu64
                   ", where this run is: go on from the latest (shardctl run --resume), or save in "
                   "another directory",
                   path, steps, step);
}

/* The one of that name in DIR, or, where a saver has died between two renames, what it put aside.
 */
static int path_of(int fd, const char *dir, const char *name, char **ret_path, struct shd_err *e)
{
    char aside[CHECKPOINT_NAME_BYTES];
    snprintf(aside, sizeof aside, ".%.17s.old", name);
    const bool is_put_aside = !is_complete(fd, name) && is_complete(fd, aside);
    if (asprintf(ret_path, "%s/%s", dir, is_put_aside ? aside : name) >= 0)
        return SHD_OK;
    *ret_path = NULL;
    return err_set(e, SHD_ENOMEM, "no memory for a path");
}

int checkpoint_dir_resolve(const char *path, char **ret_path, struct shd_err *e)
{
    char name[CHECKPOINT_NAME_BYTES];
    char *whole = realpath(path, NULL), *found = NULL;
    int fd = -1, r;
    if (whole == NULL)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "look at '%.150s'", path);
    r = ckpt_open_dir(whole, &fd, e);
    const bool is_one = r == SHD_OK && faccessat(fd, CKPT_INFO, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    if (r == SHD_OK && !is_one) {
        r = checkpoint_dir_newest(fd, name, e);
        if (r == SHD_ENOENT)
            err_set(e, r, "'%.150s' is no checkpoint, and no directory with a latest one", whole);
        if (r == SHD_OK)
            r = path_of(fd, whole, name, &found, e);
    }
    if (fd >= 0)
        close(fd);
    if (is_one)
        found = whole;
    else
        free(whole);
    if (r == SHD_OK)
        *ret_path = found;
    return r;
}
