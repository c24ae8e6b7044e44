/* Daemons killed with SIGKILL, at named points and at random moments, or stopped in good order, and
 * their successors: same digest, metrics, decisions and blobs as undisturbed, nothing leaked. What
 * cannot be adopted is test_adopt_state.c's. The keeper is tests/lib/keeper.h's.
 */
#include <pthread.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "tests/lib/adopt_toy.h"

/* -- Killed at random ---------------------------------------------------------------------------
 */

#define KILL_WITHIN_MS 20u /* of the last kill; one in three: ten times as long */
#define KILLS_IN_VAIN  25u /* without a finished step: leave them twice the time */

struct killer { /* has the keeper to itself while it runs */
    uint64_t seed;
    int daemons;
    _Atomic bool done;
};

/* Some are killed before they serve. A machine may take longer to start one than any fixed time:
 * with no step finished the kills come further apart, until there is one. */
static void *kill_at_random(void *arg)
{
    struct killer *k = arg;
    uint64_t within_ms = KILL_WITHIN_MS;
    uint32_t vain = 0, steps = atomic_load(&adopt_steps);
    while (!atomic_load(&k->done)) {
        const uint64_t most_ms = within_ms * (test_random(&k->seed) % 3 == 0 ? 10 : 1);
        const uint64_t us = test_random(&k->seed) % (most_ms * 1000);
        nanosleep(&(struct timespec){ .tv_sec = (time_t)(us / 1000000),
                                      .tv_nsec = (long)(us % 1000000 * 1000) },
                  NULL);
        fixture_ask(&daemons, KEEPER_KILL, (int)(test_random(&k->seed) % (uint64_t)k->daemons), "");
        const uint32_t now = atomic_load(&adopt_steps);
        vain = now == steps ? vain + 1 : 0;
        if (vain == KILLS_IN_VAIN) {
            within_ms *= 2;
            vain = 0;
        }
        steps = now;
    }
    return NULL;
}

static void train_among_kills(const struct kind *kind, int count, uint64_t seed)
{
    struct past want, got = { .known = { false } };
    struct shd_err e = { 0 };
    struct killer killer = { .seed = seed, .daemons = count };
    pthread_t thread;
    reference(kind, &want);
    fixture_start_kept(&daemons, count, ";");
    CHECK(pthread_create(&thread, NULL, kill_at_random, &killer) == 0);
    compute_ms = 1; /* leave them time */
    const bool done = adopt_train(daemons.address, kind, &got, &e);
    compute_ms = 0;
    atomic_store(&killer.done, true);
    pthread_join(thread, NULL);
    if (!done)
        FAIL("%s", e.text);
    adopt_expect_same(&got, &want);
    printf("  %ld starts of cpu0\n", fixture_ask(&daemons, KEEPER_STARTS, 0, ""));
    for (int i = 0; i < count; i++)
        fixture_wait_up(&daemons, i);
    got = (struct past){ .known = { false } }; /* and what is left is complete */
    if (!adopt_train(daemons.address, kind, &got, &e))
        FAIL("%s", e.text);
    EXPECT_STR(got.hex, want.hex);
    fixture_stop(&daemons);
}

TEST(killed_at_random_moments_goes_on_with_the_same_bits)
{
    uint64_t seed = test_seed(20270301);
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        train_among_kills(&kinds[i], 1 + (int)i % 2, test_random(&seed));
}

/* -- Killed at named points ---------------------------------------------------------------------
 */

#ifdef SHD_FAIL_POINTS
static const char *const points[] = {
    "model:segments:after", "keeper:store:before", "keeper:store:after", "model:ready:before",
    "model:ready:after",    "step:metrics:before", "step:metrics:after", "step:cell:before",
    "step:cell:after",      "step:commit:before",  "step:commit:after",  "apply:done:before",
    "apply:done:after",     "kern:chunk:before",   "kern:chunk:after",   "kern:done:before",
    "kern:done:after",      "kern:pass",           "kern:known",
};
static const char *const adopt_points[] = {
    "adopt:repair:before", "adopt:repair:after", "adopt:publish:after",
    "adopt:resume:after",  "kern:done:before",   "keeper:remove:before",
};

/* fails: of one start after the other, each ended by a ';'. Returns how many were killed. */
static long kill_at(const struct kind *k, const struct past *want, const char *fails)
{
    struct past got = { .known = { false } };
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 1, fails);
    if (!adopt_train(daemons.address, k, &got, &e))
        FAIL("after %s: %s", fails, e.text);
    if (strcmp(got.hex, want->hex) != 0)
        fprintf(stderr, "after %s:\n", fails);
    adopt_expect_same(&got, want);
    const long killed = fixture_ask(&daemons, KEEPER_STARTS, 0, "") - 1;
    fixture_stop(&daemons);
    return killed;
}

/* Each point with each kind at its first passage and at one of the others, of which all kinds have
 * them all; those that few kinds pass, at each. */
TEST(killed_at_each_point_goes_on_with_the_same_bits)
{
    static const int passages[] = { 1, 2, 7, 23 };
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i += 2) {
        struct past want;
        long kills = 0;
        reference(&kinds[i], &want);
        for (size_t p = 0; p < ARRAY_SIZE(points); p++) {
            const bool few = strcmp(points[p], "kern:pass") == 0 ||
                             strcmp(points[p], "kern:known") == 0;
            if (few && kinds[i].whole == NULL)
                continue;
            for (size_t n = 0; n < ARRAY_SIZE(passages); n++) {
                char fail[64];
                if (!few && n > 0 && n != 1 + (p + i / 2) % (ARRAY_SIZE(passages) - 1))
                    continue;
                snprintf(fail, sizeof fail, "%s@%d;", points[p], passages[n]);
                const long killed = kill_at(&kinds[i], &want, fail);
                EXPECT(killed > 0 || n > 0 || strncmp(points[p], "apply", 5) == 0);
                kills += killed;
            }
        }
        printf("  %ld kills\n", kills);
    }
}

TEST(killed_again_while_it_adopts_goes_on_with_the_same_bits)
{
    static const char *const first[] = { "step:commit:after@2", "kern:chunk:after@40",
                                         "kern:done:before@17" };
    struct past want;
    reference(&kinds[0], &want);
    for (size_t i = 0; i < ARRAY_SIZE(first); i++)
        for (size_t p = 0; p < ARRAY_SIZE(adopt_points); p++) {
            char fails[160];
            snprintf(fails, sizeof fails, "%s;%s;%s;", first[i], adopt_points[p], adopt_points[p]);
            EXPECT(kill_at(&kinds[0], &want, fails) > 0);
        }
}
#endif

/* -- Several owners, some without elements ------------------------------------------------------
 */

TEST(all_owners_killed_in_the_middle_of_a_step_go_on)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct past want, got = { .known = { false } };
        struct shd_err e = { 0 };
        reference(&kinds[i], &want);
        fixture_start_kept(&daemons, 3, "");
        for (uint32_t step = 0; step < STEPS; step++) {
            shd_session *s;
            shd_model *m;
            struct pt_run run = run_of(&kinds[i]);
            EXPECT_OK(try_connect(daemons.address, TIMEOUT_MS, &s, &e), &e);
            EXPECT_OK(shd_model_open(s, kind_spec(&kinds[i]), &m, &e), &e);
            EXPECT_EQ(shd_step(m), step);
            EXPECT_OK(train_step(m, &run, &got, &e), &e);
            for (int d = 0; d < 3; d++)
                fixture_ask(&daemons, KEEPER_KILL, d, ""); /* while updates are applied */
            shd_close(s);
            for (int d = 0; d < 3; d++)
                fixture_succeed(&daemons, d, "");
            for (int d = 0; d < 3; d++)
                fixture_wait_up(&daemons, d);
        }
        if (!adopt_train(daemons.address, &kinds[i], &got, &e))
            FAIL("%s", e.text);
        adopt_expect_same(&got, &want);
        fixture_stop(&daemons);
    }
}

/* -- Stopped in good order ----------------------------------------------------------------------
 */

/* As a restart by the service manager: a bare directory, in between, still means both. */
TEST(who_attaches_between_two_daemons_of_a_device_waits_for_the_next)
{
    const struct shd_options hasty = { .size = sizeof hasty,
                                       .address = daemons.address,
                                       .timeout_ms = test_paced(500) };
    struct past want, got = { .known = { false } };
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    reference(&kinds[0], &want);
    fixture_start_kept(&daemons, 2, "");
    if (!adopt_train(daemons.address, &kinds[0], &got, &e))
        FAIL("%s", e.text);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_TERM, 1, ""), 0);
    EXPECT_STATUS(shd_connect(&hasty, &s, &e), SHD_EGONE);
    EXPECT_HAS(e.text, "daemon cpu1 at ");
    EXPECT_HAS(e.text, "start it, or name those that are there");
    fixture_succeed(&daemons, 1, "");
    got = (struct past){ .known = { false } };
    if (!adopt_train(daemons.address, &kinds[0], &got, &e))
        FAIL("%s", e.text);
    EXPECT_STR(got.hex, want.hex);
    fixture_stop(&daemons);
}

TEST(daemon_without_a_model_takes_its_socket_along)
{
    char path[sizeof daemons.dir + 16];
    fixture_start_kept(&daemons, 2, "");
    snprintf(path, sizeof path, "%s/cpu1.sock", daemons.dir);
    EXPECT(access(path, F_OK) == 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_TERM, 1, ""), 0);
    EXPECT(access(path, F_OK) != 0);
    fixture_succeed(&daemons, 1, "");
    fixture_wait_up(&daemons, 1);
    fixture_stop(&daemons);
}

TEST_MAIN()
