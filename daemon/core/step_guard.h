/* The guard of a model (proto/spec/guard.h) at its owners.
 *
 * Owner 0 tells the limits of the open step with Prepare's answer; whoever decides compares, and
 * the decision says what came of it. One that stops is part of the commit, as is all else of a
 * decision: from there on owner 0 answers no Prepare until somebody says that it is to go on, which
 * one store keeps. Gradients of the next step are taken meanwhile, and count then. */
#ifndef SHD_STEP_GUARD_H
#define SHD_STEP_GUARD_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/core/step.h"

struct guard_limits;

/* The limits of the open step; none where this is not owner 0. */
void step_guard_limits(const struct step *s, struct guard_limits *ret_limits);

/* Is nothing trained? */
bool step_stopped(const struct step *s, struct step_stopped *ret_stopped);

/* SHD_ESTOPPED, with the reason, while nothing is trained; else SHD_OK. */
int step_check_stopped(const struct step *s, struct shd_err *e);

#endif
