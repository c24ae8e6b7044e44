/* The pass that all optimizers share: over the slice's tiles, each element stepped with the
 * hyperparameters of the run it lies in and published; elements between runs are left alone.
 *
 * Per element and without a trail: param, moments and gradient read once, param and moments
 * written, the copy written. The trail's record is written, too, but over and over the same few
 * megabytes, which stay in the L2 cache: all else goes through it as what is not needed again.
 */
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/tile.cuh"
#include "kernels/optimizers.h"

/* Four neighbours. */
struct elems {
    float p[4], m[4], v[4], g[4];
};

template <enum spec_optimizer KIND>
DEVICE void elems_get(const struct cuda_update &a, uint64_t i, struct elems *x)
{
    get_four(a.param + i, x->p);
    if (has_m(KIND))
        get_four(a.m + i, x->m);
    if (has_v(KIND))
        get_four(a.v + i, x->v);
    get_four(a.grad + i, x->g);
}

template <enum spec_optimizer KIND>
DEVICE void elems_keep(struct cuda_trail_record *record, uint32_t at, const struct elems &x)
{
    trail_keep(record, 0, at, x.p);
    if (has_m(KIND))
        trail_keep(record, 1, at, x.m);
    if (has_v(KIND))
        trail_keep(record, 2, at, x.v);
}

/* All four lie in one run. */
template <enum spec_optimizer KIND>
DEVICE void elems_step(const struct cuda_update &a, uint64_t i, const struct kern_rates &c,
                       struct elems *x)
{
#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        optimizer_step(KIND, &c, x->g[k], &x->p[k], &x->m[k], &x->v[k]);
    if (has_m(KIND))
        put_four(a.m + i, x->m);
    if (has_v(KIND))
        put_four(a.v + i, x->v);
    put_four(a.param + i, x->p);
    put_four_as(a.publish, a.publish_dtype, i, x->p);
}

template <enum spec_optimizer KIND>
DEVICE void elem_step(const struct cuda_update &a, uint64_t i, const struct kern_rates &c, float g,
                      float p, float m, float v)
{
    optimizer_step(KIND, &c, g, &p, &m, &v);
    if (has_m(KIND))
        put_once(a.m + i, m);
    if (has_v(KIND))
        put_once(a.v + i, v);
    put_once(a.param + i, p);
    put_as(a.publish, a.publish_dtype, i, p);
}

/* Four elements that do not all lie in one run: each looks its run up. */
template <enum spec_optimizer KIND>
DEVICE void elems_step_apart(const struct cuda_update &a, uint64_t i, const struct elems &x)
{
    uint32_t j = run_find(a.runs, a.run_count, i);
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        while (j < a.run_count && a.runs[j].first_elem + a.runs[j].elems <= i + k)
            j++;
        if (j < a.run_count && a.runs[j].first_elem <= i + k)
            elem_step<KIND>(a, i + k, a.rates[a.runs[j].hyper], x.g[k], x.p[k], x.m[k], x.v[k]);
    }
}

/* The run that a block is in. */
struct reach {
    uint64_t end; /* elements below it belong to the run, from the last tile that was asked for */
    uint32_t hyper;
};

/* All of the tile that begins at element `first` lies in one run: reach->hyper's. Blocks go through
 * their tiles in ascending order, and most runs are long: so it is seldom looked up, and nothing is
 * read between a fence, after which each read is one of the L2 cache, and the new values. */
DEVICE bool reach_tile(const struct cuda_update &a, uint64_t first, struct reach *reach)
{
    if (reach->end >= first + CUDA_TILE_ELEMS)
        return true;
    const uint32_t j = run_find(a.runs, a.run_count, first);
    if (j < a.run_count && a.runs[j].first_elem <= first) {
        reach->end = a.runs[j].first_elem + a.runs[j].elems;
        reach->hyper = a.runs[j].hyper;
    }
    return reach->end >= first + CUDA_TILE_ELEMS;
}

template <enum spec_optimizer KIND> DEVICE void update_tiles(const struct cuda_update &a)
{
    const bool kept = a.trail.records != nullptr;
    const uint64_t tiles = a.elems / CUDA_TILE_ELEMS;
    const float *m = has_m(KIND) ? a.m : a.param, *v = has_v(KIND) ? a.v : m;
    struct turn turn = trail_open(a.trail, a.param, m, v, has_v(KIND) ? 3 : has_m(KIND) ? 2 : 1);
    struct reach reach = { 0, 0 };
    bool done = trail_done(a.trail, blockIdx.x, tiles);
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const uint64_t first = tile * CUDA_TILE_ELEMS, next = tile + gridDim.x;
        struct elems x[TILE_FOURS];
        if (done) {
            done = trail_done(a.trail, next, tiles);
            continue;
        }
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++)
            elems_get<KIND>(a, first + four_at(f), &x[f]);
        done = trail_done(a.trail, next, tiles);
        const bool whole = reach_tile(a, first, &reach);
        if (kept) {
#pragma unroll
            for (unsigned f = 0; f < TILE_FOURS; f++)
                elems_keep<KIND>(trail_record(a.trail, turn), four_at(f), x[f]);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                trail_step(a.trail, turn, tile, true);
            __syncthreads();
            trail_next(&turn, tile, true);
        }
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++) {
            if (whole)
                elems_step<KIND>(a, first + four_at(f), a.rates[reach.hyper], &x[f]);
            else
                elems_step_apart<KIND>(a, first + four_at(f), x[f]);
        }
    }
    if (kept)
        trail_close(a.trail, turn);
}

KERNEL_BOUNDS(shd_adamw, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<SPEC_ADAMW>(a);
}

KERNEL_BOUNDS(shd_sgd, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<SPEC_SGD>(a);
}

KERNEL_BOUNDS(shd_lion, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<SPEC_LION>(a);
}

KERNEL_BOUNDS(shd_adamw_torch, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<SPEC_ADAMW_TORCH>(a);
}

KERNEL_BOUNDS(shd_sgd_torch, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<SPEC_SGD_TORCH>(a);
}

KERNEL_BOUNDS(shd_mean, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<SPEC_MEAN>(a);
}

/* -- The average behind an update: kern_ema ------------------------------------------------------
 *
 * Per element: the new param read, which the update has written some launches before at most, the
 * average read and written. */

KERNEL_BOUNDS(shd_ema, struct cuda_ema, CUDA_THREADS, 4)
{
    const bool kept = a.trail.records != nullptr;
    const uint64_t tiles = a.elems / CUDA_TILE_ELEMS;
    struct turn turn = trail_open(a.trail, a.average, a.average, a.average, 1);
    bool done = trail_done(a.trail, blockIdx.x, tiles);
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const uint64_t first = tile * CUDA_TILE_ELEMS;
        const bool passed = done;
        float e[TILE_FOURS][4], p[4];
        done = trail_done(a.trail, tile + gridDim.x, tiles);
        if (passed)
            continue;
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++)
            get_four(a.average + first + four_at(f), e[f]);
        if (kept) {
#pragma unroll
            for (unsigned f = 0; f < TILE_FOURS; f++)
                trail_keep(trail_record(a.trail, turn), 0, four_at(f), e[f]);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0)
                trail_step(a.trail, turn, tile, true);
            __syncthreads();
            trail_next(&turn, tile, true);
        }
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++) {
            get_four(a.param + first + four_at(f), p);
#pragma unroll
            for (unsigned k = 0; k < 4; k++)
                e[f][k] = ema_step(a.rest, p[k], e[f][k]);
            put_four(a.average + first + four_at(f), e[f]);
        }
    }
    if (kept)
        trail_close(a.trail, turn);
}
