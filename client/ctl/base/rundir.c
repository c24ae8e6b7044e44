#include "client/ctl/base/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"

#define RUNDIR_PREFIX     "shardd-run-"
#define RUNDIR_LOCK       "lock"
#define RUNDIR_UNLOCKED_S 60 /* without a lock file: younger is being made, older was left */
#define RUNDIR_ATTEMPTS   8

/* The next place to try, in order; false when there is none left. */
static bool base_get(unsigned index, char *buf, size_t bytes)
{
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    const char *home = getenv("HOME");
    int n = -1;
    if (index == 0)
        n = snprintf(buf, bytes, "%s", xdg != NULL ? xdg : "");
    else if (index == 1)
        n = snprintf(buf, bytes, "%s", geteuid() == 0 ? "/run" : "");
    else if (index == 2)
        n = home == NULL ? 0 : snprintf(buf, bytes, "%s/.cache/shardd", home);
    if (n >= (int)bytes)
        buf[0] = '\0';
    return n >= 0;
}

/* Make a directory and its parents, 0700 where they are missing. */
static void make_path(const char *path)
{
    char part[PATH_MAX];
    for (const char *slash = strchr(path + 1, '/');; slash = strchr(slash + 1, '/')) {
        const size_t bytes = slash != NULL ? (size_t)(slash - path) : strlen(path);
        if (bytes >= sizeof(part))
            return;
        memcpy(part, path, bytes);
        part[bytes] = '\0';
        if ((mkdir(part, 0700) < 0 && errno != EEXIST) || slash == NULL)
            return; /* rundir_check() says what is wrong */
    }
}

static bool is_in(const char *path, const char *dir)
{
    const size_t bytes = strlen(dir);
    return strncmp(path, dir, bytes) == 0 && (path[bytes] == '/' || path[bytes] == '\0');
}

/* A base must be a directory of ours that no one else can write to; one in our home is made. */
int rundir_check(const char *base, bool make, struct shd_err *e)
{
    struct stat st;
    if (base[0] != '/')
        return err_set(e, SHD_EINVAL, "'%s' is not an absolute path", base);
    if (is_in(base, "/tmp") || is_in(base, "/var/tmp") || is_in(base, "/dev/shm"))
        return err_set(e, SHD_EAUTH, "'%s' is where everyone can write", base);
    if (make)
        make_path(base);
    if (stat(base, &st) < 0)
        return err_sys(e, SHD_EIO, "'%s'", base);
    if (!S_ISDIR(st.st_mode))
        return err_set(e, SHD_EINVAL, "'%s' is not a directory", base);
    if (st.st_uid != geteuid())
        return err_set(e, SHD_EAUTH, "'%s' belongs to uid %u, we are %u", base, (unsigned)st.st_uid,
                       (unsigned)geteuid());
    if ((st.st_mode & 022) != 0)
        return err_set(e, SHD_EAUTH, "'%s' can be written to by others (mode %04o)", base,
                       (unsigned)st.st_mode & 07777);
    return SHD_OK;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

static int remove_tree(const char *path)
{
    return nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

/* Take the lock of a directory, making its file when asked. -1: someone else has it. */
static int lock_take(const char *dir, int create)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/" RUNDIR_LOCK, dir) >= (int)sizeof(path))
        return -1;
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | create, 0600);
    if (fd < 0)
        return -1;
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Remove one directory if it is ours and its owner is dead. */
static void sweep_one(const char *path, void *arg)
{
    (void)arg;
    struct stat st;
    char lock[PATH_MAX];
    if (lstat(path, &st) < 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid())
        return;
    if (snprintf(lock, sizeof(lock), "%s/" RUNDIR_LOCK, path) >= (int)sizeof(lock))
        return;
    if (access(lock, F_OK) < 0) {
        if (errno == ENOENT && time(NULL) - st.st_mtime > RUNDIR_UNLOCKED_S)
            remove_tree(path);
        return;
    }
    const int fd = lock_take(path, 0);
    if (fd < 0)
        return;
    remove_tree(path); /* under its lock: two sweepers do not meet */
    close(fd);
}

/* Calls fn with the path of each run's directory in base. */
static void for_each_run(const char *base, void (*fn)(const char *path, void *arg), void *arg)
{
    DIR *dir = opendir(base);
    if (dir == NULL)
        return;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        char path[PATH_MAX];
        if (strncmp(d->d_name, RUNDIR_PREFIX, strlen(RUNDIR_PREFIX)) == 0 &&
            snprintf(path, sizeof(path), "%s/%s", base, d->d_name) < (int)sizeof(path))
            fn(path, arg);
    }
    closedir(dir);
}

struct live {
    char (*paths)[RUNDIR_PATH_BYTES];
    uint32_t max, count;
};

static void note_live(const char *path, void *arg)
{
    struct live *live = arg;
    struct stat st;
    char lock[PATH_MAX];
    if (lstat(path, &st) < 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid() ||
        strlen(path) >= RUNDIR_PATH_BYTES ||
        snprintf(lock, sizeof(lock), "%s/" RUNDIR_LOCK, path) >= (int)sizeof(lock))
        return;
    const int fd = open(lock, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return;
    if (flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK) {
        if (live->count < live->max)
            snprintf(live->paths[live->count], RUNDIR_PATH_BYTES, "%s", path);
        live->count++;
    }
    close(fd);
}

uint32_t rundir_live(char (*ret_paths)[RUNDIR_PATH_BYTES], uint32_t max)
{
    struct live live = { ret_paths, max, 0 };
    char base[PATH_MAX];
    for (unsigned i = 0; base_get(i, base, sizeof(base)); i++) {
        struct shd_err why = { 0 };
        if (base[0] == '\0' || rundir_check(base, /* make= */ false, &why) != SHD_OK)
            continue;
        for_each_run(base, note_live, &live);
        break;
    }
    return live.count;
}

static int make_once(const char *base, struct rundir *ret_dir, struct shd_err *e)
{
    struct rundir dir = { .lock_fd = -1 };
    const int n = snprintf(dir.path, sizeof(dir.path), "%s/" RUNDIR_PREFIX "XXXXXX", base);
    if (n >= (int)sizeof(dir.path))
        return err_set(e, SHD_ERANGE,
                       "'%s' is too long for sockets in it: %d bytes with the run's own part, "
                       "the limit is %zu (set XDG_RUNTIME_DIR to a shorter path)",
                       base, n, sizeof(dir.path) - 1);
    if (mkdtemp(dir.path) == NULL)
        return err_sys(e, SHD_EIO, "make '%s'", dir.path);
    dir.lock_fd = lock_take(dir.path, O_CREAT);
    struct stat st;
    /* A sweeper may have had the lock between our open and flock: then the file is gone. */
    if (dir.lock_fd < 0 || fstat(dir.lock_fd, &st) < 0 || st.st_nlink == 0) {
        if (dir.lock_fd >= 0)
            close(dir.lock_fd);
        remove_tree(dir.path);
        return err_set(e, SHD_EBUSY, "lock '%s'", dir.path);
    }
    *ret_dir = dir;
    return SHD_OK;
}

static int make_in(const char *base, struct rundir *ret_dir, struct shd_err *e)
{
    for_each_run(base, sweep_one, NULL);
    int r = SHD_EBUSY;
    for (unsigned i = 0; i < RUNDIR_ATTEMPTS && r == SHD_EBUSY; i++)
        r = make_once(base, ret_dir, e);
    return r;
}

int rundir_new(struct rundir *ret_dir, struct shd_err *e)
{
    char whys[SHD_ERR_TEXT_BYTES] = "";
    char base[PATH_MAX];
    for (unsigned i = 0; base_get(i, base, sizeof(base)); i++) {
        struct shd_err why = { 0 };
        if (base[0] == '\0')
            continue;
        int r = rundir_check(base, /* make= */ i == 2, &why);
        if (r == SHD_OK)
            r = make_in(base, ret_dir, &why);
        if (r == SHD_OK || r == SHD_ERANGE)
            return r == SHD_OK ? r : err_set(e, r, "%s", why.text);
        const size_t used = strlen(whys);
        if (snprintf(whys + used, sizeof(whys) - used, "%s%s", used > 0 ? "; " : "", why.text) < 0)
            break;
    }
    return err_set(e, SHD_ENOENT, "no place for a private runtime directory: %s",
                   whys[0] != '\0' ? whys : "XDG_RUNTIME_DIR and HOME are not set");
}

int rundir_remove(struct rundir *dir, struct shd_err *e)
{
    CHECK(dir->lock_fd >= 0);
    const int r = remove_tree(dir->path);
    const int failed = errno;
    close(dir->lock_fd);
    dir->lock_fd = -1;
    errno = failed;
    return r == 0 ? SHD_OK : err_sys(e, SHD_EIO, "remove '%s'", dir->path);
}
