/* image.h: the compiled kernels. */
#ifndef GPT_CUDA_IMAGE_H
#define GPT_CUDA_IMAGE_H

#include <stdbool.h>

/* The kernels' image for cuModuleLoadData(). A build without nvcc has zeros, which only the tests'
 * stand-in for the driver loads. */
const void *gpt_cuda_image(void);
bool gpt_cuda_image_is_empty(void);

#endif
