/* PTX instructions that only compute: from registers to a register, operands in PTX's order. See
 * ptx.h; that an instruction is not here is an error when a kernel has it. */
#ifndef SHD_TESTS_PTX_OPS_H
#define SHD_TESTS_PTX_OPS_H

#include <stdint.h>

/* r: registers; o: which of them are the operands. */
typedef void (*ptx_op)(uint64_t *r, const unsigned *o);

/* Shared memory of the block that runs; addresses in it count from here. */
#define PTX_SHARED_BYTES (48u << 10)
extern unsigned char ptx_shared[PTX_SHARED_BYTES];

/* NULL: none of this name. */
ptx_op ptx_op_find(const char *name);

#endif
