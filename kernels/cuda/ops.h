/* The CUDA device's operations. */
#ifndef SHD_KERNELS_CUDA_OPS_H
#define SHD_KERNELS_CUDA_OPS_H

#include "kernels/kern.h"

/* All of the table but UUID and free, which are one device's. */
extern const struct kern_ops cuda_ops;

#endif
