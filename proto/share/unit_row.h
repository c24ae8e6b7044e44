/* What an owner says of a unit in one step: sums of squares over its slice, of the gradient and, of
 * the update that was measured last, of that and of the parameters after it (daemon/model/norms.h).
 * Rows go to clients as they lie here, little-endian. */
#ifndef SHD_UNIT_ROW_H
#define SHD_UNIT_ROW_H

#include <stdint.h>

#include "proto/base/fixsum.h"

#define UNITS_EVERY 8u /* steps k with k % UNITS_EVERY == 0 are measured */

enum unit_known { UNIT_UNKNOWN, UNIT_FINITE, UNIT_NOT_FINITE };

struct unit_row {
    uint32_t gradient, change; /* enum unit_known: of `grad`, and of the other two */
    uint8_t grad[FIXSUM_BYTES], update[FIXSUM_BYTES], weight[FIXSUM_BYTES]; /* fixsum_pack() */
};
#define UNIT_ROW_BYTES 248u
_Static_assert(sizeof(struct unit_row) == UNIT_ROW_BYTES, "rows cross processes");

#endif
