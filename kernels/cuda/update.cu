/* The optimizers, a kernel each. */
#include "kernels/cuda/update.cuh"

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
