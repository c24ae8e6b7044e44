/* lanes.cuh: eight neighbouring elements of a thread, and sums over a warp and over a block.
 *
 * Loads and stores are of 16 bytes: eight 16-bit numbers are one, eight fp32 two. 16 bits are
 * rounded to nearest, ties to even; fp16 is infinite from 65,520 up and keeps subnormals; a NaN
 * stays one: as half.h does it on the host.
 */
#ifndef GPT_CUDA_LANES_CUH
#define GPT_CUDA_LANES_CUH

#include "examples/gpt/cuda/args.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/portable.cuh"

struct lanes8 {
    float v[8];
};

DEVICE uint32_t lanes_pack(float low, float high, uint32_t dtype)
{
    return to_half(low, dtype) | to_half(high, dtype) << 16;
}

/* at: a multiple of 8. */
DEVICE struct lanes8 lanes_load(const void *p, uint64_t at, uint32_t dtype)
{
    struct lanes8 x;
    if (dtype == GPU_F32) {
        const float4 a = ((const float4 *)p)[at / 4], b = ((const float4 *)p)[at / 4 + 1];
        x.v[0] = a.x, x.v[1] = a.y, x.v[2] = a.z, x.v[3] = a.w;
        x.v[4] = b.x, x.v[5] = b.y, x.v[6] = b.z, x.v[7] = b.w;
        return x;
    }
    const uint4 h = ((const uint4 *)p)[at / 8];
    const uint32_t words[4] = { h.x, h.y, h.z, h.w };
    for (int i = 0; i < 4; i++) {
        x.v[2 * i] = from_half(words[i] & 0xffffu, dtype);
        x.v[2 * i + 1] = from_half(words[i] >> 16, dtype);
    }
    return x;
}

DEVICE struct lanes8 lanes_load_f32(const float *p, uint64_t at)
{
    return lanes_load(p, at, GPU_F32);
}

DEVICE void lanes_add(struct lanes8 *x, const struct lanes8 *y)
{
    for (int i = 0; i < 8; i++)
        x->v[i] += y->v[i];
}

DEVICE void lanes_store(void *p, uint64_t at, uint32_t dtype, const struct lanes8 *x)
{
    if (dtype == GPU_F32) {
        float4 a, b;
        a.x = x->v[0], a.y = x->v[1], a.z = x->v[2], a.w = x->v[3];
        b.x = x->v[4], b.y = x->v[5], b.z = x->v[6], b.w = x->v[7];
        ((float4 *)p)[at / 4] = a;
        ((float4 *)p)[at / 4 + 1] = b;
        return;
    }
    uint4 h;
    h.x = lanes_pack(x->v[0], x->v[1], dtype);
    h.y = lanes_pack(x->v[2], x->v[3], dtype);
    h.z = lanes_pack(x->v[4], x->v[5], dtype);
    h.w = lanes_pack(x->v[6], x->v[7], dtype);
    ((uint4 *)p)[at / 8] = h;
}

/* Of the thread, among all of the launch. */
DEVICE uint64_t lanes_element(void)
{
    return ((uint64_t)blockIdx.x * GPU_THREADS + threadIdx.x) * GPU_LANE;
}

DEVICE uint64_t lanes_row(void)
{
    return (uint64_t)blockIdx.x * GPU_WARPS + threadIdx.x / 32;
}

/* A launch by column: the block's chunk of rows, the first of the eight columns that the thread
 * reads, and the column whose sum lanes_fold() gives it. */
struct lanes_tile {
    uint32_t chunk, col, mine;
};

DEVICE struct lanes_tile lanes_columns(uint32_t cols)
{
    const uint32_t tiles = (cols + GPU_COLS - 1) / GPU_COLS;
    const uint32_t first = blockIdx.x % tiles * GPU_COLS;
    struct lanes_tile c;
    c.chunk = blockIdx.x / tiles;
    c.col = first + threadIdx.x % 32 * GPU_LANE;
    c.mine = first + threadIdx.x;
    return c;
}

/* The same value, to the bit, in all 32 threads: both partners of an exchange add the same two. */
DEVICE float lanes_sum(float x)
{
    for (int step = 16; step > 0; step /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

DEVICE float lanes_max(float x)
{
    for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, step);
        x = other > x ? other : x;
    }
    return x;
}

/* Sum x over the block's eight warps, ascending, each thread's eight columns; thread i returns that
 * of column i of the block's 256. All threads call it; shared is [GPU_WARPS * GPU_COLS]. */
DEVICE float lanes_fold(float *shared, const struct lanes8 *x)
{
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    lanes_store(shared, warp * GPU_COLS + lane * GPU_LANE, GPU_F32, x);
    __syncthreads();
    float sum = shared[threadIdx.x];
    for (uint32_t w = 1; w < GPU_WARPS; w++)
        sum += shared[w * GPU_COLS + threadIdx.x];
    __syncthreads(); /* shared may be used again */
    return sum;
}

#endif
