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

/* Where runs begin or end, or there is none. j: the first run that ends beyond element i. */
template <class Optimizer>
DEVICE void elems_step_apart(const struct cuda_update &a, uint64_t i, uint32_t j,
                             const struct elems &x)
{
#pragma unroll
    for (unsigned k = 0; k < 4; k++) {
        while (j < a.run_count && a.runs[j].first_elem + a.runs[j].elems <= i + k)
            j++;
        if (j < a.run_count && a.runs[j].first_elem <= i + k)
            elem_step<Optimizer>(a, i + k, a.rates[a.runs[j].hyper], x.g[k], x.p[k], x.m[k],
                                 x.v[k]);
    }
}

template <class Optimizer>
DEVICE void elems_update(const struct cuda_update &a, uint64_t i, struct elems *x)
{
    const uint32_t j = run_find(a, i);
    if (j == a.run_count)
        return;
    const struct cuda_run run = a.runs[j];
    if (run.first_elem <= i && i + 4 <= run.first_elem + run.elems)
        elems_step<Optimizer>(a, i, a.rates[run.hyper], x);
    else
        elems_step_apart<Optimizer>(a, i, j, *x);
}

template <class Optimizer> DEVICE void update_tiles(const struct cuda_update &a)
{
    const bool kept = a.trail.records != nullptr;
    struct turn turn = trail_open(a.trail, a.param, a.m, Optimizer::has_v ? a.v : a.m,
                                  Optimizer::has_v ? 3 : 2);
    for (uint64_t tile = blockIdx.x; tile < a.elems / CUDA_TILE_ELEMS; tile += gridDim.x) {
        if (kept && trail_done(a.trail, tile))
            continue;
        const uint64_t first = tile * CUDA_TILE_ELEMS;
        struct elems x[TILE_FOURS];
#pragma unroll
        for (unsigned f = 0; f < TILE_FOURS; f++)
            elems_get<Optimizer>(a, first + four_at(f), &x[f]);
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
        for (unsigned f = 0; f < TILE_FOURS; f++)
            elems_update<Optimizer>(a, first + four_at(f), &x[f]);
    }
    if (kept)
        trail_close(a.trail, turn);
}

#endif
