/* nccl_pair: two processes on one GPU form an NCCL communicator, each with an NCCL_HOSTID of its
 * own (the check for duplicates compares host hashes), and run an all-gather and a reduce-scatter.
 *
 * NCCL is loaded at run time (libnccl.so.2, or $SHD_NCCL) and what is used of it declared here, as
 * in nccl.h of 2.18 and later. The two are hosts to each other, so traffic goes over loopback
 * sockets: this shows that the calls work with one GPU, not how fast NCCL is. Exit code: 0 results
 * are right; 1 not, or no communicator within the deadline; 77 no NCCL here.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/gpu/cuda.h"

#define RANKS      2
#define ELEMS      (UINT64_C(1) << 20) /* of a rank's part */
#define ROUNDS     5
#define DEADLINE_S 45
#define NO_NCCL    77

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
enum { NCCL_SUCCESS = 0, NCCL_FLOAT32 = 7, NCCL_SUM = 0 };

#define NCCL_FUNCTIONS(X)                                                                     \
    X(ncclGetVersion, (int *version))                                                         \
    X(ncclGetUniqueId, (ncclUniqueId * id))                                                   \
    X(ncclCommInitRank, (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank))            \
    X(ncclCommDestroy, (ncclComm_t comm))                                                     \
    X(ncclAllGather,                                                                          \
      (const void *from, void *to, size_t count, int type, ncclComm_t comm, CUstream stream)) \
    X(ncclReduceScatter, (const void *from, void *to, size_t count, int type, int op,         \
                          ncclComm_t comm, CUstream stream))

struct nccl {
#define NCCL_MEMBER(name, arguments) \
    int(*name) arguments; /* NOLINT(bugprone-macro-parentheses): declares */
    NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    const char *(*ncclGetErrorString)(int result);
    const char *(*ncclGetLastError)(ncclComm_t comm);
};

struct shared { /* by both ranks and their parent */
    ncclUniqueId id;
    _Atomic int have_id;
    _Atomic int version;
    double gather_s[ROUNDS], scatter_s[ROUNDS]; /* rank 0's */
};

struct rank {
    const struct cuda *cuda;
    struct nccl nccl;
    struct shared *shared;
    int rank;
    ncclComm_t comm;
    CUstream stream;
    CUdeviceptr part, whole; /* [ELEMS], [RANKS * ELEMS] floats */
};

static void leave(const struct rank *r, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4), noreturn));

static void leave(const struct rank *r, int code, const char *fmt, ...)
{
    va_list args;
    char text[300];
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fprintf(stderr, "nccl_pair: rank %d: %s\n", r->rank, text);
    fflush(stderr);
    _exit(code); /* NCCL's threads may be anywhere */
}

static void check_cuda(const struct rank *r, CUresult result, const char *what)
{
    struct shd_err e;
    if (cuda_result(r->cuda, result, &e, "%s", what) != SHD_OK)
        leave(r, 1, "%s", e.text);
}

static void check_nccl(const struct rank *r, int result, const char *what)
{
    if (result != NCCL_SUCCESS)
        leave(r, 1, "%s: %s: %s", what, r->nccl.ncclGetErrorString(result),
              r->nccl.ncclGetLastError(r->comm));
}

static void load(struct rank *r)
{
    const char *path = getenv("SHD_NCCL");
    void *library = dlopen(path != NULL && *path != '\0' ? path : "libnccl.so.2",
                           RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        leave(r, NO_NCCL, "no NCCL: %s", dlerror());
#define NCCL_LOAD(name, arguments)                   \
    *(void **)&r->nccl.name = dlsym(library, #name); \
    if (r->nccl.name == NULL)                        \
        leave(r, 1, "this libnccl.so.2 has no %s", #name);
    NCCL_FUNCTIONS(NCCL_LOAD)
#undef NCCL_LOAD
    *(void **)&r->nccl.ncclGetErrorString = dlsym(library, "ncclGetErrorString");
    *(void **)&r->nccl.ncclGetLastError = dlsym(library, "ncclGetLastError");
    if (r->nccl.ncclGetErrorString == NULL || r->nccl.ncclGetLastError == NULL)
        leave(r, 1, "this libnccl.so.2 has no ncclGetErrorString or ncclGetLastError");
}

static void open_device(struct rank *r)
{
    struct shd_err e;
    CUdevice device;
    CUcontext context;
    if (cuda_load(&r->cuda, &e) != SHD_OK)
        leave(r, 1, "%s", e.text);
    check_cuda(r, r->cuda->cuDeviceGet(&device, 0), "cuDeviceGet");
    check_cuda(r, r->cuda->cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check_cuda(r, r->cuda->cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check_cuda(r, r->cuda->cuStreamCreate(&r->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check_cuda(r, r->cuda->cuMemAlloc(&r->part, ELEMS * sizeof(float)), "cuMemAlloc");
    check_cuda(r, r->cuda->cuMemAlloc(&r->whole, RANKS * ELEMS * sizeof(float)), "cuMemAlloc");
}

static void copy(const struct rank *r, CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    check_cuda(r, r->cuda->cuMemcpyAsync(to, from, bytes, r->stream), "cuMemcpyAsync");
    check_cuda(r, r->cuda->cuStreamSynchronize(r->stream), "cuStreamSynchronize");
}

/* Element i of rank r: whole numbers, whose sums fp32 holds exactly. */
static float element(int rank, uint64_t i)
{
    return (float)((uint64_t)(rank + 1) * 1000 + i % 997);
}

/* All-gather: everybody has each rank's part. */
static void gather(struct rank *r, float *host)
{
    for (uint64_t i = 0; i < ELEMS; i++)
        host[i] = element(r->rank, i);
    copy(r, r->part, (CUdeviceptr)(uintptr_t)host, ELEMS * sizeof(float));
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t start = clock_now_ns();
        check_nccl(r,
                   r->nccl.ncclAllGather((void *)(uintptr_t)r->part, (void *)(uintptr_t)r->whole,
                                         ELEMS, NCCL_FLOAT32, r->comm, r->stream),
                   "ncclAllGather");
        check_cuda(r, r->cuda->cuStreamSynchronize(r->stream), "wait for the all-gather");
        if (r->rank == 0)
            r->shared->gather_s[round] = (double)(clock_now_ns() - start) * 1e-9;
    }
    copy(r, (CUdeviceptr)(uintptr_t)host, r->whole, RANKS * ELEMS * sizeof(float));
    for (uint64_t i = 0; i < RANKS * ELEMS; i++)
        if (host[i] != element((int)(i / ELEMS), i % ELEMS))
            leave(r, 1, "all-gather: element %ju is %g", (uintmax_t)i, (double)host[i]);
}

/* Reduce-scatter of what the all-gather left: each rank's part, RANKS times. */
static void scatter(struct rank *r, float *host)
{
    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t start = clock_now_ns();
        check_nccl(r,
                   r->nccl.ncclReduceScatter((void *)(uintptr_t)r->whole,
                                             (void *)(uintptr_t)r->part, ELEMS, NCCL_FLOAT32,
                                             NCCL_SUM, r->comm, r->stream),
                   "ncclReduceScatter");
        check_cuda(r, r->cuda->cuStreamSynchronize(r->stream), "wait for the reduce-scatter");
        if (r->rank == 0)
            r->shared->scatter_s[round] = (double)(clock_now_ns() - start) * 1e-9;
    }
    copy(r, (CUdeviceptr)(uintptr_t)host, r->part, ELEMS * sizeof(float));
    for (uint64_t i = 0; i < ELEMS; i++)
        if (host[i] != RANKS * element(r->rank, i))
            leave(r, 1, "reduce-scatter: element %ju is %g", (uintmax_t)i, (double)host[i]);
}

static void rank_main(struct shared *shared, int rank)
{
    struct rank r = { .shared = shared, .rank = rank };
    char name[32];
    snprintf(name, sizeof name, "shardd-rank-%d", rank);
    setenv("NCCL_HOSTID", name, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_IB_DISABLE", "1", 1);
    load(&r);
    int version = 0;
    check_nccl(&r, r.nccl.ncclGetVersion(&version), "ncclGetVersion");
    shared->version = version;
    open_device(&r);
    if (rank == 0) {
        check_nccl(&r, r.nccl.ncclGetUniqueId(&shared->id), "ncclGetUniqueId");
        shared->have_id = 1;
    }
    while (!shared->have_id)
        usleep(1000);
    check_nccl(&r, r.nccl.ncclCommInitRank(&r.comm, RANKS, shared->id, rank), "ncclCommInitRank");
    float *host = malloc(RANKS * ELEMS * sizeof(float));
    CHECK(host != NULL);
    gather(&r, host);
    scatter(&r, host);
    check_nccl(&r, r.nccl.ncclCommDestroy(r.comm), "ncclCommDestroy");
    free(host);
    _exit(0);
}

static pid_t pids[RANKS];

static void end_ranks(int sig)
{
    static const char late[] = "nccl_pair: no results within the deadline\n";
    (void)sig;
    (void)!write(STDERR_FILENO, late, sizeof late - 1);
    for (int i = 0; i < RANKS; i++)
        if (pids[i] > 0)
            kill(pids[i], SIGKILL);
}

static void figures(const struct shared *shared)
{
    struct stat_series gather_rate = { 0 }, scatter_rate = { 0 };
    const double bytes = (double)ELEMS * sizeof(float); /* that cross to the other rank */
    for (int i = 1; i < ROUNDS; i++) {
        stat_add(&gather_rate, bytes / shared->gather_s[i] * 1e-9);
        stat_add(&scatter_rate, bytes / shared->scatter_s[i] * 1e-9);
    }
    stat_print(true, "nccl.one_gpu.all_gather", "GB/s", &gather_rate);
    stat_print(true, "nccl.one_gpu.reduce_scatter", "GB/s", &scatter_rate);
    printf("answer: NCCL %d.%d.%d: two ranks on one GPU by distinct NCCL_HOSTID, results right\n",
           shared->version / 10000, shared->version / 100 % 100, shared->version % 100);
}

int main(void)
{
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    signal(SIGALRM, end_ranks); /* NOLINT(bugprone-signal-handler,cert-sig30-c): kill() is safe */
    for (int i = 0; i < RANKS; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0)
            rank_main(shared, i);
    }
    alarm(DEADLINE_S);
    int code = 0;
    for (int left = RANKS; left > 0;) {
        int status;
        const pid_t pid = wait(&status);
        if (pid < 0)
            continue;
        left--;
        for (int i = 0; i < RANKS; i++)
            pids[i] = pids[i] == pid ? 0 : pids[i];
        const int one = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        if (WIFSIGNALED(status))
            fprintf(stderr, "nccl_pair: a rank was ended by signal %d\n", WTERMSIG(status));
        code = code == 0 ? one : code;
        if (one != 0)
            alarm(5); /* the other one may wait for it for ever */
    }
    if (code == 0)
        figures(shared);
    return code;
}
