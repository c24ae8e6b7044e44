/* What a simulated worker knows of who is out, and what follows from it; see sim_replica.h, and
 * client/session/membership.c and hub.c, client/paths/replica.c and slots.c for what is modelled
 * here. */
#include "tests/sim/sim_replica.h"

#include <inttypes.h>
#include <string.h>

#include "client/session/membership.h"
#include "tests/sim/sim.h"

#define LOOK_NS  S /* between two looks at the view, as there */
#define HURRY_NS (S / 4)

#define FIRST_TIMES 3u /* as long, for who was never met */

/* -- Members ------------------------------------------------------------------------------------
 */

struct sim_daemon *sim_member(struct sim *s, const struct sim_worker *w, uint32_t member)
{
    return &s->daemon[w->view.at[member]];
}

uint32_t sim_member_of(const struct sim *s, const struct sim_worker *w, uint32_t daemon)
{
    uint32_t member = 0;
    while (w->view.at[member] != daemon)
        member++;
    CHECK(member < sim_members(s));
    return member;
}

bool sim_is_gone(const struct sim_worker *w, uint32_t daemon)
{
    return (w->view.gone >> daemon & 1) != 0;
}

uint32_t sim_all(const struct sim *s, const struct sim_worker *w)
{
    return ((1u << sim_members(s)) - 1) & ~w->view.gone;
}

uint32_t sim_next_member(const struct sim *s, const struct sim_worker *w, uint32_t member)
{
    do
        member++;
    while (member < sim_members(s) && sim_is_gone(w, w->view.at[member]));
    return member;
}

static uint32_t twin_of(const struct sim *s, uint32_t member)
{
    const uint32_t owners = s->config.daemons;
    return member < owners ? member + owners : member - owners;
}

static void swap(struct sim_view *v, uint32_t a, uint32_t b)
{
    const uint32_t was = v->at[a];
    v->at[a] = v->at[b];
    v->at[b] = was;
}

/* -- Losing -------------------------------------------------------------------------------------
 */

static bool has_caught_up(const struct sim *s, const struct sim_worker *w, uint32_t daemon)
{
    for (uint32_t u = 0; u < s->config.units; u++)
        if (s->daemon[daemon].board[u] < w->step)
            return false;
    return true;
}

/* What it was asked and has not answered: an owner's heir is asked from the beginning. */
static void ask_anew(struct sim *s, struct sim_worker *w)
{
    for (uint32_t i = 0; w->work == WORK_LOOKING && i < sim_members(s); i++)
        w->link[i].layout_new = false;
    if (w->work == WORK_LEASING && !SIM_BUG(81))
        w->ask_owner = 0; /* this one may lack what its predecessor had */
}

/* What a lost one has granted counts no more: the others may have gone on without it. */
static void reset_anew(struct sim_worker *w)
{
    if (w->work != WORK_RESETTING)
        return;
    sim_link_forget(w, SIM_RESET_STEP);
    w->ask_owner = w->told = w->followed = 0;
    w->agreed = false;
}

/* Nor is an attempt that none of those left has begun. */
static bool knows_lost_attempt(const struct sim *s, const struct sim_worker *w)
{
    if (w->work <= WORK_SETTLING || w->work > WORK_RESETTING)
        return false;
    for (uint32_t i = 0; i < sim_members(s); i++)
        if (!sim_is_gone(w, i) && s->daemon[i].board_attempt >= w->attempt)
            return false;
    return w->attempt > 0;
}

static void begin_anew(struct sim *s, struct sim_worker *w)
{
    s->result.anew++;
    sim_worker_kill(s, w);
}

/* hub_lose(): the link goes, an owner's place is its replica's. */
static void lose(struct sim *s, struct sim_worker *w, uint32_t member)
{
    struct sim_view *v = &w->view;
    const bool owner = member < s->config.daemons;
    const uint32_t daemon = v->at[member], heir = v->at[twin_of(s, member)];
    if (owner && w->work != WORK_ATTACHING && !has_caught_up(s, w, heir) && !SIM_BUG(82))
        return; /* what was read must not go back */
    sim_note(s, owner ? "takes an owner's place" : "is a replica no more", owner ? heir : daemon,
             sim_worker_index(s, w), w->step, 0, member);
    if (owner)
        turn_succeed(w->turn, member);
    else
        turn_lose(w->turn, member);
    v->gone |= 1u << daemon;
    if (owner)
        swap(v, member, twin_of(s, member));
    sim_link_retire(s, w, daemon, owner ? heir : SIM_NOBODY);
    if (owner)
        ask_anew(s, w);
    reset_anew(w);
    sim_worker_put_anew(w);
    s->result.succeeded += owner;
    if (knows_lost_attempt(s, w))
        begin_anew(s, w);
}

/* All connections anew, by the newest view; once nobody is left who is out in it. */
static void tell(struct sim *s, struct sim_worker *w)
{
    struct sim_view *v = &w->view;
    if (v->told == v->number)
        return;
    v->told = v->number;
    for (uint32_t i = 0; i < sim_members(s); i++) {
        struct sim_link *l = &w->link[i];
        const struct sim_msg msg = { .to_daemon = true,
                                     .daemon = i,
                                     .worker = sim_worker_index(s, w),
                                     .daemon_gen = l->daemon_gen,
                                     .worker_gen = w->gen,
                                     .session = l->session,
                                     .request = { .kind = SIM_HANGUP } };
        l->attempt++;
        if (sim_is_gone(w, i) || !l->up)
            continue;
        sim_send(s, &msg);
        sim_link_hung_up(s, w, i);
    }
}

static void apply(struct sim *s, struct sim_worker *w)
{
    const struct sim_view *v = &w->view;
    bool all = true;
    for (uint32_t m = 0; w->alive && m < sim_members(s); m++) {
        const uint32_t daemon = v->at[m], twin = v->at[twin_of(s, m)];
        if (sim_is_gone(w, daemon) || (v->out >> sim_host_of(s, daemon) & 1) == 0)
            continue;
        if (sim_is_gone(w, twin) || (v->out >> sim_host_of(s, twin) & 1) != 0)
            sim_broken(s, "R4", daemon, SIM_NOBODY, "is out, and so is daemon %u, its other one",
                       twin);
        lose(s, w, m);
        all = all && sim_is_gone(w, daemon);
    }
    if (w->alive && all)
        tell(s, w);
}

bool sim_view_contradicts(const struct sim *s, const struct sim_worker *w, int status)
{
    return status == SHD_EINTERNAL && s->cluster.number != w->view.number;
}

/* -- Looking ------------------------------------------------------------------------------------
 */

static bool read_view(struct sim *s, struct sim_worker *w)
{
    const struct sim_cluster *c = &s->cluster;
    if (s->now_ns < c->away_until_ns[w->view.host])
        return false;
    if (c->number > w->view.number) {
        w->view.number = c->number;
        w->view.out = c->out;
    }
    return true;
}

bool sim_view_begin(struct sim *s, struct sim_worker *w)
{
    struct sim_view *v = &w->view;
    for (uint32_t m = 0; m < sim_members(s); m++)
        v->at[m] = m;
    const bool read = !s->config.replicas || read_view(s, w);
    v->told = v->number;
    return read;
}

static bool in_a_hurry(const struct sim *s, const struct sim_worker *w)
{
    for (uint32_t i = 0; i < sim_members(s); i++)
        if (!sim_is_gone(w, i) && !w->link[i].up)
            return true;
    return false;
}

static void look_later(struct sim *s, const struct sim_worker *w)
{
    sim_worker_after(s, w, (in_a_hurry(s, w) ? HURRY_NS : LOOK_NS) + sim_below(s, 20 * MS), EV_LOOK,
                     0);
}

void sim_view_start(struct sim *s, struct sim_worker *w)
{
    if (!s->config.replicas)
        return;
    w->work = WORK_ATTACHING;
    for (uint32_t i = 0; i < sim_members(s); i++)
        w->view.down_ns[i] = s->now_ns;
    apply(s, w);
    look_later(s, w);
}

/* What does not fit together may be of somebody who is out since. */
bool sim_view_news(struct sim *s, struct sim_worker *w)
{
    const uint64_t number = w->view.number;
    if (s->cluster.number == number)
        return false;
    if (!read_view(s, w))
        begin_anew(s, w); /* with an error */
    else
        apply(s, w);
    w->looks = 0;
    return true;
}

/* Who is missed is to be out: as membership_judge() has it. */
static void claim(struct sim *s, struct sim_worker *w)
{
    struct sim_view *v = &w->view;
    struct membership_link links[SIM_MEMBERS];
    bool out[SIM_HOSTS];
    for (uint32_t m = 0; m < sim_members(s); m++) {
        const uint32_t i = v->at[m], host = sim_host_of(s, i);
        const bool up = w->link[i].up, met = (v->met >> i & 1) != 0;
        links[m] = (struct membership_link){
            .slice = m % s->config.daemons,
            .host = host,
            .up = up,
            .out = sim_is_gone(w, i) || (v->out >> host & 1) != 0,
            .missed = !up && !sim_is_gone(w, i) &&
                      s->now_ns >= v->down_ns[i] + (met ? 1 : FIRST_TIMES) * s->config.patience_ns,
        };
    }
    if (membership_judge(links, sim_members(s), s->config.hosts, out) == 0)
        return;
    v->claim_out = v->out;
    for (uint32_t h = 0; h < s->config.hosts; h++)
        v->claim_out |= (uint32_t)out[h] << h;
    v->claim_number = v->number + 1;
    const uint64_t delay = sim_chance(s, 200) ? sim_below(s, S) : sim_below(s, 20 * MS);
    sim_worker_after(s, w, delay, EV_CLAIM, ++v->claim);
}

static void look(struct sim *s, struct sim_worker *w)
{
    const bool hurry = in_a_hurry(s, w);
    look_later(s, w);
    if (w->work == WORK_COMPUTING || w->work == WORK_FINISHED ||
        (!hurry && s->now_ns < w->since_ns + LOOK_NS))
        return; /* it does not poll, or has not waited for long */
    if (read_view(s, w) && hurry)
        claim(s, w);
    apply(s, w);
}

void sim_view_event(struct sim *s, struct sim_worker *w, const struct sim_event *event)
{
    if (event->kind == EV_LOOK) {
        look(s, w);
        return;
    }
    if (event->arg != w->view.claim || s->now_ns < s->cluster.away_until_ns[w->view.host])
        return;
    sim_hosts_claim(s, w->view.claim_number, w->view.claim_out);
    read_view(s, w);
    apply(s, w);
}

void sim_view_down(struct sim *s, struct sim_worker *w, uint32_t daemon)
{
    w->view.down_ns[daemon] = s->now_ns;
}

/* -- Handing over -------------------------------------------------------------------------------
 */

bool sim_view_give(struct sim *s, struct sim_worker *w)
{
    struct sim_view *v = &w->view;
    const uint32_t owners = s->config.daemons, members = sim_members(s);
    for (; v->give_unit > w->spoilt_from; v->give_unit--, v->give_at = 0) {
        const uint32_t unit = v->give_unit - 1;
        while (!s->frozen[unit] && v->give_at < members) {
            /* Replicas first: one that takes an owner's place meanwhile is told, whenever it is. */
            const uint32_t m = SIM_BUG(85) ? v->give_at : (v->give_at + owners) % members;
            const uint32_t daemon = v->at[m];
            if (!sim_is_gone(w, daemon) && !sim_worker_give(s, w, daemon, unit))
                return false;
            v->give_at++;
            if (sim_chance(s, 20)) { /* its table of calls is full */
                sim_worker_after(s, w, sim_below(s, 20 * MS), EV_WAKE, 0);
                return false;
            }
        }
    }
    return true;
}

/* -- What must be -------------------------------------------------------------------------------
 */

void sim_view_check_asked(struct sim *s, const struct sim_worker *w, uint32_t daemon)
{
    if (sim_is_gone(w, daemon))
        sim_broken(s, "R2", daemon, SIM_NOBODY, "is out, and worker %u, which knows it, asks it",
                   sim_worker_index(s, w));
}

void sim_view_check_done(struct sim *s, const struct sim_worker *w, uint64_t step,
                         const struct decision *decision)
{
    for (uint32_t i = 0; s->config.replicas && i < sim_members(s); i++) {
        const struct sim_daemon *d = &s->daemon[i];
        const struct sim_line *line = sim_line_of(s, d);
        if (sim_is_gone(w, i) && sim_is_out(s, i))
            continue;
        const bool last = d->stray.is && d->commits_seen == step + 1;
        if (d->commits_seen <= step || (!last && line->decided <= step) ||
            !decision_equal(decision, last ? &d->stray.decision : &line->decision[step]))
            sim_broken(s, "R1", i, sim_worker_index(s, w),
                       "worker %u is done with step %" PRIu64 " (view %" PRIu64 " of %" PRIu64
                       "), of which this one has no decision%s",
                       sim_worker_index(s, w), step, w->view.number, s->cluster.number,
                       d->commits_seen <= step ? "" : " like that");
    }
}

/* The line's last decision is of those alone that are out. */
static bool is_taken_back(const struct sim *s, uint64_t step)
{
    for (uint32_t i = 0; i < sim_members(s); i++)
        if (s->daemon[i].commits_seen > step && !sim_is_out(s, i))
            return false;
    return true;
}

static void take_back(struct sim *s, uint64_t step)
{
    struct sim_line *line = &s->line[s->era & 1];
    sim_note(s, "decision that is lost", SIM_NOBODY, SIM_NOBODY, step, 0, 0);
    for (uint32_t i = 0; i < sim_members(s); i++)
        if (s->daemon[i].commits_seen > step)
            s->daemon[i].stray = (struct sim_stray){ true, false, line->decision[step] };
    line->decided = step;
}

bool sim_stray_decides(struct sim *s, struct sim_daemon *d, uint64_t step,
                       const struct decision *decision)
{
    const uint32_t i = sim_daemon_index(s, d);
    const struct sim_line *line = sim_line(s);
    if (!s->config.replicas)
        return false;
    if (d->stray.is &&
        (line->decided < step || !decision_equal(&line->decision[step - 1], &d->stray.decision)))
        sim_broken(s, "R2", i, SIM_NOBODY,
                   "is out, and decides step %" PRIu64 " behind one that nobody else has", step);
    d->stray.is = false;
    const bool equal = step < line->decided && decision_equal(&line->decision[step], decision);
    if (sim_is_out(s, i) && !equal) {
        sim_note(s, "decides, and is out", i, SIM_NOBODY, step, 0, 0);
        d->stray = (struct sim_stray){ true, d->stray.wrong, *decision };
        return true;
    }
    d->commits_seen = step; /* not it */
    if (!equal && step + 1 == line->decided && is_taken_back(s, step))
        take_back(s, step);
    d->commits_seen = step + 1;
    for (uint32_t k = 0; k < sim_members(s); k++) {
        struct sim_daemon *other = &s->daemon[k];
        if (other->commits_seen == step + 1 && decision_equal(&other->stray.decision, decision))
            other->stray.is = false; /* now it counts */
    }
    return false;
}
