/* See step_set.h. */
#include "daemon/core/step_set.h"

#include <inttypes.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_guard.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_state.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"

const struct settings_kept *step_settings_kept(const struct step *s)
{
    const struct ledger_set *set = s->ledger.set;
    if (set == NULL)
        return NULL;
    return &set->kept[atomic_load_explicit(&set->given, memory_order_relaxed) & 1];
}

void step_settings(const struct step *s, uint64_t step, struct settings *ret_settings)
{
    const struct settings_kept *kept = step_settings_kept(s);
    if (kept != NULL)
        settings_at(kept, step, ret_settings, /* ret_since= */ NULL);
    else
        ret_settings->count = 0;
}

/* The first step that no worker may be deciding with other settings already. */
static uint64_t earliest(const struct step *s)
{
    const uint64_t word = atomic_load_explicit(&s->ledger.head->promised, memory_order_relaxed);
    return step_collecting(s) + (word == s->round + 1);
}

int step_set(struct step *s, const struct settings *change, uint64_t at, uint64_t *ret_from,
             struct shd_err *e)
{
    struct ledger_set *set = s->ledger.set;
    struct settings_kept after;
    if (set == NULL)
        return err_set(
            e, SHD_ENOTSUP,
            "the model was opened by an older build, whose ledger has no room for "
            "settings: save it, and restore it in this one (shardctl restore --replace)");
    if (at > LEDGER_STEP_MAX)
        return err_set(e, SHD_ERANGE, "step %" PRIu64 ", at most %" PRIu64, at, LEDGER_STEP_MAX);
    const uint64_t given = atomic_load_explicit(&set->given, memory_order_relaxed);
    const struct settings_when when = { step_collecting(s), earliest(s), at };
    const int r = settings_give(&set->kept[given & 1], change, &when, &after, ret_from, e);
    if (r != SHD_OK)
        return r;
    set->kept[(given + 1) & 1] = after;
    FAIL_POINT("step:set:before");
    atomic_store_explicit(&set->given, given + 1, memory_order_release);
    FAIL_POINT("step:set:after");
    return SHD_OK;
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
