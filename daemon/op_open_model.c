/* OPEN_MODEL: create the model a spec describes, or attach to the one that is open.
 *
 * One at a time per daemon, in order of arrival. Happy path: copy the spec's text; parse it on
 * libuv's pool (the loop must not block); find the model or make it there too; fill in initial
 * values on the compute threads; give the session its inbox and tickets. Any failure answers the
 * request and leaves no trace.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/adopt.h"
#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "daemon/log.h"
#include "daemon/model.h"
#include "daemon/open.h"
#include "proto/check.h"
#include "proto/sys.h"

struct open_work {
    uv_work_t work;
    struct daemon *daemon;
    struct op *op; /* borrowed: pending until finish_open() */
    uint32_t spec_bytes;
    struct spec *spec;   /* owned until a model takes it */
    struct model *model; /* made or found; owned until model_start() */
    int status;
};

static void serve_next(struct daemon *d);

/* The one open request is done. */
static void finish_open(struct open_work *w, int status)
{
    struct daemon *d = w->daemon;
    struct op *op = w->op;
    spec_free(w->spec);
    free(w);
    d->opening = NULL;
    op_finish(op, status);
    serve_next(d);
}

static int add_segment(struct op *op, enum segment_kind kind, const struct segment *segment)
{
    struct wire_layout *layout = &op->reply.layout;
    const uint64_t ticket = session_ticket_new(op->session, segment->fd, kind, segment->bytes);
    if (ticket == 0)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    layout->segments[layout->segment_count++] = (struct wire_segment){ .kind = kind,
                                                                       .ticket = ticket,
                                                                       .bytes = segment->bytes };
    return SHD_OK;
}

static int make_inbox(struct op *op, struct model *m, uint32_t slots)
{
    struct session *s = op->session;
    if (s->inbox_count == SESSION_MODELS_MAX)
        return err_set(&op->err, SHD_EBUSY, "session has %u models open, the most there may be",
                       SESSION_MODELS_MAX);
    struct inbox *inbox = session_inbox(s, m);
    if (inbox != NULL && op->repeated && inbox->slots == slots) /* the reply may have been lost */
        return add_segment(op, SEGMENT_INBOX, &inbox->segment);
    if (inbox != NULL)
        return err_set(&op->err, SHD_EEXIST, "session has model '%s' open already", m->spec->name);
    inbox = sys_calloc(1, sizeof *inbox);
    if (inbox == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for an inbox");
    const int r = segment_new("shardd-inbox", SEGMENT_INBOX, shardmap_inbox_bytes(m->map, slots),
                              &inbox->segment, &op->err);
    if (r != SHD_OK) {
        free(inbox);
        return r;
    }
    inbox->model = m;
    inbox->slots = slots;
    inbox->refs = 1;
    m->inbox_bytes += inbox->segment.bytes;
    s->inboxes[s->inbox_count++] = inbox;
    return add_segment(op, SEGMENT_INBOX, &inbox->segment);
}

/* Which groups of micro-batches need no sender any more. */
static int add_groups_in(struct op *op, const struct model *m)
{
    const uint32_t groups = spec_returns(m->spec);
    const size_t bytes = (groups + 7) / 8;
    uint8_t *bits = sys_calloc(1, bytes);
    if (bits == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a layout");
    for (uint32_t g = 0; g < groups; g++)
        if (step_micro_in(m->core, g))
            bits[g / 8] |= (uint8_t)(1u << g % 8);
    op->work = bits; /* freed with the op */
    op->reply.layout.in = (struct wire_bytes){ bits, bytes };
    return SHD_OK;
}

static int attach(struct op *op, struct model *m)
{
    const uint32_t slots = op->req.open_model.slots;
    if (op->session->state != SESSION_OPEN)
        return err_set(&op->err, SHD_EGONE, "session ended");
    op->reply.type = WIRE_LAYOUT;
    op->reply.layout = (struct wire_layout){
        .model = m->handle,
        .step = step_collecting(m->core),
        .spec = { (const uint8_t *)m->spec_json, strlen(m->spec_json) },
        .owner = m->map->owner,
        .owners = m->map->owners,
        .slots = slots,
        .slot_bytes = m->map->slot_bytes,
    };
    struct step_decision last;
    if (step_last_decision(m->core, &last)) {
        op->reply.layout.has_decision = true;
        op->reply.layout.decision = dispatch_decision(&last);
    }
    int r = add_groups_in(op, m);
    if (r == SHD_OK && slots > 0)
        r = make_inbox(op, m, slots);
    if (r == SHD_OK)
        r = add_segment(op, SEGMENT_PUBLISH, &m->publish);
    if (r == SHD_OK)
        r = add_segment(op, SEGMENT_BOARD, &m->board_segment);
    return r;
}

static int check_owner(struct op *op, const struct model *m)
{
    const struct wire_open_model *req = &op->req.open_model;
    if (req->owner == m->map->owner && req->owners == m->map->owners)
        return SHD_OK;
    return err_set(&op->err, SHD_ESPEC,
                   "model '%s' is open with this daemon as owner %" PRIu32 " of %" PRIu32
                   ", asked for as owner %" PRIu32 " of %" PRIu32
                   ": attach to the same daemons in the same order",
                   m->spec->name, m->map->owner, m->map->owners, req->owner, req->owners);
}

static int attach_found(struct open_work *w, struct model *m)
{
    struct op *op = w->op;
    if (!m->ready)
        return err_set(&op->err, m->last_status == SHD_OK ? SHD_EBUSY : m->last_status,
                       "model '%s' cannot be used: %s", m->spec->name,
                       status_meaning(m->last_status));
    int r = check_owner(op, m);
    if (r == SHD_OK && w->spec != NULL)
        r = spec_compare(m->spec, w->spec, &op->err);
    return r == SHD_OK ? attach(op, m) : r;
}

void open_model_ready(struct model *m)
{
    struct open_work *w = m->daemon->opening;
    CHECK(w != NULL);
    log_info("op=open_model model=%s owner=%" PRIu32 "/%" PRIu32 " units=%" PRIu32 " elems=%" PRIu64
             " state_bytes=%" PRIu64 " status=%s",
             m->spec->name, m->map->owner, m->map->owners, m->spec->unit_count, m->map->elems,
             m->state.bytes, status_name(m->last_status));
    finish_open(w, attach_found(w, m));
}

static void make_model(uv_work_t *work)
{
    struct open_work *w = work->data;
    const struct wire_open_model *req = &w->op->req.open_model;
    w->status = model_new(w->spec, req->owner, req->owners, &w->daemon->keeper, &w->model,
                          &w->op->err);
}

static void model_made(uv_work_t *work, int cancelled)
{
    struct open_work *w = work->data;
    if (w->status == SHD_OK)
        w->spec = NULL; /* the model's now */
    if (w->status == SHD_OK && w->daemon->stopping)
        w->status = err_set(&w->op->err, SHD_EGONE, "the daemon stops");
    CHECK(cancelled == 0); /* nobody cancels */
    if (w->status != SHD_OK) {
        model_free(w->model);
        finish_open(w, w->status);
        return;
    }
    struct model *m = w->model;
    w->model = NULL;
    model_start(w->daemon, m);
}

static void parse_spec(uv_work_t *work)
{
    struct open_work *w = work->data;
    w->status = spec_parse(w->op->text, w->spec_bytes, &w->spec, &w->op->err);
}

static int no_such_model(struct op *op, const char *name)
{
    const int r = adopt_check_name(op->daemon, name, &op->err);
    if (r != SHD_OK)
        return r;
    if (name[0] == '\0')
        return err_set(&op->err, SHD_ENOENT, "daemon %s has %" PRIu32 " models: name one",
                       op->daemon->device, op->daemon->model_count);
    return err_set(&op->err, SHD_ENOENT, "daemon %s has no model '%s'", op->daemon->device, name);
}

static void spec_parsed(uv_work_t *work, int cancelled)
{
    struct open_work *w = work->data;
    struct daemon *d = w->daemon;
    CHECK(cancelled == 0); /* nobody cancels */
    if (w->status == SHD_OK && d->stopping)
        w->status = err_set(&w->op->err, SHD_EGONE, "the daemon stops");
    if (w->status != SHD_OK) {
        finish_open(w, w->status);
        return;
    }
    struct model *m = model_find(d, w->spec->name);
    if (m != NULL)
        finish_open(w, attach_found(w, m));
    else if ((w->status = adopt_check_name(d, w->spec->name, &w->op->err)) != SHD_OK)
        finish_open(w, w->status);
    else if (d->model_count == DAEMON_MODELS_MAX)
        finish_open(w, err_set(&w->op->err, SHD_EBUSY,
                               "daemon %s has %u models, the most there may be", d->device,
                               DAEMON_MODELS_MAX));
    else
        uv_queue_work(&d->loop, &w->work, make_model, model_made);
}

static void serve_next(struct daemon *d)
{
    struct op *op = d->open_first;
    if (op == NULL || d->opening != NULL)
        return;
    d->open_first = op->next;
    if (d->open_first == NULL)
        d->open_last = &d->open_first;
    op->next = NULL;
    struct open_work *w = sys_calloc(1, sizeof *w);
    if (w == NULL) {
        op_finish(op, err_set(&op->err, SHD_ENOMEM, "no memory to open a model"));
        serve_next(d);
        return;
    }
    d->opening = w;
    w->daemon = d;
    w->op = op;
    w->work.data = w;
    w->spec_bytes = (uint32_t)op->req.open_model.spec.bytes;
    if (w->spec_bytes > 0) {
        uv_queue_work(&d->loop, &w->work, parse_spec, spec_parsed);
        return;
    }
    const char *name = op->text;
    struct model *m = model_find(d, name);
    finish_open(w, m != NULL ? attach_found(w, m) : no_such_model(op, name));
}

int op_open_model(struct op *op)
{
    struct daemon *d = op->daemon;
    const struct wire_open_model *req = &op->req.open_model;
    const bool attach_only = req->spec.bytes == 0;
    const size_t bytes = attach_only ? strlen(req->name) : req->spec.bytes;
    op->text = sys_malloc(bytes + 1);
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a spec of %zu bytes", bytes);
    memcpy(op->text, attach_only ? req->name : (const char *)req->spec.data, bytes);
    op->text[bytes] = '\0';
    op->next = NULL;
    *d->open_last = op;
    d->open_last = &op->next;
    serve_next(d);
    return SHD_PENDING;
}

void open_model_abandon(struct daemon *d)
{
    struct open_work *w = d->opening;
    if (w == NULL)
        return;
    model_free(w->model);
    spec_free(w->spec);
    free(w);
    d->opening = NULL;
}
