/* See local_put.h. */
#include "client/paths/local_put.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "client/paths/kern_run.h"
#include "client/paths/local_publish.h"
#include "client/paths/local_state.h"
#include "client/paths/put.h"
#include "kernels/kern.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/putmap.h"

static int check_untouched(const struct shd_model *m, struct shd_err *e)
{
    const uint32_t groups = model_returns(m);
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        for (uint32_t g = 0; g < groups; g++)
            if (m->local->units[u].arrived[g] != ARRIVED_NOT)
                return err_set(e, SHD_EBUSY,
                               "step %" PRIu64 " has begun: unit '%s' of micro-batch %" PRIu32
                               " is in; put between a commit and the next return",
                               m->step, m->spec->units[u].name, g * m->spec->accumulate);
    return SHD_OK;
}

static bool has(const struct path_put *put, uint32_t unit, uint32_t array)
{
    return (put->arrays[unit] >> array & 1) != 0;
}

static uint64_t count_elems(const struct shd_model *m, const struct path_put *put)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        for (uint32_t a = 0; a < PUTMAP_ARRAYS; a++)
            elems += has(put, u, a) ? m->spec->units[u].elems : 0;
    return elems;
}

static int fill_all(struct shd_model *m, const struct path_put *put, float *values,
                    struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++)
        for (uint32_t a = 0; r == SHD_OK && a < PUTMAP_ARRAYS; a++)
            if (has(put, u, a)) {
                r = put_fill(m, put, u, a, values, e);
                values += m->spec->units[u].elems;
            }
    return r;
}

static int copy_unit(struct shd_model *m, const struct path_put *put, uint32_t unit,
                     const float **values, struct shd_err *e)
{
    const struct local_unit *u = &m->local->units[unit];
    const uint64_t elems = m->spec->units[unit].elems;
    int r = SHD_OK;
    for (uint32_t a = 0; r == SHD_OK && a < PUTMAP_ARRAYS; a++) {
        if (!has(put, unit, a))
            continue;
        const struct kern_op write = kern_write_of(local_state(m->spec, u, a), 0, elems, *values);
        r = kern_run_op(m->session->kern, &write, e);
        *values += elems;
    }
    return r == SHD_OK && has(put, unit, SHD_PARAMS) ? local_publish(m, unit, e) : r;
}

static void set_updates(struct shd_model *m, const struct path_put *put)
{
    if (put->updates > 0)
        m->local->updates = put->updates - 1;
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        const uint64_t own = put->unit_updates != NULL ? put->unit_updates[u] : 0;
        if (own > 0 || put->updates > 0)
            m->local->units[u].updates = (own > 0 ? own : put->updates) - 1;
    }
}

static void end_step(struct shd_model *m, const struct decision *decision)
{
    const struct history_row row = { .step = m->step,
                                     .time_ns = clock_read_ns(CLOCK_REALTIME),
                                     .lr = decision->lr,
                                     .skipped = true };
    history_put(m->local->history, HISTORY_SLOTS, &row);
    model_decided(m, decision);
    m->step++;
}

int local_put(struct shd_model *m, const struct path_put *put, bool *ret_counts, struct shd_err *e)
{
    struct decision decision = put_decision(m, put, /* origin= */ 1);
    const uint64_t elems = count_elems(m, put);
    const float *next;
    int r = check_untouched(m, e);
    float *values = r == SHD_OK ? sys_malloc(elems * sizeof *values) : NULL;
    if (r == SHD_OK && values == NULL)
        r = err_set(e, SHD_ENOMEM, "no memory for a put of %" PRIu64 " elements", elems);
    if (r == SHD_OK)
        r = fill_all(m, put, values, e);
    next = values;
    struct shd_err why = { 0 };
    for (uint32_t u = 0; r == SHD_OK && u < m->spec->unit_count; u++)
        if (copy_unit(m, put, u, &next, &why) != SHD_OK)
            r = model_broken(m, &why, e);
    free(values);
    if (r != SHD_OK)
        return r;
    decision.micro_batches = settings_micro_batches(&m->local->settings, m->step + 1);
    set_updates(m, put);
    end_step(m, &decision);
    *ret_counts = true;
    return SHD_OK;
}
