/* What a step came from that is to be skipped: the unit whose part of the mean gradient has the
 * largest norm, the first of equals; or, where gradients are not finite, the first unit with one
 * that is not. Then, of a model with guard_audit, which group of micro-batches raised that unit's
 * sum of squares most, or made it infinite.
 *
 * Owners know the sums of squares of their slices: of each unit, or of one unit behind each group
 * (proto/share/parts.h). They are asked for them page by page; each page's are added exactly
 * (proto/base/fixsum.h), compared exactly, and forgotten. So the answer is the same for any number
 * of owners, and takes the memory of one page. Nothing of this is done in a step that counts. Pure.
 */
#ifndef SHD_CAUSE_H
#define SHD_CAUSE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/decision.h"
#include "proto/base/fixsum.h"
#include "proto/base/status.h"
#include "proto/wire/wire.h"

struct cause {
    uint32_t count; /* of units, or groups */
    bool groups;    /* each sum is compared with the one before it */
    bool infinite;  /* it is looked for the first that is not finite */
    uint32_t first; /* of the page */
    uint32_t found; /* 1 + the one found so far; 0: none */
    struct fixsum largest, before;
    struct fixsum sums[WIRE_UNIT_SUMS_MAX]; /* of the page, of the owners that have answered */
    bool finite[WIRE_UNIT_SUMS_MAX];
};

/* count > 0. */
void cause_begin(struct cause *c, uint32_t count, bool groups, bool infinite);

/* An owner's answer for the page from c->first on. SHD_EPROTO: it is none. */
int cause_take(struct cause *c, const struct wire_bytes *sums, struct shd_err *e);

/* All owners have answered. True: the next page is to be asked for, from c->first on; else
 * c->found and c->largest are what there is to be found. */
bool cause_next(struct cause *c);

#endif
