/* See verify.h. */
#include "daemon/core/verify.h"

#include <string.h>

#include "daemon/core/step.h"
#include "proto/base/check.h"

enum seen { SEEN_NOT, SEEN_HASH, SEEN_NONE, SEEN_UNKNOWN };

struct cell { /* a unit of a copy */
    uint8_t seen;
    uint8_t hash[VERIFY_HASH_BYTES];
};

struct copy {
    struct verify_worker worker; /* session 0: no copy */
    bool gone;
    uint32_t units; /* that came */
    uint32_t known; /* whose bits are known */
};

struct pair { /* of two copies that differ */
    bool differs;
    uint64_t number; /* of its difference, counted from 1 */
};

struct verify {
    struct verify_shape shape;
    struct verify_state state;
    uint64_t blind_below; /* steps that are not looked at */
    bool began, active, closed;
    bool put; /* closed in all attempts at the step */
    uint64_t step, attempt;
    uint32_t group;
    struct copy copies[VERIFY_COPIES];
    uint32_t copy_count;
    struct pair pairs[VERIFY_COPIES][VERIFY_COPIES]; /* [later][earlier] */
    bool found_wrong[VERIFY_COPIES];
    struct cell cells[]; /* [units][VERIFY_COPIES] */
};

bool verify_group_of(uint64_t every, uint32_t groups, uint64_t step, uint32_t *ret_group)
{
    CHECK(groups > 0);
    if (every == 0 || step % every != every - 1)
        return false;
    *ret_group = (uint32_t)(step / every % groups);
    return true;
}

size_t verify_bytes(const struct verify_shape *shape)
{
    CHECK(shape->every > 0);
    return sizeof(struct verify) + (size_t)shape->units * VERIFY_COPIES * sizeof(struct cell);
}

struct verify *verify_init(void *memory, const struct verify_shape *shape, const struct step *core)
{
    struct verify *v = memory;
    memset(v, 0, verify_bytes(shape));
    v->shape = *shape;
    v->state.every = shape->every;
    v->blind_below = shape->blind ? step_collecting(core) + 1 : 0;
    return v;
}

/* -- The step -----------------------------------------------------------------------------------
 */

static bool is_whole(const struct verify *v, const struct copy *c)
{
    return c->known == v->shape.trained;
}

uint32_t verify_whole(const struct verify *v)
{
    uint32_t whole = 0;
    for (uint32_t i = 0; i < v->copy_count; i++)
        whole += is_whole(v, &v->copies[i]);
    return whole;
}

static void end_step(struct verify *v)
{
    if (v->active && v->copy_count > 0 && verify_whole(v) < 2)
        v->state.missed++;
}

static void forget_copies(struct verify *v)
{
    memset(v->copies, 0, sizeof v->copies);
    memset(v->pairs, 0, sizeof v->pairs);
    memset(v->found_wrong, 0, sizeof v->found_wrong);
    memset(v->cells, 0, (size_t)v->shape.units * VERIFY_COPIES * sizeof *v->cells);
    v->copy_count = 0;
    v->closed = false;
}

/* Whatever the core has come to since the last event. */
static void follow(struct verify *v, const struct step *core)
{
    const uint64_t step = step_collecting(core), attempt = step_attempt(core);
    if (v->began && v->step == step && v->attempt == attempt)
        return;
    if (v->began && v->step != step)
        end_step(v);
    if (v->copy_count > 0 || v->closed)
        forget_copies(v);
    v->put = v->put && v->step == step;
    v->closed = v->put;
    v->began = true;
    v->step = step;
    v->attempt = attempt;
    v->active = step >= v->blind_below &&
                verify_group_of(v->shape.every, step_returns(core), step, &v->group);
}

bool verify_at_hand(const struct verify *v, uint32_t *ret_group)
{
    if (!v->active || v->closed)
        return false;
    *ret_group = v->group;
    return true;
}

bool verify_now(struct verify *v, const struct step *core, uint32_t *ret_group)
{
    follow(v, core);
    return verify_at_hand(v, ret_group);
}

bool verify_wants(struct verify *v, const struct step *core, uint64_t step, uint32_t group)
{
    uint32_t now;
    return verify_now(v, core, &now) && v->step == step && now == group;
}

void verify_close(struct verify *v, const struct step *core, uint64_t step)
{
    follow(v, core);
    v->closed = v->closed || v->step == step;
}

void verify_close_put(struct verify *v, const struct step *core, uint64_t step)
{
    verify_close(v, core, step);
    v->put = v->put || v->step == step;
}

/* -- Workers ------------------------------------------------------------------------------------
 */

static bool is_same(const struct verify_worker *a, const struct verify_worker *b)
{
    return a->pid != 0 ? a->pid == b->pid && a->start_time == b->start_time
                       : a->session == b->session;
}

/* A worker that was started again is another process at the same place. */
static bool is_same_place(const struct verify_worker *a, const struct verify_worker *b)
{
    return a->rank != 0 && b->rank != 0 ? a->rank == b->rank : is_same(a, b);
}

/* The counts of a worker; a new one takes the place of the one not looked at for longest. */
static struct verify_count *count_of(struct verify *v, const struct verify_worker *w)
{
    struct verify_state *s = &v->state;
    struct verify_count *place = &s->workers[0];
    for (uint32_t i = 0; i < s->worker_count; i++) {
        struct verify_count *c = &s->workers[i];
        if (is_same(&c->worker, w)) {
            c->worker = *w;
            return c;
        }
        if (c->last_step < place->last_step)
            place = c;
    }
    if (s->worker_count < VERIFY_WORKERS)
        place = &s->workers[s->worker_count++];
    *place = (struct verify_count){ .worker = *w };
    return place;
}

static struct copy *find_copy(struct verify *v, uint64_t session)
{
    for (uint32_t i = 0; i < v->copy_count; i++)
        if (v->copies[i].worker.session == session)
            return &v->copies[i];
    return NULL;
}

bool verify_is_whole(const struct verify *v, uint64_t session)
{
    for (uint32_t i = 0; i < v->copy_count; i++)
        if (v->copies[i].worker.session == session)
            return is_whole(v, &v->copies[i]);
    return false;
}

bool verify_partial(const struct verify *v)
{
    for (uint32_t i = 0; i < v->copy_count; i++)
        if (!v->copies[i].gone && v->copies[i].units < v->shape.trained)
            return true;
    return false;
}

bool verify_has_room(const struct verify *v)
{
    return v->copy_count < VERIFY_COPIES;
}

uint64_t verify_last_step(const struct verify *v, uint64_t session)
{
    for (uint32_t i = 0; i < v->state.worker_count; i++)
        if (v->state.workers[i].worker.session == session)
            return v->state.workers[i].last_step;
    return 0;
}

void verify_forget(struct verify *v, uint64_t session)
{
    struct copy *c = find_copy(v, session);
    if (c != NULL)
        c->gone = true;
}

static bool any_differs(const struct verify *v)
{
    for (uint32_t later = 1; later < v->copy_count; later++)
        for (uint32_t earlier = 0; earlier < later; earlier++)
            if (v->pairs[later][earlier].differs)
                return true;
    return false;
}

uint32_t verify_wanted(const struct verify *v)
{
    if (any_differs(v))
        return 3;
    return v->shape.first ? 2 : 0;
}

/* -- Comparing ----------------------------------------------------------------------------------
 */

static struct cell *cell_of(struct verify *v, uint32_t unit, uint32_t copy)
{
    return &v->cells[(size_t)unit * VERIFY_COPIES + copy];
}

static bool is_known(const struct cell *c)
{
    return c->seen == SEEN_HASH || c->seen == SEEN_NONE;
}

static bool agrees(const struct cell *a, const struct cell *b)
{
    return a->seen == b->seen &&
           (a->seen != SEEN_HASH || memcmp(a->hash, b->hash, VERIFY_HASH_BYTES) == 0);
}

/* The difference with this number, as long as it is remembered. */
static struct verify_difference *recall(struct verify *v, uint64_t number)
{
    const uint64_t age = v->state.differences - number;
    return age < v->state.recent_count ? &v->state.recent[age] : NULL;
}

static struct verify_difference *remember(struct verify *v)
{
    struct verify_state *s = &v->state;
    if (s->recent_count < VERIFY_RECENT)
        s->recent_count++;
    memmove(&s->recent[1], &s->recent[0], (s->recent_count - 1) * sizeof s->recent[0]);
    s->differences++;
    s->recent[0] = (struct verify_difference){ 0 };
    return &s->recent[0];
}

static void count_difference(struct verify *v, const struct verify_worker *w,
                             const struct verify_worker *from)
{
    struct verify_count *c = count_of(v, w);
    c->differences++;
    if (c->partner.session == 0)
        c->partner = *from;
    else if (!is_same_place(&c->partner, from))
        c->suspect = true;
}

/* Two copies differ in this unit. True: in none before. */
static bool differ(struct verify *v, uint32_t later, uint32_t earlier, uint32_t unit)
{
    struct pair *pair = &v->pairs[later][earlier];
    struct verify_difference *d;
    if (pair->differs) {
        d = recall(v, pair->number);
        if (d != NULL)
            d->units++;
        return false;
    }
    d = remember(v);
    *pair = (struct pair){ true, v->state.differences };
    *d = (struct verify_difference){ .step = v->step,
                                     .group = v->group,
                                     .unit = unit,
                                     .units = 1,
                                     .worker = { v->copies[earlier].worker,
                                                 v->copies[later].worker } };
    count_difference(v, &d->worker[0], &d->worker[1]);
    count_difference(v, &d->worker[1], &d->worker[0]);
    return true;
}

static void is_wrong(struct verify *v, uint32_t copy)
{
    struct verify_count *c = count_of(v, &v->copies[copy].worker);
    c->wrong += !v->found_wrong[copy];
    c->suspect = true;
    v->found_wrong[copy] = true;
}

/* Of a unit of which there are three copies: who differs from two that agree. */
static void judge(struct verify *v, uint32_t unit)
{
    uint32_t votes[VERIFY_COPIES] = { 0 }; /* copies of the living with the same bits */
    for (uint32_t a = 0; a < v->copy_count; a++)
        for (uint32_t b = 0; b < v->copy_count; b++)
            votes[a] += is_known(cell_of(v, unit, a)) && !v->copies[b].gone &&
                        agrees(cell_of(v, unit, a), cell_of(v, unit, b));
    for (uint32_t later = 1; later < v->copy_count; later++)
        for (uint32_t earlier = 0; earlier < later; earlier++) {
            const struct pair *pair = &v->pairs[later][earlier];
            struct verify_difference *d = pair->differs ? recall(v, pair->number) : NULL;
            const bool first = votes[earlier] < votes[later];
            if (!is_known(cell_of(v, unit, earlier)) || !is_known(cell_of(v, unit, later)) ||
                agrees(cell_of(v, unit, earlier), cell_of(v, unit, later)) ||
                votes[earlier] == votes[later] || votes[first ? later : earlier] < 2)
                continue;
            is_wrong(v, first ? earlier : later);
            if (d != NULL)
                d->verdict = first ? VERIFY_FIRST : VERIFY_SECOND;
        }
}

/* Pairs of whole copies are what has been compared. */
static void count_whole(struct verify *v, uint32_t copy)
{
    count_of(v, &v->copies[copy].worker)->last_step = v->step + 1;
    for (uint32_t i = 0; i < v->copy_count; i++) {
        if (i == copy || !is_whole(v, &v->copies[i]))
            continue;
        v->state.compared++;
        count_of(v, &v->copies[copy].worker)->compared++;
        count_of(v, &v->copies[i].worker)->compared++;
    }
}

/* The worker's copy: in another session it goes on with it. NULL: there are enough. */
static struct copy *copy_of(struct verify *v, const struct verify_worker *worker)
{
    for (uint32_t i = 0; i < v->copy_count; i++)
        if (is_same(&v->copies[i].worker, worker)) {
            v->copies[i].worker.session = worker->session;
            v->copies[i].gone = false;
            return &v->copies[i];
        }
    if (v->copy_count == VERIFY_COPIES)
        return NULL;
    v->copies[v->copy_count].worker = *worker;
    return &v->copies[v->copy_count++];
}

bool verify_take(struct verify *v, const struct step *core, const struct verify_worker *worker,
                 uint32_t unit, const uint8_t *hash, bool none, struct verify_difference *ret_found)
{
    CHECK(worker->session > 0 && unit < v->shape.units && (hash == NULL || !none));
    follow(v, core);
    struct copy *c = v->active && !v->closed ? copy_of(v, worker) : NULL;
    if (c == NULL)
        return false;
    const uint32_t own = (uint32_t)(c - v->copies);
    struct cell *cell = cell_of(v, unit, own);
    if (cell->seen != SEEN_NOT)
        return false; /* asked again, or begun again: the first one counts, as in the step */
    cell->seen = hash != NULL ? SEEN_HASH : none ? SEEN_NONE : SEEN_UNKNOWN;
    if (hash != NULL)
        memcpy(cell->hash, hash, VERIFY_HASH_BYTES);
    c->units++;
    c->known += is_known(cell);
    uint64_t first = 0;
    for (uint32_t i = 0; i < v->copy_count && is_known(cell); i++)
        if (i != own && is_known(cell_of(v, unit, i)) && !agrees(cell, cell_of(v, unit, i)) &&
            differ(v, own > i ? own : i, own > i ? i : own, unit) && first == 0)
            first = v->state.differences;
    judge(v, unit);
    if (is_known(cell) && is_whole(v, c))
        count_whole(v, own);
    const struct verify_difference *found = first > 0 ? recall(v, first) : NULL;
    if (found != NULL)
        *ret_found = *found;
    return found != NULL;
}

const struct verify_state *verify_look(const struct verify *v)
{
    return &v->state;
}
