/* A step's phases, and what was decided about it: by one worker, once, from all owners' sums; the
 * same at every owner, in every message, in the ledger and in checkpoints. */
#ifndef SHD_DECISION_H
#define SHD_DECISION_H

#include <stdbool.h>
#include <stdint.h>

/* A step collects gradients, has all of them, or is being applied. The board has the number. */
enum step_phase { STEP_OPEN = 1, STEP_SEALED = 2, STEP_APPLYING = 3 };
const char *step_phase_name(enum step_phase phase);

/* Rates of a parameter group for one step. NaN: what the spec, and decision.lr, say. */
struct decision_rates {
    double lr; /* finite, >= 0; not times the group's lr_scale */
    double weight_decay, beta1, beta2;
};
#define DECISION_RATES      4u /* numbers of a group */
#define DECISION_GROUPS_MAX 64u

/* Why a guard skipped a step whose gradients are finite (proto/spec/guard.h). */
struct decision_guard {
    uint32_t what; /* enum guard_what; 0: it did not */
    bool stop;     /* nothing is trained from there on, until somebody says so */
    bool
        rewind; /* with stop: or until it has gone back to a snapshot, which whoever sees it does */
    double value; /* finite or not */
    double bound; /* finite: what the value is above */
};

/* What a step that was skipped came from: the unit whose part of the mean gradient has the largest
 * norm, or the first one that is not finite. It tells, and decides nothing. */
struct decision_cause {
    uint32_t unit; /* 1 + its index; 0: not known */
    double norm;   /* infinite: not finite */
    /* Of a model with guard_audit: 1 + the micro-batch (group of them) that brought the largest
     * part of the unit's sum of squares, or its first value that is not finite; 0: not known. */
    uint32_t group;
    float share; /* of that sum: by how much it raised it; 1: not finite */
};

struct decision {
    bool skip;           /* by `guard`, or gradients were not finite: it counts, the values stay */
    float scale;         /* finite, >= 0: the summed gradient is multiplied by it */
    double lr;           /* finite, >= 0 */
    double loss_scale;   /* finite, >= 0: what the gradients were multiplied by; 0, 1: nothing */
    uint32_t good_steps; /* dynamic loss scaling: in a row without overflow, this one counted */
    uint32_t rate_count; /* of rates: DECISION_RATES for each group of the model, or 0 */
    double divisor;      /* finite, >= 0: what the sum became a mean by; 0: by its micro-batches */
    double rates[DECISION_GROUPS_MAX * DECISION_RATES]; /* struct decision_rates, one by one */
    double eps[DECISION_GROUPS_MAX];                    /* finite, > 0; NaN: the spec's */
    uint32_t eps_count; /* of eps: one for each group of the model, or 0 */
    /* Of the step to come, as owner 0 says it when it records the decision; 0: as the spec says. */
    uint32_t micro_batches;
    /* Not 0: a put. The step's gradients, if there are any, are dropped; values that wait at each
     * owner under this random number take the place of what it has. `skip` is set; loss_scale and
     * good_steps are those of the step to come. */
    uint64_t put;
    uint64_t updates; /* of a put: 1 + the updates that count as applied; 0: as many as before */
    uint64_t puts;    /* committed steps that were puts, this one counted */
    struct decision_guard guard;
    struct decision_cause cause; /* as owner 0 has it; others may be of builds that have none */
};

/* Those of group g; all NaN when the decision has none. */
struct decision_rates decision_rates_of(const struct decision *d, uint32_t g);

double decision_eps_of(const struct decision *d, uint32_t g); /* likewise */

/* Bit for bit, but for the cause. */
bool decision_equal(const struct decision *a, const struct decision *b);

#endif
