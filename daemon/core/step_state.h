/* The fields of a step core, for step.c and step_init.c alone. */
#ifndef SHD_STEP_STATE_H
#define SHD_STEP_STATE_H

#include "daemon/core/step.h"
#include "proto/share/audit.h"
#include "proto/spec/guard.h"
#include "proto/spec/settings.h"

#define CELL_EMPTY   0u
#define CELL_NONE    UINT32_MAX       /* took no part; its turn has not come */
#define CELL_SPILLED (UINT32_MAX - 1) /* in the spill segment; its turn has not come */

struct step_unit {
    uint32_t next;     /* micro-batches below this one are in */
    step_ref dup;      /* the same gradient as the one that is being summed; 0: none */
    step_ref lost_ref; /* lost: whose gradient it still reads; 0: nobody's */
    bool busy;         /* an ACCUMULATE, SUM or ZERO is running */
    bool lost;         /* it is of a round that was given up */
    bool started;      /* the accumulator holds this step's sum */
    bool summed;       /* all in, sum of squares known */
    bool free;         /* the accumulator may be written: the unit was applied */
    bool frozen;
    bool skips_idle;
    bool mean;
};

struct step_counts {      /* gradients of each unit */
    uint32_t most;        /* in any step, and the stride of cells */
    uint32_t now, before; /* in the collecting step, and in the one before it */
    uint32_t accumulate;
    const struct ramp *ramp; /* borrowed; NULL: all steps have the most */
};

struct step {
    struct ledger ledger;
    uint64_t
        round; /* ledger_round(), which each gradient asks for; with it and `now` the attempt */
    uint32_t units;
    struct step_counts returns;
    uint32_t units_frozen;
    uint64_t now;
    enum step_phase phase;
    uint64_t updates;
    bool resetting; /* step_reset_more() is at reset_unit, reset_micro */
    uint32_t reset_unit, reset_micro;
    uint32_t units_summed;
    uint32_t apply_next, apply_done; /* of this APPLYING */
    uint64_t cells_in, cells_waiting;
    struct fixsum sum; /* of the collecting step */
    bool finite;
    bool dropping; /* the collecting step is to become a put: its gradients count no more */
    const uint64_t *put_updates; /* step_put_updates() */
    struct step_prepared record;
    const struct guard *guard; /* NULL: none */
    struct {
        struct settings settings;
        struct guard_limits limits;
    } told; /* with the last answer to a Prepare */
    struct {
        double norm;
        uint64_t time_ns;
        struct audit_worker worker;
        const uint8_t *unit_norms; /* step_seen_units() */
        bool recorded;             /* step_recorded() */
    } next;                        /* of the next commit, and the row that it writes */
    struct decision last;          /* decision recorded */
    bool has_last;
    uint32_t *micro_units;  /* [returns.most]: units for which it needs no sender any more */
    uint32_t *micro_came;   /* [returns.most]: units for which it arrived at all */
    struct step_unit *unit; /* [units] */
    uint32_t *cells;        /* [units][returns.most]: ref, or one of the CELL_ values */
};

#endif
