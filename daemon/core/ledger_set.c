/* See ledger_set.h. */
#include "daemon/core/ledger_set.h"

#include <math.h>
#include <string.h>

#include "daemon/core/ledger.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/status.h"

bool ledger_settings_room(const struct ledger *l)
{
    return l->set != NULL || l->settings != NULL;
}

/* -- Older versions ---------------------------------------------------------------------------- */

static bool old_plausible(const struct settings_old *s)
{
    return s->count == 0 || (s->count > SETTINGS_RATES && s->count <= SETTINGS_OLD_MAX &&
                             (s->count - 1) % SETTINGS_RATES == 0);
}

static bool old_kept_plausible(const struct settings_old_kept *k)
{
    return old_plausible(&k->now) && old_plausible(&k->next) &&
           (k->now.count == 0 || k->next.count == 0 || k->now.count == k->next.count) &&
           k->from <= LEDGER_STEP_MAX;
}

/* Its numbers lie where they do now, before those that it does not know. */
void ledger_settings_from_old(const struct settings_old_kept *old, struct settings_kept *ret_kept)
{
    const uint32_t known = old->now.count > 0 ? old->now.count : old->next.count;
    const uint32_t count = known > 0 ? settings_count((known - 1) / SETTINGS_RATES) : 0;
    ret_kept->now.count = count;
    ret_kept->waiting = ret_kept->id = ret_kept->id_from = 0;
    for (uint32_t i = 0; i < count; i++) {
        ret_kept->now.numbers[i] = i < old->now.count ? old->now.numbers[i] : (double)NAN;
        ret_kept->since[i] = i < old->now.count ? old->since[i] : 0;
    }
    for (uint32_t i = 0; i < old->next.count; i++)
        if (!isnan(old->next.numbers[i]))
            ret_kept->waits[ret_kept->waiting++] = (struct settings_wait){
                .from = old->from, .value = old->next.numbers[i], .index = i
            };
}

/* False: there is no room for all of it. */
static bool to_old(const struct settings_kept *kept, struct settings_old_kept *ret_old)
{
    const uint32_t known = settings_old_count(kept->now.count);
    *ret_old = (struct settings_old_kept){ .now.count = known };
    memcpy(ret_old->now.numbers, kept->now.numbers, known * sizeof(double));
    memcpy(ret_old->since, kept->since, known * sizeof *kept->since);
    if (settings_kept_new(kept) || kept->waiting == 0)
        return !settings_kept_new(kept);
    ret_old->from = kept->waits[0].from;
    ret_old->next.count = known;
    for (uint32_t i = 0; i < known; i++)
        ret_old->next.numbers[i] = (double)NAN;
    for (uint64_t i = 0; i < kept->waiting; i++)
        ret_old->next.numbers[kept->waits[i].index] = kept->waits[i].value;
    return true;
}

static uint64_t given_old(const struct ledger *l)
{
    return atomic_load_explicit(&l->set->given, memory_order_relaxed);
}

static uint64_t given(const struct ledger *l)
{
    return atomic_load_explicit(&l->settings->given, memory_order_relaxed);
}

/* -- What is kept ------------------------------------------------------------------------------ */

const struct settings_kept *ledger_settings(const struct ledger *l, struct settings_kept *room)
{
    if (l->settings != NULL)
        return &l->settings->kept[given(l) & 1];
    if (l->set == NULL)
        return NULL;
    ledger_settings_from_old(&l->set->kept[given_old(l) & 1], room);
    return room;
}

int ledger_settings_keep(const struct ledger *l, const struct settings_kept *kept,
                         struct shd_err *e)
{
    static const char text[] =
        "the model was opened by an older build, whose ledger has no room for %s: save it, and "
        "restore it in this one (shardctl restore --replace)";
    struct settings_old_kept old;
    _Atomic uint64_t *word;
    uint64_t next;
    if (!ledger_settings_room(l))
        return err_set(e, SHD_ENOTSUP, text, "settings");
    if (l->settings == NULL && !to_old(kept, &old))
        return err_set(e, SHD_ENOTSUP, text,
                       "micro_batches, eps, or changes that wait for several steps");
    if (l->settings != NULL) {
        next = given(l) + 1;
        word = &l->settings->given;
        l->settings->kept[next & 1] = *kept;
    } else {
        next = given_old(l) + 1;
        word = &l->set->given;
        l->set->kept[next & 1] = old;
    }
    FAIL_POINT("step:set:before");
    atomic_store_explicit(word, next, memory_order_release);
    FAIL_POINT("step:set:after");
    return SHD_OK;
}

bool ledger_settings_plausible(const struct ledger *l)
{
    struct settings_kept room;
    if (!ledger_settings_room(l))
        return true;
    if (l->set != NULL && !old_kept_plausible(&l->set->kept[given_old(l) & 1]))
        return false;
    const struct settings_kept *kept = ledger_settings(l, &room);
    CHECK(kept != NULL);
    return settings_kept_plausible(kept) &&
           (kept->waiting == 0 || kept->waits[kept->waiting - 1].from <= LEDGER_STEP_MAX);
}
