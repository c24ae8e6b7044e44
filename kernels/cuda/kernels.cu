/* Every kernel, as one translation unit: what the image that is embedded in the library is made
 * of, and what the emulation registers. */
#include "kernels/cuda/args.h"
#include "kernels/cuda/cast.cu"
#include "kernels/cuda/fill.cu"
#include "kernels/cuda/int8.cu"
#include "kernels/cuda/portable.cuh"
#include "kernels/cuda/sum.cu"
#include "kernels/cuda/update.cu"

/* The chunks of an operation become its own, unless they are already: then it goes on where it was.
 * By one block, since there is an order to keep: all records fall silent before a mask is emptied,
 * or one that was freed by its tile's bit would speak again; and a mask is empty before it counts
 * as this operation's. */
KERNEL(shd_trail_begin, struct cuda_trail_begin)
{
    if (blockIdx.x != 0)
        return;
    for (uint32_t i = threadIdx.x; i < CUDA_RECORDS_MAX; i += blockDim.x)
        put(&a.records[i].head.busy, UINT64_C(0));
    __threadfence();
    __syncthreads();
    for (uint64_t c = threadIdx.x; c < a.count; c += blockDim.x)
        if (a.chunks[c].op != a.op)
            put(&a.chunks[c].mask, UINT64_C(0));
    __threadfence();
    for (uint64_t c = threadIdx.x; c < a.count; c += blockDim.x)
        if (a.chunks[c].op != a.op)
            put(&a.chunks[c].op, a.op);
}
