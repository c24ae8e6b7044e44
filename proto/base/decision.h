/* A step's phases, and what was decided about it: by one worker, once, from all owners' sums; the
 * same at every owner, in every message, in the ledger and in checkpoints. */
#ifndef SHD_DECISION_H
#define SHD_DECISION_H

#include <stdbool.h>
#include <stdint.h>

/* A step collects gradients, has all of them, or is being applied. The board has the number. */
enum step_phase { STEP_OPEN = 1, STEP_SEALED = 2, STEP_APPLYING = 3 };

struct decision {
    bool skip;           /* gradients were not finite: the step counts, the values stay */
    float scale;         /* finite, >= 0: the summed gradient is multiplied by it */
    double lr;           /* finite, >= 0 */
    double loss_scale;   /* finite, >= 0: what the gradients were multiplied by; 0, 1: nothing */
    uint32_t good_steps; /* dynamic loss scaling: in a row without overflow, this one counted */
};

#endif
