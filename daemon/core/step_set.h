/* Settings (proto/spec/settings.h) of a model, as owner 0 keeps them in its ledger.
 *
 * They are told with Prepare's answer, and that answer is a promise (step_commit.h): so a change is
 * of the open step while that has not been prepared, and else of the next. What was given is kept
 * before anybody is told, and through whatever is killed. */
#ifndef SHD_STEP_SET_H
#define SHD_STEP_SET_H

#include "daemon/core/step.h"

struct settings;
struct settings_kept;

/* Change settings, as settings_give(); they are the model's; id is settings_when's. Errors beside
 * those: SHD_ENOTSUP a ledger of an older version; SHD_ERANGE the step. */
int step_set(struct step *s, const struct settings *change, uint64_t at, uint64_t id,
             uint64_t *ret_from, struct shd_err *e);

/* Those in force at `step`, the collecting one or one before it without a decision. count 0: none.
 */
void step_settings(const struct step *s, uint64_t step, struct settings *ret_settings);

/* Micro-batches that are set of it; 0: none. Owner 0 says so in the decision of the step before,
 * which is when workers and the other owners learn of it: so what is set holds from the step after
 * the open one at the earliest. */
uint32_t step_settings_micros(const struct step *s, uint64_t step);

/* Train on what a guard has stopped (step_guard.h), if it has. Errors: SHD_ENOTSUP a ledger of an
 * older version. */
int step_go_on(struct step *s, struct shd_err *e);

/* All that is kept, in the ledger or put into *room; NULL: one of an older version keeps nothing.
 */
const struct settings_kept *step_settings_kept(const struct step *s, struct settings_kept *room);

#endif
