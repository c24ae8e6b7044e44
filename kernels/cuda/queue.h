/* The device thread: ops in order, launched ahead by parts, reported in order. */
#ifndef SHD_KERNELS_CUDA_QUEUE_H
#define SHD_KERNELS_CUDA_QUEUE_H

#include "kernels/cuda/device.h"

/* Start the device thread. SHD_ENOMEM. */
int cuda_queue_start(struct cuda_kern *k, struct shd_err *e);

/* Run what is queued, then end the thread, if it was started. */
void cuda_queue_stop(struct cuda_kern *k);

/* Queue a copy of op. SHD_EBUSY when KERN_QUEUE_MAX are queued. Any thread. */
int cuda_queue_push(struct cuda_kern *k, const struct cuda_op *op, struct shd_err *e);

#endif
