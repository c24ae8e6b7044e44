/* pool.h: a small thread pool for loops over independent tasks.
 *
 * The number of tasks is part of the algorithm and never depends on the number of threads; a
 * task writes what no other task of the same run writes. So it does not matter which thread
 * runs which task when: the result is the same bits for any number of threads.
 *
 * Tasks run with denormals flushed to zero (FTZ and DAZ on x86-64), on every thread, and with
 * signals blocked: a signal that comes meanwhile is delivered to the caller after the run. This
 * is not a nicety: the sgemm of oneDNN 2.6 keeps a pointer into its heap workspace in the stack
 * pointer while it multiplies, so a signal handler's frame would overwrite the heap.
 */
#ifndef GPT_POOL_H
#define GPT_POOL_H

#include <stdint.h>

#include "client/shd.h"

#define POOL_THREADS_MAX 256

struct pool;

/* Start threads - 1 helpers; the caller of pool_run() is the last thread. 1..POOL_THREADS_MAX.
 * Errors: SHD_ENOMEM, SHD_EIO when a thread does not start. */
int pool_new(uint32_t threads, struct pool **ret_pool, struct shd_err *e);

/* Join the helpers and free. NULL is a no-op. */
void pool_free(struct pool *p);

uint32_t pool_threads(const struct pool *p);

/* Call fn(ctx, task, thread) once for each task < tasks, thread < pool_threads(); returns when
 * all are done. Not reentrant; one caller at a time. */
typedef void pool_fn(void *ctx, uint32_t task, uint32_t thread);
void pool_run(struct pool *p, uint32_t tasks, pool_fn *fn, void *ctx);

#endif
