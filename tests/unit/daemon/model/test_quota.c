/* Quotas: words of the command line, whose limit a model is under, and counting from many threads
 * at once. */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "daemon/model/quota.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

static struct quota_config config_of(const char *const *texts, size_t count)
{
    struct quota_config config = { .count = 0 };
    struct shd_err e = { 0 };
    for (size_t i = 0; i < count; i++)
        EXPECT_OK(quota_parse(texts[i], &config, &e), &e);
    return config;
}

static struct quota *quota_of(const struct quota_config *config)
{
    struct quota *q = NULL;
    struct shd_err e = { 0 };
    EXPECT_OK(quota_new(config, &q, &e), &e);
    return q;
}

static struct quota_use *begin(struct quota *q, uint32_t uid, uint32_t gid, const char *name)
{
    const struct quota_maker maker = { true, uid, gid };
    struct quota_use *use = NULL;
    struct shd_err e = { 0 };
    EXPECT_OK(quota_begin(q, &maker, name, &use, &e), &e);
    return use;
}

TEST(rules_are_read_from_words)
{
    static const char *const texts[] = { "uid:1000=1.5KiB", "uid:root=2MB", "gid:root=3",
                                         "gid:7=4 TiB",     "uid:*=5",      "gid:*=6" };
    const struct quota_config config = config_of(texts, ARRAY_SIZE(texts));
    EXPECT_EQ(config.count, 6);
    EXPECT_EQ(config.rules[0].bytes, 1536);
    EXPECT_EQ(config.rules[0].id, 1000);
    EXPECT_EQ(config.rules[1].of, QUOTA_UID);
    EXPECT_EQ(config.rules[1].id, 0);
    EXPECT_EQ(config.rules[1].bytes, 2000000);
    EXPECT_STR(config.rules[1].who, "uid:root");
    EXPECT_EQ(config.rules[2].of, QUOTA_GID);
    EXPECT_EQ(config.rules[3].bytes, UINT64_C(4) << 40);
    EXPECT(!config.rules[3].each && config.rules[4].each && config.rules[5].each);
}

TEST(words_that_are_no_rule_are_refused_with_what_would_be_right)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        { "", "is no rule" },
        { "1000=8GiB", "is no rule" },
        { "alice=8GiB", "is neither of a uid: nor of a gid:" },
        { "uid:1000", "is no rule" },
        { "uid:=8GiB", "is no rule" },
        { "uid:1000=", "takes bytes" },
        { "uid:1000=8G", "takes bytes" },
        { "uid:1000=-1", "takes bytes" },
        { "uid:1000=0", "limits are 1 and 2^60" },
        { "uid:4294967295=1", "has no such number" },
        { "uid:99999999999999999999=1", "has no such number" },
        { "uid:no-such-user-here=1", "names no user here" },
        { "gid:no-such-group-here=1", "names no group here" },
        { "user:root=1", "is neither of a uid: nor of a gid:" },
        { "uid:5=2", "is given twice" },
        { "uid:*=2", "is given twice" },
    };
    static const char *const texts[] = { "uid:5=1", "gid:5=1", "uid:*=1" };
    struct quota_config config = config_of(texts, ARRAY_SIZE(texts));
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct shd_err e = { 0 };
        EXPECT_STATUS(quota_parse(cases[i].text, &config, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, cases[i].says);
        EXPECT_HAS(e.text, "WHO=BYTES, as uid:1000=8GiB");
        EXPECT_EQ(config.count, 3);
    }
}

TEST(a_model_a_user_and_a_group_have_limits_of_their_own)
{
    static const char *const texts[] = { "uid:1=100", "uid:*=60", "gid:9=150" };
    struct quota_config config = config_of(texts, ARRAY_SIZE(texts));
    struct shd_err e = { 0 };
    quota_models(80, &config);
    struct quota *q = quota_of(&config);
    struct quota_use *a = begin(q, 1, 9, "a"), *b = begin(q, 1, 9, "b"), *c = begin(q, 2, 9, "c"),
                     *d = begin(q, 3, 8, "d");
    EXPECT_STATUS(quota_take(a, 81, "a pin", &e), SHD_ENOMEM);
    EXPECT_STR(e.text, "quota: 81 bytes for a pin of model 'a' are asked for, 0 are used, 80 is "
                       "the limit of each model");
    EXPECT_OK(quota_take(a, 80, "the state", &e), &e);
    EXPECT_STATUS(quota_take(b, 21, "the state", &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "80 are used, 100 is the limit of uid:1");
    EXPECT_OK(quota_take(b, 20, "the state", &e), &e);
    EXPECT_STATUS(quota_take(c, 51, "the state", &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "100 are used, 150 is the limit of gid:9");
    EXPECT_OK(quota_take(c, 50, "the state", &e), &e);
    EXPECT_STATUS(quota_take(d, 61, "the state", &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "0 are used, 60 is the limit of uid:*, here 3");
    EXPECT_STATUS(quota_take(d, UINT64_MAX, "the state", &e), SHD_ENOMEM);
    EXPECT_OK(quota_take(d, 60, "the state", &e), &e);
    quota_give(a, 30);
    EXPECT_OK(quota_take(b, 0, "nothing", &e), &e);
    EXPECT_STATUS(quota_take(b, 31, "a snapshot", &e), SHD_ENOMEM);
    EXPECT_OK(quota_take(b, 30, "a snapshot", &e), &e);
    quota_end(c); /* all it took is back */
    EXPECT_EQ(quota_used(b), 50);
    quota_have(b, 1000); /* what is there is there; then nothing more */
    EXPECT_STATUS(quota_take(a, 1, "a pin", &e), SHD_ENOMEM);
    quota_end(a);
    quota_end(b);
    quota_end(d);
    quota_end(NULL);
    quota_free(q);
}

TEST(who_is_not_known_is_under_the_limit_of_models_alone)
{
    static const char *const texts[] = { "uid:0=1", "uid:*=1", "gid:*=1" };
    const struct quota_maker nobody = { .known = false };
    struct quota_config config = config_of(texts, ARRAY_SIZE(texts));
    struct quota_use *use = NULL;
    struct shd_err e = { 0 };
    quota_models(10, &config);
    struct quota *q = quota_of(&config);
    EXPECT_OK(quota_begin(q, &nobody, "old", &use, &e), &e);
    EXPECT_OK(quota_take(use, 10, "the state", &e), &e);
    EXPECT_STATUS(quota_take(use, 1, "a pin", &e), SHD_ENOMEM);
    quota_end(use);
    quota_free(q);
}

TEST(limits_are_shown_with_who_is_under_them)
{
    static const char *const texts[] = { "uid:1=100", "uid:*=60", "gid:9=150" };
    struct quota_config config = config_of(texts, ARRAY_SIZE(texts));
    struct quota_shown shown[QUOTA_SHOWN_MAX];
    struct shd_err e = { 0 };
    quota_models(80, &config);
    struct quota *q = quota_of(&config);
    struct quota_use *a = begin(q, 2, 9, "a"), *b = begin(q, 2, 9, "b"), *c = begin(q, 3, 9, "c");
    EXPECT_OK(quota_take(a, 10, "the state", &e), &e);
    EXPECT_OK(quota_take(b, 20, "the state", &e), &e);
    EXPECT_EQ(quota_show(q, shown), 5);
    EXPECT_STR(shown[0].who, "uid:1");
    EXPECT(shown[0].used == 0 && shown[0].limit == 100);
    for (int i = 1; i < 3; i++) {
        const bool two = strcmp(shown[i].who, "uid:2") == 0;
        EXPECT(two || strcmp(shown[i].who, "uid:3") == 0);
        EXPECT(shown[i].used == (two ? 30 : 0) && shown[i].limit == 60);
    }
    EXPECT_STR(shown[3].who, "gid:9");
    EXPECT_EQ(shown[3].used, 30);
    EXPECT_STR(shown[4].who, "model");
    EXPECT(shown[4].used == 20 && shown[4].limit == 80);
    quota_end(a);
    quota_end(b);
    quota_end(c);
    quota_free(q);
}

#define THREADS 8
#define TRIES   20000

static struct quota_use *uses[THREADS];
static _Atomic uint64_t taken, most;

static void *take_and_give(void *ctx)
{
    struct quota_use *use = uses[*(int *)ctx];
    struct shd_err e;
    for (int i = 0; i < TRIES; i++) {
        if (quota_take(use, 3, "a pin", &e) != SHD_OK)
            continue;
        const uint64_t now = atomic_fetch_add(&taken, 3) + 3;
        uint64_t before = atomic_load(&most);
        while (now > before && !atomic_compare_exchange_weak(&most, &before, now))
            continue;
        atomic_fetch_sub(&taken, 3);
        quota_give(use, 3);
    }
    return NULL;
}

/* However many ask at the same time. */
TEST(nobody_gets_beyond_a_limit_by_racing)
{
    static const char *const texts[] = { "uid:*=10" };
    const struct quota_config config = config_of(texts, 1);
    struct quota *q = quota_of(&config);
    pthread_t threads[THREADS];
    int index[THREADS];
    for (int i = 0; i < THREADS; i++) {
        uses[i] = begin(q, 1, (uint32_t)i, "m");
        index[i] = i;
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, take_and_give, &index[i]) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    EXPECT(most > 0 && most <= 9);
    for (int i = 0; i < THREADS; i++) {
        EXPECT_EQ(quota_used(uses[i]), 0);
        quota_end(uses[i]);
    }
    quota_free(q);
}

TEST_MAIN()
