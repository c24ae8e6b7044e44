/* Widen to fp32 and scale: out = scale in, one rounding; with scale 1 the bits are copied (bf16 and
 * f16 widen exactly). Included once per instruction set, after vec.h. */
#ifndef SHD_KERNELS_CPU_OP_WIDEN_H
#define SHD_KERNELS_CPU_OP_WIDEN_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/widen.h"

/* More than caches hold: past them, so that no line is read before it is written. */
#define WIDEN_STREAM_ELEMS (UINT64_C(1) << 20)

KERN_FN vec widen_load(const struct kern_widen *a, uint64_t i)
{
    if (a->in_dtype == SHD_F32)
        return vec_load((const float *)a->in + i);
    const half h = half_load((const uint16_t *)a->in + i);
    return a->in_dtype == SHD_BF16 ? vec_from_bf16(h) : vec_from_f16(h);
}

KERN_FN vec widen_load_n(const struct kern_widen *a, uint64_t i, unsigned n)
{
    if (a->in_dtype == SHD_F32)
        return vec_load_n((const float *)a->in + i, n);
    const half h = half_load_n((const uint16_t *)a->in + i, n);
    return a->in_dtype == SHD_BF16 ? vec_from_bf16(h) : vec_from_f16(h);
}

KERN_FN void widen_loop(const struct kern_widen *a, bool scales, bool streams)
{
    const vec scale = vec_set1(a->scale);
    uint64_t i = 0;
    for (; a->elems - i >= VEC_LANES; i += VEC_LANES) {
        vec x = widen_load(a, i);
        x = scales ? vec_mul(x, scale) : x;
        if (streams)
            vec_stream(a->out + i, x);
        else
            vec_store(a->out + i, x);
    }
    const unsigned n = (unsigned)(a->elems - i);
    const vec x = widen_load_n(a, i, n);
    vec_store_n(a->out + i, scales ? vec_mul(x, scale) : x, n);
    if (streams)
        vec_fence();
}

static void widen_all(const struct kern_widen *a)
{
    const bool scales = a->scale != 1;
    const bool streams = a->elems >= WIDEN_STREAM_ELEMS &&
                         (uintptr_t)a->out % (VEC_LANES * sizeof(float)) == 0;
    if (a->in_dtype == SHD_F32 && !scales && !streams)
        memcpy(a->out, a->in, a->elems * sizeof *a->out);
    else if (streams)
        widen_loop(a, scales, true);
    else
        widen_loop(a, scales, false);
}

#endif
