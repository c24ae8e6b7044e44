/* What tensors come to, asked of 1 to 4 owners beside training: the same as in this process, and as
 * plain C has it of the values themselves. */
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define ELEMS_MAX 32768u

static const struct kind {
    const char *publish, *optimizer;
    uint32_t moments;
    bool update; /* can be told */
} kinds[] = {
    { "f32", TOY_ADAMW, 2, true },
    { "bf16", TOY_SGD, 1, true },
    { "f16", TOY_LION, 1, false },
    { "f32", TOY_ADAMW ", \"order\": \"torch\"", 2, true },
    { "f32", TOY_SGD ", \"order\": \"torch\"", 1, true },
};

static struct shd_tensor tensor_at(const shd_model *m, uint32_t index)
{
    struct shd_tensor t = { .size = sizeof t };
    struct shd_err e;
    EXPECT_OK(shd_tensor_get(m, index, &t, &e), &e);
    return t;
}

static struct shd_tensor_stats stats_of(shd_model *m, const char *name, enum shd_array array)
{
    struct shd_tensor_stats s = { .size = sizeof s };
    struct shd_err e;
    EXPECT_OK(shd_tensor_stats(m, name, array, &s, &e), &e);
    return s;
}

/* A tensor's values, as shd_get() has them. */
static void get_values(shd_model *m, const struct shd_tensor *t, enum shd_array array,
                       float values[ELEMS_MAX])
{
    struct shd_err e;
    const uint64_t elems = shd_unit_elems(m, t->unit);
    float *unit = calloc(elems, sizeof *unit);
    EXPECT_OK(shd_get(m, t->unit, array, unit, NULL, NULL, &e), &e);
    EXPECT(t->elems <= ELEMS_MAX);
    memcpy(values, unit + t->offset_elems, t->elems * sizeof *values);
    free(unit);
}

static void expect_plain(const struct shd_tensor_stats *s, const float *values, uint64_t elems)
{
    uint64_t zeros = 0, nans = 0, infs = 0, binned = 0, expected = 0;
    double least = INFINITY, most = -INFINITY, sum = 0, squares = 0, magnitudes = 0;
    for (uint64_t i = 0; i < elems; i++) {
        const double v = (double)values[i];
        nans += isnan(v) != 0;
        infs += isinf(v) != 0;
        if (!isfinite(v))
            continue;
        int exponent;
        zeros += v == 0;
        least = fmin(least, v);
        most = fmax(most, v);
        sum += v;
        magnitudes += fabs(v);
        squares += v * v;
        frexp(v, &exponent);
        expected += v != 0 ? (uint64_t)(exponent + 148) * (v < 0 ? 3 : 5) : 0;
    }
    for (uint64_t i = 0; i < SHD_STATS_BINS; i++)
        binned += i * (s->below[i] * 3 + s->above[i] * 5);
    const double finite = (double)(elems - nans - infs);
    EXPECT_EQ(s->elems, elems);
    EXPECT_EQ(s->zeros, zeros);
    EXPECT_EQ(s->nans, nans);
    EXPECT_EQ(s->infs, infs);
    EXPECT_EQ(binned, expected);
    EXPECT(s->min == least && s->max == most);
    EXPECT_NEAR(s->mean, sum / finite, magnitudes * 0x1p-50);
    EXPECT_NEAR(s->rms, sqrt(squares / finite), sqrt(squares / finite) * finite * 0x1p-52);
}

static void expect_same(const struct shd_tensor_stats *a, const struct shd_tensor_stats *b)
{
    if (memcmp(a, b, sizeof *a) != 0)
        FAIL("%" PRIu64 " elements at step %" PRIu64 ": mean %.17g and %.17g, rms %.17g and %.17g",
             a->elems, a->step, a->mean, b->mean, a->rms, b->rms);
}

/* Parameters that have every kind of value. */
static int fill_special(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    static const float special[] = { NAN, INFINITY, -INFINITY, -0.0f, 0x1p-149f, -0x1p-130f };
    const shd_model *m = ctx;
    (void)array;
    for (uint64_t i = 0; i < shd_unit_elems(m, unit); i++)
        values[i] = i % 7 == 0 ? special[i / 7 % 6] : (float)i * 0x1p-12f - 1;
    return 0;
}

static void put_special(shd_model *m)
{
    struct shd_err e;
    uint8_t arrays[8] = { 0 };
    struct shd_put_options o = {
        .size = sizeof o, .arrays = arrays, .fill = fill_special, .ctx = m
    };
    arrays[1] = arrays[3] = SHD_PUT_PARAMS;
    EXPECT_OK(shd_put(m, &o, NULL, &e), &e);
}

/* Each array of each tensor, of the model in daemons and of its twin in this process. */
static void compare_all(shd_model *m, shd_model *twin, const struct kind *k)
{
    static float values[ELEMS_MAX], asked[ELEMS_MAX];
    struct shd_err e;
    for (uint32_t i = 0; i < shd_tensors(m); i++) {
        const struct shd_tensor t = tensor_at(m, i);
        for (uint32_t a = SHD_PARAMS; a <= k->moments; a++) {
            const struct shd_tensor_stats s = stats_of(m, t.name, a),
                                          here = stats_of(twin, t.name, a);
            uint64_t step = 0;
            expect_same(&s, &here);
            get_values(m, &t, a, values);
            expect_plain(&s, values, t.elems);
            EXPECT_EQ(s.step, shd_step(m));
            EXPECT_OK(shd_tensor_values(m, t.name, a, 1, t.elems - 1, asked, &step, &e), &e);
            EXPECT_EQ(step, shd_step(m));
            EXPECT(memcmp(asked, values + 1, (t.elems - 1) * sizeof *asked) == 0);
        }
        struct shd_tensor_stats none = { .size = sizeof none };
        if (k->moments < 2)
            EXPECT_STATUS(shd_tensor_stats(m, t.name, SHD_MOMENT2, &none, &e), SHD_EINVAL);
    }
}

TEST(any_number_of_owners_says_the_same)
{
    struct shd_err e;
    shd_session *here;
    for (int owners = 1; owners <= 4; owners++)
        for (size_t k = 0; k<ARRAY_SIZE(kinds); k += owners> 1 ? 2 : 1) {
            fixture_start(&daemons, owners, NULL);
            shd_session *s = attach(PATIENT_MS);
            EXPECT_OK(try_connect("local:", PATIENT_MS, &here, &e), &e);
            const char *spec = toy_spec(kinds[k].publish, kinds[k].optimizer);
            shd_model *m = open_toy(s, spec), *twin = open_toy(here, spec);
            compare_all(m, twin, &kinds[k]);
            train_steps(m, 3);
            train_steps(twin, 3);
            compare_all(m, twin, &kinds[k]);
            put_special(m);
            put_special(twin);
            compare_all(m, twin, &kinds[k]);
            shd_close(here);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* -- The last update ----------------------------------------------------------------------------
 */

/* p' - p, of what was stored before and after, and as it is told. p and p' are rounded to fp32, the
 * step in fp32 is a few roundings off. */
static void expect_update(shd_model *m, const struct shd_tensor *t, const float *before)
{
    static float after[ELEMS_MAX], told[ELEMS_MAX];
    struct shd_err e;
    double squares = 0, weights = 0;
    get_values(m, t, SHD_PARAMS, after);
    EXPECT_OK(shd_tensor_values(m, t->name, SHD_UPDATE, 0, t->elems, told, NULL, &e), &e);
    for (uint64_t i = 0; i < t->elems; i++) {
        const double true_one = (double)after[i] - (double)before[i];
        const double bound = fmax(fabs((double)after[i]), fabs((double)before[i])) * 0x1p-22 +
                             fabs(true_one) * 0x1p-20;
        if (!(fabs((double)told[i] - true_one) <= bound))
            FAIL("%s[%" PRIu64 "] went from %g to %g, by %g; told is %g", t->name, i,
                 (double)before[i], (double)after[i], true_one, (double)told[i]);
        squares += (double)told[i] * (double)told[i];
        weights += (double)after[i] * (double)after[i];
    }
    const struct shd_tensor_stats s = stats_of(m, t->name, SHD_UPDATE);
    expect_plain(&s, told, t->elems);
    EXPECT_NEAR(s.update_ratio, sqrt(squares / weights), 1e-9);
    EXPECT(s.update_ratio > 0);
}

static void check_updates(shd_model *m, const struct kind *k)
{
    static float before[8][ELEMS_MAX];
    struct shd_tensor_stats s = { .size = sizeof s };
    struct shd_err e;
    const uint32_t count = shd_tensors(m);
    EXPECT_STATUS(shd_tensor_stats(m, "wte", SHD_UPDATE, &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "the last step did not update unit 'embed'");
    for (int step = 0; step < 3; step++) {
        for (uint32_t i = 0; i < count; i++) {
            const struct shd_tensor t = tensor_at(m, i);
            get_values(m, &t, SHD_PARAMS, before[i]);
        }
        train_steps(m, 1);
        for (uint32_t i = 0; k->update && i < count; i++) {
            const struct shd_tensor t = tensor_at(m, i);
            expect_update(m, &t, before[i]);
        }
    }
    if (!k->update) {
        EXPECT_STATUS(shd_tensor_stats(m, "wte", SHD_UPDATE, &s, &e), SHD_ENOTSUP);
        EXPECT_HAS(e.text, "Lion");
    }
    put_special(m); /* is a step that is no update */
    EXPECT_STATUS(shd_tensor_stats(m, "wte", SHD_UPDATE, &s, &e), SHD_ENOENT);
}

TEST(the_last_update_is_what_changed)
{
    struct shd_err e;
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
        shd_session *s;
        fixture_start(&daemons, 1 + (int)k % 3, NULL);
        s = attach(PATIENT_MS);
        check_updates(open_toy(s, toy_spec(kinds[k].publish, kinds[k].optimizer)), &kinds[k]);
        shd_close(s);
        fixture_stop(&daemons);
        EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
        check_updates(open_toy(s, toy_spec(kinds[k].publish, kinds[k].optimizer)), &kinds[k]);
        shd_close(s);
    }
}

/* -- Gradients ----------------------------------------------------------------------------------
 */

static void return_toy(shd_model *m, uint32_t micro, uint32_t unit)
{
    struct shd_err e;
    const void *params;
    float *grad;
    EXPECT_OK(shd_acquire(m, unit, &params, &e), &e);
    EXPECT_OK(shd_grad(m, micro, unit, &grad, &e), &e);
    toy_write(m, micro, unit, 0, params, /* add= */ false, grad);
    shd_release(m, unit);
    EXPECT_OK(shd_return(m, micro, unit, &e), &e);
}

static bool has_micros(shd_model *m, uint32_t micros)
{
    struct shd_tensor_stats s = { .size = sizeof s };
    const int r = shd_tensor_stats(m, "h0.w", SHD_GRADIENT, &s, NULL);
    return r == SHD_OK && s.of_step == shd_step(m) && s.micro_batches == micros;
}

static void check_gradients(shd_model *m)
{
    static float params[ELEMS_MAX], sum[ELEMS_MAX], told[ELEMS_MAX];
    struct shd_tensor_stats s = { .size = sizeof s };
    struct shd_err e;
    uint32_t unit = 1;
    EXPECT_STATUS(shd_tensor_stats(m, "h0.w", SHD_GRADIENT, &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "holds no gradient");
    train_steps(m, 2);
    s = stats_of(m, "h0.w", SHD_GRADIENT);
    EXPECT(s.step == 2 && s.of_step == 1 && s.micro_batches == TOY_MICROS && s.rms > 0);
    const struct shd_tensor t = tensor_at(m, 2);
    EXPECT_STR(t.name, "h0.w");
    get_values(m, &t, SHD_PARAMS, params);
    memset(sum, 0, sizeof sum);
    for (uint32_t micro = 0; micro < 3; micro++) {
        return_toy(m, micro, unit);
        EXPECT_SOON(has_micros(m, micro + 1));
        for (uint64_t i = 0; i < t.elems; i++) {
            const float g = toy_noise(2, micro, unit, t.offset_elems + i) + 0.1f * params[i];
            sum[i] = micro == 0 ? g : sum[i] + g;
        }
        EXPECT_OK(shd_tensor_values(m, "h0.w", SHD_GRADIENT, 0, t.elems, told, NULL, &e), &e);
        EXPECT(memcmp(told, sum, t.elems * sizeof *sum) == 0);
        s = stats_of(m, "h0.w", SHD_GRADIENT);
        expect_plain(&s, sum, t.elems);
    }
    EXPECT_EQ(stats_of(m, "wte", SHD_GRADIENT).of_step, 1); /* nothing of this unit is in yet */
    EXPECT_OK(shd_reset_step(m, &e), &e);
    EXPECT_STATUS(shd_tensor_stats(m, "h0.w", SHD_GRADIENT, &s, &e), SHD_ENOENT);
    EXPECT_EQ(stats_of(m, "wte", SHD_GRADIENT).of_step, 1); /* of which nothing was overwritten */
}

TEST(gradients_are_of_the_step_that_is_said)
{
    struct shd_err e;
    shd_session *s;
    fixture_start(&daemons, 3, NULL);
    s = attach(PATIENT_MS);
    check_gradients(open_toy(s, toy_spec("f32", TOY_ADAMW)));
    shd_close(s);
    fixture_stop(&daemons);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    check_gradients(open_toy(s, toy_spec("f32", TOY_ADAMW)));
    shd_close(s);
}

/* -- Asked while others train -------------------------------------------------------------------
 */

#define STEPS 60u

/* What is told at a step is what the same step has where nobody asks. */
TEST(a_thousand_questions_change_nothing)
{
    struct shd_err e;
    struct shd_tensor_stats want[STEPS + 1];
    char wanted[65], got[65];
    shd_session *here;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &here, &e), &e);
    shd_model *twin = open_toy(here, toy_spec("f32", TOY_ADAMW));
    for (uint32_t k = 0; k <= STEPS; k++) {
        want[k] = stats_of(twin, "wte", SHD_PARAMS);
        if (k < STEPS)
            train_steps(twin, 1);
    }
    digest_of(twin, wanted);
    shd_close(here);
    fixture_start_kept(&daemons, 2, "");
    const pid_t trainer = trainer_fork(toy_spec("f32", TOY_ADAMW), 0, 1, STEPS);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct shd_tensor_stats last = { .step = 0 };
    for (uint32_t i = 0; i < 1000 || last.step < STEPS; i++) {
        const uint64_t before = last.step;
        last = stats_of(m, "wte", SHD_PARAMS);
        EXPECT(last.step >= before && last.step <= STEPS);
        expect_same(&last, &want[last.step]);
        if (before < STEPS / 2 && last.step >= STEPS / 2)
            fixture_restart(&daemons, 1);
    }
    expect_well(trainer);
    shd_close(s);
    s = attach(PATIENT_MS);
    digest_of(open_toy(s, toy_spec("f32", TOY_ADAMW)), got);
    EXPECT_STR(got, wanted);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
static struct hub *asking; /* NULL: nothing happens */

/* An owner is replaced between its answer and the claim of what it has answered with. */
static void replace_owner(const char *name)
{
    struct shd_err e = { 0 };
    struct hub *hub = asking;
    if (hub == NULL || strcmp(name, "get:answered") != 0)
        return;
    asking = NULL;
    const uint32_t epoch = hub->links[1].epoch;
    fixture_restart(&daemons, 1);
    while (hub->links[1].epoch == epoch || hub->links[1].state != LINK_UP)
        EXPECT_OK(hub_poll(hub, NS_PER_S, &e), &e);
}

TEST(what_a_replaced_owner_had_answered_is_asked_for_again)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 2);
    float *values = calloc(shd_unit_elems(m, 0), sizeof *values);
    fail_point_hook = replace_owner;
    asking = s->hub;
    EXPECT_OK(shd_get(m, 0, SHD_PARAMS, values, &step, NULL, &e), &e);
    EXPECT(asking == NULL);
    EXPECT_EQ(step, 2);
    fail_point_hook = NULL;
    free(values);
    shd_close(s);
    fixture_stop(&daemons);
}
#endif

/* -- More than one piece -------------------------------------------------------------------------
 */

/* At each step all elements of it are equal, and others at the next. */
#define FLAT_ELEMS 2500000u
static const char flat_spec[] =
    "{ \"name\": \"flat\", \"micro_batches\": 1,"
    "  \"optimizer\": { \"kind\": \"sgd\", \"momentum\": 0.5 }, \"units\": ["
    "  { \"name\": \"a\", \"tensors\": ["
    "    { \"name\": \"small\", \"shape\": [33] },"
    "    { \"name\": \"flat\", \"shape\": [2500000], \"init\": [\"const\", 1] } ] } ] }";

static void step_flat(shd_model *m)
{
    const struct shd_update update = { .size = sizeof update, .lr = 0.125 };
    struct shd_err e;
    const void *params;
    float *grad;
    EXPECT_OK(shd_acquire(m, 0, &params, &e), &e);
    shd_release(m, 0);
    EXPECT_OK(shd_grad(m, 0, 0, &grad, &e), &e);
    for (uint64_t i = 0; i < shd_unit_elems(m, 0); i++)
        grad[i] = 1;
    EXPECT_OK(shd_return(m, 0, 0, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

/* Steps until it is told to end, with pauses long enough to be counted in. */
static pid_t train_flat(int *ret_end)
{
    int end[2];
    EXPECT(pipe(end) == 0);
    const pid_t pid = test_fork();
    if (pid == 0) {
        close(end[1]);
        char byte;
        struct pollfd ended = { .fd = end[0], .events = POLLIN };
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, flat_spec);
        while (poll(&ended, 1, (int)(shd_step(m) % 8) * 40) == 0)
            step_flat(m);
        EXPECT_EQ(read(end[0], &byte, 1), 0);
        shd_close(s);
        _exit(0);
    }
    close(end[0]);
    *ret_end = end[1];
    return pid;
}

TEST(pieces_are_never_of_two_steps)
{
    struct shd_err e;
    int end;
    uint32_t told = 0, steps = 0;
    uint64_t before = 0;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, flat_spec);
    const pid_t trainer = train_flat(&end);
    while (told < 60 || steps < 6) {
        struct shd_tensor_stats p = { .size = sizeof p };
        const int r = shd_tensor_stats(m, "flat", told % 2 == 0 ? SHD_PARAMS : SHD_UPDATE, &p, &e);
        if (r != SHD_EBUSY && r != SHD_ENOENT) /* always quicker; no step yet */
            EXPECT_OK(r, &e);
        told += r != SHD_ENOENT;
        if (r != SHD_OK)
            continue;
        steps += p.step != before;
        before = p.step;
        EXPECT_EQ(p.elems, FLAT_ELEMS);
        if (p.min != p.max)
            FAIL("at step %" PRIu64 " from %g to %g", p.step, p.min, p.max);
        EXPECT(p.mean == p.min || fabs(p.mean / p.min - 1) < 1e-15);
    }
    close(end);
    expect_well(trainer);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- What cannot be asked ------------------------------------------------------------------------
 */

static void refuse(shd_model *m)
{
    struct shd_tensor_stats s = { .size = sizeof s };
    struct shd_err e;
    float value = 7;
    EXPECT_STATUS(shd_tensor_stats(m, "h0.q", SHD_PARAMS, &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "has no tensor 'h0.q'; did you mean h0.w");
    EXPECT_STATUS(shd_tensor_stats(m, "h0.w", SHD_EMA + 1, &s, &e), SHD_ERANGE);
    EXPECT_STATUS(shd_tensor_values(m, "h0.w", SHD_PARAMS, 0, 0, &value, NULL, &e), SHD_ERANGE);
    EXPECT_STATUS(shd_tensor_values(m, "h0.w", SHD_PARAMS, 4099, 1, &value, NULL, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "elements 4099 + 1 of tensor 'h0.w', which has 4099");
    EXPECT_STATUS(shd_tensor_values(m, "h0.w", SHD_PARAMS, 1, UINT64_MAX, &value, NULL, &e),
                  SHD_ERANGE);
    EXPECT_STATUS(shd_tensor_values(m, "h0.w", SHD_PARAMS, UINT64_MAX, 2, &value, NULL, &e),
                  SHD_ERANGE);
    s.size++;
    EXPECT_STATUS(shd_tensor_stats(m, "h0.w", SHD_PARAMS, &s, &e), SHD_EINVAL);
    EXPECT(value == 7);
}

TEST(what_cannot_be_asked_is_named)
{
    struct shd_err e;
    shd_session *s;
    fixture_start(&daemons, 2, NULL);
    s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    refuse(m);
    train_steps(m, 1);
    shd_close(s);
    fixture_stop(&daemons);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    refuse(open_toy(s, toy_spec("f32", TOY_ADAMW)));
    shd_close(s);
}

TEST_MAIN()
