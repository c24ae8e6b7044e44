/* model_ends.h: the model's ends: embedding, head and loss. */
#ifndef GPT_MODEL_ENDS_H
#define GPT_MODEL_ENDS_H

#include "examples/gpt/model_base.h"

void embed_forward(struct gpt *g, const real *params);
void embed_backward(struct gpt *g, real *grad); /* grad NULL: frozen, nothing to do */
void head_forward(struct gpt *g, const struct unit_arrays *a);
void head_backward(struct gpt *g, const struct unit_arrays *a);

#endif
