/* gpu_probe QUESTION: what shardd depends on and only a real GPU can tell (docs/gpu.md).
 *
 *   keep      is memory whose descriptor another process holds intact after its maker's SIGKILL,
 *             and given back when the last descriptor is closed?
 *   queued    do kernels that a killed process had queued still write, and after it was reaped?
 *   overlap   do copies of one process run while kernels of another do, without MPS?
 *   readonly  what does a read-only mapping cost, and does it hold?
 *
 * Figures are JSON lines, as the benchmarks'; the last line is the answer. Exit code: 0 answered as
 * shardd needs it; 1 not; 2 wrong usage.
 */
#include "bench/gpu_probe.h"

#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/stat.h"
#include "kernels/cuda/cuda.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

void probe_check(int r, const struct shd_err *e)
{
    if (r == SHD_OK)
        return;
    fprintf(stderr, "gpu_probe: %s\n", e->text);
    fflush(NULL);
    _exit(1);
}

void probe_check_cuda(const struct cuda *cuda, CUresult result, const char *what)
{
    struct shd_err e;
    probe_check(cuda_result(cuda, result, &e, "%s", what), &e);
}

void *probe_shared(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

pid_t probe_fork(int (*fn)(void *arg), void *arg)
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

int probe_wait(pid_t pid)
{
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool probe_until(const _Atomic uint64_t *word, uint64_t value, pid_t pid)
{
    const uint64_t deadline = clock_now_ns() + PROBE_WAIT_S * UINT64_C(1000000000);
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

void probe_send_fd(int socket, int fd)
{
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec data = { &byte, 1 };
    struct msghdr m = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control
    };
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    CHECK(sendmsg(socket, &m, 0) == 1);
}

int probe_receive_fd(int socket)
{
    char byte, control[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec data = { &byte, 1 };
    struct msghdr m = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control
    };
    int fd = -1;
    if (recvmsg(socket, &m, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&m) == NULL)
        return -1;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

void probe_open(struct probe_device *d, uint32_t ordinal)
{
    struct shd_err e;
    CUcontext context;
    probe_check(cuda_load(&d->cuda, &e), &e);
    probe_check(kern_cuda_new(ordinal, &d->k, &e), &e);
    probe_check_cuda(d->cuda, d->cuda->cuDeviceGet(&d->device, (int)ordinal), "cuDeviceGet");
    probe_check_cuda(d->cuda, d->cuda->cuDevicePrimaryCtxRetain(&context, d->device),
                     "cuDevicePrimaryCtxRetain");
    probe_check_cuda(d->cuda, d->cuda->cuCtxSetCurrent(context), "cuCtxSetCurrent");
    probe_check_cuda(d->cuda, d->cuda->cuStreamCreate(&d->stream, CU_STREAM_NON_BLOCKING),
                     "cuStreamCreate");
}

static void fill(struct probe_device *d, const struct kern_fill *f)
{
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    probe_check(kern_fill(d->k, f, &w.done, &e), &e);
    if (kern_wait(&w) != SHD_OK)
        probe_check(SHD_EIO, &(struct shd_err){ .text = "fill failed" });
}

void probe_fill(struct probe_device *d, float *out, uint64_t elems, float value)
{
    fill(d, &(struct kern_fill){ .out = out, .elems = elems, .kind = KERN_FILL_CONST, .a = value });
}

void probe_fill_random(struct probe_device *d, float *out, uint64_t elems, uint64_t key)
{
    fill(d,
         &(struct kern_fill){
             .out = out, .elems = elems, .key = key, .kind = KERN_FILL_UNIFORM, .a = -1, .b = 1 });
}

void probe_copy(struct probe_device *d, void *to, const void *from, uint64_t bytes)
{
    probe_check_cuda(d->cuda,
                     d->cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)to,
                                            (CUdeviceptr)(uintptr_t)from, bytes, d->stream),
                     "cuMemcpyAsync");
    probe_check_cuda(d->cuda, d->cuda->cuStreamSynchronize(d->stream), "cuStreamSynchronize");
}

uint64_t probe_free_bytes(const struct probe_device *d)
{
    size_t free_bytes = 0, total = 0;
    probe_check_cuda(d->cuda, d->cuda->cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo");
    return free_bytes;
}

void probe_figure(const char *name, const char *unit, double value)
{
    struct stat_series s = { .value = { value }, .count = 1 };
    stat_print(true, name, unit, &s);
}

static const struct {
    const char *name;
    int (*fn)(const struct probe_options *o);
    uint64_t bytes; /* by default */
} questions[] = {
    { "keep", probe_keep, UINT64_C(4) << 30 },
    { "queued", probe_queued, UINT64_C(16) << 30 },
    { "overlap", probe_overlap, UINT64_C(1) << 30 },
    { "readonly", probe_readonly, UINT64_C(1) << 30 },
};

static int usage(FILE *to, int code)
{
    fputs("usage: gpu_probe keep|queued|overlap|readonly [--bytes N] [--device ORDINAL]\n"
          "                 [--tenths N]\n"
          "What shardd depends on and only a GPU can tell; docs/gpu.md has the questions.\n",
          to);
    return code;
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {
        { "bytes", required_argument, NULL, 'b' },
        { "device", required_argument, NULL, 'd' },
        { "tenths", required_argument, NULL, 't' },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };
    struct probe_options o = { .tenths = 6 };
    for (int c; (c = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        if (c == 'h')
            return usage(stdout, 0);
        if (c == '?')
            return usage(stderr, 2);
        char *end;
        const unsigned long long n = strtoull(optarg, &end, 10);
        if (*end != '\0' || end == optarg)
            return usage(stderr, 2);
        if (c == 'b')
            o.bytes = n;
        else if (c == 'd')
            o.device = (uint32_t)n;
        else
            o.tenths = (uint32_t)n;
    }
    for (size_t i = 0; optind + 1 == argc && i < ARRAY_SIZE(questions); i++) {
        if (strcmp(questions[i].name, argv[optind]) != 0)
            continue;
        o.bytes = o.bytes > 0 ? o.bytes : questions[i].bytes;
        o.bytes = (o.bytes + (1u << 21) - 1) >> 21 << 21; /* whole granules and blocks */
        return questions[i].fn(&o);
    }
    return usage(stderr, 2);
}
