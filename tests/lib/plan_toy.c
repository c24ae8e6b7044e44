#include "tests/lib/plan_toy.h"

#include "client/plan/plan.h"

void toy_chain(struct toy *t, uint32_t units)
{
    static char name[] = "u";
    *t = (struct toy){
        .spec = { .unit_count = units, .accumulate = 1, .publish = SHD_F32, .grad_dtype = SHD_F32 }
    };
    t->spec.units = t->units;
    t->spec.tensors = t->tensors;
    t->spec.tensor_count = units;
    t->trace = (struct plan_trace){ t->order, units };
    for (uint32_t u = 0; u < units; u++) {
        t->units[u] = (struct spec_unit){ .name = name, .first_tensor = u, .tensor_count = 1 };
        t->tensors[u] = (struct spec_tensor){ .elems = 1000, .unit = u };
        t->order[u] = u;
    }
}

static bool toy_uses(const struct spec *s, uint32_t user, uint32_t unit)
{
    for (uint32_t i = 0; i < s->units[user].uses_count; i++)
        if (s->units[user].uses[i] == unit)
            return true;
    return false;
}

bool toy_reads(const struct spec *s, uint32_t reader, uint32_t unit)
{
    return reader == unit || toy_uses(s, reader, unit);
}

uint32_t toy_below(uint64_t *rng, uint32_t limit)
{
    return (uint32_t)(test_random(rng) % limit);
}

void toy_random(struct toy *t, uint64_t *rng)
{
    toy_chain(t, 1 + toy_below(rng, TOY_UNITS_MAX));
    const uint32_t units = t->spec.unit_count;
    const bool frozen = toy_below(rng, 3) == 0, skips = toy_below(rng, 3) == 0;
    t->spec.accumulate = 1 + toy_below(rng, 4);
    t->spec.publish = toy_below(rng, 2) == 0 ? SHD_F32 : SHD_BF16;
    for (uint32_t u = 0; u < units; u++) {
        t->tensors[u].elems = 1 + toy_below(rng, 5000);
        t->units[u].frozen = frozen && toy_below(rng, 2) == 0;
        const uint32_t wanted = u > 0 && toy_below(rng, 3) == 0 ? 1 + toy_below(rng, 3) : 0;
        for (uint32_t i = 0; i < wanted; i++) {
            const uint32_t used = toy_below(rng, u);
            if (!toy_uses(&t->spec, u, used))
                t->units[u].uses[t->units[u].uses_count++] = used;
        }
    }
    t->trace.count = 0;
    for (uint32_t u = 0; u < units; u++)
        if (!skips || toy_below(rng, 4) != 0)
            t->order[t->trace.count++] = u;
    for (uint32_t i = toy_below(rng, 4) == 0 ? t->trace.count : 0; i > 1; i--) {
        const uint32_t k = toy_below(rng, i), swapped = t->order[k];
        t->order[k] = t->order[i - 1];
        t->order[i - 1] = swapped;
    }
}

struct plan_policy toy_policy(uint64_t *rng)
{
    static const uint32_t dtypes[] = { 0, SHD_F32, SHD_BF16, SHD_F16 };
    return (struct plan_policy){
        .strategy = (enum plan_strategy)toy_below(rng, PLAN_HYBRID),
        .forward_prefetch = toy_below(rng, 5),
        .backward_prefetch = (enum plan_backward_prefetch)toy_below(rng, 3),
        .grad_dtype = (enum shd_dtype)dtypes[toy_below(rng, 4)],
    };
}

bool toy_in_play(const struct toy *t, uint32_t unit)
{
    for (uint32_t at = 0; at < t->trace.count; at++)
        if (toy_reads(&t->spec, t->order[at], unit))
            return true;
    return false;
}

struct plan toy_build(const struct toy *t, const struct plan_policy *p, uint32_t micros)
{
    struct shd_err e = { 0 };
    struct plan plan;
    EXPECT_OK(plan_build(&t->spec, p, &t->trace, micros, &plan, &e), &e);
    return plan;
}

void toy_print(const struct plan *plan, char *buf, size_t bytes)
{
    size_t used = 0;
    buf[0] = '\0';
    for (uint32_t i = 0; i < plan->op_count && used < bytes; i++)
        used += (size_t)snprintf(buf + used, bytes - used, "%s%s%u", i > 0 ? " " : "",
                                 plan_op_name(plan->ops[i].kind), plan->ops[i].unit);
}
