/* See plan.h. Building: one pass over the micro-batches, each a forward and a backward sweep that
 * keep track of which units are held. Checking replays a plan against the same rules without
 * knowing the policy that made it. */
#include "client/plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/check.h"
#include "proto/sys.h"

enum unit_state { UNIT_FREE, UNIT_FETCHED, UNIT_READY };

const char *plan_op_name(enum plan_op_kind kind)
{
    static const char *const names[] = { "FETCH",  "WAIT", "FORWARD", "BACKWARD",
                                         "RETURN", "FREE", "PREPARE", "COMMIT" };
    return (unsigned)kind < ARRAY_SIZE(names) ? names[kind] : "?";
}

/* -- Building --------------------------------------------------------------------------------- */

struct builder {
    const struct spec *spec;          /* borrowed */
    const struct plan_policy *policy; /* borrowed */
    struct plan plan;                 /* handed over at the end */
    uint32_t op_capacity;
    uint8_t *state;             /* owned, [units], enum unit_state */
    uint8_t *grad_live;         /* owned, [units] */
    uint32_t *last_forward_use; /* owned, [units]: last unit whose forward reads it */
    uint32_t live_units, live_grads;
    uint32_t micro;
    bool failed; /* out of memory; checked once, at the end */
};

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

static void fetch_unit(struct builder *b, uint32_t unit)
{
    if (b->state[unit] != UNIT_FREE)
        return;
    emit(b, PLAN_FETCH, unit);
    b->state[unit] = UNIT_FETCHED;
    if (++b->live_units > b->plan.live_units_max)
        b->plan.live_units_max = b->live_units;
}

/* The unit and those it uses. */
static void fetch_needed(struct builder *b, uint32_t unit)
{
    const struct spec_unit *su = &b->spec->units[unit];
    for (uint32_t i = 0; i < su->uses_count; i++)
        fetch_unit(b, su->uses[i]);
    fetch_unit(b, unit);
}

static void wait_unit(struct builder *b, uint32_t unit)
{
    if (b->state[unit] == UNIT_READY)
        return;
    emit(b, PLAN_WAIT, unit);
    b->state[unit] = UNIT_READY;
}

static void wait_needed(struct builder *b, uint32_t unit)
{
    const struct spec_unit *su = &b->spec->units[unit];
    fetch_needed(b, unit);
    for (uint32_t i = 0; i < su->uses_count; i++)
        wait_unit(b, su->uses[i]);
    wait_unit(b, unit);
}

static void free_unit(struct builder *b, uint32_t unit)
{
    if (b->state[unit] == UNIT_FREE)
        return;
    emit(b, PLAN_FREE, unit);
    b->state[unit] = UNIT_FREE;
    b->live_units--;
}

static void grad_begin(struct builder *b, uint32_t unit)
{
    if (b->grad_live[unit])
        return;
    b->grad_live[unit] = 1;
    if (++b->live_grads > b->plan.live_grads_max)
        b->plan.live_grads_max = b->live_grads;
}

/* Free what no later forward reads. After the last unit nothing is freed: the backward sweep
 * starts with that unit and those it uses. */
static void free_after_forward(struct builder *b, uint32_t unit)
{
    const struct spec_unit *su = &b->spec->units[unit];
    if (unit + 1 == b->spec->unit_count)
        return;
    for (uint32_t i = 0; i < su->uses_count; i++)
        if (b->last_forward_use[su->uses[i]] == unit)
            free_unit(b, su->uses[i]);
    if (b->last_forward_use[unit] == unit)
        free_unit(b, unit);
}

static void build_forward(struct builder *b)
{
    const uint32_t units = b->spec->unit_count;
    for (uint32_t u = 0; u < units; u++) {
        wait_needed(b, u);
        for (uint32_t ahead = 1; ahead <= b->policy->forward_prefetch && u + ahead < units; ahead++)
            fetch_needed(b, u + ahead);
        emit(b, PLAN_FORWARD, u);
        free_after_forward(b, u);
    }
}

/* A unit's own backward comes after those of all its users, so it is the last to read the
 * parameters and to add to the gradient. */
static void build_backward(struct builder *b)
{
    for (uint32_t u = b->spec->unit_count; u-- > 0;) {
        const struct spec_unit *su = &b->spec->units[u];
        wait_needed(b, u);
        if (b->policy->backward_prefetch == PLAN_PREFETCH_PRE && u > 0)
            fetch_needed(b, u - 1);
        for (uint32_t i = 0; i < su->uses_count; i++)
            grad_begin(b, su->uses[i]);
        grad_begin(b, u);
        emit(b, PLAN_BACKWARD, u);
        free_unit(b, u);
        emit(b, PLAN_RETURN, u);
        b->grad_live[u] = 0;
        b->live_grads--;
    }
}

static int check_input(const struct spec *spec, const struct plan_policy *policy, uint32_t micros,
                       struct shd_err *e)
{
    if (policy->strategy != PLAN_ZERO3)
        return err_set(e, SHD_EINVAL, "plan strategy %d is not known", (int)policy->strategy);
    if (policy->backward_prefetch != PLAN_PREFETCH_NONE &&
        policy->backward_prefetch != PLAN_PREFETCH_PRE)
        return err_set(e, SHD_EINVAL, "backward prefetch %d is not known",
                       (int)policy->backward_prefetch);
    if (policy->forward_prefetch > SHD_UNITS_MAX)
        return err_set(e, SHD_EINVAL, "forward prefetch of %" PRIu32 " units: at most %u",
                       policy->forward_prefetch, SHD_UNITS_MAX);
    if (micros > SHD_MICROS_MAX)
        return err_set(e, SHD_EINVAL, "plan for %" PRIu32 " micro-batches: at most %u", micros,
                       SHD_MICROS_MAX);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        for (uint32_t i = 0; i < spec->units[u].uses_count; i++)
            if (spec->units[u].uses[i] >= u)
                return err_set(e, SHD_EINVAL,
                               "unit %" PRIu32 " '%s' uses unit %" PRIu32
                               ", which is not before it",
                               u, spec->units[u].name, spec->units[u].uses[i]);
    return SHD_OK;
}

static void find_last_uses(struct builder *b)
{
    for (uint32_t u = 0; u < b->spec->unit_count; u++) {
        b->last_forward_use[u] = u;
        for (uint32_t i = 0; i < b->spec->units[u].uses_count; i++)
            b->last_forward_use[b->spec->units[u].uses[i]] = u;
    }
}

static void build_step(struct builder *b)
{
    find_last_uses(b);
    for (b->micro = 0; b->micro < b->plan.micros && !b->failed; b->micro++) {
        build_forward(b);
        build_backward(b);
    }
    b->micro = 0;
    emit(b, PLAN_PREPARE, 0);
    emit(b, PLAN_COMMIT, 0);
}

int plan_build(const struct spec *spec, const struct plan_policy *policy, uint32_t micros,
               struct plan *ret_plan, struct shd_err *e)
{
    const int r = check_input(spec, policy, micros, e);
    if (r != SHD_OK)
        return r;
    struct builder b = {
        .spec = spec,
        .policy = policy,
        .plan = { .micros = micros },
        .state = sys_calloc(spec->unit_count, 1),
        .grad_live = sys_calloc(spec->unit_count, 1),
        .last_forward_use = sys_calloc(spec->unit_count, sizeof *b.last_forward_use),
    };
    b.failed = b.state == NULL || b.grad_live == NULL || b.last_forward_use == NULL;
    if (!b.failed)
        build_step(&b);
    free(b.state);
    free(b.grad_live);
    free(b.last_forward_use);
    if (b.failed) {
        plan_free(&b.plan);
        return err_set(e, SHD_ENOMEM,
                       "no memory for a plan of %" PRIu32 " units and %" PRIu32 " micro-batches",
                       spec->unit_count, micros);
    }
    *ret_plan = b.plan;
    return SHD_OK;
}

void plan_free(struct plan *plan)
{
    free(plan->ops);
    *plan = (struct plan){ 0 };
}

/* -- Checking --------------------------------------------------------------------------------- */

struct checker {
    const struct spec *spec; /* borrowed */
    const struct plan *plan; /* borrowed */
    uint8_t *state;          /* owned, [units], enum unit_state */
    uint8_t *grad_live;      /* owned, [units] */
    uint32_t live_units, live_grads;
    uint32_t live_units_max, live_grads_max;
    uint32_t micro;     /* the one whose computes and returns come now */
    uint32_t forwards;  /* of it: units 0 .. forwards - 1 are through */
    uint32_t backwards; /* of it: the last `backwards` units are through */
    uint32_t returns;   /* of it */
    bool prepared, committed;
};

/* NULL, or why op cannot come now. */
static const char *check_fetch(struct checker *c, uint32_t unit)
{
    if (c->state[unit] != UNIT_FREE)
        return "is held already";
    c->state[unit] = UNIT_FETCHED;
    if (++c->live_units > c->live_units_max)
        c->live_units_max = c->live_units;
    return NULL;
}

static const char *check_wait(struct checker *c, uint32_t unit)
{
    if (c->state[unit] == UNIT_READY)
        return "was waited for already";
    if (c->state[unit] == UNIT_FREE)
        return "was not fetched";
    c->state[unit] = UNIT_READY;
    return NULL;
}

static const char *check_free(struct checker *c, uint32_t unit)
{
    if (c->state[unit] == UNIT_FREE)
        return "is not held";
    if (c->state[unit] == UNIT_FETCHED)
        return "was fetched for nothing";
    c->state[unit] = UNIT_FREE;
    c->live_units--;
    return NULL;
}

static bool needed_ready(const struct checker *c, uint32_t unit)
{
    const struct spec_unit *su = &c->spec->units[unit];
    for (uint32_t i = 0; i < su->uses_count; i++)
        if (c->state[su->uses[i]] != UNIT_READY)
            return false;
    return c->state[unit] == UNIT_READY;
}

static const char *check_forward(struct checker *c, uint32_t unit)
{
    if (unit != c->forwards)
        return "is out of order";
    if (!needed_ready(c, unit))
        return "or a unit it uses is not readable";
    c->forwards++;
    return NULL;
}

static void check_grad(struct checker *c, uint32_t unit)
{
    if (c->grad_live[unit])
        return;
    c->grad_live[unit] = 1;
    if (++c->live_grads > c->live_grads_max)
        c->live_grads_max = c->live_grads;
}

static const char *check_backward(struct checker *c, uint32_t unit)
{
    const uint32_t units = c->spec->unit_count;
    if (c->forwards != units || unit + 1 + c->backwards != units)
        return "is out of order";
    if (!needed_ready(c, unit))
        return "or a unit it uses is not readable";
    for (uint32_t i = 0; i < c->spec->units[unit].uses_count; i++)
        check_grad(c, c->spec->units[unit].uses[i]);
    check_grad(c, unit);
    c->backwards++;
    return NULL;
}

static const char *check_return(struct checker *c, uint32_t unit)
{
    if (unit + c->backwards < c->spec->unit_count)
        return "has not had its backward, the last to add to its gradient";
    if (!c->grad_live[unit])
        return "was returned already";
    c->grad_live[unit] = 0;
    c->live_grads--;
    if (++c->returns == c->spec->unit_count) {
        c->micro++;
        c->forwards = c->backwards = c->returns = 0;
    }
    return NULL;
}

static const char *check_end(struct checker *c, enum plan_op_kind kind)
{
    if (c->micro != c->plan->micros)
        return "comes before all micro-batches are returned";
    if (c->live_units != 0)
        return "comes while units are held";
    if (kind == PLAN_PREPARE) {
        if (c->prepared)
            return "comes twice";
        c->prepared = true;
        return NULL;
    }
    if (!c->prepared)
        return "comes before PREPARE";
    c->committed = true;
    return NULL;
}

static const char *check_op(struct checker *c, const struct plan_op *op)
{
    if (c->committed)
        return "comes after COMMIT";
    if (op->kind == PLAN_PREPARE || op->kind == PLAN_COMMIT)
        return check_end(c, op->kind);
    if (op->unit >= c->spec->unit_count)
        return "names a unit the model does not have";
    if (op->micro >= c->plan->micros)
        return "names a micro-batch the plan does not have";
    const bool in_order = op->micro == c->micro;
    switch (op->kind) {
    case PLAN_FETCH:
        return check_fetch(c, op->unit);
    case PLAN_WAIT:
        return check_wait(c, op->unit);
    case PLAN_FREE:
        return check_free(c, op->unit);
    case PLAN_FORWARD:
        return in_order ? check_forward(c, op->unit) : "is of another micro-batch";
    case PLAN_BACKWARD:
        return in_order ? check_backward(c, op->unit) : "is of another micro-batch";
    case PLAN_RETURN:
        return in_order ? check_return(c, op->unit) : "is of another micro-batch";
    default:
        return "is of no known kind";
    }
}

static int replay(struct checker *c, struct shd_err *e)
{
    for (uint32_t i = 0; i < c->plan->op_count; i++) {
        const struct plan_op *op = &c->plan->ops[i];
        const char *why = check_op(c, op);
        if (why != NULL)
            return err_set(e, SHD_EINVAL,
                           "operation %" PRIu32 ", %s of unit %" PRIu32 ", micro-batch %" PRIu32
                           ": %s",
                           i, plan_op_name(op->kind), op->unit, op->micro, why);
    }
    if (!c->committed)
        return err_set(e, SHD_EINVAL, "plan of %" PRIu32 " operations ends without COMMIT",
                       c->plan->op_count);
    if (c->live_units_max != c->plan->live_units_max ||
        c->live_grads_max != c->plan->live_grads_max)
        return err_set(e, SHD_EINVAL,
                       "plan claims %" PRIu32 " units and %" PRIu32 " gradients "
                       "live at once, needs %" PRIu32 " and %" PRIu32,
                       c->plan->live_units_max, c->plan->live_grads_max, c->live_units_max,
                       c->live_grads_max);
    return SHD_OK;
}

int plan_check(const struct plan *plan, const struct spec *spec, struct shd_err *e)
{
    struct checker c = {
        .spec = spec,
        .plan = plan,
        .state = sys_calloc(spec->unit_count, 1),
        .grad_live = sys_calloc(spec->unit_count, 1),
    };
    const int r = c.state != NULL && c.grad_live != NULL
                      ? replay(&c, e)
                      : err_set(e, SHD_ENOMEM, "no memory to check a plan");
    free(c.state);
    free(c.grad_live);
    return r;
}
