/* The kernel interface: one device's compute, behind one fully filled table.
 *
 * Work is queued and runs in queueing order on the device's own threads (host: compute threads
 * with FTZ|DAZ set; CUDA: a stream). Functions return at once. SHD_OK: queued, and done (if not
 * NULL) fires exactly once, on any thread. Any error: nothing was queued and done never fires.
 * All pointers in arguments are borrowed until done fires; the argument struct itself is copied.
 *
 * Every implementation of an operation gives the same bits: the order of operations is part of
 * the interface (docs/numerics.md), and neither the instruction set nor the number of threads may
 * show in a result.
 */
#ifndef SHD_KERN_H
#define SHD_KERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/done.h"
#include "kernels/shared.h"
#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/share/segment.h"

struct kern; /* one device: its compute threads, its queue */

struct kern_fill {
    float *out; /* [elems] */
    uint64_t elems;
    uint64_t first_index; /* of out[0] within its tensor */
    uint64_t key;         /* Philox key; ignored for CONST */
    enum kern_fill_kind kind;
    float a, b;
};

struct kern_cast { /* out[i] = (out_dtype)in[i], rounded to nearest even */
    void *out;     /* [elems] of out_dtype; F32 is a copy */
    enum shd_dtype out_dtype;
    const float *in; /* [elems] */
    uint64_t elems;
};

/* -- Finishing an operation in another process --------------------------------------------------
 *
 * An update in place is not idempotent. So that one killed at any instruction can be finished by
 * a successor, accumulate and update keep a trail in memory that outlives the process
 * (host: a segment), when they are given one. Three parts, all zero at first:
 *
 *   area    one record per compute thread: the old values of the few elements being changed now,
 *           and where they belong, as an offset from the base of the segment they lie in. What the
 *           caller runs itself (run_here) has the first one's
 *   chunks  one word per KERN_CHUNK_ELEMS elements of the array the operation works on: which
 *           operation came how far in this chunk
 *   done    a word of the caller's, stored when the whole operation is done and before anything
 *           that was queued behind it begins (a device other than the host may have begun what was
 *           queued behind it already: callers queue one operation per array at a time)
 *
 * Per group of elements (of moments in 8 bits a block, whose scale is of all of it): old values
 * into the record, then its position marked busy, then the new values, then the position moved on.
 * x86-64 keeps stores in program order, so what a killed process leaves is a prefix of its stores.
 * The successor calls kern_ops.trail_repair once per area, before anything else: half-changed
 * groups get their old values back and chunk words say how far each chunk got. An operation given
 * again with the same arrays and the same `op` goes on from there, whenever that is; one with
 * another `op` starts from the beginning.
 *
 * `first` accumulates (copies) and publish are idempotent and have no records; publish of a
 * resumed update is not complete: cast the slice afterwards. The sum of a resumed accumulate is
 * complete. Order of stores, not of power: this is for killed processes, not for power cuts.
 */
struct kern_trail_area; /* opaque; aligned to 128 */

struct kern_trail {
    struct kern_trail_area *area; /* NULL: no trail is kept */
    void *base;                   /* of the segment with the arrays: records hold offsets from it */
    _Atomic uint64_t *chunks;     /* all chunk words of the segment's owner (repair's array) */
    uint64_t first_chunk;         /* this operation's: chunks[first_chunk + i / KERN_CHUNK_ELEMS] */
    uint64_t op;                  /* 1..KERN_OP_MAX */
    _Atomic uint64_t *done;       /* NULL: none */
    uint64_t done_value;
};

/* Chunk words for an array of elems elements. */
uint64_t kern_trail_chunks(uint64_t elems);

/* Bytes, whichever side (host, device) each end is on; regions do not overlap. */
struct kern_copy {
    void *to;
    const void *from;
    uint64_t bytes;
};

struct kern_accumulate { /* acc = first ? grad : acc + grad, in fp32 */
    float *acc;          /* [elems] */
    const void *grad;    /* [elems] of grad_dtype; of any device's it may be the host's */
    enum shd_dtype grad_dtype;
    enum codec grad_codec; /* int8: it is tiles of codes, whatever its dtype; or none */
    uint64_t elems;        /* multiple of 2,048 */
    bool first;
    struct kern_sum *sum; /* if not NULL: the sum of squares of the new acc, in the same pass */
    struct kern_trail trail;
};

struct kern_sumsq {
    const float *x; /* [elems] */
    uint64_t elems; /* multiple of 2,048 */
    struct kern_sum *sum;
};

/* Muon's, of a group of matrices. */
struct kern_muon {
    double lr;
    float keep, eps; /* keep = 1 - lr * weight_decay */
    float momentum;
    float coefficients[3]; /* of the iteration's polynomial */
    uint32_t steps;        /* of it */
    bool nesterov;
};

/* Adafactor's, likewise, in fp64 but for what elements are taken times. */
struct kern_adafactor {
    double rho;        /* the relative step: min(lr, 1 / sqrt(t)) */
    double eps2, d;    /* the least size of parameters; the size that updates are clipped to */
    float keep, eps1;  /* keep = 1 - lr * weight_decay */
    float eps1_square; /* computed in fp64, rounded once */
};

/* Hyperparameters of one parameter group for one update. */
struct kern_hyper {
    float lr, weight_decay;  /* decoupled decay: p -= lr * weight_decay * p, before the step */
    float beta1, beta2, eps; /* SGD: beta1 is the momentum; Lion: beta1, beta2 */
    float bias1, bias2;      /* AdamW: 1 - beta^t, t from 1; computed on the host in fp64 */
    struct kern_rates torch; /* in torch's order: all but the scale, and nothing else of these; */
    struct kern_muon muon;   /* of Muon likewise (its momentum's), with these */
    struct kern_adafactor adafactor; /* and of Adafactor (its statistics') */
};

/* In fp64, rounded once. 1 - beta is exact for beta in [0.5, 1]. */
struct kern_rates kern_rates_of(enum spec_optimizer kind, const struct kern_hyper *h,
                                float grad_scale);

/* An exponential moving average of parameters, updated in place with the new ones (optimizers.h,
 * ema_step()): of all elements of the slice, those in gaps, too. Where a trail is kept it has chunk
 * words of its own, from first_chunk on, of the same operation. */
struct kern_ema {
    float *average; /* [elems] fp32; NULL: there is none */
    float rest;     /* 1 - decay, in (0, 1]; computed in fp64, rounded once. 1: the new param */
    uint64_t first_chunk;
};

/* What an update came to, over the whole slice: gaps are elements that do not change. A change is
 * new - old in fp32, rounded once. */
struct kern_change {
    struct kern_sum update; /* of the changes */
    struct kern_sum weight; /* of the new parameters */
    bool whole;             /* &= : false when a predecessor had done some: its part is lacking */
};

/* A tensor that is updated as a whole: a matrix, by Muon, or any, by LAMB or Adafactor. */
struct kern_matrix {
    enum spec_optimizer kind;
    uint64_t rows, cols; /* LAMB: as if it were one row */
    double ratio;        /* Muon: of the learning rate, for the shape (proto/spec/muon.h) */
    uint64_t batch;      /* Adafactor: so many matrices; of none (rows 0) one of cols elements */
};

/* What lies at the beginning of scratch: a successor of the same operation on the same unit goes on
 * with its last pass where this says so, for the parameters that LAMB's norms are of may be others
 * by then. Stored when all that the last pass goes by is. */
struct kern_whole_head {
    _Atomic uint64_t op; /* 0: of none */
    uint64_t first_chunk;
};

/* The tensors of a slice, each of them whole, that Muon and LAMB update beside an update's runs,
 * which have none of their elements. It takes several passes over all of them: moments, then for
 * each tensor what it is to change by (the Newton-Schulz iteration; LAMB's direction and the norms
 * that its rate is of), then the parameters. m is Muon's momentum, and v is left alone; LAMB has
 * both. Adafactor has neither: its statistics, which are first of all, lie among the parameters,
 * behind all tensors (proto/spec/adafactor.h), and no other optimizer has a part of such a slice.
 *
 * The three passes in place have chunk words of their own, of the update's operation: from
 * first_chunk on, kern_trail_chunks(elems) each. What is between them is a function of gradient,
 * moments and parameters as they are then: a successor does it again, or finds it done, where it
 * gives the operation again before any other that uses this scratch. */
struct kern_whole {
    const struct kern_run *runs; /* [count]: a tensor each; ascending */
    const struct kern_matrix *matrices;
    uint32_t count;                    /* 0: there are none */
    const struct kern_run *statistics; /* [count]: Adafactor's, of each; NULL: of another */
    float *scratch; /* whole_head_elems(count), elems of the slice, and muon_room_elems() of the
                     * largest; aligned to 64; outlives the process where the trail does */
    uint64_t first_chunk;

    /* The device's own. */
    enum spec_optimizer only;       /* this pass is of the tensors of one kind; 0: of all */
    const struct kern_rates *rates; /* [count]: of the last pass; NULL: of their hypers */
};

/* Rates of the last pass. */
struct kern_rates kern_muon_rates(const struct kern_muon *h, double ratio);

/* One optimizer update of a slice. Runs are ascending, do not overlap, and may leave gaps:
 * elements in gaps are left alone, in publish too. */
struct kern_update {
    enum spec_optimizer kind;
    float *param; /* [elems] fp32 master weights, updated in place */
    float *m;     /* [elems] first moment / momentum, likewise; NULL: SPEC_MEAN has none */
    float *v;     /* [elems] second moment, where the optimizer has one, else NULL */
    bool int8;    /* m and v are in 8 bits (proto/spec/optimizer.h): runs begin at their blocks */
    const float *grad; /* [elems] fp32 sum over micro-batches, not yet scaled */
    float grad_scale;  /* 1/M, clip factor and loss unscale in one; SPEC_MEAN: what to divide by */
    void *publish;     /* [elems] of publish_dtype: the new param, rounded to nearest even */
    enum shd_dtype publish_dtype; /* 0: it is not published, but encoded afterwards */
    uint64_t elems;               /* of the slice; multiple of 2,048 */
    const struct kern_run *runs;
    uint32_t run_count;
    const struct kern_hyper *hypers;
    uint32_t hyper_count;
    struct kern_trail trail;
    struct kern_whole whole;    /* none on a GPU */
    struct kern_ema ema;        /* behind it, chunk by chunk: while the new param is in a cache */
    struct kern_change *change; /* if not NULL: written when done fires */
};

/* An array of a slice of the state, from its first element on. */
struct kern_array {
    void *base;
    enum quant quant; /* NONE: fp32 */
};

struct kern_quantize {    /* elements [first_elem, + elems) of `to`, whole blocks, become in's */
    struct kern_array to; /* in 8 bits; aligned to 64 */
    uint64_t first_elem;  /* multiple of QUANT_BLOCK_ELEMS, as elems is */
    const float *in;      /* [elems] */
    uint64_t elems;
};

struct kern_dequantize { /* out becomes elements [first_elem, + elems) of `from`, any */
    float *out;          /* [elems] */
    struct kern_array from;
    uint64_t first_elem;
    uint64_t elems;
};

/* What numbers are rounded by: words of Philox, as kernels/fill.h has it, of this key, 16 bits
 * each. Element i of a block of 64, which is block b from the first element of its unit on, has
 * half i / 8, the low one of a word first, of Philox's block 8 b + i mod 8. */
struct kern_noise {
    uint64_t key;
    uint64_t first_index; /* of element 0; multiple of CODEC_BLOCK_ELEMS */
};

/* Elements [first_elem, + elems) of `in` become codes in `out`, where slices lie one behind the
 * other in `in`, and each begins at bytes of its own in `out`. Pure: given again it stores the
 * same. */
struct kern_encode {
    const float *in;
    void *out;           /* aligned to 64 */
    enum codec codec;    /* not none */
    uint64_t first_elem; /* both multiples of CODEC_TILE_ELEMS */
    uint64_t elems;
    const uint64_t *first_of; /* [slices], ascending from 0: the first element of each, */
    const uint64_t *bytes_of; /* [slices]: and where in `out` it begins; multiples of 64 */
    uint32_t slices;
    const struct kern_noise *noise; /* int8 alone: rounded at random; NULL: to nearest */
};

/* The slice that elem is in: the last that begins there or before. */
static inline uint32_t encode_slice(const struct kern_encode *a, uint64_t elem)
{
    uint32_t low = 0, high = a->slices;
    while (high - low > 1) {
        const uint32_t mid = low + (high - low) / 2;
        if (a->first_of[mid] <= elem)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* SHA-256 of consecutive pieces of x: the first of head_elems elements (so that pieces end at
 * block borders), each further one of 2,048, the last of what is left. */
struct kern_hash {
    const float *x;      /* [elems]; NULL: the elements of `of`, in 8 bits, as they are decoded */
    uint64_t elems;      /* > 0 */
    uint64_t head_elems; /* 1..2,048 */
    uint8_t (*out)[32];  /* [kern_hash_leaves(head_elems, elems)] */
    struct kern_array of;
    uint64_t first_elem; /* of it: the first one */
};

uint64_t kern_hash_leaves(uint64_t head_elems, uint64_t elems);

struct kern_config {
    uint32_t threads;   /* compute threads, 1..256 */
    bool pin;           /* one CPU of the process's affinity mask per thread, */
    uint32_t pin_first; /* from this one on: so many have the devices before it, of their own */
    /* host: "scalar", "avx2", "avx512"; NULL: the widest one here, and for each kind of work
     * another if it is found to be quicker */
    const char *isa;
};

/* The choice of an instruction set for one kind of work, made by timing two while it was done. */
#define KERN_CHOICE_NAME_BYTES 40u
struct kern_choice {
    /* "adamw bf16": an update and the dtype it publishes; "accumulate f32 first sum" */
    char work[KERN_CHOICE_NAME_BYTES];
    const char *isa, *other; /* the one that does it from here on; the one it was timed beside */
    double isa_ns, other_ns; /* medians, an element */
    double ratio;            /* of their times, isa's over other's, median of pairs */
};

/* X(NAME, name): the operations, each with its arguments in a struct kern_name. */
#define KERN_OPS(X)           \
    X(FILL, fill)             \
    X(CAST, cast)             \
    X(ACCUMULATE, accumulate) \
    X(SUMSQ, sumsq)           \
    X(UPDATE, update)         \
    X(HASH, hash)             \
    X(COPY, copy)             \
    X(QUANTIZE, quantize)     \
    X(DEQUANTIZE, dequantize) \
    X(ENCODE, encode)

enum kern_op_kind {
#define KERN_OP_ENUM(NAME, name) KERN_##NAME,
    KERN_OPS(KERN_OP_ENUM)
#undef KERN_OP_ENUM
        KERN_OP_KINDS
};

struct kern_op {
    enum kern_op_kind kind;
    union {
#define KERN_OP_MEMBER(NAME, name) struct kern_##name name;
        KERN_OPS(KERN_OP_MEMBER)
#undef KERN_OP_MEMBER
    };
};

struct kern_ops {
    const char *name; /* "cpu-scalar", "cpu-avx2", "cpu-avx512", "cuda" */
    /* Queue an operation: kern_fill() and so on, below. */
    int (*submit)(struct kern *k, const struct kern_op *op, struct kern_done *done,
                  struct shd_err *e);
    /* Do an operation at once, on the caller's thread, of a device that has nothing to do: one that
     * is done there before another thread would be awake, or a longer sum where there is one thread
     * to do it. SHD_OK: it is done, with *ret_status as done would get it. SHD_PENDING: it is not
     * such a one, submit it. Any error, as of submit: nothing was done. */
    int (*run_here)(struct kern *k, const struct kern_op *op, int *ret_status, struct shd_err *e);

    /* Memory. Arrays of every operation are of this device; those of copy, and of cast, hash and
     * accumulate the ones that are not changed in place, may be the host's. These return when it is
     * done; any thread, but not one that must not block. */
    enum segment_place place; /* of what is made here */
    bool int8;                /* it has updates of moments in 8 bits, and what goes with them */
    bool codecs;              /* it encodes what is published */
    uint8_t uuid[16];         /* of the device; zeros: the host */
    char product[64];         /* "NVIDIA H100 PCIe"; "": the host */
    /* As segment_new(), segment_map(), segment_close() (proto/share/segment.h), for this device's
     * memory. map: of a descriptor that another process (a predecessor, an owner) exported; it is
     * imported, checked to be as large, and mapped whole. at: NULL, or the address of a segment of
     * as many bytes that is mapped now and is replaced by it: that one's fd and handle are closed,
     * its address lives on (nothing may be running on it). */
    int (*segment_new)(struct kern *k, const char *name, enum segment_kind kind, uint64_t bytes,
                       struct segment *ret_segment, struct shd_err *e);
    int (*segment_map)(struct kern *k, int fd, enum segment_kind kind, uint64_t bytes,
                       struct segment *at, struct segment *ret_segment, struct shd_err *e);
    void (*segment_close)(struct kern *k, struct segment *segment);
    /* Memory of this process alone. NULL: there is no more. */
    void *(*alloc)(struct kern *k, uint64_t bytes);
    void (*release)(struct kern *k, void *memory, uint64_t bytes); /* of alloc(); NULL: no-op */
    /* Memory of the host that copy is to read or write at full speed: base[bytes] is pinned for
     * the device. Errors are no harm but a slower copy. */
    int (*pin)(struct kern *k, void *base, uint64_t bytes, bool readonly, struct shd_err *e);
    void (*unpin)(struct kern *k, void *base);
    /* Bytes that segments and alloc may still take, now; UINT64_MAX: not known. */
    uint64_t (*available)(struct kern *k);

    /* trail_bytes: of the state segment's end that the device keeps its trail in, aligned to 128
     * and zero at first; kern_trail.area is there and kern_trail.chunks is NULL. 0: a host device,
     * whose trail is in the ledger. trail_repair puts a dead process's trail in order, and may
     * itself be killed and called again; base[bytes] is the segment, chunks[count] all of its chunk
     * words. Errors: SHD_ESEGMENT a record that points outside, named; nothing is changed then. */
    uint64_t (*trail_bytes)(const struct kern *k, uint64_t chunks);
    int (*trail_repair)(struct kern *k, struct kern_trail_area *area, void *base, uint64_t bytes,
                        _Atomic uint64_t *chunks, uint64_t count, struct shd_err *e);
    /* SHD_OK; or SHD_EIO: the device failed, and does nothing for this process any more (it may for
     * another): why. Any thread. */
    int (*health)(struct kern *k, struct shd_err *e);
    /* The reason why the last operation failed, in words: done has room for a status alone. False:
     * none has failed, or there are no words. Any thread. */
    bool (*failed)(struct kern *k, struct shd_err *ret_why);
    /* The choices made so far, in the order they were made in; none on a device that has nothing to
     * choose from. They are the device's, and do not change; there may be more later. Any thread.
     */
    const struct kern_choice *(*choices)(struct kern *k, uint32_t *ret_count);
    void (*free)(struct kern *k); /* waits for queued work; NULL is a no-op */
};

/* First member of every implementation's struct kern. */
struct kern {
    const struct kern_ops *ops;
};

/* int kern_fill(struct kern *k, const struct kern_fill *a, struct kern_done *done,
 *               struct shd_err *e)
 * and likewise the others: queue an operation. */
#define KERN_OP_FUNCTION(NAME, name)                                                         \
    static inline int kern_##name(struct kern *k, const struct kern_##name *a,               \
                                  struct kern_done *done, struct shd_err *e)                 \
    {                                                                                        \
        return k->ops->submit(k, &(struct kern_op){ KERN_##NAME, { .name = *a } }, done, e); \
    }
KERN_OPS(KERN_OP_FUNCTION)
#undef KERN_OP_FUNCTION

/* An operation that reads elements [first_elem, + elems) of an array of the state, in fp32; and one
 * that writes them: of 8 bits whole blocks. Errors are those of the operation, when it is queued.
 */
static inline struct kern_op kern_read_of(struct kern_array a, uint64_t first_elem, uint64_t elems,
                                          float *out)
{
    if (a.quant != QUANT_NONE)
        return (struct kern_op){ KERN_DEQUANTIZE, { .dequantize = { out, a, first_elem, elems } } };
    return (struct kern_op){
        KERN_COPY, { .copy = { out, (const float *)a.base + first_elem, elems * sizeof *out } }
    };
}

static inline struct kern_op kern_write_of(struct kern_array a, uint64_t first_elem, uint64_t elems,
                                           const float *in)
{
    if (a.quant != QUANT_NONE)
        return (struct kern_op){ KERN_QUANTIZE, { .quantize = { a, first_elem, in, elems } } };
    return (struct kern_op){ KERN_COPY,
                             { .copy = { (float *)a.base + first_elem, in, elems * sizeof *in } } };
}

/* A hash of elements of such an array, all fields but head_elems and out. */
static inline struct kern_hash kern_hash_of(struct kern_array a, uint64_t first_elem,
                                            uint64_t elems)
{
    if (a.quant != QUANT_NONE)
        return (struct kern_hash){ .elems = elems, .of = a, .first_elem = first_elem };
    return (struct kern_hash){ .x = (const float *)a.base + first_elem, .elems = elems };
}

/* Most operations that may be queued at once; one more gets SHD_EBUSY. */
#define KERN_QUEUE_MAX 1024u

/* Pauses before a waiting thread sleeps: some 10 us, about what a futex wake costs. */
#define KERN_SPINS 500u

/* Wait helper for callers with no event loop (tools, tests, the in-process path): pass
 * &w.done as done, then kern_wait(). One use per init. */
struct kern_waiter {
    struct kern_done done;
    uint32_t state; /* futex word: 0 waiting, 1 done */
    int status;
};
void kern_waiter_init(struct kern_waiter *w);
int kern_wait(struct kern_waiter *w); /* returns the status done fired with */

/* An operation was done with status, not SHD_OK: as an error, "WHAT failed: why". Returns status.
 */
int kern_explain(struct kern *k, int status, struct shd_err *e, const char *what);

#endif
