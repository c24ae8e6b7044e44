/* What gradients, updates and parameters of each unit come to, of the last steps: sums of squares
 * over this owner's slices. They are exact (fixsum.h), so that whoever adds all owners' gets the
 * same bits for any number of them.
 *
 *   gradient      of each step: the sum that Prepare's is made of, so it costs nothing
 *   update, weight  of each NORMS_EVERY-th step alone: parameters after it minus those before, and
 *                 those after it, summed by the update's kernel (kern_change)
 *
 * Two rings in memory of the process, a row a step: what a predecessor had seen is not known, nor
 * is an update that it had begun. The loop thread writes, any thread reads. Counted: a snapshot
 * that shows it may outlive the model.
 */
#ifndef SHD_NORMS_H
#define SHD_NORMS_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/fixsum.h"
#include "proto/share/unit_row.h"

struct kern_change;
struct kern_sum;
struct norms;

#define NORMS_STEPS_MAX 256u                /* that are kept; fewer where units are many: */
#define NORMS_BYTES_MAX (UINT64_C(8) << 20) /* of the ring of gradients; the other is a fourth */
#define NORMS_STEPS_MIN 2u          /* the last whole one, and the one that is being written */
#define NORMS_EVERY     UNITS_EVERY /* steps k with k % NORMS_EVERY == 0 are measured */
#define NORMS_AT_ONCE   4u          /* updates that run: STEP_APPLY_AHEAD */

/* NULL: no memory. */
struct norms *norms_new(uint32_t units);
struct norms *norms_ref(struct norms *n);
void norms_unref(struct norms *n); /* NULL is a no-op */

/* A step, as its decision has it. */
struct norms_step {
    uint64_t step;
    double divisor; /* what its sum of gradients is divided by where their mean is meant */
    bool skipped;   /* it changed nothing */
    uint32_t guard; /* enum guard_what: who skipped it */
};

/* A unit's gradient, before its update. Of a step that none was put of there is no row. */
void norms_put_gradient(struct norms *n, const struct norms_step *step, uint32_t unit,
                        const struct kern_sum *sum);

/* Is the step's update to be measured? Then into this, which is the caller's until he gives it back
 * with norms_put_change(); NULL: no, or NORMS_AT_ONCE others are. */
struct kern_change *norms_take_change(struct norms *n, uint64_t step);

/* The update is done. Known only where all of it was measured. */
void norms_put_change(struct norms *n, uint64_t step, uint32_t unit, struct kern_change *change);

/* Steps from this one on are to be made again: theirs are forgotten. */
void norms_forget(struct norms *n, uint64_t from);

/* -- Looking ----------------------------------------------------------------------------------- */

enum norms_known { NORMS_UNKNOWN, NORMS_FINITE, NORMS_NOT_FINITE };

struct norms_cell { /* sums are carried; meaningless unless NORMS_FINITE */
    enum norms_known gradient, change;
    struct fixsum grad, update, weight;
};

uint32_t norms_steps(const struct norms *n); /* rows of the ring of gradients */

/* The row of a step: false: there is none (any more). */
bool norms_get_step(struct norms *n, uint64_t step, struct norms_step *ret_step);

/* Units [first, first + count) of it; a few hundred at a time, for the loop waits meanwhile. */
void norms_get_cells(struct norms *n, uint64_t step, uint32_t first, uint32_t count,
                     struct norms_cell *ret_cells);

#endif
