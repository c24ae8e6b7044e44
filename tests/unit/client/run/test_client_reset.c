/* shd_reset_step(): what was returned and is given up counts for nothing, whoever returned it,
 * however much of the step was in, and whoever dies; the bits are those of a run in which it never
 * was. */
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/session.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 4u

static const char *spec(void)
{
    return toy_spec("f32", TOY_ADAMW);
}

/* Units of a micro-batch, from the last one down to `to`; of another batch, when spoilt. */
static int return_units(shd_model *m, uint32_t micro, uint32_t to, bool spoilt, struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    double metrics[SHD_METRICS_MAX];
    int r = shd_report(m, micro, metrics, toy_metrics(NULL, micro, metrics), e);
    if (r == SHD_OK)
        r = shd_acquire(m, 0, NULL, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t u = shd_units(m); r == SHD_OK && u-- > to;) {
        const void *params;
        float *grad = NULL;
        r = shd_acquire(m, u, &params, e);
        if (r != SHD_OK)
            break;
        r = shd_grad(m, micro, u, &grad, e);
        if (r == SHD_OK && spoilt)
            toy_write(m, micro + 1, u, /* salt= */ 7, params, /* add= */ false, grad);
        else if (r == SHD_OK)
            toy_backward(&toy, micro, u, params, grad);
        if (r == SHD_OK)
            r = shd_return(m, micro, u, e);
        shd_release(m, u);
    }
    shd_release(m, 0);
    return r;
}

static void step_of(shd_model *m)
{
    struct shd_err e = { 0 };
    const struct shd_update update = toy_update(shd_step(m));
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(return_units(m, i, 0, false, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

/* Half a micro-batch, one, two and a half, all of the step: and then the step as it should be. */
static void train_with_resets(shd_model *m, void (*kill)(uint32_t step))
{
    struct shd_err e = { 0 };
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t i = 0; i < TOY_MICROS && i <= step; i++)
            EXPECT_OK(return_units(m, i, step < 3 && i == step ? 1 : 0, true, &e), &e);
        if (kill != NULL)
            kill(step);
        EXPECT_OK(shd_reset_step(m, &e), &e);
        EXPECT_EQ(shd_step(m), step);
        if (kill != NULL)
            kill(step + 1);
        step_of(m);
    }
}

static void expect_digest(shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
}

static void restart_one(uint32_t step)
{
    fixture_restart(&daemons, (int)(step % 2));
}

TEST(given_up_gradients_count_for_nothing_also_when_daemons_die)
{
    char want[65];
    toy_reference(spec(), STEPS, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    train_with_resets(m, restart_one);
    expect_digest(m, want);
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_copied % 4, 0); /* of slots that moved to a successor's inbox */
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(in_this_process_too)
{
    struct shd_err e = { 0 };
    shd_session *s;
    char want[65];
    toy_reference(spec(), STEPS, want);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec());
    train_with_resets(m, NULL);
    expect_digest(m, want);
    shd_close(s);
}

static uint32_t resets_heard;

static void on_event(void *ctx, const struct shd_event *event)
{
    (void)ctx;
    resets_heard += event->kind == SHD_EVENT_RESET;
}

/* Who had returned something is told; who had not goes on, and so does its commit. */
TEST(other_workers_learn_of_it_and_compute_again)
{
    struct shd_err e = { 0 };
    const struct shd_update update = toy_update(0);
    char want[65];
    toy_reference(spec(), 1, want);
    fixture_start(&daemons, 2, NULL);
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .timeout_ms = PATIENT_MS,
                                         .event = on_event };
    shd_session *a = attach(PATIENT_MS), *b, *c = attach(PATIENT_MS);
    EXPECT_OK(shd_connect(&options, &b, &e), &e);
    shd_model *ma = open_toy(a, spec()), *mb = open_toy(b, spec()), *mc = open_toy(c, spec());
    EXPECT_OK(return_units(mb, 2, 0, false, &e), &e);
    EXPECT_OK(return_units(mb, 3, 1, false, &e), &e);
    EXPECT_OK(return_units(ma, 0, 2, true, &e), &e);
    EXPECT_OK(shd_reset_step(ma, &e), &e);
    EXPECT_STATUS(return_units(mb, 3, 0, false, &e), SHD_ERESET);
    EXPECT_HAS(e.text, "step 0 was reset");
    EXPECT_EQ(resets_heard, 1);
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(return_units(i < 2 ? ma : mb, i, 0, i == 1, &e), &e);
    EXPECT_OK(shd_reset_step(mb, &e), &e); /* all of it is in, and nobody has begun to commit */
    EXPECT_STATUS(shd_commit(ma, &update, NULL, &e), SHD_ERESET);
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(return_units(i < 2 ? ma : mb, i, 0, false, &e), &e);
    EXPECT_OK(shd_commit(mc, &update, NULL, &e), &e);
    EXPECT_OK(shd_commit(ma, &update, NULL, &e), &e);
    EXPECT_OK(shd_commit(mb, &update, NULL, &e), &e);
    expect_digest(ma, want);
    shd_close(a);
    shd_close(b);
    shd_close(c);
    fixture_stop(&daemons);
}

/* Who has still to hear that a step is over takes a reset of the next one for none of its own. */
TEST(next_step_that_is_given_up_takes_nothing_back)
{
    struct shd_err e = { 0 };
    const struct shd_update first = toy_update(0), second = toy_update(1);
    char want[65];
    toy_reference(spec(), 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *a = attach(PATIENT_MS), *b = attach(PATIENT_MS);
    shd_model *ma = open_toy(a, spec()), *mb = open_toy(b, spec());
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(return_units(i < 2 ? ma : mb, i, 0, false, &e), &e);
    EXPECT_OK(shd_commit(ma, &first, NULL, &e), &e);
    EXPECT_OK(return_units(ma, 0, 0, true, &e), &e);
    EXPECT_OK(shd_reset_step(ma, &e), &e);
    EXPECT_OK(shd_commit(mb, &first, NULL, &e), &e);
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(return_units(i < 2 ? ma : mb, i, 0, false, &e), &e);
    EXPECT_OK(shd_commit(mb, &second, NULL, &e), &e);
    EXPECT_OK(shd_commit(ma, &second, NULL, &e), &e);
    expect_digest(ma, want);
    shd_close(a);
    shd_close(b);
    fixture_stop(&daemons);
}

/* A successor that left out what its predecessor had returned has to compute that, too. */
TEST(worker_that_left_something_out_is_told)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *a = attach(PATIENT_MS), *b = NULL;
    shd_model *ma = open_toy(a, spec()), *mb = NULL;
    EXPECT_OK(return_units(ma, 0, 0, false, &e), &e);
    for (bool in = false; !in; in = shd_is_in(mb, 0)) { /* summed by now */
        shd_close(b);
        b = attach(PATIENT_MS);
        mb = open_toy(b, spec());
    }
    EXPECT_OK(shd_reset_step(ma, &e), &e);
    EXPECT_STATUS(return_units(mb, 1, 0, false, &e), SHD_ERESET);
    EXPECT(!shd_is_in(mb, 0));
    EXPECT_OK(return_units(mb, 1, 0, false, &e), &e);
    shd_close(a);
    shd_close(b);
    fixture_stop(&daemons);
}

/* A commit that has all answers, and is broken off before it decides: nobody may take them back. */
TEST(commit_that_has_begun_is_not_given_up)
{
    struct shd_err e = { 0 };
    struct shd_update update = toy_update(0);
    char want[65];
    toy_reference(spec(), 1, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *a = attach(PATIENT_MS), *b = attach(PATIENT_MS);
    shd_model *ma = open_toy(a, spec()), *mb = open_toy(b, spec());
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        EXPECT_OK(return_units(ma, i, 0, false, &e), &e);
    update.divide_by = 3; /* nothing was reported there */
    EXPECT_STATUS(shd_commit(ma, &update, NULL, &e), SHD_EINVAL);
    update.divide_by = 0;
    fixture_restart(&daemons, 0); /* it has promised all the same */
    EXPECT_STATUS(shd_reset_step(mb, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "its commit has begun");
    EXPECT_OK(shd_commit(mb, &update, NULL, &e), &e);
    EXPECT_STATUS(shd_reset_step(ma, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "its commit has been made");
    EXPECT_OK(shd_commit(ma, &update, NULL, &e), &e);
    expect_digest(ma, want);
    shd_close(a);
    shd_close(b);
    fixture_stop(&daemons);
}

static void work_by_callbacks(bool elastic, bool fails)
{
    struct shd_err e = { 0 };
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    while (shd_step(m) < STEPS) {
        const uint64_t step = shd_step(m);
        const struct shd_update update = toy_update(step);
        toy.fail_micro = fails ? 1 : -1;
        for (int r = SHD_EINTERNAL; r == SHD_EINTERNAL;) {
            r = elastic ? shd_run_step_elastic(m, &compute, &update, NULL, &e)
                        : shd_run_step(m, toy_all_micros + (fails ? 0 : 2), 2, &compute, &update,
                                       NULL, &e);
            if (r == SHD_EINTERNAL && shd_reset_step(m, &e) != SHD_OK)
                _exit(3);
            toy.fail_micro = -1;
            if (r != SHD_OK && r != SHD_EINTERNAL)
                _exit(2);
        }
    }
    shd_close(s);
    _exit(0);
}

/* One worker fails in each step after it has returned some, the other one runs the step again. */
TEST(steps_that_the_library_runs_are_run_again)
{
    char want[65];
    toy_reference(spec(), STEPS, want);
    for (int elastic = 0; elastic < 2; elastic++) {
        pid_t pids[2];
        fixture_start_kept(&daemons, 2, "");
        for (int i = 0; i < 2; i++) {
            pids[i] = test_fork();
            if (pids[i] == 0)
                work_by_callbacks(elastic == 1, i == 0);
        }
        fixture_restart(&daemons, elastic);
        for (int i = 0; i < 2; i++) {
            expect_well(pids[i]);
        }
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec());
        EXPECT_EQ(shd_step(m), STEPS);
        expect_digest(m, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST_MAIN()
