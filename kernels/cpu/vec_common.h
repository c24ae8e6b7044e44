/* What the vector wrappers of all instruction sets share. */
#ifndef SHD_KERNELS_CPU_VEC_COMMON_H
#define SHD_KERNELS_CPU_VEC_COMMON_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VEC_FN    static inline __attribute__((always_inline))
#define SUM_LANES 32u /* fp64 lanes of a block's sum of squares: part of the numerics */

VEC_FN uint32_t f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

VEC_FN float f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Order streamed stores before whatever says that they are done. */
VEC_FN void vec_fence(void)
{
    _mm_sfence();
}

/* Ask for the cache line of p; any address is fine. */
VEC_FN void vec_prefetch(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T0);
}

#endif
