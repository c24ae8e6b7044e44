/* Exact, order-free sum of non-negative doubles: how the global gradient norm comes out the same
 * for any number of owners.
 *
 * Each block of 2,048 gradients is summed in fp64 in one fixed order by its owner; the block sums
 * (never negative) are then added here as one wide fixed-point integer. Integer addition is
 * associative, so neither the number of owners nor the order of blocks can change a bit. The
 * range covers every finite sum of squares of fp32 values: bits 2^-298 to 2^341.
 *
 * Source of the idea: U. Kulisch's long accumulator; here 20 limbs of 32 bits held in int64, so
 * that 2^30 additions fit between two carries.
 */
#ifndef SHD_FIXSUM_H
#define SHD_FIXSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FIXSUM_LIMBS   20
#define FIXSUM_MIN_EXP (-298) /* weight of bit 0 of limb[0] */

struct fixsum {
    uint64_t limb[FIXSUM_LIMBS]; /* value = sum limb[i] * 2^(32 i + FIXSUM_MIN_EXP) */
    uint32_t adds;               /* since the last carry */
};

void fixsum_init(struct fixsum *s);

/* s += x. x must be finite, >= 0 and < 2^300; bits below 2^-298 (which sums of squares of fp32
 * values do not have) are dropped. */
void fixsum_add(struct fixsum *s, double x);

/* s += t, exactly. */
void fixsum_merge(struct fixsum *s, const struct fixsum *t);

/* Carry, so that each limb is below 2^32: the one form two equal sums share. */
void fixsum_carry(struct fixsum *s);

/* The value rounded towards zero to a double (deterministic: depends on the value alone). */
double fixsum_value(const struct fixsum *s);

/* As bytes of a message: the limbs of a sum below 2^310, as those of squares of fp32 values are;
 * NULL: all bits set, which is none. */
#define FIXSUM_BYTES (FIXSUM_LIMBS * 4u)
void fixsum_pack(const struct fixsum *s, uint8_t ret_bytes[FIXSUM_BYTES]);

/* False: that is nothing of the kind. *ret_none: it was NULL, and *ret_sum is 0. It is carried, and
 * so small that 2^30 of them can be added. */
bool fixsum_unpack(const uint8_t bytes[FIXSUM_BYTES], struct fixsum *ret_sum, bool *ret_none);

/* a - b, which is not below 0; both carried, as it is. */
struct fixsum fixsum_difference(const struct fixsum *a, const struct fixsum *b);

/* Below 0, 0, above 0: a < b, a == b, a > b. Both carried. */
int fixsum_compare(const struct fixsum *a, const struct fixsum *b);

/* True when every limb is below 2^32, as fixsum_carry() leaves it and the wire requires it. */
bool fixsum_is_carried(const struct fixsum *s);

/* A carried sum as "1a2bp-96": a hexadecimal integer times a power of two; the same text for the
 * same sum. */
#define FIXSUM_TEXT_BYTES (8 * FIXSUM_LIMBS + 8)
void fixsum_text(const struct fixsum *s, char ret_text[FIXSUM_TEXT_BYTES]);

/* Back, carried. False: it is no such text, or a sum so large that those of many owners could not
 * be added to it. */
bool fixsum_parse(const char *text, struct fixsum *ret_sum);

#endif
