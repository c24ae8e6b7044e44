/* A CUDA device for tests that were written for the host, as it is: for what it refuses. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/cuda/cuda.h"
#include "kernels/kern.h"

struct kern *device_extra_new(void);

struct kern *device_extra_new(void)
{
    struct kern *k = NULL;
    struct shd_err e = { 0 };
    if (kern_cuda_new(0, &k, &e) != SHD_OK) {
        fprintf(stderr, "no CUDA device: %s\n", e.text);
        exit(1);
    }
    return k;
}
