/* The ops with AVX-512 F, BW, DQ and VL. Compiled with those flags: call only where isa.c says so.
 */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/isa_table.h"

const struct cpu_isa cpu_isa_avx512 = CPU_ISA_TABLE;
