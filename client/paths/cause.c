/* See cause.h. */
#include "client/paths/cause.h"

#include <inttypes.h>

#include "proto/base/check.h"

static uint32_t page_count(const struct cause *c)
{
    const uint32_t left = c->count - c->first;
    return left < WIRE_UNIT_SUMS_MAX ? left : WIRE_UNIT_SUMS_MAX;
}

static void begin_page(struct cause *c)
{
    for (uint32_t i = 0; i < WIRE_UNIT_SUMS_MAX; i++) {
        fixsum_init(&c->sums[i]);
        c->finite[i] = true;
    }
}

void cause_begin(struct cause *c, uint32_t count, bool groups, bool infinite)
{
    CHECK(count > 0);
    c->count = count;
    c->groups = groups;
    c->infinite = infinite;
    c->first = c->found = 0;
    fixsum_init(&c->largest);
    fixsum_init(&c->before);
    begin_page(c);
}

int cause_take(struct cause *c, const struct wire_bytes *sums, struct shd_err *e)
{
    const uint32_t count = page_count(c);
    if (sums->bytes != (size_t)count * FIXSUM_BYTES)
        return err_set(e, SHD_EPROTO, "%zu bytes are not the sums of %" PRIu32 " %s from %" PRIu32,
                       sums->bytes, count, c->groups ? "micro-batches" : "units", c->first);
    for (uint32_t i = 0; i < count; i++) {
        struct fixsum sum;
        bool none;
        if (!fixsum_unpack(sums->data + (size_t)i * FIXSUM_BYTES, &sum, &none))
            return err_set(e, SHD_EPROTO, "the sum of squares of %s %" PRIu32 " is none",
                           c->groups ? "micro-batch" : "unit", c->first + i);
        fixsum_merge(&c->sums[i], &sum);
        c->finite[i] = c->finite[i] && !none;
    }
    return SHD_OK;
}

/* What is compared: a sum, or by how much it is above the one before it. */
static struct fixsum value_of(struct cause *c, uint32_t i)
{
    struct fixsum value;
    fixsum_carry(&c->sums[i]);
    if (!c->groups)
        return c->sums[i];
    fixsum_init(&value);
    if (fixsum_compare(&c->sums[i], &c->before) > 0)
        value = fixsum_difference(&c->sums[i], &c->before);
    c->before = c->sums[i];
    return value;
}

bool cause_next(struct cause *c)
{
    const uint32_t count = page_count(c);
    for (uint32_t i = 0; i < count; i++) {
        if (c->infinite && !c->finite[i]) {
            c->found = c->first + i + 1;
            return false;
        }
        const struct fixsum value = value_of(c, i);
        if (c->infinite || fixsum_compare(&value, &c->largest) <= 0)
            continue;
        c->found = c->first + i + 1;
        c->largest = value;
    }
    c->first += count;
    if (c->first == c->count)
        return false;
    begin_page(c);
    return true;
}
