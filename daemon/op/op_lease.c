/* LEASE: work of a step that nobody does yet, please. Who gets what lease.h decides; here those
 * wait for whom there is nothing yet, and are asked again when gradients come in, the step goes on,
 * a session ends, or time has passed. */
#include "daemon/core/lease.h"
#include "daemon/daemon.h"
#include "daemon/model/drain.h"
#include "daemon/model/model.h"
#include "daemon/net/dispatch.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

/* The loop's time, which stands still while a batch of events is served: lease_next_ns() leaves out
 * what was due when it is asked, so all who wait must have been asked at that very time. */
static uint64_t loop_ns(const struct daemon *d)
{
    return uv_now(&d->loop) * NS_PER_MS;
}

static void time_is_up(uv_timer_t *timer);

/* Fire in ms at the latest. Too early does no harm. */
static void fire_in(struct daemon *d, uint64_t ms)
{
    const bool active = uv_is_active((const uv_handle_t *)&d->lease_timer) != 0;
    if (d->stopping || (active && uv_timer_get_due_in(&d->lease_timer) <= ms))
        return;
    uv_timer_start(&d->lease_timer, time_is_up, ms, /* repeat= */ 0);
}

static void wait_for_time(const struct model *m)
{
    struct daemon *d = m->daemon;
    const uint64_t now_ns = loop_ns(d);
    const uint64_t next_ns = lease_next_ns(m->lease, m->core, now_ns);
    if (m->lease_waiting != NULL && next_ns != UINT64_MAX)
        fire_in(d, (next_ns - now_ns) / NS_PER_MS + 1);
}

static void time_is_up(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    for (uint32_t i = 0; i < d->model_count; i++)
        op_lease_wake(d->models[i]);
}

void op_lease_init(struct daemon *d)
{
    uv_timer_init(&d->loop, &d->lease_timer);
    d->lease_timer.data = d;
}

void op_lease_wake(struct model *m)
{
    dispatch_again(&m->lease_waiting);
}

void op_lease_soon(struct model *m)
{
    if (m->lease_waiting != NULL)
        fire_in(m->daemon, 1);
}

/* Behind the others: who came first is asked first. */
static void wait_for_work(struct op *op)
{
    struct op **at = &op->model->lease_waiting;
    while (*at != NULL)
        at = &(*at)->next;
    *at = op;
    wait_for_time(op->model);
}

static enum wire_leased_what what_of(enum lease_answer answer)
{
    switch (answer) {
    case LEASE_GROUP:
        return WIRE_LEASED_GROUP;
    case LEASE_ALL_IN:
        return WIRE_LEASED_ALL_IN;
    case LEASE_OVER:
        return WIRE_LEASED_OVER;
    case LEASE_WAIT:
        break;
    }
    CHECK(false); /* who waits is not answered */
    return WIRE_LEASED_OVER;
}

int op_lease(struct op *op)
{
    const struct wire_lease *req = &op->req.lease;
    const int r = op_find_model(op, req->model);
    if (r != SHD_OK)
        return r;
    if (op->session->state != SESSION_OPEN) /* it ended while others were being asked */
        return err_set(&op->err, SHD_EGONE, "session ended");
    if (drain_holds(op, req->step))
        return SHD_PENDING;
    uint32_t group = 0;
    const enum lease_answer answer = lease_ask(op->model->lease, op->model->core, req->step,
                                               op->session->id, loop_ns(op->daemon), &group);
    if (answer == LEASE_WAIT) {
        wait_for_work(op);
        return SHD_PENDING;
    }
    if (answer == LEASE_GROUP)
        metrics_leased(op, group);
    op->reply.type = WIRE_LEASED;
    op->reply.leased = (struct wire_leased){ .step = req->step,
                                             .what = what_of(answer),
                                             .group = group };
    return SHD_OK;
}
