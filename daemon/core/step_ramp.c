/* See step_ramp.h. */
#include "daemon/core/step_ramp.h"

#include "daemon/core/ledger.h"
#include "daemon/core/step_state.h"
#include "proto/base/check.h"
#include "proto/spec/ramp.h"

static uint32_t returns_at(const struct step *s, uint64_t step)
{
    if (s->returns.ramp == NULL)
        return s->returns.most;
    return ramp_at(s->returns.ramp, step) / s->returns.accumulate;
}

void step_ramp_next(struct step *s)
{
    const uint64_t step = step_collecting(s);
    s->returns.now = returns_at(s, step);
    s->returns.before = step > 0 ? returns_at(s, step - 1) : s->returns.now;
    CHECK(s->returns.now > 0 && s->returns.now <= s->returns.most);
    CHECK(s->returns.before > 0 && s->returns.before <= s->returns.most);
}
