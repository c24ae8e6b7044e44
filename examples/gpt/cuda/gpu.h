/* gpu.h: one GPU as this program uses it: a stream, the kernels of kernels.cu, cuBLAS, memory.
 *
 * Everything but gpu_finish() only queues work, in order, on one stream of our own. The first thing
 * that goes wrong is kept, what is queued after it is not, and gpu_finish() tells (or
 * gpu_queued()): so callers write down the sequence and check once.
 *
 * One thread at a time. The context is the device's primary one, which libshd uses as well.
 */
#ifndef GPT_CUDA_GPU_H
#define GPT_CUDA_GPU_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/cuda/args.h"
#include "examples/gpt/cuda/cublas.h"
#include "proto/gpu/cuda.h"

/* X(kernel): gpt_gpu_KERNEL takes a struct gpu_KERNEL. */
#define GPU_KERNELS_X(X) \
    X(embed)             \
    X(embed_tokens)      \
    X(embed_sum)         \
    X(embed_positions)   \
    X(norm)              \
    X(norm_grad)         \
    X(norm_columns)      \
    X(columns)           \
    X(columns_sum)       \
    X(to_heads)          \
    X(from_heads)        \
    X(bias_gelu)         \
    X(residual)          \
    X(softmax)           \
    X(softmax_grad)      \
    X(cross_entropy)     \
    X(route)             \
    X(route_count)       \
    X(route_first)       \
    X(route_place)       \
    X(route_grad)        \
    X(widen)             \
    X(expert_gather)     \
    X(expert_combine)    \
    X(expert_split)      \
    X(expert_scatter)

enum gpu_kernel {
#define GPU_ENUM(kernel) GPU_KERNEL_##kernel,
    GPU_KERNELS_X(GPU_ENUM)
#undef GPU_ENUM
        GPU_KERNELS
};

struct gpu {
    const struct cuda *cuda;
    const struct cublas *blas;
    uint32_t ordinal;
    CUdevice device;
    CUcontext context; /* owned, as what follows */
    CUmodule module;
    CUstream stream;
    cublasHandle_t handle;
    CUdeviceptr workspace; /* cuBLAS's */
    CUfunction kernels[GPU_KERNELS];
    int compute;        /* cublasComputeType of all products */
    struct shd_err err; /* the first one since gpu_finish() */
    char describe[192];
};

/* tf32: products of fp32 round their factors to TF32; else they are fp32 whatever the environment
 * says of cuBLAS. Errors: SHD_ENOTSUP no driver, device, cuBLAS or kernels, with what to do;
 * SHD_ENOMEM; SHD_EIO. */
int gpu_init(struct gpu *g, uint32_t ordinal, bool tf32, struct shd_err *e);
void gpu_deinit(struct gpu *g); /* waits for what is queued; of a zeroed one: no-op */

/* Before other calls when another context may have become current in this thread. */
void gpu_enter(struct gpu *g);

static inline uint64_t gpu_dtype_bytes(uint32_t dtype)
{
    return dtype == GPU_F32 ? 4 : 2;
}

/* Device memory, 256-byte aligned, contents undefined; NULL and *e when there is none. */
void *gpu_alloc(struct gpu *g, uint64_t bytes, const char *what, struct shd_err *e);
void gpu_free(struct gpu *g, void *memory); /* NULL is a no-op */

/* Memory of the host that copies at full speed; as above. */
void *gpu_host_alloc(struct gpu *g, uint64_t bytes, struct shd_err *e);
void gpu_host_free(struct gpu *g, void *memory);

/* Wait for all that was queued; the first error since the last call. */
int gpu_finish(struct gpu *g, struct shd_err *e);
/* The first error so far, without a wait. */
int gpu_queued(struct gpu *g, struct shd_err *e);

/* Queue: a kernel by its own struct, on blocks of GPU_THREADS. blocks 0: nothing. */
void gpu_launch(struct gpu *g, enum gpu_kernel kernel, uint64_t blocks, const void *args);

/* Blocks by element, by row and by column, as args.h has them. */
uint64_t gpu_blocks_elems(uint64_t elems);
uint64_t gpu_blocks_rows(uint64_t rows);
uint64_t gpu_blocks_cols(uint64_t cols, uint64_t chunks);

void gpu_copy(struct gpu *g, void *to, const void *from, uint64_t bytes);
void gpu_zero(struct gpu *g, void *to, uint64_t bytes);

/* A row-major matrix, and where the next of a batch is. */
struct gpu_matrix {
    const void *data;
    uint32_t dtype;  /* enum gpu_dtype */
    uint64_t stride; /* elements from row to row */
    uint64_t next;   /* elements to the next one of the batch */
    bool transposed; /* factors: use it as its transpose */
};

/* c[m, n] = a[m, k] b[k, n] + (add ? c : 0), count times; summed in fp32. Both factors have one
 * dtype; add: c is fp32. */
struct gpu_product {
    uint64_t m, n, k;
    struct gpu_matrix a, b, c;
    bool add;
    bool full;      /* of fp32 factors: not rounded, whatever tf32 says */
    uint64_t count; /* of the batch; 0 and 1: one */
};
void gpu_multiply(struct gpu *g, const struct gpu_product *p);

#endif
