/* See phase.h. */
#include "client/ctl/run/phase.h"

#include <inttypes.h>
#include <signal.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/run/launch.h"
#include "client/ctl/run/lost.h"
#include "client/ctl/run/room.h"
#include "client/ctl/run/trouble.h"
#include "client/ctl/run/watchdog.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define NOTIFY_AGAIN_MS    100u
#define NOTIFY_PATIENCE_NS (15 * NS_PER_S) /* longer than a daemon waits to be sure of it */

static void on_deadline(uv_timer_t *timer);

uint32_t phase_count(const struct run_children *c)
{
    uint32_t there = 0;
    for (uint32_t i = 0; i < c->count; i++)
        there += c->list[i].state != CHILD_GONE;
    return there;
}

static void close_timers(struct run_children *c)
{
    for (uint32_t i = 0; i < c->count; i++)
        uv_close((uv_handle_t *)&c->list[i].timer, NULL);
}

/* With its handler gone a signal to join or leave would kill us before our end. */
static void let_late_signals_wait(void)
{
    sigset_t late;
    sigemptyset(&late);
    sigaddset(&late, SIGUSR1);
    sigaddset(&late, SIGUSR2);
    sigprocmask(SIG_BLOCK, &late, NULL);
}

void phase_done(struct run *r)
{
    r->phase = RUN_DONE;
    if (r->options->elastic)
        let_late_signals_wait();
    for (size_t i = 0; i < RUN_SIGNALS; i++)
        uv_close((uv_handle_t *)&r->signals[i], NULL);
    close_timers(&r->daemons);
    close_timers(&r->workers);
    close_timers(&r->helpers);
    uv_close((uv_handle_t *)&r->deadline, NULL);
    uv_close((uv_handle_t *)&r->watchdog, NULL);
    uv_close((uv_handle_t *)&r->notify, NULL);
    uv_close((uv_handle_t *)&r->notify_again, NULL);
}

static void signal_all(const struct run_children *c, int sig)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->list[i].state == CHILD_RUNNING)
            child_signal(c->list[i].pid, sig);
}

/* Children that wait to be started again are not started any more. Only the deadline is left to
 * wait for. */
static void stop_timers(struct run_children *c)
{
    for (uint32_t i = 0; i < c->count; i++) {
        uv_timer_stop(&c->list[i].timer);
        if (c->list[i].state == CHILD_WAITING)
            c->list[i].state = CHILD_GONE;
    }
}

static void start_grace(struct run *r)
{
    stop_timers(&r->workers);
    uv_timer_start(&r->deadline, on_deadline, (uint64_t)r->options->grace_s * 1000, 0);
}

/* Save what is new: by the saver that is there, else by one for this alone. */
static void save_last(struct run *r)
{
    struct run_child *saver = &r->helpers.list[RUN_SAVER];
    if (saver->state == CHILD_RUNNING) {
        child_signal(saver->pid, SIGTERM);
        return;
    }
    saver->state = CHILD_WAITING; /* the last one may have left its pipe to the loop */
    uv_timer_start(&saver->timer, r->child_timer, 0, 0);
}

void phase_end(struct run *r)
{
    if (r->phase >= RUN_SAVING)
        return;
    r->phase = RUN_SAVING;
    start_grace(r);
    CHECK(phase_count(&r->workers) == 0);
    uv_timer_stop(&r->deadline); /* what saves has deadlines of its own */
    if (r->save.worked && !r->impatient && r->options->checkpoint != NULL &&
        (trouble_state_is_kept(r) || phase_count(&r->helpers) > 0)) {
        save_last(r);
        return;
    }
    stop_timers(&r->helpers);
    signal_all(&r->helpers, SIGTERM);
    if (phase_count(&r->helpers) == 0)
        phase_end_daemons(r);
}

static void keep_daemons(struct run *r)
{
    r->phase = RUN_KEEPING;
    r->code = CTL_UNSAVED;
    ctl_say("NOT SAVED: the last save in '%s' failed. The daemons stay with all that they hold, "
            "until they are told to end. Save it elsewhere, then end them:\n"
            "  shardctl checkpoint --runtime-dir '%s' DIR\n"
            "  shardctl down --runtime-dir '%s'",
            r->options->checkpoint, r->path, r->path);
}

void phase_saved(struct run *r, bool ok)
{
    r->save.done = ok && r->save.worked && r->options->checkpoint != NULL;
    if (r->phase != RUN_SAVING)
        return;
    if (!ok && r->save.worked && !r->impatient && trouble_state_is_kept(r))
        keep_daemons(r);
    else
        phase_end_daemons(r);
}

/* What nobody has saved, before it is gone. */
static void say_lost(const struct run *r)
{
    char address[DEVICES_ADDRESS_BYTES(RUNDIR_PATH_BYTES)];
    if (r->save.done || !trouble_state_is_kept(r))
        return;
    devices_address(r->options->devices, r->path, address, sizeof(address));
    lost_say(address, "not saved, and gone with the daemons");
}

/* The relay to other hosts goes first: nobody's session is to end at a daemon that has gone. */
static void end_daemons(struct run *r)
{
    for (uint32_t i = 0; i < r->daemons.count; i++) {
        struct run_child *c = &r->daemons.list[i];
        if (launch_is_far(c) && c->state == CHILD_RUNNING) {
            child_signal(c->pid, SIGTERM);
            return;
        }
    }
    signal_all(&r->daemons, SIGTERM);
}

void phase_far_ended(struct run *r)
{
    if (r->phase == RUN_ENDING)
        signal_all(&r->daemons, SIGTERM);
}

void phase_end_daemons(struct run *r)
{
    const uint32_t daemons = phase_count(&r->daemons);
    say_lost(r);
    r->phase = RUN_ENDING;
    start_grace(r);
    stop_timers(&r->daemons);
    if (phase_count(&r->daemons) == 0) {
        phase_done(r);
        return;
    }
    run_note(r, "stopping the daemons (%" PRIu32 ")", daemons);
    end_daemons(r);
}

void phase_stop(struct run *r, int sig)
{
    if (r->phase == RUN_KEEPING)
        phase_end_daemons(r);
    if (r->phase >= RUN_STOPPING)
        return;
    r->phase = RUN_STOPPING;
    start_grace(r);
    const uint32_t workers = phase_count(&r->workers);
    if (workers == 0) {
        phase_end(r);
        return;
    }
    run_note(r, "stopping the workers (%" PRIu32 ")", workers);
    signal_all(&r->workers, sig);
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

static void kill_overdue(const struct run_children *c, uint32_t grace_s)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->list[i].state == CHILD_RUNNING)
            ctl_say("%s %s (pid %ld) did not stop within %" PRIu32 " s: killing it", c->what,
                    c->list[i].name, (long)c->list[i].pid, grace_s);
    signal_all(c, SIGKILL);
}

static void on_deadline(uv_timer_t *timer)
{
    struct run *r = timer->data;
    if (r->phase == RUN_STOPPING)
        kill_overdue(&r->workers, r->options->grace_s);
    else if (r->phase == RUN_ENDING)
        kill_overdue(&r->daemons, r->options->grace_s);
}

void phase_kill(struct run *r)
{
    signal_all(&r->workers, SIGKILL);
    signal_all(&r->helpers, SIGKILL);
    r->impatient = true;
    if (r->phase == RUN_ENDING)
        signal_all(&r->daemons, SIGKILL);
    else if (r->phase == RUN_KEEPING)
        phase_end_daemons(r);
}

void phase_suspend(struct run *r)
{
    signal_all(&r->workers, SIGSTOP);
    kill(getpid(), SIGSTOP);
    signal_all(&r->workers, SIGCONT);
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
    r->save.worked = rc == SHD_OK && o->command != NULL;
    if (rc == SHD_OK && (o->checkpoint != NULL || o->resume != NULL))
        rc = launch_saver(r, /* stays= */ true, e);
    for (uint32_t i = 0; i < r->workers_wanted && rc == SHD_OK; i++)
        rc = launch_worker(&r->workers.list[i], e);
    return rc;
}

void phase_work(struct run *r)
{
    struct shd_err e = { 0 };
    if (start_work(r, &e) != SHD_OK)
        fail_saying(r, &e);
}

void phase_check_ready(struct run *r)
{
    struct shd_err e = { 0 };
    if (r->phase != RUN_STARTING)
        return;
    for (uint32_t i = 0; i < r->daemons.count; i++)
        if (r->daemons.list[i].state != CHILD_RUNNING || !r->daemons.list[i].ready)
            return;
    r->phase = RUN_WORKING;
    if (r->options->restore == NULL)
        phase_work(r);
    else if (launch_restorer(r, &e) != SHD_OK)
        fail_saying(r, &e);
}

/* -- What daemons say -------------------------------------------------------------------------- */

/* Give a daemon that is not ready yet ms from here on, as it asks. */
static void allow_more(struct run_child *c, uint64_t ms)
{
    if (uv_is_active((uv_handle_t *)&c->timer) && uv_timer_get_due_in(&c->timer) < ms)
        uv_timer_start(&c->timer, c->run->child_timer, ms, 0);
}

/* The first model has no room where it is to be saved: end before there is anything to lose. */
static void check_room(struct run *r, const char *name)
{
    struct shd_err e = { 0 };
    if (room_check(r, name, &e) == SHD_OK)
        return;
    r->save.worked = false;
    ctl_say("%s", e.text);
    phase_fail(r, CTL_UNSAVED);
}

static void daemon_says(struct run_child *c, struct notify_message *m)
{
    keeper_take(&c->kept, m, c->name);
    if (m->store && c->starts == 0)
        check_room(c->run, m->name);
    c->drained = c->drained || m->drained;
    if (m->alive || m->ready)
        watchdog_fed(c);
    if (!c->ready && m->more_us > 0)
        allow_more(c, m->more_us / 1000);
    if (!m->ready || c->ready)
        return;
    c->ready = true;
    c->early = 0;
    trouble_end(c);
    uv_timer_stop(&c->timer);
    run_note(c->run, "daemon %s is ready", c->name);
}

/* We lack descriptors for a message: look again soon. Its daemon waits until we have it; after
 * NOTIFY_PATIENCE_NS it does not any more, and the messages behind it must not wait, either.
 * Returns true when it is to be taken with what it lost. */
static bool out_of_files(struct run *r)
{
    const uint64_t now_ns = clock_now_ns();
    if (r->notify_late_ns == 0) {
        r->notify_late_ns = now_ns;
        ctl_say("too many open files here to take what a daemon wants kept: it waits until there "
                "are fewer");
    }
    if (now_ns - r->notify_late_ns > NOTIFY_PATIENCE_NS)
        return true;
    uv_poll_stop(&r->notify);
    uv_timer_start(&r->notify_again, r->notify_timer, NOTIFY_AGAIN_MS, 0);
    return false;
}

void phase_take_messages(struct run *r)
{
    struct notify_message m;
    enum notify_result got;
    bool lossy = false;
    while ((got = notify_take(r->notify_fd, lossy, &m)) != NOTIFY_NONE) {
        lossy = got == NOTIFY_LATER && out_of_files(r);
        if (got == NOTIFY_LATER && !lossy)
            return;
        if (got != NOTIFY_TAKEN)
            continue;
        r->notify_late_ns = 0;
        for (uint32_t i = 0; i < r->daemons.count; i++)
            if (r->daemons.list[i].state == CHILD_RUNNING && r->daemons.list[i].pid == m.pid)
                daemon_says(&r->daemons.list[i], &m);
        notify_close(&m);
    }
}
