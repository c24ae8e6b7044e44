/* A worker of the simulator: the real turn in a model of libshd and of a training loop; see
 * sim.h. Attach, settle what owners one step apart owe each other, then steps: wait for the board,
 * compute what is leased (or one's own), hand it over unit by unit, commit. */
#include <stdio.h>
#include <string.h>

#include "tests/sim/sim.h"

#define SETTLE_BOUND (30 * S)
#define LOOKS_MAX    50u
#define STOPPED_NS   (100 * MS) /* until Prepare is asked again */

const char *sim_work_name(enum sim_work work)
{
    static const char *const names[] = {
        "attaching",  "looking", "settling",  "waiting for the board",
        "putting",    "leasing", "computing", "returning",
        "committing", "stopped", "resetting", "going back",
        "finished"
    };
    return names[work];
}

void sim_worker_enter(struct sim *s, struct sim_worker *w, enum sim_work work)
{
    sim_note(s, sim_work_name(work), SIM_NOBODY, sim_worker_index(s, w), w->step, 0, w->micro);
    w->work = work;
    w->since_ns = s->now_ns;
}

static void begin_turn(struct sim *s, struct sim_worker *w)
{
    struct turn_update u = sim_update_of(s, w->step, w->job, w->has_last ? &w->last : NULL);
    u.norms = w->unit_norms;
    turn_begin(w->turn, w->step, &u);
    sim_worker_enter(s, w, WORK_TURN);
}

/* -- Giving up ----------------------------------------------------------------------------------
 */

static void begin_reset(struct sim *s, struct sim_worker *w)
{
    sim_link_forget_turn(w);
    sim_link_forget_lease(w);
    w->gives_up = w->agreed = w->asking = false;
    w->ask_owner = w->told = w->followed = 0;
    w->wanted = w->attempt + 1;
    sim_worker_enter(s, w, WORK_RESETTING);
}

static void begin_again(struct sim *s, struct sim_worker *w, uint64_t attempt)
{
    sim_link_forget_turn(w);
    sim_link_forget_lease(w);
    w->attempt = attempt;
    w->computed = w->spoilt_from = 0;
    w->asking = w->gives_up = false;
    w->told_reset = w->told_reset && !s->config.replicas;
    s->must_give_up[sim_worker_index(s, w)] = 0;
    sim_worker_enter(s, w, WORK_BOARD);
}

static void reset_refused(struct sim *s, struct sim_worker *w)
{
    const uint32_t i = sim_worker_index(s, w);
    if (s->must_give_up[i] == w->attempt)
        sim_broken(s, "P2", SIM_NOBODY, i, "step %llu is committed with what was not all returned",
                   (unsigned long long)w->step);
    begin_turn(s, w);
}

static bool run_resetting(struct sim *s, struct sim_worker *w)
{
    while (!w->agreed && w->ask_owner < sim_members(s) &&
           sim_is_gone(w, w->view.at[w->ask_owner])) /* it refuses nothing */
        w->ask_owner = sim_next_member(s, w, w->ask_owner);
    if (w->ask_owner == sim_members(s)) {
        reset_refused(s, w);
        return true;
    }
    for (uint32_t m = 0; m < sim_members(s); m++) {
        const uint32_t o = w->view.at[m];
        const struct sim_request q = {
            .kind = SIM_RESET_STEP, .step = w->step, .attempt = w->wanted, .agreed = w->agreed
        };
        if (!w->link[o].up || (w->told >> o & 1) != 0 || (!w->agreed && m != w->ask_owner))
            continue;
        w->told |= 1u << o;
        sim_link_ask(s, w, o, &q, 0);
    }
    if ((w->followed & sim_all(s, w)) != sim_all(s, w))
        return false;
    begin_again(s, w, w->wanted);
    return true;
}

static void reset_reply(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    const struct sim_reply *r = &msg->reply;
    if (w->work != WORK_RESETTING || r->step != w->step)
        return;
    bool apart;
    if (sim_back_seen(s, &apart).attempt > w->rewound)
        return; /* the step is gone */
    if (r->status != SHD_OK)
        sim_broken(s, "P4", SIM_NOBODY, msg->worker, "reset of step %llu at owner %u: %s",
                   (unsigned long long)w->step, msg->daemon, status_name(r->status));
    if (w->agreed && r->reset.answer != STEP_RESET_PROMISED) {
        w->followed |=
            1u << msg->daemon; /* others may have committed it since, in a later attempt */
    } else if (w->agreed) {
        sim_broken(s, "P2", SIM_NOBODY, msg->worker,
                   "owner %u does not follow in the reset of step %llu", msg->daemon,
                   (unsigned long long)w->step);
    } else if (r->reset.answer == STEP_RESET_DONE) {
        w->agreed = true;
        w->told = 0;
        w->wanted = r->reset.attempt;
    } else if (r->reset.answer == STEP_RESET_PROMISED &&
               sim_next_member(s, w, w->ask_owner) < sim_members(s)) {
        w->ask_owner = sim_next_member(s, w, w->ask_owner);
    } else {
        reset_refused(s, w);
    }
}

/* As the client sees it on the boards. A commit, or a put, that has begun goes on. */
static void look_at_attempt(struct sim *s, struct sim_worker *w)
{
    uint64_t attempt = 0;
    bool apart;
    if (sim_back_seen(s, &apart).attempt > w->rewound)
        return; /* that comes first */
    for (uint32_t m = 0; m < s->config.daemons; m++)
        if (sim_member(s, w, m)->board_attempt > attempt)
            attempt = sim_member(s, w, m)->board_attempt;
    if (w->work < WORK_BOARD || w->work >= WORK_RESETTING || w->attempt == 0 ||
        (w->work == WORK_PUTTING && w->put_begun) ||
        (w->work == WORK_TURN && turn_state(w->turn) != TURN_PREPARING &&
         !(s->config.replicas && w->told_reset)))
        return;
    if (attempt > w->attempt)
        begin_again(s, w, attempt);
    else if (w->gives_up && w->work != WORK_BOARD)
        begin_reset(s, w);
}

/* -- Settling -----------------------------------------------------------------------------------
 */

static void settled(struct sim *s, struct sim_worker *w, uint32_t ahead)
{
    const struct sim_layout *at = SIM_BUG(86) ? &w->link[w->view.at[ahead]].layout : &w->settles;
    const uint64_t step = w->settles.step;
    w->step = step;
    w->has_last = at->has_decision;
    w->last = at->decision;
    w->computed = UINT32_MAX;
    w->no_put = false;
    w->attempt = 0;
    bool apart;
    w->rewound = SIM_BUG(71) ? sim_back_seen(s, &apart).attempt : w->seen;
    w->settled_step = step;
    for (uint32_t o = 0; o < sim_members(s); o++)
        if (!sim_is_gone(w, o) && w->link[o].layout.attempt > w->attempt)
            w->attempt = w->link[o].layout.attempt;
    if (s->kept_lost && step + 1 < sim_line(s)->decided)
        sim_lost(s, "the model begins anew: its user is told the step");
    for (uint32_t o = 0; o < sim_members(s); o++)
        w->computed &= sim_is_gone(w, o) || SIM_BUG(87) ? UINT32_MAX
                       : w->link[o].layout.step == step && w->link[o].layout.attempt == w->attempt
                           ? w->link[o].layout.in
                           : 0;
    if (s->must_give_up[sim_worker_index(s, w)] == w->attempt)
        begin_reset(s, w); /* its predecessor's */
    else
        sim_worker_enter(s, w, WORK_BOARD);
}

static void look_again(struct sim *s, struct sim_worker *w)
{
    if (++w->looks > LOOKS_MAX && !sim_view_news(s, w))
        sim_lost(s, "owners that were not run together");
    if (!w->alive)
        return;
    for (uint32_t o = 0; o < sim_members(s); o++)
        w->link[o].layout_new = false;
    sim_worker_enter(s, w, WORK_LOOKING);
}

/* Has an owner answered before it went back, or has one not gone yet? */
static bool look_back(struct sim *s, struct sim_worker *w)
{
    bool apart, again = false;
    const struct rewind_seen seen = sim_back_seen(s, &apart);
    w->seen = seen.attempt;
    for (uint32_t o = 0; o < sim_members(s); o++)
        again = again || (!sim_is_gone(w, o) && w->link[o].layout.attempt < seen.attempt);
    if (apart)
        sim_return_follow(s, w);
    else if (again)
        look_again(s, w);
    return apart || again;
}

static bool run_settle(struct sim *s, struct sim_worker *w)
{
    uint64_t min = UINT64_MAX, max = 0;
    uint32_t ahead = 0, behind = 0;
    for (uint32_t m = 0; m < sim_members(s); m++) {
        const struct sim_link *l = &w->link[w->view.at[m]];
        if (sim_is_gone(w, w->view.at[m]) || (SIM_BUG(87) && m >= s->config.daemons))
            continue;
        if (!l->layout_new)
            return false;
        behind = l->layout.step < min ? m : behind;
        min = l->layout.step < min ? l->layout.step : min;
        if (m == 0 || l->layout.step > max) {
            max = l->layout.step;
            ahead = m;
        }
    }
    w->settles = w->link[w->view.at[ahead]].layout;
    if (look_back(s, w))
        return true;
    if (min == max) {
        w->looks = 0;
        settled(s, w, ahead);
    } else if (min + 1 == max) {
        const struct sim_layout *at = &w->link[w->view.at[behind]].layout;
        struct turn_update u = sim_update_of(s, min, w->job,
                                             at->has_decision ? &at->decision : NULL);
        u.recorded_only = true;
        u.norms = w->unit_norms;
        for (uint32_t o = 0; o < sim_members(s); o++)
            w->owns[o] = SIM_BUG(72) ? 0 : w->link[o].layout.attempt;
        w->settles_gone = w->view.gone;
        w->step = min;
        w->ask_owner = ahead;
        turn_begin(w->turn, min, &u);
        sim_worker_enter(s, w, WORK_SETTLING);
    } else {
        look_again(s, w);
    }
    return true;
}

static bool run_looking(struct sim *s, struct sim_worker *w)
{
    for (uint32_t o = 0; o < sim_members(s); o++) {
        struct sim_link *l = &w->link[o];
        if (!l->up || l->layout_new || l->layout_asked)
            continue;
        const struct sim_request request = { .kind = SIM_LAYOUT };
        l->layout_asked = true;
        sim_link_ask(s, w, o, &request, 0);
    }
    return run_settle(s, w);
}

/* -- A step -------------------------------------------------------------------------------------
 */

/* One's own micro-batches that are not in yet. */
static bool next_of_rank(const struct sim *s, const struct sim_worker *w, uint32_t *ret_micro)
{
    for (uint32_t m = sim_worker_index(s, w); m < sim_worker_micros(s, w); m += s->config.workers)
        if ((w->computed >> m & 1) == 0) {
            *ret_micro = m;
            return true;
        }
    return false;
}

static void begin_computing(struct sim *s, struct sim_worker *w)
{
    uint64_t ns = MS + sim_below(s, 10 * MS);
    if (sim_chance(s, 20))
        ns += sim_below(s, S);
    w->spoilt_from = 0;
    if ((s->config.faults & SIM_GIVE_UP) != 0 && !s->config.lease && w->step > w->settled_step &&
        sim_chance(s, 50))
        w->spoilt_from = 1 + (uint32_t)sim_below(s, s->config.units);
    w->computed |= 1u << w->micro;
    w->view.early = false;
    for (uint32_t m = 0; s->config.replicas && m < s->config.daemons; m++)
        for (uint32_t u = 0; u < s->config.units; u++)
            w->view.early = w->view.early || sim_member(s, w, m)->board[u] < w->step;
    w->returning.wanted = s->config.rewinds && sim_chance(s, 10);
    sim_worker_enter(s, w, WORK_COMPUTING);
    sim_worker_after(s, w, ns, EV_COMPUTED, w->step << 8 | w->micro);
}

static void next_work(struct sim *s, struct sim_worker *w)
{
    w->ask_owner = 0;
    w->asking = w->put_begun = false;
    if (sim_is_put(s, w->step) && !w->heedless && !w->no_put)
        sim_worker_enter(s, w, WORK_PUTTING);
    else if (s->config.lease)
        sim_worker_enter(s, w, WORK_LEASING);
    else if (next_of_rank(s, w, &w->micro))
        begin_computing(s, w);
    else
        begin_turn(s, w);
}

static bool run_board(struct sim *s, struct sim_worker *w)
{
    if (w->step >= s->config.steps) {
        sim_worker_enter(s, w, WORK_FINISHED);
        return false;
    }
    for (uint32_t m = 0; m < s->config.daemons; m++)
        for (uint32_t u = 0; u < s->config.units; u++)
            if (sim_member(s, w, m)->board[u] < w->step || sim_member(s, w, m)->back.unpublished)
                return false;
    next_work(s, w);
    return true;
}

/* As owner 0 has completed it, once it has. */
static struct decision own_put(const struct sim *s, const struct sim_worker *w)
{
    struct decision d = sim_put_of(s, w->step, w->has_last ? &w->last : NULL);
    d.micro_batches = w->ask_owner > 0 ? w->put_micros : 0;
    return d;
}

/* Members are asked to commit as in a turn: owner 0, its replica, the others. */
static uint32_t next_to_put(const struct sim *s, const struct sim_worker *w)
{
    const uint32_t twin = s->config.daemons;
    uint32_t member = w->ask_owner;
    if (!s->config.replicas || !w->put_begun)
        return sim_next_member(s, w, member);
    if (member == 0 && !sim_is_gone(w, w->view.at[twin]))
        return twin;
    member = member == twin ? 0 : member;
    do
        member = sim_next_member(s, w, member);
    while (member == twin);
    return member;
}

/* A loss: what owner 0 alone has recorded counts for nobody; else all are asked to commit again. */
void sim_worker_put_anew(struct sim_worker *w)
{
    if (w->work != WORK_PUTTING)
        return;
    sim_link_forget_turn(w);
    w->asking = false;
    w->ask_owner = 0;
    w->put_begun = w->put_begun && w->put_twice;
}

/* All owners are asked for room, owner 0 first; the values are written; then owner 0 has to agree,
 * and the others are told: in whatever attempt. */
static bool run_putting(struct sim *s, struct sim_worker *w)
{
    const uint32_t daemon = w->view.at[w->ask_owner];
    if (w->asking || !w->link[daemon].up || (w->put_begun && s->now_ns < w->written_ns))
        return false;
    const struct sim_request request = { .kind = w->put_begun ? SIM_COMMIT : SIM_PUT,
                                         .step = w->step,
                                         .attempt = w->put_begun ? 0 : w->attempt,
                                         .blob = sim_mix(w->step, 77),
                                         .decision = own_put(s, w),
                                         .recorded = w->ask_owner > 0,
                                         .put_line = w->rewound };
    w->asking = true;
    sim_link_ask(s, w, daemon, &request, 0);
    return false;
}

/* The model went back, or another worker's put, or its step, was there first. */
static bool put_is_gone(const struct sim_worker *w, const struct sim_reply *r,
                        const struct decision *own)
{
    if (r->status == SHD_OK)
        return r->committed.over || !decision_equal(&r->committed.decision, own);
    return r->kind == SIM_PUT ? r->status == SHD_ESTEP
                              : r->status == SHD_ENOENT && w->ask_owner == 0;
}

static void put_answered(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    const struct sim_reply *r = &msg->reply;
    if (!w->asking || msg->daemon != w->view.at[w->ask_owner])
        return;
    w->asking = false;
    if (r->status == SHD_ERESET)
        return; /* the model went back */
    struct decision own = own_put(s, w);
    if (r->kind == SIM_PUT && r->status == SHD_OK && !r->committed.over) {
        w->ask_owner = next_to_put(s, w);
        w->put_begun = w->ask_owner == sim_members(s);
        w->put_twice = false;
        w->ask_owner = w->put_begun ? 0 : w->ask_owner;
        w->written_ns = s->now_ns + sim_below(s, 20 * MS);
        sim_worker_after(s, w, w->written_ns - s->now_ns, EV_WAKE, 0);
        return;
    }
    if (r->status == SHD_OK && w->ask_owner == 0)
        own.micro_batches = w->put_micros = r->committed.decision.micro_batches;
    if (r->status == SHD_EBUSY && (w->ask_owner == 0 || r->kind == SIM_PUT)) {
        w->no_put = true;
        next_work(s, w);
    } else if (put_is_gone(w, r, &own)) {
        look_again(s, w);
    } else if (r->status != SHD_OK && s->kept_lost) {
        sim_lost(s, "an owner does not know the step of a put");
    } else if (r->status != SHD_OK) {
        sim_broken(s, "P4", SIM_NOBODY, msg->worker, "put in step %llu at owner %u: %s",
                   (unsigned long long)w->step, msg->daemon, status_name(r->status));
    } else if (next_to_put(s, w) < sim_members(s)) {
        w->put_twice = w->put_twice || w->ask_owner == s->config.daemons ||
                       sim_is_gone(w, w->view.at[s->config.daemons]);
        w->ask_owner = next_to_put(s, w);
    } else {
        sim_view_check_done(s, w, w->step, &own);
        w->last = own;
        w->has_last = true;
        w->step++;
        w->computed = 0;
        sim_worker_enter(s, w, WORK_BOARD);
    }
}

static bool run_leasing(struct sim *s, struct sim_worker *w)
{
    if (!w->asking && sim_is_gone(w, w->view.at[w->ask_owner])) /* it has nothing to hand out */
        w->ask_owner = sim_next_member(s, w, w->ask_owner);
    if (w->ask_owner == sim_members(s)) {
        begin_turn(s, w);
        return true;
    }
    if (w->asking || !w->link[w->view.at[w->ask_owner]].up)
        return false;
    const struct sim_request request = { .kind = SIM_LEASE,
                                         .step = w->step,
                                         .attempt = w->attempt };
    w->asking = true;
    w->asked = w->ask_owner;
    sim_link_ask(s, w, w->view.at[w->ask_owner], &request, 0);
    return false;
}

static void leased(struct sim *s, struct sim_worker *w, const struct sim_reply *r)
{
    if (w->work != WORK_LEASING || !w->asking || (r->status == SHD_OK && r->step != w->step))
        return;
    w->asking = false;
    if (r->status == SHD_ERESET)
        return;
    if (r->lease == LEASE_GROUP) {
        w->micro = r->group;
        begin_computing(s, w);
        return;
    }
    if (r->lease == LEASE_ALL_IN && (w->ask_owner == w->asked || SIM_BUG(83)))
        w->ask_owner = sim_next_member(s, w, w->ask_owner); /* else it begins again at owner 0 */
    if (r->lease != LEASE_ALL_IN || w->ask_owner == sim_members(s))
        begin_turn(s, w);
}

/* Parameters that moved meanwhile make a gradient that must never count. */
static void computed(struct sim *s, struct sim_worker *w, uint64_t what)
{
    if (w->work != WORK_COMPUTING || what != (w->step << 8 | w->micro))
        return;
    w->torn = w->view.early;
    w->view.give_unit = s->config.units;
    w->view.give_at = 0;
    for (uint32_t m = 0; m < s->config.daemons; m++) {
        const struct sim_daemon *d = sim_member(s, w, m);
        w->link[m].give_unit = s->config.units;
        for (uint32_t u = 0; u < s->config.units; u++)
            w->torn = w->torn || d->board[u] > w->step ||
                      (s->config.replicas && d->board[u] < w->step);
        w->torn = w->torn || d->back.unpublished || d->back.board.attempt > w->rewound ||
                  d->stray.is || d->stray.wrong;
    }
    sim_worker_enter(s, w, WORK_RETURNING);
}

/* A unit's gradient to one owner; false: its slots have no room. */
bool sim_worker_give(struct sim *s, struct sim_worker *w, uint32_t owner, uint32_t unit)
{
    const struct sim_batch data = { w->step, w->rewound, sim_worker_micros(s, w) };
    struct sim_request q = {
        .kind = SIM_RETURN, .step = w->step, .unit = unit, .micro = w->micro, .attempt = w->attempt
    };
    q.none = sim_none(s, data, w->micro, unit);
    if (!q.none && !sim_link_take_slot(&w->link[owner], &q.slot))
        return false;
    const uint64_t tag = sim_tag(s, data, w->micro, unit);
    if (w->spoilt_from > 0 && w->step == sim_line(s)->decided) { /* else it comes too late */
        s->spoilt[sim_round(w->step, w->attempt)] = true;
        s->must_give_up[sim_worker_index(s, w)] = w->attempt;
    }
    sim_link_ask(s, w, owner, &q, w->torn || w->spoilt_from > 0 ? sim_mix(tag, s->now_ns) : tag);
    return true;
}

/* Hand over to one owner what its slots have room for; true: everything. */
static bool give(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    for (; l->give_unit > w->spoilt_from; l->give_unit--) {
        const uint32_t unit = l->give_unit - 1;
        if (s->frozen[unit])
            continue;
        if (!l->up || !sim_worker_give(s, w, owner, unit))
            return false;
    }
    return true;
}

static bool run_returning(struct sim *s, struct sim_worker *w)
{
    bool all = true;
    for (uint32_t o = 0; o < s->config.daemons; o++)
        if (s->daemon[o].back.unpublished && !SIM_BUG(73))
            return false; /* what it has is perhaps of no step: where does the model go? */
    for (uint32_t o = 0; !s->config.replicas && o < s->config.daemons; o++)
        all = give(s, w, o) && all;
    if (s->config.replicas)
        all = sim_view_give(s, w);
    if (all && w->spoilt_from > 0) {
        begin_reset(s, w);
        return true;
    }
    if (!all || (!w->eager && sim_link_returns_open(s, w)))
        return false;
    next_work(s, w);
    return true;
}

/* -- The turn -----------------------------------------------------------------------------------
 */

/* To owner 0, for the guard's windows. */
static void tell_norms(const struct sim_worker *w, struct sim_request *q)
{
    const double *norms = turn_unit_norms(w->turn);
    q->has_norms = norms != NULL;
    if (q->has_norms)
        memcpy(q->unit_norms, norms, sizeof q->unit_norms);
}

void sim_worker_pack(const struct sim *s, const struct sim_worker *w, uint32_t daemon,
                     struct sim_request *q)
{
    if (q->kind == SIM_PREPARE) {
        q->unit_sums = turn_unit_sums(w->turn);
        return;
    }
    q->recorded = sim_member_of(s, w, daemon) > 0;
    q->decision = *turn_decision(w->turn);
    q->norm = turn_norm(w->turn);
    if (sim_member_of(s, w, daemon) % s->config.daemons == 0)
        tell_norms(w, q);
}

/* A loss is seen in the middle of a look at the sockets: what was asked before is dropped at its
 * end, and until then may be answered, or sent again. False: that is later. */
static bool drop_old(struct sim *s, struct sim_worker *w)
{
    if (w->anew == turn_anew(w->turn))
        return true;
    if (!w->polls && sim_chance(s, 300)) {
        w->polls = true;
        sim_worker_after(s, w, sim_below(s, 50 * MS), EV_POLLED, 0);
    }
    if (w->polls)
        return false;
    w->anew = turn_anew(w->turn);
    if (!SIM_BUG(94))
        sim_link_forget_turn(w);
    return true;
}

static void turn_requests(struct sim *s, struct sim_worker *w)
{
    uint32_t owner;
    enum turn_kind kind;
    if (!drop_old(s, w))
        return;
    while (turn_next(w->turn, &owner, &kind) &&
           (s->config.replicas || w->link[w->view.at[owner]].up)) {
        const uint32_t at = w->view.at[owner];
        struct sim_request q = { .kind = kind == TURN_PREPARE ? SIM_PREPARE : SIM_COMMIT,
                                 .step = turn_step(w->turn),
                                 .attempt = w->work == WORK_SETTLING ? w->owns[at] : w->attempt,
                                 .blob = sim_mix(turn_step(w->turn), 77) };
        q.put_line = w->work == WORK_SETTLING ? w->seen : w->rewound;
        sim_worker_pack(s, w, at, &q);
        sim_link_ask(s, w, at, &q, 0);
        turn_asked(w->turn, owner, kind);
    }
}

static bool run_turn(struct sim *s, struct sim_worker *w)
{
    turn_requests(s, w);
    const bool done = turn_state(w->turn) == TURN_DONE;
    if (done)
        sim_link_forget_turn(w); /* of a put Prepare was not answered by all */
    if (done)
        sim_view_check_done(s, w, turn_step(w->turn), turn_decision(w->turn));
    if (turn_state(w->turn) == TURN_OVER ||
        (done && w->work == WORK_TURN && turn_decided(w->turn).over)) {
        sim_link_forget_turn(w);
        look_again(s, w);
        return true;
    }
    if (done && w->work == WORK_SETTLING && w->view.gone != w->settles_gone && !SIM_BUG(86)) {
        look_again(s, w); /* in its place is another one, which has said other things */
        return true;
    }
    if (done && w->work == WORK_SETTLING) {
        w->looks = 0;
        settled(s, w, w->ask_owner);
        return true;
    }
    if (done) {
        w->last = turn_decided(w->turn).decision;
        w->has_last = true;
        w->looks = 0;
        w->no_put = false;
        w->step++;
        w->computed = 0;
        sim_worker_enter(s, w, WORK_BOARD);
        return true;
    }
    if (w->work == WORK_SETTLING && s->kept_lost && s->now_ns > w->since_ns + SETTLE_BOUND)
        sim_lost(s, "an owner lacks gradients of a step that another one has committed");
    return false;
}

static void turn_reply(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    struct shd_err e = { 0 };
    const struct sim_reply *r = &msg->reply;
    const uint32_t member = sim_member_of(s, w, msg->daemon);
    int status = r->status;
    if (w->work == WORK_PUTTING && (r->kind == SIM_COMMIT || r->kind == SIM_PUT)) {
        put_answered(s, w, msg);
        return;
    }
    if (w->work != WORK_TURN && w->work != WORK_SETTLING)
        return;
    if (status == SHD_OK && r->kind == SIM_PREPARE) {
        struct wire_prepared prepared = r->prepared;
        struct settings set = { .count = prepared.settings.bytes > 0 ? SIM_SETTINGS : 0 };
        memcpy(set.numbers, r->settings, set.count * sizeof *set.numbers);
        const struct settings_bytes b = settings_pack(&set);
        prepared.settings = (struct wire_bytes){ b.old, b.old_bytes };
        prepared.settings_more = (struct wire_bytes){ b.more, b.more_bytes };
        prepared.guard.data = (const uint8_t *)r->limits;
        prepared.unit_sums.data = r->unit_sums;
        prepared.unit_limits.data = (const uint8_t *)r->unit_limits;
        prepared.unit_norms.data = (const uint8_t *)r->unit_norms;
        status = turn_prepared(w->turn, member, &prepared, &e);
    }
    if (status == SHD_OK && r->kind == SIM_COMMIT)
        status = turn_committed(w->turn, member, &r->committed, &e);
    if (status == SHD_ERESET && w->work == WORK_SETTLING) {
        sim_link_forget_turn(w);
        look_again(s, w);
    }
    w->told_reset = w->told_reset || status == SHD_ERESET;
    if (status == SHD_OK || status == SHD_ERESET)
        return;
    if (status == SHD_ESTOPPED && w->work == WORK_TURN) {
        sim_link_forget_turn(w);
        sim_worker_enter(s, w, WORK_STOPPED);
        sim_worker_after(s, w, STOPPED_NS, EV_WAKE, 0);
        return;
    }
    if (sim_view_contradicts(s, w, status) && sim_view_news(s, w)) {
        sim_link_forget_turn(w);
        look_again(s, w);
        return;
    }
    if (s->kept_lost)
        sim_lost(s, "an owner does not know the step");
    sim_broken(s, "P4", SIM_NOBODY, msg->worker, "%s of step %llu at owner %u: %s %s",
               r->kind == SIM_PREPARE ? "prepare" : "commit",
               (unsigned long long)turn_step(w->turn), msg->daemon, status_name(status), e.text);
}

/* -- Events -------------------------------------------------------------------------------------
 */

/* Whatever can be done now. */
static void run(struct sim *s, struct sim_worker *w)
{
    bool again = true;
    while (again && w->alive) {
        if (sim_return_look(s, w))
            continue;
        look_at_attempt(s, w);
        switch (w->work) {
        case WORK_ATTACHING:
        case WORK_LOOKING:
            again = run_looking(s, w);
            break;
        case WORK_SETTLING:
        case WORK_TURN:
            again = run_turn(s, w);
            break;
        case WORK_BOARD:
            again = run_board(s, w);
            break;
        case WORK_PUTTING:
            again = run_putting(s, w);
            break;
        case WORK_LEASING:
            again = run_leasing(s, w);
            break;
        case WORK_RETURNING:
            again = run_returning(s, w);
            break;
        case WORK_STOPPED:
            again = s->now_ns >= w->since_ns + STOPPED_NS;
            if (again)
                begin_turn(s, w);
            break;
        case WORK_RESETTING:
            again = run_resetting(s, w);
            break;
        case WORK_GOING_BACK:
            again = sim_return_run(s, w);
            break;
        case WORK_COMPUTING:
        case WORK_FINISHED:
            again = false;
            break;
        }
    }
}

static void on_reply(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    struct sim_link *l = &w->link[msg->daemon];
    if (!l->up || msg->session != l->session || !sim_link_first_answer(s, l, msg))
        return;
    for (uint32_t i = 0; i < SIM_CALLS; i++) {
        struct sim_call *c = &l->calls[i];
        if (!c->used || c->seq != msg->seq)
            continue;
        c->used = false;
        switch (msg->reply.kind) {
        case SIM_RETURN:
            sim_link_credited(s, l, c, msg);
            break;
        case SIM_LEASE:
            leased(s, w, &msg->reply);
            break;
        case SIM_PREPARE:
        case SIM_COMMIT:
        case SIM_PUT:
            turn_reply(s, w, msg);
            break;
        case SIM_RESET_STEP:
            reset_reply(s, w, msg);
            break;
        case SIM_REWIND:
            sim_return_reply(s, w, msg);
            break;
        case SIM_LAYOUT:
            l->layout = msg->reply.layout;
            l->layout_new = true;
            l->layout_asked = false;
            break;
        case SIM_ATTACH:
        case SIM_DETACH:
        case SIM_HANGUP:
            break;
        }
        return;
    }
}

static void on_message(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    const struct sim_link *l = &w->link[msg->daemon];
    if (msg->reply.kind == SIM_ATTACH)
        sim_link_attached(s, w, msg);
    else if (msg->reply.kind != SIM_HANGUP)
        on_reply(s, w, msg);
    else if (l->up && l->daemon_gen == msg->daemon_gen &&
             (msg->session == 0 || msg->session == l->session))
        sim_link_hung_up(s, w, msg->daemon);
}

void sim_worker_event(struct sim *s, struct sim_worker *w, const struct sim_event *event)
{
    if (event->kind == EV_MSG)
        on_message(s, w, &s->msg[event->arg]);
    else if (event->kind == EV_ATTACH)
        sim_link_attach(s, w, (uint32_t)event->arg);
    else if (event->kind == EV_COMPUTED)
        computed(s, w, event->arg);
    else if (event->kind == EV_RESEND)
        sim_link_resend(s, w);
    else if (event->kind == EV_LOOK || event->kind == EV_CLAIM)
        sim_view_event(s, w, event);
    else if (event->kind == EV_POLLED)
        w->polls = false;
    if (w->alive)
        run(s, w);
}

/* -- Life ---------------------------------------------------------------------------------------
 */

void sim_worker_start(struct sim *s, struct sim_worker *w)
{
    const uint64_t gen = w->gen;
    const uint32_t host = w->view.host;
    memset(w, 0, sizeof *w);
    w->gen = gen;
    w->view.host = host;
    if (!sim_view_begin(s, w)) {
        sim_worker_after(s, w, 500 * MS, EV_START_WORKER, 0);
        return;
    }
    w->alive = true;
    w->job = s->job + (s->config.apart ? sim_worker_index(s, w) : 0);
    w->eager = sim_chance(s, 500);
    w->heedless = s->config.puts && sim_chance(s, 300);
    CHECK(turn_bytes(SIM_MEMBERS) <= sizeof w->turn_memory);
    w->turn = turn_init(w->turn_memory, s->config.daemons, sim_members(s));
    sim_view_start(s, w);
    sim_worker_enter(s, w, WORK_ATTACHING);
    for (uint32_t o = 0; o < sim_members(s); o++)
        sim_worker_after(s, w, sim_below(s, MS), EV_ATTACH, o);
    sim_worker_after(s, w, SIM_RESEND_NS, EV_RESEND, 0);
}

static void end(struct sim *s, struct sim_worker *w)
{
    const uint32_t i = sim_worker_index(s, w);
    for (uint32_t o = 0; o < sim_members(s); o++) {
        const struct sim_msg msg = { .to_daemon = true,
                                     .daemon = o,
                                     .worker = i,
                                     .worker_gen = w->gen,
                                     .request = { .kind = SIM_HANGUP } };
        sim_send(s, &msg);
    }
    w->alive = false;
    w->held = 0;
    w->stalled_until_ns = 0;
    w->gen++;
    sim_worker_after(s, w, 70 * MS + sim_below(s, 300 * MS), EV_START_WORKER, 0);
}

void sim_worker_kill(struct sim *s, struct sim_worker *w)
{
    sim_note(s, "worker killed", SIM_NOBODY, sim_worker_index(s, w), w->step, 0, 0);
    s->result.kills++;
    end(s, w);
}

void sim_worker_leave(struct sim *s, struct sim_worker *w)
{
    const struct sim_request request = { .kind = SIM_DETACH };
    sim_note(s, "worker leaves", SIM_NOBODY, sim_worker_index(s, w), w->step, 0, 0);
    for (uint32_t o = 0; o < sim_members(s); o++)
        if (w->link[o].up)
            sim_link_send(s, w, o, ++w->link[o].seq, &request);
    end(s, w);
}
