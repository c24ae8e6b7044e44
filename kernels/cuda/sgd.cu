/* SGD with momentum: formula, order and source in kernels/cpu/op_sgd.h, whose bits these are. */
#include "kernels/cuda/update.cuh"

struct sgd {
    static const bool has_v = false;
    DEVICE void step(const struct cuda_rates &c, float grad, float &p, float &m, float &v)
    {
        (void)v;
        const float g = grad * c.scale;
        m = fmaf(c.beta1, m, g);
        p = fmaf(c.keep, p, -(c.rate * m));
    }
};

KERNEL_BOUNDS(shd_sgd, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<sgd>(a);
}
