/* Requests of a session and its daemon: HELLO, OPEN_RING, DETACH, STATUS, DRAIN. */
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include <openssl/crypto.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/replies.h"
#include "daemon/model/drain.h"
#include "daemon/model/metrics.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "daemon/view/json.h"
#include "daemon/view/take.h"
#include "proto/base/clock.h"
#include "proto/share/fdpass.h"

_Static_assert(WIRE_TOKEN_BYTES == SHD_TOKEN_BYTES, "the side channel's token");

/* HELLO: admit a ZeroMQ connection by the token its owner got on the side channel. */

static int welcome(struct op *op, const struct session *s)
{
    op->reply.type = WIRE_WELCOME;
    const struct daemon *d = op->daemon;
    op->reply.welcome = (struct wire_welcome){
        .session = s->id, .device = d->device, .kept = d->kept, .requests = WIRE_REQUEST_TYPES
    };
    return SHD_OK;
}

/* A token works once, but the Hello that used it may have been doubled on its way: no session knows
 * repeats yet. A refusal that overtakes the welcome would be the end of the client. */
static bool is_repeat(const struct session *s, const struct wire_hello *req)
{
    return s != NULL && CRYPTO_memcmp(s->token, req->token, WIRE_TOKEN_BYTES) == 0;
}

static int op_hello(struct op *op)
{
    struct daemon *d = op->daemon;
    const struct wire_hello *req = &op->req.hello;
    if (req->protocol != SHD_PROTOCOL)
        return err_set(&op->err, SHD_EPROTO,
                       "client speaks protocol %" PRIu32 ", this daemon protocol %u: "
                       "use client and daemon of one version",
                       req->protocol, SHD_PROTOCOL);
    const struct session *known = session_by_conn(d, op->conn);
    if (is_repeat(known, req))
        return welcome(op, known);
    struct session *s = session_by_token(d, req->token);
    if (s == NULL)
        return err_set(&op->err, SHD_EAUTH, "unknown or used session token");
    if (known != NULL)
        return err_set(&op->err, SHD_EEXIST, "this connection has a session already");
    if (d->drain_session != 0)
        return drain_refuse(d, &op->err);
    const uint64_t view = req->role == WIRE_READER ? 0 : req->view; /* it changes nothing */
    int r = session_take_view(d, view, &op->err);
    if (r == SHD_OK)
        r = replies_new(&s->replies, &op->err);
    if (r != SHD_OK)
        return r;
    s->state = SESSION_OPEN;
    s->role = req->role;
    memcpy(s->name, req->name, strlen(req->name) + 1); /* wire.h: shorter than s->name */
    s->rank = req->rank;
    s->said = (struct session_said){ req->level, view };
    s->conn = op->conn;
    mailbox_admit(s);
    note_session(d->metrics, TRACE_SESSION, s->id, /* died= */ false);
    log_info("op=hello session=%016" PRIx64 " pid=%d uid=%u role=%s name=%s", s->id, (int)s->pid,
             (unsigned)s->uid, session_role_name(s->role), s->name);
    return welcome(op, s);
}

const struct request request_hello = { op_hello, /* no session yet: */ 0 };

/* OPEN_RING: from now on the session's frames may go by shared memory, both ways. */

static int op_open_ring(struct op *op)
{
    const int r = mailbox_open_ring(op->session, &op->reply.ring, &op->err);
    op->reply.type = WIRE_RING;
    return r;
}

const struct request request_open_ring = { op_open_ring, ANY_ROLE };

/* DETACH: the client leaves in good order; as if it had hung up, but told. */

static int op_detach(struct op *op)
{
    struct session *s = op->session; /* alive: this request counts on it */
    op->reply.type = WIRE_REPLY_NONE;
    op->reply.seq = op->req.seq;
    op->reply.text = "";
    op_reply(op); /* before the session, and with it the right to a reply, ends */
    s->detached = true;
    if (s->state == SESSION_OPEN)
        session_end(s, "it detached");
    return SHD_OK; /* op_finish() sends nothing: the session is dead */
}

const struct request request_detach = { op_detach, ANY_ROLE };

/* STATUS: what this daemon holds and who is attached: the document that /status gives as well
 * (docs/status.md), without its long lists where a reply would be too large for them. */

#define FRAME_REST_BYTES 1024u /* of a reply, beside the document */

static int op_status(struct op *op)
{
    struct view_snapshot *s = view_take(op->daemon, /* with_spans= */ false);
    size_t bytes = 0;
    if (s != NULL)
        op->text = view_json(s, clock_now_ns(), WIRE_FRAME_BYTES_MAX - FRAME_REST_BYTES, &bytes);
    view_unref(s);
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for the status text");
    op->reply.type = WIRE_STATUS_TEXT;
    op->reply.status_text = (struct wire_status_text){ .json = { (const uint8_t *)op->text,
                                                                 bytes } };
    return SHD_OK;
}

const struct request request_status = { op_status, ANY_ROLE };

/* DRAIN: see drain.h. */

static int op_drain(struct op *op)
{
    const struct daemon *d = op->daemon;
    if (d->drain_session != 0 && d->drain_session != op->session->id)
        return err_set(&op->err, SHD_EBUSY, "device %s is being drained by another session",
                       d->device);
    return op->req.drain.off ? drain_off(op) : drain_on(op);
}

const struct request request_drain = { op_drain, ANY_ROLE };
