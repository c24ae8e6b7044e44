/* Steps that a guard with `rewind` has gone back for (step_guard.h), in a ledger, from version 8
 * on. They stay when the model goes back: each is gone back for once, and skipped where it is above
 * the limit again. */
#ifndef SHD_LEDGER_BACK_H
#define SHD_LEDGER_BACK_H

#include <stdint.h>

#define LEDGER_BACK_STEPS 64u

struct ledger_back {
    uint64_t last; /* of the last rewind: 1 + the step that it was for; 0: somebody asked for it */
    uint64_t steps[LEDGER_BACK_STEPS]; /* 1 + the step; 0: a free place */
};

#endif
