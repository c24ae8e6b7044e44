/* Every call that can fail, failed once: the n-th allocation, mapping, send and descriptor, for
 * n = 1, 2, ... until the path runs clean, on attaching and on one step; first in the client, then
 * in the daemon. Each time: an error with a text, nothing leaked, and the next attempt succeeds
 * with the values an undisturbed run has.
 *
 * The daemon is the real one, in a forked child on a private directory; its faults are armed
 * through a shared page.
 */
#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

#define N_MAX 2000

static const char spec_json[] =
    "{\"name\":\"tiny\",\"seed\":7,\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\"},"
    "\"units\":[{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[50,50],"
    "\"init\":[\"normal\",0,1]}]},{\"name\":\"b\",\"tensors\":[{\"name\":\"x\",\"shape\":[10]}]}]}";

struct armed {
    _Atomic int kind;      /* enum sys_kind, or -1 */
    _Atomic int countdown; /* the call that makes it 0 fails */
    _Atomic int fired;
};
static struct armed *armed; /* shared with the daemon; [0] client, [1] daemon */
static int who;             /* index of this process */

static int fault(enum sys_kind kind)
{
    struct armed *a = &armed[who];
    if (atomic_load(&a->kind) != (int)kind || atomic_fetch_sub(&a->countdown, 1) != 1)
        return 0;
    atomic_store(&a->fired, 1);
    return kind == SYS_SEND ? EAGAIN : ENOMEM;
}

static void arm(int index, enum sys_kind kind, int n)
{
    atomic_store(&armed[index].fired, 0);
    atomic_store(&armed[index].countdown, n);
    atomic_store(&armed[index].kind, (int)kind);
}

static bool disarm(int index)
{
    atomic_store(&armed[index].kind, -1);
    return atomic_load(&armed[index].fired) != 0;
}

static struct fixture fixture;

static void arm_daemon(int index)
{
    (void)index;
    who = 1;
}

/* Its socket is there a little before it is through with its own start, which is not what fails. */
static void await_welcome(void)
{
    char path[sizeof fixture.dir + 16];
    struct shd_err e = { 0 };
    struct side_msg msg;
    int side, none;
    snprintf(path, sizeof path, "%s/cpu0.sock", fixture.dir);
    EXPECT_OK(side_connect(path, &side, &e), &e);
    EXPECT_OK(side_recv(side, (int)TEST_HANG_MS, &msg, &none, &e), &e);
    EXPECT_EQ(msg.type, SIDE_WELCOME);
    close(side);
}

static void start_daemon(void)
{
    armed = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(armed != MAP_FAILED);
    disarm(0);
    disarm(1);
    sys_fault = fault;
    fixture_start(&fixture, 1, arm_daemon);
    await_welcome();
}

static void stop_daemon(void)
{
    fixture_stop(&fixture);
    munmap(armed, 4096);
    sys_fault = NULL;
}

static int train_one_step(shd_model *m, struct shd_err *e)
{
    for (uint32_t u = shd_units(m); u-- > 0;) {
        const void *params;
        float *grad;
        int r = shd_acquire(m, u, &params, e);
        if (r != SHD_OK)
            return r;
        r = shd_grad(m, 0, u, &grad, e);
        if (r == SHD_OK) {
            struct shd_tensor t = { .size = sizeof t };
            shd_tensor_get(m, u, &t, NULL); /* one tensor a unit */
            for (uint64_t i = 0; i < t.elems; i++)
                grad[t.offset_elems + i] = ((const float *)params)[t.offset_elems + i] + 1;
            r = shd_return(m, 0, u, e);
        }
        shd_release(m, u);
        if (r != SHD_OK)
            return r;
    }
    struct shd_result result = { .size = sizeof result };
    return shd_commit(
        m,
        &(struct shd_update){
            .size = sizeof(struct shd_update), .lr = 0.01, .blob = "state", .blob_bytes = 5 },
        &result, e);
}

enum part { ATTACH, STEP };

static uint64_t last_step; /* of the last digest */

/* Attach, one step, digest. Faults of client (0) or daemon (1) are armed for `part` only. */
static int scenario(int index, enum part part, enum sys_kind kind, int n, char hex[65],
                    struct shd_err *e)
{
    shd_session *s = NULL;
    shd_model *m = NULL;
    if (part == ATTACH && n > 0)
        arm(index, kind, n);
    int r = shd_connect(
        &(struct shd_options){ .size = sizeof(struct shd_options),
                               .address = fixture.dir,
                               .timeout_ms = n > 0 ? test_paced(3000) : TEST_HANG_MS },
        &s, e);
    if (r == SHD_OK)
        r = shd_model_open(s, spec_json, &m, e);
    if (part == STEP && n > 0 && r == SHD_OK)
        arm(index, kind, n);
    if (r == SHD_OK)
        r = train_one_step(m, e);
    if (r == SHD_OK)
        r = shd_digest(m, hex, &last_step, e);
    shd_model_close(m);
    shd_close(s);
    return r;
}

static void fail_each(int index, enum part part, enum sys_kind kind)
{
    char hex[65];
    struct shd_err e = { 0 };
    EXPECT_OK(scenario(0, part, kind, 0, hex, &e), &e);
    sleep_ms(100); /* the daemon has seen it go */
    const int own_fds = count_fds(getpid()), own_maps = count_segment_maps(getpid());
    const int fds = count_fds(fixture.pids[0]), maps = count_segment_maps(fixture.pids[0]);
    int n = 0, failed = 0;
    bool fired = true;
    while (fired && n < N_MAX) {
        n++;
        memset(&e, 0, sizeof e);
        const int r = scenario(index, part, kind, n, hex, &e);
        fired = disarm(index);
        if (r != SHD_OK) {
            failed++;
            EXPECT(fired && e.text[0] != '\0' && e.code == r);
        }
        EXPECT_EQ(count_fds(getpid()), own_fds);
        EXPECT_EQ(count_segment_maps(getpid()), own_maps);
        expect_daemon_idle(fixture.pids[0], fds, maps);
        memset(&e, 0, sizeof e);
        EXPECT_OK(scenario(0, part, kind, 0, hex, &e), &e); /* nothing was lost */
    }
    EXPECT(n < N_MAX);
    printf("  %s %s kind=%d: %d calls, %d failures reported\n", index == 0 ? "client" : "daemon",
           part == ATTACH ? "attach" : "step", (int)kind, n - 1, failed);
}

TEST(nth_failure_of_each_call_is_reported_and_nothing_is_lost)
{
    static const enum sys_kind kinds[] = { SYS_ALLOC, SYS_MAP, SYS_SEND, SYS_OPEN };
    start_daemon();
    for (int index = 0; index < 2; index++)
        for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
            fail_each(index, ATTACH, kinds[k]);
            fail_each(index, STEP, kinds[k]);
        }
    stop_daemon();
}

/* Attach with room for so many more descriptors, as a worker of its own: libzmq has some of them,
 * and it ends a process that it cannot serve. Exit code 0: attached; 3: refused with a text that
 * names what is missing. */
static int attach_with(int more)
{
    struct rlimit limit;
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    shd_model *m = NULL;
    const int low = dup(STDERR_FILENO);
    close(low);
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    const struct rlimit few = { (rlim_t)(low + more), limit.rlim_max };
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    int r = shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options),
                                               .address = fixture.dir,
                                               .timeout_ms = test_paced(3000) },
                        &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, spec_json, &m, &e);
    shd_model_close(m);
    shd_close(s);
    if (r == SHD_OK)
        return 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    const int now = dup(STDERR_FILENO);
    if (strstr(e.text, "Too many open files") != NULL && now == low)
        return 3;
    fprintf(stderr, "%d descriptors more: %s, %d still open: %s\n", more, status_name(r), now - low,
            e.text);
    return 4;
}

TEST(descriptors_that_run_out_while_attaching_are_an_error_that_says_so)
{
    char hex[65];
    struct shd_err e = { 0 };
    int status = -1, more;
    start_daemon();
    EXPECT_OK(scenario(0, ATTACH, SYS_OPEN, 0, hex, &e), &e);
    const int fds = count_fds(fixture.pids[0]), maps = count_segment_maps(fixture.pids[0]);
    for (more = 0; status != 0 && more < 100; more++) {
        fflush(NULL);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            _exit(attach_with(more));
        EXPECT_EQ(waitpid(pid, &status, 0), pid);
        EXPECT(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 3));
    }
    EXPECT_EQ(status, 0);
    printf("  attached with %d descriptors\n", more - 1);
    expect_daemon_idle(fixture.pids[0], fds, maps);
    EXPECT_OK(scenario(0, ATTACH, SYS_OPEN, 0, hex, &e), &e);
    stop_daemon();
}

/* A model that does not exist yet: its creation fails at every call; the same daemon then makes it
 * as if nothing had happened. */
TEST(nth_failure_while_a_model_is_created_is_survived)
{
    static const enum sys_kind kinds[] = { SYS_ALLOC, SYS_MAP, SYS_OPEN };
    char want[65] = "";
    for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
        bool fired = true;
        int n = 0, failed = 0;
        while (fired && n < N_MAX) {
            char hex[65];
            struct shd_err e = { 0 };
            n++;
            start_daemon();
            const int r = scenario(1, ATTACH, kinds[k], n, hex, &e);
            fired = disarm(1);
            if (r != SHD_OK) {
                failed++;
                EXPECT(fired && e.text[0] != '\0');
                EXPECT_OK(scenario(0, ATTACH, kinds[k], 0, hex, &e), &e);
            }
            /* A failure after the commit (in Digest, say) leaves step 2 to the clean run. */
            EXPECT(last_step == 1 || (r != SHD_OK && last_step == 2));
            if (want[0] == '\0')
                memcpy(want, hex, sizeof want);
            if (last_step == 1)
                EXPECT_STR(hex, want);
            stop_daemon();
        }
        EXPECT(n < N_MAX);
        printf("  creation kind=%d: %d calls, %d failures reported\n", (int)kinds[k], n - 1,
               failed);
    }
}

TEST_MAIN()
