/* Workers of one host that sum the micro-batches of a group together (shd_policy.sums): the bits of
 * one worker that computes all of them, however many there are, whoever dies, and in whatever order
 * gradients come in. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/paths/path.h"
#include "client/session/session.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define WORKERS_MAX 4u

static struct shd_policy together(enum shd_strategy strategy, enum shd_path path)
{
    return (struct shd_policy){ .size = sizeof(struct shd_policy),
                                .strategy = strategy,
                                .forward_prefetch = 1,
                                .path = path,
                                .sums = SHD_SUMS_HOST };
}

static struct pt_run run_of(struct shd_policy policy, uint32_t steps)
{
    return (
        struct pt_run){ .policy = policy, .steps = steps, .t = { .overflow_step = UINT64_MAX } };
}

/* -- Workers in processes of their own -----------------------------------------------------------
 */

/* Every `workers`th micro-batch, until the model is at that step. */
__attribute__((noreturn)) static void work(const char *spec, struct pt_run *run, uint32_t rank,
                                           uint32_t workers)
{
    shd_session *s;
    shd_model *m;
    uint32_t micros[TOY_MICROS], count = 0;
    for (uint32_t micro = rank; micro < TOY_MICROS; micro += workers)
        micros[count++] = micro;
    MUST_OK(try_connect(daemons.address, PATIENT_MS, &s, &e));
    MUST_OK(shd_model_open(s, spec, &m, &e));
    MUST_OK(shd_set_policy(m, &run->policy, &e));
    while (shd_step(m) < run->steps) {
        const uint64_t step = shd_step(m);
        struct shd_result result = { .size = sizeof result };
        double want[SHD_METRICS_MAX] = { 0 }, one[SHD_METRICS_MAX];
        MUST_OK(pt_step(m, run, micros, count, &result, &e));
        MUST(result.over || result.step == step);
        const uint32_t groups = TOY_MICROS / shd_accumulate(m), a = shd_accumulate(m);
        uint32_t metrics = 0;
        for (uint32_t g = 0; g < groups; g++) {
            double sum[SHD_METRICS_MAX] = { 0 };
            for (uint32_t i = 0; i < a; i++) {
                metrics = toy_metrics(NULL, g * a + i, one);
                for (uint32_t k = 0; k < metrics; k++)
                    sum[k] = i == 0 ? one[k] : sum[k] + one[k];
            }
            for (uint32_t k = 0; k < metrics; k++)
                want[k] = g == 0 ? sum[k] : want[k] + sum[k];
        }
        for (uint32_t k = 0; k < metrics; k++)
            MUST(result.over || result.metrics[k] == want[k]);
    }
    shd_close(s);
    _exit(0);
}

static pid_t start(const char *spec, struct pt_run *run, uint32_t rank, uint32_t workers)
{
    const pid_t pid = test_fork();
    if (pid == 0)
        work(spec, run, rank, workers);
    return pid;
}

static void expect_digest(const char *spec, const char *want)
{
    char got[65];
    struct shd_err e = { 0 };
    shd_model *m;
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
}

static void train_together(struct pt_model model, struct pt_run run, uint32_t workers)
{
    static uint32_t models;
    char name[32], want[65];
    pid_t pids[WORKERS_MAX];
    snprintf(name, sizeof name, "t%u", models++);
    model.name = name;
    const char *spec = pt_spec(&model);
    struct pt_run alone = run;
    alone.policy.grad_dtype = model.grad_dtype;
    pt_reference(spec, &alone, want);
    for (uint32_t i = 0; i < workers; i++)
        pids[i] = start(spec, &run, i, workers);
    for (uint32_t i = 0; i < workers; i++)
        expect_well(pids[i]);
    expect_digest(spec, want);
}

TEST(the_bits_are_those_of_one_worker)
{
    fixture_start(&daemons, 2, NULL);
    for (uint32_t workers = 1; workers <= WORKERS_MAX; workers *= 2)
        for (uint32_t a = workers < 4 ? 2 : 4; a <= 4; a += 2) {
            train_together((struct pt_model){ .accumulate = a },
                           run_of(together(SHD_ZERO3, SHD_PATH_AUTO), 3), workers);
            train_together((struct pt_model){ .accumulate = a, .grad_dtype = SHD_BF16 },
                           run_of(together(SHD_DDP, SHD_PATH_COPY), 3), workers);
            struct pt_run routed = run_of(together(SHD_ZERO2, SHD_PATH_AUTO), 9);
            routed.routed = true;
            train_together((struct pt_model){ .accumulate = a, .frozen = true }, routed, workers);
        }
    fixture_stop(&daemons);
}

/* Who is killed is started again, with the micro-batches it had; daemons are, too. */
TEST(whoever_dies_the_bits_stay)
{
    const uint64_t seed = test_seed(11);
    uint64_t rng = seed;
    struct pt_run run = run_of(together(SHD_ZERO3, SHD_PATH_AUTO), 40);
    const struct pt_model model = { .name = "killed", .accumulate = 4 };
    const char *spec = pt_spec(&model);
    char want[65];
    pid_t pids[WORKERS_MAX];
    uint32_t kills = 0;
    printf("seed %" PRIu64 "\n", seed);
    pt_reference(spec, &run, want);
    run.t.compute_ms = 1;
    fixture_start_kept(&daemons, 2, "");
    for (uint32_t i = 0; i < WORKERS_MAX; i++)
        pids[i] = start(spec, &run, i, WORKERS_MAX);
    for (uint32_t alive = WORKERS_MAX; alive > 0;) {
        const uint32_t at = (test_random(&rng) % WORKERS_MAX);
        int status;
        nanosleep(&(struct timespec){ .tv_nsec = (long)(test_random(&rng) % 60) * 1000000 }, NULL);
        if (pids[at] > 0)
            kill(pids[at], SIGKILL);
        if ((test_random(&rng) % 8) == 0)
            fixture_restart(&daemons, (int)(test_random(&rng) % 2));
        alive = 0;
        for (uint32_t i = 0; i < WORKERS_MAX; i++) {
            if (pids[i] > 0 && waitpid(pids[i], &status, i == at ? 0 : WNOHANG) == pids[i]) {
                EXPECT(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : status == 0);
                kills += WIFSIGNALED(status);
                pids[i] = WIFSIGNALED(status) ? start(spec, &run, i, WORKERS_MAX) : 0;
            }
            alive += pids[i] > 0;
        }
    }
    printf("%u kills\n", kills);
    EXPECT(kills > 0);
    expect_digest(spec, want);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
static struct {
    const char *point; /* of the process: where it is killed, */
    uint32_t passes;   /* the so-many-th time */
} dies;

static void die(const char *name)
{
    if (strcmp(name, dies.point) == 0 && --dies.passes == 0)
        raise(SIGKILL);
}
#endif

/* What is in memory then is what others, and its successor, go on from. */
TEST(who_is_killed_between_two_stores_leaves_what_can_be_gone_on_from)
{
#ifndef SHD_FAIL_POINTS
    SKIP("there are no fail points in this build");
#else
    static const char *const points[] = { "sums:emptied", "sums:taken",   "sums:freed",
                                          "sums:cleared", "sums:stepped", "sums:reported",
                                          "sums:in",      "sums:done" };
    static const uint32_t passes[] = { 1, 5, 12 };
    fixture_start(&daemons, 2, NULL);
    for (uint32_t i = 0; i < ARRAY_SIZE(points) * ARRAY_SIZE(passes); i++) {
        char name[32], want[65];
        struct pt_run run = run_of(together(SHD_ZERO3, SHD_PATH_AUTO), 4);
        snprintf(name, sizeof name, "k%u", i);
        const struct pt_model model = { .name = name, .accumulate = 2 };
        const char *spec = pt_spec(&model);
        int status;
        pt_reference(spec, &run, want);
        const pid_t other = start(spec, &run, 0, 2);
        pid_t killed = test_fork();
        if (killed == 0) {
            dies.point = points[i / ARRAY_SIZE(passes)];
            dies.passes = passes[i % ARRAY_SIZE(passes)];
            fail_point_hook = die;
            work(spec, &run, 1, 2);
        }
        EXPECT(waitpid(killed, &status, 0) == killed);
        if (WIFSIGNALED(status)) /* else the other one came by there first, each time */
            killed = start(spec, &run, 1, 2);
        else
            EXPECT_EQ(status, 0);
        if (WIFSIGNALED(status))
            expect_well(killed);
        expect_well(other);
        expect_digest(spec, want);
    }
    fixture_stop(&daemons);
#endif
}

/* -- Workers of this process: what happens when
 * ---------------------------------------------------- */

struct worker {
    shd_session *s;
    shd_model *m;
    struct pt t;
};

static struct worker worker_of(const char *spec, uint64_t timeout_ms)
{
    struct worker w = { .s = attach(timeout_ms), .t = { .overflow_step = UINT64_MAX } };
    struct shd_err e = { 0 };
    const struct shd_policy policy = together(SHD_ZERO3, SHD_PATH_AUTO);
    EXPECT_OK(shd_model_open(w.s, spec, &w.m, &e), &e);
    EXPECT_OK(shd_set_policy(w.m, &policy, &e), &e);
    w.t.m = w.m;
    return w;
}

/* One unit's gradient of a micro-batch. */
static int give(struct worker *w, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const void *params;
    float *grad = NULL;
    int r = shd_acquire(w->m, unit, &params, e);
    if (r != SHD_OK)
        return r;
    r = shd_grad(w->m, micro, unit, &grad, e);
    if (r == SHD_OK)
        toy_write(w->m, micro, unit, /* salt= */ 0, params, /* add= */ false, grad);
    if (r == SHD_OK)
        r = shd_return(w->m, micro, unit, e);
    shd_release(w->m, unit);
    return r;
}

/* Until owners have all that it has returned: the others of this thread wait for that. */
static void settle(struct worker *w)
{
    struct shd_err e = { 0 };
    while (model_find_slot(w->m, SLOT_SENT) != NULL) {
        EXPECT_OK(w->s->control->poll(w->m, &e), &e);
        nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
    }
}

static void give_all(struct worker *w, uint32_t micro)
{
    struct shd_err e = { 0 };
    for (uint32_t u = PT_UNITS; u-- > 0;)
        EXPECT_OK(give(w, micro, u, &e), &e);
    settle(w);
}

static const char *spec_of(const char *name, uint32_t a)
{
    const struct pt_model model = { .name = name, .accumulate = a };
    return pt_spec(&model);
}

/* give() of all, by one worker that sums by itself. */
static void expect_as_alone(const char *spec, struct worker *w)
{
    char want[65], got[65];
    struct shd_err e = { 0 };
    shd_session *s;
    struct worker alone = { .t = { .overflow_step = UINT64_MAX } };
    const struct shd_update update = toy_update(0);
    EXPECT_OK(try_connect("local:", PATIENT_MS, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, spec, &alone.m, &e), &e);
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        give_all(&alone, i);
    EXPECT_OK(shd_commit(alone.m, &update, NULL, &e), &e);
    digest_of(alone.m, want);
    shd_close(s);
    EXPECT_OK(shd_commit(w->m, &update, NULL, &e), &e);
    digest_of(w->m, got);
    EXPECT_STR(got, want);
}

TEST(what_does_not_come_is_named)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 1, NULL);
    const char *spec = spec_of("late", 2);
    struct worker a = worker_of(spec, PATIENT_MS);
    EXPECT_OK(give(&a, 0, 1, &e), &e);
    limit_waits(a.s, test_paced(100));
    EXPECT_STATUS(give(&a, 2, 1, &e), SHD_ETIMEDOUT); /* the next group's */
    EXPECT_HAS(e.text, "unit 1 'h0': micro-batch 1 of the group that is summed on this host");
    limit_waits(a.s, PATIENT_MS);
    struct worker b = worker_of(spec, PATIENT_MS);
    EXPECT_OK(give(&b, 1, 1, &e), &e);
    EXPECT_OK(give(&b, 3, 1, &e), &e); /* waits until the owner has what b has just returned */
    EXPECT_OK(give(&a, 2, 1, &e), &e);
    shd_close(a.s);
    shd_close(b.s);
    fixture_stop(&daemons);
}

TEST(who_shares_no_group_with_the_others_is_told)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 1, NULL);
    const char *spec = spec_of("apart", 2);
    struct worker a = worker_of(spec, PATIENT_MS), b = worker_of(spec, PATIENT_MS);
    EXPECT_OK(give(&b, 2, 1, &e), &e);
    EXPECT_STATUS(give(&a, 0, 1, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "micro-batches 2 to 3 are summed on this host already, and 0 to 1 are not");
    shd_close(a.s);
    shd_close(b.s);
    fixture_stop(&daemons);
}

TEST(a_step_begins_again_for_all)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    const char *spec = spec_of("again", 2);
    struct worker a = worker_of(spec, PATIENT_MS), b = worker_of(spec, PATIENT_MS);
    float *spoilt;
    give_all(&a, 0);
    EXPECT_OK(give(&b, 1, 6, &e), &e);
    EXPECT_OK(shd_grad(b.m, 1, 5, &spoilt, &e), &e);
    EXPECT_OK(shd_reset_step(a.m, &e), &e);
    EXPECT_STATUS(shd_return(b.m, 1, 5, &e), SHD_ERESET);
    for (uint32_t i = 0; i < TOY_MICROS; i++)
        give_all(i % 2 == 0 ? &b : &a, i);
    expect_as_alone(spec, &a);
    shd_close(a.s);
    shd_close(b.s);
    fixture_stop(&daemons);
}

/* Its side of the connection never gets there: the owners are stopped. */
__attribute__((noreturn)) static void return_and_die(const char *spec)
{
    struct worker b = worker_of(spec, PATIENT_MS);
    for (uint32_t u = PT_UNITS; u-- > 0;) {
        const void *params;
        float *grad;
        MUST_OK(shd_acquire(b.m, u, &params, &e));
        MUST_OK(shd_grad(b.m, 1, u, &grad, &e));
        toy_write(b.m, 1, u, 0, params, false, grad);
        if (u == 0)
            settle(&b);
        for (int i = 0; u == 0 && i < daemons.count; i++)
            MUST(kill(daemons.pids[i], SIGSTOP) == 0);
        MUST_OK(shd_return(b.m, 1, u, &e));
    }
    raise(SIGKILL);
    _exit(1);
}

/* It has everything, and goes before the owners have the sum: whoever wants the lane returns it. */
TEST(a_sum_whose_worker_died_is_returned_by_who_comes_next)
{
    fixture_start_kept(&daemons, 2, "");
    const char *spec = spec_of("heir", 2);
    struct worker a = worker_of(spec, PATIENT_MS);
    give_all(&a, 0);
    const pid_t pid = test_fork();
    if (pid == 0)
        return_and_die(spec);
    int status;
    EXPECT(waitpid(pid, &status, 0) == pid);
    EXPECT(WIFSIGNALED(status));
    for (int i = 0; i < daemons.count; i++) /* what was on its way dies with them */
        fixture_restart(&daemons, i);
    for (uint32_t i = 2; i < TOY_MICROS; i++)
        give_all(&a, i);
    expect_as_alone(spec, &a);
    shd_close(a.s);
    fixture_stop(&daemons);
}

/* -- The file
 * ---------------------------------------------------------------------------------------- */

static void own_file(char path[300])
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[600];
    path[0] = '\0';
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        const char *at = strstr(line, "/dev/shm/shardd-sums-");
        if (at != NULL)
            snprintf(path, 300, "%.*s", (int)strcspn(at, "\n"), at);
    }
    if (maps != NULL)
        fclose(maps);
    EXPECT(path[0] != '\0');
}

__attribute__((noreturn)) static void join_and_die(int fd)
{
    struct worker b = worker_of(spec_of("theirs", 2), PATIENT_MS);
    char name[300];
    MUST_OK(give(&b, 0, 1, &e));
    own_file(name);
    MUST(write(fd, name, sizeof name) == (ssize_t)sizeof name);
    raise(SIGKILL);
    _exit(1);
}

TEST(nothing_is_left_also_of_who_was_killed)
{
    struct shd_err e = { 0 };
    char path[300], left[300] = "";
    int pipe_fds[2];
    fixture_start(&daemons, 1, NULL);
    struct worker a = worker_of(spec_of("mine", 2), PATIENT_MS);
    EXPECT_OK(give(&a, 0, 1, &e), &e);
    own_file(path);
    struct stat st;
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    shd_close(a.s);
    EXPECT(access(path, F_OK) != 0);

    EXPECT(pipe(pipe_fds) == 0);
    const pid_t pid = test_fork();
    if (pid == 0)
        join_and_die(pipe_fds[1]);
    EXPECT(read(pipe_fds[0], left, sizeof left) == (ssize_t)sizeof left);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    EXPECT(waitpid(pid, NULL, 0) == pid);
    EXPECT(access(left, F_OK) == 0);
    struct worker c = worker_of(spec_of("mine", 2), PATIENT_MS);
    EXPECT_OK(give(&c, 1, 1, &e), &e);
    EXPECT(access(left, F_OK) != 0);
    shd_close(c.s);
    fixture_stop(&daemons);
}

TEST(a_file_that_is_removed_is_missed)
{
    struct shd_err e = { 0 };
    char path[300];
    fixture_start(&daemons, 1, NULL);
    struct worker a = worker_of(spec_of("removed", 2), PATIENT_MS);
    EXPECT_OK(give(&a, 0, 1, &e), &e);
    own_file(path);
    EXPECT(unlink(path) == 0);
    const struct shd_update update = toy_update(0);
    EXPECT_STATUS(shd_commit(a.m, &update, NULL, &e), SHD_EGONE); /* waits for the others */
    EXPECT_STATUS(give(&a, 2, 1, &e), SHD_EGONE);
    EXPECT_HAS(e.text, path);
    EXPECT_HAS(e.text, "RemoveIPC=no");
    shd_close(a.s);
    fixture_stop(&daemons);
}

/* A fork of a worker, as loaders of data are, does not keep it alive. */
TEST(a_forked_child_is_no_worker)
{
    struct shd_err e = { 0 };
    int pipe_fds[2];
    char path[300];
    fixture_start(&daemons, 1, NULL);
    struct worker a = worker_of(spec_of("forked", 2), PATIENT_MS);
    EXPECT_OK(give(&a, 0, 1, &e), &e);
    own_file(path);
    EXPECT(pipe(pipe_fds) == 0);
    const pid_t pid = test_fork();
    if (pid == 0) {
        char end;
        close(pipe_fds[1]);
        MUST(read(pipe_fds[0], &end, 1) == 0);
        _exit(0);
    }
    close(pipe_fds[0]);
    shd_close(a.s);
    EXPECT(access(path, F_OK) != 0);
    close(pipe_fds[1]);
    expect_well(pid);
    fixture_stop(&daemons);
}

static int no_room(enum sys_kind kind)
{
    return kind == SYS_RESERVE ? ENOSPC : 0;
}

TEST(memory_that_is_not_there_is_refused_with_how_much)
{
    struct shd_err e = { 0 };
    char path[300];
    float *grad;
    fixture_start(&daemons, 1, NULL);
    struct worker a = worker_of(spec_of("room", 2), PATIENT_MS);
    sys_fault = no_room;
    EXPECT_STATUS(shd_grad(a.m, 0, 1, &grad, &e), SHD_ENOMEM);
    sys_fault = NULL;
    EXPECT_HAS(e.text, "cannot sum together in /dev/shm, which takes 1 MiB (2 micro-batches");
    EXPECT_OK(shd_grad(a.m, 0, 1, &grad, &e), &e);
    own_file(path);
    shd_close(a.s);
    EXPECT(access(path, F_OK) != 0);
    fixture_stop(&daemons);
}

TEST(what_cannot_be_is_refused_by_name)
{
    struct shd_err e = { 0 };
    char path[300];
    enum shd_lease_what what;
    uint32_t micro;
    float *grad;
    shd_model *m;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_open(s, spec_of("single", 1), &m, &e), &e);
    struct shd_policy policy = together(SHD_ZERO3, SHD_PATH_AUTO);
    EXPECT_STATUS(shd_set_policy(m, &policy, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "accumulate 1");
    policy.sums = (enum shd_sums)2;
    EXPECT_STATUS(shd_set_policy(m, &policy, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "sums is 2: 0 own, 1 host");
    shd_model_close(m);

    struct worker a = worker_of(spec_of("sums", 2), PATIENT_MS);
    EXPECT_STATUS(shd_lease(a.m, &what, &micro, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "fixed shares");
    EXPECT_OK(shd_grad(a.m, 0, 1, &grad, &e), &e);
    EXPECT_STATUS(shd_grad(a.m, 1, 1, &grad, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "unit 1 'h0': the gradient of micro-batch 0 is handed out");
    const struct shd_update update = toy_update(0);
    EXPECT_STATUS(shd_commit(a.m, &update, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "unit 1 'h0', micro-batch 0, was handed out and not returned");
    own_file(path);
    shd_close(a.s);

    const int fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    EXPECT(fd >= 0 && fchmod(fd, 0644) == 0);
    struct worker b = worker_of(spec_of("sums", 2), PATIENT_MS);
    EXPECT_STATUS(shd_grad(b.m, 0, 1, &grad, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "mode 644");
    EXPECT(fchmod(fd, 0600) == 0 && write(fd, "garbage", 7) == 7);
    EXPECT_OK(shd_grad(b.m, 0, 1, &grad, &e), &e); /* nobody is there: it begins anew */
    close(fd);
    shd_close(b.s);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
