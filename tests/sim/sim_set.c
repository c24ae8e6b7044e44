/* Somebody who changes settings at owner 0, again and again, and what must come of it; see sim.h.
 * What was answered is in force from the step that the answer names, and in none before; what was
 * asked of an owner that died is asked again, and may be in force by then. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "daemon/core/step_set.h"
#include "tests/sim/sim.h"

#define GAP_NS (300 * MS)

static double one_of(struct sim *s, const double *numbers, uint32_t count)
{
    return numbers[sim_below(s, count)];
}

static struct settings draw(struct sim *s)
{
    static const double scales[] = { 0.5, 2, 0, SETTINGS_BACK }, clips[] = { 0.25, 3, 0 };
    struct settings change = { .count = SIM_SETTINGS };
    for (uint32_t i = 0; i < change.count; i++)
        change.numbers[i] = (double)NAN;
    do {
        if (sim_chance(s, 500))
            change.numbers[SETTINGS_CLIP_NORM] = one_of(s, clips, ARRAY_SIZE(clips));
        if (sim_chance(s, 500))
            change.numbers[setting_of(0, SETTING_LR_SCALE)] = one_of(s, scales, ARRAY_SIZE(scales));
        if (sim_chance(s, 300))
            change.numbers[setting_of(0, SETTING_BETA1)] = 0.5;
    } while (isnan(change.numbers[0]) && isnan(change.numbers[1]) && isnan(change.numbers[3]));
    return change;
}

/* Is it so already, or going to be? */
static bool is_there(const struct sim_setter *set)
{
    const uint64_t late = UINT64_C(1) << 40;
    const struct settings_when when = { late, late, late };
    uint64_t from = late;
    struct settings_kept after;
    struct shd_err e;
    return settings_give(&set->kept, &set->change, &when, &after, &from, &e) == SHD_OK &&
           from < late;
}

/* Had a step already what the change asks for? */
static bool had_it(const struct sim_setter *set, uint64_t step)
{
    struct settings s;
    settings_at(&set->kept, step, &s, NULL);
    for (uint32_t i = 0; i < set->change.count; i++) {
        const double want = set->change.numbers[i], is = setting_get(&s, i);
        if (!isnan(want) && !(want == SETTINGS_BACK ? isnan(is) : is == want))
            return false;
    }
    return true;
}

/* It is recorded, from `from` on. What was so, and was to be otherwise from a later step on, may
 * have been so all along. */
static void answered(struct sim *s, uint64_t from)
{
    struct sim_setter *set = &s->setter;
    struct settings_when when = { sim_line(s)->decided, from, from };
    uint64_t ignored;
    struct shd_err e = { 0 };
    struct settings_kept after;
    bool before = set->kept.next.count > 0 && from < set->kept.from;
    if (is_there(set))
        return;
    for (uint64_t step = from; before && step < set->kept.from; step++)
        before = had_it(set, step);
    if ((from < set->without_end && !before) ||
        (set->with_first != UINT64_MAX && from > set->with_first))
        sim_broken(s, "P3", 0, SIM_NOBODY,
                   "settings are said to be in force from step %" PRIu64 " on; without them step "
                   "%" PRIu64 " was decided, with them step %" PRIu64,
                   from, set->without_end - 1, set->with_first);
    if (before)
        when.earliest = when.at = set->kept.from;
    if (settings_give(&set->kept, &set->change, &when, &after, &ignored, &e) != SHD_OK)
        sim_broken(s, "P3", 0, SIM_NOBODY, "settings from step %" PRIu64 ": %s", from, e.text);
    set->kept = after;
}

/* May be killed on the way. */
void sim_daemon_set(struct sim *s, struct sim_daemon *d)
{
    struct sim_setter *set = &s->setter;
    struct shd_err e = { 0 };
    uint64_t from = 0;
    if (sim_back_busy(&d->back))
        return; /* it is asked again */
    if (!set->asking) {
        set->change = draw(s);
        set->at = sim_chance(s, 300) ? step_collecting(d->core) + sim_below(s, 6) : 0;
        set->without_end = sim_line(s)->decided; /* steps below it are decided, without */
        set->with_first = UINT64_MAX;
        set->asking = true;
    }
    const int r = step_set(d->core, &set->change, set->at, &from, &e);
    sim_note(s, r == SHD_OK ? "set" : "not set", 0, SIM_NOBODY, from, 0, 0);
    FAIL_POINT("sim:set:answer");
    if (r == SHD_OK)
        answered(s, from);
    else if (set->with_first != UINT64_MAX)
        sim_broken(s, "P3", 0, SIM_NOBODY, "step %" PRIu64 " had settings that are refused: %s",
                   set->with_first, e.text);
    set->asking = false;
}

void sim_set_event(struct sim *s)
{
    sim_at(s, sim_below(s, GAP_NS), (struct sim_event){ .kind = EV_SET, .gen = s->daemon[0].gen });
}

/* Those that `step` is decided with: 0 those that are known, 1 those that were asked for, too, if
 * that may be. */
bool sim_settings(const struct sim *s, uint64_t step, uint32_t which, struct settings *ret_settings)
{
    const struct sim_setter *set = &s->setter;
    const struct settings_when when = { step, step, 0 };
    struct settings_kept after = set->kept;
    struct shd_err e;
    uint64_t ignored;
    if (which > 0 &&
        (!set->asking || step < set->at ||
         settings_give(&set->kept, &set->change, &when, &after, &ignored, &e) != SHD_OK))
        return false;
    settings_at(&after, step, ret_settings, /* ret_since= */ NULL);
    return true;
}

/* One was decided, with these. */
void sim_settings_seen(struct sim *s, uint64_t step, bool with)
{
    struct sim_setter *set = &s->setter;
    if (!set->asking)
        return;
    if (!with && set->with_first != UINT64_MAX)
        sim_broken(s, "P1", 0, SIM_NOBODY,
                   "step %" PRIu64 " is decided without settings that step %" PRIu64 " had", step,
                   set->with_first);
    if (!with)
        set->without_end = step + 1;
    else if (set->with_first == UINT64_MAX)
        set->with_first = step;
}
