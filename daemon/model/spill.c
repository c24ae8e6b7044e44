/* See spill.h. */
#include "daemon/model/spill.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/model/apply.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

#define NS_PER_MS       UINT64_C(1000000)
#define PATIENCE_MS     5 /* least: longer than a gradient takes to be summed */
#define PATIENCE_NS     (PATIENCE_MS * NS_PER_MS)
#define PATIENCE_ONE_NS (10 * PATIENCE_NS)
#define PATIENCE_MAX_NS (5000 * NS_PER_MS)
#define STEP_UNKNOWN_NS (4000 * NS_PER_MS)
#define LOOK_MS_MAX     50   /* from one look to the next */
#define SHORTAGE_MS     1000 /* until memory is looked at again */
#define UNUSED_MS       2000 /* memory nothing was copied to goes back */

struct spill_copy { /* of one slot */
    struct task task;
    struct model *model;
    struct inbox *inbox; /* counted */
    uint32_t slot, unit, micro;
    step_ref ref;
    uint64_t serial; /* of the op that ref was when the copy began */
    enum shd_dtype dtype;
    struct spill_copy *next;
};

static uint64_t grad_bytes(const struct model *m, uint32_t unit, enum shd_dtype dtype)
{
    return shardmap_grad_bytes(m->map, unit, dtype);
}

/* Counted, and never refused: without it nobody could go on. */
static void count_held(struct model *m)
{
    struct spill *s = m->spill;
    struct stat st;
    const uint64_t before = s->held_bytes;
    s->held_bytes = fstat(s->segment.fd, &st) == 0 ? (uint64_t)st.st_blocks * 512 : 0;
    model_settle(m, before, s->held_bytes);
}

void spill_adopted(struct model *m)
{
    const uint64_t round = ledger_round(m->ledger);
    const uint32_t micros = m->ledger->head->micros;
    if (m->spill->segment.base == NULL)
        return;
    m->spill->state = SPILL_READY;
    m->spill->dirty = true;
    count_held(m);
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        for (uint32_t micro = 0; micro < micros; micro++) {
            const uint64_t word = atomic_load(&m->ledger->cell[(uint64_t)u * micros + micro]);
            if (ledger_cell_round(word) == round && ledger_cell_kind(word) == LEDGER_CELL_SPILLED)
                m->spill->bytes += grad_bytes(m, u, (enum shd_dtype)ledger_cell_dtype(word));
        }
}

/* -- The segment, on libuv's pool ---------------------------------------------------------------
 */

static void look(uv_timer_t *timer);

static void look_in(struct daemon *d, uint64_t ms)
{
    if (!d->stopping)
        uv_timer_start(d->timers.spill, look, ms, /* repeat= */ 0);
}

static void make_segment(uv_work_t *work)
{
    struct model *m = work->data;
    struct shd_err e;
    FAIL_POINT("spill:make:before");
    int r = segment_new("shardd-spill", SEGMENT_SPILL, model_spill_bytes(m), &m->spill->segment,
                        &e);
    if (r == SHD_OK)
        r = keeper_store(m->kept.keeper, m->kept.instance, KEEPER_SPILL, m->spill->segment.fd, &e);
    FAIL_POINT("spill:make:after");
    if (r != SHD_OK) {
        log_error("op=spill model=%s status=%s why=\"%s\" do=\"gradients wait in their slots: free "
                  "memory, "
                  "look for the slow worker in shardctl status\"",
                  m->spec->name, status_name(r), e.text);
        segment_close(&m->spill->segment);
    }
    m->spill->work_status = r;
}

static void segment_made(uv_work_t *work, int cancelled)
{
    struct model *m = work->data;
    CHECK(cancelled == 0); /* nobody cancels */
    const bool made = m->spill->work_status == SHD_OK;
    m->spill->state = made ? SPILL_READY : SPILL_NONE;
    look_in(m->daemon, made ? 0 : SHORTAGE_MS);
}

static void punch_segment(uv_work_t *work)
{
    const struct model *m = work->data;
    const struct segment *segment = &m->spill->segment;
    FAIL_POINT("spill:punch:before");
    if (fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  (off_t)segment->bytes) != 0)
        log_warn("op=spill model=%s why=\"give memory back: %s\" do=\"nothing, it is used again; "
                 "restart the "
                 "daemon to have it free\"",
                 m->spec->name, strerror(errno));
    FAIL_POINT("spill:punch:after");
}

static void segment_punched(uv_work_t *work, int cancelled)
{
    struct model *m = work->data;
    CHECK(cancelled == 0);
    m->spill->state = SPILL_READY;
    count_held(m);
    look_in(m->daemon, 0); /* somebody may have waited for us */
}

static void punch_if_idle(struct model *m)
{
    struct spill *s = m->spill;
    if (!s->punch || s->first != NULL || s->state != SPILL_READY || m->daemon->stopping ||
        m->use.dropped)
        return;
    s->punch = s->dirty = false;
    s->state = SPILL_PUNCHING;
    s->work.data = m;
    uv_queue_work(m->daemon->loop, &s->work, punch_segment, segment_punched);
}

/* Nothing was copied for a while. What is copied meanwhile begins the time anew. */
static void unused(uv_timer_t *timer)
{
    struct model *m = timer->data;
    struct spill *s = m->spill;
    if (s->bytes > 0 || s->first != NULL || s->state != SPILL_READY)
        return; /* the step's end will say */
    s->punch = s->dirty;
    punch_if_idle(m);
}

static void wait_unused(struct model *m)
{
    struct spill *s = m->spill;
    if (!s->timed)
        uv_timer_init(m->daemon->loop, &s->timer);
    s->timed = true;
    s->timer.data = m;
    uv_timer_start(&s->timer, unused, UNUSED_MS, /* repeat= */ 0);
}

void spill_step_over(struct model *m)
{
    struct spill *s = m->spill;
    const uint64_t used_bytes = s->bytes, now_ns = uv_hrtime();
    s->step_ns = s->over_ns > 0 ? now_ns - s->over_ns : 0;
    s->over_ns = now_ns;
    s->bytes = 0;
    if (!s->dirty || m->daemon->stopping)
        return;
    /* Steps that have their gradients in other places each would come to hold all places. */
    s->punch = used_bytes > 0 && s->held_bytes / 2 > used_bytes;
    punch_if_idle(m);
    if (used_bytes > 0 || !s->timed || !uv_is_active((const uv_handle_t *)&s->timer))
        wait_unused(m);
}

/* -- Copies -------------------------------------------------------------------------------------
 */

static void unlink_copy(struct spill_copy *copy)
{
    struct spill_copy **at = &copy->model->spill->first;
    while (*at != copy)
        at = &(*at)->next;
    *at = copy->next;
}

static void free_copy(struct spill_copy *copy)
{
    copy->inbox->spilling &= ~(UINT64_C(1) << copy->slot);
    inbox_unref(copy->inbox);
    free(copy);
}

static void copied(struct task *task)
{
    const struct spill_copy *copy = (const struct spill_copy *)task;
    struct model *m = copy->model;
    struct step_actions actions = { .count = 0 };
    struct shd_err why;
    if (task->status != SHD_OK) {
        kern_explain(m->kern, task->status, &why, "copying a gradient");
        log_error("op=spill model=%s status=%s why=\"%s, it waits in its slot\" do=\"restart the "
                  "daemon if it comes again\"",
                  m->spec->name, status_name(task->status), why.text);
    } else if (!m->use.dropped && op_at(m->daemon->ops, copy->ref - 1)->serial == copy->serial) {
        step_spilled(m->core, copy->unit, copy->micro, copy->ref, copy->dtype, &actions);
    }
    if (actions.count > 0) { /* it was credited */
        m->spill->bytes += grad_bytes(m, copy->unit, copy->dtype);
        m->spill->bytes_total += grad_bytes(m, copy->unit, copy->dtype);
    } else {
        look_in(m->daemon, SHORTAGE_MS); /* it failed, or its turn had come */
    }
    unlink_copy((struct spill_copy *)task);
    free_copy((struct spill_copy *)task);
    apply_actions(m, &actions);
    punch_if_idle(m);
}

static int start_copy(struct inbox *inbox, uint32_t slot, struct op *op)
{
    struct model *m = inbox->model;
    const struct wire_return *req = &op->req.return_grad;
    struct shd_err e;
    struct spill_copy *copy = sys_malloc(sizeof *copy);
    if (copy == NULL)
        return SHD_ENOMEM;
    *copy = (struct spill_copy){ .model = m,
                                 .inbox = inbox,
                                 .slot = slot,
                                 .unit = req->unit,
                                 .micro = req->micro,
                                 .ref = op->index + 1,
                                 .serial = op->serial,
                                 .dtype = req->dtype,
                                 .next = m->spill->first };
    task_init(&copy->task, m->daemon->tasks, copied);
    const struct kern_copy bytes = {
        .to = model_spilled(m, req->unit, req->micro),
        .from = (const uint8_t *)inbox->segment.base + shardmap_slot_offset_bytes(m->map, slot),
        .bytes = grad_bytes(m, req->unit, req->dtype),
    };
    const int r = kern_copy(m->kern, &bytes, &copy->task.done, &e);
    if (r != SHD_OK) {
        free(copy);
        return r;
    }
    m->spill->first = copy;
    m->spill->dirty = true;
    inbox->spilling |= UINT64_C(1) << slot;
    inbox->refs++;
    return SHD_OK;
}

bool spill_is_idle(const struct model *m)
{
    const struct spill *s = m->spill;
    return s->first == NULL && (s->state == SPILL_NONE || s->state == SPILL_READY);
}

uv_timer_t *spill_timer(struct model *m)
{
    return m->spill->timed ? &m->spill->timer : NULL;
}

void spill_deinit(struct model *m)
{
    while (m->spill->first != NULL) {
        struct spill_copy *copy = m->spill->first;
        m->spill->first = copy->next;
        free_copy(copy);
    }
    segment_close(&m->spill->segment);
}

/* -- Who waits ----------------------------------------------------------------------------------
 */

static bool is_busy(const struct inbox *inbox, uint32_t slot)
{
    return (inbox->busy >> slot & 1) != 0;
}

static bool all_wait(const struct inbox *inbox, const struct op_pool *ops)
{
    for (uint32_t slot = 0; slot < inbox->slots; slot++) {
        if (!is_busy(inbox, slot))
            continue;
        const struct op *op = &ops->items[inbox->op_index[slot]];
        const struct wire_return *req = &op->req.return_grad;
        if (!step_waits(inbox->model->core, req->unit, req->micro, op->index + 1))
            return false;
    }
    return true;
}

/* A worker that does not say whether it waits for a slot. It may hold slots that it fills over a
 * whole micro-batch (a unit that others use), so how many can be waiting when it has none left is
 * not known here. Two are where it may be stuck soon; with one it most likely computes on. */
static uint64_t silent_since_ns(const struct inbox *inbox)
{
    const uint32_t busy = (uint32_t)__builtin_popcountll(inbox->busy);
    const bool soon = busy >= 2 || busy == inbox->slots;
    return inbox->taken_ns + (soon ? 0 : PATIENCE_ONE_NS - PATIENCE_NS);
}

/* Since when a worker is stuck: it waits for a slot, and all that it has here wait for their turn.
 * 0: it is not. */
static uint64_t stuck_since_ns(const struct inbox *inbox, const struct op_pool *ops,
                               uint64_t now_ns, bool *ret_silent)
{
    uint64_t since_ns = 0;
    if (inbox->busy == 0)
        return 0;
    *ret_silent = !activity_slot_wait(inbox_activity(inbox), now_ns, &since_ns);
    if (*ret_silent)
        since_ns = silent_since_ns(inbox);
    else if (since_ns > 0 && since_ns < inbox->taken_ns)
        since_ns = inbox->taken_ns;
    return since_ns > 0 && since_ns <= now_ns && all_wait(inbox, ops) ? since_ns : 0;
}

/* Whether a worker may yet return a gradient of the step without being given room. */
static bool is_at_work(const struct session *s, const struct model *m, uint64_t now_ns)
{
    bool silent;
    if (s->state != SESSION_OPEN || s->role != WIRE_TRAINER)
        return false;
    if (s->prepared.model == m->handle && s->prepared.step == step_collecting(m->core))
        return false;
    const struct inbox *inbox = inbox_of(s, m);
    if (inbox == NULL)
        return s->inbox_count == 0; /* it has just come */
    return stuck_since_ns(inbox, m->daemon->ops, now_ns, &silent) == 0;
}

static bool somebody_works(const struct model *m, uint64_t now_ns)
{
    for (uint32_t i = 0; i < SESSIONS_MAX; i++)
        if (is_at_work(&m->daemon->sessions->items[i], m, now_ns))
            return true;
    return false;
}

/* How long a worker is to be stuck. Waiting costs nobody but it, and nothing where it would wait
 * for the same ones at the step's end, so a part of what a step takes is given to those that
 * compute what is missing; but not where nobody does, nor twice in a step. */
static uint64_t patience_ns(const struct model *m, uint64_t now_ns)
{
    if (m->spill->bytes > 0 || !somebody_works(m, now_ns))
        return PATIENCE_NS;
    const uint64_t step_ns = m->spill->step_ns;
    const uint64_t quarter_ns = (step_ns > 0 ? step_ns : STEP_UNKNOWN_NS) / 4;
    if (quarter_ns > PATIENCE_MAX_NS)
        return PATIENCE_MAX_NS;
    return quarter_ns > PATIENCE_NS ? quarter_ns : PATIENCE_NS;
}

/* Which of the slots are to be copied: those whose gradients wait and have nobody at them yet. */
static uint64_t slots_to_copy(const struct inbox *inbox)
{
    return inbox->busy & ~inbox->spilling;
}

/* -- Room for what is copied, on libuv's pool ---------------------------------------------------
 */

static void reserve_room(uv_work_t *work)
{
    struct model *m = work->data;
    struct spill *s = m->spill;
    struct shd_err e;
    s->work_status = SHD_OK;
    for (uint32_t i = 0; i < s->range_count && s->work_status == SHD_OK; i++)
        s->work_status = segment_take(&s->segment, s->ranges[i].at, s->ranges[i].bytes, &e);
    if (s->work_status != SHD_OK)
        log_warn("op=spill model=%s status=%s why=\"gradients wait in their slots: %s\" do=\"free "
                 "memory, or look for the slow worker in shardctl status\"",
                 m->spec->name, status_name(s->work_status), e.text);
}

/* The gradients whose slots still hold what they held go where there is room for them. */
static void room_reserved(uv_work_t *work, int cancelled)
{
    struct model *m = work->data;
    struct spill *s = m->spill;
    struct inbox *inbox = s->inbox;
    struct op_pool *ops = m->daemon->ops;
    uint64_t next_ms = s->work_status == SHD_OK ? 0 : SHORTAGE_MS;
    CHECK(cancelled == 0); /* nobody cancels */
    s->state = SPILL_READY;
    count_held(m);
    for (uint32_t i = 0; i < s->range_count && s->work_status == SHD_OK; i++) {
        const uint32_t slot = s->ranges[i].slot;
        struct op *op = op_at(ops, inbox->op_index[slot]);
        if ((slots_to_copy(inbox) >> slot & 1) != 0 && op->serial == s->ranges[i].serial &&
            !m->daemon->stopping && !m->use.dropped && start_copy(inbox, slot, op) != SHD_OK)
            next_ms = PATIENCE_MS;
    }
    s->inbox = NULL;
    inbox_unref(inbox);
    if (next_ms > 0)
        look_in(m->daemon, next_ms);
    punch_if_idle(m);
}

static void start_reserving(struct daemon *d, struct inbox *inbox)
{
    struct model *m = inbox->model;
    struct spill *s = m->spill;
    const uint64_t slots = slots_to_copy(inbox);
    s->range_count = 0;
    for (uint32_t slot = 0; slot < inbox->slots; slot++) {
        if ((slots >> slot & 1) == 0)
            continue;
        const struct op *op = op_at(d->ops, inbox->op_index[slot]);
        const struct wire_return *req = &op->req.return_grad;
        const uint8_t *to = model_spilled(m, req->unit, req->micro);
        s->ranges[s->range_count++] = (struct spill_range){
            .at = (uint64_t)(to - (const uint8_t *)s->segment.base),
            .bytes = grad_bytes(m, req->unit, req->dtype),
            .slot = slot,
            .serial = op->serial,
        };
    }
    if (s->range_count == 0)
        return;
    s->state = SPILL_RESERVING;
    s->dirty = true;
    s->inbox = inbox;
    inbox->refs++;
    s->work.data = m;
    uv_queue_work(d->loop, &s->work, reserve_room, room_reserved);
}

/* Begin what can be begun; returns in how many ms to look again, 0: something else will say. */
static uint64_t spill_inbox(struct daemon *d, struct inbox *inbox)
{
    struct spill *s = inbox->model->spill;
    if (s->state == SPILL_NONE) {
        s->state = SPILL_MAKING;
        s->work.data = inbox->model;
        uv_queue_work(d->loop, &s->work, make_segment, segment_made);
        return 0;
    }
    if (s->state != SPILL_READY || s->punch)
        return PATIENCE_MS;
    start_reserving(d, inbox);
    return 0;
}

static uint64_t look_at(struct daemon *d, struct inbox *inbox, uint64_t now_ns)
{
    bool silent;
    if (inbox->busy == 0 || !inbox->model->ready)
        return 0; /* the next gradient calls again */
    const uint64_t since_ns = stuck_since_ns(inbox, d->ops, now_ns, &silent);
    if (since_ns == 0 || now_ns - since_ns < PATIENCE_NS)
        return PATIENCE_MS;
    const uint64_t stuck_ns = now_ns - since_ns;
    const uint64_t patience = silent ? PATIENCE_NS : patience_ns(inbox->model, now_ns);
    if (stuck_ns >= patience)
        return spill_inbox(d, inbox);
    const uint64_t left_ms = (patience - stuck_ns) / NS_PER_MS + 1;
    return left_ms < LOOK_MS_MAX ? left_ms : LOOK_MS_MAX;
}

static void look(uv_timer_t *timer)
{
    struct daemon *d = timer->data;
    const uint64_t now_ns = uv_hrtime();
    uint64_t next_ms = 0;
    for (uint32_t i = 0; i < d->sessions->made; i++) {
        const struct session *s = &d->sessions->items[i];
        if (s->state != SESSION_OPEN)
            continue;
        for (uint32_t k = 0; k < s->inbox_count; k++) {
            const uint64_t ms = look_at(d, s->inboxes[k], now_ns);
            if (ms > 0 && (next_ms == 0 || ms < next_ms))
                next_ms = ms;
        }
    }
    if (next_ms > 0)
        look_in(d, next_ms);
}

void spill_watch(struct daemon *d)
{
    if (!uv_is_active((const uv_handle_t *)d->timers.spill))
        look_in(d, PATIENCE_MS + 1);
}

void spill_init(struct daemon *d)
{
    uv_timer_init(d->loop, d->timers.spill);
    d->timers.spill->data = d;
}
