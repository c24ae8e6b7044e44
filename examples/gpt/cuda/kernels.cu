/* Every kernel of the worker, as one translation unit: what the image is made of, and what the
 * emulation registers. */
#include "examples/gpt/cuda/gpt_kernels.cu"
#include "examples/gpt/cuda/moe_kernels.cu"
