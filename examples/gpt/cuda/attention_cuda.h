/* attention_cuda.h: causal self-attention on a GPU. */
#ifndef GPT_CUDA_ATTENTION_CUDA_H
#define GPT_CUDA_ATTENTION_CUDA_H

#include "examples/gpt/cuda/model_cuda.h"

/* Rows of so many parts [R, C], with a bias or NULL, to T heads of each: see struct gpu_to_heads.
 */
void gpu_model_to_heads(struct gpu_model *m, const float *in, const void *bias, uint32_t parts,
                        void *out);
/* acts->heads to acts->att. */
void gpu_model_attention(struct gpu_model *m, struct gpu_acts *acts);
/* d1, the gradient of att, to m->dheads. */
void gpu_model_attention_backward(struct gpu_model *m, struct gpu_acts *acts);

#endif
