/* What a skipped step came from: the unit that a batch was planted in is named, in the result, in
 * the history and in the status, with the same norm for any number of owners and workers, also
 * where owners are killed while they are asked; with guard_audit the micro-batch and its worker. */
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 6u
#define BAD   3u /* the step that is planted in */
#define UNITS 4u

struct plant { /* ctx of a step */
    struct toy toy;
    uint32_t unit, micro;
    float by; /* infinite: one of its elements is */
    bool audit;
    const char *rule; /* NULL: of the whole norm */
};

static const char *spec(const struct plant *p)
{
    static char json[5000];
    snprintf(json, sizeof json, "{ \"guard\": [%s], %s%s",
             p->rule != NULL ? p->rule : "{\"norm_above\": 1000}",
             p->audit ? "\"guard_audit\": true, " : "", toy_spec("f32", TOY_ADAMW) + 1);
    return json;
}

struct named { /* what is expected to be said of the step */
    double norm, share;
    uint32_t pid; /* who sent the micro-batch; 0: not known */
};

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct plant *p = ctx;
    return toy_forward(&p->toy, micro, unit, params);
}

static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    struct plant *p = ctx;
    const int r = toy_backward(&p->toy, micro, unit, params, grad);
    if (r != 0 || shd_step(p->toy.m) != BAD || micro != p->micro || unit != p->unit)
        return r;
    for (uint32_t t = 0; t < shd_tensors(p->toy.m); t++) {
        struct shd_tensor tensor = { .size = sizeof tensor };
        shd_tensor_get(p->toy.m, t, &tensor, NULL);
        for (uint64_t i = 0; tensor.unit == unit && i < tensor.elems; i++)
            if (!isinf(p->by) || i == tensor.elems - 1)
                grad[tensor.offset_elems + i] *= p->by;
    }
    return 0;
}

static int train(shd_model *m, const struct plant *what, const uint32_t *micros, uint32_t count,
                 struct shd_result *ret_result, struct shd_err *e)
{
    struct plant p = *what;
    p.toy = (struct toy){ .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &p, forward, backward, NULL, NULL };
    const struct shd_update update = toy_update(shd_step(m));
    return shd_run_step(m, micros, count, &compute, &update, ret_result, e);
}

static void expect_cause(const struct shd_result *r, const struct plant *p, struct named want)
{
    const bool bad = r->step == BAD;
    EXPECT_EQ(r->skipped, bad);
    EXPECT_EQ(r->cause_unit, bad ? p->unit + 1 : 0);
    EXPECT(r->cause_norm == (bad ? want.norm : 0));
    EXPECT_EQ(r->cause_micro, bad && want.share > 0 ? p->micro + 1 : 0);
    EXPECT(r->cause_share == (bad ? want.share : 0));
    EXPECT_EQ(r->guard, !bad || isinf(p->by) ? SHD_GUARD_NONE
                        : p->rule != NULL    ? SHD_GUARD_UNIT_ABOVE
                                             : SHD_GUARD_NORM_ABOVE);
    if (bad && p->rule != NULL)
        EXPECT(r->guard_value == want.norm && r->guard_bound > 0 &&
               r->guard_value > r->guard_bound);
}

static void expect_rows(shd_model *m, const struct plant *p, struct named want)
{
    struct shd_err e = { 0 };
    struct shd_step_row rows[STEPS];
    uint64_t from = 0;
    uint32_t count = 0;
    rows[0].size = sizeof rows[0];
    EXPECT_OK(shd_history(m, &from, rows, STEPS, &count, &e), &e);
    EXPECT_EQ(count, STEPS);
    for (uint32_t i = 0; i < count; i++) {
        EXPECT_EQ(rows[i].cause_unit, i == BAD ? p->unit + 1 : 0);
        EXPECT(rows[i].cause_norm == (i == BAD ? want.norm : 0));
        EXPECT_EQ(rows[i].cause_micro, i == BAD && want.share > 0 ? p->micro + 1 : 0);
        EXPECT(rows[i].cause_share == (i == BAD ? want.share : 0));
        EXPECT_EQ(rows[i].cause_pid, i == BAD ? want.pid : 0);
        EXPECT_EQ(rows[i].cause_worker[0] != '\0', i == BAD && want.pid > 0);
    }
}

/* In this process, where sums are formed by another path. */
static struct named local_names(const struct plant *p)
{
    struct shd_err e = { 0 };
    shd_session *s;
    struct named want = { 0 };
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec(p));
    while (shd_step(m) < STEPS) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(train(m, p, toy_all_micros, TOY_MICROS, &result, &e), &e);
        if (result.step == BAD)
            want = (struct named){ .norm = result.cause_norm, .share = result.cause_share };
        expect_cause(&result, p, want);
        if (result.step == BAD && !isinf(p->by) && p->rule == NULL) /* nearly all is the unit's */
            EXPECT(want.norm > 0.9 * result.grad_norm && want.norm <= result.grad_norm);
    }
    EXPECT(p->audit ? want.share > 0.9 && want.share < 1.1 : want.share == 0);
    expect_rows(m, p, want);
    shd_close(s);
    return want;
}

static pid_t other_worker(const struct plant *p)
{
    const pid_t pid = test_fork();
    if (pid != 0)
        return pid;
    shd_session *s;
    shd_model *m;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec(p), &m, &e));
    while (shd_step(m) < STEPS)
        MUST_OK(train(m, p, toy_all_micros + 2, 2, NULL, &e));
    shd_close(s);
    _exit(0);
}

static void train_with(int owners, bool two, const struct plant *p, struct named want)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, owners, NULL);
    const pid_t pid = two ? other_worker(p) : 0;
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec(p));
    want.pid = !p->audit ? 0 : two && p->micro >= 2 ? (uint32_t)pid : (uint32_t)getpid();
    while (shd_step(m) < STEPS) {
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(train(m, p, toy_all_micros, two ? 2 : TOY_MICROS, &result, &e), &e);
        expect_cause(&result, p, want);
    }
    if (pid != 0) {
        int status = 0;
        EXPECT(waitpid(pid, &status, 0) == pid);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    expect_rows(m, p, want);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(the_planted_unit_is_named_by_any_owners_and_workers)
{
    for (uint32_t unit = 0; unit < UNITS; unit++) {
        const struct plant p = { .unit = unit, .micro = 1, .by = unit % 2 == 0 ? 1e6f : INFINITY };
        const struct named want = local_names(&p);
        EXPECT_EQ(isinf(want.norm), unit % 2 != 0);
        for (int owners = 1; owners <= 3; owners++)
            train_with(owners, (owners + (int)unit) % 2 == 0, &p, want);
    }
}

TEST(the_planted_micro_batch_and_its_worker_are_named)
{
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++) {
        const struct plant p = {
            .unit = micro, .micro = micro, .audit = true, .by = micro % 2 == 1 ? 1e6f : INFINITY
        };
        const struct named want = local_names(&p);
        for (int owners = 1; owners <= 3; owners++)
            train_with(owners, owners != 2, &p, want);
    }
}

/* Unit h1 has three elements: what is planted in it is little beside the norm of all others, and
 * only a rule of its own sees it. */
TEST(a_rule_of_units_sees_what_the_whole_norm_does_not)
{
    static const char *const rules[] = {
        "{\"norm_above\": 8, \"units\": \"h1\"}",
        "{\"norm_above\": 1000}, {\"norm_above\": 8, \"units\": [\"h1\", \"x\"]}",
        "{\"norm_above\": 90, \"units\": \"h*\"}, {\"norm_above\": 8, \"units\": \"h1\"}",
    };
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
        const struct plant p = {
            .unit = 2, .micro = 3, .by = 100, .audit = i == 1, .rule = rules[i]
        };
        const struct named want = local_names(&p);
        EXPECT(want.norm > 8 && want.norm < 100);
        for (int owners = 1; owners <= 3; owners++)
            train_with(owners, owners != 2, &p, want);
    }
}

static void expect_status(shd_session *s, const char *text)
{
    struct shd_err e = { 0 };
    char *json = NULL;
    EXPECT_OK(shd_status(s, 0, &json, &e), &e);
    EXPECT_HAS(json, text);
    free(json);
}

/* By who was there, who comes later, and an owner that was restarted since. */
TEST(the_status_names_it_and_successors_know_it)
{
    struct shd_err e = { 0 };
    const struct plant p = { .unit = 1, .micro = 2, .by = INFINITY, .audit = true };
    const struct named want = { INFINITY, 1, (uint32_t)getpid() };
    char text[300];
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec(&p));
    while (shd_step(m) <= BAD)
        EXPECT_OK(train(m, &p, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, "\"pid\":%d", (int)getpid());
        expect_status(s, "\"last_cause\":{\"unit\":\"h0\",\"norm\":null,\"micro\":2,");
        expect_status(s, "\"text\":\"gradients are not finite, the first in unit h0 by "
                         "micro-batch 2 of worker ");
        expect_status(s, text);
        EXPECT_EQ(shell("'" SHD_BIN_DIR "/shardctl' status -a '%s' | grep -q 'last step of toy "
                        "skipped: gradients are not finite, the first in unit h0 by micro-batch 2'",
                        daemons.address),
                  0);
        fixture_restart(&daemons, 0);
    }
    while (shd_step(m) < STEPS)
        EXPECT_OK(train(m, &p, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    expect_status(s, "\"last_cause\":null");
    EXPECT_EQ(shell("'" SHD_BIN_DIR "/shardctl' log -a '%s' | grep 'step 4 ' | grep -q 'SKIPPED: "
                    "gradients are not finite, the first in unit h0 by micro-batch 2 of worker .* "
                    "(pid %d)'",
                    daemons.address, (int)getpid()),
              0);
    EXPECT_EQ(shell("'" SHD_BIN_DIR "/shardctl' log --json -a '%s' | grep -q '\"cause\":{\"unit\":"
                    "\"h0\",\"norm\":null,\"micro\":{\"number\":2,\"share\":1.0,\"worker\":'",
                    daemons.address),
              0);
    expect_rows(m, &p, want);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* An owner dies as it is asked, and before and behind the commit: it forms the sums anew, and says
 * that it does not know what each micro-batch brought. */
TEST(owners_that_are_killed_while_they_are_asked_name_the_same)
{
    static const struct {
        const char *fails;
        bool forgets;
    } cases[] = {
        { "skipped:sums;", true },
        { "step:commit:before@4;", false },
        { "step:commit:after@4;", false },
        { "skipped:sums;step:promise:after;", true },
    };
    struct shd_err e = { 0 };
    for (size_t i = 0; i < 2 * ARRAY_SIZE(cases); i++) {
        const struct plant p = { .unit = 2, .micro = 3, .by = 1e7f, .audit = i % 2 == 1 };
        struct named want = local_names(&p);
        if (p.audit && cases[i / 2].forgets)
            want.share = 0;
        else if (p.audit && i / 2 != 1) /* who sent it: to who recorded the commit */
            want.pid = (uint32_t)getpid();
        fixture_start_kept(&daemons, 2, cases[i / 2].fails);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec(&p));
        while (shd_step(m) < STEPS) {
            struct shd_result result = { .size = sizeof result };
            EXPECT_OK(train(m, &p, toy_all_micros, TOY_MICROS, &result, &e), &e);
            expect_cause(&result, &p, want);
        }
        expect_rows(m, &p, want);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") > 1);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

/* -- More units than a message has the sums of --------------------------------------------------
 */

#define MANY 300u

static const char *many_spec(const char *rule)
{
    static char json[40000];
    char *at = json + sprintf(json,
                              "{ \"name\": \"many\", \"micro_batches\": 1, \"optimizer\": "
                              "{ \"kind\": \"sgd\" }, \"guard\": [%s], \"units\": [",
                              rule);
    for (uint32_t u = 0; u < MANY; u++)
        at += sprintf(at,
                      "%s{ \"name\": \"u%u\", \"tensors\": [{ \"name\": \"t%u\", \"shape\": "
                      "[2] }] }",
                      u > 0 ? ", " : "", u, u);
    strcpy(at, "] }");
    return json;
}

TEST(units_of_several_messages_are_compared)
{
    static const uint32_t large[] = { 0, 127, 128, 299 };
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, many_spec("{\"norm_above\": 10}"));
    for (size_t i = 0; i < ARRAY_SIZE(large); i++) {
        struct shd_result result = { .size = sizeof result };
        for (uint32_t u = 0; u < MANY; u++) {
            float *grad;
            EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
            grad[0] = u == large[i] ? 30.0f : 1.0f;
            grad[1] = u == large[i] ? 40.0f : 1.0f;
            EXPECT_OK(shd_return(m, 0, u, &e), &e);
        }
        const struct shd_update update = toy_update(i);
        EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
        EXPECT(result.skipped && result.cause_unit == large[i] + 1 && result.cause_norm == 50);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

/* Each has a window of its own, in the messages' order: what is three times its own norm, and far
 * below the others', is found, in whatever page. */
TEST(units_of_several_messages_have_windows_of_their_own)
{
    static const uint32_t large[] = { 1, 19, 100, 127, 128, 199, 299 };
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(
        s, many_spec("{\"norm_zscore\": 6, \"window\": 4, \"units\": [\"u1*\", \"u299\"]}"));
    for (uint32_t k = 0; k < 4 + ARRAY_SIZE(large); k++) {
        struct shd_result result = { .size = sizeof result };
        const uint32_t planted = k < 4 ? MANY : large[k - 4];
        for (uint32_t u = 0; u < MANY; u++) {
            float *grad;
            EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
            grad[0] = (u == planted ? 9.0f : 3.0f) * (float)(u + 1);
            grad[1] = (u == planted ? 12.0f : 4.0f) * (float)(u + 1);
            EXPECT_OK(shd_return(m, 0, u, &e), &e);
        }
        const struct shd_update update = toy_update(k);
        EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
        EXPECT_EQ(result.skipped, k >= 4);
        EXPECT_EQ(result.guard, k < 4 ? SHD_GUARD_NONE : SHD_GUARD_UNIT_ZSCORE);
        if (k >= 4)
            EXPECT(result.cause_unit == planted + 1 && result.guard_value == 15 * (planted + 1.0));
    }
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
