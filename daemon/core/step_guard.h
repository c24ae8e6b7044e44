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

struct guard;
struct guard_limits;
struct ledger_window;
struct unit_window;

/* The limits of the open step; none where this is not owner 0. */
void step_guard_limits(const struct step *s, struct guard_limits *ret_limits);

/* Of a ledger that is made for this owner. */
struct ledger_window step_guard_shape(const struct guard *guard, uint32_t owner);

/* What owner 0 keeps of single units. False: nothing, no rule of the guard needs it. */
bool step_guard_window(const struct step *s, struct unit_window *ret_window);

/* The own limits of units [first, first + count) in the open step, at owner 0: of each one for each
 * rule with a window that looks at it. Returns how many; ret_limits has room for
 * count * GUARD_RULES_MAX. */
uint32_t step_unit_limits(const struct step *s, uint32_t first, uint32_t count, double *ret_limits);

/* The model is about to go back to step `to`: note the step that a guard has it go back for, if one
 * has. It is gone back for once: from there on its limits say that it is skipped. */
void step_guard_back(struct step *s, uint64_t to);

/* 1 + the step that the last rewind was for; 0: there was none, or somebody asked for it. */
uint64_t step_gone_back(const struct step *s);

/* Is nothing trained? */
bool step_stopped(const struct step *s, struct step_stopped *ret_stopped);

/* What a committed step came from, which was skipped. False: it is not known. */
bool step_cause(const struct step *s, uint64_t step, struct step_cause *ret_cause);

/* SHD_ESTOPPED, with the reason, while nothing is trained; else SHD_OK. */
int step_check_stopped(const struct step *s, struct shd_err *e);

#endif
