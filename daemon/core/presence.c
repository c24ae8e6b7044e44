/* See presence.h. */
#include "daemon/core/presence.h"

#include <stdatomic.h>
#include <stddef.h>

#include "daemon/core/ledger.h"
#include "proto/base/failpoint.h"

enum presence presence_of(const struct ledger_head *h)
{
    if (atomic_load(&h->ready) != 0)
        return PRESENCE_OPEN;
    return ledger_filled(h) ? PRESENCE_WAITS : PRESENCE_NONE;
}

#define TWIN_OF_UNKNOWN UINT64_MAX

void presence_twin(struct ledger_head *h, uint64_t instance)
{
    if (h->owner > 0)
        return; /* it is one of the others anyway */
    const uint64_t old = atomic_load(&h->twin_of);
    const uint64_t now = instance != 0 ? instance : old != 0 ? old : TWIN_OF_UNKNOWN;
    if (now != old)
        atomic_store_explicit(&h->twin_of, now, memory_order_release);
}

uint64_t presence_first(const struct ledger_head *h)
{
    const uint64_t instance = atomic_load(&h->twin_of);
    return instance != TWIN_OF_UNKNOWN ? instance : 0;
}

void presence_fill(struct ledger_head *h, uint64_t origin)
{
    if (!ledger_follows(h))
        return; /* its word is `ready` */
    FAIL_POINT("create:full:before");
    atomic_store_explicit(&h->origin, origin, memory_order_release);
    FAIL_POINT("create:full:after");
}

void presence_open(struct ledger_head *h, uint64_t origin)
{
    atomic_store_explicit(&h->origin, origin, memory_order_release);
    FAIL_POINT("create:ready:before");
    atomic_store_explicit(&h->ready, 1, memory_order_release);
    FAIL_POINT("create:ready:after");
}

void presence_withdraw(struct ledger_head *h)
{
    atomic_store(&h->origin, 0);
}

void presence_hold(struct ledger_head *h, uint64_t first, bool replica)
{
    if ((h->owner == 0 && !replica) || first == 0)
        return;
    presence_twin(h, first); /* before: as owner 0 it goes by what the others are held with */
    FAIL_POINT("drop:hold:before");
    atomic_store_explicit(&h->first, first, memory_order_release);
    FAIL_POINT("drop:hold:after");
}

/* Of an owner but the first `origin` would keep it; of the first the others know it by that, as
 * long as it is there. */
void presence_end(struct ledger_head *h)
{
    FAIL_POINT("drop:ready:before");
    if (ledger_follows(h))
        atomic_store_explicit(&h->origin, 0, memory_order_release);
    FAIL_POINT("drop:ready:between");
    atomic_store_explicit(&h->ready, 0, memory_order_release);
    FAIL_POINT("drop:ready:after");
}

bool presence_goes_with(const struct ledger_head *h, uint64_t first)
{
    return ledger_follows(h) && first != 0 && atomic_load(&h->first) == first;
}

enum presence_told presence_hear(const struct ledger_head *h, const struct presence_word *word)
{
    if (word->own)
        return PRESENCE_KEEP;
    if (atomic_load(&h->ready) == 0) {
        if (!word->told)
            return PRESENCE_ASK;
        return word->origin == atomic_load(&h->origin) ? PRESENCE_KEEP : PRESENCE_DROP;
    }
    const uint64_t first = atomic_load(&h->first);
    if (first == 0 || first == word->first)
        return PRESENCE_KEEP;
    return word->first == 0 ? PRESENCE_ASK : PRESENCE_DROP;
}
