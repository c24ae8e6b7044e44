/* See step_reset.h. */
#include "daemon/core/step_reset.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step.h"
#include "daemon/core/step_init.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"

/* Others begin so few attempts while an owner is away: each needs all owners. A number beyond would
 * use up those that the ledger can count. */
#define RESETS_AHEAD_MAX 1024u

/* -- Giving up ---------------------------------------------------------------------------------
 */

/* Nothing that the step's sums are made of counts any more. */
static void forget_sums(struct step *s)
{
    if (s->phase == STEP_SEALED) {
        s->phase = STEP_OPEN;
        step_recall_record(s);
    }
    s->units_summed = s->units_frozen;
    s->cells_in = 0;
    s->finite = true;
    fixsum_init(&s->sum);
    memset(s->micro_units, 0, s->returns.most * sizeof *s->micro_units);
    memset(s->micro_came, 0, s->returns.most * sizeof *s->micro_came);
}

static void begin_attempt(struct step *s, uint64_t attempt)
{
    FAIL_POINT("step:reset:before");
    atomic_store_explicit(&s->ledger.head->resets, attempt - 1, memory_order_release);
    FAIL_POINT("step:reset:after");
    s->round = ledger_round(&s->ledger);
    forget_sums(s);
    s->resetting = true;
    s->reset_unit = s->reset_micro = 0;
}

static bool promised(const struct step *s)
{
    return atomic_load_explicit(&s->ledger.head->promised, memory_order_relaxed) == s->round + 1;
}

int step_reset(struct step *s, uint64_t step, uint64_t attempt, bool agreed,
               enum step_reset_answer *ret_answer, struct shd_err *e)
{
    const uint64_t collecting = step_collecting(s);
    CHECK(!s->resetting);
    if (step > collecting)
        return err_set(e, SHD_ESTEP, "reset of step %" PRIu64 ", the open step is %" PRIu64, step,
                       collecting);
    *ret_answer = step < collecting ? STEP_RESET_OVER : STEP_RESET_DONE;
    if (step < collecting || attempt <= step_attempt(s))
        return SHD_OK;
    if (!ledger_resets_room(&s->ledger))
        return err_set(e, SHD_ENOTSUP,
                       "reset of step %" PRIu64 ": the model was opened by an older build, whose "
                       "ledger has no room for it; save it, and restore it in this one",
                       step);
    if (attempt - 1 > LEDGER_RESETS_MAX || attempt > step_attempt(s) + RESETS_AHEAD_MAX)
        return err_set(e, SHD_ERANGE,
                       "attempt %" PRIu64 " of step %" PRIu64 ", the present one is %" PRIu64,
                       attempt, step, step_attempt(s));
    const bool next = attempt == step_attempt(s) + 1; /* else others have begun one between them */
    if (!agreed && next && promised(s))
        *ret_answer = STEP_RESET_PROMISED;
    else
        begin_attempt(s, attempt);
    return SHD_OK;
}

static void credit_stale(struct step_actions *actions, step_ref ref)
{
    CHECK(actions->count < STEP_ACTIONS_MAX);
    actions->items[actions->count++] = (struct step_action){ .kind = STEP_DO_CREDIT,
                                                             .ref = ref,
                                                             .stale = true };
}

static bool is_ref(uint32_t cell)
{
    return cell != CELL_EMPTY && cell <= STEP_REF_MAX;
}

/* What is being computed goes on, and its end counts for nothing. */
static void give_up_unit(struct step *s, uint32_t unit, struct step_actions *actions)
{
    struct step_unit *u = &s->unit[unit];
    if (u->busy && !u->lost && u->next < s->returns.now) {
        uint32_t *cell = &s->cells[(size_t)unit * s->returns.most + u->next];
        u->lost_ref = is_ref(*cell) ? *cell : 0;
        s->cells_waiting--;
        *cell = CELL_EMPTY;
    }
    u->lost = u->busy;
    if (u->dup != 0)
        credit_stale(actions, u->dup);
    u->dup = 0;
    u->next = 0;
    u->started = false;
    u->summed = u->frozen;
}

bool step_reset_more(struct step *s, struct step_actions *ret_actions)
{
    ret_actions->count = 0;
    if (!s->resetting)
        return false;
    for (; s->reset_unit < s->units; s->reset_unit++, s->reset_micro = 0) {
        uint32_t *cells = &s->cells[(size_t)s->reset_unit * s->returns.most];
        if (s->reset_micro == 0)
            give_up_unit(s, s->reset_unit, ret_actions);
        for (; s->reset_micro < s->returns.most; s->reset_micro++) {
            uint32_t *cell = &cells[s->reset_micro];
            if (ret_actions->count == STEP_ACTIONS_MAX)
                return true;
            if (*cell == CELL_EMPTY)
                continue;
            if (is_ref(*cell))
                credit_stale(ret_actions, *cell);
            *cell = CELL_EMPTY;
            s->cells_waiting--;
        }
        if (ret_actions->count == STEP_ACTIONS_MAX) {
            s->reset_unit++;
            s->reset_micro = 0;
            return true;
        }
    }
    CHECK(s->cells_waiting == 0);
    s->resetting = false;
    return true;
}
