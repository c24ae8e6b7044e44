/* The guard of a model: rules by which a step whose gradient or loss is far from what it was is
 * skipped, as one whose gradients are not finite is: it counts, and no value changes.
 *
 *     norm_above X          norm > X
 *     norm_zscore Z         norm > mean + Z sigma, of the norms of the last `window` steps that
 *                           count
 *     loss_zscore Z         loss > mean + Z sigma, of their losses
 *
 * The first two with `units`: the norm of any one of these, which has mean and sigma of its own.
 *
 * norm is that of the step's mean gradient before clipping, loss the mean of its first metric over
 * the micro-batches that reported it. Owner 0 makes a limit of each rule (share/guard_window.h)
 * from the steps that it has recorded, and tells them with Prepared; whoever decides the step
 * compares. Both are functions of recorded numbers alone, so the outcome is the same whoever
 * decides, on however many owners.
 *
 * Pure; spec_guard.h has the rules as JSON. */
#ifndef SHD_SPEC_GUARD_H
#define SHD_SPEC_GUARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/decision.h"

struct shd_err;

#define GUARD_RULES_MAX      8u
#define GUARD_WINDOW_MIN     4u
#define GUARD_WINDOW_MAX     1024u
#define GUARD_WINDOW_DEFAULT 100u
#define GUARD_UNITS_BYTES    256u                /* of a rule's patterns, with NUL */
#define GUARD_COLUMNS_MAX    16384u              /* units that rules with a window are of, */
#define GUARD_NORMS_MAX      (UINT64_C(4) << 20) /* and what is kept of them all: 32 MiB */

enum guard_what { /* crosses processes, and lies in ledgers: as in enum shd_guard */
                  GUARD_NONE,
                  GUARD_NORM_ABOVE,
                  GUARD_NORM_ZSCORE,
                  GUARD_LOSS_ZSCORE,
                  GUARD_UNIT_ABOVE,  /* norm_above with units: of each one's own norm */
                  GUARD_UNIT_ZSCORE, /* norm_zscore, likewise */
                  GUARD_WHAT_END
};

struct guard_rule {
    enum guard_what what;
    bool stop;        /* and nothing is trained from there on, until somebody says so */
    bool rewind;      /* with stop: or until the model has gone back to a snapshot */
    double threshold; /* X or Z: finite, > 0 */
    uint32_t window;  /* of a z-score; else 0 */
    char units[GUARD_UNITS_BYTES]; /* patterns with a space between them; "": not of units */
};

struct guard {
    uint32_t count; /* 0: no guard */
    struct guard_rule rules[GUARD_RULES_MAX];
    uint8_t *watched; /* owned, [units of the spec]: bit i: rule i looks at it; NULL: none does */
    /* Of rules of units with a window: of how many units, and how many steps of each are kept
     * (share/unit_window.h). 0: there is no such rule. */
    uint32_t columns, rows;
    uint32_t *column; /* owned, [units of the spec]: plus 1; 0: it has none; NULL: none has */
};

/* "norm_above"; "?" for what is none. That of a rule of units is "unit_norm_above", where it is
 * told what skipped a step; in a spec it has the field of the other. */
const char *guard_name(uint32_t what);

/* "skip", "stop", "rewind". */
const char *guard_action(const struct guard_rule *rule);

/* Has the rule a window? And is that one of single units? */
bool guard_windowed(enum guard_what what);
bool guard_unit_windowed(const struct guard_rule *rule);

/* Is it of single units, and not of the whole? */
bool guard_of_units(uint32_t what);

/* What the rules come to at one step, in their order: of each `what`, whether it stops (0, 1; 2:
 * and goes back), and the largest value that passes; infinite while its window is not full, and
 * where each unit has a limit of its own. */
#define GUARD_LIMIT_NUMBERS 3u
struct guard_limits {
    uint32_t count; /* of the numbers; 0: there is no guard */
    double numbers[GUARD_RULES_MAX * GUARD_LIMIT_NUMBERS];
};

void guard_limits_add(struct guard_limits *limits, const struct guard_rule *rule, double limit);

/* What a rule that goes back does at this step. */
enum guard_back {
    GUARD_BACK,       /* it does */
    GUARD_BACK_SKIPS, /* it was gone back for: it is skipped */
    GUARD_BACK_STOPS, /* it cannot: training stops */
};
void guard_limits_back(struct guard_limits *limits, enum guard_back back);

/* From a message: doubles, in any place. Errors: SHD_EPROTO they are no limits. */
int guard_limits_unpack(const uint8_t *data, size_t bytes, struct guard_limits *ret_limits,
                        struct shd_err *e);

struct guard_step {
    double norm; /* finite */
    double loss; /* finite or not */
    bool has_loss;
};

/* The first rule that the step is beyond, but for those of units (client/paths/watch.h); what == 0:
 * none. A loss that is NaN is beyond any limit. */
struct decision_guard guard_judge(const struct guard_limits *limits, const struct guard_step *step);

/* Is it one that a decision can have, which skips or not? */
bool guard_plausible(const struct decision_guard *g, bool skip);

/* "norm 31000 is above 10 (norm_above)", of a decision that a guard made. Returns buf. */
#define GUARD_TEXT_BYTES 96u
const char *guard_text(const struct decision_guard *g, char buf[GUARD_TEXT_BYTES]);

/* What is known of where a skipped step came from, for people. */
struct guard_cause {
    const char *unit; /* NULL: not known */
    double norm;      /* infinite: not finite */
    bool audited;     /* the model has guard_audit, and so, where it is known: */
    bool has_micro;
    uint64_t micro;     /* the first of those that brought most of it */
    double share;       /* of the unit's sum of squares */
    const char *worker; /* the name of who sent it; NULL: not known */
    uint32_t pid, rank; /* rank: plus 1; 0: it has none */
};

/* Why a step was skipped, by a guard or not: "norm 31000 is above 10 (norm_above), most of it in
 * unit h.3 (30990), 97% of that by micro-batch 5 of worker trainer (rank 1, pid 4711)", "gradients
 * are not finite, the first in unit h.3". Returns buf. */
#define GUARD_SKIP_BYTES 480u
const char *guard_skip_text(const struct decision_guard *g, const struct guard_cause *cause,
                            char buf[GUARD_SKIP_BYTES]);

#endif
