/* See device.h. */
#include "bench/device.h"

#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench.h"
#include "kernels/cuda/cuda.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/fdpass.h"

void device_check(const struct device *d, CUresult result, const char *what)
{
    struct shd_err e;
    bench_check(cuda_result(d->cuda, result, &e, "%s", what), &e);
}

void device_open(struct device *d, uint32_t ordinal)
{
    struct shd_err e;
    CUcontext context;
    bench_check(cuda_load(&d->cuda, &e), &e);
    bench_check(kern_cuda_new(ordinal, &d->k, &e), &e);
    device_check(d, d->cuda->cuDeviceGet(&d->device, (int)ordinal), "cuDeviceGet");
    device_check(d, d->cuda->cuDevicePrimaryCtxRetain(&context, d->device),
                 "cuDevicePrimaryCtxRetain");
    device_check(d, d->cuda->cuCtxSetCurrent(context), "cuCtxSetCurrent");
    device_check(d, d->cuda->cuStreamCreate(&d->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
}

void device_queue_copy(const struct device *d, void *to, const void *from, uint64_t bytes)
{
    device_check(d,
                 d->cuda->cuMemcpyAsync(device_address(to), device_address(from), bytes, d->stream),
                 "cuMemcpyAsync");
}

void device_wait(const struct device *d)
{
    device_check(d, d->cuda->cuStreamSynchronize(d->stream), "cuStreamSynchronize");
}

void *device_alloc(const struct device *d, uint64_t bytes)
{
    void *memory = d->k->ops->alloc(d->k, bytes);
    bench_check(memory != NULL ? SHD_OK : SHD_ENOMEM,
                &(struct shd_err){ .text = "the device has not so much memory" });
    return memory;
}

void *device_pinned(const struct device *d, uint64_t bytes)
{
    void *memory;
    device_check(d, d->cuda->cuMemHostAlloc(&memory, bytes, 0), "cuMemHostAlloc");
    return memory;
}

struct segment device_segment(const struct device *d, enum segment_kind kind, uint64_t bytes)
{
    struct segment s;
    struct shd_err e;
    bench_check(d->k->ops->segment_new(d->k, "bench", kind, bytes, &s, &e), &e);
    return s;
}

struct segment device_map(const struct device *d, int fd, enum segment_kind kind, uint64_t bytes)
{
    struct segment s;
    struct shd_err e;
    bench_check(d->k->ops->segment_map(d->k, fd, kind, bytes, NULL, &s, &e), &e);
    return s;
}

void device_add(const struct device *d, float *acc, const float *grad, uint64_t elems, bool first,
                struct kern_done *done)
{
    const struct kern_accumulate a = {
        .acc = acc, .grad = grad, .grad_dtype = SHD_F32, .elems = elems, .first = first
    };
    struct shd_err e;
    bench_check(kern_accumulate(d->k, &a, done, &e), &e);
}

void device_done(struct kern_waiter *w, const char *what)
{
    struct shd_err e;
    const int r = kern_wait(w);
    bench_check(r == SHD_OK ? r : err_set(&e, SHD_EIO, "%s failed", what), &e);
}

static void fill(struct kern *k, const struct kern_fill *f)
{
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    bench_check(kern_fill(k, f, &w.done, &e), &e);
    device_done(&w, "fill");
}

void device_fill(struct kern *k, float *out, uint64_t elems, float value)
{
    fill(k, &(struct kern_fill){ .out = out, .elems = elems, .kind = KERN_FILL_CONST, .a = value });
}

void device_fill_random(struct kern *k, float *out, uint64_t elems, uint64_t key, float low,
                        float high)
{
    fill(k, &(struct kern_fill){ .out = out,
                                 .elems = elems,
                                 .key = key,
                                 .kind = KERN_FILL_UNIFORM,
                                 .a = low,
                                 .b = high });
}

uint64_t device_free_bytes(const struct device *d)
{
    size_t free_bytes = 0, total = 0;
    device_check(d, d->cuda->cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo");
    return free_bytes;
}

/* -- Processes --------------------------------------------------------------------------------- */

void *process_shared(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

pid_t process_fork(int (*fn)(void *arg), void *arg)
{
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int code = fn(arg);
    fflush(NULL);
    _exit(code);
}

int process_wait(pid_t pid)
{
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int process_kill(pid_t pid)
{
    kill(pid, SIGKILL);
    return process_wait(pid);
}

bool process_until(const _Atomic uint64_t *word, uint64_t value, pid_t pid)
{
    const uint64_t deadline = clock_now_ns() + DEVICE_WAIT_S * UINT64_C(1000000000);
    while (*word < value) {
        siginfo_t ended = { 0 };
        if (clock_now_ns() > deadline)
            return false;
        if (waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 &&
            ended.si_pid == pid)
            return *word >= value;
        usleep(200);
    }
    return true;
}

void process_send(int socket, const struct segment *s)
{
    const struct side_msg m = { .type = SIDE_SEGMENT, .kind = SEGMENT_STATE, .bytes = s->bytes };
    struct shd_err e;
    bench_check(side_send(socket, &m, s->fd, &e), &e);
}

int process_receive(int socket)
{
    struct side_msg m;
    struct shd_err e;
    int fd = -1;
    bench_check(side_recv(socket, -1, &m, &fd, &e), &e);
    return fd;
}
