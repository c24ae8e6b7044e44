/* Micro-batches of a step where they change by the spec (proto/spec/ramp.h): a pure function of the
 * step's number, so that all owners and workers know it before the step begins.
 *
 * Memory is laid out for the most that there can be: a step with fewer leaves the rest alone.
 *
 * Others have step_ramp() of step_init.h and step_returns() of step.h. Here is what the core's
 * files have between them. */
#ifndef SHD_STEP_RAMP_H
#define SHD_STEP_RAMP_H

struct step;

/* Another step is the collecting one. */
void step_ramp_next(struct step *s);

#endif
