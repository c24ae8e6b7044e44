/* What a fork has of the model that it is made of, beside its arrays. Loop thread. */
#ifndef SHD_DAEMON_FORK_H
#define SHD_DAEMON_FORK_H

#include <stdint.h>

#include "proto/base/status.h"

struct ledger_start;
struct model;

/* The arrays of both have the same places. SHD_ESPEC: they have not. */
int fork_check(const struct model *from, const struct model *to, struct shd_err *e);

/* A fork of `step` can begin; SHD_PENDING: not yet. SHD_ESTEP: not any more. */
int fork_may_begin(const struct model *from, uint64_t step, struct shd_err *e);

/* What the ledger of `from` says now, while no update runs; to be forgotten. Errors: SHD_ENOMEM. */
int fork_take(const struct model *from, struct ledger_start *ret_start, struct shd_err *e);

/* What is set of `from` (owner 0 keeps it) is set of `to`, which nobody has opened yet. Errors:
 * SHD_ENOTSUP: it has no room for it. */
int fork_settings(const struct model *from, struct model *to, struct shd_err *e);

void fork_forget(struct ledger_start *start); /* zeroed: a no-op */

#endif
