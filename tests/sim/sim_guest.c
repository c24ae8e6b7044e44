/* Guests of the simulator and what both their kinds have in common; see sim_guest.h. */
#include "tests/sim/sim_guest.h"

#include <stdlib.h>
#include <string.h>

#define AGAIN_NS (5 * MS) /* until a daemon is tried again */

static uint64_t way_ns(struct sim *s)
{
    uint64_t delay = 10 * US + sim_below(s, 100 * US);
    if ((s->config.faults & SIM_REORDER) != 0 && sim_chance(s, 100))
        delay += sim_below(s, 20 * MS);
    return delay;
}

static uint32_t guest_index(const struct sim *s, const struct sim_guest *g)
{
    return (uint32_t)(g - s->guests->guest);
}

/* -- Messages ---------------------------------------------------------------------------------- */

static struct sim_passing *put_on_way(struct sim *s, const struct sim_passing *p)
{
    struct sim_passing *at = &s->guests->passing[++s->guests->passed % SIM_ON_WAY];
    *at = *p;
    at->number = s->guests->passed;
    return at;
}

/* NULL: a double that comes so late that it is forgotten. */
static const struct sim_passing *find_passing(const struct sim *s, uint64_t number)
{
    const struct sim_passing *p = &s->guests->passing[number % SIM_ON_WAY];
    return p->number == number ? p : NULL;
}

/* In the order in which they are sent, but for doubles. */
static void send(struct sim *s, const struct sim_passing *p, enum sim_event_kind kind, uint32_t who,
                 uint64_t gen)
{
    struct sim_thread *t = &s->guests->guest[p->guest].thread[p->daemon];
    const uint64_t number = put_on_way(s, p)->number;
    uint64_t at_ns = s->now_ns + way_ns(s);
    at_ns = at_ns > t->last_ns ? at_ns : t->last_ns + 1;
    t->last_ns = at_ns;
    const struct sim_event event = { .kind = kind, .who = who, .gen = gen, .arg = number };
    sim_at(s, at_ns - s->now_ns, event);
    if ((s->config.faults & SIM_DOUBLE) != 0 && sim_chance(s, 50))
        sim_at(s, at_ns - s->now_ns + sim_below(s, 100 * MS), event);
}

static void send_question(struct sim *s, struct sim_guest *g, uint32_t daemon)
{
    struct sim_thread *t = &g->thread[daemon];
    const struct sim_daemon *d = &s->daemon[daemon];
    t->seq = ++g->seq; /* answers to the question before do not count from here on */
    if (!d->alive) {
        sim_at(s, AGAIN_NS,
               (struct sim_event){ .kind = EV_GUEST_AGAIN,
                                   .who = guest_index(s, g),
                                   .gen = g->gen,
                                   .arg = t->seq << 8 | daemon });
        return;
    }
    const struct sim_passing p = { .guest = guest_index(s, g),
                                   .daemon = daemon,
                                   .guest_gen = g->gen,
                                   .daemon_gen = d->gen,
                                   .seq = t->seq,
                                   .ask = t->ask };
    send(s, &p, EV_ASK, daemon, d->gen);
}

void sim_guest_ask(struct sim *s, struct sim_guest *g, uint32_t daemon, const struct sim_ask *ask)
{
    struct sim_thread *t = &g->thread[daemon];
    t->waits = true;
    t->in = false;
    t->ask = *ask;
    send_question(s, g, daemon);
}

void sim_guest_ask_all(struct sim *s, struct sim_guest *g, uint32_t first,
                       const struct sim_ask *ask)
{
    for (uint32_t i = first; i < s->config.daemons; i++)
        sim_guest_ask(s, g, i, ask);
}

bool sim_guest_all_in(const struct sim *s, const struct sim_guest *g)
{
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if (g->thread[i].waits)
            return false;
    return true;
}

void sim_host_answer(struct sim *s, struct sim_daemon *d, const struct sim_passing *p,
                     const struct sim_told *told)
{
    struct sim_passing back = *p;
    back.told = *told;
    FAIL_POINT("sim:reply:before");
    send(s, &back, EV_ANSWER, p->guest, p->guest_gen);
    FAIL_POINT("sim:reply:after");
    (void)d;
}

/* -- A daemon's side --------------------------------------------------------------------------- */

uint32_t sim_flat_count(const struct sim *s, uint32_t owner)
{
    uint32_t count = 0;
    for (uint32_t u = 0; u < s->config.units; u++)
        count += sim_first_block(s, owner + 1, u) - sim_first_block(s, owner, u);
    return count;
}

uint64_t sim_hash_of(const struct sim *s, uint32_t owner, const uint64_t *blocks)
{
    uint64_t hash = owner;
    for (uint32_t i = 0; i < sim_flat_count(s, owner); i++)
        hash = sim_mix(hash, blocks[i]);
    return hash;
}

void sim_host_serve(struct sim *s, struct sim_daemon *d, uint64_t number)
{
    struct sim_host *h = &s->guests->host[sim_daemon_index(s, d)];
    const struct sim_passing *at = find_passing(s, number);
    if (at == NULL || at->seq <= h->served[at->guest])
        return;                       /* again */
    const struct sim_passing p = *at; /* its place may be taken by what is sent */
    if (p.guest < SIM_RETURNERS_FROM && sim_back_busy(&d->back)) { /* to be asked again */
        sim_daemon_after(s, d, MS, EV_ASK, number);
        return;
    }
    h->served[p.guest] = p.seq;
    if (p.guest < SIM_READERS)
        sim_pin_serve(s, d, &p);
    else if (p.guest < SIM_RETURNERS_FROM)
        sim_fork_serve(s, d, &p);
    else
        sim_back_serve(s, d, &p);
}

void sim_host_start(struct sim *s, struct sim_daemon *d)
{
    const uint32_t owner = sim_daemon_index(s, d);
    if (s->guests == NULL)
        return;
    struct sim_host *h = &s->guests->host[owner];
    uint64_t elems = 0;
    for (uint32_t u = 0; u < s->config.units; u++) {
        const uint32_t first = sim_first_block(s, owner, u), end = sim_first_block(s, owner + 1, u);
        h->slice[u] = (struct slice){ .first_elem = first, .elems = end - first };
        h->base_elem[u] = elems;
        elems += end - first;
    }
    h->map = (struct shardmap){ .owner = owner,
                                .owners = s->config.daemons,
                                .units = s->config.units,
                                .publish = SHD_BF16,
                                .slice = h->slice,
                                .base_elem = h->base_elem,
                                .elems = elems };
    sim_fork_start(s, d);
}

void sim_host_moved(struct sim *s, struct sim_daemon *d)
{
    if (s->guests == NULL)
        return;
    sim_pins_moved(s, d);
    sim_fork_moved(s, d);
}

/* What waits for an answer is asked of the successor. */
void sim_host_kill(struct sim *s, struct sim_daemon *d)
{
    const uint32_t owner = sim_daemon_index(s, d);
    if (s->guests == NULL)
        return;
    struct sim_host *h = &s->guests->host[owner];
    memset(h->served, 0, sizeof h->served);
    sim_pin_kill(s, d);
    h->part.state = PART_NONE;
    h->part.maker = h->part.holder = SIM_NOBODY;
    h->part.copying = false;
    h->part.waits.seq = 0;
    for (uint32_t i = 0; i < SIM_GUESTS; i++) {
        const struct sim_guest *g = &s->guests->guest[i];
        if (g->alive && g->thread[owner].waits)
            sim_at(s, sim_below(s, AGAIN_NS),
                   (struct sim_event){ .kind = EV_GUEST_AGAIN,
                                       .who = i,
                                       .gen = g->gen,
                                       .arg = g->thread[owner].seq << 8 | owner });
    }
}

/* Its session has ended. */
void sim_host_gone(struct sim *s, struct sim_daemon *d, uint32_t guest)
{
    if (guest < SIM_READERS)
        sim_pin_gone(s, d, guest);
    else if (guest < SIM_RETURNERS_FROM)
        sim_fork_gone(s, d, guest);
}

/* -- A guest ----------------------------------------------------------------------------------- */

void sim_guest_after(struct sim *s, const struct sim_guest *g, uint64_t delay_ns)
{
    struct sim_guest *guest = &s->guests->guest[guest_index(s, g)];
    sim_at(s, delay_ns,
           (struct sim_event){
               .kind = EV_GUEST, .who = guest_index(s, g), .gen = g->gen, .arg = ++guest->timer });
}

static void go_on(struct sim *s, struct sim_guest *g, bool timer)
{
    if (guest_index(s, g) < SIM_READERS)
        sim_reader_go_on(s, g, timer);
    else if (guest_index(s, g) < SIM_RETURNERS_FROM)
        sim_forker_go_on(s, g, timer);
    else
        sim_returner_go_on(s, g, timer);
}

static void take_answer(struct sim *s, struct sim_guest *g, uint64_t number)
{
    const struct sim_passing *p = find_passing(s, number);
    if (p == NULL)
        return;
    struct sim_thread *t = &g->thread[p->daemon];
    if (!t->waits || t->seq != p->seq)
        return; /* again, or of a question that was given up */
    t->waits = false;
    t->in = true;
    t->told = p->told;
    t->told_gen = p->daemon_gen;
    go_on(s, g, /* timer= */ false);
}

static void start(struct sim *s, struct sim_guest *g)
{
    g->alive = true;
    g->doing = 0;
    g->lead = 0;
    g->since_ns = s->now_ns;
    for (uint32_t i = 0; i < s->config.daemons; i++)
        g->thread[i].waits = g->thread[i].in = false;
    sim_guest_after(s, g, sim_below(s, 100 * MS));
}

static void kill_guest(struct sim *s, struct sim_guest *g)
{
    const uint32_t index = guest_index(s, g);
    if (!g->alive)
        return;
    sim_note(s, "guest killed", SIM_NOBODY, SIM_NOBODY, 0, 0, index);
    g->alive = false;
    if (index < SIM_READERS)
        sim_reader_unmap(s, g);
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        struct sim_thread *t = &g->thread[i];
        const uint64_t at_ns = (s->now_ns > t->last_ns ? s->now_ns : t->last_ns) + 1;
        t->last_ns = at_ns;
        sim_at(s, at_ns - s->now_ns,
               (struct sim_event){
                   .kind = EV_GUEST_GONE, .who = i, .gen = s->daemon[i].gen, .arg = index });
    }
    g->gen++;
    sim_at(s, MS + sim_below(s, 50 * MS),
           (struct sim_event){ .kind = EV_GUEST, .who = index, .gen = g->gen });
    s->result.kills++;
}

void sim_guest_fault(struct sim *s)
{
    if (s->guests != NULL)
        kill_guest(s, &s->guests->guest[sim_below(s, SIM_GUESTS)]);
}

void sim_guest_event(struct sim *s, const struct sim_event *event)
{
    struct sim_guest *g = &s->guests->guest[event->who];
    const uint32_t daemon = (uint32_t)(event->arg & 0xff);
    if (event->gen != g->gen)
        return;
    if (!g->alive) {
        if (event->kind == EV_GUEST)
            start(s, g);
        return;
    }
    if (event->kind == EV_ANSWER)
        take_answer(s, g, event->arg);
    else if (event->kind == EV_GUEST && event->arg == g->timer)
        go_on(s, g, /* timer= */ true);
    else if (event->kind == EV_GUEST_AGAIN && g->thread[daemon].waits &&
             g->thread[daemon].seq == event->arg >> 8)
        send_question(s, g, daemon);
}

/* -- All of them ------------------------------------------------------------------------------- */

void sim_guests_begin(struct sim *s)
{
    s->guests = calloc(1, sizeof *s->guests);
    CHECK(s->guests != NULL);
    for (uint32_t i = 0; i < SIM_DAEMONS; i++)
        s->guests->host[i].part.maker = s->guests->host[i].part.holder = SIM_NOBODY;
    for (uint32_t i = 0; i < SIM_GUESTS; i++)
        if (i < SIM_RETURNERS_FROM ? s->config.guests : s->config.rewinds)
            start(s, &s->guests->guest[i]);
}

void sim_guests_free(struct sim *s)
{
    for (uint32_t i = 0; s->guests != NULL && i < SIM_DAEMONS; i++)
        sim_pin_kill(s, &s->daemon[i]);
    free(s->guests);
    s->guests = NULL;
}

/* Nobody waits longer when nothing happened for as long. */
void sim_guests_check(struct sim *s, uint64_t bound_ns)
{
    for (uint32_t i = 0; s->guests != NULL && i < SIM_GUESTS; i++) {
        const struct sim_guest *g = &s->guests->guest[i];
        if (g->alive && g->doing != 0 && s->now_ns > g->since_ns + bound_ns)
            sim_broken(s, "P4", SIM_NOBODY, SIM_NOBODY,
                       "guest %u waits, doing %u, for more than %llu s", i, g->doing,
                       (unsigned long long)(bound_ns / S));
    }
}
