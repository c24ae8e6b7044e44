/* layer_cuda.h: a layer on a GPU: dense, with adapters, or with experts. */
#ifndef GPT_CUDA_LAYER_CUDA_H
#define GPT_CUDA_LAYER_CUDA_H

#include "examples/gpt/cuda/model_cuda.h"

/* Arrays of a unit, on the device; those of a block: `low` is the adapters', see model_layer.h. */
struct gpu_block_arrays {
    const void *base, *low;
    float *grad, *low_grad; /* NULL: frozen */
};

void gpu_model_block(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a);
void gpu_model_block_backward(struct gpu_model *m, uint32_t layer,
                              const struct gpu_block_arrays *a);

/* A block with experts: attention and router, which leaves the counts in m->routes once the stream
 * is waited for; then each expert that has rows. Backward in reverse: experts, then the router. All
 * forwards may run again with the same result. */
void gpu_model_router(struct gpu_model *m, uint32_t layer, const struct gpu_block_arrays *a);
void gpu_model_router_backward(struct gpu_model *m, uint32_t layer,
                               const struct gpu_block_arrays *a);
void gpu_model_expert(struct gpu_model *m, struct gpt_unit u, const void *params);
void gpu_model_expert_backward(struct gpu_model *m, struct gpt_unit u, const void *params,
                               float *grad);

/* Rows of an expert, of the batch whose router's forward ran last; 0: it takes no part. */
uint64_t gpu_model_expert_rows(const struct gpu_model *m, struct gpt_unit u);

#endif
