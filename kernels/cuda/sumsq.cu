/* Sums of squares of blocks, a warp each. Loads are of 4 bytes, which the order of the sum gives a
 * lane; a warp's are 128 neighbouring bytes, and sixteen of them are on their way at a time. */
#include "kernels/cuda/sum.cuh"

#define SUMSQ_AHEAD 16u

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
#pragma unroll
            for (unsigned k = 0; k < SUMSQ_AHEAD; k++)
                sum = sum_add(sum, x[k]);
        }
        sum = sum_lanes(sum);
        if (lane == 0)
            put(a.block_sums + b, sum);
    }
}
