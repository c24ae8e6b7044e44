/* Published codes (proto/base/dtype.h) to a model's dtype: on the calling thread, for a client that
 * copies them from where owners publish them, and needs them copied once. */
#ifndef SHD_KERNELS_CPU_DECODE_H
#define SHD_KERNELS_CPU_DECODE_H

#include <stdint.h>

#include "proto/base/dtype.h"

struct kern_decode {
    void *out;        /* [elems] of out_dtype, aligned to them */
    const void *in;   /* tiles; aligned to 2 */
    enum codec codec; /* not none */
    enum shd_dtype out_dtype;
    uint64_t elems; /* whole tiles */
};

/* The same bits on every CPU, whatever the calling thread does with denormals. */
void cpu_decode(const struct kern_decode *a);

/* The same by this instruction set, which kern_cpu_isas() names: for tests. */
void cpu_decode_by(const char *isa, const struct kern_decode *a);

#endif
