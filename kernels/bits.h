/* A number's bits, in plain C for the host and for GPUs, as all that both compile from one source.
 */
#ifndef SHD_KERNELS_BITS_H
#define SHD_KERNELS_BITS_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define KERN_FN static __device__ __forceinline__
#elif defined(KERN_CALLS)
#define KERN_FN static inline __attribute__((unused))
#else
#define KERN_FN static inline __attribute__((always_inline, unused))
#endif

KERN_FN uint32_t f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

KERN_FN float f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

KERN_FN uint64_t f64_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

KERN_FN double f64_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
