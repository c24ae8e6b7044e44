/* The parameters' moving average at owners: what it is, the same bits for any number of them,
 * saved, forked, put, and as it begins. */
#include "daemon/model/pin.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/kern_util.h"

#define STEPS 4u

static const struct pt_model averaged = { .name = "pt", .publish = "bf16", .ema = true };
static const struct pt_model mixed = {
    .name = "pt", .publish = "f32", .frozen = true, .ema = true
}; /* unit 2 is frozen */

/* e, and p after the update-th update, become what e is after it. Decay 0.9, with a warm-up. */
static void average(float *e, const float *p, uint64_t elems, uint64_t update)
{
    const double n = (double)(update - 1), warm = (1 + n) / (10 + n);
    const float rest = update == 1 ? 1 : (float)(1 - (warm < 0.9 ? warm : 0.9));
    for (uint64_t i = 0; i < elems; i++) {
        const float d = p[i] - e[i];
        e[i] = rest < 0.5f ? fmaf(rest, d, e[i]) : fmaf(rest - 1, d, p[i]);
    }
}

static void expect_same(const float *got, const float *want, uint64_t elems, uint32_t unit)
{
    for (uint64_t i = 0; i < elems; i++)
        if (got[i] != want[i])
            FAIL("unit %u: average[%d] is %a, expected %a", unit, (int)i, (double)got[i],
                 (double)want[i]);
}

/* What the formula comes to of the parameters as they were after each step. */
static void train_and_compare(shd_model *m)
{
    float *want[PT_UNITS];
    for (uint32_t u = 0; u < PT_UNITS; u++)
        want[u] = array_of(m, u, SHD_PARAMS);
    for (uint32_t step = 0; step <= STEPS; step++) {
        for (uint32_t u = 0; u < PT_UNITS; u++) {
            if (shd_unit_frozen(m, u))
                continue;
            const uint64_t elems = shd_unit_elems(m, u);
            float *params = array_of(m, u, SHD_PARAMS), *got = array_of(m, u, SHD_EMA);
            if (step > 0)
                average(want[u], params, elems, step);
            expect_same(got, want[u], elems, u);
            EXPECT(step < 2 || memcmp(got, params, elems * sizeof *got) != 0);
            free(params);
            free(got);
        }
        if (step < STEPS)
            train_pt(m, 1);
    }
    for (uint32_t u = 0; u < PT_UNITS; u++)
        free(want[u]);
}

TEST(average_is_its_formula_and_the_same_for_any_owners)
{
    static const struct pt_model *const models[] = { &averaged, &mixed, &averaged };
    for (int owners = 1; owners <= 3; owners++) {
        fixture_start(&daemons, owners, NULL);
        shd_session *s = attach(PATIENT_MS), *own = attach_here();
        shd_model *m = open_pt_of(s, models[owners - 1]),
                  *twin = open_pt_of(own, models[owners - 1]);
        expect_twins(m, twin);
        train_and_compare(m);
        train_and_compare(twin);
        expect_twins(m, twin);
        shd_close(own);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* A skipped step is no update. */
TEST(a_skipped_step_leaves_it)
{
    struct shd_err e = { 0 };
    shd_session *s = attach_here();
    shd_model *m = open_pt_of(s, &averaged);
    struct pt_run run = { .t = { .overflow_step = 2 } };
    train_pt(m, 2);
    float *before = array_of(m, 0, SHD_EMA);
    EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    float *after = array_of(m, 0, SHD_EMA);
    expect_same(after, before, shd_unit_elems(m, 0), 0);
    free(before);
    free(after);
    shd_close(s);
}

TEST(what_has_none_is_said)
{
    struct shd_err e = { 0 };
    struct shd_tensor_stats stats = { .size = sizeof stats };
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *both[] = { open_pt_of(s, &mixed), open_pt_of(own, &mixed) };
    for (int i = 0; i < 2; i++) {
        float *x = malloc(shd_unit_elems(both[i], 2) * sizeof *x);
        EXPECT_STATUS(shd_get(both[i], 2, SHD_EMA, x, NULL, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "has no moving average: it is frozen or a mean");
        EXPECT_STATUS(shd_tensor_stats(both[i], "h1.w", SHD_EMA, &stats, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "has no moving average: it is frozen or a mean");
        EXPECT_STATUS(shd_get(both[i], 0, 6, x, NULL, NULL, &e), SHD_ERANGE);
        EXPECT_OK(shd_tensor_stats(both[i], "wte", SHD_EMA, &stats, &e), &e);
        EXPECT(stats.rms > 0.4 && stats.rms < 0.6); /* of the initial values */
        free(x);
    }
    shd_close(own);
    own = attach_here();
    shd_model *plain = open_pt_of(own, &(struct pt_model){ .name = "pt" });
    EXPECT_STATUS(shd_tensor_stats(plain, "wte", SHD_EMA, &stats, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "has no moving average: the spec has no ema");
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Saved --------------------------------------------------------------------------------------
 */

TEST(a_checkpoint_has_it_for_any_number_of_owners)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified verified;
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *m = open_pt_of(s, &mixed), *twin = open_pt_of(own, &mixed);
    train_pt(m, 3);
    train_pt(twin, 3);
    const struct shd_checkpointed saved = save_ok(m, 0);
    EXPECT_EQ(shell("grep -q '\"format\": 4' %s/%s/shardd.json", ckpts, saved.name), 0);
    EXPECT_EQ(shell("test -s %s/%s/ema.safetensors", ckpts, saved.name), 0);
    EXPECT_OK(checkpoint_verify(ckpts, &verified, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
    for (int owners = 1; owners <= 3; owners += 2) {
        fixture_start(&daemons, owners, NULL);
        s = attach(PATIENT_MS);
        m = restore_ok(s, ckpts);
        if (owners == 1)
            expect_twins(m, twin);
        train_pt(m, 2);
        if (owners == 1)
            train_pt(twin, 2);
        expect_twins(m, twin);
        shd_close(s);
        fixture_stop(&daemons);
    }
    flip_byte(saved.name, "ema.safetensors", -5);
    EXPECT_STATUS(checkpoint_verify(ckpts, &verified, &e), SHD_EINVAL);
    shd_close(own);
    remove_ckpts();
}

/* Of a checkpoint without one it begins as the parameters are. */
TEST(weights_of_a_model_without_one_are_its_beginning)
{
    struct shd_err e = { 0 };
    char path[700];
    struct shd_restored restored = { .size = sizeof restored };
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt_of(s, &(struct pt_model){ .name = "pt" });
    train_pt(m, 2);
    const struct shd_checkpointed saved = save_ok(m, 0);
    EXPECT_EQ(shell("grep -q '\"format\": 1' %s/%s/shardd.json", ckpts, saved.name), 0);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 3, NULL);
    s = attach(PATIENT_MS);
    snprintf(path, sizeof path, "%s/%s", ckpts, saved.name);
    const struct shd_restore_options options = { .size = sizeof options,
                                                 .weights = true,
                                                 .spec_json = pt_spec(&mixed) };
    EXPECT_OK(shd_restore(s, path, &options, &restored, &e), &e);
    EXPECT_OK(shd_model_attach(s, "pt", &m, &e), &e);
    train_and_compare(m);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* -- Read ---------------------------------------------------------------------------------------
 */

static uint64_t pin(shd_model *m, bool ema)
{
    struct shd_err e = { 0 };
    uint64_t step;
    const struct shd_pin_options options = { .size = sizeof options, .ema = ema };
    EXPECT_OK(shd_pin(m, &options, &step, &e), &e);
    return step;
}

/* The pinned arrays are the parameters, or their average where there is one, as they are published.
 */
static void expect_pinned(shd_model *m, bool ema)
{
    EXPECT_EQ(pin(m, ema), shd_step(m));
    struct kern *k = device_new("scalar", 1);
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        const bool average = ema && !shd_unit_frozen(m, u);
        const uint64_t elems = shd_unit_elems(m, u);
        float *want = array_of(m, u, average ? SHD_EMA : SHD_PARAMS);
        uint16_t *published = malloc(elems * sizeof *published);
        EXPECT_RUNS(cast, k, (&(struct kern_cast){ published, SHD_BF16, want, elems }));
        EXPECT(memcmp(shd_pinned(m, u), published, elems * sizeof *published) == 0);
        free(published);
        free(want);
    }
    k->ops->free(k);
}

TEST(readers_pin_it_beside_the_parameters)
{
    const struct pt_model model = { .name = "pt", .publish = "bf16", .frozen = true, .ema = true };
    struct shd_err e = { 0 };
    const struct shd_pin_options options = { .size = sizeof options, .ema = true };
    for (int owners = 1; owners <= 3; owners += 2) {
        pin_piece_bytes = owners == 1 ? 512 : UINT64_C(4) << 20;
        fixture_start(&daemons, owners, NULL);
        shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
        shd_model *m = open_pt_of(s, &model), *reader = open_pt_of(other, &model);
        train_pt(m, 2);
        pin(reader, false);
        for (int i = 0; i < 4; i++) { /* of one memory, and of two at once */
            expect_pinned(m, i % 2 == 0);
            if (i == 1)
                shd_unpin(reader);
        }
        EXPECT_EQ(pin(reader, true), 2);
        float *before = array_of(m, 0, SHD_EMA);
        train_pt(m, 2);
        const float *kept = before;
        EXPECT_EQ(((const uint16_t *)shd_pinned(reader, 0))[7],
                  (bits_of(kept[7]) + 0x7fff + (bits_of(kept[7]) >> 16 & 1)) >> 16);
        free(before);
        shd_close(other);
        shd_close(s);
        s = attach(PATIENT_MS);
        m = open_pt_of(s, &(struct pt_model){ .name = "plain" });
        EXPECT_STATUS(shd_pin(m, &options, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "has no moving average");
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* -- Forked, put --------------------------------------------------------------------------------
 */

static int fill_ones(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const shd_model *m = ctx;
    for (uint64_t i = 0; i < shd_unit_elems(m, unit); i++)
        values[i] = array == SHD_EMA ? 2 : 1;
    return 0;
}

static int put(shd_model *m, uint8_t first, uint8_t second, struct shd_err *e)
{
    const uint8_t arrays[PT_UNITS] = { [0] = first, [1] = second };
    const struct shd_put_options options = {
        .size = sizeof options, .arrays = arrays, .fill = fill_ones, .ctx = m
    };
    return shd_put(m, &options, NULL, e);
}

TEST(a_put_of_parameters_leaves_it_and_one_of_its_own_sets_it)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *both[] = { open_pt_of(s, &mixed), open_pt_of(own, &mixed) };
    for (int i = 0; i < 2; i++) {
        shd_model *m = both[i];
        train_pt(m, 2);
        float *before = array_of(m, 0, SHD_EMA);
        EXPECT_OK(put(m, SHD_PUT_PARAMS, SHD_PUT_EMA | SHD_PUT_MOMENT1, &e), &e);
        float *after = array_of(m, 0, SHD_EMA), *set = array_of(m, 1, SHD_EMA);
        expect_same(after, before, shd_unit_elems(m, 0), 0);
        EXPECT(set[0] == 2 && set[4098] == 2);
        free(before);
        free(after);
        free(set);
        const uint8_t frozen[PT_UNITS] = { [2] = SHD_PUT_EMA };
        const struct shd_put_options bad = {
            .size = sizeof bad, .arrays = frozen, .fill = fill_ones, .ctx = m
        };
        EXPECT_STATUS(shd_put(m, &bad, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "it is frozen");
        EXPECT_STATUS(put(m, 8, 0, &e), SHD_EINVAL); /* no bit of any array */
    }
    expect_twins(both[0], both[1]);
    train_pt(both[0], 2);
    train_pt(both[1], 2);
    expect_twins(both[0], both[1]);
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_fork_goes_on_with_it)
{
    struct shd_err e = { 0 };
    const struct pt_model other = { .name = "other", .publish = "bf16", .ema = true };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt_of(s, &averaged);
    train_pt(m, 3);
    EXPECT_OK(shd_model_fork(m, "other", NULL, &e), &e);
    shd_model *fork = open_pt_of(s, &other);
    for (int step = 0; step < 2; step++) {
        float *a = array_of(m, 1, SHD_EMA), *b = array_of(fork, 1, SHD_EMA);
        expect_same(b, a, shd_unit_elems(m, 1), 1);
        free(a);
        free(b);
        train_pt(m, 1);
        train_pt(fork, 1);
    }
    expect_twins(fork, m);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
