/* See hostsum.h. */
#include "client/run/hostsum.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/kern_run.h"
#include "client/paths/map.h"
#include "client/plan/plan_cost.h"
#include "client/run/grads.h"
#include "client/run/hostsum_file.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"

/* What this worker has handed out of a unit. */
struct handed {
    bool open;
    bool in_cell; /* the array is the cell; else scratch, for the cell is in, or another's */
    uint32_t micro;
    uint64_t live_bytes;
    float *array;          /* NULL: none is handed out, it took no part */
    struct buffer scratch; /* owned; kept */
};

/* What this worker sums of a unit. */
struct summing {
    struct hostsum_round round;
    uint32_t group;
    bool active, given;
    uint32_t answers; /* of members, each once */
};

struct hostsum {
    struct hostsum_file file;
    struct handed *handed;   /* owned, [units] */
    struct summing *summing; /* owned, [units] */
    uint8_t *answered;       /* owned, [units * answered_bytes]: a bit for each member */
    uint32_t answered_bytes;
    struct buffers in; /* of scratch */
    uint64_t look_ns;  /* when the file is to be looked for */
};

#define LOOK_NS (200 * NS_PER_MS)

static struct hostsum *of(const struct shd_model *m)
{
    CHECK(m->grads != NULL && m->grads->hostsum != NULL);
    return m->grads->hostsum;
}

/* -- Joining ----------------------------------------------------------------------------------- */

static void answered(struct shd_model *m, const struct map_answer *a);

/* Who joins where the file was removed is not among those who have it: they would wait for each
 * other for ever. */
static void look(struct shd_model *m)
{
    struct hostsum *h = of(m);
    const uint64_t now_ns = clock_now_ns();
    if (now_ns < h->look_ns || m->fault.code != SHD_OK)
        return;
    h->look_ns = now_ns + LOOK_NS;
    if (!hostsum_file_is_there(&h->file))
        err_set(&m->fault, SHD_EGONE,
                "%s, in which workers of this host sum, was removed (logind does so as a user logs "
                "out, unless RemoveIPC=no): who has begun since sums elsewhere; end the workers of "
                "this host, and start them again",
                h->file.path);
}

int hostsum_join(struct shd_model *m, struct hostsum **ret_sums, struct shd_err *e)
{
    const uint32_t units = m->spec->unit_count;
    struct hostsum *h = sys_calloc(1, sizeof *h);
    if (h != NULL) {
        h->file.fd = -1;
        h->answered_bytes = (session_members(m->session) + 7) / 8;
        h->handed = sys_calloc(units, sizeof *h->handed);
        h->summing = sys_calloc(units, sizeof *h->summing);
        h->answered = sys_calloc(units, h->answered_bytes);
    }
    if (h == NULL || h->handed == NULL || h->summing == NULL || h->answered == NULL) {
        hostsum_leave(m, h);
        return err_set(e, SHD_ENOMEM, "no memory for the sums of %" PRIu32 " units", units);
    }
    h->in = buffers_for(m, sizeof(float));
    const int r = hostsum_file_join(&h->file, m, e);
    if (r != SHD_OK) {
        hostsum_leave(m, h);
        return r;
    }
    m->map->answered = answered;
    m->map->look = look;
    *ret_sums = h;
    return SHD_OK;
}

void hostsum_leave(const struct shd_model *m, struct hostsum *h)
{
    if (h == NULL)
        return;
    hostsum_file_leave(&h->file);
    for (uint32_t u = 0; h->handed != NULL && u < m->spec->unit_count; u++)
        buffer_free(&h->in, &h->handed[u].scratch);
    free(h->handed);
    free(h->summing);
    free(h->answered);
    free(h);
}

int *hostsum_fd(struct hostsum *h)
{
    return &h->file.fd;
}

/* -- Lanes ------------------------------------------------------------------------------------- */

/* Attempts never go back (proto/share/board.h); within one steps only ascend. */
static int compare(const struct hostsum_round *a, const struct hostsum_round *b)
{
    if (a->attempt != b->attempt)
        return a->attempt < b->attempt ? -1 : 1;
    return a->step != b->step ? (a->step < b->step ? -1 : 1) : 0;
}

/* Who is killed leaves what he stored before this, if anything of what comes after it. */
static void after_that(const char *point)
{
    atomic_signal_fence(memory_order_seq_cst);
    FAIL_POINT(point);
    (void)point;
}

/* The first cell that is not in; accumulate: all are. */
static uint32_t find_missing(const struct hostsum *h, uint32_t unit)
{
    uint32_t i = 0;
    while (i < h->file.accumulate && hostsum_cell(&h->file, unit, i)->what != HOSTSUM_CELL_EMPTY)
        i++;
    return i;
}

static bool is_full(const struct hostsum *h, uint32_t unit)
{
    return hostsum_lane(&h->file, unit)->group != HOSTSUM_FREE &&
           find_missing(h, unit) == h->file.accumulate;
}

static bool is_done(const struct hostsum *h, uint32_t unit, uint32_t group)
{
    return group / 8 < h->file.done_bytes &&
           (hostsum_done(&h->file, unit)[group / 8] >> group % 8 & 1) != 0;
}

/* Of a free lane; it is the group's once its cells are empty. Arrays that somebody writes to stay
 * his. */
static void take_lane(const struct hostsum *h, uint32_t unit, uint32_t group)
{
    struct hostsum_lane *lane = hostsum_lane(&h->file, unit);
    for (uint32_t i = 0; i < h->file.accumulate; i++)
        hostsum_cell(&h->file, unit, i)->what = HOSTSUM_CELL_EMPTY;
    lane->summer = 0;
    after_that("sums:emptied");
    lane->group = group;
    after_that("sums:taken");
}

/* From a step that is over, or was given up. A round that is half stored is earlier than `now`. */
static void begin_round(const struct hostsum *h, uint32_t unit, const struct hostsum_round *now)
{
    struct hostsum_lane *lane = hostsum_lane(&h->file, unit);
    lane->group = HOSTSUM_FREE;
    after_that("sums:freed");
    memset(hostsum_done(&h->file, unit), 0, h->file.done_bytes);
    after_that("sums:cleared");
    lane->round.step = now->step;
    after_that("sums:stepped");
    lane->round.attempt = now->attempt;
}

/* The unit's cells are all in, and nobody who lives returns their sum: then this worker does. */
static bool claim_sum(struct hostsum *h, uint32_t unit)
{
    struct hostsum_lane *lane = hostsum_lane(&h->file, unit);
    struct summing *s = &h->summing[unit];
    const bool mine = lane->summer == h->file.member + 1;
    const bool begun = s->active && s->group == lane->group &&
                       compare(&s->round, &lane->round) == 0;
    if (!is_full(h, unit))
        return false;
    if (mine ? begun && s->given
             : lane->summer != 0 && hostsum_file_lives(&h->file, lane->summer - 1))
        return false;
    lane->summer = h->file.member + 1;
    if (begun) /* it broke off */
        return true;
    *s = (struct summing){ .round = lane->round, .group = lane->group, .active = true };
    memset(h->answered + (size_t)unit * h->answered_bytes, 0, h->answered_bytes);
    return true;
}

enum lane_is { LANE_MINE, LANE_WAIT, LANE_ADD, LANE_PAST, LANE_LATER };

/* Under the lock. PAST: the group's sum is with the owners, or its step is over; LATER: some began
 * a later group without this worker. */
static enum lane_is enter(struct hostsum *h, uint32_t unit, const struct hostsum_round *now,
                          uint32_t group, uint32_t *ret_add)
{
    struct hostsum_lane *lane = hostsum_lane(&h->file, unit);
    const int order = compare(&lane->round, now);
    if (order > 0)
        return LANE_PAST;
    if (order < 0)
        begin_round(h, unit, now);
    if (is_done(h, unit, group))
        return LANE_PAST;
    if (lane->group == HOSTSUM_FREE)
        take_lane(h, unit, group);
    if (lane->group == group)
        return LANE_MINE;
    if (lane->group > group) /* its sum waits at the owners for this one */
        return LANE_LATER;
    if (!claim_sum(h, unit))
        return LANE_WAIT;
    *ret_add = lane->group;
    return LANE_ADD;
}

/* -- Entering ---------------------------------------------------------------------------------- */

static int not_ascending(const struct shd_model *m, uint32_t group, uint32_t unit,
                         struct shd_err *e)
{
    const struct hostsum *h = of(m);
    const uint32_t later = hostsum_lane(&h->file, unit)->group, a = h->file.accumulate;
    return err_set(e, SHD_EINVAL,
                   "unit %" PRIu32 " '%s': micro-batches %" PRIu64 " to %" PRIu64
                   " are summed on this host already, and %" PRIu64 " to %" PRIu64
                   " are not: all its workers are to share each group, in ascending order",
                   unit, m->spec->units[unit].name, (uint64_t)later * a,
                   (uint64_t)later * a + a - 1, (uint64_t)group * a, (uint64_t)group * a + a - 1);
}

/* The unit's lane, with the lock held where *ret_next is GO: then *ret_is is MINE or PAST. */
static int enter_lane(struct shd_model *m, uint32_t group, uint32_t unit, enum lane_is *ret_is,
                      struct hostsum_next *ret_next, struct shd_err *e)
{
    struct hostsum *h = of(m);
    const struct hostsum_round now = { m->in.attempt, m->step };
    int r = hostsum_file_lock(&h->file, e);
    if (r != SHD_OK)
        return r;
    *ret_next = (struct hostsum_next){ .what = HOSTSUM_GO };
    *ret_is = enter(h, unit, &now, group, &ret_next->group);
    if (*ret_is == LANE_MINE || *ret_is == LANE_PAST)
        return SHD_OK;
    hostsum_file_unlock(&h->file);
    ret_next->what = *ret_is == LANE_ADD ? HOSTSUM_ADD : HOSTSUM_WAIT;
    return *ret_is == LANE_LATER ? not_ascending(m, group, unit, e) : SHD_OK;
}

int hostsum_late(const struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    const struct hostsum *h = of(m);
    const uint32_t a = h->file.accumulate;
    const uint64_t first = (uint64_t)hostsum_lane(&h->file, unit)->group * a;
    const uint64_t ms = m->session->timeout_ns / NS_PER_MS;
    const uint32_t missing = find_missing(h, unit);
    if (missing == a)
        return err_set(e, SHD_ETIMEDOUT,
                       "unit %" PRIu32 " '%s': owners have not taken the sum of micro-batches "
                       "%" PRIu64 " to %" PRIu64 " in %" PRIu64 " ms",
                       unit, m->spec->units[unit].name, first, first + a - 1, ms);
    return err_set(e, SHD_ETIMEDOUT,
                   "unit %" PRIu32 " '%s': micro-batch %" PRIu64 " of the group that is summed on "
                   "this host did not come in %" PRIu64
                   " ms: is the worker there that computes it?",
                   unit, m->spec->units[unit].name, first + missing, ms);
}

/* -- Handing out ------------------------------------------------------------------------------- */

static bool is_writable(const struct hostsum *h, const struct hostsum_cell *cell)
{
    return cell->writer == 0 || cell->writer == h->file.member + 1 ||
           !hostsum_file_lives(&h->file, cell->writer - 1);
}

/* The cell, where it is this worker's to write; else an array that nobody else sees. */
static int hand_out(struct shd_model *m, struct handed *out, uint32_t micro, uint32_t unit,
                    bool in_cell, struct shd_err *e)
{
    struct hostsum *h = of(m);
    if (!in_cell) {
        const int r = buffer_hold(&h->in, &out->scratch, m->spec->units[unit].elems * sizeof(float),
                                  e);
        if (r != SHD_OK)
            return r;
    }
    out->open = true;
    out->in_cell = in_cell;
    out->micro = micro;
    out->array = in_cell ? hostsum_array(&h->file, unit, micro % h->file.accumulate)
                         : out->scratch.base;
    out->live_bytes = plan_unit_grad_bytes(m->spec, unit, SHD_F32);
    session_live(m->session, out->live_bytes, /* more= */ true);
    return SHD_OK;
}

static void take_back(struct shd_model *m, struct handed *out)
{
    if (out->array != NULL)
        session_live(m->session, out->live_bytes, /* more= */ false);
    out->open = out->in_cell = false;
    out->array = NULL;
}

static int held_already(const struct shd_model *m, uint32_t unit, struct shd_err *e)
{
    return err_set(e, SHD_EBUSY,
                   "unit %" PRIu32 " '%s': the gradient of micro-batch %" PRIu32
                   " is handed out: return it first, workers of a host that sum together hold one "
                   "of each unit",
                   unit, m->spec->units[unit].name, of(m)->handed[unit].micro);
}

int hostsum_open(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_array,
                 bool *ret_fresh, struct hostsum_next *ret_next, struct shd_err *e)
{
    struct hostsum *h = of(m);
    struct handed *out = &h->handed[unit];
    enum lane_is is;
    *ret_next = (struct hostsum_next){ .what = HOSTSUM_GO };
    if (out->open && out->micro != micro)
        return held_already(m, unit, e);
    *ret_fresh = !out->open;
    if (!out->open) {
        int r = enter_lane(m, micro / h->file.accumulate, unit, &is, ret_next, e);
        if (r != SHD_OK || ret_next->what != HOSTSUM_GO)
            return r;
        struct hostsum_cell *cell = hostsum_cell(&h->file, unit, micro % h->file.accumulate);
        const bool in_cell = is == LANE_MINE && cell->what == HOSTSUM_CELL_EMPTY &&
                             is_writable(h, cell);
        if (in_cell)
            cell->writer = h->file.member + 1;
        hostsum_file_unlock(&h->file);
        r = hand_out(m, out, micro, unit, in_cell, e);
        if (r != SHD_OK)
            return r;
    }
    *ret_array = out->array;
    return SHD_OK;
}

bool hostsum_is_open(const struct shd_model *m, uint32_t micro, uint32_t unit)
{
    const struct handed *out = &of(m)->handed[unit];
    return out->open && out->micro == micro;
}

/* -- Bringing in ------------------------------------------------------------------------------- */

static void put_report(const struct shd_model *m, struct hostsum_cell *cell, uint32_t micro)
{
    const struct report *report = &m->reports[micro];
    cell->metric_count = report->count;
    memcpy(cell->metrics, report->metrics, sizeof cell->metrics);
    memcpy(cell->names, report->names, sizeof cell->names);
}

/* Under the lock, the lane being the group's. */
static void bring_in(struct shd_model *m, const struct handed *out, uint32_t unit)
{
    struct hostsum *h = of(m);
    struct hostsum_cell *cell = hostsum_cell(&h->file, unit, out->micro % h->file.accumulate);
    put_report(m, cell, out->micro);
    after_that("sums:reported");
    cell->what = out->array != NULL ? HOSTSUM_CELL_IN : HOSTSUM_CELL_NONE;
    after_that("sums:in");
}

static void let_cell_go(struct hostsum *h, uint32_t unit, uint32_t micro)
{
    struct hostsum_cell *cell = hostsum_cell(&h->file, unit, micro % h->file.accumulate);
    if (cell->writer == h->file.member + 1)
        cell->writer = 0;
}

/* What was written apart, for another wrote the cell then, who died: the cell becomes this
 * worker's.
 */
static void move_to_cell(struct shd_model *m, struct handed *out, uint32_t unit)
{
    struct hostsum *h = of(m);
    struct hostsum_cell *cell = hostsum_cell(&h->file, unit, out->micro % h->file.accumulate);
    cell->writer = h->file.member + 1;
    float *to = hostsum_array(&h->file, unit, out->micro % h->file.accumulate);
    memcpy(to, out->array, m->spec->units[unit].elems * sizeof(float));
    out->array = to;
    out->in_cell = true;
}

/* Under the lock. */
static void come_in(struct shd_model *m, struct handed *out, uint32_t unit, enum lane_is is,
                    struct hostsum_next *ret_next)
{
    struct hostsum *h = of(m);
    const uint32_t micro = out->micro;
    struct hostsum_cell *cell = hostsum_cell(&h->file, unit, micro % h->file.accumulate);
    if (is == LANE_MINE && cell->what == HOSTSUM_CELL_EMPTY) {
        if (!is_writable(h, cell)) { /* another worker does so at this moment */
            ret_next->what = HOSTSUM_WAIT;
            return;
        }
        if (out->array != NULL && !out->in_cell)
            move_to_cell(m, out, unit);
        bring_in(m, out, unit);
    }
    let_cell_go(h, unit, micro);
    if (is == LANE_MINE && claim_sum(h, unit))
        *ret_next = (struct hostsum_next){ HOSTSUM_ADD, hostsum_lane(&h->file, unit)->group };
    m->in.handed = true;
    take_back(m, out);
}

int hostsum_close(struct shd_model *m, uint32_t micro, uint32_t unit, bool none,
                  struct hostsum_next *ret_next, struct shd_err *e)
{
    struct hostsum *h = of(m);
    struct handed *out = &h->handed[unit];
    enum lane_is is;
    if (out->open && out->micro != micro)
        return held_already(m, unit, e);
    if (none) {
        take_back(m, out);
        out->open = true;
        out->micro = micro;
    }
    CHECK(out->open);
    const int r = enter_lane(m, micro / h->file.accumulate, unit, &is, ret_next, e);
    if (r != SHD_OK || ret_next->what != HOSTSUM_GO)
        return r;
    come_in(m, out, unit, is, ret_next);
    hostsum_file_unlock(&h->file);
    return SHD_OK;
}

void hostsum_reset(struct shd_model *m, uint32_t group)
{
    struct hostsum *h = of(m);
    struct shd_err ignored;
    bool any = false;
    for (uint32_t u = 0; u < m->spec->unit_count && !any; u++)
        any = h->handed[u].open;
    if (!any || hostsum_file_lock(&h->file, &ignored) != SHD_OK)
        return;
    for (uint32_t u = 0; u < m->spec->unit_count; u++) {
        struct handed *out = &h->handed[u];
        if (!out->open || !grads_meant(group, out->micro / h->file.accumulate))
            continue;
        let_cell_go(h, u, out->micro);
        take_back(m, out);
    }
    hostsum_file_unlock(&h->file);
}

bool hostsum_holds(const struct shd_model *m, uint32_t *ret_micro, uint32_t *ret_unit)
{
    const struct hostsum *h = of(m);
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (h->handed[u].open) {
            *ret_micro = h->handed[u].micro;
            *ret_unit = u;
            return true;
        }
    return false;
}

/* -- Adding up --------------------------------------------------------------------------------- */

/* Others' bytes: what is too much for a report is none. */
static void take_report(struct shd_model *m, const struct hostsum_cell *cell, uint32_t micro)
{
    struct report *report = &m->reports[micro];
    if (cell->metric_count > SHD_METRICS_MAX || report->count > 0)
        return;
    report->count = cell->metric_count;
    memcpy(report->metrics, cell->metrics, sizeof report->metrics);
    memcpy(report->names, cell->names, sizeof report->names);
    report->names[sizeof report->names - 1] = '\0';
}

bool hostsum_is_none(struct shd_model *m, uint32_t unit)
{
    const struct hostsum *h = of(m);
    const uint32_t a = h->file.accumulate;
    const uint64_t first = (uint64_t)h->summing[unit].group * a;
    bool none = true;
    for (uint32_t i = 0; i < a; i++) {
        const struct hostsum_cell *cell = hostsum_cell(&h->file, unit, i);
        none = none && cell->what != HOSTSUM_CELL_IN;
        if (first + i < m->spec->micro_batches)
            take_report(m, cell, (uint32_t)first + i);
    }
    return none;
}

int hostsum_add(const struct shd_model *m, uint32_t unit, float *sum, struct shd_err *e)
{
    const struct hostsum *h = of(m);
    const uint64_t elems = m->spec->units[unit].elems;
    bool first = true;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < h->file.accumulate; i++) {
        struct kern_accumulate add = { .acc = sum,
                                       .grad = hostsum_array(&h->file, unit, i),
                                       .grad_dtype = SHD_F32,
                                       .elems = elems };
        if (hostsum_cell(&h->file, unit, i)->what != HOSTSUM_CELL_IN)
            continue;
        if (first)
            memcpy(sum, add.grad, elems * sizeof *sum);
        else
            r = kern_run_op(m->session->kern,
                            &(struct kern_op){ KERN_ACCUMULATE, { .accumulate = add } }, e);
        first = false;
    }
    return r;
}

static void sum_is_over(struct hostsum *h, uint32_t unit)
{
    struct summing *s = &h->summing[unit];
    struct hostsum_lane *lane = hostsum_lane(&h->file, unit);
    struct shd_err ignored;
    if (!s->active || !s->given || hostsum_file_lock(&h->file, &ignored) != SHD_OK)
        return;
    if (compare(&lane->round, &s->round) == 0 && lane->group == s->group) {
        hostsum_done(&h->file, unit)[s->group / 8] |= (uint8_t)(1u << s->group % 8);
        after_that("sums:done");
        lane->group = HOSTSUM_FREE;
    }
    hostsum_file_unlock(&h->file);
    s->active = false;
}

void hostsum_given(struct shd_model *m, uint32_t unit)
{
    struct hostsum *h = of(m);
    struct summing *s = &h->summing[unit];
    s->given = true;
    if (s->answers == session_members(m->session))
        sum_is_over(h, unit);
}

/* An owner has credited it, or is gone and has a replica that was asked the same. */
static void answered(struct shd_model *m, const struct map_answer *a)
{
    struct hostsum *h = of(m);
    struct summing *s = &h->summing[a->unit];
    const struct hostsum_round round = { a->attempt, a->step };
    uint8_t *bits = h->answered + (size_t)a->unit * h->answered_bytes;
    if (!s->active || s->group != a->group || compare(&s->round, &round) != 0 ||
        (bits[a->member / 8] >> a->member % 8 & 1))
        return;
    bits[a->member / 8] |= (uint8_t)(1u << a->member % 8);
    if (++s->answers == session_members(m->session))
        sum_is_over(h, a->unit);
}
