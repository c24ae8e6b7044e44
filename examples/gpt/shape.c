/* shape.c: see shape.h. */
#include "examples/gpt/shape.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "examples/gpt/shape_tiles.h"
#include "proto/base/check.h"
#include "proto/base/status.h"

#define GPT_ALIGN_ELEMS 32

/* A size of a tensor: so many times dim, or one of these. */
enum size_code { SIZE_VOCAB = -1, SIZE_SEQ = -2, SIZE_EXPERTS = -3, SIZE_RANK = -4 };

enum init_code {
    INIT_ZERO,
    INIT_ONE,
    INIT_NORMAL,   /* 0.02 */
    INIT_RESIDUAL, /* what is added to the residual stream: 0.02 / sqrt(2 layers) */
    INIT_FAN_IN,   /* 1 / sqrt(rows) */
};

struct tensor_row {
    const char *name; /* behind the unit's prefix */
    int rows, cols;   /* cols 0: a vector */
    enum init_code init;
};

/* GPT-2's initialisation; 0.02 / sqrt(2 L) so that the stream's variance does not grow with
 * depth. Adapters start as a product that is zero (Hu et al., arXiv:2106.09685, section 4.1). */
static const struct tensor_row rows_embed[EMBED_TENSORS] = {
    [EMBED_WTE] = { "wte.weight", SIZE_VOCAB, 1, INIT_NORMAL },
    [EMBED_WPE] = { "wpe.weight", SIZE_SEQ, 1, INIT_NORMAL },
};
static const struct tensor_row rows_block[BLOCK_TENSORS] = {
    [BLOCK_LN1_W] = { "ln_1.weight", 1, 0, INIT_ONE },
    [BLOCK_LN1_B] = { "ln_1.bias", 1, 0, INIT_ZERO },
    [BLOCK_ATTN_W] = { "attn.c_attn.weight", 1, 3, INIT_NORMAL },
    [BLOCK_ATTN_B] = { "attn.c_attn.bias", 3, 0, INIT_ZERO },
    [BLOCK_PROJ_W] = { "attn.c_proj.weight", 1, 1, INIT_RESIDUAL },
    [BLOCK_PROJ_B] = { "attn.c_proj.bias", 1, 0, INIT_ZERO },
    [BLOCK_LN2_W] = { "ln_2.weight", 1, 0, INIT_ONE },
    [BLOCK_LN2_B] = { "ln_2.bias", 1, 0, INIT_ZERO },
    [BLOCK_FC_W] = { "mlp.c_fc.weight", 1, 4, INIT_NORMAL },
    [BLOCK_FC_B] = { "mlp.c_fc.bias", 4, 0, INIT_ZERO },
    [BLOCK_MLP_W] = { "mlp.c_proj.weight", 4, 1, INIT_RESIDUAL },
    [BLOCK_MLP_B] = { "mlp.c_proj.bias", 1, 0, INIT_ZERO },
    [BLOCK_ROUTER_W] = { "router.weight", 1, SIZE_EXPERTS, INIT_NORMAL },
    [BLOCK_ROUTER_B] = { "router.bias", SIZE_EXPERTS, 0, INIT_ZERO },
};
static const struct tensor_row rows_expert[EXPERT_TENSORS] = {
    [EXPERT_FC_W] = { "c_fc.weight", 1, 4, INIT_NORMAL },
    [EXPERT_FC_B] = { "c_fc.bias", 4, 0, INIT_ZERO },
    [EXPERT_MLP_W] = { "c_proj.weight", 4, 1, INIT_RESIDUAL },
    [EXPERT_MLP_B] = { "c_proj.bias", 1, 0, INIT_ZERO },
};
static const struct tensor_row rows_lora[LORA_TENSORS] = {
    [LORA_ATTN_A] = { "attn.c_attn.lora_a", 1, SIZE_RANK, INIT_FAN_IN },
    [LORA_ATTN_B] = { "attn.c_attn.lora_b", SIZE_RANK, 3, INIT_ZERO },
    [LORA_PROJ_A] = { "attn.c_proj.lora_a", 1, SIZE_RANK, INIT_FAN_IN },
    [LORA_PROJ_B] = { "attn.c_proj.lora_b", SIZE_RANK, 1, INIT_ZERO },
    [LORA_FC_A] = { "mlp.c_fc.lora_a", 1, SIZE_RANK, INIT_FAN_IN },
    [LORA_FC_B] = { "mlp.c_fc.lora_b", SIZE_RANK, 4, INIT_ZERO },
    [LORA_MLP_A] = { "mlp.c_proj.lora_a", 4, SIZE_RANK, INIT_FAN_IN },
    [LORA_MLP_B] = { "mlp.c_proj.lora_b", SIZE_RANK, 1, INIT_ZERO },
};
static const struct tensor_row rows_head[HEAD_TENSORS] = {
    [HEAD_LN_W] = { "ln_f.weight", 1, 0, INIT_ONE },
    [HEAD_LN_B] = { "ln_f.bias", 1, 0, INIT_ZERO },
};
static const struct tensor_row rows_lm[] = { { "lm_head.weight", SIZE_VOCAB, 1, INIT_NORMAL } };
static const struct tensor_row *const kind_rows[GPT_UNIT_KINDS] = {
    [GPT_TILED_LN1] = &rows_block[BLOCK_LN1_W],
    [GPT_TILED_ATTN] = &rows_block[BLOCK_ATTN_W],
    [GPT_TILED_PROJ] = &rows_block[BLOCK_PROJ_W],
    [GPT_TILED_LN2] = &rows_block[BLOCK_LN2_W],
    [GPT_TILED_FC] = &rows_block[BLOCK_FC_W],
    [GPT_TILED_MLP] = &rows_block[BLOCK_MLP_W],
    [GPT_TILED_LM] = rows_lm,
    [GPT_EMBED] = rows_embed,
    [GPT_BLOCK] = rows_block,
    [GPT_EXPERT] = rows_expert,
    [GPT_LORA] = rows_lora,
    [GPT_HEAD] = rows_head,
};

const struct gpt_matrix_row gpt_matrices[GPT_MATRICES] = {
    [GPT_ATTN] = { BLOCK_ATTN_W, LORA_ATTN_A, 1, 3 },
    [GPT_PROJ] = { BLOCK_PROJ_W, LORA_PROJ_A, 1, 1 },
    [GPT_FC] = { BLOCK_FC_W, LORA_FC_A, 1, 4 },
    [GPT_MLP] = { BLOCK_MLP_W, LORA_MLP_A, 4, 1 },
};

/* -- Units ----------------------------------------------------------------------------------- */

static uint32_t layer_units(const struct gpt_shape *shape)
{
    return 1 + shape->experts + (shape->rank > 0 ? 1 : 0);
}

uint32_t gpt_units(const struct gpt_shape *shape)
{
    return shape->tiles > 0 ? tiles_units(shape) : shape->layers * layer_units(shape) + 2;
}

struct gpt_unit gpt_unit_at(const struct gpt_shape *shape, uint32_t unit)
{
    CHECK(unit < gpt_units(shape));
    if (shape->tiles > 0)
        return tiles_unit_at(shape, unit);
    if (unit == GPT_UNIT_EMBED)
        return (struct gpt_unit){ .kind = GPT_EMBED };
    if (unit + 1 == gpt_units(shape))
        return (struct gpt_unit){ .kind = GPT_HEAD };
    const uint32_t layer = (unit - 1) / layer_units(shape), place = (unit - 1) % layer_units(shape);
    if (place == 0)
        return (struct gpt_unit){ .kind = GPT_BLOCK, .layer = layer };
    if (shape->rank > 0)
        return (struct gpt_unit){ .kind = GPT_LORA, .layer = layer };
    return (struct gpt_unit){ .kind = GPT_EXPERT, .layer = layer, .expert = place - 1 };
}

uint32_t gpt_unit_find(const struct gpt_shape *shape, struct gpt_unit unit)
{
    if (shape->tiles > 0)
        return tiles_unit_find(shape, unit);
    if (unit.kind == GPT_EMBED)
        return GPT_UNIT_EMBED;
    if (unit.kind == GPT_HEAD)
        return gpt_units(shape) - 1;
    const uint32_t block = 1 + unit.layer * layer_units(shape);
    if (unit.kind == GPT_BLOCK)
        return block;
    return unit.kind == GPT_LORA ? block + 1 : block + 1 + unit.expert;
}

uint32_t gpt_unit_uses(const struct gpt_shape *shape, uint32_t unit)
{
    const struct gpt_unit u = gpt_unit_at(shape, unit);
    if (u.kind == GPT_HEAD && shape->tiles == 0)
        return GPT_UNIT_EMBED;
    return u.kind == GPT_LORA ? unit - 1 : GPT_UNIT_NONE;
}

bool gpt_kind_frozen(const struct gpt_shape *shape, enum gpt_unit_kind kind)
{
    return shape->rank > 0 && kind != GPT_LORA;
}

uint64_t gpt_unit_elems(const struct gpt_shape *shape, const struct gpt_layout *layout,
                        uint32_t unit)
{
    return layout->elems[gpt_unit_at(shape, unit).kind];
}

/* -- Tensors --------------------------------------------------------------------------------- */

static uint32_t kind_tensors(const struct gpt_shape *shape, enum gpt_unit_kind kind)
{
    switch (kind) {
    case GPT_EMBED:
        return EMBED_TENSORS;
    case GPT_BLOCK: /* the MLP's four, or the router's two */
        return shape->experts > 0 ? BLOCK_TENSORS - 4 : BLOCK_TENSORS - 2;
    case GPT_EXPERT:
        return EXPERT_TENSORS;
    case GPT_LORA:
        return LORA_TENSORS;
    case GPT_HEAD:
        return HEAD_TENSORS;
    default: /* of a model in tiles: shape_tiles.c */
        return 0;
    }
}

static uint32_t layer_tensors(const struct gpt_shape *shape)
{
    return kind_tensors(shape, GPT_BLOCK) + shape->experts * EXPERT_TENSORS +
           (shape->rank > 0 ? LORA_TENSORS : 0);
}

uint32_t gpt_tensors(const struct gpt_shape *shape)
{
    if (shape->tiles > 0)
        return tiles_tensors(shape);
    return EMBED_TENSORS + shape->layers * layer_tensors(shape) + HEAD_TENSORS;
}

/* Which unit's tensor, and which of it; index is over the whole model. */
static struct gpt_unit tensor_unit(const struct gpt_shape *shape, uint32_t *index)
{
    if (shape->tiles > 0)
        return tiles_tensor_unit(shape, index);
    if (*index < EMBED_TENSORS)
        return (struct gpt_unit){ .kind = GPT_EMBED };
    *index -= EMBED_TENSORS;
    const uint32_t layer = *index / layer_tensors(shape);
    if (layer >= shape->layers) {
        *index -= shape->layers * layer_tensors(shape);
        return (struct gpt_unit){ .kind = GPT_HEAD };
    }
    *index %= layer_tensors(shape);
    const uint32_t block = kind_tensors(shape, GPT_BLOCK);
    if (*index < block)
        return (struct gpt_unit){ .kind = GPT_BLOCK, .layer = layer };
    *index -= block;
    if (shape->rank > 0)
        return (struct gpt_unit){ .kind = GPT_LORA, .layer = layer };
    const uint32_t expert = *index / EXPERT_TENSORS;
    *index %= EXPERT_TENSORS;
    return (struct gpt_unit){ .kind = GPT_EXPERT, .layer = layer, .expert = expert };
}

static uint64_t tensor_size(const struct gpt_shape *shape, int size)
{
    switch (size) {
    case SIZE_VOCAB:
        return GPT_VOCAB;
    case SIZE_SEQ:
        return shape->seq;
    case SIZE_EXPERTS:
        return shape->experts;
    case SIZE_RANK:
        return shape->rank;
    default:
        return (uint64_t)size * shape->dim;
    }
}

static void tensor_init(const struct gpt_shape *shape, enum init_code init, struct gpt_tensor *t)
{
    switch (init) {
    case INIT_ZERO:
        return;
    case INIT_ONE:
        t->init_const = 1;
        return;
    case INIT_NORMAL:
        t->init_std = 0.02;
        return;
    case INIT_RESIDUAL:
        t->init_std = 0.02 / sqrt(2.0 * shape->layers);
        return;
    case INIT_FAN_IN:
        t->init_std = 1 / sqrt((double)t->dims[0]);
        return;
    }
}

static void tensor_name(struct gpt_tensor *t, struct gpt_unit unit, const char *name)
{
    if (unit.kind == GPT_EMBED || unit.kind == GPT_HEAD || unit.kind == GPT_TILED_LM)
        snprintf(t->name, sizeof t->name, "%s", name);
    else if (unit.kind == GPT_EXPERT)
        snprintf(t->name, sizeof t->name, "h.%u.expert.%u.%s", unit.layer, unit.expert, name);
    else
        snprintf(t->name, sizeof t->name, "h.%u.%s", unit.layer, name);
}

void gpt_tensor_at(const struct gpt_shape *shape, uint32_t index, struct gpt_tensor *ret_tensor)
{
    CHECK(index < gpt_tensors(shape));
    const struct gpt_unit unit = tensor_unit(shape, &index);
    if (unit.kind == GPT_BLOCK && shape->experts > 0 && index >= BLOCK_FC_W)
        index += BLOCK_ROUTER_W - BLOCK_FC_W;
    const struct tensor_row *row = &kind_rows[unit.kind][index];
    struct gpt_tensor t = { .unit = gpt_unit_find(shape, unit),
                            .tiles = tiles_of(shape, unit.kind),
                            .kind = unit.kind,
                            .index = index };
    tensor_name(&t, unit, row->name);
    t.dims[0] = tensor_size(shape, row->rows);
    t.dims[1] = row->cols != 0 ? tensor_size(shape, row->cols) : 0;
    t.elems = t.dims[0] * (row->cols != 0 ? t.dims[1] : 1);
    tensor_init(shape, row->init, &t);
    *ret_tensor = t;
}

static uint64_t count_parameters(const struct gpt_shape *shape, bool trained_only)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(shape, i, &t);
        sum += trained_only && gpt_kind_frozen(shape, t.kind) ? 0 : t.elems;
    }
    return sum;
}

uint64_t gpt_parameters(const struct gpt_shape *shape)
{
    return count_parameters(shape, /* trained_only= */ false);
}

uint64_t gpt_parameters_trained(const struct gpt_shape *shape)
{
    return count_parameters(shape, /* trained_only= */ true);
}

static int check_range(const char *what, uint32_t value, uint32_t min, uint32_t max,
                       struct shd_err *e)
{
    if (value >= min && value <= max)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "%s is %u, limits are %u to %u", what, value, min, max);
}

int gpt_shape_check(const struct gpt_shape *shape, struct shd_err *e)
{
    int r = check_range("layers", shape->layers, 1, GPT_LAYERS_MAX, e);
    if (r == SHD_OK)
        r = check_range("dim", shape->dim, 1, GPT_DIM_MAX, e);
    if (r == SHD_OK)
        r = check_range("heads", shape->heads, 1, shape->dim, e);
    if (r == SHD_OK)
        r = check_range("seq", shape->seq, 1, GPT_SEQ_MAX, e);
    if (r == SHD_OK)
        r = check_range("experts", shape->experts, 0, GPT_EXPERTS_MAX, e);
    if (r == SHD_OK)
        r = check_range("adapter rank", shape->rank, 0, shape->dim, e);
    if (r == SHD_OK && shape->dim % shape->heads != 0)
        r = err_set(e, SHD_ERANGE, "dim %u is not a multiple of heads %u", shape->dim,
                    shape->heads);
    if (r == SHD_OK && shape->experts > 0 && shape->rank > 0)
        r = err_set(e, SHD_ENOTSUP, "adapters for a model with experts are not supported");
    if (r == SHD_OK)
        r = tiles_check(shape, e);
    if (r == SHD_OK)
        r = check_range("units", gpt_units(shape), 1, GPT_UNITS_MAX, e);
    return r;
}

/* -- Layout ---------------------------------------------------------------------------------- */

static uint64_t align_up(uint64_t elems)
{
    return (elems + GPT_ALIGN_ELEMS - 1) / GPT_ALIGN_ELEMS * GPT_ALIGN_ELEMS;
}

/* The first unit of its kind: the one whose offsets make the layout. */
static bool unit_is_first(const struct gpt_shape *shape, uint32_t unit)
{
    const struct gpt_unit u = gpt_unit_at(shape, unit);
    return u.layer == 0 && u.expert == 0;
}

int gpt_layout_load(const struct gpt_shape *shape, const shd_model *m,
                    struct gpt_layout *ret_layout, struct shd_err *e)
{
    struct gpt_layout layout = { .elems = { 0 } };
    for (uint32_t i = 0; i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        struct shd_tensor found = { .size = sizeof found };
        gpt_tensor_at(shape, i, &t);
        if (t.tiles > 1) { /* all are like the first */
            t.elems /= t.tiles;
            const size_t bytes = strlen(t.name);
            snprintf(t.name + bytes, sizeof t.name - bytes, "/0");
        }
        const int r = shd_tensor_find(m, t.name, &found, e);
        if (r != SHD_OK)
            return r;
        uint64_t *at = &layout.at[t.kind][t.index], *elems = &layout.elems[t.kind];
        if (found.unit != t.unit || found.elems != t.elems)
            return err_set(e, SHD_ESPEC, "tensor %s is %ju elements of unit %u, expected %ju of %u",
                           t.name, (uintmax_t)found.elems, found.unit, (uintmax_t)t.elems, t.unit);
        if (!unit_is_first(shape, t.unit) && *at != found.offset_elems)
            return err_set(
                e, SHD_ESPEC,
                "tensor %s is at element %ju, in the first unit of its kind it is at %ju", t.name,
                (uintmax_t)found.offset_elems, (uintmax_t)*at);
        *at = found.offset_elems;
        if (*elems < align_up(found.offset_elems + found.elems))
            *elems = align_up(found.offset_elems + found.elems);
    }
    *ret_layout = layout;
    return SHD_OK;
}

/* -- Spec ------------------------------------------------------------------------------------ */

static json_t *spec_optimizer(const struct gpt_spec *spec)
{
    const char *kind = spec->optimizer, *moments = spec->int8 ? "int8" : "f32";
    if (strcmp(kind, "sgd") == 0)
        return json_pack("{s:s, s:f, s:s}", "kind", kind, "momentum", 0.9, "moments", moments);
    if (strcmp(kind, "lion") == 0)
        return json_pack("{s:s, s:f, s:f, s:s}", "kind", kind, "beta1", 0.9, "beta2", 0.99,
                         "moments", moments);
    return json_pack("{s:s, s:f, s:f, s:f, s:s}", "kind", "adamw", "beta1", 0.9, "beta2", 0.95,
                     "eps", 1e-8, "moments", moments);
}

static bool is_muon(const struct gpt_spec *spec)
{
    return strcmp(spec->optimizer, "muon") == 0;
}

/* Adafactor's is for all tensors of a unit. */
static json_t *adafactor_groups(const struct gpt_spec *spec)
{
    return json_pack("[{s:s, s:f, s:{s:s}}, {s:s, s:f, s:{s:s}}]", "name", "decay", "weight_decay",
                     spec->weight_decay, "optimizer", "kind", "adafactor", "name", "plain",
                     "weight_decay", 0.0, "optimizer", "kind", "adafactor");
}

/* LAMB's is for all matrices; biases and norms have AdamW. */
static json_t *lamb_groups(const struct gpt_spec *spec)
{
    return json_pack("[{s:s, s:f, s:{s:s}}, {s:s, s:f}]", "name", "decay", "weight_decay",
                     spec->weight_decay, "optimizer", "kind", "lamb", "name", "plain",
                     "weight_decay", 0.0);
}

/* Muon's is for the matrices of layers; embedding, head and adapters stay AdamW's, as its authors
 * have it. Its rates are then of AdamW's size, so that both go by one. */
static const char *tensor_group(const struct gpt_spec *spec, const struct gpt_tensor *t)
{
    const bool hidden = t->kind == GPT_BLOCK || t->kind == GPT_EXPERT;
    if (t->dims[1] == 0)
        return "plain";
    return hidden && is_muon(spec) ? "muon" : "decay";
}

static json_t *spec_groups(const struct gpt_spec *spec)
{
    if (strcmp(spec->optimizer, "lamb") == 0)
        return lamb_groups(spec);
    if (strcmp(spec->optimizer, "adafactor") == 0)
        return adafactor_groups(spec);
    if (!is_muon(spec))
        return json_pack("[{s:s, s:f}, {s:s, s:f}]", "name", "decay", "weight_decay",
                         spec->weight_decay, "name", "plain", "weight_decay", 0.0);
    return json_pack("[{s:s, s:f}, {s:s, s:f}, {s:s, s:f, s:{s:s, s:s}}]", "name", "decay",
                     "weight_decay", spec->weight_decay, "name", "plain", "weight_decay", 0.0,
                     "name", "muon", "weight_decay", spec->weight_decay, "optimizer", "kind",
                     "muon", "adjust_lr_fn", "match_rms_adamw");
}

static json_t *spec_init(const struct gpt_tensor *t)
{
    if (t->init_std > 0)
        return json_pack("[s, f, f]", "normal", 0.0, t->init_std);
    return json_pack("[s, f]", "const", t->init_const);
}

static json_t *spec_tensor(const struct gpt_shape *shape, const struct gpt_spec *spec,
                           const struct gpt_tensor *t)
{
    const bool vector = t->dims[1] == 0;
    json_t *sizes = vector ? json_pack("[I]", (json_int_t)t->dims[0])
                           : json_pack("[I, I]", (json_int_t)t->dims[0], (json_int_t)t->dims[1]);
    json_t *tensor = json_pack("{s:s, s:o, s:s, s:o}", "name", t->name, "shape", sizes, "group",
                               tensor_group(spec, t), "init", spec_init(t));
    if (tensor != NULL && gpt_kind_frozen(shape, t->kind) &&
        json_object_set_new(tensor, "trainable", json_false()) != 0) {
        json_decref(tensor);
        return NULL;
    }
    return tensor;
}

static void spec_unit_name(struct gpt_unit u, char *name, size_t size)
{
    static const char *const parts[GPT_UNIT_KINDS] = {
        [GPT_TILED_LN1] = "ln_1", [GPT_TILED_ATTN] = "attn", [GPT_TILED_PROJ] = "proj",
        [GPT_TILED_LN2] = "ln_2", [GPT_TILED_FC] = "fc",     [GPT_TILED_MLP] = "mlp",
    };
    if (u.kind == GPT_EMBED || u.kind == GPT_HEAD)
        snprintf(name, size, "%s", u.kind == GPT_EMBED ? "embed" : "head");
    else if (u.kind == GPT_TILED_LM)
        snprintf(name, size, "lm_head");
    else if (parts[u.kind] != NULL)
        snprintf(name, size, "h.%u.%s", u.layer, parts[u.kind]);
    else if (u.kind == GPT_EXPERT)
        snprintf(name, size, "h.%u.expert.%u", u.layer, u.expert);
    else
        snprintf(name, size, "h.%u%s", u.layer, u.kind == GPT_LORA ? ".lora" : "");
}

static json_t *spec_unit(const struct gpt_shape *shape, const struct gpt_tensor *first)
{
    char name[32], used[32];
    const uint32_t uses = gpt_unit_uses(shape, first->unit);
    spec_unit_name(gpt_unit_at(shape, first->unit), name, sizeof name);
    if (first->tiles > 1)
        return json_pack("{s:s, s:I, s:[]}", "name", name, "tiles", (json_int_t)first->tiles,
                         "tensors");
    if (uses == GPT_UNIT_NONE)
        return json_pack("{s:s, s:[]}", "name", name, "tensors");
    spec_unit_name(gpt_unit_at(shape, uses), used, sizeof used);
    return json_pack("{s:s, s:[s], s:[]}", "name", name, "uses", used, "tensors");
}

static json_t *spec_units(const struct gpt_shape *shape, const struct gpt_spec *spec)
{
    json_t *units = json_array(), *unit = NULL;
    for (uint32_t i = 0, last = GPT_UNIT_NONE; units != NULL && i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(shape, i, &t);
        if (t.unit != last) {
            unit = spec_unit(shape, &t);
            if (json_array_append_new(units, unit) != 0)
                goto no_memory;
        }
        last = t.unit;
        if (json_array_append_new(json_object_get(unit, "tensors"), spec_tensor(shape, spec, &t)) !=
            0)
            goto no_memory;
    }
    return units;
no_memory:
    json_decref(units);
    return NULL;
}

static const char *spec_dtype(enum shd_dtype dtype)
{
    return dtype == SHD_BF16 ? "bf16" : dtype == SHD_F16 ? "f16" : "f32";
}

static bool is_codec(const char *name)
{
    return name != NULL && strcmp(name, "none") != 0;
}

char *gpt_spec_json(const struct gpt_shape *shape, const struct gpt_spec *spec)
{
    /* "o" takes the reference over, also of NULL, which makes json_pack() fail. */
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:s, s:s, s:o, s:o, s:o}", "name", GPT_MODEL_NAME, "seed",
        (json_int_t)spec->seed, "micro_batches", (json_int_t)spec->micro_batches, "publish",
        spec_dtype(spec->publish), "grad_dtype", spec_dtype(spec->grad_dtype), "optimizer",
        spec_optimizer(spec), "groups", spec_groups(spec), "units", spec_units(shape, spec));
    if (root == NULL)
        return NULL;
    if ((spec->accumulate > 1 &&
         json_object_set_new(root, "accumulate", json_integer(spec->accumulate)) != 0) ||
        (spec->verify_every > 0 &&
         json_object_set_new(root, "verify_every", json_integer((json_int_t)spec->verify_every)) !=
             0)) {
        json_decref(root);
        return NULL;
    }
    if ((is_codec(spec->codec) &&
         json_object_set_new(root, "codec", json_string(spec->codec)) != 0) ||
        (is_codec(spec->grad_codec) &&
         json_object_set_new(root, "grad_codec", json_string(spec->grad_codec)) != 0)) {
        json_decref(root);
        return NULL;
    }
    if (spec->ema > 0 && json_object_set_new(root, "ema", json_real(spec->ema)) != 0) {
        json_decref(root);
        return NULL;
    }
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    return text;
}
