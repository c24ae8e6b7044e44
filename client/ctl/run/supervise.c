#include "client/ctl/run/supervise.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/ctl.h"
#include "client/ctl/run/notify.h"
#include "client/ctl/run/saver.h"
#include "proto/base/check.h"

/* A second signal this long after the first is someone losing patience; earlier ones are the
 * first one again (timeout(1) signals the process and its group). */
#define RUN_IMPATIENT_NS (UINT64_C(500) * 1000 * 1000)

static void on_deadline(uv_timer_t *timer);

uint32_t run_count(const struct run_child *children, uint32_t count)
{
    uint32_t there = 0;
    for (uint32_t i = 0; i < count; i++)
        there += children[i].state != CHILD_GONE;
    return there;
}

/* -- Stopping -------------------------------------------------------------------------------- */

static void close_timers(struct run_child *children, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        uv_close((uv_handle_t *)&children[i].timer, NULL);
}

void run_done(struct run *r)
{
    r->phase = RUN_DONE;
    for (size_t i = 0; i < RUN_SIGNALS; i++)
        uv_close((uv_handle_t *)&r->signals[i], NULL);
    close_timers(r->daemons, r->options->daemons);
    close_timers(r->workers, r->options->workers.last);
    close_timers(&r->restorer, 1);
    close_timers(&r->saver, 1);
    uv_close((uv_handle_t *)&r->deadline, NULL);
    uv_close((uv_handle_t *)&r->notify, NULL);
}

static void signal_all(const struct run_child *children, uint32_t count, int sig)
{
    for (uint32_t i = 0; i < count; i++)
        if (children[i].state == CHILD_RUNNING)
            child_signal(children[i].pid, sig);
}

static void signal_daemons(const struct run *r, int sig)
{
    signal_all(r->daemons, r->options->daemons, sig);
}

static void signal_workers(const struct run *r, int sig)
{
    signal_all(r->workers, r->options->workers.last, sig);
}

/* Who waits to be started again is not any more; nobody is waited for but by the deadline. */
static void stop_timers(struct run_child *children, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uv_timer_stop(&children[i].timer);
        if (children[i].state == CHILD_WAITING)
            children[i].state = CHILD_GONE;
    }
}

static void start_grace(struct run *r)
{
    stop_timers(r->daemons, r->options->daemons);
    stop_timers(r->workers, r->options->workers.last);
    uv_timer_start(&r->deadline, on_deadline, (uint64_t)r->options->grace_s * 1000, 0);
}

void run_end(struct run *r)
{
    if (r->phase >= RUN_ENDING)
        return;
    r->phase = RUN_ENDING;
    start_grace(r);
    CHECK(run_count(r->workers, r->options->workers.last) == 0);
    if (saver_stop(r))
        uv_timer_stop(&r->deadline); /* it saves, and has deadlines of its own */
    else
        run_end_daemons(r);
}

void run_end_daemons(struct run *r)
{
    start_grace(r);
    const uint32_t daemons = run_count(r->daemons, r->options->daemons);
    if (daemons == 0) {
        run_done(r);
        return;
    }
    run_note(r, "stopping the daemons (%" PRIu32 ")", daemons);
    signal_daemons(r, SIGTERM);
}

void run_stop(struct run *r, int sig)
{
    if (r->phase >= RUN_STOPPING)
        return;
    r->phase = RUN_STOPPING;
    start_grace(r);
    const uint32_t workers = run_count(r->workers, r->options->workers.last);
    if (workers == 0) {
        run_end(r);
        return;
    }
    run_note(r, "stopping the workers (%" PRIu32 ")", workers);
    signal_workers(r, sig);
}

void run_failed(struct run *r, int code)
{
    if (r->code == CTL_OK)
        r->code = code;
}

static void say_overdue(const struct run_child *children, uint32_t count, uint32_t grace_s)
{
    for (uint32_t i = 0; i < count; i++)
        if (children[i].state == CHILD_RUNNING)
            ctl_say("%s %s (pid %ld) did not stop within %" PRIu32 " s: killing it",
                    children[i].what, children[i].name, (long)children[i].pid, grace_s);
}

static void on_deadline(uv_timer_t *timer)
{
    struct run *r = timer->data;
    const struct run_options *o = r->options;
    if (r->phase == RUN_STOPPING) {
        say_overdue(r->workers, o->workers.last, o->grace_s);
        signal_workers(r, SIGKILL);
    } else if (r->phase == RUN_ENDING) {
        say_overdue(r->daemons, o->daemons, o->grace_s);
        signal_daemons(r, SIGKILL);
    }
}

/* -- Signals --------------------------------------------------------------------------------- */

static void on_child(uv_signal_t *handle, int signum)
{
    (void)signum;
    revive_exited(handle->data);
}

static void on_elastic(uv_signal_t *handle, int signum)
{
    if (signum == SIGUSR1)
        elastic_join(handle->data);
    else
        elastic_leave(handle->data);
}

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
        saver_kill(r);
        if (r->phase == RUN_ENDING)
            signal_daemons(r, SIGKILL);
        return;
    }
    if (r->signal_ns != 0)
        return;
    r->signal_ns = now;
    ctl_say("got SIG%s, stopping", sigabbrev_np(signum));
    if (r->options->workers.last > 0 || r->phase == RUN_STARTING) /* it is how `up` ends */
        run_failed(r, 128 + signum);
    run_stop(r, signum);
}

/* -- Readiness ------------------------------------------------------------------------------- */

static int start_work(struct run *r, struct shd_err *e)
{
    const struct run_options *o = r->options;
    int rc = o->ready != NULL ? o->ready(o->arg, e) : SHD_OK;
    if (rc == SHD_OK)
        rc = saver_start(r, e);
    for (uint32_t i = 0; i < r->workers_wanted && rc == SHD_OK; i++)
        rc = launch_worker(&r->workers[i], e);
    return rc;
}

/* Once each daemon has been ready and is. */
static void check_ready(struct run *r)
{
    if (r->phase != RUN_STARTING)
        return;
    for (uint32_t i = 0; i < r->options->daemons; i++)
        if (r->daemons[i].state != CHILD_RUNNING || !r->daemons[i].ready)
            return;
    r->phase = RUN_WORKING;
    if (!saver_restores(r))
        run_work(r);
}

void run_work(struct run *r)
{
    struct shd_err e = { 0 };
    if (start_work(r, &e) == SHD_OK)
        return;
    ctl_say("%s", e.text);
    run_failed(r, CTL_FAILED);
    run_stop(r, SIGTERM);
}

static void daemon_says(struct run_child *c, struct notify_message *m)
{
    keeper_take(&c->kept, m, c->name);
    c->drained = c->drained || m->drained;
    if (!c->ready && m->more_us > 0)
        revive_later(c, m->more_us / 1000);
    if (!m->ready || c->ready)
        return;
    c->ready = true;
    c->early = 0;
    uv_timer_stop(&c->timer);
    run_note(c->run, "daemon %s is ready", c->name);
}

void run_take_messages(struct run *r)
{
    struct notify_message m;
    for (int got = notify_take(r->notify_fd, &m); got >= 0; got = notify_take(r->notify_fd, &m)) {
        if (got == 0)
            continue;
        for (uint32_t i = 0; i < r->options->daemons; i++)
            if (r->daemons[i].state == CHILD_RUNNING && r->daemons[i].pid == m.pid)
                daemon_says(&r->daemons[i], &m);
        notify_close(&m);
    }
}

static void on_notify(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct run *r = poll->data;
    run_take_messages(r);
    check_ready(r);
}

/* -- The run --------------------------------------------------------------------------------- */

/* Ignored by who started us (nohup, a shell's &): then it stays so. */
static bool is_ignored(int signum)
{
    struct sigaction old;
    return signum != SIGCHLD && sigaction(signum, NULL, &old) == 0 && old.sa_handler == SIG_IGN;
}

static int watch_signals(struct run *r, struct shd_err *e)
{
    static const struct {
        int number;
        uv_signal_cb fn;
    } watched[RUN_SIGNALS] = {
        { SIGCHLD, on_child },   { SIGINT, on_signal },   { SIGTERM, on_signal },
        { SIGHUP, on_signal },   { SIGQUIT, on_signal },  { SIGTSTP, on_signal },
        { SIGUSR1, on_elastic }, { SIGUSR2, on_elastic },
    };
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < RUN_SIGNALS; i++) {
        uv_signal_init(&r->loop, &r->signals[i]);
        r->signals[i].data = r;
    }
    for (size_t i = 0; i < RUN_SIGNALS; i++) {
        const int number = watched[i].number;
        if (is_ignored(number) || (watched[i].fn == on_elastic && !r->options->elastic))
            continue;
        const int failed = uv_signal_start(&r->signals[i], watched[i].fn, number);
        if (failed != 0)
            return err_set(e, SHD_EIO, "watch signal %d: %s", number, uv_strerror(failed));
    }
    return SHD_OK;
}

static void init_timers(struct run *r, struct run_child *children, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uv_timer_init(&r->loop, &children[i].timer);
        children[i].timer.data = &children[i];
    }
}

/* Initialise every handle, so that run_done() may close each, also after an error. */
static int run_init_handles(struct run *r, struct shd_err *e)
{
    uv_timer_init(&r->loop, &r->deadline);
    uv_poll_init(&r->loop, &r->notify, r->notify_fd);
    init_timers(r, r->daemons, r->options->daemons);
    init_timers(r, r->workers, r->options->workers.last);
    init_timers(r, &r->restorer, 1);
    init_timers(r, &r->saver, 1);
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
    for (uint32_t i = 0; i < r->options->daemons && rc == SHD_OK; i++)
        rc = launch_daemon(&r->daemons[i], e);
    if (rc != SHD_OK) {
        ctl_say("%s", e->text);
        run_failed(r, CTL_FAILED);
        run_end(r);
    }
    uv_run(&r->loop, UV_RUN_DEFAULT);
    CHECK(r->phase == RUN_DONE);
    return uv_loop_close(&r->loop) == 0 ? SHD_OK : err_set(e, SHD_EINTERNAL, "loop still busy");
}

static int run_at_path(struct run *r, struct shd_err *e)
{
    run_note(r, "runtime directory %s", r->path);
    int rc = launch_prepare(r, e);
    if (rc == SHD_OK)
        rc = notify_listen(r->path, &r->notify_fd, e);
    if (rc == SHD_OK) {
        const bool had_children = child_any();
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        rc = run_inside(r, e);
        if (!had_children)
            child_end_orphans();
        close(r->notify_fd);
    }
    launch_free(r);
    return rc;
}

static int run_in_dir(struct run *r, struct shd_err *e)
{
    if (r->options->dir != NULL) {
        r->path = r->options->dir;
        return run_at_path(r, e);
    }
    int rc = rundir_new(&r->dir, e);
    if (rc != SHD_OK)
        return rc;
    r->path = r->dir.path;
    rc = run_at_path(r, e);
    struct shd_err left = { 0 };
    if (rundir_remove(&r->dir, &left) != SHD_OK) {
        ctl_say("%s", left.text);
        run_failed(r, CTL_FAILED);
    }
    return rc;
}

/* Children of one kind, none of them started; started_ns: [count * max_restarts]. */
static struct run_child *make_children(struct run *r, const char *what, uint32_t count,
                                       uint64_t *started_ns)
{
    struct run_child *children = calloc(count + 1u, sizeof(*children)); /* never of nothing */
    for (uint32_t i = 0; i < count && children != NULL; i++) {
        struct run_child *c = &children[i];
        c->run = r;
        c->what = what;
        c->index = i;
        c->relay.fd = -1;
        c->started_ns = started_ns + (size_t)i * r->options->max_restarts;
    }
    return children;
}

static int make_all(struct run *r, struct shd_err *e)
{
    const struct run_options *o = r->options;
    const size_t children = (size_t)o->daemons + o->workers.last;
    r->started_ns = calloc(children * o->max_restarts + 1, sizeof(*r->started_ns));
    if (r->started_ns != NULL) {
        r->daemons = make_children(r, "daemon", o->daemons, r->started_ns);
        r->workers = make_children(r, "worker", o->workers.last,
                                   r->started_ns + (size_t)o->daemons * o->max_restarts);
    }
    for (uint32_t i = 0; r->daemons != NULL && i < o->daemons; i++)
        memcpy(r->daemons[i].name, o->devices->names[i], sizeof(r->daemons[i].name));
    for (uint32_t i = 0; r->workers != NULL && i < o->workers.last; i++)
        snprintf(r->workers[i].name, sizeof(r->workers[i].name), "rank %" PRIu32, i);
    if (r->daemons != NULL && r->workers != NULL)
        return SHD_OK;
    return err_set(e, SHD_ENOMEM, "out of memory for %" PRIu32 " daemons, %" PRIu32 " workers",
                   o->daemons, o->workers.last);
}

int supervise(const struct run_options *options)
{
    CHECK(options->daemons > 0 && options->daemons == options->devices->count);
    CHECK(options->workers.first <= options->workers.last);
    struct run r = { .options = options,
                     .notify_fd = -1,
                     .workers_wanted = options->workers.first };
    saver_init(&r);
    struct shd_err e = { 0 };
    raise_file_limit(&r);
    int rc = make_all(&r, &e);
    if (rc == SHD_OK)
        rc = run_in_dir(&r, &e);
    for (uint32_t i = 0; r.daemons != NULL && i < options->daemons; i++)
        keeper_free(&r.daemons[i].kept);
    free(r.daemons);
    free(r.workers);
    free(r.started_ns);
    if (rc == SHD_OK || r.code != CTL_OK)
        return r.code;
    ctl_say("%s", e.text);
    return CTL_FAILED;
}
