/* The arguments that the host passes to the kernels: each takes one of these by value. Plain C, for
 * both sides.
 *
 * All pointers are the device's. A kernel may be launched with any number of blocks, up to
 * CUDA_BLOCKS_MAX where it keeps a trail, of CUDA_THREADS threads each: blocks take tiles in turn.
 * Bits do not depend on how many there are.
 *
 * Slices (accumulate, sumsq, the optimizers) are multiples of 2,048 elements, and their arrays are
 * aligned to 16 bytes, whatever the dtype: the host checks. The arrays of fill and cast may begin
 * at any element.
 */
#ifndef SHD_KERNELS_CUDA_ARGS_H
#define SHD_KERNELS_CUDA_ARGS_H

#include <stdint.h>

#include "kernels/shared.h"

#define CUDA_THREADS     256u   /* of a block, in every kernel here */
#define CUDA_TILE_ELEMS  2048u  /* what a block does at a time, and between two marks */
#define CUDA_CHUNK_ELEMS 65536u /* KERN_CHUNK_ELEMS: 32 tiles */
#define CUDA_CHUNK_TILES (CUDA_CHUNK_ELEMS / CUDA_TILE_ELEMS)
#define CUDA_BLOCKS_MAX  640u
#define CUDA_BLOCK_ELEMS 2048u /* SHD_BLOCK_ELEMS: what a block sum is of; a tile */
#define CUDA_GROUPS_MAX  64u   /* SHD_GROUPS_MAX */

/* -- The trail (kern.h, "Finishing an operation in another process") ----------------------------
 *
 * Two records per thread block, which it uses in turn, and two words per chunk, all in device
 * memory that outlives the process. A block, for a tile of its, with one record:
 *
 *     old values into the record; fence; barrier      all threads
 *     the last tile's bit in its chunk's mask         one; that tile's new values are fenced, too
 *     busy = this tile; fence; barrier                one
 *     new values                                      all
 *
 * A record speaks for its tile while the chunk belongs to its operation and the tile's bit is not
 * set: setting the bit both marks the tile done and frees the record, in one store. It is written
 * over two tiles later, when that store has long been fenced. So a tile costs two barriers, and
 * one killed anywhere is marked, or whole in its place, or whole in a record that speaks.
 *
 * A tile whose bit is set is passed over, so that a successor's launch, with the same op, goes on
 * (after a repair, kernels/cuda/trail.h). shd_trail_begin is launched first, in the same stream: it
 * frees all records and gives the chunks to op.
 */
#define CUDA_ARRAYS_MAX 3u
#define CUDA_TRAIL_INT8                                                      \
    1u /* of an offset: the array is in 8 bits, and so is what is kept of it \
        */
#define CUDA_RECORDS_MAX (2u * CUDA_BLOCKS_MAX)

struct cuda_trail_head {
    uint64_t busy; /* 0, or 1 + tile, counted over all of the area's chunks */
    uint64_t op;
    uint64_t first_chunk; /* where the operation's chunks begin: tile 0 of the slice */
    uint64_t array_count;
    uint64_t offset_bytes[CUDA_ARRAYS_MAX]; /* from base, of element 0 of the slice */
    uint64_t reserved[9];
};

struct cuda_trail_record { /* 128-byte aligned */
    struct cuda_trail_head head;
    float old[CUDA_ARRAYS_MAX][CUDA_TILE_ELEMS];
};

struct cuda_chunk {
    uint64_t op;
    uint64_t mask; /* a bit per tile that is done */
};

/* The area: records, then chunk words. */
#define CUDA_TRAIL_CHUNKS_AT (CUDA_RECORDS_MAX * sizeof(struct cuda_trail_record))

struct cuda_trail {
    struct cuda_trail_record *records; /* [CUDA_RECORDS_MAX]; NULL: no trail is kept */
    struct cuda_chunk *chunks;         /* of this operation: [elems / CUDA_CHUNK_ELEMS, up] */
    uint64_t first_chunk;              /* index of chunks[0] among all of the area */
    uint64_t base;                     /* address that offsets count from */
    uint64_t op;
};

struct cuda_trail_begin {              /* shd_trail_begin: ONE block does it, others just end */
    struct cuda_trail_record *records; /* [CUDA_RECORDS_MAX] */
    struct cuda_chunk *chunks;         /* [count] */
    uint64_t count;
    uint64_t op;
};

/* -- Operations ---------------------------------------------------------------------------------
 */

struct cuda_fill { /* shd_fill */
    float *out;
    uint64_t elems, first_index, key;
    uint32_t kind; /* enum kern_fill_kind */
    float a, b;
};

struct cuda_cast { /* shd_cast */
    void *out;
    const float *in;
    uint64_t elems;
    uint32_t out_dtype; /* enum shd_dtype */
};

struct cuda_accumulate { /* shd_accumulate */
    float *acc;
    const void *grad;
    uint64_t elems;
    uint32_t grad_dtype;
    uint32_t first;
    double *block_sums; /* NULL, or [elems / CUDA_BLOCK_ELEMS], in fp64, inf and NaN as they come.
                         * Complete even where tiles were done by a predecessor */
    struct cuda_trail trail;
};

struct cuda_sumsq { /* shd_sumsq */
    const float *x;
    uint64_t elems;
    double *block_sums;
    const float *old; /* NULL; or [elems]: the squares are those of x - old in fp32 */
};

struct cuda_ema { /* shd_ema */
    float *average;
    const float *param;
    uint64_t elems;
    float rest;
    struct cuda_trail trail;
};

struct cuda_quantize { /* shd_quantize; whole blocks */
    void *to;          /* in 8 bits, from the slice's first element on */
    const float *in;
    uint64_t first_elem, elems;
    uint32_t sign;
};

struct cuda_dequantize { /* shd_dequantize */
    float *out;
    const void *from;
    uint64_t first_elem, elems;
    uint32_t sign;
};

/* Those with _int8 behind: m and v are in 8 bits. */
struct cuda_update { /* shd_adamw, shd_sgd, shd_lion, shd_adamw_torch, shd_sgd_torch, shd_mean */
    float *param, *m, *v;
    const float *grad;
    void *publish;
    uint64_t elems;
    const struct kern_run *runs; /* in device memory */
    uint32_t run_count;
    uint32_t publish_dtype;
    struct cuda_trail trail;
    struct kern_rates rates[CUDA_GROUPS_MAX];
};

#endif
