/* A model's open step begins again: what the core (step_reset.h) gives up is credited as unused,
 * workers see the new attempt on the board, and who waits for the step is asked again. */
#ifndef SHD_RESET_H
#define SHD_RESET_H

#include <stdbool.h>
#include <stdint.h>

struct model;
struct shd_err;
struct wire_reset;
struct wire_reset_answer;

/* As step_reset(), carried out. */
int reset_ask(struct model *m, const struct wire_reset *req, struct wire_reset_answer *ret_answer,
              struct shd_err *e);

/* A request of `step` comes from a worker in this attempt (0: it knows none). Where another owner
 * has begun a later one, follow. False: the attempt was given up. */
bool reset_follow(struct model *m, uint64_t step, uint64_t attempt);

#endif
