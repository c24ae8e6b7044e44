/* The guard's rules as JSON, the limits that a history comes to, and what is beyond them. */
#include <math.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/share/guard_window.h"
#include "proto/share/parts.h"
#include "proto/share/unit_window.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

#define SLOTS 300u

static struct history_slot ring[SLOTS];

static void put(uint64_t step, double norm, double loss, uint32_t skipped)
{
    struct history_row row = { .step = step, .norm = norm, .skipped = skipped };
    if (!isnan(loss)) {
        row.metric_count = 1;
        row.metrics[0] = 4 * loss;
        row.reported = 4;
    }
    history_put(ring, SLOTS, &row);
}

static double limit_at(const struct guard *guard, uint64_t commits, uint32_t rule)
{
    struct guard_limits limits;
    guard_window_limits(guard, ring, SLOTS, commits, &limits);
    EXPECT_EQ(limits.count, guard->count * GUARD_LIMIT_NUMBERS);
    EXPECT(limits.numbers[rule * 3] == (uint32_t)guard->rules[rule].what);
    EXPECT(limits.numbers[rule * 3 + 1] == guard->rules[rule].stop);
    return limits.numbers[rule * 3 + 2];
}

static const struct guard three = { .count = 3,
                                    .rules = { { .what = GUARD_NORM_ABOVE,
                                                 .stop = false,
                                                 .rewind = false,
                                                 .threshold = 10,
                                                 .window = 0 },
                                               { .what = GUARD_NORM_ZSCORE,
                                                 .stop = true,
                                                 .rewind = false,
                                                 .threshold = 2,
                                                 .window = 4 },
                                               { .what = GUARD_LOSS_ZSCORE,
                                                 .stop = false,
                                                 .rewind = false,
                                                 .threshold = 3,
                                                 .window = 4 } } };

/* 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14. */
TEST(limits_are_mean_and_sigma_of_the_window)
{
    memset(ring, 0, sizeof ring);
    put(0, 100, 100, 0); /* before the window */
    put(1, 1, -1, 0);
    put(2, 2, -2, 0);
    put(3, 3, -3, 0);
    EXPECT(isinf(limit_at(&three, 3, 1))); /* one too few */
    put(4, 6, -6, 0);
    EXPECT(limit_at(&three, 5, 0) == 10);
    EXPECT(limit_at(&three, 5, 1) == 3 + 2 * sqrt(14.0 / 4));
    EXPECT(limit_at(&three, 5, 2) == -3 + 3 * sqrt(14.0 / 4));
}

/* -- Of units ---------------------------------------------------------------------------------- */

#define ROWS 5u

static const struct guard_rule of_units = {
    .what = GUARD_UNIT_ZSCORE, .threshold = 2, .window = 4, .units = "*"
};

static void put_units(struct unit_window *w, uint64_t step, double first)
{
    const double norms[2] = { first, 10 * first };
    unit_window_put(w, step, norms);
}

/* As of the whole norm: the window, of steps that count, not further back than four of it. */
TEST(units_have_windows_as_the_whole_norm_has)
{
    static _Alignas(8) uint8_t memory[512];
    CHECK(unit_window_bytes(ROWS, 2) <= sizeof memory && unit_window_bytes(ROWS, 0) == 0);
    memset(memory, 0, sizeof memory);
    struct unit_window w = unit_window_at(memory, ROWS, 2);
    put_units(&w, 0, 100);
    put_units(&w, 1, 1);
    unit_window_put(&w, 2, NULL);
    put_units(&w, 3, 2);
    put_units(&w, 4, 3);
    EXPECT(unit_window_limit(&w, &of_units, 5, 0) > 100);
    EXPECT(isinf(unit_window_limit(&w, &of_units, 4, 0)));
    put_units(&w, 9, 6);
    EXPECT(unit_window_limit(&w, &of_units, 10, 0) == 3 + 2 * sqrt(14.0 / 4));
    EXPECT(unit_window_limit(&w, &of_units, 10, 1) == 30 + 2 * sqrt(1400.0 / 4));
    double norms[2] = { 0 };
    EXPECT(unit_window_get(&w, 9, norms) && norms[0] == 6 && norms[1] == 60);
    EXPECT(unit_window_get(&w, 1, norms) && norms[0] == 1 && norms[1] == 10);
    EXPECT(!unit_window_get(&w, 2, norms));  /* it did not count */
    EXPECT(!unit_window_get(&w, 10, norms)); /* nor is it there */
    EXPECT(isfinite(unit_window_limit(&w, &of_units, 17, 0)));
    EXPECT(isinf(unit_window_limit(&w, &of_units, 18, 0))); /* step 1 is too long ago */
}

/* A row whose commit never came counts for nothing, and none is lost by it. */
TEST(units_of_a_step_that_is_not_committed_do_not_count)
{
    static _Alignas(8) uint8_t memory[512];
    memset(memory, 0, sizeof memory);
    struct unit_window w = unit_window_at(memory, ROWS, 2);
    for (uint64_t step = 0; step < 50; step++) {
        put_units(&w, step, 1e6);
        EXPECT_EQ(isinf(unit_window_limit(&w, &of_units, step, 0)), step < 4);
        if (step >= 4)
            EXPECT(unit_window_limit(&w, &of_units, step, 0) < 10);
        put_units(&w, step, 2 + (double)(step % 3));
    }
    put_units(&w, 50, 1e6);
    unit_window_put(&w, 50, NULL);
    EXPECT(unit_window_limit(&w, &of_units, 51, 0) < 10);
}

TEST(steps_that_do_not_count_are_not_in_the_window)
{
    memset(ring, 0, sizeof ring);
    for (uint64_t step = 0; step < 4; step++)
        put(step, 2, 8, 0);
    EXPECT(limit_at(&three, 4, 1) == 2 + 2 * (2 * GUARD_SIGMA_FLOOR));
    put(4, 1e6, 1e6, history_skipped(true, GUARD_NORM_ABOVE));
    put(5, (double)INFINITY, 8, history_skipped(true, GUARD_NONE));
    put(6, 0, NAN, 1); /* a put */
    put(7, 2, NAN, 0); /* without a loss: for the norm alone */
    put(8, 50, 8, 0);
    EXPECT(limit_at(&three, 8, 1) == 2 + 2 * (2 * GUARD_SIGMA_FLOOR));
    EXPECT(limit_at(&three, 9, 1) > 50);
    EXPECT(limit_at(&three, 9, 2) == 8 + 3 * (8 * GUARD_SIGMA_FLOOR));
}

/* Of the last 4 windows nothing counts but three: there is no limit. */
TEST(look_back_ends)
{
    memset(ring, 0, sizeof ring);
    for (uint64_t step = 0; step < 40; step++)
        put(step, 2, 8, step < 20 || step > 36 ? 0 : 2);
    EXPECT(isfinite(limit_at(&three, 22, 1)));
    EXPECT(isinf(limit_at(&three, 40, 1)));
    EXPECT(limit_at(&three, 40, 0) == 10);
}

/* The ring is over, and was never there. */
TEST(window_in_a_ring_that_wraps)
{
    memset(ring, 0, sizeof ring);
    for (uint64_t step = 0; step < 5 * SLOTS; step++)
        put(step, (double)(step % 2 + 1), 8, 0);
    EXPECT(limit_at(&three, 5 * SLOTS, 1) == 1.5 + 2 * 0.5);
    struct guard_limits limits;
    guard_window_limits(&three, NULL, 0, 7, &limits);
    EXPECT(limits.numbers[2] == 10 && isinf(limits.numbers[5]) && isinf(limits.numbers[8]));
}

TEST(first_rule_that_is_exceeded_counts)
{
    struct guard_limits limits = { .count = 9, .numbers = { 1, 0, 10, 2, 1, 5, 3, 0, 2 } };
    struct guard_step step = { .norm = 5, .loss = 2, .has_loss = true };
    EXPECT_EQ(guard_judge(&limits, &step).what, GUARD_NONE); /* at the limit is not above it */
    step.norm = nextafter(5, 6);
    struct decision_guard g = guard_judge(&limits, &step);
    EXPECT(g.what == GUARD_NORM_ZSCORE && g.stop && g.bound == 5 && g.value == step.norm);
    step.norm = 11;
    g = guard_judge(&limits, &step);
    EXPECT(g.what == GUARD_NORM_ABOVE && !g.stop && g.bound == 10);
    step = (struct guard_step){ .norm = 1, .loss = (double)NAN, .has_loss = true };
    g = guard_judge(&limits, &step);
    EXPECT(g.what == GUARD_LOSS_ZSCORE && isnan(g.value) && guard_plausible(&g, true));
    EXPECT(!guard_plausible(&g, false));
    limits.numbers[8] = -1;
    step.loss = -0.0;
    g = guard_judge(&limits, &step);
    EXPECT(g.what == GUARD_LOSS_ZSCORE && g.value == 0 && !signbit(g.value));
    step.has_loss = false;
    EXPECT_EQ(guard_judge(&limits, &step).what, GUARD_NONE);
    limits.numbers[8] = (double)INFINITY; /* its window is not full */
    step.has_loss = true;
    EXPECT_EQ(guard_judge(&limits, &step).what, GUARD_NONE);
}

TEST(limits_of_a_message_are_looked_at)
{
    static const double good[] = { 1, 0, 10, 2, 1, INFINITY };
    static const double bad[][3] = {
        { 0, 0, 1 },   { 6, 0, 1 },   { 1.5, 0, 1 }, { 1, 3, 1 },
        { 1, NAN, 1 }, { NAN, 0, 1 }, { 1, 0, NAN },
    };
    struct guard_limits limits = { .count = 77 };
    struct shd_err e = { 0 };
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        EXPECT_STATUS(guard_limits_unpack((const uint8_t *)bad[i], sizeof bad[i], &limits, &e),
                      SHD_EPROTO);
    EXPECT_STATUS(guard_limits_unpack((const uint8_t *)good, 16, &limits, &e), SHD_EPROTO);
    EXPECT_STATUS(guard_limits_unpack((const uint8_t *)good, 9 * sizeof good, &limits, &e),
                  SHD_EPROTO);
    EXPECT_EQ(limits.count, 77);
    EXPECT_OK(guard_limits_unpack((const uint8_t *)good, sizeof good, &limits, &e), &e);
    EXPECT(limits.count == 6 && memcmp(limits.numbers, good, sizeof good) == 0);
    EXPECT_OK(guard_limits_unpack(NULL, 0, &limits, &e), &e);
    EXPECT_EQ(limits.count, 0);
}

/* -- JSON -------------------------------------------------------------------------------------- */

static int parse(const char *guard, struct spec **ret_spec, struct shd_err *e)
{
    char json[1024];
    snprintf(json, sizeof json,
             "{\"name\":\"m\",\"micro_batches\":2,\"optimizer\":{\"kind\":\"adamw\"},%s"
             "\"units\":[{\"name\":\"u\",\"tensors\":[{\"name\":\"w\",\"shape\":[4]}]}]}",
             guard);
    return spec_parse(json, strlen(json), ret_spec, e);
}

static struct spec *parse_ok(const char *guard)
{
    struct shd_err e = { 0 };
    struct spec *spec = NULL;
    EXPECT_OK(parse(guard, &spec, &e), &e);
    return spec;
}

TEST(spec_has_the_rules_and_writes_them)
{
    struct shd_err e = { 0 };
    char *text, *again;
    struct spec *spec = parse_ok(
        "\"guard\":[{\"norm_above\":10},{\"norm_zscore\":6,\"window\":50,\"action\":\"stop\"},"
        "{\"loss_zscore\":5.5,\"action\":\"skip\"}],");
    EXPECT_EQ(spec->guard->count, 3);
    const struct guard_rule *r = spec->guard->rules;
    EXPECT(r[0].what == GUARD_NORM_ABOVE && r[0].threshold == 10 && !r[0].stop && r[0].window == 0);
    EXPECT(r[1].what == GUARD_NORM_ZSCORE && r[1].threshold == 6 && r[1].stop);
    EXPECT(r[1].window == 50 && r[2].window == GUARD_WINDOW_DEFAULT);
    EXPECT_OK(spec_dump(spec, &text, &e), &e);
    EXPECT_HAS(text, "\"guard\":[{\"norm_above\":10.0,\"action\":\"skip\"},"
                     "{\"norm_zscore\":6.0,\"window\":50,\"action\":\"stop\"},"
                     "{\"loss_zscore\":5.5,\"window\":100,\"action\":\"skip\"}]");
    struct spec *back = NULL, *none = parse_ok("");
    EXPECT_OK(spec_parse(text, strlen(text), &back, &e), &e);
    EXPECT_OK(spec_compare(spec, back, &e), &e);
    EXPECT_STATUS(spec_compare(spec, none, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "guard");
    back->guard->rules[1].stop = false;
    EXPECT_STATUS(spec_compare(spec, back, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "guard[1].action");
    back->guard->rules[1].stop = true;
    back->guard->rules[2].threshold = 5;
    EXPECT_STATUS(spec_compare(spec, back, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "guard[2].loss_zscore");
    back->guard->rules[2].threshold = 5.5;
    back->guard->rules[1].rewind = true;
    EXPECT_STATUS(spec_compare(spec, back, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "guard[1].action is 'rewind', the open model has 'stop'");
    EXPECT_OK(spec_dump(none, &again, &e), &e);
    EXPECT(strstr(again, "guard") == NULL); /* builds without guards read it */
    free(text);
    free(again);
    spec_free(spec);
    spec_free(back);
    spec_free(none);
}

TEST(what_goes_back_does_so_skips_or_stops)
{
    const struct guard guard = { .count = 2,
                                 .rules = { { .what = GUARD_NORM_ABOVE,
                                              .stop = true,
                                              .rewind = true,
                                              .threshold = 10,
                                              .window = 0 },
                                            { .what = GUARD_NORM_ABOVE,
                                              .stop = true,
                                              .rewind = false,
                                              .threshold = 5,
                                              .window = 0 } } };
    static const struct {
        enum guard_back back;
        bool stop, rewind;
    } cases[] = { { GUARD_BACK, true, true },
                  { GUARD_BACK_SKIPS, false, false },
                  { GUARD_BACK_STOPS, true, false } };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct guard_limits limits, back;
        struct shd_err e = { 0 };
        guard_window_limits(&guard, ring, SLOTS, 0, &limits);
        guard_limits_back(&limits, cases[i].back);
        EXPECT_OK(guard_limits_unpack((const uint8_t *)limits.numbers,
                                      limits.count * sizeof *limits.numbers, &back, &e),
                  &e);
        const struct decision_guard g = guard_judge(&back, &(struct guard_step){ .norm = 11 });
        EXPECT(g.what == GUARD_NORM_ABOVE && g.stop == cases[i].stop &&
               g.rewind == cases[i].rewind && guard_plausible(&g, true));
        EXPECT(guard_judge(&back, &(struct guard_step){ .norm = 6 }).stop); /* another rule's */
    }
    EXPECT(!guard_plausible(&(struct decision_guard){ .what = 1, .rewind = true }, true));
}

TEST(a_spec_with_rewind_and_audit_is_written_and_read)
{
    struct shd_err e = { 0 };
    char *text;
    struct spec *back, *spec = parse_ok("\"guard\":[{\"norm_above\":10,\"action\":\"rewind\"}],"
                                        "\"guard_audit\":true,");
    EXPECT(spec->guard->rules[0].rewind && spec->guard->rules[0].stop && spec->guard_audit);
    EXPECT_OK(spec_dump(spec, &text, &e), &e);
    EXPECT_HAS(text, "\"guard\":[{\"norm_above\":10.0,\"action\":\"rewind\"}]");
    EXPECT_HAS(text, "\"guard_audit\":true");
    EXPECT_OK(spec_parse(text, strlen(text), &back, &e), &e);
    EXPECT_OK(spec_compare(spec, back, &e), &e);
    back->guard_audit = false;
    EXPECT_STATUS(spec_compare(spec, back, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "guard_audit is 'false', the open model has 'true'");
    free(text);
    spec_free(spec);
    spec_free(back);
}

TEST(a_rule_of_units_with_a_window_is_written_and_read)
{
    struct shd_err e = { 0 };
    char *text;
    struct spec *back, *spec = parse_ok("\"guard\":[{\"norm_above\":9},{\"norm_zscore\":6,"
                                        "\"window\":50,\"units\":\"?\"}],");
    const struct guard *g = spec->guard;
    EXPECT(g->rules[1].what == GUARD_UNIT_ZSCORE && g->rules[1].window == 50);
    EXPECT(g->columns == 1 && g->rows == 51 && g->column[0] == 1 && g->watched[0] == 2);
    EXPECT_OK(spec_dump(spec, &text, &e), &e);
    EXPECT_HAS(text, "{\"norm_zscore\":6.0,\"window\":50,\"units\":[\"?\"],\"action\":\"skip\"}");
    EXPECT_OK(spec_parse(text, strlen(text), &back, &e), &e);
    EXPECT_OK(spec_compare(spec, back, &e), &e);
    back->guard->rules[1].window = 51;
    EXPECT_STATUS(spec_compare(spec, back, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "guard[1].window");
    free(text);
    spec_free(spec);
    spec_free(back);
    spec = parse_ok("\"guard\":[{\"norm_zscore\":6},{\"norm_above\":6,\"units\":\"u\"}],");
    EXPECT(spec->guard->columns == 0 && spec->guard->column == NULL);
    spec_free(spec);
}

/* 4,092 units with 1,025 norms each are the most there can be. */
TEST(windows_of_more_units_than_there_is_room_for_are_refused)
{
    for (uint32_t units = 4092; units <= 4093; units++) {
        struct shd_err e = { 0 };
        struct spec *spec = NULL;
        char *json = malloc(300 + (size_t)units * 80);
        CHECK(json != NULL);
        char *at = json + sprintf(json,
                                  "{\"name\":\"m\",\"micro_batches\":2,\"optimizer\":{\"kind\":"
                                  "\"sgd\"},\"guard\":[{\"norm_zscore\":6,\"window\":1024,"
                                  "\"units\":\"*\"}],\"units\":[");
        for (uint32_t u = 0; u < units; u++)
            at += sprintf(at, "%s{\"name\":\"u%u\",\"tensors\":[{\"name\":\"w%u\",\"shape\":[1]}]}",
                          u > 0 ? "," : "", u, u);
        strcpy(at, "]}");
        EXPECT_STATUS(spec_parse(json, strlen(json), &spec, &e),
                      units == 4092 ? SHD_OK : SHD_ERANGE);
        if (units > 4092)
            EXPECT_HAS(e.text, "guard: norm_zscore of 4093 units with a window of 1024, at most ");
        spec_free(spec);
        free(json);
    }
}

TEST(a_skip_is_told_in_words)
{
    const struct decision_guard above = { .what = GUARD_NORM_ABOVE, .value = 31000, .bound = 10 };
    const struct decision_guard none = { 0 };
    struct guard_cause c = { .unit = "h.3", .norm = 30990 };
    char text[GUARD_SKIP_BYTES];
    EXPECT_STR(guard_skip_text(&none, &(struct guard_cause){ 0 }, text),
               "gradients are not finite");
    EXPECT_STR(guard_skip_text(&above, &c, text),
               "norm 31000 is above 10 (norm_above), most of it in unit h.3 (30990)");
    c.audited = true;
    EXPECT_HAS(guard_skip_text(&above, &c, text),
               " (30990), by which micro-batch is not known: a daemon was restarted");
    c.has_micro = true;
    c.micro = 5;
    c.share = 0.968;
    EXPECT_HAS(guard_skip_text(&above, &c, text),
               " (30990), 97% of that by micro-batch 5 of a worker that is not known");
    c.worker = "trainer";
    c.pid = 4711;
    EXPECT_HAS(guard_skip_text(&above, &c, text), " of worker trainer (pid 4711)");
    c.rank = 2;
    c.norm = (double)INFINITY;
    EXPECT_STR(guard_skip_text(&none, &c, text),
               "gradients are not finite, the first in unit h.3 by micro-batch 5 of worker trainer "
               "(rank 1, pid 4711)");
}

/* -- What each micro-batch brings -------------------------------------------------------------- */

#define GROUPS 6u

static struct fixsum sum_of(double x)
{
    struct fixsum s;
    fixsum_init(&s);
    fixsum_add(&s, x);
    fixsum_carry(&s);
    return s;
}

static double read_part(const struct parts *p, uint64_t round, uint32_t unit, uint32_t group)
{
    uint8_t bytes[FIXSUM_BYTES];
    struct fixsum s;
    bool none;
    if (!parts_read(p, round, unit, group, 1, bytes))
        return -1;
    EXPECT(fixsum_unpack(bytes, &s, &none));
    return none ? (double)INFINITY : fixsum_value(&s);
}

TEST(parts_are_the_sums_behind_each_gradient)
{
    void *memory = calloc(1, parts_bytes(2, GROUPS));
    struct parts *p = parts_init(memory, 2, GROUPS);
    const struct fixsum four = sum_of(4), nine = sum_of(9);
    uint8_t bytes[GROUPS * FIXSUM_BYTES];
    EXPECT(read_part(p, 0, 0, 0) == -1);
    parts_take(p, &(struct part){ 7, 0, 1, true, 11 }, &four); /* group 0 took no part */
    parts_take(p, &(struct part){ 7, 0, 3, false, 12 }, &nine);
    parts_take(p, &(struct part){ 7, 0, 3, false, 13 }, &four); /* once more: the first counts */
    const double want[GROUPS] = { 0, 4, 4, 9, 9, 9 };
    const uint64_t who[GROUPS] = { 0, 11, 0, 12, 0, 0 };
    for (uint32_t g = 0; g < GROUPS; g++) {
        EXPECT(read_part(p, 7, 0, g) == want[g]);
        EXPECT_EQ(parts_session(p, 7, 0, g), who[g]);
    }
    EXPECT(parts_read(p, 7, 0, 0, GROUPS, bytes));
    EXPECT(read_part(p, 6, 0, 0) == -1 && read_part(p, 7, 1, 0) == -1); /* another's */
    parts_take(p, &(struct part){ 8, 0, 0, true, 14 }, NULL);           /* the next round */
    EXPECT(isinf(read_part(p, 8, 0, 5)) && read_part(p, 7, 0, 1) == -1);
    parts_take(p, &(struct part){ 9, 0, 2, false, 15 }, &nine); /* a predecessor had the first */
    EXPECT(read_part(p, 9, 0, 2) == -1);
    EXPECT_EQ(parts_session(p, 9, 0, 2), 0);
    free(memory);
}

TEST(rules_that_are_none_are_named)
{
    static const struct {
        const char *guard, *text;
        int status;
    } bad[] = {
        { "{}", "guard", SHD_EINVAL },
        { "[]", "guard has 0 entries", SHD_ERANGE },
        { "[{\"norm_above\":1},{\"norm_above\":1},{\"norm_above\":1},{\"norm_above\":1},"
          "{\"norm_above\":1},{\"norm_above\":1},{\"norm_above\":1},{\"norm_above\":1},"
          "{\"norm_above\":1}]",
          "guard has 9 entries", SHD_ERANGE },
        { "[{\"action\":\"skip\"}]", "none of norm_above", SHD_EINVAL },
        { "[{\"norm_above\":1,\"loss_zscore\":2}]", "guard[0] has norm_above and loss_zscore",
          SHD_EINVAL },
        { "[{\"norm_above\":0}]", "guard[0].norm_above is 0", SHD_ERANGE },
        { "[{\"norm_above\":-1}]", "guard[0].norm_above is -1", SHD_ERANGE },
        { "[{\"norm_above\":\"x\"}]", "guard[0].norm_above", SHD_EINVAL },
        { "[{\"norm_above\":1,\"window\":8}]", "guard[0].window", SHD_EINVAL },
        { "[{\"norm_zscore\":1,\"window\":3}]", "guard[0].window is 3", SHD_ERANGE },
        { "[{\"norm_zscore\":1,\"window\":1025}]", "guard[0].window is 1025", SHD_ERANGE },
        { "[{\"norm_zscore\":1,\"action\":\"halt\"}]", "guard[0].action is 'halt'", SHD_EINVAL },
        { "[{\"norm_above\":1},{\"norm_zscore\":1,\"action\":\"rewindd\"}]",
          "guard[1].action is 'rewindd', must be skip, stop or rewind", SHD_EINVAL },
        { "[{\"norm_abov\":1}]", "norm_abov", SHD_EINVAL },
        { "[{\"unit_norm_above\":1}]", "unit_norm_above", SHD_EINVAL },
        { "[{\"norm_above\":1,\"units\":\"x*\"}]", "guard[0].units 'x*' is no unit with a gradient",
          SHD_EINVAL },
        { "[{\"norm_above\":1,\"units\":\"\"}]", "guard[0].units is ''", SHD_EINVAL },
        { "[{\"norm_above\":1,\"units\":\"a b\"}]", "guard[0].units is 'a b'", SHD_EINVAL },
        { "[{\"norm_above\":1,\"units\":[]}]", "guard[0].units has 0 entries", SHD_ERANGE },
        { "[{\"norm_above\":1,\"units\":[7]}]", "guard[0].units[0]", SHD_EINVAL },
        { "[{\"norm_above\":1,\"units\":7}]", "guard[0].units", SHD_EINVAL },
        { "[{\"norm_zscore\":1,\"units\":\"x*\"}]",
          "guard[0].units 'x*' is no unit with a gradient", SHD_EINVAL },
        { "[{\"loss_zscore\":1,\"units\":\"u\"}]", "guard[0].units: a loss is of no unit",
          SHD_EINVAL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        char text[600];
        struct spec *spec = NULL;
        struct shd_err e = { 0 };
        snprintf(text, sizeof text, "\"guard\":%s,", bad[i].guard);
        EXPECT_STATUS(parse(text, &spec, &e), bad[i].status);
        EXPECT_HAS(e.text, bad[i].text);
    }
}

TEST_MAIN()
