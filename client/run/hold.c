/* See hold.h. */
#include "client/run/hold.h"

#include <inttypes.h>

#include "client/paths/path.h"
#include "client/run/policy.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

static int check_room(const struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct plan_policy *p = &m->policy.plan;
    const uint64_t bytes = m->held.bytes + m->holds[unit].bytes;
    if (p->max_live_units > 0 && m->held.units + 1 > p->max_live_units)
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
    if (r == SHD_OK && m->reader->kind != SHD_PATH_MAP)
        r = policy_reader(m, e);
    if (r == SHD_OK)
        r = m->reader->fetch(m, unit, e);
    if (r != SHD_OK)
        return r;
    h->fetched = true;
    m->held.units++;
    m->held.bytes += h->bytes;
    m->session->bytes_fetched += h->fetched_bytes;
    session_live(m->session, h->bytes, /* more= */ true);
    return SHD_OK;
}

static int wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    activity_begin(m, ACTIVITY_WAIT_UNIT, unit, ACTIVITY_NONE);
    const int r = m->reader->wait_unit(m, unit, e);
    activity_end(m);
    m->session->wait_ns += clock_now_ns() - start_ns;
    return r;
}

/* The short way: what is published is counted as no wait, and no clock is read. */
int hold_acquire(struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    struct unit_hold *h = &m->holds[unit];
    CHECK(h->fetched);
    if (!m->reader->readable(m, unit)) {
        const int r = wait_unit(m, unit, e);
        if (r != SHD_OK)
            return r;
    } else if (m->activity.page != NULL) {
        activity_add_wait(m->activity.page, /* duration_ns= */ 0);
    }
    h->acquired++;
    m->session->units_acquired++;
    return SHD_OK;
}

void hold_let_go(struct shd_model *m, uint32_t unit)
{
    struct unit_hold *h = &m->holds[unit];
    if (!h->fetched || h->acquired > 0)
        return;
    m->reader->let_go(m, unit);
    h->fetched = false;
    CHECK(m->held.units > 0);
    m->held.units--;
    m->held.bytes -= h->bytes;
    session_live(m->session, h->bytes, /* more= */ false);
}

void hold_release(struct shd_model *m, uint32_t unit)
{
    struct unit_hold *h = &m->holds[unit];
    if (h->acquired == 0)
        return;
    h->acquired--;
    hold_let_go(m, unit);
}
