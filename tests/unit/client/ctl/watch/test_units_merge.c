/* Adding what owners say of their units: the same for any number of them, and nothing is taken
 * from one that says something else than the others, or nonsense. */
#include "client/ctl/watch/units_merge.h"

#include "proto/base/fixsum.h"
#include "tests/lib/test.h"

#define UNITS 2

static json_t *text_of(double x)
{
    char text[FIXSUM_TEXT_BYTES];
    struct fixsum s;
    if (isnan(x))
        return json_null();
    fixsum_init(&s);
    fixsum_add(&s, x);
    fixsum_carry(&s);
    fixsum_text(&s, text);
    return json_string(text);
}

static json_t *pair(double a, double b)
{
    return json_pack("[o, o]", text_of(a), text_of(b));
}

/* x, y: the units' sums of squares; NaN: not known. */
static json_t *row(int step, double x, double y)
{
    return json_pack("{s:i, s:b, s:n, s:f, s:[], s:{s:o, s:o, s:o}}", "step", step, "skipped", 0,
                     "guard", "divisor", 2.0, "bad", "sums", "grad", pair(x, y), "update",
                     pair(x / 4, NAN), "weight", pair(4 * x, 4 * y));
}

static json_t *part(int owner, int owners, int next, json_t *rows)
{
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:[s, s], s:i, s:o}", "model", "m",
                     "owner", owner, "owners", owners, "step", next, "kept", 255, "every", 8,
                     "unit_count", UNITS, "unit", 0, "units", "a", "b", "next", next, "rows", rows);
}

static void drop(json_t **parts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        json_decref(parts[i]);
}

static double at(const json_t *answer, size_t r, const char *key, size_t unit)
{
    const json_t *x = json_array_get(
        json_object_get(json_array_get(json_object_get(answer, "rows"), r), key), unit);
    return json_is_number(x) ? json_number_value(x) : (double)NAN;
}

TEST(parts_add_up_to_the_whole)
{
    struct shd_err e;
    json_t *answer, *whole;
    json_t *parts[] = {
        part(1, 3, 2, json_pack("[o, o]", row(0, 3, 0.1), row(1, 1, 1))),
        part(0, 3, 2, json_pack("[o, o]", row(0, 0x1p-60, 0.2), row(1, 2, 1))),
        part(2, 3, 3, json_pack("[o, o, o]", row(0, 13, 0.4), row(1, 1, NAN), row(2, 1, 1)))
    };
    EXPECT_OK(units_merge(parts, 3, &answer, &e), &e);
    EXPECT_EQ(json_array_size(json_object_get(answer, "rows")), 2); /* one owner alone has more */
    EXPECT_EQ(json_integer_value(json_object_get(answer, "next")), 2);
    EXPECT(json_object_get(answer, "owner") == NULL);
    EXPECT(at(answer, 0, "grad", 0) == 2 && at(answer, 1, "grad", 0) == 1);
    EXPECT(isnan(at(answer, 1, "grad", 1)));
    EXPECT(at(answer, 0, "weight", 0) == 8 && at(answer, 0, "ratio", 0) == 0.25);
    EXPECT(isnan(at(answer, 0, "ratio", 1))); /* its update is not known */
    drop(parts, 3);
    /* 0.1 + 0.2 + 0.4 exactly, and then rounded, as one owner would say it. */
    struct fixsum s;
    fixsum_init(&s);
    fixsum_add(&s, 0.1);
    fixsum_add(&s, 0.4);
    fixsum_add(&s, 0.2);
    EXPECT(at(answer, 0, "grad", 1) == sqrt(fixsum_value(&s)) / 2);
    json_decref(answer);
    parts[0] = part(0, 1, 9, json_pack("[o]", row(4, 16, 0)));
    EXPECT_OK(units_merge(parts, 1, &whole, &e), &e);
    EXPECT(at(whole, 0, "grad", 0) == 2 && at(whole, 0, "grad", 1) == 0);
    EXPECT(isnan(at(whole, 0, "ratio", 1)));
    json_decref(whole);
    drop(parts, 1);
}

TEST(a_unit_that_one_owner_finds_not_finite_is_not)
{
    struct shd_err e;
    json_t *answer;
    json_t *parts[] = { part(0, 2, 1, json_pack("[o]", row(0, 1, NAN))),
                        part(1, 2, 1, json_pack("[o]", row(0, 1, 1))) };
    json_t *bad = json_object_get(json_array_get(json_object_get(parts[0], "rows"), 0), "bad");
    json_array_append_new(bad, json_integer(1));
    json_array_append_new(bad, json_integer(1));
    json_array_append_new(bad, json_integer(-7));
    json_array_append_new(bad, json_integer(1000000));
    EXPECT_OK(units_merge(parts, 2, &answer, &e), &e);
    EXPECT_EQ(
        json_array_size(json_object_get(json_array_get(json_object_get(answer, "rows"), 0), "bad")),
        1);
    EXPECT(at(answer, 0, "bad", 0) == 1);
    json_decref(answer);
    drop(parts, 2);
}

/* What a hostile daemon may say, beside one that says what it should. */
static void refuse(json_t *said, int code, const char *has)
{
    struct shd_err e = { 0 };
    json_t *answer = NULL;
    json_t *parts[] = { part(0, 2, 1, json_pack("[o]", row(0, 1, 1))), said };
    EXPECT_STATUS(units_merge(parts, 2, &answer, &e), code);
    EXPECT_HAS(e.text, has);
    EXPECT(answer == NULL);
    drop(parts, 2);
}

static json_t *with(const char *key, json_t *value)
{
    json_t *p = part(1, 2, 1, json_pack("[o]", row(0, 1, 1)));
    json_object_set_new(p, key, value);
    return p;
}

static json_t *with_row(const char *key, json_t *value)
{
    json_t *r = row(0, 1, 1);
    json_object_set_new(r, key, value);
    return part(1, 2, 1, json_pack("[o]", r));
}

TEST(nonsense_is_refused)
{
    static const char none[] = "no part of the others";
    refuse(json_pack("[]"), SHD_EPROTO, none);
    refuse(json_string("x"), SHD_EPROTO, none);
    refuse(with("owner", json_integer(0)), SHD_EPROTO, none);
    refuse(with("owner", json_integer(2)), SHD_EPROTO, none);
    refuse(with("owner", json_integer(-1)), SHD_EPROTO, none);
    refuse(with("owners", json_integer(3)), SHD_EPROTO, none);
    refuse(with("owners", json_integer(INT64_MAX)), SHD_EPROTO, none);
    refuse(with("model", json_string("n")), SHD_EPROTO, none);
    refuse(with("units", json_pack("[s, s]", "a", "c")), SHD_EPROTO, none);
    refuse(with("units", json_pack("[s]", "a")), SHD_EPROTO, none);
    refuse(with("unit", json_integer(1)), SHD_EPROTO, none);
    refuse(with("rows", json_object()), SHD_EPROTO, none);
    refuse(with("rows", json_pack("[o, o]", row(0, 1, 1), row(0, 1, 1))), SHD_EPROTO, none);
    refuse(with("rows", json_pack("[n]")), SHD_EPROTO, none);
    refuse(with_row("step", json_integer(-1)), SHD_EPROTO, none);
    refuse(with_row("divisor", json_integer(0)), SHD_EPROTO, none);
    refuse(with_row("sums", json_null()), SHD_EPROTO, none);
    refuse(with_row("sums", json_pack("{s:[s, s], s:[s, s], s:[s]}", "grad", "1p-298", "1p-298",
                                      "update", "1p-298", "1p-298", "weight", "1p-298")),
           SHD_EPROTO, none);
    refuse(with_row("sums", json_pack("{s:[s, s], s:[s, s], s:[s, s]}", "grad", "1p-298", "-1",
                                      "update", "0p0", "0p0", "weight", "0p0", "0p0")),
           SHD_EPROTO, "sums of step 0 are none");
    struct shd_err e;
    json_t *answer = NULL;
    json_t *parts[] = { part(0, 2, 1, json_pack("[o]", row(0, 1, 1))) };
    EXPECT_STATUS(units_merge(parts, 1, &answer, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "1 daemons are here, not all 2 owners");
    EXPECT_STATUS(units_merge(parts, 0, &answer, &e), SHD_ENOENT);
    drop(parts, 1);
}

TEST_MAIN()
