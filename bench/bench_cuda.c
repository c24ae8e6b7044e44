/* bench_cuda: what a GPU device does with its memory, beside the driver's own copies.
 *
 * All variants of a case run in turn, round by round, on the same arrays; ratios are per round. Our
 * side goes through kern_ops like any caller, queue and waiting included; a round queues OPS of
 * them before it waits, as a step does. Bytes are what the arguments name (kernels/cuda/args.h),
 * each array counted once a direction: AdamW with a bf16 publish 30 an element (p, m, v both ways,
 * grad, publish), accumulate 12 from fp32 and 10 from bf16, a device copy 2 a byte. A trail's bytes
 * are not counted: trail_over_none is what they cost.
 *
 *   cuda.copy            the driver's copy within the device: the ceiling here
 *   cuda.adamw.*, cuda.accumulate.*   and of_copy: the share of that ceiling's bandwidth
 *   cuda.unit.*          the same of a slice as large as a block of GPT-2's, UNIT_OPS in a row:
 *                        what launching costs
 *   cuda.blocks.N.*      with a trail, N blocks at most: fewer have smaller records, more have
 *                        more to do while one waits for a fence
 *   cuda.fetch.map       mapping another's publish segment, at attach: no fetch moves bytes then
 *   cuda.fetch.copy.*    a unit into a worker's slot by kern_ops' copy, over the driver's copy
 *   cuda.offload.*       from a host segment, pinned and not, over the driver's copy of its own
 *                        pinned memory
 *
 * Copies of a MiB and more are queued COPY_OPS at a time, of less one by one: those show what it
 * takes to be told. Arrays are far larger than the L2 cache, and the device's clocks are left to
 * the driver: the first rounds warm it up.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/bench.h"
#include "bench/device.h"
#include "kernels/cuda/device.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define OPS        4u /* queued before a round waits */
#define UNIT_OPS   14u
#define UNIT_ELEMS (UINT64_C(3456) * 2048) /* 7.1 M: 12 d^2 at d = 768 */
#define COPY_OPS   8u
#define WARMUPS    3u /* rounds not counted */
#define GB         1e9

struct options {
    uint64_t elems;
    uint32_t device, rounds;
    bool json;
};

struct bench {
    struct options o;
    uint64_t elems; /* of an operation, at most o.elems */
    uint64_t at;    /* its first one */
    uint32_t ops;   /* of a round, side by side where there is room */
    struct device d;
    struct segment state;  /* p, m, v, grad; then the trail */
    void *publish, *other; /* [elems] of 4 bytes each */
    uint64_t op;
};

static float *array(const struct bench *b, uint32_t index)
{
    return (float *)b->state.base + index * b->o.elems + b->at;
}

/* -- What is timed ------------------------------------------------------------------------------
 * Each queues one operation; done fires for the last of a round. */

enum {
    CASE_COPY,
    CASE_ADAMW,
    CASE_ADAMW_TRAIL,
    CASE_ADAMW_F32,
    CASE_ACC,
    CASE_ACC_TRAIL,
    CASE_ACC_SUM,
    CASE_ACC_BF16,
    CASE_ACC_FIRST,
    CASES
};

static const struct {
    const char *name;
    double bytes; /* of an element */
    int over;     /* the case without a trail, or -1 */
} cases[CASES] = {
    [CASE_COPY] = { "copy", 8, -1 },
    [CASE_ADAMW] = { "adamw.bf16", 30, -1 },
    [CASE_ADAMW_TRAIL] = { "adamw.bf16.trail", 30, CASE_ADAMW },
    [CASE_ADAMW_F32] = { "adamw.fp32", 32, -1 },
    [CASE_ACC] = { "accumulate.fp32", 12, -1 },
    [CASE_ACC_TRAIL] = { "accumulate.fp32.trail", 12, CASE_ACC },
    [CASE_ACC_SUM] = { "accumulate.fp32.sum", 12, -1 },
    [CASE_ACC_BF16] = { "accumulate.bf16", 10, -1 },
    [CASE_ACC_FIRST] = { "accumulate.first", 8, -1 },
};

static const struct kern_hyper hyper = {
    .lr = 1e-4f,
    .weight_decay = 0.1f,
    .beta1 = 0.9f,
    .beta2 = 0.999f,
    .eps = 1e-8f,
    .bias1 = 0.5f,
    .bias2 = 0.01f,
};

static struct kern_trail trail(struct bench *b, bool wanted)
{
    if (!wanted)
        return (struct kern_trail){ 0 };
    void *area = (uint8_t *)b->state.base + 4 * b->o.elems * sizeof(float);
    return (struct kern_trail){
        .area = area, .base = b->state.base, .first_chunk = b->at / KERN_CHUNK_ELEMS, .op = ++b->op
    };
}

static int queue_adamw(struct bench *b, int which, struct kern_done *done, struct shd_err *e)
{
    const struct kern_run run = { 0, b->elems, 0 };
    const struct kern_update u = {
        .kind = SPEC_ADAMW,
        .param = array(b, 0),
        .m = array(b, 1),
        .v = array(b, 2),
        .grad = array(b, 3),
        .grad_scale = 1,
        .publish = (float *)b->publish + b->at,
        .publish_dtype = which == CASE_ADAMW_F32 ? SHD_F32 : SHD_BF16,
        .elems = b->elems,
        .runs = &run,
        .run_count = 1,
        .hypers = &hyper,
        .hyper_count = 1,
        .trail = trail(b, which == CASE_ADAMW_TRAIL),
    };
    return kern_update(b->d.k, &u, done, e);
}

static int queue_accumulate(struct bench *b, int which, struct kern_sum *sum,
                            struct kern_done *done, struct shd_err *e)
{
    const struct kern_accumulate a = {
        .acc = array(b, 3),
        .grad = (float *)b->other + b->at,
        .grad_dtype = which == CASE_ACC_BF16 ? SHD_BF16 : SHD_F32,
        .elems = b->elems,
        .first = which == CASE_ACC_FIRST,
        .sum = which == CASE_ACC_SUM ? sum : NULL,
        .trail = trail(b, which == CASE_ACC_TRAIL),
    };
    return kern_accumulate(b->d.k, &a, done, e);
}

/* Seconds of one operation, of a round. */
static double run_case(struct bench *b, int which)
{
    static struct kern_sum sums[UNIT_OPS];
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    const uint64_t start = clock_now_ns();
    for (uint32_t i = 0; i < b->ops; i++) {
        struct kern_done *done = i + 1 == b->ops ? &w.done : NULL;
        int r;
        b->at = (i + 1) * b->elems <= b->o.elems ? i * b->elems : 0;
        sums[i] = (struct kern_sum){ .finite = true };
        fixsum_init(&sums[i].sum);
        if (which == CASE_COPY) {
            device_queue_copy(&b->d, (float *)b->publish + b->at, (float *)b->other + b->at,
                              b->elems * sizeof(float));
            r = SHD_OK;
        } else if (which <= CASE_ADAMW_F32) {
            r = queue_adamw(b, which, done, &e);
        } else {
            r = queue_accumulate(b, which, &sums[i], done, &e);
        }
        bench_check(r, &e);
    }
    if (which == CASE_COPY)
        device_wait(&b->d);
    else
        device_done(&w, cases[which].name);
    b->at = 0;
    return (double)(clock_now_ns() - start) * 1e-9 / b->ops;
}

static void figure(const struct bench *b, const char *name, const char *what, const char *unit,
                   const struct stat_series *s)
{
    char full[96];
    snprintf(full, sizeof full, "cuda.%s.%s", name, what);
    stat_print(b->o.json, full, unit, s);
    fflush(stdout);
}

/* All cases in turn, round by round. */
static void bench_cases(struct bench *b, const char *prefix)
{
    static struct stat_series rate[CASES], seconds[CASES];
    char name[64];
    memset(rate, 0, sizeof rate);
    memset(seconds, 0, sizeof seconds);
    for (uint32_t round = 0; round < b->o.rounds + WARMUPS; round++)
        for (uint32_t j = 0; j < CASES; j++) {
            const uint32_t which = (round + j) % CASES;
            const double s = run_case(b, (int)which);
            if (round < WARMUPS)
                continue;
            stat_add(&seconds[which], s);
            stat_add(&rate[which], cases[which].bytes * (double)b->elems / s / GB);
        }
    for (uint32_t i = 0; i < CASES; i++) {
        const struct stat_series of_copy = stat_ratio(&rate[i], &rate[CASE_COPY]);
        snprintf(name, sizeof name, "%s%s", prefix, cases[i].name);
        figure(b, name, "rate", "GB/s", &rate[i]);
        if (i != CASE_COPY)
            figure(b, name, "of_copy", "ratio", &of_copy);
        if (cases[i].over >= 0) {
            const struct stat_series cost = stat_ratio(&seconds[i], &seconds[cases[i].over]);
            figure(b, name, "over_none", "ratio", &cost);
        }
    }
}

static void bench_unit(struct bench *b)
{
    const struct bench whole = *b;
    b->elems = b->o.elems < UNIT_ELEMS ? b->o.elems : UNIT_ELEMS;
    b->ops = UNIT_OPS;
    bench_cases(b, "unit.");
    b->elems = whole.elems;
    b->ops = whole.ops;
}

/* Time kernels with a trail by their number of blocks: a look into the backend. */
static void bench_blocks(struct bench *b)
{
    static const struct {
        int which;
        enum cuda_fn fn;
    } tried[] = { { CASE_ADAMW_TRAIL, CUDA_ADAMW }, { CASE_ACC_TRAIL, CUDA_ACCUMULATE } };
    static struct stat_series ratio[ARRAY_SIZE(tried)][4];
    struct cuda_kernel *kernels = cuda_kern_of(b->d.k)->kernels;
    char name[64];
    for (uint32_t round = 0; round < b->o.rounds + 1; round++)
        for (uint32_t i = 0; i < ARRAY_SIZE(tried); i++) {
            const unsigned all = kernels[tried[i].fn].blocks_max;
            const double whole = run_case(b, tried[i].which);
            for (uint32_t part = 1; part < 4; part++) {
                kernels[tried[i].fn].blocks_max = all * part / 4 > 0 ? all * part / 4 : 1;
                const double s = run_case(b, tried[i].which);
                if (round > 0)
                    stat_add(&ratio[i][part], s / whole);
            }
            kernels[tried[i].fn].blocks_max = all;
        }
    for (uint32_t i = 0; i < ARRAY_SIZE(tried); i++)
        for (uint32_t part = 1; part < 4; part++) {
            snprintf(name, sizeof name, "blocks.%u.%s", kernels[tried[i].fn].blocks_max * part / 4,
                     cases[tried[i].which].name);
            figure(b, name, "time_over_all", "ratio", &ratio[i][part]);
        }
}

/* A small operation, queued and waited for. */
static void bench_small(struct bench *b)
{
    static struct stat_series us;
    for (uint32_t i = 0; i < b->o.rounds * 10 + WARMUPS && us.count < STAT_ROUNDS_MAX; i++) {
        struct kern_waiter w;
        kern_waiter_init(&w);
        const uint64_t start = clock_now_ns();
        device_add(&b->d, array(b, 3), b->other, 2048, false, &w.done);
        device_done(&w, "accumulate");
        if (i >= WARMUPS)
            stat_add(&us, (double)(clock_now_ns() - start) * 1e-3);
    }
    figure(b, "one_block", "round_trip", "us", &us);
}

/* -- Copies ------------------------------------------------------------------------------------ */

static uint32_t copy_ops(uint64_t bytes)
{
    return bytes < UINT64_C(1) << 20 ? 1 : COPY_OPS;
}

/* GB/s of copies of ours, and of the driver's. */
static double copy_ours(struct bench *b, void *to, const void *from, uint64_t bytes)
{
    const struct kern_copy c = { .to = to, .from = from, .bytes = bytes };
    const uint32_t ops = copy_ops(bytes);
    struct kern_waiter w;
    struct shd_err e;
    kern_waiter_init(&w);
    const uint64_t start = clock_now_ns();
    for (uint32_t i = 0; i < ops; i++)
        bench_check(kern_copy(b->d.k, &c, i + 1 == ops ? &w.done : NULL, &e), &e);
    device_done(&w, "copy");
    return (double)bytes * ops / (double)(clock_now_ns() - start);
}

static double copy_driver(struct bench *b, void *to, const void *from, uint64_t bytes)
{
    const uint32_t ops = copy_ops(bytes);
    const uint64_t start = clock_now_ns();
    for (uint32_t i = 0; i < ops; i++)
        device_queue_copy(&b->d, to, from, bytes);
    device_wait(&b->d);
    return (double)bytes * ops / (double)(clock_now_ns() - start);
}

struct pair { /* ours over the driver's */
    const char *name;
    void *to;
    const void *from;
    void *driver_to;
    const void *driver_from;
};

static void bench_copy(struct bench *b, const struct pair *p, uint64_t bytes)
{
    struct stat_series rate = { 0 }, driver = { 0 };
    char name[64];
    for (uint32_t i = 0; i < b->o.rounds + WARMUPS; i++) {
        double ours = 0, theirs = 0;
        if (i % 2 == 0)
            ours = copy_ours(b, p->to, p->from, bytes);
        theirs = copy_driver(b, p->driver_to, p->driver_from, bytes);
        if (i % 2 == 1)
            ours = copy_ours(b, p->to, p->from, bytes);
        if (i < WARMUPS)
            continue;
        stat_add(&rate, ours);
        stat_add(&driver, theirs);
    }
    const struct stat_series ratio = stat_ratio(&rate, &driver);
    snprintf(name, sizeof name, "%s.%" PRIu64 "KiB", p->name, bytes >> 10);
    figure(b, name, "rate", "GB/s", &rate);
    figure(b, name, "of_driver", "ratio", &ratio);
}

/* Sizes of units: a small one, GPT-2's block in bf16 and its embedding, all there is. */
static void bench_copies(struct bench *b, const struct pair *p, uint64_t bytes_max)
{
    static const uint64_t sizes[] = { UINT64_C(64) << 10, UINT64_C(2) << 20, UINT64_C(14) << 20,
                                      UINT64_C(128) << 20 };
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
        if (sizes[i] <= bytes_max)
            bench_copy(b, p, sizes[i]);
}

/* A host daemon's publish in a GPU worker's slot, and a GPU worker's gradient in its inbox. */
static void bench_offload(struct bench *b)
{
    const uint64_t room = b->o.elems * sizeof(float);
    const uint64_t bytes = room < UINT64_C(128) << 20 ? room : UINT64_C(128) << 20;
    struct segment host;
    struct shd_err e;
    void *pinned = device_pinned(&b->d, bytes);
    bench_check(segment_new("bench", SEGMENT_INBOX, bytes, &host, &e), &e);
    memset(host.base, 1, bytes);
    memset(pinned, 1, bytes);
    const struct pair plain = { "offload.in.unpinned", b->publish, host.base, b->other, pinned };
    const struct pair in = { "offload.in", b->publish, host.base, b->other, pinned };
    const struct pair out = { "offload.out", host.base, b->publish, pinned, b->other };
    bench_copies(b, &plain, bytes);
    if (b->d.k->ops->pin(b->d.k, host.base, bytes, /* readonly= */ false, &e) == SHD_OK) {
        bench_copies(b, &in, bytes);
        bench_copies(b, &out, bytes);
        b->d.k->ops->unpin(b->d.k, host.base);
    } else {
        fprintf(stderr, "bench_cuda: a segment cannot be pinned: %s\n", e.text);
    }
    device_check(&b->d, b->d.cuda->cuMemFreeHost(pinned), "free pinned memory");
    segment_close(&host);
}

/* Time an attach on the map path: import, map, set access. */
static void bench_map(struct bench *b)
{
    struct stat_series ms = { 0 };
    struct segment publish = device_segment(&b->d, SEGMENT_PUBLISH, b->o.elems * 2);
    for (uint32_t i = 0; i < b->o.rounds + WARMUPS; i++) {
        const int fd = dup(publish.fd);
        CHECK(fd >= 0);
        const uint64_t start = clock_now_ns();
        struct segment mapped = device_map(&b->d, fd, SEGMENT_PUBLISH, publish.bytes);
        const uint64_t end = clock_now_ns();
        b->d.k->ops->segment_close(b->d.k, &mapped);
        if (i >= WARMUPS)
            stat_add(&ms, (double)(end - start) * 1e-6);
    }
    b->d.k->ops->segment_close(b->d.k, &publish);
    figure(b, "fetch.map", "attach", "ms", &ms);
}

/* -- The program ------------------------------------------------------------------------------- */

static void start(struct bench *b)
{
    const uint64_t elems = b->o.elems, bytes = elems * sizeof(float);
    device_open(&b->d, b->o.device);
    const uint64_t trails = b->d.k->ops->trail_bytes(b->d.k, kern_trail_chunks(elems));
    b->state = device_segment(&b->d, SEGMENT_STATE, 4 * bytes + trails);
    b->publish = device_alloc(&b->d, bytes);
    b->other = device_alloc(&b->d, bytes);
    for (uint32_t i = 0; i < 4; i++)
        device_fill_random(b->d.k, array(b, i), elems, i + 1, i == 2 ? 0 : -1, 1);
    device_fill_random(b->d.k, b->other, elems, 5, -1, 1);
}

static void stop(struct bench *b)
{
    const uint64_t bytes = b->o.elems * sizeof(float);
    b->d.k->ops->release(b->d.k, b->publish, bytes);
    b->d.k->ops->release(b->d.k, b->other, bytes);
    b->d.k->ops->segment_close(b->d.k, &b->state);
    b->d.cuda->cuStreamDestroy(b->d.stream);
    b->d.k->ops->free(b->d.k);
}

static struct options parse(int argc, char **argv)
{
    static struct options o = { .elems = UINT64_C(256) << 20, .rounds = 15 };
    static const struct flag table[] = {
        { "elems", 0, FLAG_U64, "N", "of each array, 24 bytes (268435456); up to blocks of 2,048",
          &o.elems, 1, 0x1p33 },
        { "rounds", 0, FLAG_U32, "N", "of each figure (15)", &o.rounds, 1, 95 },
        { "device", 0, FLAG_U32, "ORDINAL", "the GPU (0)", &o.device, 0, 1023 },
        BENCH_JSON(&o.json),
    };
    const struct flags flags = {
        .usage = "bench_cuda [flags]",
        .about =
            "Times a GPU's kernels, its mapping and its copies beside the driver's own copies.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    bench_flags(&flags, argc, argv, NULL);
    o.elems = (o.elems + 2047) / 2048 * 2048;
    return o;
}

int main(int argc, char **argv)
{
    struct bench b = { .o = parse(argc, argv), .ops = OPS };
    b.elems = b.o.elems;
    start(&b);
    stat_print_head(b.o.json);
    bench_cases(&b, "");
    bench_unit(&b);
    bench_blocks(&b);
    bench_small(&b);
    bench_map(&b);
    const struct pair within = { "fetch.copy", b.publish, b.other, b.publish, b.other };
    bench_copies(&b, &within, b.o.elems * sizeof(float));
    bench_offload(&b);
    stop(&b);
    return 0;
}
