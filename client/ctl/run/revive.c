/* See revive.h. */
#include "client/ctl/run/revive.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/say.h"
#include "client/ctl/run/launch.h"
#include "client/ctl/run/phase.h"
#include "proto/base/check.h"
#include "proto/base/version.h"

#define REVIVE_WINDOW_S  10
#define REVIVE_WINDOW_NS (UINT64_C(1000000000) * REVIVE_WINDOW_S)
#define EARLY_MAX        8u
#define EARLY_MS_MIN     50u
#define EARLY_MS_MAX     5000u

/* -- Starting again --------------------------------------------------------------------------- */

static void start_in(struct run_child *c, uint64_t ms)
{
    c->state = CHILD_WAITING;
    uv_timer_start(&c->timer, revive_timer, ms, 0);
}

/* True when c may be started again now; counts it. */
static bool restart_allowed(struct run_child *c)
{
    const uint32_t max = c->run->options->max_restarts;
    CHECK(max > 0);
    uint64_t *oldest = &c->started_ns[c->starts % max];
    const uint64_t now = uv_hrtime();
    if (c->starts >= max && now - *oldest < REVIVE_WINDOW_NS)
        return false;
    *oldest = now;
    c->starts++;
    return true;
}

/* c, a daemon, did not get ready: try again later, or not any more. */
static void try_again(struct run_child *c)
{
    c->early++;
    if (c->early == EARLY_MAX) {
        ctl_say("daemon %s: given up after %u tries in a row that did not get ready%s%s", c->name,
                EARLY_MAX, c->relay.last[0] != '\0' ? "; its last words: " : "", c->relay.last);
        phase_fail(c->run, CTL_FAILED);
        return;
    }
    const uint64_t ms = (uint64_t)EARLY_MS_MIN << (c->early - 1);
    start_in(c, ms < EARLY_MS_MAX ? ms : EARLY_MS_MAX);
}

static void start_daemon(struct run_child *c)
{
    struct shd_err e = { 0 };
    if (launch_daemon(c, &e) != SHD_OK) {
        ctl_say("%s", e.text);
        c->relay.last[0] = '\0'; /* the words of an earlier one */
        try_again(c);
        return;
    }
    ctl_say("daemon %s %s: started again as pid %ld with %" PRIu32 " kept segment%s", c->name,
            c->ended, (long)c->pid, c->kept.count, c->kept.count == 1 ? "" : "s");
}

/* Start a worker again, or for the first time when nobody had its rank before. The run can do
 * without one that joins. */
static void start_worker(struct run_child *c)
{
    struct run *r = c->run;
    struct shd_err e = { 0 };
    const bool joins = c->ended[0] == '\0';
    if (launch_worker(c, &e) == SHD_OK) {
        ctl_say(joins ? "worker %s %sjoined as pid %ld" : "worker %s %s: started again as pid %ld",
                c->name, c->ended, (long)c->pid);
        return;
    }
    c->state = CHILD_GONE;
    ctl_say("worker %s %s%s%s", c->name, c->ended, joins ? "not added: " : "; ", e.text);
    if (!joins)
        phase_fail(r, CTL_FAILED);
    else if (phase_count(&r->workers) == 0)
        phase_end(r);
}

static bool is_daemon(const struct run_child *c)
{
    return c == &c->run->daemons.list[c->index];
}

void revive_timer(uv_timer_t *timer)
{
    struct run_child *c = timer->data;
    const struct run_options *o = c->run->options;
    CHECK(c->state != CHILD_GONE);
    if (c->state == CHILD_WAITING && !relay_idle(&c->relay)) {
        start_in(c, 1); /* the loop has not let go of the old pipe yet */
    } else if (c->state == CHILD_WAITING) {
        if (is_daemon(c))
            start_daemon(c);
        else
            start_worker(c);
    } else if (is_daemon(c)) {
        ctl_say("daemon %s (pid %ld) was not ready after %" PRIu32 " s (--timeout)%s%s", c->name,
                (long)c->pid, o->timeout_s, c->relay.last[0] != '\0' ? ": " : "", c->relay.last);
        phase_fail(c->run, CTL_FAILED);
    } else {
        ctl_say("worker %s (pid %ld) did not leave within %" PRIu32 " s: killing it", c->name,
                (long)c->pid, o->grace_s);
        child_signal(c->pid, SIGKILL);
    }
}

/* -- Exits ------------------------------------------------------------------------------------ */

/* True when c has exited: it is reaped, its group is gone, its last words and messages are in. */
static bool take_exit(struct run_child *c, int *ret_wait_status)
{
    siginfo_t info = { 0 };
    if (c->state != CHILD_RUNNING ||
        waitid(P_PID, (id_t)c->pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 || info.si_pid == 0)
        return false;
    phase_take_messages(
        c->run);            /* what it stored before its end counts, so before its pid is free */
    kill(-c->pid, SIGKILL); /* what it left behind, while its zombie still holds the group's id */
    if (waitpid(c->pid, ret_wait_status, 0) != c->pid)
        return false;
    uv_timer_stop(&c->timer);
    c->state = CHILD_GONE;
    relay_close(&c->relay);
    char how[64];
    snprintf(c->ended, sizeof(c->ended), "(pid %ld) %s", (long)c->pid,
             child_describe(*ret_wait_status, how, sizeof(how)));
    return true;
}

/* A daemon that ended although nobody told it to, or not as it was told. */
static void say_daemon_failed(const struct run *r, const struct run_child *c, int wait_status)
{
    const char *when = !c->ready                ? " before it was ready"
                       : r->phase == RUN_ENDING ? " while stopping"
                                                : "";
    const bool words = WIFEXITED(wait_status) && c->relay.last[0] != '\0';
    ctl_say("daemon %s %s%s%s%s", c->name, c->ended, when, words ? ": " : "",
            words ? c->relay.last : "");
}

static void say_given_up(const struct run_child *c)
{
    ctl_say("%s %s %s: given up, it was started again %" PRIu32 " times within %d s "
            "(--max-restarts)",
            is_daemon(c) ? "daemon" : "worker", c->name, c->ended, c->run->options->max_restarts,
            REVIVE_WINDOW_S);
}

/* The run still wants this daemon. */
static void daemon_died(struct run *r, struct run_child *c, int wait_status)
{
    /* One that was never ready and says that it cannot be; of a later one that is no proof. */
    const bool hopeless = !c->ready && c->kept.count == 0 && WIFEXITED(wait_status) &&
                          WEXITSTATUS(wait_status) == SHARDD_EXIT_USAGE;
    if (r->options->max_restarts == 0 || hopeless) {
        say_daemon_failed(r, c, wait_status);
        phase_fail(r, CTL_FAILED);
    } else if (!c->ready) {
        say_daemon_failed(r, c, wait_status);
        try_again(c);
    } else if (restart_allowed(c)) {
        start_in(c, 0);
    } else {
        say_given_up(c);
        phase_fail(r, CTL_FAILED);
    }
}

/* `shardctl drain` has ended it, and what is left goes on without. */
static void daemon_drained(struct run *r, const struct run_child *c)
{
    ctl_say("daemon %s %s: drained", c->name, c->ended);
    if (phase_count(&r->daemons) == 0)
        phase_stop(r, SIGTERM);
}

static void daemon_exited(struct run *r, struct run_child *c, int wait_status)
{
    const bool told = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGTERM && !c->ready;
    if (r->phase < RUN_ENDING && c->drained && WIFEXITED(wait_status) &&
        WEXITSTATUS(wait_status) == SHARDD_EXIT_DRAINED) {
        daemon_drained(r, c);
    } else if (r->phase <= RUN_WORKING) {
        daemon_died(r, c, wait_status);
    } else if (r->phase == RUN_ENDING && (wait_status == 0 || told || r->code != CTL_OK)) {
        run_note(r, "daemon %s %s", c->name, c->ended);
    } else {
        say_daemon_failed(r, c, wait_status);
        phase_failed(r, CTL_FAILED);
    }
    if (r->phase == RUN_ENDING && phase_count(&r->daemons) == 0 && phase_count(&r->helpers) == 0)
        phase_done(r);
}

/* A worker that failed while the run wants it. SIGPIPE is for good: nobody reads its output, nor
 * would anybody read its successor's. */
static void worker_died(struct run *r, struct run_child *c, int wait_status)
{
    if (!WIFSIGNALED(wait_status) || WTERMSIG(wait_status) == SIGPIPE ||
        r->options->max_restarts == 0) {
        ctl_say("worker %s %s", c->name, c->ended);
        phase_fail(r, child_code(wait_status));
    } else if (restart_allowed(c)) {
        start_in(c, 0);
    } else {
        say_given_up(c);
        phase_fail(r, child_code(wait_status));
    }
}

static void worker_exited(struct run *r, struct run_child *c, int wait_status)
{
    /* 143 is how a shell, or a program that cleans up first, passes SIGTERM on. */
    const bool left = c->leaving &&
                      (WIFSIGNALED(wait_status) || child_code(wait_status) == 128 + SIGTERM);
    if (wait_status != 0 && r->phase == RUN_WORKING && !left)
        worker_died(r, c, wait_status);
    else if (c->leaving && r->phase == RUN_WORKING)
        ctl_say("worker %s %s: left", c->name, c->ended);
    else
        run_note(r, "worker %s %s", c->name, c->ended);
    if (phase_count(&r->workers) == 0)
        phase_end(r);
}

/* True, and says so, when a helper has failed. Its own words were relayed. */
static bool helper_failed(const struct run_child *c, int wait_status)
{
    if (wait_status != 0)
        ctl_say("%s %s", c->name, c->ended);
    return wait_status != 0;
}

static void helper_exited(struct run *r, struct run_child *c, int wait_status)
{
    const bool restored = c->index == RUN_RESTORER;
    const bool failed = (!restored || r->phase != RUN_ENDING) && helper_failed(c, wait_status);
    if (r->phase == RUN_ENDING && failed)
        phase_failed(r, CTL_FAILED);
    if (r->phase == RUN_ENDING)
        phase_end_daemons(r);
    else if (restored && failed)
        phase_fail(r, CTL_FAILED); /* nothing to work on; without a saver training goes on */
    else if (restored)
        phase_work(r);
}

static void reap(struct run *r, struct run_children *children,
                 void (*exited)(struct run *r, struct run_child *c, int wait_status))
{
    int wait_status;
    for (uint32_t i = 0; i < children->count; i++)
        if (take_exit(&children->list[i], &wait_status))
            exited(r, &children->list[i], wait_status);
}

/* A worker that fails because its daemon died must not be named for it: the daemon's death came
 * first, so it can be seen by now. */
static void worker_exited_alone(struct run *r, struct run_child *c, int wait_status)
{
    reap(r, &r->daemons, daemon_exited);
    worker_exited(r, c, wait_status);
}

void revive_exited(struct run *r)
{
    reap(r, &r->daemons, daemon_exited);
    reap(r, &r->helpers, helper_exited);
    reap(r, &r->workers, worker_exited_alone);
}
