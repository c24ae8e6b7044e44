/* Plans carried out by others than those who run them: on numbers, of which a wrong plan makes
 * other ones, and on the simulator's clock; and edits, as people make them. */
#ifndef SHD_TEST_PLAN_RUN_H
#define SHD_TEST_PLAN_RUN_H

#include "client/plan/plan.h"
#include "proto/base/status.h"

/* Carry out the operations with a number for each unit's parameters, which only a unit that was
 * waited for has, activations and gradients that depend on all that was read, and sums of groups;
 * compare with what comes of a step that holds everything. Units run in the order of the spec.
 * SHD_EINTERNAL: the numbers differ, a bound of the policy is passed, or something is left. */
int plan_run(const struct plan *plan, const struct spec *spec, const struct plan_policy *policy,
             struct shd_err *e);

/* Simulate steps of it, by mapping and by copies, of one worker and of several, with few slots and
 * many. SHD_EINTERNAL: one stands still, or its compute is not that of all units. The units' sizes
 * in blocks are filled in. */
int plan_run_times(const struct plan *plan, struct spec *spec, struct shd_err *e);

/* Move an operation, hold a unit on that was freed and fetched, let go of one in between, or do
 * something of which no good comes: what passes the check is a plan, too. */
void plan_edit(struct plan *plan, const struct spec *spec, uint64_t *rng);

#endif
