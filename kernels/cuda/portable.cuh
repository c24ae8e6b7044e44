/* The part of CUDA C++ that kernels here are written in, so that the same source is compiled by
 * nvcc and, as plain C++ with threads as fibers, by the emulation in tests/cuda.
 *
 *     KERNEL(shd_fill, struct cuda_fill) { ... a.out[blockIdx.x * blockDim.x + threadIdx.x] ... }
 *
 * defines a kernel with one parameter, a struct by value, called a; of at most 256 threads per
 * block, or as KERNEL_BOUNDS says (threads per block at most, blocks per multiprocessor at least).
 * Kernels must not be templates.
 *
 * Allowed: threadIdx, blockIdx, blockDim, gridDim; __syncthreads(), __syncwarp(),
 * __shfl_{,down_,up_,xor_}sync with all lanes; static __shared__ arrays of plain types, declared in
 * a kernel or in a DEVICE function that is no template; __threadfence(); atomicOr, atomicAdd,
 * atomicMax of 32- and 64-bit unsigned integers; float2, float4, uint2, uint4, make_*; fma and the
 * like. Every fused multiply-add is written: neither compiler forms one.
 *
 * Stores that another block, the host or a successor is to find go through put() or put_once(),
 * loads of what this kernel reads once through get_once(): in the emulation puts are the places
 * where a killed kernel may stop.
 */
#ifndef SHD_KERNELS_CUDA_PORTABLE_CUH
#define SHD_KERNELS_CUDA_PORTABLE_CUH

#include <stdint.h>

#include "kernels/shared.h"

#ifdef __CUDACC__

#define KERNEL_BOUNDS(name, type, threads, blocks)                    \
    extern "C" __global__ void __launch_bounds__((threads), (blocks)) \
        name(const __grid_constant__ type a)
#define DEVICE KERN_FN

/* Store to global memory. */
template <typename T> DEVICE void put(T *p, T x)
{
    *p = x;
}

/* The same, of what will not be read again soon: first to leave the L2 cache. */
template <typename T> DEVICE void put_once(T *p, T x)
{
    __stcs(p, x);
}

template <typename T> DEVICE T get_once(const T *p)
{
    return __ldcs(p);
}

#elif !defined KERNEL_BOUNDS
#error "not nvcc, and no emulation included before (cmake/cuda.cmake, shd_cuda_emulated)"
#endif

#define KERNEL(name, type) KERNEL_BOUNDS(name, type, 256, 1)

DEVICE bool aligned(const void *p, unsigned bytes)
{
    return (uintptr_t)p % bytes == 0;
}

#endif
