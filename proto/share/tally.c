/* See tally.h. */
#include "proto/share/tally.h"

#include <math.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/layout.h"

#define MAGNITUDE   0x7fffffffu
#define EXP_SPECIAL 0xffu
#define FRACTION    23
/* No sum of fp32 squares over SHD_MODEL_ELEMS_MAX elements has a higher limb: those of all owners
 * can be added without a carry out of the top. */
#define LIMBS_USED (FIXSUM_LIMBS - 1)

void tally_init(struct tally *t)
{
    memset(t, 0, sizeof *t);
    t->min = INFINITY;
    t->max = -INFINITY;
}

/* Sums of a block, in the order of its elements. */
struct block {
    double sum[TALLY_SIGNS], squares;
};

static uint32_t bin_of(uint32_t magnitude)
{
    const uint32_t exponent = magnitude >> FRACTION;
    return exponent > 0 ? exponent + FRACTION - 1 : 31 - (uint32_t)__builtin_clz(magnitude);
}

/* Not by the processor's conversion, which may be set to take a denormal for zero. */
static double value_of(uint32_t magnitude)
{
    float x;
    if (magnitude >> FRACTION == 0)
        return (double)magnitude * 0x1p-149;
    memcpy(&x, &magnitude, sizeof x);
    return (double)x;
}

static void add_one(struct tally *t, struct block *b, uint32_t bits)
{
    const uint32_t magnitude = bits & MAGNITUDE;
    const bool above = bits == magnitude;
    if (magnitude >> FRACTION == EXP_SPECIAL) {
        t->nans += magnitude > EXP_SPECIAL << FRACTION;
        t->infs += magnitude == EXP_SPECIAL << FRACTION;
        return;
    }
    const double x = value_of(magnitude), value = above ? x : -x;
    t->min = value < t->min ? value : t->min;
    t->max = value > t->max ? value : t->max;
    if (magnitude == 0) {
        t->zeros++;
        return;
    }
    t->bins[above][bin_of(magnitude)]++;
    b->sum[TALLY_ABOVE] += above ? x : 0;
    b->sum[TALLY_BELOW] += above ? 0 : x;
    b->squares += x * x;
}

/* Elements of the block that x[0] is in. */
static uint64_t block_elems(uint64_t elems, uint64_t head_elems)
{
    CHECK(head_elems > 0 && head_elems <= SHD_BLOCK_ELEMS);
    return elems < head_elems ? elems : head_elems;
}

void tally_add(struct tally *t, const float *x, uint64_t elems, uint64_t head_elems)
{
    t->elems += elems;
    for (uint64_t count = block_elems(elems, head_elems); elems > 0;
         count = block_elems(elems, SHD_BLOCK_ELEMS)) {
        struct block b = { .squares = 0 };
        for (uint64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], sizeof bits);
            add_one(t, &b, bits);
        }
        fixsum_add(&t->sum[TALLY_ABOVE], b.sum[TALLY_ABOVE]);
        fixsum_add(&t->sum[TALLY_BELOW], b.sum[TALLY_BELOW]);
        fixsum_add(&t->squares, b.squares);
        x += count;
        elems -= count;
    }
    fixsum_carry(&t->sum[TALLY_ABOVE]);
    fixsum_carry(&t->sum[TALLY_BELOW]);
    fixsum_carry(&t->squares);
}

void tally_add_weights(struct tally *t, const float *p, uint64_t elems, uint64_t head_elems)
{
    for (uint64_t count = block_elems(elems, head_elems); elems > 0;
         count = block_elems(elems, SHD_BLOCK_ELEMS)) {
        double squares = 0;
        for (uint64_t i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, &p[i], sizeof bits);
            const bool finite = (bits & MAGNITUDE) >> FRACTION != EXP_SPECIAL;
            const double x = finite ? value_of(bits & MAGNITUDE) : 0;
            squares += x * x;
        }
        fixsum_add(&t->weights, squares);
        p += count;
        elems -= count;
    }
    fixsum_carry(&t->weights);
}

void tally_merge(struct tally *t, const struct tally *part)
{
    t->elems += part->elems;
    t->zeros += part->zeros;
    t->nans += part->nans;
    t->infs += part->infs;
    t->min = part->min < t->min ? part->min : t->min;
    t->max = part->max > t->max ? part->max : t->max;
    struct fixsum *const to[] = { &t->sum[0], &t->sum[1], &t->squares, &t->weights };
    const struct fixsum *const from[] = { &part->sum[0], &part->sum[1], &part->squares,
                                          &part->weights };
    for (uint32_t i = 0; i < ARRAY_SIZE(to); i++) {
        fixsum_merge(to[i], from[i]);
        fixsum_carry(to[i]);
    }
    for (uint32_t sign = 0; sign < TALLY_SIGNS; sign++)
        for (uint32_t i = 0; i < TALLY_BINS; i++)
            t->bins[sign][i] += part->bins[sign][i];
}

static bool sum_is_sound(const struct fixsum *s)
{
    return s->adds == 0 && fixsum_is_carried(s) && s->limb[LIMBS_USED] == 0;
}

/* Of both signs; UINT64_MAX: one of them is more than there can be. */
static uint64_t count_bins(const struct tally *t, uint64_t elems)
{
    uint64_t count = 0;
    for (uint32_t sign = 0; sign < TALLY_SIGNS; sign++)
        for (uint32_t i = 0; i < TALLY_BINS; i++) {
            if (t->bins[sign][i] > elems)
                return UINT64_MAX;
            count += t->bins[sign][i]; /* 554 of at most 2^48 */
        }
    return count;
}

bool tally_check(const struct tally *t, uint64_t elems)
{
    if (elems > SHD_MODEL_ELEMS_MAX || t->elems != elems || t->zeros > elems || t->nans > elems ||
        t->infs > elems)
        return false;
    const uint64_t binned = count_bins(t, elems);
    if (binned == UINT64_MAX || binned + t->zeros + t->nans + t->infs != elems)
        return false;
    const bool any = binned + t->zeros > 0;
    if (any ? !isfinite(t->min) || !isfinite(t->max) || t->min > t->max
            : t->min != (double)INFINITY || t->max != -(double)INFINITY)
        return false;
    return sum_is_sound(&t->sum[0]) && sum_is_sound(&t->sum[1]) && sum_is_sound(&t->squares) &&
           sum_is_sound(&t->weights);
}

uint64_t tally_finite(const struct tally *t)
{
    return t->elems - t->nans - t->infs;
}

/* a - b of carried sums, rounded once. */
static double difference(const struct fixsum *a, const struct fixsum *b)
{
    int top = FIXSUM_LIMBS - 1;
    while (top > 0 && a->limb[top] == b->limb[top])
        top--;
    const bool negative = a->limb[top] < b->limb[top];
    const struct fixsum *more = negative ? b : a, *less = negative ? a : b;
    struct fixsum rest = { .adds = 0 };
    uint64_t borrow = 0;
    for (int i = 0; i < FIXSUM_LIMBS; i++) {
        const uint64_t take = less->limb[i] + borrow;
        borrow = more->limb[i] < take;
        rest.limb[i] = more->limb[i] + (borrow << 32) - take;
    }
    CHECK(borrow == 0);
    return negative ? -fixsum_value(&rest) : fixsum_value(&rest);
}

double tally_mean(const struct tally *t)
{
    const uint64_t finite = tally_finite(t);
    return finite > 0 ? difference(&t->sum[TALLY_ABOVE], &t->sum[TALLY_BELOW]) / (double)finite
                      : (double)NAN;
}

double tally_rms(const struct tally *t)
{
    const uint64_t finite = tally_finite(t);
    return finite > 0 ? sqrt(fixsum_value(&t->squares) / (double)finite) : (double)NAN;
}

double tally_ratio(const struct tally *t)
{
    const double weights = fixsum_value(&t->weights);
    return weights > 0 ? sqrt(fixsum_value(&t->squares)) / sqrt(weights) : (double)NAN;
}

static double between(const struct tally *t, double x)
{
    return x < t->min ? t->min : x > t->max ? t->max : x;
}

/* In ascending order: bins below zero from the largest magnitude on, zeros, bins above. */
double tally_quantile(const struct tally *t, double q)
{
    const uint64_t finite = tally_finite(t);
    if (finite == 0)
        return (double)NAN;
    double left = q * (double)finite; /* values still to be passed */
    for (uint32_t i = TALLY_BINS; i-- > 0;) {
        const double count = (double)t->bins[TALLY_BELOW][i],
                     low = ldexp(1, (int)i + TALLY_EXP_MIN);
        if (count > 0 && left <= count)
            return between(t, -(low + low * (1 - left / count)));
        left -= count;
    }
    if (t->zeros > 0 && left <= (double)t->zeros)
        return between(t, 0);
    left -= (double)t->zeros;
    for (uint32_t i = 0; i < TALLY_BINS; i++) {
        const double count = (double)t->bins[TALLY_ABOVE][i],
                     low = ldexp(1, (int)i + TALLY_EXP_MIN);
        if (count > 0 && left <= count)
            return between(t, low + low * (left / count));
        left -= count;
    }
    return t->max;
}
