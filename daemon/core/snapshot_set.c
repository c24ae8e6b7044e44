/* See snapshot_set.h. */
#include "daemon/core/snapshot_set.h"

#include "daemon/core/ledger_rewind.h"
#include "daemon/core/step.h"
#include "proto/base/check.h"
#include "proto/base/status.h"

#define KEEP_DEFAULT 2u

static uint64_t options_of(const struct ledger *l)
{
    return l->rewind != NULL ? atomic_load(&l->rewind->options) : 0;
}

void snapshot_set_init(struct snapshot_set *s)
{
    *s = (struct snapshot_set){ .want = UINT64_MAX, .copying = SNAPSHOT_NO_ITEM };
}

uint64_t snapshot_set_every(const struct ledger *l)
{
    return ledger_snapshot_every(options_of(l));
}

void snapshot_set_options(struct ledger *l, uint64_t every, uint32_t keep)
{
    atomic_store_explicit(&l->rewind->options, ledger_snapshot_options(every, keep),
                          memory_order_release);
}

uint32_t snapshot_set_keep(const struct ledger *l)
{
    const uint32_t keep = ledger_snapshot_keep(options_of(l));
    return keep > 0 ? keep : KEEP_DEFAULT;
}

uint32_t snapshot_set_find(const struct snapshot_set *s, uint64_t step)
{
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state == SNAPSHOT_READY && s->items[i].step == step)
            return i;
    return SNAPSHOT_NO_ITEM;
}

uint32_t snapshot_set_in(const struct snapshot_set *s, enum snapshot_state state)
{
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state == state && s->items[i].lent == 0)
            return i;
    return SNAPSHOT_NO_ITEM;
}

bool snapshot_set_lent(const struct snapshot_set *s)
{
    uint32_t lent = 0;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        lent += s->items[i].lent;
    return lent > 0;
}

static bool is_copied_now(const struct snapshot_set *s, uint64_t step)
{
    return s->copying != SNAPSHOT_NO_ITEM && s->items[s->copying].step == step;
}

int snapshot_set_ask(struct snapshot_set *s, const struct step *core, uint64_t step)
{
    if (snapshot_set_find(s, step) != SNAPSHOT_NO_ITEM)
        return SHD_OK;
    if (is_copied_now(s, step))
        return SHD_EBUSY;
    if (step < step_collecting(core))
        return SHD_ESTEP;
    s->want = step;
    return SHD_EBUSY;
}

static bool is_wanted(const struct snapshot_set *s, const struct ledger *l, uint64_t step)
{
    const uint64_t every = snapshot_set_every(l);
    return s->want == step || (every > 0 && step > 0 && step % every == 0);
}

uint32_t snapshot_set_next(const struct snapshot_set *s, const struct ledger *l,
                           const struct step *core)
{
    const uint64_t step = step_now(core);
    uint64_t to;
    if (ledger_rewinding(l, &to) || step_phase(core) == STEP_APPLYING || !is_wanted(s, l, step) ||
        snapshot_set_find(s, step) != SNAPSHOT_NO_ITEM || s->copying != SNAPSHOT_NO_ITEM)
        return SNAPSHOT_NO_ITEM;
    return snapshot_set_in(s, SNAPSHOT_FREE);
}

void snapshot_set_begin(struct snapshot_set *s, uint32_t item, uint64_t step)
{
    CHECK(s->copying == SNAPSHOT_NO_ITEM && snapshot_item_is_free(&s->items[item]));
    s->items[item] = (struct snapshot_item){ .state = SNAPSHOT_COPYING, .step = step };
    s->copying = item;
    if (s->want == step)
        s->want = UINT64_MAX;
}

bool snapshot_set_copied(struct snapshot_set *s, const struct ledger *l, bool good,
                         uint32_t *ret_item)
{
    uint64_t to;
    CHECK(s->copying != SNAPSHOT_NO_ITEM);
    struct snapshot_item *item = &s->items[s->copying];
    *ret_item = s->copying;
    s->copying = SNAPSHOT_NO_ITEM;
    if (good && ledger_rewinding(l, &to) && item->step > to)
        good = false;
    if (!good)
        item->state = SNAPSHOT_FREE;
    return good;
}

uint32_t snapshot_set_excess(const struct snapshot_set *s, const struct ledger *l)
{
    const uint64_t held = l->rewind != NULL ? atomic_load(&l->rewind->held) : 0;
    uint32_t count = 0, oldest = SNAPSHOT_NO_ITEM;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++) {
        const struct snapshot_item *item = &s->items[i];
        if (item->state != SNAPSHOT_READY || item->step + 1 == held)
            continue;
        count++;
        if (oldest == SNAPSHOT_NO_ITEM || item->step < s->items[oldest].step)
            oldest = i;
    }
    return count > snapshot_set_keep(l) ? oldest : SNAPSHOT_NO_ITEM;
}

uint32_t snapshot_set_spare(const struct snapshot_set *s)
{
    uint32_t free = 0;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++) {
        free += snapshot_item_is_free(&s->items[i]);
        if (snapshot_item_is_free(&s->items[i]) && free > 1)
            return i;
    }
    return SNAPSHOT_NO_ITEM;
}

uint32_t snapshot_set_later(struct snapshot_set *s, uint64_t step)
{
    s->want = UINT64_MAX;
    for (uint32_t i = 0; i < LEDGER_SNAPSHOTS; i++)
        if (s->items[i].state == SNAPSHOT_READY && s->items[i].step > step)
            return i;
    return SNAPSHOT_NO_ITEM;
}
