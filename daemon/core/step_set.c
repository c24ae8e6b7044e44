/* See step_set.h. */
#include "daemon/core/step_set.h"

#include <inttypes.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_guard.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_state.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"

const struct settings_kept *step_settings_kept(const struct step *s, struct settings_kept *room)
{
    return ledger_settings(&s->ledger, room);
}

void step_settings(const struct step *s, uint64_t step, struct settings *ret_settings)
{
    struct settings_kept room;
    const struct settings_kept *kept = ledger_settings(&s->ledger, &room);
    if (kept != NULL)
        settings_at(kept, step, ret_settings, /* ret_since= */ NULL);
    else
        ret_settings->count = 0;
}

uint32_t step_settings_micros(const struct step *s, uint64_t step)
{
    struct settings_kept room;
    const struct settings_kept *kept = ledger_settings(&s->ledger, &room);
    return kept != NULL ? settings_micro_batches(kept, step) : 0;
}

/* The first step that no worker may be deciding with other settings already. */
static uint64_t earliest(const struct step *s)
{
    const uint64_t word = atomic_load_explicit(&s->ledger.head->promised, memory_order_relaxed);
    return step_collecting(s) + (word == s->round + 1);
}

int step_set(struct step *s, const struct settings *change, uint64_t at, uint64_t id,
             uint64_t *ret_from, struct shd_err *e)
{
    static const struct settings_kept none = { .waiting = 0 };
    struct settings_kept room, after;
    const struct settings_kept *kept = ledger_settings(&s->ledger, &room);
    if (at > LEDGER_STEP_MAX)
        return err_set(e, SHD_ERANGE, "step %" PRIu64 ", at most %" PRIu64, at, LEDGER_STEP_MAX);
    const struct settings_when when = { step_collecting(s), earliest(s), at, id };
    const int r = settings_give(kept != NULL ? kept : &none, change, &when, &after, ret_from, e);
    if (r != SHD_OK)
        return r;
    if (s->ledger.settings == NULL) /* one that has room for what waits alone */
        settings_settle(&after, when.open);
    ledger_rewind_renew(s->ledger.rewind);
    return ledger_settings_keep(&s->ledger, &after, e);
}

int step_go_on(struct step *s, struct shd_err *e)
{
    struct ledger_guard *g = s->ledger.guard;
    struct step_stopped stopped;
    if (g == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "the model was opened by an older build, which knows no guard: nothing was "
                       "stopped");
    if (!step_stopped(s, &stopped))
        return SHD_OK;
    FAIL_POINT("step:go_on:before");
    atomic_store_explicit(&g->go_on, stopped.step + 1, memory_order_release);
    FAIL_POINT("step:go_on:after");
    return SHD_OK;
}
