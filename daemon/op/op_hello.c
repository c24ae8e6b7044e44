/* HELLO: admit a ZeroMQ connection by the token its owner got on the side channel. */
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include <openssl/crypto.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/replies.h"
#include "daemon/model/drain.h"
#include "daemon/model/metrics.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"
#include "proto/share/fdpass.h"

_Static_assert(WIRE_TOKEN_BYTES == SHD_TOKEN_BYTES, "the side channel's token");

static int welcome(struct op *op, const struct session *s)
{
    op->reply.type = WIRE_WELCOME;
    op->reply.welcome = (struct wire_welcome){ .session = s->id, .device = op->daemon->device };
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
    const struct session *known = session_by_identity(d, op->identity, op->identity_bytes);
    if (is_repeat(known, req))
        return welcome(op, known);
    struct session *s = session_by_token(d, req->token);
    if (s == NULL)
        return err_set(&op->err, SHD_EAUTH, "unknown or used session token");
    if (known != NULL)
        return err_set(&op->err, SHD_EEXIST, "this connection has a session already");
    if (d->drain_session != 0)
        return drain_refuse(d, &op->err);
    const int r = replies_new(&s->replies, &op->err);
    if (r != SHD_OK)
        return r;
    s->state = SESSION_OPEN;
    s->role = req->role;
    memcpy(s->name, req->name, strlen(req->name) + 1); /* wire.h: shorter than s->name */
    memcpy(s->identity, op->identity, op->identity_bytes);
    s->identity_bytes = op->identity_bytes;
    metrics_session_open(s);
    log_info("op=hello session=%016" PRIx64 " pid=%d uid=%u role=%s name=%s", s->id, (int)s->pid,
             (unsigned)s->uid, session_role_name(s->role), s->name);
    return welcome(op, s);
}

const struct request request_hello = { op_hello, /* no session yet: */ 0 };
