/* The owner of each element: pure arithmetic, the same in daemons, workers and tools.
 *
 * A unit's tensors are laid end to end (each aligned to spec_tensor_align()) and the whole is
 * padded to blocks of SHD_BLOCK_ELEMS elements: one block is a whole number of 4 KiB pages in
 * every dtype, so that any owner's slice can be mapped by itself. Owner i of N holds the blocks
 * [floor(i B / N), floor((i+1) B / N)) of a unit of B blocks: slices differ by at most one block,
 * and an owner may hold none of a small unit. Gaps and padding hold zeros and stay zero.
 */
#ifndef SHD_LAYOUT_H
#define SHD_LAYOUT_H

#include <stdint.h>

#define SHD_BLOCK_ELEMS        2048u
#define SHD_TENSOR_ALIGN_ELEMS 32u
#define SHD_PAGE_BYTES         4096u

/* Numbers to design for (docs/design.md). */
#define SHD_UNITS_MAX       65536u
#define SHD_OWNERS_MAX      1024u
#define SHD_TENSORS_MAX     262144u
#define SHD_MICROS_MAX      4096u
#define SHD_GROUPS_MAX      64u
#define SHD_SLOTS_MAX       64u
#define SHD_MODEL_ELEMS_MAX (UINT64_C(1) << 48)

struct slice {           /* of a unit, in elements */
    uint64_t first_elem; /* multiple of SHD_BLOCK_ELEMS */
    uint64_t elems;      /* multiple of SHD_BLOCK_ELEMS; may be 0 */
};

/* x rounded up to a multiple of align (> 0). x + align must not overflow. */
uint64_t layout_align(uint64_t x, uint64_t align);

/* Blocks of a unit of elems elements. */
uint64_t layout_blocks(uint64_t elems);

/* Owner `owner`'s slice of a unit of elems (padded or not) elements; owner < owners. */
struct slice layout_slice(uint64_t elems, uint32_t owner, uint32_t owners);

/* Part of [first, first + elems) inside slice: returns its element count and, when that is not 0,
 * sets *ret_first to the first element (in unit coordinates). */
uint64_t layout_intersect(struct slice slice, uint64_t first, uint64_t elems, uint64_t *ret_first);

#endif
