/* The ops in portable C: the reference, and the fallback. */
#include "kernels/cpu/vec_scalar.h"

#include "kernels/cpu/isa_table.h"

const struct cpu_isa cpu_isa_scalar = CPU_ISA_TABLE;
