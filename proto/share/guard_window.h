/* The limits of a guard's rules (proto/spec/guard.h) at the step that is to be decided, from the
 * history of those before it: of a rule with a window
 *
 *     limit = mean + Z max(sigma, |mean| / 1000)
 *     mean = (x_1 + ... + x_w) / w        sigma = sqrt(((x_1 - mean)^2 + ... + (x_w - mean)^2) / w)
 *
 * in fp64, added from the oldest on, over the last `window` steps that count: they changed values
 * (no skip, no put) and have a finite norm (loss). The floor keeps values that hardly vary from
 * stopping at rounding. Fewer than `window` such steps among the last 4 `window` ones: there is no
 * limit. Those of rules of units are not here: unit_window.h. Pure. */
#ifndef SHD_GUARD_WINDOW_H
#define SHD_GUARD_WINDOW_H

#include <stdint.h>

#include "proto/share/history.h"
#include "proto/spec/guard.h"

#define GUARD_SIGMA_FLOOR 1e-3
#define GUARD_LOOK_BACK   4u /* times the window */

/* Of a rule with a window, of what was in its steps: x [window], the newest first. */
double guard_window_limit(const struct guard_rule *rule, const double *x);

/* guard NULL: none. ring[slots], of which `commits` steps are committed; slots 0: no history. */
void guard_window_limits(const struct guard *guard, const struct history_slot *ring, uint32_t slots,
                         uint64_t commits, struct guard_limits *ret_limits);

#endif
