/* Reading a whole step in the owners' memory while others commit. A unit is copied between two
 * looks at its version, which must say the same. Owners update units in forward order, and so they
 * are read: one that is at the step before is waited for, one that is at the step after was passed,
 * and all is read again at that step. */
#include <inttypes.h>
#include <string.h>

#include "client/paths/coded.h"
#include "client/paths/map.h"
#include "client/paths/path.h"
#include "client/paths/place.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"

#define TRIES_MAX 200u

uint64_t shd_unit_version(const shd_model *m, uint32_t unit)
{
    uint64_t version = UINT64_MAX;
    if (unit >= m->spec->unit_count)
        return UINT64_MAX;
    if (m->map == NULL)
        return m->step; /* updates are done when commit returns */
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct map_owner *owner = &m->map->owners[i];
        if (owner->shards->slice[unit].elems == 0)
            continue;
        const uint64_t its = board_stable_version(owner->board.base, unit);
        if (its == UINT64_MAX || (version != UINT64_MAX && its != version))
            return UINT64_MAX;
        version = its;
    }
    return version;
}

static uint64_t read_bytes(const struct shd_model *m, uint32_t unit)
{
    const struct spec_unit *u = &m->spec->units[unit];
    const struct spec_tensor *last = &m->spec->tensors[u->first_tensor + u->tensor_count - 1];
    return (last->offset_elems + last->elems) * dtype_bytes(m->spec->publish);
}

/* An owner that must go on before the unit can be read at step or later: one that changes it, or
 * the one that is furthest behind. */
static struct link *find_late(const struct shd_model *m, uint32_t unit, uint64_t *ret_version)
{
    struct link *late = NULL;
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < m->map->owner_count; i++) {
        const struct map_owner *owner = &m->map->owners[i];
        const uint64_t version = board_version(owner->board.base, unit);
        if (owner->shards->slice[unit].elems == 0 || (late != NULL && version >= least))
            continue;
        late = &m->session->hub->links[i];
        least = version;
    }
    *ret_version = least;
    return late;
}

/* Wait until the unit is at step, or past it: what it is at. */
static int await(struct shd_model *m, uint32_t unit, uint64_t step, uint64_t *ret_version,
                 struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    const struct hub *hub = m->session->hub;
    bool late = false;
    int r = SHD_OK;
    while (r == SHD_OK || r == SHD_PENDING) {
        uint64_t behind;
        struct link *link = find_late(m, unit, &behind);
        const uint64_t version = shd_unit_version(m, unit);
        if (version != UINT64_MAX && version >= step) {
            *ret_version = version;
            return SHD_OK;
        }
        if (late)
            return err_set(e, SHD_ETIMEDOUT,
                           "unit %" PRIu32 " '%s' is not at step %" PRIu64 " within %" PRIu64
                           " ms%s%s",
                           unit, m->spec->units[unit].name, step, hub->timeout_ns / NS_PER_MS,
                           hub->held_up[0] != '\0' ? ": " : "", hub->held_up);
        r = mapped_sleep(m, link, unit, behind + 1, start_ns, &late, e);
    }
    return r;
}

/* *step becomes a later one where the unit has moved on: all is to be read again. */
static int read_unit(struct shd_model *m, uint32_t unit, void *to, uint64_t *step,
                     struct shd_err *e)
{
    uint64_t version = 0;
    const int r = await(m, unit, *step, &version, e);
    if (r != SHD_OK || version != *step) {
        *step = r == SHD_OK ? version : *step;
        return r;
    }
    if (m->spec->codec != CODEC_NONE)
        coded_read(m, unit, m->map->params, read_bytes(m, unit) / dtype_bytes(m->spec->publish),
                   to);
    else
        memcpy(to, m->map->params[unit], read_bytes(m, unit));
    *step += shd_unit_version(m, unit) != version;
    return SHD_OK;
}

static int read_units(struct shd_model *m, void *const *to, uint64_t *ret_step, struct shd_err *e)
{
    uint64_t step = 0, begun = UINT64_MAX;
    for (uint32_t tries = 0; step != begun; tries++) {
        begun = step;
        if (tries == TRIES_MAX)
            return err_set(e, SHD_EBUSY,
                           "model '%s' went on %u times, to step %" PRIu64
                           ", before it was read: steps are shorter than that",
                           m->spec->name, TRIES_MAX, step);
        for (uint32_t u = 0; step == begun && u < m->spec->unit_count; u++) {
            const int r = to[u] != NULL ? read_unit(m, u, to[u], &step, e) : SHD_OK;
            if (r != SHD_OK)
                return r;
        }
    }
    *ret_step = step;
    return SHD_OK;
}

static int read_local(struct shd_model *m, void *const *to, uint64_t *ret_step)
{
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (to[u] != NULL)
            memcpy(to[u], m->reader->params(m, u), read_bytes(m, u));
    *ret_step = m->step;
    return SHD_OK;
}

int shd_read_step(shd_model *m, void *const *to, uint64_t *ret_step, struct shd_err *e)
{
    const int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (to == NULL)
        return err_set(e, SHD_EINVAL, "no arrays to read into");
    if (m->session->on_gpu || (m->map != NULL && m->map->whole))
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' is in a GPU's memory: shd_acquire() it, between commits",
                       m->spec->name);
    uint64_t step = 0;
    const int status = m->map == NULL ? read_local(m, to, &step) : read_units(m, to, &step, e);
    if (status == SHD_OK && ret_step != NULL)
        *ret_step = step;
    return status;
}
