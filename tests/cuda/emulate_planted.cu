/* Kernels with one mistake each, for test_emulate: the emulation must see it. */
#include "kernels/cuda/portable.cuh"

struct planted {
    uint32_t *out; /* [blocks * 64] */
    uint32_t n;
};

DEVICE uint32_t planted_index()
{
    return blockIdx.x * blockDim.x + threadIdx.x;
}

/* None: each thread gets its mirror image's index, through shared memory. */
KERNEL(planted_right, struct planted)
{
    __shared__ uint32_t values[64];
    values[threadIdx.x] = planted_index();
    __syncthreads();
    put(a.out + planted_index(), values[63 - threadIdx.x]);
}

KERNEL(planted_no_barrier, struct planted)
{
    __shared__ uint32_t values[64];
    values[threadIdx.x] = planted_index();
    put(a.out + planted_index(), values[63 - threadIdx.x]);
}

KERNEL(planted_some_leave, struct planted)
{
    if (threadIdx.x >= a.n)
        return;
    __syncthreads();
    put(a.out + planted_index(), 1u);
}

KERNEL(planted_some_barrier, struct planted)
{
    if (threadIdx.x < a.n)
        __syncthreads();
    put(a.out + planted_index(), 1u);
}

KERNEL(planted_two_barriers, struct planted)
{
    if (threadIdx.x < a.n)
        __syncthreads();
    else
        __syncthreads();
    put(a.out + planted_index(), 1u);
}

KERNEL(planted_some_lanes, struct planted)
{
    uint32_t x = threadIdx.x;
    if (threadIdx.x % 32 < a.n)
        x += __shfl_xor_sync(0xffffffffu, x, 1u);
    put(a.out + planted_index(), x);
}

/* Warp functions, as the device has them. */
KERNEL(planted_shuffles, struct planted)
{
    const uint32_t x = threadIdx.x;
    uint32_t sum = x;
    for (unsigned width = 16; width > 0; width /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, width);
    const uint32_t down = __shfl_down_sync(0xffffffffu, x, 3u);
    const uint32_t up = __shfl_up_sync(0xffffffffu, x, 3u);
    const uint32_t first = __shfl_sync(0xffffffffu, x, 32);
    put(a.out + planted_index(), sum | down << 16 | up << 22 | first << 28);
}

/* A count of all threads, in two widths. */
KERNEL(planted_atomics, struct planted)
{
    atomicAdd(a.out, 1u);
    atomicOr(a.out + 1, 1u << threadIdx.x % 32);
    atomicMax((unsigned long long *)(a.out + 2), (unsigned long long)planted_index() << 32);
}

KERNEL_BOUNDS(planted_small, struct planted, 32, 1)
{
    put(a.out + planted_index(), 1u);
}

/* One store after the other, a fence in the middle. */
KERNEL(planted_stores, struct planted)
{
    for (uint32_t i = 0; i < 32; i++)
        put(a.out + i, 1u);
    __threadfence();
    for (uint32_t i = 32; i < 64; i++)
        put(a.out + i, 1u);
}
