/* See snapshots.h. */
#include "daemon/model/snapshots.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/ledger.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/step.h"
#include "daemon/core/step_rewind.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/board.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

#define SNAPSHOT_MAGIC UINT64_C(0x31706e7364726873) /* "shrdsnp1" */
#define KEEP_DEFAULT   2u
#define NONE           UINT32_MAX
#define RETRY_US       1000u

_Static_assert(KEEPER_SNAPSHOTS == LEDGER_SNAPSHOTS && WIRE_SNAPSHOTS_MAX == LEDGER_SNAPSHOTS,
               "as many as the ledger says");

/* At the beginning of the segment; then the blob, then, behind whole pages, the arrays as in the
 * state segment. */
struct head {
    uint64_t magic;
    uint64_t units, state_bytes;
    uint64_t time_ns; /* since 1970 */
    struct rewind_record record;
    _Alignas(64) _Atomic uint64_t ready; /* written last: all of it is there */
    uint64_t updates[];                  /* [units] */
};

enum snapshot_state { SNAPSHOT_NONE, SNAPSHOT_FREE, SNAPSHOT_COPYING, SNAPSHOT_READY };

struct snapshot {
    enum snapshot_state state;
    uint64_t step;
    struct segment segment; /* owned; NONE: closed */
    bool used;              /* something was copied to it */
    uint32_t lent;          /* so many read it */
};

struct snapshots {
    struct model *model; /* borrowed */
    struct snapshot items[LEDGER_SNAPSHOTS];
    uint64_t want;   /* a step that was asked for; UINT64_MAX: none */
    uint32_t making; /* item whose memory libuv's pool makes; NONE */
    uint32_t copying;
    bool unqueued;         /* the copy waits for room in the kernel queue */
    struct rewind *rewind; /* rewind.h's */
    uv_work_t work;
    struct segment made;
    struct task task;
    int status; /* of what failed last: */
    struct shd_err err;
};

static struct snapshots *snapshots_of(const struct model *m)
{
    return m->waits.snapshots;
}

static int get(struct model *m, struct snapshots **ret_snapshots, struct shd_err *e)
{
    struct snapshots *s = m->waits.snapshots;
    if (m->ledger->rewind == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "the model was opened by an older build, whose ledger knows no snapshots: "
                       "save it, and restore it in this one (shardctl restore --replace)");
    if (s == NULL) {
        s = sys_calloc(1, sizeof *s);
        if (s == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for snapshots");
        *s = (struct snapshots){
            .model = m, .want = UINT64_MAX, .making = NONE, .copying = NONE, .made = SEGMENT_CLOSED
        };
        for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
            s->items[i].segment = SEGMENT_CLOSED;
        s->work.data = s;
        m->waits.snapshots = s;
    }
    *ret_snapshots = s;
    return SHD_OK;
}

/* -- Places -------------------------------------------------------------------------------------
 */

static uint64_t blob_at(const struct model *m)
{
    return layout_align(sizeof(struct head) + m->ledger->head->units * sizeof(uint64_t),
                        SHD_PAGE_BYTES);
}

static uint64_t state_at(const struct model *m)
{
    return blob_at(m) + LEDGER_BLOB_BYTES;
}

uint64_t snapshot_state_bytes(const struct model *m)
{
    return shardmap_kept_elems(m->map) * sizeof(float);
}

static uint64_t all_bytes(const struct model *m)
{
    return layout_align(state_at(m) + snapshot_state_bytes(m), SHD_PAGE_BYTES);
}

static struct head *head_of(const struct snapshot *item)
{
    return item->segment.base;
}

static struct snapshot *find(const struct model *m, uint64_t step)
{
    struct snapshots *s = snapshots_of(m);
    for (uint32_t i = 0; s != NULL && i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state == SNAPSHOT_READY && s->items[i].step == step)
            return &s->items[i];
    return NULL;
}

bool snapshot_has(const struct model *m, uint64_t step)
{
    return find(m, step) != NULL;
}

const void *snapshot_state(const struct model *m, uint64_t step)
{
    const struct snapshot *item = find(m, step);
    CHECK(item != NULL);
    return (const uint8_t *)item->segment.base + state_at(m);
}

static uint64_t options_of(const struct model *m)
{
    return m->ledger->rewind != NULL ? atomic_load(&m->ledger->rewind->options) : 0;
}

static uint32_t keep_of(const struct model *m)
{
    const uint32_t keep = ledger_snapshot_keep(options_of(m));
    return keep > 0 ? keep : KEEP_DEFAULT;
}

/* -- Giving up ----------------------------------------------------------------------------------
 */

static void give_up(struct snapshot *item)
{
    atomic_store_explicit(&head_of(item)->ready, 0, memory_order_release);
    item->state = SNAPSHOT_FREE;
}

/* After one was made, or is no more. */
static void count_bytes(const struct snapshots *s)
{
    struct model_use *use = &s->model->use;
    use->snapshot_bytes = use->snapshot_file_bytes = 0;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state != SNAPSHOT_NONE)
            *(s->items[i].segment.file ? &use->snapshot_file_bytes
                                       : &use->snapshot_bytes) += s->items[i].segment.bytes;
}

static void close_item(struct snapshots *s, uint32_t index)
{
    const struct model_kept *kept = &s->model->kept;
    keeper_remove_part(kept->keeper, kept->instance,
                       (enum keeper_part)(KEEPER_SNAPSHOT + (int)index));
    model_give(s->model, s->items[index].segment.bytes);
    keeper_segment_close(kept->keeper, &s->items[index].segment);
    s->items[index] = (struct snapshot){ .segment = SEGMENT_CLOSED };
    count_bytes(s);
}

/* Of one on a file the arrays are not needed in memory: whoever goes back reads them. What comes
 * before them is looked at by this thread, and stays. Nor are those of a state on a file, which
 * were copied. */
static void leave_to_disk(const struct snapshots *s, const struct snapshot *item)
{
    const struct model *m = s->model;
    const uint64_t at = state_at(m);
    keeper_segment_behind(m->kept.keeper, &item->segment, at, item->segment.bytes - at);
    keeper_segment_behind(m->kept.keeper, &m->state, 0, m->state.bytes);
}

static struct snapshot *find_oldest(struct snapshots *s, uint32_t *ret_count)
{
    const uint64_t held = atomic_load(&s->model->ledger->rewind->held);
    struct snapshot *oldest = NULL;
    *ret_count = 0;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++) {
        struct snapshot *item = &s->items[i];
        if (item->state != SNAPSHOT_READY || item->step + 1 == held)
            continue;
        ++*ret_count;
        if (oldest == NULL || item->step < oldest->step)
            oldest = item;
    }
    return oldest;
}

/* Keep so many as there are to be, and memory for one more. A file that was written goes: to write
 * it again it would be read, and a new one costs no time. */
static void trim(struct snapshots *s)
{
    uint32_t count, spare = 0;
    struct snapshot *oldest;
    while ((oldest = find_oldest(s, &count)) != NULL && count > keep_of(s->model))
        give_up(oldest);
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++) {
        const struct snapshot *item = &s->items[i];
        if (item->state != SNAPSHOT_FREE || item->lent > 0)
            continue;
        if ((item->segment.file && item->used) || ++spare > 1)
            close_item(s, i);
    }
}

void snapshot_rewound(struct model *m, uint64_t step)
{
    struct snapshots *s = snapshots_of(m);
    const struct snapshot *item = find(m, step);
    CHECK(s != NULL && item != NULL);
    const struct head *h = head_of(item);
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state == SNAPSHOT_READY && s->items[i].step > step)
            give_up(&s->items[i]);
    s->want = UINT64_MAX;
    FAIL_POINT("rewind:words");
    step_rewind_done(m->ledger, &h->record, h->updates,
                     (const uint8_t *)item->segment.base + blob_at(m));
    leave_to_disk(s, item);
}

bool snapshot_lend(struct model *m, uint64_t step, struct snapshot_lent *ret_lent)
{
    struct snapshot *item = find(m, step);
    if (item == NULL)
        return false;
    const uint8_t *base = item->segment.base;
    item->lent++;
    *ret_lent = (struct snapshot_lent){ .snapshot = item,
                                        .record = &head_of(item)->record,
                                        .updates = head_of(item)->updates,
                                        .blob = base + blob_at(m),
                                        .state = base + state_at(m) };
    return true;
}

void snapshot_give_back(struct model *m, struct snapshot *snapshot)
{
    CHECK(snapshot->lent > 0);
    snapshot->lent--;
    trim(snapshots_of(m));
}

bool snapshot_comes(const struct model *m, uint64_t step)
{
    const struct snapshots *s = snapshots_of(m);
    return s != NULL && s->copying != NONE && s->items[s->copying].step == step;
}

void snapshots_say(const struct model *m)
{
    const struct ledger_rewind *r = m->ledger->rewind;
    if (r != NULL)
        board_set_rewound(m->board, r->last_step, atomic_load(&r->last));
}

/* -- Memory -------------------------------------------------------------------------------------
 */

static void make(uv_work_t *work)
{
    struct snapshots *s = work->data;
    const struct model *m = s->model;
    FAIL_POINT("snapshot:make");
    const enum keeper_part part = (enum keeper_part)(KEEPER_SNAPSHOT + (int)s->making);
    s->status = model_take(m, all_bytes(m), "a snapshot", &s->err);
    if (s->status != SHD_OK)
        return;
    s->status = keeper_segment_new(m->kept.keeper, part, SEGMENT_STAGE, all_bytes(m), &s->made,
                                   &s->err);
    if (s->status != SHD_OK) {
        model_give(m, all_bytes(m));
        return;
    }
    *(struct head *)s->made.base = (struct head){ .magic = SNAPSHOT_MAGIC,
                                                  .units = m->ledger->head->units,
                                                  .state_bytes = snapshot_state_bytes(m) };
    s->status = keeper_store(m->kept.keeper, m->kept.instance, part, s->made.fd, &s->err);
    if (s->status == SHD_OK)
        return;
    segment_close(&s->made);
    model_give(m, all_bytes(m));
}

static void made(uv_work_t *work, int cancelled)
{
    struct snapshots *s = work->data;
    struct model *m = s->model;
    struct snapshot *item = &s->items[s->making];
    CHECK(cancelled == 0);
    s->making = NONE;
    if (s->status != SHD_OK) {
        log_warn("op=snapshot model=%s status=%s why=\"%s\""
                 " do=\"nothing: training goes on; a snapshot needs as much room as the state\"",
                 m->spec->name, status_name(s->status), s->err.text);
        return;
    }
    item->segment = s->made;
    item->state = SNAPSHOT_FREE;
    s->made = SEGMENT_CLOSED;
    count_bytes(s);
    if (!m->daemon->stopping)
        snapshots_moved(m);
}

static uint32_t find_state(const struct snapshots *s, enum snapshot_state state)
{
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state == state && s->items[i].lent == 0)
            return i;
    return NONE;
}

/* Have memory for the next one, in time. */
static void prepare(struct snapshots *s)
{
    const struct model *m = s->model;
    if (s->making != NONE || find_state(s, SNAPSHOT_FREE) != NONE || m->use.dropped)
        return;
    s->making = find_state(s, SNAPSHOT_NONE);
    if (s->making != NONE)
        uv_queue_work(m->daemon->loop, &s->work, make, made);
}

/* -- Copying ------------------------------------------------------------------------------------
 */

static void done(struct snapshots *s, int status)
{
    struct model *m = s->model;
    struct snapshot *item = &s->items[s->copying];
    s->copying = NONE;
    if (status != SHD_OK) {
        s->status = kern_explain(m->kern, status, &s->err, "copying a snapshot");
        log_warn("op=snapshot model=%s step=%" PRIu64 " status=%s why=\"%s\""
                 " do=\"nothing: training goes on\"",
                 m->spec->name, item->step, status_name(status), s->err.text);
        give_up(item);
        return;
    }
    if (m->use.rewinding && item->step > m->ledger->rewind->step) {
        give_up(item); /* it was being made, and its step is given up */
        return;
    }
    FAIL_POINT("snapshot:ready:before");
    atomic_store_explicit(&head_of(item)->ready, 1, memory_order_release);
    FAIL_POINT("snapshot:ready:after");
    item->state = SNAPSHOT_READY;
    leave_to_disk(s, item);
    trim(s);
    log_info("op=snapshot model=%s step=%" PRIu64 " bytes=%" PRIu64, m->spec->name, item->step,
             item->segment.bytes);
}

static void copied(struct task *task)
{
    struct snapshots *s = (struct snapshots *)((char *)task - offsetof(struct snapshots, task));
    done(s, task->status);
}

static int queue_copy(struct snapshots *s, struct shd_err *e)
{
    const struct model *m = s->model;
    const struct snapshot *item = &s->items[s->copying];
    const struct kern_copy copy = { .to = (uint8_t *)item->segment.base + state_at(m),
                                    .from = m->state.base,
                                    .bytes = snapshot_state_bytes(m) };
    task_init(&s->task, m->daemon->tasks, copied);
    const int r = kern_copy(m->kern, &copy, &s->task.done, e);
    s->unqueued = r == SHD_EBUSY;
    if (s->unqueued)
        m->daemon->kernel_full = true;
    else if (r != SHD_OK)
        task_post_here(&s->task, r);
    return s->unqueued ? SHD_EBUSY : SHD_OK;
}

/* Its step is open, and no update of it can be queued before the copy. */
static void begin(struct snapshots *s, uint64_t step)
{
    struct model *m = s->model;
    const uint32_t index = find_state(s, SNAPSHOT_FREE);
    struct shd_err ignored;
    struct timespec now;
    if (index == NONE || s->copying != NONE)
        return;
    struct snapshot *item = &s->items[index];
    struct head *h = head_of(item);
    clock_gettime(CLOCK_REALTIME, &now);
    h->time_ns = (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
    step_rewind_take(m->core, &h->record, h->updates, (uint8_t *)item->segment.base + blob_at(m));
    FAIL_POINT("snapshot:head");
    item->state = SNAPSHOT_COPYING;
    item->step = step;
    item->used = true;
    s->copying = index;
    if (s->want == step)
        s->want = UINT64_MAX;
    if (snapshot_state_bytes(m) == 0)
        done(s, SHD_OK);
    else
        queue_copy(s, &ignored);
}

static bool is_wanted(const struct snapshots *s, uint64_t step)
{
    const uint64_t every = ledger_snapshot_every(options_of(s->model));
    return s->want == step || (every > 0 && step > 0 && step % every == 0);
}

void snapshots_moved(struct model *m)
{
    struct snapshots *s = snapshots_of(m);
    struct shd_err ignored;
    if (s == NULL && options_of(m) != 0 && get(m, &s, &ignored) != SHD_OK)
        return;
    if (s == NULL || m->use.dropped || m->use.rewinding || !m->ready)
        return;
    const uint64_t step = step_now(m->core);
    if (step_phase(m->core) != STEP_APPLYING && is_wanted(s, step) && find(m, step) == NULL &&
        (s->copying == NONE || s->items[s->copying].step != step))
        begin(s, step);
    if (ledger_snapshot_every(options_of(m)) > 0)
        prepare(s);
}

int snapshots_before_update(struct model *m, struct shd_err *e)
{
    struct snapshots *s = snapshots_of(m);
    return s != NULL && s->unqueued ? queue_copy(s, e) : SHD_OK;
}

void snapshots_retry(struct model *m)
{
    struct shd_err ignored;
    snapshots_before_update(m, &ignored);
}

/* -- Requests -----------------------------------------------------------------------------------
 */

static int busy(struct op *op)
{
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY, "daemon %s is at it: ask again", op->daemon->device);
}

static int take(struct op *op, struct snapshots *s, uint64_t step)
{
    struct model *m = op->model;
    const uint64_t open = step_collecting(m->core);
    if (find(m, step) != NULL)
        return SHD_OK;
    if (s->copying != NONE && s->items[s->copying].step == step)
        return busy(op);
    if (s->making == NONE && s->status != SHD_OK) {
        const int status = s->status;
        s->status = SHD_OK; /* it is tried again when it is asked for again */
        s->want = UINT64_MAX;
        return err_set(&op->err, status, "no snapshot of step %" PRIu64 ": %s", step, s->err.text);
    }
    if (step < open)
        return err_set(&op->err, SHD_ESTEP,
                       "snapshot of step %" PRIu64 " asked for, the open step is %" PRIu64, step,
                       open);
    s->want = step;
    prepare(s);
    snapshots_moved(m);
    return find(m, step) != NULL ? SHD_OK : busy(op);
}

static int set_options(struct op *op, struct snapshots *s)
{
    const struct wire_snapshot *req = &op->req.snapshot;
    struct model *m = op->model;
    if (req->every > LEDGER_STEP_MAX)
        return err_set(&op->err, SHD_ERANGE, "a snapshot every %" PRIu64 " steps, at most %" PRIu64,
                       req->every, LEDGER_STEP_MAX);
    const uint32_t keep = req->keep > 0 ? req->keep : keep_of(m);
    atomic_store_explicit(&m->ledger->rewind->options, ledger_snapshot_options(req->every, keep),
                          memory_order_release);
    trim(s);
    snapshots_moved(m);
    log_info("op=snapshot model=%s every=%" PRIu64 " keep=%" PRIu32, m->spec->name, req->every,
             keep);
    return SHD_OK;
}

static int compare_rows(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (x[0] > y[0]) - (x[0] < y[0]);
}

static int answer(struct op *op)
{
    const struct model *m = op->model;
    const struct snapshots *s = snapshots_of(m);
    uint64_t(*rows)[WIRE_SNAPSHOT_BYTES / sizeof(uint64_t)];
    size_t count = 0;
    rows = sys_calloc(LEDGER_SNAPSHOTS, sizeof *rows);
    if (rows == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a list of snapshots");
    for (uint32_t i = 0; s != NULL && i < LEDGER_SNAPSHOTS; i++) {
        const struct snapshot *item = &s->items[i];
        if (item->state != SNAPSHOT_READY)
            continue;
        rows[count][0] = item->step;
        rows[count][1] = item->segment.bytes;
        rows[count++][2] = head_of(item)->time_ns;
    }
    qsort(rows, count, sizeof *rows, compare_rows);
    op->work = rows; /* freed with the op */
    op->reply.type = WIRE_SNAPSHOTS;
    op->reply.snapshots = (struct wire_snapshots){
        .step = step_collecting(m->core),
        .every = ledger_snapshot_every(options_of(m)),
        .keep = keep_of(m),
        .rows = { (const uint8_t *)rows, count * sizeof *rows },
    };
    return SHD_OK;
}

int snapshot_ask(struct op *op)
{
    const struct wire_snapshot *req = &op->req.snapshot;
    struct snapshots *s = NULL;
    int r = model_of(op, req->model);
    if (r == SHD_OK && req->what != WIRE_SNAPSHOT_LOOK)
        r = get(op->model, &s, &op->err);
    if (r == SHD_OK && req->what == WIRE_SNAPSHOT_TAKE)
        r = take(op, s, req->step);
    if (r == SHD_OK && req->what == WIRE_SNAPSHOT_EVERY)
        r = set_options(op, s);
    return r == SHD_OK ? answer(op) : r;
}

/* -- Ends ---------------------------------------------------------------------------------------
 */

struct rewind **snapshots_rewind(struct model *m)
{
    struct snapshots *s = snapshots_of(m);
    CHECK(s != NULL);
    return &s->rewind;
}

bool snapshots_are_idle(const struct model *m)
{
    const struct snapshots *s = snapshots_of(m);
    uint32_t lent = 0;
    for (uint32_t i = 0; s != NULL && i < LEDGER_SNAPSHOTS; i++)
        lent += s->items[i].lent;
    return s == NULL || (s->making == NONE && s->copying == NONE && s->rewind == NULL && lent == 0);
}

void snapshots_free(struct model *m)
{
    struct snapshots *s = snapshots_of(m);
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        keeper_segment_close(m->kept.keeper, &s->items[i].segment);
    segment_close(&s->made);
    free(s->rewind);
    free(s);
    m->waits.snapshots = NULL;
}

/* -- After a predecessor ------------------------------------------------------------------------
 */

/* Nothing in it is trusted; the ledger's part is looked at when the ledger has it. */
static bool is_good(const struct model *m, const struct head *h)
{
    return h->magic == SNAPSHOT_MAGIC && h->units == m->ledger->head->units &&
           h->state_bytes == snapshot_state_bytes(m) && atomic_load(&h->ready) == 1 &&
           h->record.step <= LEDGER_STEP_MAX && h->record.record.blob_bytes <= LEDGER_BLOB_BYTES;
}

static int adopt_one(struct model *m, int fd, struct snapshot *item, struct shd_err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < 0 || (uint64_t)st.st_size != all_bytes(m))
        return err_set(e, SHD_ESEGMENT, "a snapshot is not of %" PRIu64 " bytes", all_bytes(m));
    const int r = keeper_segment_map(fd, SEGMENT_STAGE, all_bytes(m), &item->segment, e);
    if (r != SHD_OK)
        return r;
    item->used = true;
    model_have(m, item->segment.bytes);
    struct head *h = head_of(item);
    item->state = is_good(m, h) ? SNAPSHOT_READY : SNAPSHOT_FREE;
    item->step = h->record.step;
    if (item->state == SNAPSHOT_FREE) { /* it was being made */
        h->magic = SNAPSHOT_MAGIC;
        h->units = m->ledger->head->units;
        h->state_bytes = snapshot_state_bytes(m);
        give_up(item);
    }
    return SHD_OK;
}

int snapshots_adopt(struct model *m, struct keeper_group *g, struct shd_err *e)
{
    struct snapshots *s = NULL;
    uint64_t step;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++) {
        if (g->fd[KEEPER_SNAPSHOT + i] < 0)
            continue;
        int r = get(m, &s, e);
        if (r == SHD_OK && s != NULL)
            r = adopt_one(m, g->fd[KEEPER_SNAPSHOT + i], &s->items[i], e);
        if (r == SHD_ENOMEM)
            return r;
        if (r != SHD_OK)
            log_warn("op=adopt model=%s why=\"a snapshot is dropped: %s\" do=\"nothing: the others "
                     "are there\"",
                     m->spec->name, e->text);
    }
    if (ledger_rewinding(m->ledger, &step) && find(m, step) == NULL)
        return err_set(
            e, SHD_ESEGMENT,
            "it was going back to step %" PRIu64 ", and the keeper has no snapshot of that", step);
    return SHD_OK;
}

void snapshots_adopted(struct model *m, struct keeper_group *g)
{
    const struct snapshots *s = snapshots_of(m);
    if (s != NULL)
        count_bytes(s);
    for (int i = 0; i < KEEPER_SNAPSHOTS; i++) {
        int *fd = &g->fd[KEEPER_SNAPSHOT + i];
        if (*fd < 0 || (s != NULL && s->items[i].state != SNAPSHOT_NONE))
            continue;
        keeper_remove_part(m->kept.keeper, g->instance, (enum keeper_part)(KEEPER_SNAPSHOT + i));
        close(*fd);
        *fd = -1;
    }
}

void snapshots_unadopt(struct model *m)
{
    struct snapshots *s = snapshots_of(m);
    for (uint32_t i = 0; s != NULL && i < LEDGER_SNAPSHOTS; i++)
        s->items[i].segment.fd = -1; /* the group's */
    snapshots_free(m);
}

int snapshots_finish_rewind(struct model *m, struct kern *kern, struct shd_err *e)
{
    uint64_t step;
    if (!ledger_rewinding(m->ledger, &step))
        return SHD_OK;
    struct kern_waiter w;
    const struct kern_copy copy = { .to = m->state.base,
                                    .from = snapshot_state(m, step),
                                    .bytes = snapshot_state_bytes(m) };
    int r = SHD_OK;
    kern_waiter_init(&w);
    while (copy.bytes > 0 && (r = kern_copy(kern, &copy, &w.done, e)) == SHD_EBUSY)
        usleep(RETRY_US);
    if (copy.bytes > 0 && r == SHD_OK && (r = kern_wait(&w)) != SHD_OK)
        kern_explain(kern, r, e, "copying a snapshot back");
    if (r != SHD_OK)
        return r;
    FAIL_POINT("adopt:rewound");
    snapshot_rewound(m, step);
    struct ledger looked_at;
    r = ledger_adopt(&looked_at, m->ledger->head, m->ledger->head->bytes, e);
    if (r == SHD_OK)
        log_info("op=rewind model=%s step=%" PRIu64 " why=\"a predecessor had begun it\"",
                 m->spec->name, step);
    return r;
}
