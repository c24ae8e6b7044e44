/* Moments in 8 bits: values near the paper's tree, codes and scales that survive being decoded,
 * and updates that are those of fp32 moments but for what is rounded, bit for bit the same on every
 * device. */
#include "kernels/cpu/isa.h"
#include "tests/lib/kern_util.h"

#define LEAST 0x1p-96
#define MOST  0x1p126

static float *array_new(uint64_t elems)
{
    float *x = aligned_alloc(64, elems * sizeof *x);
    EXPECT(x != NULL);
    memset(x, 0, elems * sizeof *x);
    return x;
}

static struct kern_array quant_new(enum quant quant, uint64_t elems)
{
    return (struct kern_array){ array_new(quant_bytes(elems) / sizeof(float)), quant };
}

static void quantize(struct kern *k, struct kern_array to, const float *in, uint64_t elems)
{
    EXPECT_RUNS(quantize, k, (&(struct kern_quantize){ to, 0, in, elems }));
}

static void dequantize(struct kern *k, struct kern_array from, float *out, uint64_t first,
                       uint64_t elems)
{
    EXPECT_RUNS(dequantize, k, (&(struct kern_dequantize){ out, from, first, elems }));
}

/* The tree's value of a code, as kernels/quant.h has the formula, in fp64. */
static double value_of(unsigned code, enum quant quant)
{
    const int top = quant == QUANT_SIGNED ? 6 : 7;
    int i = 0;
    while (code >> (i + 1) != 0)
        i++;
    if (code == 0)
        return 0;
    return pow(10, i - top) * (0.1 + 0.9 * (code - (1u << i) + 1) / (1u << i));
}

static unsigned codes_of(enum quant quant)
{
    return quant == QUANT_SIGNED ? 128 : 256;
}

/* Tables are rounded to fp32, then fma and product round: within 2^-21, relative. The largest is
 * its scale, exactly. */
TEST(codes_have_the_values_of_the_tree)
{
    struct kern *k = device_new("scalar", 1);
    for (enum quant quant = QUANT_SIGNED; quant <= QUANT_UNSIGNED; quant++) {
        struct kern_array a = quant_new(quant, BLOCK);
        float *x = array_new(BLOCK);
        for (unsigned code = 0; code < codes_of(quant); code++)
            *(quant_block_at(a.base, (code / 64) * 64ull).codes + code % 64) = (uint8_t)code;
        for (unsigned b = 0; b < 4; b++)
            *quant_block_at(a.base, b * 64ull).scale = 3;
        dequantize(k, a, x, 0, BLOCK);
        double before = -1;
        for (unsigned code = 0; code < codes_of(quant); code++) {
            const double want = 3 * value_of(code, quant);
            EXPECT_NEAR(x[code], want, want * 0x1p-21);
            EXPECT((double)x[code] > before);
            before = (double)x[code];
        }
        EXPECT(x[codes_of(quant) - 1] == 3);
        free(a.base);
        free(x);
    }
    k->ops->free(k);
}

/* Blocks that encode() may leave: a scale, one element with the largest code, others any. */
static void fill_codes(struct kern_array a, uint64_t elems, uint64_t seed)
{
    static const float scales[] = { 0x1p-96f,       0x1.000002p-96f, 0x1p126f, 0x1.fffffep125f, 1,
                                    0x1.fffffep-1f, 2e-29f,          1e-12f,   3e-5f,           7 };
    uint64_t state = test_seed(seed);
    for (uint64_t i = 0; i < elems; i += QUANT_BLOCK_ELEMS) {
        const struct quant_block b = quant_block_at(a.base, i);
        const uint64_t r = test_random(&state);
        *b.scale = r % 2 == 0 ? scales[r / 2 % ARRAY_SIZE(scales)]
                              : ldexpf(1 + (float)(r >> 40) * 0x1p-24f, (int)(r / 2 % 220) - 95);
        if (*b.scale > 0x1p126f)
            *b.scale = 1;
        for (unsigned j = 0; j < QUANT_BLOCK_ELEMS; j++) {
            b.codes[j] = (uint8_t)(i / QUANT_BLOCK_ELEMS * 61 + j); /* each comes up */
            if (a.quant == QUANT_SIGNED && b.codes[j] == 0x80)
                b.codes[j] = 0; /* there is no -0 */
        }
        b.codes[r / 7 % QUANT_BLOCK_ELEMS] = a.quant == QUANT_UNSIGNED ? 255
                                             : r / 3 % 2 == 0          ? 127
                                                                       : 0x81;
    }
}

static void again_differs(struct kern_array a, struct kern_array b, const char *label,
                          uint64_t seed)
{
    for (uint64_t i = 0;; i++) {
        const struct quant_block x = quant_block_at(a.base, i / 64 * 64);
        const struct quant_block y = quant_block_at(b.base, i / 64 * 64);
        if (x.codes[i % 64] != y.codes[i % 64] || bits_of(*x.scale) != bits_of(*y.scale))
            FAIL("%s: codes %d, seed %" PRIu64 ": element %" PRIu64 " was %02x, is %02x, of scale "
                 "%a, is %a",
                 label, (int)a.quant, seed, i, x.codes[i % 64], y.codes[i % 64], (double)*x.scale,
                 (double)*y.scale);
    }
}

/* What is decoded and encoded again has the same codes and scales: so do checkpoints and puts. */
static void check_again(struct kern *k, const char *label, void *arg)
{
    enum { ELEMS = 70 * BLOCK };
    (void)arg;
    for (enum quant quant = QUANT_SIGNED; quant <= QUANT_UNSIGNED; quant++)
        for (uint64_t seed = 1; seed <= 3; seed++) {
            struct kern_array a = quant_new(quant, ELEMS), b = quant_new(quant, ELEMS);
            float *x = array_new(ELEMS);
            fill_codes(a, ELEMS, seed);
            memset(b.base, 0x77, quant_bytes(ELEMS));
            dequantize(k, a, x, 0, ELEMS);
            quantize(k, b, x, ELEMS);
            if (memcmp(a.base, b.base, quant_bytes(ELEMS)) != 0)
                again_differs(a, b, label, seed);
            free(a.base);
            free(b.base);
            free(x);
        }
}

TEST(what_was_decoded_is_encoded_to_the_same_codes)
{
    devices_each(check_again, NULL);
}

/* The nearest of all, by fp64: no other one is nearer by more than the roundings of fp32. */
static double nearest_error(double y, enum quant quant)
{
    double least = fabs(y);
    for (unsigned code = 0; code < codes_of(quant); code++)
        least = fmin(least, fabs(fabs(y) - value_of(code, quant)));
    return least;
}

TEST(each_value_gets_the_nearest_code)
{
    enum { ELEMS = 2 * BLOCK };
    struct kern *k = device_new("scalar", 1);
    uint64_t state = test_seed(5);
    float *x = array_new(ELEMS), *y = array_new(ELEMS);
    for (enum quant quant = QUANT_SIGNED; quant <= QUANT_UNSIGNED; quant++) {
        struct kern_array a = quant_new(quant, ELEMS);
        for (uint64_t i = 0; i < ELEMS; i++) {
            const uint64_t r = test_random(&state);
            x[i] = ldexpf((float)(r >> 40) * 0x1p-24f, -(int)(r % 24));
            if (quant == QUANT_SIGNED && r / 64 % 2 == 0)
                x[i] = -x[i];
        }
        quantize(k, a, x, ELEMS);
        dequantize(k, a, y, 0, ELEMS);
        for (uint64_t i = 0; i < ELEMS; i++) {
            const double scale = (double)*quant_block_at(a.base, i / 64 * 64).scale;
            const double least = scale * nearest_error((double)x[i] / scale, quant);
            const double got = fabs((double)y[i] - (double)x[i]);
            const bool raised = quant == QUANT_UNSIGNED && x[i] > 0 &&
                                (double)x[i] < 0.51e-7 * scale; /* never to 0 */
            EXPECT(scale >= fabs((double)x[i]));
            EXPECT(raised ? y[i] > 0 : got <= least + 0x1p-20 * fabs((double)x[i]));
        }
        free(a.base);
    }
    free(x);
    free(y);
    k->ops->free(k);
}

/* -- Values at the ends -------------------------------------------------------------------------
 */

static void encode_one(struct kern *k, enum quant quant, float first, float other, float *ret_first,
                       float *ret_other, float *ret_scale)
{
    struct kern_array a = quant_new(quant, BLOCK);
    float *x = array_new(BLOCK);
    x[70] = first;
    x[100] = other;
    quantize(k, a, x, BLOCK);
    dequantize(k, a, x, 0, BLOCK);
    *ret_first = x[70];
    *ret_other = x[100];
    *ret_scale = *quant_block_at(a.base, 64).scale;
    EXPECT(x[0] == 0 && x[128] == 0); /* other blocks are not of it */
    free(a.base);
    free(x);
}

TEST(a_block_without_numbers_is_none_and_a_tiny_one_is_zero)
{
    for (const char *const *isa = device_names(); *isa != NULL; isa++) {
        struct kern *k = device_new(*isa, 1);
        float x, y, scale;
        for (enum quant quant = QUANT_SIGNED; quant <= QUANT_UNSIGNED; quant++) {
            static const float none[] = { NAN, INFINITY, 0x1.000002p126f };
            for (size_t i = 0; i < ARRAY_SIZE(none); i++) {
                encode_one(k, quant, none[i], 1, &x, &y, &scale);
                EXPECT(isnan(x) && isnan(y) && bits_of(scale) == 0x7fc00000);
            }
            encode_one(k, quant, 0x1p126f, 0x1p100f, &x, &y, &scale);
            EXPECT(x == 0x1p126f && y >= 0 && y < 0x1p104f);
            encode_one(k, quant, 0x1p-96f, 0, &x, &y, &scale);
            EXPECT(x == 0x1p-96f && y == 0 && scale == 0x1p-96f);
            encode_one(k, quant, 0x1.fffffep-97f, 0x1p-149f, &x, &y, &scale);
            EXPECT(x == 0 && y == 0 && bits_of(scale) == 0);
            encode_one(k, quant, 1, -0.0f, &x, &y, &scale);
            EXPECT(x == 1 && y == 0);
        }
        encode_one(k, QUANT_SIGNED, -2, 0x1p-126f, &x, &y, &scale);
        EXPECT(x == -2 && y == 0 && scale == 2);
        encode_one(k, QUANT_SIGNED, -INFINITY, 1, &x, &y, &scale);
        EXPECT(isnan(x) && isnan(y));
        encode_one(k, QUANT_UNSIGNED, 1, 0x1p-126f, &x, &y, &scale); /* not 0: a step divides */
        EXPECT(x == 1 && y > 0.9e-7f && y < 1.1e-7f);
        encode_one(k, QUANT_UNSIGNED, -1, 1, &x, &y, &scale);
        EXPECT(isnan(x) && isnan(y));
        k->ops->free(k);
    }
}

struct wild {
    float x[4 * BLOCK];
    uint8_t want[2][4 * QUANT_TILE_BYTES]; /* of the first device */
    float read[2][4 * BLOCK];
    bool have;
};

static void check_wild(struct kern *k, const char *label, void *arg)
{
    struct wild *w = arg;
    for (enum quant quant = QUANT_SIGNED; quant <= QUANT_UNSIGNED; quant++) {
        struct kern_array a = quant_new(quant, 4 * BLOCK);
        float *x = array_new(4 * BLOCK);
        quantize(k, a, w->x, 4 * BLOCK);
        dequantize(k, a, x, 0, 4 * BLOCK);
        if (!w->have) {
            memcpy(w->want[quant - 1], a.base, sizeof w->want[0]);
            memcpy(w->read[quant - 1], x, sizeof w->read[0]);
        }
        if (memcmp(w->want[quant - 1], a.base, sizeof w->want[0]) != 0)
            FAIL("%s: codes %d differ", label, (int)quant);
        EXPECT_SAME_FLOATS(x, w->read[quant - 1], 4 * BLOCK, label);
        for (uint64_t i = 0; i < 400; i++) { /* from anywhere to anywhere */
            const uint64_t first = i * 7 % 300, elems = i % 131 + 1;
            memset(x, 0xff, (elems + 1) * sizeof *x);
            dequantize(k, a, x, first, elems);
            EXPECT_SAME_FLOATS(x, w->read[quant - 1] + first, elems, label);
            EXPECT(bits_of(x[elems]) == 0xffffffff);
        }
        uint8_t got[3][32], want[3][32];
        const struct kern_hash of = {
            .elems = 3000, .head_elems = 500, .out = got, .of = a, .first_elem = 33
        };
        dequantize(k, a, x, 33, 3000); /* NaNs have the bits that they have here */
        const struct kern_hash plain = { .x = x, .elems = 3000, .head_elems = 500, .out = want };
        EXPECT_RUNS(hash, k, &of);
        EXPECT_RUNS(hash, k, &plain);
        EXPECT(memcmp(got, want, sizeof got) == 0);
        free(a.base);
        free(x);
    }
    w->have = true;
}

/* One block in four has odd values, the others ordinary ones of every size. */
TEST(all_devices_encode_and_decode_to_the_same_bits)
{
    static struct wild w;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        fill_awkward(w.x, ARRAY_SIZE(w.x), false, seed);
        for (uint64_t i = 0; i < ARRAY_SIZE(w.x); i += 4 * QUANT_BLOCK_ELEMS) {
            fill_awkward(w.x + i, QUANT_BLOCK_ELEMS, true, seed + i);
            for (uint64_t j = i; j < i + QUANT_BLOCK_ELEMS; j++)
                if (seed % 2 == 0 && !(fabsf(w.x[j]) < 1e30f))
                    w.x[j] = 0x1p-140f; /* the rest of it is seen, too */
        }
        for (uint64_t i = 0; seed > 2 && i < ARRAY_SIZE(w.x); i++)
            w.x[i] = fabsf(w.x[i]);
        w.have = false;
        devices_each(check_wild, &w);
    }
}

/* -- Updates ------------------------------------------------------------------------------------
 */

/* Runs of an update in 8 bits: of others' the beginnings at blocks, none in the block of another.
 */
static uint32_t align_runs(struct kern_run *runs, uint32_t count)
{
    uint32_t kept = 0;
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t run_end = runs[i].first_elem + runs[i].elems;
        const uint64_t first = layout_align(end > runs[i].first_elem ? end : runs[i].first_elem,
                                            QUANT_BLOCK_ELEMS);
        if (first >= run_end)
            continue;
        end = run_end;
        runs[kept++] = (struct kern_run){ first, run_end - first, runs[i].hyper };
    }
    return kept;
}

struct update_case {
    enum spec_optimizer o;
    enum shd_dtype dtype;
    uint64_t elems, skew;
    bool wild;
    float rest;
    struct kern_run runs[64];
    uint32_t run_count;
    struct state want;      /* by fp32 moments that are rounded in between */
    struct kern_array m, v; /* what becomes of it */
    struct kern_change change;
};

static void update_int8(struct kern *k, const struct update_case *c, struct state *s,
                        struct kern_array m, struct kern_array v, struct kern_change *change)
{
    const struct kern_update a = {
        .kind = c->o,
        .param = s->p.base,
        .m = m.base,
        .v = spec_optimizer_rows[c->o].moments > 1 ? v.base : NULL,
        .int8 = true,
        .grad = s->g.base,
        .grad_scale = update_scale(c->o),
        .publish = s->out.base,
        .publish_dtype = s->dtype,
        .elems = s->elems,
        .runs = c->runs,
        .run_count = c->run_count,
        .hypers = update_hypers,
        .hyper_count = ARRAY_SIZE(update_hypers),
        .ema = { .average = c->rest > 0 ? s->e.base : NULL, .rest = c->rest },
        .change = change,
    };
    EXPECT_RUNS(update, k, &a);
}

static struct kern_change no_change(void)
{
    struct kern_change change = { .update.finite = true, .weight.finite = true, .whole = true };
    fixsum_init(&change.update.sum);
    fixsum_init(&change.weight.sum);
    return change;
}

/* Moments of a state, rounded to 8 bits; and as they are decoded, in the state. */
static void round_moments(struct kern *k, struct state *s, struct kern_array m, struct kern_array v)
{
    float *x = array_new(s->elems);
    memcpy(x, s->m.base, s->elems * sizeof *x);
    quantize(k, m, x, s->elems);
    dequantize(k, m, x, 0, s->elems);
    memcpy(s->m.base, x, s->elems * sizeof *x);
    memcpy(x, s->v.base, s->elems * sizeof *x);
    quantize(k, v, x, s->elems);
    dequantize(k, v, x, 0, s->elems);
    memcpy(s->v.base, x, s->elems * sizeof *x);
    free(x);
}

/* Behind the end of a run its last block is zero, as gaps are in a state. */
static void clear_gaps(const struct update_case *c, struct state *s)
{
    uint64_t at = 0;
    for (uint32_t r = 0; r <= c->run_count; r++) {
        const uint64_t end = r < c->run_count ? c->runs[r].first_elem : s->elems;
        for (; at < end; at++)
            ((float *)s->m.base)[at] = ((float *)s->v.base)[at] = 0;
        if (r < c->run_count)
            at += c->runs[r].elems;
    }
}

static struct state start_of(const struct update_case *c)
{
    struct state s = state_new(c->elems, c->dtype, c->wild, c->skew, 31);
    s.rest = c->rest;
    clear_gaps(c, &s);
    return s;
}

static void check_update(struct kern *k, const char *label, void *arg)
{
    struct update_case *c = arg;
    struct kern_array m = quant_new(QUANT_SIGNED, c->elems);
    struct kern_array v = quant_new(QUANT_UNSIGNED, c->elems);
    struct kern_change change = no_change();
    struct state s = start_of(c);
    round_moments(k, &s, m, v);
    update_int8(k, c, &s, m, v, c->elems > 50 * BLOCK ? &change : NULL);
    EXPECT_SAME_FLOATS((float *)s.p.base, (float *)c->want.p.base, c->elems, label);
    EXPECT_SAME_FLOATS((float *)s.e.base, (float *)c->want.e.base, c->elems, label);
    expect_same_array(s.out.base, c->want.out.base, c->dtype, c->elems, label);
    if (memcmp(m.base, c->m.base, quant_bytes(c->elems)) != 0 ||
        memcmp(v.base, c->v.base, quant_bytes(c->elems)) != 0)
        FAIL("%s: %s: other codes", label, spec_optimizer_rows[c->o].kind);
    EXPECT(c->elems <= 50 * BLOCK ||
           (change.whole &&
            memcmp(&change.update.sum, &c->change.update.sum, sizeof change.update.sum) == 0));
    free(m.base);
    free(v.base);
    state_free(&s);
}

/* What it is to be: the moments decoded, an update of fp32 moments, and these encoded. */
static void want_update(struct update_case *c)
{
    struct kern *k = device_new("scalar", 1);
    struct kern_array m = quant_new(QUANT_SIGNED, c->elems);
    struct kern_array v = quant_new(QUANT_UNSIGNED, c->elems);
    c->want = start_of(c);
    c->change = no_change();
    round_moments(k, &c->want, m, v);
    c->want.change = &c->change;
    state_update(k, c->o, &c->want, c->runs, c->run_count);
    clear_gaps(c, &c->want); /* of a block that was no number gaps were none */
    c->m = m;
    c->v = v;
    round_moments(k, &c->want, m, v);
    k->ops->free(k);
}

TEST(updates_are_those_of_fp32_moments_with_roundings_between)
{
    static const uint64_t sizes[] = { 1 * BLOCK, 40 * BLOCK, 130 * BLOCK };
    static const float rests[] = { 0, 0.001f, 1 };
    for (uint32_t i = 0; i < 45; i++) {
        static struct update_case c;
        c = (struct update_case){ .o = (enum spec_optimizer)(SPEC_ADAMW + i % SPEC_OPTIMIZERS),
                                  .dtype = (enum shd_dtype)(1 + i / SPEC_OPTIMIZERS % 3),
                                  .elems = sizes[i / 15],
                                  .skew = i % 2,
                                  .wild = i % 4 > 1,
                                  .rest = rests[i % ARRAY_SIZE(rests)] };
        c.run_count = align_runs(c.runs, make_runs(c.elems, c.runs, 64, i + 200));
        EXPECT(c.run_count > 0 || c.elems == BLOCK);
        want_update(&c);
        devices_each(check_update, &c);
        free(c.m.base);
        free(c.v.base);
        state_free(&c.want);
    }
}

/* -- Bad input ----------------------------------------------------------------------------------
 */

#define EXPECT_REFUSED(op, args, status, part)                       \
    do {                                                             \
        struct shd_err refused = { 0 };                              \
        EXPECT_STATUS(kern_##op(k, (args), NULL, &refused), status); \
        EXPECT_HAS(refused.text, (part));                            \
    } while (0)

TEST(blocks_are_not_cut)
{
    static _Alignas(64) float x[BLOCK], out[BLOCK];
    static const struct kern_hyper h = { .lr = 1, .bias1 = 1, .bias2 = 1 };
    const struct kern_array a = { x, QUANT_SIGNED }, wide = { x, QUANT_NONE };
    struct kern *k = device_new(NULL, 1);
    EXPECT_REFUSED(quantize, (&(struct kern_quantize){ a, 32, out, 64 }), SHD_EINVAL, "32");
    EXPECT_REFUSED(quantize, (&(struct kern_quantize){ a, 0, out, 65 }), SHD_ERANGE, "65");
    EXPECT_REFUSED(quantize, (&(struct kern_quantize){ wide, 0, out, 64 }), SHD_EINVAL, "codes 0");
    EXPECT_REFUSED(quantize, (&(struct kern_quantize){ a, 0, NULL, 64 }), SHD_EINVAL, "in is NULL");
    EXPECT_REFUSED(dequantize, (&(struct kern_dequantize){ out, wide, 0, 1 }), SHD_EINVAL, "fp32");
    EXPECT_REFUSED(dequantize, (&(struct kern_dequantize){ NULL, a, 0, 1 }), SHD_EINVAL, "out");
    const struct kern_run run = { 32, 64, 0 };
    struct kern_update update = { .kind = SPEC_ADAMW,
                                  .param = x,
                                  .m = x,
                                  .v = x,
                                  .int8 = true,
                                  .grad = x,
                                  .publish = out,
                                  .publish_dtype = SHD_F32,
                                  .elems = BLOCK,
                                  .runs = &run,
                                  .run_count = 1,
                                  .hypers = &h,
                                  .hyper_count = 1 };
    EXPECT_REFUSED(update, &update, SHD_ERANGE, "begins at 32");
    update.kind = SPEC_MEAN;
    update.grad_scale = 1;
    EXPECT_REFUSED(update, &update, SHD_EINVAL, "no moments");
    k->ops->free(k);
}

TEST_MAIN()
