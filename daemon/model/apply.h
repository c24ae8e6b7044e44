/* From the step core's actions to kernels, and from kernel completions back to core events. */
#ifndef SHD_APPLY_H
#define SHD_APPLY_H

struct model;
struct step_actions;

/* Carry out an event's actions. Loop thread. May finish requests (credits) and wake waiting ones.
 */
void apply_actions(struct model *m, const struct step_actions *actions);

/* Try again what found the kernel queue full. */
void apply_retry(struct model *m);

#endif
