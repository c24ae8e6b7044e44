/* See exec.h. */
#include "client/run/exec.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/copy.h"
#include "client/paths/path.h"
#include "client/paths/rewind.h"
#include "client/plan/plan_own.h"
#include "client/run/give.h"
#include "client/run/hold.h"
#include "client/run/policy.h"
#include "client/session/activity.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

/* -- Memory and plan --------------------------------------------------------------------------- */

static void find_users(const struct spec *spec, struct exec *x)
{
    for (uint32_t u = 0; u < spec->unit_count; u++)
        for (uint32_t i = 0; i < spec->units[u].uses_count; i++)
            x->units[spec->units[u].uses[i]].has_users = true;
}

static int exec_new(const struct spec *spec, struct exec **ret_exec, struct shd_err *e)
{
    struct exec *x = sys_calloc(1, sizeof *x);
    if (x != NULL) {
        x->trace = sys_calloc(spec->unit_count, sizeof *x->trace);
        x->ran = sys_calloc(spec->unit_count, sizeof *x->ran);
        x->micros = sys_calloc(spec->micro_batches, sizeof *x->micros);
        x->units = sys_calloc(spec->unit_count, sizeof *x->units);
    }
    if (x == NULL || x->trace == NULL || x->ran == NULL || x->micros == NULL || x->units == NULL) {
        exec_free(x);
        return err_set(e, SHD_ENOMEM, "no memory to run %" PRIu32 " units", spec->unit_count);
    }
    find_users(spec, x);
    *ret_exec = x;
    return SHD_OK;
}

void exec_free(struct exec *x)
{
    if (x == NULL)
        return;
    plan_free(&x->plan);
    free(x->trace);
    free(x->ran);
    free(x->micros);
    free(x->units);
    free(x);
}

bool exec_order_kept(const struct step_run *run)
{
    const struct exec *x = run->exec;
    const uint32_t planned = x->traced ? x->trace_count : run->m->spec->unit_count;
    if (x->ran_count != planned)
        return false;
    for (uint32_t i = 0; i < planned; i++)
        if (x->ran[i] != (x->traced ? x->trace[i] : i))
            return false;
    return true;
}

/* All units in the order of the spec: a plan that was given is for that. */
static bool in_spec_order(const struct step_run *run)
{
    const struct exec *x = run->exec;
    uint32_t i = 0;
    while (i < x->ran_count && x->ran[i] == i)
        i++;
    return i == run->m->spec->unit_count;
}

static int make_plan(const struct step_run *run, uint32_t micros, bool traced,
                     struct plan *ret_plan, struct shd_err *e)
{
    const struct shd_model *m = run->m;
    const struct plan_trace trace = { run->exec->ran, run->exec->ran_count };
    if (m->policy.own != NULL && (!traced || in_spec_order(run)))
        return plan_own_fit(m->policy.own, m->spec, micros, ret_plan, e);
    return plan_build(m->spec, &m->policy.plan, traced ? &trace : NULL, micros, ret_plan, e);
}

int exec_plan(struct step_run *run, uint32_t micros, bool traced, struct shd_err *e)
{
    struct exec *x = run->exec;
    struct shd_model *m = run->m;
    if (x->plan.op_count > 0 && x->plan.micros == micros && x->traced == traced &&
        (!traced || exec_order_kept(run)))
        return SHD_OK;
    struct plan plan;
    int r = make_plan(run, micros, traced, &plan, e);
    if (r != SHD_OK)
        return r;
    r = policy_reader(m, e);
    if (r != SHD_OK) {
        plan_free(&plan);
        return r;
    }
    if (m->copy != NULL)
        copy_grow(m->copy, plan.cost.live_units_max);
    plan_free(&x->plan);
    x->plan = plan;
    x->traced = traced;
    x->trace_count = x->ran_count;
    memcpy(x->trace, x->ran, x->ran_count * sizeof *x->ran);
    return SHD_OK;
}

/* -- Holding units ----------------------------------------------------------------------------- */

int exec_fetch(struct step_run *run, uint32_t unit, struct shd_err *e)
{
    struct exec_unit *u = &run->exec->units[unit];
    if (u->fetched)
        return SHD_OK;
    const int r = hold_fetch(run->m, unit, e);
    if (r != SHD_OK)
        return r;
    u->fetched = true;
    u->waited = u->read = u->stray = false;
    return SHD_OK;
}

int exec_wait(struct step_run *run, uint32_t unit, struct shd_err *e)
{
    struct exec_unit *u = &run->exec->units[unit];
    CHECK(u->fetched);
    if (u->waited)
        return SHD_OK;
    int r = hold_fetch(run->m, unit, e); /* a callback may have acquired and released it */
    if (r == SHD_OK)
        r = hold_acquire(run->m, unit, e);
    u->waited = r == SHD_OK;
    return r;
}

void exec_miss(struct step_run *run, uint32_t unit)
{
    run->m->holds[unit].misses++;
    run->m->session->plan_misses++;
}

static void let_go(struct step_run *run, uint32_t unit)
{
    struct exec_unit *u = &run->exec->units[unit];
    if (u->waited)
        hold_release(run->m, unit);
    else if (u->fetched)
        hold_let_go(run->m, unit);
    u->fetched = u->waited = u->stray = false;
}

void exec_let_go(struct step_run *run, uint32_t unit)
{
    const struct exec_unit *u = &run->exec->units[unit];
    if (u->fetched && !u->read)
        exec_miss(run, unit);
    let_go(run, unit);
}

void exec_let_go_all(struct step_run *run)
{
    for (uint32_t u = 0; u < run->m->spec->unit_count; u++)
        let_go(run, u);
}

static void mark_read(struct step_run *run, uint32_t unit)
{
    const struct spec_unit *su = &run->m->spec->units[unit];
    run->exec->units[unit].read = true;
    for (uint32_t i = 0; i < su->uses_count; i++)
        run->exec->units[su->uses[i]].read = true;
}

/* -- Computing --------------------------------------------------------------------------------- */

static int compute_failed(const struct step_run *run, const char *what, uint32_t micro,
                          uint32_t unit, int code, struct shd_err *e)
{
    return err_set(e, SHD_EINTERNAL,
                   "%s of unit %" PRIu32 " '%s', micro-batch %" PRIu32 ", returned %d", what, unit,
                   run->m->spec->units[unit].name, run->micros[micro], code);
}

int exec_forward(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const struct shd_compute *c = &run->compute;
    struct exec *x = run->exec;
    mark_read(run, unit);
    activity_begin(run->m, ACTIVITY_FORWARD, unit, run->micros[micro]);
    const int code = c->forward(c->ctx, run->micros[micro], unit,
                                run->m->reader->params(run->m, unit));
    activity_end(run->m);
    if (code != 0)
        return compute_failed(run, "forward", micro, unit, code, e);
    CHECK(!x->units[unit].ran && x->ran_count < run->m->spec->unit_count);
    x->units[unit].ran = true;
    x->ran[x->ran_count++] = unit;
    return SHD_OK;
}

/* The micro-batch's numbers are known by now, and nothing of it has been returned yet. */
int exec_metrics(struct step_run *run, uint32_t micro, struct shd_err *e)
{
    if (run->compute.metrics == NULL)
        return SHD_OK;
    double metrics[SHD_METRICS_MAX] = { 0 };
    const uint32_t count = run->compute.metrics(run->compute.ctx, run->micros[micro], metrics);
    return shd_report(run->m, run->micros[micro], metrics, count, e);
}

int exec_backward(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const struct shd_compute *c = &run->compute;
    struct exec *x = run->exec;
    float *grad = NULL;
    int r = SHD_OK;
    mark_read(run, unit);
    if (!run->m->spec->units[unit].frozen)
        r = shd_grad(run->m, run->micros[micro], unit, &grad, e);
    if (r != SHD_OK)
        return r;
    activity_begin(run->m, ACTIVITY_BACKWARD, unit, run->micros[micro]);
    const int code = c->backward(c->ctx, run->micros[micro], unit,
                                 run->m->reader->params(run->m, unit), grad);
    activity_end(run->m);
    if (code != 0)
        return compute_failed(run, "backward", micro, unit, code, e);
    x->units[unit].backed = true;
    CHECK(x->ran_count > 0);
    return unit == x->ran[x->ran_count - 1] ? exec_metrics(run, micro, e) : SHD_OK;
}

/* -- Returning --------------------------------------------------------------------------------- */

bool exec_group_ends(const struct step_run *run, uint32_t micro)
{
    return run->m->policy.plan.shares_sums || (micro + 1) % run->m->spec->accumulate == 0;
}

static bool will_back(const struct exec_unit *u)
{
    return u->ran && !u->backed;
}

/* Will a backward that is still to come add to the unit's gradient? */
static bool pending(const struct step_run *run, uint32_t unit)
{
    const struct spec *spec = run->m->spec;
    const struct exec_unit *units = run->exec->units;
    if (will_back(&units[unit]))
        return true;
    for (uint32_t u = 0; units[unit].has_users && u < spec->unit_count; u++)
        for (uint32_t i = 0; will_back(&units[u]) && i < spec->units[u].uses_count; i++)
            if (spec->units[u].uses[i] == unit)
                return true;
    return false;
}

int exec_return(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    struct exec_unit *u = &run->exec->units[unit];
    const uint32_t index = run->micros[micro];
    if (run->m->spec->units[unit].frozen || u->given || pending(run, unit))
        return SHD_OK;
    const int r = give_is_open(run->m, index, unit) ? shd_return(run->m, index, unit, e)
                                                    : shd_return_none(run->m, index, unit, e);
    u->given = r == SHD_OK;
    return r;
}

int exec_return_around(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const struct spec_unit *su = &run->m->spec->units[unit];
    int r = exec_return(run, micro, unit, e);
    for (uint32_t i = 0; r == SHD_OK && i < su->uses_count; i++)
        r = exec_return(run, micro, su->uses[i], e);
    return r;
}

void exec_begin_micro(struct step_run *run)
{
    struct exec *x = run->exec;
    x->ran_count = 0;
    for (uint32_t u = 0; u < run->m->spec->unit_count; u++)
        x->units[u].ran = x->units[u].backed = x->units[u].given = false;
}

int exec_end_micro(struct step_run *run, uint32_t micro, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t u = run->m->spec->unit_count; r == SHD_OK && u-- > 0;)
        r = exec_return(run, micro, u, e);
    return r;
}

int exec_begin(struct shd_model *m, const struct shd_compute *compute,
               const struct shd_update *update, struct step_run *ret_run, struct shd_err *e)
{
    struct shd_compute c = { 0 };
    int r = compute == NULL ? SHD_OK
                            : sized_take(&c, sizeof c, compute, sizeof c.size, "shd_compute", e);
    if (r != SHD_OK)
        return r;
    if (c.forward == NULL || c.backward == NULL)
        return err_set(e, SHD_EINVAL, "no compute: forward and backward must be given");
    r = session_check(m->session, e);
    if (r == SHD_OK && m->exec == NULL)
        r = exec_new(m->spec, &m->exec, e);
    if (r == SHD_OK)
        *ret_run = (struct step_run){
            .rewound = rewind_known(m), .m = m, .exec = m->exec, .compute = c, .update = update
        };
    return r;
}