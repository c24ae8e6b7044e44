#include "client/ctl/supervise.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl/child.h"
#include "client/ctl/ctl.h"
#include "client/ctl/notify.h"
#include "proto/check.h"

/* A second signal this long after the first is someone losing patience; earlier ones are the
 * first one again (timeout(1) signals the process and its group). */
#define RUN_IMPATIENT_NS (UINT64_C(500) * 1000 * 1000)

static void on_deadline(uv_timer_t *timer);

/* -- Stopping -------------------------------------------------------------------------------- */

static void run_done(struct run *r)
{
    r->phase = RUN_DONE;
    for (size_t i = 0; i < RUN_SIGNALS; i++)
        uv_close((uv_handle_t *)&r->signals[i], NULL);
    uv_close((uv_handle_t *)&r->deadline, NULL);
    uv_close((uv_handle_t *)&r->notify, NULL);
}

static void signal_daemons(const struct run *r, int sig)
{
    for (uint32_t i = 0; i < r->options->daemons; i++)
        if (r->daemons[i].running)
            child_signal(r->daemons[i].pid, sig);
}

static void signal_workers(const struct run *r, int sig)
{
    for (uint32_t i = 0; i < r->options->workers; i++)
        if (r->workers[i].running)
            child_signal(r->workers[i].pid, sig);
}

static void start_grace(struct run *r)
{
    uv_timer_start(&r->deadline, on_deadline, (uint64_t)r->options->grace_s * 1000, 0);
}

/* No worker runs: stop the daemons. */
static void run_end(struct run *r)
{
    CHECK(r->workers_running == 0);
    if (r->phase >= RUN_ENDING)
        return;
    r->phase = RUN_ENDING;
    if (r->daemons_running == 0) {
        run_done(r);
        return;
    }
    run_note(r, "stopping the daemons (%" PRIu32 ")", r->daemons_running);
    signal_daemons(r, SIGTERM);
    start_grace(r);
}

/* Tell the workers to stop, by sig; the daemons follow when they have. */
static void run_stop(struct run *r, int sig)
{
    if (r->phase >= RUN_STOPPING)
        return;
    if (r->workers_running == 0) {
        run_end(r);
        return;
    }
    r->phase = RUN_STOPPING;
    run_note(r, "stopping the workers (%" PRIu32 ")", r->workers_running);
    signal_workers(r, sig);
    start_grace(r);
}

/* What went wrong first is the exit code. */
static void run_failed(struct run *r, int code)
{
    if (r->code == CTL_OK)
        r->code = code;
}

static void say_overdue(const struct run_child *children, uint32_t count, const char *what,
                        uint32_t grace_s)
{
    for (uint32_t i = 0; i < count; i++)
        if (children[i].running)
            ctl_say("%s %s (pid %ld) did not stop within %" PRIu32 " s: killing it", what,
                    children[i].name, (long)children[i].pid, grace_s);
}

static void on_deadline(uv_timer_t *timer)
{
    struct run *r = timer->data;
    const struct run_options *o = r->options;
    if (r->phase == RUN_STARTING) {
        for (uint32_t i = 0; i < o->daemons; i++) {
            const struct run_child *c = &r->daemons[i];
            if (c->running && !c->ready)
                ctl_say("daemon %s (pid %ld) was not ready after %" PRIu32 " s (--timeout)%s%s",
                        c->name, (long)c->pid, o->timeout_s, c->relay.last[0] != '\0' ? ": " : "",
                        c->relay.last);
        }
        run_failed(r, CTL_FAILED);
        run_stop(r, SIGTERM);
    } else if (r->phase == RUN_STOPPING) {
        say_overdue(r->workers, o->workers, "worker", o->grace_s);
        signal_workers(r, SIGKILL);
    } else if (r->phase == RUN_ENDING) {
        say_overdue(r->daemons, o->daemons, "daemon", o->grace_s);
        signal_daemons(r, SIGKILL);
    }
}

/* -- Children that exit ---------------------------------------------------------------------- */

/* True when c has exited: it is reaped, its group is gone, and its last words are out. */
static bool take_exit(struct run_child *c, int *ret_wait_status)
{
    siginfo_t info = { 0 };
    if (!c->running || waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 ||
        info.si_pid == 0)
        return false;
    kill(-c->pid, SIGKILL); /* what it left behind, while its zombie still holds the group's id */
    if (waitpid(c->pid, ret_wait_status, 0) != c->pid)
        return false;
    c->running = false;
    relay_close(&c->relay);
    return true;
}

/* A daemon that ended although nobody told it to, or not as it was told. */
static void say_daemon_failed(const struct run *r, const struct run_child *c, int wait_status)
{
    char how[64];
    child_describe(wait_status, how, sizeof(how));
    const char *when = !c->ready                ? " before it was ready"
                       : r->phase == RUN_ENDING ? " while stopping"
                                                : "";
    const bool words = WIFEXITED(wait_status) && c->relay.last[0] != '\0';
    ctl_say("daemon %s (pid %ld) %s%s%s%s", c->name, (long)c->pid, how, when, words ? ": " : "",
            words ? c->relay.last : "");
}

static void daemon_exited(struct run *r, const struct run_child *c, int wait_status)
{
    r->daemons_running--;
    const bool told = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGTERM && !c->ready;
    if (r->phase == RUN_ENDING && (wait_status == 0 || told || r->code != CTL_OK)) {
        char how[64];
        run_note(r, "daemon %s (pid %ld) %s", c->name, (long)c->pid,
                 child_describe(wait_status, how, sizeof(how)));
    } else {
        say_daemon_failed(r, c, wait_status);
        run_failed(r, CTL_FAILED);
        run_stop(r, SIGTERM);
    }
    if (r->phase == RUN_ENDING && r->daemons_running == 0)
        run_done(r);
}

static void worker_exited(struct run *r, const struct run_child *c, int wait_status)
{
    r->workers_running--;
    char how[64];
    child_describe(wait_status, how, sizeof(how));
    if (wait_status != 0 && r->phase == RUN_WORKING) {
        ctl_say("worker %s (pid %ld) %s", c->name, (long)c->pid, how);
        run_failed(r, child_code(wait_status));
        run_stop(r, SIGTERM);
    } else {
        run_note(r, "worker %s (pid %ld) %s", c->name, (long)c->pid, how);
    }
    if (r->workers_running == 0)
        run_end(r);
}

static void reap_daemons(struct run *r)
{
    int wait_status;
    for (uint32_t i = 0; i < r->options->daemons; i++)
        if (take_exit(&r->daemons[i], &wait_status))
            daemon_exited(r, &r->daemons[i], wait_status);
}

static void on_child(uv_signal_t *handle, int signum)
{
    (void)signum;
    struct run *r = handle->data;
    int wait_status;
    reap_daemons(r);
    for (uint32_t i = 0; i < r->options->workers; i++) {
        if (!take_exit(&r->workers[i], &wait_status))
            continue;
        /* A worker that fails because its daemon died must not be named for it: the daemon's
         * death came first, so it can be seen by now. */
        reap_daemons(r);
        worker_exited(r, &r->workers[i], wait_status);
    }
}

/* -- Other events ---------------------------------------------------------------------------- */

/* Ctrl-Z: the workers stop with us, and go on with us. */
static void suspend(struct run *r)
{
    signal_workers(r, SIGSTOP);
    kill(getpid(), SIGSTOP);
    signal_workers(r, SIGCONT);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct run *r = handle->data;
    if (signum == SIGTSTP) {
        suspend(r);
        return;
    }
    const uint64_t now = uv_hrtime();
    if (r->signal_ns != 0 && now - r->signal_ns > RUN_IMPATIENT_NS) {
        ctl_say("killing what still runs");
        signal_workers(r, SIGKILL);
        if (r->phase == RUN_ENDING)
            signal_daemons(r, SIGKILL);
        return;
    }
    if (r->signal_ns != 0)
        return;
    r->signal_ns = now;
    ctl_say("got SIG%s, stopping", sigabbrev_np(signum));
    run_failed(r, 128 + signum);
    run_stop(r, signum);
}

static void all_ready(struct run *r)
{
    struct shd_err e = { 0 };
    uv_timer_stop(&r->deadline);
    r->phase = RUN_WORKING;
    if (launch_workers(r, &e) == SHD_OK)
        return;
    ctl_say("%s", e.text);
    run_failed(r, CTL_FAILED);
    run_stop(r, SIGTERM);
}

static void on_notify(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct run *r = poll->data;
    pid_t pid = 0;
    for (int got = notify_take(r->notify_fd, &pid); got >= 0;
         got = notify_take(r->notify_fd, &pid)) {
        for (uint32_t i = 0; got == 1 && i < r->options->daemons; i++) {
            struct run_child *c = &r->daemons[i];
            if (c->pid != pid || !c->running || c->ready)
                continue;
            c->ready = true;
            r->daemons_ready++;
            run_note(r, "daemon %s is ready", c->name);
        }
    }
    if (r->phase == RUN_STARTING && r->daemons_ready == r->options->daemons)
        all_ready(r);
}

/* -- The run --------------------------------------------------------------------------------- */

static int watch_signals(struct run *r, struct shd_err *e)
{
    static const int numbers[RUN_SIGNALS] = { SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP };
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < RUN_SIGNALS; i++) {
        uv_signal_init(&r->loop, &r->signals[i]);
        r->signals[i].data = r;
    }
    for (size_t i = 0; i < RUN_SIGNALS; i++) {
        struct sigaction old;
        /* Ignored by who started us (nohup, a shell's &): then it stays so. */
        if (i > 0 && sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler == SIG_IGN)
            continue;
        const int failed = uv_signal_start(&r->signals[i], i == 0 ? on_child : on_signal,
                                           numbers[i]);
        if (failed != 0)
            return err_set(e, SHD_EIO, "watch signal %d: %s", numbers[i], uv_strerror(failed));
    }
    return SHD_OK;
}

/* Initialise every handle, so that run_done() may close each, also after an error. */
static int run_init_handles(struct run *r, struct shd_err *e)
{
    uv_timer_init(&r->loop, &r->deadline);
    uv_poll_init(&r->loop, &r->notify, r->notify_fd);
    r->deadline.data = r;
    r->notify.data = r;
    uv_poll_start(&r->notify, UV_READABLE, on_notify);
    return watch_signals(r, e);
}

static void raise_file_limit(struct run *r)
{
    if (getrlimit(RLIMIT_NOFILE, &r->files) < 0) {
        r->files = (struct rlimit){ .rlim_cur = 1024, .rlim_max = 1024 };
        return;
    }
    struct rlimit raised = r->files;
    raised.rlim_cur = raised.rlim_max;
    setrlimit(RLIMIT_NOFILE, &raised); /* else a large N fails with a clear "too many open files" */
}

/* From the first daemon to the last exit; the directory and the socket are there. */
static int run_inside(struct run *r, struct shd_err *e)
{
    const int failed = uv_loop_init(&r->loop);
    if (failed != 0)
        return err_set(e, SHD_EIO, "make an event loop: %s", uv_strerror(failed));
    int rc = run_init_handles(r, e);
    if (rc == SHD_OK) {
        uv_timer_start(&r->deadline, on_deadline, (uint64_t)r->options->timeout_s * 1000, 0);
        rc = launch_daemons(r, e);
    }
    if (rc != SHD_OK) {
        ctl_say("%s", e->text);
        run_failed(r, CTL_FAILED);
        run_end(r);
    }
    uv_run(&r->loop, UV_RUN_DEFAULT);
    CHECK(r->phase == RUN_DONE);
    return uv_loop_close(&r->loop) == 0 ? SHD_OK : err_set(e, SHD_EINTERNAL, "loop still busy");
}

static int run_in_dir(struct run *r, struct shd_err *e)
{
    int rc = rundir_new(&r->dir, e);
    if (rc != SHD_OK)
        return rc;
    run_note(r, "runtime directory %s", r->dir.path);
    rc = notify_listen(r->dir.path, &r->notify_fd, e);
    if (rc == SHD_OK) {
        const bool had_children = child_any();
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        rc = run_inside(r, e);
        if (!had_children)
            child_end_orphans();
        close(r->notify_fd);
    }
    struct shd_err left = { 0 };
    if (rundir_remove(&r->dir, &left) != SHD_OK) {
        ctl_say("%s", left.text);
        run_failed(r, CTL_FAILED);
    }
    return rc;
}

int supervise(const struct run_options *options)
{
    CHECK(options->daemons > 0 && options->workers > 0 && options->command[0] != NULL);
    struct run r = { .options = options, .notify_fd = -1 };
    struct shd_err e = { 0 };
    r.daemons = calloc(options->daemons, sizeof(*r.daemons));
    r.workers = calloc(options->workers, sizeof(*r.workers));
    int rc = SHD_OK;
    if (r.daemons == NULL || r.workers == NULL) {
        rc = err_set(&e, SHD_ENOMEM, "out of memory for %" PRIu32 " daemons, %" PRIu32 " workers",
                     options->daemons, options->workers);
        goto out;
    }
    for (uint32_t i = 0; i < options->daemons; i++)
        r.daemons[i].relay.fd = -1;
    for (uint32_t i = 0; i < options->workers; i++)
        r.workers[i].relay.fd = -1;
    raise_file_limit(&r);
    rc = run_in_dir(&r, &e);
out:
    free(r.daemons);
    free(r.workers);
    if (rc == SHD_OK || r.code != CTL_OK)
        return r.code;
    ctl_say("%s", e.text);
    return CTL_FAILED;
}
