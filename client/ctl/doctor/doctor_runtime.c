/* The runtime directory: whose it is, who else can get in, and locks that nobody has. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/doctor/doctor.h"

static void check_directory(struct doctor *d, const struct stat *st)
{
    const unsigned mode = (unsigned)st->st_mode & 07777u;
    if (!S_ISDIR(st->st_mode))
        doctor_fail(d, "remove it, or name another with --runtime-dir", "%s is not a directory",
                    d->runtime_dir);
    else if ((st->st_mode & S_IWOTH) != 0)
        doctor_fail(d, "chmod 0750 it", "%s has mode %04o: anyone can pose as a daemon",
                    d->runtime_dir, mode);
    else if ((st->st_mode & S_IWGRP) != 0)
        doctor_warn(d, "chmod 0750 it",
                    "%s has mode %04o: its group %u can pose as a daemon, so workers of other "
                    "users refuse to attach",
                    d->runtime_dir, mode, (unsigned)st->st_gid);
    else if (access(d->runtime_dir, R_OK | X_OK) != 0)
        doctor_fail(d, "become a member of its group, or run as its owner",
                    "%s (uid %u, group %u, mode %04o) is closed to this user, uid %u",
                    d->runtime_dir, (unsigned)st->st_uid, (unsigned)st->st_gid, mode,
                    (unsigned)geteuid());
    else
        doctor_ok(d, "%s: uid %u, group %u, mode %04o%s", d->runtime_dir, (unsigned)st->st_uid,
                  (unsigned)st->st_gid, mode,
                  (st->st_mode & S_IXGRP) != 0 ? " (members of the group may attach)" : "");
}

/* A lock file nobody locks: of a daemon that ended. Kept on purpose, so only counted. */
static bool lock_is_free(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    const bool is_free = flock(fd, LOCK_SH | LOCK_NB) == 0;
    close(fd);
    return is_free;
}

static void check_locks(struct doctor *d)
{
    DIR *dir = opendir(d->runtime_dir);
    unsigned held = 0, idle = 0;
    const struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        char path[PATH_MAX];
        const char *dot = strrchr(entry->d_name, '.');
        if (dot == NULL || strcmp(dot, ".lock") != 0)
            continue;
        snprintf(path, sizeof(path), "%s/%s", d->runtime_dir, entry->d_name);
        if (lock_is_free(path))
            idle++;
        else
            held++;
    }
    if (dir != NULL)
        closedir(dir);
    if (held + idle > 0)
        doctor_ok(d, "%u device%s locked by a daemon, %u lock file%s of ended ones (harmless)",
                  held, held == 1 ? "" : "s", idle, idle == 1 ? "" : "s");
}

void doctor_runtime(struct doctor *d)
{
    struct stat st;
    if (stat(d->runtime_dir, &st) == 0) {
        check_directory(d, &st);
        check_locks(d);
    } else if (errno == ENOENT) {
        doctor_ok(d, "no %s: no daemon was started there yet", d->runtime_dir);
    } else {
        doctor_fail(d, "run as a user that may look there", "%s: %s", d->runtime_dir,
                    strerror(errno));
    }
}
