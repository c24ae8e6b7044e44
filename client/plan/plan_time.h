/* How long a step takes: a plan's operations, carried out on a clock of our own by workers and
 * owners that share one host's processors. Pure: the rates are data (`shardctl plan --calibrate`
 * measures them), the compute is what the caller says.
 *
 * The model. A worker does one thing after the other, as the executor does. An owner's event loop
 * takes one gradient after the other, its compute threads sum and update one slice after the other,
 * a unit's gradients in the order of their micro-batches; with path copy a transfer thread brings
 * one unit after the other. A piece of work first waits (somebody has to wake up), then needs
 * processors: with more threads than processors all get an equal share, and threads of owners slow
 * each other down by the memory that they share.
 *
 * Left out: workers that vary, losses, checkpoints, hosts. Group g of a step is worker
 * g % workers', as by rank.
 */
#ifndef SHD_PLAN_TIME_H
#define SHD_PLAN_TIME_H

#include <stdbool.h>
#include <stdint.h>

#include "client/plan/plan.h"
#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/spec/optimizer.h"
#include "proto/spec/spec.h"

/* Nanoseconds an element with one thread. near: all of the model is in the processor's caches; far:
 * it is in memory. In between, by the logarithm of its bytes. */
struct plan_rate {
    double near_ns, far_ns;
};

#define PLAN_DTYPES 3u /* plan_dtype_index() */

struct plan_rates {
    double processors;
    double near_bytes, far_bytes; /* plan_time_bytes() of the models that were measured */
    double wake_ns;               /* from a message to who sleeps until it comes */
    double send_ns;               /* of a worker's processor, to hand a gradient to one owner */
    double op_ns;                 /* of a worker's processor, for an operation of its plan */
    double return_ns;             /* of a daemon's event loop, for a gradient and its credit */
    double kernel_ns;     /* of an owner's compute threads, for an operation of few elements */
    double commit_ns;     /* from the last sum to the first update */
    double threads_share; /* time with a thread on each processor over that with one */
    struct plan_rate first[PLAN_DTYPES]; /* of sums, by grad_dtype: the first micro-batch's */
    struct plan_rate next[PLAN_DTYPES];  /* and further ones' */
    struct plan_rate stage[PLAN_DTYPES]; /* of a gradient into its slot, by grad_dtype */
    struct plan_rate fetch[PLAN_DTYPES]; /* of a copied parameter, by publish */
    struct plan_rate update[SPEC_OPTIMIZERS][PLAN_DTYPES]; /* by publish */
};

static inline uint32_t plan_dtype_index(enum shd_dtype dtype)
{
    return dtype == SHD_BF16 ? 1 : dtype == SHD_F16 ? 2 : 0;
}

struct plan_shape { /* what runs it */
    uint32_t workers, daemons;
    uint32_t threads; /* of each daemon */
    uint32_t slots;   /* of each worker at each owner */
    bool copies;      /* path copy */
};

struct plan_compute {          /* of one micro-batch; NULL: none */
    const double *forward_ns;  /* [units] */
    const double *backward_ns; /* [units] */
};

/* What a worker does with its step; the parts add up to step_ns. */
struct plan_time {
    double step_ns;
    double compute_ns;
    double fetch_ns;  /* parameters are published, and copied */
    double return_ns; /* gradients are handed over, or a free slot is awaited */
    double update_ns; /* owners add up the last gradients, or update what is needed next */
    double wait_ns;   /* for other workers, and the commit */
};

/* What an update reads and writes: caches hold it, or do not. */
uint64_t plan_time_bytes(const struct spec *spec);

/* Simulate steps until they repeat. Errors: SHD_ERANGE the plan is too large to be simulated;
 * SHD_ENOMEM. */
int plan_time(const struct spec *spec, const struct plan *plan, const struct plan_rates *rates,
              const struct plan_shape *shape, const struct plan_compute *compute,
              enum shd_dtype grad_dtype, struct plan_time *ret_time, struct shd_err *e);

/* "update": the largest part's name. */
const char *plan_time_bound(const struct plan_time *t);

#endif
