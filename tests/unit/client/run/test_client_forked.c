/* A second model of what one is at its open step: it and the first go on as two separate runs
 * would; it is there at all owners or at none, whatever is killed. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/look.h"
#include "client/session/session.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define TOY   toy_spec("f32", TOY_ADAMW)
#define STEPS 40u

/* The toy's spec under another name. */
static const char *twin_spec(void)
{
    static char spec[8192];
    const char *toy = TOY, *at = strstr(toy, "\"toy\"");
    CHECK(at != NULL && strlen(toy) + 8 < sizeof spec);
    snprintf(spec, sizeof spec, "%.*s\"twin\"%s", (int)(at - toy), toy, at + strlen("\"toy\""));
    return spec;
}

static void digest_at(shd_model *m, uint64_t step, char hex[65])
{
    EXPECT_EQ(shd_step(m), step);
    digest_of(m, hex);
}

/* Twice the same from there on, as one run; and apart from each other when they are trained apart.
 */
TEST(both_go_on_as_two_separate_runs)
{
    for (int count = 1; count <= 2; count++) {
        struct shd_err e = { 0 };
        char three[65], five[65], got[65];
        uint64_t step = 0;
        toy_reference(TOY, 3, three);
        toy_reference(TOY, 5, five);
        fixture_start_kept(&daemons, count, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, TOY);
        train_steps(m, 3);
        EXPECT_OK(shd_model_fork(m, "twin", &step, &e), &e);
        EXPECT_EQ(step, 3);
        EXPECT_STATUS(shd_model_fork(m, "twin", &step, &e), SHD_EEXIST);
        EXPECT_STATUS(shd_model_fork(m, "", &step, &e), SHD_ERANGE);
        train_steps(m, 2);
        digest_at(m, 5, got);
        EXPECT_STR(got, five);
        shd_session *other = attach(PATIENT_MS);
        shd_model *twin = open_toy(other, twin_spec());
        digest_at(twin, 3, got);
        EXPECT_STR(got, three); /* nothing of what the first did since */
        EXPECT_EQ(shd_puts(twin), shd_puts(m));
        train_steps(twin, 2);
        digest_at(twin, 5, got);
        EXPECT_STR(got, five);
        shd_close(other);
        for (int i = 0; i < count; i++) /* and outlives its daemons */
            fixture_restart(&daemons, i);
        other = attach(PATIENT_MS);
        twin = open_toy(other, twin_spec());
        digest_at(twin, 5, got);
        EXPECT_STR(got, five);
        shd_close(other);
        shd_close(s);
        s = attach(PATIENT_MS);
        EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
        EXPECT_OK(shd_model_attach(s, "twin", &m, &e), &e); /* of its own */
        digest_at(m, 5, got);
        EXPECT_STR(got, five);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Of one that came to be by start values, as a fork does, a word more has to go at each owner. */
TEST(a_dropped_fork_is_not_adopted)
{
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    const long kept = fixture_ask(&daemons, KEEPER_COUNT, 1, "");
    train_steps(m, 1);
    for (int round = 0; round < 2; round++) {
        EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
        EXPECT_OK(shd_model_drop(s, "twin", NULL, &e), &e);
    }
    for (int i = 0; i < 2; i++)
        fixture_restart(&daemons, i);
    EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, 1, "") == kept);
    shd_session *other = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_attach(other, "twin", &m, &e), SHD_ENOENT);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* As it was opened, with values that nobody has updated. */
TEST(a_model_at_its_first_step_is_forked)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    uint64_t step = 9;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin;
    digest_at(m, 0, want);
    EXPECT_OK(shd_model_fork(m, "twin", &step, &e), &e);
    EXPECT_EQ(step, 0);
    EXPECT_OK(shd_model_attach(s, "twin", &twin, &e), &e);
    digest_at(twin, 0, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* What is set, and what waits for a step to come, goes along. */
TEST(what_is_set_is_forked_too)
{
    struct shd_err e = { 0 };
    char want[65], got[65], *of_toy, *of_twin;
    uint64_t step, from;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin;
    EXPECT_OK(shd_model_set(m, "lr_scale=0.5", 0, &from, &e), &e);
    train_steps(m, 2);
    EXPECT_OK(shd_model_set(m, "clip_norm=0.01", 3, &from, &e), &e);
    EXPECT_OK(shd_model_fork(m, "twin", &step, &e), &e);
    EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
    EXPECT_OK(shd_settings(m, &of_toy, &e), &e);
    EXPECT_OK(shd_settings(twin, &of_twin, &e), &e);
    EXPECT_STR(of_twin, of_toy);
    EXPECT_HAS(of_twin, "clip_norm");
    free(of_toy);
    free(of_twin);
    train_steps(m, 2);
    train_steps(twin, 2);
    digest_at(m, 4, want);
    digest_at(twin, 4, got);
    EXPECT_STR(got, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* While two workers train it: exactly one step, at both owners; neither run differs by a bit. */
TEST(a_model_that_is_being_trained_is_forked_at_exactly_one_step)
{
    char want[65], at[65], got[65];
    struct shd_err e = { 0 };
    pid_t pids[2];
    uint64_t step = 0;
    toy_reference(TOY, STEPS, want);
    fixture_start(&daemons, 2, NULL);
    for (uint32_t i = 0; i < 2; i++)
        pids[i] = trainer_fork(TOY, i, 2, STEPS);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin;
    EXPECT_SOON(look_furthest(m) >= 2);
    EXPECT_OK(shd_model_fork(m, "twin", &step, &e), &e);
    EXPECT(step >= 2);
    shd_model_close(m);
    for (uint32_t i = 0; i < 2; i++) {
        expect_well(pids[i]);
    }
    toy_reference(TOY, (uint32_t)step, at);
    shd_session *other = attach(PATIENT_MS);
    EXPECT_OK(shd_model_attach(other, "toy", &m, &e), &e);
    digest_at(m, STEPS, got);
    EXPECT_STR(got, want);
    twin = open_toy(other, twin_spec());
    digest_at(twin, step, got);
    EXPECT_STR(got, at);
    train_steps(twin, STEPS - (uint32_t)step);
    digest_at(twin, STEPS, got);
    EXPECT_STR(got, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* Killed there, the first time or again: who forks repeats what it needs, and the fork is whole;
 * the first model is what it was. */
TEST(daemons_killed_in_the_middle_fork_it_whole)
{
    static const char *const fails[] = {
        "fork:copied@1;",
        "create:full:before@1;",
        "create:full:after@1;",
        "create:ready:before@1;",
        "create:ready:after@1;",
        "fork:copied@1;fork:copied@1;",
        "create:full:after@1;adopt:repair:before@1;",
    };
    char three[65], four[65], got[65];
    toy_reference(TOY, 3, three);
    toy_reference(TOY, 4, four);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        uint64_t step = 0;
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, TOY), *twin;
        train_steps(m, 3);
        EXPECT_OK(shd_model_fork(m, "twin", &step, &e), &e);
        EXPECT_EQ(step, 3);
        EXPECT(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        shd_session *other = attach(PATIENT_MS);
        twin = open_toy(other, twin_spec());
        digest_at(twin, 3, got);
        EXPECT_STR(got, three);
        train_steps(twin, 1);
        digest_at(twin, 4, got);
        EXPECT_STR(got, four);
        digest_at(m, 3, got);
        EXPECT_STR(got, three);
        shd_close(other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

TEST_MAIN()
