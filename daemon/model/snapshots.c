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
#include "daemon/core/snapshot_set.h"
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
#define NONE           SNAPSHOT_NO_ITEM
#define RETRY_US       1000u

_Static_assert(KEEPER_SNAPSHOTS == LEDGER_SNAPSHOTS && WIRE_SNAPSHOTS_MAX == LEDGER_SNAPSHOTS,
               "as many as the ledger says");

/* At the beginning of the segment; then, where the ledger has more (struct rewind_more), that, and
 * a guard's windows of units; then the blob, then, behind whole pages, the arrays as in the state
 * segment. */
struct head {
    uint64_t magic;
    uint64_t units, state_bytes;
    uint64_t time_ns; /* since 1970 */
    struct rewind_record record;
    _Alignas(64) _Atomic uint64_t ready; /* written last: all of it is there */
    uint64_t updates[];                  /* [units] */
};

struct snapshots {
    struct model *model;                       /* borrowed */
    struct snapshot_set set;                   /* which there are, and which go */
    struct segment segments[LEDGER_SNAPSHOTS]; /* owned; of one that is NONE: closed */
    bool written[LEDGER_SNAPSHOTS];            /* something was copied to it */
    uint32_t making;                           /* item whose memory libuv's pool makes; NONE */
    bool unqueued;                             /* the copy waits for room in the kernel queue */
    struct rewind *rewind;                     /* rewind.h's */
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
        *s = (struct snapshots){ .model = m, .making = NONE, .made = SEGMENT_CLOSED };
        snapshot_set_init(&s->set);
        for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
            s->segments[i] = SEGMENT_CLOSED;
        s->work.data = s;
        m->waits.snapshots = s;
    }
    *ret_snapshots = s;
    return SHD_OK;
}

/* -- Places -------------------------------------------------------------------------------------
 */

static uint64_t more_at(const struct model *m)
{
    return layout_align(sizeof(struct head) + m->ledger->head->units * sizeof(uint64_t),
                        _Alignof(struct head));
}

static uint64_t window_at(const struct model *m)
{
    return layout_align(more_at(m) + rewind_more_bytes(m->ledger), _Alignof(struct head));
}

static uint64_t blob_at(const struct model *m)
{
    return layout_align(window_at(m) + step_rewind_window_bytes(m->ledger), SHD_PAGE_BYTES);
}

static uint64_t state_at(const struct model *m)
{
    return blob_at(m) + LEDGER_BLOB_BYTES;
}

uint64_t snapshot_state_bytes(const struct model *m)
{
    return shardmap_kept_bytes(m->map);
}

static uint64_t all_bytes(const struct model *m)
{
    return layout_align(state_at(m) + snapshot_state_bytes(m), SHD_PAGE_BYTES);
}

static struct head *head_of(const struct snapshots *s, uint32_t item)
{
    return s->segments[item].base;
}

bool snapshot_has(const struct model *m, uint64_t step)
{
    const struct snapshots *s = snapshots_of(m);
    return s != NULL && snapshot_set_find(&s->set, step) != NONE;
}

/* It is there. */
static const uint8_t *memory_of(const struct model *m, uint64_t step)
{
    const struct snapshots *s = snapshots_of(m);
    CHECK(snapshot_has(m, step));
    return s->segments[snapshot_set_find(&s->set, step)].base;
}

const void *snapshot_state(const struct model *m, uint64_t step)
{
    return memory_of(m, step) + state_at(m);
}

const struct rewind_more *snapshot_more(const struct model *m, uint64_t step)
{
    return rewind_more_bytes(m->ledger) > 0 ? (const void *)(memory_of(m, step) + more_at(m))
                                            : NULL;
}

/* -- Giving up ----------------------------------------------------------------------------------
 */

static void give_up(struct snapshots *s, uint32_t item)
{
    atomic_store_explicit(&head_of(s, item)->ready, 0, memory_order_release);
    s->set.items[item].state = SNAPSHOT_FREE;
}

/* After one was made, or is no more. */
static void count_bytes(const struct snapshots *s)
{
    struct model_use *use = &s->model->use;
    use->snapshot_bytes = use->snapshot_file_bytes = 0;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->set.items[i].state != SNAPSHOT_NONE)
            *(s->segments[i].file ? &use->snapshot_file_bytes
                                  : &use->snapshot_bytes) += s->segments[i].bytes;
}

static void close_item(struct snapshots *s, uint32_t index)
{
    const struct model_kept *kept = &s->model->kept;
    keeper_remove_part(kept->keeper, kept->instance,
                       (enum keeper_part)(KEEPER_SNAPSHOT + (int)index));
    model_give(s->model, s->segments[index].bytes);
    keeper_segment_close(kept->keeper, &s->segments[index]);
    s->segments[index] = SEGMENT_CLOSED;
    s->written[index] = false;
    s->set.items[index] = (struct snapshot_item){ .state = SNAPSHOT_NONE };
    count_bytes(s);
}

/* Of one on a file the arrays are not needed in memory: whoever goes back reads them. What comes
 * before them is looked at by this thread, and stays. Nor are those of a state on a file, which
 * were copied. */
static void leave_to_disk(const struct snapshots *s, uint32_t item)
{
    const struct model *m = s->model;
    const struct segment *segment = &s->segments[item];
    const uint64_t at = state_at(m);
    keeper_segment_behind(m->kept.keeper, segment, at, segment->bytes - at);
    keeper_segment_behind(m->kept.keeper, &m->state, 0, m->state.bytes);
}

/* Keep so many as there are to be, and memory for one more. A file that was written goes: to write
 * it again it would be read, and a new one costs no time. */
static void trim(struct snapshots *s)
{
    uint32_t item;
    while ((item = snapshot_set_excess(&s->set, s->model->ledger)) != NONE)
        give_up(s, item);
    for (item = 0; item < LEDGER_SNAPSHOTS; item++)
        if (s->segments[item].file && s->written[item] &&
            snapshot_item_is_free(&s->set.items[item]))
            close_item(s, item);
    while ((item = snapshot_set_spare(&s->set)) != NONE)
        close_item(s, item);
}

void snapshot_rewound(struct model *m, uint64_t step)
{
    struct snapshots *s = snapshots_of(m);
    const uint8_t *memory = memory_of(m, step);
    const struct head *h = (const void *)memory;
    uint32_t item;
    while ((item = snapshot_set_later(&s->set, step)) != NONE)
        give_up(s, item);
    FAIL_POINT("rewind:words");
    step_rewind_put_window(m->ledger, memory + window_at(m));
    step_rewind_done(m->ledger, &h->record, (const void *)(memory + more_at(m)), h->updates,
                     memory + blob_at(m));
    leave_to_disk(s, snapshot_set_find(&s->set, step));
}

bool snapshot_lend(struct model *m, uint64_t step, struct snapshot_lent *ret_lent)
{
    struct snapshots *s = snapshots_of(m);
    const uint32_t item = s != NULL ? snapshot_set_find(&s->set, step) : NONE;
    if (item == NONE)
        return false;
    const uint8_t *base = s->segments[item].base;
    s->set.items[item].lent++;
    *ret_lent = (struct snapshot_lent){ .snapshot = &s->set.items[item],
                                        .record = &head_of(s, item)->record,
                                        .more = snapshot_more(m, step),
                                        .updates = head_of(s, item)->updates,
                                        .blob = base + blob_at(m),
                                        .state = base + state_at(m) };
    return true;
}

void snapshot_give_back(struct model *m, struct snapshot_item *snapshot)
{
    CHECK(snapshot->lent > 0);
    snapshot->lent--;
    trim(snapshots_of(m));
}

bool snapshot_comes(const struct model *m, uint64_t step)
{
    const struct snapshots *s = snapshots_of(m);
    return s != NULL && s->set.copying != NONE && s->set.items[s->set.copying].step == step;
}

void snapshots_say(const struct model *m)
{
    uint64_t step;
    const uint64_t attempt = step_rewind_last(m->ledger, &step);
    if (m->ledger->rewind != NULL)
        board_set_rewound(m->board, step, attempt);
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
    const uint32_t item = s->making;
    CHECK(cancelled == 0);
    s->making = NONE;
    if (s->status != SHD_OK) {
        log_warn("op=snapshot model=%s status=%s why=\"%s\""
                 " do=\"nothing: training goes on; a snapshot needs as much room as the state\"",
                 m->spec->name, status_name(s->status), s->err.text);
        return;
    }
    s->segments[item] = s->made;
    s->set.items[item].state = SNAPSHOT_FREE;
    s->made = SEGMENT_CLOSED;
    count_bytes(s);
    if (!m->daemon->stopping)
        snapshots_moved(m);
}

/* Have memory for the next one, in time. */
static void prepare(struct snapshots *s)
{
    const struct model *m = s->model;
    if (s->making != NONE || snapshot_set_in(&s->set, SNAPSHOT_FREE) != NONE || m->use.dropped)
        return;
    s->making = snapshot_set_in(&s->set, SNAPSHOT_NONE);
    if (s->making != NONE)
        uv_queue_work(m->daemon->loop, &s->work, make, made);
}

/* -- Copying ------------------------------------------------------------------------------------
 */

static void done(struct snapshots *s, int status)
{
    struct model *m = s->model;
    uint32_t item;
    const bool good = snapshot_set_copied(&s->set, m->ledger, status == SHD_OK, &item);
    const uint64_t step = s->set.items[item].step;
    if (status != SHD_OK) {
        s->status = kern_explain(m->kern, status, &s->err, "copying a snapshot");
        log_warn("op=snapshot model=%s step=%" PRIu64 " status=%s why=\"%s\""
                 " do=\"nothing: training goes on\"",
                 m->spec->name, step, status_name(status), s->err.text);
    }
    if (!good) {
        give_up(s, item);
        return;
    }
    FAIL_POINT("snapshot:ready:before");
    atomic_store_explicit(&head_of(s, item)->ready, 1, memory_order_release);
    FAIL_POINT("snapshot:ready:after");
    s->set.items[item].state = SNAPSHOT_READY;
    leave_to_disk(s, item);
    trim(s);
    log_info("op=snapshot model=%s step=%" PRIu64 " bytes=%" PRIu64, m->spec->name, step,
             s->segments[item].bytes);
}

static void copied(struct task *task)
{
    struct snapshots *s = (struct snapshots *)((char *)task - offsetof(struct snapshots, task));
    done(s, task->status);
}

static int queue_copy(struct snapshots *s, struct shd_err *e)
{
    const struct model *m = s->model;
    uint8_t *memory = s->segments[s->set.copying].base;
    const struct kern_copy copy = { .to = memory + state_at(m),
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
static void begin(struct snapshots *s, uint32_t item)
{
    struct model *m = s->model;
    uint8_t *memory = s->segments[item].base;
    struct head *h = head_of(s, item);
    struct shd_err ignored;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    h->time_ns = (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
    step_rewind_take(m->core, &h->record, (void *)(memory + more_at(m)), h->updates,
                     memory + blob_at(m));
    step_rewind_take_window(m->core, memory + window_at(m));
    FAIL_POINT("snapshot:head");
    snapshot_set_begin(&s->set, item, h->record.step);
    s->written[item] = true;
    if (snapshot_state_bytes(m) == 0)
        done(s, SHD_OK);
    else
        queue_copy(s, &ignored);
}

void snapshots_moved(struct model *m)
{
    struct snapshots *s = snapshots_of(m);
    struct shd_err ignored;
    if (s == NULL && snapshot_set_every(m->ledger) > 0 && get(m, &s, &ignored) != SHD_OK)
        return;
    if (s == NULL || m->use.dropped || m->use.rewinding || !m->ready)
        return;
    const uint32_t item = snapshot_set_next(&s->set, m->ledger, m->core);
    if (item != NONE)
        begin(s, item);
    if (snapshot_set_every(m->ledger) > 0)
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
    const int asked = snapshot_set_ask(&s->set, m->core, step);
    if (asked == SHD_OK)
        return SHD_OK;
    if (s->set.want == step && s->making == NONE && s->status != SHD_OK) {
        const int status = s->status;
        s->status = SHD_OK; /* it is tried again when it is asked for again */
        s->set.want = UINT64_MAX;
        return err_set(&op->err, status, "no snapshot of step %" PRIu64 ": %s", step, s->err.text);
    }
    if (asked == SHD_ESTEP)
        return err_set(&op->err, SHD_ESTEP,
                       "snapshot of step %" PRIu64 " asked for, the open step is %" PRIu64, step,
                       step_collecting(m->core));
    if (s->set.want == step) { /* else it is copied already */
        prepare(s);
        snapshots_moved(m);
    }
    return snapshot_has(m, step) ? SHD_OK : busy(op);
}

static int set_options(struct op *op, struct snapshots *s)
{
    const struct wire_snapshot *req = &op->req.snapshot;
    struct model *m = op->model;
    if (req->every > LEDGER_STEP_MAX)
        return err_set(&op->err, SHD_ERANGE, "a snapshot every %" PRIu64 " steps, at most %" PRIu64,
                       req->every, LEDGER_STEP_MAX);
    const uint32_t keep = req->keep > 0 ? req->keep : snapshot_set_keep(m->ledger);
    snapshot_set_options(m->ledger, req->every, keep);
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
        if (s->set.items[i].state != SNAPSHOT_READY)
            continue;
        rows[count][0] = s->set.items[i].step;
        rows[count][1] = s->segments[i].bytes;
        rows[count++][2] = head_of(s, i)->time_ns;
    }
    qsort(rows, count, sizeof *rows, compare_rows);
    op->work = rows; /* freed with the op */
    op->reply.type = WIRE_SNAPSHOTS;
    op->reply.snapshots = (struct wire_snapshots){
        .step = step_collecting(m->core),
        .every = snapshot_set_every(m->ledger),
        .keep = snapshot_set_keep(m->ledger),
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
    return s == NULL || (s->making == NONE && s->set.copying == NONE && s->rewind == NULL &&
                         !snapshot_set_lent(&s->set));
}

void snapshots_free(struct model *m)
{
    struct snapshots *s = snapshots_of(m);
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        keeper_segment_close(m->kept.keeper, &s->segments[i]);
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

static int adopt_one(struct model *m, int fd, struct snapshots *s, uint32_t index,
                     struct shd_err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < 0 || (uint64_t)st.st_size != all_bytes(m))
        return err_set(e, SHD_ESEGMENT, "a snapshot is not of %" PRIu64 " bytes", all_bytes(m));
    const int r = keeper_segment_map(fd, SEGMENT_STAGE, all_bytes(m), &s->segments[index], e);
    if (r != SHD_OK)
        return r;
    s->written[index] = true;
    model_have(m, s->segments[index].bytes);
    struct head *h = head_of(s, index);
    struct snapshot_item *item = &s->set.items[index];
    item->state = is_good(m, h) ? SNAPSHOT_READY : SNAPSHOT_FREE;
    item->step = h->record.step;
    if (item->state == SNAPSHOT_FREE) { /* it was being made */
        h->magic = SNAPSHOT_MAGIC;
        h->units = m->ledger->head->units;
        h->state_bytes = snapshot_state_bytes(m);
        give_up(s, index);
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
            r = adopt_one(m, g->fd[KEEPER_SNAPSHOT + i], s, i, e);
        if (r == SHD_ENOMEM)
            return r;
        if (r != SHD_OK)
            log_warn("op=adopt model=%s why=\"a snapshot is dropped: %s\" do=\"nothing: the others "
                     "are there\"",
                     m->spec->name, e->text);
    }
    if (ledger_rewinding(m->ledger, &step) && !snapshot_has(m, step))
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
        if (*fd < 0 || (s != NULL && s->set.items[i].state != SNAPSHOT_NONE))
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
        s->segments[i].fd = -1; /* the group's */
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
