/* A tally: what owners count of a tensor's values, each of its own part, and what a client makes of
 * all parts. No element leaves its owner for it.
 *
 * Sums do not depend on who has which part: they are formed in fp64 over the 2,048-element blocks
 * of the unit, where every split among owners cuts as well, and blocks are added exactly
 * (fixsum.h). Values above and below zero are summed apart, and subtracted exactly at the end. So
 * all that comes of a tally is the same bits for any number of owners.
 *
 * Tallies cross processes as they lie here, little-endian; what comes from there is looked at first
 * (tally_check()). Pure.
 */
#ifndef SHD_TALLY_H
#define SHD_TALLY_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/fixsum.h"

/* Bin i has the magnitudes from 2^(i + TALLY_EXP_MIN) up to twice that: all of fp32, denormals too.
 */
#define TALLY_BINS    277u
#define TALLY_EXP_MIN (-149)

enum tally_sign { TALLY_BELOW, TALLY_ABOVE, TALLY_SIGNS }; /* zero */

struct tally {
    uint64_t elems; /* all that were looked at, with the next three */
    uint64_t zeros; /* of either sign */
    uint64_t nans, infs;
    double min, max;                /* of the finite ones; +inf, -inf: there is none */
    struct fixsum sum[TALLY_SIGNS]; /* of magnitudes; these are carried */
    struct fixsum squares;          /* of the finite ones */
    struct fixsum weights;          /* of an update: squares of the parameters it led to */
    uint64_t bins[TALLY_SIGNS][TALLY_BINS];
};
#define TALLY_BYTES 5152u
_Static_assert(sizeof(struct tally) == TALLY_BYTES, "tallies cross processes");

void tally_init(struct tally *t);

/* Add x[elems]; head_elems (1 to 2,048): from x[0] to the next border of a block of its unit. */
void tally_add(struct tally *t, const float *x, uint64_t elems, uint64_t head_elems);

/* Add the squares of p[elems] to `weights`, but of what is not finite. */
void tally_add_weights(struct tally *t, const float *p, uint64_t elems, uint64_t head_elems);

/* t += part. Both are checked, or were made here. */
void tally_merge(struct tally *t, const struct tally *part);

/* Is this a tally of so many elements, as tally_add() leaves one? What passes can be merged, as
 * many as there are owners, and evaluated. */
bool tally_check(const struct tally *t, uint64_t elems);

/* -- What comes of it ---------------------------------------------------------------------------
 * Of the finite values, one rounding to fp64 for a sum, one for each operation on it; NaN where
 * there are none. */

uint64_t tally_finite(const struct tally *t);
double tally_mean(const struct tally *t);
double tally_rms(const struct tally *t);

/* The root of the sum of squares over that of the parameters' squares; NaN: of no parameters. */
double tally_ratio(const struct tally *t);

/* The value below which the share q (0 to 1) of the finite ones lie: exact to a bin, linear inside
 * of it, never beyond min and max. NaN: there is none. */
double tally_quantile(const struct tally *t, double q);

#endif
