/* What a fork's spec can have that its model's has not, and what is refused, with the reason. */
#include <math.h>

#include "proto/base/check.h"
#include "proto/spec/guard.h"
#include "proto/spec/ramp.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_change.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

/* more: behind the brace, with a comma at its end. */
static struct spec *spec_of(const char *more)
{
    char json[1000];
    struct spec *spec = NULL;
    struct shd_err e = { 0 };
    snprintf(json, sizeof json,
             "{%s \"name\": \"m\", \"micro_batches\": 2, \"optimizer\": {\"kind\": \"adamw\", "
             "\"beta2\": 0.95}, \"groups\": [{\"name\": \"decay\"}, {\"name\": \"a=[b\"}], "
             "\"units\": [{\"name\": \"u\", \"tensors\": [{\"name\": \"t\", \"shape\": [8], "
             "\"group\": \"decay\"}]}]}",
             more);
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

TEST(nothing_is_other_but_the_name)
{
    struct spec *spec = spec_of("\"ema\": 0.9,");
    struct spec_changed got = { .spec = NULL };
    struct shd_err e = { 0 };
    EXPECT_OK(spec_change(spec, "n", NULL, &got, &e), &e);
    EXPECT_STR(got.spec->name, "n");
    EXPECT_EQ(got.change.count, 0);
    EXPECT_HAS(got.json, "\"name\":\"n\"");
    EXPECT_STATUS(spec_compare(spec, got.spec, &e), SHD_ESPEC); /* the name */
    got.spec->name[0] = 'm';
    EXPECT_OK(spec_compare(spec, got.spec, &e), &e);
    spec_changed_free(&got);
    spec_free(spec);
}

/* Words and JSON say the same; settings are told from fields of the spec. */
TEST(words_and_json_change_the_same)
{
    static const char *const texts[] = {
        "micro_batches=[[0, 2], [5, 4]] lr_scale.decay=0.5\n accumulate=2 publish=bf16 eps=1e-6 "
        "guard=[{\"norm_above\": 100}] betas.a=[b=0.8,0.9 verify_every=7 grad_dtype=\"bf16\" ",
        "{\"micro_batches\": [[0, 2], [5, 4]], \"lr_scale.decay\": 0.5, \"accumulate\": 2, "
        "\"publish\": \"bf16\", \"eps\": 1e-6, \"guard\": [{\"norm_above\": 100}], "
        "\"betas.a=[b\": [0.8, 0.9], \"verify_every\": 7, \"grad_dtype\": \"bf16\"}",
    };
    struct spec *spec = spec_of("");
    for (size_t i = 0; i < ARRAY_SIZE(texts); i++) {
        struct spec_changed got = { .spec = NULL };
        struct shd_err e = { 0 };
        EXPECT_OK(spec_change(spec, "n", texts[i], &got, &e), &e);
        const struct spec *to = got.spec;
        EXPECT_EQ(spec_micro_batches(to, 4), 2);
        EXPECT_EQ(spec_micro_batches(to, 5), 4);
        EXPECT_EQ(to->accumulate, 2);
        EXPECT_EQ(to->publish, SHD_BF16);
        EXPECT_EQ(to->grad_dtype, SHD_BF16);
        EXPECT_EQ(to->verify_every, 7);
        EXPECT(to->eps == 1e-6 && to->beta2 == 0.95);
        EXPECT(to->guard != NULL);
        EXPECT_EQ(got.change.count, 12);
        EXPECT(setting_get(&got.change, setting_of(0, SETTING_LR_SCALE)) == 0.5);
        EXPECT(setting_get(&got.change, setting_of(1, SETTING_BETA2)) == 0.9);
        EXPECT(isnan(setting_get(&got.change, SETTINGS_CLIP_NORM)));
        spec_changed_free(&got);
    }
    spec_free(spec);
}

TEST(null_takes_a_field_away)
{
    struct spec *spec = spec_of("\"guard\": [{\"norm_above\": 1}], \"verify_every\": 5,");
    struct spec_changed got = { .spec = NULL };
    struct shd_err e = { 0 };
    EXPECT_OK(spec_change(spec, "n", "guard=null verify_every=null", &got, &e), &e);
    EXPECT(got.spec->guard == NULL);
    EXPECT_EQ(got.spec->verify_every, 0);
    EXPECT_EQ(got.change.count, 0);
    spec_changed_free(&got);
    spec_free(spec);
}

TEST(what_cannot_be_other_is_refused_with_the_reason)
{
    static const struct {
        const char *more, *text, *says;
    } cases[] = {
        { "", "", "nothing is to be other: KEY=VALUE" },
        { "", "optimizer=sgd", "optimizer cannot be other in a fork: its moments" },
        { "", "units=[]", "units cannot be other in a fork" },
        { "", "seed=4", "seed cannot be other in a fork" },
        { "", "micro_batch=8", "did you mean micro_batches?" },
        { "", "lr_scales=8", "did you mean lr_scale?" },
        { "", "micro_batches", "'micro_batches' changes nothing: KEY=VALUE" },
        { "", "micro_batches=0", "micro_batches" },
        { "", "micro_batches=many", "micro_batches" },
        { "", "micro_batches=4 micro_batches=8", "micro_batches is given twice" },
        { "", "accumulate=3", "accumulate" },
        { "", "publish=f64", "publish" },
        { "", "lr_scale.dekay=1", "did you mean decay?" },
        { "", "lr_scale.decay", "is no setting: KEY=VALUE" },
        { "", "guard=go-on", "guard is a list of rules" },
        { "", "guard=[{\"norm_above\": 1", "guard is a list of rules" },
        { "", "{\"guard\": 1", "no JSON object" },
        { "", "{\"eps\": null, \"eps\": 1}", "no JSON object" },
        { "", "ema=0.9", "has no moving average of its parameters, so its fork has none" },
        { "\"ema\": 0.9,", "ema=null", "has a moving average of its parameters" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct spec *spec = spec_of(cases[i].more);
        struct spec_changed got = { .spec = NULL };
        struct shd_err e = { 0 };
        const int r = spec_change(spec, "n", cases[i].text, &got, &e);
        EXPECT(r == SHD_EINVAL || r == SHD_ERANGE);
        EXPECT_HAS(e.text, cases[i].says);
        EXPECT(got.spec == NULL);
        spec_free(spec);
    }
}

TEST_MAIN()
