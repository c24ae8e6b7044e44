/* Arrays of the tests of GPU kernels: a host copy, and one on the device with a guard behind it.
 *
 * Bounds. EPS is half an ulp of 1 in fp32. A sum of n terms in whatever order is off by at most
 * n EPS sum|terms|; a value that goes through a few operations, by a few EPS of the largest one of
 * them; what is stored in 16 bits, by 2^-8 (bf16) or 2^-11 (fp16) of itself on top. Sizes have
 * tails: less than a warp's 256 columns, a little more, rows that are no multiple of a block's
 * eight. A guard follows each output.
 */
#ifndef SHD_TESTS_GPT_CUDA_ARRAY_H
#define SHD_TESTS_GPT_CUDA_ARRAY_H

#include "examples/gpt/cuda/gpu.h"
#include "tests/cuda/gpt_cuda_half.h"
#include "tests/lib/test.h"

#define EPS   0x1p-24
#define GUARD 0x1.234p30f

static uint64_t seed;
static struct gpu gpu;
static bool gpu_there;

static void start(uint64_t s)
{
    struct shd_err e = { 0 };
    seed = test_seed(s);
    if (!gpu_there && gpu_init(&gpu, 0, /* tf32= */ false, &e) != SHD_OK)
        SKIP("%s", e.text);
    gpu_there = true;
}

static float uniform(void)
{
    return (float)((double)(test_random(&seed) >> 11) * 0x1p-52 - 1);
}

struct array {
    float *host; /* [count] */
    void *device;
    uint64_t count;
    uint32_t dtype;
};

static uint64_t bytes_of(const struct array *a, uint64_t count)
{
    return count * gpu_dtype_bytes(a->dtype);
}

static void finish(void)
{
    struct shd_err e;
    EXPECT_OK(gpu_finish(&gpu, &e), &e);
}

static void array_send(struct array *a)
{
    const uint64_t all = a->count + 8;
    float *copy = malloc(all * sizeof *copy);
    uint16_t *narrow = malloc(all * sizeof *narrow);
    for (uint64_t i = 0; i < all; i++) {
        copy[i] = i < a->count ? a->host[i] : GUARD;
        narrow[i] = narrowed(copy[i], a->dtype);
        if (i < a->count)
            a->host[i] = rounded(a->host[i], a->dtype);
    }
    gpu_copy(&gpu, a->device, a->dtype != GPU_F32 ? (void *)narrow : (void *)copy,
             bytes_of(a, all));
    finish();
    free(copy);
    free(narrow);
}

static struct array array_new(uint64_t count, uint32_t dtype)
{
    struct shd_err e = { 0 };
    struct array a = { .count = count, .dtype = dtype };
    a.host = malloc(count * sizeof *a.host);
    for (uint64_t i = 0; i < count; i++)
        a.host[i] = uniform();
    a.device = gpu_alloc(&gpu, bytes_of(&a, count + 8), "a test", &e);
    EXPECT(a.device != NULL);
    array_send(&a);
    return a;
}

/* What the device has now; the guard is as it was. */
static void array_fetch(struct array *a)
{
    const uint64_t all = a->count + 8;
    float *copy = malloc(all * sizeof *copy);
    uint16_t *narrow = malloc(all * sizeof *narrow);
    gpu_copy(&gpu, a->dtype != GPU_F32 ? (void *)narrow : (void *)copy, a->device,
             bytes_of(a, all));
    finish();
    for (uint64_t i = 0; i < all; i++) {
        const float x = a->dtype != GPU_F32 ? widened(narrow[i], a->dtype) : copy[i];
        const float guard = rounded(GUARD, a->dtype);
        if (i < a->count)
            a->host[i] = x;
        else
            EXPECT(x == guard);
    }
    free(copy);
    free(narrow);
}

static void array_free(struct array *a)
{
    gpu_free(&gpu, a->device);
    free(a->host);
}

/* Near want, and rounded: for fp16 to a multiple of 2^-24 at least. */
static void expect_near(const struct array *a, uint64_t i, double want, double bound)
{
    const double all = fabs(want) + bound;
    const double off = a->dtype == GPU_F32    ? 0
                       : a->dtype == GPU_BF16 ? 0x1p-8 * all
                                              : 0x1p-11 * all + 0x1p-25;
    EXPECT_NEAR(a->host[i], want, bound + off);
}

__attribute__((unused)) static const uint32_t dtypes[] = { GPU_F32, GPU_BF16, GPU_F16 };
#define DTYPES 3

#endif
