/* Daemons killed with SIGKILL, at named points and at random moments, and their successors: same
 * digest, metrics, decisions and blobs as undisturbed, nothing leaked, nothing dropped that cannot
 * be adopted. The keeper is tests/keeper.h's.
 */
#include <pthread.h>
#include <sys/mman.h>

#include "daemon/ledger.h"
#include "tests/client_remote.h"
#include "tests/policy_toy.h"

#define STEPS      6u
#define TIMEOUT_MS 10000u

/* -- Models -------------------------------------------------------------------------------------
 */

struct kind {
    const char *optimizer; /* JSON of optimizer */
    const char *publish;
    bool frozen, routed;
    uint64_t overflow_step;
};

static const struct kind kinds[] = {
    { TOY_ADAMW, "f32", true, true, 1 },
    { TOY_ADAMW, "bf16", false, false, UINT64_MAX },
    { TOY_SGD, "f32", false, true, 0 },
    { TOY_LION, "f16", true, false, 2 },
};

static const char *kind_spec(const struct kind *k)
{
    static char json[4096];
    const char *plain = pt_spec(
        &(struct pt_model){ .name = "kept", .publish = k->publish, .frozen = k->frozen });
    const char *at = strstr(plain, "\"kind\": \"adamw\"");
    CHECK(at != NULL);
    snprintf(json, sizeof json, "%.*s%s%s", (int)(at - plain), plain, k->optimizer,
             at + strlen("\"kind\": \"adamw\""));
    return json;
}

struct past { /* what each step came to */
    struct shd_result result[STEPS];
    bool known[STEPS];
    char hex[65];
};

static long compute_ms; /* of each forward and backward */

static struct pt_run run_of(const struct kind *k)
{
    return (struct pt_run){ .routed = k->routed,
                            .t = { .overflow_step = k->overflow_step, .compute_ms = compute_ms } };
}

static int train_step(shd_model *m, struct pt_run *run, struct past *past, struct shd_err *e)
{
    char blob[32];
    struct shd_result result;
    const uint64_t step = shd_step(m);
    run->update = toy_update(step);
    run->update.blob = blob;
    run->update.blob_bytes = (size_t)snprintf(blob, sizeof blob, "after %d", (int)step);
    const int r = pt_step(m, run, toy_all_micros, TOY_MICROS, &result, e);
    run->update.blob = NULL;
    run->update.blob_bytes = 0;
    if (r == SHD_OK && result.step < STEPS) {
        past->result[result.step] = result;
        past->known[result.step] = true;
    }
    return r;
}

static int finish(shd_model *m, struct past *past, struct shd_err *e)
{
    char blob[32] = "", want[32];
    size_t bytes = 0;
    int r = shd_digest(m, past->hex, NULL, e);
    if (r == SHD_OK)
        r = shd_blob(m, blob, sizeof blob, &bytes, e);
    if (r != SHD_OK)
        return r;
    snprintf(want, sizeof want, "after %d", (int)STEPS - 1);
    EXPECT_EQ(bytes, strlen(want));
    EXPECT(memcmp(blob, want, bytes) == 0);
    return SHD_OK;
}

/* Attach and train till the end or till something breaks. True: done. */
static bool train(const char *address, const struct kind *k, struct past *past, struct shd_err *e)
{
    shd_session *s = NULL;
    shd_model *m = NULL;
    struct pt_run run = run_of(k);
    int r = try_connect(address, TIMEOUT_MS, &s, e);
    if (r == SHD_OK)
        r = shd_model_open(s, kind_spec(k), &m, e);
    while (r == SHD_OK && shd_step(m) < STEPS)
        r = train_step(m, &run, past, e);
    if (r == SHD_OK)
        r = finish(m, past, e);
    shd_close(s);
    return r == SHD_OK;
}

static void reference(const struct kind *k, struct past *ret)
{
    struct shd_err e = { 0 };
    *ret = (struct past){ .known = { false } };
    if (!train("local:", k, ret, &e))
        FAIL("reference: %s", e.text);
}

static void expect_same(const struct past *got, const struct past *want)
{
    EXPECT_STR(got->hex, want->hex);
    for (uint32_t i = 0; i < STEPS; i++) {
        if (!got->known[i])
            continue; /* whoever would have been told was not there any more */
        EXPECT_EQ(got->result[i].skipped, want->result[i].skipped);
        for (int n = 0; n < 2; n++)
            EXPECT(got->result[i].metrics[n] == want->result[i].metrics[n]);
        EXPECT(got->result[i].skipped || got->result[i].grad_norm == want->result[i].grad_norm);
    }
}

/* -- Killed at random ---------------------------------------------------------------------------
 */

struct killer { /* has the keeper to itself while it runs */
    uint64_t seed;
    int daemons;
    _Atomic bool done;
};

/* Some are killed before they serve. */
static void *kill_at_random(void *arg)
{
    struct killer *k = arg;
    while (!atomic_load(&k->done)) {
        const long most_ns = test_random(&k->seed) % 3 == 0 ? 200000000 : 20000000;
        nanosleep(
            &(struct timespec){ .tv_nsec = (long)(test_random(&k->seed) % (uint64_t)most_ns) },
            NULL);
        fixture_ask(&daemons, KEEPER_KILL, (int)(test_random(&k->seed) % (uint64_t)k->daemons), "");
    }
    return NULL;
}

static void train_among_kills(const struct kind *kind, int count, uint64_t seed)
{
    struct past want, got = { .known = { false } };
    struct shd_err e = { 0 };
    struct killer killer = { .seed = seed, .daemons = count };
    pthread_t thread;
    reference(kind, &want);
    fixture_start_kept(&daemons, count, ";");
    CHECK(pthread_create(&thread, NULL, kill_at_random, &killer) == 0);
    compute_ms = 1; /* leave them time */
    const bool done = train(daemons.dir, kind, &got, &e);
    compute_ms = 0;
    atomic_store(&killer.done, true);
    pthread_join(thread, NULL);
    if (!done)
        FAIL("%s", e.text);
    expect_same(&got, &want);
    printf("  %ld starts of cpu0\n", fixture_ask(&daemons, KEEPER_STARTS, 0, ""));
    for (int i = 0; i < count; i++)
        fixture_wait_up(&daemons, i);
    got = (struct past){ .known = { false } }; /* and what is left is complete */
    if (!train(daemons.dir, kind, &got, &e))
        FAIL("%s", e.text);
    EXPECT_STR(got.hex, want.hex);
    fixture_stop(&daemons);
}

TEST(killed_at_random_moments_goes_on_with_the_same_bits)
{
    uint64_t seed = 20270301;
    printf("seed %" PRIu64 "\n", seed);
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++)
        train_among_kills(&kinds[i], 1 + (int)i % 2, test_random(&seed));
}

/* -- Killed at named points ---------------------------------------------------------------------
 */

#ifdef SHD_FAIL_POINTS
static const char *const points[] = {
    "model:segments:after", "keeper:store:before", "keeper:store:after", "model:ready:before",
    "model:ready:after",    "step:metrics:before", "step:metrics:after", "step:cell:before",
    "step:cell:after",      "step:commit:before",  "step:commit:after",  "apply:done:before",
    "apply:done:after",     "kern:chunk:before",   "kern:chunk:after",   "kern:done:before",
    "kern:done:after",
};
static const char *const adopt_points[] = {
    "adopt:repair:before", "adopt:repair:after", "adopt:publish:after",
    "adopt:resume:after",  "kern:done:before",   "keeper:remove:before",
};

/* fails: of one start after the other, each ended by a ';'. Returns how many were killed. */
static long kill_at(const struct kind *k, const struct past *want, const char *fails)
{
    struct past got = { .known = { false } };
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 1, fails);
    if (!train(daemons.dir, k, &got, &e))
        FAIL("after %s: %s", fails, e.text);
    if (strcmp(got.hex, want->hex) != 0)
        fprintf(stderr, "after %s:\n", fails);
    expect_same(&got, want);
    const long killed = fixture_ask(&daemons, KEEPER_STARTS, 0, "") - 1;
    fixture_stop(&daemons);
    return killed;
}

TEST(killed_at_each_point_goes_on_with_the_same_bits)
{
    static const int passages[] = { 1, 2, 7, 23 };
    for (size_t i = 0; i < 3; i += 2) {
        struct past want;
        long kills = 0;
        reference(&kinds[i], &want);
        for (size_t p = 0; p < ARRAY_SIZE(points); p++)
            for (size_t n = 0; n < ARRAY_SIZE(passages); n++) {
                char fail[64];
                snprintf(fail, sizeof fail, "%s@%d;", points[p], passages[n]);
                const long killed = kill_at(&kinds[i], &want, fail);
                EXPECT(killed > 0 || n > 0 || strncmp(points[p], "apply", 5) == 0);
                kills += killed;
            }
        printf("  %ld kills\n", kills);
    }
}

TEST(killed_again_while_it_adopts_goes_on_with_the_same_bits)
{
    static const char *const first[] = { "step:commit:after@2", "kern:chunk:after@40",
                                         "kern:done:before@17" };
    struct past want;
    reference(&kinds[0], &want);
    for (size_t i = 0; i < ARRAY_SIZE(first); i++)
        for (size_t p = 0; p < ARRAY_SIZE(adopt_points); p++) {
            char fails[160];
            snprintf(fails, sizeof fails, "%s;%s;%s;", first[i], adopt_points[p], adopt_points[p]);
            EXPECT(kill_at(&kinds[0], &want, fails) > 0);
        }
}
#endif

/* -- What cannot be adopted ---------------------------------------------------------------------
 */

/* The stored ledger, mapped here. */
static struct ledger_head *stored_ledger(uint64_t *ret_bytes)
{
    int fd;
    EXPECT(keeper_ask(daemons.control, KEEPER_GIVE, 0, "-ledger", &fd) == 1 && fd >= 0);
    struct stat st;
    EXPECT_EQ(fstat(fd, &st), 0);
    *ret_bytes = (uint64_t)st.st_size;
    void *base = mmap(NULL, *ret_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    EXPECT(base != MAP_FAILED);
    return base;
}

static void restart_with(void (*spoil)(struct ledger_head *h))
{
    uint64_t bytes;
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    struct ledger_head *h = stored_ledger(&bytes);
    spoil(h);
    munmap(h, bytes);
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
}

/* Two steps of kinds[0], kept. */
static void start_and_train(struct past *got)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    struct pt_run run = run_of(&kinds[0]);
    *got = (struct past){ .known = { false } };
    fixture_start_kept(&daemons, 1, "");
    EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, kind_spec(&kinds[0]), &m, &e), &e);
    for (int i = 0; i < 2; i++)
        EXPECT_OK(train_step(m, &run, got, &e), &e);
    shd_close(s);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 2);
}

static void expect_refused(int status, const char *why)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &s, &e), &e);
    EXPECT_STATUS(shd_model_open(s, kind_spec(&kinds[0]), &m, &e), status);
    EXPECT_HAS(e.text, why);
    EXPECT_HAS(e.text, "kept");
    e = (struct shd_err){ 0 };
    EXPECT_OK(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), &e); /* others can be had */
    shd_close(s);
}

static void expect_adopted(struct past *got)
{
    struct past want;
    struct shd_err e = { 0 };
    reference(&kinds[0], &want);
    if (!train(daemons.dir, &kinds[0], got, &e))
        FAIL("%s", e.text);
    expect_same(got, &want);
}

static void leave_alone(struct ledger_head *h)
{
    (void)h;
}

static void make_newer(struct ledger_head *h)
{
    h->version += 1;
}

static void make_older(struct ledger_head *h)
{
    h->version -= 1;
}

TEST(ledger_of_another_version_is_refused_and_kept_for_its_own)
{
    struct past got;
    start_and_train(&got);
    restart_with(make_newer);
    expect_refused(SHD_ENOTSUP, "version 2");
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 4); /* and those of the other model */
    restart_with(make_older);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

static void spoil_commits(struct ledger_head *h)
{
    atomic_fetch_add(&h->commits, 1);
}

static void mend_commits(struct ledger_head *h)
{
    atomic_fetch_sub(&h->commits, 1);
}

static void spoil_places(struct ledger_head *h)
{
    h->units_at += 128;
}

static void mend_places(struct ledger_head *h)
{
    h->units_at -= 128;
}

static void spoil_units(struct ledger_head *h)
{
    h->units -= 1;
}

static void mend_units(struct ledger_head *h)
{
    h->units += 1;
}

static void spoil_spec(struct ledger_head *h)
{
    *((char *)h + h->spec_at) = '[';
}

static void mend_spec(struct ledger_head *h)
{
    *((char *)h + h->spec_at) = '{';
}

static void spoil_state(struct ledger_head *h)
{
    h->state_bytes += 4096;
}

static void mend_state(struct ledger_head *h)
{
    h->state_bytes -= 4096;
}

static void spoil_instance(struct ledger_head *h)
{
    h->instance ^= 1;
}

TEST(ledgers_that_contradict_themselves_are_refused_and_kept)
{
    static const struct {
        void (*spoil)(struct ledger_head *h), (*mend)(struct ledger_head *h);
        int status;
        const char *why;
    } cases[] = {
        { spoil_commits, mend_commits, SHD_ESEGMENT, "commits" },
        { spoil_places, mend_places, SHD_ESEGMENT, "not where" },
        { spoil_units, mend_units, SHD_ESEGMENT, "not where" },
        { spoil_spec, mend_spec, SHD_EINVAL, "" },
        { spoil_state, mend_state, SHD_ESEGMENT, "bytes of state" },
        { spoil_instance, spoil_instance, SHD_ESEGMENT, "instance" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct past got;
        start_and_train(&got);
        restart_with(cases[i].spoil);
        expect_refused(cases[i].status, cases[i].why);
        restart_with(cases[i].mend);
        expect_adopted(&got);
        fixture_stop(&daemons);
    }
}

TEST(missing_state_segment_is_said)
{
    struct past got;
    start_and_train(&got);
    fixture_ask(&daemons, KEEPER_FORGET, 0, "-state");
    restart_with(leave_alone);
    expect_refused(SHD_ESEGMENT, "no state segment");
    fixture_stop(&daemons);
}

static void make_unready(struct ledger_head *h)
{
    atomic_store(&h->ready, 0);
}

TEST(model_without_all_initial_values_is_dropped_and_made_again)
{
    struct past got;
    start_and_train(&got);
    restart_with(make_unready);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 0);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

TEST(terminated_in_good_order_goes_on_too)
{
    struct past got;
    start_and_train(&got);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_TERM, 0, ""), 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 2);
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

/* So that a manager's limit for starts ends only one that hangs: before each part of the work. */
TEST(adoption_asks_for_time_and_says_what_it_does)
{
    struct past got;
    start_and_train(&got);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_SAID, 0, "EXTEND_TIMEOUT_USEC="), 0);
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_SAID, 0, "STATUS=Adopting model kept: mapping"), 1);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_SAID, 0, "STATUS=Adopting model kept: repairing"), 1);
    EXPECT(fixture_ask(&daemons, KEEPER_SAID, 0, "STATUS=Adopting model kept: publishing") == 1);
    EXPECT(fixture_ask(&daemons, KEEPER_SAID, 0, "EXTEND_TIMEOUT_USEC=300000000") >= 4);
    expect_adopted(&got);
    fixture_stop(&daemons);
}

/* -- State that is gone --------------------------------------------------------------------------
 */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* An owner whose keeper has nothing begins anew at step 0, beside another one at `steps`: a worker
 * that comes then, and one that was there, are told so, by name, and at once. */
static void lose_one_owner(uint64_t steps)
{
    struct past got;
    struct shd_err e = { 0 };
    shd_session *s, *late;
    shd_model *m, *other;
    const struct kind *k = &kinds[1];
    struct pt_run run = run_of(k);
    fixture_start_kept(&daemons, 2, "");
    EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, kind_spec(k), &m, &e), &e);
    while (shd_step(m) < steps)
        EXPECT_OK(train_step(m, &run, &got, &e), &e);
    fixture_ask(&daemons, KEEPER_KILL, 1, "");
    while (fixture_ask(&daemons, KEEPER_COUNT, 1, "") > 0)
        fixture_ask(&daemons, KEEPER_FORGET, 1, "");
    fixture_succeed(&daemons, 1, "");
    fixture_wait_up(&daemons, 1);
    const double start_s = now_s();
    EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &late, &e), &e);
    EXPECT_STATUS(shd_model_open(late, kind_spec(k), &other, &e), SHD_ESTEP);
    EXPECT(now_s() - start_s < 5);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "cpu1 lost its state");
    shd_close(late);
    EXPECT_STATUS(train_step(m, &run, &got, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "committed state is lost");
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(owner_that_lost_its_state_is_named_at_once)
{
    lose_one_owner(1); /* looks like an owner whose commit is still to come */
    lose_one_owner(3);
}

/* A process of its own, for it is stopped: computes micro-batch 0 and waits for the others'. */
static void stopped_worker(const char *address)
{
    shd_session *s;
    shd_model *m;
    struct shd_err e = { 0 };
    struct pt_run run = run_of(&kinds[1]);
    struct shd_result result;
    const uint32_t mine[] = { 0 };
    run.update = toy_update(0);
    int r = try_connect(address, /* timeout_ms= */ 1500, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, kind_spec(&kinds[1]), &m, &e);
    if (r == SHD_OK)
        r = pt_step(m, &run, mine, 1, &result, &e);
    if (r != SHD_OK)
        printf("  the stopped one: %s\n", e.text);
    fflush(stdout);
    _exit(r == SHD_OK ? 0 : 1);
}

TEST(worker_that_was_stopped_has_its_time_again)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    struct pt_run run = run_of(&kinds[1]);
    struct shd_result result;
    const uint32_t others[] = { 1, 2, 3 };
    int status = 0;
    run.update = toy_update(0);
    fixture_start_kept(&daemons, 2, "");
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        stopped_worker(daemons.dir);
    sleep_ms(500); /* it waits */
    kill(pid, SIGSTOP);
    sleep_ms(2500);
    kill(pid, SIGCONT);
    sleep_ms(100);
    EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, kind_spec(&kinds[1]), &m, &e), &e);
    EXPECT_OK(pt_step(m, &run, others, 3, &result, &e), &e);
    shd_close(s);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    fixture_stop(&daemons);
}

/* -- Several owners, some without elements ------------------------------------------------------
 */

TEST(all_owners_killed_in_the_middle_of_a_step_go_on)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct past want, got = { .known = { false } };
        struct shd_err e = { 0 };
        reference(&kinds[i], &want);
        fixture_start_kept(&daemons, 3, "");
        for (uint32_t step = 0; step < STEPS; step++) {
            shd_session *s;
            shd_model *m;
            struct pt_run run = run_of(&kinds[i]);
            EXPECT_OK(try_connect(daemons.dir, TIMEOUT_MS, &s, &e), &e);
            EXPECT_OK(shd_model_open(s, kind_spec(&kinds[i]), &m, &e), &e);
            EXPECT_EQ(shd_step(m), step);
            EXPECT_OK(train_step(m, &run, &got, &e), &e);
            for (int d = 0; d < 3; d++)
                fixture_ask(&daemons, KEEPER_KILL, d, ""); /* while updates are applied */
            shd_close(s);
            for (int d = 0; d < 3; d++)
                fixture_succeed(&daemons, d, "");
            for (int d = 0; d < 3; d++)
                fixture_wait_up(&daemons, d);
        }
        if (!train(daemons.dir, &kinds[i], &got, &e))
            FAIL("%s", e.text);
        expect_same(&got, &want);
        fixture_stop(&daemons);
    }
}

TEST_MAIN()
