/* Saving while training goes on: exactly one step whatever runs, dies or is in the way. */
#include <errno.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"
#include "tests/lib/client_remote.h"

#define STEPS_MAX 6000u

/* -- A trainer in a process of its own ----------------------------------------------------------
 */

struct shared {
    _Atomic bool stop;
    _Atomic uint64_t step;
};
static struct shared *shared;
static pid_t trainer;

/* One step whose blob says which it was. */
static int step_with_blob(shd_model *m, struct shd_err *e)
{
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    struct shd_update update = toy_update(shd_step(m));
    const uint64_t step = shd_step(m);
    update.blob = &step;
    update.blob_bytes = sizeof step;
    return shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, NULL, e);
}

__attribute__((noreturn)) static void be_trainer(const char *spec, long pause_ms)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, spec, &m, &e);
    while (r == SHD_OK && !atomic_load(&shared->stop) && shd_step(m) < STEPS_MAX) {
        r = step_with_blob(m, &e);
        atomic_store(&shared->step, shd_step(m));
        if (pause_ms > 0)
            sleep_ms(pause_ms);
    }
    if (r != SHD_OK)
        fprintf(stderr, "trainer: %s\n", e.text);
    _exit(r == SHD_OK ? 0 : 1);
}

static void start_trainer(const char *spec, long pause_ms)
{
    if (shared == NULL) {
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                      0);
        CHECK(shared != MAP_FAILED);
    }
    atomic_store(&shared->stop, false);
    atomic_store(&shared->step, 0);
    trainer = fork();
    CHECK(trainer >= 0);
    if (trainer == 0)
        be_trainer(spec, pause_ms);
    EXPECT_SOON(atomic_load(&shared->step) > 0);
}

static uint64_t stop_trainer(void)
{
    int status;
    atomic_store(&shared->stop, true);
    EXPECT_EQ(waitpid(trainer, &status, 0), trainer);
    EXPECT_EQ(status, 0);
    return atomic_load(&shared->step);
}

static shd_model *attach_toy(shd_session *s)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    return m;
}

/* The digests of steps wanted[count] (ascending) of an undisturbed run. */
static void expect_digests(const char *spec, const struct shd_checkpointed *saved, uint32_t count)
{
    struct shd_err e = { 0 };
    shd_session *s;
    char hex[65];
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    shd_model *m = open_toy(s, spec);
    for (uint32_t i = 0; i < count; i++) {
        while (shd_step(m) < saved[i].step)
            EXPECT_OK(step_with_blob(m, &e), &e);
        EXPECT_EQ(shd_step(m), saved[i].step);
        digest_of(m, hex);
        EXPECT_STR(saved[i].digest, hex);
        EXPECT_EQ(saved[i].updates, saved[i].step);
    }
    shd_close(s);
}

static void expect_blob(const struct shd_checkpointed *saved)
{
    struct shd_err e = { 0 };
    struct ckpt_info info;
    char path[700];
    int fd;
    uint64_t step;
    snprintf(path, sizeof path, "%s/%s", ckpts, saved->name);
    EXPECT_OK(ckpt_open_dir(path, &fd, &e), &e);
    EXPECT_OK(ckpt_info_read(fd, &info, &e), &e);
    close(fd);
    EXPECT(info.has_decision && info.blob_bytes == sizeof step);
    memcpy(&step, info.blob, sizeof step);
    EXPECT_EQ(step + 1, saved->step);
    ckpt_info_deinit(&info);
}

/* Slow disks: only where fail points are compiled in; elsewhere it is fast. */
#ifdef SHD_FAIL_POINTS
static void slow_write(const char *name)
{
    if (strcmp(name, "checkpoint:write:before") == 0)
        sleep_ms(3);
}
static void slow_disk(int index)
{
    (void)index;
    fail_point_hook = slow_write;
}
#else
#define slow_disk NULL
#endif

/* -- Exactly one step ---------------------------------------------------------------------------
 */

static void save_while_training(int owners, long pause_ms)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_checkpointed saved[8];
    make_ckpts();
    fixture_start(&daemons, owners, slow_disk);
    start_trainer(spec, pause_ms);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = attach_toy(s);
    for (uint32_t i = 0; i < ARRAY_SIZE(saved); i++) {
        saved[i] = save_ok(m, 0);
        expect_blob(&saved[i]);
        EXPECT(i == 0 || saved[i].step >= saved[i - 1].step);
        sleep_ms(5 * (long)i);
    }
    shd_close(s);
    EXPECT(stop_trainer() >= saved[7].step);
    fixture_stop(&daemons);
    expect_digests(spec, saved, ARRAY_SIZE(saved));
    expect_all_good();
    remove_ckpts();
}

/* Half of each step's micro-batches, and a blob that is this worker's own. */
__attribute__((noreturn)) static void be_half(uint32_t half)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e);
    while (r == SHD_OK) {
        struct toy toy = { .m = m, .fail_micro = -1 };
        const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                             toy_backward,   toy_metrics, NULL };
        struct shd_update update = toy_update(shd_step(m));
        update.blob = &half;
        update.blob_bytes = sizeof half;
        r = shd_run_step(m, toy_all_micros + 2 * half, 2, &compute, &update, NULL, &e);
    }
    printf("half %u: %s\n", half, e.text);
    _exit(1);
}

/* Both commit each step, to one owner after the other: either's may be the first at each. */
TEST(blobs_of_workers_may_differ)
{
    pid_t halves[2];
    make_ckpts();
    fixture_start(&daemons, 3, NULL);
    for (uint32_t i = 0; i < 2; i++) {
        halves[i] = fork();
        CHECK(halves[i] >= 0);
        if (halves[i] == 0)
            be_half(i);
    }
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = NULL;
    struct shd_err e = { 0 };
    EXPECT_SOON(shd_model_attach(s, "toy", &m, &e) == SHD_OK);
    for (int i = 0; i < 60; i++)
        save_ok(m, 1);
    for (uint32_t i = 0; i < 2; i++) {
        kill(halves[i], SIGKILL);
        waitpid(halves[i], NULL, 0);
    }
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST(a_checkpoint_is_exactly_one_step_while_steps_fly_by)
{
    save_while_training(1, 0);
    save_while_training(3, 0);
}

TEST(a_checkpoint_is_exactly_one_step_while_steps_take_a_while)
{
    save_while_training(2, 10);
}

TEST(an_asked_for_step_is_waited_for)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_err e = { 0 };
    struct shd_checkpointed saved = { .size = sizeof saved };
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    start_trainer(spec, 5);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = attach_toy(s);
    /* A step that does not come before it is asked for, however late this process has its turn. */
    const struct shd_checkpoint_options options = {
        .size = sizeof options, .step = atomic_load(&shared->step) + test_paced(40)
    };
    EXPECT_OK(shd_checkpoint(m, ckpts, &options, &saved, &e), &e);
    EXPECT_EQ(saved.step, options.step);
    shd_close(s);
    stop_trainer();
    fixture_stop(&daemons);
    expect_digests(spec, &saved, 1);
    remove_ckpts();
}

/* The trainer itself saves, between its steps. */
TEST(a_trainer_saves_without_waiting)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_err e = { 0 };
    struct shd_checkpointed saved = { .size = sizeof saved };
    bool done = false;
    make_ckpts();
    fixture_start(&daemons, 2, slow_disk);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec);
    for (int k = 0; k < 3; k++)
        EXPECT_OK(step_with_blob(m, &e), &e);
    EXPECT_STATUS(shd_checkpoint_poll(m, &done, NULL, &e), SHD_EINVAL);
    EXPECT_OK(shd_checkpoint_begin(m, ckpts, NULL, &e), &e);
    EXPECT_STATUS(shd_checkpoint_begin(m, ckpts, NULL, &e), SHD_EBUSY);
    const uint64_t deadline = test_now_ms() + TEST_HANG_MS;
    while (!done && test_now_ms() < deadline) {
        EXPECT_OK(step_with_blob(m, &e), &e);
        EXPECT_OK(shd_checkpoint_poll(m, &done, &saved, &e), &e);
    }
    EXPECT(done);
    EXPECT_OK(shd_checkpoint_begin(m, ckpts, NULL, &e), &e);
    shd_close(s); /* breaks it off */
    fixture_stop(&daemons);
    EXPECT(saved.step >= 3);
    EXPECT_EQ(shell("! ls -a %s | grep -q partial", ckpts), 0);
    expect_digests(spec, &saved, 1);
    EXPECT_EQ(expect_all_good(), 1);
    remove_ckpts();
}

/* -- In the way ---------------------------------------------------------------------------------
 */

/* Whether a request waits there. */
static bool has_pending(int index)
{
    const struct http_reply r = http_get(&daemons, index, "/status");
    EXPECT_EQ(r.code, 200);
    const bool pending = strstr(r.body, "\"requests_pending\":1") != NULL;
    free(r.text);
    return pending;
}

TEST(one_saver_at_a_time)
{
    struct shd_err e = { 0 };
    bool done = false;
    char other[320];
    make_ckpts();
    snprintf(other, sizeof other, "%s/other", ckpts);
    fixture_start(&daemons, 2, NULL);
    shd_session *a = attach(PATIENT_MS), *b = attach(PATIENT_MS);
    shd_model *ma = open_toy(a, toy_spec("f32", TOY_ADAMW)), *mb = attach_toy(b);
    const struct shd_checkpoint_options later = { .size = sizeof later, .step = 3 };
    EXPECT_SOON(!has_pending(0) && !has_pending(1)); /* what is shown is of a moment ago */
    EXPECT_OK(shd_checkpoint_begin(ma, ckpts, &later, &e), &e);
    EXPECT_SOON(has_pending(0) && has_pending(1));
    EXPECT_STATUS(shd_checkpoint(mb, ckpts, NULL, NULL, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "another process saves in");
    EXPECT_STATUS(shd_checkpoint(mb, other, NULL, NULL, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "has a checkpoint of model 'toy' under way");
    train_steps(ma, 4); /* it comes, and is captured before it goes */
    EXPECT_SOON(shd_checkpoint_poll(ma, &done, NULL, &e) != SHD_OK || done);
    EXPECT(done);
    expect_latest("step-000000000003");
    EXPECT_OK(shd_checkpoint(mb, other, NULL, NULL, &e), &e);
    shd_close(a);
    shd_close(b);
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST(retention_removes_the_oldest)
{
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    for (int k = 0; k < 5; k++) {
        save_ok(m, k == 4 ? 2 : 0);
        train_steps(m, 1);
    }
    EXPECT(!exists("step-000000000002") && exists("step-000000000003"));
    expect_latest("step-000000000004");
    EXPECT_EQ(expect_all_good(), 2);
    save_ok(m, 1);
    EXPECT_EQ(expect_all_good(), 1);
    expect_latest("step-000000000005");
    save_ok(m, 1); /* the same step again takes its place */
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT_EQ(shell("test $(ls -A %s | wc -l) = 3", ckpts), 0); /* and .lock and LATEST */
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* A run that begins anew saves in a directory of its own. */
TEST(later_steps_of_another_run_are_not_mixed_with)
{
    struct shd_err e = { 0 };
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 3);
    save_ok(m, 0);
    train_steps(m, 1);
    save_ok(m, 0);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 2, NULL);
    s = attach(PATIENT_MS);
    m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 2);
    const struct shd_checkpoint_options keep = { .size = sizeof keep, .keep = 1, .step = 5 };
    EXPECT_STATUS(shd_checkpoint(m, ckpts, &keep, NULL, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "holds later steps (3, 4) than step 2");
    EXPECT_EQ(expect_all_good(), 2);
    EXPECT_EQ(shell("! ls -a %s | grep -q partial", ckpts), 0);
    train_steps(m, 2);
    save_ok(m, 0); /* the same step is its own */
    EXPECT_EQ(expect_all_good(), 2);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* -- File systems whose renames know no flags ---------------------------------------------------
 */

static int no_flags(enum sys_kind kind)
{
    return kind == SYS_RENAME ? EINVAL : 0;
}

/* As if killed between the two renames, or behind them: what was there is found, then put back. */
static void expect_mended(shd_model *m, const char *command)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified v;
    EXPECT_EQ(shell("cd %s && %s", ckpts, command), 0);
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e);
    EXPECT_EQ(v.step, 1);
    const struct shd_checkpoint_options never = { .size = sizeof never, .step = 9 };
    EXPECT_OK(shd_checkpoint_begin(m, ckpts, &never, &e), &e);
    save_free(m->saving);
    m->saving = NULL;
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e);
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT_EQ(shell("test $(ls -A %s | wc -l) = 3", ckpts), 0); /* and .lock and LATEST */
}

TEST(the_same_step_is_replaced_without_flags_too)
{
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    sys_fault = no_flags;
    save_ok(m, 0);
    save_ok(m, 0);
    sys_fault = NULL;
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT_EQ(shell("test $(ls -A %s | wc -l) = 3", ckpts), 0);
    expect_mended(m, "mv step-000000000001 .step-000000000001.old");
    expect_mended(m, "cp -r step-000000000001 .step-000000000001.old");
    expect_mended(m, "cp -r step-000000000001 .step-000000000001.old && "
                     "rm .step-000000000001.old/shardd.json");
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* Killed between the name and LATEST: the later one is whole, and gone on from. */
TEST(a_step_that_latest_does_not_name_yet_is_the_newest)
{
    struct shd_err e = { 0 };
    struct checkpoint_verified v;
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    save_ok(m, 0);
    EXPECT_EQ(shell("cp -p %s/LATEST %s/was", ckpts, ckpts), 0);
    train_steps(m, 1);
    save_ok(m, 0);
    EXPECT_EQ(shell("cd %s && mv LATEST is && mv was LATEST", ckpts), 0);
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e);
    EXPECT_EQ(v.step, 2);
    EXPECT_EQ(shell("touch %s/LATEST", ckpts), 0); /* set back by hand, after step 2 */
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e);
    EXPECT_EQ(v.step, 1);
    EXPECT_EQ(shell("rm %s/LATEST", ckpts), 0);
    EXPECT_OK(checkpoint_verify(ckpts, &v, &e), &e);
    EXPECT_EQ(v.step, 2);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* -- Deaths -------------------------------------------------------------------------------------
 */

__attribute__((noreturn)) static void be_saver(void)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_attach(s, "toy", &m, &e);
    const struct shd_checkpoint_options options = { .size = sizeof options, .keep = 2 };
    while (r == SHD_OK)
        r = shd_checkpoint(m, ckpts, &options, NULL, &e);
    fprintf(stderr, "saver: %s\n", e.text);
    _exit(1);
}

TEST(a_killed_saver_leaves_what_was_there)
{
    uint64_t rng = test_seed(42);
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    start_trainer(toy_spec("f32", TOY_ADAMW), 1);
    for (int i = 0; i < 25; i++) {
        int status;
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            be_saver();
        sleep_ms(20 + (long)(test_random(&rng) % 80));
        kill(pid, SIGKILL);
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        EXPECT(WIFSIGNALED(status));
        expect_all_good();
    }
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = attach_toy(s);
    save_ok(m, 1);
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT(exists("LATEST"));
    EXPECT_EQ(shell("! ls -a %s | grep -q partial", ckpts), 0);
    shd_close(s);
    stop_trainer();
    fixture_stop(&daemons);
    remove_ckpts();
}

TEST(a_killed_daemon_fails_the_save_and_no_earlier_one)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_err e = { 0 };
    char want[65], got[65];
    make_ckpts();
    toy_reference(spec, 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec);
    train_steps(m, 2);
    save_ok(m, 0);
    train_steps(m, 1);
    const struct shd_checkpoint_options later = { .size = sizeof later, .step = 9 };
    EXPECT_OK(shd_checkpoint_begin(m, ckpts, &later, &e), &e);
    limit_waits(s, test_paced(1000));
    kill(daemons.pids[1], SIGKILL);
    bool done = false;
    int r = SHD_OK;
    EXPECT_SOON((r = shd_checkpoint_poll(m, &done, NULL, &e)) != SHD_OK || done);
    EXPECT_EQ(r, SHD_EGONE);
    EXPECT(done);
    shd_close(s);
    remove_dead_fixture();
    EXPECT_EQ(expect_all_good(), 1);
    EXPECT_EQ(shell("! ls -a %s | grep -q partial", ckpts), 0);
    fixture_start(&daemons, 3, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* Saving and restoring on real daemons: the same digest on any number of owners, exactly step K
 * while training goes on, and what the files are. */

/* -- There and back -----------------------------------------------------------------------------
 */

/* Train on `from` daemons, save, restore on `to` others, train on: as if nothing had happened. */
static void round_trip(const char *spec, int from, int to)
{
    char half[65], whole[65], got[65];
    toy_reference(spec, 2, half);
    toy_reference(spec, 4, whole);
    make_ckpts();
    fixture_start(&daemons, from, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec);
    train_steps(m, 2);
    const struct shd_checkpointed saved = save_ok(m, 0);
    EXPECT_EQ(saved.step, 2);
    EXPECT_EQ(saved.updates, 2);
    EXPECT_STR(saved.name, "step-000000000002");
    EXPECT_STR(saved.digest, half);
    shd_close(s);
    fixture_stop(&daemons);

    fixture_start(&daemons, to, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    EXPECT_EQ(shd_step(m), 2);
    digest_of(m, got);
    EXPECT_STR(got, half);
    train_steps(m, 2);
    digest_of(m, got);
    EXPECT_STR(got, whole);
    shd_close(s);
    fixture_stop(&daemons);
    EXPECT_EQ(expect_all_good(), 1);
    remove_ckpts();
}

TEST(digest_survives_any_change_of_owners)
{
    static const int counts[][2] = { { 1, 3 }, { 2, 5 }, { 3, 1 }, { 5, 2 }, { 2, 2 } };
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        round_trip(toy_spec("f32", TOY_ADAMW), counts[i][0], counts[i][1]);
}

TEST(digest_survives_for_each_optimizer_and_dtype)
{
    round_trip(toy_spec("bf16", TOY_SGD), 2, 3);
    round_trip(toy_spec("f16", TOY_LION), 3, 2);
}

TEST(files_split_by_unit_restore_as_well)
{
    checkpoint_file_bytes_max = 30000;
    round_trip(toy_spec("f32", TOY_ADAMW), 2, 3);
    checkpoint_file_bytes_max = UINT64_C(5000000000);
}

TEST_MAIN()
