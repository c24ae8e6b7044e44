/* See dir.h. */
#include "proto/base/dir.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

const char *dir_next(DIR **dir)
{
    const struct dirent *entry = *dir != NULL ? readdir(*dir) : NULL;
    if (entry != NULL)
        return entry->d_name;
    if (*dir != NULL)
        closedir(*dir);
    *dir = NULL;
    return NULL;
}

enum lock_state lock_look(const char *dir, const char *file)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", dir, file) >= (int)sizeof path)
        return LOCK_CLOSED;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return errno == ENOENT ? LOCK_GONE : LOCK_CLOSED;
    const int held = flock(fd, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK;
    close(fd);
    return held ? LOCK_HELD : LOCK_FREE;
}
