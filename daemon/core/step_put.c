/* See step_put.h. */
#include "daemon/core/step_put.h"

#include <inttypes.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/base/status.h"

bool step_put_idle(const struct step *s)
{
    for (uint32_t u = 0; u < s->units; u++)
        if (s->unit[u].busy)
            return false;
    return true;
}

int step_put_decision(const struct step *s, const struct decision *decision, struct shd_err *e)
{
    const bool put = decision->put != 0;
    const uint64_t puts = (s->has_last ? s->last.puts : 0) + put;
    if (decision->puts == puts && (put ? decision->skip : decision->updates == 0) &&
        decision->updates <= LEDGER_STEP_MAX + 1)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "commit that counts %" PRIu64 " puts and sets %" PRIu64
                   " updates: the model counts %" PRIu64
                   "; was it made by an older build of the library?",
                   decision->puts, decision->updates, puts);
}

int step_put_check(const struct step *s, uint64_t step, struct shd_err *e)
{
    const uint64_t collecting = step_collecting(s);
    if (s->ledger.more == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "a put: the model was opened by an older build, whose ledger has no room "
                       "for it; save it, and restore it in this one");
    if (step != collecting)
        return err_set(e, SHD_ESTEP, "a put in step %" PRIu64 ", the open step is %" PRIu64, step,
                       collecting);
    if (s->cells_in > 0 || s->cells_waiting > 0 || s->phase == STEP_SEALED)
        return err_set(e, SHD_EBUSY,
                       "step %" PRIu64 " has begun: %" PRIu64 " of its %" PRIu64
                       " gradients are in; put between a commit and the next return",
                       step, s->cells_in + s->cells_waiting, step_cells(s));
    return SHD_OK;
}

int step_put_check_updates(const struct step *s, const uint64_t *updates, struct shd_err *e)
{
    if (updates != NULL && !ledger_counts_units(&s->ledger))
        return err_set(e, SHD_ENOTSUP,
                       "a put with counts of updates for each unit: the model was opened by an "
                       "older build, whose ledger has one for all; save it, and restore it in "
                       "this one");
    for (uint32_t u = 0; updates != NULL && u < s->units; u++)
        if (updates[u] > LEDGER_STEP_MAX + 1)
            return err_set(e, SHD_ERANGE,
                           "a put with %" PRIu64 " updates of unit %" PRIu32 ", at most %" PRIu64,
                           updates[u] - 1, u, LEDGER_STEP_MAX);
    return SHD_OK;
}

void step_put_updates(struct step *s, const uint64_t *updates)
{
    s->put_updates = updates;
}

/* True: all that waits is dropped, but for what a kernel reads. */
static bool drop_waiting(struct step *s, struct step_actions *actions)
{
    for (uint32_t u = 0; u < s->units; u++) {
        const bool read_now = s->unit[u].busy && !s->unit[u].lost;
        for (uint32_t micro = s->unit[u].next + read_now; micro < s->returns.most; micro++) {
            uint32_t *c = &s->cells[(size_t)u * s->returns.most + micro];
            if (*c == CELL_EMPTY)
                continue;
            if (*c <= STEP_REF_MAX) {
                if (actions->count == STEP_ACTIONS_MAX)
                    return false;
                actions->items[actions->count++] = (struct step_action){ .kind = STEP_DO_CREDIT,
                                                                         .ref = *c,
                                                                         .stale = true };
            }
            *c = CELL_EMPTY;
            s->cells_waiting--;
        }
    }
    return true;
}

int step_put_clear(struct step *s, uint64_t step, struct step_actions *ret_actions)
{
    ret_actions->count = 0;
    if (step != s->now || s->phase == STEP_APPLYING)
        return SHD_OK;
    s->dropping = true;
    if (!drop_waiting(s, ret_actions) || ret_actions->count > 0 || !step_put_idle(s))
        return SHD_PENDING;
    s->phase = STEP_OPEN; /* no longer sealed, if it was */
    return SHD_OK;
}
