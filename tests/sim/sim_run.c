/* The simulator's scenarios, faults and main loop; see sim.h. */
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/sys.h"
#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

#define NETWORK      (SIM_LOSS | SIM_DOUBLE | SIM_REORDER)
#define GIVE_UPS_MAX 30u /* of a step */

const struct sim_scenario sim_scenarios[] = {
    { "calm", 0, false },
    { "network", NETWORK | SIM_PARTITION | SIM_RESET, false },
    { "workers", SIM_REORDER | SIM_KILL_WORKER | SIM_LEAVE, false },
    { "daemons", SIM_REORDER | SIM_KILL_DAEMON | SIM_KILL_POINT, false },
    { "points", SIM_KILL_POINT, false },
    { "both", NETWORK | SIM_KILL_WORKER | SIM_KILL_DAEMON | SIM_KILL_POINT | SIM_KILL_BOTH, false },
    { "stalls", SIM_REORDER | SIM_STALL | SIM_SLOW | SIM_CLOCK, false },
    { "jobs", SIM_REORDER | SIM_NEW_JOB | SIM_KILL_POINT | SIM_LOSS, false },
    { "everything",
      NETWORK | SIM_KILL_WORKER | SIM_KILL_DAEMON | SIM_KILL_POINT | SIM_KILL_BOTH | SIM_NEW_JOB |
          SIM_STALL | SIM_PARTITION | SIM_RESET | SIM_SLOW | SIM_CLOCK | SIM_LEAVE | SIM_GIVE_UP,
      false },
    { "resets", SIM_REORDER | SIM_GIVE_UP, false },
    { "again", SIM_KILL_POINT | SIM_GIVE_UP, false },
    { "worst",
      NETWORK | SIM_KILL_WORKER | SIM_KILL_DAEMON | SIM_KILL_POINT | SIM_KILL_BOTH | SIM_GIVE_UP,
      false },
    { "replicas",
      NETWORK | SIM_KILL_WORKER | SIM_KILL_DAEMON | SIM_KILL_POINT | SIM_KILL_BOTH | SIM_STALL |
          SIM_PARTITION | SIM_RESET | SIM_SLOW | SIM_CLOCK | SIM_LEAVE | SIM_NEW_JOB | SIM_GIVE_UP,
      true },
    { "hosts", SIM_REORDER | SIM_HOST | SIM_ARBITER, true },
    { "links", SIM_REORDER | SIM_RESET | SIM_CUT | SIM_ARBITER, true },
    { "split",
      NETWORK | SIM_KILL_WORKER | SIM_KILL_DAEMON | SIM_KILL_POINT | SIM_KILL_BOTH | SIM_STALL |
          SIM_PARTITION | SIM_RESET | SIM_SLOW | SIM_CLOCK | SIM_LEAVE | SIM_NEW_JOB | SIM_HOST |
          SIM_CUT | SIM_ARBITER,
      true },
    { "halves", SIM_REORDER | SIM_STALL | SIM_PARTITION | SIM_GIVE_UP | SIM_HOST | SIM_CUT, true },
    { "keeper", SIM_REORDER | SIM_KILL_WORKER | SIM_KILL_DAEMON | SIM_KEEPER, false },
};
const uint32_t sim_scenario_count = ARRAY_SIZE(sim_scenarios);

/* See sim_replica.h. */
static void replicate(struct sim *s, struct sim_config *c)
{
    static const uint64_t patience[] = { S, 3 * S, 8 * S };
    c->replicas = true;
    c->hosts = sim_chance(s, 600) ? 2 : 3;
    c->patience_ns = patience[sim_below(s, ARRAY_SIZE(patience))];
    c->sets = c->guests = c->rewinds = false;
}

struct sim_config sim_config_of(const struct sim_scenario *scenario, uint64_t seed)
{
    static struct sim s; /* too large for the stack */
    s.random = sim_mix(seed, 1);
    static const uint64_t gaps[] = { 100 * MS, 300 * MS, S, 3 * S };
    static const uint64_t kernels[] = { 20 * US, 100 * US, 2 * MS, 20 * MS };
    struct sim_config c = { .seed = seed,
                            .model_seed = sim_mix(seed, 2),
                            .faults = scenario->faults };
    c.daemons = 1 + (uint32_t)sim_below(&s, SIM_DAEMONS);
    c.workers = 1 + (uint32_t)sim_below(&s, SIM_WORKERS);
    c.units = 1 + (uint32_t)sim_below(&s, SIM_UNITS);
    c.micros = 1 + (uint32_t)sim_below(&s, SIM_MICROS);
    c.steps = 20 + (uint32_t)sim_below(&s, 60);
    c.fault_gap_ns = gaps[sim_below(&s, ARRAY_SIZE(gaps))];
    c.kernel_ns = kernels[sim_below(&s, ARRAY_SIZE(kernels))];
    c.lease = sim_chance(&s, 600);
    c.frozen = c.units > 1 && sim_chance(&s, 300);
    c.events_max = 20000000;
    c.puts = sim_chance(&s, 400);
    c.apart = sim_chance(&s, 250);
    c.sets = (c.faults & SIM_KEEPER) == 0 && sim_chance(&s, 400);
    c.guests = (c.faults & SIM_KEEPER) == 0 && sim_chance(&s, 500);
    c.guard = sim_chance(&s, 400) ? SIM_GUARD_SCORES : SIM_GUARD_NONE;
    c.verify = c.lease && sim_chance(&s, 500) ? 1 + sim_below(&s, 4) : 0;
    c.wrong = sim_chance(&s, 500) ? 1 + (uint32_t)sim_below(&s, c.workers) : 0;
    c.ramp = c.micros > 1 && sim_chance(&s, 300);
    c.rewinds = (c.faults & SIM_KEEPER) == 0 && sim_chance(&s, 350);
    if (c.guard != SIM_GUARD_NONE)
        c.guard = 1 + (uint32_t)sim_below(&s, SIM_GUARDS - 1);
    if (c.guard == SIM_GUARD_SCORES && sim_chance(&s, 500))
        c.guard = SIM_GUARD_UNITS;
    if (scenario->replicas)
        replicate(&s, &c);
    return c;
}

void sim_config_shorten(struct sim_config *c)
{
    c->steps = 8;
    c->patience_ns = S;
    c->fault_gap_ns = 50 * MS;
    c->kernel_ns = 100 * US;
    c->verify = 0;
    c->workers = c->workers > 2 ? c->workers : 3;
    c->daemons = c->daemons > 1 ? c->daemons : 2;
}

/* -- Faults -------------------------------------------------------------------------------------
 */

static struct sim_daemon *some_daemon(struct sim *s)
{
    return &s->daemon[sim_below(s, sim_members(s))];
}

static struct sim_worker *some_worker(struct sim *s)
{
    return &s->worker[sim_below(s, s->config.workers)];
}

static void kill_worker(struct sim *s, struct sim_worker *w)
{
    if (w->alive)
        sim_worker_kill(s, w);
}

/* Its successor may be killed on its way back. */
static void kill_daemon(struct sim *s, struct sim_daemon *d)
{
    if (!d->alive)
        return;
    sim_daemon_kill(s, d);
    d->point_left = (s->config.faults & SIM_KILL_POINT) != 0 && sim_chance(s, 300)
                        ? 1 + (uint32_t)sim_below(s, 20)
                        : 0;
}

static void kill_both(struct sim *s)
{
    const bool all = sim_chance(s, 200);
    kill_daemon(s, some_daemon(s));
    kill_worker(s, some_worker(s));
    sim_guest_fault(s);
    for (uint32_t i = 0; all && i < sim_members(s); i++)
        kill_daemon(s, &s->daemon[i]);
    for (uint32_t i = 0; all && i < s->config.workers; i++)
        kill_worker(s, &s->worker[i]);
}

/* The scheduler starts another job when the last process of the one before is gone: nothing that
 * one sent is still served when the new one's first question arrives. */
static void new_job(struct sim *s)
{
    for (uint32_t i = 0; i < s->config.workers; i++)
        kill_worker(s, &s->worker[i]);
    s->job++;
    s->job_ready_ns = s->now_ns + 50 * MS;
}

static uint64_t fault_ns(struct sim *s)
{
    return sim_chance(s, 200) ? sim_below(s, 5 * S) : sim_below(s, 200 * MS);
}

static void stall(struct sim *s)
{
    const uint64_t until = s->now_ns + fault_ns(s);
    if (sim_chance(s, 500))
        some_daemon(s)->stalled_until_ns = until;
    else
        some_worker(s)->stalled_until_ns = until;
}

static void reset(struct sim *s)
{
    struct sim_daemon *d = some_daemon(s);
    struct sim_worker *w = some_worker(s);
    const struct sim_link *l = &w->link[sim_daemon_index(s, d)];
    if (!w->alive || !l->up)
        return;
    struct sim_msg msg = { .daemon = sim_daemon_index(s, d),
                           .worker = sim_worker_index(s, w),
                           .daemon_gen = l->daemon_gen,
                           .worker_gen = w->gen,
                           .session = l->session,
                           .reply = { .kind = SIM_HANGUP } };
    sim_send(s, &msg);
    msg.to_daemon = true;
    msg.request = (struct sim_request){ .kind = SIM_HANGUP };
    sim_send(s, &msg);
}

static void lose_keeper(struct sim *s)
{
    struct sim_daemon *d = some_daemon(s);
    if (s->kept_lost || sim_line(s)->decided < 3)
        return;
    kill_daemon(s, d);
    sim_note(s, "keeper lost", sim_daemon_index(s, d), SIM_NOBODY, 0, 0, 0);
    sim_daemon_wipe(s, d);
}

/* One that always comes before the step is complete would be no bound that anybody breaks. */
static void give_up(struct sim *s)
{
    struct sim_worker *w = some_worker(s);
    if (s->give_up_step != sim_line(s)->decided)
        s->give_ups = 0;
    s->give_up_step = sim_line(s)->decided;
    w->gives_up = w->gives_up || s->give_ups++ < GIVE_UPS_MAX;
}

static void do_fault(struct sim *s, enum sim_fault fault)
{
    switch (fault) {
    case SIM_KILL_WORKER:
        kill_worker(s, some_worker(s));
        sim_guest_fault(s);
        break;
    case SIM_KILL_DAEMON:
        kill_daemon(s, some_daemon(s));
        break;
    case SIM_KILL_POINT:
        some_daemon(s)->point_left = 1 + (uint32_t)sim_below(s, 60);
        break;
    case SIM_KILL_BOTH:
        kill_both(s);
        break;
    case SIM_NEW_JOB:
        new_job(s);
        break;
    case SIM_STALL:
        stall(s);
        break;
    case SIM_PARTITION:
        s->cut_until_ns[sim_below(s, sim_members(s))][sim_below(s, s->config.workers)] = s->now_ns +
                                                                                         fault_ns(
                                                                                             s);
        break;
    case SIM_RESET:
        reset(s);
        break;
    case SIM_CLOCK:
        some_daemon(s)->clock_ns = (int64_t)sim_below(s, 20 * S) - (int64_t)(10 * S);
        break;
    case SIM_LEAVE: {
        struct sim_worker *w = some_worker(s);
        if (w->alive)
            sim_worker_leave(s, w);
        break;
    }
    case SIM_KEEPER:
        lose_keeper(s);
        break;
    case SIM_GIVE_UP:
        give_up(s);
        break;
    case SIM_HOST:
        sim_host_fault(s);
        break;
    case SIM_CUT:
        sim_cut_fault(s);
        break;
    case SIM_ARBITER:
        sim_arbiter_fault(s);
        break;
    case SIM_LOSS:
    case SIM_DOUBLE:
    case SIM_REORDER:
    case SIM_SLOW:
        break; /* all the time */
    }
}

static void on_fault(struct sim *s)
{
    enum sim_fault kinds[32];
    uint32_t count = 0;
    for (uint32_t i = 0; i < 32; i++)
        if ((s->config.faults >> i & 1) != 0)
            kinds[count++] = (enum sim_fault)(1u << i);
    if (count == 0)
        return;
    do_fault(s, kinds[sim_below(s, count)]);
    if (s->last_fault_ns < s->now_ns) /* some last */
        s->last_fault_ns = s->now_ns;
    const bool burst = sim_chance(s, 150);
    sim_at(s, burst ? sim_below(s, MS) : sim_below(s, 2 * s->config.fault_gap_ns),
           (struct sim_event){ .kind = EV_FAULT });
}

/* -- Loop ---------------------------------------------------------------------------------------
 */

static struct {
    const char *name;
    uint64_t kills;
} points[64];

static void count_point(const char *name)
{
    uint32_t i = 0;
    while (points[i].name != NULL && strcmp(points[i].name, name) != 0)
        i++;
    CHECK(i + 1 < ARRAY_SIZE(points));
    points[i].name = name;
    points[i].kills++;
}

uint64_t sim_killed_at(const char *point)
{
    for (uint32_t i = 0; points[i].name != NULL; i++)
        if (strcmp(points[i].name, point) == 0)
            return points[i].kills;
    return 0;
}

static struct sim *hooked; /* the run that fail points and failed checks belong to */

static void on_fail_point(const char *name)
{
    struct sim *s = hooked;
    if (s->running == NULL || s->running->point_left == 0 || --s->running->point_left > 0)
        return;
    sim_note(s, name, sim_daemon_index(s, s->running), SIM_NOBODY, 0, 0, 0);
    count_point(name);
    longjmp(s->killed, 1);
}

/* A CHECK of the product failed: the process would exit. */
static void on_abort(int signal_number)
{
    (void)signal_number;
    if (hooked != NULL)
        siglongjmp(hooked->stopped, 2);
}

static void check_failed(struct sim *s)
{
    s->result.outcome = SIM_BROKEN;
    s->result.daemon = s->running != NULL ? sim_daemon_index(s, s->running) : SIM_NOBODY;
    s->result.worker = SIM_NOBODY;
    snprintf(s->result.promise, sizeof s->result.promise, "CHECK");
    snprintf(s->result.text, sizeof s->result.text, "a check in the code failed, see above");
}

static bool side_message(const struct sim_msg *msg)
{
    const enum sim_kind kind = msg->to_daemon ? msg->request.kind : msg->reply.kind;
    return kind == SIM_ATTACH || kind == SIM_HANGUP;
}

/* True when the process is stopped: the event waits for it, or is lost where queues are short. */
static bool held(struct sim *s, const struct sim_event *event, uint64_t until_ns, uint32_t *count)
{
    if (s->now_ns >= until_ns) {
        *count = 0;
        return false;
    }
    if (event->kind == EV_MSG && (s->config.faults & SIM_SLOW) != 0 &&
        !side_message(&s->msg[event->arg]) && ++*count > 6)
        sim_msg_done(s, event->arg);
    else
        sim_requeue(s, event, until_ns);
    return true;
}

/* Of owner 0, or who has its slice, and not a message. */
static bool is_held(const struct sim *s, const struct sim_event *event)
{
    const struct sim_daemon *d = &s->daemon[event->who];
    return d->alive && event->gen == d->gen && s->now_ns < d->stalled_until_ns;
}

static void to_daemon(struct sim *s, const struct sim_event *event)
{
    struct sim_daemon *d = &s->daemon[event->who];
    const bool message = event->kind == EV_MSG, start = event->kind == EV_START_DAEMON;
    if ((!message && event->gen != d->gen) || d->alive == start ||
        (start && sim_is_dead(s, event->who))) {
        if (message)
            sim_msg_done(s, event->arg);
        return;
    }
    if (held(s, event, d->stalled_until_ns, &d->held))
        return;
    s->running = d;
    if (setjmp(s->killed) == 0) {
        sim_daemon_event(s, d, event);
        s->running = NULL;
    } else {
        s->running = NULL;
        kill_daemon(s, d);
    }
    if (message)
        sim_msg_done(s, event->arg);
}

static void to_worker(struct sim *s, const struct sim_event *event)
{
    struct sim_worker *w = &s->worker[event->who];
    if (event->kind == EV_START_WORKER) {
        if (s->now_ns < s->job_ready_ns)
            sim_requeue(s, event, s->job_ready_ns);
        else if (!w->alive && event->gen == w->gen && sim_hosts_place(s, w))
            sim_worker_start(s, w);
        return;
    }
    const bool message = event->kind == EV_MSG;
    const uint64_t gen = message ? s->msg[event->arg].worker_gen : event->gen;
    if (w->alive && gen == w->gen) {
        if (held(s, event, w->stalled_until_ns, &w->held))
            return;
        sim_worker_event(s, w, event);
    }
    if (message)
        sim_msg_done(s, event->arg);
}

static void dispatch(struct sim *s, const struct sim_event *event)
{
    switch (event->kind) {
    case EV_FAULT:
        on_fault(s);
        return;
    case EV_SET:
        if (!is_held(s, event)) /* else this one comes again */
            sim_set_event(s);   /* the next one */
        to_daemon(s, event);
        return;
    case EV_MSG:
        if (s->msg[event->arg].to_daemon)
            to_daemon(s, event);
        else
            to_worker(s, event);
        return;
    case EV_GO_ON:
        if (!is_held(s, event))
            sim_go_on_event(s);
        to_daemon(s, event);
        return;
    case EV_KERNEL:
    case EV_KERNEL_DONE:
    case EV_SPILL:
    case EV_SPILLED:
    case EV_LEASE_TIMER:
    case EV_START_DAEMON:
    case EV_ASK:
    case EV_BACK:
    case EV_GUEST_GONE:
        to_daemon(s, event);
        return;
    case EV_HOSTS:
        sim_hosts_event(s);
        return;
    case EV_ANSWER:
    case EV_GUEST:
    case EV_GUEST_AGAIN:
        sim_guest_event(s, event);
        return;
    case EV_LOOK:
    case EV_CLAIM:
    case EV_POLLED:
    case EV_WAKE:
    case EV_COMPUTED:
    case EV_RESEND:
    case EV_ATTACH:
    case EV_START_WORKER:
        to_worker(s, event);
        return;
    }
}

static bool finished(const struct sim *s)
{
    if (sim_line(s)->decided < s->config.steps)
        return false;
    for (uint32_t i = 0; i < sim_members(s); i++) {
        const struct sim_daemon *d = &s->daemon[i];
        if (sim_is_out(s, i) || (sim_is_dead(s, i) && d->commits_seen >= s->config.steps))
            continue;
        if (!d->alive || step_now(d->core) < s->config.steps || sim_back_busy(&d->back) ||
            d->back.era != s->era)
            return false;
    }
    return true;
}

static void loop(struct sim *s)
{
    struct sim_event event;
    while (!finished(s)) {
        if (!sim_pop(s, &event))
            sim_broken(s, "P4", SIM_NOBODY, SIM_NOBODY, "nothing is left to happen in step %llu",
                       (unsigned long long)sim_line(s)->decided);
        s->now_ns = event.at_ns > s->now_ns ? event.at_ns : s->now_ns;
        dispatch(s, &event);
        if (++s->result.events % 256 == 0)
            sim_check_progress(s);
        if (s->result.events > s->config.events_max)
            sim_broken(s, "P4", SIM_NOBODY, SIM_NOBODY, "no end after %llu events",
                       (unsigned long long)s->result.events);
    }
    sim_check_end(s);
}

static void begin(struct sim *s)
{
    sim_begin_model(s);
    sim_hosts_begin(s);
    for (uint32_t i = 0; i < sim_members(s); i++) {
        s->daemon[i].fresh = true;
        sim_at(s, sim_below(s, 10 * MS), (struct sim_event){ .kind = EV_START_DAEMON, .who = i });
    }
    for (uint32_t i = 0; i < s->config.workers; i++)
        sim_at(s, sim_below(s, 10 * MS), (struct sim_event){ .kind = EV_START_WORKER, .who = i });
    sim_at(s, sim_below(s, 100 * MS), (struct sim_event){ .kind = EV_FAULT });
    if (s->config.sets)
        sim_set_event(s);
    if (s->config.guard == SIM_GUARD_STOPS)
        sim_go_on_event(s);
    if (s->config.guests || s->config.rewinds)
        sim_guests_begin(s);
}

#define END_LINES 60u

static struct sim_trace ends[END_LINES];
static uint32_t end_count;

/* Keep the last events of whom it is about, newest first. */
static void keep_end(const struct sim *s)
{
    const uint64_t kept = s->trace_count < SIM_TRACE ? s->trace_count : SIM_TRACE;
    const uint32_t daemon = s->result.daemon, worker = s->result.worker;
    end_count = 0;
    for (uint64_t i = 1; i <= kept && end_count < END_LINES; i++) {
        const struct sim_trace *t = &s->trace[(s->trace_count - i) % SIM_TRACE];
        if ((daemon == SIM_NOBODY && worker == SIM_NOBODY) ||
            (daemon != SIM_NOBODY && t->daemon == daemon) ||
            (worker != SIM_NOBODY && t->worker == worker))
            ends[end_count++] = *t;
    }
}

void sim_print_end(void)
{
    for (uint32_t i = end_count; i-- > 0;)
        sim_print_trace(stderr, &ends[i]);
}

struct sim_result sim_run(const struct sim_config *config, bool trace)
{
    struct sim *s = sys_pages(sizeof *s);
    CHECK(s != NULL);
    s->config = *config;
    s->random = config->seed;
    s->print = trace;
    hooked = s;
    fail_point_hook = on_fail_point;
    void (*before)(int) = signal(SIGABRT, on_abort);
    const int how = sigsetjmp(s->stopped, 1);
    if (how == 0) {
        begin(s);
        loop(s);
    } else if (how == 2) {
        check_failed(s);
    }
    signal(SIGABRT, before);
    hooked = NULL;
    fail_point_hook = NULL;
    if (s->result.outcome == SIM_BROKEN)
        keep_end(s);
    const struct sim_result result = s->result;
    sim_deinit(s);
    sys_pages_free(s, sizeof *s);
    return result;
}
