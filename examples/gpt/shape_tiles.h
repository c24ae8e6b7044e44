/* shape_tiles.h: units and tensors of a model in tiles (`tiles` of gpt_shape), for shape.c.
 *
 * Each matrix is a unit that is cut into tiles by its rows, and norms are units of their own:
 *
 *   "embed/0" ..     wte and wpe
 *   "h.0.ln_1"       then "h.0.attn/0" .., "h.0.proj/0" .., "h.0.ln_2", "h.0.fc/0" .., "h.0.mlp/0"
 * .. "head"           ln_f "lm_head/0" ..   the output matrix, which is not wte: who uses a unit
 * holds all its tiles
 *
 * `expert` of a gpt_unit is its tile.
 */
#ifndef GPT_SHAPE_TILES_H
#define GPT_SHAPE_TILES_H

#include "examples/gpt/shape.h"

uint32_t tiles_units(const struct gpt_shape *shape);
struct gpt_unit tiles_unit_at(const struct gpt_shape *shape, uint32_t unit);
uint32_t tiles_unit_find(const struct gpt_shape *shape, struct gpt_unit unit);

/* Whole tensors. */
uint32_t tiles_tensors(const struct gpt_shape *shape);

/* The unit of a tensor (its first tile), and which of its tensors it is. */
struct gpt_unit tiles_tensor_unit(const struct gpt_shape *shape, uint32_t *index);

/* Tiles that a unit of this kind is cut into; 1: it is not. */
uint32_t tiles_of(const struct gpt_shape *shape, enum gpt_unit_kind kind);

/* Do they cut what there is into parts of one size? SHD_ERANGE, SHD_ENOTSUP: what it is. */
int tiles_check(const struct gpt_shape *shape, struct shd_err *e);

#endif
