/* See drop.h. */
#include "client/run/drop.h"

#include <string.h>

#include "client/paths/order.h"
#include "client/plan/plan_cost.h"
#include "client/run/grads.h"
#include "client/run/hostsum.h"
#include "client/session/session.h"

static_assert(GRADS_ALL == ORDER_ALL, "all groups, by two names");

static void let_go(struct shd_model *m, struct grad_slot *slot)
{
    slot->state = slot->sent > 0 && slot->credits_left > 0 ? SLOT_SENT : SLOT_FREE;
    if (m->grads == NULL)
        session_live(m->session, plan_unit_grad_bytes(m->spec, slot->unit, SHD_F32),
                     /* more= */ false);
}

void drop_grads(struct shd_model *m, uint32_t group)
{
    order_drop(m, group); /* first: the stream writes there */
    if (m->grads != NULL && m->grads->hostsum != NULL)
        hostsum_reset(m, group);
    grads_reset(m, group);
    for (uint32_t i = 0; i < m->spec->micro_batches; i++)
        if (grads_meant(group, i / m->spec->accumulate))
            m->reports[i].given = 0; /* it is run again from its beginning */
    for (uint32_t i = 0; i < m->slot_count; i++) {
        struct grad_slot *slot = &m->slots[i];
        if (slot->state == SLOT_HELD && grads_meant(group, slot->group))
            let_go(m, slot);
    }
}

void drop_step(struct shd_model *m)
{
    const uint64_t attempt = m->in.attempt;
    drop_grads(m, GRADS_ALL);
    memset(m->reports, 0, m->spec->micro_batches * sizeof *m->reports);
    m->in = (struct groups_in){ .step = m->step, .attempt = attempt };
    m->leases = (struct leases){ .leaving = m->leases.leaving };
}
