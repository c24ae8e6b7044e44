/* Schedules as data: a policy and a model's units give an array of operations, and the executor
 * (client/exec.c) runs it. Pure: no I/O, no clock; checked and counted by tests as data.
 *
 * One plan covers one step of one worker: its micro-batches one after the other, then PREPARE
 * and COMMIT. Strategies differ only in the operations they emit.
 */
#ifndef SHD_PLAN_H
#define SHD_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/spec.h"
#include "proto/status.h"

enum plan_op_kind {
    PLAN_FETCH, /* ask for a unit's parameters (no wait); from here on they are held */
    PLAN_WAIT,  /* until they are readable */
    PLAN_FORWARD,
    PLAN_BACKWARD,
    PLAN_RETURN,  /* hand the unit's gradient to its owners */
    PLAN_FREE,    /* parameters no longer held */
    PLAN_PREPARE, /* wait until all micro-batches are in; unit and micro unused */
    PLAN_COMMIT,  /* unit and micro unused */
};

struct plan_op {
    enum plan_op_kind kind;
    uint32_t unit;
    uint32_t micro; /* ordinal among this worker's micro-batches of the step, 0.. */
};

enum plan_strategy { PLAN_ZERO3 = 1 };
enum plan_backward_prefetch { PLAN_PREFETCH_NONE, PLAN_PREFETCH_PRE };

struct plan_policy {
    enum plan_strategy strategy;
    uint32_t forward_prefetch; /* units ahead */
    enum plan_backward_prefetch backward_prefetch;
};

/* ZeRO-3, one unit ahead both ways: FSDP's FULL_SHARD with BACKWARD_PRE. */
#define PLAN_POLICY_DEFAULT \
    ((struct plan_policy){ PLAN_ZERO3, /* forward_prefetch= */ 1, PLAN_PREFETCH_PRE })

struct plan {
    struct plan_op *ops; /* owned */
    uint32_t op_count;
    uint32_t micros;
    uint32_t live_units_max; /* parameters held at once, by this plan */
    uint32_t live_grads_max; /* gradients between first BACKWARD that writes them and RETURN */
};

/* Units in forward order with their `uses` come from the spec. A unit stays held while a later
 * operation of the same phase uses it; the gradient of a used unit is returned after its own
 * BACKWARD, which is the last to add to it. Errors: SHD_EINVAL, SHD_ENOMEM. */
int plan_build(const struct spec *spec, const struct plan_policy *policy, uint32_t micros,
               struct plan *ret_plan, struct shd_err *e);
void plan_free(struct plan *plan);

/* Check a plan as data: every compute has its unit (and those it uses) fetched and waited for,
 * nothing is freed before its last use or twice, every unit is returned exactly once per
 * micro-batch, PREPARE and COMMIT come last. SHD_EINVAL names the operation. */
int plan_check(const struct plan *plan, const struct spec *spec, struct shd_err *e);

const char *plan_op_name(enum plan_op_kind kind);

#endif
