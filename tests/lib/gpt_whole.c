/* See gpt_whole.h. Compiled twice, as examples/gpt/model.c is. */
#include "tests/lib/gpt_whole.h"

#include "examples/gpt/model_layer.h"
#include "proto/base/check.h"

#ifndef GPT_F64
void gpt_layout_compute(const struct gpt_shape *shape, struct gpt_layout *ret_layout)
{
    struct gpt_layout layout = { .elems = { 0 } };
    for (uint32_t i = 0; i < gpt_tensors(shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(shape, i, &t);
        const struct gpt_unit u = gpt_unit_at(shape, t.unit);
        if (u.layer != 0 || u.expert != 0)
            continue; /* as the first unit of its kind */
        layout.at[t.kind][t.index] = layout.elems[t.kind];
        layout.elems[t.kind] = (layout.elems[t.kind] + t.elems / t.tiles + 31) / 32 * 32;
    }
    *ret_layout = layout;
}
#endif

double gpt_whole(struct gpt *g, const uint8_t *windows, const real *const *params,
                 real *const *grads)
{
    uint32_t order[GPT_UNITS_MAX], count = 0; /* the units that take part */
    gpt_set_batch(g, windows);
    for (uint32_t u = gpt_next(g, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = gpt_next(g, u)) {
        const uint32_t used = gpt_unit_uses(&g->shape, u);
        CHECK(count < GPT_UNITS_MAX);
        order[count++] = u;
        gpt_forward(g, u, params[u], used == GPT_UNIT_NONE ? NULL : params[used]);
    }
    while (grads != NULL && count > 0) {
        const uint32_t u = order[--count], used = gpt_unit_uses(&g->shape, u);
        gpt_backward(g, u, params[u], grads[u], used == GPT_UNIT_NONE ? NULL : params[used],
                     used == GPT_UNIT_NONE ? NULL : grads[used]);
    }
    return gpt_loss(g);
}
