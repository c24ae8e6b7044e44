/* The ops of one instruction set, compiled once for each (KERN_ISA, KERN_LANES) with the flags it
 * needs: call them only where isa.c says so. Of one lane they are plain C: the reference, and the
 * fallback. */
#include "kernels/cpu/vec.h"

#include "kernels/cpu/isa.h"
#include "kernels/cpu/op_cast.h"
#include "kernels/cpu/op_ema.h"
#include "kernels/cpu/op_fill.h"
#include "kernels/cpu/op_muon.h"
#include "kernels/cpu/op_quant.h"
#include "kernels/cpu/op_sum.h"
#include "kernels/cpu/op_update.h"
#include "kernels/cpu/op_widen.h"
/* Behind what they build on. */
#include "kernels/cpu/op_adafactor.h"
#include "kernels/cpu/op_codec.h"
#include "kernels/cpu/op_lamb.h"

const struct cpu_isa KERN_ISA = {
    .name = VEC_NAME,
    .ops_name = "cpu-" VEC_NAME,
    .fill = fill_range,
    .cast = cast_range,
    .accumulate = accumulate_range,
    .sumsq = sumsq_range,
    .change = change_block,
    .update = update_range,
    .update_int8 = quant_update_range,
    .ema = ema_range,
    .quantize = quantize_range,
    .dequantize = dequantize_range,
    .encode = encode_range,
    .decode = decode_all,
    .muon = muon_range,
    .lamb = lamb_range,
    .adafactor = adafactor_tasks_run,
    .adafactor_direction = adafactor_range,
    .widen = widen_all,
};
