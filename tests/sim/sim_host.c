/* Hosts of simulated daemons and workers, what comes between them, and who looks after them; see
 * sim_replica.h. */
#include <string.h>

#include "tests/sim/sim.h"
#include "tests/sim/sim_replica.h"

#define NOTICED_NS (800 * MS) /* until what is broken is taken for that, at most */
#define TEND_NS    (2 * S)
#define PUT_OUT_NS (15 * S) /* behind the patience: then somebody does it */

/* Of a pair each is on another one: on two hosts in turn, or all owners on one. */
uint32_t sim_host_of(const struct sim *s, uint32_t daemon)
{
    const uint32_t owner = daemon % s->config.daemons, hosts = s->config.hosts;
    const uint64_t how = sim_mix(s->config.model_seed, 400);
    if (hosts == 0)
        return 0;
    const uint32_t first = how % 4 == 0 ? 0 : owner % hosts;
    const uint32_t next = hosts == 2 ? 1 : 1 + (uint32_t)(how / 4 + owner) % 2;
    return daemon < s->config.daemons ? first : (first + next) % hosts;
}

bool sim_is_out(const struct sim *s, uint32_t daemon)
{
    return (s->cluster.out >> sim_host_of(s, daemon) & 1) != 0;
}

bool sim_is_dead(const struct sim *s, uint32_t daemon)
{
    return (s->cluster.dead >> sim_host_of(s, daemon) & 1) != 0;
}

/* With these hosts away, has each slice a daemon left? */
static bool has_all(const struct sim *s, uint32_t away)
{
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if ((away >> sim_host_of(s, i) & 1) != 0 &&
            (away >> sim_host_of(s, i + s->config.daemons) & 1) != 0)
            return false;
    return true;
}

/* Without these, do two of the others never reach each other again? */
static bool is_cut_without(const struct sim *s, uint32_t out)
{
    for (uint32_t a = 0; a < s->config.hosts; a++)
        for (uint32_t b = 0; b < s->config.hosts; b++)
            if (((out >> a | out >> b) & 1) == 0 && s->cluster.cut_until_ns[a][b] == SIM_EVER)
                return true;
    return false;
}

/* Two faults for good at the same time are one too many: that is not what is looked at here. */
void sim_hosts_claim(struct sim *s, uint64_t number, uint32_t out)
{
    struct sim_cluster *c = &s->cluster;
    if ((c->number + 1 != number && !SIM_BUG(84)) || !has_all(s, out | c->dead) ||
        is_cut_without(s, out))
        return;
    c->number = number;
    c->out = out;
    s->result.outs++;
    sim_note(s, "view", SIM_NOBODY, SIM_NOBODY, number, out, 0);
}

/* -- The way between them -----------------------------------------------------------------------
 */

bool sim_hosts_lose(struct sim *s, const struct sim_msg *msg, bool side, uint64_t *ret_delay_ns)
{
    const uint32_t daemon = sim_host_of(s, msg->daemon);
    const uint32_t worker = s->worker[msg->worker].view.host;
    const uint32_t from = msg->to_daemon ? worker : daemon, to = msg->to_daemon ? daemon : worker;
    const enum sim_kind kind = msg->to_daemon ? msg->request.kind : msg->reply.kind;
    const uint64_t until = s->cluster.cut_until_ns[from][to];
    *ret_delay_ns = 0;
    if (!s->config.replicas)
        return false;
    if ((s->cluster.dead >> from & 1) != 0 && kind == SIM_HANGUP)
        *ret_delay_ns = sim_below(s, NOTICED_NS);
    if (s->now_ns >= until)
        return false;
    if (!side || kind != SIM_HANGUP || until == SIM_EVER)
        return true;
    *ret_delay_ns = until - s->now_ns;
    return false;
}

/* Both ends see it, each when it does. */
static void break_link(struct sim *s, const struct sim_worker *w, uint32_t daemon)
{
    const struct sim_link *l = &w->link[daemon];
    struct sim_msg msg = { .daemon = daemon,
                           .worker = sim_worker_index(s, w),
                           .daemon_gen = l->daemon_gen,
                           .worker_gen = w->gen,
                           .session = l->session,
                           .reply = { .kind = SIM_HANGUP } };
    if (!w->alive || !l->up)
        return;
    sim_deliver(s, &msg, sim_below(s, NOTICED_NS));
    msg.to_daemon = true;
    msg.request = (struct sim_request){ .kind = SIM_HANGUP };
    sim_deliver(s, &msg, sim_below(s, NOTICED_NS));
}

static void break_links(struct sim *s, uint32_t a, uint32_t b)
{
    for (uint32_t i = 0; i < s->config.workers; i++)
        for (uint32_t d = 0; d < sim_members(s); d++) {
            const uint32_t from = s->worker[i].view.host, to = sim_host_of(s, d);
            if ((from == a && to == b) || (from == b && to == a))
                break_link(s, &s->worker[i], d);
        }
}

/* -- Faults -------------------------------------------------------------------------------------
 */

static bool any_cut(const struct sim *s)
{
    for (uint32_t a = 0; a < s->config.hosts; a++)
        for (uint32_t b = 0; b < s->config.hosts; b++)
            if (s->now_ns < s->cluster.cut_until_ns[a][b])
                return true;
    return false;
}

void sim_host_fault(struct sim *s)
{
    struct sim_cluster *c = &s->cluster;
    const uint32_t host = (uint32_t)sim_below(s, s->config.hosts);
    if (c->for_good || any_cut(s) || !has_all(s, c->out | 1u << host) || !sim_chance(s, 250))
        return;
    c->for_good = true;
    c->dead |= 1u << host;
    c->dead_ns = s->now_ns;
    sim_note(s, "host is lost", SIM_NOBODY, SIM_NOBODY, 0, host, 0);
    for (uint32_t i = 0; i < sim_members(s); i++)
        if (sim_host_of(s, i) == host && s->daemon[i].alive)
            sim_daemon_kill(s, &s->daemon[i]);
    for (uint32_t i = 0; i < s->config.workers; i++)
        if (s->worker[i].view.host == host && s->worker[i].alive)
            sim_worker_kill(s, &s->worker[i]);
}

static uint64_t cut_ns(struct sim *s)
{
    const uint64_t patience = s->config.patience_ns;
    return sim_chance(s, 500) ? sim_below(s, patience) : patience + sim_below(s, 10 * S);
}

void sim_cut_fault(struct sim *s)
{
    struct sim_cluster *c = &s->cluster;
    const uint32_t a = (uint32_t)sim_below(s, s->config.hosts);
    const uint32_t b = (a + 1 + (uint32_t)sim_below(s, s->config.hosts - 1)) % s->config.hosts;
    const bool ever = !c->for_good && c->out == 0 && sim_chance(s, 100);
    const uint64_t until = ever ? SIM_EVER : s->now_ns + cut_ns(s);
    if (c->cut_until_ns[a][b] > until || (s->now_ns < c->cut_rest_ns && !sim_chance(s, 50)))
        return;
    c->for_good = c->for_good || ever;
    c->dead_ns = ever ? s->now_ns : c->dead_ns;
    c->cut_until_ns[a][b] = until;
    if (sim_chance(s, 600) && c->cut_until_ns[b][a] < until)
        c->cut_until_ns[b][a] = until;
    sim_note(s, ever ? "hosts are cut off for ever" : "hosts are cut off", SIM_NOBODY, SIM_NOBODY,
             (until - s->now_ns) / MS, a, b);
    break_links(s, a, b);
    if (ever)
        return;
    s->last_fault_ns = until;
    c->cut_rest_ns = until + sim_below(s, 5 * S);
}

void sim_arbiter_fault(struct sim *s)
{
    const bool all = sim_chance(s, 500);
    const uint32_t host = (uint32_t)sim_below(s, s->config.hosts);
    const uint64_t until = s->now_ns + sim_below(s, sim_chance(s, 500) ? S : 15 * S);
    if (s->now_ns < s->cluster.away_rest_ns)
        return;
    for (uint32_t h = 0; h < s->config.hosts; h++)
        if ((all || h == host) && s->cluster.away_until_ns[h] < until)
            s->cluster.away_until_ns[h] = until;
    s->cluster.away_rest_ns = until + sim_below(s, 10 * S);
    s->last_fault_ns = until;
}

/* -- Looking after them -------------------------------------------------------------------------
 */

static bool is_usable(const struct sim *s, uint32_t host)
{
    const struct sim_cluster *c = &s->cluster;
    if (((c->dead | c->out) >> host & 1) != 0)
        return false;
    for (uint32_t i = 0; i < sim_members(s); i++) {
        const uint32_t to = sim_host_of(s, i);
        if (((c->dead | c->out) >> to & 1) == 0 &&
            (c->cut_until_ns[host][to] == SIM_EVER || c->cut_until_ns[to][host] == SIM_EVER))
            return false;
    }
    return true;
}

/* A usable one, if there is any. */
static uint32_t choose_host(struct sim *s)
{
    uint32_t host = (uint32_t)sim_below(s, s->config.hosts);
    for (uint32_t i = 0; i < s->config.hosts && !is_usable(s, host); i++)
        host = (host + 1) % s->config.hosts;
    while ((s->cluster.dead >> host & 1) != 0)
        host = (host + 1) % s->config.hosts;
    return host;
}

static bool any_usable(const struct sim *s)
{
    for (uint32_t i = 0; i < s->config.workers; i++)
        if (is_usable(s, s->worker[i].view.host))
            return true;
    return false;
}

/* Who has leases may stay away: others do its work. */
bool sim_hosts_place(struct sim *s, struct sim_worker *w)
{
    if (!s->config.replicas || (s->cluster.dead >> w->view.host & 1) == 0)
        return true;
    if (s->config.lease && any_usable(s) && sim_chance(s, 500))
        return false;
    w->view.host = choose_host(s);
    return true;
}

bool sim_hosts_cut_off(const struct sim *s, const struct sim_worker *w)
{
    const uint32_t host = w->view.host;
    if (!s->config.replicas || (s->cluster.out >> host & 1) == 0)
        return false;
    for (uint32_t i = 0; i < sim_members(s); i++) {
        const uint32_t to = sim_host_of(s, i);
        if (!sim_is_out(s, i) && (s->cluster.cut_until_ns[host][to] == SIM_EVER ||
                                  s->cluster.cut_until_ns[to][host] == SIM_EVER))
            return true;
    }
    return false;
}

/* What no worker has put out: none may have met it since it began. */
static void put_out(struct sim *s)
{
    const struct sim_cluster *c = &s->cluster;
    const uint32_t first = (uint32_t)sim_below(s, s->config.hosts);
    if (!c->for_good || s->now_ns < c->dead_ns + s->config.patience_ns + PUT_OUT_NS)
        return;
    if ((c->dead & ~c->out) != 0)
        sim_hosts_claim(s, c->number + 1, c->out | c->dead);
    for (uint32_t i = 0; i < s->config.hosts; i++) {
        const uint32_t a = (first + i) % s->config.hosts;
        for (uint32_t b = 0; b < s->config.hosts; b++)
            if (c->cut_until_ns[a][b] == SIM_EVER && ((c->out >> a | c->out >> b) & 1) == 0)
                sim_hosts_claim(s, c->number + 1, c->out | 1u << a);
    }
}

static void move_workers(struct sim *s)
{
    const bool any = s->config.lease && any_usable(s);
    for (uint32_t i = 0; i < s->config.workers; i++) {
        struct sim_worker *w = &s->worker[i];
        if (any || !sim_hosts_cut_off(s, w))
            continue;
        if (w->alive)
            sim_worker_kill(s, w);
        w->view.host = choose_host(s);
    }
}

void sim_hosts_event(struct sim *s)
{
    put_out(s);
    move_workers(s);
    sim_at(s, sim_below(s, TEND_NS), (struct sim_event){ .kind = EV_HOSTS });
}

void sim_hosts_begin(struct sim *s)
{
    for (uint32_t i = 0; i < s->config.workers; i++)
        s->worker[i].view.host = s->config.hosts > 0
                                     ? (uint32_t)(sim_mix(s->config.seed, 500) + i) %
                                           s->config.hosts
                                     : 0;
    if (s->config.replicas)
        sim_hosts_event(s);
}
