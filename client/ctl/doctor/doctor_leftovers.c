/* What killed programs leave: directories of `shardctl run`, and memory that only a keeper holds.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/doctor/doctor.h"

#define RUN_PREFIX     "shardd-run-" /* as rundir.c makes them */
#define SEGMENT_PREFIX "/memfd:shardd"

/* -- Run directories --------------------------------------------------------------------------- */

/* Nobody holds the lock of a directory whose run was killed. */
static bool run_is_dead(const char *dir)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof(path), "%s/lock", dir) >= (int)sizeof(path))
        return false;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    const bool dead = flock(fd, LOCK_SH | LOCK_NB) == 0;
    close(fd);
    return dead;
}

static void check_runs_in(struct doctor *d, const char *base)
{
    DIR *dir = opendir(base);
    const struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        char path[PATH_MAX];
        if (strncmp(entry->d_name, RUN_PREFIX, strlen(RUN_PREFIX)) != 0 ||
            snprintf(path, sizeof(path), "%s/%s", base, entry->d_name) >= (int)sizeof(path))
            continue;
        if (run_is_dead(path))
            doctor_warn(d, "the next `shardctl run` removes it", "%s was left by a killed run",
                        path);
    }
    if (dir != NULL)
        closedir(dir);
}

static void check_runs(struct doctor *d)
{
    char cache[PATH_MAX];
    const char *xdg = getenv("XDG_RUNTIME_DIR"), *home = getenv("HOME");
    if (xdg != NULL && strcmp(xdg, "/run") != 0)
        check_runs_in(d, xdg);
    check_runs_in(d, "/run");
    if (home != NULL && snprintf(cache, sizeof(cache), "%s/.cache/shardd", home) < PATH_MAX)
        check_runs_in(d, cache);
}

/* -- Memory ------------------------------------------------------------------------------------ */

struct holders {
    unsigned daemons, others;           /* processes with segments open */
    uint64_t daemon_bytes, other_bytes; /* counted once per holder */
    unsigned unreadable;                /* processes of other users */
    char other[64];                     /* "systemd (pid 1)" */
};

static uint64_t segment_bytes(const char *fd_path)
{
    char target[300];
    struct stat st;
    const ssize_t n = readlink(fd_path, target, sizeof(target) - 1);
    if (n <= 0)
        return 0;
    target[n] = '\0';
    if (strncmp(target, SEGMENT_PREFIX, strlen(SEGMENT_PREFIX)) != 0 || stat(fd_path, &st) != 0)
        return 0;
    return (uint64_t)st.st_blocks * 512u; /* what is really there, not what is reserved */
}

static void count_process(struct holders *h, pid_t pid)
{
    char path[PATH_MAX], name[32] = "?";
    uint64_t bytes = 0;
    unsigned segments = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    if (dir == NULL) {
        h->unreadable += errno == EACCES;
        return;
    }
    const struct dirent *entry;
    while ((entry = readdir(dir)) != NULL) {
        char fd_path[PATH_MAX];
        snprintf(fd_path, sizeof(fd_path), "/proc/%d/fd/%s", (int)pid, entry->d_name);
        const uint64_t more = segment_bytes(fd_path);
        segments += more > 0;
        bytes += more;
    }
    closedir(dir);
    if (segments == 0)
        return;
    doctor_process_name(pid, name, sizeof(name));
    if (strcmp(name, "shardd") == 0) {
        h->daemons++;
        h->daemon_bytes += bytes;
        return;
    }
    h->others++;
    h->other_bytes += bytes;
    snprintf(h->other, sizeof(h->other), "%s (pid %d)", name, (int)pid);
}

static void count_all(struct holders *h)
{
    DIR *dir = opendir("/proc");
    const struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        const int pid = atoi(entry->d_name);
        if (pid > 0 && pid != getpid())
            count_process(h, pid);
    }
    if (dir != NULL)
        closedir(dir);
}

void doctor_leftovers(struct doctor *d)
{
    struct holders h = { 0 };
    char daemon_bytes[24], other_bytes[24];
    check_runs(d);
    count_all(&h);
    const char *partly = h.unreadable > 0 ? "; processes of other users could not be seen" : "";
    doctor_bytes(h.daemon_bytes, daemon_bytes);
    doctor_bytes(h.other_bytes, other_bytes);
    if (h.others > 0 && h.daemons == 0)
        doctor_warn(d, "start their daemons again, or let go: stop the units, or end the holder",
                    "%s of state held by %s without a daemon%s", other_bytes, h.other, partly);
    else if (h.daemons > 0)
        doctor_ok(d, "%s in segments of %u daemon%s, %u other process%s hold%s some%s",
                  daemon_bytes, h.daemons, h.daemons == 1 ? "" : "s", h.others,
                  h.others == 1 ? "" : "es", h.others == 1 ? "s" : "", partly);
    else
        doctor_ok(d, "no memory of daemons here%s", partly);
}
