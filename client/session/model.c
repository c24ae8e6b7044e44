/* See model.h. */
#include "client/session/model.h"

#include <inttypes.h>

#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

int model_set_spec(struct shd_model *m, struct spec *spec, struct shd_err *e)
{
    CHECK(m->spec == NULL);
    m->holds = sys_calloc(spec->unit_count, sizeof *m->holds);
    m->reports = sys_calloc(spec->micro_batches, sizeof *m->reports);
    if (m->holds == NULL || m->reports == NULL)
        return err_set(e, SHD_ENOMEM,
                       "no memory for %" PRIu32 " units and %" PRIu32 " micro-batches",
                       spec->unit_count, spec->micro_batches);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        m->holds[u].bytes = plan_unit_param_bytes(spec, u);
    m->spec = spec;
    return SHD_OK;
}

void model_decided(struct shd_model *m, const struct decision *decision)
{
    m->decided = true;
    m->decision = *decision;
}

struct report model_report(const struct shd_model *m, uint32_t group)
{
    const uint32_t a = m->spec->accumulate;
    struct report sum = m->reports[group * a];
    for (uint32_t micro = group * a + 1; micro < group * a + a; micro++) {
        const struct report *r = &m->reports[micro];
        for (uint32_t i = 0; i < r->count; i++)
            sum.metrics[i] += r->metrics[i];
        sum.count = r->count > sum.count ? r->count : sum.count;
    }
    return sum;
}
