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

/* The number of micro-batches holds from the step after the open one on at the earliest, so it
 * comes alone: from which step on a change holds is one thing. */
static struct settings draw(struct sim *s)
{
    static const double scales[] = { 0.5, 2, 0, SETTINGS_BACK }, clips[] = { 0.25, 3, 0 };
    struct settings change = { .count = SIM_SETTINGS };
    for (uint32_t i = 0; i < change.count; i++)
        change.numbers[i] = (double)NAN;
    if (sim_chance(s, 400)) {
        const double some = 1 + (double)sim_below(s, s->config.micros);
        change.numbers[setting_micros(1)] = sim_chance(s, 200) ? SETTINGS_BACK : some;
        return change;
    }
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

/* A decision shows rates of its own step, and the number of micro-batches of the next one. */
static uint64_t shown_by(const struct sim_setter *set, uint64_t step)
{
    return step + (isnan(set->change.numbers[setting_micros(1)]) ? 0 : 1);
}

/* What is kept with the change in force from this step on. */
static int kept_with(const struct sim *s, uint64_t from, struct settings_kept *ret_kept,
                     struct shd_err *e)
{
    const struct sim_setter *set = &s->setter;
    const uint64_t before = from > 0 ? from - 1 : 0;
    const uint64_t decided = sim_line(s)->decided;
    const struct settings_when when = { before < decided ? before : decided, from, from, 0 };
    uint64_t ignored;
    return settings_give(&set->kept, &set->change, &when, ret_kept, &ignored, e);
}

/* Is it so with what is kept, at `from`? */
static bool is_there(const struct settings_kept *kept, const struct settings *change, uint64_t from)
{
    struct settings s;
    settings_at(kept, from, &s, NULL);
    for (uint32_t i = 0; i < change->count; i++) {
        const double want = change->numbers[i], is = setting_get(&s, i);
        if (!isnan(want) && !(want == SETTINGS_BACK ? isnan(is) : is == want))
            return false;
    }
    return true;
}

/* It is recorded, from `from` on. It may have been so before, and otherwise in between, where a
 * part of it was to be changed, and then back. */
static void answered(struct sim *s, uint64_t from)
{
    struct sim_setter *set = &s->setter;
    const uint64_t since = from < set->with_first ? from : set->with_first;
    struct settings_kept after;
    struct shd_err e = { 0 };
    if (is_there(&set->kept, &set->change, from))
        return;
    if (from < set->without_end || (since < from && (kept_with(s, since, &after, &e) != SHD_OK ||
                                                     !is_there(&after, &set->change, from))))
        sim_broken(s, "P3", 0, SIM_NOBODY,
                   "settings are said to be in force from step %" PRIu64
                   " on; without them was step "
                   "%" PRIu64 ", with them step %" PRIu64,
                   from, set->without_end - 1, set->with_first);
    if (kept_with(s, since, &after, &e) != SHD_OK)
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
        set->id++;
        set->at = sim_chance(s, 300) ? step_collecting(d->core) + sim_below(s, 6) : 0;
        set->without_end = shown_by(set, sim_line(s)->decided); /* steps below it are without */
        set->with_first = UINT64_MAX;
        set->asking = true;
    }
    const int r = step_set(d->core, &set->change, set->at, set->id, &from, &e);
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

/* Those that `step` is decided with, and micro-batches of the next one: 0 those that are known;
 * which > 0: those that were asked for, too, since that step or one before, if that may be. */
bool sim_settings(const struct sim *s, uint64_t step, uint32_t which, struct settings *ret_settings,
                  uint32_t *ret_micros)
{
    const struct sim_setter *set = &s->setter;
    struct settings_kept after = set->kept;
    struct shd_err e;
    if (which > 0) {
        const uint64_t shown = shown_by(set, step), since = shown - (which - 1);
        if (!set->asking || which > shown + 1 || since < set->without_end || since < set->at ||
            kept_with(s, since, &after, &e) != SHD_OK)
            return false;
    }
    settings_at(&after, step, ret_settings, /* ret_since= */ NULL);
    *ret_micros = settings_micro_batches(&after, step + 1);
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
        set->without_end = shown_by(set, step) + 1;
    else if (set->with_first == UINT64_MAX)
        set->with_first = shown_by(set, step);
}
