/* gpu_probe overlap and readonly: what two processes on one GPU, and read-only mappings, cost. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench/gpu_probe.h"
#include "bench/stat.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

/* -- overlap ------------------------------------------------------------------------------------
 * Two processes, each doing what its mode says and counting; modes alone, then together. Shares add
 * up to 1 where two take turns, and to 2 where neither disturbs the other. */

enum mode { MODE_IDLE, MODE_KERNELS, MODE_FROM_HOST, MODE_WITHIN, MODE_QUIT };

#define ROUNDS     3u
#define PHASE_MORE 30                   /* tenths of a second */
#define COPY_BYTES (UINT64_C(64) << 20) /* of one copy, at most */

struct party { /* one of the two */
    _Atomic uint64_t mode, count, ready;
    struct overlap *o;
};
struct overlap {
    const struct probe_options *o;
    struct party party[2];
};

static void work(struct probe_device *d, enum mode mode, float *x, float *y, void *pinned,
                 uint64_t bytes)
{
    const uint64_t copy_bytes = bytes < COPY_BYTES ? bytes : COPY_BYTES;
    struct shd_err e;
    struct kern_waiter w;
    if (mode == MODE_FROM_HOST) {
        probe_copy(d, y, pinned, copy_bytes);
    } else if (mode == MODE_WITHIN) {
        probe_copy(d, y, x, copy_bytes);
    } else {
        const struct kern_accumulate a = {
            .acc = x, .grad = y, .grad_dtype = SHD_F32, .elems = bytes / 4
        };
        kern_waiter_init(&w);
        for (uint32_t i = 0; i < 4; i++) /* several ahead, as a daemon has */
            probe_check(kern_accumulate(d->k, &a, i == 3 ? &w.done : NULL, &e), &e);
        CHECK(kern_wait(&w) == SHD_OK);
    }
}

static int overlap_party(void *arg)
{
    struct party *p = arg;
    const uint64_t bytes = p->o->o->bytes;
    const uint64_t copy_bytes = bytes < COPY_BYTES ? bytes : COPY_BYTES;
    struct probe_device d;
    void *pinned;
    probe_open(&d, p->o->o->device);
    float *x = d.k->ops->alloc(d.k, bytes), *y = d.k->ops->alloc(d.k, bytes);
    CHECK(x != NULL && y != NULL);
    probe_fill(&d, x, bytes / 4, 0);
    probe_fill(&d, y, bytes / 4, 1);
    probe_check_cuda(d.cuda, d.cuda->cuMemHostAlloc(&pinned, copy_bytes, 0), "cuMemHostAlloc");
    memset(pinned, 0, copy_bytes);
    p->ready = 1;
    for (;;) {
        const enum mode mode = (enum mode)p->mode;
        if (mode == MODE_QUIT)
            return 0;
        if (mode == MODE_IDLE) {
            usleep(100);
            continue;
        }
        work(&d, mode, x, y, pinned, bytes);
        p->count++;
    }
}

/* Both that have something to do have done some of it. */
static bool both_moved(const struct overlap *o, const uint64_t before[2])
{
    for (int i = 0; i < 2; i++)
        if (o->party[i].mode != MODE_IDLE && o->party[i].count == before[i])
            return false;
    return true;
}

/* Counts per second of both, in these modes for a phase; a longer one on a machine that is busy. */
static void phase(struct overlap *o, enum mode first, enum mode second, double ret_rate[2])
{
    uint64_t before[2];
    o->party[0].mode = first;
    o->party[1].mode = second;
    usleep(50000);
    const uint64_t start = clock_now_ns();
    for (int i = 0; i < 2; i++)
        before[i] = o->party[i].count;
    usleep(o->o->tenths * 100000);
    for (int more = 0; more < PHASE_MORE && !both_moved(o, before); more++)
        usleep(100000);
    const double seconds = (double)(clock_now_ns() - start) * 1e-9;
    for (int i = 0; i < 2; i++)
        ret_rate[i] = (double)(o->party[i].count - before[i]) / seconds;
    for (int i = 0; i < 2; i++)
        o->party[i].mode = MODE_IDLE;
    usleep(50000); /* the longest piece of work ends */
}

static const struct {
    enum mode mode;
    const char *name;
} seconds[] = { { MODE_FROM_HOST, "from_host" },
                { MODE_WITHIN, "within" },
                { MODE_KERNELS, "kernels" } };

static int overlap_measure(struct overlap *o)
{
    static struct stat_series sum[ARRAY_SIZE(seconds)], first[ARRAY_SIZE(seconds)];
    char name[64], answer[300];
    size_t used = 0;
    for (uint32_t round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < ARRAY_SIZE(seconds); i++) {
            double alone[2], other[2], both[2];
            phase(o, MODE_KERNELS, MODE_IDLE, alone);
            phase(o, MODE_IDLE, seconds[i].mode, other);
            phase(o, MODE_KERNELS, seconds[i].mode, both);
            if (alone[0] <= 0 || other[1] <= 0) {
                fprintf(stderr, "gpu_probe: a phase is too short for %s\n", seconds[i].name);
                return 1;
            }
            stat_add(&first[i], both[0] / alone[0]);
            stat_add(&sum[i], both[0] / alone[0] + both[1] / other[1]);
        }
    for (size_t i = 0; i < ARRAY_SIZE(seconds); i++) {
        snprintf(name, sizeof name, "gpu.overlap.%s.kernels_share", seconds[i].name);
        stat_print(true, name, "ratio", &first[i]);
        snprintf(name, sizeof name, "gpu.overlap.%s.sum_of_shares", seconds[i].name);
        stat_print(true, name, "ratio", &sum[i]);
        used += (size_t)snprintf(answer + used, sizeof answer - used, "%s%s %.2f",
                                 i > 0 ? ", " : "", seconds[i].name,
                                 stat_summarize(&sum[i]).median);
    }
    printf(
        "answer: shares of kernels and another process's work add up to (1 turns, 2 overlap): %s\n",
        answer);
    return 0;
}

int probe_overlap(const struct probe_options *options)
{
    struct overlap *o = probe_shared(sizeof *o);
    pid_t pids[2];
    int code = 0;
    o->o = options;
    for (int i = 0; i < 2; i++) {
        o->party[i].o = o;
        pids[i] = probe_fork(overlap_party, &o->party[i]);
    }
    for (int i = 0; i < 2; i++)
        if (!probe_until(&o->party[i].ready, 1, pids[i])) {
            fprintf(stderr, "gpu_probe: a party did not get ready\n");
            code = 1;
        }
    if (code == 0)
        code = overlap_measure(o);
    for (int i = 0; i < 2; i++) {
        o->party[i].mode = MODE_QUIT;
        if (code != 0)
            kill(pids[i], SIGKILL);
        if (probe_wait(pids[i]) != 0)
            code = 1;
    }
    return code;
}

/* -- readonly -----------------------------------------------------------------------------------
 */

/* An allocation mapped once more. */
static void *map_again(struct probe_device *d, const struct segment *s, int access, double *ret_us)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = 0;
    const CUmemAccessDesc desc = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, d->device },
                                   .flags = access };
    const uint64_t start = clock_now_ns();
    probe_check_cuda(
        d->cuda,
        d->cuda->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)s->fd,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "import");
    probe_check_cuda(d->cuda, d->cuda->cuMemAddressReserve(&at, s->bytes, 0, 0, 0), "reserve");
    probe_check_cuda(d->cuda, d->cuda->cuMemMap(at, s->bytes, 0, handle, 0), "map");
    probe_check_cuda(d->cuda, d->cuda->cuMemSetAccess(at, s->bytes, &desc, 1), "set access");
    *ret_us = (double)(clock_now_ns() - start) * 1e-3;
    d->cuda->cuMemRelease(handle); /* the mapping keeps it */
    return (void *)(uintptr_t)at;
}

static void unmap(struct probe_device *d, void *at, uint64_t bytes)
{
    probe_check_cuda(d->cuda, d->cuda->cuMemUnmap((CUdeviceptr)(uintptr_t)at, bytes), "unmap");
    probe_check_cuda(d->cuda, d->cuda->cuMemAddressFree((CUdeviceptr)(uintptr_t)at, bytes), "free");
}

/* GB/s of a kernel, and of the copy engine, that read from there. */
static double read_by_kernel(struct probe_device *d, float *acc, const void *from, uint64_t bytes)
{
    const struct kern_accumulate a = {
        .acc = acc, .grad = from, .grad_dtype = SHD_F32, .elems = bytes / 4, .first = true
    };
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    const uint64_t start = clock_now_ns();
    probe_check(kern_accumulate(d->k, &a, &w.done, &e), &e);
    CHECK(kern_wait(&w) == SHD_OK);
    return 2 * (double)bytes / (double)(clock_now_ns() - start);
}

static double read_by_copy(struct probe_device *d, float *to, const void *from, uint64_t bytes)
{
    const uint64_t start = clock_now_ns();
    probe_copy(d, to, from, bytes);
    return 2 * (double)bytes / (double)(clock_now_ns() - start);
}

#define READ_ROUNDS 15u

static int readonly_cost(void *arg)
{
    static struct stat_series us[2], kernel[2], copy[2];
    const struct probe_options *o = arg;
    struct probe_device d;
    struct segment s;
    struct shd_err e;
    probe_open(&d, o->device);
    probe_check(d.k->ops->segment_new(d.k, "probe", SEGMENT_PUBLISH, o->bytes, &s, &e), &e);
    float *acc = d.k->ops->alloc(d.k, o->bytes);
    CHECK(acc != NULL);
    probe_fill(&d, s.base, o->bytes / 4, 1);
    for (uint32_t i = 0; i < READ_ROUNDS + 2; i++)
        for (uint32_t j = 0; j < 2; j++) {
            const uint32_t ro = (i + j) % 2;
            double map_us;
            void *at = map_again(
                &d, &s, ro ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                &map_us);
            const double by_kernel = read_by_kernel(&d, acc, at, o->bytes);
            const double by_copy = read_by_copy(&d, acc, at, o->bytes);
            unmap(&d, at, o->bytes);
            if (i < 2)
                continue;
            stat_add(&us[ro], map_us);
            stat_add(&kernel[ro], by_kernel);
            stat_add(&copy[ro], by_copy);
        }
    const struct stat_series map_ratio = stat_ratio(&us[1], &us[0]);
    const struct stat_series kernel_ratio = stat_ratio(&kernel[1], &kernel[0]);
    const struct stat_series copy_ratio = stat_ratio(&copy[1], &copy[0]);
    stat_print(true, "gpu.readonly.map", "us", &us[1]);
    stat_print(true, "gpu.readonly.map_over_writable", "ratio", &map_ratio);
    stat_print(true, "gpu.readonly.kernel_rate_over_writable", "ratio", &kernel_ratio);
    stat_print(true, "gpu.readonly.copy_rate_over_writable", "ratio", &copy_ratio);
    printf("answer: reading through it %.3f (kernel) and %.3f (copy) of a writable one's rate, ",
           stat_summarize(&kernel_ratio).median, stat_summarize(&copy_ratio).median);
    return 0;
}

/* Exit code 0 when a write through a read-only mapping is refused. */
static int readonly_write(void *arg)
{
    const struct probe_options *o = arg;
    struct probe_device d;
    struct segment s;
    struct shd_err e;
    double us;
    probe_open(&d, o->device);
    probe_check(d.k->ops->segment_new(d.k, "probe", SEGMENT_PUBLISH, UINT64_C(2) << 20, &s, &e),
                &e);
    probe_fill(&d, s.base, s.bytes / 4, 1);
    float *at = map_again(&d, &s, CU_MEM_ACCESS_FLAGS_PROT_READ, &us);
    const CUresult queued = d.cuda->cuMemsetD8Async((CUdeviceptr)(uintptr_t)at, 0, 4096, d.stream);
    const CUresult ran = d.cuda->cuStreamSynchronize(d.stream);
    const char *name = "?";
    d.cuda->cuGetErrorName(queued != CUDA_SUCCESS ? queued : ran, &name);
    if (queued == CUDA_SUCCESS && ran == CUDA_SUCCESS)
        return 1;
    printf("a write is refused: %s\n", name);
    return 0;
}

int probe_readonly(const struct probe_options *o)
{
    struct probe_options copy = *o;
    if (probe_wait(probe_fork(readonly_cost, &copy)) != 0)
        return 1;
    const int code = probe_wait(probe_fork(readonly_write, &copy));
    if (code == 1)
        printf("a write is NOT refused\n");
    else if (code != 0)
        printf("a write ends the process (code %d)\n", code);
    return code == 1 ? 1 : 0;
}
