/* Schedules as data: a policy, a model's units and the order in which they run give an array of
 * operations, and the executor (client/run/exec.c) runs it. Pure: no I/O, no clock; checked and
 * counted by tests as data, printed by `shardctl plan`.
 *
 * One plan covers one step of one worker: its micro-batches one after the other, then PREPARE
 * and COMMIT. Strategies differ only in the operations they emit.
 *
 *   ddp, zero1   FETCH each unit once a step, before its first FORWARD; FREE all before PREPARE.
 *                zero1 RETURNs a unit after its BACKWARD, ddp all units after the last BACKWARD.
 *   zero2        per micro-batch FETCH before FORWARD, FREE after BACKWARD.
 *   zero3        FREE after FORWARD (not the last unit: it is needed next), FETCH for BACKWARD.
 *
 * With accumulate a > 1 gradients stay in the worker for a micro-batches; RETURN comes in the
 * last one of each group. Frozen units have no gradient: their BACKWARD runs (gradients flow
 * through), they are not returned.
 */
#ifndef SHD_PLAN_H
#define SHD_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

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

/* Same numbers as enum shd_strategy and enum shd_backward_prefetch in client/shd.h. Nothing is
 * built for PLAN_OWN: it is of operations that somebody gives (plan_own.h), which keep no
 * strategy's rules, but those of every plan. */
enum plan_strategy { PLAN_ZERO3, PLAN_ZERO2, PLAN_ZERO1, PLAN_DDP, PLAN_HYBRID, PLAN_OWN };
enum plan_backward_prefetch { PLAN_PREFETCH_PRE, PLAN_PREFETCH_POST, PLAN_PREFETCH_NONE };

struct plan_policy {
    enum plan_strategy strategy;
    uint32_t forward_prefetch; /* units ahead */
    enum plan_backward_prefetch backward_prefetch;
    uint32_t max_live_units;   /* 0: no bound */
    uint64_t max_live_bytes;   /* of parameters (publish dtype); 0: no bound */
    enum shd_dtype grad_dtype; /* of returned gradients; 0: the spec's */
    bool shares_sums; /* workers of a host sum a group together: each micro-batch is returned */
};

/* ZeRO-3, one unit ahead both ways: FSDP's FULL_SHARD with BACKWARD_PRE. */
#define PLAN_POLICY_DEFAULT \
    ((struct plan_policy){  \
        .strategy = PLAN_ZERO3, .forward_prefetch = 1, .backward_prefetch = PLAN_PREFETCH_PRE })

/* The order in which units really ran in one micro-batch. Units not listed took no part. */
struct plan_trace {
    const uint32_t *forward; /* borrowed, [count]: distinct units */
    uint32_t count;          /* backward is the reverse */
};

struct plan_cost {
    uint32_t live_units_max; /* parameters held at once */
    uint32_t live_grads_max; /* gradients between the first BACKWARD that writes and RETURN */
    uint64_t live_param_bytes_max;
    uint64_t live_grad_bytes_max; /* fp32 */
    uint64_t live_bytes_max;      /* both at once: not the sum of the two maxima */
    uint64_t fetched_bytes;       /* per worker and step: plan_unit_fetched_bytes() */
    uint64_t returned_bytes;      /* per worker and step, grad dtype, without padding */
    uint32_t fetches, returns;
};

/* The smallest bounds that can be kept: what is held at once without any prefetch. In zero3 what
 * one unit needs, with those it uses, else everything. */
struct plan_floor {
    uint32_t units;
    uint64_t bytes;                  /* 0: not known, of operations that were given */
    uint32_t units_unit, bytes_unit; /* that need most; zero3 only */
};

struct plan {
    struct plan_op *ops; /* owned */
    uint32_t op_count;
    uint32_t micros;
    struct plan_cost cost;
    struct plan_floor floor;
};

/* trace NULL: all units in spec order. micros: this worker's micro-batches, a multiple of
 * spec->accumulate (0, in a spec made by hand: 1). A unit stays held while a later operation of
 * the same phase reads it. A gradient is returned after the last BACKWARD that adds to it: the
 * unit's own, or that of a user which ran before it; a used unit that is not in the trace is there
 * for its users all the same. Prefetch gives way to a bound; then, in zero3, units held for later
 * are released and fetched again; what even so cannot be met is refused.
 * Errors: SHD_EINVAL names the field and the numbers; SHD_ENOTSUP hybrid; SHD_ERANGE a bound that
 * no order of operations can meet, with the smallest that would do; SHD_ENOMEM. */
int plan_build(const struct spec *spec, const struct plan_policy *policy,
               const struct plan_trace *trace, uint32_t micros, struct plan *ret_plan,
               struct shd_err *e);
void plan_free(struct plan *plan);

const char *plan_op_name(enum plan_op_kind kind);
const char *plan_strategy_name(enum plan_strategy strategy); /* "zero3" ... */
const char *plan_prefetch_name(enum plan_backward_prefetch prefetch);

/* The operation / strategy / prefetch called name; -1 when there is none. */
int plan_op_parse(const char *name);
int plan_strategy_parse(const char *name);
int plan_prefetch_parse(const char *name);

#endif
