/* See lease_wait.h. */
#include "daemon/model/lease_wait.h"

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/core/lease.h"
#include "daemon/model/meet.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/clock.h"

/* The loop's time, which stands still while a batch of events is served: lease_next_ns() leaves out
 * what was due when it is asked, so all who wait must have been asked at that very time. */
static uint64_t loop_ns(const struct daemon *d)
{
    return uv_now(d->loop) * NS_PER_MS;
}

static void time_is_up(uv_timer_t *timer);

/* Fire in ms at the latest. Too early does no harm. */
static void fire_in(struct daemon *d, uint64_t ms)
{
    const bool active = uv_is_active((const uv_handle_t *)d->timers.lease) != 0;
    if (d->stopping || (active && uv_timer_get_due_in(d->timers.lease) <= ms))
        return;
    uv_timer_start(d->timers.lease, time_is_up, ms, /* repeat= */ 0);
}

static void wait_for_time(const struct model *m)
{
    struct daemon *d = m->daemon;
    const uint64_t now_ns = loop_ns(d);
    const uint64_t next_ns = lease_next_ns(m->lease, m->core, now_ns);
    if (m->waits.lease != NULL && next_ns != UINT64_MAX)
        fire_in(d, (next_ns - now_ns) / NS_PER_MS + 1);
}

static void time_is_up(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    for (uint32_t i = 0; i < d->model_count; i++)
        lease_wait_wake(d->models[i]);
}

void lease_wait_init(struct daemon *d)
{
    uv_timer_init(d->loop, d->timers.lease);
    d->timers.lease->data = d;
}

void lease_wait_wake(struct model *m)
{
    op_again(&m->waits.lease);
    meet_look(m);
}

void lease_wait_soon(struct model *m)
{
    if (m->waits.lease != NULL || m->waits.meet != NULL)
        fire_in(m->daemon, 1);
}

/* Behind the others: who came first is asked first. */
static void wait_for_work(struct op *op)
{
    struct op **at = &op->model->waits.lease;
    while (*at != NULL)
        at = &(*at)->next;
    *at = op;
    wait_for_time(op->model);
}

enum lease_answer lease_wait_ask(struct op *op, uint32_t *ret_group)
{
    const struct model *m = op->model;
    const enum lease_answer answer = lease_ask(m->lease, m->core, op->req.lease.step,
                                               op->session->id, loop_ns(op->daemon), ret_group);
    if (answer == LEASE_WAIT && !op->req.lease.now)
        wait_for_work(op);
    return answer;
}

void lease_wait_take_back(struct op *op)
{
    struct model *m = op->model;
    lease_give_back(m->lease, op->session->id, op->req.lease.group);
    lease_wait_soon(m);
}

void lease_wait_forget_session(struct model *m, const struct session *s)
{
    lease_forget(m->lease, s->id);
    lease_wait_wake(m);
}
