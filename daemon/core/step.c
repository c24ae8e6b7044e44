/* See step.h; how a core begins is in step_init.c, how a step ends in step_commit.c. */
#include "daemon/core/step.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"
#include "proto/share/history.h"

static struct step_action *act(struct step_actions *actions, enum step_action_kind kind)
{
    CHECK(actions->count < STEP_ACTIONS_MAX);
    struct step_action *a = &actions->items[actions->count++];
    *a = (struct step_action){ .kind = kind };
    return a;
}

static void credit(struct step_actions *actions, step_ref ref, bool stale)
{
    struct step_action *a = act(actions, STEP_DO_CREDIT);
    a->ref = ref;
    a->stale = stale;
}

static uint32_t *cell_at(const struct step *s, uint32_t unit, uint32_t micro)
{
    return &s->cells[(size_t)unit * s->returns.most + micro];
}

static _Atomic uint64_t *ledger_cell_at(const struct step *s, uint32_t unit, uint32_t micro)
{
    return &s->ledger.cell[(size_t)unit * s->returns.most + micro];
}

uint64_t step_collecting(const struct step *s)
{
    return s->phase == STEP_APPLYING ? s->now + 1 : s->now;
}

/* Did any micro-batch of the step that is being applied return a gradient of the unit? The word is
 * that of its last sum, which the next step does not begin before the unit is applied. */
static bool took_part(const struct step *s, uint32_t unit)
{
    const uint64_t word = atomic_load_explicit(&s->ledger.unit[unit].progress,
                                               memory_order_relaxed);
    return ledger_progress_round(word) == ledger_committed_round(&s->ledger) &&
           ledger_progress_started(word);
}

static bool nothing_to_apply(const struct step *s, uint32_t unit)
{
    const struct step_unit *u = &s->unit[unit];
    return s->record.decision.skip || u->frozen || (u->skips_idle && !took_part(s, unit));
}

/* Of an ACCUMULATE or APPLY, the rest of which is known. */
static struct step_word done_word(const struct step *s, const struct step_action *a)
{
    struct ledger_unit *kept = &s->ledger.unit[a->unit];
    if (a->kind == STEP_DO_APPLY)
        return (struct step_word){ &kept->version, a->step + 1,
                                   ledger_op(&s->ledger, a->round, s->returns.most) };
    return (struct step_word){ &kept->progress, ledger_progress(a->round, true, a->micro + 1),
                               ledger_op(&s->ledger, a->round, a->micro) };
}

static void apply_one_more(struct step *s, struct step_actions *actions)
{
    while (s->apply_next < s->units && s->unit[s->apply_next].free)
        s->apply_next++; /* a predecessor did it */
    if (s->apply_next == s->units)
        return;
    struct step_action *a = act(actions, STEP_DO_APPLY);
    a->unit = s->apply_next++;
    a->step = s->now;
    a->round = ledger_committed_round(&s->ledger);
    a->put = s->record.decision.put != 0;
    a->skip = !a->put && nothing_to_apply(s, a->unit);
    a->took = s->unit[a->unit].mean ? s->ledger.unit[a->unit].took : 0;
    a->updates = ledger_unit_updates(&s->ledger, a->unit);
    a->done = done_word(s, a);
}

/* -- Sealing ------------------------------------------------------------------------------------
 */

/* Sums of the micro-batches' numbers, in ascending order: the same for any order of arrival. */
static void record_metrics(struct step *s)
{
    s->record.metric_count = s->record.reported = 0;
    memset(s->record.metrics, 0, sizeof s->record.metrics);
    for (uint32_t micro = 0; micro < s->returns.now; micro++) {
        const struct ledger_metrics *m = &s->ledger.metrics[micro];
        const uint64_t tag = atomic_load_explicit(&m->tag, memory_order_relaxed);
        const bool known = ledger_metrics_tag_round(tag) == s->round;
        const uint32_t count = known ? ledger_metrics_tag_count(tag) : 0;
        s->record.reported += count > 0;
        if (count > s->record.metric_count)
            s->record.metric_count = count;
        for (uint32_t i = 0; i < count; i++)
            s->record.metrics[i] += m->values[i];
    }
}

static void seal_if_complete(struct step *s, struct step_actions *actions)
{
    if (s->phase != STEP_OPEN || s->units_summed < s->units)
        return;
    s->phase = STEP_SEALED;
    s->record = (struct step_prepared){ .step = s->now, .finite = s->finite, .sum = s->sum };
    fixsum_carry(&s->record.sum);
    record_metrics(s);
    act(actions, STEP_DO_SEALED);
}

/* The unit's accumulator is idle: start whatever its next micro-batch allows. */
static void unit_advance(struct step *s, uint32_t unit, struct step_actions *actions)
{
    struct step_unit *u = &s->unit[unit];
    if (u->busy || u->summed || !u->free || s->dropping)
        return;
    while (u->next < s->returns.now && *cell_at(s, unit, u->next) == CELL_NONE) {
        *cell_at(s, unit, u->next) = CELL_EMPTY;
        u->next++;
        s->cells_waiting--;
        s->cells_in++;
    }
    if (u->next == s->returns.now) { /* the last micro-batch took no part */
        u->busy = true;
        struct step_action *a = act(actions, u->started ? STEP_DO_SUM : STEP_DO_ZERO);
        a->unit = unit;
        a->step = step_collecting(s);
        a->round = s->round;
        return;
    }
    const uint32_t ref = *cell_at(s, unit, u->next);
    if (ref == CELL_EMPTY)
        return;
    u->busy = true;
    struct step_action *a = act(actions, STEP_DO_ACCUMULATE);
    a->unit = unit;
    a->micro = u->next;
    a->step = step_collecting(s);
    a->round = s->round;
    a->first = !u->started;
    a->last = u->next + 1 == s->returns.now;
    a->done = done_word(s, a);
    if (ref == CELL_SPILLED)
        a->dtype = (enum shd_dtype)ledger_cell_dtype(
            atomic_load_explicit(ledger_cell_at(s, unit, u->next), memory_order_relaxed));
    else
        a->ref = ref;
}

void step_resume(struct step *s, uint32_t unit, struct step_actions *ret_actions)
{
    CHECK(unit < s->units);
    ret_actions->count = 0;
    if (s->phase == STEP_APPLYING && unit == 0)
        for (uint32_t i = 0; i < STEP_APPLY_AHEAD; i++)
            apply_one_more(s, ret_actions);
    unit_advance(s, unit, ret_actions);
}

int step_check_counts(const struct step *s, struct shd_err *e)
{
    for (uint32_t u = 0; s->phase == STEP_APPLYING && u < s->units; u++)
        if (!s->unit[u].free && s->record.decision.put == 0 && !nothing_to_apply(s, u) &&
            ledger_unit_updates(&s->ledger, u) == 0)
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " has 0 updates, and step %" PRIu64
                           " is to update it",
                           u, s->now);
    return SHD_OK;
}

/* -- Gradients ----------------------------------------------------------------------------------
 */

static void keep_metrics(struct step *s, uint32_t micro, const double *metrics, uint32_t count)
{
    CHECK(count <= STEP_METRICS_MAX);
    struct ledger_metrics *m = &s->ledger.metrics[micro];
    const uint64_t tag = atomic_load_explicit(&m->tag, memory_order_relaxed);
    if (count == 0 ||
        (ledger_metrics_tag_round(tag) == s->round && ledger_metrics_tag_count(tag) > 0))
        return;
    memcpy(m->values, metrics, count * sizeof *metrics);
    FAIL_POINT("step:metrics:before");
    atomic_store_explicit(&m->tag, ledger_metrics_tag(s->round, count), memory_order_release);
    FAIL_POINT("step:metrics:after");
}

/* It needs no sender any more, although its turn has not come. */
static void keep_cell(struct step *s, uint32_t unit, uint32_t micro, enum ledger_cell_kind kind,
                      unsigned dtype)
{
    FAIL_POINT("step:cell:before");
    atomic_store_explicit(ledger_cell_at(s, unit, micro), ledger_cell(s->round, kind, dtype),
                          memory_order_release);
    FAIL_POINT("step:cell:after");
    *cell_at(s, unit, micro) = kind == LEDGER_CELL_NONE ? CELL_NONE : CELL_SPILLED;
    s->micro_units[micro]++;
}

static bool is_ref(uint32_t c)
{
    return c != CELL_EMPTY && c <= STEP_REF_MAX;
}

static bool is_summed_now(const struct step_unit *u, uint32_t micro)
{
    return u->busy && !u->lost && micro == u->next;
}

/* A gradient for a place where one waits already. That one's sender may be dead: the new one takes
 * over, unless the old one needs no sender or is being summed right now. */
static void take_again(struct step *s, step_ref ref, uint32_t unit, uint32_t micro, bool none,
                       struct step_actions *actions)
{
    struct step_unit *u = &s->unit[unit];
    uint32_t *c = cell_at(s, unit, micro);
    step_ref loser = ref;
    if (is_ref(*c) && !none && is_summed_now(u, micro)) {
        loser = u->dup;
        u->dup = ref;
    } else if (is_ref(*c) && !none) {
        loser = *c;
        *c = ref;
    }
    if (loser != 0)
        credit(actions, loser, /* stale= */ true);
}

int step_return(struct step *s, step_ref ref, uint64_t step, uint32_t unit, uint32_t micro,
                bool none, const double *metrics, uint32_t metric_count,
                struct step_actions *ret_actions, struct shd_err *e)
{
    CHECK(unit < s->units && micro < s->returns.most);
    CHECK(!s->unit[unit].frozen && ref > 0 && ref <= STEP_REF_MAX);
    ret_actions->count = 0;
    const uint64_t collecting = step_collecting(s);
    if (step > collecting)
        return err_set(e, SHD_ESTEP,
                       "gradient of unit %" PRIu32 " for step %" PRIu64
                       ", the open step is %" PRIu64,
                       unit, step, collecting);
    if (step == collecting && micro >= s->returns.now)
        return err_set(e, SHD_ERANGE,
                       "gradient %" PRIu32 " of unit %" PRIu32 ", step %" PRIu64 " has %" PRIu32
                       " of each",
                       micro, unit, step, s->returns.now);
    struct step_unit *u = &s->unit[unit];
    uint32_t *c = cell_at(s, unit, micro);
    if (step < collecting || micro < u->next || s->dropping) {
        credit(ret_actions, ref, /* stale= */ true);
        return SHD_OK;
    }
    if (*c != CELL_EMPTY) {
        take_again(s, ref, unit, micro, none, ret_actions);
        return SHD_OK;
    }
    keep_metrics(s, micro, metrics, metric_count);
    s->cells_waiting++;
    s->micro_came[micro]++;
    if (none) {
        keep_cell(s, unit, micro, LEDGER_CELL_NONE, 0);
        credit(ret_actions, ref, /* stale= */ false);
    } else {
        *c = ref;
    }
    unit_advance(s, unit, ret_actions);
    return SHD_OK;
}

bool step_waits(const struct step *s, uint32_t unit, uint32_t micro, step_ref ref)
{
    CHECK(unit < s->units && micro < s->returns.most);
    const struct step_unit *u = &s->unit[unit];
    return is_ref(ref) && *cell_at(s, unit, micro) == ref && micro > u->next;
}

void step_spilled(struct step *s, uint32_t unit, uint32_t micro, step_ref ref, enum shd_dtype dtype,
                  struct step_actions *ret_actions)
{
    ret_actions->count = 0;
    const struct step_unit *u = &s->unit[unit];
    if (*cell_at(s, unit, micro) != ref || is_summed_now(u, micro))
        return; /* its turn has come meanwhile, or somebody else's is taken */
    keep_cell(s, unit, micro, LEDGER_CELL_SPILLED, (unsigned)dtype);
    credit(ret_actions, ref, /* stale= */ false);
}

/* The gradient at u->next is in the accumulator. */
static void took_in(struct step *s, uint32_t unit, struct step_actions *actions)
{
    struct step_unit *u = &s->unit[unit];
    uint32_t *c = cell_at(s, unit, u->next);
    CHECK(*c != CELL_EMPTY && *c != CELL_NONE);
    CHECK(atomic_load_explicit(&s->ledger.unit[unit].progress, memory_order_relaxed) ==
          ledger_progress(s->round, true, u->next + 1));
    if (is_ref(*c)) {
        credit(actions, *c, /* stale= */ false);
        s->micro_units[u->next]++;
    }
    if (u->dup != 0)
        credit(actions, u->dup, /* stale= */ true);
    u->dup = 0;
    *c = CELL_EMPTY;
    u->started = true;
    u->next++;
    s->cells_waiting--;
    s->cells_in++;
}

/* What it has put into the accumulator is of a round that was given up. */
static void let_go(struct step *s, uint32_t unit, struct step_actions *actions)
{
    struct step_unit *u = &s->unit[unit];
    if (u->lost_ref != 0)
        credit(actions, u->lost_ref, /* stale= */ true);
    u->lost_ref = 0;
    u->lost = false;
    unit_advance(s, unit, actions);
}

/* What was being summed when the step became a put. */
static void drop_busy(struct step *s, uint32_t unit, struct step_actions *actions)
{
    struct step_unit *u = &s->unit[unit];
    if (u->lost_ref != 0)
        credit(actions, u->lost_ref, /* stale= */ true);
    if (!u->lost && u->next < s->returns.now) {
        uint32_t *c = cell_at(s, unit, u->next);
        if (is_ref(*c))
            credit(actions, *c, /* stale= */ true);
        if (u->dup != 0)
            credit(actions, u->dup, /* stale= */ true);
        *c = CELL_EMPTY;
        s->cells_waiting--;
    }
    u->dup = u->lost_ref = 0;
    u->lost = false;
}

void step_accumulated(struct step *s, uint32_t unit, const struct fixsum *sum, bool finite,
                      struct step_actions *ret_actions)
{
    struct step_unit *u = &s->unit[unit];
    CHECK(unit < s->units && u->busy);
    ret_actions->count = 0;
    const bool was_lost = u->lost;
    u->busy = false;
    if (s->dropping)
        drop_busy(s, unit, ret_actions);
    else if (u->lost)
        let_go(s, unit, ret_actions);
    if (s->dropping || was_lost) {
        act(ret_actions, STEP_DO_DROPPED);
        return;
    }
    if (u->next < s->returns.now) {
        took_in(s, unit, ret_actions);
        if (sum == NULL) {
            unit_advance(s, unit, ret_actions);
            return;
        }
    }
    CHECK(u->next == s->returns.now);
    u->summed = true;
    s->units_summed++;
    s->finite = s->finite && finite;
    if (sum != NULL && !u->mean)
        fixsum_merge(&s->sum, sum);
    seal_if_complete(s, ret_actions);
}

void step_applied(struct step *s, uint32_t unit, struct step_actions *ret_actions)
{
    CHECK(s->phase == STEP_APPLYING && unit < s->apply_next && !s->unit[unit].free);
    CHECK(atomic_load_explicit(&s->ledger.unit[unit].version, memory_order_relaxed) == s->now + 1);
    ret_actions->count = 0;
    struct step_action *a = act(ret_actions, STEP_DO_PUBLISH);
    a->unit = unit;
    a->step = s->now + 1;
    s->unit[unit].free = true;
    s->apply_done++;
    apply_one_more(s, ret_actions);
    unit_advance(s, unit, ret_actions);
    if (s->apply_done < s->units)
        return;
    s->now++;
    s->phase = STEP_OPEN;
    act(ret_actions, STEP_DO_OPENED)->step = s->now;
    seal_if_complete(s, ret_actions);
}

uint64_t step_now(const struct step *s)
{
    return s->now;
}

enum step_phase step_phase(const struct step *s)
{
    return s->phase;
}

uint64_t step_attempt(const struct step *s)
{
    return s->round - step_collecting(s) + 1;
}

uint64_t step_rewound(const struct step *s)
{
    const struct ledger_rewind *r = s->ledger.rewind;
    return r != NULL ? atomic_load_explicit(&r->last, memory_order_relaxed) : 0;
}

enum step_when step_when(const struct step *s, uint64_t step, uint64_t attempt)
{
    const uint64_t now = step_attempt(s);
    const uint64_t collecting = step_collecting(s);
    if (attempt == 0 || attempt == now)
        return STEP_WHEN_NOW;
    /* Its sender does not know yet that the model went back. A step of that number may have been
     * decided again since: what is on record of it is no answer. */
    if (attempt < step_rewound(s))
        return STEP_WHEN_PAST;
    if (step < collecting)
        return STEP_WHEN_NOW;
    if (attempt < now)
        return STEP_WHEN_PAST;
    return step == collecting ? STEP_WHEN_AHEAD : STEP_WHEN_NOW;
}

uint64_t step_updates(const struct step *s)
{
    return s->updates;
}

uint64_t step_unit_updates(const struct step *s, uint32_t unit)
{
    CHECK(unit < s->units);
    return ledger_unit_updates(&s->ledger, unit);
}

bool step_unit_updated(const struct step *s, uint32_t unit)
{
    CHECK(unit < s->units);
    const struct step_unit *u = &s->unit[unit];
    if (!s->has_last || s->last.skip || s->last.put != 0 || u->frozen || u->mean)
        return false;
    const uint64_t *counts = s->ledger.unit[unit].updates; /* before and after, in either order */
    if (!u->skips_idle)
        return true;
    /* Not where the count before is not there: of what was restored. */
    return ledger_counts_units(&s->ledger) &&
           (counts[0] == counts[1] + 1 || counts[1] == counts[0] + 1);
}

bool step_units_counted_apart(const struct step *s)
{
    for (uint32_t u = 0; u < s->units; u++)
        if (ledger_unit_updates(&s->ledger, u) != s->updates)
            return true;
    return false;
}

bool step_last_decision(const struct step *s, struct decision *ret_decision)
{
    if (s->has_last)
        *ret_decision = s->last;
    return s->has_last;
}

struct step_blob step_last_blob(const struct step *s)
{
    const uint64_t commits = atomic_load_explicit(&s->ledger.head->commits, memory_order_relaxed);
    const struct ledger_record *r = &s->ledger.head->record[commits & 1];
    if (commits == 0 || r->blob_bytes == 0)
        return (struct step_blob){ .data = NULL };
    return (struct step_blob){ s->ledger.blob[r->blob_at], r->blob_bytes };
}

struct step_result step_last_result(const struct step *s)
{
    const uint64_t commits = atomic_load_explicit(&s->ledger.head->commits, memory_order_relaxed);
    struct history_row row;
    if (commits == 0 ||
        !history_get(s->ledger.history, s->ledger.head->history_slots, commits, commits - 1, &row))
        return (struct step_result){ .metric = NAN, .norm = NAN, .lr = NAN };
    const uint32_t reported = row.reported > 0 ? row.reported : s->returns.before;
    return (struct step_result){ .any = true,
                                 .metric = row.metric_count > 0 ? row.metrics[0] / reported : NAN,
                                 .norm = row.norm,
                                 .lr = row.lr };
}

const struct step_prepared *step_record(const struct step *s)
{
    return &s->record;
}

uint32_t step_returns(const struct step *s)
{
    return s->returns.now;
}

uint32_t step_returns_before(const struct step *s)
{
    return s->returns.before;
}

uint64_t step_cells(const struct step *s)
{
    return (uint64_t)(s->units - s->units_frozen) * s->returns.now;
}

uint64_t step_cells_in(const struct step *s)
{
    return s->cells_in;
}

uint64_t step_cells_waiting(const struct step *s)
{
    return s->cells_waiting;
}

uint32_t step_unit_next(const struct step *s, uint32_t unit)
{
    CHECK(unit < s->units);
    return s->unit[unit].next;
}

int step_unit_gradient(const struct step *s, uint32_t unit, struct step_gradient *ret_gradient,
                       struct shd_err *e)
{
    CHECK(unit < s->units && !s->unit[unit].frozen);
    const struct step_unit *u = &s->unit[unit];
    const uint64_t word = atomic_load_explicit(&s->ledger.unit[unit].progress,
                                               memory_order_relaxed);
    if (u->busy || !u->free || s->resetting)
        return err_set(e, SHD_EBUSY, "a gradient of unit %" PRIu32 " is being summed", unit);
    if (u->started || u->summed) { /* summed alone: nobody took part, it was cleared */
        *ret_gradient = (struct step_gradient){ step_collecting(s), u->next };
        return SHD_OK;
    }
    if (s->has_last && s->last.put == 0 && ledger_progress_started(word) &&
        ledger_progress_round(word) == ledger_committed_round(&s->ledger)) {
        *ret_gradient = (struct step_gradient){ step_collecting(s) - 1, s->returns.before };
        return SHD_OK;
    }
    return err_set(e, SHD_ENOENT, "unit %" PRIu32 " holds no gradient at step %" PRIu64, unit,
                   step_collecting(s));
}

bool step_micro_in(const struct step *s, uint32_t micro)
{
    CHECK(micro < s->returns.most);
    return s->micro_units[micro] == s->units - s->units_frozen;
}

bool step_micro_came(const struct step *s, uint32_t micro)
{
    CHECK(micro < s->returns.most);
    return s->micro_came[micro] == s->units - s->units_frozen;
}

void step_sender(struct step *s, uint32_t pid, uint32_t rank, const char *name)
{
    struct audit_worker *w = &s->next.worker;
    *w = (struct audit_worker){ .pid = pid, .rank = rank };
    memcpy(w->name, name, strnlen(name, sizeof w->name - 1));
}
