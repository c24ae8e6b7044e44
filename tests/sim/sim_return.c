/* Who has the simulated model go back: guests beside training, and workers in the middle of it; and
 * workers that see that it went. See sim_back.h; client/paths/rewind.c, commit.c and
 * client/run/reset.c for what is modelled here. */
#include <inttypes.h>
#include <string.h>

#include "tests/sim/sim.h"
#include "tests/sim/sim_back.h"
#include "tests/sim/sim_guest.h"

#define AGAIN_NS     (5 * MS)  /* until what is busy is asked again */
#define POLL_NS      (20 * MS) /* until another session's is looked at again */
#define REACH_NS     (2 * S)   /* for a step to come */
#define ATTEMPTS_MAX 16u
#define LEAD_MAX     64u

/* -- A guest -------------------------------------------------------------------------------------
 */

enum returning { RETURNER_PAUSES, RETURNER_KEEPS, RETURNER_SETS, RETURNER_LISTS, RETURNER_GOES };

static void pause_returner(struct sim *s, struct sim_guest *g)
{
    g->doing = RETURNER_PAUSES;
    g->since_ns = s->now_ns;
    for (uint32_t i = 0; i < s->config.daemons; i++)
        g->thread[i].waits = false;
    sim_guest_after(s, g, sim_below(s, 400 * MS));
}

static void keep(struct sim *s, struct sim_guest *g)
{
    const struct sim_ask ask = { .kind = ASK_SNAPSHOT, .step = g->step };
    g->doing = RETURNER_KEEPS;
    sim_guest_ask_all(s, g, 0, &ask);
}

static uint64_t furthest(const struct sim *s)
{
    uint64_t step = 0;
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if (s->daemon[i].alive && step_collecting(s->daemon[i].core) > step)
            step = step_collecting(s->daemon[i].core);
    return step;
}

static void choose(struct sim *s, struct sim_guest *g)
{
    const uint64_t what = sim_below(s, 10);
    g->since_ns = s->now_ns;
    g->lead = g->first = 0;
    if (what < 5) {
        g->step = furthest(s);
        keep(s, g);
    } else if (what < 7) {
        const struct sim_ask ask = { .kind = ASK_EVERY,
                                     .step = sim_below(s, 6),
                                     .origin = 1 + sim_below(s, 3) };
        g->doing = RETURNER_SETS;
        sim_guest_ask_all(s, g, 0, &ask);
    } else if (s->era < SIM_REWINDS) {
        g->doing = RETURNER_LISTS;
        sim_guest_ask_all(s, g, 0, &(struct sim_ask){ .kind = ASK_LIST });
    } else {
        pause_returner(s, g);
    }
}

/* What is not answered with good is asked again: of a step further on, where it is over. */
static void kept(struct sim *s, struct sim_guest *g, bool timer)
{
    bool over = false, busy = false;
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        over = over || g->thread[i].told.status == SHD_ESTEP;
        busy = busy || g->thread[i].told.status == SHD_EBUSY;
    }
    if (!timer) {
        if (over || busy)
            sim_guest_after(s, g, AGAIN_NS);
        else
            pause_returner(s, g);
        return;
    }
    const bool nobody = s->now_ns > g->since_ns + REACH_NS;
    if (over || nobody) {
        g->lead = nobody ? 0 : g->lead < LEAD_MAX ? 2 * g->lead + 1 : LEAD_MAX;
        g->step = furthest(s) + g->lead;
        g->since_ns = s->now_ns;
    }
    if (++g->first > 100)
        pause_returner(s, g);
    else
        keep(s, g);
}

/* Every other one keeps what was set since. */
static void begin_turn(const struct sim *s, struct rewind_turn *t, uint64_t step, uint64_t known)
{
    const struct wire_rewind ask = { .step = step,
                                     .attempt = known,
                                     .keep_settings = (step + s->era) % 2 == 0 };
    rewind_turn_begin(t, s->config.daemons, &ask);
}

static void ask_turn(struct sim *s, struct sim_guest *g)
{
    uint32_t from, end;
    const struct sim_ask ask = { .kind = ASK_REWIND, .rewind = g->turn.ask };
    g->doing = RETURNER_GOES;
    g->in = 0;
    if (!rewind_turn_next(&g->turn, &from, &end)) {
        if (!g->follows)
            pause_returner(s, g);
        else
            sim_guest_after(s, g, 0);
        return;
    }
    for (uint32_t i = from; i < end; i++)
        sim_guest_ask(s, g, i, &ask);
}

/* Anew, from what the boards say. */
static void go(struct sim *s, struct sim_guest *g)
{
    bool apart;
    const struct rewind_seen seen = sim_back_seen(s, &apart);
    if (g->first++ > ATTEMPTS_MAX || s->era >= SIM_REWINDS) {
        pause_returner(s, g);
        return;
    }
    for (uint32_t i = 0; i < s->config.daemons; i++)
        g->thread[i].waits = false;
    g->follows = apart;
    if (apart)
        rewind_turn_follow(&g->turn, s->config.daemons, seen);
    else
        begin_turn(s, &g->turn, g->step, seen.attempt);
    ask_turn(s, g);
}

/* One that all have; or one that nobody has. */
static void listed(struct sim *s, struct sim_guest *g)
{
    uint64_t steps[LEDGER_SNAPSHOTS];
    uint32_t count = 0;
    const struct sim_told *first = &g->thread[0].told;
    for (uint32_t k = 0; k < first->count; k++) {
        uint32_t owners = 0;
        for (uint32_t i = 0; i < s->config.daemons; i++)
            for (uint32_t j = 0; j < g->thread[i].told.count; j++)
                owners += g->thread[i].told.steps[j] == first->steps[k];
        if (owners == s->config.daemons)
            steps[count++] = first->steps[k];
    }
    g->first = 0;
    g->step = count > 0 ? steps[sim_below(s, count)] : SIM_STEPS + 1;
    if (count > 0 || sim_chance(s, 200))
        go(s, g);
    else
        pause_returner(s, g);
}

/* Owners' answers, those that have come. */
static void answered(struct sim *s, struct sim_guest *g)
{
    uint32_t from, end;
    bool again = false;
    if (!rewind_turn_next(&g->turn, &from, &end))
        return;
    for (uint32_t i = from; i < end; i++) {
        const struct sim_thread *t = &g->thread[i];
        struct shd_err e = { 0 };
        if (t->waits || (g->in >> i & 1) != 0)
            continue;
        if (t->told.status == SHD_ESTEP || t->told.status == SHD_ENOENT) {
            g->first = t->told.status == SHD_ENOENT ? ATTEMPTS_MAX + 1 : g->first;
            g->follows = true; /* go on from there */
            g->turn.end = g->turn.from;
            sim_guest_after(s, g, POLL_NS);
            return;
        }
        again = again || t->told.status == SHD_EBUSY;
        if (t->told.status != SHD_OK)
            continue;
        g->in |= 1u << i;
        if (rewind_turn_answered(&g->turn, i, &t->told.rewound, &e) != SHD_OK)
            sim_broken(s, "P4", i, SIM_NOBODY, "%s", e.text);
        if (!rewind_turn_next(&g->turn, &from, &end) || g->turn.answers == 0) {
            ask_turn(s, g);
            return;
        }
    }
    if (again)
        sim_guest_after(s, g, AGAIN_NS);
}

static void ask_busy(struct sim *s, struct sim_guest *g)
{
    const struct sim_ask ask = { .kind = ASK_REWIND, .rewind = g->turn.ask };
    uint32_t from, end;
    if (!rewind_turn_next(&g->turn, &from, &end)) {
        go(s, g);
        return;
    }
    for (uint32_t i = from; i < end; i++)
        if (!g->thread[i].waits && (g->in >> i & 1) == 0)
            sim_guest_ask(s, g, i, &ask);
}

void sim_returner_go_on(struct sim *s, struct sim_guest *g, bool timer)
{
    const bool all_in = sim_guest_all_in(s, g);
    switch ((enum returning)g->doing) {
    case RETURNER_PAUSES:
        if (timer)
            choose(s, g);
        break;
    case RETURNER_KEEPS:
        if (all_in)
            kept(s, g, timer);
        break;
    case RETURNER_SETS:
        if (all_in)
            pause_returner(s, g);
        break;
    case RETURNER_LISTS:
        if (all_in)
            listed(s, g);
        break;
    case RETURNER_GOES:
        if (timer)
            ask_busy(s, g);
        else
            answered(s, g);
        break;
    }
}

/* -- A worker ------------------------------------------------------------------------------------
 */

static void ask_owners(struct sim *s, struct sim_worker *w)
{
    struct sim_returning *r = &w->returning;
    uint32_t from, end;
    if (!rewind_turn_next(&r->turn, &from, &end))
        return;
    for (uint32_t o = from; o < end; o++) {
        const struct sim_request q = { .kind = SIM_REWIND, .rewind = r->turn.ask };
        if (!w->link[o].up || ((r->asked | r->in) >> o & 1) != 0)
            continue;
        r->asked |= 1u << o;
        sim_link_ask(s, w, o, &q, 0);
    }
}

static void begin(struct sim *s, struct sim_worker *w, bool asks)
{
    sim_link_forget_turn(w);
    sim_link_forget_lease(w);
    sim_link_forget(w, SIM_REWIND);
    w->returning.asked = w->returning.in = 0;
    w->returning.asks = asks;
    w->returning.wanted = false;
    w->asking = w->gives_up = false;
    sim_worker_enter(s, w, WORK_GOING_BACK);
}

/* What it had is of no step that there is. */
static void go_along(struct sim *s, struct sim_worker *w)
{
    sim_link_forget_turn(w);
    sim_link_forget_lease(w);
    sim_link_forget(w, SIM_RESET_STEP);
    w->asking = w->gives_up = w->told_reset = false;
    w->computed = w->spoilt_from = w->looks = 0;
    s->must_give_up[sim_worker_index(s, w)] = 0;
    for (uint32_t o = 0; o < s->config.daemons; o++)
        w->link[o].layout_new = false;
    sim_worker_enter(s, w, WORK_LOOKING);
}

void sim_return_follow(struct sim *s, struct sim_worker *w)
{
    bool apart;
    const struct rewind_seen seen = sim_back_seen(s, &apart);
    rewind_turn_follow(&w->returning.turn, s->config.daemons, seen);
    begin(s, w, /* asks= */ false);
}

/* It looks at the boards where it waits for something, and before it returns anything; what is on
 * its way comes too late. A commit that has begun ends by an answer. */
static bool looks(const struct sim_worker *w)
{
    switch (w->work) {
    case WORK_BOARD:
    case WORK_RETURNING:
    case WORK_PUTTING:
    case WORK_LEASING:
    case WORK_STOPPED:
    case WORK_RESETTING:
    case WORK_FINISHED:
        return true;
    case WORK_TURN:
        return w->told_reset || turn_state(w->turn) == TURN_PREPARING;
    default:
        return false;
    }
}

bool sim_return_look(struct sim *s, struct sim_worker *w)
{
    bool apart;
    if (!s->config.rewinds || !looks(w))
        return false;
    const struct rewind_seen seen = sim_back_seen(s, &apart);
    if (seen.attempt > w->rewound) {
        go_along(s, w);
        return true;
    }
    if (!w->returning.wanted || w->work == WORK_PUTTING || w->work == WORK_RESETTING ||
        s->era >= SIM_REWINDS)
        return false;
    /* A snapshot that owner 0 has; others may not. */
    const struct snapshot_set *set = &s->daemon[0].back.set;
    const uint32_t item = (uint32_t)sim_below(s, LEDGER_SNAPSHOTS);
    w->returning.wanted = false;
    if (!s->daemon[0].alive || set->items[item].state != SNAPSHOT_READY)
        return false;
    begin_turn(s, &w->returning.turn, set->items[item].step, seen.attempt);
    begin(s, w, /* asks= */ true);
    return true;
}

bool sim_return_run(struct sim *s, struct sim_worker *w)
{
    uint32_t from, end;
    if (!rewind_turn_next(&w->returning.turn, &from, &end)) {
        go_along(s, w);
        return true;
    }
    if (s->now_ns >= w->returning.again_ns)
        ask_owners(s, w);
    return false;
}

void sim_return_reply(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    struct sim_returning *r = &w->returning;
    const uint32_t owner = msg->daemon;
    const int status = msg->reply.status;
    struct shd_err e = { 0 };
    if (w->work != WORK_GOING_BACK || (r->asked >> owner & 1) == 0)
        return;
    r->asked &= ~(1u << owner);
    if (status == SHD_EBUSY) {
        w->returning.again_ns = s->now_ns + AGAIN_NS;
        sim_worker_after(s, w, AGAIN_NS, EV_WAKE, 0);
        return;
    }
    if (status != SHD_OK) { /* another session's, or a snapshot that is gone */
        if (!r->asks)
            sim_broken(s, "P4", owner, msg->worker, "does not follow: %s", status_name(status));
        go_along(s, w);
        return;
    }
    r->in |= 1u << owner;
    if (rewind_turn_answered(&r->turn, owner, &msg->reply.rewound, &e) != SHD_OK)
        sim_broken(s, "P4", owner, msg->worker, "%s", e.text);
    if (r->turn.answers == 0)
        r->in = 0; /* others are asked now, or something else */
}
