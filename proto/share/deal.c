/* See deal.h. */
#include "proto/share/deal.h"

#include <inttypes.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/spec/spec.h"

struct load { /* an owner, and what it has of whole units */
    uint64_t elems;
    uint32_t owner;
};

static bool before(const struct load *a, const struct load *b)
{
    return a->elems != b->elems ? a->elems < b->elems : a->owner < b->owner;
}

/* heap[0] has grown: down it goes, so that the least is at the top again. */
static void settle(struct load *heap, uint32_t count)
{
    for (uint32_t at = 0;;) {
        uint32_t least = at;
        for (uint32_t child = 2 * at + 1; child < count && child <= 2 * at + 2; child++)
            if (before(&heap[child], &heap[least]))
                least = child;
        if (least == at)
            return;
        const struct load moved = heap[at];
        heap[at] = heap[least];
        heap[least] = moved;
        at = least;
    }
}

static int by_size(const void *a, const void *b, void *arg)
{
    const struct spec *spec = arg;
    const uint32_t i = *(const uint32_t *)a, k = *(const uint32_t *)b;
    const uint64_t x = spec->units[i].elems, y = spec->units[k].elems;
    return x != y ? (x < y) - (x > y) : (i > k) - (i < k);
}

int deal_units(const struct spec *spec, uint32_t owners, uint32_t **ret_owner_of, struct shd_err *e)
{
    CHECK(owners > 0 && owners <= SHD_OWNERS_MAX);
    uint32_t *owner_of = sys_calloc(spec->unit_count, sizeof *owner_of);
    uint32_t *order = sys_calloc(spec->unit_count, sizeof *order);
    if (owner_of == NULL || order == NULL) {
        free(owner_of);
        free(order);
        return err_set(e, SHD_ENOMEM, "no memory to place %" PRIu32 " units", spec->unit_count);
    }
    struct load heap[SHD_OWNERS_MAX];
    for (uint32_t i = 0; i < owners; i++)
        heap[i] = (struct load){ .owner = i }; /* in order: a heap */
    uint32_t count = 0;
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        owner_of[u] = DEAL_SPREAD;
        if (spec->units[u].whole)
            order[count++] = u;
    }
    qsort_r(order, count, sizeof *order, by_size, (void *)spec);
    for (uint32_t i = 0; i < count; i++) {
        owner_of[order[i]] = heap[0].owner;
        heap[0].elems += spec->units[order[i]].elems;
        settle(heap, owners);
    }
    free(order);
    *ret_owner_of = owner_of;
    return SHD_OK;
}

struct slice deal_slice(uint64_t elems, uint32_t whole_owner, uint32_t owner, uint32_t owners)
{
    if (whole_owner == DEAL_SPREAD)
        return layout_slice(elems, owner, owners);
    return (struct slice){ 0, whole_owner == owner ? elems : 0 };
}
