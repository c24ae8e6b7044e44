/* Puts in which daemons or workers are killed, or stopped: all of it is there or nothing, at all
 * owners. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/path.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "tests/lib/paired.h"
#include "tests/lib/put_toy.h"

TEST(a_daemon_killed_while_values_are_written_has_all_written_anew)
{
    char want[65], got[65];
    put_reference(2, /* put= */ true, 0, want);
    for (int daemon = 0; daemon < 2; daemon++)
        for (int call = 0; call < 6; call += 5) {
            struct shd_err e = { 0 };
            bool counts = false;
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_pt(s);
            train_pt(m, 2);
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
        shd_model *m = open_pt(attach(PATIENT_MS));
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
    put_reference(2, /* put= */ false, 0, old);
    put_reference(2, /* put= */ true, 0, new);
    for (size_t i = 0; i < ARRAY_SIZE(points); i++)
        for (int restart = -1; restart < 2; restart++) {
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            train_pt(open_pt(s), 2);
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
            train_pt(m, 1);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

static bool has_lost_a(const struct hub *hub)
{
    return strcmp(hub->links[0].device, "cpu0") != 0;
}

/* Whoever is left has all of it. host: a, which is lost only now; NULL: nobody is. */
static void expect_without(const char *host, shd_session *s, shd_model *m, const char *want)
{
    char got[65];
    digest_of(m, got);
    EXPECT_STR(got, want);
    if (host != NULL) {
        paired_put_out(host);
        poll_until(s->hub, has_lost_a);
        digest_of(m, got);
        EXPECT_STR(got, want);
    }
    train_pt(m, 1);
    shd_close(s);
    if (!daemons.paired)
        paired_remove(&daemons);
    fixture_stop(&daemons);
}

/* The next worker finds all or nothing, of both pairs, whether or not a host is lost first; and so
 * does the one behind that, when host a is lost. */
TEST(a_worker_killed_at_any_point_has_put_all_or_nothing_with_replicas)
{
    static const char *const hosts[] = { NULL, "a", "b", NULL, "a" };
    enum { RESTARTS = 3 }; /* of owner 0's replica, from there on */
    char old[65], new[65], got[65];
    put_reference(2, /* put= */ false, 0, old);
    put_reference(2, /* put= */ true, 0, new);
    daemons.replicas = FIXTURE_PAIRS;
    for (size_t i = 0; i <= ARRAY_SIZE(points); i++)
        for (size_t h = 0; h < ARRAY_SIZE(hosts); h++) {
            const bool twin = i == ARRAY_SIZE(points);
            const char *point = twin ? "put:twin_committed" : points[i].name;
            const bool owner_0_alone = strcmp(point, "put:committed") == 0;
            const bool lost = hosts[h] != NULL && strcmp(hosts[h], "a") == 0;
            const bool put = (twin || points[i].put) && !(owner_0_alone && lost);
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            train_pt(open_pt(s), 2);
            shd_close(s);
            put_and_die(point);
            if (h >= RESTARTS)
                fixture_restart(&daemons, 2);
            if (hosts[h] != NULL)
                paired_put_out(hosts[h]);
            s = attach(PATIENT_MS);
            shd_model *m = open_pt(s);
            EXPECT_EQ(shd_step(m), 2u + put);
            digest_of(m, got);
            EXPECT_STR(got, put ? new : old);
            put_ok(m, 11); /* what is left of the other is in nobody's way */
            expect_put(m, 11);
            digest_of(m, got);
            expect_without(hosts[h] == NULL ? "a" : NULL, s, m, got);
        }
    daemons.replicas = FIXTURE_AS_TOLD;
}

static void return_here(const char *name)
{
    if (kill_point == NULL || strcmp(name, kill_point) != 0)
        return;
    kill_point = NULL;
    shd_session *s = attach_devices("cpu1");
    shd_model *m = open_pt(s);
    EXPECT_EQ(shd_step(m), 2);
    return_all(m, 0);
    shd_close(s);
}

/* Gradients go to replicas first: one has come by the time of which owner 0 has none. */
TEST(gradients_that_have_come_to_a_replica_are_dropped)
{
    char want[65];
    put_reference(2, /* put= */ true, 0, want);
    paired_start(&daemons, 2, 2, "");
    shd_session *s = attach_devices("cpu0+cpu1");
    shd_model *m = open_pt(s);
    train_pt(m, 2);
    fail_point_hook = return_here;
    kill_point = "put:all_full";
    put_ok(m, 9);
    fail_point_hook = NULL;
    expect_put(m, 9);
    expect_without("a", s, m, want);
}

/* Another worker is there all the time, has returned gradients meanwhile, and commits: it passes
 * the put on, or its gradients count. */
TEST(who_is_left_passes_on_what_owner_0_has)
{
    char old[65], new[65], got[65];
    struct shd_err e = { 0 };
    put_reference(2, /* put= */ true, 0, new);
    put_reference(3, /* put= */ false, 0, old);
    for (size_t i = 2; i < ARRAY_SIZE(points); i++) {
        fixture_start_kept(&daemons, 2, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_pt(s);
        train_pt(m, 2);
        put_and_die(points[i].name);
        struct pt_run run = { .t = { .overflow_step = UINT64_MAX } };
        struct shd_result result = { .size = sizeof result };
        EXPECT_OK(pt_step(m, &run, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.over, points[i].put);
        EXPECT_EQ(shd_step(m), 3);
        digest_of(m, got);
        EXPECT_STR(got, points[i].put ? new : old);
        train_pt(m, 1);
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
    struct shd_result result = { .size = sizeof result };
    put_reference(2, /* put= */ true, 1, want);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    const struct shd_update update = toy_update(2);
    train_pt(m, 2);
    put_and_die("put:committed");
    return_all(m, 2); /* before its turn */
    return_all(m, 0);
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(result.over);
    expect_put(m, 9);
    train_pt(m, 1);
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
    put_reference(2, /* put= */ true, 1, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++)
        for (int count = 1; count <= 2; count++) {
            fixture_start_kept(&daemons, count, fails[i]);
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_pt(s);
            train_pt(m, 2);
            put_ok(m, 9);
            expect_put(m, 9);
            train_pt(m, 1);
            digest_of(m, got);
            EXPECT_STR(got, want);
            EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, count - 1, "") > 1);
            for (int d = 0; d < count; d++) /* ledger, state, spare */
                EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, d, "") == 3);
            shd_close(s);
            fixture_stop(&daemons);
        }
}
/* Who passes a put on has a cursor of its own, for the step that it was about to commit. */
TEST(put_that_is_passed_on_leaves_the_blob_of_the_step_before)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    struct shd_update update = toy_update(2);
    train_pt(m, 2);
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
    train_pt(open_pt(s), 2);
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

static void stop_keeper_here(const char *name)
{
    if (kill_point == NULL || strcmp(name, kill_point) != 0)
        return;
    kill(daemons.keeper, SIGSTOP);
    alarm(1);
}

/* Of owner 1, which has not said that it is full, nobody has asked to commit anything. */
TEST(values_of_a_worker_killed_while_they_are_stored_go_at_all_owners)
{
    int status = 0;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_pt(s);
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        fail_point_hook = stop_keeper_here;
        shd_model *own = open_pt(attach(PATIENT_MS));
        kill_point = "put:full";
        put_ok(own, 9);
        _exit(0);
    }
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM);
    kill(daemons.keeper, SIGCONT);
    for (int d = 0; d < 2; d++) /* ledger, state, spare */
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, d, "") == 3);
    EXPECT_EQ(shd_step(m), 0);
    shd_close(s);
    fixture_stop(&daemons);
}
#endif

TEST_MAIN()
