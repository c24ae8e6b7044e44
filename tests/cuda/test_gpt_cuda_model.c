/* The whole model of examples/gpt/cuda behind its backend: loss and gradients against the host's
 * fp64 twin, bits from run to run and by either way of the arrays, and what happens when something
 * fails.
 */
#include <dlfcn.h>

#include "tests/cuda/gpt_cuda_world.h"
#include "tests/cuda/shim_cuda.h"

static const struct gpt_shape dense = { .layers = 2, .dim = 32, .heads = 2, .seq = 21 };
static const struct gpt_shape longer = { .layers = 1, .dim = 16, .heads = 2, .seq = 261 };
static const struct gpt_shape adapted = {
    .layers = 2, .dim = 32, .heads = 4, .seq = 13, .rank = 8
};
static const struct gpt_shape sparse = {
    .layers = 2, .dim = 32, .heads = 4, .seq = 13, .experts = 12
};
static const struct gpt_shape pair = {
    .layers = 1, .dim = 16, .heads = 2, .seq = 21, .experts = 2
};

/* fp32: measured 4e-7, some dozen roundings; the bound leaves room for another order of sums. */
static void check_f32(const struct gpt_shape *shape, uint32_t batch, uint64_t s)
{
    struct world w;
    world_init(&w, shape, batch, s);
    const struct backend_config config = config_of(&w, SHD_F32);
    struct outcome got = run_staged(&w, &config, 1), want = run_f64(&w);
    struct outcome device = run_device(&w, config, 1);
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

/* 12 experts for 26 rows: some have none, and their gradients are left alone. */
TEST(gradients_of_experts)
{
    check_f32(&sparse, 2, 417);
    check_f32(&pair, 3, 418);
}

/* In backward, too, as when activations are computed again: a router's and an expert's forward have
 * the same result each time. */
TEST(forward_of_experts_may_run_again)
{
    struct world w;
    world_init(&w, &sparse, 2, 421);
    const struct backend_config config = config_of(&w, SHD_BF16);
    struct outcome want = run_staged(&w, &config, 1), got = outcome_new(&w);
    struct backend *b = backend_new(&config);
    struct shd_err e;
    void *params[UNITS_MAX];
    uint32_t ran[UNITS_MAX], count = 0;
    for (uint32_t u = 0; u < w.units; u++)
        params[u] = publish(&w, u, config.publish);
    EXPECT_OK(b->ops->set_batch(b, w.windows, &e), &e);
    for (uint32_t u = b->ops->next(b, GPT_UNIT_NONE); u != GPT_UNIT_NONE; u = b->ops->next(b, u)) {
        const struct backend_arrays a = arrays_of(&w, u, params, got.grads);
        EXPECT_OK(b->ops->forward(b, u, &a, &e), &e);
        ran[count++] = u;
    }
    EXPECT(count < w.units);
    while (count-- > 0) {
        const struct gpt_unit unit = gpt_unit_at(&w.shape, ran[count]);
        const uint32_t block = gpt_unit_find(
            &w.shape, (struct gpt_unit){ .kind = GPT_BLOCK, .layer = unit.layer });
        const struct backend_arrays a = arrays_of(&w, ran[count], params, got.grads);
        const struct backend_arrays router = arrays_of(&w, block, params, got.grads);
        if (unit.kind == GPT_EXPERT)
            EXPECT_OK(b->ops->forward(b, block, &router, &e), &e);
        EXPECT_OK(b->ops->forward(b, ran[count], &a, &e), &e);
        EXPECT_OK(b->ops->backward(b, ran[count], &a, &e), &e);
    }
    got.loss = backend_loss(b, (uint64_t)w.batch * w.shape.seq);
    expect_same(&w, &got, &want);
    for (uint32_t u = 0; u < w.units; u++)
        free(params[u]);
    b->ops->free(b);
    outcome_free(&got);
    outcome_free(&want);
    world_deinit(&w);
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
    struct outcome want = run_host(&w, GEMM_BF16_EMULATED, 1), device = run_device(&w, config, 1);
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
    check_bf16(&sparse, 2, 419);
}

/* fp16 with a loss scale, without which gradients underflow here: as bf16, with 2^-11; but a sum is
 * eight times as likely to round to a neighbour, of which one moved the loss by 6e-6. Measured 1e-4
 * from the host's, 3e-4 from fp64; with bf16's rounding it is 2e-3. */
static void check_f16(const struct gpt_shape *shape, uint32_t batch, uint64_t s)
{
    struct world w;
    world_init(&w, shape, batch, s);
    const double scale = 1024;
    const struct backend_config config = config_of(&w, SHD_F16);
    struct outcome got = run_staged(&w, &config, scale), exact = run_f64(&w);
    struct outcome want = run_host(&w, GEMM_F16_EMULATED, scale);
    struct outcome device = run_device(&w, config, scale);
    for (uint32_t u = 0; u < w.units; u++)
        for (uint64_t i = 0; !w.frozen[u] && i < w.elems[u]; i++)
            exact.grads[u][i] *= exact.grads[u][i] != UNTOUCHED ? (float)scale : 1;
    printf("the host's fp16 is %.2g from fp64\n", distance(&w, &want, &exact));
    expect_close(&w, &got, &want, 1e-5, 5e-4);
    expect_close(&w, &got, &exact, 5e-5, 1e-3);
    expect_same(&w, &got, &device);
    outcome_free(&got);
    outcome_free(&want);
    outcome_free(&exact);
    outcome_free(&device);
    world_deinit(&w);
}

TEST(fp16_is_the_hosts_fp16)
{
    check_f16(&dense, 3, 413);
    check_f16(&adapted, 2, 414);
    check_f16(&longer, 1, 415);
    check_f16(&sparse, 2, 420);
}

/* A loss scale that takes gradients beyond 65,504 makes some infinite or NaN: the owners see it and
 * skip the step. */
TEST(fp16_overflows_beyond_its_range)
{
    struct world w;
    world_init(&w, &dense, 2, 416);
    const struct backend_config config = config_of(&w, SHD_F16);
    struct outcome got = run_staged(&w, &config, 16777216);
    uint64_t finite = 0, other = 0;
    for (uint32_t u = 0; u < w.units; u++)
        for (uint64_t i = 0; i < w.elems[u]; i++)
            *(isfinite(got.grads[u][i]) ? &finite : &other) += 1;
    printf("%" PRIu64 " finite, %" PRIu64 " not\n", finite, other);
    EXPECT(isfinite(got.loss));
    EXPECT(other > 0);
    outcome_free(&got);
    world_deinit(&w);
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
    const struct gpt_shape *shapes[] = { &deep, &adapted, &sparse };
    static const enum shd_dtype types[] = { SHD_F32, SHD_BF16, SHD_F16 };
    for (int kind = 0; kind < 9; kind++) {
        struct world w;
        world_init(&w, shapes[kind % 3], 2, 413);
        struct backend_config config = config_of(&w, types[kind / 3]);
        struct outcome all = run_staged(&w, &config, 64);
        config.recompute = true;
        struct outcome again = run_staged(&w, &config, 64), device = run_device(&w, config, 64);
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
    const uint64_t all_bytes = all->activation_bytes[false];
    const uint64_t kept_bytes = kept->activation_bytes[true];
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
    for (int dtype = SHD_F32; dtype <= SHD_F16; dtype++) {
        struct shd_err e;
        struct backend_config config = config_of(&w, (enum shd_dtype)dtype);
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
    struct gpt_shape shape = dense;
    shape.heads = 8;
    config = config_of(&w, SHD_F32);
    config.shape = &shape;
    EXPECT_STATUS(backend_cuda_new(&config, &b, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "heads of 4");
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
static uint64_t count_waits(void)
{
    return shim_find().calls("cuStreamSynchronize");
}

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
        waits_so_far = count_waits;
        struct outcome ordered = run_device(&w, config, 1);
        waits_so_far = NULL;
        EXPECT_EQ(ordered.waits, 1); /* for the losses */
        outcome_free(&ordered);
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
    world_init(&w, &sparse, 1, 411);
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
