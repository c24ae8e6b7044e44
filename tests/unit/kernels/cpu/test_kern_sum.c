/* Casts, accumulation and sums of squares: exactly as documented on every device, and near the
 * true values. */
#include "tests/lib/kern_util.h"

/* x rounded to nearest even at `digits` fraction bits, exponents not below exp_min: by scaling and
 * rint() in fp64, so not by the bit tricks under test. */
static double round_reference(double x, int digits, int exp_min)
{
    if (x == 0 || !isfinite(x))
        return x;
    const int exp = ilogb(x) > exp_min ? ilogb(x) : exp_min;
    return ldexp(rint(ldexp(x, digits - exp)), exp - digits);
}

static double half_value(uint16_t h, enum shd_dtype dtype)
{
    if (dtype == SHD_BF16)
        return (double)float_of((uint32_t)h << 16);
    const double sign = (h & 0x8000) != 0 ? -1 : 1;
    const int exp = h >> 10 & 0x1f, frac = h & 0x3ff;
    if (exp == 0x1f)
        return frac != 0 ? (double)NAN : sign * (double)INFINITY;
    return sign * (exp == 0 ? ldexp(frac, -24) : ldexp(1024 + frac, exp - 25));
}

/* What a cast of x should be, as a value; past the largest finite one comes infinity. */
static double cast_reference(float x, enum shd_dtype dtype)
{
    const double r = dtype == SHD_BF16 ? round_reference((double)x, 7, -126)
                                       : round_reference((double)x, 10, -14);
    const double top = dtype == SHD_BF16 ? 0x1p128 : 0x1p16;
    return fabs(r) >= top ? copysign((double)INFINITY, r) : r;
}

/* Every upper half of an fp32, with lower halves that lie on, beside and between the borders of
 * both formats (bf16 cuts 16 bits, f16 cuts 13 and more for its denormals). */
#define CAST_LOWS  48u
#define CAST_ELEMS (65536u * CAST_LOWS)

static void cast_inputs(float *x)
{
    static const uint32_t border[6] = { 0, 1, 0xfff, 0x1000, 0x1001, 0x1fff };
    for (uint32_t i = 0; i < CAST_ELEMS; i++) {
        const uint32_t low = i % CAST_LOWS;
        x[i] = float_of(i / CAST_LOWS << 16 | (low / 6) << 13 | border[low % 6]);
    }
}

struct cast_case {
    enum shd_dtype dtype;
    const float *in;
};

static void check_cast(struct kern *k, const char *label, void *arg)
{
    const struct cast_case *c = arg;
    struct guarded out = guarded_new(CAST_ELEMS * 2, 2);
    const uint16_t *got = out.base;
    EXPECT_RUNS(cast, k, (&(struct kern_cast){ out.base, c->dtype, c->in, CAST_ELEMS }));
    EXPECT(guarded_intact(&out));
    for (uint32_t i = 0; i < CAST_ELEMS; i++) {
        const uint32_t in = bits_of(c->in[i]);
        if (isnan(c->in[i])) { /* quiet, sign and upper payload kept */
            const uint32_t want = c->dtype == SHD_BF16
                                      ? in >> 16 | 0x40
                                      : (in >> 16 & 0x8000) | 0x7e00 | (in >> 13 & 0x3ff);
            if (got[i] != want)
                FAIL("%s: NaN %08x became %04x, expected %04x", label, in, got[i], want);
            continue;
        }
        const double want = cast_reference(c->in[i], c->dtype);
        const double value = half_value(got[i], c->dtype);
        if (!(value == want) || got[i] >> 15 != in >> 31)
            FAIL("%s: %a became %04x = %a, expected %a", label, (double)c->in[i], got[i], value,
                 want);
    }
    guarded_free(&out);
}

TEST(cast_rounds_to_nearest_even_for_all_upper_halves)
{
    float *in = malloc(CAST_ELEMS * sizeof *in);
    EXPECT(in != NULL);
    cast_inputs(in);
    devices_each(check_cast, &(struct cast_case){ SHD_BF16, in });
    devices_each(check_cast, &(struct cast_case){ SHD_F16, in });
    free(in);
}

static void check_cast_tails(struct kern *k, const char *label, void *arg)
{
    static const uint64_t sizes[] = { 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 2047, 65539, 140001 };
    static const enum shd_dtype dtypes[] = { SHD_F32, SHD_BF16, SHD_F16 };
    static float in[140008];
    (void)arg;
    fill_awkward(in, ARRAY_SIZE(in), true, 8);
    for (size_t d = 0; d < ARRAY_SIZE(dtypes); d++) {
        for (size_t s = 0; s < ARRAY_SIZE(sizes); s++) {
            const uint64_t bytes = dtype_bytes(dtypes[d]);
            struct guarded out = guarded_new(sizes[s] * bytes, bytes);
            EXPECT_RUNS(cast, k, (&(struct kern_cast){ out.base, dtypes[d], in + 3, sizes[s] }));
            EXPECT(guarded_intact(&out));
            if (dtypes[d] == SHD_F32)
                EXPECT(memcmp(out.base, in + 3, sizes[s] * bytes) == 0);
            for (uint64_t i = 0; i < sizes[s] && dtypes[d] != SHD_F32; i++) {
                const double want = cast_reference(in[3 + i], dtypes[d]);
                const double got = half_value(((uint16_t *)out.base)[i], dtypes[d]);
                if (got != want && !(isnan(got) && isnan(want)))
                    FAIL("%s: [%" PRIu64 "] is %a, expected %a", label, i, got, want);
            }
            guarded_free(&out);
        }
    }
}

TEST(cast_does_tails_and_leaves_guards)
{
    devices_each(check_cast_tails, NULL);
}

/* acc = grad for each of the 65,536 bf16 and f16 values: the exact fp32 value. */
static void check_widen(struct kern *k, const char *label, void *arg)
{
    static uint16_t in[65536];
    static float out[65536];
    (void)arg;
    for (uint32_t i = 0; i < 65536; i++)
        in[i] = (uint16_t)i;
    for (enum shd_dtype dtype = SHD_BF16; dtype <= SHD_F16; dtype++) {
        EXPECT_RUNS(
            accumulate, k,
            (&(struct kern_accumulate){
                .acc = out, .grad = in, .grad_dtype = dtype, .elems = 65536, .first = true }));
        for (uint32_t i = 0; i < 65536; i++) {
            const float want = (float)half_value((uint16_t)i, dtype);
            if (!same_float(out[i], want) || (bits_of(out[i]) ^ i << 16) >> 31 != 0)
                FAIL("%s: %s %04x became %a, expected %a", label, dtype_name(dtype), i,
                     (double)out[i], (double)want);
        }
    }
}

TEST(first_accumulation_widens_every_half_exactly)
{
    devices_each(check_widen, NULL);
}

/* A block's sum in its documented order: 32 lanes, then halves folded. */
static double block_sum(const float *x)
{
    double s[32] = { 0 };
    for (uint32_t i = 0; i < BLOCK; i++)
        s[i % 32] += (double)daz(x[i]) * (double)daz(x[i]);
    for (uint32_t width = 16; width > 0; width /= 2)
        for (uint32_t j = 0; j < width; j++)
            s[j] += s[j + width];
    return s[0];
}

static struct kern_sum sum_reference(const float *x, uint64_t elems)
{
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    for (uint64_t at = 0; at < elems; at += BLOCK) {
        const double s = block_sum(x + at);
        if (isfinite(s))
            fixsum_add(&sum.sum, s);
        else
            sum.finite = false;
    }
    fixsum_carry(&sum.sum);
    return sum;
}

static void expect_same_sum(const struct kern_sum *got, const struct kern_sum *want,
                            const char *label)
{
    if (memcmp(got->sum.limb, want->sum.limb, sizeof got->sum.limb) != 0)
        FAIL("%s: sum is %.17g, expected %.17g", label, fixsum_value(&got->sum),
             fixsum_value(&want->sum));
    if (got->finite != want->finite)
        FAIL("%s: finite is %d", label, got->finite);
}

static void check_sumsq(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 150 * BLOCK };
    static float x[ELEMS + 1];
    const bool wild = *(bool *)arg;
    fill_awkward(x, ELEMS + 1, wild, 77);
    x[1] = 0; /* so that some block of the wild array is finite */
    for (uint64_t i = 1; i <= 2 * BLOCK && wild; i++)
        x[i] = isfinite(x[i]) ? x[i] : 0;
    const struct kern_sum want = sum_reference(x + 1, ELEMS);
    struct kern_sum got = { .finite = true };
    fixsum_init(&got.sum);
    EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x + 1, ELEMS, &got }));
    expect_same_sum(&got, &want, label);
    EXPECT_EQ(got.finite, !wild);

    /* Any split into calls adds up to the same bytes. */
    uint64_t state = test_seed(3);
    fixsum_init(&got.sum);
    got.finite = true;
    for (uint64_t at = 0; at < ELEMS;) {
        uint64_t n = test_random(&state) % 80 * BLOCK;
        n = n < ELEMS - at ? n : ELEMS - at;
        EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x + 1 + at, n, &got }));
        at += n;
    }
    expect_same_sum(&got, &want, label);
}

TEST(sumsq_is_the_documented_sum_in_any_split)
{
    devices_each(check_sumsq, &(bool){ false });
    devices_each(check_sumsq, &(bool){ true });
}

/* Against long double. A lane adds 64 non-negative terms and the tree 5 more levels, each addition
 * within 2^-53 relative, so a block is within 68 * 2^-53; blocks are added exactly and the value is
 * cut to 53 bits (2^-52). */
TEST(sumsq_is_near_the_true_sum)
{
    enum { ELEMS = 64 * BLOCK };
    static float x[ELEMS];
    fill_awkward(x, ELEMS, false, 12);
    long double want = 0;
    for (uint64_t i = 0; i < ELEMS; i++)
        want += (long double)x[i] * (long double)x[i];
    struct kern *k = device_new(NULL, 2);
    struct kern_sum got = { .finite = true };
    fixsum_init(&got.sum);
    EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x, ELEMS, &got }));
    EXPECT_NEAR(fixsum_value(&got.sum), (double)want, 71 * 0x1p-53 * (double)want);
    k->ops->free(k);
}

/* Sums of the very largest and smallest fp32 values neither overflow nor vanish. */
TEST(sumsq_holds_the_range_of_fp32)
{
    static float x[BLOCK];
    struct kern *k = device_new(NULL, 1);
    struct kern_sum got = { .finite = true };
    fixsum_init(&got.sum);
    for (uint64_t i = 0; i < BLOCK; i++)
        x[i] = 0x1.fffffep127f;
    EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x, BLOCK, &got }));
    EXPECT(got.finite);
    const double top = 2048 * ((double)x[0] * (double)x[0]);
    EXPECT_NEAR(fixsum_value(&got.sum), top, top * 0x1p-45);
    fixsum_init(&got.sum);
    memset(x, 0, sizeof x);
    x[5] = 0x1p-126f;
    EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x, BLOCK, &got }));
    EXPECT_NEAR(fixsum_value(&got.sum), 0x1p-252, 0);
    k->ops->free(k);
}

/* One NaN or infinity anywhere in a block drops that block's sum and is remembered. */
TEST(sumsq_flags_any_element_that_is_not_finite)
{
    static float x[3 * BLOCK];
    static const uint64_t places[] = { 0, 1, 31, 32, 2047, 2048, 4095, 6143 };
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 1);
        for (size_t p = 0; p < ARRAY_SIZE(places); p++) {
            for (int infinite = 0; infinite < 2; infinite++) {
                for (uint64_t i = 0; i < ARRAY_SIZE(x); i++)
                    x[i] = 1;
                x[places[p]] = infinite ? -INFINITY : NAN;
                struct kern_sum got = { .finite = true };
                fixsum_init(&got.sum);
                EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x, ARRAY_SIZE(x), &got }));
                EXPECT(!got.finite);
                EXPECT_NEAR(fixsum_value(&got.sum), 2 * BLOCK, 0);
            }
        }
        k->ops->free(k);
    }
}

/* The caller's sum is added to, not replaced: both its value and a finding of an earlier call. */
TEST(sums_add_to_what_is_there)
{
    static float x[40 * BLOCK];
    for (uint64_t i = 0; i < ARRAY_SIZE(x); i++)
        x[i] = 1;
    struct kern *k = device_new(NULL, 2);
    struct kern_sum got = { .finite = false };
    fixsum_init(&got.sum);
    fixsum_add(&got.sum, 0.5);
    EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x, ARRAY_SIZE(x), &got }));
    EXPECT_NEAR(fixsum_value(&got.sum), 40 * BLOCK + 0.5, 0);
    EXPECT(!got.finite);
    k->ops->free(k);
}

/* acc + grad: one fp32 rounding of the fp64 sum (exact in fp64 to within its own rounding, which
 * nearest-even of fp32 after fp64 survives for + : 53 >= 2 * 24 + 2). Inputs and results under
 * DAZ and FTZ. */
struct accumulate_case {
    enum shd_dtype dtype;
    bool first, sum, wild;
};
enum { ACC_ELEMS = 40 * BLOCK }; /* two chunks, the second short */

static float accumulate_reference(float acc, float grad, bool first)
{
    if (first)
        return grad;
    return daz((float)((double)daz(acc) + (double)daz(grad)));
}

static void check_accumulate(struct kern *k, const char *label, void *arg)
{
    const struct accumulate_case *c = arg;
    static float want[ACC_ELEMS];
    struct guarded acc = guarded_new(ACC_ELEMS * 4, 12);
    struct guarded wide = guarded_new(ACC_ELEMS * 4, 4);
    struct guarded grad = guarded_new(ACC_ELEMS * dtype_bytes(c->dtype), dtype_bytes(c->dtype));
    fill_awkward(acc.base, ACC_ELEMS, c->wild, 21);
    fill_awkward(wide.base, ACC_ELEMS, c->wild, 22);
    EXPECT_RUNS(cast, k, (&(struct kern_cast){ grad.base, c->dtype, wide.base, ACC_ELEMS }));
    for (uint64_t i = 0; i < ACC_ELEMS; i++) {
        const float g = c->dtype == SHD_F32
                            ? ((float *)grad.base)[i]
                            : (float)half_value(((uint16_t *)grad.base)[i], c->dtype);
        want[i] = accumulate_reference(((float *)acc.base)[i], g, c->first);
    }
    struct kern_sum sum = { .finite = true };
    fixsum_init(&sum.sum);
    EXPECT_RUNS(accumulate, k,
                (&(struct kern_accumulate){ .acc = acc.base,
                                            .grad = grad.base,
                                            .grad_dtype = c->dtype,
                                            .elems = ACC_ELEMS,
                                            .first = c->first,
                                            .sum = c->sum ? &sum : NULL }));
    EXPECT_SAME_FLOATS((float *)acc.base, want, ACC_ELEMS, label);
    if (c->sum) {
        const struct kern_sum want_sum = sum_reference(want, ACC_ELEMS);
        expect_same_sum(&sum, &want_sum, label);
    }
    EXPECT(guarded_intact(&acc) && guarded_intact(&grad));
    guarded_free(&acc);
    guarded_free(&wide);
    guarded_free(&grad);
}

TEST(accumulate_adds_with_one_rounding)
{
    for (uint32_t i = 0; i < 24; i++)
        devices_each(check_accumulate,
                     &(struct accumulate_case){ (enum shd_dtype)(1 + i / 8), (i & 1) != 0,
                                                (i & 2) != 0, (i & 4) != 0 });
}

TEST(accumulate_flushes_denormals_and_first_keeps_them)
{
    static float acc[BLOCK], grad[BLOCK];
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 1);
        acc[0] = 0x1p-127f, grad[0] = 0x1p-127f;    /* sum would be normal; both count as 0 */
        acc[1] = 0x1p-126f, grad[1] = -0x1.8p-126f; /* sum is a denormal: flushed, sign kept */
        EXPECT_RUNS(accumulate, k,
                    (&(struct kern_accumulate){
                        .acc = acc, .grad = grad, .grad_dtype = SHD_F32, .elems = BLOCK }));
        EXPECT(bits_of(acc[0]) == 0 && bits_of(acc[1]) == 0x80000000);
        EXPECT_RUNS(
            accumulate, k,
            (&(struct kern_accumulate){
                .acc = acc, .grad = grad, .grad_dtype = SHD_F32, .elems = BLOCK, .first = true }));
        EXPECT(bits_of(acc[0]) == bits_of(0x1p-127f));
        k->ops->free(k);
    }
}

TEST_MAIN()
