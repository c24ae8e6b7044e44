/* gpu.c: see gpu.h. */
#include "examples/gpt/cuda/gpu.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/base/status.h"

/* The size that cuBLAS's documentation recommends for Hopper. */
#define GPU_WORKSPACE_BYTES ((uint64_t)32 << 20)

static const char *const kernel_names[GPU_KERNELS] = {
#define GPU_NAME(kernel) [GPU_KERNEL_##kernel] = "gpt_gpu_" #kernel,
    GPU_KERNELS_X(GPU_NAME)
#undef GPU_NAME
};

extern const unsigned char gpt_kernels_image[]; /* made of kernels.cu by the build */
extern const uint64_t gpt_kernels_image_bytes;  /* 0: built without nvcc */

/* -- Starting -------------------------------------------------------------------------------- */

static int gpu_find(struct gpu *g, char *name, int name_bytes, struct shd_err *e)
{
    const struct cuda *c = g->cuda;
    int count = 0, major = 0;
    int r = cuda_result(c, c->cuDeviceGetCount(&count), e, "count the GPUs");
    if (r != SHD_OK)
        return r;
    if (g->ordinal >= (uint32_t)count)
        return err_set(e, SHD_ENOTSUP,
                       "--device cuda:%u: the driver shows %d GPU%s, cuda:0 to cuda:%d "
                       "(CUDA_VISIBLE_DEVICES can hide some)",
                       g->ordinal, count, count == 1 ? "" : "s", count - 1);
    r = cuda_result(c, c->cuDeviceGet(&g->device, (int)g->ordinal), e, "open GPU %u", g->ordinal);
    if (r == SHD_OK)
        r = cuda_result(c, c->cuDeviceGetName(name, name_bytes, g->device), e, "name GPU %u",
                        g->ordinal);
    if (r == SHD_OK)
        r = cuda_result(c,
                        c->cuDeviceGetAttribute(
                            &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, g->device),
                        e, "ask GPU %u for its compute capability", g->ordinal);
    if (r == SHD_OK && major < 9)
        r = err_set(
            e, SHD_ENOTSUP,
            "GPU %u (%s) has compute capability %d.x, the kernels here need 9.0 (Hopper) or "
            "newer: use --device host",
            g->ordinal, name, major);
    return r;
}

static int gpu_load_kernels(struct gpu *g, struct shd_err *e)
{
    const struct cuda *c = g->cuda;
    static const uint64_t none[8]; /* only the tests' stand-in for the driver loads it */
    const bool empty = gpt_kernels_image_bytes == 0;
    const CUresult loaded = c->cuModuleLoadData(&g->module,
                                                empty ? (const void *)none : gpt_kernels_image);
    if (loaded != CUDA_SUCCESS && empty)
        return err_set(e, SHD_ENOTSUP,
                       "this build of shd-gpt has no GPU kernels: build it where nvcc is, or use "
                       "--device host");
    int r = cuda_result(c, loaded, e, "load the kernels on GPU %u", g->ordinal);
    for (int k = 0; k < GPU_KERNELS && r == SHD_OK; k++)
        r = cuda_result(c, c->cuModuleGetFunction(&g->kernels[k], g->module, kernel_names[k]), e,
                        "find kernel %s", kernel_names[k]);
    return r;
}

static int gpu_blas_result(cublasStatus_t status, const char *what, struct shd_err *e)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return SHD_OK;
    return err_set(e, SHD_EIO, "%s: %s (%d)", what, cublas_status_name(status), status);
}

/* A workspace of our own: with cuBLAS's the bits of a product might depend on what ran before. */
static int gpu_start_blas(struct gpu *g, struct shd_err *e)
{
    const struct cublas *b = g->blas;
    int r = gpu_blas_result(b->cublasCreate(&g->handle), "start cuBLAS", e);
    if (r == SHD_OK)
        r = gpu_blas_result(b->cublasSetStream(g->handle, g->stream), "cublasSetStream", e);
    if (r == SHD_OK)
        r = cuda_result(g->cuda, g->cuda->cuMemAlloc(&g->workspace, GPU_WORKSPACE_BYTES), e,
                        "allocate cuBLAS's workspace of %ju bytes", (uintmax_t)GPU_WORKSPACE_BYTES);
    if (r == SHD_OK)
        r = gpu_blas_result(
            b->cublasSetWorkspace(g->handle, (void *)(uintptr_t)g->workspace, GPU_WORKSPACE_BYTES),
            "cublasSetWorkspace", e);
    if (r == SHD_OK) /* partial sums of a product stay fp32, also with 16-bit results */
        r = gpu_blas_result(
            b->cublasSetMathMode(g->handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
            "cublasSetMathMode", e);
    return r;
}

int gpu_init(struct gpu *g, uint32_t ordinal, bool tf32, struct shd_err *e)
{
    char name[96] = "";
    int version = 0;
    *g = (struct gpu){ .ordinal = ordinal,
                       .compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                       : CUBLAS_COMPUTE_32F_PEDANTIC };
    int r = cuda_load(&g->cuda, e);
    if (r == SHD_OK)
        r = gpu_find(g, name, (int)sizeof name, e);
    if (r == SHD_OK)
        r = cublas_load(&g->blas, e);
    if (r != SHD_OK)
        return r;
    const struct cuda *c = g->cuda;
    r = cuda_result(c, c->cuDevicePrimaryCtxRetain(&g->context, g->device), e,
                    "open the context of GPU %u", ordinal);
    if (r == SHD_OK)
        r = cuda_result(c, c->cuCtxSetCurrent(g->context), e, "use GPU %u", ordinal);
    if (r == SHD_OK)
        r = cuda_result(c, c->cuStreamCreate(&g->stream, CU_STREAM_NON_BLOCKING), e,
                        "create a stream on GPU %u", ordinal);
    if (r == SHD_OK)
        r = gpu_load_kernels(g, e);
    if (r == SHD_OK)
        r = gpu_start_blas(g, e);
    if (r == SHD_OK)
        r = gpu_blas_result(g->blas->cublasGetVersion(g->handle, &version), "cublasGetVersion", e);
    if (r != SHD_OK) {
        gpu_deinit(g);
        return r;
    }
    snprintf(g->describe, sizeof g->describe, "GPU %u (%s), cuBLAS %d.%d.%d", ordinal, name,
             version / 10000, version / 100 % 100, version % 100);
    return SHD_OK;
}

void gpu_deinit(struct gpu *g)
{
    if (g->context == NULL)
        return;
    const struct cuda *c = g->cuda;
    c->cuCtxSetCurrent(g->context);
    if (g->stream != NULL)
        c->cuStreamSynchronize(g->stream);
    if (g->handle != NULL)
        g->blas->cublasDestroy(g->handle);
    if (g->workspace != 0)
        c->cuMemFree(g->workspace);
    if (g->module != NULL)
        c->cuModuleUnload(g->module);
    if (g->stream != NULL)
        c->cuStreamDestroy(g->stream);
    c->cuDevicePrimaryCtxRelease(g->device);
    *g = (struct gpu){ .context = NULL };
}

/* -- Errors ---------------------------------------------------------------------------------- */

static bool gpu_ok(const struct gpu *g)
{
    return g->err.code == SHD_OK;
}

static void gpu_check(struct gpu *g, CUresult result, const char *what)
{
    if (result != CUDA_SUCCESS && gpu_ok(g))
        cuda_result(g->cuda, result, &g->err, "GPU %u: %s", g->ordinal, what);
}

void gpu_enter(struct gpu *g)
{
    gpu_check(g, g->cuda->cuCtxSetCurrent(g->context), "use the context");
}

int gpu_finish(struct gpu *g, struct shd_err *e)
{
    gpu_check(g, g->cuda->cuStreamSynchronize(g->stream), "compute");
    return gpu_queued(g, e);
}

int gpu_queued(struct gpu *g, struct shd_err *e)
{
    if (gpu_ok(g))
        return SHD_OK;
    const struct shd_err first = g->err;
    g->err = (struct shd_err){ .code = SHD_OK };
    return err_set(e, first.code, "%s", first.text);
}

/* -- Memory ---------------------------------------------------------------------------------- */

void *gpu_alloc(struct gpu *g, uint64_t bytes, const char *what, struct shd_err *e)
{
    CUdeviceptr memory = 0;
    const int r = cuda_result(g->cuda, g->cuda->cuMemAlloc(&memory, bytes), e,
                              "%ju MiB of GPU %u for %s", (uintmax_t)(bytes >> 20) + 1, g->ordinal,
                              what);
    return r == SHD_OK ? (void *)(uintptr_t)memory : NULL;
}

void gpu_free(struct gpu *g, void *memory)
{
    if (memory != NULL)
        g->cuda->cuMemFree((CUdeviceptr)(uintptr_t)memory);
}

void *gpu_host_alloc(struct gpu *g, uint64_t bytes, struct shd_err *e)
{
    void *memory = NULL;
    const int r = cuda_result(g->cuda, g->cuda->cuMemHostAlloc(&memory, bytes, 0), e,
                              "%ju bytes of pinned memory", (uintmax_t)bytes);
    return r == SHD_OK ? memory : NULL;
}

void gpu_host_free(struct gpu *g, void *memory)
{
    if (memory != NULL)
        g->cuda->cuMemFreeHost(memory);
}

void gpu_copy(struct gpu *g, void *to, const void *from, uint64_t bytes)
{
    if (gpu_ok(g) && bytes > 0)
        gpu_check(g,
                  g->cuda->cuMemcpyAsync((CUdeviceptr)(uintptr_t)to, (CUdeviceptr)(uintptr_t)from,
                                         bytes, g->stream),
                  "copy");
}

void gpu_zero(struct gpu *g, void *to, uint64_t bytes)
{
    if (gpu_ok(g) && bytes > 0)
        gpu_check(g, g->cuda->cuMemsetD8Async((CUdeviceptr)(uintptr_t)to, 0, bytes, g->stream),
                  "fill with zeros");
}

/* -- Kernels --------------------------------------------------------------------------------- */

uint64_t gpu_blocks_elems(uint64_t elems)
{
    const uint64_t block = (uint64_t)GPU_THREADS * GPU_LANE;
    return (elems + block - 1) / block;
}

uint64_t gpu_blocks_rows(uint64_t rows)
{
    return (rows + GPU_WARPS - 1) / GPU_WARPS;
}

uint64_t gpu_blocks_cols(uint64_t cols, uint64_t chunks)
{
    return (cols + GPU_COLS - 1) / GPU_COLS * chunks;
}

void gpu_launch(struct gpu *g, enum gpu_kernel kernel, uint64_t blocks, const void *args)
{
    void *params[] = { (void *)(uintptr_t)args };
    CHECK(blocks <= INT32_MAX);
    if (!gpu_ok(g) || blocks == 0)
        return;
    gpu_check(g,
              g->cuda->cuLaunchKernel(g->kernels[kernel], (unsigned)blocks, 1, 1, GPU_THREADS, 1, 1,
                                      0, g->stream, params, NULL),
              kernel_names[kernel]);
}

/* -- Products -------------------------------------------------------------------------------- */

static int type_of(const struct gpu_matrix *x)
{
    switch (x->dtype) {
    case GPU_BF16:
        return CUDA_R_16BF;
    case GPU_F16:
        return CUDA_R_16F;
    default:
        return CUDA_R_32F;
    }
}

static int op_of(const struct gpu_matrix *x)
{
    return x->transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
}

/* cuBLAS is column-major: what it takes for the transpose of a row-major matrix is that matrix, so
 * c^T = b^T a^T is asked for. */
void gpu_multiply(struct gpu *g, const struct gpu_product *p)
{
    const float alpha = 1, beta = p->add ? 1 : 0;
    const struct gpu_matrix *a = &p->a, *b = &p->b, *c = &p->c;
    const int m = (int)p->m, n = (int)p->n, k = (int)p->k;
    CHECK(a->dtype == b->dtype);
    CHECK(p->m <= INT32_MAX && p->n <= INT32_MAX && p->k <= INT32_MAX);
    if (!gpu_ok(g))
        return;
    void *out = (void *)(uintptr_t)c->data;
    /* The compute type is about fp32 factors; products of 16-bit ones are exact in fp32. */
    const int compute = a->dtype != GPU_F32 ? CUBLAS_COMPUTE_32F
                        : p->full           ? CUBLAS_COMPUTE_32F_PEDANTIC
                                            : g->compute;
    const cublasStatus_t status =
        p->count > 1 ? g->blas->cublasGemmStridedBatchedEx(
                           g->handle, op_of(b), op_of(a), n, m, k, &alpha, b->data, type_of(b),
                           (int)b->stride, (long long)b->next, a->data, type_of(a), (int)a->stride,
                           (long long)a->next, &beta, out, type_of(c), (int)c->stride,
                           (long long)c->next, (int)p->count, compute, CUBLAS_GEMM_DEFAULT)
                     : g->blas->cublasGemmEx(g->handle, op_of(b), op_of(a), n, m, k, &alpha,
                                             b->data, type_of(b), (int)b->stride, a->data,
                                             type_of(a), (int)a->stride, &beta, out, type_of(c),
                                             (int)c->stride, compute, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS)
        err_set(&g->err, SHD_EIO, "GPU %u: product [%d, %d] x [%d, %d]: %s (%d)", g->ordinal, m, k,
                k, n, cublas_status_name(status), status);
}
