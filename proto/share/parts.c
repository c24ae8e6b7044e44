/* See parts.h. */
#include "proto/share/parts.h"

#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/spec.h"

_Static_assert(PARTS_BYTES == SPEC_AUDIT_BYTES, "what a spec is checked by");

struct parts_unit {
    uint64_t round; /* plus 1; 0: none yet */
    uint32_t next;  /* groups below it are there */
    bool known;     /* all of them, from the first on */
};

struct parts {
    uint32_t units, groups;
    struct parts_unit *unit; /* [units], behind it */
    uint64_t *sessions;      /* [units][groups], behind that */
    uint8_t *sums;           /* [units][groups][FIXSUM_BYTES], behind that */
};

static uint64_t align16(uint64_t bytes)
{
    return (bytes + 15) & ~UINT64_C(15);
}

uint64_t parts_bytes(uint32_t units, uint32_t groups)
{
    return align16(sizeof(struct parts)) + align16(units * sizeof(struct parts_unit)) +
           (uint64_t)units * groups * PARTS_BYTES;
}

struct parts *parts_init(void *memory, uint32_t units, uint32_t groups)
{
    CHECK(units > 0 && groups > 0);
    struct parts *p = memory;
    uint8_t *at = (uint8_t *)memory + align16(sizeof *p);
    p->units = units;
    p->groups = groups;
    p->unit = (void *)at;
    at += align16(units * sizeof *p->unit);
    p->sessions = (void *)at;
    p->sums = at + (size_t)units * groups * sizeof *p->sessions;
    return p;
}

static size_t place(const struct parts *p, uint32_t unit, uint32_t group)
{
    CHECK(unit < p->units && group < p->groups);
    return (size_t)unit * p->groups + group;
}

/* As behind the group before; of none nothing. */
static void copy_before(const struct parts *p, uint32_t unit, uint32_t group, uint8_t *ret_bytes)
{
    if (group > 0)
        memcpy(ret_bytes, p->sums + place(p, unit, group - 1) * FIXSUM_BYTES, FIXSUM_BYTES);
    else
        memset(ret_bytes, 0, FIXSUM_BYTES);
}

void parts_take(struct parts *p, const struct part *part, const struct fixsum *sum)
{
    struct parts_unit *u = &p->unit[part->unit];
    const size_t at = place(p, part->unit, part->group);
    if (u->round != part->round + 1)
        *u = (struct parts_unit){ .round = part->round + 1, .known = part->first };
    if (!u->known || part->group < u->next)
        return;
    for (; u->next < part->group; u->next++) {
        const size_t none = place(p, part->unit, u->next);
        copy_before(p, part->unit, u->next, p->sums + none * FIXSUM_BYTES);
        p->sessions[none] = 0;
    }
    fixsum_pack(sum, p->sums + at * FIXSUM_BYTES);
    p->sessions[at] = part->session;
    u->next++;
}

static bool has_round(const struct parts *p, uint64_t round, uint32_t unit)
{
    CHECK(unit < p->units);
    return p->unit[unit].round == round + 1 && p->unit[unit].known;
}

bool parts_read(const struct parts *p, uint64_t round, uint32_t unit, uint32_t first,
                uint32_t count, uint8_t *ret_bytes)
{
    if (!has_round(p, round, unit))
        return false;
    CHECK(count <= p->groups && first <= p->groups - count);
    const uint32_t next = p->unit[unit].next;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t group = first + i;
        copy_before(p, unit, group < next ? group + 1 : next, ret_bytes + (size_t)i * FIXSUM_BYTES);
    }
    return true;
}

uint64_t parts_session(const struct parts *p, uint64_t round, uint32_t unit, uint32_t group)
{
    return has_round(p, round, unit) && group < p->unit[unit].next
               ? p->sessions[place(p, unit, group)]
               : 0;
}
