/* See dispatch.h. */
#include "daemon/net/dispatch.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/daemon.h"
#include "daemon/model/model.h"
#include "proto/base/check.h"

#define ROLE(role) (1u << (role))
#define ANY_ROLE   (ROLE(WIRE_TRAINER) | ROLE(WIRE_READER) | ROLE(WIRE_ADMIN))

struct request_row {
    int (*fn)(struct op *op);
    unsigned roles; /* who may send it; 0: no session needed */
};

static const struct request_row rows[WIRE_REQUEST_TYPES] = {
    [WIRE_HELLO] = { op_hello, 0 },
    [WIRE_OPEN_MODEL] = { op_open_model, ANY_ROLE },
    [WIRE_RETURN] = { op_return_grad, ROLE(WIRE_TRAINER) },
    [WIRE_PREPARE] = { op_prepare, ROLE(WIRE_TRAINER) },
    [WIRE_COMMIT] = { op_commit, ROLE(WIRE_TRAINER) },
    [WIRE_GET_BLOB] = { op_get_blob, ANY_ROLE },
    [WIRE_DIGEST] = { op_digest, ANY_ROLE },
    [WIRE_STATUS] = { op_status, ANY_ROLE },
    [WIRE_DETACH] = { op_detach, ANY_ROLE },
    [WIRE_RESTORE] = { op_restore, ROLE(WIRE_TRAINER) | ROLE(WIRE_ADMIN) },
    [WIRE_CHECKPOINT] = { op_checkpoint, ROLE(WIRE_TRAINER) | ROLE(WIRE_ADMIN) },
    [WIRE_DRAIN] = { op_drain, ANY_ROLE },
    [WIRE_LEASE] = { op_lease, ROLE(WIRE_TRAINER) },
    [WIRE_JOIN] = { op_join, ROLE(WIRE_TRAINER) | ROLE(WIRE_READER) },
    [WIRE_FETCH] = { op_fetch, ROLE(WIRE_TRAINER) | ROLE(WIRE_READER) },
};

static int admit(struct op *op, const struct request_row *row)
{
    if (row->roles == 0 && row->fn != NULL)
        return SHD_OK;
    struct session *s = session_find(op->daemon, op->req.session, op->identity, op->identity_bytes);
    if (s == NULL)
        return err_set(&op->err, SHD_EAUTH, "no open session %016" PRIx64 " of this connection",
                       op->req.session);
    if ((row->roles & ROLE(s->role)) == 0)
        return err_set(&op->err, SHD_EAUTH, "%s is not for a %s session",
                       wire_request_name(op->req.type), session_role_name(s->role));
    if (s->ops >= SESSION_OPS_MAX)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u requests pending, the most there may be", SESSION_OPS_MAX);
    if (op->req.seq == 0)
        return err_set(&op->err, SHD_EINVAL, "requests of a session are numbered from 1");
    op->session = s;
    s->ops++;
    return SHD_OK;
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
        mailbox_repeat(op->daemon, op, frame, bytes);
        return false;
    case REPLIES_PENDING:
    case REPLIES_OLD:
        return false;
    }
    CHECK(false); /* every verdict is above */
    return false;
}

static void serve(struct op *op)
{
    const struct request_row *row = &rows[op->req.type];
    int r = admit(op, row);
    if (r == SHD_OK && !is_to_serve(op)) {
        op_drop(op);
        return;
    }
    if (r == SHD_OK)
        r = row->fn != NULL ? row->fn(op)
                            : err_set(&op->err, SHD_ENOTSUP, "%s is not built yet",
                                      wire_request_name(op->req.type));
    if (r != SHD_PENDING)
        op_finish(op, r);
}

/* Out of request slots: say so without taking one. */
static void refuse_busy(struct daemon *d, const uint8_t *identity, uint32_t identity_bytes)
{
    static struct op refused; /* loop thread only */
    refused = (struct op){ .daemon = d, .identity_bytes = identity_bytes };
    memcpy(refused.identity, identity, identity_bytes);
    refused.reply = (struct wire_reply){ .status = SHD_EBUSY,
                                         .text = "daemon is out of request slots" };
    mailbox_reply(d, &refused);
}

void dispatch_frame(struct daemon *d, const uint8_t *identity, uint32_t identity_bytes,
                    const void *frame, size_t bytes)
{
    CHECK(identity_bytes <= MAILBOX_IDENTITY_BYTES_MAX);
    struct op *op = op_take(&d->ops);
    if (op == NULL) {
        refuse_busy(d, identity, identity_bytes);
        return;
    }
    d->requests++;
    op->daemon = d;
    op->arrived_ns = uv_hrtime();
    op->identity_bytes = identity_bytes;
    memcpy(op->identity, identity, identity_bytes);
    d->mailbox.arena.used = 0;
    const int r = wire_request_unpack(frame, bytes, &d->mailbox.arena, &op->req, &op->err);
    if (r == SHD_OK) {
        serve(op);
        return;
    }
    /* An undecodable request: its sender speaks something else, or is broken. */
    d->mailbox.bad_frames++;
    struct session *s = session_by_identity(d, identity, identity_bytes);
    log_warn("op=undecodable status=%s session=%016" PRIx64 " pid=%d why=\"%s\""
             " do=\"look at that program: use libshd of this version\"",
             status_name(r), s != NULL ? s->id : 0, s != NULL ? (int)s->peer.pid : 0, op->err.text);
    op_finish(op, r);
    if (s != NULL && s->state == SESSION_OPEN)
        session_end(s, "it sent an undecodable request");
}

void dispatch_again(struct op **list)
{
    struct op *op = *list;
    *list = NULL;
    while (op != NULL) {
        struct op *next = op->next;
        op->next = NULL;
        const int r = rows[op->req.type].fn(op);
        if (r != SHD_PENDING)
            op_finish(op, r);
        op = next;
    }
}

struct wire_decision dispatch_decision(const struct step_decision *d)
{
    return (struct wire_decision){ .skip = d->skip,
                                   .scale = d->scale,
                                   .lr = d->lr,
                                   .loss_scale = d->loss_scale,
                                   .good_steps = d->good_steps };
}

int op_find_model(struct op *op, uint32_t handle)
{
    struct daemon *d = op->daemon;
    if (handle == 0 || handle > d->model_count || !d->models[handle - 1]->ready)
        return err_set(&op->err, SHD_ENOENT, "no open model with handle %" PRIu32 " here", handle);
    op->model = d->models[handle - 1];
    return SHD_OK;
}
