/* See layout.h. */
#include "proto/spec/layout.h"

#include "proto/base/check.h"

uint64_t layout_align(uint64_t x, uint64_t align)
{
    CHECK(align > 0 && x <= UINT64_MAX - align);
    return (x + align - 1) / align * align;
}

uint64_t layout_blocks(uint64_t elems)
{
    return layout_align(elems, SHD_BLOCK_ELEMS) / SHD_BLOCK_ELEMS;
}

struct slice layout_slice(uint64_t elems, uint32_t owner, uint32_t owners)
{
    CHECK(owner < owners && owners <= SHD_OWNERS_MAX);
    CHECK(elems <= SHD_MODEL_ELEMS_MAX);
    const uint64_t blocks = layout_blocks(elems);
    const uint64_t first = blocks * owner / owners;
    const uint64_t end = blocks * (owner + UINT64_C(1)) / owners;
    return (struct slice){ first * SHD_BLOCK_ELEMS, (end - first) * SHD_BLOCK_ELEMS };
}

uint64_t layout_intersect(struct slice slice, uint64_t first, uint64_t elems, uint64_t *ret_first)
{
    const uint64_t slice_end = slice.first_elem + slice.elems;
    const uint64_t begin = first > slice.first_elem ? first : slice.first_elem;
    const uint64_t end = first + elems < slice_end ? first + elems : slice_end;
    if (begin >= end)
        return 0;
    *ret_first = begin;
    return end - begin;
}
