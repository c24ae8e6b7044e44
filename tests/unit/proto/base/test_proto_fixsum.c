/* fixsum against plain big-integer addition, one bit at a time, which shares no code with it. */
#include "proto/base/fixsum.h"

#include "tests/lib/test.h"

#define BITS 704 /* more than fixsum's 640: an overflow there would show here */

struct reference {
    uint8_t bit[BITS]; /* weight of bit i: 2^(i - 298) */
};

static void reference_add(struct reference *r, double x)
{
    uint64_t raw;
    memcpy(&raw, &x, sizeof raw);
    const int biased = (int)(raw >> 52 & 0x7ff);
    const uint64_t mantissa = (raw & ((UINT64_C(1) << 52) - 1)) |
                              (biased > 0 ? UINT64_C(1) << 52 : 0);
    const int low = (biased > 0 ? biased : 1) - 1075 + 298; /* index of the mantissa's bit 0 */
    int carry = 0;
    for (int i = 0; i < 53 || carry != 0; i++) {
        if (low + i < 0)
            continue; /* below 2^-298: dropped */
        const int sum = r->bit[low + i] + (i < 53 ? (int)(mantissa >> i & 1) : 0) + carry;
        r->bit[low + i] = sum & 1;
        carry = sum >> 1;
    }
}

static double reference_value(const struct reference *r)
{
    int top = BITS - 1;
    while (top >= 0 && r->bit[top] == 0)
        top--;
    double value = 0;
    for (int i = top; i >= 0 && i > top - 53; i--)
        value += ldexp((double)r->bit[i], i - 298);
    return value;
}

static void expect_same(const struct fixsum *s, const struct reference *r)
{
    struct fixsum t = *s;
    fixsum_carry(&t);
    EXPECT(fixsum_is_carried(&t));
    for (int i = 0; i < BITS; i++) {
        const int limb = i / 32;
        const int bit = limb < FIXSUM_LIMBS ? (int)(t.limb[limb] >> (i % 32) & 1) : 0;
        if (bit != r->bit[i])
            FAIL("bit %d is %d, expected %d", i, bit, r->bit[i]);
    }
    EXPECT(fixsum_value(s) == reference_value(r));
}

/* Non-negative, exponents over the whole range, some zero, some with few bits. */
static double random_term(uint64_t *state)
{
    const uint64_t how = test_random(state) % 16;
    const int exp = (int)(test_random(state) % 596) - 297;
    double frac = 1 + (double)(test_random(state) >> 12) * 0x1p-52;
    if (how == 0)
        return 0;
    if (how < 4)
        frac = 1;
    return ldexp(frac, exp);
}

TEST(sum_equals_big_integer_addition)
{
    uint64_t seed = 0x5eed1;
    printf("seed %#" PRIx64 "\n", seed);
    for (int round = 0; round < 300; round++) {
        struct fixsum s;
        struct reference r = { { 0 } };
        fixsum_init(&s);
        const int terms = (int)(test_random(&seed) % 200);
        for (int i = 0; i < terms; i++) {
            const double x = random_term(&seed);
            fixsum_add(&s, x);
            reference_add(&r, x);
        }
        expect_same(&s, &r);
    }
}

TEST(one_term_comes_back_exactly_for_every_exponent)
{
    uint64_t seed = 0x5eed2;
    printf("seed %#" PRIx64 "\n", seed);
    for (int exp = -298 + 52; exp <= 299; exp++) {
        const double x = ldexp(1 + (double)(test_random(&seed) >> 12) * 0x1p-52, exp);
        struct fixsum s;
        fixsum_init(&s);
        fixsum_add(&s, x);
        EXPECT(fixsum_value(&s) == x);
    }
    for (int exp = -298; exp <= 299; exp++) {
        struct fixsum s;
        fixsum_init(&s);
        fixsum_add(&s, ldexp(1, exp));
        EXPECT(fixsum_value(&s) == ldexp(1, exp));
    }
}

TEST(extremes_add_without_loss)
{
    struct fixsum s;
    struct reference r = { { 0 } };
    const double terms[] = { 0x1p-298, 0x1p299, 0x1.fffffffffffffp299, 0x1p-298, 0x1.8p-297, 0 };
    fixsum_init(&s);
    EXPECT(fixsum_value(&s) == 0);
    for (size_t i = 0; i < sizeof terms / sizeof terms[0]; i++) {
        fixsum_add(&s, terms[i]);
        reference_add(&r, terms[i]);
        expect_same(&s, &r);
    }
}

TEST(bits_below_the_range_are_dropped)
{
    const double tiny[] = { 0x1p-299, 0x1.fffffffffffffp-299, 0x1p-1074, 0x1p-1022, 0x1p-362 };
    for (size_t i = 0; i < sizeof tiny / sizeof tiny[0]; i++) {
        struct fixsum s;
        fixsum_init(&s);
        fixsum_add(&s, tiny[i]);
        EXPECT(fixsum_value(&s) == 0);
    }
    struct fixsum s;
    fixsum_init(&s);
    fixsum_add(&s, 0x1.8p-298); /* the half bit goes */
    EXPECT(fixsum_value(&s) == 0x1p-298);
}

TEST(value_is_cut_not_rounded)
{
    struct fixsum s;
    fixsum_init(&s);
    fixsum_add(&s, 1);
    fixsum_add(&s, 0x1.8p-53); /* above half an ulp: nearest would go up */
    EXPECT(fixsum_value(&s) == 1);
    fixsum_add(&s, 0x1p-53);
    EXPECT(fixsum_value(&s) == 1 + 0x1p-52);
}

#define TERMS 1000

static void shuffle(double *x, int count, uint64_t *seed)
{
    for (int i = count - 1; i > 0; i--) {
        const int k = (int)(test_random(seed) % (uint64_t)(i + 1));
        const double t = x[i];
        x[i] = x[k];
        x[k] = t;
    }
}

static void sum_split(const double *x, int count, uint32_t owners, uint64_t *seed,
                      struct fixsum *ret_sum)
{
    struct fixsum part[64];
    EXPECT(owners > 0 && owners <= 64);
    for (uint32_t o = 0; o < owners; o++)
        fixsum_init(&part[o]);
    for (int i = 0; i < count; i++)
        fixsum_add(&part[test_random(seed) % owners], x[i]);
    fixsum_init(ret_sum);
    for (uint32_t o = 0; o < owners; o++) {
        if (test_random(seed) % 2 == 0)
            fixsum_carry(&part[o]); /* as on the wire, or not */
        fixsum_merge(ret_sum, &part[o]);
    }
    fixsum_carry(ret_sum);
}

TEST(order_and_split_change_no_bit)
{
    uint64_t seed = 0x5eed3;
    printf("seed %#" PRIx64 "\n", seed);
    static double x[TERMS];
    for (int i = 0; i < TERMS; i++)
        x[i] = random_term(&seed);
    struct fixsum whole, split;
    fixsum_init(&whole);
    for (int i = 0; i < TERMS; i++)
        fixsum_add(&whole, x[i]);
    fixsum_carry(&whole);
    for (int round = 0; round < 100; round++) {
        shuffle(x, TERMS, &seed);
        sum_split(x, TERMS, (uint32_t)(test_random(&seed) % 64) + 1, &seed, &split);
        EXPECT(memcmp(whole.limb, split.limb, sizeof whole.limb) == 0);
        EXPECT(fixsum_value(&whole) == fixsum_value(&split));
    }
}

TEST(carry_comes_before_a_limb_can_overflow)
{
    struct fixsum s;
    fixsum_init(&s);
    s.adds = (1u << 30) - 2;
    s.limb[9] = (UINT64_C(1) << 62) - 1; /* as 2^30 additions may have left it */
    EXPECT(!fixsum_is_carried(&s));
    const double before = fixsum_value(&s);
    fixsum_add(&s, 0x1p-298);
    EXPECT_EQ(s.adds, (1u << 30) - 1);
    fixsum_add(&s, 0x1p-298);
    EXPECT_EQ(s.adds, 0);
    EXPECT(fixsum_is_carried(&s));
    EXPECT_EQ(s.limb[0], 2);
    EXPECT(fixsum_value(&s) == before);
}

TEST(carried_means_every_limb_below_2_to_32)
{
    for (int i = 0; i < FIXSUM_LIMBS; i++) {
        struct fixsum s;
        fixsum_init(&s);
        s.limb[i] = UINT32_MAX;
        EXPECT(fixsum_is_carried(&s));
        s.limb[i]++;
        EXPECT(!fixsum_is_carried(&s));
    }
}

TEST_MAIN()
