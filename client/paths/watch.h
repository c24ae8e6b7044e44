/* Rules of single units' norms (proto/spec/guard.h): which is the first that a step is beyond, and
 * by which unit, the one that is above the rule's limit by the largest factor, the first of equals.
 * A function of the exact sums of all owners, so the same whoever decides. Pure. */
#ifndef SHD_WATCH_H
#define SHD_WATCH_H

#include <stdbool.h>
#include <stdint.h>

struct decision;
struct guard_limits;

struct watch {
    const uint8_t *watched; /* as in struct guard; borrowed */
    uint32_t rule;          /* 1 + its place; 0: none is exceeded */
    uint32_t unit;
    double norm, limit, squares;
};

void watch_begin(struct watch *w, const uint8_t *watched);

/* A unit, ascending. squares: of the sum of its gradients; norm: of their mean. */
void watch_unit(struct watch *w, const struct guard_limits *limits, uint32_t unit, double norm,
                double squares);

/* All units are known: the decision, which no rule or a whole norm's or loss's has made, becomes
 * that of a rule of units where one comes first. True: it has. */
bool watch_end(const struct watch *w, const struct guard_limits *limits, struct decision *d);

#endif
