/* See ledger.h. */
#include "daemon/core/ledger.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "daemon/core/ledger_back.h"
#include "daemon/core/ledger_guard.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"
#include "proto/base/check.h"
#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/share/segment.h"
#include "proto/share/unit_window.h"
#include "proto/spec/guard.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

#define PART_ALIGN UINT64_C(128)
#define CHUNKS_MAX (2 * (SHD_MODEL_ELEMS_MAX / KERN_CHUNK_ELEMS + SHD_UNITS_MAX)) /* averages' */

_Static_assert((LEDGER_STEP_MAX + LEDGER_RESETS_MAX + 1) * (SHD_MICROS_MAX + 1) <= KERN_OP_MAX,
               "every operation of every round has a number");
_Static_assert(offsetof(struct ledger_head, ready) == 320, "what came later lies in its padding,");
_Static_assert(offsetof(struct ledger_head, commits) == 384, "and in that behind it");
_Static_assert(offsetof(struct ledger_head, twin_of) == 936, "and in that at the end,");
_Static_assert(sizeof(struct ledger_head) == 960, "which is no longer for it");
_Static_assert(LEDGER_COMMON == LEDGER_VERSION + 1, "the newest is known");
_Static_assert(sizeof(struct ledger_unit) == 64, "and a unit's is no larger");
_Static_assert(offsetof(struct ledger_decision, scale) == 4, "nor a decision");
_Static_assert(LEDGER_HISTORY == HISTORY_SLOTS, "the ring is as long as it is said to be");
_Static_assert(LEDGER_METRICS == HISTORY_METRICS, "a row has room for what a record has");
_Static_assert(LEDGER_BLOB_BYTES % _Alignof(struct history_slot) == 0, "the history is aligned");
_Static_assert(SHD_MICROS_MAX < 1u << 15, "a progress word has room for the count");

/* Of settings as versions 6 and 7 have them. */
static uint64_t set_bytes(const struct ledger_head *h)
{
    return h->version == 6 || h->version == 7 ? sizeof(struct ledger_set) : 0;
}

static uint64_t window_bytes(const struct ledger_head *h)
{
    return h->version < 8 ? 0 : unit_window_bytes(h->made.window.rows, h->made.window.columns);
}

/* Offsets of all parts from the counts in h; returns the size of the whole. */
static uint64_t place_parts(struct ledger_head *h)
{
    uint64_t at = layout_align(sizeof *h, PART_ALIGN);
    const struct {
        uint64_t *ret_at;
        uint64_t bytes;
    } parts[] = {
        { &h->units_at, h->units * sizeof(struct ledger_unit) },
        { &h->cells_at, (uint64_t)h->units * h->micros * sizeof(uint64_t) },
        { &h->metrics_at, h->micros * sizeof(struct ledger_metrics) },
        { &h->trail_at, h->trail_bytes },
        { &h->chunks_at, h->chunk_count * sizeof(uint64_t) },
        { &h->spec_at, h->spec_bytes },
        { &h->blobs_at, 2 * LEDGER_BLOB_BYTES }, /* last: mostly never touched */
    };
    const uint64_t history_bytes = h->history_slots * sizeof(struct history_slot);
    const uint64_t more_bytes = h->version < 3 ? 0 : 2 * sizeof(struct ledger_more);
    const uint64_t guard_bytes = h->version < 7 ? 0 : sizeof(struct ledger_guard);
    const uint64_t rewind_bytes = h->version < 7 ? 0 : sizeof(struct ledger_rewind);
    const uint64_t settings_bytes = h->version < 8 ? 0 : sizeof(struct ledger_settings);
    const uint64_t chosen_bytes = h->version < 8 ? 0 : 2 * sizeof(struct ledger_chosen);
    for (size_t i = 0; i < ARRAY_SIZE(parts); i++) {
        *parts[i].ret_at = at;
        at = layout_align(at + parts[i].bytes, PART_ALIGN);
    }
    at = layout_align(at + history_bytes, PART_ALIGN) + more_bytes;
    at = layout_align(layout_align(at, PART_ALIGN) + set_bytes(h), PART_ALIGN);
    at = layout_align(at + guard_bytes, PART_ALIGN);
    at = layout_align(at + rewind_bytes, PART_ALIGN);
    at = layout_align(at + (h->version < 8 ? 0 : AUDIT_BYTES), PART_ALIGN);
    at = layout_align(at + (h->version < 8 ? 0 : sizeof(struct ledger_back)), PART_ALIGN);
    at = layout_align(at + settings_bytes, PART_ALIGN);
    at = layout_align(at + chosen_bytes, PART_ALIGN);
    return layout_align(at + window_bytes(h), SHD_PAGE_BYTES);
}

/* Limits that keep place_parts() far from overflow. */
static int check_counts(const struct ledger_head *h, struct shd_err *e)
{
    const bool windows = h->version >= 8;
    const struct {
        const char *name;
        uint64_t value, min, max;
    } limits[] = {
        { "owners", h->owners, 1, SHD_OWNERS_MAX },
        { "owner", h->owner, 0, (uint64_t)h->owners - 1 },
        { "units", h->units, 1, SHD_UNITS_MAX },
        { "micros", h->micros, 1, SHD_MICROS_MAX },
        { "units x micros", (uint64_t)h->units * h->micros, 1, LEDGER_CELLS_MAX },
        { "spec_bytes", h->spec_bytes, 1, SPEC_JSON_BYTES_MAX },
        { "chunk_count", h->chunk_count, 0, CHUNKS_MAX },
        { "trail_bytes", h->trail_bytes, KERN_TRAIL_BYTES, KERN_TRAIL_BYTES },
        { "history_slots", h->history_slots, 0, h->version == 1 ? 0 : HISTORY_SLOTS },
        { "rows of its window", windows ? h->made.window.rows : 0, 0, GUARD_WINDOW_MAX + 1 },
        { "columns of its window", windows ? h->made.window.columns : 0, 0, GUARD_COLUMNS_MAX },
    };
    for (size_t i = 0; i < ARRAY_SIZE(limits); i++)
        if (limits[i].value < limits[i].min || limits[i].value > limits[i].max)
            return err_set(e, SHD_ERANGE,
                           "ledger's %s is %" PRIu64 ", must be %" PRIu64 " to %" PRIu64,
                           limits[i].name, limits[i].value, limits[i].min, limits[i].max);
    return SHD_OK;
}

static struct ledger_head head_of(const struct ledger_shape *shape)
{
    struct ledger_head h = { .magic = LEDGER_MAGIC,
                             .version = shape->one_count ? LEDGER_ONE_COUNT : LEDGER_VERSION,
                             .owner = shape->owner,
                             .owners = shape->owners,
                             .instance = shape->instance,
                             .units = shape->units,
                             .micros = shape->micros,
                             .spec_bytes = shape->spec_bytes,
                             .state_bytes = shape->state_bytes,
                             .chunk_count = shape->chunk_count,
                             .history_slots = shape->history_slots,
                             .trail_bytes = KERN_TRAIL_BYTES,
                             .made.window = shape->window };
    return h;
}

int ledger_bytes(const struct ledger_shape *shape, uint64_t *ret_bytes, struct shd_err *e)
{
    struct ledger_head h = head_of(shape);
    const int r = check_counts(&h, e);
    if (r == SHD_OK)
        *ret_bytes = place_parts(&h);
    return r;
}

static void point_to_parts(struct ledger *l, void *memory)
{
    uint8_t *base = memory;
    struct ledger_head *h = memory;
    *l = (struct ledger){ .head = h,
                          .unit = (void *)(base + h->units_at),
                          .cell = (void *)(base + h->cells_at),
                          .metrics = (void *)(base + h->metrics_at),
                          .blob = { base + h->blobs_at, base + h->blobs_at + LEDGER_BLOB_BYTES },
                          .trail = (void *)(base + h->trail_at),
                          .chunks = (void *)(base + h->chunks_at),
                          .spec = (const char *)(base + h->spec_at),
                          .history = (void *)(base + h->blobs_at + 2 * LEDGER_BLOB_BYTES) };
    const uint64_t history_end = h->blobs_at + 2 * LEDGER_BLOB_BYTES +
                                 h->history_slots * sizeof(struct history_slot);
    const uint64_t more_at = layout_align(history_end, PART_ALIGN);
    if (h->version >= 3)
        l->more = (void *)(base + more_at);
    const uint64_t set_at = layout_align(more_at + 2 * sizeof *l->more, PART_ALIGN);
    if (set_bytes(h) > 0)
        l->set = (void *)(base + set_at);
    if (h->version < 7)
        return;
    const uint64_t guard_at = layout_align(set_at + set_bytes(h), PART_ALIGN);
    const uint64_t rewind_at = layout_align(guard_at + sizeof *l->guard, PART_ALIGN);
    l->guard = (void *)(base + guard_at);
    l->rewind = (void *)(base + rewind_at);
    if (h->version < 8)
        return;
    const uint64_t audit_at = layout_align(rewind_at + sizeof *l->rewind, PART_ALIGN);
    const uint64_t back_at = layout_align(audit_at + AUDIT_BYTES, PART_ALIGN);
    const uint64_t settings_at = layout_align(back_at + sizeof *l->back, PART_ALIGN);
    l->audit = (void *)(base + audit_at);
    l->back = (void *)(base + back_at);
    l->settings = (void *)(base + settings_at);
    const uint64_t chosen_at = layout_align(settings_at + sizeof *l->settings, PART_ALIGN);
    l->chosen = (void *)(base + chosen_at);
    if (window_bytes(h) > 0)
        l->window = base + layout_align(chosen_at + 2 * sizeof *l->chosen, PART_ALIGN);
}

/* Of no number that lay there by chance. */
static uint64_t maker_tag(const struct ledger_head *h)
{
    return (h->made.by ^ h->instance ^ LEDGER_MAGIC) * UINT64_C(0x9e3779b97f4a7c15) | 1;
}

struct ledger_maker ledger_maker(const struct ledger_head *h)
{
    return (struct ledger_maker){ .known = h->made.tag == maker_tag(h),
                                  .uid = (uint32_t)(h->made.by >> 32),
                                  .gid = (uint32_t)h->made.by };
}

uint64_t ledger_common(const struct ledger *l)
{
    return l->head->version < LEDGER_COMMON ? 0 : atomic_load(&l->head->made.common);
}

bool ledger_common_room(const struct ledger *l)
{
    return l->head->version >= LEDGER_VERSION;
}

/* What lay there in an older version counts for nothing, and is gone before the version says that
 * it does. */
void ledger_set_common(struct ledger *l, uint64_t number)
{
    CHECK(ledger_common_room(l));
    if (l->head->version < LEDGER_COMMON) {
        atomic_store(&l->head->made.common, 0);
        atomic_signal_fence(memory_order_seq_cst);
        l->head->version = LEDGER_COMMON;
    }
    atomic_signal_fence(memory_order_seq_cst);
    atomic_store(&l->head->made.common, number);
}

void ledger_init(struct ledger *l, void *memory, const struct ledger_shape *shape)
{
    struct ledger_head *h = memory;
    CHECK((uintptr_t)memory % PART_ALIGN == 0 && strlen(shape->name) < LEDGER_NAME_BYTES);
    *h = head_of(shape);
    h->bytes = place_parts(h);
    memcpy(h->name, shape->name, strlen(shape->name));
    h->made.by = (uint64_t)shape->maker.uid << 32 | shape->maker.gid;
    h->made.tag = shape->maker.known ? maker_tag(h) : 0;
    point_to_parts(l, memory);
    memcpy((uint8_t *)memory + h->spec_at, shape->spec, shape->spec_bytes);
}

/* A put may say how many updates count as applied. */
static uint64_t updates_max(uint64_t commits, uint64_t puts)
{
    return puts > 0 ? LEDGER_STEP_MAX + commits : commits;
}

int ledger_start_at(struct ledger *l, const struct ledger_start *start, struct shd_err *e)
{
    const uint64_t puts = start->decision.puts;
    CHECK(start->step > 0 && atomic_load(&l->head->commits) == 0);
    if (start->step > LEDGER_STEP_MAX || start->updates > updates_max(start->step, puts) ||
        start->blob_bytes > LEDGER_BLOB_BYTES)
        return err_set(e, SHD_ERANGE,
                       "step %" PRIu64 " (limit %" PRIu64 ") with %" PRIu64
                       " updates and a blob of %" PRIu64 " bytes (limit %" PRIu64 ")",
                       start->step, LEDGER_STEP_MAX, start->updates, start->blob_bytes,
                       LEDGER_BLOB_BYTES);
    for (uint32_t u = 0; start->unit_updates != NULL && u < l->head->units; u++)
        if (start->unit_updates[u] > updates_max(start->step, puts))
            return err_set(e, SHD_ERANGE,
                           "step %" PRIu64 " with %" PRIu64 " updates of unit %" PRIu32,
                           start->step, start->unit_updates[u], u);
    struct ledger_record *r = &l->head->record[start->step & 1];
    *r = (struct ledger_record){ .step = start->step - 1,
                                 .updates = start->updates,
                                 .finite = !start->decision.skip,
                                 .blob_bytes = start->blob_bytes };
    ledger_decision_put(l, start->step & 1, &start->decision);
    for (uint32_t u = 0; u < l->head->units; u++)
        l->unit[u].updates[start->step & 1] = start->unit_updates != NULL ? start->unit_updates[u]
                                                                          : start->updates;
    fixsum_init(&r->sum);
    fixsum_carry(&r->sum);
    if (start->blob_bytes > 0)
        memcpy(l->blob[0], start->blob, start->blob_bytes);
    for (uint32_t u = 0; u < l->head->units; u++)
        atomic_store_explicit(&l->unit[u].version, start->step, memory_order_relaxed);
    atomic_store_explicit(&l->head->commits, start->step, memory_order_release);
    return SHD_OK;
}

bool ledger_resets_room(const struct ledger *l)
{
    return l->head->version >= 4 && ledger_resets(l) < LEDGER_RESETS_MAX;
}

uint64_t ledger_resets(const struct ledger *l)
{
    return l->head->version < 4 ? 0 : atomic_load_explicit(&l->head->resets, memory_order_relaxed);
}

uint64_t ledger_round(const struct ledger *l)
{
    return atomic_load_explicit(&l->head->commits, memory_order_relaxed) + ledger_resets(l);
}

uint64_t ledger_committed_round(const struct ledger *l)
{
    const uint64_t commits = atomic_load_explicit(&l->head->commits, memory_order_relaxed);
    CHECK(commits > 0);
    return commits - 1 + (l->head->version < 4 ? 0 : l->head->beside.resets[commits & 1]);
}

bool ledger_rewinding(const struct ledger *l, uint64_t *ret_step)
{
    if (l->rewind == NULL || atomic_load_explicit(&l->rewind->under_way, memory_order_acquire) == 0)
        return false;
    *ret_step = l->rewind->step;
    return true;
}

uint64_t ledger_unit_updates(const struct ledger *l, uint32_t unit)
{
    const uint64_t commits = atomic_load_explicit(&l->head->commits, memory_order_relaxed);
    if (commits == 0)
        return 0;
    return ledger_counts_units(l) ? l->unit[unit].updates[commits & 1]
                                  : l->head->record[commits & 1].updates;
}

void ledger_unit_updates_next(struct ledger *l, uint32_t unit, uint64_t updates)
{
    const uint64_t commits = atomic_load_explicit(&l->head->commits, memory_order_relaxed);
    if (ledger_counts_units(l))
        l->unit[unit].updates[(commits + 1) & 1] = updates;
}

static void guard_get(const struct ledger *l, uint32_t slot, struct decision_guard *ret_guard)
{
    if (l->guard == NULL)
        return;
    const struct ledger_veto *v = &l->guard->record[slot].last;
    *ret_guard = (struct decision_guard){
        .what = v->what,
        .stop = v->stop != LEDGER_VETO_SKIPS,
        .rewind = v->stop == LEDGER_VETO_REWINDS,
        .value = v->value,
        .bound = v->bound,
    };
}

static void cause_get(const struct ledger *l, uint32_t slot, struct decision_cause *ret_cause)
{
    const uint64_t step = l->head->record[slot].step;
    struct audit_row row;
    if (l->audit != NULL && audit_get(l->audit, step + 1, step, &row))
        *ret_cause = audit_cause(&row);
}

/* A stop stays one until another takes its place. */
static void guard_put(struct ledger *l, uint32_t slot, const struct decision_guard *g)
{
    if (l->guard == NULL)
        return;
    const struct ledger_veto last = { .commits = l->head->record[slot].step + 1,
                                      .what = g->what,
                                      .stop = g->rewind ? LEDGER_VETO_REWINDS
                                              : g->stop ? LEDGER_VETO_STOPS
                                                        : LEDGER_VETO_SKIPS,
                                      .value = g->value,
                                      .bound = g->bound };
    l->guard->record[slot].last = last;
    l->guard->record[slot].stopped = g->stop ? last : l->guard->record[1 - slot].stopped;
}

void ledger_decision_get(const struct ledger *l, uint32_t slot, struct decision *ret_decision)
{
    const struct ledger_decision *kept = &l->head->record[slot].decision;
    struct decision d = { .skip = kept->skip,
                          .scale = kept->scale,
                          .lr = kept->lr,
                          .loss_scale = kept->loss_scale,
                          .good_steps = kept->good_steps };
    if (l->more != NULL) {
        d.divisor = l->more[slot].divisor;
        d.puts = l->more[slot].puts;
        d.rate_count = l->more[slot].rate_count;
        memcpy(d.rates, l->more[slot].rates, d.rate_count * sizeof *d.rates);
    }
    guard_get(l, slot, &d.guard);
    cause_get(l, slot, &d.cause);
    if (l->chosen != NULL) {
        d.micro_batches = l->chosen[slot].micro_batches;
        d.eps_count = l->chosen[slot].eps_count;
        memcpy(d.eps, l->chosen[slot].eps, d.eps_count * sizeof *d.eps);
    }
    d.put = l->head->beside.put[slot];
    /* Older versions do not say; where all units have one count it is the same. */
    if (d.put != 0 && (kept->sets_updates || !ledger_counts_units(l)))
        d.updates = l->head->record[slot].updates + 1;
    *ret_decision = d;
}

bool ledger_decision_room(const struct ledger *l, const struct decision *decision)
{
    if ((l->guard == NULL && decision->guard.what != GUARD_NONE) ||
        (l->back == NULL && decision->guard.rewind))
        return false;
    if (l->chosen == NULL && (decision->micro_batches > 0 || decision->eps_count > 0))
        return false;
    if (l->more == NULL)
        return decision->divisor == 0 && decision->rate_count == 0 && decision->puts == 0;
    return decision->puts <= UINT32_MAX;
}

void ledger_decision_put(struct ledger *l, uint32_t slot, const struct decision *d)
{
    CHECK(ledger_decision_room(l, d));
    l->head->record[slot].decision = (struct ledger_decision){ .skip = d->skip,
                                                               .sets_updates = d->updates > 0,
                                                               .scale = d->scale,
                                                               .lr = d->lr,
                                                               .loss_scale = d->loss_scale,
                                                               .good_steps = d->good_steps };
    l->head->beside.put[slot] = d->put;
    guard_put(l, slot, &d->guard);
    if (l->audit != NULL)
        audit_put(l->audit, l->head->record[slot].step, &d->cause);
    if (l->chosen != NULL) {
        l->chosen[slot] = (struct ledger_chosen){ .micro_batches = d->micro_batches,
                                                  .eps_count = d->eps_count };
        memcpy(l->chosen[slot].eps, d->eps, d->eps_count * sizeof *d->eps);
    }
    if (l->more == NULL)
        return;
    l->more[slot].divisor = d->divisor;
    l->more[slot].puts = (uint32_t)d->puts;
    l->more[slot].rate_count = d->rate_count;
    memcpy(l->more[slot].rates, d->rates, d->rate_count * sizeof *d->rates);
}

bool ledger_known(const void *memory, uint64_t bytes, const struct ledger_head **ret_head)
{
    const struct ledger_head *h = memory;
    if (bytes < sizeof *h || h->magic != LEDGER_MAGIC ||
        memchr(h->name, '\0', sizeof h->name) == NULL)
        return false;
    *ret_head = h;
    return true;
}

/* The parts must lie where the counts put them. */
static int check_places(const struct ledger_head *h, uint64_t bytes, struct shd_err *e)
{
    struct ledger_head again = { .units = h->units,
                                 .version = h->version,
                                 .micros = h->micros,
                                 .spec_bytes = h->spec_bytes,
                                 .chunk_count = h->chunk_count,
                                 .history_slots = h->history_slots,
                                 .trail_bytes = h->trail_bytes,
                                 .made.window = h->made.window };
    const uint64_t whole = place_parts(&again);
    if (h->bytes != whole || bytes < whole)
        return err_set(e, SHD_ESEGMENT,
                       "ledger of %" PRIu64 " bytes says %" PRIu64 ", its counts make %" PRIu64,
                       bytes, h->bytes, whole);
    if (h->units_at != again.units_at || h->cells_at != again.cells_at ||
        h->metrics_at != again.metrics_at || h->blobs_at != again.blobs_at ||
        h->trail_at != again.trail_at || h->chunks_at != again.chunks_at ||
        h->spec_at != again.spec_at)
        return err_set(e, SHD_ESEGMENT, "ledger's parts are not where its counts put them");
    return SHD_OK;
}

/* A bool of any other byte must not even be looked at. */
static bool is_bool(const bool *b)
{
    return *(const uint8_t *)(const void *)b <= 1;
}

static int check_decision(const struct ledger_decision *d, const bool *finite, struct shd_err *e)
{
    if (is_bool(&d->skip) && is_bool(finite) && isfinite(d->scale) && d->scale >= 0 &&
        isfinite(d->lr) && d->lr >= 0 && isfinite(d->loss_scale) && d->loss_scale >= 0)
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "ledger's last decision has scale %g, learning rate %g, loss scale %g, or says "
                   "neither yes nor no",
                   (double)d->scale, d->lr, d->loss_scale);
}

static int check_more(const struct ledger_more *more, struct shd_err *e)
{
    bool good = isfinite(more->divisor) && more->divisor >= 0 &&
                more->rate_count <= ARRAY_SIZE(more->rates) &&
                more->rate_count % DECISION_RATES == 0;
    for (uint32_t i = 0; good && i < more->rate_count; i++)
        good = isnan(more->rates[i]) || (isfinite(more->rates[i]) && more->rates[i] >= 0);
    if (good)
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "ledger's last decision has divisor %g and %" PRIu32
                   " rates of groups, or one that is no rate",
                   more->divisor, more->rate_count);
}

static int check_chosen(const struct ledger *l, const struct ledger_chosen *c, struct shd_err *e)
{
    bool good = c->micro_batches <= SHD_MICROS_MAX && c->eps_count <= ARRAY_SIZE(c->eps) &&
                c->returns <= l->head->micros;
    for (uint32_t i = 0; good && i < c->eps_count; i++)
        good = isnan(c->eps[i]) || (isfinite(c->eps[i]) && c->eps[i] > 0);
    if (good)
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "ledger's last decision says %" PRIu32 " micro-batches for the next step, after "
                   "%" PRIu64 " gradients of a unit, at most %" PRIu32
                   ", or has an eps that is none",
                   c->micro_batches, c->returns, l->head->micros);
}

static int check_record(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    const struct ledger_record *r = &l->head->record[commits & 1];
    const uint64_t puts = l->more != NULL ? l->more[commits & 1].puts : 0;
    if (commits == 0)
        return SHD_OK;
    if (r->step != commits - 1)
        return err_set(e, SHD_ESEGMENT,
                       "ledger has %" PRIu64 " commits, and its last record is of step %" PRIu64,
                       commits, r->step);
    if (r->updates > updates_max(commits, puts) || puts > commits ||
        r->metric_count > LEDGER_METRICS || r->blob_at > 1 || r->blob_bytes > LEDGER_BLOB_BYTES ||
        !fixsum_is_carried(&r->sum))
        return err_set(e, SHD_ESEGMENT,
                       "ledger's record of step %" PRIu64 " has %" PRIu64 " updates, %" PRIu32
                       " metrics, blob %" PRIu32 " of %" PRIu64 " bytes",
                       r->step, r->updates, r->metric_count, r->blob_at, r->blob_bytes);
    if (ledger_counts_units(l) && !is_bool(&r->decision.sets_updates))
        return err_set(e, SHD_ESEGMENT, "ledger's last decision says neither yes nor no");
    int s = check_decision(&r->decision, &r->finite, e);
    if (s == SHD_OK && l->more != NULL)
        s = check_more(&l->more[commits & 1], e);
    return s == SHD_OK && l->chosen != NULL ? check_chosen(l, &l->chosen[commits & 1], e) : s;
}

/* Of a unit whose last update is to be done, and took part in it, that one is counted. */
static bool count_is_good(const struct ledger *l, uint32_t u, uint64_t commits)
{
    const struct ledger_unit *unit = &l->unit[u];
    if (commits == 0 || !ledger_counts_units(l))
        return true;
    const uint64_t puts = l->more != NULL ? l->more[commits & 1].puts : 0;
    const uint64_t updates = unit->updates[commits & 1], progress = atomic_load(&unit->progress);
    const bool counted = !l->head->record[commits & 1].decision.skip &&
                         atomic_load(&unit->version) < commits &&
                         ledger_progress_round(progress) == ledger_committed_round(l) &&
                         ledger_progress_started(progress);
    return updates <= updates_max(commits, puts) && (updates > 0 || !counted);
}

static int check_units(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    for (uint32_t u = 0; u < l->head->units; u++) {
        const uint64_t version = atomic_load(&l->unit[u].version);
        const uint64_t progress = atomic_load(&l->unit[u].progress);
        if (version > commits || version + 1 < commits)
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " has version %" PRIu64 " of %" PRIu64
                           " commits",
                           u, version, commits);
        if (ledger_progress_round(progress) > ledger_round(l) ||
            ledger_progress_next(progress) > l->head->micros)
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " has %" PRIu32 " gradients of round %" PRIu64
                           ", of %" PRIu32 " a round, after %" PRIu64 " commits and %" PRIu64
                           " resets",
                           u, ledger_progress_next(progress), ledger_progress_round(progress),
                           l->head->micros, commits, ledger_resets(l));
        if (l->unit[u].took > l->head->micros)
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " is the mean of %" PRIu32
                           " gradients, of %" PRIu32 " a step",
                           u, l->unit[u].took, l->head->micros);
        if (!count_is_good(l, u, commits))
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " has %" PRIu64 " updates, in %" PRIu64
                           " commits",
                           u, ledger_unit_updates(l, u), commits);
        if (version < commits && ledger_progress_round(progress) > ledger_committed_round(l))
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " sums gradients of step %" PRIu64
                           ", the update before it is not done",
                           u, commits);
    }
    return SHD_OK;
}

/* The cells of gradients that wait for their turn. Words of earlier steps stay as they were. */
static int check_cells(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    const uint64_t count = (uint64_t)l->head->units * l->head->micros;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t word = atomic_load_explicit(&l->cell[i], memory_order_relaxed);
        const enum ledger_cell_kind kind = ledger_cell_kind(word);
        const unsigned dtype = ledger_cell_dtype(word);
        if (ledger_cell_round(word) > ledger_round(l) || kind > LEDGER_CELL_SPILLED ||
            (kind == LEDGER_CELL_SPILLED ? !dtype_valid(dtype) : dtype != 0))
            return err_set(e, SHD_ESEGMENT,
                           "ledger's gradient %" PRIu64 " of unit %" PRIu64 " is %#" PRIx64
                           " after %" PRIu64 " commits",
                           i % l->head->micros, i / l->head->micros, word, commits);
    }
    return SHD_OK;
}

static int check_metrics(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    for (uint32_t i = 0; i < l->head->micros; i++) {
        const uint64_t tag = atomic_load(&l->metrics[i].tag);
        if (ledger_metrics_tag_round(tag) > ledger_round(l) ||
            ledger_metrics_tag_count(tag) > LEDGER_METRICS)
            return err_set(e, SHD_ESEGMENT,
                           "ledger's micro-batch %" PRIu32 " has %" PRIu32
                           " metrics of round %" PRIu64 ", of at most %u, after %" PRIu64
                           " commits",
                           i, ledger_metrics_tag_count(tag), ledger_metrics_tag_round(tag),
                           LEDGER_METRICS, commits);
    }
    return SHD_OK;
}

static int check_resets(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    const struct ledger_head *h = l->head;
    const uint64_t resets = ledger_resets(l), promised = atomic_load(&h->promised);
    if (h->version < 4 || (resets <= LEDGER_RESETS_MAX && promised <= commits + resets + 1 &&
                           h->beside.resets[0] <= resets && h->beside.resets[1] <= resets))
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "ledger has %" PRIu64 " resets (%" PRIu64 ", %" PRIu64
                   " at its commits) and promised round %" PRIu64 ", after %" PRIu64 " commits",
                   resets, h->beside.resets[0], h->beside.resets[1], promised - 1, commits);
}

static int check_set(const struct ledger *l, struct shd_err *e)
{
    return ledger_settings_plausible(l)
               ? SHD_OK
               : err_set(e, SHD_ESEGMENT,
                         "ledger's settings have numbers that are none, or wait for no step");
}

static bool is_veto(const struct ledger_veto *v, uint64_t commits, bool skip)
{
    const struct decision_guard g = {
        .what = v->what, .stop = v->stop > 0, .value = v->value, .bound = v->bound
    };
    return v->commits <= commits && v->stop <= LEDGER_VETO_REWINDS && guard_plausible(&g, skip);
}

static int check_guard(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    if (l->guard == NULL)
        return SHD_OK;
    const struct ledger_veto *last = &l->guard->record[commits & 1].last;
    const struct ledger_veto *stopped = &l->guard->record[commits & 1].stopped;
    const bool skip = commits > 0 && l->head->record[commits & 1].decision.skip;
    if (is_veto(last, commits, skip) && is_veto(stopped, commits, /* skip= */ true) &&
        (stopped->stop > 0) == (stopped->commits > 0) && atomic_load(&l->guard->go_on) <= commits)
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "ledger's guard skipped by rule %" PRIu32 ", stopped by rule %" PRIu32
                   " after %" PRIu64 " commits and went on after %" PRIu64 ", of %" PRIu64,
                   last->what, stopped->what, stopped->commits,
                   (uint64_t)atomic_load(&l->guard->go_on), commits);
}

/* Of any step: what a rewind has left behind stays. */
static int check_audit(const struct ledger *l, struct shd_err *e)
{
    for (uint32_t i = 0; l->audit != NULL && i < AUDIT_SLOTS; i++) {
        const struct audit_slot *slot = &l->audit[i];
        const struct audit_row *row = &slot->row;
        if (atomic_load(&slot->tag) != 0 &&
            (row->unit == 0 || row->unit > l->head->units || isnan(row->norm) || row->norm < 0 ||
             row->group > l->head->micros || isnan(row->share) || row->share < 0 ||
             memchr(row->worker.name, '\0', sizeof row->worker.name) == NULL))
            return err_set(e, SHD_ESEGMENT,
                           "ledger says that step %" PRIu64 " was skipped for unit %" PRIu32
                           " with norm %g, gradient %" PRIu32 ", of %" PRIu32 " units",
                           row->step, row->unit, row->norm, row->group, l->head->units);
    }
    return SHD_OK;
}

/* While one is under way only where it goes counts. */
static int check_rewind(const struct ledger *l, uint64_t commits, struct shd_err *e)
{
    const struct ledger_rewind *r = l->rewind;
    const uint64_t under_way = r != NULL ? atomic_load(&r->under_way) : 0;
    if (r == NULL || (under_way <= 1 && atomic_load(&r->last) <= LEDGER_RESETS_MAX + 1 &&
                      ledger_snapshot_keep(atomic_load(&r->options)) < LEDGER_SNAPSHOTS &&
                      (under_way == 0 || (r->step <= LEDGER_STEP_MAX && r->attempt > 0 &&
                                          r->attempt - 1 <= LEDGER_RESETS_MAX))))
        return SHD_OK;
    return err_set(e, SHD_ESEGMENT,
                   "ledger's rewind %" PRIu64 " goes to step %" PRIu64 ", attempt %" PRIu64
                   " (last %" PRIu64 "), after %" PRIu64 " commits",
                   under_way, r->step, r->attempt, (uint64_t)atomic_load(&r->last), commits);
}

/* A build of version 3 could not reset a step, and may have answered Prepare without saying so. */
void ledger_renew(struct ledger *l)
{
    struct ledger_head *h = l->head;
    if (h->version != 3)
        return;
    h->beside.resets[0] = h->beside.resets[1] = 0;
    atomic_store(&h->resets, 0);
    atomic_store(&h->promised, atomic_load(&h->commits) + 1);
    atomic_signal_fence(memory_order_seq_cst);
    h->version = LEDGER_ONE_COUNT;
}

int ledger_adopt(struct ledger *l, void *memory, uint64_t bytes, struct shd_err *e)
{
    const struct ledger_head *h;
    if (!ledger_known(memory, bytes, &h))
        return err_set(e, SHD_ESEGMENT, "segment of %" PRIu64 " bytes is no ledger", bytes);
    if (h->version < 1 || h->version > LEDGER_COMMON)
        return err_set(e, SHD_ENOTSUP,
                       "ledger of model '%s' has version %" PRIu32
                       ", this build has %u: start the build that wrote it",
                       h->name, h->version, LEDGER_COMMON);
    int r = check_counts(h, e);
    if (r != SHD_OK) {
        if (e != NULL)
            e->code = SHD_ESEGMENT;
        return SHD_ESEGMENT;
    }
    r = check_places(h, bytes, e);
    if (r != SHD_OK)
        return r;
    struct ledger found;
    point_to_parts(&found, memory);
    const uint64_t commits = atomic_load(&h->commits);
    if (commits > LEDGER_STEP_MAX || atomic_load(&h->ready) > 1)
        return err_set(e, SHD_ESEGMENT, "ledger has %" PRIu64 " commits and is ready %" PRIu64,
                       commits, (uint64_t)atomic_load(&h->ready));
    uint64_t to;
    r = check_rewind(&found, commits, e);
    if (r == SHD_OK)
        r = check_audit(&found, e);
    if (r == SHD_OK && ledger_rewinding(&found, &to)) {
        *l = found; /* the rest is written anew, and looked at then */
        return SHD_OK;
    }
    if (r == SHD_OK)
        r = check_resets(&found, commits, e);
    if (r == SHD_OK)
        r = check_record(&found, commits, e);
    if (r == SHD_OK)
        r = check_units(&found, commits, e);
    if (r == SHD_OK)
        r = check_cells(&found, commits, e);
    if (r == SHD_OK)
        r = check_metrics(&found, commits, e);
    if (r == SHD_OK)
        r = check_set(&found, e);
    if (r == SHD_OK)
        r = check_guard(&found, commits, e);
    if (r != SHD_OK)
        return r;
    *l = found;
    return SHD_OK;
}
