/* Guards: their rules, the batches that they are there for, and somebody who says that a stopped
 * model goes on; see sim.h. What a guard skips leaves all values as they were, whoever decides;
 * what it stops stays stopped, whatever dies, until it is said to go on. */
#include <inttypes.h>

#include "daemon/core/step_guard.h"
#include "daemon/core/step_set.h"
#include "tests/sim/sim.h"

#define GO_ON_NS   (400 * MS)
#define NORM_ABOVE 600.0 /* blocks are too few for a norm as high, but in a bad step */
#define ODD_LOSS   8.0   /* times sigma: a loss grows by one a step, and some steps are skipped */

/* Of units 0, 2 and 3; what is frozen, or a mean, has a norm of 0. */
static uint8_t watched[SIM_UNITS] = { 1, 0, 3, 1 };
static uint32_t column[SIM_UNITS] = { 1, 0, 2, 3 };

/* Norms are all over the place: the first is a rule that many steps are beyond. */
static const struct guard guards[] = {
    [SIM_GUARD_SCORES] = { .count = 1,
                           .rules = { { .what = GUARD_NORM_ZSCORE,
                                        .stop = false,
                                        .threshold = 0.75,
                                        .window = GUARD_WINDOW_MIN } } },
    [SIM_GUARD_SKIPS] = { .count = 2,
                          .rules = { { .what = GUARD_NORM_ABOVE,
                                       .stop = false,
                                       .threshold = NORM_ABOVE,
                                       .window = 0 },
                                     { .what = GUARD_LOSS_ZSCORE,
                                       .stop = false,
                                       .threshold = ODD_LOSS,
                                       .window = GUARD_WINDOW_MIN } } },
    [SIM_GUARD_STOPS] = { .count = 2,
                          .rules = { { .what = GUARD_NORM_ABOVE,
                                       .stop = true,
                                       .threshold = NORM_ABOVE,
                                       .window = 0 },
                                     { .what = GUARD_LOSS_ZSCORE,
                                       .stop = true,
                                       .threshold = ODD_LOSS,
                                       .window = GUARD_WINDOW_MIN } } },
    [SIM_GUARD_UNITS] = { .count = 2,
                          .rules = { { .what = GUARD_UNIT_ZSCORE,
                                       .threshold = 1.5,
                                       .window = GUARD_WINDOW_MIN,
                                       .units = "0 2 3" },
                                     { .what = GUARD_UNIT_ZSCORE,
                                       .threshold = 1,
                                       .window = GUARD_WINDOW_MIN,
                                       .units = "2" } },
                          .watched = watched,
                          .columns = 3,
                          .rows = SIM_WINDOW_ROWS,
                          .column = column },
};

const struct guard *sim_guard(const struct sim *s)
{
    return s->config.guard == SIM_GUARD_NONE ? NULL : &guards[s->config.guard];
}

static bool has_bad_batches(const struct sim *s)
{
    return s->config.guard == SIM_GUARD_SKIPS || s->config.guard == SIM_GUARD_STOPS;
}

enum sim_bad sim_bad(const struct sim *s, uint64_t step)
{
    const uint64_t hash = sim_mix(s->config.model_seed, 12000 + step);
    if (!has_bad_batches(s) || hash % 9 != 0)
        return SIM_BAD_NONE;
    return hash / 9 % 2 == 0 ? SIM_BAD_NORM : SIM_BAD_LOSS;
}

void sim_guard_check(struct sim *s, uint32_t owner, uint64_t step, const struct decision *decision,
                     double norm)
{
    if (has_bad_batches(s) && norm > NORM_ABOVE && !decision->skip)
        sim_broken(s, "P1", owner, SIM_NOBODY,
                   "step %" PRIu64 " counts, whose norm of %g no guard lets pass", step, norm);
    if (sim_line(s)->version[step].stopped > s->gone_on)
        sim_broken(s, "stop", owner, SIM_NOBODY,
                   "step %" PRIu64 " is trained, which a guard stopped at step %" PRIu64
                   ": nobody let it go on",
                   step, sim_line(s)->version[step].stopped - 1);
}

/* May be killed on the way: then it has been said, or has not. */
void sim_daemon_go_on(struct sim *s, struct sim_daemon *d)
{
    struct step_stopped stopped;
    struct shd_err e = { 0 };
    if (sim_is_out(s, sim_daemon_index(s, d)))
        return; /* nobody asks it anything */
    if (sim_back_busy(&d->back) || !step_stopped(d->core, &stopped) || !sim_chance(s, 500))
        return;
    sim_note(s, "goes on", 0, SIM_NOBODY, stopped.step, 0, 0);
    s->gone_on = stopped.step + 1;
    FAIL_POINT("sim:go_on");
    if (step_go_on(d->core, &e) != SHD_OK || step_stopped(d->core, &stopped))
        sim_broken(s, "stop", 0, SIM_NOBODY, "what is to go on does not: %s", e.text);
    s->result.stops++;
}

void sim_go_on_event(struct sim *s)
{
    const uint32_t at = s->config.replicas && sim_chance(s, 500) ? s->config.daemons : 0;
    sim_at(s, sim_below(s, GO_ON_NS),
           (struct sim_event){ .kind = EV_GO_ON, .who = at, .gen = s->daemon[at].gen });
}
