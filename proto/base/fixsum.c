/* See fixsum.h. */
#include "proto/base/fixsum.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"

#define LIMB_BITS 32
#define LIMB_MASK 0xffffffffu
#define ADDS_MAX  (1u << 30) /* each add or merge raises a limb by less than 2^32 */

void fixsum_init(struct fixsum *s)
{
    memset(s, 0, sizeof *s);
}

void fixsum_carry(struct fixsum *s)
{
    uint64_t carry = 0;
    for (int i = 0; i < FIXSUM_LIMBS; i++) {
        const uint64_t sum = s->limb[i] + carry;
        s->limb[i] = sum & LIMB_MASK;
        carry = sum >> LIMB_BITS;
    }
    CHECK(carry == 0);
    s->adds = 0;
}

static void count_add(struct fixsum *s)
{
    if (++s->adds >= ADDS_MAX)
        fixsum_carry(s);
}

void fixsum_add(struct fixsum *s, double x)
{
    CHECK(x >= 0 && x < 0x1p300);
    if (x == 0)
        return;
    int exp;
    const double frac = frexp(x, &exp);        /* x = frac * 2^exp, frac in [.5, 1) */
    uint64_t bits = (uint64_t)ldexp(frac, 53); /* exact: 53-bit integer */
    int pos = exp - 53 - FIXSUM_MIN_EXP;       /* of the lowest bit */
    if (pos < 0) {
        if (pos <= -64)
            return;
        bits >>= -pos;
        pos = 0;
    }
    const int limb = pos / LIMB_BITS;
    const unsigned shift = (unsigned)pos % LIMB_BITS;
    CHECK(limb + 2 < FIXSUM_LIMBS);
    s->limb[limb] += (bits << shift) & LIMB_MASK;
    s->limb[limb + 1] += (bits >> (LIMB_BITS - shift)) & LIMB_MASK;
    if (shift > 0)
        s->limb[limb + 2] += bits >> (2 * LIMB_BITS - shift);
    count_add(s);
}

void fixsum_merge(struct fixsum *s, const struct fixsum *t)
{
    struct fixsum carried = *t;
    fixsum_carry(&carried);
    for (int i = 0; i < FIXSUM_LIMBS; i++)
        s->limb[i] += carried.limb[i];
    count_add(s);
}

double fixsum_value(const struct fixsum *s)
{
    struct fixsum t = *s;
    fixsum_carry(&t);
    int top = FIXSUM_LIMBS - 1;
    while (top >= 0 && t.limb[top] == 0)
        top--;
    if (top < 0)
        return 0;
    /* The leading 64 bits as one integer, the rest cut: then cut to the 53 a double holds. */
    unsigned lead = 0;
    while ((t.limb[top] >> lead) > 1)
        lead++;
    uint64_t bits = 0;
    int filled = 0;
    for (int i = top; i >= 0 && filled < 64; i--) {
        const int take = i == top ? (int)lead + 1 : LIMB_BITS;
        const int room = 64 - filled < take ? 64 - filled : take;
        bits = (room == 64 ? 0 : bits << room) | (t.limb[i] >> (take - room));
        filled += room;
    }
    bits <<= 64 - filled;
    const int top_exp = top * LIMB_BITS + (int)lead + FIXSUM_MIN_EXP;
    return ldexp((double)(bits >> 11), top_exp - 52);
}

void fixsum_pack(const struct fixsum *s, uint8_t ret_bytes[FIXSUM_BYTES])
{
    if (s == NULL) {
        memset(ret_bytes, 0xff, FIXSUM_BYTES);
        return;
    }
    struct fixsum carried = *s;
    fixsum_carry(&carried);
    CHECK(carried.limb[FIXSUM_LIMBS - 1] == 0);
    for (size_t i = 0; i < FIXSUM_LIMBS; i++) {
        const uint32_t limb = (uint32_t)carried.limb[i];
        memcpy(ret_bytes + i * sizeof limb, &limb, sizeof limb);
    }
}

bool fixsum_unpack(const uint8_t bytes[FIXSUM_BYTES], struct fixsum *ret_sum, bool *ret_none)
{
    uint32_t limb = 0, full = 0;
    struct fixsum s;
    fixsum_init(&s);
    for (size_t i = 0; i < FIXSUM_LIMBS; i++) {
        memcpy(&limb, bytes + i * sizeof limb, sizeof limb);
        s.limb[i] = limb;
        full += limb == UINT32_MAX;
    }
    const bool none = full == FIXSUM_LIMBS;
    if (!none && limb != 0)
        return false;
    if (none)
        fixsum_init(&s);
    *ret_none = none;
    *ret_sum = s;
    return true;
}

int fixsum_compare(const struct fixsum *a, const struct fixsum *b)
{
    CHECK(fixsum_is_carried(a) && fixsum_is_carried(b));
    for (int i = FIXSUM_LIMBS; i-- > 0;)
        if (a->limb[i] != b->limb[i])
            return a->limb[i] < b->limb[i] ? -1 : 1;
    return 0;
}

struct fixsum fixsum_difference(const struct fixsum *a, const struct fixsum *b)
{
    struct fixsum d;
    uint64_t borrow = 0;
    CHECK(fixsum_compare(a, b) >= 0);
    fixsum_init(&d);
    for (int i = 0; i < FIXSUM_LIMBS; i++) {
        const uint64_t less = b->limb[i] + borrow;
        borrow = a->limb[i] < less;
        d.limb[i] = (a->limb[i] - less) & LIMB_MASK;
    }
    CHECK(borrow == 0);
    return d;
}

bool fixsum_is_carried(const struct fixsum *s)
{
    for (int i = 0; i < FIXSUM_LIMBS; i++)
        if (s->limb[i] > LIMB_MASK)
            return false;
    return true;
}

void fixsum_text(const struct fixsum *s, char ret_text[FIXSUM_TEXT_BYTES])
{
    int top = FIXSUM_LIMBS - 1, low = 0;
    CHECK(fixsum_is_carried(s));
    while (top >= 0 && s->limb[top] == 0)
        top--;
    if (top < 0) {
        snprintf(ret_text, FIXSUM_TEXT_BYTES, "0p0");
        return;
    }
    while (s->limb[low] == 0)
        low++;
    int used = snprintf(ret_text, FIXSUM_TEXT_BYTES, "%" PRIx32, (uint32_t)s->limb[top]);
    for (int i = top - 1; i >= low; i--)
        used += snprintf(ret_text + used, FIXSUM_TEXT_BYTES - (size_t)used, "%08" PRIx32,
                         (uint32_t)s->limb[i]);
    snprintf(ret_text + used, FIXSUM_TEXT_BYTES - (size_t)used, "p%d",
             low * LIMB_BITS + FIXSUM_MIN_EXP);
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The digits before the p, into limbs from `low` up. */
static bool parse_digits(const char *text, size_t digits, int low, struct fixsum *sum)
{
    for (size_t i = 0; i < digits; i++) { /* from the lowest */
        const int digit = hex_digit(text[digits - 1 - i]), limb = low + (int)(i / 8);
        if (digit < 0 || limb >= FIXSUM_LIMBS - 1)
            return false;
        sum->limb[limb] |= (uint64_t)digit << (4 * (i % 8));
    }
    return digits > 0 && text[0] != '0';
}

bool fixsum_parse(const char *text, struct fixsum *ret_sum)
{
    struct fixsum sum;
    fixsum_init(&sum);
    const char *p = strchr(text, 'p');
    if (p == NULL || p - text > 8 * FIXSUM_LIMBS)
        return false;
    if (strcmp(text, "0p0") != 0) {
        char *end;
        const long exp = strtol(p + 1, &end, 10);
        const bool plain = p[1] == '-' || (p[1] >= '0' && p[1] <= '9');
        if (!plain || *end != '\0' || end == p + 1 || exp < FIXSUM_MIN_EXP ||
            exp >= FIXSUM_MIN_EXP + FIXSUM_LIMBS * LIMB_BITS)
            return false;
        const int at = (int)exp - FIXSUM_MIN_EXP;
        if (at % LIMB_BITS != 0 || !parse_digits(text, (size_t)(p - text), at / LIMB_BITS, &sum))
            return false;
    }
    *ret_sum = sum;
    return true;
}
