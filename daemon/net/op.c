/* See op.h. */
#include "daemon/net/op.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/replies.h"
#include "daemon/net/conn.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/rings.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

int op_pool_init(struct op_pool *pool, struct shd_err *e)
{
    struct op *items = sys_pages(OP_POOL_COUNT * sizeof *items);
    if (items == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %u request slots", OP_POOL_COUNT);
    *pool = (struct op_pool){ .items = items };
    return SHD_OK;
}

_Static_assert(SESSIONS_MAX *OPS_SHARE + OPS_SHARED_MAX < OP_POOL_COUNT,
               "there is a place for every session's share, and for one without a session");

static void op_clear(struct op *op)
{
    free(op->text);
    free(op->work);
    free(op->spec);
    const uint32_t index = op->index;
    memset(op, 0, offsetof(struct op, req));
    memset(&op->req, 0, offsetof(struct wire_request, hello));
    memset(&op->reply, 0, offsetof(struct wire_reply, welcome));
    op->index = index;
}

void op_pool_deinit(struct op_pool *pool)
{
    if (pool->items == NULL)
        return;
    for (uint32_t i = 0; i < pool->made; i++)
        op_clear(&pool->items[i]);
    sys_pages_free(pool->items, OP_POOL_COUNT * sizeof *pool->items);
    *pool = (struct op_pool){ 0 };
}

static struct op *op_take(struct op_pool *pool)
{
    struct op *op = pool->free;
    if (op == NULL) {
        CHECK(pool->made < OP_POOL_COUNT); /* admit() */
        op = &pool->items[pool->made];
        op->index = pool->made++;
    }
    pool->free = op->next;
    op->next = NULL;
    op->serial = ++pool->serial;
    pool->used++;
    return op;
}

struct op *op_at(struct op_pool *pool, uint32_t index)
{
    CHECK(index < pool->made);
    return &pool->items[index];
}

static void op_drop(struct op *op)
{
    struct daemon *d = op->daemon;
    struct session *session = op->session;
    d->ops->shared -= op->shared;
    d->ops->passed_bytes -= op->passed_bytes;
    op_clear(op);
    op->next = d->ops->free;
    d->ops->free = op;
    d->ops->used--;
    if (session == NULL)
        return;
    CHECK(session->ops > 0);
    session->ops--;
    if (session->state == SESSION_DEAD)
        session_reuse(session);
}

/* -- Ranges -------------------------------------------------------------------------------------
 */

int op_range_begin(struct op *op)
{
    struct op_pool *pool = op->daemon->ops;
    uint32_t own = 0, place = OPS_RANGES_MAX;
    for (uint32_t i = 0; i < OPS_RANGES_MAX; i++) {
        own += pool->ranges[i] == op->session;
        if (pool->ranges[i] == NULL)
            place = i;
    }
    if (place < OPS_RANGES_MAX && own < OPS_RANGES_OWN) {
        pool->ranges[place] = op->session;
        return SHD_OK;
    }
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY,
                   "%u requests copy ranges of elements, or %u of this session: ask again",
                   OPS_RANGES_MAX, OPS_RANGES_OWN);
}

void op_range_end(struct op *op)
{
    struct op_pool *pool = op->daemon->ops;
    uint32_t place = 0;
    while (place < OPS_RANGES_MAX && pool->ranges[place] != op->session)
        place++;
    CHECK(place < OPS_RANGES_MAX);
    pool->ranges[place] = NULL;
}

void *op_memory(struct op *op, size_t bytes)
{
    void *memory = sys_malloc(bytes);
    if (memory == NULL)
        err_set(&op->err, SHD_ENOMEM, "no memory for %zu bytes of a request", bytes);
    return memory;
}

int op_keep(struct op *op, const void *data, size_t bytes)
{
    if (op->text != NULL || bytes == 0)
        return SHD_OK;
    op->text = op_memory(op, bytes);
    if (op->text == NULL)
        return SHD_ENOMEM;
    memcpy(op->text, data, bytes);
    return SHD_OK;
}

/* -- Replies ------------------------------------------------------------------------------------
 */

/* The peer does not read, or has gone: nobody waits for this reply. */
static void send_frame(const struct op *op, const void *frame, size_t bytes)
{
    struct daemon *d = op->daemon;
    struct session *from = op->session; /* a request that is refused at once has none */
    if (op->by_ring && from == NULL)
        from = session_by_conn(d, op->conn);
    if (op->by_ring && from != NULL && rings_reply(from, frame, bytes))
        return;
    if (conn_send(d->mailbox->conns, op->conn, frame, bytes))
        return;
    d->mailbox->dropped_replies++;
    struct session *s = session_by_conn(d, op->conn);
    if (s != NULL)
        session_end(s, "it does not read its replies, or its connection is gone");
}

void op_reply(const struct op *op)
{
    const struct mailbox *mb = op->daemon->mailbox;
    struct shd_err e;
    size_t bytes;
    const uint32_t level = op->session != NULL ? op->session->said.level : WIRE_LEVEL_BASE;
    if (wire_reply_pack_for(&op->reply, level, mb->frame, WIRE_FRAME_BYTES_MAX, &bytes, &e) !=
        SHD_OK) {
        const struct wire_reply failed = { .seq = op->reply.seq, .status = e.code, .text = e.text };
        struct shd_err ignored;
        if (wire_reply_pack(&failed, mb->frame, WIRE_FRAME_BYTES_MAX, &bytes, &ignored) != SHD_OK)
            return;
    }
    if (op->once)
        replies_keep(op->session->replies, op->req.seq, mb->frame, bytes);
    send_frame(op, mb->frame, bytes);
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
        op_reply(op);
    op_drop(op);
}

/* Older builds tell replicas as they tell other owners, that owner 0 was asked, and no more. */
bool op_asks_first(const struct op *op)
{
    const struct wire_open_model *req = &op->req.open_model;
    return req->owner == 0 && !req->twin && !req->settled;
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

/* -- From a frame to its handler ----------------------------------------------------------------
 */

/* Each session has a share of the places, and what others leave; what it asks beyond that it is to
 * ask again. So requests that wait, of however many sessions, keep nobody from going on. */
static int take_place(struct op *op, struct session *s)
{
    struct op_pool *pool = op->daemon->ops;
    const bool shared = s->ops >= OPS_SHARE;
    if (s->ops >= SESSION_OPS_MAX || (shared && pool->shared >= OPS_SHARED_MAX)) {
        op->reply.retry_ms = OPS_RETRY_MS;
        return err_set(&op->err, SHD_EBUSY,
                       "session has %" PRIu32
                       " requests pending (at most %u), all sessions %" PRIu32 ": ask again",
                       s->ops, SESSION_OPS_MAX, pool->used - 1);
    }
    op->session = s;
    op->shared = shared;
    pool->shared += shared;
    s->ops++;
    return SHD_OK;
}

static int admit(struct op *op, const struct request *row)
{
    if (row->roles == 0)
        return SHD_OK;
    struct session *s = &op->daemon->sessions->items[op->req.session % SESSIONS_MAX];
    if (s->state != SESSION_OPEN || s->id != op->req.session || s->conn != op->conn)
        return err_set(&op->err, SHD_EAUTH, "no open session %016" PRIx64 " of this connection",
                       op->req.session);
    if ((row->roles & REQUEST_ROLE(s->role)) == 0)
        return err_set(&op->err, SHD_EAUTH, "%s is not for a %s session",
                       wire_request_name(op->req.type), session_role_name(s->role));
    if (op->req.seq == 0)
        return err_set(&op->err, SHD_EINVAL, "requests of a session are numbered from 1");
    return take_place(op, s);
}

/* Exactly once per (session, number). False: this copy of it needs no more serving. */
static bool is_to_serve(struct op *op)
{
    const void *frame = NULL;
    size_t bytes = 0;
    if (op->session == NULL)
        return true; /* Hello: its token works once */
    switch (replies_take(op->session->replies, op->req.seq, &frame, &bytes)) {
    case REPLIES_NEW:
        op->once = true;
        return true;
    case REPLIES_SERVE:
        op->repeated = true;
        return true;
    case REPLIES_AGAIN:
        op->daemon->mailbox->repeated_replies++;
        send_frame(op, frame, bytes);
        return false;
    case REPLIES_PENDING:
    case REPLIES_OLD:
        return false;
    }
    CHECK(false); /* every verdict is above */
    return false;
}

/* Of a session that this daemon has ended. Its client learns that by the side channel, and asks
 * again: a refusal by the other one, which through relays comes first at times, would be final. */
static bool is_late(const struct op *op, const struct request *row)
{
    return row->roles != 0 && session_has_ended(op->daemon->sessions, op->req.session);
}

static void serve(struct op *op)
{
    const struct request *row = op->daemon->hooks->requests[op->req.type];
    int r = admit(op, row);
    const bool late = r != SHD_OK && is_late(op, row); /* most are of one that is open */
    if (late || (r == SHD_OK && !is_to_serve(op))) {
        op_drop(op);
        return;
    }
    op->handler = row->fn;
    if (r == SHD_OK)
        r = row->fn(op);
    if (r != SHD_PENDING)
        op_finish(op, r);
}

void op_serve_frame(struct daemon *d, uint64_t conn, bool by_ring, const void *frame, size_t bytes)
{
    struct op *op = op_take(d->ops);
    d->requests++;
    op->daemon = d;
    op->arrived_ns = uv_hrtime();
    op->conn = conn;
    op->by_ring = by_ring;
    d->mailbox->arena.used = 0;
    const int r = wire_request_unpack(frame, bytes, &d->mailbox->arena, &op->req, &op->err);
    if (r == SHD_OK) {
        serve(op);
        return;
    }
    /* An undecodable request: its sender speaks something else, or is broken. */
    d->mailbox->bad_frames++;
    struct session *s = session_by_conn(d, conn);
    log_warn("op=undecodable status=%s session=%016" PRIx64 " pid=%d why=\"%s\""
             " do=\"look at that program: use libshd of this version\"",
             status_name(r), s != NULL ? s->id : 0, s != NULL ? (int)s->pid : 0, op->err.text);
    op_finish(op, r);
    if (s != NULL && s->state == SESSION_OPEN)
        session_end(s, "it sent an undecodable request");
}
