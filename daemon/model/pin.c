/* See pin.h. */
#include "daemon/model/pin.h"

#include <inttypes.h>
#include <stdlib.h>

#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "daemon/core/step.h"
#include "daemon/core/sweep.h"
#include "daemon/model/model.h"
#include "daemon/model/quota.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/share/reserve.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec.h"

#define PIECES 4u /* in the kernel queue at once: training's own work waits for no more */

uint64_t pin_piece_bytes = UINT64_C(4) << 20;

enum pin_state {
    PIN_MAKING,  /* libuv's pool makes the memory */
    PIN_ARMED,   /* its step is to come, or is over */
    PIN_COPYING, /* its step was open when that began; updates copy what they change first */
    PIN_READY,
    PIN_FAILED, /* nobody has it any more */
};

struct hold {                /* by a session */
    struct session *session; /* borrowed: open */
    struct op *op;           /* its PIN, pending; NULL: answered */
    uint64_t ticket;         /* of the segment; 0: none was given */
    struct hold *next;
};

struct piece { /* on its way through the kernel queue */
    struct task task;
    struct pin *pin; /* borrowed: it waits for its pieces */
    bool busy;
    bool apart;         /* before an update: freed when it is done; else one of pin.pieces */
    struct piece *next; /* of those apart */
};

struct pin {
    struct model *model; /* borrowed */
    enum pin_state state;
    uint64_t step;
    uint64_t rewound;       /* COPYING, READY: step_rewound() then: the run that the step is of */
    bool ema;               /* not parameters but their average, where a unit has one */
    struct segment segment; /* owned; as the publish segment, place for place */
    uint64_t number;        /* of the segment, of all that this model's pins ever had; from 1 */
    struct hold *holds;     /* owned */
    struct sweep sweep;     /* what is copied */
    struct piece pieces[PIECES];
    struct piece *pieces_apart; /* owned: in the queue */
    uint32_t in_queue;          /* pieces, with those that were given up */
    bool waits;                 /* for room in the kernel queue */
    bool answering;             /* sessions may end in the middle of it: it stays */
    bool closing;               /* nobody's any more */
    uint64_t began_ns;
    struct quota_use *quota; /* owned: it may outlive the model */
    uv_work_t work;          /* making, and closing */
    int status;
    struct shd_err err;
};

struct pins {
    struct pin *items[PINS_MAX]; /* owned; NULL: free places */
    uint64_t made;               /* segments */
};

/* -- Ending ------------------------------------------------------------------------------------ */

static void close_segment(struct pin *pin)
{
    const uint64_t bytes = pin->segment.bytes;
    segment_close(&pin->segment);
    quota_give(pin->quota, bytes);
}

static void pin_delete(struct pin *pin)
{
    while (pin->holds != NULL) {
        struct hold *h = pin->holds;
        pin->holds = h->next;
        free(h);
    }
    while (pin->pieces_apart != NULL) { /* at shutdown */
        struct piece *piece = pin->pieces_apart;
        pin->pieces_apart = piece->next;
        free(piece);
    }
    close_segment(pin);
    quota_end(pin->quota);
    sweep_deinit(&pin->sweep);
    free(pin);
}

static void close_memory(uv_work_t *work)
{
    close_segment(work->data);
}

static void memory_closed(uv_work_t *work, int cancelled)
{
    CHECK(cancelled == 0);
    pin_delete(work->data);
}

/* Nobody has it, and nothing writes to it: it goes. Unmapping much memory takes a while. */
static void look_whether_unused(struct pin *pin)
{
    struct daemon *d = pin->model->daemon;
    struct pins *pins = pin->model->waits.pins;
    if (pin->holds != NULL || pin->in_queue > 0 || pin->answering || pin->state == PIN_MAKING ||
        pin->closing || d->stopping)
        return;
    pin->closing = true;
    for (uint32_t i = 0; i < PINS_MAX; i++)
        if (pins->items[i] == pin)
            pins->items[i] = NULL;
    uv_queue_work(d->loop, &pin->work, close_memory, memory_closed);
}

void pins_free(struct model *m)
{
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++)
        if (m->waits.pins->items[i] != NULL)
            pin_delete(m->waits.pins->items[i]);
    free(m->waits.pins);
    m->waits.pins = NULL;
}

/* -- Sessions ---------------------------------------------------------------------------------- */

/* What the session has pinned of the model; NULL: nothing. */
static struct pin *find_of(const struct model *m, const struct session *s, struct hold **ret_hold)
{
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++)
        for (struct hold *h = m->waits.pins->items[i] != NULL ? m->waits.pins->items[i]->holds
                                                              : NULL;
             h != NULL; h = h->next)
            if (h->session == s) {
                *ret_hold = h;
                return m->waits.pins->items[i];
            }
    return NULL;
}

static struct hold *join(struct pin *pin, struct session *s)
{
    struct hold *h = sys_calloc(1, sizeof *h);
    if (h == NULL)
        return NULL;
    *h = (struct hold){ .session = s, .next = pin->holds };
    pin->holds = h;
    return h;
}

/* Its request, if one is pending, is the caller's to finish. A copy that nobody waits for is given
 * up: updates do not look after it any more. */
static struct op *leave(struct pin *pin, struct hold *h)
{
    struct op *op = h->op;
    struct hold **at = &pin->holds;
    while (*at != h)
        at = &(*at)->next;
    *at = h->next;
    if (h->ticket != 0)
        session_ticket_forget(pin->model->daemon, h->session->id, pin->segment.fd);
    free(h);
    if (pin->holds == NULL && pin->state == PIN_COPYING)
        pin->state = PIN_ARMED;
    look_whether_unused(pin);
    return op;
}

void pins_forget_session(struct model *m, const struct session *s)
{
    struct hold *h = NULL;
    struct pin *pin = find_of(m, s, &h);
    if (pin == NULL)
        return;
    struct op *op = leave(pin, h);
    if (op != NULL)
        op_finish(op, err_set(&op->err, SHD_EGONE, "session ended"));
}

/* -- Answers ----------------------------------------------------------------------------------- */

static int answer(const struct pin *pin, struct hold *h, struct op *op)
{
    if (h->ticket == 0)
        h->ticket = session_ticket_new(h->session, pin->segment.fd, SEGMENT_PUBLISH,
                                       pin->segment.bytes);
    if (h->ticket == 0)
        return err_set(&op->err, SHD_EBUSY,
                       "session has %u unclaimed segments, the most there may be",
                       SESSION_TICKETS_MAX);
    op->reply.type = WIRE_PINNED;
    op->reply.pinned = (struct wire_pinned){
        .step = pin->step, .ticket = h->ticket, .segment = pin->number, .bytes = pin->segment.bytes
    };
    return SHD_OK;
}

static struct hold *find_waiting(const struct pin *pin)
{
    struct hold *h = pin->holds;
    while (h != NULL && h->op == NULL)
        h = h->next;
    return h;
}

/* Finish all requests for it. A session whose reply cannot be sent ends in the middle of it. */
static void answer_all(struct pin *pin, int status, const struct shd_err *why)
{
    struct hold *h;
    pin->answering = true;
    while ((h = find_waiting(pin)) != NULL) {
        struct op *op = h->op;
        h->op = NULL;
        if (status != SHD_OK)
            op->err = *why;
        op_finish(op, status == SHD_OK ? answer(pin, h, op) : status);
    }
    pin->answering = false;
    look_whether_unused(pin);
}

/* It is of no use to anybody. */
static void fail(struct pin *pin, int status, const struct shd_err *why)
{
    log_warn("op=pin model=%s step=%" PRIu64 " status=%s why=\"%s\""
             " do=\"nothing: training goes on; a reader needs memory as large as publish\"",
             pin->model->spec->name, pin->step, status_name(status), why->text);
    pin->state = PIN_FAILED;
    pin->answering = true;
    while (pin->holds != NULL) {
        struct op *op = leave(pin, pin->holds);
        if (op != NULL) {
            op->err = *why;
            op_finish(op, status);
        }
    }
    pin->answering = false;
    look_whether_unused(pin);
}

static void is_over(struct pin *pin)
{
    struct shd_err e;
    err_set(&e, SHD_ESTEP, "step %" PRIu64 " is to be pinned, the open step is %" PRIu64, pin->step,
            step_collecting(pin->model->core));
    answer_all(pin, SHD_ESTEP, &e);
}

/* -- Copying ----------------------------------------------------------------------------------- */

static void pump(struct pin *pin);

static void forget_piece(struct pin *pin, struct piece *piece)
{
    struct piece **at = &pin->pieces_apart;
    while (*at != piece)
        at = &(*at)->next;
    *at = piece->next;
    free(piece);
}

static void copied(struct task *task)
{
    struct piece *piece = (struct piece *)task;
    struct pin *pin = piece->pin;
    const int status = task->status;
    pin->in_queue--;
    piece->busy = false;
    if (piece->apart)
        forget_piece(pin, piece);
    if (status != SHD_OK && pin->state != PIN_FAILED) {
        struct shd_err e;
        kern_explain(pin->model->kern, status, &e, "copying parameters");
        fail(pin, status, &e);
        return;
    }
    pump(pin);
    look_whether_unused(pin);
}

/* Whole tiles, but for what the slice's last page has behind them. */
static int queue_ema_coded(struct pin *pin, struct piece *piece, uint32_t unit,
                           struct sweep_range range, struct shd_err *e)
{
    static const uint64_t first = 0;
    const struct model *m = pin->model;
    const uint64_t tile = codec_tile_bytes(m->spec->codec), elems = m->map->slice[unit].elems;
    const uint64_t at = (range.at_bytes - shardmap_publish_offset_bytes(m->map, unit)) / tile *
                        CODEC_TILE_ELEMS;
    const uint64_t left = at < elems ? elems - at : 0;
    const uint64_t count = range.bytes / tile * CODEC_TILE_ELEMS;
    const struct kern_encode encode = {
        .in = model_array(m, spec_ema_array(m->spec), unit) + at,
        .out = (uint8_t *)pin->segment.base + range.at_bytes,
        .codec = m->spec->codec,
        .elems = count < left ? count : left,
        .first_of = &first,
        .bytes_of = &first,
        .slices = 1,
    };
    return kern_encode(m->kern, &encode, &piece->task.done, e);
}

/* The average is converted as parameters are where they are published. range: of the unit. */
static int queue_ema(struct pin *pin, struct piece *piece, uint32_t unit, struct sweep_range range,
                     struct shd_err *e)
{
    const struct model *m = pin->model;
    const uint64_t size = dtype_bytes(m->spec->publish);
    const uint64_t at = range.at_bytes - shardmap_publish_offset_bytes(m->map, unit);
    if (m->spec->codec != CODEC_NONE)
        return queue_ema_coded(pin, piece, unit, range, e);
    const struct kern_cast cast = { .out = (uint8_t *)pin->segment.base + range.at_bytes,
                                    .out_dtype = m->spec->publish,
                                    .in = model_array(m, spec_ema_array(m->spec), unit) + at / size,
                                    .elems = range.bytes / size };
    return kern_cast(m->kern, &cast, &piece->task.done, e);
}

static int queue_publish(struct pin *pin, struct piece *piece, struct sweep_range range,
                         struct shd_err *e)
{
    const struct model *m = pin->model;
    const struct kern_copy copy = { .to = (uint8_t *)pin->segment.base + range.at_bytes,
                                    .from = (const uint8_t *)m->publish.base + range.at_bytes,
                                    .bytes = range.bytes };
    return kern_copy(m->kern, &copy, &piece->task.done, e);
}

/* unit: of an average the range is of this one alone. */
static int queue_piece(struct pin *pin, struct piece *piece, uint32_t unit,
                       struct sweep_range range, struct shd_err *e)
{
    piece->pin = pin;
    task_init(&piece->task, pin->model->daemon->tasks, copied);
    const int r = pin->ema && spec_unit_ema(pin->model->spec, unit)
                      ? queue_ema(pin, piece, unit, range, e)
                      : queue_publish(pin, piece, range, e);
    piece->busy = r == SHD_OK;
    pin->in_queue += r == SHD_OK;
    return r;
}

/* Of an average in codes whole tiles. */
static uint64_t piece_bytes(const struct pin *pin)
{
    const enum codec codec = pin->model->spec->codec;
    const uint64_t tile = codec != CODEC_NONE ? codec_tile_bytes(codec) : 1;
    return pin_piece_bytes > tile ? pin_piece_bytes / tile * tile : tile;
}

/* The next piece; false: not now, or nothing is left. */
static bool copy_next(struct pin *pin, struct piece *piece)
{
    struct sweep_range range;
    struct shd_err e;
    if (!sweep_next(&pin->sweep, piece_bytes(pin), &range))
        return false;
    const uint32_t unit = pin->sweep.unit;
    const uint64_t left = sweep_rest(&pin->sweep, unit).bytes;
    if (pin->ema && range.bytes > left)
        range.bytes = left;
    const int r = queue_piece(pin, piece, unit, range, &e);
    if (r == SHD_OK)
        sweep_took(&pin->sweep, range.bytes);
    else if (r == SHD_EBUSY)
        pin->waits = pin->model->daemon->kernel_full = true; /* of others' work: pins_retry() */
    else
        fail(pin, r, &e);
    return r == SHD_OK;
}

static void pump(struct pin *pin)
{
    for (uint32_t i = 0; i < PIECES && pin->state == PIN_COPYING && !pin->waits; i++)
        if (!pin->pieces[i].busy && !copy_next(pin, &pin->pieces[i]))
            break;
    if (pin->state != PIN_COPYING || pin->waits || pin->in_queue > 0)
        return;
    pin->state = PIN_READY;
    FAIL_POINT("pin:ready");
    log_debug("op=pin model=%s step=%" PRIu64 " bytes=%" PRIu64 " us=%" PRIu64,
              pin->model->spec->name, pin->step, pin->segment.bytes,
              (uv_hrtime() - pin->began_ns) / 1000);
    answer_all(pin, SHD_OK, /* why= */ NULL);
}

/* What of the unit is not copied yet. */
static int copy_before_update(struct pin *pin, uint32_t unit, struct shd_err *e)
{
    const struct sweep_range rest = sweep_rest(&pin->sweep, unit);
    if (rest.bytes == 0)
        return SHD_OK;
    struct piece *piece = sys_calloc(1, sizeof *piece);
    if (piece == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to pin a step");
    piece->apart = true;
    const int r = queue_piece(pin, piece, unit, rest, e);
    if (r != SHD_OK) {
        free(piece);
        return r;
    }
    piece->next = pin->pieces_apart;
    pin->pieces_apart = piece;
    sweep_took_rest(&pin->sweep, unit);
    return SHD_OK;
}

int pins_before_update(struct model *m, uint32_t unit, struct shd_err *e)
{
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++) {
        struct pin *pin = m->waits.pins->items[i];
        if (pin == NULL || pin->state != PIN_COPYING)
            continue;
        const int r = copy_before_update(pin, unit, e);
        if (r == SHD_EBUSY)
            return r;
        if (r != SHD_OK)
            fail(pin, r, e); /* training goes on without it */
    }
    return SHD_OK;
}

/* -- Beginning --------------------------------------------------------------------------------- */

/* A step of before a rewind is another than that of the same number since. */
static bool is_of_this_run(const struct pin *pin)
{
    return pin->state < PIN_COPYING || pin->rewound == step_rewound(pin->model->core);
}

/* Go on as far as that can be done now. */
static void advance(struct pin *pin)
{
    const enum sweep_when when = sweep_when(pin->model->core, pin->step);
    if (pin->state == PIN_READY)
        answer_all(pin, SHD_OK, /* why= */ NULL);
    if (pin->state == PIN_ARMED && when == SWEEP_OVER)
        is_over(pin);
    else if (pin->state == PIN_ARMED && when == SWEEP_NOW) {
        sweep_begin(&pin->sweep);
        pin->rewound = step_rewound(pin->model->core);
        pin->state = PIN_COPYING;
        pin->began_ns = uv_hrtime();
        FAIL_POINT("pin:begin");
        pump(pin);
    }
}

void pins_moved(struct model *m)
{
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++)
        if (m->waits.pins->items[i] != NULL && m->waits.pins->items[i]->holds != NULL)
            advance(m->waits.pins->items[i]);
}

void pins_retry(struct model *m)
{
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++) {
        struct pin *pin = m->waits.pins->items[i];
        if (pin == NULL || !pin->waits)
            continue;
        pin->waits = false;
        pump(pin);
        look_whether_unused(pin);
    }
}

static void make(uv_work_t *work)
{
    struct pin *pin = work->data;
    const uint64_t bytes = shardmap_publish_bytes(pin->model->map);
    int r = quota_take(pin->quota, bytes, "a pin", &pin->err);
    const uint64_t asked = r == SHD_OK ? bytes : 0;
    reserve_lock();
    if (r == SHD_OK)
        r = reserve_check(bytes, RESERVE_SPARED, &pin->err);
    if (r == SHD_OK)
        r = segment_new("shardd-pin", SEGMENT_PUBLISH, bytes, &pin->segment, &pin->err);
    reserve_unlock();
    quota_settle(pin->quota, asked, pin->segment.bytes);
    if (r != SHD_OK)
        r = err_prefix(&pin->err, "to pin step %" PRIu64, pin->step);
    pin->status = r;
}

static void made(uv_work_t *work, int cancelled)
{
    struct pin *pin = work->data;
    CHECK(cancelled == 0);
    if (pin->model->daemon->stopping)
        return;
    pin->state = PIN_ARMED;
    pin->number = ++pin->model->waits.pins->made;
    if (pin->status != SHD_OK)
        fail(pin, pin->status, &pin->err);
    else if (pin->holds != NULL)
        advance(pin);
    else
        look_whether_unused(pin);
}

static struct pin **find_place(struct model *m)
{
    if (m->waits.pins == NULL)
        m->waits.pins = sys_calloc(1, sizeof *m->waits.pins);
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++)
        if (m->waits.pins->items[i] == NULL)
            return &m->waits.pins->items[i];
    return NULL;
}

static int no_place(struct op *op)
{
    const struct model *m = op->model;
    if (m->waits.pins == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to pin a step");
    return err_set(
        &op->err, SHD_EBUSY,
        "steps %" PRIu64 " and %" PRIu64 " of model '%s' are pinned, and %u at most may be",
        m->waits.pins->items[0]->step, m->waits.pins->items[1]->step, m->spec->name, PINS_MAX);
}

static int pin_new(struct op *op, struct pin **ret_pin)
{
    struct model *m = op->model;
    struct pin **place = find_place(m);
    if (place == NULL)
        return no_place(op);
    struct pin *pin = sys_calloc(1, sizeof *pin);
    if (pin == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory to pin a step");
    const int r = sweep_init(&pin->sweep, m->map, &op->err);
    if (r != SHD_OK) {
        free(pin);
        return r;
    }
    pin->model = m;
    pin->quota = quota_ref(m->kept.quota);
    pin->segment = SEGMENT_CLOSED;
    pin->work.data = pin;
    *ret_pin = *place = pin;
    return SHD_OK;
}

/* One that another session has pinned, or that can still become this step. */
static struct pin *find_step(const struct model *m, uint64_t step, bool ema)
{
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++) {
        struct pin *pin = m->waits.pins->items[i];
        if (pin == NULL || pin->step != step || pin->ema != ema || pin->state == PIN_FAILED)
            continue;
        if (pin->state >= PIN_COPYING ? is_of_this_run(pin)
                                      : sweep_when(m->core, step) != SWEEP_OVER)
            return pin;
    }
    return NULL;
}

/* The session's own request before this one has no answer yet: it gets none of use. The session may
 * end by that. */
static int replace_waiting(struct op *op)
{
    struct hold *h = NULL;
    struct op *before = find_of(op->model, op->session, &h) != NULL ? h->op : NULL;
    if (before == NULL)
        return SHD_OK;
    h->op = NULL;
    op_finish(before, err_set(&before->err, SHD_ESTEP, "the session asks for another step"));
    return op->session->state == SESSION_OPEN ? SHD_OK
                                              : err_set(&op->err, SHD_EGONE, "session ended");
}

/* The pin of that step, with the session among its holders. */
static int take(struct op *op, struct pin **ret_pin, struct hold **ret_hold)
{
    struct model *m = op->model;
    const uint64_t step = op->req.pin.step, current = step_collecting(m->core);
    const bool ema = op->req.pin.ema;
    struct hold *h = NULL;
    struct pin *mine = find_of(m, op->session, &h), *pin = find_step(m, step, ema);
    if (pin == NULL && step < current)
        return err_set(&op->err, SHD_ESTEP,
                       "step %" PRIu64 " is to be pinned, the open step is %" PRIu64, step,
                       current);
    if (pin == NULL && mine != NULL && mine->holds == h && h->next == NULL)
        pin = mine; /* its memory for another step: what is in the queue for it comes first */
    if (pin != mine && mine != NULL)
        leave(mine, h);
    const bool is_new = pin == NULL;
    int r = is_new ? pin_new(op, &pin) : SHD_OK;
    if (r != SHD_OK)
        return r;
    if (pin != mine)
        h = join(pin, op->session);
    if ((pin->step != step || pin->ema != ema || !is_of_this_run(pin)) && pin->state != PIN_MAKING)
        pin->state = PIN_ARMED;
    pin->step = step;
    pin->ema = ema;
    if (is_new)
        uv_queue_work(m->daemon->loop, &pin->work, make, made);
    *ret_pin = pin;
    *ret_hold = h;
    return h != NULL ? SHD_OK : err_set(&op->err, SHD_ENOMEM, "no memory to pin a step");
}

int pin_take(struct op *op)
{
    struct pin *pin = NULL;
    struct hold *h = NULL;
    if (op->req.pin.ema && op->model->spec->ema == 0)
        return err_set(&op->err, SHD_EINVAL, "model '%s' has no moving average of its parameters",
                       op->model->spec->name);
    int r = replace_waiting(op);
    if (r == SHD_OK)
        r = take(op, &pin, &h);
    if (h == NULL)
        return r;
    h->op = op;
    advance(pin);
    return SHD_PENDING;
}

int pin_let_go(struct op *op)
{
    struct hold *h = NULL;
    struct pin *pin = find_of(op->model, op->session, &h);
    struct op *before = pin != NULL ? leave(pin, h) : NULL;
    if (before != NULL)
        op_finish(before, err_set(&before->err, SHD_ESTEP, "the session lets go of it"));
    return SHD_OK;
}

/* -- Looking ----------------------------------------------------------------------------------- */

uint32_t pins_show(const struct model *m, struct pin_shown ret_pins[PINS_MAX])
{
    uint32_t count = 0;
    for (uint32_t i = 0; m->waits.pins != NULL && i < PINS_MAX; i++) {
        const struct pin *pin = m->waits.pins->items[i];
        if (pin == NULL)
            continue;
        struct pin_shown *shown = &ret_pins[count++];
        *shown = (struct pin_shown){ .step = pin->step,
                                     .bytes = pin->state != PIN_MAKING ? pin->segment.bytes : 0,
                                     .ready = pin->state == PIN_READY,
                                     .began_ns = pin->state >= PIN_COPYING ? pin->began_ns : 0 };
        for (const struct hold *h = pin->holds; h != NULL; h = h->next)
            shown->sessions++;
    }
    return count;
}
