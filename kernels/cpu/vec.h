/* The vector wrappers, KERN_LANES wide: those of an instruction set, or plain C. */
#ifndef SHD_KERNELS_CPU_VEC_H
#define SHD_KERNELS_CPU_VEC_H

#include <immintrin.h>

#include "kernels/shared.h"

/* What is called, in place of being compiled into each loop: what is seldom, or as quick. */
#define KERN_CALL static __attribute__((noinline, unused))

#define SUM_LANES 32u /* fp64 lanes of a block's sum of squares: part of the numerics */

#if KERN_LANES > 1
#include "kernels/cpu/vec_x86.h"
#else
#include "kernels/cpu/vec_scalar.h"
#endif

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
