/* Kernels for the GPU, emulated, against the host's scalar ones: bit for bit, over sizes, dtypes,
 * alignments, awkward values, grids and schedules. */
#include "tests/cuda/emulate_util.h"

/* Every case runs in order, and with blocks and threads mixed at random. */
static void schedule(uint32_t i)
{
    const struct emulate_options mixed = { .seed = 1000 + i, .resident = 1 + i % 5 };
    emulate_configure(i % 2 == 0 ? NULL : &mixed);
}

static const unsigned grids[] = { 1, 2, 3, 7, 132 };

TEST(fill_gives_the_hosts_bits)
{
    static const uint64_t sizes[] = { 1, 2, 3, 4, 5, 1023, 4096, 70001 };
    static const float ranges[][2] = { { -0.5f, 1.25f }, { 0, 1e-38f }, { -1, 0 }, { 3, 3.5f } };
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 12 * ARRAY_SIZE(sizes); i++) {
        const uint64_t elems = sizes[i / 12], skew = i % 5 * 4;
        const float *range = ranges[i / 3 % 4];
        struct guarded want = guarded_new(elems * 4, skew), got = guarded_new(elems * 4, skew);
        const struct kern_fill f = {
            want.base, elems, i * 1013, 77 + i, (enum kern_fill_kind)(1 + i % 3), range[0], range[1]
        };
        EXPECT_RUNS(fill, k, &f);
        const struct cuda_fill a = { got.base, elems, f.first_index, f.key, (uint32_t)f.kind,
                                     f.a,      f.b };
        schedule(i);
        LAUNCH("shd_fill", &a, grids[i % ARRAY_SIZE(grids)]);
        EXPECT(guarded_intact(&got));
        EXPECT(memcmp(got.base, want.base, elems * 4) == 0);
        guarded_free(&want);
        guarded_free(&got);
    }
    k->ops->free(k);
}

/* Indices beyond 2^32 blocks, and a denormal constant, which is to stay. */
TEST(fill_reaches_far_indices_and_keeps_constants)
{
    enum { N = 4099 };
    static float want[N], got[N];
    struct kern *k = device_new("scalar", 1);
    const uint64_t first = (UINT64_C(1) << 35) - 2001;
    EXPECT_RUNS(fill, k, (&(struct kern_fill){ want, N, first, 9, KERN_FILL_NORMAL, 0, 1 }));
    LAUNCH("shd_fill", (&(struct cuda_fill){ got, N, first, 9, KERN_FILL_NORMAL, 0, 1 }), 3);
    EXPECT(memcmp(want, got, sizeof got) == 0);
    const float tiny = float_of(0x80000001);
    LAUNCH("shd_fill", (&(struct cuda_fill){ got, N, 5, 9, KERN_FILL_CONST, tiny, 0 }), 3);
    for (uint32_t i = 0; i < N; i++)
        EXPECT(bits_of(got[i]) == 0x80000001);
    k->ops->free(k);
}

/* Every upper half of an fp32 with lower halves around the borders of both formats. */
TEST(cast_gives_the_hosts_bits_for_every_kind_of_value)
{
    static const uint32_t lows[] = { 0,      1,      0xfff,  0x1000, 0x1001, 0x1fff,
                                     0x2000, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff };
    const uint64_t elems = 65536 * ARRAY_SIZE(lows);
    float *in = malloc(elems * 4), *want = malloc(elems * 4), *got = malloc(elems * 4);
    EXPECT(in != NULL && want != NULL && got != NULL);
    for (uint64_t i = 0; i < elems; i++)
        in[i] = float_of((uint32_t)(i / ARRAY_SIZE(lows)) << 16 | lows[i % ARRAY_SIZE(lows)]);
    struct kern *k = device_new("scalar", 1);
    emulate_configure(NULL);
    for (uint32_t dtype = SHD_F32; dtype <= SHD_F16; dtype++) {
        EXPECT_RUNS(cast, k, (&(struct kern_cast){ want, (enum shd_dtype)dtype, in, elems }));
        memset(got, 0x5a, elems * 4);
        LAUNCH("shd_cast", (&(struct cuda_cast){ got, in, elems, dtype }), 5);
        EXPECT(memcmp(got, want, elems * dtype_bytes((enum shd_dtype)dtype)) == 0);
    }
    k->ops->free(k);
    free(in);
    free(want);
    free(got);
}

TEST(cast_takes_any_size_and_alignment)
{
    static const uint64_t sizes[] = { 1, 3, 4, 7, 1024, 5001 };
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 8 * 3 * ARRAY_SIZE(sizes); i++) {
        const enum shd_dtype dtype = (enum shd_dtype)(1 + i % 3);
        const uint64_t elems = sizes[i / 24], bytes = elems * dtype_bytes(dtype);
        const uint64_t skew_in = i / 3 % 2 * 4, skew_out = i / 6 % 4 * dtype_bytes(dtype);
        struct guarded in = guarded_new(elems * 4, skew_in);
        struct guarded want = guarded_new(bytes, skew_out), got = guarded_new(bytes, skew_out);
        fill_awkward(in.base, elems, true, i);
        EXPECT_RUNS(cast, k, (&(struct kern_cast){ want.base, dtype, in.base, elems }));
        schedule(i);
        LAUNCH("shd_cast", (&(struct cuda_cast){ got.base, in.base, elems, (uint32_t)dtype }),
               grids[i % ARRAY_SIZE(grids)]);
        EXPECT(guarded_intact(&got) && guarded_intact(&in));
        EXPECT(memcmp(got.base, want.base, bytes) == 0);
        guarded_free(&in);
        guarded_free(&want);
        guarded_free(&got);
    }
    k->ops->free(k);
}

/* Also block by block, so that no two errors can cancel. */
TEST(sumsq_gives_the_hosts_sums)
{
    static const uint64_t sizes[] = { 1, 2, 9, 33 };
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 10 * ARRAY_SIZE(sizes); i++) {
        const uint64_t blocks = sizes[i / 10];
        float *x = aligned_alloc(64, blocks * BLOCK * 4);
        double *sums = malloc(blocks * sizeof *sums);
        EXPECT(x != NULL && sums != NULL);
        fill_awkward(x, blocks * BLOCK, i % 2 == 1, i + 5);
        for (uint64_t j = 0; j < blocks * BLOCK && i % 4 > 1; j++)
            x[j] = isfinite(x[j]) ? x[j] : 0; /* the large and the tiny only */
        schedule(i);
        LAUNCH("shd_sumsq", (&(struct cuda_sumsq){ x, blocks * BLOCK, sums, NULL }),
               grids[i % ARRAY_SIZE(grids)]);
        for (uint64_t b = 0; b < blocks; b++) {
            struct kern_sum want = sum_of(NULL, 0), got = sum_of(sums + b, 1);
            EXPECT_RUNS(sumsq, k, (&(struct kern_sumsq){ x + b * BLOCK, BLOCK, &want }));
            EXPECT(same_sum(&got, &want));
        }
        free(x);
        free(sums);
    }
    k->ops->free(k);
}

struct accumulate_case {
    enum shd_dtype dtype;
    uint64_t blocks;
    bool first, sum, wild;
};

static void check_accumulate(struct kern *k, const struct accumulate_case *c, uint32_t i)
{
    const uint64_t elems = c->blocks * BLOCK, grad_bytes = elems * dtype_bytes(c->dtype);
    struct guarded want = guarded_new(elems * 4, 16), got = guarded_new(elems * 4, 32);
    struct guarded grad = guarded_new(grad_bytes, 48);
    float *wide = malloc(elems * 4);
    double *sums = malloc(c->blocks * sizeof *sums);
    EXPECT(wide != NULL && sums != NULL);
    fill_awkward(want.base, elems, c->wild, i + 1);
    memcpy(got.base, want.base, elems * 4);
    fill_awkward(wide, elems, c->wild, i + 2);
    EXPECT_RUNS(cast, k, (&(struct kern_cast){ grad.base, c->dtype, wide, elems }));
    struct kern_sum want_sum = sum_of(NULL, 0);
    EXPECT_RUNS(accumulate, k,
                (&(struct kern_accumulate){ .acc = want.base,
                                            .grad = grad.base,
                                            .grad_dtype = c->dtype,
                                            .elems = elems,
                                            .first = c->first,
                                            .sum = c->sum ? &want_sum : NULL }));
    schedule(i);
    LAUNCH("shd_accumulate",
           (&(struct cuda_accumulate){ .acc = got.base,
                                       .grad = grad.base,
                                       .elems = elems,
                                       .grad_dtype = (uint32_t)c->dtype,
                                       .first = c->first,
                                       .block_sums = c->sum ? sums : NULL }),
           grids[i % ARRAY_SIZE(grids)]);
    EXPECT(guarded_intact(&got) && guarded_intact(&grad));
    if (c->first) /* a copy: NaN, too */
        EXPECT(memcmp(got.base, want.base, elems * 4) == 0);
    EXPECT_SAME_FLOATS((float *)got.base, (float *)want.base, elems, "accumulate");
    const struct kern_sum got_sum = sum_of(sums, c->sum ? c->blocks : 0);
    if (!same_sum(&got_sum, &want_sum))
        FAIL("case %u: dtype %d, %d blocks, first %d, wild %d: another sum", i, (int)c->dtype,
             (int)c->blocks, c->first, c->wild);
    free(wide);
    free(sums);
    guarded_free(&want);
    guarded_free(&got);
    guarded_free(&grad);
}

TEST(accumulate_gives_the_hosts_bits_and_sums)
{
    static const uint64_t sizes[] = { 1, 2, 31, 35 };
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 24 * ARRAY_SIZE(sizes); i++)
        check_accumulate(k,
                         &(struct accumulate_case){ .dtype = (enum shd_dtype)(1 + i % 3),
                                                    .blocks = sizes[i / 24],
                                                    .first = i / 3 % 2 == 1,
                                                    .sum = i / 6 % 2 == 1,
                                                    .wild = i / 12 % 2 == 1 },
                         i);
    k->ops->free(k);
}

static void emulated_update(enum spec_optimizer o, struct state *s, const struct kern_run *runs,
                            uint32_t run_count, unsigned blocks)
{
    struct cuda_update a = {
        .param = s->p.base,
        .m = spec_optimizer_rows[o].moments > 0 ? s->m.base : NULL,
        .v = spec_optimizer_rows[o].moments > 1 ? s->v.base : NULL,
        .grad = s->g.base,
        .publish = s->out.base,
        .elems = s->elems,
        .runs = runs,
        .run_count = run_count,
        .publish_dtype = (uint32_t)s->dtype,
    };
    for (uint32_t i = 0; i < ARRAY_SIZE(update_hypers); i++)
        a.rates[i] = kern_rates_of(o, &update_hypers[i], update_scale(o));
    LAUNCH(optimizer_kernel(o), &a, blocks);
    if (s->rest > 0)
        LAUNCH("shd_ema",
               (&(struct cuda_ema){
                   .average = s->e.base, .param = a.param, .elems = a.elems, .rest = s->rest }),
               blocks);
}

TEST(updates_give_the_hosts_bits)
{
    static const uint64_t sizes[] = { 1, 5, 40 };
    static const float rests[] = { 0, 0.001f, 1, 0.7f, 0.3f };
    struct kern *k = device_new("scalar", 1);
    for (uint32_t i = 0; i < 36 * ARRAY_SIZE(sizes); i++) {
        const uint64_t elems = sizes[i / 36] * BLOCK;
        const enum spec_optimizer o = (enum spec_optimizer)(SPEC_ADAMW + i % SPEC_MEAN);
        struct kern_run runs[256] = { { 0, elems, 1 } };
        const uint32_t count = i % 12 == 0 ? 1 : make_runs(elems, runs, ARRAY_SIZE(runs), i);
        const enum shd_dtype dtype = (enum shd_dtype)(1 + i / SPEC_MEAN % 3);
        struct state want = state_new(elems, dtype, i / 18 % 2 == 1, /* skew= */ 8, i);
        struct state got = state_new(elems, dtype, i / 18 % 2 == 1, /* skew= */ 8, i);
        want.rest = got.rest = rests[i % ARRAY_SIZE(rests)];
        state_update(k, o, &want, runs, count);
        schedule(i);
        emulated_update(o, &got, runs, count, grids[i % ARRAY_SIZE(grids)]);
        EXPECT_SAME_FLOATS((float *)got.p.base, (float *)want.p.base, elems, "p");
        EXPECT_SAME_FLOATS((float *)got.m.base, (float *)want.m.base, elems, "m");
        EXPECT_SAME_FLOATS((float *)got.v.base, (float *)want.v.base, elems, "v");
        EXPECT_SAME_FLOATS((float *)got.e.base, (float *)want.e.base, elems, "e");
        expect_same_array(got.out.base, want.out.base, dtype, elems, "publish");
        state_free(&want);
        state_free(&got);
    }
    k->ops->free(k);
}

TEST_MAIN()
