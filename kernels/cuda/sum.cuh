/* The sum of squares of a block of 2,048 elements by one warp, in the order of
 * kernels/cpu/op_sum.h: lane j adds elements j, j + 32, j + 64, ... in fp64, then the lanes are
 * added in halves. Squares are exact in fp64, so the fused add is the host's. fp32 denormals count
 * as zero, since -ftz=true converts them so. */
#ifndef SHD_KERNELS_CUDA_SUM_CUH
#define SHD_KERNELS_CUDA_SUM_CUH

#include "kernels/cuda/args.h"
#include "kernels/cuda/portable.cuh"

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

#endif
