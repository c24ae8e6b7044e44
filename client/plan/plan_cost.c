/* What a plan costs. Counting replays the operations and nothing else, so it holds for plans that
 * were not built here. */
#include "client/plan/plan_cost.h"

#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"

/* -- Sizes ------------------------------------------------------------------------------------- */

static uint64_t unit_elems(const struct spec *spec, uint32_t unit)
{
    const struct spec_unit *su = &spec->units[unit];
    uint64_t elems = 0;
    for (uint32_t i = 0; i < su->tensor_count; i++)
        elems += spec->tensors[su->first_tensor + i].elems;
    return elems;
}

uint64_t plan_unit_param_bytes(const struct spec *spec, uint32_t unit)
{
    return unit_elems(spec, unit) * dtype_bytes(spec->publish);
}

static uint64_t code_bytes(const struct spec *spec, uint32_t unit, enum codec codec)
{
    const struct spec_unit *su = &spec->units[unit];
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < su->tensor_count; i++)
        blocks += layout_align(spec->tensors[su->first_tensor + i].elems, CODEC_BLOCK_ELEMS) /
                  CODEC_BLOCK_ELEMS;
    return blocks * codec_tile_bytes(codec) / CODEC_TILE_SCALES;
}

uint64_t plan_unit_fetched_bytes(const struct spec *spec, uint32_t unit)
{
    return spec->codec != CODEC_NONE ? code_bytes(spec, unit, spec->codec)
                                     : plan_unit_param_bytes(spec, unit);
}

uint64_t plan_unit_grad_bytes(const struct spec *spec, uint32_t unit, enum shd_dtype dtype)
{
    const struct spec_unit *u = &spec->units[unit];
    return u->frozen ? 0 : unit_elems(spec, unit) * dtype_bytes(u->mean ? SHD_F32 : dtype);
}

uint64_t plan_unit_returned_bytes(const struct spec *spec, uint32_t unit, enum shd_dtype dtype)
{
    const enum codec codec = spec_unit_grad_codec(spec, unit);
    return codec != CODEC_NONE && !spec->units[unit].frozen
               ? code_bytes(spec, unit, codec)
               : plan_unit_grad_bytes(spec, unit, dtype);
}

/* -- Counting ---------------------------------------------------------------------------------- */

struct size { /* of one unit */
    uint64_t param_bytes, fetched_bytes, grad_bytes, return_bytes;
    bool grad_live;
};

struct counter {
    const struct spec *spec; /* borrowed */
    struct size *sizes;      /* owned, [units] */
    struct plan_cost cost;
    uint32_t live_units, live_grads;
    uint64_t live_param_bytes, live_grad_bytes;
};

static void raise_u32(uint32_t *max, uint32_t value)
{
    *max = value > *max ? value : *max;
}

static void raise_u64(uint64_t *max, uint64_t value)
{
    *max = value > *max ? value : *max;
}

static void count_grad(struct counter *c, uint32_t unit)
{
    struct size *s = &c->sizes[unit];
    if (s->grad_live || c->spec->units[unit].frozen)
        return;
    s->grad_live = true;
    c->live_grads++;
    c->live_grad_bytes += s->grad_bytes;
}

static void count_backward(struct counter *c, uint32_t unit)
{
    const struct spec_unit *su = &c->spec->units[unit];
    for (uint32_t i = 0; i < su->uses_count; i++)
        count_grad(c, su->uses[i]);
    count_grad(c, unit);
}

static void count_return(struct counter *c, struct size *s)
{
    c->cost.returns++;
    c->cost.returned_bytes += s->return_bytes;
    if (!s->grad_live)
        return;
    s->grad_live = false;
    c->live_grads--;
    c->live_grad_bytes -= s->grad_bytes;
}

static void count_op(struct counter *c, const struct plan_op *op)
{
    struct plan_cost *cost = &c->cost;
    struct size *s = &c->sizes[op->unit];
    if (op->kind == PLAN_FETCH) {
        cost->fetches++;
        cost->fetched_bytes += s->fetched_bytes;
        c->live_units++;
        c->live_param_bytes += s->param_bytes;
    } else if (op->kind == PLAN_FREE) {
        c->live_units--;
        c->live_param_bytes -= s->param_bytes;
    } else if (op->kind == PLAN_BACKWARD) {
        count_backward(c, op->unit);
    } else if (op->kind == PLAN_RETURN) {
        count_return(c, s);
    }
    raise_u32(&cost->live_units_max, c->live_units);
    raise_u32(&cost->live_grads_max, c->live_grads);
    raise_u64(&cost->live_param_bytes_max, c->live_param_bytes);
    raise_u64(&cost->live_grad_bytes_max, c->live_grad_bytes);
    raise_u64(&cost->live_bytes_max, c->live_param_bytes + c->live_grad_bytes);
}

int plan_count(const struct plan *plan, const struct spec *spec, enum shd_dtype grad_dtype,
               struct plan_cost *ret_cost, struct shd_err *e)
{
    struct counter c = { .spec = spec, .sizes = sys_calloc(spec->unit_count, sizeof *c.sizes) };
    if (c.sizes == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to count a plan");
    for (uint32_t u = 0; u < spec->unit_count; u++)
        c.sizes[u] = (struct size){
            .param_bytes = plan_unit_param_bytes(spec, u),
            .fetched_bytes = plan_unit_fetched_bytes(spec, u),
            .grad_bytes = plan_unit_grad_bytes(spec, u, SHD_F32),
            .return_bytes = plan_unit_returned_bytes(
                spec, u, grad_dtype != 0 ? grad_dtype : spec->grad_dtype),
        };
    for (uint32_t i = 0; i < plan->op_count; i++) {
        CHECK(plan->ops[i].unit < spec->unit_count);
        count_op(&c, &plan->ops[i]);
    }
    free(c.sizes);
    *ret_cost = c.cost;
    return SHD_OK;
}

/* -- Slots -------------------------------------------------------------------------------------
 */

/* Where many small gradients are returned, the time goes to waking each other, unless several are
 * under way: a slot for so many units, as long as they take little memory and few mappings (one
 * for each size of units). */
#define UNITS_PER_SLOT  16u
#define SMALL_SLOTS_MAX 16u
#define SMALL_SIZES_MAX 8u
#define SMALL_BYTES_MAX (UINT64_C(512) * 1024)

/* Of trained units; SMALL_SIZES_MAX + 1: there are more. */
static uint32_t count_sizes(const struct spec *spec, uint64_t *ret_largest)
{
    uint64_t sizes[SMALL_SIZES_MAX];
    uint32_t count = 0;
    *ret_largest = 0;
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        const uint64_t elems = spec->units[u].elems;
        uint32_t i = 0;
        while (i < count && sizes[i] != elems)
            i++;
        if (spec->units[u].frozen || i < count)
            continue;
        if (count == SMALL_SIZES_MAX)
            return SMALL_SIZES_MAX + 1;
        sizes[count++] = elems;
        *ret_largest = elems > *ret_largest ? elems : *ret_largest;
    }
    return count;
}

static uint32_t small_slots(const struct spec *spec)
{
    uint64_t largest;
    uint32_t slots = spec->trained_units / UNITS_PER_SLOT;
    if (slots == 0 || count_sizes(spec, &largest) > SMALL_SIZES_MAX || largest == 0)
        return 0;
    const uint64_t room = SMALL_BYTES_MAX / (largest * sizeof(float));
    slots = slots < room ? slots : (uint32_t)room;
    return slots < SMALL_SLOTS_MAX ? slots : SMALL_SLOTS_MAX;
}

uint32_t plan_slots_for(const struct spec *spec, bool staged, uint32_t live_grads)
{
    const uint32_t small = small_slots(spec);
    const uint32_t least = staged || live_grads >= SHD_SLOTS_MAX ? 2 : live_grads + 1;
    return least > small ? least : small;
}

uint32_t plan_slots(const struct spec *spec, const struct plan_policy *policy,
                    const struct plan *plan)
{
    const enum shd_dtype dtype = policy->grad_dtype != 0 ? policy->grad_dtype : spec->grad_dtype;
    const bool coded = spec->codec != CODEC_NONE || spec->grad_codec != CODEC_NONE;
    const bool staged = spec->accumulate > 1 || dtype != SHD_F32 || coded;
    return plan_slots_for(spec, staged, plan->cost.live_grads_max);
}
