/* The host device as a queue: order, completion, limits, argument checks; and hashing. */
#include <errno.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/queue.h"
#include "proto/base/sys.h"
#include "tests/lib/child.h"
#include "tests/lib/kern_util.h"

TEST(isas_start_with_scalar_and_name_their_devices)
{
    const char *const *isas = kern_cpu_isas();
    EXPECT_STR(isas[0], "scalar");
    for (; *isas != NULL; isas++) {
        char want[32];
        snprintf(want, sizeof want, "cpu-%s", *isas);
        struct kern *k = device_new(*isas, 1);
        EXPECT_STR(k->ops->name, want);
        k->ops->free(k);
    }
    struct kern *best = device_new(NULL, 1);
    EXPECT_STR(best->ops->name + strlen("cpu-"), isas[-1]);
    best->ops->free(NULL); /* no-op */
    best->ops->free(best);
}

TEST(new_refuses_what_it_cannot_do)
{
    struct shd_err e = { 0 };
    struct kern *k = NULL;
    EXPECT_STATUS(kern_cpu_new(&(struct kern_config){ .threads = 0 }, &k, &e), SHD_EINVAL);
    EXPECT_STATUS(kern_cpu_new(&(struct kern_config){ .threads = 257 }, &k, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "257");
    EXPECT_STATUS(kern_cpu_new(&(struct kern_config){ .threads = 1, .isa = "mmx" }, &k, &e),
                  SHD_EINVAL);
    EXPECT_HAS(e.text, "mmx");
    EXPECT(k == NULL);
}

static int fail_alloc(enum sys_kind kind)
{
    return kind == SYS_ALLOC ? ENOMEM : 0;
}

TEST(new_without_memory_is_an_error)
{
    struct shd_err e = { 0 };
    struct kern *k = NULL;
    sys_fault = fail_alloc;
    const int r = kern_cpu_new(&(struct kern_config){ .threads = 2 }, &k, &e);
    sys_fault = NULL;
    EXPECT_STATUS(r, SHD_ENOMEM);
    EXPECT(k == NULL);
}

TEST(pinned_threads_need_a_cpu_each)
{
    cpu_set_t allowed;
    EXPECT(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    const uint32_t cpus = (uint32_t)CPU_COUNT(&allowed);
    if (cpus > 255)
        SKIP("%" PRIu32 " CPUs, more than a device may have threads", cpus);
    struct shd_err e = { 0 };
    struct kern *k = NULL;
    EXPECT_OK(kern_cpu_new(&(struct kern_config){ .threads = cpus, .pin = true }, &k, &e), &e);
    k->ops->free(k);
    k = NULL;
    EXPECT_STATUS(kern_cpu_new(&(struct kern_config){ .threads = cpus + 1, .pin = true }, &k, &e),
                  SHD_EINVAL);
    EXPECT(k == NULL);
}

/* All compute threads of this process: each has one CPU. Returns how many CPUs they have. */
static int pinned_cpus(uint32_t threads)
{
    cpu_set_t all, sets[4];
    CPU_ZERO(&all);
    for (uint32_t index = 0; index < threads; index++) {
        char name[32];
        snprintf(name, sizeof name, "shd-kern-%" PRIu32, index);
        const uint32_t count = threads_cpus(getpid(), name, sets, ARRAY_SIZE(sets));
        EXPECT(count > 0);
        for (uint32_t i = 0; i < count; i++) {
            EXPECT_EQ(CPU_COUNT(&sets[i]), 1);
            CPU_OR(&all, &all, &sets[i]);
        }
    }
    return CPU_COUNT(&all);
}

static struct kern *pinned_new(uint32_t threads, uint32_t first)
{
    struct shd_err e = { 0 };
    struct kern *k = NULL;
    const struct kern_config config = { .threads = threads, .pin = true, .pin_first = first };
    EXPECT_OK(kern_cpu_new(&config, &k, &e), &e);
    return k;
}

TEST(pinned_devices_share_no_cpu_while_there_are_enough)
{
    cpu_set_t allowed, leaders[2];
    EXPECT(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    const uint32_t cpus = (uint32_t)CPU_COUNT(&allowed);
    if (cpus < 2 || cpus > 255)
        SKIP("%" PRIu32 " CPUs", cpus);
    struct kern *a = pinned_new(cpus / 2, 0), *b = pinned_new(cpus / 2, cpus / 2);
    EXPECT_EQ(pinned_cpus(cpus / 2), cpus / 2 * 2);
    a->ops->free(a);
    b->ops->free(b);

    /* There are not: both have all, and yet other leaders. */
    a = pinned_new(cpus, 0), b = pinned_new(cpus, cpus);
    EXPECT_EQ(pinned_cpus(cpus), cpus);
    EXPECT_EQ(threads_cpus(getpid(), "shd-kern-0", leaders, 2), 2);
    EXPECT(!CPU_EQUAL(&leaders[0], &leaders[1]));
    a->ops->free(a);
    b->ops->free(b);
    a = pinned_new(1, UINT32_MAX); /* of whatever number */
    EXPECT_EQ(pinned_cpus(1), 1);
    a->ops->free(a);
}

/* Each op reads what the one before wrote, sizes alternating between shared and alone. */
static void check_order(struct kern *k, const char *label, void *arg)
{
    (void)arg;
    enum { OPS = 200, ELEMS = 100 * BLOCK };
    static float acc[ELEMS], one[ELEMS];
    static struct record records[OPS];
    memset(records, 0, sizeof records);
    record_count = 0;
    struct shd_err e = { 0 };
    const struct kern_fill ones = { one, ELEMS, 0, 0, KERN_FILL_CONST, 1, 0 };
    const struct kern_fill zeros = { acc, ELEMS, 0, 0, KERN_FILL_CONST, 0, 0 };
    EXPECT_OK(kern_fill(k, &ones, NULL, &e), &e);
    EXPECT_OK(kern_fill(k, &zeros, NULL, &e), &e);
    for (uint32_t i = 0; i < OPS; i++) {
        /* One more everywhere, or only in the first block. */
        const struct kern_accumulate a = {
            .acc = acc, .grad = one, .grad_dtype = SHD_F32, .elems = i % 2 == 0 ? ELEMS : BLOCK
        };
        records[i].done.fn = record_done;
        EXPECT_OK(kern_accumulate(k, &a, &records[i].done, &e), &e);
    }
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ .kind = KERN_FILL_CONST }));
    for (uint32_t i = 0; i < OPS; i++)
        if (records[i].fired != 1 || records[i].order != i || records[i].status != SHD_OK)
            FAIL("%s: op %" PRIu32 " fired %" PRIu32 " times, at %" PRIu32, label, i,
                 records[i].fired, records[i].order);
    EXPECT_NEAR(acc[0], OPS, 0);
    EXPECT_NEAR(acc[ELEMS - 1], OPS / 2.0, 0);
}

TEST(ops_run_in_queueing_order_and_report_once)
{
    devices_each(check_order, NULL);
}

struct blocker {
    struct kern_done done;
    sem_t reached, go_on;
};

static void blocker_done(struct kern_done *done, int status)
{
    (void)status;
    struct blocker *b = (struct blocker *)(void *)done;
    sem_post(&b->reached);
    while (sem_wait(&b->go_on) != 0)
        ;
}

static void check_full(struct kern *k, const char *label, void *arg)
{
    (void)label, (void)arg;
    static struct record records[KERN_QUEUE_MAX];
    memset(records, 0, sizeof records);
    record_count = 0;
    struct blocker b = { .done = { blocker_done } };
    sem_init(&b.reached, 0, 0);
    sem_init(&b.go_on, 0, 0);
    float x[8];
    const struct kern_fill a = { x, 8, 0, 0, KERN_FILL_CONST, 1, 0 };
    struct shd_err e = { 0 };
    EXPECT_OK(kern_fill(k, &a, &b.done, &e), &e);
    while (sem_wait(&b.reached) != 0)
        ;
    for (uint32_t i = 0; i < KERN_QUEUE_MAX; i++) {
        records[i].done.fn = record_done;
        EXPECT_OK(kern_fill(k, &a, &records[i].done, &e), &e);
    }
    struct record refused = { .done = { record_done } };
    EXPECT_STATUS(kern_fill(k, &a, &refused.done, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "1024");
    sem_post(&b.go_on);
    struct kern_waiter w;
    do {
        kern_waiter_init(&w);
    } while (kern_fill(k, &a, &w.done, &e) == SHD_EBUSY);
    EXPECT_STATUS(kern_wait(&w), SHD_OK);
    for (uint32_t i = 0; i < KERN_QUEUE_MAX; i++)
        EXPECT_EQ(records[i].fired, 1);
    EXPECT_EQ(refused.fired, 0);
    sem_destroy(&b.reached);
    sem_destroy(&b.go_on);
}

static int run_here(struct kern *k, const struct kern_accumulate *a)
{
    const struct kern_op op = { .kind = KERN_ACCUMULATE, .accumulate = *a };
    struct shd_err e = { 0 };
    int status = SHD_EINTERNAL;
    const int r = k->ops->run_here(k, &op, &status, &e);
    EXPECT(r == SHD_PENDING || status == (r == SHD_OK ? SHD_OK : SHD_EINTERNAL));
    return r;
}

/* Denormals too: flushed as on a compute thread, and not in what the caller computes next. Two
 * chunks where there is one such thread, which could not share them out. */
static void check_here(struct kern *k, const char *label, void *arg)
{
    enum { FEW = 2 * BLOCK, CHUNKS = 64 * BLOCK, MANY = CHUNKS + BLOCK };
    static float acc[MANY], want[MANY], grad[MANY];
    const bool alone = ((struct cpu_kern *)k)->thread_count == 1;
    struct kern_sum sum, want_sum;
    (void)arg;
    fill_awkward(acc, MANY, true, 3);
    fill_awkward(grad, MANY, true, 4);
    memcpy(want, acc, sizeof acc);
    struct kern_accumulate a = { acc,   grad, SHD_F32,         CODEC_NONE, alone ? CHUNKS : FEW,
                                 false, &sum, { .area = NULL } };
    struct kern_accumulate other = a;
    other.acc = want;
    other.sum = &want_sum;
    sum = want_sum = (struct kern_sum){ .finite = true };
    EXPECT_STATUS(run_here(k, &a), SHD_OK);
    EXPECT_RUNS(accumulate, k, &other);
    EXPECT_SAME_FLOATS(acc, want, MANY, label);
    EXPECT(sum.finite == want_sum.finite);
    EXPECT(memcmp(sum.sum.limb, want_sum.sum.limb, sizeof sum.sum.limb) == 0);
    volatile float tiny = 0x1p-149f;
    EXPECT(tiny * 1 > 0);

    a.elems = alone ? MANY : CHUNKS; /* nothing is done of what takes long, */
    EXPECT_STATUS(run_here(k, &a), SHD_PENDING);
    a.elems = 1; /* or is wrong */
    EXPECT_STATUS(run_here(k, &a), SHD_ERANGE);
    EXPECT_SAME_FLOATS(acc, want, MANY, label);
}

TEST(few_elements_are_summed_on_the_callers_thread)
{
    devices_each(check_here, NULL);
}

/* Whoever gives several is to hear of the first one's end before the last has begun. */
static void check_update_elsewhere(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 32 * BLOCK };
    static float param[ELEMS], m[ELEMS], grad[ELEMS], publish[ELEMS];
    const struct kern_run run = { 0, ELEMS, 0 };
    const struct kern_hyper hyper = { .lr = 0.5f };
    struct kern_op op = { .kind = KERN_UPDATE,
                          .update = { .kind = SPEC_SGD,
                                      .param = param,
                                      .m = m,
                                      .grad = grad,
                                      .grad_scale = 1,
                                      .publish = publish,
                                      .publish_dtype = SHD_F32,
                                      .elems = ELEMS,
                                      .runs = &run,
                                      .run_count = 1,
                                      .hypers = &hyper,
                                      .hyper_count = 1 } };
    struct shd_err e = { 0 };
    int status = SHD_EINTERNAL;
    (void)label, (void)arg;
    grad[0] = 1;
    param[0] = 0;
    EXPECT_STATUS(k->ops->run_here(k, &op, &status, &e), SHD_PENDING);
    EXPECT(param[0] == 0);
}

TEST(long_updates_are_not_done_on_the_callers_thread)
{
    devices_each(check_update_elsewhere, NULL);
}

struct held {
    struct kern_done done;
    sem_t begun, go;
};

static void hold(struct kern_done *done, int status)
{
    struct held *h = (struct held *)done;
    (void)status;
    sem_post(&h->begun);
    sem_wait(&h->go);
}

/* What was queued before comes first. */
TEST(nothing_runs_on_the_callers_thread_while_something_is_queued)
{
    static float acc[BLOCK], grad[BLOCK];
    const struct kern_accumulate a = { acc,   grad,  SHD_F32, CODEC_NONE,
                                       BLOCK, false, NULL,    { .area = NULL } };
    struct held h = { .done = { hold } };
    struct shd_err e = { 0 };
    struct kern *k = device_new(NULL, 1);
    struct kern_waiter waiter;
    grad[0] = 1;
    sem_init(&h.begun, 0, 0);
    sem_init(&h.go, 0, 0);
    EXPECT_OK(kern_accumulate(k, &a, &h.done, &e), &e);
    sem_wait(&h.begun);
    kern_waiter_init(&waiter);
    EXPECT_OK(kern_accumulate(k, &a, &waiter.done, &e), &e); /* waits behind the first one's done */
    EXPECT_STATUS(run_here(k, &a), SHD_PENDING);
    sem_post(&h.go);
    EXPECT_STATUS(kern_wait(&waiter), SHD_OK);
    EXPECT_STATUS(run_here(k, &a), SHD_OK);
    EXPECT(acc[0] == 3);
    k->ops->free(k);
    sem_destroy(&h.begun);
    sem_destroy(&h.go);
}

TEST(one_op_more_than_the_queue_holds_is_busy)
{
    devices_each(check_full, NULL);
}

TEST(free_waits_for_queued_work)
{
    enum { ELEMS = 150 * BLOCK };
    static float x[ELEMS];
    for (uint32_t threads = 1; threads <= 3; threads++) {
        struct kern *k = device_new(NULL, threads);
        struct shd_err e = { 0 };
        for (uint32_t i = 1; i <= 40; i++) {
            const struct kern_fill a = { x, ELEMS, 0, 0, KERN_FILL_CONST, (float)i, 0 };
            EXPECT_OK(kern_fill(k, &a, NULL, &e), &e);
        }
        k->ops->free(k);
        for (uint64_t i = 0; i < ELEMS; i++)
            EXPECT_NEAR(x[i], 40, 0);
    }
}

#define SUBMITTERS      3
#define SUBMITTED       2000
#define SUBMITTER_ELEMS (70 * BLOCK)
struct submitter {
    struct kern *k;
    float x[SUBMITTER_ELEMS];
    uint32_t wrong;
};

static void *submitter_main(void *arg)
{
    struct submitter *s = arg;
    for (uint32_t i = 0; i < SUBMITTED; i++) {
        const uint64_t elems = i % 50 == 0 ? SUBMITTER_ELEMS : 3;
        const struct kern_fill a = { s->x, elems, 0, 0, KERN_FILL_CONST, (float)i, 0 };
        struct kern_waiter w;
        struct shd_err e;
        kern_waiter_init(&w);
        if (kern_fill(s->k, &a, &w.done, &e) != SHD_OK || kern_wait(&w) != SHD_OK ||
            !same_float(s->x[elems - 1], (float)i))
            s->wrong++;
    }
    return NULL;
}

TEST(any_thread_may_queue)
{
    static struct submitter submitters[SUBMITTERS];
    struct kern *k = device_new(NULL, 3);
    pthread_t id[SUBMITTERS];
    for (int i = 0; i < SUBMITTERS; i++) {
        submitters[i].k = k;
        EXPECT(pthread_create(&id[i], NULL, submitter_main, &submitters[i]) == 0);
    }
    for (int i = 0; i < SUBMITTERS; i++) {
        pthread_join(id[i], NULL);
        EXPECT_EQ(submitters[i].wrong, 0);
    }
    k->ops->free(k);
}

/* Leaves against EVP_Digest() of each piece, for heads and sizes on both sides of a border. */
static void check_hash(struct kern *k, const char *label, void *arg)
{
    (void)label, (void)arg;
    static const uint64_t heads[] = { 1, 7, 2047, 2048 };
    static const uint64_t sizes[] = { 1, 6, 2047, 2048, 2049, 4096, 40 * BLOCK, 40 * BLOCK + 5 };
    static float x[40 * BLOCK + 6];
    fill_awkward(x, ARRAY_SIZE(x), true, 99);
    for (size_t h = 0; h < ARRAY_SIZE(heads); h++) {
        for (size_t s = 0; s < ARRAY_SIZE(sizes); s++) {
            uint8_t out[43][32];
            memset(out, 0xa5, sizeof out);
            const uint64_t leaves = kern_hash_leaves(heads[h], sizes[s]);
            EXPECT(leaves < ARRAY_SIZE(out));
            const struct kern_hash a = {
                .x = x + 1, .elems = sizes[s], .head_elems = heads[h], .out = out
            };
            EXPECT_RUNS(hash, k, &a);
            uint64_t first = 0, piece = heads[h];
            for (uint64_t i = 0; i < leaves; i++, first += piece, piece = BLOCK) {
                uint8_t want[32];
                const uint64_t elems = sizes[s] - first < piece ? sizes[s] - first : piece;
                EXPECT(EVP_Digest(x + 1 + first, elems * 4, want, NULL, EVP_sha256(), NULL) == 1);
                EXPECT(memcmp(out[i], want, sizeof want) == 0);
                piece = elems;
            }
            EXPECT_EQ(first, sizes[s]);
            EXPECT_EQ(out[leaves][0], 0xa5);
        }
    }
}

TEST(hash_gives_sha256_of_each_piece)
{
    devices_each(check_hash, NULL);
}

TEST(hash_known_answer)
{
    /* printf '\0\0\0\0' | sha256sum */
    static const uint8_t want[4] = { 0xdf, 0x3f, 0x61, 0x98 };
    const float zero = 0;
    uint8_t out[1][32];
    struct kern *k = device_new(NULL, 1);
    EXPECT_RUNS(hash, k,
                (&(struct kern_hash){ .x = &zero, .elems = 1, .head_elems = 2048, .out = out }));
    EXPECT(memcmp(out[0], want, sizeof want) == 0);
    k->ops->free(k);
}

/* A refused op: its status, the value named in the text, and no done. */
#define EXPECT_REFUSED(op, args, refusal, text_part) \
    EXPECT_REFUSED_AS(#op, op, args, refusal, text_part)
#define EXPECT_REFUSED_AS(name, op, args, refusal, text_part)                               \
    do {                                                                                    \
        struct record refused_record = { .done = { record_done } };                         \
        struct shd_err refused_err = { 0 };                                                 \
        EXPECT_STATUS(kern_##op(k, (args), &refused_record.done, &refused_err), (refusal)); \
        EXPECT_HAS(refused_err.text, (name));                                               \
        EXPECT_HAS(refused_err.text, (text_part));                                          \
        EXPECT_EQ(refused_err.code, (refusal));                                             \
        EXPECT_EQ(refused_record.fired, 0);                                                 \
    } while (0)

/* Pages of their own: a GPU reaches them where they are pinned. */
static _Alignas(4096) float arrays[5][2 * BLOCK];
static float *const array_a = arrays[0], *const array_b = arrays[1], *const array_c = arrays[2];
static float *const array_d = arrays[3];
static uint16_t *const array_h = (uint16_t *)(void *)arrays[4];

TEST(bad_arguments_of_plain_ops_are_refused)
{
    struct kern *k = device_new(NULL, 2);
    struct kern_sum sum = { .finite = true };
    const struct kern_fill f = { array_a, BLOCK, 0, 0, KERN_FILL_CONST, 0, 0 };
    struct kern_fill fill = f;
    fill.out = NULL;
    EXPECT_REFUSED(fill, &fill, SHD_EINVAL, "NULL");
    fill = f, fill.kind = (enum kern_fill_kind)9;
    EXPECT_REFUSED(fill, &fill, SHD_EINVAL, "9");
    fill = f, fill.elems = UINT64_C(1) << 50;
    EXPECT_REFUSED(fill, &fill, SHD_ERANGE, "1125899906842624");
    fill = f, fill.first_index = UINT64_MAX;
    EXPECT_REFUSED(fill, &fill, SHD_ERANGE, "first index");
    fill = f, fill.kind = KERN_FILL_UNIFORM, fill.a = 2, fill.b = 2;
    EXPECT_REFUSED(fill, &fill, SHD_ERANGE, "[2, 2)");
    fill = f, fill.kind = KERN_FILL_NORMAL, fill.b = -1;
    EXPECT_REFUSED(fill, &fill, SHD_ERANGE, "-1");

    struct kern_cast cast = { array_h, (enum shd_dtype)7, array_a, BLOCK };
    EXPECT_REFUSED(cast, &cast, SHD_EINVAL, "dtype 7");
    cast.out_dtype = SHD_F32, cast.out = array_h + 1;
    EXPECT_REFUSED(cast, &cast, SHD_EINVAL, "aligned");

    const struct kern_accumulate a = {
        .acc = array_a, .grad = array_b, .grad_dtype = SHD_F32, .elems = BLOCK
    };
    struct kern_accumulate acc = a;
    acc.elems = 100;
    EXPECT_REFUSED(accumulate, &acc, SHD_ERANGE, "100");
    acc = a, acc.grad = NULL;
    EXPECT_REFUSED(accumulate, &acc, SHD_EINVAL, "grad");
    acc = a, acc.acc = NULL;
    EXPECT_REFUSED(accumulate, &acc, SHD_EINVAL, "acc");
    EXPECT_REFUSED(sumsq, (&(struct kern_sumsq){ array_a, BLOCK, NULL }), SHD_EINVAL, "sum");
    EXPECT_REFUSED(sumsq, (&(struct kern_sumsq){ array_a, 2049, &sum }), SHD_ERANGE, "2049");

    uint8_t out[2][32];
    EXPECT_REFUSED(hash,
                   (&(struct kern_hash){ .x = array_a, .elems = 0, .head_elems = 1, .out = out }),
                   SHD_ERANGE, "no elements");
    EXPECT_REFUSED(hash,
                   (&(struct kern_hash){ .x = array_a, .elems = 9, .head_elems = 0, .out = out }),
                   SHD_ERANGE, " 0 ");
    EXPECT_REFUSED(
        hash, (&(struct kern_hash){ .x = array_a, .elems = 9, .head_elems = 2049, .out = out }),
        SHD_ERANGE, "2049");
    EXPECT_REFUSED(
        hash, (&(struct kern_hash){ .x = array_a, .elems = 9, .head_elems = 2048, .out = NULL }),
        SHD_EINVAL, "out");
    k->ops->free(k);
}

/* An update is named by its optimizer. */
#define EXPECT_UPDATE_REFUSED(u, refusal, text_part) \
    EXPECT_REFUSED_AS(spec_optimizer_rows[(u)->kind].kind, update, u, refusal, text_part)

TEST(bad_arguments_of_updates_are_refused)
{
    struct kern *k = device_new(NULL, 2);
    static const struct kern_hyper hyper = { .lr = 1, .bias1 = 1, .bias2 = 1 };
    struct kern_run runs[2] = { { 0, BLOCK, 0 }, { BLOCK, 5, 0 } };
    const struct kern_update good = {
        .kind = SPEC_ADAMW,
        .param = array_a,
        .m = array_b,
        .v = array_c,
        .grad = array_d,
        .grad_scale = 1,
        .publish = array_h,
        .publish_dtype = SHD_BF16,
        .elems = 2 * BLOCK,
        .runs = runs,
        .run_count = 2,
        .hypers = &hyper,
        .hyper_count = 1,
    };
    struct shd_err e = { 0 };
    if (k->ops->pin != NULL)
        EXPECT_OK(k->ops->pin(k, arrays, sizeof arrays, /* readonly= */ false, &e), &e);
    struct kern_update u = good;
    u.v = NULL;
    EXPECT_UPDATE_REFUSED(&u, SHD_EINVAL, "v is NULL");
    u.kind = SPEC_SGD;
    EXPECT_RUNS(update, k, &u);
    u.kind = SPEC_LION;
    EXPECT_RUNS(update, k, &u);
    u.m = NULL;
    EXPECT_UPDATE_REFUSED(&u, SHD_EINVAL, "m is NULL");
    u = good, u.kind = SPEC_SGD, u.publish = NULL;
    EXPECT_UPDATE_REFUSED(&u, SHD_EINVAL, "publish");
    u = good, u.kind = SPEC_SGD, u.elems = BLOCK + 1;
    EXPECT_UPDATE_REFUSED(&u, SHD_ERANGE, "2049");
    u = good, u.runs = NULL;
    EXPECT_UPDATE_REFUSED(&u, SHD_EINVAL, "runs");
    u = good, u.kind = SPEC_MEAN, u.m = u.v = NULL;
    EXPECT_RUNS(update, k, &u);
    u.grad_scale = 0;
    EXPECT_UPDATE_REFUSED(&u, SHD_ERANGE, "mean: of 0 values");
    for (int kind = 0; kind <= SPEC_MEAN + 1; kind += SPEC_MEAN + 1) {
        u = good, u.kind = (enum spec_optimizer)kind;
        EXPECT_REFUSED(update, &u, SHD_EINVAL, "unknown optimizer");
    }

    runs[1] = (struct kern_run){ BLOCK - 1, 5, 0 };
    EXPECT_UPDATE_REFUSED(&good, SHD_ERANGE, "2047");
    runs[1] = (struct kern_run){ BLOCK, BLOCK + 1, 0 };
    EXPECT_UPDATE_REFUSED(&good, SHD_ERANGE, "2048+2049");
    runs[1] = (struct kern_run){ BLOCK, UINT64_MAX, 0 };
    EXPECT_UPDATE_REFUSED(&good, SHD_ERANGE, "run 1");
    runs[1] = (struct kern_run){ BLOCK, 5, 1 };
    EXPECT_UPDATE_REFUSED(&good, SHD_ERANGE, "group 1 of 1");
    runs[1].hyper = 0;
    const struct kern_hyper no_bias = { .lr = 1, .bias1 = 0, .bias2 = 1 };
    u = good, u.hypers = &no_bias;
    EXPECT_UPDATE_REFUSED(&u, SHD_ERANGE, "bias");
    u.kind = SPEC_SGD;
    EXPECT_RUNS(update, k, &u);
    if (k->ops->pin != NULL)
        k->ops->unpin(k, arrays);
    k->ops->free(k);
}

/* An owner may hold nothing of a small unit. */
TEST(empty_slices_are_fine)
{
    struct kern *k = device_new(NULL, 2);
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ .kind = KERN_FILL_CONST }));
    EXPECT_RUNS(cast, k, (&(struct kern_cast){ .out_dtype = SHD_BF16 }));
    EXPECT_RUNS(accumulate, k, (&(struct kern_accumulate){ .grad_dtype = SHD_F32, .sum = &sum }));
    EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ .sum = &sum }));
    EXPECT_RUNS(update, k, (&(struct kern_update){ .kind = SPEC_SGD, .publish_dtype = SHD_F32 }));
    EXPECT_NEAR(fixsum_value(&sum.sum), 0, 0);
    EXPECT(sum.finite);
    k->ops->free(k);
}

TEST_MAIN()
