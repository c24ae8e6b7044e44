/* See step.h. */
#include "daemon/step.h"

#include <inttypes.h>
#include <string.h>

#include "proto/check.h"

#define CELL_EMPTY 0u
#define CELL_NONE  UINT32_MAX /* arrived as "took no part" before its turn */

struct step_unit {
    uint32_t next; /* micro-batches below this one are in */
    bool busy;     /* an ACCUMULATE, SUM or ZERO is running */
    bool started;  /* the accumulator holds this step's sum */
    bool summed;   /* all in, sum of squares known */
    bool free;     /* the accumulator may be written: the unit was applied */
    bool frozen;
};

struct step {
    uint32_t units, micros;
    uint32_t units_frozen;
    uint64_t now;
    enum step_phase phase;
    uint64_t updates;
    uint32_t units_summed;
    uint32_t apply_next, apply_done; /* of this APPLYING */
    uint64_t cells_in, cells_waiting;
    struct fixsum sum; /* of the collecting step */
    bool finite;
    struct step_prepared record;
    struct step_decision last; /* decision recorded */
    bool has_last;
    double (*metrics)[STEP_METRICS_MAX]; /* [micros], of the collecting step */
    uint8_t *metric_counts;              /* [micros] */
    struct step_unit *unit;              /* [units] */
    uint32_t *cells;                     /* [units][micros]: ref, CELL_NONE or CELL_EMPTY */
};

static size_t align16(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

size_t step_bytes(uint32_t units, uint32_t micros)
{
    CHECK(units > 0 && micros > 0 && (uint64_t)units * micros <= STEP_CELLS_MAX);
    return align16(sizeof(struct step)) + align16(sizeof(double[STEP_METRICS_MAX]) * micros) +
           align16(micros) + align16(sizeof(struct step_unit) * units) +
           sizeof(uint32_t) * units * micros;
}

struct step *step_init(void *memory, uint32_t units, uint32_t micros)
{
    memset(memory, 0, step_bytes(units, micros));
    uint8_t *at = memory;
    struct step *s = memory;
    at += align16(sizeof *s);
    s->metrics = (void *)at;
    at += align16(sizeof *s->metrics * micros);
    s->metric_counts = at;
    at += align16(micros);
    s->unit = (void *)at;
    at += align16(sizeof *s->unit * units);
    s->cells = (void *)at;
    s->units = units;
    s->micros = micros;
    s->phase = STEP_OPEN;
    s->finite = true;
    s->record.step = UINT64_MAX; /* no step was sealed yet */
    fixsum_init(&s->sum);
    for (uint32_t u = 0; u < units; u++)
        s->unit[u].free = true;
    return s;
}

void step_freeze(struct step *s, uint32_t unit)
{
    CHECK(unit < s->units && !s->unit[unit].frozen && s->units_frozen + 1 < s->units);
    s->unit[unit].frozen = s->unit[unit].summed = true;
    s->units_frozen++;
    s->units_summed++;
}

bool step_frozen(const struct step *s, uint32_t unit)
{
    CHECK(unit < s->units);
    return s->unit[unit].frozen;
}

static struct step_action *act(struct step_actions *actions, enum step_action_kind kind)
{
    CHECK(actions->count < STEP_ACTIONS_MAX);
    struct step_action *a = &actions->items[actions->count++];
    *a = (struct step_action){ .kind = kind };
    return a;
}

static void act_unit(struct step_actions *actions, enum step_action_kind kind, uint32_t unit)
{
    act(actions, kind)->unit = unit;
}

static void credit(struct step_actions *actions, step_ref ref, bool stale)
{
    struct step_action *a = act(actions, STEP_DO_CREDIT);
    a->ref = ref;
    a->stale = stale;
}

uint64_t step_collecting(const struct step *s)
{
    return s->phase == STEP_APPLYING ? s->now + 1 : s->now;
}

static uint32_t *cell(struct step *s, uint32_t unit, uint32_t micro)
{
    return &s->cells[(size_t)unit * s->micros + micro];
}

/* Sums of the micro-batches' numbers, in ascending order: the same for any order of arrival. */
static void record_metrics(struct step *s)
{
    s->record.metric_count = 0;
    memset(s->record.metrics, 0, sizeof s->record.metrics);
    for (uint32_t micro = 0; micro < s->micros; micro++) {
        const uint32_t count = s->metric_counts[micro];
        if (count > s->record.metric_count)
            s->record.metric_count = count;
        for (uint32_t i = 0; i < count; i++)
            s->record.metrics[i] += s->metrics[micro][i];
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
    if (u->busy || u->summed || !u->free)
        return;
    while (u->next < s->micros && *cell(s, unit, u->next) == CELL_NONE) {
        *cell(s, unit, u->next) = CELL_EMPTY;
        u->next++;
        s->cells_waiting--;
        s->cells_in++;
    }
    if (u->next == s->micros) { /* the last micro-batch took no part */
        u->busy = true;
        act_unit(actions, u->started ? STEP_DO_SUM : STEP_DO_ZERO, unit);
        return;
    }
    const uint32_t ref = *cell(s, unit, u->next);
    if (ref == CELL_EMPTY)
        return;
    u->busy = true;
    struct step_action *a = act(actions, STEP_DO_ACCUMULATE);
    a->unit = unit;
    a->ref = ref;
    a->first = !u->started;
    a->last = u->next + 1 == s->micros;
}

static void keep_metrics(struct step *s, uint32_t micro, const double *metrics, uint32_t count)
{
    CHECK(count <= STEP_METRICS_MAX);
    if (count == 0 || s->metric_counts[micro] > 0)
        return;
    memcpy(s->metrics[micro], metrics, count * sizeof *metrics);
    s->metric_counts[micro] = (uint8_t)count;
}

int step_return(struct step *s, step_ref ref, uint64_t step, uint32_t unit, uint32_t micro,
                bool none, const double *metrics, uint32_t metric_count,
                struct step_actions *ret_actions, struct shd_err *e)
{
    CHECK(unit < s->units && micro < s->micros);
    CHECK(!s->unit[unit].frozen && ref > 0 && ref <= STEP_REF_MAX);
    ret_actions->count = 0;
    const uint64_t collecting = step_collecting(s);
    if (step > collecting)
        return err_set(e, SHD_ESTEP,
                       "gradient of unit %" PRIu32 " for step %" PRIu64
                       ", the open step is %" PRIu64,
                       unit, step, collecting);
    struct step_unit *u = &s->unit[unit];
    uint32_t *c = cell(s, unit, micro);
    if (step < collecting || micro < u->next || *c != CELL_EMPTY) {
        credit(ret_actions, ref, /* stale= */ true);
        return SHD_OK;
    }
    keep_metrics(s, micro, metrics, metric_count);
    *c = none ? CELL_NONE : ref;
    s->cells_waiting++;
    if (none)
        credit(ret_actions, ref, /* stale= */ false);
    unit_advance(s, unit, ret_actions);
    return SHD_OK;
}

void step_accumulated(struct step *s, uint32_t unit, const struct fixsum *sum, bool finite,
                      struct step_actions *ret_actions)
{
    struct step_unit *u = &s->unit[unit];
    CHECK(unit < s->units && u->busy);
    ret_actions->count = 0;
    u->busy = false;
    if (u->next < s->micros) {
        uint32_t *c = cell(s, unit, u->next);
        CHECK(*c != CELL_EMPTY && *c != CELL_NONE);
        credit(ret_actions, *c, /* stale= */ false);
        *c = CELL_EMPTY;
        u->started = true;
        u->next++;
        s->cells_waiting--;
        s->cells_in++;
        if (sum == NULL) {
            unit_advance(s, unit, ret_actions);
            return;
        }
    }
    CHECK(u->next == s->micros);
    u->summed = true;
    s->units_summed++;
    s->finite = s->finite && finite;
    if (sum != NULL)
        fixsum_merge(&s->sum, sum);
    seal_if_complete(s, ret_actions);
}

int step_prepare(const struct step *s, uint64_t step, struct step_prepared *ret_prepared,
                 struct shd_err *e)
{
    if (step == s->record.step && step <= s->now) {
        *ret_prepared = s->record;
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

static void apply_one_more(struct step *s, struct step_actions *actions)
{
    if (s->apply_next == s->units)
        return;
    struct step_action *a = act(actions, STEP_DO_APPLY);
    a->unit = s->apply_next++;
    a->skip = s->record.decision.skip || s->unit[a->unit].frozen;
}

static void begin_applying(struct step *s, const struct step_decision *decision,
                           struct step_actions *actions)
{
    s->record.has_decision = true;
    s->record.decision = *decision;
    s->last = *decision;
    s->has_last = true;
    s->phase = STEP_APPLYING;
    if (!decision->skip)
        s->updates++;
    s->apply_next = s->apply_done = 0;
    s->units_summed = s->units_frozen;
    s->cells_in = 0;
    CHECK(s->cells_waiting == 0);
    s->finite = true;
    fixsum_init(&s->sum);
    memset(s->metric_counts, 0, s->micros);
    for (uint32_t u = 0; u < s->units; u++) {
        const bool frozen = s->unit[u].frozen;
        s->unit[u] = (struct step_unit){ .frozen = frozen, .summed = frozen };
    }
    for (uint32_t i = 0; i < STEP_APPLY_AHEAD; i++)
        apply_one_more(s, actions);
}

int step_commit(struct step *s, uint64_t step, const struct step_decision *decision,
                struct step_decision *ret_decision, enum step_committed *ret_how,
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
    if (step != s->now || s->phase != STEP_SEALED)
        return err_set(e, SHD_ESTEP,
                       "commit of step %" PRIu64 ", but step %" PRIu64 " is %s with %" PRIu64
                       " of %" PRIu64 " gradients in",
                       step, step_collecting(s), step_phase_name(s->phase), s->cells_in,
                       step_cells(s));
    if (!s->record.finite && !decision->skip)
        return err_set(e, SHD_EINVAL,
                       "commit of step %" PRIu64 " would apply gradients that are not finite",
                       step);
    begin_applying(s, decision, ret_actions);
    *ret_decision = s->record.decision;
    *ret_how = STEP_COMMITTED_FIRST;
    return SHD_OK;
}

void step_applied(struct step *s, uint32_t unit, struct step_actions *ret_actions)
{
    CHECK(s->phase == STEP_APPLYING && unit < s->apply_next && !s->unit[unit].free);
    ret_actions->count = 0;
    struct step_action *a = act(ret_actions, STEP_DO_PUBLISH);
    a->unit = unit;
    a->version = s->now + 1;
    s->unit[unit].free = true;
    s->apply_done++;
    apply_one_more(s, ret_actions);
    unit_advance(s, unit, ret_actions);
    if (s->apply_done < s->units)
        return;
    s->now++;
    s->phase = STEP_OPEN;
    act(ret_actions, STEP_DO_OPENED)->version = s->now;
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

uint64_t step_updates(const struct step *s)
{
    return s->updates;
}

bool step_last_decision(const struct step *s, struct step_decision *ret_decision)
{
    if (s->has_last)
        *ret_decision = s->last;
    return s->has_last;
}

const struct step_prepared *step_record(const struct step *s)
{
    return &s->record;
}

uint64_t step_cells(const struct step *s)
{
    return (uint64_t)(s->units - s->units_frozen) * s->micros;
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

const char *step_phase_name(enum step_phase phase)
{
    switch (phase) {
    case STEP_OPEN:
        return "OPEN";
    case STEP_SEALED:
        return "SEALED";
    case STEP_APPLYING:
        return "APPLYING";
    }
    return "?";
}
