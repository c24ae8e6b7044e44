/* Bringing owners that are one step apart to the same step. */
#ifndef SHD_SETTLE_H
#define SHD_SETTLE_H

#include "client/session/session.h"

/* Sets m->step, the decision before it, and which groups are in. */
int settle_steps(struct shd_model *m, struct shd_err *e);

/* The same for a worker that fell behind: ask the owners where they are. */
int settle_catch_up(struct shd_model *m, struct shd_err *e);

#endif
