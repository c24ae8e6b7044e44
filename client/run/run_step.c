/* Running a step: its plan from beginning to end, and the commit. Happy path: build (or reuse) the
 * plan of this many micro-batches, carry out its operations, commit. On failure the units it holds
 * are released and gradients not yet returned are dropped, so that the caller can run the step
 * again: what was returned counts once.
 *
 * Elastic, shd_run_step_elastic(): groups of micro-batches are leased (lease.h) one by one until
 * all are in; then the step is committed. Overtaken: another worker may return and commit while
 * this one computes, because its lease was taken for lost. Then the owners say that the step is
 * over, or a unit is found a step ahead: the micro-batch is dropped, for it counted already, and
 * the commit tells how the step ended. Reset, by another worker: the step is run again. */
#include <inttypes.h>

#include "client/paths/rewind.h"
#include "client/run/drop.h"
#include "client/run/follow.h"
#include "client/run/grads.h"
#include "client/run/lease.h"
#include "client/run/move.h"
#include "client/run/policy.h"
#include "client/run/reset.h"
#include "client/run/rewind.h"
#include "client/run/stream.h"
#include "proto/base/check.h"

/* A gradient that is not returned yet goes into its group's sum at once. */
static int run_backward(struct step_run *run, const struct plan_op *op, struct shd_err *e)
{
    const int r = exec_backward(run, op->micro, op->unit, e);
    if (r != SHD_OK || exec_group_ends(run, op->micro))
        return r;
    return exec_return_around(run, op->micro, op->unit, e);
}

static int run_op(struct step_run *run, const struct plan_op *op, struct shd_err *e)
{
    switch (op->kind) {
    case PLAN_FETCH:
        return exec_fetch(run, op->unit, e);
    case PLAN_WAIT:
        return exec_wait(run, op->unit, e);
    case PLAN_FORWARD:
        return exec_forward(run, op->micro, op->unit, e);
    case PLAN_BACKWARD:
        return run_backward(run, op, e);
    case PLAN_RETURN:
        return exec_return(run, op->micro, op->unit, e);
    case PLAN_FREE:
        exec_let_go(run, op->unit);
        return SHD_OK;
    case PLAN_PREPARE:
    case PLAN_COMMIT:
        break;
    }
    CHECK(false); /* run_fixed() goes up to PREPARE */
    return SHD_EINTERNAL;
}

/* Run the micro-batches of a model whose units have one order, the plan's. */
static int run_fixed(struct step_run *run, struct shd_err *e)
{
    const struct plan *plan = &run->exec->plan;
    int r = SHD_OK;
    for (uint32_t micro = 0; r == SHD_OK && micro < run->count; micro++) {
        exec_begin_micro(run);
        for (; r == SHD_OK && plan->ops[run->at].kind != PLAN_PREPARE &&
               plan->ops[run->at].micro == micro;
             run->at++)
            r = run_op(run, &plan->ops[run->at], e);
        if (r == SHD_OK)
            r = exec_end_micro(run, micro, e);
    }
    return r;
}

/* Run run->micros[count], up to PREPARE. Lets go of all units, also after an error. */
static int run_step_micros(struct step_run *run, const uint32_t *micros, uint32_t count,
                           struct shd_err *e)
{
    const bool follows = run->compute.next != NULL;
    run->micros = micros;
    run->count = count;
    run->base = run->at = 0;
    int r = exec_plan(run, count, follows && run->exec->recorded, e);
    if (r == SHD_OK)
        r = follows ? follow_micros(run, e) : run_fixed(run, e);
    exec_let_go_all(run);
    if (r == SHD_OK)
        run->result.computed += count;
    return r;
}

/* Groups that were in at all owners before this worker came are left out: owners would only drop
 * them. The others are put into exec->micros; returns their number. */
static uint32_t leave_out(struct step_run *run, const uint32_t *micros, uint32_t count)
{
    const struct shd_model *m = run->m;
    uint32_t left = 0;
    CHECK(run->exec != NULL);
    for (uint32_t i = 0; i < count; i++)
        if (!shd_is_in(m, micros[i]))
            run->exec->micros[left++] = micros[i];
    return left;
}

/* The commit, unless `leaves`; r is what came of the micro-batches. SHD_ESTEP is no error yet: a
 * predecessor's gradients were in and others have committed, or the commit says what is wrong. */
static int run_step_commit(struct step_run *run, int r, bool leaves, struct shd_err *e)
{
    struct shd_result result = { .size = sizeof result, .step = run->m->step, .left = true };
    if (r == SHD_ESTEP) {
        drop_grads(run->m, GRADS_ALL);
        r = SHD_OK;
    }
    if (r == SHD_OK)
        r = leaves ? stream_returned(run->m, e) : shd_commit(run->m, run->update, &result, e);
    if (r != SHD_OK) {
        drop_grads(run->m, GRADS_ALL);
        return r;
    }
    result.computed = run->result.computed;
    run->result = result;
    return SHD_OK;
}

/* PREPARE and COMMIT are shd_commit(). A step whose commit broke off only needs that: its units
 * may have moved on already. */
static int run_all(struct step_run *run, const uint32_t *micros, uint32_t count, struct shd_err *e)
{
    CHECK(run->exec != NULL);
    const uint32_t left = leave_out(run, micros, count);
    const int r = run->m->sealed ? SHD_OK : run_step_micros(run, run->exec->micros, left, e);
    return run_step_commit(run, r, /* leaves= */ false, e);
}

static int check_micros(const struct shd_model *m, const uint32_t *micros, uint32_t count,
                        struct shd_err *e)
{
    const uint32_t a = m->spec->accumulate;
    for (uint32_t i = 0; i < count; i++) {
        if (micros[i] >= model_micro_batches(m))
            return err_set(e, SHD_ERANGE, "micro-batch %" PRIu32 " of a step with %" PRIu32,
                           micros[i], model_micro_batches(m));
        if (i > 0 && micros[i] <= micros[i - 1])
            return err_set(e, SHD_EINVAL,
                           "micro-batch %" PRIu32 " after %" PRIu32 ": they must ascend", micros[i],
                           micros[i - 1]);
    }
    if (m->policy.plan.shares_sums) /* others have the rest of a group */
        return SHD_OK;
    for (uint32_t i = 0; i < count; i++) { /* ascending, so a group is a * g, a * g + 1, ... */
        const uint32_t first = micros[i / a * a];
        if (first % a != 0 || i / a * a + a > count || micros[i] != first + i % a)
            return err_set(e, SHD_EINVAL,
                           "micro-batch %" PRIu32 " belongs to a group of %" PRIu32 " (%" PRIu32
                           " to %" PRIu32 ") that is summed in one worker, which got only part "
                           "of it (workers of a host may sum together: shd_policy.sums)",
                           micros[i], a, micros[i] / a * a, micros[i] / a * a + a - 1);
    }
    return SHD_OK;
}

/* Is the step to be run again, as it was reset? Not where the model went back meanwhile: then the
 * caller has to know where it is. A callback may have learned so by a call of its own. */
static bool again(struct step_run *run, int *r, struct shd_err *e)
{
    *r = move_along(run->m, *r, e);
    const bool told = *r == SHD_EINTERNAL && rewind_known(run->m) != run->rewound;
    if (*r != SHD_ERESET && !told)
        return false;
    const int looked = reset_look(run->m, e);
    if (looked != SHD_OK && looked != SHD_ERESET) {
        *r = looked;
        return false;
    }
    if (rewind_known(run->m) == run->rewound)
        return true;
    run->result = rewind_result(run->m);
    *r = SHD_OK;
    return false;
}

int shd_run_step(shd_model *m, const uint32_t *micros, uint32_t count,
                 const struct shd_compute *compute, const struct shd_update *update,
                 struct shd_result *ret_result, struct shd_err *e)
{
    struct step_run run = { .m = m };
    int r = sized_check(ret_result, sizeof *ret_result, "shd_result", e);
    if (r == SHD_OK)
        r = exec_begin(m, compute, update, &run, e);
    if (r == SHD_OK)
        r = check_micros(m, micros, count, e);
    const bool good = r == SHD_OK;
    do
        r = good ? run_all(&run, micros, count, e) : r;
    while (good && again(&run, &r, e));
    if (r == SHD_OK)
        sized_give(ret_result, &run.result);
    return r;
}

/* -- A step of which the owners hand out the work ---------------------------------------------- */

static int run_group(struct step_run *run, uint32_t group, struct shd_err *e)
{
    const uint32_t a = run->m->spec->accumulate;
    uint32_t *micros = run->exec->micros;
    for (uint32_t i = 0; i < a; i++)
        micros[i] = group * a + i;
    return run_step_micros(run, micros, a, e);
}

void shd_leave(shd_model *m)
{
    m->leases.leaving = true;
}

/* Take leases until nothing is left to be done, or this worker leaves. SHD_ESTEP: overtaken. */
static int run_leases(struct step_run *run, struct shd_err *e)
{
    struct shd_err ignored;
    struct wire_leased leased = { .step = 0 };
    while (!run->m->leases.leaving) {
        int r = lease_take(run->m, &leased, e);
        if (r != SHD_OK || leased.what == WIRE_LEASED_ALL_IN)
            return r;
        if (leased.what == WIRE_LEASED_OVER)
            return SHD_ESTEP;
        CHECK(leased.what == WIRE_LEASED_GROUP); /* what is leased is returned before the next */
        r = run_group(run, leased.group, e);
        if (r != SHD_OK) {
            lease_drop(run->m, leased.group, &ignored);
            return r;
        }
    }
    return SHD_OK;
}

static int run_elastic(struct step_run *run, struct shd_err *e)
{
    run->m->leases.leaving = false;
    const int r = run->m->sealed ? SHD_OK : run_leases(run, e);
    return run_step_commit(run, r, run->m->leases.leaving, e);
}

int shd_run_step_elastic(shd_model *m, const struct shd_compute *compute,
                         const struct shd_update *update, struct shd_result *ret_result,
                         struct shd_err *e)
{
    struct step_run run = { .m = m };
    int r = sized_check(ret_result, sizeof *ret_result, "shd_result", e);
    if (r == SHD_OK)
        r = exec_begin(m, compute, update, &run, e);
    if (r == SHD_OK)
        r = policy_start(m, e);
    const bool good = r == SHD_OK;
    do
        r = good ? run_elastic(&run, e) : r;
    while (good && again(&run, &r, e));
    if (r == SHD_OK)
        sized_give(ret_result, &run.result);
    return r;
}
