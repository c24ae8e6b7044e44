/* A checkpoint in the place of a model that is open: on all daemons or none, whatever dies in the
 * middle; who trains is in the way, who only looks is told. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"

static char half[65], other[65]; /* digests: of the checkpoint, and of what is open */

/* Two daemons with the model at step 3, and a checkpoint of step 2. */
static void begin(const char *fail)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    make_ckpts();
    fixture_start_kept(&daemons, 2, fail);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec);
    train_steps(m, 2);
    EXPECT_STR(save_ok(m, 0).name, "step-000000000002");
    digest_of(m, half);
    train_steps(m, 1);
    digest_of(m, other);
    shd_close(s);
}

static void end(void)
{
    fixture_stop(&daemons);
    remove_ckpts();
}

static int replace(shd_session *s, struct shd_restored *ret_restored, struct shd_err *e)
{
    const struct shd_restore_options options = { .size = sizeof options, .replace = true };
    return shd_restore(s, ckpts, &options, ret_restored, e);
}

static void expect_digest(uint64_t step, const char *hex)
{
    char got[65];
    struct shd_err e = { 0 };
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    EXPECT_EQ(shd_step(m), step);
    digest_of(m, got);
    EXPECT_STR(got, hex);
    shd_close(s);
}

/* The one that was open is gone from the keeper, too, and training goes on as from the checkpoint.
 */
TEST(a_checkpoint_takes_the_place_of_what_is_open)
{
    char whole[65];
    struct shd_err e = { 0 };
    struct shd_restored restored = { .size = sizeof restored };
    begin(";");
    const long kept = fixture_ask(&daemons, KEEPER_COUNT, 0, "");
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_restore(s, ckpts, NULL, NULL, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "has model 'toy' open at step 3");
    EXPECT_OK(replace(s, &restored, &e), &e);
    EXPECT_EQ(restored.step, 2);
    EXPECT(restored.bytes > 0);
    shd_close(s);
    expect_digest(2, half);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), kept);
    s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    digest_of(m, whole);
    EXPECT_STR(whole, other); /* deterministic: the same third step */
    shd_close(s);
    for (int i = 0; i < 2; i++) /* and outlives its daemons */
        fixture_ask(&daemons, KEEPER_KILL, i, "");
    for (int i = 0; i < 2; i++)
        fixture_wait_up(&daemons, i);
    expect_digest(3, other);
    end();
}

TEST(who_trains_is_in_the_way_and_who_looks_is_told)
{
    struct shd_err e = { 0 };
    begin(";");
    shd_session *trainer = attach(PATIENT_MS), *reader = attach(PATIENT_MS);
    shd_session *s = attach(PATIENT_MS);
    shd_model *looks;
    char hex[65];
    EXPECT_OK(shd_model_attach(reader, "toy", &looks, &e), &e);
    shd_model *m = open_toy(trainer, toy_spec("f32", TOY_ADAMW));
    EXPECT_STATUS(replace(s, NULL, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "model 'toy' is at step 3 and being trained by test (pid ");
    EXPECT_STATUS(replace(trainer, NULL, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "model 'toy' is open in this session: close it first");
    EXPECT_STATUS(replace(reader, NULL, &e), SHD_EBUSY);
    digest_of(m, hex);
    EXPECT_STR(hex, other);
    shd_close(trainer);
    expect_digest(3, other);
    EXPECT_OK(replace(s, NULL, &e), &e);
    uint64_t step;
    EXPECT_STATUS(shd_digest(looks, hex, &step, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "restored in place of what this session has open: open it again");
    shd_close(reader);
    shd_close(s);
    expect_digest(2, half);
    end();
}

TEST(without_a_keeper_it_is_refused)
{
    struct shd_err e = { 0 };
    make_ckpts();
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(m, 1);
    save_ok(m, 0);
    shd_model_close(m);
    shd_close(s);
    s = attach(PATIENT_MS);
    EXPECT_STATUS(replace(s, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "has no keeper that would start its successor");
    shd_close(s);
    end();
}

/* -- Halfway ------------------------------------------------------------------------------------
 */

struct raw {
    char path[400], spec[4096];
    bool open;
};

static void make_raw(const struct round *round, const struct link *link,
                     struct wire_request *ret_request)
{
    const struct raw *raw = round->ctx;
    ret_request->restore = (struct wire_restore){
        .path = raw->path,
        .spec = { (const uint8_t *)raw->spec, strlen(raw->spec) },
        .owner = link->index,
        .owners = 2,
        .open = raw->open,
        .replace = true,
        .restore_id = 77,
    };
}

/* The restorer dies when one daemon has replaced its part: nobody gets a mixture, and the next
 * restore makes it whole. */
TEST(half_a_replacement_is_no_model)
{
    struct shd_err e = { 0 };
    struct raw raw;
    char *spec;
    begin(";");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    EXPECT_OK(spec_dump(m->spec, &spec, &e), &e);
    snprintf(raw.spec, sizeof raw.spec, "%s", spec);
    snprintf(raw.path, sizeof raw.path, "%s/step-000000000002", ckpts);
    free(spec);
    shd_close(s);
    s = attach(PATIENT_MS);
    struct round round = {
        .what = "raw", .asks = WIRE_RESTORE, .type = WIRE_RESTORED, .make = make_raw, .ctx = &raw
    };
    raw.open = false;
    EXPECT_OK(round_one(&round, &s->hub->links[1], 0, &e), &e);
    raw.open = true;
    EXPECT_OK(round_one(&round, &s->hub->links[1], 0, &e), &e);
    EXPECT_OK(round_one(&round, &s->hub->links[1], 0, &e), &e); /* it knows that it is done */
    shd_close(s);

    s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_attach(s, "toy", &m, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "did not reach all daemons; run `shardctl restore --replace` again");
    EXPECT_OK(replace(s, NULL, &e), &e);
    shd_close(s);
    expect_digest(2, half);
    end();
}

#ifdef SHD_FAIL_POINTS
/* Each daemon is killed there, the first time or as a successor: the restorer repeats what it
 * needs, and at the end there is one whole state, the checkpoint's. */
TEST(daemons_killed_in_the_middle_replace_it_whole)
{
    static const char *const fails[] = {
        "replace:ready:before@1;", "replace:ready:after@1;",
        "replace:ready:before@1;replace:ready:before@1;",
        "replace:ready:after@1;adopt:repair:before@1;adopt:publish:after@1;",
        "replace:ready:after@1;keeper:remove:before@1;"
    };
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        begin(fails[i]);
        shd_session *s = attach(PATIENT_MS);
        EXPECT_OK(replace(s, NULL, &e), &e);
        shd_close(s);
        expect_digest(2, half);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        end();
    }
}

/* With nobody who repeats it: what one daemon has is the old state or the new one, whole. */
TEST(a_daemon_killed_before_or_after_the_one_store_has_the_old_or_the_new)
{
    static const char *const fails[] = { "replace:ready:before@1;", "replace:ready:after@1;" };
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        begin(fails[i]);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            shd_session *s;
            if (try_connect(daemons.address, PATIENT_MS, &s, &e) == SHD_OK)
                replace(s, NULL, &e);
            _exit(0);
        }
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        kill(pid, SIGKILL);
        EXPECT_EQ(waitpid(pid, NULL, 0), pid);
        for (int d = 0; d < 2; d++)
            fixture_wait_up(&daemons, d);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m;
        const int r = shd_model_attach(s, "toy", &m, &e);
        EXPECT(r == SHD_OK || r == SHD_ESTEP); /* both old, both new, or said to be neither */
        if (r == SHD_OK) {
            char got[65];
            digest_of(m, got);
            EXPECT_STR(got, shd_step(m) == 2 ? half : other);
        }
        shd_close(s);
        s = attach(PATIENT_MS);
        EXPECT_OK(replace(s, NULL, &e), &e);
        shd_close(s);
        expect_digest(2, half);
        end();
    }
}
#endif

TEST_MAIN()
