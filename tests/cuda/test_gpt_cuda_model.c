/* The whole model of examples/gpt/cuda behind its backend: loss and gradients against the host's
 * fp64 twin, bits from run to run and by either way of the arrays, and what happens when something
 * fails. Distances are relative: |got - want| / |want|, Euclidean norms, per unit.
 */
#include <dlfcn.h>

#include "examples/gpt/backend.h"
#include "examples/gpt/cuda/gpu.h"
#include "examples/gpt/half.h"
#include "examples/gpt/model.h"
#include "tests/cuda/shim_cuda.h"
#include "tests/test.h"

/* The fp64 twin (examples/gpt/real.h). */
struct gpt64;
int gpt64_new(const struct gpt_shape *shape, const struct gpt_layout *layout, uint32_t batch,
              bool recompute, struct pool *pool, struct gpt64 **ret_gpt, struct shd_err *e);
void gpt64_free(struct gpt64 *g);
double gpt64_whole(struct gpt64 *g, const uint8_t *windows, const double *const *params,
                   double *const *grads);

#define UNITS_MAX 6

/* -- A model and its arrays ------------------------------------------------------------------ */

struct world {
    struct gpt_shape shape;
    struct gpt_layout layout;
    uint32_t units, batch;
    uint8_t *windows;
    uint64_t elems[UNITS_MAX];
    float *params[UNITS_MAX]; /* representable in bf16, too */
    bool frozen[UNITS_MAX];
};

static const struct gpt_shape dense = { .layers = 2, .dim = 32, .heads = 2, .seq = 21 };
static const struct gpt_shape longer = { .layers = 1, .dim = 16, .heads = 2, .seq = 261 };
static const struct gpt_shape adapted = {
    .layers = 2, .dim = 32, .heads = 4, .seq = 13, .rank = 8
};

static uint64_t seed;

static void world_init(struct world *w, const struct gpt_shape *shape, uint32_t batch, uint64_t s)
{
    seed = s;
    printf("seed %" PRIu64 "\n", s);
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
            w->params[u][i] = half_round_bf16(
                0.3f * (float)((double)(test_random(&seed) >> 11) * 0x1p-52 - 1));
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
};

static void outcome_free(struct outcome *o)
{
    for (uint32_t u = 0; u < UNITS_MAX; u++)
        free(o->grads[u]);
}

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
            o.grads[t.unit][w->layout.at[t.kind][t.index] + j] = 777;
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

static struct outcome run_host(const struct world *w, enum gemm_kind gemm)
{
    struct shd_err e;
    struct pool *pool;
    struct gpt *gpt;
    struct outcome o = outcome_new(w);
    EXPECT_OK(gemm_init(gemm, &e), &e);
    EXPECT_OK(pool_new(1, &pool, &e), &e);
    EXPECT_OK(gpt_new(&w->shape, &w->layout, w->batch, false, pool, &gpt, &e), &e);
    gpt_set_gemm(gpt, gemm);
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
    for (uint64_t i = 0; dtype == SHD_BF16 && i < w->elems[u]; i++)
        narrow[i] = (uint16_t)(half_bf16_bits(w->params[u][i]) >> 16);
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
    EXPECT_OK(b->ops->set_batch(b, w->windows, &e), &e);
    for (uint32_t u = b->ops->next(b, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = b->ops->next(b, u)) {
        const struct backend_arrays a = arrays_of(w, u, params, grads);
        EXPECT_OK(b->ops->forward(b, u, &a, &e), &e);
    }
    for (uint32_t u = w->units; u-- > 0;) {
        const struct backend_arrays a = arrays_of(w, u, params, grads);
        EXPECT_OK(b->ops->backward(b, u, &a, &e), &e);
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
    b->ops->set_loss_scale(b, loss_scale);
    const double first = run_micro(w, b, params, o.grads);
    o.loss = run_micro(w, b, params, o.grads);
    EXPECT(first == o.loss);
    for (uint32_t u = 0; u < w->units; u++)
        free(params[u]);
    b->ops->free(b);
    return o;
}

/* The same with arrays in device memory, as a session of the device has them. */
static struct outcome run_device(const struct world *w, struct backend_config config)
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
        gpu_copy(&gpu, params[u], copy, config.publish == SHD_BF16 ? bytes / 2 : bytes);
        if (grads[u] != NULL)
            gpu_copy(&gpu, grads[u], o.grads[u], bytes);
        EXPECT_OK(gpu_finish(&gpu, &e), &e);
        free(copy);
    }
    o.loss = run_micro(w, b, params, grads);
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

/* fp32: measured 4e-7, some dozen roundings; the bound leaves room for another order of sums. */
static void check_f32(const struct gpt_shape *shape, uint32_t batch, uint64_t s)
{
    struct world w;
    world_init(&w, shape, batch, s);
    const struct backend_config config = config_of(&w, SHD_F32);
    struct outcome got = run_staged(&w, &config, 1), want = run_f64(&w);
    struct outcome device = run_device(&w, config);
    expect_close(&w, &got, &want, 1e-6, 2e-6);
    expect_same(&w, &got, &device);
    outcome_free(&got);
    outcome_free(&want);
    outcome_free(&device);
    world_deinit(&w);
}

TEST(gradients_are_those_of_fp64)
{
    check_f32(&dense, 3, 401);
}

TEST(gradients_of_several_attention_blocks)
{
    check_f32(&longer, 2, 402);
}

TEST(gradients_of_adapters)
{
    check_f32(&adapted, 2, 403);
}

/* bf16: the host's bf16 rounds the same factors. A sum in another order may round to a neighbour,
 * 2^-8 of it, here and there: measured 5e-4. Against fp64 it is as far as the host's own is. */
static void check_bf16(const struct gpt_shape *shape, uint32_t batch, uint64_t s)
{
    struct world w;
    world_init(&w, shape, batch, s);
    const struct backend_config config = config_of(&w, SHD_BF16);
    struct outcome got = run_staged(&w, &config, 1), exact = run_f64(&w);
    struct outcome want = run_host(&w, GEMM_BF16_EMULATED), device = run_device(&w, config);
    printf("the host's bf16 is %.2g from fp64\n", distance(&w, &want, &exact));
    expect_close(&w, &got, &want, 1e-6, 2e-3);
    expect_close(&w, &got, &exact, 1e-4, 5e-3);
    expect_same(&w, &got, &device);
    outcome_free(&got);
    outcome_free(&want);
    outcome_free(&exact);
    outcome_free(&device);
    world_deinit(&w);
}

TEST(bf16_is_the_hosts_bf16)
{
    check_bf16(&dense, 3, 404);
    check_bf16(&adapted, 2, 405);
    check_bf16(&longer, 1, 406);
}

/* TF32 keeps 10 bits of a factor: between the two. */
TEST(tf32_rounds_factors)
{
    struct world w;
    world_init(&w, &dense, 2, 407);
    struct backend_config config = config_of(&w, SHD_F32);
    config.tf32 = true;
    struct outcome got = run_staged(&w, &config, 1), want = run_f64(&w);
    expect_close(&w, &got, &want, 1e-4, 1e-3);
    EXPECT(distance(&w, &got, &want) > 1e-5);
    outcome_free(&got);
    outcome_free(&want);
    world_deinit(&w);
}

/* Three layers: of the last one, which backward begins with, nothing is computed again. */
TEST(recomputing_changes_no_bit)
{
    static const struct gpt_shape deep = { .layers = 3, .dim = 32, .heads = 2, .seq = 21 };
    for (int kind = 0; kind < 6; kind++) {
        struct world w;
        world_init(&w, kind % 2 == 0 ? &deep : &adapted, 2, 413);
        struct backend_config config = config_of(&w, kind < 2 ? SHD_BF16 : SHD_F32);
        config.tf32 = kind >= 4;
        struct outcome all = run_staged(&w, &config, 1);
        config.recompute = true;
        struct outcome again = run_staged(&w, &config, 1), device = run_device(&w, config);
        expect_same(&w, &all, &again);
        expect_same(&w, &all, &device);
        outcome_free(&all);
        outcome_free(&again);
        outcome_free(&device);
        world_deinit(&w);
    }
}

static double device_free(struct gpu *gpu)
{
    size_t bytes = 0, total = 0;
    gpu_enter(gpu);
    EXPECT_EQ(gpu->cuda->cuMemGetInfo(&bytes, &total), CUDA_SUCCESS);
    return (double)bytes;
}

/* As much of the device's memory as is said; a driver may round by some MiB. */
TEST(recomputing_takes_less_of_the_device)
{
    static const struct gpt_shape tall = { .layers = 12, .dim = 64, .heads = 2, .seq = 128 };
    struct shd_err e;
    struct gpu gpu;
    struct gpt_layout layout;
    struct backend_config config = { .shape = &tall, .layout = &layout, .batch = 64 };
    config.publish = SHD_F32;
    gpt_layout_compute(&tall, &layout);
    struct backend *all = backend_new(&config);
    EXPECT_OK(gpu_init(&gpu, 0, false, &e), &e);
    const double before = device_free(&gpu);
    config.recompute = true;
    struct backend *kept = backend_new(&config);
    const uint64_t all_bytes = all->ops->activation_bytes(all, false);
    const uint64_t kept_bytes = kept->ops->activation_bytes(kept, true);
    all->ops->free(all);
    const double saved = device_free(&gpu) - before;
    kept->ops->free(kept);
    gpu_deinit(&gpu);
    EXPECT(kept_bytes < all_bytes / 4);
    EXPECT_NEAR(saved, (double)(all_bytes - kept_bytes), (double)(8 << 20));
}

/* A power of two scales every gradient and nothing else, to the bit. */
TEST(loss_scale_scales_gradients)
{
    struct world w;
    world_init(&w, &dense, 2, 408);
    const struct backend_config config = config_of(&w, SHD_F32);
    struct outcome plain = run_staged(&w, &config, 1), scaled = run_staged(&w, &config, 1024);
    EXPECT(plain.loss == scaled.loss);
    for (uint32_t u = 0; u < w.units; u++) {
        EXPECT(plain.grads[u] != NULL && scaled.grads[u] != NULL); /* none is frozen */
        for (uint64_t i = 0; i < w.elems[u]; i++)
            EXPECT(plain.grads[u][i] * 1024 == scaled.grads[u][i]);
    }
    outcome_free(&plain);
    outcome_free(&scaled);
    world_deinit(&w);
}

TEST(reads_and_spoils_arrays)
{
    struct world w;
    world_init(&w, &dense, 1, 409);
    for (int half = 0; half < 2; half++) {
        struct shd_err e;
        struct backend_config config = config_of(&w, half ? SHD_BF16 : SHD_F32);
        struct backend *b = backend_new(&config);
        void *params = publish(&w, 1, config.publish);
        float *out = malloc(w.elems[1] * sizeof *out);
        EXPECT_OK(b->ops->read(b, params, w.elems[1], out, &e), &e);
        EXPECT(memcmp(out, w.params[1], w.elems[1] * sizeof *out) == 0);
        EXPECT_OK(b->ops->spoil(b, out, &e), &e);
        EXPECT(isinf(out[0]));
        free(params);
        free(out);
        b->ops->free(b);
    }
    world_deinit(&w);
}

/* -- Failing --------------------------------------------------------------------------------- */

/* What cannot be done is refused with a sentence, and leaves nothing behind. */
TEST(refuses_with_a_reason)
{
    struct world w;
    world_init(&w, &dense, 1, 410);
    struct shd_err e;
    struct backend *b;
    struct backend_config config = config_of(&w, SHD_F32);
    b = backend_new(&config); /* or skips */
    b->ops->free(b);
    config.device = 99;
    EXPECT_STATUS(backend_cuda_new(&config, &b, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "--device cuda:99: the driver shows 1 GPU");
    config = config_of(&w, SHD_F16);
    EXPECT_STATUS(backend_cuda_new(&config, &b, &e), SHD_ENOTSUP);
    struct gpt_shape shape = dense;
    shape.heads = 8;
    config = config_of(&w, SHD_F32);
    config.shape = &shape;
    EXPECT_STATUS(backend_cuda_new(&config, &b, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "heads of 4");
    shape = dense;
    shape.experts = 2;
    EXPECT_STATUS(backend_cuda_new(&config, &b, &e), SHD_ENOTSUP);
    world_deinit(&w);
}

static void *shim_symbol(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library != NULL ? dlsym(library, name) : NULL;
    if (symbol == NULL)
        SKIP("this driver is no stand-in: nothing can be made to fail");
    dlclose(library);
    return symbol;
}

struct shim {
    shim_cuda_fail_fn *fail;
    shim_cuda_calls_fn *calls;
    shim_cuda_live_fn *live;
    shim_cuda_reset_fn *reset;
};

static struct shim shim_find(void)
{
    struct shim s;
    void *symbol = shim_symbol("shim_cuda_fail");
    memcpy(&s.fail, &symbol, sizeof symbol);
    symbol = shim_symbol("shim_cuda_calls");
    memcpy(&s.calls, &symbol, sizeof symbol);
    symbol = shim_symbol("shim_cuda_live");
    memcpy(&s.live, &symbol, sizeof symbol);
    symbol = shim_symbol("shim_cuda_reset");
    memcpy(&s.reset, &symbol, sizeof symbol);
    return s;
}

/* Kernels and products of a micro-batch: docs/gpu.md reckons with them. */
TEST(launches_of_a_micro_batch)
{
    for (uint64_t blocks = 1; blocks <= 2; blocks++) { /* of attention */
        struct world w;
        world_init(&w, blocks == 1 ? &dense : &longer, 1, 415);
        const struct backend_config config = config_of(&w, SHD_BF16);
        struct backend *b = backend_new(&config); /* or skips */
        b->ops->free(b);
        const struct shim shim = shim_find();
        shim.fail(NULL); /* counts anew */
        struct outcome o = run_staged(&w, &config, 1);
        EXPECT_EQ(shim.calls("cuLaunchKernel"), 2 * (13 + w.shape.layers * (35 + 8 * blocks)));
        outcome_free(&o);
        world_deinit(&w);
    }
}

TEST(each_call_of_the_start_may_fail)
{
    static const char *const calls[] = {
        "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuModuleLoadData",
        "cuModuleGetFunction",      "cuMemAlloc",     "cuMemHostAlloc",
        "cuDeviceGetName"
    };
    struct world w;
    world_init(&w, &dense, 1, 411);
    struct shd_err e;
    struct backend_config config = config_of(&w, SHD_F32);
    struct backend *b = backend_new(&config);
    b->ops->free(b);
    const struct shim shim = shim_find();
    const uint64_t before = shim.live(NULL);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        shim.fail(NULL);
        b = backend_new(&config);
        b->ops->free(b);
        const uint64_t times = shim.calls(calls[i]);
        EXPECT(times > 0);
        for (uint64_t n = 1; n <= times; n++) {
            char spec[64];
            snprintf(spec, sizeof spec, "%s@%" PRIu64, calls[i], n);
            shim.fail(spec);
            const int r = backend_cuda_new(&config, &b, &e);
            /* EIO: by way of cuBLAS; ENOTSUP: a build without kernels takes it for their lack. */
            EXPECT(r == SHD_ENOMEM || r == SHD_EIO || r == SHD_ENOTSUP);
            EXPECT_EQ(shim.live(NULL), before);
        }
    }
    shim.fail(NULL);
    world_deinit(&w);
}

/* Work that fails on the device fails the unit it is of. */
TEST(failing_work_fails_its_unit)
{
    static const char *const work[] = { "kernel@3:700", "copy@2:700", "cuLaunchKernel@4",
                                        "cuMemcpyAsync@1" };
    struct world w;
    world_init(&w, &dense, 1, 412);
    struct shd_err e;
    struct backend_config config = config_of(&w, SHD_F32);
    struct backend *b = backend_new(&config);
    const struct shim shim = shim_find();
    void *params[] = { publish(&w, 0, SHD_F32), publish(&w, 1, SHD_F32) };
    const struct backend_arrays embed = { .params = params[0] }, block = { .params = params[1] };
    for (size_t i = 0; i < sizeof work / sizeof work[0]; i++) {
        EXPECT_OK(b->ops->set_batch(b, w.windows, &e), &e);
        EXPECT_OK(b->ops->forward(b, 0, &embed, &e), &e);
        shim.fail(work[i]);
        int r = b->ops->forward(b, 1, &block, &e);
        if (r == SHD_OK) /* "copy@2": the block's is one */
            r = b->ops->forward(b, 1, &block, &e);
        EXPECT(r != SHD_OK);
        EXPECT_HAS(e.text, "GPU 0: ");
        shim.fail(NULL);
        shim.reset();
    }
    EXPECT_OK(b->ops->forward(b, 1, &block, &e), &e);
    b->ops->free(b);
    free(params[0]);
    free(params[1]);
    world_deinit(&w);
}

TEST_MAIN()
