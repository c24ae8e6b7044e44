/* Included last by each isa_*.c: its ops as a table. */
#ifndef SHD_KERNELS_CPU_ISA_TABLE_H
#define SHD_KERNELS_CPU_ISA_TABLE_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/op_cast.h"
#include "kernels/cpu/op_fill.h"
#include "kernels/cpu/op_sum.h"
#include "kernels/cpu/op_update.h"

#define CPU_ISA_TABLE                                                                          \
    {                                                                                          \
        .name = VEC_NAME, .ops_name = "cpu-" VEC_NAME, .fill = fill_range, .cast = cast_range, \
        .accumulate = accumulate_range, .sumsq = sumsq_range, .update = update_range,          \
    }

#endif
