/* Going back to a snapshot, in a ledger, from version 7 on (step_rewind.h). */
#ifndef SHD_LEDGER_REWIND_H
#define SHD_LEDGER_REWIND_H

#include <stdatomic.h>
#include <stdint.h>

struct ledger_rewind {
    uint64_t step, attempt; /* of the one that is under way: where it goes, what begins with it */
    uint64_t consent;       /* of `held`, by owner 0's clock */
    uint64_t last_step;     /* as the next, of the last one that is done */
    uint64_t keep_settings; /* of `held`: those that were given since stay, too: */
    uint64_t kept_attempt;  /* which `attempt` has them in the place of the snapshot's, and */
    uint64_t kept_given;    /* `given` of the settings then, whose place has them */
    /* Written before anything is overwritten; the snapshot of `step` is copied back until it is 0
     * again, by this process or a successor. */
    _Alignas(64) _Atomic uint64_t under_way;
    _Atomic uint64_t last;    /* the attempt that began with the last one; 0: none was done */
    _Atomic uint64_t held;    /* 1 + the step of a snapshot that stays; 0: none does */
    _Atomic uint64_t options; /* ledger_snapshot_options(); 0: the defaults */
};

/* Something was given that a rewind undoes: who has asked for one asks anew, beginning with the
 * hold, and knows of it then. What is held stays. r: NULL in an older version. */
static inline void ledger_rewind_renew(struct ledger_rewind *r)
{
    if (r != NULL)
        r->consent++;
}

/* A snapshot of each step that is a multiple of `every` (0: none), and the last `keep` of all. */
static inline uint64_t ledger_snapshot_options(uint64_t every, uint32_t keep)
{
    return every << 8 | keep;
}
static inline uint64_t ledger_snapshot_every(uint64_t options)
{
    return options >> 8;
}
static inline uint32_t ledger_snapshot_keep(uint64_t options)
{
    return (uint32_t)(options & 0xff);
}

#endif
