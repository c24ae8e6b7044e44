/* DETACH: the client leaves in good order; as if it had hung up, but told. */
#include "daemon/net/mailbox.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "daemon/op/requests.h"

static int op_detach(struct op *op)
{
    struct session *s = op->session; /* alive: this request counts on it */
    op->reply.type = WIRE_REPLY_NONE;
    op->reply.seq = op->req.seq;
    op->reply.text = "";
    mailbox_reply(op->daemon, op); /* before the session, and with it the right to a reply, ends */
    s->detached = true;
    if (s->state == SESSION_OPEN)
        session_end(s, "it detached");
    return SHD_OK; /* op_finish() sends nothing: the session is dead */
}

const struct request request_detach = { op_detach, ANY_ROLE };
