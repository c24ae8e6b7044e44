/* Routing and what is around an expert's products on a GPU, each kernel against plain loops: the
 * routes exactly, sums in fp64. */
#include "tests/cuda/gpt_cuda_array.h"

#define ROWS_MAX 1000
#define EXPERTS  256

/* Numbers on the device, with a guard behind them. */
static uint32_t *words_new(const uint32_t *host, uint64_t count)
{
    static const uint32_t guard = 0xdecade;
    struct shd_err e;
    uint32_t *device = gpu_alloc(&gpu, (count + 1) * sizeof *device, "a test", &e);
    EXPECT(device != NULL);
    gpu_copy(&gpu, device, host, count * sizeof *device);
    gpu_copy(&gpu, device + count, &guard, sizeof guard);
    finish();
    return device;
}

static void words_fetch(uint32_t *host, const uint32_t *device, uint64_t count)
{
    uint32_t guard = 0;
    gpu_copy(&gpu, host, device, count * sizeof *host);
    gpu_copy(&gpu, &guard, device + count, sizeof guard);
    finish();
    EXPECT_EQ(guard, 0xdecade);
}

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(test_random(&seed) >> 33) % limit;
}

/* -- Routing --------------------------------------------------------------------------------- */

/* As route_row() of model_layer.c. */
static uint32_t choose(const float *logits, uint32_t experts)
{
    uint32_t best = 0;
    for (uint32_t x = 1; x < experts; x++)
        if (logits[x] > logits[best])
            best = x;
    return best;
}

/* Rows with equal logits, infinite ones and NaNs among them. */
static void spoil_row(float *logits, uint32_t experts, uint32_t row)
{
    for (uint32_t x = 0; x < experts; x++) {
        if (row % 4 == 1) /* few values, so ties */
            logits[x] = (float)below(3);
        if (row % 16 == 2)
            logits[x] = below(3) == 0 ? (float)NAN : logits[x];
        if (row % 16 == 6)
            logits[x] = below(2) == 0 ? -INFINITY : logits[x];
        if (row == 10)
            logits[x] = -INFINITY;
    }
    if (row % 16 == 14)
        logits[below(experts)] = INFINITY;
}

static void expect_row(const struct array *prob, const struct gpu_route *a, uint64_t row,
                       const float *logits)
{
    double sum = 0, top = (double)logits[choose(logits, a->experts)];
    bool finite = true;
    for (uint32_t x = 0; x < a->experts; x++) {
        sum += exp((double)logits[x] - top);
        finite = finite && !isnan(logits[x]) && !isnan(sum);
    }
    for (uint32_t x = 0; x < a->stride; x++) {
        const float got = prob->host[row * a->stride + x];
        const double want = x < a->experts ? exp((double)logits[x] - top) / sum : 0;
        if (x < a->experts && !finite)
            EXPECT(isnan(got));
        else
            EXPECT_NEAR(got, want, 64 * EPS * (want + 1e-3));
    }
}

static void route_case(uint32_t experts, uint32_t dtype)
{
    enum { ROWS = 37 };
    const uint32_t stride = (experts + 7) / 8 * 8;
    struct array prob = array_new((uint64_t)ROWS * stride, GPU_F32);
    struct array bias = array_new(experts, dtype);
    static uint32_t chosen[ROWS];
    static float logits[ROWS][EXPERTS];
    for (uint32_t row = 0; row < ROWS; row++) {
        spoil_row(prob.host + row * stride, experts, row);
        for (uint32_t x = 0; x < experts; x++) {
            bias.host[x] = row % 2 == 0 ? bias.host[x] : 0.25f * (float)(x % 3);
            logits[row][x] = prob.host[row * stride + x];
        }
    }
    array_send(&prob);
    array_send(&bias);
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t x = 0; x < experts; x++)
            logits[row][x] += bias.host[x];
    uint32_t *device = words_new(chosen, ROWS);
    const struct gpu_route a = { prob.device, bias.device, device, ROWS, experts, stride, dtype };
    gpu_launch(&gpu, GPU_KERNEL_route, gpu_blocks_rows(ROWS), &a);
    words_fetch(chosen, device, ROWS);
    array_fetch(&prob);
    for (uint32_t row = 0; row < ROWS; row++) {
        EXPECT_EQ(chosen[row], choose(logits[row], experts));
        expect_row(&prob, &a, row, logits[row]);
    }
    gpu_free(&gpu, device);
    array_free(&prob);
    array_free(&bias);
}

TEST(route_chooses_the_largest_logit)
{
    static const uint32_t experts[] = { 1, 2, 7, 8, 31, 33, 100, EXPERTS };
    start(501);
    for (size_t i = 0; i < sizeof experts / sizeof experts[0]; i++)
        for (int t = 0; t < DTYPES; t++)
            route_case(experts[i], dtypes[t]);
}

/* A stable counting sort: as route_sort() of model_layer.c. */
static void sort_case(uint32_t experts, uint32_t rows, uint32_t chunk_rows)
{
    static uint32_t chosen[ROWS_MAX], row[ROWS_MAX], first[EXPERTS + 1], counts[ROWS_MAX * EXPERTS];
    const uint32_t chunks = (rows + chunk_rows - 1) / chunk_rows;
    for (uint32_t r = 0; r < rows; r++) /* some experts get most rows, some none */
        chosen[r] = below(3) == 0 ? below(experts) : below(experts) / 5 * 2;
    uint32_t *on_chosen = words_new(chosen, rows), *on_row = words_new(row, rows);
    uint32_t *on_first = words_new(first, experts + 1);
    uint32_t *on_counts = words_new(counts, (uint64_t)chunks * experts);
    const struct gpu_route_count a = { on_chosen, on_counts, rows, experts, chunk_rows };
    const struct gpu_route_first b = { on_counts, on_first, experts, chunks };
    const struct gpu_route_place c = { on_chosen, on_counts, on_row, rows, experts, chunk_rows };
    gpu_launch(&gpu, GPU_KERNEL_route_count, chunks, &a);
    gpu_launch(&gpu, GPU_KERNEL_route_first, 1, &b);
    gpu_launch(&gpu, GPU_KERNEL_route_place, chunks, &c);
    words_fetch(row, on_row, rows);
    words_fetch(first, on_first, experts + 1);
    words_fetch(counts, on_counts, (uint64_t)chunks * experts);
    uint32_t at = 0;
    for (uint32_t x = 0; x < experts; x++) {
        EXPECT_EQ(first[x], at);
        for (uint32_t r = 0; r < rows; r++)
            if (chosen[r] == x)
                EXPECT_EQ(row[at++], r);
    }
    EXPECT_EQ(first[experts], rows);
    gpu_free(&gpu, on_chosen);
    gpu_free(&gpu, on_row);
    gpu_free(&gpu, on_first);
    gpu_free(&gpu, on_counts);
}

TEST(rows_are_sorted_by_expert_and_stay_in_order)
{
    start(502);
    sort_case(1, 5, 64);
    sort_case(5, 64, 64);
    sort_case(7, 1000, 64);
    sort_case(EXPERTS, 999, 70);
    sort_case(EXPERTS, 3, 64);
}

TEST(route_gradient_is_that_of_fp64)
{
    start(503);
    static const uint32_t experts[] = { 1, 3, 8, 40, EXPERTS };
    for (size_t i = 0; i < sizeof experts / sizeof experts[0]; i++) {
        const uint32_t e = experts[i], stride = (e + 7) / 8 * 8, rows = 21;
        struct array prob = array_new((uint64_t)rows * stride, GPU_F32);
        struct array dgate = array_new(rows, GPU_F32);
        uint32_t chosen[21];
        float *before = malloc(prob.count * sizeof *before);
        memcpy(before, prob.host, prob.count * sizeof *before);
        for (uint32_t r = 0; r < rows; r++)
            chosen[r] = below(e);
        uint32_t *device = words_new(chosen, rows);
        const struct gpu_route_grad a = { prob.device, dgate.device, device, rows, e, stride };
        gpu_launch(&gpu, GPU_KERNEL_route_grad, gpu_blocks_rows(rows), &a);
        array_fetch(&prob);
        for (uint32_t r = 0; r < rows; r++) {
            const float *p = before + r * stride;
            const double scale = (double)dgate.host[r] * (double)p[chosen[r]];
            for (uint32_t x = 0; x < stride; x++) {
                const double want = scale * ((x == chosen[r]) - (double)p[x]);
                EXPECT_NEAR(prob.host[r * stride + x], x < e ? want : 0, 8 * EPS);
            }
        }
        free(before);
        gpu_free(&gpu, device);
        array_free(&prob);
        array_free(&dgate);
    }
}

TEST(widen_is_exact)
{
    start(504);
    for (int t = 0; t < DTYPES; t++) {
        struct array in = array_new(264, dtypes[t]), out = array_new(264, GPU_F32);
        const struct gpu_widen a = { in.device, out.device, 264, dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_widen, gpu_blocks_elems(264), &a);
        array_fetch(&out);
        EXPECT(memcmp(in.host, out.host, 264 * sizeof(float)) == 0);
        array_free(&in);
        array_free(&out);
    }
}

/* -- An expert's rows ------------------------------------------------------------------------ */

enum { ROWS = 19, PICKED = 11, STRIDE = 8, EXPERT = 5 };

struct rows_case {
    struct array by_row, packed, prob; /* [ROWS, cols], [PICKED, cols], [ROWS, STRIDE] */
    uint32_t row[PICKED], *device;
    uint32_t cols;
};

static struct rows_case rows_new(uint32_t cols, uint32_t packed_dtype)
{
    struct rows_case c = { .cols = cols };
    c.by_row = array_new((uint64_t)ROWS * cols, GPU_F32);
    c.packed = array_new((uint64_t)PICKED * cols, packed_dtype);
    c.prob = array_new(ROWS * STRIDE, GPU_F32);
    for (uint32_t i = 0; i < PICKED; i++) /* ascending, some rows are another expert's */
        c.row[i] = i * ROWS / PICKED;
    c.device = words_new(c.row, PICKED);
    return c;
}

static void rows_free(struct rows_case *c)
{
    array_free(&c->by_row);
    array_free(&c->packed);
    array_free(&c->prob);
    gpu_free(&gpu, c->device);
}

TEST(expert_rows_are_gathered_and_scattered)
{
    start(505);
    for (int t = 0; t < DTYPES; t++) {
        struct rows_case c = rows_new(264, dtypes[t]);
        const struct gpu_expert_gather a = { c.by_row.device, c.device, c.packed.device,
                                             c.packed.count,  c.cols,   dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_expert_gather, gpu_blocks_elems(a.elems), &a);
        array_fetch(&c.packed);
        for (uint64_t i = 0; i < c.packed.count; i++)
            EXPECT(c.packed.host[i] ==
                   rounded(c.by_row.host[c.row[i / c.cols] * c.cols + i % c.cols], dtypes[t]));
        rows_free(&c);
    }
    struct rows_case c = rows_new(264, GPU_F32);
    float *want = malloc(c.by_row.count * sizeof *want);
    memcpy(want, c.by_row.host, c.by_row.count * sizeof *want);
    for (uint64_t i = 0; i < c.packed.count; i++)
        want[c.row[i / c.cols] * c.cols + i % c.cols] = c.packed.host[i];
    const struct gpu_expert_scatter a = { c.packed.device, c.device, c.by_row.device,
                                          c.packed.count, c.cols };
    gpu_launch(&gpu, GPU_KERNEL_expert_scatter, gpu_blocks_elems(a.elems), &a);
    array_fetch(&c.by_row);
    EXPECT(memcmp(want, c.by_row.host, c.by_row.count * sizeof *want) == 0);
    free(want);
    rows_free(&c);
}

TEST(expert_output_is_gated_and_added)
{
    start(506);
    for (int t = 0; t < DTYPES; t++) {
        struct rows_case c = rows_new(264, GPU_F32);
        struct array mid = array_new(c.by_row.count, GPU_F32), bias = array_new(264, dtypes[t]);
        float *x = malloc(c.by_row.count * sizeof *x);
        memcpy(x, c.by_row.host, c.by_row.count * sizeof *x);
        for (uint64_t i = 0; i < c.packed.count; i++) {
            const uint64_t row = c.row[i / c.cols], to = row * c.cols + i % c.cols;
            const float out = c.packed.host[i] + bias.host[i % c.cols];
            x[to] = fmaf(c.prob.host[row * STRIDE + EXPERT], out, mid.host[to]);
        }
        const struct gpu_expert_combine a = { c.by_row.device, c.packed.device, mid.device,
                                              c.prob.device,   bias.device,     c.device,
                                              c.packed.count,  c.cols,          EXPERT,
                                              STRIDE,          dtypes[t] };
        gpu_launch(&gpu, GPU_KERNEL_expert_combine, gpu_blocks_elems(a.elems), &a);
        array_fetch(&c.by_row);
        EXPECT(memcmp(x, c.by_row.host, c.by_row.count * sizeof *x) == 0);
        free(x);
        array_free(&mid);
        array_free(&bias);
        rows_free(&c);
    }
}

static void split_case(uint32_t cols, uint32_t dtype)
{
    struct rows_case c = rows_new(cols, GPU_F32);
    struct array dout = array_new(c.packed.count, GPU_F32), dgate = array_new(ROWS, GPU_F32);
    struct array bias = array_new(cols, dtype);
    float before[ROWS];
    memcpy(before, dgate.host, sizeof before);
    const struct gpu_expert_split a = { c.by_row.device, c.packed.device, c.prob.device,
                                        bias.device,     c.device,        dout.device,
                                        dgate.device,    PICKED,          cols,
                                        EXPERT,          STRIDE,          dtype };
    gpu_launch(&gpu, GPU_KERNEL_expert_split, gpu_blocks_rows(PICKED), &a);
    array_fetch(&dout);
    array_fetch(&dgate);
    for (uint32_t i = 0; i < PICKED; i++) {
        const uint32_t row = c.row[i];
        double dot = 0;
        for (uint32_t j = 0; j < cols; j++) {
            const float dx = c.by_row.host[row * cols + j];
            dot += (double)dx * ((double)c.packed.host[i * cols + j] + (double)bias.host[j]);
            EXPECT(dout.host[i * cols + j] == c.prob.host[row * STRIDE + EXPERT] * dx);
        }
        expect_near(&dgate, row, dot, 2 * cols * EPS * cols);
        before[row] = dgate.host[row];
    }
    EXPECT(memcmp(before, dgate.host, sizeof before) == 0); /* other rows' are left alone */
    array_free(&dout);
    array_free(&dgate);
    array_free(&bias);
    rows_free(&c);
}

TEST(expert_gradient_is_split)
{
    start(507);
    for (int t = 0; t < DTYPES; t++) {
        split_case(8, dtypes[t]);
        split_case(264, dtypes[t]);
        split_case(1032, dtypes[t]);
    }
}

TEST_MAIN()
