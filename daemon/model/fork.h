/* What a fork has of the model that it is made of: its arrays at the open step, or those of a
 * snapshot (snapshots.h), and what its ledger says beside them; and what is set of it anew. Loop
 * thread. */
#ifndef SHD_DAEMON_FORK_H
#define SHD_DAEMON_FORK_H

#include <stdint.h>

#include "proto/base/status.h"
#include "proto/spec/settings.h"

struct fork;
struct model;

struct fork_ask {
    uint64_t step;
    struct settings_bytes change; /* as a message has it; empty: none */
};

/* The arrays of both have the same places. SHD_ESPEC: they have not. */
int fork_check(const struct model *from, const struct model *to, struct shd_err *e);

/* A fork of `step` can begin: it is open, or kept; SHD_PENDING: not yet, the model's phase says
 * when; SHD_EBUSY: it is about to be kept. SHD_ESTEP: not any more. */
int fork_may_begin(const struct model *from, uint64_t step, struct shd_err *e);

/* What the ledger of `from` says now, while no update runs, or said at a step that is kept. What is
 * set of it is set of `to`, which nobody has opened yet, by owner 0; so is, from the step on, what
 * is asked for. Errors: SHD_ENOMEM; SHD_ENOTSUP `to` has no room for all of it; SHD_EINVAL,
 * SHD_ERANGE, SHD_EPROTO what is asked for; SHD_EBUSY too many settings wait;
 * SHD_ESEGMENT what is kept is no snapshot of such a model. */
int fork_take(struct model *from, struct model *to, const struct fork_ask *ask,
              struct fork **ret_fork, struct shd_err *e);

/* [shardmap_kept_bytes()] of `from`: parameters and what is kept of them. They stay until
 * fork_copied(): what was queued to read them is done, or nothing was queued. */
const void *fork_arrays(const struct fork *f);
void fork_copied(struct fork *f);

uint64_t fork_step(const struct fork *f);
uint64_t fork_updates(const struct fork *f);

/* Let `to`, at its first step still, go on from there. Errors: as model_start_at(); SHD_ESEGMENT as
 * above. */
int fork_begin(const struct fork *f, struct model *to, struct shd_err *e);

void fork_free(struct fork *f); /* NULL is a no-op; what it has of `from` is not given back */

#endif
