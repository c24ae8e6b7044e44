/* A model and its arrays for tests of the GPU's backend: run there by either way of the arrays, by
 * the host in fp32 or 16 bits, and by the host's fp64 twin. Distances are relative: |got - want| /
 * |want|, Euclidean norms, per unit.
 */
#ifndef SHD_TESTS_GPT_CUDA_WORLD_H
#define SHD_TESTS_GPT_CUDA_WORLD_H

#include "examples/gpt/cuda/backend_cuda.h"
#include "examples/gpt/cuda/gpu.h"
#include "examples/gpt/model.h"
#include "tests/cuda/gpt_cuda_half.h"
#include "tests/lib/gpt64.h"
#include "tests/lib/test.h"

#define UNITS_MAX 48

/* -- A model and its arrays ------------------------------------------------------------------ */

struct world {
    struct gpt_shape shape;
    struct gpt_layout layout;
    uint32_t units, batch;
    uint8_t *windows;
    uint64_t elems[UNITS_MAX];
    float *params[UNITS_MAX]; /* representable in bf16 and in fp16, too */
    bool frozen[UNITS_MAX];
};

static uint64_t seed;

static void world_init(struct world *w, const struct gpt_shape *shape, uint32_t batch, uint64_t s)
{
    seed = test_seed(s);
    *w = (struct world){ .shape = *shape, .batch = batch, .units = gpt_units(shape) };
    gpt_layout_compute(shape, &w->layout);
    const uint64_t bytes = (uint64_t)batch * (shape->seq + 1);
    w->windows = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++) /* some bytes are far more frequent than others */
        w->windows[i] = (uint8_t)(i % 2 == 0 ? 32 : test_random(&seed) >> 40);
    for (uint32_t u = 0; u < w->units; u++) {
        w->elems[u] = gpt_unit_elems(shape, &w->layout, u);
        w->frozen[u] = gpt_kind_frozen(shape, gpt_unit_at(shape, u).kind);
        w->params[u] = malloc(w->elems[u] * sizeof(float));
        for (uint64_t i = 0; i < w->elems[u]; i++)
            w->params[u][i] = half_round_f16(
                half_round_bf16(0.3f * (float)((double)(test_random(&seed) >> 11) * 0x1p-52 - 1)));
    }
}

static void world_deinit(struct world *w)
{
    free(w->windows);
    for (uint32_t u = 0; u < w->units; u++)
        free(w->params[u]);
}

struct outcome {
    double loss;
    float *grads[UNITS_MAX]; /* NULL: frozen */
    uint64_t waits;          /* of run_device()'s micro-batch, for the stream; 0: not counted */
};

static void outcome_free(struct outcome *o)
{
    for (uint32_t u = 0; u < UNITS_MAX; u++)
        free(o->grads[u]);
}

/* What a gradient is that nobody wrote. */
#define UNTOUCHED 777.0f

/* Gradient arrays as libshd hands them out: gaps are zero, the rest is anything. */
static struct outcome outcome_new(const struct world *w)
{
    struct outcome o = { .loss = 0 };
    for (uint32_t u = 0; u < w->units; u++)
        o.grads[u] = w->frozen[u] ? NULL : calloc(w->elems[u], sizeof(float));
    for (uint32_t i = 0; i < gpt_tensors(&w->shape); i++) {
        struct gpt_tensor t;
        gpt_tensor_at(&w->shape, i, &t);
        for (uint64_t j = 0; j < t.elems && !w->frozen[t.unit]; j++)
            o.grads[t.unit][w->layout.at[t.kind][t.index] + j] = UNTOUCHED;
    }
    return o;
}

static struct outcome run_f64(const struct world *w)
{
    struct shd_err e;
    struct pool *pool;
    struct gpt64 *gpt;
    double *params[UNITS_MAX], *grads[UNITS_MAX];
    struct outcome o = outcome_new(w);
    EXPECT_OK(pool_new(1, &pool, &e), &e);
    EXPECT_OK(gpt64_new(&w->shape, &w->layout, w->batch, false, pool, &gpt, &e), &e);
    for (uint32_t u = 0; u < w->units; u++) {
        params[u] = calloc(w->elems[u], sizeof(double));
        grads[u] = w->frozen[u] ? NULL : calloc(w->elems[u], sizeof(double));
        for (uint64_t i = 0; i < w->elems[u]; i++)
            params[u][i] = (double)w->params[u][i];
        for (uint64_t i = 0; !w->frozen[u] && i < w->elems[u]; i++)
            grads[u][i] = (double)o.grads[u][i];
    }
    o.loss = gpt64_whole(gpt, w->windows, (const double *const *)params, grads);
    for (uint32_t u = 0; u < w->units; u++) {
        for (uint64_t i = 0; !w->frozen[u] && i < w->elems[u]; i++)
            o.grads[u][i] = (float)grads[u][i];
        free(params[u]);
        free(grads[u]);
    }
    gpt64_free(gpt);
    pool_free(pool);
    return o;
}

static struct outcome run_host(const struct world *w, enum gemm_kind gemm, double loss_scale)
{
    struct shd_err e;
    struct pool *pool;
    struct gpt *gpt;
    struct outcome o = outcome_new(w);
    EXPECT_OK(gemm_init(gemm, &e), &e);
    EXPECT_OK(pool_new(1, &pool, &e), &e);
    EXPECT_OK(gpt_new(&w->shape, &w->layout, w->batch, false, pool, &gpt, &e), &e);
    gpt_set_gemm(gpt, gemm);
    gpt_set_loss_scale(gpt, loss_scale);
    o.loss = gpt_whole(gpt, w->windows, (const float *const *)w->params, o.grads);
    gpt_free(gpt);
    pool_free(pool);
    return o;
}

/* -- The GPU --------------------------------------------------------------------------------- */

static struct backend_config config_of(const struct world *w, enum shd_dtype publish)
{
    return (struct backend_config){ .shape = &w->shape,
                                    .layout = &w->layout,
                                    .batch = w->batch,
                                    .publish = publish,
                                    .staged = true };
}

static struct backend *backend_new(const struct backend_config *config)
{
    struct shd_err e = { 0 };
    struct backend *b = NULL;
    const int r = backend_cuda_new(config, &b, &e);
    if (r == SHD_ENOTSUP || (r != SHD_OK && strstr(e.text, "find kernel") != NULL))
        SKIP("%s", e.text);
    EXPECT_OK(r, &e);
    return b;
}

/* A unit's parameters as they are published. */
static void *publish(const struct world *w, uint32_t u, enum shd_dtype dtype)
{
    void *published = malloc(w->elems[u] * sizeof(float)); /* room for either dtype */
    uint16_t *narrow = published;
    EXPECT(published != NULL);
    memcpy(narrow, w->params[u], w->elems[u] * sizeof(float));
    for (uint64_t i = 0; dtype != SHD_F32 && i < w->elems[u]; i++)
        narrow[i] = narrowed(w->params[u][i], (uint32_t)dtype);
    return published;
}

static struct backend_arrays arrays_of(const struct world *w, uint32_t u, void *const *params,
                                       float *const *grads)
{
    const uint32_t uses = gpt_unit_uses(&w->shape, u);
    return (struct backend_arrays){ .params = params[u],
                                    .used = uses != GPT_UNIT_NONE ? params[uses] : NULL,
                                    .grad = grads[u],
                                    .used_grad = uses != GPT_UNIT_NONE ? grads[uses] : NULL };
}

/* A micro-batch, over arrays that are the host's or the device's. */
static double run_micro(const struct world *w, struct backend *b, void *const *params,
                        float *const *grads)
{
    struct shd_err e;
    uint32_t ran[UNITS_MAX], count = 0;
    EXPECT_OK(b->ops->set_batch(b, w->windows, &e), &e);
    for (uint32_t u = b->ops->next(b, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = b->ops->next(b, u)) {
        const struct backend_arrays a = arrays_of(w, u, params, grads);
        EXPECT_OK(b->ops->forward(b, u, &a, &e), &e);
        ran[count++] = u;
    }
    while (count-- > 0) {
        const struct backend_arrays a = arrays_of(w, ran[count], params, grads);
        EXPECT_OK(b->ops->backward(b, ran[count], &a, &e), &e);
    }
    return backend_loss(b, (uint64_t)w->batch * w->shape.seq);
}

/* Twice with one object: the second run is the one that counts. */
static struct outcome run_staged(const struct world *w, const struct backend_config *config,
                                 double loss_scale)
{
    void *params[UNITS_MAX];
    struct outcome o = outcome_new(w);
    struct backend *b = backend_new(config);
    for (uint32_t u = 0; u < w->units; u++)
        params[u] = publish(w, u, config->publish);
    b->loss_scale = loss_scale;
    const double first = run_micro(w, b, params, o.grads);
    o.loss = run_micro(w, b, params, o.grads);
    EXPECT(first == o.loss);
    for (uint32_t u = 0; u < w->units; u++)
        free(params[u]);
    b->ops->free(b);
    return o;
}

/* Waits for streams that there have been; NULL: nobody counts them. */
static uint64_t (*waits_so_far)(void);

/* The same with arrays in device memory, as a session of the device has them, in stream order. */
static struct outcome run_device(const struct world *w, struct backend_config config,
                                 double loss_scale)
{
    struct shd_err e;
    struct gpu gpu;
    void *params[UNITS_MAX];
    float *grads[UNITS_MAX];
    struct outcome o = outcome_new(w);
    config.staged = false;
    struct backend *b = backend_new(&config);
    EXPECT_OK(gpu_init(&gpu, 0, false, &e), &e);
    for (uint32_t u = 0; u < w->units; u++) {
        const uint64_t bytes = w->elems[u] * sizeof(float);
        void *copy = publish(w, u, config.publish);
        params[u] = gpu_alloc(&gpu, bytes, "parameters", &e);
        grads[u] = w->frozen[u] ? NULL : gpu_alloc(&gpu, bytes, "gradients", &e);
        gpu_copy(&gpu, params[u], copy, w->elems[u] * gpu_dtype_bytes((uint32_t)config.publish));
        if (grads[u] != NULL)
            gpu_copy(&gpu, grads[u], o.grads[u], bytes);
        EXPECT_OK(gpu_finish(&gpu, &e), &e);
        free(copy);
    }
    b->loss_scale = loss_scale;
    b->ordered = true;
    const uint64_t before = waits_so_far != NULL ? waits_so_far() : 0;
    o.loss = run_micro(w, b, params, grads);
    o.waits = waits_so_far != NULL ? waits_so_far() - before : 0;
    EXPECT(gpu.cuda->cuStreamSynchronize(b->stream) == CUDA_SUCCESS);
    for (uint32_t u = 0; u < w->units; u++) {
        if (grads[u] != NULL)
            gpu_copy(&gpu, o.grads[u], grads[u], w->elems[u] * sizeof(float));
        EXPECT_OK(gpu_finish(&gpu, &e), &e);
        gpu_free(&gpu, params[u]);
        gpu_free(&gpu, grads[u]);
    }
    gpu_deinit(&gpu);
    b->ops->free(b);
    return o;
}

/* -- Comparing ------------------------------------------------------------------------------- */

static double distance(const struct world *w, const struct outcome *got, const struct outcome *want)
{
    double worst = 0;
    for (uint32_t u = 0; u < w->units; u++) {
        double off = 0, all = 0;
        for (uint64_t i = 0; !w->frozen[u] && i < w->elems[u]; i++) {
            const double d = (double)got->grads[u][i] - (double)want->grads[u][i];
            off += d * d;
            all += (double)want->grads[u][i] * (double)want->grads[u][i];
        }
        const double relative = w->frozen[u] ? 0 : sqrt(off / all);
        worst = relative > worst || isnan(relative) ? relative : worst;
    }
    return worst;
}

static void expect_close(const struct world *w, const struct outcome *got,
                         const struct outcome *want, double loss_bound, double grad_bound)
{
    const double worst = distance(w, got, want);
    printf("loss off by %.2g, gradients by %.2g\n", fabs(got->loss - want->loss), worst);
    EXPECT_NEAR(got->loss, want->loss, loss_bound);
    EXPECT_NEAR(worst, 0, grad_bound);
}

static void expect_same(const struct world *w, const struct outcome *a, const struct outcome *b)
{
    EXPECT(a->loss == b->loss);
    for (uint32_t u = 0; u < w->units; u++)
        EXPECT(w->frozen[u] || memcmp(a->grads[u], b->grads[u], w->elems[u] * sizeof(float)) == 0);
}

#endif
