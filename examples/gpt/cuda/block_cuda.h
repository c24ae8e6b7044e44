/* block_cuda.h: a dense block on a GPU, plain or with adapters, and any block's attention. */
#ifndef GPT_CUDA_BLOCK_CUDA_H
#define GPT_CUDA_BLOCK_CUDA_H

#include "examples/gpt/cuda/model_cuda.h"

/* Arrays of a unit, on the device; those of a block: `low` is the adapters', see model_layer.h. */
struct gpu_block_arrays {
    const void *base, *low;
    float *grad, *low_grad; /* NULL: frozen */
};

void gpu_model_block(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a);
void gpu_model_block_backward(struct gpu_model *m, uint32_t layer,
                              const struct gpu_block_arrays *a);

/* A block's x to mid and norm2; and from d1, the gradient of norm2, and dx, mid's, to x's in dx. */
void gpu_model_block_attention(struct gpu_model *m, struct gpu_acts *acts,
                               const struct gpu_block_arrays *a);
void gpu_model_block_attention_backward(struct gpu_model *m, struct gpu_acts *acts,
                                        const struct gpu_block_arrays *a);

/* A gradient [rows, cols] of a matrix's output: its bias's gradient, and itself as a factor. pre
 * NULL, or: times gelu'(pre). d may be of heads. */
struct gpu_gradient {
    const float *d, *pre;
    void *out;           /* T; NULL: no factor is wanted */
    uint64_t rows, cols; /* rows at most R */
    float *dbias;        /* NULL: frozen */
    uint64_t bias_cols;  /* of dbias: the first ones; 0: cols */
    bool heads;
};
void gpu_model_gradient(struct gpu_model *m, const struct gpu_gradient *io);

#endif
