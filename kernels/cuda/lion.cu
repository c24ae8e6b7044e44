/* Lion: formula, order and source in kernels/cpu/op_lion.h, whose bits these are. */
#include "kernels/cuda/update.cuh"

struct lion {
    static const bool has_v = false;
    DEVICE void step(const struct cuda_rates &c, float grad, float &p, float &m, float &v)
    {
        (void)v;
        const float g = grad * c.scale;
        const float mix = fmaf(c.beta1, m, c.rest1 * g);
        const float u = mix > 0 ? c.rate : mix < 0 ? -c.rate : 0;
        p = fmaf(c.keep, p, -u);
        m = fmaf(c.beta2, m, c.rest2 * g);
    }
};

KERNEL_BOUNDS(shd_lion, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<lion>(a);
}
