/* The executor: runs a plan with the user's compute. Happy path: build (or reuse) the plan of
 * this many micro-batches, carry out its operations one after the other, commit. On failure the
 * units it holds are released and gradients not yet returned are dropped, so that the caller can
 * run the step again: what was returned counts once. */
#include <inttypes.h>

#include "client/path.h"
#include "client/plan.h"
#include "client/session.h"
#include "proto/check.h"

struct run {
    struct shd_model *m;    /* borrowed, as are the next three */
    const uint32_t *micros; /* [plan.micros] */
    const struct shd_compute *compute;
    const struct shd_update *update;
    struct shd_result result;
};

static int ensure_plan(struct shd_model *m, uint32_t micros, struct shd_err *e)
{
    if (m->plan.op_count > 0 && m->plan.micros == micros)
        return SHD_OK;
    struct plan plan;
    const int r = plan_build(m->spec, &PLAN_POLICY_DEFAULT, micros, &plan, e);
    if (r != SHD_OK)
        return r;
    plan_free(&m->plan);
    m->plan = plan;
    return SHD_OK;
}

static int check_micros(const struct shd_model *m, const uint32_t *micros, uint32_t count,
                        struct shd_err *e)
{
    for (uint32_t i = 0; i < count; i++) {
        if (micros[i] >= m->spec->micro_batches)
            return err_set(e, SHD_ERANGE, "micro-batch %" PRIu32 " of a step with %" PRIu32,
                           micros[i], m->spec->micro_batches);
        if (i > 0 && micros[i] <= micros[i - 1])
            return err_set(e, SHD_EINVAL,
                           "micro-batch %" PRIu32 " after %" PRIu32 ": they must ascend", micros[i],
                           micros[i - 1]);
    }
    return SHD_OK;
}

static int compute_failed(const struct run *run, const char *what, const struct plan_op *op,
                          int code, struct shd_err *e)
{
    return err_set(e, SHD_EINTERNAL,
                   "%s of unit %" PRIu32 " '%s', micro-batch %" PRIu32 ", returned %d", what,
                   op->unit, run->m->spec->units[op->unit].name, run->micros[op->micro], code);
}

static int run_forward(struct run *run, const struct plan_op *op, struct shd_err *e)
{
    const struct shd_compute *c = run->compute;
    const int code = c->forward(c->ctx, run->micros[op->micro], op->unit,
                                shd_params(run->m, op->unit));
    return code == 0 ? SHD_OK : compute_failed(run, "forward", op, code, e);
}

/* The micro-batch's numbers are known by now, and nothing of it has been returned yet. */
static int report_metrics(struct run *run, uint32_t micro, struct shd_err *e)
{
    if (run->compute->metrics == NULL)
        return SHD_OK;
    double metrics[SHD_METRICS_MAX] = { 0 };
    const uint32_t count = run->compute->metrics(run->compute->ctx, micro, metrics);
    return shd_report(run->m, micro, metrics, count, e);
}

static int run_backward(struct run *run, const struct plan_op *op, struct shd_err *e)
{
    const struct shd_compute *c = run->compute;
    const uint32_t micro = run->micros[op->micro];
    float *grad;
    const int r = shd_grad(run->m, micro, op->unit, &grad, e);
    if (r != SHD_OK)
        return r;
    const int code = c->backward(c->ctx, micro, op->unit, shd_params(run->m, op->unit), grad);
    if (code != 0)
        return compute_failed(run, "backward", op, code, e);
    return op->unit + 1 == run->m->spec->unit_count ? report_metrics(run, micro, e) : SHD_OK;
}

static int run_op(struct run *run, const struct plan_op *op, struct shd_err *e)
{
    switch (op->kind) {
    case PLAN_FETCH:
        return SHD_OK; /* mapped once, at open: nothing to ask for */
    case PLAN_WAIT:
        return shd_acquire(run->m, op->unit, /* ret_params= */ NULL, e);
    case PLAN_FORWARD:
        return run_forward(run, op, e);
    case PLAN_BACKWARD:
        return run_backward(run, op, e);
    case PLAN_RETURN:
        return shd_return(run->m, run->micros[op->micro], op->unit, e);
    case PLAN_FREE:
        shd_release(run->m, op->unit);
        return SHD_OK;
    case PLAN_PREPARE:
        return SHD_OK; /* the first half of shd_commit() */
    case PLAN_COMMIT:
        return shd_commit(run->m, run->update, &run->result, e);
    }
    CHECK(false); /* plan_build() makes no other */
    return SHD_EINTERNAL;
}

static bool freed_later(const struct plan *plan, uint32_t op, uint32_t end)
{
    for (uint32_t i = op + 1; i < end; i++)
        if (plan->ops[i].kind == PLAN_FREE && plan->ops[i].unit == plan->ops[op].unit)
            return true;
    return false;
}

/* Undo what operations [0, end) of the plan left behind. */
static void drop_held(struct shd_model *m, uint32_t end)
{
    for (uint32_t i = 0; i < end; i++)
        if (m->plan.ops[i].kind == PLAN_WAIT && !freed_later(&m->plan, i, end))
            shd_release(m, m->plan.ops[i].unit);
    for (uint32_t i = 0; i < m->slot_count; i++)
        if (m->slots[i].state == SLOT_HELD && m->slots[i].sent == 0)
            m->slots[i].state = SLOT_FREE;
}

static int run_plan(struct run *run, struct shd_err *e)
{
    const struct plan *plan = &run->m->plan;
    for (uint32_t i = 0; i < plan->op_count; i++) {
        const int r = run_op(run, &plan->ops[i], e);
        if (r != SHD_OK) {
            drop_held(run->m, i);
            return r;
        }
    }
    return SHD_OK;
}

int shd_run_step(shd_model *m, const uint32_t *micros, uint32_t count,
                 const struct shd_compute *compute, const struct shd_update *update,
                 struct shd_result *ret_result, struct shd_err *e)
{
    if (compute == NULL || compute->forward == NULL || compute->backward == NULL)
        return err_set(e, SHD_EINVAL, "no compute: forward and backward must be given");
    int r = check_micros(m, micros, count, e);
    if (r == SHD_OK)
        r = ensure_plan(m, count, e);
    if (r != SHD_OK)
        return r;
    struct run run = { .m = m, .micros = micros, .compute = compute, .update = update };
    r = run_plan(&run, e);
    if (r == SHD_OK && ret_result != NULL)
        *ret_result = run.result;
    return r;
}
