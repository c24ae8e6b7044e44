#include "tests/lib/client_toy.h"

#include "proto/base/check.h"

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
        struct shd_tensor tensor;
        shd_tensor_get(m, t, &tensor);
        if (tensor.unit != unit)
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
    const struct shd_compute compute = { &toy, toy_forward, toy_backward, toy_metrics, NULL };
    const struct shd_update update = toy_update(shd_step(m));
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
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
        struct shd_result result;
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.step, k);
        EXPECT(!result.skipped);
    }
    EXPECT_OK(shd_digest(m, ret_hex, NULL, &e), &e);
    shd_close(s);
}
