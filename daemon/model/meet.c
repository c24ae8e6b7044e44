/* See meet.h. */
#include "daemon/model/meet.h"

#include "daemon/core/step.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"

/* Sessions. */
static uint32_t count_here(const struct model *m, uint64_t step)
{
    uint32_t count = 0;
    for (const struct op *op = m->waits.meet; op != NULL; op = op->next)
        count += op->req.lease.step == step && !op->again;
    return count;
}

static void answer(struct op *op, bool over)
{
    op->reply.type = WIRE_LEASED;
    op->reply.leased = (struct wire_leased){ .step = op->req.lease.step,
                                             .what = over ? WIRE_LEASED_OVER : WIRE_LEASED_ALL_IN };
    op_finish(op, SHD_OK);
}

void meet_look(struct model *m)
{
    const uint64_t step = step_collecting(m->core);
    const bool begun = step_cells_in(m->core) + step_cells_waiting(m->core) > 0;
    const uint32_t here = count_here(m, step);
    struct op **at = &m->waits.meet;
    while (*at != NULL) {
        struct op *op = *at;
        const struct wire_lease *req = &op->req.lease;
        if (req->step == step && here >= req->meet)
            m->waits.met = step + 1;
        if (req->step > step || (req->step == step && !begun && m->waits.met != step + 1)) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        op->next = NULL;
        answer(op, req->step < step);
    }
}

void meet_ask(struct op *op)
{
    struct model *m = op->model;
    op->again = false;
    for (const struct op *other = m->waits.meet; other != NULL; other = other->next)
        op->again = op->again ||
                    (other->session == op->session && other->req.lease.step == op->req.lease.step);
    op->next = m->waits.meet;
    m->waits.meet = op;
    meet_look(m);
}
