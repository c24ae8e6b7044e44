/* See device.h. The device thread takes ops in order, launches them ahead by parts and reports them
 * in order.
 *
 * The thread sleeps on `pushed_one` while nothing is on the device. While something is, it asks for
 * the oldest part's event: often for some 20 us, then every 50 us, since there is no way to wait
 * for an event and for the next op at once. */
#include "kernels/cuda/device.h"

#include <errno.h>
#include <immintrin.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define QUERY_SPINS    16u
#define QUERY_PAUSES   64u
#define QUERY_SLEEP_NS 50000

int cuda_enter(const struct cuda_kern *k, struct shd_err *e)
{
    return cuda_result(k->cuda, k->cuda->cuCtxSetCurrent(k->ctx), e, "use the context of %s",
                       k->name);
}

void cuda_break(struct cuda_kern *k, const struct shd_err *why)
{
    pthread_mutex_lock(&k->lock);
    if (k->failure.code == SHD_OK)
        k->failure = *why;
    pthread_mutex_unlock(&k->lock);
    atomic_store(&k->broken, true);
}

int cuda_call(struct cuda_kern *k, CUresult result, struct shd_err *e, const char *fmt, ...)
{
    if (result == CUDA_SUCCESS)
        return SHD_OK;
    char what[SHD_ERR_TEXT_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    struct shd_err own = { 0 };
    const int r = cuda_result(k->cuda, result, &own, "%s", what);
    pthread_mutex_lock(&k->lock);
    k->last = own;
    pthread_mutex_unlock(&k->lock);
    if (cuda_sticky(result))
        cuda_break(k, &own);
    if (e != NULL)
        *e = own;
    return r;
}

int cuda_wait(struct cuda_kern *k, CUstream stream, struct shd_err *e)
{
    const int r = cuda_call(k, k->cuda->cuStreamSynchronize(stream), e, "wait for %s", k->name);
    if (r == SHD_OK)
        return SHD_OK;
    struct shd_err again = { 0 };
    if (cuda_call(k, k->cuda->cuStreamSynchronize(stream), &again, "wait for %s", k->name) !=
        SHD_OK)
        cuda_break(k, &again);
    return r;
}

int cuda_health(struct kern *kern, struct shd_err *e)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    pthread_mutex_lock(&k->lock);
    const struct shd_err failure = k->failure;
    pthread_mutex_unlock(&k->lock);
    return failure.code == SHD_OK ? SHD_OK : err_set(e, SHD_EIO, "%s", failure.text);
}

bool cuda_failed(struct kern *kern, struct shd_err *ret_why)
{
    struct cuda_kern *k = cuda_kern_of(kern);
    pthread_mutex_lock(&k->lock);
    const struct shd_err why = k->failure.code != SHD_OK ? k->failure : k->last;
    pthread_mutex_unlock(&k->lock);
    if (why.code == SHD_OK)
        return false;
    *ret_why = why;
    return true;
}

/* -- The device thread --------------------------------------------------------------------------
 */

/* The part's event behind its work. */
static void record_event(struct cuda_kern *k, struct cuda_part *p)
{
    struct shd_err e = { 0 };
    const int r = cuda_call(k, k->cuda->cuEventRecord(p->event, k->stream), &e,
                            "record an event on %s", k->name);
    p->waits = r == SHD_OK;
    if (r == SHD_OK)
        return;
    if (p->status == SHD_OK)
        p->status = r;
    cuda_wait(k, k->stream, NULL);
}

/* Launch the next part of the op at next_op; a slot is free. */
static void launch_part(struct cuda_kern *k)
{
    struct cuda_op *op = &k->ring[k->next_op % KERN_QUEUE_MAX];
    struct cuda_part *p = &k->parts[k->parts_begun++ % CUDA_FLIGHT];
    p->op = op;
    p->first = op->launched;
    p->count = op->work.count - op->launched;
    p->waits = p->staged = false;
    p->status = atomic_load(&k->broken) ? SHD_EIO : SHD_OK;
    if (p->status == SHD_OK && p->count > 0) {
        p->status = op->launch(k, p);
        CHECK(p->status != SHD_OK || (p->count > 0 && p->count <= op->work.count - op->launched));
        record_event(k, p);
    }
    op->launched += p->count;
    p->last = p->status != SHD_OK || op->launched == op->work.count;
    if (p->last)
        k->next_op++;
}

/* True: the oldest part is done on the device. */
static bool part_reached(struct cuda_kern *k, struct cuda_part *p)
{
    if (!p->waits)
        return true;
    const CUresult result = k->cuda->cuEventQuery(p->event);
    if (result == CUDA_ERROR_NOT_READY)
        return false;
    const int r = cuda_call(k, result, NULL, "wait for work on %s", k->name);
    if (r != SHD_OK) {
        if (p->status == SHD_OK)
            p->status = r;
        cuda_wait(k, k->stream, NULL);
    }
    p->waits = false;
    return true;
}

/* The op's last part is done: report. Its slot may be used again before done is called. */
static void op_end(struct cuda_kern *k, struct cuda_op *op)
{
    const int status = op->status == SHD_OK      ? SHD_OK
                       : atomic_load(&k->broken) ? SHD_EIO
                                                 : op->status;
    work_end(&op->work, status);
    struct kern_done *done = op->work.done;
    pthread_mutex_lock(&k->lock);
    k->popped++;
    pthread_mutex_unlock(&k->lock);
    if (done != NULL)
        done->fn(done, status);
}

static void part_end(struct cuda_kern *k, struct cuda_part *p)
{
    struct cuda_op *op = p->op;
    if (p->status == SHD_OK && p->count > 0 && op->status == SHD_OK && op->finish != NULL)
        p->status = op->finish(k, p);
    if (op->status == SHD_OK)
        op->status = p->status;
    const bool last = p->last;
    k->parts_done++; /* *p is free now */
    if (last)
        op_end(k, op);
}

enum next { LAUNCH, LOOK, LEAVE };

/* The thread's next step; sleeps while there is nothing to do. */
static enum next next_step(struct cuda_kern *k)
{
    const bool flying = k->parts_begun > k->parts_done;
    pthread_mutex_lock(&k->lock);
    while (!flying && k->next_op == k->pushed && !k->leaving)
        pthread_cond_wait(&k->pushed_one, &k->lock);
    const bool queued = k->next_op < k->pushed;
    pthread_mutex_unlock(&k->lock);
    if (queued && k->parts_begun - k->parts_done < CUDA_FLIGHT)
        return LAUNCH;
    return flying ? LOOK : LEAVE;
}

/* Until the oldest part is done or there is something to launch, but not long. */
static void wait_a_little(struct cuda_kern *k)
{
    const struct timespec until = clock_timespec(clock_now_ns() + QUERY_SLEEP_NS);
    pthread_mutex_lock(&k->lock);
    if (k->next_op == k->pushed || k->parts_begun - k->parts_done == CUDA_FLIGHT)
        pthread_cond_timedwait(&k->pushed_one, &k->lock, &until);
    pthread_mutex_unlock(&k->lock);
}

static void *device_main(void *arg)
{
    struct cuda_kern *k = arg;
    prctl(PR_SET_TIMERSLACK, 1000);
    struct shd_err e = { 0 };
    if (cuda_enter(k, &e) != SHD_OK)
        cuda_break(k, &e);
    for (unsigned looks = 0;;) {
        const enum next next = next_step(k);
        if (next == LEAVE)
            return NULL;
        if (next == LAUNCH) {
            launch_part(k);
            continue;
        }
        struct cuda_part *p = &k->parts[k->parts_done % CUDA_FLIGHT];
        if (part_reached(k, p)) {
            part_end(k, p);
            looks = 0;
        } else if (++looks > QUERY_SPINS) {
            wait_a_little(k);
        } else {
            for (unsigned i = 0; i < QUERY_PAUSES; i++)
                _mm_pause();
        }
    }
}

int cuda_queue_start(struct cuda_kern *k, struct shd_err *e)
{
    const int error = sys_thread(&k->thread, NULL, device_main, k);
    if (error != 0)
        return err_set(e, SHD_ENOMEM, "start the thread of %s: %s", k->name, strerror(error));
    k->started = true;
    pthread_setname_np(k->thread, "shd-cuda"); /* for top(1); nothing is lost when it fails */
    return SHD_OK;
}

void cuda_queue_stop(struct cuda_kern *k)
{
    if (!k->started)
        return;
    pthread_mutex_lock(&k->lock);
    k->leaving = true;
    pthread_cond_signal(&k->pushed_one);
    pthread_mutex_unlock(&k->lock);
    pthread_join(k->thread, NULL);
    k->started = false;
}

int cuda_queue_push(struct cuda_kern *k, const struct cuda_op *op, struct shd_err *e)
{
    CHECK(op->launch != NULL);
    int r = SHD_OK;
    pthread_mutex_lock(&k->lock);
    if (k->pushed - k->popped < KERN_QUEUE_MAX) {
        k->ring[k->pushed++ % KERN_QUEUE_MAX] = *op;
        pthread_cond_signal(&k->pushed_one);
    } else {
        r = err_set(e, SHD_EBUSY, "%u operations are queued on %s, the limit", KERN_QUEUE_MAX,
                    k->name);
    }
    pthread_mutex_unlock(&k->lock);
    return r;
}
