/* backend_cuda.h: the model on a GPU as a backend. */
#ifndef GPT_CUDA_BACKEND_CUDA_H
#define GPT_CUDA_BACKEND_CUDA_H

#include "examples/gpt/backend.h"

/* Errors: SHD_ENOTSUP no driver, no such device, no cuBLAS, or a build without GPU kernels, each
 * with what to do; SHD_ENOMEM on the device, with the bytes; SHD_EIO. */
int backend_cuda_new(const struct backend_config *config, struct backend **ret_backend,
                     struct shd_err *e);

#endif
