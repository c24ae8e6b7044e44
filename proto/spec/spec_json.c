/* See spec_json.h. Parsing goes top down; values are read by the getters of spec_node.h. */
#include "proto/spec/spec_json.h"

#include <float.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_node.h"
#include "proto/spec/spec_optimizer.h"

struct parser {
    struct spec *spec;                /* owned until handed out */
    json_t *groups, *units, *tensors; /* owned dictionaries: name -> index */
    struct shd_err *e;
};

/* -- Groups -------------------------------------------------------------------- */

static int parse_group(struct parser *p, const struct node *n, uint32_t index)
{
    static const char *const known[] = { "name", "lr_scale", "weight_decay", "idle", "optimizer" };
    static const struct node_range range = { 0, FLT_MAX };
    struct spec_group *g = &p->spec->groups[index];
    int r = node_object(n, known, ARRAY_SIZE(known), p->e);
    if (r != SHD_OK)
        return r;
    const struct node name = node_field(n, "name");
    r = node_unique(&name, "group", p->groups, index, &g->name, p->e);
    g->lr_scale = 1;
    const struct node lr_scale = node_field(n, "lr_scale");
    if (r == SHD_OK && lr_scale.json != NULL)
        r = node_real(&lr_scale, range, &g->lr_scale, p->e);
    const struct node decay = node_field(n, "weight_decay");
    if (r == SHD_OK && decay.json != NULL)
        r = node_real(&decay, range, &g->weight_decay, p->e);
    const struct node idle = node_field(n, "idle");
    const char *what = "zero";
    if (r == SHD_OK && idle.json != NULL)
        r = node_text(&idle, &what, p->e);
    g->skips_idle = strcmp(what, "skip") == 0;
    if (r == SHD_OK && !g->skips_idle && strcmp(what, "zero") != 0)
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be zero or skip", idle.path, what);
    return r == SHD_OK ? spec_optimizer_parse_group(g, n, p->e) : r;
}

static int default_group(struct parser *p)
{
    struct spec *s = p->spec;
    s->groups[0].lr_scale = 1;
    s->groups[0].name = sys_strdup("default");
    if (s->groups[0].name == NULL ||
        json_object_set_new(p->groups, "default", json_integer(0)) != 0)
        return node_no_memory(p->e);
    return SHD_OK;
}

static int parse_groups(struct parser *p, const struct node *n)
{
    struct spec *s = p->spec;
    uint32_t count = 1;
    int r = n->json != NULL ? node_array(n, 1, SHD_GROUPS_MAX, &count, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    s->groups = sys_calloc(count, sizeof *s->groups);
    if (s->groups == NULL)
        return node_no_memory(p->e);
    s->group_count = count;
    if (n->json == NULL)
        return default_group(p);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        const struct node item = node_item(n, i);
        r = parse_group(p, &item, i);
    }
    return r;
}

/* -- Tensors --------------------------------------------------------------------------------- */

static int parse_shape(struct parser *p, const struct node *n, struct spec_tensor *t)
{
    uint32_t rank = 0;
    int r = node_array(n, 0, SPEC_RANK_MAX, &rank, p->e);
    if (r != SHD_OK)
        return r;
    uint64_t elems = 1;
    for (uint32_t i = 0; i < rank; i++) {
        const struct node item = node_item(n, i);
        r = node_u64(&item, 1, SHD_MODEL_ELEMS_MAX, &t->shape[i], p->e);
        if (r != SHD_OK)
            return r;
        if (elems > SHD_MODEL_ELEMS_MAX / t->shape[i])
            return err_set(p->e, SHD_ERANGE,
                           "%s: %" PRIu64 " times %" PRIu64
                           " elements exceed the limit of %" PRIu64,
                           item.path, elems, t->shape[i], SHD_MODEL_ELEMS_MAX);
        elems *= t->shape[i];
    }
    t->rank = rank;
    t->elems = elems;
    return SHD_OK;
}

/* ["normal", mean, std] and its like. */
static int parse_init(struct parser *p, const struct node *n, struct spec_tensor *t)
{
    t->init = SPEC_INIT_CONST;
    if (n->json == NULL)
        return SHD_OK;
    uint32_t count = 0;
    const char *kind = NULL;
    int r = node_array(n, 1, 3, &count, p->e);
    const struct node head = node_item(n, 0), first = node_item(n, 1), second = node_item(n, 2);
    if (r == SHD_OK)
        r = node_text(&head, &kind, p->e);
    if (r != SHD_OK)
        return r;
    int id = 1;
    while (id <= SPEC_INITS && strcmp(kind, spec_init_rows[id].kind) != 0)
        id++;
    if (id > SPEC_INITS)
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be const, normal or uniform",
                       head.path, kind);
    t->init = (enum spec_init)id;
    const uint32_t numbers = spec_init_rows[id].numbers;
    if (count != numbers + 1)
        return err_set(p->e, SHD_ERANGE, "%s: %s takes %" PRIu32 " numbers, has %" PRIu32, n->path,
                       kind, numbers, count - 1);
    r = node_real(&first, (struct node_range){ -FLT_MAX, FLT_MAX }, &t->init_a, p->e);
    if (r != SHD_OK || numbers == 1)
        return r;
    const double min = t->init == SPEC_INIT_NORMAL ? 0 : t->init_a; /* std; high */
    return node_real(&second, (struct node_range){ min, FLT_MAX }, &t->init_b, p->e);
}

static int parse_tensor_group(struct parser *p, const struct node *n, struct spec_tensor *t)
{
    if (n->json != NULL)
        return node_reference(n, "group", p->groups, &t->group, p->e);
    if (p->spec->group_count > 1)
        return err_set(p->e, SHD_EINVAL, "%s is missing, the model has %" PRIu32 " groups", n->path,
                       p->spec->group_count);
    t->group = 0;
    return SHD_OK;
}

static int parse_tensor(struct parser *p, const struct node *n, uint32_t index)
{
    static const char *const known[] = { "name", "shape", "group", "init", "trainable" };
    struct spec_tensor *t = &p->spec->tensors[index];
    int r = node_object(n, known, ARRAY_SIZE(known), p->e);
    if (r != SHD_OK)
        return r;
    const struct node name = node_field(n, "name"), shape = node_field(n, "shape");
    const struct node group = node_field(n, "group"), init = node_field(n, "init");
    const struct node trainable = node_field(n, "trainable");
    r = node_unique(&name, "tensor", p->tensors, index, &t->name, p->e);
    if (r == SHD_OK)
        r = parse_shape(p, &shape, t);
    if (r == SHD_OK)
        r = parse_tensor_group(p, &group, t);
    if (r == SHD_OK)
        r = parse_init(p, &init, t);
    t->trainable = true;
    if (r == SHD_OK && trainable.json != NULL)
        r = node_bool(&trainable, &t->trainable, p->e);
    return r;
}

/* -- Units ----------------------------------------------------------------------------------- */

static int too_many_elems(const struct node *n, uint64_t elems, struct shd_err *e)
{
    return err_set(e, SHD_ERANGE,
                   "%s: the model reaches %" PRIu64 " elements with padding, the limit is %" PRIu64,
                   n->path, elems, SHD_MODEL_ELEMS_MAX);
}

/* A unit has a gradient as a whole or none at all, of all micro-batches and of each. */
static int check_trainable(struct parser *p, const struct node *n, const struct spec_unit *u,
                           const struct spec_tensor *t)
{
    const struct spec_tensor *first = &p->spec->tensors[u->first_tensor];
    const struct spec_group *group = &p->spec->groups[t->group];
    const struct spec_group *first_group = &p->spec->groups[first->group];
    if (group->mean != first_group->mean)
        return err_set(p->e, SHD_EINVAL,
                       "%s: '%.40s' is of group '%.20s', '%.40s' of the same unit of '%.20s', and "
                       "one of them is a mean: give means units of their own",
                       n->path, t->name, group->name, first->name, first_group->name);
    if (group->mean && !t->trainable)
        return err_set(p->e, SHD_EINVAL, "%s: '%.60s' is frozen, and its group '%.60s' is a mean",
                       n->path, t->name, group->name);
    if (group->skips_idle != first_group->skips_idle)
        return err_set(p->e, SHD_EINVAL,
                       "%s: '%.40s' is of group '%.20s', whose idle is \"%s\", '%.40s' of the same "
                       "unit of '%.20s', whose idle is not: give them units of their own",
                       n->path, t->name, group->name, group->skips_idle ? "skip" : "zero",
                       first->name, first_group->name);
    if (t->trainable == first->trainable)
        return SHD_OK;
    return err_set(
        p->e, SHD_EINVAL,
        "%s: '%.60s' is %s, '%.60s' of the same unit is not: give the frozen ones a unit "
        "of their own, and name it in \"uses\"",
        n->path, t->name, t->trainable ? "trainable" : "frozen", first->name);
}

/* Parse the unit's tensors and lay them end to end. *padded is the sum over the units so far. */
static int parse_tensors(struct parser *p, const struct node *n, uint32_t unit, uint64_t *padded)
{
    struct spec *s = p->spec;
    struct spec_unit *u = &s->units[unit];
    const struct node tensors = node_field(n, "tensors");
    uint64_t end = 0;
    for (uint32_t i = 0; i < u->tensor_count; i++) {
        const struct node item = node_item(&tensors, i);
        struct spec_tensor *t = &s->tensors[u->first_tensor + i];
        int r = parse_tensor(p, &item, u->first_tensor + i);
        if (r == SHD_OK)
            r = check_trainable(p, &item, u, t);
        if (r != SHD_OK)
            return r;
        t->unit = unit;
        t->offset_elems = layout_align(end, SHD_TENSOR_ALIGN_ELEMS);
        end = t->offset_elems + t->elems; /* each at most 2^48: no overflow */
        if (*padded + end > SHD_MODEL_ELEMS_MAX)
            return too_many_elems(&item, *padded + end, p->e);
        s->elems += t->elems;
    }
    u->elems = layout_align(end, SHD_BLOCK_ELEMS);
    u->frozen = !s->tensors[u->first_tensor].trainable;
    u->skips_idle = s->groups[s->tensors[u->first_tensor].group].skips_idle;
    u->mean = s->groups[s->tensors[u->first_tensor].group].mean;
    *padded += u->elems;
    return *padded <= SHD_MODEL_ELEMS_MAX ? SHD_OK : too_many_elems(n, *padded, p->e);
}

static int parse_uses(struct parser *p, const struct node *n, uint32_t unit)
{
    struct spec_unit *u = &p->spec->units[unit];
    if (n->json == NULL)
        return SHD_OK;
    uint32_t count = 0;
    int r = node_array(n, 0, SPEC_USES_MAX, &count, p->e);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        const struct node item = node_item(n, i);
        uint32_t used = 0;
        r = node_reference(&item, "unit", p->units, &used, p->e);
        if (r != SHD_OK)
            return r;
        if (used == unit)
            return err_set(p->e, SHD_EINVAL, "%s is '%s', the unit itself", item.path, u->name);
        for (uint32_t k = 0; k < i; k++)
            if (u->uses[k] == used)
                return err_set(p->e, SHD_EINVAL, "%s '%s' is listed twice", item.path,
                               p->spec->units[used].name);
        u->uses[i] = used;
        u->uses_count = i + 1;
    }
    return r;
}

/* Names and tensor counts of all units, and room for the tensors. */
static int parse_unit_heads(struct parser *p, const struct node *n)
{
    static const char *const known[] = { "name", "uses", "tensors" };
    struct spec *s = p->spec;
    uint32_t total = 0;
    for (uint32_t i = 0; i < s->unit_count; i++) {
        const struct node item = node_item(n, i);
        int r = node_object(&item, known, ARRAY_SIZE(known), p->e);
        if (r != SHD_OK)
            return r;
        const struct node name = node_field(&item, "name"), tensors = node_field(&item, "tensors");
        r = node_unique(&name, "unit", p->units, i, &s->units[i].name, p->e);
        if (r == SHD_OK)
            r = node_array(&tensors, 1, SHD_TENSORS_MAX, &s->units[i].tensor_count, p->e);
        if (r == SHD_OK && s->units[i].tensor_count > SHD_TENSORS_MAX - total)
            r = err_set(p->e, SHD_ERANGE,
                        "%s: the model reaches %" PRIu32 " tensors, the limit is %u", tensors.path,
                        total + s->units[i].tensor_count, SHD_TENSORS_MAX);
        if (r != SHD_OK)
            return r;
        s->units[i].first_tensor = total;
        total += s->units[i].tensor_count;
    }
    s->tensors = sys_calloc(total, sizeof *s->tensors);
    if (s->tensors == NULL)
        return node_no_memory(p->e);
    s->tensor_count = total;
    return SHD_OK;
}

static int parse_units(struct parser *p, const struct node *n)
{
    struct spec *s = p->spec;
    uint32_t count = 0;
    int r = node_array(n, 1, SHD_UNITS_MAX, &count, p->e);
    if (r != SHD_OK)
        return r;
    s->units = sys_calloc(count, sizeof *s->units);
    if (s->units == NULL)
        return node_no_memory(p->e);
    s->unit_count = count;
    r = parse_unit_heads(p, n);
    uint64_t padded = 0;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        const struct node item = node_item(n, i);
        const struct node uses = node_field(&item, "uses");
        r = parse_tensors(p, &item, i, &padded);
        if (r == SHD_OK)
            r = parse_uses(p, &uses, i);
    }
    return r;
}

/* -- The document ---------------------------------------------------------------------------- */

static int parse_accumulate(struct parser *p, const struct node *n)
{
    struct spec *s = p->spec;
    uint64_t a = 1;
    const int r = n->json != NULL ? node_u64(n, 1, s->micro_batches, &a, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    if (s->micro_batches % a != 0)
        return err_set(p->e, SHD_EINVAL,
                       "%s is %" PRIu64 ", must divide micro_batches (%" PRIu32 ")", n->path, a,
                       s->micro_batches);
    s->accumulate = (uint32_t)a;
    return SHD_OK;
}

static int check_any_trainable(struct parser *p)
{
    for (uint32_t u = 0; u < p->spec->unit_count; u++)
        if (!p->spec->units[u].frozen && !p->spec->units[u].mean)
            return SHD_OK;
    return err_set(p->e, SHD_EINVAL,
                   "units: every tensor is frozen or a mean, nothing could be trained");
}

/* What micro-batches would add up before they return it is a gradient. */
static int check_accumulate(struct parser *p)
{
    const struct spec *s = p->spec;
    for (uint32_t g = 0; s->accumulate > 1 && g < s->group_count; g++)
        if (s->groups[g].mean)
            return err_set(p->e, SHD_EINVAL,
                           "accumulate is %" PRIu32
                           ", and group '%.60s' is a mean over micro-batches, each of which "
                           "returns its own: leave accumulate 1",
                           s->accumulate, s->groups[g].name);
    return SHD_OK;
}

static int parse_dtype(struct parser *p, const struct node *n, enum shd_dtype *ret_dtype)
{
    const char *name = "f32";
    const int r = n->json != NULL ? node_text(n, &name, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    *ret_dtype = dtype_parse(name);
    if (!dtype_valid(*ret_dtype))
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be f32, bf16 or f16", n->path, name);
    return SHD_OK;
}

static int parse_root(struct parser *p, const struct node *root)
{
    static const char *const known[] = { "name",       "seed",    "micro_batches",
                                         "accumulate", "publish", "grad_dtype",
                                         "optimizer",  "groups",  "units" };
    struct spec *s = p->spec;
    int r = node_object(root, known, ARRAY_SIZE(known), p->e);
    if (r != SHD_OK)
        return r;
    const struct node name = node_field(root, "name"), seed = node_field(root, "seed");
    const struct node micros = node_field(root, "micro_batches");
    const struct node accumulate = node_field(root, "accumulate");
    const struct node publish = node_field(root, "publish"), groups = node_field(root, "groups");
    const struct node grad_dtype = node_field(root, "grad_dtype");
    const struct node optimizer = node_field(root, "optimizer"), units = node_field(root, "units");
    uint64_t micro_batches = 0;
    r = node_name(&name, &s->name, p->e);
    if (r == SHD_OK && seed.json != NULL)
        r = node_u64(&seed, 0, INT64_MAX, &s->seed, p->e);
    if (r == SHD_OK)
        r = node_u64(&micros, 1, SHD_MICROS_MAX, &micro_batches, p->e);
    s->micro_batches = (uint32_t)micro_batches;
    if (r == SHD_OK)
        r = parse_accumulate(p, &accumulate);
    if (r == SHD_OK)
        r = parse_dtype(p, &publish, &s->publish);
    if (r == SHD_OK)
        r = parse_dtype(p, &grad_dtype, &s->grad_dtype);
    if (r == SHD_OK)
        r = spec_optimizer_parse(s, &optimizer, p->e);
    if (r == SHD_OK)
        r = parse_groups(p, &groups);
    if (r == SHD_OK)
        r = parse_units(p, &units);
    if (r == SHD_OK)
        r = check_accumulate(p);
    return r == SHD_OK ? check_any_trainable(p) : r;
}

/* Per tensor: itself, shape and init; per unit: itself, uses and tensors. */
#define CONTAINERS_MAX (4 * (uint64_t)(SHD_TENSORS_MAX + SHD_UNITS_MAX))
/* Per tensor at most 5 fields, 8 sizes, 3 of init; per unit 3 fields and its uses. */
#define COMMAS_MAX (24 * (uint64_t)(SHD_TENSORS_MAX + SHD_UNITS_MAX))

int spec_check_amount(const char *json, size_t bytes, struct shd_err *e)
{
    uint64_t containers = 0, commas = 0;
    bool text = false;
    for (size_t i = 0; i < bytes; i++) {
        if (text) {
            if (json[i] == '\\')
                i++;
            else
                text = json[i] != '"';
            continue;
        }
        text = json[i] == '"';
        containers += json[i] == '{' || json[i] == '[';
        commas += json[i] == ',';
    }
    if (containers > CONTAINERS_MAX)
        return err_set(e, SHD_ERANGE,
                       "JSON has %" PRIu64 " arrays and objects, the limit is %" PRIu64, containers,
                       CONTAINERS_MAX);
    if (commas > COMMAS_MAX)
        return err_set(e, SHD_ERANGE, "JSON has %" PRIu64 " commas, the limit is %" PRIu64, commas,
                       COMMAS_MAX);
    return SHD_OK;
}

static int load(const char *json, size_t bytes, json_t **ret_root, struct shd_err *e)
{
    if (bytes > SPEC_JSON_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "spec has %zu bytes, the limit is %zu", bytes,
                       SPEC_JSON_BYTES_MAX);
    const int amount = spec_check_amount(json, bytes, e);
    if (amount != SHD_OK)
        return amount;
    json_error_t why;
    json_t *root = json_loadb(json, bytes, JSON_REJECT_DUPLICATES, &why);
    if (root != NULL) {
        *ret_root = root;
        return SHD_OK;
    }
    switch (json_error_code(&why)) {
    case json_error_out_of_memory:
        return node_no_memory(e);
    case json_error_numeric_overflow:
        return err_set(e, SHD_ERANGE,
                       "spec line %d column %d: %.100s: integers (seeds too) end at 2^63-1, reals "
                       "must be finite",
                       why.line, why.column, why.text);
    default:
        return err_set(e, SHD_EINVAL, "spec line %d column %d: %s", why.line, why.column, why.text);
    }
}

static int compare_names(const void *a, const void *b, void *tensors)
{
    const struct spec_tensor *t = tensors;
    return strcmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static int sort_names(struct spec *s, struct shd_err *e)
{
    s->by_name = sys_calloc(s->tensor_count, sizeof *s->by_name);
    if (s->by_name == NULL)
        return node_no_memory(e);
    for (uint32_t i = 0; i < s->tensor_count; i++)
        s->by_name[i] = i;
    qsort_r(s->by_name, s->tensor_count, sizeof *s->by_name, compare_names, s->tensors);
    return SHD_OK;
}

int spec_parse(const char *json, size_t bytes, struct spec **ret_spec, struct shd_err *e)
{
    struct node root = { .path = "spec" };
    json_t *document = NULL;
    int r = load(json, bytes, &document, e);
    if (r != SHD_OK)
        return r;
    root.json = document;
    struct parser p = { .spec = sys_calloc(1, sizeof *p.spec),
                        .groups = json_object(),
                        .units = json_object(),
                        .tensors = json_object(),
                        .e = e };
    if (p.spec == NULL || p.groups == NULL || p.units == NULL || p.tensors == NULL)
        r = node_no_memory(e);
    else
        r = parse_root(&p, &root);
    if (r == SHD_OK)
        r = sort_names(p.spec, e);
    if (r == SHD_OK)
        *ret_spec = p.spec;
    else
        spec_free(p.spec);
    json_decref(p.groups);
    json_decref(p.units);
    json_decref(p.tensors);
    json_decref(document);
    return r;
}

/* -- Writing ------------------------------------------------------------------------------------
 *
 * Keys in the order set here, every default spelt out, reals with 17 digits: the same struct gives
 * the same bytes, and parsing them gives the same struct. One default is not spelt out: builds
 * without "grad_dtype" read the specs, and write the checkpoints, of models with fp32 gradients. */

/* json_pack() gives NULL when memory is short, and takes over what it was given all the same; no
 * array or object takes a NULL: one that is missing anywhere makes all of it NULL. */
static json_t *append(json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) == 0)
        return array;
    json_decref(array);
    return NULL;
}

static json_t *groups_json(const struct spec *spec)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < spec->group_count; i++) {
        const struct spec_group *g = &spec->groups[i];
        json_t *o = json_pack("{s:s, s:f, s:f}", "name", g->name, "lr_scale", g->lr_scale,
                              "weight_decay", g->weight_decay);
        if (g->skips_idle) /* as "grad_dtype" */
            o = spec_json_with(o, "idle", json_string("skip"));
        if (g->mean)
            o = spec_json_with(o, "optimizer",
                               json_pack("{s:s}", "kind", spec_optimizer_rows[SPEC_MEAN].kind));
        array = append(array, o);
    }
    return array;
}

static json_t *tensor_json(const struct spec *spec, const struct spec_tensor *t)
{
    const char *kind = spec_init_rows[t->init].kind;
    json_t *shape = json_array();
    for (uint32_t i = 0; i < t->rank; i++)
        shape = append(shape, json_integer((json_int_t)t->shape[i]));
    json_t *init = spec_init_rows[t->init].numbers == 2
                       ? json_pack("[s, f, f]", kind, t->init_a, t->init_b)
                       : json_pack("[s, f]", kind, t->init_a);
    return json_pack("{s:s, s:o, s:s, s:o, s:b}", "name", t->name, "shape", shape, "group",
                     spec->groups[t->group].name, "init", init, "trainable", t->trainable);
}

static json_t *units_json(const struct spec *spec)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < spec->unit_count; i++) {
        const struct spec_unit *u = &spec->units[i];
        json_t *uses = json_array(), *tensors = json_array();
        for (uint32_t k = 0; k < u->uses_count; k++)
            uses = append(uses, json_string(spec->units[u->uses[k]].name));
        for (uint32_t t = 0; t < u->tensor_count; t++)
            tensors = append(tensors, tensor_json(spec, &spec->tensors[u->first_tensor + t]));
        array = append(
            array, json_pack("{s:s, s:o, s:o}", "name", u->name, "uses", uses, "tensors", tensors));
    }
    return array;
}

int spec_dump(const struct spec *spec, char **ret_json, struct shd_err *e)
{
    json_t *root = json_pack(
        "{s:s, s:I, s:I, s:I, s:s, s:o, s:o, s:o}", "name", spec->name, "seed",
        (json_int_t)spec->seed, "micro_batches", (json_int_t)spec->micro_batches, "accumulate",
        (json_int_t)spec->accumulate, "publish", dtype_name(spec->publish), "optimizer",
        spec_optimizer_json(spec), "groups", groups_json(spec), "units", units_json(spec));
    if (spec->grad_dtype != SHD_F32)
        root = spec_json_with(root, "grad_dtype", json_string(dtype_name(spec->grad_dtype)));
    char *text = root != NULL ? json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
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
