/* What a tensor's values come to; see shd.h. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/path.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/unit_row.h"
#include "proto/spec/guard.h"

_Static_assert(SHD_STATS_BINS == TALLY_BINS && TALLY_EXP_MIN + 149 == 0,
               "shd.h says what bins are");
_Static_assert(SHD_VALUES_MAX == WIRE_VALUES_MAX, "shd.h says what a reply has room for");
_Static_assert(SHD_GRADIENT == (int)WIRE_SHOW_GRAD && SHD_UPDATE == (int)WIRE_SHOW_UPDATE &&
                   SHD_EMA == (int)WIRE_SHOW_EMA,
               "arrays have one number");

static const double quantiles[SHD_STATS_QUANTILES] = { 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99 };

/* A range of the tensor of this name; elems 0: all of it. */
static int show(shd_model *m, const char *name, struct path_show *show,
                struct path_shown *ret_shown, struct shd_err *e)
{
    struct shd_tensor tensor = { .size = sizeof tensor };
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = shd_tensor_find(m, name, &tensor, e);
    if (r != SHD_OK)
        return r;
    if ((uint32_t)show->array > SHD_EMA)
        return err_set(e, SHD_ERANGE, "array %" PRIu32 ", must be 0 to %d", (uint32_t)show->array,
                       SHD_EMA);
    if (!spec_find_tensor(m->spec, name, &show->tensor))
        return err_set(e, SHD_EINTERNAL, "tensor '%.100s' has no index", name);
    if (show->elems == 0)
        show->elems = tensor.elems;
    if (show->first >= tensor.elems || show->elems > tensor.elems - show->first)
        return err_set(e, SHD_ERANGE,
                       "elements %" PRIu64 " + %" PRIu64 " of tensor '%.100s', which has %" PRIu64,
                       show->first, show->elems, name, tensor.elems);
    return m->session->control->show(m, show, ret_shown, e);
}

int shd_tensor_stats(shd_model *m, const char *name, enum shd_array array,
                     struct shd_tensor_stats *ret_stats, struct shd_err *e)
{
    struct path_show ask = { .array = (enum wire_show_array)array };
    struct path_shown shown = { 0 };
    int r = sized_check(ret_stats, sizeof *ret_stats, "shd_tensor_stats", e);
    if (r == SHD_OK)
        r = show(m, name, &ask, &shown, e);
    if (r != SHD_OK)
        return r;
    const struct tally *t = &shown.tally;
    const bool any = tally_finite(t) > 0;
    struct shd_tensor_stats stats = { .step = shown.step,
                                      .updates = shown.updates,
                                      .of_step = shown.of_step,
                                      .micro_batches = (uint64_t)shown.groups * m->spec->accumulate,
                                      .elems = t->elems,
                                      .zeros = t->zeros,
                                      .nans = t->nans,
                                      .infs = t->infs,
                                      .min = any ? t->min : (double)NAN,
                                      .max = any ? t->max : (double)NAN,
                                      .mean = tally_mean(t),
                                      .rms = tally_rms(t),
                                      .update_ratio = tally_ratio(t) };
    for (uint32_t i = 0; i < SHD_STATS_QUANTILES; i++)
        stats.quantiles[i] = tally_quantile(t, quantiles[i]);
    memcpy(stats.below, t->bins[TALLY_BELOW], sizeof stats.below);
    memcpy(stats.above, t->bins[TALLY_ABOVE], sizeof stats.above);
    sized_give(ret_stats, &stats);
    return SHD_OK;
}

/* size: of the caller's. */
static void give_unit(const struct path_units *u, uint32_t i, size_t size, void *ret_stats)
{
    const struct path_unit *unit = &u->units[i];
    struct shd_unit_stats stats = { .grad_norm = unit->gradient / u->divisor,
                                    .weight_norm = unit->weight,
                                    .update_ratio = unit->weight > 0 ? unit->update / unit->weight
                                                                     : (double)NAN };
    memcpy(ret_stats, &size, sizeof size);
    sized_give(ret_stats, &stats);
}

static int check_units(const shd_model *m, uint32_t first, uint32_t count, struct shd_err *e)
{
    if (m->session->control->units == NULL)
        return err_set(e, SHD_ENOTSUP, "in this process nobody keeps what units came to");
    if (count > 0 && first < m->spec->unit_count && count <= m->spec->unit_count - first)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "%" PRIu32 " units from %" PRIu32 " of a model with %" PRIu32,
                   count, first, m->spec->unit_count);
}

int shd_unit_stats(shd_model *m, uint64_t step, uint32_t first, uint32_t count,
                   struct shd_unit_stats *ret_stats, struct shd_unit_step *ret_step,
                   struct shd_err *e)
{
    struct path_units u = { .step = step, .first = first, .count = count };
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = check_units(m, first, count, e);
    if (r == SHD_OK)
        r = sized_check(ret_stats, sizeof *ret_stats, "shd_unit_stats", e);
    if (r == SHD_OK && ret_step != NULL)
        r = sized_check(ret_step, sizeof *ret_step, "shd_unit_step", e);
    if (r != SHD_OK)
        return r;
    u.units = sys_calloc(count, sizeof *u.units);
    if (u.units == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", count);
    r = m->session->control->units(m, &u, e);
    const size_t size = ret_stats->size;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++)
        give_unit(&u, i, size, (uint8_t *)ret_stats + i * size);
    const struct shd_unit_step of = { .step = u.step,
                                      .measured_step = u.step - u.step % UNITS_EVERY,
                                      .skipped = u.skipped != 0,
                                      .guard = u.skipped > 1 && u.skipped <= GUARD_WHAT_END
                                                   ? u.skipped - 1
                                                   : SHD_GUARD_NONE };
    if (r == SHD_OK && ret_step != NULL)
        sized_give(ret_step, &of);
    free(u.units);
    return r;
}

int shd_tensor_values(shd_model *m, const char *name, enum shd_array array, uint64_t first,
                      uint64_t elems, float *ret_values, uint64_t *ret_step, struct shd_err *e)
{
    struct path_show ask = {
        .array = (enum wire_show_array)array, .first = first, .elems = elems, .values = ret_values
    };
    struct path_shown shown = { 0 };
    if (elems == 0 || elems > SHD_VALUES_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu64 " elements, must be 1 to %d", elems,
                       SHD_VALUES_MAX);
    const int r = show(m, name, &ask, &shown, e);
    if (r == SHD_OK && ret_step != NULL)
        *ret_step = shown.step;
    return r;
}
