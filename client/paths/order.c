/* See order.h. */
#include "client/paths/order.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/session/session.h"
#include "kernels/cuda/stream.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

static struct order_item *item_at(struct order *o, uint32_t i)
{
    return &o->items[(o->first + i) % ORDER_MAX];
}

static const struct order_item *item_of(const struct order *o, uint32_t i)
{
    return &o->items[(o->first + i) % ORDER_MAX];
}

bool order_any(const struct shd_model *m)
{
    return m->order != NULL && m->order->count > 0;
}

bool order_full(const struct shd_model *m)
{
    return m->order != NULL && m->order->count + 2 > ORDER_MAX;
}

static bool is_return_of(const struct shd_model *m, const struct order_item *item, uint32_t group)
{
    return !item->fence && (group == ORDER_ALL || item->micro / m->spec->accumulate == group);
}

bool order_has(const struct shd_model *m, uint32_t group, uint32_t unit)
{
    for (uint32_t i = 0; m->order != NULL && i < m->order->count; i++) {
        const struct order_item *item = item_of(m->order, i);
        if (is_return_of(m, item, group) && item->unit == unit)
            return true;
    }
    return false;
}

uint32_t order_returns(const struct shd_model *m, uint32_t group)
{
    uint32_t count = 0;
    for (uint32_t i = 0; m->order != NULL && i < m->order->count; i++)
        count += is_return_of(m, item_of(m->order, i), group);
    return count;
}

/* -- Noting ------------------------------------------------------------------------------------ */

static int push(struct shd_model *m, struct order_item item, struct shd_err *e)
{
    struct order *o = m->order;
    CHECK(o != NULL && o->count < ORDER_MAX); /* the caller has looked */
    struct order_item *place = item_at(o, o->count);
    const int r = cuda_mark_set(m->session->kern, o->stream, &place->mark, e);
    if (r != SHD_OK)
        return r;
    item.mark = place->mark;
    *place = item;
    o->count++;
    return SHD_OK;
}

int order_push(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    return push(m, (struct order_item){ .micro = micro, .unit = unit }, e);
}

int order_fence(struct shd_model *m, struct shd_err *e)
{
    return push(m, (struct order_item){ .fence = true }, e);
}

/* A fence on the new stream: the driver says whether there is such a stream. */
static int try_stream(struct shd_model *m, void *stream, struct shd_err *e)
{
    struct shd_err why = { 0 };
    void *before = m->order->stream;
    m->order->stream = stream;
    const int r = order_fence(m, &why);
    if (r == SHD_OK)
        return SHD_OK;
    m->order->stream = before;
    return err_set(e, SHD_EINVAL, "stream %p cannot be one of cuda:%" PRIu32 ": %s", stream,
                   m->session->ordinal, why.text);
}

int order_set(struct shd_model *m, void *stream, struct shd_err *e)
{
    const bool first = m->order == NULL;
    int r = SHD_OK;
    if (!first && stream == m->order->stream)
        return SHD_OK;
    if (first)
        m->order = sys_calloc(1, sizeof *m->order);
    else
        r = order_fence(m, e);
    if (m->order == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a stream's order");
    if (r == SHD_OK)
        r = try_stream(m, stream, e);
    if (r != SHD_OK && first)
        order_free(m);
    return r;
}

/* -- Looking ----------------------------------------------------------------------------------- */

int order_look(struct shd_model *m, const struct order_item **ret_item, struct shd_err *e)
{
    struct order *o = m->order;
    *ret_item = NULL;
    if (!order_any(m))
        return SHD_OK;
    const struct order_item *item = item_at(o, 0);
    const int r = o->reached ? SHD_OK
                             : cuda_mark_look(m->session->kern, item->mark, &o->reached, e);
    if (r == SHD_OK && o->reached)
        *ret_item = item;
    return r;
}

void order_pop(struct shd_model *m)
{
    struct order *o = m->order;
    CHECK(o->count > 0);
    o->first = (o->first + 1) % ORDER_MAX;
    o->count--;
    o->reached = false;
}

/* -- Waiting ----------------------------------------------------------------------------------- */

static void wait_for_all(const struct shd_model *m)
{
    const struct order *o = m->order;
    struct shd_err ignored;
    for (uint32_t i = 0; o != NULL && i < o->count; i++) /* also of streams there were before */
        cuda_mark_wait(m->session->kern, item_of(o, i)->mark, &ignored);
    if (o != NULL)
        cuda_stream_drain(m->session->kern, o->stream, &ignored);
}

void order_drop(struct shd_model *m, uint32_t group)
{
    wait_for_all(m);
    for (uint32_t i = 0; m->order != NULL && i < m->order->count; i++) {
        struct order_item *item = item_at(m->order, i);
        item->fence = item->fence || is_return_of(m, item, group);
    }
}

void order_mark(struct shd_model *m, struct CUevent_st **mark)
{
    struct shd_err ignored;
    if (m->order != NULL &&
        cuda_mark_set(m->session->kern, m->order->stream, mark, &ignored) != SHD_OK)
        cuda_stream_drain(m->session->kern, m->order->stream, &ignored);
}

void order_free(struct shd_model *m)
{
    if (m->order == NULL)
        return;
    wait_for_all(m);
    for (uint32_t i = 0; i < ORDER_MAX; i++)
        cuda_mark_free(m->session->kern, m->order->items[i].mark);
    free(m->order);
    m->order = NULL;
}
