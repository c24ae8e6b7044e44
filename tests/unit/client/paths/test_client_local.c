/* The in-process path through the public header: training, errors, leaks. */
#include <dirent.h>
#include <errno.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "tests/lib/client_toy.h"
#include "tests/lib/test.h"

static shd_session *connect_local(uint32_t slots, uint32_t threads)
{
    struct shd_err e = { 0 };
    shd_session *s;
    const struct shd_options options = {
        .size = sizeof options, .address = "local:", .slots = slots, .threads = threads
    };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

static shd_model *open_toy(shd_session *s)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), &e);
    return m;
}

/* Write and return one gradient. */
static int return_one(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const void *params;
    float *grad;
    int r = shd_acquire(m, unit, &params, e);
    if (r != SHD_OK)
        return r;
    r = shd_grad(m, micro, unit, &grad, e);
    if (r == SHD_OK) {
        toy_write(m, micro, unit, 0, params, false, grad);
        r = shd_return(m, micro, unit, e);
    }
    shd_release(m, unit);
    return r;
}

static void return_all(shd_model *m, const uint32_t *order)
{
    struct shd_err e = { 0 };
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        for (uint32_t u = shd_units(m); u-- > 0;)
            EXPECT_OK(return_one(m, order[i], u, &e), &e);
}

static void digest_of(shd_model *m, char hex[65])
{
    struct shd_err e = { 0 };
    uint64_t step;
    EXPECT_OK(shd_digest(m, hex, &step, &e), &e);
    EXPECT_EQ(step, shd_step(m));
}

TEST(lookups_describe_the_model)
{
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    struct shd_tensor t = { .size = sizeof t };
    EXPECT_STR(shd_model_name(m), "toy");
    EXPECT_EQ(shd_owners(s), 1);
    EXPECT_EQ(shd_units(m), 4);
    EXPECT_EQ(shd_micro_batches(m), 4);
    EXPECT_EQ(shd_tensors(m), 7);
    EXPECT_EQ(shd_param_dtype(m), SHD_F32);
    EXPECT_OK(shd_tensor_find(m, "h0.b", &t, &e), &e);
    EXPECT_EQ(t.unit, 1);
    EXPECT_EQ(t.offset_elems, 4128); /* 4099 rounded up to 32 */
    EXPECT_EQ(t.elems, 7);
    EXPECT_STATUS(shd_tensor_find(m, "h9", &t, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "h9");
    EXPECT(shd_params(m, 0) == NULL);
    shd_close(s);
}

TEST(digest_does_not_depend_on_threads_or_order)
{
    static const uint32_t orders[][TOY_MICROS] = { { 0, 1, 2, 3 }, { 3, 2, 1, 0 }, { 2, 0, 3, 1 } };
    char first[65] = "", hex[65];
    for (size_t i = 0; i < ARRAY_SIZE(orders); i++) {
        shd_session *s = connect_local(16, (uint32_t)i + 1);
        shd_model *m = open_toy(s);
        struct shd_err e = { 0 };
        for (uint32_t k = 0; k < 3; k++) {
            const struct shd_update update = toy_update(k);
            return_all(m, orders[i]);
            EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
        }
        digest_of(m, hex);
        if (i == 0)
            memcpy(first, hex, sizeof hex);
        EXPECT_STR(hex, first);
        shd_close(s);
    }
}

TEST(run_step_trains_and_reports)
{
    char a[65], b[65], c[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 3, a);
    toy_reference(toy_spec("f32", TOY_ADAMW), 3, b);
    toy_reference(toy_spec("f32", TOY_ADAMW), 4, c);
    EXPECT_STR(a, b);
    EXPECT(strcmp(a, c) != 0);
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    double expected = 0;
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        expected += 1.0 / (i + 3);
    EXPECT(result.metrics[0] == expected && result.metrics[1] == 6 && result.metrics[2] == 0);
    EXPECT(result.grad_norm > 0 && isfinite(result.grad_norm));
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_copied, 0);
    EXPECT_EQ(stats.units_returned, 16);
    shd_close(s);
}

/* Steps as `update` says, from the beginning. */
static void digest_with(const char *spec, const struct shd_update *update, char hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s = connect_local(0, 0);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    for (uint32_t k = 0; k < 3; k++) {
        struct toy toy = { .m = m, .fail_micro = -1 };
        const struct shd_compute c = {
            sizeof c, &toy, toy_forward, toy_backward, toy_metrics, NULL
        };
        EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &c, update, NULL, &e), &e);
    }
    digest_of(m, hex);
    shd_close(s);
}

/* Rates that say what the spec says change no bit; others do, each of them. */
TEST(rates_of_groups_take_the_place_of_the_specs)
{
    static const struct shd_rates all_spec = { NAN, NAN, NAN, NAN };
    static const struct shd_rates others[] = { { 0.02, NAN, NAN, NAN },
                                               { NAN, 0.3, NAN, NAN },
                                               { NAN, NAN, 0.8, NAN },
                                               { NAN, NAN, NAN, 0.9 } };
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_update update = { .size = sizeof update, .lr = 0.01 };
    struct shd_rates groups[] = { all_spec, all_spec };
    char want[65], got[65];
    digest_with(spec, &update, want);
    update.groups = groups;
    update.group_count = 2;
    digest_with(spec, &update, got);
    EXPECT_STR(got, want);
    for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
        groups[0] = others[i];
        digest_with(spec, &update, got);
        EXPECT(strcmp(got, want) != 0);
    }
    groups[0] = groups[1] = (struct shd_rates){ 0.02, NAN, NAN, NAN }; /* not times lr_scale */
    digest_with(spec, &update, want);
    update.lr = 77;
    digest_with(spec, &update, got);
    EXPECT_STR(got, want);
}

/* What tests/e2e/torch_bits.py has found to be torch's stays as it is where there is no torch. */
TEST(bits_of_torchs_order_are_pinned)
{
    char adamw[65], sgd[65];
    toy_reference(toy_spec("f32", TOY_ADAMW ", \"order\": \"torch\""), 3, adamw);
    toy_reference(toy_spec("f32", TOY_SGD ", \"order\": \"torch\", \"dampening\": 0.5"), 3, sgd);
    EXPECT_STR(adamw, "2c0a76fddf71d10e0c953c7f77de9c3f5d23d824676155af29ea3ac97395c4a3");
    EXPECT_STR(sgd, "d9d70001790f80e220457cf31951eb1c1b991e862d1b9dc5ae4fa288d1c66cda");
}

TEST(bad_rates_and_divisors_are_named_and_the_step_stays_open)
{
    static const struct {
        struct shd_rates group;
        int status;
        const char *text;
    } bad[] = {
        { { -1, NAN, NAN, NAN }, SHD_ERANGE, "lr is -1, must be" },
        { { NAN, INFINITY, NAN, NAN }, SHD_ERANGE, "weight_decay is inf" },
        { { NAN, NAN, 1, NAN }, SHD_ERANGE, "momentum is 1, must be NaN (the spec's) or 0 to" },
        { { NAN, NAN, NAN, 0.5 }, SHD_EINVAL, "0.5 is given for a rate that its optimizer, sgd" },
    };
    struct shd_err e = { 0 };
    shd_session *s = connect_local(0, 0);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, toy_spec("f32", TOY_SGD), &m, &e), &e);
    return_all(m, toy_all_micros);
    struct shd_rates groups[2] = { { NAN, NAN, NAN, NAN }, { NAN, NAN, NAN, NAN } };
    struct shd_update update = {
        .size = sizeof update, .lr = 0.1, .groups = groups, .group_count = 2
    };
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        groups[1] = bad[i].group;
        EXPECT_STATUS(shd_commit(m, &update, NULL, &e), bad[i].status);
        EXPECT_HAS(e.text, bad[i].text);
    }
    update.group_count = 1;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "rates of 1 groups are given, model 'toy' has 2");
    update.groups = NULL;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    update.group_count = 0;
    update.divide_by = 1;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "metric 0, and the micro-batches of step 0 reported 0");
    update.divide_by = 1 + SHD_METRICS_MAX;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "divide_by is 5, must be 0");
    update.divide_by = 0;
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_EQ(shd_step(m), 1);
    shd_close(s);
}

TEST(each_optimizer_and_dtype_trains)
{
    static const char *const publish[] = { "f32", "bf16", "f16" };
    static const char *const optimizers[] = { TOY_ADAMW, TOY_SGD, TOY_LION };
    char hex[ARRAY_SIZE(publish) * ARRAY_SIZE(optimizers)][65];
    size_t count = 0;
    for (size_t p = 0; p < ARRAY_SIZE(publish); p++)
        for (size_t o = 0; o < ARRAY_SIZE(optimizers); o++)
            toy_reference(toy_spec(publish[p], optimizers[o]), 2, hex[count++]);
    for (size_t i = 0; i < count; i++)
        for (size_t j = i + 1; j < count; j++)
            EXPECT(strcmp(hex[i], hex[j]) != 0);
}

/* p -= lr * (mean gradient): SGD without momentum, against fp64. Bound: values are below 8, so an
 * fp32 ulp is at most 2^-21; the update takes a handful of roundings. */
TEST(sgd_matches_fp64_reference)
{
    const char *spec =
        "{ \"name\": \"lin\", \"micro_batches\": 2, \"optimizer\": { \"kind\": \"sgd\","
        " \"momentum\": 0 }, \"units\": [ { \"name\": \"u\", \"tensors\": ["
        " { \"name\": \"w\", \"shape\": [3000], \"init\": [\"uniform\", -4, 4] } ] } ] }";
    static double want[3000];
    struct shd_err e = { 0 };
    shd_session *s = connect_local(0, 0);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    const void *params;
    EXPECT_OK(shd_acquire(m, 0, &params, &e), &e);
    const float *w = params;
    for (uint32_t i = 0; i < 3000; i++)
        want[i] = (double)w[i];
    for (uint32_t micro = 0; micro < 2; micro++) {
        float *grad;
        EXPECT_OK(shd_grad(m, micro, 0, &grad, &e), &e);
        for (uint32_t i = 0; i < 3000; i++) {
            grad[i] = toy_noise(0, micro, 0, i);
            want[i] -= 0.5 * (double)grad[i] / 2;
        }
        EXPECT_OK(shd_return(m, micro, 0, &e), &e);
    }
    const struct shd_update update = { .size = sizeof update, .lr = 0.5 };
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    shd_release(m, 0);
    for (uint32_t i = 0; i < 3000; i++)
        EXPECT_NEAR(w[i], want[i], 4 * 0x1p-21);
    shd_close(s);
}

TEST(gaps_and_padding_stay_zero)
{
    shd_session *s = connect_local(2, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    float *grad;
    EXPECT_OK(shd_grad(m, 0, 3, &grad, &e), &e); /* dirty the whole slot first */
    for (uint32_t i = 0; i < 10240; i++)
        grad[i] = 5;
    EXPECT_OK(shd_return_none(m, 0, 3, &e), &e);
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    EXPECT(grad[4099] == 0 && grad[4127] == 0); /* h0.w ends, h0.b begins at 4128 */
    EXPECT(grad[4135] == 0 && grad[4159] == 0); /* h0.b ends, h0.g begins at 4160 */
    EXPECT(grad[4160 + 2047] == 0 && grad[8191] == 0);
    EXPECT(grad[4098] == 5);
    shd_close(s);
}

TEST(grad_is_the_same_array_until_returned)
{
    shd_session *s = connect_local(2, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    float *a, *b, *c;
    EXPECT_OK(shd_grad(m, 0, 1, &a, &e), &e);
    EXPECT_OK(shd_grad(m, 0, 1, &b, &e), &e);
    EXPECT(a == b);
    EXPECT_OK(shd_grad(m, 1, 1, &c, &e), &e);
    EXPECT(a != c);
    c = NULL;
    EXPECT_STATUS(shd_grad(m, 2, 1, &c, &e), SHD_EBUSY);
    EXPECT(c == NULL);
    EXPECT_HAS(e.text, "all 2 gradient slots");
    shd_close(s);
}

TEST(slots_full_of_later_micro_batches_are_an_error)
{
    shd_session *s = connect_local(2, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    float *grad;
    EXPECT_OK(return_one(m, 3, 1, &e), &e);
    EXPECT_OK(return_one(m, 2, 1, &e), &e);
    EXPECT_STATUS(shd_grad(m, 0, 1, &grad, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "waits for micro-batch 0");
    shd_close(s);
}

TEST(repeats_are_dropped_and_none_counts_as_zeros)
{
    char with[65], without[65];
    struct shd_err e = { 0 };
    const struct shd_update update = toy_update(0);
    for (int repeat = 0; repeat < 2; repeat++) {
        shd_session *s = connect_local(8, 0);
        shd_model *m = open_toy(s);
        for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
            for (uint32_t u = 0; u < shd_units(m); u++) {
                if (u == 2 || (u == 1 && micro != 2))
                    EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
                else
                    EXPECT_OK(return_one(m, micro, u, &e), &e);
                if (repeat)
                    EXPECT_OK(return_one(m, micro, u, &e), &e);
            }
        EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
        digest_of(m, repeat ? with : without);
        shd_close(s);
    }
    EXPECT_STR(with, without);
}

static bool same_floats(const float *a, const float *b, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (a[i] != b[i])
            return false;
    return true;
}

TEST(not_finite_gradients_skip_the_update)
{
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    const struct shd_update update = toy_update(0);
    float before[8], *grad;
    const void *params;
    return_all(m, toy_all_micros); /* one good step, so that moments are not zero */
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_OK(shd_acquire(m, 1, &params, &e), &e);
    memcpy(before, params, sizeof before);
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    toy_write(m, 0, 1, 0, params, false, grad);
    grad[17] = INFINITY;
    EXPECT_OK(shd_return(m, 0, 1, &e), &e);
    return_all(m, toy_all_micros); /* its repeat of (0, 1) is dropped */
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(result.skipped && isinf(result.grad_norm));
    EXPECT_EQ(result.step, 1);
    EXPECT_EQ(shd_step(m), 2);
    EXPECT(same_floats(before, params, ARRAY_SIZE(before)));
    return_all(m, toy_all_micros);
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(!result.skipped);
    EXPECT(!same_floats(before, params, ARRAY_SIZE(before)));
    shd_close(s);
}

TEST(blob_commits_with_the_step)
{
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    char buf[16];
    size_t bytes = 99;
    struct shd_update update = toy_update(0);
    EXPECT_OK(shd_blob(m, buf, sizeof buf, &bytes, &e), &e);
    EXPECT_EQ(bytes, 0);
    update.blob = "cursor 17";
    update.blob_bytes = 9;
    return_all(m, toy_all_micros);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    update.blob = NULL; /* keeps the last one */
    update.blob_bytes = 0;
    return_all(m, toy_all_micros);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_OK(shd_blob(m, buf, sizeof buf, &bytes, &e), &e);
    EXPECT(bytes == 9 && memcmp(buf, "cursor 17", 9) == 0);
    EXPECT_STATUS(shd_blob(m, buf, 8, &bytes, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "9 bytes");
    update.blob_bytes = SHD_BLOB_BYTES_MAX + 1;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ERANGE);
    shd_close(s);
}

TEST(wrong_arguments_are_named)
{
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s), *other = NULL;
    struct shd_err e = { 0 };
    struct shd_update update = toy_update(0);
    float *grad;
    EXPECT_STATUS(shd_acquire(m, 4, NULL, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "unit 4");
    EXPECT_STATUS(shd_grad(m, 4, 0, &grad, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "micro-batch 4 of a step with 4");
    EXPECT_STATUS(shd_return(m, 1, 2, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'h1'");
    EXPECT_STATUS(shd_report(m, 0, &update.lr, 5, &e), SHD_ERANGE);
    for (uint32_t u = 0; u < shd_units(m); u++)
        EXPECT_OK(shd_return_none(m, 1, u, &e), &e);
    EXPECT_STATUS(shd_report(m, 1, &update.lr, 1, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "metrics of micro-batch 1, all gradients of which are returned");
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "was not returned");
    EXPECT_OK(shd_grad(m, 0, 3, &grad, &e), &e);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "handed out and not returned");
    update.size = 4;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &other, &e), SHD_EEXIST);
    EXPECT_STATUS(shd_model_open(s, "{", &other, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_model_attach(s, "nobody", &other, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "nobody");
    EXPECT(other == NULL);
    EXPECT_STATUS(shd_acquire(m, 4, NULL, NULL), SHD_ERANGE); /* e may be NULL */
    shd_close(s);
}

TEST(bad_learning_rate_is_refused_and_the_step_stays_open)
{
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    struct shd_update update = toy_update(0);
    return_all(m, toy_all_micros);
    update.lr = (double)NAN;
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "learning rate");
    EXPECT_EQ(shd_step(m), 0);
    update = toy_update(0);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    EXPECT_EQ(shd_step(m), 1);
    shd_close(s);
}

TEST(bad_options_are_refused)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    struct shd_options o = { .size = 3, .address = "local:" };
    EXPECT_STATUS(shd_connect(&o, &s, &e), SHD_EINVAL);
    o = (struct shd_options){ .size = sizeof o, .address = "local:", .slots = 65 };
    EXPECT_STATUS(shd_connect(&o, &s, &e), SHD_ERANGE);
    o = (struct shd_options){ .size = sizeof o, .address = "local:", .threads = 257 };
    EXPECT_STATUS(shd_connect(&o, &s, &e), SHD_ERANGE);
    o = (struct shd_options){ .size = sizeof o, .address = "local:", .name = "a\nb" };
    EXPECT_STATUS(shd_connect(&o, &s, &e), SHD_EINVAL);
    o = (struct shd_options){ .size = sizeof o, .address = "local:", .timeout_ms = UINT64_MAX };
    EXPECT_STATUS(shd_connect(&o, &s, &e), SHD_ERANGE);
    EXPECT(s == NULL);
    o = (struct shd_options){ .size = offsetof(struct shd_options, name), .address = "local:" };
    EXPECT_OK(shd_connect(&o, &s, &e), &e); /* an older caller's struct */
    shd_close(s);
    shd_close(NULL);
    shd_model_close(NULL);
}

/* A failed compute ends the run; run again, the step has the same result. */
TEST(failed_compute_can_be_run_again)
{
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 1, want);
    shd_session *s = connect_local(0, 0);
    shd_model *m = open_toy(s);
    struct shd_err e = { 0 };
    struct toy toy = { .m = m, .fail_micro = 2 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    const struct shd_update update = toy_update(0);
    EXPECT_STATUS(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e),
                  SHD_EINTERNAL);
    EXPECT_HAS(e.text, "backward of unit 1 'h0', micro-batch 2, returned 42");
    for (uint32_t u = 0; u < shd_units(m); u++)
        EXPECT(shd_params(m, u) == NULL);
    toy.fail_micro = -1;
    EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    static const uint32_t falling[] = { 1, 0 }, beyond[] = { 9 };
    EXPECT_STATUS(shd_run_step(m, falling, 2, &compute, &update, NULL, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_run_step(m, beyond, 1, &compute, &update, NULL, &e), SHD_ERANGE);
    shd_close(s);
}

/* Computed with Python's hashlib from the definition in client/paths/digest.h. */
TEST(digest_matches_its_definition)
{
    const char *spec =
        "{ \"name\": \"gold\", \"micro_batches\": 1, \"optimizer\": { \"kind\":"
        " \"adamw\" }, \"units\": [ { \"name\": \"u\", \"tensors\": ["
        " { \"name\": \"a\", \"shape\": [2040], \"init\": [\"const\", 1] },"
        " { \"name\": \"b\", \"shape\": [3, 1000], \"init\": [\"const\", -2] } ] } ] }";
    shd_session *s = connect_local(0, 0);
    struct shd_err e = { 0 };
    shd_model *m;
    char hex[65];
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    digest_of(m, hex);
    EXPECT_STR(hex, "11c6d63a69db7c06ab154dcdc57afa283aad781c84ff1d10c62866cdb2143a51");
    shd_close(s);
}

TEST(status_is_json_and_lists_models)
{
    shd_session *s = connect_local(0, 0);
    open_toy(s);
    struct shd_err e = { 0 };
    char *json = NULL;
    EXPECT_OK(shd_status(s, 0, &json, &e), &e);
    EXPECT_HAS(json, "\"name\":\"toy\"");
    free(json);
    EXPECT_STATUS(shd_status(s, 1, &json, &e), SHD_ERANGE);
    shd_close(s);
}

static int count_entries(const char *path)
{
    DIR *d = opendir(path);
    EXPECT(d != NULL);
    int count = 0;
    while (readdir(d) != NULL)
        count++;
    closedir(d);
    return count;
}

static uint64_t mapped_pages(void)
{
    uint64_t pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    EXPECT(f != NULL && fscanf(f, "%" SCNu64, &pages) == 1);
    fclose(f);
    return pages;
}

/* Address space may still grow while allocators warm up: compare after the first ten. */
TEST(open_and_close_fifty_times_leaks_nothing)
{
    uint64_t pages = 0;
    int fds = 0, threads = 0;
    for (int i = 0; i < 50; i++) {
        shd_session *s = connect_local(0, 2);
        shd_model *m = open_toy(s);
        struct shd_err e = { 0 };
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        shd_close(s);
        if (i == 10) {
            pages = mapped_pages();
            fds = count_entries("/proc/self/fd");
            threads = count_entries("/proc/self/task");
        }
    }
    EXPECT_EQ(count_entries("/proc/self/fd"), fds);
#ifndef __SANITIZE_ADDRESS__ /* keeps what is freed for a while; it finds leaks by itself */
    EXPECT(mapped_pages() <= pages + 4096); /* 16 MiB: less than 40 leaked models */
#else
    (void)pages;
#endif
    EXPECT_EQ(count_entries("/proc/self/task"), threads);
}

static int fail_at, fail_kind;

static int fail_nth(enum sys_kind kind)
{
    return (int)kind == fail_kind && --fail_at == 0 ? ENOMEM : 0;
}

static int attach_and_step(struct shd_err *e)
{
    shd_session *s;
    shd_model *m;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, e);
    if (r == SHD_OK)
        r = toy_step(m, toy_all_micros, TOY_MICROS, NULL, e);
    char hex[65];
    if (r == SHD_OK)
        r = shd_digest(m, hex, NULL, e);
    shd_close(s);
    return r;
}

TEST(nth_failed_allocation_and_mapping_is_an_error)
{
    static const int kinds[] = { SYS_ALLOC, SYS_MAP };
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
        int failures = 0;
        for (int n = 1;; n++) {
            struct shd_err e = { 0 };
            fail_at = n;
            fail_kind = kinds[k];
            sys_fault = fail_nth;
            const int r = attach_and_step(&e);
            sys_fault = NULL;
            if (fail_at > 0) {
                EXPECT_OK(r, &e);
                break;
            }
            EXPECT(r != SHD_OK && e.code == r && e.text[0] != '\0');
            failures++;
        }
        EXPECT(failures >= 5); /* four units and the slots, at least */
    }
}

TEST_MAIN()
