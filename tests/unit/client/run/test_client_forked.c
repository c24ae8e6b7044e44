/* A second model of what one is at its open step: it and the first go on as two separate runs
 * would; it is there at all owners or at none, whatever is killed. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/look.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
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

/* What a guard has stopped stays stopped in a fork, and what was let go on goes on there. */
TEST(a_fork_is_stopped_as_its_model_is)
{
    static char json[5000];
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    snprintf(json, sizeof json, "{ \"guard\": [{\"norm_above\": 1e-9, \"action\": \"stop\"}], %s",
             TOY + 1);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, json), *stopped, *on;
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.stopped);
    EXPECT_OK(shd_model_fork(m, "stopped", NULL, &e), &e);
    EXPECT_OK(shd_model_set(m, "guard=go-on", 0, NULL, &e), &e);
    EXPECT_OK(shd_model_fork(m, "on", NULL, &e), &e);
    EXPECT_OK(shd_model_attach(other, "stopped", &stopped, &e), &e);
    EXPECT_OK(shd_model_attach(other, "on", &on, &e), &e);
    EXPECT_STATUS(toy_step(stopped, toy_all_micros, TOY_MICROS, &result, &e), SHD_ESTOPPED);
    EXPECT_OK(toy_step(on, toy_all_micros, TOY_MICROS, &result, &e), &e);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Of a step that is kept ---------------------------------------------------------------------
 */

static int fork_at(shd_model *m, const char *name, uint64_t at, uint64_t *ret_step,
                   struct shd_err *e)
{
    const struct shd_fork_options options = { .size = sizeof options, .exact = true, .step = at };
    return shd_model_fork_with(m, name, &options, ret_step, e);
}

static int fork_set(shd_model *m, const char *name, const char *set, struct shd_err *e)
{
    const struct shd_fork_options options = { .size = sizeof options, .set = set };
    return shd_model_fork_with(m, name, &options, NULL, e);
}

static const char *averaged_spec(void)
{
    static char json[5000];
    snprintf(json, sizeof json, "{ \"ema\": 0.5, %s", TOY + 1);
    return json;
}

/* A run that stopped at 3 and was forked there. */
TEST(a_step_that_is_kept_is_forked_as_one_that_is_open)
{
    for (int run = 0; run < 6; run++) {
        const char *spec = run % 2 == 1 ? averaged_spec() : TOY;
        const int owners = 1 + run / 2;
        struct shd_err e = { 0 };
        char three[65], five[65], seven[65], got[65];
        uint64_t step = 0;
        toy_reference(spec, 3, three);
        toy_reference(spec, 5, five);
        toy_reference(spec, 7, seven);
        fixture_start_kept(&daemons, owners, "");
        shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec), *twin;
        EXPECT_STATUS(fork_at(m, "twin", 3, &step, &e), SHD_ESTEP);
        EXPECT_HAS(e.text, "no step 3 to fork: its open step is 0, and it has no snapshots");
        train_steps(m, 3);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        train_steps(m, 4);
        if (run == 2) /* and a successor's as well */
            fixture_restart(&daemons, 1);
        EXPECT_OK(fork_at(m, "twin", 3, &step, &e), &e);
        EXPECT_EQ(step, 3);
        EXPECT_STATUS(fork_at(m, "third", 5, &step, &e), SHD_ESTEP);
        EXPECT_HAS(e.text,
                   "no step 5 to fork: its open step is 7, and it has snapshots of steps 3");
        EXPECT_STATUS(fork_at(m, "third", 8, &step, &e), SHD_ESTEP);
        EXPECT_OK(fork_at(m, "third", 7, &step, &e), &e); /* the open one */
        digest_at(m, 7, got);
        EXPECT_STR(got, seven);
        EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
        digest_at(twin, 3, got);
        EXPECT_STR(got, three);
        train_steps(twin, 2);
        digest_at(twin, 5, got);
        EXPECT_STR(got, five);
        shd_close(other);
        for (int i = 0; i < owners; i++)
            fixture_restart(&daemons, i);
        other = attach(PATIENT_MS);
        EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
        digest_at(twin, 5, got);
        EXPECT_STR(got, five);
        shd_close(other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Counts, blob and settings are those of then. */
TEST(all_that_a_kept_step_has_is_forked)
{
    static const char blob[] = "then";
    struct shd_err e = { 0 };
    char got[16], *then, *of_twin;
    float values[8192];
    size_t bytes;
    uint64_t step, updates, from;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin;
    EXPECT_OK(shd_model_set(m, "lr_scale=0.5", 0, &from, &e), &e);
    train_steps(m, 1);
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = {
        sizeof compute, &toy, toy_forward, toy_backward, NULL, NULL
    };
    struct shd_update update = toy_update(1);
    update.blob = blob;
    update.blob_bytes = sizeof blob;
    EXPECT_OK(shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, &e), &e);
    EXPECT_OK(shd_settings(m, &then, &e), &e);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_model_set(m, "lr_scale=0.25 clip_norm=1", 0, &from, &e), &e);
    train_steps(m, 2);
    EXPECT_OK(fork_at(m, "twin", 2, &step, &e), &e);
    EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
    EXPECT_OK(shd_settings(twin, &of_twin, &e), &e);
    EXPECT_STR(of_twin, then);
    EXPECT_OK(shd_get(twin, 1, SHD_PARAMS, values, &step, &updates, &e), &e);
    EXPECT_EQ(step, 2);
    EXPECT_EQ(updates, 2);
    EXPECT_OK(shd_blob(twin, got, sizeof got, &bytes, &e), &e);
    EXPECT_EQ(bytes, sizeof blob);
    EXPECT_STR(got, blob);
    free(then);
    free(of_twin);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Snapshots come and go while it is forked: one that is read stays until that is done. */
TEST(a_snapshot_that_is_forked_while_others_take_its_place_is_whole)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    uint32_t whole = 0;
    fixture_start_kept(&daemons, 2, "");
    const pid_t pid = trainer_fork(TOY, 0, 1, 3 * STEPS);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin;
    EXPECT_OK(shd_snapshot_every(m, 1, 1, &e), &e);
    while (look_furthest(m) < 3 * STEPS && whole < 6) {
        struct shd_snapshot_row row = { .size = sizeof row };
        uint32_t count = 0;
        uint64_t step = 0;
        EXPECT_OK(shd_snapshots(m, &row, 1, &count, &e), &e);
        if (count == 0)
            continue;
        const int r = fork_at(m, "twin", row.step, &step, &e);
        EXPECT(r == SHD_OK || r == SHD_ESTEP);
        if (r != SHD_OK)
            continue;
        shd_session *other = attach(PATIENT_MS);
        EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
        toy_reference(TOY, (uint32_t)step, want);
        digest_at(twin, step, got);
        EXPECT_STR(got, want);
        shd_model_close(twin);
        EXPECT_OK(shd_model_drop(other, "twin", NULL, &e), &e);
        shd_close(other);
        whole++;
    }
    expect_well(pid);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
static _Atomic bool *held; /* shared with the daemon: its device goes no further */

static void hold_device(const char *name)
{
    const bool here = strcmp(name, "kern:done:before") == 0 && gettid() != getpid();
    for (int i = 0; here && i < 20000 && atomic_load(held); i++) /* not the loop's thread */
        usleep(1000);
}

static void set_hook(int index)
{
    (void)index;
    fail_point_hook = hold_device;
}

static void *fork_middle(void *ctx)
{
    uint64_t *at = ctx;
    struct shd_err e = { 0 };
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    EXPECT_OK(fork_at(m, "third", *at, NULL, &e), &e);
    shd_close(s);
    return NULL;
}

/* Of another model, in whose work the device is held; one that is large, for what is small the
 * loop's thread does itself. */
static void *train_wide(void *ctx)
{
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_err e = { 0 };
    float *grad;
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, ctx);
    EXPECT_OK(shd_grad(m, 0, 0, &grad, &e), &e);
    atomic_store(held, true);
    EXPECT_OK(shd_return(m, 0, 0, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    shd_close(s);
    return NULL;
}

/* The copy is queued behind what does not end; meanwhile all snapshots but the last are given up,
 * and of their memory one is kept. */
static void give_up_while_forked(shd_model *m, uint64_t step)
{
    struct shd_err e = { 0 };
    static char wide[] = "{\"name\": \"wide\", \"micro_batches\": 1, \"optimizer\": {\"kind\": "
                         "\"adamw\"}, \"units\": [{\"name\": \"u\", \"tensors\": [{\"name\": "
                         "\"w\", \"shape\": [1024, 1024]}]}]}";
    char want[65], got[65];
    pthread_t threads[2];
    shd_session *other = attach(PATIENT_MS);
    shd_model *third;
    CHECK(pthread_create(&threads[0], NULL, train_wide, wide) == 0);
    EXPECT_SOON(atomic_load(held));
    CHECK(pthread_create(&threads[1], NULL, fork_middle, &step) == 0);
    usleep(300000); /* until it is queued; else nothing is seen */
    EXPECT_OK(shd_snapshot_every(m, 0, 1, &e), &e);
    atomic_store(held, false);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    EXPECT_OK(shd_model_attach(other, "third", &third, &e), &e);
    toy_reference(TOY, (uint32_t)step, want);
    digest_at(third, step, got);
    EXPECT_STR(got, want);
    shd_close(other);
}

TEST(memory_of_a_snapshot_stays_until_it_is_copied)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    held = mmap(NULL, sizeof *held, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(held != MAP_FAILED);
    fixture_start(&daemons, 1, set_hook);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    EXPECT_OK(shd_snapshot_every(m, 0, 4, &e), &e);
    for (int i = 0; i < 4; i++) {
        train_steps(m, 1);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    }
    give_up_while_forked(m, step - 1);
    train_steps(m, 1);
    shd_close(s);
    munmap((void *)held, sizeof *held);
    fixture_stop(&daemons);
}
#endif

/* -- With what is other -------------------------------------------------------------------------
 */

static int eight_steps(shd_model *m, uint32_t steps, struct shd_err *e)
{
    static const uint32_t micros[] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    struct shd_result result = { .size = sizeof result };
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < steps; i++)
        r = toy_step(m, micros, shd_micro_batches(m), &result, e);
    return r;
}

/* The toy with a ramp from 4 to 8 micro-batches at step 3, after `steps`. */
static void ramp_reference(uint32_t steps, char ret_hex[65])
{
    static char json[5000];
    static const char key[] = "\"micro_batches\": ";
    const char *toy = TOY, *at = strstr(toy, key);
    struct shd_err e = { 0 };
    shd_session *s;
    CHECK(at != NULL);
    at += strlen(key);
    snprintf(json, sizeof json, "%.*s[[0, 4], [3, 8]]%s", (int)(at - toy), toy, at + 1);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, json);
    EXPECT_OK(eight_steps(m, steps, &e), &e);
    digest_of(m, ret_hex);
    shd_close(s);
}

/* As a run whose spec had it from that step on. */
TEST(a_fork_has_other_micro_batches_from_its_first_step_on)
{
    for (int kept = 0; kept < 2; kept++) {
        const struct shd_fork_options options = {
            .size = sizeof options, .exact = kept != 0, .step = 3, .set = "micro_batches=8"
        };
        struct shd_err e = { 0 };
        char three[65], five[65], got[65];
        uint64_t step;
        toy_reference(TOY, 3, three);
        ramp_reference(5, five);
        fixture_start_kept(&daemons, 1 + kept, "");
        shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
        shd_model *m = open_toy(s, TOY), *twin;
        train_steps(m, 3);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        if (kept != 0)
            train_steps(m, 2);
        EXPECT_OK(shd_model_fork_with(m, "twin", &options, &step, &e), &e);
        EXPECT_EQ(step, 3);
        EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
        digest_at(twin, 3, got);
        EXPECT_STR(got, three);
        EXPECT_EQ(shd_micro_batches(twin), 8);
        EXPECT_EQ(shd_micro_batches(m), 4);
        EXPECT_OK(eight_steps(twin, 2, &e), &e);
        digest_at(twin, 5, got);
        EXPECT_STR(got, five);
        shd_close(other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* As one in which they are set before anything is trained. */
TEST(settings_of_a_fork_hold_from_its_first_step_on)
{
    struct shd_err e = { 0 };
    char plain[65], want[65], got[65];
    uint64_t from = 9;
    fixture_start_kept(&daemons, 3, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin, *third;
    EXPECT_OK(shd_model_set(m, "weight_decay=0.3", 0, &from, &e), &e);
    train_steps(m, 2);
    EXPECT_OK(fork_set(m, "twin", "lr_scale=0.5 clip_norm=0.01", &e), &e);
    EXPECT_OK(shd_model_fork(m, "third", NULL, &e), &e);
    EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
    EXPECT_OK(shd_model_attach(other, "third", &third, &e), &e);
    EXPECT_OK(shd_model_set(third, "lr_scale=0.5 clip_norm=0.01", 0, &from, &e), &e);
    EXPECT_EQ(from, 2);
    train_steps(m, 2);
    train_steps(twin, 2);
    train_steps(third, 2);
    digest_at(m, 4, plain);
    digest_at(twin, 4, got);
    digest_at(third, 4, want);
    EXPECT_STR(got, want);
    EXPECT(strcmp(got, plain) != 0);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(fields_of_the_spec_are_other_and_the_state_is_the_same)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    char two[65], got[65];
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *twin;
    train_steps(m, 2);
    digest_at(m, 2, two);
    EXPECT_OK(fork_set(m, "twin",
                       "{\"publish\": \"bf16\", \"guard\": [{\"norm_above\": 1e-9}], "
                       "\"eps\": 1e-6, \"lr_scale\": 0.5}",
                       &e),
              &e);
    EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
    digest_at(twin, 2, got);
    EXPECT_STR(got, two);
    EXPECT_EQ(shd_param_dtype(twin), SHD_BF16);
    EXPECT_HAS(shd_model_spec(twin), "norm_above");
    EXPECT_OK(toy_step(twin, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.skipped);
    EXPECT_STATUS(fork_set(m, "third", "ema=0.9", &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "a fork of model 'toy': model 'toy' has no moving average");
    EXPECT_STATUS(fork_set(m, "third", "optimizer=lion", &e), SHD_EINVAL);
    shd_session *third = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_attach(third, "third", &twin, &e), SHD_ENOENT);
    shd_close(third);
    EXPECT_OK(shd_model_set(m, "clip_norm=1", 9, NULL, &e), &e); /* it waits in both */
    EXPECT_OK(fork_set(m, "third", "lr_scale=0.5", &e), &e);
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
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
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

/* The same of a kept step, with settings. */
TEST(daemons_killed_in_the_middle_fork_a_kept_step_whole)
{
    static const char *const fails[] = {
        "",
        "fork:copied@1;",
        "create:full:before@1;",
        "create:full:after@1;",
        "create:ready:before@1;",
        "create:ready:after@1;",
        "fork:copied@1;fork:copied@1;",
        "create:full:after@1;adopt:repair:before@1;",
    };
    const struct shd_fork_options options = {
        .size = sizeof options, .exact = true, .step = 3, .set = "lr_scale=0.5 micro_batches=8"
    };
    char want[65] = "", three[65], got[65];
    toy_reference(TOY, 3, three);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        uint64_t step = 0;
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, TOY), *twin;
        train_steps(m, 3);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        train_steps(m, 2);
        EXPECT_OK(shd_model_fork_with(m, "twin", &options, &step, &e), &e);
        EXPECT_EQ(step, 3);
        EXPECT_SOON(i == 0 || fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        shd_session *other = attach(PATIENT_MS);
        EXPECT_OK(shd_model_attach(other, "twin", &twin, &e), &e);
        digest_at(twin, 3, got);
        EXPECT_STR(got, three);
        EXPECT_OK(eight_steps(twin, 1, &e), &e);
        digest_at(twin, 4, i == 0 ? want : got);
        EXPECT(i == 0 || strcmp(got, want) == 0);
        shd_close(other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

TEST_MAIN()
