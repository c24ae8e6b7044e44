/* See wrap_spec.h. Everything was checked by wrap_build(). */
#include "client/plan/wrap_spec.h"

#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

static uint64_t tensor_elems(const struct wrap_tensor *t)
{
    uint64_t elems = 1;
    for (uint32_t d = 0; d < t->rank; d++)
        elems *= t->shape[d];
    return elems;
}

static bool fill_tensor(struct spec *s, const struct wrap_tensor *from, uint32_t unit)
{
    struct spec_unit *u = &s->units[unit];
    struct spec_tensor *t = &s->tensors[s->tensor_count];
    *t = (struct spec_tensor){
        .name = sys_strdup(from->name),
        .rank = from->rank,
        .elems = tensor_elems(from),
        .unit = unit,
        .offset_elems = layout_align(u->elems, SHD_TENSOR_ALIGN_ELEMS),
        .init = SPEC_INIT_CONST,
        .trainable = !s->units[unit].frozen,
    };
    memcpy(t->shape, from->shape, sizeof t->shape);
    u->elems = t->offset_elems + t->elems;
    u->tensor_count++;
    s->elems += t->elems;
    s->tensor_count++;
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
