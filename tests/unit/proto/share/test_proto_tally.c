/* Tallies: against plain C on random and special values, cut in any way, and from strangers. */
#include "proto/base/check.h"
#include "proto/share/tally.h"
#include "proto/spec/layout.h"
#include "tests/lib/test.h"

#define ELEMS 20000u

static float x[ELEMS];

/* Of every binary exponent, denormals too, both signs. */
static void fill_random(uint64_t seed)
{
    for (uint32_t i = 0; i < ELEMS; i++) {
        const uint32_t bits = (uint32_t)test_random(&seed) & ~(1u << 30); /* finite, below 2 */
        memcpy(&x[i], &bits, sizeof bits);
    }
}

static struct tally tally_of(const float *values, uint64_t elems, uint64_t head)
{
    struct tally t;
    tally_init(&t);
    tally_add(&t, values, elems, head);
    return t;
}

/* As fp64 of the compiler has it, one element after the other, without blocks. */
static void expect_plain(const struct tally *t, const float *values, uint64_t elems)
{
    uint64_t zeros = 0, finite = 0, below[TALLY_BINS] = { 0 }, above[TALLY_BINS] = { 0 };
    double least = INFINITY, most = -INFINITY;
    long double sum = 0, squares = 0, magnitudes = 0;
    for (uint64_t i = 0; i < elems; i++) {
        const double v = (double)values[i];
        int exponent;
        if (!isfinite(v))
            continue;
        finite++;
        zeros += v == 0;
        least = fmin(least, v);
        most = fmax(most, v);
        sum += v;
        magnitudes += fabs(v);
        squares += (long double)v * v;
        frexp(v, &exponent); /* in [0.5, 1) times 2^exponent */
        if (v != 0)
            (v < 0 ? below : above)[exponent - 1 - TALLY_EXP_MIN]++;
    }
    EXPECT_EQ(t->elems, elems);
    EXPECT_EQ(tally_finite(t), finite);
    EXPECT_EQ(t->zeros, zeros);
    EXPECT(finite == 0 || (t->min == least && t->max == most));
    EXPECT(memcmp(below, t->bins[TALLY_BELOW], sizeof below) == 0);
    EXPECT(memcmp(above, t->bins[TALLY_ABOVE], sizeof above) == 0);
    /* Either sum is off by one rounding for each element at most. */
    const double bound = (double)magnitudes * (double)elems * 0x1p-52;
    if (finite > 0)
        EXPECT_NEAR(tally_mean(t), (double)(sum / finite), bound / (double)finite + 0x1p-1074);
    if (finite > 0)
        EXPECT_NEAR(tally_rms(t), sqrt((double)(squares / finite)),
                    sqrt((double)(squares / finite)) * (double)elems * 0x1p-52);
    EXPECT(tally_check(t, elems));
}

TEST(counts_are_those_of_plain_c)
{
    static const uint64_t cases[] = { 1, 2, 31, 2047, 2048, 2049, 4096, 9999, ELEMS };
    for (uint64_t seed = 1; seed <= 20; seed++) {
        fill_random(test_seed(seed));
        for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
            const struct tally t = tally_of(x, cases[c], 1 + (seed * 97) % SHD_BLOCK_ELEMS);
            expect_plain(&t, x, cases[c]);
        }
    }
}

TEST(special_values_are_told_apart)
{
    const float values[] = { 0,
                             -0.0f,
                             NAN,
                             -NAN,
                             INFINITY,
                             -INFINITY,
                             0x1p-149f,
                             -0x1p-149f,
                             0x1.fffffep127f,
                             -0x1.fffffep127f,
                             1,
                             -1 };
    const struct tally t = tally_of(values, ARRAY_SIZE(values), SHD_BLOCK_ELEMS);
    expect_plain(&t, values, ARRAY_SIZE(values));
    EXPECT_EQ(t.zeros, 2);
    EXPECT_EQ(t.nans, 2);
    EXPECT_EQ(t.infs, 2);
    EXPECT_EQ(t.bins[TALLY_ABOVE][0], 1);
    EXPECT_EQ(t.bins[TALLY_BELOW][TALLY_BINS - 1], 1);
    EXPECT(tally_mean(&t) == 0); /* exactly: they cancel */
    const struct tally none = tally_of(values + 2, 4, SHD_BLOCK_ELEMS);
    EXPECT(tally_check(&none, 4));
    EXPECT(isnan(tally_mean(&none)) && isnan(tally_rms(&none)) &&
           isnan(tally_quantile(&none, 0.5)));
}

/* Also on a thread that takes them for zero, as PyTorch's may. */
TEST(denormals_count)
{
    const float values[] = { 0x1p-149f, -0x1p-140f, 0x1p-127f };
    const unsigned before = __builtin_ia32_stmxcsr();
    for (int flush = 0; flush < 2; flush++) {
        __builtin_ia32_ldmxcsr(before | (flush == 1 ? 0x8040 : 0)); /* FTZ and DAZ */
        struct tally t = tally_of(values, ARRAY_SIZE(values), SHD_BLOCK_ELEMS);
        tally_add_weights(&t, values, ARRAY_SIZE(values), SHD_BLOCK_ELEMS);
        __builtin_ia32_ldmxcsr(before);
        EXPECT(t.zeros == 0 && t.min == -0x1p-140 && t.max == 0x1p-127);
        EXPECT(t.bins[TALLY_ABOVE][0] == 1 && t.bins[TALLY_BELOW][9] == 1);
        EXPECT(tally_mean(&t) == (0x1p-149 - 0x1p-140 + 0x1p-127) / 3);
        EXPECT(fixsum_value(&t.squares) == 0x1p-298 + 0x1p-280 + 0x1p-254);
        EXPECT(tally_ratio(&t) == 1);
    }
}

/* What cancels is subtracted exactly: fp64 alone would lose it. */
TEST(what_nearly_cancels_is_exact)
{
    const float values[] = { 0x1p100f, 1, -0x1p100f, 0x1p-100f };
    struct tally t;
    tally_init(&t);
    for (size_t i = 0; i < ARRAY_SIZE(values); i++)
        tally_add(&t, &values[i], 1, 1); /* a block each */
    EXPECT(tally_mean(&t) == 0.25);
    fixsum_init(&t.sum[TALLY_ABOVE]);
    t.elems = 1;
    EXPECT(tally_mean(&t) == -0x1p100);
}

/* Owners cut where blocks end: the merged tally is the same to the last byte. */
TEST(parts_come_to_the_same_in_any_cut_and_order)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t random = test_seed(seed);
        fill_random(random);
        const uint64_t head = 1 + test_random(&random) % SHD_BLOCK_ELEMS;
        const struct tally whole = tally_of(x, ELEMS, head);
        const uint64_t cut = head + test_random(&random) % 9 * SHD_BLOCK_ELEMS;
        const struct tally first = tally_of(x, cut, head),
                           second = tally_of(x + cut, ELEMS - cut, SHD_BLOCK_ELEMS);
        struct tally merged;
        tally_init(&merged);
        tally_merge(&merged, seed % 2 == 0 ? &first : &second);
        tally_merge(&merged, seed % 2 == 0 ? &second : &first);
        EXPECT(memcmp(&merged, &whole, sizeof whole) == 0);
        EXPECT(tally_check(&merged, ELEMS));
    }
}

TEST(quantiles_are_exact_to_a_bin)
{
    float sorted[1000];
    for (int i = 0; i < 1000; i++)
        sorted[i] = (float)(i - 300) / 64;
    const struct tally t = tally_of(sorted, 1000, SHD_BLOCK_ELEMS);
    for (int i = 1; i < 1000; i++) {
        const double q = tally_quantile(&t, i / 1000.0), true_one = (double)sorted[i];
        /* Of the same sign, and of a neighbouring power of two at most; -1, 0 and 1 have bins that
         * begin there. */
        EXPECT(q >= t.min && q <= t.max);
        if (fabs(true_one) > 0.05)
            EXPECT(q / true_one >= 0.49 && q / true_one <= 2.05);
    }
    EXPECT(tally_quantile(&t, 0) == t.min);
    EXPECT(tally_quantile(&t, 1) == t.max);
}

TEST(ratio_is_of_norms)
{
    const float update[] = { 3, -4 }, weights[] = { 30, 40 };
    const float with_nan[] = { NAN, 50 };
    struct tally t;
    tally_init(&t);
    tally_add(&t, update, 2, 2);
    EXPECT(isnan(tally_ratio(&t)));
    tally_add_weights(&t, weights, 2, 2);
    EXPECT_NEAR(tally_ratio(&t), 0.1, 1e-15);
    tally_init(&t);
    tally_add(&t, update, 2, 2);
    tally_add_weights(&t, with_nan, 2, 2);
    EXPECT_NEAR(tally_ratio(&t), 0.1, 1e-15);
}

/* Each lie is seen before it is added to anything. */
TEST(a_strangers_tally_is_checked)
{
    fill_random(7);
    const struct tally good = tally_of(x, 5000, SHD_BLOCK_ELEMS);
    struct tally bad;
    EXPECT(tally_check(&good, 5000));
    EXPECT(!tally_check(&good, 4999));
#define EXPECT_BAD(change)                \
    do {                                  \
        bad = good;                       \
        change;                           \
        EXPECT(!tally_check(&bad, 5000)); \
    } while (0)
    EXPECT_BAD(bad.elems++);
    EXPECT_BAD(bad.zeros++);
    EXPECT_BAD(bad.nans = UINT64_MAX);
    EXPECT_BAD((bad.nans += 1, bad.infs -= 1));
    EXPECT_BAD(bad.min = NAN);
    EXPECT_BAD(bad.max = INFINITY);
    EXPECT_BAD((bad.min = 1, bad.max = -1));
    EXPECT_BAD(bad.bins[0][3]++);
    EXPECT_BAD((bad.bins[0][3] += UINT64_C(1) << 63, bad.bins[1][3] += UINT64_C(1) << 63));
    EXPECT_BAD(bad.sum[0].limb[5] |= UINT64_C(1) << 32);
    EXPECT_BAD(bad.sum[1].adds = 1);
    EXPECT_BAD(bad.squares.limb[FIXSUM_LIMBS - 1] = 1);
    EXPECT_BAD(bad.weights.limb[FIXSUM_LIMBS - 1] = UINT32_MAX);
#undef EXPECT_BAD
    /* The largest that passes can be added as often as there may be owners. */
    struct tally sum;
    bad = good;
    for (int i = 0; i < FIXSUM_LIMBS - 1; i++)
        bad.sum[0].limb[i] = bad.sum[1].limb[i] = bad.squares.limb[i] = bad.weights.limb[i] =
            UINT32_MAX;
    EXPECT(tally_check(&bad, 5000));
    tally_init(&sum);
    for (uint32_t i = 0; i < SHD_OWNERS_MAX; i++)
        tally_merge(&sum, &bad);
    EXPECT(isfinite(tally_mean(&sum)) && tally_rms(&sum) > 0);
}

TEST_MAIN()
