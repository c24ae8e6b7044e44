/* Inside the CUDA backend: what its files share. Users want kern_cuda_new() of cuda.h.
 *
 * ops.c checks arguments and fills a struct cuda_op; device.c has the device thread, which makes
 * every call that needs the stream. It takes ops in order, each in one or several *parts*, and
 * launches ahead: up to CUDA_FLIGHT parts are on the device at once, each with an event and staging
 * memory of its own. When the oldest part's event is reached the thread does what is left to do on
 * the host (sums, hashes) and, after an op's last part, reports it. memory.c makes, maps and shares
 * the device's memory, on whichever thread asks.
 *
 * The context is the device's primary one, so that a CUDA runtime or PyTorch in the same process
 * shares it. Functions here that call the driver need it current: cuda_enter().
 *
 * Failures: a call that fails ends its op with a status. After a sticky error nothing can be done
 * in this process any more: every op that is queued, and every later one, ends with SHD_EIO.
 */
#ifndef SHD_KERNELS_CUDA_DEVICE_H
#define SHD_KERNELS_CUDA_DEVICE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/args.h"
#include "kernels/work.h"
#include "proto/gpu/cuda.h"

#define CUDA_FLIGHT      8u
#define CUDA_STAGE_BYTES (UINT64_C(2) << 20) /* of a part, on either side */

enum cuda_fn {
    CUDA_FILL,
    CUDA_CAST,
    CUDA_ACCUMULATE,
    CUDA_SUMSQ,
    CUDA_ADAMW,
    CUDA_SGD,
    CUDA_LION,
    CUDA_ADAMW_TORCH,
    CUDA_SGD_TORCH,
    CUDA_MEAN,
    CUDA_ADAMW_INT8,
    CUDA_SGD_INT8,
    CUDA_LION_INT8,
    CUDA_ADAMW_TORCH_INT8,
    CUDA_SGD_TORCH_INT8,
    CUDA_EMA,
    CUDA_QUANTIZE,
    CUDA_DEQUANTIZE,
    CUDA_TRAIL_BEGIN,
    CUDA_FN_COUNT
};

/* A kernel as it is launched. */
struct cuda_kernel {
    const char *name; /* "shd_fill" */
    CUfunction function;
    unsigned blocks_max; /* that are on the device at once; those that records are kept for at
                          * most CUDA_BLOCKS_MAX */
};

struct cuda_kern;
struct cuda_part;

/* One queued operation. */
struct cuda_op {
    struct work work;
    /* Queue the part that begins at p->first on the stream, of no more than p->count elements; sets
     * p->count to how many it took. Not called for an op of none. */
    int (*launch)(struct cuda_kern *k, struct cuda_part *p);
    /* NULL, or what the host does when the device is done with the part. */
    int (*finish)(struct cuda_kern *k, struct cuda_part *p);
    uint64_t launched; /* of work.count */
    int status;        /* first that was not SHD_OK */
};

/* A part of an op on the device, and what it stages through. */
struct cuda_part {
    struct cuda_op *op; /* in the ring; borrowed until its last part is done */
    uint64_t first, count;
    bool last;   /* of its op */
    bool waits;  /* for event */
    bool staged; /* of a hash: the elements are in host[]; of an update: it is measured */
    int status;
    CUevent event;      /* owned, as is what follows */
    void *host;         /* [CUDA_STAGE_BYTES], pinned */
    CUdeviceptr device; /* [CUDA_STAGE_BYTES] */
};

struct cuda_kern {
    struct kern base;
    struct kern_ops ops; /* what base.ops points to: the common table with this device's UUID */
    const struct cuda *cuda;
    CUdevice device;
    char name[64]; /* "CUDA device 0 (NVIDIA H100)", for messages */
    CUcontext ctx; /* owned: retained; NULL: not yet, as below */
    CUmodule module;
    struct cuda_kernel kernels[CUDA_FN_COUNT];
    uint64_t granule;  /* sizes of segments are multiples of it */
    struct kern *host; /* owned: hashes */

    CUstream stream;        /* the device thread's */
    CUstream memory_stream; /* of memory.c, under memory_lock */
    pthread_mutex_t memory_lock;

    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* over the next six */
    pthread_cond_t pushed_one;
    uint64_t pushed, popped; /* ops ever queued, and reported */
    bool leaving;
    struct shd_err failure; /* the sticky error, code SHD_OK: none */
    struct shd_err last;    /* the last call that failed, likewise */
    _Atomic bool broken;    /* there is one */

    uint64_t next_op;                    /* device thread: the op whose parts are launched */
    uint64_t parts_begun, parts_done;    /* likewise */
    struct cuda_part parts[CUDA_FLIGHT]; /* parts_done % CUDA_FLIGHT is the oldest */
    struct cuda_op ring[KERN_QUEUE_MAX];
};

static inline struct cuda_kern *cuda_kern_of(struct kern *k)
{
    return (struct cuda_kern *)k;
}

static inline CUdeviceptr cuda_address(const void *p)
{
    return (CUdeviceptr)(uintptr_t)p;
}

/* Make the device's context current for this thread. */
int cuda_enter(const struct cuda_kern *k, struct shd_err *e);

/* cuda_result() that also notes what failed, and a sticky error. e may be NULL. */
int cuda_call(struct cuda_kern *k, CUresult result, struct shd_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Wait for all of a stream. On an error it is idle nevertheless, or, when that cannot be brought
 * about, the device is broken. */
int cuda_wait(struct cuda_kern *k, CUstream stream, struct shd_err *e);

/* Nothing can be done in this process any more, and why: the first reason stays. Any thread. */
void cuda_break(struct cuda_kern *k, const struct shd_err *why);

/* Of struct kern_ops. */
int cuda_health(struct kern *k, struct shd_err *e);
bool cuda_failed(struct kern *k, struct shd_err *ret_why);

/* Start the device thread. SHD_ENOMEM. */
int cuda_queue_start(struct cuda_kern *k, struct shd_err *e);

/* Run what is queued, then end the thread, if it was started. */
void cuda_queue_stop(struct cuda_kern *k);

/* Queue a copy of op. SHD_EBUSY when KERN_QUEUE_MAX are queued. Any thread. */
int cuda_queue_push(struct cuda_kern *k, const struct cuda_op *op, struct shd_err *e);

#endif
