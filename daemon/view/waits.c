/* See waits.h and docs/status.md. Only the state of processes is looked up now.
 *
 * A missing micro-batch is with the sessions that have it on lease. Where shares are fixed it is
 * with the sender of an earlier step. Where neither is known it may be with any trainer that does
 * not wait itself. */
#include "daemon/view/waits.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/view/snapshot.h"
#include "proto/base/clock.h"
#include "proto/base/headline.h"
#include "proto/base/process.h"

#define PEOPLE_MAX 8u
#define LISTED_MAX 3u /* micro-batches named in a sentence */
#define TEXT_BYTES 1024u
_Static_assert(PEOPLE_MAX <= HEADLINE_ON_MAX, "all of a wait");

struct person {
    uint64_t session; /* 0: it has gone, or is this daemon */
    pid_t pid;
    const char *name;
    const char *state; /* NULL: not looked up */
};

struct wait {
    enum view_wait_kind kind;
    struct person who;
    struct person on[PEOPLE_MAX];
    uint32_t on_count;
    uint64_t since_ns;
    char text[TEXT_BYTES];
};

struct waits {
    const struct view_snapshot *s;
    struct wait *items; /* owned */
    uint32_t count, capacity;
    bool failed;
};

const char *view_wait_kind_name(enum view_wait_kind kind)
{
    static const char *const names[VIEW_WAIT_KINDS] = {
        [VIEW_WAIT_GRADIENTS] = "gradients", [VIEW_WAIT_TURN] = "turn",
        [VIEW_WAIT_UNIT] = "unit",           [VIEW_WAIT_SLOT] = "slot",
        [VIEW_WAIT_COMMIT] = "commit",       [VIEW_WAIT_TRANSFER] = "transfer",
        [VIEW_WAIT_JOIN] = "join",           [VIEW_WAIT_WORKERS] = "workers",
    };
    return names[kind];
}

__attribute__((format(printf, 2, 3))) static void say(struct wait *w, const char *fmt, ...)
{
    const size_t used = strlen(w->text);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(w->text + used, sizeof w->text - used, fmt, ap);
    va_end(ap);
}

/* -- People -------------------------------------------------------------------------------------
 */

static struct person person_of(const struct view_session *vs)
{
    return (struct person){ .session = vs->id, .pid = vs->pid, .name = vs->name };
}

static struct person person_of_sender(const struct view_snapshot *s,
                                      const struct metrics_sender *sender)
{
    const struct view_session *vs = view_session_find(s, sender->session);
    if (vs != NULL)
        return person_of(vs);
    return (struct person){ .pid = sender->pid,
                            .name = sender->name,
                            .state = process_state(sender->pid, sender->start_time) };
}

static void blame(const struct view_snapshot *s, struct wait *w, struct person p)
{
    for (uint32_t i = 0; i < w->on_count; i++)
        if (w->on[i].session == p.session && w->on[i].pid == p.pid)
            return;
    if (w->on_count == PEOPLE_MAX)
        return;
    const struct view_session *vs = view_session_find(s, p.session);
    if (vs != NULL)
        p.state = process_state(vs->pid, vs->start_time);
    w->on[w->on_count++] = p;
}

static void say_people(struct wait *w)
{
    for (uint32_t i = 0; i < w->on_count; i++)
        say(w, "%s%s (pid %d, %s)", i > 0 ? ", " : "", w->on[i].name, (int)w->on[i].pid,
            w->on[i].state);
}

/* -- Micro-batches ------------------------------------------------------------------------------
 */

static void say_group(struct wait *w, const struct view_model *vm, uint32_t group)
{
    const uint32_t a = vm->spec->accumulate;
    if (a == 1)
        say(w, "%" PRIu32, group);
    else
        say(w, "%" PRIu32 "-%" PRIu32, group * a, group * a + a - 1);
}

static void say_missing(struct wait *w, const struct view_model *vm)
{
    const uint32_t listed = vm->missing_count < LISTED_MAX ? vm->missing_count : LISTED_MAX;
    say(w, "micro-batch%s ", vm->missing_total * vm->spec->accumulate > 1 ? "es" : "");
    for (uint32_t i = 0; i < listed; i++) {
        say(w, "%s", i > 0 ? ", " : "");
        say_group(w, vm, vm->missing[i].group);
    }
    if (vm->missing_total > listed)
        say(w, " and %" PRIu32 " more", (vm->missing_total - listed) * vm->spec->accumulate);
    say(w, " of step %" PRIu64, vm->collecting);
}

/* For all gradients of a step, or for all workers. */
static bool waits_for_all(const struct view_model *vm, uint64_t session)
{
    for (uint32_t i = 0; i < vm->waiting_count; i++)
        if ((vm->waiting_list[i].what == VIEW_WAITS_PREPARE ||
             vm->waiting_list[i].what == VIEW_WAITS_MEET) &&
            vm->waiting_list[i].session == session)
            return true;
    return false;
}

/* Trainers that may have a micro-batch of which no holder is known. */
static void blame_trainers(const struct view_snapshot *s, const struct view_model *vm,
                           struct wait *w)
{
    for (uint32_t i = 0; i < s->session_count; i++) {
        const struct view_session *vs = &s->sessions[i];
        if (vs->trains && vs->model == vm->handle && vs->id != w->who.session &&
            !waits_for_all(vm, vs->id))
            blame(s, w, person_of(vs));
    }
}

static void blame_missing(const struct view_snapshot *s, struct wait *w,
                          const struct view_missing *missing)
{
    for (uint32_t i = 0; i < 2; i++) {
        const struct view_session *vs = view_session_find(s, missing->holder[i]);
        if (vs != NULL)
            blame(s, w, person_of(vs));
    }
    if (missing->holder[0] == 0 && missing->sender.session != 0)
        blame(s, w, person_of_sender(s, &missing->sender));
}

/* only: one group; UINT32_MAX: all that are missing. */
static void blame_for(const struct view_snapshot *s, const struct view_model *vm, struct wait *w,
                      uint32_t only)
{
    for (uint32_t i = 0; i < vm->missing_count; i++)
        if (only == UINT32_MAX || vm->missing[i].group == only)
            blame_missing(s, w, &vm->missing[i]);
    const bool known = w->on_count > 0;
    if (!known)
        blame_trainers(s, vm, w);
    if (w->on_count == 0) {
        say(w, ": nobody is known to have %s", only == UINT32_MAX ? "them" : "it");
        return;
    }
    say(w, ": ");
    say_people(w);
    const bool one = only != UINT32_MAX || vm->missing_total == 1;
    say(w, " %s %s", known ? (w->on_count > 1 ? "have" : "has") : "may have", one ? "it" : "them");
}

/* -- Waits --------------------------------------------------------------------------------------
 */

static bool is_stopped(const struct person *p)
{
    return p->state != NULL && strcmp(p->state, "stopped") == 0;
}

static struct wait *add(struct waits *all, enum view_wait_kind kind, struct person who,
                        uint64_t since_ns)
{
    if (all->count == all->capacity) {
        const uint32_t capacity = all->capacity > 0 ? 2 * all->capacity : 16;
        struct wait *items = realloc(all->items, capacity * sizeof *items);
        if (items == NULL) {
            all->failed = true;
            return NULL;
        }
        all->items = items;
        all->capacity = capacity;
    }
    struct wait *w = &all->items[all->count++];
    *w = (struct wait){ .kind = kind, .who = who, .since_ns = since_ns };
    w->who.state = who.pid == getpid() ? "running" : NULL;
    const uint64_t taken_ns = all->s->taken_ns;
    const uint64_t waited_ns = taken_ns > since_ns ? taken_ns - since_ns : 0;
    /* A stopped process last spoke before it was stopped: it may have got what it says it waits
     * for. */
    const struct view_session *vs = view_session_find(all->s, who.session);
    if (vs != NULL)
        w->who.state = process_state(vs->pid, vs->start_time);
    say(w, "%s (pid %d%s) waits %.1f s for ", who.name, (int)who.pid,
        is_stopped(&w->who) ? ", stopped" : "", (double)waited_ns / NS_PER_S);
    return w;
}

static void add_gradients(struct waits *all, const struct view_model *vm,
                          const struct view_waiting *waiting)
{
    const struct view_session *vs = view_session_find(all->s, waiting->session);
    if (vs == NULL)
        return;
    struct wait *w = add(all, VIEW_WAIT_GRADIENTS, person_of(vs), waiting->since_ns);
    if (w == NULL)
        return;
    if (vm->missing_total == 0) {
        say(w, "the sums of step %" PRIu64 ": all gradients are here, they are being added",
            vm->collecting);
        return;
    }
    say_missing(w, vm);
    blame_for(all->s, vm, w, UINT32_MAX);
}

static void add_workers(struct waits *all, const struct view_model *vm,
                        const struct view_waiting *waiting)
{
    const struct view_session *vs = view_session_find(all->s, waiting->session);
    struct wait *w = vs != NULL ? add(all, VIEW_WAIT_WORKERS, person_of(vs), waiting->since_ns)
                                : NULL;
    if (w == NULL)
        return;
    say(w, "all workers, before values are put in step %" PRIu64 ": ", waiting->step);
    blame_trainers(all->s, vm, w);
    say_people(w);
    say(w, w->on_count == 0  ? "others are not attached"
           : w->on_count > 1 ? " have not come"
                             : " has not come");
}

static const struct view_waiting *oldest_turn(const struct view_model *vm, uint64_t session)
{
    const struct view_waiting *oldest = NULL;
    for (uint32_t i = 0; i < vm->waiting_count; i++) {
        const struct view_waiting *w = &vm->waiting_list[i];
        if (w->what == VIEW_WAITS_TURN && w->session == session &&
            (oldest == NULL || w->since_ns < oldest->since_ns))
            oldest = w;
    }
    return oldest;
}

static bool is_missing(const struct view_model *vm, uint32_t group)
{
    for (uint32_t i = 0; i < vm->missing_count; i++)
        if (vm->missing[i].group == group)
            return true;
    return false;
}

static void say_turn(const struct waits *all, const struct view_model *vm,
                     const struct view_waiting *turn, struct wait *w)
{
    say(w, " (unit '%s', micro-batch ", vm->spec->units[turn->unit].name);
    say_group(w, vm, turn->group);
    say(w, " of step %" PRIu64 "), behind micro-batch ", turn->step);
    say_group(w, vm, turn->needs);
    if (is_missing(vm, turn->needs))
        blame_for(all->s, vm, w, turn->needs);
    else
        say(w, ", which is being added");
}

static void add_turn(struct waits *all, const struct view_model *vm, const struct view_session *vs)
{
    const struct view_waiting *turn = oldest_turn(vm, vs->id);
    if (turn == NULL)
        return;
    struct wait *w = add(all, VIEW_WAIT_TURN, person_of(vs), turn->since_ns);
    if (w == NULL)
        return;
    say(w, "its gradient's turn");
    say_turn(all, vm, turn, w);
}

static void blame_committers(const struct view_snapshot *s, const struct view_model *vm,
                             struct wait *w)
{
    for (uint32_t i = 0; i < s->session_count; i++) {
        const struct view_session *vs = &s->sessions[i];
        if (vs->prepared_model == vm->handle && vs->prepared_step == vm->step)
            blame(s, w, person_of(vs));
    }
    if (w->on_count == 0)
        blame_trainers(s, vm, w);
    if (w->on_count == 0) {
        say(w, ", and no trainer is attached");
        return;
    }
    say(w, ", which is up to ");
    say_people(w);
}

/* A transfer over the session's link that brings the unit is under way. */
static bool is_coming(const struct view_snapshot *s, const struct view_session *vs, uint32_t unit)
{
    for (uint32_t i = 0; i < s->transfer_count; i++) {
        const struct view_transfer *t = &s->transfers[i];
        if (t->session == vs->id && t->what == VIEW_FETCH && t->unit == unit && t->begun_ns != 0)
            return true;
    }
    return false;
}

static void add_unit(struct waits *all, const struct view_model *vm, const struct view_session *vs,
                     const struct activity_span *now)
{
    struct wait *w = add(all, VIEW_WAIT_UNIT, person_of(vs), now->begin_ns);
    if (w == NULL)
        return;
    const bool known = now->unit < vm->spec->unit_count;
    say(w, "unit '%s' at step %" PRIu64, known ? vm->spec->units[now->unit].name : "?", now->step);
    if (known && is_coming(all->s, vs, now->unit))
        say(w, ": it is on its way from here by NCCL");
    else if (known && vm->units[now->unit].version == now->step)
        say(w, is_stopped(&w->who) ? ": it is published here, and the worker is stopped"
               : vm->owners > 1    ? ": it is published here, so it waits for another owner"
                                   : ": it is published here, the worker has not looked yet");
    else if (vm->phase == STEP_APPLYING || vm->missing_total == 0)
        say(w, vm->phase == STEP_SEALED ? ": the step before is not committed"
                                        : ": it is being updated");
    else {
        say(w, "; missing is ");
        say_missing(w, vm);
    }
    if (vm->phase == STEP_SEALED)
        blame_committers(all->s, vm, w);
    else if (vm->phase == STEP_OPEN && vm->missing_total > 0 && now->step > vm->step)
        blame_for(all->s, vm, w, UINT32_MAX);
}

static void add_slot(struct waits *all, const struct view_model *vm, const struct view_session *vs)
{
    struct wait *w = add(all, VIEW_WAIT_SLOT, person_of(vs), vs->now.begin_ns);
    const struct view_waiting *turn = oldest_turn(vm, vs->id);
    if (w == NULL)
        return;
    say(w, "a free gradient slot (it has %" PRIu32 ")", vs->slots);
    if (turn != NULL) {
        say(w, ": what it returned waits for its turn");
        say_turn(all, vm, turn, w);
    } else {
        say(w, ": what it returned is being added");
    }
}

static void add_commit(struct waits *all, const struct view_model *vm)
{
    const uint64_t sealed_ns = vm->metrics.sealed_ns;
    const struct person us = { .pid = getpid(), .name = all->s->daemon.device };
    struct wait *w = add(all, VIEW_WAIT_COMMIT, us, sealed_ns != 0 ? sealed_ns : all->s->taken_ns);
    if (w == NULL)
        return;
    say(w, "the commit of step %" PRIu64 " of '%s'", vm->step, vm->spec->name);
    blame_committers(all->s, vm, w);
}

/* A transfer that is under way waits for a worker that takes no part in it. A join that has not
 * begun is the worker's wait for this daemon. */
static void add_transfer(struct waits *all, const struct view_transfer *t)
{
    const struct view_session *vs = view_session_find(all->s, t->session);
    const struct view_model *vm = view_model_find(all->s, t->model);
    const struct person us = { .pid = getpid(), .name = all->s->daemon.device, .state = "running" };
    const bool join = t->what == VIEW_JOIN, begun = t->begun_ns != 0;
    if (vs == NULL || vm == NULL || (!begun && !join))
        return;
    struct wait *w = add(all, join ? VIEW_WAIT_JOIN : VIEW_WAIT_TRANSFER,
                         begun ? us : person_of(vs), begun ? t->begun_ns : t->since_ns);
    if (w == NULL)
        return;
    blame(all->s, w, begun ? person_of(vs) : us);
    say_people(w);
    if (join) {
        say(w, begun ? " to connect by NCCL" : " to begin to connect by NCCL");
    } else {
        say(w, " to %s unit '%s'", t->what == VIEW_FETCH ? "take" : "send",
            vm->spec->units[t->unit].name);
        if (t->what == VIEW_RETURN) {
            say(w, ", micro-batch ");
            say_group(w, vm, t->group);
        }
        say(w, " of step %" PRIu64 " by NCCL", t->step);
    }
    if (begun)
        say(w, "; given up after %.0f s", (double)t->timeout_ns / NS_PER_S);
}

/* A worker shows owner 0 alone what it does. Other owners go by its oldest request. */
static void add_fetch(struct waits *all, const struct view_session *vs)
{
    const struct view_transfer *oldest = NULL;
    for (uint32_t i = 0; i < all->s->transfer_count; i++) {
        const struct view_transfer *t = &all->s->transfers[i];
        const struct view_model *vm = view_model_find(all->s, t->model);
        if (t->session == vs->id && t->what == VIEW_FETCH && t->begun_ns == 0 && vm != NULL &&
            vm->units[t->unit].version < t->step &&
            (oldest == NULL || t->since_ns < oldest->since_ns))
            oldest = t;
    }
    if (oldest == NULL || vs->now.what != ACTIVITY_SILENT)
        return;
    const struct activity_span now = { .unit = oldest->unit,
                                       .step = oldest->step,
                                       .begin_ns = oldest->since_ns };
    add_unit(all, view_model_find(all->s, oldest->model), vs, &now);
}

static void add_session(struct waits *all, const struct view_session *vs)
{
    add_fetch(all, vs);
    const struct view_model *vm = view_model_find(all->s, vs->model);
    if (vm == NULL)
        return;
    add_turn(all, vm, vs);
    if (vs->now.what == ACTIVITY_WAIT_UNIT)
        add_unit(all, vm, vs, &vs->now);
    if (vs->now.what == ACTIVITY_WAIT_SLOT)
        add_slot(all, vm, vs);
}

static void find_all(struct waits *all)
{
    for (uint32_t i = 0; i < all->s->model_count; i++) {
        const struct view_model *vm = &all->s->models[i];
        for (uint32_t k = 0; k < vm->waiting_count; k++)
            if (vm->waiting_list[k].what == VIEW_WAITS_MEET)
                add_workers(all, vm, &vm->waiting_list[k]);
            else if (vm->waiting_list[k].what != VIEW_WAITS_TURN)
                add_gradients(all, vm, &vm->waiting_list[k]);
        if (vm->phase == STEP_SEALED)
            add_commit(all, vm);
    }
    for (uint32_t i = 0; i < all->s->session_count; i++)
        add_session(all, &all->s->sessions[i]);
    for (uint32_t i = 0; i < all->s->transfer_count; i++)
        add_transfer(all, &all->s->transfers[i]);
}

/* -- JSON ---------------------------------------------------------------------------------------
 */

static int longest_first(const void *a, const void *b)
{
    const struct wait *x = a, *y = b;
    return x->since_ns < y->since_ns ? -1 : x->since_ns > y->since_ns;
}

static json_t *person_json(const struct person *p)
{
    return json_pack("{s:I, s:i, s:s}", "session", (json_int_t)p->session, "pid", (int)p->pid,
                     "name", p->name);
}

static json_t *wait_json(const struct wait *w, double waited_s)
{
    json_t *on = json_array();
    for (uint32_t i = 0; i < w->on_count; i++) {
        json_t *p = person_json(&w->on[i]);
        json_object_set_new(p, "state", json_string(w->on[i].state));
        json_array_append_new(on, p);
    }
    return json_pack("{s:o, s:s, s:s, s:f, s:o}", "who", person_json(&w->who), "kind",
                     view_wait_kind_name(w->kind), "text", w->text, "since_s", waited_s, "on", on);
}

static double since_s(const struct view_snapshot *s, const struct wait *w)
{
    return s->taken_ns > w->since_ns ? (double)(s->taken_ns - w->since_ns) / NS_PER_S : 0.0;
}

static struct headline_process process_of(const struct person *p)
{
    return (struct headline_process){ .pid = p->pid, .name = p->name, .state = p->state };
}

/* What this daemon knows of who holds training up; others may know more. null: nobody does. */
static json_t *headline_json(const struct waits *all)
{
    const struct view_snapshot *s = all->s;
    const struct headline_daemon us = {
        .process = { .pid = getpid(), .name = s->daemon.device, .state = "running" },
        .answers = true,
    };
    struct headline_view view = { .daemons = &us, .daemon_count = 1 };
    struct headline h;
    struct headline_wait *waits = all->count > 0 ? calloc(all->count, sizeof *waits) : NULL;
    for (uint32_t i = 0; waits != NULL && i < all->count; i++) {
        const struct wait *w = &all->items[i];
        waits[i] = (struct headline_wait){ .who = process_of(&w->who),
                                           .on_count = w->on_count,
                                           .text = w->text,
                                           .since_s = since_s(s, w) };
        for (uint32_t k = 0; k < w->on_count; k++)
            waits[i].on[k] = process_of(&w->on[k]);
        view.wait_count++;
    }
    view.waits = waits;
    const bool held_up = headline_make(&view, &h);
    free(waits);
    return held_up
               ? json_pack("{s:s, s:s, s:I, s:f, s:b}", "text", h.text, "remedy", h.remedy, "pid",
                           (json_int_t)h.pid, "since_s", h.since_s, "halted", (int)h.halted)
               : json_null();
}

json_t *view_waits(const struct view_snapshot *s, double ret_longest_s[VIEW_WAIT_KINDS],
                   json_t **ret_headline)
{
    struct waits all = { .s = s };
    json_t *array = json_array();
    for (uint32_t i = 0; i < VIEW_WAIT_KINDS; i++)
        ret_longest_s[i] = 0;
    find_all(&all);
    if (all.count > 0)
        qsort(all.items, all.count, sizeof *all.items, longest_first);
    for (uint32_t i = 0; i < all.count; i++) {
        const struct wait *w = &all.items[i];
        const double waited_s = since_s(s, w);
        if (waited_s > ret_longest_s[w->kind])
            ret_longest_s[w->kind] = waited_s;
        json_array_append_new(array, wait_json(w, waited_s));
    }
    if (ret_headline != NULL)
        *ret_headline = headline_json(&all);
    free(all.items);
    return array;
}
