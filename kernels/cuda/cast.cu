/* Cast fp32 to a dtype: kernels/cpu/op_cast.h says how. Arrays may begin at any element. */
#include "kernels/cuda/convert.cuh"

/* Four elements a thread, together where they are aligned. */
DEVICE void cast_aligned(const struct cuda_cast &a, uint64_t i)
{
    float x[4];
    get_four(a.in + i, x);
    put_four_as(a.out, a.out_dtype, i, x);
}

KERNEL(shd_cast, struct cuda_cast)
{
    const uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const bool fours = aligned(a.in, 16) && aligned(a.out, a.out_dtype == SHD_F32 ? 16 : 8);
    const uint64_t whole = fours ? a.elems / 4 : 0;
    for (uint64_t f = thread; f < whole; f += stride)
        cast_aligned(a, 4 * f);
    for (uint64_t i = 4 * whole + thread; i < a.elems; i += stride)
        put_as(a.out, a.out_dtype, i, get_once(a.in + i));
}
