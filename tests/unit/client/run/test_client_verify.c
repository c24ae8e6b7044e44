/* Verified steps with real daemons and workers: the same bits as without, through kills; a worker
 * that computes wrongly is named, with its pid, and nobody else is; what cannot be verified is
 * refused. Workers are processes, which go on until something was seen. */
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define WORKERS 3u
#define NOBODY  99u

struct shared {
    atomic_uint attached;
    atomic_bool go, stop;
};

struct worker {
    struct toy toy;
    bool wrong;
};

static struct shared *shared_new(void)
{
    struct shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                            0);
    EXPECT(s != MAP_FAILED);
    return s;
}

/* The toy's spec, of which every second step is verified. */
static const char *verified_spec(void)
{
    static char spec[8192];
    const char *plain = strchr(toy_spec("f32", TOY_ADAMW), '{');
    snprintf(spec, sizeof spec, "{ \"verify_every\": 2,%s", plain + 1);
    return spec;
}

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct worker *w = ctx;
    return toy_forward(&w->toy, micro, unit, params);
}

/* Slow enough for all workers to have a part in a step. */
static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    struct worker *w = ctx;
    const int r = toy_backward(&w->toy, micro, unit, params, grad);
    sleep_ms(1);
    if (r == 0 && w->wrong && unit == 1)
        grad[7] = nextafterf(grad[7], 2);
    return r;
}

static uint32_t metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    struct worker *w = ctx;
    return toy_metrics(&w->toy, micro, ret_metrics);
}

static void work(struct shared *shared, bool wrong)
{
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, verified_spec());
    struct worker w = { .toy = { .m = m, .fail_micro = -1 }, .wrong = wrong };
    const struct shd_compute compute = { .size = sizeof compute,
                                         .ctx = &w,
                                         .forward = forward,
                                         .backward = backward,
                                         .metrics = metrics };
    atomic_fetch_add(&shared->attached, 1);
    while (!atomic_load(&shared->go))
        sleep_ms(1);
    while (!atomic_load(&shared->stop)) {
        const struct shd_update update = toy_update(shd_step(m));
        MUST_OK(shd_run_step_elastic(m, &compute, &update, NULL, &e));
    }
    shd_close(s);
    _exit(0);
}

/* All of them, attached before any begins. */
static void start(struct shared *shared, pid_t *pids, uint32_t count, uint32_t wrong)
{
    for (uint32_t i = 0; i < count; i++) {
        pids[i] = test_fork();
        if (pids[i] == 0)
            work(shared, i == wrong);
    }
    EXPECT_SOON(atomic_load(&shared->attached) == count);
    atomic_store(&shared->go, true);
}

static void stop(struct shared *shared, const pid_t *pids, uint32_t count)
{
    int status;
    atomic_store(&shared->stop, true);
    for (uint32_t i = 0; i < count; i++)
        if (pids[i] > 0)
            EXPECT(waitpid(pids[i], &status, 0) == pids[i] && WIFEXITED(status) &&
                   WEXITSTATUS(status) == 0);
}

/* What the owner has of the model; json_decref(). */
static json_t *verify_of(shd_session *s, uint32_t owner)
{
    struct shd_err e = { 0 };
    char *text = NULL;
    EXPECT_OK(shd_status(s, owner, &text, &e), &e);
    json_t *all = json_loads(text, 0, NULL);
    free(text);
    json_t *verify = json_object_get(json_array_get(json_object_get(all, "models"), 0), "verify");
    EXPECT(json_is_object(verify));
    json_incref(verify);
    json_decref(all);
    return verify;
}

static int64_t number_of(shd_session *s, uint32_t owner, const char *name)
{
    json_t *verify = verify_of(s, owner);
    const int64_t number = json_integer_value(json_object_get(verify, name));
    json_decref(verify);
    return number;
}

TEST(same_bits_as_without_through_kills)
{
    struct shared *shared = shared_new();
    char want[65], got[65];
    int status;
    pid_t pids[WORKERS];
    fixture_start_kept(&daemons, 2, "");
    start(shared, pids, WORKERS, NOBODY);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, verified_spec());
    EXPECT_SOON(number_of(s, 0, "compared") >= 3 && number_of(s, 1, "compared") >= 1);
    EXPECT_EQ(number_of(s, 0, "differences") + number_of(s, 1, "differences"), 0);
    kill(pids[1], SIGKILL); /* perhaps with a copy half way */
    EXPECT(waitpid(pids[1], &status, 0) == pids[1]);
    pids[1] = 0;
    const int64_t before = number_of(s, 0, "compared");
    EXPECT_SOON(number_of(s, 0, "compared") >= before + 3);
    fixture_restart(&daemons, 0);
    fixture_restart(&daemons, 1);
    EXPECT_SOON(number_of(s, 0, "compared") >= 3 && number_of(s, 1, "compared") >= 1);
    stop(shared, pids, WORKERS);
    EXPECT_EQ(number_of(s, 0, "differences") + number_of(s, 1, "differences"), 0);
    shd_close(s);
    s = attach(PATIENT_MS); /* where the workers have come to */
    m = open_toy(s, verified_spec());
    toy_reference(toy_spec("f32", TOY_ADAMW), (uint32_t)shd_step(m), want);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Nobody but that one is. True: it is. */
static bool is_named(json_t *verify, pid_t wrong)
{
    bool suspect = false;
    json_t *workers = json_object_get(verify, "workers"),
           *recent = json_object_get(verify, "recent");
    size_t i;
    json_t *w;
    json_array_foreach(workers, i, w)
    {
        const bool is = json_integer_value(json_object_get(w, "pid")) == wrong;
        EXPECT(is || !json_is_true(json_object_get(w, "suspect")));
        suspect = suspect || json_is_true(json_object_get(w, "suspect"));
        EXPECT(is || json_integer_value(json_object_get(w, "wrong")) == 0);
        EXPECT_HAS(json_string_value(json_object_get(w, "name")), "test");
    }
    json_array_foreach(recent, i, w)
    {
        const json_t *two = json_object_get(w, "workers"), *sure = json_object_get(w, "wrong_pid");
        const int64_t a = json_integer_value(json_object_get(json_array_get(two, 0), "pid"));
        const int64_t b = json_integer_value(json_object_get(json_array_get(two, 1), "pid"));
        EXPECT((a == wrong) != (b == wrong));
        EXPECT_EQ(json_integer_value(json_object_get(w, "step")) % 2, 1);
        EXPECT_STR(json_string_value(json_object_get(w, "unit")), "h0");
        EXPECT(json_is_null(sure) || json_integer_value(sure) == wrong);
    }
    return suspect && !json_is_null(json_object_get(json_array_get(recent, 0), "wrong_pid"));
}

/* Also how soon: in every second step two of three are compared. */
TEST(worker_that_computes_wrongly_is_named)
{
    struct shared *shared = shared_new();
    pid_t pids[WORKERS];
    fixture_start(&daemons, 2, NULL);
    start(shared, pids, WORKERS, /* wrong= */ 1);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_SOON(number_of(s, 0, "differences") + number_of(s, 1, "differences") > 0);
    const uint32_t owner = number_of(s, 0, "differences") > 0 ? 0 : 1;
    bool named = false;
    for (const uint64_t end = test_now_ms() + TEST_HANG_MS; !named && test_now_ms() < end;) {
        json_t *verify = verify_of(s, owner);
        named = is_named(verify, pids[1]);
        json_decref(verify);
    }
    EXPECT(named);
    stop(shared, pids, WORKERS);
    struct http_reply reply = http_get(&daemons, (int)owner, "/metrics");
    EXPECT_HAS(reply.body, "shardd_verify_worker_differences{");
    EXPECT_HAS(reply.body, "suspect=\"1\"");
    free(reply.text);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(what_nobody_else_computes_is_refused)
{
    struct shd_err e = { 0 };
    shd_session *s;
    float *grad;
    fixture_start(&daemons, 1, NULL);
    s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, verified_spec());
    EXPECT_STATUS(shd_grad(m, 0, 1, &grad, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "verify_every 2, and micro-batch 0 is not leased here");
    EXPECT_STATUS(shd_return_none(m, 0, 1, &e), SHD_EINVAL);
    EXPECT_STATUS(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), SHD_EINVAL);
    shd_close(s);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    m = open_toy(s, verified_spec());
    EXPECT_STATUS(shd_grad(m, 0, 1, &grad, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "there is one worker");
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
