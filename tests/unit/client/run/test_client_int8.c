/* Moments in 8 bits at owners: the same bits for any number of them, saved, restored, forked, gone
 * back to, put and read as fp32, and what they take of memory. */
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/kern_util.h"

static const struct pt_model small = { .name = "pt", .publish = "bf16", .int8 = true };
static const struct pt_model mixed = {
    .name = "pt", .publish = "f32", .frozen = true, .ema = true, .int8 = true
}; /* unit 2 is frozen */
static const struct pt_model means = {
    .name = "pt", .publish = "f32", .mean = true, .int8 = true
}; /* units 2 and 4 are */
static const struct pt_model placed = {
    .name = "pt", .publish = "bf16", .ema = true, .int8 = true, .placed = true
}; /* units 2 and 3 have one owner each */

/* At most as many values as there are codes in any block, and not all of them 0. */
static void expect_rounded(shd_model *m, uint32_t unit, enum shd_array array)
{
    float *x = array_of(m, unit, array);
    const uint64_t elems = shd_unit_elems(m, unit);
    uint64_t zeros = 0;
    for (uint64_t i = 0; i + 64 <= elems; i += 64) {
        float most = 0;
        for (uint64_t j = i; j < i + 64; j++)
            most = fmaxf(most, fabsf(x[j]));
        for (uint64_t j = i; j < i + 64; j++) {
            /* y = 10 ^ n (0.1 + 0.9 c / 2^i) of the top decade: c is whole */
            const double y = fabs((double)x[j]) / (double)most;
            const double c = (y - 0.1) / 0.9 * (array == SHD_MOMENT1 ? 64 : 128);
            EXPECT(most == 0 || y <= 0.1 || fabs(c - round(c)) < 1e-3);
            zeros += x[j] == 0;
        }
    }
    EXPECT(zeros < elems);
    free(x);
}

TEST(digests_are_the_same_for_any_owners)
{
    static const struct pt_model *const models[] = { &small, &mixed, &means, &placed };
    for (size_t i = 0; i < ARRAY_SIZE(models); i++)
        for (int owners = 1; owners <= 3; owners++) {
            fixture_start(&daemons, owners, NULL);
            shd_session *s = attach(PATIENT_MS), *own = attach_here();
            shd_model *m = open_pt_of(s, models[i]), *twin = open_pt_of(own, models[i]);
            expect_twins(m, twin); /* of nothing: all moments are 0 */
            for (int step = 0; step < 3; step++) {
                train_pt(m, 1);
                train_pt(twin, 1);
                expect_twins(m, twin);
            }
            expect_rounded(m, 0, SHD_MOMENT1);
            expect_rounded(twin, 1, SHD_MOMENT2);
            shd_close(own);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* They are other bits than those of fp32 moments, and near them. */
TEST(training_is_near_that_of_fp32_moments)
{
    const struct pt_model wide = { .name = "wide", .publish = "bf16" };
    shd_session *s = attach_here();
    shd_model *both[] = { open_pt_of(s, &small), open_pt_of(s, &wide) };
    double norm[2] = { 0 }, apart = 0;
    float *p[2];
    train_pt(both[0], 5);
    train_pt(both[1], 5);
    for (uint32_t u = 0; u < PT_UNITS; u++) {
        p[0] = array_of(both[0], u, SHD_PARAMS);
        p[1] = array_of(both[1], u, SHD_PARAMS);
        /* Tensors begin elsewhere, but the first of a unit. */
        for (uint64_t i = 0; i < 61 * 13; i++) {
            norm[0] += (double)p[0][i] * (double)p[0][i];
            norm[1] += (double)p[1][i] * (double)p[1][i];
            apart += pow((double)p[0][i] - (double)p[1][i], 2);
        }
        free(p[0]);
        free(p[1]);
    }
    EXPECT(apart > 0);
    EXPECT(sqrt(apart) < 0.01 * sqrt(norm[1]) && sqrt(norm[0]) < 1.01 * sqrt(norm[1]));
    shd_close(s);
}

/* -- Memory -------------------------------------------------------------------------------------
 */

/* 64 bytes and a scale for each 64, in whole pages of a unit: no more, and nothing overlaps. */
TEST(a_moment_has_17_bytes_for_16_elements)
{
    static const struct pt_model *const models[] = { &small, &mixed, &means, &placed };
    struct shd_err e = { 0 };
    for (size_t i = 0; i < ARRAY_SIZE(models); i++)
        for (uint32_t owner = 0; owner < 3; owner++) {
            struct spec *spec;
            struct shardmap *map;
            const char *json = pt_spec(models[i]);
            EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
            EXPECT_OK(shardmap_new(spec, owner, 3, &map, &e), &e);
            uint64_t at = map->elems * sizeof(float);
            for (uint32_t a = SHARDMAP_M; a < spec_arrays(spec); a++)
                for (uint32_t u = 0; u < spec->unit_count; u++) {
                    const uint64_t elems = map->slice[u].elems;
                    if (spec_unit_moments(spec, u) == 0)
                        continue;
                    EXPECT_EQ(shardmap_array_elem(map, a, u) * sizeof(float), at);
                    EXPECT_EQ(at % SHD_PAGE_BYTES, 0);
                    EXPECT_EQ(shardmap_array_bytes(map, a, u),
                              a == spec_ema_array(spec)
                                  ? elems * sizeof(float)
                                  : layout_align(elems * 17 / 16, SHD_PAGE_BYTES));
                    at += shardmap_array_bytes(map, a, u);
                }
            EXPECT_EQ(shardmap_kept_bytes(map), at);
            EXPECT_EQ(shardmap_state_bytes(map), at + map->train_elems * sizeof(float));
            for (uint32_t t = 0; t < spec->tensor_count; t++)
                EXPECT_EQ(spec->tensors[t].offset_elems % QUANT_BLOCK_ELEMS, 0);
            shardmap_free(map);
            spec_free(spec);
        }
}

/* -- Saved --------------------------------------------------------------------------------------
 */

/* In fp32 in the files, from which any number of owners, and the library alone, go on bit by bit.
 */
TEST(a_checkpoint_loses_nothing)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified verified;
    static const struct pt_model *const models[] = { &mixed, &means, &placed };
    for (size_t i = 0; i < ARRAY_SIZE(models); i++) {
        make_ckpts();
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS), *own = attach_here();
        shd_model *m = open_pt_of(s, models[i]), *twin = open_pt_of(own, models[i]);
        train_pt(m, 3);
        train_pt(twin, 3);
        const struct shd_checkpointed saved = save_ok(m, 0);
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
        flip_byte(saved.name, "optimizer-v.safetensors", -5);
        EXPECT_STATUS(checkpoint_verify(ckpts, &verified, &e), SHD_EINVAL);
        shd_close(own);
        remove_ckpts();
    }
}

TEST(another_kind_of_moments_is_refused)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt_of(s, &small);
    EXPECT_STATUS(shd_model_open(other,
                                 pt_spec(&(struct pt_model){ .name = "pt", .publish = "bf16" }), &m,
                                 &e),
                  SHD_ESPEC);
    EXPECT_HAS(e.text, "optimizer.moments");
    EXPECT_HAS(e.text, "int8");
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Put and shown ------------------------------------------------------------------------------
 */

struct given {
    float *values[PT_UNITS][3];
};

static int give(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const struct given *g = ctx;
    const float *from = g->values[unit][array];
    for (uint64_t i = 0; i < 2048; i++)
        values[i] = from[i];
    return 0;
}

/* What was got and is put elsewhere is the same state; a put of other values is rounded. */
TEST(what_is_got_can_be_put_and_is_the_same)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *m = open_pt_of(s, &small), *twin = open_pt_of(own, &small);
    train_pt(m, 3);
    train_pt(twin, 3);
    struct given g = { 0 };
    uint8_t arrays[PT_UNITS] = { 0 };
    for (uint32_t u = PT_EXPERT + 3; u < PT_UNITS; u++) { /* of one block */
        arrays[u] = SHD_PUT_MOMENT1 | SHD_PUT_MOMENT2;
        for (int a = SHD_MOMENT1; a <= SHD_MOMENT2; a++)
            g.values[u][a] = array_of(m, u, (enum shd_array)a);
    }
    struct shd_put_options put = { .size = sizeof put, .arrays = arrays, .fill = give, .ctx = &g };
    EXPECT_OK(shd_put(m, &put, NULL, &e), &e);
    EXPECT_OK(shd_put(twin, &put, NULL, &e), &e);
    for (uint32_t u = PT_EXPERT + 3; u < PT_UNITS; u++)
        for (int a = SHD_MOMENT1; a <= SHD_MOMENT2; a++) {
            float *now = array_of(m, u, (enum shd_array)a);
            EXPECT(memcmp(now, g.values[u][a], 2048 * sizeof *now) == 0);
            free(now);
        }
    expect_twins(m, twin);
    train_pt(m, 1);
    train_pt(twin, 1);
    expect_twins(m, twin);
    const uint32_t last = PT_UNITS - 1;
    for (uint64_t i = 0; i < 777; i++)
        g.values[last][SHD_MOMENT2][i] = 1 + (float)i * 0x1p-12f;
    EXPECT_OK(shd_put(m, &put, NULL, &e), &e);
    float *now = array_of(m, last, SHD_MOMENT2);
    for (uint64_t i = 0; i < 777; i++)
        EXPECT_NEAR(now[i], (double)g.values[last][SHD_MOMENT2][i], 0.01);
    EXPECT(now[63] == g.values[last][SHD_MOMENT2][63]); /* the largest of its block */
    free(now);
    for (uint32_t u = 0; u < PT_UNITS; u++)
        for (int a = 0; a < 3; a++)
            free(g.values[u][a]);
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(statistics_are_of_the_decoded_values)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 3, NULL);
    shd_session *s = attach(PATIENT_MS), *own = attach_here();
    shd_model *m = open_pt_of(s, &mixed), *twin = open_pt_of(own, &mixed);
    train_pt(m, 2);
    train_pt(twin, 2);
    for (int a = SHD_MOMENT1; a <= SHD_MOMENT2; a++) {
        struct shd_tensor_stats got = { .size = sizeof got }, want = { .size = sizeof want };
        float *x = array_of(m, 0, (enum shd_array)a);
        double squares = 0;
        for (uint64_t i = 0; i < 61 * 83; i++)
            squares += (double)x[i] * (double)x[i];
        EXPECT_OK(shd_tensor_stats(m, "wte", (enum shd_array)a, &got, &e), &e);
        EXPECT_OK(shd_tensor_stats(twin, "wte", (enum shd_array)a, &want, &e), &e);
        EXPECT(got.rms == want.rms && got.max == want.max && got.zeros == want.zeros);
        EXPECT_NEAR(got.rms, sqrt(squares / (61 * 83)), 1e-9 * got.rms);
        free(x);
    }
    struct shd_tensor_stats stats = { .size = sizeof stats };
    EXPECT_STATUS(shd_tensor_stats(m, "wte", SHD_UPDATE, &stats, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "its moments are in 8 bits");
    EXPECT_STATUS(shd_tensor_stats(twin, "wte", SHD_UPDATE, &stats, &e), SHD_ENOTSUP);
    shd_close(own);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Copied -------------------------------------------------------------------------------------
 */

TEST(forks_and_snapshots_have_the_same_codes)
{
    struct shd_err e = { 0 };
    const struct pt_model other = {
        .name = "other", .publish = "f32", .frozen = true, .ema = true, .int8 = true
    };
    char hex[65], want[65];
    uint64_t step;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt_of(s, &mixed);
    train_pt(m, 2);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    digest_of(m, want);
    EXPECT_OK(shd_model_fork(m, "other", NULL, &e), &e);
    shd_model *fork = open_pt_of(s, &other);
    digest_of(fork, hex);
    EXPECT_STR(hex, want);
    train_pt(fork, 2);
    train_pt(m, 2);
    expect_twins(fork, m);
    EXPECT_OK(shd_model_rewind(m, 2, &step, &e), &e);
    digest_of(m, hex);
    EXPECT_STR(hex, want);
    train_pt(m, 2);
    expect_twins(fork, m);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
