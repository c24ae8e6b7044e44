/* See skipped.h. */
#include "daemon/model/skipped.h"

#include <inttypes.h>
#include <stdlib.h>

#include "daemon/base/log.h"
#include "daemon/core/step.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/model/model_unit.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/spec/guard.h"
#include "proto/spec/spec.h"

/* -- Sums ---------------------------------------------------------------------------------------
 */

/* Frozen units have no gradient; that of a mean is in no norm, but may not be finite. */
static bool unit_sums(const struct model *m, uint64_t step, uint32_t first, uint32_t count,
                      uint8_t *ret_bytes)
{
    struct fixsum zero;
    fixsum_init(&zero);
    for (uint32_t i = 0; i < count; i++) {
        const struct model_unit *mu = &m->units[first + i];
        const struct spec_unit *unit = &m->spec->units[first + i];
        if (!unit->frozen && !model_unit_summed(mu, step))
            return false;
        const struct fixsum *sum = unit->frozen || unit->mean ? &zero : &mu->sum.sum;
        fixsum_pack(unit->frozen || mu->sum.finite ? sum : NULL,
                    ret_bytes + (size_t)i * FIXSUM_BYTES);
    }
    return true;
}

/* The work that has left the unit's sum is of the round that the step was sealed in. */
static bool part_sums(const struct model *m, const struct skipped_ask *ask, uint32_t count,
                      uint8_t *ret_bytes)
{
    const struct model_unit *mu = &m->units[ask->unit_sums - 1];
    const struct metrics_part from = { .round = mu->action.round,
                                       .unit = mu->unit,
                                       .group = ask->part_sums - 1 };
    return model_unit_summed(mu, ask->step) && metrics_parts(m->metrics, &from, count, ret_bytes);
}

int skipped_sums(const struct model *m, const struct skipped_ask *ask, uint8_t **ret_sums,
                 uint32_t *ret_count, struct shd_err *e)
{
    const uint32_t units = m->spec->unit_count, unit = ask->unit_sums - 1;
    const bool parts = ask->part_sums > 0;
    const uint32_t all = parts ? step_returns(m->core) : units;
    const uint32_t first = parts ? ask->part_sums - 1 : unit;
    const uint32_t left = first < all ? all - first : 0;
    const uint32_t count = left < ask->most ? left : ask->most;
    if (count == 0 || unit >= units)
        return err_set(e, SHD_ERANGE,
                       "sums of unit %" PRIu32 ", gradient %" PRIu32 ", of %" PRIu32
                       " units with %" PRIu32 " gradients",
                       unit, parts ? first : 0, units, step_returns(m->core));
    uint8_t *sums = sys_malloc((size_t)count * FIXSUM_BYTES);
    if (sums == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " sums", count);
    FAIL_POINT("skipped:sums");
    *ret_sums = sums;
    *ret_count = (parts ? part_sums(m, ask, count, sums)
                        : unit_sums(m, ask->step, first, count, sums))
                     ? count
                     : 0;
    return SHD_OK;
}

/* -- Who ----------------------------------------------------------------------------------------
 */

void skipped_sender(struct model *m, uint64_t step, const struct decision *d)
{
    const uint32_t unit = d->cause.unit - 1, group = d->cause.group - 1;
    if (d->cause.unit == 0 || d->cause.group == 0 || unit >= m->spec->unit_count ||
        !model_unit_summed(&m->units[unit], step))
        return;
    const struct metrics_part part = { .round = m->units[unit].action.round,
                                       .unit = unit,
                                       .group = group };
    const struct metrics_sender *s = metrics_part_sender(m->metrics, &part);
    if (s != NULL)
        step_sender(m->core, (uint32_t)s->pid, s->rank, s->name);
}

void skipped_say(const struct model *m, uint64_t step, const struct decision *d)
{
    struct step_cause cause;
    char text[GUARD_SKIP_BYTES];
    if (!d->skip || d->put != 0)
        return;
    const bool known = model_cause(m, step, &cause);
    const struct guard_cause told = {
        .unit = known ? m->spec->units[cause.of.unit - 1].name : NULL,
        .norm = known ? cause.of.norm : 0,
        .audited = m->spec->guard_audit,
        .has_micro = known && cause.of.group > 0,
        .micro = known ? (uint64_t)(cause.of.group - 1) * m->spec->accumulate : 0,
        .share = known ? (double)cause.of.share : 0,
        .worker = known && cause.pid > 0 ? cause.worker : NULL,
        .pid = known ? cause.pid : 0,
        .rank = known ? cause.rank : 0,
    };
    log_info("op=skip model=%s step=%" PRIu64 " why=\"%s\"", m->spec->name, step,
             guard_skip_text(&d->guard, &told, text));
}
