/* Parameters read while others train: all of one step, whoever dies. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/session.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define STEPS 40u

struct reading { /* what shd_read_step() reads into */
    uint32_t units;
    uint64_t bytes[8];
    void *to[8]; /* owned */
};

static struct reading reading_new(const shd_model *m)
{
    struct reading r = { .units = shd_units(m) };
    for (uint32_t i = 0; i < shd_tensors(m); i++) {
        struct shd_tensor t = { .size = sizeof t };
        shd_tensor_get(m, i, &t, NULL);
        r.bytes[t.unit] = (t.offset_elems + t.elems) * sizeof(float);
    }
    for (uint32_t u = 0; u < r.units; u++)
        r.to[u] = calloc(1, r.bytes[u]);
    return r;
}

static void reading_free(struct reading *r)
{
    for (uint32_t u = 0; u < r->units; u++)
        free(r->to[u]);
}

static uint64_t hash_of(const struct reading *r)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint32_t u = 0; u < r->units; u++)
        for (uint64_t i = 0; i < r->bytes[u]; i++)
            hash = (hash ^ ((const uint8_t *)r->to[u])[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* What is to be read at each step. */
static void references(uint64_t ret_hashes[STEPS + 1])
{
    struct shd_err e = { 0 };
    shd_session *s;
    uint64_t step;
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct reading r = reading_new(m);
    for (uint32_t k = 0; k <= STEPS; k++) {
        EXPECT_OK(shd_read_step(m, r.to, &step, &e), &e);
        EXPECT_EQ(step, k);
        EXPECT_EQ(shd_unit_version(m, 1), k);
        ret_hashes[k] = hash_of(&r);
        if (k < STEPS)
            train_steps(m, 1);
    }
    reading_free(&r);
    shd_close(s);
}

TEST(what_is_read_is_of_one_step)
{
    struct shd_err e = { 0 };
    uint64_t want[STEPS + 1], step = 0, before = 0;
    uint32_t reads = 0;
    references(want);
    fixture_start_kept(&daemons, 2, "");
    const pid_t trainer = trainer_fork(toy_spec("f32", TOY_ADAMW), 0, 1, STEPS);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct reading r = reading_new(m);
    for (; step < STEPS; reads++) {
        EXPECT_OK(shd_read_step(m, r.to, &step, &e), &e);
        EXPECT(step >= before && step <= STEPS);
        if (hash_of(&r) != want[step])
            FAIL("read %" PRIu32 ": not what step %" PRIu64 " has", reads, step);
        if (before < STEPS / 2 && step >= STEPS / 2)
            fixture_restart(&daemons, 1);
        before = step;
    }
    expect_well(trainer);
    for (uint32_t u = 0; u < r.units; u++)
        EXPECT_EQ(shd_unit_version(m, u), STEPS);
    EXPECT_EQ(shd_unit_version(m, r.units), UINT64_MAX);
    EXPECT_EQ(shd_step(m), 0); /* this worker has not moved */
    free(r.to[1]);
    r.to[1] = NULL;
    EXPECT_OK(shd_read_step(m, r.to, &step, &e), &e); /* without that one */
    EXPECT_STATUS(shd_read_step(m, NULL, &step, &e), SHD_EINVAL);
    reading_free(&r);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Memory whose page is not writable until a worker has gone on by two steps: whoever writes to it
 * in order has what lies before the page of one step and what lies behind it of another. */
static struct {
    uint8_t *page;
    int go, done; /* pipes to and from that worker */
    volatile sig_atomic_t faults;
} tear;

static void on_fault(int number, siginfo_t *info, void *context)
{
    char byte = 0;
    (void)number;
    (void)context;
    if ((uintptr_t)info->si_addr - (uintptr_t)tear.page >= SHD_PAGE_BYTES ||
        write(tear.go, &byte, 1) != 1 || read(tear.done, &byte, 1) != 1 ||
        mprotect(tear.page, SHD_PAGE_BYTES, PROT_READ | PROT_WRITE) < 0)
        abort();
    tear.faults++;
}

static pid_t train_when_asked(void)
{
    int go[2], done[2];
    EXPECT(pipe(go) == 0 && pipe(done) == 0);
    tear.go = go[1];
    tear.done = done[0];
    const pid_t pid = test_fork();
    if (pid == 0) {
        char byte;
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        EXPECT_EQ(read(go[0], &byte, 1), 1);
        train_steps(m, 2); /* the second begins with what the first has made */
        EXPECT_EQ(write(done[1], &byte, 1), 1);
        shd_close(s);
        _exit(0);
    }
    close(go[0]);
    close(done[1]);
    return pid;
}

TEST(read_that_a_step_overtakes_begins_again)
{
    struct shd_err e = { 0 };
    const struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    struct sigaction before;
    uint64_t want[STEPS + 1], step = 0;
    references(want);
    fixture_start_kept(&daemons, 2, "");
    const pid_t trainer = train_when_asked();
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct reading r = reading_new(m);
    const uint32_t last = r.units - 1; /* those before it tell when they are read next */
    CHECK(r.bytes[last] > 4 * SHD_PAGE_BYTES);
    free(r.to[last]);
    r.to[last] = mmap(NULL, r.bytes[last], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                      0);
    CHECK(r.to[last] != MAP_FAILED);
    tear.page = (uint8_t *)r.to[last] + 2 * SHD_PAGE_BYTES;
    EXPECT(mprotect(tear.page, SHD_PAGE_BYTES, PROT_NONE) == 0);
    EXPECT(sigaction(SIGSEGV, &action, &before) == 0);
    const int read_status = shd_read_step(m, r.to, &step, &e);
    EXPECT(sigaction(SIGSEGV, &before, NULL) == 0);
    EXPECT_OK(read_status, &e);
    EXPECT_EQ(tear.faults, 1);
    EXPECT(step >= 1);
    EXPECT_EQ(hash_of(&r), want[step]);
    expect_well(trainer);
    munmap(r.to[last], r.bytes[last]);
    r.to[last] = NULL;
    reading_free(&r);
    close(tear.go);
    close(tear.done);
    shd_close(s);
    fixture_stop(&daemons);
}

/* A child's last words, when it writes to the element of the tensor. */
static void last_words(const char *tensor, uint64_t elem, char *ret_text, size_t room)
{
    int pipes[2], status;
    EXPECT(pipe(pipes) == 0);
    const pid_t child = test_fork();
    if (child == 0) {
        struct shd_err why = { 0 };
        struct shd_tensor t = { .size = sizeof t };
        const void *params;
        shd_session *s = NULL;
        shd_model *m;
        MUST(dup2(pipes[1], STDERR_FILENO) == STDERR_FILENO);
        MUST_OK(shd_explain_writes(&e));
        MUST(try_connect(daemons.address, PATIENT_MS, &s, &why) == SHD_OK);
        MUST(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &why) == SHD_OK);
        MUST(shd_tensor_find(m, tensor, &t, &why) == SHD_OK);
        MUST(shd_acquire(m, t.unit, &params, &why) == SHD_OK);
        ((volatile float *)params)[t.offset_elems + elem] = 1;
        _exit(0);
    }
    close(pipes[1]);
    size_t got = 0;
    for (ssize_t n = 1; n > 0; got += (size_t)n)
        n = read(pipes[0], ret_text + got, room - 1 - got);
    ret_text[got] = '\0';
    close(pipes[0]);
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(status != 0); /* by SIGSEGV, or as a sanitizer ends it */
}

TEST(write_to_parameters_names_the_tensor)
{
    struct shd_err e = { 0 };
    shd_session *s;
    struct shd_tensor last = { .size = sizeof last }, found = last;
    char text[4096], want[256];
    uint64_t elem;
    const void *params;
    fixture_start(&daemons, 2, NULL);
    EXPECT_OK(try_connect(daemons.address, PATIENT_MS, &s, &e), &e);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_tensor_get(m, shd_tensors(m) - 1, &last, NULL);
    last_words(last.name, last.elems - 1, text, sizeof text);
    snprintf(want, sizeof want, "write to tensor '%s' of model '%s', element %ju: ", last.name,
             shd_model_name(m), (uintmax_t)last.elems - 1);
    EXPECT(strstr(text, want) != NULL);

    EXPECT_OK(shd_acquire(m, last.unit, &params, &e), &e);
    const float *at = (const float *)params + last.offset_elems;
    EXPECT(shd_what(at + last.elems - 1, &found, &elem) == m);
    EXPECT(strcmp(found.name, last.name) == 0);
    EXPECT_EQ(elem, last.elems - 1);
    EXPECT(shd_what((const float *)params + shd_unit_elems(m, last.unit), &found, &elem) == NULL ||
           found.unit != last.unit);
    EXPECT(shd_what(text, &found, &elem) == NULL);
    shd_close(s);
    EXPECT(shd_what(at, &found, &elem) == NULL);
    fixture_stop(&daemons);
}

/* A board as it is while a unit is updated: not readable, until its new version is there. */
TEST(unit_that_is_being_changed_has_no_version)
{
    static _Alignas(64) uint8_t memory[4096];
    struct board *b = (void *)memory;
    board_init(b, 2);
    EXPECT_EQ(board_stable_version(b, 0), UINT64_MAX);
    board_publish(b, 0, 7);
    board_publish(b, 1, 7);
    board_set_step(b, 7, STEP_OPEN);
    EXPECT_EQ(board_stable_version(b, 0), 7);
    board_set_step(b, 7, STEP_SEALED);
    EXPECT_EQ(board_stable_version(b, 0), 7);
    board_set_step(b, 7, STEP_APPLYING);
    EXPECT_EQ(board_stable_version(b, 0), UINT64_MAX);
    board_publish(b, 0, 8);
    EXPECT_EQ(board_stable_version(b, 0), 8);
    EXPECT_EQ(board_stable_version(b, 1), UINT64_MAX);
    board_publish(b, 1, 8);
    board_set_step(b, 8, STEP_OPEN);
    EXPECT_EQ(board_stable_version(b, 1), 8);
}

#ifdef SHD_FAIL_POINTS
/* In a child: it waits. */
__attribute__((noreturn)) static void read_apart(void)
{
    shd_session *s = NULL;
    shd_model *m = NULL;
    const struct shd_options options = {
        .size = sizeof options, .address = daemons.address, .timeout_ms = PATIENT_MS, .reader = true
    };
    MUST_OK(shd_connect(&options, &s, &e));
    MUST_OK(shd_model_attach(s, "toy", &m, &e));
    MUST(shd_step(m) == 2);
    shd_close(s);
    _exit(0);
}

static bool has_reader(void)
{
    const struct http_reply reply = http_get(&daemons, 0, "/status");
    const bool has = strstr(reply.text, "\"role\":\"reader\"") != NULL;
    free(reply.text);
    return has;
}

/* A worker is killed where one owner has ended a step and the other one has not: who only reads
 * cannot end it there, and waits for a worker that does. */
TEST(who_reads_waits_where_owners_are_a_step_apart)
{
    fixture_start_kept(&daemons, 2, "step:commit:after@2");
    const pid_t worker = trainer_fork(toy_spec("f32", TOY_ADAMW), 0, 1, 4);
    fixture_ask(&daemons, KEEPER_WAIT, 0, "");
    kill(worker, SIGKILL);
    waitpid(worker, NULL, 0);
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    fixture_restart(&daemons, 1); /* nor does it end itself */
    const pid_t reader = test_fork();
    if (reader == 0)
        read_apart();
    EXPECT_SOON(has_reader());
    sleep_ms(100); /* it has come as far as it does by itself */
    shd_session *s = attach(PATIENT_MS);
    EXPECT_EQ(shd_step(open_toy(s, toy_spec("f32", TOY_ADAMW))), 2);
    expect_well(reader);
    shd_close(s);
    fixture_stop(&daemons);
}

#endif

TEST_MAIN()
