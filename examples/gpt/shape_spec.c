/* shape_spec.c: see shape_spec.h. */
#include "examples/gpt/shape_spec.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

static json_t *spec_optimizer(const char *kind)
{
    if (strcmp(kind, "sgd") == 0)
        return json_pack("{s:s, s:f}", "kind", kind, "momentum", 0.9);
    if (strcmp(kind, "lion") == 0)
        return json_pack("{s:s, s:f, s:f}", "kind", kind, "beta1", 0.9, "beta2", 0.99);
    return json_pack("{s:s, s:f, s:f, s:f}", "kind", kind, "beta1", 0.9, "beta2", 0.95, "eps",
                     1e-8);
}

static json_t *spec_init(const struct gpt_tensor *t)
{
    if (t->init_std > 0)
        return json_pack("[s, f, f]", "normal", 0.0, t->init_std);
    return json_pack("[s, f]", "const", t->init_const);
}

static json_t *spec_tensor(const struct gpt_shape *shape, const struct gpt_tensor *t)
{
    const bool vector = t->dims[1] == 0;
    json_t *sizes = vector ? json_pack("[I]", (json_int_t)t->dims[0])
                           : json_pack("[I, I]", (json_int_t)t->dims[0], (json_int_t)t->dims[1]);
    json_t *tensor = json_pack("{s:s, s:o, s:s, s:o}", "name", t->name, "shape", sizes, "group",
                               vector ? "plain" : "decay", "init", spec_init(t));
    if (tensor != NULL && gpt_kind_frozen(shape, t->kind) &&
        json_object_set_new(tensor, "trainable", json_false()) != 0) {
        json_decref(tensor);
        return NULL;
    }
    return tensor;
}

static void spec_unit_name(struct gpt_unit u, char *name, size_t size)
{
    if (u.kind == GPT_EMBED || u.kind == GPT_HEAD)
        snprintf(name, size, "%s", u.kind == GPT_EMBED ? "embed" : "head");
    else if (u.kind == GPT_EXPERT)
        snprintf(name, size, "h.%u.expert.%u", u.layer, u.expert);
    else
        snprintf(name, size, "h.%u%s", u.layer, u.kind == GPT_LORA ? ".lora" : "");
}

static json_t *spec_unit(const struct gpt_shape *shape, uint32_t unit)
{
    char name[32], used[32];
    const uint32_t uses = gpt_unit_uses(shape, unit);
    spec_unit_name(gpt_unit_at(shape, unit), name, sizeof name);
    if (uses == GPT_UNIT_NONE)
        return json_pack("{s:s, s:[]}", "name", name, "tensors");
    spec_unit_name(gpt_unit_at(shape, uses), used, sizeof used);
    return json_pack("{s:s, s:[s], s:[]}", "name", name, "uses", used, "tensors");
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
        if (json_array_append_new(tensors, spec_tensor(shape, &t)) != 0)
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

char *gpt_spec_json(const struct gpt_shape *shape, const struct gpt_spec *spec)
{
    /* "o" takes the reference over, also of NULL, which makes json_pack() fail. */
    json_t *root = json_pack("{s:s, s:I, s:I, s:s, s:o, s:[{s:s, s:f}, {s:s, s:f}], s:o}", "name",
                             "gpt", "seed", (json_int_t)spec->seed, "micro_batches",
                             (json_int_t)spec->micro_batches, "publish", spec_dtype(spec->publish),
                             "optimizer", spec_optimizer(spec->optimizer), "groups", "name",
                             "decay", "weight_decay", spec->weight_decay, "name", "plain",
                             "weight_decay", 0.0, "units", spec_units(shape));
    if (root == NULL)
        return NULL;
    if (spec->accumulate > 1 &&
        json_object_set_new(root, "accumulate", json_integer(spec->accumulate)) != 0) {
        json_decref(root);
        return NULL;
    }
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    return text;
}
