/* See drop.h. */
#include "daemon/model/drop.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/core/presence.h"
#include "daemon/core/step.h"
#include "daemon/model/adopt.h"
#include "daemon/model/capture.h"
#include "daemon/model/create.h"
#include "daemon/model/drain.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/moved.h"
#include "daemon/model/open.h"
#include "daemon/model/put.h"
#include "daemon/model/remains.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/wire/wire.h"

#define BY_BYTES 64u

struct drop {
    struct drop *next;
    struct daemon *daemon;          /* borrowed */
    struct model *model;            /* borrowed while it is held; NULL: it is gone */
    struct remains *remains;        /* owned: of what is gone */
    uint64_t session;               /* that holds it; 0: none */
    struct op *waits;               /* requests, until the memory is given back */
    char name[WIRE_NAME_BYTES_MAX]; /* of the model */
    char by[BY_BYTES];              /* who asks */
};

/* -- The list -----------------------------------------------------------------------------------
 */

static struct drop *add(struct daemon *d, struct model *m, const struct session *s)
{
    struct drop *drop = sys_calloc(1, sizeof *drop);
    if (drop == NULL)
        return NULL;
    drop->daemon = d;
    drop->model = m;
    drop->session = s->id;
    memcpy(drop->name, m->ledger->head->name, strlen(m->ledger->head->name) + 1);
    snprintf(drop->by, sizeof drop->by, "%.40s (pid %d)", s->name, (int)s->pid);
    drop->next = d->open->drops;
    d->open->drops = drop;
    m->use.drop = drop;
    return drop;
}

static void take_out(struct drop *drop)
{
    struct drop **at = &drop->daemon->open->drops;
    while (*at != drop)
        at = &(*at)->next;
    *at = drop->next;
}

/* The model may be opened again. */
static void let_go(struct drop *drop)
{
    drop->model->use.drop = NULL;
    take_out(drop);
    free(drop);
}

static bool is_held_by(const struct model *m, const struct session *s)
{
    return m->use.drop != NULL && m->use.drop->session == s->id;
}

/* -- Answers ------------------------------------------------------------------------------------
 */

static int answer(struct op *op, enum wire_dropped_what what)
{
    op->reply.type = WIRE_DROPPED;
    op->reply.dropped = (struct wire_dropped){ .what = what, .near = "" };
    return SHD_OK;
}

static int answer_none(struct op *op, bool forgot)
{
    const struct daemon *d = op->daemon;
    const char *names[DAEMON_MODELS_MAX];
    for (uint32_t i = 0; i < d->model_count; i++)
        names[i] = d->models[i]->ledger->head->name;
    answer(op, WIRE_DROPPED_NONE);
    op->reply.dropped.instance = forgot;
    op->text = sys_malloc(WIRE_NAME_BYTES_MAX);
    if (op->text == NULL || d->model_count == 0)
        return SHD_OK;
    op->reply.dropped.near = suggest(op->req.drop.name, names, d->model_count, "", op->text,
                                     WIRE_NAME_BYTES_MAX);
    return SHD_OK;
}

int drop_ask_again(struct op *op)
{
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY, "daemon %s is at it: ask again", op->daemon->device);
}

static int held(struct op *op, const struct model *m)
{
    return err_set(&op->err, SHD_EBUSY, "model '%s' is being dropped by %s", m->ledger->head->name,
                   m->use.drop->by);
}

/* -- Holding ------------------------------------------------------------------------------------
 */

static int check_owner(struct op *op, const struct model *m)
{
    const struct wire_drop *req = &op->req.drop;
    if (req->owner == m->ledger->head->owner && req->owners == m->ledger->head->owners)
        return SHD_OK;
    return err_set(&op->err, SHD_ESPEC,
                   "model '%s' is open with this daemon as owner %" PRIu32 " of %" PRIu32
                   ", and is to be dropped as owner %" PRIu32 " of %" PRIu32
                   ": name the daemons that have it, in their order",
                   m->ledger->head->name, m->ledger->head->owner, m->ledger->head->owners,
                   req->owner, req->owners);
}

/* A request of another session that is to come to its end. */
static const struct op *find_user(const struct op *op, const struct model *m)
{
    const struct op_pool *ops = op->daemon->ops;
    for (uint32_t i = 0; i < ops->made; i++) {
        const struct op *other = &ops->items[i];
        if (other->serial != 0 && other->model == m && other->session != op->session &&
            (other->req.type == WIRE_CHECKPOINT || other->req.type == WIRE_DIGEST))
            return other;
    }
    return NULL;
}

/* A session that trains another model, and has this one open, or had. */
static const struct session *find_reader(const struct op *op, const struct model *m)
{
    const struct session_table *table = op->daemon->sessions;
    for (uint32_t i = 0; i < table->made; i++) {
        const struct session *s = &table->items[i];
        if (s->state == SESSION_OPEN && s != op->session && s->inbox_count > 0 &&
            session_has_opened(s, model_place(m->handle)))
            return s;
    }
    return NULL;
}

static int check_unused(struct op *op, const struct model *m)
{
    char names[170];
    const uint64_t step = step_now(m->core);
    if (inbox_name_trainers(m, /* but= */ op->session, names, sizeof names) > 0)
        return err_set(&op->err, SHD_EBUSY,
                       "model '%s' is at step %" PRIu64 " and being trained by %s: end them first",
                       m->ledger->head->name, step, names);
    const struct session *reader = find_reader(op, m);
    if (reader != NULL)
        return err_set(&op->err, SHD_EBUSY,
                       "model '%s' is read by %.60s (pid %d), which trains another one and would "
                       "end: end it first",
                       m->ledger->head->name, reader->name, (int)reader->pid);
    const struct op *user = find_user(op, m);
    if (user == NULL)
        return SHD_OK;
    return err_set(
        &op->err, SHD_EBUSY, "model '%s' is at step %" PRIu64 " and being %s by %.60s (pid %d)",
        m->ledger->head->name, step, user->req.type == WIRE_DIGEST ? "digested" : "saved",
        user->session->name, (int)user->session->pid);
}

static const struct shd_err *say_dropped(const struct model *m, const struct drop *drop,
                                         struct shd_err *why)
{
    err_set(why, SHD_ENOENT, "model '%.40s' was dropped by %s", m->ledger->head->name, drop->by);
    return why;
}

/* Sessions that have m open, but the one that drops it; trainers: those with gradient slots. */
static void dismiss(const struct model *m, const struct drop *drop, bool trainers,
                    const struct shd_err *why)
{
    struct daemon *d = m->daemon;
    const uint32_t place = model_place(m->handle);
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        struct session *s = &d->sessions->items[i];
        if (s->state == SESSION_OPEN && s->id != drop->session &&
            (inbox_of(s, m) != NULL || (!trainers && session_has_opened(s, place))))
            session_dismiss(s, why);
    }
}

static int answer_held(struct op *op, const struct model *m)
{
    answer(op, WIRE_DROPPED_HELD);
    op->reply.dropped.instance = m->kept.instance;
    op->reply.dropped.first = drop_first(m);
    op->reply.dropped.step = step_now(m->core);
    return SHD_OK;
}

/* Nobody has it open. A session that makes it is in the way. */
static int hold_none(struct op *op, const char *name)
{
    struct daemon *d = op->daemon;
    if (d->open->making != NULL && strcmp(d->open->making, name) == 0)
        return drop_ask_again(op);
    const int r = adopt_check_name(d, name, &op->err);
    return r == SHD_OK ? create_give_way(op, name) : r;
}

static int hold(struct op *op)
{
    const struct wire_drop *req = &op->req.drop;
    struct model *m = model_find(op->daemon, req->name);
    struct shd_err why;
    if (m == NULL) {
        const int r = hold_none(op, req->name);
        return r == SHD_OK ? answer_none(op, moved_forget(op->daemon, req->name)) : r;
    }
    int r = check_owner(op, m);
    if (r == SHD_OK && m->use.drop != NULL)
        return is_held_by(m, op->session) ? answer_held(op, m) : held(op, m);
    if (r == SHD_OK && !req->force)
        r = check_unused(op, m);
    if (r != SHD_OK)
        return r;
    struct drop *drop = add(op->daemon, m, op->session);
    if (drop == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to drop a model");
    presence_hold(m->ledger->head, req->first, req->twin);
    if (!moved_by(m, drop->session)) /* else they train on until it is gone */
        dismiss(m, drop, /* trainers= */ true, say_dropped(m, drop, &why));
    return answer_held(op, m);
}

/* -- Gone ---------------------------------------------------------------------------------------
 */

/* Its memory is given back. */
static void taken_apart(void *ctx)
{
    struct drop *drop = ctx;
    log_info("op=dropped model=%s by=\"%s\"", drop->name, drop->by);
    drop->remains = NULL;
    take_out(drop);
    while (drop->waits != NULL) {
        struct op *op = drop->waits;
        drop->waits = op->next;
        op->next = NULL;
        op_finish(op, answer(op, WIRE_DROPPED_GONE));
    }
    free(drop);
}

/* The session that asked may have opened it, and closed it again; it goes on. */
static void forget(struct session *s, struct model *m, uint32_t place)
{
    struct daemon *d = m->daemon;
    const struct inbox *inbox = inbox_of(s, m);
    if (inbox != NULL)
        session_ticket_forget(d, s->id, inbox->segment.fd);
    session_ticket_forget(d, s->id, m->publish.fd);
    session_ticket_forget(d, s->id, m->board_segment.fd);
    session_ticket_forget(d, s->id, m->json.segment.fd);
    put_unclaim(m);
    capture_forget_session(m, s);
    links_let_go(s, m);
    inbox_let_go(s, m);
    session_closed(s, place);
}

/* by: of the request that has it dropped; it may have opened it as well. */
static int carry_out(struct drop *drop, struct session *by)
{
    struct model *m = drop->model;
    struct daemon *d = drop->daemon;
    const uint32_t place = model_place(m->handle);
    struct shd_err why;
    drop->remains = remains_new(m, taken_apart, drop);
    if (drop->remains == NULL)
        return SHD_ENOMEM;
    if (!moved_away(m, by, &why))
        say_dropped(m, drop, &why);
    FAIL_POINT("drop:gone:before");
    log_info("op=drop model=%s owner=%" PRIu32 "/%" PRIu32 " step=%" PRIu64 " by=\"%s\"",
             m->ledger->head->name, m->ledger->head->owner, m->ledger->head->owners,
             step_now(m->core), drop->by);
    presence_end(m->ledger->head); /* for a successor, too */
    FAIL_POINT("drop:gone:after");
    m->ready = false;
    m->last_status = SHD_ENOENT;
    model_refuse(m, &why);
    drop->session = by->id;
    dismiss(m, drop, /* trainers= */ false, &why);
    drop->session = 0;
    forget(by, m, place);
    model_unregister(m);
    drop->model = NULL;
    m->use.drop = NULL;
    drain_look(d);
    return SHD_OK;
}

/* Whether op may drop m, which its session does not hold: owner 0 has dropped its part, this
 * process or a predecessor was told so beforehand. */
static bool is_dropped_elsewhere(const struct op *op, const struct model *m)
{
    return m->use.drop == NULL && presence_goes_with(m->ledger->head, op->req.drop.first);
}

static int go(struct op *op)
{
    struct daemon *d = op->daemon;
    struct model *m = model_find(d, op->req.drop.name);
    if (m == NULL) {
        create_gone(d, op->req.drop.name, op->req.drop.first);
        return answer(op, WIRE_DROPPED_GONE);
    }
    const int r = check_owner(op, m);
    if (r != SHD_OK)
        return r;
    struct drop *drop = m->use.drop;
    if (is_dropped_elsewhere(op, m))
        drop = add(d, m, op->session);
    else if (!is_held_by(m, op->session))
        return answer(op, WIRE_DROPPED_KEPT); /* not any more: the process is another one */
    if (drop == NULL || carry_out(drop, op->session) != SHD_OK)
        return err_set(&op->err, SHD_ENOMEM, "no memory to drop a model");
    return answer(op, WIRE_DROPPED_GONE);
}

static int undo(struct op *op)
{
    const struct model *m = model_find(op->daemon, op->req.drop.name);
    if (m != NULL && is_held_by(m, op->session))
        let_go(m->use.drop);
    return answer(op, WIRE_DROPPED_KEPT);
}

static int wait_for_memory(struct op *op)
{
    for (struct drop *drop = op->daemon->open->drops; drop != NULL; drop = drop->next) {
        if (drop->remains == NULL || strcmp(drop->name, op->req.drop.name) != 0)
            continue;
        op->next = drop->waits;
        drop->waits = op;
        return SHD_PENDING;
    }
    return answer(op, WIRE_DROPPED_GONE);
}

int drop_ask(struct op *op)
{
    const struct wire_drop *req = &op->req.drop;
    if (req->name[0] == '\0')
        return err_set(&op->err, SHD_EINVAL, "a model without a name cannot be dropped");
    switch (req->what) {
    case WIRE_DROP_HOLD:
        return hold(op);
    case WIRE_DROP_GO:
        return go(op);
    case WIRE_DROP_UNDO:
        return undo(op);
    case WIRE_DROP_WAIT:
        return wait_for_memory(op);
    }
    return err_set(&op->err, SHD_EINVAL, "a drop of kind %d", (int)req->what);
}

/* -- Opening what was to be dropped -------------------------------------------------------------
 */

static int drop_here(struct op *op, struct model *m)
{
    struct drop *drop = add(op->daemon, m, op->session);
    if (drop == NULL || carry_out(drop, op->session) != SHD_OK)
        return err_set(&op->err, SHD_ENOMEM, "no memory to drop a model");
    return SHD_OK;
}

int drop_settle(struct op *op, const char *name)
{
    const struct wire_open_model *req = &op->req.open_model;
    struct model *m = model_find(op->daemon, name);
    if (m == NULL)
        return SHD_OK;
    if (m->use.drop != NULL)
        return moved_by(m, m->use.drop->session) ? drop_ask_again(op) : held(op, m);
    const struct presence_word word = { .first = req->first, .own = op_asks_first(op) };
    const enum presence_told told = presence_hear(m->ledger->head, &word);
    if (told == PRESENCE_KEEP)
        return SHD_OK;
    if (told == PRESENCE_ASK && (req->settled || op->session->said.level < WIRE_LEVEL_STATES))
        return err_set(
            &op->err, SHD_ENOTSUP,
            "somebody began to drop model '%s', and whether owner 0 has it still is told "
            "by builds of this version alone: upgrade the library, and all daemons",
            m->ledger->head->name);
    return told == PRESENCE_ASK ? drop_ask_again(op) : drop_here(op, m);
}

void drop_opened(const struct op *op, struct model *m)
{
    if (op->req.open_model.twin)
        presence_twin(m->ledger->head, op->req.open_model.first);
}

uint64_t drop_first(const struct model *m)
{
    return presence_first(m->ledger->head);
}

void drop_orphan(struct op *op, const char *name)
{
    struct model *m = model_find(op->daemon, name);
    if (m != NULL && name[0] != '\0' && m->use.drop == NULL &&
        atomic_load(&m->ledger->head->first) != 0)
        drop_here(op, m); /* else it is in the way, and says so */
}

/* -- Ends ---------------------------------------------------------------------------------------
 */

void drop_forget_session(struct daemon *d, const struct session *s)
{
    for (struct drop *drop = d->open->drops, *next; drop != NULL; drop = next) {
        next = drop->next;
        for (struct op **at = &drop->waits; *at != NULL;) {
            struct op *op = *at;
            if (op->session != s) {
                at = &op->next;
                continue;
            }
            *at = op->next;
            op->next = NULL;
            op_finish(op, err_set(&op->err, SHD_EGONE, "session ended"));
        }
        if (drop->remains == NULL && drop->session == s->id)
            let_go(drop);
    }
}

void drop_abandon(struct daemon *d)
{
    while (d->open->drops != NULL) {
        struct drop *drop = d->open->drops;
        d->open->drops = drop->next;
        remains_free(drop->remains);
        free(drop);
    }
}
