/* Gradients as they come, to fp32 where owners read them: on the calling thread, for a client that
 * hands them over and needs them copied once. */
#ifndef SHD_KERNELS_CPU_WIDEN_H
#define SHD_KERNELS_CPU_WIDEN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"

struct kern_widen { /* out[i] = scale * (float)in[i]; scale 1 copies bits */
    float *out;
    const void *in; /* of in_dtype; aligned to its elements */
    enum shd_dtype in_dtype;
    uint64_t elems;
    float scale;
};

/* The same bits on every CPU, whatever the calling thread does with denormals: where it
 * multiplies, those of fp32 count as zero, as in all kernels. */
void cpu_widen(const struct kern_widen *a);

/* The same by this instruction set, which kern_cpu_isas() names: for tests. */
void cpu_widen_by(const char *isa, const struct kern_widen *a);

#endif
