/* The model's gradients against central differences, both in fp64: the same sources that train in
 * fp32, compiled with real = double.
 *
 * For a direction u, (f(x + h u) - f(x - h u)) / 2h differs from g.u by h^2 f'''/6 and by
 * rounding of about eps |f| / h. With h = 1e-5, f and its derivatives near 1: 1e-10 and 1e-11; the
 * bound below leaves two orders of magnitude. A wrong term in a gradient is off by its own size.
 */
#define GPT_F64 1
#include "examples/gpt/attention.h"
#include "examples/gpt/linear.h"
#include "examples/gpt/model.h"
#include "tests/lib/gpt_whole.h"
#include "tests/lib/test.h"

#define H          1e-5
#define DIRECTIONS 3

static uint64_t seed;

static double uniform(void)
{
    return (double)(test_random(&seed) >> 11) * 0x1p-52 - 1; /* [-1, 1) */
}

static double *random_array(uint64_t count, double scale)
{
    double *x = malloc(count * sizeof *x);
    for (uint64_t i = 0; i < count; i++)
        x[i] = scale * uniform();
    return x;
}

static void start(uint64_t s)
{
    seed = test_seed(s);
}

static struct pool *new_pool(uint32_t threads)
{
    struct shd_err e;
    struct pool *pool;
    EXPECT_OK(pool_new(threads, &pool, &e), &e);
    return pool;
}

/* A scalar function of x[count] with its gradient. */
struct checked {
    double (*f)(void *ctx);
    void *ctx;
    double *x;
    const double *grad;
    uint64_t count;
    const char *name;
};

static double along(const struct checked *c, const double *u)
{
    double *kept = malloc(c->count * sizeof *kept + 1);
    memcpy(kept, c->x, c->count * sizeof *kept);
    for (uint64_t i = 0; i < c->count; i++)
        c->x[i] = kept[i] + H * u[i];
    const double up = c->f(c->ctx);
    for (uint64_t i = 0; i < c->count; i++)
        c->x[i] = kept[i] - H * u[i];
    const double down = c->f(c->ctx);
    memcpy(c->x, kept, c->count * sizeof *kept);
    free(kept);
    return (up - down) / (2 * H);
}

/* Along random directions, which every element takes part in, and along two single elements. */
static void check_gradient(const struct checked *c)
{
    for (int d = 0; d < DIRECTIONS + 2; d++) {
        double *u = random_array(c->count, 1), analytic = 0, size = 0;
        if (d >= DIRECTIONS) {
            memset(u, 0, c->count * sizeof *u);
            u[test_random(&seed) % c->count] = 1;
        }
        for (uint64_t i = 0; i < c->count; i++) {
            analytic += u[i] * c->grad[i];
            size += fabs(u[i] * c->grad[i]);
        }
        const double numeric = along(c, u);
        free(u);
        if (!(fabs(analytic - numeric) <= 1e-8 + 1e-6 * size))
            FAIL("%s, direction %d: gradient %.12g, central difference %.12g", c->name, d, analytic,
                 numeric);
    }
}

static double weighted(const double *y, const double *w, uint64_t count)
{
    double sum = 0;
    for (uint64_t i = 0; i < count; i++)
        sum += y[i] * w[i];
    return sum;
}

/* -- Linear layers --------------------------------------------------------------------------- */

struct linear_case {
    struct pool *pool;
    struct linear lin;
    enum linear_then then;
    double *x, *y, *other, *dy;
};

static double linear_value(void *ctx)
{
    struct linear_case *c = ctx;
    linear_forward(c->pool, &c->lin, c->x, c->y, c->then, c->other);
    return weighted(c->then == LINEAR_GELU ? c->other : c->y, c->dy, c->lin.rows * c->lin.out);
}

/* Sizes that leave partial tiles and lanes: rows > 128, out > 256. */
static void check_linear(int transposed)
{
    const uint64_t rows = 131, in = 19, out = 261;
    double *weight = random_array(in * out, 0.3), *bias = random_array(out, 0.5);
    double *dweight = malloc(in * out * sizeof(double)), *dbias = malloc(out * sizeof(double));
    double *dx = malloc(rows * in * sizeof(double));
    struct linear_case c = {
        .pool = new_pool(2),
        .lin = { .rows = rows,
                 .in = in,
                 .out = out,
                 .weight = weight,
                 .bias = transposed ? NULL : bias,
                 .transposed = transposed },
        .x = random_array(rows * in, 1),
        .y = malloc(rows * out * sizeof(double)),
        .dy = random_array(rows * out, 0.1),
    };
    linear_backward(c.pool, &c.lin,
                    &(struct linear_grads){ .x = c.x,
                                            .dy = c.dy,
                                            .dx = dx,
                                            .dweight = dweight,
                                            .dbias = transposed ? NULL : dbias });
    check_gradient(&(struct checked){ linear_value, &c, c.x, dx, rows * in, "linear x" });
    check_gradient(&(struct checked){ linear_value, &c, weight, dweight, in * out, "weight" });
    if (!transposed)
        check_gradient(&(struct checked){ linear_value, &c, bias, dbias, out, "bias" });
    pool_free(c.pool);
    double *all[] = { weight, bias, dweight, dbias, dx, c.x, c.y, c.dy };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

TEST(linear_gradients_match_differences)
{
    start(101);
    check_linear(/* transposed= */ 0);
}

TEST(transposed_linear_gradients_match_differences)
{
    start(102);
    check_linear(/* transposed= */ 1);
}

/* x -> gelu(x W1 + b1) W2: the second layer's dx times gelu' is what the first one gets. */
struct gelu_case {
    struct pool *pool;
    struct linear first, second;
    double *x, *slope, *act, *y, *dy;
};

static double gelu_value(void *ctx)
{
    struct gelu_case *c = ctx;
    linear_forward(c->pool, &c->first, c->x, c->slope, LINEAR_GELU, c->act);
    linear_forward(c->pool, &c->second, c->act, c->y, LINEAR_PLAIN, NULL);
    return weighted(c->y, c->dy, c->second.rows * c->second.out);
}

TEST(gelu_gradient_matches_differences)
{
    start(103);
    enum { ROWS = 7, IN = 5, HIDDEN = 37, OUT = 6 };
    double *w1 = random_array(IN * HIDDEN, 1), *b1 = random_array(HIDDEN, 1);
    double *w2 = random_array(HIDDEN * OUT, 1), *b2 = random_array(OUT, 1);
    double dpre[ROWS * HIDDEN], dx[ROWS * IN], slope[ROWS * HIDDEN], act[ROWS * HIDDEN];
    double y[ROWS * OUT], dw1[IN * HIDDEN], db1[HIDDEN], dw2[HIDDEN * OUT], db2[OUT];
    struct gelu_case c = { .pool = new_pool(1),
                           .first = { ROWS, IN, HIDDEN, w1, b1, 0, GEMM_FULL, NULL, NULL, 0, 0, 0 },
                           .second = { ROWS, HIDDEN, OUT, w2, b2, 0, GEMM_FULL, NULL, NULL, 0, 0,
                                       0 },
                           .x = random_array(ROWS * IN, 2),
                           .slope = slope,
                           .act = act,
                           .y = y,
                           .dy = random_array(ROWS * OUT, 1) };
    gelu_value(&c);
    linear_backward(
        c.pool, &c.second,
        &(struct linear_grads){
            .x = act, .dy = c.dy, .dx = dpre, .slope = slope, .dweight = dw2, .dbias = db2 });
    linear_backward(
        c.pool, &c.first,
        &(struct linear_grads){ .x = c.x, .dy = dpre, .dx = dx, .dweight = dw1, .dbias = db1 });
    check_gradient(&(struct checked){ gelu_value, &c, c.x, dx, ROWS * IN, "gelu x" });
    check_gradient(&(struct checked){ gelu_value, &c, w1, dw1, IN * HIDDEN, "gelu w1" });
    check_gradient(&(struct checked){ gelu_value, &c, b1, db1, HIDDEN, "gelu b1" });
    check_gradient(&(struct checked){ gelu_value, &c, w2, dw2, HIDDEN * OUT, "gelu w2" });
    pool_free(c.pool);
    double *all[] = { w1, b1, w2, b2, c.x, c.dy };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

/* -- Layer norm, attention, cross-entropy ----------------------------------------------------- */

struct norm_case {
    struct vec_norm n;
    double *y, *dy;
};

static double norm_value(void *ctx)
{
    struct norm_case *c = ctx;
    vec_pick()->norm_forward(&c->n, c->y);
    return weighted(c->y, c->dy, c->n.rows * c->n.cols);
}

TEST(layer_norm_gradients_match_differences)
{
    start(104);
    enum { ROWS = 5, COLS = 37 };
    double *x = random_array(ROWS * COLS, 2), *w = random_array(COLS, 1);
    double *b = random_array(COLS, 1), *dy = random_array(ROWS * COLS, 1);
    double y[ROWS * COLS], dx[ROWS * COLS] = { 0 }, dw[COLS], db[COLS], mean[ROWS], rstd[ROWS];
    struct norm_case c = { { x, w, b, mean, rstd, ROWS, COLS }, y, dy };
    norm_value(&c);
    vec_pick()->norm_backward(&c.n, dy, dx);
    vec_pick()->norm_params(&c.n, dy, 0, 20, dw, db);
    vec_pick()->norm_params(&c.n, dy, 20, COLS - 20, dw, db);
    check_gradient(&(struct checked){ norm_value, &c, x, dx, ROWS * COLS, "norm x" });
    check_gradient(&(struct checked){ norm_value, &c, w, dw, COLS, "norm weight" });
    check_gradient(&(struct checked){ norm_value, &c, b, db, COLS, "norm bias" });
    double *all[] = { x, w, b, dy };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

struct attention_case {
    struct pool *pool;
    struct attention a;
    double *y, *dy;
};

static double attention_value(void *ctx)
{
    struct attention_case *c = ctx;
    attention_forward(c->pool, &c->a, c->y);
    return weighted(c->y, c->dy, c->a.batch * c->a.seq * c->a.dim);
}

TEST(attention_gradient_matches_differences)
{
    start(105);
    const uint64_t batch = 2, seq = 2 * ATTENTION_BLOCK + 3, heads = 2, dim = 10;
    const uint32_t threads = 2;
    const uint64_t rows = batch * seq;
    double *qkv = random_array(rows * 3 * dim, 1.5);
    double *dqkv = malloc(rows * 3 * dim * sizeof(double));
    double *scratch = malloc(threads * ATTENTION_BLOCK * seq * sizeof(double));
    struct attention_case c = {
        .pool = new_pool(threads),
        .a = { batch, seq, heads, dim, qkv, malloc(heads * rows * seq * sizeof(double)),
               GEMM_FULL },
        .y = malloc(rows * dim * sizeof(double)),
        .dy = random_array(rows * dim, 0.3),
    };
    attention_value(&c);
    attention_backward(c.pool, &c.a, c.dy, dqkv, scratch);
    check_gradient(
        &(struct checked){ attention_value, &c, qkv, dqkv, rows * 3 * dim, "attention qkv" });
    pool_free(c.pool);
    double *all[] = { qkv, dqkv, scratch, c.a.prob, c.y, c.dy };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

struct loss_case {
    double *x;
    uint8_t target[3];
};

static double loss_value(void *ctx)
{
    struct loss_case *c = ctx;
    double spoiled[3 * 40], losses[3];
    memcpy(spoiled, c->x, sizeof spoiled);
    vec_pick()->cross_entropy(spoiled, (struct vec_tile){ 3, 40, 40 }, c->target, 1, losses);
    return losses[0] + losses[1] + losses[2];
}

TEST(cross_entropy_gradient_matches_differences)
{
    start(106);
    double *x = random_array(3 * 40, 3), dx[3 * 40], losses[3];
    struct loss_case c = { x, { 0, 39, 17 } };
    memcpy(dx, x, sizeof dx);
    vec_pick()->cross_entropy(dx, (struct vec_tile){ 3, 40, 40 }, c.target, 1, losses);
    check_gradient(&(struct checked){ loss_value, &c, x, dx, 3 * 40, "logits" });
    free(x);
}

/* -- The whole model ------------------------------------------------------------------------- */

#define UNITS_MAX 32

struct whole {
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool;
    struct gpt *gpt;
    uint32_t units;
    uint8_t *windows;
    double *params[UNITS_MAX], *grads[UNITS_MAX];
};

static uint64_t unit_elems(const struct whole *w, uint32_t unit)
{
    return gpt_unit_elems(&w->shape, &w->layout, unit);
}

static const struct gpt_shape dense = { .layers = 2, .dim = 21, .heads = 3, .seq = 67 };
static const struct gpt_shape routed = {
    .layers = 2, .dim = 15, .heads = 3, .seq = 37, .experts = 3
};
static const struct gpt_shape adapted = {
    .layers = 2, .dim = 21, .heads = 3, .seq = 37, .rank = 5
};

/* Everything random, norms and biases as well; gradients start as NaN, so that an element that
 * is added to before it is written shows. */
static void whole_init(struct whole *w, const struct gpt_shape *shape)
{
    struct shd_err e;
    const uint32_t batch = 2;
    *w = (struct whole){ .shape = *shape };
    w->units = gpt_units(&w->shape);
    gpt_layout_compute(&w->shape, &w->layout);
    w->pool = new_pool(2);
    EXPECT_OK(gpt_new(&w->shape, &w->layout, batch, false, w->pool, &w->gpt, &e), &e);
    w->windows = malloc((size_t)batch * (w->shape.seq + 1));
    for (uint32_t i = 0; i < batch * (w->shape.seq + 1); i++)
        w->windows[i] = (uint8_t)(test_random(&seed) >> 40);
    for (uint32_t u = 0; u < w->units; u++) {
        w->params[u] = random_array(unit_elems(w, u), 0.4);
        w->grads[u] = malloc(unit_elems(w, u) * sizeof(double));
        for (uint64_t i = 0; i < unit_elems(w, u); i++)
            w->grads[u][i] = NAN;
    }
}

static void whole_deinit(struct whole *w)
{
    gpt_free(w->gpt);
    pool_free(w->pool);
    free(w->windows);
    for (uint32_t u = 0; u < w->units; u++) {
        free(w->params[u]);
        free(w->grads[u]);
    }
}

static double whole_value(void *ctx)
{
    struct whole *w = ctx;
    return gpt_whole(w->gpt, w->windows, (const double *const *)w->params, NULL);
}

static uint64_t tensor_offset(const struct whole *w, const struct gpt_tensor *t)
{
    return w->layout.at[t->kind][t->index];
}

/* Frozen units get no array, as in training. */
static void whole_freeze(struct whole *w)
{
    for (uint32_t u = 0; u < w->units; u++) {
        if (gpt_kind_frozen(&w->shape, gpt_unit_at(&w->shape, u).kind)) {
            free(w->grads[u]);
            w->grads[u] = NULL;
        }
    }
}

/* Of every tensor that has a gradient; returns how many. */
static uint32_t check_tensors(struct whole *w)
{
    uint32_t checked = 0;
    gpt_whole(w->gpt, w->windows, (const double *const *)w->params, w->grads);
    for (uint32_t i = 0; i < gpt_tensors(&w->shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(&w->shape, i, &t);
        if (w->grads[t.unit] == NULL)
            continue;
        const uint64_t at = tensor_offset(w, &t);
        for (uint32_t u = t.unit; u < t.unit + t.tiles; u++)
            check_gradient(&(struct checked){ whole_value, w, w->params[u] + at, w->grads[u] + at,
                                              t.elems / t.tiles, t.name });
        checked++;
    }
    return checked;
}

TEST(every_tensor_of_the_model_matches_differences)
{
    start(107);
    struct whole w;
    whole_init(&w, &dense);
    EXPECT_EQ(check_tensors(&w), gpt_tensors(&w.shape));
    whole_deinit(&w);
}

static const struct gpt_shape tiled = { .layers = 2, .dim = 12, .heads = 3, .seq = 36, .tiles = 2 };

TEST(every_tile_matches_differences)
{
    struct whole w;
    struct gpt_shape four = tiled;
    start(113);
    whole_init(&w, &tiled);
    EXPECT_EQ(w.units, 2 + 2 * (2 + 4 * 2) + 1 + 2);
    EXPECT_EQ(check_tensors(&w), gpt_tensors(&w.shape));
    whole_deinit(&w);
    four.tiles = 4;
    four.layers = 1;
    whole_init(&w, &four);
    EXPECT_EQ(check_tensors(&w), gpt_tensors(&w.shape));
    whole_deinit(&w);
}

/* The whole tensor's place in the arrays of a model that is not in tiles, by its name; false: the
 * output matrix, which is the embedding's there. */
static double *find_whole(const struct whole *w, double *const *arrays, const char *name)
{
    for (uint32_t i = 0; i < gpt_tensors(&w->shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(&w->shape, i, &t);
        if (strcmp(t.name, name) == 0)
            return arrays[t.unit] + tensor_offset(w, &t);
    }
    return NULL;
}

/* Rows are consecutive in a whole tensor. The two products with wte have a gradient each here, of
 * which the other model has the sum. */
TEST(a_model_in_tiles_is_the_one_that_is_not)
{
    struct gpt_shape shape = tiled;
    struct whole plain, w;
    start(114);
    whole_init(&w, &shape);
    shape.tiles = 0;
    whole_init(&plain, &shape);
    memcpy(w.windows, plain.windows, 2 * ((size_t)shape.seq + 1));
    double *sums = calloc(GPT_VOCAB * (size_t)shape.dim, sizeof *sums);
    struct gpt_tensor t;
    for (uint32_t i = 0; i < gpt_tensors(&w.shape); i++) {
        gpt_tensor_at(&w.shape, i, &t);
        const uint64_t part = t.elems / t.tiles;
        double *from = find_whole(&plain, plain.params,
                                  t.kind == GPT_TILED_LM ? "wte.weight" : t.name);
        for (uint32_t k = 0; k < t.tiles; k++)
            memcpy(w.params[t.unit + k] + tensor_offset(&w, &t), from + k * part,
                   part * sizeof *from);
    }
    EXPECT_NEAR(
        gpt_whole(w.gpt, w.windows, (const double *const *)w.params, w.grads),
        gpt_whole(plain.gpt, plain.windows, (const double *const *)plain.params, plain.grads),
        1e-12);
    for (uint32_t i = 0; i < gpt_tensors(&w.shape); i++) {
        gpt_tensor_at(&w.shape, i, &t);
        const bool tied = t.kind == GPT_TILED_LM || strcmp(t.name, "wte.weight") == 0;
        const double *want = find_whole(&plain, plain.grads, tied ? "wte.weight" : t.name);
        for (uint64_t j = 0; j < t.elems; j++) {
            const uint64_t part = t.elems / t.tiles;
            const double got = w.grads[t.unit + j / part][tensor_offset(&w, &t) + j % part];
            sums[j % (GPT_VOCAB * (uint64_t)shape.dim)] += tied ? got : 0;
            if (!tied)
                EXPECT_NEAR(got, want[j], 1e-12);
        }
    }
    const double *want = find_whole(&plain, plain.grads, "wte.weight");
    for (uint64_t j = 0; j < GPT_VOCAB * (uint64_t)shape.dim; j++)
        EXPECT_NEAR(sums[j], want[j], 1e-12);
    free(sums);
    whole_deinit(&w);
    whole_deinit(&plain);
}

/* Random biases in front of the router would point all tokens the same way. */
static void spread_tokens(struct whole *w)
{
    const uint64_t *at = w->layout.at[GPT_BLOCK];
    for (uint32_t l = 0; l < w->shape.layers; l++) {
        double *p = w->params[gpt_unit_find(&w->shape, (struct gpt_unit){ GPT_BLOCK, l, 0 })];
        memset(p + at[BLOCK_LN2_B], 0, w->shape.dim * sizeof(double));
        memset(p + at[BLOCK_ROUTER_B], 0, w->shape.experts * sizeof(double));
        for (uint32_t j = 0; j < w->shape.dim; j++)
            p[at[BLOCK_LN2_W] + j] = 1;
    }
}

/* The chosen expert changes nowhere between the two sides of a difference: a logit would have to
 * be within about H of another one. */
TEST(every_tensor_with_experts_matches_differences)
{
    start(110);
    struct whole w;
    whole_init(&w, &routed);
    spread_tokens(&w);
    gpt_whole(w.gpt, w.windows, (const double *const *)w.params, NULL);
    for (uint32_t u = 0; u + 1 < w.units; u++) /* else a gradient would be missing, not wrong */
        EXPECT_EQ(gpt_next(w.gpt, u), u + 1);
    EXPECT_EQ(check_tensors(&w), gpt_tensors(&w.shape));
    whole_deinit(&w);
}

/* Second factors start at zero in training; here they are random, or first ones would have no
 * gradient. */
TEST(every_adapter_matches_differences)
{
    start(111);
    struct whole w;
    whole_init(&w, &adapted);
    whole_freeze(&w);
    EXPECT_EQ(check_tensors(&w), w.shape.layers * (uint32_t)LORA_TENSORS);
    whole_deinit(&w);
}

/* An adapter whose second factor is zero must not change the model. */
TEST(adapters_start_as_the_model_they_adapt)
{
    start(112);
    struct whole plain, w;
    struct gpt_shape shape = adapted;
    whole_init(&w, &shape);
    shape.rank = 0;
    whole_init(&plain, &shape);
    for (uint32_t u = 0; u < w.units; u++) {
        const struct gpt_unit unit = gpt_unit_at(&w.shape, u);
        const uint64_t bytes = unit_elems(&w, u) * sizeof(double);
        if (unit.kind != GPT_LORA) {
            memcpy(w.params[u], plain.params[gpt_unit_find(&shape, unit)], bytes);
            continue;
        }
        for (int b = LORA_ATTN_B; b < LORA_TENSORS; b += 2) {
            const uint64_t at = w.layout.at[GPT_LORA][b];
            const uint64_t end = b + 1 < LORA_TENSORS ? w.layout.at[GPT_LORA][b + 1]
                                                      : unit_elems(&w, u);
            memset(w.params[u] + at, 0, (end - at) * sizeof(double));
        }
    }
    memcpy(w.windows, plain.windows, (size_t)2 * (shape.seq + 1));
    EXPECT(whole_value(&w) == whole_value(&plain));
    whole_deinit(&plain);
    whole_deinit(&w);
}

/* With a bias that sends every token to expert 2, the others take no part: they are not in the
 * order, their gradients stay untouched, and the rest is still right. */
TEST(idle_experts_are_left_out)
{
    start(113);
    struct whole w;
    whole_init(&w, &routed);
    for (uint32_t l = 0; l < w.shape.layers; l++) {
        const uint32_t u = gpt_unit_find(&w.shape, (struct gpt_unit){ GPT_BLOCK, l, 0 });
        w.params[u][w.layout.at[GPT_BLOCK][BLOCK_ROUTER_B] + 2] = 100;
    }
    gpt_whole(w.gpt, w.windows, (const double *const *)w.params, w.grads);
    uint32_t ran = 0;
    for (uint32_t u = gpt_next(w.gpt, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = gpt_next(w.gpt, u)) {
        const struct gpt_unit unit = gpt_unit_at(&w.shape, u);
        EXPECT(unit.kind != GPT_EXPERT || unit.expert == 2);
        ran++;
    }
    EXPECT_EQ(ran, 2 + 2 * w.shape.layers);
    for (uint32_t u = 0; u < w.units; u++) {
        const struct gpt_unit unit = gpt_unit_at(&w.shape, u);
        const bool idle = unit.kind == GPT_EXPERT && unit.expert != 2;
        EXPECT(isnan(w.grads[u][0]) == idle);
    }
    const uint32_t u = gpt_unit_find(&w.shape, (struct gpt_unit){ GPT_EXPERT, 1, 2 });
    check_gradient(&(struct checked){ whole_value, &w, w.params[u], w.grads[u],
                                      4 * w.shape.dim * w.shape.dim, "the busy expert" });
    whole_deinit(&w);
}

/* Equal logits go to the lowest number. */
TEST(ties_go_to_the_first_expert)
{
    start(114);
    struct whole w;
    whole_init(&w, &routed);
    for (uint32_t l = 0; l < w.shape.layers; l++) {
        double *p = w.params[gpt_unit_find(&w.shape, (struct gpt_unit){ GPT_BLOCK, l, 0 })];
        for (uint64_t i = w.layout.at[GPT_BLOCK][BLOCK_ROUTER_W]; i < w.layout.elems[GPT_BLOCK];
             i++)
            p[i] = 0; /* the last two tensors: weight and bias */
    }
    whole_value(&w);
    for (uint32_t u = gpt_next(w.gpt, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = gpt_next(w.gpt, u))
        EXPECT_EQ(gpt_unit_at(&w.shape, u).expert, 0);
    whole_deinit(&w);
}

TEST(gaps_between_tensors_stay_untouched)
{
    start(108);
    struct whole w;
    whole_init(&w, &dense);
    gpt_whole(w.gpt, w.windows, (const double *const *)w.params, w.grads);
    uint64_t written = 0;
    for (uint32_t u = 0; u < w.units; u++)
        for (uint64_t i = 0; i < unit_elems(&w, u); i++)
            written += !isnan(w.grads[u][i]) ? 1u : 0u;
    EXPECT_EQ(written, gpt_parameters(&w.shape));
    whole_deinit(&w);
}

/* wte is read by the embedding and by the head. Each use has a derivative of its own, taken here by
 * moving one copy of wte while the other use reads another; the gradient must be their sum. */
struct tied {
    struct whole w;
    double *input, *output; /* unit 0 as the embedding and as the head see it */
};

static double tied_value(void *ctx)
{
    struct tied *t = ctx;
    gpt_set_batch(t->w.gpt, t->w.windows);
    gpt_forward(t->w.gpt, 0, t->input, NULL);
    for (uint32_t u = 1; u < t->w.units; u++)
        gpt_forward(t->w.gpt, u, t->w.params[u], t->output);
    return gpt_loss(t->w.gpt);
}

TEST(tied_gradient_is_the_sum_of_both_uses)
{
    start(109);
    struct tied t;
    whole_init(&t.w, &dense);
    struct whole *w = &t.w;
    const uint64_t elems = unit_elems(w, 0), bytes = elems * sizeof(double);
    t.input = malloc(bytes);
    t.output = malloc(bytes);
    memcpy(t.input, w->params[0], bytes);
    memcpy(t.output, w->params[0], bytes);
    gpt_whole(w->gpt, w->windows, (const double *const *)w->params, w->grads);

    const uint64_t count = (uint64_t)GPT_VOCAB * w->shape.dim,
                   at = w->layout.at[GPT_EMBED][EMBED_WTE];
    for (int d = 0; d < DIRECTIONS; d++) {
        double *u = random_array(count, 1);
        const double analytic = weighted(w->grads[0] + at, u, count);
        struct checked c = { tied_value, &t, t.input + at, NULL, count, "as input" };
        const double as_input = along(&c, u);
        c.x = t.output + at;
        const double as_output = along(&c, u);
        free(u);
        printf("input %.6f + output %.6f = %.6f\n", as_input, as_output, analytic);
        EXPECT(fabs(as_input) > 1e-5); /* dropping either one would show */
        EXPECT(fabs(as_output) > 1e-5);
        EXPECT_NEAR(analytic, as_input + as_output, 1e-8);
    }
    free(t.input);
    free(t.output);
    whole_deinit(w);
}

TEST_MAIN()
