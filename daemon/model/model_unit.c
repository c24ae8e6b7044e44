/* See model_unit.h. */
#include "daemon/model/model_unit.h"

#include <math.h>

#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/norms.h"
#include "kernels/kern.h"
#include "proto/spec/spec.h"

_Static_assert(NORMS_AT_ONCE >= STEP_APPLY_AHEAD, "each update that runs can be measured");

static bool has_gradient(const struct model_unit *mu)
{
    const struct spec_unit *unit = &mu->model->spec->units[mu->unit];
    return !unit->frozen && !unit->mean;
}

static double root_of(const struct kern_sum *sum)
{
    return sum->finite ? sqrt(fixsum_value(&sum->sum)) : (double)NAN;
}

/* What the sum of gradients is divided by where their mean is meant. */
static double sum_over_mean(const struct model *m)
{
    const struct decision *d = &step_record(m->core)->decision;
    const double count = d->divisor > 0
                             ? d->divisor
                             : (double)step_returns_before(m->core) * m->spec->accumulate;
    return count * (d->loss_scale > 0 ? d->loss_scale : 1);
}

/* What the work before an update has left: the sum of squares of the step's gradient. Not a
 * predecessor's work, nor gradients in whose place values are put. */
static struct unit_norm take_gradient(const struct model_unit *mu, const struct step_action *apply)
{
    const struct model *m = mu->model;
    const struct decision *d = &step_record(m->core)->decision;
    if (apply->put || !model_unit_summed(mu, apply->step))
        return (struct unit_norm){ 0 };
    const struct norms_step step = { apply->step, sum_over_mean(m), d->skip, d->guard.what };
    if (has_gradient(mu))
        norms_put_gradient(m->metrics->norms, &step, mu->unit, &mu->sum);
    return (struct unit_norm){ apply->step + 1, root_of(&mu->sum) / step.divisor };
}

void model_unit_update(struct model_unit *mu, const struct step_action *next)
{
    const struct model *m = mu->model;
    mu->change = NULL;
    mu->applied = take_gradient(mu, next);
    if (!next->put && !next->skip && has_gradient(mu))
        mu->change = norms_take_change(m->metrics->norms, next->step);
}

void model_unit_updated(struct model_unit *mu)
{
    struct kern_change *change = mu->change;
    if (change == NULL)
        return;
    mu->change = NULL;
    if (change->whole)
        mu->changed = (struct unit_change){ mu->action.step + 1, root_of(&change->update),
                                            root_of(&change->weight) };
    norms_put_change(mu->model->metrics->norms, mu->action.step, mu->unit, change);
}

void model_units_forget(struct model *m, uint64_t step)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        m->units[u].applied = (struct unit_norm){ 0 };
        m->units[u].changed = (struct unit_change){ 0 };
    }
    norms_forget(m->metrics->norms, step);
}
