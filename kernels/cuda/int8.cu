/* Moments in 8 bits (kernels/quant.h): the pass of update.cu with these, and arrays to fp32 and
 * back. A tile of a slice is a tile of such an array, too, and 16 neighbouring threads have a block
 * of it, whose largest magnitude they find together.
 *
 * The trail's record of a tile has its codes and scales as the array has them, so that they go back
 * in one copy.
 */
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/optimizers.h"
#include "kernels/quant.h"

#define BLOCK_THREADS (QUANT_BLOCK_ELEMS / 4)

/* Four neighbours' codes, a byte each, as numbers; and back, to the nearest and even in the middle,
 * by a sum that has no bits for less than 1. */
DEVICE float code_get(uint32_t codes, unsigned k, bool sign)
{
    const uint32_t code = codes >> 8 * k & 0xffu;
    return sign ? (float)(code ^ 0x80u) - 128.0f : (float)code;
}

DEVICE uint32_t code_put(float c, unsigned k)
{
    return (f32_bits(c + 0x1.8p23f) & 0xffu) << 8 * k;
}

DEVICE void codes_decode(uint32_t codes, float scale, bool sign, float x[4])
{
#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        x[k] = quant_decode(code_get(codes, k, sign), scale, sign);
}

/* The block's scale, of the four values of each of its threads, and the codes of these. All threads
 * of a warp call this together: each has read the old scale then. */
DEVICE uint32_t codes_encode(const float x[4], bool sign, float *ret_scale)
{
    uint32_t most = 0, codes = 0;
    float r;
#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        most = bits_max(most, quant_size(x[k], sign));
    for (unsigned with = BLOCK_THREADS / 2; with > 0; with /= 2)
        most = bits_max(most, __shfl_xor_sync(0xffffffffu, most, with));
    *ret_scale = quant_scale(most, &r);
#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        codes |= r == 0 ? 0 : code_put(quant_encode(x[k], r, sign), k);
    return codes;
}

/* A thread's part of a tile of an array: four codes, and the scale of their block. */
struct codes {
    uint32_t word;
    float scale;
};

DEVICE uint8_t *tile_of(const float *array, uint64_t tile)
{
    return (uint8_t *)array + tile * QUANT_TILE_BYTES;
}

/* at: within the tile. */
DEVICE float *scale_of(uint8_t *tile, uint32_t at)
{
    return (float *)(tile + QUANT_TILE_ELEMS) + at / QUANT_BLOCK_ELEMS;
}

DEVICE struct codes codes_load(uint8_t *tile, uint32_t at)
{
    const struct codes c = { get_once((const uint32_t *)(tile + at)), *scale_of(tile, at) };
    return c;
}

DEVICE void codes_keep(float *old, uint32_t at, const struct codes &c)
{
    uint8_t *tile = (uint8_t *)old;
    put((uint32_t *)(tile + at), c.word);
    if (at % QUANT_BLOCK_ELEMS == 0)
        put(scale_of(tile, at), c.scale);
}

/* kept: the block has new values. */
DEVICE void codes_store(uint8_t *tile, uint32_t at, const float x[4], bool sign, bool kept)
{
    float scale;
    const uint32_t word = codes_encode(x, sign, &scale);
    if (!kept)
        return;
    put_once((uint32_t *)(tile + at), word);
    if (at % QUANT_BLOCK_ELEMS == 0)
        put_once(scale_of(tile, at), scale);
}

/* -- Update ------------------------------------------------------------------------------------ */

/* Gradients are not among what is read before a mark: with them a thread would need more registers
 * than there are. */
struct elems_int8 {
    float p[4];
    struct codes m, v;
};

/* The run that a block begins in, if there is one, which is all that it has: n of the four from
 * element i on. */
DEVICE bool find_run(const struct cuda_update &a, uint64_t i, uint32_t *hyper, unsigned *n)
{
    const uint64_t block = i / QUANT_BLOCK_ELEMS * QUANT_BLOCK_ELEMS;
    const uint32_t j = run_find(a.runs, a.run_count, block);
    *n = 0;
    *hyper = 0;
    if (j >= a.run_count || a.runs[j].first_elem > block)
        return false;
    const uint64_t end = a.runs[j].first_elem + a.runs[j].elems;
    *hyper = a.runs[j].hyper;
    if (end > i)
        *n = end - i < 4 ? (unsigned)(end - i) : 4;
    return true;
}

/* The first n of four; behind them, in the block of a run, moments are zeros. */
template <enum spec_optimizer KIND>
DEVICE void step_int8(const struct cuda_update &a, uint64_t tile, uint32_t at, struct elems_int8 *x,
                      uint32_t hyper, unsigned n, bool kept)
{
    const uint64_t i = tile * CUDA_TILE_ELEMS + at;
    float g[4], m[4], v[4] = { 0, 0, 0, 0 };
    get_four(a.grad + i, g);
    codes_decode(x->m.word, x->m.scale, true, m);
    if (has_v(KIND))
        codes_decode(x->v.word, x->v.scale, false, v);
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (k < n)
            optimizer_step(KIND, &a.rates[hyper], g[k], &x->p[k], &m[k], &v[k]);
        else
            m[k] = v[k] = 0;
    }
    if (n == 4) {
        put_four(a.param + i, x->p);
        put_four_as(a.publish, a.publish_dtype, i, x->p);
    }
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        if (n == 4 || k >= n)
            continue;
        put_once(a.param + i + k, x->p[k]);
        put_as(a.publish, a.publish_dtype, i + k, x->p[k]);
    }
    codes_store(tile_of(a.m, tile), at, m, true, kept);
    if (has_v(KIND))
        codes_store(tile_of(a.v, tile), at, v, false, kept);
}

DEVICE struct turn trail_open_int8(const struct cuda_update &a, unsigned moments)
{
    const float *m = (const float *)((uintptr_t)a.m | CUDA_TRAIL_INT8);
    const float *v = (const float *)((uintptr_t)a.v | CUDA_TRAIL_INT8);
    return trail_open(a.trail, a.param, m, moments > 1 ? v : m, 1 + moments);
}

template <enum spec_optimizer KIND> DEVICE void update_tiles_int8(const struct cuda_update &a)
{
    const bool kept = a.trail.records != nullptr;
    const uint64_t tiles = a.elems / CUDA_TILE_ELEMS;
    struct turn turn = trail_open_int8(a, has_v(KIND) ? 2 : 1);
    bool done = trail_done(a.trail, blockIdx.x, tiles);
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const bool passed = done;
        struct elems_int8 x[TILE_FOURS];
        done = trail_done(a.trail, tile + gridDim.x, tiles);
        if (passed)
            continue;
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++) {
            get_four(a.param + tile * CUDA_TILE_ELEMS + four_at(f), x[f].p);
            x[f].m = codes_load(tile_of(a.m, tile), four_at(f));
            x[f].v = has_v(KIND) ? codes_load(tile_of(a.v, tile), four_at(f)) : x[f].m;
        }
        if (kept) {
#pragma unroll
            for (unsigned f = 0; f < TILE_FOURS; f++) {
                struct cuda_trail_record *record = trail_record(a.trail, turn);
                trail_keep(record, 0, four_at(f), x[f].p);
                codes_keep(record->old[1], four_at(f), x[f].m);
                if (has_v(KIND))
                    codes_keep(record->old[2], four_at(f), x[f].v);
            }
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                trail_step(a.trail, turn, tile, true);
            __syncthreads();
            trail_next(&turn, tile, true);
        }
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++) {
            uint32_t hyper;
            unsigned n;
            const bool in_run = find_run(a, tile * CUDA_TILE_ELEMS + four_at(f), &hyper, &n);
            step_int8<KIND>(a, tile, four_at(f), &x[f], hyper, n, in_run);
        }
    }
    if (kept)
        trail_close(a.trail, turn);
}

KERNEL_BOUNDS(shd_adamw_int8, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles_int8<SPEC_ADAMW>(a);
}

KERNEL_BOUNDS(shd_sgd_int8, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles_int8<SPEC_SGD>(a);
}

KERNEL_BOUNDS(shd_lion_int8, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles_int8<SPEC_LION>(a);
}

KERNEL_BOUNDS(shd_adamw_torch_int8, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles_int8<SPEC_ADAMW_TORCH>(a);
}

KERNEL_BOUNDS(shd_sgd_torch_int8, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles_int8<SPEC_SGD_TORCH>(a);
}

/* -- Whole arrays ------------------------------------------------------------------------------ */

/* A tile a block; the last one may have less. */
KERNEL(shd_quantize, struct cuda_quantize)
{
    const uint64_t tiles = (a.elems + CUDA_TILE_ELEMS - 1) / CUDA_TILE_ELEMS;
    for (uint64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++) {
            const uint64_t i = t * CUDA_TILE_ELEMS + four_at(f), elem = a.first_elem + i;
            float x[4] = { 0, 0, 0, 0 };
            const bool here = i < a.elems;
            for (unsigned k = 0; here && k < 4; k++)
                x[k] = get_once(a.in + i + k);
            codes_store(tile_of((const float *)a.to, elem / QUANT_TILE_ELEMS),
                        (uint32_t)(elem % QUANT_TILE_ELEMS), x, a.sign != 0, here);
        }
    }
}

KERNEL(shd_dequantize, struct cuda_dequantize)
{
    const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < a.elems; i += stride) {
        const uint64_t elem = a.first_elem + i;
        const struct quant_block b = quant_block_at((void *)a.from, elem);
        const uint32_t code = b.codes[0];
        const float c = code_get(code, 0, a.sign != 0);
        put_once(a.out + i, quant_decode(c, *b.scale, a.sign != 0));
    }
}
