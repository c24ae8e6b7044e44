/* Small models for tests of plans: one tensor a unit, made by hand or at random. */
#ifndef SHD_TEST_PLAN_TOY_H
#define SHD_TEST_PLAN_TOY_H

#include "client/plan/plan.h"
#include "tests/lib/test.h"

#define TOY_UNITS_MAX 24u

/* As much of a spec as a plan looks at. */
struct toy {
    struct spec spec;
    struct spec_unit units[TOY_UNITS_MAX];
    struct spec_tensor tensors[TOY_UNITS_MAX];
    uint32_t order[TOY_UNITS_MAX];
    struct plan_trace trace; /* of order */
};

/* units of 1,000 elements each, all of them in the trace. */
void toy_chain(struct toy *t, uint32_t units);

/* The unit itself, or one that it uses. */
bool toy_reads(const struct spec *s, uint32_t reader, uint32_t unit);

uint32_t toy_below(uint64_t *rng, uint32_t limit);

/* 1..24 units of random sizes, uses of earlier units, frozen units, accumulate 1..4, and a trace
 * that may skip units and, one time in four, runs them in an order of its own. */
void toy_random(struct toy *t, uint64_t *rng);

struct plan_policy toy_policy(uint64_t *rng);

/* What the trace reads: units in it and those they use. */
bool toy_in_play(const struct toy *t, uint32_t unit);

struct plan toy_build(const struct toy *t, const struct plan_policy *p, uint32_t micros);

/* "FETCH0 WAIT0 ..." */
void toy_print(const struct plan *plan, char *buf, size_t bytes);

#endif
