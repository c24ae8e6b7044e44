/* 16-bit precision of shd-gpt: rounding, products, and whole models with it: each kind gives the
 * same bits on any number of threads, and is as far from fp32 as its rounding explains.
 */
#include <math.h>
#include <pthread.h>

#include "examples/gpt/gemm.h"
#include "examples/gpt/half.h"
#include "examples/gpt/model.h"
#include "examples/gpt/vec.h"
#include "tests/lib/gpt_whole.h"
#include "tests/lib/test.h"

static uint64_t seed;

static void start(uint64_t s)
{
    seed = test_seed(s);
}

static void fill(float *x, uint64_t count, float scale)
{
    for (uint64_t i = 0; i < count; i++)
        x[i] = scale * (float)((double)(test_random(&seed) >> 11) * 0x1p-52 - 1);
}

/* -- Rounding -------------------------------------------------------------------------------- */

/* All numbers of a format in ascending order, from 0 to its largest; then 2^top. */
struct format {
    float (*widen)(uint16_t h);
    float (*round)(float x);
    uint16_t last; /* the largest finite one */
};

static const struct format bf16 = { half_widen_bf16, half_round_bf16, 0x7f7f };
static const struct format f16 = { half_widen_f16, half_round_f16, 0x7bff };

/* Between neighbours a < b: what is below the midpoint goes to a, above it to b, and on it to the
 * one with an even last bit. bf16's midpoints and fp16's are fp32 numbers. */
static void check_neighbours(const struct format *f, uint16_t h)
{
    const float a = f->widen(h), b = f->widen((uint16_t)(h + 1));
    const float mid = (float)(((double)a + (double)b) / 2);
    EXPECT(b > a);
    EXPECT(f->round(a) == a);
    EXPECT(f->round(-a) == -a);
    EXPECT(f->round(mid) == (h % 2 == 0 ? a : b));
    EXPECT(f->round(-mid) == (h % 2 == 0 ? -a : -b));
    EXPECT(f->round(nextafterf(mid, a)) == a);
    EXPECT(f->round(nextafterf(mid, b)) == b);
}

TEST(rounding_is_to_nearest_even)
{
    for (uint16_t h = 0; h < bf16.last; h++)
        check_neighbours(&bf16, h);
    for (uint16_t h = 0; h < f16.last; h++)
        check_neighbours(&f16, h);
    EXPECT(half_widen_f16(1) == 0x1p-24f);
    EXPECT(half_widen_f16(0x0400) == 0x1p-14f);
    EXPECT(half_widen_f16(f16.last) == 65504);
    EXPECT(half_widen_bf16(0x3f80) == 1);
}

TEST(range_ends_in_infinity_and_nan_stays)
{
    EXPECT(half_round_f16(65519.996f) == 65504);
    EXPECT(isinf(half_round_f16(65520)) && half_round_f16(-65520) < 0);
    EXPECT(isinf(half_round_f16(1e30f)) && isinf(half_round_f16(INFINITY)));
    EXPECT(half_round_f16(0x1p-25f) == 0); /* a tie, to even */
    EXPECT(half_round_f16(0x1.8p-25f) == 0x1p-24f);
    EXPECT(isinf(half_round_bf16(3.4e38f)) && isfinite(half_round_bf16(3.38e38f)));
    EXPECT(isnan(half_round_f16(NAN)) && isnan(half_round_bf16(NAN)));
    EXPECT(isnan(half_round_bf16(half_float(0x7f800001u)))); /* would become inf if truncated */
    EXPECT(isnan(half_widen_f16(0x7e00)) && isinf(half_widen_f16(0xfc00)));
    EXPECT(isnan(half_widen_bf16(0x7fc0)) && half_widen_bf16(0xff80) < 0);
}

#define HALF_COUNT 131 /* full registers of every size, and a tail */

TEST(instruction_sets_round_alike)
{
    start(301);
    static float in[HALF_COUNT], want[HALF_COUNT], got[HALF_COUNT];
    static uint16_t halves[HALF_COUNT];
    fill(in, HALF_COUNT, 70000);
    for (int i = 0; i < HALF_COUNT; i++) {
        in[i] *= i % 3 == 0 ? 1 : i % 3 == 1 ? 1e-6f : 1e-9f;
        halves[i] = (uint16_t)test_random(&seed);
    }
    in[7] = NAN;
    in[130] = INFINITY;
    for (uint32_t v = 0; v < VEC_VARIANTS; v++) {
        const struct vec_ops *ops = vec_variant(v);
        if (ops == NULL)
            continue;
        ops->round_bf16(got, in, HALF_COUNT);
        for (int i = 0; i < HALF_COUNT; i++)
            want[i] = half_round_bf16(in[i]);
        EXPECT(memcmp(got, want, sizeof want) == 0);
        ops->round_f16(got, in, HALF_COUNT);
        for (int i = 0; i < HALF_COUNT; i++)
            want[i] = half_round_f16(in[i]);
        EXPECT(memcmp(got, want, sizeof want) == 0);
        ops->widen_f16(got, halves, HALF_COUNT);
        for (int i = 0; i < HALF_COUNT; i++)
            want[i] = half_widen_f16(halves[i]);
        EXPECT(memcmp(got, want, sizeof want) == 0);
        ops->widen_bf16(got, halves, HALF_COUNT);
        uint16_t packed[HALF_COUNT];
        ops->pack_bf16(packed, got, HALF_COUNT);
        for (int i = 0; i < HALF_COUNT; i++)
            EXPECT(packed[i] == halves[i] || isnan(half_widen_bf16(halves[i])));
    }
}

/* -- Products -------------------------------------------------------------------------------- */

#define ELEMS (1u << 17)

static const struct gemm_size sizes[] = { { 128, 256, 256 }, { 64, 128, 64 }, { 1, 256, 128 },
                                          { 67, 21, 130 },   { 3, 261, 19 },  { 128, 64, 390 } };
#define SIZES (sizeof sizes / sizeof sizes[0])

struct product {
    enum gemm_kind kind;
    struct gemm_size size;
    int transposed; /* bit 0: a, bit 1: b */
    const float *a, *b;
    float *c; /* [m, n + 3] */
};

static struct gemm_in product_a(const struct product *p)
{
    const int t = p->transposed & 1;
    return (struct gemm_in){ p->a, (t ? p->size.m : p->size.k) + 5, t };
}

static struct gemm_in product_b(const struct product *p)
{
    const int t = p->transposed >> 1;
    return (struct gemm_in){ p->b, (t ? p->size.k : p->size.n) + 7, t };
}

/* Twice: beta 0, then beta 1. */
static void *product_run(void *arg)
{
    const struct product *p = arg;
    gemm_run(p->kind, p->size, product_a(p), product_b(p), 0, p->c, p->size.n + 3);
    gemm_run(p->kind, p->size, product_a(p), product_b(p), 1, p->c, p->size.n + 3);
    return NULL;
}

static double element(struct gemm_in x, uint64_t i, uint64_t j, float (*round)(float))
{
    return (double)round(x.transposed ? x.data[j * x.stride + i] : x.data[i * x.stride + j]);
}

/* Against fp64 over the rounded factors: products of two bf16 or fp16 numbers are exact in fp32,
 * so only the k additions round (and the doubling): k 2^-24 sum |a b|, in any order. */
static void product_check(const struct product *p, float (*round)(float))
{
    const struct gemm_in a = product_a(p), b = product_b(p);
    for (uint64_t i = 0; i < p->size.m; i += 7) {
        for (uint64_t j = 0; j < p->size.n; j += 5) {
            double sum = 0, size = 0;
            for (uint64_t k = 0; k < p->size.k; k++) {
                const double term = element(a, i, k, round) * element(b, k, j, round);
                sum += term;
                size += fabs(term);
            }
            const double bound = (double)(p->size.k + 2) * 0x1p-24 * 2 * size;
            EXPECT_NEAR(p->c[i * (p->size.n + 3) + j], 2 * sum, bound);
        }
    }
}

/* The same values elsewhere, on another thread. */
static void product_check_moved(const struct product *p, uint64_t shift)
{
    const uint64_t c_elems = p->size.m * (p->size.n + 3);
    struct product moved = *p;
    float *base[3];
    for (int i = 0; i < 3; i++)
        base[i] = aligned_alloc(64, (ELEMS + 16) * sizeof(float));
    moved.a = memcpy(base[0] + shift, p->a, ELEMS * sizeof(float));
    moved.b = memcpy(base[1] + shift * 7 % 16, p->b, ELEMS * sizeof(float));
    moved.c = memcpy(base[2] + shift * 3 % 16, p->c, c_elems * sizeof(float));
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, product_run, &moved), 0);
    pthread_join(thread, NULL);
    for (uint64_t i = 0; i < p->size.m; i++) {
        const uint64_t row = i * (p->size.n + 3);
        EXPECT(memcmp(p->c + row, moved.c + row, p->size.n * sizeof(float)) == 0);
    }
    for (int i = 0; i < 3; i++)
        free(base[i]);
}

static void check_products(enum gemm_kind kind, float (*round)(float), float scale)
{
    float *a = malloc(ELEMS * sizeof(float)), *b = malloc(ELEMS * sizeof(float));
    float *c = malloc(ELEMS * sizeof(float));
    fill(a, ELEMS, scale);
    fill(b, ELEMS, scale);
    for (size_t i = 0; i < SIZES; i++) {
        for (int t = 0; t < 4; t++) {
            struct product p = { kind, sizes[i], t, a, b, c };
            product_run(&p);
            product_check(&p, round);
            product_check_moved(&p, 0);
            product_check_moved(&p, 5);
        }
    }
    free(a);
    free(b);
    free(c);
}

/* 1 or 0: is there a native product here? */
static int native_works(void)
{
    struct shd_err e;
    const int r = gemm_init(GEMM_BF16_NATIVE, &e);
    EXPECT(r == SHD_OK || r == SHD_ENOTSUP);
    return r == SHD_OK;
}

TEST(emulated_bf16_is_the_product_of_rounded_factors)
{
    start(302);
    check_products(GEMM_BF16_EMULATED, half_round_bf16, 1);
}

TEST(emulated_fp16_is_the_product_of_rounded_factors)
{
    start(303);
    check_products(GEMM_F16_EMULATED, half_round_f16, 1);
}

TEST(native_bf16_is_the_product_of_rounded_factors)
{
    start(304);
    if (!native_works())
        SKIP("this CPU has no bf16 instructions");
    printf("%s\n", gemm_describe(GEMM_BF16_NATIVE));
    check_products(GEMM_BF16_NATIVE, half_round_bf16, 1);
}

TEST(fp16_overflow_reaches_the_product)
{
    const float a[2] = { 70000, 1 }, b[2] = { 1, 1 };
    float c;
    gemm_run(GEMM_F16_EMULATED, (struct gemm_size){ 1, 1, 2 }, (struct gemm_in){ a, 2, 0 },
             (struct gemm_in){ b, 1, 0 }, 0, &c, 1);
    EXPECT(isinf(c));
}

/* More sizes than a thread keeps primitives for: old ones make room, results stay. */
TEST(native_bf16_with_many_sizes)
{
    start(305);
    if (!native_works())
        SKIP("this CPU has no bf16 instructions");
    float *a = malloc(ELEMS * sizeof(float)), *b = malloc(ELEMS * sizeof(float));
    float c[3 * 10];
    fill(a, ELEMS, 1);
    fill(b, ELEMS, 1);
    for (int round = 0; round < 2; round++) {
        for (uint64_t k = 1; k < 100; k++) {
            struct product p = { GEMM_BF16_NATIVE, { 3, 7, k }, (int)(k % 4), a, b, c };
            product_run(&p);
            product_check(&p, half_round_bf16);
        }
    }
    free(a);
    free(b);
}

/* -- Models ---------------------------------------------------------------------------------- */

#define BATCH     3
#define UNITS_MAX 16

static const struct gpt_shape dense = { .layers = 2, .dim = 96, .heads = 3, .seq = 70 };
static const struct gpt_shape routed = {
    .layers = 2, .dim = 48, .heads = 3, .seq = 70, .experts = 5
};
static const struct gpt_shape adapted = {
    .layers = 2, .dim = 48, .heads = 3, .seq = 70, .rank = 6
};

struct model {
    struct gpt_shape shape;
    struct gpt_layout layout;
    uint32_t units;
    uint8_t windows[BATCH * 71];
    uint64_t elems[UNITS_MAX];
    float *params[UNITS_MAX];
};

static void model_init(struct model *m, const struct gpt_shape *shape)
{
    *m = (struct model){ .shape = *shape, .units = gpt_units(shape) };
    gpt_layout_compute(shape, &m->layout);
    for (size_t i = 0; i < sizeof m->windows; i++)
        m->windows[i] = (uint8_t)(test_random(&seed) >> 40);
    for (uint32_t u = 0; u < m->units; u++) {
        m->elems[u] = gpt_unit_elems(shape, &m->layout, u);
        m->params[u] = malloc(m->elems[u] * sizeof(float));
        fill(m->params[u], m->elems[u], 0.15f);
        for (uint64_t i = 0; i < m->elems[u]; i++) /* as owners publish it */
            m->params[u][i] = half_round_bf16(m->params[u][i]);
    }
}

static void model_deinit(struct model *m)
{
    for (uint32_t u = 0; u < m->units; u++)
        free(m->params[u]);
}

struct run {
    enum gemm_kind kind;
    uint32_t threads;
    double loss_scale;
};

struct result {
    double loss;
    float *grads[UNITS_MAX]; /* NULL: frozen */
};

static struct result model_run_as(const struct model *m, struct run run, bool recompute)
{
    struct shd_err e;
    struct pool *pool;
    struct gpt *gpt;
    struct result r = { .loss = 0 };
    EXPECT_OK(pool_new(run.threads, &pool, &e), &e);
    EXPECT_OK(gpt_new(&m->shape, &m->layout, BATCH, recompute, pool, &gpt, &e), &e);
    EXPECT_OK(gemm_init(run.kind, &e), &e);
    gpt_set_gemm(gpt, run.kind);
    gpt_set_loss_scale(gpt, run.loss_scale);
    for (uint32_t u = 0; u < m->units; u++)
        if (!gpt_kind_frozen(&m->shape, gpt_unit_at(&m->shape, u).kind))
            r.grads[u] = calloc(m->elems[u], sizeof(float));
    if (recompute) { /* what another batch left must not show */
        static const uint8_t other[sizeof m->windows] = { 1, 2, 3 };
        gpt_whole(gpt, other, (const float *const *)m->params, r.grads);
        for (uint32_t u = 0; u < m->units; u++)
            if (r.grads[u] != NULL)
                memset(r.grads[u], 0, m->elems[u] * sizeof(float));
        gpt_whole(gpt, other, (const float *const *)m->params, NULL);
    }
    r.loss = gpt_whole(gpt, m->windows, (const float *const *)m->params, r.grads);
    gpt_free(gpt);
    pool_free(pool);
    return r;
}

static struct result model_run(const struct model *m, struct run run)
{
    return model_run_as(m, run, false);
}

static void result_free(struct result *r)
{
    for (uint32_t u = 0; u < UNITS_MAX; u++)
        free(r->grads[u]);
}

static void expect_same(const struct model *m, const struct result *a, const struct result *b)
{
    EXPECT(memcmp(&a->loss, &b->loss, sizeof a->loss) == 0);
    for (uint32_t u = 0; u < m->units; u++)
        EXPECT(a->grads[u] == NULL ||
               memcmp(a->grads[u], b->grads[u], m->elems[u] * sizeof(float)) == 0);
}

/* |a - b| / |b| over all gradients. */
static double distance(const struct model *m, const struct result *a, const struct result *b)
{
    double off = 0, size = 0;
    for (uint32_t u = 0; u < m->units; u++) {
        for (uint64_t i = 0; a->grads[u] != NULL && i < m->elems[u]; i++) {
            const double x = (double)a->grads[u][i], y = (double)b->grads[u][i];
            off += (x - y) * (x - y);
            size += y * y;
        }
    }
    return sqrt(off / size);
}

static void check_threads(const struct gpt_shape *shape, enum gemm_kind kind)
{
    struct model m;
    model_init(&m, shape);
    struct result one = model_run(&m, (struct run){ kind, 1, 1 });
    EXPECT(isfinite(one.loss));
    for (uint32_t threads = 2; threads < 6; threads += 2) {
        struct result r = model_run(&m, (struct run){ kind, threads, 1 });
        expect_same(&m, &one, &r);
        result_free(&r);
    }
    result_free(&one);
    model_deinit(&m);
}

TEST(bits_do_not_depend_on_threads_in_any_kind)
{
    start(306);
    for (int kind = GEMM_FULL; kind <= GEMM_F16_EMULATED; kind++) {
        if (kind == GEMM_BF16_NATIVE && !native_works())
            continue;
        check_threads(&dense, (enum gemm_kind)kind);
        check_threads(&routed, (enum gemm_kind)kind);
        check_threads(&adapted, (enum gemm_kind)kind);
    }
}

/* -- Recomputing ----------------------------------------------------------------------------- */

/* More layers than the one whose activations still lie there when backward begins. */
static const struct gpt_shape deep[] = {
    { .layers = 3, .dim = 96, .heads = 3, .seq = 70 },
    { .layers = 3, .dim = 48, .heads = 3, .seq = 70, .experts = 3 },
    { .layers = 3, .dim = 48, .heads = 3, .seq = 70, .rank = 6 },
    { .layers = 1, .dim = 48, .heads = 3, .seq = 70 },
};
#define DEEP (sizeof deep / sizeof deep[0])

TEST(recomputing_changes_no_bit)
{
    start(309);
    const int last = SANITIZE_THREAD ? GEMM_FULL : GEMM_F16_EMULATED; /* the same threads in all */
    for (int kind = GEMM_FULL; kind <= last; kind++) {
        if (kind == GEMM_BF16_NATIVE && !native_works())
            continue;
        for (size_t i = 0; i < DEEP; i++) {
            struct model m;
            model_init(&m, &deep[i]);
            const struct run run = { (enum gemm_kind)kind, 2, 1024 };
            struct result all = model_run(&m, run), again = model_run_as(&m, run, true);
            EXPECT(isfinite(all.loss));
            expect_same(&m, &all, &again);
            result_free(&all);
            result_free(&again);
            model_deinit(&m);
        }
    }
}

static uint64_t activation_bytes(const struct gpt_shape *shape, bool built_as, bool asked)
{
    struct shd_err e;
    struct pool *pool;
    struct gpt *gpt;
    struct gpt_layout layout;
    gpt_layout_compute(shape, &layout);
    EXPECT_OK(pool_new(1, &pool, &e), &e);
    EXPECT_OK(gpt_new(shape, &layout, BATCH, built_as, pool, &gpt, &e), &e);
    const uint64_t bytes = gpt_activation_bytes(gpt, asked);
    gpt_free(gpt);
    pool_free(pool);
    return bytes;
}

/* A layer more takes its input, and with experts what the router gave them; each array begins on a
 * cache line. Without recomputing it takes some twenty times as much. */
TEST(recomputing_keeps_inputs_only)
{
    for (size_t i = 0; i < DEEP; i++) {
        struct gpt_shape more = deep[i];
        const uint64_t rows = (uint64_t)BATCH * more.seq, width = rows * more.dim * sizeof(float);
        const uint64_t lines = (rows * 4 + 63) / 64 * 64; /* of one word a row */
        const uint64_t routed_to = (rows * more.experts * 4 + 63) / 64 * 64;
        uint64_t input = (width + 63) / 64 * 64;
        if (more.experts > 0)
            input += input + 2 * lines + 64 + routed_to;
        more.layers++;
        for (int as = 0; as < 2; as++) {
            const uint64_t kept = activation_bytes(&more, as > 0, true) -
                                  activation_bytes(&deep[i], as > 0, true);
            const uint64_t all = activation_bytes(&more, as > 0, false) -
                                 activation_bytes(&deep[i], as > 0, false);
            EXPECT_EQ(kept, input);
            EXPECT(all > 8 * kept);
        }
    }
}

/* -- Rounding -------------------------------------------------------------------------------- */

/* A factor rounded to bf16 is off by at most 2^-9 of itself, on average by about half of that, and
 * errors of independent factors add up as squares; a gradient passes some 10 products: 2^-10 *
 * sqrt(2 * 10) = 0.4 %, and 5 % leaves a decade for what norms and softmax make of it. fp16 has
 * 3 bits more. Rounding must show too: 0.02 % would mean nothing was rounded. */
TEST(rounded_models_are_near_fp32)
{
    start(307);
    struct model m;
    model_init(&m, &dense);
    struct result full = model_run(&m, (struct run){ GEMM_FULL, 2, 1 });
    struct result b = model_run(&m, (struct run){ GEMM_BF16_EMULATED, 2, 1 });
    struct result h = model_run(&m, (struct run){ GEMM_F16_EMULATED, 2, 1024 });
    for (uint32_t u = 0; u < m.units; u++)
        for (uint64_t i = 0; i < m.elems[u]; i++)
            h.grads[u][i] /= 1024;
    const double off_b = distance(&m, &b, &full), off_h = distance(&m, &h, &full);
    printf("gradients off by %.2g in bf16, %.2g in fp16\n", off_b, off_h);
    EXPECT(off_b < 0.05 && off_b > 2e-4);
    EXPECT(off_h < 0.05 / 8 && off_h > 2e-4 / 8);
    EXPECT_NEAR(b.loss, full.loss, 0.01 * full.loss);
    EXPECT_NEAR(h.loss, full.loss, 0.001 * full.loss);
    if (native_works()) {
        struct result n = model_run(&m, (struct run){ GEMM_BF16_NATIVE, 2, 1 });
        const double off_n = distance(&m, &n, &full);
        printf("native: %.2g\n", off_n);
        EXPECT(off_n < 0.05 && off_n > 2e-4);
        result_free(&n);
    }
    result_free(&full);
    result_free(&b);
    result_free(&h);
    model_deinit(&m);
}

/* A power of two moves exponents only, as long as nothing falls below fp32's normal numbers. */
TEST(loss_scale_scales_gradients_exactly)
{
    start(308);
    struct model m;
    model_init(&m, &dense);
    struct result one = model_run(&m, (struct run){ GEMM_FULL, 2, 1 });
    struct result scaled = model_run(&m, (struct run){ GEMM_FULL, 2, 4096 });
    EXPECT(one.loss == scaled.loss);
    for (uint32_t u = 0; u < m.units; u++)
        for (uint64_t i = 0; i < m.elems[u]; i++)
            scaled.grads[u][i] /= 4096;
    const double off = distance(&m, &scaled, &one);
    printf("off by %g\n", off);
    EXPECT(off < 1e-6);
    result_free(&one);
    result_free(&scaled);
    model_deinit(&m);
}

TEST_MAIN()
