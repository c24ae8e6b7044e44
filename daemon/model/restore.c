/* See restore.h. */
#include "daemon/model/restore.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/reach.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/adopt.h"
#include "daemon/model/model.h"
#include "daemon/model/open.h"
#include "daemon/model/paging.h"
#include "daemon/model/replace.h"
#include "daemon/model/restore_in.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "proto/wire/wire.h"

#define PIECE_ELEMS (UINT64_C(512) * SHD_BLOCK_ELEMS) /* 4 MiB */
#define READERS     3u                                /* pool threads; the fourth is others' */

struct reader {
    uv_work_t work;
    struct restore *restore; /* borrowed: its owner */
};

struct restore {
    struct daemon *daemon;
    struct op *op;        /* borrowed: pending; NULL when parked */
    struct op *successor; /* borrowed: to be served when this one is gone; NULL: none */
    uint64_t session;
    char *path; /* owned: what was asked for, with the next */
    char *spec_json;
    uint64_t spec_bytes;
    uint32_t owner, owners;
    bool weights, replace, one_count; /* one_count: as model_home */
    uint64_t restore_id;
    struct model_maker maker; /* likewise */
    struct restore_in in;     /* closed again when all is read */
    struct spec *spec;        /* owned until the model takes it */
    struct model *model;      /* owned until it is opened */
    uv_work_t work;
    struct task task;
    bool waits; /* to be published, for room in the kernel queue */
    struct reader readers[READERS];
    uint32_t reading;
    uv_mutex_t mutex;
    /* Under the mutex while readers run: */
    bool gone;            /* nobody wants it any more, and pool threads are at it */
    struct ckpt_piece at; /* next one; elems unused */
    uint64_t bytes;
    int status;
    struct shd_err err;
};

static void restore_free(struct restore *w)
{
    if (w == NULL)
        return;
    restore_in_close(&w->in);
    model_free(w->model);
    spec_free(w->spec);
    uv_mutex_destroy(&w->mutex);
    free(w->path);
    free(w->spec_json);
    free(w);
}

static int begin(struct op *op);

static void drop(struct restore *w)
{
    struct op *next = w->successor;
    w->daemon->restore.work = NULL;
    w->daemon->restore.parked = NULL;
    atomic_store(&w->daemon->restore.bytes_total, 0);
    restore_free(w);
    const int r = next != NULL ? begin(next) : SHD_PENDING;
    if (r != SHD_PENDING)
        op_finish(next, r);
}

/* The pending request failed; nothing is left. */
static void fail(struct restore *w, int status)
{
    struct op *op = w->op;
    log_warn("op=restore path=\"%s\" status=%s why=\"%s\""
             " do=\"%s; nothing was opened\"",
             w->path, status_name(status), w->err.text,
             status == SHD_EEXIST ? "to go back to it, restore with --replace"
                                  : "shardctl checkpoint --verify it");
    op->err = w->err;
    drop(w);
    op_finish(op, status);
}

/* -- Parked, and opened -------------------------------------------------------------------------
 */

static void park(struct restore *w)
{
    struct op *op = w->op;
    w->op = NULL;
    w->daemon->restore.parked = w->model->spec->name;
    op->reply.type = WIRE_RESTORED;
    op->reply.restored = (struct wire_restored){ .step = step_now(w->model->core),
                                                 .bytes = w->bytes };
    restore_in_close(&w->in);
    atomic_store(&w->daemon->restore.bytes_total, 0);
    op_finish(op, SHD_OK);
}

static int check_free(struct op *op, const char *name)
{
    struct daemon *d = op->daemon;
    const struct wire_restore *req = &op->req.restore;
    const struct model *open = model_find(d, name);
    const bool moves = open != NULL && !req->open && req->beside == open->kept.instance;
    if (open != NULL && !moves)
        return replace_check(op, open);
    if (d->model_count + d->open->create_count >= DAEMON_MODELS_MAX)
        return err_set(&op->err, SHD_EBUSY, "daemon %s has %u models, the most there may be",
                       d->device, DAEMON_MODELS_MAX);
    if (d->open->work != NULL)
        return err_set(&op->err, SHD_EBUSY, "daemon %s is opening a model", d->device);
    return adopt_check_name(d, name, &op->err);
}

static int open_parked(struct op *op, struct restore *w)
{
    struct model *m = w->model;
    struct model *open = model_find(w->daemon, m->spec->name);
    int r = check_free(op, m->spec->name);
    if (r != SHD_OK)
        return r;
    const uint64_t step = step_now(m->core);
    w->model = NULL;
    op->reply.type = WIRE_RESTORED;
    op->reply.restored = (struct wire_restored){ .step = step, .bytes = w->bytes };
    if (open != NULL) {
        drop(w);
        replace_with(open, m); /* the process ends with both */
        return SHD_OK;
    }
    replace_nothing(w->daemon, m);
    log_info("op=restore model=%s owner=%" PRIu32 "/%" PRIu32 " step=%" PRIu64 " bytes=%" PRIu64
             " path=\"%s\"",
             m->spec->name, m->map->owner, m->map->owners, step, w->bytes, w->path);
    drop(w);
    return SHD_OK;
}

/* -- The published copy -------------------------------------------------------------------------
 */

static void published(struct task *task)
{
    struct restore *w = (struct restore *)((char *)task - offsetof(struct restore, task));
    if (w->gone)
        err_set(&w->err, w->status = SHD_EGONE, "nobody wants it any more");
    else if (task->status != SHD_OK)
        w->status = kern_explain(w->daemon->kern, task->status, &w->err,
                                 "publishing the parameters");
    if (w->status == SHD_OK)
        park(w);
    else
        fail(w, w->status);
}

static void publish(struct restore *w)
{
    const struct model *m = w->model;
    struct kern *kern = w->daemon->kern;
    const struct kern_op op = model_publish(m, 0, m->map->elems);
    task_init(&w->task, w->daemon->tasks, published);
    if (m->map->elems == 0) {
        task_post(&w->task, SHD_OK);
        return;
    }
    const int r = kern->ops->submit(kern, &op, &w->task.done, &w->err);
    w->waits = r == SHD_EBUSY; /* the queue is full of others' work: restore_retry() */
    w->daemon->kernel_full |= w->waits;
    if (r != SHD_OK && !w->waits)
        fail(w, r);
}

void restore_retry(struct daemon *d)
{
    if (d->restore.work != NULL && d->restore.work->waits)
        publish(d->restore.work);
}

/* -- Reading ------------------------------------------------------------------------------------
 */

static uint32_t arrays_to_read(const struct restore *w, uint32_t unit)
{
    return w->in.weights ? 1 : spec_unit_arrays(w->model->spec, unit);
}

static uint64_t elems_to_read(const struct restore *w)
{
    const struct model *m = w->model;
    uint64_t elems = 0;
    CHECK(m->spec != NULL); /* it is open */
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        elems += m->map->slice[u].elems * arrays_to_read(w, u);
    return elems;
}

/* A reader's next piece; false: nothing is left, or something went wrong. */
static bool next_piece(struct restore *w, struct ckpt_piece *ret_piece)
{
    const struct model *m = w->model;
    struct ckpt_piece *at = &w->at;
    bool found = false;
    uv_mutex_lock(&w->mutex);
    while (w->status == SHD_OK && !w->gone && !found && at->unit < m->spec->unit_count) {
        const struct slice slice = m->map->slice[at->unit];
        if (at->array == arrays_to_read(w, at->unit)) {
            *at = (struct ckpt_piece){ .unit = at->unit + 1 };
        } else if (at->first_elem >= slice.elems) { /* counts from the slice's first here */
            at->array++;
            at->first_elem = 0;
        } else {
            const uint64_t left = slice.elems - at->first_elem;
            *ret_piece = *at;
            ret_piece->first_elem = slice.first_elem + at->first_elem;
            ret_piece->elems = left < PIECE_ELEMS ? left : PIECE_ELEMS;
            at->first_elem += ret_piece->elems;
            found = true;
        }
    }
    uv_mutex_unlock(&w->mutex);
    return found;
}

static void piece_read(struct restore *w, int status, const struct shd_err *e, uint64_t bytes,
                       uint64_t elems)
{
    uv_mutex_lock(&w->mutex);
    if (status == SHD_OK) {
        w->bytes += bytes;
        atomic_fetch_add_explicit(&w->daemon->restore.bytes_done, elems * sizeof(float),
                                  memory_order_relaxed);
    } else if (w->status == SHD_OK) {
        w->status = status;
        w->err = *e;
    }
    uv_mutex_unlock(&w->mutex);
}

static void read_pieces(uv_work_t *work)
{
    const struct reader *reader = work->data;
    struct restore *w = reader->restore;
    struct ckpt_piece piece;
    struct shd_err e;
    uint64_t bytes = 0;
    float *buffer = sys_malloc(PIECE_ELEMS * sizeof *buffer);
    if (buffer == NULL) {
        const int r = err_set(&e, SHD_ENOMEM, "no memory to read a checkpoint");
        piece_read(w, r, &e, bytes, 0);
    }
    while (buffer != NULL && next_piece(w, &piece)) {
        const int r = restore_in_read(&w->in, w->model, &piece, buffer, &bytes, &e);
        paging_passed(w->model, piece.elems * sizeof(float));
        piece_read(w, r, &e, bytes, piece.elems);
    }
    free(buffer);
}

static void pieces_read(uv_work_t *work, int cancelled)
{
    const struct reader *reader = work->data;
    struct restore *w = reader->restore;
    CHECK(cancelled == 0);
    w->reading--;
    if (w->daemon->stopping || w->reading > 0)
        return;
    if (w->status == SHD_OK && w->gone)
        err_set(&w->err, w->status = SHD_EGONE, "nobody wants it any more");
    if (w->status == SHD_OK)
        publish(w);
    else
        fail(w, w->status);
}

/* The model goes on from what the checkpoint says. */
static int start_ledger(struct restore *w)
{
    const struct ckpt_info *info = &w->in.info;
    struct model *m = w->model;
    m->ledger->head->restored.id = w->restore_id;
    if (w->in.weights)
        return SHD_OK;
    const int r = model_take_settings(m, info->settings_json, &w->err);
    if (r != SHD_OK || info->step == 0)
        return r;
    const struct ledger_start start = { .step = info->step,
                                        .updates = info->updates,
                                        .unit_updates = info->unit_updates,
                                        .decision = info->decision,
                                        .blob = info->blob,
                                        .blob_bytes = info->blob_bytes };
    return model_start_at(m, &start, &w->err);
}

static void prepare(uv_work_t *work)
{
    struct restore *w = work->data;
    const struct model_home home = {
        .kern = w->daemon->kern,
        .keeper = w->daemon->keeper,
        .owner = w->owner,
        .owners = w->owners,
        .one_count = w->one_count,
        .quota = w->daemon->quota,
        .maker = w->maker,
    };
    w->status = spec_parse(w->spec_json, w->spec_bytes, &w->spec, &w->err);
    if (w->status == SHD_OK &&
        (w->status = restore_in_open(&w->in, w->path, w->spec, &w->err)) != SHD_OK)
        w->status = reach_explain(w->status, w->path, /* write= */ false, &w->err);
    if (w->status == SHD_OK)
        w->status = model_new(w->spec, &home, &w->model, &w->err);
    if (w->status != SHD_OK)
        return;
    w->spec = NULL; /* the model's now */
    w->status = start_ledger(w);
}

static void prepared(uv_work_t *work, int cancelled)
{
    struct restore *w = work->data;
    struct daemon *d = w->daemon;
    CHECK(cancelled == 0);
    if (d->stopping)
        return;
    if (w->status == SHD_OK && w->gone)
        err_set(&w->err, w->status = SHD_EGONE, "nobody wants it any more");
    /* Also where there was no memory for a second one: that is not what is wrong. */
    const struct spec *spec = w->model != NULL ? w->model->spec : w->spec;
    const int free_for_it = spec != NULL ? check_free(w->op, spec->name) : SHD_OK;
    if (w->status == SHD_OK || free_for_it == SHD_EEXIST) {
        w->status = free_for_it;
        w->err = w->op->err;
    }
    if (w->status != SHD_OK) {
        fail(w, w->status);
        return;
    }
    CHECK(w->model != NULL); /* it is prepared */
    w->model->daemon = d;
    atomic_store(&d->restore.bytes_done, 0);
    atomic_store(&d->restore.bytes_total, elems_to_read(w) * sizeof(float));
    for (uint32_t i = 0; i < READERS; i++) {
        w->readers[i].restore = w;
        w->readers[i].work.data = &w->readers[i];
        w->reading++;
        uv_queue_work(d->loop, &w->readers[i].work, read_pieces, pieces_read);
    }
}

/* -- Asked --------------------------------------------------------------------------------------
 */

static bool same_request(const struct restore *w, const struct op *op)
{
    const struct wire_restore *req = &op->req.restore;
    return w->session == op->session->id && w->owner == req->owner && w->owners == req->owners &&
           w->weights == req->weights && w->replace == req->replace &&
           w->restore_id == req->restore_id && strcmp(w->path, req->path) == 0 &&
           w->spec_bytes == op->spec_bytes && memcmp(w->spec_json, op->spec, op->spec_bytes) == 0;
}

static int begin(struct op *op)
{
    const struct wire_restore *req = &op->req.restore;
    struct daemon *d = op->daemon;
    struct model_maker maker = { .known = true };
    const int r = session_user(op->session, &maker.uid, &maker.gid, &op->err);
    if (r != SHD_OK)
        return r;
    struct restore *w = sys_calloc(1, sizeof *w);
    if (w == NULL || uv_mutex_init(&w->mutex) != 0) {
        free(w);
        return err_set(&op->err, SHD_ENOMEM, "no memory to restore a model");
    }
    w->daemon = d;
    w->maker = maker;
    w->session = op->session->id;
    w->owner = req->owner;
    w->owners = req->owners;
    w->one_count = req->one_count || op->session->said.level < WIRE_LEVEL_COUNTS;
    w->in = RESTORE_IN_CLOSED;
    w->weights = w->in.weights = req->weights;
    w->replace = req->replace;
    w->restore_id = req->restore_id;
    w->work.data = w;
    w->path = sys_strdup(req->path);
    w->spec_json = sys_malloc(op->spec_bytes);
    if (w->path == NULL || w->spec_json == NULL) {
        restore_free(w);
        return err_set(&op->err, SHD_ENOMEM, "no memory to restore a model");
    }
    memcpy(w->spec_json, op->spec, op->spec_bytes);
    w->spec_bytes = op->spec_bytes;
    w->op = op;
    d->restore.work = w;
    uv_queue_work(d->loop, &w->work, prepare, prepared);
    return SHD_PENDING;
}

/* Let what pool threads are at end soon, and op follow it. */
static int replace(struct restore *w, struct op *op)
{
    struct op *other = w->successor;
    uv_mutex_lock(&w->mutex);
    w->gone = true;
    uv_mutex_unlock(&w->mutex);
    w->successor = op;
    if (other != NULL)
        op_finish(other, err_set(&other->err, SHD_EBUSY, "another one is to be restored"));
    return SHD_PENDING;
}

static int busy(struct op *op, const struct restore *w)
{
    return err_set(&op->err, SHD_EBUSY, "daemon %s restores '%.100s' for another session",
                   op->daemon->device, w->path);
}

/* The model of the request's restore, if it is open: another one of this restore's attempts has
 * come as far. */
static struct model *find_done(const struct op *op)
{
    struct daemon *d = op->daemon;
    for (uint32_t i = 0; i < d->model_count; i++)
        if (replace_done(op, d->models[i]))
            return d->models[i];
    return NULL;
}

static int answer_done(struct op *op, const struct model *m)
{
    op->reply.type = WIRE_RESTORED;
    op->reply.restored = (struct wire_restored){ .step = step_now(m->core) };
    return SHD_OK;
}

int restore_open(struct op *op)
{
    struct restore *w = op->daemon->restore.work;
    const struct model *done = find_done(op);
    if (done != NULL)
        return answer_done(op, done);
    if (w == NULL || w->op != NULL || !same_request(w, op))
        return err_set(&op->err, SHD_ENOENT, "daemon %s has not read '%.100s'", op->daemon->device,
                       op->req.restore.path);
    return open_parked(op, w);
}

int restore_begin(struct op *op)
{
    struct restore *w = op->daemon->restore.work;
    const bool ours = w != NULL && w->session == op->session->id;
    const struct model *done = find_done(op);
    if (done != NULL)
        return answer_done(op, done);
    if (w != NULL && !ours && !w->gone)
        return busy(op, w);
    if (w != NULL && w->op != NULL)
        return replace(w, op);
    if (w != NULL)
        drop(w);
    return begin(op);
}

void restore_forget_session(struct daemon *d, const struct session *s)
{
    struct restore *w = d->restore.work;
    if (w == NULL)
        return;
    struct op *next = w->successor;
    if (next != NULL && next->session == s) {
        w->successor = NULL;
        op_finish(next, err_set(&next->err, SHD_EGONE, "session ended"));
    }
    if (w->session != s->id)
        return;
    if (w->op == NULL) {
        drop(w);
        return;
    }
    uv_mutex_lock(&w->mutex);
    w->gone = true;
    uv_mutex_unlock(&w->mutex);
}

void restore_abandon(struct daemon *d)
{
    restore_free(d->restore.work);
    d->restore.work = NULL;
}
