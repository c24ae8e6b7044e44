/* What LAMB changes a tensor by, and the squares of that and of the tensor, in one pass. Included
 * once per instruction set, after op_sum.h and optimizers.h, whose lamb_direction() is the formula.
 *
 * Blocks of 2,048 elements are counted from the tensor's first one; each is summed as op_sum.h sums
 * blocks, and blocks are added exactly. */
#ifndef SHD_KERNELS_CPU_OP_LAMB_H
#define SHD_KERNELS_CPU_OP_LAMB_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/muon.h"
#include "kernels/optimizers.h"
#include "proto/spec/layout.h"

static void lamb_block(const struct muon_job *job, uint64_t first, struct kern_change *part)
{
    const uint64_t left = job->elems - first;
    const uint64_t end = first + (left < SHD_BLOCK_ELEMS ? left : SHD_BLOCK_ELEMS);
    struct lanes update, weight;
    memset(&update, 0, sizeof update);
    memset(&weight, 0, sizeof weight);
    for (uint64_t i = first; i < end; i += VEC_LANES) {
        const unsigned n = end - i < VEC_LANES ? (unsigned)(end - i) : VEC_LANES;
        const unsigned at = (unsigned)((i - first) / VEC_LANES % (SUM_LANES / VEC_LANES));
        const bool all = n == VEC_LANES;
        const vec p = all ? vec_load(job->p + i) : vec_load_n(job->p + i, n);
        const vec m = all ? vec_load(job->m + i) : vec_load_n(job->m + i, n);
        const vec v = all ? vec_load(job->v + i) : vec_load_n(job->v + i, n);
        const vec u = lamb_direction(&job->rates, p, m, v);
        lanes_add(&update, at, u); /* of what is missing it is 0 */
        lanes_add(&weight, at, p);
        if (all)
            vec_store(job->out + i, u);
        else
            vec_store_n(job->out + i, u, n);
    }
    block_add(&part->update, &update);
    block_add(&part->weight, &weight);
}

static void lamb_range(const struct muon_job *job, struct cpu_range r, struct kern_change *part)
{
    for (uint64_t i = r.first; i < r.first + r.count; i += SHD_BLOCK_ELEMS)
        lamb_block(job, i, part);
}

#endif
