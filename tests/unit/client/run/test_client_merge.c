/* Merging: what the outer model is made of, and what a group gives it. tests/e2e/test_merge.py has
 * the kills. */
#include <math.h>
#include <string.h>

#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/flags.h"
#include "tests/lib/test.h"

#define ELEMS_MAX 8192u

static const struct shd_merge_options once = {
    .size = sizeof once, .every = 1, .groups = 1, .lr = 1, .momentum = 0.5
};

struct pair {
    shd_session *inner_session, *outer_session;
    shd_model *inner, *outer;
};

static shd_session *local(void)
{
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

/* fields: of the spec's root, each with a comma behind it. */
static struct pair open_pair(const char *fields)
{
    struct pair p = { .inner_session = local(), .outer_session = local() };
    struct shd_err e = { 0 };
    char json[700];
    snprintf(json, sizeof json,
             "{\"name\":\"m\",\"micro_batches\":1,%s\"units\":["
             "{\"name\":\"a\",\"tensors\":["
             "{\"name\":\"a.w\",\"shape\":[40,30],\"init\":[\"normal\",0,1]},"
             "{\"name\":\"a.b\",\"shape\":[30],\"init\":[\"const\",1]}]},"
             "{\"name\":\"b\",\"tensors\":["
             "{\"name\":\"b.w\",\"shape\":[20,50],\"init\":[\"normal\",0,1]}]}]}",
             fields);
    EXPECT_OK(shd_model_open(p.inner_session, json, &p.inner, &e), &e);
    EXPECT_OK(shd_outer_open(p.outer_session, p.inner, NULL, &once, &p.outer, &e), &e);
    return p;
}

static void close_pair(struct pair *p)
{
    shd_close(p->inner_session);
    shd_close(p->outer_session);
}

static const float *values_of(shd_model *m, const char *tensor, float *unit_values)
{
    struct shd_err e = { 0 };
    struct shd_tensor t = { .size = sizeof t };
    EXPECT_OK(shd_tensor_find(m, tensor, &t, &e), &e);
    CHECK(shd_unit_elems(m, t.unit) <= ELEMS_MAX);
    EXPECT_OK(shd_get(m, t.unit, SHD_PARAMS, unit_values, NULL, NULL, &e), &e);
    return unit_values + t.offset_elems;
}

static void expect_alike(const struct pair *p)
{
    static const struct {
        const char *name;
        uint32_t elems;
    } tensors[] = { { "a.w", 1200 }, { "a.b", 30 }, { "b.w", 1000 } };
    static float in[ELEMS_MAX], out[ELEMS_MAX];
    for (uint32_t i = 0; i < ARRAY_SIZE(tensors); i++) {
        const float *a = values_of(p->inner, tensors[i].name, in);
        const float *b = values_of(p->outer, tensors[i].name, out);
        EXPECT(memcmp(a, b, tensors[i].elems * sizeof *a) == 0);
    }
}

static void merge(const struct pair *p)
{
    struct shd_err e = { 0 };
    bool merged = false;
    EXPECT_OK(shd_merge(p->inner, p->outer, &once, &merged, &e), &e);
    EXPECT(merged);
}

/* Whatever the inner model's workers read, masters go and come. */
static void expect_merged(const char *fields)
{
    static float before[ELEMS_MAX], after[ELEMS_MAX];
    struct pair p = open_pair(fields);
    values_of(p.inner, "b.w", before);
    expect_alike(&p);
    merge(&p);
    values_of(p.inner, "b.w", after);
    EXPECT(memcmp(before, after, 1000 * sizeof *before) == 0);
    expect_alike(&p);
    close_pair(&p);
}

TEST(start_values_are_the_groups_own)
{
    expect_merged("\"optimizer\":{\"kind\":\"adamw\"},");
    expect_merged("\"optimizer\":{\"kind\":\"adamw\"},\"publish\":\"bf16\",");
}

TEST(group_in_codes_merges_masters)
{
    expect_merged("\"optimizer\":{\"kind\":\"adamw\"},\"codec\":\"int4\",\"grad_codec\":\"int8\",");
}

TEST(adafactors_statistics_stay_with_the_group)
{
    expect_merged("\"optimizer\":{\"kind\":\"adamw\"},"
                  "\"groups\":[{\"name\":\"all\",\"optimizer\":{\"kind\":\"adafactor\"}}],");
}

/* As training may leave them: unit a with what is no number, b with other values. */
static int spoil(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const struct pair *p = ctx;
    struct shd_err e = { 0 };
    CHECK(array == SHD_PARAMS);
    const int r = shd_get(p->inner, unit, SHD_PARAMS, values, NULL, NULL, &e);
    for (uint32_t i = 0; unit == 1 && i < 1000; i++)
        values[i] += 1;
    if (unit == 0)
        values[7] = NAN;
    return r;
}

TEST(unit_that_is_not_finite_costs_itself_alone)
{
    static float start[2][ELEMS_MAX], after[2][ELEMS_MAX];
    static const uint8_t arrays[] = { SHD_PUT_PARAMS, SHD_PUT_PARAMS };
    struct shd_err e = { 0 };
    struct pair p = open_pair("\"optimizer\":{\"kind\":\"adamw\"},");
    const struct shd_put_options put = {
        .size = sizeof put, .arrays = arrays, .fill = spoil, .ctx = &p
    };
    merge(&p);
    const float *a = values_of(p.inner, "a.w", start[0]), *b = values_of(p.inner, "b.w", start[1]);
    EXPECT_OK(shd_put(p.inner, &put, NULL, &e), &e);
    EXPECT_EQ(shd_step(p.inner), 2);
    merge(&p);
    EXPECT_EQ(shd_step(p.outer), 1);
    expect_alike(&p);
    EXPECT(memcmp(a, values_of(p.inner, "a.w", after[0]), 1200 * sizeof *a) == 0);
    const float *changed = values_of(p.inner, "b.w", after[1]);
    for (uint32_t i = 0; i < 1000; i++) /* Nesterov's first step */
        EXPECT(fabsf(changed[i] - (b[i] + 1.5F)) < 1e-5F);
    close_pair(&p);
}

TEST_MAIN()
