/* The executor's single operations: what a plan (client/plan/plan.h) is made of, carried out with
 * the user's compute. Two drivers go through plans with them: run_step.c, in the planned order,
 * also of shares that the owners hand out; follow.h, for models that say what runs next.
 */
#ifndef SHD_EXEC_H
#define SHD_EXEC_H

#include <stdbool.h>
#include <stdint.h>

#include "client/plan/plan.h"
#include "client/session/session.h"

struct exec_unit {
    bool fetched;   /* by the executor, and not let go since */
    bool waited;    /* acquired by the executor */
    bool read;      /* by a compute, since it was fetched */
    bool stray;     /* fetched although the plan did not say so */
    bool has_users; /* other units use it */
    bool away;      /* the plan runs it where it does not run really */
    /* In the micro-batch at hand: */
    bool ran;    /* its forward */
    bool backed; /* its backward */
    bool given;  /* its gradient was returned, or taken into its group's sum */
};

struct exec {         /* of one model */
    struct plan plan; /* owned; op_count 0: none yet */
    bool traced;      /* the plan was built for trace[trace_count]; else for all units */
    uint32_t *trace;  /* owned, [units] */
    uint32_t trace_count;
    uint32_t *ran; /* owned, [units]: what ran in the micro-batch at hand, in order */
    uint32_t ran_count;
    uint32_t *micros;        /* owned, [micro_batches]: those of the step that are left */
    bool recorded;           /* ran is a whole micro-batch of a model that says what runs next */
    struct exec_unit *units; /* owned, [units] */
};

struct step_run {        /* one shd_run_step() */
    uint64_t rewound;    /* rewind_known() when it began */
    struct shd_model *m; /* borrowed, as are the next four */
    struct exec *exec;
    const uint32_t *micros; /* [count] */
    struct shd_compute compute;
    const struct shd_update *update;
    uint32_t count;
    uint32_t base; /* ordinal of the micro-batch the plan begins with */
    uint32_t at;   /* next operation of the plan */
    struct shd_result result;
};

/* A step begins: compute is checked, *ret_run is made, without micro-batches yet. A model's first
 * one makes m->exec. */
int exec_begin(struct shd_model *m, const struct shd_compute *compute,
               const struct shd_update *update, struct step_run *ret_run, struct shd_err *e);
void exec_free(struct exec *x); /* NULL is a no-op */

/* Have a plan for `micros` more micro-batches, in the order of the last one that ran (traced) or
 * for all units. Nothing is done when the plan at hand is it. */
int exec_plan(struct step_run *run, uint32_t micros, bool traced, struct shd_err *e);

/* Did the micro-batch run in the order its plan was made for? */
bool exec_order_kept(const struct step_run *run);

/* Operations. A unit that is fetched (or waited for) already is left as it is. */
int exec_fetch(struct step_run *run, uint32_t unit, struct shd_err *e);
int exec_wait(struct step_run *run, uint32_t unit, struct shd_err *e);
void exec_let_go(struct step_run *run, uint32_t unit); /* counts a miss if nothing has read it */
void exec_miss(struct step_run *run, uint32_t unit);
void exec_let_go_all(struct step_run *run); /* whatever is held; no miss */

/* Compute; micro is an ordinal of the step. The first backward of a micro-batch reports its
 * metrics. */
int exec_forward(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e);
int exec_backward(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e);
int exec_metrics(struct step_run *run, uint32_t micro, struct shd_err *e);

/* Around a micro-batch: clear what is kept of it; account for the units that were not returned. */
void exec_begin_micro(struct step_run *run);
int exec_end_micro(struct step_run *run, uint32_t micro, struct shd_err *e);

/* Return a unit's gradient of this micro-batch, if nothing will add to it any more and it has not
 * been; that of a unit without one counts as zeros. */
int exec_return(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e);

/* The same for a unit and those it uses. */
int exec_return_around(struct step_run *run, uint32_t micro, uint32_t unit, struct shd_err *e);

/* Does the group of micro-batches end with this one? */
bool exec_group_ends(const struct step_run *run, uint32_t micro);

#endif
