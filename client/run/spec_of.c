/* From a flat list of tensors to a spec; see client/shd.h, and client/plan/wrap.h. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/plan/wrap.h"
#include "client/session/session.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_json.h"

/* size: of the first. */
static int take_tensor(const void *at, uint32_t index, size_t size, struct wrap_tensor *to,
                       struct shd_err *e)
{
    struct shd_wrap_tensor own = { 0 };
    const struct shd_wrap_tensor *from = &own;
    const int r = sized_take(&own, sizeof own, at, sizeof own.size, "shd_wrap_tensor", e);
    if (r != SHD_OK)
        return r;
    if (own.size != size)
        return err_set(e, SHD_EINVAL,
                       "shd_wrap_tensor.size of tensor %" PRIu32 " is %zu, that of the first %zu",
                       index, own.size, size);
    if (from->name == NULL || (from->shape == NULL && from->rank > 0))
        return err_set(e, SHD_EINVAL, "tensor %" PRIu32 " has no %s", index,
                       from->name == NULL ? "name" : "shape");
    if (from->rank > SPEC_RANK_MAX)
        return err_set(e, SHD_ERANGE, "tensor '%.100s' has %" PRIu32 " dimensions, at most %u",
                       from->name, from->rank, SPEC_RANK_MAX);
    *to = (struct wrap_tensor){ .name = from->name,
                                .rank = from->rank > 0 ? from->rank : 1,
                                .shape = { 1 },
                                .frozen = from->frozen,
                                .tied_to = from->tied_to };
    if (from->rank > 0)
        memcpy(to->shape, from->shape, from->rank * sizeof *to->shape);
    return SHD_OK;
}

static int check_rule(const struct shd_wrap_rule *rule, struct shd_err *e)
{
    if (rule->model == NULL)
        return err_set(e, SHD_EINVAL, "the model has no name");
    if (rule->pattern_count > 0 && rule->patterns == NULL)
        return err_set(e, SHD_EINVAL, "%" PRIu32 " patterns, and none given", rule->pattern_count);
    return rule->publish == 0 || dtype_valid(rule->publish)
               ? SHD_OK
               : err_set(e, SHD_EINVAL, "dtype %d is not known", (int)rule->publish);
}

/* The whole of a spec's rules is in its parser: what it does not take, nobody gets. */
static int dump_checked(const struct spec *spec, char **ret_json, struct shd_err *e)
{
    char *json;
    struct spec *again;
    int r = spec_dump(spec, &json, e);
    if (r != SHD_OK)
        return r;
    r = spec_parse(json, strlen(json), &again, e);
    if (r != SHD_OK) {
        free(json);
        return r;
    }
    spec_free(again);
    *ret_json = json;
    return SHD_OK;
}

static int wrap_list(const struct wrap_tensor *list, uint32_t count,
                     const struct shd_wrap_rule *rule, char **ret_json, struct shd_err *e)
{
    const struct wrap_rule how = { .patterns = rule->patterns,
                                   .pattern_count = rule->pattern_count,
                                   .unit_elems_min = rule->unit_elems_min,
                                   .sort = rule->sort };
    const struct wrap_model model = { .name = rule->model,
                                      .micro_batches = rule->micro_batches > 0 ? rule->micro_batches
                                                                               : 1,
                                      .accumulate = rule->accumulate > 0 ? rule->accumulate : 1,
                                      .publish = rule->publish != 0 ? rule->publish : SHD_F32 };
    struct wrap wrap = { 0 };
    struct spec *spec = NULL;
    int r = wrap_build(list, count, &how, &wrap, e);
    if (r == SHD_OK)
        r = wrap_spec(list, count, &wrap, &model, &spec, e);
    if (r == SHD_OK)
        r = dump_checked(spec, ret_json, e);
    spec_free(spec);
    wrap_deinit(&wrap);
    return r;
}

int shd_wrap(const struct shd_wrap_tensor *tensors, uint32_t count,
             const struct shd_wrap_rule *rule, char **ret_spec_json, struct shd_err *e)
{
    struct shd_wrap_rule own = { 0 };
    int r = sized_take(&own, sizeof own, rule,
                       offsetof(struct shd_wrap_rule, model) + sizeof own.model, "shd_wrap_rule",
                       e);
    if (r == SHD_OK)
        r = check_rule(&own, e);
    if (r != SHD_OK)
        return r;
    struct wrap_tensor *list = sys_calloc((size_t)count + 1, sizeof *list);
    if (list == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to group %" PRIu32 " tensors", count);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++)
        r = take_tensor((const uint8_t *)tensors + i * tensors->size, i, tensors->size, &list[i],
                        e);
    if (r == SHD_OK)
        r = wrap_list(list, count, &own, ret_spec_json, e);
    free(list);
    return r;
}
