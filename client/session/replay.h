/* A worker whose step is computed again (`shardctl replay`): it finds a fork where its program
 * opens the model, and is held at the step where the replay ends.
 *
 * shardctl says so by $SHARDD_REPLAY, "STEP FORK MODEL": names have no blanks. The program needs to
 * know nothing of it. What would reach beyond the fork is refused: a run that is looked at must not
 * change by it. Without the variable nothing is done.
 */
#ifndef SHD_REPLAY_H
#define SHD_REPLAY_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/spec/spec.h"

#define REPLAY_ENV "SHARDD_REPLAY"

/* The model to open for `name` ("": the only one there), into ret_name. Errors: SHD_ENOTSUP another
 * model than the one that is replayed; SHD_EINVAL the variable. */
int replay_name(const char *name, char ret_name[SPEC_NAME_BYTES_MAX], struct shd_err *e);

/* Before the open step, `step`, is committed or put. Errors: SHD_ESTOPPED the replay ends here. */
int replay_goes_on(uint64_t step, struct shd_err *e);

/* Before `call`, which would change more than the fork. Errors: SHD_ENOTSUP it is a replay. */
int replay_allows(const char *call, struct shd_err *e);

#endif
