/* shardctl up: daemons that stay, with a keeper: this process in a session of its own, or in the
 * foreground. It does what `run` does without workers (supervise.h).
 *
 * Until the daemons are ready the keeper writes to the terminal of who started it, and ends if that
 * one does; then it tells it through a pipe, and writes to DIR/up.log. */
#include "client/ctl/run/up.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/run/supervise.h"
#include "proto/base/check.h"

static const char up_about[] =
    "Start N daemons at DIR that stay until `shardctl down`, and return when all are ready. On\n"
    "stdout comes the line by which a shell's later commands find them:\n"
    "  eval \"$(shardctl up --daemons 2)\" && shd-gpt --steps 20\n"
    "\n"
    "A keeper process holds their memory: a daemon that dies is started again and gets its state\n"
    "back. It writes to DIR/" UPDIR_LOG " (at 16 MiB that becomes DIR/" UPDIR_LOG_OLD
    "). Without keeper and daemons\n"
    "the state is gone, unless it was saved elsewhere. One keeper per directory; they are no "
    "service: a reboot ends them.";

static const char up_more[] =
    "default DIR: /run/shardd for root, else $XDG_RUNTIME_DIR/shardd; made when missing, and then\n"
    "removed with the last daemon. It must be yours, and no one else's to write to.\n"
    "\n"
    "environment: SHARDD_BIN is the daemon to start (default: the shardd beside shardctl, else by\n"
    "PATH).\n"
    "\n"
    "exit codes:\n"
    "  0  all daemons are ready; with --foreground: a signal (INT, TERM, HUP, QUIT) has ended "
    "them\n"
    "  1  not all got ready, or DIR is kept already: nothing is left behind; with --foreground "
    "also\n"
    "     when a daemon failed for good\n"
    "  2  the command line was wrong\n";

struct up {
    struct updir dir;
    struct devices devices;
    bool foreground, was_ready;
    int report_fd; /* owned write end; -1: in the foreground */
};

/* So that `eval` gets the address as it is. Listed devices are named, for their order counts. */
static void print_address(const struct up *up, const char *path)
{
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+:@%,";
    char address[DEVICES_ADDRESS_BYTES(RUNDIR_PATH_BYTES)];
    if (up->devices.listed)
        devices_address(&up->devices, path, address, sizeof(address));
    else
        snprintf(address, sizeof(address), "%s", path);
    const bool quote = address[strspn(address, plain)] != '\0';
    printf("export SHARDD_ADDRESS=%s", quote ? "'" : "");
    for (const char *c = address; *c != '\0'; c++)
        if (*c == '\'')
            fputs("'\\''", stdout);
        else
            putchar(*c);
    printf("%s\n", quote ? "'" : "");
    fflush(stdout);
}

/* From here on on our own: no terminal, no caller, no directory in the way. */
static int detach(struct up *up, struct shd_err *e)
{
    char log[RUNDIR_PATH_BYTES + sizeof(UPDIR_LOG) + 1];
    snprintf(log, sizeof(log), "%s/" UPDIR_LOG, up->dir.path);
    int rc = say_to_log(log, e);
    if (rc == SHD_OK && chdir("/") < 0)
        rc = err_sys(e, SHD_EIO, "leave for the background");
    prctl(PR_SET_PDEATHSIG, 0);
    return rc;
}

static int all_ready(void *arg, struct shd_err *e)
{
    struct up *up = arg;
    up->was_ready = true;
    if (up->foreground) {
        print_address(up, up->dir.path);
        return SHD_OK;
    }
    const int rc = detach(up, e);
    if (rc == SHD_OK && write(up->report_fd, "", 1) != 1)
        return err_sys(e, SHD_EIO, "tell that all are ready");
    close(up->report_fd);
    up->report_fd = -1;
    return rc;
}

/* Keep the daemons, from the lock to its release. */
static int keep(struct up *up, struct run_options *o, const char *path)
{
    struct shd_err e = { 0 };
    if (updir_take(path, &up->devices, &up->dir, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    o->dir = up->dir.path;
    o->ready = all_ready;
    o->arg = up;
    const int code = supervise(o);
    updir_release(&up->dir, /* keep_log= */ code != CTL_OK && up->was_ready);
    return code == CTL_OK ? CTL_OK : CTL_FAILED;
}

/* In the child: a session of its own, nothing of the caller's but its stderr until all is ready. */
static int keep_in_background(struct up *up, struct run_options *o, const char *path, pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        return CTL_FAILED;
    setsid();
    signal(SIGTERM, SIG_DFL); /* `down` must reach us */
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    const int null = open("/dev/null", O_RDWR);
    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(null, STDOUT_FILENO) < 0 ||
        dup2(up->report_fd, 3) < 0)
        return ctl_fail("cannot go to the background: %s", strerror(errno));
    close_range(4, ~0u, 0); /* files of the caller's would stay open as long as we run */
    fcntl(3, F_SETFD, FD_CLOEXEC);
    up->report_fd = 3;
    return keep(up, o, path);
}

/* Wait for the keeper's word. Returns the exit code; it has said what went wrong. */
static int await_keeper(const struct up *up, pid_t pid, int fd, const char *path)
{
    char byte;
    ssize_t n;
    do {
        n = read(fd, &byte, 1);
    } while (n < 0 && errno == EINTR);
    if (n == 1) {
        print_address(up, path);
        return CTL_OK;
    }
    int status = 0;
    char how[64];
    if (waitpid(pid, &status, 0) == pid && WIFSIGNALED(status))
        ctl_say("the keeper (pid %ld) %s", (long)pid, child_describe(status, how, sizeof(how)));
    return CTL_FAILED;
}

static int start_keeper(struct up *up, struct run_options *o, const char *path)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return ctl_fail("make a pipe: %s", strerror(errno));
    const pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        up->report_fd = ends[1];
        return keep_in_background(up, o, path, parent);
    }
    close(ends[1]);
    if (pid < 0)
        ctl_say("start the keeper: %s", strerror(errno));
    const int code = pid < 0 ? CTL_FAILED : await_keeper(up, pid, ends[0], path);
    close(ends[0]);
    return code;
}

int verb_up(int argc, char **argv)
{
    const char *wanted = NULL;
    static struct up up = { .report_fd = -1 };
    const char *list = NULL;
    struct run_options o = {
        .devices = &up.devices, .timeout_s = 60, .grace_s = 10, .max_restarts = 20
    };
    const struct flag table[] = {
        { "daemons", 'n', FLAG_U32, "N", "daemons to start, named cpu0, cpu1, ... (1)", &o.daemons,
          1, RUN_DAEMONS_MAX },
        { "devices", 0, FLAG_STRING, "LIST", "the daemons' devices instead, as gpu0,cpu0", &list, 0,
          0 },
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "where their sockets go (see below)", &wanted, 0,
          0 },
        { "threads-per-daemon", 't', FLAG_U32, "T", "compute threads (processors / N)",
          &o.threads_per_daemon, 1, RUN_THREADS_MAX },
        { "foreground", 'f', FLAG_BOOL, NULL, "stay here instead of a keeper in the background",
          &up.foreground, 0, 0 },
        { "timeout", 0, FLAG_U32, "SECONDS", "how long a daemon may take to be ready (60)",
          &o.timeout_s, 1, 86400 },
        { "max-restarts", 0, FLAG_U32, "N", "of one daemon in 10 s; 0: never (20)", &o.max_restarts,
          0, RUN_RESTARTS_MAX },
        { "grace", 0, FLAG_U32, "SECONDS", "how long what is told to stop may take (10)",
          &o.grace_s, 1, 86400 },
        { "verbose", 'v', FLAG_BOOL, NULL, "say what is started and stopped", &o.verbose, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(up, "shardctl up [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, NULL);
    if (code >= 0)
        return code;
    char path[RUNDIR_PATH_BYTES];
    struct shd_err e = { 0 };
    if (devices_parse(list, o.daemons, &up.devices, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    o.daemons = up.devices.count;
    if (updir_path(wanted, path, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    return up.foreground ? keep(&up, &o, path) : start_keeper(&up, &o, path);
}
