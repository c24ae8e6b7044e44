/* See give.h. */
#include "client/run/give.h"

#include <inttypes.h>

#include "client/paths/path.h"
#include "client/plan/plan_cost.h"
#include "client/run/grads.h"
#include "client/run/hostsum.h"
#include "client/run/policy.h"
#include "client/run/reset.h"
#include "client/session/activity.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

#define LANE_NS (UINT64_C(500) * 1000) /* between two looks at what other workers sum */

/* -- Slots ------------------------------------------------------------------------------------- */

static uint32_t group_of(const struct shd_model *m, uint32_t micro)
{
    return micro / m->spec->accumulate;
}

static struct grad_slot *find_held(struct shd_model *m, uint32_t group, uint32_t unit)
{
    for (uint32_t i = 0; i < m->slot_count; i++) {
        struct grad_slot *s = &m->slots[i];
        if (s->state == SLOT_HELD && s->group == group && s->unit == unit)
            return s;
    }
    return NULL;
}

static int make_slots(struct shd_model *m, struct shd_err *e)
{
    uint32_t slots;
    if (m->session->reads)
        return err_set(e, SHD_EAUTH, "model '%s' is open in a session that only reads",
                       m->spec->name);
    int r = policy_slots(m, &slots, e);
    if (r != SHD_OK)
        return r;
    m->slot_count = slots;
    r = m->session->control->open_slots(m, e);
    if (r != SHD_OK)
        m->slot_count = 0;
    return r;
}

static int take_slot(struct shd_model *m, struct grad_slot **ret_slot, struct shd_err *e)
{
    if (m->slot_count == 0) {
        const int r = make_slots(m, e);
        if (r != SHD_OK)
            return r;
    }
    struct grad_slot *slot = model_find_slot(m, SLOT_FREE);
    if (slot == NULL && model_find_slot(m, SLOT_SENT) == NULL)
        return err_set(e, SHD_EBUSY,
                       "all %" PRIu32 " gradient slots are handed out and not "
                       "returned: return one, or ask for more in shd_options.slots (at most %u)",
                       m->slot_count, SHD_SLOTS_MAX);
    if (slot == NULL) {
        const uint64_t start_ns = clock_now_ns();
        activity_begin(m, ACTIVITY_WAIT_SLOT, ACTIVITY_NONE, ACTIVITY_NONE);
        const int r = m->session->control->wait_slot(m, e);
        activity_end(m);
        m->session->wait_ns += clock_now_ns() - start_ns;
        if (r != SHD_OK)
            return r;
        slot = model_find_slot(m, SLOT_FREE);
    }
    CHECK(slot != NULL);
    const int r = m->session->control->ready_slot(m, (uint32_t)(slot - m->slots), e);
    if (r == SHD_OK)
        *ret_slot = slot;
    return r;
}

/* -- Handing out ---------------------------------------------------------------------------------
 */

static uint64_t grad_bytes(const struct shd_model *m, uint32_t unit)
{
    return plan_unit_grad_bytes(m->spec, unit, SHD_F32);
}

/* Hand out the array of a slot: the owners read what is written there. */
static int open_slot(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad,
                     bool *ret_fresh, struct shd_err *e)
{
    struct grad_slot *slot = find_held(m, micro, unit);
    *ret_fresh = slot == NULL;
    if (slot == NULL) {
        int r = take_slot(m, &slot, e);
        if (r == SHD_OK)
            r = err_copy(&m->fault, e); /* it may have come to light while waiting */
        if (r != SHD_OK)
            return r;
        CHECK(slot != NULL);
        *slot = (struct grad_slot){
            .state = SLOT_HELD, .group = micro, .unit = unit, .dtype = SHD_F32
        };
        session_live(m->session, grad_bytes(m, unit), /* more= */ true);
    }
    *ret_grad = m->session->control->slot_array(m, (uint32_t)(slot - m->slots), unit);
    return SHD_OK;
}

static int sum_and_give(struct shd_model *m, uint32_t group, uint32_t unit, struct shd_err *e);

/* Until a lane may have gone on: owners are heard, and the step may have begun again. */
static int wait_for_others(struct shd_model *m, uint32_t unit, uint64_t start_ns, struct shd_err *e)
{
    struct hub *hub = m->session->hub;
    const uint64_t left_ns = hub_left_ns(hub, start_ns, LANE_NS), before_ns = clock_now_ns();
    activity_begin(m, ACTIVITY_WAIT_SLOT, unit, ACTIVITY_NONE);
    int r = left_ns > 0 ? hub_poll(hub, left_ns, e) : hostsum_late(m, unit, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = reset_look(m, e);
    activity_look(m);
    activity_end(m);
    m->session->wait_ns += clock_now_ns() - before_ns;
    return r;
}

static int do_first(struct shd_model *m, uint32_t unit, const struct hostsum_next *next,
                    uint64_t start_ns, struct shd_err *e)
{
    if (next->what == HOSTSUM_ADD)
        return sum_and_give(m, next->group, unit, e);
    return next->what == HOSTSUM_WAIT ? wait_for_others(m, unit, start_ns, e) : SHD_OK;
}

/* In memory of all workers of the host. */
static int open_together(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad,
                         bool *ret_fresh, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    struct hostsum_next next = { .what = HOSTSUM_GO };
    int r;
    do {
        r = hostsum_open(m, micro, unit, ret_grad, ret_fresh, &next, e);
        if (r == SHD_OK)
            r = do_first(m, unit, &next, start_ns, e);
    } while (r == SHD_OK && next.what != HOSTSUM_GO);
    return r;
}

static bool sums_together(const struct shd_model *m)
{
    return m->grads != NULL && m->grads->hostsum != NULL;
}

int give_open(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_grad, bool *ret_fresh,
              struct shd_err *e)
{
    if (sums_together(m))
        return open_together(m, micro, unit, ret_grad, ret_fresh, e);
    return m->grads != NULL ? grads_open(m, micro, unit, ret_grad, ret_fresh, e)
                            : open_slot(m, micro, unit, ret_grad, ret_fresh, e);
}

bool give_is_open(struct shd_model *m, uint32_t micro, uint32_t unit)
{
    if (m->grads == NULL)
        return find_held(m, micro, unit) != NULL;
    if (sums_together(m))
        return hostsum_is_open(m, micro, unit);
    const struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    return entry != NULL && entry->open && entry->taken == micro % m->spec->accumulate;
}

/* -- Giving --------------------------------------------------------------------------------------
 */

/* Tell the owners of a gradient, and count it. */
static int tell(struct shd_model *m, const struct path_return *ret, struct shd_err *e)
{
    m->in.handed = true;
    const int r = m->session->control->give(m, ret, e);
    if (r != SHD_OK)
        return r;
    if (!sums_together(m)) /* others give some of the group's units */
        m->reports[ret->group * m->spec->accumulate].given++;
    m->session->units_returned++;
    return SHD_OK;
}

static int tell_none(struct shd_model *m, uint32_t group, uint32_t unit, struct shd_err *e)
{
    const struct path_return ret = { group, unit, NULL };
    return tell(m, &ret, e);
}

static int give_slot(struct shd_model *m, struct grad_slot *slot, struct shd_err *e)
{
    const uint32_t unit = slot->unit;
    const enum shd_dtype dtype = slot->dtype;
    const struct path_return ret = { slot->group, unit, slot };
    const int r = tell(m, &ret, e);
    if (r != SHD_OK)
        return r;
    m->session->bytes_returned += plan_unit_returned_bytes(m->spec, unit, dtype);
    return SHD_OK;
}

/* The entry's sum is in a slot whose return broke off, or is written into a new one. */
static int fill_slot(struct shd_model *m, const struct grad_entry *entry,
                     struct grad_slot **ret_slot, struct shd_err *e)
{
    const enum shd_dtype dtype = spec_unit_grad_dtype(m->spec, entry->unit);
    struct grad_slot *slot = find_held(m, entry->group, entry->unit);
    if (slot != NULL) {
        *ret_slot = slot;
        return SHD_OK;
    }
    int r = take_slot(m, &slot, e);
    if (r != SHD_OK)
        return r;
    CHECK(slot != NULL);
    slot->group = entry->group; /* which codes are rounded by */
    r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = m->session->control->fill_slot(m, (uint32_t)(slot - m->slots), entry->unit, entry->sum,
                                           dtype, e);
    if (r != SHD_OK)
        return r;
    *slot = (struct grad_slot){
        .state = SLOT_HELD, .group = entry->group, .unit = entry->unit, .dtype = dtype
    };
    *ret_slot = slot;
    return SHD_OK;
}

/* The entry's group is complete: hand its sum over. After an error it can be repeated. */
static int hand_over(struct shd_model *m, struct grad_entry *entry, struct shd_err *e)
{
    struct grad_slot *slot = NULL;
    int r;
    if (entry->sum == NULL) {
        r = tell_none(m, entry->group, entry->unit, e);
    } else {
        r = fill_slot(m, entry, &slot, e);
        if (r == SHD_OK)
            r = give_slot(m, slot, e);
        if (r != SHD_OK && slot != NULL && slot->sent == 0)
            slot->state = SLOT_FREE;
    }
    if (r == SHD_OK)
        grads_done(m, entry);
    return r;
}

/* Of a group whose cells of the unit are all in. */
static int sum_and_give(struct shd_model *m, uint32_t group, uint32_t unit, struct shd_err *e)
{
    struct grad_entry *entry = NULL;
    int r = grads_whole(m, group, unit, hostsum_is_none(m, unit), &entry, e);
    if (r != SHD_OK)
        return r;
    CHECK(entry != NULL);
    if (entry->taken < m->spec->accumulate && entry->sum != NULL)
        r = hostsum_add(m, unit, entry->sum, e);
    if (r != SHD_OK)
        return r;
    entry->taken = m->spec->accumulate;
    r = hand_over(m, entry, e);
    if (r == SHD_OK)
        hostsum_given(m, unit);
    return r;
}

/* A sum whose return broke off goes first. */
static int return_together(struct shd_model *m, uint32_t micro, uint32_t unit, bool none,
                           struct shd_err *e)
{
    const uint32_t group = group_of(m, micro);
    const uint64_t start_ns = clock_now_ns();
    struct hostsum_next next = { .what = HOSTSUM_GO };
    int r = SHD_OK;
    if (grads_find(m->grads, group, unit) != NULL) {
        r = sum_and_give(m, group, unit, e);
        if (r != SHD_OK || !hostsum_is_open(m, micro, unit))
            return r;
    }
    do {
        r = hostsum_close(m, micro, unit, none, &next, e);
        if (r == SHD_OK)
            r = do_first(m, unit, &next, start_ns, e);
    } while (r == SHD_OK && hostsum_is_open(m, micro, unit));
    return r;
}

/* Can this micro-batch be returned? Also, once more, where handing the group over broke off. */
static bool entry_open(const struct shd_model *m, const struct grad_entry *entry, uint32_t micro)
{
    const uint32_t a = m->spec->accumulate;
    return entry != NULL && (entry->open ? entry->taken == micro % a : entry->taken == a);
}

int give_check(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const bool can = sums_together(m) ? hostsum_is_open(m, micro, unit) ||
                                            grads_find(m->grads, group_of(m, micro), unit) != NULL
                     : m->grads != NULL
                         ? entry_open(m, grads_find(m->grads, group_of(m, micro), unit), micro)
                         : find_held(m, micro, unit) != NULL;
    if (can)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": shd_grad() "
                   "did not hand out its gradient",
                   unit, m->spec->units[unit].name, micro);
}

static int return_staged(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    CHECK(entry != NULL); /* give_check() */
    const int r = entry->open ? grads_close(m, entry, e) : SHD_OK;
    if (r != SHD_OK)
        return r;
    return entry->taken == m->spec->accumulate ? hand_over(m, entry, e) : SHD_OK;
}

int give_return(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    int r = give_check(m, micro, unit, e);
    if (r != SHD_OK)
        return r;
    if (sums_together(m))
        return return_together(m, micro, unit, /* none= */ false, e);
    if (m->grads != NULL)
        return return_staged(m, micro, unit, e);
    r = give_slot(m, find_held(m, micro, unit), e);
    if (r == SHD_OK)
        session_live(m->session, grad_bytes(m, unit), /* more= */ false);
    return r;
}

bool give_began(struct shd_model *m, uint32_t micro, uint32_t unit)
{
    const struct grad_slot *slot = find_held(m, group_of(m, micro), unit);
    if (m->grads == NULL)
        return slot != NULL && slot->sent > 0;
    const struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    if (sums_together(m) && entry != NULL)
        return true;
    return entry != NULL && !entry->open && entry->taken == m->spec->accumulate;
}

static int return_none_staged(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    struct grad_entry *entry = grads_find(m->grads, group_of(m, micro), unit);
    int r = SHD_OK;
    if (entry == NULL || entry->open || entry->taken < m->spec->accumulate)
        r = grads_none(m, micro, unit, &entry, e);
    if (r != SHD_OK)
        return r;
    return entry->taken == m->spec->accumulate ? hand_over(m, entry, e) : SHD_OK;
}

int give_none(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    if (sums_together(m))
        return return_together(m, micro, unit, /* none= */ true, e);
    if (m->grads != NULL)
        return return_none_staged(m, micro, unit, e);
    struct grad_slot *slot = find_held(m, micro, unit);
    if (slot != NULL && slot->sent > 0)
        return err_set(e, SHD_EINVAL,
                       "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": its return "
                       "has begun, repeat that",
                       unit, m->spec->units[unit].name, micro);
    const int r = tell_none(m, micro, unit, e);
    if (r == SHD_OK && slot != NULL) { /* asked for, then not needed */
        slot->state = SLOT_FREE;
        session_live(m->session, grad_bytes(m, unit), /* more= */ false);
    }
    return r;
}
