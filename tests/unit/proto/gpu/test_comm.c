/* The communicator thread (proto/gpu/comm.h) on the shims of NCCL and of the driver: two ranks in
 * two processes. Nothing here ran on hardware, nor by NCCL. */
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/gpu/comm.h"
#include "proto/gpu/cuda.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/lib/child.h"
#include "tests/lib/test.h"

#define MS        UINT64_C(1000000)
#define LINKS     2u
#define TURNS     12u
#define BYTES_MAX 70000u
#define LONG_NS   (TEST_HANG_MS * MS)
#define AT_A_TIME 6 /* of those that wait for deadlines */

/* What both ranks see. */
struct world {
    struct nccl_id ids[LINKS];
    _Atomic uint32_t have_ids, stage;
    union {
        struct board board;
        uint8_t bytes[4096];
    };
};

static struct world *world;

struct turn {
    struct comm_job job; /* first */
    _Atomic bool done;
};

struct rank {
    uint32_t rank;
    const struct cuda *cuda;
    CUcontext context;
    CUstream stream;
    struct comm *comm;
    struct turn opened[LINKS];
    struct comm_link *links[LINKS];
    uint8_t *device[LINKS]; /* [BYTES_MAX] of the GPU's memory */
    struct turn turns[LINKS][TURNS];
};

static void turn_done(struct comm_job *job)
{
    struct turn *t = (struct turn *)(void *)job;
    CHECK(!t->done); /* once */
    t->done = true;
}

static int await(const struct turn *t)
{
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (!t->done && test_now_ms() < end_ms)
        sleep_ms(1);
    MUST(t->done);
    return t->job.status;
}

static void await_stage(uint32_t stage)
{
    while (world->stage < stage)
        sleep_ms(1);
}

static void rank_open(struct rank *k, uint32_t rank)
{
    CUdeviceptr at;
    memset(k, 0, sizeof *k);
    k->rank = rank;
    MUST_OK(cuda_load(&k->cuda, &e));
    MUST(k->cuda->cuDevicePrimaryCtxRetain(&k->context, (int)rank) == CUDA_SUCCESS);
    MUST(k->cuda->cuCtxSetCurrent(k->context) == CUDA_SUCCESS);
    MUST(k->cuda->cuStreamCreate(&k->stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    for (uint32_t i = 0; i < LINKS; i++) {
        MUST(k->cuda->cuMemAlloc(&at, BYTES_MAX) == CUDA_SUCCESS);
        k->device[i] = (uint8_t *)(uintptr_t)at;
    }
    MUST_OK(comm_new(rank, &k->comm, &e));
}

/* Ids are rank 0's. */
static int rank_connect(struct rank *k, uint64_t timeout_ns, struct shd_err *why)
{
    int r = SHD_OK;
    if (k->rank == 0)
        r = comm_make_ids(k->comm, world->ids, LINKS, why);
    if (k->rank == 0)
        world->have_ids = 1;
    while (!world->have_ids)
        sleep_ms(1);
    for (uint32_t i = 0; r == SHD_OK && i < LINKS; i++) {
        k->opened[i] = (struct turn){ .job = { .done = turn_done, .timeout_ns = timeout_ns } };
        MUST_OK(
            comm_link_new(k->comm, &world->ids[i], k->rank, &k->opened[i].job, &k->links[i], &e));
    }
    for (uint32_t i = 0; i < LINKS; i++)
        if (k->links[i] != NULL && await(&k->opened[i]) != SHD_OK && r == SHD_OK) {
            r = k->opened[i].job.status;
            *why = k->opened[i].job.why;
        }
    return r;
}

static void rank_close(struct rank *k)
{
    for (uint32_t i = 0; i < LINKS; i++)
        comm_link_end(k->links[i]);
    comm_free(k->comm);
    for (uint32_t i = 0; i < LINKS; i++)
        MUST(k->cuda->cuMemFree((CUdeviceptr)(uintptr_t)k->device[i]) == CUDA_SUCCESS);
    k->cuda->cuStreamDestroy(k->stream);
    k->cuda->cuDevicePrimaryCtxRelease((int)k->rank);
}

static void copy(const struct rank *k, void *to, const void *from, uint64_t bytes)
{
    MUST(k->cuda->cuMemcpyAsync((uintptr_t)to, (uintptr_t)from, bytes, k->stream) == CUDA_SUCCESS);
    MUST(k->cuda->cuStreamSynchronize(k->stream) == CUDA_SUCCESS);
}

static void queue(struct rank *k, uint32_t link, uint32_t turn, enum comm_way way, uint64_t bytes,
                  uint64_t timeout_ns)
{
    struct turn *t = &k->turns[link][turn - 1];
    *t = (struct turn){ .job = { .done = turn_done,
                                 .way = way,
                                 .memory = k->device[link],
                                 .bytes = bytes,
                                 .turn = turn,
                                 .timeout_ns = timeout_ns } };
    comm_queue(k->links[link], &t->job);
}

/* -- Two processes ------------------------------------------------------------------------------
 */

static void nothing_left(void)
{
    shim_cuda_live_fn *live;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    MUST(library != NULL);
    *(void **)&live = dlsym(library, "shim_cuda_live");
    MUST(live != NULL && live(NULL) == 0);
}

static pid_t start(void (*run)(uint32_t rank), uint32_t rank)
{
    const pid_t pid = test_fork();
    if (pid > 0)
        return pid;
    alarm((unsigned)(2 * TEST_HANG_MS / 1000));
    run(rank);
    _exit(0);
}

static void share(void)
{
    if (world == NULL)
        world = mmap(NULL, sizeof *world, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                     0);
    CHECK(world != MAP_FAILED);
    memset(world, 0, sizeof *world);
    board_init(&world->board, 4);
}

static void both(void (*run)(uint32_t rank))
{
    share();
    const pid_t pids[] = { start(run, 0), start(run, 1) };
    for (int i = 0; i < 2; i++) {
        expect_well(pids[i]);
    }
}

/* -- Turns --------------------------------------------------------------------------------------
 */

static uint64_t bytes_of(uint32_t turn)
{
    return 1 + (uint64_t)turn * turn * 441 % BYTES_MAX;
}

/* One place per turn, and what it is to hold. */
static void fill(uint8_t *bytes, uint32_t link, uint32_t turn)
{
    for (uint64_t i = 0; i < bytes_of(turn); i++)
        bytes[i] = (uint8_t)(i * 7 + turn * 31 + link * 101);
}

static void run_turns(uint32_t rank)
{
    static struct rank k;
    static uint8_t want[BYTES_MAX], got[BYTES_MAX];
    struct shd_err why = { 0 };
    CUdeviceptr at[LINKS][TURNS];
    rank_open(&k, rank);
    MUST(rank_connect(&k, LONG_NS, &why) == SHD_OK);
    for (uint32_t n = 0; n < TURNS * LINKS; n++) {
        const uint32_t link = n % LINKS, at_turn = n / LINKS;
        const uint32_t turn = 1 + (rank == 0 ? at_turn * 5 % TURNS : at_turn * 7 % TURNS);
        const bool send = link == rank;
        MUST(k.cuda->cuMemAlloc(&at[link][turn - 1], BYTES_MAX) == CUDA_SUCCESS);
        fill(want, link, turn);
        if (send)
            copy(&k, (void *)(uintptr_t)at[link][turn - 1], want, bytes_of(turn));
        struct turn *t = &k.turns[link][turn - 1];
        *t = (struct turn){ .job = { .done = turn_done,
                                     .way = send ? COMM_SEND : COMM_RECV,
                                     .memory = (void *)(uintptr_t)at[link][turn - 1],
                                     .bytes = bytes_of(turn),
                                     .turn = turn,
                                     .timeout_ns = LONG_NS } };
        comm_queue(k.links[link], &t->job);
        if (n % 5 == 0)
            sleep_ms(3);
    }
    for (uint32_t link = 0; link < LINKS; link++)
        for (uint32_t turn = 1; turn <= TURNS; turn++) {
            MUST(await(&k.turns[link][turn - 1]) == SHD_OK);
            fill(want, link, turn);
            copy(&k, got, (const void *)(uintptr_t)at[link][turn - 1], bytes_of(turn));
            MUST(memcmp(want, got, bytes_of(turn)) == 0);
            MUST(k.cuda->cuMemFree(at[link][turn - 1]) == CUDA_SUCCESS);
        }
    world->stage++;
    await_stage(2);
    rank_close(&k);
    nothing_left();
}

TEST(turns_meet_in_whichever_order_they_are_queued)
{
    both(run_turns);
}

static void run_gate(uint32_t rank)
{
    static struct rank k;
    struct shd_err why = { 0 };
    rank_open(&k, rank);
    MUST(rank_connect(&k, LONG_NS, &why) == SHD_OK);
    for (uint32_t turn = 1; turn <= 2; turn++) {
        struct turn *t = &k.turns[0][turn - 1];
        *t = (struct turn){ .job = { .done = turn_done,
                                     .way = rank == 0 ? COMM_RECV : COMM_SEND,
                                     .memory = k.device[0],
                                     .bytes = 100,
                                     .turn = turn,
                                     .gate = { &world->board, 3, turn == 1 ? 5 : 6 } } };
        comm_queue(k.links[0], &t->job);
    }
    queue(&k, 1, 1, rank == 0 ? COMM_RECV : COMM_SEND, 10, LONG_NS);
    MUST(await(&k.turns[1][0]) == SHD_OK); /* another link does not wait */
    if (rank == 0) {
        board_publish(&world->board, 3, 4);
        sleep_ms(50);
        MUST(!k.turns[0][0].done);
        board_publish(&world->board, 3, 5);
    }
    MUST(await(&k.turns[0][0]) == SHD_OK);
    MUST(k.turns[0][0].job.version == 5);
    sleep_ms(20);
    MUST(!k.turns[0][1].done);
    world->stage++;
    await_stage(2);
    if (rank == 0)
        board_publish(&world->board, 3, 8); /* late: both see it, neither hangs */
    MUST(await(&k.turns[0][1]) == SHD_OK);
    MUST(k.turns[0][1].job.version == 8);
    world->stage++;
    await_stage(4);
    rank_close(&k);
    nothing_left();
}

TEST(a_turn_waits_for_its_board_and_holds_up_no_other_link)
{
    both(run_gate);
}

/* -- Failures -----------------------------------------------------------------------------------
 */

static void run_alone(uint32_t rank)
{
    static struct rank k;
    struct shd_err why = { 0 };
    if (rank == 1)
        return;
    rank_open(&k, rank);
    const uint64_t start_ms = test_now_ms();
    MUST(rank_connect(&k, 200 * MS, &why) == SHD_ETIMEDOUT);
    MUST(test_now_ms() - start_ms >= 200);
    MUST(strstr(why.text, "200 ms") != NULL);
    queue(&k, 0, 1, COMM_SEND, 5, LONG_NS);
    MUST(await(&k.turns[0][0]) == SHD_ETIMEDOUT); /* for the same reason */
    rank_close(&k);
    nothing_left();
}

TEST(a_peer_that_never_comes_is_a_timeout)
{
    both(run_alone);
}

static void run_mismatch(uint32_t rank)
{
    static struct rank k;
    struct shd_err why = { 0 };
    rank_open(&k, rank);
    MUST(rank_connect(&k, LONG_NS, &why) == SHD_OK);
    queue(&k, 0, 1, COMM_SEND, 64, 300 * MS); /* both */
    const int status = await(&k.turns[0][0]);
    MUST(status == SHD_ETIMEDOUT || status == SHD_EGONE);
    queue(&k, 0, 2, COMM_SEND, 64, 300 * MS);
    MUST(await(&k.turns[0][1]) == status);
    queue(&k, 1, 1, rank == 0 ? COMM_SEND : COMM_RECV, 64, LONG_NS);
    MUST(await(&k.turns[1][0]) == SHD_OK); /* the other one lives */
    world->stage++;
    await_stage(2);
    rank_close(&k);
    nothing_left();
}

TEST(a_mismatch_ends_by_its_deadline_and_breaks_one_link)
{
    both(run_mismatch);
}

/* The owner's part of a worker's death, and the worker's part of an owner's. */
static void run_death(uint32_t rank)
{
    static struct rank k;
    struct shd_err why = { 0 };
    rank_open(&k, rank);
    MUST(rank_connect(&k, LONG_NS, &why) == SHD_OK);
    world->stage++;
    await_stage(2);
    if (rank == 1)
        raise(SIGKILL);
    queue(&k, 0, 1, COMM_SEND, 60000, /* timeout_ns= */ 0);
    queue(&k, 0, 2, COMM_SEND, 60000, /* timeout_ns= */ 0);
    MUST(await(&k.turns[0][0]) == SHD_EGONE && k.turns[0][0].job.remote);
    MUST(await(&k.turns[0][1]) == SHD_EGONE && k.turns[0][1].job.remote);
    k.turns[1][0] = (struct turn){ .job = { .done = turn_done,
                                            .way = COMM_RECV,
                                            .memory = k.device[1],
                                            .bytes = 100,
                                            .turn = 2 } }; /* turn 1 never comes */
    comm_queue(k.links[1], &k.turns[1][0].job);
    sleep_ms(20);
    MUST(!k.turns[1][0].done);
    comm_link_end(k.links[1]);
    MUST(await(&k.turns[1][0]) == SHD_EGONE && !k.turns[1][0].job.remote);
    k.links[1] = NULL;
    rank_close(&k);
    nothing_left();
}

TEST(a_peer_that_dies_ends_what_waits_for_it)
{
    share();
    const pid_t pids[] = { start(run_death, 0), start(run_death, 1) };
    int status = 0;
    EXPECT_EQ(waitpid(pids[1], &status, 0), pids[1]);
    EXPECT(WIFSIGNALED(status));
    expect_well(pids[0]);
}

/* -- Whatever fails -----------------------------------------------------------------------------
 */

static const char *fail_spec;
static bool fail_nccl;

static void fail_now(void)
{
    void *library = dlopen(fail_nccl ? "libnccl.so.2" : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void (*set)(const char *);
    MUST(library != NULL);
    *(void **)&set = dlsym(library, fail_nccl ? "shim_nccl_fail" : "shim_cuda_fail");
    MUST(set != NULL);
    set(fail_spec);
}

/* Rank 0 fails somewhere; the other one has deadlines alone. Both end, and leave nothing. */
static void run_failing(uint32_t rank)
{
    static struct rank k;
    struct shd_err why = { 0 };
    const uint64_t patience_ns = test_paced(400) * MS;
    rank_open(&k, rank);
    if (rank == 0)
        fail_now();
    const int r = rank_connect(&k, patience_ns, &why);
    int failed = r != SHD_OK;
    for (uint32_t turn = 1; r == SHD_OK && turn <= 3; turn++)
        queue(&k, 0, turn, (turn + rank) % 2 != 0 ? COMM_SEND : COMM_RECV, 5000, patience_ns);
    for (uint32_t turn = 1; r == SHD_OK && turn <= 3; turn++) {
        const struct turn *t = &k.turns[0][turn - 1];
        if (await(t) == SHD_OK)
            continue;
        failed++;
        MUST(t->job.why.text[0] != '\0');
    }
    if (rank == 0) {
        world->stage = failed > 0 ? 2 : 1;
        MUST(r == SHD_OK || why.text[0] != '\0');
    }
    fail_spec = NULL;
    if (rank == 0)
        fail_now();
    rank_close(&k);
    nothing_left();
}

static const struct {
    const char *name;
    bool nccl;
    int calls; /* fails up to that one */
} failing[] = {
    { "ncclGetVersion", true, 1 },
    { "ncclGetUniqueId", true, 2 },
    { "ncclCommInitRankConfig", true, 2 },
    { "ncclCommGetAsyncError", true, 6 },
    { "ncclGroupStart", true, 3 },
    { "ncclGroupEnd", true, 3 },
    { "ncclSend", true, 2 },
    { "ncclRecv", true, 1 },
    { "work", true, 3 },
    { "cuStreamCreate", false, 2 },
    { "cuEventCreate", false, 2 },
    { "cuEventRecord", false, 3 },
    { "cuDevicePrimaryCtxRetain", false, 1 },
};

/* In a process and a world of its own, for each but waits for its deadlines. */
static void start_failing(const char *name, bool nccl, int call)
{
    if (test_fork() > 0)
        return;
    char spec[80];
    snprintf(spec, sizeof spec, "%s@%d", name, call);
    fail_spec = spec;
    fail_nccl = nccl;
    world = NULL;
    if (setjmp(test_escape) != 0)
        _exit(1);
    both(run_failing);
    if (world->stage == 2)
        _exit(0);
    fprintf(stderr, "%s: nothing failed\n", spec);
    _exit(1);
}

static void expect_one_ended(void)
{
    int status = 0;
    EXPECT(wait(&status) > 0);
    EXPECT_EQ(status, 0);
}

TEST(whatever_call_fails_both_sides_end)
{
    int running = 0;
    for (size_t i = 0; i < ARRAY_SIZE(failing); i++)
        for (int call = 1; call <= failing[i].calls; call++, running++) {
            if (running >= AT_A_TIME)
                expect_one_ended();
            start_failing(failing[i].name, failing[i].nccl, call);
        }
    for (int i = 0; i < AT_A_TIME; i++)
        expect_one_ended();
}

int main(int argc, char **argv)
{
    char dir[] = "/tmp/test-comm-XXXXXX";
    CHECK(mkdtemp(dir) != NULL);
    setenv("TMPDIR", dir, 1);
    setenv("SHIM_CUDA_DEVICES", "2", 1);
    const int r = test_run_all(argc, argv);
    if (rmdir(dir) != 0) {
        fprintf(stderr, "something is left in %s\n", dir);
        return 1;
    }
    return r;
}
