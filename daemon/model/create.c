/* See create.h. */
#include "daemon/model/create.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/ledger.h"
#include "daemon/core/presence.h"
#include "daemon/core/step.h"
#include "daemon/model/common.h"
#include "daemon/model/fork.h"
#include "daemon/model/model.h"
#include "daemon/model/moved.h"
#include "daemon/model/open.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"

enum create_state {
    CREATE_MAKING,  /* op waits for libuv's pool */
    CREATE_FILLING, /* units are put; op, if any, waits for a copy, or for the published one */
    CREATE_FULL,
};

struct create {
    struct create *next;
    struct daemon *daemon; /* borrowed */
    struct op *op;         /* borrowed: pending; NULL: none */
    enum create_state state;
    uint64_t session; /* 0: it is gone */
    uint64_t origin;
    uint32_t owner, owners;
    bool twin;                      /* a replica's: it has others' word, too */
    bool one_count;                 /* as model_home */
    struct model_maker maker;       /* likewise */
    char name[WIRE_NAME_BYTES_MAX]; /* of the model */
    char by[WIRE_NAME_BYTES_MAX];   /* of the session */
    struct spec *spec;              /* owned until the model takes it */
    struct model *model;            /* owned until it is opened */
    struct segment stage;           /* owned */
    bool *put;                      /* owned, [units] */
    uint32_t putting;               /* unit of the copy that runs */
    uv_work_t work;
    struct task task;
    int status;
    struct shd_err err;
    struct fork *fork;         /* owned: what was forked; NULL: nothing was */
    struct common_work common; /* of frozen units, before that */
    bool alone;                /* it failed: the fork has all of its own */
};

/* -- The list -----------------------------------------------------------------------------------
 */

/* "": the only one, where no model is open either. */
static struct create *find_name(struct daemon *d, const char *name)
{
    struct create *c = d->open->creates;
    if (name[0] == '\0')
        return d->model_count == 0 && d->open->create_count == 1 ? c : NULL;
    while (c != NULL && strcmp(c->name, name) != 0)
        c = c->next;
    return c;
}

static struct create *find_origin(struct daemon *d, uint64_t origin)
{
    struct create *c = d->open->creates;
    while (c != NULL && c->origin != origin)
        c = c->next;
    return c;
}

static void add(struct daemon *d, struct create *c)
{
    c->daemon = d;
    c->next = d->open->creates;
    d->open->creates = c;
    d->open->create_count++;
}

static void create_free(struct create *c)
{
    if (c == NULL)
        return;
    model_free(c->model);
    spec_free(c->spec);
    segment_close(&c->stage);
    fork_free(c->fork);
    free(c->put);
    free(c);
}

static void take_out(struct create *c)
{
    struct open_queue *open = c->daemon->open;
    struct create **at = &open->creates;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    open->create_count--;
    if (c->session != 0 && c->stage.fd >= 0)
        session_ticket_forget(c->daemon, c->session, c->stage.fd);
}

/* The model is not to be, here and for a successor. */
static void drop(struct create *c, const char *why)
{
    CHECK(c->op == NULL);
    log_warn("op=create model=%s origin=%016" PRIx64 " by=%s why=\"dropped: %s\""
             " do=\"nothing: whoever opens it with start values makes it again\"",
             c->name, c->origin, c->by, why);
    if (c->model != NULL)
        presence_withdraw(c->model->ledger->head);
    take_out(c);
    create_free(c);
}

/* It is there. */
static void open_now(struct create *c)
{
    struct daemon *d = c->daemon;
    struct model *m = c->model;
    c->model = NULL;
    take_out(c);
    presence_open(m->ledger->head, c->origin);
    model_serve(d, m);
    log_info("op=create model=%s owner=%" PRIu32 "/%" PRIu32 " units=%" PRIu32 " elems=%" PRIu64
             " state_bytes=%" PRIu64 " origin=%016" PRIx64 " by=%s",
             m->spec->name, m->map->owner, m->map->owners, m->spec->unit_count, m->map->elems,
             m->state.bytes, c->origin, c->by);
    model_give(m, c->stage.bytes); /* closed now */
    create_free(c);
}

/* Full, and not the first owner's. */
static bool waits_for_word(const struct create *c)
{
    return c->state == CREATE_FULL && (c->owner > 0 || c->twin);
}

/* The pending request is done; a session that has gone meanwhile takes its model along. */
static void finish(struct create *c, int status)
{
    struct op *op = c->op;
    c->op = NULL;
    if (status != SHD_OK)
        op->err = c->err;
    const bool kept = waits_for_word(c);
    if (c->state == CREATE_MAKING)
        drop(c, c->err.text);
    else if (c->session == 0 && !kept)
        drop(c, "its creator has gone");
    op_finish(op, status);
}

static int no_such(struct op *op, uint64_t origin)
{
    return err_set(&op->err, SHD_ENOENT,
                   "daemon %s makes no model of origin %016" PRIx64 " for this session",
                   op->daemon->device, origin);
}

/* -- Beginning ----------------------------------------------------------------------------------
 */

static int answer_yours(struct op *op, const struct create *c)
{
    const uint64_t ticket = session_ticket_new(op->session, c->stage.fd, SEGMENT_STAGE,
                                               c->stage.bytes);
    if (ticket == 0)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    op->reply.type = WIRE_CREATED;
    op->reply.created = (struct wire_created){
        .what = WIRE_CREATED_YOURS, .ticket = ticket, .bytes = c->stage.bytes, .by = ""
    };
    return SHD_OK;
}

static int answer(struct op *op, enum wire_created_what what, const char *by)
{
    op->text = sys_strdup(by); /* whose it is may have gone when the reply is packed */
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for an answer");
    op->reply.type = WIRE_CREATED;
    op->reply.created = (struct wire_created){ .what = what, .by = op->text };
    return SHD_OK;
}

static int make_stage(struct create *c)
{
    uint64_t elems = 0;
    for (uint32_t u = 0; u < c->model->spec->unit_count; u++)
        if (c->model->map->slice[u].elems > elems)
            elems = c->model->map->slice[u].elems;
    c->put = sys_calloc(c->model->spec->unit_count, sizeof *c->put);
    if (c->put == NULL)
        return err_set(&c->err, SHD_ENOMEM, "no memory for a model of %" PRIu32 " units",
                       c->model->spec->unit_count);
    const uint64_t bytes = layout_align(elems > 0 ? elems * sizeof(float) : 1, SHD_PAGE_BYTES);
    const int r = model_take(c->model, bytes, "start values", &c->err);
    return r == SHD_OK ? segment_new("shardd-stage", SEGMENT_STAGE, bytes, &c->stage, &c->err) : r;
}

static void make(uv_work_t *work)
{
    struct create *c = work->data;
    const struct model_home home = {
        .kern = c->daemon->kern,
        .keeper = c->daemon->keeper,
        .owner = c->owner,
        .owners = c->owners,
        .one_count = c->one_count,
        .quota = c->daemon->quota,
        .maker = c->maker,
    };
    c->status = spec_parse(c->op->spec, c->op->spec_bytes, &c->spec, &c->err);
    if (c->status == SHD_OK && strcmp(c->spec->name, c->name) != 0)
        c->status = err_set(&c->err, SHD_EINVAL, "spec is of model '%s', not of '%s'",
                            c->spec->name, c->name);
    if (c->status == SHD_OK)
        c->status = model_new(c->spec, &home, &c->model, &c->err);
    if (c->status != SHD_OK)
        return;
    c->spec = NULL; /* the model's now */
    if (c->twin)
        presence_twin(c->model->ledger->head, 0);
    c->status = make_stage(c);
}

static void made(uv_work_t *work, int cancelled)
{
    struct create *c = work->data;
    CHECK(cancelled == 0);
    if (c->daemon->stopping)
        return;
    if (c->status == SHD_OK && c->session == 0)
        c->status = err_set(&c->err, SHD_EGONE, "session ended");
    if (c->status == SHD_OK) {
        c->model->daemon = c->daemon;
        c->state = CREATE_FILLING;
        c->status = answer_yours(c->op, c);
        c->err = c->op->err;
    }
    finish(c, c->status);
}

static int begin(struct op *op)
{
    const struct wire_create *req = &op->req.create;
    struct daemon *d = op->daemon;
    struct model_maker maker = { .known = true };
    const int r = session_user(op->session, &maker.uid, &maker.gid, &op->err);
    if (r != SHD_OK)
        return r;
    struct create *c = sys_calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to make a model");
    c->maker = maker;
    c->op = op;
    c->session = op->session->id;
    c->origin = req->origin;
    c->owner = req->owner;
    c->owners = req->owners;
    c->twin = req->twin;
    c->one_count = req->one_count || op->session->said.level < WIRE_LEVEL_COUNTS;
    memcpy(c->name, req->name, strlen(req->name) + 1);
    memcpy(c->by, op->session->name, strlen(op->session->name) + 1);
    c->stage = SEGMENT_CLOSED;
    c->work.data = c;
    add(d, c);
    uv_queue_work(d->loop, &c->work, make, made);
    return SHD_PENDING;
}

static int busy(struct op *op)
{
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY, "daemon %s is at it: ask again", op->daemon->device);
}

bool create_has_room(const struct daemon *d)
{
    const struct open_queue *open = d->open;
    return d->model_count + open->create_count + (open->making != NULL) < DAEMON_MODELS_MAX;
}

int create_check_name(struct op *op, const char *name, struct moved_seat seat)
{
    const struct daemon *d = op->daemon;
    const struct moved_asked asked = { .seat = seat };
    const int r = moved_check(d, name, &asked, &op->err);
    if (r == SHD_OK && d->restore.parked != NULL && strcmp(d->restore.parked, name) == 0)
        return busy(op);
    return r;
}

/* A replica of owner 0 is asked to make the model in its place. All others have what waits here,
 * and some may have opened it. Older builds tell no replica that it is one. */
static bool has_the_word(const struct create *c, const struct op *op)
{
    return c->owner == 0 && waits_for_word(c) && c->session == 0 && !op->req.create.twin &&
           op->req.create.owners == c->owners && op->session->said.level >= WIRE_LEVEL_PAIRS;
}

static int check_begin(struct op *op)
{
    const struct wire_create *req = &op->req.create;
    struct daemon *d = op->daemon;
    if (req->name[0] == '\0' || op->spec == NULL)
        return err_set(&op->err, SHD_EINVAL, "a model without a %s cannot be made",
                       req->name[0] == '\0' ? "name" : "spec");
    if (!create_has_room(d))
        return err_set(&op->err, SHD_EBUSY, "daemon %s has %u models, the most there may be",
                       d->device, DAEMON_MODELS_MAX);
    return create_check_name(op, req->name, (struct moved_seat){ req->owner, req->owners });
}

int create_begin(struct op *op)
{
    const struct wire_create *req = &op->req.create;
    struct daemon *d = op->daemon;
    const struct model *open = req->name[0] != '\0' ? model_find(d, req->name) : NULL;
    if (open != NULL && open->last_status != SHD_OK)
        return err_set(&op->err, open->last_status, "model '%s' cannot be used: %s", req->name,
                       status_meaning(open->last_status));
    if (open != NULL)
        return open->ready ? answer(op, WIRE_CREATED_OPEN, "") : busy(op);
    struct create *c = find_name(d, req->name);
    if (c != NULL && has_the_word(c, op)) {
        open_now(c);
        return answer(op, WIRE_CREATED_OPEN, "");
    }
    const bool ours = c != NULL && c->session == op->session->id;
    if (c != NULL && c->origin == req->origin && ours && c->state != CREATE_MAKING)
        return answer_yours(op, c); /* the reply was lost */
    if (d->open->making != NULL && strcmp(d->open->making, req->name) == 0)
        return busy(op);
    if (c != NULL && c->session != 0 && !ours && c->owner == 0 && !req->twin)
        return answer(op, WIRE_CREATED_OTHERS, c->by);
    if (c != NULL && c->op != NULL)
        return busy(op);
    if (c != NULL)
        drop(c, "it is made anew");
    const int r = check_begin(op);
    return r == SHD_OK ? begin(op) : r;
}

/* -- Putting ------------------------------------------------------------------------------------
 */

static void unit_copied(struct task *task)
{
    struct create *c = (struct create *)((char *)task - offsetof(struct create, task));
    int r = task->status;
    if (r != SHD_OK)
        r = kern_explain(c->daemon->kern, r, &c->err, "taking start values");
    else
        c->put[c->putting] = true;
    finish(c, r);
}

/* EBUSY: the device's queue is full of others' work. */
static int queued(struct create *c, struct op *op, int r)
{
    if (r == SHD_EBUSY)
        return busy(op);
    if (r != SHD_OK)
        return r;
    c->op = op;
    return SHD_PENDING;
}

int create_put(struct op *op)
{
    const struct wire_put *req = &op->req.put;
    struct create *c = find_origin(op->daemon, req->origin);
    if (c == NULL || c->session != op->session->id || c->state == CREATE_MAKING)
        return no_such(op, req->origin);
    const struct model *m = c->model;
    if (c->state == CREATE_FULL)
        return err_set(&op->err, SHD_EINVAL, "model '%s' has all its start values", c->name);
    if (c->op != NULL)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 " is being taken from the stage",
                       c->putting);
    if (m->kept.common != NULL)
        return err_set(&op->err, SHD_EINVAL,
                       "model '%s' is a fork, and has memory in common with its model: no start "
                       "values are put there",
                       c->name);
    if (req->unit >= m->spec->unit_count)
        return err_set(&op->err, SHD_ERANGE, "unit %" PRIu32 " of a model with %" PRIu32, req->unit,
                       m->spec->unit_count);
    const struct kern_copy copy = { .to = model_array(m, SHARDMAP_PARAM, req->unit),
                                    .from = c->stage.base,
                                    .bytes = m->map->slice[req->unit].elems * sizeof(float) };
    struct kern_copy average = copy; /* begins as these */
    if (spec_unit_ema(m->spec, req->unit))
        average.to = model_array(m, spec_ema_array(m->spec), req->unit);
    c->putting = req->unit;
    task_init(&c->task, op->daemon->tasks, unit_copied);
    if (copy.bytes == 0) {
        c->put[req->unit] = true;
        return SHD_OK;
    }
    FAIL_POINT("create:put");
    int r = SHD_OK;
    if (average.to != copy.to) /* done before the other, which says so */
        r = kern_copy(op->daemon->kern, &average, /* done= */ NULL, &op->err);
    if (r == SHD_OK)
        r = kern_copy(op->daemon->kern, &copy, &c->task.done, &op->err);
    return queued(c, op, r);
}

/* -- Forking ------------------------------------------------------------------------------------
 */

static void state_copied(struct task *task)
{
    struct create *c = (struct create *)((char *)task - offsetof(struct create, task));
    int r = task->status;
    FAIL_POINT("fork:copied");
    fork_copied(c->fork);
    if (r != SHD_OK)
        r = kern_explain(c->daemon->kern, r, &c->err, "copying a model");
    for (uint32_t u = 0; r == SHD_OK && u < c->model->spec->unit_count; u++)
        c->put[u] = true;
    finish(c, r);
}

static void common_ended(uv_work_t *work, int cancelled)
{
    struct create *c = work->data;
    struct model *from = c->common.from;
    struct op *op = c->op;
    CHECK(cancelled == 0);
    from->use.forks--;
    if (c->daemon->stopping)
        return;
    if (c->common.broken)
        c->state = CREATE_MAKING; /* so it goes */
    if (c->common.broken || c->session == 0) {
        finish(c, c->status != SHD_OK ? c->status : err_set(&c->err, SHD_EGONE, "session ended"));
        return;
    }
    if (c->status != SHD_OK)
        log_info("op=fork model=%s of=%s status=%s why=\"%s\" do=\"nothing: it has frozen units of "
                 "its own\"",
                 c->name, from->spec->name, status_name(c->status), c->err.text);
    c->alone = c->status != SHD_OK;
    c->op = NULL;
    op_again(&op);
}

static void end_common(uv_work_t *work)
{
    const struct create *c = work->data;
    common_end(&c->common);
}

static void make_common(uv_work_t *work)
{
    struct create *c = work->data;
    c->status = common_make(&c->common, &c->err);
}

static void common_made(uv_work_t *work, int cancelled)
{
    struct create *c = work->data;
    CHECK(cancelled == 0);
    if (common_done(&c->common) && !c->daemon->stopping)
        uv_queue_work(c->daemon->loop, &c->work, end_common, common_ended);
    else
        common_ended(work, cancelled);
}

/* SHD_OK: nothing is to be done before the copy. */
static int see_to_common(struct create *c, struct op *op)
{
    struct model *from = op->model;
    const bool can = !c->alone && common_can(from, c->model);
    if (!common_due(from, c->model, can))
        return SHD_OK;
    if (from->use.forks > 0)
        return busy(op);
    c->common = (struct common_work){ .from = from, .to = c->model, .can = can };
    c->op = op;
    from->use.forks++;
    uv_queue_work(c->daemon->loop, &c->work, make_common, common_made);
    return SHD_PENDING;
}

/* No update is under way, and those to come queue behind the copy; or it is of a snapshot. */
static int fork_now(struct create *c, struct op *op)
{
    const struct wire_fork *req = &op->req.fork;
    struct model *from = op->model;
    const struct fork_ask ask = { req->step,
                                  { req->settings.data, req->settings_more.data,
                                    req->settings.bytes, req->settings_more.bytes } };
    fork_free(c->fork);
    c->fork = NULL;
    int r = fork_take(from, c->model, &ask, &c->fork, &op->err);
    if (r != SHD_OK)
        return r;
    const struct kern_copy copy = {
        .to = c->model->state.base,
        .from = fork_arrays(c->fork), /* parameters and what is kept of them, no gradients' sums */
        .bytes = shardmap_kept_bytes(from->map)
    };
    op->reply.type = WIRE_FORKED;
    op->reply.forked = (struct wire_forked){ .step = fork_step(c->fork),
                                             .updates = fork_updates(c->fork) };
    task_init(&c->task, op->daemon->tasks, state_copied);
    r = kern_copy(op->daemon->kern, &copy, &c->task.done, &op->err);
    if (r != SHD_OK)
        fork_copied(c->fork);
    return queued(c, op, r);
}

/* The session asks for another step: the one that it waited for does not come. */
static void forget_waiting(const struct op *op)
{
    for (struct op **at = &op->model->waits.phase; *at != NULL; at = &(*at)->next) {
        struct op *other = *at;
        if (other->req.type != WIRE_FORK || other->session != op->session)
            continue;
        *at = other->next;
        other->next = NULL;
        op_finish(other, err_set(&other->err, SHD_ESTEP, "the session asks for another step"));
        return;
    }
}

/* A request that waits is served without its frame. */
static int keep_settings(struct op *op)
{
    struct wire_bytes *const parts[] = { &op->req.fork.settings, &op->req.fork.settings_more };
    const size_t bytes = parts[0]->bytes + parts[1]->bytes;
    if (bytes == 0 || op->work != NULL)
        return SHD_OK;
    uint8_t *at = op->work = sys_malloc(bytes); /* freed with the op */
    if (at == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a request");
    for (size_t i = 0; i < ARRAY_SIZE(parts); at += parts[i++]->bytes) {
        if (parts[i]->bytes > 0)
            memcpy(at, parts[i]->data, parts[i]->bytes);
        parts[i]->data = at;
    }
    return SHD_OK;
}

int create_fork(struct op *op)
{
    const struct wire_fork *req = &op->req.fork;
    struct create *c = find_origin(op->daemon, req->origin);
    if (c == NULL || c->session != op->session->id || c->state != CREATE_FILLING)
        return no_such(op, req->origin);
    if (c->op != NULL)
        return busy(op);
    int r = model_of(op, req->model);
    if (r == SHD_OK)
        r = fork_check(op->model, c->model, &op->err);
    if (r != SHD_OK)
        return r;
    struct model *from = op->model;
    forget_waiting(op);
    r = fork_may_begin(from, req->step, &op->err);
    if (r == SHD_EBUSY)
        return busy(op);
    if (r != SHD_OK && r != SHD_PENDING)
        return r;
    const bool now = r == SHD_OK;
    r = keep_settings(op);
    if (r == SHD_OK)
        r = see_to_common(c, op);
    if (r != SHD_OK)
        return r;
    if (now)
        return fork_now(c, op);
    model_wait(from, op);
    return SHD_PENDING;
}

/* -- Full ---------------------------------------------------------------------------------------
 */

static int fill_up(struct create *c, struct op *op)
{
    c->state = CREATE_FULL;
    presence_fill(c->model->ledger->head, c->origin);
    return answer(op, WIRE_CREATED_FULL, "");
}

static void published(struct task *task)
{
    struct create *c = (struct create *)((char *)task - offsetof(struct create, task));
    int r = task->status;
    if (r != SHD_OK)
        r = kern_explain(c->daemon->kern, r, &c->err, "publishing the parameters");
    else if ((r = fill_up(c, c->op)) != SHD_OK)
        c->err = c->op->err;
    finish(c, r);
}

int create_full(struct op *op)
{
    struct create *c = find_origin(op->daemon, op->req.create.origin);
    if (c != NULL && c->state == CREATE_FULL)
        return answer(op, WIRE_CREATED_FULL, "");
    if (c == NULL || c->session != op->session->id || c->state == CREATE_MAKING)
        return no_such(op, op->req.create.origin);
    const struct model *m = c->model;
    if (c->op != NULL)
        return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 " is being taken from the stage",
                       c->putting);
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (!c->put[u])
            return err_set(&op->err, SHD_EINVAL, "unit %" PRIu32 " '%s' was not put", u,
                           m->spec->units[u].name);
    if (c->fork != NULL && step_collecting(m->core) == 0) {
        const int r = fork_begin(c->fork, c->model, &op->err);
        if (r != SHD_OK)
            return r;
    }
    struct kern *kern = op->daemon->kern;
    const struct kern_op publish = model_publish(m, 0, m->map->elems);
    if (m->map->elems == 0)
        return fill_up(c, op);
    task_init(&c->task, op->daemon->tasks, published);
    return queued(c, op, kern->ops->submit(kern, &publish, &c->task.done, &op->err));
}

/* -- Opening ------------------------------------------------------------------------------------
 */

static bool is_open(const struct daemon *d, uint64_t origin)
{
    for (uint32_t i = 0; i < d->model_count; i++)
        if (atomic_load(&d->models[i]->ledger->head->origin) == origin)
            return true;
    return false;
}

int create_open(struct op *op)
{
    const uint64_t origin = op->req.create.origin;
    struct create *c = find_origin(op->daemon, origin);
    if (c == NULL)
        return is_open(op->daemon, origin) ? answer(op, WIRE_CREATED_OPEN, "")
                                           : no_such(op, origin);
    if (c->state != CREATE_FULL)
        return err_set(&op->err, SHD_EINVAL, "model '%s' has not all its start values yet",
                       c->name);
    open_now(c);
    return answer(op, WIRE_CREATED_OPEN, "");
}

int create_drop(struct op *op)
{
    struct create *c = find_origin(op->daemon, op->req.create.origin);
    if (c == NULL || c->session != op->session->id)
        return no_such(op, op->req.create.origin);
    if (c->op != NULL)
        return busy(op);
    drop(c, "its creator gave up");
    return answer(op, WIRE_CREATED_DROPPED, "");
}

uint64_t create_origin(const struct model *m)
{
    return atomic_load(&m->ledger->head->origin);
}

int create_settle(struct op *op, const char *name)
{
    const struct wire_open_model *req = &op->req.open_model;
    struct create *c = find_name(op->daemon, name);
    if (c == NULL)
        return SHD_OK;
    const struct presence_word word = { .told = req->settled,
                                        .origin = req->origin,
                                        .own = op_asks_first(op) && req->owners == c->owners };
    if (waits_for_word(c)) {
        const enum presence_told told = presence_hear(c->model->ledger->head, &word);
        if (told == PRESENCE_ASK)
            return busy(op);
        if (told == PRESENCE_KEEP) {
            open_now(c);
            return SHD_OK;
        }
    }
    if (c->session != 0)
        return err_set(&op->err, SHD_ENOENT,
                       "model '%s' is not there yet: session '%s' puts its start values", c->name,
                       c->by);
    if (c->op != NULL)
        return busy(op);
    drop(c, "owner 0 has not opened it");
    return SHD_OK;
}

int create_give_way(struct op *op, const char *name)
{
    struct create *c = find_name(op->daemon, name);
    if (c == NULL)
        return SHD_OK;
    if (c->session != 0)
        return err_set(&op->err, SHD_EBUSY,
                       "model '%s' is not there yet: session '%s' puts its start values", c->name,
                       c->by);
    if (c->op != NULL)
        return busy(op);
    if (c->owner != op->req.drop.owner || c->owners != op->req.drop.owners)
        return SHD_OK;
    if (waits_for_word(c) && (c->owner > 0 || op->req.drop.twin))
        /* owner 0 may have opened its own of it, also since it was asked */
        presence_hold(c->model->ledger->head, op->req.drop.first, op->req.drop.twin);
    else
        drop(c, "it is to be dropped");
    return SHD_OK;
}

void create_gone(struct daemon *d, const char *name, uint64_t first)
{
    struct create *c = find_name(d, name);
    if (c != NULL && waits_for_word(c) && c->session == 0 && c->op == NULL &&
        presence_goes_with(c->model->ledger->head, first))
        drop(c, "owner 0 has dropped it");
}

/* -- Ends ---------------------------------------------------------------------------------------
 */

void create_adopted(struct daemon *d, struct model *m)
{
    struct create *c = sys_calloc(1, sizeof *c);
    CHECK(c != NULL); /* at start: a successor tries again */
    c->state = CREATE_FULL;
    c->origin = atomic_load(&m->ledger->head->origin);
    c->owner = m->map->owner;
    c->owners = m->map->owners;
    c->twin = c->owner == 0;
    c->stage = SEGMENT_CLOSED;
    c->model = m;
    m->daemon = d;
    memcpy(c->name, m->spec->name, strlen(m->spec->name) + 1);
    memcpy(c->by, "-", sizeof "-");
    add(d, c);
    log_info("op=adopt model=%s owner=%" PRIu32 "/%" PRIu32 " origin=%016" PRIx64
             " why=\"it is full, and waits for owner 0's word\"",
             c->name, c->owner, c->owners, c->origin);
}

void create_forget_session(struct daemon *d, const struct session *s)
{
    for (struct create *c = d->open->creates, *next; c != NULL; c = next) {
        next = c->next;
        if (c->session != s->id)
            continue;
        c->session = 0;
        if (c->op == NULL && !waits_for_word(c))
            drop(c, "its creator has gone");
    }
}

void create_abandon(struct daemon *d)
{
    for (struct create *c = d->open->creates, *next; c != NULL; c = next) {
        next = c->next;
        create_free(c);
    }
    d->open->creates = NULL;
    d->open->create_count = 0;
}
