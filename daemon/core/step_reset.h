/* Giving up the gradients of the open step, so that all workers compute it again: some of them are
 * of a micro-batch that a worker gave up (its backward ended by an exception), and they are in the
 * sums already. Part of the step core (step.h).
 *
 * Attempts are numbered over the model's life: 1 before any reset, and one more with each. Returns
 * and Prepares carry the one that their sender knows; those of an earlier one count for nothing.
 * The number is in the ledger before anything is given up, and no word or operation of an earlier
 * round is taken for one of this (ledger.h).
 *
 * Several owners agree as follows. An owner that has answered no Prepare of the attempt grants a
 * reset, and then no step can be committed of it, as a commit needs all owners' answers. All others
 * may therefore be told that it is agreed, by whoever asked or by any request of the next attempt;
 * they follow even though they have promised. If all refuse, the step's commit has begun.
 *
 *     step_reset() → step_reset_more() until false, each time with its actions carried out
 */
#ifndef SHD_STEP_RESET_H
#define SHD_STEP_RESET_H

#include <stdbool.h>
#include <stdint.h>

struct shd_err;
struct step;
struct step_actions;

enum step_reset_answer {
    STEP_RESET_DONE,     /* the step is at that attempt, or at a later one */
    STEP_RESET_PROMISED, /* refused: its Prepare was answered */
    STEP_RESET_OVER,     /* the step was committed */
};

/* Begin attempt `attempt` > 1 of the open step. Errors: SHD_ESTEP the step is not open yet;
 * SHD_ENOTSUP a ledger without room for resets; SHD_ERANGE an attempt that cannot be. */
int step_reset(struct step *s, uint64_t step, uint64_t attempt, bool agreed,
               enum step_reset_answer *ret_answer, struct shd_err *e);

/* Part of giving up; true: there are actions, and perhaps more to come. */
bool step_reset_more(struct step *s, struct step_actions *ret_actions);

#endif
