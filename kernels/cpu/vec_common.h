/* The part that the vector wrappers of all instruction sets share. */
#ifndef SHD_KERNELS_CPU_VEC_COMMON_H
#define SHD_KERNELS_CPU_VEC_COMMON_H

#include <immintrin.h>

#include "kernels/shared.h"

#define SUM_LANES 32u /* fp64 lanes of a block's sum of squares: part of the numerics */

/* Order streamed stores before whatever says that they are done. */
KERN_FN void vec_fence(void)
{
    _mm_sfence();
}

/* Ask for the cache line of p; any address is fine. */
KERN_FN void vec_prefetch(const void *p)
{
    _mm_prefetch((const char *)p, _MM_HINT_T0);
}

#endif
