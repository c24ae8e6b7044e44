/* shape.c: see shape.h. */
#include "examples/gpt/shape.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "examples/gpt/fail.h"

#define GPT_ALIGN_ELEMS 32

/* Name after the unit's prefix, and shape in multiples of dim. */
struct block_row {
    const char *name;
    uint32_t rows, cols; /* cols 0: a vector */
    double init;         /* vectors: the constant; matrices: 1 = residual projection */
};

static const struct block_row block_rows[BLOCK_TENSORS] = {
    [BLOCK_LN1_W] = { "ln_1.weight", 1, 0, 1 },
    [BLOCK_LN1_B] = { "ln_1.bias", 1, 0, 0 },
    [BLOCK_ATTN_W] = { "attn.c_attn.weight", 1, 3, 0 },
    [BLOCK_ATTN_B] = { "attn.c_attn.bias", 3, 0, 0 },
    [BLOCK_PROJ_W] = { "attn.c_proj.weight", 1, 1, 1 },
    [BLOCK_PROJ_B] = { "attn.c_proj.bias", 1, 0, 0 },
    [BLOCK_LN2_W] = { "ln_2.weight", 1, 0, 1 },
    [BLOCK_LN2_B] = { "ln_2.bias", 1, 0, 0 },
    [BLOCK_FC_W] = { "mlp.c_fc.weight", 1, 4, 0 },
    [BLOCK_FC_B] = { "mlp.c_fc.bias", 4, 0, 0 },
    [BLOCK_MLP_W] = { "mlp.c_proj.weight", 4, 1, 1 },
    [BLOCK_MLP_B] = { "mlp.c_proj.bias", 1, 0, 0 },
};

uint32_t gpt_units(const struct gpt_shape *shape)
{
    return shape->layers + 2;
}

uint32_t gpt_tensors(const struct gpt_shape *shape)
{
    return EMBED_TENSORS + shape->layers * BLOCK_TENSORS + HEAD_TENSORS;
}

static void tensor_finish(struct gpt_tensor *t)
{
    t->elems = t->dims[0] * (t->dims[1] > 0 ? t->dims[1] : 1);
}

static void tensor_embed(const struct gpt_shape *shape, uint32_t index, struct gpt_tensor *t)
{
    snprintf(t->name, sizeof t->name, "%s.weight", index == EMBED_WTE ? "wte" : "wpe");
    t->dims[0] = index == EMBED_WTE ? GPT_VOCAB : shape->seq;
    t->dims[1] = shape->dim;
    t->init_std = 0.02;
}

/* GPT-2's initialisation: 0.02, and for what is added to the residual stream 0.02 / sqrt(2 L),
 * so that the stream's variance does not grow with depth. */
static void tensor_block(const struct gpt_shape *shape, uint32_t layer, uint32_t index,
                         struct gpt_tensor *t)
{
    const struct block_row *row = &block_rows[index];
    snprintf(t->name, sizeof t->name, "h.%u.%s", layer, row->name);
    t->dims[0] = (uint64_t)row->rows * shape->dim;
    t->dims[1] = (uint64_t)row->cols * shape->dim;
    if (row->cols == 0)
        t->init_const = row->init;
    else
        t->init_std = row->init > 0 ? 0.02 / sqrt(2.0 * shape->layers) : 0.02;
}

static void tensor_head(const struct gpt_shape *shape, uint32_t index, struct gpt_tensor *t)
{
    snprintf(t->name, sizeof t->name, "ln_f.%s", index == HEAD_LN_W ? "weight" : "bias");
    t->dims[0] = shape->dim;
    t->init_const = index == HEAD_LN_W ? 1 : 0;
}

void gpt_tensor_at(const struct gpt_shape *shape, uint32_t index, struct gpt_tensor *ret_tensor)
{
    struct gpt_tensor t = { .index = index, .unit = GPT_UNIT_EMBED };
    if (index < EMBED_TENSORS) {
        tensor_embed(shape, index, &t);
    } else if (index - EMBED_TENSORS < shape->layers * BLOCK_TENSORS) {
        const uint32_t layer = (index - EMBED_TENSORS) / BLOCK_TENSORS;
        t.index = (index - EMBED_TENSORS) % BLOCK_TENSORS;
        t.unit = 1 + layer;
        tensor_block(shape, layer, t.index, &t);
    } else {
        t.index = index - EMBED_TENSORS - shape->layers * BLOCK_TENSORS;
        t.unit = 1 + shape->layers;
        tensor_head(shape, t.index, &t);
    }
    tensor_finish(&t);
    *ret_tensor = t;
}

uint64_t gpt_parameters(const struct gpt_shape *shape)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(shape, i, &t);
        sum += t.elems;
    }
    return sum;
}

static int check_range(const char *what, uint32_t value, uint32_t max, struct shd_err *e)
{
    if (value >= 1 && value <= max)
        return SHD_OK;
    return fail(e, SHD_ERANGE, "%s is %u, limits are 1 to %u", what, value, max);
}

int gpt_shape_check(const struct gpt_shape *shape, struct shd_err *e)
{
    int r = check_range("layers", shape->layers, GPT_LAYERS_MAX, e);
    if (r == SHD_OK)
        r = check_range("dim", shape->dim, GPT_DIM_MAX, e);
    if (r == SHD_OK)
        r = check_range("heads", shape->heads, shape->dim, e);
    if (r == SHD_OK)
        r = check_range("seq", shape->seq, GPT_SEQ_MAX, e);
    if (r == SHD_OK && shape->dim % shape->heads != 0)
        r = fail(e, SHD_ERANGE, "dim %u is not a multiple of heads %u", shape->dim, shape->heads);
    return r;
}

/* Where a tensor's offset goes, and which unit's size follows it. */
static uint64_t *layout_slot(const struct gpt_shape *shape, struct gpt_layout *layout,
                             const struct gpt_tensor *t, uint64_t **ret_elems)
{
    if (t->unit == GPT_UNIT_EMBED) {
        *ret_elems = &layout->embed_elems;
        return &layout->embed[t->index];
    }
    if (t->unit <= shape->layers) {
        *ret_elems = &layout->block_elems;
        return &layout->block[t->index];
    }
    *ret_elems = &layout->head_elems;
    return &layout->head[t->index];
}

static uint64_t align_up(uint64_t elems)
{
    return (elems + GPT_ALIGN_ELEMS - 1) / GPT_ALIGN_ELEMS * GPT_ALIGN_ELEMS;
}

void gpt_layout_compute(const struct gpt_shape *shape, struct gpt_layout *ret_layout)
{
    struct gpt_layout layout = { .embed_elems = 0 };
    for (uint32_t i = 0; i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(shape, i, &t);
        if (t.unit > 1 && t.unit <= shape->layers)
            continue; /* as the first block */
        uint64_t *elems;
        uint64_t *offset = layout_slot(shape, &layout, &t, &elems);
        *offset = *elems;
        *elems = align_up(*offset + t.elems);
    }
    *ret_layout = layout;
}

int gpt_layout_load(const struct gpt_shape *shape, const shd_model *m,
                    struct gpt_layout *ret_layout, struct shd_err *e)
{
    struct gpt_layout layout = { .embed_elems = 0 };
    for (uint32_t i = 0; i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        struct shd_tensor at;
        gpt_tensor_at(shape, i, &t);
        const int r = shd_tensor_find(m, t.name, &at, e);
        if (r != SHD_OK)
            return r;
        uint64_t *elems;
        uint64_t *offset = layout_slot(shape, &layout, &t, &elems);
        if (at.unit != t.unit || at.elems != t.elems)
            return fail(e, SHD_ESPEC, "tensor %s is %ju elements of unit %u, expected %ju of %u",
                        t.name, (uintmax_t)at.elems, at.unit, (uintmax_t)t.elems, t.unit);
        if (t.unit > 1 && t.unit <= shape->layers && *offset != at.offset_elems)
            return fail(e, SHD_ESPEC, "tensor %s is at element %ju, in block 0 it is at %ju",
                        t.name, (uintmax_t)at.offset_elems, (uintmax_t)*offset);
        *offset = at.offset_elems;
        if (*elems < align_up(at.offset_elems + at.elems))
            *elems = align_up(at.offset_elems + at.elems);
    }
    *ret_layout = layout;
    return SHD_OK;
}

static json_t *spec_optimizer(const char *kind)
{
    if (strcmp(kind, "sgd") == 0)
        return json_pack("{s:s, s:f}", "kind", kind, "momentum", 0.9);
    if (strcmp(kind, "lion") == 0)
        return json_pack("{s:s, s:f, s:f}", "kind", kind, "beta1", 0.9, "beta2", 0.99);
    return json_pack("{s:s, s:f, s:f, s:f}", "kind", kind, "beta1", 0.9, "beta2", 0.95, "eps",
                     1e-8);
}

static json_t *spec_tensor(const struct gpt_tensor *t)
{
    if (t->dims[1] == 0)
        return json_pack("{s:s, s:[I], s:s, s:[s, f]}", "name", t->name, "shape",
                         (json_int_t)t->dims[0], "group", "plain", "init", "const", t->init_const);
    return json_pack("{s:s, s:[I, I], s:s, s:[s, f, f]}", "name", t->name, "shape",
                     (json_int_t)t->dims[0], (json_int_t)t->dims[1], "group", "decay", "init",
                     "normal", 0.0, t->init_std);
}

static json_t *spec_unit(const struct gpt_shape *shape, uint32_t unit)
{
    if (unit == GPT_UNIT_EMBED)
        return json_pack("{s:s, s:[]}", "name", "embed", "tensors");
    if (unit > shape->layers)
        return json_pack("{s:s, s:[s], s:[]}", "name", "head", "uses", "embed", "tensors");
    char name[16];
    snprintf(name, sizeof name, "h.%u", unit - 1);
    return json_pack("{s:s, s:[]}", "name", name, "tensors");
}

static json_t *spec_units(const struct gpt_shape *shape)
{
    json_t *units = json_array();
    for (uint32_t u = 0; units != NULL && u < gpt_units(shape); u++)
        if (json_array_append_new(units, spec_unit(shape, u)) != 0)
            goto no_memory;
    for (uint32_t i = 0; units != NULL && i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(shape, i, &t);
        json_t *tensors = json_object_get(json_array_get(units, t.unit), "tensors");
        if (json_array_append_new(tensors, spec_tensor(&t)) != 0)
            goto no_memory;
    }
    return units;
no_memory:
    json_decref(units);
    return NULL;
}

char *gpt_spec_json(const struct gpt_shape *shape, const struct gpt_spec *spec)
{
    /* "o" takes the reference over, also of NULL, which makes json_pack() fail. */
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:s, s:o, s:[{s:s, s:f}, {s:s, s:f}], s:o}", "name", "gpt", "seed",
        (json_int_t)spec->seed, "micro_batches", (json_int_t)spec->micro_batches, "publish", "f32",
        "optimizer", spec_optimizer(spec->optimizer), "groups", "name", "decay", "weight_decay",
        spec->weight_decay, "name", "plain", "weight_decay", 0.0, "units", spec_units(shape));
    if (root == NULL)
        return NULL;
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    return text;
}
