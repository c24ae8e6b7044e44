/* model_block.h: a block: attention and dense MLP, plain or with adapters. */
#ifndef GPT_MODEL_BLOCK_H
#define GPT_MODEL_BLOCK_H

#include "examples/gpt/model_base.h"

/* A whole dense block. base: the block's parameters, grad: their gradient or NULL; low, low_grad:
 * the adapters' or NULL. */
struct block_arrays {
    const real *base, *low;
    real *grad, *low_grad;
};
void block_forward(struct gpt *g, uint32_t layer, const struct block_arrays *a);
void block_backward(struct gpt *g, uint32_t layer, const struct block_arrays *a);

/* x -> mid, norm2 and back: g->dx from mid's gradient to x's. Backward of norm2 is the caller's. */
void block_attention_forward(struct gpt *g, struct block_acts *b, const struct block_arrays *a);
void block_attention_backward(struct gpt *g, struct block_acts *b, const struct block_arrays *a);
struct vec_norm block_norm(const struct gpt *g, const struct block_acts *b, const real *params,
                           enum gpt_block_tensor weight);

#endif
