/* See spec_json.h. Parsing goes top down; values are read by the getters of spec_node.h. */
#include "proto/spec/spec_json.h"

#include <float.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_guard.h"
#include "proto/spec/spec_muon.h"
#include "proto/spec/spec_node.h"
#include "proto/spec/spec_optimizer.h"
#include "proto/spec/spec_ramp.h"
#include "proto/spec/spec_tiles.h"
#include "proto/spec/spec_write.h"

struct written {           /* a unit as the JSON has it */
    char *name;            /* owned */
    uint32_t first, tiles; /* of its units; tiles 0: one, which is not cut */
};

struct parser {
    struct spec *spec;       /* owned until handed out */
    struct written *written; /* owned, [written_count] */
    bool named;              /* names of units that are not cut are the spec's */
    uint32_t written_count;
    uint32_t *by_name; /* owned: their indices in order of names; NULL: not all known yet */
    struct shd_err *e;
};

/* -- Names ------------------------------------------------------------------------------------ */

_Static_assert(offsetof(struct spec_tensor, name) == 0 && offsetof(struct written, name) == 0,
               "a name is the first of what it names");

struct names { /* of units as they are written, or tensors */
    const void *items;
    size_t item_bytes;
    uint32_t count;
};

static const char *name_of(const struct names *names, uint32_t index)
{
    return *(char *const *)((const char *)names->items + index * names->item_bytes);
}

static int compare_names(const void *a, const void *b, void *names)
{
    const uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    const int order = strcmp(name_of(names, i), name_of(names, k));
    return order != 0 ? order : (i > k) - (i < k);
}

/* Their indices in order of names. *ret_twice: the first whose name an earlier one has, which is
 * *ret_of; or UINT32_MAX. */
static int sort_names(struct names names, uint32_t **ret_order, uint32_t *ret_twice,
                      uint32_t *ret_of, struct shd_err *e)
{
    uint32_t *order = sys_calloc(names.count, sizeof *order);
    if (order == NULL)
        return node_no_memory(e);
    for (uint32_t i = 0; i < names.count; i++)
        order[i] = i;
    qsort_r(order, names.count, sizeof *order, compare_names, &names);
    *ret_twice = UINT32_MAX;
    for (uint32_t i = 1; i < names.count; i++)
        if (order[i] < *ret_twice &&
            strcmp(name_of(&names, order[i - 1]), name_of(&names, order[i])) == 0) {
            *ret_twice = order[i];
            *ret_of = order[i - 1];
        }
    *ret_order = order;
    return SHD_OK;
}

static int named_twice(const struct node *name, const char *what, uint32_t other, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "%s '%.60s' is the name of %s %" PRIu32 " too",
                   node_path(name).text, name->json->at, what, other);
}

static int no_such(const struct node *n, const char *what, const char *name, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "%s is '%.60s', there is no such %s", node_path(n).text, name,
                   what);
}

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
    r = node_name(&name, &g->name, p->e);
    for (uint32_t i = 0; r == SHD_OK && i < index; i++)
        if (strcmp(p->spec->groups[i].name, g->name) == 0)
            return named_twice(&name, "group", i, p->e);
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
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be zero or skip",
                       node_path(&idle).text, what);
    return r == SHD_OK ? spec_optimizer_parse_group(p->spec, g, n, p->e) : r;
}

static int default_group(struct parser *p)
{
    struct spec *s = p->spec;
    s->groups[0].lr_scale = 1;
    s->groups[0].name = sys_strdup("default");
    return s->groups[0].name != NULL ? SHD_OK : node_no_memory(p->e);
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
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++, item = node_next(&item))
        r = parse_group(p, &item, i);
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
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; i < rank; i++, item = node_next(&item)) {
        r = node_u64(&item, 1, SHD_MODEL_ELEMS_MAX, &t->shape[i], p->e);
        if (r != SHD_OK)
            return r;
        if (elems > SHD_MODEL_ELEMS_MAX / t->shape[i])
            return err_set(p->e, SHD_ERANGE,
                           "%s: %" PRIu64 " times %" PRIu64
                           " elements exceed the limit of %" PRIu64,
                           node_path(&item).text, elems, t->shape[i], SHD_MODEL_ELEMS_MAX);
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
                       node_path(&head).text, kind);
    t->init = (enum spec_init)id;
    const uint32_t numbers = spec_init_rows[id].numbers;
    if (count != numbers + 1)
        return err_set(p->e, SHD_ERANGE, "%s: %s takes %" PRIu32 " numbers, has %" PRIu32,
                       node_path(n).text, kind, numbers, count - 1);
    r = node_real(&first, (struct node_range){ -FLT_MAX, FLT_MAX }, &t->init_a, p->e);
    if (r != SHD_OK || numbers == 1)
        return r;
    const double min = t->init == SPEC_INIT_NORMAL ? 0 : t->init_a; /* std; high */
    return node_real(&second, (struct node_range){ min, FLT_MAX }, &t->init_b, p->e);
}

static int parse_tensor_group(struct parser *p, const struct node *n, struct spec_tensor *t)
{
    const char *name = NULL;
    const int r = n->json != NULL ? node_text(n, &name, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    for (uint32_t g = 0; name != NULL && g < p->spec->group_count; g++)
        if (strcmp(p->spec->groups[g].name, name) == 0) {
            t->group = g;
            return SHD_OK;
        }
    if (name != NULL)
        return no_such(n, "group", name, p->e);
    if (p->spec->group_count > 1)
        return err_set(p->e, SHD_EINVAL, "%s is missing, the model has %" PRIu32 " groups",
                       node_path(n).text, p->spec->group_count);
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
    r = node_name(&name, &t->name, p->e);
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
                   node_path(n).text, elems, SHD_MODEL_ELEMS_MAX);
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
                       node_path(n).text, t->name, group->name, first->name, first_group->name);
    if (group->mean && !t->trainable)
        return err_set(p->e, SHD_EINVAL, "%s: '%.60s' is frozen, and its group '%.60s' is a mean",
                       node_path(n).text, t->name, group->name);
    if ((group->adafactor != NULL) != (first_group->adafactor != NULL))
        return err_set(p->e, SHD_EINVAL,
                       "%s: '%.40s' is of group '%.20s', '%.40s' of the same unit of '%.20s', and "
                       "the optimizer of one of them is adafactor: give them units of their own",
                       node_path(n).text, t->name, group->name, first->name, first_group->name);
    if (group->skips_idle != first_group->skips_idle)
        return err_set(p->e, SHD_EINVAL,
                       "%s: '%.40s' is of group '%.20s', whose idle is \"%s\", '%.40s' of the same "
                       "unit of '%.20s', whose idle is not: give them units of their own",
                       node_path(n).text, t->name, group->name, group->skips_idle ? "skip" : "zero",
                       first->name, first_group->name);
    if (t->trainable == first->trainable)
        return SHD_OK;
    return err_set(
        p->e, SHD_EINVAL,
        "%s: '%.60s' is %s, '%.60s' of the same unit is not: give the frozen ones a unit "
        "of their own, and name it in \"uses\"",
        node_path(n).text, t->name, t->trainable ? "trainable" : "frozen", first->name);
}

/* Parse the unit's tensors and lay them end to end. *padded is the sum over the units so far. */
static int parse_tensors(struct parser *p, const struct node *n, uint32_t unit, uint64_t *padded)
{
    struct spec *s = p->spec;
    struct spec_unit *u = &s->units[unit];
    const struct node tensors = node_field(n, "tensors");
    uint64_t end = 0;
    const bool adafactor = spec_adafactor_has(s, n);
    const uint32_t count = u->tensor_count - adafactor;
    struct node item = node_item(&tensors, 0);
    for (uint32_t i = 0; i < count; i++, item = node_next(&item)) {
        struct spec_tensor *t = &s->tensors[u->first_tensor + i];
        int r = parse_tensor(p, &item, u->first_tensor + i);
        if (r == SHD_OK && u->tiles > 0)
            r = spec_tile_cut(s, u, &item, t, p->e);
        if (r == SHD_OK)
            r = check_trainable(p, &item, u, t);
        if (r != SHD_OK)
            return r;
        t->unit = unit;
        t->offset_elems = layout_align(end, spec_tensor_align(s));
        end = t->offset_elems + t->elems; /* each at most 2^48: no overflow */
        if (*padded + end > SHD_MODEL_ELEMS_MAX)
            return too_many_elems(&item, *padded + end, p->e);
        s->elems += t->elems;
    }
    int r = adafactor ? spec_adafactor_add(s, unit, n, end, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    if (adafactor) {
        const struct spec_tensor *statistics = &s->tensors[u->first_tensor + count];
        end = statistics->offset_elems + statistics->elems; /* of each twice as many at most */
    }
    u->elems = layout_align(end, SHD_BLOCK_ELEMS);
    u->frozen = !s->tensors[u->first_tensor].trainable;
    s->trained_units += !u->frozen;
    u->skips_idle = s->groups[s->tensors[u->first_tensor].group].skips_idle;
    u->mean = s->groups[s->tensors[u->first_tensor].group].mean;
    r = spec_place_parse(s, unit, n, p->e);
    if (r != SHD_OK)
        return r;
    *padded += u->elems;
    return *padded <= SHD_MODEL_ELEMS_MAX ? SHD_OK : too_many_elems(n, *padded, p->e);
}

/* The unit that n names; all of them are known. */
static int find_unit(const struct parser *p, const struct node *n, const struct written **ret_unit)
{
    const char *name = NULL;
    uint32_t first = 0, end = p->written_count;
    const int r = node_text(n, &name, p->e);
    CHECK(end == 0 || p->by_name != NULL);
    while (r == SHD_OK && first < end) {
        const uint32_t middle = first + (end - first) / 2, index = p->by_name[middle];
        const int order = strcmp(name, p->written[index].name);
        if (order == 0) {
            *ret_unit = &p->written[index];
            return SHD_OK;
        }
        if (order < 0)
            end = middle;
        else
            first = middle + 1;
    }
    return r == SHD_OK ? no_such(n, "unit", name, p->e) : r;
}

/* A unit that is cut is used with all its tiles. */
static int add_used(struct parser *p, const struct node *n, struct spec_unit *u,
                    const struct written *used)
{
    const uint32_t tiles = used->tiles > 0 ? used->tiles : 1;
    for (uint32_t k = 0; k < u->uses_count; k++)
        if (u->uses[k] == used->first)
            return err_set(p->e, SHD_EINVAL, "%s '%s' is listed twice", node_path(n).text,
                           used->name);
    if (tiles > SPEC_USES_MAX - u->uses_count)
        return err_set(p->e, SHD_ERANGE,
                       "%s is '%s', which is cut into %" PRIu32
                       " tiles: the unit would use %" PRIu32 ", at most %u",
                       node_path(n).text, used->name, tiles, u->uses_count + tiles, SPEC_USES_MAX);
    for (uint32_t k = 0; k < tiles; k++)
        u->uses[u->uses_count++] = used->first + k;
    return SHD_OK;
}

static int parse_uses(struct parser *p, const struct node *n, uint32_t unit)
{
    struct spec_unit *u = &p->spec->units[unit];
    if (n->json == NULL)
        return SHD_OK;
    uint32_t count = 0;
    int r = node_array(n, 0, SPEC_USES_MAX, &count, p->e);
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++, item = node_next(&item)) {
        const struct written *used = NULL;
        r = find_unit(p, &item, &used);
        if (r != SHD_OK)
            return r;
        CHECK(used != NULL);
        if (used->first == unit - u->tile)
            return err_set(p->e, SHD_EINVAL, "%s is '%s', the unit itself", node_path(&item).text,
                           used->name);
        r = add_used(p, &item, u, used);
    }
    return r;
}

static int parse_unit_names(struct parser *p, const struct node *n)
{
    static const char *const known[] = { "name", "uses", "place", "tensors", "tiles" };
    uint32_t twice = UINT32_MAX, of = 0, units = 0;
    int r = SHD_OK;
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < p->written_count; i++, item = node_next(&item)) {
        const struct node name = node_field(&item, "name");
        struct written *w = &p->written[i];
        r = node_object(&item, known, ARRAY_SIZE(known), p->e);
        if (r == SHD_OK)
            r = node_name(&name, &w->name, p->e);
        if (r == SHD_OK)
            r = spec_tiles_parse(p->spec, &item, &w->tiles, p->e);
        const uint32_t more = w->tiles > 0 ? w->tiles : 1;
        if (r == SHD_OK && more > SHD_UNITS_MAX - units)
            r = err_set(p->e, SHD_ERANGE,
                        "%s: the model reaches %" PRIu32 " units with its tiles, the limit is %u",
                        node_path(&item).text, units + more, SHD_UNITS_MAX);
        w->first = units;
        units += more;
    }
    if (r == SHD_OK)
        r = sort_names((struct names){ p->written, sizeof *p->written, p->written_count },
                       &p->by_name, &twice, &of, p->e);
    if (r == SHD_OK && twice == UINT32_MAX)
        p->spec->unit_count = units;
    if (r != SHD_OK || twice == UINT32_MAX)
        return r;
    item = node_item(n, twice);
    const struct node name = node_field(&item, "name");
    return named_twice(&name, "unit", of, p->e);
}

/* Each with its name and what it is a tile of. */
static int make_units(struct parser *p, const struct node *n)
{
    struct spec *s = p->spec;
    s->units = sys_calloc(s->unit_count, sizeof *s->units);
    if (s->units == NULL)
        return node_no_memory(p->e);
    int r = SHD_OK;
    p->named = true;
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; i < p->written_count; i++, item = node_next(&item)) {
        const struct written *w = &p->written[i];
        struct spec_unit *u = &s->units[w->first];
        const struct node name = node_field(&item, "name");
        if (w->tiles == 0)
            u->name = w->name; /* whose owner it is now */
        for (uint32_t k = 0; r == SHD_OK && k < w->tiles; k++) {
            u[k].tile = k;
            u[k].tiles = w->tiles;
            r = spec_tile_name(w->name, k, &name, &u[k].name, p->e);
        }
    }
    return r;
}

/* Tensor counts of a unit as it is written. *total is the sum over the units so far. */
static int count_unit(struct parser *p, const struct node *item, const struct written *w,
                      uint32_t *total)
{
    struct spec *s = p->spec;
    const struct node tensors = node_field(item, "tensors");
    uint32_t count = 0;
    const int r = node_array(&tensors, 1, SHD_TENSORS_MAX, &count, p->e);
    if (r != SHD_OK)
        return r;
    const uint64_t all = (uint64_t)count * (w->tiles > 0 ? w->tiles : 1);
    if (all > SHD_TENSORS_MAX - *total)
        return err_set(p->e, SHD_ERANGE,
                       "%s: the model reaches %" PRIu64 " tensors, the limit is %u",
                       node_path(&tensors).text, *total + all, SHD_TENSORS_MAX);
    count += spec_adafactor_has(s, item);
    for (uint32_t k = 0; k < (w->tiles > 0 ? w->tiles : 1); k++) {
        s->units[w->first + k].tensor_count = count;
        s->units[w->first + k].first_tensor = *total;
        *total += count;
    }
    return SHD_OK;
}

/* Tensor counts of all units, and room for the tensors. */
static int count_tensors(struct parser *p, const struct node *n)
{
    struct spec *s = p->spec;
    uint32_t total = 0;
    int r = SHD_OK;
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < p->written_count; i++, item = node_next(&item))
        r = count_unit(p, &item, &p->written[i], &total);
    if (r != SHD_OK)
        return r;
    s->tensors = sys_calloc(total, sizeof *s->tensors);
    if (s->tensors == NULL)
        return node_no_memory(p->e);
    s->tensor_count = total;
    return SHD_OK;
}

/* Its place in the JSON, of which nodes are borrowed. */
struct tensor_node {
    struct node unit, tensors, tensor;
};

static void find_tensor(const struct parser *p, const struct node *units, uint32_t tensor,
                        struct tensor_node *ret_node)
{
    const uint32_t unit = p->spec->tensors[tensor].unit;
    uint32_t i = 0;
    while (i + 1 < p->written_count && p->written[i + 1].first <= unit)
        i++;
    ret_node->unit = node_item(units, i);
    ret_node->tensors = node_field(&ret_node->unit, "tensors");
    ret_node->tensor = node_item(&ret_node->tensors, tensor - p->spec->units[unit].first_tensor);
}

/* No tensor has the name of one that is cut. */
static int check_cut_names(const struct parser *p, const struct node *units)
{
    const struct spec *s = p->spec;
    for (uint32_t t = 0; t < s->tensor_count; t++) {
        const struct spec_tensor *cut = &s->tensors[t];
        uint32_t other = 0;
        if (cut->of == NULL || !spec_whole_begins(cut) || !spec_find_tensor(s, cut->of, &other))
            continue;
        struct tensor_node found;
        find_tensor(p, units, t, &found);
        const struct node name = node_field(&found.tensor, "name");
        return named_twice(&name, "tensor", other, p->e);
    }
    return SHD_OK;
}

/* Their order, in which they are found later. */
static int check_tensor_names(struct parser *p, const struct node *units)
{
    struct spec *s = p->spec;
    uint32_t twice = UINT32_MAX, of = 0;
    const int r = sort_names((struct names){ s->tensors, sizeof *s->tensors, s->tensor_count },
                             &s->by_name, &twice, &of, p->e);
    if (r != SHD_OK || twice == UINT32_MAX)
        return r == SHD_OK ? check_cut_names(p, units) : r;
    struct tensor_node found;
    find_tensor(p, units, twice, &found);
    if (s->tensors[twice].statistics)
        return err_set(p->e, SHD_EINVAL,
                       "%s: Adafactor's statistics are called '%.60s', which is the name of tensor "
                       "%" PRIu32 " too",
                       node_path(&found.unit).text, s->tensors[twice].name, of);
    const struct node name = node_field(&found.tensor, "name");
    return named_twice(&name, "tensor", of, p->e);
}

static int parse_unit(struct parser *p, const struct node *item, const struct written *w,
                      uint64_t *padded)
{
    const struct node uses = node_field(item, "uses");
    int r = SHD_OK;
    for (uint32_t k = 0; r == SHD_OK && k < (w->tiles > 0 ? w->tiles : 1); k++) {
        r = parse_tensors(p, item, w->first + k, padded);
        if (r == SHD_OK)
            r = parse_uses(p, &uses, w->first + k);
    }
    return r;
}

static int parse_units(struct parser *p, const struct node *n)
{
    uint32_t count = 0;
    int r = node_array(n, 1, SHD_UNITS_MAX, &count, p->e);
    if (r != SHD_OK)
        return r;
    p->written = sys_calloc(count, sizeof *p->written);
    if (p->written == NULL)
        return node_no_memory(p->e);
    p->written_count = count;
    r = parse_unit_names(p, n);
    if (r == SHD_OK)
        r = make_units(p, n);
    if (r == SHD_OK)
        r = count_tensors(p, n);
    uint64_t padded = 0;
    struct node item = node_item(n, 0);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++, item = node_next(&item))
        r = parse_unit(p, &item, &p->written[i], &padded);
    return r == SHD_OK ? check_tensor_names(p, n) : r;
}

/* -- The document ---------------------------------------------------------------------------- */

static int parse_accumulate(struct parser *p, const struct node *n)
{
    struct spec *s = p->spec;
    uint64_t a = 1;
    const int r = n->json != NULL ? node_u64(n, 1, s->micro_batches, &a, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    s->accumulate = (uint32_t)a;
    return spec_ramp_check(s, n, a, p->e);
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
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be f32, bf16 or f16",
                       node_path(n).text, name);
    return SHD_OK;
}

static int parse_codec(struct parser *p, const struct node *root)
{
    const struct node n = node_field(root, "codec");
    const char *name = codec_name(CODEC_NONE);
    const int r = n.json != NULL ? node_text(&n, &name, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    const int codec = codec_parse(name);
    if (codec < 0)
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be none, int8, fp8 or int4",
                       node_path(&n).text, name);
    p->spec->codec = (enum codec)codec;
    return SHD_OK;
}

/* Of a step's many gradients each is rounded at random: those of fp8 and int4 are not unbiased, or
 * too far apart. */
static int parse_grad_codec(struct parser *p, const struct node *root)
{
    const struct node n = node_field(root, "grad_codec");
    const char *name = codec_name(CODEC_NONE);
    const int r = n.json != NULL ? node_text(&n, &name, p->e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    const int codec = codec_parse(name);
    if (codec != CODEC_NONE && codec != CODEC_INT8)
        return err_set(p->e, SHD_EINVAL, "%s is '%.40s', must be none or int8", node_path(&n).text,
                       name);
    p->spec->grad_codec = (enum codec)codec;
    return SHD_OK;
}

static int parse_ema(struct parser *p, const struct node *root)
{
    const struct node decay = node_field(root, "ema"), warmup = node_field(root, "ema_warmup");
    struct spec *s = p->spec;
    int r = SHD_OK;
    if (decay.json != NULL)
        r = node_real(&decay, (struct node_range){ FLT_MIN, SPEC_BETA_MAX }, &s->ema, p->e);
    if (r == SHD_OK && warmup.json != NULL)
        r = node_bool(&warmup, &s->ema_warmup, p->e);
    if (r == SHD_OK && s->ema_warmup && s->ema == 0)
        r = err_set(p->e, SHD_EINVAL, "%s is true, and there is no ema", node_path(&warmup).text);
    return r;
}

/* Owners keep a sum for each gradient of a step. */
static int parse_audit(struct parser *p, const struct node *root)
{
    const struct node audit = node_field(root, "guard_audit");
    struct spec *s = p->spec;
    int r = audit.json != NULL ? node_bool(&audit, &s->guard_audit, p->e) : SHD_OK;
    const uint64_t bytes = (uint64_t)s->unit_count * spec_returns(s) * SPEC_AUDIT_BYTES;
    if (r == SHD_OK && s->guard_audit && bytes > SPEC_AUDIT_BYTES_MAX)
        r = err_set(p->e, SHD_ERANGE,
                    "%s keeps %u bytes for each gradient of a step at each owner: %" PRIu32
                    " units x %" PRIu32 " gradients are %" PRIu64 " MiB, at most %u are kept",
                    node_path(&audit).text, SPEC_AUDIT_BYTES, s->unit_count, spec_returns(s),
                    bytes >> 20, (unsigned)(SPEC_AUDIT_BYTES_MAX >> 20));
    return r;
}

static int parse_root(struct parser *p, const struct node *root)
{
    static const char *const known[] = { "name",          "seed",
                                         "micro_batches", "accumulate",
                                         "publish",       "grad_dtype",
                                         "optimizer",     "ema",
                                         "groups",        "units",
                                         "ema_warmup",    "guard",
                                         "verify_every",  "micro_batches_max",
                                         "guard_audit",   "codec",
                                         "grad_codec" };
    struct spec *s = p->spec;
    int r = node_object(root, known, ARRAY_SIZE(known), p->e);
    if (r != SHD_OK)
        return r;
    const struct node name = node_field(root, "name"), seed = node_field(root, "seed");
    const struct node accumulate = node_field(root, "accumulate");
    const struct node verify = node_field(root, "verify_every");
    const struct node publish = node_field(root, "publish"), groups = node_field(root, "groups");
    const struct node grad_dtype = node_field(root, "grad_dtype");
    const struct node optimizer = node_field(root, "optimizer"), units = node_field(root, "units");
    const struct node guard = node_field(root, "guard");
    r = node_name(&name, &s->name, p->e);
    if (r == SHD_OK && seed.json != NULL)
        r = node_u64(&seed, 0, INT64_MAX, &s->seed, p->e);
    if (r == SHD_OK)
        r = spec_ramp_parse(s, root, p->e);
    if (r == SHD_OK)
        r = parse_accumulate(p, &accumulate);
    if (r == SHD_OK && verify.json != NULL)
        r = node_u64(&verify, 0, INT64_MAX, &s->verify_every, p->e);
    if (r == SHD_OK)
        r = parse_dtype(p, &publish, &s->publish);
    if (r == SHD_OK)
        r = parse_dtype(p, &grad_dtype, &s->grad_dtype);
    if (r == SHD_OK)
        r = parse_codec(p, root);
    if (r == SHD_OK)
        r = parse_grad_codec(p, root);
    if (r == SHD_OK)
        r = spec_optimizer_parse(s, &optimizer, p->e);
    if (r == SHD_OK)
        r = parse_ema(p, root);
    if (r == SHD_OK)
        r = spec_guard_parse(&s->guard, &guard, p->e);
    if (r == SHD_OK)
        r = parse_groups(p, &groups);
    if (r == SHD_OK)
        r = parse_units(p, &units);
    if (r == SHD_OK)
        r = spec_guard_units(s, p->e);
    if (r == SHD_OK)
        r = check_accumulate(p);
    if (r == SHD_OK)
        r = parse_audit(p, root);
    return r == SHD_OK ? check_any_trainable(p) : r;
}

int spec_check_amount(const char *json, size_t bytes, struct shd_err *e)
{
    uint64_t values;
    return text_check_amount(json, bytes, &values, e);
}

static void free_written(struct parser *p)
{
    for (uint32_t i = 0; p->written != NULL && i < p->written_count; i++)
        if (p->written[i].tiles > 0 || !p->named)
            free(p->written[i].name);
    free(p->written);
    free(p->by_name);
}

int spec_parse(const char *json, size_t bytes, struct spec **ret_spec, struct shd_err *e)
{
    struct text_doc doc = { 0 };
    if (bytes > SPEC_JSON_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "spec has %zu bytes, the limit is %zu", bytes,
                       SPEC_JSON_BYTES_MAX);
    int r = text_read("spec", json, bytes, &doc, e);
    if (r != SHD_OK)
        return r;
    const struct node root = { .json = doc.values };
    struct parser p = { .spec = sys_calloc(1, sizeof *p.spec), .e = e };
    r = p.spec != NULL ? parse_root(&p, &root) : node_no_memory(e);
    if (r == SHD_OK)
        *ret_spec = p.spec;
    else
        spec_free(p.spec);
    free_written(&p);
    text_free(&doc);
    return r;
}

/* -- Writing -------------------------------------------------------------------------------- */

int spec_dump(const struct spec *spec, char **ret_json, struct shd_err *e)
{
    char *text = spec_write(spec);
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

static int parse_untiled(const struct spec *spec, struct spec **ret_spec, struct shd_err *e)
{
    char *text = spec_write_untiled(spec);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "write the spec of model '%s'", spec->name);
    const int r = spec_parse(text, strlen(text), ret_spec, e);
    free(text);
    return r;
}

int spec_compare_untiled(const struct spec *open, const struct spec *asked, struct shd_err *e)
{
    struct spec *one = NULL, *other = NULL;
    int r = parse_untiled(open, &one, e);
    if (r == SHD_OK)
        r = parse_untiled(asked, &other, e);
    if (r == SHD_OK)
        r = spec_compare(one, other, e);
    spec_free(one);
    spec_free(other);
    return r;
}
