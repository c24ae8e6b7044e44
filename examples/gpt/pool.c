/* pool.c: see pool.h.
 *
 * Happy path: pool_run() publishes the job under the mutex and raises `generation`; a helper
 * that spins or sleeps on it joins (`active`), takes task numbers from `next` until none is
 * left, and leaves. The caller takes tasks as well, then waits until nobody is active. A helper
 * that wakes after that finds no job and goes back to sleep.
 */
#include "examples/gpt/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "proto/base/status.h"

/* A step has hundreds of short runs, back to back: sleep only when the next one is late. */
#define POOL_SPINS 4000

struct pool_helper {
    struct pool *pool; /* borrowed: it outlives its helpers */
    pthread_t thread;
    uint32_t index;
};

struct pool_job {
    pool_fn *fn;
    void *ctx; /* borrowed while the job runs */
    uint32_t tasks;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t wake, idle;
    atomic_uint generation;
    atomic_uint next;    /* next task of the job */
    atomic_uint active;  /* helpers inside the job; changed under the lock */
    struct pool_job job; /* under the lock; fn NULL: none */
    bool stopping;
    uint32_t threads, started;
    struct pool_helper *helpers; /* owned, [threads - 1] */
};

static void pool_pause(void)
{
#ifdef __x86_64__
    _mm_pause();
#endif
}

/* Denormals cost hundreds of cycles each and carry nothing a training run needs. */
static uint32_t pool_flush_denormals(void)
{
#ifdef __x86_64__
    const uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040u); /* FTZ, DAZ */
    return before;
#else
    return 0;
#endif
}

static void pool_restore_denormals(uint32_t before)
{
#ifdef __x86_64__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* Signals stay out of tasks: see pool.h. Signals that report a fault of the running instruction are
 * left alone. */
static void pool_block_signals(sigset_t *ret_before)
{
    static const int faults[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT };
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_BLOCK, &all, ret_before);
}

static void pool_take_tasks(struct pool *p, const struct pool_job *job, uint32_t thread)
{
    for (;;) {
        const uint32_t task = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
        if (task >= job->tasks)
            return;
        job->fn(job->ctx, task, thread);
    }
}

/* Wait for a generation other than seen, and join its job if that still runs (else the job's fn
 * is NULL). False: stopping. */
static bool pool_join(struct pool *p, uint32_t *seen, struct pool_job *ret_job)
{
    for (int i = 0; i < POOL_SPINS; i++) {
        if (atomic_load_explicit(&p->generation, memory_order_acquire) != *seen)
            break;
        pool_pause();
    }
    pthread_mutex_lock(&p->lock);
    while (!p->stopping && atomic_load(&p->generation) == *seen)
        pthread_cond_wait(&p->wake, &p->lock);
    *seen = atomic_load(&p->generation);
    *ret_job = p->job;
    const bool stopping = p->stopping;
    if (!stopping && p->job.fn != NULL)
        atomic_fetch_add(&p->active, 1);
    pthread_mutex_unlock(&p->lock);
    return !stopping;
}

static void *pool_helper_main(void *arg)
{
    const struct pool_helper *h = arg;
    struct pool *p = h->pool;
    pool_flush_denormals();
    uint32_t seen = 0;
    struct pool_job job;
    while (pool_join(p, &seen, &job)) {
        if (job.fn == NULL)
            continue;
        pool_take_tasks(p, &job, h->index);
        pthread_mutex_lock(&p->lock);
        if (atomic_fetch_sub(&p->active, 1) == 1)
            pthread_cond_signal(&p->idle);
        pthread_mutex_unlock(&p->lock);
    }
    return NULL;
}

/* Helpers inherit the mask they are started under. */
static int pool_start(struct pool *p, struct shd_err *e)
{
    sigset_t before;
    pool_block_signals(&before);
    int r = 0;
    for (uint32_t i = 0; i + 1 < p->threads && r == 0; i++) {
        struct pool_helper *h = &p->helpers[i];
        *h = (struct pool_helper){ .pool = p, .index = i + 1 };
        r = pthread_create(&h->thread, NULL, pool_helper_main, h);
        if (r == 0)
            p->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r != 0)
        return err_set(e, SHD_EIO, "start compute thread %u of %u: %s", p->started + 2, p->threads,
                       strerror(r));
    return SHD_OK;
}

int pool_new(uint32_t threads, struct pool **ret_pool, struct shd_err *e)
{
    if (threads < 1 || threads > POOL_THREADS_MAX)
        return err_set(e, SHD_ERANGE, "%u compute threads, limits are 1 to %d", threads,
                       POOL_THREADS_MAX);
    struct pool *p = calloc(1, sizeof *p);
    struct pool_helper *helpers = calloc(threads, sizeof *helpers);
    if (p == NULL || helpers == NULL) {
        free(p);
        free(helpers);
        return err_set(e, SHD_ENOMEM, "no memory for %u compute threads", threads);
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    pthread_cond_init(&p->idle, NULL);
    p->threads = threads;
    p->helpers = helpers;
    const int r = pool_start(p, e);
    if (r != SHD_OK) {
        pool_free(p);
        return r;
    }
    *ret_pool = p;
    return SHD_OK;
}

void pool_free(struct pool *p)
{
    if (p == NULL)
        return;
    pthread_mutex_lock(&p->lock);
    p->stopping = true;
    atomic_fetch_add(&p->generation, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->started; i++)
        pthread_join(p->helpers[i].thread, NULL);
    pthread_cond_destroy(&p->idle);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p->helpers);
    free(p);
}

uint32_t pool_threads(const struct pool *p)
{
    return p->threads;
}

static void pool_wake_helpers(struct pool *p, const struct pool_job *job)
{
    pthread_mutex_lock(&p->lock);
    p->job = *job;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    atomic_fetch_add(&p->generation, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

static void pool_wait_helpers(struct pool *p)
{
    for (int i = 0; i < POOL_SPINS && atomic_load(&p->active) > 0; i++)
        pool_pause();
    pthread_mutex_lock(&p->lock);
    p->job.fn = NULL; /* a helper that wakes late finds nothing to join */
    while (atomic_load(&p->active) > 0)
        pthread_cond_wait(&p->idle, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

void pool_run(struct pool *p, uint32_t tasks, pool_fn *fn, void *ctx)
{
    const struct pool_job job = { .fn = fn, .ctx = ctx, .tasks = tasks };
    sigset_t signals;
    pool_block_signals(&signals);
    const uint32_t denormals = pool_flush_denormals();
    if (p->threads == 1 || tasks == 1) {
        for (uint32_t task = 0; task < tasks; task++)
            fn(ctx, task, 0);
    } else {
        pool_wake_helpers(p, &job);
        pool_take_tasks(p, &job, 0);
        pool_wait_helpers(p);
    }
    pool_restore_denormals(denormals);
    pthread_sigmask(SIG_SETMASK, &signals, NULL);
}
