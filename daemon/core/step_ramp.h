/* Micro-batches of a step where they change: by the spec (proto/spec/ramp.h), a pure function of
 * the step's number; or as they are set (step_set.h), which owner 0 says in the decision of the
 * step before. So all owners and workers know the number before the step begins.
 *
 * Memory is laid out for the most that there can be: a step with fewer leaves the rest alone.
 *
 * Others have step_ramp() of step_init.h and step_returns() of step.h. Here is what the core's
 * files have between them. */
#ifndef SHD_STEP_RAMP_H
#define SHD_STEP_RAMP_H

#include <stdbool.h>
#include <stdint.h>

struct step;

/* Another step is the collecting one: as many as its ledger's last decision has committed. */
void step_ramp_next(struct step *s);

/* May a decision say so of the next step? 0: as the spec says. */
bool step_ramp_good(const struct step *s, uint32_t micro_batches);

#endif
