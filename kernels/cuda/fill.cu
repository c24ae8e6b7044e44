/* Initial values from a counter: a thread makes one Philox block of four elements. */
#include "kernels/cuda/args.h"
#include "kernels/cuda/portable.cuh"
#include "kernels/fill.h"

/* Elements of Philox block `block` of the tensor. */
DEVICE void fill_elems(const struct cuda_fill &a, uint64_t block, float out[4])
{
    if (a.kind == KERN_FILL_CONST) {
        out[0] = out[1] = out[2] = out[3] = a.a;
        return;
    }
    uint32_t words[4];
    philox_words(a.key, block, words);
    if (a.kind == KERN_FILL_NORMAL) {
        fill_normal(words, a.a, a.b, out);
        fill_normal(words + 2, a.a, a.b, out + 2);
        return;
    }
    const float last = fill_before(a.b, a.a);
    for (unsigned w = 0; w < 4; w++)
        out[w] = fill_uniform(words[w], a.a, a.b, last);
}

KERNEL(shd_fill, struct cuda_fill)
{
    const uint64_t first = a.first_index / 4, skip = a.first_index % 4;
    const uint64_t blocks = (skip + a.elems + 3) / 4, stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t b = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; b < blocks; b += stride) {
        float x[4];
        fill_elems(a, first + b, x);
        const bool whole = 4 * b >= skip && 4 * b - skip + 4 <= a.elems;
        if (whole && aligned(a.out + (4 * b - skip), 16)) {
            put_once((float4 *)(a.out + (4 * b - skip)), make_float4(x[0], x[1], x[2], x[3]));
            continue;
        }
        for (unsigned j = 0; j < 4; j++)
            if (4 * b + j >= skip && 4 * b + j - skip < a.elems)
                put_once(a.out + (4 * b + j - skip), x[j]);
    }
}
