#include "tests/lib/plan_run.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/plan_cost.h"
#include "client/plan/plan_time.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "tests/lib/plan_toy.h"

/* -- On numbers -------------------------------------------------------------------------------- */

struct number {      /* of one unit */
    uint64_t params; /* as read; 0: it cannot be */
    bool held;
    uint64_t grad;   /* of the group so far */
    uint64_t groups; /* of what was returned, in order */
    bool forwarded, backed, returned;
};

struct run {
    const struct spec *spec;          /* borrowed */
    const struct plan_policy *policy; /* borrowed */
    struct number *units;             /* owned */
    uint64_t activation;
    uint32_t held;
    uint64_t bytes;
    bool failed;
};

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = (a ^ (b + UINT64_C(0x9e3779b97f4a7c15))) * UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 29;
    return x * UINT64_C(0x94d049bb133111eb) + a;
}

/* What a unit's compute is made of: all that it reads, and what ran before it. */
static uint64_t compute(const struct run *r, uint32_t unit)
{
    const struct spec_unit *su = &r->spec->units[unit];
    uint64_t x = mix(r->activation, r->units[unit].params);
    for (uint32_t i = 0; i < su->uses_count; i++)
        x = mix(x, r->units[su->uses[i]].params);
    return x;
}

static void add(struct run *r, uint32_t unit, uint64_t x)
{
    if (!r->spec->units[unit].frozen)
        r->units[unit].grad += mix(x, unit);
}

static void forward(struct run *r, uint32_t unit)
{
    r->activation = compute(r, unit);
    r->units[unit].forwarded = true;
}

static void backward(struct run *r, uint32_t unit)
{
    const struct spec_unit *su = &r->spec->units[unit];
    const uint64_t x = compute(r, unit);
    r->activation = x;
    add(r, unit, x);
    for (uint32_t i = 0; i < su->uses_count; i++)
        add(r, su->uses[i], x);
    r->units[unit].backed = true;
}

static void give(struct run *r, uint32_t unit)
{
    struct number *n = &r->units[unit];
    n->groups = mix(n->groups, n->grad);
    n->grad = 0;
    n->returned = true;
}

static uint64_t params_of(uint32_t unit)
{
    return mix(UINT64_C(77), unit + 1);
}

static void hold(struct run *r, uint32_t unit, bool more)
{
    const struct plan_policy *p = r->policy;
    const uint64_t bytes = plan_unit_param_bytes(r->spec, unit);
    r->failed |= r->units[unit].held == more;
    r->units[unit].held = more;
    r->units[unit].params = 0;
    r->held = more ? r->held + 1 : r->held - 1;
    r->bytes = more ? r->bytes + bytes : r->bytes - bytes;
    r->failed |= p->max_live_units > 0 && r->held > p->max_live_units;
    r->failed |= p->max_live_bytes > 0 && r->bytes > p->max_live_bytes;
}

static void run_op(struct run *r, const struct plan_op *op)
{
    switch (op->kind) {
    case PLAN_FETCH:
        hold(r, op->unit, true);
        break;
    case PLAN_WAIT:
        r->failed |= !r->units[op->unit].held;
        r->units[op->unit].params = params_of(op->unit);
        break;
    case PLAN_FREE:
        hold(r, op->unit, false);
        break;
    case PLAN_FORWARD:
        r->failed |= r->units[op->unit].forwarded;
        forward(r, op->unit);
        break;
    case PLAN_BACKWARD:
        r->failed |= r->units[op->unit].backed || !r->units[op->unit].forwarded;
        backward(r, op->unit);
        break;
    case PLAN_RETURN:
        r->failed |= r->units[op->unit].returned || r->spec->units[op->unit].frozen;
        give(r, op->unit);
        break;
    case PLAN_PREPARE:
    case PLAN_COMMIT:
        break;
    }
}

static uint32_t group_of(const struct spec *spec)
{
    return spec->accumulate > 0 ? spec->accumulate : 1;
}

static void begin_micro(struct run *r, uint32_t micro)
{
    r->activation = mix(1, micro);
    for (uint32_t u = 0; u < r->spec->unit_count; u++) {
        r->units[u].forwarded = r->units[u].backed = false;
        if (micro % group_of(r->spec) == 0)
            r->units[u].returned = false;
    }
}

/* As the executor goes through it: micro-batch by micro-batch. */
static void run_ops(struct run *r, const struct plan *plan)
{
    uint32_t at = 0;
    for (uint32_t micro = 0; micro < plan->micros; micro++) {
        begin_micro(r, micro);
        for (; at < plan->op_count && plan->ops[at].kind < PLAN_PREPARE &&
               plan->ops[at].micro == micro;
             at++)
            run_op(r, &plan->ops[at]);
        for (uint32_t u = 0; u < r->spec->unit_count; u++)
            r->failed |= !r->units[u].backed;
    }
    r->failed |= at + 2 != plan->op_count || plan->ops[at].kind != PLAN_PREPARE ||
                 plan->ops[at + 1].kind != PLAN_COMMIT;
}

static void run_all_held(struct run *r, uint32_t micros)
{
    for (uint32_t u = 0; u < r->spec->unit_count; u++)
        r->units[u].params = params_of(u);
    for (uint32_t micro = 0; micro < micros; micro++) {
        begin_micro(r, micro);
        for (uint32_t u = 0; u < r->spec->unit_count; u++)
            forward(r, u);
        for (uint32_t u = r->spec->unit_count; u-- > 0;)
            backward(r, u);
        for (uint32_t u = 0; u < r->spec->unit_count && (micro + 1) % group_of(r->spec) == 0; u++)
            if (!r->spec->units[u].frozen)
                give(r, u);
    }
}

int plan_run(const struct plan *plan, const struct spec *spec, const struct plan_policy *policy,
             struct shd_err *e)
{
    struct run got = { .spec = spec, .policy = policy }, want = got;
    got.units = calloc(spec->unit_count, sizeof *got.units);
    want.units = calloc(spec->unit_count, sizeof *want.units);
    CHECK(got.units != NULL && want.units != NULL);
    run_ops(&got, plan);
    run_all_held(&want, plan->micros);
    int r = SHD_OK;
    if (got.failed || got.held != 0 || got.bytes != 0)
        r = err_set(e, SHD_EINTERNAL, "a plan that ends with %" PRIu32 " units held%s", got.held,
                    got.failed ? ", or does what cannot be done" : "");
    for (uint32_t u = 0; r == SHD_OK && u < spec->unit_count; u++)
        if (got.units[u].groups != want.units[u].groups || got.units[u].grad != 0)
            r = err_set(e, SHD_EINTERNAL, "unit %" PRIu32 " has another gradient", u);
    free(got.units);
    free(want.units);
    return r;
}

/* -- On a clock -------------------------------------------------------------------------------- */

static struct plan_rates rates_of_some_machine(void)
{
    struct plan_rates rates = { .processors = 2,
                                .near_bytes = 1e6,
                                .far_bytes = 1e8,
                                .threads_share = 0.5,
                                .wake_ns = 3,
                                .send_ns = 5,
                                .op_ns = 1,
                                .return_ns = 7,
                                .kernel_ns = 2,
                                .commit_ns = 11 };
    for (uint32_t d = 0; d < PLAN_DTYPES; d++) {
        rates.first[d] = rates.next[d] = (struct plan_rate){ 0.01, 0.02 };
        rates.stage[d] = rates.fetch[d] = (struct plan_rate){ 0.01, 0.03 };
        for (uint32_t k = 0; k < SPEC_OPTIMIZERS; k++)
            rates.update[k][d] = (struct plan_rate){ 0.02, 0.04 };
    }
    return rates;
}

static void lay_out(struct spec *spec)
{
    spec->elems = 0;
    spec->optimizer = spec->optimizer != 0 ? spec->optimizer : SPEC_ADAMW;
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        spec->units[u].elems = layout_align(spec->tensors[u].elems, SHD_BLOCK_ELEMS);
        spec->elems += spec->tensors[u].elems;
    }
}

int plan_run_times(const struct plan *plan, struct spec *spec, struct shd_err *e)
{
    static const struct plan_shape shapes[] = {
        { .workers = 1, .daemons = 1, .threads = 1, .slots = 64 },
        { .workers = 1, .daemons = 2, .threads = 1, .slots = 1, .copies = true },
        { .workers = 2, .daemons = 1, .threads = 2, .slots = 2 },
        { .workers = 3, .daemons = 2, .threads = 1, .slots = 1 },
    };
    const struct plan_rates rates = rates_of_some_machine();
    double *ns = calloc(spec->unit_count, sizeof *ns);
    int r = SHD_OK;
    CHECK(ns != NULL);
    lay_out(spec);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        ns[u] = 1000 + u;
    const struct plan_compute compute = { ns, ns };
    double least = 0;
    for (uint32_t u = 0; u < spec->unit_count; u++)
        least += 2 * ns[u] * plan->micros;
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(shapes); i++) {
        struct plan_time t;
        r = plan_time(spec, plan, &rates, &shapes[i], &compute, 0, &t, e);
        if (r == SHD_OK && t.compute_ns < least - 1)
            r = err_set(e, SHD_EINTERNAL, "%g ns of compute, all units take %g", t.compute_ns,
                        least);
    }
    free(ns);
    return r;
}

/* -- Edits ------------------------------------------------------------------------------------- */

static void take_out(struct plan *plan, uint32_t at)
{
    memmove(plan->ops + at, plan->ops + at + 1, (plan->op_count - at - 1) * sizeof *plan->ops);
    plan->op_count--;
}

static void put_in(struct plan *plan, uint32_t at, struct plan_op op)
{
    struct plan_op *ops = realloc(plan->ops, (plan->op_count + 1) * sizeof *ops);
    CHECK(ops != NULL && at <= plan->op_count);
    plan->ops = ops;
    memmove(ops + at + 1, ops + at, (plan->op_count - at) * sizeof *ops);
    ops[at] = op;
    plan->op_count++;
}

/* The next operation of the unit that is of this kind; op_count: there is none. */
static uint32_t find(const struct plan *plan, uint32_t from, enum plan_op_kind kind, uint32_t unit)
{
    while (from < plan->op_count && (plan->ops[from].kind != kind || plan->ops[from].unit != unit))
        from++;
    return from;
}

/* An operation goes elsewhere, and into the micro-batch that it comes to stand in. */
static void move(struct plan *plan, uint32_t from, uint32_t to)
{
    struct plan_op op = plan->ops[from];
    take_out(plan, from);
    if (op.kind < PLAN_PREPARE && to > 0 && plan->ops[to - 1].kind < PLAN_PREPARE)
        op.micro = plan->ops[to - 1].micro;
    put_in(plan, to, op);
}

/* What is freed and fetched again stays. */
static void hold_on(struct plan *plan, uint32_t at)
{
    const uint32_t unit = plan->ops[at].unit;
    const uint32_t fetch = find(plan, at, PLAN_FETCH, unit);
    const uint32_t wait = find(plan, fetch, PLAN_WAIT, unit);
    if (wait == plan->op_count)
        return;
    take_out(plan, wait);
    take_out(plan, fetch);
    take_out(plan, at);
}

/* A unit that was read goes, and is back at once. */
static void let_go(struct plan *plan, uint32_t at)
{
    const uint32_t unit = plan->ops[at].unit, micro = plan->ops[at].micro;
    put_in(plan, at + 1, (struct plan_op){ PLAN_WAIT, unit, micro });
    put_in(plan, at + 1, (struct plan_op){ PLAN_FETCH, unit, micro });
    put_in(plan, at + 1, (struct plan_op){ PLAN_FREE, unit, micro });
}

void plan_edit(struct plan *plan, const struct spec *spec, uint64_t *rng)
{
    const uint32_t at = toy_below(rng, plan->op_count);
    const uint32_t near = at + toy_below(rng, 7), to = near > 3 ? near - 3 : 0;
    struct plan_op *op = &plan->ops[at];
    switch (toy_below(rng, 12)) {
    case 0:
        take_out(plan, at);
        break;
    case 1:
        put_in(plan, at, *op);
        break;
    case 2:
        op->unit = toy_below(rng, spec->unit_count);
        break;
    case 3:
        op->kind = (enum plan_op_kind)toy_below(rng, PLAN_COMMIT + 1);
        break;
    case 4:
        if (op->kind < PLAN_PREPARE)
            move(plan, at, toy_below(rng, plan->op_count));
        break;
    case 5:
    case 6:
        if (op->kind == PLAN_FREE)
            hold_on(plan, at);
        break;
    case 7:
        if (op->kind == PLAN_FORWARD || op->kind == PLAN_BACKWARD)
            let_go(plan, at);
        break;
    default:
        if (op->kind < PLAN_PREPARE)
            move(plan, at, to < plan->op_count ? to : plan->op_count - 1);
        break;
    }
}
