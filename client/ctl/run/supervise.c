/* See supervise.h. */
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
#include "client/ctl/base/say.h"
#include "client/ctl/run/elastic.h"
#include "client/ctl/run/launch.h"
#include "client/ctl/run/messages.h"
#include "client/ctl/run/notify.h"
#include "client/ctl/run/phase.h"
#include "client/ctl/run/revive.h"
#include "client/ctl/run/saver.h"
#include "proto/base/check.h"

/* A second signal this long after the first is someone losing patience; earlier ones are the
 * first one again (timeout(1) signals the process and its group). */
#define RUN_IMPATIENT_NS (UINT64_C(500) * 1000 * 1000)

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

static void on_signal(uv_signal_t *handle, int signum)
{
    struct run *r = handle->data;
    if (signum == SIGTSTP) {
        phase_suspend(r);
        return;
    }
    const uint64_t now = uv_hrtime();
    if (r->signal_ns != 0 && now - r->signal_ns > RUN_IMPATIENT_NS) {
        ctl_say("killing what still runs");
        phase_kill(r);
        return;
    }
    if (r->signal_ns != 0)
        return;
    r->signal_ns = now;
    ctl_say("got SIG%s, stopping", sigabbrev_np(signum));
    if (r->options->workers.last > 0 || r->phase == RUN_STARTING) /* it is how `up` ends */
        phase_failed(r, 128 + signum);
    phase_stop(r, signum);
}

static void on_notify(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct run *r = poll->data;
    messages_take(r);
    phase_check_ready(r);
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

/* Initialise every handle, so that phase_done() may close each, also after an error. */
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
        phase_failed(r, CTL_FAILED);
        phase_end(r);
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
        phase_failed(r, CTL_FAILED);
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
                     .child_timer = revive_timer,
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
    return ctl_fail("%s", e.text);
}
