/* The part of the table of operations about memory. */
#ifndef SHD_KERNELS_CUDA_MEMORY_H
#define SHD_KERNELS_CUDA_MEMORY_H

#include "kernels/cuda/device.h"

int cuda_segment_new(struct kern *k, const char *name, enum segment_kind kind, uint64_t bytes,
                     struct segment *ret_segment, struct shd_err *e);
int cuda_segment_map(struct kern *k, int fd, enum segment_kind kind, uint64_t bytes,
                     struct segment *at, struct segment *ret_segment, struct shd_err *e);
void cuda_segment_close(struct kern *k, struct segment *segment);
void *cuda_alloc(struct kern *k, uint64_t bytes);
void cuda_release(struct kern *k, void *memory, uint64_t bytes);
int cuda_pin(struct kern *k, void *base, uint64_t bytes, bool readonly, struct shd_err *e);
void cuda_unpin(struct kern *k, void *base);
uint64_t cuda_available(struct kern *k);

#endif
