/* What must not change a bit of the fp32 model: threads, addresses, instruction sets. And how far
 * fp32 may be from fp64.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <ucontext.h>

#include "examples/gpt/gemm.h"
#include "examples/gpt/linear.h"
#include "examples/gpt/model.h"
#include "examples/gpt/vec.h"
#include "tests/lib/gpt64.h"
#include "tests/lib/test.h"

#define UNITS_MAX 4

static uint64_t seed;

static void start(uint64_t s)
{
    seed = test_seed(s);
}

static float uniform(void)
{
    return (float)((double)(test_random(&seed) >> 11) * 0x1p-52 - 1);
}

static void fill(float *x, uint64_t count, float scale)
{
    for (uint64_t i = 0; i < count; i++)
        x[i] = scale * uniform();
}

/* -- The model ------------------------------------------------------------------------------- */

/* Several tiles, attention blocks and odd tails: 390 rows, dim 96. */
static const struct gpt_shape shape = { .layers = 2, .dim = 96, .heads = 3, .seq = 130 };
#define BATCH 3

struct model {
    struct gpt_layout layout;
    uint32_t units;
    uint8_t windows[BATCH * 131];
    uint64_t elems[UNITS_MAX];
    float *params[UNITS_MAX];
};

static void model_init(struct model *m)
{
    gpt_layout_compute(&shape, &m->layout);
    m->units = gpt_units(&shape);
    for (size_t i = 0; i < sizeof m->windows; i++)
        m->windows[i] = (uint8_t)(test_random(&seed) >> 40);
    for (uint32_t u = 0; u < m->units; u++) {
        m->elems[u] = gpt_unit_elems(&shape, &m->layout, u);
        m->params[u] = malloc(m->elems[u] * sizeof(float));
        fill(m->params[u], m->elems[u], 0.15f);
    }
}

static void model_deinit(struct model *m)
{
    for (uint32_t u = 0; u < m->units; u++)
        free(m->params[u]);
}

struct result {
    double loss;
    float *grads[UNITS_MAX];
};

static void result_free(struct result *r)
{
    for (uint32_t u = 0; u < UNITS_MAX; u++)
        free(r->grads[u]);
}

/* Loss and gradients with this many threads, all arrays `shift` floats off a cache line. */
static struct result model_run(const struct model *m, uint32_t threads, uint64_t shift)
{
    struct shd_err e;
    struct pool *pool;
    struct gpt *gpt;
    struct result r = { .loss = 0 };
    float *at[UNITS_MAX], *base[2 * UNITS_MAX], *params[UNITS_MAX];
    EXPECT_OK(pool_new(threads, &pool, &e), &e);
    EXPECT_OK(gpt_new(&shape, &m->layout, BATCH, false, pool, &gpt, &e), &e);
    for (uint32_t u = 0; u < m->units; u++) {
        const uint64_t bytes = ((m->elems[u] + shift) * sizeof(float) + 63) / 64 * 64;
        base[2 * u] = aligned_alloc(64, bytes);
        base[2 * u + 1] = aligned_alloc(64, bytes);
        params[u] = base[2 * u] + shift;
        at[u] = base[2 * u + 1] + shift;
        memcpy(params[u], m->params[u], m->elems[u] * sizeof(float));
        memset(at[u], 0, m->elems[u] * sizeof(float));
    }
    r.loss = gpt_whole(gpt, m->windows, (const float *const *)params, at);
    for (uint32_t u = 0; u < m->units; u++) {
        r.grads[u] = malloc(m->elems[u] * sizeof(float));
        memcpy(r.grads[u], at[u], m->elems[u] * sizeof(float));
        free(base[2 * u]);
        free(base[2 * u + 1]);
    }
    gpt_free(gpt);
    pool_free(pool);
    return r;
}

static void expect_same(const struct model *m, const struct result *a, const struct result *b)
{
    EXPECT(memcmp(&a->loss, &b->loss, sizeof a->loss) == 0);
    for (uint32_t u = 0; u < m->units; u++)
        EXPECT(memcmp(a->grads[u], b->grads[u], m->elems[u] * sizeof(float)) == 0);
}

TEST(bits_do_not_depend_on_threads)
{
    start(201);
    static const uint32_t threads[] = { 2, 3, 5 };
    struct model m;
    model_init(&m);
    struct result one = model_run(&m, 1, 0);
    EXPECT(isfinite(one.loss));
    for (size_t i = 0; i < sizeof threads / sizeof threads[0]; i++) {
        struct result r = model_run(&m, threads[i], 0);
        expect_same(&m, &one, &r);
        result_free(&r);
    }
    result_free(&one);
    model_deinit(&m);
}

TEST(bits_do_not_depend_on_addresses)
{
    start(202);
    static const uint64_t shifts[] = { 1, 3, 8, 15 };
    struct model m;
    model_init(&m);
    struct result aligned = model_run(&m, 2, 0);
    for (size_t i = 0; i < sizeof shifts / sizeof shifts[0]; i++) {
        struct result r = model_run(&m, 2, shifts[i]);
        expect_same(&m, &aligned, &r);
        result_free(&r);
    }
    result_free(&aligned);
    model_deinit(&m);
}

static double norm(const double *x, uint64_t count)
{
    double sum = 0;
    for (uint64_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    return sqrt(sum);
}

/* fp32 against fp64, per tensor relative to the gradient's norm. A sum of k products is off by at
 * most k 2^-24 of the sum of magnitudes (Higham, Accuracy and Stability, section 3.1), the
 * longest sum here is over 390 rows, and about 20 such stages follow each other per direction.
 * The layer norms keep errors from growing from stage to stage. Worst case: 40 * 390 * 2^-24 =
 * 9.3e-4. Rounding errors are random, so the usual error is nearer to sqrt of that: 1e-6. */
TEST(fp32_is_near_fp64)
{
    start(203);
    struct shd_err e;
    struct model m;
    struct pool *pool;
    struct gpt64 *gpt64;
    double *params[UNITS_MAX], *grads[UNITS_MAX], worst = 0;
    model_init(&m);
    EXPECT_OK(pool_new(2, &pool, &e), &e);
    EXPECT_OK(gpt64_new(&shape, &m.layout, BATCH, false, pool, &gpt64, &e), &e);
    for (uint32_t u = 0; u < m.units; u++) {
        params[u] = malloc(m.elems[u] * sizeof(double));
        grads[u] = calloc(m.elems[u], sizeof(double));
        for (uint64_t i = 0; i < m.elems[u]; i++)
            params[u][i] = (double)m.params[u][i];
    }
    const double loss = gpt64_whole(gpt64, m.windows, (const double *const *)params, grads);
    struct result r = model_run(&m, 2, 0);
    EXPECT_NEAR(r.loss, loss, loss * 9.3e-4 / 2);
    for (uint32_t i = 0; i < gpt_tensors(&shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(&shape, i, &t);
        const uint64_t at = m.layout.at[t.kind][t.index];
        double *difference = malloc(t.elems * sizeof(double));
        for (uint64_t j = 0; j < t.elems; j++)
            difference[j] = (double)r.grads[t.unit][at + j] - grads[t.unit][at + j];
        const double off = norm(difference, t.elems) / norm(grads[t.unit] + at, t.elems);
        free(difference);
        if (!(off <= 9.3e-4))
            FAIL("%s is off by %g of its norm", t.name, off);
        worst = off > worst ? off : worst;
    }
    printf("loss off by %.2g, worst gradient by %.2g\n", fabs(r.loss - loss) / loss, worst);
    result_free(&r);
    for (uint32_t u = 0; u < m.units; u++) {
        free(params[u]);
        free(grads[u]);
    }
    gpt64_free(gpt64);
    pool_free(pool);
    model_deinit(&m);
}

/* A handler's frame goes below the stack pointer of the code it interrupts. oneDNN's sgemm borrows
 * that register for a heap address, so no signal may arrive inside it: see pool.h. The handler
 * runs on a stack of its own here, so that a failure is counted and not a crash. */
static volatile sig_atomic_t signals, signals_off_stack;
static uintptr_t stack_near;

static void on_alarm(int number, siginfo_t *info, void *context)
{
    (void)number;
    (void)info;
    signals++;
#ifdef __x86_64__
    const ucontext_t *u = context;
    const uintptr_t rsp = (uintptr_t)u->uc_mcontext.gregs[REG_RSP];
    if (stack_near - rsp > (8u << 20)) /* unsigned: also when it is above */
        signals_off_stack++;
#else
    (void)context;
#endif
}

TEST(signals_arrive_outside_of_gemm)
{
    start(206);
    static char stack[1 << 16];
    struct sigaction action = { .sa_sigaction = on_alarm,
                                .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK };
    const struct itimerval often = { { 0, 200 }, { 0, 200 } }, never = { { 0, 0 }, { 0, 0 } };
    struct model m; /* which a sanitizer may keep elsewhere */
    stack_near = (uintptr_t)__builtin_frame_address(0) + 65536;
    model_init(&m);
    EXPECT_EQ(sigaltstack(&(stack_t){ .ss_sp = stack, .ss_size = sizeof stack }, NULL), 0);
    EXPECT_EQ(sigaction(SIGALRM, &action, NULL), 0);
    EXPECT_EQ(setitimer(ITIMER_REAL, &often, NULL), 0);
    for (int i = 0; i < 10; i++) {
        struct result r = model_run(&m, 1 + (uint32_t)i % 3, 0);
        result_free(&r);
    }
    EXPECT_EQ(setitimer(ITIMER_REAL, &never, NULL), 0);
    printf("%d signals, %d with a foreign stack pointer\n", (int)signals, (int)signals_off_stack);
    EXPECT(signals > 0);
    EXPECT_EQ(signals_off_stack, 0);
    model_deinit(&m);
}

/* -- GEMM ------------------------------------------------------------------------------------ */

struct gemm_case {
    enum gemm_kind kind;
    struct gemm_size size;
    int a_transposed, b_transposed;
    float *a, *b; /* [1 << 18] each */
    float *c;     /* [m, n + 3] */
};

#define GEMM_ELEMS (1u << 18)

static void *gemm_case_run(void *arg)
{
    const struct gemm_case *g = arg;
    const struct gemm_size s = g->size;
    const struct gemm_in a = { g->a, (g->a_transposed ? s.m : s.k) + 5, g->a_transposed };
    const struct gemm_in b = { g->b, (g->b_transposed ? s.k : s.n) + 7, g->b_transposed };
    gemm_run(g->kind, s, a, b, 0, g->c, s.n + 3);
    gemm_run(g->kind, s, a, b, 1, g->c, s.n + 3);
    return NULL;
}

static float *shifted_copy(const float *x, uint64_t count, uint64_t shift, float **ret_base)
{
    *ret_base = aligned_alloc(64, (count + 16) * sizeof(float));
    memcpy(*ret_base + shift, x, count * sizeof(float));
    return *ret_base + shift;
}

/* The same product at other addresses, on another thread. */
static void gemm_case_check(const struct gemm_case *g, uint64_t shift)
{
    const uint64_t c_elems = (g->size.m * (g->size.n + 3) + 15) / 16 * 16;
    float *base[3];
    struct gemm_case moved = *g;
    moved.a = shifted_copy(g->a, GEMM_ELEMS, shift, &base[0]);
    moved.b = shifted_copy(g->b, GEMM_ELEMS, (shift * 7) % 16, &base[1]);
    moved.c = shifted_copy(g->c, c_elems, (shift * 3) % 16, &base[2]);
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, gemm_case_run, &moved), 0);
    pthread_join(thread, NULL);
    for (uint64_t i = 0; i < g->size.m; i++) {
        const uint64_t row = i * (g->size.n + 3);
        EXPECT(memcmp(g->c + row, moved.c + row, g->size.n * sizeof(float)) == 0);
    }
    for (int i = 0; i < 3; i++)
        free(base[i]);
}

TEST(gemm_bits_do_not_depend_on_addresses_or_thread)
{
    start(204);
    static const struct gemm_size sizes[] = { { 128, 256, 256 }, { 128, 256, 768 }, { 64, 128, 64 },
                                              { 64, 32, 128 },   { 1, 256, 256 },   { 67, 21, 130 },
                                              { 3, 261, 19 },    { 128, 256, 390 } };
    float *a = malloc(GEMM_ELEMS * sizeof(float)), *b = malloc(GEMM_ELEMS * sizeof(float));
    fill(a, GEMM_ELEMS, 1);
    fill(b, GEMM_ELEMS, 1);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int t = 0; t < 4; t++) {
            struct gemm_case g = { GEMM_FULL, sizes[i], t & 1, t >> 1, a, b, NULL };
            g.c = aligned_alloc(64, (g.size.m * (g.size.n + 3) + 16) / 16 * 64);
            gemm_case_run(&g);
            static const uint64_t shifts[] = { 0, 1, 4, 11 };
            for (int s = 0; s < 4; s++)
                gemm_case_check(&g, shifts[s]);
            free(g.c);
        }
    }
    free(a);
    free(b);
}

/* -- Row code -------------------------------------------------------------------------------- */

#define VEC_ROWS 5
#define VEC_MAX  (VEC_ROWS * 300)

/* What every function of a variant leaves in its arrays. */
struct vec_trace {
    float bias[VEC_MAX], residual[VEC_MAX], pre[VEC_MAX], act[VEC_MAX], gelu[VEC_MAX];
    float sums[300], norm[VEC_MAX], mean[VEC_ROWS], rstd[VEC_ROWS], dnorm[VEC_MAX];
    float dweight[300], dbias[300], soft[VEC_MAX], dsoft[VEC_MAX], logits[VEC_MAX];
    float turned[VEC_MAX + 300];
    double losses[VEC_ROWS];
};

static void vec_trace_run(const struct vec_ops *ops, const float *in, const float *in2,
                          uint64_t cols, struct vec_trace *t)
{
    const struct vec_tile tile = { VEC_ROWS, cols, cols };
    const size_t bytes = VEC_ROWS * cols * sizeof(float);
    static const uint8_t target[VEC_ROWS] = { 0 };
    memset(t, 0, sizeof *t);
    float *copies[] = { t->bias, t->residual, t->pre, t->gelu, t->dnorm, t->soft, t->logits };
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++)
        memcpy(copies[i], in, bytes);
    ops->bias(t->bias, in2, tile);
    ops->bias_residual(t->residual, in2 + 3, in2, tile);
    ops->bias_gelu(t->pre, t->act, in2, tile);
    ops->gelu_grad(t->gelu, in2, tile);
    ops->col_sums(t->sums, in, tile);
    const struct vec_norm n = { in, in2 + 5, in2 + 9, t->mean, t->rstd, VEC_ROWS, cols };
    ops->norm_forward(&n, t->norm);
    ops->norm_backward(&n, in2, t->dnorm);
    ops->norm_params(&n, in2, 0, cols, t->dweight, t->dbias);
    if (cols >= VEC_ROWS + 1) {
        ops->softmax_causal(t->soft, tile, cols - VEC_ROWS - 1, 0.7f);
        memcpy(t->dsoft, t->soft, bytes);
        ops->softmax_causal_grad(t->dsoft, tile, cols - VEC_ROWS - 1, 0.7f, in2, cols);
    }
    ops->cross_entropy(t->logits, tile, target, 0.25f, t->losses);
    ops->transpose(t->turned, VEC_ROWS + 1, in, tile);
}

TEST(instruction_sets_give_the_same_bits)
{
    start(205);
    static const uint64_t cols[] = { 1, 7, 15, 16, 17, 31, 33, 64, 100, 257, 300 };
    static float in[VEC_MAX + 16], in2[VEC_MAX + 16];
    static struct vec_trace want, got;
    fill(in, VEC_MAX + 16, 4);
    fill(in2, VEC_MAX + 16, 4);
    int compared = 0;
    for (uint32_t v = 0; v + 1 < VEC_VARIANTS; v++) {
        if (vec_variant(v) == NULL)
            continue;
        for (size_t i = 0; i < sizeof cols / sizeof cols[0]; i++) {
            vec_trace_run(vec_variant(VEC_VARIANTS - 1), in, in2, cols[i], &want);
            vec_trace_run(vec_variant(v), in, in2, cols[i], &got);
            if (memcmp(&want, &got, sizeof want) != 0)
                FAIL("%s and %s differ at %" PRIu64 " columns", vec_variant(v)->name,
                     vec_variant(VEC_VARIANTS - 1)->name, cols[i]);
        }
        compared++;
    }
    if (compared == 0)
        SKIP("this CPU has only the base instruction set");
}

/* Whole blocks, and what is left of rows and columns. */
TEST(transpose_is_the_definition)
{
    start(207);
    static const struct vec_tile tiles[] = {
        { 8, 16, 16 }, { 40, 64, 70 }, { 13, 37, 37 }, { 1, 50, 50 }
    };
    static float in[40 * 70], out[64 * 45];
    fill(in, sizeof in / sizeof in[0], 1);
    for (uint32_t v = 0; v < VEC_VARIANTS; v++) {
        for (size_t i = 0; i < sizeof tiles / sizeof tiles[0] && vec_variant(v) != NULL; i++) {
            const struct vec_tile t = tiles[i];
            for (size_t j = 0; j < sizeof out / sizeof out[0]; j++)
                out[j] = 9;
            vec_variant(v)->transpose(out, t.rows + 5, in, t);
            for (uint64_t j = 0; j < t.cols; j++)
                for (uint64_t r = 0; r < t.rows + 5; r++)
                    EXPECT_EQ(out[j * (t.rows + 5) + r] == (r < t.rows ? in[r * t.stride + j] : 9),
                              1);
        }
    }
}

/* -- Weights that are laid out for the product ----------------------------------------------- */

struct laid {
    float *y, *dx, *dweight;
};

static struct laid laid_run(const struct linear *lin, const float *x, const float *dy,
                            struct pool *pool)
{
    struct laid r = { .y = malloc(lin->rows * lin->out * sizeof(float)),
                      .dx = malloc(lin->rows * lin->in * sizeof(float)),
                      .dweight = malloc(lin->in * lin->out * sizeof(float)) };
    linear_forward(pool, lin, x, r.y, LINEAR_PLAIN, NULL);
    linear_backward(pool, lin,
                    &(struct linear_grads){ .x = x, .dy = dy, .dx = r.dx, .dweight = r.dweight });
    return r;
}

/* Off by less than rounding can explain: k numbers below 1 in each sum. */
static void laid_expect_near(const float *a, const float *b, uint64_t count, uint64_t k)
{
    for (uint64_t i = 0; i < count; i++)
        EXPECT_NEAR(a[i], (double)b[i], 2 * (double)k * (double)k * 0x1p-24);
}

/* A product is the same with a copy of its weight as with the weight; rows that are 4 KiB apart,
 * weights either way round, the same bits for any number of threads. */
TEST(copied_weights_give_the_same_product)
{
    start(208);
    static const struct linear shapes[] = {
        { .rows = 300, .in = 24, .out = 1024 },
        { .rows = 300, .in = 1024, .out = 40, .transposed = 1 },
        { .rows = 257, .in = 67, .out = 81 },
        { .rows = 257, .in = 81, .out = 67, .transposed = 1 },
    };
    struct shd_err e;
    struct pool *pools[2];
    EXPECT_OK(pool_new(1, &pools[0], &e), &e);
    EXPECT_OK(pool_new(3, &pools[1], &e), &e);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct linear lin = shapes[i];
        const uint64_t weights = lin.in * lin.out, longer = lin.in > lin.out ? lin.in : lin.out;
        float *x = malloc(lin.rows * lin.in * sizeof *x),
              *dy = malloc(lin.rows * lin.out * sizeof *dy);
        float *weight = malloc(weights * sizeof *weight);
        fill(x, lin.rows * lin.in, 1);
        fill(dy, lin.rows * lin.out, 1);
        fill(weight, weights, 1);
        lin.weight = weight;
        struct laid want = laid_run(&lin, x, dy, pools[0]), got[2];
        /* An element behind it must stay. */
        const uint64_t scratch = linear_scratch(lin.in, lin.out);
        lin.scratch = malloc((scratch + 1) * sizeof(float));
        lin.scratch[scratch] = 9;
        for (int p = 0; p < 2; p++)
            got[p] = laid_run(&lin, x, dy, pools[p]);
        EXPECT(lin.scratch[scratch] == 9);
        laid_expect_near(got[0].y, want.y, lin.rows * lin.out, longer);
        laid_expect_near(got[0].dx, want.dx, lin.rows * lin.in, longer);
        EXPECT(memcmp(got[0].dweight, want.dweight, weights * sizeof(float)) == 0);
        EXPECT(memcmp(got[0].y, got[1].y, lin.rows * lin.out * sizeof(float)) == 0);
        EXPECT(memcmp(got[0].dx, got[1].dx, lin.rows * lin.in * sizeof(float)) == 0);
        struct laid *all[] = { &want, &got[0], &got[1] };
        for (int p = 0; p < 3; p++) {
            free(all[p]->y);
            free(all[p]->dx);
            free(all[p]->dweight);
        }
        free(lin.scratch);
        free(x);
        free(dy);
        free(weight);
    }
    pool_free(pools[0]);
    pool_free(pools[1]);
}

/* gelu(x) against libm in fp64. exp is good to 3e-7, the quotient and the products add a few
 * 2^-24: 1e-6 relative, and near zero results absolute. In the derivative s + x s (1 - s) u' the
 * error of 1 - s is absolute, and multiplied by x u'. */
TEST(gelu_is_near_libm)
{
    double worst = 0, worst_slope = 0;
    for (double x = -12; x < 12; x += 0.001) {
        float slope = (float)x, act;
        const float zero = 0;
        const double p = (double)slope;
        vec_pick()->bias_gelu(&slope, &act, &zero, (struct vec_tile){ 1, 1, 1 });
        const double root = sqrt(2 / acos(-1)), du = root * (1 + 3 * 0.044715 * p * p);
        const double tanh_u = tanh(root * (p + 0.044715 * p * p * p));
        const double want = 0.5 * p * (1 + tanh_u);
        const double want_slope = 0.5 * (1 + tanh_u) + 0.5 * p * (1 - tanh_u * tanh_u) * du;
        worst = fmax(worst, fabs((double)act - want) / fmax(fabs(want), 1e-2));
        worst_slope = fmax(worst_slope, fabs((double)slope - want_slope) / (1 + fabs(p) * 2 * du));
    }
    printf("worst %.3g, of the derivative %.3g\n", worst, worst_slope);
    EXPECT(worst <= 1e-6);
    EXPECT(worst_slope <= 1e-6);
}

/* A loss that is not a number must stay one: the owners skip such a step. */
TEST(nan_is_not_lost)
{
    float x[40], pre = NAN, act, zero = 0;
    double loss;
    const uint8_t target = 3;
    for (int i = 0; i < 40; i++)
        x[i] = 0;
    x[20] = NAN;
    vec_pick()->cross_entropy(x, (struct vec_tile){ 1, 40, 40 }, &target, 1, &loss);
    EXPECT(isnan(loss) && isnan(x[0]));
    vec_pick()->bias_gelu(&pre, &act, &zero, (struct vec_tile){ 1, 1, 1 });
    EXPECT(isnan(act));
}

TEST_MAIN()
