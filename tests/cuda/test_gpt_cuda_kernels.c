/* Embedding, layer norm, and what is around linear layers on a GPU, each kernel against plain loops
 * in fp64. */
#include "tests/cuda/gpt_cuda_array.h"

/* -- Embedding ------------------------------------------------------------------------------- */

TEST(embed_adds_token_and_position)
{
    start(301);
    const uint32_t rows = 21, seq = 7, dim = 264;
    for (int t = 0; t < DTYPES; t++) {
        struct array x = array_new((uint64_t)rows * dim, GPU_F32);
        struct array wte = array_new((uint64_t)GPU_VOCAB * dim, dtypes[t]);
        struct array wpe = array_new((uint64_t)seq * dim, dtypes[t]);
        uint8_t tokens[21];
        struct shd_err e;
        void *device = gpu_alloc(&gpu, rows, "tokens", &e);
        for (uint32_t r = 0; r < rows; r++)
            tokens[r] = (uint8_t)(r == 0 ? 255 : test_random(&seed) >> 40);
        gpu_copy(&gpu, device, tokens, rows);
        const struct gpu_embed a = { x.device, wte.device, wpe.device, device,
                                     x.count,  dim,        seq,        dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_embed, gpu_blocks_elems(a.elems), &a);
        array_fetch(&x);
        for (uint64_t i = 0; i < x.count; i++) {
            const uint64_t row = i / dim, col = i % dim;
            EXPECT(x.host[i] ==
                   wte.host[tokens[row] * dim + col] + wpe.host[row % seq * dim + col]);
        }
        gpu_free(&gpu, device);
        array_free(&x);
        array_free(&wte);
        array_free(&wpe);
    }
}

/* Rows by token, in segments, as backend_cuda.c makes them. */
struct sorted {
    uint32_t rows[600], first[GPU_VOCAB + 1], count;
    struct gpu_segment segments[600];
};

static void sort_tokens(const uint8_t *tokens, uint32_t rows, struct sorted *s)
{
    uint32_t at = 0;
    s->count = 0;
    for (uint32_t v = 0; v < GPU_VOCAB; v++) {
        const uint32_t begin = at;
        s->first[v] = s->count;
        for (uint32_t r = 0; r < rows; r++)
            if (tokens[r] == v)
                s->rows[at++] = r;
        for (uint32_t b = begin; b < at; b += GPU_SEGMENT)
            s->segments[s->count++] = (struct gpu_segment){ b, at - b < GPU_SEGMENT
                                                                   ? at
                                                                   : b + GPU_SEGMENT };
    }
    s->first[GPU_VOCAB] = s->count;
}

TEST(embed_gradient_sums_rows_of_a_token)
{
    start(302);
    enum { ROWS = 600, SEQ = 150, DIM = 264 };
    static struct sorted s;
    static uint8_t tokens[ROWS];
    struct shd_err e;
    for (uint32_t r = 0; r < ROWS; r++) /* one token has most rows, many have none */
        tokens[r] = (uint8_t)(r % 3 > 0 ? 32 : test_random(&seed) >> 40);
    sort_tokens(tokens, ROWS, &s);
    struct array dx = array_new(ROWS * DIM, GPU_F32);
    struct array dwte = array_new(GPU_VOCAB * DIM, GPU_F32), dwpe = array_new(SEQ * DIM, GPU_F32);
    struct array partial = array_new((uint64_t)s.count * DIM, GPU_F32);
    struct sorted *device = gpu_alloc(&gpu, sizeof s, "tokens", &e);
    float *before = malloc(dwte.count * sizeof *before);
    memcpy(before, dwte.host, dwte.count * sizeof *before);
    gpu_copy(&gpu, device, &s, sizeof s);
    const struct gpu_embed_tokens a = { dx.device,      device->rows, device->segments,
                                        partial.device, s.count,      DIM };
    const struct gpu_embed_sum b = { dwte.device, partial.device, device->first, DIM };
    const struct gpu_embed_positions c = { dwpe.device, dx.device, ROWS / SEQ, SEQ, DIM };
    gpu_launch(&gpu, GPU_KERNEL_embed_tokens, gpu_blocks_cols(DIM, s.count), &a);
    gpu_launch(&gpu, GPU_KERNEL_embed_sum, gpu_blocks_elems(dwte.count), &b);
    gpu_launch(&gpu, GPU_KERNEL_embed_positions, gpu_blocks_elems(dwpe.count), &c);
    array_fetch(&partial);
    array_fetch(&dwte);
    array_fetch(&dwpe);
    for (uint32_t v = 0; v < GPU_VOCAB; v++)
        for (uint32_t j = 0; j < DIM; j++) {
            double want = before[v * DIM + j], all = fabs(want);
            for (uint32_t r = 0; r < ROWS; r++)
                want += tokens[r] == v ? (double)dx.host[r * DIM + j] : 0;
            for (uint32_t r = 0; r < ROWS; r++)
                all += tokens[r] == v ? fabs((double)dx.host[r * DIM + j]) : 0;
            expect_near(&dwte, v * DIM + j, want, 100 * EPS * all);
        }
    for (uint32_t i = 0; i < SEQ * DIM; i++) {
        double want = 0;
        for (uint32_t q = 0; q < ROWS / SEQ; q++)
            want += (double)dx.host[q * SEQ * DIM + i];
        expect_near(&dwpe, i, want, 4 * EPS * 4);
    }
    free(before);
    gpu_free(&gpu, device);
    array_free(&dx);
    array_free(&dwte);
    array_free(&dwpe);
    array_free(&partial);
}

/* -- Layer norm ------------------------------------------------------------------------------ */

struct norm_case {
    struct array x, raw, residual, bias, weight, shift, y, mean, rstd;
    uint32_t rows, cols;
};

static struct norm_case norm_new(uint32_t rows, uint32_t cols, uint32_t dtype)
{
    const uint64_t all = (uint64_t)rows * cols;
    return (struct norm_case){ .x = array_new(all, GPU_F32),
                               .raw = array_new(all, GPU_F32),
                               .residual = array_new(all, GPU_F32),
                               .bias = array_new(cols, dtype),
                               .weight = array_new(cols, dtype),
                               .shift = array_new(cols, dtype),
                               .y = array_new(all, dtype),
                               .mean = array_new(rows, GPU_F32),
                               .rstd = array_new(rows, GPU_F32),
                               .rows = rows,
                               .cols = cols };
}

static void norm_free(struct norm_case *n)
{
    struct array *all[] = { &n->x,     &n->raw, &n->residual, &n->bias, &n->weight,
                            &n->shift, &n->y,   &n->mean,     &n->rstd };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        array_free(all[i]);
}

static void norm_launch(struct norm_case *n, bool fused, uint32_t dtype)
{
    const struct gpu_norm a = { .x = n->x.device,
                                .raw = fused ? n->raw.device : NULL,
                                .residual = n->residual.device,
                                .bias = n->bias.device,
                                .weight = n->weight.device,
                                .shift = n->shift.device,
                                .y = n->y.device,
                                .mean = n->mean.device,
                                .rstd = n->rstd.device,
                                .rows = n->rows,
                                .cols = n->cols,
                                .param_dtype = dtype,
                                .y_dtype = dtype };
    gpu_launch(&gpu, GPU_KERNEL_norm, gpu_blocks_rows(n->rows), &a);
    array_fetch(&n->x);
    array_fetch(&n->y);
    array_fetch(&n->mean);
    array_fetch(&n->rstd);
}

/* Mean and 1 / deviation of a row of x, in fp64. */
static void norm_stats(const struct norm_case *n, uint32_t row, double *mean, double *rstd)
{
    const float *x = n->x.host + (uint64_t)row * n->cols;
    double sum = 0, squares = 0;
    for (uint32_t j = 0; j < n->cols; j++)
        sum += (double)x[j];
    *mean = sum / n->cols;
    for (uint32_t j = 0; j < n->cols; j++)
        squares += ((double)x[j] - *mean) * ((double)x[j] - *mean);
    *rstd = 1 / sqrt(squares / n->cols + 1e-5);
}

static const uint32_t widths[] = { 8, 256, 264, 1032 };
#define WIDTHS 4

TEST(norm_is_that_of_fp64)
{
    start(303);
    for (int i = 0; i < WIDTHS * DTYPES * 2; i++) {
        const uint32_t dtype = dtypes[i % DTYPES];
        const bool fused = i / DTYPES % 2;
        struct norm_case n = norm_new(11, widths[i / DTYPES / 2], dtype);
        norm_launch(&n, fused, dtype);
        for (uint32_t row = 0; row < n.rows; row++) {
            double mean, rstd;
            norm_stats(&n, row, &mean, &rstd);
            EXPECT_NEAR(n.mean.host[row], mean, n.cols * EPS * 2);
            EXPECT_NEAR(n.rstd.host[row], rstd, n.cols * EPS * rstd * 2);
            for (uint32_t j = 0; j < n.cols; j++) {
                const uint64_t at = (uint64_t)row * n.cols + j;
                if (fused)
                    EXPECT(n.x.host[at] == n.residual.host[at] + (n.raw.host[at] + n.bias.host[j]));
                const double h = ((double)n.x.host[at] - mean) * rstd;
                expect_near(&n.y, at, h * (double)n.weight.host[j] + (double)n.shift.host[j],
                            n.cols * EPS * 4 * (fabs(h) + 1));
            }
        }
        norm_free(&n);
    }
}

/* Sum over rows of dy h (weight) and dy (shift). */
static void expect_norm_columns(const struct norm_case *n, const struct array *dy,
                                const struct array *dweight, const struct array *dshift)
{
    for (uint32_t j = 0; j < n->cols; j++) {
        double weight = 0, shift = 0;
        for (uint32_t row = 0; row < n->rows; row++) {
            const uint64_t at = (uint64_t)row * n->cols + j;
            const double h = ((double)n->x.host[at] - (double)n->mean.host[row]) *
                             (double)n->rstd.host[row];
            weight += (double)dy->host[at] * h;
            shift += (double)dy->host[at];
        }
        expect_near(dweight, j, weight, n->rows * EPS * n->rows * 4);
        expect_near(dshift, j, shift, n->rows * EPS * n->rows);
    }
}

static void expect_norm_dx(const struct norm_case *n, const struct array *dy,
                           const struct array *dx, const float *before)
{
    for (uint32_t row = 0; row < n->rows; row++) {
        double sum_g = 0, sum_gh = 0;
        const double mean = (double)n->mean.host[row], rstd = (double)n->rstd.host[row];
        for (uint32_t j = 0; j < n->cols; j++) {
            const uint64_t at = (uint64_t)row * n->cols + j;
            const double g = (double)dy->host[at] * (double)n->weight.host[j];
            sum_g += g;
            sum_gh += g * ((double)n->x.host[at] - mean) * rstd;
        }
        for (uint32_t j = 0; j < n->cols; j++) {
            const uint64_t at = (uint64_t)row * n->cols + j;
            const double g = (double)dy->host[at] * (double)n->weight.host[j];
            const double h = ((double)n->x.host[at] - mean) * rstd;
            const double want = rstd * (g - sum_g / n->cols - h * sum_gh / n->cols);
            expect_near(dx, at, want + (before != NULL ? (double)before[at] : 0),
                        n->cols * EPS * 4 * (fabs(h) + 1) * rstd);
        }
    }
}

TEST(norm_gradient_is_that_of_fp64)
{
    start(304);
    for (int i = 0; i < WIDTHS * DTYPES; i++) {
        const uint32_t dtype = dtypes[i % DTYPES], rows = 37, chunk_rows = 16, chunks = 3;
        struct norm_case n = norm_new(rows, widths[i / DTYPES], dtype);
        norm_launch(&n, false, dtype);
        struct array dy = array_new(n.x.count, GPU_F32), dx = array_new(n.x.count, GPU_F32);
        struct array partial = array_new(2 * (uint64_t)chunks * n.cols, GPU_F32);
        struct array sums[] = { array_new(n.cols, GPU_F32), array_new(n.cols, GPU_F32) };
        float *before = malloc(dx.count * sizeof *before);
        memcpy(before, dx.host, dx.count * sizeof *before);
        const struct gpu_norm_columns c = { n.x.device, n.mean.device,  n.rstd.device,
                                            dy.device,  partial.device, rows,
                                            n.cols,     chunk_rows,     chunks };
        gpu_launch(&gpu, GPU_KERNEL_norm_columns, gpu_blocks_cols(n.cols, chunks), &c);
        for (uint32_t k = 0; k < 2; k++) {
            const struct gpu_columns_sum s = { (float *)partial.device + k * chunks * n.cols,
                                               sums[k].device, n.cols, chunks, n.cols };
            gpu_launch(&gpu, GPU_KERNEL_columns_sum, (n.cols + 31) / 32, &s);
            array_fetch(&sums[k]);
        }
        array_fetch(&partial);
        expect_norm_columns(&n, &dy, &sums[0], &sums[1]);
        for (int add = 1; add >= 0; add--) {
            const struct gpu_norm_grad a = { n.x.device,   n.mean.device,   n.rstd.device,
                                             dy.device,    n.weight.device, dx.device,
                                             rows,         n.cols,          dtype,
                                             (uint32_t)add };
            gpu_launch(&gpu, GPU_KERNEL_norm_grad, gpu_blocks_rows(rows), &a);
            array_fetch(&dx);
            expect_norm_dx(&n, &dy, &dx, add ? before : NULL);
        }
        struct array *all[] = { &dy, &dx, &partial, &sums[0], &sums[1] };
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            array_free(all[k]);
        free(before);
        norm_free(&n);
    }
}

/* -- Linear layers --------------------------------------------------------------------------- */

static double gelu64(double x)
{
    return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static double gelu_slope64(double x)
{
    const double u = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    const double du = sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    return (1 + tanh(u)) / 2 + x / 2 * (1 - tanh(u) * tanh(u)) * du;
}

static void fill_wide(struct array *a) /* far into gelu's and exp's tails */
{
    for (uint64_t i = 0; i < a->count; i++)
        a->host[i] = uniform() * (i % 5 == 0 ? 40 : 4);
    array_send(a);
}

TEST(bias_gelu_and_residual)
{
    start(305);
    const uint32_t rows = 13, cols = 40;
    for (int t = 0; t < DTYPES; t++) {
        struct array pre = array_new((uint64_t)rows * cols, GPU_F32);
        struct array act = array_new(pre.count, dtypes[t]), bias = array_new(cols, dtypes[t]);
        struct array x = array_new(pre.count, GPU_F32), res = array_new(pre.count, GPU_F32);
        fill_wide(&pre);
        float *before = malloc(pre.count * sizeof *before);
        memcpy(before, pre.host, pre.count * sizeof *before);
        const struct gpu_bias_gelu a = { pre.device, act.device, bias.device, pre.count,
                                         cols,       dtypes[t],  dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_bias_gelu, gpu_blocks_elems(pre.count), &a);
        array_fetch(&pre);
        array_fetch(&act);
        const struct gpu_residual b = { x.device,  pre.device, res.device, bias.device,
                                        pre.count, cols,       dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_residual, gpu_blocks_elems(pre.count), &b);
        array_fetch(&x);
        for (uint64_t i = 0; i < pre.count; i++) {
            EXPECT(pre.host[i] == before[i] + bias.host[i % cols]);
            expect_near(&act, i, gelu64((double)pre.host[i]), 64 * EPS * fabs((double)pre.host[i]));
            EXPECT(x.host[i] == res.host[i] + (pre.host[i] + bias.host[i % cols]));
        }
        struct array *all[] = { &pre, &act, &bias, &x, &res };
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            array_free(all[k]);
        free(before);
    }
}

/* Where [row, col] of [R, parts C] lies among heads. */
struct heads_shape {
    uint32_t rows, seq, dim, size;
};

static uint64_t head_at(const struct heads_shape *s, uint64_t row, uint64_t col)
{
    const uint64_t part = col / s->dim, head = col % s->dim / s->size, k = col % s->size;
    const uint64_t heads = s->dim / s->size, sequence = row / s->seq, t = row % s->seq;
    return ((part * (s->rows / s->seq) + sequence) * heads + head) * s->seq * s->size +
           t * s->size + k;
}

/* kind 0: plain; 1: times gelu'; 2: of heads. */
static void columns_case(uint32_t cols, uint32_t dtype, int kind)
{
    const struct heads_shape s = { .rows = 45, .seq = 15, .dim = cols / 3, .size = 8 };
    const uint32_t chunk_rows = 16, chunks = 3, wanted = cols - 3; /* of the sums */
    struct array d = array_new((uint64_t)s.rows * cols, GPU_F32);
    struct array pre = array_new(d.count, GPU_F32), out = array_new(d.count, dtype);
    struct array partial = array_new((uint64_t)chunks * cols, GPU_F32);
    struct array sums = array_new(wanted, GPU_F32);
    fill_wide(&pre);
    const struct gpu_columns a = { .d = d.device,
                                   .pre = kind == 1 ? pre.device : NULL,
                                   .out = out.device,
                                   .partial = partial.device,
                                   .rows = s.rows,
                                   .cols = cols,
                                   .chunk_rows = chunk_rows,
                                   .out_dtype = dtype,
                                   .dim = s.dim,
                                   .head_size = kind == 2 ? s.size : 0,
                                   .seq = s.seq };
    const struct gpu_columns_sum b = { partial.device, sums.device, wanted, chunks, cols };
    gpu_launch(&gpu, GPU_KERNEL_columns, gpu_blocks_cols(cols, chunks), &a);
    gpu_launch(&gpu, GPU_KERNEL_columns_sum, (cols + 31) / 32, &b);
    array_fetch(&out);
    array_fetch(&sums);
    for (uint32_t j = 0; j < cols; j++) {
        double sum = 0;
        for (uint32_t row = 0; row < s.rows; row++) {
            const uint64_t at = (uint64_t)row * cols + j;
            double want = (double)d.host[kind == 2 ? head_at(&s, row, j) : at];
            want *= kind == 1 ? gelu_slope64((double)pre.host[at]) : 1;
            expect_near(&out, at, want, kind == 1 ? 256 * EPS : 0);
            sum += want;
        }
        if (j < wanted)
            expect_near(&sums, j, sum, s.rows * EPS * s.rows * (kind == 1 ? 8 : 1));
    }
    struct array *all[] = { &d, &pre, &out, &partial, &sums };
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
        array_free(all[k]);
}

TEST(columns_sums_and_stores_gradients)
{
    start(306);
    for (int kind = 0; kind < 3; kind++)
        for (int t = 0; t < DTYPES; t++) {
            columns_case(24, dtypes[t], kind);
            columns_case(264, dtypes[t], kind);
        }
}

TEST(heads_and_back)
{
    start(307);
    const struct heads_shape s = { .rows = 30, .seq = 15, .dim = 48, .size = 16 };
    for (int t = 0; t < DTYPES; t++) {
        struct array in = array_new((uint64_t)s.rows * 3 * s.dim, GPU_F32);
        struct array bias = array_new(3 * s.dim, dtypes[t]), out = array_new(in.count, dtypes[t]);
        struct array back = array_new((uint64_t)s.rows * s.dim, dtypes[t]);
        const struct gpu_to_heads a = { in.device, bias.device, out.device, s.rows,    s.dim,
                                        3,         s.size,      s.seq,      dtypes[t], dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_to_heads, gpu_blocks_elems(in.count), &a);
        const struct gpu_from_heads b = { out.device, back.device, s.rows,   s.dim,
                                          s.size,     s.seq,       dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_from_heads, gpu_blocks_elems(back.count), &b);
        array_fetch(&out);
        array_fetch(&back);
        for (uint32_t row = 0; row < s.rows; row++)
            for (uint32_t j = 0; j < 3 * s.dim; j++) {
                const float sum = in.host[row * 3 * s.dim + j] + bias.host[j];
                const float want = rounded(sum, dtypes[t]);
                EXPECT(out.host[head_at(&s, row, j)] == want);
                if (j < s.dim)
                    EXPECT(back.host[row * s.dim + j] == want);
            }
        struct array *all[] = { &in, &bias, &out, &back };
        for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
            array_free(all[k]);
    }
}

TEST_MAIN()
