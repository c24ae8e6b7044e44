#include "tests/lib/policy_toy.h"

#include "client/plan/plan.h"
#include "client/run/policy.h"
#include "client/session/session.h"
#include "proto/base/check.h"

#define PT_NONE UINT32_MAX

const char *pt_spec(const struct pt_model *p)
{
    static char json[4096];
    const char *trainable = p->frozen ? "false" : "true";
    snprintf(json, sizeof json,
             "{ \"name\": \"%s\", \"seed\": 5, \"micro_batches\": 4, \"publish\": \"%s\","
             "  \"accumulate\": %u, \"optimizer\": { \"kind\": \"adamw\" }, \"units\": ["
             "  { \"name\": \"embed\", \"tensors\": [ { \"name\": \"wte\", \"shape\": [61, 83],"
             "      \"init\": [\"normal\", 0, 0.5] } ] },"
             "  { \"name\": \"h0\", \"tensors\": [ { \"name\": \"h0.w\", \"shape\": [4099],"
             "      \"init\": [\"normal\", 0, 1] }, { \"name\": \"h0.b\", \"shape\": [7] } ] },"
             "  { \"name\": \"h1\", \"tensors\": [ { \"name\": \"h1.w\", \"shape\": [9001],"
             "      \"trainable\": %s, \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"e0\", \"tensors\": [ { \"name\": \"e0.w\", \"shape\": [2500],"
             "      \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"e1\", \"tensors\": [ { \"name\": \"e1.w\", \"shape\": [2500],"
             "      \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"e2\", \"tensors\": [ { \"name\": \"e2.w\", \"shape\": [2500],"
             "      \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"head\", \"uses\": [\"embed\"], \"tensors\": [ { \"name\": \"ln\","
             "      \"shape\": [777], \"init\": [\"uniform\", 0, 2] } ] } ] }",
             p->name, p->publish != NULL ? p->publish : "f32",
             p->accumulate > 0 ? p->accumulate : 1, trainable);
    return json;
}

/* Which experts a micro-batch of the open step is routed to, as bits; 5 is "none at all". */
static uint32_t pt_route(const struct pt *t, uint32_t micro)
{
    static const uint32_t sets[] = { 1, 2, 4, 6, 1, 0, 3, 7, 5 };
    return sets[(shd_step(t->m) * 5 + micro * 2) % ARRAY_SIZE(sets)];
}

static uint32_t pt_next(void *ctx, uint32_t micro, uint32_t unit)
{
    const struct pt *t = ctx;
    if (t->early && micro % 2 == 1 && unit == 1)
        return PT_UNITS - 1; /* the head alone is left */
    if (unit == PT_UNITS - 1)
        return PT_NONE;
    for (uint32_t u = unit == PT_NONE ? 0 : unit + 1;; u++)
        if (u < PT_EXPERT || u >= PT_EXPERT + 3 || pt_route(t, micro) & 1u << (u - PT_EXPERT))
            return u;
}

static void pt_look(struct pt *t)
{
    if (t->m->live_units > t->live_units_max)
        t->live_units_max = t->m->live_units;
    if (t->compute_ms > 0)
        nanosleep(&(struct timespec){ .tv_nsec = t->compute_ms * 1000000 }, NULL);
}

int pt_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct pt *t = ctx;
    (void)micro;
    pt_look(t);
    if (params == NULL || params != shd_params(t->m, unit))
        return 1;
    return unit == PT_UNITS - 1 && shd_params(t->m, 0) == NULL ? 2 : 0;
}

int pt_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    struct pt *t = ctx;
    const struct spec_unit *su = &t->m->spec->units[unit];
    pt_look(t);
    if (params == NULL || (grad == NULL) != shd_unit_frozen(t->m, unit))
        return 1;
    if (grad == NULL)
        return 0;
    if (unit == PT_UNITS - 1) { /* uses embed, and is the first to write its gradient */
        float *tied;
        if (shd_params(t->m, 0) == NULL || shd_grad(t->m, micro, 0, &tied, NULL) != SHD_OK)
            return 2;
        toy_write(t->m, micro, 0, /* salt= */ 100, shd_params(t->m, 0), /* add= */ false, tied);
    }
    toy_write(t->m, micro, unit, /* salt= */ 0, params, /* add= */ unit == 0, grad);
    for (uint64_t i = 0; t->loss_scale > 0 && unit != 0 && i < su->elems; i++)
        grad[i] *= (float)t->loss_scale;
    if (shd_step(t->m) == t->overflow_step && micro == 1 && unit == 1)
        grad[4000] = INFINITY;
    return 0;
}

int pt_step(shd_model *m, struct pt_run *run, const uint32_t *micros, uint32_t count,
            struct shd_result *ret_result, struct shd_err *e)
{
    struct shd_update update = run->update.size > 0 ? run->update : toy_update(shd_step(m));
    const struct shd_compute compute = { &run->t, pt_forward, pt_backward, toy_metrics,
                                         run->routed ? pt_next : NULL };
    run->t.m = m;
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
}

int pt_train(shd_session *s, const char *spec, struct pt_run *run, const uint32_t *micros,
             uint32_t count, char hex[65], struct shd_err *e)
{
    shd_model *m;
    int r = shd_model_open(s, spec, &m, e);
    if (r == SHD_OK)
        shd_bench_delay_fetches(m, run->fetch_delay_ns);
    if (r == SHD_OK && run->policy.size > 0)
        r = shd_set_policy(m, &run->policy, e);
    for (uint32_t k = 0; r == SHD_OK && k < run->steps; k++)
        r = pt_step(m, run, micros, count, NULL, e);
    return r == SHD_OK ? shd_digest(m, hex, NULL, e) : r;
}

void pt_reference(const char *spec, const struct pt_run *like, char hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    struct pt_run run = *like;
    run.policy = (struct shd_policy){ 0 };
    if (like->policy.grad_dtype != 0)
        run.policy = (struct shd_policy){ .size = sizeof run.policy,
                                          .grad_dtype = like->policy.grad_dtype };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT_OK(pt_train(s, spec, &run, toy_all_micros, TOY_MICROS, hex, &e), &e);
    shd_close(s);
}
