/* See runs.h. */
#include "kernels/runs.h"

#include <inttypes.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"

int runs_new(const struct spec *spec, uint32_t unit, struct slice slice, struct kern_run **ret_runs,
             uint32_t *ret_count, struct shd_err *e)
{
    CHECK(unit < spec->unit_count);
    const struct spec_unit *su = &spec->units[unit];
    struct kern_run *runs = sys_calloc(su->tensor_count, sizeof *runs);
    if (runs == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " runs of unit '%s'",
                       su->tensor_count, su->name);
    uint32_t count = 0;
    for (uint32_t t = su->first_tensor; t < su->first_tensor + su->tensor_count; t++) {
        const struct spec_tensor *st = &spec->tensors[t];
        uint64_t first;
        const uint64_t elems = layout_intersect(slice, st->offset_elems, st->elems, &first);
        if (elems == 0)
            continue;
        first -= slice.first_elem;
        struct kern_run *last = count > 0 ? &runs[count - 1] : NULL;
        if (last != NULL && last->hyper == st->group && last->first_elem + last->elems == first)
            last->elems += elems;
        else
            runs[count++] = (struct kern_run){ first, elems, st->group };
    }
    if (count == 0) {
        free(runs);
        runs = NULL;
    }
    *ret_runs = runs;
    *ret_count = count;
    return SHD_OK;
}

/* x^n by squaring: the same bits with any libm. */
static double power(double x, uint64_t n)
{
    double result = 1;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1)
            result *= x;
        x *= x;
    }
    return result;
}

void runs_hypers(const struct spec *spec, double lr, uint64_t update, struct kern_hyper *ret_hypers)
{
    CHECK(update > 0);
    /* Kernels average with the betas in fp32: the correction must be for those. */
    const float beta1 = (float)spec->beta1, beta2 = (float)spec->beta2;
    for (uint32_t g = 0; g < spec->group_count; g++) {
        ret_hypers[g] = (struct kern_hyper){
            .lr = (float)(lr * spec->groups[g].lr_scale),
            .weight_decay = (float)spec->groups[g].weight_decay,
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = (float)spec->eps,
            .bias1 = (float)(1 - power((double)beta1, update)),
            .bias2 = (float)(1 - power((double)beta2, update)),
        };
    }
}

static enum kern_fill_kind fill_kind(enum spec_init init)
{
    switch (init) {
    case SPEC_INIT_CONST:
        return KERN_FILL_CONST;
    case SPEC_INIT_NORMAL:
        return KERN_FILL_NORMAL;
    case SPEC_INIT_UNIFORM:
        return KERN_FILL_UNIFORM;
    }
    CHECK(false); /* a parsed spec has a known init */
    return KERN_FILL_CONST;
}

/* NOLINTNEXTLINE(readability-non-const-parameter): the fill writes there */
bool runs_fill(const struct spec *spec, uint32_t tensor, struct slice slice, float *param,
               struct kern_fill *ret_fill)
{
    CHECK(tensor < spec->tensor_count);
    const struct spec_tensor *st = &spec->tensors[tensor];
    uint64_t first;
    const uint64_t elems = layout_intersect(slice, st->offset_elems, st->elems, &first);
    if (elems == 0)
        return false;
    *ret_fill = (struct kern_fill){
        .out = &param[first - slice.first_elem],
        .elems = elems,
        .first_index = first - st->offset_elems,
        .key = spec_tensor_key(spec, st),
        .kind = fill_kind(st->init),
        .a = (float)st->init_a,
        .b = (float)st->init_b,
    };
    return true;
}
