/* See hold.h. */
#include "client/run/hold.h"

#include <inttypes.h>

#include "client/paths/path.h"
#include "client/plan/plan.h"
#include "client/plan/plan_cost.h"
#include "client/run/policy.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

static int check_room(const struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct plan_policy *p = &m->policy.plan;
    const uint64_t bytes = m->live_param_bytes + plan_unit_param_bytes(m->spec, unit);
    if (p->max_live_units > 0 && m->live_units + 1 > p->max_live_units)
        return err_set(e, SHD_EBUSY,
                       "unit %" PRIu32 " '%s' would be one more than max_live_units (%" PRIu32
                       "): release one",
                       unit, m->spec->units[unit].name, p->max_live_units);
    if (p->max_live_bytes > 0 && bytes > p->max_live_bytes)
        return err_set(e, SHD_EBUSY,
                       "with unit %" PRIu32 " '%s' %" PRIu64 " bytes would be held, "
                       "max_live_bytes is %" PRIu64 ": release a unit",
                       unit, m->spec->units[unit].name, bytes, p->max_live_bytes);
    return SHD_OK;
}

int hold_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct unit_hold *h = &m->holds[unit];
    if (h->fetched)
        return SHD_OK;
    int r = check_room(m, unit, e);
    if (r == SHD_OK)
        r = policy_reader(m, e);
    if (r == SHD_OK)
        r = m->reader->fetch(m, unit, e);
    if (r != SHD_OK)
        return r;
    const uint64_t bytes = plan_unit_param_bytes(m->spec, unit);
    h->fetched = true;
    m->live_units++;
    m->live_param_bytes += bytes;
    m->session->bytes_fetched += bytes;
    session_live(m->session, bytes, /* more= */ true);
    return SHD_OK;
}

int hold_acquire(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    CHECK(m->holds[unit].fetched);
    const uint64_t start_ns = clock_now_ns();
    activity_begin(m, ACTIVITY_WAIT_UNIT, unit, ACTIVITY_NONE);
    const int r = m->reader->wait_unit(m, unit, e);
    activity_end(m);
    m->session->wait_ns += clock_now_ns() - start_ns;
    if (r != SHD_OK)
        return r;
    m->holds[unit].acquired++;
    m->session->units_acquired++;
    return SHD_OK;
}

void hold_drop(struct shd_model *m, uint32_t unit)
{
    struct unit_hold *h = &m->holds[unit];
    if (!h->fetched || h->acquired > 0)
        return;
    const uint64_t bytes = plan_unit_param_bytes(m->spec, unit);
    m->reader->let_go(m, unit);
    h->fetched = false;
    CHECK(m->live_units > 0);
    m->live_units--;
    m->live_param_bytes -= bytes;
    session_live(m->session, bytes, /* more= */ false);
}

void hold_release(struct shd_model *m, uint32_t unit)
{
    struct unit_hold *h = &m->holds[unit];
    if (h->acquired == 0)
        return;
    h->acquired--;
    hold_drop(m, unit);
}
