/* Micro-batches of a step where they are not the same for all steps: by the step's number, each row
 * until the next. Pure. */
#ifndef SHD_RAMP_H
#define SHD_RAMP_H

#include <stdint.h>

#define RAMP_ROWS_MAX 64u
#define RAMP_STEP_MAX ((UINT64_C(1) << 33) - 1) /* a ledger's steps are fewer */

struct ramp_row {
    uint64_t from; /* this step, and those behind it */
    uint32_t micro_batches;
};

struct ramp {
    uint32_t count;                      /* > 0 */
    struct ramp_row rows[RAMP_ROWS_MAX]; /* their steps ascend, from 0 */
};

uint32_t ramp_at(const struct ramp *ramp, uint64_t step);

/* The most of any row. */
uint32_t ramp_max(const struct ramp *ramp);

#endif
