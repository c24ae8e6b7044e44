/* Which units a model holds: every fetch, wait and release goes through here, whoever asks for
 * it, so that what is live is counted once and bounds bind whatever the plan says. */
#ifndef SHD_HOLD_H
#define SHD_HOLD_H

#include "client/session/session.h"

/* Ask for a unit; nothing when it is held already. SHD_EBUSY: it would exceed max_live_units or
 * max_live_bytes of the policy, or the path has no room. */
int hold_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e);

/* Wait for a fetched unit and count one more acquire of it. */
int hold_acquire(struct shd_model *m, uint32_t unit, struct shd_err *e);

/* One acquire less. */
void hold_release(struct shd_model *m, uint32_t unit);

/* Let go of a unit that is fetched and not acquired; else nothing. */
void hold_let_go(struct shd_model *m, uint32_t unit);

#endif
