/* See checkpoint.h. */
#include "daemon/model/checkpoint.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/reach.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/step.h"
#include "daemon/model/checkpoint_out.h"
#include "daemon/model/metrics.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

#define PIECE_ELEMS      (UINT64_C(512) * SHD_BLOCK_ELEMS) /* 4 MiB */
#define BUFFERS          4u
#define WRITERS_MAX      2u                   /* pool threads at once: others use the pool too */
#define MEMORY_SPARED    (UINT64_C(64) << 20) /* left alone by asides */
#define REPLY_REST_BYTES (UINT64_C(8) * 1024) /* of the answer, beside blob and counts */

struct capture {
    struct task task;
    uv_work_t work;
    struct checkpoint *checkpoint; /* borrowed: its owner */
    float *data;                   /* owned */
    struct ckpt_piece piece;
    bool aside; /* freed when it is written; else one of the buffers */
    bool busy;
    uint64_t bytes; /* written */
    int status;
    struct shd_err err;
    struct capture *next; /* waits to be written */
    struct capture *all;  /* list of all asides */
};

struct checkpoint {
    struct model *model; /* borrowed */
    struct op *op;       /* borrowed: pending until finish() */
    struct checkpoint_out out;
    uint64_t step, updates;
    uint64_t *unit_updates; /* owned, [units]; NULL: `updates` of each */
    bool has_decision;
    struct decision decision;
    struct {
        uint8_t *data; /* owned */
        uint64_t bytes;
    } blob;              /* of step, as of the beginning */
    char *settings_json; /* owned; NULL: nothing is set */
    uint64_t started_ns, bytes, aside_bytes, aside_bytes_max;
    struct capture buffers[BUFFERS];
    struct capture *asides; /* owned */
    uint8_t *aside_arrays;  /* owned, [units]: bit per array that needs no capture any more */
    struct ckpt_piece at;   /* the next piece to capture in order; elems unused */
    struct capture *write_first, **write_last;
    uint32_t writing;   /* captures on the pool */
    uint32_t capturing; /* captures in the kernel queue */
    bool opened, syncing;
    bool waits;     /* for room in the kernel queue */
    uv_work_t work; /* opening, syncing */
    int work_status;
    struct shd_err work_err;
    int status; /* SHD_OK, or why it fails */
    struct shd_err err;
};

static void pump(struct checkpoint *c);

static void fail(struct checkpoint *c, int status, const struct shd_err *why)
{
    if (c->status != SHD_OK)
        return;
    c->status = status;
    c->err = *why;
}

static void free_capture(struct capture *w)
{
    free(w->data);
    free(w);
}

void checkpoint_free(struct checkpoint *c)
{
    if (c == NULL)
        return;
    checkpoint_out_close(&c->out);
    for (uint32_t i = 0; i < BUFFERS; i++)
        free(c->buffers[i].data);
    while (c->asides != NULL) {
        struct capture *w = c->asides;
        c->asides = w->all;
        free_capture(w);
    }
    free(c->aside_arrays);
    free(c->unit_updates);
    free(c->blob.data);
    free(c->settings_json);
    free(c);
}

static void forget_aside(struct checkpoint *c, struct capture *w)
{
    struct capture **at = &c->asides;
    while (*at != w)
        at = &(*at)->all;
    *at = w->all;
    c->aside_bytes -= w->piece.elems * sizeof(float);
    free_capture(w);
}

/* -- Ending -------------------------------------------------------------------------------------
 */

bool checkpoint_progress(const struct model *m, struct checkpoint_progress *ret_progress)
{
    const struct checkpoint *c = m->checkpoint;
    if (c == NULL)
        return false;
    *ret_progress = (struct checkpoint_progress){
        .step = c->step,
        .writing = c->opened,
        .bytes_done = c->bytes,
        .bytes_total = shardmap_value_bytes(m->map),
    };
    return true;
}

static void fill_reply(const struct checkpoint *c, struct op *op)
{
    op->reply.type = WIRE_CHECKPOINTED;
    op->reply.checkpointed = (struct wire_checkpointed){
        .step = c->step,
        .updates = c->updates,
        .bytes = c->bytes,
        .has_decision = c->has_decision,
        .blob = { c->blob.data, c->blob.bytes },
    };
    if (c->unit_updates != NULL)
        op->reply.checkpointed.unit_updates = (struct wire_bytes){
            (const uint8_t *)c->unit_updates, c->model->spec->unit_count * sizeof *c->unit_updates
        };
    if (c->has_decision)
        op->reply.checkpointed.decision = c->decision;
    if (c->settings_json != NULL)
        op->reply.checkpointed.settings = (struct wire_bytes){ (const uint8_t *)c->settings_json,
                                                               strlen(c->settings_json) };
}

static void finish(struct checkpoint *c)
{
    struct model *m = c->model;
    struct op *op = c->op;
    log_info("op=checkpoint model=%s step=%" PRIu64 " bytes=%" PRIu64 " aside_bytes_max=%" PRIu64
             " ms=%" PRIu64 " status=%s",
             m->spec->name, c->step, c->bytes, c->aside_bytes_max,
             (uv_hrtime() - c->started_ns) / 1000000, status_name(c->status));
    if (c->status == SHD_OK) {
        m->metrics->checkpoints++;
        m->metrics->saved.step = c->step;
        m->metrics->saved.ns = uv_hrtime();
        fill_reply(c, op);
    } else { /* what its session gave up has not failed */
        m->metrics->failed_checkpoints += c->status != SHD_ESTEP && c->status != SHD_EGONE;
        op->err = c->err;
    }
    m->checkpoint = NULL;
    op_finish(op, c->status);
    checkpoint_free(c);
    model_wake(m); /* the next one may wait */
}

static void sync_files(uv_work_t *work)
{
    struct checkpoint *c = work->data;
    c->work_status = checkpoint_out_sync(&c->out, &c->work_err);
}

static void files_synced(uv_work_t *work, int cancelled)
{
    struct checkpoint *c = work->data;
    CHECK(cancelled == 0);
    if (c->model->daemon->stopping)
        return;
    if (c->work_status != SHD_OK)
        fail(c, c->work_status, &c->work_err);
    finish(c);
}

/* -- Writing ------------------------------------------------------------------------------------
 */

static void write_capture(uv_work_t *work)
{
    struct capture *w = work->data;
    w->status = checkpoint_out_write(&w->checkpoint->out, &w->piece, w->data, &w->bytes, &w->err);
}

static void capture_written(uv_work_t *work, int cancelled)
{
    struct capture *w = work->data;
    struct checkpoint *c = w->checkpoint;
    CHECK(cancelled == 0);
    c->writing--;
    if (c->model->daemon->stopping)
        return;
    if (w->status == SHD_OK)
        c->bytes += w->bytes;
    else
        fail(c, w->status, &w->err);
    w->busy = false;
    if (w->aside)
        forget_aside(c, w);
    pump(c);
}

static void start_writers(struct checkpoint *c)
{
    while (c->opened && c->writing < WRITERS_MAX && c->write_first != NULL) {
        struct capture *w = c->write_first;
        c->write_first = w->next;
        if (c->write_first == NULL)
            c->write_last = &c->write_first;
        c->writing++;
        w->work.data = w;
        uv_queue_work(c->model->daemon->loop, &w->work, write_capture, capture_written);
    }
}

/* Failed: what waits to be written is not. */
static void drop_waiting(struct checkpoint *c)
{
    struct capture *w = c->write_first;
    c->write_first = NULL;
    c->write_last = &c->write_first;
    while (w != NULL) {
        struct capture *next = w->next;
        w->busy = false;
        if (w->aside)
            forget_aside(c, w);
        w = next;
    }
}

/* -- Capturing ----------------------------------------------------------------------------------
 */

static void captured(struct task *task)
{
    struct capture *w = (struct capture *)task;
    struct checkpoint *c = w->checkpoint;
    c->capturing--;
    if (task->status != SHD_OK) {
        struct shd_err e;
        kern_explain(c->model->kern, task->status, &e, "copying the state");
        fail(c, task->status, &e);
    }
    w->next = NULL;
    *c->write_last = w;
    c->write_last = &w->next;
    pump(c);
}

static int queue_capture(struct checkpoint *c, struct capture *w, struct shd_err *e)
{
    struct model *m = c->model;
    const struct ckpt_piece *p = &w->piece;
    struct kern *kern = m->daemon->kern;
    const struct kern_op read = kern_read_of(model_state(m, p->array, p->unit),
                                             p->first_elem - m->map->slice[p->unit].first_elem,
                                             p->elems, w->data);
    w->checkpoint = c;
    task_init(&w->task, m->daemon->tasks, captured);
    const int r = kern->ops->submit(kern, &read, &w->task.done, e);
    if (r != SHD_OK)
        return r;
    w->busy = true;
    c->capturing++;
    return SHD_OK;
}

static uint32_t arrays_of(const struct model *m, uint32_t unit)
{
    return spec_unit_arrays(m->spec, unit);
}

/* Move c->at to the next thing that nobody captures; false: there is none. */
static bool find_next(struct checkpoint *c)
{
    const struct model *m = c->model;
    struct ckpt_piece *at = &c->at;
    while (at->unit < m->spec->unit_count) {
        const struct slice slice = m->map->slice[at->unit];
        if (at->array == arrays_of(m, at->unit)) {
            at->unit++;
            at->array = 0;
            at->first_elem = at->unit < m->spec->unit_count ? m->map->slice[at->unit].first_elem
                                                            : 0;
            continue;
        }
        if ((c->aside_arrays[at->unit] & 1u << at->array) == 0 &&
            at->first_elem < slice.first_elem + slice.elems)
            return true;
        at->array++;
        at->first_elem = slice.first_elem;
    }
    return false;
}

/* The next piece into a buffer; false: not now, or nothing is left. */
static bool capture_next(struct checkpoint *c, struct capture *w)
{
    if (!find_next(c))
        return false;
    const struct slice slice = c->model->map->slice[c->at.unit];
    const uint64_t left = slice.first_elem + slice.elems - c->at.first_elem;
    struct shd_err e;
    w->piece = c->at;
    w->piece.elems = left < PIECE_ELEMS ? left : PIECE_ELEMS;
    const int r = queue_capture(c, w, &e);
    if (r == SHD_OK)
        c->at.first_elem += w->piece.elems;
    else if (r == SHD_EBUSY)
        c->waits = c->model->daemon->kernel_full = true; /* of others' work: checkpoint_retry() */
    else
        fail(c, r, &e);
    return r == SHD_OK;
}

static void check_wanted(struct checkpoint *c)
{
    struct shd_err e;
    if (c->op->session->state != SESSION_OPEN) {
        err_set(&e, SHD_EGONE, "session ended");
        fail(c, SHD_EGONE, &e);
    }
    if (c->model->last_status != SHD_OK) {
        err_set(&e, c->model->last_status,
                c->model->use.dropped ? "the model was dropped" : "the model failed");
        fail(c, c->model->last_status, &e);
    }
}

/* Do whatever can be done now. */
static void pump(struct checkpoint *c)
{
    check_wanted(c);
    if (c->status != SHD_OK)
        drop_waiting(c);
    start_writers(c);
    for (uint32_t i = 0; i < BUFFERS && c->opened && c->status == SHD_OK; i++)
        if (!c->buffers[i].busy && !capture_next(c, &c->buffers[i]))
            break;
    if (!c->opened || c->waits || c->syncing || c->writing > 0 || c->capturing > 0)
        return;
    if (c->status != SHD_OK) {
        finish(c);
        return;
    }
    CHECK(c->write_first == NULL && c->asides == NULL);
    c->syncing = true;
    c->work.data = c;
    uv_queue_work(c->model->daemon->loop, &c->work, sync_files, files_synced);
}

/* -- Aside --------------------------------------------------------------------------------------
 */

static int check_room(const struct checkpoint *c, uint64_t bytes, struct shd_err *e)
{
    if (segment_room(bytes + MEMORY_SPARED, e) == SHD_OK)
        return SHD_OK;
    return err_prefix(e, "step %" PRIu64 " is updated before it is written, and kept aside",
                      c->step);
}

static int capture_aside(struct checkpoint *c, const struct ckpt_piece *piece, struct shd_err *e)
{
    const uint64_t bytes = piece->elems * sizeof(float);
    int r = check_room(c, bytes, e);
    if (r != SHD_OK)
        return r;
    struct capture *w = sys_calloc(1, sizeof *w);
    if (w != NULL)
        w->data = sys_malloc(bytes);
    if (w == NULL || w->data == NULL) {
        free(w);
        return err_set(e, SHD_ENOMEM, "no memory to keep %" PRIu64 " bytes aside", bytes);
    }
    w->aside = true;
    w->piece = *piece;
    r = queue_capture(c, w, e);
    if (r != SHD_OK) {
        free_capture(w);
        return r;
    }
    w->all = c->asides;
    c->asides = w;
    c->aside_bytes += bytes;
    if (c->aside_bytes > c->aside_bytes_max)
        c->aside_bytes_max = c->aside_bytes;
    return SHD_OK;
}

int checkpoint_before_update(struct model *m, uint32_t unit, struct shd_err *e)
{
    struct checkpoint *c = m->checkpoint;
    if (c == NULL || c->status != SHD_OK || unit < c->at.unit)
        return SHD_OK;
    const struct slice slice = m->map->slice[unit];
    const bool begun = unit == c->at.unit;
    for (uint32_t a = begun ? c->at.array : 0; a < arrays_of(m, unit); a++) {
        if ((c->aside_arrays[unit] & 1u << a) != 0)
            continue;
        const uint64_t first = begun && a == c->at.array ? c->at.first_elem : slice.first_elem;
        const struct ckpt_piece piece = { unit, a, first, slice.first_elem + slice.elems - first };
        const int r = piece.elems > 0 ? capture_aside(c, &piece, e) : SHD_OK;
        if (r == SHD_EBUSY)
            return r;
        if (r != SHD_OK) {
            fail(c, r, e); /* training goes on without it */
            return SHD_OK;
        }
        c->aside_arrays[unit] |= (uint8_t)(1u << a);
    }
    return SHD_OK;
}

/* -- Beginning ----------------------------------------------------------------------------------
 */

static void open_files(uv_work_t *work)
{
    struct checkpoint *c = work->data;
    const char *path = c->op->text;
    c->work_status = checkpoint_out_open(&c->out, path, c->model->spec, &c->work_err);
    if (c->work_status != SHD_OK)
        c->work_status = reach_explain(c->work_status, path, /* write= */ true, &c->work_err);
}

static void files_opened(uv_work_t *work, int cancelled)
{
    struct checkpoint *c = work->data;
    CHECK(cancelled == 0);
    if (c->model->daemon->stopping)
        return;
    c->opened = true;
    if (c->work_status != SHD_OK)
        fail(c, c->work_status, &c->work_err);
    pump(c);
}

static int make_buffers(struct checkpoint *c, struct shd_err *e)
{
    const struct model *m = c->model;
    c->aside_arrays = sys_calloc(m->spec->unit_count, 1);
    bool ok = c->aside_arrays != NULL;
    for (uint32_t i = 0; i < BUFFERS; i++) {
        c->buffers[i].data = sys_malloc(PIECE_ELEMS * sizeof(float));
        ok = ok && c->buffers[i].data != NULL;
    }
    const struct step_blob blob = step_last_blob(m->core);
    c->blob.data = blob.bytes > 0 ? sys_malloc(blob.bytes) : NULL;
    c->blob.bytes = blob.bytes;
    if (!ok || (blob.bytes > 0 && c->blob.data == NULL))
        return err_set(e, SHD_ENOMEM, "no memory to write a checkpoint");
    if (blob.bytes > 0)
        memcpy(c->blob.data, blob.data, blob.bytes);
    return SHD_OK;
}

/* Those of units, where there are others than the model's. */
static int take_updates(struct checkpoint *c, struct shd_err *e)
{
    const struct model *m = c->model;
    c->updates = step_updates(m->core);
    if (!step_units_counted_apart(m->core))
        return SHD_OK;
    if (c->op->session->said.level < WIRE_LEVEL_COUNTS)
        return err_set(e, SHD_ENOTSUP,
                       "units of model '%s' have had different numbers of updates, which the "
                       "library that saves it does not know of: save by one of the daemons' build",
                       m->spec->name);
    c->unit_updates = sys_calloc(m->spec->unit_count, sizeof *c->unit_updates);
    if (c->unit_updates == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to write a checkpoint");
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        c->unit_updates[u] = step_unit_updates(m->core, u);
    return SHD_OK;
}

static int check_answer(const struct checkpoint *c, struct shd_err *e)
{
    const uint64_t blob_bytes = step_last_blob(c->model->core).bytes;
    const uint64_t counts_bytes = c->unit_updates != NULL
                                      ? c->model->spec->unit_count * sizeof *c->unit_updates
                                      : 0;
    const uint64_t settings_bytes = c->settings_json != NULL ? strlen(c->settings_json) : 0;
    const uint64_t room = WIRE_FRAME_BYTES_MAX - REPLY_REST_BYTES;
    if (blob_bytes + counts_bytes + settings_bytes <= room)
        return SHD_OK;
    return err_set(e, SHD_ERANGE,
                   "a blob of %" PRIu64 " bytes, the counts of %" PRIu32 " units, %" PRIu64
                   ", and settings, %" PRIu64 ", are more than the %" PRIu64
                   " that a message holds: commit a smaller blob",
                   blob_bytes, c->model->spec->unit_count, counts_bytes, settings_bytes, room);
}

/* What is set at this step, and what waits for a later one. */
static int take_settings(struct checkpoint *c, struct shd_err *e)
{
    const uint32_t level = model_settings_new(c->model) ? WIRE_LEVEL_AUDITS : WIRE_LEVEL_STATES;
    const int r = model_settings(c->model, c->step, &c->settings_json, e);
    if (r == SHD_OK && c->settings_json != NULL && c->op->session->said.level < level)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has settings, which the library that saves it does not know of: "
                       "save by one of the daemons' build",
                       c->model->spec->name);
    return r == SHD_OK ? check_answer(c, e) : r;
}

int checkpoint_begin(struct op *op)
{
    struct model *m = op->model;
    CHECK(m->checkpoint == NULL && step_phase(m->core) != STEP_APPLYING && op->text != NULL);
    struct checkpoint *c = sys_calloc(1, sizeof *c);
    if (c == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to write a checkpoint");
    c->model = m;
    c->op = op;
    c->out = CHECKPOINT_OUT_CLOSED;
    c->write_last = &c->write_first;
    c->started_ns = uv_hrtime();
    c->step = step_now(m->core);
    c->has_decision = step_last_decision(m->core, &c->decision);
    c->at.first_elem = m->map->slice[0].first_elem;
    int r = take_updates(c, &op->err);
    if (r == SHD_OK)
        r = take_settings(c, &op->err);
    if (r == SHD_OK)
        r = make_buffers(c, &op->err);
    if (r != SHD_OK) {
        checkpoint_free(c);
        return r;
    }
    FAIL_POINT("checkpoint:begin");
    m->checkpoint = c;
    c->work.data = c;
    uv_queue_work(m->daemon->loop, &c->work, open_files, files_opened);
    return SHD_PENDING;
}

struct op *checkpoint_op(const struct model *m)
{
    return m->checkpoint != NULL ? m->checkpoint->op : NULL;
}

void checkpoint_retry(struct model *m)
{
    struct checkpoint *c = m->checkpoint;
    if (c == NULL || !c->waits)
        return;
    c->waits = false;
    pump(c);
}

void checkpoint_replace(struct model *m)
{
    struct shd_err e;
    err_set(&e, SHD_ESTEP, "the session asks for another step");
    fail(m->checkpoint, SHD_ESTEP, &e);
}
