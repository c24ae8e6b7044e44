/* Pins and their readers; see sim_guest.h, and daemon/model/pin.h for what is modelled here. */
#include <inttypes.h>
#include <string.h>

#include "tests/sim/sim_guest.h"

#define BLOCK_BYTES 2u /* of the map: a block is an element of 16 bits */
#define PIECES      4u
#define REACH_NS    (2 * S) /* for a step to come */
#define LEAD_MAX    64u
#define POLL_NS     (20 * MS) /* until all are asked again, as the model went back */

static struct sim_host *host_of(const struct sim *s, const struct sim_daemon *d)
{
    return &s->guests->host[sim_daemon_index(s, d)];
}

/* -- Memory ------------------------------------------------------------------------------------ */

static uint32_t memory_new(struct sim_host *h)
{
    uint32_t i = 0;
    while (i < SIM_MEMORIES && h->memory[i].users > 0)
        i++;
    CHECK(i <
          SIM_MEMORIES); /* a daemon's pins, and two a reader: what it maps and what it leaves */
    memset(&h->memory[i], 0, sizeof h->memory[i]);
    h->memory[i].users = 1;
    return i;
}

static void pin_free(struct sim_host *h, struct sim_pin *pin)
{
    h->memory[pin->memory].users--;
    sweep_deinit(&pin->sweep);
    *pin = (struct sim_pin){ .state = SIM_PIN_FREE };
}

static void free_if_unused(struct sim_host *h, struct sim_pin *pin)
{
    if (pin->state != SIM_PIN_FREE && pin->holders == 0 && pin->in_queue == 0)
        pin_free(h, pin);
}

/* The daemon's death, or the end of it all. */
void sim_pin_kill(struct sim *s, struct sim_daemon *d)
{
    struct sim_host *h = host_of(s, d);
    for (uint32_t i = 0; i < SIM_PINS; i++)
        if (h->pins[i].state != SIM_PIN_FREE)
            pin_free(h, &h->pins[i]);
}

/* -- Copies ------------------------------------------------------------------------------------ */

static void queue_copy(struct sim *s, struct sim_daemon *d, struct sim_pin *pin,
                       struct sweep_range range)
{
    struct sim_host *h = host_of(s, d);
    pin->in_queue++;
    sim_kernel_copy(s, d, h->memory[pin->memory].blocks,
                    (struct sim_copy){ SIM_COPY_PIN, (uint32_t)(pin - h->pins) },
                    (uint32_t)(range.at_bytes / BLOCK_BYTES),
                    (uint32_t)((range.at_bytes + range.bytes) / BLOCK_BYTES));
}

static void answer_all(struct sim *s, struct sim_daemon *d, struct sim_pin *pin, int status)
{
    const uint32_t asking = pin->asking;
    const struct sim_told told = { .status = status, .step = pin->step, .memory = pin->memory };
    pin->asking = 0;
    for (uint32_t i = 0; i < SIM_READERS; i++) {
        const struct sim_passing p = { .guest = i,
                                       .daemon = sim_daemon_index(s, d),
                                       .guest_gen = s->guests->guest[i].gen,
                                       .daemon_gen = d->gen,
                                       .seq = pin->seq[i] };
        if ((asking >> i & 1) != 0)
            sim_host_answer(s, d, &p, &told);
    }
}

static void pump(struct sim *s, struct sim_daemon *d, struct sim_pin *pin)
{
    struct sweep_range range;
    while (pin->state == SIM_PIN_COPYING && pin->in_queue < PIECES &&
           sweep_next(&pin->sweep, BLOCK_BYTES * (1 + sim_below(s, 3)), &range)) {
        queue_copy(s, d, pin, range);
        sweep_took(&pin->sweep, range.bytes);
    }
    if (pin->state != SIM_PIN_COPYING || pin->in_queue > 0)
        return;
    pin->state = SIM_PIN_READY;
    sim_note(s, "pin ready", sim_daemon_index(s, d), SIM_NOBODY, pin->step, 0, 0);
    answer_all(s, d, pin, SHD_OK);
}

void sim_pin_copied(struct sim *s, struct sim_daemon *d, uint32_t which)
{
    struct sim_host *h = host_of(s, d);
    struct sim_pin *pin = &h->pins[which];
    CHECK(pin->state != SIM_PIN_FREE && pin->in_queue > 0);
    pin->in_queue--;
    pump(s, d, pin);
    free_if_unused(h, pin);
}

void sim_pins_before_update(struct sim *s, struct sim_daemon *d, uint32_t unit)
{
    if (s->guests == NULL)
        return;
    for (uint32_t i = 0; i < SIM_PINS; i++) {
        struct sim_pin *pin = &host_of(s, d)->pins[i];
        if (pin->state != SIM_PIN_COPYING)
            continue;
        const struct sweep_range rest = sweep_rest(&pin->sweep, unit);
        if (rest.bytes == 0)
            continue;
        queue_copy(s, d, pin, rest);
        sweep_took_rest(&pin->sweep, unit);
    }
}

static void advance(struct sim *s, struct sim_daemon *d, struct sim_pin *pin)
{
    if (pin->state == SIM_PIN_READY)
        answer_all(s, d, pin, SHD_OK);
    if (pin->state != SIM_PIN_ARMED)
        return;
    switch (sweep_when(d->core, pin->step)) {
    case SWEEP_OVER:
        answer_all(s, d, pin, SHD_ESTEP);
        break;
    case SWEEP_NOW:
        sweep_begin(&pin->sweep);
        pin->rewound = step_rewound(d->core);
        pin->state = SIM_PIN_COPYING;
        pump(s, d, pin);
        break;
    case SWEEP_TO_COME:
        break;
    }
}

void sim_pins_moved(struct sim *s, struct sim_daemon *d)
{
    for (uint32_t i = 0; i < SIM_PINS; i++)
        if (host_of(s, d)->pins[i].holders != 0)
            advance(s, d, &host_of(s, d)->pins[i]);
}

/* -- Requests ---------------------------------------------------------------------------------- */

static struct sim_pin *pin_of(struct sim_host *h, uint32_t guest)
{
    for (uint32_t i = 0; i < SIM_PINS; i++)
        if ((h->pins[i].holders >> guest & 1) != 0)
            return &h->pins[i];
    return NULL;
}

static void leave(struct sim_host *h, struct sim_pin *pin, uint32_t guest)
{
    pin->holders &= ~(1u << guest);
    pin->asking &= ~(1u << guest);
    if (pin->holders == 0 && pin->state == SIM_PIN_COPYING)
        pin->state = SIM_PIN_ARMED;
    free_if_unused(h, pin);
}

void sim_pin_gone(struct sim *s, struct sim_daemon *d, uint32_t guest)
{
    struct sim_host *h = host_of(s, d);
    struct sim_pin *pin = pin_of(h, guest);
    if (pin != NULL)
        leave(h, pin, guest);
}

static bool is_of_this_run(const struct sim_daemon *d, const struct sim_pin *pin)
{
    return pin->state < SIM_PIN_COPYING || SIM_BUG(74) || pin->rewound == step_rewound(d->core);
}

/* One that can still become this step, or has. */
static struct sim_pin *find_step(struct sim_host *h, const struct sim_daemon *d, uint64_t step)
{
    for (uint32_t i = 0; i < SIM_PINS; i++) {
        struct sim_pin *pin = &h->pins[i];
        if (pin->state != SIM_PIN_FREE && pin->step == step &&
            (pin->state >= SIM_PIN_COPYING ? is_of_this_run(d, pin)
                                           : sweep_when(d->core, step) != SWEEP_OVER))
            return pin;
    }
    return NULL;
}

static struct sim_pin *pin_new(struct sim_host *h)
{
    struct shd_err e;
    for (uint32_t i = 0; i < SIM_PINS; i++) {
        struct sim_pin *pin = &h->pins[i];
        if (pin->state != SIM_PIN_FREE)
            continue;
        *pin = (struct sim_pin){ .state = SIM_PIN_ARMED, .memory = memory_new(h) };
        CHECK(sweep_init(&pin->sweep, &h->map, &e) == SHD_OK);
        return pin;
    }
    return NULL;
}

static int take(struct sim_host *h, const struct sim_daemon *d, const struct sim_passing *p,
                struct sim_pin **ret_pin)
{
    const uint64_t step = p->ask.step;
    struct sim_pin *mine = pin_of(h, p->guest), *pin = find_step(h, d, step);
    if (mine != NULL)
        mine->asking &= ~(1u << p->guest);
    if (pin == NULL && sweep_when(d->core, step) == SWEEP_OVER)
        return SHD_ESTEP;
    if (pin == NULL && mine != NULL && (mine->holders == 1u << p->guest || SIM_BUG(33)))
        pin = mine;
    if (pin != mine && mine != NULL)
        leave(h, mine, p->guest);
    if (pin == NULL)
        pin = pin_new(h);
    if (pin == NULL)
        return SHD_EBUSY;
    if (pin->step != step || !is_of_this_run(d, pin))
        pin->state = SIM_PIN_ARMED;
    pin->step = step;
    pin->holders |= 1u << p->guest;
    pin->asking |= 1u << p->guest;
    pin->seq[p->guest] = p->seq;
    *ret_pin = pin;
    return SHD_OK;
}

void sim_pin_serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_host *h = host_of(s, d);
    struct sim_pin *pin = NULL;
    struct sim_told told = { .status = SHD_OK };
    if (p->ask.kind == ASK_UNPIN) {
        sim_pin_gone(s, d, p->guest);
        sim_host_answer(s, d, p, &told);
        return;
    }
    told.status = take(h, d, p, &pin);
    if (pin == NULL)
        sim_host_answer(s, d, p, &told);
    else
        advance(s, d, pin);
}

/* -- A reader ---------------------------------------------------------------------------------- */

enum reading { READER_PAUSES, READER_ASKS, READER_READS, READER_LETS_GO };

void sim_reader_unmap(struct sim *s, struct sim_guest *g)
{
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        struct sim_thread *t = &g->thread[i];
        if (t->mapped > 0)
            s->guests->host[i].memory[t->mapped - 1].users--;
        t->mapped = 0;
    }
}

static uint64_t furthest(const struct sim *s)
{
    uint64_t step = 0;
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if (s->daemon[i].alive && step_collecting(s->daemon[i].core) > step)
            step = step_collecting(s->daemon[i].core);
    return step;
}

static void pin_one(struct sim *s, struct sim_guest *g)
{
    const struct sim_ask ask = { .kind = ASK_PIN, .step = furthest(s) + g->lead };
    g->step = ask.step;
    g->mark = sim_back_mark(s);
    g->doing = READER_ASKS;
    sim_guest_ask_all(s, g, 0, &ask);
    sim_guest_after(s, g, REACH_NS);
}

static uint64_t mapped_hash(const struct sim *s, const struct sim_guest *g, uint32_t owner)
{
    const struct sim_host *h = &s->guests->host[owner];
    return sim_hash_of(s, owner, h->memory[g->thread[owner].mapped - 1].blocks);
}

/* Of one run, at all owners: of that which is trained now, or that before it went back. */
static void look_at_new(struct sim *s, struct sim_guest *g)
{
    bool good = false;
    for (uint64_t back = 0; !good && back < 2 && back <= s->era; back++) {
        const struct sim_line *line = &s->line[(s->era - back) & 1];
        good = g->step <= line->decided;
        for (uint32_t i = 0; good && i < s->config.daemons; i++)
            good = mapped_hash(s, g, i) == sim_version_hash(s, line, g->step, i);
    }
    if (!good)
        sim_broken(s, "P1", SIM_NOBODY, SIM_NOBODY,
                   "what is pinned as step %" PRIu64 " is not that", g->step);
    for (uint32_t i = 0; i < s->config.daemons; i++)
        g->thread[i].hash = mapped_hash(s, g, i);
}

static void look_again(struct sim *s, const struct sim_guest *g)
{
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if (mapped_hash(s, g, i) != g->thread[i].hash)
            sim_broken(s, "P1", i, SIM_NOBODY, "what is pinned as step %" PRIu64 " has changed",
                       g->step);
}

static void let_go(struct sim *s, struct sim_guest *g)
{
    const struct sim_ask ask = { .kind = ASK_UNPIN };
    sim_reader_unmap(s, g);
    g->doing = READER_LETS_GO;
    sim_guest_ask_all(s, g, 0, &ask);
}

static void pause_reader(struct sim *s, struct sim_guest *g, uint64_t ns)
{
    g->doing = READER_PAUSES;
    g->since_ns = s->now_ns;
    sim_guest_after(s, g, sim_below(s, ns));
}

/* All have answered. */
static void map_all(struct sim *s, struct sim_guest *g)
{
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        const struct sim_thread *t = &g->thread[i];
        if (t->told.status == SHD_EBUSY) {
            let_go(s, g);
            return;
        }
        if (t->told.status == SHD_ESTEP || !s->daemon[i].alive || t->told_gen != s->daemon[i].gen) {
            g->lead = t->told.status == SHD_ESTEP && g->lead < LEAD_MAX ? 2 * g->lead + 1 : g->lead;
            pin_one(s, g);
            return;
        }
    }
    const struct rewind_mark now = sim_back_mark(s);
    if (rewind_between(&g->mark, &now)) {
        sim_guest_after(s, g, POLL_NS);
        return;
    }
    sim_reader_unmap(s, g);
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        g->thread[i].mapped = g->thread[i].told.memory + 1;
        s->guests->host[i].memory[g->thread[i].told.memory].users++;
    }
    sim_note(s, "pinned", SIM_NOBODY, SIM_NOBODY, g->step, 0, 0);
    s->result.pins++;
    g->lead = 0;
    g->doing = READER_READS;
    g->since_ns = s->now_ns;
    look_at_new(s, g);
    sim_guest_after(s, g, sim_below(s, 300 * MS));
}

void sim_reader_go_on(struct sim *s, struct sim_guest *g, bool timer)
{
    switch ((enum reading)g->doing) {
    case READER_PAUSES:
        if (timer)
            pin_one(s, g);
        break;
    case READER_ASKS:
        if (timer) { /* a step that nobody reaches */
            g->lead = 0;
            pin_one(s, g);
        } else if (sim_guest_all_in(s, g))
            map_all(s, g);
        break;
    case READER_READS:
        if (!timer)
            break;
        look_again(s, g);
        if (sim_chance(s, 300))
            let_go(s, g);
        else
            pin_one(s, g); /* its memory is used again */
        break;
    case READER_LETS_GO:
        if (sim_guest_all_in(s, g))
            pause_reader(s, g, 200 * MS);
        break;
    }
}
