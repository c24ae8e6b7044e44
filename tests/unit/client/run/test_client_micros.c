/* shd_model_set() of micro_batches: a ramp that is set while a model is trained comes to the bits
 * of the same ramp in its spec, with any number of owners and workers, whatever is killed around
 * the change; it is in checkpoints, forks and snapshots; and what is refused changes nothing. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 7u
#define MOST  16u
#define ROOM  "4, \"micro_batches_max\": 16"
#define RAMP  "[[0, 4], [2, 8], [4, 16], [6, 2]]"

static uint32_t ramp_of(uint64_t step)
{
    return step < 2 ? 4 : step < 4 ? 8 : step < 6 ? 16 : 2;
}

/* The toy with another value of micro_batches, and what else is to be said behind it. */
static const char *spec_with(const char *micro_batches)
{
    static char json[4096];
    static const char key[] = "\"micro_batches\": ";
    const char *toy = toy_spec("f32", TOY_ADAMW), *at = strstr(toy, key);
    CHECK(at != NULL);
    at += strlen(key);
    snprintf(json, sizeof json, "%.*s%s%s", (int)(at - toy), toy, micro_batches,
             at + 1); /* behind its digit */
    return json;
}

/* This worker's share of the open step, as many micro-batches as that has. */
static int share_step(shd_model *m, uint32_t rank, uint32_t workers, struct shd_result *ret_result,
                      struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    const struct shd_update update = toy_update(shd_step(m));
    uint32_t micros[MOST], count = 0;
    for (uint32_t i = rank; i < shd_micro_batches(m); i += workers)
        micros[count++] = i;
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
}

static void train(shd_model *m, uint64_t until)
{
    struct shd_err e = { 0 };
    while (shd_step(m) < until)
        EXPECT_OK(share_step(m, 0, 1, NULL, &e), &e);
}

static uint64_t set_ok(shd_model *m, const char *text, uint64_t at)
{
    struct shd_err e = { 0 };
    uint64_t from = UINT64_MAX;
    EXPECT_OK(shd_model_set(m, text, at, &from, &e), &e);
    return from;
}

static void expect_digest(shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
}

/* The same ramp, in the spec. norms may be NULL. */
static void reference(uint64_t steps, double norms[STEPS], char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec_with(RAMP));
    for (uint64_t step = 0; step < steps; step++) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(share_step(m, 0, 1, &result, &e), &e);
        if (norms != NULL)
            norms[step] = result.grad_norm;
    }
    digest_of(m, ret_hex);
    shd_close(s);
}

/* What makes that ramp of ROOM. */
static void set_ramp(shd_model *m)
{
    EXPECT_EQ(set_ok(m, "micro_batches=8", 2), 2);
    EXPECT_EQ(set_ok(m, "micro_batches=16", 4), 4);
    EXPECT_EQ(set_ok(m, "micro_batches=2", 6), 6);
}

static void expect_ended(pid_t pid)
{
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* -- The same bits ----------------------------------------------------------------------------- */

TEST(in_this_process_a_ramp_that_is_set_is_the_specs)
{
    struct shd_err e = { 0 };
    double norms[STEPS];
    char want[65];
    shd_session *s;
    reference(STEPS, norms, want);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec_with(ROOM));
    EXPECT_EQ(shd_micro_batches(m), 4);
    set_ramp(m);
    for (uint64_t step = 0; step < STEPS; step++) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_EQ(shd_micro_batches(m), ramp_of(step));
        EXPECT_OK(share_step(m, 0, 1, &result, &e), &e);
        EXPECT(result.grad_norm == norms[step]);
    }
    expect_digest(m, want);
    shd_close(s);
}

static pid_t other_worker(uint32_t rank, uint32_t workers)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec_with(ROOM), &m, &e));
    while (shd_step(m) < STEPS)
        MUST_OK(share_step(m, rank, workers, NULL, &e));
    shd_close(s);
    _exit(0);
}

TEST(owners_and_workers_make_no_difference)
{
    double norms[STEPS];
    struct shd_err e = { 0 };
    char want[65];
    reference(STEPS, norms, want);
    for (int owners = 1; owners <= 3; owners++)
        for (uint32_t workers = 1; workers <= 3; workers++) {
            pid_t pids[3] = { 0 };
            fixture_start(&daemons, owners, NULL);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, spec_with(ROOM));
            set_ramp(m);
            for (uint32_t rank = 1; rank < workers; rank++)
                pids[rank] = other_worker(rank, workers);
            while (shd_step(m) < STEPS) {
                const uint64_t step = shd_step(m);
                struct shd_result result = { .size = sizeof result };
                EXPECT_EQ(shd_micro_batches(m), ramp_of(step));
                EXPECT_OK(share_step(m, 0, workers, &result, &e), &e);
                if (shd_step(m) == step + 1 && !result.over)
                    EXPECT(result.grad_norm == norms[step]);
            }
            for (uint32_t rank = 1; rank < workers; rank++)
                expect_ended(pids[rank]);
            expect_digest(m, want);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* Without a step it is of the next one, for the open one has its number; and "spec" goes back to
 * what the spec says of each step. */
TEST(change_is_of_the_step_after_the_open_one)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *operator= attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with("[[0, 4], [3, 6]], \"micro_batches_max\": 16")),
              *om = open_toy(operator, spec_with("[[0, 4], [3, 6]], \"micro_batches_max\": 16"));
    EXPECT_EQ(set_ok(om, "micro_batches=9", 0), 1);
    EXPECT_EQ(set_ok(om, "micro_batches=9", 0), 1); /* again */
    EXPECT_STATUS(shd_model_set(om, "micro_batches=8", (UINT64_C(1) << 33) - 1, NULL, &e), SHD_OK);
    EXPECT_EQ(set_ok(om, "micro_batches=now", 0), 1); /* all of it given up */
    EXPECT_EQ(set_ok(om, "micro_batches=9", 0), 1);
    EXPECT_EQ(shd_micro_batches(m), 4);
    train(m, 1);
    EXPECT_EQ(shd_micro_batches(m), 9);
    EXPECT_STATUS(shd_model_set(om, "micro_batches=5", 1, NULL, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "step 1 has begun with its micro-batches: from step 2 on");
    EXPECT_EQ(set_ok(om, "micro_batches=5 clip_norm=0.5", 0), 2); /* both from one step on */
    EXPECT_EQ(set_ok(om, "micro_batches=spec", 3), 3);
    train(m, 2);
    EXPECT_EQ(shd_micro_batches(m), 5);
    train(m, 3);
    EXPECT_EQ(shd_micro_batches(m), 6);
    shd_close(operator);
    shd_close(s);
    fixture_stop(&daemons);
}

/* A worker that attaches, or is overtaken, knows the number, too. */
TEST(who_comes_later_knows_the_number)
{
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *late;
    shd_model *m = open_toy(s, spec_with(ROOM)), *lm;
    shd_session *idle = attach(PATIENT_MS);
    shd_model *im = open_toy(idle, spec_with(ROOM));
    struct shd_err e = { 0 };
    set_ok(m, "micro_batches=7", 1);
    train(m, 2);
    late = attach(PATIENT_MS);
    lm = open_toy(late, spec_with(ROOM));
    EXPECT_EQ(shd_micro_batches(lm), 7);
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(share_step(im, 0, 1, &result, &e), &e); /* of a step that is long over */
    EXPECT(result.over);
    EXPECT_EQ(shd_step(im), 2);
    EXPECT_EQ(shd_micro_batches(im), 7);
    train(lm, 3);
    shd_close(late);
    shd_close(idle);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Kills ------------------------------------------------------------------------------------- */

static pid_t elastic_worker(void)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    struct toy toy = { .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec_with(ROOM), &toy.m, &e));
    while (shd_step(toy.m) < STEPS) {
        const struct shd_update update = toy_update(shd_step(toy.m));
        MUST_OK(shd_run_step_elastic(toy.m, &compute, &update, NULL, &e));
        usleep(10000); /* or all is over before anybody is killed */
    }
    _exit(0);
}

TEST(ramp_that_is_set_survives_whatever_dies)
{
    uint64_t seed = test_seed(0x91c5);
    pid_t workers[2];
    char want[65];
    reference(STEPS, NULL, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with(ROOM));
    set_ramp(m);
    for (int i = 0; i < 2; i++)
        workers[i] = elastic_worker();
    for (int kills = 0; kills < 10; kills++) {
        const uint64_t who = test_random(&seed) >> 40;
        pid_t *worker = &workers[who % 2];
        fixture_restart(&daemons, (int)(who / 2 % 2));
        if (who / 4 % 2 == 0)
            continue;
        kill(*worker, SIGKILL);
        waitpid(*worker, NULL, 0);
        *worker = elastic_worker();
    }
    expect_ended(workers[0]);
    expect_ended(workers[1]);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_toy(s, spec_with(ROOM));
    EXPECT_EQ(shd_step(m), STEPS);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* All owners die in the commits that say the number, before and behind the word that makes them
 * count, in the change itself, and in the first sums of the step that it is of. */
TEST(owners_killed_at_the_change_go_on_with_what_was_set)
{
    static const char *const fails[] = {
        "step:commit:before@2;",
        "step:commit:after@2;",
        "step:commit:before@4;step:commit:after@1;",
        "step:metrics:after@9;",
        "step:promise:after@2;",
        "step:set:before;step:set:after;",
    };
    char want[65];
    reference(STEPS, NULL, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec_with(ROOM));
        set_ramp(m);
        train(m, STEPS);
        expect_digest(m, want);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

static bool is_over(shd_model *m, uint64_t step)
{
    struct shd_step_row row = { .size = sizeof row };
    uint32_t count = 0;
    return shd_history(m, &step, &row, 1, &count, /* e= */ NULL) == SHD_OK && count > 0;
}

/* A worker dies when owner 0 has said the number, in the commit that the other owner has not taken:
 * whoever passes the decision on tells it that number. */
TEST(worker_killed_between_two_owners_leaves_them_one_number)
{
    char want[65], hex[65];
    reference(STEPS, NULL, want);
    static const uint64_t steps[] = { 1, 3,
                                      6 }; /* the last ones before a change, and one of fewer */
    for (size_t i = 0; i < ARRAY_SIZE(steps); i++) {
        const uint64_t step = steps[i];
        fixture_start_kept(&daemons, 2, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec_with(ROOM));
        set_ramp(m);
        train(m, step);
        digest_of(m, hex); /* or its successor stops in the commit of that step, not of the next */
        fixture_ask(&daemons, KEEPER_KILL, 1, "");
        fixture_succeed(&daemons, 1, "step:commit:before!"); /* it stops there */
        digest_of(m, hex); /* or this session waits for its model's layout while it is stopped */
        const pid_t pid = elastic_worker();
        EXPECT_SOON(is_over(m, step));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        fixture_restart(&daemons, 1);
        shd_session *next = attach(PATIENT_MS);
        shd_model *nm = open_toy(next, spec_with(ROOM));
        EXPECT_EQ(shd_step(nm), step + 1);
        EXPECT_EQ(shd_micro_batches(nm), ramp_of(step + 1));
        train(nm, STEPS);
        expect_digest(nm, want);
        shd_close(next);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

/* -- Resets, puts, going back, forks, checkpoints ---------------------------------------------- */

TEST(reset_step_begins_again_with_what_was_set)
{
    struct shd_err e = { 0 };
    char want[65];
    reference(STEPS, NULL, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with(ROOM));
    set_ramp(m);
    for (uint64_t step = 0; step < STEPS; step++) {
        EXPECT_OK(shd_return_none(m, ramp_of(step) - 1, 0, &e), &e);
        EXPECT_STATUS(shd_return_none(m, ramp_of(step), 0, &e), SHD_ERANGE);
        EXPECT_OK(shd_reset_step(m, &e), &e);
        fixture_restart(&daemons, (int)step % 2);
        train(m, step + 1);
    }
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

static int fill_seven(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const shd_model *m = ctx;
    (void)array;
    for (uint64_t i = 0; i < shd_unit_elems(m, unit); i++)
        values[i] = 0.25F;
    return 0;
}

/* A put is a step, too: the number of the one behind it is said in its commit. */
TEST(put_says_the_number_of_the_step_behind_it)
{
    for (int owners = 0; owners <= 3; owners += 3) { /* 0: in this process */
        struct shd_err e = { 0 };
        shd_session *s, *other = NULL;
        shd_model *om = NULL;
        if (owners > 0)
            fixture_start(&daemons, owners, NULL);
        EXPECT_OK(try_connect(owners > 0 ? daemons.address : "local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_toy(s, spec_with(ROOM));
        uint8_t arrays[16] = { 0 };
        arrays[0] = SHD_PUT_PARAMS;
        const struct shd_put_options put = {
            .size = sizeof put, .arrays = arrays, .fill = fill_seven, .ctx = m
        };
        train(m, 1);
        EXPECT_EQ(set_ok(m, "micro_batches=11", 0), 2);
        EXPECT_OK(shd_put(m, &put, NULL, &e), &e);
        EXPECT_EQ(shd_step(m), 2);
        EXPECT_EQ(shd_micro_batches(m), 11);
        train(m, 3);
        if (owners > 0) {
            other = attach(PATIENT_MS);
            om = open_toy(other, spec_with(ROOM));
            EXPECT_EQ(shd_micro_batches(om), 11);
            train(om, 4);
        }
        shd_close(other);
        shd_close(s);
        if (owners > 0)
            fixture_stop(&daemons);
    }
}

TEST(going_back_finds_the_number_that_was_there)
{
    struct shd_err e = { 0 };
    char want[65];
    uint64_t step = 0;
    reference(STEPS, NULL, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with(ROOM)), *om = open_toy(other, spec_with(ROOM));
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(step, 0);
    set_ramp(m);
    train(m, 3);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(set_ok(m, "micro_batches=1", 5), 5); /* what was set since is gone with it */
    train(m, 6);
    EXPECT_OK(shd_model_rewind(m, 3, &step, &e), &e);
    EXPECT_EQ(shd_step(m), 3);
    EXPECT_EQ(shd_micro_batches(m), 8);
    fixture_restart(&daemons, 0);
    fixture_restart(&daemons, 1);
    train(m, STEPS);
    expect_digest(m, want);
    EXPECT_OK(shd_model_rewind(m, 0, &step, &e), &e); /* nothing was set then */
    EXPECT_EQ(shd_step(m), 0);
    EXPECT_EQ(shd_micro_batches(m), 4);
    set_ramp(m);
    train(m, STEPS);
    expect_digest(m, want);
    EXPECT_STATUS(share_step(om, 0, 1, NULL, &e), SHD_OK); /* told that it went back, or over */
    EXPECT_EQ(shd_micro_batches(om), 2);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(fork_has_the_number_and_what_waits)
{
    struct shd_err e = { 0 };
    char want[65];
    reference(STEPS, NULL, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with(ROOM)), *twin;
    set_ramp(m);
    train(m, 3);
    EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
    EXPECT_OK(shd_model_attach(s, "twin", &twin, &e), &e);
    EXPECT_EQ(shd_micro_batches(twin), 8);
    train(twin, STEPS);
    train(m, STEPS);
    expect_digest(m, want);
    expect_digest(twin, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(checkpoint_has_the_number_and_what_waits)
{
    char want[65];
    reference(STEPS, NULL, want);
    make_ckpts();
    for (int owners = 1; owners <= 3; owners += 2)
        for (uint64_t step = 1; step < 6; step += 2) {
            fixture_start(&daemons, 2, NULL);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, spec_with(ROOM));
            set_ramp(m);
            train(m, step);
            save_ok(m, 1);
            EXPECT_EQ(shell("grep -q '\"format\": 5' '%s'/step-*/shardd.json", ckpts), 0);
            shd_close(s);
            fixture_stop(&daemons);
            fixture_start(&daemons, owners, NULL);
            s = attach(PATIENT_MS);
            m = restore_ok(s, ckpts);
            EXPECT_EQ(shd_micro_batches(m), ramp_of(step));
            train(m, STEPS);
            expect_digest(m, want);
            shd_close(s);
            fixture_stop(&daemons);
            make_ckpts();
        }
    remove_ckpts();
}

/* -- What is refused --------------------------------------------------------------------------- */

static void expect_not_set(shd_model *m, const char *text, int status, const char *why)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(shd_model_set(m, text, 0, NULL, &e), status);
    EXPECT_HAS(e.text, why);
}

TEST(what_is_refused_changes_nothing)
{
    char want[65], *json;
    struct shd_err e = { 0 };
    shd_session *s, *other;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec_with("4"));
    train(m, 3);
    digest_of(m, want);
    shd_close(s);
    fixture_start(&daemons, 2, NULL);
    s = attach(PATIENT_MS);
    m = open_toy(s, spec_with("4"));
    train(m, 1);
    expect_not_set(m, "micro_batches=0", SHD_ERANGE, "must be a whole number, 1 to 4");
    expect_not_set(m, "micro_batches=5", SHD_ERANGE,
                   "laid out for 4: a spec with \"micro_batches_max\"");
    expect_not_set(m, "micro_batches=1.5", SHD_ERANGE, "must be a whole number");
    expect_not_set(m, "micro_batches.decay=2", SHD_EINVAL, "micro_batches=VALUE");
    s->hub->links[1].peer.level = WIRE_LEVEL_RULES; /* as a build without it says */
    expect_not_set(m, "micro_batches=2", SHD_ENOTSUP, "is of an older build");
    s->hub->links[1].peer.level = WIRE_LEVEL;
    m->map->owners[1].layout.room = 0; /* as one says that was opened by such a build */
    expect_not_set(m, "micro_batches=2", SHD_ENOTSUP, "shardctl restore --replace");
    m->map->owners[1].layout.room = 4;
    EXPECT_OK(shd_settings(m, &json, &e), &e);
    EXPECT_STR(json, "{\"now\":{},\"next\":null}");
    free(json);
    train(m, 2);
    EXPECT_EQ(set_ok(m, "micro_batches=2", 0), 3); /* fewer there can be in any model */
    train(m, 3);
    expect_digest(m, want);
    EXPECT_EQ(shd_micro_batches(m), 2);
    other = attach(PATIENT_MS);
    m = open_toy(other, spec_with("4"));
    EXPECT_EQ(shd_micro_batches(m), 2);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* The room is part of the spec: whoever opens the model with another one is told. */
TEST(another_room_is_another_spec)
{
    struct shd_err e = { 0 };
    shd_model *other = NULL;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS), *t = attach(PATIENT_MS);
    open_toy(s, spec_with(ROOM));
    EXPECT_STATUS(shd_model_open(t, spec_with("4"), &other, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "micro_batches_max is 4, the open model has 16");
    shd_close(t);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
