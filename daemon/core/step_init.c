/* See step_init.h. */
#include "daemon/core/step_init.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step_ramp.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/spec/ramp.h"

/* The two headers do not see each other, so each has the number. */
_Static_assert(STEP_METRICS_MAX == LEDGER_METRICS, "a ledger has room for what the core takes");
_Static_assert(STEP_CELLS_MAX == LEDGER_CELLS_MAX, /* NOLINT(misc-redundant-expression) */
               "a ledger has room for what the core takes");

static size_t align16(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

size_t step_bytes(uint32_t units, uint32_t micros)
{
    CHECK(units > 0 && micros > 0 && (uint64_t)units * micros <= STEP_CELLS_MAX);
    return align16(sizeof(struct step)) + 2 * align16(sizeof(uint32_t) * micros) +
           align16(sizeof(struct step_unit) * units) + sizeof(uint32_t) * units * micros;
}

void step_recall_record(struct step *s)
{
    const uint64_t commits = atomic_load_explicit(&s->ledger.head->commits, memory_order_relaxed);
    s->record = (struct step_prepared){ .step = UINT64_MAX }; /* no step was sealed yet */
    if (commits == 0)
        return;
    const struct ledger_record *r = &s->ledger.head->record[commits & 1];
    s->record = (struct step_prepared){ .step = r->step,
                                        .finite = r->finite,
                                        .sum = r->sum,
                                        .metric_count = r->metric_count,
                                        .reported = r->reported <= s->returns.most ? r->reported
                                                                                   : 0,
                                        .has_decision = true };
    ledger_decision_get(&s->ledger, commits & 1, &s->record.decision);
    memcpy(s->record.metrics, r->metrics, sizeof r->metrics);
    s->updates = r->updates;
    s->last = s->record.decision;
    s->has_last = true;
}

/* Micro-batches of the collecting step that wait for their turn and are durable. */
static void recover_cells(struct step *s, uint32_t unit)
{
    const size_t first = (size_t)unit * s->returns.most;
    for (uint32_t micro = 0; micro < s->returns.most; micro++) {
        if (micro < s->unit[unit].next) {
            s->micro_units[micro]++;
            s->micro_came[micro]++;
            continue;
        }
        const uint64_t word = atomic_load_explicit(&s->ledger.cell[first + micro],
                                                   memory_order_relaxed);
        const enum ledger_cell_kind kind = ledger_cell_kind(word);
        if (ledger_cell_round(word) != s->round || kind == LEDGER_CELL_EMPTY)
            continue;
        s->cells[first + micro] = kind == LEDGER_CELL_NONE ? CELL_NONE : CELL_SPILLED;
        s->micro_units[micro]++;
        s->micro_came[micro]++;
        s->cells_waiting++;
    }
}

static void recover_unit(struct step *s, uint32_t unit, uint64_t commits)
{
    struct step_unit *u = &s->unit[unit];
    const struct ledger_unit *kept = &s->ledger.unit[unit];
    u->free = atomic_load_explicit(&kept->version, memory_order_relaxed) == commits;
    if (u->free)
        s->apply_done++;
    if (u->frozen)
        return;
    const uint64_t progress = atomic_load_explicit(&kept->progress, memory_order_relaxed);
    if (ledger_progress_round(progress) == s->round) {
        u->next = ledger_progress_next(progress);
        u->started = ledger_progress_started(progress);
        s->cells_in += u->next;
    }
    recover_cells(s, unit);
}

struct step *step_init(void *memory, const struct ledger *ledger, const bool *frozen)
{
    const uint32_t units = ledger->head->units, micros = ledger->head->micros;
    memset(memory, 0, step_bytes(units, micros));
    uint8_t *at = memory;
    struct step *s = memory;
    at += align16(sizeof *s);
    s->micro_units = (void *)at;
    at += align16(sizeof *s->micro_units * micros);
    s->micro_came = (void *)at;
    at += align16(sizeof *s->micro_came * micros);
    s->unit = (void *)at;
    at += align16(sizeof *s->unit * units);
    s->cells = (void *)at;
    s->ledger = *ledger;
    s->round = ledger_round(ledger);
    s->units = units;
    s->returns.most = s->returns.now = s->returns.before = micros;
    s->returns.accumulate = 1;
    s->finite = true;
    fixsum_init(&s->sum);
    const uint64_t commits = atomic_load_explicit(&ledger->head->commits, memory_order_acquire);
    step_recall_record(s);
    for (uint32_t u = 0; u < units; u++) {
        s->unit[u].frozen = s->unit[u].summed = frozen != NULL && frozen[u];
        s->units_frozen += s->unit[u].frozen;
        recover_unit(s, u, commits);
    }
    CHECK(s->units_frozen < units);
    s->units_summed = s->units_frozen;
    s->phase = s->apply_done == units ? STEP_OPEN : STEP_APPLYING;
    s->now = s->phase == STEP_OPEN ? commits : commits - 1;
    return s;
}

void step_guard(struct step *s, const struct guard *guard)
{
    s->guard = guard;
}

void step_skips_idle(struct step *s, uint32_t unit)
{
    CHECK(unit < s->units);
    s->unit[unit].skips_idle = true;
}

void step_means(struct step *s, uint32_t unit)
{
    CHECK(unit < s->units);
    s->unit[unit].mean = s->unit[unit].skips_idle = true;
}

int step_ramp(struct step *s, const struct ramp *ramp, uint32_t accumulate, struct shd_err *e)
{
    CHECK(accumulate > 0);
    s->returns.ramp = ramp;
    s->returns.accumulate = accumulate;
    CHECK(ramp == NULL || ramp_max(ramp) / accumulate <= s->returns.most);
    if (s->has_last && !step_ramp_good(s, s->last.micro_batches))
        return err_set(e, SHD_ESEGMENT,
                       "ledger's decision of step %" PRIu64 " says %" PRIu32
                       " micro-batches for the next one, of at most %" PRIu32 " times %" PRIu32,
                       step_collecting(s) - 1, s->last.micro_batches, s->returns.most, accumulate);
    step_ramp_next(s);
    for (uint32_t u = 0; u < s->units; u++)
        if (s->unit[u].next > s->returns.now)
            return err_set(e, SHD_ESEGMENT,
                           "ledger's unit %" PRIu32 " has %" PRIu32 " gradients of step %" PRIu64
                           ", which has %" PRIu32,
                           u, s->unit[u].next, step_collecting(s), s->returns.now);
    return SHD_OK;
}
