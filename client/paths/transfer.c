/* See transfer.h. */
#include "client/paths/transfer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/paths/kern_run.h"
#include "kernels/cpu/decode.h"
#include "kernels/cuda/stream.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define BOARD_SLICE_NS  (100 * NS_PER_MS) /* between two looks at a job, when nobody says so */
#define BEHIND_SLEEP_NS 50000             /* between two looks at a mark */

struct transfer {
    pthread_t thread;
    pthread_mutex_t lock;  /* of all below, and of jobs' states */
    pthread_cond_t work;   /* for the thread: a job, a cancellation, the end */
    pthread_cond_t change; /* for callers: a job changed its state */
    struct transfer_job *first, **last;
    bool leaving;
    _Atomic uint32_t look; /* 1: the thread is to look at all of it again (board_stop()) */
    uint64_t delay_ns;
    pthread_mutex_t gpu_lock; /* held while a GPU copies */
    struct kern_batch flight; /* the thread's: what GPUs copy now */
    bool flying;              /* the thread's: there may be something, and gpu_lock is held */
};

static void wait_until(struct transfer *t, pthread_cond_t *cond, uint64_t at_ns)
{
    const struct timespec at = clock_timespec(at_ns);
    pthread_cond_timedwait(cond, &t->lock, &at); /* the caller looks at the clock itself */
}

/* -- On the thread ----------------------------------------------------------------------------- */

static bool stopped(struct transfer *t, const struct transfer_job *job)
{
    pthread_mutex_lock(&t->lock);
    const bool stop = t->leaving || job->cancelled;
    pthread_mutex_unlock(&t->lock);
    return stop;
}

/* Wait for the copies of this job that are in flight. */
static int land(struct transfer *t, struct transfer_job *job)
{
    if (!t->flying)
        return SHD_OK;
    const int r = kern_batch_wait(&t->flight, &job->why);
    t->flying = false;
    pthread_mutex_unlock(&t->gpu_lock);
    return r;
}

static int fly(struct transfer *t, struct transfer_job *job, const struct transfer_piece *piece)
{
    const struct kern_op op = {
        KERN_COPY, { .copy = { job->to + piece->offset_bytes, piece->from, piece->bytes } }
    };
    if (!t->flying)
        pthread_mutex_lock(&t->gpu_lock);
    t->flying = true;
    return kern_batch_add(&t->flight, piece->gpu, &op, &job->why);
}

static void decode_piece(const struct transfer_job *job, const struct transfer_piece *piece)
{
    const struct kern_decode decode = { .out = job->to + piece->offset_bytes,
                                        .in = piece->from,
                                        .codec = piece->codec,
                                        .out_dtype = piece->dtype,
                                        .elems = piece->elems };
    cpu_decode(&decode);
}

/* SHD_OK: the piece is published. SHD_EGONE: cancelled. */
static int wait_piece(struct transfer *t, struct transfer_job *job,
                      const struct transfer_piece *piece)
{
    if (board_wait(piece->board, job->unit, job->step, /* timeout_ns= */ 0) == SHD_OK)
        return SHD_OK;
    const int r = land(t, job);
    if (r != SHD_OK)
        return r;
    do {
        atomic_store_explicit(&t->look, 0, memory_order_relaxed); /* before what is looked at */
        if (stopped(t, job))
            return SHD_EGONE;
    } while (board_wait_or(piece->board, job->unit, job->step, &t->look, BOARD_SLICE_NS) != SHD_OK);
    return SHD_OK;
}

/* One owner's slice. SHD_EGONE: cancelled. */
static int copy_piece(struct transfer *t, struct transfer_job *job,
                      const struct transfer_piece *piece)
{
    int r = wait_piece(t, job, piece);
    if (r != SHD_OK)
        return r;
    job->version = board_version(piece->board, job->unit);
    if (job->version != job->step)
        return SHD_ESTEP;
    if (piece->codec != CODEC_NONE)
        decode_piece(job, piece);
    else if (piece->gpu == NULL)
        memcpy(job->to + piece->offset_bytes, piece->from, piece->bytes);
    else
        r = fly(t, job, piece);
    if (r != SHD_OK)
        return r;
    job->bytes_copied += piece->bytes;
    return stopped(t, job) ? SHD_EGONE : SHD_OK;
}

/* The time that a slow link would take; the lock is held. */
static void delay(struct transfer *t, const struct transfer_job *job)
{
    const uint64_t end_ns = clock_now_ns() + t->delay_ns;
    while (t->delay_ns > 0 && !t->leaving && !job->cancelled && clock_now_ns() < end_ns)
        wait_until(t, &t->work, end_ns);
}

static void set_waits(struct transfer *t, struct transfer_job *job, bool waits)
{
    pthread_mutex_lock(&t->lock);
    job->waits = waits;
    pthread_mutex_unlock(&t->lock);
}

/* SHD_EGONE: cancelled. */
static int wait_behind(struct transfer *t, struct transfer_job *job)
{
    const struct timespec pause = { .tv_nsec = BEHIND_SLEEP_NS };
    bool reached = job->behind == NULL;
    if (reached)
        return SHD_OK;
    set_waits(t, job, true);
    for (;;) {
        const int r = cuda_mark_look(job->gpu, job->behind, &reached, &job->why);
        if (r != SHD_OK)
            return r;
        if (reached)
            break;
        if (stopped(t, job))
            return SHD_EGONE;
        nanosleep(&pause, NULL);
    }
    set_waits(t, job, false);
    return SHD_OK;
}

static int copy_pieces(struct transfer *t, struct transfer_job *job)
{
    int r = wait_behind(t, job);
    if (r != SHD_OK)
        return r;
    for (job->piece = 0; job->piece < job->piece_count; job->piece++) {
        const struct transfer_piece *piece = &job->pieces[job->piece];
        if (piece->bytes == 0)
            continue;
        r = copy_piece(t, job, piece);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

static int run_job(struct transfer *t, struct transfer_job *job)
{
    const int r = copy_pieces(t, job);
    const int landed = land(t, job); /* in any case: they use the job's memory */
    return r == SHD_OK ? landed : r;
}

static void *transfer_main(void *ctx)
{
    struct transfer *t = ctx;
    pthread_mutex_lock(&t->lock);
    while (!t->leaving) {
        struct transfer_job *job = t->first;
        if (job == NULL) {
            pthread_cond_wait(&t->work, &t->lock);
            continue;
        }
        t->first = job->next;
        if (t->first == NULL)
            t->last = &t->first;
        job->state = TRANSFER_RUNNING;
        pthread_mutex_unlock(&t->lock);
        const int status = run_job(t, job);
        pthread_mutex_lock(&t->lock);
        if (status == SHD_OK)
            delay(t, job);
        job->status = status;
        job->state = TRANSFER_DONE;
        pthread_cond_broadcast(&t->change);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

/* -- For callers ------------------------------------------------------------------------------- */

static void destroy(struct transfer *t)
{
    pthread_cond_destroy(&t->change);
    pthread_cond_destroy(&t->work);
    pthread_mutex_destroy(&t->lock);
    pthread_mutex_destroy(&t->gpu_lock);
    free(t);
}

int transfer_new(uint64_t delay_ns, struct transfer **ret_transfer, struct shd_err *e)
{
    struct transfer *t = sys_calloc(1, sizeof *t);
    if (t == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a transfer thread");
    t->delay_ns = delay_ns;
    t->last = &t->first;
    kern_batch_init(&t->flight);
    pthread_mutex_init(&t->lock, NULL);
    pthread_mutex_init(&t->gpu_lock, NULL);
    sys_condition(&t->work);
    sys_condition(&t->change);
    const int failed = sys_thread(&t->thread, NULL, transfer_main, t);
    if (failed != 0) {
        destroy(t);
        return err_set(e, SHD_ENOMEM, "start a transfer thread: %s", strerror(failed));
    }
    *ret_transfer = t;
    return SHD_OK;
}

void transfer_free(struct transfer *t)
{
    if (t == NULL)
        return;
    pthread_mutex_lock(&t->lock);
    t->leaving = true;
    pthread_cond_signal(&t->work);
    board_stop(&t->look);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    destroy(t);
}

void transfer_start(struct transfer *t, struct transfer_job *job)
{
    pthread_mutex_lock(&t->lock);
    CHECK(job->state == TRANSFER_IDLE);
    job->state = TRANSFER_QUEUED;
    job->cancelled = job->waits = false;
    job->status = SHD_OK;
    job->bytes_copied = 0;
    job->next = NULL;
    *t->last = job;
    t->last = &job->next;
    pthread_cond_signal(&t->work);
    pthread_mutex_unlock(&t->lock);
}

bool transfer_wait(struct transfer *t, struct transfer_job *job, uint64_t timeout_ns)
{
    const uint64_t end_ns = clock_now_ns() + timeout_ns;
    pthread_mutex_lock(&t->lock);
    CHECK(job->state != TRANSFER_IDLE);
    while (job->state != TRANSFER_DONE && timeout_ns > 0 && clock_now_ns() < end_ns)
        wait_until(t, &t->change, end_ns);
    const bool done = job->state == TRANSFER_DONE;
    pthread_mutex_unlock(&t->lock);
    return done;
}

bool transfer_waits(struct transfer *t, const struct transfer_job *job)
{
    pthread_mutex_lock(&t->lock);
    const bool waits = job->state == TRANSFER_RUNNING && job->waits;
    pthread_mutex_unlock(&t->lock);
    return waits;
}

static void unqueue(struct transfer *t, const struct transfer_job *job)
{
    struct transfer_job **at = &t->first;
    while (*at != job) {
        at = &(*at)->next;
        CHECK(*at != NULL);
    }
    *at = job->next;
    if (job->next == NULL)
        t->last = at;
}

void transfer_cancel(struct transfer *t, struct transfer_job *job)
{
    pthread_mutex_lock(&t->lock);
    if (job->state == TRANSFER_QUEUED)
        unqueue(t, job);
    job->cancelled = true;
    pthread_cond_signal(&t->work); /* it may be in a delay, */
    if (job->state == TRANSFER_RUNNING)
        board_stop(&t->look); /* or at a board */
    while (job->state == TRANSFER_RUNNING)
        pthread_cond_wait(&t->change, &t->lock);
    job->state = TRANSFER_IDLE;
    pthread_mutex_unlock(&t->lock);
}

void transfer_look(struct transfer *t)
{
    pthread_mutex_lock(&t->lock);
    board_stop(&t->look);
    pthread_mutex_unlock(&t->lock);
}

void transfer_hold(struct transfer *t)
{
    pthread_mutex_lock(&t->gpu_lock);
}

void transfer_go(struct transfer *t)
{
    pthread_mutex_unlock(&t->gpu_lock);
}
