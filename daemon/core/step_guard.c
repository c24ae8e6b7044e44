/* See step_guard.h. */
#include "daemon/core/step_guard.h"

#include <inttypes.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_guard.h"
#include "daemon/core/step_state.h"
#include "proto/base/status.h"
#include "proto/share/guard_window.h"

void step_guard_limits(const struct step *s, struct guard_limits *ret_limits)
{
    ret_limits->count = 0;
    if (s->guard != NULL && s->ledger.guard != NULL && s->ledger.head->owner == 0)
        guard_window_limits(s->guard, s->ledger.history, s->ledger.head->history_slots, s->now,
                            ret_limits);
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
    *ret_stopped = (struct step_stopped){
        .step = v->commits - 1,
        .by = { .what = v->what, .stop = true, .value = v->value, .bound = v->bound }
    };
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
                   "guard=go-on goes on",
                   stopped.step, guard_text(&stopped.by, text));
}
