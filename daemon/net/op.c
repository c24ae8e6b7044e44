/* See op.h. */
#include "daemon/net/op.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/base/state.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

int op_pool_init(struct op_pool *pool, struct shd_err *e)
{
    struct op *items = sys_calloc(OP_POOL_COUNT, sizeof *items);
    if (items == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %u request slots", OP_POOL_COUNT);
    pool->items = items;
    pool->free = NULL;
    pool->used = 0;
    for (uint32_t i = OP_POOL_COUNT; i-- > 0;) {
        items[i].index = i;
        items[i].next = pool->free;
        pool->free = &items[i];
    }
    return SHD_OK;
}

static void op_clear(struct op *op)
{
    free(op->text);
    free(op->work);
    const uint32_t index = op->index;
    memset(op, 0, sizeof *op);
    op->index = index;
}

void op_pool_deinit(struct op_pool *pool)
{
    if (pool->items == NULL)
        return;
    for (uint32_t i = 0; i < OP_POOL_COUNT; i++)
        op_clear(&pool->items[i]);
    free(pool->items);
    *pool = (struct op_pool){ 0 };
}

struct op *op_take(struct op_pool *pool)
{
    struct op *op = pool->free;
    if (op == NULL)
        return NULL;
    pool->free = op->next;
    op->next = NULL;
    op->serial = ++pool->serial;
    pool->used++;
    return op;
}

struct op *op_at(struct op_pool *pool, uint32_t index)
{
    CHECK(index < OP_POOL_COUNT);
    return &pool->items[index];
}

void op_drop(struct op *op)
{
    struct daemon *d = op->daemon;
    struct session *session = op->session;
    op_clear(op);
    op->next = d->ops->free;
    d->ops->free = op;
    d->ops->used--;
    if (session != NULL)
        session_unref(session);
}

void op_finish(struct op *op, int status)
{
    CHECK(status != SHD_PENDING);
    const struct session *session = op->session;
    op->reply.seq = op->req.seq;
    op->reply.status = status;
    op->reply.text = status == SHD_OK ? "" : op->err.text;
    if (status != SHD_OK)
        op->reply.type = WIRE_REPLY_NONE;
    if (session == NULL || session->state == SESSION_OPEN)
        mailbox_reply(op->daemon, op);
    op_drop(op);
}

void op_again(struct op **list)
{
    struct op *op = *list;
    *list = NULL;
    while (op != NULL) {
        struct op *next = op->next;
        op->next = NULL;
        const int r = op->handler(op);
        if (r != SHD_PENDING)
            op_finish(op, r);
        op = next;
    }
}
