/* See plan.h. Building is one pass over the micro-batches, each a forward and a backward sweep
 * over the positions of the trace, that keeps track of which units are held. What the sweeps need
 * to know about the future (the first and the last position that reads a unit) is worked out
 * before, so every release comes at the earliest moment the strategy allows. plan_check.c replays
 * plans without any of this; plan_cost.c counts them. */
#include "client/plan/plan.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

#define NOWHERE UINT32_MAX /* position of a unit that nothing in the trace reads */

enum unit_state { UNIT_FREE, UNIT_FETCHED, UNIT_READY };

struct track { /* of one unit */
    enum unit_state state;
    bool frozen;
    uint32_t first, last; /* positions that read it: it runs there, or a unit that uses it does */
    uint64_t bytes;       /* of its parameters */
    uint32_t *reads;      /* into builder.reads: all such positions, ascending */
    uint32_t reads_count;
};

struct builder {
    const struct spec *spec;          /* borrowed */
    const struct plan_policy *policy; /* borrowed */
    struct plan plan;                 /* handed over at the end */
    uint32_t op_capacity;
    uint32_t *order; /* owned, [count]: the unit at each position of the forward */
    uint32_t count;
    struct track *units; /* owned, [units] */
    uint32_t *reads;     /* owned */
    uint32_t accumulate;
    uint32_t live_units;
    uint64_t live_bytes;
    uint32_t micro;
    bool failed; /* out of memory; checked once, at the end */
};

/* -- What a position reads: the unit that runs there and those it uses ------------------------- */

static uint32_t need_count(const struct builder *b, uint32_t at)
{
    return b->spec->units[b->order[at]].uses_count + 1;
}

/* The unit itself comes last: fetched last, freed first. */
static uint32_t need_unit(const struct builder *b, uint32_t at, uint32_t i)
{
    const struct spec_unit *su = &b->spec->units[b->order[at]];
    return i < su->uses_count ? su->uses[i] : b->order[at];
}

static bool need_has(const struct builder *b, uint32_t at, uint32_t unit)
{
    for (uint32_t i = 0; i < need_count(b, at); i++)
        if (need_unit(b, at, i) == unit)
            return true;
    return false;
}

/* -- Operations -------------------------------------------------------------------------------- */

static void emit(struct builder *b, enum plan_op_kind kind, uint32_t unit)
{
    if (b->failed)
        return;
    if (b->plan.op_count == b->op_capacity) {
        const uint32_t capacity = b->op_capacity == 0 ? 256 : b->op_capacity * 2;
        struct plan_op *grown = capacity > b->op_capacity
                                    ? sys_realloc(b->plan.ops, capacity * sizeof *grown)
                                    : NULL;
        if (grown == NULL) {
            b->failed = true;
            return;
        }
        b->plan.ops = grown;
        b->op_capacity = capacity;
    }
    b->plan.ops[b->plan.op_count++] = (struct plan_op){ kind, unit, b->micro };
}

static void free_unit(struct builder *b, uint32_t unit)
{
    struct track *t = &b->units[unit];
    CHECK(t->state == UNIT_READY); /* nothing is fetched in vain */
    emit(b, PLAN_FREE, unit);
    t->state = UNIT_FREE;
    b->live_units--;
    b->live_bytes -= t->bytes;
}

static void fetch_missing(struct builder *b, uint32_t at)
{
    for (uint32_t i = 0; i < need_count(b, at); i++) {
        struct track *t = &b->units[need_unit(b, at, i)];
        if (t->state != UNIT_FREE)
            continue;
        emit(b, PLAN_FETCH, need_unit(b, at, i));
        t->state = UNIT_FETCHED;
        b->live_units++;
        b->live_bytes += t->bytes;
    }
}

static void wait_needed(struct builder *b, uint32_t at)
{
    for (uint32_t i = 0; i < need_count(b, at); i++) {
        struct track *t = &b->units[need_unit(b, at, i)];
        CHECK(t->state != UNIT_FREE);
        if (t->state == UNIT_FETCHED)
            emit(b, PLAN_WAIT, need_unit(b, at, i));
        t->state = UNIT_READY;
    }
}

/* -- Bounds ------------------------------------------------------------------------------------ */

/* Would what position `at` lacks fit beside what is held? */
static bool missing_fits(const struct builder *b, uint32_t at)
{
    uint32_t units = b->live_units;
    uint64_t bytes = b->live_bytes;
    for (uint32_t i = 0; i < need_count(b, at); i++) {
        const struct track *t = &b->units[need_unit(b, at, i)];
        units += t->state == UNIT_FREE;
        bytes += t->state == UNIT_FREE ? t->bytes : 0;
    }
    const struct plan_policy *p = b->policy;
    return (p->max_live_units == 0 || units <= p->max_live_units) &&
           (p->max_live_bytes == 0 || bytes <= p->max_live_bytes);
}

/* Computes from position `at` to the next one of this sweep that reads the unit; NOWHERE when
 * none does. */
static uint32_t next_read(const struct track *t, uint32_t at, bool forward)
{
    uint32_t distance = NOWHERE;
    for (uint32_t i = 0; i < t->reads_count; i++) {
        const uint32_t read = t->reads[i];
        if (forward ? read > at : read < at) {
            const uint32_t d = forward ? read - at : at - read;
            distance = d < distance ? d : distance;
        }
    }
    return distance;
}

/* Make room for position `at` by releasing units that are held for a later one: those needed
 * furthest in the future first (Belady). They will be fetched again. */
static void force_room(struct builder *b, uint32_t at, bool forward)
{
    while (!missing_fits(b, at)) {
        uint32_t victim = NOWHERE, furthest = 0;
        for (uint32_t u = 0; u < b->spec->unit_count; u++) {
            if (b->units[u].state == UNIT_FREE || need_has(b, at, u))
                continue;
            const uint32_t distance = next_read(&b->units[u], at, forward);
            if (victim == NOWHERE || distance > furthest) {
                victim = u;
                furthest = distance;
            }
        }
        CHECK(victim != NOWHERE); /* what a position reads fits by itself: check_bounds() */
        free_unit(b, victim);
    }
}

static void acquire(struct builder *b, uint32_t at, bool forward)
{
    force_room(b, at, forward);
    fetch_missing(b, at);
    wait_needed(b, at);
}

/* Prefetch gives way: all that position `at` lacks is fetched, or nothing. Then nobody may look
 * further ahead either, so whatever is fetched ahead is never in the way of what comes before. */
static bool prefetch(struct builder *b, uint32_t at)
{
    if (!missing_fits(b, at))
        return false;
    fetch_missing(b, at);
    return true;
}

/* -- The sweeps -------------------------------------------------------------------------------- */

static bool keeps_all_step(const struct builder *b)
{
    return b->policy->strategy == PLAN_DDP || b->policy->strategy == PLAN_ZERO1;
}

/* Free what no later position of the sweep reads, the unit itself first. */
static void free_done(struct builder *b, uint32_t at, bool forward)
{
    for (uint32_t i = need_count(b, at); i-- > 0;) {
        const uint32_t unit = need_unit(b, at, i);
        if ((forward ? b->units[unit].last : b->units[unit].first) == at)
            free_unit(b, unit);
    }
}

/* Position `at` is the last of the backward sweep to add to the gradients of these units. */
static void return_done(struct builder *b, uint32_t at)
{
    for (uint32_t i = need_count(b, at); i-- > 0;) {
        const uint32_t unit = need_unit(b, at, i);
        if (b->units[unit].first == at && !b->units[unit].frozen)
            emit(b, PLAN_RETURN, unit);
    }
}

/* After the last position nothing is freed: the backward sweep starts there. */
static void build_forward(struct builder *b)
{
    for (uint32_t at = 0; at < b->count; at++) {
        acquire(b, at, /* forward= */ true);
        for (uint32_t next = at + 1; next < b->count; next++)
            if (next - at > b->policy->forward_prefetch || !prefetch(b, next))
                break;
        emit(b, PLAN_FORWARD, b->order[at]);
        if (b->policy->strategy == PLAN_ZERO3 && at + 1 < b->count)
            free_done(b, at, /* forward= */ true);
    }
}

static void build_backward(struct builder *b)
{
    const struct plan_policy *p = b->policy;
    const bool returns = (b->micro + 1) % b->accumulate == 0;
    for (uint32_t at = b->count; at-- > 0;) {
        acquire(b, at, /* forward= */ false);
        if (p->backward_prefetch == PLAN_PREFETCH_PRE && at > 0)
            prefetch(b, at - 1);
        emit(b, PLAN_BACKWARD, b->order[at]);
        if (!keeps_all_step(b))
            free_done(b, at, /* forward= */ false);
        if (p->backward_prefetch == PLAN_PREFETCH_POST && at > 0)
            prefetch(b, at - 1);
        if (returns && p->strategy != PLAN_DDP)
            return_done(b, at);
    }
    for (uint32_t at = b->count; returns && p->strategy == PLAN_DDP && at-- > 0;)
        return_done(b, at);
}

static void build_step(struct builder *b)
{
    for (b->micro = 0; b->micro < b->plan.micros && !b->failed; b->micro++) {
        build_forward(b);
        build_backward(b);
    }
    if (keeps_all_step(b) && b->plan.micros > 0) {
        b->micro = b->plan.micros - 1;
        for (uint32_t at = b->count; at-- > 0;)
            free_done(b, at, /* forward= */ false);
    }
    b->micro = 0;
    emit(b, PLAN_PREPARE, 0);
    emit(b, PLAN_COMMIT, 0);
}

/* -- Before and around ------------------------------------------------------------------------- */

static int check_policy(const struct plan_policy *p, struct shd_err *e)
{
    if (p->strategy == PLAN_HYBRID)
        return err_set(e, SHD_ENOTSUP,
                       "strategy hybrid: replica groups are the daemons' (`shardctl host "
                       "--replicas 2` keeps each slice on two hosts), and no worker's strategy: "
                       "take zero3 or zero2 beside them");
    if (p->strategy == PLAN_OWN)
        return err_set(
            e, SHD_EINVAL,
            "strategy own is of operations that are given, and here none are: 0 zero3, 1 "
            "zero2, 2 zero1, 3 ddp");
    if ((unsigned)p->strategy > PLAN_OWN)
        return err_set(e, SHD_EINVAL, "strategy is %d: 0 zero3, 1 zero2, 2 zero1, 3 ddp",
                       (int)p->strategy);
    if ((unsigned)p->backward_prefetch > PLAN_PREFETCH_NONE)
        return err_set(e, SHD_EINVAL, "backward_prefetch is %d: 0 pre, 1 post, 2 none",
                       (int)p->backward_prefetch);
    if (p->forward_prefetch > SHD_UNITS_MAX)
        return err_set(e, SHD_EINVAL, "forward_prefetch is %" PRIu32 " units, at most %u",
                       p->forward_prefetch, SHD_UNITS_MAX);
    if (p->grad_dtype != 0 && !dtype_valid(p->grad_dtype))
        return err_set(e, SHD_EINVAL, "grad_dtype is %d: 0 or 1 f32, 2 bf16, 3 f16",
                       (int)p->grad_dtype);
    return SHD_OK;
}

static int check_micros(const struct builder *b, struct shd_err *e)
{
    const uint32_t micros = b->plan.micros;
    if (micros > SHD_MICROS_MAX)
        return err_set(e, SHD_EINVAL, "plan for %" PRIu32 " micro-batches, at most %u", micros,
                       SHD_MICROS_MAX);
    if (micros % b->accumulate != 0)
        return err_set(e, SHD_EINVAL,
                       "%" PRIu32 " micro-batches for a worker of a model with accumulate %" PRIu32
                       ": must be a multiple, gradients are returned in groups",
                       micros, b->accumulate);
    return SHD_OK;
}

static int check_trace(const struct spec *spec, const struct plan_trace *trace, struct shd_err *e)
{
    if (trace == NULL)
        return SHD_OK;
    if (trace->count > spec->unit_count)
        return err_set(e, SHD_EINVAL, "trace of %" PRIu32 " units, the model has %" PRIu32,
                       trace->count, spec->unit_count);
    if (trace->count > 0 && trace->forward == NULL)
        return err_set(e, SHD_EINVAL, "trace of %" PRIu32 " units without units", trace->count);
    for (uint32_t at = 0; at < trace->count; at++)
        if (trace->forward[at] >= spec->unit_count)
            return err_set(e, SHD_EINVAL,
                           "trace position %" PRIu32 " is unit %" PRIu32 ", the model has %" PRIu32,
                           at, trace->forward[at], spec->unit_count);
    return SHD_OK;
}

static int check_uses(const struct spec *spec, struct shd_err *e)
{
    for (uint32_t u = 0; u < spec->unit_count; u++)
        for (uint32_t i = 0; i < spec->units[u].uses_count; i++)
            if (spec->units[u].uses[i] >= spec->unit_count || spec->units[u].uses[i] == u)
                return err_set(e, SHD_EINVAL,
                               "unit %" PRIu32 " '%s' uses unit %" PRIu32
                               ": must be another of the %" PRIu32 " units",
                               u, spec->units[u].name, spec->units[u].uses[i], spec->unit_count);
    return SHD_OK;
}

/* Fill order and tracks. SHD_EINVAL when the trace has a unit twice. */
static int survey(struct builder *b, const struct plan_trace *trace, struct shd_err *e)
{
    for (uint32_t u = 0; u < b->spec->unit_count; u++)
        b->units[u] = (struct track){ .frozen = b->spec->units[u].frozen,
                                      .first = NOWHERE,
                                      .last = NOWHERE,
                                      .bytes = plan_unit_param_bytes(b->spec, u) };
    for (uint32_t at = 0; at < b->count; at++) {
        b->order[at] = trace != NULL ? trace->forward[at] : at;
        if (b->units[b->order[at]].state != UNIT_FREE)
            return err_set(e, SHD_EINVAL, "trace has unit %" PRIu32 " '%s' twice", b->order[at],
                           b->spec->units[b->order[at]].name);
        b->units[b->order[at]].state = UNIT_READY; /* only to find the second one */
    }
    for (uint32_t u = 0; u < b->spec->unit_count; u++)
        b->units[u].state = UNIT_FREE;
    for (uint32_t at = 0; at < b->count; at++)
        for (uint32_t i = 0; i < need_count(b, at); i++)
            b->units[need_unit(b, at, i)].reads_count++;
    uint32_t *end = b->reads;
    for (uint32_t u = 0; u < b->spec->unit_count; u++) {
        b->units[u].reads = end;
        end += b->units[u].reads_count;
        b->units[u].reads_count = 0;
    }
    for (uint32_t at = 0; at < b->count; at++)
        for (uint32_t i = 0; i < need_count(b, at); i++) {
            struct track *t = &b->units[need_unit(b, at, i)];
            t->reads[t->reads_count++] = at;
            t->first = t->first == NOWHERE ? at : t->first;
            t->last = at;
        }
    return SHD_OK;
}

/* Where units may be freed and fetched again (zero3) a position's own needs, else everything the
 * trace reads. */
static struct plan_floor find_floor(const struct builder *b)
{
    struct plan_floor f = { 0 };
    if (b->policy->strategy != PLAN_ZERO3) {
        for (uint32_t u = 0; u < b->spec->unit_count; u++)
            if (b->units[u].first != NOWHERE) {
                f.units++;
                f.bytes += b->units[u].bytes;
            }
        return f;
    }
    for (uint32_t at = 0; at < b->count; at++) {
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < need_count(b, at); i++)
            bytes += b->units[need_unit(b, at, i)].bytes;
        if (need_count(b, at) > f.units) {
            f.units = need_count(b, at);
            f.units_unit = b->order[at];
        }
        if (bytes > f.bytes) {
            f.bytes = bytes;
            f.bytes_unit = b->order[at];
        }
    }
    return f;
}

static int refuse_bound(const struct builder *b, const char *field, uint64_t asked, uint64_t floor,
                        uint32_t unit, struct shd_err *e)
{
    if (b->policy->strategy != PLAN_ZERO3)
        return err_set(e, SHD_ERANGE,
                       "%s is %" PRIu64 ", must be at least %" PRIu64
                       ": %s holds all units at once, zero3 would not",
                       field, asked, floor, plan_strategy_name(b->policy->strategy));
    const struct spec_unit *su = &b->spec->units[unit];
    return err_set(e, SHD_ERANGE,
                   "%s is %" PRIu64 ", must be at least %" PRIu64 ": unit %" PRIu32 " '%.60s'%s, "
                   "without any prefetch",
                   field, asked, floor, unit, su->name,
                   su->uses_count > 0 ? " and what it uses" : "");
}

static int check_bounds(struct builder *b, struct shd_err *e)
{
    const struct plan_policy *p = b->policy;
    if (b->plan.micros == 0 || b->count == 0)
        return SHD_OK;
    const struct plan_floor f = b->plan.floor = find_floor(b);
    if (p->max_live_units > 0 && p->max_live_units < f.units)
        return refuse_bound(b, "max_live_units", p->max_live_units, f.units, f.units_unit, e);
    if (p->max_live_bytes > 0 && p->max_live_bytes < f.bytes)
        return refuse_bound(b, "max_live_bytes", p->max_live_bytes, f.bytes, f.bytes_unit, e);
    return SHD_OK;
}

static int no_memory(const struct builder *b, struct shd_err *e)
{
    return err_set(e, SHD_ENOMEM,
                   "no memory for a plan of %" PRIu32 " units and %" PRIu32 " micro-batches",
                   b->spec->unit_count, b->plan.micros);
}

static int build(struct builder *b, const struct plan_trace *trace, struct shd_err *e)
{
    size_t reads = 0;
    for (uint32_t at = 0; at < b->count; at++)
        reads += b->spec->units[trace != NULL ? trace->forward[at] : at].uses_count + 1;
    b->order = sys_calloc(b->count + 1, sizeof *b->order);
    b->units = sys_calloc(b->spec->unit_count + 1, sizeof *b->units);
    b->reads = sys_calloc(reads + 1, sizeof *b->reads);
    if (b->order == NULL || b->units == NULL || b->reads == NULL)
        return no_memory(b, e);
    int r = survey(b, trace, e);
    if (r == SHD_OK)
        r = check_bounds(b, e);
    if (r != SHD_OK)
        return r;
    build_step(b);
    if (b->failed)
        return no_memory(b, e);
    return plan_count(&b->plan, b->spec, b->policy->grad_dtype, &b->plan.cost, e);
}

int plan_build(const struct spec *spec, const struct plan_policy *policy,
               const struct plan_trace *trace, uint32_t micros, struct plan *ret_plan,
               struct shd_err *e)
{
    struct builder b = {
        .spec = spec,
        .policy = policy,
        .plan = { .micros = micros },
        .count = trace != NULL ? trace->count : spec->unit_count,
        .accumulate = spec->accumulate > 0 && !policy->shares_sums ? spec->accumulate : 1,
    };
    int r = check_policy(policy, e);
    if (r == SHD_OK)
        r = check_micros(&b, e);
    if (r == SHD_OK)
        r = check_uses(spec, e);
    if (r == SHD_OK)
        r = check_trace(spec, trace, e);
    if (r == SHD_OK)
        r = build(&b, trace, e);
    free(b.order);
    free(b.units);
    free(b.reads);
    if (r == SHD_OK)
        *ret_plan = b.plan;
    else
        plan_free(&b.plan);
    return r;
}

void plan_free(struct plan *plan)
{
    free(plan->ops);
    *plan = (struct plan){ 0 };
}

/* -- Names ------------------------------------------------------------------------------------- */

static const char *const op_names[] = { "FETCH",  "WAIT", "FORWARD", "BACKWARD",
                                        "RETURN", "FREE", "PREPARE", "COMMIT" };
static const char *const strategy_names[] = { "zero3", "zero2", "zero1", "ddp", "hybrid", "own" };
static const char *const prefetch_names[] = { "pre", "post", "none" };

static int find(const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return (int)i;
    return -1;
}

const char *plan_op_name(enum plan_op_kind kind)
{
    return (unsigned)kind < ARRAY_SIZE(op_names) ? op_names[kind] : "?";
}

const char *plan_strategy_name(enum plan_strategy strategy)
{
    return (unsigned)strategy < ARRAY_SIZE(strategy_names) ? strategy_names[strategy] : "?";
}

const char *plan_prefetch_name(enum plan_backward_prefetch prefetch)
{
    return (unsigned)prefetch < ARRAY_SIZE(prefetch_names) ? prefetch_names[prefetch] : "?";
}

int plan_op_parse(const char *name)
{
    return find(name, op_names, ARRAY_SIZE(op_names));
}

int plan_strategy_parse(const char *name)
{
    return find(name, strategy_names, ARRAY_SIZE(strategy_names));
}

int plan_prefetch_parse(const char *name)
{
    return find(name, prefetch_names, ARRAY_SIZE(prefetch_names));
}
