/* The kernels of this folder as compiled by nvcc, for cuModuleLoadData(): a fatbin. */
#ifndef SHD_KERNELS_CUDA_IMAGE_H
#define SHD_KERNELS_CUDA_IMAGE_H

#include <stdint.h>

extern const unsigned char shd_cuda_kernels[];
extern const uint64_t shd_cuda_kernels_bytes; /* 0: this build was made without nvcc */

#endif
