/* Rules of single units' norms (proto/spec/guard.h): which is the first that a step is beyond, and
 * by which unit, the one that is above its limit of the rule by the largest factor, the first of
 * equals. A function of the exact sums of all owners, and of limits that owner 0 has told, so the
 * same whoever decides. Pure. */
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

/* Of the unit so many limits are its own: one of each rule with a window that looks at it. */
uint32_t watch_own(const struct guard_limits *limits, uint8_t watched);

/* A unit, ascending. */
struct watch_unit {
    uint32_t unit;
    double norm, squares; /* of the mean gradient; of their sum */
    const double *own;    /* [watch_own()], in the order of the rules */
};
void watch_unit(struct watch *w, const struct guard_limits *limits, const struct watch_unit *u);

/* All units are known: the decision, which no rule or a whole norm's or loss's has made, becomes
 * that of a rule of units where one comes first. True: it has. */
bool watch_end(const struct watch *w, const struct guard_limits *limits, struct decision *d);

#endif
