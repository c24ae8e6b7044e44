/* AdamW: formula, order and source in kernels/cpu/op_adamw.h, whose bits these are. */
#include "kernels/cuda/update.cuh"

struct adamw {
    static const bool has_v = true;
    DEVICE void step(const struct cuda_rates &c, float grad, float &p, float &m, float &v)
    {
        const float g = grad * c.scale;
        m = fmaf(c.rest1, g - m, m);
        const float h = c.rest2 * g;
        v = fmaf(h, g, c.beta2 * v);
        const float s = fmaf(sqrtf(v), c.unbias, c.eps);
        const float u = c.rate * (m / s);
        p = fmaf(c.keep, p, -u);
    }
};

KERNEL_BOUNDS(shd_adamw, struct cuda_update, CUDA_THREADS, 4)
{
    update_tiles<adamw>(a);
}
