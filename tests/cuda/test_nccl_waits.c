/* Several workers by NCCL, one of which is stopped or killed in the middle of a transfer: nobody
 * else waits for it beyond its deadline, who waits for whom is in /status, and the result is that
 * of a run in one process. Stand-ins for the driver and NCCL: nothing here ran on hardware. */
#include <fcntl.h>
#include <jansson.h>
#include <sys/stat.h>

#include "tests/cuda/gpu_worker.h"
#include "tests/lib/fixture.h"

static const struct owners two_far = { { "gpu1", "gpu2" }, true, false };
static const uint32_t halves[2][2] = { { 0, 1 }, { 2, 3 } };

static struct worker a_worker(const char *model)
{
    return (struct worker){ .device = "cuda:0",
                            .model = { .name = model },
                            .policy = policy_of(SHD_ZERO3, SHD_PATH_NCCL, 0),
                            .steps = 4 };
}

static void reference(const struct worker *w, char want[65])
{
    struct pt_run like = { .policy = w->policy,
                           .steps = w->steps,
                           .t = { .overflow_step = UINT64_MAX } };
    pt_reference(pt_spec(&w->model), &like, want);
}

static void expect_done(const struct worker *w, pid_t pid, const char *want)
{
    await_worker(pid);
    if (w->report->status != SHD_OK)
        FAIL("%s", w->report->text);
    EXPECT_STR(w->report->hex, want);
    EXPECT_EQ(w->report->path, w->policy.path);
}

/* -- /status ------------------------------------------------------------------------------------
 */

static json_t *status_of(int index)
{
    struct http_reply r = http_get(&daemons, index, "/status");
    json_t *root = json_loads(r.body, 0, NULL);
    free(r.text);
    EXPECT_EQ(r.code, 200);
    EXPECT(root != NULL);
    return root;
}

static const char *text_of(const json_t *j, const char *key)
{
    const char *text = json_string_value(json_object_get(j, key));
    return text != NULL ? text : "";
}

static bool is_pid(const json_t *person, pid_t pid)
{
    return json_integer_value(json_object_get(person, "pid")) == pid;
}

/* A wait of this kind for `on`, which is in that state and whose sentence has `has`; the sentence.
 * A worker can be stopped while one owner gives and another takes: `has` tells the two apart. */
static bool find_wait(int index, const char *kind, pid_t on, const char *state, const char *has,
                      char text[512])
{
    json_t *root = status_of(index), *wait, *person;
    size_t i, k;
    bool found = false;
    json_array_foreach(json_object_get(root, "waits"), i, wait)
    {
        json_array_foreach(json_object_get(wait, "on"), k, person)
        {
            if (strcmp(text_of(wait, "kind"), kind) != 0 || !is_pid(person, on) ||
                strcmp(text_of(person, "state"), state) != 0 ||
                strstr(text_of(wait, "text"), has) == NULL)
                continue;
            snprintf(text, 512, "%s", text_of(wait, "text"));
            found = true;
        }
    }
    json_decref(root);
    return found;
}

static int await_wait(const char *kind, pid_t on, const char *state, const char *has,
                      char text[512])
{
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (test_now_ms() < end_ms) {
        for (int i = 0; i < daemons.count; i++)
            if (find_wait(i, kind, on, state, has, text))
                return i;
        sleep_ms(20);
    }
    FAIL("nobody says that it waits (%s, '%s') for pid %d, %s", kind, has, (int)on, state);
    return -1;
}

/* The session of that process: its path, and what it says it does. False: there is none. */
static bool find_session(int index, pid_t pid, char path[16], char what[32])
{
    json_t *root = status_of(index), *session;
    size_t i;
    bool found = false;
    json_array_foreach(json_object_get(root, "sessions"), i, session)
    {
        if (!is_pid(session, pid))
            continue;
        snprintf(path, 16, "%s", text_of(session, "path"));
        snprintf(what, 32, "%s", text_of(json_object_get(session, "now"), "what"));
        found = true;
    }
    json_decref(root);
    return found;
}

static void await_no_session(int index, pid_t pid)
{
    char path[16], what[32];
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (find_session(index, pid, path, what)) {
        EXPECT(test_now_ms() < end_ms);
        sleep_ms(20);
    }
}

/* -- Stopped in the middle ----------------------------------------------------------------------
 */

static pid_t start_to_stop(struct worker *w, const char *where)
{
    setenv("SHIM_NCCL_FAIL", where, 1);
    const pid_t pid = start_worker(w);
    unsetenv("SHIM_NCCL_FAIL");
    return pid;
}

static void await_stopped(pid_t pid)
{
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, WUNTRACED), pid);
    EXPECT(WIFSTOPPED(status));
}

/* The owner says so, until its deadline. */
static void expect_given_up(pid_t pid, const char *to)
{
    char text[512], who[64];
    snprintf(who, sizeof who, "test (pid %d, stopped) to %s unit '", (int)pid, to);
    const int owner = await_wait("transfer", pid, "stopped", who, text);
    snprintf(who, sizeof who, " by NCCL; given up after %" PRIu64 " s", test_paced(2000) / 1000);
    EXPECT_HAS(text, who);
    await_no_session(owner, pid);
    EXPECT(!find_wait(owner, "transfer", pid, "stopped", "", text));
}

/* Elastic: the other one does all of it meanwhile; then this one finds the run at its end. */
static void stopped_elastic(const char *where, const char *to)
{
    char want[65];
    struct worker stopped = a_worker("stop"), other = a_worker("stop");
    stopped.elastic = other.elastic = true;
    stopped.timeout_ms = test_paced(2000);
    reference(&other, want);
    fixture_start(&daemons, use_owners(&two_far), NULL);
    const pid_t pid = start_to_stop(&stopped, where);
    await_stopped(pid);
    const pid_t goes_on = start_worker(&other);
    expect_given_up(pid, to);
    expect_done(&other, goes_on, want);
    kill(pid, SIGCONT);
    expect_done(&stopped, pid, want);
    fixture_stop(&daemons);
}

TEST(a_worker_stopped_in_a_fetch_keeps_nobody_and_comes_back)
{
    stopped_elastic("recv@3:stop", "take");
}

TEST(a_worker_stopped_in_a_return_keeps_nobody_and_comes_back)
{
    stopped_elastic("send@2:stop", "send");
}

/* What daemons log between these goes to a file. */
static int log_to(const char *path)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600), before = dup(2);
    CHECK(fd >= 0 && before >= 0 && dup2(fd, 2) == 2);
    setenv("TEST_VERBOSE", "1", 1);
    close(fd);
    return before;
}

static void log_back(int before)
{
    CHECK(dup2(before, 2) == 2);
    unsetenv("TEST_VERBOSE");
    close(before);
}

static void expect_logged(const char *path, pid_t pid)
{
    char line[1024], who[32];
    bool found = false;
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    snprintf(who, sizeof who, "pid=%d ", (int)pid);
    while (fgets(line, sizeof line, file) != NULL)
        found = found || (strstr(line, "op=link ") != NULL && strstr(line, who) != NULL &&
                          strstr(line, "status=SHD_ETIMEDOUT") != NULL &&
                          strstr(line, "do=\"see whether that process is stopped") != NULL);
    fclose(file);
    unlink(path);
    EXPECT(found);
}

/* Static: what it has to bring is waited for, and the wait names it, also when it has no session
 * any more. */
TEST(who_waits_for_a_stopped_worker_says_so_and_both_end_well)
{
    char want[65], text[512], path[16], what[32], log[64];
    struct worker w[2] = { a_worker("half"), a_worker("half") };
    for (int i = 0; i < 2; i++) {
        w[i].micros = halves[i];
        w[i].micro_count = 2;
    }
    w[0].timeout_ms = test_paced(2000);
    reference(&w[0], want);
    snprintf(log, sizeof log, "%s/log", getenv("TMPDIR"));
    const int before = log_to(log);
    fixture_start(&daemons, use_owners(&two_far), NULL);
    log_back(before);
    const pid_t goes_on = start_worker(&w[1]);
    const pid_t pid = start_to_stop(&w[0], "recv@30:stop");
    await_stopped(pid);
    EXPECT(find_session(0, pid, path, what));
    EXPECT_STR(path, "nccl");
    EXPECT_STR(what, "wait unit");
    expect_given_up(pid, "take");
    await_wait("gradients", pid, "stopped", "", text);
    kill(pid, SIGCONT);
    expect_done(&w[0], pid, want);
    expect_done(&w[1], goes_on, want);
    fixture_stop(&daemons);
    expect_logged(log, pid);
}

TEST(a_worker_killed_in_the_middle_leaves_its_work_to_the_others)
{
    static const char *const where[] = { "recv@9:stop", "send@5:stop" };
    for (size_t i = 0; i < ARRAY_SIZE(where); i++) {
        char want[65];
        int status = 0;
        struct worker killed = a_worker("kill"), others[2] = { a_worker("kill"), a_worker("kill") };
        killed.elastic = others[0].elastic = others[1].elastic = true;
        reference(&killed, want);
        fixture_start(&daemons, use_owners(&two_far), NULL);
        const pid_t pid = start_to_stop(&killed, where[i]);
        await_stopped(pid);
        const pid_t one = start_worker(&others[0]), two = start_worker(&others[1]);
        kill(pid, SIGKILL);
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        expect_done(&others[0], one, want);
        expect_done(&others[1], two, want);
        fixture_stop(&daemons);
    }
}

/* -- What a worker on a GPU shows ---------------------------------------------------------------
 */

static void expect_shown(const struct owners *o, enum shd_path as, const char *name)
{
    static const char *const spans[] = { "\"forward", "\"backward", "\"wait unit",
                                         "\"return",  "\"prepare",  "\"commit" };
    char path[16] = "", what[32] = "";
    int status = 0;
    struct worker w = a_worker("shows");
    w.policy.path = as;
    w.policy.strategy = SHD_ZERO2;
    w.steps = 2;
    w.stops = true;
    fixture_start(&daemons, use_owners(o), NULL);
    const pid_t pid = start_worker(&w);
    for (uint32_t stops = 0; stops < TOY_MICROS; stops++) {
        while (atomic_load(&w.report->stop) == 0)
            sleep_ms(1);
        atomic_store(&w.report->stop, 0);
    }
    while (atomic_load(&w.report->stop) == 0) /* in the second step */
        sleep_ms(1);
    EXPECT(find_session(0, pid, path, what));
    EXPECT_STR(path, name);
    EXPECT_STR(what, "backward");
    struct http_reply r = http_get(&daemons, 0, "/trace?seconds=60");
    const char *missing = NULL;
    for (size_t i = 0; i < ARRAY_SIZE(spans); i++)
        if (strstr(r.body, spans[i]) == NULL)
            missing = spans[i];
    free(r.text);
    if (missing != NULL)
        FAIL("path %s: no %s\" in the trace", name, missing);
    kill(pid, SIGKILL);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    fixture_stop(&daemons);
}

TEST(what_it_does_is_shown_on_every_path)
{
    static const struct owners same = { { "gpu0" }, true, true };
    expect_shown(&same, SHD_PATH_MAP, "map");
    expect_shown(&same, SHD_PATH_COPY, "copy");
    expect_shown(&two_far, SHD_PATH_NCCL, "nccl");
}

/* -- Drained ------------------------------------------------------------------------------------
 */

static int shardctl(const char *format, const char *a, const char *b)
{
    char program[512], command[1024], arguments[400];
    const ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    CHECK(n > 0);
    program[n] = '\0';
    *strrchr(program, '/') = '\0';
    snprintf(arguments, sizeof arguments, format, a, b);
    snprintf(command, sizeof command, "%.400s/../bin/shardctl %s >%s/out 2>&1", program, arguments,
             getenv("TMPDIR"));
    return system(command);
}

/* Between two steps; what was saved then is trained to its end elsewhere. */
TEST(owners_are_drained_under_workers_by_nccl)
{
    char want[65], saved[64];
    struct worker w[2] = { a_worker("drain"), a_worker("drain") };
    pid_t pids[2];
    snprintf(saved, sizeof saved, "%s/saved", getenv("TMPDIR"));
    CHECK(mkdir(saved, 0700) == 0);
    fixture_start(&daemons, use_owners(&two_far), NULL);
    for (int i = 0; i < 2; i++) {
        w[i].micros = halves[i];
        w[i].micro_count = 2;
        w[i].steps = 1000000;
        pids[i] = start_worker(&w[i]);
    }
    json_t *root;
    json_int_t step = 0;
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (step < 2 && test_now_ms() < end_ms) {
        sleep_ms(20);
        root = status_of(0);
        const json_t *model = json_array_get(json_object_get(root, "models"), 0);
        step = json_integer_value(json_object_get(model, "step"));
        json_decref(root);
    }
    EXPECT(step >= 2);
    EXPECT_EQ(shardctl("drain --runtime-dir %s --checkpoint %s", daemons.dir, saved), 0);
    for (int i = 0; i < 2; i++) {
        await_worker(pids[i]);
        EXPECT(w[i].report->status != SHD_OK);
        EXPECT_HAS(w[i].report->text, "draining");
    }
    fixture_stop(&daemons); /* they have ended in good order */
    fixture_start(&daemons, use_owners(&two_far), NULL);
    EXPECT_EQ(shardctl("restore %s --runtime-dir %s", saved, daemons.dir), 0);
    root = status_of(0);
    const json_t *model = json_array_get(json_object_get(root, "models"), 0);
    step = json_integer_value(json_object_get(model, "step"));
    json_decref(root);
    EXPECT(step >= 2);
    w[0].steps = w[1].steps = (uint32_t)step + 2;
    reference(&w[0], want);
    for (int i = 0; i < 2; i++)
        pids[i] = start_worker(&w[i]);
    for (int i = 0; i < 2; i++)
        expect_done(&w[i], pids[i], want);
    fixture_stop(&daemons);
}

int main(int argc, char **argv)
{
    return nccl_main(argc, argv);
}
