/* See settings.h. */
#include "proto/spec/settings.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/optimizer.h"
#include "proto/spec/spec.h"

double setting_get(const struct settings *settings, uint32_t index)
{
    return index < settings->count ? settings->numbers[index] : (double)NAN;
}

void settings_init(struct settings *settings, const struct spec *spec)
{
    CHECK(spec->group_count <= SHD_GROUPS_MAX);
    settings->count = 1 + spec->group_count * SETTINGS_RATES;
    for (uint32_t i = 0; i < settings->count; i++)
        settings->numbers[i] = (double)NAN;
}

/* -- Names and limits -------------------------------------------------------------------------- */

/* NULL: the group has no such number. */
static const char *rate_name(const struct spec *spec, uint32_t group, enum setting_rate rate)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[spec->optimizer];
    if (spec->groups[group].mean)
        return NULL;
    switch (rate) {
    case SETTING_LR_SCALE:
        return "lr_scale";
    case SETTING_WEIGHT_DECAY:
        return "weight_decay";
    case SETTING_BETA1:
        return row->beta1_key;
    case SETTING_BETA2:
        break;
    }
    return row->beta2_key;
}

static double number_max(uint32_t index)
{
    const uint32_t rate = (index - 1) % SETTINGS_RATES;
    return index != SETTINGS_CLIP_NORM && (rate == SETTING_BETA1 || rate == SETTING_BETA2)
               ? SPEC_BETA_MAX
               : (double)FLT_MAX;
}

const char *setting_name(const struct spec *spec, uint32_t index, char *buf, uint32_t bytes)
{
    const uint32_t group = index == 0 ? 0 : (index - 1) / SETTINGS_RATES;
    const uint32_t rate = index == 0 ? 0 : (index - 1) % SETTINGS_RATES;
    CHECK(group < spec->group_count);
    const char *name = rate_name(spec, group, (enum setting_rate)rate);
    if (index == SETTINGS_CLIP_NORM)
        snprintf(buf, bytes, "clip_norm");
    else
        snprintf(buf, bytes, "%s.%s", name != NULL ? name : "?", spec->groups[group].name);
    return buf;
}

/* Both in torch's order: Nesterov's sum is of a momentum. */
static int check_momentum(const struct spec *spec, uint32_t index, double x, struct shd_err *e)
{
    char name[SETTING_NAME_BYTES];
    if (!spec->nesterov || index == 0 || (index - 1) % SETTINGS_RATES != SETTING_BETA1 || x != 0)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "%s is 0, and the optimizer is with nesterov: it needs a momentum",
                   setting_name(spec, index, name, sizeof name));
}

static int check_number(const struct spec *spec, uint32_t index, double x, bool change,
                        struct shd_err *e)
{
    char name[SETTING_NAME_BYTES];
    const double max = number_max(index);
    if (isnan(x))
        return SHD_OK;
    const uint32_t group = index == 0 ? 0 : (index - 1) / SETTINGS_RATES;
    if (index != SETTINGS_CLIP_NORM &&
        rate_name(spec, group, (enum setting_rate)((index - 1) % SETTINGS_RATES)) == NULL)
        return err_set(
            e, SHD_EINVAL, "group '%.60s' has no such setting: its optimizer is %s",
            spec->groups[group].name,
            spec_optimizer_rows[spec->groups[group].mean ? SPEC_MEAN : spec->optimizer].kind);
    if ((change && x == SETTINGS_BACK) || (x >= 0 && x <= max))
        return check_momentum(spec, index, x, e);
    return err_set(e, SHD_ERANGE, "%s is %g, must be 0 to %.8g",
                   setting_name(spec, index, name, sizeof name), x, max);
}

int settings_check(const struct spec *spec, const struct settings *settings, bool change,
                   struct shd_err *e)
{
    int r = SHD_OK;
    if (settings->count != 0 && settings->count != 1 + spec->group_count * SETTINGS_RATES)
        return err_set(
            e, SHD_EINVAL,
            "settings have %" PRIu32 " numbers, model '%.60s' with %" PRIu32 " groups has %" PRIu32,
            settings->count, spec->name, spec->group_count, 1 + spec->group_count * SETTINGS_RATES);
    for (uint32_t i = 0; r == SHD_OK && i < settings->count; i++)
        r = check_number(spec, i, settings->numbers[i], change, e);
    return r;
}

bool settings_plausible(const struct settings *settings, bool change)
{
    bool good = settings->count == 0 ||
                (settings->count <= SETTINGS_MAX && settings->count > SETTINGS_RATES &&
                 (settings->count - 1) % SETTINGS_RATES == 0);
    for (uint32_t i = 0; good && i < settings->count; i++) {
        const double x = settings->numbers[i];
        good = isnan(x) || (x >= 0 && x <= number_max(i)) || (change && x == SETTINGS_BACK);
    }
    return good;
}

int settings_unpack(const uint8_t *data, size_t bytes, bool change, struct settings *ret_settings,
                    struct shd_err *e)
{
    struct settings s;
    if (bytes > sizeof s.numbers || bytes % sizeof *s.numbers != 0)
        return err_set(e, SHD_EPROTO, "%zu bytes are no settings", bytes);
    s.count = (uint32_t)(bytes / sizeof *s.numbers);
    if (bytes > 0)
        memcpy(s.numbers, data, bytes);
    if (!settings_plausible(&s, change))
        return err_set(e, SHD_EPROTO, "%" PRIu32 " numbers that are no settings", s.count);
    *ret_settings = s;
    return SHD_OK;
}

/* -- Changing ---------------------------------------------------------------------------------- */

/* The number after a change. */
static double changed(double now, double change)
{
    if (isnan(change))
        return now;
    return change == SETTINGS_BACK ? (double)NAN : change;
}

static bool same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b;
}

void settings_at(const struct settings_kept *kept, uint64_t step, struct settings *ret_settings,
                 uint64_t *ret_since)
{
    const bool next = kept->next.count > 0 && step >= kept->from;
    const uint32_t count = kept->now.count > 0 ? kept->now.count : kept->next.count;
    ret_settings->count = next || kept->now.count > 0 ? count : 0;
    for (uint32_t i = 0; i < ret_settings->count; i++) {
        const double now = setting_get(&kept->now, i);
        const double then = next ? changed(now, kept->next.numbers[i]) : now;
        ret_settings->numbers[i] = then;
        if (ret_since != NULL)
            ret_since[i] = same(now, then) ? kept->since[i] : kept->from;
    }
}

static bool any_number(const struct settings *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (!isnan(s->numbers[i]))
            return true;
    return false;
}

bool settings_any(const struct settings_kept *kept)
{
    return any_number(&kept->now) || any_number(&kept->next);
}

int settings_check_kept(const struct spec *spec, const struct settings_kept *kept,
                        struct shd_err *e)
{
    struct shd_err why = { 0 };
    int r = settings_check(spec, &kept->now, /* change= */ false, &why);
    if (r == SHD_OK)
        r = settings_check(spec, &kept->next, /* change= */ true, &why);
    return r == SHD_OK ? r : err_set(e, SHD_ESEGMENT, "ledger's %.200s", why.text);
}

/* Nothing would be another number than it is, or is going to be. *ret_from: since when. */
static bool is_there(const struct settings_kept *kept, const struct settings *change,
                     uint64_t *ret_from)
{
    struct settings all;
    uint64_t since[SETTINGS_MAX], from = 0;
    settings_at(kept, UINT64_MAX, &all, since);
    for (uint32_t i = 0; i < change->count; i++) {
        if (isnan(change->numbers[i]))
            continue;
        if (!same(setting_get(&all, i), changed(setting_get(&all, i), change->numbers[i])))
            return false;
        if (i < all.count && since[i] > from)
            from = since[i];
    }
    *ret_from = from;
    return true;
}

/* What waits is in force at `step`, and no earlier one is asked for: it is what is. */
static void settle(struct settings_kept *kept, uint64_t step)
{
    struct settings now;
    uint64_t since[SETTINGS_MAX] = { 0 };
    settings_at(kept, step, &now, since);
    kept->now = now;
    memcpy(kept->since, since, sizeof since);
    kept->next.count = 0;
}

int settings_give(const struct settings_kept *kept, const struct settings *change,
                  const struct settings_when *when, struct settings_kept *ret_kept,
                  uint64_t *ret_from, struct shd_err *e)
{
    const uint64_t at = when->at, earliest = when->earliest;
    const bool waits = kept->next.count > 0;
    CHECK(change->count > 0);
    uint64_t from = at != 0 ? at : earliest, there;
    if (waits && at == 0 && kept->from == earliest + 1) /* the step has begun again since */
        from = kept->from;
    if ((!waits || kept->from <= from) && is_there(kept, change, &there) && there <= from) {
        *ret_kept = *kept;
        *ret_from = there;
        return SHD_OK;
    }
    if (from < earliest)
        return err_set(e, SHD_ESTEP,
                       "step %" PRIu64 " is decided, or about to be: from step %" PRIu64
                       " on it can be changed",
                       from, earliest);
    if (waits && kept->from > when->open && kept->from != from)
        return err_set(e, SHD_EBUSY,
                       "settings wait for step %" PRIu64 ": give others from that step on, too, or "
                       "when it is over",
                       kept->from);
    struct settings_kept after = *kept;
    if (waits && kept->from != from)
        settle(&after, kept->from);
    if (after.next.count == 0) {
        after.next.count = change->count;
        for (uint32_t i = 0; i < change->count; i++)
            after.next.numbers[i] = (double)NAN;
    }
    CHECK(after.next.count == change->count);
    for (uint32_t i = 0; i < change->count; i++)
        if (!isnan(change->numbers[i]))
            after.next.numbers[i] = change->numbers[i];
    after.from = from;
    *ret_kept = after;
    *ret_from = from;
    return SHD_OK;
}
