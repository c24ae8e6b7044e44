/* model_tiles.h: the units of a model in tiles (shape_tiles.h); only model.c includes it.
 *
 * A tile has rows of a matrix [in, out]: y = sum over tiles of x[:, their rows] W_t, in order, and
 * then the bias, of which each tile brings its part. Backward, in reverse: each makes its columns
 * of dx and all that is its own. Of the output matrix, which is used transposed, tiles make columns
 * of the logits; the gradient of what they read is a sum, from the last tile to the first.
 */
#ifndef GPT_MODEL_TILES_H
#define GPT_MODEL_TILES_H

#include "examples/gpt/model_layer.h"

/* Any unit of such a model but the head's. */
void tile_forward(struct gpt *g, struct gpt_unit u, const real *params);
void tile_backward(struct gpt *g, struct gpt_unit u, const real *params, real *grad);

#endif
