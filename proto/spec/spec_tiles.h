/* Internal to spec_json.c: units that are cut into tiles. "tiles": N of a unit makes N units of it,
 * "NAME/0" to "NAME/N-1", each with its share of the rows of each tensor.
 *
 *   {"name": "fc", "tiles": 2, "tensors": [{"name": "w", "shape": [5, 3]}]}
 *
 *   unit "fc/0"   tensor "w/0", [2, 3]: rows 0 and 1 of "w"
 *   unit "fc/1"   tensor "w/1", [3, 3]: rows 2 to 4
 *
 * Daemons, plans and owners know these as units like any other. Whatever leaves a model under
 * names (checkpoints, exports) has the whole tensors, whose bytes the rows are in order. Initial
 * values, too, are those of the whole one. How many tiles there are is of the model, not of who
 * trains it: what is computed tile by tile is summed in their order.
 */
#ifndef SHD_SPEC_TILES_H
#define SHD_SPEC_TILES_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct node;
struct spec;
struct spec_tensor;
struct spec_unit;

/* Tiles of the unit n; 0: it is not cut. Errors name what a unit with tiles cannot have. */
int spec_tiles_parse(const struct spec *s, const struct node *n, uint32_t *ret_tiles,
                     struct shd_err *e);

/* "NAME/TILE", which its owner frees. n: whose name it is. */
int spec_tile_name(const char *name, uint32_t tile, const struct node *n, char **ret_name,
                   struct shd_err *e);

/* What its unit has of a tensor that was parsed whole. n: the tensor. */
int spec_tile_cut(const struct spec *s, const struct spec_unit *unit, const struct node *n,
                  struct spec_tensor *t, struct shd_err *e);

#endif
