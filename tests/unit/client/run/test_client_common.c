/* Frozen units of a model and its forks: their parameters are in memory once, and stay what they
 * are in each of them, whatever is put, rewound, dropped or killed. */

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/put_toy.h"

#define FROZEN (UINT64_C(4) << 20) /* bytes of h.0's and h.1's parameters, at all owners */
#define SLACK  (UINT64_C(256) << 10)

static const char wide_spec[] =
    "{\"name\": \"base\", \"micro_batches\": 1, \"publish\": \"bf16\","
    " \"optimizer\": {\"kind\": \"adamw\"}, \"units\": ["
    "{\"name\": \"h.0\", \"tensors\": [{\"name\": \"w0\", \"shape\": [512, 1024], "
    "\"trainable\": false}]},"
    "{\"name\": \"h.0.lora\", \"tensors\": [{\"name\": \"a0\", \"shape\": [64, 64]}]},"
    "{\"name\": \"h.1\", \"tensors\": [{\"name\": \"w1\", \"shape\": [512, 1024], "
    "\"trainable\": false}]},"
    "{\"name\": \"h.1.lora\", \"tensors\": [{\"name\": \"a1\", \"shape\": [64, 64]}]}]}";

static void train_wide(shd_model *m, uint32_t steps)
{
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_err e = { 0 };
    for (uint32_t k = 0; k < steps; k++) {
        for (uint32_t u = 1; u <= 3; u += 2) {
            float *grad;
            EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
            for (uint64_t i = 0; i < shd_unit_elems(m, u); i++)
                grad[i] = 1;
            EXPECT_OK(shd_return(m, 0, u, &e), &e);
        }
        EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
    }
}

/* The sum of the numbers that stand behind the word in what the daemons answer at the path. */
static uint64_t sum_at(const char *path, const char *word)
{
    uint64_t sum = 0;
    for (int i = 0; i < daemons.count; i++) {
        struct http_reply reply = http_get(&daemons, i, path);
        CHECK(reply.code == 200);
        for (const char *at = reply.body; (at = strstr(at, word)) != NULL; at += strlen(word))
            sum += strtoull(at + strlen(word), NULL, 10);
        free(reply.text);
    }
    return sum;
}

/* Of all models in /status. */
static uint64_t status_sum(const char *key)
{
    char word[64];
    snprintf(word, sizeof word, "\"%s\":", key);
    return sum_at("/status", word);
}

static uint64_t memory(void)
{
    return memfd_bytes(daemons.pids, daemons.count);
}

/* Of the daemons: a page that is mapped in several places is one. */
static uint64_t pss(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < daemons.count; i++) {
        char path[64], line[256];
        unsigned long kib = 0;
        snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)daemons.pids[i]);
        FILE *file = fopen(path, "re");
        CHECK(file != NULL);
        while (fgets(line, sizeof line, file) != NULL)
            if (sscanf(line, "Pss: %lu", &kib) == 1)
                sum += kib << 10;
        fclose(file);
    }
    return sum;
}

static shd_model *attach_to(shd_session *s, const char *name)
{
    struct shd_err e = { 0 };
    shd_model *m = NULL;
    EXPECT_OK(shd_model_attach(s, name, &m, &e), &e);
    return m;
}

static void expect_digest(const char *name, const char *want)
{
    char got[65];
    shd_session *s = attach(PATIENT_MS);
    digest_of(attach_to(s, name), got);
    EXPECT_STR(got, want);
    shd_close(s);
}

static void restart_all(void)
{
    for (int i = 0; i < daemons.count; i++)
        fixture_restart(&daemons, i);
    for (int i = 0; i < daemons.count; i++)
        fixture_wait_up(&daemons, i);
}

/* As restart_all(), of daemons that the keeper starts again by itself when they die. */
static void end_and_start_all(void)
{
    for (int i = 0; i < daemons.count; i++) {
        fixture_ask(&daemons, KEEPER_TERM, i, "");
        fixture_succeed(&daemons, i, "");
    }
    for (int i = 0; i < daemons.count; i++)
        fixture_wait_up(&daemons, i);
}

/* -- Memory -----------------------------------------------------------------------------------
 */

TEST(forks_have_frozen_units_once)
{
    static const char *const names[] = { "one", "two", "three" };
    struct shd_err e = { 0 };
    char at_two[65], got[65];
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    const uint64_t none = memory();
    shd_model *m;
    EXPECT_OK(shd_model_open(s, wide_spec, &m, &e), &e);
    train_wide(m, 2);
    digest_of(m, at_two);
    const uint64_t whole = memory() - none;
    EXPECT(whole > 2 * FROZEN);
    EXPECT_EQ(status_sum("common"), 0);
    const uint64_t state = status_sum("state");
    for (uint32_t i = 0; i < ARRAY_SIZE(names); i++) {
        const uint64_t before = memory(), pss_before = pss();
        EXPECT_OK(shd_model_fork(m, names[i], NULL, &e), &e);
        EXPECT(memory() - before < whole - FROZEN + SLACK);
        if (!SANITIZE_THREAD) /* whose shadow is several times as large */
            EXPECT(pss() - pss_before < FROZEN + FROZEN / 2); /* two more where each has its own */
        EXPECT_EQ(status_sum("common"), (i + 2) * FROZEN);
        EXPECT_EQ(status_sum("common_counted"), FROZEN);
        EXPECT_EQ(status_sum("state"), (i + 2) * (state - FROZEN));
    }
    /* Each goes on by itself. */
    shd_session *other = attach(PATIENT_MS);
    shd_model *one = attach_to(other, "one");
    digest_of(one, got);
    EXPECT_STR(got, at_two);
    train_wide(one, 1);
    train_wide(m, 1);
    digest_of(one, got);
    digest_of(m, at_two);
    EXPECT_STR(got, at_two);
    shd_close(other);
    shd_close(s);
    /* And after successors have mapped it. */
    restart_all();
    expect_digest("one", at_two);
    expect_digest("base", at_two);
    EXPECT_EQ(status_sum("common"), 4 * FROZEN);
    EXPECT_EQ(status_sum("common_counted"), FROZEN);
    EXPECT_EQ(status_sum("state"), 4 * (state - FROZEN));
    /* Whoever goes leaves the others what they have: the model that was forked, too. */
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_drop(s, "base", NULL, &e), &e);
    EXPECT_EQ(status_sum("common_counted"), FROZEN);
    expect_digest("one", at_two);
    EXPECT_OK(shd_model_drop(s, "two", NULL, &e), &e);
    restart_all();
    expect_digest("one", at_two);
    EXPECT_EQ(status_sum("common_counted"), FROZEN);
    shd_close(s);
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_drop(s, "one", NULL, &e), &e);
    EXPECT_OK(shd_model_drop(s, "three", NULL, &e), &e);
    EXPECT_EQ(memory(), none);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Asked for in a request that waits until memory is seen to. */
TEST(what_a_fork_sets_is_kept_meanwhile)
{
    const struct shd_fork_options options = { .size = sizeof options,
                                              .set = "micro_batches=2 lr_scale=0.5 eps=1e-6" };
    struct shd_err e = { 0 };
    char *json;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m, *one;
    EXPECT_OK(shd_model_open(s, wide_spec, &m, &e), &e);
    EXPECT_OK(shd_model_fork_with(m, "one", &options, NULL, &e), &e);
    EXPECT_EQ(status_sum("common_counted"), FROZEN);
    one = attach_to(s, "one");
    EXPECT_EQ(shd_micro_batches(one), 2);
    EXPECT_OK(shd_settings(one, &json, &e), &e);
    EXPECT_HAS(json, "lr_scale");
    free(json);
    shd_close(s);
    fixture_stop(&daemons);
}

/* The same in /metrics. */
static uint64_t metrics_sum(const char *kind)
{
    char word[64];
    snprintf(word, sizeof word, ",kind=\"%s\"} ", kind);
    return sum_at("/metrics", word);
}

/* What counts for whom. */
TEST(memory_in_common_counts_once)
{
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m;
    EXPECT_OK(shd_model_open(s, wide_spec, &m, &e), &e);
    const uint64_t whole = status_sum("counted");
    EXPECT_OK(shd_model_fork(m, "one", NULL, &e), &e);
    const uint64_t two = status_sum("counted");
    EXPECT(two <= 2 * whole - FROZEN);
    EXPECT_EQ(metrics_sum("common"), FROZEN);
    shd_close(s);
    restart_all();
    s = attach(PATIENT_MS);
    EXPECT_SOON(status_sum("counted") <= two);
    EXPECT(status_sum("counted") > whole);
    EXPECT_OK(shd_model_drop(s, "base", NULL, &e), &e);
    EXPECT(status_sum("counted") <= whole && status_sum("counted") > whole - FROZEN);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- What changes them ------------------------------------------------------------------------
 */

/* A put is of the one that it is put to: the first, or a fork. */
TEST(a_put_of_frozen_units_is_of_one_model)
{
    for (int to_fork = 0; to_fork < 2; to_fork++) {
        struct shd_err e = { 0 };
        char plain[65], put[65], got[65];
        put_reference(2, /* put= */ false, 0, plain);
        put_reference(2, /* put= */ true, 1, put);
        fixture_start_kept(&daemons, 2, "");
        shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
        shd_model *m = open_pt(s), *twin;
        train_pt(m, 2);
        EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
        EXPECT_OK(shd_model_fork(m, "third", NULL, &e), &e);
        twin = attach_to(other, "twin");
        EXPECT(status_sum("common") > 0);
        const uint64_t common = status_sum("common"), counted = status_sum("common_counted");
        EXPECT_EQ(common, 3 * counted);
        put_ok(to_fork ? twin : m, 9);
        EXPECT_EQ(status_sum("common"), 2 * counted);
        EXPECT_EQ(status_sum("common_counted"), counted);
        expect_put(to_fork ? twin : m, 9);
        train_pt(to_fork ? twin : m, 1);
        digest_of(to_fork ? twin : m, got);
        EXPECT_STR(got, put);
        digest_of(to_fork ? m : twin, got);
        EXPECT_STR(got, plain);
        shd_close(other);
        shd_close(s);
        restart_all();
        expect_digest(to_fork ? "twin" : "put", put);
        expect_digest(to_fork ? "put" : "twin", plain);
        expect_digest("third", plain);
        /* So it is where no other has them any more, and is forked again. */
        s = attach(PATIENT_MS);
        EXPECT_OK(shd_model_drop(s, "third", NULL, &e), &e);
        m = attach_to(s, to_fork ? "put" : "twin");
        put_ok(m, 9);
        EXPECT_EQ(status_sum("common"), 0);
        train_pt(m, 1);
        EXPECT_OK(shd_model_fork(m, "again", NULL, &e), &e);
        EXPECT_EQ(status_sum("common"), 2 * counted);
        shd_close(s);
        expect_digest("again", put);
        fixture_stop(&daemons);
    }
}

/* Of pages of its own, which the model has from when it was begun. */
TEST(a_put_that_is_given_up_leaves_the_values)
{
    struct shd_err e = { 0 };
    char plain[65];
    bool counts = false;
    put_reference(2, /* put= */ false, 0, plain);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    train_pt(m, 2);
    EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
    const uint64_t counted = status_sum("common_counted");
    struct values v = values_of(m, 9);
    v.fail_at = 0;
    EXPECT(put_some(m, &v, &counts, &e) != SHD_OK && !counts);
    EXPECT_EQ(status_sum("common"), counted);
    shd_close(s);
    expect_digest("put", plain);
    restart_all();
    expect_digest("put", plain);
    expect_digest("twin", plain);
    fixture_stop(&daemons);
}

/* Both go back to steps from before and after they were one. */
TEST(snapshots_bring_back_what_they_have)
{
    struct shd_err e = { 0 };
    char two[65], three[65], got[65];
    uint64_t step;
    put_reference(2, /* put= */ false, 0, two);
    put_reference(3, /* put= */ false, 0, three);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *twin;
    train_pt(m, 2);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
    EXPECT(status_sum("common") > 0);
    twin = attach_to(other, "twin");
    train_pt(m, 2);
    train_pt(twin, 1);
    EXPECT_OK(shd_snapshot(twin, &step, &e), &e);
    train_pt(twin, 2);
    EXPECT_OK(shd_model_rewind(m, 2, NULL, &e), &e);
    EXPECT_OK(shd_model_rewind(twin, 3, NULL, &e), &e);
    shd_close(s);
    shd_close(other);
    expect_digest("put", two);
    expect_digest("twin", three);
    restart_all();
    expect_digest("put", two);
    expect_digest("twin", three);
    /* A snapshot from before a put of frozen units: a fork has its own from then on. */
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_drop(s, "twin", NULL, &e), &e);
    m = attach_to(s, "put");
    put_ok(m, 9);
    const struct shd_fork_options kept = { .size = sizeof kept, .exact = true, .step = 2 };
    const uint64_t common = status_sum("common");
    EXPECT_OK(shd_model_fork(m, "now", NULL, &e), &e);
    EXPECT_OK(shd_model_fork_with(m, "then", &kept, NULL, &e), &e);
    EXPECT_EQ(status_sum("common"), common);
    EXPECT_OK(shd_model_rewind(m, 2, NULL, &e), &e);
    shd_close(s);
    expect_digest("put", two);
    expect_digest("then", two);
    s = attach(PATIENT_MS);
    m = attach_to(s, "now");
    expect_put(m, 9);
    train_pt(m, 1);
    digest_of(m, got);
    put_reference(2, /* put= */ true, 1, two);
    EXPECT_STR(got, two);
    shd_close(s);
    fixture_stop(&daemons);
}

/* What readers pin, and what is saved, is of one of them; what is restored has all of its own. */
TEST(readers_checkpoints_and_restores_are_of_one_model)
{
    const struct shd_restore_options options = { .size = sizeof options, .replace = true };
    struct shd_err e = { 0 };
    char two[65], put[65];
    uint64_t step;
    put_reference(2, /* put= */ false, 0, two);
    put_reference(2, /* put= */ true, 1, put);
    fixture_start_kept(&daemons, 2, ";"); /* a restore ends them */
    make_ckpts();
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_pt(s), *twin;
    train_pt(m, 2);
    EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
    twin = attach_to(other, "twin");
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_OK(shd_pin(twin, NULL, &step, &e), &e);
    const size_t bytes = shd_unit_elems(m, 2) * 2; /* the frozen tower, bf16 */
    EXPECT(memcmp(shd_pinned(m, 2), shd_pinned(twin, 2), bytes) == 0);
    save_ok(m, 1);
    const uint64_t counted = status_sum("common_counted");
    put_ok(m, 9);
    train_pt(m, 1);
    EXPECT(memcmp(shd_pinned(m, 2), shd_pinned(twin, 2), bytes) == 0); /* as they were pinned */
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT(memcmp(shd_pinned(m, 2), shd_pinned(twin, 2), bytes) != 0);
    shd_close(s);
    expect_digest("put", put);
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_restore(s, ckpts, &options, NULL, &e), &e);
    EXPECT_EQ(status_sum("common"), counted); /* of the fork alone */
    m = attach_to(s, "put");
    EXPECT_OK(shd_model_fork(m, "again", NULL, &e), &e);
    EXPECT_EQ(status_sum("common_counted"), 2 * counted);
    EXPECT_OK(shd_restore(other, ckpts, &options, NULL, &e), &e); /* of one that has forks */
    EXPECT_EQ(status_sum("common_counted"), 2 * counted);
    shd_close(other);
    shd_close(s);
    end_and_start_all();
    expect_digest("put", two);
    expect_digest("twin", two);
    expect_digest("again", two);
    remove_ckpts();
    fixture_stop(&daemons);
}

/* -- Without memory ---------------------------------------------------------------------------
 */

struct fault { /* shared with the daemon */
    _Atomic int kind;
    _Atomic int left; /* calls until one fails; 0: none does */
};
static struct fault *fault;

static int fail_one(enum sys_kind kind)
{
    if ((int)kind != atomic_load(&fault->kind) || atomic_load(&fault->left) == 0)
        return 0;
    return atomic_fetch_sub(&fault->left, 1) == 1 ? ENOMEM : 0;
}

static void let_fail(int index)
{
    (void)index;
    sys_fault = fail_one;
}

/* A fork that is made is whole, with memory in common or without; the model is what it was. */
static void fork_with_fault(shd_model *m, const char *want, bool *ret_failed, bool *ret_alone)
{
    struct shd_err e = { 0 };
    const int r = shd_model_fork(m, "twin", NULL, &e);
    const bool used = atomic_exchange(&fault->left, 0) == 0;
    *ret_failed = used && r != SHD_OK;
    expect_digest("put", want);
    if (r != SHD_OK)
        return;
    expect_digest("twin", want);
    *ret_alone = used && status_sum("common") < 2 * status_sum("common_counted");
    *ret_alone = *ret_alone || (used && status_sum("common") == 0);
    shd_session *s = attach(PATIENT_MS);
    put_ok(attach_to(s, "twin"), 9); /* which no other model sees */
    shd_close(s);
    expect_digest("put", want);
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_drop(s, "twin", NULL, &e), &e);
    shd_close(s);
}

TEST(calls_that_fail_in_a_fork_change_no_model)
{
    static const enum sys_kind kinds[] = { SYS_MAP, SYS_RESERVE, SYS_ALLOC };
    char want[65];
    uint32_t failed = 0, alone = 0;
    put_reference(2, /* put= */ false, 0, want);
    fault = mmap(NULL, sizeof *fault, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(fault != MAP_FAILED);
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
        fixture_start(&daemons, 1, let_fail);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        train_pt(m, 2);
        for (int n = 1; n <= 70; n++) {
            bool fails = false, own = false;
            atomic_store(&fault->kind, (int)kinds[k]);
            atomic_store(&fault->left, n);
            fork_with_fault(m, want, &fails, &own);
            failed += fails;
            alone += own;
        }
        shd_close(s);
        fixture_stop(&daemons);
    }
    EXPECT(failed > 0 && alone > 0);
    munmap(fault, sizeof *fault);
}

/* -- Killed -----------------------------------------------------------------------------------
 */

TEST(a_keeper_that_has_lost_it_is_said)
{
    struct shd_err e = { 0 };
    shd_model *m;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, wide_spec, &m, &e), &e);
    EXPECT_OK(shd_model_fork(m, "one", NULL, &e), &e);
    shd_close(s);
    fixture_ask(&daemons, KEEPER_FORGET, 0, "-common");
    restart_all();
    s = attach(PATIENT_MS);
    EXPECT(shd_model_attach(s, "base", &m, &e) != SHD_OK);
    EXPECT_HAS(e.text, "the keeper has no segment");
    EXPECT_HAS(e.text, "4194304 bytes of frozen units");
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* Wherever a daemon is killed: the fork is whole, both have what they should, and memory is once
 * what it is. */
TEST(daemons_killed_in_a_fork_lose_nothing)
{
    static const char *const fails[] = {
        "common:copied@1;", "common:stored@1;",
        "common:said@1;",   "common:joined@1;",
        "common:holes@1;",  "common:stored@2;",
        "fork:copied@1;",   "common:said@1;adopt:publish:after@1;",
    };
    char two[65], three[65], got[65];
    put_reference(2, /* put= */ false, 0, two);
    put_reference(3, /* put= */ false, 0, three);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        train_pt(m, 2);
        EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
        EXPECT(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        train_pt(m, 1);
        digest_of(m, got);
        EXPECT_STR(got, three);
        shd_close(s);
        expect_digest("twin", two);
        EXPECT_EQ(status_sum("common"), 2 * status_sum("common_counted"));
        EXPECT(status_sum("common") > 0);
        end_and_start_all();
        expect_digest("put", three);
        expect_digest("twin", two);
        s = attach(PATIENT_MS);
        train_pt(attach_to(s, "twin"), 1);
        EXPECT_OK(shd_model_drop(s, "put", NULL, &e), &e);
        shd_close(s);
        expect_digest("twin", three);
        fixture_stop(&daemons);
    }
}

TEST(daemons_killed_in_a_put_lose_nothing)
{
    static const char *const fails[] = { "common:filled@1;", "common:back@1;", "common:left@1;" };
    char plain[65], put[65], got[65];
    put_reference(2, /* put= */ false, 0, plain);
    put_reference(2, /* put= */ true, 1, put);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        train_pt(m, 2);
        EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
        struct values v = values_of(m, 9);
        bool counts = false;
        while (!counts) { /* as who puts does: what was not committed is put again */
            const int r = put_some(m, &v, &counts, &e);
            EXPECT(r == SHD_OK || r == SHD_EGONE || r == SHD_EBUSY);
        }
        EXPECT(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        train_pt(m, 1);
        digest_of(m, got);
        EXPECT_STR(got, put);
        shd_close(s);
        expect_digest("twin", plain);
        end_and_start_all();
        expect_digest("put", put);
        expect_digest("twin", plain);
        EXPECT_EQ(status_sum("common"), status_sum("common_counted"));
        fixture_stop(&daemons);
    }
}
#endif

TEST_MAIN()
