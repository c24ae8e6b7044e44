/* Attention's softmax, the loss, and products on a GPU, each against plain loops in fp64. */
#include "tests/cuda/gpt_cuda_array.h"

/* -- Attention and loss ---------------------------------------------------------------------- */

struct softmax_case {
    struct array scores, prob;
    uint32_t pairs, seq, stride, first, rows;
    uint64_t pair; /* elements of a pair's scores */
    float scale;
};

static struct softmax_case softmax_new(uint32_t seq, uint32_t first, uint32_t dtype)
{
    struct softmax_case c = { .pairs = 3, .seq = seq, .stride = (seq + 7) / 8 * 8, .first = first };
    c.rows = seq - first;
    c.pair = (uint64_t)(c.rows + 2) * c.stride;
    c.scale = 0.25f;
    c.scores = array_new(c.pairs * c.pair, GPU_F32);
    c.prob = array_new((uint64_t)c.pairs * seq * c.stride, dtype);
    return c;
}

static void softmax_launch(struct softmax_case *c)
{
    const struct gpu_softmax a = { c->scores.device, c->prob.device, c->pair,  c->pairs,
                                   c->seq,           c->stride,      c->first, c->rows,
                                   c->prob.dtype,    c->scale };
    gpu_launch(&gpu, GPU_KERNEL_softmax, gpu_blocks_rows((uint64_t)c->pairs * c->rows), &a);
    array_fetch(&c->prob);
}

static void expect_softmax_row(const struct softmax_case *c, uint32_t pair, uint32_t i)
{
    const float *x = c->scores.host + pair * c->pair + (uint64_t)i * c->stride;
    const uint32_t row = c->first + i;
    const uint64_t at = ((uint64_t)pair * c->seq + row) * c->stride;
    double max = -INFINITY, sum = 0;
    for (uint32_t j = 0; j <= row; j++)
        max = fmax(max, (double)x[j]);
    for (uint32_t j = 0; j <= row; j++)
        sum += exp(((double)x[j] - max) * (double)c->scale);
    for (uint32_t j = 0; j < c->seq; j++) {
        const double score = ((double)x[j] - max) * (double)c->scale;
        if (j <= row) /* the exponent's rounding counts, too */
            expect_near(&c->prob, at + j, exp(score) / sum,
                        exp(score) / sum * EPS * (row + 8 + 2 * fabs(score)) + 0x1p-126);
        else
            EXPECT(c->prob.host[at + j] == 0);
    }
}

TEST(softmax_is_causal)
{
    start(308);
    static const uint32_t cases[][2] = { { 19, 0 }, { 19, 8 }, { 1, 0 }, { 300, 256 } };
    for (int i = 0; i < 4 * DTYPES; i++) {
        struct softmax_case c = softmax_new(cases[i / DTYPES][0], cases[i / DTYPES][1],
                                            dtypes[i % DTYPES]);
        for (uint64_t k = 0; k < c.scores.count; k++)
            c.scores.host[k] *= k % 3 == 0 ? 3e4f : 10;
        array_send(&c.scores);
        softmax_launch(&c);
        for (uint32_t pair = 0; pair < c.pairs; pair++)
            for (uint32_t row = 0; row < c.rows; row++)
                expect_softmax_row(&c, pair, row);
        array_free(&c.scores);
        array_free(&c.prob);
    }
}

TEST(softmax_keeps_what_is_no_number)
{
    start(309);
    const float bad[] = { NAN, INFINITY };
    for (int k = 0; k < 2; k++) {
        struct softmax_case c = softmax_new(11, 0, GPU_F32);
        c.scores.host[4 * c.stride + 2] = bad[k]; /* pair 0, row 4 */
        array_send(&c.scores);
        softmax_launch(&c);
        EXPECT(isnan(c.prob.host[4 * c.stride + 2]));
        expect_softmax_row(&c, 0, 3);
        expect_softmax_row(&c, 0, 5);
        array_free(&c.scores);
        array_free(&c.prob);
    }
}

TEST(softmax_gradient_is_that_of_fp64)
{
    start(310);
    static const uint32_t cases[][2] = { { 19, 0 }, { 19, 8 }, { 300, 256 } };
    for (int i = 0; i < 3 * DTYPES; i++) {
        struct softmax_case c = softmax_new(cases[i / DTYPES][0], cases[i / DTYPES][1],
                                            dtypes[i % DTYPES]);
        softmax_launch(&c); /* prob is one */
        float *p = malloc(c.prob.count * sizeof *p);
        memcpy(p, c.prob.host, c.prob.count * sizeof *p);
        struct array dp = array_new(c.scores.count, GPU_F32);
        const struct gpu_softmax a = { dp.device, c.prob.device, c.pair, c.pairs,      c.seq,
                                       c.stride,  c.first,       c.rows, c.prob.dtype, c.scale };
        gpu_launch(&gpu, GPU_KERNEL_softmax_grad, gpu_blocks_rows((uint64_t)c.pairs * c.rows), &a);
        array_fetch(&c.prob);
        for (uint64_t r = 0; r < (uint64_t)c.pairs * c.rows; r++) {
            const uint64_t pair = r / c.rows, q = r % c.rows, row = c.first + q;
            const uint64_t at = (pair * c.seq + row) * c.stride;
            const float *d = dp.host + pair * c.pair + q * c.stride;
            double dot = 0;
            for (uint64_t j = 0; j <= row; j++)
                dot += (double)p[at + j] * (double)d[j];
            for (uint64_t j = 0; j < c.seq; j++) {
                const double want = (double)c.scale * (double)p[at + j] * ((double)d[j] - dot);
                expect_near(&c.prob, at + j, j <= row ? want : 0,
                            (double)p[at + j] * EPS * (double)(row + 8));
            }
        }
        free(p);
        array_free(&dp);
        array_free(&c.scores);
        array_free(&c.prob);
    }
}

TEST(cross_entropy_is_that_of_fp64)
{
    start(311);
    enum { ROWS = 13 };
    const float scale = 1024.0f / ROWS;
    struct shd_err e;
    for (int t = 0; t < DTYPES; t++) {
        struct array logits = array_new(ROWS * GPU_VOCAB, GPU_F32);
        struct array grad = array_new(logits.count, dtypes[t]);
        uint8_t targets[ROWS];
        double losses[ROWS];
        for (uint64_t i = 0; i < logits.count; i++)
            logits.host[i] *= i < GPU_VOCAB ? 80 : 8; /* the first row: far apart */
        array_send(&logits);
        for (int r = 0; r < ROWS; r++)
            targets[r] = (uint8_t)(test_random(&seed) >> 40);
        uint8_t *on = gpu_alloc(&gpu, ROWS, "targets", &e);
        double *out = gpu_alloc(&gpu, sizeof losses, "losses", &e);
        gpu_copy(&gpu, on, targets, ROWS);
        const struct gpu_cross_entropy a = { logits.device, grad.device, on,   out,
                                             ROWS,          dtypes[t],   scale };
        gpu_launch(&gpu, GPU_KERNEL_cross_entropy, gpu_blocks_rows(ROWS), &a);
        gpu_copy(&gpu, losses, out, sizeof losses);
        array_fetch(&grad);
        for (int r = 0; r < ROWS; r++) {
            const float *x = logits.host + r * (int)GPU_VOCAB;
            double max = -INFINITY, sum = 0;
            for (uint32_t j = 0; j < GPU_VOCAB; j++)
                max = fmax(max, (double)x[j]);
            for (uint32_t j = 0; j < GPU_VOCAB; j++)
                sum += exp((double)x[j] - max);
            const double want = log(sum) + max - (double)x[targets[r]];
            EXPECT_NEAR(losses[r], want, 256 * EPS * (1 + fabs(want)));
            for (uint32_t j = 0; j < GPU_VOCAB; j++) {
                const double p = exp((double)x[j] - max) / sum - (j == targets[r]);
                expect_near(&grad, (uint64_t)r * GPU_VOCAB + j, p * (double)scale,
                            512 * EPS * (double)scale);
            }
        }
        gpu_free(&gpu, on);
        gpu_free(&gpu, out);
        array_free(&logits);
        array_free(&grad);
    }
}

/* -- Products -------------------------------------------------------------------------------- */

struct product_case {
    uint32_t m, n, k, count, factor, result;
    bool a_transposed, b_transposed, add;
};

static double element(const struct array *x, uint64_t base, uint64_t stride, uint64_t i, uint64_t j,
                      bool transposed)
{
    return (double)x->host[base + (transposed ? j * stride + i : i * stride + j)];
}

static void product_check(const struct product_case *p)
{
    const uint64_t a_stride = p->a_transposed ? p->m : p->k,
                   b_stride = p->b_transposed ? p->k : p->n;
    const uint64_t a_next = (uint64_t)p->m * p->k, b_next = (uint64_t)p->k * p->n;
    const uint64_t c_stride = p->n + 8, c_next = p->m * c_stride; /* inside a wider matrix */
    struct array a = array_new(a_next * p->count, p->factor);
    struct array b = array_new(b_next * p->count, p->factor);
    struct array c = array_new(c_next * p->count, p->result);
    float *before = malloc(c.count * sizeof *before);
    memcpy(before, c.host, c.count * sizeof *before);
    gpu_multiply(&gpu, &(struct gpu_product){
                           .m = p->m,
                           .n = p->n,
                           .k = p->k,
                           .a = { a.device, p->factor, a_stride, a_next, p->a_transposed },
                           .b = { b.device, p->factor, b_stride, b_next, p->b_transposed },
                           .c = { c.device, p->result, c_stride, c_next, false },
                           .add = p->add,
                           .count = p->count });
    array_fetch(&c);
    for (uint64_t i = 0; i < c.count; i++) {
        const uint64_t which = i / c_next, row = i % c_next / c_stride, col = i % c_stride;
        if (col >= p->n) {
            EXPECT(c.host[i] == before[i]);
            continue;
        }
        double want = p->add ? (double)before[i] : 0;
        for (uint64_t k = 0; k < p->k; k++)
            want += element(&a, which * a_next, a_stride, row, k, p->a_transposed) *
                    element(&b, which * b_next, b_stride, k, col, p->b_transposed);
        expect_near(&c, i, want, (p->k + 1.0) * EPS * (p->k + 1.0));
    }
    free(before);
    array_free(&a);
    array_free(&b);
    array_free(&c);
}

TEST(products_of_all_kinds)
{
    start(312);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t batch = 1; batch <= 3; batch += 2) {
            const struct product_case f32 = { 5,       16,        24,        batch,     GPU_F32,
                                              GPU_F32, i % 2 > 0, i / 2 > 0, batch == 3 };
            struct product_case p = f32;
            product_check(&p);
            for (int t = 1; t < DTYPES; t++) {
                p = f32;
                p.factor = dtypes[t];
                product_check(&p);
                p.result = dtypes[t];
                p.add = false;
                product_check(&p);
            }
        }
}

/* 1 + 2^-12 is no TF32 number: rounded, it is 1, and so is its product with 1. Of a size for which
 * cuBLAS multiplies by tensor cores: it may do without them, and a single number it does. */
#define TF32_SIDE 64u
#define TF32_ALL  (TF32_SIDE * TF32_SIDE)

TEST(full_products_are_not_rounded_to_tf32)
{
    struct shd_err e = { 0 };
    struct gpu tf32;
    start(314);
    EXPECT_OK(gpu_init(&tf32, 0, /* tf32= */ true, &e), &e);
    for (int full = 0; full < 2; full++) {
        struct array a = array_new(TF32_ALL, GPU_F32), b = array_new(TF32_ALL, GPU_F32);
        struct array c = array_new(TF32_ALL, GPU_F32);
        for (uint32_t i = 0; i < TF32_ALL; i++) {
            a.host[i] = 1 + 0x1p-12f;
            b.host[i] = i / TF32_SIDE == i % TF32_SIDE;
        }
        array_send(&a);
        array_send(&b);
        gpu_multiply(&tf32, &(struct gpu_product){ .m = TF32_SIDE,
                                                   .n = TF32_SIDE,
                                                   .k = TF32_SIDE,
                                                   .a = { a.device, GPU_F32, TF32_SIDE, 0, false },
                                                   .b = { b.device, GPU_F32, TF32_SIDE, 0, false },
                                                   .c = { c.device, GPU_F32, TF32_SIDE, 0, false },
                                                   .full = full > 0 });
        EXPECT_OK(gpu_finish(&tf32, &e), &e);
        array_fetch(&c);
        for (uint32_t i = 0; i < TF32_ALL; i++)
            EXPECT(c.host[i] == (full ? a.host[i] : 1));
        array_free(&a);
        array_free(&b);
        array_free(&c);
    }
    gpu_deinit(&tf32);
}

/* What went wrong first is told, once; later work is not queued, and then things work again. */
TEST(first_error_is_kept_until_told)
{
    start(313);
    struct shd_err e = { 0 };
    struct array a = array_new(64, GPU_F32);
    const struct gpu_matrix x = { .data = a.device, .dtype = GPU_F32, .stride = 1 };
    struct gpu_product p = { .m = 8, .n = 8, .k = 8, .a = x, .b = x, .c = x };
    gpu_multiply(&gpu, &p); /* strides below its columns: cuBLAS refuses */
    gpu_zero(&gpu, a.device, 64 * sizeof(float));
    EXPECT_STATUS(gpu_finish(&gpu, &e), SHD_EIO);
    EXPECT_HAS(e.text, "product [8, 8] x [8, 8]: CUBLAS_STATUS_INVALID_VALUE");
    float *before = malloc(64 * sizeof *before);
    memcpy(before, a.host, 64 * sizeof *before);
    array_fetch(&a);
    EXPECT(memcmp(before, a.host, 64 * sizeof *before) == 0);
    EXPECT_OK(gpu_finish(&gpu, &e), &e);
    free(before);
    array_free(&a);
}

TEST_MAIN()
