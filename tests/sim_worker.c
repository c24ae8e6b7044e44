/* A worker of the simulator: the real turn in a model of libshd and of a training loop; see
 * sim.h. Attach, settle what owners one step apart owe each other, then steps: wait for the board,
 * compute what is leased (or one's own), hand it over unit by unit, commit. Requests are kept
 * until answered: sent again after a while with the same number, and in a new session with a new
 * one. */
#include <stdio.h>
#include <string.h>

#include "tests/sim.h"

#define RESEND_NS    (2 * S)
#define SETTLE_BOUND (30 * S)
#define LOOKS_MAX    50u

const char *sim_work_name(enum sim_work work)
{
    static const char *const names[] = {
        "attaching", "looking",    "settling", "waiting for the board", "leasing", "computing",
        "returning", "committing", "finished"
    };
    return names[work];
}

static void enter(struct sim *s, struct sim_worker *w, enum sim_work work)
{
    sim_note(s, sim_work_name(work), SIM_NOBODY, sim_worker_index(s, w), w->step, 0, w->micro);
    w->work = work;
    w->since_ns = s->now_ns;
}

static void after(struct sim *s, const struct sim_worker *w, uint64_t delay_ns,
                  enum sim_event_kind kind, uint64_t arg)
{
    sim_at(s, delay_ns,
           (struct sim_event){
               .kind = kind, .who = sim_worker_index(s, w), .gen = w->gen, .arg = arg });
}

/* -- Requests -----------------------------------------------------------------------------------
 */

static void send(struct sim *s, const struct sim_worker *w, uint32_t owner, uint64_t seq,
                 const struct sim_request *request)
{
    const struct sim_link *l = &w->link[owner];
    const struct sim_msg msg = { .to_daemon = true,
                                 .daemon = owner,
                                 .worker = sim_worker_index(s, w),
                                 .daemon_gen = l->daemon_gen,
                                 .worker_gen = w->gen,
                                 .session = l->session,
                                 .seq = seq,
                                 .request = *request };
    sim_send(s, &msg);
}

/* Write the gradient to its slot: the daemon's memory, while this session lasts. */
static void write_slot(struct sim *s, const struct sim_link *l, uint32_t owner,
                       const struct sim_call *c)
{
    struct sim_daemon *d = &s->daemon[owner];
    struct sim_session *ses = &d->sessions[l->seat];
    if (d->alive && ses->id == l->session)
        ses->slot[c->request.slot] = c->tag;
}

static void call_send(struct sim *s, struct sim_worker *w, uint32_t owner, struct sim_call *c)
{
    struct sim_link *l = &w->link[owner];
    if (c->request.kind == SIM_RETURN && !c->request.none)
        write_slot(s, l, owner, c);
    c->seq = ++l->seq;
    c->sent_ns = s->now_ns;
    send(s, w, owner, c->seq, &c->request);
}

static struct sim_call *call_new(struct sim_link *l)
{
    for (uint32_t i = 0; i < SIM_CALLS; i++)
        if (!l->calls[i].used)
            return &l->calls[i];
    CHECK(false); /* more requests than a worker has */
    return NULL;
}

static void ask(struct sim *s, struct sim_worker *w, uint32_t owner,
                const struct sim_request *request, uint64_t tag)
{
    struct sim_call *c = call_new(&w->link[owner]);
    *c = (struct sim_call){ .used = true, .tag = tag, .request = *request };
    call_send(s, w, owner, c);
}

/* Replies to them mean nothing any more. */
static void forget_turn(struct sim_worker *w)
{
    for (uint32_t o = 0; o < SIM_DAEMONS; o++)
        for (uint32_t i = 0; i < SIM_CALLS; i++) {
            struct sim_call *c = &w->link[o].calls[i];
            if (c->request.kind == SIM_PREPARE || c->request.kind == SIM_COMMIT)
                c->used = false;
        }
}

static bool returns_open(const struct sim *s, const struct sim_worker *w)
{
    for (uint32_t o = 0; o < s->config.daemons; o++)
        for (uint32_t i = 0; i < SIM_CALLS; i++)
            if (w->link[o].calls[i].used && w->link[o].calls[i].request.kind == SIM_RETURN)
                return true;
    return false;
}

/* -- Attaching ----------------------------------------------------------------------------------
 */

static void on_attach_timer(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    if (l->up)
        return;
    const struct sim_request request = { .kind = SIM_ATTACH };
    l->session = 0;
    send(s, w, owner, ++l->attempt, &request);
    after(s, w, sim_chance(s, 500) ? 5 * MS : 100 * MS + sim_below(s, 400 * MS), EV_ATTACH, owner);
}

static bool take_slot(struct sim_link *l, uint32_t *ret_slot)
{
    for (uint32_t i = 0; i < SIM_SLOTS; i++) {
        if (l->slot_taken[i])
            continue;
        l->slot_taken[i] = true;
        *ret_slot = i;
        return true;
    }
    return false;
}

/* What was not answered goes to the new session. */
static void replay(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    for (uint32_t i = 0; i < SIM_CALLS; i++) {
        struct sim_call *c = &l->calls[i];
        if (!c->used)
            continue;
        CHECK(c->request.kind == SIM_RETURN);
        if (!c->request.none)
            CHECK(take_slot(l, &c->request.slot));
        call_send(s, w, owner, c);
    }
}

static bool return_open(const struct sim_link *l, uint32_t micro)
{
    for (uint32_t i = 0; i < SIM_CALLS; i++)
        if (l->calls[i].used && l->calls[i].request.kind == SIM_RETURN &&
            l->calls[i].request.micro == micro)
            return true;
    return false;
}

/* An owner's successor knows what its predecessor said, unless its segments are gone. */
static void check_kept(struct sim *s, const struct sim_worker *w, const struct sim_link *l)
{
    const uint64_t step = l->layout.step;
    if (w->work == WORK_ATTACHING || w->work == WORK_LOOKING || step > w->step)
        return;
    if (step < w->step)
        sim_lost(s, "an owner is behind what it had committed");
    if (w->work != WORK_TURN)
        return;
    for (uint32_t m = 0; m < s->config.micros; m++) {
        const bool told = s->config.lease || ((w->computed >> m & 1) != 0 && !return_open(l, m));
        if (told && (l->layout.in >> m & 1) == 0)
            sim_lost(s, "an owner lacks a gradient that it had");
    }
}

static void attached(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    struct sim_link *l = &w->link[msg->daemon];
    const struct sim_daemon *d = &s->daemon[msg->daemon];
    if (l->up || msg->seq != l->attempt || !d->alive || d->gen != msg->daemon_gen)
        return; /* given up, or its socket hung up already */
    sim_note(s, "attached", msg->daemon, msg->worker, msg->reply.layout.step, 0, 0);
    l->up = true;
    l->daemon_gen = msg->daemon_gen;
    l->layout = msg->reply.layout;
    l->layout_new = true;
    l->session = l->layout.session;
    l->seat = l->layout.seat;
    l->seq = 0;
    memset(l->slot_taken, 0, sizeof l->slot_taken);
    memset(l->answered_seq, 0, sizeof l->answered_seq);
    check_kept(s, w, l);
    replay(s, w, msg->daemon);
}

static void hung_up(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    sim_note(s, "hung up", owner, sim_worker_index(s, w), w->step, 0, 0);
    l->up = l->layout_asked = false;
    for (uint32_t i = 0; i < SIM_CALLS; i++)
        if (l->calls[i].used && l->calls[i].request.kind != SIM_RETURN)
            l->calls[i].used = false;
    if (w->ask_owner == owner)
        w->asking = false;
    turn_lost(w->turn, owner);
    after(s, w, sim_below(s, sim_chance(s, 500) ? MS : 50 * MS), EV_ATTACH, owner);
}

/* -- Settling -----------------------------------------------------------------------------------
 */

static void settled(struct sim *s, struct sim_worker *w, uint32_t ahead)
{
    const uint64_t step = w->link[ahead].layout.step;
    w->step = step;
    w->has_last = w->link[ahead].layout.has_decision;
    w->last = w->link[ahead].layout.decision;
    w->computed = UINT32_MAX;
    if (s->kept_lost && step + 1 < s->decided)
        sim_lost(s, "the model begins anew: its user is told the step");
    for (uint32_t o = 0; o < s->config.daemons; o++)
        w->computed &= w->link[o].layout.step == step ? w->link[o].layout.in : 0;
    enter(s, w, WORK_BOARD);
}

static void look_again(struct sim *s, struct sim_worker *w)
{
    if (++w->looks > LOOKS_MAX)
        sim_lost(s, "owners that were not run together");
    for (uint32_t o = 0; o < s->config.daemons; o++)
        w->link[o].layout_new = false;
    enter(s, w, WORK_LOOKING);
}

static bool run_settle(struct sim *s, struct sim_worker *w)
{
    uint64_t min = UINT64_MAX, max = 0;
    uint32_t ahead = 0;
    for (uint32_t o = 0; o < s->config.daemons; o++) {
        const struct sim_link *l = &w->link[o];
        if (!l->layout_new)
            return false;
        min = l->layout.step < min ? l->layout.step : min;
        if (l->layout.step > max) {
            max = l->layout.step;
            ahead = o;
        }
    }
    if (min == max) {
        w->looks = 0;
        settled(s, w, ahead);
    } else if (min + 1 == max) {
        struct turn_update u = sim_update_of(s, min, w->job, NULL);
        u.recorded_only = true;
        w->step = min;
        w->ask_owner = ahead;
        turn_begin(w->turn, min, &u);
        enter(s, w, WORK_SETTLING);
    } else {
        look_again(s, w);
    }
    return true;
}

static bool run_looking(struct sim *s, struct sim_worker *w)
{
    for (uint32_t o = 0; o < s->config.daemons; o++) {
        struct sim_link *l = &w->link[o];
        if (!l->up || l->layout_new || l->layout_asked)
            continue;
        const struct sim_request request = { .kind = SIM_LAYOUT };
        l->layout_asked = true;
        ask(s, w, o, &request, 0);
    }
    return run_settle(s, w);
}

/* -- A step -------------------------------------------------------------------------------------
 */

/* One's own micro-batches that are not in yet. */
static bool next_of_rank(const struct sim *s, const struct sim_worker *w, uint32_t *ret_micro)
{
    for (uint32_t m = sim_worker_index(s, w); m < s->config.micros; m += s->config.workers)
        if ((w->computed >> m & 1) == 0) {
            *ret_micro = m;
            return true;
        }
    return false;
}

static void begin_turn(struct sim *s, struct sim_worker *w)
{
    const struct turn_update u = sim_update_of(s, w->step, w->job, w->has_last ? &w->last : NULL);
    turn_begin(w->turn, w->step, &u);
    enter(s, w, WORK_TURN);
}

static void begin_computing(struct sim *s, struct sim_worker *w)
{
    uint64_t ns = MS + sim_below(s, 10 * MS);
    if (sim_chance(s, 20))
        ns += sim_below(s, S);
    w->computed |= 1u << w->micro;
    enter(s, w, WORK_COMPUTING);
    after(s, w, ns, EV_COMPUTED, w->step << 8 | w->micro);
}

static void next_work(struct sim *s, struct sim_worker *w)
{
    w->ask_owner = 0;
    w->asking = false;
    if (s->config.lease)
        enter(s, w, WORK_LEASING);
    else if (next_of_rank(s, w, &w->micro))
        begin_computing(s, w);
    else
        begin_turn(s, w);
}

static bool run_board(struct sim *s, struct sim_worker *w)
{
    if (w->step >= s->config.steps) {
        enter(s, w, WORK_FINISHED);
        return false;
    }
    for (uint32_t o = 0; o < s->config.daemons; o++)
        for (uint32_t u = 0; u < s->config.units; u++)
            if (s->daemon[o].board[u] < w->step)
                return false;
    next_work(s, w);
    return true;
}

static bool run_leasing(struct sim *s, struct sim_worker *w)
{
    if (w->asking || !w->link[w->ask_owner].up)
        return false;
    const struct sim_request request = { .kind = SIM_LEASE, .step = w->step };
    w->asking = true;
    ask(s, w, w->ask_owner, &request, 0);
    return false;
}

static void leased(struct sim *s, struct sim_worker *w, const struct sim_reply *r)
{
    if (w->work != WORK_LEASING || r->step != w->step || !w->asking)
        return;
    w->asking = false;
    if (r->lease == LEASE_GROUP) {
        w->micro = r->group;
        begin_computing(s, w);
    } else if (r->lease == LEASE_ALL_IN && w->ask_owner + 1 < s->config.daemons) {
        w->ask_owner++;
    } else {
        begin_turn(s, w);
    }
}

/* Parameters that moved meanwhile make a gradient that must never count. */
static void computed(struct sim *s, struct sim_worker *w, uint64_t what)
{
    if (w->work != WORK_COMPUTING || what != (w->step << 8 | w->micro))
        return;
    w->torn = false;
    for (uint32_t o = 0; o < s->config.daemons; o++) {
        w->link[o].give_unit = s->config.units;
        for (uint32_t u = 0; u < s->config.units; u++)
            w->torn = w->torn || s->daemon[o].board[u] > w->step;
    }
    enter(s, w, WORK_RETURNING);
}

/* Hand over to one owner what its slots have room for; true: everything. */
static bool give(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    for (; l->give_unit > 0; l->give_unit--) {
        const uint32_t unit = l->give_unit - 1;
        struct sim_request q = {
            .kind = SIM_RETURN, .step = w->step, .unit = unit, .micro = w->micro
        };
        if (s->frozen[unit])
            continue;
        if (!l->up)
            return false;
        q.none = sim_none(s, w->step, w->micro, unit);
        if (!q.none && !take_slot(l, &q.slot))
            return false;
        const uint64_t tag = sim_tag(s, w->step, w->micro, unit);
        ask(s, w, owner, &q, w->torn ? sim_mix(tag, s->now_ns) : tag);
    }
    return true;
}

static bool run_returning(struct sim *s, struct sim_worker *w)
{
    bool all = true;
    for (uint32_t o = 0; o < s->config.daemons; o++)
        all = give(s, w, o) && all;
    if (!all || (!w->eager && returns_open(s, w)))
        return false;
    next_work(s, w);
    return true;
}

/* -- The turn -----------------------------------------------------------------------------------
 */

static void turn_requests(struct sim *s, struct sim_worker *w)
{
    uint32_t owner;
    enum turn_kind kind;
    while (turn_next(w->turn, &owner, &kind) && w->link[owner].up) {
        struct sim_request q = { .kind = kind == TURN_PREPARE ? SIM_PREPARE : SIM_COMMIT,
                                 .step = turn_step(w->turn),
                                 .blob = sim_mix(turn_step(w->turn), 77) };
        if (kind == TURN_COMMIT)
            q.decision = *turn_decision(w->turn);
        ask(s, w, owner, &q, 0);
        turn_asked(w->turn, owner, kind);
    }
}

static bool run_turn(struct sim *s, struct sim_worker *w)
{
    turn_requests(s, w);
    if (turn_state(w->turn) == TURN_OVER) {
        forget_turn(w);
        look_again(s, w);
        return true;
    }
    if (turn_state(w->turn) == TURN_DONE) {
        w->last = turn_decided(w->turn).decision;
        w->has_last = true;
        w->looks = 0;
        if (w->work == WORK_SETTLING) {
            settled(s, w, w->ask_owner);
            return true;
        }
        w->step++;
        w->computed = 0;
        enter(s, w, WORK_BOARD);
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
    int status = r->status;
    if (w->work != WORK_TURN && w->work != WORK_SETTLING)
        return;
    if (status == SHD_OK && r->kind == SIM_PREPARE)
        status = turn_prepared(w->turn, msg->daemon, &r->prepared, &e);
    else if (status == SHD_OK)
        status = turn_committed(w->turn, msg->daemon, &r->committed, &e);
    if (status == SHD_OK)
        return;
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
    while (again) {
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
        case WORK_LEASING:
            again = run_leasing(s, w);
            break;
        case WORK_RETURNING:
            again = run_returning(s, w);
            break;
        case WORK_COMPUTING:
        case WORK_FINISHED:
            again = false;
            break;
        }
    }
}

static uint64_t reply_hash(const struct sim_reply *r)
{
    uint64_t h = sim_mix((uint64_t)r->kind << 32 | (uint32_t)r->status, r->step);
    h = sim_mix(h, (uint64_t)r->stale << 40 | (uint64_t)r->lease << 32 | r->group);
    if (r->kind == SIM_PREPARE)
        h = sim_mix(h, (uint64_t)r->prepared.has_decision << 2 | (uint64_t)r->prepared.over << 1 |
                           r->prepared.finite);
    if (r->kind == SIM_COMMIT)
        h = sim_mix(h, sim_decision_hash(&r->committed.decision));
    return h;
}

/* True for the first reply to this number. A second one must say the same. */
static bool note_answer(struct sim *s, struct sim_link *l, const struct sim_msg *msg)
{
    const uint32_t at = msg->seq % SIM_ANSWERS;
    const uint64_t hash = reply_hash(&msg->reply);
    if (l->answered_seq[at] == msg->seq && l->answered_hash[at] != hash)
        sim_broken(s, "P2", SIM_NOBODY, msg->worker,
                   "request %llu got two different replies from owner %u",
                   (unsigned long long)msg->seq, msg->daemon);
    const bool first = l->answered_seq[at] != msg->seq;
    if (msg->seq > l->answered_seq[at]) {
        l->answered_seq[at] = msg->seq;
        l->answered_hash[at] = hash;
    }
    return first;
}

static void credited(struct sim *s, struct sim_link *l, const struct sim_call *c,
                     const struct sim_msg *msg)
{
    if (msg->reply.status != SHD_OK && s->kept_lost)
        sim_lost(s, "an owner does not know the step");
    if (msg->reply.status != SHD_OK)
        sim_broken(s, "P2", SIM_NOBODY, msg->worker, "gradient of step %llu was refused: %s",
                   (unsigned long long)c->request.step, status_name(msg->reply.status));
    if (!c->request.none)
        l->slot_taken[c->request.slot] = false;
}

static void on_reply(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    struct sim_link *l = &w->link[msg->daemon];
    if (!l->up || msg->session != l->session || !note_answer(s, l, msg))
        return;
    for (uint32_t i = 0; i < SIM_CALLS; i++) {
        struct sim_call *c = &l->calls[i];
        if (!c->used || c->seq != msg->seq)
            continue;
        c->used = false;
        switch (msg->reply.kind) {
        case SIM_RETURN:
            credited(s, l, c, msg);
            break;
        case SIM_LEASE:
            leased(s, w, &msg->reply);
            break;
        case SIM_PREPARE:
        case SIM_COMMIT:
            turn_reply(s, w, msg);
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
        attached(s, w, msg);
    else if (msg->reply.kind != SIM_HANGUP)
        on_reply(s, w, msg);
    else if (l->up && l->daemon_gen == msg->daemon_gen &&
             (msg->session == 0 || msg->session == l->session))
        hung_up(s, w, msg->daemon);
}

static void resend(struct sim *s, struct sim_worker *w)
{
    for (uint32_t o = 0; o < s->config.daemons; o++)
        for (uint32_t i = 0; w->link[o].up && i < SIM_CALLS; i++) {
            struct sim_call *c = &w->link[o].calls[i];
            if (!c->used || s->now_ns < c->sent_ns + RESEND_NS)
                continue;
            c->sent_ns = s->now_ns;
            send(s, w, o, c->seq, &c->request);
        }
    after(s, w, RESEND_NS / 2 + sim_below(s, RESEND_NS), EV_RESEND, 0);
}

void sim_worker_event(struct sim *s, struct sim_worker *w, const struct sim_event *event)
{
    if (event->kind == EV_MSG)
        on_message(s, w, &s->msg[event->arg]);
    else if (event->kind == EV_ATTACH)
        on_attach_timer(s, w, (uint32_t)event->arg);
    else if (event->kind == EV_COMPUTED)
        computed(s, w, event->arg);
    else if (event->kind == EV_RESEND)
        resend(s, w);
    run(s, w);
}

/* -- Life ---------------------------------------------------------------------------------------
 */

void sim_worker_start(struct sim *s, struct sim_worker *w)
{
    const uint64_t gen = w->gen;
    memset(w, 0, sizeof *w);
    w->gen = gen;
    w->alive = true;
    w->job = s->job;
    w->eager = sim_chance(s, 500);
    CHECK(turn_bytes(SIM_DAEMONS) <= sizeof w->turn_memory);
    w->turn = turn_init(w->turn_memory, s->config.daemons);
    enter(s, w, WORK_ATTACHING);
    for (uint32_t o = 0; o < s->config.daemons; o++)
        after(s, w, sim_below(s, MS), EV_ATTACH, o);
    after(s, w, RESEND_NS, EV_RESEND, 0);
}

static void end(struct sim *s, struct sim_worker *w)
{
    const uint32_t i = sim_worker_index(s, w);
    for (uint32_t o = 0; o < s->config.daemons; o++) {
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
    after(s, w, 70 * MS + sim_below(s, 300 * MS), EV_START_WORKER, 0);
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
    for (uint32_t o = 0; o < s->config.daemons; o++)
        if (w->link[o].up)
            send(s, w, o, ++w->link[o].seq, &request);
    end(s, w);
}
