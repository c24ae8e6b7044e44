/* Which micro-batch brought how much of a unit's gradient: of each unit the sum of squares of the
 * sum of its gradients, behind each gradient that was added. What one brought is by how much its
 * step raised that, so all together are the whole. In its owner's own memory, for a model with
 * guard_audit: a successor begins anew, and does not know of the step that it finds begun. Pure. */
#ifndef SHD_PARTS_H
#define SHD_PARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/fixsum.h"

/* Of a unit's gradient: a sum, and who sent it. */
#define PARTS_BYTES ((uint64_t)FIXSUM_BYTES + 8)

struct parts;

/* Bytes they need, and laid out in zeroed memory of so many aligned to 16. groups: the most
 * gradients that a unit gets in a step. */
uint64_t parts_bytes(uint32_t units, uint32_t groups);
struct parts *parts_init(void *memory, uint32_t units, uint32_t groups);

struct part {
    uint64_t round; /* any number that no other attempt at a step has */
    uint32_t unit, group;
    bool first;       /* nothing was added before it */
    uint64_t session; /* that sent it; 0: not known */
};
/* Behind the gradient of `group`, in ascending order. sum: NULL: not finite. */
void parts_take(struct parts *p, const struct part *part, const struct fixsum *sum);

/* The sums behind groups first .. first + count, FIXSUM_BYTES each; of gradients that took no part
 * as behind the one before. False: they are not known. */
bool parts_read(const struct parts *p, uint64_t round, uint32_t unit, uint32_t first,
                uint32_t count, uint8_t *ret_bytes);

/* Who sent it; 0: not known. */
uint64_t parts_session(const struct parts *p, uint64_t round, uint32_t unit, uint32_t group);

#endif
