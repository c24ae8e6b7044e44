/* Values in the place of what owners hold: the same bits on any number of owners and in this
 * process, all of it or nothing whoever is killed, and nobody trains on with what was there before.
 */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/path.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "tests/lib/client_remote.h"

#define UPDATES 41u /* more than there are steps */

static const struct pt_model pt = { .name = "put", .publish = "bf16", .frozen = true };

/* Parameters of embed, of the frozen tower and of the head; moments of embed and h0. */
static const uint8_t some[PT_UNITS] = { [0] = SHD_PUT_PARAMS | SHD_PUT_MOMENT1 | SHD_PUT_MOMENT2,
                                        [1] = SHD_PUT_MOMENT2,
                                        [2] = SHD_PUT_PARAMS,
                                        [6] = SHD_PUT_PARAMS };

struct values {
    const shd_model *m;
    uint64_t salt;
    int fail_at; /* this call gives up; -1: none */
    int calls;
    int lose_at, daemon; /* in this call a daemon is restarted; -1: none */
};

static float value(uint64_t salt, uint32_t unit, uint32_t array, uint64_t i)
{
    const float x = toy_noise(salt, array, unit, i);
    return array == SHD_MOMENT2 ? x * x * 0.01f : x;
}

/* Gaps are written, too: they are the library's to zero. */
static int fill(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    struct values *v = ctx;
    const int call = v->calls++;
    if (call == v->fail_at)
        return 7;
    if (call == v->lose_at) {
        v->lose_at = -1;
        fixture_restart(&daemons, v->daemon);
    }
    for (uint64_t i = 0; i < shd_unit_elems(v->m, unit); i++)
        values[i] = value(v->salt, unit, array, i);
    return 0;
}

static struct values values_of(const shd_model *m, uint64_t salt)
{
    return (struct values){ .m = m, .salt = salt, .fail_at = -1, .lose_at = -1 };
}

static int put_some(shd_model *m, struct values *v, bool *ret_counts, struct shd_err *e)
{
    const struct shd_put_options options = { .size = sizeof options,
                                             .arrays = some,
                                             .fill = fill,
                                             .ctx = v,
                                             .set_updates = true,
                                             .updates = UPDATES };
    return shd_put(m, &options, ret_counts, e);
}

static void put_ok(shd_model *m, uint64_t salt)
{
    struct shd_err e = { 0 };
    struct values v = values_of(m, salt);
    bool counts = false;
    EXPECT_OK(put_some(m, &v, &counts, &e), &e);
    EXPECT(counts);
}

static void train(shd_model *m, uint32_t steps)
{
    struct pt_run run = { .t = { .overflow_step = UINT64_MAX } };
    struct shd_err e = { 0 };
    for (uint32_t k = 0; k < steps; k++)
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, NULL, &e), &e);
}

static shd_model *open_pt(shd_session *s)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, pt_spec(&pt), &m, &e), &e);
    return m;
}

/* What was put is there, in all bits, with zeros between the tensors. */
static void expect_put(shd_model *m, uint64_t salt)
{
    struct shd_err e = { 0 };
    for (uint32_t u = 0; u < PT_UNITS; u++)
        for (uint32_t a = 0; a < 3; a++) {
            uint64_t step, updates;
            if ((some[u] >> a & 1) == 0)
                continue;
            float *got = malloc(shd_unit_elems(m, u) * sizeof *got);
            EXPECT_OK(shd_get(m, u, (enum shd_array)a, got, &step, &updates, &e), &e);
            EXPECT_EQ(step, shd_step(m));
            EXPECT_EQ(updates, UPDATES);
            uint64_t at = 0, differ = 0;
            for (uint32_t t = 0; t < shd_tensors(m); t++) {
                struct shd_tensor tensor;
                shd_tensor_get(m, t, &tensor);
                if (tensor.unit != u)
                    continue;
                for (; at < tensor.offset_elems; at++)
                    differ += got[at] != 0;
                for (; at < tensor.offset_elems + tensor.elems; at++)
                    differ += got[at] != value(salt, u, a, at);
            }
            EXPECT_EQ(differ, 0);
            free(got);
        }
}

/* Two steps, a put, with `rest` two steps more: the same in this process. */
static void reference(uint32_t before, bool put, uint32_t rest, char hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_pt(s);
    train(m, before);
    if (put)
        put_ok(m, 9);
    train(m, rest);
    digest_of(m, hex);
    shd_close(s);
}

TEST(a_put_has_the_same_bits_on_any_number_of_owners)
{
    struct shd_err e = { 0 };
    char want[65], old[65], got[65];
    shd_session *s;
    reference(2, /* put= */ true, 2, want);
    reference(2, /* put= */ false, 3, old);
    EXPECT(strcmp(want, old) != 0);
    for (int count = 0; count <= 3; count++) {
        if (count > 0)
            fixture_start(&daemons, count, NULL);
        EXPECT_OK(try_connect(count > 0 ? daemons.dir : "local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_pt(s);
        train(m, 2);
        EXPECT_EQ(shd_puts(m), 0);
        put_ok(m, 9);
        EXPECT_EQ(shd_step(m), 3);
        EXPECT_EQ(shd_puts(m), 1);
        expect_put(m, 9);
        train(m, 2);
        digest_of(m, got);
        EXPECT_STR(got, want);
        struct shd_step_row rows[8];
        uint64_t from = 0;
        uint32_t found = 0;
        EXPECT_OK(shd_history(m, &from, rows, 8, &found, &e), &e);
        EXPECT_EQ(found, 5);
        EXPECT(rows[2].skipped && rows[2].grad_norm == 0 && !rows[3].skipped);
        shd_close(s);
        if (count > 0)
            fixture_stop(&daemons);
    }
}

/* Masters and published copies: a reader that is there all the time sees the put as a step. */
TEST(readers_and_later_workers_see_it)
{
    struct shd_err e = { 0 };
    char hex[65];
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *reader;
    EXPECT_OK(shd_model_attach(other, "put", &reader, &e), &e);
    uint16_t *seen = calloc(shd_unit_elems(m, 6), sizeof *seen);
    void *to[PT_UNITS] = { [6] = seen };
    uint64_t step = 0;
    put_ok(m, 9);
    EXPECT_OK(shd_read_step(reader, to, &step, &e), &e);
    EXPECT_EQ(step, 1);
    uint32_t bits;
    const float first = value(9, 6, SHD_PARAMS, 0);
    memcpy(&bits, &first, sizeof bits);
    EXPECT(seen[0] == bits >> 16 || seen[0] == (bits >> 16) + 1);
    free(seen);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_pt(s);
    EXPECT_EQ(shd_step(m), 1);
    EXPECT_EQ(shd_puts(m), 1);
    expect_put(m, 9);
    put_ok(m, 10); /* one after the other */
    expect_put(m, 10);
    EXPECT_EQ(shd_puts(m), 2);
    digest_of(m, hex);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(puts_and_updates_go_through_a_checkpoint)
{
    char before[65], after[65];
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    train(m, 1);
    put_ok(m, 9);
    EXPECT_STR(save_ok(m, 0).name, "step-000000000002");
    digest_of(m, before);
    shd_close(s);
    fixture_stop(&daemons);
    fixture_start(&daemons, 1, NULL);
    s = attach(PATIENT_MS);
    m = restore_ok(s, ckpts);
    EXPECT_EQ(shd_puts(m), 1);
    EXPECT(shd_loss_scale(m) == 65536); /* as if there had been no put */
    expect_put(m, 9);
    digest_of(m, after);
    EXPECT_STR(after, before);
    train(m, 1);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* -- What is refused ----------------------------------------------------------------------------
 */

static void expect_unchanged(shd_model *m, const char *hex, uint64_t step)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, hex);
    EXPECT_EQ(shd_step(m), step);
    EXPECT_EQ(shd_puts(m), 0);
}

TEST(what_cannot_be_put_is_refused_and_changes_nothing)
{
    struct shd_err e = { 0 };
    uint8_t arrays[PT_UNITS] = { 0 };
    for (int count = 0; count <= 2; count += 2) {
        char hex[65];
        shd_session *s;
        const void *params;
        float *grad;
        if (count > 0)
            fixture_start(&daemons, count, NULL);
        EXPECT_OK(try_connect(count > 0 ? daemons.dir : "local:", PATIENT_MS, &s, &e), &e);
        shd_model *m = open_pt(s);
        struct values v = values_of(m, 9);
        struct shd_put_options o = { .size = sizeof o, .arrays = arrays, .fill = fill, .ctx = &v };
        train(m, 1);
        digest_of(m, hex);
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "a put of nothing");
        arrays[2] = SHD_PUT_MOMENT1;
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        EXPECT_HAS(e.text, "unit 'h1'");
        EXPECT_HAS(e.text, "it is frozen");
        arrays[2] = 8;
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        arrays[2] = 0;
        o.fill = NULL;
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        o = (struct shd_put_options){ .size = 3 };
        EXPECT_STATUS(shd_put(m, &o, NULL, &e), SHD_EINVAL);
        v.fail_at = 2;
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EINTERNAL);
        EXPECT_HAS(e.text, "gave up with 7: nothing is put");
        v = values_of(m, 9);
        EXPECT_OK(shd_acquire(m, 1, &params, &e), &e);
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "unit 'h0' is acquired");
        shd_release(m, 1);
        EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "a gradient of unit 'h0' is handed out");
        expect_unchanged(m, hex, 1);
        EXPECT_OK(shd_return_none(m, 0, 1, &e), &e);
        EXPECT_STATUS(put_some(m, &v, NULL, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "step 1 has begun");
        expect_unchanged(m, hex, 1);
        shd_close(s);
        if (count > 0)
            fixture_stop(&daemons);
    }
}

/* -- Several workers ----------------------------------------------------------------------------
 */

/* All of them put between the same two steps; the first counts. */
TEST(of_several_workers_that_put_the_first_counts)
{
    struct shd_err e = { 0 };
    bool counts = true;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *late = open_pt(other);
    put_ok(m, 9);
    struct values v = values_of(late, 10);
    EXPECT_OK(put_some(late, &v, &counts, &e), &e);
    EXPECT(!counts);
    EXPECT_EQ(v.calls, 0);
    EXPECT_EQ(shd_step(late), 1);
    EXPECT_EQ(shd_puts(late), 1);
    expect_put(late, 9);
    train(m, 1);
    v = values_of(late, 10); /* of a step that others have committed by gradients */
    EXPECT_STATUS(put_some(late, &v, &counts, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "step 1 was committed by other workers before the put, and step 2 is open");
    EXPECT_EQ(shd_step(late), 2);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

static void return_all(shd_model *m, uint32_t micro)
{
    struct shd_err e = { 0 };
    for (uint32_t u = PT_UNITS; u-- > 0;) {
        float *grad;
        if (shd_unit_frozen(m, u))
            continue;
        EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
        for (uint64_t i = 0; i < shd_unit_elems(m, u); i++)
            grad[i] = 1;
        EXPECT_OK(shd_return(m, micro, u, &e), &e);
    }
}

/* Its gradients were of other parameters: they count nowhere, and its commit says so. */
TEST(a_worker_that_knows_nothing_of_a_put_is_overtaken)
{
    struct shd_err e = { 0 };
    char want[65], got[65];
    reference(1, /* put= */ true, 1, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    train(m, 1);
    shd_model *late = open_pt(other);
    struct shd_result result;
    const struct shd_update update = toy_update(1);
    put_ok(m, 9);
    return_all(late, 1);
    EXPECT_OK(shd_commit(late, &update, &result, &e), &e);
    EXPECT(result.over);
    EXPECT_EQ(shd_step(late), 2);
    EXPECT_EQ(shd_puts(late), 1);
    expect_put(late, 9);
    train(m, 1);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Kills --------------------------------------------------------------------------------------
 */

TEST(a_daemon_killed_while_values_are_written_has_all_written_anew)
{
    char want[65], got[65];
    reference(2, /* put= */ true, 0, want);
    for (int daemon = 0; daemon < 2; daemon++)
        for (int call = 0; call < 6; call += 5) {
            struct shd_err e = { 0 };
            bool counts = false;
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_pt(s);
            train(m, 2);
            struct values v = values_of(m, 9);
            v.lose_at = call;
            v.daemon = daemon;
            EXPECT_OK(put_some(m, &v, &counts, &e), &e);
            EXPECT(counts);
            EXPECT(v.calls > 6);
            digest_of(m, got);
            EXPECT_STR(got, want);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

#ifdef SHD_FAIL_POINTS
static const char *kill_point;

static void kill_here(const char *name)
{
    if (kill_point != NULL && strcmp(name, kill_point) == 0)
        raise(SIGKILL);
}

/* A worker that dies at its kill point. */
static void put_and_die(const char *point)
{
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        fail_point_hook = kill_here;
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        kill_point = point;
        put_ok(m, 9);
        _exit(1); /* past its end */
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static const struct {
    const char *name;
    bool put; /* by then it is to be */
} points[] = {
    { "put:begun", false },    { "put:written", false },  { "put:full", false },
    { "put:all_full", false }, { "put:committed", true }, { "put:all_committed", true }
};

/* Nobody but the next worker hears of it. */
TEST(a_worker_killed_at_any_point_has_put_all_or_nothing)
{
    char old[65], new[65], got[65];
    reference(2, /* put= */ false, 0, old);
    reference(2, /* put= */ true, 0, new);
    for (size_t i = 0; i < ARRAY_SIZE(points); i++)
        for (int restart = -1; restart < 2; restart++) {
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            train(open_pt(s), 2);
            shd_close(s);
            put_and_die(points[i].name);
            if (restart >= 0)
                fixture_restart(&daemons, restart);
            s = attach(PATIENT_MS);
            shd_model *m = open_pt(s);
            digest_of(m, got);
            EXPECT_STR(got, points[i].put ? new : old);
            EXPECT_EQ(shd_step(m), 2u + points[i].put);
            put_ok(m, 11); /* what is left of the other is in nobody's way */
            expect_put(m, 11);
            train(m, 1);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* Another worker is there all the time, has returned gradients meanwhile, and commits: it passes
 * the put on, or its gradients count. */
TEST(who_is_left_passes_on_what_owner_0_has)
{
    char old[65], new[65], got[65];
    struct shd_err e = { 0 };
    reference(2, /* put= */ true, 0, new);
    reference(3, /* put= */ false, 0, old);
    for (size_t i = 2; i < ARRAY_SIZE(points); i++) {
        fixture_start_kept(&daemons, 2, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        train(m, 2);
        put_and_die(points[i].name);
        struct pt_run run = { .t = { .overflow_step = UINT64_MAX } };
        struct shd_result result;
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.over, points[i].put);
        EXPECT_EQ(shd_step(m), 3);
        digest_of(m, got);
        EXPECT_STR(got, points[i].put ? new : old);
        train(m, 1);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* One micro-batch alone: owner 1, which knows nothing of the put, waits for the rest of its step.
 */
TEST(gradients_that_wait_at_other_owners_are_dropped)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    struct shd_result result;
    reference(2, /* put= */ true, 1, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    const struct shd_update update = toy_update(2);
    train(m, 2);
    put_and_die("put:committed");
    return_all(m, 2); /* before its turn */
    return_all(m, 0);
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(result.over);
    expect_put(m, 9);
    train(m, 1);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(daemons_killed_at_any_point_go_on_with_it)
{
    static const char *const fails[] = {
        "put:make;",
        "put:store:before;",
        "put:store:after;",
        "step:commit:before@3;",
        "step:commit:after@3;",
        "put:copied;",
        "put:copied@4;",
        "put:copied@2;put:copied@2;adopt:publish:after;",
        "keeper:remove:before;",
        "keeper:remove:after;",
    };
    char want[65], got[65];
    reference(2, /* put= */ true, 1, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++)
        for (int count = 1; count <= 2; count++) {
            fixture_start_kept(&daemons, count, fails[i]);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_pt(s);
            train(m, 2);
            put_ok(m, 9);
            expect_put(m, 9);
            train(m, 1);
            digest_of(m, got);
            EXPECT_STR(got, want);
            EXPECT(fixture_ask(&daemons, KEEPER_STARTS, count - 1, "") > 1);
            for (int d = 0; d < count; d++) /* ledger, state, spare */
                EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, d, "") == 3);
            shd_close(s);
            fixture_stop(&daemons);
        }
}
#endif

/* -- What lies in the way -----------------------------------------------------------------------
 */

/* With accumulate 2 the library sums here first. */
TEST(gradient_that_is_summed_in_the_worker_keeps_a_put_away)
{
    static const struct pt_model two = {
        .name = "put", .publish = "bf16", .frozen = true, .accumulate = 2
    };
    struct shd_err e = { 0 };
    bool counts = false;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    float *grad;
    EXPECT_OK(shd_model_open(s, pt_spec(&two), &m, &e), &e);
    struct values v = values_of(m, 9);
    for (uint32_t returned = 0; returned < 2; returned++) {
        if (returned)
            EXPECT_OK(shd_return(m, 0, 1, &e), &e);
        else
            EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
        EXPECT_STATUS(put_some(m, &v, &counts, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "a gradient of unit 'h0' is handed out, or summed here");
    }
    EXPECT_EQ(shd_step(m), 0);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(numbers_reported_before_anothers_put_are_not_of_the_next_step)
{
    struct shd_err e = { 0 };
    bool counts = true;
    const double before = 5, after = 7;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *late = open_pt(other);
    put_ok(m, 9);
    EXPECT_OK(shd_report(late, 1, &before, 1, &e), &e);
    struct values v = values_of(late, 10);
    EXPECT_OK(put_some(late, &v, &counts, &e), &e);
    EXPECT(!counts);
    EXPECT_OK(shd_report(late, 1, &after, 1, &e), &e);
    EXPECT_EQ(late->reports[1].metrics[0], after);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

static int commit_that_counts(shd_model *m, uint64_t puts, struct shd_err *e)
{
    const struct shd_update update = toy_update(shd_step(m));
    struct shd_result result;
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        return_all(m, i);
    const uint64_t right = m->decision.puts;
    m->decision.puts = puts; /* as an older library, or a hostile worker, says it */
    const int r = shd_commit(m, &update, &result, e);
    m->decision.puts = right;
    return r;
}

TEST(commit_that_counts_puts_otherwise_is_refused_and_loses_nothing)
{
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    put_ok(m, 9);
    EXPECT_STATUS(commit_that_counts(m, 0, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "counts 0 puts");
    EXPECT_HAS(e.text, "the model counts 1");
    shd_close(s);
    fixture_restart(&daemons, 0);
    s = attach(PATIENT_MS);
    m = open_pt(s);
    EXPECT_EQ(shd_step(m), 1);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(updates_may_be_set_to_the_highest_number_and_counted_on)
{
    struct shd_err e = { 0 };
    bool counts;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    struct values v = values_of(m, 9);
    const struct shd_put_options o = { .size = sizeof o,
                                       .arrays = some,
                                       .fill = fill,
                                       .ctx = &v,
                                       .set_updates = true,
                                       .updates = (UINT64_C(1) << 33) - 1 };
    EXPECT_OK(shd_put(m, &o, &counts, &e), &e);
    train(m, 1);
    shd_close(s);
    fixture_restart(&daemons, 0);
    s = attach(PATIENT_MS);
    m = open_pt(s);
    EXPECT_EQ(shd_step(m), 2);
    shd_close(s);
    fixture_stop(&daemons);
}

static uint32_t drained;

static void drain_answered(struct link *link, const struct call *call,
                           const struct wire_reply *reply)
{
    (void)link;
    (void)call;
    drained += reply->status == SHD_OK;
}

static int make_drain(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    (void)link;
    (void)call;
    (void)e;
    ret_request->type = WIRE_DRAIN;
    return SHD_OK;
}

TEST(drain_holds_a_put)
{
    struct shd_err e = { 0 };
    bool counts = false;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *holder = attach(PATIENT_MS);
    shd_session *hasty = attach((uint32_t)test_paced(500));
    shd_model *first = open_pt(s);
    train(first, 1);
    shd_model *m = open_pt(hasty);
    const struct call call = { .make = make_drain, .fn = drain_answered, .ctx = &drained };
    for (uint32_t i = 0; i < 2; i++)
        EXPECT_OK(hub_ask(&holder->hub->links[i], &call, &e), &e);
    while (drained < 2)
        EXPECT_OK(hub_poll(holder->hub, 20 * NS_PER_MS, &e), &e);
    struct values v = values_of(m, 9);
    EXPECT_STATUS(put_some(m, &v, &counts, &e), SHD_ETIMEDOUT);
    EXPECT_EQ(shd_unit_version(first, 0), 1);
    shd_close(hasty);
    shd_close(holder);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* Who passes a put on has a cursor of its own, for the step that it was about to commit. */
TEST(put_that_is_passed_on_leaves_the_blob_of_the_step_before)
{
    struct shd_err e = { 0 };
    struct shd_result result;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    struct shd_update update = toy_update(2);
    train(m, 2);
    put_and_die("put:committed");
    return_all(m, 0);
    update.blob = "cursor 3";
    update.blob_bytes = 9;
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(result.over);
    for (uint32_t i = 0; i < 2; i++) {
        char blob[64] = "";
        size_t bytes = 0;
        EXPECT_OK(m->session->control->blob(m, i, blob, sizeof blob, &bytes, &e), &e);
        EXPECT(bytes == 0 || strcmp(blob, "cursor 3") != 0);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

static void stop_here(const char *name)
{
    if (kill_point == NULL || strcmp(name, kill_point) != 0)
        return;
    kill_point = NULL;
    raise(SIGSTOP);
}

static pid_t put_and_stop(void)
{
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid != 0)
        return pid;
    struct shd_err e = { 0 };
    bool counts = true;
    fail_point_hook = stop_here;
    shd_model *m = open_pt(attach(PATIENT_MS));
    kill_point = "put:begun";
    struct values v = values_of(m, 10);
    EXPECT_OK(put_some(m, &v, &counts, &e), &e);
    EXPECT(!counts);
    _exit(0);
}

/* Owner 0 has let it begin, and has forgotten so since. */
TEST(put_that_goes_on_after_another_has_counted_drops_nothing_of_that)
{
    int status = 0;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    train(open_pt(s), 2);
    shd_close(s);
    const pid_t pid = put_and_stop();
    EXPECT(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    fixture_restart(&daemons, 0);
    put_and_die("put:committed");
    kill(pid, SIGCONT);
    EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
    s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    EXPECT_EQ(shd_step(m), 3);
    expect_put(m, 9);
    shd_close(s);
    fixture_stop(&daemons);
}
#endif

TEST_MAIN()
