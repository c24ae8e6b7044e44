/* A block's way through its tiles, and the trail it leaves: args.h has the protocol and says why
 * it is enough. All threads of a block call these together. */
#ifndef SHD_KERNELS_CUDA_TILE_CUH
#define SHD_KERNELS_CUDA_TILE_CUH

#include "kernels/cuda/args.h"
#include "kernels/cuda/portable.cuh"

/* A thread does TILE_FOURS times four neighbours of each tile, of all threads side by side. */
#define TILE_FOURS (CUDA_TILE_ELEMS / 4 / CUDA_THREADS)

/* The index in a tile of this thread's f-th four elements. */
DEVICE uint32_t four_at(uint32_t f)
{
    return 4 * (f * CUDA_THREADS + threadIdx.x);
}

/* A block's progress. */
struct turn {
    bool odd;      /* the tile at hand takes the second of the block's records */
    bool pending;  /* a tile is done, but its bit not set: */
    uint64_t tile; /* which */
};

/* The record for the old values of the tile at hand. */
DEVICE struct cuda_trail_record *trail_record(const struct cuda_trail &t, const struct turn &turn)
{
    return t.records + (2 * blockIdx.x + (turn.odd ? 1 : 0));
}

/* No record speaks now (shd_trail_begin), so that the heads may be written in any order. */
DEVICE struct turn trail_open(const struct cuda_trail &t, const float *a0, const float *a1,
                              const float *a2, unsigned count)
{
    if (t.records != nullptr && threadIdx.x < 2) {
        struct cuda_trail_head *head = &t.records[2 * blockIdx.x + threadIdx.x].head;
        put(&head->op, t.op);
        put(&head->first_chunk, t.first_chunk);
        put(&head->array_count, (uint64_t)count);
        put(&head->offset_bytes[0], (uint64_t)(uintptr_t)a0 - t.base);
        put(&head->offset_bytes[1], (uint64_t)(uintptr_t)a1 - t.base);
        put(&head->offset_bytes[2], (uint64_t)(uintptr_t)a2 - t.base);
    }
    return { false, false, 0 };
}

/* True: a predecessor did this tile of a slice of `tiles`; false where there is none, or no
 * trail. The same answer for all threads, also when they ask some tiles ahead, so as not to wait
 * for it: only this block sets the bit, beyond a barrier from here. */
DEVICE bool trail_done(const struct cuda_trail &t, uint64_t tile, uint64_t tiles)
{
    return t.records != nullptr && tile < tiles &&
           (t.chunks[tile / CUDA_CHUNK_TILES].mask >> tile % CUDA_CHUNK_TILES & 1) != 0;
}

/* Four values that this thread is about to change. */
DEVICE void trail_keep(struct cuda_trail_record *record, unsigned array, uint32_t at,
                       const float x[4])
{
    put((float4 *)(record->old[array] + at), make_float4(x[0], x[1], x[2], x[3]));
}

DEVICE void trail_mark(const struct cuda_trail &t, const struct turn &turn)
{
    if (turn.pending)
        atomicOr((unsigned long long *)&t.chunks[turn.tile / CUDA_CHUNK_TILES].mask,
                 1ull << turn.tile % CUDA_CHUNK_TILES);
}

/* Between the last tile's new values and this one's: thread 0's part, all threads' stores being
 * fenced. speaks: the record has the tile's old values. */
DEVICE void trail_step(const struct cuda_trail &t, const struct turn &turn, uint64_t tile,
                       bool speaks)
{
    trail_mark(t, turn);
    if (speaks)
        put(&trail_record(t, turn)->head.busy, 1 + t.first_chunk * CUDA_CHUNK_TILES + tile);
    __threadfence();
}

/* The tile at hand will be done when all threads are past the next barrier. kept: into the record,
 * so that the next one takes the other. */
DEVICE void trail_next(struct turn *turn, uint64_t tile, bool kept)
{
    turn->pending = true;
    turn->tile = tile;
    turn->odd ^= kept;
}

/* After the last tile. */
DEVICE void trail_close(const struct cuda_trail &t, const struct turn &turn)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        trail_mark(t, turn);
}

#endif
