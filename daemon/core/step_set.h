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

/* Change settings, as settings_give(); they are the model's. Errors beside those: SHD_ENOTSUP a
 * ledger of an older version; SHD_ERANGE the step. */
int step_set(struct step *s, const struct settings *change, uint64_t at, uint64_t *ret_from,
             struct shd_err *e);

/* Those in force at `step`, the collecting one or one before it without a decision. count 0: none.
 */
void step_settings(const struct step *s, uint64_t step, struct settings *ret_settings);

/* Train on what a guard has stopped (step_guard.h), if it has. Errors: SHD_ENOTSUP a ledger of an
 * older version. */
int step_go_on(struct step *s, struct shd_err *e);

/* All that is kept; NULL: in a ledger of an older version nothing is. */
const struct settings_kept *step_settings_kept(const struct step *s);

#endif
