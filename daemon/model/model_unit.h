/* One unit's slice of a model, the kernel work on it, and what that comes to: norms of gradients,
 * updates and parameters, here and in the rings of norms.h. */
#ifndef SHD_MODEL_UNIT_H
#define SHD_MODEL_UNIT_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/task.h"
#include "daemon/core/step.h"
#include "kernels/done.h"
#include "proto/base/dtype.h"

struct kern_change;
struct kern_hyper;
struct kern_run;
struct kern_whole;
struct model;

enum model_work_kind {
    MODEL_ACCUMULATE,
    MODEL_SUM,
    MODEL_ZERO,
    MODEL_APPLY,
    MODEL_PUT, /* copies of what waits for it: put.h */
    MODEL_PUBLISH
};

enum model_paged { MODEL_PAGED_NONE, MODEL_PAGED_SUM, MODEL_PAGED_ALL };

/* Of the slice's part of the mean gradient. */
struct unit_norm {
    uint64_t step; /* plus 1; 0: of none, nothing is known */
    double norm;   /* NaN: it was not finite */
};

/* Of the slice, after an update that was measured. */
struct unit_change {
    uint64_t step;         /* plus 1; 0: of none */
    double update, weight; /* norms; NaN: not finite */
};

/* One unit's slice; at most one piece of kernel work on it at a time (the core sees to that). */
struct model_unit {
    struct task task;
    struct model *model; /* borrowed */
    uint32_t unit;
    enum model_work_kind kind;
    struct step_action action; /* what the work is for */
    uint64_t submitted_ns;
    struct kern_sum sum;
    struct unit_norm applied; /* of the step applied last */
    struct unit_change changed;
    struct kern_change *change; /* of the update that runs (norms.h); NULL: it is not measured */
    struct kern_run *runs;      /* owned: parameter groups of the slice */
    uint32_t run_count;
    struct kern_whole *whole;        /* owned: its matrices, but for scratch; NULL: none */
    const struct kern_hyper *hypers; /* of the update that runs; else NULL */
    float *acc;                      /* of the slice, in the state segment; NULL: frozen */
    uint64_t first_chunk;            /* of the slice in the trail's chunk words; */
    uint64_t ema_chunk;              /* of its average, if the model has one */
    enum codec grad_codec;           /* of gradients as workers return them */
    uint8_t paged;           /* enum model_paged: what of it paging.h was told that is in use */
    bool publish_whole;      /* its update was begun by a predecessor, into another segment */
    uint8_t put_left;        /* bits of the arrays that are to be copied, the lowest now */
    struct model_unit *next; /* in the backlog */
};

/* The unit's update (an APPLY) is about to begin; mu->action is still that of the work before it,
 * which has left the step's gradient. It is found out whether the update is measured. */
void model_unit_update(struct model_unit *mu, const struct step_action *next);

/* It is done. */
void model_unit_updated(struct model_unit *mu);

/* The model has gone back to this step. */
void model_units_forget(struct model *m, uint64_t step);

/* Has the last work of the unit left the sum of squares of the step's gradient? Not a
 * predecessor's. */
static inline bool model_unit_summed(const struct model_unit *mu, uint64_t step)
{
    const bool summed = mu->kind == MODEL_SUM || mu->kind == MODEL_ZERO ||
                        (mu->kind == MODEL_ACCUMULATE && mu->action.last);
    return summed && mu->action.step == step;
}

#endif
