/* See local_show.h. */
#include "client/paths/local_show.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/kern_run.h"
#include "client/paths/local_state.h"
#include "kernels/delta.h"
#include "kernels/kern.h"
#include "proto/base/sys.h"

#define PIECE_ELEMS (64 * (uint64_t)SHD_BLOCK_ELEMS)

struct looking {
    struct shd_model *m;
    const struct path_show *show;
    const struct local_unit *unit;
    struct delta_rule rule; /* of an update */
    float *values;          /* owned, [3][PIECE_ELEMS] */
    struct path_shown shown;
};

static int find_gradient(struct looking *l, struct shd_err *e)
{
    const struct local_unit *u = l->unit;
    const uint64_t step = l->m->step;
    const bool now = u->summed, last = step > 0 && u->summed_step == step;
    if (!now && !last)
        return err_set(e, SHD_ENOENT, "unit '%.80s' holds no gradient at step %" PRIu64,
                       l->m->spec->units[l->m->spec->tensors[l->show->tensor].unit].name, step);
    l->shown.of_step = now ? step : step - 1;
    l->shown.groups = now ? u->next_group : l->m->local->returns_before;
    return SHD_OK;
}

static int find_update(struct looking *l, struct shd_err *e)
{
    const struct shd_model *m = l->m;
    const struct local_unit *u = l->unit;
    if (m->step == 0 || u->updated_step != m->step)
        return err_set(e, SHD_ENOENT,
                       "the last step did not update unit '%.80s': there was none yet, it was "
                       "skipped or put, or the unit is frozen, a mean or was idle",
                       m->spec->units[m->spec->tensors[l->show->tensor].unit].name);
    return delta_rule_of(m->spec, l->show->tensor, &m->decision, u->updates, &l->rule, e);
}

static float *array_of(const struct looking *l, uint32_t array)
{
    float *const arrays[] = { [WIRE_SHOW_PARAM] = l->unit->param,
                              [WIRE_SHOW_M] = l->unit->m,
                              [WIRE_SHOW_V] = l->unit->v,
                              [WIRE_SHOW_GRAD] = l->unit->acc,
                              [WIRE_SHOW_EMA] = l->unit->ema };
    return arrays[array];
}

/* Moments have the same numbers here as in the state. */
static enum quant array_quant(const struct looking *l, uint32_t array)
{
    return array == WIRE_SHOW_M || array == WIRE_SHOW_V ? spec_array_quant(l->m->spec, array)
                                                        : QUANT_NONE;
}

static int check_array(const struct looking *l, struct shd_err *e)
{
    const struct spec *spec = l->m->spec;
    const uint32_t unit = spec->tensors[l->show->tensor].unit;
    if (l->show->array == WIRE_SHOW_UPDATE || array_of(l, l->show->array) != NULL)
        return SHD_OK;
    if (l->show->array == WIRE_SHOW_GRAD)
        return err_set(e, SHD_EINVAL, "unit '%.100s' is frozen: it has no gradient",
                       spec->units[unit].name);
    if (l->show->array == WIRE_SHOW_EMA)
        return err_set(e, SHD_EINVAL, "unit '%.100s' has no moving average: %s",
                       spec->units[unit].name,
                       spec->ema > 0 ? "it is frozen or a mean" : "the spec has no ema");
    return err_set(e, SHD_EINVAL, "unit '%.100s' has %" PRIu32 " moments, not %d",
                   spec->units[unit].name, spec_unit_moments(spec, unit), (int)l->show->array);
}

static int copy_piece(struct looking *l, uint32_t array, uint64_t first, uint64_t elems,
                      struct shd_err *e)
{
    float *to = l->values + (l->show->array == WIRE_SHOW_UPDATE ? array * PIECE_ELEMS : 0);
    const struct kern_array from = { array_of(l, array), array_quant(l, array) };
    const struct kern_op read = kern_read_of(from, first, elems, to);
    return kern_run_op(l->m->session->kern, &read, e);
}

/* first: element of the unit. */
static int count_piece(struct looking *l, uint64_t first, uint64_t elems, float *kept,
                       struct shd_err *e)
{
    const bool update = l->show->array == WIRE_SHOW_UPDATE;
    const uint64_t head = SHD_BLOCK_ELEMS - first % SHD_BLOCK_ELEMS;
    const float *x = l->values;
    int r = copy_piece(l, update ? 0 : l->show->array, first, elems, e);
    for (uint32_t a = 1; r == SHD_OK && update && a < 3; a++)
        if (array_of(l, a) != NULL)
            r = copy_piece(l, a, first, elems, e);
    if (r != SHD_OK)
        return r;
    const struct delta d = { &l->rule, x, x + PIECE_ELEMS, x + 2 * PIECE_ELEMS, elems };
    if (update)
        delta_tally(&d, head, &l->shown.tally);
    else
        tally_add(&l->shown.tally, x, elems, head);
    if (kept != NULL && update)
        delta_of(&d, kept);
    else if (kept != NULL)
        memcpy(kept, x, elems * sizeof *kept);
    return SHD_OK;
}

int local_show(struct shd_model *m, const struct path_show *show, struct path_shown *ret_shown,
               struct shd_err *e)
{
    const struct spec_tensor *t = &m->spec->tensors[show->tensor];
    struct looking l = { .m = m, .show = show, .unit = &m->local->units[t->unit] };
    l.shown.step = m->step;
    l.shown.updates = l.unit->updates;
    tally_init(&l.shown.tally);
    int r = check_array(&l, e);
    if (r == SHD_OK && show->array == WIRE_SHOW_GRAD)
        r = find_gradient(&l, e);
    else if (r == SHD_OK && show->array == WIRE_SHOW_UPDATE)
        r = find_update(&l, e);
    if (r != SHD_OK)
        return r;
    l.values = sys_malloc(3 * PIECE_ELEMS * sizeof *l.values);
    if (l.values == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to count %" PRIu64 " elements", show->elems);
    uint64_t at = t->offset_elems + show->first, left = show->elems;
    float *kept = show->values;
    while (r == SHD_OK && left > 0) {
        const uint64_t room = PIECE_ELEMS - at % SHD_BLOCK_ELEMS;
        const uint64_t elems = left < room ? left : room;
        r = count_piece(&l, at, elems, kept, e);
        at += elems;
        left -= elems;
        kept = kept != NULL ? kept + elems : NULL;
    }
    free(l.values);
    if (r == SHD_OK)
        *ret_shown = l.shown;
    return r;
}
