/* The optimizers: what a spec calls each, which hyperparameters it takes and how many moments it
 * keeps, and how many bytes these are. One table, read by the spec's parser and by every device's
 * kernels. */
#ifndef SHD_SPEC_OPTIMIZER_H
#define SHD_SPEC_OPTIMIZER_H

#include <stdbool.h>
#include <stdint.h>

/* TORCH: the same by the order of operations of PyTorch's CPU implementation. */
enum spec_optimizer {
    SPEC_ADAMW = 1,
    SPEC_SGD = 2,
    SPEC_LION = 3,
    SPEC_ADAMW_TORCH = 4,
    SPEC_SGD_TORCH = 5,
    SPEC_MEAN = 6, /* of a group alone: what is returned are values, and their mean is the next */
    SPEC_MUON = 7, /* of a group alone: its matrices (muon.h) */
    SPEC_LAMB = 8, /* of a group alone: each of its tensors whole */
    SPEC_ADAFACTOR = 9, /* likewise, of all of a unit: its statistics are a tensor (adafactor.h) */
};

#define SPEC_OPTIMIZERS     5 /* ids 1..5: a model's */
#define SPEC_OPTIMIZERS_ALL 9

struct spec_optimizer_row {
    const char *kind;
    enum spec_optimizer torch;                   /* the same in torch's order; 0: there is none */
    bool in_torch_order;                         /* this is that */
    uint32_t moments;                            /* kept per parameter: none, m, or m and v */
    const char *beta1_key, *beta2_key, *eps_key; /* NULL: it has no such field */
    double beta1, beta2, eps;                    /* defaults; 0 where it has no such field */
};

extern const struct spec_optimizer_row spec_optimizer_rows[SPEC_OPTIMIZERS_ALL + 1];

/* -- Moments in 8 bits --------------------------------------------------------------------------
 *
 * How many bytes they have, and where codes and their scales lie.
 *
 * A block is 64 elements, counted from the start of the unit; its values are codes times one fp32
 * scale, the largest magnitude in it (kernels/quant.h). Tensors of such a model begin at multiples
 * of a block, so that none shares one; slices are whole tiles, so that every block has one owner
 * and bits do not depend on how many there are. A block is also what an update changes between two
 * marks of its trail (kernels/kern.h), for a scale is of all of it.
 *
 * A slice's array is a sequence of tiles, each 2,048 codes, a byte an element, then their 32
 * scales: 2,176 bytes, whole cache lines. Zeros are what a fresh state has: codes and scales of
 * zeros. Plain C, for the host and its GPUs.
 */
#define QUANT_BLOCK_ELEMS 64u
#define QUANT_TILE_ELEMS  2048u /* SHD_BLOCK_ELEMS */
#define QUANT_TILE_BYTES  (QUANT_TILE_ELEMS + QUANT_TILE_ELEMS / QUANT_BLOCK_ELEMS * 4u)

/* What an array of the state is: fp32, or codes of 8 bits, with a sign or without. */
enum quant { QUANT_NONE, QUANT_SIGNED, QUANT_UNSIGNED };

/* Bytes of the array of elems elements, whole tiles. */
static inline uint64_t quant_bytes(uint64_t elems)
{
    return elems / QUANT_TILE_ELEMS * QUANT_TILE_BYTES;
}

#endif
