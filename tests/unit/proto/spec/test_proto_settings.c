/* Settings: what can be said and what is refused, from which step on what holds, and JSON. */
#include <math.h>

#include "proto/base/check.h"
#include "proto/spec/settings_text.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

static struct spec *spec_with(const char *micro_batches, const char *optimizer, const char *groups)
{
    char json[1000];
    struct spec *spec = NULL;
    struct shd_err e = { 0 };
    snprintf(json, sizeof json,
             "{\"name\": \"m\", \"micro_batches\": %s, \"optimizer\": {%s}, \"groups\": [%s], "
             "\"units\": [{\"name\": \"u\", \"tensors\": [{\"name\": \"t\", \"shape\": [8], "
             "\"group\": \"decay\"}]}]}",
             micro_batches, optimizer, groups);
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

static struct spec *spec_of(const char *optimizer, const char *groups)
{
    return spec_with("2", optimizer, groups);
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
        "lr_scale.decay=0.5 betas.no.de=cay=0.8,0.95\n clip_norm=1 weight_decay.decay=spec "
        "micro_batches=1 eps.no.de=cay=1e-6 lr_scale.no.de=cay=now",
        "{\"lr_scale.decay\": 0.5, \"betas.no.de=cay\": [0.8, 0.95], \"clip_norm\": 1, "
        "\"weight_decay.decay\": null, \"micro_batches\": 1, \"eps.no.de=cay\": 1e-6, "
        "\"lr_scale.no.de=cay\": \"now\"}",
    };
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct shd_err e = { 0 };
    for (size_t i = 0; i < 2; i++) {
        struct settings s;
        EXPECT_OK(settings_parse(spec, texts[i], &s, &e), &e);
        EXPECT_EQ(s.count, 12);
        EXPECT(number(&s, 0, SETTING_LR_SCALE) == 0.5 && number(&s, 1, SETTING_BETA1) == 0.8);
        EXPECT(number(&s, 1, SETTING_BETA2) == 0.95 && setting_get(&s, SETTINGS_CLIP_NORM) == 1);
        EXPECT(number(&s, 0, SETTING_WEIGHT_DECAY) == SETTINGS_BACK);
        EXPECT(isnan(number(&s, 0, SETTING_BETA2)) && isnan(number(&s, 0, SETTING_BETA1)));
        EXPECT(setting_get(&s, setting_micros(2)) == 1);
        EXPECT(isnan(setting_get(&s, setting_eps(2, 0))) &&
               setting_get(&s, setting_eps(2, 1)) == 1e-6);
        EXPECT(number(&s, 1, SETTING_LR_SCALE) == SETTINGS_STAY);
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
        { "eps.decay=0", SHD_ERANGE, "eps.decay is 0, must be 1.1754944e-38" },
        { "eps.stats=1e-6", SHD_EINVAL, "its optimizer is mean" },
        { "micro_batches=8", SHD_ERANGE, "laid out for 2: a spec with \"micro_batches_max\"" },
        { "micro_batches=0", SHD_ERANGE, "must be a whole number, 1 to 2" },
        { "micro_batches=1.5", SHD_ERANGE, "must be a whole number, 1 to 2" },
        { "micro_batches=-1", SHD_EINVAL, "takes a number, as 8" },
        { "micro_batches=two", SHD_EINVAL, "takes a number, as 8" },
        { "micro_batches=[[0,1]]", SHD_EINVAL, "takes a number, as 8" },
        { "micro_batches=1,2", SHD_EINVAL, "takes a number, as 8" },
        { "micro_batches.decay=1", SHD_EINVAL, "micro_batches=VALUE" },
        { "micro_batch=1", SHD_EINVAL, "did you mean micro_batches?" },
        { "micro-batches=1", SHD_EINVAL, "did you mean micro_batches?" },
        { "micro_batches_max=4", SHD_EINVAL, "memory is laid out for it" },
        { "accumulate=2", SHD_EINVAL, "micro_batches can be changed, in multiples of it" },
        { "publish=bf16", SHD_EINVAL, "shardctl restore --weights" },
        { "guard=off", SHD_EINVAL, "guard=go-on, alone" },
        { "name=b", SHD_EINVAL, "shardctl fork" },
        { "betas=now,spec", SHD_EINVAL, "two numbers, as 0.9,0.95, or one of the words" },
        { "lr_scale=later", SHD_EINVAL, "takes a number" },
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
    spec = spec_with("6, \"accumulate\": 3, \"micro_batches_max\": 12", ADAMW, GROUPS);
    expect_refused(spec, "micro_batches=8", SHD_EINVAL,
                   "accumulate, 3, must divide it: say 6 or 9");
    expect_refused(spec, "micro_batches=2", SHD_EINVAL, "say 3 or 3");
    expect_refused(spec, "micro_batches=15", SHD_ERANGE, "laid out for 12");
    spec_free(spec);
    spec = spec_of("\"kind\": \"sgd\", \"momentum\": 0.9", GROUPS);
    expect_refused(spec, "eps=1e-6", SHD_EINVAL, "its optimizer is sgd");
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
    const struct settings_when when = { earliest, earliest, at, 0 };
    uint64_t from = UINT64_MAX;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_give(kept, &change, &when, kept, &from, &e), &e);
    return from;
}

static void expect_not_given(const struct spec *spec, const struct settings_kept *kept,
                             const char *text, uint64_t earliest, uint64_t at, int status)
{
    const struct settings change = change_of(spec, text);
    const struct settings_when when = { earliest, earliest, at, 0 };
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
    const struct settings_when next = { 8, 9, 0, 0 }, later = { 8, 9, 13, 0 },
                               then = { 9, 9, 13, 0 };
    const struct settings first = change_of(spec, "lr_scale.decay=0.5"),
                          second = change_of(spec, "clip_norm=1");
    struct settings_kept kept = { 0 };
    uint64_t from;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_give(&kept, &first, &next, &kept, &from, &e), &e);
    EXPECT(from == 9 && isnan(scale_at(&kept, 8)));
    EXPECT_OK(settings_give(&kept, &second, &later, &kept, &from, &e), &e);
    EXPECT_EQ(from, 13);
    EXPECT(isnan(scale_at(&kept, 8)) && scale_at(&kept, 9) == 0.5);
    EXPECT_OK(settings_give(&kept, &second, &then, &kept, &from, &e), &e);
    EXPECT(scale_at(&kept, 9) == 0.5);
    spec_free(spec);
}

/* Changes that do not hold yet. */
static uint64_t waits_at(const struct settings_kept *kept, uint64_t step)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < kept->waiting; i++)
        count += kept->waits[i].from > step;
    return count;
}

TEST(changes_for_several_steps_wait_and_are_given_up_by_name)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    struct settings s;
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=4", 5, 40), 40);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=2", 5, 20), 20);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=3 clip_norm=1", 5, 30), 30);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=1", 6, 0), 6);
    EXPECT(isnan(scale_at(&kept, 5)) && scale_at(&kept, 6) == 1 && scale_at(&kept, 19) == 1);
    EXPECT(scale_at(&kept, 20) == 2 && scale_at(&kept, 30) == 3 && scale_at(&kept, 40) == 4);
    EXPECT_EQ(waits_at(&kept, 5), 5);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=5", 7, 20), 20); /* in the place of the one there */
    EXPECT_EQ(waits_at(&kept, 7), 4);                            /* that of step 6 holds */
    EXPECT(scale_at(&kept, 20) == 5 && scale_at(&kept, 30) == 3);
    EXPECT_EQ(give(spec, &kept, "lr_scale.decay=now", 7, 30), 30); /* that of step 30 */
    EXPECT(scale_at(&kept, 20) == 5 && scale_at(&kept, 30) == 5 && scale_at(&kept, 40) == 4);
    settings_at(&kept, 30, &s, NULL);
    EXPECT(setting_get(&s, SETTINGS_CLIP_NORM) == 1); /* another setting's stays */
    give(spec, &kept, "lr_scale.decay=now", 7, 0);    /* all of it */
    EXPECT(scale_at(&kept, 7) == 1 && scale_at(&kept, 99) == 1);
    EXPECT_EQ(waits_at(&kept, 7), 1);
    give(spec, &kept, "lr_scale=now betas=now clip_norm=now", 7,
         0); /* also what nothing waits of */
    EXPECT_EQ(waits_at(&kept, 7), 0);
    spec_free(spec);
}

/* -- Behind a rewind --------------------------------------------------------------------------- */

/* All that it lacks, while the open step is `open`. Returns how many changes. */
static int give_lacking(const struct settings_kept *was, struct settings_kept *kept, uint64_t from,
                        uint64_t open)
{
    struct settings change;
    uint64_t step;
    int n = 0;
    while (settings_lacks(was, kept, from, &change, &step)) {
        const struct settings_when at = { open, open, step, 0 }, soon = { open, open, 0, 0 };
        struct shd_err e = { 0 };
        EXPECT(++n <= 1000);
        if (settings_give(kept, &change, &at, kept, &step, &e) == SHD_OK)
            continue;
        EXPECT_OK(settings_give(kept, &change, &soon, kept, &from, &e), &e);
    }
    return n;
}

static void expect_same_at(const struct settings_kept *a, const struct settings_kept *b,
                           uint64_t step)
{
    struct settings x, y;
    settings_at(a, step, &x, NULL);
    settings_at(b, step, &y, NULL);
    for (uint32_t i = 0; i < SETTINGS_MAX; i++) {
        const double u = setting_get(&x, i), v = setting_get(&y, i);
        EXPECT(isnan(u) ? isnan(v) : u == v);
    }
}

TEST(what_was_set_before_a_rewind_is_set_again_from_its_steps_on)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    struct settings s;
    give(spec, &kept, "lr_scale.decay=1 weight_decay.decay=0.5", 5, 0);
    give(spec, &kept, "clip_norm=1", 5, 20);
    struct settings_kept was = kept; /* back to step 10 */
    give(spec, &was, "lr_scale.decay=0.5", 12, 0);
    give(spec, &was, "lr_scale.decay=2 clip_norm=now", 15, 0);
    give(spec, &was, "weight_decay.decay=spec", 16, 0);
    give(spec, &was, "beta1.decay=0.8", 17, 40);
    struct settings_kept late = kept, at_once = kept, each = kept;
    EXPECT(settings_keep(&was, 10, &each));
    for (uint64_t step = 10; step < 50; step++)
        expect_same_at(&was, &each, step);
    EXPECT(scale_at(&each, 11) == 1 && scale_at(&each, 12) == 0.5 && scale_at(&each, 15) == 2);
    settings_settle(&was, 17); /* of lr_scale the last change is known */
    EXPECT_EQ(give_lacking(&was, &kept, 10, 10), 4);
    EXPECT(settings_keep(&was, 10, &at_once));
    for (uint64_t step = 10; step < 50; step++)
        expect_same_at(&kept, &at_once, step);
    EXPECT(scale_at(&kept, 14) == 1 && scale_at(&kept, 15) == 2 && scale_at(&kept, 99) == 2);
    settings_at(&kept, 10, &s, NULL); /* since when is not known */
    EXPECT(isnan(number(&s, 0, SETTING_WEIGHT_DECAY)));
    settings_at(&kept, 39, &s, NULL);
    EXPECT(isnan(setting_get(&s, SETTINGS_CLIP_NORM)) && isnan(number(&s, 0, SETTING_BETA1)));
    settings_at(&kept, 40, &s, NULL);
    EXPECT(number(&s, 0, SETTING_BETA1) == 0.8);
    EXPECT_EQ(give_lacking(&was, &late, 10, 18), 4); /* workers are past most of it again */
    EXPECT(scale_at(&late, 18) == 2);
    EXPECT_EQ(give_lacking(&was, &was, 10, 18), 0);
    spec_free(spec);
}

/* Whatever was set: from where it was on all is as it would have been. */
TEST(nothing_that_was_set_before_a_rewind_is_lost)
{
    static const char *const changes[] = { "lr_scale=1",      "lr_scale=2",       "lr_scale=spec",
                                           "lr_scale=now",    "clip_norm=1",      "clip_norm=spec",
                                           "clip_norm=now",   "beta1=0.5",        "micro_batches=1",
                                           "micro_batches=2", "lr_scale.decay=4", "beta1=now" };
    struct spec *spec = spec_of(ADAMW, GROUPS);
    uint64_t x = 20261130;
    printf("seed %" PRIu64 "\n", x);
    for (int run = 0; run < 2000; run++) {
        struct settings_kept kept[2] = { 0 }; /* where it went back to, and from */
        uint64_t open = 2, back = 2;
        for (uint32_t i = 0; i < 12; i++) {
            x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            const uint64_t later = (x >> 58) % 4;
            const bool behind = i >= 6;
            if (i == 6)
                kept[1] = kept[0], back = open;
            open += (x >> 50) % 3;
            give(spec, &kept[behind], changes[(x >> 33) % ARRAY_SIZE(changes)], open,
                 later > 0 ? open + 1 + 3 * later : 0);
        }
        struct settings_kept at_once = kept[0], each = kept[0];
        EXPECT(settings_keep(&kept[1], back, &each) && settings_kept_plausible(&each));
        for (uint64_t step = back + 1; step < open + 20; step++)
            expect_same_at(&kept[1], &each, step);
        settings_settle(&kept[1], open); /* as where room was short */
        give_lacking(&kept[1], &kept[0], back, back);
        EXPECT(settings_keep(&kept[1], back, &at_once) && settings_kept_plausible(&at_once));
        for (uint64_t step = back; step <= open; step++)
            expect_same_at(&kept[0], &at_once, step);
        for (uint64_t step = open + 1; step < open + 20; step++) {
            expect_same_at(&kept[1], &kept[0], step);
            expect_same_at(&kept[1], &at_once, step);
        }
    }
    spec_free(spec);
}

/* The open step has its micro-batches; since when they are the spec's again is not known. */
TEST(micro_batches_are_set_again_behind_the_step_that_a_rewind_opens)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    give(spec, &kept, "micro_batches=1 lr_scale.decay=2", 5, 0);
    struct settings_kept was = kept;
    give(spec, &was, "micro_batches=spec lr_scale.decay=spec", 12, 0);
    settings_settle(&was, 14);
    EXPECT(settings_keep(&was, 10, &kept));
    EXPECT(settings_micro_batches(&kept, 10) == 1 && settings_micro_batches(&kept, 11) == 0);
    EXPECT(isnan(scale_at(&kept, 10)));
    spec_free(spec);
}

/* Asked again behind another one that had waited for its step, it is not given once more. */
TEST(change_asked_again_by_its_id_is_the_same_one)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    const struct settings change = change_of(spec, "lr_scale.decay=2");
    const struct settings_when first = { 6, 6, 0, 77 }, again = { 12, 13, 0, 77 },
                               another = { 12, 13, 0, 78 };
    uint64_t from;
    struct shd_err e = { 0 };
    give(spec, &kept, "lr_scale.decay=3", 5, 10);
    EXPECT_OK(settings_give(&kept, &change, &first, &kept, &from, &e), &e);
    EXPECT_EQ(from, 6);
    EXPECT_OK(settings_give(&kept, &change, &again, &kept, &from, &e), &e);
    EXPECT(from == 6 && scale_at(&kept, 9) == 2 && scale_at(&kept, 13) == 3);
    EXPECT_OK(settings_give(&kept, &change, &another, &kept, &from, &e), &e);
    EXPECT(from == 13 && scale_at(&kept, 13) == 2);
    spec_free(spec);
}

/* The same change, by its id, is there behind a rewind that keeps it. */
TEST(change_that_is_kept_through_a_rewind_is_the_same_one)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept was = { 0 }, kept = { 0 };
    const struct settings change = change_of(spec, "lr_scale.decay=2");
    const struct settings_when first = { 6, 6, 0, 77 }, again = { 4, 4, 0, 77 };
    uint64_t from;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_give(&was, &change, &first, &was, &from, &e), &e);
    EXPECT(settings_keep(&was, 4, &kept));
    EXPECT_OK(settings_give(&kept, &change, &again, &kept, &from, &e), &e);
    EXPECT(from == 6 && kept.waiting == 1);
    spec_free(spec);
}

TEST(no_more_changes_wait_than_there_is_room_for)
{
    struct spec *spec = spec_of(ADAMW, GROUPS);
    struct settings_kept kept = { 0 };
    for (uint64_t i = 0; i < SETTINGS_WAITS_MAX; i++)
        EXPECT_EQ(give(spec, &kept, i % 2 == 0 ? "clip_norm=1" : "clip_norm=2", 5, 10 + i), 10 + i);
    expect_not_given(spec, &kept, "clip_norm=1", 5, 2000, SHD_EBUSY);
    struct settings_kept was = kept, back = { 0 }; /* to step 4, from step 5, where one is set */
    EXPECT_EQ(give(spec, &was, "clip_norm=1", 10, 2000), 2000);
    EXPECT_EQ(was.waiting, SETTINGS_WAITS_MAX);
    EXPECT(!settings_keep(&was, 4, &back) && back.waiting == 0 && back.now.count == 0);
    EXPECT_EQ(give(spec, &kept, "clip_norm=3", 5, 10), 10);      /* in one's place */
    EXPECT_EQ(give(spec, &kept, "clip_norm=1", 10, 2000), 2000); /* the first one holds by now */
    give(spec, &kept, "clip_norm=now", 10, 0);
    EXPECT_EQ(kept.waiting, 0);
    spec_free(spec);
}

static uint64_t give_micros(const struct spec *spec, struct settings_kept *kept, const char *text,
                            const struct settings_when *when)
{
    const struct settings change = change_of(spec, text);
    uint64_t from = UINT64_MAX;
    struct shd_err e = { 0 };
    EXPECT_OK(settings_give(kept, &change, when, kept, &from, &e), &e);
    return from;
}

/* The open step has its number, whether it is prepared or not. */
TEST(micro_batches_are_never_those_of_the_open_step)
{
    struct spec *spec = spec_with("2, \"micro_batches_max\": 8", ADAMW, GROUPS);
    const struct settings_when open = { 7, 7, 0, 0 }, prepared = { 7, 8, 0, 0 },
                               at = { 7, 7, 7, 0 };
    struct settings_kept kept = { 0 };
    const struct settings change = change_of(spec, "micro_batches=8");
    uint64_t from;
    struct shd_err e = { 0 };
    EXPECT_EQ(settings_micro_batches(&kept, 7), 0);
    EXPECT_STATUS(settings_give(&kept, &change, &at, &kept, &from, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "step 7 has begun with its micro-batches: from step 8 on");
    EXPECT_EQ(give_micros(spec, &kept, "micro_batches=8 clip_norm=1", &open), 8);
    EXPECT_EQ(give_micros(spec, &kept, "micro_batches=8 clip_norm=1", &open), 8); /* again */
    EXPECT_EQ(give_micros(spec, &kept, "clip_norm=1 micro_batches=8", &prepared), 8);
    EXPECT_EQ(settings_micro_batches(&kept, 7), 0);
    EXPECT_EQ(settings_micro_batches(&kept, 8), 8);
    EXPECT_EQ(give_micros(spec, &kept, "clip_norm=2", &open), 8); /* behind what waits for then */
    EXPECT_EQ(give_micros(spec, &kept, "micro_batches=spec", &(struct settings_when){ 7, 7, 9, 0 }),
              9);
    EXPECT_EQ(settings_micro_batches(&kept, 8), 8);
    EXPECT_EQ(settings_micro_batches(&kept, 9), 0);
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
        for (uint32_t i = 0; i < 12; i++)
            EXPECT((isnan(setting_get(&a, i)) && isnan(setting_get(&b, i))) ||
                   setting_get(&a, i) == setting_get(&b, i));
    }
    EXPECT_OK(settings_json(spec, &back, 25, &json, &e), &e);
    EXPECT_STR(json, "{\"now\":{\"beta1.no.de=cay\":{\"value\":0.75,\"from\":20},"
                     "\"beta2.no.de=cay\":{\"value\":0.5,\"from\":20}},\"next\":null}");
    free(json);
    spec_free(spec);
}

TEST(json_has_all_that_waits)
{
    struct spec *spec = spec_with("2, \"micro_batches_max\": 8", ADAMW, GROUPS);
    struct settings_kept kept = { 0 }, back;
    struct shd_err e = { 0 };
    char *json, *again;
    give(spec, &kept, "eps.decay=0.5", 7, 0);
    give(spec, &kept, "micro_batches=4", 7, 10);
    give(spec, &kept, "micro_batches=8 clip_norm=1", 7, 20);
    give(spec, &kept, "micro_batches=spec", 7, 30);
    EXPECT_OK(settings_json(spec, &kept, 7, &json, &e), &e);
    EXPECT_STR(json,
               "{\"now\":{\"eps.decay\":{\"value\":0.5,\"from\":7}},"
               "\"next\":{\"from\":10,\"settings\":{\"micro_batches\":4.0}},"
               "\"later\":[{\"from\":20,\"settings\":{\"clip_norm\":1.0,\"micro_batches\":8.0}},"
               "{\"from\":30,\"settings\":{\"micro_batches\":null}}]}");
    EXPECT_OK(settings_read(spec, json, strlen(json), &back, &e), &e);
    EXPECT_EQ(back.waiting, 4);
    EXPECT_OK(settings_json(spec, &back, 7, &again, &e), &e);
    EXPECT_STR(again, json);
    free(again);
    free(json);
    EXPECT_OK(settings_json(spec, &back, 20, &json, &e), &e);
    EXPECT_HAS(json, "\"micro_batches\":{\"value\":8.0,\"from\":20},");
    EXPECT_HAS(json, "\"next\":{\"from\":30,");
    EXPECT(strstr(json, "later") == NULL);
    free(json);
    spec_free(spec);
}

static const char later_is_earlier[] =
    "{\"now\": {}, \"next\": {\"from\": 9, \"settings\": {\"clip_norm\": 2}}, "
    "\"later\": [{\"from\": 8, \"settings\": {\"clip_norm\": 1}}]}";

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
        "{\"now\": {\"micro_batches\": {\"value\": 3, \"from\": 1}}, \"next\": null}",
        "{\"now\": {\"micro_batches\": {\"value\": 1.5, \"from\": 1}}, \"next\": null}",
        "{\"now\": {}, \"next\": null, \"later\": 1}",
        "{\"now\": {}, \"next\": null, \"later\": [1]}",
        later_is_earlier,
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
    const struct settings_bytes none = { 0 };
    struct settings_bytes all = settings_pack(&s);
    EXPECT(all.old_bytes == 13 * sizeof(double) && all.more_bytes == 0);
    EXPECT_OK(settings_unpack(&all, false, &got, &e), &e);
    EXPECT_EQ(got.count, 17);
    EXPECT_OK(settings_unpack(&none, false, &got, &e), &e);
    EXPECT_EQ(got.count, 0);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        s.numbers[2] = bad[i];
        EXPECT_STATUS(settings_unpack(&all, false, &got, &e), SHD_EPROTO);
    }
    s.numbers[2] = (double)NAN;
    s.numbers[setting_of(1, SETTING_BETA2)] = 1;
    EXPECT_STATUS(settings_unpack(&all, true, &got, &e), SHD_EPROTO);
    s.numbers[setting_of(1, SETTING_BETA2)] = (double)NAN;
    for (size_t less = 1; less < SETTINGS_RATES; less++) {
        struct settings_bytes fewer = all;
        fewer.old_bytes -= less * sizeof(double);
        EXPECT_STATUS(settings_unpack(&fewer, true, &got, &e), SHD_EPROTO);
    }
    s.numbers[setting_micros(3)] = 2;
    all = settings_pack(&s);
    EXPECT_EQ(all.more_bytes, 4 * sizeof(double));
    EXPECT_OK(settings_unpack(&all, false, &got, &e), &e);
    EXPECT(setting_get(&got, setting_micros(3)) == 2 &&
           isnan(setting_get(&got, setting_eps(3, 2))));
    struct settings_bytes torn = all;
    torn.more_bytes -= sizeof(double);
    EXPECT_STATUS(settings_unpack(&torn, true, &got, &e), SHD_EPROTO);
    torn = all;
    torn.old_bytes = 0; /* those alone say nothing of how many groups there are */
    EXPECT_STATUS(settings_unpack(&torn, true, &got, &e), SHD_EPROTO);
    s.numbers[setting_micros(3)] = 2.5;
    EXPECT_STATUS(settings_unpack(&all, true, &got, &e), SHD_EPROTO);
    s.numbers[setting_micros(3)] = SHD_MICROS_MAX + 1;
    EXPECT_STATUS(settings_unpack(&all, true, &got, &e), SHD_EPROTO);
    settings_init(&s, spec);
    EXPECT_OK(settings_check(spec, &s, true, &e), &e);
    s.numbers[setting_of(2, SETTING_LR_SCALE)] = 1;
    EXPECT_STATUS(settings_check(spec, &s, true, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "its optimizer is mean");
    s.count -= SETTINGS_RATES + 1;
    EXPECT_STATUS(settings_check(spec, &s, true, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "of 2 groups, model 'm' has 3");
    spec_free(spec);
}

TEST_MAIN()
