/* bench_update: nanoseconds per parameter of accumulation and AdamW, beside the plain loop and
 * the memory's own limit.
 *
 * All variants of a case run in turn, round by round, on the same arrays; ratios are per round, so
 * that what disturbs the machine disturbs both sides. Our side goes through kern_ops like any
 * caller, queue and waiting included. `of_limit` is the limit's time over ours: 1 is at the limit.
 * The limit is the variant in update_rivals.c with the lowest median.
 *
 * `adamw.int8` keeps its moments in 8 bits and publishes bf16; its plain loop is that of fp32
 * moments, its limit has its own streams.
 *
 * `measured_over_none` is what an update costs that is measured (kern_change), which each 8th is.
 * `trail_over_none` is what crash-exactness costs: the same operation with a trail over without
 * one, in pairs of their own, each pair in the other order than the last. `small_over_huge` is what
 * 4 KiB pages cost: likewise, both with a trail, on arrays in such pages and in segments' huge
 * ones.
 */
#include <fcntl.h>
#include <immintrin.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/bench.h"
#include "bench/device.h"
#include "bench/update_rivals.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/trail.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"

#define THREADS_MAX 64u
#define WARMUPS     1u /* rounds not counted */

enum { VARIANT_OURS, VARIANT_PLAIN, VARIANT_LIMIT, VARIANTS = VARIANT_LIMIT + LIMIT_VARIANTS };

static const char *const case_names[CASES] = { "adamw.fp32", "adamw.bf16", "adamw.int8",
                                               "accumulate", "accumulate_sumsq" };

static bool is_adamw(enum bench_case which)
{
    return which <= CASE_ADAMW_INT8;
}

struct options {
    uint64_t elems;
    uint32_t rounds, trail_pairs;
    uint32_t threads_max;
    bool json, verbose, small, pages, pin;
    const char *isa, *against;
};

/* Threads for the rivals: each waits at the gate, does its part, waits at the exit. */
struct crew {
    pthread_t id[THREADS_MAX];
    uint32_t threads;
    pthread_barrier_t begin, end;
    rival_fn *fn; /* NULL: leave */
    const struct bench_arrays *arrays;
    const struct kern_hyper *hyper;
    uint64_t elems;
};
struct crew_arg {
    struct crew *crew;
    uint32_t index;
};

static void crew_part(const struct crew *c, uint32_t index)
{
    const struct slice s = layout_slice(c->elems, index, c->threads);
    c->fn(c->arrays, c->hyper, s.first_elem, s.elems);
}

static void *crew_main(void *p)
{
    const struct crew_arg arg = *(struct crew_arg *)p;
    free(p);
    _mm_setcsr(_mm_getcsr() | 0x8040); /* FTZ | DAZ, as in the compute threads */
    for (;;) {
        pthread_barrier_wait(&arg.crew->begin);
        if (arg.crew->fn == NULL)
            return NULL;
        crew_part(arg.crew, arg.index);
        pthread_barrier_wait(&arg.crew->end);
    }
}

/* The index-th of the CPUs in allowed, as the kernels' pin does. */
static void pin_thread(pthread_t id, const cpu_set_t *allowed, uint32_t index)
{
    uint32_t at = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, allowed) || at++ != index)
            continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        CHECK(pthread_setaffinity_np(id, sizeof one, &one) == 0);
    }
}

static void crew_start(struct crew *c, uint32_t threads, bool pin)
{
    cpu_set_t allowed;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    c->threads = threads;
    CHECK(pthread_barrier_init(&c->begin, NULL, threads + 1) == 0);
    CHECK(pthread_barrier_init(&c->end, NULL, threads + 1) == 0);
    for (uint32_t i = 0; i < threads; i++) {
        struct crew_arg *arg = malloc(sizeof *arg);
        CHECK(arg != NULL);
        *arg = (struct crew_arg){ c, i };
        CHECK(pthread_create(&c->id[i], NULL, crew_main, arg) == 0);
        if (pin)
            pin_thread(c->id[i], &allowed, i);
    }
}

static void crew_run(struct crew *c, rival_fn *fn)
{
    c->fn = fn;
    pthread_barrier_wait(&c->begin);
    pthread_barrier_wait(&c->end);
}

static void crew_stop(struct crew *c)
{
    c->fn = NULL;
    pthread_barrier_wait(&c->begin);
    for (uint32_t i = 0; i < c->threads; i++)
        pthread_join(c->id[i], NULL);
    pthread_barrier_destroy(&c->begin);
    pthread_barrier_destroy(&c->end);
}

/* Between arrays that would else lie a power of two apart: AMD's L1 caches choose a way by a hash
 * of the address, which 2^27 bytes leave as it is, and five streams then drive each other out
 * (AdamW on a Zen 3: 1.7 ns instead of 0.8). Slices in a daemon's state lie wherever the ones
 * before end. */
#define GAP_BYTES (UINT64_C(64) * 1024)

/* Memory as daemons have it: a segment, in huge pages where the host has them. small: a memfd in
 * 4 KiB pages. */
static float *map_floats(uint64_t elems, bool small, uint64_t *huge_bytes)
{
    const size_t bytes = elems * sizeof(float) + GAP_BYTES;
    if (!small) {
        struct segment s;
        struct shd_err e;
        bench_check(segment_new("bench", SEGMENT_STATE, bytes, &s, &e), &e);
        *huge_bytes += s.huge_bytes;
        return s.base;
    }
    const int fd = memfd_create("bench", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    CHECK(base != MAP_FAILED);
    close(fd);
    return base;
}

static struct bench_arrays arrays_new(uint64_t elems, bool small, uint64_t *huge_bytes)
{
    return (struct bench_arrays){ .p = map_floats(elems, small, huge_bytes),
                                  .m = map_floats(elems, small, huge_bytes),
                                  .v = map_floats(elems, small, huge_bytes),
                                  .g = map_floats(elems, small, huge_bytes),
                                  .out = map_floats(elems, small, huge_bytes) };
}

static void arrays_fill(struct kern *k, const struct bench_arrays *a, uint64_t elems)
{
    device_fill_random(k, a->p, elems, 1, -1, 1);
    device_fill_random(k, a->m, elems, 2, -1, 1);
    device_fill_random(k, a->v, elems, 3, 0, 1);
    device_fill_random(k, a->g, elems, 4, -1, 1);
}

static const struct kern_hyper hyper = {
    .lr = 1e-4f,
    .weight_decay = 0.1f,
    .beta1 = 0.9f,
    .beta2 = 0.999f,
    .eps = 1e-8f,
    .bias1 = 0.5f,
    .bias2 = 0.01f,
};

/* A trail for the arrays, its memory and theirs apart. */
static struct kern_trail trail_new(const struct bench_arrays *a, uint64_t elems)
{
    struct kern_trail t = { .op = 1, .base = a->p };
    t.area = aligned_alloc(128, KERN_TRAIL_BYTES);
    t.chunks = calloc(2 * kern_trail_chunks(elems), sizeof *t.chunks); /* and an average's */
    CHECK(t.area != NULL && t.chunks != NULL);
    memset(t.area, 0, KERN_TRAIL_BYTES);
    t.base = (uintptr_t)a->m < (uintptr_t)t.base ? a->m : t.base;
    t.base = (uintptr_t)a->v < (uintptr_t)t.base ? a->v : t.base;
    return t;
}

static void trail_free(struct kern_trail *t)
{
    free(t->area);
    free((void *)t->chunks);
}

/* One of two that are compared. */
struct side {
    struct kern *kern;
    const struct bench_arrays *arrays;
    bool trail;
    float *average; /* of the parameters, beside them; NULL: none */
    bool measured;  /* what an update comes to */
};

/* side: NULL, or what goes with an update. */
static int run_ours(struct kern *k, const struct bench_arrays *a, uint64_t elems,
                    enum bench_case which, struct kern_trail trail, const struct side *side,
                    struct shd_err *e)
{
    struct kern_change change = { .update.finite = true, .weight.finite = true, .whole = true };
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    const struct kern_run run = { 0, elems, 0 };
    struct kern_waiter w;
    kern_waiter_init(&w);
    int r;
    if (is_adamw(which)) {
        const struct kern_update u = {
            .kind = SPEC_ADAMW,
            .param = a->p,
            .m = a->m,
            .v = a->v,
            .int8 = which == CASE_ADAMW_INT8,
            .grad = a->g,
            .grad_scale = 1,
            .publish = a->out,
            .publish_dtype = which == CASE_ADAMW_F32 ? SHD_F32 : SHD_BF16,
            .elems = elems,
            .runs = &run,
            .run_count = 1,
            .hypers = &hyper,
            .hyper_count = 1,
            .trail = trail,
            .ema = { side != NULL ? side->average : NULL, 0.001f, kern_trail_chunks(elems) },
            .change = side != NULL && side->measured ? &change : NULL,
        };
        r = kern_update(k, &u, &w.done, e);
    } else {
        const struct kern_accumulate c = {
            .acc = a->p,
            .grad = a->g,
            .grad_dtype = SHD_F32,
            .elems = elems,
            .sum = which == CASE_ACCUMULATE_SUM ? &sum : NULL,
            .trail = trail,
        };
        r = kern_accumulate(k, &c, &w.done, e);
    }
    return r == SHD_OK ? kern_wait(&w) : r;
}

/* One round: every variant once, starting with another one each time. */
static void run_round(struct kern *k, struct crew *c, const struct rivals *rivals,
                      enum bench_case which, uint32_t round, struct stat_series *ns)
{
    for (uint32_t j = 0; j < VARIANTS; j++) {
        const uint32_t variant = (round + j) % VARIANTS;
        const uint64_t start = clock_now_ns();
        if (variant == VARIANT_OURS) {
            struct shd_err e;
            CHECK(run_ours(k, c->arrays, c->elems, which, (struct kern_trail){ 0 }, NULL, &e) ==
                  SHD_OK);
        } else if (variant == VARIANT_PLAIN) {
            crew_run(c, rivals->plain->fn[which]);
        } else {
            crew_run(c, rivals->limit[variant - VARIANT_LIMIT].fn[which]);
        }
        const double ns_per_param = (double)(clock_now_ns() - start) / (double)c->elems;
        if (round >= WARMUPS)
            stat_add(&ns[variant], ns_per_param);
    }
}

static void print_figure(const struct options *o, enum bench_case which, uint32_t threads,
                         const char *side, const char *what, const char *unit,
                         const struct stat_series *s)
{
    char name[96];
    snprintf(name, sizeof name, "update.%s%s.t%" PRIu32 ".%s", side, case_names[which], threads,
             what);
    stat_print(o->json, name, unit, s);
}

static void report(const struct options *o, const struct rivals *rivals, enum bench_case which,
                   uint32_t threads, const struct stat_series *ns)
{
    uint32_t best = VARIANT_LIMIT;
    for (uint32_t i = VARIANT_LIMIT; i < VARIANTS; i++) {
        if (stat_summarize(&ns[i]).median < stat_summarize(&ns[best]).median)
            best = i;
        if (o->verbose) {
            char what[64];
            snprintf(what, sizeof what, "%s.ns_per_param", rivals->limit[i - VARIANT_LIMIT].name);
            print_figure(o, which, threads, "limit.", what, "ns", &ns[i]);
        }
    }
    const struct stat_series of_limit = stat_ratio(&ns[best], &ns[VARIANT_OURS]);
    const struct stat_series of_plain = stat_ratio(&ns[VARIANT_PLAIN], &ns[VARIANT_OURS]);
    print_figure(o, which, threads, "", "ns_per_param", "ns", &ns[VARIANT_OURS]);
    print_figure(o, which, threads, "plain.", "ns_per_param", "ns", &ns[VARIANT_PLAIN]);
    print_figure(o, which, threads, "limit.", "ns_per_param", "ns", &ns[best]);
    print_figure(o, which, threads, "", "over_plain", "ratio", &of_plain);
    print_figure(o, which, threads, "", "of_limit", "ratio", &of_limit);
    fflush(stdout);
}

/* sides[1] over sides[0], in pairs, as the figure `ratio`; and sides[1] alone. */
static void bench_pairs(const struct options *o, const struct side sides[2], enum bench_case which,
                        uint32_t threads, const char *name, const char *ratio)
{
    static struct stat_series ns[2];
    memset(ns, 0, sizeof ns);
    struct kern_trail trails[2];
    for (unsigned i = 0; i < 2; i++) {
        trails[i] = trail_new(sides[i].arrays, o->elems);
        if (sides[i].average != NULL && (uintptr_t)sides[i].average < (uintptr_t)trails[i].base)
            trails[i].base = sides[i].average;
    }
    for (uint32_t i = 0; i < 2 * (o->trail_pairs + WARMUPS); i++) {
        const unsigned at = (i + i / 2) % 2;
        trails[at].op++;
        struct shd_err e;
        const uint64_t start = clock_now_ns();
        CHECK(run_ours(sides[at].kern, sides[at].arrays, o->elems, which,
                       sides[at].trail ? trails[at] : (struct kern_trail){ 0 }, &sides[at],
                       &e) == SHD_OK);
        const double ns_per_param = (double)(clock_now_ns() - start) / (double)o->elems;
        if (i >= 2 * WARMUPS)
            stat_add(&ns[at], ns_per_param);
    }
    trail_free(&trails[0]);
    trail_free(&trails[1]);
    const struct stat_series cost = stat_ratio(&ns[1], &ns[0]);
    print_figure(o, which, threads, name, "ns_per_param", "ns", &ns[1]);
    print_figure(o, which, threads, "", ratio, "ratio", &cost);
    fflush(stdout);
}

/* An operation of one block, queued and waited for: what a small one costs. */
static void bench_small(const struct options *o, struct kern *k, const struct bench_arrays *arrays,
                        uint32_t threads)
{
    static struct stat_series us;
    us.count = 0;
    cpu_set_t allowed;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    if (o->pin) /* the caller away from the leader, where there is room */
        pin_thread(pthread_self(), &allowed, (uint32_t)CPU_COUNT(&allowed) - 1);
    for (uint32_t i = 0; i < STAT_ROUNDS_MAX; i++) {
        struct shd_err e;
        const uint64_t start = clock_now_ns();
        CHECK(run_ours(k, arrays, SHD_BLOCK_ELEMS, CASE_ACCUMULATE, (struct kern_trail){ 0 }, NULL,
                       &e) == SHD_OK);
        stat_add(&us, (double)(clock_now_ns() - start) * 1e-3);
    }
    CHECK(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
    char name[64];
    snprintf(name, sizeof name, "update.one_block.t%" PRIu32 ".round_trip", threads);
    stat_print(o->json, name, "us", &us);
}

/* What a device that chooses has found, as "update.choice.WORK.t1.ISA_over_OTHER". */
static void print_choices(const struct options *o, struct kern *k, uint32_t threads)
{
    uint32_t count;
    const struct kern_choice *made = k->ops->choices(k, &count);
    for (uint32_t i = 0; i < count; i++) {
        char name[128];
        snprintf(name, sizeof name, "update.choice.%s.t%" PRIu32 ".%s_over_%s", made[i].work,
                 threads, made[i].isa, made[i].other);
        for (char *at = strchr(name, ' '); at != NULL; at = strchr(at, ' '))
            *at = '_';
        static struct stat_series ratio;
        ratio.count = 0;
        stat_add(&ratio, made[i].ratio);
        stat_print(o->json, name, "ratio", &ratio);
    }
}

static void bench_threads(const struct options *o, const struct rivals *rivals,
                          const struct bench_arrays *arrays, const struct bench_arrays *small,
                          uint32_t threads)
{
    const struct kern_config config = { .threads = threads, .pin = o->pin, .isa = rivals->isa };
    struct shd_err e;
    struct kern *k;
    bench_check(kern_cpu_new(&config, &k, &e), &e);
    struct kern *other = NULL;
    const bool chooses = o->against != NULL && strcmp(o->against, "auto") == 0;
    const struct kern_config against = { .threads = threads,
                                         .pin = o->pin,
                                         .isa = chooses ? NULL : o->against };
    if (o->against != NULL)
        bench_check(kern_cpu_new(&against, &other, &e), &e);
    struct crew crew = { .arrays = arrays, .hyper = &hyper, .elems = o->elems };
    crew_start(&crew, threads, o->pin);
    uint64_t huge_bytes = 0;
    float *average = map_floats(o->elems, false, &huge_bytes);
    for (enum bench_case which = 0; which < CASES; which++) {
        static struct stat_series ns[VARIANTS];
        memset(ns, 0, sizeof ns);
        arrays_fill(k, arrays, o->elems);
        for (uint32_t round = 0; o->rounds > 0 && round < o->rounds + WARMUPS; round++)
            run_round(k, &crew, rivals, which, round, ns);
        if (o->rounds > 0)
            report(o, rivals, which, threads, ns);
        bench_pairs(o,
                    (const struct side[]){ { k, arrays, false, NULL, false },
                                           { k, arrays, true, NULL, false } },
                    which, threads, "trail.", "trail_over_none");
        if (is_adamw(which))
            bench_pairs(o,
                        (const struct side[]){ { k, arrays, true, NULL, false },
                                               { k, arrays, true, average, false } },
                        which, threads, "ema.", "ema_over_none");
        if (is_adamw(which))
            bench_pairs(o,
                        (const struct side[]){ { k, arrays, true, NULL, false },
                                               { k, arrays, true, NULL, true } },
                        which, threads, "measured.", "measured_over_none");
        if (other != NULL)
            bench_pairs(o,
                        (const struct side[]){ { k, arrays, true, NULL, false },
                                               { other, arrays, true, NULL, false } },
                        which, threads, "against.", "against_over_isa");
        if (small != NULL) {
            arrays_fill(k, small, o->elems);
            bench_pairs(o,
                        (const struct side[]){ { k, arrays, true, NULL, false },
                                               { k, small, true, NULL, false } },
                        which, threads, "small.", "small_over_huge");
        }
    }
    crew_stop(&crew);
    bench_small(o, k, arrays, threads);
    k->ops->free(k);
    if (other == NULL)
        return;
    print_choices(o, other, threads);
    other->ops->free(other);
}

static struct options parse(int argc, char **argv)
{
    static struct options o = {
        .elems = UINT64_C(32) << 20, .rounds = 11, .trail_pairs = 21, .threads_max = 2
    };
    static bool no_pin;
    static const struct flag table[] = {
        { "elems", 0, FLAG_U64, "N",
          "of each array (33554432: 640 MiB of arrays); up to blocks of 2,048", &o.elems, 1,
          0x1p40 },
        { "rounds", 0, FLAG_U32, "N", "of each figure (11); 0: with a trail and without alone",
          &o.rounds, 0, STAT_ROUNDS_MAX - WARMUPS },
        { "trail-pairs", 0, FLAG_U32, "N", "of runs with a trail and without (21)", &o.trail_pairs,
          1, STAT_ROUNDS_MAX - WARMUPS },
        { "threads", 0, FLAG_U32, "MAX", "1, 2, 4 ... up to so many (2)", &o.threads_max, 1,
          THREADS_MAX },
        { "isa", 0, FLAG_STRING, "NAME", "instruction set (the widest here)", &o.isa, 0, 0 },
        { "against", 0, FLAG_STRING, "NAME",
          "time this instruction set over --isa, too; auto: those that a daemon finds quicker",
          &o.against, 0, 0 },
        { "no-pin", 0, FLAG_BOOL, NULL, "leave threads to the scheduler", &no_pin, 0, 0 },
        { "small-pages", 0, FLAG_BOOL, NULL, "arrays in 4 KiB pages, not in segments", &o.small, 0,
          0 },
        { "pages", 0, FLAG_BOOL, NULL,
          "time arrays in 4 KiB pages beside those of segments; twice the memory", &o.pages, 0, 0 },
        { "verbose", 0, FLAG_BOOL, NULL, "show every variant of the limit", &o.verbose, 0, 0 },
        BENCH_JSON(&o.json),
    };
    const struct flags flags = {
        .usage = "bench_update [flags]",
        .about = "Times accumulation and AdamW against the plain loop and the memory's limit, and "
                 "with a\ntrail against without one.",
        .table = table,
        .count = ARRAY_SIZE(table),
    };
    bench_flags(&flags, argc, argv, NULL);
    o.elems = layout_align(o.elems, SHD_BLOCK_ELEMS);
    o.pin = !no_pin;
    return o;
}

static const struct rivals *rivals_find(const char *isa)
{
    const struct rivals *const all[] = { &rivals_scalar, &rivals_avx2, &rivals_avx512 };
    for (const char *const *here = kern_cpu_isas(); isa == NULL && *here != NULL; here++)
        if (here[1] == NULL)
            isa = *here;
    CHECK(isa != NULL);
    for (size_t i = 0; i < ARRAY_SIZE(all); i++)
        if (strcmp(all[i]->isa, isa) == 0)
            return all[i];
    fprintf(stderr, "bench_update: no isa '%s'\n", isa);
    exit(2);
}

int main(int argc, char **argv)
{
    const struct options o = parse(argc, argv);
    const struct rivals *rivals = rivals_find(o.isa);
    uint64_t huge = 0, none = 0;
    const struct bench_arrays arrays = arrays_new(o.elems, o.small, &huge);
    struct bench_arrays small;
    if (o.pages)
        small = arrays_new(o.elems, true, &none);
    if (!o.json)
        printf("bench_update: %" PRIu64 " elements, %" PRIu32 " rounds, isa %s, %s pages%s\n",
               o.elems, o.rounds, rivals->isa, huge > 0 ? "huge" : "4 KiB",
               o.pin ? ", pinned" : "");
    stat_print_head(o.json);
    for (uint32_t threads = 1; threads <= o.threads_max; threads *= 2)
        bench_threads(&o, rivals, &arrays, o.pages ? &small : NULL, threads);
    return 0;
}
