/* See step_ramp.h. */
#include "daemon/core/step_ramp.h"

#include "daemon/core/ledger.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/spec/ramp.h"

/* As the spec says. */
static uint32_t returns_at(const struct step *s, uint64_t step)
{
    if (s->returns.ramp == NULL)
        return s->returns.most;
    return ramp_at(s->returns.ramp, step) / s->returns.accumulate;
}

bool step_ramp_good(const struct step *s, uint32_t micro_batches)
{
    return micro_batches % s->returns.accumulate == 0 &&
           micro_batches / s->returns.accumulate <= s->returns.most;
}

void step_ramp_next(struct step *s)
{
    const uint64_t step = step_collecting(s);
    const struct ledger_chosen *last = s->ledger.chosen != NULL && step > 0
                                           ? &s->ledger.chosen[step & 1]
                                           : NULL;
    s->returns.now = returns_at(s, step);
    s->returns.before = step > 0 ? returns_at(s, step - 1) : s->returns.now;
    if (last != NULL && last->micro_batches > 0)
        s->returns.now = last->micro_batches / s->returns.accumulate;
    if (last != NULL && last->returns > 0)
        s->returns.before = (uint32_t)last->returns;
    CHECK(s->returns.now > 0 && s->returns.now <= s->returns.most);
    CHECK(s->returns.before > 0 && s->returns.before <= s->returns.most);
}
