/* The decision of a step: a pure function of all owners' Prepared replies and the worker's
 * update, so that it is the same whoever computes it.
 *
 * Happy path: the owners' sums of squares are added exactly (proto/base/fixsum.h), so the norm does
 * not depend on their number; from it follow clipping and the factor the summed gradient gets.
 * What is set of the model (proto/spec/settings.h) comes before what the update says: weight decay,
 * betas, eps and clip_norm take its place, lr_scale multiplies the group's rate, as the update
 * gives it or, where it gives none, the update's own (then instead of the spec's scale). A step
 * whose norm or loss is above one of the guard's limits (proto/spec/guard.h) is skipped. A decision
 * that an owner has recorded already is passed on verbatim instead. The number of micro-batches of
 * the next step is owner 0's to say, when it records the decision.
 */
#ifndef SHD_DECIDE_H
#define SHD_DECIDE_H

#include <stdint.h>

#include "proto/base/decision.h"
#include "proto/base/status.h"
#include "proto/wire/wire.h"

struct guard_limits;
struct settings;

struct decide_args {
    const struct wire_prepared *prepared; /* [owners] */
    uint32_t owners;
    uint32_t micro_batches;              /* M: the gradients were summed over that many */
    double lr;                           /* finite, >= 0 */
    double clip_norm;                    /* 0: none; finite, >= 0 */
    double loss_scale;                   /* 0 or 1: none; finite, >= 0 */
    uint32_t divide_by;                  /* 0: M; 1 + i: the step's sum of metric i */
    const struct decision_rates *groups; /* [group_count], borrowed; each as runs_check_rates() */
    uint32_t group_count;                /* 0: what the spec says */
    uint32_t good_steps;             /* dynamic loss scaling: steps in a row, if this one is good */
    uint64_t puts;                   /* of the decision before this one */
    const struct settings *settings; /* owner 0's, over all that; borrowed; NULL: none */
    const struct guard_limits *guard; /* owner 0's, of this step; borrowed; NULL: none */
};

enum decide_cause { /* of a step that this decision skips, and nobody has recorded */
                    DECIDE_CAUSE_NONE,
                    DECIDE_CAUSE_LARGEST,  /* the unit with the largest norm is to be found */
                    DECIDE_CAUSE_INFINITE, /* the first that is not finite is */
};

struct decided {
    struct decision decision; /* without a cause, unless it was recorded with one */
    enum decide_cause cause;
    double grad_norm; /* of the mean gradient, unscaled, not clipped; infinite when not finite */
    double metrics[WIRE_METRICS_MAX];
    uint32_t metric_count;
    uint32_t reported; /* groups of micro-batches that had metrics; 0: not known */
    bool over;         /* the step was over long ago: nothing else is known */
};

/* Errors: SHD_ERANGE a number of the update outside its limits, named; SHD_EINVAL a metric that the
 * update divides by is missing, not finite or not above 0; SHD_EINTERNAL owners that
 * contradict each other. */
int decide(const struct decide_args *args, struct decided *ret_decided, struct shd_err *e);

/* Dynamic loss scaling. */
#define LOSS_SCALE_START  65536.0
#define LOSS_SCALE_MAX    16777216.0 /* 2^24 */
#define LOSS_SCALE_GROWTH 2000u      /* good steps in a row that double it */

/* The scale of the step after the one decided by `last` (NULL: of the first step), and which good
 * step in a row it will be if nothing overflows in it. A step that overflowed halves the scale (not
 * below 1); one that a guard skipped did not. After a decision that was made without dynamic
 * scaling it starts anew. A put changes nothing: its decision has both. */
double loss_scale_next(const struct decision *last, uint32_t *ret_good_steps);

#endif
