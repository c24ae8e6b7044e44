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
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench/bench.h"
#include "bench/device.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

struct options {
    uint64_t bytes; /* of the memory in question */
    uint32_t device;
    uint32_t tenths; /* of a second: how long a phase of overlap takes */
};

static void figure(const char *name, const char *unit, double value)
{
    struct stat_series s = { .value = { value }, .count = 1 };
    stat_print(true, name, unit, &s);
}

/* One copy by the driver, waited for. */
static void copy_now(const struct device *d, void *to, const void *from, uint64_t bytes)
{
    device_queue_copy(d, to, from, bytes);
    device_wait(d);
}

/* -- keep ---------------------------------------------------------------------------------------
 * The maker fills a segment and hashes it; the keeper (this process, which never initialises CUDA)
 * has the descriptor alone when the maker is killed; a successor maps it and hashes again. */

struct keep {
    const struct options *o;
    int sockets[2];
    int fd; /* the successor's */
    uint64_t leaves;
    _Atomic uint64_t ready;
    uint64_t free_before, free_after;
    uint8_t *hashes; /* [leaves * 32] */
};

static void hash(struct device *d, const float *x, uint64_t elems, uint8_t *out)
{
    const struct kern_hash h = {
        .x = x, .elems = elems, .head_elems = 2048, .out = (uint8_t(*)[32])out
    };
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    bench_check(kern_hash(d->k, &h, &w.done, &e), &e);
    device_done(&w, "hash");
}

static int keep_maker(void *arg)
{
    struct keep *k = arg;
    struct device d;
    device_open(&d, k->o->device);
    k->free_before = device_free_bytes(&d);
    const struct segment s = device_segment(&d, SEGMENT_STATE, k->o->bytes);
    device_fill_random(d.k, s.base, k->o->bytes / 4, /* key= */ 42, -1, 1);
    hash(&d, s.base, k->o->bytes / 4, k->hashes);
    process_send(k->sockets[1], &s);
    k->ready = 1;
    while (pause() != 0)
        ; /* until it is killed */
    return 0;
}

static int keep_successor(void *arg)
{
    struct keep *k = arg;
    struct device d;
    uint8_t *again = malloc(k->leaves * 32);
    CHECK(again != NULL);
    device_open(&d, k->o->device);
    const uint64_t start = clock_now_ns();
    struct segment s = device_map(&d, k->fd, SEGMENT_STATE, k->o->bytes);
    figure("gpu.keep.adopt", "ms", (double)(clock_now_ns() - start) * 1e-6);
    hash(&d, s.base, k->o->bytes / 4, again);
    const bool same = memcmp(again, k->hashes, k->leaves * 32) == 0;
    d.k->ops->segment_close(d.k, &s);
    free(again);
    return same ? 0 : 1;
}

static int keep_last(void *arg)
{
    struct keep *k = arg;
    struct device d;
    device_open(&d, k->o->device);
    k->free_after = device_free_bytes(&d);
    return 0;
}

static int answer_keep(const struct options *o)
{
    struct keep *k = process_shared(sizeof *k);
    k->o = o;
    k->leaves = kern_hash_leaves(2048, o->bytes / 4);
    k->hashes = process_shared(k->leaves * 32);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, k->sockets) == 0);
    const pid_t maker = process_fork(keep_maker, k);
    if (!process_until(&k->ready, 1, maker)) {
        process_kill(maker);
        fprintf(stderr, "gpu_probe: the maker did not get ready\n");
        return 1;
    }
    k->fd = process_receive(k->sockets[0]);
    process_kill(maker);
    sleep(1); /* what tears its context down may be late */
    const int same = process_wait(process_fork(keep_successor, k));
    close(k->fd);
    sleep(1);
    const int last = process_wait(process_fork(keep_last, k));
    if (same != 0 || last != 0) {
        printf("answer: after SIGKILL the memory is %s\n", same == 1 ? "NOT what it was" : "lost");
        return 1;
    }
    const int64_t lost = (int64_t)k->free_before - (int64_t)k->free_after;
    figure("gpu.keep.not_given_back", "bytes", (double)lost);
    const bool given_back = lost < (int64_t)(o->bytes / 2);
    printf("answer: %" PRIu64 " MiB intact after SIGKILL; memory %s after the last descriptor\n",
           o->bytes >> 20, given_back ? "given back" : "NOT given back");
    return given_back ? 0 : 1;
}

/* -- queued -------------------------------------------------------------------------------------
 * The victim adds 1 to every element again and again, as far ahead as a device goes; the watcher,
 * ready before, reads samples of it all the time. Both note times in shared memory. */

#define SAMPLES    64u
#define VICTIM_OPS 64u
#define KILL_AFTER 4u /* operations done */
#define SETTLE_S   2u

struct queued {
    const struct options *o;
    int sockets[2]; /* victim to watcher */
    uint64_t elems;
    _Atomic uint64_t done, watching, reaped_ns, stop;
    uint64_t last_change_ns; /* the watcher's; 0: none */
    double at_reap, at_end;  /* sums of the samples */
    uint64_t looks;
    double look_us;
};

struct victim_done {
    struct kern_done done;
    struct queued *q;
};

static void victim_done(struct kern_done *done, int status)
{
    struct victim_done *v = (struct victim_done *)done; /* its first member */
    if (status != SHD_OK) {
        fprintf(stderr, "gpu_probe: an operation failed with %d\n", status);
        _exit(1);
    }
    v->q->done++;
}

static int queued_victim(void *arg)
{
    static struct victim_done done[VICTIM_OPS];
    struct queued *q = arg;
    struct device d;
    device_open(&d, q->o->device);
    const struct segment s = device_segment(&d, SEGMENT_STATE, q->elems * 4);
    float *ones = device_alloc(&d, q->elems * 4);
    device_fill(d.k, s.base, q->elems, 0);
    device_fill(d.k, ones, q->elems, 1);
    process_send(q->sockets[1], &s);
    while (!q->watching)
        usleep(1000);
    for (uint32_t i = 0; i < VICTIM_OPS; i++) {
        done[i] = (struct victim_done){ { victim_done }, q };
        device_add(&d, s.base, ones, q->elems, false, &done[i].done);
    }
    while (pause() != 0)
        ; /* until it is killed */
    return 0;
}

static double look(struct device *d, const struct queued *q, const float *x, float *pinned)
{
    double sum = 0;
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const uint64_t at = (q->elems - 1) / (SAMPLES - 1) * i;
        device_queue_copy(d, pinned + i, x + at, sizeof(float));
    }
    device_wait(d);
    for (uint32_t i = 0; i < SAMPLES; i++)
        sum += (double)pinned[i];
    return sum;
}

static int queued_watcher(void *arg)
{
    struct queued *q = arg;
    struct device d;
    device_open(&d, q->o->device);
    float *pinned = device_pinned(&d, SAMPLES * sizeof(float));
    const int fd = process_receive(q->sockets[0]);
    const struct segment s = device_map(&d, fd, SEGMENT_STATE, q->elems * 4);
    double last = look(&d, q, s.base, pinned);
    const uint64_t start = clock_now_ns();
    bool reaped = false;
    q->watching = 1;
    while (!q->stop) {
        const bool after = q->reaped_ns != 0; /* known before this look began */
        const double sum = look(&d, q, s.base, pinned);
        q->looks++;
        if (after && !reaped) {
            reaped = true;
            q->at_reap = sum;
        }
        if (sum != last)
            q->last_change_ns = clock_now_ns();
        last = sum;
    }
    q->at_end = last;
    q->look_us = (double)(clock_now_ns() - start) * 1e-3 / (double)(q->looks > 0 ? q->looks : 1);
    return reaped ? 0 : 1;
}

static int queued_report(const struct queued *q, uint64_t done, uint64_t kill_ns)
{
    const double late = q->at_end - q->at_reap;
    const double reap_ms = (double)(q->reaped_ns - kill_ns) * 1e-6;
    const double change_ms = ((double)q->last_change_ns - (double)kill_ns) * 1e-6;
    figure("gpu.queued.done_at_kill", "ops", (double)done);
    figure("gpu.queued.done_at_end", "ops", q->at_end / SAMPLES);
    figure("gpu.queued.reaped_after_kill", "ms", reap_ms);
    figure("gpu.queued.last_change_after_kill", "ms", change_ms);
    figure("gpu.queued.written_after_reap", "ops", late / SAMPLES);
    figure("gpu.queued.look", "us", q->look_us);
    printf("answer: %.2f of %u operations took place, %" PRIu64 " were known done at SIGKILL; last "
           "change %.1f ms after it, exit %.1f ms after it; %s after the exit\n",
           q->at_end / SAMPLES, VICTIM_OPS, done, change_ms, reap_ms,
           late == 0 ? "nothing was written" : "the device still WROTE");
    return late == 0 ? 0 : 1;
}

static int answer_queued(const struct options *o)
{
    struct queued *q = process_shared(sizeof *q);
    q->o = o;
    q->elems = o->bytes / 4;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, q->sockets) == 0);
    const pid_t watcher = process_fork(queued_watcher, q);
    const pid_t victim = process_fork(queued_victim, q);
    const bool ready = process_until(&q->watching, 1, watcher) &&
                       process_until(&q->done, KILL_AFTER, victim);
    const uint64_t kill_ns = clock_now_ns(), done = q->done;
    process_kill(victim);
    q->reaped_ns = clock_now_ns();
    sleep(ready ? SETTLE_S : 0);
    q->stop = 1;
    const int code = (ready ? process_wait : process_kill)(watcher);
    if (!ready || code != 0) {
        fprintf(stderr, "gpu_probe: %s\n", ready ? "the watcher failed" : "nothing was done");
        return 1;
    }
    return queued_report(q, done, kill_ns);
}

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
    const struct options *o;
    struct party party[2];
};

static void work(struct device *d, enum mode mode, float *x, float *y, void *pinned, uint64_t bytes)
{
    const uint64_t copy_bytes = bytes < COPY_BYTES ? bytes : COPY_BYTES;
    struct kern_waiter w;
    if (mode == MODE_FROM_HOST) {
        copy_now(d, y, pinned, copy_bytes);
    } else if (mode == MODE_WITHIN) {
        copy_now(d, y, x, copy_bytes);
    } else {
        kern_waiter_init(&w);
        for (uint32_t i = 0; i < 4; i++) /* several ahead, as a daemon has */
            device_add(d, x, y, bytes / 4, false, i == 3 ? &w.done : NULL);
        device_done(&w, "accumulate");
    }
}

static int overlap_party(void *arg)
{
    struct party *p = arg;
    const uint64_t bytes = p->o->o->bytes;
    const uint64_t copy_bytes = bytes < COPY_BYTES ? bytes : COPY_BYTES;
    struct device d;
    device_open(&d, p->o->o->device);
    float *x = device_alloc(&d, bytes), *y = device_alloc(&d, bytes);
    void *pinned = device_pinned(&d, copy_bytes);
    device_fill(d.k, x, bytes / 4, 0);
    device_fill(d.k, y, bytes / 4, 1);
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

static int answer_overlap(const struct options *options)
{
    struct overlap *o = process_shared(sizeof *o);
    pid_t pids[2];
    int code = 0;
    o->o = options;
    for (int i = 0; i < 2; i++) {
        o->party[i].o = o;
        pids[i] = process_fork(overlap_party, &o->party[i]);
    }
    for (int i = 0; i < 2; i++)
        if (!process_until(&o->party[i].ready, 1, pids[i])) {
            fprintf(stderr, "gpu_probe: a party did not get ready\n");
            code = 1;
        }
    if (code == 0)
        code = overlap_measure(o);
    for (int i = 0; i < 2; i++) {
        o->party[i].mode = MODE_QUIT;
        if ((code == 0 ? process_wait : process_kill)(pids[i]) != 0)
            code = 1;
    }
    return code;
}

/* -- readonly --------------------------------------------------------------------------------- */

/* An allocation mapped once more. */
static void *map_again(struct device *d, const struct segment *s, int access, double *ret_us)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at = 0;
    const CUmemAccessDesc desc = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, d->device },
                                   .flags = access };
    const uint64_t start = clock_now_ns();
    device_check(d,
                 d->cuda->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)s->fd,
                                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                 "import");
    device_check(d, d->cuda->cuMemAddressReserve(&at, s->bytes, 0, 0, 0), "reserve");
    device_check(d, d->cuda->cuMemMap(at, s->bytes, 0, handle, 0), "map");
    device_check(d, d->cuda->cuMemSetAccess(at, s->bytes, &desc, 1), "set access");
    *ret_us = (double)(clock_now_ns() - start) * 1e-3;
    d->cuda->cuMemRelease(handle); /* the mapping keeps it */
    return (void *)(uintptr_t)at;
}

static void unmap(struct device *d, void *at, uint64_t bytes)
{
    device_check(d, d->cuda->cuMemUnmap(device_address(at), bytes), "unmap");
    device_check(d, d->cuda->cuMemAddressFree(device_address(at), bytes), "free");
}

/* GB/s of a kernel, and of the copy engine, that read from there. */
static double read_by_kernel(struct device *d, float *acc, const void *from, uint64_t bytes)
{
    struct kern_waiter w;
    kern_waiter_init(&w);
    const uint64_t start = clock_now_ns();
    device_add(d, acc, from, bytes / 4, true, &w.done);
    device_done(&w, "accumulate");
    return 2 * (double)bytes / (double)(clock_now_ns() - start);
}

static double read_by_copy(struct device *d, float *to, const void *from, uint64_t bytes)
{
    const uint64_t start = clock_now_ns();
    copy_now(d, to, from, bytes);
    return 2 * (double)bytes / (double)(clock_now_ns() - start);
}

#define READ_ROUNDS 15u

static int readonly_cost(void *arg)
{
    static struct stat_series us[2], kernel[2], copy[2];
    const struct options *o = arg;
    struct device d;
    device_open(&d, o->device);
    const struct segment s = device_segment(&d, SEGMENT_PUBLISH, o->bytes);
    float *acc = device_alloc(&d, o->bytes);
    device_fill(d.k, s.base, o->bytes / 4, 1);
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
    const struct options *o = arg;
    struct device d;
    double us;
    device_open(&d, o->device);
    const struct segment s = device_segment(&d, SEGMENT_PUBLISH, UINT64_C(2) << 20);
    device_fill(d.k, s.base, s.bytes / 4, 1);
    float *at = map_again(&d, &s, CU_MEM_ACCESS_FLAGS_PROT_READ, &us);
    const CUresult queued = d.cuda->cuMemsetD8Async(device_address(at), 0, 4096, d.stream);
    const CUresult ran = d.cuda->cuStreamSynchronize(d.stream);
    const char *name = "?";
    d.cuda->cuGetErrorName(queued != CUDA_SUCCESS ? queued : ran, &name);
    if (queued == CUDA_SUCCESS && ran == CUDA_SUCCESS)
        return 1;
    printf("a write is refused: %s\n", name);
    return 0;
}

static int answer_readonly(const struct options *o)
{
    struct options copy = *o;
    if (process_wait(process_fork(readonly_cost, &copy)) != 0)
        return 1;
    const int code = process_wait(process_fork(readonly_write, &copy));
    if (code == 1)
        printf("a write is NOT refused\n");
    else if (code != 0)
        printf("a write ends the process (code %d)\n", code);
    return code == 1 ? 1 : 0;
}

/* -- The program ------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int (*fn)(const struct options *o);
    uint64_t bytes; /* by default */
} questions[] = {
    { "keep", answer_keep, UINT64_C(4) << 30 },
    { "queued", answer_queued, UINT64_C(16) << 30 },
    { "overlap", answer_overlap, UINT64_C(1) << 30 },
    { "readonly", answer_readonly, UINT64_C(1) << 30 },
};

int main(int argc, char **argv)
{
    static struct options o = { .tenths = 6 };
    static const struct flag table[] = {
        { "bytes", 0, FLAG_U64, "N", "of the memory in question", &o.bytes, 1, 0x1p53 },
        { "device", 0, FLAG_U32, "ORDINAL", "the GPU (0)", &o.device, 0, 1023 },
        { "tenths", 0, FLAG_U32, "N", "of a second: a phase of overlap (6)", &o.tenths, 0, 36000 },
    };
    const struct flags flags = {
        .usage = "gpu_probe keep|queued|overlap|readonly [flags]",
        .about = "What shardd depends on and only a GPU can tell; docs/gpu.md has the questions.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    const char *question;
    bench_flags(&flags, argc, argv, &question);
    for (size_t i = 0; question != NULL && i < ARRAY_SIZE(questions); i++) {
        if (strcmp(questions[i].name, question) != 0)
            continue;
        o.bytes = o.bytes > 0 ? o.bytes : questions[i].bytes;
        o.bytes = (o.bytes + (1u << 21) - 1) >> 21 << 21; /* whole granules and blocks */
        return questions[i].fn(&o);
    }
    flags_help(&flags, stderr);
    return 2;
}
