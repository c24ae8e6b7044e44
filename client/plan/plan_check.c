/* See plan_check.h. A plan is replayed against the rules alone. Nothing here knows how plans are
 * built: it counts down how often each unit is still to be read in the sweep that is running, and
 * keeps its own account of what is held. The first operation that breaks a rule is named. */
#include "client/plan/plan_check.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/plan.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

struct watch { /* of one unit */
    bool held, ready;
    bool used;     /* a compute has read it since it was fetched */
    bool grad;     /* its gradient is in the worker */
    bool returned; /* in this group of micro-batches */
    bool in_trace;
    uint32_t fetched_at, waited_at, returned_at; /* operations: the last ones */
    uint32_t reads;               /* computes that read it in one sweep: its own and its users' */
    uint32_t forwards, backwards; /* of those, in this micro-batch so far */
    uint64_t param_bytes, fetched_bytes, grad_bytes, return_bytes;
};

struct checker {
    const struct spec *spec; /* borrowed, as are the next two */
    const struct plan *plan;
    const struct plan_policy *policy;
    const uint32_t *order; /* borrowed; NULL: 0, 1, 2 ... */
    uint32_t count;
    uint32_t accumulate;
    struct watch *units; /* owned, [units] */
    struct plan_cost cost;
    uint32_t live_units, live_grads;
    uint64_t live_param_bytes, live_grad_bytes;
    uint32_t micro;     /* the one whose computes and returns come now */
    uint32_t forwards;  /* of it: positions 0 .. forwards - 1 are through */
    uint32_t backwards; /* of it: the last `backwards` positions are through */
    uint32_t to_return; /* gradients that each group of micro-batches owes */
    uint32_t returned;  /* of them */
    bool prepared, committed;
    uint32_t at;   /* the operation that is looked at */
    char why[220]; /* it cannot come now */
};

static const char *refuse(struct checker *c, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

static const char *refuse(struct checker *c, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->why, sizeof c->why, fmt, args);
    va_end(args);
    return c->why;
}

static const char *name_of(const struct checker *c, uint32_t unit)
{
    return c->spec->units[unit].name;
}

/* -- The account ------------------------------------------------------------------------------- */

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void note_peaks(struct checker *c)
{
    struct plan_cost *k = &c->cost;
    k->live_units_max = (uint32_t)larger(k->live_units_max, c->live_units);
    k->live_grads_max = (uint32_t)larger(k->live_grads_max, c->live_grads);
    k->live_param_bytes_max = larger(k->live_param_bytes_max, c->live_param_bytes);
    k->live_grad_bytes_max = larger(k->live_grad_bytes_max, c->live_grad_bytes);
    k->live_bytes_max = larger(k->live_bytes_max, c->live_param_bytes + c->live_grad_bytes);
}

static uint32_t unit_at(const struct checker *c, uint32_t at)
{
    return c->order != NULL ? c->order[at] : at;
}

static bool group_ends(const struct checker *c)
{
    return (c->micro + 1) % c->accumulate == 0;
}

static bool keeps_all_step(const struct checker *c)
{
    return c->policy->strategy == PLAN_DDP || c->policy->strategy == PLAN_ZERO1;
}

/* All of this micro-batch is through, and what its group owes when it is the last. */
static bool micro_done(const struct checker *c)
{
    return c->backwards == c->count && (!group_ends(c) || c->returned == c->to_return);
}

static void micro_begin(struct checker *c, uint32_t micro)
{
    const bool new_group = micro % c->accumulate == 0;
    c->micro = micro;
    c->forwards = c->backwards = 0;
    c->returned = new_group ? 0 : c->returned;
    for (uint32_t u = 0; u < c->spec->unit_count; u++) {
        struct watch *w = &c->units[u];
        w->forwards = w->backwards = 0;
        w->returned = new_group ? false : w->returned;
    }
}

/* -- What is missing --------------------------------------------------------------------------- */

/* The first thing that micro-batch c->micro still lacks. There is one. */
static const char *missing(struct checker *c)
{
    const bool forward = c->forwards < c->count;
    if (forward || c->backwards < c->count) {
        const uint32_t unit = unit_at(c, forward ? c->forwards : c->count - 1 - c->backwards);
        return refuse(c, "%s of unit %" PRIu32 " '%.40s' is missing, in micro-batch %" PRIu32,
                      plan_op_name(forward ? PLAN_FORWARD : PLAN_BACKWARD), unit, name_of(c, unit),
                      c->micro);
    }
    for (uint32_t u = 0; u < c->spec->unit_count; u++)
        if (c->units[u].reads > 0 && !c->spec->units[u].frozen && !c->units[u].returned)
            return refuse(c,
                          "RETURN of unit %" PRIu32 " '%.40s' is missing, in micro-batch %" PRIu32,
                          u, name_of(c, u), c->micro);
    CHECK(false); /* else micro_done() */
    return NULL;
}

static const char *held_still(struct checker *c)
{
    uint32_t u = 0;
    while (!c->units[u].held)
        u++;
    return refuse(c,
                  "comes while %" PRIu32 " unit%s held: FREE of unit %" PRIu32
                  " '%.40s' is missing, which operation %" PRIu32 " fetched",
                  c->live_units, c->live_units == 1 ? " is" : "s are", u, name_of(c, u),
                  c->units[u].fetched_at);
}

/* -- One operation: NULL, or why it cannot come now -------------------------------------------- */

static const char *check_fetch(struct checker *c, uint32_t unit)
{
    const struct plan_policy *p = c->policy;
    struct watch *w = &c->units[unit];
    if (w->held)
        return refuse(c,
                      "is held already, since operation %" PRIu32
                      ": must come behind a FREE, or not at all",
                      w->fetched_at);
    w->held = true;
    w->ready = w->used = false;
    w->fetched_at = c->at;
    c->live_units++;
    c->live_param_bytes += w->param_bytes;
    c->cost.fetches++;
    c->cost.fetched_bytes += w->fetched_bytes;
    if (p->max_live_units > 0 && c->live_units > p->max_live_units)
        return refuse(c,
                      "makes it %" PRIu32 " units that are held, max_live_units is %" PRIu32
                      ": must come behind a FREE",
                      c->live_units, p->max_live_units);
    if (p->max_live_bytes > 0 && c->live_param_bytes > p->max_live_bytes)
        return refuse(c,
                      "makes it %" PRIu64 " bytes of parameters that are held, max_live_bytes is "
                      "%" PRIu64 ": must come behind a FREE",
                      c->live_param_bytes, p->max_live_bytes);
    return NULL;
}

static const char *check_wait(struct checker *c, uint32_t unit)
{
    struct watch *w = &c->units[unit];
    if (!w->held)
        return "was not fetched: a FETCH must come before";
    if (w->ready)
        return refuse(c, "was waited for already, by operation %" PRIu32 ": once is enough",
                      w->waited_at);
    w->ready = true;
    w->waited_at = c->at;
    return NULL;
}

/* Units that the strategy keeps must not be freed. Any other one that is freed too early shows when
 * a compute does not find it. */
static const char *check_free(struct checker *c, uint32_t unit)
{
    struct watch *w = &c->units[unit];
    if (!w->held)
        return "is not held: a FETCH must come before";
    if (!w->used)
        return refuse(c,
                      "was fetched for nothing, by operation %" PRIu32
                      ": no FORWARD or BACKWARD has read it since",
                      w->fetched_at);
    if ((c->policy->strategy == PLAN_ZERO2 || keeps_all_step(c)) && w->backwards < w->reads)
        return refuse(c, "must be kept until its last backward: %s does, zero3 and own need not",
                      plan_strategy_name(c->policy->strategy));
    if (keeps_all_step(c) && (c->micro + 1 < c->plan->micros || !micro_done(c)))
        return refuse(c, "must be kept until the end of the step: %s does, zero3 and own need not",
                      plan_strategy_name(c->policy->strategy));
    w->held = w->ready = false;
    c->live_units--;
    c->live_param_bytes -= w->param_bytes;
    return NULL;
}

static const char *read_unit(struct checker *c, uint32_t reader, uint32_t unit, bool forward)
{
    struct watch *w = &c->units[unit];
    w->used = true;
    *(forward ? &w->forwards : &w->backwards) += 1;
    if (w->ready)
        return NULL;
    return refuse(c, "%s unit %" PRIu32 " '%.40s', which is not %s: %sWAIT must come before",
                  reader == unit ? "reads" : "uses", unit, name_of(c, unit),
                  w->held ? "waited for" : "held", w->held ? "a " : "FETCH and ");
}

/* Read the unit that computes and those it uses. */
static const char *check_reads(struct checker *c, uint32_t unit, bool forward)
{
    const struct spec_unit *su = &c->spec->units[unit];
    const char *why = read_unit(c, unit, unit, forward);
    for (uint32_t i = 0; i < su->uses_count && why == NULL; i++)
        why = read_unit(c, unit, su->uses[i], forward);
    return why;
}

static const char *check_forward(struct checker *c, uint32_t unit)
{
    if (c->forwards == c->count)
        return "is out of order: all forwards of the micro-batch are through";
    if (unit_at(c, c->forwards) != unit)
        return refuse(c, "is out of order: unit %" PRIu32 " '%.40s' is next",
                      unit_at(c, c->forwards), name_of(c, unit_at(c, c->forwards)));
    c->forwards++;
    return check_reads(c, unit, /* forward= */ true);
}

static void begin_grad(struct checker *c, uint32_t unit)
{
    struct watch *w = &c->units[unit];
    if (w->grad || c->spec->units[unit].frozen)
        return;
    w->grad = true;
    c->live_grads++;
    c->live_grad_bytes += w->grad_bytes;
}

/* zero3 frees after forward: when the backward sweep starts only what its first position reads,
 * and what may be prefetched for its second, is held. */
static bool resharded(const struct checker *c)
{
    uint32_t allowed = 0;
    for (uint32_t i = 1; i <= 2 && i <= c->count; i++)
        allowed += 1 + c->spec->units[unit_at(c, c->count - i)].uses_count;
    return c->live_units <= allowed;
}

static const char *check_backward(struct checker *c, uint32_t unit)
{
    const struct spec_unit *su = &c->spec->units[unit];
    if (c->forwards != c->count)
        return refuse(c, "is out of order: FORWARD of unit %" PRIu32 " '%.40s' is missing",
                      unit_at(c, c->forwards), name_of(c, unit_at(c, c->forwards)));
    if (c->backwards == c->count)
        return "is out of order: all backwards of the micro-batch are through";
    const uint32_t next = unit_at(c, c->count - 1 - c->backwards);
    if (next != unit)
        return refuse(c, "is out of order: unit %" PRIu32 " '%.40s' is next", next,
                      name_of(c, next));
    if (c->policy->strategy == PLAN_ZERO3 && c->backwards == 0 && !resharded(c))
        return refuse(c,
                      "comes while %" PRIu32 " units are held that forward was the last to read: "
                      "zero3 frees them, own need not",
                      c->live_units);
    c->backwards++;
    const char *why = check_reads(c, unit, /* forward= */ false);
    begin_grad(c, unit);
    for (uint32_t i = 0; i < su->uses_count; i++)
        begin_grad(c, su->uses[i]);
    return why;
}

static const char *check_return(struct checker *c, uint32_t unit)
{
    struct watch *w = &c->units[unit];
    if (c->spec->units[unit].frozen)
        return "is frozen and has no gradient";
    if (!group_ends(c))
        return refuse(c, "comes before the last micro-batch of its group of %" PRIu32,
                      c->accumulate);
    if (w->returned)
        return refuse(c, "was returned already, by operation %" PRIu32 ": once is enough",
                      w->returned_at);
    if (!w->grad || w->backwards < w->reads)
        return "has not had the last backward that adds to its gradient: must come behind it";
    if (c->policy->strategy == PLAN_DDP && c->backwards < c->count)
        return "comes before the last backward, ddp returns behind it, zero1 and own need not";
    w->returned = true;
    w->returned_at = c->at;
    w->grad = false;
    c->returned++;
    c->live_grads--;
    c->live_grad_bytes -= w->grad_bytes;
    c->cost.returns++;
    c->cost.returned_bytes += w->return_bytes;
    return NULL;
}

static const char *check_end(struct checker *c, enum plan_op_kind kind)
{
    const bool nothing = c->plan->micros == 0 || c->count == 0;
    if (!nothing && !micro_done(c))
        return missing(c);
    if (!nothing && c->micro + 1 != c->plan->micros)
        return refuse(c, "comes before micro-batch %" PRIu32 ", the plan is for %" PRIu32,
                      c->micro + 1, c->plan->micros);
    if (c->live_units != 0)
        return held_still(c);
    if (c->prepared == (kind == PLAN_PREPARE))
        return kind == PLAN_PREPARE ? "comes twice" : "comes before PREPARE";
    c->prepared = true;
    c->committed = kind == PLAN_COMMIT;
    return NULL;
}

static const char *check_micro(struct checker *c, uint32_t micro)
{
    const bool keeps = keeps_all_step(c) || c->policy->strategy == PLAN_OWN;
    if (micro >= c->plan->micros)
        return refuse(c, "names a micro-batch the plan does not have: it has %" PRIu32,
                      c->plan->micros);
    if (micro == c->micro)
        return NULL;
    if (micro != c->micro + 1)
        return refuse(c, "comes in micro-batch %" PRIu32 ": they come one after the other",
                      c->micro);
    if (!micro_done(c))
        return missing(c);
    if (!keeps && c->live_units != 0)
        return held_still(c);
    micro_begin(c, micro);
    return NULL;
}

static const char *check_op(struct checker *c, const struct plan_op *op)
{
    if (c->committed)
        return "comes after COMMIT";
    if (op->kind == PLAN_PREPARE || op->kind == PLAN_COMMIT)
        return check_end(c, op->kind);
    if (c->prepared)
        return "comes after PREPARE";
    if (op->unit >= c->spec->unit_count)
        return refuse(c, "names a unit the model does not have: it has %" PRIu32,
                      c->spec->unit_count);
    const char *why = check_micro(c, op->micro);
    if (why != NULL)
        return why;
    switch (op->kind) {
    case PLAN_FETCH:
        return check_fetch(c, op->unit);
    case PLAN_WAIT:
        return check_wait(c, op->unit);
    case PLAN_FREE:
        return check_free(c, op->unit);
    case PLAN_FORWARD:
        return check_forward(c, op->unit);
    case PLAN_BACKWARD:
        return check_backward(c, op->unit);
    case PLAN_RETURN:
        return check_return(c, op->unit);
    default:
        return "is of no known kind";
    }
}

/* -- The whole plan ---------------------------------------------------------------------------- */

static int check_cost(const struct checker *c, struct shd_err *e)
{
    const struct plan_cost *got = &c->cost, *claimed = &c->plan->cost;
    const struct {
        const char *field;
        uint64_t got, claimed;
    } rows[] = {
        { "live_units_max", got->live_units_max, claimed->live_units_max },
        { "live_grads_max", got->live_grads_max, claimed->live_grads_max },
        { "live_param_bytes_max", got->live_param_bytes_max, claimed->live_param_bytes_max },
        { "live_grad_bytes_max", got->live_grad_bytes_max, claimed->live_grad_bytes_max },
        { "live_bytes_max", got->live_bytes_max, claimed->live_bytes_max },
        { "fetched_bytes", got->fetched_bytes, claimed->fetched_bytes },
        { "returned_bytes", got->returned_bytes, claimed->returned_bytes },
        { "fetches", got->fetches, claimed->fetches },
        { "returns", got->returns, claimed->returns },
    };
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        if (rows[i].got != rows[i].claimed)
            return err_set(e, SHD_EINVAL, "plan claims %s %" PRIu64 ", a replay counts %" PRIu64,
                           rows[i].field, rows[i].claimed, rows[i].got);
    return SHD_OK;
}

/* "operation 3, FREE of unit 0 'embed', micro-batch 0: why" */
static int refused(const struct checker *c, const struct plan_op *op, const char *why,
                   struct shd_err *e)
{
    const bool known = op->unit < c->spec->unit_count;
    if (op->kind == PLAN_PREPARE || op->kind == PLAN_COMMIT)
        return err_set(e, SHD_EINVAL, "operation %" PRIu32 ", %s: %s", c->at,
                       plan_op_name(op->kind), why);
    return err_set(e, SHD_EINVAL,
                   "operation %" PRIu32 ", %s of unit %" PRIu32 "%s%.40s%s, micro-batch %" PRIu32
                   ": %s",
                   c->at, plan_op_name(op->kind), op->unit, known ? " '" : "",
                   known ? name_of(c, op->unit) : "", known ? "'" : "", op->micro, why);
}

static int replay(struct checker *c, struct shd_err *e)
{
    for (c->at = 0; c->at < c->plan->op_count; c->at++) {
        const char *why = check_op(c, &c->plan->ops[c->at]);
        if (why != NULL)
            return refused(c, &c->plan->ops[c->at], why, e);
        note_peaks(c);
    }
    if (!c->committed)
        return err_set(e, SHD_EINVAL, "plan of %" PRIu32 " operations ends without COMMIT",
                       c->plan->op_count);
    return check_cost(c, e);
}

/* Count the readers of each unit in one sweep, and the sizes. */
static int survey(struct checker *c, struct shd_err *e)
{
    const enum shd_dtype dtype = c->policy->grad_dtype != 0 ? c->policy->grad_dtype
                                                            : c->spec->grad_dtype;
    for (uint32_t at = 0; at < c->count; at++) {
        const uint32_t unit = unit_at(c, at);
        if (unit >= c->spec->unit_count || c->units[unit].in_trace)
            return err_set(e, SHD_EINVAL, "trace position %" PRIu32 ": unit %" PRIu32 " is %s", at,
                           unit, unit < c->spec->unit_count ? "there already" : "not in the model");
        const struct spec_unit *su = &c->spec->units[unit];
        c->units[unit].in_trace = true;
        c->units[unit].reads++;
        for (uint32_t i = 0; i < su->uses_count; i++)
            c->units[su->uses[i]].reads++;
    }
    for (uint32_t u = 0; u < c->spec->unit_count; u++) {
        struct watch *w = &c->units[u];
        w->param_bytes = plan_unit_param_bytes(c->spec, u);
        w->fetched_bytes = plan_unit_fetched_bytes(c->spec, u);
        w->grad_bytes = plan_unit_grad_bytes(c->spec, u, SHD_F32);
        w->return_bytes = plan_unit_returned_bytes(c->spec, u, dtype);
        c->to_return += w->reads > 0 && !c->spec->units[u].frozen;
    }
    return SHD_OK;
}

int plan_check(const struct plan *plan, const struct spec *spec, const struct plan_policy *policy,
               const struct plan_trace *trace, struct shd_err *e)
{
    struct checker c = {
        .spec = spec,
        .plan = plan,
        .policy = policy,
        .order = trace != NULL ? trace->forward : NULL,
        .count = trace != NULL ? trace->count : spec->unit_count,
        .accumulate = spec->accumulate > 0 && !policy->shares_sums ? spec->accumulate : 1,
        .units = sys_calloc(spec->unit_count, sizeof *c.units),
    };
    if (c.units == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to check a plan");
    int r = survey(&c, e);
    if (r == SHD_OK)
        r = replay(&c, e);
    free(c.units);
    return r;
}
