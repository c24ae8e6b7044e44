/* Running a step: its plan from beginning to end, and the commit. */
#ifndef SHD_RUN_STEP_H
#define SHD_RUN_STEP_H

#include "client/run/exec.h"

/* Run run->micros[count], up to PREPARE. Lets go of all units, also after an error. */
int run_step_micros(struct run *run, const uint32_t *micros, uint32_t count, struct shd_err *e);

/* What follows, with `r` what came of that: the commit, unless `leaves`. SHD_ESTEP is no error yet:
 * a predecessor's gradients were in and others have committed, or the commit says what is wrong. */
int run_step_commit(struct run *run, int r, bool leaves, struct shd_err *e);

#endif
