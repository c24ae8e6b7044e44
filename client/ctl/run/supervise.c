/* See supervise.h. */
#include "client/ctl/run/supervise.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/say.h"
#include "client/ctl/run/launch.h"
#include "client/ctl/run/phase.h"
#include "client/ctl/run/revive.h"
#include "client/ctl/run/room.h"
#include "client/ctl/run/watchdog.h"
#include "client/session/where.h"
#include "proto/base/check.h"
#include "proto/base/process.h"

/* A second signal this long after the first is someone losing patience; earlier ones are the
 * first one again (timeout(1) signals the process and its group). */
#define RUN_IMPATIENT_NS (UINT64_C(500) * 1000 * 1000)

/* -- Workers that join and leave (--elastic) --------------------------------------------------- */

/* The lowest rank that nobody has; NULL when all are taken. */
static struct run_child *free_rank(struct run *r)
{
    for (uint32_t i = 0; i < r->workers.count; i++)
        if (r->workers.list[i].state == CHILD_GONE)
            return &r->workers.list[i];
    return NULL;
}

/* One worker more, up to the limit. */
static void elastic_join(struct run *r)
{
    const uint32_t max = r->options->workers.last;
    if (r->phase == RUN_STARTING && r->workers_wanted < max) {
        r->workers_wanted++;
        return;
    }
    if (r->phase > RUN_WORKING)
        return;
    struct run_child *c = r->phase == RUN_WORKING ? free_rank(r) : NULL;
    if (c == NULL) {
        ctl_say("no worker added: there are %" PRIu32 " already (--workers)", max);
        return;
    }
    c->ended[0] = '\0'; /* nobody's successor */
    c->order = ++r->order;
    c->leaving = false;
    c->state = CHILD_WAITING; /* the rank's last owner may have left its pipe to the loop */
    uv_timer_start(&c->timer, r->child_timer, 0, 0);
}

/* The newest worker that was not asked to leave; *ret_staying: how many there are of those. */
static struct run_child *newest(struct run *r, uint32_t *ret_staying)
{
    struct run_child *found = NULL;
    *ret_staying = 0;
    for (uint32_t i = 0; i < r->workers.count; i++) {
        struct run_child *c = &r->workers.list[i];
        if (c->state == CHILD_GONE || c->leaving)
            continue;
        (*ret_staying)++;
        if (found == NULL || c->order >= found->order)
            found = c;
    }
    return found;
}

/* The newest worker is asked to leave, down to the limit. */
static void elastic_leave(struct run *r)
{
    const uint32_t min = r->options->workers.first;
    if (r->phase == RUN_STARTING && r->workers_wanted > min) {
        r->workers_wanted--;
        return;
    }
    if (r->phase > RUN_WORKING)
        return;
    uint32_t staying = 0;
    struct run_child *c = r->phase == RUN_WORKING ? newest(r, &staying) : NULL;
    if (c == NULL || staying <= min) {
        ctl_say("no worker asked to leave: %" PRIu32 " must stay (--workers)", min);
        return;
    }
    if (c->state == CHILD_WAITING) { /* about to be started */
        uv_timer_stop(&c->timer);
        c->state = CHILD_GONE;
        ctl_say("worker %s left", c->name);
        return;
    }
    c->leaving = true;
    ctl_say("worker %s (pid %ld) is asked to leave", c->name, (long)c->pid);
    child_signal(c->pid, SIGTERM);
    uv_timer_start(&c->timer, r->child_timer, (uint64_t)r->options->grace_s * 1000, 0);
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

static void on_signal(uv_signal_t *handle, int signum)
{
    struct run *r = handle->data;
    if (signum == SIGTSTP) {
        phase_suspend(r);
        return;
    }
    const uint64_t now = uv_hrtime();
    if (r->phase == RUN_KEEPING) {
        ctl_say("got SIG%s, ending the daemons", sigabbrev_np(signum));
        phase_end_daemons(r);
        return;
    }
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
    phase_take_messages(r);
    phase_check_ready(r);
}

static void on_notify_again(uv_timer_t *timer)
{
    struct run *r = timer->data;
    uv_poll_start(&r->notify, UV_READABLE, on_notify);
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

static void init_timers(struct run *r, struct run_children *c)
{
    for (uint32_t i = 0; i < c->count; i++) {
        uv_timer_init(&r->loop, &c->list[i].timer);
        c->list[i].timer.data = &c->list[i];
    }
}

/* Initialise every handle, so that phase_done() may close each, also after an error. */
static int run_init_handles(struct run *r, struct shd_err *e)
{
    uv_timer_init(&r->loop, &r->deadline);
    watchdog_init(r);
    uv_poll_init(&r->loop, &r->notify, r->notify_fd);
    uv_timer_init(&r->loop, &r->notify_again);
    init_timers(r, &r->daemons);
    init_timers(r, &r->workers);
    init_timers(r, &r->helpers);
    r->deadline.data = r;
    r->notify.data = r;
    r->notify_again.data = r;
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
    for (uint32_t i = 0; i < r->daemons.count && rc == SHD_OK; i++)
        rc = launch_daemon(&r->daemons.list[i], e);
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
        r->down_fd = down_note_open(r->path);
        const bool had_children = child_any();
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        if (process_core_dumps() == 0)
            process_close(); /* what is kept is as much the daemons' as what they hold */
        rc = run_inside(r, e);
        if (!had_children)
            child_end_orphans();
        close(r->notify_fd);
        if (r->down_fd >= 0)
            close(r->down_fd);
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
    int rc = rundir_new(WHERE_RUN_PREFIX, &r->dir, e);
    if (rc != SHD_OK)
        return rc;
    rundir_note_address(&r->dir, r->options->devices, r->dir.path);
    r->path = r->dir.path;
    rc = run_at_path(r, e);
    struct shd_err left = { 0 };
    if (rundir_remove(&r->dir, &left) != SHD_OK) {
        ctl_say("%s", left.text);
        phase_failed(r, CTL_FAILED);
    }
    return rc;
}

/* Children of one kind, none of them started. Errors: SHD_ENOMEM. */
static int make_children(struct run *r, const char *what, uint32_t count, struct run_children *c,
                         struct shd_err *e)
{
    const uint32_t restarts = r->options->max_restarts;
    *c = (struct run_children){ .list = calloc(count + 1u, sizeof(*c->list)), .what = what };
    uint64_t *started_ns = calloc((size_t)count * restarts + 1, sizeof(*started_ns));
    if (c->list == NULL || started_ns == NULL) {
        free(started_ns);
        return err_set(e, SHD_ENOMEM, "out of memory for %" PRIu32 " %ss", count, what);
    }
    c->started_ns = started_ns;
    c->count = count;
    for (uint32_t i = 0; i < count; i++) {
        c->list[i].run = r;
        c->list[i].index = i;
        c->list[i].relay.fd = -1;
        c->list[i].started_ns = started_ns + (size_t)i * restarts;
    }
    return SHD_OK;
}

static int make_all(struct run *r, struct shd_err *e)
{
    static const char *const helpers[RUN_HELPERS] = { "restore", "checkpoint" };
    const struct run_options *o = r->options;
    int rc = make_children(r, "daemon", o->daemons + (o->far != NULL), &r->daemons, e);
    if (rc == SHD_OK)
        rc = make_children(r, "worker", o->workers.last, &r->workers, e);
    if (rc == SHD_OK)
        rc = make_children(r, "helper", RUN_HELPERS, &r->helpers, e);
    for (uint32_t i = 0; i < r->daemons.count; i++)
        snprintf(r->daemons.list[i].name, DEVICE_NAME_BYTES, "%s",
                 i < o->daemons ? o->devices->names[i] : "relay");
    for (uint32_t i = 0; i < r->workers.count; i++)
        snprintf(r->workers.list[i].name, DEVICE_NAME_BYTES, "rank %" PRIu32, i);
    for (uint32_t i = 0; rc == SHD_OK && i < RUN_HELPERS; i++)
        snprintf(r->helpers.list[i].name, DEVICE_NAME_BYTES, "%s", helpers[i]);
    return rc;
}

static void free_children(struct run_children *c)
{
    for (uint32_t i = 0; i < c->count; i++)
        keeper_free(&c->list[i].kept);
    free(c->list);
    free(c->started_ns);
}

int supervise(const struct run_options *options)
{
    CHECK(options->daemons > 0 || options->far != NULL);
    CHECK(options->daemons == options->devices->count);
    CHECK(options->workers.first <= options->workers.last);
    struct run r = { .options = options,
                     .notify_fd = -1,
                     .down_fd = -1,
                     .child_timer = revive_timer,
                     .notify_timer = on_notify_again,
                     .workers_wanted = options->workers.first };
    struct shd_err e = { 0 };
    raise_file_limit(&r);
    int rc = room_probe(options, &e);
    if (rc == SHD_OK)
        rc = make_all(&r, &e);
    if (rc == SHD_OK)
        rc = run_in_dir(&r, &e);
    free_children(&r.daemons);
    free_children(&r.workers);
    free_children(&r.helpers);
    return rc == SHD_OK || r.code != CTL_OK ? r.code : ctl_fail("%s", e.text);
}
