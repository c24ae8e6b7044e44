/* spec_dump(): the canonical JSON. Keys in the order set here, every default spelt out, reals with
 * 17 digits: the same struct gives the same bytes, and parsing them gives the same struct. */
#include "proto/spec/spec_dump.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/spec/spec_tables.h"

/* jansson's setters take ownership of the value even when they fail, and fail on a NULL value:
 * so it is enough to collect whether any failed, which means out of memory. */
struct dump {
    bool failed;
};

static void put(struct dump *d, json_t *object, const char *key, json_t *value)
{
    if (json_object_set_new(object, key, value) != 0)
        d->failed = true;
}

static void append(struct dump *d, json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) != 0)
        d->failed = true;
}

static json_t *integer(uint64_t x)
{
    return json_integer((json_int_t)x);
}

static json_t *optimizer_json(struct dump *d, const struct spec *spec)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[spec->optimizer];
    json_t *o = json_object();
    put(d, o, "kind", json_string(row->kind));
    put(d, o, row->beta1_key, json_real(spec->beta1));
    if (row->beta2_key != NULL)
        put(d, o, row->beta2_key, json_real(spec->beta2));
    if (row->eps_key != NULL)
        put(d, o, row->eps_key, json_real(spec->eps));
    return o;
}

static json_t *groups_json(struct dump *d, const struct spec *spec)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < spec->group_count; i++) {
        json_t *o = json_object();
        put(d, o, "name", json_string(spec->groups[i].name));
        put(d, o, "lr_scale", json_real(spec->groups[i].lr_scale));
        put(d, o, "weight_decay", json_real(spec->groups[i].weight_decay));
        append(d, array, o);
    }
    return array;
}

static json_t *tensor_json(struct dump *d, const struct spec *spec, const struct spec_tensor *t)
{
    json_t *o = json_object();
    put(d, o, "name", json_string(t->name));
    json_t *shape = json_array();
    for (uint32_t i = 0; i < t->rank; i++)
        append(d, shape, integer(t->shape[i]));
    put(d, o, "shape", shape);
    put(d, o, "group", json_string(spec->groups[t->group].name));
    json_t *init = json_array();
    append(d, init, json_string(spec_init_rows[t->init].kind));
    append(d, init, json_real(t->init_a));
    if (spec_init_rows[t->init].numbers == 2)
        append(d, init, json_real(t->init_b));
    put(d, o, "init", init);
    put(d, o, "trainable", json_boolean(t->trainable));
    return o;
}

static json_t *units_json(struct dump *d, const struct spec *spec)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < spec->unit_count; i++) {
        const struct spec_unit *u = &spec->units[i];
        json_t *o = json_object(), *uses = json_array(), *tensors = json_array();
        put(d, o, "name", json_string(u->name));
        for (uint32_t k = 0; k < u->uses_count; k++)
            append(d, uses, json_string(spec->units[u->uses[k]].name));
        put(d, o, "uses", uses);
        for (uint32_t t = 0; t < u->tensor_count; t++)
            append(d, tensors, tensor_json(d, spec, &spec->tensors[u->first_tensor + t]));
        put(d, o, "tensors", tensors);
        append(d, array, o);
    }
    return array;
}

int spec_dump(const struct spec *spec, char **ret_json, struct shd_err *e)
{
    struct dump d = { 0 };
    json_t *root = json_object();
    put(&d, root, "name", json_string(spec->name));
    put(&d, root, "seed", integer(spec->seed));
    put(&d, root, "micro_batches", integer(spec->micro_batches));
    put(&d, root, "accumulate", integer(spec->accumulate));
    put(&d, root, "publish", json_string(dtype_name(spec->publish)));
    put(&d, root, "optimizer", optimizer_json(&d, spec));
    put(&d, root, "groups", groups_json(&d, spec));
    put(&d, root, "units", units_json(&d, spec));
    char *text = d.failed ? NULL : json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "write the spec of model '%s'", spec->name);
    const size_t bytes = strlen(text);
    if (bytes > SPEC_JSON_BYTES_MAX) {
        free(text);
        return err_set(e, SHD_ERANGE,
                       "canonical spec of model '%s' has %zu bytes, the limit is %zu", spec->name,
                       bytes, SPEC_JSON_BYTES_MAX);
    }
    *ret_json = text;
    return SHD_OK;
}
