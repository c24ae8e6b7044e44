/* Sums of squares, and the gradient accumulator that can form one on the way. */
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/tile.cuh"

/* The sum of squares of a block of 2,048 elements by one warp, in the order of
 * kernels/cpu/op_sum.h: lane j adds elements j, j + 32, j + 64, ... in fp64, then the lanes are
 * added in halves. Squares are exact in fp64, so the fused add is the host's. fp32 denormals count
 * as zero, since -ftz=true converts them so. */
#define SUM_LANES 32u
#define SUM_ROWS  (CUDA_BLOCK_ELEMS / SUM_LANES)

DEVICE double sum_add(double sum, float x)
{
    const double d = (double)x;
    return fma(d, d, sum);
}

/* All lanes; right in lane 0. */
DEVICE double sum_lanes(double sum)
{
    for (unsigned width = SUM_LANES / 2; width > 0; width /= 2)
        sum += __shfl_down_sync(0xffffffffu, sum, width);
    return sum;
}

/* -- Alone --------------------------------------------------------------------------------------
 */

#define SUMSQ_AHEAD 16u

/* Sums of squares of blocks, or of what blocks changed by, a warp each. Loads are of 4 bytes, which
 * the order of the sum gives a lane; a warp's are 128 neighbouring bytes, and sixteen of them are
 * on their way at a time. */
KERNEL(shd_sumsq, struct cuda_sumsq)
{
    const uint32_t lane = threadIdx.x % SUM_LANES, warps = CUDA_THREADS / SUM_LANES;
    const uint64_t blocks = a.elems / CUDA_BLOCK_ELEMS;
    for (uint64_t b = (uint64_t)blockIdx.x * warps + threadIdx.x / SUM_LANES; b < blocks;
         b += (uint64_t)gridDim.x * warps) {
        const float *at = a.x + b * CUDA_BLOCK_ELEMS + lane;
        double sum = 0;
        for (unsigned row = 0; row < SUM_ROWS; row += SUMSQ_AHEAD) {
            float x[SUMSQ_AHEAD];
#pragma unroll
            for (unsigned k = 0; k < SUMSQ_AHEAD; k++)
                x[k] = get_once(at + (row + k) * SUM_LANES);
            if (a.old != nullptr) {
                const float *old = a.old + b * CUDA_BLOCK_ELEMS + lane;
#pragma unroll
                for (unsigned k = 0; k < SUMSQ_AHEAD; k++)
                    x[k] -= get_once(old + (row + k) * SUM_LANES);
            }
#pragma unroll
            for (unsigned k = 0; k < SUMSQ_AHEAD; k++)
                sum = sum_add(sum, x[k]);
        }
        sum = sum_lanes(sum);
        if (lane == 0)
            put(a.block_sums + b, sum);
    }
}

/* -- With an accumulation -----------------------------------------------------------------------
 *
 * acc = first ? grad : acc + grad, in fp32, one rounding; first copies bits. With block sums the
 * new values also go to shared memory, where one warp adds a tile's squares while the others are at
 * the next tile. Tiles that a predecessor did are only read, for their sum.
 *
 * Per element: acc read and written, grad read; the record of a trail stays in the L2 cache (see
 * update.cu). `first` needs none: copying again does no harm. A tile is few bytes beside what its
 * fences take, so the next one is read while they are waited for. */

/* The variant of the work on a tile. */
struct how {
    bool kept;  /* there is a trail */
    bool done;  /* by a predecessor: nothing changes */
    bool saved; /* its old values go into the record */
    bool sum;
};

/* A thread's part of a tile. */
struct part {
    struct how how;
    float acc[TILE_FOURS][4];
    uint32_t grad[TILE_FOURS][4]; /* not converted yet */
};

/* Begin to read a tile, where there is one. done: it was done by a predecessor. */
DEVICE void accumulate_get(const struct cuda_accumulate &a, uint64_t tile, bool done,
                           struct part *ret)
{
    if (tile >= a.elems / CUDA_TILE_ELEMS)
        return;
    const bool kept = a.trail.records != nullptr;
    ret->how = { kept, done, kept && !done && a.first == 0, a.block_sums != nullptr };
#pragma unroll
    for (unsigned f = 0; f < TILE_FOURS; f++) {
        const uint64_t i = tile * CUDA_TILE_ELEMS + four_at(f);
        if (done || a.first == 0)
            get_four(a.acc + i, ret->acc[f]);
        if (!done)
            get_four_raw(a.grad, a.grad_dtype, i, ret->grad[f]);
    }
}

/* Four new values, which are those of acc where they are there already. */
DEVICE void accumulate_put(const struct cuda_accumulate &a, uint64_t i, struct how how,
                           float acc[4], const uint32_t raw[4])
{
    if (how.done)
        return;
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        const float grad = raw_float(raw, a.grad_dtype, k);
        acc[k] = a.first != 0 ? grad : acc[k] + grad;
    }
    put_four(a.acc + i, acc);
}

/* One whole warp: the sum of a tile. */
DEVICE void tile_sum(const float *values, double *ret_sum)
{
    const uint32_t lane = threadIdx.x % SUM_LANES;
    double sum = 0;
    for (unsigned row = 0; row < SUM_ROWS; row++)
        sum = sum_add(sum, values[row * SUM_LANES + lane]);
    sum = sum_lanes(sum);
    if (lane == 0)
        put(ret_sum, sum);
}

/* Between two tiles: the last one's bit is set and its sum made (values: NULL, there is none), the
 * next one's record speaks. Warps take turns at the sums, but for the one with thread 0. */
DEVICE void accumulate_step(const struct cuda_accumulate &a, const struct turn &turn, uint64_t tile,
                            struct how how, const float *values, uint64_t values_tile)
{
    const uint32_t warp = threadIdx.x / 32;
    if (how.kept)
        __threadfence();
    __syncthreads();
    if (how.kept && threadIdx.x == 0)
        trail_step(a.trail, turn, tile, how.saved);
    if (values != nullptr && warp == 1 + values_tile % (CUDA_THREADS / 32 - 1))
        tile_sum(values, a.block_sums + values_tile);
    if (how.saved)
        __syncthreads();
}

KERNEL_BOUNDS(shd_accumulate, struct cuda_accumulate, CUDA_THREADS, 4)
{
    __shared__ float4 values[2][CUDA_TILE_ELEMS / 4]; /* of this tile, of the last one */
    const uint64_t tiles = a.elems / CUDA_TILE_ELEMS;
    const bool kept = a.trail.records != nullptr, sum = a.block_sums != nullptr;
    struct turn turn = trail_open(a.trail, a.acc, a.acc, a.acc, 1);
    const float *last = nullptr;
    uint64_t last_tile = 0;
    unsigned half = 0;
    struct part now, next;
    accumulate_get(a, blockIdx.x, trail_done(a.trail, blockIdx.x, tiles), &next);
    bool done_next = trail_done(a.trail, blockIdx.x + gridDim.x, tiles);
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        now = next;
        const struct how how = now.how;
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS && how.saved; f++)
            trail_keep(trail_record(a.trail, turn), 0, four_at(f), now.acc[f]);
        accumulate_get(a, tile + gridDim.x, done_next, &next);
        done_next = trail_done(a.trail, tile + 2 * gridDim.x, tiles);
        if (how.done && !sum)
            continue;
        if (kept || sum)
            accumulate_step(a, turn, tile, how, last, last_tile);
        turn.pending = false;
        if (kept && !how.done)
            trail_next(&turn, tile, how.saved);
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++) {
            accumulate_put(a, tile * CUDA_TILE_ELEMS + four_at(f), how, now.acc[f], now.grad[f]);
            if (sum)
                values[half][four_at(f) / 4] = make_float4(now.acc[f][0], now.acc[f][1],
                                                           now.acc[f][2], now.acc[f][3]);
        }
        last = sum ? (const float *)values[half] : nullptr;
        last_tile = tile;
        half ^= 1;
    }
    if (kept)
        trail_close(a.trail, turn);
    if (sum)
        accumulate_step(a, turn, 0, { false, false, false, true }, last, last_tile);
}
