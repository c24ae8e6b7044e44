/* backend.h: where the model is computed: this host, or a GPU. One table of functions, filled by
 * backend_host.c and cuda/backend_cuda.c; callers do not know which.
 *
 * Use, per micro-batch: set_batch(), forward() for the units next() names, losses(), backward() for
 * the same units in reverse. Arrays are the published ones as libshd hands them out, and its
 * gradients, fp32: host memory for the host, device memory for a GPU (or host memory there too,
 * where the session has no device: they are then copied back and forth, see cuda/).
 *
 * forward() and backward() return when they are done with the arrays: what is released or returned
 * afterwards is neither read nor written any more. Not so once the caller has named `stream` to
 * libshd, and says so in `ordered`: then they return when their work is queued there, and an error
 * may be that of earlier work.
 *
 * One thread at a time. Errors: SHD_EIO the device failed, with what and why; the host has none.
 */
#ifndef GPT_BACKEND_H
#define GPT_BACKEND_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/shape.h"

struct backend;

/* Arrays of one unit, and of the one it uses; all borrowed. */
struct backend_arrays {
    const void *params, *used; /* of the published dtype; used: NULL when it uses none */
    float *grad, *used_grad;   /* backward: NULL when frozen. As gpt_backward() has it */
};

struct backend_ops {
    /* windows: [batch, seq + 1] bytes, copied. */
    int (*set_batch)(struct backend *b, const uint8_t *windows, struct shd_err *e);
    int (*forward)(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                   struct shd_err *e);
    int (*backward)(struct backend *b, uint32_t unit, const struct backend_arrays *a,
                    struct shd_err *e);
    /* As gpt_next(). */
    uint32_t (*next)(const struct backend *b, uint32_t unit);
    /* A unit's published array, elems of it, into out[elems] of the host. */
    int (*read)(struct backend *b, const void *params, uint64_t elems, float *out,
                struct shd_err *e);
    /* grad[0] = infinity: the test aid --inject-overflow. */
    int (*spoil)(struct backend *b, float *grad, struct shd_err *e);
    void (*free)(struct backend *b); /* NULL is a no-op */
};

struct backend { /* first member of each implementation's struct */
    const struct backend_ops *ops;
    double loss_scale;    /* of the batches to come, 1 at first; the caller's to set */
    const double *losses; /* [batch, seq] of the host, after the head's forward */
    void *stream;         /* for shd_set_stream(), borrowed; NULL: there is none */
    bool ordered;         /* the caller's to set: it was named */
    /* Of activations and scratch: what is, or would be, allocated without and with recompute. */
    uint64_t activation_bytes[2];
    /* For the log: "GPU 0 (NVIDIA H200), cuBLAS 13.0, bf16 products"; "": nothing to say. */
    char describe[256];
};

struct backend_config {
    const struct gpt_shape *shape;   /* copied, as the next */
    const struct gpt_layout *layout; /* elems and offsets as the owners have them */
    uint32_t batch;                  /* sequences */
    bool recompute;                  /* activations of one layer at a time; see model.h */
    enum shd_dtype publish;          /* of params */
    enum gemm_kind gemm;             /* host: gemm_init() was called */
    struct pool *pool;               /* host; borrowed until free() */
    uint32_t device;                 /* GPU: CUDA ordinal */
    bool tf32;                       /* GPU: fp32 products with factors rounded to TF32 */
    bool staged;                     /* GPU: arrays are the host's */
};

/* Mean of the losses, [batch, seq], in nats per byte. */
static inline double backend_loss(const struct backend *b, uint64_t rows)
{
    double sum = 0;
    for (uint64_t i = 0; i < rows; i++)
        sum += b->losses[i];
    return sum / (double)rows;
}

/* Elements of the largest unit. */
static inline uint64_t backend_elems_max(const struct gpt_layout *layout)
{
    uint64_t max = 0;
    for (int kind = 0; kind < GPT_UNIT_KINDS; kind++)
        max = layout->elems[kind] > max ? layout->elems[kind] : max;
    return max;
}

#endif
