/* See stream.h. */
#include "client/run/stream.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

#include "client/paths/order.h"
#include "client/paths/path.h"
#include "client/run/give.h"
#include "client/run/reset.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"

#define SLEEP_NS 50000 /* between two looks: there is no way to wait for an event and a daemon */

/* -- Giving ------------------------------------------------------------------------------------ */

static void describe(const struct shd_model *m, const struct order_item *item, char *text,
                     size_t bytes)
{
    if (item->fence)
        snprintf(text, bytes, "what its stream on cuda:%" PRIu32 " was given", m->session->ordinal);
    else
        snprintf(text, bytes, "the gradient of unit %" PRIu32 " '%.60s', micro-batch %" PRIu32,
                 item->unit, m->spec->units[item->unit].name, item->micro);
}

/* What the program's work should have written is not there, and may never be: the model is of no
 * more use here. */
static int work_failed(struct shd_model *m, const struct shd_err *why, struct shd_err *e)
{
    char text[120];
    struct shd_err fault;
    describe(m, &m->order->items[m->order->first], text, sizeof text);
    err_set(&fault, why->code, "%s cannot be taken: %.150s", text, why->text);
    return model_broken(m, &fault, e);
}

int stream_look(struct shd_model *m, struct shd_err *e)
{
    const struct order_item *item = NULL;
    struct shd_err why = { 0 };
    for (;;) {
        if (order_look(m, &item, &why) != SHD_OK)
            return work_failed(m, &why, e);
        if (item == NULL)
            return SHD_OK;
        const int r = item->fence ? SHD_OK : give_return(m, item->micro, item->unit, e);
        if (r != SHD_OK)
            return r; /* it stays the first: a later call goes on with it */
        order_pop(m);
    }
}

/* -- Waiting ----------------------------------------------------------------------------------- */

struct wait {
    uint64_t start_ns, said_ns;
};

static struct idle *idle_of(const struct shd_model *m)
{
    struct shd_session *s = m->session;
    return s->hub != NULL ? &s->hub->idle : &s->idle;
}

static int timed_out(const struct shd_model *m, struct shd_err *e)
{
    char text[120];
    describe(m, &m->order->items[m->order->first], text, sizeof text);
    return err_set(e, SHD_ETIMEDOUT,
                   "the program's work on cuda:%" PRIu32 " has not come to %s within %" PRIu64
                   " ms",
                   m->session->ordinal, text, m->session->timeout_ns / NS_PER_MS);
}

static void say(const struct shd_model *m, struct wait *w, uint64_t now_ns)
{
    char text[120], line[200];
    if (m->session->blame == NULL || now_ns - w->said_ns < BLAME_NS)
        return;
    w->said_ns = now_ns;
    describe(m, &m->order->items[m->order->first], text, sizeof text);
    snprintf(line, sizeof line,
             "shd: waiting for %" PRIu64 " s for this program's own work on cuda:%" PRIu32 ": %s",
             (now_ns - w->start_ns) / NS_PER_S, m->session->ordinal, text);
    blame_waits(m->session->blame, now_ns - w->start_ns, line);
}

/* Something is in line: look at the daemons and the stream, and sleep a little. */
static int wait_a_little(struct shd_model *m, struct wait *w, struct shd_err *e)
{
    const uint64_t now_ns = clock_now_ns();
    const struct timespec pause = { .tv_nsec = SLEEP_NS };
    const bool endless = m->session->hub == NULL || m->session->hub->patient;
    int r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = reset_look(m, e);
    if (r == SHD_OK)
        r = stream_look(m, e);
    if (r != SHD_OK || !order_any(m))
        return r;
    if (idle_stops(idle_of(m)))
        return idle_take(idle_of(m), e);
    if (!endless && now_ns - w->start_ns >= m->session->timeout_ns)
        return timed_out(m, e);
    say(m, w, now_ns);
    nanosleep(&pause, NULL);
    return SHD_OK;
}

/* Wait while the line is as `still` says. */
static int wait_while(struct shd_model *m,
                      bool (*still)(const struct shd_model *m, uint32_t group, uint32_t unit),
                      uint32_t group, uint32_t unit, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    struct wait w = { start_ns, start_ns };
    int r = SHD_OK;
    if (!still(m, group, unit))
        return SHD_OK;
    while (r == SHD_OK && still(m, group, unit))
        r = wait_a_little(m, &w, e);
    m->session->wait_ns += clock_now_ns() - start_ns;
    return r;
}

static bool any_return(const struct shd_model *m, uint32_t group, uint32_t unit)
{
    (void)unit;
    return order_returns(m, group) > 0;
}

static bool anything(const struct shd_model *m, uint32_t group, uint32_t unit)
{
    (void)group;
    (void)unit;
    return order_any(m);
}

static bool no_room(const struct shd_model *m, uint32_t group, uint32_t unit)
{
    (void)group;
    (void)unit;
    return order_full(m);
}

static bool no_slot(const struct shd_model *m)
{
    bool none = true;
    for (uint32_t i = 0; i < m->slot_count; i++)
        none = none && m->slots[i].state != SLOT_FREE;
    return none;
}

/* Slots bound what is held, also where arrays are this process's own: a stream that lags behind
 * must not make more of them than a worker that waits for its GPU has. */
static bool no_array(const struct shd_model *m, uint32_t group, uint32_t unit)
{
    const uint32_t returns = order_returns(m, ORDER_ALL);
    (void)group;
    (void)unit;
    if (returns == 0 || m->slot_count == 0)
        return returns > 1;
    return m->grads != NULL ? returns >= m->slot_count : no_slot(m);
}

static int wait_for_room(struct shd_model *m, struct shd_err *e)
{
    return wait_while(m, no_room, 0, 0, e);
}

/* -- For calls --------------------------------------------------------------------------------- */

int stream_return(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    if (m->order == NULL)
        return give_return(m, micro, unit, e);
    int r = give_check(m, micro, unit, e);
    if (r == SHD_OK && order_has(m, micro / m->spec->accumulate, unit))
        r = err_set(e, SHD_EINVAL,
                    "unit %" PRIu32 " '%s', micro-batch %" PRIu32 ": its gradient is returned "
                    "already, and waits for its stream",
                    unit, m->spec->units[unit].name, micro);
    if (r == SHD_OK)
        r = wait_for_room(m, e);
    return r == SHD_OK ? order_push(m, micro, unit, e) : r;
}

int stream_before_grad(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    if (!order_any(m))
        return SHD_OK;
    int r = wait_while(m, order_has, micro / m->spec->accumulate, unit, e);
    if (r == SHD_OK && !give_is_open(m, micro, unit))
        r = wait_while(m, no_array, 0, 0, e);
    return r;
}

int stream_before_none(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const int r = wait_while(m, order_has, micro / m->spec->accumulate, unit, e);
    return r == SHD_OK && m->order != NULL && give_is_open(m, micro, unit) ? stream_done(m, e) : r;
}

int stream_returned(struct shd_model *m, struct shd_err *e)
{
    return wait_while(m, any_return, ORDER_ALL, 0, e);
}

int stream_done(struct shd_model *m, struct shd_err *e)
{
    int r = SHD_OK;
    if (m->order == NULL)
        return SHD_OK;
    r = wait_for_room(m, e);
    if (r == SHD_OK)
        r = order_fence(m, e);
    return r == SHD_OK ? wait_while(m, anything, 0, 0, e) : r;
}

/* -- Public ------------------------------------------------------------------------------------ */

int shd_set_stream(shd_model *m, void *cuda_stream, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK && !m->session->on_gpu)
        return err_set(e, SHD_ENOTSUP,
                       "this worker's arrays are in host memory, which is in no stream's order: "
                       "name its GPU in shd_options.device, as \"cuda:0\", or wait for the stream "
                       "before each call");
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK)
        r = wait_for_room(m, e);
    return r == SHD_OK ? order_set(m, cuda_stream, e) : r;
}
