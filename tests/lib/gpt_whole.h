/* The reference model without daemons: its layout, and a micro-batch over arrays of one process.
 * With GPT_F64 the fp64 twin's (examples/gpt/real.h). */
#ifndef SHD_TESTS_GPT_WHOLE_H
#define SHD_TESTS_GPT_WHOLE_H

#include "examples/gpt/model.h"

#ifdef GPT_F64
#define gpt_whole gpt64_whole
#endif

/* The layout by shd.h's rule: tensors in order, each at the next multiple of 32 elements. */
void gpt_layout_compute(const struct gpt_shape *shape, struct gpt_layout *ret_layout);

/* Forward and backward of the whole model: params[units], grads[units] (NULL: forward only;
 * grads[u] NULL: u is frozen). Gradients of experts that took no part are left alone. Returns the
 * loss. */
double gpt_whole(struct gpt *g, const uint8_t *windows, const real *const *params,
                 real *const *grads);

#endif
