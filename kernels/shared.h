/* Plain C that the host and its GPUs compile from one source: what kernels are told in the same
 * words, and the bits of a number. */
#ifndef SHD_KERNELS_SHARED_H
#define SHD_KERNELS_SHARED_H

#include <stdint.h>
#include <string.h>

#include "proto/base/dtype.h"
#include "proto/spec/optimizer.h"

#ifdef __CUDACC__
#define KERN_FN static __device__ __forceinline__
#elif defined(KERN_CALLS)
#define KERN_FN static inline __attribute__((unused))
#else
#define KERN_FN static inline __attribute__((always_inline, unused))
#endif

/* A number's bits. */
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

/* A block of an array in 8 bits (proto/spec/optimizer.h). */
struct quant_block {
    uint8_t *codes; /* [QUANT_BLOCK_ELEMS] */
    float *scale;
};

/* That of element elem, a multiple of QUANT_BLOCK_ELEMS; array is where the slice's begins. */
KERN_FN struct quant_block quant_block_at(void *array, uint64_t elem)
{
    uint8_t *tile = (uint8_t *)array + elem / QUANT_TILE_ELEMS * QUANT_TILE_BYTES;
    const uint64_t at = elem % QUANT_TILE_ELEMS;
    const struct quant_block b = { tile + at, (float *)(void *)(tile + QUANT_TILE_ELEMS) +
                                                  at / QUANT_BLOCK_ELEMS };
    return b;
}

/* An initial distribution of a tensor's elements. Element i of the tensor depends on seed, the
 * tensor's name and i alone: Philox4x32-10 with key = first 64 bits of SHA-256(seed, name). */
enum kern_fill_kind {
    KERN_FILL_CONST = 1,   /* a */
    KERN_FILL_NORMAL = 2,  /* mean a, standard deviation b */
    KERN_FILL_UNIFORM = 3, /* in [a, b) */
};

/* Elements [first, first + elems) of the slice belong to one group. */
struct kern_run {
    uint64_t first_elem;
    uint64_t elems;
    uint32_t hyper; /* index into hypers, or rates */
};

/* A group's hyperparameters as the optimizers' steps use them: kern_rates_of(). */
struct kern_rates {
    float scale;        /* gradient: 1/M, clip factor and loss unscale in one */
    float keep;         /* 1 - lr * weight_decay */
    float rate;         /* lr; AdamW: lr / bias1 */
    float beta1, rest1; /* rest = 1 - beta */
    float beta2, rest2;
    float unbias, eps; /* AdamW: 1 / sqrt(bias2); in torch's order sqrt(bias2) */

    /* In torch's order alone. */
    float decay;    /* of the gradient: coupled weight decay; 0: none */
    uint32_t flags; /* SGD: KERN_... */
};

#define KERN_MOMENTUM 1u /* there is one */
#define KERN_FIRST    2u /* it begins with this gradient */
#define KERN_NESTEROV 4u

/* Index of the first run that ends beyond elem. */
KERN_FN uint32_t run_find(const struct kern_run *runs, uint32_t run_count, uint64_t elem)
{
    uint32_t low = 0, high = run_count;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        if (runs[mid].first_elem + runs[mid].elems <= elem)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

#endif
