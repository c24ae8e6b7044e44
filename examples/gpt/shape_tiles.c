/* shape_tiles.c: see shape_tiles.h. */
#include "examples/gpt/shape_tiles.h"

#include "proto/base/check.h"
#include "proto/base/status.h"

#define LAYER_KINDS 6u
#define UNIT_PAIR   2u /* tensors of each unit of a layer, and of the ends but lm_head */

/* A layer, in forward order. */
static const enum gpt_unit_kind layer_kinds[LAYER_KINDS] = {
    GPT_TILED_LN1, GPT_TILED_ATTN, GPT_TILED_PROJ, GPT_TILED_LN2, GPT_TILED_FC, GPT_TILED_MLP,
};

uint32_t tiles_of(const struct gpt_shape *shape, enum gpt_unit_kind kind)
{
    if (shape->tiles == 0 || kind == GPT_HEAD || kind == GPT_TILED_LN1 || kind == GPT_TILED_LN2)
        return 1;
    return shape->tiles;
}

static uint32_t layer_units(const struct gpt_shape *shape)
{
    return 2 + 4 * shape->tiles;
}

uint32_t tiles_units(const struct gpt_shape *shape)
{
    return shape->tiles + shape->layers * layer_units(shape) + 1 + shape->tiles;
}

struct gpt_unit tiles_unit_at(const struct gpt_shape *shape, uint32_t unit)
{
    if (unit < shape->tiles)
        return (struct gpt_unit){ .kind = GPT_EMBED, .expert = unit };
    unit -= shape->tiles;
    const uint32_t layer = unit / layer_units(shape);
    if (layer >= shape->layers) {
        unit -= shape->layers * layer_units(shape);
        return unit == 0 ? (struct gpt_unit){ .kind = GPT_HEAD }
                         : (struct gpt_unit){ .kind = GPT_TILED_LM, .expert = unit - 1 };
    }
    unit %= layer_units(shape);
    uint32_t i = 0;
    while (unit >= tiles_of(shape, layer_kinds[i]))
        unit -= tiles_of(shape, layer_kinds[i++]);
    CHECK(i < LAYER_KINDS);
    return (struct gpt_unit){ .kind = layer_kinds[i], .layer = layer, .expert = unit };
}

uint32_t tiles_unit_find(const struct gpt_shape *shape, struct gpt_unit unit)
{
    const uint32_t head = shape->tiles + shape->layers * layer_units(shape);
    if (unit.kind == GPT_EMBED)
        return unit.expert;
    if (unit.kind == GPT_HEAD)
        return head;
    if (unit.kind == GPT_TILED_LM)
        return head + 1 + unit.expert;
    uint32_t found = shape->tiles + unit.layer * layer_units(shape) + unit.expert;
    for (uint32_t i = 0; i < LAYER_KINDS && layer_kinds[i] != unit.kind; i++)
        found += tiles_of(shape, layer_kinds[i]);
    return found;
}

uint32_t tiles_tensors(const struct gpt_shape *shape)
{
    return UNIT_PAIR + shape->layers * LAYER_KINDS * UNIT_PAIR + UNIT_PAIR + 1;
}

struct gpt_unit tiles_tensor_unit(const struct gpt_shape *shape, uint32_t *index)
{
    const uint32_t pair = *index / UNIT_PAIR;
    const uint32_t layer = pair > 0 ? (pair - 1) / LAYER_KINDS : 0;
    *index %= UNIT_PAIR;
    if (pair == 0)
        return (struct gpt_unit){ .kind = GPT_EMBED };
    if (layer < shape->layers)
        return (struct gpt_unit){ .kind = layer_kinds[(pair - 1) % LAYER_KINDS], .layer = layer };
    const uint32_t head = 1 + shape->layers * LAYER_KINDS;
    return (struct gpt_unit){ .kind = pair == head ? GPT_HEAD : GPT_TILED_LM };
}

int tiles_check(const struct gpt_shape *shape, struct shd_err *e)
{
    const struct {
        const char *what;
        uint32_t size;
    } rows[] = { { "dim", shape->dim }, { "seq", shape->seq }, { "the vocabulary,", GPT_VOCAB } };
    if (shape->tiles == 0)
        return SHD_OK;
    if (shape->experts > 0 || shape->rank > 0)
        return err_set(e, SHD_ENOTSUP, "tiles of a model with %s are not supported",
                       shape->experts > 0 ? "experts" : "adapters");
    for (size_t i = 0; i < ARRAY_SIZE(rows); i++)
        if (rows[i].size % shape->tiles != 0)
            return err_set(e, SHD_ERANGE, "%s %u is not a multiple of tiles %u", rows[i].what,
                           rows[i].size, shape->tiles);
    return SHD_OK;
}
