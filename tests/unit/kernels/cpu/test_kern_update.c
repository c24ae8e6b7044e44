/* The optimizers: near the papers' formulas in fp64, exact where they must be, and bit for bit the
 * same on every device. */
#include "tests/lib/kern_util.h"

#define U 0x1p-24 /* half an ulp of 1: one fp32 rounding, relative */

/* One element by the papers' formulas in fp64, and how far fp32 may stray from it. */
struct expected {
    double p, m, v;
    double p_bound, m_bound, v_bound;
};

/* Roundings, all relative U, second order covered by the 1.001:
 *   m: g, d = g - m (absolute U |d| (1 - beta1)), rest1, and the fma: within U (3 |1-beta1| (|g| +
 *      |m|) + |m'|).
 *   v: g twice, h, rest2, w, fma; all terms are positive: 6 U relative.
 *   s: root halves v's 6 and rounds, unbias rounds, fma rounds; eps > 0: 6 U relative.
 *   p: m/s carries m's bound, 6 U from s, 1 for the division, rate and its product 2: 9 U |update|;
 *      keep rounds to fp32 (U |p|, as keep <= 1), the last fma (U |p'|). */
static struct expected adamw_reference(double p, double m, double v, double grad,
                                       const struct kern_hyper *h)
{
    const double g = grad * (double)0.37f, lr = (double)h->lr, b1 = (double)h->beta1;
    struct expected x;
    x.m = b1 * m + (1 - b1) * g;
    x.v = (double)h->beta2 * v + (1 - (double)h->beta2) * g * g;
    const double s = sqrt(x.v / (double)h->bias2) + (double)h->eps;
    const double update = lr * (x.m / (double)h->bias1) / s;
    x.p = p - lr * (double)h->weight_decay * p - update;
    x.m_bound = 1.001 * U * (3 * (1 - b1) * (fabs(g) + fabs(m)) + fabs(x.m));
    x.v_bound = 1.001 * U * 6 * x.v;
    x.p_bound = 1.001 * (U * (9 * fabs(update) + fabs(p) + fabs(x.p)) +
                         x.m_bound * lr / (double)h->bias1 / s);
    return x;
}

/* m: g (U |g|) and the fma; p: lr m within U of itself and of m's error, keep, the last fma. */
static struct expected sgd_reference(double p, double m, double v, double grad,
                                     const struct kern_hyper *h)
{
    const double g = grad * (double)0.37f, lr = (double)h->lr;
    struct expected x = { .v = v };
    x.m = (double)h->beta1 * m + g;
    x.p = p - lr * (double)h->weight_decay * p - lr * x.m;
    x.m_bound = 1.001 * U * (fabs(g) + fabs(x.m));
    x.p_bound = 1.001 * (U * (fabs(lr * x.m) + fabs(p) + fabs(x.p)) + lr * x.m_bound);
    return x;
}

/* The sign is that of c unless c is within its own error of 0, where either sign (or none) may
 * come out: then p may be off by 2 lr. c: g, rest1 and its product 3 U |(1-beta1) g|, fma U |c|. */
static struct expected lion_reference(double p, double m, double v, double grad,
                                      const struct kern_hyper *h)
{
    const double g = grad * (double)0.37f, lr = (double)h->lr;
    const double b1 = (double)h->beta1, b2 = (double)h->beta2;
    struct expected x = { .v = v };
    const double c = b1 * m + (1 - b1) * g;
    const double sign = c > 0 ? 1 : c < 0 ? -1 : 0;
    x.p = p - lr * (double)h->weight_decay * p - lr * sign;
    x.m = b2 * m + (1 - b2) * g;
    x.m_bound = 1.001 * U * (3 * fabs((1 - b2) * g) + fabs(x.m));
    x.p_bound = 1.001 * U * (fabs(p) + fabs(x.p));
    if (fabs(c) <= 1.001 * U * (3 * fabs((1 - b1) * g) + fabs(c)))
        x.p_bound += 2 * lr;
    return x;
}

typedef struct expected reference_fn(double p, double m, double v, double grad,
                                     const struct kern_hyper *h);
static reference_fn *const references[] = {
    [SPEC_ADAMW] = adamw_reference, [SPEC_SGD] = sgd_reference, [SPEC_LION] = lion_reference
};

/* Scalar, one thread: every element of every run near its reference, gaps untouched. */
static void check_reference(enum spec_optimizer o, const struct kern_run *runs, uint32_t run_count)
{
    enum { ELEMS = 90 * BLOCK };
    struct kern *k = device_new("scalar", 1);
    struct state old = state_new(ELEMS, SHD_F32, false, 0, 31);
    struct state new = state_new(ELEMS, SHD_F32, false, 1, 31);
    state_update(k, o, &new, runs, run_count);
    const float *p = old.p.base, *m = old.m.base, *v = old.v.base, *g = old.g.base;
    const float *new_p = new.p.base, *new_m = new.m.base, *new_v = new.v.base;
    const float *out = new.out.base;
    uint64_t i = 0;
    for (uint32_t r = 0; r <= run_count; r++) {
        const uint64_t gap_end = r < run_count ? runs[r].first_elem : ELEMS;
        for (; i < gap_end; i++)
            EXPECT(same_float(new_p[i], p[i]) && same_float(new_m[i], m[i]) &&
                   same_float(new_v[i], v[i]) && bits_of(out[i]) == 0x5a5a5a5a);
        for (; r < run_count && i < runs[r].first_elem + runs[r].elems; i++) {
            const struct expected x = references[o]((double)p[i], (double)m[i], (double)v[i],
                                                    (double)g[i], &update_hypers[runs[r].hyper]);
            EXPECT_NEAR(new_m[i], x.m, x.m_bound);
            EXPECT_NEAR(new_v[i], x.v, x.v_bound);
            EXPECT_NEAR(new_p[i], x.p, x.p_bound);
            EXPECT(same_float(out[i], new_p[i]));
        }
    }
    state_free(&old);
    state_free(&new);
    k->ops->free(k);
}

TEST(updates_are_near_the_papers_formulas)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct kern_run runs[64];
        const uint32_t count = make_runs(90 * BLOCK, runs, ARRAY_SIZE(runs), seed);
        printf("runs: seed %" PRIu64 ", %" PRIu32 " of them\n", seed, count);
        EXPECT(count > 4);
        for (enum spec_optimizer o = SPEC_ADAMW; o <= SPEC_LION; o++)
            check_reference(o, runs, count);
    }
}

struct update_case {
    enum spec_optimizer o;
    enum shd_dtype dtype;
    uint64_t elems, skew;
    bool wild;
    float rest; /* of an average; 0: there is none */
    const struct kern_run *runs;
    uint32_t run_count;
    struct state want; /* from the first device */
    bool have_want;
};

static void check_update(struct kern *k, const char *label, void *arg)
{
    struct update_case *c = arg;
    struct state s = state_new(c->elems, c->dtype, c->wild, c->skew, 31);
    s.rest = c->rest;
    state_update(k, c->o, &s, c->runs, c->run_count);
    if (!c->have_want) {
        c->want = s;
        c->have_want = true;
        return;
    }
    EXPECT_SAME_FLOATS((float *)s.p.base, (float *)c->want.p.base, c->elems, label);
    EXPECT_SAME_FLOATS((float *)s.m.base, (float *)c->want.m.base, c->elems, label);
    EXPECT_SAME_FLOATS((float *)s.v.base, (float *)c->want.v.base, c->elems, label);
    EXPECT_SAME_FLOATS((float *)s.g.base, (float *)c->want.g.base, c->elems, label);
    EXPECT_SAME_FLOATS((float *)s.e.base, (float *)c->want.e.base, c->elems, label);
    expect_same_array(s.out.base, c->want.out.base, c->dtype, c->elems, label);
    state_free(&s);
}

/* 40 blocks share chunks and store plainly; 130 are above the threshold for streamed stores. Every
 * optimizer, dtype and kind of values meets every size in turn. */
TEST(updates_give_the_same_bits_on_every_device)
{
    static const uint64_t sizes[] = { 1 * BLOCK, 40 * BLOCK, 130 * BLOCK };
    static const float rests[] = { 0, 0.001f, 1, 0.7f, 0.3f };
    for (uint32_t i = 0; i < 54; i++) {
        struct kern_run runs[64];
        struct update_case c = {
            .o = (enum spec_optimizer)(SPEC_ADAMW + i % SPEC_MEAN),
            .dtype = (enum shd_dtype)(1 + i / SPEC_MEAN % 3),
            .elems = sizes[i / 18],
            .skew = i % 2,
            .wild = i % 4 > 1,
            .rest = rests[i % ARRAY_SIZE(rests)],
            .runs = runs,
        };
        c.run_count = make_runs(c.elems, runs, ARRAY_SIZE(runs), i + 100);
        devices_each(check_update, &c);
        state_free(&c.want);
    }
}

/* One average in fp64, from the same fp32 numbers, of what the update has made of the parameters,
 * gaps included. Roundings: d = p - e, the fma, and where it is written the other way rest - 1 is
 * exact: within U (|d| + |e'|). Of rest 1 it is the parameter. */
TEST(averages_are_near_their_formula)
{
    static const float rests[] = { 1, 0.9f, 0.5f, 0x1.fffffep-2f, 0.1f, 0.001f, 0x1p-24f };
    enum { ELEMS = 33 * BLOCK };
    struct kern *k = device_new("scalar", 1);
    for (size_t i = 0; i < ARRAY_SIZE(rests); i++) {
        struct kern_run runs[64];
        struct state s = state_new(ELEMS, SHD_F32, false, 1, i);
        struct state old = state_new(ELEMS, SHD_F32, false, 1, i);
        s.rest = rests[i];
        state_update(k, SPEC_ADAMW, &s, runs, make_runs(ELEMS, runs, ARRAY_SIZE(runs), i));
        const float *p = s.p.base, *e = s.e.base, *before = old.e.base;
        for (uint64_t j = 0; j < ELEMS; j++) {
            const double d = (double)p[j] - (double)before[j];
            const double want = (double)before[j] + (double)s.rest * d;
            EXPECT_NEAR(e[j], want, 1.001 * U * (fabs(d) + fabs(want)));
            EXPECT(s.rest < 1 || same_float(e[j], p[j]));
        }
        state_free(&s);
        state_free(&old);
    }
    k->ops->free(k);
}

/* The published copy is the cast of the new parameters, in place of a second pass. */
TEST(publish_is_the_cast_of_the_new_parameters)
{
    const struct kern_run all = { 0, 140 * BLOCK, 1 };
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 2);
        for (enum shd_dtype dtype = SHD_F32; dtype <= SHD_F16; dtype++) {
            struct state s = state_new(140 * BLOCK, dtype, true, 1, 31);
            struct guarded out = guarded_new(s.elems * 4, 0);
            state_update(k, SPEC_ADAMW, &s, &all, 1);
            EXPECT_RUNS(cast, k, (&(struct kern_cast){ out.base, dtype, s.p.base, s.elems }));
            EXPECT(memcmp(out.base, s.out.base, s.out.bytes) == 0);
            guarded_free(&out);
            state_free(&s);
        }
        k->ops->free(k);
    }
}

/* sign(0) = 0 for both zeros, and no step for a NaN; only the decay acts. */
TEST(lion_does_not_step_where_the_sign_is_zero)
{
    static float p[BLOCK], m[BLOCK], g[BLOCK], out[BLOCK];
    static const struct kern_hyper h = { .lr = 0.5f, .beta1 = 0.9f, .beta2 = 0.99f };
    const struct kern_run run = { 0, BLOCK, 0 };
    const struct kern_update a = {
        .kind = SPEC_LION,
        .param = p,
        .m = m,
        .grad = g,
        .grad_scale = 1,
        .publish = out,
        .publish_dtype = SHD_F32,
        .elems = BLOCK,
        .runs = &run,
        .run_count = 1,
        .hypers = &h,
        .hyper_count = 1,
    };
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 1);
        for (uint64_t i = 0; i < BLOCK; i++)
            p[i] = 1, m[i] = 0, g[i] = 0;
        m[1] = -0.0f, g[1] = -0.0f;
        g[2] = NAN;
        g[3] = 1e-20f;
        g[4] = -INFINITY;
        EXPECT_RUNS(update, k, &a);
        EXPECT(p[0] == 1 && p[1] == 1 && p[2] == 1);
        EXPECT(p[3] == 0.5f && p[4] == 1.5f && isnan(m[2]));
        k->ops->free(k);
    }
}

/* SGD's first step: m was 0, so m = g exactly and p = p - lr g with two roundings. */
TEST(sgd_first_momentum_is_the_gradient)
{
    static float p[BLOCK], m[BLOCK], g[BLOCK], out[BLOCK];
    static const struct kern_hyper h = { .lr = 0.25f, .beta1 = 0.9f };
    const struct kern_run run = { 0, BLOCK, 0 };
    fill_awkward(g, BLOCK, false, 5);
    memset(p, 0, sizeof p);
    memset(m, 0, sizeof m);
    struct kern *k = device_new(NULL, 1);
    EXPECT_RUNS(update, k,
                (&(struct kern_update){ .kind = SPEC_SGD,
                                        .param = p,
                                        .m = m,
                                        .grad = g,
                                        .grad_scale = 1,
                                        .publish = out,
                                        .publish_dtype = SHD_F32,
                                        .elems = BLOCK,
                                        .runs = &run,
                                        .run_count = 1,
                                        .hypers = &h,
                                        .hyper_count = 1 }));
    for (uint64_t i = 0; i < BLOCK; i++)
        EXPECT(m[i] == g[i] && p[i] == -0.25f * g[i]);
    k->ops->free(k);
}

/* Of one value all bits stay, also those that arithmetic takes for zeros; else it is the quotient,
 * rounded once. Moments there are none. */
TEST(a_mean_is_the_sum_divided_by_what_took_part)
{
    const struct kern_run run = { 0, BLOCK, 0 };
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 1);
        for (uint32_t count = 1; count < 8; count++) {
            struct state s = state_new(BLOCK, SHD_F32, false, 1, count);
            float *g = s.g.base;
            const float *p = s.p.base;
            g[0] = 0x1p-149f, g[1] = -0.0f;
            EXPECT_RUNS(update, k,
                        (&(struct kern_update){ .kind = SPEC_MEAN,
                                                .param = s.p.base,
                                                .grad = g,
                                                .grad_scale = (float)count,
                                                .publish = s.out.base,
                                                .publish_dtype = SHD_F32,
                                                .elems = BLOCK,
                                                .runs = &run,
                                                .run_count = 1,
                                                .hypers = update_hypers,
                                                .hyper_count = 1 }));
            EXPECT(count > 1 || memcmp(p, g, BLOCK * sizeof *p) == 0);
            for (uint64_t i = 2; i < BLOCK; i++)
                EXPECT(p[i] == daz(g[i]) / (float)count || fabsf(p[i]) < 0x1p-125f);
            EXPECT(memcmp(p, s.out.base, BLOCK * sizeof *p) == 0);
            state_free(&s);
        }
        k->ops->free(k);
    }
}

/* -- What an update comes to --------------------------------------------------------------------
 */

struct change_case {
    struct update_case update;
    struct kern_change want; /* from the first device */
};

static struct kern_change no_change(void)
{
    return (struct kern_change){ .update.finite = true, .weight.finite = true, .whole = true };
}

/* In fp64, the squares of fp32 values: the kernel's blocks differ from it by their rounding alone.
 * Denormals count as zero. */
static void expect_near_change(const struct state *old, const struct state *new,
                               const struct kern_change *got)
{
    const float *before = old->p.base, *after = new->p.base;
    double update = 0, weight = 0;
    for (uint64_t i = 0; i < new->elems; i++) {
        const double d = (double)daz(daz(after[i]) - daz(before[i]));
        update += d * d;
        weight += (double)daz(after[i]) * (double)daz(after[i]);
    }
    EXPECT_NEAR(fixsum_value(&got->update.sum), update, 1e-11 * update);
    EXPECT_NEAR(fixsum_value(&got->weight.sum), weight, 1e-11 * weight);
}

static bool same_bits(const struct kern_sum *a, const struct kern_sum *b)
{
    return a->finite == b->finite && memcmp(&a->sum, &b->sum, sizeof a->sum) == 0;
}

static void check_change(struct kern *k, const char *label, void *arg)
{
    struct change_case *c = arg;
    const struct update_case *u = &c->update;
    struct kern_change change = no_change();
    struct state old = state_new(u->elems, u->dtype, u->wild, u->skew, 31);
    struct state plain = state_new(u->elems, u->dtype, u->wild, u->skew, 31);
    struct state s = state_new(u->elems, u->dtype, u->wild, u->skew, 31);
    plain.rest = s.rest = u->rest;
    s.change = &change;
    state_update(k, u->o, &plain, u->runs, u->run_count);
    state_update(k, u->o, &s, u->runs, u->run_count);
    EXPECT_SAME_FLOATS((float *)s.p.base, (float *)plain.p.base, u->elems, label);
    EXPECT_SAME_FLOATS((float *)s.m.base, (float *)plain.m.base, u->elems, label);
    EXPECT_SAME_FLOATS((float *)s.v.base, (float *)plain.v.base, u->elems, label);
    EXPECT_SAME_FLOATS((float *)s.e.base, (float *)plain.e.base, u->elems, label);
    expect_same_array(s.out.base, plain.out.base, u->dtype, u->elems, label);
    EXPECT(change.whole && change.weight.finite == !u->wild);
    if (!c->update.have_want && !u->wild)
        expect_near_change(&old, &s, &change);
    if (!c->update.have_want)
        c->want = change;
    c->update.have_want = true;
    if (!same_bits(&change.update, &c->want.update) || !same_bits(&change.weight, &c->want.weight))
        FAIL("%s: the update comes to something else", label);
    state_free(&old);
    state_free(&plain);
    state_free(&s);
}

TEST(an_update_that_is_measured_changes_no_bit_and_comes_to_the_same_on_every_device)
{
    static const uint64_t sizes[] = { 1 * BLOCK, 40 * BLOCK, 130 * BLOCK };
    for (uint32_t i = 0; i < 12; i++) {
        struct kern_run runs[64];
        struct change_case c = { .update = {
                                     .o = (enum spec_optimizer)(SPEC_ADAMW + i % SPEC_MEAN),
                                     .dtype = (enum shd_dtype)(1 + i % 3),
                                     .elems = sizes[i / 4],
                                     .skew = i % 2,
                                     .wild = i % 4 == 3,
                                     .rest = i % 3 == 1 ? 0.3f : 0,
                                     .runs = runs,
                                 } };
        c.update.run_count = make_runs(c.update.elems, runs, ARRAY_SIZE(runs), i + 200);
        devices_each(check_change, &c);
    }
}

TEST_MAIN()
