/* See say.h. */
#include "client/ctl/base/say.h"

#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"

static char current[PATH_MAX]; /* "": stderr is no log */
static char old[PATH_MAX];

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

int say_to_log(const char *path, struct shd_err *e)
{
    CHECK(current[0] == '\0');
    if (snprintf(old, sizeof(old), "%s" SAY_LOG_OLD, path) >= (int)sizeof(old))
        return err_set(e, SHD_ERANGE, "the log's path '%.60s...' is too long", path);
    snprintf(current, sizeof(current), "%s", path);
    const int r = start(e);
    if (r != SHD_OK)
        current[0] = '\0';
    return r;
}

void say_log_room(size_t bytes)
{
    struct stat st;
    struct shd_err ignored;
    if (current[0] == '\0' || fstat(STDERR_FILENO, &st) < 0 ||
        (uint64_t)st.st_size + bytes <= SAY_LOG_BYTES_MAX)
        return;
    if (rename(current, old) == 0 && start(&ignored) != SHD_OK)
        rename(old, current);
}

void ctl_say(const char *fmt, ...)
{
    char line[1024];
    int used = snprintf(line, sizeof(line), "shardctl: ");
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(line + used, sizeof(line) - (size_t)used - 1, fmt, args);
    va_end(args);
    if (n > 0)
        used = used + n < (int)sizeof(line) - 2 ? used + n : (int)sizeof(line) - 2;
    line[used] = '\n';
    say_log_room((size_t)used + 1);
    if (write(STDERR_FILENO, line, (size_t)used + 1) < 0)
        return; /* nobody reads our stderr: there is nowhere left to complain */
}
