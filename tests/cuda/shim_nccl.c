/* A libnccl.so.2 for hosts without GPUs, for tests alone: communicators of two ranks in two
 * processes (or one), send and receive, non-blocking, on the streams of tests/cuda's libcuda.so.1.
 *
 * The unique id names a directory of its own in $TMPDIR, with a socket that rank 0 makes and
 * listens at; it is gone once rank 1 has come. A transfer is a piece of work on its stream: the
 * sender says what comes, sends it, and waits until the receiver has it. So it is stricter than
 * NCCL, which buffers: sends that meet sends, or other sizes, never end. A peer's death is an
 * asynchronous error; work that waits for it then never ends, either, but by ncclCommAbort(), as in
 * NCCL.
 *
 * All calls must come from one thread of the process; else it is aborted.
 *
 * SHIM_NCCL_FAIL=spec, read at the first call, and shim_nccl_fail(spec): "ncclSend@2,work@3:6": the
 * second ncclSend returns ncclSystemError, the third transfer fails as 6 while it runs. "work@3+":
 * and all after it. "recv@2:stop": this process stops (SIGSTOP) in the middle of its second
 * receive, which its peer has begun as well; "send" likewise.
 */
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/gpu/nccl.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/cuda/shim_faults.h"

#define SHIM_API __attribute__((visibility("default")))
#define SHIM_DECLARE(member, symbol, result, arguments) \
    SHIM_API result shim_##member arguments __asm__(symbol);
NCCL_FUNCTIONS(SHIM_DECLARE)
#undef SHIM_DECLARE

#define SLOW_POLLS 2u /* how often a transfer that was asked for is still in progress */

struct ncclComm {
    char dir[NCCL_ID_BYTES];
    int rank, fd;     /* -1: not connected */
    pthread_t thread; /* of the init */
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool connected, aborted; /* under the lock, with the next */
    int error;
    unsigned works;           /* queued or running */
    struct transfer *pending; /* asked for, not on the stream yet: the calling thread's */
    unsigned polls;
};

struct transfer {
    struct ncclComm *comm;
    bool send;
    uint64_t address, bytes;
    struct CUstream_st *stream;
};

struct head { /* what goes before the bytes, and back after them */
    char kind[8];
    uint64_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct shim_function functions[] = {
#define SHIM_NAME(member, symbol, result, arguments) { symbol, 0 },
    NCCL_FUNCTIONS(SHIM_NAME)
#undef SHIM_NAME
        { "work", 0 },
    { "send", 0 },
    { "recv", 0 },
};
#define FAULT_STOP (-1)
static struct shim_faults faults = { .functions = functions,
                                     .function_count = ARRAY_SIZE(functions),
                                     .word = ":stop",
                                     .word_result = FAULT_STOP,
                                     .usual_result = NCCL_SYSTEM_ERROR };
static bool configured;
static pthread_t caller;
static unsigned live; /* communicators; under lock */
static unsigned group_depth;
static struct ncclComm *group_comm; /* of the transfer in the group */
static shim_cuda_call_fn *cuda_call;
static shim_cuda_copy_fn *cuda_copy;

/* -- Failures ---------------------------------------------------------------------------------- */

static int count_call(const char *name)
{
    pthread_mutex_lock(&lock);
    if (!configured)
        shim_faults_set(&faults, getenv("SHIM_NCCL_FAIL"));
    configured = true;
    const int r = shim_faults_count(&faults, name);
    pthread_mutex_unlock(&lock);
    return r;
}

/* The same, of a call that must be the one thread's: while there is a communicator. */
static int enter(const char *name)
{
    pthread_mutex_lock(&lock);
    if (live == 0)
        caller = pthread_self();
    CHECK(pthread_equal(caller, pthread_self()) != 0);
    pthread_mutex_unlock(&lock);
    return count_call(name);
}

SHIM_API void shim_nccl_fail(const char *spec);
SHIM_API uint64_t shim_nccl_calls(const char *name);

void shim_nccl_fail(const char *spec)
{
    pthread_mutex_lock(&lock);
    shim_faults_set(&faults, spec);
    configured = true;
    pthread_mutex_unlock(&lock);
}

uint64_t shim_nccl_calls(const char *name)
{
    pthread_mutex_lock(&lock);
    const struct shim_function *function = shim_faults_find(&faults, name);
    const uint64_t calls = function != NULL ? function->calls : 0;
    pthread_mutex_unlock(&lock);
    return calls;
}

/* -- Sockets ----------------------------------------------------------------------------------- */

static bool is_aborted(struct ncclComm *c)
{
    pthread_mutex_lock(&c->lock);
    const bool aborted = c->aborted;
    pthread_mutex_unlock(&c->lock);
    return aborted;
}

static void set_error(struct ncclComm *c, int error)
{
    pthread_mutex_lock(&c->lock);
    if (c->error == NCCL_SUCCESS)
        c->error = error;
    pthread_mutex_unlock(&c->lock);
}

static bool move_all(int fd, void *memory, uint64_t bytes, bool out)
{
    uint8_t *at = memory;
    while (bytes > 0) {
        const ssize_t n = out ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        at += n;
        bytes -= (uint64_t)n;
    }
    return true;
}

static struct sockaddr_un socket_of(const struct ncclComm *c)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    const int n = snprintf(a.sun_path, sizeof a.sun_path, "%s/s", c->dir);
    CHECK(n > 0 && (size_t)n < sizeof a.sun_path);
    return a;
}

static void remove_dir(const struct ncclComm *c)
{
    unlink(socket_of(c).sun_path);
    rmdir(c->dir);
}

/* Rank 0: wait for the other one. -1: aborted, or nothing works here. */
static int listen_for(struct ncclComm *c)
{
    const struct sockaddr_un a = socket_of(c);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int fd = -1;
    if (bind(listener, (const struct sockaddr *)&a, sizeof a) == 0 && listen(listener, 1) == 0)
        while (fd < 0 && !is_aborted(c)) {
            struct pollfd p = { .fd = listener, .events = POLLIN };
            if (poll(&p, 1, 2) > 0)
                fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        }
    close(listener);
    remove_dir(c);
    return fd;
}

static int connect_to(struct ncclComm *c)
{
    const struct sockaddr_un a = socket_of(c);
    while (!is_aborted(c)) {
        const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0)
            return fd;
        close(fd);
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    }
    return -1;
}

static void *init_main(void *ctx)
{
    struct ncclComm *c = ctx;
    const int fd = c->rank == 0 ? listen_for(c) : connect_to(c);
    pthread_mutex_lock(&c->lock);
    c->fd = fd;
    c->connected = fd >= 0;
    if (fd < 0 && !c->aborted)
        c->error = NCCL_SYSTEM_ERROR;
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* -- Transfers --------------------------------------------------------------------------------- */

static bool heads_meet(struct ncclComm *c, const char *kind, uint64_t bytes)
{
    struct head head;
    if (!move_all(c->fd, &head, sizeof head, /* out= */ false)) {
        set_error(c, NCCL_REMOTE_ERROR);
        return false;
    }
    if (strncmp(head.kind, kind, sizeof head.kind) == 0 && head.bytes == bytes)
        return true;
    fprintf(stderr, "shim of NCCL: '%.8s' of %llu bytes meets '%s' of %llu: this will hang\n",
            head.kind, (unsigned long long)head.bytes, kind, (unsigned long long)bytes);
    return false;
}

/* In the middle; the peer may know of the transfer only a moment later. */
static void stop_here(const char *way)
{
    if (count_call(way) != FAULT_STOP)
        return;
    nanosleep(&(struct timespec){ .tv_nsec = 50000000 }, NULL);
    raise(SIGSTOP);
}

static bool run_send(const struct transfer *t, uint8_t *memory)
{
    const struct head head = { "bytes", t->bytes };
    struct ncclComm *c = t->comm;
    if (cuda_copy((uintptr_t)memory, t->address, t->bytes) != 0) {
        set_error(c, NCCL_UNHANDLED_CUDA_ERROR);
        return false;
    }
    const bool sent = move_all(c->fd, (void *)(uintptr_t)&head, sizeof head, true);
    stop_here("send");
    if (!sent || !move_all(c->fd, memory, t->bytes, true)) {
        set_error(c, NCCL_REMOTE_ERROR);
        return false;
    }
    return heads_meet(c, "taken", t->bytes);
}

static bool run_recv(const struct transfer *t, uint8_t *memory)
{
    const struct head head = { "taken", t->bytes };
    struct ncclComm *c = t->comm;
    if (!heads_meet(c, "bytes", t->bytes))
        return false;
    stop_here("recv");
    if (!move_all(c->fd, memory, t->bytes, /* out= */ false)) {
        set_error(c, NCCL_REMOTE_ERROR);
        return false;
    }
    if (cuda_copy(t->address, (uintptr_t)memory, t->bytes) != 0) {
        set_error(c, NCCL_UNHANDLED_CUDA_ERROR);
        return false;
    }
    return move_all(c->fd, (void *)(uintptr_t)&head, sizeof head, true);
}

/* On the stream's thread. */
static void transfer_run(void *ctx)
{
    struct transfer *t = ctx;
    struct ncclComm *c = t->comm;
    const int fault = count_call("work");
    if (fault != NCCL_SUCCESS)
        set_error(c, fault);
    uint8_t *memory = malloc(t->bytes);
    CHECK(memory != NULL);
    const bool done = fault == NCCL_SUCCESS && !is_aborted(c) &&
                      (t->send ? run_send(t, memory) : run_recv(t, memory));
    free(memory);
    pthread_mutex_lock(&c->lock);
    while (!done && !c->aborted) /* as a kernel that spins */
        pthread_cond_wait(&c->change, &c->lock);
    c->works--;
    pthread_cond_broadcast(&c->change);
    pthread_mutex_unlock(&c->lock);
    free(t);
}

static void launch(struct ncclComm *c)
{
    struct transfer *t = c->pending;
    c->pending = NULL;
    pthread_mutex_lock(&c->lock);
    c->works++;
    pthread_mutex_unlock(&c->lock);
    cuda_call(t->stream, transfer_run, t);
}

static int ask(const char *name, const struct transfer *asked, int peer)
{
    const int r = enter(name);
    if (r != NCCL_SUCCESS)
        return r;
    struct ncclComm *c = asked->comm;
    CHECK(group_depth == 1 && group_comm == NULL && c->pending == NULL && c->connected);
    if (peer != 1 - c->rank || asked->bytes == 0 || asked->stream == NULL)
        return NCCL_INVALID_ARGUMENT;
    struct transfer *t = malloc(sizeof *t);
    CHECK(t != NULL);
    *t = *asked;
    c->pending = t;
    group_comm = c;
    return NCCL_SUCCESS;
}

int shim_send(const void *from, size_t count, int dtype, int peer, struct ncclComm *comm,
              struct CUstream_st *stream)
{
    const struct transfer t = { comm, true, (uintptr_t)from, count, stream };
    CHECK(dtype == NCCL_UINT8);
    return ask("ncclSend", &t, peer);
}

int shim_recv(void *to, size_t count, int dtype, int peer, struct ncclComm *comm,
              struct CUstream_st *stream)
{
    const struct transfer t = { comm, false, (uintptr_t)to, count, stream };
    CHECK(dtype == NCCL_UINT8);
    return ask("ncclRecv", &t, peer);
}

int shim_group_start(void)
{
    const int r = enter("ncclGroupStart");
    if (r == NCCL_SUCCESS)
        group_depth++;
    return r;
}

int shim_group_end(void)
{
    const int r = enter("ncclGroupEnd");
    CHECK(group_depth == 1);
    group_depth--;
    struct ncclComm *c = group_comm;
    group_comm = NULL;
    if (c == NULL)
        return r;
    if (r != NCCL_SUCCESS) {
        free(c->pending);
        c->pending = NULL;
        return r;
    }
    c->polls = 0;
    return NCCL_IN_PROGRESS;
}

/* -- Communicators ----------------------------------------------------------------------------- */

int shim_get_version(int *version)
{
    *version = 22809;
    return count_call("ncclGetVersion");
}

int shim_get_unique_id(struct nccl_id *id)
{
    const int r = enter("ncclGetUniqueId");
    if (r != NCCL_SUCCESS)
        return r;
    const char *tmp = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return NCCL_SYSTEM_ERROR;
    snprintf(id->bytes, sizeof id->bytes, "%s/shim-nccl-%016llx", tmp != NULL ? tmp : "/tmp",
             (unsigned long long)random);
    return NCCL_SUCCESS;
}

static void find_cuda(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    CHECK(library != NULL);
    *(void **)&cuda_call = dlsym(library, "shim_cuda_call");
    *(void **)&cuda_copy = dlsym(library, "shim_cuda_copy");
    dlclose(library); /* its user keeps it */
    CHECK(cuda_call != NULL && cuda_copy != NULL);
}

int shim_comm_init(struct ncclComm **comm, int ranks, struct nccl_id id, int rank,
                   struct nccl_config *config)
{
    const int r = enter("ncclCommInitRankConfig");
    if (r != NCCL_SUCCESS)
        return r;
    CHECK(ranks == 2 && (rank == 0 || rank == 1));
    CHECK(config->magic == NCCL_CONFIG_MAGIC && config->blocking == 0);
    if (cuda_call == NULL)
        find_cuda();
    struct ncclComm *c = calloc(1, sizeof *c);
    CHECK(c != NULL);
    memcpy(c->dir, id.bytes, sizeof c->dir);
    c->dir[sizeof c->dir - 1] = '\0';
    c->rank = rank;
    c->fd = -1;
    CHECK(rank != 0 || mkdir(c->dir, 0700) == 0);
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->change, NULL);
    pthread_mutex_lock(&lock);
    live++;
    pthread_mutex_unlock(&lock);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    CHECK(pthread_create(&c->thread, NULL, init_main, c) == 0);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    *comm = c;
    return NCCL_IN_PROGRESS;
}

/* The peer's end of the socket. */
static bool peer_gone(const struct ncclComm *c)
{
    char byte;
    return recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

int shim_comm_async_error(struct ncclComm *c, int *state)
{
    const int r = enter("ncclCommGetAsyncError");
    if (r != NCCL_SUCCESS)
        return r;
    pthread_mutex_lock(&c->lock);
    if (c->error == NCCL_SUCCESS && c->connected && peer_gone(c))
        c->error = NCCL_REMOTE_ERROR;
    const bool connected = c->connected;
    const int error = c->error;
    pthread_mutex_unlock(&c->lock);
    *state = error != NCCL_SUCCESS ? error : connected ? NCCL_SUCCESS : NCCL_IN_PROGRESS;
    if (*state != NCCL_SUCCESS || c->pending == NULL)
        return NCCL_SUCCESS;
    *state = NCCL_IN_PROGRESS;
    if (++c->polls > SLOW_POLLS) {
        launch(c);
        *state = NCCL_SUCCESS;
    }
    return NCCL_SUCCESS;
}

/* Whatever it returns, it aborts. */
int shim_comm_abort(struct ncclComm *c)
{
    const int r = enter("ncclCommAbort");
    pthread_mutex_lock(&c->lock);
    c->aborted = true;
    if (c->fd >= 0)
        shutdown(c->fd, SHUT_RDWR);
    pthread_cond_broadcast(&c->change);
    while (c->works > 0)
        pthread_cond_wait(&c->change, &c->lock);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    if (c->fd >= 0)
        close(c->fd);
    free(c->pending);
    pthread_mutex_lock(&lock);
    live--;
    pthread_mutex_unlock(&lock);
    pthread_cond_destroy(&c->change);
    pthread_mutex_destroy(&c->lock);
    free(c);
    return r;
}

const char *shim_error_string(int result)
{
    static const char *const texts[] = { "no error",
                                         "unhandled cuda error",
                                         "unhandled system error",
                                         "internal error",
                                         "invalid argument",
                                         "invalid usage",
                                         "remote process exited or there was a network error",
                                         "NCCL operation in progress" };
    return result >= 0 && (size_t)result < ARRAY_SIZE(texts) ? texts[result]
                                                             : "unknown result code";
}

const char *shim_last_error(struct ncclComm *comm)
{
    (void)comm;
    return "";
}
