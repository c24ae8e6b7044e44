/* See follow.h.
 *
 * Happy path: the plan's next compute is the one that runs; operations up to it are carried out,
 * then it computes. So a model that repeats itself runs as if its order were fixed.
 *
 * Departures. The unit comes later in the plan: what lies between is skipped, units that were
 * fetched for it are let go (a miss each), frees and returns in between are carried out. The plan
 * does not have it, or no longer: its unit, and what it uses, is fetched at once (a miss each) and
 * is a *stray* that nothing in the plan will free: this file does. Where there is no room for it,
 * units that were only prefetched go first, then others, which will be fetched again when they
 * run. After each group of micro-batches whose order was not the planned one, the rest of the
 * step gets a new plan. */
#include "client/run/follow.h"

#include <inttypes.h>

#include "proto/base/check.h"

#define NONE UINT32_MAX

static bool holds_all_step(const struct step_run *run)
{
    const enum plan_strategy s = run->m->policy.plan.strategy;
    return s == PLAN_DDP || s == PLAN_ZERO1;
}

/* Does computing `unit` read `other`? */
static bool needs(const struct step_run *run, uint32_t unit, uint32_t other)
{
    const struct spec_unit *su = &run->m->spec->units[unit];
    for (uint32_t i = 0; i < su->uses_count; i++)
        if (su->uses[i] == other)
            return true;
    return unit == other;
}

/* -- Room -------------------------------------------------------------------------------------- */

/* The unit to let go of for `unit`: one that nothing has read yet (it was prefetched), else a
 * stray, else another. NONE: nothing is left. */
static uint32_t find_victim(const struct step_run *run, uint32_t unit)
{
    uint32_t victim = NONE, rank_best = 0;
    for (uint32_t v = 0; v < run->m->spec->unit_count; v++) {
        const struct exec_unit *x = &run->exec->units[v];
        const uint32_t acquired = run->m->holds[v].acquired;
        if (!x->fetched || acquired > (x->waited ? 1u : 0u) || needs(run, unit, v))
            continue;
        const uint32_t rank = !x->read ? 3 : x->stray ? 2 : 1;
        if (rank > rank_best) {
            rank_best = rank;
            victim = v;
        }
    }
    return victim;
}

static int fetch_stray(struct step_run *run, uint32_t needed, uint32_t unit, struct shd_err *e)
{
    int r = exec_fetch(run, needed, e);
    while (r == SHD_EBUSY) {
        const uint32_t victim = find_victim(run, unit);
        if (victim == NONE)
            return r;
        exec_let_go(run, victim);
        r = exec_fetch(run, needed, e);
    }
    if (r == SHD_OK)
        run->exec->units[needed].stray = true;
    return r;
}

static int ensure_one(struct step_run *run, uint32_t needed, uint32_t unit, struct shd_err *e)
{
    int r = SHD_OK;
    if (!run->exec->units[needed].fetched) {
        exec_miss(run, needed);
        r = fetch_stray(run, needed, unit, e);
    }
    return r == SHD_OK ? exec_wait(run, needed, e) : r;
}

/* Make unit and what it uses readable, whatever the plan did. */
static int ensure(struct step_run *run, uint32_t unit, struct shd_err *e)
{
    const struct spec_unit *su = &run->m->spec->units[unit];
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < su->uses_count; i++)
        r = ensure_one(run, su->uses[i], unit, e);
    return r == SHD_OK ? ensure_one(run, unit, unit, e) : r;
}

/* Strays are freed here as the strategy would free them, for nothing in the plan does. Those that
 * `unit` (NONE: nothing) reads stay. */
static void free_strays(struct step_run *run, uint32_t unit, bool forward)
{
    const bool keeps = run->m->policy.plan.strategy == PLAN_ZERO2 && forward;
    if (holds_all_step(run) || keeps)
        return;
    for (uint32_t u = 0; u < run->m->spec->unit_count; u++) {
        const struct exec_unit *x = &run->exec->units[u];
        const bool wanted = run->m->policy.plan.strategy == PLAN_ZERO2 && x->ran && !x->backed;
        if (x->stray && !wanted && (unit == NONE || !needs(run, unit, u)))
            exec_let_go(run, u);
    }
}

/* -- Going through the plan -------------------------------------------------------------------- */

static const struct plan_op *op_at(const struct step_run *run, uint32_t at)
{
    return &run->exec->plan.ops[at];
}

static bool in_micro(const struct step_run *run, uint32_t at, uint32_t micro)
{
    return op_at(run, at)->kind != PLAN_PREPARE && op_at(run, at)->micro == micro - run->base;
}

/* The operation that computes unit, in what is left of the micro-batch; NONE. */
static uint32_t find_compute(const struct step_run *run, uint32_t micro, enum plan_op_kind kind,
                             uint32_t unit)
{
    for (uint32_t at = run->at; in_micro(run, at, micro); at++)
        if (op_at(run, at)->kind == kind && op_at(run, at)->unit == unit)
            return at;
    return NONE;
}

static uint32_t micro_end(const struct step_run *run, uint32_t micro)
{
    uint32_t at = run->at;
    while (in_micro(run, at, micro))
        at++;
    return at;
}

/* Prefetch gives way: where there is no room, the unit is fetched when it runs. */
static int pass_fetch(struct step_run *run, uint32_t unit, struct shd_err *e)
{
    const int r = exec_fetch(run, unit, e);
    return r == SHD_EBUSY ? SHD_OK : r;
}

/* An operation between two computes. unit: what will be computed next, or NONE. */
static int pass_op(struct step_run *run, const struct plan_op *op, uint32_t micro, uint32_t unit,
                   struct shd_err *e)
{
    const struct exec_unit *x = &run->exec->units[op->unit];
    const bool wanted = !x->away || (unit != NONE && needs(run, unit, op->unit));
    if (op->kind == PLAN_FETCH && wanted)
        return pass_fetch(run, op->unit, e);
    if (op->kind == PLAN_WAIT && wanted && x->fetched)
        return exec_wait(run, op->unit, e);
    if (op->kind == PLAN_FREE)
        exec_let_go(run, op->unit);
    if (op->kind == PLAN_RETURN)
        return exec_return(run, micro, op->unit, e);
    return SHD_OK;
}

/* Units whose compute is passed over, in [run->at, end). */
static void mark_away(struct step_run *run, uint32_t end, bool away)
{
    for (uint32_t at = run->at; at < end; at++) {
        const struct plan_op *op = op_at(run, at);
        if (op->kind == PLAN_FORWARD || op->kind == PLAN_BACKWARD)
            run->exec->units[op->unit].away = away;
    }
}

/* Units that were fetched for a compute that is passed over are in the way. */
static void drop_away(struct step_run *run, uint32_t unit)
{
    for (uint32_t u = 0; u < run->m->spec->unit_count; u++) {
        const struct exec_unit *x = &run->exec->units[u];
        if (x->away && x->fetched && !x->read && (unit == NONE || !needs(run, unit, u)))
            exec_let_go(run, u);
    }
}

/* Carry out the operations before `end`; the next compute is of unit (NONE: there is none). */
static int pass(struct step_run *run, uint32_t end, uint32_t micro, uint32_t unit,
                struct shd_err *e)
{
    const uint32_t begin = run->at;
    int r = SHD_OK;
    mark_away(run, end, true);
    drop_away(run, unit);
    for (; r == SHD_OK && run->at < end; run->at++)
        r = pass_op(run, op_at(run, run->at), micro, unit, e);
    const uint32_t at = run->at;
    run->at = begin;
    mark_away(run, end, false);
    run->at = at;
    return r;
}

/* Carry out what the plan does right after the compute before. */
static int pass_done(struct step_run *run, uint32_t micro, struct shd_err *e)
{
    int r = SHD_OK;
    while (r == SHD_OK && in_micro(run, run->at, micro) &&
           (op_at(run, run->at)->kind == PLAN_FREE || op_at(run, run->at)->kind == PLAN_RETURN)) {
        r = pass_op(run, op_at(run, run->at), micro, NONE, e);
        run->at++;
    }
    return r;
}

/* Make ready to compute unit. *ret_planned: the plan has it here. */
static int make_ready(struct step_run *run, uint32_t micro, enum plan_op_kind kind, uint32_t unit,
                      bool *ret_planned, struct shd_err *e)
{
    const uint32_t at = find_compute(run, micro, kind, unit);
    free_strays(run, unit, kind == PLAN_FORWARD);
    int r = at != NONE ? pass(run, at, micro, unit, e) : pass_done(run, micro, e);
    if (r == SHD_OK && at != NONE)
        run->at = at + 1;
    *ret_planned = at != NONE;
    return r == SHD_OK ? ensure(run, unit, e) : r;
}

/* -- A micro-batch ----------------------------------------------------------------------------- */

static int ask_next(const struct step_run *run, uint32_t micro, uint32_t unit, uint32_t *ret_next,
                    struct shd_err *e)
{
    const uint32_t next = run->compute.next(run->compute.ctx, run->micros[micro], unit);
    if (next != NONE && next >= run->m->spec->unit_count)
        return err_set(e, SHD_EINVAL,
                       "next() of micro-batch %" PRIu32 " says unit %" PRIu32 ", the model has "
                       "%" PRIu32,
                       run->micros[micro], next, run->m->spec->unit_count);
    if (next != NONE && run->exec->units[next].ran)
        return err_set(e, SHD_EINVAL,
                       "next() of micro-batch %" PRIu32 " says unit %" PRIu32
                       " '%s', which has run",
                       run->micros[micro], next, run->m->spec->units[next].name);
    *ret_next = next;
    return SHD_OK;
}

static int follow_forward(struct step_run *run, uint32_t micro, struct shd_err *e)
{
    uint32_t unit = NONE;
    bool planned;
    int r = ask_next(run, micro, NONE, &unit, e);
    while (r == SHD_OK && unit != NONE) {
        r = make_ready(run, micro, PLAN_FORWARD, unit, &planned, e);
        if (r == SHD_OK)
            r = exec_forward(run, micro, unit, e);
        if (r == SHD_OK)
            r = ask_next(run, micro, unit, &unit, e);
    }
    return r;
}

/* In the last micro-batch of a group gradients are returned where the plan says so; those of
 * strays at once, unless everything is returned at the end. Before that they are summed. */
static int after_backward(struct step_run *run, uint32_t micro, uint32_t unit, bool planned,
                          struct shd_err *e)
{
    const bool at_end = planned || run->m->policy.plan.strategy == PLAN_DDP;
    if (exec_group_ends(run, micro) && at_end)
        return SHD_OK;
    return exec_return_around(run, micro, unit, e);
}

static int follow_backward(struct step_run *run, uint32_t micro, struct shd_err *e)
{
    const struct exec *x = run->exec;
    bool planned;
    int r = x->ran_count == 0 ? exec_metrics(run, micro, e) : SHD_OK;
    for (uint32_t i = x->ran_count; r == SHD_OK && i-- > 0;) {
        r = make_ready(run, micro, PLAN_BACKWARD, x->ran[i], &planned, e);
        if (r == SHD_OK)
            r = exec_backward(run, micro, x->ran[i], e);
        if (r == SHD_OK)
            r = after_backward(run, micro, x->ran[i], planned, e);
    }
    return r;
}

static int follow_micro(struct step_run *run, uint32_t micro, struct shd_err *e)
{
    exec_begin_micro(run);
    run->exec->recorded = false;
    int r = follow_forward(run, micro, e);
    if (r == SHD_OK)
        r = follow_backward(run, micro, e);
    if (r == SHD_OK)
        r = pass(run, micro_end(run, micro), micro, NONE, e);
    if (r != SHD_OK)
        return r;
    free_strays(run, NONE, /* forward= */ false);
    run->exec->recorded = true;
    return exec_end_micro(run, micro, e);
}

int follow_micros(struct step_run *run, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t micro = 0; r == SHD_OK && micro < run->count; micro++) {
        r = follow_micro(run, micro, e);
        const uint32_t left = run->count - micro - 1;
        if (r != SHD_OK || left == 0 || !exec_group_ends(run, micro) || exec_order_kept(run))
            continue;
        r = exec_plan(run, left, /* traced= */ true, e);
        run->base = micro + 1;
        run->at = 0;
    }
    return r;
}
