/* Snapshots at a simulated daemon, and going back to them; see sim_back.h, and
 * daemon/model/rewind.h and snapshots.h for what is modelled here. */
#include "tests/sim/sim_back.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"
#include "tests/sim/sim.h"
#include "tests/sim/sim_guest.h"

#define LOOK_NS MS

/* -- What must be --------------------------------------------------------------------------------
 */

/* Each round comes after the one before, at each owner. */
void sim_back_round(struct sim *s, struct sim_daemon *d)
{
    const uint64_t round = sim_round(step_collecting(d->core), step_attempt(d->core));
    if (round < d->back.round)
        sim_broken(s, "rounds", sim_daemon_index(s, d), SIM_NOBODY,
                   "round %" PRIu64 " comes after round %" PRIu64, round, d->back.round);
    d->back.round = round;
}

/* Owner 0's word: from here on the states are others, beyond that step. */
static void decided(struct sim *s, uint64_t step, uint64_t attempt)
{
    const struct sim_line *before = sim_line(s);
    struct sim_line *line = &s->line[(s->era + 1) & 1];
    for (uint32_t i = 0; i < s->config.daemons; i++)
        if (s->daemon[i].back.round >= sim_round(step, attempt))
            sim_broken(s, "rounds", i, SIM_NOBODY,
                       "a rewind begins round %" PRIu64 ", and this owner has begun %" PRIu64,
                       sim_round(step, attempt), s->daemon[i].back.round);
    CHECK(step <= before->decided);
    memcpy(line->decision, before->decision, step * sizeof *line->decision);
    memcpy(line->version, before->version, (step + 1) * sizeof *line->version);
    memcpy(line->salt, before->salt, step * sizeof *line->salt);
    for (uint64_t i = step; i < SIM_STEPS; i++)
        line->salt[i] = attempt;
    line->attempt = attempt;
    line->base = line->decided = step;
    s->era++;
    s->gone[s->era] = (struct rewind_seen){ attempt, step };
    if (s->gone_on > step)
        s->gone_on = step;
    s->last_decided_ns = s->now_ns;
    s->result.rewinds++;
    sim_note(s, "goes back", 0, SIM_NOBODY, step, 0, 0);
}

/* The snapshot's, and what was given since where that is to stay. A change that is asked for may be
 * one of those. */
static void settings_went(struct sim *s, struct sim_daemon *d, const struct sim_snapshot *snapshot)
{
    const struct ledger_rewind *r = d->ledger.rewind;
    struct settings_kept room, want = snapshot->more.kept;
    const struct settings_kept *are = ledger_settings(&d->ledger, &room);
    const bool stay = r->kept_attempt == atomic_load(&r->last);
    const bool known = settings_keep(&s->setter.kept, r->last_step, &want);
    struct settings x, y;
    for (uint64_t step = r->last_step; stay && known && !s->setter.asking && step < SIM_STEPS;
         step++) {
        settings_at(are, step, &x, NULL);
        settings_at(&want, step, &y, NULL);
        for (uint32_t i = 0; i < x.count || i < y.count; i++)
            if (!(setting_get(&x, i) == setting_get(&y, i) ||
                  (isnan(setting_get(&x, i)) && isnan(setting_get(&y, i)))))
                sim_broken(s, "P3", 0, SIM_NOBODY,
                           "went back to step %" PRIu64 ", and of step %" PRIu64 " setting %" PRIu32
                           " is %g, which was %g",
                           r->last_step, step, i, setting_get(&x, i), setting_get(&y, i));
    }
    s->setter.kept = stay ? *are : snapshot->more.kept;
    s->setter.asking = false;
}

/* It has gone along: with the rewind that was decided, and no other. */
static void went(struct sim *s, struct sim_daemon *d, const struct sim_snapshot *snapshot)
{
    const struct ledger_rewind *r = d->ledger.rewind;
    const uint32_t owner = sim_daemon_index(s, d);
    const struct rewind_seen *gone = &s->gone[d->back.era + 1];
    if (d->back.era + 1 != s->era || atomic_load(&r->last) != gone->attempt ||
        r->last_step != gone->step)
        sim_broken(s, "P3", owner, SIM_NOBODY,
                   "went back to step %" PRIu64 " (attempt %" PRIu64 "), and not to %" PRIu64,
                   r->last_step, (uint64_t)atomic_load(&r->last), gone->step);
    d->back.era++;
    d->commits_seen = gone->step;
    d->credited_round = 0;
    memset(d->credited, 0, sizeof d->credited);
    if (owner == 0)
        settings_went(s, d, snapshot);
}

void sim_back_check_end(struct sim *s, const struct sim_daemon *d)
{
    const uint64_t last = atomic_load(&d->ledger.rewind->last);
    if (d->back.era != s->era || last != s->gone[s->era].attempt)
        sim_broken(s, "P3", sim_daemon_index(s, d), SIM_NOBODY,
                   "has not gone along with the last rewind");
}

struct rewind_seen sim_back_seen(const struct sim *s, bool *ret_apart)
{
    struct rewind_seen boards[SIM_DAEMONS];
    for (uint32_t i = 0; i < s->config.daemons; i++)
        boards[i] = s->daemon[i].back.board;
    return rewind_newest_of(boards, s->config.daemons, ret_apart);
}

struct rewind_mark sim_back_mark(const struct sim *s)
{
    struct rewind_mark mark;
    mark.attempt = sim_back_seen(s, &mark.apart).attempt;
    return mark;
}

/* -- Snapshots -----------------------------------------------------------------------------------
 */

static void give_up(struct sim_daemon *d, uint32_t item)
{
    d->back.snapshots[item].ready = false;
    d->back.set.items[item].state = SNAPSHOT_FREE;
}

static void trim(struct sim_daemon *d)
{
    uint32_t item;
    while ((item = snapshot_set_excess(&d->back.set, &d->ledger)) != SNAPSHOT_NO_ITEM)
        give_up(d, item);
    while ((item = snapshot_set_spare(&d->back.set)) != SNAPSHOT_NO_ITEM)
        d->back.set.items[item].state = SNAPSHOT_NONE;
}

static void prepare(struct sim *s, struct sim_daemon *d)
{
    struct sim_back *b = &d->back;
    if (b->making || snapshot_set_in(&b->set, SNAPSHOT_FREE) != SNAPSHOT_NO_ITEM ||
        snapshot_set_in(&b->set, SNAPSHOT_NONE) == SNAPSHOT_NO_ITEM)
        return;
    b->making = true;
    sim_daemon_after(s, d, sim_below(s, 3 * MS), EV_BACK, 1);
}

static void begin_copy(struct sim *s, struct sim_daemon *d, uint32_t item)
{
    struct sim_snapshot *snapshot = &d->back.snapshots[item];
    const struct step_blob blob = step_last_blob(d->core);
    CHECK(blob.bytes <= sizeof snapshot->blob);
    step_rewind_take(d->core, &snapshot->record, &snapshot->more, snapshot->updates,
                     snapshot->blob);
    CHECK(step_rewind_window_bytes(&d->ledger) <= sizeof snapshot->window);
    step_rewind_take_window(d->core, snapshot->window);
    FAIL_POINT("sim:snapshot:head");
    snapshot_set_begin(&d->back.set, item, snapshot->record.step);
    sim_kernel_copy(s, d, snapshot->blocks, (struct sim_copy){ .what = SIM_COPY_SNAPSHOT }, 0,
                    sim_flat_count(s, sim_daemon_index(s, d)));
}

void sim_back_moved(struct sim *s, struct sim_daemon *d)
{
    if (!s->config.rewinds || sim_back_busy(&d->back))
        return;
    const uint32_t item = snapshot_set_next(&d->back.set, &d->ledger, d->core);
    if (item != SNAPSHOT_NO_ITEM)
        begin_copy(s, d, item);
    if (ledger_snapshot_every(atomic_load(&d->ledger.rewind->options)) > 0)
        prepare(s, d);
}

static void copied(struct sim *s, struct sim_daemon *d)
{
    struct sim_back *b = &d->back;
    uint32_t item;
    const bool good = snapshot_set_copied(&b->set, &d->ledger, true, &item);
    struct sim_snapshot *snapshot = &b->snapshots[item];
    if (!good) {
        give_up(d, item);
        return;
    }
    const uint32_t owner = sim_daemon_index(s, d);
    const uint64_t step = snapshot->record.step;
    if (sim_hash_of(s, owner, snapshot->blocks) !=
        sim_version_hash(s, sim_line_of(s, d), step, owner))
        sim_broken(s, "P1", owner, SIM_NOBODY, "what is kept as step %" PRIu64 " is not that",
                   step);
    FAIL_POINT("sim:snapshot:ready");
    snapshot->ready = true;
    FAIL_POINT("sim:snapshot:trim");
    b->set.items[item].state = SNAPSHOT_READY;
    s->result.snapshots++;
    trim(d);
}

/* -- Going back ----------------------------------------------------------------------------------
 */

/* The arrays are there. */
static void rewound(struct sim_daemon *d, uint64_t step)
{
    struct sim_back *b = &d->back;
    const uint32_t at = snapshot_set_find(&b->set, step);
    uint32_t item;
    CHECK(at != SNAPSHOT_NO_ITEM);
    while ((item = snapshot_set_later(&b->set, step)) != SNAPSHOT_NO_ITEM)
        give_up(d, item);
    d->put = 0; /* the model goes back to an earlier step */
    step_rewind_put_window(&d->ledger, b->snapshots[at].window);
    step_rewind_done(&d->ledger, &b->snapshots[at].record, &b->snapshots[at].more,
                     b->snapshots[at].updates, b->snapshots[at].blob);
}

static void say(struct sim *s, struct sim_daemon *d)
{
    for (uint32_t u = 0; u < s->config.units; u++)
        d->board[u] = step_now(d->core);
    d->board_attempt = step_attempt(d->core);
    d->back.board = s->gone[d->back.era];
    d->back.unpublished = false;
}

static void arrive(struct sim *s, struct sim_daemon *d)
{
    const uint64_t step = d->ledger.rewind->step;
    const uint32_t at = snapshot_set_find(&d->back.set, step);
    rewound(d, step);
    went(s, d, &d->back.snapshots[at]);
    sim_daemon_core(s, d);
    sim_back_round(s, d);
    for (uint32_t u = 0; u < s->config.units; u++)
        sim_check_params(s, d, u, step);
    say(s, d);
    d->back.state = BACK_NONE;
    sim_note(s, "is back", sim_daemon_index(s, d), SIM_NOBODY, step, 0, 0);
    sim_daemon_wake(s);
    sim_daemon_moved(s, d);
}

static void queue_arrays(struct sim *s, struct sim_daemon *d)
{
    const uint32_t at = snapshot_set_find(&d->back.set, d->ledger.rewind->step);
    CHECK(at != SNAPSHOT_NO_ITEM);
    for (uint32_t u = 0; u < s->config.units; u++)
        sim_pins_before_update(s, d, u);
    d->back.unpublished = true;
    d->back.state = BACK_COPYING;
    sim_kernel_copy(s, d, d->back.snapshots[at].blocks, (struct sim_copy){ .what = SIM_COPY_BACK },
                    0, sim_flat_count(s, sim_daemon_index(s, d)));
}

static void look(struct sim *s, struct sim_daemon *d)
{
    struct step_actions actions;
    int r = SHD_PENDING;
    if (d->back.state == BACK_DROPPING) {
        while ((r = step_rewind_drop(d->core, &actions)) == SHD_PENDING && actions.count > 0)
            sim_daemon_take(s, d, &actions);
        if (r == SHD_OK)
            queue_arrays(s, d);
    }
    if (d->back.state == BACK_COPIED)
        arrive(s, d);
    else
        sim_daemon_after(s, d, LOOK_NS, EV_BACK, 0);
}

void sim_back_copied(struct sim *s, struct sim_daemon *d, bool back)
{
    if (!back) {
        copied(s, d);
        return;
    }
    CHECK(d->back.state == BACK_COPYING);
    d->back.state = BACK_COPIED;
}

void sim_back_event(struct sim *s, struct sim_daemon *d, bool memory_made)
{
    if (!memory_made) {
        look(s, d);
        return;
    }
    const uint32_t item = snapshot_set_in(&d->back.set, SNAPSHOT_NONE);
    d->back.making = false;
    CHECK(item != SNAPSHOT_NO_ITEM);
    give_up(d, item);
    sim_back_moved(s, d);
}

/* attempt 0: owner 0's word. */
static int begin(struct sim *s, struct sim_daemon *d, uint64_t step, uint64_t attempt)
{
    struct shd_err e = { 0 };
    const uint32_t owner = sim_daemon_index(s, d);
    const uint32_t item = snapshot_set_find(&d->back.set, step);
    const int r = step_rewind(d->core, step, attempt, &d->back.snapshots[item].more, &e);
    if (r == SHD_PENDING)
        return SHD_EBUSY;
    if (r != SHD_OK)
        sim_broken(s, "P4", owner, SIM_NOBODY, "cannot go back: %s", e.text);
    if (owner == 0)
        decided(s, step, d->ledger.rewind->attempt);
    d->back.state = BACK_DROPPING;
    sim_daemon_after(s, d, US, EV_BACK, 0);
    return SHD_EBUSY;
}

static int answer(struct sim *s, struct sim_daemon *d, const struct wire_rewind *q)
{
    struct rewind_ask ask = { q->step, q->attempt, q->consent, q->keep_settings };
    const bool has = snapshot_set_find(&d->back.set, q->step) != SNAPSHOT_NO_ITEM;
    switch (q->what) {
    case WIRE_REWIND_HOLD:
        if (d == s->daemon)
            ask.consent = s->now_ns + 1;
        if (!step_rewind_may_hold(&d->ledger, &ask))
            return SHD_ESTEP;
        if (!has)
            return SHD_ENOENT;
        step_rewind_hold(&d->ledger, &ask);
        return SHD_OK;
    case WIRE_REWIND_GO: {
        const enum rewind_goes goes = step_rewind_goes(&d->ledger, &ask);
        if (goes != REWIND_GOES)
            return goes == REWIND_GONE ? SHD_OK : SHD_ESTEP;
        return has ? begin(s, d, q->step, 0) : SHD_ENOENT;
    }
    case WIRE_REWIND_FOLLOW:
        if (step_rewind_followed(&d->ledger, q->attempt))
            return SHD_OK;
        if (!has)
            sim_broken(s, "P3", sim_daemon_index(s, d), SIM_NOBODY,
                       "is to go back to step %" PRIu64 ", and has given that up", q->step);
        return begin(s, d, q->step, q->attempt);
    }
    CHECK(false);
    return SHD_EINTERNAL;
}

int sim_back_ask(struct sim *s, struct sim_daemon *d, const struct wire_rewind *q,
                 struct wire_rewound *ret_rewound)
{
    const struct ledger_rewind *r = d->ledger.rewind;
    const int status = sim_back_busy(&d->back) ? SHD_EBUSY : answer(s, d, q);
    *ret_rewound = (struct wire_rewound){ .step = r->last_step,
                                          .attempt = atomic_load(&r->last),
                                          .consent = r->consent };
    return status;
}

/* -- Guests' requests ----------------------------------------------------------------------------
 */

static int take(struct sim *s, struct sim_daemon *d, uint64_t step)
{
    const int r = snapshot_set_ask(&d->back.set, d->core, step);
    if (r != SHD_EBUSY || d->back.set.want != step)
        return r;
    prepare(s, d);
    sim_back_moved(s, d);
    return r;
}

static void set_options(struct sim *s, struct sim_daemon *d, const struct sim_ask *ask)
{
    atomic_store(&d->ledger.rewind->options,
                 ledger_snapshot_options(ask->step, (uint32_t)ask->origin));
    trim(d);
    sim_back_moved(s, d);
}

static void list(const struct sim_daemon *d, struct sim_told *told)
{
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (d->back.set.items[i].state == SNAPSHOT_READY)
            told->steps[told->count++] = d->back.set.items[i].step;
}

void sim_back_serve(struct sim *s, struct sim_daemon *d, const struct sim_passing *p)
{
    struct sim_told told = { .status = SHD_OK };
    if (p->ask.kind == ASK_REWIND)
        told.status = sim_back_ask(s, d, &p->ask.rewind, &told.rewound);
    else if (sim_back_busy(&d->back))
        told.status = SHD_EBUSY;
    else if (p->ask.kind == ASK_SNAPSHOT)
        told.status = take(s, d, p->ask.step);
    else if (p->ask.kind == ASK_EVERY)
        set_options(s, d, &p->ask);
    else
        list(d, &told);
    sim_host_answer(s, d, p, &told);
}

/* -- Life ----------------------------------------------------------------------------------------
 */

/* A predecessor's snapshots; and what it had begun is finished, before all else. */
void sim_back_start(struct sim *s, struct sim_daemon *d)
{
    const uint32_t owner = sim_daemon_index(s, d);
    struct sim_back *b = &d->back;
    struct shd_err e = { 0 };
    uint64_t step;
    snapshot_set_init(&b->set);
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (b->snapshots[i].ready)
            b->set.items[i] = (struct snapshot_item){ .state = SNAPSHOT_READY,
                                                      .step = b->snapshots[i].record.step };
    if (!ledger_rewinding(&d->ledger, &step))
        return;
    if (owner == 0 && d->ledger.rewind->attempt != s->gone[s->era].attempt)
        decided(s, step, d->ledger.rewind->attempt); /* it was killed in saying so */
    const uint32_t at = snapshot_set_find(&b->set, step);
    if (at == SNAPSHOT_NO_ITEM)
        sim_broken(s, "P3", owner, SIM_NOBODY,
                   "was going back to step %" PRIu64 ", and has no snapshot of that", step);
    b->unpublished = true;
    for (uint32_t i = 0; i < sim_flat_count(s, owner); i++) {
        *sim_flat_param(s, d, i) = b->snapshots[at].blocks[i];
        FAIL_POINT("sim:back:block");
    }
    rewound(d, step);
    struct ledger looked_at;
    if (ledger_adopt(&looked_at, d->ledger_memory, d->ledger_bytes, &e) != SHD_OK)
        sim_broken(s, "P3", owner, SIM_NOBODY, "the ledger is refused: %s", e.text);
}

/* The core is there, too; killed before, a successor does all of this. */
void sim_back_started(struct sim *s, struct sim_daemon *d)
{
    const struct ledger_rewind *r = d->ledger.rewind;
    sim_back_round(s, d);
    if (d->back.era < s->era && atomic_load(&r->last) == s->gone[d->back.era + 1].attempt) {
        const uint32_t at = snapshot_set_find(&d->back.set, r->last_step);
        CHECK(at != SNAPSHOT_NO_ITEM);
        went(s, d, &d->back.snapshots[at]);
        for (uint32_t u = 0; u < s->config.units; u++)
            sim_check_params(s, d, u, r->last_step);
    }
    d->back.board = s->gone[d->back.era];
    d->back.unpublished = false;
}

void sim_back_kill(struct sim_daemon *d)
{
    d->back.state = BACK_NONE;
    d->back.making = false;
}
