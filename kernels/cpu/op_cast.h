/* Cast fp32 to a publish dtype: round to nearest even on the bits, whatever FTZ|DAZ say. fp32
 * denormals therefore become bf16 denormals (and 0 in f16, being far below its smallest), f16
 * denormals are kept, overflow gives infinity, and a NaN becomes quiet with the upper bits of its
 * payload. fp32 is a copy. Included once per instruction set, after vec.h. */
#ifndef SHD_KERNELS_CPU_OP_CAST_H
#define SHD_KERNELS_CPU_OP_CAST_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"

KERN_FN void cast_halves(uint16_t *out, const float *in, uint64_t elems, bool bf16)
{
    uint64_t i = 0;
    for (; elems - i >= VEC_LANES; i += VEC_LANES) {
        const vec x = vec_load(in + i);
        half_store(out + i, bf16 ? vec_to_bf16(x) : vec_to_f16(x));
    }
    const unsigned n = (unsigned)(elems - i);
    const vec x = vec_load_n(in + i, n);
    half_store_n(out + i, bf16 ? vec_to_bf16(x) : vec_to_f16(x), n);
}

static void cast_range(const struct kern_cast *a, struct cpu_range r)
{
    const float *in = a->in + r.first;
    switch (a->out_dtype) {
    case SHD_F32:
        memcpy((float *)a->out + r.first, in, r.count * sizeof *in);
        break;
    case SHD_BF16:
        cast_halves((uint16_t *)a->out + r.first, in, r.count, true);
        break;
    case SHD_F16:
        cast_halves((uint16_t *)a->out + r.first, in, r.count, false);
        break;
    }
}

#endif
