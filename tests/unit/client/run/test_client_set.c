/* shd_model_set(): what is set at step k comes to the bits of a run that had these values from step
 * k on, with any number of owners and workers, whatever is killed around it; it is in checkpoints;
 * and what is refused changes nothing. */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS  6u
#define CHANGE "lr_scale.decay=0.25 weight_decay.decay=0.3 betas.plain=0.8,0.9 clip_norm=0.25"

static const char *spec(void)
{
    return toy_spec("f32", TOY_ADAMW);
}

/* What CHANGE comes to, as a worker would say it with each step. */
static struct shd_update changed(uint64_t step, struct shd_rates rates[2])
{
    struct shd_update u = toy_update(step);
    rates[0] = (struct shd_rates){ u.lr * 0.25, 0.3, NAN, NAN };
    rates[1] = (struct shd_rates){ NAN, NAN, 0.8, 0.9 };
    u.groups = rates;
    u.group_count = 2;
    u.clip_norm = 0.25;
    return u;
}

static int step_with(shd_model *m, const uint32_t *micros, uint32_t count,
                     const struct shd_update *update, struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    return shd_run_step(m, micros, count, &compute, update, NULL, e);
}

/* The oracle: in this process, nothing is set, the worker has others from step `from` on. */
static void reference(const char *json, uint64_t from, char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, json);
    for (uint64_t step = 0; step < STEPS; step++) {
        struct shd_rates rates[2];
        const struct shd_update update = step >= from ? changed(step, rates) : toy_update(step);
        EXPECT_OK(step_with(m, toy_all_micros, TOY_MICROS, &update, &e), &e);
    }
    digest_of(m, ret_hex);
    shd_close(s);
}

static uint64_t set_ok(shd_model *m, const char *text, uint64_t at)
{
    struct shd_err e = { 0 };
    uint64_t from = UINT64_MAX;
    EXPECT_OK(shd_model_set(m, text, at, &from, &e), &e);
    return from;
}

static void expect_settings(shd_model *m, const char *want)
{
    struct shd_err e = { 0 };
    char *json = NULL;
    EXPECT_OK(shd_settings(m, &json, &e), &e);
    EXPECT_STR(json, want);
    free(json);
}

static void expect_digest(shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
}

/* -- The same bits ----------------------------------------------------------------------------- */

TEST(in_this_process_it_is_what_the_worker_would_have_said)
{
    struct shd_err e = { 0 };
    char want[65];
    shd_session *s;
    for (uint64_t from = 1; from < STEPS; from += 2) {
        reference(spec(), from, want);
        EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_toy(s, spec());
        train_steps(m, 1);
        EXPECT_EQ(set_ok(m, CHANGE, from == 1 ? 0 : from), from);
        train_steps(m, STEPS - 1);
        expect_digest(m, want);
        shd_close(s);
    }
}

/* From the first step on it is another spec. */
TEST(it_is_what_another_spec_would_have_said)
{
    struct shd_err e = { 0 };
    char want[65], other[4096], *at;
    shd_session *s;
    snprintf(other, sizeof other, "%s",
             toy_spec("f32", "\"kind\": \"adamw\", \"beta1\": 0.8, \"beta2\": 0.9, \"eps\": 1e-8"));
    at = strstr(other, "\"weight_decay\": 0.1");
    EXPECT(at != NULL);
    at[strlen("\"weight_decay\": 0.")] = '3';
    at = strstr(other, "\"lr_scale\": 0.5");
    EXPECT(at != NULL);
    at[strlen("\"lr_scale\": 0.")] = '7';
    toy_reference(other, STEPS, want);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec());
    EXPECT_EQ(
        set_ok(m, "{\"weight_decay.decay\": 0.3, \"lr_scale.plain\": 0.7, \"betas\": [0.8, 0.9]}",
               0),
        0);
    train_steps(m, STEPS);
    expect_digest(m, want);
    shd_close(s);
}

/* A second worker, which is told nothing. */
static pid_t other_worker(void)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec(), &m, &e));
    while (shd_step(m) < STEPS) {
        const struct shd_update update = toy_update(shd_step(m));
        MUST_OK(step_with(m, toy_all_micros + 2, 2, &update, &e));
    }
    shd_close(s);
    _exit(0);
}

static void expect_ended(pid_t pid)
{
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(owners_and_workers_make_no_difference)
{
    char want[65];
    struct shd_err e = { 0 };
    reference(spec(), 3, want);
    for (int owners = 1; owners <= 3; owners++)
        for (uint32_t workers = 1; workers <= 2; workers++) {
            fixture_start(&daemons, owners, NULL);
            const pid_t pid = workers == 2 ? other_worker() : 0;
            shd_session *s = attach(PATIENT_MS), *operator= attach(PATIENT_MS);
            shd_model *m = open_toy(s, spec()), *om = open_toy(operator, spec());
            while (shd_step(m) < STEPS) {
                const struct shd_update update = toy_update(shd_step(m));
                if (shd_step(m) == 2)
                    EXPECT_EQ(set_ok(om, CHANGE, 3), 3);
                EXPECT_OK(step_with(m, toy_all_micros, workers == 2 ? 2 : 4, &update, &e), &e);
            }
            expect_digest(m, want);
            if (pid != 0)
                expect_ended(pid);
            shd_close(operator);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* eps is as another spec would have it, from the step on that is named. */
TEST(eps_is_what_another_spec_would_have_said)
{
    static const char small[] =
        "\"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.95, \"eps\": 1e-3",
                      torch[] = "\"kind\": \"adamw\", \"order\": \"torch\", \"eps\": 1e-8",
                      torch_small[] = "\"kind\": \"adamw\", \"order\": \"torch\", \"eps\": 1e-3";
    const char *const optimizers[][2] = { { TOY_ADAMW, small }, { torch, torch_small } };
    for (size_t i = 0; i < ARRAY_SIZE(optimizers); i++)
        for (int owners = 1; owners <= 3; owners += 2) {
            struct shd_err e = { 0 };
            char want[65], two[65], got[65];
            toy_reference(toy_spec("f32", optimizers[i][1]), 3, want);
            fixture_start(&daemons, owners, NULL);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, toy_spec("f32", optimizers[i][0]));
            EXPECT_EQ(set_ok(m, "eps=1e-3", 0), 0);
            train_steps(m, 3);
            expect_digest(m, want);
            EXPECT_EQ(set_ok(m, "eps.plain=spec", 4), 4); /* of one group, from a step on */
            train_steps(m, 2);
            digest_of(m, two);
            shd_close(s);
            fixture_stop(&daemons);
            EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
            m = open_toy(s, toy_spec("f32", optimizers[i][1]));
            set_ok(m, "eps.plain=1e-8", 4);
            train_steps(m, 5);
            digest_of(m, got);
            EXPECT_STR(got, two);
            shd_close(s);
        }
}

/* A worker whose rates are a schedule of its own, as PyTorch's are: what is set comes first, and
 * lr_scale multiplies. */
TEST(it_comes_before_what_the_worker_says)
{
    struct shd_err e = { 0 };
    char want[65];
    shd_session *s;
    for (int set = 0; set < 2; set++) {
        EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_toy(s, spec());
        if (set == 1)
            set_ok(m, "lr_scale.decay=0.5 weight_decay=0.2 clip_norm=0", 0);
        for (uint64_t step = 0; step < 2; step++) {
            const double scale = set == 1 ? 1 : 0.5, decay = set == 1 ? 0.7 : 0.2;
            const struct shd_rates rates[] = { { 0.004 * scale, decay, 0.7, NAN },
                                               { NAN, decay, NAN, NAN } };
            struct shd_update update = toy_update(step);
            update.groups = rates;
            update.group_count = 2;
            update.clip_norm = set == 1 ? 0.1 : 0;
            EXPECT_OK(step_with(m, toy_all_micros, TOY_MICROS, &update, &e), &e);
        }
        if (set == 0)
            digest_of(m, want);
        else
            expect_digest(m, want);
        shd_close(s);
    }
}

/* -- Kills ------------------------------------------------------------------------------------- */

/* Owners die around the change, before each step and behind it, and once all of them. */
TEST(change_survives_whatever_dies)
{
    char want[65];
    reference(spec(), 3, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    train_steps(m, 2);
    fixture_restart(&daemons, 0);
    EXPECT_EQ(set_ok(m, CHANGE, 3), 3);
    fixture_restart(&daemons, 0);
    EXPECT_EQ(set_ok(m, CHANGE, 3), 3); /* as who was not answered asks again */
    for (uint32_t step = 2; step < STEPS; step++) {
        fixture_restart(&daemons, (int)step % 2);
        train_steps(m, 1);
        fixture_restart(&daemons, 0);
    }
    expect_digest(m, want);
    EXPECT_EQ(set_ok(m, CHANGE, 0), 3);
    shd_close(s);
    fixture_stop(&daemons);
}

#define STORM 40u

static const char *const storm_changes[] = {
    "lr_scale.decay=0.5",     "betas=0.8,0.9 clip_norm=0.3",     "micro_batches=2",
    "weight_decay.plain=0.2", "lr_scale=spec clip_norm=0",       "micro_batches=3 eps.decay=1e-3",
    "beta1.decay=0.7",        "weight_decay=0 lr_scale.plain=2",
};

static pid_t storm_worker(void)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    struct toy toy = { .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec(), &m, &e));
    toy.m = m;
    while (shd_step(m) < STORM) {
        const struct shd_update update = toy_update(shd_step(m));
        MUST_OK(shd_run_step_elastic(m, &compute, &update, NULL, &e));
        usleep(20000);
    }
    _exit(0);
}

static bool is_over(shd_model *m, uint64_t step)
{
    struct shd_step_row row = { .size = sizeof row };
    uint32_t count = 0;
    return shd_history(m, &step, &row, 1, &count, /* e= */ NULL) == SHD_OK && count > 0;
}

static void storm_reference(const uint64_t *from, char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec());
    for (size_t i = 0; i < ARRAY_SIZE(storm_changes); i++)
        EXPECT_EQ(set_ok(m, storm_changes[i], from[i]), from[i]);
    for (uint64_t step = 0; step < STORM; step++) {
        const struct shd_update update = toy_update(step);
        EXPECT_OK(step_with(m, toy_all_micros, shd_micro_batches(m), &update, &e), &e);
    }
    digest_of(m, ret_hex);
    shd_close(s);
}

/* Owners and workers are killed all the time while one change after the other is made: what was
 * answered is in force from the step that the answer names, and nothing else is. */
TEST(changes_in_a_storm_of_kills_hold_from_the_steps_that_were_named)
{
    uint64_t seed = test_seed(0x5e7), from[ARRAY_SIZE(storm_changes)];
    uint32_t in_time = 0;
    pid_t workers[2];
    char want[65];
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    for (int i = 0; i < 2; i++)
        workers[i] = storm_worker();
    for (size_t i = 0; i < ARRAY_SIZE(storm_changes); i++) {
        from[i] = set_ok(m, storm_changes[i], 0);
        in_time += from[i] > 0 && from[i] < STORM;
        for (int kills = 0; kills < 2; kills++) {
            const uint64_t who = test_random(&seed) >> 40;
            if (who % 3 > 0) {
                fixture_restart(&daemons, (int)(who / 3 % 2));
                continue;
            }
            pid_t *worker = &workers[who / 3 % 2];
            kill(*worker, SIGKILL);
            waitpid(*worker, NULL, 0);
            *worker = storm_worker();
        }
        EXPECT_SOON(is_over(m, from[i]));
    }
    expect_ended(workers[0]);
    expect_ended(workers[1]);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_toy(s, spec());
    EXPECT_EQ(shd_step(m), STORM);
    EXPECT(in_time >= 3);
    storm_reference(from, want);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* Owners die in the change, before and behind the word that makes it count, and in the commits that
 * follow: whoever asked is answered by a successor. */
TEST(owners_killed_in_the_change_or_the_commit_have_it_once)
{
    static const char *const fails[] = {
        "step:set:before;",      "step:set:after;",
        "step:promise:after@3;", "step:commit:before@3;",
        "step:commit:after@3;",  "step:set:before;step:set:after;step:commit:before;",
    };
    char want[65];
    reference(spec(), 2, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec());
        train_steps(m, 2);
        EXPECT_EQ(set_ok(m, CHANGE, 0), 2);
        train_steps(m, STEPS - 2);
        expect_digest(m, want);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

/* A commit that has all answers, and breaks off before it decides: the change is of the next step,
 * also for a successor. */
TEST(prepared_step_keeps_what_it_was_prepared_with)
{
    struct shd_err e = { 0 };
    char want[65];
    reference(spec(), 3, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec()), *om = open_toy(other, spec());
    train_steps(m, 2);
    struct shd_update update = toy_update(2);
    update.divide_by = 3; /* nothing was reported there */
    EXPECT_STATUS(step_with(m, toy_all_micros, TOY_MICROS, &update, &e), SHD_EINVAL);
    fixture_restart(&daemons, 0);
    EXPECT_STATUS(shd_model_set(om, CHANGE, 2, NULL, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "from step 3 on");
    EXPECT_EQ(set_ok(om, CHANGE, 0), 3);
    update = toy_update(2);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    train_steps(m, STEPS - 3);
    expect_digest(m, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Checkpoints, and looking -------------------------------------------------------------------
 */

TEST(checkpoints_have_it_and_what_waits)
{
    struct shd_err e = { 0 };
    char want[65];
    reference(spec(), 3, want);
    make_ckpts();
    for (int owners = 1; owners <= 3; owners += 2) { /* onto as many, and onto others */
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec());
        EXPECT_EQ(set_ok(m, "beta2.plain=0.9", 3), 3);
        train_steps(m, 2);
        EXPECT_EQ(set_ok(m, CHANGE, 3), 3);
        save_ok(m, 1);
        shd_close(s);
        fixture_stop(&daemons);
        fixture_start(&daemons, owners, NULL);
        s = attach(PATIENT_MS);
        m = restore_ok(s, ckpts);
        expect_settings(m, "{\"now\":{},\"next\":{\"from\":3,\"settings\":{\"clip_norm\":0.25,"
                           "\"lr_scale.decay\":0.25,\"weight_decay.decay\":0.29999999999999999,"
                           "\"beta1.plain\":0.80000000000000004,\"beta2.plain\":"
                           "0.90000000000000002}}}");
        train_steps(m, STEPS - 2);
        expect_digest(m, want);
        save_ok(m, 1);
        EXPECT_EQ(shell("grep -q '\"format\": 3' '%s'/step-*6/shardd.json", ckpts), 0);
        shd_close(s);
        s = attach(PATIENT_MS);
        shd_model *found;
        EXPECT_OK(shd_model_attach(s, NULL, &found, &e), &e); /* nobody needs another spec */
        char *json;
        EXPECT_OK(shd_status(s, 0, &json, &e), &e);
        EXPECT_HAS(json, "\"lr_scale.decay\":{\"value\":0.25,\"from\":3}");
        free(json);
        shd_close(s);
        fixture_stop(&daemons);
        make_ckpts();
    }
    remove_ckpts();
}

/* Without settings a checkpoint is as builds that know of none write and read it. */
TEST(checkpoints_without_settings_are_of_the_old_format)
{
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    expect_settings(m, "{\"now\":{},\"next\":null}");
    train_steps(m, 1);
    save_ok(m, 1);
    EXPECT_EQ(shell("grep -q '\"format\": 1' '%s'/step-*1/shardd.json", ckpts), 0);
    EXPECT(shell("grep -q settings '%s'/step-*1/shardd.json", ckpts) != 0);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* -- Refusals -----------------------------------------------------------------------------------
 */

TEST(what_is_refused_changes_nothing)
{
    struct shd_err e = { 0 };
    char want[65];
    toy_reference(spec(), 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    train_steps(m, 1);
    EXPECT_STATUS(shd_model_set(m, NULL, 0, NULL, &e), SHD_EINVAL);
    EXPECT_STATUS(shd_model_set(m, "lr_scale.plaim=1", 0, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "did you mean plain?");
    EXPECT_STATUS(shd_model_set(m, "clip_norm=1", 0x1p33, NULL, &e), SHD_ERANGE);
    EXPECT_STATUS(shd_model_set(m, "clip_norm=0.1 lr_scale.decay=1e39", 0, NULL, &e), SHD_ERANGE);
    s->hub->links[0].peer.requests = WIRE_SET; /* as a build without it says */
    EXPECT_STATUS(shd_model_set(m, "clip_norm=0.1", 0, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "does not know Set: it is of an older version");
    s->hub->links[0].peer.requests = WIRE_REQUEST_TYPES;
    expect_settings(m, "{\"now\":{},\"next\":null}");
    train_steps(m, 1);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
