/* Inside the CUDA backend: what its files share. Users want kern_cuda_new() of kernels/kern.h, and
 * the one function at the end.
 *
 * ops.c checks arguments and fills a struct cuda_op; queue.c has the device thread, which makes
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
#ifndef SHD_KERNELS_CUDA_CUDA_H
#define SHD_KERNELS_CUDA_CUDA_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/args.h"
#include "kernels/kern.h"
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

/* One queued operation. The arguments are a copy; what they point to is borrowed until done. */
struct cuda_op {
    /* Queue the part that begins at p->first on the stream, of no more than p->count elements; sets
     * p->count to how many it took. Not called for an op of none. */
    int (*launch)(struct cuda_kern *k, struct cuda_part *p);
    /* NULL, or what the host does when the device is done with the part. */
    int (*finish)(struct cuda_kern *k, struct cuda_part *p);
    union {
        struct kern_fill fill;
        struct kern_cast cast;
        struct kern_accumulate accumulate;
        struct kern_sumsq sumsq;
        struct kern_update update;
        struct kern_hash hash;
        struct kern_copy copy;
    } u;
    uint64_t count;         /* elements; leaves of a hash, bytes of a copy; may be 0 */
    uint64_t launched;      /* of count */
    int status;             /* first that was not SHD_OK */
    struct kern_sum *sum;   /* NULL, or to be carried at the end */
    struct kern_done *done; /* or NULL */
    _Atomic uint64_t *done_word;
    uint64_t done_value;
};

/* A part of an op on the device, and what it stages through. */
struct cuda_part {
    struct cuda_op *op; /* in the ring; borrowed until its last part is done */
    uint64_t first, count;
    bool last;   /* of its op */
    bool waits;  /* for event */
    bool staged; /* of a hash: the elements are in host[] */
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

/* Start the device thread. SHD_ENOMEM. */
int cuda_queue_start(struct cuda_kern *k, struct shd_err *e);

/* Run what is queued, then end the thread, if it was started. */
void cuda_queue_stop(struct cuda_kern *k);

/* Queue a copy of op. SHD_EBUSY when KERN_QUEUE_MAX are queued. Any thread. */
int cuda_queue_push(struct cuda_kern *k, const struct cuda_op *op, struct shd_err *e);

/* ops.c: the kern_ops table, but for UUID and free. */
extern const struct kern_ops cuda_ops;

/* Device thread: bytes from one side to any other, on the stream. */
int cuda_copy_async(struct cuda_kern *k, CUdeviceptr to, CUdeviceptr from, uint64_t bytes);

/* Device thread: which side an address is on: what the driver does not know is the host's. */
int cuda_find_side(struct cuda_kern *k, const void *p, bool *ret_on_device);

/* Device thread: the cast kernel, arrays of the device. */
int cuda_launch_cast(struct cuda_kern *k, void *out, enum shd_dtype out_dtype, const float *in,
                     uint64_t elems);

/* transfer.c: what cuda_op.launch and .finish are for operations with an end on the host. */
int cuda_copy_launch(struct cuda_kern *k, struct cuda_part *p);
int cuda_cast_launch(struct cuda_kern *k, struct cuda_part *p);
int cuda_hash_launch(struct cuda_kern *k, struct cuda_part *p);
int cuda_hash_finish(struct cuda_kern *k, struct cuda_part *p);

/* memory.c: the part of the table about memory. */
int cuda_segment_new(struct kern *k, const char *name, enum segment_kind kind, uint64_t bytes,
                     struct segment *ret_segment, struct shd_err *e);
int cuda_segment_map(struct kern *k, int fd, enum segment_kind kind, uint64_t bytes,
                     struct segment *at, struct segment *ret_segment, struct shd_err *e);
void cuda_segment_close(struct kern *k, struct segment *segment);
void *cuda_alloc(struct kern *k, uint64_t bytes);
void cuda_release(struct kern *k, void *memory, uint64_t bytes);
int cuda_pin(struct kern *k, void *base, uint64_t bytes, bool readonly, struct shd_err *e);
void cuda_unpin(struct kern *k, void *base);
uint64_t cuda_available(struct kern *k);

/* queue.c */
int cuda_health(struct kern *k, struct shd_err *e);
bool cuda_failed(struct kern *k, struct shd_err *ret_why);

/* trail_repair.c: the part about trails. */
uint64_t cuda_kern_trail_bytes(const struct kern *k, uint64_t chunks);
int cuda_trail_repair(struct kern *k, struct kern_trail_area *area, void *base, uint64_t bytes,
                      _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e);

/* The sticky error of a CUDA device, for the log line of a process that ends because of it: true
 * and *ret_failure set when there was one. Any thread; any kind of device. */
bool kern_cuda_failure(struct kern *k, struct shd_err *ret_failure);

#endif
