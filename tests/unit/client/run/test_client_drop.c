/* Dropping a model: it is gone at all owners or at none, whatever is killed; its memory is back;
 * whoever has it open is told, or in the way; other models notice nothing. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/hub.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"

#define TOY   toy_spec("f32", TOY_ADAMW)
#define STEPS 3u

static int drop_toy(shd_session *s, bool force, struct shd_err *e)
{
    const struct shd_drop_options options = { .size = sizeof options, .force = force };
    return shd_model_drop(s, "toy", &options, e);
}

static void train_toy(uint32_t steps, char ret_hex[65])
{
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    train_steps(m, steps);
    digest_of(m, ret_hex);
    shd_close(s);
}

static bool shows(int daemon, const char *path, const char *text)
{
    struct http_reply r = http_get(&daemons, daemon, path);
    EXPECT_EQ(r.code, 200);
    const bool found = strstr(r.body, text) != NULL;
    free(r.text);
    return found;
}

/* -- Gone ---------------------------------------------------------------------------------------
 */

TEST(memory_descriptors_and_name_are_free_again)
{
    struct shd_err e = { 0 };
    char first[65], again[65];
    int fds[2] = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    for (int round = 0; round < 3; round++) { /* each time another one, from its beginning */
        train_toy(STEPS, round == 0 ? first : again);
        EXPECT(round == 0 || strcmp(again, first) == 0);
        EXPECT(shows(0, "/status", "\"toy\"") && shows(0, "/metrics", "\"toy\""));
        EXPECT(count_segment_maps(daemons.pids[1]) > 0);
        EXPECT_OK(drop_toy(s, false, &e), &e);
        for (int i = 0; i < 2; i++) {
            EXPECT_SOON(count_segment_maps(daemons.pids[i]) == 0);
            if (round == 0) /* what is made once is there */
                fds[i] = count_fds(daemons.pids[i]);
            expect_daemon_idle(daemons.pids[i], fds[i], 0);
        }
        EXPECT_SOON(!shows(0, "/status", "\"toy\"") && !shows(0, "/metrics", "\"toy\""));
    }
    EXPECT_STATUS(drop_toy(s, false, &e), SHD_ENOENT);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_name_that_is_not_there_is_told_with_the_nearest)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_drop(s, "tay", NULL, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "no model 'tay' is open at daemon cpu0");
    shd_model *m = open_toy(s, TOY);
    EXPECT_STATUS(shd_model_drop(s, "tay", NULL, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "did you mean toy?");
    EXPECT_STATUS(drop_toy(s, true, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "is open in this session: close it first");
    shd_model_close(m);
    EXPECT_OK(drop_toy(s, false, &e), &e); /* its own slots are not in the way */
    EXPECT_STATUS(shd_model_drop(s, "", NULL, &e), SHD_EINVAL);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Nothing grows: neither in the daemon nor at its keeper. */
TEST(opened_and_dropped_again_and_again_nothing_grows)
{
    NEEDS_NO_PAIRS();
    struct shd_err e = { 0 };
    const char *rounds = getenv("SHD_DROP_ROUNDS");
    const int count = rounds != NULL ? atoi(rounds) : 100;
    int fds = 0, maps = 0;
    long kib = 0;
    uint64_t at_ms = 0, early_ms = 0, late_ms = 0;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    for (int i = 0; i < count; i++) {
        at_ms = test_now_ms();
        shd_model *m = open_toy(s, TOY);
        if (i % 10 == 0)
            train_steps(m, 1);
        shd_model_close(m);
        EXPECT_OK(drop_toy(s, false, &e), &e);
        *(i < count / 2 ? &early_ms : &late_ms) += test_now_ms() - at_ms;
        if (i == count / 4) { /* what is made once is there */
            fds = count_fds(daemons.pids[0]);
            maps = count_segment_maps(daemons.pids[0]);
            kib = rss_kib(daemons.pids[0]);
        }
    }
    expect_daemon_idle(daemons.pids[0], fds, maps);
    for (int i = 0; i < 2; i++)
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, i, "") == 0);
    const long grown = rss_kib(daemons.pids[0]) - kib;
    fprintf(stderr, "%d rounds: %llu ms, then %llu; %ld KiB more of %ld\n", count,
            (unsigned long long)early_ms, (unsigned long long)late_ms, grown, kib);
    EXPECT(TEST_SANITIZED || grown < 512 + kib / 10);
    shd_close(s);
    fixture_stop(&daemons);
}

static const char *other_spec(void)
{
    static char json[5000];
    snprintf(json, sizeof json, "%s", TOY);
    char *name = strstr(json, "\"toy\"");
    CHECK(name != NULL);
    memcpy(name, "\"boy\"", strlen("\"boy\""));
    return json;
}

/* The memory is not back before the keeper has let go of it; nobody else waits for that. */
TEST(a_keeper_that_is_stopped_holds_up_the_drop_alone)
{
    char hex[65];
    fixture_start_kept(&daemons, 2, "");
    train_toy(1, hex);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, other_spec());
    train_steps(m, 1);
    fixture_stop_keeper(&daemons);
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        shd_session *own = attach(PATIENT_MS);
        MUST_OK(drop_toy(own, false, &e));
        _exit(0);
    }
    for (int i = 0; i < 2; i++)
        EXPECT_SOON(!shows(i, "/status", "\"toy\""));
    train_steps(m, 3);
    kill(daemons.keeper, SIGCONT);
    expect_well(pid);
    for (int i = 0; i < 2; i++) /* ledger, state, spare */
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, i, "") == 3);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- In the way, and told -----------------------------------------------------------------------
 */

TEST(who_trains_is_in_the_way_unless_it_is_forced)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *trainer = attach(PATIENT_MS);
    shd_model *m = open_toy(trainer, TOY);
    train_steps(m, 1);
    float *grad;
    EXPECT_OK(shd_grad(m, 2, 1, &grad, &e), &e); /* waits for its turn, for ever */
    EXPECT_OK(shd_return(m, 2, 1, &e), &e);
    EXPECT_STATUS(drop_toy(s, false, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "model 'toy' is at step 1 and being trained by test (pid ");
    EXPECT_OK(shd_grad(m, 3, 1, &grad, &e), &e); /* it goes on */
    EXPECT_OK(drop_toy(s, true, &e), &e);
    char hex[65];
    uint64_t step;
    EXPECT_STATUS(shd_digest(m, hex, &step, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "model 'toy' was dropped by test (pid ");
    shd_close(trainer);
    EXPECT_SOON(count_segment_maps(daemons.pids[1]) == 0);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_reader_is_told_and_can_read_what_it_has_mapped)
{
    struct shd_err e = { 0 };
    char hex[65];
    const void *params;
    fixture_start(&daemons, 2, NULL);
    train_toy(1, hex);
    shd_session *s = attach(PATIENT_MS), *reader = attach(PATIENT_MS);
    shd_model *m;
    EXPECT_OK(shd_model_attach(reader, "toy", &m, &e), &e);
    EXPECT_OK(shd_acquire(m, 1, &params, &e), &e);
    float before[64];
    memcpy(before, params, sizeof before);
    EXPECT_OK(drop_toy(s, false, &e), &e);
    EXPECT(memcmp(before, params, sizeof before) == 0);
    uint64_t step;
    EXPECT_STATUS(shd_digest(m, hex, &step, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "model 'toy' was dropped by test (pid ");
    EXPECT(memcmp(before, params, sizeof before) == 0);
    shd_close(reader);
    train_toy(1, hex);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Two pins, one of them who drops the model has, and one that is waited for: their memory goes with
 * the model, what a reader has mapped it keeps. */
TEST(what_is_pinned_of_it_goes_too)
{
    struct shd_err e = { 0 };
    char hex[65];
    uint64_t step;
    shd_model *m, *own;
    fixture_start(&daemons, 2, NULL);
    train_toy(1, hex);
    shd_session *s = attach(PATIENT_MS), *reader = attach(PATIENT_MS);
    EXPECT_OK(shd_model_attach(reader, "toy", &m, &e), &e);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_EQ(step, 1);
    const pid_t pid = test_fork();
    if (pid == 0) {
        const struct shd_pin_options later = { .size = sizeof later, .step = 100 };
        shd_session *third = attach(PATIENT_MS);
        shd_model *toy;
        CHECK(shd_model_attach(third, "toy", &toy, &e) == SHD_OK);
        const int r = shd_pin(toy, &later, NULL, &e);
        if (r != SHD_ENOENT || strstr(e.text, "was dropped") == NULL)
            fprintf(stderr, "%d: %s\n", r, e.text);
        _exit(r == SHD_ENOENT ? 0 : 1);
    }
    EXPECT_SOON(shows(1, "/status", "\"step\":100"));
    EXPECT_OK(shd_model_attach(s, "toy", &own, &e), &e);
    EXPECT_OK(shd_pin(own, NULL, NULL, &e), &e);
    shd_model_close(own);
    float before[64];
    memcpy(before, shd_pinned(m, 1), sizeof before);
    EXPECT_OK(drop_toy(s, false, &e), &e);
    EXPECT(memcmp(before, shd_pinned(m, 1), sizeof before) == 0);
    for (int i = 0; i < 2; i++)
        EXPECT_SOON(count_segment_maps(daemons.pids[i]) == 0);
    expect_well(pid);
    EXPECT_STATUS(shd_pin(m, NULL, NULL, &e), SHD_ENOENT);
    shd_close(reader);
    train_toy(1, hex);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Pieces of a large tensor are being copied and counted, for /tensor, when its model goes. */
TEST(what_is_counted_of_it_for_the_status_socket_is_waited_for)
{
    NEEDS_NO_PAIRS();
    static const char large[] = "{\"name\":\"large\",\"micro_batches\":1,\"optimizer\":{\"kind\":"
                                "\"sgd\"},\"units\":[{\"name\":"
                                "\"u\",\"tensors\":[{\"name\":\"w\",\"shape\":[8388608]}]}]}";
    struct shd_err e = { 0 };
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    for (long round = 0; round < 4; round++) {
        shd_model *m;
        EXPECT_OK(shd_model_open(s, large, &m, &e), &e);
        shd_model_close(m);
        const pid_t pid = test_fork();
        if (pid == 0) {
            struct http_reply r = http_get(&daemons, 0, "/tensor?model=large&name=w");
            _exit(r.code == 200 || r.code == 404 ? 0 : 1);
        }
        sleep_ms(10 + 10 * round);
        EXPECT_OK(shd_model_drop(s, "large", NULL, &e), &e);
        expect_well(pid);
        EXPECT_SOON(count_segment_maps(daemons.pids[0]) == 0);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

/* Else a drop would end the training of something else. */
TEST(who_reads_it_and_trains_another_is_in_the_way)
{
    struct shd_err e = { 0 };
    static const struct pt_model other = { .name = "other", .publish = "f32", .accumulate = 1 };
    char hex[65];
    fixture_start(&daemons, 1, NULL);
    train_toy(1, hex);
    shd_session *s = attach(PATIENT_MS), *both = attach(PATIENT_MS);
    shd_model *m, *toy;
    EXPECT_OK(shd_model_open(both, pt_spec(&other), &m, &e), &e);
    EXPECT_OK(drop_toy(s, false, &e), &e); /* not yet */
    train_toy(1, hex);
    EXPECT_OK(shd_model_attach(both, "toy", &toy, &e), &e);
    EXPECT_STATUS(drop_toy(s, false, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "which trains another one and would end");
    shd_close(both);
    EXPECT_OK(drop_toy(s, false, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_checkpoint_is_in_the_way_unless_it_is_forced)
{
    struct shd_err e = { 0 };
    const struct shd_checkpoint_options later = { .size = sizeof later, .step = 100 };
    bool done = false;
    char hex[65];
    make_ckpts();
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *saver = attach(PATIENT_MS), *opener = attach(PATIENT_MS);
    open_toy(opener, TOY);
    shd_close(opener);
    shd_model *m;
    EXPECT_OK(shd_model_attach(saver, "toy", &m, &e), &e);
    EXPECT_OK(shd_checkpoint_begin(m, ckpts, &later, &e), &e);
    digest_of(m, hex); /* answered behind what the daemons have of the checkpoint */
    EXPECT_STATUS(drop_toy(s, false, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "being saved by test (pid ");
    EXPECT_OK(drop_toy(s, true, &e), &e);
    int r = SHD_OK;
    EXPECT_SOON((r = shd_checkpoint_poll(m, &done, NULL, &e)) != SHD_OK);
    EXPECT_EQ(r, SHD_ENOENT);
    EXPECT_HAS(e.text, "was dropped by test");
    shd_close(saver);
    shd_close(s);
    fixture_stop(&daemons);
    remove_ckpts();
}

/* -- Beside others ------------------------------------------------------------------------------
 */

TEST(two_workers_of_another_model_notice_nothing)
{
    struct shd_err e = { 0 };
    static const struct pt_model model = { .name = "beside", .publish = "f32", .accumulate = 1 };
    char want[65], got[65];
    pid_t pids[2];
    int status;
    toy_reference(TOY, 40, want);
    fixture_start(&daemons, 2, NULL);
    for (uint32_t i = 0; i < 2; i++)
        pids[i] = trainer_fork(TOY, i, 2, 40);
    shd_session *s = attach(PATIENT_MS);
    for (uint32_t i = 0; i < 2; i++) {
        do {
            shd_model *m;
            EXPECT_OK(shd_model_open(s, pt_spec(&model), &m, &e), &e);
            shd_model_close(m);
            EXPECT_OK(shd_model_drop(s, "beside", NULL, &e), &e);
        } while (waitpid(pids[i], &status, WNOHANG) == 0);
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    shd_model *m = open_toy(s, TOY);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Two workers train until they are told; the exit code says whether they were. */
static void train_until_told(uint32_t half)
{
    shd_session *s;
    shd_model *m;
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    const uint32_t micros[] = { half, half + 2 };
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, TOY, &m, &e);
    while (r == SHD_OK)
        r = toy_step(m, micros, 2, &result, &e);
    char hex[65];
    uint64_t step;
    r = shd_digest(m, hex, &step, &e); /* what broke off may have been a callback's call */
    const bool told = r == SHD_ENOENT && strstr(e.text, "was dropped by test") != NULL;
    if (!told)
        fprintf(stderr, "worker %" PRIu32 ": %s\n", half, e.text);
    _exit(told ? 0 : 1);
}

/* Gradients are on their way, wait for their turn, are being summed; updates run. */
TEST(forced_in_the_middle_of_training_all_of_it_ends)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    for (long round = 0; round < 8; round++) {
        pid_t pids[2];
        for (uint32_t i = 0; i < 2; i++) {
            pids[i] = fork();
            CHECK(pids[i] >= 0);
            if (pids[i] == 0)
                train_until_told(i);
        }
        shd_session *s = attach(PATIENT_MS);
        EXPECT_SOON(shows(0, "/status", "\"step\": 2") || shows(0, "/status", "\"step\":2"));
        sleep_ms(round);
        EXPECT_OK(drop_toy(s, true, &e), &e);
        for (uint32_t i = 0; i < 2; i++) {
            expect_well(pids[i]);
            EXPECT_SOON(count_segment_maps(daemons.pids[i]) == 0);
        }
        shd_close(s);
    }
    fixture_stop(&daemons);
}

/* -- Half of it ---------------------------------------------------------------------------------
 */

struct raw {
    const char *name;
    enum wire_drop_what what;
    uint64_t first;
    struct wire_dropped got;
};

static void make_raw(const struct round *round, const struct link *link,
                     struct wire_request *ret_request)
{
    const struct raw *raw = round->ctx;
    ret_request->drop = (struct wire_drop){ .what = raw->what,
                                            .name = raw->name,
                                            .first = raw->first,
                                            .owner = link_owner(link),
                                            .owners = 2,
                                            .twin = link_is_replica(link) };
}

static int take_raw(const struct round *round, const struct link *link,
                    const struct wire_reply *reply, struct shd_err *e)
{
    struct raw *raw = round->ctx;
    (void)link;
    (void)e;
    raw->got = reply->dropped;
    return SHD_OK;
}

static int ask(shd_session *s, uint32_t owner, struct raw *raw, struct shd_err *e)
{
    struct round round = { .what = "raw",
                           .asks = WIRE_DROP,
                           .type = WIRE_DROPPED,
                           .make = make_raw,
                           .take = take_raw,
                           .ctx = raw };
    return round_one(&round, &s->hub->links[owner], 0, e);
}

/* All others: owner 0's replica first. */
static void hold_others(shd_session *s, struct raw *raw)
{
    struct shd_err e = { 0 };
    raw->first = raw->got.instance;
    for (uint32_t i = s->hub->link_count; i-- > 1;)
        if (link_owner(&s->hub->links[i]) == 0)
            EXPECT_OK(ask(s, i, raw, &e), &e);
    for (uint32_t i = 1; i < s->hub->link_count; i++)
        if (link_owner(&s->hub->links[i]) != 0)
            EXPECT_OK(ask(s, i, raw, &e), &e);
}

/* A session has all hold it; with `go` owner 0 drops it. Then it ends, with the daemons. */
static void drop_half(bool go, bool killed)
{
    struct shd_err e = { 0 };
    struct raw raw = { .name = "toy", .what = WIRE_DROP_HOLD };
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(ask(s, 0, &raw, &e), &e);
    EXPECT_EQ(raw.got.what, WIRE_DROPPED_HELD);
    hold_others(s, &raw);
    EXPECT_EQ(raw.got.what, WIRE_DROPPED_HELD);
    raw.what = WIRE_DROP_GO;
    if (go) {
        EXPECT_OK(ask(s, 0, &raw, &e), &e);
        EXPECT_EQ(raw.got.what, WIRE_DROPPED_GONE);
    } else {
        shd_session *other = attach(PATIENT_MS);
        shd_model *m;
        EXPECT_STATUS(shd_model_attach(other, "toy", &m, &e), SHD_EBUSY);
        EXPECT_HAS(e.text, "model 'toy' is being dropped by test (pid ");
        shd_close(other);
    }
    shd_close(s);
    for (int i = 0; i < daemons.count; i++) {
        if (killed)
            fixture_restart(&daemons, i);
        EXPECT_SOON(!shows(i, "/status", "\"test\"")); /* they see that it has gone */
    }
}

TEST(half_held_it_is_whole_and_half_dropped_it_is_gone)
{
    for (int how = 0; how < 4; how++) {
        struct shd_err e = { 0 };
        const bool go = how % 2 != 0, killed = how / 2 != 0;
        char before[65], after[65], fresh[65];
        fixture_start_kept(&daemons, 2, "");
        train_toy(1, fresh);
        train_toy(1, before);
        const long kept = fixture_ask(&daemons, KEEPER_COUNT, 1, "");
        drop_half(go, killed);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m;
        const int r = shd_model_attach(s, "toy", &m, &e);
        if (go) { /* nobody gets the half that is there; who opens it anew gets a new one */
            EXPECT_EQ(r, SHD_ENOENT);
            shd_close(s);
            train_toy(1, after);
            EXPECT_STR(after, fresh);
        } else {
            EXPECT_OK(r, &e);
            EXPECT_EQ(shd_step(m), 2);
            digest_of(m, after);
            EXPECT_STR(after, before);
            shd_close(s);
            train_toy(1, after);
        }
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, 1, "") == kept);
        s = attach(PATIENT_MS);
        EXPECT_OK(drop_toy(s, false, &e), &e);
        for (int i = 0; i < 2; i++)
            EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, i, "") == 0);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(what_one_owner_has_dropped_the_next_drop_finishes)
{
    struct shd_err e = { 0 };
    char hex[65];
    fixture_start_kept(&daemons, 2, "");
    train_toy(1, hex);
    drop_half(/* go= */ true, /* killed= */ true);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(drop_toy(s, false, &e), &e);
    EXPECT_STATUS(drop_toy(s, false, &e), SHD_ENOENT);
    EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, 1, "") == 0);
    shd_close(s);
    fixture_stop(&daemons);
}

/* One daemon of two cannot tell what the other has. */
TEST(other_daemons_than_those_that_have_it_are_refused)
{
    struct shd_err e = { 0 };
    char hex[65], address[300];
    shd_session *s;
    fixture_start(&daemons, 2, NULL);
    train_toy(1, hex);
    snprintf(address, sizeof address, "%.250s?cpu1", daemons.dir);
    EXPECT_OK(try_connect(address, PATIENT_MS, &s, &e), &e);
    EXPECT_STATUS(drop_toy(s, true, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "name the daemons that have it, in their order");
    shd_close(s);
    train_toy(1, hex);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
static void die_when_opened(const char *name)
{
    if (strcmp(name, "open:opened") == 0)
        raise(SIGKILL);
}

/* Owner 0 has opened its part; nobody has told owner 1, whose part waits for that word. */
static void fork_half(void)
{
    struct shd_err e = { 0 };
    int status;
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        fail_point_hook = die_when_opened;
        shd_session *s = attach(PATIENT_MS);
        shd_model_fork(open_toy(s, TOY), "twin", NULL, &e);
        _exit(1);
    }
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status));
    for (int i = 0; i < daemons.count; i++)
        EXPECT_SOON(!shows(i, "/status", "\"test\""));
}

/* Held only, or killed before what counts is stored: it is there, at both. */
TEST(a_fork_that_one_owner_has_opened_is_not_dropped_by_half)
{
    for (int go = 0; go < 2; go++) {
        struct shd_err e = { 0 };
        struct raw raw = { .name = "twin", .what = WIRE_DROP_HOLD };
        char hex[65];
        shd_model *m;
        fixture_start_kept(&daemons, 2, "drop:ready:between@1;");
        train_toy(1, hex);
        fork_half();
        shd_session *s = attach(PATIENT_MS);
        EXPECT_OK(ask(s, 0, &raw, &e), &e);
        EXPECT_EQ(raw.got.what, WIRE_DROPPED_HELD);
        hold_others(s, &raw);
        raw.what = WIRE_DROP_GO;
        if (go != 0) {
            EXPECT_OK(ask(s, 0, &raw, &e), &e);
            EXPECT_EQ(raw.got.what, WIRE_DROPPED_KEPT); /* a successor's answer */
        }
        shd_close(s);
        s = attach(PATIENT_MS);
        int r;
        EXPECT_SOON((r = shd_model_attach(s, "twin", &m, &e)) != SHD_EBUSY); /* it is let go of */
        EXPECT_OK(r, &e);
        EXPECT_EQ(shd_step(m), 1);
        digest_of(m, hex);
        shd_close(s);
        s = attach(PATIENT_MS);
        EXPECT_OK(shd_model_drop(s, "twin", NULL, &e), &e);
        EXPECT_OK(drop_toy(s, false, &e), &e);
        for (int i = 0; i < 2; i++)
            EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, i, "") == 0);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Each daemon is killed there, the first time, or as a successor as well; who drops it repeats what
 * it needs. */
TEST(daemons_killed_in_the_middle_drop_it_whole)
{
    static const char *const fails[] = {
        "drop:hold:before@1;",
        "drop:hold:after@1;",
        "drop:ready:before@1;",
        "drop:ready:between@1;",
        "drop:ready:after@1;",
        "drop:free:before@1;",
        "drop:free:after@1;",
        "keeper:remove:before@1;",
        "keeper:remove:before@5;",
        "keeper:remove:after@5;",
        "drop:ready:before@1;drop:ready:before@1;",
        "drop:ready:after@1;keeper:remove:before@2;",
        "drop:hold:after@1;adopt:repair:before@1;drop:ready:between@1;",
    };
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        char first[65], again[65];
        fixture_start_kept(&daemons, 2, fails[i]);
        train_toy(1, first);
        shd_session *s = attach(PATIENT_MS);
        EXPECT_OK(drop_toy(s, false, &e), &e);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        shd_close(s);
        for (int k = 0; k < 2; k++) {
            fixture_wait_up(&daemons, k);
            EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, k, "") == 0);
        }
        train_toy(1, again);
        EXPECT_STR(again, first);
        fixture_stop(&daemons);
    }
}

#define ASKED_HELD 3 /* times: owner 0, its replica, the others */
#define ASKED_GONE 6

static int asked_left;

static void die_when_asked(const char *name)
{
    if (strcmp(name, "drop:asked") == 0 && --asked_left == 0)
        raise(SIGKILL);
}

static void drop_until(const char *name, int asked)
{
    struct shd_err e = { 0 };
    int status;
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        asked_left = asked;
        fail_point_hook = die_when_asked;
        shd_model_drop(attach(PATIENT_MS), name, NULL, &e);
        _exit(1);
    }
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFSIGNALED(status));
    for (int i = 0; i < daemons.count; i++)
        EXPECT_SOON(!shows(i, "/status", "\"test\""));
}

/* Wherever who drops it ended, and whichever host is lost then. */
TEST(a_drop_of_pairs_that_is_cut_off_leaves_all_or_nothing)
{
    NEEDS_PAIRS();
    for (int asked = 1; asked <= ASKED_GONE; asked++)
        for (int lost = 0; lost < 3; lost++) {
            /* Owner 0 has dropped it; where that one is lost, what its replica has counts. */
            const bool gone = asked > ASKED_HELD + (lost == 1);
            struct shd_err e = { 0 };
            char fresh[65], before[65], after[65];
            shd_model *m;
            fixture_start_kept(&daemons, 2, "");
            train_toy(1, fresh);
            train_toy(1, before);
            drop_until("toy", asked);
            if (lost > 0)
                paired_put_out(lost == 1 ? "a" : "b");
            shd_session *s = attach(PATIENT_MS);
            const int r = shd_model_attach(s, "toy", &m, &e);
            if (gone ? r != SHD_ENOENT : r != SHD_OK)
                FAIL("asked %d times, host %d: %s: %s", asked, lost, status_name(r), e.text);
            if (!gone) {
                EXPECT_EQ(shd_step(m), 2);
                digest_of(m, after);
                EXPECT_STR(after, before);
            }
            shd_close(s);
            train_toy(1, after);
            if (gone)
                EXPECT_STR(after, fresh);
            s = attach(PATIENT_MS);
            EXPECT_OK(drop_toy(s, false, &e), &e);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* Nor does one that its maker left with a replica that waits: what that is held with counts, too.
 */
TEST(what_waits_and_is_held_is_whole_without_owner_0s_host)
{
    struct shd_err e = { 0 };
    char hex[65];
    shd_model *m;
    NEEDS_PAIRS();
    fixture_start_kept(&daemons, 2, "");
    train_toy(1, hex);
    fork_half();
    drop_until("twin", ASKED_HELD);
    paired_put_out("a");
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_attach(s, "twin", &m, &e), &e);
    EXPECT_EQ(shd_step(m), 1);
    digest_of(m, hex);
    shd_close(s);
    fixture_stop(&daemons);
}

/* That daemon is there, and nobody has such a session. */
static bool is_left(int daemon)
{
    const int fd = http_connect(&daemons, daemon);
    if (fd < 0)
        return false;
    close(fd);
    struct http_reply r = http_get(&daemons, daemon, "/status");
    const bool left = r.code == 200 && strstr(r.body, "\"test\"") == NULL;
    free(r.text);
    return left;
}

/* With nobody who repeats it: the model is there whole, or gone, wherever a daemon was killed. */
TEST(a_daemon_killed_with_who_drops_it_leaves_all_or_nothing)
{
    static const char *const fails[] = { "drop:hold:after@1;", "drop:ready:before@1;",
                                         "drop:ready:between@1;", "drop:ready:after@1;",
                                         "drop:free:before@1;" };
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        char fresh[65], before[65], got[65];
        fixture_start_kept(&daemons, 2, fails[i]);
        train_toy(1, fresh);
        train_toy(1, before);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            shd_session *s;
            if (try_connect(daemons.address, PATIENT_MS, &s, &e) == SHD_OK)
                drop_toy(s, false, &e);
            _exit(0);
        }
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 0, "") +
                        fixture_ask(&daemons, KEEPER_STARTS, 1, "") >
                    2);
        kill(pid, SIGKILL);
        EXPECT_EQ(waitpid(pid, NULL, 0), pid);
        for (int k = 0; k < 2; k++) /* the second one may die only now */
            EXPECT_SOON(is_left(k));
        shd_session *s = attach(PATIENT_MS);
        shd_model *m;
        const int r = shd_model_attach(s, "toy", &m, &e);
        if (r == SHD_OK) {
            EXPECT_EQ(shd_step(m), 2);
            digest_of(m, got);
            EXPECT_STR(got, before);
        } else {
            EXPECT_EQ(r, SHD_ENOENT);
            shd_close(s);
            s = attach(PATIENT_MS);
            m = open_toy(s, TOY);
            EXPECT_EQ(shd_step(m), 0);
            train_steps(m, 1);
            digest_of(m, got);
            EXPECT_STR(got, fresh);
        }
        shd_close(s);
        s = attach(PATIENT_MS);
        EXPECT_OK(drop_toy(s, false, &e), &e);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

TEST_MAIN()
