/* HELLO: admit a ZeroMQ connection by the token its owner got on the side channel. */
#include <inttypes.h>
#include <string.h>

#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "daemon/log.h"

int op_hello(struct op *op)
{
    struct daemon *d = op->daemon;
    const struct wire_hello *req = &op->req.hello;
    if (req->protocol != SHD_PROTOCOL)
        return err_set(&op->err, SHD_EPROTO,
                       "client speaks protocol %" PRIu32 ", this daemon protocol %u: "
                       "use client and daemon of one version",
                       req->protocol, SHD_PROTOCOL);
    struct session *s = session_by_token(d, req->token);
    if (s == NULL)
        return err_set(&op->err, SHD_EAUTH, "unknown or used session token");
    if (session_by_identity(d, op->identity, op->identity_bytes) != NULL)
        return err_set(&op->err, SHD_EEXIST, "this connection has a session already");
    s->state = SESSION_OPEN;
    s->role = req->role;
    memcpy(s->name, req->name, strlen(req->name) + 1); /* wire.h: shorter than s->name */
    memcpy(s->identity, op->identity, op->identity_bytes);
    s->identity_bytes = op->identity_bytes;
    log_info("op=hello session=%016" PRIx64 " pid=%d uid=%u role=%s name=%s", s->id,
             (int)s->peer.pid, (unsigned)s->peer.uid, session_role_name(s->role), s->name);
    op->reply.type = WIRE_WELCOME;
    op->reply.welcome = (struct wire_welcome){ .session = s->id, .device = d->device };
    return SHD_OK;
}
