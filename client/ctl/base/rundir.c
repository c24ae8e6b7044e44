/* See rundir.h. */
#include "client/ctl/base/rundir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/down_note.h"
#include "client/session/where.h"
#include "proto/base/check.h"
#include "proto/base/dir.h"
#include "proto/files/replicas.h"
#include "proto/share/listen.h"

#define RUNDIR_UNLOCKED_S 60 /* without a lock file: younger is being made, older was left */
#define RUNDIR_ATTEMPTS   8

/* -- Directories and locks ----------------------------------------------------------------------
 */

/* dir/file; false when that is too long. */
static bool join(char path[PATH_MAX], const char *dir, const char *file)
{
    return snprintf(path, PATH_MAX, "%s/%s", dir, file) < PATH_MAX;
}

/* -- Of `shardctl run` --------------------------------------------------------------------------
 */

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

/* One component of a path, the first bytes of it. Below a directory that all can write to (*shared)
 * each has to be ours or root's, and no link, which may lead elsewhere tomorrow. */
static int check_part(const char *path, size_t bytes, bool *shared, struct shd_err *e)
{
    char part[PATH_MAX];
    struct stat st;
    if (bytes >= sizeof(part))
        return err_set(e, SHD_ERANGE, "'%.60s...' is too long", path);
    memcpy(part, path, bytes);
    part[bytes] = '\0';
    if (lstat(part, &st) < 0)
        return err_sys(e, SHD_EIO, "'%s'", part);
    if (*shared && (S_ISLNK(st.st_mode) || (st.st_uid != geteuid() && st.st_uid != 0)))
        return err_set(e, SHD_EAUTH, "'%s' is %s uid %u, where everyone can write", part,
                       S_ISLNK(st.st_mode) ? "a link of" : "of", (unsigned)st.st_uid);
    if (S_ISLNK(st.st_mode) || (st.st_mode & S_IWOTH) == 0)
        return SHD_OK;
    *shared = true;
    if ((st.st_mode & S_ISVTX) == 0 && path[bytes] != '\0')
        return err_set(e, SHD_EAUTH, "'%s' lets everyone move what is in it (mode %04o)", part,
                       (unsigned)st.st_mode & 07777);
    return SHD_OK;
}

/* Each component in turn, the last one included. */
static int check_way(const char *path, struct shd_err *e)
{
    bool shared = false;
    const char *at = path;
    int r = SHD_OK;
    while (r == SHD_OK && *at != '\0') {
        at += strspn(at, "/");
        at += strcspn(at, "/");
        r = check_part(path, (size_t)(at - path), &shared, e);
    }
    return r;
}

int rundir_check(const char *base, bool make, struct shd_err *e)
{
    struct stat st;
    if (base[0] != '/')
        return err_set(e, SHD_EINVAL, "'%s' is not an absolute path", base);
    if (make)
        make_path(base);
    const int r = check_way(base, e);
    if (r != SHD_OK)
        return r;
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
    if (!join(path, dir, WHERE_LOCK))
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

/* Remove a directory whose owner is dead. */
static void sweep_one(const char *path, void *arg)
{
    (void)arg;
    struct stat st;
    const enum lock_state state = lock_look(path, WHERE_LOCK);
    const int fd = state == LOCK_FREE ? lock_take(path, 0) : -1;
    if (fd >= 0) {
        remove_tree(path); /* under its lock: two sweepers do not meet */
        close(fd);
    } else if (state == LOCK_GONE && stat(path, &st) == 0 &&
               time(NULL) - st.st_mtime > RUNDIR_UNLOCKED_S) {
        remove_tree(path);
    }
}

void rundir_each(void (*fn)(const char *path, void *arg), void *arg)
{
    char base[PATH_MAX];
    for (unsigned i = 0; where_base(i, base, sizeof(base)); i++)
        if (base[0] != '\0')
            where_each(base, fn, arg);
}

static int make_once(const char *base, const char *prefix, struct rundir *ret_dir,
                     struct shd_err *e)
{
    struct rundir dir = { .lock_fd = -1 };
    const int n = snprintf(dir.path, sizeof(dir.path), "%s/%sXXXXXX", base, prefix);
    if (n >= (int)sizeof(dir.path))
        return err_set(e, SHD_ERANGE,
                       "'%s' is too long for sockets in it: %d bytes with the run's own part, "
                       "the limit is %zu (set XDG_RUNTIME_DIR to a shorter path)",
                       base, n, sizeof(dir.path) - 1);
    if (mkdtemp(dir.path) == NULL)
        return err_sys(e, SHD_EIO, "make '%s'", dir.path);
    dir.lock_fd = lock_take(dir.path, O_CREAT);
    if (dir.lock_fd >= 0) /* names us to updir_keeper(); where it fails nobody finds us by it */
        fcntl(dir.lock_fd, F_SETLK, &(struct flock){ .l_type = F_WRLCK, .l_whence = SEEK_SET });
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

static int make_in(const char *base, const char *prefix, struct rundir *ret_dir, struct shd_err *e)
{
    where_each(base, sweep_one, NULL);
    int r = SHD_EBUSY;
    for (unsigned i = 0; i < RUNDIR_ATTEMPTS && r == SHD_EBUSY; i++)
        r = make_once(base, prefix, ret_dir, e);
    return r;
}

int rundir_new(const char *prefix, struct rundir *ret_dir, struct shd_err *e)
{
    char whys[SHD_ERR_TEXT_BYTES] = "";
    char base[PATH_MAX];
    for (unsigned i = 0; where_base(i, base, sizeof(base)); i++) {
        struct shd_err why = { 0 };
        if (base[0] == '\0')
            continue;
        int r = rundir_check(base, /* make= */ i == 2, &why);
        if (r == SHD_OK)
            r = make_in(base, prefix, ret_dir, &why);
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

void rundir_note_address(const struct rundir *dir, const struct devices *devices, const char *path)
{
    char address[DEVICES_ADDRESS_BYTES(RUNDIR_PATH_BYTES)];
    if (devices->listed) /* their order counts */
        devices_address(devices, path, address, sizeof(address));
    else
        snprintf(address, sizeof(address), "%s", path);
    rundir_note(dir, address);
}

void rundir_note(const struct rundir *dir, const char *address)
{
    if (ftruncate(dir->lock_fd, 0) < 0 || pwrite(dir->lock_fd, address, strlen(address), 0) < 0)
        return; /* then all that is at path counts */
}

/* -- Of `shardctl up` ---------------------------------------------------------------------------
 */

#define LOCK_FILE   "up.lock"
#define SOCK_SUFFIX ".sock"
#define GONE_TRIES  100 /* of 20 ms: a killed keeper's daemons may take a moment to be gone */
#define HEARD_TRIES 5

int updir_path(const char *wanted, char path[RUNDIR_PATH_BYTES], struct shd_err *e)
{
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    char cwd[PATH_MAX];
    int n;
    if (wanted != NULL && wanted[0] == '/')
        n = snprintf(path, RUNDIR_PATH_BYTES, "%s", wanted);
    else if (wanted != NULL && getcwd(cwd, sizeof(cwd)) != NULL)
        n = snprintf(path, RUNDIR_PATH_BYTES, "%s/%s", cwd, wanted);
    else if (wanted != NULL)
        return err_sys(e, SHD_EIO, "find '%s'", wanted);
    else if (geteuid() == 0)
        n = snprintf(path, RUNDIR_PATH_BYTES, "/run/shardd");
    else if (xdg != NULL && xdg[0] == '/')
        n = snprintf(path, RUNDIR_PATH_BYTES, "%s/shardd", xdg);
    else
        return err_set(e, SHD_ENOENT, "XDG_RUNTIME_DIR is not set: give --runtime-dir");
    if (n >= (int)RUNDIR_PATH_BYTES)
        return err_set(e, SHD_ERANGE,
                       "the runtime directory's path has %d bytes, at most %u leave room for "
                       "sockets in it",
                       n, RUNDIR_PATH_BYTES - 1);
    while (n > 1 && path[n - 1] == '/')
        path[--n] = '\0';
    return SHD_OK;
}

int updir_find(const char *given, char path[RUNDIR_PATH_BYTES], struct shd_err *e)
{
    struct where where;
    const int r = where_find(given, &where, e);
    if (r != SHD_OK)
        return r;
    if (strncmp(where.address, "local:", 6) == 0)
        return err_set(e, SHD_ENOTSUP, "'%.60s'%s: owners inside a process are no daemons",
                       where.address, where_said(where.by));
    where.address[strcspn(where.address, "?")] = '\0';
    return updir_path(where.address, path, e);
}

static void remove_in(const char *dir, const char *file)
{
    char path[PATH_MAX];
    if (join(path, dir, file))
        unlink(path);
}

/* "daemons=4 made=1"; what is not there stays as it was. */
static void read_lock_text(int fd, uint32_t *daemons, bool *made)
{
    char text[64];
    const ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    text[n > 0 ? n : 0] = '\0';
    const char *count = strstr(text, "daemons=");
    if (count != NULL)
        *daemons = (uint32_t)strtoul(count + strlen("daemons="), NULL, 10);
    if (strstr(text, "made=1") != NULL)
        *made = true;
}

/* The process that has the lock of an open lock file, as updir_keeper() returns it. */
static pid_t lock_owner(int fd)
{
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    if (fcntl(fd, F_GETLK, &lock) < 0 || lock.l_type == F_UNLCK)
        return 0;
    return lock.l_pid > 0 ? lock.l_pid : -1;
}

/* The lock file of whoever keeps path: `shardctl up`, or a `shardctl run`. -1: nobody ever did. */
static int open_lock(const char *path)
{
    static const char *const names[] = { LOCK_FILE, WHERE_LOCK };
    char file[PATH_MAX];
    int fd = -1;
    for (size_t i = 0; i < ARRAY_SIZE(names) && fd < 0; i++)
        if (join(file, path, names[i]))
            fd = open(file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    return fd;
}

pid_t updir_keeper(const char *path, uint32_t *ret_daemons)
{
    bool made = false;
    const int fd = open_lock(path);
    if (fd < 0)
        return 0;
    const pid_t pid = lock_owner(fd);
    *ret_daemons = 0;
    if (pid != 0)
        read_lock_text(fd, ret_daemons, &made);
    close(fd);
    return pid;
}

/* Open and lock the lock file. Errors: SHD_EBUSY someone has it; SHD_EIO. */
static int take_lock(const char *path, int *ret_fd, struct shd_err *e)
{
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    char file[PATH_MAX];
    struct stat st;
    if (!join(file, path, LOCK_FILE))
        return err_set(e, SHD_ERANGE, "'%s' is too long", path);
    const int fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open '%s'", file);
    if (fcntl(fd, F_SETLK, &lock) == 0 && fstat(fd, &st) == 0 && st.st_nlink > 0) {
        *ret_fd = fd;
        return SHD_OK;
    }
    const pid_t pid = lock_owner(fd);
    close(fd);
    return err_set(e, SHD_EBUSY,
                   "'%s' is kept by a `shardctl up` that runs, pid %ld; `shardctl down "
                   "--runtime-dir %s` stops it",
                   path, (long)pid, path);
}

static bool device_is_live(const char *dir, const char *device)
{
    char file[NAME_MAX + 8];
    snprintf(file, sizeof(file), "%s.lock", device);
    return lock_look(dir, file) == LOCK_HELD;
}

/* Wait until no daemon of a device runs; false: one that stays does. */
static bool device_gone(const char *dir, const char *device)
{
    for (int i = 0; i < GONE_TRIES; i++) {
        if (!device_is_live(dir, device))
            return true;
        nanosleep(&(struct timespec){ .tv_nsec = 20 * 1000 * 1000 }, NULL);
    }
    return false;
}

/* A daemon that is being ended lets go of its lock a moment before its socket; who listens on
 * stands in for another host's daemon (`shardd --relay`). */
static bool somebody_listens(const char *dir, const char *socket)
{
    char path[PATH_MAX];
    if (!join(path, dir, socket))
        return false;
    for (int i = 0; i < HEARD_TRIES; i++) {
        if (!listen_is_bound(path))
            return false;
        nanosleep(&(struct timespec){ .tv_nsec = 20 * 1000 * 1000 }, NULL);
    }
    return true;
}

/* Remove the files of a daemon that is gone: all (DEVICE.*) in a directory that was made for us,
 * elsewhere its sockets. There its lock file stays: a daemon that starts under another manager may
 * have opened it. */
static void remove_device(const struct updir *up, const char *device)
{
    const size_t bytes = strlen(device);
    char aside[NAME_MAX + 8];
    snprintf(aside, sizeof(aside), ".%ssock", device); /* of one that was killed as it made it */
    remove_in(up->path, aside);
    DIR *dir = opendir(up->path);
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        const char *suffix = name + bytes;
        if (strncmp(name, device, bytes) != 0 || suffix[0] != '.')
            continue;
        if (up->made || strcmp(suffix, SOCK_SUFFIX) == 0 || strcmp(suffix, ".zmq") == 0 ||
            strcmp(suffix, ".status") == 0)
            remove_in(up->path, name);
    }
}

/* Remove the sockets of dead daemons; a live one is an error. */
static int clear_sockets(const struct updir *up, struct shd_err *e)
{
    int rc = SHD_OK;
    DIR *dir = opendir(up->path);
    if (dir == NULL)
        return err_sys(e, SHD_EIO, "open '%s'", up->path);
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        const size_t bytes = strlen(name), suffix = strlen(SOCK_SUFFIX);
        char device[NAME_MAX + 1];
        if (rc != SHD_OK || bytes <= suffix || strcmp(name + bytes - suffix, SOCK_SUFFIX) != 0)
            continue;
        snprintf(device, sizeof(device), "%.*s", (int)(bytes - suffix), name);
        if (device_gone(up->path, device)) {
            if (!somebody_listens(up->path, name))
                remove_device(up, device);
            continue;
        }
        rc = err_set(e, SHD_EBUSY,
                     "a daemon for '%s' runs at '%s', not started by `shardctl up`: use "
                     "another --runtime-dir",
                     device, up->path);
    }
    return rc;
}

static int prepare(struct updir *dir, struct shd_err *e)
{
    read_lock_text(dir->lock_fd, &(uint32_t){ 0 }, &dir->made);
    int rc = clear_sockets(dir, e);
    if (rc != SHD_OK)
        return rc;
    remove_in(dir->path, NOTIFY_FILE);
    remove_in(dir->path, REPLICAS_FILE); /* who has replicas writes it anew */
    char log[PATH_MAX], old[PATH_MAX];
    if (join(log, dir->path, UPDIR_LOG) && join(old, dir->path, UPDIR_LOG_OLD))
        rename(log, old); /* of a keeper that was killed or gave up: somebody may want to know */
    char text[64];
    const int n = snprintf(text, sizeof(text), "daemons=%" PRIu32 " made=%d\n", dir->devices->count,
                           dir->made);
    if (ftruncate(dir->lock_fd, 0) < 0 || pwrite(dir->lock_fd, text, (size_t)n, 0) != n)
        rc = err_sys(e, SHD_EIO, "write '%s/" LOCK_FILE "'", dir->path);
    if (rc == SHD_OK && rundir_new(WHERE_UP_PREFIX, &dir->record, NULL) == SHD_OK)
        rundir_note_address(&dir->record, dir->devices, dir->path);
    return rc;
}

int updir_take(const char *path, const struct devices *devices, struct updir *ret_dir,
               struct shd_err *e)
{
    struct updir dir = { .lock_fd = -1, .devices = devices, .record.lock_fd = -1 };
    CHECK(path[0] == '/' && strlen(path) < sizeof(dir.path));
    snprintf(dir.path, sizeof(dir.path), "%s", path);
    dir.made = access(path, F_OK) < 0 && errno == ENOENT;
    int rc = rundir_check(path, /* make= */ true, e);
    if (rc == SHD_OK)
        rc = take_lock(path, &dir.lock_fd, e);
    if (rc != SHD_OK)
        return rc;
    rc = prepare(&dir, e);
    if (rc == SHD_OK)
        *ret_dir = dir;
    else
        updir_release(&dir, /* keep_log= */ true);
    return rc;
}

void updir_release(struct updir *dir, bool keep_log)
{
    for (uint32_t i = 0; i < dir->devices->count; i++) {
        const char *device = dir->devices->names[i];
        if (!device_is_live(dir->path,
                            device)) /* else somebody's, which is why ours did not start */
            remove_device(dir, device);
    }
    if (dir->record.lock_fd >= 0)
        rundir_remove(&dir->record, NULL);
    remove_in(dir->path, NOTIFY_FILE);
    remove_in(dir->path, REPLICAS_FILE);
    remove_in(dir->path, DOWN_NOTE_FILE);
    if (!keep_log) {
        remove_in(dir->path, UPDIR_LOG);
        remove_in(dir->path, UPDIR_LOG_OLD);
    }
    if (!keep_log || !dir->made) /* else it says to the next keeper that the directory was made */
        remove_in(dir->path, LOCK_FILE);
    if (dir->made)
        rmdir(dir->path); /* fails, as it should, when others have put something there */
    close(dir->lock_fd);
    dir->lock_fd = -1;
}
