/* See wrap.h. Each tensor gets a key (the part of its name that makes it belong), tensors are
 * sorted by key so that equal ones are neighbours, runs of equal keys become units in the order
 * asked for, small units are joined, and last come the uses. wrap_spec() makes a spec of it. */
#include "client/plan/wrap.h"

#include <ctype.h>
#include <inttypes.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

enum place { PLACE_HEAD, PLACE_NAMED, PLACE_TAIL }; /* where a sorted list puts a tensor */

struct item {                         /* of one tensor */
    const struct wrap_tensor *tensor; /* borrowed */
    enum place place;
    const char *key; /* into tensor->name; NULL: a leftover */
    uint32_t key_bytes;
    uint32_t run;   /* leftovers of an ordered list: which run of neighbours */
    bool frozen;    /* of the tensor an alias stands for */
    uint32_t index; /* in the caller's list */
};

struct group {
    uint32_t first_item, item_count;
    uint32_t first_index; /* smallest in the caller's list */
    uint32_t unit;        /* where it ends up */
    uint64_t elems;       /* stored: without aliases */
};

struct wrapper {
    const struct wrap_tensor *tensors; /* borrowed */
    uint32_t count;
    const struct wrap_rule *rule; /* borrowed */
    uint64_t *elems;              /* owned, [count] */
    struct item *items;           /* owned, [count] */
    struct group *groups;         /* owned, [group_count] */
    uint32_t group_count;
    struct wrap wrap;
    struct shd_err *e;
};

/* -- The list ---------------------------------------------------------------------------------- */

static bool name_valid(const char *name)
{
    const size_t bytes = strnlen(name, SPEC_NAME_BYTES_MAX);
    for (size_t i = 0; i < bytes; i++)
        if (name[i] <= ' ' || name[i] > '~' || strchr("/\"\\", name[i]) != NULL)
            return false;
    return bytes > 0 && bytes < SPEC_NAME_BYTES_MAX;
}

static int count_elems(struct wrapper *w, uint32_t i, uint64_t *total)
{
    const struct wrap_tensor *t = &w->tensors[i];
    uint64_t elems = 1;
    if (t->rank > SPEC_RANK_MAX)
        return err_set(w->e, SHD_ERANGE, "tensor '%s' has %" PRIu32 " dimensions, at most %u",
                       t->name, t->rank, SPEC_RANK_MAX);
    for (uint32_t d = 0; d < t->rank; d++) {
        if (t->shape[d] == 0 || t->shape[d] > SHD_MODEL_ELEMS_MAX / elems)
            return err_set(w->e, SHD_ERANGE,
                           "tensor '%s': shape[%" PRIu32 "] is %" PRIu64
                           ": a tensor has 1 to %" PRIu64 " elements",
                           t->name, d, t->shape[d], SHD_MODEL_ELEMS_MAX);
        elems *= t->shape[d];
    }
    w->elems[i] = elems;
    *total += t->tied_to == WRAP_UNTIED ? layout_align(elems, SHD_TENSOR_ALIGN_ELEMS) : 0;
    if (*total > SHD_MODEL_ELEMS_MAX)
        return err_set(w->e, SHD_ERANGE,
                       "tensor '%s' brings the model to %" PRIu64 " elements, at most %" PRIu64,
                       t->name, *total, SHD_MODEL_ELEMS_MAX);
    return SHD_OK;
}

static int check_alias(const struct wrapper *w, uint32_t i)
{
    const struct wrap_tensor *t = &w->tensors[i];
    if (t->tied_to == WRAP_UNTIED)
        return SHD_OK;
    if (t->tied_to >= w->count || t->tied_to == i || w->tensors[t->tied_to].tied_to != WRAP_UNTIED)
        return err_set(w->e, SHD_EINVAL,
                       "tensor '%s' is tied to number %" PRIu32
                       ", which is not a tensor with elements of its own",
                       t->name, t->tied_to);
    if (w->elems[i] != w->elems[t->tied_to])
        return err_set(w->e, SHD_EINVAL,
                       "tensor '%s' has %" PRIu64 " elements, '%s' that it is tied to has %" PRIu64,
                       t->name, w->elems[i], w->tensors[t->tied_to].name, w->elems[t->tied_to]);
    return SHD_OK;
}

static int by_name(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    return strcmp(x->tensor->name, y->tensor->name);
}

static int check_list(struct wrapper *w)
{
    uint64_t total = 0;
    uint32_t stored = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        if (!name_valid(w->tensors[i].name))
            return err_set(w->e, SHD_EINVAL,
                           "tensor %" PRIu32 " is called '%.130s': names are 1 to %u printable "
                           "characters without space, '/', '\"' and '\\'",
                           i, w->tensors[i].name, SPEC_NAME_BYTES_MAX - 1);
        const int r = count_elems(w, i, &total);
        if (r != SHD_OK)
            return r;
        stored += w->tensors[i].tied_to == WRAP_UNTIED;
        w->items[i] = (struct item){ .tensor = &w->tensors[i], .index = i };
    }
    if (stored == 0 || stored > SHD_TENSORS_MAX)
        return err_set(w->e, SHD_ERANGE, "a model has 1 to %u tensors, not %" PRIu32,
                       SHD_TENSORS_MAX, stored);
    for (uint32_t i = 0; i < w->count; i++) {
        const int r = check_alias(w, i);
        if (r != SHD_OK)
            return r;
    }
    qsort(w->items, w->count, sizeof *w->items, by_name);
    for (uint32_t i = 1; i < w->count; i++)
        if (by_name(&w->items[i - 1], &w->items[i]) == 0)
            return err_set(w->e, SHD_EINVAL, "tensor '%s' is listed twice",
                           w->items[i].tensor->name);
    return SHD_OK;
}

/* -- Keys -------------------------------------------------------------------------------------- */

/* The key is the name up to the first component that is a number, with it. */
static void layer_key(struct item *item)
{
    const char *name = item->tensor->name;
    for (const char *at = name; at != NULL;) {
        const size_t digits = strspn(at, "0123456789");
        if (digits > 0 && (at[digits] == '.' || at[digits] == '\0')) {
            item->key = name;
            item->key_bytes = (uint32_t)(at + digits - name);
            return;
        }
        at = strchr(at, '.');
        at = at != NULL ? at + 1 : NULL;
    }
}

static int pattern_keys(struct wrapper *w, const char *pattern)
{
    regex_t regex;
    const int bad = regcomp(&regex, pattern, REG_EXTENDED);
    if (bad != 0) {
        char why[100];
        regerror(bad, &regex, why, sizeof why);
        return err_set(w->e, SHD_EINVAL, "pattern '%.100s': %s", pattern, why);
    }
    for (uint32_t i = 0; i < w->count; i++) {
        struct item *item = &w->items[i];
        regmatch_t match;
        if (item->key != NULL || regexec(&regex, item->tensor->name, 1, &match, 0) != 0 ||
            match.rm_eo == match.rm_so)
            continue;
        item->key = item->tensor->name + match.rm_so;
        item->key_bytes = (uint32_t)(match.rm_eo - match.rm_so);
    }
    regfree(&regex);
    return SHD_OK;
}

static enum place place_of(const struct item *item)
{
    static const char *const first[] = { "emb", "wte", "wpe" };
    if (item->key != NULL)
        return PLACE_NAMED;
    for (size_t i = 0; i < ARRAY_SIZE(first); i++)
        if (strstr(item->tensor->name, first[i]) != NULL)
            return PLACE_HEAD;
    return PLACE_TAIL;
}

static int by_index(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    return x->index < y->index ? -1 : x->index > y->index;
}

static int find_keys(struct wrapper *w)
{
    qsort(w->items, w->count, sizeof *w->items, by_index);
    for (uint32_t p = 0; p < w->rule->pattern_count; p++) {
        const int r = pattern_keys(w, w->rule->patterns[p]);
        if (r != SHD_OK)
            return r;
    }
    uint32_t run = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        struct item *item = &w->items[i];
        const struct wrap_tensor *t = item->tensor;
        if (w->rule->pattern_count == 0)
            layer_key(item);
        run += item->key != NULL;
        item->frozen = t->tied_to == WRAP_UNTIED ? t->frozen : false;
        item->place = w->rule->sort ? place_of(item) : PLACE_NAMED;
        item->run = w->rule->sort || item->key != NULL ? 0 : run;
    }
    return SHD_OK;
}

/* -- Groups ------------------------------------------------------------------------------------ */

int wrap_compare_names(const char *a, size_t a_bytes, const char *b, size_t b_bytes)
{
    size_t i = 0, k = 0;
    while (i < a_bytes && k < b_bytes) {
        if (!isdigit((unsigned char)a[i]) || !isdigit((unsigned char)b[k])) {
            if (a[i] != b[k])
                return (unsigned char)a[i] < (unsigned char)b[k] ? -1 : 1;
            i++;
            k++;
            continue;
        }
        size_t i_end = i, k_end = k;
        while (i_end < a_bytes && isdigit((unsigned char)a[i_end]))
            i_end++;
        while (k_end < b_bytes && isdigit((unsigned char)b[k_end]))
            k_end++;
        while (i + 1 < i_end && a[i] == '0')
            i++;
        while (k + 1 < k_end && b[k] == '0')
            k++;
        const int longer = (i_end - i > k_end - k) - (i_end - i < k_end - k);
        const int digits = longer != 0 ? longer : memcmp(a + i, b + k, i_end - i);
        if (digits != 0)
            return digits;
        i = i_end;
        k = k_end;
    }
    return (i < a_bytes) - (k < b_bytes);
}

static int compare_group(const struct item *x, const struct item *y)
{
    if (x->place != y->place)
        return x->place < y->place ? -1 : 1;
    if ((x->key == NULL) != (y->key == NULL))
        return x->key == NULL ? -1 : 1;
    if (x->key == NULL)
        return x->run < y->run ? -1 : x->run > y->run;
    const int natural = wrap_compare_names(x->key, x->key_bytes, y->key, y->key_bytes);
    if (natural != 0)
        return natural;
    if (x->key_bytes != y->key_bytes) /* "h.01" is not "h.1" */
        return x->key_bytes < y->key_bytes ? -1 : 1;
    return memcmp(x->key, y->key, x->key_bytes);
}

/* Equal groups side by side, frozen ones first, each in the caller's order. */
static int by_group(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    const int group = compare_group(x, y);
    if (group != 0)
        return group;
    if (x->frozen != y->frozen)
        return x->frozen ? -1 : 1;
    return by_index(x, y);
}

static bool same_unit(const struct item *x, const struct item *y)
{
    return compare_group(x, y) == 0 && x->frozen == y->frozen;
}

static const struct item *group_item(const struct wrapper *w, const struct group *g)
{
    return &w->items[g->first_item];
}

static void make_groups(struct wrapper *w)
{
    qsort(w->items, w->count, sizeof *w->items, by_group);
    for (uint32_t i = 0; i < w->count; i++) {
        const struct item *item = &w->items[i];
        if (i == 0 || !same_unit(&w->items[i - 1], item))
            w->groups[w->group_count++] = (struct group){ .first_item = i,
                                                          .first_index = item->index };
        struct group *g = &w->groups[w->group_count - 1];
        g->item_count++;
        g->first_index = item->index < g->first_index ? item->index : g->first_index;
        g->elems += item->tensor->tied_to == WRAP_UNTIED ? w->elems[item->index] : 0;
    }
    /* The frozen part of a group runs before the rest of it, wherever its tensors are listed. */
    for (uint32_t g = 0; g + 1 < w->group_count; g++) {
        struct group *a = &w->groups[g], *b = &w->groups[g + 1];
        if (compare_group(group_item(w, a), group_item(w, b)) == 0)
            a->first_index = b->first_index = a->first_index < b->first_index ? a->first_index
                                                                              : b->first_index;
    }
}

static int by_first_index(const void *a, const void *b)
{
    const struct group *x = a, *y = b;
    if (x->first_index != y->first_index)
        return x->first_index < y->first_index ? -1 : 1;
    return x->first_item < y->first_item ? -1 : 1; /* frozen before trainable */
}

/* -- Units ------------------------------------------------------------------------------------- */

/* The key, or for leftovers the module of the first tensor: "wte.weight" makes "wte". */
static void name_unit(const struct wrapper *w, const struct group *g, struct wrap_unit *u)
{
    const struct item *item = group_item(w, g);
    const char *name = item->key != NULL ? item->key : item->tensor->name;
    size_t bytes = item->key_bytes;
    if (item->key == NULL) {
        const char *dot = strrchr(name, '.');
        bytes = dot != NULL && dot > name ? (size_t)(dot - name) : strlen(name);
    }
    const bool split = u->frozen && g + 1 < w->groups + w->group_count &&
                       compare_group(item, group_item(w, g + 1)) == 0;
    const size_t room = sizeof u->name - sizeof ":frozen";
    snprintf(u->name, sizeof u->name, "%.*s%s", (int)(bytes < room ? bytes : room), name,
             split ? ":frozen" : "");
}

#define TAKEN_PLACES (2 * SHD_UNITS_MAX) /* a power of two, and half of it stays empty */

/* The place of a unit's name in a table of units, 1 + each: what has it, or 0 where it belongs. */
static uint32_t *find_name(const struct wrap *wrap, uint32_t *taken, const char *name)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (const char *c = name; *c != '\0'; c++)
        hash = (hash ^ (unsigned char)*c) * UINT64_C(0x100000001b3);
    uint32_t at = (uint32_t)(hash >> 32) % TAKEN_PLACES;
    while (taken[at] != 0 && strcmp(wrap->units[taken[at] - 1].name, name) != 0)
        at = (at + 1) % TAKEN_PLACES;
    return &taken[at];
}

static int make_names_unique(struct wrapper *w)
{
    struct wrap *wrap = &w->wrap;
    uint32_t *taken = sys_calloc(TAKEN_PLACES, sizeof *taken);
    if (taken == NULL)
        return err_set(w->e, SHD_ENOMEM, "no memory for the names of %" PRIu32 " units",
                       wrap->unit_count);
    for (uint32_t i = 0; i < wrap->unit_count; i++) {
        struct wrap_unit *u = &wrap->units[i];
        char stem[SPEC_NAME_BYTES_MAX];
        memcpy(stem, u->name, sizeof stem);
        uint32_t *place = find_name(wrap, taken, u->name);
        for (uint32_t n = 2; *place != 0; n++) {
            snprintf(u->name, sizeof u->name, "%.110s~%" PRIu32, stem, n);
            place = find_name(wrap, taken, u->name);
        }
        *place = i + 1;
    }
    free(taken);
    return SHD_OK;
}

/* A group goes on in the unit before it if either of them stores nothing (aliases only), or while
 * that unit is below the size asked for. */
static bool joins(const struct wrapper *w, const struct group *g, const struct wrap_unit *before)
{
    if (g->elems == 0 || before->elems == 0)
        return true;
    return before->elems < w->rule->unit_elems_min && before->frozen == group_item(w, g)->frozen;
}

static int make_units(struct wrapper *w)
{
    struct wrap *wrap = &w->wrap;
    CHECK(wrap->units != NULL);
    for (uint32_t i = 0; i < w->group_count; i++) {
        struct group *g = &w->groups[i];
        struct wrap_unit *u = wrap->unit_count > 0 ? &wrap->units[wrap->unit_count - 1] : NULL;
        if (u == NULL || !joins(w, g, u)) {
            if (wrap->unit_count == SHD_UNITS_MAX)
                return err_set(w->e, SHD_ERANGE,
                               "more than %u units: a wider pattern or a larger smallest unit "
                               "makes fewer",
                               SHD_UNITS_MAX);
            u = &wrap->units[wrap->unit_count++];
        }
        if (u->elems == 0) {
            u->frozen = group_item(w, g)->frozen;
            name_unit(w, g, u);
        }
        u->elems += g->elems;
        g->unit = wrap->unit_count - 1;
    }
    return make_names_unique(w);
}

/* A last unit that is too small goes to the one before. */
static void join_last(struct wrapper *w)
{
    struct wrap *wrap = &w->wrap;
    if (wrap->unit_count < 2)
        return;
    const struct wrap_unit *last = &wrap->units[wrap->unit_count - 1];
    struct wrap_unit *before = &wrap->units[wrap->unit_count - 2];
    if (last->elems >= w->rule->unit_elems_min || last->frozen != before->frozen)
        return;
    before->elems += last->elems;
    wrap->unit_count--;
    for (uint32_t i = 0; i < w->group_count; i++)
        if (w->groups[i].unit == wrap->unit_count)
            w->groups[i].unit--;
}

static int add_use(struct wrapper *w, uint32_t unit, uint32_t used)
{
    struct wrap_unit *u = &w->wrap.units[unit];
    if (unit == used)
        return SHD_OK;
    for (uint32_t i = 0; i < u->uses_count; i++)
        if (u->uses[i] == used)
            return SHD_OK;
    if (u->uses_count == SPEC_USES_MAX)
        return err_set(w->e, SHD_ERANGE, "unit '%s' would use more than %u units", u->name,
                       SPEC_USES_MAX);
    u->uses[u->uses_count++] = used;
    return SHD_OK;
}

static int find_uses(struct wrapper *w)
{
    int r = SHD_OK;
    for (uint32_t i = 0; i < w->group_count; i++)
        for (uint32_t k = 0; k < w->groups[i].item_count; k++)
            w->wrap.unit_of[w->items[w->groups[i].first_item + k].index] = w->groups[i].unit;
    for (uint32_t i = 0; i < w->count && r == SHD_OK; i++)
        if (w->tensors[i].tied_to != WRAP_UNTIED)
            r = add_use(w, w->wrap.unit_of[i], w->wrap.unit_of[w->tensors[i].tied_to]);
    for (uint32_t i = 1; i < w->group_count && r == SHD_OK; i++) {
        const struct item *before = group_item(w, &w->groups[i - 1]);
        const struct item *item = group_item(w, &w->groups[i]);
        if (compare_group(before, item) == 0)
            r = add_use(w, w->groups[i].unit, w->groups[i - 1].unit);
    }
    return r;
}

static int allocate(struct wrapper *w)
{
    w->elems = sys_calloc((size_t)w->count + 1, sizeof *w->elems);
    w->items = sys_calloc((size_t)w->count + 1, sizeof *w->items);
    w->groups = sys_calloc((size_t)w->count + 1, sizeof *w->groups);
    w->wrap.unit_of = sys_calloc((size_t)w->count + 1, sizeof *w->wrap.unit_of);
    const uint32_t units = w->count < SHD_UNITS_MAX ? w->count : SHD_UNITS_MAX;
    w->wrap.units = sys_calloc((size_t)units + 1, sizeof *w->wrap.units);
    if (w->elems == NULL || w->items == NULL || w->groups == NULL || w->wrap.unit_of == NULL ||
        w->wrap.units == NULL)
        return err_set(w->e, SHD_ENOMEM, "no memory to group %" PRIu32 " tensors", w->count);
    return SHD_OK;
}

int wrap_build(const struct wrap_tensor *tensors, uint32_t count, const struct wrap_rule *rule,
               struct wrap *ret_wrap, struct shd_err *e)
{
    struct wrapper w = { .tensors = tensors, .count = count, .rule = rule, .e = e };
    int r = allocate(&w);
    if (r == SHD_OK)
        r = check_list(&w);
    if (r == SHD_OK)
        r = find_keys(&w);
    if (r == SHD_OK) {
        make_groups(&w);
        if (!rule->sort)
            qsort(w.groups, w.group_count, sizeof *w.groups, by_first_index);
        r = make_units(&w);
    }
    if (r == SHD_OK) {
        join_last(&w);
        r = find_uses(&w);
    }
    free(w.elems);
    free(w.items);
    free(w.groups);
    if (r == SHD_OK)
        *ret_wrap = w.wrap;
    else
        wrap_deinit(&w.wrap);
    return r;
}

void wrap_deinit(struct wrap *wrap)
{
    free(wrap->units);
    free(wrap->unit_of);
    *wrap = (struct wrap){ 0 };
}

/* -- A spec of it: everything was checked by wrap_build() -------------------------------------- */

static bool fill_tensor(struct spec *s, const struct wrap_tensor *from, uint32_t unit)
{
    struct spec_unit *u = &s->units[unit];
    struct spec_tensor *t = &s->tensors[s->tensor_count++];
    *t = (struct spec_tensor){
        .name = sys_strdup(from->name),
        .rank = from->rank,
        .elems = 1,
        .unit = unit,
        .offset_elems = layout_align(u->elems, SHD_TENSOR_ALIGN_ELEMS),
        .init = SPEC_INIT_CONST,
        .trainable = !s->units[unit].frozen,
    };
    memcpy(t->shape, from->shape, sizeof t->shape);
    for (uint32_t d = 0; d < t->rank; d++)
        t->elems *= t->shape[d];
    u->elems = t->offset_elems + t->elems;
    u->tensor_count++;
    s->elems += t->elems;
    return t->name != NULL;
}

static bool fill_unit(struct spec *s, const struct wrap *wrap, uint32_t unit)
{
    const struct wrap_unit *from = &wrap->units[unit];
    struct spec_unit *u = &s->units[unit];
    *u = (struct spec_unit){ .name = sys_strdup(from->name),
                             .first_tensor = s->tensor_count,
                             .uses_count = from->uses_count,
                             .frozen = from->frozen };
    memcpy(u->uses, from->uses, sizeof u->uses);
    s->unit_count = unit + 1;
    return u->name != NULL;
}

/* Tensors by unit, each unit's in the caller's order: *ret_order[count], the caller's to free. */
static bool sort_by_unit(const struct wrap *wrap, uint32_t count, uint32_t **ret_order)
{
    uint32_t *start = sys_calloc((size_t)wrap->unit_count + 1, sizeof *start);
    uint32_t *order = sys_calloc((size_t)count + 1, sizeof *order);
    if (start == NULL || order == NULL) {
        free(start);
        free(order);
        return false;
    }
    for (uint32_t i = 0; i < count; i++)
        start[wrap->unit_of[i] + 1]++;
    for (uint32_t u = 0; u < wrap->unit_count; u++)
        start[u + 1] += start[u];
    for (uint32_t i = 0; i < count; i++)
        order[start[wrap->unit_of[i]]++] = i;
    free(start);
    *ret_order = order;
    return true;
}

static bool fill_units(struct spec *s, const struct wrap_tensor *tensors, uint32_t count,
                       const struct wrap *wrap, const uint32_t *order)
{
    bool good = true;
    uint32_t next = 0;
    for (uint32_t u = 0; u < wrap->unit_count && good; u++) {
        good = fill_unit(s, wrap, u);
        for (; next < count && wrap->unit_of[order[next]] == u && good; next++)
            if (tensors[order[next]].tied_to == WRAP_UNTIED)
                good = fill_tensor(s, &tensors[order[next]], u);
        CHECK(!good || s->units[u].tensor_count > 0);
        s->units[u].elems = layout_align(s->units[u].elems, SHD_BLOCK_ELEMS);
    }
    return good;
}

static bool fill_head(struct spec *s, const struct wrap_model *model)
{
    s->name = sys_strdup(model->name);
    s->micro_batches = model->micro_batches;
    s->accumulate = model->accumulate;
    s->publish = model->publish;
    s->grad_dtype = SHD_F32;
    s->optimizer = SPEC_ADAMW;
    s->beta1 = 0.9;
    s->beta2 = 0.999;
    s->eps = 1e-8;
    if (s->groups == NULL)
        return false;
    s->group_count = 1;
    s->groups[0] = (struct spec_group){ .name = sys_strdup("default"), .lr_scale = 1 };
    return s->name != NULL && s->groups[0].name != NULL;
}

int wrap_spec(const struct wrap_tensor *tensors, uint32_t count, const struct wrap *wrap,
              const struct wrap_model *model, struct spec **ret_spec, struct shd_err *e)
{
    uint32_t *order = NULL;
    struct spec *s = sys_calloc(1, sizeof *s);
    bool good = s != NULL && sort_by_unit(wrap, count, &order);
    if (good) {
        s->groups = sys_calloc(1, sizeof *s->groups);
        s->units = sys_calloc(wrap->unit_count, sizeof *s->units);
        s->tensors = sys_calloc(count, sizeof *s->tensors);
        good = fill_head(s, model) && s->units != NULL && s->tensors != NULL &&
               fill_units(s, tensors, count, wrap, order);
    }
    free(order);
    if (good) {
        *ret_spec = s;
        return SHD_OK;
    }
    spec_free(s);
    return err_set(e, SHD_ENOMEM, "no memory for a spec of %u tensors", count);
}
