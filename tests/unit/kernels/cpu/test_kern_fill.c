/* Initial values: Philox, normal and uniform fills on every instruction set and thread count, in
 * any split, against independent references and against statistics. */
#include "tests/lib/kern_util.h"

/* The generator again, written straight from the paper, and held to its authors' vectors. */
static void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c[4] = { counter[0], counter[1], counter[2], counter[3] };
    for (uint32_t round = 0; round < 10; round++) {
        const uint32_t k0 = key[0] + round * 0x9e3779b9u, k1 = key[1] + round * 0xbb67ae85u;
        const uint64_t p0 = (uint64_t)c[0] * 0xd2511f53u, p1 = (uint64_t)c[2] * 0xcd9e8d57u;
        const uint32_t next[4] = { (uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1,
                                   (uint32_t)(p0 >> 32) ^ c[3] ^ k1, (uint32_t)p0 };
        memcpy(c, next, sizeof c);
    }
    memcpy(out, c, sizeof c);
}

/* Random123 1.09, examples/kat_vectors, lines "philox4x32 10". */
TEST(reference_philox_gives_the_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } kat[] = {
        { { 0, 0, 0, 0 }, { 0, 0 }, { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 } },
        { { 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff },
          { 0xffffffff, 0xffffffff },
          { 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd } },
        { { 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 },
          { 0xa4093822, 0x299f31d0 },
          { 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 } },
    };
    for (size_t i = 0; i < ARRAY_SIZE(kat); i++) {
        uint32_t out[4];
        philox(kat[i].counter, kat[i].key, out);
        EXPECT(memcmp(out, kat[i].want, sizeof out) == 0);
    }
}

static uint32_t word_of(uint64_t key, uint64_t index)
{
    const uint32_t counter[4] = { (uint32_t)(index / 4), (uint32_t)(index / 4 >> 32), 0, 0 };
    const uint32_t k[2] = { (uint32_t)key, (uint32_t)(key >> 32) };
    uint32_t out[4];
    philox(counter, k, out);
    return out[index % 4];
}

/* Box-Muller with libm, in fp64. */
static double normal_of(uint64_t key, uint64_t index)
{
    const double u = ((double)word_of(key, index & ~UINT64_C(1)) + 1) * 0x1p-32;
    const double turn = ((double)word_of(key, index | 1) + 0.5) * 0x1p-32;
    const double angle = 2 * 3.14159265358979323846 * turn;
    return sqrt(-2 * log(u)) * (index % 2 == 0 ? cos(angle) : sin(angle));
}

static const uint64_t keys[] = { 0, 1, UINT64_C(0x0123456789abcdef), UINT64_MAX };
static const uint64_t starts[] = { 0, 1, 2, 3, 63, UINT64_C(0x3fffffffd), (UINT64_C(1) << 48) - 1 };

/* The word reaches the element: uniform in [0, 1) is the word's fp32 rounding times 2^-32, below 1
 * by the rule for the upper end. */
static void check_uniform(struct kern *k, const char *label, void *arg)
{
    (void)arg;
    enum { ELEMS = 261 };
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        for (size_t j = 0; j < ARRAY_SIZE(starts); j++) {
            float got[ELEMS], want[ELEMS];
            EXPECT_RUNS(
                fill, k,
                (&(struct kern_fill){ got, ELEMS, starts[j], keys[i], KERN_FILL_UNIFORM, 0, 1 }));
            for (uint64_t n = 0; n < ELEMS; n++) {
                want[n] = (float)((double)word_of(keys[i], starts[j] + n) * 0x1p-32);
                if (want[n] >= 1)
                    want[n] = 0x1.fffffep-1f;
            }
            EXPECT_SAME_FLOATS(got, want, ELEMS, label);
        }
    }
}

TEST(uniform_is_philox_word_by_index)
{
    devices_each(check_uniform, NULL);
}

/* [1, 1 + 2 ulp): about a quarter of all values round up to b, which must not appear. */
TEST(uniform_never_reaches_its_upper_end)
{
    enum { ELEMS = 4096 };
    static float x[ELEMS];
    struct kern *k = device_new(NULL, 1);
    const float end = 1 + 2 * 0x1p-23f;
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, ELEMS, 0, 5, KERN_FILL_UNIFORM, 1, end }));
    for (uint64_t i = 0; i < ELEMS; i++)
        EXPECT(x[i] >= 1 && x[i] < end);
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, ELEMS, 0, 5, KERN_FILL_UNIFORM, -3, -1 }));
    for (uint64_t i = 0; i < ELEMS; i++)
        EXPECT(x[i] >= -3 && x[i] < -1);
    k->ops->free(k);
}

/* One fp32 rounding (2^-24 relative) of a z = r cos or r sin that is itself good to 5e-14 |r|, with
 * |r| <= 6.66; libm's reference adds the rounding of its angle, 1e-15 |r|: together 3.4e-13. */
static void check_normal(struct kern *k, const char *label, void *arg)
{
    (void)arg;
    enum { ELEMS = 1021 };
    for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
        for (size_t j = 0; j < ARRAY_SIZE(starts); j++) {
            float got[ELEMS];
            EXPECT_RUNS(
                fill, k,
                (&(struct kern_fill){ got, ELEMS, starts[j], keys[i], KERN_FILL_NORMAL, 0, 1 }));
            for (uint64_t n = 0; n < ELEMS; n++) {
                const double want = normal_of(keys[i], starts[j] + n);
                if (!(fabs((double)got[n] - want) <= 0x1p-24 * fabs(want) + 3.4e-13))
                    FAIL("%s: key %" PRIx64 " index %" PRIu64 ": %.9g, expected %.17g", label,
                         keys[i], starts[j] + n, (double)got[n], want);
            }
        }
    }
}

TEST(normal_is_box_muller_of_philox)
{
    devices_each(check_normal, NULL);
}

struct fill_case {
    enum kern_fill_kind kind;
    float a, b;
    float *want; /* from the first device */
};
enum { SPLIT_ELEMS = 150 * BLOCK + 77 };

/* Every device, and on it every way of cutting the range, gives the bits of scalar in one piece. */
static void check_split(struct kern *k, const char *label, void *arg)
{
    struct fill_case *c = arg;
    uint64_t state = test_seed(4711);
    const uint64_t first = 5, key = 42;
    struct guarded got = guarded_new(SPLIT_ELEMS * sizeof(float), 4);
    float *out = got.base;
    EXPECT_RUNS(fill, k,
                (&(struct kern_fill){ out, SPLIT_ELEMS, first, key, c->kind, c->a, c->b }));
    EXPECT(guarded_intact(&got));
    if (c->want == NULL) {
        c->want = malloc(SPLIT_ELEMS * sizeof(float));
        EXPECT(c->want != NULL);
        memcpy(c->want, out, SPLIT_ELEMS * sizeof(float));
    }
    EXPECT_SAME_FLOATS(out, c->want, SPLIT_ELEMS, label);

    memset(out, 0xff, SPLIT_ELEMS * sizeof(float));
    for (uint64_t i = 0; i < SPLIT_ELEMS;) {
        uint64_t n = test_random(&state) % (test_random(&state) % 2 == 0 ? 9 : 9000);
        n = n < SPLIT_ELEMS - i ? n : SPLIT_ELEMS - i;
        EXPECT_RUNS(fill, k,
                    (&(struct kern_fill){ out + i, n, first + i, key, c->kind, c->a, c->b }));
        i += n;
    }
    EXPECT_SAME_FLOATS(out, c->want, SPLIT_ELEMS, label);
    EXPECT(guarded_intact(&got));
    guarded_free(&got);
}

TEST(fill_gives_the_same_bits_on_every_device_in_any_split)
{
    static const struct fill_case cases[] = {
        { KERN_FILL_CONST, 0x1p-149f, 0, NULL }, /* a denormal stays */
        { KERN_FILL_NORMAL, 0, 0.02f, NULL },
        { KERN_FILL_NORMAL, 1, 1e-3f, NULL },
        { KERN_FILL_UNIFORM, -0.5f, 0.5f, NULL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct fill_case c = cases[i];
        devices_each(check_split, &c);
        free(c.want);
    }
}

static int compare_floats(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* n = 2^18 values sorted; D = largest distance of the empirical distribution from cdf. By
 * Dvoretzky, Kiefer and Wolfowitz (with Massart's constant) P(D > d) <= 2 exp(-2 n d^2), which is
 * 1e-9 at d = sqrt(ln(2e9) / 2n) = 6.4e-3. Seeds are fixed, so this never flickers. */
static void expect_distribution(float *x, uint64_t n, double (*cdf)(double))
{
    qsort(x, n, sizeof *x, compare_floats);
    double distance = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double p = cdf((double)x[i]);
        distance = fmax(distance, fmax((double)(i + 1) / (double)n - p, p - (double)i / (double)n));
    }
    EXPECT_NEAR(distance, 0, sqrt(log(2e9) / (2 * (double)n)));
}

static double normal_cdf(double z)
{
    return 0.5 * erfc(-z / sqrt(2));
}

static double uniform_cdf(double x)
{
    return x < 0 ? 0 : x > 1 ? 1 : x;
}

/* Sample mean and variance of n draws have standard deviations s/sqrt(n) and, for the normal,
 * s^2 sqrt(2/n); six of them bound each (2e-9). Pairs share a radius: their product has mean 0 and
 * standard deviation 1, so the mean of n/2 of them stays within 6 sqrt(2/n). */
TEST(normal_has_the_right_shape)
{
    enum { N = 1 << 18 };
    static float x[N];
    struct kern *k = device_new(NULL, 2);
    for (uint64_t key = 10; key < 14; key++) {
        EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, N, 0, key, KERN_FILL_NORMAL, 0, 1 }));
        double sum = 0, squares = 0, products = 0;
        for (uint64_t i = 0; i < N; i++) {
            sum += (double)x[i];
            squares += (double)x[i] * (double)x[i];
            products += i % 2 == 0 ? (double)x[i] * (double)x[i + 1] : 0;
        }
        printf("normal, key %" PRIu64 ": mean %+.5f, variance %.5f\n", key, sum / N, squares / N);
        EXPECT_NEAR(sum / N, 0, 6 / sqrt(N));
        EXPECT_NEAR(squares / N, 1, 6 * sqrt(2.0 / N));
        EXPECT_NEAR(products / (N / 2.0), 0, 6 * sqrt(2.0 / N));
        expect_distribution(x, N, normal_cdf);
    }
    k->ops->free(k);
}

/* Variance of U(0,1) is 1/12; that of the sample variance is (1/80 - 1/144) / n = 1 / (180 n). */
TEST(uniform_has_the_right_shape)
{
    enum { N = 1 << 18 };
    static float x[N];
    struct kern *k = device_new(NULL, 2);
    for (uint64_t key = 10; key < 14; key++) {
        EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, N, 0, key, KERN_FILL_UNIFORM, 0, 1 }));
        double sum = 0, squares = 0;
        for (uint64_t i = 0; i < N; i++) {
            sum += (double)x[i];
            squares += ((double)x[i] - 0.5) * ((double)x[i] - 0.5);
        }
        printf("uniform, key %" PRIu64 ": mean %.5f, variance %.5f\n", key, sum / N, squares / N);
        EXPECT_NEAR(sum / N, 0.5, 6 * sqrt(1.0 / 12 / N));
        EXPECT_NEAR(squares / N, 1.0 / 12, 6 * sqrt(1.0 / 180 / N));
        expect_distribution(x, N, uniform_cdf);
    }
    k->ops->free(k);
}

/* Pinned for good: another machine, compiler or release must give these very bits. (Python's own
 * Philox and math.log, cos, sin, rounded to fp32, gave the same.) */
TEST(fill_bits_are_pinned)
{
    struct kern *k = device_new(NULL, 1);
    enum { N = 8 };
    float x[N];
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, N, 0, 0, KERN_FILL_UNIFORM, 0, 1 }));
    static const uint32_t uniform[4] = { 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 };
    for (int i = 0; i < 4; i++)
        EXPECT(same_float(x[i], (float)uniform[i] * 0x1p-32f));
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, N, 0, 0, KERN_FILL_NORMAL, 0, 1 }));
    static const uint32_t normal[N] = { 0x3f7dbb33, 0xbf6cb6b0, 0xbf1e1b9f, 0xbef6d1b2,
                                        0xbe1d5357, 0x3e392a6d, 0x3f54ec98, 0x3e4a2da3 };
    for (int i = 0; i < N; i++)
        EXPECT(same_float(x[i], float_of(normal[i])));
    k->ops->free(k);
}

/* FNV-1a over the words of a million of them: a change of any coefficient shows. */
TEST(normal_bits_are_pinned_in_bulk)
{
    enum { N = 1 << 20 };
    static float x[N];
    struct kern *k = device_new(NULL, 2);
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ x, N, 1000, 77, KERN_FILL_NORMAL, 0, 1 }));
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint64_t i = 0; i < N; i++)
        hash = (hash ^ bits_of(x[i])) * UINT64_C(0x100000001b3);
    if (hash != UINT64_C(0x503e41e20f8bc974))
        FAIL("hash is %016" PRIx64, hash);
    k->ops->free(k);
}

TEST_MAIN()
