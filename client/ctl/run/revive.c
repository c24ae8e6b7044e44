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
#include "client/ctl/run/trouble.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/version.h"

#define REVIVE_WINDOW_S  10
#define REVIVE_WINDOW_NS (NS_PER_S * REVIVE_WINDOW_S)
#define EARLY_MAX        8u
#define RETRY_MS_MIN     50u
#define RETRY_MS_MAX     30000u
#define LAST_SAVES       3u /* tries of the last save */

/* -- Starting again --------------------------------------------------------------------------- */

static void start_in(struct run_child *c, uint64_t ms)
{
    c->state = CHILD_WAITING;
    uv_timer_start(&c->timer, revive_timer, ms, 0);
}

/* In how many ms c may be started again, which counts it. */
static uint64_t restart_in_ms(struct run_child *c)
{
    const uint32_t max = c->run->options->max_restarts;
    const uint64_t now_ns = clock_now_ns();
    uint64_t at_ns = now_ns;
    if (max == 0)
        return RETRY_MS_MIN;
    uint64_t *oldest_ns = &c->started_ns[c->starts % max];
    if (c->starts >= max && *oldest_ns + REVIVE_WINDOW_NS > now_ns)
        at_ns = *oldest_ns + REVIVE_WINDOW_NS;
    *oldest_ns = at_ns;
    c->starts++;
    return (at_ns - now_ns + NS_PER_MS - 1) / NS_PER_MS;
}

/* The pause before the next try, after `tries` of them. */
static uint64_t retry_ms(uint32_t tries)
{
    const uint64_t ms = (uint64_t)RETRY_MS_MIN << (tries < 16 ? tries - 1 : 15);
    return ms < RETRY_MS_MAX ? ms : RETRY_MS_MAX;
}

/* c, a daemon, did not get ready, as why says in a sentence: try again later, or not any more. */
static void try_again(struct run_child *c, const char *why)
{
    const bool kept = trouble_state_is_kept(c->run);
    c->early++;
    if (c->early < EARLY_MAX || kept) {
        const uint64_t ms = retry_ms(c->early);
        start_in(c, ms);
        trouble_begin(c, why, ms);
        return;
    }
    ctl_say("%s", why);
    ctl_say("daemon %s: given up after %u tries in a row that did not get ready%s%s", c->name,
            EARLY_MAX, c->relay.last[0] != '\0' ? "; its last words: " : "", c->relay.last);
    phase_fail(c->run, CTL_FAILED);
}

static void start_daemon(struct run_child *c)
{
    struct shd_err e = { 0 };
    trouble_try(c);
    if (launch_daemon(c, &e) != SHD_OK) {
        c->relay.last[0] = '\0'; /* the words of an earlier one */
        try_again(c, e.text);
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
        c->early = 0;
        ctl_say(joins ? "worker %s %sjoined as pid %ld" : "worker %s %s: started again as pid %ld",
                c->name, c->ended, (long)c->pid);
        return;
    }
    ctl_say("worker %s %s%s%s", c->name, c->ended, joins ? "not added: " : "; ", e.text);
    if (!joins && trouble_state_is_kept(r)) { /* its program may be away, or we out of files */
        start_in(c, retry_ms(++c->early));
        return;
    }
    c->state = CHILD_GONE;
    if (!joins)
        phase_fail(r, CTL_FAILED);
    else if (phase_count(&r->workers) == 0)
        phase_end(r);
}

/* One that stays while the run goes on; at its end one that saves once. */
static void start_saver(struct run_child *c)
{
    struct run *r = c->run;
    struct shd_err e = { 0 };
    if (launch_saver(r, /* stays= */ r->phase < RUN_SAVING, &e) == SHD_OK)
        return;
    ctl_say("%s", e.text);
    if (r->phase < RUN_SAVING) {
        start_in(c, retry_ms(++c->early));
        return;
    }
    c->state = CHILD_GONE;
    phase_saved(r, /* ok= */ false);
}

static bool is_daemon(const struct run_child *c)
{
    return c == &c->run->daemons.list[c->index];
}

/* c, a daemon, took longer than --timeout to be ready. With what is kept another may do better. */
static void daemon_late(struct run_child *c)
{
    ctl_say("daemon %s (pid %ld) was not ready after %" PRIu32 " s (--timeout)%s%s", c->name,
            (long)c->pid, c->run->options->timeout_s, c->relay.last[0] != '\0' ? ": " : "",
            c->relay.last);
    if (trouble_state_is_kept(c->run))
        child_signal(c->pid, SIGKILL);
    else
        phase_fail(c->run, CTL_FAILED);
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
        else if (c == &c->run->helpers.list[RUN_SAVER])
            start_saver(c);
        else
            start_worker(c);
    } else if (is_daemon(c)) {
        daemon_late(c);
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

#define FAILED_BYTES (DEVICE_NAME_BYTES + RELAY_LAST_BYTES + 160u)

/* The sentence about a daemon that ended although nobody told it to, or not as it was told. */
static const char *daemon_failed(const struct run *r, const struct run_child *c, int wait_status,
                                 char *buf)
{
    const char *when = !c->ready                ? " before it was ready"
                       : r->phase == RUN_ENDING ? " while stopping"
                                                : "";
    const bool words = WIFEXITED(wait_status) && c->relay.last[0] != '\0';
    snprintf(buf, FAILED_BYTES, "daemon %s %s%s%s%s", c->name, c->ended, when, words ? ": " : "",
             words ? c->relay.last : "");
    return buf;
}

/* c has died as it worked: start it again at once, or when --max-restarts allows it. */
static void start_again(struct run_child *c)
{
    char why[FAILED_BYTES];
    const uint64_t ms = restart_in_ms(c);
    start_in(c, ms);
    if (ms <= RETRY_MS_MIN)
        return;
    snprintf(why, sizeof(why), "%s %s %s: started again %" PRIu32 " times within %d s, the limit",
             is_daemon(c) ? "daemon" : "worker", c->name, c->ended, c->run->options->max_restarts,
             REVIVE_WINDOW_S);
    if (is_daemon(c))
        trouble_begin(c, why, ms);
    else
        ctl_say("%s (--max-restarts): the next start is in %" PRIu64 ".%" PRIu64 " s", why,
                ms / 1000, ms / 100 % 10);
}

/* The run still wants this daemon. */
static void daemon_died(struct run *r, struct run_child *c, int wait_status)
{
    char why[FAILED_BYTES];
    const bool kept = trouble_state_is_kept(r);
    /* One that was never ready and says that it cannot be; of a later one that is no proof. */
    const bool hopeless = !c->ready && WIFEXITED(wait_status) &&
                          WEXITSTATUS(wait_status) == SHARDD_EXIT_USAGE;
    daemon_failed(r, c, wait_status, why);
    if (!kept && (r->options->max_restarts == 0 || hopeless)) {
        ctl_say("%s", why);
        phase_fail(r, CTL_FAILED);
    } else if (!c->ready) {
        try_again(c, why);
    } else {
        start_again(c);
    }
}

/* `shardctl drain` has ended it, and what is left goes on without. A relay alone serves nobody. */
static void daemon_drained(struct run *r, const struct run_child *c)
{
    ctl_say("daemon %s %s: drained", c->name, c->ended);
    if (phase_count(&r->daemons) == (r->options->far != NULL))
        phase_stop(r, SIGTERM);
}

static void daemon_exited(struct run *r, struct run_child *c, int wait_status)
{
    char why[FAILED_BYTES];
    const bool told = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGTERM && !c->ready;
    if (r->phase < RUN_ENDING && c->drained && WIFEXITED(wait_status) &&
        WEXITSTATUS(wait_status) == SHARDD_EXIT_DRAINED) {
        daemon_drained(r, c);
    } else if (r->phase < RUN_ENDING) {
        daemon_died(r, c, wait_status);
    } else if (r->phase == RUN_ENDING && (wait_status == 0 || told || r->code != CTL_OK)) {
        run_note(r, "daemon %s %s", c->name, c->ended);
    } else {
        ctl_say("%s", daemon_failed(r, c, wait_status, why));
        phase_failed(r, CTL_FAILED);
    }
    if (launch_is_far(c))
        phase_far_ended(r);
    if (r->phase == RUN_ENDING && phase_count(&r->daemons) == 0 && phase_count(&r->helpers) == 0)
        phase_done(r);
}

/* True for a signal that the program itself has caused: the next one will, too. */
static bool is_crash(int sig)
{
    return sig == SIGSEGV || sig == SIGABRT || sig == SIGBUS || sig == SIGFPE || sig == SIGILL ||
           sig == SIGSYS || sig == SIGTRAP;
}

/* It has crashed as often as it may. */
static bool is_hopeless(const struct run_child *c, int sig)
{
    const uint32_t max = c->run->options->max_restarts;
    return is_crash(sig) && c->starts >= max &&
           clock_now_ns() - c->started_ns[c->starts % max] < REVIVE_WINDOW_NS;
}

/* A worker that failed while the run wants it. SIGPIPE is for good: nobody reads its output, nor
 * would anybody read its successor's. */
static void worker_died(struct run *r, struct run_child *c, int wait_status)
{
    if (!WIFSIGNALED(wait_status) || WTERMSIG(wait_status) == SIGPIPE ||
        r->options->max_restarts == 0) {
        ctl_say("worker %s %s", c->name, c->ended);
        phase_fail(r, child_code(wait_status));
    } else if (is_hopeless(c, WTERMSIG(wait_status))) {
        ctl_say("worker %s %s: given up, it was started again %" PRIu32 " times within %d s "
                "(--max-restarts)",
                c->name, c->ended, r->options->max_restarts, REVIVE_WINDOW_S);
        phase_fail(r, child_code(wait_status));
    } else {
        start_again(c);
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

/* The saver has ended while the run wants it: training goes on, and the next one may save. */
static void saver_died(struct run_child *c)
{
    start_in(c, retry_ms(++c->early));
}

static void helper_exited(struct run *r, struct run_child *c, int wait_status)
{
    const bool restored = c->index == RUN_RESTORER;
    const bool failed = (!restored || r->phase < RUN_SAVING) && helper_failed(c, wait_status);
    if (r->phase == RUN_SAVING && r->save.worked && failed && !r->impatient &&
        ++r->save.tries < LAST_SAVES)
        start_in(c, RETRY_MS_MIN); /* it may have been killed, or a daemon was away */
    else if (r->phase >= RUN_SAVING)
        phase_saved(r, /* ok= */ !failed);
    else if (!restored && r->phase == RUN_WORKING)
        saver_died(c);
    else if (restored && failed)
        phase_fail(r, CTL_FAILED); /* nothing to work on */
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
