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

static void clear(struct settings *settings, uint32_t count)
{
    settings->count = count;
    for (uint32_t i = 0; i < count; i++)
        settings->numbers[i] = (double)NAN;
}

void settings_init(struct settings *settings, const struct spec *spec)
{
    CHECK(spec->group_count <= SHD_GROUPS_MAX);
    clear(settings, settings_count(spec->group_count));
}

/* -- Names and limits -------------------------------------------------------------------------- */

enum number_kind { NUMBER_CLIP_NORM, NUMBER_RATE, NUMBER_MICROS, NUMBER_EPS };

struct number { /* what an index stands for */
    enum number_kind kind;
    uint32_t group;
    enum setting_rate rate;
};

static struct number number_of(uint32_t count, uint32_t index)
{
    const uint32_t micros = setting_micros(settings_groups(count));
    if (index == SETTINGS_CLIP_NORM)
        return (struct number){ .kind = NUMBER_CLIP_NORM };
    if (index == micros)
        return (struct number){ .kind = NUMBER_MICROS };
    if (index > micros)
        return (struct number){ .kind = NUMBER_EPS, .group = index - micros - 1 };
    return (struct number){ .kind = NUMBER_RATE,
                            .group = (index - 1) / SETTINGS_RATES,
                            .rate = (enum setting_rate)((index - 1) % SETTINGS_RATES) };
}

/* NULL: the group has no such number. */
static const char *name_of(const struct spec *spec, const struct number *n)
{
    if (n->kind == NUMBER_CLIP_NORM)
        return "clip_norm";
    if (n->kind == NUMBER_MICROS)
        return "micro_batches";
    const struct spec_optimizer_row *row =
        &spec_optimizer_rows[spec_group_optimizer(spec, n->group)];
    if (spec->groups[n->group].mean)
        return NULL;
    if (n->kind == NUMBER_EPS)
        return row->eps_key;
    switch (n->rate) {
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

/* Of any model; eps as in a spec (spec_optimizer.c). */
static bool in_limits(const struct number *n, double x)
{
    const bool beta = n->kind == NUMBER_RATE &&
                      (n->rate == SETTING_BETA1 || n->rate == SETTING_BETA2);
    if (n->kind == NUMBER_MICROS)
        return x >= 1 && x <= SHD_MICROS_MAX && x == floor(x);
    return x >= (n->kind == NUMBER_EPS ? (double)FLT_MIN : 0) &&
           x <= (beta ? SPEC_BETA_MAX : (double)FLT_MAX);
}

const char *setting_name(const struct spec *spec, uint32_t index, char *buf, uint32_t bytes)
{
    const struct number n = number_of(settings_count(spec->group_count), index);
    CHECK(n.group < spec->group_count);
    const char *name = name_of(spec, &n);
    if (n.kind == NUMBER_CLIP_NORM || n.kind == NUMBER_MICROS)
        snprintf(buf, bytes, "%s", name);
    else
        snprintf(buf, bytes, "%s.%s", name != NULL ? name : "?", spec->groups[n.group].name);
    return buf;
}

/* Both in torch's order: Nesterov's sum is of a momentum. */
static int check_momentum(const struct spec *spec, uint32_t index, const struct number *n, double x,
                          struct shd_err *e)
{
    char name[SETTING_NAME_BYTES];
    if (!spec->torch.nesterov || n->kind != NUMBER_RATE || n->rate != SETTING_BETA1 || x != 0 ||
        spec->groups[n->group].muon != NULL)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "%s is 0, and the optimizer is with nesterov: it needs a momentum",
                   setting_name(spec, index, name, sizeof name));
}

/* Memory is laid out for spec->micro_batches. */
static int check_micros(const struct spec *spec, double x, struct shd_err *e)
{
    if (x > spec->micro_batches)
        return err_set(e, SHD_ERANGE,
                       "micro_batches is %.10g, and the owners' memory is laid out for %" PRIu32
                       ": a spec with \"micro_batches_max\" has room for more (restore the weights "
                       "into a model with one: shardctl restore --weights)",
                       x, spec->micro_batches);
    if (x < 1 || x != floor(x))
        return err_set(e, SHD_ERANGE,
                       "micro_batches is %.10g, must be a whole number, 1 to %" PRIu32, x,
                       spec->micro_batches);
    if ((uint32_t)x % spec->accumulate != 0)
        return err_set(e, SHD_EINVAL,
                       "micro_batches is %.10g, and the model's accumulate, %" PRIu32
                       ", must divide it: say %" PRIu32 " or %" PRIu32,
                       x, spec->accumulate,
                       (uint32_t)x < spec->accumulate
                           ? spec->accumulate
                           : (uint32_t)x / spec->accumulate * spec->accumulate,
                       ((uint32_t)x / spec->accumulate + 1) * spec->accumulate);
    return SHD_OK;
}

static int err_limits(const struct spec *spec, uint32_t index, const struct number *n, double x,
                      struct shd_err *e)
{
    char name[SETTING_NAME_BYTES];
    setting_name(spec, index, name, sizeof name);
    if (n->kind == NUMBER_EPS)
        return err_set(e, SHD_ERANGE, "%s is %g, must be %.8g to %.8g", name, x, (double)FLT_MIN,
                       (double)FLT_MAX);
    const bool beta = n->kind == NUMBER_RATE &&
                      (n->rate == SETTING_BETA1 || n->rate == SETTING_BETA2);
    return err_set(e, SHD_ERANGE, "%s is %g, must be 0 to %.8g", name, x,
                   beta ? SPEC_BETA_MAX : (double)FLT_MAX);
}

static int check_number(const struct spec *spec, uint32_t index, double x, bool change,
                        struct shd_err *e)
{
    const struct number n = number_of(settings_count(spec->group_count), index);
    if (isnan(x))
        return SHD_OK;
    if (name_of(spec, &n) == NULL)
        return err_set(e, SHD_EINVAL, "group '%.60s' has no such setting: its optimizer is %s",
                       spec->groups[n.group].name,
                       spec_optimizer_rows[spec_group_optimizer(spec, n.group)].kind);
    if (change && (x == SETTINGS_BACK || x == SETTINGS_STAY))
        return SHD_OK;
    if (n.kind == NUMBER_MICROS)
        return check_micros(spec, x, e);
    return in_limits(&n, x) ? check_momentum(spec, index, &n, x, e)
                            : err_limits(spec, index, &n, x, e);
}

int settings_check(const struct spec *spec, const struct settings *settings, bool change,
                   struct shd_err *e)
{
    const uint32_t count = settings_count(spec->group_count);
    int r = SHD_OK;
    if (settings->count != 0 && settings->count != count)
        return err_set(e, SHD_EINVAL,
                       "settings are of %" PRIu32 " groups, model '%.60s' has %" PRIu32,
                       settings_groups(settings->count), spec->name, spec->group_count);
    for (uint32_t i = 0; r == SHD_OK && i < settings->count; i++)
        r = check_number(spec, i, settings->numbers[i], change, e);
    return r;
}

bool settings_plausible(const struct settings *settings, bool change)
{
    const uint32_t groups = settings_groups(settings->count);
    bool good = settings->count == 0 || (groups > 0 && groups <= SHD_GROUPS_MAX &&
                                         settings->count == settings_count(groups));
    for (uint32_t i = 0; good && i < settings->count; i++) {
        const struct number n = number_of(settings->count, i);
        const double x = settings->numbers[i];
        good = isnan(x) || in_limits(&n, x) ||
               (change && (x == SETTINGS_BACK || x == SETTINGS_STAY));
    }
    return good;
}

static int err_bytes(const struct settings_bytes *bytes, struct shd_err *e)
{
    return err_set(e, SHD_EPROTO, "%zu and %zu bytes are no settings", bytes->old_bytes,
                   bytes->more_bytes);
}

int settings_unpack(const struct settings_bytes *bytes, bool change, struct settings *ret_settings,
                    struct shd_err *e)
{
    const size_t one = sizeof(double), old = bytes->old_bytes / one;
    struct settings s = { .count = 0 };
    if (bytes->old_bytes == 0 && bytes->more_bytes == 0) {
        ret_settings->count = 0;
        return SHD_OK;
    }
    if (bytes->old_bytes % one != 0 || old <= SETTINGS_RATES || old > SETTINGS_OLD_MAX ||
        (old - 1) % SETTINGS_RATES != 0)
        return err_bytes(bytes, e);
    clear(&s, settings_count((uint32_t)(old - 1) / SETTINGS_RATES));
    memcpy(s.numbers, bytes->old, bytes->old_bytes);
    if (bytes->more_bytes != 0 && bytes->more_bytes != (s.count - old) * one)
        return err_bytes(bytes, e);
    if (bytes->more_bytes != 0)
        memcpy(&s.numbers[old], bytes->more, bytes->more_bytes);
    if (!settings_plausible(&s, change))
        return err_set(e, SHD_EPROTO, "%" PRIu32 " numbers that are no settings", s.count);
    *ret_settings = s;
    return SHD_OK;
}

bool settings_new(const struct settings *settings)
{
    bool any = false;
    for (uint32_t i = settings_old_count(settings->count); i < settings->count; i++)
        any = any || !isnan(settings->numbers[i]);
    return any;
}

struct settings_bytes settings_pack(const struct settings *settings)
{
    const uint32_t old = settings_old_count(settings->count);
    struct settings_bytes b = { .old = settings->numbers, .old_bytes = old * sizeof(double) };
    if (!settings_new(settings))
        return b;
    b.more = &settings->numbers[old];
    b.more_bytes = (settings->count - old) * sizeof(double);
    return b;
}

/* -- Looking ----------------------------------------------------------------------------------- */

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

static bool any_number(const struct settings *s)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (!isnan(s->numbers[i]))
            return true;
    return false;
}

static void state_at(const struct settings_kept *kept, uint64_t step, struct settings *ret_settings,
                     uint64_t *ret_since)
{
    const uint32_t count = kept->now.count;
    ret_settings->count = count;
    memcpy(ret_settings->numbers, kept->now.numbers, count * sizeof(double));
    if (ret_since != NULL)
        memcpy(ret_since, kept->since, count * sizeof *ret_since);
    for (uint64_t i = 0; i < kept->waiting && kept->waits[i].from <= step; i++) {
        const struct settings_wait *w = &kept->waits[i];
        const double then = changed(ret_settings->numbers[w->index], w->value);
        if (ret_since != NULL && !same(ret_settings->numbers[w->index], then))
            ret_since[w->index] = w->from;
        ret_settings->numbers[w->index] = then;
    }
}

void settings_at(const struct settings_kept *kept, uint64_t step, struct settings *ret_settings,
                 uint64_t *ret_since)
{
    state_at(kept, step, ret_settings, ret_since);
    if (!any_number(ret_settings))
        ret_settings->count = 0;
}

static double number_at(const struct settings_kept *kept, uint32_t index, uint64_t step)
{
    double x = setting_get(&kept->now, index);
    for (uint64_t i = 0; i < kept->waiting && kept->waits[i].from <= step; i++)
        if (kept->waits[i].index == index)
            x = changed(x, kept->waits[i].value);
    return x;
}

uint32_t settings_micro_batches(const struct settings_kept *kept, uint64_t step)
{
    const uint32_t index = setting_micros(settings_groups(kept->now.count));
    const double x = number_at(kept, index, step);
    return isnan(x) ? 0 : (uint32_t)x;
}

bool settings_any(const struct settings_kept *kept)
{
    return any_number(&kept->now) || kept->waiting > 0;
}

bool settings_kept_plausible(const struct settings_kept *kept)
{
    bool good = settings_plausible(&kept->now, /* change= */ false) &&
                kept->waiting <= SETTINGS_WAITS_MAX;
    for (uint64_t i = 0; good && i < kept->waiting; i++) {
        const struct settings_wait *w = &kept->waits[i];
        good = w->index < kept->now.count && (i == 0 || w->from >= kept->waits[i - 1].from);
        if (!good)
            break;
        const struct number n = number_of(kept->now.count, (uint32_t)w->index);
        good = w->value == SETTINGS_BACK || in_limits(&n, w->value);
    }
    return good;
}

bool settings_kept_new(const struct settings_kept *kept)
{
    bool any = settings_new(&kept->now);
    for (uint64_t i = 0; i < kept->waiting; i++)
        any = any || kept->waits[i].index >= settings_old_count(kept->now.count) ||
              kept->waits[i].from != kept->waits[0].from;
    return any;
}

int settings_check_kept(const struct spec *spec, const struct settings_kept *kept,
                        struct shd_err *e)
{
    struct shd_err why = { 0 };
    int r = settings_check(spec, &kept->now, /* change= */ false, &why);
    if (r == SHD_OK && !settings_kept_plausible(kept))
        r = err_set(&why, SHD_ESEGMENT, "settings that wait are none");
    for (uint64_t i = 0; r == SHD_OK && i < kept->waiting; i++)
        r = check_number(spec, (uint32_t)kept->waits[i].index, kept->waits[i].value,
                         /* change= */ true, &why);
    return r == SHD_OK ? r : err_set(e, SHD_ESEGMENT, "ledger's %.200s", why.text);
}

/* -- Changing ---------------------------------------------------------------------------------- */

/* At `step` nothing would be another number than it is. *ret_from: since when. */
static bool is_there(const struct settings_kept *kept, const struct settings *change, uint64_t step,
                     uint64_t *ret_from)
{
    struct settings all;
    uint64_t since[SETTINGS_MAX], from = 0;
    state_at(kept, step, &all, since);
    for (uint32_t i = 0; i < change->count; i++) {
        const double x = change->numbers[i];
        if (isnan(x))
            continue;
        if (x == SETTINGS_STAY || !same(setting_get(&all, i), changed((double)NAN, x)))
            return false;
        if (i < all.count && since[i] > from)
            from = since[i];
    }
    *ret_from = from;
    return from <= step;
}

static bool any_waits_for(const struct settings_kept *kept, uint64_t step)
{
    for (uint64_t i = 0; i < kept->waiting; i++)
        if (kept->waits[i].from == step)
            return true;
    return false;
}

void settings_settle(struct settings_kept *kept, uint64_t step)
{
    struct settings now;
    uint64_t since[SETTINGS_MAX], over = 0;
    while (over < kept->waiting && kept->waits[over].from <= step)
        over++;
    if (over == 0)
        return;
    state_at(kept, step, &now, since);
    memcpy(kept->now.numbers, now.numbers, now.count * sizeof(double));
    memcpy(kept->since, since, now.count * sizeof *since);
    kept->waiting -= over;
    memmove(kept->waits, kept->waits + over, kept->waiting * sizeof *kept->waits);
}

static bool comes_before(const struct settings_wait *a, const struct settings_wait *b)
{
    return a->from < b->from || (a->from == b->from && a->index < b->index);
}

/* False: there is no room. */
static bool wait_for(struct settings_kept *kept, const struct settings_wait *wait)
{
    uint64_t at = 0;
    while (at < kept->waiting && comes_before(&kept->waits[at], wait))
        at++;
    if (at < kept->waiting && !comes_before(wait, &kept->waits[at])) {
        kept->waits[at].value = wait->value;
        return true;
    }
    if (kept->waiting == SETTINGS_WAITS_MAX)
        return false;
    memmove(kept->waits + at + 1, kept->waits + at, (kept->waiting - at) * sizeof *kept->waits);
    kept->waits[at] = *wait;
    kept->waiting++;
    return true;
}

/* at 0: whatever it waits for; what is in force at the open step waits no more. */
static void give_up(struct settings_kept *kept, uint64_t index, const struct settings_when *when)
{
    uint64_t left = 0;
    for (uint64_t i = 0; i < kept->waiting; i++) {
        const struct settings_wait *w = &kept->waits[i];
        if (w->index != index || w->from <= when->open || (when->at != 0 && w->from != when->at))
            kept->waits[left++] = *w;
    }
    kept->waiting = left;
}

static int err_early(const struct settings *change, uint64_t from, uint64_t earliest,
                     const struct settings_when *when, struct shd_err *e)
{
    const double micros = setting_get(change, setting_micros(settings_groups(change->count)));
    if (!isnan(micros) && from == when->open)
        return err_set(e, SHD_ESTEP,
                       "step %" PRIu64 " has begun with its micro-batches: from step %" PRIu64
                       " on their number can be changed",
                       from, earliest);
    return err_set(e, SHD_ESTEP,
                   "step %" PRIu64 " is decided, or about to be: from step %" PRIu64
                   " on it can be changed",
                   from, earliest);
}

/* False: there is no room. */
static bool add_change(struct settings_kept *kept, const struct settings *change, uint64_t from,
                       const struct settings_when *when)
{
    bool room = true;
    for (uint32_t i = 0; room && i < change->count; i++) {
        const double x = change->numbers[i];
        if (x == SETTINGS_STAY)
            give_up(kept, i, when);
        else if (!isnan(x))
            room = wait_for(kept, &(struct settings_wait){ from, x, i });
    }
    return room;
}

/* Changes that hold by now are known one by one for as long as there is room. */
static int put_change(struct settings_kept *kept, const struct settings *change, uint64_t from,
                      const struct settings_when *when, struct shd_err *e)
{
    struct settings_kept after = *kept;
    if (after.now.count == 0) {
        clear(&after.now, change->count);
        memset(after.since, 0, change->count * sizeof *after.since);
    }
    CHECK(after.now.count == change->count);
    bool room = add_change(&after, change, from, when);
    if (!room) {
        after = *kept;
        settings_settle(&after, when->open);
        room = add_change(&after, change, from, when);
    }
    if (room)
        *kept = after;
    return room ? SHD_OK
                : err_set(e, SHD_EBUSY,
                          "%u changes of one number each wait for their steps, and there is room "
                          "for no more: give some up (KEY=now), or wait",
                          SETTINGS_WAITS_MAX);
}

int settings_give(const struct settings_kept *kept, const struct settings *change,
                  const struct settings_when *when, struct settings_kept *ret_kept,
                  uint64_t *ret_from, struct shd_err *e)
{
    const uint32_t micros = setting_micros(settings_groups(change->count));
    const bool later = !isnan(setting_get(change, micros)) && when->earliest == when->open;
    const uint64_t at = when->at, earliest = when->earliest + later;
    CHECK(change->count > 0);
    if (when->id != 0 && when->id == kept->id) {
        *ret_kept = *kept;
        *ret_from = kept->id_from;
        return SHD_OK;
    }
    uint64_t from = at != 0 ? at : earliest, there;
    if (at == 0 && earliest == when->open && any_waits_for(kept, when->open + 1))
        from = when->open + 1; /* the step has begun again since that was given */
    if (is_there(kept, change, from, &there)) {
        *ret_kept = *kept;
        *ret_from = there;
        return SHD_OK;
    }
    if (from < earliest)
        return err_early(change, from, earliest, when, e);
    struct settings_kept after = *kept;
    const int r = put_change(&after, change, from, when, e);
    if (r != SHD_OK)
        return r;
    after.id = when->id;
    after.id_from = from;
    *ret_kept = after;
    *ret_from = from;
    return SHD_OK;
}

/* -- What was given before a rewind ------------------------------------------------------------ */

/* Two that are compared: a number of them, from a step on. */
struct comparing {
    const struct settings_kept *was, *kept;
    uint32_t index;
    uint64_t from;
};

static void compare_at(const struct comparing *c, uint64_t step, uint64_t *first)
{
    if (step >= c->from && step < *first &&
        !same(number_at(c->was, c->index, step), number_at(c->kept, c->index, step)))
        *first = step;
}

static void compare_waits(const struct comparing *c, const struct settings_kept *waits,
                          uint64_t *first)
{
    for (uint64_t i = 0; i < waits->waiting; i++)
        if (waits->waits[i].index == c->index)
            compare_at(c, waits->waits[i].from, first);
}

/* The open step has its micro-batches. */
static struct comparing comparing(const struct settings_kept *was, const struct settings_kept *kept,
                                  uint32_t index, uint64_t open)
{
    const uint64_t from = open + (index == setting_micros(settings_groups(was->now.count)));
    const bool known = !isnan(setting_get(&was->now, index)) && was->since[index] > from;
    return (struct comparing){ was, kept, index, known ? was->since[index] : from };
}

bool settings_lacks(const struct settings_kept *was, const struct settings_kept *kept,
                    uint64_t from, struct settings *ret_change, uint64_t *ret_step)
{
    const uint32_t count = was->now.count;
    uint64_t first = UINT64_MAX;
    for (uint32_t i = 0; i < count; i++) {
        const struct comparing c = comparing(was, kept, i, from);
        compare_at(&c, c.from, &first);
        compare_waits(&c, was, &first);
        compare_waits(&c, kept, &first);
    }
    if (first == UINT64_MAX)
        return false;
    clear(ret_change, count);
    for (uint32_t i = 0; i < count; i++) {
        const struct comparing c = comparing(was, kept, i, from);
        const double then = number_at(was, i, first);
        if (first >= c.from && !same(then, number_at(kept, i, first)))
            ret_change->numbers[i] = isnan(then) ? SETTINGS_BACK : then;
    }
    *ret_step = first;
    return true;
}

bool settings_keep(const struct settings_kept *was, uint64_t from, struct settings_kept *kept)
{
    const struct settings_when when = { .open = from };
    struct settings_kept all = *kept;
    struct settings change;
    struct shd_err ignored;
    uint64_t step;
    while (settings_lacks(was, &all, from, &change, &step))
        if (put_change(&all, &change, step, &when, &ignored) != SHD_OK)
            return false;
    all.id = was->id;
    all.id_from = was->id_from;
    *kept = all;
    return true;
}
