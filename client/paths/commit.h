/* Committing a step on daemons, and bringing owners that are one step apart to the same step. */
#ifndef SHD_COMMIT_H
#define SHD_COMMIT_H

#include "client/paths/decide.h"
#include "client/session/session.h"

/* A control_ops slot. */
int commit_step(struct shd_model *m, const struct decide_args *args, const struct wire_bytes *blob,
                struct decided *ret_decided, struct shd_err *e);

/* Sets m->step, the decision before it, and which groups are in. */
int settle_steps(struct shd_model *m, struct shd_err *e);

/* The same for a worker that fell behind: ask the owners where they are. */
int settle_catch_up(struct shd_model *m, struct shd_err *e);

#endif
