#include "client/ctl/run/uplog.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/run/rundir.h"
#include "client/ctl/run/updir.h"
#include "proto/base/check.h"

static char current[RUNDIR_PATH_BYTES + sizeof(UPDIR_LOG_OLD) + 1]; /* "": stderr is no log */
static char old[sizeof(current)];

/* A new file at current, as stderr. */
static int start(struct shd_err *e)
{
    const int fd = open(current, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC | O_NOFOLLOW,
                        0600);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open '%s'", current);
    const int r = dup2(fd, STDERR_FILENO) < 0 ? err_sys(e, SHD_EIO, "write to '%s'", current)
                                              : SHD_OK;
    close(fd);
    return r;
}

int uplog_open(const char *dir, struct shd_err *e)
{
    CHECK(current[0] == '\0');
    snprintf(old, sizeof(old), "%s/" UPDIR_LOG_OLD, dir);
    snprintf(current, sizeof(current), "%s/" UPDIR_LOG, dir);
    const int r = start(e);
    if (r != SHD_OK)
        current[0] = '\0';
    return r;
}

void uplog_room(size_t bytes)
{
    struct stat st;
    struct shd_err ignored;
    if (current[0] == '\0' || fstat(STDERR_FILENO, &st) < 0 ||
        (uint64_t)st.st_size + bytes <= UPLOG_BYTES_MAX)
        return;
    if (rename(current, old) == 0 && start(&ignored) != SHD_OK)
        rename(old, current);
}
