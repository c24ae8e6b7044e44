/* What all optimizers share: a pass over the slice's tiles, each element stepped with the
 * hyperparameters of the run it lies in and published; elements between runs are left alone.
 *
 * Per element and without a trail: param, moments and gradient read once, param and moments
 * written, the copy written. The trail's record is written, too, but over and over the same few
 * megabytes, which stay in the L2 cache: all else goes through it as what is not needed again.
 *
 * An optimizer is a type with has_v and step(rates, grad, p, m, v).
 */
#ifndef SHD_KERNELS_CUDA_UPDATE_CUH
#define SHD_KERNELS_CUDA_UPDATE_CUH

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/tile.cuh"

/* Four neighbours. */
struct elems {
    float p[4], m[4], v[4], g[4];
};

/* Index of the first run that ends beyond elem. */
DEVICE uint32_t run_find(const struct cuda_update &a, uint64_t elem)
{
    uint32_t low = 0, high = a.run_count;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        if (a.runs[mid].first_elem + a.runs[mid].elems <= elem)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

template <class Optimizer>
DEVICE void elems_get(const struct cuda_update &a, uint64_t i, struct elems *x)
{
    get_four(a.param + i, x->p);
    get_four(a.m + i, x->m);
    if (Optimizer::has_v)
        get_four(a.v + i, x->v);
    get_four(a.grad + i, x->g);
}

template <class Optimizer>
DEVICE void elems_keep(struct cuda_trail_record *record, uint32_t at, const struct elems &x)
{
    trail_keep(record, 0, at, x.p);
    trail_keep(record, 1, at, x.m);
    if (Optimizer::has_v)
        trail_keep(record, 2, at, x.v);
}

/* All four lie in one run. */
template <class Optimizer>
DEVICE void elems_step(const struct cuda_update &a, uint64_t i, const struct cuda_rates &c,
                       struct elems *x)
{
#pragma unroll
    for (unsigned k = 0; k < 4; k++)
        Optimizer::step(c, x->g[k], x->p[k], x->m[k], x->v[k]);
    put_four(a.m + i, x->m);
    if (Optimizer::has_v)
        put_four(a.v + i, x->v);
    put_four(a.param + i, x->p);
    put_four_as(a.publish, a.publish_dtype, i, x->p);
}

template <class Optimizer>
DEVICE void elem_step(const struct cuda_update &a, uint64_t i, const struct cuda_rates &c, float g,
                      float p, float m, float v)
{
    Optimizer::step(c, g, p, m, v);
    put_once(a.m + i, m);
    if (Optimizer::has_v)
        put_once(a.v + i, v);
    put_once(a.param + i, p);
    put_as(a.publish, a.publish_dtype, i, p);
}

/* Where runs begin or end, or there is none. */
template <class Optimizer>
DEVICE void elems_step_apart(const struct cuda_update &a, uint64_t i, const struct elems &x)
{
    uint32_t j = run_find(a, i);
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        while (j < a.run_count && a.runs[j].first_elem + a.runs[j].elems <= i + k)
            j++;
        if (j < a.run_count && a.runs[j].first_elem <= i + k)
            elem_step<Optimizer>(a, i + k, a.rates[a.runs[j].hyper], x.g[k], x.p[k], x.m[k],
                                 x.v[k]);
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
    const uint32_t j = run_find(a, first);
    if (j < a.run_count && a.runs[j].first_elem <= first) {
        reach->end = a.runs[j].first_elem + a.runs[j].elems;
        reach->hyper = a.runs[j].hyper;
    }
    return reach->end >= first + CUDA_TILE_ELEMS;
}

template <class Optimizer> DEVICE void update_tiles(const struct cuda_update &a)
{
    const bool kept = a.trail.records != nullptr;
    const uint64_t tiles = a.elems / CUDA_TILE_ELEMS;
    struct turn turn = trail_open(a.trail, a.param, a.m, Optimizer::has_v ? a.v : a.m,
                                  Optimizer::has_v ? 3 : 2);
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
            elems_get<Optimizer>(a, first + four_at(f), &x[f]);
        done = trail_done(a.trail, next, tiles);
        const bool whole = reach_tile(a, first, &reach);
        if (kept) {
#pragma unroll
            for (unsigned f = 0; f < TILE_FOURS; f++)
                elems_keep<Optimizer>(trail_record(a.trail, turn), four_at(f), x[f]);
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
                elems_step<Optimizer>(a, first + four_at(f), a.rates[reach.hyper], &x[f]);
            else
                elems_step_apart<Optimizer>(a, first + four_at(f), x[f]);
        }
    }
    if (kept)
        trail_close(a.trail, turn);
}

#endif
