/* The instruction sets of the host: one table of ops each (isa_ops.c, built from op_*.h over
 * vec.h), and which of them this CPU can run.
 *
 * Every compute thread runs with CPU_MXCSR. That is part of the numerics: denormal fp32 inputs of
 * arithmetic count as zero, denormal results become zero. Only host arithmetic of x86-64 is
 * described here; another architecture needs its own answer to both that and to the store
 * order that crash recovery builds on (trail.h).
 */
#ifndef SHD_KERNELS_CPU_ISA_H
#define SHD_KERNELS_CPU_ISA_H

#ifndef __x86_64__
#error "kernels/cpu needs x86-64: MXCSR semantics and its store order"
#endif

#include <stdint.h>

#include "kernels/kern.h"

#define CPU_MXCSR       0x9fc0u /* round to nearest even, exceptions masked, FTZ | DAZ */
#define CPU_THREADS_MAX 256u

struct cpu_range { /* of an op's elements or, for a hash, of its leaves */
    uint64_t first;
    uint64_t count;
};

struct kern_decode;
struct kern_widen;
struct muon_job;
struct trail_record;

/* The ops of one instruction set. Each does one range of the op on the calling thread. Those with
 * a trail note what they change in rec (NULL: nowhere); the range then lies in its chunk. */
struct cpu_isa {
    const char *name;     /* "avx2" */
    const char *ops_name; /* "cpu-avx2" */
    void (*fill)(const struct kern_fill *a, struct cpu_range r);
    void (*cast)(const struct kern_cast *a, struct cpu_range r);
    void (*accumulate)(const struct kern_accumulate *a, struct cpu_range r, struct kern_sum *part,
                       struct trail_record *rec);
    void (*sumsq)(const struct kern_sumsq *a, struct cpu_range r, struct kern_sum *part);
    void (*change)(const float *old, const float *new, struct kern_change *part);
    void (*update)(const struct kern_update *a, struct cpu_range r, struct trail_record *rec);
    void (*update_int8)(const struct kern_update *a, struct cpu_range r, struct trail_record *rec);
    void (*ema)(const struct kern_update *a, struct cpu_range r, struct trail_record *rec);
    void (*quantize)(const struct kern_quantize *a, struct cpu_range r); /* whole blocks */
    void (*dequantize)(const struct kern_dequantize *a, struct cpu_range r);
    void (*encode)(const struct kern_encode *a, struct cpu_range r); /* likewise */
    void (*decode)(const struct kern_decode *a);
    void (*muon)(const struct muon_job *job, struct cpu_range tasks);
    void (*lamb)(const struct muon_job *job, struct cpu_range r, struct kern_change *part);
    void (*adafactor)(const struct muon_job *job, struct cpu_range tasks);
    void (*adafactor_direction)(const struct muon_job *job, struct cpu_range r,
                                struct kern_change *part);
    void (*widen)(const struct kern_widen *a);
};

extern const struct cpu_isa cpu_isa_scalar, cpu_isa_avx2, cpu_isa_avx512;

/* The instruction set called name (NULL: the best here). SHD_EINVAL: no such name; SHD_ENOTSUP:
 * this CPU lacks it. */
int cpu_isa_find(const char *name, const struct cpu_isa **ret_isa, struct shd_err *e);

/* Names of the host instruction sets this CPU has, best last, NULL-terminated. */
const char *const *kern_cpu_isas(void);

#endif
