/* Settings: what can be said and what is refused, from which step on what holds, and JSON. */
#include <math.h>

#include "proto/base/check.h"
#include "proto/spec/settings_text.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

static struct spec *spec_of(const char *optimizer, const char *groups)
{
    char json[1000];
    struct spec *spec = NULL;
    struct shd_err e = { 0 };
    snprintf(json, sizeof json,
             "{\"name\": \"m\", \"micro_batches\": 2, \"optimizer\": {%s}, \"groups\": [%s], "
             "\"units\": [{\"name\": \"u\", \"tensors\": [{\"name\": \"t\", \"shape\": [8], "
             "\"group\": \"decay\"}]}]}",
             optimizer, groups);
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

#define ADAMW  "\"kind\": \"adamw\""
#define GROUPS "{\"name\": \"decay\", \"weight_decay\": 0.1}, {\"name\": \"no.de=cay\"}"
#define MEAN   ", {\"name\": \"stats\", \"optimizer\": {\"kind\": \"mean\"}}"

static double number(const struct settings *s, uint32_t group, enum setting_rate rate)
{
    return setting_get(s, setting_of(group, rate));
}

/* -- Text -------------------------------------------------------------------------------------- */

TEST(text_and_json_say_the_same)
{
    static const char *const texts[] = {
        "lr_scale.decay=0.5 betas.no.de=cay=0.8,0.95\n clip_norm=1 weight_decay.decay=spec ",
        "{\"lr_scale.decay\": 0.5, \"betas.no.de=cay\": [0.8, 0.95], \"clip_norm\": 1, "
        "\"weight_decay.decay\": null}",
    };
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct shd_err e = { 0 };
    for (size_t i = 0; i < 2; i++) {
        struct settings s;
        EXPECT_OK(settings_parse(spec, texts[i], &s, &e), &e);
        EXPECT_EQ(s.count, 9);
        EXPECT(number(&s, 0, SETTING_LR_SCALE) == 0.5 && number(&s, 1, SETTING_BETA1) == 0.8);
        EXPECT(number(&s, 1, SETTING_BETA2) == 0.95 && setting_get(&s, SETTINGS_CLIP_NORM) == 1);
        EXPECT(number(&s, 0, SETTING_WEIGHT_DECAY) == SETTINGS_BACK);
        EXPECT(isnan(number(&s, 1, SETTING_LR_SCALE)) && isnan(number(&s, 0, SETTING_BETA1)));
    }
    spec_free(spec);
}

TEST(key_without_a_group_is_of_all_that_have_it)
{
    struct spec *spec = spec_of(ADAMW, GROUPS MEAN);
    struct settings s;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_parse(spec, "lr_scale=2 beta2=0.5", &s, &e), &e);
    for (uint32_t g = 0; g < 2; g++)
        EXPECT(number(&s, g, SETTING_LR_SCALE) == 2 && number(&s, g, SETTING_BETA2) == 0.5);
    EXPECT(isnan(number(&s, 2, SETTING_LR_SCALE)) && isnan(number(&s, 2, SETTING_BETA2)));
    spec_free(spec);
}

static void expect_refused(const struct spec *spec, const char *text, int status, const char *why)
{
    struct settings s = { .count = 77 };
    struct shd_err e = { 0 };
    EXPECT_STATUS(settings_parse(spec, text, &s, &e), status);
    EXPECT_HAS(e.text, why);
    EXPECT_EQ(s.count, 77);
}

TEST(what_cannot_be_changed_is_refused_with_what_would_be_right)
{
    static const struct {
        const char *text;
        int status;
        const char *why;
    } cases[] = {
        { "", SHD_EINVAL, "no setting is given" },
        { "{}", SHD_EINVAL, "no setting is given" },
        { "lr_scale.decay", SHD_EINVAL, "KEY=VALUE" },
        { "lr_scal.decay=1", SHD_EINVAL, "did you mean lr_scale?" },
        { "weight_decay.decai=1", SHD_EINVAL, "did you mean decay?" },
        { "lr_scale.=1", SHD_EINVAL, "has no group ''" },
        { "lr=0.1", SHD_EINVAL, "lr_scale multiplies it" },
        { "eps.decay=1e-6", SHD_EINVAL, "eps cannot be changed" },
        { "micro_batches=8", SHD_EINVAL, "shardctl restore --weights" },
        { "optimizer=lion", SHD_EINVAL, "moments are of one optimizer" },
        { "momentum.decay=0.5", SHD_EINVAL, "its optimizer is adamw" },
        { "lr_scale.stats=1", SHD_EINVAL, "its optimizer is mean" },
        { "betas.decay=0.9", SHD_EINVAL, "two numbers" },
        { "lr_scale.decay=0.9,1", SHD_EINVAL, "takes a number" },
        { "lr_scale.decay=-1", SHD_EINVAL, "takes a number" },
        { "lr_scale.decay=nan", SHD_EINVAL, "takes a number" },
        { "lr_scale.decay=1e400", SHD_EINVAL, "takes a number" },
        { "lr_scale.decay=1e39", SHD_ERANGE, "lr_scale.decay is 1e+39" },
        { "beta1.decay=1", SHD_ERANGE, "beta1.decay is 1, must be 0 to 0.99999" },
        { "clip_norm.decay=1", SHD_EINVAL, "of all groups together" },
        { "lr_scale.decay=1 lr_scale=2", SHD_EINVAL, "given twice" },
        { "{\"lr_scale.decay\": \"1\"}", SHD_EINVAL, "takes a number" },
        { "{\"lr_scale.decay\": 1", SHD_EINVAL, "not a JSON object" },
    };
    struct spec *spec = spec_of(ADAMW, GROUPS MEAN);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        expect_refused(spec, cases[i].text, cases[i].status, cases[i].why);
    spec_free(spec);
    spec = spec_of("\"kind\": \"sgd\", \"momentum\": 0.9", GROUPS);
    expect_refused(spec, "betas=0.9,0.9", SHD_EINVAL, "its optimizer is sgd");
    expect_refused(spec, "beta1.decay=0.9", SHD_EINVAL, "its optimizer is sgd");
    spec_free(spec);
    spec = spec_of("\"kind\": \"sgd\", \"momentum\": 0.9, \"order\": \"torch\", \"nesterov\": true",
                   GROUPS);
    expect_refused(spec, "momentum=0", SHD_EINVAL, "needs a momentum");
    spec_free(spec);
}

TEST(long_texts_are_refused)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    char *text = malloc(SETTINGS_TEXT_BYTES_MAX + 2);
    memset(text, 'x', SETTINGS_TEXT_BYTES_MAX + 1);
    text[SETTINGS_TEXT_BYTES_MAX + 1] = '\0';
    expect_refused(spec, text, SHD_ERANGE, "at most");
    text[SETTINGS_TEXT_BYTES_MAX] = '\0';
    expect_refused(spec, text, SHD_EINVAL, "at most");
    text[300] = '=';
    text[301] = '1';
    text[302] = '\0';
    expect_refused(spec, text, SHD_EINVAL, "a key of 300 bytes");
    free(text);
    spec_free(spec);
}

/* -- Steps ------------------------------------------------------------------------------------- */

static struct settings change_of(const struct spec *spec, const char *text)
{
    struct settings s;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_parse(spec, text, &s, &e), &e);
    return s;
}

static uint64_t give(const struct spec *spec, struct settings_kept *kept, const char *text,
                     uint64_t earliest, uint64_t at)
{
    const struct settings change = change_of(spec, text);
    const struct settings_when when = { earliest, earliest, at };
    uint64_t from = UINT64_MAX;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_give(kept, &change, &when, kept, &from, &e), &e);
    return from;
}

static void expect_not_given(const struct spec *spec, const struct settings_kept *kept,
                             const char *text, uint64_t earliest, uint64_t at, int status)
{
    const struct settings change = change_of(spec, text);
    const struct settings_when when = { earliest, earliest, at };
    struct settings_kept after = *kept;
    uint64_t from;
    struct shd_err e = { 0 };
    EXPECT_STATUS(settings_give(kept, &change, &when, &after, &from, &e), status);
    EXPECT(memcmp(&after, kept, sizeof after) == 0);
}

static double scale_at(const struct settings_kept *kept, uint64_t step)
{
    struct settings s;
    settings_at(kept, step, &s, NULL);
    return number(&s, 0, SETTING_LR_SCALE);
}

TEST(changes_hold_from_their_step_on)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    EXPECT(isnan(scale_at(&kept, 5)) && !settings_any(&kept));
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=0.5", 7, 0), 7);
    EXPECT(isnan(scale_at(&kept, 6)) && scale_at(&kept, 7) == 0.5 && scale_at(&kept, 99) == 0.5);
    EXPECT_EQ(give(spec, &kept, "clip_norm=1", 7, 0), 7); /* the same step: both */
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=2", 9, 20), 20);
    EXPECT(scale_at(&kept, 9) == 0.5 && scale_at(&kept, 19) == 0.5 && scale_at(&kept, 20) == 2);
    expect_not_given(spec, &kept, "clip_norm=2", 10, 0, SHD_EBUSY);
    expect_not_given(spec, &kept, "clip_norm=2", 10, 21, SHD_EBUSY);
    expect_not_given(spec, &kept, "clip_norm=2", 10, 9, SHD_ESTEP);
    EXPECT_EQ(give(spec, &kept, "clip_norm=2", 10, 20), 20);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=spec clip_norm=spec", 21, 0), 21);
    EXPECT(scale_at(&kept, 20) == 2 && isnan(scale_at(&kept, 21)));
    EXPECT_EQ(give(spec, &kept, "betas.decay=0.8,0.9", 30, 0), 30);
    struct settings now;
    uint64_t since[SETTINGS_MAX];
    settings_at(&kept, 30, &now, since);
    EXPECT(isnan(setting_get(&now, SETTINGS_CLIP_NORM)) && number(&now, 0, SETTING_BETA1) == 0.8);
    EXPECT_EQ(since[setting_of(0, SETTING_BETA1)], 30);
    EXPECT_EQ(since[setting_of(0, SETTING_LR_SCALE)], 21);
    spec_free(spec);
}

/* Who asked an owner that died asks its successor; the step is another one by then. */
TEST(change_given_twice_is_there_once)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=0.5 clip_norm=1", 3, 0), 3);
    const struct settings_kept before = kept;
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=0.5 clip_norm=1", 3, 0), 3);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=0.5", 8, 0), 3);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=0.5", 8, 3), 3); /* it was asked for that step */
    EXPECT_EQ(give(spec, &kept, "clip_norm=1", 2, 0), 3);        /* the step began again */
    EXPECT(memcmp(&before, &kept, sizeof kept) == 0);
    expect_not_given(spec, &kept, "lr_scale.decay=0.5", 8, 2, SHD_ESTEP);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=0.25", 2, 0), 3);
    EXPECT(scale_at(&kept, 3) == 0.25);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=spec", 4, 100), 100);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=spec", 50, 100), 100);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=spec", 200, 100), 100);
    spec_free(spec);
}

/* The open step is prepared: another worker may yet be told what it is to be decided with. */
TEST(settings_of_the_step_after_a_prepared_one_are_not_mixed_into_it)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    const struct settings_when next = { 8, 9, 0 }, later = { 8, 9, 13 }, then = { 9, 9, 13 };
    const struct settings first = change_of(spec, "lr_scale.decay=0.5"),
                          second = change_of(spec, "clip_norm=1");
    struct settings_kept kept = { 0 };
    uint64_t from;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_give(&kept, &first, &next, &kept, &from, &e), &e);
    EXPECT(from == 9 && isnan(scale_at(&kept, 8)));
    EXPECT_STATUS(settings_give(&kept, &second, &later, &kept, &from, &e), SHD_EBUSY);
    EXPECT(isnan(scale_at(&kept, 8)) && scale_at(&kept, 9) == 0.5);
    EXPECT_OK(settings_give(&kept, &second, &then, &kept, &from, &e), &e);
    EXPECT(scale_at(&kept, 9) == 0.5);
    spec_free(spec);
}

/* -- JSON -------------------------------------------------------------------------------------- */

TEST(json_says_what_holds_and_what_waits_and_is_read_back)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 }, back;
    struct shd_err e = { 0 };
    char *json;
    give(spec, &kept, "lr_scale.decay=0.5", 7, 0);
    give(spec, &kept, "lr_scale.decay=spec betas.no.de=cay=0.75,0.5", 9, 20);
    EXPECT_OK(settings_json(spec, &kept, 9, &json, &e), &e);
    EXPECT_STR(json,
               "{\"now\":{\"lr_scale.decay\":{\"value\":0.5,\"from\":7}},\"next\":{\"from\":20,"
               "\"settings\":{\"lr_scale.decay\":null,\"beta1.no.de=cay\":0.75,"
               "\"beta2.no.de=cay\":0.5}}}");
    EXPECT_OK(settings_read(spec, json, strlen(json), &back, &e), &e);
    free(json);
    for (uint64_t step = 0; step < 40; step++) {
        struct settings a, b;
        settings_at(&kept, 9 + step, &a, NULL);
        settings_at(&back, 9 + step, &b, NULL);
        for (uint32_t i = 0; i < 9; i++)
            EXPECT((isnan(setting_get(&a, i)) && isnan(setting_get(&b, i))) ||
                   setting_get(&a, i) == setting_get(&b, i));
    }
    EXPECT_OK(settings_json(spec, &back, 25, &json, &e), &e);
    EXPECT_STR(json, "{\"now\":{\"beta1.no.de=cay\":{\"value\":0.75,\"from\":20},"
                     "\"beta2.no.de=cay\":{\"value\":0.5,\"from\":20}},\"next\":null}");
    free(json);
    spec_free(spec);
}

TEST(json_of_a_file_is_not_trusted)
{
    static const char *const texts[] = {
        "",
        "[]",
        "{}",
        "{\"now\": [], \"next\": null}",
        "{\"now\": {\"lr_scale.other\": {\"value\": 1, \"from\": 1}}, \"next\": null}",
        "{\"now\": {\"lr_scale.decay\": {\"value\": 1, \"from\": -1}}, \"next\": null}",
        "{\"now\": {\"lr_scale.decay\": {\"value\": \"1\", \"from\": 1}}, \"next\": null}",
        "{\"now\": {\"lr_scale.decay\": {\"value\": -1, \"from\": 1}}, \"next\": null}",
        "{\"now\": {\"beta1.decay\": {\"value\": 1, \"from\": 1}}, \"next\": null}",
        "{\"now\": {}, \"next\": {\"settings\": {}}}",
        "{\"now\": {}, \"next\": {\"from\": 1, \"settings\": {\"clip_norm\": -2}}}",
        "{\"now\": {}, \"next\": {\"from\": 1, \"settings\": {\"clip\": 2}}}",
    };
    struct spec *spec = spec_of(ADAMW, GROUPS);
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        struct settings_kept kept;
        struct shd_err e = { 0 };
        if (settings_read(spec, texts[i], strlen(texts[i]), &kept, &e) == SHD_OK)
            FAIL("read: %s", texts[i]);
        EXPECT(e.text[0] != '\0');
    }
    spec_free(spec);
}

TEST(numbers_of_a_message_are_not_trusted)
{
    struct spec *spec = spec_of(ADAMW, GROUPS MEAN);
    struct settings s, got;
    struct shd_err e = { 0 };
    static const double bad[] = { -1, -2, INFINITY, -INFINITY, 1e39, -0x1p-1074 };
    settings_init(&s, spec);
    const size_t bytes = s.count * sizeof *s.numbers;
    EXPECT_OK(settings_unpack((const uint8_t *)s.numbers, bytes, false, &got, &e), &e);
    EXPECT_OK(settings_unpack(NULL, 0, false, &got, &e), &e);
    EXPECT_EQ(got.count, 0);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        s.numbers[2] = bad[i];
        EXPECT_STATUS(settings_unpack((const uint8_t *)s.numbers, bytes, false, &got, &e),
                      SHD_EPROTO);
    }
    s.numbers[2] = (double)NAN;
    s.numbers[setting_of(1, SETTING_BETA2)] = 1;
    EXPECT_STATUS(settings_unpack((const uint8_t *)s.numbers, bytes, true, &got, &e), SHD_EPROTO);
    for (size_t less = 1; less < SETTINGS_RATES; less++)
        EXPECT_STATUS(settings_unpack((const uint8_t *)s.numbers, bytes - less * sizeof(double),
                                      true, &got, &e),
                      SHD_EPROTO);
    settings_init(&s, spec);
    EXPECT_OK(settings_check(spec, &s, true, &e), &e);
    s.numbers[setting_of(2, SETTING_LR_SCALE)] = 1;
    EXPECT_STATUS(settings_check(spec, &s, true, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "its optimizer is mean");
    s.count -= SETTINGS_RATES;
    EXPECT_STATUS(settings_check(spec, &s, true, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "has 13");
    spec_free(spec);
}

TEST_MAIN()
