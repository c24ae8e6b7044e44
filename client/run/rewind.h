/* Internal to client/run: a worker whose model has gone back, or is to. */
#ifndef SHD_RUN_REWIND_H
#define SHD_RUN_REWIND_H

#include "client/shd.h"

/* What a call says that learns of it, where this worker has gone along. */
struct shd_result rewind_result(const struct shd_model *m);

/* Is the model stopped by a rule that goes back, as far as this worker knows? */
bool rewind_due(const struct shd_model *m);

/* Have it go back to the newest snapshot of a step up to the one that the rule skipped, or go along
 * with who was faster; then this worker is there. What was set since stays. Else, with the reason
 * in *e, it is stopped as it was: SHD_ENOENT there is no such snapshot that all owners have; those
 * of rewind_once(). */
int rewind_by_guard(struct shd_model *m, struct shd_err *e);

#endif
