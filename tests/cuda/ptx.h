/* What nvcc made of the kernels, run on the host: an interpreter of the part of PTX that it uses,
 * on the emulation's threads (emulate.h). What is compiled as C++ shows that the source is right;
 * this shows that the GPU is told the same: order of operations, roundings, flushed denormals,
 * offsets of arguments, fences.
 *
 *     EMULATE_PTX=kernels.ptx[:more.ptx] test_emulate_kernels
 *
 * Kernels in those files take the place of emulated ones of their names. The process is ended, with
 * a message, by a file that cannot be read, by an instruction or operand that is not known here
 * (none is passed over), and by an access that is not aligned to its size, as on the device.
 *
 * As the PTX ISA has it: .ftz flushes denormal inputs and results, keeping the sign; a NaN that
 * arithmetic in fp32 makes is 0x7fffffff. What approximations (ex2, rcp of fp64) give is not
 * defined to the bit: here, the nearest.
 */
#ifndef SHD_TESTS_PTX_H
#define SHD_TESTS_PTX_H

#include "tests/cuda/emulate.h"

/* Kernel of this name in EMULATE_PTX's files, NULL: none. Under the emulation's lock or before any
 * launch. */
const struct emulate_kernel *ptx_find(const char *name);

/* -- ptx_ops.cpp: instructions that only compute, from registers to a register, operands in PTX's
 * order; that one is not here is an error when a kernel has it
 * ---------------------------------------------- */

/* r: registers; o: which of them are the operands. */
typedef void (*ptx_op)(uint64_t *r, const unsigned *o);

/* Shared memory of the block that runs; addresses in it count from here. */
#define PTX_SHARED_BYTES (48u << 10)
extern unsigned char ptx_shared[PTX_SHARED_BYTES];

/* NULL: none of this name. */
ptx_op ptx_op_find(const char *name);

#endif
