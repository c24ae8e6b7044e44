/* Committing a step on daemons, and asking them for work. */
#ifndef SHD_COMMIT_H
#define SHD_COMMIT_H

#include "client/paths/decide.h"
#include "client/session/session.h"

/* control_ops slots. */
int commit_step(struct shd_model *m, const struct decide_args *args, const struct wire_bytes *blob,
                struct decided *ret_decided, struct shd_err *e);
int commit_lease(struct shd_model *m, uint32_t owner, struct wire_leased *ret_leased,
                 struct shd_err *e);

/* The middle of the first: m->map->turn, which has begun, to its end; blob NULL: none. */
int commit_turn(struct shd_model *m, const struct wire_bytes *blob, struct shd_err *e);

#endif
