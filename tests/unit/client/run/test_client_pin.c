/* Steps pinned while others train: each is all of one step, whoever is killed, and stays so. */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/session.h"
#include "daemon/model/pin.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 240u

static const char *spec(void)
{
    return toy_spec("f32", TOY_ADAMW);
}

static uint64_t unit_bytes(const shd_model *m, uint32_t unit)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < shd_tensors(m); i++) {
        struct shd_tensor t = { .size = sizeof t };
        shd_tensor_get(m, i, &t, NULL);
        if (t.unit == unit)
            bytes = (t.offset_elems + t.elems) * dtype_bytes(shd_param_dtype(m));
    }
    return bytes;
}

static uint64_t hash_more(uint64_t hash, const uint8_t *data, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ data[i]) * UINT64_C(0x100000001b3);
    return hash;
}

#define HASH_BEGIN UINT64_C(0xcbf29ce484222325)

static uint64_t hash_pinned(const shd_model *m)
{
    uint64_t hash = HASH_BEGIN;
    for (uint32_t u = 0; u < shd_units(m); u++)
        hash = hash_more(hash, shd_pinned(m, u), unit_bytes(m, u));
    return hash;
}

/* Of what shd_read_step() copies. */
static uint64_t hash_read(shd_model *m, uint64_t *ret_step)
{
    uint64_t hash = HASH_BEGIN;
    struct shd_err e = { 0 };
    void *to[8] = { NULL };
    for (uint32_t u = 0; u < shd_units(m); u++)
        to[u] = malloc(unit_bytes(m, u));
    EXPECT_OK(shd_read_step(m, to, ret_step, &e), &e);
    for (uint32_t u = 0; u < shd_units(m); u++) {
        hash = hash_more(hash, to[u], unit_bytes(m, u));
        free(to[u]);
    }
    return hash;
}

/* What is to be pinned at each step. */
static void references(uint64_t *ret_hashes, uint32_t steps)
{
    struct shd_err e = { 0 };
    shd_session *s;
    uint64_t step;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, spec());
    EXPECT_STATUS(shd_pin(m, NULL, NULL, &e), SHD_ENOTSUP);
    for (uint32_t k = 0; k <= steps; k++) {
        ret_hashes[k] = hash_read(m, &step);
        EXPECT_EQ(step, k);
        if (k < steps)
            train_steps(m, 1);
    }
    shd_close(s);
}

static bool shows(int index, const char *text)
{
    const struct http_reply r = http_get(&daemons, index, "/status");
    EXPECT_EQ(r.code, 200);
    const bool there = strstr(r.body, text) != NULL;
    free(r.text);
    return there;
}

static double metric(const char *family)
{
    char line[64];
    double value = -1;
    const struct http_reply r = http_get(&daemons, 0, "/metrics");
    snprintf(line, sizeof line, "\nshardd_%s{device=\"cpu0\",model=\"toy\"} ", family);
    const char *at = strstr(r.body, line);
    if (at != NULL)
        value = strtod(at + strlen(line), NULL);
    free(r.text);
    return value;
}

/* Half of the micro-batches, once daemon 0 shows that text. */
static pid_t train_elsewhere(uint32_t rank, uint64_t steps, const char *after)
{
    const pid_t pid = test_fork();
    if (pid == 0) {
        EXPECT_SOON(shows(0, after));
        trainer_run(spec(), rank, 2, steps);
    }
    return pid;
}

static void expect_ended(pid_t pid)
{
    int status = 0;
    EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
}

static shd_model *read_toy(shd_session **ret_session)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .name = "reader",
                                         .timeout_ms = PATIENT_MS,
                                         .reader = true };
    struct shd_err e = { 0 };
    shd_model *m = NULL;
    EXPECT_OK(shd_connect(&options, ret_session, &e), &e);
    EXPECT_OK(shd_model_attach(*ret_session, "toy", &m, &e), &e);
    return m;
}

/* -- Of one step ------------------------------------------------------------------------------- */

/* Two workers, each of half of the micro-batches; every few pins a daemon or a worker is killed. */
TEST(each_pin_is_of_its_step_whoever_is_killed)
{
    const char *text = getenv("SHD_TEST_STEPS"); /* more of them */
    const uint32_t steps = text != NULL ? (uint32_t)atoi(text) : STEPS;
    uint64_t *want = calloc(steps + 1, sizeof *want);
    struct shd_err e = { 0 };
    uint64_t step = 0, from = 0;
    uint32_t pins = 0, kills = 0;
    references(want, steps);
    pin_piece_bytes = 512; /* of the daemons, too: updates come in between */
    fixture_start_kept(&daemons, 2, "");
    shd_session *maker = attach(PATIENT_MS), *s;
    open_toy(maker, spec());
    pid_t trainers[] = { train_elsewhere(0, steps, ""), train_elsewhere(1, steps, "") };
    shd_model *m = read_toy(&s);
    shd_close(maker);
    for (; step < steps; pins++) {
        const struct shd_pin_options options = { .size = sizeof options, .step = from };
        EXPECT_OK(shd_pin(m, &options, &step, &e), &e);
        EXPECT(step >= from && step <= steps);
        if (hash_pinned(m) != want[step])
            FAIL("pin %" PRIu32 " is not what step %" PRIu64 " has", pins, step);
        from = pins % 3 == 0 ? 0 : step + 1; /* also the same again */
        from = from > steps ? steps : from;
        kills += pins % 10 == 5;
        if (pins % 20 == 5)
            fixture_restart(&daemons, (int)(pins / 20 % 2));
        if (pins % 20 == 15 && step < steps - 20) {
            pid_t *victim = &trainers[pins / 20 % 2];
            kill(*victim, SIGKILL);
            EXPECT_EQ(waitpid(*victim, NULL, 0), *victim);
            *victim = train_elsewhere(pins / 20 % 2, steps, "");
        }
    }
    printf("%" PRIu32 " pins in %" PRIu32 " steps, %" PRIu32 " kills\n", pins, steps, kills);
    EXPECT(pins >= steps / 8);
    free(want);
    expect_ended(trainers[0]);
    expect_ended(trainers[1]);
    shd_close(s);
    fixture_stop(&daemons);
}

/* One that is to come is copied in passing, and every n-th alone. */
TEST(a_step_to_come_is_pinned_as_it_passes)
{
    static uint64_t want[STEPS + 1];
    struct shd_err e = { 0 };
    uint64_t step = 0;
    shd_session *maker, *s;
    references(want, STEPS);
    pin_piece_bytes = 512;
    fixture_start(&daemons, 3, NULL);
    maker = attach(PATIENT_MS);
    shd_model *mm = open_toy(maker, spec());
    shd_model *m = read_toy(&s);
    struct shd_pin_options options = { .size = sizeof options, .step = 3, .exact = true };
    const struct shd_pin_options past = { .size = sizeof past, .step = 2, .exact = true };
    options.timeout_ms = 50;
    EXPECT_STATUS(shd_pin(m, &options, &step, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "has not pinned step 3 (it is at 0)");
    EXPECT(shd_pinned(m, 0) == NULL);
    options.timeout_ms = 0;
    train_steps(mm, 2);
    const pid_t first = train_elsewhere(0, STEPS, "\"step\":3,\"state\":\"armed\"");
    const pid_t second = train_elsewhere(1, STEPS, "");
    shd_close(maker);
    EXPECT_OK(shd_pin(m, &options, &step, &e), &e);
    EXPECT_EQ(step, 3);
    EXPECT_EQ(hash_pinned(m), want[3]);
    EXPECT_STATUS(shd_pin(m, &past, &step, &e), SHD_ESTEP);
    EXPECT(shd_pinned(m, 0) == NULL);
    options = (struct shd_pin_options){ .size = sizeof options, .every = 7, .timeout_ms = 100 };
    while (shd_unit_version(m, 1) != STEPS || step + 7 <= STEPS) {
        options.step = step + 1;
        const int r = shd_pin(m, &options, &step, &e);
        if (r == SHD_ETIMEDOUT && shd_unit_version(m, 1) == STEPS)
            break; /* the last of them was over before it was asked for */
        if (r == SHD_ETIMEDOUT)
            continue;
        EXPECT_OK(r, &e);
        EXPECT_EQ(step % 7, 0);
        EXPECT_EQ(hash_pinned(m), want[step]);
    }
    expect_ended(first);
    expect_ended(second);
    options.step = UINT64_MAX;
    EXPECT_STATUS(shd_pin(m, &options, &step, &e), SHD_ERANGE);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(what_is_pinned_stays_also_when_its_daemons_are_killed)
{
    for (int b = 0; b < 2; b++) {
        struct shd_err e = { 0 };
        uint64_t step = 0, other = 0;
        shd_session *s;
        fixture_start_kept(&daemons, 2, "");
        shd_session *maker = attach(PATIENT_MS);
        shd_model *mm = open_toy(maker, toy_spec(b ? "bf16" : "f32", TOY_ADAMW));
        shd_model *m = read_toy(&s);
        train_steps(mm, 3);
        EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
        EXPECT_EQ(step, 3);
        const uint64_t hash = hash_read(mm, &other);
        EXPECT_EQ(hash_pinned(m), hash);
        train_steps(mm, 3);
        EXPECT(hash_read(mm, &other) != hash);
        EXPECT_EQ(other, 6);
        EXPECT_EQ(hash_pinned(m), hash);
        fixture_restart(&daemons, 0);
        fixture_restart(&daemons, 1);
        EXPECT_EQ(hash_pinned(m), hash);
        EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
        EXPECT_EQ(step, 6);
        EXPECT_EQ(hash_pinned(m), hash_read(mm, &other));
        shd_unpin(m);
        shd_unpin(m);
        EXPECT(shd_pinned(m, 0) == NULL);
        shd_close(s);
        shd_close(maker);
        fixture_stop(&daemons);
    }
}

static int fill_seven(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const uint64_t elems = shd_unit_elems(ctx, unit);
    (void)array;
    for (uint64_t i = 0; i < elems; i++)
        values[i] = 7;
    return 0;
}

/* A put is a step; giving up the open one changes nothing. */
TEST(puts_are_steps_and_resets_are_none)
{
    struct shd_err e = { 0 };
    uint64_t step = 0, other = 0;
    shd_session *s;
    pin_piece_bytes = 512;
    fixture_start_kept(&daemons, 2, "");
    shd_session *maker = attach(PATIENT_MS);
    shd_model *mm = open_toy(maker, spec());
    shd_model *m = read_toy(&s);
    train_steps(mm, 2);
    const uint64_t before = hash_read(mm, &other);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    const uint8_t arrays[] = { SHD_PUT_PARAMS, SHD_PUT_PARAMS, SHD_PUT_PARAMS, SHD_PUT_PARAMS };
    const struct shd_put_options put = {
        .size = sizeof put, .arrays = arrays, .fill = fill_seven, .ctx = mm
    };
    EXPECT_OK(shd_put(mm, &put, NULL, &e), &e);
    EXPECT_EQ(hash_pinned(m), before);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_EQ(step, 3);
    EXPECT(((const float *)shd_pinned(m, 1))[0] == 7);
    const uint64_t after = hash_read(mm, &other);
    EXPECT_EQ(hash_pinned(m), after);
    float *grad;
    EXPECT_OK(shd_grad(mm, 0, 1, &grad, &e), &e);
    memset(grad, 0, shd_unit_elems(mm, 1) * sizeof *grad);
    EXPECT_OK(shd_return(mm, 0, 1, &e), &e);
    EXPECT_OK(shd_reset_step(mm, &e), &e);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_EQ(step, 3);
    EXPECT_EQ(hash_pinned(m), after);
    shd_close(s);
    shd_close(maker);
    fixture_stop(&daemons);
}

/* -- Several, and none ------------------------------------------------------------------------- */

TEST(sessions_share_a_step_and_there_are_two_of_them)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    shd_session *s[4];
    shd_model *m[4];
    fixture_start(&daemons, 2, NULL);
    shd_session *maker = attach(PATIENT_MS);
    shd_model *mm = open_toy(maker, spec());
    for (int i = 0; i < 4; i++)
        m[i] = read_toy(&s[i]);
    const struct shd_pin_options first = { .size = sizeof first, .step = 0, .exact = true };
    EXPECT_OK(shd_pin(m[0], &first, &step, &e), &e);
    train_steps(mm, 1);
    EXPECT_OK(shd_pin(m[1], &first, &step, &e), &e); /* it is over, and there */
    EXPECT_EQ(step, 0);
    EXPECT_EQ(hash_pinned(m[1]), hash_pinned(m[0]));
    EXPECT_SOON(shows(0, "\"pins\":[{\"step\":0,\"state\":\"ready\"") &&
                shows(0, "\"sessions\":2}"));
    EXPECT_OK(shd_pin(m[2], NULL, &step, &e), &e);
    EXPECT_EQ(step, 1);
    train_steps(mm, 1);
    EXPECT_STATUS(shd_pin(m[3], NULL, &step, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "steps 0 and 1 of model 'toy' are pinned");
    EXPECT(shd_pinned(m[3], 0) == NULL);
    const uint64_t hash = hash_pinned(m[0]);
    shd_unpin(m[1]);
    EXPECT_STATUS(shd_pin(m[3], NULL, &step, &e), SHD_EBUSY); /* one has it still */
    EXPECT_EQ(hash_pinned(m[0]), hash);
    const pid_t waiter = test_fork();
    if (waiter == 0) {
        const struct shd_pin_options wait = { .size = sizeof wait, .wait = true };
        shd_session *own;
        shd_model *mine = read_toy(&own);
        MUST(shd_pin(mine, &wait, &step, NULL) == SHD_OK && step == 2);
        _exit(0);
    }
    sleep_ms(100);
    shd_unpin(m[0]);
    expect_ended(waiter);
    EXPECT_OK(shd_pin(m[2], NULL, &step, &e), &e); /* its own gives way */
    EXPECT_EQ(step, 2);
    for (int i = 0; i < 4; i++)
        shd_close(s[i]);
    shd_close(maker);
    fixture_stop(&daemons);
}

TEST(memory_goes_with_the_last_session_also_a_killed_one)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *maker = attach(PATIENT_MS);
    shd_model *mm = open_toy(maker, spec());
    train_steps(mm, 2); /* and what that makes */
    EXPECT(shows(0, "\"pins\":[]"));
    const int fds = count_fds(daemons.pids[0]), maps = count_segment_maps(daemons.pids[0]);
    for (int i = 0; i < 6; i++) {
        int ready[2];
        EXPECT_EQ(pipe(ready), 0);
        const pid_t reader = test_fork();
        if (reader == 0) {
            shd_session *s;
            shd_model *m = read_toy(&s);
            const struct shd_pin_options far = { .size = sizeof far, .step = 100 };
            uint64_t step;
            if (i % 2 == 0)
                MUST(shd_pin(m, NULL, &step, NULL) == SHD_OK);
            MUST(write(ready[1], "", 1) == 1);
            if (i % 2 == 1)
                shd_pin(m, &far, &step, &e); /* killed while it waits */
            pause();
        }
        char byte;
        EXPECT_EQ(read(ready[0], &byte, 1), 1);
        EXPECT_SOON(shows(0, "\"pins\":[{\"step\":"));
        train_steps(mm, 1);
        if (i == 4)
            kill(reader, SIGSTOP);
        train_steps(mm, 3); /* it holds nobody up */
        kill(reader, SIGKILL);
        EXPECT_EQ(waitpid(reader, NULL, 0), reader);
        EXPECT_SOON(shows(0, "\"pins\":[]") && shows(1, "\"pins\":[]"));
        close(ready[0]);
        close(ready[1]);
    }
    expect_daemon_idle(daemons.pids[0], fds, maps);
    shd_close(maker);
    fixture_stop(&daemons);
}

static struct { /* shared with the daemons */
    _Atomic bool full;
} * memory;

static int no_room(enum sys_kind kind)
{
    return kind == SYS_RESERVE && atomic_load(&memory->full) ? ENOSPC : 0;
}

static void little_memory(int index)
{
    if (index == 1)
        sys_fault = no_room;
}

TEST(metrics_have_how_many_how_much_and_how_long)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec());
    EXPECT(metric("pins") == 0 && metric("pin_bytes") == 0 && metric("pin_seconds") == 0);
    EXPECT_OK(shd_pin(m, NULL, NULL, &e), &e);
    EXPECT(metric("pins") == 1);
    EXPECT(metric("pin_bytes") == (double)shardmap_publish_bytes(m->map->owners[0].shards));
    EXPECT_SOON(metric("pin_seconds") > 0.01);
    shd_unpin(m);
    EXPECT_SOON(metric("pins") == 0);
    EXPECT(metric("pin_bytes") == 0 && metric("pin_seconds") == 0);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(without_room_it_is_refused_and_training_goes_on)
{
    struct shd_err e = { 0 };
    uint64_t step = 0;
    shd_session *s;
    memory = mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fixture_start(&daemons, 2, little_memory);
    shd_session *maker = attach(PATIENT_MS);
    shd_model *mm = open_toy(maker, spec());
    shd_model *m = read_toy(&s);
    train_steps(mm, 1);
    atomic_store(&memory->full, true);
    EXPECT_STATUS(shd_pin(m, NULL, &step, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "daemon cpu1");
    EXPECT_HAS(e.text, "pin step 1");
    train_steps(mm, 2);
    EXPECT_SOON(shows(0, "\"pins\":[]") && shows(1, "\"pins\":[]"));
    atomic_store(&memory->full, false);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    EXPECT_EQ(step, 3);
    shd_close(s);
    shd_close(maker);
    fixture_stop(&daemons);
    munmap(memory, sizeof *memory);
}

/* -- Readers ----------------------------------------------------------------------------------- */

TEST(a_reader_session_changes_nothing)
{
    struct shd_err e = { 0 };
    shd_session *s;
    float *grad;
    const void *params;
    fixture_start(&daemons, 1, NULL);
    const struct shd_options options = {
        .size = sizeof options, .address = daemons.address, .timeout_ms = PATIENT_MS, .reader = true
    };
    shd_model *m = NULL;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT_STATUS(shd_model_open(s, spec(), &m, &e), SHD_ENOENT);
    shd_session *maker = attach(PATIENT_MS);
    open_toy(maker, spec());
    EXPECT_OK(shd_model_open(s, spec(), &m, &e), &e);
    EXPECT_OK(shd_acquire(m, 0, &params, &e), &e);
    EXPECT_STATUS(shd_grad(m, 0, 0, &grad, &e), SHD_EAUTH);
    shd_release(m, 0);
    const struct shd_update update = toy_update(0);
    EXPECT_STATUS(shd_commit(m, &update, NULL, &e), SHD_EAUTH);
    shd_close(s);
    shd_close(maker);
    fixture_stop(&daemons);
}

TEST_MAIN()
