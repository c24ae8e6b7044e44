/* Replacing what owners hold. See client/shd.h. */
#include <inttypes.h>
#include <stdlib.h>

#include "client/paths/path.h"
#include "client/paths/rejoin.h"
#include "client/run/grads.h"
#include "client/run/reset.h"
#include "client/run/stream.h"
#include "client/session/replay.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/putmap.h"

#define UPDATES_MAX (UINT64_C(1) << 33)

static_assert(SHD_PUT_PARAMS == 1u << SHD_PARAMS && SHD_PUT_MOMENT1 == 1u << SHD_MOMENT1 &&
                  SHD_PUT_MOMENT2 == 1u << SHD_MOMENT2,
              "a bit for each array");

/* What is read or written now would be of two states. */
static int check_nothing_held(const struct shd_model *m, struct shd_err *e)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (m->holds[u].acquired > 0)
            return err_set(e, SHD_EBUSY, "unit '%s' is acquired: release it before the put",
                           m->spec->units[u].name);
    for (uint32_t i = 0; i < m->slot_count; i++)
        if (m->slots[i].state == SLOT_HELD)
            return err_set(e, SHD_EBUSY,
                           "a gradient of unit '%s' is handed out: put between a commit and the "
                           "next shd_grad()",
                           m->spec->units[m->slots[i].unit].name);
    for (uint32_t i = 0; m->grads != NULL && i < m->grads->entry_count; i++)
        if (m->grads->entries[i].used)
            return err_set(e, SHD_EBUSY,
                           "a gradient of unit '%s' is handed out, or summed here: put between a "
                           "commit and the next shd_grad()",
                           m->spec->units[m->grads->entries[i].unit].name);
    return SHD_OK;
}

static int check_options(const struct shd_put_options *o, struct shd_err *e)
{
    if (o->fill == NULL || o->arrays == NULL)
        return err_set(e, SHD_EINVAL, "a put without %s", o->fill == NULL ? "fill" : "arrays");
    if (o->set_updates && o->updates >= UPDATES_MAX)
        return err_set(e, SHD_ERANGE, "%" PRIu64 " updates, must be below %" PRIu64, o->updates,
                       UPDATES_MAX);
    return SHD_OK;
}

/* A bit for each array by its number in the state. */
static int numbered(const struct shd_model *m, const struct shd_put_options *o,
                    uint8_t **ret_arrays, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    uint8_t *arrays = sys_calloc(spec->unit_count, 1);
    if (arrays == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", spec->unit_count);
    int r = SHD_OK;
    for (uint32_t u = 0; r == SHD_OK && u < spec->unit_count; u++) {
        const uint32_t bits = o->arrays[u], moments = bits & ~(uint32_t)SHD_PUT_EMA;
        const uint32_t known = SHD_PUT_PARAMS | SHD_PUT_MOMENT1 | SHD_PUT_MOMENT2 | SHD_PUT_EMA;
        arrays[u] = (uint8_t)moments;
        if ((bits & SHD_PUT_EMA) != 0)
            arrays[u] |= (uint8_t)(1u << spec_ema_array(spec));
        if ((bits & ~known) != 0 || moments >> (1 + spec_unit_moments(spec, u)) != 0 ||
            ((bits & SHD_PUT_EMA) != 0 && !spec_unit_ema(spec, u)))
            r = err_set(e, SHD_EINVAL,
                        "a put has arrays %#x of unit '%s', which has parameters and %" PRIu32
                        " moments%s%s",
                        bits, spec->units[u].name, spec_unit_moments(spec, u),
                        spec_unit_ema(spec, u) ? " and their average" : "",
                        spec->units[u].frozen ? ": it is frozen"
                        : spec->units[u].mean ? ": it is a mean"
                                              : "");
    }
    if (r == SHD_OK)
        r = putmap_check(spec, arrays, spec->unit_count, e);
    if (r == SHD_OK)
        *ret_arrays = arrays;
    else
        free(arrays);
    return r;
}

/* As path_put has them. A unit that is not trained counts as the model does. */
static int unit_updates(const struct shd_model *m, const struct shd_put_options *o,
                        uint64_t **ret_updates, struct shd_err *e)
{
    const struct spec *spec = m->spec;
    if (o->unit_updates == NULL)
        return SHD_OK;
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (o->unit_updates[u] >= UPDATES_MAX)
            return err_set(e, SHD_ERANGE,
                           "%" PRIu64 " updates of unit '%s', must be below %" PRIu64,
                           o->unit_updates[u], spec->units[u].name, UPDATES_MAX);
    uint64_t *updates = sys_calloc(spec->unit_count, sizeof *updates);
    if (updates == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", spec->unit_count);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (!spec->units[u].frozen && !spec->units[u].mean)
            updates[u] = 1 + o->unit_updates[u];
    *ret_updates = updates;
    return SHD_OK;
}

struct filler { /* the caller's */
    struct shd_model *m;
    const struct shd_put_options *options;
    struct shd_err *e;
};

/* Adafactor's statistics lie among the parameters: they stay, unless fill writes there. */
static int fill_kept(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    const struct filler *f = ctx;
    uint64_t step, updates;
    const struct path_get get = { unit, (uint32_t)array, values, &step, &updates };
    int r = SHD_OK;
    if (array == SHD_PARAMS && f->m->spec->units[unit].adafactor)
        r = f->m->session->control->get(f->m, &get, f->e);
    return r == SHD_OK ? f->options->fill(f->options->ctx, unit, array, values) : r;
}

int shd_put(shd_model *m, const struct shd_put_options *options, bool *ret_counts,
            struct shd_err *e)
{
    struct shd_put_options o = { 0 };
    bool counts = false;
    uint64_t *updates = NULL;
    uint8_t *arrays = NULL;
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = sized_take(&o, sizeof o, options, sizeof o.size, "shd_put_options", e);
    if (r == SHD_OK)
        r = check_options(&o, e);
    if (r == SHD_OK)
        r = numbered(m, &o, &arrays, e);
    if (r == SHD_OK)
        r = stream_done(m, e);
    if (r == SHD_OK)
        r = check_nothing_held(m, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK && m->session->hub != NULL)
        r = replay_goes_on(m->step, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = unit_updates(m, &o, &updates, e);
    if (r != SHD_OK) {
        free(arrays);
        return r;
    }
    struct filler filler = { m, &o, e };
    const struct path_put put = { arrays, fill_kept, &filler, o.set_updates ? o.updates + 1 : 0,
                                  updates };
    const uint64_t step = m->step;
    r = m->session->control->put(m, &put, &counts, e);
    free(arrays);
    free(updates);
    if (m->step != step) /* also where it does not count */
        model_step_over(m);
    if (r == SHD_OK && ret_counts != NULL)
        *ret_counts = counts;
    return r;
}

int shd_meet(shd_model *m, uint32_t workers, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK && (workers == 0 || workers > m->spec->micro_batches))
        r = err_set(e, SHD_ERANGE, "%" PRIu32 " workers of a model with %" PRIu32 " micro-batches",
                    workers, m->spec->micro_batches);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK) /* they have begun the step: the others may wait for them, and not come */
        r = stream_returned(m, e);
    while (r == SHD_OK) {
        const uint64_t attempt = m->in.attempt;
        const uint64_t start_ns = clock_now_ns();
        r = m->session->control->meet(m, workers, e);
        m->session->wait_ns += clock_now_ns() - start_ns;
        if (r != SHD_ERESET || (m->session->control->attempt(m) == attempt && !rejoin_is_due(m)))
            return r;
        r = reset_look(m, e);
    }
    return r;
}

uint64_t shd_puts(const shd_model *m)
{
    return m->decided ? m->decision.puts : 0;
}
