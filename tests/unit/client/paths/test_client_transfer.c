/* The transfer thread, with owners that are threads of this test: boards and pages in memory. */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/resource.h>
#include <time.h>

#include "client/paths/nccl_join.h"
#include "client/paths/transfer.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/segment.h"
#include "proto/spec/layout.h"
#include "tests/lib/test.h"

#define OWNERS 3u
#define PIECE  4096u
#define S      UINT64_C(1000000000)

struct owners {
    _Alignas(64) uint8_t boards[OWNERS][1024];
    uint8_t publish[OWNERS * PIECE], slot[OWNERS * PIECE];
    struct transfer_piece pieces[OWNERS];
};

static struct owners o;

static struct board *board_of(uint32_t owner)
{
    return (struct board *)(void *)o.boards[owner];
}

static void reset(void)
{
    memset(&o, 0, sizeof o);
    CHECK(board_bytes(2) <= sizeof o.boards[0]);
    for (uint32_t i = 0; i < OWNERS; i++) {
        board_init(board_of(i), 2);
        o.pieces[i] = (struct transfer_piece){ .board = board_of(i),
                                               .from = o.publish + i * PIECE,
                                               .offset_bytes = i * PIECE,
                                               .bytes = PIECE };
    }
}

static struct transfer_job job_of(uint32_t unit, uint64_t step)
{
    return (struct transfer_job){
        .to = o.slot, .pieces = o.pieces, .piece_count = OWNERS, .unit = unit, .step = step
    };
}

static void publish(uint32_t owner, uint32_t unit, uint64_t version)
{
    memset(o.publish + owner * PIECE, (int)(version + owner + 1), PIECE);
    board_publish(board_of(owner), unit, version);
}

static struct transfer *start(uint64_t delay_ns)
{
    struct shd_err e = { 0 };
    struct transfer *t;
    EXPECT_OK(transfer_new(delay_ns, &t, &e), &e);
    return t;
}

static void *publish_late(void *ctx)
{
    (void)ctx;
    for (uint32_t i = OWNERS; i-- > 0;) {
        nanosleep(&(struct timespec){ .tv_nsec = 3000000 }, NULL);
        publish(i, 1, 7);
    }
    return NULL;
}

TEST(copies_each_owners_slice_once_it_is_published)
{
    pthread_t late;
    reset();
    struct transfer *t = start(0);
    struct transfer_job job = job_of(1, 7);
    o.pieces[1].bytes = 0; /* this owner has no part of the unit */
    transfer_start(t, &job);
    EXPECT(!transfer_wait(t, &job, 0));
    EXPECT_EQ(pthread_create(&late, NULL, publish_late, NULL), 0);
    EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
    pthread_join(late, NULL);
    EXPECT_EQ(job.status, SHD_OK);
    EXPECT_EQ(job.bytes_copied, 2 * PIECE);
    EXPECT(o.slot[0] == 8 && o.slot[PIECE] == 0 && o.slot[3 * PIECE - 1] == 10);
    transfer_free(t);
}

TEST(a_step_that_is_over_is_said_so)
{
    reset();
    struct transfer *t = start(0);
    publish(0, 0, 3);
    publish(1, 0, 4);
    struct transfer_job job = job_of(0, 3);
    transfer_start(t, &job);
    EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
    EXPECT_EQ(job.status, SHD_ESTEP);
    EXPECT(job.piece == 1 && job.version == 4);
    transfer_free(t);
}

TEST(jobs_run_in_order_and_each_is_delayed)
{
    struct transfer_job jobs[3];
    reset();
    for (uint32_t i = 0; i < OWNERS; i++)
        publish(i, 0, 1);
    struct transfer *t = start(5000000);
    const uint64_t begin_ns = clock_now_ns();
    for (int i = 0; i < 3; i++) {
        jobs[i] = job_of(0, 1);
        transfer_start(t, &jobs[i]);
    }
    EXPECT(transfer_wait(t, &jobs[2], TEST_HANG_MS * (S / 1000)));
    EXPECT(clock_now_ns() - begin_ns >= 15000000);
    EXPECT(transfer_wait(t, &jobs[0], 0) && transfer_wait(t, &jobs[1], 0));
    transfer_free(t);
}

/* Waiting on a board, in the queue behind it, in a delay, done: wherever a job is. */
TEST(jobs_are_taken_back_wherever_they_are)
{
    struct transfer_job stuck, queued, done;
    reset();
    struct transfer *t = start(0);
    for (uint64_t round = 0; round < 20; round++) {
        stuck = job_of(1, 9);
        queued = done = job_of(0, 1);
        transfer_start(t, &stuck);
        transfer_start(t, &queued);
        transfer_start(t, &done);
        EXPECT(!transfer_wait(t, &stuck, round % 2 * UINT64_C(1000000)));
        transfer_cancel(t, &queued);
        EXPECT_EQ(queued.state, TRANSFER_IDLE);
        transfer_cancel(t, &stuck);
        EXPECT_EQ(stuck.state, TRANSFER_IDLE);
        for (uint32_t i = 0; round == 0 && i < OWNERS; i++)
            publish(i, 0, 1); /* once: it is read from then on */
        EXPECT(transfer_wait(t, &done, TEST_HANG_MS * (S / 1000)));
        EXPECT_EQ(done.status, SHD_OK);
        transfer_cancel(t, &done);
        EXPECT_EQ(done.state, TRANSFER_IDLE);
        transfer_start(t, &queued); /* and again */
        EXPECT(transfer_wait(t, &queued, TEST_HANG_MS * (S / 1000)));
    }
    transfer_free(t);
}

static long sleeps(void)
{
    struct rusage usage;
    CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_nvcsw;
}

/* A job that is stuck at a board: how often the thread sleeps, and how soon it is there when the
 * board has it and when it is taken back. */
static void expect_board_ends_sleep(bool ticks)
{
    uint64_t done_ns = S, back_ns = S;
    reset();
    struct transfer *t = start(0);
    for (uint64_t round = 0; round < 5; round++) {
        struct transfer_job job = job_of(1, round);
        transfer_start(t, &job);
        const long before = sleeps();
        EXPECT(!transfer_wait(t, &job, S / 10));
        EXPECT(ticks || sleeps() - before < 20);
        const uint64_t publish_ns = clock_now_ns();
        for (uint32_t i = 0; i < OWNERS; i++)
            publish(i, 1, round);
        EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
        EXPECT_EQ(job.status, SHD_OK);
        const uint64_t published_ns = clock_now_ns() - publish_ns;
        done_ns = published_ns < done_ns ? published_ns : done_ns;
        struct transfer_job stuck = job_of(1, round + 1);
        transfer_start(t, &stuck);
        EXPECT(!transfer_wait(t, &stuck, S / 100));
        const uint64_t cancel_ns = clock_now_ns();
        transfer_cancel(t, &stuck);
        const uint64_t cancelled_ns = clock_now_ns() - cancel_ns;
        back_ns = cancelled_ns < back_ns ? cancelled_ns : back_ns;
    }
    EXPECT(done_ns < S / 20 && back_ns < S / 20);
    transfer_free(t);
}

static int no_waitv(enum sys_kind kind)
{
    return kind == SYS_WAIT ? ENOSYS : 0;
}

TEST(thread_that_waits_for_a_board_sleeps_until_it_has_it)
{
    const struct sys_word word = { .at = &(uint32_t){ 1 }, .is = 0 };
    const bool has_waitv = sys_wait_words(&word, 1, 0) < 0 && errno == EAGAIN;
    expect_board_ends_sleep(/* ticks= */ !has_waitv);
    sys_fault = no_waitv; /* Linux before 5.16 */
    expect_board_ends_sleep(/* ticks= */ true);
    sys_fault = NULL;
}

/* A board that is placed over another one, which a thread sleeps at. */
TEST(board_of_a_successor_is_waited_for_once_the_thread_was_told)
{
    if (SANITIZE_THREAD)
        SKIP(
            "to TSan placing a page is a write to it; the thread reads the one board or the other");
    struct shd_err e = { 0 };
    uint64_t best_ns = S;
    reset();
    struct transfer *t = start(0);
    for (uint64_t round = 0; round < 5; round++) {
        struct segment was, is;
        EXPECT_OK(segment_new("board", SEGMENT_BOARD, SHD_PAGE_BYTES, &was, &e), &e);
        EXPECT_OK(segment_new("board", SEGMENT_BOARD, SHD_PAGE_BYTES, &is, &e), &e);
        board_init(was.base, 2);
        board_init(is.base, 2);
        o.pieces[0].board = was.base;
        o.pieces[1].bytes = o.pieces[2].bytes = 0;
        struct transfer_job job = job_of(1, 7);
        transfer_start(t, &job);
        EXPECT(!transfer_wait(t, &job, S / 100));
        EXPECT_OK(segment_place(was.base, is.fd, 0, SHD_PAGE_BYTES, /* writable= */ false, &e), &e);
        transfer_look(t);
        const uint64_t start_ns = clock_now_ns();
        board_publish(is.base, 1, 7);
        EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
        EXPECT_EQ(job.status, SHD_OK);
        const uint64_t waited_ns = clock_now_ns() - start_ns;
        best_ns = waited_ns < best_ns ? waited_ns : best_ns;
        segment_close(&was);
        segment_close(&is);
    }
    EXPECT(best_ns < S / 20);
    transfer_free(t);
}

TEST(a_delay_is_broken_off_and_the_end_does_not_wait)
{
    reset();
    for (uint32_t i = 0; i < OWNERS; i++)
        publish(i, 0, 1);
    struct transfer *t = start(20 * S);
    struct transfer_job job = job_of(0, 1), next = job_of(0, 1), stuck = job_of(1, 1);
    const uint64_t begin_ns = clock_now_ns();
    transfer_start(t, &job);
    EXPECT(!transfer_wait(t, &job, 20000000)); /* copied, in its delay */
    transfer_cancel(t, &job);
    transfer_start(t, &next);
    transfer_start(t, &stuck);
    transfer_free(t);
    EXPECT(clock_now_ns() - begin_ns < TEST_HANG_MS * (S / 1000));
    transfer_free(NULL);
}

/* -- Copies by a GPU --------------------------------------------------------------------------- */

/* A device that copies when it is told to. */
static struct {
    struct kern kern; /* first */
    pthread_mutex_t lock;
    struct kern_copy copies[OWNERS];
    struct kern_done *done[OWNERS];
    uint32_t count;
    int status; /* of queueing */
} gpu = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int gpu_submit(struct kern *k, const struct kern_op *op, struct kern_done *done,
                      struct shd_err *e)
{
    CHECK(k == &gpu.kern && op->kind == KERN_COPY);
    pthread_mutex_lock(&gpu.lock);
    const int r = gpu.status == SHD_OK ? SHD_OK : err_set(e, gpu.status, "no copies today");
    CHECK(gpu.count < OWNERS);
    if (r == SHD_OK) {
        gpu.copies[gpu.count] = op->copy;
        gpu.done[gpu.count++] = done;
    }
    pthread_mutex_unlock(&gpu.lock);
    return r;
}

static uint32_t gpu_queued(void)
{
    pthread_mutex_lock(&gpu.lock);
    const uint32_t count = gpu.count;
    pthread_mutex_unlock(&gpu.lock);
    return count;
}

static void gpu_await(uint32_t count)
{
    EXPECT_SOON(gpu_queued() >= count);
    EXPECT_EQ(gpu_queued(), count);
}

/* All that is queued; the last one ends with this status. */
static void gpu_finish(int status)
{
    pthread_mutex_lock(&gpu.lock);
    const uint32_t count = gpu.count;
    gpu.count = 0;
    pthread_mutex_unlock(&gpu.lock);
    for (uint32_t i = 0; i < count; i++) {
        memcpy(gpu.copies[i].to, gpu.copies[i].from, gpu.copies[i].bytes);
        gpu.done[i]->fn(gpu.done[i], i + 1 == count ? status : SHD_OK);
    }
}

static bool gpu_failed(struct kern *k, struct shd_err *ret_why)
{
    (void)k;
    err_set(ret_why, SHD_EIO, "a planted failure");
    return true;
}

static void reset_gpu(void)
{
    static struct kern_ops ops;
    ops = (struct kern_ops){ .submit = gpu_submit, .failed = gpu_failed };
    gpu.kern.ops = &ops;
    gpu.count = 0;
    gpu.status = SHD_OK;
    reset();
    for (uint32_t i = 0; i < OWNERS; i++)
        o.pieces[i].gpu = &gpu.kern;
}

TEST(copies_of_a_gpu_are_in_flight_together)
{
    reset_gpu();
    struct transfer *t = start(0);
    struct transfer_job job = job_of(0, 1);
    for (uint32_t i = 0; i < OWNERS; i++)
        publish(i, 0, 1);
    o.pieces[1].gpu = NULL; /* in the midst, one of the host's */
    transfer_start(t, &job);
    gpu_await(2);
    EXPECT(!transfer_wait(t, &job, 20000000));
    gpu_finish(SHD_OK);
    EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
    EXPECT_EQ(job.status, SHD_OK);
    EXPECT_EQ(job.bytes_copied, OWNERS * PIECE);
    EXPECT(memcmp(o.slot, o.publish, sizeof o.slot) == 0);
    transfer_free(t);
}

static sem_t held, let_go;

/* One thread from hold to go: it is a lock. */
static void *hold_it(void *ctx)
{
    transfer_hold(ctx);
    sem_post(&held);
    sem_wait(&let_go);
    transfer_go(ctx);
    return NULL;
}

/* Held while one is in flight: only once it has landed. Held before: none begins. Nor is anything
 * in flight while the thread waits for an owner: that one may be who is to be mapped anew. */
TEST(a_hold_waits_for_copies_and_keeps_others_from_beginning)
{
    pthread_t holder;
    reset_gpu();
    struct transfer *t = start(0);
    struct transfer_job job = job_of(0, 1);
    publish(0, 0, 1);
    transfer_start(t, &job); /* one is published, for the next it will wait */
    gpu_await(1);
    EXPECT(sem_init(&held, 0, 0) == 0 && sem_init(&let_go, 0, 0) == 0);
    EXPECT_EQ(pthread_create(&holder, NULL, hold_it, t), 0);
    nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
    EXPECT(sem_trywait(&held) != 0);
    gpu_finish(SHD_OK);
    sem_wait(&held); /* though the job is not done */
    publish(1, 0, 1);
    publish(2, 0, 1);
    nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
    EXPECT_EQ(gpu_queued(), 0);
    sem_post(&let_go);
    pthread_join(holder, NULL);
    gpu_await(2);
    gpu_finish(SHD_OK);
    EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
    EXPECT(memcmp(o.slot, o.publish, sizeof o.slot) == 0);
    transfer_free(t);
}

TEST(a_copy_that_fails_ends_its_job)
{
    reset_gpu();
    struct transfer *t = start(0);
    struct transfer_job job = job_of(0, 1);
    for (uint32_t i = 0; i < OWNERS; i++)
        publish(i, 0, 1);
    transfer_start(t, &job);
    gpu_await(OWNERS);
    gpu_finish(SHD_EIO);
    EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
    EXPECT_EQ(job.status, SHD_EIO);
    EXPECT(strstr(job.why.text, "a planted failure") != NULL);
    gpu.status = SHD_ENOMEM;
    transfer_cancel(t, &job);
    transfer_start(t, &job);
    EXPECT(transfer_wait(t, &job, TEST_HANG_MS * (S / 1000)));
    EXPECT_EQ(job.status, SHD_ENOMEM);
    EXPECT_STR(job.why.text, "no copies today");
    transfer_free(t);
}

/* -- Why a link of NCCL broke -------------------------------------------------------------------
 */

static struct comm_job broken_by(const char *why, bool remote)
{
    struct comm_job job = { .turn = 1, .status = SHD_EIO, .remote = remote };
    err_set(&job.why, SHD_EIO, "%s", why);
    return job;
}

static void expect_broken(struct nccl_owner *owner, const struct comm_job *job, const char *why)
{
    EXPECT(nccl_ended(owner, job));
    EXPECT(owner->broken);
    EXPECT_STR(owner->why.text, why);
}

TEST(a_known_reason_outlives_that_the_peer_broke_off)
{
    const struct comm_job ours = broken_by("no memory", false), next = broken_by("no route", false);
    const struct comm_job theirs = broken_by("remote process exited", true);
    const struct comm_job done = { .turn = 1, .status = SHD_OK };
    struct nccl_owner owner = { .far = true };
    expect_broken(&owner, &ours, "no memory");
    EXPECT(!nccl_ended(&owner, &next)); /* the other link of the pair: the first one told */
    EXPECT_STR(owner.why.text, "no memory");
    owner.broken = false; /* joined anew, and the owner is the first to see that it fails again */
    expect_broken(&owner, &theirs, "no memory");
    owner.broken = false;
    expect_broken(&owner, &next, "no route");
    EXPECT(
        !nccl_ended(&owner, &done)); /* that was mended: what comes now has a reason of its own */
    EXPECT(owner.turned);
    owner.broken = false;
    expect_broken(&owner, &theirs, "remote process exited");
}

TEST(links_that_were_ended_or_came_late_are_not_broken)
{
    struct comm_job ended = broken_by("ended", false), late = broken_by("late", false);
    struct nccl_owner owner = { .far = true };
    ended.ended = true;
    late.status = SHD_ETIMEDOUT;
    EXPECT(!nccl_ended(&owner, &ended) && !nccl_ended(&owner, &late));
    EXPECT(!owner.broken && owner.why.code == SHD_OK);
}

TEST_MAIN()
