#include "client/ctl/base/updir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"

#define LOCK_FILE   "up.lock"
#define SOCK_SUFFIX ".sock"
#define GONE_TRIES  100 /* of 20 ms: a killed keeper's daemons may take a moment to be gone */

/* -- Which ------------------------------------------------------------------------------------ */

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

/* dir/file; false when that is too long. */
static bool join(char path[PATH_MAX], const char *dir, const char *file)
{
    return snprintf(path, PATH_MAX, "%s/%s", dir, file) < PATH_MAX;
}

static void remove_in(const char *dir, const char *file)
{
    char path[PATH_MAX];
    if (join(path, dir, file))
        unlink(path);
}

/* -- Who keeps it ----------------------------------------------------------------------------- */

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

/* Who holds the lock of an open lock file; as updir_keeper(). */
static pid_t lock_owner(int fd)
{
    struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
    if (fcntl(fd, F_GETLK, &lock) < 0 || lock.l_type == F_UNLCK)
        return 0;
    return lock.l_pid > 0 ? lock.l_pid : -1;
}

pid_t updir_keeper(const char *path, uint32_t *ret_daemons)
{
    char file[PATH_MAX];
    bool made = false;
    if (!join(file, path, LOCK_FILE))
        return 0;
    const int fd = open(file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
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

/* -- What is in it ---------------------------------------------------------------------------- */

/* True when a live daemon holds the lock of a device. */
static bool device_is_live(const char *dir, const char *device)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/%s.lock", dir, device) >= PATH_MAX)
        return false;
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    const bool live = flock(fd, LOCK_EX | LOCK_NB) < 0;
    close(fd);
    return live;
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

/* Remove the files of a daemon that is gone: all (DEVICE.*) in a directory that was made for us,
 * elsewhere its sockets. There its lock file stays: a daemon that starts under another manager may
 * have opened it. */
static void remove_device(const struct updir *up, const char *device)
{
    const size_t bytes = strlen(device);
    DIR *dir = opendir(up->path);
    if (dir == NULL)
        return;
    for (const struct dirent *d = readdir(dir); d != NULL; d = readdir(dir)) {
        const char *suffix = d->d_name + bytes;
        if (strncmp(d->d_name, device, bytes) != 0 || suffix[0] != '.')
            continue;
        if (up->made || strcmp(suffix, SOCK_SUFFIX) == 0 || strcmp(suffix, ".zmq") == 0 ||
            strcmp(suffix, ".status") == 0)
            remove_in(up->path, d->d_name);
    }
    closedir(dir);
}

/* Remove the sockets of dead daemons; a live one is an error. */
static int clear_sockets(const struct updir *up, struct shd_err *e)
{
    int rc = SHD_OK;
    DIR *dir = opendir(up->path);
    if (dir == NULL)
        return err_sys(e, SHD_EIO, "open '%s'", up->path);
    for (const struct dirent *d = readdir(dir); d != NULL && rc == SHD_OK; d = readdir(dir)) {
        const size_t bytes = strlen(d->d_name), suffix = strlen(SOCK_SUFFIX);
        char device[NAME_MAX + 1];
        if (bytes <= suffix || strcmp(d->d_name + bytes - suffix, SOCK_SUFFIX) != 0)
            continue;
        snprintf(device, sizeof(device), "%.*s", (int)(bytes - suffix), d->d_name);
        if (device_gone(up->path, device))
            remove_device(up, device);
        else
            rc = err_set(e, SHD_EBUSY,
                         "a daemon for '%s' runs at '%s', not started by `shardctl up`: use "
                         "another --runtime-dir",
                         device, up->path);
    }
    closedir(dir);
    return rc;
}

static int prepare(struct updir *dir, struct shd_err *e)
{
    read_lock_text(dir->lock_fd, &(uint32_t){ 0 }, &dir->made);
    int rc = clear_sockets(dir, e);
    if (rc != SHD_OK)
        return rc;
    remove_in(dir->path, NOTIFY_FILE);
    char log[PATH_MAX], old[PATH_MAX];
    if (join(log, dir->path, UPDIR_LOG) && join(old, dir->path, UPDIR_LOG_OLD))
        rename(log, old); /* of a keeper that was killed or gave up: somebody may want to know */
    char text[64];
    const int n = snprintf(text, sizeof(text), "daemons=%" PRIu32 " made=%d\n", dir->devices->count,
                           dir->made);
    if (ftruncate(dir->lock_fd, 0) < 0 || pwrite(dir->lock_fd, text, (size_t)n, 0) != n)
        rc = err_sys(e, SHD_EIO, "write '%s/" LOCK_FILE "'", dir->path);
    return rc;
}

int updir_take(const char *path, const struct devices *devices, struct updir *ret_dir,
               struct shd_err *e)
{
    struct updir dir = { .lock_fd = -1, .devices = devices };
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
    remove_in(dir->path, NOTIFY_FILE);
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
