/* See plan_own.h. */
#include "client/plan/plan_own.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/plan_check.h"
#include "client/plan/plan_cost.h"
#include "client/plan/plan_text.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"

/* What gradients are rounded to is a property of the model. */
static int check_grad_dtype(const struct spec *spec, enum shd_dtype dtype, struct shd_err *e)
{
    if (dtype == 0 || dtype == spec->grad_dtype)
        return SHD_OK;
    return err_set(e, SHD_ESPEC,
                   "policy.grad_dtype is '%s', must be '%s', as model '%s' has it, or be left out",
                   dtype_name(dtype), dtype_name(spec->grad_dtype), spec->name);
}

int plan_own_new(const struct spec *spec, const char *json, size_t bytes, struct plan_own **ret_own,
                 struct shd_err *e)
{
    struct plan_own *own = sys_calloc(1, sizeof *own);
    if (own == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a plan");
    int r = plan_text_parse(json, bytes, spec, &own->policy, &own->plan, e);
    if (r == SHD_OK)
        r = check_grad_dtype(spec, own->policy.grad_dtype, e);
    if (r == SHD_OK)
        r = plan_check(&own->plan, spec, &own->policy, /* trace= */ NULL, e);
    if (r != SHD_OK) {
        plan_own_free(own);
        return r;
    }
    *ret_own = own;
    return SHD_OK;
}

void plan_own_free(struct plan_own *own)
{
    if (own == NULL)
        return;
    plan_free(&own->plan);
    free(own);
}

struct plan_policy plan_own_policy(const struct plan_own *own)
{
    struct plan_policy policy = own->policy;
    if (policy.strategy == PLAN_OWN)
        policy.strategy = PLAN_ZERO3;
    return policy;
}

/* -- Cutting ----------------------------------------------------------------------------------- */

struct reader {          /* of one unit, behind the cut */
    uint32_t fetched_at; /* in ops; 1 more; 0: it is not held */
    uint32_t waited_at;  /* likewise */
    bool used;
};

struct cut {
    const struct spec *spec; /* borrowed */
    struct plan_op *ops;     /* owned until it is handed out */
    uint32_t count;
    struct reader *units; /* owned, [units] */
};

static void note_op(struct cut *c, const struct plan_op *op, uint32_t at)
{
    const struct spec_unit *su = &c->spec->units[op->unit];
    struct reader *u = &c->units[op->unit];
    if (op->kind == PLAN_FETCH) {
        *u = (struct reader){ .fetched_at = at + 1 };
    } else if (op->kind == PLAN_WAIT) {
        u->waited_at = at + 1;
    } else if (op->kind == PLAN_FREE) {
        *u = (struct reader){ 0 };
    } else if (op->kind == PLAN_FORWARD || op->kind == PLAN_BACKWARD) {
        u->used = true;
        for (uint32_t i = 0; i < su->uses_count; i++)
            c->units[su->uses[i]].used = true;
    }
}

/* The operations of the plan's first `micros` micro-batches, which are those from `base` on. */
static void take(struct cut *c, const struct plan *plan, uint32_t micros, uint32_t base)
{
    for (uint32_t i = 0; i < plan->op_count; i++) {
        struct plan_op op = plan->ops[i];
        if (op.kind >= PLAN_PREPARE || op.micro >= micros)
            break;
        op.micro += base;
        note_op(c, &op, c->count);
        c->ops[c->count++] = op;
    }
}

/* What was fetched for micro-batches behind the cut is not fetched, what is held is freed. */
static void end(struct cut *c, uint32_t last_micro)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        const struct reader *u = &c->units[c->ops[i].unit];
        const bool ahead = u->fetched_at > 0 && !u->used;
        if (!ahead || (u->fetched_at != i + 1 && u->waited_at != i + 1))
            c->ops[kept++] = c->ops[i];
    }
    c->count = kept;
    for (uint32_t u = c->spec->unit_count; u-- > 0;)
        if (c->units[u].fetched_at > 0 && c->units[u].used)
            c->ops[c->count++] = (struct plan_op){ PLAN_FREE, u, last_micro };
    c->ops[c->count++] = (struct plan_op){ .kind = PLAN_PREPARE };
    c->ops[c->count++] = (struct plan_op){ .kind = PLAN_COMMIT };
}

int plan_own_fit(const struct plan_own *own, const struct spec *spec, uint32_t micros,
                 struct plan *ret_plan, struct shd_err *e)
{
    const uint32_t each = own->plan.micros, times = micros / each;
    struct plan plan = { .micros = micros };
    struct cut c = { .spec = spec };
    CHECK(each > 0 && micros <= SHD_MICROS_MAX);
    c.ops = sys_calloc((size_t)own->plan.op_count * (times + 1) + spec->unit_count + 2,
                       sizeof *c.ops);
    c.units = sys_calloc(spec->unit_count, sizeof *c.units);
    if (c.ops == NULL || c.units == NULL) {
        free(c.ops);
        free(c.units);
        return err_set(e, SHD_ENOMEM, "no memory for the operations of %" PRIu32 " micro-batches",
                       micros);
    }
    for (uint32_t i = 0; i < times; i++)
        take(&c, &own->plan, each, i * each);
    take(&c, &own->plan, micros % each, times * each);
    end(&c, micros > 0 ? micros - 1 : 0);
    free(c.units);
    plan.ops = c.ops;
    plan.op_count = c.count;
    const int r = plan_count(&plan, spec, own->policy.grad_dtype, &plan.cost, e);
    if (r == SHD_OK)
        *ret_plan = plan;
    else
        plan_free(&plan);
    return r;
}
