/* See run.h: the command lines, and the keeper; supervise.c does the work. */
#include "client/ctl/run/run.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/run/lost.h"
#include "client/ctl/run/resume.h"
#include "client/ctl/run/run_flags.h"
#include "client/ctl/run/supervise.h"

/* -- run -----------------------------------------------------------------------------------------
 */

static const char run_about[] =
    "Start N daemons in a private directory, then W workers that find them by SHARDD_ADDRESS, and\n"
    "wait. Parameters and optimizer state live in the daemons. Everything started here ends here,\n"
    "whatever happens, and the directory is removed.\n"
    "\n"
    "A daemon that dies is started again and gets its state back: its memory is kept here. While\n"
    "there is any, one that cannot be started is tried for ever, at last every 30 s, with a line "
    "a\n"
    "minute. A worker killed by a signal (SIGPIPE apart) is started again with its rank; one that\n"
    "exits with a code other than 0 ends the run. Each of that is a line on stderr. What was "
    "started\n"
    "again --max-restarts times in 10 s waits until those are over; only a worker that crashes "
    "(by\n"
    "SIGSEGV, SIGABRT and the like) so often ends the run, and 8 daemons in a row that hold "
    "nothing\n"
    "and do not get ready. With 0 nothing is started again but daemons that hold something.\n"
    "A daemon that hangs, or a worker that is stopped (SIGSTOP), for --watchdog seconds is killed "
    "and\n"
    "started again, unless a debugger traces it. A worker that is slow is left alone.\n"
    "\n"
    "The run ends with its workers. With --checkpoint it saves first. When that fails the daemons\n"
    "stay, and what to do is said; without --checkpoint it is said what was lost.\n"
    "\n"
    "COMMAND is run W times with torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE,\n"
    "LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; OPENBLAS_NUM_THREADS and\n"
    "OMP_NUM_THREADS share out the processors unless you set them. Rank 0 has shardctl's own\n"
    "stdout and stderr; lines of other ranks ([rank 1]) and of daemons ([cpu0]) go to stderr.\n"
    "\n"
    "--resume DIR saves in DIR and begins with the latest checkpoint there, or fresh when there "
    "is\n"
    "none: one command line for the first start and for each after a kill, as batch systems "
    "requeue\n"
    "jobs. --checkpoint DIR refuses a DIR that holds later steps than the run begins with: they "
    "are\n"
    "another run's, which --keep would remove.\n"
    "\n"
    "With --elastic workers take work as they come (SHARDD_ELASTIC=1) instead of by rank. A of\n"
    "--workers A..B are started. SIGUSR1 to shardctl adds one, up to B; SIGUSR2 asks the newest "
    "to\n"
    "leave (SIGTERM), down to A. Signals in quick succession may count once. WORLD_SIZE is B; the\n"
    "rank of one that is gone is given to the next.";

static const char run_more[] =
    "examples:\n"
    "  shardctl run --daemons 2 --workers 2 -- shd-gpt --steps 20\n"
    "  shardctl run --resume /data/run1 --keep 3 -- shd-gpt --steps 20000      first, and again\n"
    "  shardctl run --restore /data/run1 --checkpoint /data/run2 -- shd-gpt --steps 20000\n"
    "  shardctl run --daemons 2 --elastic --workers 1..4 -- shd-gpt --steps 200\n"
    "  shardctl run --devices gpu0,gpu1 --workers 2 -- shd-gpt --steps 20\n"
    "\n"
    "environment: SHARDD_BIN is the daemon to start (default: the shardd beside shardctl, else by\n"
    "PATH).\n"
    "\n"
    "signals: INT, TERM, HUP and QUIT are passed to the workers; a second one, at least half a\n"
    "second later, kills what still runs. TSTP (Ctrl-Z) suspends the workers with shardctl.\n"
    "\n"
    "exit codes:\n"
    "  0        every worker ended with 0\n"
    "  1        a daemon failed for good, or nothing could be started\n"
    "  2        the command line was wrong\n"
    "  73       --checkpoint: no room for one, or the last save failed and the daemons were ended\n"
    "           after that\n"
    "  C        the code of the first worker that failed for good; 128 + N if signal N killed it\n"
    "  128 + N  signal N stopped the run\n";

/* What flags say together. Returns an exit code and has said why, or CTL_OK. */
static int check_run(const struct run_options *o, const char *resume)
{
    if (resume != NULL && (o->restore != NULL || o->checkpoint != NULL))
        return ctl_usage("--resume DIR restores and saves: not with --restore or --checkpoint");
    if (resume == NULL && o->checkpoint == NULL && (o->keep > 0 || o->checkpoint_every != 100))
        return ctl_usage("--keep and --checkpoint-every say how: --checkpoint DIR says where");
    if (!o->elastic && o->workers.first != o->workers.last)
        return ctl_usage(
            "--workers %u..%u needs --elastic: without it each of W ranks has its own share of "
            "the work",
            (unsigned)o->workers.first, (unsigned)o->workers.last);
    return CTL_OK;
}

int verb_run(int argc, char **argv)
{
    static struct devices devices;
    const char *list = NULL, *resume = NULL;
    char *latest = NULL;
    struct run_words words = { 0 };
    struct run_options o = { RUN_DEFAULTS, .devices = &devices, .workers = { 1, 1 },
                             .checkpoint_every = 100 };
    const struct flag own[] = {
        { "daemons", 'n', FLAG_U32, "N", "daemons to start, named cpu0, cpu1, ... (1)", &o.daemons,
          1, RUN_DAEMONS_MAX },
        { "devices", 0, FLAG_STRING, "LIST", "the daemons' devices instead, as gpu0,cpu0", &list, 0,
          0 },
        { "workers", 'w', FLAG_RANGE, "W", "copies of COMMAND to run (1); A..B with --elastic",
          &o.workers, 1, RUN_WORKERS_MAX },
        { "elastic", 'e', FLAG_BOOL, NULL, "workers may join and leave (see below)", &o.elastic, 0,
          0 },
        { "restore", 0, FLAG_STRING, "DIR", "begin with this checkpoint, or the latest in DIR",
          &o.restore, 0, 0 },
        { "checkpoint", 0, FLAG_STRING, "DIR", "save in DIR while it goes on, and at the end",
          &o.checkpoint, 0, 0 },
        { "resume", 0, FLAG_STRING, "DIR",
          "both: begin with DIR's latest if there is one, save there", &resume, 0, 0 },
        { "checkpoint-every", 0, FLAG_U32, "STEPS", "steps between checkpoints (100)",
          &o.checkpoint_every, 1, UINT32_MAX },
        { "keep", 0, FLAG_U32, "N", "checkpoints to keep (all)", &o.keep, 1, 1000000 },
    };
    struct flag_table table = { .count = 0 };
    FLAGS_ADD(&table, own);
    run_flags_add(&table, &o, &words);
    const struct flags flags = VERB_FLAGS_OF(run, "shardctl run [FLAGS] -- COMMAND [ARGS...]",
                                             table);
    int rest = argc;
    const int code = verb_start(&flags, argc, argv, &rest);
    if (code >= 0)
        return code;
    if (rest == argc)
        return ctl_usage("run needs a command: shardctl run [FLAGS] -- COMMAND [ARGS...]");
    const int wrong = check_run(&o, resume);
    if (wrong != CTL_OK)
        return wrong;
    struct shd_err e = { 0 };
    if (run_flags_take(&o, &words, &e) != SHD_OK ||
        devices_parse(list, o.daemons, &devices, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    o.daemons = devices.count;
    o.command = argv + rest;
    const int ended = resume_plan(&o, resume, &latest, &e) == SHD_OK ? supervise(&o)
                                                                     : ctl_fail("%s", e.text);
    free(latest);
    return ended;
}

/* -- up ------------------------------------------------------------------------------------------
 */

/* Daemons that stay, with a keeper: this process in a session of its own, or in the
 * foreground. It does what `run` does without workers.
 *
 * Until the daemons are ready the keeper writes to the terminal of who started it, and ends if that
 * one does; then it tells it through a pipe, and writes to DIR/up.log. */

static const char up_about[] =
    "Start N daemons at DIR that stay until `shardctl down`, and return when all are ready. On\n"
    "stdout comes the line by which a shell's later commands find them:\n"
    "  eval \"$(shardctl up --daemons 2)\" && shd-gpt --steps 20\n"
    "\n"
    "A keeper process holds their memory: a daemon that dies is started again and gets its state\n"
    "back; one that hangs for --watchdog seconds is killed first, and one that cannot be started "
    "is\n"
    "tried for ever. It writes to DIR/" UPDIR_LOG " (at 16 MiB that becomes DIR/" UPDIR_LOG_OLD
    "). Without\n"
    "keeper and daemons\n"
    "the state is gone, unless it was saved elsewhere. One keeper per directory; they are no "
    "service: a reboot ends them.";

static const char up_more[] =
    "default DIR: /run/shardd for root, else $XDG_RUNTIME_DIR/shardd; made when missing, and then\n"
    "empty but for the log (`shardctl logs`) after the last daemon. It must be yours, and no one "
    "else's to write to or to put "
    "another\n"
    "in its place; one below /tmp may be it.\n"
    "\n"
    "environment: SHARDD_BIN is the daemon to start (default: the shardd beside shardctl, else by\n"
    "PATH).\n"
    "\n"
    "exit codes:\n"
    "  0  all daemons are ready; with --foreground: a signal (INT, TERM, HUP, QUIT) has ended "
    "them\n"
    "  1  not all got ready, or DIR is kept already: nothing is left behind; with --foreground "
    "also\n"
    "     when a daemon failed for good, which none does that may be needed for state\n"
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
    text_quote(address, stdout);
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
    updir_release(&up->dir, /* keep_log= */ up->was_ready && !up->foreground);
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
    struct run_words words = { 0 };
    struct run_options o = { RUN_DEFAULTS, .devices = &up.devices };
    const struct flag own[] = {
        { "daemons", 'n', FLAG_U32, "N", "daemons to start, named cpu0, cpu1, ... (1)", &o.daemons,
          1, RUN_DAEMONS_MAX },
        { "devices", 0, FLAG_STRING, "LIST", "the daemons' devices instead, as gpu0,cpu0", &list, 0,
          0 },
        { "runtime-dir", 'd', FLAG_STRING, "DIR", "where their sockets go (see below)", &wanted, 0,
          0 },
        { "foreground", 'f', FLAG_BOOL, NULL, "stay here instead of a keeper in the background",
          &up.foreground, 0, 0 },
    };
    struct flag_table table = { .count = 0 };
    FLAGS_ADD(&table, own);
    run_flags_add(&table, &o, &words);
    const struct flags flags = VERB_FLAGS_OF(up, "shardctl up [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, NULL);
    if (code >= 0)
        return code;
    char path[RUNDIR_PATH_BYTES];
    struct shd_err e = { 0 };
    if (run_flags_take(&o, &words, &e) != SHD_OK ||
        devices_parse(list, o.daemons, &up.devices, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    o.daemons = up.devices.count;
    if (updir_path(wanted, path, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    return up.foreground ? keep(&up, &o, path) : start_keeper(&up, &o, path);
}

/* -- down ----------------------------------------------------------------------------------------
 */

static const char down_about[] =
    "Stop the daemons that `shardctl up` (or `run`) started at DIR, "
    "and their keeper, and wait until\n"
    "they are gone. Their state goes with them: what is in no checkpoint is "
    "said, and lost only\n"
    "after a yes at the terminal, or with --yes.";

static const char down_more[] = VERB_WHERE
    "\n"
    "exit codes:\n"
    "  0  they are gone\n"
    "  1  nothing runs at DIR, it did not stop in time, or the answer was no\n"
    "  2  the command line was wrong, or state would be lost and there is no terminal to ask at\n";

/* True when what is at path may go. Else *ret_code: it has said why. */
static bool may_end(const char *path, bool yes, int *ret_code)
{
    char answer[8];
    *ret_code = CTL_OK;
    if (!lost_say(path, "in no checkpoint") || yes)
        return true;
    if (!isatty(STDIN_FILENO)) {
        *ret_code = ctl_usage("not stopped: that would be lost. Save it (shardctl checkpoint "
                              "--runtime-dir '%s' DIR), or let it go with --yes",
                              path);
        return false;
    }
    ctl_say("stop the daemons at '%s', and lose that? [y/N]", path);
    if (fgets(answer, sizeof(answer), stdin) != NULL && (answer[0] == 'y' || answer[0] == 'Y'))
        return true;
    *ret_code = ctl_fail("not stopped");
    return false;
}

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

static int down(const char *path, uint32_t timeout_s, bool yes)
{
    uint32_t daemons = 0;
    const pid_t pid = updir_keeper(path, &daemons);
    const int fd = pid > 0 ? keeper_open(path, pid) : -1;
    if (pid < 0)
        return ctl_fail("what runs at '%s' is in another pid namespace: stop it there", path);
    if (fd < 0)
        return ctl_fail("nothing runs at '%s'", path);
    int code;
    if (may_end(path, yes, &code))
        code = stop(fd, pid, path, timeout_s);
    close(fd);
    if (code == CTL_OK && daemons == 0)
        printf("stopped the run at %s\n", path);
    else if (code == CTL_OK)
        printf("stopped %" PRIu32 " daemon%s at %s\n", daemons, daemons == 1 ? "" : "s", path);
    return code;
}

int verb_down(int argc, char **argv)
{
    const char *wanted = NULL;
    uint32_t timeout_s = 30;
    bool yes = false;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(wanted),
        { "timeout", 0, FLAG_U32, "SECONDS", "how long they may take (30)", &timeout_s, 1, 86400 },
        { "yes", 'y', FLAG_BOOL, NULL, "do not ask: what is in no checkpoint may go", &yes, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(down, "shardctl down [FLAGS]", table);
    const int code = verb_start(&flags, argc, argv, NULL);
    if (code >= 0)
        return code;
    char path[RUNDIR_PATH_BYTES];
    struct shd_err e = { 0 };
    if (updir_find(wanted, path, &e) == SHD_OK)
        return down(path, timeout_s, yes);
    return ctl_fail("%s", e.text);
}
