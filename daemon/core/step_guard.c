/* See step_guard.h. */
#include "daemon/core/step_guard.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_back.h"
#include "daemon/core/ledger_guard.h"
#include "daemon/core/step_state.h"
#include "proto/base/status.h"
#include "proto/share/audit.h"
#include "proto/share/guard_window.h"
#include "proto/share/unit_window.h"

/* Has the model gone back for the step, and is there a place to note another one? */
static bool gone_back(const struct ledger_back *back, uint64_t step, bool *ret_room)
{
    bool gone = false;
    *ret_room = false;
    for (uint32_t i = 0; i < LEDGER_BACK_STEPS; i++) {
        gone = gone || back->steps[i] == step + 1;
        *ret_room = *ret_room || back->steps[i] == 0;
    }
    return gone;
}

void step_guard_limits(const struct step *s, struct guard_limits *ret_limits)
{
    const struct ledger *l = &s->ledger;
    ret_limits->count = 0;
    if (s->guard == NULL || l->guard == NULL || l->head->owner != 0)
        return;
    bool room = false;
    const bool gone = l->back != NULL && gone_back(l->back, s->now, &room);
    guard_window_limits(s->guard, l->history, l->head->history_slots, s->now, ret_limits);
    guard_limits_back(ret_limits, gone ? GUARD_BACK_SKIPS : room ? GUARD_BACK : GUARD_BACK_STOPS);
}

struct ledger_window step_guard_shape(const struct guard *guard, uint32_t owner)
{
    return guard == NULL || owner > 0 ? (struct ledger_window){ 0 }
                                      : (struct ledger_window){ guard->rows, guard->columns };
}

bool step_guard_window(const struct step *s, struct unit_window *ret_window)
{
    const struct ledger_head *h = s->ledger.head;
    if (s->guard == NULL || s->ledger.window == NULL ||
        h->made.window.columns != s->guard->columns || h->made.window.rows != s->guard->rows)
        return false;
    *ret_window = unit_window_at(s->ledger.window, h->made.window.rows, h->made.window.columns);
    return true;
}

uint32_t step_unit_limits(const struct step *s, uint32_t first, uint32_t count, double *ret_limits)
{
    struct unit_window w;
    const struct guard *g = s->guard;
    uint32_t told = 0;
    if (!step_guard_window(s, &w))
        return 0;
    for (uint32_t u = first; u < first + count; u++)
        for (uint32_t i = 0; g->column[u] > 0 && i < g->count; i++)
            if ((g->watched[u] >> i & 1) != 0 && guard_unit_windowed(&g->rules[i]))
                ret_limits[told++] = unit_window_limit(&w, &g->rules[i], s->now, g->column[u] - 1);
    return told;
}

void step_guard_back(struct step *s, uint64_t to)
{
    struct ledger_back *back = s->ledger.back;
    struct step_stopped stopped;
    uint32_t free_place = LEDGER_BACK_STEPS;
    if (back == NULL)
        return;
    const bool guards = step_stopped(s, &stopped) && stopped.by.rewind && stopped.step >= to;
    back->last = guards ? stopped.step + 1 : 0;
    for (uint32_t i = 0; guards && i < LEDGER_BACK_STEPS; i++) {
        if (back->steps[i] <= to || back->steps[i] == back->last)
            back->steps[i] = 0;
        if (back->steps[i] == 0 && free_place == LEDGER_BACK_STEPS)
            free_place = i;
    }
    if (guards && free_place < LEDGER_BACK_STEPS)
        back->steps[free_place] = back->last;
}

uint64_t step_gone_back(const struct step *s)
{
    return s->ledger.back != NULL ? s->ledger.back->last : 0;
}

bool step_stopped(const struct step *s, struct step_stopped *ret_stopped)
{
    const struct ledger_guard *g = s->ledger.guard;
    if (g == NULL)
        return false;
    const uint64_t commits = atomic_load_explicit(&s->ledger.head->commits, memory_order_relaxed);
    const struct ledger_veto *v = &g->record[commits & 1].stopped;
    if (v->commits <= atomic_load_explicit(&g->go_on, memory_order_relaxed))
        return false;
    *ret_stopped = (struct step_stopped){ .step = v->commits - 1,
                                          .by = { .what = v->what,
                                                  .stop = true,
                                                  .rewind = v->stop == LEDGER_VETO_REWINDS,
                                                  .value = v->value,
                                                  .bound = v->bound } };
    return true;
}

bool step_cause(const struct step *s, uint64_t step, struct step_cause *ret_cause)
{
    const uint64_t commits = atomic_load_explicit(&s->ledger.head->commits, memory_order_relaxed);
    struct audit_row row;
    if (s->ledger.audit == NULL || !audit_get(s->ledger.audit, commits, step, &row))
        return false;
    *ret_cause = (struct step_cause){ .of = audit_cause(&row),
                                      .pid = row.worker.pid,
                                      .rank = row.worker.rank };
    _Static_assert(STEP_NAME_BYTES == AUDIT_NAME_BYTES, "a name fits");
    memcpy(ret_cause->worker, row.worker.name, sizeof ret_cause->worker - 1);
    return true;
}

int step_check_stopped(const struct step *s, struct shd_err *e)
{
    struct step_stopped stopped;
    char text[GUARD_TEXT_BYTES];
    if (s->ledger.head->owner != 0 || !step_stopped(s, &stopped))
        return SHD_OK;
    return err_set(e, SHD_ESTOPPED,
                   "a guard stopped training at step %" PRIu64 ": %s; shardctl set MODEL "
                   "guard=go-on goes on%s",
                   stopped.step, guard_text(&stopped.by, text),
                   stopped.by.rewind ? ", without going back" : "");
}
