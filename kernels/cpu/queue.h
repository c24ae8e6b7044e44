/* The host backend's queue and compute threads: what they run is a struct cpu_op, in queueing
 * order, each split by element ranges among the threads. cpu.c checks arguments and fills it in;
 * the ops proper are one table of functions per instruction set (isa.h).
 */
#ifndef SHD_KERNELS_CPU_QUEUE_H
#define SHD_KERNELS_CPU_QUEUE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/muon.h"
#include "kernels/cpu/timed.h"
#include "kernels/work.h"
#include "proto/files/ckpt.h"

struct cpu_kern;
struct cpu_op;
struct cpu_thread;

/* Do one range of an op on this thread. */
typedef int cpu_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r);

/* The leader's, when all of an op is done: another pass over it, as *op then says? False: it is
 * over. */
typedef bool cpu_next(struct cpu_kern *k, struct cpu_op *op);

/* One queued operation. */
struct cpu_op {
    struct work work;
    cpu_run *run;
    cpu_next *next; /* NULL: it is one pass */
    uint64_t chunk; /* of work.count: what a thread takes at a time */
};

/* One compute thread. Thread 0 leads: it takes ops from the queue and reports them done. The
 * others sleep unless an op has chunks to share. Its record in an op's trail is that of its index.
 */
struct cpu_thread {
    _Alignas(128) _Atomic uint64_t next_chunk; /* of this thread's part of the shared op */
    uint64_t chunks_end;                       /* of that part */
    _Alignas(128) struct cpu_kern *kern;
    pthread_t id;
    uint32_t index;
    bool took_part; /* in the leader's op: the fields below are of that op */
    int status;     /* first that was not SHD_OK */
    struct kern_sum sum;
    struct kern_change change;
    struct ckpt_hasher *hasher; /* owned */
};

/* A counter that threads wait on: spin briefly, then sleep on a futex. Waking costs one load when
 * nobody sleeps. */
struct gate {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
};

#define CPU_RING (2 * KERN_QUEUE_MAX) /* slots: the limit, and room for the order to leave */

struct cpu_kern {
    struct kern base;
    void *memory;        /* owned: what this struct lies in */
    struct kern_ops ops; /* what base.ops points to: the common table under the widest ISA's name */
    struct timed timed;
    uint32_t thread_count;
    uint32_t threads_started;
    pthread_mutex_t push_lock;        /* taken by callers only; and of what they run themselves */
    _Alignas(128) struct gate pushed; /* ops ever queued, modulo 2^32 */
    _Alignas(128) _Atomic uint32_t popped; /* ops ever finished */
    _Alignas(128) struct gate work;        /* shared ops ever opened: helpers wait here */
    _Atomic bool leaving;
    _Alignas(128) struct gate crew; /* helpers inside the shared op | CREW_OPEN */
    const struct cpu_op *shared;    /* stable while crew is not 0 */
    struct muon_run muon;           /* the leader's */
    struct cpu_op ring[CPU_RING];
    struct cpu_thread threads[]; /* [thread_count] */
};

/* Start the threads, pinned if asked. SHD_ENOMEM, SHD_EINVAL (more threads to pin than CPUs). On
 * failure queue_stop() still has to be called. */
int queue_start(struct cpu_kern *k, const struct kern_config *config, struct shd_err *e);

/* Run what is queued, then end the threads that were started. */
void queue_stop(struct cpu_kern *k);

/* Run op, which is one chunk unless there is one thread, on this thread, if nothing is queued and
 * nothing runs; what is queued meanwhile waits for it. False: there is something, and nothing was
 * done. Any thread. */
bool queue_run(struct cpu_kern *k, struct cpu_op *op, int *ret_status);

/* Queue a copy of op. SHD_EBUSY when KERN_QUEUE_MAX are queued. Any thread. */
int queue_push(struct cpu_kern *k, const struct cpu_op *op, struct shd_err *e);

#endif
