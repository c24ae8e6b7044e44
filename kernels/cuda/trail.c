/* See trail.h. */
#include "kernels/cuda/trail.h"

#include <inttypes.h>
#include <stddef.h>

#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"

/* The layout outlives the program that made it. */
_Static_assert(sizeof(struct cuda_trail_head) == 128, "old values fill lines of their own");
_Static_assert(sizeof(struct cuda_trail_record) == 128 + 12 * CUDA_TILE_ELEMS, "record size");
_Static_assert(sizeof(struct cuda_chunk) == 16, "chunk word size");
_Static_assert(CUDA_CHUNK_ELEMS == KERN_CHUNK_ELEMS, "chunks are those of kern.h");
_Static_assert(CUDA_CHUNK_TILES <= 64, "a bit per tile");
_Static_assert(CUDA_BLOCK_ELEMS == SHD_BLOCK_ELEMS, "blocks are those of the layout");
_Static_assert(CUDA_BLOCK_ELEMS == CUDA_TILE_ELEMS, "accumulate sums a tile as a block");
_Static_assert((int)CUDA_F32 == (int)SHD_F32 && (int)CUDA_BF16 == (int)SHD_BF16 &&
                   (int)CUDA_F16 == (int)SHD_F16,
               "dtypes are those of proto/base/dtype.h");
_Static_assert((int)CUDA_FILL_CONST == (int)KERN_FILL_CONST &&
                   (int)CUDA_FILL_NORMAL == (int)KERN_FILL_NORMAL &&
                   (int)CUDA_FILL_UNIFORM == (int)KERN_FILL_UNIFORM,
               "kinds are those of kern.h");

#define TILE_BYTES (CUDA_TILE_ELEMS * sizeof(float))

uint64_t cuda_trail_bytes(uint64_t chunks)
{
    return (CUDA_TRAIL_CHUNKS_AT + chunks * sizeof(struct cuda_chunk) + 127) / 128 * 128;
}

/* Its tile is not marked, and its chunk still belongs to its operation. */
static bool speaks(const struct cuda_trail_head *h, const struct cuda_chunk *chunks)
{
    const uint64_t tile = h->busy - 1;
    const struct cuda_chunk *chunk = &chunks[tile / CUDA_CHUNK_TILES];
    return chunk->op == h->op && (chunk->mask >> tile % CUDA_CHUNK_TILES & 1) == 0;
}

/* Of one that speaks: its tile lies in the slice, its arrays in the segment. busy is below 2^37, so
 * that no sum here can wrap. */
static int check_head(const struct cuda_trail_head *h, uint32_t index, uint64_t bytes,
                      struct shd_err *e)
{
    const uint64_t chunk = (h->busy - 1) / CUDA_CHUNK_TILES;
    if (h->op < 1 || h->op > KERN_OP_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": op %" PRIu64 ", it is 1 to %" PRIu64, index,
                       h->op, KERN_OP_MAX);
    if (h->first_chunk > chunk)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": chunk %" PRIu64 " of an operation from %" PRIu64,
                       index, chunk, h->first_chunk);
    if (h->array_count < 1 || h->array_count > CUDA_ARRAYS_MAX)
        return err_set(e, SHD_ESEGMENT,
                       "trail record %" PRIu32 ": %" PRIu64 " arrays, it is 1 to %u", index,
                       h->array_count, CUDA_ARRAYS_MAX);
    const uint64_t tile = h->busy - 1 - h->first_chunk * CUDA_CHUNK_TILES;
    const uint64_t end_bytes = (tile + 1) * TILE_BYTES;
    for (uint64_t i = 0; i < h->array_count; i++) {
        const uint64_t offset = h->offset_bytes[i];
        if (offset % sizeof(float) != 0 || offset > bytes || end_bytes > bytes - offset)
            return err_set(e, SHD_ESEGMENT,
                           "trail record %" PRIu32 ": array %" PRIu64 " at byte %" PRIu64
                           " with tile %" PRIu64 ", the segment has %" PRIu64 " bytes",
                           index, i, offset, tile, bytes);
    }
    return SHD_OK;
}

static void add_copies(const struct cuda_trail_head *h, uint32_t index,
                       struct cuda_trail_copy *copies, uint32_t *count)
{
    const uint64_t tile = h->busy - 1 - h->first_chunk * CUDA_CHUNK_TILES;
    for (uint64_t i = 0; i < h->array_count; i++)
        copies[(*count)++] = (struct cuda_trail_copy){
            .from_bytes = index * sizeof(struct cuda_trail_record) +
                          offsetof(struct cuda_trail_record, old) + i * TILE_BYTES,
            .to_bytes = h->offset_bytes[i] + tile * TILE_BYTES,
            .bytes = TILE_BYTES,
        };
}

int cuda_trail_plan_repair(const struct cuda_trail_head *heads, const struct cuda_chunk *chunks,
                           uint64_t chunk_count, uint64_t bytes, struct cuda_trail_copy *ret_copies,
                           uint32_t *ret_count, struct shd_err *e)
{
    CHECK(chunk_count < UINT64_C(1) << 32);
    uint32_t count = 0;
    for (uint32_t i = 0; i < CUDA_RECORDS_MAX; i++) {
        const struct cuda_trail_head *h = &heads[i];
        if (h->busy == 0)
            continue;
        if (h->busy > chunk_count * CUDA_CHUNK_TILES)
            return err_set(e, SHD_ESEGMENT,
                           "trail record %" PRIu32 ": tile %" PRIu64 ", there are %" PRIu64, i,
                           h->busy - 1, chunk_count * CUDA_CHUNK_TILES);
        if (!speaks(h, chunks))
            continue;
        const int r = check_head(h, i, bytes, e);
        if (r != SHD_OK)
            return r;
        add_copies(h, i, ret_copies, &count);
    }
    *ret_count = count;
    return SHD_OK;
}
