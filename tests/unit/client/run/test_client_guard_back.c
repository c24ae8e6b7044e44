/* A rule with the action "rewind": the model goes back to a snapshot, once, and its step is not
 * counted. Who leaves the batch out then ends in the bits of a run that never had it; who has it
 * again sees it skipped. What is set behind the snapshot stays, from its step on. So for any number
 * of owners and workers, and whatever is killed. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 10u
#define BAD   7u /* the batch that is planted, and the step that trains on it first */
#define KEPT  4u /* the step that a snapshot is made of */
#define SET   6u /* from this one on something is set, behind the snapshot */

/* guard NULL: none. */
static const char *spec(const char *guard)
{
    static char json[5000];
    snprintf(json, sizeof json, "{ %s%s%s %s", guard != NULL ? "\"guard\": [" : "",
             guard != NULL ? guard : "", guard != NULL ? "]," : "", toy_spec("f32", TOY_ADAMW) + 1);
    return json;
}

#define BACK "{\"norm_above\": 1000, \"action\": \"rewind\"}"

struct batches { /* ctx of a step */
    struct toy toy;
    uint64_t data; /* which batch it is */
};

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx, (void)micro, (void)unit, (void)params;
    return 0;
}

/* A function of parameters and batch alone, not of the step. */
static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const struct batches *b = ctx;
    const float by = b->data == BAD ? 1000 : 1, *p = params;
    if (unit + 1 == shd_units(b->toy.m)) { /* uses embed */
        struct shd_err e;
        float *tied;
        if (shd_grad(b->toy.m, micro, 0, &tied, &e) != SHD_OK)
            return 1;
    }
    for (uint32_t t = 0; t < shd_tensors(b->toy.m); t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        shd_tensor_get(b->toy.m, t, &tensor, NULL);
        for (uint64_t i = tensor.offset_elems;
             tensor.unit == unit && i < tensor.offset_elems + tensor.elems; i++)
            grad[i] = by * (toy_noise(b->data, micro, unit, i) + 0.1f * p[i]);
    }
    return 0;
}

/* Step k trains on batch k; without BAD from there on on the one after that. */
static int train(shd_model *m, bool without, const uint32_t *micros, uint32_t count,
                 struct shd_result *ret_result, struct shd_err *e)
{
    struct batches b = { .toy = { .m = m }, .data = shd_step(m) };
    if (without && b.data >= BAD)
        b.data++;
    const struct shd_compute compute = { sizeof compute, &b, forward, backward, NULL, NULL };
    const struct shd_update update = toy_update(b.data);
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
}

static void set_behind(shd_model *m)
{
    struct shd_err e = { 0 };
    uint64_t from = 0;
    EXPECT_OK(shd_model_set(m, "lr_scale=0.5", SET, &from, &e), &e);
    EXPECT_EQ(from, SET);
}

/* skips: the batch is there, and its step is skipped; else it never was. Of a run in this process,
 * by another rule. */
static void reference(bool skips, bool sets, char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec(skips ? "{\"norm_above\": 1000}" : NULL));
    if (sets)
        set_behind(m);
    while (shd_step(m) < STEPS)
        EXPECT_OK(train(m, !skips, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    digest_of(m, ret_hex);
    shd_close(s);
}

struct seen { /* of a worker that trains to the end */
    uint32_t rewound, skipped, guard_step;
};

/* leaves_out: once it is told that the model went back for BAD, it trains without it. */
static struct seen train_to_end(shd_model *m, bool leaves_out, const uint32_t *micros,
                                uint32_t count)
{
    struct shd_err e = { 0 };
    struct seen seen = { 0 };
    bool without = false;
    while (shd_step(m) < STEPS) {
        struct shd_result r = { .size = sizeof r };
        const int status = train(m, without, micros, count, &r, &e);
        if (status != SHD_OK)
            FAIL("step %u: %s", (unsigned)shd_step(m), e.text);
        if (r.rewound) {
            seen.rewound++;
            seen.guard_step = (uint32_t)r.guard_step;
            EXPECT(shd_step(m) == KEPT && r.step == KEPT && !r.skipped && !r.stopped);
            without = leaves_out;
        } else if (r.skipped) {
            seen.skipped++;
            EXPECT(r.step == BAD && r.guard == SHD_GUARD_NORM_ABOVE && !r.stopped);
        }
    }
    return seen;
}

static void train_to_the_snapshot(shd_model *m, const uint32_t *micros, uint32_t count)
{
    struct shd_err e = { 0 };
    while (shd_step(m) < KEPT)
        EXPECT_OK(train(m, false, micros, count, NULL, &e), &e);
}

static void expect_end(shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
}

/* -- One worker, or two ------------------------------------------------------------------------ */

static pid_t other_worker(bool leaves_out)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec(BACK), &m, &e));
    const struct seen seen = train_to_end(m, leaves_out, toy_all_micros + 2, 2);
    shd_close(s);
    _exit(seen.rewound == 1 && seen.guard_step == BAD + 1 ? 0 : 1);
}

/* A model with a snapshot, behind which something is set. */
static shd_model *begin(int owners, shd_session **ret_s)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    fixture_start(&daemons, owners, NULL);
    *ret_s = attach(PATIENT_MS);
    shd_model *m = open_toy(*ret_s, spec(BACK));
    train_to_the_snapshot(m, toy_all_micros, TOY_MICROS);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(step, KEPT);
    set_behind(m);
    return m;
}

static void go_back_with(int owners, bool two, bool leaves_out, const char *want)
{
    shd_session *s;
    shd_model *m = begin(owners, &s);
    const pid_t pid = two ? other_worker(leaves_out) : 0;
    const struct seen seen = train_to_end(m, leaves_out, toy_all_micros, two ? 2 : TOY_MICROS);
    EXPECT(seen.rewound == 1 && seen.guard_step == BAD + 1);
    EXPECT_EQ(seen.skipped, !leaves_out);
    if (pid != 0) {
        int status = 0;
        EXPECT(waitpid(pid, &status, 0) == pid);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    expect_end(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(who_leaves_the_batch_out_ends_where_it_never_was)
{
    char want[65];
    reference(/* skips= */ false, /* sets= */ true, want);
    for (int owners = 1; owners <= 3; owners++)
        go_back_with(owners, owners != 2, /* leaves_out= */ true, want);
}

TEST(the_same_batch_is_skipped_the_second_time)
{
    char want[65];
    reference(/* skips= */ true, /* sets= */ true, want);
    for (int owners = 1; owners <= 3; owners++)
        go_back_with(owners, owners == 2, /* leaves_out= */ false, want);
}

/* An owner, or its replica, that does not know that settings may stay undoes them: so do all. */
TEST(where_a_daemon_is_older_what_was_set_goes_with_the_steps_at_all_of_them)
{
    char want[65];
    shd_session *s;
    reference(/* skips= */ false, /* sets= */ false, want);
    shd_model *m = begin(2, &s);
    s->hub->links[s->hub->link_count - 1].peer.level = WIRE_LEVEL_STAYS - 1;
    const struct seen seen = train_to_end(m, /* leaves_out= */ true, toy_all_micros, TOY_MICROS);
    EXPECT(seen.rewound == 1 && seen.guard_step == BAD + 1);
    expect_end(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Killed ------------------------------------------------------------------------------------ */

#ifdef SHD_FAIL_POINTS
static pid_t worker_that_dies(const char *where)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    setenv("SHARDD_FAIL", where, 1);
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec(BACK), &m, &e));
    train_to_end(m, /* leaves_out= */ true, toy_all_micros, TOY_MICROS);
    _exit(0);
}

/* A worker that dies behind its commit, before and while the model goes back: whoever comes next
 * has it go, or goes along. */
TEST(a_worker_that_is_killed_leaves_it_to_the_next)
{
    static const char *const fails[] = { "guard:back", "rewind:asked", "rewind:gone" };
    char want[65];
    reference(/* skips= */ false, /* sets= */ true, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        shd_session *s;
        int status = 0;
        shd_model *m = begin(2, &s);
        const pid_t pid = worker_that_dies(fails[i]);
        EXPECT(waitpid(pid, &status, 0) == pid);
        EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        const struct seen seen = train_to_end(m, /* leaves_out= */ true, toy_all_micros,
                                              TOY_MICROS);
        EXPECT(seen.rewound == 1 && seen.guard_step == BAD + 1 && seen.skipped == 0);
        expect_end(m, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(owners_that_are_killed_go_back_once)
{
    static const char *const fails[] = {
        "step:commit:before@8;",
        "step:commit:after@8;",
        "rewind:held;",
        "step:rewind:before;",
        "step:rewind:after;",
        "rewind:copied;",
        "step:rewind:words;",
        "step:rewind:done:after;",
        "step:commit:after@8;step:rewind:before;",
    };
    char left_out[65], skipped[65];
    reference(/* skips= */ false, /* sets= */ true, left_out);
    reference(/* skips= */ true, /* sets= */ true, skipped);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        uint64_t step = 0;
        const bool leaves_out = i % 2 == 0;
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec(BACK));
        train_to_the_snapshot(m, toy_all_micros, TOY_MICROS);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        set_behind(m);
        const struct seen seen = train_to_end(m, leaves_out, toy_all_micros, TOY_MICROS);
        EXPECT(seen.rewound == 1 && seen.guard_step == BAD + 1);
        EXPECT_EQ(seen.skipped, !leaves_out);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        expect_end(m, leaves_out ? left_out : skipped);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

/* -- Where it cannot --------------------------------------------------------------------------- */

static void expect_stopped(shd_model *m, const char *why)
{
    struct shd_err e = { 0 };
    struct shd_result r = { .size = sizeof r };
    while (shd_step(m) <= BAD)
        EXPECT_OK(train(m, false, toy_all_micros, TOY_MICROS, &r, &e), &e);
    EXPECT(r.step == BAD && r.skipped && r.stopped && !r.rewound);
    EXPECT_STATUS(train(m, false, toy_all_micros, TOY_MICROS, NULL, &e), SHD_ESTOPPED);
    EXPECT_HAS(e.text, "stopped training at step 7");
    EXPECT_HAS(e.text, why);
}

/* It is stopped then, and goes on as any other that is; or goes back when there is a snapshot. */
TEST(without_a_snapshot_it_stops_and_says_why)
{
    struct shd_err e = { 0 };
    char want[65];
    uint64_t step = 0;
    reference(/* skips= */ true, /* sets= */ true, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec(BACK));
    set_behind(m);
    expect_stopped(m, "there is no snapshot up to step 7 that all owners have");
    EXPECT_OK(shd_snapshot(m, &step, &e), &e); /* one of the step behind it is none */
    EXPECT_EQ(step, BAD + 1);
    const struct shd_update update = toy_update(BAD + 1);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_ESTOPPED);
    EXPECT_OK(shd_model_set(m, "guard=go-on", 0, NULL, &e), &e);
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e); /* of what is in */
    train_to_end(m, /* leaves_out= */ false, toy_all_micros, TOY_MICROS);
    expect_end(m, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(in_this_process_it_stops)
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec(BACK));
    expect_stopped(m, "(norm_above)");
    shd_close(s);
}

TEST_MAIN()
