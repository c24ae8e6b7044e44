/* Snapshots in the owners' memory, and going back to one: at all owners or at none, while workers
 * train, whatever is killed; and from there on as a run that never went further. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "proto/share/board.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"

#define TOY       toy_spec("f32", TOY_ADAMW)
#define END_STEPS 5u /* after the last rewind */
/* Of two pairs, a bit each: */
#define ALL_BUT_OWNER_0 0xeu
#define ALL_OF_B        0xcu

static void digest_at(shd_model *m, uint64_t step, char hex[65])
{
    EXPECT_EQ(shd_step(m), step);
    digest_of(m, hex);
}

/* Another training than the toy's: what is of it must not be there after a rewind. */
static int wrong_step(shd_model *m, struct shd_result *ret_result, struct shd_err *e)
{
    struct toy t = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { .size = sizeof compute,
                                         .ctx = &t,
                                         .forward = toy_forward,
                                         .backward = toy_backward,
                                         .metrics = toy_metrics };
    struct shd_update update = toy_update(shd_step(m) + 1000);
    update.lr *= 7;
    return shd_run_step(m, toy_all_micros, TOY_MICROS, &compute, &update, ret_result, e);
}

static void train_wrong(shd_model *m, uint32_t steps)
{
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    for (uint32_t i = 0; i < steps; i++)
        EXPECT_OK(wrong_step(m, &result, &e), &e);
}

static uint32_t list(shd_model *m, struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX])
{
    struct shd_err e = { 0 };
    uint32_t count = 99;
    rows[0].size = sizeof *rows;
    EXPECT_OK(shd_snapshots(m, rows, SHD_SNAPSHOTS_MAX, &count, &e), &e);
    return count;
}

static const char *averaged_spec(void)
{
    static char json[5000];
    snprintf(json, sizeof json, "{ \"ema\": 0.5, %s", TOY + 1);
    return json;
}

TEST(training_goes_on_from_a_snapshot_as_if_nothing_had_come_after_it)
{
    static const char *const dtypes[] = { "f32", "bf16" };
    for (int run = 0; run < 6; run++) {
        struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX];
        struct shd_err e = { 0 };
        const char *spec = run % 3 == 2 ? averaged_spec() : toy_spec(dtypes[run % 3], TOY_ADAMW);
        const int owners = 1 + run / 3;
        char three[65], five[65], got[65];
        uint64_t step = 0;
        toy_reference(spec, 3, three);
        toy_reference(spec, 5, five);
        fixture_start_kept(&daemons, owners, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, spec);
        EXPECT_STATUS(shd_model_rewind(m, SHD_REWIND_LATEST, &step, &e), SHD_ENOENT);
        train_steps(m, 3);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        EXPECT_EQ(step, 3);
        EXPECT_EQ(list(m, rows), 1);
        EXPECT_EQ(rows[0].step, 3);
        EXPECT(rows[0].bytes > 0 && rows[0].time_ns > 0);
        train_wrong(m, 4);
        EXPECT_STATUS(shd_model_rewind(m, 5, &step, &e), SHD_ENOENT);
        digest_of(m, got);
        EXPECT(strcmp(got, three) != 0);
        EXPECT_OK(shd_model_rewind(m, SHD_REWIND_LATEST, &step, &e), &e);
        EXPECT_EQ(step, 3);
        digest_at(m, 3, got);
        EXPECT_STR(got, three);
        train_steps(m, 2);
        digest_at(m, 5, got);
        EXPECT_STR(got, five);
        for (int i = 0; i < owners; i++) /* it outlives its daemons */
            fixture_restart(&daemons, i);
        digest_at(m, 5, got);
        EXPECT_STR(got, five);
        EXPECT_EQ(list(m, rows), 1);
        EXPECT_OK(shd_model_rewind(m, 3, &step, &e), &e);
        digest_at(m, 3, got);
        EXPECT_STR(got, three);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Counts, the blob, what is set and the history are as they were then. */
TEST(all_that_a_step_has_goes_back)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    struct shd_step_row rows[16] = { { .size = sizeof *rows } };
    char blob[16], *before, *after;
    size_t bytes;
    uint64_t from = 0, step, updates;
    uint32_t count;
    float values[8192];
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    EXPECT_OK(shd_model_set(m, "lr_scale=0.5", 0, &from, &e), &e);
    train_steps(m, 2);
    EXPECT_OK(shd_settings(m, &before, &e), &e);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_model_set(m, "lr_scale=0.25 clip_norm=1", 0, &from, &e), &e);
    train_wrong(m, 3);
    EXPECT_OK(shd_model_rewind(m, 2, &step, &e), &e);
    EXPECT_OK(shd_settings(m, &after, &e), &e);
    EXPECT_STR(after, before);
    EXPECT_OK(shd_get(m, 1, SHD_PARAMS, values, &step, &updates, &e), &e);
    EXPECT_EQ(step, 2);
    EXPECT_EQ(updates, 2);
    EXPECT_OK(shd_blob(m, blob, sizeof blob, &bytes, &e), &e);
    EXPECT_EQ(bytes, 0);
    from = 0;
    EXPECT_OK(shd_history(m, &from, rows, 16, &count, &e), &e);
    EXPECT_EQ(count, 2);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(!result.rewound && !result.over);
    free(before);
    free(after);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(the_first_step_can_be_gone_back_to)
{
    struct shd_err e = { 0 };
    char zero[65], two[65], got[65];
    uint64_t step = 9;
    toy_reference(TOY, 2, two);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    digest_at(m, 0, zero);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_EQ(step, 0);
    train_wrong(m, 3);
    EXPECT_OK(shd_model_rewind(m, 0, &step, &e), &e);
    digest_at(m, 0, got);
    EXPECT_STR(got, zero);
    train_steps(m, 2);
    digest_at(m, 2, got);
    EXPECT_STR(got, two);
    shd_close(s);
    fixture_stop(&daemons);
}

/* What a worker has in its hands is of the step that is given up. */
TEST(gradients_of_a_step_that_was_given_up_count_for_nothing)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    char three[65], four[65], got[65];
    const void *params;
    float *grad;
    uint64_t step;
    toy_reference(TOY, 3, three);
    toy_reference(TOY, 4, four);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *watcher = open_toy(other, TOY);
    train_steps(m, 3);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_wrong(m, 2);
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    grad[0] = 3;
    EXPECT_OK(shd_return(m, 0, 1, &e), &e);
    EXPECT_OK(shd_grad(m, 1, 2, &grad, &e), &e);
    EXPECT_OK(shd_model_rewind(watcher, 3, &step, &e), &e);
    EXPECT_STATUS(shd_return(m, 1, 2, &e), SHD_ERESET);
    EXPECT_HAS(e.text, "went back");
    EXPECT_EQ(shd_step(m), 3);
    digest_at(m, 3, got);
    EXPECT_STR(got, three);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    digest_at(m, 4, got);
    EXPECT_STR(got, four);
    EXPECT_OK(shd_model_rewind(watcher, 3, &step, &e), &e);
    EXPECT_STATUS(shd_acquire(m, 1, &params, &e),
                  SHD_ERESET); /* it would wait for a step to come */
    EXPECT_EQ(shd_step(m), 3);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT_OK(shd_model_rewind(watcher, 3, &step, &e), &e);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(!result.rewound);
    digest_at(m, 4, got);
    EXPECT_STR(got, four);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* A step kept by itself, and so many of them. */
TEST(each_so_manieth_step_is_kept)
{
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX];
    struct shd_err e = { 0 };
    uint64_t step;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    EXPECT_STATUS(shd_snapshot_every(m, 2, SHD_SNAPSHOTS_MAX, &e), SHD_ERANGE);
    EXPECT_OK(shd_snapshot_every(m, 2, 3, &e), &e);
    for (uint32_t i = 0; i < 12; i++) {
        train_steps(m, 1);
        if ((i + 1) % 2 == 0 && i > 2) /* memory of the first ones may come too late */
            EXPECT_SOON(list(m, rows) > 0 && rows[list(m, rows) - 1].step == i + 1);
    }
    EXPECT_EQ(list(m, rows), 3);
    EXPECT_EQ(rows[0].step, 8);
    EXPECT_EQ(rows[2].step, 12);
    for (int i = 0; i < 2; i++)
        fixture_restart(&daemons, i);
    EXPECT_OK(shd_model_rewind(m, 8, &step, &e), &e);
    EXPECT_EQ(list(m, rows), 1); /* later ones are of nothing that is */
    train_steps(m, 2);
    EXPECT_SOON(list(m, rows) == 2 && rows[1].step == 10);
    EXPECT_OK(shd_snapshot_every(m, 0, 1, &e), &e);
    EXPECT_EQ(list(m, rows), 1);
    train_steps(m, 2);
    EXPECT_EQ(list(m, rows), 1);
    EXPECT_EQ(rows[0].step, 10);
    shd_model_close(m);
    EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

static void *step_back(void *board)
{
    usleep(300 * 1000); /* the request is at the owners; if not, the test is only weaker */
    board_set_step(board, 1, STEP_OPEN);
    return NULL;
}

/* Asked for because its asker was late at the one before, while others trained, who then ended. */
TEST(a_step_that_nobody_opens_is_not_waited_for)
{
    static _Alignas(64) uint8_t memory[4096];
    struct shd_err e = { 0 };
    pthread_t thread;
    uint64_t step;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    train_steps(m, 1);
    void **base = &m->map->owners[0].board.base, *theirs = *base;
    board_init((void *)memory, ((const struct board *)theirs)->units);
    board_set_step((void *)memory, 2, STEP_OPEN);
    *base = memory;
    EXPECT(pthread_create(&thread, NULL, step_back, memory) == 0);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    pthread_join(thread, NULL);
    *base = theirs;
    EXPECT_EQ(step, 1);
    shd_close(s);
    fixture_stop(&daemons);
}

static void ask_for_two(const struct round *round, const struct link *link,
                        struct wire_request *ret_request)
{
    const struct shd_model *m = round->ctx;
    ret_request->snapshot = (struct wire_snapshot){
        .model = m->map->owners[link->index].layout.handle, .what = WIRE_SNAPSHOT_TAKE, .step = 2
    };
}

/* Who fills a host, or was late, asks for a step ahead of those that train. */
TEST(a_step_to_come_is_waited_for)
{
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX];
    struct shd_err e = { 0 };
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    train_steps(m, 1);
    struct round round = { .what = "Snapshot",
                           .asks = WIRE_SNAPSHOT,
                           .type = WIRE_SNAPSHOTS,
                           .make = ask_for_two,
                           .ctx = m };
    for (uint32_t i = 0; i < s->hub->link_count; i++)
        EXPECT_OK(round_ask(&round, &s->hub->links[i], 0, &e), &e);
    for (int i = 0; i < 20; i++)
        EXPECT_OK(hub_poll(s->hub, 20 * NS_PER_MS, &e), &e);
    EXPECT_OK(round.err.code, &round.err);
    EXPECT_EQ(round.waiting, s->hub->link_count);
    train_steps(m, 2);
    EXPECT_OK(round_finish(&round, s->hub, SHD_OK, &e), &e);
    EXPECT_EQ(list(m, rows), 1);
    EXPECT_EQ(rows[0].step, 2);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Their names with it are taken back by the loop. */
TEST(a_keeper_that_is_stopped_holds_up_nobody_whose_snapshots_go)
{
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX];
    struct shd_err e = { 0 };
    const int next = getenv("SHD_TEST_PUBLISH") != NULL ? 1 : 0;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    EXPECT_OK(shd_snapshot_every(m, 1, 3, &e), &e);
    EXPECT_SOON((train_steps(m, 1), list(m, rows) == 3));
    /* Ledger, state, spare (what is published next), and one more snapshot than there are: a step
     * that finds the one before it still being made leaves it at three, so more of them are made
     * until there was time. */
    for (int i = 0; i < 2; i++)
        EXPECT_SOON((train_steps(m, 1), fixture_ask(&daemons, KEEPER_COUNT, i, "") == 7 + next));
    /* None is being made: what goes is known then. */
    EXPECT_SOON(
        (train_steps(m, 1), sleep_ms(20), list(m, rows) == 3 && rows[2].step == shd_step(m)));
    fixture_stop_keeper(&daemons);
    EXPECT_OK(shd_snapshot_every(m, 0, 1, &e), &e);
    train_steps(m, 2);
    EXPECT_EQ(list(m, rows), 1);
    kill(daemons.keeper, SIGCONT);
    for (int i = 0; i < 2; i++)
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, i, "") == 5 + next);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Where the workers end: set when they are all past it, before the last rewind. */
static _Atomic uint64_t *goal;

static pid_t start_worker(uint32_t half)
{
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0)
        return pid;
    shd_session *s;
    shd_model *m;
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    const uint32_t micros[] = { half, half + 2 };
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, TOY, &m, &e);
    while (r == SHD_OK && shd_step(m) != atomic_load(goal))
        r = toy_step(m, micros, 2, &result, &e);
    if (r != SHD_OK)
        fprintf(stderr, "worker %" PRIu32 ": %s\n", half, e.text);
    _exit(r == SHD_OK ? 0 : 1);
}

static void expect_end(pid_t pid)
{
    int status;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void start_again(pid_t *pid, uint32_t half)
{
    kill(*pid, SIGKILL);
    waitpid(*pid, NULL, 0);
    *pid = start_worker(half);
}

/* Two workers and two owners. What is killed beside each rewind: a daemon, a worker. */
static void rewind_while_training(uint32_t rewinds, bool kill_some)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    pid_t pids[2];
    goal = mmap(NULL, sizeof *goal, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(goal != MAP_FAILED);
    atomic_store(goal, UINT64_MAX);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    for (uint32_t i = 0; i < 2; i++)
        pids[i] = start_worker(i);
    for (uint32_t i = 0; i < rewinds; i++) {
        uint64_t step = 0, back = 0;
        const uint64_t now = look_furthest(m);
        EXPECT_SOON(look_furthest(m) > now);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        EXPECT_SOON(look_step(m, 0) > step + END_STEPS && look_step(m, 1) > step + END_STEPS);
        if (i + 1 == rewinds)
            atomic_store(goal, step + END_STEPS);
        if (kill_some && i % 2 == 0)
            fixture_restart(&daemons, (int)(i / 2 % 2));
        else if (kill_some)
            start_again(&pids[i / 2 % 2], i / 2 % 2);
        EXPECT_OK(shd_model_rewind(m, step, &back, &e), &e);
        EXPECT_EQ(back, step);
    }
    for (uint32_t i = 0; i < 2; i++)
        expect_end(pids[i]);
    const uint32_t end = (uint32_t)atomic_load(goal);
    shd_session *other = attach(PATIENT_MS);
    EXPECT_OK(shd_model_attach(other, "toy", &m, &e), &e);
    toy_reference(TOY, end, want);
    digest_at(m, end, got);
    EXPECT_STR(got, want);
    munmap(goal, sizeof *goal);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(workers_that_train_go_back_and_on)
{
    rewind_while_training(4, false);
}

TEST(so_they_do_while_daemons_and_workers_are_killed)
{
    rewind_while_training(8, true);
}

/* What a reader has pinned stays as it was. */
TEST(a_pinned_step_stays_pinned)
{
    struct shd_err e = { 0 };
    uint64_t step;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *other = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *reader = open_toy(other, TOY);
    train_steps(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_wrong(m, 2);
    EXPECT_OK(shd_pin(reader, NULL, &step, &e), &e);
    EXPECT_EQ(step, 3);
    const size_t bytes = shd_unit_elems(m, 1) * sizeof(float);
    void *copy = malloc(bytes);
    CHECK(copy != NULL);
    memcpy(copy, shd_pinned(reader, 1), bytes);
    EXPECT_OK(shd_model_rewind(m, 1, &step, &e), &e);
    train_steps(m, 1);
    EXPECT(memcmp(copy, shd_pinned(reader, 1), bytes) == 0);
    EXPECT_OK(shd_pin(reader, NULL, &step, &e), &e);
    EXPECT_EQ(step, 2);
    free(copy);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

/* A step of a run that was given up is another than that of the same number now: who pins that gets
 * none of the other, though somebody has it pinned still. */
TEST(a_pinned_step_of_before_is_no_step_of_now)
{
    struct shd_err e = { 0 };
    const struct shd_pin_options exact = { .size = sizeof exact, .step = 3, .exact = true };
    char three[65], got[65];
    uint64_t step;
    toy_reference(TOY, 3, three);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS), *a = attach(PATIENT_MS), *b = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY), *old = open_toy(a, TOY), *new = open_toy(b, TOY);
    train_steps(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_wrong(m, 2);
    EXPECT_OK(shd_pin(old, &exact, &step, &e), &e);
    EXPECT_OK(shd_model_rewind(m, 1, &step, &e), &e);
    train_steps(m, 2);
    digest_at(m, 3, got);
    EXPECT_STR(got, three);
    EXPECT_OK(shd_pin(new, &exact, &step, &e), &e);
    for (uint32_t u = 0; u < shd_units(m); u++) {
        const size_t bytes = shd_unit_elems(m, u) * sizeof(float);
        const void *params;
        EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
        EXPECT(memcmp(params, shd_pinned(new, u), bytes) == 0);
        EXPECT(memcmp(params, shd_pinned(old, u), bytes) != 0);
        shd_release(m, u);
    }
    EXPECT_OK(shd_pin(old, &exact, &step, &e), &e); /* its own, once more */
    EXPECT(memcmp(shd_pinned(old, 1), shd_pinned(new, 1), shd_unit_elems(m, 1) * sizeof(float)) ==
           0);
    shd_close(b);
    shd_close(a);
    shd_close(s);
    fixture_stop(&daemons);
}

struct late_put {
    const shd_model *m;
    uint64_t attempt;
};

static void make_late_put(const struct round *round, const struct link *link,
                          struct wire_request *ret_request)
{
    static const uint8_t arrays[] = { 0, 1, 0, 0 }; /* parameters of one unit */
    const struct late_put *late = round->ctx;
    ret_request->create = (struct wire_create){
        .what = WIRE_CREATE_PUT,
        .origin = 7,
        .name = "",
        .owner = link->index,
        .owners = 2,
        .model = late->m->map->owners[link->index].layout.handle,
        .step = shd_step(late->m),
        .attempt = late->attempt,
        .arrays = { arrays, sizeof arrays },
    };
}

static int take_late_put(const struct round *round, const struct link *link,
                         const struct wire_reply *reply, struct shd_err *e)
{
    (void)round;
    (void)link;
    (void)e;
    EXPECT_EQ(reply->created.what, WIRE_CREATED_YOURS);
    return SHD_OK;
}

static int begin_put(shd_model *m, uint64_t attempt, struct shd_err *e)
{
    struct late_put late = { m, attempt };
    struct round round = { .what = "put",
                           .asks = WIRE_CREATE,
                           .type = WIRE_CREATED,
                           .make = make_late_put,
                           .take = take_late_put,
                           .ctx = &late };
    return round_one(&round, &m->session->hub->links[0], 0, e);
}

/* Asked for before, and under way since: the values that others have got for it go as they go back,
 * and owner 0 is not to commit it alone. A step that has just begun again is in no put's way. */
TEST(a_put_of_before_does_not_begin_behind_it)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    EXPECT_EQ(shd_units(m), 4);
    train_steps(m, 2);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    const uint64_t before = m->in.attempt;
    train_wrong(m, 1);
    EXPECT_OK(shd_model_rewind(m, step, &step, &e), &e);
    EXPECT_EQ(shd_step(m), step);
    EXPECT_STATUS(begin_put(m, before, &e), SHD_ERESET);
    EXPECT_HAS(e.text, "step 2 was given up: the model went back");
    const uint64_t since = m->in.attempt;
    EXPECT(since > before);
    EXPECT_OK(shd_return_none(m, 0, 1, &e), &e);
    EXPECT_OK(shd_reset_step(m, &e), &e);
    EXPECT(m->in.attempt > since);
    EXPECT_OK(begin_put(m, since, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
static pid_t start_rewinder(uint64_t to)
{
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    shd_session *s;
    shd_model *m;
    struct shd_err e = { 0 };
    uint64_t step;
    int r = try_connect(daemons.address, PATIENT_MS, &s, &e);
    if (r == SHD_OK)
        r = shd_model_attach(s, "toy", &m, &e);
    if (r == SHD_OK)
        r = shd_model_rewind(m, to, &step, &e);
    if (r != SHD_OK)
        fprintf(stderr, "rewind: %s\n", e.text);
    _exit(r == SHD_OK ? 0 : 1);
}

/* Daemons that have stopped themselves go on after a while, each time. */
static pid_t start_continuer(void)
{
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        usleep(200 * 1000);
        for (int i = 0; i < 2; i++)
            kill(daemons.pids[i], SIGCONT);
    }
}

/* An owner is in the middle of it and has not said so: what was read of its parameters meanwhile is
 * of no step. The others, which have not gone back, are not given what came of it. */
TEST(what_was_computed_while_an_owner_goes_back_is_not_returned)
{
    struct shd_err e = { 0 };
    float *grad;
    uint64_t step;
    fixture_start_kept(&daemons, 2, "rewind:copied!;");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    train_steps(m, 3);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_wrong(m, 2);
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    grad[0] = 3;
    const pid_t rewinder = start_rewinder(3);
    const struct board *board = m->map->owners[0].board.base;
    EXPECT_SOON(board_version(board, 0) == UINT64_MAX);
    const pid_t continuer = start_continuer();
    EXPECT_STATUS(shd_return(m, 0, 1, &e), SHD_ERESET);
    EXPECT_EQ(shd_step(m), 3);
    expect_end(rewinder);
    kill(continuer, SIGKILL);
    waitpid(continuer, NULL, 0);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Killed there, the first time or again: who rewinds repeats what it needs, and all owners go. */
TEST(daemons_killed_in_the_middle_go_back_whole)
{
    static const char *const fails[] = {
        "rewind:held@1;",
        "step:rewind:before@1;",
        "step:rewind:after@1;",
        "rewind:copied@1;",
        "rewind:published@1;",
        "rewind:words@1;",
        "step:rewind:unit@2;",
        "step:rewind:words@1;",
        "step:rewind:done:before@1;",
        "step:rewind:done:after@1;",
        "step:rewind:after@1;adopt:rewound@1;",
        "rewind:copied@1;step:rewind:unit@1;",
        "rewind:copied@1;step:rewind:words@1;adopt:repair:before@1;",
    };
    char three[65], four[65], got[65];
    toy_reference(TOY, 3, three);
    toy_reference(TOY, 4, four);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_err e = { 0 };
        uint64_t step = 0;
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, TOY);
        train_steps(m, 3);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        train_wrong(m, 3);
        EXPECT_OK(shd_model_rewind(m, 3, &step, &e), &e);
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        digest_at(m, 3, got);
        EXPECT_STR(got, three);
        train_steps(m, 1);
        digest_at(m, 4, got);
        EXPECT_STR(got, four);
        shd_session *other = attach(PATIENT_MS);
        shd_model *second = open_toy(other, TOY);
        digest_at(second, 4, got);
        EXPECT_STR(got, four);
        shd_close(other);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* Bits: daemons that are stopped once owner 0 has gone back. */
static unsigned stopped;

static void stop_some(const char *name)
{
    if (strcmp(name, "rewind:gone") != 0)
        return;
    for (int i = 0; i < daemons.count; i++)
        if ((stopped >> i & 1u) != 0)
            kill(daemons.pids[i], SIGSTOP);
    if (stopped == ALL_BUT_OWNER_0)
        raise(SIGKILL);
}

static void rewind_and_stop(void)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    fail_point_hook = stop_some;
    shd_model *m = open_toy(attach(PATIENT_MS), TOY);
    shd_model_rewind(m, 3, &step, &e);
    _exit(0);
}

static bool has_gone_back(const shd_model *m, int daemon)
{
    uint64_t to;
    return board_rewound(m->map->owners[daemon].board.base, &to) != 0;
}

/* Who rewinds is killed when some owners have gone back, of two pairs, and a host is lost: the
 * model is at the snapshot or where it was, whole. */
TEST(a_rewind_of_pairs_that_is_cut_off_leaves_all_or_nothing)
{
    NEEDS_PAIRS();
    char three[65], wrong[65], four[65], got[65];
    toy_reference(TOY, 3, three);
    toy_reference(TOY, 4, four);
    for (stopped = 0; stopped <= ALL_BUT_OWNER_0; stopped += stopped < ALL_OF_B ? 4 : 2)
        for (int lost = 0; lost < 3; lost++) {
            struct shd_err e = { 0 };
            uint64_t step = 0;
            fixture_start_kept(&daemons, 2, "");
            shd_session *s = attach(PATIENT_MS);
            shd_model *m = open_toy(s, TOY);
            train_steps(m, 3);
            EXPECT_OK(shd_snapshot(m, &step, &e), &e);
            train_wrong(m, 3);
            digest_at(m, 6, wrong);
            const pid_t pid = fork();
            CHECK(pid >= 0);
            if (pid == 0)
                rewind_and_stop();
            for (int i = 0; i < daemons.count; i++)
                EXPECT_SOON((stopped >> i & 1u) != 0 || has_gone_back(m, i));
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            if (lost > 0)
                paired_put_out(lost == 1 ? "a" : "b");
            for (int i = 0; i < daemons.count; i++)
                kill(daemons.pids[i], SIGCONT);
            shd_close(s);
            const bool back = lost != 1 ||
                              (stopped & ALL_OF_B) != ALL_OF_B; /* they may hear late */
            s = attach(PATIENT_MS);
            if (shd_model_attach(s, "toy", &m, &e) != SHD_OK)
                FAIL("stopped %x, lost %d: %s", stopped, lost, e.text);
            digest_of(m, got);
            if (strcmp(got, shd_step(m) == 3 ? three : wrong) != 0 || (back && shd_step(m) != 3))
                FAIL("stopped %x, lost %d: step %ju", stopped, lost, (uintmax_t)shd_step(m));
            const bool is_back = shd_step(m) == 3;
            train_steps(m, 1);
            digest_of(m, got);
            if (is_back)
                EXPECT_STR(got, four);
            shd_close(s);
            fixture_stop(&daemons);
        }
}

/* A snapshot that was being made when its daemon was killed is none. */
TEST(what_was_being_made_is_no_snapshot)
{
    static const char *const fails[] = { "snapshot:make@1;", "snapshot:head@1;",
                                         "snapshot:ready:before@1;" };
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX];
        struct shd_err e = { 0 };
        char want[65], got[65];
        uint64_t step = 0;
        toy_reference(TOY, 3, want);
        fixture_start_kept(&daemons, 2, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, TOY);
        train_steps(m, 3);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e); /* asked for again */
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_STARTS, 1, "") > 1);
        EXPECT_EQ(step, 3);
        EXPECT_EQ(list(m, rows), 1);
        train_wrong(m, 1);
        EXPECT_OK(shd_model_rewind(m, 3, &step, &e), &e);
        digest_at(m, 3, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

TEST_MAIN()
