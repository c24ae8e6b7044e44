/* Following a model that decides while it runs which unit comes next. */
#ifndef SHD_FOLLOW_H
#define SHD_FOLLOW_H

#include "client/run/exec.h"

/* All micro-batches of a model that says what runs next, up to PREPARE. */
int follow_micros(struct step_run *run, struct shd_err *e);

#endif
