/* The CUDA device on the shim: its queue, its memory, and what it refuses. */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/mman.h>

#include "kernels/cuda/device.h"
#include "tests/cuda/cuda_util.h"

TEST(device_has_a_name_and_a_uuid)
{
    struct kern *k = cuda_new();
    EXPECT_STR(k->ops->name, "cuda");
    EXPECT_EQ(k->ops->place, SEGMENT_CUDA);
    EXPECT(memcmp(k->ops->uuid, (uint8_t[16]){ 0 }, 16) != 0); /* zeros: the host */
    struct kern *none = NULL;
    struct shd_err e = { 0 };
    EXPECT_STATUS(kern_cuda_new(1, &none, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "no CUDA device 1: there are 1 here");
    EXPECT(none == NULL);
    EXPECT_OK(k->ops->health(k, &e), &e);
    k->ops->free(k);
}

TEST(devices_that_cannot_do_it_are_refused_by_name)
{
    static const struct {
        const char *attribute, *text;
    } cases[] = {
        { "75:8,76:6", "compute capability 8.6, the kernels need 9.0" },
        { "102:0", "virtual memory management: 0, POSIX handles: 1" },
        { "103:0", "virtual memory management: 1, POSIX handles: 0" },
        { "20:3", "compute mode 3, which keeps other processes away: nvidia-smi -c DEFAULT" },
    };
    NEEDS_SHIM();
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct kern *k = NULL;
        struct shd_err e = { 0 };
        setenv("SHIM_CUDA_ATTRIBUTE", cases[i].attribute, 1);
        const int r = kern_cuda_new(0, &k, &e);
        unsetenv("SHIM_CUDA_ATTRIBUTE");
        EXPECT_STATUS(r, SHD_ENOTSUP);
        EXPECT_HAS(e.text, cases[i].text);
        EXPECT_HAS(e.text, "CUDA device 0 (Shim of a GPU)");
    }
    EXPECT_EQ(shim_find().live(NULL), 0);
}

/* -- The queue -------------------------------------------------------------------------------- */

/* Fills of one array, each of which the next one overwrites, and a copy of each to the host. */
TEST(ops_run_in_queueing_order_and_report_once)
{
    enum { OPS = 40, ELEMS = 3 * BLOCK };
    static struct record records[2 * OPS];
    static float out[OPS][16];
    struct kern *k = cuda_new();
    float *x = cuda_array(k, ELEMS * sizeof(float));
    struct shd_err e = { 0 };
    record_count = 0;
    for (uint32_t i = 0; i < OPS; i++) {
        records[2 * i].done.fn = records[2 * i + 1].done.fn = record_done;
        const struct kern_fill f = { x, ELEMS, 0, 0, KERN_FILL_CONST, (float)i, 0 };
        EXPECT_OK(kern_fill(k, &f, &records[2 * i].done, &e), &e);
        const struct kern_copy c = { out[i], x + ELEMS - 16, sizeof out[i] };
        EXPECT_OK(kern_copy(k, &c, &records[2 * i + 1].done, &e), &e);
    }
    EXPECT_RUNS(copy, k, (&(struct kern_copy){ 0 })); /* of nothing: behind all of them */
    for (uint32_t i = 0; i < 2 * OPS; i++)
        if (records[i].fired != 1 || records[i].order != i || records[i].status != SHD_OK)
            FAIL("op %" PRIu32 " fired %" PRIu32 " times, at %" PRIu32, i, records[i].fired,
                 records[i].order);
    for (uint32_t i = 0; i < OPS; i++)
        for (uint32_t j = 0; j < 16; j++)
            EXPECT_NEAR(out[i][j], i, 0);
    k->ops->release(k, x, ELEMS * sizeof(float));
    k->ops->free(k);
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

TEST(one_op_more_than_the_queue_holds_is_busy)
{
    static struct record records[KERN_QUEUE_MAX];
    struct kern *k = cuda_new();
    struct blocker b = { .done = { blocker_done } };
    sem_init(&b.reached, 0, 0);
    sem_init(&b.go_on, 0, 0);
    uint8_t from[8] = { 1 }, to[8];
    const struct kern_copy a = { to, from, 8 };
    struct shd_err e = { 0 };
    EXPECT_OK(kern_copy(k, &a, &b.done, &e), &e);
    while (sem_wait(&b.reached) != 0)
        ;
    for (uint32_t i = 0; i < KERN_QUEUE_MAX; i++) {
        records[i].done.fn = record_done;
        EXPECT_OK(kern_copy(k, &a, &records[i].done, &e), &e);
    }
    struct record refused = { .done = { record_done } };
    EXPECT_STATUS(kern_copy(k, &a, &refused.done, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "1024");
    sem_post(&b.go_on);
    k->ops->free(k);
    for (uint32_t i = 0; i < KERN_QUEUE_MAX; i++)
        EXPECT_EQ(records[i].fired, 1);
    EXPECT_EQ(refused.fired, 0);
    sem_destroy(&b.reached);
    sem_destroy(&b.go_on);
}

TEST(free_waits_for_work_that_is_slow)
{
    static uint64_t words[40];
    const struct shim shim = shim_find();
    struct kern *k = cuda_new();
    struct shd_err e = { 0 };
    words[0] = 7;
    shim.delay(2000);
    for (uint32_t i = 0; i + 1 < 40; i++) {
        const struct kern_copy a = { &words[i + 1], &words[i], sizeof words[0] };
        EXPECT_OK(kern_copy(k, &a, NULL, &e), &e);
    }
    k->ops->free(k);
    shim.delay(0);
    EXPECT_EQ(words[39], 7);
}

#define SUBMITTERS 3
#define SUBMITTED  300
struct submitter {
    struct kern *k;
    uint32_t wrong;
};

/* Memory and work of several threads at once. */
static void *submitter_main(void *arg)
{
    struct submitter *s = arg;
    struct kern *k = s->k;
    for (uint32_t i = 0; i < SUBMITTED; i++) {
        struct shd_err e;
        struct kern_waiter w;
        float got = -1;
        const float sent = (float)i;
        float *x = k->ops->alloc(k, 64);
        kern_waiter_init(&w);
        if (x == NULL || kern_copy(k, &(struct kern_copy){ x + 2, &sent, 4 }, NULL, &e) != SHD_OK ||
            kern_copy(k, &(struct kern_copy){ &got, x + 2, 4 }, &w.done, &e) != SHD_OK ||
            kern_wait(&w) != SHD_OK || !same_float(got, sent))
            s->wrong++;
        k->ops->release(k, x, 64);
    }
    return NULL;
}

TEST(any_thread_may_queue_and_allocate)
{
    static struct submitter submitters[SUBMITTERS];
    struct kern *k = cuda_new();
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

/* As much as several parts stage: the same bits and sums as of a gradient on the device, and a
 * trail that says so. */
TEST(a_gradient_of_the_host_is_added_by_parts)
{
    enum { ELEMS = 500 * BLOCK, CHUNKS = (ELEMS + 65535) / 65536 };
    static const enum shd_dtype dtypes[] = { SHD_F32, SHD_BF16, SHD_F16 };
    static float acc[2][ELEMS];
    static struct cuda_chunk chunks[CHUNKS];
    struct kern *k = cuda_new();
    struct segment s;
    struct shd_err e = { 0 };
    const uint64_t area_at = 2 * ELEMS * sizeof(float);
    const uint64_t bytes = area_at + k->ops->trail_bytes(k, 2 * CHUNKS);
    EXPECT_OK(k->ops->segment_new(k, "s", SEGMENT_STATE, bytes, &s, &e), &e);
    float *there[2] = { s.base, (float *)s.base + ELEMS };
    struct kern_trail trail = { .area = (void *)((uint8_t *)s.base + area_at), .base = s.base };
    void *grad = cuda_array(k, ELEMS * sizeof(float)), *host = malloc(ELEMS * sizeof(float));
    EXPECT(host != NULL);
    for (size_t d = 0; d < ARRAY_SIZE(dtypes); d++) {
        struct kern_sum sums[2];
        EXPECT_RUNS(fill, k,
                    (&(struct kern_fill){ there[0], ELEMS, 0, d, KERN_FILL_NORMAL, 0, 1 }));
        EXPECT_RUNS(cast, k, (&(struct kern_cast){ grad, dtypes[d], there[0], ELEMS }));
        cuda_copy_now(k, host, grad, ELEMS * dtype_bytes(dtypes[d]));
        for (uint32_t way = 0; way < 2; way++) {
            sums[way] = (struct kern_sum){ .finite = true };
            fixsum_init(&sums[way].sum);
            EXPECT_RUNS(fill, k,
                        (&(struct kern_fill){ there[way], ELEMS, 0, 9, KERN_FILL_NORMAL, 0, 1 }));
            trail.op = 1 + 2 * d + way;
            trail.first_chunk = way * CHUNKS;
            const struct kern_accumulate a = { .acc = there[way],
                                               .grad = way == 0 ? grad : host,
                                               .grad_dtype = dtypes[d],
                                               .elems = ELEMS,
                                               .sum = &sums[way],
                                               .trail = trail };
            EXPECT_RUNS(accumulate, k, &a);
            cuda_copy_now(k, acc[way], there[way], sizeof acc[way]);
        }
        EXPECT(memcmp(acc[0], acc[1], sizeof acc[0]) == 0);
        EXPECT(memcmp(&sums[0].sum.limb, &sums[1].sum.limb, sizeof sums[0].sum.limb) == 0);
        cuda_copy_now(k, chunks, (uint8_t *)trail.area + CUDA_TRAIL_CHUNKS_AT + sizeof chunks,
                      sizeof chunks);
        for (uint32_t c = 0; c < CHUNKS; c++)
            if (chunks[c].op != trail.op ||
                chunks[c].mask != (c + 1 < CHUNKS ? 0xffffffff : (1u << 500 % 32) - 1))
                FAIL("chunk %" PRIu32 ": op %" PRIu64 ", mask %#" PRIx64, c, chunks[c].op,
                     chunks[c].mask);
    }
    free(host);
    k->ops->release(k, grad, ELEMS * sizeof(float));
    k->ops->segment_close(k, &s);
    k->ops->free(k);
}

static struct kern_change no_change(void)
{
    return (struct kern_change){ .update.finite = true, .weight.finite = true, .whole = true };
}

static bool same_change(const struct kern_change *a, const struct kern_change *b)
{
    return memcmp(&a->update.sum, &b->update.sum, sizeof a->update.sum) == 0 &&
           memcmp(&a->weight.sum, &b->weight.sum, sizeof a->weight.sum) == 0;
}

/* Of several parts: it comes to what it does on the host. One of which a predecessor did something,
 * if only a tile of its last part, is not whole. */
TEST(an_update_is_measured_by_parts)
{
    enum { ELEMS = 500 * BLOCK, CHUNKS = (ELEMS + 65535) / 65536 };
    static float host[4][ELEMS]; /* parameters, momentum, gradient, published */
    static const struct kern_hyper h = { .lr = 0.125f, .beta1 = 0.9f };
    static const struct kern_run runs[] = { { 5, 70000, 0 }, { 80000, ELEMS - 80007, 0 } };
    struct kern *k = cuda_new(), *cpu = device_new("scalar", 1);
    struct segment s;
    struct shd_err e = { 0 };
    const uint64_t area_at = 4 * ELEMS * sizeof(float);
    EXPECT_OK(k->ops->segment_new(k, "s", SEGMENT_STATE, area_at + k->ops->trail_bytes(k, CHUNKS),
                                  &s, &e),
              &e);
    float *at = s.base;
    struct kern_change want = no_change(), got[3];
    struct kern_update a = { .kind = SPEC_SGD,
                             .grad_scale = 0.5f,
                             .publish_dtype = SHD_F32,
                             .elems = ELEMS,
                             .runs = runs,
                             .run_count = 2,
                             .hypers = &h,
                             .hyper_count = 1 };
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT_RUNS(fill, k,
                    (&(struct kern_fill){ at + i * ELEMS, ELEMS, 0, i, KERN_FILL_NORMAL, 0, 1 }));
        cuda_copy_now(k, host[i], at + i * ELEMS, sizeof host[i]);
    }
    a.param = host[0], a.m = host[1], a.grad = host[2], a.publish = host[3], a.change = &want;
    EXPECT_RUNS(update, cpu, &a);
    a.param = at, a.m = at + ELEMS, a.grad = at + 2 * ELEMS, a.publish = at + 3 * ELEMS;
    a.trail = (struct kern_trail){ .area = (void *)((uint8_t *)s.base + area_at),
                                   .base = s.base,
                                   .op = 1 };
    for (uint32_t i = 0; i < 3; i++) {
        got[i] = no_change();
        a.change = &got[i];
        a.trail.op = i < 2 ? 1 : 2; /* again, and then another one of which a tile is done */
        const struct cuda_chunk begun = { 2, 1 };
        if (i == 2)
            cuda_copy_now(
                k, (uint8_t *)a.trail.area + CUDA_TRAIL_CHUNKS_AT + (CHUNKS - 1) * sizeof begun,
                &begun, sizeof begun);
        EXPECT_RUNS(update, k, &a);
    }
    EXPECT(want.whole && got[0].whole && !got[1].whole && !got[2].whole);
    EXPECT(same_change(&got[0], &want) && !same_change(&got[1], &want));
    EXPECT(fixsum_value(&got[1].update.sum) == 0);
    k->ops->segment_close(k, &s);
    k->ops->free(k);
    cpu->ops->free(cpu);
}

/* -- Memory ----------------------------------------------------------------------------------- */

TEST(segments_are_zero_and_hold_what_is_copied)
{
    struct kern *k = cuda_new();
    struct segment s;
    struct shd_err e = { 0 };
    EXPECT_OK(k->ops->segment_new(k, "test", SEGMENT_STATE, 3000000, &s, &e), &e);
    EXPECT_EQ(s.bytes, 4 << 20);
    EXPECT_EQ(s.place, SEGMENT_CUDA);
    uint8_t *host = malloc(s.bytes);
    memset(host, 1, s.bytes);
    cuda_copy_now(k, host, s.base, s.bytes);
    for (uint64_t i = 0; i < s.bytes; i++)
        EXPECT_EQ(host[i], 0);
    for (uint64_t i = 0; i < s.bytes; i++)
        host[i] = (uint8_t)(i * 7);
    void *d = cuda_array(k, 5 << 20);
    cuda_copy_now(k, s.base, host, s.bytes);
    cuda_copy_now(k, d, s.base, s.bytes);
    memset(host, 1, s.bytes);
    cuda_copy_now(k, host, d, s.bytes);
    for (uint64_t i = 0; i < s.bytes; i++)
        EXPECT_EQ(host[i], (uint8_t)(i * 7));
    k->ops->release(k, d, 5 << 20);
    k->ops->segment_close(k, &s);
    EXPECT_EQ(s.fd, -1);
    k->ops->segment_close(k, &s); /* no-op */
    free(host);
    k->ops->free(k);
}

TEST(the_host_cannot_read_device_memory)
{
    struct kern *k = cuda_new();
    struct segment s;
    struct shd_err e = { 0 };
    EXPECT_OK(k->ops->segment_new(k, "test", SEGMENT_INBOX, 1, &s, &e), &e);
    const volatile uint8_t *const places[] = { s.base, cuda_array(k, 100) };
    for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
        const pid_t pid = fork();
        EXPECT(pid >= 0);
        if (pid == 0) {
            signal(SIGSEGV, SIG_DFL);
            _exit(*places[i] == 0 ? 0 : 1);
        }
        int status;
        EXPECT(waitpid(pid, &status, 0) == pid);
        EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    k->ops->release(k, (void *)(uintptr_t)places[1], 100);
    k->ops->segment_close(k, &s);
    k->ops->free(k);
}

static uint8_t byte_at(struct kern *k, const uint8_t *p)
{
    uint8_t x = 0xee;
    cuda_copy_now(k, &x, p, 1);
    return x;
}

TEST(a_segment_is_replaced_at_its_address)
{
    struct kern *k = cuda_new();
    struct segment old, other, now;
    struct shd_err e = { 0 };
    EXPECT_OK(k->ops->segment_new(k, "old", SEGMENT_STATE, 100, &old, &e), &e);
    EXPECT_OK(k->ops->segment_new(k, "other", SEGMENT_STATE, 100, &other, &e), &e);
    uint8_t *const base = old.base;
    cuda_copy_now(k, base, (uint8_t[]){ 1 }, 1);
    cuda_copy_now(k, other.base, (uint8_t[]){ 2 }, 1);
    const int fds = entries_of("/proc/self/fd");
    const uint64_t live = shim_live();
    const int fd = dup(other.fd);
    EXPECT_OK(k->ops->segment_map(k, fd, SEGMENT_STATE, other.bytes, &old, &now, &e), &e);
    EXPECT(now.base == base && now.fd == fd && old.fd == -1 && old.base == NULL);
    EXPECT_EQ(byte_at(k, base), 2);
    cuda_copy_now(k, base, (uint8_t[]){ 3 }, 1);
    EXPECT_EQ(byte_at(k, other.base), 3);
    EXPECT_EQ(shim_live(), live);
    EXPECT_EQ(entries_of("/proc/self/fd"), fds); /* one came, one went: less the old fd */
    k->ops->segment_close(k, &now);
    k->ops->segment_close(k, &other);
    k->ops->free(k);
}

/* What cannot take its place leaves the old one where it was. */
TEST(a_segment_that_cannot_be_replaced_stays)
{
    const struct shim shim = shim_find();
    struct kern *k = cuda_new();
    struct segment old, other, now = SEGMENT_CLOSED;
    struct shd_err e = { 0 };
    EXPECT_OK(k->ops->segment_new(k, "old", SEGMENT_STATE, 100, &old, &e), &e);
    EXPECT_OK(k->ops->segment_new(k, "other", SEGMENT_STATE, 100, &other, &e), &e);
    uint8_t *const base = old.base;
    cuda_copy_now(k, base, (uint8_t[]){ 1 }, 1);
    static const char *const faults[] = { "cuMemImportFromShareableHandle", "cuCtxSynchronize",
                                          "cuMemMap", "cuMemSetAccess" };
    for (size_t i = 0; i < ARRAY_SIZE(faults); i++) {
        shim.fail(faults[i]);
        EXPECT_STATUS(k->ops->segment_map(k, other.fd, SEGMENT_STATE, other.bytes, &old, &now, &e),
                      SHD_ENOMEM);
        shim.fail(NULL);
        EXPECT_HAS(e.text, "state segment");
        EXPECT(old.base == base && now.fd == -1);
        EXPECT_EQ(byte_at(k, base), 1);
    }
    k->ops->segment_close(k, &old);
    k->ops->segment_close(k, &other);
    k->ops->free(k);
    EXPECT_EQ(shim.live(NULL), 0);
}

TEST(wrong_sizes_and_descriptors_are_refused)
{
    struct kern *k = cuda_new();
    struct segment s, got = SEGMENT_CLOSED;
    struct shd_err e = { 0 };
    EXPECT_OK(k->ops->segment_new(k, "test", SEGMENT_STATE, 100, &s, &e), &e);
    EXPECT_STATUS(k->ops->segment_map(k, s.fd, SEGMENT_STATE, 4097, NULL, &got, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "4097 bytes, not whole pages");
    EXPECT(k->ops->segment_map(k, s.fd, SEGMENT_STATE, 4 << 20, NULL, &got, &e) != SHD_OK);
    EXPECT_HAS(e.text, "4194304");
    EXPECT(k->ops->segment_map(k, 0, SEGMENT_STATE, 2 << 20, NULL, &got, &e) != SHD_OK);
    EXPECT_HAS(e.text, "descriptor 0");
    EXPECT_STATUS(k->ops->segment_new(k, "test", SEGMENT_STATE, UINT64_C(1) << 40, &got, &e),
                  SHD_ENOMEM);
    EXPECT_HAS(e.text, "state segment of 1099511627776 bytes on CUDA device 0");
    EXPECT_HAS(e.text, "CUDA_ERROR_OUT_OF_MEMORY");
    EXPECT(got.fd == -1);
    EXPECT(k->ops->alloc(k, UINT64_C(1) << 40) == NULL);
    k->ops->segment_close(k, &s);
    k->ops->free(k);
}

TEST(memory_of_the_host_is_pinned_as_it_may_be)
{
    struct kern *k = cuda_new();
    struct shd_err e = { 0 };
    uint8_t *rw = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint8_t *ro = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(rw != MAP_FAILED && ro != MAP_FAILED);
    const uint64_t live = shim_live();
    EXPECT_OK(k->ops->pin(k, rw, 8192, false, &e), &e);
    EXPECT_OK(k->ops->pin(k, ro, 8192, true, &e), &e);
    EXPECT(k->ops->pin(k, rw, 4096, false, &e) != SHD_OK);
    EXPECT_HAS(e.text, "pin 4096 bytes");
    void *d = cuda_array(k, 8192);
    cuda_copy_now(k, d, ro, 8192);
    memset(rw, 1, 8192);
    cuda_copy_now(k, rw, d, 8192);
    EXPECT_EQ(rw[8191], 0);
    k->ops->release(k, d, 8192);
    k->ops->unpin(k, rw);
    k->ops->unpin(k, ro);
    EXPECT(k->ops->pin(k, ro, 8192, false, &e) != SHD_OK); /* not writable */
    EXPECT_EQ(shim_live(), live);
    munmap(rw, 8192);
    munmap(ro, 8192);
    k->ops->free(k);
}

/* An owner's publish and inbox of the host's memory, as a worker on a GPU uses them. */
TEST(pinned_memory_of_an_owner_is_copied_as_it_is_now)
{
    struct kern *k = cuda_new();
    struct shd_err e = { 0 };
    struct segment publish[2], inbox, seen, filled;
    for (int i = 0; i < 2; i++) {
        EXPECT_OK(segment_new("p", SEGMENT_PUBLISH, 8192, &publish[i], &e), &e);
        memset(publish[i].base, 1 + i, 8192);
    }
    EXPECT_OK(segment_new("i", SEGMENT_INBOX, 8192, &inbox, &e), &e);
    EXPECT_OK(segment_map(dup(publish[0].fd), SEGMENT_PUBLISH, 8192, &seen, &e), &e);
    EXPECT_OK(segment_map(dup(inbox.fd), SEGMENT_INBOX, 8192, &filled, &e), &e);
    EXPECT_OK(k->ops->pin(k, seen.base, 8192, /* readonly= */ true, &e), &e);
    EXPECT_OK(k->ops->pin(k, filled.base, 8192, /* readonly= */ false, &e), &e);
    uint8_t *d = cuda_array(k, 8192);
    cuda_copy_now(k, d, seen.base, 8192);
    EXPECT_EQ(byte_at(k, d + 8191), 1);
    memset(publish[0].base, 7, 8192); /* the owner's next step */
    cuda_copy_now(k, d, seen.base, 8192);
    EXPECT_EQ(byte_at(k, d + 8191), 7);
    cuda_copy_now(k, filled.base, d, 8192);
    EXPECT_EQ(((const uint8_t *)inbox.base)[8191], 7);
    k->ops->unpin(k, seen.base); /* its successor's, at the same address */
    EXPECT_OK(segment_place(seen.base, publish[1].fd, 0, 8192, /* writable= */ false, &e), &e);
    EXPECT_OK(k->ops->pin(k, seen.base, 8192, /* readonly= */ true, &e), &e);
    cuda_copy_now(k, d, seen.base, 8192);
    EXPECT_EQ(byte_at(k, d), 2);
    k->ops->unpin(k, seen.base);
    k->ops->unpin(k, filled.base);
    k->ops->release(k, d, 8192);
    segment_close(&seen);
    segment_close(&filled);
    segment_close(&inbox);
    segment_close(&publish[0]);
    segment_close(&publish[1]);
    k->ops->free(k);
}

TEST(what_cannot_be_pinned_does_not_break_a_device)
{
    const struct shim shim = shim_find();
    struct kern *k = cuda_new();
    struct shd_err e = { 0 };
    uint8_t *rw = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(rw != MAP_FAILED);
    /* A device's thread enters its context after cuda_new() has returned: once it has copied, it
     * has entered. The injected error is sticky, and a thread that entered in its midst would break
     * the device by another way. */
    uint8_t *d = cuda_array(k, 8192);
    cuda_copy_now(k, d, rw, 8192);
    setenv("SHIM_CUDA_ATTRIBUTE", "113:0", 1);
    EXPECT_STATUS(k->ops->pin(k, rw, 8192, true, &e), SHD_ENOTSUP);
    unsetenv("SHIM_CUDA_ATTRIBUTE");
    shim.fail("cuMemHostRegister@1:999"); /* said of the pages, not of the device */
    EXPECT_STATUS(k->ops->pin(k, rw, 8192, false, &e), SHD_EIO);
    shim.fail(NULL);
    shim.reset();
    EXPECT_OK(k->ops->health(k, &e), &e);
    k->ops->release(k, d, 8192);
    munmap(rw, 8192);
    k->ops->free(k);
}

TEST(nothing_is_left_of_a_device)
{
    const struct shim shim = shim_find();
    EXPECT_EQ(shim.live(NULL), 0);
    const int fds = entries_of("/proc/self/fd"), tasks = entries_of("/proc/self/task");
    struct kern *k = cuda_new();
    EXPECT(shim.live("stream") == 2 && shim.live("event") == CUDA_FLIGHT);
    k->ops->free(NULL); /* no-op */
    k->ops->free(k);
    EXPECT_EQ(shim.live(NULL), 0);
    EXPECT_EQ(entries_of("/proc/self/fd"), fds);
    EXPECT_SOON(entries_of("/proc/self/task") == tasks); /* seen a moment longer than joined */
}

TEST_MAIN()
