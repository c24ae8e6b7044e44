/* shardctl down: end what `shardctl up` started at a directory. */
#include "client/ctl/run/down.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "proto/base/check.h"

static const char down_about[] = "Stop the daemons that `shardctl up` started at DIR, and their "
                                 "keeper, and wait until they are\n"
                                 "gone. Their state goes with them, unless it was saved elsewhere.";

static const char down_more[] =
    "default DIR: /run/shardd for root, else $XDG_RUNTIME_DIR/shardd, as for `shardctl up`\n"
    "\n"
    "exit codes:\n"
    "  0  they are gone\n"
    "  1  nothing runs at DIR, or it did not stop in time\n"
    "  2  the command line was wrong\n";

/* A handle of the process that keeps path, not of a later one with its pid. Returns -1 when it has
 * gone meanwhile, or with what is wrong said. */
static int keeper_open(const char *path, pid_t pid)
{
    uint32_t daemons;
    const int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0) {
        if (errno != ESRCH)
            ctl_say("look at the keeper (pid %ld): %s", (long)pid, strerror(errno));
        return -1;
    }
    if (updir_keeper(path, &daemons) == pid)
        return fd;
    close(fd);
    return -1;
}

/* SIGTERM, and wait. Returns the exit code, has said what went wrong. */
static int stop(int fd, pid_t pid, const char *path, uint32_t timeout_s)
{
    if (syscall(SYS_pidfd_send_signal, fd, SIGTERM, NULL, 0) < 0 && errno != ESRCH)
        return ctl_fail("stop the keeper of '%s' (pid %ld): %s", path, (long)pid, strerror(errno));
    struct pollfd p = { .fd = fd, .events = POLLIN };
    int n;
    do {
        n = poll(&p, 1, (int)timeout_s * 1000);
    } while (n < 0 && errno == EINTR);
    if (n > 0)
        return CTL_OK;
    return ctl_fail("the keeper of '%s' (pid %ld) did not stop within %" PRIu32 " s (--timeout)",
                    path, (long)pid, timeout_s);
}

static int down(const char *path, uint32_t timeout_s)
{
    uint32_t daemons = 0;
    const pid_t pid = updir_keeper(path, &daemons);
    const int fd = pid > 0 ? keeper_open(path, pid) : -1;
    if (pid < 0)
        return ctl_fail("what runs at '%s' is in another pid namespace: stop it there", path);
    if (fd < 0)
        return ctl_fail("nothing runs at '%s'", path);
    const int code = stop(fd, pid, path, timeout_s);
    close(fd);
    if (code == CTL_OK)
        printf("stopped %" PRIu32 " daemon%s at %s\n", daemons, daemons == 1 ? "" : "s", path);
    return code;
}

int verb_down(int argc, char **argv)
{
    const char *wanted = NULL;
    uint32_t timeout_s = 30;
    const struct flag table[] = {
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "where they are (see below)", &wanted, 0, 0 },
        { "timeout", 0, FLAG_U32, "SECONDS", "how long they may take (30)", &timeout_s, 1, 86400 },
    };
    const struct flags flags = VERB_FLAGS(down, "shardctl down [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, NULL);
    if (code >= 0)
        return code;
    char path[RUNDIR_PATH_BYTES];
    struct shd_err e = { 0 };
    if (updir_path(wanted, path, &e) == SHD_OK)
        return down(path, timeout_s);
    return ctl_fail("%s", e.text);
}
