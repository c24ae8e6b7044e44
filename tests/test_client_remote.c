/* The mapped path against real daemons, in forked children on a private runtime directory. */
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "client/path_map.h"
#include "client/session.h"
#include "proto/board.h"
#include "proto/fdpass.h"
#include "proto/shardmap.h"
#include "proto/sys.h"
#include "tests/client_toy.h"
#include "tests/fixture.h"
#include "tests/test.h"

static struct fixture daemons;

static int try_connect(const char *address, uint64_t timeout_ms, shd_session **ret,
                       struct shd_err *e)
{
    const struct shd_options options = {
        .size = sizeof options, .address = address, .name = "test", .timeout_ms = timeout_ms
    };
    *e = (struct shd_err){ 0 };
    return shd_connect(&options, ret, e);
}

static shd_session *attach(uint64_t timeout_ms)
{
    struct shd_err e;
    shd_session *s;
    EXPECT_OK(try_connect(daemons.dir, timeout_ms, &s, &e), &e);
    return s;
}

static shd_model *open_toy(shd_session *s, const char *spec)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    return m;
}

static void digest_of(shd_model *m, char hex[65])
{
    struct shd_err e = { 0 };
    uint64_t step;
    EXPECT_OK(shd_digest(m, hex, &step, &e), &e);
    EXPECT_EQ(step, shd_step(m));
}

/* -- Same bits ----------------------------------------------------------------------------------
 */

static void train_and_compare(const char *spec, int owners, uint32_t steps)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    struct shd_stats stats;
    toy_reference(spec, steps, want);
    fixture_start(&daemons, owners, NULL);
    shd_session *s = attach(10000);
    EXPECT_EQ(shd_owners(s), owners);
    shd_model *m = open_toy(s, spec);
    for (uint32_t k = 0; k < steps; k++) {
        struct shd_result result;
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
        EXPECT_EQ(result.step, k);
        EXPECT(result.metrics[1] == 6 && result.grad_norm > 0);
    }
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_stats(s, &stats);
    EXPECT_EQ(stats.bytes_copied, 0);
    EXPECT(stats.bytes_mapped > 0 && stats.requests > 0);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(digest_equals_in_process_training_for_any_number_of_daemons)
{
    static const int counts[] = { 1, 2, 3, 5 };
    for (size_t i = 0; i < ARRAY_SIZE(counts); i++)
        train_and_compare(toy_spec("f32", TOY_ADAMW), counts[i], 4);
}

TEST(digest_equals_in_process_training_for_each_optimizer_and_dtype)
{
    train_and_compare(toy_spec("bf16", TOY_ADAMW), 2, 3);
    train_and_compare(toy_spec("f16", TOY_SGD), 3, 3);
    train_and_compare(toy_spec("f32", TOY_LION), 2, 3);
}

/* One of W workers, in its own process: micro-batches w, w + W, ... Exits with 0 when it ends with
 * the wanted digest. */
__attribute__((noreturn)) static void be_worker(uint32_t worker, uint32_t workers, uint32_t steps,
                                                const char *want)
{
    uint32_t micros[TOY_MICROS], count = 0;
    char got[65];
    struct shd_err e = { 0 };
    shd_session *s;
    shd_model *m;
    for (uint32_t i = worker; i < TOY_MICROS; i += workers)
        micros[count++] = i;
    int r = try_connect(daemons.dir, 10000, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e);
    for (uint32_t k = 0; r == SHD_OK && k < steps; k++)
        r = toy_step(m, micros, count, NULL, &e);
    if (r == SHD_OK)
        r = shd_digest(m, got, NULL, &e);
    if (r != SHD_OK)
        fprintf(stderr, "worker %u: %s\n", worker, e.text);
    else
        shd_close(s);
    _exit(r != SHD_OK ? 1 : strcmp(got, want) != 0 ? 2 : 0);
}

TEST(digest_does_not_depend_on_number_of_workers)
{
    const uint32_t steps = 5;
    char want[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), steps, want);
    for (uint32_t workers = 1; workers <= 5; workers++) { /* the fifth has no micro-batch */
        pid_t pids[5];
        fixture_start(&daemons, 2, NULL);
        for (uint32_t w = 0; w < workers; w++) {
            pids[w] = fork();
            EXPECT(pids[w] >= 0);
            if (pids[w] == 0)
                be_worker(w, workers, steps, want);
        }
        for (uint32_t w = 0; w < workers; w++) {
            int status;
            EXPECT_EQ(waitpid(pids[w], &status, 0), pids[w]);
            EXPECT_EQ(status, 0);
        }
        fixture_stop(&daemons);
    }
}

/* -- Mapping ------------------------------------------------------------------------------------
 */

/* Each unit is one array although three daemons own it: initial values are those of one owner. */
TEST(units_are_contiguous_over_owners)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    struct shd_err e = { 0 };
    shd_session *one;
    const struct shd_options options = { .size = sizeof options, .address = "local:" };
    fixture_start(&daemons, 3, NULL); /* it forks: before the first thread */
    EXPECT_OK(shd_connect(&options, &one, &e), &e);
    shd_model *reference = open_toy(one, spec);
    shd_session *s = attach(10000);
    shd_model *m = open_toy(s, spec);
    for (uint32_t t = 0; t < shd_tensors(m); t++) {
        struct shd_tensor tensor;
        const void *a, *b;
        shd_tensor_get(m, t, &tensor);
        EXPECT_OK(shd_acquire(m, tensor.unit, &a, &e), &e);
        EXPECT_OK(shd_acquire(reference, tensor.unit, &b, &e), &e);
        EXPECT(memcmp((const float *)a + tensor.offset_elems,
                      (const float *)b + tensor.offset_elems, tensor.elems * sizeof(float)) == 0);
    }
    shd_close(s);
    shd_close(one);
    fixture_stop(&daemons);
}

TEST(fifty_attaches_leak_nothing_on_either_side)
{
    fixture_start(&daemons, 2, NULL);
    int own_fds = 0, own_maps = 0, fds = 0, maps = 0;
    for (int i = 0; i < 50; i++) {
        struct shd_err e = { 0 };
        shd_session *s = attach(10000);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        if (i % 10 == 0)
            EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        shd_close(s);
        if (i > 0)
            continue;
        sleep_ms(200);
        own_fds = count_fds(getpid());
        own_maps = count_segment_maps(getpid());
        fds = count_fds(daemons.pids[0]);
        maps = count_segment_maps(daemons.pids[0]);
    }
    EXPECT_EQ(count_fds(getpid()), own_fds);
    EXPECT_EQ(count_segment_maps(getpid()), own_maps);
    EXPECT_EQ(own_maps, 0);
    expect_daemon_idle(daemons.pids[0], fds, maps);
    fixture_stop(&daemons);
}

TEST(attach_by_name_reads_and_trains)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_model *m;
    toy_reference(toy_spec("f32", TOY_ADAMW), 2, want);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(10000);
    EXPECT_STATUS(shd_model_attach(s, NULL, &m, &e), SHD_ENOENT);
    EXPECT_STATUS(shd_model_attach(s, "toy", &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "toy");
    shd_model *first = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(first, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    shd_session *other = attach(10000);
    EXPECT_OK(shd_model_attach(other, NULL, &m, &e), &e);
    EXPECT_STR(shd_model_name(m), "toy");
    EXPECT_EQ(shd_step(m), 1);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e); /* slots made on demand */
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(other);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(blob_status_and_skip)
{
    struct shd_err e = { 0 };
    char buf[64], *json;
    size_t bytes;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(10000);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    struct shd_update update = toy_update(0);
    update.blob = "position";
    update.blob_bytes = 8;
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        for (uint32_t u = 0; u < shd_units(m); u++)
            if (u == 1 && micro == 1) {
                float *grad;
                EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
                for (uint32_t i = 0; i < 4099; i++)
                    grad[i] = i == 4000 ? (float)NAN : 0;
                EXPECT_OK(shd_return(m, micro, u, &e), &e);
            } else {
                EXPECT_OK(shd_return_none(m, micro, u, &e), &e);
            }
    struct shd_result result;
    EXPECT_OK(shd_commit(m, &update, &result, &e), &e);
    EXPECT(result.skipped && isinf(result.grad_norm));
    EXPECT_EQ(shd_step(m), 1);
    EXPECT_OK(shd_blob(m, buf, sizeof buf, &bytes, &e), &e);
    EXPECT(bytes == 8 && memcmp(buf, "position", 8) == 0);
    EXPECT_STATUS(shd_blob(m, buf, 4, &bytes, &e), SHD_ERANGE);
    EXPECT_OK(shd_status(s, 1, &json, &e), &e);
    EXPECT_HAS(json, "cpu1");
    free(json);
    EXPECT_STATUS(shd_status(s, 2, &json, &e), SHD_ERANGE);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Going wrong --------------------------------------------------------------------------------
 */

TEST(other_spec_names_the_difference)
{
    static char other[4096];
    struct shd_err e = { 0 };
    shd_model *m = NULL;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(10000);
    open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_session *second = attach(10000);
    strcpy(other, toy_spec("f32", TOY_ADAMW));
    memcpy(strstr(other, "4099"), "4098", 4);
    EXPECT_STATUS(shd_model_open(second, other, &m, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "h0.w");
    EXPECT_HAS(e.text, "4098");
    EXPECT(m == NULL);
    EXPECT_OK(shd_model_open(second, toy_spec("f32", TOY_ADAMW), &m, &e), &e); /* still usable */
    shd_close(second);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(other_order_of_daemons_is_refused)
{
    struct shd_err e = { 0 };
    shd_session *s, *swapped;
    shd_model *m;
    char address[300];
    fixture_start(&daemons, 2, NULL);
    s = attach(10000);
    open_toy(s, toy_spec("f32", TOY_ADAMW));
    snprintf(address, sizeof address, "%s?cpu1,cpu0", daemons.dir);
    EXPECT_OK(try_connect(address, 10000, &swapped, &e), &e);
    EXPECT_STATUS(shd_model_open(swapped, toy_spec("f32", TOY_ADAMW), &m, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "owner");
    shd_close(swapped);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(nobody_at_the_address_is_named)
{
    struct shd_err e;
    shd_session *s = NULL;
    char address[300];
    EXPECT_STATUS(try_connect("/nowhere/shardd", 1000, &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "/nowhere/shardd");
    fixture_start(&daemons, 1, NULL);
    snprintf(address, sizeof address, "%s?cpu0,cpu7", daemons.dir);
    EXPECT_STATUS(try_connect(address, 1000, &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "cpu7");
    EXPECT(s == NULL);
    kill(daemons.pids[0], SIGKILL); /* leaves its sockets behind */
    waitpid(daemons.pids[0], NULL, 0);
    EXPECT_STATUS(try_connect(daemons.dir, 1000, &s, &e), SHD_EGONE);
    EXPECT_HAS(e.text, "cpu0");
    snprintf(address, sizeof address, "rm -rf %s", daemons.dir);
    EXPECT_EQ(system(address), 0);
}

static void remove_dead_fixture(void)
{
    char command[300];
    for (int i = 0; i < daemons.count; i++) {
        kill(daemons.pids[i], SIGKILL);
        waitpid(daemons.pids[i], NULL, 0);
    }
    snprintf(command, sizeof command, "rm -rf %s", daemons.dir);
    EXPECT_EQ(system(command), 0);
}

/* Kill daemon 1 after a while, from a child: this thread will be waiting. */
static void kill_soon(void)
{
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        sleep_ms(150);
        kill(daemons.pids[1], SIGKILL);
        _exit(0);
    }
}

enum waiting { IN_PREPARE, IN_ACQUIRE, IN_GRAD };

static int wait_somewhere(shd_model *m, enum waiting where, struct shd_err *e)
{
    float *grad;
    if (where == IN_PREPARE) { /* nobody returns anything */
        const struct shd_update update = toy_update(0);
        return shd_commit(m, &update, NULL, e);
    }
    if (where == IN_ACQUIRE) {
        m->step++; /* a step that will not come */
        const int r = shd_acquire(m, 1, NULL, e);
        m->step--;
        return r;
    }
    int r = SHD_OK; /* later micro-batches fill the slots: micro-batch 0 is missing */
    for (uint32_t micro = 3; r == SHD_OK && micro > 0; micro--)
        for (uint32_t u = 0; r == SHD_OK && u < 4; u++) {
            r = shd_grad(m, micro, u, &grad, e);
            if (r == SHD_OK)
                r = shd_return(m, micro, u, e);
        }
    return r;
}

TEST(daemon_killed_while_waited_for_is_named_at_once)
{
    for (int where = IN_PREPARE; where <= IN_GRAD; where++) {
        struct shd_err e = { 0 };
        char who[64];
        fixture_start(&daemons, 2, NULL);
        shd_session *s = attach(20000);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        kill_soon();
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        EXPECT_STATUS(wait_somewhere(m, (enum waiting)where, &e), SHD_EGONE);
        clock_gettime(CLOCK_MONOTONIC, &b);
        snprintf(who, sizeof who, "daemon cpu1 (pid %d)", (int)daemons.pids[1]);
        EXPECT_HAS(e.text, who);
        EXPECT_HAS(e.text, "/cpu1.sock is gone");
        EXPECT(b.tv_sec - a.tv_sec < 5);
        EXPECT_STATUS(wait_somewhere(m, IN_PREPARE, &e), SHD_EGONE); /* and stays so */
        shd_close(s);
        while (waitpid(-1, NULL, WNOHANG) > 0)
            continue;
        remove_dead_fixture();
    }
}

TEST(missing_micro_batches_end_in_a_timeout_that_says_so)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(200);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_STATUS(wait_somewhere(m, IN_PREPARE, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "daemon cpu0");
    EXPECT_HAS(e.text, "Prepare of step 0 within 200 ms");
    EXPECT_HAS(e.text, "missing");
    EXPECT_STATUS(wait_somewhere(m, IN_ACQUIRE, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "did not publish unit 1 'h0' of step 1");
    EXPECT_STATUS(wait_somewhere(m, IN_GRAD, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "still holds unit");
    EXPECT_HAS(e.text, "earlier micro-batch");
    shd_close(s);
    /* What was waited for in vain has left no trace: the step can be done. */
    s = attach(5000);
    m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(late_worker_learns_that_its_step_is_over)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(5000), *late = attach(5000);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_model *behind = open_toy(late, toy_spec("f32", TOY_ADAMW));
    float *grad;
    EXPECT_OK(shd_grad(behind, 0, 1, &grad, &e), &e);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    const void *params = NULL;
    EXPECT_OK(shd_acquire(m, 1, &params, &e), &e); /* published */
    EXPECT_STATUS(shd_acquire(behind, 1, &params, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "that step is over");
    EXPECT_OK(shd_return(behind, 0, 1, &e), &e); /* stale: dropped */
    struct shd_result result;
    struct shd_update update = toy_update(0);
    update.lr = 123; /* too late to decide anything */
    EXPECT_OK(shd_commit(behind, &update, &result, &e), &e);
    EXPECT_EQ(result.step, 0);
    EXPECT_EQ(shd_step(behind), 1);
    char a[65], b[65];
    digest_of(behind, a);
    toy_reference(toy_spec("f32", TOY_ADAMW), 1, b);
    EXPECT_STR(a, b);
    shd_close(late);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(refused_return_surfaces_at_the_next_call)
{
    struct shd_err e = { 0 };
    float *grad;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(5000);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    m->step = 5; /* not open yet: the daemon must refuse */
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    EXPECT_OK(shd_return(m, 0, 1, &e), &e);
    m->step = 0;
    int r = SHD_OK;
    for (int i = 0; i < 200 && r == SHD_OK; i++) {
        sleep_ms(10);
        r = shd_grad(m, 0, 1, &grad, &e);
    }
    EXPECT_STATUS(r, SHD_ESTEP);
    EXPECT_HAS(e.text, "daemon cpu0 refused a gradient");
    EXPECT_STATUS(shd_acquire(m, 0, NULL, &e), SHD_ESTEP); /* sticky */
    shd_close(s);
    fixture_stop(&daemons);
}

/* Commit step 0 to owner 0 alone, as a worker does that dies in its commit. */
static void commit_to_first_owner(shd_model *m, const char *blob)
{
    struct shd_err e = { 0 };
    struct decided d;
    EXPECT_OK(map_prepare(m, &e), &e);
    const struct shd_update update = toy_update(0);
    const struct decide_args args = { .prepared = m->map->prepared,
                                      .owners = m->map->owner_count,
                                      .micro_batches = TOY_MICROS,
                                      .lr = update.lr,
                                      .clip_norm = update.clip_norm };
    EXPECT_OK(decide(&args, &d, &e), &e);
    struct round round = { .what = "Commit", .type = WIRE_COMMITTED };
    struct wire_request request = {
        .type = WIRE_COMMIT,
        .commit = { .model = m->map->owners[0].handle,
                    .decision = d.decision,
                    .has_blob = blob != NULL,
                    .blob = { (const uint8_t *)blob, blob != NULL ? strlen(blob) : 0 } },
    };
    struct hub *hub = m->session->hub;
    int r = round_ask(&round, &hub->links[0], &request, 0, &e);
    r = round_finish(&round, hub, r, &e);
    EXPECT_OK(r, &e);
}

static void return_toy_step(shd_model *m)
{
    struct shd_err e = { 0 };
    struct toy toy = { .m = m, .fail_micro = -1 };
    for (uint32_t micro = 0; micro < TOY_MICROS; micro++)
        for (uint32_t u = shd_units(m); u-- > 0;) {
            const void *params;
            float *grad;
            EXPECT_OK(shd_acquire(m, 0, NULL, &e), &e);
            EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
            EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
            EXPECT_EQ(toy_backward(&toy, micro, u, params, grad), 0);
            EXPECT_OK(shd_return(m, micro, u, &e), &e);
            shd_release(m, u);
            shd_release(m, 0);
        }
}

TEST(half_committed_step_is_completed_by_whoever_attaches_next)
{
    static const char *const blobs[] = { "cursor", NULL };
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 2, want);
    for (size_t i = 0; i < ARRAY_SIZE(blobs); i++) {
        struct shd_err e = { 0 };
        char blob[16] = "";
        size_t bytes;
        fixture_start(&daemons, 3, NULL);
        shd_session *s = attach(5000);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        return_toy_step(m);
        commit_to_first_owner(m, blobs[i]);
        shd_close(s);
        s = attach(5000);
        m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        EXPECT_EQ(shd_step(m), 1);
        for (uint32_t owner = 0; owner < 3; owner++) {
            EXPECT_OK(map_owner_blob(m, owner, blob, sizeof blob, &bytes, &e), &e);
            EXPECT_EQ(bytes, blobs[i] != NULL ? strlen(blobs[i]) : 0);
            EXPECT(bytes == 0 || memcmp(blob, blobs[i], bytes) == 0);
        }
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

static int allocations;

static int count_allocations(enum sys_kind kind)
{
    allocations += kind == SYS_ALLOC || kind == SYS_MAP;
    return 0;
}

TEST(steady_state_allocates_and_maps_nothing)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(5000);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    sys_fault = count_allocations;
    for (int i = 0; i < 3; i++)
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    sys_fault = NULL;
    EXPECT_EQ(allocations, 0);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Strange daemons ----------------------------------------------------------------------------
 */

/* A child that serves the side channel once with `msg` and then waits to be killed. */
static pid_t fake_daemon(const char *dir, const struct side_msg *msg)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    snprintf(a.sun_path, sizeof a.sun_path, "%s/cpu0.sock", dir);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    EXPECT(fd >= 0 && bind(fd, (const struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 4) == 0);
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int peer = accept(fd, NULL, NULL);
        send(peer, msg, sizeof *msg, 0);
        pause();
        _exit(0);
    }
    close(fd);
    return pid;
}

static void expect_strange(const struct side_msg *msg, int status, const char *has)
{
    char dir[] = "/tmp/shd-fake-XXXXXX", command[128];
    struct shd_err e;
    shd_session *s = NULL;
    EXPECT(mkdtemp(dir) != NULL);
    const pid_t pid = fake_daemon(dir, msg);
    EXPECT_STATUS(try_connect(dir, 300, &s, &e), status);
    EXPECT_HAS(e.text, "cpu0");
    EXPECT_HAS(e.text, has);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    snprintf(command, sizeof command, "rm -rf %s", dir);
    EXPECT_EQ(system(command), 0);
}

TEST(strange_daemons_are_refused)
{
    const struct side_msg good = { .magic = SIDE_MAGIC,
                                   .protocol = SHD_PROTOCOL,
                                   .type = SIDE_WELCOME };
    struct side_msg msg = good;
    msg.protocol = 9;
    expect_strange(&msg, SHD_EPROTO, "protocol 9, this side 1");
    msg = good;
    msg.magic = 1;
    expect_strange(&msg, SHD_EPROTO, "not shardd's");
    msg = good;
    msg.type = SIDE_CLAIM;
    expect_strange(&msg, SHD_EPROTO, "instead of a welcome");
    msg = good;
    msg.type = SIDE_ERROR;
    msg.status = SHD_EBUSY;
    strcpy(msg.text, "no room today");
    expect_strange(&msg, SHD_EBUSY, "no room today");
    expect_strange(&good, SHD_ETIMEDOUT, "did not answer Hello within 300 ms");
}

TEST_MAIN()
