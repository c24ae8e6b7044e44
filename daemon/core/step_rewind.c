/* See step_rewind.h. */
#include "daemon/core/step_rewind.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_put.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"
#include "proto/share/unit_window.h"

/* Another owner may be further by the step that was being committed, and by as many resets as it
 * can have been told of while this one was away. */
#define ROUNDS_AHEAD 2048u

uint64_t rewind_more_bytes(const struct ledger *l)
{
    return l->chosen != NULL ? sizeof(struct rewind_more) : 0;
}

static void take_more(const struct step *s, struct rewind_record *record, struct rewind_more *more)
{
    const struct ledger *l = &s->ledger;
    struct settings_kept room;
    const struct ledger_set *old = l->set;
    if (old != NULL)
        record->kept = old->kept[atomic_load_explicit(&old->given, memory_order_relaxed) & 1];
    if (l->settings != NULL)
        more->kept = *ledger_settings(l, &room);
    if (l->chosen != NULL)
        more->chosen = l->chosen[s->now & 1];
}

void step_rewind_take(const struct step *s, struct rewind_record *ret_record,
                      struct rewind_more *ret_more, uint64_t *ret_updates, uint8_t *ret_blob)
{
    const struct ledger *l = &s->ledger;
    const uint32_t slot = (uint32_t)(s->now & 1);
    CHECK(s->phase != STEP_APPLYING && l->rewind != NULL);
    *ret_record = (struct rewind_record){
        .step = s->now,
        .put_at = l->head->beside.put[slot],
        .record = l->head->record[slot],
        .more = l->more[slot],
        .guarded = l->guard->record[slot],
    };
    take_more(s, ret_record, ret_more);
    if (s->now == 0)
        ret_record->record.blob_bytes = 0;
    for (uint32_t u = 0; u < s->units; u++)
        ret_updates[u] = ledger_unit_updates(l, u);
    if (ret_record->record.blob_bytes > 0)
        memcpy(ret_blob, l->blob[ret_record->record.blob_at], ret_record->record.blob_bytes);
}

uint64_t step_rewind_window_bytes(const struct ledger *l)
{
    return l->window == NULL
               ? 0
               : unit_window_bytes(l->head->made.window.rows, l->head->made.window.columns);
}

void step_rewind_take_window(const struct step *s, void *ret_window)
{
    const uint64_t bytes = step_rewind_window_bytes(&s->ledger);
    if (bytes > 0)
        memcpy(ret_window, s->ledger.window, bytes);
}

void step_rewind_put_window(struct ledger *l, const void *window)
{
    const uint64_t bytes = step_rewind_window_bytes(l);
    CHECK(ledger_rewinding(l, &(uint64_t){ 0 }));
    if (bytes > 0)
        memcpy(l->window, window, bytes);
}

bool step_rewind_may_hold(const struct ledger *l, const struct rewind_ask *ask)
{
    const struct ledger_rewind *r = l->rewind;
    return atomic_load(&r->last) == ask->attempt &&
           (atomic_load(&r->held) == 0 || ask->consent >= r->consent);
}

void step_rewind_hold(struct ledger *l, const struct rewind_ask *ask)
{
    struct ledger_rewind *r = l->rewind;
    r->consent = ask->consent;
    r->keep_settings = ask->keep_settings;
    atomic_store_explicit(&r->held, ask->step + 1, memory_order_release);
    FAIL_POINT("rewind:held");
}

enum rewind_goes step_rewind_goes(const struct ledger *l, const struct rewind_ask *ask)
{
    const struct ledger_rewind *r = l->rewind;
    if (atomic_load(&r->last) > ask->attempt)
        return r->last_step == ask->step ? REWIND_GONE : REWIND_BY_ANOTHER;
    if (atomic_load(&r->held) != ask->step + 1 || r->consent != ask->consent)
        return REWIND_BY_ANOTHER;
    return REWIND_GOES;
}

uint64_t step_rewind_last(const struct ledger *l, uint64_t *ret_step)
{
    *ret_step = l->rewind != NULL ? l->rewind->last_step : 0;
    return l->rewind != NULL ? atomic_load(&l->rewind->last) : 0;
}

bool step_rewind_followed(const struct ledger *l, uint64_t attempt)
{
    return atomic_load(&l->rewind->last) >= attempt;
}

/* Into the place that does not count yet. */
static int keep_settings(const struct step *s, uint64_t step, uint64_t attempt,
                         const struct rewind_more *more, struct shd_err *e)
{
    struct ledger_rewind *r = s->ledger.rewind;
    struct ledger_settings *l = s->ledger.settings;
    r->kept_attempt = 0;
    if (r->keep_settings == 0 || l == NULL)
        return SHD_OK;
    const uint64_t given = atomic_load_explicit(&l->given, memory_order_relaxed);
    struct settings_kept kept = more->kept;
    if (!settings_keep(&l->kept[given & 1], step, &kept))
        return err_set(e, SHD_ERANGE,
                       "what was set since step %" PRIu64 " is more than the %u changes that can "
                       "wait for their steps: `shardctl set` KEY=now gives up what waits",
                       step, SETTINGS_WAITS_MAX);
    l->kept[(given + 1) & 1] = kept;
    r->kept_given = given + 1;
    r->kept_attempt = attempt;
    return SHD_OK;
}

int step_rewind(struct step *s, uint64_t step, uint64_t attempt, const struct rewind_more *more,
                struct shd_err *e)
{
    struct ledger_rewind *r = s->ledger.rewind;
    if (r == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "the model was opened by an older build, whose ledger has no room for a "
                       "rewind: save it, and restore it in this one");
    if (s->phase == STEP_APPLYING)
        return SHD_PENDING;
    if (step > s->now)
        return err_set(e, SHD_ESTEP, "rewind to step %" PRIu64 ", the open step is %" PRIu64, step,
                       s->now);
    const uint64_t next = attempt != 0 ? attempt : s->round + ROUNDS_AHEAD + 1 - step;
    if (next - 1 > LEDGER_RESETS_MAX || step + next - 1 <= s->round)
        return err_set(e, SHD_ERANGE,
                       "rewind to step %" PRIu64 " that begins attempt %" PRIu64
                       ", the present one of step %" PRIu64 " is %" PRIu64,
                       step, next, s->now, step_attempt(s));
    const int status = keep_settings(s, step, next, more, e);
    if (status != SHD_OK)
        return status;
    r->step = step;
    r->attempt = next;
    step_guard_back(s, step); /* once more where this process is killed before the next word */
    FAIL_POINT("step:rewind:before");
    atomic_store_explicit(&r->under_way, 1, memory_order_release);
    FAIL_POINT("step:rewind:after");
    return SHD_OK;
}

int step_rewind_drop(struct step *s, struct step_actions *ret_actions)
{
    return step_put_clear(s, s->now, ret_actions);
}

/* What was let go on before that step is; what was stopped behind it never was. */
uint64_t step_rewind_go_on(const struct ledger *l, uint64_t step)
{
    if (l->guard == NULL)
        return 0;
    const uint64_t go_on = atomic_load_explicit(&l->guard->go_on, memory_order_relaxed);
    return go_on < step ? go_on : step;
}

/* All but the counts of units, and settings. */
static void put_record(struct ledger *l, const struct rewind_record *record, uint64_t go_on,
                       const uint8_t *blob)
{
    struct ledger_head *h = l->head;
    const uint32_t slot = (uint32_t)(record->step & 1);
    h->record[slot] = record->record;
    h->record[slot].blob_at = 0;
    h->beside.put[slot] = record->put_at;
    l->more[slot] = record->more;
    if (record->record.blob_bytes > 0)
        memcpy(l->blob[0], blob, record->record.blob_bytes);
    l->guard->record[slot] = record->guarded;
    atomic_store_explicit(&l->guard->go_on, go_on, memory_order_relaxed);
}

void step_rewind_start(struct ledger *l, const struct rewind_record *record,
                       const struct ledger_chosen *chosen, uint64_t go_on, const uint64_t *updates,
                       const uint8_t *blob)
{
    const uint32_t slot = (uint32_t)(record->step & 1);
    CHECK(l->rewind != NULL && atomic_load(&l->head->ready) == 0);
    CHECK(record->record.blob_bytes <= LEDGER_BLOB_BYTES);
    put_record(l, record, go_on, blob);
    if (l->chosen != NULL)
        l->chosen[slot] = *chosen;
    for (uint32_t u = 0; u < l->head->units; u++) {
        l->unit[u].updates[slot] = updates[u];
        atomic_store_explicit(&l->unit[u].version, record->step, memory_order_relaxed);
    }
    atomic_store_explicit(&l->head->commits, record->step, memory_order_release);
}

static void put_more(struct ledger *l, const struct rewind_record *record,
                     const struct rewind_more *more)
{
    const struct ledger_rewind *r = l->rewind;
    struct ledger_settings *settings = l->settings;
    struct ledger_set *old = l->set;
    if (old != NULL)
        old->kept[atomic_load_explicit(&old->given, memory_order_relaxed) & 1] = record->kept;
    if (settings != NULL && r->kept_attempt == r->attempt)
        atomic_store_explicit(&settings->given, r->kept_given, memory_order_release);
    else if (settings != NULL)
        settings->kept[atomic_load_explicit(&settings->given, memory_order_relaxed) & 1] =
            more->kept;
    if (l->chosen != NULL)
        l->chosen[record->step & 1] = more->chosen;
}

/* The last word is what makes all before it count: whatever of it is there when this process is
 * killed is written once more. */
void step_rewind_done(struct ledger *l, const struct rewind_record *record,
                      const struct rewind_more *more, const uint64_t *updates, const uint8_t *blob)
{
    struct ledger_head *h = l->head;
    struct ledger_rewind *r = l->rewind;
    const uint64_t step = record->step, resets = r->attempt - 1;
    const uint32_t slot = (uint32_t)(step & 1);
    CHECK(step == r->step && record->record.blob_bytes <= LEDGER_BLOB_BYTES);
    for (uint32_t u = 0; u < h->units; u++) {
        struct ledger_unit *unit = &l->unit[u];
        atomic_store_explicit(&unit->progress, 0, memory_order_relaxed);
        unit->took = 0;
        unit->updates[slot] = updates[u];
        atomic_store_explicit(&unit->version, step, memory_order_relaxed);
        FAIL_POINT("step:rewind:unit");
    }
    put_record(l, record, step_rewind_go_on(l, step), blob);
    put_more(l, record, more);
    h->beside.resets[0] = h->beside.resets[1] = resets;
    atomic_store_explicit(&h->promised, 0, memory_order_relaxed);
    atomic_store_explicit(&h->resets, resets, memory_order_relaxed);
    FAIL_POINT("step:rewind:words");
    atomic_store_explicit(&h->commits, step, memory_order_relaxed);
    r->last_step = step;
    atomic_store_explicit(&r->last, r->attempt, memory_order_relaxed);
    atomic_store_explicit(&r->held, 0, memory_order_relaxed);
    FAIL_POINT("step:rewind:done:before");
    atomic_store_explicit(&r->under_way, 0, memory_order_release);
    FAIL_POINT("step:rewind:done:after");
}
