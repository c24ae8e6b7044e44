/* See logs.h. A log is a file that its keeper renames when it is full, and makes anew: who follows
 * it looks for that each time it has read all there is. */
#include "client/ctl/run/logs.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/session/where.h"

#define CHUNK_BYTES ((size_t)64 * 1024)
#define FOLLOW_NS   (200 * 1000 * 1000)

static const char logs_about[] = "Print what the keeper of `shardctl up` and its daemons have "
                                 "written, the older file first. It\n"
                                 "stays when they end, until the next `up` there. Daemons of "
                                 "systemd write to its journal, those\n"
                                 "of `shardctl run` to that one's stderr.";

static const char logs_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl logs --lines 50\n"
    "  shardctl logs --follow\n"
    "  journalctl -u 'shardd@*' --follow      daemons of systemd\n"
    "\n"
    "exit codes: 0; 1 there is no log; 2 the command line was wrong; 128 + N signal N\n";

struct logs {
    char dir[RUNDIR_PATH_BYTES];
    bool follow;
    uint32_t lines; /* 0: all */
};

static bool path_of(const struct logs *l, const char *file, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", l->dir, file) < PATH_MAX;
}

static int open_log(const struct logs *l, const char *file)
{
    char path[PATH_MAX];
    return path_of(l, file, path) ? open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW) : -1;
}

/* Copy all that is left of the file to stdout. False: nobody reads it any more. */
static bool copy(int fd)
{
    char chunk[CHUNK_BYTES];
    ssize_t n;
    while ((n = read(fd, chunk, sizeof chunk)) > 0)
        if (fwrite(chunk, 1, (size_t)n, stdout) != (size_t)n)
            return false;
    return fflush(stdout) == 0;
}

/* The newlines of a file from its end on until `lines` are found; *ret_left: how many are missing.
 * Returns the offset behind the last one found: from there on the file has so many lines. */
static off_t find_lines(int fd, uint32_t lines, uint32_t *ret_left)
{
    char chunk[4096];
    off_t at = lseek(fd, 0, SEEK_END);
    uint32_t found = 0;
    bool last = true; /* the newline at the very end is its line's own */
    while (at > 0) {
        const off_t from = at > (off_t)sizeof chunk ? at - (off_t)sizeof chunk : 0;
        const ssize_t n = pread(fd, chunk, (size_t)(at - from), from);
        for (ssize_t i = n; i > 0; i--) {
            const bool newline = chunk[i - 1] == '\n';
            if (newline && !last && ++found == lines) {
                *ret_left = 0;
                return from + i;
            }
            last = false;
        }
        if (n <= 0)
            break;
        at = from;
    }
    *ret_left = lines - found - (found < lines && !last); /* the first line has none before it */
    return 0;
}

/* Both files, or the last lines of them. *ret_fd: of the newer one, read to its end. */
static int show(const struct logs *l, int *ret_fd)
{
    const int old = open_log(l, UPDIR_LOG_OLD), fd = open_log(l, UPDIR_LOG);
    uint32_t left = 0;
    off_t from = 0, old_from = 0;
    if (fd < 0 && old < 0)
        return SHD_ENOENT;
    if (l->lines > 0)
        from = find_lines(fd, l->lines, &left);
    if (l->lines > 0 && left > 0 && old >= 0)
        old_from = find_lines(old, left, &left);
    const bool wants_old = old >= 0 && (l->lines == 0 || from == 0);
    bool reads = true;
    if (wants_old && lseek(old, old_from, SEEK_SET) >= 0)
        reads = copy(old);
    if (reads && fd >= 0 && lseek(fd, from, SEEK_SET) >= 0)
        reads = copy(fd);
    if (old >= 0)
        close(old);
    *ret_fd = fd;
    return reads ? SHD_OK : SHD_EIO;
}

/* The file has another name now, or is gone: a new one takes its place. */
static int renewed(const struct logs *l, int fd)
{
    struct stat ours, now;
    char path[PATH_MAX];
    if (fd >= 0 && path_of(l, UPDIR_LOG, path) && fstat(fd, &ours) == 0 && stat(path, &now) == 0 &&
        ours.st_dev == now.st_dev && ours.st_ino == now.st_ino)
        return fd;
    const int next = open_log(l, UPDIR_LOG);
    if (next < 0)
        return fd;
    if (fd >= 0) {
        copy(fd); /* what came in between */
        close(fd);
    }
    return next;
}

/* Until nobody reads; signals end it as they end any program. */
static void follow(const struct logs *l, int fd)
{
    while (fd < 0 || copy(fd)) {
        nanosleep(&(struct timespec){ .tv_nsec = FOLLOW_NS }, NULL);
        fd = renewed(l, fd);
    }
}

static int no_log(const struct logs *l, const char *where)
{
    const bool units = access("/run/systemd/system", F_OK) == 0 &&
                       strcmp(l->dir, WHERE_DEFAULT) == 0;
    ctl_say("no " UPDIR_LOG " in '%s'%s: no `shardctl up` has written there", l->dir, where);
    if (units)
        ctl_say("daemons of systemd write to the journal: journalctl -u 'shardd@*'%s",
                l->follow ? " --follow" : "");
    return CTL_FAILED;
}

/* Where no `up` goes on, the log of the last one is where it was: in the place that `up` takes. */
static int find(const char *given, struct logs *l, enum where_by *ret_by, struct shd_err *e)
{
    static struct where where;
    int r = where_find(given, &where, e);
    if (r == SHD_OK)
        r = where.by == WHERE_BY_DEFAULT && updir_path(NULL, l->dir, NULL) == SHD_OK
                ? SHD_OK
                : updir_find(given, l->dir, e);
    *ret_by = where.by;
    return r;
}

int verb_logs(int argc, char **argv)
{
    const char *address = NULL;
    struct logs l = { .lines = 0 };
    struct shd_err e = { 0 };
    enum where_by by = WHERE_GIVEN;
    int fd = -1;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(address),
        { "follow", 'f', FLAG_BOOL, NULL, "stay, and print what comes", &l.follow, 0, 0 },
        { "lines", 'n', FLAG_U32, "N", "the last N lines (all)", &l.lines, 1, UINT32_MAX },
    };
    const struct flags flags = VERB_FLAGS(logs, "shardctl logs [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, NULL);
    if (code >= 0)
        return code;
    int r = find(address, &l, &by, &e);
    if (r != SHD_OK)
        return r == SHD_EINVAL ? ctl_usage("%s", e.text) : ctl_fail("%s", e.text);
    r = show(&l, &fd);
    if (r == SHD_OK && l.follow)
        follow(&l, fd);
    if (fd >= 0)
        close(fd);
    return r == SHD_ENOENT ? no_log(&l, where_said(by)) : CTL_OK;
}
