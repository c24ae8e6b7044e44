/* See step_commit.h. */
#include "daemon/core/step_commit.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_ramp.h"
#include "daemon/core/step_set.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"
#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/share/unit_window.h"

static void promise(struct step *s)
{
    struct ledger_head *h = s->ledger.head;
    const uint64_t word = s->round + 1;
    if (atomic_load_explicit(&h->promised, memory_order_relaxed) == word)
        return;
    FAIL_POINT("step:promise:before");
    atomic_store_explicit(&h->promised, word, memory_order_release);
    FAIL_POINT("step:promise:after");
}

/* But the number of micro-batches, which the step has since it began. */
static void tell_settings(struct step *s, uint64_t step)
{
    struct settings *told = &s->told.settings;
    step_settings(s, step, told);
    if (told->count > 0)
        told->numbers[setting_micros(settings_groups(told->count))] = (double)NAN;
}

int step_prepare(struct step *s, uint64_t step, struct step_prepared *ret_prepared,
                 struct shd_err *e)
{
    if (step == s->record.step && step <= s->now) {
        const int r = s->phase == STEP_SEALED ? step_check_stopped(s, e) : SHD_OK;
        if (r != SHD_OK)
            return r;
        if (s->phase == STEP_SEALED)
            promise(s);
        *ret_prepared = s->record;
        if (!s->record.has_decision) {
            /* Behind the promise: they do not change any more. */
            tell_settings(s, step);
            step_guard_limits(s, &s->told.limits);
            if (s->told.settings.count > 0)
                ret_prepared->settings = &s->told.settings;
            ret_prepared->limits = s->told.limits.numbers;
            ret_prepared->limit_count = s->told.limits.count;
        }
        return SHD_OK;
    }
    if (step < s->now) {
        *ret_prepared = (struct step_prepared){ .step = step, .over = true };
        return SHD_OK;
    }
    if (step == step_collecting(s))
        return SHD_PENDING;
    return err_set(e, SHD_ESTEP, "prepare for step %" PRIu64 ", the open step is %" PRIu64, step,
                   step_collecting(s));
}

void step_seen(struct step *s, double norm, uint64_t time_ns)
{
    s->next.norm = norm;
    s->next.time_ns = time_ns;
}

void step_recorded(struct step *s, bool recorded)
{
    s->next.recorded = recorded;
}

int step_seen_units(struct step *s, const uint8_t *norms, size_t bytes, struct shd_err *e)
{
    struct unit_window w;
    s->next.unit_norms = NULL;
    if (bytes == 0 || !step_guard_window(s, &w))
        return SHD_OK;
    if (bytes != w.columns * sizeof(double))
        return err_set(e, SHD_EINVAL,
                       "commit with %zu bytes of norms of units, the guard looks at %" PRIu32,
                       bytes, w.columns);
    s->next.unit_norms = norms;
    return SHD_OK;
}

uint32_t step_prepare_units(const struct step *s, uint32_t first, uint32_t count,
                            double *ret_limits)
{
    return step_unit_limits(s, first, count, ret_limits);
}

uint32_t step_prepare_norms(const struct step *s, uint64_t step, double *ret_norms)
{
    struct unit_window w;
    if (!step_guard_window(s, &w) || (ret_norms != NULL && !unit_window_get(&w, step, ret_norms)))
        return 0;
    return w.columns;
}

static void write_window(struct step *s)
{
    struct unit_window w;
    const struct decision *d = &s->record.decision;
    if (step_guard_window(s, &w))
        unit_window_put(&w, s->now, d->skip || d->put != 0 ? NULL : s->next.unit_norms);
    s->next.unit_norms = NULL;
}

static void write_row(struct step *s)
{
    const struct decision *d = &s->record.decision;
    struct history_row row = { .step = s->now,
                               .time_ns = s->next.time_ns,
                               .norm = s->next.norm,
                               .lr = d->lr,
                               .loss_scale = d->put != 0 ? 0 : d->loss_scale,
                               .scale = d->guard.what != 0 ? (float)d->guard.bound : d->scale,
                               .metric_count = s->record.metric_count,
                               .skipped = history_skipped(d->skip, d->guard.what),
                               .reported = s->record.reported };
    memcpy(row.metrics, s->record.metrics, sizeof row.metrics);
    if (s->ledger.head->history_slots > 0)
        history_put(s->ledger.history, s->ledger.head->history_slots, &row);
}

/* The commit: the record where the last one but one was, then the word that makes it count. */
static void write_record(struct step *s, struct step_blob blob)
{
    struct ledger_head *h = s->ledger.head;
    const uint64_t commits = s->now + 1;
    const struct ledger_record *last = &h->record[(commits - 1) & 1];
    struct ledger_record *r = &h->record[commits & 1];
    uint32_t blob_at = commits > 1 ? last->blob_at : 0;
    uint64_t blob_bytes = commits > 1 ? last->blob_bytes : 0;
    if (blob.data != NULL) {
        blob_at = 1 - blob_at; /* the other one is still what counts */
        blob_bytes = blob.bytes;
        memcpy(s->ledger.blob[blob_at], blob.data, blob.bytes);
    }
    *r = (struct ledger_record){ .step = s->now,
                                 .updates = s->updates,
                                 .finite = s->record.finite,
                                 .reported = s->record.reported,
                                 .sum = s->record.sum,
                                 .metric_count = s->record.metric_count,
                                 .blob_at = blob_at,
                                 .blob_bytes = blob_bytes };
    h->beside.resets[commits & 1] = ledger_resets(&s->ledger);
    memcpy(r->metrics, s->record.metrics, sizeof r->metrics);
    ledger_decision_put(&s->ledger, commits & 1, &s->record.decision);
    if (s->ledger.audit != NULL && s->record.decision.cause.group > 0)
        audit_put_worker(s->ledger.audit, s->now, &s->next.worker);
    s->next.worker = (struct audit_worker){ 0 };
    if (s->ledger.chosen != NULL)
        s->ledger.chosen[commits & 1].returns = s->returns.now;
    write_window(s);
    write_row(s);
    FAIL_POINT("step:commit:before");
    atomic_store_explicit(&h->commits, commits, memory_order_release);
    FAIL_POINT("step:commit:after");
    s->round = ledger_round(&s->ledger);
}

/* A put has gradients of nothing. */
static void begin_put(struct step *s)
{
    CHECK(s->cells_waiting == 0);
    ledger_rewind_renew(s->ledger.rewind);
    s->record = (struct step_prepared){ .step = s->now, .finite = true };
    fixsum_init(&s->record.sum);
    fixsum_carry(&s->record.sum);
}

/* Of how many gradients the sums of means are: all but those whose cells say that they took no
 * part, which the next step's may overwrite before the unit is applied. */
static void count_means(struct step *s)
{
    for (uint32_t u = 0; u < s->units; u++) {
        const _Atomic uint64_t *cells = &s->ledger.cell[(size_t)u * s->returns.most];
        uint32_t took = 0;
        if (!s->unit[u].mean)
            continue;
        for (uint32_t micro = 0; micro < s->returns.now; micro++) {
            const uint64_t word = atomic_load_explicit(&cells[micro], memory_order_relaxed);
            took += ledger_cell_round(word) != s->round ||
                    ledger_cell_kind(word) != LEDGER_CELL_NONE;
        }
        s->ledger.unit[u].took = took;
    }
}

/* What the unit's count is to be. Of one that is not trained it is the model's. */
static uint64_t updates_of(const struct step *s, uint32_t unit, const struct decision *decision)
{
    const struct step_unit *u = &s->unit[unit];
    if (decision->put != 0 && s->put_updates != NULL && s->put_updates[unit] > 0)
        return s->put_updates[unit] - 1;
    if (u->frozen || u->mean || (decision->put != 0 && decision->updates > 0))
        return s->updates;
    return ledger_unit_updates(&s->ledger, unit) +
           (!decision->skip && (u->started || !u->skips_idle));
}

/* s->updates is counted already. */
static void count_updates(struct step *s, const struct decision *decision)
{
    for (uint32_t u = 0; u < s->units; u++)
        ledger_unit_updates_next(&s->ledger, u, updates_of(s, u, decision));
    s->put_updates = NULL;
}

static void begin_applying(struct step *s, const struct decision *decision, struct step_blob blob,
                           struct step_actions *actions)
{
    s->record.has_decision = true;
    s->record.decision = *decision;
    s->last = *decision;
    s->has_last = true;
    if (!decision->skip)
        s->updates++;
    if (decision->put != 0 && decision->updates > 0)
        s->updates = decision->updates - 1;
    s->dropping = false;
    count_means(s);
    count_updates(s, decision);
    write_record(s, blob);
    s->phase = STEP_APPLYING;
    step_ramp_next(s);
    s->apply_next = s->apply_done = 0;
    s->units_summed = s->units_frozen;
    s->cells_in = 0;
    CHECK(s->cells_waiting == 0);
    s->finite = true;
    fixsum_init(&s->sum);
    memset(s->micro_units, 0, s->returns.most * sizeof *s->micro_units);
    memset(s->micro_came, 0, s->returns.most * sizeof *s->micro_came);
    for (uint32_t u = 0; u < s->units; u++) {
        const struct step_unit was = s->unit[u];
        CHECK(!was.lost);
        s->unit[u] = (struct step_unit){ .frozen = was.frozen,
                                         .summed = was.frozen,
                                         .skips_idle = was.skips_idle,
                                         .mean = was.mean };
    }
    step_resume(s, 0, actions); /* the first units; the others as these are done */
}

static int check_cause(const struct step *s, uint64_t step, const struct decision *decision,
                       struct shd_err *e)
{
    const struct decision_cause *c = &decision->cause;
    if ((c->unit > 0 && c->unit <= s->units && decision->skip && c->norm >= 0 &&
         c->group <= s->returns.most && c->share >= 0) ||
        (c->unit == 0 && c->norm == 0 && c->group == 0 && c->share == 0))
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "commit of step %" PRIu64 " that comes from unit %" PRIu32
                   ", norm %g, gradient %" PRIu32 ", share %g, of %" PRIu32 " units%s",
                   step, c->unit, c->norm, c->group, (double)c->share, s->units,
                   decision->skip ? "" : ", and is not skipped");
}

/* The decision to be recorded. Owner 0 says how many micro-batches the next step has: whoever hands
 * a decision out asks it first, and the others take what it has recorded. */
static int complete(const struct step *s, struct decision *decision, struct shd_err *e)
{
    const uint64_t step = s->now;
    if (!guard_plausible(&decision->guard, decision->skip))
        return err_set(e, SHD_EINVAL,
                       "commit of step %" PRIu64 " with rule %" PRIu32 " of a guard%s, limit %g",
                       step, decision->guard.what, decision->skip ? "" : " that skips nothing",
                       decision->guard.bound);
    const int r = check_cause(s, step, decision, e);
    if (r != SHD_OK)
        return r;
    if (s->ledger.head->owner == 0 && !s->next.recorded)
        decision->micro_batches = step_settings_micros(s, s->now + 1);
    if (!step_ramp_good(s, decision->micro_batches))
        return err_set(e, SHD_EINVAL,
                       "commit of step %" PRIu64 " with %" PRIu32
                       " micro-batches for the next one, of at most %" PRIu32 " times %" PRIu32,
                       step, decision->micro_batches, s->returns.most, s->returns.accumulate);
    if (ledger_decision_room(&s->ledger, decision))
        return SHD_OK;
    return err_set(e, SHD_ENOTSUP,
                   "commit of step %" PRIu64
                   " with a divisor, rates or eps of groups, micro-batches of the next step or a "
                   "guard: the model was opened by an older build, whose ledger has no room for "
                   "them; save it, and restore it in this one",
                   step);
}

int step_commit(struct step *s, uint64_t step, const struct decision *decision,
                struct step_blob blob, struct decision *ret_decision, enum step_committed *ret_how,
                struct step_actions *ret_actions, struct shd_err *e)
{
    ret_actions->count = 0;
    if (step == s->record.step && s->record.has_decision) {
        *ret_decision = s->record.decision;
        *ret_how = STEP_COMMITTED_AGAIN;
        return SHD_OK;
    }
    if (step < s->now) {
        *ret_how = STEP_COMMITTED_OVER;
        return SHD_OK;
    }
    const bool put = decision->put != 0;
    if (put && step == step_collecting(s) && s->phase == STEP_APPLYING)
        return SHD_PENDING;
    if (!put && step == s->now && s->phase == STEP_OPEN && s->cells_in == step_cells(s))
        return SHD_PENDING;
    if (step != s->now || (s->phase != STEP_SEALED && !put))
        return err_set(e, SHD_ESTEP,
                       "commit of step %" PRIu64 ", but step %" PRIu64 " is %s with %" PRIu64
                       " of %" PRIu64 " gradients in",
                       step, step_collecting(s), step_phase_name(s->phase), s->cells_in,
                       step_cells(s));
    if (!put && !s->record.finite && !decision->skip)
        return err_set(e, SHD_EINVAL,
                       "commit of step %" PRIu64 " would apply gradients that are not finite",
                       step);
    if (blob.bytes > LEDGER_BLOB_BYTES || step >= LEDGER_STEP_MAX)
        return err_set(e, SHD_ERANGE,
                       "commit of step %" PRIu64 " (limit %" PRIu64 ") with a blob of %" PRIu64
                       " bytes (limit %" PRIu64 ")",
                       step, LEDGER_STEP_MAX, blob.bytes, LEDGER_BLOB_BYTES);
    struct decision whole = *decision;
    const int r = complete(s, &whole, e);
    if (r != SHD_OK)
        return r;
    if (put)
        begin_put(s);
    begin_applying(s, &whole, blob, ret_actions);
    *ret_decision = s->record.decision;
    *ret_how = STEP_COMMITTED_FIRST;
    return SHD_OK;
}
