/* Moments in 8 bits: how many bytes they have, and where codes and their scales lie.
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
#ifndef SHD_QUANT_H
#define SHD_QUANT_H

#include <stdint.h>

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
