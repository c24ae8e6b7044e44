/* A model of as many units as there may be, each of one tensor: opened, trained, saved, its daemons
 * killed and succeeded, restored onto another number of them, shown. Most units are frozen, for a
 * unit has 2,048 elements at least: it is some 800 MB as it is. */
#include <unistd.h>

#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "tests/lib/ctl_run.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

#ifdef __SANITIZE_ADDRESS__
#define UNITS 16384u
#else
#define UNITS SHD_UNITS_MAX
#endif
#define TRAINED_EACH 256u  /* one unit of so many */
#define ELEMS        4u    /* of most tensors */
#define WIDE_ELEMS   6000u /* of every 1,024th: three blocks, a part at every owner */

static struct fixture daemons;
static char folder[300]; /* of the checkpoint; the test's own: the builds' tests run side by side */
static float values[UNITS][ELEMS]; /* the first of each unit */

static bool is_trained(uint32_t unit)
{
    return unit % TRAINED_EACH == 0;
}

static uint32_t elems_of(uint32_t unit)
{
    return unit % 1024 == 0 ? WIDE_ELEMS : ELEMS;
}

static char *make_spec(void)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    CHECK(f != NULL);
    fprintf(f, "{\"name\":\"large\",\"micro_batches\":2,\"optimizer\":{\"kind\":\"sgd\","
               "\"momentum\":0.9},\"units\":[");
    for (uint32_t u = 0; u < UNITS; u++)
        fprintf(f,
                "%s{\"name\":\"layers.%u.experts.%u\",\"tensors\":[{\"name\":\"layers.%u.experts.%u"
                ".weight\",\"shape\":[%u],\"init\":[\"normal\",0,1],\"trainable\":%s}]}",
                u > 0 ? "," : "", u / 256, u % 256, u / 256, u % 256, elems_of(u),
                is_trained(u) ? "true" : "false");
    fprintf(f, "]}");
    CHECK(fclose(f) == 0);
    return text;
}

static shd_session *connect_to(void)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .timeout_ms = TEST_HANG_MS };
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx, (void)micro, (void)unit, (void)params;
    return 0;
}

/* The gradient is the parameter, halved. */
static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const float *p = params;
    (void)ctx, (void)micro;
    for (uint32_t i = 0; i < elems_of(unit) && grad != NULL; i++)
        grad[i] = p[i] / 2;
    return 0;
}

static void step(shd_model *m)
{
    static const uint32_t micros[] = { 0, 1 };
    const struct shd_compute compute = { .size = sizeof compute,
                                         .forward = forward,
                                         .backward = backward };
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_err e = { 0 };
    EXPECT_OK(shd_run_step(m, micros, 2, &compute, &update, NULL, &e), &e);
}

/* What a worker reads of each unit; kept, or compared with what was kept. */
static void look(shd_model *m, bool keep)
{
    struct shd_err e = { 0 };
    uint32_t others = 0;
    for (uint32_t u = 0; u < UNITS; u++) {
        const void *params;
        EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
        if (keep)
            memcpy(values[u], params, sizeof values[u]);
        others += memcmp(values[u], params, sizeof values[u]) != 0;
        shd_release(m, u);
    }
    EXPECT_EQ(others, 0);
}

static void expect_shown(shd_session *s)
{
    struct shd_err e = { 0 };
    char *json, text[64];
    struct http_reply r = http_ask(&daemons, 0, "GET", "/status");
    EXPECT_EQ(r.code, 200);
    snprintf(text, sizeof text, "\"units\":%u", UNITS);
    EXPECT_HAS(r.body, text);
    EXPECT(r.body_bytes < 65536); /* it is asked for often */
    free(r.text);
    EXPECT_OK(shd_status(s, 0, &json, &e), &e);
    EXPECT_HAS(json, text);
    free(json);
    ctl(ARGS("status", "--runtime-dir", daemons.dir));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "large");
    ctl(ARGS("plan", "--runtime-dir", daemons.dir));
    EXPECT_EQ(run.code, 0);
    EXPECT_HAS(run.out, "large");
}

static void restore(const char *path, const struct shd_checkpointed *saved)
{
    struct shd_restored restored = { .size = sizeof restored };
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start(&daemons, 3, NULL);
    shd_session *s = connect_to();
    EXPECT_OK(shd_restore(s, path, NULL, &restored, &e), &e);
    EXPECT_EQ(restored.step, saved->step);
    EXPECT_OK(shd_model_attach(s, NULL, &m, &e), &e);
    step(m);
    look(m, /* keep= */ false);
    shd_close(s);
    fixture_stop(&daemons);
}

static void remove_folder(void)
{
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (getpid() == fixture_owner && system(command) != 0)
        fprintf(stderr, "cannot remove '%s'\n", folder);
}

static void make_folder(void)
{
    snprintf(folder, sizeof folder, "%.200s/shd-large-XXXXXX", fixture_base());
    CHECK(mkdtemp(folder) != NULL);
    atexit(remove_folder);
}

TEST(model_of_all_units_is_trained_saved_adopted_and_restored)
{
    char *spec = make_spec();
    struct shd_checkpointed saved = { .size = sizeof saved };
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start_kept(&daemons, 2, "");
    make_folder();
    shd_session *s = connect_to();
    const int opened = shd_model_open(s, spec, &m, &e);
    free(spec);
    if (opened == SHD_ENOMEM) {
        shd_close(s);
        fixture_stop(&daemons);
        SKIP("%s", e.text);
    }
    EXPECT_OK(opened, &e);
    EXPECT_EQ(shd_units(m), UNITS);
    EXPECT_EQ(shd_tensors(m), UNITS);
    step(m);
    expect_shown(s);
    EXPECT_OK(shd_checkpoint(m, folder, NULL, &saved, &e), &e);
    EXPECT_EQ(saved.step, 1);
    look(m, /* keep= */ true);
    fixture_restart(&daemons, 0);
    fixture_restart(&daemons, 1);
    look(m, /* keep= */ false);
    step(m);
    EXPECT(memcmp(values[0], values[TRAINED_EACH], sizeof values[0]) != 0);
    look(m, /* keep= */ true);
    shd_close(s);
    fixture_stop(&daemons);
    restore(folder, &saved);
}

TEST_MAIN()
