/* The ops with AVX2, FMA and F16C. Compiled with those flags: call only where isa.c says so. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/isa_table.h"

const struct cpu_isa cpu_isa_avx2 = CPU_ISA_TABLE;
