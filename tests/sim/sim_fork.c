/* A fork at each daemon, and who makes, looks for and drops it; see sim_guest.h, and
 * daemon/model/create.h and drop.h for what is modelled here. */
#include <inttypes.h>
#include <string.h>

#include "tests/sim/sim_guest.h"

#define LEAD_MAX 64u
#define REACH_NS (2 * S)
#define BUSY_NS  (20 * MS)

static struct sim_part *part_of(const struct sim *s, const struct sim_daemon *d)
{
    return &s->guests->host[sim_daemon_index(s, d)].part;
}

/* -- Parts ------------------------------------------------------------------------------------- */

static bool is_made(const struct sim_part *part)
{
    return part->state == PART_FILLING || part->state == PART_FULL;
}

static bool waits_for_word(const struct sim_part *part)
{
    return part->state == PART_FULL && part->head.owner > 0;
}

static void withdraw(struct sim_part *part)
{
    presence_withdraw(&part->head);
    part->kept = false;
    part->state = PART_NONE;
    part->maker = SIM_NOBODY;
    part->waits.seq = 0;
}

static void end(struct sim *s, struct sim_daemon *d)
{
    struct sim_part *part = part_of(s, d);
    if (part->head.owner == 0) {
        s->guests->host[0].promised = 0;
        s->result.drops++;
    }
    presence_end(&part->head);
    part->kept = false;
    part->state = PART_NONE;
    part->holder = SIM_NOBODY;
}

static void open_now(struct sim_part *part)
{
    presence_open(&part->head, part->origin);
    part->state = PART_OPEN;
    part->maker = SIM_NOBODY;
}

void sim_fork_start(struct sim *s, struct sim_daemon *d)
{
    struct sim_part *part = part_of(s, d);
    if (part->kept && presence_of(&part->head) == PRESENCE_NONE)
        part->kept = false;
    if (part->kept)
        part->state = presence_of(&part->head) == PRESENCE_OPEN ? PART_OPEN : PART_FULL;
    part->origin = part->kept ? atomic_load(&part->head.origin) : 0;
    if (s->guests->host[0].promised != 0 && d == s->daemon && part->state != PART_OPEN)
        sim_broken(s, "P3", 0, SIM_NOBODY, "a fork that was said to be there is gone");
    sim_fork_check(s);
}

void sim_fork_gone(struct sim *s, struct sim_daemon *d, uint32_t guest)
{
    struct sim_part *part = part_of(s, d);
    if (part->holder == guest)
        part->holder = SIM_NOBODY;
    if (part->waits.seq != 0 && part->waits.guest == guest && !part->copying)
        part->waits.seq = 0;
    if (!is_made(part) || part->maker != guest)
        return;
    part->maker = SIM_NOBODY;
    if (!part->copying && !waits_for_word(part))
        withdraw(part);
}

/* -- Copying ----------------------------------------------------------------------------------- */

static void fork_now(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_part *part = part_of(s, d);
    part->waits = *p;
    part->copying = true;
    part->copied = false;
    part->step = p->ask.step;
    sim_kernel_copy(s, d, part->blocks, (struct sim_copy){ .what = SIM_COPY_FORK }, 0,
                    sim_flat_count(s, sim_daemon_index(s, d)));
}

void sim_fork_copied(struct sim *s, struct sim_daemon *d)
{
    struct sim_part *part = part_of(s, d);
    const struct sim_passing p = part->waits;
    const struct sim_told told = { .status = SHD_OK, .step = part->step };
    CHECK(part->copying);
    const struct sim_line *line = sim_line_of(s, d);
    const uint32_t owner = sim_daemon_index(s, d);
    if (sim_hash_of(s, owner, part->blocks) != sim_version_hash(s, line, part->step, owner))
        sim_broken(s, "P1", owner, SIM_NOBODY, "what is copied as step %" PRIu64 " is not that",
                   part->step);
    part->mark = sim_mark(line, part->step);
    part->copying = false;
    part->copied = true;
    part->waits.seq = 0;
    if (part->maker == SIM_NOBODY)
        withdraw(part);
    else
        sim_host_answer(s, d, &p, &told);
}

static void fork_or_wait(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_part *part = part_of(s, d);
    const struct sim_told over = { .status = SHD_ESTEP };
    part->waits.seq = 0;
    switch (sweep_when(d->core, p->ask.step)) {
    case SWEEP_OVER:
        sim_host_answer(s, d, p, &over);
        break;
    case SWEEP_NOW:
        fork_now(s, d, p);
        break;
    case SWEEP_TO_COME:
        part->waits = *p;
        break;
    }
}

void sim_fork_moved(struct sim *s, struct sim_daemon *d)
{
    const struct sim_part *part = part_of(s, d);
    const struct sim_passing p = part->waits;
    if (p.seq != 0 && !part->copying)
        fork_or_wait(s, d, &p);
}

/* -- Requests ---------------------------------------------------------------------------------- */

static struct sim_told begin(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_part *part = part_of(s, d);
    const uint32_t owner = sim_daemon_index(s, d);
    if (part->state == PART_OPEN && owner > 0 && part->holder == SIM_NOBODY &&
        atomic_load(&part->head.first) != 0)
        end(s, d); /* owner 0 has none of it, for it has consented */
    if (part->state == PART_OPEN && owner > 0 && part->holder == SIM_NOBODY &&
        part_of(s, s->daemon)->origin == p->ask.origin)
        sim_broken(s, "P3", owner, SIM_NOBODY, "a fork that owner 0 has dropped is there");
    if (part->state == PART_OPEN)
        return (struct sim_told){ .word = WORD_OPEN };
    if (is_made(part) && owner == 0 && part->maker != SIM_NOBODY && part->maker != p->guest)
        return (struct sim_told){ .word = WORD_OTHERS };
    if (part->copying)
        return (struct sim_told){ .status = SHD_EBUSY };
    if (is_made(part))
        withdraw(part);
    *part = (struct sim_part){ .kept = true,
                               .state = PART_FILLING,
                               .maker = p->guest,
                               .holder = SIM_NOBODY,
                               .origin = p->ask.origin };
    part->head.owner = owner;
    part->head.instance = sim_random(s) | 1;
    return (struct sim_told){ .word = WORD_YOURS };
}

static struct sim_told fill(struct sim_part *part, const struct sim_passing *p)
{
    if (!is_made(part) || part->origin != p->ask.origin)
        return (struct sim_told){ .status = SHD_ENOENT };
    if (part->state == PART_FULL)
        return (struct sim_told){ .status = SHD_OK };
    if (part->maker != p->guest)
        return (struct sim_told){ .status = SHD_ENOENT };
    CHECK(part->copied && !part->copying);
    part->state = PART_FULL;
    presence_fill(&part->head, part->origin);
    return (struct sim_told){ .status = SHD_OK };
}

static struct sim_told open_it(struct sim_part *part, const struct sim_passing *p)
{
    const bool is_open = part->state == PART_OPEN &&
                         atomic_load(&part->head.origin) == p->ask.origin;
    if (!is_open && (part->state != PART_FULL || part->origin != p->ask.origin))
        return (struct sim_told){ .status = SHD_ENOENT };
    if (!is_open)
        open_now(part);
    return (struct sim_told){ .word = WORD_OPEN };
}

static struct sim_told none(void)
{
    return (struct sim_told){ .status = SHD_ENOENT };
}

static struct sim_told look(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_part *part = part_of(s, d);
    const struct presence_word word = { .told = p->ask.told,
                                        .origin = p->ask.origin,
                                        .first = p->ask.first };
    if (is_made(part)) {
        const enum presence_told told = waits_for_word(part) ? presence_hear(&part->head, &word)
                                                             : PRESENCE_DROP;
        if (told == PRESENCE_ASK)
            return (struct sim_told){ .status = SHD_EBUSY };
        if (told == PRESENCE_DROP && part->maker != SIM_NOBODY)
            return none();
        if (told == PRESENCE_DROP && part->copying)
            return (struct sim_told){ .status = SHD_EBUSY };
        if (told == PRESENCE_DROP)
            withdraw(part);
        else
            open_now(part);
    }
    if (part->state != PART_OPEN)
        return none();
    const enum presence_told told = presence_hear(&part->head, &word);
    if (part->holder != SIM_NOBODY || told == PRESENCE_ASK)
        return (struct sim_told){ .status = SHD_EBUSY };
    if (told == PRESENCE_DROP) {
        end(s, d);
        return none();
    }
    return (struct sim_told){ .word = WORD_OPEN,
                              .step = part->step,
                              .origin = atomic_load(&part->head.origin),
                              .instance = part->head.instance };
}

static struct sim_told hold(struct sim_part *part, const struct sim_passing *p)
{
    const struct sim_told busy = { .status = SHD_EBUSY };
    if (part->state == PART_OPEN) {
        if (part->holder != SIM_NOBODY && part->holder != p->guest)
            return busy;
        part->holder = p->guest;
        presence_hold(&part->head, p->ask.first, /* replica= */ false);
        return (struct sim_told){ .word = WORD_HELD, .instance = part->head.instance };
    }
    if (is_made(part) && (part->maker != SIM_NOBODY || part->copying))
        return busy;
    if (waits_for_word(part) && !SIM_BUG(35))
        presence_hold(&part->head, p->ask.first, /* replica= */ false);
    else if (is_made(part))
        withdraw(part);
    return (struct sim_told){ .word = WORD_NONE };
}

static struct sim_told go(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_part *part = part_of(s, d);
    const bool with = presence_goes_with(&part->head, p->ask.first);
    if (part->state != PART_OPEN) {
        if (waits_for_word(part) && part->maker == SIM_NOBODY && with)
            withdraw(part);
        return (struct sim_told){ .word = WORD_GONE };
    }
    if (part->holder != p->guest && !(part->holder == SIM_NOBODY && with))
        return (struct sim_told){ .word = WORD_KEPT };
    end(s, d);
    return (struct sim_told){ .word = WORD_GONE };
}

static struct sim_told undo(struct sim_part *part, const struct sim_passing *p)
{
    if (part->holder == p->guest)
        part->holder = SIM_NOBODY;
    return (struct sim_told){ .word = WORD_KEPT };
}

static struct sim_told serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_part *part = part_of(s, d);
    switch (p->ask.kind) {
    case ASK_BEGIN:
        return begin(s, d, p);
    case ASK_FULL:
        return fill(part, p);
    case ASK_OPEN:
        return open_it(part, p);
    case ASK_LOOK:
        return look(s, d, p);
    case ASK_HOLD:
        return hold(part, p);
    case ASK_GO:
        return go(s, d, p);
    case ASK_UNDO:
        return undo(part, p);
    case ASK_FORK:
    case ASK_PIN:
    case ASK_UNPIN:
    case ASK_SNAPSHOT:
    case ASK_EVERY:
    case ASK_LIST:
    case ASK_REWIND:
        break;
    }
    CHECK(false);
    return none();
}

static const char *name_of(enum sim_ask_kind kind)
{
    static const char *const names[] = {
        [ASK_BEGIN] = "fork: begin", [ASK_FORK] = "fork: copy", [ASK_FULL] = "fork: full",
        [ASK_OPEN] = "fork: open",   [ASK_LOOK] = "fork: look", [ASK_HOLD] = "fork: hold",
        [ASK_GO] = "fork: go",       [ASK_UNDO] = "fork: undo",
    };
    return names[kind];
}

void sim_fork_serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    sim_note(s, name_of(p->ask.kind), sim_daemon_index(s, d), SIM_NOBODY, p->ask.step, 0, p->guest);
    struct sim_part *part = part_of(s, d);
    struct sim_told told = { .status = SHD_ENOENT };
    if (p->ask.kind != ASK_FORK)
        told = serve(s, d, p);
    else if (part->state == PART_FILLING && part->origin == p->ask.origin &&
             part->maker == p->guest) {
        if (!part->copying) {
            fork_or_wait(s, d, p);
            return;
        }
        told.status = SHD_EBUSY;
    }
    sim_fork_check(s);
    if (d == s->daemon && p->ask.kind == ASK_OPEN && told.status == SHD_OK)
        s->guests->host[0].promised = p->ask.origin;
    sim_host_answer(s, d, p, &told);
}

/* Where owner 0 has it, all have it, of one step: open, or full and sure to be opened. */
void sim_fork_check(struct sim *s)
{
    const struct sim_part *lead = &s->guests->host[0].part;
    if (!lead->kept || atomic_load(&lead->head.ready) == 0)
        return;
    for (uint32_t i = 0; i < s->config.daemons; i++) {
        const struct sim_part *part = &s->guests->host[i].part;
        if (!part->kept || atomic_load(&part->head.origin) != atomic_load(&lead->head.origin))
            sim_broken(s, "P3", i, SIM_NOBODY, "a fork is there at owner 0, and not here");
        if (part->step != lead->step || part->mark != lead->mark)
            sim_broken(s, "P1", i, SIM_NOBODY, "a fork of step %" PRIu64 " is not that",
                       lead->step);
    }
}

/* -- Who asks ---------------------------------------------------------------------------------- */

enum forking { /* what is asked, of owner 0 or of the others */
               FORKER_PAUSES,
               FORKER_BEGINS,
               FORKER_BEGINS_REST,
               FORKER_FORKS,
               FORKER_FILLS,
               FORKER_FILLS_REST,
               FORKER_OPENS,
               FORKER_OPENS_REST,
               FORKER_LOOKS,
               FORKER_LOOKS_REST,
               FORKER_HOLDS,
               FORKER_HOLDS_REST,
               FORKER_GOES,
               FORKER_GOES_REST,
               FORKER_UNDOES,
};

static void pause_forker(struct sim *s, struct sim_guest *g)
{
    g->doing = FORKER_PAUSES;
    g->since_ns = s->now_ns;
    for (uint32_t i = 0; i < s->config.daemons; i++)
        g->thread[i].waits = false;
    sim_guest_after(s, g, sim_below(s, 100 * MS));
}

/* first: owner 0 alone; else the others, of which there may be none. */
static void ask(struct sim *s, struct sim_guest *g, uint32_t doing, enum sim_ask_kind kind,
                bool first)
{
    const struct sim_ask ask = { .kind = kind,
                                 .step = g->step,
                                 .origin = g->origin,
                                 .first = first ? 0 : g->first,
                                 .told = !first };
    g->doing = doing;
    if (first)
        sim_guest_ask(s, g, 0, &ask);
    else
        sim_guest_ask_all(s, g, 1, &ask);
}

static uint64_t furthest(const struct sim *s)
{
    uint64_t step = 0;
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if (s->daemon[i].alive && step_collecting(s->daemon[i].core) > step)
            step = step_collecting(s->daemon[i].core);
    return step;
}

static void fork_all(struct sim *s, struct sim_guest *g)
{
    g->step = furthest(s) + g->lead;
    const struct sim_ask ask = { .kind = ASK_FORK, .step = g->step, .origin = g->origin };
    g->mark = sim_back_mark(s);
    g->doing = FORKER_FORKS;
    sim_guest_ask_all(s, g, 0, &ask);
    sim_guest_after(s, g, REACH_NS);
}

/* The worst of the answers; ESTEP is less than others. */
static int status_of(const struct sim *s, const struct sim_guest *g, uint32_t first, uint32_t end)
{
    int status = SHD_OK;
    for (uint32_t i = first; i < end && i < s->config.daemons; i++)
        if (g->thread[i].told.status != SHD_OK && (status == SHD_OK || status == SHD_ESTEP))
            status = g->thread[i].told.status;
    return status;
}

static uint32_t count_words(const struct sim *s, const struct sim_guest *g, uint32_t first,
                            enum sim_word word)
{
    uint32_t count = 0;
    for (uint32_t i = first; i < s->config.daemons; i++)
        count += g->thread[i].told.word == word;
    return count;
}

static void choose(struct sim *s, struct sim_guest *g)
{
    const bool makes = g == &s->guests->guest[SIM_READERS]; /* one of them */
    const uint64_t what = makes ? sim_below(s, 3) : 1 + sim_below(s, 2);
    g->lead = g->first = 0;
    if (what == 0) {
        g->origin = sim_random(s) | 1;
        ask(s, g, FORKER_BEGINS, ASK_BEGIN, true);
    } else if (what == 1)
        ask(s, g, FORKER_LOOKS, ASK_LOOK, true);
    else
        ask(s, g, FORKER_HOLDS, ASK_HOLD, true);
}

static void forked(struct sim *s, struct sim_guest *g, bool timer)
{
    const int status = timer ? SHD_ETIMEDOUT : status_of(s, g, 0, SIM_DAEMONS);
    const struct rewind_mark now = sim_back_mark(s);
    if (status == SHD_OK && rewind_between(&g->mark, &now)) {
        g->lead = 0;
        fork_all(s, g);
    } else if (status == SHD_OK) {
        ask(s, g, FORKER_FILLS, ASK_FULL, true);
    } else if (status == SHD_ESTEP || status == SHD_ETIMEDOUT || status == SHD_EBUSY) {
        g->lead = status == SHD_ESTEP && g->lead < LEAD_MAX ? 2 * g->lead + 1 : 0;
        fork_all(s, g);
    } else
        pause_forker(s, g); /* a daemon has died and forgotten its part; the others' goes with us */
}

/* Owner 0's word is known: all others have it, or it is gone there meanwhile. */
static void looked(struct sim *s, struct sim_guest *g)
{
    const struct sim_part *lead = &s->guests->host[0].part;
    const bool is_there = lead->kept && atomic_load(&lead->head.ready) != 0 &&
                          lead->head.instance == g->first;
    const int status = status_of(s, g, 1, SIM_DAEMONS);
    if (is_there && status != SHD_OK && status != SHD_EBUSY)
        sim_broken(s, "P3", SIM_NOBODY, SIM_NOBODY, "a fork is there at owner 0, others say none");
    s->result.forks += is_there && status == SHD_OK;
    pause_forker(s, g);
}

static void go_on_making(struct sim *s, struct sim_guest *g)
{
    const struct sim_told *told = &g->thread[0].told;
    switch ((enum forking)g->doing) {
    case FORKER_BEGINS:
        if (told->status == SHD_OK && told->word == WORD_YOURS)
            ask(s, g, FORKER_BEGINS_REST, ASK_BEGIN, false);
        else
            pause_forker(s, g);
        break;
    case FORKER_BEGINS_REST:
        if (status_of(s, g, 1, SIM_DAEMONS) == SHD_OK &&
            count_words(s, g, 1, WORD_YOURS) == s->config.daemons - 1)
            fork_all(s, g);
        else
            pause_forker(s, g);
        break;
    case FORKER_FILLS:
        if (told->status == SHD_OK)
            ask(s, g, FORKER_FILLS_REST, ASK_FULL, false);
        else
            pause_forker(s, g);
        break;
    case FORKER_FILLS_REST:
        if (status_of(s, g, 1, SIM_DAEMONS) == SHD_OK)
            ask(s, g, FORKER_OPENS, ASK_OPEN, true);
        else
            pause_forker(s, g);
        break;
    case FORKER_OPENS:
        if (told->status == SHD_OK)
            ask(s, g, FORKER_OPENS_REST, ASK_OPEN, false);
        else
            pause_forker(s, g);
        break;
    default:
        pause_forker(s, g);
    }
}

static void go_on_dropping(struct sim *s, struct sim_guest *g)
{
    const struct sim_told *told = &g->thread[0].told;
    switch ((enum forking)g->doing) {
    case FORKER_LOOKS:
        g->origin = told->origin;
        g->first = told->instance;
        if (told->status == SHD_OK)
            ask(s, g, FORKER_LOOKS_REST, ASK_LOOK, false);
        else
            pause_forker(s, g);
        break;
    case FORKER_LOOKS_REST:
        looked(s, g);
        break;
    case FORKER_HOLDS:
        g->first = told->word == WORD_HELD ? told->instance : 0;
        ask(s, g, told->status == SHD_OK ? FORKER_HOLDS_REST : FORKER_UNDOES,
            told->status == SHD_OK ? ASK_HOLD : ASK_UNDO, false);
        break;
    case FORKER_HOLDS_REST:
        if (status_of(s, g, 1, SIM_DAEMONS) != SHD_OK)
            sim_guest_ask_all(s, g, 0, &(struct sim_ask){ .kind = ASK_UNDO });
        else
            ask(s, g, FORKER_GOES, ASK_GO, true);
        if (g->doing == FORKER_HOLDS_REST)
            g->doing = FORKER_UNDOES;
        break;
    case FORKER_GOES:
        if (told->word == WORD_GONE)
            ask(s, g, FORKER_GOES_REST, ASK_GO, false);
        else
            ask(s, g, FORKER_HOLDS, ASK_HOLD, true); /* a successor holds nothing */
        break;
    default:
        pause_forker(s, g);
    }
}

void sim_forker_go_on(struct sim *s, struct sim_guest *g, bool timer)
{
    const enum forking doing = (enum forking)g->doing;
    bool again = true;
    if (doing == FORKER_PAUSES) {
        if (timer)
            choose(s, g);
        return;
    }
    if (timer && doing == FORKER_FORKS)
        forked(s, g, /* timer= */ true);
    else if (timer || !sim_guest_all_in(s, g))
        again = false;
    else if (doing == FORKER_FORKS)
        forked(s, g, /* timer= */ false);
    else if (doing < FORKER_LOOKS)
        go_on_making(s, g);
    else
        go_on_dropping(s, g);
    if (again && g->doing != FORKER_PAUSES && sim_guest_all_in(s, g))
        sim_forker_go_on(s, g, /* timer= */ false); /* one daemon: there are no others to ask */
}
