/* Models that begin with values of the program that opens them: the same bits wherever they are,
 * one creator whoever races, and nothing half made to be seen, whatever is killed when. What is
 * given up is test_client_withdraw.c's. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "proto/share/fdpass.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"
#include "tests/lib/raw_client.h"

static const struct pt_model pt = {
    .name = "begun", .publish = "f32", .accumulate = 1, .frozen = true
};

/* What a creator's values are made of, and what happens to it on the way. */
struct source {
    uint32_t salt;
    uint32_t calls;
    int die_at; /* before this unit is filled: SIGKILL, or else: */
    int lose_at;
    int daemon;  /* is killed, and started again, once */
    int fail_at; /* gives up */
};

#define SOURCE(value)                                               \
    (struct source)                                                 \
    {                                                               \
        .salt = (value), .die_at = -1, .lose_at = -1, .fail_at = -1 \
    }

static float value_at(uint32_t salt, uint32_t unit, uint64_t i)
{
    return toy_noise(salt, 0, unit, i);
}

static uint64_t unit_elems(const shd_model *m, uint32_t unit)
{
    uint64_t end = 0;
    struct shd_tensor t = { .size = sizeof t };
    for (uint32_t i = 0; i < shd_tensors(m); i++) {
        shd_tensor_get(m, i, &t, NULL);
        if (t.unit == unit && t.offset_elems + t.elems > end)
            end = t.offset_elems + t.elems;
    }
    return end;
}

static uint64_t sizes[PT_UNITS]; /* elements up to the end of the last tensor */

static int fill(void *ctx, uint32_t unit, float *values)
{
    struct source *from = ctx;
    from->calls++;
    if ((int)unit == from->die_at)
        raise(SIGKILL);
    if ((int)unit == from->fail_at)
        return 7;
    if ((int)unit == from->lose_at) {
        from->lose_at = -1;
        fixture_restart(&daemons, from->daemon);
    }
    for (uint64_t i = 0; i < sizes[unit]; i++) /* the gaps, too */
        values[i] = value_at(from->salt, unit, i);
    return 0;
}

static int open_from(shd_session *s, struct source *from, shd_model **ret, bool *ret_created,
                     struct shd_err *e)
{
    struct shd_open_options o = {
        .size = sizeof o, .spec_json = pt_spec(&pt), .fill = fill, .ctx = from
    };
    return shd_model_open_with(s, &o, ret, ret_created, e);
}

/* The digest of the values in this process; first of all calls: learns the sizes. */
static void begin(uint32_t salt, char ret_hex[65])
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    struct source from = SOURCE(salt);
    bool created = false;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, pt_spec(&pt), &m, &e), &e);
    EXPECT_EQ(shd_units(m), PT_UNITS);
    for (uint32_t u = 0; u < PT_UNITS; u++)
        sizes[u] = unit_elems(m, u);
    shd_model_close(m);
    EXPECT_OK(open_from(s, &from, &m, &created, &e), &e);
    EXPECT(created);
    EXPECT_EQ(from.calls, PT_UNITS);
    digest_of(m, ret_hex);
    shd_close(s);
}

/* What a worker reads is what `salt` makes, gaps are zero, and the owners have it so. */
static void expect_values(shd_model *m, uint32_t salt, const char *hex)
{
    struct shd_err e = { 0 };
    char got[65];
    EXPECT_EQ(shd_step(m), 0);
    for (uint32_t i = 0; i < shd_tensors(m); i++) {
        struct shd_tensor t = { .size = sizeof t };
        const void *params;
        shd_tensor_get(m, i, &t, NULL);
        EXPECT_OK(shd_acquire(m, t.unit, &params, &e), &e);
        const float *x = params;
        for (uint64_t k = t.offset_elems; k < t.offset_elems + t.elems; k++)
            if (x[k] != value_at(salt, t.unit, k))
                FAIL("tensor %s [%" PRIu64 "] is %g", t.name, k, (double)x[k]);
        if (t.elems % 32 != 0 && t.offset_elems + t.elems < sizes[t.unit])
            EXPECT(x[t.offset_elems + t.elems] == 0);
        shd_release(m, t.unit);
    }
    digest_of(m, got);
    EXPECT_STR(got, hex);
}

TEST(values_are_the_same_bits_in_any_number_of_owners)
{
    char hex[65];
    begin(1, hex);
    for (int count = 1; count <= 3; count++) {
        struct shd_err e = { 0 };
        struct source from = SOURCE(1), late = SOURCE(2);
        shd_model *m, *other;
        bool created = false;
        fixture_start(&daemons, count, NULL);
        shd_session *s = attach(PATIENT_MS), *s2 = attach(PATIENT_MS);
        EXPECT_OK(open_from(s, &from, &m, &created, &e), &e);
        EXPECT(created);
        EXPECT_EQ(from.calls, PT_UNITS);
        expect_values(m, 1, hex);
        EXPECT_OK(open_from(s2, &late, &other, &created, &e), &e);
        EXPECT(!created);
        EXPECT_EQ(late.calls, 0);
        expect_values(other, 1, hex);
        shd_close(s2);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(what_is_begun_so_trains_and_is_adopted_like_any_other)
{
    char hex[65], want[65], got[65];
    begin(3, hex);
    for (int daemon = -1; daemon < 2; daemon++) {
        struct shd_err e = { 0 };
        struct source from = SOURCE(3);
        struct pt_run run = { .steps = 1 };
        struct shd_result result = { .size = sizeof result };
        shd_session *s;
        shd_model *m;
        if (daemon >= 0)
            fixture_start_kept(&daemons, 2, "");
        EXPECT_OK(try_connect(daemon < 0 ? "local:" : daemons.address, PATIENT_MS, &s, &e), &e);
        EXPECT_OK(open_from(s, &from, &m, NULL, &e), &e);
        for (int step = 0; step < 3; step++) {
            if (step == 1 && daemon >= 0)
                fixture_restart(&daemons, daemon);
            EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
        }
        digest_of(m, daemon < 0 ? want : got);
        shd_close(s);
        if (daemon < 0)
            continue;
        EXPECT_STR(got, want);
        fixture_stop(&daemons);
    }
}

/* -- Read back ----------------------------------------------------------------------------------
 */

struct held { /* what the owners of one model hold */
    float *array[PT_UNITS][3];
    uint64_t step, updates;
};

static void get_all(shd_model *m, struct held *held)
{
    struct shd_err e = { 0 };
    for (uint32_t u = 0; u < PT_UNITS; u++)
        for (uint32_t a = 0; a < (shd_unit_frozen(m, u) ? 1 : 3); a++) {
            EXPECT(shd_unit_elems(m, u) >= sizes[u]);
            held->array[u][a] = calloc(shd_unit_elems(m, u), sizeof(float));
            CHECK(held->array[u][a] != NULL);
            EXPECT_OK(shd_get(m, u, (enum shd_array)a, held->array[u][a], &held->step,
                              &held->updates, &e),
                      &e);
        }
}

static void free_all(struct held *held)
{
    for (uint32_t u = 0; u < PT_UNITS; u++)
        for (uint32_t a = 0; a < 3; a++)
            free(held->array[u][a]);
}

TEST(what_owners_hold_is_read_back_to_the_bit)
{
    char hex[65];
    struct held want = { .step = 0 };
    begin(3, hex);
    for (int count = 0; count <= 2; count++) {
        struct shd_err e = { 0 };
        struct held got = { .step = 0 };
        struct source from = SOURCE(3);
        struct pt_run run = { .steps = 1 };
        struct shd_result result = { .size = sizeof result };
        shd_session *s;
        shd_model *m;
        if (count > 0)
            fixture_start_kept(&daemons, count, "");
        EXPECT_OK(try_connect(count == 0 ? "local:" : daemons.address, PATIENT_MS, &s, &e), &e);
        EXPECT_OK(open_from(s, &from, &m, NULL, &e), &e);
        uint64_t step = 9, updates = 9;
        float *x = malloc(shd_unit_elems(m, 0) * sizeof *x);
        EXPECT_EQ(shd_unit_elems(m, PT_UNITS), 0);
        EXPECT_OK(shd_get(m, 0, SHD_PARAMS, x, &step, &updates, &e), &e);
        EXPECT(step == 0 && updates == 0);
        EXPECT(x[3] == value_at(3, 0, 3));
        EXPECT_OK(shd_get(m, 0, SHD_MOMENT2, x, NULL, NULL, &e), &e);
        EXPECT(x[3] == 0);
        for (int i = 0; i < 2; i++)
            EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
        if (count == 2)
            fixture_restart(&daemons, 1);
        get_all(m, count == 0 ? &want : &got);
        for (uint32_t u = 0; u < PT_UNITS && count > 0; u++)
            for (uint32_t a = 0; a < 3; a++)
                if (want.array[u][a] != NULL)
                    EXPECT(memcmp(want.array[u][a], got.array[u][a], sizes[u] * sizeof(float)) ==
                           0);
        EXPECT_EQ(count == 0 ? want.step : got.step, 2);
        EXPECT_EQ(count == 0 ? want.updates : got.updates, 1); /* the first was skipped */
        for (uint32_t u = 0; u < PT_UNITS; u++)
            if (shd_unit_frozen(m, u))
                EXPECT_STATUS(shd_get(m, u, SHD_MOMENT1, x, NULL, NULL, &e), SHD_EINVAL);
        EXPECT_STATUS(shd_get(m, PT_UNITS, SHD_PARAMS, x, NULL, NULL, &e), SHD_ERANGE);
        EXPECT_STATUS(shd_get(m, 0, (enum shd_array)3, x, NULL, NULL, &e), SHD_ERANGE);
        free(x);
        free_all(&got);
        shd_close(s);
        if (count > 0)
            fixture_stop(&daemons);
    }
    free_all(&want);
}

/* -- Races --------------------------------------------------------------------------------------
 */

struct shared {
    _Atomic int created, there, failed;
    _Atomic bool go;
};

static struct shared *share(void)
{
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    return shared;
}

static pid_t fork_opener(struct shared *shared, struct source from)
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    bool created = false;
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    while (!atomic_load(&shared->go))
        sleep_ms(1);
    if (r == SHD_OK)
        r = open_from(s, &from, &m, &created, &e);
    if (r != SHD_OK)
        fprintf(stderr, "opener: %s\n", e.text);
    atomic_fetch_add(r != SHD_OK ? &shared->failed
                     : created   ? &shared->created
                                 : &shared->there,
                     1);
    if (r == SHD_OK)
        shd_close(s);
    _exit(0);
}

static void expect_end(pid_t pid, bool killed)
{
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL : status == 0, 1);
}

TEST(of_those_that_race_one_creates)
{
    char hex[65];
    struct shared *shared = share();
    begin(4, hex);
    for (int round = 0; round < 4; round++) {
        struct shd_err e = { 0 };
        shd_model *m;
        pid_t pids[3];
        *shared = (struct shared){ 0 };
        fixture_start(&daemons, 2, NULL);
        for (int i = 0; i < 3; i++)
            pids[i] = fork_opener(shared, SOURCE(4));
        atomic_store(&shared->go, true);
        for (int i = 0; i < 3; i++)
            expect_end(pids[i], false);
        EXPECT_EQ(shared->failed, 0);
        EXPECT_EQ(shared->created, 1);
        EXPECT_EQ(shared->there, 2);
        shd_session *s = attach(PATIENT_MS);
        EXPECT_OK(shd_model_attach(s, "begun", &m, &e), &e);
        expect_values(m, 4, hex);
        shd_close(s);
        fixture_stop(&daemons);
    }
    munmap(shared, sizeof *shared);
}

/* -- Deaths -------------------------------------------------------------------------------------
 */

/* After whatever happened: nobody sees what the one with salt 5 had begun, unless all of it. */
static void expect_next(uint32_t salt, bool may_be_there)
{
    char mine[65], theirs[65];
    struct shd_err e = { 0 };
    struct source from = SOURCE(salt);
    shd_model *m;
    bool created = false;
    begin(salt, mine);
    begin(5, theirs);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(open_from(s, &from, &m, &created, &e), &e);
    EXPECT(created || may_be_there);
    expect_values(m, created ? salt : 5, created ? mine : theirs);
    shd_close(s);
}

TEST(a_creator_killed_at_any_unit_leaves_nothing)
{
    char hex[65];
    struct shared *shared = share();
    begin(5, hex);
    for (int unit = 0; unit < (int)PT_UNITS; unit += 2) {
        struct source dies = SOURCE(5);
        dies.die_at = unit;
        *shared = (struct shared){ .go = true };
        fixture_start(&daemons, 2, NULL);
        const pid_t pid = fork_opener(shared, dies), waits = fork_opener(shared, SOURCE(5));
        int status; /* it dies, unless the other was first */
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        expect_end(waits, false);
        EXPECT_EQ(shared->created, 1);
        fixture_stop(&daemons);
        fixture_start(&daemons, 2, NULL);
        expect_end(fork_opener(shared, dies), true);
        expect_next(6, false);
        fixture_stop(&daemons);
    }
    munmap(shared, sizeof *shared);
}

TEST(a_daemon_killed_at_any_unit_has_all_begun_anew)
{
    char hex[65];
    begin(5, hex);
    for (int daemon = 0; daemon < 2; daemon++)
        for (int unit = 0; unit < (int)PT_UNITS; unit += 3) {
            struct shd_err e = { 0 };
            struct source from = SOURCE(5);
            shd_model *m;
            bool created = false;
            from.lose_at = unit;
            from.daemon = daemon;
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            EXPECT_OK(open_from(s, &from, &m, &created, &e), &e);
            EXPECT(created);
            EXPECT(from.calls > PT_UNITS);
            expect_values(m, 5, hex);
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

TEST(a_creator_killed_at_any_point_leaves_all_or_nothing)
{
    NEEDS_NO_PAIRS();
    static const struct {
        const char *name;
        bool opened;
    } points[] = {
        { "open:begun", false }, { "open:all_begun", false }, { "open:put", false },
        { "open:full", false },  { "open:opened", true },     { "open:all_opened", true }
    };
    char hex[65];
    struct shared *shared = share();
    begin(5, hex);
    fail_point_hook = kill_here;
    for (size_t i = 0; i < ARRAY_SIZE(points); i++)
        for (int restart = -1; restart < 2; restart++) {
            *shared = (struct shared){ .go = true };
            fixture_start_kept(&daemons, 2, "");
            kill_point = points[i].name;
            expect_end(fork_opener(shared, SOURCE(5)), true);
            kill_point = NULL;
            if (restart >= 0)
                fixture_restart(&daemons, restart);
            struct shd_err e = { 0 };
            shd_session *s = attach(PATIENT_MS);
            shd_model *m;
            const int r = shd_model_attach(s, i % 2 != 0 ? "begun" : NULL, &m, &e);
            if (points[i].opened)
                EXPECT_OK(r, &e);
            else
                EXPECT_STATUS(r, SHD_ENOENT);
            if (r == SHD_OK)
                expect_values(m, 5, hex);
            shd_close(s);
            expect_next(6, points[i].opened);
            fixture_stop(&daemons);
        }
    fail_point_hook = NULL;
    munmap(shared, sizeof *shared);
}

enum mishap { NO_MISHAP, REPLICA_RESTARTS, HOST_LOST, MISHAPS };

/* Owner 0's replica waits for owner 0's word, and has the word where the host of that one is lost.
 */
TEST(a_creator_killed_at_any_point_leaves_all_or_nothing_with_replicas)
{
    NEEDS_PAIRS();
    static const struct {
        const char *name;
        bool opened, opened_by_replica;
    } points[] = {
        { "open:put", false, false },      { "open:others_full", false, false },
        { "open:full", false, true },      { "open:opened", true, true },
        { "open:all_opened", true, true },
    };
    char hex[65];
    struct shared *shared = share();
    begin(5, hex);
    fail_point_hook = kill_here;
    for (size_t i = 0; i < ARRAY_SIZE(points); i++)
        for (int what = 0; what < MISHAPS; what++) {
            const bool opened = what == HOST_LOST ? points[i].opened_by_replica : points[i].opened;
            struct shd_err e = { 0 };
            shd_model *m;
            *shared = (struct shared){ .go = true };
            fixture_start_kept(&daemons, 2, "");
            kill_point = points[i].name;
            expect_end(fork_opener(shared, SOURCE(5)), true);
            kill_point = NULL;
            if (what == REPLICA_RESTARTS)
                fixture_restart(&daemons, 2);
            if (what == HOST_LOST)
                paired_put_out("a");
            shd_session *s = attach(PATIENT_MS);
            const int r = shd_model_attach(s, "begun", &m, &e);
            if ((r == SHD_OK) != opened || (r != SHD_OK && r != SHD_ENOENT))
                FAIL("%s, %d: %s", points[i].name, what, e.text);
            if (r == SHD_OK)
                expect_values(m, 5, hex);
            shd_close(s);
            expect_next(6, opened);
            fixture_stop(&daemons);
        }
    fail_point_hook = NULL;
    munmap(shared, sizeof *shared);
}

static void stop_replica(const char *name)
{
    if (strcmp(name, "open:opened") == 0)
        kill(daemons.pids[2], SIGSTOP);
}

static bool has_opened(int daemon)
{
    struct http_reply reply = http_get(&daemons, daemon, "/status");
    const bool has = strstr(reply.body, "\"begun\"") != NULL;
    free(reply.text);
    return has;
}

/* All but owner 0's replica have opened it, and who is next is to make it. */
TEST(a_replica_that_has_the_word_makes_nothing_anew)
{
    char hex[65];
    struct shd_err e = { 0 };
    struct source from = SOURCE(6);
    struct shared *shared = share();
    shd_model *m;
    bool created = true;
    NEEDS_PAIRS();
    begin(5, hex);
    *shared = (struct shared){ .go = true };
    fixture_start_kept(&daemons, 2, "");
    fail_point_hook = stop_replica;
    const pid_t pid = fork_opener(shared, SOURCE(5));
    fail_point_hook = NULL;
    EXPECT_SOON(has_opened(1) && has_opened(3));
    kill(pid, SIGKILL);
    expect_end(pid, true);
    fixture_restart(&daemons, 2);
    paired_put_out("a");
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(open_from(s, &from, &m, &created, &e), &e);
    EXPECT(!created);
    expect_values(m, 5, hex);
    shd_close(s);
    fixture_stop(&daemons);
    munmap(shared, sizeof *shared);
}

TEST(daemons_killed_at_any_point_have_all_or_nothing)
{
    static const char *const points[] = {
        "create:put",          "create:put@3",       "create:full:before", "create:full:after",
        "create:ready:before", "create:ready:after", "keeper:store:after",
    };
    char hex[65];
    begin(5, hex);
    for (size_t i = 0; i < ARRAY_SIZE(points); i++)
        for (int count = 1; count <= 2; count++) {
            struct shd_err e = { 0 };
            struct source from = SOURCE(5);
            shd_model *m;
            char fail[64];
            snprintf(fail, sizeof fail, "%s;", points[i]);
            fixture_start_kept(&daemons, count, fail);
            shd_session *s = attach(PATIENT_MS);
            if (open_from(s, &from, &m, NULL, &e) != SHD_OK)
                FAIL("%s, %d daemons: %s", points[i], count, e.text);
            expect_values(m, 5, hex);
            shd_close(s);
            EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, count - 1, "") > 1 ||
                        strncmp(points[i], "create:full", 11) == 0);
            fixture_stop(&daemons);
        }
}
#endif

/* -- Waits and errors ---------------------------------------------------------------------------
 */

TEST(attach_by_name_waits_as_long_as_it_was_told)
{
    struct shd_err e = { 0 };
    struct shd_open_options o = { .size = sizeof o, .name = "begun" };
    char hex[65];
    shd_model *m;
    struct shared *shared = share();
    begin(5, hex);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, NULL, &e), SHD_ENOENT);
    o.wait_ms = test_paced(30);
    const uint64_t start_ms = test_now_ms();
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, NULL, &e), SHD_ETIMEDOUT);
    EXPECT(test_now_ms() - start_ms >= o.wait_ms);
    EXPECT_HAS(e.text, "no model 'begun'");
    const pid_t pid = fork_opener(shared, SOURCE(5));
    o.wait_ms = PATIENT_MS;
    atomic_store(&shared->go, true);
    bool created = true;
    EXPECT_OK(shd_model_open_with(s, &o, &m, &created, &e), &e);
    EXPECT(!created);
    expect_values(m, 5, hex);
    expect_end(pid, false);
    shd_close(s);
    fixture_stop(&daemons);
    munmap(shared, sizeof *shared);
}

/* Seen from another session while the units are put. */
struct looked {
    struct source from;
    shd_session *other;
};

static int look_and_fill(void *ctx, uint32_t unit, float *values)
{
    struct looked *l = ctx;
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_STATUS(shd_model_attach(l->other, "begun", &m, &e), SHD_ENOENT);
    EXPECT_STATUS(shd_model_attach(l->other, NULL, &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "puts its start values");
    EXPECT_STATUS(shd_model_open(l->other, pt_spec(&pt), &m, &e), SHD_ENOENT);
    struct shd_open_options o = {
        .size = sizeof o, .spec_json = pt_spec(&pt), .wait_ms = 1, .fill = fill, .ctx = &l->from
    };
    EXPECT_STATUS(shd_model_open_with(l->other, &o, &m, NULL, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "puts its start values");
    return fill(&l->from, unit, values);
}

TEST(nobody_sees_a_model_before_it_is_whole_and_who_gives_up_leaves_nothing)
{
    struct shd_err e = { 0 };
    char hex[65];
    shd_model *m;
    bool created = false;
    begin(5, hex);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    struct looked looked = { .from = SOURCE(5), .other = attach(PATIENT_MS) };
    struct shd_open_options o = {
        .size = sizeof o, .spec_json = pt_spec(&pt), .fill = look_and_fill, .ctx = &looked
    };
    looked.from.fail_at = 2;
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, &created, &e), SHD_EINTERNAL);
    EXPECT_HAS(e.text, "unit 2");
    EXPECT_HAS(e.text, "gave up with 7");
    EXPECT_STATUS(shd_model_attach(looked.other, NULL, &m, &e), SHD_ENOENT);
    looked.from = SOURCE(5);
    EXPECT_OK(shd_model_open_with(s, &o, &m, &created, &e), &e);
    EXPECT(created);
    expect_values(m, 5, hex);
    shd_close(looked.other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(options_that_contradict_each_other_are_refused)
{
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    struct source from = SOURCE(5);
    struct shd_open_options o = { .size = sizeof o, .name = "begun", .spec_json = pt_spec(&pt) };
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, NULL, &e), SHD_EINVAL);
    o = (struct shd_open_options){ .size = sizeof o, .name = "begun", .fill = fill };
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, NULL, &e), SHD_EINVAL);
    o = (struct shd_open_options){ .size = sizeof o, .name = "begun", .wait_ms = UINT64_MAX };
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, NULL, &e), SHD_ERANGE);
    o.size = 1;
    EXPECT_STATUS(shd_model_open_with(s, &o, &m, NULL, &e), SHD_EINVAL);
    from.fail_at = 1;
    EXPECT_STATUS(open_from(s, &from, &m, NULL, &e), SHD_EINTERNAL);
    shd_close(s);
}

TEST(owners_of_an_older_version_are_named)
{
    struct shd_err e = { 0 };
    struct source from = SOURCE(5);
    shd_model *m;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    for (int i = 0; i < 2; i++)
        s->hub->links[i].peer.requests = WIRE_HISTORY +
                                         1; /* as if their Welcome had said nothing */
    EXPECT_STATUS(open_from(s, &from, &m, NULL, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "daemon cpu0");
    EXPECT_HAS(e.text, "does not know start values: it is of an older version");
    EXPECT_OK(shd_model_open(s, pt_spec(&pt), &m, &e), &e);
    float *x = malloc(shd_unit_elems(m, 0) * sizeof *x);
    EXPECT_STATUS(shd_get(m, 0, SHD_PARAMS, x, NULL, NULL, &e), SHD_ENOTSUP);
    free(x);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Made by hand -------------------------------------------------------------------------------
 */

static int ask_create(struct raw *r, enum wire_create_what what, uint64_t origin,
                      struct wire_reply *reply)
{
    return raw_ask(r,
                   (struct wire_request){
                       .type = WIRE_CREATE,
                       .create = { .what = what,
                                   .origin = origin,
                                   .name = "begun",
                                   .spec = { (const uint8_t *)pt_spec(&pt), strlen(pt_spec(&pt)) },
                                   .owners = 1 } },
                   reply);
}

static int ask_put(struct raw *r, uint64_t origin, uint32_t unit, struct wire_reply *reply)
{
    return raw_ask(r, (struct wire_request){ .type = WIRE_PUT, .put = { origin, unit } }, reply);
}

TEST(requests_that_are_wrong_are_refused)
{
    static struct raw r, other;
    static struct wire_reply reply;
    trainer_start();
    raw_open(&r);
    raw_open(&other);
    EXPECT_STATUS(raw_hello(&r, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT(reply.welcome.requests > WIRE_PUT);
    EXPECT_STATUS(raw_hello(&other, SHD_PROTOCOL, WIRE_TRAINER, &reply), SHD_OK);
    EXPECT_STATUS(ask_put(&r, 1, 0, &reply), SHD_ENOENT);
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_FULL, 1, &reply), SHD_ENOENT);
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_BEGIN, 1, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_YOURS);
    EXPECT_STATUS(ask_create(&other, WIRE_CREATE_BEGIN, 2, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_OTHERS);
    EXPECT_STATUS(ask_put(&other, 1, 0, &reply), SHD_ENOENT); /* another session's */
    EXPECT_STATUS(ask_put(&r, 1, PT_UNITS, &reply), SHD_ERANGE);
    EXPECT_HAS(reply.text, "unit 7 of a model with 7");
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_FULL, 1, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "unit 0 'embed' was not put");
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_OPEN, 1, &reply), SHD_EINVAL);
    EXPECT_STATUS(ask_create(&other, WIRE_CREATE_DROP, 1, &reply), SHD_ENOENT);
    for (uint32_t u = 0; u < PT_UNITS; u++)
        EXPECT_STATUS(ask_put(&r, 1, u, &reply), SHD_OK);
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_FULL, 1, &reply), SHD_OK);
    EXPECT_STATUS(ask_put(&r, 1, 0, &reply), SHD_EINVAL);
    EXPECT_HAS(reply.text, "has all its start values");
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_OPEN, 1, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_OPEN);
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_OPEN, 1, &reply), SHD_OK);
    EXPECT_STATUS(ask_put(&r, 1, 0, &reply), SHD_ENOENT); /* finished */
    EXPECT_STATUS(ask_create(&r, WIRE_CREATE_BEGIN, 3, &reply), SHD_OK);
    EXPECT_EQ(reply.created.what, WIRE_CREATED_OPEN);
    const struct {
        struct wire_get get;
        int status;
    } gets[] = { { { 9, 0, 0 }, SHD_ENOENT },
                 { { 2, PT_UNITS, 0 }, SHD_ERANGE },
                 { { 2, 2, 1 }, SHD_EINVAL }, /* frozen */
                 { { 1, 0, 2 }, SHD_EINVAL }, /* SGD */
                 { { 2, 0, 2 }, SHD_OK } };
    for (size_t i = 0; i < ARRAY_SIZE(gets); i++)
        EXPECT_STATUS(
            raw_ask(&r, (struct wire_request){ .type = WIRE_GET, .get = gets[i].get }, &reply),
            gets[i].status);
    raw_close(&r);
    raw_close(&other);
    trainer_step();
    trainer_stop(1);
}

TEST_MAIN()
