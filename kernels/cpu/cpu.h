/* Inside the host backend: what its files share. Nothing outside kernels/cpu includes this.
 *
 * ops.c checks arguments and fills a struct cpu_op; queue.c runs queued ops in order, each split
 * by element ranges among the compute threads; the ops proper are one table of functions per
 * instruction set (isa_*.c, built from op_*.h over vec_*.h).
 *
 * Every compute thread runs with CPU_MXCSR. That is part of the numerics: denormal fp32 inputs of
 * arithmetic count as zero, denormal results become zero. Only host arithmetic of x86-64 is
 * described here; another architecture needs its own answer to both that and to the store
 * order that crash recovery builds on (trail.h).
 */
#ifndef SHD_KERNELS_CPU_CPU_H
#define SHD_KERNELS_CPU_CPU_H

#ifndef __x86_64__
#error "kernels/cpu needs x86-64: MXCSR semantics and its store order"
#endif

#include <openssl/evp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/gate.h"
#include "kernels/kern.h"
#include "proto/spec/layout.h"

#define CPU_MXCSR       0x9fc0u /* round to nearest even, exceptions masked, FTZ | DAZ */
#define CPU_THREADS_MAX 256u

struct cpu_range { /* of an op's elements or, for a hash, of its leaves */
    uint64_t first;
    uint64_t count;
};

struct trail_record;

/* The ops of one instruction set. Each does one range of the op on the calling thread. Those with
 * a trail note what they change in rec (NULL: nowhere); the range then lies in its chunk. */
struct cpu_isa {
    const char *name;     /* "avx2" */
    const char *ops_name; /* "cpu-avx2" */
    void (*fill)(const struct kern_fill *a, struct cpu_range r);
    void (*cast)(const struct kern_cast *a, struct cpu_range r);
    void (*accumulate)(const struct kern_accumulate *a, struct cpu_range r, struct kern_sum *part,
                       struct trail_record *rec);
    void (*sumsq)(const struct kern_sumsq *a, struct cpu_range r, struct kern_sum *part);
    void (*update)(const struct kern_update *a, struct cpu_range r, struct trail_record *rec);
};

extern const struct cpu_isa cpu_isa_scalar, cpu_isa_avx2, cpu_isa_avx512;

/* The instruction set called name (NULL: the best here). SHD_EINVAL: no such name; SHD_ENOTSUP:
 * this CPU lacks it. */
int cpu_isa_find(const char *name, const struct cpu_isa **ret_isa, struct shd_err *e);

struct cpu_kern;
struct cpu_thread;

/* One queued operation. The arguments are a copy; what they point to is borrowed until done. */
struct cpu_op {
    int (*run)(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r);
    union {
        struct kern_fill fill;
        struct kern_cast cast;
        struct kern_accumulate accumulate;
        struct kern_sumsq sumsq;
        struct kern_update update;
        struct kern_hash hash;
        struct kern_copy copy;
    } u;
    uint64_t count;         /* elements or leaves; may be 0 */
    uint64_t chunk;         /* what a thread takes at a time */
    bool by_chunk;          /* a lone thread too: the op has a trail */
    struct kern_sum *sum;   /* NULL, or where the threads' partial sums go */
    struct kern_done *done; /* or NULL */

    /* The trail's word for the whole op: NULL, or stored when all of it succeeded. */
    _Atomic uint64_t *done_word;
    uint64_t done_value;
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
    EVP_MD_CTX *digest; /* owned */
};

#define CPU_RING (2 * KERN_QUEUE_MAX) /* slots: the limit, and room for the order to leave */

struct cpu_kern {
    struct kern base;
    void *memory;        /* owned: what this struct lies in */
    struct kern_ops ops; /* what base.ops points to: the common table under this ISA's name */
    const struct cpu_isa *isa;
    uint32_t thread_count;
    uint32_t threads_started;
    EVP_MD *sha256;                        /* owned */
    pthread_mutex_t push_lock;             /* taken by callers only */
    _Alignas(128) struct gate pushed;      /* ops ever queued, modulo 2^32 */
    _Alignas(128) _Atomic uint32_t popped; /* ops ever finished */
    _Alignas(128) struct gate work;        /* shared ops ever opened: helpers wait here */
    _Atomic bool leaving;
    _Alignas(128) struct gate crew; /* helpers inside the shared op | CREW_OPEN */
    const struct cpu_op *shared;    /* stable while crew is not 0 */
    struct cpu_op ring[CPU_RING];
    struct cpu_thread threads[]; /* [thread_count] */
};

/* Start the threads, pinned if asked. SHD_ENOMEM, SHD_EINVAL (more threads to pin than CPUs). On
 * failure queue_stop() still has to be called. */
int queue_start(struct cpu_kern *k, bool pin, struct shd_err *e);

/* Run what is queued, then end the threads that were started. */
void queue_stop(struct cpu_kern *k);

/* Queue a copy of op. SHD_EBUSY when KERN_QUEUE_MAX are queued. Any thread. */
int queue_push(struct cpu_kern *k, const struct cpu_op *op, struct shd_err *e);

/* ops.c: the kern_ops table, but for the name; hash.c: the part of it that hashes. */
extern const struct kern_ops cpu_ops;
int hash_run(const struct cpu_op *op, struct cpu_thread *t, struct cpu_range r);

/* memory.c: the part of the table about memory. */
int cpu_segment_new(struct kern *k, const char *name, enum segment_kind kind, uint64_t bytes,
                    struct segment *ret_segment, struct shd_err *e);
int cpu_segment_map(struct kern *k, int fd, enum segment_kind kind, uint64_t bytes,
                    struct segment *at, struct segment *ret_segment, struct shd_err *e);
void cpu_segment_close(struct kern *k, struct segment *segment);
void *cpu_alloc(struct kern *k, uint64_t bytes);
void cpu_release(struct kern *k, void *memory, uint64_t bytes);
int cpu_pin(struct kern *k, void *base, uint64_t bytes, bool readonly, struct shd_err *e);
void cpu_unpin(struct kern *k, void *base);
uint64_t cpu_available(struct kern *k);
int cpu_health(struct kern *k, struct shd_err *e);
bool cpu_failed(struct kern *k, struct shd_err *ret_why);
uint64_t cpu_trail_bytes(const struct kern *k, uint64_t chunks);
int cpu_trail_repair(struct kern *k, struct kern_trail_area *area, void *base, uint64_t bytes,
                     _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e);

#endif
