/* model_moe.h: a block with experts. */
#ifndef GPT_MODEL_MOE_H
#define GPT_MODEL_MOE_H

#include "examples/gpt/model_base.h"

/* Attention and router; then one expert. Rows whose expert does not run would stay at mid: by
 * construction there are none. */
void router_forward(struct gpt *g, uint32_t layer, const real *params);
void router_backward(struct gpt *g, uint32_t layer, const real *params, real *grad);
void expert_forward(struct gpt *g, struct gpt_unit u, const real *params);
void expert_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad);

/* True: the batch has rows for the expert. After the router's forward. */
bool expert_has_rows(const struct gpt *g, struct gpt_unit u);

#endif
