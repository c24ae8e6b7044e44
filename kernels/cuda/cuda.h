/* A CUDA device: its stream, over memory of the GPU. */
#ifndef SHD_KERNELS_CUDA_CUDA_H
#define SHD_KERNELS_CUDA_CUDA_H

#include "kernels/kern.h"

/* Start device `ordinal` (of those that CUDA_VISIBLE_DEVICES leaves). Errors:
 * SHD_ENOTSUP no driver, no such device, or one that is too old or cannot share memory, named;
 * SHD_ENOMEM; SHD_EIO. */
int kern_cuda_new(uint32_t ordinal, struct kern **ret_kern, struct shd_err *e);

#endif
