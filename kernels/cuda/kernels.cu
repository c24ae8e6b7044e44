/* Every kernel, as one translation unit: what the image that is embedded in the library is made
 * of, and what the emulation registers. */
#include "kernels/cuda/accumulate.cu"
#include "kernels/cuda/cast.cu"
#include "kernels/cuda/fill.cu"
#include "kernels/cuda/sumsq.cu"
#include "kernels/cuda/trail_begin.cu"
#include "kernels/cuda/update.cu"
