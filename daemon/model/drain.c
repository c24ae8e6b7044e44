/* See drain.h. */
#include "daemon/model/drain.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/notify.h"
#include "daemon/base/state.h"
#include "daemon/core/step.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/share/board.h"
#include "proto/share/fdpass.h"

/* -- What is held ------------------------------------------------------------------------------ */

bool drain_holds(struct op *op, uint64_t step)
{
    struct op **at = &op->model->waits.held;
    if (op->daemon->drain_session == 0 || step < op->model->waits.hold_step)
        return false;
    while (*at != NULL)
        at = &(*at)->next;
    *at = op;
    return true;
}

/* A step of which anything is in has begun, and is finished. */
static void decide(struct model *m)
{
    const bool begun = step_phase(m->core) == STEP_SEALED || step_cells_in(m->core) > 0 ||
                       step_cells_waiting(m->core) > 0;
    m->waits.hold_step = step_collecting(m->core) + begun;
}

static void begin(struct daemon *d, const struct session *s)
{
    d->drain_session = 0; /* asked again: what is held goes through first */
    for (uint32_t i = 0; i < d->model_count; i++)
        op_again(&d->models[i]->waits.held);
    for (uint32_t i = 0; i < d->model_count; i++)
        decide(d->models[i]);
    d->drain_session = s->id;
    log_info("op=drain session=%016" PRIx64 " pid=%d", s->id, (int)s->pid);
    notify_drain(d->notify, d->drain_session != 0);
}

static void end(struct daemon *d, const char *why)
{
    d->drain_session = 0;
    log_info("op=drain_off why=\"%s\"", why);
    notify_drain(d->notify, d->drain_session != 0);
    for (uint32_t i = 0; i < d->model_count && !d->stopping; i++)
        op_again(&d->models[i]->waits.held);
}

/* -- Between two steps ------------------------------------------------------------------------- */

/* Somebody who has gradient slots may still finish the step. */
static bool has_trainers(const struct daemon *d, const struct model *m)
{
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        const struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_OPEN && inbox_of(s, m) != NULL)
            return true;
    }
    return false;
}

static bool is_settled(const struct daemon *d)
{
    for (uint32_t i = 0; i < d->model_count; i++) {
        const struct model *m = d->models[i];
        if (!m->ready)
            continue; /* nothing to lose */
        if (step_phase(m->core) == STEP_APPLYING ||
            (step_collecting(m->core) < m->waits.hold_step && has_trainers(d, m)))
            return false;
    }
    return true;
}

void drain_look(struct daemon *d)
{
    struct op *op = d->drain_waiting;
    if (op == NULL || !is_settled(d))
        return;
    d->drain_waiting = NULL;
    op_finish(op, SHD_OK);
}

/* -- The request, and ends ----------------------------------------------------------------------
 */

int drain_refuse(const struct daemon *d, struct shd_err *e)
{
    return err_set(e, SHD_EBUSY, "device %s is draining", d->device);
}

static void forget_waiting(struct daemon *d, const char *why)
{
    struct op *op = d->drain_waiting;
    d->drain_waiting = NULL;
    if (op != NULL)
        op_finish(op, err_set(&op->err, SHD_EBUSY, "%s", why));
}

int drain_off(struct op *op)
{
    struct daemon *d = op->daemon;
    forget_waiting(d, "the session asks again");
    if (d->drain_session != 0)
        end(d, "taken back");
    return SHD_OK;
}

int drain_on(struct op *op)
{
    struct daemon *d = op->daemon;
    forget_waiting(d, "the session asks again");
    begin(d, op->session);
    if (is_settled(d))
        return SHD_OK;
    d->drain_waiting = op;
    return SHD_PENDING;
}

void drain_forget_session(const struct session *s)
{
    struct daemon *d = s->daemon;
    if (d->drain_session == s->id) {
        forget_waiting(d, "session ended");
        end(d, "its session ended");
    }
    drain_look(d);
}

void drain_stop(struct daemon *d)
{
    struct side_msg msg = {
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_ERROR, .status = SHD_EBUSY
    };
    struct shd_err e = { 0 };
    if (d->drain_session == 0)
        return;
    drain_refuse(d, &e);
    snprintf(msg.text, sizeof msg.text, "%.100s", e.text);
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        const struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_OPEN && s->id != d->drain_session)
            side_send(s->side_fd, &msg, /* pass_fd= */ -1, &e); /* who does not read will see */
    }
}
