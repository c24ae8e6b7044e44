#include "tests/lib/client_toy.h"

#include "client/plan/plan.h"
#include "client/run/policy.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

const char *toy_spec(const char *publish, const char *optimizer)
{
    static char json[4096];
    snprintf(json, sizeof json,
             "{ \"name\": \"toy\", \"seed\": 3, \"micro_batches\": 4, \"publish\": \"%s\","
             "  \"optimizer\": { %s },"
             "  \"groups\": [ { \"name\": \"decay\", \"weight_decay\": 0.1 },"
             "               { \"name\": \"plain\", \"lr_scale\": 0.5 } ],"
             "  \"units\": ["
             "   { \"name\": \"embed\", \"tensors\": ["
             "     { \"name\": \"wte\", \"shape\": [97, 53], \"group\": \"decay\","
             "       \"init\": [\"normal\", 0, 0.5] },"
             "     { \"name\": \"wpe\", \"shape\": [33], \"group\": \"plain\","
             "       \"init\": [\"uniform\", -1, 1] } ] },"
             "   { \"name\": \"h0\", \"tensors\": ["
             "     { \"name\": \"h0.w\", \"shape\": [4099], \"group\": \"decay\","
             "       \"init\": [\"normal\", 0, 1] },"
             "     { \"name\": \"h0.b\", \"shape\": [7], \"group\": \"plain\" },"
             "     { \"name\": \"h0.g\", \"shape\": [2047], \"group\": \"plain\","
             "       \"init\": [\"const\", 1] } ] },"
             "   { \"name\": \"h1\", \"tensors\": ["
             "     { \"name\": \"h1.w\", \"shape\": [3], \"group\": \"plain\","
             "       \"init\": [\"const\", 0.25] } ] },"
             "   { \"name\": \"head\", \"uses\": [\"embed\"], \"tensors\": ["
             "     { \"name\": \"ln.w\", \"shape\": [130, 70], \"group\": \"decay\","
             "       \"init\": [\"uniform\", 0, 2] } ] } ] }",
             publish, optimizer);
    return json;
}

const char *toy_other_spec(char last_digit)
{
    static char other[4096];
    snprintf(other, sizeof other, "%s",
             toy_spec("f32", "\"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.95, "
                             "\"eps\": 1e-8"));
    char *at = strstr(other, "4099");
    CHECK(at != NULL);
    at[3] = last_digit;
    return other;
}

float toy_noise(uint64_t step, uint32_t micro, uint32_t unit, uint64_t i)
{
    uint64_t x = (step * 1000003 + micro) * 1000033 + unit * 7919 + i;
    x ^= x >> 31;
    x *= UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    return (float)((int64_t)(x >> 41) - (1 << 22)) / (float)(1 << 22);
}

/* Published parameters as numbers: bf16 and f16 need not be read for this toy, only mixed in. */
static float toy_param(const shd_model *m, const void *params, uint64_t i)
{
    if (shd_param_dtype(m) == SHD_F32)
        return ((const float *)params)[i];
    const uint16_t bits = ((const uint16_t *)params)[i];
    return (float)(bits >> 8) / 256 - 0.5f;
}

void toy_write(const shd_model *m, uint32_t micro, uint32_t unit, uint32_t salt, const void *params,
               bool add, float *grad)
{
    for (uint32_t t = 0; t < shd_tensors(m); t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        shd_tensor_get(m, t, &tensor, NULL);
        if (tensor.unit != unit || tensor.statistics)
            continue;
        for (uint64_t i = tensor.offset_elems; i < tensor.offset_elems + tensor.elems; i++) {
            const float g = toy_noise(shd_step(m), micro, unit + salt, i) +
                            0.1f * toy_param(m, params, i);
            grad[i] = add ? grad[i] + g : g;
        }
    }
}

int toy_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct toy *toy = ctx;
    (void)micro;
    toy->forwards++;
    if (params == NULL || params != shd_params(toy->m, unit))
        return 1;
    return unit + 1 == shd_units(toy->m) && shd_params(toy->m, 0) == NULL ? 2 : 0;
}

int toy_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    struct toy *toy = ctx;
    toy->backwards++;
    if ((int)micro == toy->fail_micro && unit == 1)
        return 42;
    if (unit + 1 == shd_units(toy->m)) { /* uses embed, and is the first to write its gradient */
        float *tied;
        struct shd_err e;
        if (shd_params(toy->m, 0) == NULL || shd_grad(toy->m, micro, 0, &tied, &e) != SHD_OK)
            return 3;
        toy_write(toy->m, micro, 0, /* salt= */ 100, shd_params(toy->m, 0), /* add= */ false, tied);
    }
    toy_write(toy->m, micro, unit, /* salt= */ 0, params, /* add= */ unit == 0, grad);
    return 0;
}

uint32_t toy_metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    (void)ctx;
    ret_metrics[0] = 1.0 / (micro + 3);
    ret_metrics[1] = micro;
    return 2;
}

struct shd_update toy_update(uint64_t step)
{
    return (struct shd_update){
        .size = sizeof(struct shd_update),
        .lr = 0.01 / (double)(step + 1),
        .clip_norm = 1.0,
    };
}

int toy_step(shd_model *m, const uint32_t *micros, uint32_t count, struct shd_result *ret_result,
             struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    const struct shd_update update = toy_update(shd_step(m));
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
}

void limit_waits(shd_session *s, uint64_t ms)
{
    s->timeout_ns = s->hub->timeout_ns = ms * NS_PER_MS;
}

void toy_reference(const char *spec, uint32_t steps, char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    for (uint32_t k = 0; k < steps; k++) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.step, k);
        EXPECT(!result.skipped);
    }
    EXPECT_OK(shd_digest(m, ret_hex, NULL, &e), &e);
    shd_close(s);
}

#define PT_NONE UINT32_MAX

static const char *groups_of(const struct pt_model *p)
{
    if (p->mean)
        return "\"groups\": [ { \"name\": \"w\" },"
               "  { \"name\": \"s\", \"optimizer\": { \"kind\": \"mean\" } } ],";
    if (p->whole == NULL)
        return "";
    if (strcmp(p->whole, "adafactor") == 0)
        return "\"groups\": [ { \"name\": \"w\" }, { \"name\": \"x\","
               "  \"weight_decay\": 0.1, \"optimizer\": { \"kind\": \"adafactor\" } } ],";
    return strcmp(p->whole, "lamb") == 0
               ? "\"groups\": [ { \"name\": \"w\" }, { \"name\": \"x\","
                 "  \"weight_decay\": 0.1, \"optimizer\": { \"kind\": \"lamb\" } } ],"
               : "\"groups\": [ { \"name\": \"w\" }, { \"name\": \"x\","
                 "  \"weight_decay\": 0.1, \"optimizer\": { \"kind\": \"muon\" } } ],";
}

const char *pt_spec(const struct pt_model *p)
{
    static const char *const dtypes[] = { "f32", "f32", "bf16", "f16" };
    static char json[4096];
    const char *trainable = p->frozen ? "false" : "true";
    const char *own = p->mean || p->whole != NULL ? ", \"group\": \"w\"" : "",
               *mean = p->mean ? ", \"group\": \"s\"" : own,
               *matrix = p->whole != NULL ? ", \"group\": \"x\"" : own;
    const char *place = p->placed ? ", \"place\": \"whole\"" : "";
    const bool adafactor = p->whole != NULL && strcmp(p->whole, "adafactor") == 0;
    const char *wide = p->whole != NULL ? "130, 70" : "4099", *square = adafactor ? "2, 25, 50"
                                                                        : p->whole != NULL
                                                                            ? "50, 50"
                                                                            : "2500";
    snprintf(json, sizeof json,
             "{ \"name\": \"%s\", \"seed\": 5, \"micro_batches\": 4, \"publish\": \"%s%s%s\","
             "  \"grad_dtype\": \"%s\", %s%s"
             "  \"accumulate\": %u, \"optimizer\": { \"kind\": \"adamw\"%s }, \"units\": ["
             "  { \"name\": \"embed\", \"tensors\": [ { \"name\": \"wte\", \"shape\": [61, 83]%s,"
             "      \"init\": [\"normal\", 0, 0.5] } ] },"
             "  { \"name\": \"h0\", \"tensors\": [ { \"name\": \"h0.w\", \"shape\": [%s]%s,"
             "      \"init\": [\"normal\", 0, 1] }, { \"name\": \"h0.b\", \"shape\": [7]%s } ] },"
             "  { \"name\": \"h1\"%s, \"tensors\": [ { \"name\": \"h1.w\", \"shape\": [9001]%s,"
             "      \"trainable\": %s, \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"e0\"%s, \"tensors\": [ { \"name\": \"e0.w\", \"shape\": [%s]%s,"
             "      \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"e1\", \"tensors\": [ { \"name\": \"e1.w\", \"shape\": [%s]%s,"
             "      \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"e2\", \"tensors\": [ { \"name\": \"e2.w\", \"shape\": [%s]%s,"
             "      \"init\": [\"normal\", 0, 1] } ] },"
             "  { \"name\": \"head\", \"uses\": [\"embed\"], \"tensors\": [ { \"name\": \"ln\","
             "      \"shape\": [777]%s, \"init\": [\"uniform\", 0, 2] } ] } ] }",
             p->name, p->publish != NULL ? p->publish : "f32",
             p->codec != NULL ? "\", \"codec\": \"" : "", p->codec != NULL ? p->codec : "",
             dtypes[p->grad_dtype], groups_of(p),
             p->ema ? "\"ema\": 0.9, \"ema_warmup\": true, " : "",
             p->accumulate > 0 ? p->accumulate : 1, p->int8 ? ", \"moments\": \"int8\"" : "", own,
             wide, matrix, adafactor ? matrix : own, place, mean, trainable, place, square, matrix,
             square, p->mean ? mean : matrix, square, matrix, own);
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
    if (t->m->held.units > t->live_units_max)
        t->live_units_max = t->m->held.units;
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
    const struct shd_compute compute = {
        sizeof compute, &run->t, pt_forward, pt_backward, toy_metrics, run->routed ? pt_next : NULL
    };
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
