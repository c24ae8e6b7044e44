/* Models that are made, trained, kept, pinned, forked and dropped, over and over: daemons and their
 * keeper have no more descriptors, mappings and memory at the end than after the first few, and the
 * host has the memory of each back when the call that drops it returns.
 *
 * SHD_FLAT_ROUNDS: how many times (1,000; 40 under a sanitizer). */
#include <inttypes.h>
#include <malloc.h>

#include "client/session/session.h"
#include "daemon/model/metrics.h"
#include "proto/base/check.h"
#include "tests/lib/client_remote.h"

#define TOY      toy_spec("f32", TOY_ADAMW)
#define OWNERS   2
#define ROUNDS   (TEST_SANITIZED ? 40 : 1000)
#define EARLY    5   /* a part of so many, for what is made once */
#define RSS_MORE 256 /* KiB */

struct sample {
    int fds, maps, keeper_fds;
    long rss, keeper_rss; /* KiB */
    uint64_t memory;      /* of all of them, in segments */
};

static struct sample take(int daemon)
{
    pid_t pids[OWNERS + 1];
    for (int i = 0; i < OWNERS; i++)
        pids[i] = daemons.pids[i];
    pids[OWNERS] = daemons.keeper;
    return (struct sample){ .fds = count_fds(daemons.pids[daemon]),
                            .maps = count_segment_maps(daemons.pids[daemon]),
                            .keeper_fds = count_fds(daemons.keeper),
                            .rss = rss_kib(daemons.pids[daemon]),
                            .keeper_rss = rss_kib(daemons.keeper),
                            .memory = memfd_bytes(pids, OWNERS + 1) };
}

/* Now, with no time to give anything back in. */
static uint64_t memory_now(void)
{
    return take(0).memory;
}

static int rounds(void)
{
    const char *text = getenv("SHD_FLAT_ROUNDS");
    return text != NULL ? atoi(text) : ROUNDS;
}

static bool is_flat(const struct sample *early, int daemon)
{
    const struct sample now = take(daemon);
    return now.fds <= early->fds && now.maps <= early->maps &&
           now.keeper_fds <= early->keeper_fds && now.memory <= early->memory;
}

static void expect_flat(const struct sample *early, int daemon, int count)
{
    EXPECT_SOON(is_flat(early, daemon)); /* a connection for http lives for a moment */
    const struct sample now = take(daemon);
    fprintf(stderr,
            "%d rounds: %d descriptors, %d mappings, %d at the keeper, %" PRIu64
            " bytes in segments, %ld KiB, then %ld, of the keeper %ld, then %ld\n",
            count, now.fds, now.maps, now.keeper_fds, now.memory, early->rss, now.rss,
            early->keeper_rss, now.keeper_rss);
    EXPECT(TEST_SANITIZED || now.rss <= early->rss + RSS_MORE);
    EXPECT(TEST_SANITIZED || now.keeper_rss <= early->keeper_rss + RSS_MORE);
}

/* One heap: each thread's own would keep some hundred KiB or not, by what it did last. */
static void start_daemons(void)
{
    CHECK(mallopt(M_ARENA_MAX, 1) == 1 || TEST_SANITIZED);
    fixture_start_kept(&daemons, OWNERS, "");
}

/* Of the daemons, which is of so many events and takes memory as they come. */
static void fill_trace(shd_session *s)
{
    struct shd_err e = { 0 };
    shd_model *m = open_toy(s, TOY);
    train_steps(m, TEST_SANITIZED ? 1 : TRACE_EVENTS / 50);
    shd_model_close(m);
    EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
}

/* All that takes memory beside the model itself. */
static void use_all(shd_model *m)
{
    struct shd_err e = { 0 };
    uint64_t step;
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    train_steps(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_model_rewind(m, SHD_REWIND_LATEST, &step, &e), &e);
}

TEST(made_trained_and_dropped_again_and_again_nothing_grows)
{
    struct shd_err e = { 0 };
    struct sample early[OWNERS];
    const int count = rounds();
    start_daemons();
    shd_session *s = attach(PATIENT_MS);
    fill_trace(s);
    const uint64_t none = memory_now();
    for (int i = 0; i < count; i++) {
        shd_model *m = open_toy(s, TOY);
        train_steps(m, 1);
        if (i % 50 == 7)
            use_all(m);
        EXPECT(memory_now() > none);
        shd_model_close(m);
        EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
        EXPECT_EQ(memory_now(), none);
        for (int k = 0; i == count / EARLY && k < OWNERS; k++)
            early[k] = take(k);
    }
    for (int k = 0; k < OWNERS; k++) {
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, k, "") == 0);
        expect_flat(&early[k], k, count);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(forked_and_dropped_again_and_again_nothing_grows)
{
    struct shd_err e = { 0 };
    struct sample early[OWNERS];
    const int count = rounds() / 2;
    uint64_t step, whole = 0;
    start_daemons();
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    fill_trace(s);
    shd_model *m = open_toy(s, TOY), *twin;
    train_steps(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_steps(m, 1);
    for (int i = 0; i < count; i++) {
        const struct shd_fork_options options = {
            .size = sizeof options, .exact = i % 2 != 0, .step = step, .set = "lr_scale=0.5"
        };
        EXPECT_OK(shd_model_fork_with(m, "twin", &options, NULL, &e), &e);
        if (i % 10 == 0) {
            EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
            train_steps(twin, 1);
            shd_model_close(twin);
        }
        EXPECT_OK(shd_model_drop(other, "twin", NULL, &e), &e);
        for (int k = 0; i == count / EARLY && k < OWNERS; k++)
            early[k] = take(k);
        if (i == count / EARLY)
            whole = memory_now();
        EXPECT(i < count / EARLY || memory_now() == whole);
    }
    for (int k = 0; k < OWNERS; k++)
        expect_flat(&early[k], k, count);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
