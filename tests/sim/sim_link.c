/* A worker's connections to its daemons in the simulator; see sim.h. Requests are kept until
 * answered: sent again after a while with the same number, and in a new session with a new one;
 * what the turn says is what it says then. */
#include <string.h>

#include "tests/sim/sim.h"

void sim_worker_after(struct sim *s, const struct sim_worker *w, uint64_t delay_ns,
                      enum sim_event_kind kind, uint64_t arg)
{
    sim_at(s, delay_ns,
           (struct sim_event){
               .kind = kind, .who = sim_worker_index(s, w), .gen = w->gen, .arg = arg });
}

/* -- Requests -----------------------------------------------------------------------------------
 */

void sim_link_send(struct sim *s, const struct sim_worker *w, uint32_t owner, uint64_t seq,
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

/* As the client's hub does it. What a put commits is its own, and stays. */
static void pack_anew(const struct sim *s, const struct sim_worker *w, uint32_t owner,
                      struct sim_call *c)
{
    if (c->request.kind == SIM_PREPARE ||
        (c->request.kind == SIM_COMMIT && c->request.decision.put == 0))
        sim_worker_pack(s, w, owner, &c->request);
}

static void call_send(struct sim *s, struct sim_worker *w, uint32_t owner, struct sim_call *c)
{
    struct sim_link *l = &w->link[owner];
    if (c->request.kind == SIM_RETURN && !c->request.none)
        write_slot(s, l, owner, c);
    c->seq = ++l->seq;
    c->sent_ns = s->now_ns;
    sim_link_send(s, w, owner, c->seq, &c->request);
}

static struct sim_call *call_new(struct sim_link *l)
{
    for (uint32_t i = 0; i < SIM_CALLS; i++)
        if (!l->calls[i].used)
            return &l->calls[i];
    CHECK(false); /* more requests than a worker has */
    return NULL;
}

/* Where the link is down it is sent when that is up again. */
void sim_link_ask(struct sim *s, struct sim_worker *w, uint32_t owner,
                  const struct sim_request *request, uint64_t tag)
{
    struct sim_call *c = call_new(&w->link[owner]);
    *c = (struct sim_call){ .used = true, .tag = tag, .request = *request };
    sim_view_check_asked(s, w, owner);
    if (w->link[owner].up || !s->config.replicas)
        call_send(s, w, owner, c);
}

/* Nobody is asked there any more. Its calls are answered by nothing, but for a lease, which its
 * heir is asked: SIM_NOBODY: it has none. */
void sim_link_retire(struct sim *s, struct sim_worker *w, uint32_t daemon, uint32_t heir)
{
    struct sim_link *l = &w->link[daemon];
    for (uint32_t i = 0; i < SIM_CALLS; i++) {
        struct sim_call *c = &l->calls[i];
        if (c->used && c->request.kind == SIM_LEASE && heir != SIM_NOBODY)
            sim_link_ask(s, w, heir, &c->request, 0);
        else if (c->used && c->request.kind == SIM_LEASE)
            w->asking = false;
        c->used = false;
    }
    l->up = l->layout_asked = false;
}

/* Replies to these mean nothing any more. */
void sim_link_forget(struct sim_worker *w, enum sim_kind kind)
{
    for (uint32_t o = 0; o < SIM_MEMBERS; o++)
        for (uint32_t i = 0; i < SIM_CALLS; i++)
            if (w->link[o].calls[i].request.kind == kind)
                w->link[o].calls[i].used = false;
}

void sim_link_forget_lease(struct sim_worker *w)
{
    sim_link_forget(w, SIM_LEASE);
}

void sim_link_forget_turn(struct sim_worker *w)
{
    for (uint32_t o = 0; o < SIM_MEMBERS; o++)
        for (uint32_t i = 0; i < SIM_CALLS; i++) {
            struct sim_call *c = &w->link[o].calls[i];
            if (c->request.kind == SIM_PREPARE || c->request.kind == SIM_COMMIT ||
                c->request.kind == SIM_PUT)
                c->used = false;
        }
}

bool sim_link_returns_open(const struct sim *s, const struct sim_worker *w)
{
    for (uint32_t o = 0; o < sim_members(s); o++)
        for (uint32_t i = 0; i < SIM_CALLS; i++)
            if (w->link[o].calls[i].used && w->link[o].calls[i].request.kind == SIM_RETURN)
                return true;
    return false;
}

/* -- Attaching ----------------------------------------------------------------------------------
 */

void sim_link_attach(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    if (l->up || sim_is_gone(w, owner))
        return;
    const struct sim_request request = { .kind = SIM_ATTACH, .view = w->view.told };
    l->session = 0;
    sim_link_send(s, w, owner, ++l->attempt, &request);
    sim_worker_after(s, w, sim_chance(s, 500) ? 5 * MS : 100 * MS + sim_below(s, 400 * MS),
                     EV_ATTACH, owner);
}

bool sim_link_take_slot(struct sim_link *l, uint32_t *ret_slot)
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
        if (c->request.kind == SIM_RETURN && !c->request.none)
            CHECK(sim_link_take_slot(l, &c->request.slot));
        pack_anew(s, w, owner, c);
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

/* Whoever has opened the model goes on with no other instance of it, also where that has come as
 * far as the worker: what it computes may be of what the other owners have made of the step since.
 * It ends; its successor opens what there is. */
static bool is_another(struct sim *s, struct sim_worker *w, const struct sim_link *l,
                       uint64_t instance)
{
    if (w->work == WORK_ATTACHING || l->layout.instance == instance || SIM_BUG(75))
        return false;
    if (!s->kept_lost)
        sim_lost(s, "an owner has another instance of the model"); /* which breaks */
    sim_worker_kill(s, w);
    return true;
}

/* An owner's successor knows what its predecessor said, unless its segments are gone. */
static void check_kept(struct sim *s, const struct sim_worker *w, const struct sim_link *l)
{
    const uint64_t step = l->layout.step;
    bool apart;
    if (sim_back_seen(s, &apart).attempt > w->rewound)
        return; /* the model went back, and so will the worker */
    if (w->work == WORK_ATTACHING || w->work == WORK_LOOKING || step > w->step)
        return;
    if (step < sim_line(s)->decided && sim_line(s)->decision[step].put != 0)
        return; /* it was told so while gradients of the step were dropped */
    if (step < w->step)
        sim_lost(s, "an owner is behind what it had committed");
    if (w->work != WORK_TURN || l->layout.attempt != w->attempt)
        return;
    const uint32_t member = sim_member_of(s, w, (uint32_t)(l - w->link));
    const bool all_in = s->config.lease && member < w->ask_owner; /* it has said so */
    for (uint32_t m = 0; m < sim_worker_micros(s, w); m++) {
        const bool told = s->config.lease ? all_in
                                          : (w->computed >> m & 1) != 0 && !return_open(l, m);
        if (told && (l->layout.in >> m & 1) == 0)
            sim_lost(s, "an owner lacks a gradient that it had");
    }
}

void sim_link_attached(struct sim *s, struct sim_worker *w, const struct sim_msg *msg)
{
    struct sim_link *l = &w->link[msg->daemon];
    const struct sim_daemon *d = &s->daemon[msg->daemon];
    if (l->up || msg->seq != l->attempt || !d->alive || d->gen != msg->daemon_gen ||
        sim_is_gone(w, msg->daemon))
        return; /* given up, or its socket hung up already */
    sim_note(s, "attached", msg->daemon, msg->worker, msg->reply.layout.step, 0, 0);
    l->up = true;
    w->view.met |= 1u << msg->daemon;
    l->daemon_gen = msg->daemon_gen;
    const uint64_t instance = l->layout.instance;
    l->layout = msg->reply.layout;
    l->layout_new = true;
    l->session = l->layout.session;
    l->seat = l->layout.seat;
    l->seq = 0;
    memset(l->slot_taken, 0, sizeof l->slot_taken);
    memset(l->answered_seq, 0, sizeof l->answered_seq);
    if (is_another(s, w, l, instance))
        return;
    check_kept(s, w, l);
    replay(s, w, msg->daemon);
}

void sim_link_hung_up(struct sim *s, struct sim_worker *w, uint32_t owner)
{
    struct sim_link *l = &w->link[owner];
    sim_note(s, "hung up", owner, sim_worker_index(s, w), w->step, 0, 0);
    l->up = l->layout_asked = false;
    for (uint32_t i = 0; i < SIM_CALLS; i++) /* it looks again itself */
        if ((l->calls[i].request.kind == SIM_LEASE && !s->config.replicas) ||
            l->calls[i].request.kind == SIM_LAYOUT)
            l->calls[i].used = false;
    sim_view_down(s, w, owner);
    const uint32_t asked = w->ask_owner < sim_members(s) ? w->view.at[w->ask_owner] : SIM_NOBODY;
    if (asked == owner && w->work != WORK_PUTTING &&
        !s->config.replicas) /* a commit is asked again as it is */
        w->asking = false;
    sim_worker_after(s, w, sim_below(s, sim_chance(s, 500) ? MS : 50 * MS), EV_ATTACH, owner);
}

/* -- Replies ------------------------------------------------------------------------------------
 */

/* again: Prepare may be served again, for a reply with settings or limits is too long to be kept,
 * and its step be decided or over by then. Who has heard the first one does not look at the second.
 */
static uint64_t reply_hash(const struct sim_reply *r, bool again)
{
    if (r->kind == SIM_PREPARE && again)
        return sim_mix((uint64_t)r->kind, 0);
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
bool sim_link_first_answer(struct sim *s, struct sim_link *l, const struct sim_msg *msg)
{
    const uint32_t at = msg->seq % SIM_ANSWERS;
    const uint64_t hash = reply_hash(&msg->reply,
                                     s->config.sets || s->config.guard != SIM_GUARD_NONE);
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

void sim_link_credited(struct sim *s, struct sim_link *l, const struct sim_call *c,
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

void sim_link_resend(struct sim *s, struct sim_worker *w)
{
    for (uint32_t o = 0; o < sim_members(s); o++)
        for (uint32_t i = 0; w->link[o].up && i < SIM_CALLS; i++) {
            struct sim_call *c = &w->link[o].calls[i];
            if (!c->used || s->now_ns < c->sent_ns + SIM_RESEND_NS)
                continue;
            c->sent_ns = s->now_ns;
            pack_anew(s, w, o, c);
            sim_link_send(s, w, o, c->seq, &c->request);
        }
    sim_worker_after(s, w, SIM_RESEND_NS / 2 + sim_below(s, SIM_RESEND_NS), EV_RESEND, 0);
}
