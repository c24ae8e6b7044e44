/* image.c: see image.h; the build makes the array of kernels.cu. */
#include "examples/gpt/cuda/image.h"

#include <stddef.h>
#include <stdint.h>

extern const unsigned char gpt_kernels_image[];
extern const uint64_t gpt_kernels_image_bytes;

const void *gpt_cuda_image(void)
{
    static const uint64_t none[8];
    return gpt_cuda_image_is_empty() ? (const void *)none : gpt_kernels_image;
}

bool gpt_cuda_image_is_empty(void)
{
    return gpt_kernels_image_bytes == 0;
}
