/* A step's number of micro-batches that changes while a model is trained, by its spec: the bits are
 * those of a run whose steps all have the most, of which the others take no part, with any number
 * of owners and workers, whatever is killed at the change. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS   6u
#define MOST    16u
#define RAMP    "[[0, 4], [2, 8], [4, 16]]"
#define DECAY   "weight_decay.decay=0.3"
#define DECAYED UINT64_C(3) /* the step from which on it is set */

static uint32_t ramp_of(uint64_t step)
{
    return step < 2 ? 4 : step < 4 ? 8 : 16;
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

/* Each micro-batch counts one, by which the oracle divides. */
static uint32_t counted_metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    (void)ctx;
    ret_metrics[0] = 1.0 / (micro + 3);
    ret_metrics[1] = 1;
    return 2;
}

static struct shd_compute compute_of(struct toy *toy)
{
    return (struct shd_compute){
        sizeof(struct shd_compute), toy, toy_forward, toy_backward, counted_metrics, NULL
    };
}

struct outcome {
    double norm, metric;
};

/* This worker's share of the open step, as many micro-batches as that has. */
static int share_step(shd_model *m, uint32_t rank, uint32_t workers, struct outcome *ret_outcome,
                      struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = compute_of(&toy);
    const struct shd_update update = toy_update(shd_step(m));
    struct shd_result result = { .size = sizeof result };
    uint32_t micros[MOST], count = 0;
    for (uint32_t i = rank; i < shd_micro_batches(m); i += workers)
        micros[count++] = i;
    const int r = shd_run_step(m, micros, count, &compute, &update, &result, e);
    if (ret_outcome != NULL)
        *ret_outcome = (struct outcome){ result.grad_norm, result.metrics[0] };
    return r;
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

/* A step of MOST micro-batches, of which those from `count` on take no part; its mean is over the
 * others. */
static void oracle_step(shd_model *m, uint32_t count, struct outcome *ret_outcome)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = compute_of(&toy);
    struct shd_result result = { .size = sizeof result };
    struct shd_update update = toy_update(shd_step(m));
    struct shd_err e = { 0 };
    uint32_t micros[MOST];
    update.divide_by = 2;
    for (uint32_t i = 0; i < MOST; i++)
        micros[i] = i;
    for (uint32_t i = count; i < MOST; i++)
        for (uint32_t u = 0; u < shd_units(m); u++)
            EXPECT_OK(shd_return_none(m, i, u, &e), &e);
    EXPECT_OK(shd_run_step(m, micros, count, &compute, &update, &result, &e), &e);
    *ret_outcome = (struct outcome){ result.grad_norm, result.metrics[0] };
}

static void oracle(uint32_t (*count)(uint64_t step), struct outcome outcomes[STEPS],
                   char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec_with("16"));
    EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
    for (uint64_t step = 0; step < STEPS; step++)
        oracle_step(m, count(step), &outcomes[step]);
    digest_of(m, ret_hex);
    shd_close(s);
}

static void expect_digest(shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
}

static void expect_ended(pid_t pid)
{
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* -- The same bits ----------------------------------------------------------------------------- */

TEST(in_this_process_a_ramp_is_a_run_in_which_the_others_take_no_part)
{
    struct shd_err e = { 0 };
    struct outcome want_of[STEPS], got;
    char want[65];
    shd_session *s;
    oracle(ramp_of, want_of, want);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec_with(RAMP));
    EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
    for (uint64_t step = 0; step < STEPS; step++) {
        EXPECT_EQ(shd_micro_batches(m), ramp_of(step));
        EXPECT_OK(share_step(m, 0, 1, &got, &e), &e);
        EXPECT(got.norm == want_of[step].norm && got.metric == want_of[step].metric);
    }
    expect_digest(m, want);
    shd_close(s);
}

static pid_t other_worker(const char *spec, uint32_t rank, uint32_t workers)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec, &m, &e));
    while (shd_step(m) < STEPS)
        MUST_OK(share_step(m, rank, workers, NULL, &e));
    shd_close(s);
    _exit(0);
}

TEST(owners_and_workers_make_no_difference)
{
    static const uint32_t workers_of[] = { 1, 2, 4,
                                           5 }; /* of five one has nothing to do at first */
    struct outcome want_of[STEPS], got;
    struct shd_err e = { 0 };
    char want[65];
    oracle(ramp_of, want_of, want);
    for (int owners = 1; owners <= 3; owners++)
        for (size_t i = 0; i < ARRAY_SIZE(workers_of); i++) {
            const uint32_t workers = workers_of[i];
            pid_t pids[5] = { 0 };
            fixture_start(&daemons, owners, NULL);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, spec_with(RAMP));
            EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
            for (uint32_t rank = 1; rank < workers; rank++)
                pids[rank] = other_worker(spec_with(RAMP), rank, workers);
            while (shd_step(m) < STEPS) {
                const uint64_t step = shd_step(m);
                EXPECT_OK(share_step(m, 0, workers, &got, &e), &e);
                if (shd_step(m) == step + 1) /* else others have ended the next one, too */
                    EXPECT(got.norm == want_of[step].norm);
            }
            for (uint32_t rank = 1; rank < workers; rank++)
                expect_ended(pids[rank]);
            expect_digest(m, want);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* -- Kills ------------------------------------------------------------------------------------- */

static pid_t elastic_worker(const char *spec, uint64_t steps)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    struct toy toy = { .fail_micro = -1 };
    const struct shd_compute compute = compute_of(&toy);
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec, &toy.m, &e));
    while (shd_step(toy.m) < steps) {
        const struct shd_update update = toy_update(shd_step(toy.m));
        MUST_OK(shd_run_step_elastic(toy.m, &compute, &update, NULL, &e));
        usleep(10000); /* or all is over before anybody is killed */
    }
    _exit(0);
}

/* Owners and workers die all the time, in every step that changes the number and around it. */
TEST(ramp_survives_whatever_dies)
{
    struct outcome want_of[STEPS];
    uint64_t seed = test_seed(0x4a3b);
    pid_t workers[2];
    char want[65];
    oracle(ramp_of, want_of, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with(RAMP));
    EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
    for (int i = 0; i < 2; i++)
        workers[i] = elastic_worker(spec_with(RAMP), STEPS);
    for (int kills = 0; kills < 10; kills++) {
        const uint64_t who = test_random(&seed) >> 40;
        pid_t *worker = &workers[who % 2];
        fixture_restart(&daemons, (int)(who / 2 % 2));
        if (who / 4 % 2 == 0)
            continue;
        kill(*worker, SIGKILL);
        waitpid(*worker, NULL, 0);
        *worker = elastic_worker(spec_with(RAMP), STEPS);
    }
    expect_ended(workers[0]);
    expect_ended(workers[1]);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_toy(s, spec_with(RAMP));
    EXPECT_EQ(shd_step(m), STEPS);
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* All owners die in the commit of the step before a change, before and behind the word that makes
 * it count, and in the first sums of the larger step. */
TEST(owners_killed_at_the_change_go_on_with_the_steps_own_number)
{
    static const char *const fails[] = { "step:commit:before@2;", "step:commit:after@2;",
                                         "step:commit:before@4;step:commit:after@1;",
                                         "step:metrics:after@9;" };
    struct outcome want_of[STEPS];
    char want[65];
    oracle(ramp_of, want_of, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec_with(RAMP));
        EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
        train(m, STEPS);
        expect_digest(m, want);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

/* -- Leases, resets, checkpoints --------------------------------------------------------------- */

TEST(leases_are_of_the_steps_own_micro_batches)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with("[[0, 2], [1, 5]]"));
    for (uint64_t step = 0; step < 2; step++) {
        const uint32_t want = step == 0 ? 2 : 5;
        enum shd_lease_what what = SHD_LEASE_MICRO;
        uint32_t micro, leased = 0, seen = 0;
        while (what == SHD_LEASE_MICRO && leased <= want) {
            EXPECT_OK(shd_lease(m, &what, &micro, &e), &e);
            if (what == SHD_LEASE_MICRO) {
                seen |= 1u << micro;
                for (uint32_t u = 0; u < shd_units(m); u++)
                    EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
                leased++;
            }
        }
        EXPECT_EQ(leased, want);
        EXPECT_EQ(seen, (1u << want) - 1);
        EXPECT_EQ(what, SHD_LEASE_ALL_IN);
        EXPECT_STATUS(shd_return_none(m, want, 0, &e), SHD_ERANGE);
        EXPECT(!shd_is_in(m, want));
        const struct shd_update update = toy_update(step);
        EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(reset_step_begins_again_with_its_own_number)
{
    struct shd_err e = { 0 };
    struct outcome want_of[STEPS];
    char want[65];
    oracle(ramp_of, want_of, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_with(RAMP));
    EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
    for (uint64_t step = 0; step < STEPS; step++) {
        EXPECT_OK(shd_return_none(m, ramp_of(step) - 1, 0, &e), &e);
        EXPECT_OK(shd_reset_step(m, &e), &e);
        fixture_restart(&daemons, (int)step % 2);
        train(m, step + 1);
    }
    expect_digest(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(checkpoint_before_the_change_is_restored_with_it)
{
    struct outcome want_of[STEPS];
    char want[65];
    oracle(ramp_of, want_of, want);
    make_ckpts();
    for (int owners = 1; owners <= 3; owners += 2) {
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec_with(RAMP));
        EXPECT_EQ(set_ok(m, DECAY, DECAYED), DECAYED);
        train(m, 4);
        save_ok(m, 1);
        shd_close(s);
        fixture_stop(&daemons);
        fixture_start(&daemons, owners, NULL);
        s = attach(PATIENT_MS);
        m = restore_ok(s, ckpts);
        EXPECT_EQ(shd_micro_batches(m), 16);
        train(m, STEPS);
        expect_digest(m, want);
        shd_close(s);
        fixture_stop(&daemons);
        make_ckpts();
    }
    remove_ckpts();
}

TEST_MAIN()
