/* See phase.h. */
#include "client/ctl/run/phase.h"

#include <inttypes.h>
#include <signal.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/run/launch.h"
#include "client/ctl/run/saver.h"
#include "proto/base/check.h"

static void on_deadline(uv_timer_t *timer);

uint32_t phase_count(const struct run_child *children, uint32_t count)
{
    uint32_t there = 0;
    for (uint32_t i = 0; i < count; i++)
        there += children[i].state != CHILD_GONE;
    return there;
}

static void close_timers(struct run_child *children, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        uv_close((uv_handle_t *)&children[i].timer, NULL);
}

void phase_done(struct run *r)
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

void phase_end(struct run *r)
{
    if (r->phase >= RUN_ENDING)
        return;
    r->phase = RUN_ENDING;
    start_grace(r);
    CHECK(phase_count(r->workers, r->options->workers.last) == 0);
    if (saver_stop(r))
        uv_timer_stop(&r->deadline); /* it saves, and has deadlines of its own */
    else
        phase_end_daemons(r);
}

void phase_end_daemons(struct run *r)
{
    start_grace(r);
    const uint32_t daemons = phase_count(r->daemons, r->options->daemons);
    if (daemons == 0) {
        phase_done(r);
        return;
    }
    run_note(r, "stopping the daemons (%" PRIu32 ")", daemons);
    signal_daemons(r, SIGTERM);
}

void phase_stop(struct run *r, int sig)
{
    if (r->phase >= RUN_STOPPING)
        return;
    r->phase = RUN_STOPPING;
    start_grace(r);
    const uint32_t workers = phase_count(r->workers, r->options->workers.last);
    if (workers == 0) {
        phase_end(r);
        return;
    }
    run_note(r, "stopping the workers (%" PRIu32 ")", workers);
    signal_workers(r, sig);
}

void phase_failed(struct run *r, int code)
{
    if (r->code == CTL_OK)
        r->code = code;
}

void phase_fail(struct run *r, int code)
{
    phase_failed(r, code);
    phase_stop(r, SIGTERM);
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

void phase_kill(struct run *r)
{
    signal_workers(r, SIGKILL);
    saver_kill(r);
    if (r->phase == RUN_ENDING)
        signal_daemons(r, SIGKILL);
}

void phase_suspend(struct run *r)
{
    signal_workers(r, SIGSTOP);
    kill(getpid(), SIGSTOP);
    signal_workers(r, SIGCONT);
}

/* -- Working --------------------------------------------------------------------------------- */

static void fail_saying(struct run *r, const struct shd_err *e)
{
    ctl_say("%s", e->text);
    phase_fail(r, CTL_FAILED);
}

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

void phase_work(struct run *r)
{
    struct shd_err e = { 0 };
    if (start_work(r, &e) == SHD_OK)
        return;
    fail_saying(r, &e);
}

void phase_check_ready(struct run *r)
{
    struct shd_err e = { 0 };
    if (r->phase != RUN_STARTING)
        return;
    for (uint32_t i = 0; i < r->options->daemons; i++)
        if (r->daemons[i].state != CHILD_RUNNING || !r->daemons[i].ready)
            return;
    r->phase = RUN_WORKING;
    if (r->options->restore == NULL)
        phase_work(r);
    else if (saver_restore(r, &e) != SHD_OK)
        fail_saying(r, &e);
}
