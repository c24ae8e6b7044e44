/* See open.h. */
#include "daemon/model/open.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/step.h"
#include "daemon/model/adopt.h"
#include "daemon/model/create.h"
#include "daemon/model/drop.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"

struct open_work {
    uv_work_t work;
    struct daemon *daemon;
    struct op *op;            /* borrowed: pending until finish_open() */
    struct spec *spec;        /* owned until a model takes it */
    struct model *model;      /* made; owned until it is filled */
    struct model_maker maker; /* of a model that is made */
    bool same;                /* the request's spec is found's, to the byte: it was not parsed */
    struct inbox *inbox;      /* made; owned until the session has it */
    int status;
};

static void serve_next(struct daemon *d);

/* The one open request is done. */
static void finish_open(struct open_work *w, int status)
{
    struct daemon *d = w->daemon;
    struct op *op = w->op;
    if (w->inbox != NULL)
        inbox_unref(w->inbox);
    spec_free(w->spec);
    free(w);
    d->open->work = NULL;
    d->open->found = NULL;
    op_finish(op, status);
    serve_next(d);
}

/* Not for one that has hung up: it was told that others have refused, or has died. */
static int check_session(struct open_work *w)
{
    if (w->daemon->stopping)
        return err_set(&w->op->err, SHD_EGONE, "the daemon stops");
    if (!session_is_there(w->op->session))
        return err_set(&w->op->err, SHD_EGONE, "session ended");
    return SHD_OK;
}

/* Who asks again has given up what it was answered before. */
static int add_segment(struct op *op, enum segment_kind kind, const struct segment *segment)
{
    struct wire_layout *layout = &op->reply.layout;
    session_ticket_forget(op->daemon, op->session->id, segment->fd);
    const uint64_t ticket = session_ticket_new(op->session, segment->fd, kind, segment->bytes);
    if (ticket == 0)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    layout->segments[layout->segment_count++] = (struct wire_segment){
        .kind = kind, .ticket = ticket, .bytes = segment->bytes, .place = segment->place
    };
    return SHD_OK;
}

/* Whether the session can have an inbox. *ret_needed: one must be made. */
static int check_inbox(struct op *op, const struct model *m, bool *ret_needed)
{
    struct session *s = op->session;
    const uint32_t slots = op->req.open_model.slots;
    *ret_needed = false;
    if (slots == 0)
        return SHD_OK;
    if (s->role == WIRE_READER)
        return err_set(&op->err, SHD_EAUTH, "a reader session returns no gradients: no slots");
    if (s->inbox_count == SESSION_MODELS_MAX)
        return err_set(&op->err, SHD_EBUSY, "session has %u models open, the most there may be",
                       SESSION_MODELS_MAX);
    const struct inbox *inbox = inbox_of(s, m);
    if (inbox != NULL && op->repeated && inbox->slots == slots) /* the reply may have been lost */
        return SHD_OK;
    if (inbox != NULL)
        return err_set(&op->err, SHD_EEXIST, "session has model '%s' open already", m->spec->name);
    *ret_needed = true;
    return SHD_OK;
}

/* Two workers with one rank do the same micro-batches, and rank 1's may be done by nobody. A
 * session of the same process is no other worker, one whose process has died is none; of another
 * namespace's processes the pid is not known. */
static void look_for_twin(struct op *op, const struct model *m)
{
    const struct session *s = op->session;
    for (uint32_t i = 0; s->rank > 0 && i < op->daemon->sessions->made; i++) {
        const struct session *other = &op->daemon->sessions->items[i];
        if (other == s || other->state != SESSION_OPEN || other->rank != s->rank ||
            (other->pid == s->pid && s->pid > 0) || inbox_of(other, m) == NULL)
            continue;
        log_warn("op=open_model model=%s name=%s pid=%d why=\"it has RANK %" PRIu32
                 ", and so has %s (pid %d): both do the same work, and another rank's may be done "
                 "by nobody\" do=\"end one of them, or give each worker a RANK of its own\"",
                 m->spec->name, s->name, (int)s->pid, s->rank - 1, other->name, (int)other->pid);
        op->reply.layout.twin_pid = (uint32_t)other->pid;
        return;
    }
}

/* The new inbox, if any, becomes the session's. */
static int add_inbox(struct open_work *w, struct model *m)
{
    struct session *s = w->op->session;
    if (w->inbox != NULL) {
        s->inboxes[s->inbox_count++] = w->inbox;
        w->inbox = NULL;
        look_for_twin(w->op, m);
    }
    const struct inbox *inbox = inbox_of(s, m);
    const int r = add_segment(w->op, SEGMENT_INBOX, &inbox->segment);
    return r == SHD_OK && inbox->activity.base != NULL
               ? add_segment(w->op, SEGMENT_ACTIVITY, &inbox->activity)
               : r;
}

/* A bit for each group of micro-batches that needs no sender any more. */
static int add_groups_in(struct op *op, const struct model *m)
{
    const uint32_t groups = step_returns(m->core);
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

/* The device that the memory is of; empty for the host's. */
static struct wire_bytes device_of(const struct model *m)
{
    const struct kern_ops *ops = m->kern->ops;
    if (ops->place == SEGMENT_HOST)
        return (struct wire_bytes){ 0 };
    return (struct wire_bytes){ ops->uuid, sizeof ops->uuid };
}

static int attach(struct open_work *w, struct model *m)
{
    struct op *op = w->op;
    const uint32_t slots = op->req.open_model.slots;
    const bool apart = m->json.segment.fd >= 0;
    op->reply.type = WIRE_LAYOUT;
    op->reply.layout = (struct wire_layout){
        .model = m->handle,
        .step = step_collecting(m->core),
        .spec = { (const uint8_t *)m->json.text, apart ? 0 : m->json.bytes },
        .spec_bytes = apart ? m->json.bytes : 0,
        .owner = m->map->owner,
        .owners = m->map->owners,
        .slots = slots,
        .slot_bytes = m->map->slot_bytes,
        .device = device_of(m),
        .origin = create_origin(m),
        .restore_id = model_restore_id(m),
        .attempt = step_attempt(m->core),
        .one_count = model_one_count(m),
        .instance = m->kept.instance,
        .guard_back = model_gone_back(m),
        .room = model_room(m),
        .first = drop_first(m),
    };
    drop_opened(op, m);
    session_opened(op->session, model_place(m->handle));
    struct decision last;
    if (step_last_decision(m->core, &last)) {
        op->reply.layout.has_decision = true;
        op->reply.layout.decision = last;
    }
    int r = add_groups_in(op, m);
    if (r == SHD_OK && slots > 0)
        r = add_inbox(w, m);
    if (r == SHD_OK)
        r = add_segment(op, SEGMENT_PUBLISH, &m->publish);
    if (r == SHD_OK)
        r = add_segment(op, SEGMENT_BOARD, &m->board_segment);
    if (r == SHD_OK && apart)
        r = add_segment(op, SEGMENT_SPEC, &m->json.segment);
    return r;
}

static struct moved_seat seat_of(const struct op *op)
{
    return (struct moved_seat){ op->req.open_model.owner, op->req.open_model.owners };
}

static int check_owner(struct op *op, const struct model *m)
{
    const struct wire_open_model *req = &op->req.open_model;
    const struct moved_asked asked = { seat_of(op), /* here= */ true };
    if (req->owner == m->map->owner && req->owners == m->map->owners)
        return SHD_OK;
    if (moved_check(op->daemon, m->spec->name, &asked, &op->err) != SHD_OK)
        return SHD_EMOVED; /* where it is now, this daemon is an owner as well */
    return err_set(&op->err, SHD_ESPEC,
                   "model '%s' is open with this daemon as owner %" PRIu32 " of %" PRIu32
                   ", asked for as owner %" PRIu32 " of %" PRIu32
                   ": attach to the same daemons in the same order",
                   m->spec->name, m->map->owner, m->map->owners, req->owner, req->owners);
}

static int check_found(struct open_work *w, const struct model *m)
{
    struct op *op = w->op;
    if (!m->ready)
        return err_set(&op->err, m->last_status == SHD_OK ? SHD_EBUSY : m->last_status,
                       "model '%s' cannot be used: %s", m->spec->name,
                       status_meaning(m->last_status));
    const int r = check_owner(op, m);
    if (r == SHD_OK && m->json.segment.fd >= 0 && op->session->said.level < WIRE_LEVEL_SPECS)
        return err_set(&op->err, SHD_ENOTSUP,
                       "model '%s' has a spec of %" PRIu64 " bytes, messages hold %zu, and this "
                       "client's library knows no other way: use one of this version",
                       m->spec->name, m->json.bytes, SPEC_MESSAGE_BYTES_MAX);
    return r == SHD_OK && w->spec != NULL ? spec_compare(m->spec, w->spec, &op->err) : r;
}

static void make_inbox(uv_work_t *work)
{
    struct open_work *w = work->data;
    struct model *found = w->daemon->open->found;
    w->status = inbox_new(found, w->op->req.open_model.slots, &w->inbox, &w->op->err);
}

static void inbox_made(uv_work_t *work, int cancelled)
{
    struct open_work *w = work->data;
    struct op *op = w->op;
    struct model *found = w->daemon->open->found;
    bool needed;
    CHECK(cancelled == 0); /* nobody cancels */
    if (w->inbox != NULL)
        inbox_count(w->inbox);
    if (w->status == SHD_OK)
        w->status = check_session(w);
    if (w->status == SHD_OK)
        w->status = check_found(w, found); /* it may have failed meanwhile, or be dropped */
    if (w->status == SHD_OK)
        w->status = check_inbox(op, found, &needed);
    finish_open(w, w->status == SHD_OK ? attach(w, found) : w->status);
}

/* Attach the session and answer; with slots once the inbox is there. */
static void attach_found(struct open_work *w, struct model *m)
{
    struct op *op = w->op;
    bool needed = false;
    int r = check_found(w, m);
    if (r == SHD_OK && op->session->state != SESSION_OPEN)
        r = err_set(&op->err, SHD_EGONE, "session ended");
    if (r == SHD_OK)
        r = check_inbox(op, m, &needed);
    if (r != SHD_OK || !needed) {
        finish_open(w, r == SHD_OK ? attach(w, m) : r);
        return;
    }
    w->daemon->open->found = m;
    uv_queue_work(w->daemon->loop, &w->work, make_inbox, inbox_made);
}

static void free_model(uv_work_t *work)
{
    struct open_work *w = work->data;
    model_free(w->model);
    w->model = NULL;
}

static void model_freed(uv_work_t *work, int cancelled)
{
    struct open_work *w = work->data;
    CHECK(cancelled == 0); /* nobody cancels */
    finish_open(w, w->status);
}

/* Nobody gets the model, which is freed on the pool: to unmap what is large takes its time. */
static void drop_model(struct open_work *w, struct model *m)
{
    w->daemon->open->making = NULL;
    w->daemon->open->filling = NULL;
    w->model = m;
    uv_queue_work(w->daemon->loop, &w->work, free_model, model_freed);
}

/* The initial values of the model that is made are in, or cannot be. */
static void model_filled(struct model *m)
{
    struct open_work *w = m->daemon->open->work;
    CHECK(w != NULL);
    w->status = check_session(w);
    if (w->status != SHD_OK) {
        log_warn(
            "op=open_model model=%s why=\"dropped: %s\" do=\"nothing: whoever opens it makes it "
            "again\"",
            m->spec->name, w->op->err.text);
        drop_model(w, m);
        return;
    }
    w->daemon->open->making = NULL;
    w->daemon->open->filling = NULL;
    model_begin(w->daemon, m);
    log_info("op=open_model model=%s owner=%" PRIu32 "/%" PRIu32 " units=%" PRIu32 " elems=%" PRIu64
             " state_bytes=%" PRIu64 " status=%s",
             m->spec->name, m->map->owner, m->map->owners, m->spec->unit_count, m->map->elems,
             m->state.bytes, status_name(m->last_status));
    attach_found(w, m);
}

static void make_model(uv_work_t *work)
{
    struct open_work *w = work->data;
    const struct wire_open_model *req = &w->op->req.open_model;
    const struct model_home home = { .kern = w->daemon->kern,
                                     .keeper = w->daemon->keeper,
                                     .owner = req->owner,
                                     .owners = req->owners,
                                     .one_count = req->one_count,
                                     .quota = w->daemon->quota,
                                     .maker = w->maker };
    w->status = model_new(w->spec, &home, &w->model, &w->op->err);
}

static void model_made(uv_work_t *work, int cancelled)
{
    struct open_work *w = work->data;
    CHECK(cancelled == 0); /* nobody cancels */
    if (w->status != SHD_OK) {
        w->daemon->open->making = NULL;
        finish_open(w, w->status);
        return;
    }
    struct model *m = w->model;
    w->spec = NULL; /* the model's now */
    w->model = NULL;
    w->status = check_session(w);
    if (w->status != SHD_OK) {
        drop_model(w, m);
        return;
    }
    w->daemon->open->filling = m;
    model_fill(w->daemon, m, model_filled);
}

/* An open model whose spec has as many bytes as the request's: most who open it send the same. */
static struct model *find_likely(const struct daemon *d, const struct op *op)
{
    for (uint32_t i = 0; i < d->model_count; i++)
        if (d->models[i]->json.bytes == op->spec_bytes)
            return d->models[i];
    return NULL;
}

/* On the pool; a model's text never changes. */
static void parse_spec(uv_work_t *work)
{
    struct open_work *w = work->data;
    const struct model *found = w->daemon->open->found;
    w->status = SHD_OK;
    w->same = found != NULL && memcmp(found->json.text, w->op->spec, w->op->spec_bytes) == 0;
    if (!w->same)
        w->status = spec_parse(w->op->spec, w->op->spec_bytes, &w->spec, &w->op->err);
}

static int name_one(const struct daemon *d, struct shd_err *e)
{
    char names[120] = "";
    if (d->model_count == 0)
        return err_set(e, SHD_ENOENT,
                       "daemon %s has no model: a worker makes one, or shardctl restore",
                       d->device);
    for (uint32_t i = 0; i < d->model_count; i++) {
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "",
                 d->models[i]->spec->name);
    }
    return err_set(e, SHD_ENOENT, "daemon %s has %" PRIu32 " models, name one: %s", d->device,
                   d->model_count, names);
}

static int no_such_model(struct op *op, const char *name)
{
    const struct moved_asked asked = { .seat = seat_of(op) };
    if (name[0] == '\0' && op->daemon->model_count > 0)
        return name_one(op->daemon, &op->err);
    int r = adopt_check_name(op->daemon, name, &op->err);
    if (r == SHD_OK)
        r = moved_check(op->daemon, name, &asked, &op->err);
    if (r != SHD_OK)
        return r;
    if (name[0] == '\0')
        return name_one(op->daemon, &op->err);
    return err_set(&op->err, SHD_ENOENT, "daemon %s has no model '%s'", op->daemon->device, name);
}

/* Whom the model that is to be made counts for. */
static int take_maker(struct open_work *w)
{
    w->maker.known = true;
    return session_user(w->op->session, &w->maker.uid, &w->maker.gid, &w->op->err);
}

static void begin_making(struct open_work *w)
{
    struct daemon *d = w->op->daemon;
    CHECK(!w->same); /* it is open */
    w->status = take_maker(w);
    if (w->status != SHD_OK) {
        finish_open(w, w->status);
        return;
    }
    d->open->making = w->spec->name;
    uv_queue_work(d->loop, &w->work, make_model, model_made);
}

/* None of this name is open: may one be made? */
static int check_new(struct op *op, const char *name)
{
    const int r = adopt_check_name(op->daemon, name, &op->err);
    return r == SHD_OK ? create_check_name(op, name, seat_of(op)) : r;
}

static void spec_parsed(uv_work_t *work, int cancelled)
{
    struct open_work *w = work->data;
    struct daemon *d = w->daemon;
    CHECK(cancelled == 0); /* nobody cancels */
    if (w->status == SHD_OK)
        w->status = check_session(w);
    if (w->status != SHD_OK) {
        finish_open(w, w->status);
        return;
    }
    const char *name = w->same ? d->open->found->spec->name : w->spec->name;
    w->status = create_settle(w->op, name);
    if (w->status == SHD_OK)
        w->status = drop_settle(w->op, name);
    struct model *m = w->status == SHD_OK ? model_find(d, name) : NULL;
    if (w->status == SHD_OK && m == NULL && w->same) /* it was dropped: the spec is to be parsed */
        w->status = drop_ask_again(w->op);
    if (m != NULL)
        attach_found(w, m);
    else if (w->status != SHD_OK || (w->status = check_new(w->op, name)) != SHD_OK)
        finish_open(w, w->status);
    else if (w->op->session->role == WIRE_READER)
        finish_open(w, err_set(&w->op->err, SHD_ENOENT,
                               "daemon %s has no model '%.100s', and a reader session makes none",
                               d->device, name));
    else if (!create_has_room(d))
        finish_open(w, err_set(&w->op->err, SHD_EBUSY,
                               "daemon %s has %u models, the most there may be", d->device,
                               DAEMON_MODELS_MAX));
    else
        begin_making(w);
}

static void serve_next(struct daemon *d)
{
    struct op *op = d->open->first;
    if (op == NULL || d->open->work != NULL)
        return;
    d->open->first = op->next;
    if (d->open->first == NULL)
        d->open->last = &d->open->first;
    op->next = NULL;
    struct open_work *w = sys_calloc(1, sizeof *w);
    if (w == NULL) {
        op_finish(op, err_set(&op->err, SHD_ENOMEM, "no memory to open a model"));
        serve_next(d);
        return;
    }
    d->open->work = w;
    w->daemon = d;
    w->op = op;
    w->work.data = w;
    if (op->spec != NULL) {
        d->open->found = find_likely(d, op);
        uv_queue_work(d->loop, &w->work, parse_spec, spec_parsed);
        return;
    }
    w->status = check_session(w);
    if (w->status != SHD_OK) {
        finish_open(w, w->status);
        return;
    }
    const char *name = op->text;
    w->status = create_settle(op, name);
    if (w->status == SHD_OK)
        w->status = drop_settle(op, name);
    struct model *m = w->status == SHD_OK ? model_find(d, name) : NULL;
    if (m != NULL)
        attach_found(w, m);
    else
        finish_open(w, w->status == SHD_OK ? no_such_model(op, name) : w->status);
}

void open_model(struct op *op)
{
    struct daemon *d = op->daemon;
    struct session *s = op->session;
    if (op->req.open_model.spec_apart && s->said.level < WIRE_LEVEL_SPECS)
        s->said.level = WIRE_LEVEL_SPECS; /* of a build that has no other way to say so */
    if (s->said.level < WIRE_LEVEL_COUNTS)
        op->req.open_model.one_count = true; /* it does not say what the other owners are of */
    op->next = NULL;
    *d->open->last = op;
    d->open->last = &op->next;
    serve_next(d);
}

void open_model_abandon(struct daemon *d)
{
    struct open_work *w = d->open->work;
    model_free(d->open->filling);
    d->open->filling = NULL;
    if (w == NULL)
        return;
    CHECK(w->inbox == NULL); /* the pool's work has been heard of */
    model_free(w->model);
    spec_free(w->spec);
    free(w);
    d->open->work = NULL;
}
