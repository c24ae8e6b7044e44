/* The step protocol of one model on one daemon, as a pure core: events in, actions out. No I/O,
 * no clock, no allocation, no threads; the shell (apply.c, op_*.c) does what the actions say and
 * reports back, and the simulator runs the same code.
 *
 * What must outlive the process the core writes to the ledger (ledger.h), before the action that
 * tells anybody. What a kernel's end must vouch for, the kernel writes: struct step_word.
 *
 *          all units x all micro-batches              Commit              all units applied
 *   OPEN k ────────────────────────────▶ SEALED k ──────────▶ APPLYING k ──────────▶ OPEN k+1
 *
 * Happy path: step_return() for each (micro-batch, unit) → ACCUMULATE, in ascending micro-batch
 * order per unit whatever the order of arrival → step_accumulated() → CREDIT. After the last one
 * SEALED: step_prepare() gives the exact sum of squares; step_commit() (step_commit.h) records the
 * first decision and APPLYs the units in forward order, each PUBLISHed as it is done, then OPENED.
 *
 * While APPLYING, gradients of step k+1 are taken already; a unit's sums start when that unit has
 * been applied. Everything late or doubled is credited as stale and changes nothing.
 *
 * A put is a step whose commit brings values instead of a factor for gradients: OPEN k becomes
 * APPLYING k at once, and what was returned of k counts no more (step_put.h).
 *
 * A CREDIT that is not stale means that the gradient will count whatever dies next. One that came
 * before its turn is credited when it has been summed, or spilled: copied by the shell to where a
 * successor finds it. While it only waits in its slot, a second one for the same place takes over:
 * its sender lives, that of the first may not.
 *
 * The gradients of the open step can be given up (step_reset.h): it begins again, in a new round.
 *
 * After a crash: step_init() on the adopted ledger, then step_resume() for each unit. Sums of
 * squares are not kept; they are formed anew.
 */
#ifndef SHD_STEP_H
#define SHD_STEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/decision.h"
#include "proto/base/dtype.h"
#include "proto/base/fixsum.h"

#define STEP_METRICS_MAX 4u
#define STEP_APPLY_AHEAD 4u                  /* APPLYs outstanding: keeps the compute threads fed */
#define STEP_CELLS_MAX   (UINT64_C(1) << 24) /* units x micro-batches */

struct settings;
struct shd_err;

/* The shell's handle of the request whose gradient waits: 1 .. STEP_REF_MAX. */
typedef uint32_t step_ref;
#define STEP_REF_MAX UINT32_C(0xfffffff0)

enum step_action_kind {
    STEP_DO_ACCUMULATE, /* unit += gradient of ref, or spilled one (first: =); last: with its sum
                         * of squares */
    STEP_DO_SUM,        /* sum of squares of the unit: its last micro-batch took no part */
    STEP_DO_ZERO,       /* clear the unit's accumulator: no micro-batch took part */
    STEP_DO_CREDIT,     /* answer ref: its slot is free (stale: it was not used) */
    STEP_DO_APPLY,      /* update the unit by the decision (skip: only answer) */
    STEP_DO_PUBLISH,    /* raise the unit's version to `step` */
    STEP_DO_SEALED,     /* Prepare can be answered now */
    STEP_DO_OPENED,     /* the open step is `step` now */
    STEP_DO_DROPPED,    /* no gradient is worked on any more: the put can be committed */
};

/* What is kept of an ACCUMULATE or APPLY: its operation's number, for the trail, and the word to
 * store (release) when its kernel is done, before anything behind it in the queue begins and before
 * step_accumulated() or step_applied(). Also where there is nothing to compute (no elements, skip).
 */
struct step_word {
    _Atomic uint64_t *word;
    uint64_t value;
    uint64_t op;
};

struct step_action {
    enum step_action_kind kind;
    uint32_t unit;
    uint32_t micro;       /* ACCUMULATE */
    step_ref ref;         /* ACCUMULATE: 0 when it is spilled */
    enum shd_dtype dtype; /* of a spilled gradient */
    bool first, last, stale, skip;
    bool put;              /* APPLY: of values that wait, if any do for the unit */
    uint32_t took;         /* APPLY of a mean: gradients that its sum is of */
    uint64_t updates;      /* APPLY: of the unit, this one counted: t of AdamW */
    uint64_t step;         /* work: which one it is for, */
    uint64_t round;        /* and in which round */
    struct step_word done; /* ACCUMULATE, APPLY */
};

#define STEP_ACTIONS_MAX 8u

struct step_actions { /* of one event */
    struct step_action items[STEP_ACTIONS_MAX];
    uint32_t count;
};

/* Prepare's answer. It is kept until the next step is sealed. */
struct step_prepared {
    uint64_t step;
    bool over; /* committed before the last recorded step: nothing else is known */
    bool finite;
    struct fixsum sum; /* carried; meaningless when not finite */
    double metrics[STEP_METRICS_MAX];
    uint32_t metric_count;
    uint32_t reported; /* micro-batches that had metrics; 0: not known */
    bool has_decision;
    struct decision decision;
    /* What is set (step_set.h) for a step without a decision; borrowed, until the next such answer.
     */
    const struct settings *settings; /* NULL: nothing */
    const double *limits;            /* likewise: of its guard (step_guard.h); [limit_count] */
    uint32_t limit_count;
};

struct step; /* lives in caller's memory */

/* Once per unit in ascending order, before any other event, each time with its actions carried
 * out: what a predecessor left to be done. Nothing on a fresh ledger. step_commit() begins with the
 * same. */
void step_resume(struct step *s, uint32_t unit, struct step_actions *ret_actions);

/* Events. All clear *ret_actions first. unit and micro must be below their counts. */

/* A gradient arrived (none: the unit took no part, there is no slot). Metrics, if any, are those
 * of the micro-batch; the first to arrive count.
 * SHD_OK: taken or stale, CREDIT follows now or later. SHD_ESTEP: a step that is not open yet.
 * SHD_ERANGE: the step has fewer micro-batches (step_ramp.h). */
int step_return(struct step *s, step_ref ref, uint64_t step, uint32_t unit, uint32_t micro,
                bool none, const double *metrics, uint32_t metric_count,
                struct step_actions *ret_actions, struct shd_err *e);

/* ACCUMULATE, SUM or ZERO of unit is done. sum: its sum of squares, when the action asked for it
 * (last, SUM), else NULL; finite: false if it could not be formed. */
void step_accumulated(struct step *s, uint32_t unit, const struct fixsum *sum, bool finite,
                      struct step_actions *ret_actions);

/* Does the gradient of this ref wait for earlier ones, so that its slot may stay taken for long? */
bool step_waits(const struct step *s, uint32_t unit, uint32_t micro, step_ref ref);

/* The waiting gradient's bytes are where a successor finds them: it needs its slot no more. Nothing
 * happens when it does not wait any more. */
void step_spilled(struct step *s, uint32_t unit, uint32_t micro, step_ref ref, enum shd_dtype dtype,
                  struct step_actions *ret_actions);

/* APPLY of unit is done. */
void step_applied(struct step *s, uint32_t unit, struct step_actions *ret_actions);

/* Is a request about `step`, sent in this attempt (0: its sender knows none), of the round in which
 * gradients are collected now? */
enum step_when {
    STEP_WHEN_NOW,
    STEP_WHEN_PAST,  /* the attempt was given up; with a rewind, whatever the step */
    STEP_WHEN_AHEAD, /* another owner has granted a reset: first follow, agreed (step_reset.h) */
};
enum step_when step_when(const struct step *s, uint64_t step, uint64_t attempt);

/* Looking. */
uint64_t step_now(const struct step *s);        /* committed steps whose updates are done */
uint64_t step_collecting(const struct step *s); /* the step whose gradients are taken now */
enum step_phase step_phase(const struct step *s);
uint64_t step_attempt(const struct step *s); /* at the collecting step, from 1: step_reset.h */
/* The attempt that began with the last rewind (step_rewind.h); 0: there was none. Steps of before
 * have the same numbers as others since. */
uint64_t step_rewound(const struct step *s);
uint64_t step_updates(const struct step *s); /* committed and not skipped */
/* Those of them that updated the unit: not one that it was idle in and skips. */
uint64_t step_unit_updates(const struct step *s, uint32_t unit);
/* Did the last committed step change the unit by its gradient, as its decision says? False, too,
 * where this cannot be told: a put, no commit yet, an older ledger's unit that skips idle steps. */
bool step_unit_updated(const struct step *s, uint32_t unit);
bool step_units_counted_apart(const struct step *s); /* of any unit there are others */
/* Once it is known which units skip idle steps: is each update that a predecessor has left to be
 * done counted? SHD_ESEGMENT: not. */
int step_check_counts(const struct step *s, struct shd_err *e);
/* The last decision ever recorded: SEALED steps after it included. False: none yet. */
bool step_last_decision(const struct step *s, struct decision *ret_decision);
struct step_blob {
    const void *data; /* NULL: none */
    uint64_t bytes;
};
struct step_blob step_last_blob(const struct step *s); /* of the last commit */

#define STEP_NAME_BYTES 80u
struct step_cause { /* of a step that was skipped: struct decision_cause, and who sent `group` */
    struct decision_cause of;
    uint32_t pid;  /* 0: not known */
    uint32_t rank; /* plus 1; 0: it has none */
    char worker[STEP_NAME_BYTES];
};

struct step_stopped { /* training, by a guard (step_guard.h) */
    uint64_t step;    /* the one that was skipped */
    struct decision_guard by;
};

struct step_result { /* of the last committed step, from the history */
    bool any;
    double metric; /* the first one, its mean over the micro-batches that had it; NaN: none */
    double norm, lr;
};
struct step_result step_last_result(const struct step *s);
const struct step_prepared *step_record(const struct step *s); /* of the last sealed step */
/* Gradients that a unit gets in the collecting step, and in the one before it: step_ramp.h. */
uint32_t step_returns(const struct step *s);
uint32_t step_returns_before(const struct step *s);
uint64_t step_cells(const struct step *s);         /* gradients that make a step */
uint64_t step_cells_in(const struct step *s);      /* gradients summed for the collecting step */
uint64_t step_cells_waiting(const struct step *s); /* arrived, not summed yet */

/* The lowest micro-batch of unit that is not in yet; == step_returns() when all are. */
uint32_t step_unit_next(const struct step *s, uint32_t unit);

/* What the unit's accumulator holds between two pieces of work on it: the sum of the gradients of
 * `step` that took part among its first `micros`. Errors: SHD_EBUSY work on it is under way;
 * SHD_ENOENT it holds no step's: a new model's, one that was reset, put or idle. */
struct step_gradient {
    uint64_t step;
    uint32_t micros; /* of the step's gradients; all of them: it is summed */
};
int step_unit_gradient(const struct step *s, uint32_t unit, struct step_gradient *ret_gradient,
                       struct shd_err *e);

/* What the next commit says of who sent the group of its decision's cause. rank: plus 1; 0: it has
 * none. */
void step_sender(struct step *s, uint32_t pid, uint32_t rank, const char *name);

/* Is micro-batch `micro` of the collecting step in for all units, so that it needs no sender any
 * more? */
bool step_micro_in(const struct step *s, uint32_t micro);

/* Has it arrived for all units, though some may still wait in their slots? */
bool step_micro_came(const struct step *s, uint32_t micro);

#endif
