/* See doctor_checkpoint.h. */
#include "client/ctl/doctor/doctor_checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "client/ctl/base/text.h"
#include "client/ctl/doctor/doctor_look.h"

#define FREE_MIN (UINT64_C(1) << 30)

static void check_space(struct doctor *d)
{
    struct statvfs fs;
    char text[TEXT_BYTES];
    if (statvfs(d->checkpoint, &fs) < 0)
        return;
    const uint64_t bytes = (uint64_t)fs.f_bavail * fs.f_frsize;
    text_size(bytes, text);
    if (bytes < FREE_MIN)
        doctor_warn(d, "make room: a checkpoint with optimizer state takes 12 bytes per parameter",
                    "%s: only %s free", d->checkpoint, text);
    else
        doctor_ok(d, "%s: can be written, %s free", d->checkpoint, text);
}

/* "" or what failed. */
static const char *try_write(const char *dir)
{
    char path[PATH_MAX];
    static const char byte = 0;
    const char *failed = "";
    if (snprintf(path, sizeof(path), "%s/.shardctl-doctor-XXXXXX", dir) >= (int)sizeof(path))
        return "name";
    const int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return "make a file";
    if (write(fd, &byte, 1) != 1)
        failed = "write";
    else if (fsync(fd) != 0)
        failed = "fsync";
    const int saved = errno;
    close(fd);
    unlink(path);
    errno = saved;
    return failed;
}

void doctor_checkpoint(struct doctor *d)
{
    struct stat st;
    if (d->checkpoint == NULL)
        return;
    const int r = stat(d->checkpoint, &st);
    if (r < 0 || !S_ISDIR(st.st_mode)) {
        doctor_fail(d, "make the directory, owned by who runs the daemons", "%s: %s", d->checkpoint,
                    r < 0 ? strerror(errno) : "not a directory");
        return;
    }
    const char *failed = try_write(d->checkpoint);
    if (failed[0] != '\0')
        doctor_fail(d, "give it to the daemons' user; under systemd also ReadWritePaths=",
                    "%s: cannot %s: %s", d->checkpoint, failed, strerror(errno));
    else
        check_space(d);
}
